"""The effect of each technique for training on one accelerator, on the same model with and without it.

    python examples/techniques.py                       # on this machine; minutes
    python examples/techniques.py --target h200         # and the bytes of the programs compiled for an H200
    python examples/techniques.py --only LoRA adafactor --png ratios.png --record examples/records

The model is a decoder of plain Flax layers. One option of `TrainConfig` changes at a time. Tokens per second
are medians of steps that alternate between the two, so a machine that slows down slows both. Bytes are XLA's
peak memory of the compiled step. The rows are those of Hugging Face's guide for a single GPU; `--only` keeps
those with one of its words.
"""

import functools
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from fp8jax.inspect import program, targets
from fp8jax.train import TrainConfig, Trainer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import clock
import gpt
import output

BASE: dict[str, Any] = {"bf16": True, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
SMALL = {**BASE, "per_device_train_batch_size": 2}
# Row of the guide -> (off, on): options that differ in one technique.
TECHNIQUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch size: 8, not 2": (SMALL, BASE),
    "gradient accumulation: 2 x 4, not 8": (BASE, {**SMALL, "gradient_accumulation_steps": 4}),
    "gradient checkpointing: full": (BASE, {**BASE, "gradient_checkpointing": "full"}),
    "gradient checkpointing: dots": (BASE, {**BASE, "gradient_checkpointing": "dots"}),
    "mixed precision: fp16": ({"recipe": "fp32"}, {"fp16": True}),
    "mixed precision: bf16": ({"recipe": "fp32"}, {"bf16": True}),
    "mixed precision: tf32": ({"recipe": "fp32"}, {"recipe": "fp32", "tf32": True}),
    "FP8: te": (BASE, {"recipe": "te"}),
    "FP8: O1": (BASE, {"recipe": "O1"}),
    "FP8: O2": (BASE, {"recipe": "O2"}),
    "FP8: O3": (BASE, {"recipe": "O3"}),
    "FP8 operands kept: te, checkpointing fp8": (
        {"recipe": "te"},
        {"recipe": "te", "gradient_checkpointing": "fp8"},
    ),
    # With few rows, the bytes per weight are not hidden by activations.
    "optimizer: adamw_8bit, 2 rows": (SMALL, {**SMALL, "optim": "adamw_8bit"}),
    "optimizer: adafactor, 2 rows": (SMALL, {**SMALL, "optim": "adafactor"}),
    "PEFT: LoRA of rank 8, 2 rows": (SMALL, {**SMALL, "lora_rank": 8}),
    "PEFT: LoRA on FP8 kernels, 2 rows": (SMALL, {**SMALL, "bf16": False, "recipe": "te", "lora_rank": 8}),
}


class Sizes(NamedTuple):
    """The sizes of the decoder."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    vocabulary: int = 1024


TINY = Sizes(layers=2, width=32, heads=2, context=16, vocabulary=64)


class Block(nn.Module):
    """A transformer block of the decoder."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """(batch, time, width) -> the same, as the carry of a scan."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        attention = nn.MultiHeadDotProductAttention(self.sizes.heads, dtype=x.dtype)
        x = x + attention(nn.LayerNorm(dtype=x.dtype)(x), mask=mask)
        y = nn.gelu(nn.Dense(4 * self.sizes.width, dtype=x.dtype)(nn.LayerNorm(dtype=x.dtype)(x)))
        return x + nn.Dense(self.sizes.width, dtype=x.dtype)(y), None


