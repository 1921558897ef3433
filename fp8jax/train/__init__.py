"""The parts of a training program: settings, data, checkpoints, progress, report.

`examples/train_gpt.py` puts them together. They know neither the model nor the optimizer.
`Trainer` makes the step of any Flax model, as a `TrainConfig` says, and `fit` a whole run of it.
"""

from fp8jax.train import checkpoint as checkpoint
from fp8jax.train import config as config
from fp8jax.train import data as data
from fp8jax.train import extras as extras
from fp8jax.train import footprint as footprint
from fp8jax.train import launch as launch
from fp8jax.train import observe as observe
from fp8jax.train import optimizers as optimizers
from fp8jax.train import placement as placement
from fp8jax.train import processes as processes
from fp8jax.train import report as report
from fp8jax.train import rundir as rundir
from fp8jax.train import stop as stop
from fp8jax.train.errors import BadInput as BadInput
from fp8jax.train.errors import blame_input as blame_input
from fp8jax.train.fit import Fitted as Fitted
from fp8jax.train.fit import advance as advance
from fp8jax.train.fit import fit as fit
from fp8jax.train.loader import Loader as Loader
from fp8jax.train.progress import Progress as Progress
from fp8jax.train.progress import spans as spans
from fp8jax.train.settings import TrainConfig as TrainConfig
from fp8jax.train.to_device import prefetch_to_device as prefetch_to_device
from fp8jax.train.tokens import TokenFile as TokenFile
from fp8jax.train.tokens import write_tokens as write_tokens
from fp8jax.train.trainer import Trainer as Trainer
