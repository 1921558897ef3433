"""Data for training: token files, shuffled batches, and batches on the devices."""

from fp8jax.train.data.device import prefetch_to_device as prefetch_to_device
from fp8jax.train.data.loader import Loader as Loader
from fp8jax.train.data.tokens import TokenFile as TokenFile
from fp8jax.train.data.tokens import write_tokens as write_tokens
