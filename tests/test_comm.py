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
from fp8jax.quantization import ScaledGradient, as_gradients, is_scaled, quantize_gradient, value
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


def values(leaf):
    """What each device's tensor is worth."""
    return np.asarray(jax.vmap(value)(leaf))


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


def test_all_reduce_of_whole_variables():
    """Scaling states are merged by max, and loss scales by min."""
    grads = {
        PARAMS: sent(),
        SCALING: {"w": {"scale": jnp.arange(8.0)}},
        LOSS_SCALE: {"scale": 2.0 ** jnp.arange(8.0), "good_steps": jnp.arange(8)},
    }
    got = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), grads)
    np.testing.assert_array_equal(got[SCALING]["w"]["scale"], 7)
    np.testing.assert_array_equal(got[LOSS_SCALE]["scale"], 1)
    np.testing.assert_array_equal(got[PARAMS]["w"].data, reduced("O2")["w"].data)
    ones = jax.tree.map(lambda _: jnp.ones(DEVICES), sent(), is_leaf=is_scaled)
    again, state = on_each(lambda g, mu: fp8jax.comm.all_reduce(g, "data", mu=mu), grads, ones)
    np.testing.assert_array_equal(again[PARAMS]["w"].data, got[PARAMS]["w"].data)
    assert (np.asarray(state["w"]) != 1).all() and (np.asarray(state["bias"]) == 1).all()
    cut = {**grads, PARAMS: {"layer": jnp.ones((DEVICES, 8, 2))}}
    parts = on_each(lambda g: fp8jax.comm.reduce_scatter(g, "data"), cut)
    np.testing.assert_array_equal(parts[SCALING]["w"]["scale"], 7)
    np.testing.assert_allclose(parts[PARAMS]["layer"], np.ones((DEVICES, 1, 2)))


@pytest.mark.parametrize("call", [fp8jax.comm.all_reduce, fp8jax.comm.reduce_scatter])
def test_batch_statistics_become_their_mean(call):
    keys = jax.random.split(jax.random.key(0), DEVICES)
    grads = {
        PARAMS: {"w": jnp.ones((DEVICES, 8))},
        "batch_stats": {"mean": jnp.arange(8.0), "count": jnp.arange(8), "key": keys},
    }
    got = on_each(lambda g: call(g, "data", "te"), grads)["batch_stats"]
    np.testing.assert_array_equal(got["mean"], 3.5)
    np.testing.assert_array_equal(got["count"], np.arange(8))
    assert (got["key"] == keys).all()


