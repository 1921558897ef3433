"""What Flax asks of its own FP8 layers, asked of ours; and what FP8 layers can get wrong.

The first part restates `Fp8Test` of Flax's tests/linen/linen_test.py. A test of the second part that names
Flax measures flax.linen.fp8_ops, too.
"""

import functools
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import Fp8DotGeneral, fp32_max_grad
from flax.training import train_state

import fp8jax
from fp8jax import dot, formats, quantize
from fp8jax.quantization import is_scaled

WIDTH = 32

STATE = "_overwrite_with_gradient"


def normal(seed, shape, size=1.0):
    return jnp.asarray(size * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def representable(seed, shape, format):
    """Values that FP8 holds exactly, with the format's max among them: their scale is 1."""
    x = quantize(normal(seed, shape), format, 1.0).dequantize()
    return x.at[(0,) * x.ndim].set(format.max)


def state_of(grads, *path):
    tree = grads[STATE]
    for name in path:
        tree = tree[name]
    return tree["kernel"]


def relative(got, want):
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


# Flax's own tests ################################################################################


@pytest.mark.parametrize(
    "subscripts, lhs, rhs",
    [
        ("mk,kn->mn", (16, 32), (32, 64)),
        ("...k,nk->...n", (2, 3, 32), (64, 32)),
        ("...k,kn->...n", (2, 3, 64), (64, 32)),
    ],
)
def test_an_einsum_of_representable_operands_is_exact(subscripts, lhs, rhs):
    recipe = fp8jax.Recipe.parse("te,first_scale=tensor")
    x, y = representable(0, lhs, formats.E4M3), representable(1, rhs, formats.E4M3)
    out = jnp.einsum(subscripts, x, y)
    g = representable(2, out.shape, formats.E5M2)

    def loss(x, y, state):
        return jnp.sum(dot.einsum(subscripts, x, y, recipe=recipe, state=state) * g)

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    got, (*grads, _) = grad(x, y, dot.init_state(recipe))
    want = jax.value_and_grad(lambda x, y: jnp.sum(jnp.einsum(subscripts, x, y) * g), argnums=(0, 1))(x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1), (got, tuple(grads)), want)


def own_dot(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


def test_a_dense_layer_in_fp8_is_the_layer():
    x, dy = representable(0, (16, 32), formats.E4M3), representable(1, (16, 64), formats.E5M2)
    recipe = "te,first_scale=tensor"  # kernels so large are not typical
    injected = fp8jax.transform(nn.DenseGeneral(64, dot_general=own_dot), recipe)
    transformed = fp8jax.transform(nn.DenseGeneral(64), recipe)
    plain = nn.DenseGeneral(64).init(jax.random.key(0), x)
    kernel = representable(2, (32, 64), formats.E4M3)
    plain = {"params": {**plain["params"], "kernel": kernel}}

    def run(model, variables):
        loss = lambda variables, x: jnp.mean(model.apply(variables, x) * dy)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    want, (want_grads, want_dx) = run(nn.DenseGeneral(64), plain)
    for model in (injected, transformed):
        variables = {**model.init(jax.random.key(0), x), **plain}
        assert set(variables) == {"params", STATE}
        shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(variables[STATE])}
        assert shapes == {(3,), (3, 1024)}  # scales and histories of input, kernel and output gradient
        got, (grads, dx) = run(model, variables)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(
            grads["params"]["kernel"], want_grads["params"]["kernel"], rtol=1e-5, atol=1e-2
        )
        np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", [fp8jax.TrainState, train_state.TrainState])
