"""Adam and AdamW with the recipe's moments and masters, the way back to torch's, and skipping for others."""

from fp8jax_torch.optim.adam import Adam as Adam
from fp8jax_torch.optim.adam import AdamW as AdamW
from fp8jax_torch.optim.entries import dequantize as dequantize
from fp8jax_torch.optim.skipping import skipping as skipping
