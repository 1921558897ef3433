"""Block-scaled GEMMs of a program that a GPU does not have."""

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from fp8jax.backends import BACKENDS, Device


def refuse(program: Any, device: Device) -> str | None:
    """None, or the reason why a program has block-scaled GEMMs that a GPU does not have.

    XLA would dequantize the operands of cuDNN's and say nothing; JAX does not lower FP8 in Pallas kernels.

    Args:
        program: its closed jaxpr.
        device: the GPU.
    """
    names = ("cudnn", "pallas")
    lacking = {name: reason for name in names if (reason := BACKENDS[name].supports(device, False))}
    used = _backends(program.jaxpr, set()) if lacking else ()
    return next((lacking[name] for name in used if name in lacking), None)


def _backends(jaxpr: Any, seen: set[int]) -> Iterator[str]:
    """The backends of the block-scaled GEMMs in a jaxpr; "pallas" for each of our Pallas kernels."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith("scaled_matmul"):
            yield "cudnn"
        elif name == "pallas_call" and any(map(_is_fp8, (*equation.invars, *equation.outvars))):
            yield "pallas"
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _backends(inner, seen)


def _is_fp8(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize == 1
