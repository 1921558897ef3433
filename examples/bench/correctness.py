"""Correctness of a GPU's numbers: a row has a measured number, its bound, and whether the bound held.

    python examples/bench/correctness.py
    python examples/bench/correctness.py --tiny

The reference is the CPU: ml_dtypes for casts, the backend "reference" for GEMMs, see products.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gpt
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import output
from products import computed, here_and_there, in_blocks, products, row, tails

import fp8jax
from fp8jax import ScaledArray, formats
from fp8jax.inspect import program
from fp8jax.quantization import cast, is_scaled

STEPS = 3


def rows(is_tiny: bool) -> list[dict[str, Any]]:
    """All rows; a part that fails is a row that did not hold."""
    found = []
    for part in (casts, gemm_counts, products, in_blocks, tails, computed, optimizer, losses):
        try:
            found += part(is_tiny)
        except Exception as error:
            found.append(row(f"{part.__name__}: {output.first_line(error)}", None, None, False))
    missed = sum(not each["held"] for each in found)
    return [*found, row("rows that did not hold", missed, 0)]


def casts(is_tiny: bool) -> list[dict[str, Any]]:
    """All bfloat16 numbers, random float32 ones of every exponent, and midpoints between codes."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    count = 2**16 if is_tiny else 2**22
    bits = np.random.default_rng(0).integers(2**32, size=count, dtype=np.uint64).astype(np.uint32)
    found = []
    for format in (formats.E4M3, formats.E5M2, formats.FP16):
        dtype = np.dtype(format.dtype)
        codes = (
            np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)
        )
        codes = np.sort(codes[np.isfinite(codes)])
        middle = (codes[1:] + codes[:-1]) / 2  # exact in float32
        values = np.concatenate([every, bits.view(np.float32), middle, np.nextafter(middle, np.inf)])
        values = np.concatenate([values, np.nextafter(middle, -np.inf, dtype=np.float32)]).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = np.clip(values, -format.max, format.max).astype(dtype)
        got = np.asarray(jax.jit(lambda x, format=format: cast(x, format))(values))
        same = (got.view(f"u{dtype.itemsize}") == expected.view(f"u{dtype.itemsize}")) | np.isnan(values)
        same &= np.isnan(got.astype(np.float32)) == np.isnan(values)
        wrong = int(np.sum(~same))
        found.append(row(f"casts to {format.name}: differ from ml_dtypes, of {len(values)}", wrong, 0))
    return found


def gemm_counts(is_tiny: bool) -> list[dict[str, Any]]:
    """FP8 GEMMs in programs: three of a dense layer's step, three of each layer of a GPT's report."""
    width = 64 if is_tiny else 4096
    dense = fp8jax.transform(nn.Dense(width, dtype=jnp.bfloat16), "te")
    x = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)

    def loss(variables: Any) -> Any:
        x = variables["params"]["x"]
        rest = {**variables, "params": {k: v for k, v in variables["params"].items() if k != "x"}}
        return jnp.mean(dense.apply(rest, x).astype(jnp.float32) ** 2)

    shapes = jax.eval_shape(dense.init, jax.random.key(0), x)
    shapes = {**shapes, "params": {**shapes["params"], "x": x}}
    lowered = jax.jit(fp8jax.value_and_grad(loss)).lower(shapes)
    count = fp8_gemms(lowered)
    found = [row("Dense step: FP8 GEMMs in the program", count, 3, count == 3)]
    if jax.default_backend() == "gpu":  # as gpu.py sets XLA's flags, and as a user finds them
        count = fp8_gemms(lowered, {"xla_gpu_enable_triton_gemm": True})
        found.append(row("the same, Triton allowed to take GEMMs", count, "3 or Triton's", True))
    model = fp8jax.transform(gpt.model_of(size := gpt.TINY if is_tiny else gpt.SIZES["GPT-124M"]), "O2")
    tokens = jax.ShapeDtypeStruct((size.batch, size.context), jnp.int32)
    told = 3 * sum(bool(layer.fp8 and layer.kernel_shape) for layer in model.report(tokens).rows)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    batch = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
    count = fp8_gemms(jax.jit(gradients_of(model)).lower(variables, batch))
    return [*found, row("GPT: FP8 GEMMs in the program, and by the report", count, told, count == told)]


