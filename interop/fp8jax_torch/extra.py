"""Says what to install where torch is missing, before anything else is imported."""

try:
    import torch as torch
except ImportError as error:
    raise ImportError(
        'fp8jax_torch needs torch, which cannot be imported: pip install "fp8jax[torch]"'
    ) from error
