"""Data for training: token files, text, shuffled batches, and batches on the devices."""

from fp8jax.train.data.device import prefetch_to_device as prefetch_to_device
from fp8jax.train.data.loader import Loader as Loader
from fp8jax.train.data.text import RandomWindows as RandomWindows
from fp8jax.train.data.text import Text as Text
from fp8jax.train.data.text import check_length as check_length
from fp8jax.train.data.text import load as load
from fp8jax.train.data.text import standard_library as standard_library
from fp8jax.train.data.text import windows as windows
from fp8jax.train.data.tokens import TokenFile as TokenFile
from fp8jax.train.data.tokens import write_tokens as write_tokens
