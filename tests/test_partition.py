"""Calls that XLA does not look into, split over devices."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fp8jax
from fp8jax.backends import pallas
from fp8jax.inspect import targets
from fp8jax.quantization import BLOCK_1X128, BLOCK_128X128, NVFP4_1X16, quantize_blocks
from fp8jax.quantization.kernels import rows_and_columns, rows_and_columns_fp4
from fp8jax.quantization.kernels.partition import split_by_devices

DEVICES = 4


def on_devices(x, *spec):
    return jax.device_put(x, NamedSharding(targets.mesh(devices=DEVICES), PartitionSpec(*spec)))


def gathered(compiled):
    """The shapes that are all-gathered, operands and results."""
    results = re.findall(r" = (.*) all-gather(?:-start)?\(", compiled.as_text())
    return [shape for result in results for shape in re.findall(r"\w+\[[\d,]*\]", result)]


@pytest.mark.parametrize("spec", [("devices",), (None, "devices")], ids=["rows", "columns"])
def test_quantizer_is_split(spec, monkeypatch):
    """Each device quantizes its shard, and the codes and scales are those of the whole matrix."""
    monkeypatch.setattr(rows_and_columns, "INTERPRET", True)
    x = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    quantize = jax.jit(
        functools.partial(rows_and_columns._at_once, method=BLOCK_1X128, transposes=(False, True))
    )
    compiled = quantize.lower(on_devices(x, *spec)).compile()
    assert not gathered(compiled)
    for one, other in zip(compiled(on_devices(x, *spec)), quantize(x), strict=True):
        np.testing.assert_array_equal(one.scale, other.scale)
        np.testing.assert_array_equal(one.data.view(jnp.uint8), other.data.view(jnp.uint8))
        assert one.data.addressable_shards[0].data.size * DEVICES == one.data.size


@pytest.mark.parametrize("spec", [("devices",), (None, "devices")], ids=["rows", "columns"])
def test_fp4_quantizer_is_split(spec, monkeypatch):
    """Each device quantizes its shard, with the tensor's scales and the random bits of the whole matrix."""
    monkeypatch.setattr(rows_and_columns_fp4, "INTERPRET", True)
    x = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)

    @jax.jit
    def quantize(x):
        seeds = lambda key, amax: key.astype(jnp.uint32)  # noqa: E731
        static = {"method": NVFP4_1X16, "transposes": (False, True), "transform": True, "seeds": seeds}
        return rows_and_columns_fp4._at_once(x, jnp.array([3.0, 5.0]), **static)

    compiled = quantize.lower(on_devices(x, *spec)).compile()
    assert not [shape for shape in gathered(compiled) if "512" in shape]
    for one, other in zip(compiled(on_devices(x, *spec)), quantize(x), strict=True):
        np.testing.assert_array_equal(one.scale.data.view(jnp.uint8), other.scale.data.view(jnp.uint8))
        np.testing.assert_array_equal(one.data.bytes, other.data.bytes)
        assert one.data.bytes.addressable_shards[0].data.size * DEVICES == one.data.bytes.size


@pytest.mark.parametrize(
    "of_a, of_b, is_gathered",
    [
        (("devices",), (), False),  # data parallel
        (("devices",), (None, "devices"), True),  # and a kernel split along k
        ((), ("devices",), False),  # a kernel split along n
        ((None, "devices"), (None, "devices"), False),  # a sum over devices
    ],
)
def test_gemm_is_split(of_a, of_b, is_gathered, monkeypatch):
    """Of operands in all usual shardings only the kernel is gathered, as codes."""
    monkeypatch.setattr(pallas, "INTERPRET", True)
    random = np.random.default_rng(0)
    a, b = (
        quantize_blocks(jnp.asarray(random.normal(size=(512, 512)).astype(np.float32)), method)
        for method in (BLOCK_1X128, BLOCK_128X128)
    )
    multiply = jax.jit(lambda a, b: pallas.gemm(*jax.tree.map(lambda leaf: leaf[None], (a, b)), jnp.float32))
    sharded = [
        jax.tree.map(lambda x, spec=spec: on_devices(x, *spec), q) for spec, q in ((of_a, a), (of_b, b))
    ]
    compiled = multiply.lower(*sharded).compile()
    assert bool(gathered(compiled)) == is_gathered
    np.testing.assert_allclose(compiled(*sharded), multiply(a, b), rtol=1e-5, atol=1e-3)


def test_shards_of_parts_of_blocks(monkeypatch):
    """A dim whose shards are no whole blocks is gathered, and the result is the same."""
    monkeypatch.setattr(rows_and_columns, "INTERPRET", True)
    x = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    quantize = jax.jit(functools.partial(rows_and_columns._at_once, method=BLOCK_1X128, transposes=(True,)))
    compiled = quantize.lower(on_devices(x, "devices")).compile()
    assert gathered(compiled)
    np.testing.assert_array_equal(compiled(on_devices(x, "devices"))[0].scale, quantize(x)[0].scale)


def test_vmap():
    """A mapped call is one call with more batches."""
    double = split_by_devices(lambda x, y: x * 2 + y, "b m, b m -> b m", {})
    x, y = jnp.arange(24.0).reshape(2, 3, 4), jnp.ones((3, 4))
    np.testing.assert_array_equal(jax.vmap(double, in_axes=(0, None))(x, y), x * 2 + 1)


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize("recipe, target", [("block", "h200"), ("mxfp8", "b200")])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["data parallel", "sharded kernel"])
def test_compiled_for_gpus(recipe, target, is_sharded):
    """Under `jax.jit` with shardings each device computes its rows; a sharded kernel is gathered as codes."""
    model = fp8jax.transform(nn.Dense(1024, use_bias=False), recipe)
    x, (m, k) = jnp.zeros((2048, 512), jnp.bfloat16), (2048, 512)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    mesh = targets.mesh(target, DEVICES)

    def placed(leaf, *spec):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    variables = jax.tree.map(
        lambda leaf: placed(leaf, "devices") if is_sharded and leaf.ndim == 2 else placed(leaf), variables
    )

    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    step = jax.value_and_grad(loss, (0, 1), allow_int=True)
    compiled = targets.compile_for(step, variables, placed(x, "devices"), target=target, devices=DEVICES)
    codes = [shape for shape in gathered(compiled) if shape.startswith("f8e4m3fn")]
    assert bool(codes) == is_sharded and not [shape for shape in gathered(compiled) if f"[{m}" in shape]
    assert not [shape for shape in gathered(compiled) if shape.startswith(("bf16", "f16"))]
    assert f"[1,{m // DEVICES},{k}]" in compiled.as_text() and f"[1,{m},{k}]" not in compiled.as_text()
