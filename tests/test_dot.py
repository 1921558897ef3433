"""The FP8 dot: what it computes, what it keeps, what it is made of."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from jax import lax

from fp8jax import Recipe, ScaledArray, formats, quantize
from fp8jax.dot import (
    GradSlot,
    Weight,
    dot_general,
    einsum,
    init_ragged_state,
    init_state,
    ragged_dot,
    save_fp8_operands,
)

TE = Recipe.te(amax_history_len=4)
CURRENT = Recipe.parse("te,scaling=current")
MATRICES = (((1,), (0,)), ((), ()))

# Shapes with every kind of dim in every place: several contracted, several free, batch dims first and last.
SHAPES = {
    "matrix": ((4, 16), (16, 8), MATRICES),
    "leading": ((2, 3, 16), (16, 8), (((2,), (0,)), ((), ()))),
    "features": ((2, 3, 16), (16, 2, 4), (((2,), (0,)), ((), ()))),
    "two contracted": ((2, 3, 4, 8), (4, 8, 5), (((2, 3), (0, 1)), ((), ()))),
    "crossed": ((8, 3, 4), (4, 8, 5), (((0, 2), (1, 0)), ((), ()))),
    "batch": ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch last": ((4, 8, 3), (8, 5, 3), (((1,), (0,)), ((2,), (2,)))),
    "vector": ((16,), (16,), (((0,), (0,)), ((), ()))),
}


def normal(seed, *shape, dtype=jnp.float32):
    # NumPy's: compiling `jax.random.normal` for each shape would take most of these tests' time.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def sqnr(got, expected):
    """Signal over quantization noise, dB."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return 10 * np.log10(np.sum(expected**2) / max(np.sum((got - expected) ** 2), 1e-300))


@jax.jit
def current(lhs, rhs):
    """Current scaling, forward only."""
    return dot_general(lhs, rhs, MATRICES, recipe=CURRENT, state={})


def fake(x, format):
    """x rounded to FP8 on its own scale, as float32."""
    return quantize(x, format).dequantize()


@pytest.mark.parametrize("name", SHAPES)
def test_dot_of_rounded_operands(name, strict_dtypes):
    """Output and gradients are those of the dot of the rounded operands."""
    lhs_shape, rhs_shape, numbers = SHAPES[name]
    lhs, rhs = normal(0, *lhs_shape), normal(1, *rhs_shape)
    grad = normal(2, *jax.eval_shape(lambda a, b: lax.dot_general(a, b, numbers), lhs, rhs).shape)

    @jax.jit
    def gemms(lhs, rhs, grad):
        def product(lhs, rhs):
            return dot_general(lhs, rhs, numbers, recipe=CURRENT, state={})

        out, pull = jax.vjp(product, lhs, rhs)
        return (out, *pull(grad))

    @jax.jit
    def rounded(lhs, rhs, grad):
        lhs, rhs = fake(lhs, formats.E4M3), fake(rhs, formats.E4M3)
        out, pull = jax.vjp(lambda a, b: lax.dot_general(a, b, numbers), lhs, rhs)
        return (out, *pull(fake(grad, formats.E5M2)))

    # Products of FP8 numbers are exact in float32; what is left is the order of at most 64 additions.
    for got, want in zip(gemms(lhs, rhs, grad), rounded(lhs, rhs, grad), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=64 * 2**-24 * float(jnp.max(jnp.abs(want))))


@pytest.mark.filterwarnings("ignore:a gradient is taken")
@pytest.mark.parametrize("shape", [((0, 16), (16, 8)), ((4, 16), (16, 0)), ((4, 0), (0, 8))])
def test_empty_operands(shape):
    lhs, rhs = jnp.zeros(shape[0]), jnp.zeros(shape[1])
    out, pull = jax.vjp(
        lambda lhs, rhs: dot_general(lhs, rhs, MATRICES, recipe=TE, state=init_state(TE)), lhs, rhs
    )
    assert out.shape == (shape[0][0], shape[1][1]) and not out.any()
    assert [g.shape for g in pull(out)] == [lhs.shape, rhs.shape]


