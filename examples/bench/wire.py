"""Bytes that the collectives of gradients and weights put on the wire, read from compiled programs.

    python examples/bench/wire.py
    python examples/bench/wire.py --devices 4 --leaves 10
    python examples/bench/wire.py --json

A tree of gradients is averaged on all of 8 devices, reduce-scattered, and all-gathered: in float32 and
bfloat16 by JAX's collectives, in FP8 by fp8jax's. "MB sent" are the bytes that each device sends if each
collective goes around a ring: (n - 1) / n of its data, twice that for an all-reduce. The programs are
compiled for this machine's processor, split into 8 devices, and for 8 GPUs that are not here. (XLA on a CPU
adds bfloat16 in float32, and sends float32.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import output
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax import comm
from fp8jax.inspect import program, targets


def _ways(fp8: Callable[[Any], Any], collective: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """A collective in float32, bfloat16 and FP8."""

    def in_dtype(dtype: Any) -> Callable[[Any], Any]:
        return lambda tree: jax.tree.map(lambda x: collective(x.astype(dtype), "devices", **options), tree)

    return {"float32": in_dtype(jnp.float32), "bfloat16": in_dtype(jnp.bfloat16), "FP8": fp8}


WAYS = {
    "mean on all devices": _ways(lambda tree: comm.all_reduce(tree, "devices", "O2"), lax.pmean),
    "mean in parts": _ways(
        lambda tree: comm.reduce_scatter(tree, "devices", "O2"), lax.psum_scatter, tiled=True
    ),
    "parts put together": _ways(
        lambda tree: comm.all_gather(tree, "devices", floats="FP8"), lax.all_gather, tiled=True
    ),
}


def rows(target: str | None, devices: int, leaves: int, size: int) -> output.Rows:
    """One row per collective and way."""
    mesh, found = targets.mesh(target, devices), []
    replicated = NamedSharding(mesh, P())
    tree = {
        str(i): jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=replicated) for i in range(leaves)
    }
    for name, ways in WAYS.items():
        of_float32 = None
        for way, function in ways.items():
            run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            read = program.read(targets.compile_for(run, tree, target=target, devices=devices))
            total = read.sent(devices)
            of_float32 = of_float32 or total
            found.append(
                {
                    "what": name,
                    "way": way,
                    "collectives": len(read.collectives),
                    "as": max(read.collectives, key=lambda each: each.sent(devices)).dtype,
                    "MB sent": total / 1e6,
                    "/ float32": total / of_float32,
                }
            )
    return found


def main() -> None:
    """Compiles and prints."""
    choices, tiny = {"target": targets.TARGETS}, {"leaves": 2}
    sizes = {"devices": 8, "leaves": 24, "size": 1024}
    args = output.parse(__doc__, tiny=tiny, choices=choices, target="h200", **sizes)
    output.use_cpu_devices(args.devices)
    shapes = f"{args.leaves} leaves of {args.size} x {args.size}"
    sizes = args.devices, args.leaves, args.size
    sections = {f"{args.devices} devices of {output.cpu_name()}, {shapes}": rows(None, *sizes)}
    if targets.why_not() is None:
        sections[f"{args.devices} x {args.target}, {shapes}"] = rows(args.target, *sizes)
    output.finish("wire", f"{args.target}-{output.cpu_name()}", sections, args)


if __name__ == "__main__":
    main()