def test_without_a_recipe_the_leaves_decide():
    """Codes cross as codes, and floats in float32; a sum over `Zero`'s devices decides alike."""
    codes, floats = sent(), local_gradients()
    together = on_each(lambda g: fp8jax.comm.all_reduce(g, "data"), codes)
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(reduced("O2")), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    means = on_each(lambda g: fp8jax.comm.all_reduce(g, "data"), floats)
    shards = on_each(lambda g: fp8jax.comm.reduce_scatter(g, "data"), {"w": floats["w"]})["w"]
    for name, each in floats.items():
        np.testing.assert_allclose(means[name][0], each.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(shards.reshape(16, 24), floats["w"].mean(0), rtol=1e-5, atol=1e-7)
    beside = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", floats="FP8"), floats)
    assert np.abs(beside["w"] - means["w"]).max() > 0


@pytest.mark.parametrize("recipe", [None, "te"])
def test_factors_of_floats_that_are_not_rounded(recipe):
    x = jnp.ones((DEVICES, 4))
    with pytest.raises(ValueError, match="`mu`: expected gradients that are sent in FP8; got none"):
        on_each(lambda g, mu: fp8jax.comm.all_reduce(g, "data", recipe, mu=mu), {"w": x}, {"w": x[:, 0]})


def test_a_sum_is_the_mean_times_the_devices():
    got = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", op="sum"), sent())
    for name, mean in reduced("O2").items():
        np.testing.assert_allclose(values(got[name]), 8 * values(mean), rtol=1e-6)


def test_floats_alone_cross_in_fp8_within_the_bound():
    floats = local_gradients()
    got = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), floats)
    for name, each in floats.items():
        assert got[name].dtype == jnp.float32
        scale = 2.0 ** np.ceil(np.log2(np.abs(each).max() / 448))
        assert np.abs(got[name][0] - each.mean(0)).max() <= (16 + 16) * scale
    beside = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", floats="FP8"), sent())
    assert np.abs(beside["bias"] - reduced("O2")["bias"]).max() > 0


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("recipe", ["O2", "O2,comm=FP32"])
def test_parts_are_those_of_the_whole(op, recipe):
    """`reduce_scatter` then `all_gather` is `all_reduce`; one tensor's parts share a scale."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(DEVICES, *shape)), jnp.float32)  # noqa: E731
    narrow = lambda x, blocks: quantize(x, formats.E4M3, power_of_two=True, blocks=blocks)  # noqa: E731
    grads = {
        "rows": narrow(draw(16, 3), (DEVICES, 1, 1)),
        "layers": narrow(draw(8, 2, 4), (DEVICES, 8, 1, 1)),
        "bias": draw(8),
    }
    grads = {name: squeezed(leaf, name) for name, leaf in grads.items()}
    parts = on_each(lambda g: fp8jax.comm.reduce_scatter(g, "data", recipe, op=op), grads)
    assert parts["rows"].shape == (DEVICES, 2, 3) and parts["layers"].scale.shape == (DEVICES, 1, 1, 1)
    assert len(np.unique(parts["rows"].scale)) == 1
    whole = on_each(lambda g: fp8jax.comm.all_gather(g, "data"), parts)
    want = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", recipe, op=op), grads)
    for name in grads:
        a, b = values(whole[name]), values(want[name])
        np.testing.assert_allclose(a, b, rtol=1e-6 if recipe == "O2" or name == "bias" else 0.07, atol=1e-2)


def squeezed(leaf, name):
    """A scale for each device, as `value_and_grad` gives it: of the whole tensor, or of its layers."""
    if not is_scaled(leaf):
        return leaf
    return fp8jax.ScaledArray(leaf.data, leaf.scale.reshape(DEVICES) if name == "rows" else leaf.scale)


@pytest.mark.parametrize("axis", [0, 1])
def test_another_axis_is_cut_and_put_together(axis):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(DEVICES, 8, 16)), jnp.float32)
    same = jnp.repeat(x[:1], DEVICES, 0)
    part = on_each(lambda g: fp8jax.comm.reduce_scatter(g, "data", "fp32", axis=axis), {"w": same})["w"]
    assert part.shape[1:] == ((1, 16), (8, 2))[axis]
    back = on_each(lambda g: fp8jax.comm.all_gather(g, "data", axis=axis), {"w": part})["w"]
    np.testing.assert_allclose(back, same, rtol=1e-6)


@pytest.mark.parametrize("format", [formats.E4M3, formats.FP16])
def test_codes_are_gathered_bit_for_bit_and_put_on_one_scale(format):
    x = jnp.asarray(np.random.default_rng(3).normal(size=(DEVICES, 2, 5)), jnp.float32)
    x = x * 2.0 ** jnp.arange(DEVICES).reshape(-1, 1, 1)
    parts = quantize(x, format, power_of_two=True, blocks=(DEVICES, 1, 1))
    each = fp8jax.ScaledArray(parts.data, parts.scale.reshape(DEVICES))
    got = on_each(lambda g: fp8jax.comm.all_gather(g, "data"), {"w": each})["w"]
    assert got.data.dtype == format.dtype and (np.asarray(got.scale) == np.asarray(each.scale).max()).all()
    want = np.asarray(parts.dequantize()).reshape(16, 5)
    # Parts on smaller scales lose what falls below the smallest step of the largest.
    step = 2.0 ** (1 - format.exponent_bias - format.mantissa_bits) * float(got.scale[0])
    assert np.abs(values(got)[0] - want).max() <= step
    floats = on_each(lambda g: fp8jax.comm.all_gather(g, "data", floats="FP8"), {"w": x})["w"]
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / 448))
    assert np.abs(floats[0] - np.asarray(x).reshape(16, 5)).max() <= 16 * scale


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_gathered_shards_of_a_gradient_are_a_gradient(factor):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(DEVICES, 16, 3)), jnp.float32)

    def both(x):
        grads = as_gradients({"w": quantize_gradient(x)})
        grads = fp8jax.optim.clip_by_global_norm(factor).update(grads, None)[0]
        parts = fp8jax.comm.reduce_scatter(grads, "data")
        return fp8jax.comm.all_gather(parts, "data"), fp8jax.comm.all_reduce(grads, "data")

    got, want = on_each(both, x)
    assert isinstance(got["w"], ScaledGradient)
    np.testing.assert_allclose(values(got["w"]), values(want["w"]), rtol=1e-6)


def test_gathered_shards_without_a_tag_are_not_numbers():
    def broken(x):
        grads = {"w": quantize_gradient(x)}
        return fp8jax.comm.all_gather(jax.tree.map(lambda a: a + a, as_gradients(grads)), "data")

    assert np.isnan(values(on_each(broken, jnp.ones((DEVICES, 8, 3)))["w"])).all()


@pytest.mark.parametrize("recipe, want", [("te", np.inf), ("O2", np.nan)])
def test_an_infinity_of_one_device(recipe, want):
    x = jnp.ones((DEVICES, 4)).at[3, 1].set(jnp.inf)
    got = on_each(lambda x: fp8jax.comm.all_reduce(x, "data", recipe), x)
    np.testing.assert_allclose(got, np.tile([1, want, 1, 1], (DEVICES, 1)))


def collectives(function, *args):
    """The kinds of collectives in the compiled program, and the bytes of their results."""
    mesh, everywhere = Mesh(np.array(jax.devices()), ("data",)), PartitionSpec()
    run = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    text = jax.jit(run).lower(*args).compile().as_text()
    found = re.findall(r"= (.*?) (all-reduce|all-to-all|all-gather|reduce-scatter)(?:-start)?\(", text)
    sizes = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "pred": 1}
    total = 0
    for shapes, _ in found:
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            total += sizes[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
    return [kind for _, kind in found], total


def test_collectives_of_many_tensors():
    """Many tensors cross in few collectives, with a quarter of float32's bytes."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    grads = {str(i): shape for i in range(12)}
    kinds, narrow = collectives(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), grads)
    assert sorted(kinds) == ["all-gather", "all-reduce", "all-to-all"]
    # A float32 all-reduce moves what a reduce-scatter and an all-gather do: two of its size.
    assert narrow <= 0.27 * 2 * 4 * 12 * 64 * 64
    kinds, _ = collectives(lambda g: fp8jax.comm.reduce_scatter(g, "data", "O2"), grads)
    assert sorted(kinds) == ["all-reduce", "all-to-all"]
    kinds, moved = collectives(lambda g: fp8jax.comm.all_gather(g, "data", floats="FP8"), grads)
    assert sorted(kinds) == ["all-gather", "all-reduce"] and moved <= 8 * 1.02 * 12 * 64 * 64


