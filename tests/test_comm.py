"""The mean of gradients over eight devices, which are this machine's processor eight times."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import fp8jax
from fp8jax import formats, quantize
from fp8jax.scaled import is_scaled, value
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

DEVICES = 8
pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason="conftest.py asks for eight CPU devices")

# Shapes that do and do not divide by the number of devices, and one scale per layer.
KERNELS = {"w": ((16, 24), ()), "odd": ((5, 7), (1, 1)), "layers": ((3, 4, 5), (3, 1, 1))}


@functools.cache
def local_gradients():
    """Gradients of each device, stacked; magnitudes differ by a factor of ten."""
    rng = np.random.default_rng(0)
    size = np.geomspace(0.1, 1, DEVICES).astype(np.float32)

    def draw(*shape):
        return rng.normal(size=(DEVICES, *shape)).astype(np.float32) * size.reshape(-1, *[1] * len(shape))

    return {**{name: draw(*shape) for name, (shape, _) in KERNELS.items()}, "bias": draw(6)}


def narrow(grads):
    """One device's gradients as `value_and_grad` gives them."""
    return {
        name: quantize(g, formats.E4M3, power_of_two=True, blocks=KERNELS[name][1]) if name in KERNELS else g
        for name, g in grads.items()
    }


def on_each(function, *args):
    """`function` on every device's part of the arguments, and every device's result, stacked."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    along = PartitionSpec("data")

    def run(*args):
        out = function(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=along, out_specs=along, check_vma=False))(*args)


@functools.cache
def sent():
    return on_each(narrow, local_gradients())


@functools.cache
def reduced(recipe):
    return on_each(lambda g: fp8jax.comm.all_reduce(g, "data", recipe), sent())


@pytest.mark.parametrize("recipe", ["O2", "O2,comm=BF16", "O2,comm=FP32"])
def test_every_device_gets_the_mean(recipe):
    got, each = reduced(recipe), sent()
    assert jax.tree.structure(got) == jax.tree.structure(each)
    for name in each:
        result = jax.tree.map(np.asarray, got[name])
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, leaf[:1].repeat(DEVICES, 0)), result)
        one = jax.tree.map(lambda leaf: leaf[0], got[name])
        mean = np.mean(
            [np.asarray(value(jax.tree.map(lambda leaf, i=i: leaf[i], each[name]))) for i in range(8)], 0
        )
        if not is_scaled(one):
            np.testing.assert_allclose(one, mean, rtol=2.0**-7 if "BF16" in recipe else 1e-6, atol=2e-3)
            continue
        assert one.data.dtype == formats.E4M3.dtype and one.scale.shape == KERNELS[name][1]
        # Each of the eight is rounded to the common scale, and the mean is: half a step at the top for each.
        bound = (
            (16 + 16) * np.asarray(one.scale) if "comm" not in recipe else 16 * np.asarray(one.scale) + 2e-3
        )
        assert (np.abs(one.dequantize() - mean) <= bound).all()
        assert np.linalg.norm(one.dequantize() - mean) < 0.05 * np.linalg.norm(mean)


def test_the_common_scale_is_the_largest():
    for name in KERNELS:
        np.testing.assert_array_equal(
            reduced("O2")[name].scale, sent()[name].scale.max(axis=0, keepdims=True).repeat(8, 0)
        )


def test_equal_gradients_come_back_as_they_were():
    same = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], DEVICES, 0), sent())
    got = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), same)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6)


def test_largest_codes_do_not_overflow_and_nan_spreads():
    """A sum of eight float8 200s is NaN."""
    data = np.full((DEVICES, 4, 4), 448.0, formats.E4M3.dtype)
    data[3, 0, 0] = np.nan
    grads = {"w": fp8jax.ScaledArray(jnp.asarray(data), jnp.full((DEVICES,), 0.5))}
    got = np.asarray(on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), grads)["w"].data, np.float32)
    assert np.isnan(got[:, 0, 0]).all()
    assert (got.reshape(DEVICES, -1)[:, 1:] == 448).all()


@pytest.mark.parametrize("recipe", ["O2", "O2,comm=BF16", "te"])
def test_kernels_cross_the_wire_in_bytes(recipe):
    """Read from the compiled program: in O2 all that crosses in float32 is the bias, and scales."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    all = PartitionSpec()
    grads = jax.tree.map(lambda leaf: leaf[0], sent())
    run = jax.shard_map(
        lambda g: fp8jax.comm.all_reduce(g, "data", recipe),
        mesh=mesh,
        in_specs=all,
        out_specs=all,
        check_vma=False,
    )
    text = jax.jit(run).lower(grads).compile().as_text()
    collectives = re.findall(r"= (.*?) (?:all-reduce|all-to-all|all-gather)(?:-start)?\(", text)
    numbers = dict.fromkeys(("u8", "f32", "bf16"), 0)
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", " ".join(collectives)):
        numbers[dtype] += int(np.prod([int(n) for n in shape.split(",") if n]))
    total = sum(int(np.prod(shape)) for shape, _ in KERNELS.values())
    if recipe == "O2":
        assert numbers["u8"] >= 2 * total and numbers["f32"] + numbers["bf16"] < 20
    else:  # XLA on CPU adds bfloat16 in float32
        assert numbers["u8"] == 0 and numbers["f32"] + numbers["bf16"] >= total


def test_whole_variables_merge_states_by_max_and_loss_scales_by_min():
    grads = {
        PARAMS: sent(),
        SCALING: {"w": {"scale": jnp.arange(8.0)}},
        LOSS_SCALE: {"scale": 2.0 ** jnp.arange(8.0), "good_steps": jnp.arange(8)},
    }
    got = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), grads)
    np.testing.assert_array_equal(got[SCALING]["w"]["scale"], 7)
    np.testing.assert_array_equal(got[LOSS_SCALE]["scale"], 1)
    np.testing.assert_array_equal(got[PARAMS]["w"].data, reduced("O2")["w"].data)


def test_fp8_without_fp8_gradients_raises():
    with pytest.raises(
        ValueError, match="none of these is a ScaledArray; use a recipe with weight_grad=E4M3"
    ):
        on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), {"b": local_gradients()["bias"]})
