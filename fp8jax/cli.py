"""The command `fp8jax`.

fp8jax chart              the precision chart, read back from compiled programs
fp8jax doctor             what this machine multiplies in FP8, and whether a program does what its report says
fp8jax advise             what to type for a GPU: recipe, ZeRO stage, batch, layers to keep out of FP8
fp8jax estimate           time of a training step on a GPU that is not here, estimated
fp8jax export             a run of `fp8jax.train` as a Hugging Face folder
fp8jax plan               bytes on each device of a training step, compiled
fp8jax install-compiler   XLA's compiler for GPUs, which `--target` needs
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import fp8jax
from fp8jax import signals
from fp8jax.recipe import PRESETS, Recipe

_SIZES = {
    "layers": "blocks (default 12, or as the model's name says)",
    "heads": "attention heads (default 12, or as the model's name says)",
    "width": "channels (default 768, or as the model's name says)",
    "context": "tokens of a sequence (default 2048, or as the model's name says)",
    "vocabulary": "of the head (default 50304)",
    "experts": "of a mixture in the place of each MLP (default none)",
    "top_k": "experts of a token (default 2)",
    "batch": "sequences on each device (default 1)",
}
_MODEL = ("model", *_SIZES, "dtype", "remat")
_TARGET = "a GPU that is not here: h100, h200, b200 or l40s; by default this machine"


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line; argparse would print its usage, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message[:400]}; {self.prog} --help lists the options\n")


def _integer(text: str) -> int:
    """An integer of 32 bits. Its lower limit is checked where it is used."""
    try:
        if abs(int(text)) < 2**31:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number below {2**31}; got {text[:50]!r}")


def _devices(text: str) -> int:
    if not 1 <= (devices := _integer(text)) <= 1024:
        raise argparse.ArgumentTypeError(f"expected 1 to 1024; got {devices}")
    return devices


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Raises SystemExit for bad arguments and for --help."""
    args = _parser().parse_args(argv)
    try:
        with signals.ends_program(f"fp8jax {args.command}: interrupted"):
            status = args.run(args)
        sys.stdout.flush()  # a closed pipe raises here, not at the interpreter's end
        return status
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return 141  # the shell's status of a closed pipe
    except KeyboardInterrupt:
        message, status = "interrupted", signals.INTERRUPTED
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        message, status = str(error), 2
    except Exception as error:  # the user's own model may raise anything
        if ":" not in getattr(args, "model", ""):
            raise
        message, status = f"--model {args.model}: {type(error).__name__}: {error}", 2
    print(f"fp8jax {args.command}: {' '.join(message.split())[:1000]}", file=sys.stderr)
    return status


