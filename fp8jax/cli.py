"""The command `fp8jax`.

fp8jax chart      the precision chart, read back from compiled programs
fp8jax doctor     what this machine multiplies in FP8, and whether a program does what its report says
fp8jax plan       bytes on each device of a training step, compiled
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from fp8jax.recipe import PRESETS, Recipe

_SIZES = {
    "layers": "blocks",
    "heads": "attention heads",
    "width": "channels",
    "context": "tokens of a sequence",
    "vocabulary": "of the head (default 50304)",
    "experts": "of a mixture in the place of each MLP",
    "top_k": "experts of a token (default 2)",
}
_MODEL = ("model", *_SIZES, "batch", "dtype", "remat")
_TARGET = "a GPU that is not here: h100, h200, b200 or l40s; by default this machine"


class _Misuse(Exception):
    """A command line that cannot be parsed."""


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line, where argparse prints its usage, too."""

    def error(self, message: str) -> NoReturn:
        raise _Misuse(f"{self.prog}: {message[:400]}; {self.prog} --help lists the options")


def _integer(text: str) -> int:
    """An integer of 32 bits. Its lower limit is checked where it is used."""
    try:
        if abs(int(text)) < 2**31:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number below {2**31}; got {text[:50]!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    try:
        args = _parser().parse_args(argv)
    except _Misuse as error:
        print(error, file=sys.stderr)
        return 2
    try:
        status = args.run(args)
        sys.stdout.flush()  # a closed pipe raises here, not at the interpreter's end
        return status
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return 141  # the shell's status of a closed pipe
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        message, status = " ".join(str(error).split())[:1000], 2
    except Exception as error:  # the user's own model may raise anything
        if ":" not in getattr(args, "model", ""):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        message, status = f"--model {args.model}: {reason}", 2
    print(f"fp8jax {args.command}: {message}", file=sys.stderr)
    return status


def _parser() -> _Parser:
    parser = _Parser(prog="fp8jax", description="FP8 training for JAX and Flax.")
    commands = parser.add_subparsers(dest="command", required=True)

    chart = commands.add_parser("chart", help="the precision chart, read back from compiled programs")
    chart.add_argument("recipes", nargs="*", default=list(PRESETS), help="by default all levels")
    chart.add_argument("--devices", type=_integer, default=8, help="that share the batch (default 8)")
    chart.add_argument("--png", metavar="FILE", help="draw the chart, too")

    doctor = commands.add_parser("doctor", help="what runs natively here; --compile checks a program")
    doctor.description = (
        "What the devices here multiply natively, versions, what to install for what. With --compile: the "
        "GEMMs of one gradient step, layer by layer, next to the report."
    )
    doctor.add_argument("--compile", action="store_true", help="check a program; what follows is for it")
    doctor.add_argument("--recipe", nargs="+", default=["O2"], metavar="RECIPE", help="(default O2)")
    _add_model(doctor)

    plan = commands.add_parser("plan", help="bytes on each device of a training step, compiled")
    plan.description = (
        "A row for each recipe, stage and number of devices: the peak of the compiled step, which does not "
        "run. Finished rows stay in fp8jax/plan of the user's cache folder."
    )
    _add_model(plan)
    plan.add_argument("--recipe", nargs="+", default=["bf16", "O2"], metavar="RECIPE")
    plan.add_argument(
        "--zero", nargs="+", type=_integer, default=[0], metavar="STAGE", help="0 to 3 (default 0)"
    )
    plan.add_argument("--devices", nargs="+", type=_integer, default=[1], metavar="N", help="(default 1)")
    plan.add_argument("--lora-rank", type=_integer, metavar="RANK", help="train adapters of this rank only")
    plan.add_argument("--paper", action="store_true", help="FP8-LM's settings, next to its figures")
    plan.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True, help="of finished rows")

    for command, run in ((chart, run_chart), (doctor, run_doctor), (plan, run_plan)):
        command.add_argument("--target", help=_TARGET)
        command.add_argument("--json", action="store_true", help="print JSON, in bytes")
        command.set_defaults(run=run, default_of=command.get_default)
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    """The options of `_subject`."""
    command.add_argument(
        "--model",
        default="gpt",
        help="gpt, gpt-125m, gpt-350m, gpt-7b, gpt-13b, gpt-175b, or package.module:function, which returns "
        "(model, inputs) or (model, inputs, loss), inputs being one device's",
    )
    for name, meaning in _SIZES.items():
        command.add_argument(_flags([name]), type=_integer, help=f"of a gpt: {meaning}")
    command.add_argument(
        "--batch", type=_integer, default=1, help="of a gpt: sequences on each device (default 1)"
    )
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of a gpt")
    command.add_argument(
        "--remat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of a gpt: keep only the outputs of GEMMs for the backward",
    )


def _subject(args: argparse.Namespace) -> Any:
    from fp8jax.inspect.subject import subject

    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    if ":" in args.model and sizes:
        raise ValueError(f"{_flags(sizes)} is of a gpt, and {args.model} has its own sizes; leave it out")
    for recipe in args.recipe:
        Recipe.parse(recipe)
    return subject(args.model, batch=args.batch, dtype=args.dtype, remat=args.remat, **sizes)


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _refuse(args: argparse.Namespace, names: Iterable[str], message: str) -> None:
    """Raises ValueError if one of these options is not as it is by default."""
    if given := [name for name in names if getattr(args, name) != args.default_of(name)]:
        raise ValueError(message.format(_flags(given)))


