"""What loops do with parameters by habit: the table of docs/guides/parameters.md."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import fp8jax
from fp8jax.quantization import is_scaled, value

X = jax.random.normal(jax.random.key(0), (64, 64))
RAISES = "raises"
NOT_FINITE = "inf or NaN"
RIGHT = "right"


def each(f):
    return lambda params, other, grads: jax.tree.map(f, params)


def both(f):
    return lambda params, other, grads: jax.tree.map(f, params, other)


def stepped(tx):
    return lambda params, other, grads: optax.apply_updates(
        params, tx.update(grads, tx.init(params), params)[0]
    )


def largest_difference(params, other, grads):
    pairs = zip(*map(jax.tree.leaves, (params, other)), strict=True)
    return max(jnp.max(jnp.abs(a - b)) for a, b in pairs)


HABITS = {
    "optax.global_norm(params)": lambda params, other, grads: optax.global_norm(params),
    "sum(jnp.sum(x**2) for x in leaves)": lambda params, other, grads: sum(
        jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params)
    ),
    "max(jnp.max(abs(a - b)) for two models' leaves)": largest_difference,
    "sum(x.size for x in leaves)": lambda params, other, grads: sum(x.size for x in jax.tree.leaves(params)),
    "all(jnp.isfinite(x).all() for x in leaves)": lambda params, other, grads: all(
        jnp.isfinite(x).all() for x in jax.tree.leaves(params)
    ),
    "p - 0.1 * g": lambda params, other, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads),
    "p * (1 - 0.1)": each(lambda p: p * (1 - 0.1)),
    "2 * p": each(lambda p: 2 * p),
    "-p": each(jnp.negative),
    "a + b": both(jnp.add),
    "a + b + a": both(lambda a, b: a + b + a),
    "(a + b) / 2": both(lambda a, b: (a + b) / 2),
    "0.9 * a + 0.1 * b": both(lambda a, b: 0.9 * a + 0.1 * b),
    "optax.incremental_update(a, b, 0.1)": lambda params, other, grads: optax.incremental_update(
        params, other, 0.1
    ),
    "jnp.clip(p, -0.1, 0.1)": each(lambda p: jnp.clip(p, -0.1, 0.1)),
    "p.astype(jnp.bfloat16)": each(lambda p: p.astype(jnp.bfloat16)),
    "jnp.where(ok, a, b)": both(lambda a, b: jnp.where(True, a, b)),
    "jnp.zeros_like(p)": each(jnp.zeros_like),
    "optax.sgd, optax.adamw": stepped(optax.adamw(0.1)),
    "from_bytes(p, to_bytes(p))": lambda params, other, grads: serialization.from_bytes(
        params, serialization.to_bytes(params)
    ),
}


def noisy(params, other, grads):
    keys = iter(jax.random.split(jax.random.key(3), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda p: p + jax.random.normal(next(keys), p.shape).astype(p.dtype), params)


NOT_FOUND = {
    "jnp.linalg.norm(x.astype(jnp.float32)) of leaves": lambda params, other, grads: sum(
        jnp.linalg.norm(x.astype(jnp.float32)) for x in jax.tree.leaves(params)
    ),
    "max(jnp.max(abs(x)) for x in leaves)": lambda params, other, grads: max(
        jnp.max(jnp.abs(x.astype(jnp.float32))) for x in jax.tree.leaves(params)
    ),
    "jnp.where(abs(p) > 0.1, p, 0)": each(lambda p: jnp.where(jnp.abs(p) > 0.1, p, 0)),
    "p + noise.astype(p.dtype)": noisy,
    "a + (a - b)": both(lambda a, b: a + (a - b)),
}


class Net(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, param_dtype=self.dtype)(x))
        return nn.Dense(64, param_dtype=self.dtype)(x)


@functools.cache
def setting(recipe, dtype):
    """A model, its variables, those of another key, and gradients."""
    model = fp8jax.transform(Net(dtype), recipe)
    variables, other = (model.init(jax.random.key(seed), X) for seed in (1, 2))
    loss = lambda variables: jnp.mean(jnp.square(model.apply(variables, X)))  # noqa: E731
    _, grads, _ = fp8jax.value_and_grad(loss)(variables)
    return model, variables, other, grads


def what_happens(habit, recipe, dtype=jnp.float32):
    """What the habit does with a model's parameters: compared with the same for their float values."""
    model, variables, other, grads = setting(recipe, dtype)
    given = variables["params"], other["params"], grads
    floats = [jax.tree.map(value, tree, is_leaf=is_scaled) for tree in given]
    want = habit(*floats)
    try:
        got = habit(*given)
        if isinstance(got, dict):  # parameters, for another step
            got = model.apply({**variables, "params": got}, X)
            want = model.apply(model.quantize({"params": want}, like=variables), X)
    except (TypeError, ValueError):
        return RAISES
    if not np.isfinite(got).all():
        return NOT_FINITE
    is_close = np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want) + 1e-6
    return RIGHT if is_close else f"silently wrong: {got} instead of {want}"


