"""ScaledArray as a container: a pytree, a number, and what it refuses."""

import dataclasses
import functools
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8jax import ScaledArray, formats, quantize
from fp8jax.quantization import is_scaled, value

FORMATS = (formats.E4M3, formats.E5M2, formats.FP16, formats.BF16)


@functools.cache
def example(format=formats.E4M3, shape=(4, 6), blocks=(2, 3), power_of_two=False):
    """Codes and scales that are neither zeros nor ones."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.jit(lambda x: quantize(x, format, blocks=blocks, power_of_two=power_of_two))(x)


def assert_same(got, expected):
    assert isinstance(got, ScaledArray)
    for field in dataclasses.fields(ScaledArray):
        a, b = (np.asarray(getattr(x, field.name)) for x in (got, expected))
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        assert a.tobytes() == b.tobytes(), field.name


@pytest.mark.parametrize("blocks", [(), (1, 1), (2, 3)])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_field_survives_the_way_through_a_tree(format, blocks):
    q = example(format, blocks=blocks)
    leaves, treedef = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == [
        format.dtype,
        jnp.uint32,
    ]  # data first: Linen compares its shape
    assert_same(jax.tree.unflatten(treedef, leaves), q)
    assert_same(jax.tree.map(lambda leaf: leaf, {"w": q})["w"], q)
    assert_same(jax.jit(lambda q: q)(q), q)
    assert_same(jax.device_get(q), q)
    paths = jax.tree_util.tree_flatten_with_path(q)[0]
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".data", ".scale"]
    # Tree functions put what they like in the place of arrays.
    ranks = jax.tree.map(lambda leaf: leaf.ndim, q)
    assert (ranks.data, ranks.scale) == (2, len(blocks))


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().scale = jnp.ones(())


@pytest.mark.parametrize(
    "format, blocks, nbytes",
    [(formats.E4M3, (), 24 + 4), (formats.FP16, (1, 1), 48 + 4), (formats.E5M2, (2, 3), 24 + 24)],
)
def test_shape_and_bytes(format, blocks, nbytes):
    """The shape of the value; the bytes of codes and scales."""
    q = example(format, blocks=blocks)
    assert (q.shape, q.ndim, q.size, q.nbytes) == ((4, 6), 2, 24, nbytes)
    scalar = quantize(jnp.float32(3), format)
    assert (scalar.shape, scalar.ndim, scalar.size) == ((), 0, 1)


@pytest.mark.parametrize("blocks", [(), (1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_its_value_is_data_times_scale(format, blocks, strict_dtypes):
    q = example(format, blocks=blocks)
    scale = np.asarray(q.scale)
    for axis, (count, dim) in enumerate(zip(blocks, q.shape, strict=False)):
        scale = np.repeat(scale, dim // count, axis)
    expected = np.asarray(q.data).astype(np.float32) * scale
    assert q.dequantize().dtype == jnp.float32
    np.testing.assert_array_equal(q.dequantize(), expected)
    np.testing.assert_array_equal(value(q), expected)
    np.testing.assert_array_equal(q.dequantize(jnp.bfloat16), jnp.asarray(expected).astype(jnp.bfloat16))
    assert value(scale) is scale and is_scaled(q) and not is_scaled(scale)


OTHERS = {
    "array": jnp.arange(1.0, 25.0).reshape(4, 6),
    "bfloat16": jnp.arange(1.0, 25.0, dtype=jnp.bfloat16).reshape(4, 6),
    "numpy": np.arange(1.0, 25.0, dtype=np.float32).reshape(4, 6),
    "scaled": example(formats.FP16, blocks=()),
    "number": 2.5,
    "numpy number": np.float32(2.5),
}


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
@pytest.mark.parametrize("other", OTHERS)
def test_arithmetic_acts_on_the_value_from_both_sides(name, other):
    operate, q, other = getattr(operator, name), example(), OTHERS[other]
    v = np.asarray(q.dequantize())
    plain = np.asarray(value(other), np.float32)
    for got, expected in ((operate(q, other), operate(v, plain)), (operate(other, q), operate(plain, v))):
        assert isinstance(got, jax.Array) and got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=2.0**-22)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("other", [*OTHERS, "itself"])
def test_comparisons_are_of_the_values_entries(name, other):
    compare, q = getattr(operator, name), example()
    other = q if other == "itself" else OTHERS[other]
    v, plain = q.dequantize(), jnp.asarray(value(other), jnp.float32)
    for got, expected in ((compare(q, other), compare(v, plain)), (compare(other, q), compare(plain, v))):
        assert isinstance(got, jax.Array) and got.dtype == bool
        np.testing.assert_array_equal(got, expected)


def test_a_comparison_leaves_the_hash_and_none():
    q, same = example(), quantize(jnp.zeros(3), "E4M3")
    assert {q: 1, same: 2}[q] == 1 and hash(q) == hash(q)
    assert (q == None) is False and (q != None) is True  # noqa: E711
    assert float(jax.jit(lambda q: jnp.mean(q == 0))(same)) == 1
    shapes = jax.eval_shape(lambda: same)
    assert shapes == shapes and shapes != q and 1 not in [shapes]


def test_arithmetic_on_the_value():
    q = example()
    v = q.dequantize()
    for got, expected in (
        (q**2, v**2),
        (-q, -v),
        (jnp.sin(q), jnp.sin(v)),
        (jnp.asarray(q), v),
        (jnp.dot(q, v.T), v @ v.T),
        (jnp.max(q), jnp.max(v)),
    ):
        assert isinstance(got, jax.Array) and got.dtype == jnp.float32
        np.testing.assert_array_equal(got, expected)


def test_vmap_maps_codes_and_scales_together():
    q = example(shape=(3, 4, 6), blocks=(3, 1, 1), power_of_two=True)

    @jax.jit
    def run(q):
        per_layer = jax.vmap(lambda layer: layer.dequantize())(q)
        shared = jax.vmap(lambda layer: layer * 2.0, in_axes=(ScaledArray(0, None),))(
            ScaledArray(q.data, jnp.float32(0.5))
        )
        made = jax.vmap(lambda x: quantize(x, formats.E4M3, power_of_two=True))(q.dequantize())
        last = jax.vmap(lambda x: quantize(x, formats.E4M3, 0.5), in_axes=2, out_axes=ScaledArray(2, None))(
            q.data * 1.0
        )
        return per_layer, shared, made, last

    per_layer, shared, made, last = run(q)
    np.testing.assert_array_equal(per_layer, q.dequantize())
    np.testing.assert_array_equal(shared, q.data.astype(jnp.float32))
    assert_same(made, ScaledArray(q.data, q.scale[:, 0, 0]))
    assert_same(last, quantize(q.data.astype(jnp.float32), formats.E4M3, 0.5))


@pytest.mark.parametrize("read", [lambda q: q.dequantize(), lambda q: q + 1, jnp.sum, lambda q: q[0]])
def test_an_array_of_vmap_says_what_to_do(read):
    """It has a scale for each slice, without the dims of 1 that blocks have."""
    x = jnp.arange(24.0).reshape(3, 2, 4)
    q = jax.vmap(lambda x: quantize(x, "E4M3"))(x)
    with pytest.raises(ValueError, match=r"dequantize within the vmap, .* with blocks=\(3, 1, 1\)") as error:
        read(q)
    assert "\n" not in str(error.value)
    within = jax.vmap(lambda q: q.dequantize())(q)
    np.testing.assert_array_equal(within, quantize(x, "E4M3", blocks=(3, 1, 1)).dequantize())


def test_scan_carries_slices_and_stacks_it():
    # Powers of two: a fused multiply and add then gives the same bits.
    layers = example(shape=(3, 4, 6), blocks=(3, 1, 1), power_of_two=True)

    def step(carry, layer):
        assert is_scaled(layer) and layer.shape == (4, 6) and layer.scale.shape == (1, 1)
        carry = quantize(carry + layer, formats.E4M3, blocks=(1, 1), power_of_two=True)
        return carry, carry

    first = jax.tree.map(lambda leaf: leaf[0], layers)
    last, all = jax.jit(lambda first, layers: lax.scan(step, first, layers))(first, layers)
    expected, one_step = first, jax.jit(step)
    for i in range(3):
        expected = one_step(expected, jax.tree.map(lambda leaf, i=i: leaf[i], layers))[0]
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], all), expected)
    assert_same(last, expected)


def test_gradients_flow_through_arithmetic_to_the_other_operand():
    q, x = example(), OTHERS["array"]
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(q * x))(x), q.dequantize())


ILLEGAL = {
    "rank": (jnp.ones((4, 6)), jnp.ones((4,))),
    "more blocks than elements": (jnp.ones((4, 6)), jnp.ones((8, 1))),
    "does not divide": (jnp.ones((4, 6)), jnp.ones((3, 1))),
    "no block": (jnp.ones((4, 6)), jnp.ones((2, 0))),
    "scale's dtype": (jnp.ones((4, 6)), jnp.ones((), jnp.float16)),
    "codes' dtype": (jnp.ones((4, 6), jnp.int8), jnp.ones(())),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_validate_names_both_shapes_and_dtypes(name):
    data, scale = ILLEGAL[name]
    with pytest.raises(ValueError) as error:
        ScaledArray(data, scale).validate()
    message = str(error.value)
    assert message.startswith("`ScaledArray`: expected") and "\n" not in message
    for part in (data, scale):
        assert f"{part.dtype}{list(part.shape)}" in message


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.float64(2), np.ones((), np.float32) * 2])
def test_a_scale_may_be_a_number(scale):
    q = ScaledArray(jnp.ones(3, jnp.float8_e4m3fn), scale)
    assert q.scale.dtype == jnp.float32
    assert float(jax.jit(lambda q: q.sum())(q)) == 6


@pytest.mark.parametrize(
    "scale", [np.int64(2), jnp.int32(2), jnp.float16(2), np.ones(()), jnp.ones((), bool)]
)
def test_a_scale_of_another_dtype_is_refused(scale):
    with pytest.raises(
        ValueError, match=rf"a float32 scale.* got data float8_e4m3fn\[3\], scale {scale.dtype}"
    ):
        ScaledArray(jnp.ones(3, jnp.float8_e4m3fn), scale)


@pytest.mark.parametrize(
    "shape, blocks", [((4, 6), ()), ((4, 6), (2, 3)), ((0, 6), (1, 2)), ((), ()), ((0,), (1,))]
)
def test_validate_returns_what_is_legal(shape, blocks):
    q = ScaledArray(jnp.zeros(shape, jnp.float8_e4m3fn), jnp.ones(blocks))
    assert q.validate() is q
    abstract = ScaledArray(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q.data, q.scale)))
    assert abstract.validate() is abstract


SURFACE = {
    "T": lambda x: x.T,
    "astype": lambda x: x.astype(jnp.bfloat16),
    "reshape": lambda x: x.reshape(2, -1),
    "transpose": lambda x: x.transpose(1, 0),
    "sum": lambda x: x.sum(axis=0),
    "mean": lambda x: x.mean(),
    "abs": abs,
    "matmul": lambda x: x @ jnp.ones((6, 2)),
    "rmatmul": lambda x: jnp.ones((2, 4)) @ x,
    "part": lambda x: x[1, 2:],
}


@pytest.mark.parametrize("name", SURFACE)
def test_it_has_the_surface_of_an_array(name):
    """Methods and operators of an array act on the value."""
    x = quantize(jnp.arange(24.0).reshape(4, 6) - 7, formats.E4M3)
    got, expected = SURFACE[name](x), SURFACE[name](value(x))
    assert got.dtype == expected.dtype and not is_scaled(got)
    np.testing.assert_array_equal(got, expected)


def test_it_is_iterated_as_its_value():
    """Indices of JAX arrays are clamped, so indexing from 0 on does not end."""
    q = example()
    v, rows = q.dequantize(), [row for row, _ in zip(q, range(9), strict=False)]
    assert len(rows) == len(q) == 4
    first, *_, last = q
    np.testing.assert_array_equal([first, last], v[jnp.array([0, 3])])
    for function in (jnp.stack, jnp.concatenate, np.stack, np.concatenate, sum, list):
        np.testing.assert_array_equal(function(q), function(v))
    assert float(v[0, 0]) in q[0] and 1e9 not in quantize(jnp.ones(3), "E4M3")
    np.testing.assert_allclose(jax.jit(sum)(q), sum(v), rtol=1e-6)


def test_truth_and_length_are_the_values():
    zero, two = (quantize(jnp.float32(x), "E4M3") for x in (0, 2))
    assert not zero and two and not quantize(jnp.zeros(1), "E4M3")
    for function, error in ((bool, ValueError), (len, TypeError), (iter, TypeError)):
        q = example() if function is bool else two
        with pytest.raises(error):
            function(value(q))
        with pytest.raises(error):
            function(q)


MAPS = {
    "half": lambda a, b: 0.5 * a,
    "average": lambda a, b: 0.9 * a + 0.1 * b,
    "noise": lambda a, b: a + 1e-3,
    "cast": lambda a, b: a.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("format", ["FP16", "E4M3"])
@pytest.mark.parametrize("name", MAPS)
def test_arithmetic_on_leaves(name, format):
    """What acts on codes and scales apart is refused, in compiled code too."""
    a, b = (quantize(w, format, power_of_two=True) for w in (jnp.ones((4, 6)), jnp.full((4, 6), 20.0)))
    for run in (lambda a, b: jax.tree.map(MAPS[name], a, b), jax.jit(partial(jax.tree.map, MAPS[name]))):
        with pytest.raises(TypeError, match="codes and scales apart of a scaled array.*`model.dequantize`"):
            run(a, b).dequantize()
    halved = jax.tree.map(lambda w: 0.5 * w, {"w": b}, is_leaf=is_scaled)
    np.testing.assert_array_equal(halved["w"], 10.0)


def test_an_exported_program_is_stored_and_read():
    """`jax.export` knows the tree of a `ScaledArray`, so a model's variables can be inputs."""
    q, double = quantize(jnp.arange(6.0).reshape(2, 3), "E4M3"), lambda q: 2 * value(q)
    exported = jax.export.export(jax.jit(double))(q)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(q), double(q))