def _parser() -> _Parser:
    parser = _Parser(prog="fp8jax", description="FP8 training for JAX and Flax.")
    parser.add_argument("--version", action="version", version=f"fp8jax {fp8jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    chart = commands.add_parser("chart", help="the precision chart, read back from compiled programs")
    chart.add_argument("recipes", nargs="*", help="by default all levels that the device has GEMMs for")
    chart.add_argument("--devices", type=_devices, default=8, help="that share the batch (default 8)")
    chart.add_argument("--evidence", action="store_true", help="the arrays and operations of each cell, too")
    chart.add_argument("--png", metavar="FILE", help="draw the chart, too")

    doctor = commands.add_parser("doctor", help="what runs natively here; --compile checks a program")
    doctor.description = (
        "What the devices here multiply natively, versions, what to install for what. With --compile: the "
        "GEMMs of one gradient step, layer by layer, next to the report."
    )
    doctor.add_argument("--compile", action="store_true", help="check a program; what follows is for it")
    doctor.add_argument("--recipe", nargs="+", default=["fp8"], metavar="RECIPE", help="(default fp8)")
    _add_model(doctor)

    plan = commands.add_parser("plan", help="bytes on each device of a training step, compiled")
    plan.description = (
        "A row for each recipe, stage and number of devices: the peak of the compiled step, which does not "
        "run. Finished rows stay in fp8jax/plan of the user's cache folder."
    )
    _add_model(plan)
    plan.add_argument(
        "--recipe", nargs="+", default=["bf16", "fp8"], metavar="RECIPE", help="(default bf16 fp8)"
    )
    plan.add_argument(
        "--zero", nargs="+", type=_integer, default=[0], metavar="STAGE", help="0 to 3 (default 0)"
    )
    plan.add_argument("--devices", nargs="+", type=_devices, default=[1], metavar="N", help="(default 1)")
    plan.add_argument(
        "--lora-rank", type=_integer, metavar="RANK", help="train adapters of this rank only (default none)"
    )
    plan.add_argument("--paper", action="store_true", help="FP8-LM's settings, next to its figures")
    plan.add_argument(
        "--cache", action=argparse.BooleanOptionalAction, default=True, help="of finished rows (default yes)"
    )

    estimate = commands.add_parser("estimate", help="time of a training step on a GPU that is not here")
    estimate.description = (
        "An estimate, from the compiled step: where its time goes by layer, and the speed-up of each recipe "
        "over bf16, with bounds. No GPU runs it. How kernels are timed: fp8jax.inspect.estimate."
    )
    _add_model(estimate, "layer")
    estimate.add_argument(
        "--recipe",
        nargs="+",
        default=["te", "O2", "block", "mxfp8"],
        metavar="RECIPE",
        help="beside bf16 (default te O2 block mxfp8, of which the GPU may lack some)",
    )
    estimate.add_argument("--devices", type=_devices, default=1, metavar="N", help="of one host (default 1)")
    estimate.add_argument("--zero", type=_integer, default=0, metavar="STAGE", help="0 to 3 (default 0)")
    estimate.add_argument(
        "--widths",
        nargs="+",
        type=_integer,
        default=[],
        metavar="N",
        help="the speed-up at these widths, too, and the least that pays; heads are of 128 channels",
    )
    estimate.add_argument("--picture", metavar="FILE", help="draw where the time goes, too")
    estimate.add_argument("--target", default="h200", help="h100, h200, b200 or l40s (default h200)")
    estimate.add_argument("--json", action="store_true", help="print JSON")
    estimate.set_defaults(run=run_estimate)

    advise = commands.add_parser("advise", help="what to type: recipe, ZeRO stage, layers to keep out of FP8")
    advise.description = (
        "A line to paste. With --model: the recipe, stage and batch that fit the GPUs, by steps that are "
        "compiled and do not run, with twice the batch each time. With --statistics: the layers to keep out "
        "of FP8. The target is by default an h100."
    )
    _add_model(advise)
    advise.add_argument(
        "--statistics",
        nargs="+",
        default=[],
        metavar="FILE",
        help="of fp8jax.statistics, by their method save; of several batches oldest first (default none)",
    )
    advise.add_argument("--recipe", help="(default by the GPU, or the one of the model in the statistics)")
    advise.add_argument("--devices", type=_devices, default=1, metavar="N", help="GPUs (default 1)")

    export = commands.add_parser("export", help="a run of fp8jax.train as a Hugging Face folder")
    export.description = (
        "Writes the newest checkpoint of a Linen model's run as a Hugging Face folder for Transformers, vLLM "
        "or SGLang, and prints which kernels are unchanged. It needs no model, only the names and the config."
    )
    export.add_argument("source", metavar="RUN", help="the folder of the run, or of its checkpoints")
    export.add_argument("folder", metavar="FOLDER", help="a new or empty one")
    export.add_argument(
        "--mapping",
        required=True,
        help="from the names of the folder: gpt2, llama, mixtral or qwen3, or package.module:name, a "
        "fp8jax.checkpoints.NameMap",
    )
    export.add_argument("--config", required=True, metavar="FILE", help="the model's config.json")
    export.add_argument("--format", default="fp8", help="a name of fp8jax.checkpoints.FORMATS (default fp8)")
    export.set_defaults(run=run_export)

    for command, run in (
        (chart, run_chart),
        (doctor, run_doctor),
        (plan, run_plan),
        (advise, run_advise),
    ):
        command.add_argument("--target", help=_TARGET)
        command.add_argument("--json", action="store_true", help="print JSON, in bytes")
        command.set_defaults(run=run, default_of=command.get_default)
    advise.set_defaults(model=None, target="h100")

    compiler = commands.add_parser("install-compiler", help="XLA's compiler for GPUs, which --target needs")
    compiler.description = (
        "Downloads XLA's compiler for NVIDIA GPUs (about 120 MB) into a folder of this environment, by pip. "
        "--target loads it from there; no other program does."
    )
    compiler.set_defaults(run=run_install_compiler)
    return parser


def _add_model(command: argparse.ArgumentParser, default: str = "gpt") -> None:
    """The options of `_subject`."""
    command.add_argument(
        "--model",
        default=default,
        help="gpt (as gpt-125m), gpt-125m, gpt-350m, gpt-7b, llama-8b, gpt-13b, gpt-175b; a transformer's "
        "layer, its mlp or its dense layers alone (31 x 512 tokens, width 4096, unless sizes say otherwise); "
        "or package.module:function, which returns (model, inputs) or (model, inputs, loss), inputs being "
        f"one device's (default {default})",
    )
    for name, meaning in _SIZES.items():
        command.add_argument(_flags([name]), type=_integer, help=f"of a gpt: {meaning}")
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of a gpt (default bfloat16)"
    )
    command.add_argument(
        "--remat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of a gpt: keep only the outputs of GEMMs for the backward (default yes)",
    )


