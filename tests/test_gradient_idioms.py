"""Arithmetic on gradients between a jitted gradient and a jitted update, as users write it by habit.

Float gradients give the right result. FP8 gradients are refused, or the next loss is not a number and no
weight is lost.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from jax import lax
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.dot import dot_general, init_state
from fp8jax.optim import adamw, clip_by_global_norm, restore_weights
from fp8jax.quantization import ScaledGradient, as_gradients, is_scaled, value

STATE = "_overwrite_with_gradient"
WIDTH = 128
RECIPES = ["te", "O2", "fp8", "block"]
X = np.random.default_rng(0).standard_normal((2, 16, WIDTH)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((2, 16, WIDTH)).astype(np.float32)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(WIDTH, name="up")(x)))


class Modules(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def raw(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


class Pieces:
    """A jitted gradient and a jitted update of one kind of model under a recipe."""

    def __init__(self, kind, recipe):
        self.tx, key = optax.chain(clip_by_global_norm(10.0), adamw(1e-2, recipe)), jax.random.key(0)
        if kind == "nnx":
            graph, params, states = nnx.split(fp8jax.transform(Modules(nnx.Rngs(0)), recipe), nnx.Param, ...)
            self.variables = {"params": params, "others": states}
            apply = None
        elif kind == "linen":
            model = fp8jax.transform(MLP(), recipe)
            self.variables, apply = jax.jit(model.init)(key, X[0]), model.apply
        else:
            model = fp8jax.transform(raw, recipe)
            weights = jax.random.normal(key, (2, WIDTH, WIDTH)) / WIDTH**0.5
            self.variables, apply = (
                model.init(dict(zip(("up", "down"), weights, strict=True)), X[0]),
                model.apply,
            )

        def loss(variables, x, y):
            return jnp.mean((apply(variables, x) - y) ** 2)

        def of_module(variables, x, y):
            model = nnx.merge(graph, variables["params"], variables["others"])
            loss, grads = fp8jax.value_and_grad(lambda m, x, y: jnp.mean((m(x) - y) ** 2))(model, x, y)
            return loss, grads, {**variables, "others": nnx.split(model, nnx.Param, ...)[2]}

        self.gradient = of_module if kind == "nnx" else fp8jax.value_and_grad(loss)
        self.on_devices = of_module if kind == "nnx" else fp8jax.value_and_grad(loss, axis_name="data")
        self.grad = jax.jit(self.gradient)
        self.state = self.tx.init(self.variables["params"])
        self.update = jax.jit(self._update)

    def _update(self, grads, state, variables):
        updates, state = self.tx.update(grads, state, variables["params"])
        return {**variables, "params": fp8jax.apply_updates(variables["params"], updates)}, state


pieces = functools.cache(Pieces)

IDIOMS = {
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: (a + b) / 2,
    "difference": lambda a, b: a - b,
    "clip": lambda a, b: jnp.clip(a, -1e-3, 1e-3),
    "clip to one": lambda a, b: jnp.clip(a, -1, 1),
    "negation": lambda a, b: -a,
    "factor": lambda a, b: 0.5 * a,
    "factor in the leaf's dtype": lambda a, b: a * jnp.asarray(0.5).astype(a.dtype),
    "double in the leaf's dtype": lambda a, b: a * jnp.asarray(2).astype(a.dtype),
    "moving average": lambda a, b: 0.9 * a + 0.1 * b,
    "sum of squares": lambda a, b: a * a,
    "root": lambda a, b: jnp.sign(a) * jnp.sqrt(jnp.abs(a)),
    "sign": lambda a, b: jnp.sign(a),
    "mean of a stack": lambda a, b: jnp.stack([a, b]).mean(0),
    "mean in the leaf's dtype": lambda a, b: jnp.stack([a, b]).mean(0, dtype=a.dtype),
}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linen", "function", "nnx"])
def test_between_two_jits(kind, recipe, idiom):
    mine, f = pieces(kind, recipe), IDIOMS[idiom]
    _, first, variables = mine.grad(mine.variables, X[0], Y[0])
    _, second, variables = mine.grad(variables, X[1], Y[1])
    exact = jax.tree.map(
        lambda a, b: jnp.asarray(f(value(a), value(b)), jnp.float32), first, second, is_leaf=is_scaled
    )
    want, _ = mine.update(exact, mine.state, variables)
    try:
        got, state = mine.update(jax.tree.map(f, first, second), mine.state, variables)
    except (TypeError, ValueError) as error:
        assert "fp8" in str(error) and recipe in ("O2", "fp8")
        return
    loss = mine.grad(got, X[0], Y[0])[0]
    if np.isnan(loss):
        assert recipe in ("O2", "fp8")
        assert bits(restore_weights(got["params"])) == bits(variables["params"])
        kept = [x for x in jax.tree.leaves(state) if x.ndim]
        assert [x.tobytes() for x in map(np.asarray, kept)] == bits(
            [x for x in jax.tree.leaves(mine.state) if x.ndim]
        )
        return
    # An FP8 gradient that passed has kept its scale; f of its codes is rounded as codes are.
    moved = lambda tree: np.concatenate(  # noqa: E731
        [
            np.ravel(value(a) - value(b))
            for a, b in zip(
                jax.tree.leaves(tree["params"], is_leaf=is_scaled),
                jax.tree.leaves(variables["params"], is_leaf=is_scaled),
                strict=True,
            )
        ]
    )
    error = np.linalg.norm(moved(got) - moved(want)) / np.linalg.norm(moved(want))
    assert error < (1e-4 if recipe in ("te", "block") else 0.3)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("recipe", ["te", "O2", "block"])
def test_pmean_of_devices(recipe, outside):
    """The mean over devices, with the update inside or outside of the `jax.shard_map`."""
    mine = pieces("linen", recipe)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def grads_of(variables, x, y):
        loss, grads, new = mine.on_devices(variables, x[0], y[0])
        return lax.pmean(loss, "data"), lax.pmean(grads, "data"), new

    def step(variables, x, y):
        loss, grads, new = grads_of(variables, x, y)
        return (loss, grads, new) if outside else (loss, *mine._update(grads, mine.state, new))

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
    if recipe == "O2":
        with pytest.raises(TypeError, match="fp8"):
            jax.jit(lambda *args: mine._update(jax.jit(run)(*args)[1], mine.state, args[0]))(
                mine.variables, X, Y
            )
        return
    loss, grads, new = jax.jit(run)(mine.variables, X, Y)
    if outside:
        variables, _ = mine.update(grads, mine.state, new)
    else:
        variables = grads
    whole = mine.grad(mine.variables, X.reshape(-1, WIDTH), Y.reshape(-1, WIDTH))
    np.testing.assert_allclose(loss, whole[0], rtol=0.02)
    if recipe == "te":
        states = variables[STATE], whole[2][STATE]
        # Each device's output gradient is of a mean over half of the rows.
        got, want = ([s[n]["kernel"]["amax_history"][:2] for n in ("up", "down")] for s in states)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gradient_inside_a_shard_map():
    """The error says where the batch is split."""
    mine = pieces("linen", "te")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = lambda v, x, y: mine.gradient(v, x[0], y[0])  # noqa: E731
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"`axis_name`: .*value_and_grad\(loss_fn, axis_name='data'\)"):
        jax.eval_shape(run, mine.variables, X, Y)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_gradient_in_a_shard_map_without_jit(recipe):
    mine = pieces("linen", recipe)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(v, x, y):
        loss, grads, new = mine.on_devices(v, x[0], y[0])
        return lax.pmean(loss, "data"), fp8jax.comm.all_reduce(grads, "data", recipe), new

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
    got, want = run(mine.variables, X, Y), jax.jit(run)(mine.variables, X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(value(a), value(b), rtol=1e-6), got, want)


@pytest.mark.parametrize("recipe", ["te", "O2", "block"])
def test_gradient_under_check_vma(recipe):
    """JAX sums float gradients over the devices; states and FP8 gradients are refused."""
    mine = pieces("linen", recipe)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = lambda v, x, y: mine.on_devices(v, x[0], y[0])[1]  # noqa: E731
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    if recipe != "block":
        with pytest.raises(ValueError, match=r"`check_vma`: expected jax.shard_map\(..., check_vma=False\)"):
            jax.jit(run)(mine.variables, X, Y)
        return
    grads = jax.jit(run)(mine.variables, X, Y)
    parts = [mine.grad(mine.variables, x, y)[1] for x, y in zip(X, Y, strict=True)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, sum(b), rtol=1e-4, atol=1e-6), grads, *parts)


@pytest.mark.parametrize("idiom", ["sum", "negation", "double in the leaf's dtype"])
@pytest.mark.parametrize("name", ["adamw", "lion", "multi_steps"])
def test_where_values_are_at_hand_it_raises(name, idiom):
    mine = pieces("linen", "O2")
    tx = {
        "adamw": adamw(1e-2, "O2"),
        "lion": fp8jax.optim.with_dequantized(optax.lion(1e-3)),
        "multi_steps": fp8jax.optim.multi_steps(adamw(1e-2, "O2"), 2),
    }[name]
    _, grads, variables = mine.grad(mine.variables, X[0], Y[0])
    changed, state = jax.tree.map(IDIOMS[idiom], grads, grads), tx.init(variables["params"])
    with pytest.raises(TypeError, match=r"`updates`: .*fp8jax\.gradients\.tree_map"):
        tx.update(changed, state, variables["params"])
    updates, _ = jax.jit(tx.update)(changed, state, variables["params"])
    after = jax.jit(fp8jax.apply_updates)(variables, updates)
    assert np.isnan(mine.grad(after, X[0], Y[0])[0])
    assert bits(restore_weights(after)) == bits(variables)
    with pytest.raises(ValueError, match=r"`params`: .*fp8jax\.optim\.restore_weights"):
        adamw(1e-2, "O2").update(grads, adamw(1e-2, "O2").init(variables["params"]), after["params"])


def test_a_gradient_of_zeros_needs_no_tag():
    """`optax.set_to_zero` and masks make zeros of codes and scales."""
    mine = pieces("linen", "O2")
    _, grads, variables = mine.grad(mine.variables, X[0], Y[0])
    grads["up"] = jax.tree.map(lambda x: x * jnp.zeros((), bool), grads["up"])
    tx = adamw(1e-2, "O2", weight_decay=0.0)
    state = tx.init(variables["params"])
    for update in (tx.update, jax.jit(tx.update)):
        new = fp8jax.apply_updates(variables, update(grads, state, variables["params"])[0])
        up, old = (value(tree["params"]["up"]["kernel"]) for tree in (new, variables))
        np.testing.assert_array_equal(up, old)
        down, old = (value(tree["params"]["down"]["kernel"]) for tree in (new, variables))
        assert np.isfinite(down).all() and (down != old).any()


def test_a_frozen_layer_by_a_mask():
    """optax's mask before the optimizer, whose zeros are constants of the compiled program."""
    mine = pieces("linen", "O2")
    _, grads, variables = mine.grad(mine.variables, X[0], Y[0])
    mask = {"up": True, "down": False}
    tx = optax.chain(optax.masked(optax.set_to_zero(), mask), adamw(1e-2, "O2", weight_decay=0.0))
    updates, state = jax.jit(tx.update)(grads, tx.init(variables["params"]), variables["params"])
    new = fp8jax.apply_updates(variables, updates)["params"]
    old = variables["params"]
    np.testing.assert_array_equal(value(new["up"]["kernel"]), value(old["up"]["kernel"]))
    assert (value(new["down"]["kernel"]) != value(old["down"]["kernel"])).any() and state[1].skipped == 0