def test_a_train_state_keeps_the_amaxes_of_five_steps(kind):
    model = fp8jax.transform(nn.DenseGeneral(64), "te")
    variables = model.init(jax.random.key(0), jnp.ones((16, WIDTH)))
    tx = fp8jax.optim.adam(0.1, "te")
    state = kind.create(apply_fn=model.apply, params=variables, tx=tx)

    @jax.jit
    def train(state, x, dy):
        loss = lambda variables: jnp.sum(state.apply_fn(variables, x) * dy)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    limits, seen = [448.0, 448.0, 57344.0], []
    for step in range(5):
        x, g = normal(step, (16, WIDTH)), normal(9 + step, (16, 64))
        tensors = (x, state.params["params"]["kernel"], g)
        seen.insert(0, [float(jnp.max(jnp.abs(tensor))) for tensor in tensors])
        state = train(state, x, g)
        kept = state_of(state.params)
        np.testing.assert_allclose(kept["amax_history"][:, : len(seen)], np.array(seen).T, rtol=1e-6)
        np.testing.assert_array_equal(kept["amax_history"][:, len(seen) :], 0)
        np.testing.assert_allclose(kept["scale"], np.max(seen, axis=0) / limits, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_state_reused_in_a_loop_is_merged_by_max(wrap):
    recipe = fp8jax.Recipe.parse("te,amax_history_len=3,first_scale=one")

    def outer(x, state):
        state = jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, fp32_max_grad), state)

        def body(carry, _):
            out = dot.dot_general(
                carry, jnp.ones((1, 1)), (((1,), (0,)), ((), ())), recipe=recipe, state=state
            )
            return out, None

        return jax.lax.scan(body, jnp.full((1, 1), x), None, length=3)[0][0, 0]

    grad = wrap(jax.grad(outer, argnums=(0, 1)))
    state = dot.init_state(recipe)
    for x, history in ((2.0, [2.0, 0, 0]), (3.0, [3.0, 2, 0]), (4.0, [4.0, 3, 2])):
        dx, state = grad(x, state)
        np.testing.assert_allclose(state["amax_history"][0], history, rtol=0.1)
        np.testing.assert_allclose(state["scale"][0], max(history) / 448, rtol=0.1)
        np.testing.assert_allclose(dx, 1.0, rtol=0.1)


# What FP8 layers can get wrong #####################################################################

FlaxDense = functools.partial(nn.Dense, dot_general_cls=Fp8DotGeneral)


class Twice(nn.Module):
    """One layer, on an input and on three times it."""

    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        layer = self.dense(WIDTH, name="shared")
        return layer(x) + layer(3 * x)


class Loop(nn.Module):
    """One layer's weights in four steps of a scan."""

    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        body = lambda layer, x, _: (x, layer(x))  # noqa: E731
        shared = "params" if self.dense is nn.Dense else ["params", STATE]
        scan = nn.scan(body, variable_broadcast=shared, split_rngs={"params": False}, length=4)
        return scan(self.dense(WIDTH, name="shared"), x, None)[1]


def gradient_of(module, x, recipe="te", size=1.0):
    model = fp8jax.transform(module, recipe)
    variables = model.init(jax.random.key(0), x)
    loss = lambda variables, x: jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)  # noqa: E731
    return model, variables, loss


@pytest.mark.parametrize(
    "module, inputs, uses",
    [(Twice, {"kernel": 1.0, "kernel#1": 3.0}, 2), (Loop, {"kernel": 1.0}, 4)],
)
def test_scale_of_a_layer_used_again(module, inputs, uses):
    """It is the scale of the largest input; Flax adds the scales."""
    x = normal(0, (4, WIDTH))
    _, variables, loss = gradient_of(module(), x)
    _, grads, new = fp8jax.value_and_grad(loss)(variables, x)
    kept = {name: state["scale"][0] for name, state in new[STATE]["shared"].items()}
    expected = {name: size * jnp.max(jnp.abs(x)) / 448 for name, size in inputs.items()}
    assert kept.keys() == expected.keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), kept, expected)
    flax = module(FlaxDense)
    grads = jax.grad(lambda variables: jnp.mean(flax.apply(variables, x)))(flax.init(jax.random.key(0), x))
    [state] = grads[STATE]["shared"].values()
    assert state["input_scale"] == uses  # each is 1


