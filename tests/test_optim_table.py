"""The table "optax's transformations" of docs/guides/optimizers.md, line by line.

Rung 1: a transformed model in a loop of optax. Rung 2: an optimizer of this package on plain parameters.
Rung 3: the gradients of `fp8jax.value_and_grad`, floats with te and FP8 with fp8.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.optim import adamw, dequantize, multi_steps, skipped, with_dequantized
from fp8jax.variables import PARAMS

RATE = 3e-3
# Float32 moments and remainders: all differences are those of 16-bit weights.
EXACT = "O1,rounding=nearest+kahan+value"

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(RATE),
    "lion": lambda: optax.lion(RATE),
    "sgd": lambda: optax.sgd(0.3, 0.9),
    "adafactor": lambda: optax.adafactor(0.03),
    "muon": lambda: optax.contrib.muon(0.03),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adamw(RATE, b1=0.0), RATE),
}
WRAPPERS = {
    "MultiSteps": lambda make: optax.MultiSteps(make(RATE), 2).gradient_transformation(),
    "ema": lambda make: optax.chain(optax.ema(0.9), make(RATE)),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(RATE),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(RATE), 3),
}
WRAPPED = {name: functools.partial(wrap, optax.adamw) for name, wrap in WRAPPERS.items()}
ALL = OPTIMIZERS | WRAPPED

X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
Y = np.roll(X, 1, 1)
STEPS = 40


def falls(step, params, state):
    """The first loss and the last one."""
    step, losses = jax.jit(step), []
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses[0], losses[-1]


def loss_of(model, variables):
    return jnp.mean((model.apply(variables, X) - Y) ** 2)


def plain_loop(model, tx, variables):
    """A loop of JAX and optax alone."""

    def step(variables, state):
        loss, grads = jax.value_and_grad(functools.partial(loss_of, model))(variables)
        updates, state = tx.update(grads, state, variables)
        return optax.apply_updates(variables, updates), state, loss

    return falls(step, variables, tx.init(variables))


@functools.cache
def reference(name):
    """Of the model in float32."""
    return plain_loop(nn.Dense(32), ALL[name](), nn.Dense(32).init(jax.random.key(0), X))


def assert_learns(losses, name, rtol=0.05):
    first, last = reference(name)
    assert last < 0.9 * first
    np.testing.assert_allclose(losses[0], first, rtol=0.02)
    np.testing.assert_allclose(losses[1], last, rtol=rtol, atol=2e-3 * first)


# Rung 1 ##########################################################################################


@pytest.mark.parametrize("name", ALL)
def test_transformed_model(name):
    model = fp8jax.transform(nn.Dense(32), "te,scaling=current")
    variables = model.init(jax.random.key(0), X)
    assert set(variables) == {PARAMS}
    assert_learns(plain_loop(model, ALL[name](), variables), name)


# Rung 2 ##########################################################################################


def trained(tx, dtype):
    """How far plain parameters moved along gradients that are the same in each dtype."""
    random = np.random.default_rng(0)
    start = jax.tree.map(
        lambda shape: random.normal(0, 0.1, shape), {"w": (32, 32), "b": 32}, is_leaf=is_shape
    )
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16).astype(dtype), start)
    params, state = start, tx.init(start)

    @jax.jit
    def step(params, state, number):
        keys = {"w": jax.random.key(number), "b": jax.random.key(number + STEPS)}
        grads = jax.tree.map(
            lambda x, key: (1 + jax.random.normal(key, x.shape)).astype(jnp.bfloat16), params, keys
        )
        grads = jax.tree.map(lambda x: x.astype(dtype), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        params, state = step(params, state, number)
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), params, start)


def is_shape(x):
    return isinstance(x, tuple | int)


@functools.cache
def way(name):
    """That of optax with float32 parameters."""
    return trained(ALL[name](), jnp.float32)


def error(moved, name):
    """The error of the way, as a fraction of it."""
    theirs = way(name)
    pairs = [(moved[key] - theirs[key], theirs[key]) for key in theirs]
    return max(float(np.linalg.norm(off) / np.linalg.norm(way)) for off, way in pairs)


# A weight of 0.1 has a last bit of 5e-4 in bfloat16, and moves by 0.1.
BOUNDS = {jnp.float32: 1e-4, jnp.bfloat16: 0.01}
on_plain = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: dtype.__name__)


def ours(learning_rate):
    return adamw(learning_rate, EXACT)


@on_plain
@pytest.mark.parametrize("name", ["adamw", *WRAPPERS])
def test_our_adamw(name, dtype):
    tx = ours(RATE) if name == "adamw" else WRAPPERS[name](ours)
    if name == "apply_if_finite" and dtype == jnp.bfloat16:
        with pytest.raises(TypeError, match="cond branches must have equal output types"):
            trained(tx, dtype)
        return
    assert error(trained(tx, dtype), name) < BOUNDS[dtype]


@on_plain
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_with_dequantized(name, dtype):
    assert error(trained(with_dequantized(OPTIMIZERS[name](), "fp8"), dtype), name) < BOUNDS[dtype]


def test_what_16_bit_weights_need():
    """optax alone, or optax's arithmetic between our updates and the weights, loses steps."""
    free = optax.contrib.schedule_free(adamw(RATE, EXACT, b1=0.0), RATE)
    for tx, name in ((optax.adamw(RATE), "adamw"), (optax.lion(RATE), "lion"), (free, "schedule_free")):
        assert error(trained(tx, jnp.bfloat16), name) > 2 * BOUNDS[jnp.bfloat16]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_hyperparameters_in_the_dtype_of_parameters(dtype):
    """`optax.inject_hyperparams` casts them to it: 0.999 is 1 in bfloat16, 1e-8 is 0 in float16."""
    params = jnp.ones(4, dtype)
    if dtype == jnp.float8_e4m3fn:
        params = fp8jax.ScaledArray(params, 1.0)
    tx = optax.inject_hyperparams(adamw, static_args=("recipe",))(RATE)
    with pytest.raises(ValueError, match=r"`learning_rate`: .*float32.*hyperparam_dtype=jnp\.float32"):
        tx.init(params)
    optax.inject_hyperparams(adamw, static_args=("recipe",), hyperparam_dtype=jnp.float32)(RATE).init(params)


