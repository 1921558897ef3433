"""Bytes that the collectives of gradients and weights put on the wire, read from compiled programs.

    python examples/bench/wire.py
    python examples/bench/wire.py --devices 4 --leaves 10
    python examples/bench/wire.py --json

A tree of gradients is reduced on all of 8 devices, reduced in parts, and gathered from parts: in float32 and
bfloat16 by JAX's own collectives, in FP8 by fp8jax's. "MB sent" is what each device sends if each collective
goes around a ring: (n - 1) / n of its data, twice that for an all-reduce. The programs are compiled for this
machine's processor, taken for 8 devices, and for 8 GPUs that are not here. (XLA on a CPU adds bfloat16 in
float32, and sends it so.)
"""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import output
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax import comm
from fp8jax.inspect import program, targets


def _wide(dtype: Any, collective: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    def run(tree: Any) -> Any:
        return jax.tree.map(lambda x: collective(x.astype(dtype), "devices", **options), tree)

    return run


# What is done, and in which ways.
WAYS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "mean on all devices": {
        "float32": _wide(jnp.float32, lax.pmean),
        "bfloat16": _wide(jnp.bfloat16, lax.pmean),
        "FP8": lambda tree: comm.all_reduce(tree, "devices"),
    },
    "mean in parts": {
        "float32": _wide(jnp.float32, lax.psum_scatter, tiled=True),
        "bfloat16": _wide(jnp.bfloat16, lax.psum_scatter, tiled=True),
        "FP8": lambda tree: comm.reduce_scatter(tree, "devices"),
    },
    "parts put together": {
        "float32": _wide(jnp.float32, lax.all_gather, tiled=True),
        "bfloat16": _wide(jnp.bfloat16, lax.all_gather, tiled=True),
        "FP8": lambda tree: comm.all_gather(tree, "devices", floats="FP8"),
    },
}


def rows(mesh: Mesh, compile_: Callable[..., Any], leaves: int, size: int) -> list[dict[str, Any]]:
    """One row per collective and way."""
    devices, found = mesh.size, []
    spread = NamedSharding(mesh, P())
    tree = {str(i): jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=spread) for i in range(leaves)}
    for what, ways in WAYS.items():
        of_float32 = None
        for way, function in ways.items():
            run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            read = program.read(compile_(run, tree))
            total = read.sent(devices)
            of_float32 = of_float32 or total
            largest = max(read.collectives, key=lambda collective: collective.sent(devices))
            found.append(
                {
                    "what": what,
                    "way": way,
                    "collectives": len(read.collectives),
                    "as": largest.dtype,
                    "MB sent": total / 1e6,
                    "/ float32": total / of_float32,
                }
            )
    return found


def main() -> None:
    """Compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", choices=list(targets.TARGETS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--leaves", type=int, default=24)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a leaf")
    output.add_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.leaves = 2
    with contextlib.suppress(RuntimeError):  # too late: the process has its devices
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.devices > jax.device_count():
        parser.error(f"--devices {args.devices}: this process has {jax.device_count()} devices")
    here = Mesh(np.array(jax.devices()[: args.devices]), ("devices",), axis_types=(AxisType.Auto,))
    shapes = f"{args.leaves} leaves of {args.size} x {args.size}"
    sections = {
        f"{args.devices} devices of {output.cpu_name()}, {shapes}": rows(
            here, lambda run, tree: jax.jit(run).lower(tree).compile(), args.leaves, args.size
        )
    }
    if targets.why_not() is None:
        there = targets.mesh(args.target, args.devices)
        sections[f"{args.devices} x {args.target}, {shapes}"] = rows(
            there,
            lambda run, tree: targets.compile_for(run, tree, target=args.target, devices=args.devices),
            args.leaves,
            args.size,
        )
    output.finish("wire", f"{args.target}-{output.cpu_name()}", sections, args)


if __name__ == "__main__":
    main()
