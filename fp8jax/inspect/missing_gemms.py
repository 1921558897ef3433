"""Block-scaled GEMMs of a program that a GPU does not have."""

from collections.abc import Iterator, Sequence
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
    pairs = [(each.primitive, each.supports(device, False)) for each in BACKENDS.values() if each.primitive]
    lacking = [(primitive, reason) for primitive, reason in pairs if reason]
    return next(_found(program.jaxpr, lacking, set()), None) if lacking else None


def _found(jaxpr: Any, lacking: Sequence[tuple[str, str]], seen: set[int]) -> Iterator[str]:
    """The reasons for the equations in a jaxpr with these primitives and FP8 or FP4 operands or results."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        for primitive, reason in lacking:
            is_named = equation.primitive.name.startswith(primitive)
            if is_named and any(map(_is_fp8, (*equation.invars, *equation.outvars))):
                yield reason
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _found(inner, lacking, seen)


def _is_fp8(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize == 1
