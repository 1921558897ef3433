"""Block-scaled GEMMs of a program that a GPU does not have."""

from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from fp8jax.backends.block import lacks


def refuse(program: Any, capability: tuple[int, int]) -> str | None:
    """None, or the reason why a program has block-scaled GEMMs that a GPU does not have.

    XLA would dequantize the operands of cuDNN's and say nothing; JAX does not lower FP8 in Pallas kernels.

    Args:
        program: its closed jaxpr.
        capability: the GPU's compute capability.
    """
    scalings = _scalings(program.jaxpr, set())
    if "mxfp8" in scalings:
        return lacks(capability, "mxfp8")
    return lacks(capability, "block") if scalings else None


def _scalings(jaxpr: Any, seen: set[int]) -> set[str]:
    """The scalings of the block-scaled GEMMs in a jaxpr: "mxfp8" for cuDNN's, "block" for a Pallas kernel."""
    found: set[str] = set()
    if id(jaxpr) in seen:
        return found
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith("scaled_matmul"):
            found.add("mxfp8")
        elif name == "pallas_call" and any(map(_is_fp8, (*equation.invars, *equation.outvars))):
            found.add("block")
        for inner in jex.jaxprs_in_params(equation.params):
            found |= _scalings(inner, seen)
    return found


def _is_fp8(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize == 1
