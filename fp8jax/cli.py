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


class _Misuse(Exception):
    """A command line that is none."""


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage with an error; here an error is one line."""

    def error(self, message: str) -> NoReturn:
        raise _Misuse(f"{self.prog}: {message[:400]}; {self.prog} --help lists the options")


def _whole(text: str) -> int:
    """A whole number that devices count to; what it must be at least, its user says."""
    try:
        if abs(int(text)) < 2**31:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number below {2**31}; got {text[:50]!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = _Parser(prog="fp8jax", description="FP8 training for JAX and Flax.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_chart(commands.add_parser("chart", help="the precision chart, read back from compiled programs"))
    _add_doctor(commands.add_parser("doctor", help="what runs natively here; --compile checks a program"))
    _add_plan(commands.add_parser("plan", help="bytes on each device of a training step, compiled"))
    try:
        args = parser.parse_args(argv)
    except _Misuse as error:
        print(error, file=sys.stderr)
        return 2
    try:
        status = args.run(args)
        sys.stdout.flush()  # a closed pipe shows now, not at the interpreter's end
        return status
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return 141  # as a shell counts what a closed pipe ended
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"fp8jax {args.command}: {' '.join(str(error).split())[:1000]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fp8jax {args.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if ":" not in getattr(args, "model", ""):
            raise
        # A model of the user's own may raise anything.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"fp8jax {args.command}: --model {args.model}: {reason[:1000]}", file=sys.stderr)
        return 2


def _add_chart(chart: argparse.ArgumentParser) -> None:
    chart.add_argument("recipes", nargs="*", default=list(PRESETS), help="by default all levels")
    chart.add_argument("--target", help="a GPU that is not here: h100, h200, b200 or l40s")
    chart.add_argument("--devices", type=_whole, default=8, help="that share the batch (default 8)")
    chart.add_argument("--json", action="store_true", help="print JSON")
    chart.add_argument("--png", metavar="FILE", help="draw the chart, too")
    chart.set_defaults(run=run_chart)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.description = (
        "A row for each recipe, stage and number of devices: the peak of the compiled step, which is not "
        "run. Finished rows stay in fp8jax/plan of the user's cache folder."
    )
    _add_model(plan)
    plan.add_argument("--recipe", nargs="+", default=["bf16", "O2"], metavar="RECIPE")
    plan.add_argument(
        "--zero", nargs="+", type=_whole, default=[0], metavar="STAGE", help="0 to 3 (default 0)"
    )
    plan.add_argument("--devices", nargs="+", type=_whole, default=[1], metavar="N", help="(default 1)")
    plan.add_argument(
        "--target", help="a GPU that need not be here: h100, h200, b200 or l40s; by default this machine"
    )
    plan.add_argument(
        "--lora-rank", type=_whole, metavar="RANK", help="train adapters of this rank, not the model"
    )
    plan.add_argument("--paper", action="store_true", help="FP8-LM's settings, next to its figures")
    plan.add_argument("--json", action="store_true", help="print JSON, in bytes")
    plan.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True, help="of finished rows")
    plan.set_defaults(run=run_plan, default_of=plan.get_default)


def _add_model(command: argparse.ArgumentParser) -> None:
    """The words for a model, see `_subject`."""
    command.add_argument(
        "--model",
        default="gpt",
        help="gpt, gpt-125m, gpt-350m, gpt-7b, gpt-13b, gpt-175b, or package.module:function, which returns "
        "(model, inputs) or (model, inputs, loss), inputs being one device's",
    )
    for name, what in _SIZES.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=_whole, help=f"of a gpt: {what}")
    command.add_argument(
        "--batch", type=_whole, default=1, help="of a gpt: sequences on each device (default 1)"
    )
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of a gpt")
    command.add_argument(
        "--remat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of a gpt: keep only products for the backward",
    )


def _subject(args: argparse.Namespace) -> Any:
    from fp8jax.inspect.memory import subject

    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    if ":" in args.model and sizes:
        raise ValueError(f"{_flags(sizes)} is of a gpt, and {args.model} has its own sizes; leave it out")
    return subject.subject(args.model, batch=args.batch, dtype=args.dtype, remat=args.remat, **sizes)


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    """Which of a command's options are not as they are by default."""
    return [name for name in names if getattr(args, name) != args.default_of(name)]


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.description = (
        "What the devices here multiply natively, versions, what to install for what. With --compile: the "
        "GEMMs of one gradient step, layer by layer, next to the report."
    )
    doctor.add_argument("--target", help="a GPU that is not here: h100, h200, b200 or l40s")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--compile", action="store_true", help="check a program; what follows is for it")
    doctor.add_argument("--recipe", nargs="+", default=["O2"], metavar="RECIPE", help="(default O2)")
    _add_model(doctor)
    doctor.set_defaults(run=run_doctor, default_of=doctor.get_default)


