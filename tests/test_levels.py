"""Every level trains; what each keeps; and no bad number gets into it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax import Recipe, ScaledArray, formats, loss_scale, quantize
from fp8jax.optim import (
    adam,
    adamw,
    clip_by_global_norm,
    moments,
    restore_weights,
    scale_by_adam,
    skipped,
    with_masters,
)
from fp8jax.optim.guard.replace_update import ReplaceUpdate
from fp8jax.optim.state import is_adam_state
from fp8jax.quantization import is_scaled, value
from fp8jax.recipe import PRESETS
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

# One for each kind of state that there is; the others are long.
KINDS = ("fp16_amp", "te", "O2", "O3")
LEVELS = [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in PRESETS]

OUT = 32
X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
Y = np.tanh(X @ np.random.default_rng(1).normal(size=(32, OUT)) / 5).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.gelu(nn.Dense(64, name="up")(x)))
        return nn.Dense(OUT, name="down")(x)


class Training:
    """A compiled step under a recipe; `spoil` multiplies the input."""

    def __init__(self, recipe, learning_rate=3e-3):
        self.recipe = Recipe.parse(recipe)
        self.model = fp8jax.transform(Net(), recipe)
        self.tx = optax.chain(clip_by_global_norm(1.0), adamw(learning_rate, recipe))
        self.start = jax.jit(self._start)()
        self.step = jax.jit(self._step)

    def _start(self):
        variables = self.model.init(jax.random.key(0), X)
        return variables, self.tx.init(variables)

    def _step(self, variables, state, spoil):
        loss_fn = lambda variables: jnp.mean((self.model.apply(variables, X * spoil) - Y) ** 2)  # noqa: E731
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
        updates, state = self.tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss, grads

    def run(self, spoils):
        variables, state = self.start
        for spoil in spoils:
            variables, state, loss, _ = self.step(variables, state, np.float32(spoil))
        return variables, state, float(loss)


@functools.cache
def training(recipe):
    return Training(recipe)


def finite(tree):
    return all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_learns_in_one_trace(name):
    variables, state, loss = training(name).run(np.ones(100))
    _, _, first = training(name).run(np.ones(1))
    assert loss < 0.15 * first and finite((variables, state)) and int(skipped(state)) == 0
    assert training(name).step._cache_size() == 1


@pytest.mark.parametrize("name", LEVELS)
def test_step_that_is_not_finite(name):
    """The scaling state goes on, with no amax for this step and the same scales."""
    trained = training(name)
    variables, state, _ = trained.run(np.ones(3))
    after, new_state, *_ = trained.step(variables, state, np.float32(np.nan))
    assert int(skipped(new_state)) == int(skipped(state)) + 1
    jax.tree.map(np.testing.assert_array_equal, after[PARAMS], variables[PARAMS])
    for path, leaf in jax.tree.leaves_with_path(after.get(SCALING, {})):
        if path[-1].key == "amax_history":
            np.testing.assert_array_equal(leaf[..., 2, 0], 0)  # the output gradient's, newest first
        assert np.isfinite(leaf).all() and (path[-1].key != "scale" or (leaf > 0).all())
    jax.tree.map(np.testing.assert_array_equal, moments(new_state), moments(state))
    if name == "fp16_amp":
        assert float(after[LOSS_SCALE]["scale"]) == float(variables[LOSS_SCALE]["scale"]) / 2


# Bytes per parameter of the kernels: weight, gradient, first and second moment, master, remainder.
BYTES = {
    "fp32": (4, 4, 4, 4, 0, 0),
    "bf16": (4, 4, 4, 4, 0, 0),
    "fp16_amp": (4, 4, 4, 4, 0, 0),
    "te": (4, 4, 4, 4, 0, 0),
    "O1": (2, 1, 4, 4, 0, 0),
    "O2": (2, 1, 1, 2, 0, 0),
    "O3": (1, 1, 1, 2, 2, 0),
    "te+O2": (2, 1, 1, 2, 0, 0),
    "fp8": (2, 1, 1, 2, 0, 1),
    "block": (4, 4, 4, 4, 0, 0),
    "mxfp8": (4, 4, 4, 4, 0, 0),
    "nvfp4": (4, 4, 4, 4, 0, 0),
}


@pytest.mark.parametrize("name", LEVELS)
def test_bytes_per_parameter_of_the_live_arrays(name):
    trained = training(name)
    variables, state, _, grads = trained.step(*trained.start, np.float32(1))
    [adam] = [node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node)]
    for layer in ("up", "down"):
        size = int(np.prod(variables[PARAMS][layer]["kernel"].shape))
        mu, nu = moments(state)
        nu = jax.tree.map(lambda x: getattr(x, "root", x), nu, is_leaf=lambda x: hasattr(x, "root"))
        kept = [variables[PARAMS], grads, mu, nu, adam.master, adam.remainder]
        leaves = [tree[layer]["kernel"] for tree in kept]
        data = [leaf.data if is_scaled(leaf) else leaf for leaf in leaves]
        assert tuple(0 if array is None else array.nbytes / size for array in data) == BYTES[name]
        # All else: one float32 scale for each narrow array.
        assert sum(leaf.scale.nbytes for leaf in leaves if is_scaled(leaf)) == 4 * sum(map(is_scaled, leaves))
    others = [variables[PARAMS]["up"]["bias"], variables[PARAMS]["LayerNorm_0"]["scale"]]
    assert {leaf.dtype for leaf in others} == {jnp.dtype(jnp.float32)}
    assert {"O2": 6, "O3": 7, "fp8": 7, "fp16_amp": 16}.get(name, sum(BYTES[name])) == sum(BYTES[name])


# O3: FP8 weights and their masters ###############################################################


def test_fp8_weights_go_to_the_gemm_as_they_are():
    """Its codes are not rounded again, on another scale or at all."""
    recipe = Recipe.parse("O3,scaling=current")
    kernel = quantize(jnp.asarray(X[:32]).T * 3, formats.E4M3, power_of_two=True, margin=2, blocks=(1, 1))
    matrices = (((1,), (0,)), ((), ()))

    @jax.jit
    def product(x, kernel):
        return fp8jax.dot.dot_general(x, kernel, matrices, recipe=recipe, state={})

    expected = quantize(X, formats.E4M3).dequantize() @ kernel.dequantize()
    np.testing.assert_allclose(product(X, kernel), expected, rtol=1e-5, atol=1e-5)
    # Codes are as they came; on its amax's own scale the kernel would be rounded.
    again = quantize(kernel, formats.E4M3).dequantize()
    assert np.abs(again - kernel.dequantize()).max() > 0
    dots = str(jax.make_jaxpr(product)(X, kernel))
    assert dots.count("reduce[") == 1  # the amax of the input alone


def test_the_weight_is_that_of_its_master():
    variables, state, _ = training("O3").run(np.ones(20))
    [adam] = [node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node)]
    for layer in ("up", "down"):
        master, weight = adam.master[layer]["kernel"], variables[PARAMS][layer]["kernel"]
        assert master.data.dtype == jnp.float16 and adam.master[layer]["bias"] is None
        again = quantize(master, formats.E4M3, power_of_two=True, blocks=weight.scale.shape)
        np.testing.assert_array_equal(again.data.view(jnp.uint8), weight.data.view(jnp.uint8))
        np.testing.assert_array_equal(again.scale, weight.scale)


@pytest.mark.parametrize("recipe", ["O3", "O3,master_weight=FP32"])
def test_small_steps_add_up_in_the_master(recipe):
    """A hundredth of a code at a time: without a master the weight would never move."""
    params = {"w": quantize(jnp.ones((4, 4)), formats.E4M3, power_of_two=True)}
    tx = adamw(1e-3, recipe, weight_decay=0.0)

    @jax.jit
    def step(params, state):
        updates, state = tx.update({"w": jnp.ones((4, 4))}, state, params)
        return fp8jax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(100):
        params, state = step(params, state)
    np.testing.assert_allclose(value(params["w"]), 0.9, rtol=2.0**-4)


def test_masters_can_come_from_a_wider_model():
    trained = training("O3")
    variables, state = trained.start
    plain = jax.jit(Net().init)(jax.random.key(0), X)
    state = with_masters(state, plain)
    [adam] = [node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node)]
    kernel = plain[PARAMS]["up"]["kernel"]
    np.testing.assert_allclose(value(adam.master["up"]["kernel"]), kernel, rtol=2.0**-11, atol=1e-7)
    assert not np.allclose(value(variables[PARAMS]["up"]["kernel"]), kernel, rtol=2.0**-11, atol=1e-7)


def test_only_optimizers_that_move_weights_can_keep_masters():
    with pytest.raises(ValueError, match="O3 keeps master weights, which are updated by `adam` and `adamw`"):
        scale_by_adam("O3")
    params = {"w": quantize(jnp.ones((4, 4)), formats.FP16, power_of_two=True)}
    tx = adam(1e-3, "O2")
    with pytest.raises(ValueError, match="`params`: expected the parameters; got None"):
        tx.update(params, tx.init(params))


# Overwriting #####################################################################################


@pytest.mark.parametrize("apply_updates", [fp8jax.apply_updates, optax.apply_updates])
@pytest.mark.parametrize("format", [formats.FP16, formats.E4M3])
def test_an_overwrite_replaces_and_its_zeros_keep(apply_updates, format):
    old, new = (quantize(k * jnp.arange(6.0), format, power_of_two=True) for k in (1, -3))
    for params in ({"w": old}, jax.tree.map(np.asarray, {"w": old})):
        update = {"w": ReplaceUpdate.by(new)}
        got = apply_updates(params, update)["w"]
        kept = apply_updates(params, jax.tree.map(jnp.zeros_like, update))["w"]
        for a, b in ((got, new), (kept, old)):
            assert a.data.dtype == b.data.dtype
            jax.tree.map(np.testing.assert_array_equal, a, b)


def tree_link(function):
    """A transformation that maps a function over the leaves of updates."""
    update = lambda updates, state, params=None: (jax.tree.map(function, updates), state)  # noqa: E731
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("link", [optax.scale(0.5), optax.add_decayed_weights(0.1), optax.clip(0.5)])
def test_changed_updates_raise(link):
    params = {"w": quantize(jnp.ones((4, 4)), formats.FP16, power_of_two=True)}
    tx = optax.chain(adamw(1e-3, "O2"), link)
    with pytest.raises((TypeError, ValueError)):
        updates, _ = tx.update({"w": jnp.ones((4, 4))}, tx.init(params), params)
        fp8jax.apply_updates(params, updates)


LINKS = {
    "a schedule": optax.scale_by_schedule(lambda count: 0.5),
    "twice, by a schedule": optax.scale_by_schedule(lambda count: 2),
    "a sign": optax.scale(-1),
    "a factor": optax.scale(2),
    "a rate of their dtype": tree_link(lambda x: jnp.asarray(0.01).astype(x.dtype) * x),
    "a sum": tree_link(lambda x: x + x),
    "one more": tree_link(lambda x: x + 1),
    "a noise": tree_link(lambda x: x + jnp.asarray(3.2).astype(x.dtype)),
    "a clip": tree_link(lambda x: jnp.clip(x, 0, 1)),
    "a quotient": tree_link(lambda x: x // 2),
    "a float factor, cast back": tree_link(lambda x: (x * 0.5).astype(x.dtype)),
}


# By turns: each link and each level meets both functions.
@pytest.mark.parametrize(
    "link, level, apply_updates",
    [
        pytest.param(link, level, (fp8jax, optax)[(i + j) % 2].apply_updates, id=f"{name}-{level}")
        for i, (name, link) in enumerate(LINKS.items())
        for j, level in enumerate(("fp8", "O2", "O3"))
    ],
)
def test_changed_updates_of_the_same_dtype(link, level, apply_updates):
    """They raise; in compiled code the next loss is NaN, and no weight is lost."""
    format = formats.E4M3 if level == "O3" else formats.FP16
    weight = quantize(jnp.linspace(-3, 3, 16).reshape(4, 4), format, power_of_two=True)
    params, tx = {"w": weight}, optax.chain(adamw(1e-3, level), link)
    state = tx.init(params)

    def step(params, state):
        updates, _ = tx.update({"w": jnp.ones((4, 4))}, state, params)
        return apply_updates(params, updates)

    with pytest.raises(TypeError, match="`updates`: .*before `adam` and `adamw`"):
        step(params, state)
    got = jax.jit(step)(params, state)
    assert jnp.isnan(value(got["w"])).all()
    with pytest.raises(ValueError, match="expected finite scales; got NaN at"):
        step(got, state)
    jax.tree.map(np.testing.assert_array_equal, restore_weights(got), params)


def half_of_matrices(params):
    matrices = jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.masked(optax.scale_by_schedule(lambda count: 0.5), matrices)


def twice_matrices(params):
    del params
    return tree_link(lambda x: x * 2 if x.ndim > 1 else x)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("link", [half_of_matrices, twice_matrices])
def test_changed_codes_beside_an_unchanged_scale(link, level):
    """A mask by rank changes the codes alone; `optax.apply_updates` sees them apart."""
    format = formats.E4M3 if level == "O3" else formats.FP16
    params = {"w": quantize(jnp.linspace(-3, 3, 16).reshape(4, 4), format, power_of_two=True)}
    tx = optax.chain(adamw(9.0, level), link(params))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, _ = tx.update({"w": jnp.ones((4, 4))}, state, params)
        return fp8jax.apply_updates(params, updates)

    got = step(params, state)
    assert jnp.isnan(value(got["w"])).all()
    jax.tree.map(np.testing.assert_array_equal, restore_weights(got), params)


def test_frozen_parameters_stay():
    params = {"w": quantize(jnp.ones((4, 4)), formats.FP16, power_of_two=True), "b": jnp.ones(4)}
    tx = optax.chain(adamw(0.1, "O2"), optax.masked(optax.set_to_zero(), {"w": True, "b": False}))
    updates, _ = tx.update({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, tx.init(params), params)
    got = fp8jax.apply_updates(params, updates)
    np.testing.assert_array_equal(value(got["w"]), 1)
    np.testing.assert_allclose(got["b"], 0.9, rtol=1e-3)


def test_apply_if_finite_is_for_plain_parameters():
    """Its updates in a bad step are its gradients' zeros, of another structure; `adamw` skips by itself."""
    params = {"w": quantize(jnp.ones((4, 4)), formats.FP16, power_of_two=True)}
    tx = optax.apply_if_finite(adamw(0.1, "O2"), 3)
    with pytest.raises(TypeError, match="same pytree structure"):
        tx.update({"w": jnp.full((4, 4), jnp.nan)}, tx.init(params), params)
    plain = {"w": jnp.ones((4, 4))}
    updates, state = tx.update({"w": jnp.full((4, 4), jnp.nan)}, tx.init(plain), plain)
    np.testing.assert_array_equal(fp8jax.apply_updates(plain, updates)["w"], 1)
    assert int(state.total_notfinite) == 1 and int(skipped(state)) == 0


