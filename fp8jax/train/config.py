"""The configuration of a training run.

    TrainConfig(recipe="fp8", per_device_train_batch_size="auto", gradient_checkpointing="fp8")
    TrainConfig(**read(TrainConfig, ["--config", "run.yaml", "--bf16"]))

A configuration is a frozen dataclass with fields made by `option`. jsonargparse reads it from YAML files and
from the command line. The names of `TrainConfig` are those of Transformers' `TrainingArguments`.
"""

import argparse
import collections
import dataclasses
import difflib
import functools
import json
import math
import numbers
import os
import pathlib
import re
import reprlib
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fp8jax.inspect import targets
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Rule
from fp8jax.train.errors import need

AUTO = "auto"
CHECKPOINTING = ("none", "full", "dots", "fp8")
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


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    below: float = math.inf,
    choices: Collection[str] = (),
    saved: bool = True,
    fixed: bool = True,
) -> Any:
    """A field of a configuration.

    Args:
        default: its value if none is given.
        help: its line of `--help`.
        least, below: a number must satisfy least <= value < below.
        choices: the legal words.
        saved: a run keeps its value; False for an option of one start of the program, as `--resume`.
        fixed: a resumed run must have the same value.
    """
    rules = {"least": least, "below": below, "choices": tuple(choices), "saved": saved, "fixed": fixed}
    return dataclasses.field(default=default, metadata={"help": help, **rules})


# An option of one start of the program: a run does not keep its value.
start_option = functools.partial(option, saved=False)


def saved_options(config: Any) -> dict[str, Any]:
    """The values that a run keeps, as JSON gives them back."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata["saved"]}
    return json.loads(json.dumps(values, default=lambda x: x.item() if hasattr(x, "item") else str(x)))


def fixed_options(cls: Any) -> set[str]:
    """The names of the options that a resumed run cannot change."""
    return {f.name for f in dataclasses.fields(cls) if f.metadata["saved"] and f.metadata["fixed"]}


def validate(config: Any) -> None:
    """Raises ValueError for the first option of a wrong type or out of its range; for `__post_init__`."""
    for field in dataclasses.fields(config):
        value, rules = getattr(config, field.name), field.metadata
        if not any(_is_a(value, kind) for kind in _types(field)):
            expected = " or ".join(kind.__name__ for kind in _types(field))
            raise ValueError(f"{_flag(field)} must be of type {expected}; got {reprlib.repr(value)}")
        if isinstance(value, str):
            if not value.isprintable():
                raise ValueError(f"{_flag(field)} must be printable text; got {value!a}")
            if rules["choices"] and value not in rules["choices"]:
                near, legal = _suggestion(value, rules["choices"]), ", ".join(rules["choices"])
                raise ValueError(f"{_flag(field)} must be one of {legal}; got {value}{near}")
        elif rules["least"] is not None:
            # The counters on the devices are int32.
            end = 2**31 if rules["below"] == math.inf and int in _types(field) else rules["below"]
            if not rules["least"] <= value < end:
                limit = f" and below {end}" if end < math.inf else " and finite"
                raise ValueError(
                    f"{_flag(field)} must be at least {rules['least']:g}{limit}; got {reprlib.repr(value)}"
                )


def read(cls: type, argv: Sequence[str] | None = None, description: str = "") -> dict[str, Any]:
    """Reads the options that YAML files and the command line give.

    Args:
        cls: a dataclass with fields made by `option`.
        argv: the command line without the program's name; None for that of this process.
        description: the first lines of `--help`.

    Returns:
        Field name -> value, of the options that were given. The command line wins over the files.

    Raises:
        ValueError: an unknown option, a value of a wrong type, or a file that cannot be read.
    """
    library = need("jsonargparse")
    parser = library.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", metavar="FILE", help="YAML file with these options")
    for field in sorted(dataclasses.fields(cls), key=lambda field: not field.metadata["saved"]):
        kind: dict[str, Any] = {"type": field.type}
        if field.type is bool:
            kind = {"action": library.ActionYesNo(yes_prefix="", no_prefix="no-")}
        help = field.metadata["help"].replace("%", "%%")
        parser.add_argument(_flag(field), default=field.default, help=help, **kind)
    try:
        given = vars(parser.parse_args(argv, defaults=False))
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split())[:400]
        unknown = re.search(r"unrecognized arguments: -*(\S+)|Option '(\S+)' is not accepted", message)
        flags = map(_flag, dataclasses.fields(cls))
        near = _suggestion(f"--{unknown[1] or unknown[2]}", flags) if unknown else ""
        raise ValueError(f"{message}{near}; --help lists the options") from None
    for path in given.pop("config", []):
        if path is None:
            raise ValueError("--config expects the path of a YAML file, not its content")
        # YAML's loaders take the last of two equal keys and say nothing.
        keys = re.findall(r"(?m)^([\w-]+)\s*:", pathlib.Path(path).read_text())
        [(key, count)] = collections.Counter(key.replace("-", "_") for key in keys).most_common(1) or [
            ("", 0)
        ]
        if count > 1:
            raise ValueError(f"--config {path} says `{key}` twice; leave one of them out")
    return given


def _suggestion(word: str, legal: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest legal word, or nothing."""
    near = difflib.get_close_matches(word, list(legal), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _types(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    return typing.get_args(field.type) or (field.type,)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether an option of this type can have the value. NumPy's numbers are numbers; booleans are not."""
    wider = {int: numbers.Integral, float: numbers.Real, str: str | os.PathLike}.get(kind, kind)
    return isinstance(value, wider) and (kind is bool or not isinstance(value, bool))


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
        "residuals of a block: none (all kept), full (all recomputed), dots, fp8 (operands kept)",
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
    min_learning_rate: float = option(0.0, "learning rate at the last step; not for constant", least=0)
    lr_scheduler_type: str = option("linear", "decay of the rate", choices=SCHEDULES)
    warmup_steps: int = option(0, "steps of the linear warm-up", least=0)
    max_steps: int = option(1000, "optimizer steps", least=1)
    weight_decay: float = option(0.0, "decoupled weight decay, of matrices only", least=0)
    adam_beta1: float = option(0.9, "decay of the first moment", least=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", least=0, below=1)
    adam_epsilon: float = option(1e-8, "added to the root of the second moment", least=0)
    max_grad_norm: float = option(1.0, "gradient clipping by global norm; 0: no clipping", least=0)
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

    def __post_init__(self) -> None:
        validate(self)
        _ = self.layer_rules  # raises for bad text
        for is_so, reason in _contradictions(self, self.precision):
            if is_so:
                raise ValueError(reason)
        if self.target:
            targets.get(self.target)

    @property
    def precision(self) -> Recipe:
        """The recipe that `recipe`, `fp16` and `bf16` name, or the default."""
        if self.fp16 or self.bf16:
            return Recipe.parse(self.recipe or ("fp16_amp" if self.fp16 else "bf16"))
        return Recipe.parse(self.recipe or "fp8")

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
            config.gradient_checkpointing == "fp8" and not recipe.is_quantized,
            f"--gradient-checkpointing fp8 keeps FP8 operands, and {recipe} has none; use full or dots",
        ),
        (
            config.checkpoint_blocks and config.gradient_checkpointing == "none",
            "--checkpoint-blocks is an option of --gradient-checkpointing; add that",
        ),
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