def test_float16_activations_do_not_overflow():
    x = normal(0, (16, 1024), 30.0).astype(jnp.float16)
    model, variables, loss = gradient_of(nn.Dense(64, dtype=jnp.float16), x)
    out = model.apply(variables, x)
    assert out.dtype == jnp.float16 and jnp.all(jnp.isfinite(out))
    _, grads, new = fp8jax.value_and_grad(loss)(variables, x)
    assert jnp.all(jnp.isfinite(grads["kernel"]))


def test_the_first_scale_fits_the_input_where_flax_saturates():
    x = normal(0, (16, 32), 1000.0)
    model, variables, _ = gradient_of(nn.Dense(WIDTH), x)
    assert relative(model.apply(variables, x), nn.Dense(WIDTH).apply(model.dequantize(variables), x)) < 0.05
    flax = FlaxDense(WIDTH)
    variables = flax.init(jax.random.key(0), x)
    plain = nn.Dense(WIDTH).apply({"params": variables["params"]}, x)
    assert relative(flax.apply(variables, x), plain) > 0.5


class Small(nnx.Module):
    """Two layers."""

    def __init__(self):
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def squares(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_an_nnx_model_learns(recipe):
    model, x = fp8jax.transform(Small(), recipe), normal(0, (4, WIDTH))
    optimizer = nnx.Optimizer(model, fp8jax.optim.adam(1e-2, recipe), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = fp8jax.value_and_grad(squares)(model, x)
        optimizer.update(model, grads)
        return loss

    first = step(model, optimizer, x)
    for _ in range(20):
        last = step(model, optimizer, x)
    assert last < 0.5 * first
    assert model.up.kernel__fp8_amax_history[...][0, 0] == jnp.max(jnp.abs(x))


def test_a_plain_gradient_warns_of_the_state_it_drops():
    x = normal(0, (4, WIDTH))
    for recipe in ("te", "te,scaling=current"):
        model = fp8jax.transform(Small(), recipe)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            nnx.grad(squares)(model, x)
        assert ("scaling state" in " ".join(str(word.message) for word in told)) == (recipe == "te")
    with pytest.raises(TypeError, match="has no gradient of its own"):
        nnx.grad(squares, allow_int=True)(fp8jax.transform(Small(), "O2"), x)
    model, variables, loss = gradient_of(nn.Dense(WIDTH), x)
    with pytest.warns(UserWarning, match="amaxes are lost"):
        jax.grad(lambda params: loss({**variables, "params": params}, x))(variables["params"])
    # Neither a gradient of the input alone nor one of everything loses anything.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(loss, argnums=1)(variables, x)
        jax.grad(loss)(variables, x)


@pytest.mark.parametrize("tx", [fp8jax.optim.adamw(0.1, "te"), optax.adamw(0.1)])
def test_adam_leaves_scales_alone(tx):
    x = normal(0, (4, WIDTH))
    _, variables, loss = gradient_of(nn.Dense(WIDTH), x)
    _, grads, variables = fp8jax.value_and_grad(loss)(variables, x)
    updates, _ = tx.update(grads, tx.init(variables["params"]), variables["params"])
    new = fp8jax.apply_updates(variables, updates)
    jax.tree.map(np.testing.assert_array_equal, new[STATE], variables[STATE])
    assert not np.array_equal(new["params"]["kernel"], variables["params"]["kernel"])


def test_plain_adam_changes_flaxs_scales():
    x, flax, tx = normal(0, (4, WIDTH)), FlaxDense(WIDTH), optax.adamw(0.1)
    variables = flax.init(jax.random.key(0), x)
    grads = jax.grad(lambda variables: jnp.mean(flax.apply(variables, x) ** 2))(variables)
    new = optax.apply_updates(variables, tx.update(grads, tx.init(variables), variables)[0])
    [before], [after] = (tree[STATE].values() for tree in (variables, new))
    assert before["input_scale"] == 1 and after["input_scale"] < 0.95


def test_a_module_called_twice_keeps_its_larger_amax():
    class Net(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(self.layer(x))

    model, x = fp8jax.transform(Net(), "te"), normal(0, (4, WIDTH), 100.0)
    inputs = x, model.layer(x)
    fp8jax.value_and_grad(squares)(model, x)
    largest = max(float(jnp.max(jnp.abs(each))) for each in inputs)
    np.testing.assert_allclose(model.layer.kernel__fp8_scale[...][0], largest / 448, rtol=1e-6)


def test_a_nan_does_not_freeze_a_scale():
    x = normal(0, (4, WIDTH))
    _, variables, loss = gradient_of(nn.Dense(WIDTH), x)
    step = jax.jit(fp8jax.value_and_grad(loss))
    _, _, bad = step(variables, x.at[1, 2].set(jnp.nan))
    assert jnp.all(jnp.isfinite(state_of(bad)["scale"])) and jnp.all(state_of(bad)["amax_history"][0] == 0)
    _, _, after = step({**variables, STATE: bad[STATE]}, 2 * x)
    expected = 2 * jnp.max(jnp.abs(x)) / 448
    np.testing.assert_allclose(state_of(after)["scale"][0], expected, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["te", "te,scaling=current", "O2"])
def test_a_tiny_amax_has_a_finite_scale(recipe):
    x = jnp.zeros((4, WIDTH)).at[0, 0].set(1e-36)
    model, variables, loss = gradient_of(nn.Dense(WIDTH), x, recipe)
    assert jnp.all(jnp.isfinite(model.apply(variables, x)))
    _, grads, new = fp8jax.value_and_grad(loss)(variables, x)
    numbers = jax.tree.leaves(grads, is_leaf=is_scaled)
    assert all(jnp.all(jnp.isfinite(jnp.asarray(leaf, jnp.float32))) for leaf in numbers)


def test_no_function_is_patched():
    watched = [(jax.lax, "dot_general"), (jnp, "einsum"), (nn.Dense, "__call__"), (nnx.Linear, "__call__")]
    before = [getattr(owner, name) for owner, name in watched]
    x = normal(0, (4, WIDTH))
    _, variables, loss = gradient_of(nn.Dense(WIDTH), x)
    fp8jax.value_and_grad(loss)(variables, x)
    fp8jax.value_and_grad(squares)(fp8jax.transform(Small(), "te"), x)
    assert all(getattr(owner, name) is old for (owner, name), old in zip(watched, before, strict=True))
    plain = nn.Dense(WIDTH).init(jax.random.key(0), x)
    assert jaxprs.fp8_dots(nn.Dense(WIDTH).apply, plain, x) == (0, 1)
    assert jaxprs.fp8_dots(Small(), x) == (0, 2)


def test_the_backward_accumulates_precisely():
    """On a GPU, where it matters, precision HIGHEST is what makes a cuBLASLt GEMM precise."""
    x = normal(0, (4, WIDTH))
    _, variables, loss = gradient_of(nn.Dense(WIDTH), x)
    jaxpr = jax.make_jaxpr(fp8jax.value_and_grad(loss))(variables, x)
    precisions = [eqn.params["precision"] for eqn in jaxprs.equations(jaxpr, "dot_general", "default")]
    highest, fast = (jax.lax.Precision.HIGHEST,) * 2, (jax.lax.Precision.DEFAULT,) * 2
    assert precisions == [fast, highest, highest]


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_accumulated_gradients_are_those_of_the_whole_batch(recipe):
    x = normal(0, (8, WIDTH)).at[:4].multiply(7.0)
    _, variables, loss = gradient_of(nn.Dense(WIDTH), x, recipe)
    _, grads, new = jax.jit(fp8jax.accumulate_gradients(loss, 2))(variables, x)
    _, whole, _ = jax.jit(fp8jax.value_and_grad(loss))(variables, x)
    kernels = [jnp.asarray(tree["kernel"], jnp.float32) for tree in (grads, whole)]
    assert relative(*kernels) < 0.1
    if recipe == "te":
        assert state_of(new)["amax_history"][0, 0] == jnp.max(jnp.abs(x))
