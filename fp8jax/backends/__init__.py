"""Who multiplies? Each file is one answer; `auto` takes the best one that can.

A backend is a module with two functions and a text:

    NORMS                                 # what becomes of a norm or an activation before a cast
    supports() -> str | None              # None, or the reason why it cannot run here
    dot(lhs, rhs, dimension_numbers, *, out_dtype, precise) -> Array

`dot` multiplies two `ScaledArray`s whose scales are scalars: accumulates in float32, applies
the scales, then casts to `out_dtype`. `precise` asks for full float32 accumulation where the
hardware has a faster, shorter one.
"""

from types import ModuleType

from fp8jax.backends import reference, xla

BACKENDS = {"xla": xla, "reference": reference}


def get(name: str) -> ModuleType:
    """The backend called `name`; "auto" is "xla", which runs everywhere.

    Raises:
        ValueError: no such backend, or it cannot run here (with its reason).
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"`backend`: expected auto or one of {', '.join(BACKENDS)}; got {name!r}.")
    backend = BACKENDS["xla" if name == "auto" else name]
    reason = backend.supports()
    if reason:
        raise ValueError(f"`backend`: {name} cannot run here: {reason}.")
    return backend