# Loss scaling ####################################################################################


def test_loss_scale():
    """It is halved by a bad step, and doubled after many good steps."""
    state = loss_scale.init()
    assert float(state["scale"]) == 2.0**16
    state = loss_scale.update(state, jnp.array(False))
    assert (float(state["scale"]), int(state["good_steps"])) == (2.0**15, 0)
    update = jax.jit(loss_scale.update)
    for _ in range(loss_scale.INTERVAL - 1):
        state = update(state, jnp.array(True))
    assert (float(state["scale"]), int(state["good_steps"])) == (2.0**15, loss_scale.INTERVAL - 1)
    state = update(state, jnp.array(True))
    assert (float(state["scale"]), int(state["good_steps"])) == (2.0**16, 0)


@pytest.mark.parametrize("scale, is_finite, expected", [(1.0, False, 1.0), (2.0**24, True, 2.0**24)])
def test_the_loss_scale_has_bounds(scale, is_finite, expected):
    state = {"scale": jnp.float32(scale), "good_steps": jnp.int32(loss_scale.INTERVAL)}
    assert float(loss_scale.update(state, jnp.array(is_finite))["scale"]) == expected


def test_loss_scale_and_small_gradients():
    """A loss whose gradients underflow in float16 without it."""
    model = fp8jax.transform(nn.Dense(4, use_bias=False, dtype=jnp.float16), "fp16_amp")
    x = jnp.full((1, 8), 1e-3)
    variables = model.init(jax.random.key(0), x)
    loss_fn = lambda variables: jnp.sum(model.apply(variables, x).astype(jnp.float32)) * 1e-6  # noqa: E731
    loss, grads, new = fp8jax.value_and_grad(loss_fn)(variables)
    np.testing.assert_allclose(grads["kernel"], 1e-9, rtol=2e-3)
    np.testing.assert_allclose(loss, loss_fn(variables), rtol=1e-6)
    plain = jax.grad(lambda params: loss_fn({PARAMS: params}))(variables[PARAMS])
    assert not np.asarray(plain["kernel"]).any()