def _subject(args: argparse.Namespace) -> Any:
    from fp8jax.inspect.subject import subject

    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    if ":" in args.model and sizes:
        raise ValueError(f"{_flags(sizes)} is of a gpt, and {args.model} has its own sizes; leave it out")
    for recipe in args.recipe if isinstance(args.recipe, list) else ():
        Recipe.parse(recipe)
    return subject(args.model, dtype=args.dtype, remat=args.remat, **sizes)


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
    _configure(is_cpu=bool(args.target), devices=args.devices)
    from fp8jax.inspect import chart

    lacking = {} if args.recipes else chart.lacking(args.target)
    names = args.recipes or [name for name in PRESETS if name not in lacking]
    recipes = [Recipe.parse(recipe) for recipe in names]
    if args.png is not None:
        chart.check_picture(args.png)
    rows = [chart.measure(recipe, target=args.target, devices=args.devices) for recipe in recipes]
    _print(args, chart.as_data(rows), lambda: chart.text(rows, evidence=args.evidence))
    for name, reason in lacking.items():
        print(f"fp8jax chart: {name} is left out: {reason}", file=sys.stderr)
    if args.png is not None:
        chart.picture(rows, args.png)
    return int(any(row.differences for row in rows))


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what this machine has, or a program's GEMMs; 1 if there is a trouble or a complaint."""
    _configure(is_cpu=bool(args.target))
    from fp8jax.inspect import device, gemms

    if not args.compile:
        _refuse(args, ("recipe", *_MODEL), "{} is for --compile; add that or leave it out")
        machine = device.examine(args.target)
        _print(args, machine, lambda: device.text(machine))
        return int(bool(machine["troubles"]))
    of = _subject(args)
    checked = {recipe: gemms.check(of, recipe, target=args.target) for recipe in args.recipe}
    data = {recipe: [row._asdict() for row in rows] for recipe, rows in checked.items()}
    texts = (gemms.text(rows, recipe, args.target) for recipe, rows in checked.items())
    _print(args, data, lambda: "\n\n".join(texts))
    return int(any(row.complaint for rows in checked.values() for row in rows))


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plans."""
    _silence_xla()
    _configure(is_cpu=True, devices=1 if args.target else max(args.devices))
    from fp8jax.comm import Zero
    from fp8jax.inspect import memory, subject, tables, targets
    from fp8jax.inspect.memory import advice, cache, paper

    folder = cache.default_folder() if args.cache else None
    if args.paper:
        given = ("recipe", "zero", "devices", "target", "lora_rank", *_MODEL)
        _refuse(args, given, "--paper has settings of its own; leave {} out")
        settings = {f"{each.model} {each.recipe} batch {each.batch}": each for each in paper.SETTINGS}
        rows = [paper.row(setting, folder) for setting in _shown(settings)]
        _print(args, rows, lambda: tables.records(rows))
        return 0
    of, where = _subject(args), args.target or "device"
    models = {recipe: subject.transformed(of.model, recipe, args.lora_rank) for recipe in args.recipe}
    cases = {
        f"{recipe}, ZeRO {stage}, {devices} x {where}": (recipe, stage, devices)
        for recipe, stage, devices in itertools.product(args.recipe, args.zero, args.devices)
    }
    for _, stage, devices in cases.values():  # before the first is compiled
        Zero(targets.mesh(args.target, devices), stage=stage)
    options = {"loss": of.loss, "target": args.target, "cache": folder}
    plans = [
        memory.plan(models[recipe], recipe, *of.inputs, stage=stage, devices=devices, **options)
        for recipe, stage, devices in _shown(cases)
    ]

    def text() -> str:
        lines = advice.advise(*(subject.report_of(model, of.inputs) for model in models.values()))
        return "\n".join([memory.table(plans), *(["\nDimensions to change:", *lines] if lines else [])])

    _print(args, [{**plan._asdict(), "total": plan.total} for plan in plans], text)
    return 0


def run_estimate(args: argparse.Namespace) -> int:
    """Prints the estimates."""
    _configure(is_cpu=True)
    from fp8jax.inspect import chart, estimate, estimate_report

    if args.picture is not None:
        chart.check_picture(args.picture, "--picture")
    recipes = {name: Recipe.parse(name) for name in dict.fromkeys(["bf16", *args.recipe])}
    subjects = {None: _subject(args)}
    for width in args.widths:
        sizes = {"width": width, "heads": args.heads or max(1, width // 128)}
        subjects[width] = _subject(argparse.Namespace(**{**vars(args), **sizes}))
    lacking = chart.lacking(args.target, recipes)
    for name, reason in lacking.items():
        print(f"fp8jax estimate: {name} is left out: {reason}", file=sys.stderr)
    cases = {
        f"{name}, {f'width {width}' if width else args.model}": (width, name)
        for width, name in itertools.product(subjects, recipes)
        if name not in lacking
    }
    options = {"target": args.target, "devices": args.devices, "stage": args.zero}
    found: dict[Any, list[estimate.Estimate]] = {width: [] for width in subjects}
    for width, name in _shown(cases):
        found[width].append(estimate.estimate(subjects[width], recipes[name], **options))
    rows = found.pop(None)
    if args.picture is not None:
        estimate_report.picture(rows, args.picture)
    data = {
        "estimates": estimate_report.as_data(rows),
        "widths": {w: estimate_report.as_data(of) for w, of in found.items()},
    }
    texts = [estimate_report.text(rows), *([estimate_report.widths_text(found)] if found else [])]
    _print(args, data, lambda: "\n\n".join(texts))
    return 0


def run_advise(args: argparse.Namespace) -> int:
    """Prints the advice."""
    if args.model is None and not args.statistics:
        raise ValueError("expected --model, --statistics or both; got neither")
    if args.model is None:
        _refuse(args, ("devices", *_MODEL), "{} is for --model; add that or leave it out")
    _silence_xla()
    _configure(is_cpu=True)
    from fp8jax.inspect import memory, numerics
    from fp8jax.inspect.memory import cache

    found = numerics.Advice(args.recipe or numerics.recipe_for(args.target), (), ())
    if args.statistics:
        recipe = args.recipe or (found.recipe if args.model else None)
        found = numerics.advise(list(map(numerics.load, args.statistics)), target=args.target, recipe=recipe)
    if args.model:
        checkpointing = "dots_fp8" if args.remat else "none"
        args.remat, batch = False, args.batch

        def of_batch(size: int) -> Any:
            args.batch = batch if ":" in args.model else size
            return _subject(args)

        fit = memory.fit(
            found.recipe,
            of_batch,
            target=args.target,
            devices=args.devices,
            checkpointing=checkpointing,
            batch=1 if ":" in args.model else batch,
            cache=cache.default_folder(),
        )
        found = found.planned(fit.plan.devices, fit.plan.stage, checkpointing, str(fit))
    data = {**found._asdict(), "rules": [rule.path for rule in found.rules], "text": str(found)}
    _print(args, data, lambda: str(found))
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Writes the folder, and prints the report."""
    _configure(is_cpu=True)
    from fp8jax.checkpoints.maps import by_name
    from fp8jax.train.export import export

    mapping = by_name(args.mapping)
    try:
        with open(args.config, "rb") as file:
            config = dict(json.load(file))
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"--config: expected a JSON object in {args.config}; got {error}") from None
    print(export(args.source, args.folder, mapping=mapping, config=config, format=args.format))
    return 0