def run_chart(args: argparse.Namespace) -> int:
    """Prints the chart; 1 if a program is not what its recipe says."""
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
    where = args.target or jax.devices()[0].device_kind
    if args.json:
        print(json.dumps(chart.as_data(rows), indent=1))
    else:
        print(f"{chart.table(rows)}\n\nread from a train step compiled for {args.devices} x {where}:\n")
        print(chart.evidence(rows))
    if args.png:
        chart.picture(rows, args.png, f"read from a train step compiled for {args.devices} x {where}")
    return 1 if any(row.differences for row in rows) else 0


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what there is, or how programs compare; 1 if something is wrong."""
    if args.target:
        _default_to_cpu()
    from fp8jax.inspect import gemms, machine

    unused = [] if args.compile else _given(args, "recipe", *_MODEL)
    if unused:
        raise ValueError(f"{_flags(unused)} is for --compile; add that or leave it out")
    if not args.compile:
        found = machine.examine(args.target)
        print(json.dumps(machine.as_data(found), indent=1) if args.json else machine.text(found))
        return 1 if found.troubles else 0
    for recipe in args.recipe:
        Recipe.parse(recipe)
    of = _subject(args)
    checked = {recipe: gemms.check(of, recipe, target=args.target) for recipe in args.recipe}
    if args.json:
        print(json.dumps({recipe: gemms.as_data(rows) for recipe, rows in checked.items()}, indent=1))
    else:
        print("\n\n".join(gemms.text(rows, recipe, args.target) for recipe, rows in checked.items()))
    return 1 if any(row.complaint for rows in checked.values() for row in rows) else 0


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plans."""
    _default_to_cpu()
    # XLA warns at length of programs that a GPU does not hold, which the table shows. "1" is what JAX sets.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from fp8jax.inspect.memory import advice, cache, paper, report

    folder = cache.default_folder() if args.cache else None
    unused = _given(args, "recipe", "zero", "devices", "target", "lora_rank", *_MODEL) if args.paper else []
    if unused:
        raise ValueError(f"--paper has settings of its own; leave {_flags(unused)} out")
    if args.paper:
        with _progress(len(paper.SETTINGS)) as show:
            rows = paper.rows(cache=folder, on_row=show)
        print(json.dumps(rows, indent=1) if args.json else report.text(rows))
        return 0
    for recipe in args.recipe:
        Recipe.parse(recipe)
    of = _subject(args)
    models = {recipe: _adapted(of.model, recipe, args.lora_rank) for recipe in args.recipe}
    plans = _plans(args, of, models, folder)
    if args.json:
        print(json.dumps(report.as_data(plans), indent=1))
        return 0
    print(report.table(plans))
    found = [line for recipe in models for line in advice.of_model(models[recipe], recipe, of.inputs)]
    if found:
        print("\n".join(("\nDimensions to change:", *dict.fromkeys(found))))
    return 0


def _plans(args: argparse.Namespace, of: Any, models: dict[str, Any], folder: Any) -> list[Any]:
    """A plan for each recipe, stage and number of devices."""
    from fp8jax.comm import Zero
    from fp8jax.inspect.memory import plan
    from fp8jax.inspect.targets import here, mesh

    if args.target is None:
        _set_cpu_devices(max(args.devices))
    cases = list(itertools.product(args.recipe, args.zero, args.devices))
    for recipe, stage, devices in cases:  # all are checked before the first is compiled
        _check_devices(devices)
        Zero(mesh(args.target, devices) if args.target else here(devices), recipe, stage)
    plans = []
    with _progress(len(cases)) as show:
        for recipe, stage, devices in cases:
            show(f"{recipe}, ZeRO {stage}, {devices} x {args.target or 'device'}")
            options = {"devices": devices, "stage": stage, "target": args.target, "cache": folder}
            plans.append(plan(models[recipe], recipe, *of.inputs, loss=of.loss, **options))
    return plans


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
    """Takes the CPU for so many devices, unless JAX has looked for devices already."""
    import jax

    # Never fewer than there were to be.
    if devices > max(1, jax.config.values["jax_num_cpu_devices"]):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)


def _adapted(model: Any, recipe: str, rank: int | None) -> Any:
    """The model, with adapters if they have a rank."""
    if rank is None:
        return model
    from fp8jax import adapters
    from fp8jax.rewrite.lora import LoRA

    return adapters.transform(model, recipe, lora=LoRA(rank=rank))


if __name__ == "__main__":
    sys.exit(main())
