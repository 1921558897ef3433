"""Delayed and current scaling against numbers recorded from TransformerEngine (tests/data/README.md)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from fp8jax import Recipe
from fp8jax.dot import dot_general, init_state

DATA = np.load(pathlib.Path(__file__).parent / "data" / "te.npz")
MATRICES = (((1,), (0,)), ((), ()))

# TransformerEngine's factor starts at 1, so these ask for its start.
CASES = {
    "delayed_hybrid_max_h4": Recipe.te(amax_history_len=4, first_scale="one"),
    "delayed_hybrid_recent_h4": Recipe.te(
        amax_history_len=4, amax_compute_algo="most_recent", first_scale="one"
    ),
    "delayed_e4m3_max_h8_margin1": Recipe.te("E4M3", margin=1, amax_history_len=8, first_scale="one"),
    "current_hybrid": Recipe.parse("te,scaling=current"),
}
DELAYED = [case for case in CASES if case.startswith("delayed")]
OPERANDS = ("x", "kernel", "grad")
ROWS = {"y": slice(None, None, 4), "dx": slice(None, None, 4), "dw": slice(None, None, 6)}


def run(recipe, x, w, g):
    """y, dx, dw and the scales after it, of each step."""

    def step(state, inputs):
        x, w, g = inputs
        y, pull = jax.vjp(
            lambda x, w, state: dot_general(x, w, MATRICES, recipe=recipe, state=state), x, w, state
        )
        dx, dw, state = pull(g)
        return state, {"y": y, "dx": dx, "dw": dw, "scale": state.get("scale", jnp.zeros(3))}

    return jax.jit(lambda *inputs: lax.scan(step, init_state(recipe), inputs)[1])(x, w, g)


@functools.cache
def ours(case):
    return {name: np.asarray(value) for name, value in run(CASES[case], *inputs_of(case)).items()}


def inputs_of(case):
    return [DATA[f"{case}/{name}"] for name in "xwg"]


def codes_of(case):
    """The values of the FP8 codes that TransformerEngine multiplies: inputs clipped and rounded with the
    scale of before the step."""
    grad_format = ml_dtypes.float8_e4m3fn if "e4m3" in case else ml_dtypes.float8_e5m2
    formats = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, grad_format)
    for x, format, name in zip(inputs_of(case), formats, OPERANDS, strict=True):
        top = np.float32(ml_dtypes.finfo(format).max)
        if case.startswith("delayed"):
            factor = np.append(np.float32(1), DATA[f"{case}/state_{name}_scale"][:-1])
        else:
            amax = np.abs(x).max(axis=(1, 2))
            factor = top / np.where(amax > 0, amax, top)
        factor = factor[:, None, None]
        yield np.clip(x * factor, -top, top).astype(format).astype(np.float64) / factor


@pytest.mark.parametrize("case", CASES)
def test_every_step_gives_the_same_results_to_float32_accuracy(case):
    x, w, g = (np.abs(codes) for codes in codes_of(case))
    terms = {"y": (48, x @ w), "dx": (64, g @ w.transpose(0, 2, 1)), "dw": (32, x.transpose(0, 2, 1) @ g)}
    for name, (length, magnitude) in terms.items():
        # Both sides multiply the same codes exactly and add `length` products in float32, in any order; on
        # each side one rounding more for each scale, its reciprocal and its product.
        bound = 2 * (length + 6) * 2.0**-24 * magnitude[:, ROWS[name]]
        expected = DATA[f"{case}/{name}"]
        got = ours(case)[name][:, ROWS[name]]
        assert got.shape == expected.shape and len(got) == 8
        assert (np.abs(got - expected.astype(np.float64)) <= bound).all(), name


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("case", DELAYED)
def test_every_scale_is_the_same_to_one_ulp(case, operand):
    expected = 1 / DATA[f"{case}/state_{operand}_scale"]
    got = ours(case)["scale"][:, OPERANDS.index(operand)]
    assert got.shape == (8,) and np.unique(expected).size > 1
    assert (np.abs(got - expected) <= np.spacing(expected)).all()


@pytest.mark.parametrize("case", DELAYED)
def test_our_own_start_changes_the_first_step_alone(case):
    recipe = dataclasses.replace(CASES[case], first_scale="tensor")
    got = {name: np.asarray(value) for name, value in run(recipe, *inputs_of(case)).items()}
    np.testing.assert_array_equal(got["scale"], ours(case)["scale"])
    for name in ROWS:
        assert (got[name][0] != ours(case)[name][0]).any()
        np.testing.assert_array_equal(got[name][1:], ours(case)[name][1:])
