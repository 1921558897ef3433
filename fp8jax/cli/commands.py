"""The commands of `fp8jax`: functions from parsed arguments to an exit status."""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fp8jax.cli.model import OPTIONS, flags, subject_of
from fp8jax.recipe import PRESETS, Recipe


def _refuse(args: argparse.Namespace, names: Iterable[str], message: str) -> None:
    """Raises ValueError if one of these options is not as it is by default."""
    if given := [name for name in names if getattr(args, name) != args.default_of(name)]:
        raise ValueError(message.format(flags(given)))


def _recipes(args: argparse.Namespace, model: Any, default: list[str]) -> list[str]:
    """The recipes of --recipe, else a transformed model's own, else those by default."""
    from fp8jax.inspect.subject import recipe_of

    own = recipe_of(model)
    return args.recipe or (default if own is None else [str(own)])


def _print(args: argparse.Namespace, data: Any, text: Callable[[], str]) -> None:
    print(json.dumps(data, indent=1) if args.json else text())


def run_chart(args: argparse.Namespace) -> int:
    """Prints the chart; 1 if a program differs from its recipe."""
    configure(is_cpu=bool(args.target), devices=args.devices)
    from fp8jax.inspect import chart

    lacking = {} if args.recipes else chart.lacking(args.target)
    names = args.recipes or [name for name in PRESETS if name not in lacking]
    recipes = [Recipe.parse(recipe) for recipe in names]
    options = {name: getattr(args, name) for name in ("target", "devices", "gradient_checkpointing")}
    rows = [chart.measure(recipe, **options) for recipe in recipes]
    _print(args, chart.as_data(rows), lambda: chart.text(rows, evidence=args.evidence))
    for name, reason in lacking.items():
        print(f"fp8jax chart: {name} is left out: {reason}", file=sys.stderr)
    if args.png is not None:
        chart.picture(rows, args.png)
    return int(any(row.differences for row in rows))


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what this machine has, or a program's GEMMs; 1 if there is a trouble or a complaint."""
    configure(is_cpu=bool(args.target))
    from fp8jax.inspect import device, report_check

    if not args.compile:
        _refuse(args, ("recipe", *OPTIONS), "{} is for --compile; add that or leave it out")
        machine = device.examine(args.target)
        _print(args, machine, lambda: device.text(machine))
        return int(bool(machine["troubles"]))
    of = subject_of(args)
    recipes = _recipes(args, of.model, ["fp8"])
    checked = {recipe: report_check.check(of, recipe, target=args.target) for recipe in recipes}
    data = {recipe: [row._asdict() for row in rows] for recipe, rows in checked.items()}
    texts = (report_check.text(rows, recipe, args.target) for recipe, rows in checked.items())
    _print(args, data, lambda: "\n\n".join(texts))
    return int(any(row.complaint for rows in checked.values() for row in rows))


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plans."""
    _silence_xla()
    configure(is_cpu=True, devices=1 if args.target else max(args.devices))
    from fp8jax.comm import Zero
    from fp8jax.inspect import memory, subject, targets
    from fp8jax.inspect.memory import advice, cache
    from fp8jax.rewrite import LoRA

    folder = cache.default_folder() if args.cache else None
    of, where = subject_of(args), args.target or "device"
    recipes = _recipes(args, of.model, ["bf16", "fp8"])
    lora = {} if args.lora_rank is None else {"lora": LoRA(rank=args.lora_rank)}
    models = {recipe: subject.transformed(of.model, recipe, **lora) for recipe in recipes}
    cases: dict[str, Any] = {
        f"{recipe}, ZeRO {stage}, {devices} x {where}": (recipe, stage, devices)
        for recipe, stage, devices in itertools.product(recipes, args.zero, args.devices)
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
    configure(is_cpu=True)
    from fp8jax.inspect import chart, estimate, subject
    from fp8jax.inspect.estimate import report

    if ":" in args.model:
        _refuse(
            args, ("widths",), "{} is of a gpt or a layer, and your model has its own sizes; leave it out"
        )
    subjects = {None: subject_of(args)}
    names = _recipes(args, subjects[None].model, ["te", "O2", "block", "mxfp8"])
    if subject.recipe_of(subjects[None].model) is None:
        names = ["bf16", *names]
    recipes = {name: Recipe.parse(name) for name in names}
    for width in args.widths:
        sizes = {"width": width, "heads": args.heads or max(1, width // 128)}
        subjects[width] = subject_of(argparse.Namespace(**{**vars(args), **sizes}))
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
    data = {
        "estimates": report.as_data(rows),
        "widths": {w: report.as_data(of) for w, of in found.items()},
    }
    texts = [report.text(rows), *([report.widths_text(found)] if found else [])]
    _print(args, data, lambda: "\n\n".join(texts))
    if args.picture is not None:
        report.picture(rows, args.picture)
    return 0


def run_advise(args: argparse.Namespace) -> int:
    """Prints the advice."""
    if args.model is None and not args.statistics:
        raise ValueError("expected --model, --statistics or both; got neither")
    if args.model is None:
        _refuse(args, ("devices", *OPTIONS), "{} is for --model; add that or leave it out")
    _silence_xla()
    configure(is_cpu=True)
    from fp8jax.inspect import memory, numerics
    from fp8jax.inspect.memory import cache
    from fp8jax.rewrite.remat import NoBlocksError

    found = numerics.Advice(args.recipe or numerics.recipe_for(args.target), (), ())
    if args.statistics:
        recipe = args.recipe or (found.recipe if args.model else None)
        series = [
            rows
            for path in args.statistics
            for rows in (numerics.load_run(path) if os.path.isdir(path) else [numerics.load(path)])
        ]
        found = numerics.advise(series, target=args.target, recipe=recipe)
    if args.model:
        checkpointing = "dots_fp8" if args.remat else "none"
        args.remat, batch = False, args.batch

        def of_batch(size: int) -> Any:
            args.batch = batch if ":" in args.model else size
            return subject_of(args)

        def fitted(checkpointing: str, note: str = "") -> numerics.Advice:
            fit = memory.fit(
                found.recipe,
                of_batch,
                target=args.target,
                devices=args.devices,
                checkpointing=checkpointing,
                batch=1 if ":" in args.model else batch,
                cache=cache.default_folder(),
            )
            return found.planned(fit.plan.devices, fit.plan.stage, checkpointing, f"{fit}{note}")

        try:
            found = fitted(checkpointing)
        except NoBlocksError:
            found = fitted("none", "; no gradient checkpointing: no module with layers repeats in the model")
    data = {**found._asdict(), "rules": [rule.options() for rule in found.rules], "text": str(found)}
    _print(args, data, lambda: str(found))
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Writes the folder, and prints the report."""
    configure(is_cpu=True)
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


def configure(*, is_cpu: bool, devices: int = 1) -> None:
    """Splits the CPU into devices, before JAX initializes them. With `is_cpu` JAX looks for no GPU."""
    import jax

    from fp8jax.inspect import device

    is_cpu = is_cpu or device.has_idle_plugin()
    if is_cpu and not os.environ.get("JAX_PLATFORMS"):  # the user's choice comes first
        jax.config.update("jax_platforms", "cpu")
    if devices > max(1, jax.config.values["jax_num_cpu_devices"]):
        with contextlib.suppress(RuntimeError):  # its devices are initialized
            jax.config.update("jax_num_cpu_devices", devices)
