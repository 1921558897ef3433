"""The effect of each technique for training on one accelerator, on the same model with and without it.

    python examples/techniques.py                       # on this machine; minutes
    python examples/techniques.py --target h200         # and the bytes of the programs compiled for an H200
    python examples/techniques.py --only LoRA adafactor --record examples/records

The model is a decoder of plain Flax layers. One option of `TrainConfig` changes at a time. Tokens per second
are medians of steps that alternate between the two, so a machine that slows down slows both. Bytes are XLA's
peak memory of the compiled step. The rows are those of Hugging Face's guide for a single GPU.
"""

import argparse
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
import optax
from jax.experimental.compilation_cache import compilation_cache

from fp8jax.inspect import program, targets
from fp8jax.train import TrainConfig, Trainer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import output

# Row of the guide -> (off, on): options that differ in one technique.
BASE: dict[str, Any] = {"bf16": True, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
SMALL = {**BASE, "per_device_train_batch_size": 2}
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


def loss(model: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class Measured:
    """One configuration, ready to step."""

    def __init__(self, trainer: Trainer, tokens: np.ndarray) -> None:
        self.trainer, self.tokens = trainer, tokens  # tokens: shape=(rows, time + 1), int32, a batch


def prepare(settings: dict[str, Any], sizes: Sizes) -> Measured:
    """The trainer of these options, with a batch of random tokens."""
    config = TrainConfig(**settings)
    dtype = jnp.float32 if config.precision.gemm == "FP32" else jnp.bfloat16
    if config.fp16:
        dtype = jnp.float16
    example = np.zeros((1, sizes.context + 1), np.int32)
    trainer = Trainer(Decoder(sizes, dtype), loss, config, example)
    shape = (trainer.rows, sizes.context + 1)
    return Measured(trainer, np.random.default_rng(0).integers(0, sizes.vocabulary, shape).astype(np.int32))


_READY: dict[str, Measured] = {}


def prepared(settings: dict[str, Any], sizes: Sizes) -> Measured:
    """Like `prepare`, but makes each trainer once."""
    name = f"{sorted(settings.items())} {sizes}"
    _READY[name] = _READY.get(name) or prepare(settings, sizes)
    return _READY[name]


def speeds(pair: tuple[Measured, Measured], rounds: int) -> list[float]:
    """Tokens per second of both, in alternating steps after a warm-up round."""
    states = [each.trainer.init() for each in pair]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for i, each in enumerate(pair):
            start = time.perf_counter()
            states[i], seen = each.trainer.step(states[i], each.tokens)
            jax.block_until_ready(seen.loss)
            if number:
                seconds[i].append(time.perf_counter() - start)
    counts = [each.tokens[:, 1:].size for each in pair]
    return [count / statistics.median(taken) for count, taken in zip(counts, seconds, strict=True)]


@functools.cache
def megabytes(each: Measured, target: str | None = None) -> float:
    """The peak memory of the compiled step."""
    if target is None:
        return each.trainer.program.total / 1e6
    return program.read(each.trainer.compile(target=target)).total / 1e6


def row(name: str, sizes: Sizes, rounds: int, target: str | None) -> dict[str, Any]:
    """The row of a technique, off and on."""
    off, on = TECHNIQUES[name]
    pair = prepared(off, sizes), prepared(on, sizes)
    before, after = speeds(pair, rounds)
    here = [megabytes(each) for each in pair]
    found = {
        "technique": name,
        "tokens/s off": round(before),
        "tokens/s on": round(after),
        "on / off": after / before,
        "MB off": here[0],
        "MB on": here[1],
        "on / off ": here[1] / here[0],
    }
    if target:
        there = [megabytes(each, target) for each in pair]
        found |= {
            f"{target} MB off": there[0],
            f"{target} MB on": there[1],
            "on / off  ": there[1] / there[0],
        }
    return found


def starts(sizes: Sizes) -> list[dict[str, Any]]:
    """Seconds to trace and compile the step at a first start, and at a second one with a compile cache."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first start", "second start"):
            jax.clear_caches()
            compilation_cache.reset_cache()
            each = prepare({**BASE, "compile_cache": folder}, sizes)
            start = time.perf_counter()
            each.trainer.init()
            _ = each.trainer.program
            rows.append({"compile cache": name, "seconds": time.perf_counter() - start})
    jax.config.update("jax_compilation_cache_dir", None)
    return rows


def picture(rows: list[dict[str, Any]], path: str) -> None:
    """Draws both ratios of each technique as bars."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 0.4 * len(rows) + 1.2), layout="constrained")
    names = [each["technique"] for each in rows]
    for axis, key, title in zip(axes, ("on / off", "on / off "), ("tokens/s", "peak bytes"), strict=True):
        axis.barh(names, [each[key] for each in rows], color="#4477aa")
        axis.axvline(1, color="#222", linewidth=0.8)
        axis.set_title(f"{title}, on / off")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only techniques with one of these words")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each that are timed")
    parser.add_argument(
        "--target", choices=list(targets.TARGETS), help="a GPU that is not here: bytes there too"
    )
    parser.add_argument("--png", metavar="FILE", help="draw the ratios")
    output.add_options(parser)
    args = parser.parse_args()
    if args.target and (reason := targets.why_not()):
        sys.exit(reason)
    sizes, rounds = (TINY, 1) if args.tiny else (Sizes(), args.rounds)
    names = [name for name in TECHNIQUES if not args.only or any(word in name for word in args.only)]
    if not names:
        sys.exit(f"--only {' '.join(args.only)} is in none of: {', '.join(TECHNIQUES)}")
    rows = []
    for name in names:
        rows.append(row(name, sizes, rounds, args.target))
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