def test_skipped_steps_need_no_wrapper():
    params = jnp.full(4, 0.5, jnp.bfloat16)
    tx = adamw(RATE, "fp8")
    updates, state = tx.update(jnp.full(4, jnp.inf, jnp.bfloat16), tx.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates), params)
    assert int(skipped(state)) == 1


@on_plain
def test_averages_of_parameters(dtype):
    """In float32, since products and averages in bfloat16 lose the steps."""
    new = {"w": jnp.full((4, 4), 0.5, dtype)}
    average = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), new)
    for _ in range(200):
        average = optax.incremental_update(optax.tree.cast(new, jnp.float32), average, 0.01)
    np.testing.assert_allclose(average["w"], 0.5 * (1 - 0.99**200), rtol=1e-4)


# Rung 3 ##########################################################################################


def quantized_loop(recipe, tx):
    model = fp8jax.transform(nn.Dense(32), recipe)
    variables = model.init(jax.random.key(0), X)

    def step(variables, state):
        loss, grads, variables = fp8jax.value_and_grad(functools.partial(loss_of, model))(variables)
        updates, state = tx.update(grads, state, variables[PARAMS])
        return fp8jax.apply_updates(variables, updates), state, loss

    return falls(step, variables, tx.init(variables[PARAMS]))


@pytest.mark.parametrize("name", ALL)
def test_float_gradients(name):
    """Those of te, with delayed scaling."""
    assert_learns(quantized_loop("te", ALL[name]()), name)


ON_FP8 = {name: lambda name=name: with_dequantized(OPTIMIZERS[name](), "fp8") for name in OPTIMIZERS} | {
    "adamw": lambda: adamw(RATE, "fp8"),
    "MultiSteps": lambda: multi_steps(adamw(RATE, "fp8"), 2),
    "ema": lambda: optax.chain(dequantize(), optax.ema(0.9), adamw(RATE, "fp8")),
    "inject_hyperparams": lambda: optax.inject_hyperparams(adamw, static_args=("recipe",))(RATE, "fp8"),
}


@pytest.mark.parametrize("name", ON_FP8)
def test_fp8_gradients(name):
    assert_learns(quantized_loop("fp8", ON_FP8[name]()), name, rtol=0.1)


REFUSED = {
    "adamw": lambda: optax.adamw(RATE),
    "lion": lambda: optax.lion(RATE),
    "sgd": lambda: optax.sgd(0.3, 0.9),
    "adafactor": lambda: optax.adafactor(0.03),
    "muon": lambda: optax.contrib.muon(0.03),
    "schedule_free": OPTIMIZERS["schedule_free"],
    "MultiSteps": lambda: optax.MultiSteps(adamw(RATE, "fp8"), 2).gradient_transformation(),
    "ema": lambda: optax.chain(optax.ema(0.9), adamw(RATE, "fp8")),
    "apply_if_finite": lambda: optax.apply_if_finite(adamw(RATE, "fp8"), 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_fp8_gradients(name):
    with pytest.raises((TypeError, ValueError)):
        quantized_loop("fp8", REFUSED[name]())


def test_averages_of_quantized_parameters():
    model = fp8jax.transform(nn.Dense(32), "fp8")
    variables = model.init(jax.random.key(0), X)
    values = model.dequantize(variables)[PARAMS]
    average = optax.incremental_update(values, jax.tree.map(jnp.zeros_like, values), 0.01)
    kernel = np.asarray(variables[PARAMS]["kernel"])
    np.testing.assert_allclose(average["kernel"], 0.01 * kernel, rtol=1e-5)
