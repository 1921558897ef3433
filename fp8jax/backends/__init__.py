"""Who multiplies? Each file or folder is one answer; `auto` takes the best one that can.

A backend is a module with two functions and a text:

    NORMS                                 # what becomes of a norm or an activation before a cast
    supports(*, is_batched) -> str | None # None, or the reason why it cannot run here
    dot(lhs, rhs, dimension_numbers, *, out_dtype, precise) -> Array

`dot` multiplies two `ScaledArray`s whose scales are scalars: accumulates in float32, applies
the scales, then casts to `out_dtype`. `precise` asks for full float32 accumulation where the
hardware has a faster, shorter one.
"""

from types import ModuleType
from typing import NamedTuple

import jax

from fp8jax.backends import reference, te, xla

BACKENDS = {"xla": xla, "reference": reference, "te": te}


class Choice(NamedTuple):
    """Who multiplies, and why."""

    name: str  # of BACKENDS
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"

    @property
    def module(self) -> ModuleType:
        """The backend."""
        return BACKENDS[self.name]


def choose(name: str, *, is_batched: bool = False) -> Choice:
    """The backend called `name`; of "auto", "te" where it can run on the one device there is, else "xla".

    JAX's default device decides, so what is traced on a CPU for a GPU that is not there is XLA's.

    Args:
        name: "auto", or one of `BACKENDS`.
        is_batched: whether it is for a product with batch dimensions.

    Raises:
        ValueError: no such backend, or it cannot run here (with its reason).
    """
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


def note(name: str) -> str:
    """What a report says of the backend called `name`: what becomes of norms, and who multiplies."""
    choice = choose(name)
    line = f"backend: {choice}"
    if name == "auto" and choice.name == "te":
        line += f", and products with batch dimensions {choose(name, is_batched=True)}"
    return f"{choice.module.NORMS}\n{line}"
