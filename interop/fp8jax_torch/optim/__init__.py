"""Adam and AdamW with the recipe's moments and masters, and skipping for other optimizers."""

from fp8jax_torch.optim.adam import Adam as Adam
from fp8jax_torch.optim.adam import AdamW as AdamW
from fp8jax_torch.optim.skipping import skipping as skipping
