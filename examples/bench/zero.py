"""Bytes on each device of a GPT's training step by ZeRO stage, read from compiled programs.

    python examples/bench/zero.py
    python examples/bench/zero.py --recipes bf16 te O2 --devices 8 --stages 0 3 --json

One step (gradient, AdamW) is compiled for each stage and number of devices, for this machine's processor and
for GPUs that are not here, as `fp8jax plan` does. "peak MB" is what the compiler says that one device needs:
arguments, results that take no argument's place, temporaries. The batch per device is always the same.
"MB sent" is as in wire.py.
"""

import argparse
import contextlib
import itertools
from typing import Any

import jax
import output

from fp8jax.inspect import memory, targets
from fp8jax.inspect.subject import subject


def rows(args: argparse.Namespace, target: str | None) -> list[dict[str, Any]]:
    """One row per recipe, number of devices and stage."""
    sizes = {name: getattr(args, name) for name in ("layers", "heads", "width", "context", "vocabulary")}
    of, found = subject("gpt", batch=args.batch, dtype=args.dtype, **sizes), []
    for recipe, devices, stage in itertools.product(args.recipes, args.devices, args.stages):
        options = {"loss": of.loss, "devices": devices, "stage": stage, "target": target}
        plan = memory.plan(of.model, recipe, *of.inputs, **options)
        found.append(
            {
                "recipe": recipe,
                "devices": devices,
                "ZeRO": stage,
                "kept MB": plan.kept / 1e6,
                "peak MB": plan.total / 1e6,
                "MB sent": plan.sent / 1e6,
            }
        )
    return found


def main() -> None:
    """Compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", choices=list(targets.TARGETS))
    parser.add_argument("--recipes", nargs="+", default=["O2"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences on each device")
    parser.add_argument("--dtype", default="bfloat16", help="of activations between products")
    output.add_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.heads, args.width, args.context, args.vocabulary = 2, 2, 64, 32, 64
        args.devices, args.stages, args.batch = [2], [0, 3], 1
    with contextlib.suppress(RuntimeError):  # too late: the process has its devices
        jax.config.update("jax_num_cpu_devices", max(args.devices))
    if max(args.devices) > jax.device_count():
        parser.error(f"--devices {max(args.devices)}: this process has {jax.device_count()} devices")
    shape = f"{args.layers} layers of width {args.width}, {args.batch} x {args.context} tokens a device"
    sections = {f"{output.cpu_name()}, {shape}": rows(args, None)}
    if targets.why_not() is None:
        sections[f"{args.target}, {shape}"] = rows(args, args.target)
    output.finish("zero", f"{args.target}-{output.cpu_name()}", sections, args)


if __name__ == "__main__":
    main()
