"""Training steps compiled for a GPU that is not here: their GEMMs, kernels, memory and traffic.

    python examples/bench/program.py --target h200
    python examples/bench/program.py --target b200 --json
    python examples/bench/program.py --target b200 --ways bf16 "fp8jax mxfp8" "fp8jax nvfp4"
    python examples/bench/program.py --target h200 --record examples/records

Loss and all gradients, for layers and MLP blocks also of the input, of:

- a transformer layer (layer.py: hidden 4096, ffn 16384, 15872 tokens) in each way of ways.py: GEMMs;
  gigabytes that GEMMs and all other kernels read and write ("less attention": without the kernels of
  attention, which are the same in all ways, and plain here, since cuDNN's cannot be compiled without cuDNN);
  casts to FP8 and transposes of the tensor that has most of them;
- MLP blocks (LayerNorm, Dense 4096 -> 16384, gelu, Dense -> 4096, residual) on 8192 tokens in bf16, in each
  way. "total" counts arguments and outputs, too: XLA computes in the outputs' buffers, so a way with small
  gradients needs more temporaries;
- a GPT of 12 layers: temporaries without rematerialization, and with one that keeps the outputs of GEMMs or
  the FP8 operands (`fp8jax.dot.save_fp8_operands`), or the outputs in FP8, and the blocks' inputs, too
  (`gradient_checkpointing="dots_fp8"` and "dots_fp8_inputs").

Needs `fp8jax install-compiler`, no GPU, and no XLA_FLAGS.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import output
import traffic
import ways
from layer import SEQUENCES, TIME, WIDTH, stack

import fp8jax
from fp8jax.inspect import program, targets

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from gpt_model import GPT, LINEAR, GPTConfig

WAYS = {**ways.WAYS, **ways.IN_BLOCKS}


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


def compile_way(way: ways.Way, model: nn.Module, shape: tuple[int, ...], target: str) -> jax.stages.Compiled:
    """Loss and gradients of a model computed in a way, compiled for the target."""
    made, step = ways.loss_and_gradient(way, model, input_too=True)
    return targets.compile_for(step, *ways.shapes(way, made, shape), target=target)


def compile_blocks(
    way: ways.Way, count: int, tokens: int, width: int, target: str
) -> program.CompiledProgram:
    """The program of the MLP blocks."""
    return program.read(compile_way(way, Blocks(way.dense, way.dtype, count), (tokens, width), target))


def blocks_rows(names: list[str], count: int, tokens: int, width: int, target: str) -> output.Rows:
    """One row per way."""
    programs = {name: compile_blocks(WAYS[name], count, tokens, width, target) for name in names}
    bf16, rows = programs.get("bf16"), []
    for name, read in programs.items():
        counts, fast = output.gemms(read), [gemm.fast for gemm in read.gemms if gemm.kind == "cublaslt_f8"]
        rows.append(
            {
                "way": name,
                "FP8 GEMMs": counts["FP8 GEMMs"],
                "fast": sum(fast),
                "precise": len(fast) - sum(fast),
                "other GEMMs": counts["other GEMMs"],
                "float32 outputs": sum(gemm.out == "f32" for gemm in read.gemms),
                "kernels": read.kernels,
                "temporaries GB": read.temporaries / 1e9,
                "/ bf16": read.temporaries / bf16.temporaries if bf16 else None,
                "total GB": read.total / 1e9,
                "/ bf16 ": read.total / bf16.total if bf16 else None,
            }
        )
    return rows


def layer_rows(names: list[str], shape: tuple[int, int, int], target: str) -> output.Rows:
    """One row per way: the program of a transformer layer, and its traffic."""
    rows, reference = [], None
    for name in dict.fromkeys(("bf16", *names)):
        way = WAYS[name]
        compiled = compile_way(way, stack(way, heads=min(32, shape[-1] // 16)), shape, target)
        read, moved = program.read(compiled), traffic.read(compiled)
        figures = {
            "other GB": moved.other / 1e9,
            "less attention": moved.outside("attention") / 1e9,
            "temporaries GB": read.temporaries / 1e9,
        }
        reference = reference or figures
        row = {"way": name, **output.gemms(read), "GEMM GB": moved.gemms / 1e9}
        for number, (title, figure) in enumerate(figures.items()):
            row |= {title: figure, "/ bf16" + " " * number: figure / reference[title]}
        rows.append({**row, "casts": moved.most_casts, "transposes": moved.most_transposes})
    return rows


def remat_rows(recipes: list[str], config: GPTConfig, batch: int, target: str) -> output.Rows:
    """One row per recipe and rematerialization: temporaries of a GPT, and the casts of a tensor."""
    products = jax.checkpoint_policies.save_only_these_names(LINEAR)
    kept: dict[str, Any] = {
        "everything": None,
        "products": products,
        "FP8 operands": fp8jax.dot.save_fp8_operands,
        # Of the model without remat.
        "FP8 products": "dots_fp8",
        "FP8 products and inputs": "dots_fp8_inputs",
    }
    rows, reference = [], {}
    for recipe in ["bf16", *recipes]:
        for name, policy in kept.items():
            if recipe == "bf16" and name == "FP8 operands":
                continue
            ours = policy if isinstance(policy, str) else "none"
            has_remat = policy is not None and ours == "none"
            sized = dataclasses.replace(config, remat=has_remat, policy=policy if has_remat else None)
            model = fp8jax.transform(GPT(sized), recipe, gradient_checkpointing=ours)
            compiled = compile_gpt(model, config.context, batch, target)
            read, moved = program.read(compiled), traffic.read(compiled)
            reference.setdefault(name, (read.temporaries, moved.other))
            of, of_other = reference["products" if name.startswith("FP8") else name]
            rows.append(
                {
                    "recipe": recipe,
                    "kept": name,
                    "FP8 GEMMs": read.count("cublaslt_f8"),
                    "casts": moved.most_casts,
                    "temporaries GB": read.temporaries / 1e9,
                    "/ bf16": read.temporaries / of,
                    "other GB": moved.other / 1e9,
                    "/ bf16 ": moved.other / of_other,
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
    return targets.compile_for(ways.value_and_grad(loss), variables, tokens, target=target)


def main() -> None:
    """Compiles, reads, prints."""
    args = output.parse(
        __doc__,
        tiny={"tokens": 64, "width": 32, "blocks": [1]},
        choices={"target": targets.TARGETS, "ways": WAYS},
        target="h200",
        ways=list(ways.WAYS)[1:],
        blocks=[1, 4],
        tokens=8192,
        width=4096,
    )
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
    sections[title] = remat_rows(["te"] if args.tiny else ["te", "O2"], deep, 16, args.target)
    output.finish("program", args.target, sections, args)


if __name__ == "__main__":
    main()