@pytest.mark.parametrize(
    "name, recipe, stage",
    [
        ("adamw", "O1", 0),
        ("adamw", "O3", 0),
        ("adamw_8bit", "O2", 0),
        ("adamw", "O2", 1),
        ("adamw", "fp8", 3),
    ],
)
def test_all_moments_and_shards(name, recipe, stage):
    """A sum is loud, and a gradient of zeros is taken: with second moments of all formats, on one device and
    on shards, whose program is that of a GPU."""
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    zero = fp8jax.comm.Zero(mesh, recipe, stage) if stage else None
    model = fp8jax.transform(MLP(), recipe)
    variables = jax.jit(model.init)(jax.random.key(0), X[0])
    variables = variables if zero is None else zero.place(variables)
    tx = getattr(fp8jax.optim, name)(1e-2, recipe, zero=zero)
    loss = lambda v, x, y: jnp.mean((model.apply(v, x) - y) ** 2)  # noqa: E731
    grad, update = jax.jit(fp8jax.value_and_grad(loss, zero=zero)), jax.jit(tx.update)
    state = tx.init(variables["params"])
    _, grads, variables = grad(variables, X[0], Y[0])
    updates, _ = update(jax.tree.map(jnp.add, grads, grads), state, variables["params"])
    after = fp8jax.apply_updates(variables, updates)
    assert np.isnan(grad(after, X[0], Y[0])[0])
    assert bits(restore_weights(after["params"])) == bits(variables["params"])
    zeros = {**grads, "up": jax.tree.map(lambda x: x * jnp.zeros((), bool), grads["up"])}
    updates, state = update(zeros, state, variables["params"])
    assert np.isfinite(grad(fp8jax.apply_updates(variables, updates), X[0], Y[0])[0]) and state.skipped == 0


