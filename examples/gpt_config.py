"""The settings of train_gpt.py."""

import dataclasses

from fp8jax import train
from fp8jax.train.config import knob
from fp8jax.train.settings import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Config(train.launch.Launch):
    """Settings of a run; the defaults are nanoGPT's for a CPU."""

    # what to compare
    recipe: str = knob(
        "O2",
        "precision recipe: fp32, bf16, fp16_amp, te, O1, O2, O3 or te+O2, with changes: O2,scaling=current",
    )
    twin: bool = knob(True, "train the same model in bf16 next to it")
    data: str = knob("", "text file; by default the source of Python's standard library")
    # the model
    layers: int = knob(4, "blocks", least=1)
    heads: int = knob(4, "attention heads per block", least=1)
    width: int = knob(128, "channels of the residual stream", least=1)
    context: int = knob(64, "characters that the model looks back on", least=1)
    bias: bool = knob(False, "biases in linear layers and norms")
    tied: bool = knob(False, "the head is the embedding's transpose, as in nanoGPT, not a layer of its own")
    dtype: str = knob("float32", "activations between matrix products: float32 or bfloat16")
    remat: bool = knob(True, "keep only matrix products for the backward: less memory, on a CPU less time")
    # the training
    steps: int = knob(500, "optimizer steps", least=1)
    batch: int = knob(12, "windows of text per step", least=1)
    optim: str = knob("adamw", "adamw (moments as the recipe says), adamw_8bit or adafactor; of both models")
    lr: float = knob(1e-3, "learning rate after the warm-up", least=0)
    min_lr: float = knob(1e-4, "learning rate at the end of the cosine", least=0)
    warmup: int = knob(100, "steps in which the learning rate rises", least=0)
    beta1: float = knob(0.9, "decay of Adam's first moment", least=0, below=1)
    beta2: float = knob(0.99, "decay of its second: short, since a step has few characters", least=0, below=1)
    weight_decay: float = knob(0.1, "decoupled, on matrices only", least=0)
    clip: float = knob(1.0, "largest global norm of the gradient; 0 is no limit", least=0)
    seed: int = knob(0, "of weights and batches", least=0, below=2**32)
    # the bookkeeping
    eval_interval: int = knob(100, "steps between validations", least=1)
    eval_batches: int = knob(
        20, "random batches per validation; the last one takes them all", least=1, below=10**5
    )
    checkpoint_interval: int = knob(250, "steps between checkpoints", least=1)
    log_interval: int = knob(10, "steps between updates of display and scales; a stop waits for one", least=1)
    out: str = knob("", "folder of the run; by default runs/gpt-N")
    resume: bool = knob(False, "go on with the run in --out, or with the newest one")
    or_start: bool = knob(
        False, "with --resume: begin where there is no run, or no whole checkpoint", kept=False
    )

    def __post_init__(self) -> None:
        train.config.check_ranges(self)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype must be float32 or bfloat16; got {self.dtype}")
        if self.optim not in OPTIMIZERS:
            raise ValueError(f"--optim must be one of {', '.join(OPTIMIZERS)}; got {self.optim}")
        if self.optim != "adamw" and (self.zero or self.offload):
            raise ValueError(f"--zero and --offload are for the moments of adamw; got --optim {self.optim}")
        if self.min_lr > self.lr:
            raise ValueError(
                f"--min-lr {self.min_lr} must be at most --lr {self.lr}; give a smaller --min-lr"
            )
