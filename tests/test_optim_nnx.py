"""`nnx.Optimizer` with optimizers of this package: boxes around arrays only, and states of older versions."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import fp8jax
from fp8jax.optim import adamw, adamw_8bit, convert, moments, with_dequantized, with_masters

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
RECIPES = ["te", "O2", "O3", "fp8"]


class Net(nnx.Module):
    """A list of layers has numbers as keys."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs, param_dtype=dtype) for _ in range(2)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def made(recipe, tx=None):
    model = fp8jax.transform(Net(nnx.Rngs(0)), recipe)
    return model, nnx.Optimizer(model, tx or adamw(1e-3, recipe), wrt=nnx.Param)


def step_of(model, optimizer):
    loss, grads = fp8jax.value_and_grad(lambda model: jnp.mean((model(X) - X) ** 2))(model)
    optimizer.update(model, grads)
    return loss


step = nnx.jit(step_of)


def boxes(optimizer):
    """The path and the value of each variable."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    flat, _ = jax.tree.flatten_with_path(nnx.state(optimizer), is_leaf=is_variable)
    return {jax.tree_util.keystr(path): x.get_raw_value() for path, x in flat}


@pytest.mark.parametrize("recipe", RECIPES)
def test_boxes_hold_arrays(recipe):
    """tunix reads the dtype of each."""
    model, optimizer = made(recipe)
    first = {name: (x.dtype, x.shape) for name, x in boxes(optimizer).items()}
    losses = [float(way(model, optimizer)) for way in (step, step_of, step)]
    assert losses[0] > losses[1] > losses[2]
    assert {name: (x.dtype, x.shape) for name, x in boxes(optimizer).items()} == first
    assert jax.tree.structure(moments(optimizer.opt_state)[0]).num_leaves >= 6
    held = {name for name in ("master", "remainder") if any(name in path for path in first)}
    assert held == {"O3": {"master"}, "fp8": {"remainder"}}.get(recipe, set())


def older(model, optimizer):
    """The optimizer's state as fp8jax 0.1.0 had it: an empty box for each parameter without an array."""

    def filled(kept, like):
        if isinstance(like, nnx.State):
            return {key: filled(kept.get(key, {}), like[key]) for key in like}
        return kept or nnx.optimizer.OptVariable(None)

    state, params = nnx.state(optimizer), nnx.state(model, nnx.Param)
    for name in ("master", "remainder"):
        state["opt_state"][name] = nnx.State(filled(state["opt_state"].get(name, {}), params))
    return state


def through_orbax(state, path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(state))
        return checkpointer.restore(path)


OLDER = {
    "nnx.update of a state": lambda optimizer, state, _: nnx.update(optimizer, state),
    "nnx.update of arrays": lambda optimizer, state, _: nnx.update(optimizer, nnx.to_pure_dict(state)),
    "orbax": lambda optimizer, state, path: nnx.update(
        optimizer, nnx.restore_int_paths(through_orbax(state, path))
    ),
}


@pytest.mark.parametrize(
    "recipe, way", [("te", "nnx.update of a state"), ("O3", "orbax"), *(("fp8", way) for way in OLDER)]
)
def test_older_states(recipe, way, tmp_path):
    """The step after loading is the step that the saved optimizer takes."""
    model, optimizer = made(recipe)
    step(model, optimizer)
    state = jax.tree.map(jnp.copy, older(model, optimizer))
    weights = jax.tree.map(jnp.copy, nnx.state(model))
    step(model, optimizer)
    expected = jax.tree.leaves(nnx.state(model))

    again, fresh = made(recipe)
    nnx.update(again, weights)
    OLDER[way](fresh, state, tmp_path / "state")
    step(again, fresh)
    assert int(fresh.step[...]) == 2
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(nnx.state(again)), expected)


def test_conversion_and_masters():
    model, optimizer = made("O2")
    step(model, optimizer)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    new = nnx.Optimizer(model, adamw(1e-3, "fp8"), wrt=nnx.Param)
    nnx.update(new.opt_state, nnx.state(convert(nnx.as_pure(optimizer.opt_state), params, "fp8")))
    assert any("remainder" in path for path in boxes(new))
    step(model, new)

    model, optimizer = made("O3")
    state = with_masters(
        optimizer.tx.init(nnx.state(model, nnx.Param)), nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    )
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.tx.init(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    "make", [lambda: adamw_8bit(1e-3, "fp8"), lambda: with_dequantized(optax.lion(1e-4), "fp8")]
)
def test_boxes_of_other_optimizers(make):
    model, optimizer = made("fp8", make())
    first = {name: (x.dtype, x.shape) for name, x in boxes(optimizer).items()}
    for _ in range(2):
        step(model, optimizer)
    assert {name: (x.dtype, x.shape) for name, x in boxes(optimizer).items()} == first
    assert any("remainder" in path for path in first)


def test_plain_bfloat16_parameters():
    """A model that is not transformed: 100 steps of 1e-5 along one gradient are 1e-3."""
    model = Net(nnx.Rngs(0), jnp.bfloat16)
    optimizer = nnx.Optimizer(model, adamw(1e-5, "fp8", weight_decay=0.0), wrt=nnx.Param)
    start = [np.asarray(layer.kernel[...], np.float64) for layer in model.layers]
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for _ in range(100):
        update(model, optimizer, grads)
    for layer, first in zip(model.layers, start, strict=True):
        assert layer.kernel.dtype == jnp.bfloat16
        moved = np.asarray(layer.kernel[...], np.float64) - first
        # The last bit of most weights is 5e-4 or 1e-3.
        np.testing.assert_allclose(moved.mean(), -1e-3, rtol=0.1)
    held = {path for path in boxes(optimizer) if "remainder" in path}
    assert len(held) == 4  # kernels and biases; the norm is float32
