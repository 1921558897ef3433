"""A benchmark's command line, its tables for people, and its records for programs."""

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Rows = list[dict[str, Any]]

PACKAGES = ("jax", "jaxlib", "flax", "qwix", "ml_dtypes")


def parse(
    doc: str | None,
    *,
    tiny: Mapping[str, Any] | None = None,
    choices: Mapping[str, Iterable[str]] | None = None,
    **defaults: Any,
) -> argparse.Namespace:
    """The command line: an option for each default, --json, --record and --tiny.

    Args:
        doc: the program's docstring, shown by --help.
        tiny: values that --tiny sets.
        choices: legal values, by option.
        defaults: by option, with its type; a list takes several values.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        legal = list(choices[name]) if choices and name in choices else None
        kind = type(default[0] if isinstance(default, list) else default)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=default,
            nargs="+" if isinstance(default, list) else None,
            choices=legal,
            metavar=name.upper(),
            help=f"{'one of ' + ', '.join(legal) + '; ' if legal else ''}by default {default}",
        )
    add_options(parser)
    args = parser.parse_args()
    if getattr(args, "rounds", 1) < 1:
        parser.error("--rounds must be at least 1")
    for name, value in (tiny or {}).items() if args.tiny else ():
        setattr(args, name, value)
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """--json, --record and --tiny."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--record", metavar="DIR", help="also keep the result in DIR/DATE_DEVICE_NAME/")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")


def table(rows: Rows) -> str:
    """The rows under their keys, columns after the first aligned to the right."""
    cells = [list(rows[0]), *([_cell(row[title]) for title in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown(rows: Rows) -> str:
    """The rows as a table in Markdown."""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles), *([_cell(row.get(title)) for title in titles] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def finish(
    name: str,
    device: str,
    sections: dict[str, Rows],
    args: argparse.Namespace,
    packages: tuple[str, ...] = PACKAGES,
    skipped: Mapping[str, str] | None = None,
    is_last: bool = True,
) -> None:
    """Prints the sections, rows by title, and with --record keeps them with the packages' versions.

    `skipped` says of what was not measured why. A benchmark that may be killed also calls it after each part,
    with `is_last` False, which only keeps the sections.
    """
    if is_last:
        for what, reason in (skipped or {}).items():
            print(f"not measured: {what}: {reason}", file=sys.stderr)
        if args.json:
            print(json.dumps(sections, indent=2))
        else:
            print("\n\n".join(f"{title}\n{table(rows)}" for title, rows in sections.items()))
    if args.record:
        about = environment(device, packages)
        folder = pathlib.Path(args.record) / f"{about['date']}_{device}_{name}"
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"environment": about, "results": sections, **({"skipped": skipped} if skipped else {})}
        text = json.dumps(kept, indent=2)
        part = folder / "result.json.part"  # a process that is killed leaves the record before
        part.write_text(text + "\n")
        part.replace(folder / "result.json")


def environment(device: str, packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Date, device, command, commit and versions of a run."""
    program = pathlib.Path(sys.argv[0]).resolve()
    folder = "examples/" if program.parent.name == "examples" else "examples/bench/"
    git = ["git", "-C", os.path.dirname(__file__) or ".", "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "command": " ".join(["python", f"{folder}{program.name}", *sys.argv[1:]]),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """This machine's CPU by its cores: "cpu2"."""
    return f"cpu{os.cpu_count()}"


def device() -> str:
    """The name of JAX's device: "h200", or the CPU's."""
    import jax

    kind = jax.devices()[0].device_kind.removeprefix("NVIDIA ")
    return cpu_name() if jax.default_backend() == "cpu" else kind.split()[0].lower()


def first_line(error: Exception) -> str:
    """An error in a line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:200]}"


def use_cpu_devices(count: int) -> None:
    """Splits the CPU into so many devices, or exits if the process has fewer already."""
    import jax

    with contextlib.suppress(RuntimeError):  # JAX has initialized its devices
        jax.config.update("jax_num_cpu_devices", count)
    if count > jax.device_count():
        sys.exit(f"--devices {count}: this process has {jax.device_count()} devices")


def side_by_side(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The function of each, in threads where JAX has a GPU: XLA compiles there on cores that idle."""
    import jax

    with concurrent.futures.ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else None) as pool:
        return list(pool.map(function, items))


def gemms(read: Any) -> dict[str, int]:
    """FP8 GEMMs of a `fp8jax.inspect.program.CompiledProgram`, and the others."""
    fp8 = sum(gemm.is_fp8 for gemm in read.gemms)
    return {"FP8 GEMMs": fp8, "other GEMMs": read.count() - fp8}