def test_large_trees_go_in_several_buckets(monkeypatch):
    monkeypatch.setattr(fp8jax.comm.buckets, "BUCKET", 100)
    again = on_each(lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), sent())
    for name in KERNELS:
        np.testing.assert_array_equal(again[name].data, reduced("O2")[name].data)
    kinds, _ = collectives(
        lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), {str(i): jnp.ones((6, 10)) for i in range(5)}
    )
    assert kinds.count("all-to-all") == 5


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda g: fp8jax.comm.all_reduce(g, "data", op="max"), "`op`: expected mean or sum; got 'max'"),
        (lambda g: fp8jax.comm.all_reduce(g, "data", floats="FP4"), "`floats`: expected FP32 or FP8"),
        (lambda g: fp8jax.comm.all_gather(g, "data", floats="BF16"), "`floats`: expected FP32 or FP8"),
        (lambda g: fp8jax.comm.reduce_scatter(g, "data"), r"axis 0 divides by the 8 devices; got \(6,\)"),
        (lambda g: fp8jax.comm.reduce_scatter(g, "data", axis=1), r"axis 1 divides by the 8 devices"),
    ],
)
def test_what_cannot_be_done_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        on_each(call, {"b": local_gradients()["bias"]})


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda g: fp8jax.comm.all_reduce(g, "data", "te", op="sum"), "`grads`.*{}.*jax.lax.psum"),
        (lambda g: fp8jax.comm.all_reduce(g, "data", "O2"), "`grads`.*{}.*jax.lax.psum"),
        (lambda g: fp8jax.comm.all_reduce(g, "data"), "`grads`.*{}.*jax.lax.psum"),
        (lambda g: fp8jax.comm.reduce_scatter(g, "data", "te"), "`grads`.*{}.*jax.lax.psum"),
        (lambda g: fp8jax.comm.all_gather(g, "data", floats="FP8"), "`tree`.*{}.*floats='FP32'"),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_leaves_that_are_no_floats_are_refused(call, says, dtype):
    """A sum in float32 rounds integers above 2**24, and a mean of integers is cut off."""
    x = jnp.ones((DEVICES, 8), dtype)
    got = says.format(rf"expected floats; got {dtype} at \['a'\]\['n'\]")
    with pytest.raises(ValueError, match=got):
        on_each(call, {"a": {"n": x}, "b": jnp.ones((DEVICES, 8))})
    whole = on_each(lambda g: fp8jax.comm.all_gather(g, "data"), x)
    assert whole.dtype == dtype and whole.shape == (DEVICES, 64)