def test_tags_of_all_exponents():
    """No sum or difference of two words, and no factor, gives a valid word."""
    scales = np.float32(2.0) ** np.arange(-125, 127, dtype=np.float32)
    made = ScaledGradient.of(
        fp8jax.ScaledArray(jnp.ones((len(scales), 1), jnp.float8_e4m3fn), scales[:, None])
    )
    assert made.is_intact.all()
    np.testing.assert_array_equal(made.scale[:, 0], scales)
    words = np.asarray(made.bits[:, 0])
    sums, differences = (np.unique(f(words[:, None], words[None])) for f in (np.add, np.subtract))
    for changed in (sums, differences, words * np.uint32(2), words * np.uint32(3), ~words, words >> 1):
        q = ScaledGradient.tree_unflatten(
            None, (jnp.ones((len(changed), 1)), jnp.asarray(changed)[:, None], None)
        )
        assert not q.is_intact.any()


def test_other_leaves_than_arrays():
    """Shapes, and what `jax.tree.map` puts in the place of arrays, can be read and printed."""
    grads = as_gradients({"w": fp8jax.quantize(jnp.ones((4, 4)), "E4M3", power_of_two=True)})
    shapes = jax.eval_shape(lambda: grads)["w"]
    assert (shapes.scale.shape, shapes.scale.dtype) == ((), jnp.float32)
    dtypes = jax.tree.map(lambda x: x.dtype, grads)["w"]
    assert "float8_e4m3fn" in str(dtypes) and dtypes.scale == jnp.uint32