def run_install_compiler(args: argparse.Namespace) -> int:
    """Installs the compiler, and prints its folder."""
    from fp8jax.inspect import compiler

    print(compiler.install())
    return 0


def _shown(cases: Mapping[str, Any]) -> Iterator[Any]:
    """The cases, each with a line on stderr, if that is a terminal, in the place of the line before."""

    def write(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    try:
        for index, (name, case) in enumerate(cases.items(), 1):
            write(f"compiling {index} of {len(cases)}: {name}")
            yield case
    finally:
        write("")


def _silence_xla() -> None:
    """XLA warns at length of programs larger than a GPU's memory, which the figures show."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":  # JAX's setting
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def _configure(*, is_cpu: bool, devices: int = 1) -> None:
    """Splits the CPU into devices, before JAX initializes them. With `is_cpu` JAX looks for no GPU."""
    import jax

    from fp8jax.inspect import device

    is_cpu = is_cpu or device.has_idle_plugin()
    if is_cpu and not os.environ.get("JAX_PLATFORMS"):  # the user's choice comes first
        jax.config.update("jax_platforms", "cpu")
    if devices > max(1, jax.config.values["jax_num_cpu_devices"]):
        with contextlib.suppress(RuntimeError):  # its devices are initialized
            jax.config.update("jax_num_cpu_devices", devices)


if __name__ == "__main__":
    sys.exit(main())
