"""`TrainConfig`: how a training uses its accelerators, in the words that people know from Transformers.

    TrainConfig(recipe="O2", per_device_train_batch_size="auto", gradient_checkpointing="fp8")
    TrainConfig(**config.read(TrainConfig, ["--config", "run.yaml", "--bf16"]))

What contradicts itself is refused, with the reason.
"""

import dataclasses
from typing import Any

from fp8jax.inspect import targets
from fp8jax.recipe import Recipe
from fp8jax.train.config import check_ranges, knob, suggest
from fp8jax.train.launch import Launch

AUTO = "auto"

CHECKPOINTING = ("none", "full", "dots", "fp8")
SCHEDULES = ("constant", "linear", "cosine")

# By each name that is taken, the optimizer: those of Transformers say which kernels run it, too.
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adafactor": "adafactor",
}


@dataclasses.dataclass(frozen=True)
class TrainConfig(Launch):
    """Settings of a training, each one technique; the defaults are plain training at level O2.

    Raises:
        ValueError: a setting is out of its range, unknown, or contradicts another one.
    """

    # precision
    recipe: str = knob("", "precision recipe, as O2 or te,scaling=current; by default O2")
    fp16: bool = knob(False, "float16 matrix products with a dynamic loss scale, in the place of a recipe")
    bf16: bool = knob(False, "bfloat16 matrix products, in the place of a recipe")
    tf32: bool = knob(False, "float32 matrix products in TF32, where the device has it")
    # batch
    per_device_train_batch_size: int | str = knob(
        8, "rows that a device takes at once, or auto: the most that fit", least=1
    )
    memory_budget: float = knob(0.0, "for auto: GB of each device; 0 is what XLA may take of it", least=0)
    target: str = knob("", "for auto: a GPU that is not here, as h200")
    gradient_accumulation_steps: int = knob(1, "such batches in an optimizer step", least=1)
    gradient_checkpointing: str = knob(
        "none", "what blocks keep for the backward: none (all of it), full (nothing), dots, fp8 (operands)"
    )
    checkpoint_blocks: str = knob("", "classes or paths of those blocks; by default they are found")
    # optimizer
    optim: str = knob("adamw", "adamw (moments as the recipe says), adamw_8bit or adafactor")
    learning_rate: float = knob(5e-5, "after the warm-up", least=0)
    lr_scheduler_type: str = knob("linear", "what it does then: constant, linear or cosine, down to 0")
    warmup_steps: int = knob(0, "steps in which it rises", least=0)
    max_steps: int = knob(1000, "optimizer steps", least=1)
    weight_decay: float = knob(0.0, "decoupled, on matrices only", least=0)
    adam_beta1: float = knob(0.9, "decay of the first moment", least=0, below=1)
    adam_beta2: float = knob(0.999, "decay of the second moment", least=0, below=1)
    adam_epsilon: float = knob(1e-8, "added to the second moment's root", least=0)
    max_grad_norm: float = knob(1.0, "largest global norm of the gradient; 0 is no limit", least=0)
    seed: int = knob(0, "of weights, order and dropout", least=0, below=2**32)
    # data
    dataloader_num_workers: int = knob(0, "processes that prepare batches", least=0, kept=False)
    dataloader_prefetch_factor: int = knob(2, "batches that wait on the device", least=1, kept=False)
    # adapters
    lora_rank: int = knob(0, "train adapters of this rank only; 0 trains the weights", least=0)
    lora_alpha: float = knob(16.0, "their scale times the rank", least=0)
    # compiling
    compile_cache: str = knob("", "folder for compiled programs, which later starts read", kept=False)
    # bookkeeping of a whole run, see `fit`
    output_dir: str = knob("", "folder of the run; by default runs/trainer-N", kept=False)
    logging_steps: int = knob(
        10, "steps between updates of display and scales; a stop waits for one", least=1
    )
    eval_steps: int = knob(500, "steps between validations", least=1)
    save_steps: int = knob(500, "steps between checkpoints", least=1)

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, legal in (
            ("gradient_checkpointing", CHECKPOINTING),
            ("lr_scheduler_type", SCHEDULES),
            ("optim", tuple(OPTIMIZERS)),
        ):
            word = getattr(self, name)
            if word not in legal:
                listed = ", ".join(filter(None, legal))
                raise ValueError(f"--{_flag(name)} must be one of {listed}; got {word}{suggest(word, legal)}")
        recipe = self.precision
        for is_so, why in _contradictions(self, recipe):
            if is_so:
                raise ValueError(why)
        if self.target:
            targets.get(self.target)

    @property
    def precision(self) -> Recipe:
        """The recipe that `recipe`, `fp16` and `bf16` mean."""
        return Recipe.parse(self.recipe or ("fp16_amp" if self.fp16 else "bf16" if self.bf16 else "O2"))

    @property
    def optimizer(self) -> str:
        """adamw, adamw_8bit or adafactor."""
        return OPTIMIZERS[self.optim]

    @property
    def is_auto(self) -> bool:
        """Whether the batch size is to be found."""
        return self.per_device_train_batch_size == AUTO


def _contradictions(config: TrainConfig, recipe: Recipe) -> list[tuple[Any, str]]:
    """What can be wrong between settings, and the reason."""
    size, has_fp8 = config.per_device_train_batch_size, recipe.gemm == "FP8"
    return [
        (
            isinstance(size, str) and size != AUTO,
            f"--per-device-train-batch-size must be a whole number or auto; got {size}",
        ),
        (config.fp16 and config.bf16, "--fp16 and --bf16 are two precisions; leave one out"),
        (
            config.recipe and (config.fp16 or config.bf16),
            f"--{'fp16' if config.fp16 else 'bf16'} and --recipe {config.recipe} are two precisions; leave "
            "one out",
        ),
        (
            config.tf32 and (config.fp16 or config.bf16),
            "--tf32 is for products in float32, and there are none with --fp16 or --bf16; leave it out",
        ),
        (
            config.gradient_checkpointing == "fp8" and not has_fp8,
            f"--gradient-checkpointing fp8 keeps FP8 operands, and {recipe} has none; use full or dots",
        ),
        (
            config.checkpoint_blocks and config.gradient_checkpointing == "none",
            "--checkpoint-blocks says what --gradient-checkpointing is for; add that",
        ),
        (
            (config.memory_budget or config.target) and not config.is_auto,
            "--memory-budget and --target are for --per-device-train-batch-size auto; add that or leave them "
            "out",
        ),
        (
            config.optimizer == "adafactor" and recipe.master_weight != "-",
            f"--optim adafactor keeps no master weights, and the weights of {recipe} cannot do without; use "
            "adamw or adamw_8bit, or a level like O2",
        ),
        (
            config.zero and config.optimizer != "adamw",
            f"--zero {config.zero} shares moments among devices, not --optim {config.optim}'s; use adamw",
        ),
        (
            config.offload and config.optimizer != "adamw",
            f"--offload is for the moments of adamw; got --optim {config.optim}",
        ),
        (
            config.lora_rank and (config.zero or config.offload),
            "--lora-rank leaves few moments, for which there is no --zero and no --offload; leave them out",
        ),
        (
            config.lora_rank and config.fp16,
            "--lora-rank with --fp16 has no loss scale for adapters; use --bf16 or an FP8 recipe",
        ),
        (
            config.warmup_steps >= config.max_steps,
            f"--warmup-steps {config.warmup_steps} must be fewer than --max-steps {config.max_steps}",
        ),
    ]


def _flag(name: str) -> str:
    return name.replace("_", "-")