@pytest.fixture
def table(root):
    """The outcome at rungs 1 and 2, and at rung 3, by habit."""
    lines = (root / "docs/guides/parameters.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:3] for row in rows}


@pytest.mark.parametrize("recipe", ["current", "te", "O2", "fp8"])
@pytest.mark.parametrize("habit", HABITS)
def test_arithmetic_with_parameters(habit, recipe, table):
    assert what_happens(HABITS[habit], recipe) == table[habit][recipe in ("O2", "fp8")]


@pytest.mark.parametrize("recipe", ["current", "te", "O2", "fp8"])
@pytest.mark.parametrize("habit", NOT_FOUND)
def test_what_no_array_can_refuse(habit, recipe, root):
    """Tell it in the page as long as it is so."""
    assert f"| `{habit}` | " in (root / "docs/guides/parameters.md").read_text()
    got = what_happens(NOT_FOUND[habit], recipe)
    assert got.partition(":")[0] == ("silently wrong" if recipe in ("O2", "fp8") else RIGHT)


@pytest.mark.parametrize("habit", ["2 * p", "-p", "a + b", "a + b + a"])
def test_arithmetic_with_the_parameters_of_a_bfloat16_model(habit):
    assert what_happens(HABITS[habit], "O2", jnp.bfloat16) == NOT_FINITE


def dicts(tree):
    """What a checkpoint gives that is restored without a target."""
    return jax.tree.map(
        lambda x: {"data": x.data, "scale": x.bits} if is_scaled(x) else x, tree, is_leaf=is_scaled
    )


USES_OF_A_RESTORED_DICT = {
    "apply": lambda model, restored, old, tx: model.apply(restored, X),
    "gradient": lambda model, restored, old, tx: fp8jax.value_and_grad(lambda v: model.apply(v, X).sum())(
        restored
    ),
    "dequantize": lambda model, restored, old, tx: model.dequantize(restored),
    "init": lambda model, restored, old, tx: tx.init(restored["params"]),
    "update": lambda model, restored, old, tx: tx.update(old["params"], tx.init(old), restored["params"]),
    "norm": lambda model, restored, old, tx: fp8jax.optim.global_norm(restored["params"]),
    "apply_updates": lambda model, restored, old, tx: fp8jax.apply_updates(
        restored, jax.tree.map(jnp.zeros_like, restored["params"])
    ),
}
ADAMW, LION = fp8jax.optim.adamw(1e-3), fp8jax.optim.with_dequantized(optax.lion(1e-3))


@pytest.mark.parametrize(
    "use, tx", [*((use, ADAMW) for use in USES_OF_A_RESTORED_DICT), ("init", LION), ("update", LION)]
)
def test_a_checkpoint_restored_without_a_target(use, tx):
    model = fp8jax.transform(Net(), "O2")
    variables = model.init(jax.random.key(0), X)
    restored = dicts(variables)
    with pytest.raises(TypeError, match=r"(?s)'(params/)?Dense_0/kernel'.*from_state_dict"):
        USES_OF_A_RESTORED_DICT[use](model, restored, variables, tx)
    again = serialization.from_state_dict(variables, restored)
    np.testing.assert_array_equal(model.apply(again, X), model.apply(variables, X))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_parameters_that_are_called_data_and_scale(dtype):
    """They are no codes with a scale by their shapes or dtypes."""
    params = {"memory": {"data": jnp.ones((64, 64), dtype), "scale": jnp.ones(64)}}
    product = lambda params, x: x @ params["memory"]["data"] * params["memory"]["scale"][None]  # noqa: E731
    model = fp8jax.transform(product, "te")
    fp8jax.optim.adamw(1e-3, "fp8").init(params)
    assert np.isfinite(model.apply(model.init(params, X), X)).all()
    assert fp8jax.optim.global_norm(params) > 0
