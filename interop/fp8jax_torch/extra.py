"""An error for a missing torch that says what to install; imported before all other modules."""

try:
    import torch as torch
except ImportError as error:
    from fp8jax import extras

    raise ImportError(
        f"fp8jax_torch needs torch, which cannot be imported: {extras.install('torch')}"
    ) from error
