"""The same `Recipe` on PyTorch models.

    model, optimizer = fp8jax_torch.prepare(model, optimizer, "O2")   # the loop stays as it is

    loss.backward()
    optimizer.step()

Layers, patterns, scales, casts, moments: what a recipe means is the same on both sides, bit for bit;
`bridge` carries a run from one to the other.
"""

from fp8jax_torch import extra as extra
from fp8jax_torch.prepare import dequantize as dequantize
from fp8jax_torch.prepare import prepare as prepare
from fp8jax_torch.prepare import report as report
from fp8jax_torch.prepare import transform as transform
from fp8jax_torch.scaled import ScaledTensor as ScaledTensor
from fp8jax_torch.scaled import quantize as quantize
from fp8jax_torch.scaled import value as value