class Decoder(nn.Module):
    """Tokens in, logits of the next token out."""

    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, time) int -> (batch, time, vocabulary)."""
        x = nn.Embed(self.sizes.vocabulary, self.sizes.width, dtype=self.dtype)(tokens)
        axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(Block, length=self.sizes.layers, **axes)(self.sizes)(x, None)
        return nn.Dense(self.sizes.vocabulary, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def prepare(config: TrainConfig, sizes: Sizes) -> Trainer:
    """The trainer of a configuration."""
    dtype = jnp.float32 if config.precision.gemm == "FP32" else jnp.bfloat16
    decoder = Decoder(sizes, jnp.float16 if config.fp16 else dtype)
    return Trainer(decoder, gpt.loss, config, np.zeros((1, sizes.context + 1), np.int32))


def speeds(trainers: list[Trainer], sizes: Sizes, rounds: int) -> list[float]:
    """Tokens per second of each, in alternating steps after a warm-up step."""
    turns = {}
    for number, trainer in enumerate(trainers):
        shape = trainer.rows, sizes.context + 1
        tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, shape).astype(np.int32)
        turns[str(number)] = clock.timer(gpt.steps(trainer, tokens))
    times = clock.take_turns(turns, rounds)
    seconds = [statistics.median(taken) for taken in times.values()]
    return [trainer.rows * sizes.context / each for trainer, each in zip(trainers, seconds, strict=True)]


@functools.cache
def megabytes(trainer: Trainer, target: str = "") -> float:
    """The peak memory of the compiled step."""
    return (program.read(trainer.compile(target=target)) if target else trainer.program).total / 1e6


def row(name: str, trainers: list[Trainer], sizes: Sizes, rounds: int, target: str) -> dict[str, Any]:
    """The row of a technique, off and on."""
    before, after = speeds(trainers, sizes, rounds)
    found = {
        "technique": name,
        "tokens/s off": round(before),
        "tokens/s on": round(after),
        "on / off": after / before,
    }
    off, on = map(megabytes, trainers)
    found |= {"MB off": off, "MB on": on, "on / off ": on / off}
    if target:
        off, on = (megabytes(trainer, target) for trainer in trainers)
        found |= {f"{target} MB off": off, f"{target} MB on": on, "on / off  ": on / off}
    return found


def starts(sizes: Sizes) -> output.Rows:
    """Seconds to trace and compile the step at a first start, and at a second one with a compile cache."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first start", "second start"):
            jax.clear_caches()
            compilation_cache.reset_cache()
            trainer = prepare(TrainConfig(**BASE, compile_cache=folder), sizes)
            start = time.perf_counter()
            trainer.init()
            _ = trainer.program
            rows.append({"compile cache": name, "seconds": time.perf_counter() - start})
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    return rows


def picture(rows: output.Rows, path: str) -> None:
    """Draws both ratios of each technique as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    names = [each["technique"] for each in rows]
    for axis, key, title in zip(axes, ("on / off", "on / off "), ("tokens/s", "peak bytes"), strict=True):
        axis.barh(names, [each[key] for each in rows], color="#4477aa")
        axis.axvline(1, color="#222", linewidth=0.8)
        axis.set_title(f"{title}, on / off")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and prints."""
    args = output.parse(
        __doc__,
        tiny={"rounds": 1},
        choices={"target": targets.TARGETS},
        only=[""],  # which is in each name
        rounds=5,
        target="",
        png="",
    )
    if args.target and (reason := targets.why_not()):
        sys.exit(reason)
    sizes = TINY if args.tiny else Sizes()
    names = [name for name in TECHNIQUES if any(word in name for word in args.only)]
    if not names:
        sys.exit(f"--only {' '.join(args.only)} is in none of: {', '.join(TECHNIQUES)}")
    prepared, rows = functools.cache(prepare), []
    for name in names:
        trainers = [prepared(TrainConfig(**settings), sizes) for settings in TECHNIQUES[name]]
        rows.append(row(name, trainers, sizes, args.rounds, args.target))
        print(f"{len(rows)} of {len(names)}: {name}", file=sys.stderr, flush=True)
    if args.png:
        picture(rows, args.png)
    device = jax.devices()[0].device_kind
    title = f"{device}, {sizes.layers} layers of {sizes.width}, {sizes.context} tokens a row"
    name = output.cpu_name() if device == "cpu" else device
    name = f"{args.target}-{name}" if args.target else name
    output.finish("techniques", name, {title: rows, f"{device}, compiling": starts(sizes)}, args)


if __name__ == "__main__":
    main()
