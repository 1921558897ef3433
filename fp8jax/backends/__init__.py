"""GEMM backends: `xla`, `te` (TransformerEngine) and `reference`; "auto" selects one that can run here.

A backend is a module with two functions and a text:

    NORMS                                 # text: how norms and activations before a cast are computed
    supports(*, is_batched) -> str | None # None, or the reason why it cannot run here
    dot(lhs, rhs, dimension_numbers, *, out_dtype, precise) -> Array

`dot` is the GEMM of two `ScaledArray`s with scalar scales. It accumulates in float32, applies the scales and
casts to `out_dtype`. `precise` requires full float32 accumulation; otherwise the hardware's faster, less
precise accumulation is allowed.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax import lax

from fp8jax.backends import block as block
from fp8jax.backends import pallas as pallas
from fp8jax.backends import reference, te, xla
from fp8jax.quantization import ScaledArray
from fp8jax.recipe import BLOCK_SCALINGS

BACKENDS = {"xla": xla, "reference": reference, "te": te}


class Choice(NamedTuple):
    """The selected backend, and the reason."""

    name: str  # a key of BACKENDS, or a name of `block.backend_of`
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"

    @property
    def module(self) -> ModuleType:
        """The backend's module."""
        return BACKENDS[self.name]


def choose(name: str, *, is_batched: bool = False, scaling: str = "delayed") -> Choice:
    """The backend `name`. "auto" is "te" if it can run here and there is one device, otherwise "xla".

    "auto" looks at JAX's default device, so a program traced on CPU for an absent GPU uses "xla".

    Args:
        name: "auto", or a key of `BACKENDS`.
        is_batched: whether the dot has batch dimensions.
        scaling: the recipe's scaling. Block scaling has one backend on each device, see `block.backend_of`.

    Raises:
        ValueError: the backend is unknown, or cannot run here.
    """
    if scaling in BLOCK_SCALINGS:
        return _choose_for_blocks(name, scaling)
    if name == "auto":
        reason = te.supports(is_batched=is_batched)
        if reason is None and jax.device_count() > 1:
            reason = "transformer_engine is chosen for one device, and there are several"
        return Choice("xla", reason) if reason else Choice("te", "transformer_engine is installed")
    if name not in BACKENDS:
        raise ValueError(f"`backend`: expected auto or one of {', '.join(BACKENDS)}; got {name!r}.")
    reason = BACKENDS[name].supports(is_batched=is_batched)
    if reason:
        raise ValueError(f"`backend`: {name} cannot run here: {reason}.")
    return Choice(name, "as asked for")


def _choose_for_blocks(name: str, scaling: str) -> Choice:
    if reason := block.why_not(scaling):
        raise ValueError(f"`backend`: scaling={scaling} cannot run here: {reason}.")
    only = block.backend_of(scaling)
    if name not in ("auto", only):
        raise ValueError(f"`backend`: expected auto or {only} for scaling={scaling}; got {name!r}.")
    return Choice(only, f"the only one for scaling={scaling}")


def note(name: str, scaling: str = "delayed") -> str:
    """The report's text for the backend `name`: its `NORMS`, and the selected backend."""
    if scaling in BLOCK_SCALINGS:
        return f"backend: {choose(name, scaling=scaling)}"
    choice = choose(name)
    line = f"backend: {choice}"
    if name == "auto" and choice.name == "te":
        line += f", and products with batch dimensions {choose(name, is_batched=True)}"
    return f"{choice.module.NORMS}\n{line}"


def multiply(
    name: str,
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    """The GEMM of two quantized operands, by the backend `name`; operands with scales of blocks, which have
    the contracted axis last, by `block`."""
    if lhs.bits.ndim:
        return block.dot(lhs, rhs, out_dtype=out_dtype)
    return BACKENDS[name].dot(lhs, rhs, dimension_numbers, out_dtype=out_dtype, precise=precise)
