"""The configuration of a training run.

    TrainConfig(recipe="fp8", per_device_train_batch_size="auto", gradient_checkpointing="fp8")
    TrainConfig(**read(TrainConfig, ["--config", "run.yaml", "--bf16"]))

A configuration is a frozen dataclass with fields made by `option`. The names of `TrainConfig` are those of
Transformers' `TrainingArguments`.
"""

import dataclasses
from typing import Any

from fp8jax.recipe import Recipe
from fp8jax.rewrite import Rule
from fp8jax.rewrite.remat import POLICIES
from fp8jax.train.options import fixed_options as fixed_options
from fp8jax.train.options import option as option
from fp8jax.train.options import read as read
from fp8jax.train.options import saved_options as saved_options
from fp8jax.train.options import start_option as start_option
from fp8jax.train.options import validate as validate

AUTO = "auto"
DEFAULT_RECIPE = "fp8"
CHECKPOINTING = ("none", *POLICIES)
SCHEDULES = ("constant", "linear", "cosine")

# Name -> optimizer. The other names are those of Transformers, which also say which kernels run it.
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adafactor": "adafactor",
}


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """The devices and processes of one start. A resumed run may have others."""

    distributed: bool = start_option(False, "train over many processes; torchrun, Slurm or flags say which")
    coordinator: str = start_option("", "HOST:PORT of process 0")
    processes: int = start_option(0, "number of processes; 0: the launcher says it", least=0)
    process: int = start_option(-1, "index of this process; -1: the launcher says it", least=-1)
    patience: int = start_option(300, "seconds that processes wait for each other at the start", least=1)
    heartbeat: int = start_option(30, "seconds of silence after which a process counts as lost", least=2)
    devices: int = start_option(1, "devices of this process, 0 for all; with --distributed all", least=0)
    zero: int = start_option(
        0, "ZeRO stage: 1 shares moments, 2 and gradients, 3 and weights", least=0, below=4
    )
    offload: bool = start_option(False, "keep the optimizer's moments in the host's memory")


