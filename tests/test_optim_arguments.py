"""Arguments of optimizers that are not legal raise one line where they are given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.optim import (
    adam,
    adamw,
    adamw_8bit,
    clip_by_global_norm,
    scale_by_adam,
    with_dequantized,
)

NAN, INF = float("nan"), float("inf")
PARAMS = {"fc": {"kernel": jnp.ones((32, 32)), "bias": jnp.zeros(32)}}

BAD = {
    "learning_rate": [NAN, -1.0, INF, np.float32(-1), jnp.array(NAN)],
    "b1": [1, 1.0, -0.1, NAN],
    "b2": [1.0, 2, NAN],
    "eps": [-1.0, NAN, INF],
    "weight_decay": [-1e-4, NAN],
    "seed": [-1, 2**32, 0.5],
}


@pytest.mark.parametrize("make", [adam, adamw, adamw_8bit])
@pytest.mark.parametrize("name, given", [(name, given) for name in BAD for given in BAD[name]])
def test_hyperparameters(make, name, given):
    with pytest.raises(ValueError, match=f"`{name}`: expected .*; got ") as error:
        make(**{"learning_rate": 1e-3, name: given})
    assert "\n" not in str(error.value)


def test_hyperparameters_of_other_optimizers():
    for make, name in (
        (lambda: scale_by_adam(b1=1.0), "b1"),
        (lambda: with_dequantized(optax.sgd(1.0), seed=-1), "seed"),
        (lambda: clip_by_global_norm(-1), "max_norm"),
        (lambda: clip_by_global_norm(NAN), "max_norm"),
    ):
        with pytest.raises(ValueError, match=f"`{name}`: expected "):
            make()
    with pytest.raises(TypeError, match="`b1`: expected a number; got '0.9'"):
        adamw(1e-3, b1="0.9")


def test_legal_edges():
    """Zero, an infinite norm, numbers of NumPy and JAX, schedules, and values that jit does not know."""
    adamw(0, "te", 0, 0.0, 0, 0)
    for seed in (0, 2**31, 2**32 - 1):
        assert np.asarray(adamw(1e-3, "fp8", seed=seed).init(PARAMS).key).tolist() == [0, seed]
    adamw(np.float32(1e-3), b1=jnp.array(0.9), seed=np.uint32(7))
    adamw(optax.linear_schedule(1e-3, 0.0, 10))
    clip_by_global_norm(INF)
    clip_by_global_norm(0)
    injected = optax.inject_hyperparams(lambda learning_rate, b1: adamw(learning_rate, "te", b1))(
        1e-3, b1=0.9
    )
    jax.jit(injected.update)(PARAMS, injected.init(PARAMS), PARAMS)


@pytest.mark.parametrize("make", [adam, adamw, adamw_8bit])
def test_masks_of_another_tree(make):
    """`init` says it, not the first update."""
    for mask in ({"x": True}, {"fc": {"kernel": True}}, lambda params: {"x": True}, [True, False]):
        with pytest.raises(
            ValueError, match="`mask`: expected a tree of booleans like the parameters"
        ) as error:
            make(1e-3, "te", mask=mask).init(PARAMS)
        assert "\n" not in str(error.value)
    make(1e-3, "te", mask={"fc": True}).init(PARAMS)


def test_masks_that_are_not_of_booleans():
    """`optax.inject_hyperparams` calls the function with the number of the step, and gets one boolean."""
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    injected = optax.inject_hyperparams(adamw)
    for make in (
        lambda: injected(1e-3, "te", mask=mask),
        lambda: injected(1e-3, "te", mask=lambda p: jax.tree.map(lambda x: np.prod(x.shape) > 1, p)),
        lambda: injected(1e-3, "te", mask=lambda _: {"fc": {"kernel": 1.0, "bias": 0.0}}),
        lambda: adamw(1e-3, "te", mask=jax.tree.map(lambda x: x > 0, PARAMS)),
        lambda: adamw(1e-3, "te", mask={"fc": {"kernel": "decay", "bias": "no"}}),
    ):
        with pytest.raises(ValueError, match=r"`mask`: .*say static_args=\('recipe', 'mask'\)") as error:
            make().init(PARAMS)
        assert "\n" not in str(error.value)
    injected = optax.inject_hyperparams(adamw, static_args=("recipe", "mask"))
    params, txs = PARAMS["fc"], (injected(1e-3, "te", mask=mask), adamw(1e-3, "te", mask=mask))
    got, want = (tx.update(params, tx.init(params), params)[0] for tx in txs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    for one in (mask, True, np.bool_(True)):
        adamw(1e-3, "te", mask=one).init(jnp.ones((4, 4)))


@pytest.mark.parametrize(
    "tx", [adamw(1e-3, "te"), with_dequantized(optax.sgd(1.0))], ids=["adamw", "dequantized"]
)
def test_arguments_of_update_in_another_order(tx):
    state = tx.init(PARAMS)
    chain = optax.chain(clip_by_global_norm(1.0), tx)
    for update, args in (
        (tx.update, (state, PARAMS, PARAMS)),
        (tx.update, (PARAMS, PARAMS, state)),
        (chain.update, (PARAMS, (optax.EmptyState(), PARAMS), PARAMS)),
    ):
        with pytest.raises(
            TypeError, match=r"`state`: expected the .*State.* got a dict.*update\(grads, state, params"
        ):
            update(*args)


# Scales and values ###############################################################################


@pytest.mark.parametrize("scale", [0, 0.0, NAN, -1.0, INF, 1e-40, 2.0**127])
@pytest.mark.parametrize("format", ["E4M3", "E5M2", "FP16", "E2M1"])
def test_scales_that_are_no_scales(scale, format):
    """They raise; where jit does not know the value, all values are NaN."""
    with pytest.raises(ValueError, match="`scale`: expected finite, positive, normal numbers, up to 2"):
        fp8jax.quantize(jnp.ones(4), format, scale)
    got = jax.jit(lambda scale: fp8jax.quantize(jnp.ones(4), format, scale).dequantize())(jnp.float32(scale))
    assert np.isnan(got).all()
    got = jax.jit(lambda scale: fp8jax.quantize(jnp.ones(4), format, scale).dequantize())(jnp.float32(0.5))
    np.testing.assert_array_equal(got, 1)


def test_one_bad_scale_of_many():
    scales = jnp.array([[1.0], [0.0]])
    with pytest.raises(ValueError, match="got 0"):
        fp8jax.quantize(jnp.ones((2, 4)), "E4M3", scales)
    got = jax.jit(lambda scale: fp8jax.quantize(jnp.ones((2, 4)), "E4M3", scale).dequantize())(scales)
    np.testing.assert_array_equal(np.isnan(got).all(1), [False, True])


def test_numpy_takes_the_value():
    kernel = fp8jax.quantize(jnp.arange(8.0).reshape(2, 4), "FP16", power_of_two=True)
    got = np.asarray(kernel)
    assert got.dtype == np.float32 and np.asarray(kernel, np.float64).dtype == np.float64
    np.testing.assert_array_equal(got, kernel.dequantize())
    np.testing.assert_array_equal(np.mean(kernel), 3.5)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(np.asarray)(kernel)


@pytest.mark.parametrize("make", [adam, adamw, adamw_8bit, fp8jax.optim.muon])
def test_complex_parameters(make):
    """An imaginary part would never train, so its remedy is in the message, and works."""
    params = {"c": jnp.full((4, 4), 1 + 1j, jnp.complex64), "r": jnp.ones(4)}
    tx, wrapped = make(0.1, "te"), optax.contrib.split_real_and_imaginary(make(0.1, "te"))
    with pytest.raises(ValueError, match="`params`: expected real.*complex64.*split_real_and_imaginary"):
        tx.init(params)
    state = tx.init(jax.tree.map(jnp.real, params))
    with pytest.raises(ValueError, match="`updates`: expected real.*complex64"):
        tx.update(params, state, jax.tree.map(jnp.real, params))
    updates, _ = wrapped.update(params, wrapped.init(params), params)
    assert jnp.all((updates["c"].real < 0) & (updates["c"].imag < 0)) and jnp.all(updates["r"] < 0)


def test_norm_of_complex_gradients():
    grads = {"c": jnp.array([0, 4j]), "r": jnp.array([3.0])}
    assert fp8jax.optim.global_norm(grads) == 5
    clipped, _ = clip_by_global_norm(1.0).update(grads, clip_by_global_norm(1.0).init(grads))
    np.testing.assert_allclose(clipped["c"], grads["c"] / 5)


def test_complex_parameters_of_an_optimizer_of_optax():
    params = {"c": jnp.full(4, 1 + 1j, jnp.complex64)}
    tx, other = with_dequantized(optax.adamw(0.1)), optax.adamw(0.1)
    updates, state = tx.update(params, tx.init(params), params)
    want, _ = other.update(params, other.init(params), params)
    np.testing.assert_array_equal(updates["c"], want["c"])
    bad = {"c": params["c"].at[0].set(complex(0, NAN))}
    updates, state = tx.update(bad, state, params)
    assert fp8jax.optim.skipped(state) == 1 and not jnp.any(updates["c"])


@pytest.mark.parametrize("params", [{}, {"n": jnp.arange(3)}, {"n": None}])
def test_with_dequantized_of_no_floats(params):
    tx = with_dequantized(optax.sgd(0.1))
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params) and fp8jax.optim.skipped(state) == 0


LAYERS = {"a": jnp.ones((8, 8)), "b": jnp.ones(8)}


def part(**labels):
    return optax.partition({"on": adamw(1e-2, "te"), "off": optax.set_to_zero()}, labels)


OTHERS = {
    "a layer more": (adamw(1e-2, "fp8"), adamw(1e-2, "fp8"), {"a": LAYERS["a"]}, LAYERS, r"without \['b'\]"),
    "a layer less": (adamw(1e-2, "te"), adamw(1e-2, "te"), LAYERS, {"a": LAYERS["a"]}, r"with \['b'\]"),
    "unfrozen": (part(a="off", b="on"), part(a="on", b="on"), LAYERS, LAYERS, r"without \['a'\]"),
    "frozen": (part(a="on", b="on"), part(a="off", b="on"), LAYERS, LAYERS, r"with \['a'\]"),
    "a layer in place of an array": (adam(1e-2), adam(1e-2), LAYERS, {**LAYERS, "b": LAYERS}, "with"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_parameters(name):
    old, new, before, params, got = OTHERS[name]
    with pytest.raises(ValueError, match=f"`state`: expected.*{got}.*`init`.*that stay"):
        new.update(params, old.init(before), params)


def test_moments_of_layers_that_stay():
    """The remedy of the message: a new state with the old one's count and moments."""
    tx = adamw(1e-2, "te")
    before = {"a": LAYERS["a"]}
    _, old = tx.update(before, tx.init(before), before)
    new = tx.init(LAYERS)
    mu, nu = ({**tree, "a": stored["a"]} for tree, stored in zip(new.adam[1:], old.adam[1:], strict=True))
    updates, _ = tx.update(LAYERS, new._replace(adam=old.adam._replace(mu=mu, nu=nu)), LAYERS)
    want, _ = tx.update(before, old, before)
    np.testing.assert_array_equal(updates["a"], want["a"])
