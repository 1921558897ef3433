"""What a GPU would run: training steps compiled for one that is not here, and what is in the programs.

    python examples/bench/program.py --target h200
    python examples/bench/program.py --target b200 --json
    python examples/bench/program.py --target h200 --record examples/records

Loss and all gradients (of layers and MLP blocks their input's too), of:

- a transformer layer (layer.py: hidden 4096, ffn 16384, 15872 tokens) in each of the ways of ways.py: GEMMs;
  gigabytes that GEMMs and all other kernels read and write ("less attention": without those between its
  products, which are the same in all ways; here they are plain, since cuDNN's cannot be compiled without it);
  how often the tensor is cast to FP8, and transposed, for which that is most often; and what all this takes
  at the peaks of the device's memory and tensor cores, an estimate;
- MLP blocks (LayerNorm, Dense 4096 -> 16384, gelu, Dense -> 4096, residual) on 8192 tokens in bf16, their
  dense layers multiplied in each of the ways of ways.py. "total" counts arguments and outputs too: XLA uses
  the outputs' buffers while it computes, so a way whose gradients are small needs more temporaries;
- a GPT of 12 layers: its temporaries, as it is and under rematerialization that keeps the products, or the
  FP8 operands (`fp8jax.dot.save_fp8_operands`);
- the GPT of train_gpt.py, to see that each layer that `model.report` lists in FP8 has its three FP8 GEMMs.

Needs `pip install "fp8jax[target]"`, no GPU, and no XLA_FLAGS.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import output
import ways
from layer import SEQUENCES, TIME, WIDTH, Layer, Layers

import fp8jax
from fp8jax.inspect import gemms, program, targets

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from gpt_model import GPT, PRODUCT, GPTConfig


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


def layer_rows(names: Iterable[str], shape: tuple[int, int, int], target: str) -> list[dict[str, Any]]:
    """One row per way: what the program of a transformer layer has and moves."""
    rows, reference = [], None
    for name in ["bf16", *(name for name in names if name != "bf16")]:
        way = ways.WAYS[name]
        layer = functools.partial(
            Layer, way.dense, way.dtype, heads=min(32, shape[-1] // 16), attention="xla"
        )
        model, step = ways.loss_and_gradient(way, Layers(layer), input_too=True)
        x = jax.ShapeDtypeStruct(shape, way.dtype)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        compiled = targets.compile_for(step, variables, x, target=target)
        read, traffic = program.read(compiled), program.traffic_of(compiled)
        figures = {
            "other GB": traffic.other / 1e9,
            "less attention": traffic.outside("attention") / 1e9,
            "temporaries GB": read.temporaries / 1e9,
            "estimated ms": 1e3 * traffic.seconds(targets.get(target)),
        }
        reference = reference or figures
        rows.append(
            {
                "way": name,
                "FP8 GEMMs": read.count("cublaslt_f8"),
                "other GEMMs": read.count() - read.count("cublaslt_f8"),
                "GEMM GB": traffic.gemms / 1e9,
                **{
                    key: each
                    for n, (title, figure) in enumerate(figures.items())
                    for key, each in ((title, figure), ("/ bf16" + " " * n, figure / reference[title]))
                },
                "casts": traffic.most_casts,
                "transposes": traffic.most_transposes,
            }
        )
    return rows


def remat_rows(recipes: Iterable[str], config: GPTConfig, batch: int, target: str) -> list[dict[str, Any]]:
    """One row per recipe and kind of rematerialization: temporaries of a GPT, and the casts of a tensor."""
    products = jax.checkpoint_policies.save_only_these_names(PRODUCT)
    kept = {"everything": None, "products": products, "FP8 operands": fp8jax.dot.save_fp8_operands}
    rows, reference = [], {}
    for recipe in ["bf16", *recipes]:
        for name, policy in kept.items():
            if recipe == "bf16" and name == "FP8 operands":
                continue
            sized = dataclasses.replace(config, remat=policy is not None, policy=policy)
            compiled = compile_gpt(fp8jax.transform(GPT(sized), recipe), config.context, batch, target)
            read, traffic = program.read(compiled), program.traffic_of(compiled)
            reference.setdefault(name, read.temporaries)
            of = reference["products" if name == "FP8 operands" else name]
            rows.append(
                {
                    "recipe": recipe,
                    "kept": name,
                    "FP8 GEMMs": read.count("cublaslt_f8"),
                    "casts": traffic.most_casts,
                    "temporaries GB": read.temporaries / 1e9,
                    "/ bf16": read.temporaries / of,
                }
            )
    return rows


def compile_gpt(model: Any, context: int, batch: int, target: str) -> jax.stages.Compiled:
    """Loss and gradients of a transformed GPT, compiled for the target."""
    tokens = jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)

    def loss(variables: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(variables, tokens[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))

    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((batch, context), jnp.int32))
    return targets.compile_for(fp8jax.value_and_grad(loss), variables, tokens, target=target)


def gpt_rows(recipe: str, config: GPTConfig, batch: int, target: str) -> list[dict[str, Any]]:
    """One row per layer of the GPT: the report's word, and the GEMMs that the program has for it."""
    tokens = jax.ShapeDtypeStruct((batch, config.context), jnp.int32)
    return [
        {
            "layer": "(none of them)" if row.layer == gemms.NO_LAYER else row.layer,
            "report": row.report or "not FP8",
            "FP8 GEMMs": row.fp8,
        }
        for row in gemms.check((GPT(config), tokens), recipe, target=target)
    ]


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
    shape = (2, 32, 64) if args.tiny else (SEQUENCES, TIME, WIDTH)
    title = f"{args.target}, a transformer layer, {shape[0] * shape[1]} tokens, width {shape[2]}"
    sections = {title: layer_rows(args.ways, shape, args.target)}
    for count in args.blocks:
        title = f"{args.target}, {count} MLP block(s), {args.tokens} tokens, width {args.width}"
        sections[title] = blocks_rows(args.ways, count, args.tokens, args.width, args.target)
    deep = GPTConfig(vocabulary=256, layers=12, heads=16, width=2048, context=256, dtype="bfloat16")
    if args.tiny:
        deep = dataclasses.replace(deep, heads=4, width=64, context=32)
    title = f"{args.target}, GPT, 12 layers of {deep.width}, {16 * deep.context} tokens"
    sections[title] = remat_rows(("te",) if args.tiny else ("te", "O2"), deep, 16, args.target)
    config = GPTConfig(vocabulary=96, dtype="bfloat16", remat=False)
    sections[f"{args.target}, GPT, {args.recipe}"] = gpt_rows(args.recipe, config, 12, args.target)
    output.finish("program", args.target, sections, args)


if __name__ == "__main__":
    main()