def test_numbers_are_arrays():
    got = on_each(lambda x: fp8jax.comm.all_reduce({"w": x, "factor": 1.5}, "data"), jnp.ones((DEVICES, 8)))
    np.testing.assert_array_equal(got["factor"], np.full(DEVICES, 1.5))
    for call, says in ((fp8jax.comm.reduce_scatter, "axis 0 divides"), (fp8jax.comm.all_gather, "an axis 0")):
        with pytest.raises(ValueError, match=rf"expected tensors .*{says}.*; got \(\)\. Take another `axis`"):
            on_each(lambda x, call=call: call(1.5, "data"), jnp.ones(DEVICES))


@pytest.mark.parametrize("floats", ["FP32", "FP8"])
@pytest.mark.parametrize("shape, axis", [((8,), 1), ((16, 6), 2), ((16, 6), -3), ((), 0)])
def test_axes_that_a_tensor_lacks_are_refused(shape, axis, floats):
    x = {"w": jnp.ones((DEVICES, *shape))}
    says = rf"axis {axis}.*; got {re.escape(str(shape))} at \['w'\]. Take another `axis`"
    with pytest.raises(ValueError, match=says):
        on_each(lambda g: fp8jax.comm.all_gather(g, "data", axis=axis, floats=floats), x)
    with pytest.raises(ValueError, match=says):
        on_each(lambda g: fp8jax.comm.reduce_scatter(g, "data", axis=axis, floats=floats), x)


# The automatic scale #############################################################################


def after(steps, gradients):
    """The state after some steps on the same gradients, and the last mean."""

    def run(x):
        state = fp8jax.comm.auto_scaling.init({"w": x})

        def step(state, _):
            mean, state = fp8jax.comm.all_reduce({"w": x}, "data", "O2", mu=state)
            return state, mean["w"]

        state, means = jax.lax.scan(step, state, None, length=steps)
        return state["w"], means[-1]

    return on_each(run, gradients)


def test_the_automatic_scale_lifts_what_would_underflow():
    """One number in 200,000 is 2**20 times the others: on its scale they are zero."""
    x = np.random.default_rng(0).normal(size=(200_000,)).astype(np.float32)
    x[7] = 2.0**20
    x = jnp.asarray(np.repeat(x[None], DEVICES, 0))
    plain = on_each(lambda g: fp8jax.comm.all_reduce({"w": g}, "data", "O2")["w"], x)
    rest = np.delete(np.asarray(x[0]), 7)
    assert (np.delete(np.asarray(plain[0]), 7) != 0).mean() < 1e-3
    grown = {"w": jnp.full((DEVICES,), 2.0**12)}
    lifted, state = on_each(lambda g, mu: fp8jax.comm.all_reduce({"w": g}, "data", "O2", mu=mu), x, grown)
    error = np.delete(np.asarray(lifted["w"][0]), 7) - rest
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(rest)
    # One in 200,000 is less than one in 100,000: mu grows on.
    np.testing.assert_allclose(state["w"], 2.0**12 * 2**0.001, rtol=1e-6)


