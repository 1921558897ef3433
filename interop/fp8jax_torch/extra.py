"""An error for a missing torch that says what to install; imported before all other modules."""

try:
    import torch as torch
except ImportError as error:
    raise ImportError(
        'fp8jax_torch needs torch, which cannot be imported: pip install "fp8jax[torch]"'
    ) from error