def test_the_plain_model_and_fp16_amp_convert_into_each_other():
    model = training("fp16_amp").model
    variables, _ = training("fp16_amp").start
    plain = model.dequantize(variables)
    assert set(plain) == {PARAMS}
    back = model.quantize(plain, like=variables)
    jax.tree.map(np.testing.assert_array_equal, back, variables)


# Hostile gradients ###############################################################################


def hostile(rng, shape):
    """Infinite, NaN, huge, denormal, zero, ordinary, or all of these at once."""
    ordinary = rng.normal(size=shape)
    kinds = [
        np.full(shape, np.inf),
        np.full(shape, np.nan),
        ordinary * 10.0 ** rng.integers(5, 38),
        ordinary * 1e-42,
        np.zeros(shape),
        ordinary,
        -np.full(shape, np.inf),
    ]
    chosen = kinds[rng.integers(len(kinds))]
    if rng.random() < 0.3:
        where = rng.integers(len(kinds), size=shape)
        chosen = np.choose(where, kinds)
    with np.errstate(over="ignore"):
        return chosen.astype(np.float32)


@pytest.mark.parametrize("name", [pytest.param("O1", marks=pytest.mark.long), "O3"])
def test_hostile_gradients(name):
    """Clipped, as every training is: an Adam that takes a gradient of 1e15 needs 1e5 steps to forget it."""
    trained = training(name)
    variables, state = trained.start
    narrow = Recipe.parse(name).weight_grad == "E4M3"

    @jax.jit
    def attack(variables, state, grads):
        if narrow:
            grads = jax.tree.map(
                lambda g, p: fp8jax.quantization.quantize_gradient(g, p.scale.shape) if is_scaled(p) else g,
                grads,
                variables[PARAMS],
            )
        updates, state = trained.tx.update({PARAMS: grads}, state, variables)
        return fp8jax.apply_updates(variables, updates), state

    rng = np.random.default_rng(0)
    for _ in range(500):
        grads = jax.tree.map(lambda p: hostile(rng, p.shape), variables[PARAMS], is_leaf=is_scaled)
        variables, state = attack(variables, state, grads)
    assert finite((variables, state)) and int(skipped(state)) > 100
    scales = [
        leaf.scale for leaf in jax.tree.leaves((variables, state), is_leaf=is_scaled) if is_scaled(leaf)
    ]
    assert all((np.asarray(scale) > 0).all() for scale in scales)
    losses = []
    for _ in range(300):
        variables, state, loss, _ = trained.step(variables, state, np.float32(1))
        losses.append(float(loss))
    assert losses[-1] < 0.1


def test_scaled_array_of_a_bad_gradient():
    """It is NaN, not the format's max."""
    q = fp8jax.quantization.quantize_gradient(jnp.float32([1.0, np.inf, -np.inf, np.nan]))
    assert isinstance(q, ScaledArray) and float(q.scale) > 0
    np.testing.assert_array_equal(np.isnan(np.asarray(q.data, np.float32)), [False, True, True, True])


def test_other_collections_pass():
    variables = {PARAMS: {"w": jnp.ones(3)}, SCALING: {}, "batch_stats": {"mean": jnp.ones(3)}}
    tx = adamw(0.1, "O2")
    updates, _ = tx.update({PARAMS: {"w": jnp.ones(3)}}, tx.init(variables), variables)
    assert set(fp8jax.apply_updates(variables, updates)) == set(variables)
