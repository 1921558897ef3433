"""Bytes on each device of a GPT's training step by ZeRO stage, read from compiled programs.

    python examples/bench/zero.py
    python examples/bench/zero.py --recipes bf16 te O2 --devices 8 --stages 0 3 --json

One step (gradient, AdamW) is compiled for each stage and number of devices, for this machine's processor and
for GPUs that are not here, as `fp8jax plan` does. "peak MB" is the compiler's peak for one device: arguments,
results that reuse no argument's memory, temporaries. The batch per device is always the same. "MB sent" is as
in wire.py.
"""

import argparse
import itertools

import output

from fp8jax.inspect import memory, targets
from fp8jax.inspect.subject import subject

SIZES = {"layers": 6, "heads": 8, "width": 512, "context": 256, "vocabulary": 4096, "batch": 2}
TINY = {"layers": 2, "heads": 2, "width": 64, "context": 32, "vocabulary": 64, "batch": 1}


def rows(args: argparse.Namespace, target: str | None) -> output.Rows:
    """One row per recipe, number of devices and stage."""
    of, found = subject("gpt", dtype=args.dtype, **{name: getattr(args, name) for name in SIZES}), []
    for recipe, devices, stage in itertools.product(args.recipes, args.devices, args.stages):
        options = {"loss": of.loss, "devices": devices, "stage": stage, "target": target}
        plan = memory.plan(of.model, recipe, *of.inputs, **options)
        bytes_of = {"stored MB": plan.stored, "peak MB": plan.total, "MB sent": plan.sent}
        row = {"recipe": recipe, "devices": devices, "ZeRO": stage}
        found.append(row | {name: value / 1e6 for name, value in bytes_of.items()})
    return found


def main() -> None:
    """Compiles and prints."""
    args = output.parse(
        __doc__,
        tiny={**TINY, "devices": [2], "stages": [0, 3]},
        choices={"target": targets.TARGETS},
        target="h200",
        recipes=["O2"],
        devices=[1, 2, 4, 8],
        stages=[0, 1, 2, 3],
        dtype="bfloat16",
        **SIZES,
    )
    output.use_cpu_devices(max(args.devices))
    shape = f"{args.layers} layers of width {args.width}, {args.batch} x {args.context} tokens a device"
    sections = {f"{output.cpu_name()}, {shape}": rows(args, None)}
    if targets.why_not() is None:
        sections[f"{args.target}, {shape}"] = rows(args, args.target)
    output.finish("zero", f"{args.target}-{output.cpu_name()}", sections, args)


if __name__ == "__main__":
    main()