def test_noise_is_that_of_fp8():
    """Gaussian, K=1024, per tensor: 28.6 dB for E4M3 x E4M3, 24.6 dB for E5M2 x E4M3 were measured."""
    lhs, rhs, grad = normal(0, 512, 1024), normal(1, 1024, 256), normal(2, 512, 256)

    def gemms(product):
        def run(lhs, rhs, grad):
            out, pull = jax.vjp(product, lhs, rhs)
            return (out, *pull(grad))

        return jax.jit(run)(lhs, rhs, grad)

    got = gemms(lambda a, b: dot_general(a, b, MATRICES, recipe=CURRENT, state={}))
    want = gemms(lambda a, b: lax.dot_general(a, b, MATRICES, precision="highest"))
    out, dlhs, drhs = map(sqnr, got, want)
    assert out > 25 and dlhs > 21 and drhs > 21
    assert out < 35  # it is FP8, not something wider


def test_float16_output():
    """91% of the peers' float16 outputs overflow at K=1024: they cast first."""
    lhs, rhs = normal(0, 64, 1024, dtype=jnp.float16), normal(1, 1024, 64, dtype=jnp.float16)
    out = current(lhs, rhs)
    assert out.dtype == jnp.float16 and bool(jnp.isfinite(out).all())
    assert sqnr(out, lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)) > 25


@pytest.mark.parametrize("lhs_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rhs_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_of_output_and_gradients(lhs_dtype, rhs_dtype):
    lhs, rhs = normal(0, 4, 16, dtype=lhs_dtype), normal(1, 16, 8, dtype=rhs_dtype)
    for out_dtype in (None, jnp.bfloat16):

        def gemms(lhs, rhs, out_dtype=out_dtype):
            product = lambda a, b: dot_general(  # noqa: E731
                a, b, MATRICES, recipe=CURRENT, state={}, out_dtype=out_dtype
            )
            out, pull = jax.vjp(product, lhs, rhs)
            return (out, *pull(out))

        out, dlhs, drhs = jax.eval_shape(gemms, lhs, rhs)
        assert out.dtype == (out_dtype or jnp.promote_types(lhs_dtype, rhs_dtype))
        assert (dlhs.dtype, drhs.dtype) == (lhs_dtype, rhs_dtype)


@pytest.mark.parametrize("override", list(itertools.product([False, True], repeat=3)))
def test_each_gemm_can_leave_fp8_alone(override):
    if all(override):
        pytest.skip("the recipe refuses it: gemm=BF16 says the same")
    recipe = dataclasses.replace(CURRENT, override_linear_precision=override)
    lhs, rhs, grad = normal(0, 32, 64), normal(1, 64, 16), normal(2, 32, 16)

    @jax.jit
    def gemms(lhs, rhs, grad):
        out, pull = jax.vjp(lambda a, b: dot_general(a, b, MATRICES, recipe=recipe, state={}), lhs, rhs)
        return (out, *pull(grad))

    assert [None not in operands for operands in jaxprs.dots(gemms, lhs, rhs, grad)] == [
        not high for high in override
    ]
    exact = (lhs @ rhs, grad @ rhs.T, lhs.T @ grad)
    for got, want, high in zip(gemms(lhs, rhs, grad), exact, override, strict=True):
        assert (sqnr(got, want) > 100) == high
        assert sqnr(got, want) > 20


@pytest.mark.filterwarnings("ignore:a gradient is taken")
def test_operand_formats_and_residuals():
    """Forward E4M3, output gradient E5M2, and nothing wider than FP8 is kept of the operands."""
    lhs, rhs = normal(0, 64, 128), normal(1, 128, 32)

    def product(lhs, rhs):
        return dot_general(lhs, rhs, MATRICES, recipe=TE, state=init_state(TE))

    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    found = jaxprs.dots(lambda a, b: jax.grad(lambda a, b: product(a, b).sum(), (0, 1))(a, b), lhs, rhs)
    assert found == [(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)]
    only_e4m3 = dataclasses.replace(TE, fp8_format="E4M3")
    found = jaxprs.dots(
        jax.grad(
            lambda a: dot_general(a, rhs, MATRICES, recipe=only_e4m3, state=init_state(only_e4m3)).sum()
        ),
        lhs,
    )
    assert set(found) == {(e4m3, e4m3)}
    _, pull = jax.vjp(product, lhs, rhs)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= rhs.size]
    assert sorted(leaf.size for leaf in kept) == sorted([lhs.size, rhs.size])
    assert {str(leaf.dtype) for leaf in kept} == {"uint8"}  # FP8 codes, as bytes