def gradients_of(model: Any) -> Callable[..., Any]:
    """Loss, gradients and new variables of a GPT."""

    def loss(variables: Any, batch: jax.Array) -> jax.Array:
        return gpt.loss(lambda tokens: model.apply(variables, tokens), batch)

    return fp8jax.value_and_grad(loss)


def fp8_gemms(lowered: Any, options: Any = None) -> int:
    """cuBLASLt's FP8 calls; on a CPU, which has none, dots of FP8 operands."""
    if jax.default_backend() == "gpu":
        return program.read(lowered.compile(compiler_options=options)).count("cublaslt_f8")
    return sum(gemm.is_fp8 for gemm in program.read_lowered(lowered))


def optimizer(is_tiny: bool) -> list[dict[str, Any]]:
    """Steps of O2's AdamW: a fused multiply-add may move numbers at a tie by one code, and no others."""
    size = 64 if is_tiny else 512
    tx = fp8jax.optim.adamw(1e-3, "O2")
    keys = jax.random.split(jax.random.key(0), STEPS + 1)
    weight = fp8jax.quantize(jax.random.normal(keys[0], (size, size)), formats.FP16)
    grads = [fp8jax.quantize(1e-3 * jax.random.normal(key, (size, size)), formats.E4M3) for key in keys[1:]]

    @jax.jit
    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = tx.update({"kernel": grad}, state, params)
        return fp8jax.apply_updates(params, updates), state

    def steps(weight: Any, grads: Any) -> Any:
        params, state = {"kernel": weight}, jax.jit(tx.init)({"kernel": weight})
        for grad in grads:
            params, state = step(params, state, grad)
        return params, state

    results = here_and_there(steps, steps, weight, grads)
    trees = (jax.tree.leaves(tree, is_leaf=is_scaled) for tree in results)
    pairs = [(own, other) for own, other in zip(*trees, strict=True) if isinstance(own, ScaledArray)]
    moved, most, scales = 0.0, 0, 0
    for own, other in pairs:
        bits = f"i{own.data.dtype.itemsize}"
        apart = np.abs(own.data.view(bits).astype(int) - other.data.view(bits).astype(int))
        moved, most = max(moved, float(np.mean(apart > 0))), max(most, int(apart.max()))
        scales += int(np.sum(own.scale != other.scale))
    return [
        row(f"O2 AdamW, {STEPS} steps: share of codes that differ from the CPU's", moved, 5e-3),
        row("the same: codes apart", most, 1),
        row("the same: scales that differ", scales, 0),
    ]


def losses(is_tiny: bool) -> list[dict[str, Any]]:
    """The first losses of a small GPT at O2."""
    size = gpt.TINY if is_tiny else gpt.Size(2, 2, 128, 4, 128, 256)
    tokens = np.random.default_rng(0).integers(256, size=(size.batch, size.context + 1)).astype(np.int32)
    tx = optax.chain(fp8jax.optim.clip_by_global_norm(1.0), fp8jax.optim.adamw(6e-6, "O2", 0.9, 0.95))

    def steps(attention: str, tokens: Any) -> Any:
        model, found = fp8jax.transform(gpt.model_of(size, attention), "O2"), []

        @jax.jit
        def step(variables: Any, state: Any) -> Any:
            loss, grads, variables = gradients_of(model)(variables, tokens)
            updates, state = tx.update(grads, state, variables["params"])
            return fp8jax.apply_updates(variables, updates), state, loss

        variables = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
        state = jax.jit(tx.init)(variables["params"])
        for _ in range(STEPS):
            variables, state, loss = step(variables, state)
            found.append(loss)
        return np.array(found)

    own, other = here_and_there(*(functools.partial(steps, attention) for attention in ("", "xla")), tokens)
    apart = float(np.max(np.abs(own - other)))
    # Losses near 5.5 are means of numbers that were rounded to bfloat16, half an ulp of which is 2^-7.
    return [row(f"GPT, O2, losses of {STEPS} steps: largest distance from the CPU's", apart, 2**-7)]


def main() -> None:
    """Measures and prints."""
    args = output.parse(__doc__)
    output.finish("correctness", output.device(), {"correctness": rows(args.tiny)}, args)


if __name__ == "__main__":
    main()