@dataclasses.dataclass(frozen=True)
class TrainConfig(DeviceConfig):
    """The configuration of a `Trainer` and of `fit`; the defaults are plain training with the recipe fp8.

    Raises:
        ValueError: an option is out of its range or contradicts another one.
    """

    # precision
    recipe: str = option("", "precision recipe, as O2 or te,scaling=current; by default fp8")
    rules: str = option(
        "", "recipes of single layers, as last=0.25:gemm=BF16 lm_head:O2, see fp8jax.Rule.parse"
    )
    fp16: bool = option(False, "float16 GEMMs with a dynamic loss scale, instead of a recipe")
    bf16: bool = option(False, "bfloat16 GEMMs, instead of a recipe")
    tf32: bool = option(False, "TF32 for float32 GEMMs, where the device has it")
    # batch
    per_device_train_batch_size: int | str = option(
        8, "rows of a microbatch on a device; auto: the most that fit", least=1, choices=(AUTO,), fixed=False
    )
    memory_budget: float = option(0.0, "for auto: GB of a device; 0: what XLA may use", least=0, fixed=False)
    target: str = option("", "for auto: a GPU that is not here, as h200", fixed=False)
    gradient_accumulation_steps: int = option(1, "microbatches of an optimizer step", least=1, fixed=False)
    gradient_checkpointing: str = option(
        "none",
        "residuals of a block: none (all saved), full (all recomputed), dots, dots_fp8 (outputs of dots, in "
        "FP8), dots_fp8_inputs (inputs, too), fp8 (operands)",
        choices=CHECKPOINTING,
    )
    checkpoint_blocks: str = option("", "classes or paths of those blocks; by default they are found")
    # optimizer
    optim: str = option(
        "adamw",
        "adamw (with the recipe's moments), adamw_8bit, adafactor",
        choices=OPTIMIZERS,
    )
    learning_rate: float = option(5e-5, "learning rate after the warm-up", least=0)
    min_learning_rate: float = option(0.0, "learning rate after the last step; not for constant", least=0)
    lr_scheduler_type: str = option("linear", "decay of the rate", choices=SCHEDULES)
    warmup_steps: int = option(0, "steps of the linear warm-up", least=0)
    max_steps: int = option(1000, "optimizer steps", least=1)
    weight_decay: float = option(0.0, "decoupled weight decay, of matrices only", least=0)
    adam_beta1: float = option(0.9, "decay of the first moment", least=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", least=0, below=1)
    adam_epsilon: float = option(1e-8, "added to the root of the second moment", least=0)
    max_grad_norm: float = option(1.0, "gradient clipping by global norm; 0: no clipping", least=0)
    max_skipped_steps: int = option(
        100,
        "steps in a row, skipped for gradients that are not finite, that end the run",
        least=1,
        fixed=False,
    )
    seed: int = option(0, "seed of weights, order and dropout", least=0, below=2**32)
    # data
    dataloader_num_workers: int = start_option(0, "processes that prepare batches", least=0)
    dataloader_prefetch_factor: int = start_option(2, "batches that are ready on the device", least=1)
    # adapters
    lora_rank: int = option(0, "rank of LoRA adapters; 0 trains the weights", least=0)
    lora_alpha: float = option(16.0, "scale of the adapters times the rank", least=0)
    # the program and its run
    compile_cache: str = start_option("", "folder of compiled programs, which later starts read")
    output_dir: str = start_option("", "folder of the run; by default runs/trainer-N")
    logging_steps: int = option(
        10, "steps between lines of metrics; a stop waits for one", least=1, fixed=False
    )
    eval_steps: int = option(500, "steps between validations", least=1)
    save_steps: int = option(500, "steps between checkpoints", least=1, fixed=False)
    statistics: bool = option(
        True, "every eval steps, measure what FP8 does to the operands of each layer", fixed=False
    )

    def __post_init__(self) -> None:
        validate(self)
        _ = self.layer_rules  # raises for bad text
        for is_so, reason in _contradictions(self, self.precision):
            if is_so:
                raise ValueError(reason)

    @property
    def precision(self) -> Recipe:
        """The recipe that `recipe`, `fp16` and `bf16` name, or the default."""
        default = "fp16_amp" if self.fp16 else "bf16" if self.bf16 else DEFAULT_RECIPE
        return Recipe.parse(self.recipe or default)

    @property
    def layer_rules(self) -> tuple[Rule, ...]:
        """The rules, parsed."""
        return tuple(map(Rule.parse, self.rules.split()))

    @property
    def optimizer(self) -> str:
        """The optimizer: adamw, adamw_8bit or adafactor."""
        return OPTIMIZERS[self.optim]

    @property
    def is_auto(self) -> bool:
        """Whether the trainer looks for the batch size."""
        return self.per_device_train_batch_size == AUTO


def _contradictions(config: TrainConfig, recipe: Recipe) -> list[tuple[Any, str]]:
    """Whether two options contradict each other, and the reason."""
    half = "--fp16" if config.fp16 else "--bf16" if config.bf16 else ""
    optim, is_adamw = config.optim, config.optimizer == "adamw"
    needs_masters = config.optimizer == "adafactor" and recipe.master_weight != "-"
    warmup, steps = config.warmup_steps, config.max_steps
    rate, least = config.learning_rate, config.min_learning_rate
    return [
        (config.fp16 and config.bf16, "--fp16 and --bf16 are two precisions; leave one out"),
        (config.recipe and half, f"{half} and --recipe {config.recipe} are two precisions; leave one out"),
        (config.tf32 and half, f"--tf32 is for float32 GEMMs, and {half} has none; leave it out"),
        (
            (config.memory_budget or config.target) and not config.is_auto,
            "--memory-budget and --target are for --per-device-train-batch-size auto; add that",
        ),
        (needs_masters, f"--optim adafactor keeps no master weights, and {recipe} needs them; use adamw"),
        (config.zero and not is_adamw, f"--zero shares the moments of adamw; got --optim {optim}; use adamw"),
        (config.offload and not is_adamw, f"--offload is for the moments of adamw; got --optim {optim}"),
        (
            config.lora_rank and (config.zero or config.offload),
            "--lora-rank has few moments and supports neither --zero nor --offload; leave them out",
        ),
        (
            config.lora_rank and config.fp16,
            "--fp16 has no loss scale for adapters of --lora-rank; use --bf16",
        ),
        (warmup >= steps, f"--warmup-steps {warmup} must be fewer than --max-steps {steps}"),
        (least > rate, f"--min-learning-rate {least} must be at most --learning-rate {rate}"),
    ]
