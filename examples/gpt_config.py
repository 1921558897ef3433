"""The options of train_gpt.py, and those of them that torch_same_recipe.py has, too."""

import dataclasses

from fp8jax.train import TrainConfig
from fp8jax.train.config import CHECKPOINTING, OPTIMIZERS, DeviceConfig, option, start_option, validate


@dataclasses.dataclass(frozen=True)
class GPTOptions:
    """Sizes, data and AdamW; the defaults are nanoGPT's for a CPU."""

    data: str = option("", "text file; by default the source of Python's standard library", fixed=False)
    layers: int = option(4, "transformer blocks", least=1)
    heads: int = option(4, "attention heads of a block", least=1)
    width: int = option(128, "channels of the residual stream", least=1)
    context: int = option(64, "characters that the model sees", least=1)
    batch: int = option(12, "windows of text in a step, over all devices", least=1)
    lr: float = option(1e-3, "learning rate after the warm-up, if there is one", least=0)
    beta1: float = option(0.9, "decay of Adam's first moment", least=0, below=1)
    beta2: float = option(
        0.99, "decay of its second; small, since a batch has few characters", least=0, below=1
    )
    weight_decay: float = option(0.1, "decoupled weight decay, of matrices only", least=0)
    seed: int = option(0, "seed of weights and batches", least=0, below=2**32)


@dataclasses.dataclass(frozen=True)
class Config(DeviceConfig, GPTOptions):
    """Options of a run."""

    recipe: str = option(
        "",
        "precision recipe: fp32, bf16, fp16_amp, te, O1, O2, O3, te+O2, fp8, block, mxfp8, nvfp4 or one as "
        "block+O2; with changes: O2,margin=1; by default fp8",
    )
    rules: str = option(
        "", "recipes of single layers, as last=0.25:gemm=BF16 for the last quarter of the blocks in bf16"
    )
    twin: bool = option(True, "train the same model in bf16 next to it")
    # the model
    bias: bool = option(False, "biases in linear layers and norms")
    tied: bool = option(False, "use the embedding's transpose as the head, as nanoGPT does")
    dtype: str = option("float32", "dtype of activations between GEMMs", choices=("float32", "bfloat16"))
    scan: bool = option(
        True, "compile one block for all; --no-scan gives each its own path, as rules need that count layers"
    )
    remat: bool = option(True, "save only the outputs of GEMMs: less memory, on a CPU less time")
    gradient_checkpointing: str = option(
        "none",
        "fp8jax's remat of each block in place of --remat: full, dots, fp8, dots_fp8 or dots_fp8_inputs",
        choices=CHECKPOINTING,
    )
    # the training
    steps: int = option(500, "optimizer steps", least=1)
    optim: str = option(
        "adamw",
        "adamw (moments as in the recipe), adamw_8bit or adafactor",
        choices=OPTIMIZERS,
    )
    min_lr: float = option(1e-4, "learning rate at the end of the cosine", least=0)
    warmup: int = option(100, "steps of the linear warm-up; at most all but the last", least=0)
    clip: float = option(1.0, "gradient clipping by global norm; 0: no clipping", least=0)
    max_skipped: int = option(
        100,
        "steps in a row, skipped for gradients that are not finite, that end the run",
        least=1,
        fixed=False,
    )
    # the run
    eval_interval: int = option(100, "steps between validations", least=1)
    eval_batches: int = option(20, "random batches of a validation; the last takes all", least=1, below=10**5)
    checkpoint_interval: int = option(250, "steps between checkpoints", least=1, fixed=False)
    log_interval: int = option(
        10, "steps between two lines of metrics; a stop waits for one", least=1, fixed=False
    )
    statistics: bool = option(
        True, "at validations, measure what FP8 does to the operands of each layer", fixed=False
    )
    out: str = start_option("", "folder of the run; by default runs/gpt-N")
    resume: bool = start_option(False, "go on with the run in --out, or with the newest one")
    or_start: bool = start_option(False, "with --resume: begin where there is no run, or no checkpoint")

    def __post_init__(self) -> None:
        validate(self)
        if self.min_lr > self.lr:
            raise ValueError(
                f"--min-lr {self.min_lr} must be at most --lr {self.lr}; give a smaller --min-lr"
            )

    def trainer(self, recipe: str, folder: str, devices: int, rules: str = "") -> TrainConfig:
        """The trainer's configuration for a recipe ("" for the default), on all devices of all processes."""
        if self.batch % devices:
            raise ValueError(f"--batch must be a multiple of the {devices} devices; got --batch {self.batch}")
        return TrainConfig(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(DeviceConfig)},
            recipe=recipe,
            rules=rules,
            per_device_train_batch_size=self.batch // devices,
            optim=self.optim,
            gradient_checkpointing=self.gradient_checkpointing,
            learning_rate=self.lr,
            min_learning_rate=self.min_lr,
            lr_scheduler_type="cosine",
            warmup_steps=min(self.warmup, self.steps - 1),
            max_steps=self.steps,
            weight_decay=self.weight_decay,
            adam_beta1=self.beta1,
            adam_beta2=self.beta2,
            max_grad_norm=self.clip,
            max_skipped_steps=self.max_skipped,
            seed=self.seed,
            output_dir=folder,
            logging_steps=self.log_interval,
            eval_steps=self.eval_interval,
            save_steps=self.checkpoint_interval,
            statistics=self.statistics,
        )