# The functions that are meant ######################################################################


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_tree_map_acts_on_values(recipe):
    mine = pieces("linen", recipe)
    _, first, variables = mine.grad(mine.variables, X[0], Y[0])
    _, second, _ = mine.grad(variables, X[1], Y[1])
    for name in ("sum", "clip", "moving average", "negation"):
        f = IDIOMS[name]
        got = jax.jit(lambda a, b, f=f: fp8jax.gradients.tree_map(f, a, b))(first, second)
        assert jax.tree.structure(got) == jax.tree.structure(first)
        jax.tree.map(
            lambda g, a, b, f=f: np.testing.assert_allclose(
                value(g), f(value(a), value(b)), rtol=2.0**-4 if is_scaled(g) else 1e-6, atol=1e-5
            ),
            got,
            first,
            second,
            is_leaf=is_scaled,
        )
    changed = jax.tree.map(jnp.add, first, second)
    if recipe == "O2":
        with pytest.raises(TypeError, match="tree_map"):
            fp8jax.gradients.tree_map(jnp.negative, changed)
        again = jax.jit(lambda g: fp8jax.gradients.tree_map(jnp.negative, g))(changed)
        assert not again["up"]["kernel"].is_intact
    values = jax.tree.map(value, first, is_leaf=is_scaled)
    np.testing.assert_allclose(fp8jax.optim.global_norm(first), optax.global_norm(values), rtol=1e-6)


def test_clipped_gradients_keep_their_tag():
    grads = as_gradients({"w": fp8jax.quantize(jnp.ones((4, 4)), "E4M3", power_of_two=True)})
    clip = clip_by_global_norm(0.3)
    clipped, _ = clip.update(grads, clip.init(grads))
    assert clipped["w"].is_intact and clipped["w"].factor is not None
    np.testing.assert_allclose(fp8jax.optim.global_norm(clipped), 0.3, rtol=1e-6)
    np.testing.assert_array_equal(clipped["w"].data, grads["w"].data)


# The state ##########################################################################################


@pytest.mark.parametrize(
    "tx", [optax.adamw(1e-2), optax.sgd(1e-2), optax.lion(1e-3)], ids=["adamw", "sgd", "lion"]
)
def test_optimizer_of_the_scaling_state(tx):
    """JAX's own gradient of whole variables has the new state in it, which optax would add to the old."""
    model = fp8jax.transform(MLP(), "te")
    variables = model.init(jax.random.key(0), X[0])
    loss_fn = lambda v: jnp.mean((model.apply(v, X[0]) - Y[0]) ** 2)  # noqa: E731

    @jax.jit
    def step(variables, state):
        loss, grads = jax.value_and_grad(loss_fn)(variables)
        updates, state = tx.update(grads, state, variables)
        return optax.apply_updates(variables, updates), state, loss

    state, losses = tx.init(variables), []
    for _ in range(2):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    assert np.isfinite(losses[0]) and np.isnan(losses[1])


ACCUMULATIONS = {
    "sum": lambda a, b: a + b,
    "by tokens": lambda a, b: (a + b) / 96,
    "factor": lambda a, b: 2.0 * a,
    "difference": lambda a, b: a - b,
}