def step(recipe):
    @jax.jit
    def run(lhs, rhs, grad, state):
        product = lambda lhs, rhs, state: dot_general(lhs, rhs, MATRICES, recipe=recipe, state=state)  # noqa: E731
        out, pull = jax.vjp(product, lhs, rhs, state)
        return (out, *pull(grad))

    return run


@pytest.mark.parametrize(
    "recipe, sizes",
    [
        (TE, (1000, 1, 1)),  # peers' scales start at 1: 55% error where abs(x) is 1000
        (TE, (1, 1 / 50, 1e-7)),
        (dataclasses.replace(TE, first_scale="tensor"), (1e6, 1e-4, 1e-12)),
    ],
)
def test_first_step(recipe, sizes):
    """The first scales hold typical tensors, or the first tensor."""
    parts = normal(0, 32, 64), normal(1, 64, 16), normal(2, 32, 16)
    lhs, rhs, grad = (size * part for size, part in zip(sizes, parts, strict=True))
    out, dlhs, drhs, state = step(recipe)(lhs, rhs, grad, init_state(recipe))
    for got, want in ((out, lhs @ rhs), (dlhs, grad @ rhs.T), (drhs, lhs.T @ grad)):
        assert sqnr(got, want) > 20
    amaxes = [float(jnp.max(jnp.abs(x))) for x in (lhs, rhs, grad)]
    np.testing.assert_array_equal(state["amax_history"][:, 0], np.float32(amaxes))
    np.testing.assert_allclose(state["scale"], np.array(amaxes) / [448, 448, 57344], rtol=2e-7)


