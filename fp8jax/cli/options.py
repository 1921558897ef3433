"""The command line's options."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

import fp8jax
from fp8jax.cli import commands
from fp8jax.cli.model import add_model, integer


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line; argparse would print its usage, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message[:400]}; {self.prog} --help lists the options\n")


def _devices(text: str) -> int:
    if not 1 <= (devices := integer(text)) <= 1024:
        raise argparse.ArgumentTypeError(f"expected 1 to 1024; got {devices}")
    return devices


def parser() -> argparse.ArgumentParser:
    """The parser; a command's namespace has its function as `run`."""
    parser = _Parser(prog="fp8jax", description="FP8 training for JAX and Flax.")
    parser.add_argument("--version", action="version", version=f"fp8jax {fp8jax.__version__}")
    parsers = parser.add_subparsers(dest="command", required=True)
    for add in (_add_chart, _add_doctor, _add_plan, _add_estimate, _add_advise, _add_export, _add_compiler):
        add(parsers)
    return parser


def _add_chart(parsers: Any) -> None:
    command = parsers.add_parser("chart", help="the precision chart, read back from compiled programs")
    command.add_argument("recipes", nargs="*", help="by default all levels that the device has GEMMs for")
    command.add_argument("--devices", type=_devices, default=8, help="that share the batch (default 8)")
    command.add_argument(
        "--evidence", action="store_true", help="the arrays and operations of each cell, too"
    )
    command.add_argument("--png", metavar="FILE", help="draw the chart, too")
    command.add_argument(
        "--gradient-checkpointing",
        default="none",
        metavar="WHAT",
        help="of the layer whose residuals are read, as in transform (default none)",
    )
    _add_target(command, commands.run_chart)


def _add_doctor(parsers: Any) -> None:
    command = parsers.add_parser("doctor", help="what runs natively here; --compile checks a program")
    command.description = (
        "What the devices here multiply natively, versions, what to install for what. With --compile: the "
        "GEMMs of one gradient step, layer by layer, next to the report."
    )
    command.add_argument("--compile", action="store_true", help="check a program; what follows is for it")
    command.add_argument("--recipe", nargs="+", help="(default: a transformed model's, else fp8)")
    add_model(command)
    _add_target(command, commands.run_doctor)


def _add_plan(parsers: Any) -> None:
    command = parsers.add_parser("plan", help="bytes on each device of a training step, compiled")
    command.description = (
        "A row for each recipe, stage and number of devices: the peak of the compiled step, which does not "
        "run. Finished rows stay in fp8jax/plan of the user's cache folder."
    )
    add_model(command)
    command.add_argument("--recipe", nargs="+", help="(default: a transformed model's, else bf16 fp8)")
    command.add_argument(
        "--zero", nargs="+", type=integer, default=[0], metavar="STAGE", help="0 to 3 (default 0)"
    )
    command.add_argument("--devices", nargs="+", type=_devices, default=[1], metavar="N", help="(default 1)")
    command.add_argument(
        "--lora-rank", type=integer, metavar="RANK", help="train adapters of this rank only (default none)"
    )
    command.add_argument(
        "--cache", action=argparse.BooleanOptionalAction, default=True, help="of finished rows (default yes)"
    )
    _add_target(command, commands.run_plan)


def _add_estimate(parsers: Any) -> None:
    command = parsers.add_parser("estimate", help="time of a training step on a GPU that is not here")
    command.description = (
        "An estimate, from the compiled step: where its time goes by layer, and the speed-up of each recipe "
        "over bf16, with bounds. No GPU runs it. How kernels are timed: fp8jax.inspect.estimate.time."
    )
    add_model(command, "layer")
    command.add_argument(
        "--recipe",
        nargs="+",
        help="beside bf16 (default: a transformed model's alone, else te O2 block mxfp8 as the GPU has them)",
    )
    command.add_argument("--devices", type=_devices, default=1, metavar="N", help="of one host (default 1)")
    command.add_argument("--zero", type=integer, default=0, metavar="STAGE", help="0 to 3 (default 0)")
    command.add_argument(
        "--widths",
        nargs="+",
        type=integer,
        default=[],
        metavar="N",
        help="the speed-up at these widths, too, and the least that pays; heads are of 128 channels",
    )
    command.add_argument("--picture", metavar="FILE", help="draw where the time goes, too")
    _add_target(command, commands.run_estimate, "h200")


def _add_advise(parsers: Any) -> None:
    command = parsers.add_parser("advise", help="what to type: recipe, ZeRO stage, layers to keep out of FP8")
    command.description = (
        "Lines to paste. With --model: the recipe, stage and batch that fit the GPUs, by steps that are "
        "compiled and do not run, with twice the batch each time. With --statistics: the layers to keep out "
        "of FP8."
    )
    add_model(command, None, "the most that fit, up to 64")
    command.add_argument(
        "--statistics",
        nargs="+",
        default=[],
        metavar="PATH",
        help="of fp8jax.statistics, by their method save, of several batches oldest first; or a run's folder "
        "(default none)",
    )
    command.add_argument("--recipe", help="(default by the GPU, or the one of the model in the statistics)")
    command.add_argument("--devices", type=_devices, default=1, metavar="N", help="GPUs (default 1)")
    _add_target(command, commands.run_advise, "h100")


def _add_export(parsers: Any) -> None:
    command = parsers.add_parser("export", help="a run of fp8jax.train as a Hugging Face folder")
    command.description = (
        "Writes the newest checkpoint of a run as a Hugging Face folder for Transformers, vLLM "
        "or SGLang, and prints which kernels are unchanged. It needs no model, only the names and the config."
    )
    command.add_argument("source", metavar="RUN", help="the folder of the run, or of its checkpoints")
    command.add_argument("folder", metavar="FOLDER", help="a new or empty one")
    command.add_argument(
        "--mapping",
        required=True,
        help="from the names of the folder: gpt2, llama, mixtral or qwen3, or package.module:name, a "
        "fp8jax.checkpoints.NameMap",
    )
    command.add_argument("--config", required=True, metavar="FILE", help="the model's config.json")
    command.add_argument("--format", default="fp8", help="a name of fp8jax.checkpoints.FORMATS (default fp8)")
    command.set_defaults(run=commands.run_export)


def _add_compiler(parsers: Any) -> None:
    command = parsers.add_parser("install-compiler", help="XLA's compiler for GPUs, which --target needs")
    command.description = (
        "Downloads XLA's compiler for NVIDIA GPUs (about 120 MB) into a folder of this environment, by pip. "
        "--target loads it from there; no other program does."
    )
    command.set_defaults(run=commands.run_install_compiler)


def _add_target(
    command: argparse.ArgumentParser,
    function: Callable[[argparse.Namespace], int],
    default: str | None = None,
) -> None:
    meaning = "a GPU that is not here: h100, h200, b200 or l40s; by default"
    command.add_argument("--target", default=default, help=f"{meaning} {default or 'this machine'}")
    command.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    command.set_defaults(run=function, default_of=command.get_default)