def _print(args: argparse.Namespace, data: Any, text: Callable[[], str]) -> None:
    print(json.dumps(data, indent=1) if args.json else text())


def run_chart(args: argparse.Namespace) -> int:
    """Prints the chart; 1 if a program differs from its recipe."""
    if args.target:
        _default_to_cpu()
    _check_devices(args.devices)
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    from fp8jax.inspect import chart

    recipes = [Recipe.parse(recipe) for recipe in args.recipes]
    if args.png:
        chart.check_picture(args.png)
    rows = [chart.measure(recipe, target=args.target, devices=args.devices) for recipe in recipes]
    device = args.target or jax.devices()[0].device_kind
    title = f"read from a train step compiled for {args.devices} x {device}"
    _print(args, chart.as_data(rows), lambda: f"{chart.table(rows)}\n\n{title}:\n\n{chart.evidence(rows)}")
    if args.png:
        chart.picture(rows, args.png, title)
    return int(any(row.differences for row in rows))


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what this machine has, or a program's GEMMs; 1 if there is a trouble or a complaint."""
    if args.target:
        _default_to_cpu()
    from fp8jax.inspect import device, gemms

    if not args.compile:
        _refuse(args, ("recipe", *_MODEL), "{} is for --compile; add that or leave it out")
        machine = device.examine(args.target)
        _print(args, device.as_data(machine), lambda: device.text(machine))
        return int(bool(machine.troubles))
    of = _subject(args)
    checked = {recipe: gemms.check(of, recipe, target=args.target) for recipe in args.recipe}
    texts = (gemms.text(rows, recipe, args.target) for recipe, rows in checked.items())
    data = {recipe: gemms.as_data(rows) for recipe, rows in checked.items()}
    _print(args, data, lambda: "\n\n".join(texts))
    return int(any(row.complaint for rows in checked.values() for row in rows))


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plans."""
    _default_to_cpu()
    # XLA warns at length of programs larger than a GPU's memory, which the table shows. "1" is JAX's setting.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from fp8jax.inspect import memory, tables
    from fp8jax.inspect.memory import cache, paper

    folder = cache.default_folder() if args.cache else None
    if args.paper:
        given = ("recipe", "zero", "devices", "target", "lora_rank", *_MODEL)
        _refuse(args, given, "--paper has settings of its own; leave {} out")
        with _progress(len(paper.SETTINGS)) as show:
            rows = paper.rows(cache=folder, on_row=show)
        _print(args, rows, lambda: tables.records(rows))
        return 0
    of = _subject(args)
    models = {recipe: _adapted(of.model, recipe, args.lora_rank) for recipe in args.recipe}
    plans = _plans(args, of, models, folder)
    data = [{**plan._asdict(), "total": plan.total} for plan in plans]
    _print(args, data, lambda: "\n".join([memory.table(plans), *_advice(models, of.inputs)]))
    return 0


def _plans(args: argparse.Namespace, of: Any, models: dict[str, Any], folder: Any) -> list[Any]:
    """A plan for each recipe, stage and number of devices."""
    from fp8jax.comm import Zero
    from fp8jax.inspect import memory, targets

    if args.target is None:
        _set_cpu_devices(max(args.devices))
    cases = list(itertools.product(args.recipe, args.zero, args.devices))
    for recipe, stage, devices in cases:  # check all cases before the first is compiled
        _check_devices(devices)
        Zero(targets.mesh(args.target, devices), recipe, stage)
    plans = []
    with _progress(len(cases)) as show:
        for recipe, stage, devices in cases:
            show(f"{recipe}, ZeRO {stage}, {devices} x {args.target or 'device'}")
            options = {"devices": devices, "stage": stage, "target": args.target, "cache": folder}
            plans.append(memory.plan(models[recipe], recipe, *of.inputs, loss=of.loss, **options))
    return plans


def _advice(models: dict[str, Any], inputs: Any) -> list[str]:
    """Lines about dimensions that waste work."""
    from fp8jax.inspect.memory import advice
    from fp8jax.inspect.subject import report_of, transformed

    reports = [report_of(transformed(model, recipe), inputs) for recipe, model in models.items()]
    lines = dict.fromkeys(line for report in reports for line in advice.advise(report))
    return ["\nDimensions to change:", *lines] if lines else []


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """A function that shows which row of how many is compiled, on stderr if that is a terminal."""
    numbers = itertools.count(1)

    def write(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    try:
        yield lambda name: write(f"compiling {next(numbers)} of {count}: {name}")
    finally:
        write("")


def _check_devices(devices: int) -> None:
    if not 1 <= devices <= 1024:
        raise ValueError(f"`--devices`: expected 1 to 1024; got {devices}")


def _default_to_cpu() -> None:
    """Keeps JAX from looking for GPUs, unless the user named a platform."""
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _set_cpu_devices(devices: int) -> None:
    """Splits the CPU into at least so many devices, unless JAX has initialized its devices."""
    import jax

    if devices > max(1, jax.config.values["jax_num_cpu_devices"]):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)


def _adapted(model: Any, recipe: str, rank: int | None) -> Any:
    """The model, with LoRA adapters if a rank is given."""
    if rank is None:
        return model
    from fp8jax import adapters
    from fp8jax.rewrite.lora import LoRA

    return adapters.transform(model, recipe, lora=LoRA(rank=rank))


if __name__ == "__main__":
    sys.exit(main())
