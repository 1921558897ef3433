"""The command `fp8jax`.

fp8jax chart      the precision chart, read back from compiled programs
fp8jax doctor     what this machine multiplies in FP8, and whether a program does what its report says
fp8jax plan       bytes on each device of a training step, predicted
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
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
    _add_plan(commands.add_parser("plan", help="bytes on each device of a training step, predicted"))
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
        "Nothing is compiled, and no device is touched. A row for each recipe, stage and number."
    )
    _add_model(plan)
    plan.add_argument("--recipe", nargs="+", default=["bf16", "O2"], metavar="RECIPE")
    plan.add_argument(
        "--zero", nargs="+", type=_whole, default=[0], metavar="STAGE", help="0 to 3 (default 0)"
    )
    plan.add_argument("--devices", nargs="+", type=_whole, default=[1], metavar="N", help="(default 1)")
    plan.add_argument(
        "--target", help="a GPU: h100, h200, b200 or l40s; by default a processor like this one"
    )
    plan.add_argument(
        "--lora-rank", type=_whole, metavar="RANK", help="train adapters of this rank, not the model"
    )
    plan.add_argument("--paper", action="store_true", help="FP8-LM's settings, next to its figures")
    plan.add_argument("--json", action="store_true", help="print JSON, in bytes")
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
    from fp8jax.memory import subject

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
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not 1 <= args.devices <= 1024:
        raise ValueError(f"`--devices`: expected 1 to 1024; got {args.devices}")
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    from fp8jax import chart

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
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from fp8jax.doctor import gemms, machine

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
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from fp8jax.memory import advice, paper, plan, report

    unused = _given(args, "recipe", "zero", "devices", "target", "lora_rank", *_MODEL) if args.paper else []
    if unused:
        raise ValueError(f"--paper has settings of its own; leave {_flags(unused)} out")
    if args.paper:
        rows = paper.rows()
        print(json.dumps(rows, indent=1) if args.json else report.text(rows))
        return 0
    for recipe in args.recipe:
        Recipe.parse(recipe)
    of = _subject(args)
    models = {recipe: _adapted(of.model, recipe, args.lora_rank) for recipe in args.recipe}
    plans = [
        plan(
            models[recipe], recipe, *of.inputs, loss=of.loss, devices=devices, stage=stage, target=args.target
        )
        for recipe, stage, devices in itertools.product(args.recipe, args.zero, args.devices)
    ]
    if args.json:
        print(json.dumps(report.as_data(plans), indent=1))
        return 0
    print(report.table(plans))
    found = [line for recipe in models for line in advice.of_model(models[recipe], recipe, of.inputs)]
    if found:
        print("\n".join(("\nDimensions to change:", *dict.fromkeys(found))))
    return 0


def _adapted(model: Any, recipe: str, rank: int | None) -> Any:
    """The model, with adapters if they have a rank."""
    if rank is None:
        return model
    from fp8jax import models
    from fp8jax.rewrite.lora import LoRA

    return models.transform(model, recipe, lora=LoRA(rank=rank))


if __name__ == "__main__":
    sys.exit(main())
