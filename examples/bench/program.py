"""What a GPU would run: training steps compiled for one that is not here, and what is in the programs.

    python examples/bench/program.py --target h200
    python examples/bench/program.py --target b200 --json
    python examples/bench/program.py --target h200 --record examples/records

Two models, loss and all gradients (of the MLP its input's too), without rematerialization:

- MLP blocks (LayerNorm, Dense 4096 -> 16384, gelu, Dense -> 4096, residual) on 8192 tokens in bf16, their
  dense layers multiplied in each of the ways of ways.py. "total" counts arguments and outputs too: XLA uses
  the outputs' buffers while it computes, so a way whose gradients are small needs more temporaries;
- the GPT of train_gpt.py, to see that each layer that `model.report` lists in FP8 has its three FP8 GEMMs.

Needs `pip install "fp8jax[target]"`, no GPU, and no XLA_FLAGS. It says nothing about time.
"""

import argparse
import collections
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import output
import ways

import fp8jax
from fp8jax import program, targets

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from gpt_model import GPT, GPTConfig


class Blocks(nn.Module):
    """A stack of transformer MLPs."""

    dense: Callable[..., nn.Module]
    dtype: Any
    count: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(tokens, width) -> the same."""
        width = x.shape[-1]
        for _ in range(self.count):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(self.dense(4 * width)(y))
            x = x + self.dense(width)(y)
        return x


def compile_blocks(way: ways.Way, count: int, tokens: int, width: int, target: str) -> program.Program:
    """Loss and gradients of the blocks, compiled for the target."""
    model, step = ways.loss_and_gradient(way, Blocks(way.dense, way.dtype, count), input_too=True)
    x = jax.ShapeDtypeStruct((tokens, width), way.dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return program.read(targets.compile_for(step, variables, x, target=target))


def blocks_rows(
    names: Iterable[str], count: int, tokens: int, width: int, target: str
) -> list[dict[str, Any]]:
    """One row per way: what its program has."""
    programs = {name: compile_blocks(ways.WAYS[name], count, tokens, width, target) for name in names}
    return [{"way": name, **describe(read, programs.get("bf16"))} for name, read in programs.items()]


def describe(read: program.Program, reference: program.Program | None) -> dict[str, Any]:
    """A program in one row: GEMMs by kind, kernels, memory, and memory relative to the reference's."""
    fp8 = [gemm for gemm in read.gemms if gemm.kind == "cublaslt_f8"]
    return {
        "FP8 GEMMs": len(fp8),
        "fast": sum(gemm.fast for gemm in fp8),
        "precise": sum(not gemm.fast for gemm in fp8),
        "other GEMMs": len(read.gemms) - len(fp8),
        "float32 outputs": sum(gemm.out == "f32" for gemm in read.gemms),
        "kernels": read.kernels,
        "temporaries GB": read.temporaries / 1e9,
        "/ bf16": read.temporaries / reference.temporaries if reference else None,
        "total GB": read.total / 1e9,
        "/ bf16 ": read.total / reference.total if reference else None,
    }


def gpt_rows(recipe: str, config: GPTConfig, batch: int, target: str) -> list[dict[str, Any]]:
    """One row per layer of the GPT: the report's word, and the GEMMs that the program has for it."""
    model = fp8jax.transform(GPT(config), recipe)
    tokens = jax.ShapeDtypeStruct((batch, config.context), jnp.int32)

    def loss(variables: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(variables, tokens[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))

    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    compiled = targets.compile_for(fp8jax.value_and_grad(loss), variables, tokens, target=target)
    gemms = program.read(compiled).gemms
    rows, told = [], model.report(tokens).rows
    found = collections.Counter(layer_of(gemm, [row.path for row in told]) for gemm in gemms if is_fp8(gemm))
    for row in told:
        if row.kernel_shape:
            rows.append(
                {"layer": row.path, "report": "FP8" if row.fp8 else row.reason, "FP8 GEMMs": found[row.path]}
            )
    rows.append({"layer": "(none of them)", "report": "not FP8", "FP8 GEMMs": found[""]})
    return rows


def is_fp8(gemm: program.Gemm) -> bool:
    """Whether it is one of cuBLASLt's FP8 products."""
    return gemm.kind == "cublaslt_f8"


def layer_of(gemm: program.Gemm, paths: list[str]) -> str:
    """The layer that the product was traced in: the longest path in its name, "" if there is none."""
    inside = [path for path in paths if path and f"/{path}/" in gemm.name]
    return max(inside, key=len, default="")


def main() -> None:
    """Compiles, reads, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", choices=list(targets.TARGETS))
    parser.add_argument(
        "--ways", nargs="+", default=list(ways.WAYS)[1:], choices=list(ways.WAYS), metavar="WAY"
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4], help="MLP blocks in a row")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--recipe", default="O2", help="of the GPT")
    output.add_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.tokens, args.width, args.blocks = 64, 32, [1]
    if reason := targets.why_not():
        sys.exit(reason)
    sections = {}
    for count in args.blocks:
        title = f"{args.target}, {count} MLP block(s), {args.tokens} tokens, width {args.width}"
        sections[title] = blocks_rows(args.ways, count, args.tokens, args.width, args.target)
    config = GPTConfig(vocabulary=96, dtype="bfloat16", remat=False)
    sections[f"{args.target}, GPT, {args.recipe}"] = gpt_rows(args.recipe, config, 12, args.target)
    output.finish("program", args.target, sections, args)


if __name__ == "__main__":
    main()