def states_and_grad(kind, without=()):
    """JAX's own gradient by (weights, states), the states, and the weights."""
    if kind == "dot":
        recipe, numbers = fp8jax.Recipe.parse("te"), (((1,), (0,)), ((), ()))
        weights, states = jnp.ones((WIDTH, WIDTH)), init_state(recipe)
        apply = lambda w, s, x: dot_general(x, w, numbers, recipe=recipe, state=s)  # noqa: E731
    else:
        model = fp8jax.transform(MLP() if kind == "linen" else raw, "te")
        start = (
            X[0] if kind == "linen" else {"up": jnp.ones((WIDTH, WIDTH)), "down": jnp.ones((WIDTH, WIDTH))}
        )
        first = jax.random.key(0) if kind == "linen" else start
        variables = model.init(first, X[0])
        weights, states = variables["params"], variables[STATE]
        apply = lambda w, s, x: model.apply({"params": w, STATE: s}, x)  # noqa: E731
    states = traverse_util.flatten_dict(states)
    states = traverse_util.unflatten_dict({k: leaf for k, leaf in states.items() if k[-1] not in without})
    loss = lambda w, s, x, y: jnp.mean((apply(w, s, x) - y) ** 2)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), weights, states


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("kind", ["linen", "function", "dot"])
def test_a_factor_on_the_state_is_loud(kind, accumulation):
    """A sum of microbatches' gradients by JAX's own changes scale and history alike, so that the state looks
    like another one."""
    grad_fn, weights, states = states_and_grad(kind)
    losses = []
    for _ in range(2):
        results = [grad_fn(weights, states, x, y) for x, y in zip(X, Y, strict=True)]
        losses.append(float(results[0][0]))
        states = jax.tree.map(ACCUMULATIONS[accumulation], *(grads[1] for _, grads in results))
    assert np.isfinite(losses[0]) and np.isnan(losses[1])


@pytest.mark.parametrize("kind", ["linen", "function", "dot"])
def test_a_mean_of_states_and_a_state_without_one(kind):
    """A state of 0.1.0 gives the same numbers, and stays as it is."""
    losses = []
    for without in ((), ("one",)):
        grad_fn, weights, states = states_and_grad(kind, without)
        for _ in range(3):
            results = [grad_fn(weights, states, x, y) for x, y in zip(X, Y, strict=True)]
            states = jax.tree.map(lambda a, b: (a + b) / 2, *(grads[1] for _, grads in results))
            losses.append(float(results[0][0]))
    assert np.all(np.isfinite(losses)) and losses[:3] == losses[3:]


def test_a_scaling_state_that_was_left_behind_is_refused():
    mine = pieces("linen", "te")
    tx, variables = adamw(1e-2, "te"), mine.variables
    state = tx.init(variables)
    for _ in range(2):
        _, grads, _ = mine.grad(variables, X[0], Y[0])
        updates, state = tx.update(grads, state, variables)
        variables = fp8jax.apply_updates(variables, updates)
    with pytest.raises(ValueError, match=r"`params`: expected the scaling state of 2 steps; got `init`'s"):
        tx.update(grads, state, variables)


OPTIMIZERS = {
    name: getattr(optax, name)
    for name in (
        "adabelief adadelta adagrad adafactor adam adamax adamw amsgrad fromage lamb lars lion "
        "nadam radam rmsprop sgd yogi"
    ).split()
}


@functools.cache
def raw_optimizer(name):
    tx = OPTIMIZERS[name](1e-2)
    return tx.init, jax.jit(tx.update)


@functools.cache
def gradient_of_jax(recipe):
    """JAX's own gradient by (parameters, states)."""
    model = fp8jax.transform(MLP(), recipe)

    def loss(params, states, x, y):
        return jnp.mean((model.apply({"params": params, **states}, x) - y) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1) if recipe == "te" else (0,)))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["te", "block"])
def test_raw_optax_takes_float_gradients(recipe, name):
    """No wrapper: three steps as those of JAX's own gradient by (parameters, states), to the bit."""
    mine, theirs_grad, (init, update) = pieces("linen", recipe), gradient_of_jax(recipe), raw_optimizer(name)
    variables, state = mine.variables, init(mine.variables["params"])
    params, states = mine.variables["params"], {k: v for k, v in mine.variables.items() if k != "params"}
    theirs = state
    for i in range(3):
        got, grads, variables = mine.grad(variables, X[i % 2], Y[i % 2])
        updates, state = update(grads, state, variables["params"])
        variables = {**variables, "params": optax.apply_updates(variables["params"], updates)}
        want, (grads, *new) = theirs_grad(params, states, X[i % 2], Y[i % 2])
        updates, theirs = update(grads, theirs, params)
        params, states = optax.apply_updates(params, updates), new[0] if new else states
        assert float(got) == float(want)
    assert bits(variables["params"]) == bits(params)
