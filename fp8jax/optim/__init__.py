"""Optimizers: Adam with low-precision moments, and any optax optimizer on quantized weights and gradients.

    tx = optax.chain(
        fp8jax.optim.clip_by_global_norm(1.0),
        fp8jax.optim.adamw(3e-4, recipe),
    )

Gradients and updates are trees like the parameters. Each transformation takes the parameters beside the
gradients, or the whole variables.
"""

from fp8jax.optim.adam import adam as adam
from fp8jax.optim.adam import adamw as adamw
from fp8jax.optim.adam import adamw_8bit as adamw_8bit
from fp8jax.optim.adam import scale_by_adam as scale_by_adam
from fp8jax.optim.dequantized import with_dequantized as with_dequantized
from fp8jax.optim.guard.lost_tags import restore_weights as restore_weights
from fp8jax.optim.muon import muon as muon
from fp8jax.optim.state import moments as moments
from fp8jax.optim.state import skipped as skipped
from fp8jax.optim.state.convert import convert as convert
from fp8jax.optim.state.convert import masters as masters
from fp8jax.optim.state.shardings import shardings as shardings
from fp8jax.optim.state.stored_formats import with_masters as with_masters
from fp8jax.optim.storage import Blockwise as Blockwise
from fp8jax.optim.transforms import clip_by_global_norm as clip_by_global_norm
from fp8jax.optim.transforms import dequantize as dequantize
from fp8jax.optim.transforms import global_norm as global_norm
from fp8jax.optim.transforms import multi_steps as multi_steps
