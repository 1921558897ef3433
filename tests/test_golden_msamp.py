"""Adam with narrow moments against numbers recorded from MS-AMP (tests/data/README.md)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import fp8jax
from fp8jax import ScaledArray

DATA = np.load(pathlib.Path(__file__).parent / "data" / "msamp.npz")
CASES = ("adamw_o2", "adamw_o2_zero_first_grad", "adam_o2", "adamw_o1")
DTYPES = {"grad": ml_dtypes.float8_e4m3fn, "w": np.float16, "m": ml_dtypes.float8_e4m3fn, "v": np.float16}


def recorded(case, name):
    """The recorded tensor of every step: a ScaledArray with a leading axis of steps, or float32."""
    data = DATA[f"{case}/{name}_data"]
    if data.dtype == np.float32:
        return data
    return ScaledArray(data.view(DTYPES[name]), DATA[f"{case}/{name}_scale"])


def before(case):
    """Weight and moments before each step: those after the step before it, and the start."""
    w0 = ScaledArray(DATA[f"{case}/w0_data"].view(np.float16), DATA[f"{case}/w0_scale"])
    start = {"w": w0, **dict(zip("mv", fp8jax.optim.moments(optimizer(case).init(w0)), strict=True))}
    after = {name: recorded(case, name) for name in "wmv"}
    return jax.tree.map(lambda first, all: np.concatenate([np.asarray(first)[None], all[:-1]]), start, after)


def optimizer(case):
    lr, b1, b2, eps, weight_decay = (float(number) for number in DATA[f"{case}/hyper"])
    make = fp8jax.optim.adamw if DATA[f"{case}/decoupled"] else fp8jax.optim.adam
    return make(lr, "O1" if case.endswith("o1") else "O2", b1, b2, eps, weight_decay=weight_decay)


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def step(case, kept, count, grad):
    """Weight and moments after one step from those before it."""
    tx = optimizer(case)
    adam = optax.ScaleByAdamState(count, kept["m"], kept["v"])
    state = jax.tree.map(lambda node: adam if is_adam(node) else node, tx.init(kept["w"]), is_leaf=is_adam)
    updates, state = tx.update(grad, state, kept["w"])
    m, v = fp8jax.optim.moments(state)
    return {"w": fp8jax.apply_updates(kept["w"], updates), "m": m, "v": v}


@functools.cache
def stepwise(case):
    """Weight and moments after each step, every step taken from the recorded state before it."""
    grads, kept = recorded(case, "grad"), before(case)
    count = jnp.arange(len(grads.data), dtype=jnp.int32)
    run = jax.jit(jax.vmap(functools.partial(step, case)))
    return jax.tree.map(np.asarray, run(kept, count, grads))


@functools.cache
def freely(case):
    """Weight and moments after each step, from the first weight on."""
    grads, kept = recorded(case, "grad"), before(case)

    def advance(kept, inputs):
        kept = step(case, kept, *inputs)
        return kept, kept

    run = jax.jit(lambda first, *inputs: lax.scan(advance, first, inputs)[1])
    first = jax.tree.map(lambda x: x[0], kept)
    return jax.tree.map(np.asarray, run(first, jnp.arange(len(grads.data), dtype=jnp.int32), grads))


def order(codes):
    """Codes as integers in the order of their values, neighbours one apart."""
    bits = np.asarray(codes).view({1: np.uint8, 2: np.uint16}[codes.dtype.itemsize]).astype(int)
    sign_bit = 1 << (8 * codes.dtype.itemsize - 1)
    return np.where(bits & sign_bit, -(bits & (sign_bit - 1)), bits)


def values(scaled):
    """The values of a ScaledArray with a leading axis of steps, float64."""
    return scaled.data.astype(np.float64) * scaled.scale[:, None]


def is_narrow(case, name):
    return isinstance(recorded(case, name), ScaledArray)


NARROW = [(case, name) for case in CASES for name in "wmv" if is_narrow(case, name)]


@pytest.mark.parametrize("case", CASES)
def test_every_scale_is_the_same(case):
    for name in "wmv":
        if is_narrow(case, name):
            np.testing.assert_array_equal(stepwise(case)[name].scale, recorded(case, name).scale)


@pytest.mark.parametrize("case, name", NARROW)
def test_every_step_gives_the_same_codes_but_for_rounding_ties(case, name):
    """A compiler that fuses multiply and add moves some ties by one code; near zero, where codes are dense,
    by more, but by at most 1e-6 of the amax."""
    got, expected = stepwise(case)[name], recorded(case, name)
    assert got.data.dtype == expected.data.dtype and got.data.shape == expected.data.shape
    apart = np.abs(order(got.data) - order(expected.data))
    difference = np.abs(got.data.astype(np.float64) - expected.data.astype(np.float64))
    near_zero = difference <= 1e-6 * np.abs(expected.data.astype(np.float64)).max(axis=1, keepdims=True)
    assert (near_zero | (apart <= 1)).all()
    assert np.count_nonzero(apart) < 5e-3 * apart.size


@pytest.mark.parametrize("name", "mv")
def test_float32_moments_are_the_same_to_rounding(name):
    """Two products and a sum: four roundings at most on each side, none larger than that of the sum."""
    got, expected = stepwise("adamw_o1")[name], recorded("adamw_o1", name)
    grad = np.abs(values(recorded("adamw_o1", "grad")))
    terms = np.abs(before("adamw_o1")[name]) + (grad if name == "m" else np.square(grad))
    assert got.dtype == expected.dtype == np.float32
    assert (np.abs(got - expected) <= 8 * 2.0**-24 * terms).all()


@pytest.mark.parametrize("case", CASES)
def test_a_free_run_stays_close(case):
    """One tie in 300 moves a first moment by a code, 1/16 of it at most, which b1 then forgets: no weight
    drifts by a step of size lr, few drift at all, together by 2% of their way, and no scale changes."""
    lr = DATA[f"{case}/hyper"][0]
    for name in "wmv":
        if is_narrow(case, name):
            np.testing.assert_array_equal(freely(case)[name].scale, recorded(case, name).scale)
    got, expected = (values(run["w"]) for run in (freely(case), {"w": recorded(case, "w")}))
    assert (np.abs(got - expected) < lr).all()
    assert (got != expected).mean() < 0.1
    way = expected - values(before(case)["w"])[:1]
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(way)