def test_later_steps_cast_with_the_scale_of_the_steps_before():
    lhs, rhs, grad = normal(0, 32, 64), normal(1, 64, 16), normal(2, 32, 16)
    run = step(TE)
    *_, state = run(lhs, rhs, grad, init_state(TE))
    out, *_, after = run(4 * lhs, rhs, grad, state)
    top = formats.E4M3.max * state["scale"][0]
    clipped = quantize(jnp.clip(4 * lhs, -top, top), formats.E4M3, state["scale"][0]).dequantize()
    np.testing.assert_allclose(out, clipped @ quantize(rhs, formats.E4M3).dequantize(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after["scale"][0], 4 * state["scale"][0], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_step_leaves_the_scales_of_the_next_usable(bad):
    lhs, rhs, grad = normal(0, 32, 64), normal(1, 64, 16), normal(2, 32, 16)
    run = step(TE)
    for state in (init_state(TE), run(lhs, rhs, grad, init_state(TE))[3]):
        *_, state = run(lhs.at[0, 0].set(bad), rhs, grad.at[0, 0].set(bad), state)
        assert np.isfinite(state["scale"]).all() and np.isfinite(state["amax_history"]).all()
        out, dlhs, drhs, state = run(lhs, rhs, grad, state)
        for got, want in ((out, lhs @ rhs), (dlhs, grad @ rhs.T), (drhs, lhs.T @ grad)):
            assert sqnr(got, want) > 20


@pytest.mark.parametrize("recipe", [TE, Recipe.O2])
def test_infinite_output_gradient(recipe):
    """Saturated it would be a large gradient, and an optimizer would take the step."""
    lhs, rhs, grad = normal(0, 32, 64), normal(1, 64, 16), normal(2, 32, 16)
    _, dlhs, drhs, _ = step(recipe)(lhs, rhs, grad.at[3, 5].set(jnp.inf), init_state(recipe))
    assert np.isnan(dlhs).all() and np.isnan(drhs).all()


@pytest.mark.parametrize("is_ragged", [False, True])
def test_the_state_may_be_a_frozen_dict(is_ragged):
    """As Flax's variables may be; the gradient is the next state, of the same type."""
    lhs, rhs = normal(0, 4, 16), normal(1, 16, 8)

    def loss(state):
        if is_ragged:
            return ragged_dot(lhs, rhs[None], jnp.array([4]), recipe=TE, state=state).sum()
        return dot_general(lhs, rhs, MATRICES, recipe=TE, state=state).sum()

    state = init_ragged_state(TE, 1) if is_ragged else init_state(TE)
    got, want = jax.grad(loss)(freeze(state)), jax.grad(loss)(state)
    assert isinstance(got, FrozenDict)
    jax.tree.map(np.testing.assert_array_equal, dict(got), want)


def test_a_nan_shows_in_the_output():
    lhs = normal(0, 4, 16).at[1, 2].set(jnp.nan)
    out = current(lhs, normal(1, 16, 8))
    np.testing.assert_array_equal(jnp.isnan(out).any(axis=1), [False, True, False, False])


def test_scaled_kernel():
    """It multiplies as its value does, and its gradient leaves through the slot."""
    lhs, grad = normal(0, 32, 64), normal(2, 32, 16)
    kernel = quantize(normal(1, 64, 16), formats.FP16, power_of_two=True, blocks=(1, 1))
    recipe = Recipe.parse("O2,scaling=current")
    state = init_state(recipe)

    def product(lhs, slot, state):
        return dot_general(lhs, Weight(kernel, slot), MATRICES, recipe=recipe, state=state)

    @jax.jit
    def plain(lhs, rhs):
        out, pull = jax.vjp(lambda a, b: dot_general(a, b, MATRICES, recipe=CURRENT, state={}), lhs, rhs)
        return out, pull(grad)[1]

    @jax.jit
    def wide(lhs):
        out, pull = jax.vjp(product, lhs, jnp.zeros(kernel.shape), state)
        return out, pull(grad)[1]

    out, gradient = plain(lhs, kernel.dequantize())
    np.testing.assert_array_equal(wide(lhs)[0], out)
    np.testing.assert_array_equal(wide(lhs)[1], gradient)

    @jax.jit
    def narrow_gradient(grad):
        _, pull = jax.vjp(product, lhs, GradSlot.zeros(kernel.data), state)
        return pull(grad)[1].gradient()

    found, expected = narrow_gradient(grad), quantize(gradient, formats.E4M3, power_of_two=True)
    assert float(found.scale) == float(expected.scale) and found.data.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(found.data, expected.data)


def test_vmap_and_remat_do_not_change_the_result():
    lhs, rhs = normal(0, 3, 4, 16), normal(1, 3, 16, 8)

    def one(lhs, rhs):
        return dot_general(lhs, rhs, MATRICES, recipe=CURRENT, state={})

    expected = jnp.stack([current(a, b) for a, b in zip(lhs, rhs, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(lhs, rhs), expected)
    loss = lambda product: jax.jit(jax.grad(lambda a: product(a, rhs[0]).sum()))(lhs[0])  # noqa: E731
    np.testing.assert_allclose(loss(jax.checkpoint(one)), loss(one), rtol=1e-6)


def test_residuals_of_the_remat_policy():
    """The policy saves the FP8 operands of each GEMM, and no operands in high precision."""
    shapes = (24, 32), (32, 64), (64, 16)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def net(state, x, *kernels):
        for kernel in kernels:
            x = jnp.tanh(dot_general(x, kernel, MATRICES, recipe=TE, state=state))
        return x

    def kept(policy):
        backward = lambda *args: jax.vjp(jax.checkpoint(net, policy=policy), *args)[1]  # noqa: E731
        leaves = jax.tree.leaves(jax.eval_shape(backward, init_state(TE), *operands))
        return collections.Counter((str(leaf.dtype), leaf.shape) for leaf in leaves)

    assert {dtype for dtype, shape in kept(None)} == {"float32"}
    codes = dict.fromkeys([("uint8", shape) for shape in (*shapes, (24, 64))], 1)
    # Without the amaxes the backward would need the wide tensors again.
    scales_and_amaxes = {("uint32", ()): len(codes), ("float32", ()): len(codes)}
    assert kept(save_fp8_operands) - kept(None) == codes | scales_and_amaxes


MISMATCHES = {
    "two contracted": ((3, 2, 8), (8, 2, 5), (((1, 2), (0, 1)), ((), ()))),
    "batch": ((2, 3, 4, 8), (3, 2, 8, 5), (((3,), (2,)), ((0, 1), (0, 1)))),
    "number contracted": ((4, 2, 8), (16, 32), (((1, 2), (0,)), ((), ()))),
    "number of batch": ((2, 4, 8), (8, 5), (((2,), (0,)), ((0,), ()))),
    "negative": ((16, 16), (16, 16), (((-1,), (0,)), ((), ()))),
    "too large": ((4, 16), (16, 8), (((1,), (2,)), ((), ()))),
    "twice": ((16, 16), (16, 16), (((1, 1), (0, 0)), ((), ()))),
    "batch and contracted": ((16, 16), (16, 16), (((1,), (0,)), ((1,), (1,)))),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_dims_that_do_not_fit(name):
    """Equal products of sizes are not enough: the reshaped matrices would multiply silently."""
    lhs, rhs, numbers = MISMATCHES[name]
    with pytest.raises(TypeError):
        lax.dot_general(jnp.ones(lhs), jnp.ones(rhs), numbers)
    with pytest.raises(ValueError, match=r"expected .*dims of .*; got .*[(]"):
        dot_general(jnp.ones(lhs), jnp.ones(rhs), numbers, recipe=CURRENT, state={})


EINSUMS = {
    "thd,hdm->tm": ((3, 2, 8), (8, 2, 5), r"contracted dims of equal .* shape \(3, 2, 8\), .*\(8, 2, 5\)"),
    "bk,kn->bn": ((2, 4, 16), (16, 8), r"`lhs` of rank 3 and `rhs` of rank 2"),
    "...bk,kn->...bn": ((16,), (16, 8), r"`lhs` of rank 1 and `rhs` of rank 2"),
    "k,kn->n": ((4,), (4, 16, 8), r"`lhs` of rank 1 and `rhs` of rank 3"),
    "...k,kn->n": ((2, 4, 16), (16, 8), r"one dot product"),
}


@pytest.mark.parametrize("subscripts", EINSUMS)
def test_einsum_of_shapes_that_do_not_fit(subscripts):
    lhs, rhs, message = EINSUMS[subscripts]
    with pytest.raises(ValueError, match=message):
        einsum(subscripts, jnp.ones(lhs), jnp.ones(rhs), recipe=CURRENT, state={})


@pytest.mark.parametrize(
    "name, dtype",
    [("lhs", "int32"), ("lhs", "bool"), ("lhs", "scaled"), ("rhs", "int32"), ("rhs", "complex64")],
)
@pytest.mark.parametrize("is_ragged", [False, True])
def test_operands_that_are_no_floats(is_ragged, name, dtype):
    operands = {"lhs": jnp.ones((4, 16)), "rhs": jnp.ones((16, 8))}
    x = operands[name]
    operands[name] = quantize(x, "E4M3") if dtype == "scaled" else x.astype(dtype)
    got = "a ScaledArray. Call `dequantize`" if dtype == "scaled" else dtype
    with pytest.raises(TypeError, match=f"`{name}`: expected a floating array; got {got}"):
        if is_ragged:
            rhs = operands["rhs"].reshape(1, 16, 8)
            ragged_dot(operands["lhs"], rhs, jnp.array([4]), recipe=CURRENT, state={})
        else:
            dot_general(*operands.values(), MATRICES, recipe=CURRENT, state={})


def test_errors_say_what_to_do():
    lhs, rhs = jnp.ones((4, 16)), jnp.ones((16, 8))
    with pytest.raises(ValueError, match=r"expected gemm=FP8.*gemm=BF16"):
        dot_general(lhs, rhs, MATRICES, recipe=Recipe.BF16, state={})
    with pytest.raises(
        ValueError, match=r"`backend`: expected auto or one of te, xla, pallas, cudnn, reference; got 'tpu'"
    ):
        dot_general(lhs, rhs, MATRICES, recipe=CURRENT, state={}, backend="tpu")
    with pytest.raises(ValueError, match="float32 scale"):
        ScaledArray(rhs, jnp.ones((3, 1))).validate()