def test_automatic_scale():
    """The factor grows exponentially, and overflow halves it."""
    x = np.random.default_rng(0).normal(size=(DEVICES, 1000)).astype(np.float32)
    mu, mean = after(20, jnp.asarray(x * 0.9))
    # A power-of-two scale leaves room: until it is used up nothing is cut off.
    assert (np.asarray(mu) == np.asarray(mu)[0]).all()
    np.testing.assert_allclose(mu[0], 2**0.02, rtol=1e-5)
    many = {"w": jnp.full((DEVICES,), 64.0)}
    _, state = on_each(
        lambda g, mu: fp8jax.comm.all_reduce({"w": g}, "data", "O2", mu=mu), jnp.asarray(x), many
    )
    np.testing.assert_array_equal(state["w"], 32.0)
    one = {"w": jnp.ones((DEVICES,))}
    zeros, state = on_each(
        lambda g, mu: fp8jax.comm.all_reduce({"w": g}, "data", "O2", mu=mu), jnp.zeros((DEVICES, 10)), one
    )
    assert not np.asarray(zeros["w"]).any() and np.isfinite(np.asarray(state["w"])).all()


def on_two(function):
    """`function` of rows in a `jax.shard_map` over two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False
    )


def mean_of_product(params, x):
    return jnp.mean(x * params["w"])


def test_zero_inside_of_a_map():
    zero = fp8jax.comm.Zero(Mesh(np.array(jax.devices()[:2]), ("data",)))
    grad_fn = fp8jax.value_and_grad(mean_of_product, zero=zero)
    inside = on_two(lambda x: grad_fn({"w": jnp.ones(())}, x)[0][None])
    with pytest.raises(ValueError, match="`zero`: expected a call outside of .*; got one inside of 'data'"):
        inside(jnp.ones((4, 4)))
    with pytest.raises(ValueError, match="`axis_name`: expected None beside `zero`"):
        fp8jax.value_and_grad(mean_of_product, zero=zero, axis_name="data")


def test_axes_that_nobody_maps_over():
    x, model = jnp.ones((4, 32)), fp8jax.transform(lambda params, x: x @ params["kernel"], "te")
    variables = model.init({"kernel": jnp.ones((32, 32))}, x)
    loss = lambda variables, x: jnp.mean(model.apply(variables, x))  # noqa: E731
    with pytest.raises(ValueError, match="`axis_name`: expected an axis that .*; got 'data' outside of both"):
        fp8jax.value_and_grad(loss, axis_name="data")(variables, x)
    for collective in (fp8jax.comm.all_reduce, fp8jax.comm.reduce_scatter, fp8jax.comm.all_gather):
        with pytest.raises(ValueError, match="got 'dat' inside of 'data'"):
            on_two(lambda x, each=collective: each(x, "dat"))(x)


def test_axes_in_a_list():
    x, model = jnp.ones((4, 32)), fp8jax.transform(lambda params, x: x @ params["kernel"], "te")
    variables = model.init({"kernel": jnp.ones((32, 32))}, x)
    loss = lambda variables, x: jnp.mean(model.apply(variables, x))  # noqa: E731
    step = fp8jax.value_and_grad(loss, axis_name=["data"])
    np.testing.assert_array_equal(on_two(lambda x: step(variables, x)[0][None])(x), [32, 32])


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_collectives_over_axes_in_a_list(collective):
    """As over a tuple."""
    grads = {"w": quantize_gradient(jnp.arange(32.0).reshape(8, 4), ()), "b": jnp.arange(8.0)}
    mesh, everywhere = jax.make_mesh((2, 2), ("data", "model")), PartitionSpec()

    def on_each(axes, options):
        run = lambda grads: getattr(fp8jax.comm, collective)(grads, axes, **options)  # noqa: E731
        specs = {"in_specs": everywhere, "out_specs": everywhere, "check_vma": False}
        return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(grads)

    options = {} if collective == "all_gather" else {"recipe": "O2"}
    got, want = (on_each(axes, options) for axes in (["data", "model"], ("data", "model")))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float32(a), np.float32(b)), got, want)
