"""Training of Flax models: `Trainer` compiles the step that a `TrainConfig` describes, `fit` does a whole run
of it.

| file | provides |
|---|---|
| `config` | `TrainConfig`; reading a configuration from YAML files and the command line |
| `trainer`, `step/` | the compiled step: Linen and NNX, optimizer, placement, batch size |
| `fit`, `run/` | the training loop |
| `data/` | token files, batches, batches on the devices |
| `checkpoint`, `run_folder` | checkpoints, and the folder of a run |
| `metrics`, `report/` | metrics, the live display, the report |
| `distributed` | many processes |
"""

from fp8jax.train import checkpoint as checkpoint
from fp8jax.train import config as config
from fp8jax.train import data as data
from fp8jax.train import distributed as distributed
from fp8jax.train import metrics as metrics
from fp8jax.train import report as report
from fp8jax.train import run_folder as run_folder
from fp8jax.train.config import TrainConfig as TrainConfig
from fp8jax.train.data import Loader as Loader
from fp8jax.train.data import TokenFile as TokenFile
from fp8jax.train.data import prefetch_to_device as prefetch_to_device
from fp8jax.train.data import write_tokens as write_tokens
from fp8jax.train.errors import BadInput as BadInput
from fp8jax.train.errors import Diverged as Diverged
from fp8jax.train.errors import blame_input as blame_input
from fp8jax.train.fit import Fitted as Fitted
from fp8jax.train.fit import fit as fit
from fp8jax.train.trainer import Trainer as Trainer
