"""What a benchmark prints and keeps: one table for people, the same rows as JSON for programs."""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "qwix", "ml_dtypes")


def add_options(parser: argparse.ArgumentParser) -> None:
    """--json, --record and --tiny, which every benchmark has."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--record", metavar="DIR", help="also keep the result in DIR/DATE_DEVICE_NAME/")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, aligned, under their keys; the first column to the left, numbers to the right."""
    titles = list(rows[0])
    cells = [titles, *([_cell(row[title]) for title in titles] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
    lines = []
    for line in cells:
        first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)]).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of a page."""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles), *([_cell(row.get(title)) for title in titles] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def finish(
    name: str,
    device: str,
    sections: dict[str, list[dict[str, Any]]],
    args: argparse.Namespace,
    packages: tuple[str, ...] = PACKAGES,
) -> None:
    """Prints the sections (title -> rows), and records them, with the packages' versions, if asked to."""
    if args.json:
        print(json.dumps(sections, indent=2))
    else:
        print("\n\n".join(f"{title}\n{table(rows)}" for title, rows in sections.items()))
    if args.record:
        about = environment(device, packages)
        folder = pathlib.Path(args.record) / f"{about['date']}_{device}_{name}"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": about, "results": sections}, indent=2)
        (folder / "result.json").write_text(text + "\n")


def environment(device: str, packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """What a record says of where it was made: date, device, command, commit, versions."""
    here = pathlib.Path(sys.argv[0]).resolve()
    program = f"examples/{'' if here.parent.name == 'examples' else 'bench/'}{here.name}"
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "command": " ".join(["python", program, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """This machine's processor in a few letters: "cpu2" for two cores of any kind."""
    import os

    return f"cpu{os.cpu_count()}"


def _commit() -> str:
    """The commit that ran, "-dirty" if the tree has changes, "" outside a repository."""
    here = pathlib.Path(__file__).parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    run = subprocess.run(git, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else ""
