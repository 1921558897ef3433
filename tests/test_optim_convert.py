"""Optimizer states of one recipe under another: they raise, and `convert` changes them."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax import Recipe, quantization, quantize
from fp8jax.comm import Zero
from fp8jax.optim import (
    adamw,
    adamw_8bit,
    convert,
    masters,
    moments,
    multi_steps,
    muon,
    scale_by_adam,
    skipped,
    with_dequantized,
)
from fp8jax.optim.state import AdamState, is_adam_state
from fp8jax.variables import PARAMS

IN_8_BITS = "adamw_8bit"
KAHAN_O3 = "O3,rounding=stochastic+kahan+root"
# The recipes by the format of their weights.
RECIPES = {
    "FP16": ("O1", "O2", "fp8", IN_8_BITS),
    "E4M3": ("O3", KAHAN_O3, "O3,master_weight=FP32"),
    "FP32": ("te", "te,moments=E4M3+FP16"),
}
PAIRS = [pair for names in RECIPES.values() for pair in itertools.permutations(names, 2)]


def optimizer(name, rate=1e-3):
    return adamw_8bit(rate) if name == IN_8_BITS else adamw(rate, name)


def weight_of(name):
    return "FP16" if name == IN_8_BITS else Recipe.parse(name).weight


def params_of(name, shape=(64, 64)):
    weight = weight_of(name)
    w = jnp.asarray(np.random.default_rng(0).normal(0, 0.05, shape), jnp.float32)
    return {"w": w if weight == "FP32" else quantize(w, weight, power_of_two=True), "b": jnp.zeros(shape[1])}


def grads_of(step, shape=(64, 64)):
    random = np.random.default_rng(step + 1)
    return {"w": jnp.asarray(random.normal(size=shape), jnp.float32), "b": jnp.ones(shape[1])}


def trained(name, rate=1e-3):
    """The parameters and the state after three steps."""
    tx, params = optimizer(name, rate), params_of(name)
    state = tx.init(params)
    for number in range(3):
        updates, state = tx.update(grads_of(number), state, params)
        params = fp8jax.apply_updates(params, updates)
    return params, state


def converted(state, params, name, **options):
    if name == IN_8_BITS:
        return convert(state, params, None, in_8_bits=True, **options)
    return convert(state, params, name, **options)


def formats_of(state):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(state)], jax.tree.structure(state)


pytestmark = pytest.mark.filterwarnings("ignore:.* rounds to nearest")


# States of another recipe #########################################################################


@pytest.mark.parametrize("old, new", PAIRS)
def test_state_of_another_recipe(old, new):
    """`update` raises one line that names the change; after `convert` it goes on with the same moments."""
    params, state = trained(old)
    tx = optimizer(new)
    with pytest.raises(ValueError, match=r"`state`: expected .* instead of .*optim\.convert\(") as error:
        tx.update(grads_of(9), state, params)
    assert "\n" not in str(error.value)

    changed = converted(state, params, new)
    assert formats_of(changed) == formats_of(tx.init(params))
    assert int(changed.adam.count) == 3
    for before, after in zip(moments(state), moments(changed), strict=True):
        np.testing.assert_allclose(jnp.asarray(after["w"]), jnp.asarray(before["w"]), rtol=0.13, atol=4e-3)
    tx.update(grads_of(9), changed, params)


@pytest.mark.parametrize("name", [name for names in RECIPES.values() for name in names])
def test_state_of_the_same_recipe_is_kept_to_the_bit(name):
    params, state = trained(name)
    again = converted(state, params, name)
    assert formats_of(again) == formats_of(state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_state_without_a_recipe_is_that_of_the_default():
    """`recipe=None` reads no float32 moments as its own."""
    params = params_of("O2")
    state = adamw(1e-3, "O2").init(params)
    adamw(1e-3).update(grads_of(0), state, params)
    with pytest.raises(ValueError, match=r"recipe, None; got first moments: FP32 instead of E4M3"):
        adamw(1e-3).update(grads_of(0), adamw(1e-3, "O1").init(params), params)


def test_weights_of_another_recipe():
    params = params_of("O2")
    state = adamw(1e-3, "te,moments=E4M3+FP16").init(params_of("te"))
    with pytest.raises(ValueError, match="`recipe`: expected one with FP16 weights"):
        adamw(1e-3, "te,moments=E4M3+FP16").update(grads_of(0), state, params)


def test_moments_in_another_dtype():
    """A state that was cast as a whole, here to bfloat16."""
    params = params_of("te")
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adamw(1e-3, "te").init(params))
    with pytest.raises(ValueError, match="first moments: BF16 instead of FP32"):
        adamw(1e-3, "te").update(grads_of(0), state, params)


def test_directions_keep_no_remainder():
    """`scale_by_adam` does not write the weights, so it cannot keep what their rounding takes."""
    with pytest.raises(ValueError, match="`recipe`: expected one that rounds weights to nearest; got fp8"):
        scale_by_adam("fp8").init(params_of("fp8"))
    tx, params = scale_by_adam("fp8"), params_of("te")
    state = tx.init(params)
    assert formats_of(tx.update(grads_of(0), state)[1]) == formats_of(state)


# Conversion #######################################################################################


def test_master_weights_take_what_the_remainder_has():
    """From `O3` with remainders to float32 master weights: the sum of both, exactly."""
    params, state = trained(KAHAN_O3, 1e-4)
    exact = np.asarray(state.master["w"].data, np.float32) + np.asarray(state.remainder["w"], np.float32) / 16
    exact = exact * np.asarray(state.master["w"].scale)
    assert np.abs(exact - np.asarray(state.master["w"].dequantize())).max() > 0
    changed = convert(state, params, "O3,master_weight=FP32")
    np.testing.assert_array_equal(changed.master["w"], exact)


CONTAINERS = {
    "chain": lambda name: optax.chain(fp8jax.optim.clip_by_global_norm(1.0), optimizer(name)),
    "optax.MultiSteps": lambda name: optax.MultiSteps(optimizer(name), 1).gradient_transformation(),
    "multi_steps": lambda name: multi_steps(optimizer(name), 1),
    "masked": lambda name: optax.masked(optimizer(name), {"w": True, "b": False}),
    "multi_transform": lambda name: optax.multi_transform(
        {"w": optimizer(name), "b": optax.sgd(1e-2)}, {"w": "w", "b": "b"}
    ),
    "schedule": lambda name: optimizer(name, optax.linear_schedule(1e-3, 1e-4, 10)),
    "inject_hyperparams": lambda name: optax.inject_hyperparams(
        lambda learning_rate: optimizer(name, learning_rate)
    )(1e-3),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("old, new", [("O2", "fp8"), ("fp8", "O1")])
def test_states_inside_of_others(container, old, new):
    params = params_of("O2") if container != "optax.MultiSteps" else params_of("te")
    if container == "optax.MultiSteps":  # which takes no quantized weights
        old, new = (f"te,moments={'+'.join(Recipe.parse(name).moments)}" for name in (old, new))
    tx = CONTAINERS[container](old)
    grads = grads_of(0) if container != "masked" else {**grads_of(0), "b": jnp.zeros(64)}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    params = fp8jax.apply_updates(params, updates)
    tx = CONTAINERS[container](new)
    with pytest.raises(ValueError, match="`state`: expected the formats"):
        jax.jit(tx.update)(grads, state, params)
    changed = convert(state, {PARAMS: params, "batch_stats": {}}, new)
    assert formats_of(changed) == formats_of(tx.init(params))
    [adam] = [x for x in jax.tree.leaves(changed, is_leaf=is_adam_state) if isinstance(x, AdamState)]
    assert int(adam.adam.count) == 1
    jax.jit(tx.update)(grads, changed, params)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_sharded_states(stage):
    zero = Zero(jax.make_mesh((8,), ("data",)), "O2", stage=stage)
    params = zero.place(params_of("O2"))
    tx = adamw(1e-3, "O2", zero=zero)
    _, state = tx.update(grads_of(0), tx.init(params), params)
    changed = convert(state, params, "fp8", zero=zero)
    wanted = adamw(1e-3, "fp8", zero=zero).init(params)
    for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(wanted), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    adamw(1e-3, "fp8", zero=zero).update(grads_of(1), changed, params)


long = pytest.mark.long
OFFLOADED = [
    (1, "O2", "fp8", False),
    pytest.param(1, "O2", "fp8", True, marks=long),
    pytest.param(0, "fp8", "O2", False, marks=long),
    pytest.param(1, "O3", KAHAN_O3, False, marks=long),
    pytest.param(3, "O3,master_weight=FP32", "O3", False, marks=long),
    pytest.param(3, "te", "te,moments=E4M3+FP16", True, marks=long),
]


def zero_of(name, stage, offload):
    return Zero(jax.make_mesh((8,), ("data",)), name, stage, offload=offload)


@functools.cache
def state_of(name, stage, offload):
    """The state after a step."""
    tx = adamw(1e-3, name, zero=zero_of(name, stage, offload))
    params = zero_of(name, stage, False).place(params_of(name))
    return tx.update(grads_of(0), tx.init(params), params)[1]


@pytest.mark.parametrize("stage, old, new, is_jitted", OFFLOADED)
def test_states_in_the_hosts_memory(stage, old, new, is_jitted):
    """`convert` places the new state where `init` places it: on the host, or back on the devices. The values
    are those of a state that was on the devices."""

    def changed(state, zero):
        function = lambda state, params: convert(state, params, new, zero=zero)  # noqa: E731
        return (jax.jit(function) if is_jitted else function)(state, params)

    params = zero_of(old, stage, False).place(params_of(old))
    same = changed(state_of(old, stage, False), zero_of(new, stage, False))
    for was, offload in ((True, True), (True, False), (False, True)):
        zero = zero_of(new, stage, offload)
        state, tx = changed(state_of(old, stage, was), zero), adamw(1e-3, new, zero=zero)
        for a, b, wanted in zip(*map(jax.tree.leaves, (state, same, tx.init(params))), strict=True):
            assert a.sharding.memory_kind == wanted.sharding.memory_kind
            if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(moments(state))}
        assert ("pinned_host" in kinds) == offload
        tx.update(grads_of(1), state, params)


def test_states_in_host_memory_without_zero():
    params, zero = params_of("O2"), Zero(jax.make_mesh((8,), ("data",)), "O2", offload=True)
    state = adamw(1e-3, "O2", zero=zero).init(zero.place(params))
    changed = convert(state, zero.place(params), "fp8")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(changed)} == {
        jax.devices()[0].default_memory().kind
    }
    adamw(1e-3, "fp8").update(grads_of(0), changed, zero.place(params))


def test_states_of_other_optimizers():
    """`with_dequantized` keeps remainders under `fp8`, none under `O2` and refuses the other state."""
    params, grads = params_of("O2"), grads_of(0)
    lion = {name: with_dequantized(optax.lion(1e-6), name) for name in ("O2", "fp8", None)}
    states = {name: tx.update(grads, tx.init(params), params)[1] for name, tx in lion.items()}
    for old, new in (("O2", "fp8"), ("fp8", "O2"), ("O2", None)):
        with pytest.raises(ValueError, match=r"`state`: .*remainders: \w+ instead of \w+, random key"):
            lion[new].update(grads, states[old], params)
        changed = convert((states[old],), params, new)[0]
        assert formats_of(changed) == formats_of(states[new]) and changed.inner is states[old].inner
        lion[new].update(grads, changed, params)
    same = convert(states["fp8"], params, None)
    np.testing.assert_array_equal(same.remainder["w"], states["fp8"].remainder["w"])
    assert int(same.count) == 1


@pytest.mark.parametrize("name", ["te", "fp8", "O3", IN_8_BITS])
def test_a_run_of_optax_goes_on(name):
    """With its moments, its number of steps and its place in the schedule, at any depth of a chain."""
    rate = optax.cosine_decay_schedule(1e-2, 20)
    options = {"weight_decay": 0.1, "mask": lambda params: {"w": True, "b": False}}
    clip = optax.clip_by_global_norm(1.0)
    theirs = optax.chain(clip, optax.adamw(rate, **options))
    ours = adamw_8bit(rate, **options) if name == IN_8_BITS else adamw(rate, name, **options)
    ours = optax.chain(clip, ours)
    plain = params_of("te")
    state = theirs.init(plain)
    for number in range(10):
        updates, state = theirs.update(grads_of(number), state, plain)
        plain = optax.apply_updates(plain, updates)
    params = {
        **plain,
        "w": plain["w"] if name == "te" else quantize(plain["w"], weight_of(name), power_of_two=True),
    }
    changed = converted(state, params, name)
    assert formats_of(changed) == formats_of(ours.init(params))
    updates, want = theirs.update(grads_of(10), state, plain)
    new, got = ours.update(grads_of(10), changed, params)
    assert got[1].adam.count == 11
    new = fp8jax.apply_updates(params, new)
    moved = np.asarray(new["w"].dequantize() if name != "te" else new["w"]) - np.asarray(plain["w"])
    error = np.linalg.norm(moved - updates["w"]) / np.linalg.norm(updates["w"])
    assert error < {"te": 1e-5, "fp8": 0.1, "O3": 2, IN_8_BITS: 0.1}[name]
    for ours_, theirs_ in zip(moments(got), moments(want), strict=True):
        wrong = np.asarray(jnp.asarray(ours_["w"])) - theirs_["w"]
        assert np.linalg.norm(wrong) < 0.15 * np.linalg.norm(theirs_["w"])


@pytest.mark.parametrize(
    "tx",
    [optax.adam(1e-3, mu_dtype=jnp.bfloat16), optax.scale_by_adam(), optax.MultiSteps(optax.adamw(1e-3), 2)],
)
def test_other_adams_of_optax(tx):
    params = params_of("te")
    changed = convert(tx.init(params), params, "O2")
    assert [leaf.data.dtype for leaf in (x["w"] for x in moments(changed))] == [
        jnp.float8_e4m3fn,
        jnp.float16,
    ]


@pytest.mark.parametrize("make", [optax.adam, optax.adamw])
def test_injected_hyperparameters_of_optax(make):
    """They go on; `eps_root`, which ours have not, must be 0."""
    params = params_of("te")
    theirs, ours = optax.inject_hyperparams(make), getattr(fp8jax.optim, make.__name__)
    ours = optax.inject_hyperparams(ours, static_args=("recipe", "mask"))
    _, state = theirs(1e-3).update(grads_of(0), theirs(1e-3).init(params), params)
    state.hyperparams["learning_rate"] = jnp.float32(1e-2)
    want, _ = theirs(1e-3).update(grads_of(1), state, params)
    for old, of in ((state, lambda x: x), ((optax.EmptyState(), state), lambda x: x[1])):
        changed = of(convert(old, params, "te"))
        got, new = jax.jit(ours(1e-3, "te").update)(grads_of(1), changed, params)
        assert int(new.inner_state.adam.count) == 2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    state = theirs(1e-3, eps_root=1e-8).init(params)
    with pytest.raises(
        ValueError, match="`state`: expected the hyperparameter eps_root=0; got 1e-08"
    ) as error:
        convert(state, params, "te")
    assert "\n" not in str(error.value)


def test_a_chain_around_scale_by_adam_keeps_its_states():
    params = params_of("te")
    tx = optax.chain(optax.scale_by_adam(), optax.ema(0.9), optax.scale(-1e-3))
    changed = convert(tx.init(params), params, "O2")
    assert isinstance(changed[0], AdamState) and isinstance(changed[1], optax.EmaState)
    new = optax.chain(scale_by_adam("O2"), optax.ema(0.9), optax.scale(-1e-3))
    assert formats_of(changed) == formats_of(new.init(params))


def test_other_states_and_parameters_are_refused():
    params = params_of("O2")
    state = adamw(1e-3, "O2").init(params)
    with pytest.raises(ValueError, match="`state`: .*got none"):
        convert(optax.sgd(1e-3).init(params), params, "fp8")
    with pytest.raises(ValueError, match="`params`: .*another tree"):
        convert(state, {"v": params["w"]}, "fp8")
    with pytest.raises(ValueError, match=r"`params`: .*\(64, 64\); got \(8, 64\)"):
        convert(state, params_of("O2", (8, 64)), "fp8")
    with pytest.raises(ValueError, match="`recipe`: expected one with FP16 weights"):
        convert(state, params, "O3")


# Training #########################################################################################


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))


X = np.random.default_rng(5).normal(size=(64, 32)).astype(np.float32)
Y = np.roll(X, 1, 1)


def train_step(model, tx, variables, state):
    def loss_fn(variables):
        return jnp.mean((model.apply(variables, X) - Y) ** 2)

    loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
    updates, state = tx.update(grads, state, variables)
    return loss, fp8jax.apply_updates(variables, updates), state


@pytest.mark.parametrize("name", ["O3", KAHAN_O3, "O3,master_weight=FP32", "fp8", "O2", "te"])
def test_masters(name):
    """The weights that the state has, in float32; a run that goes on with them loses no step."""
    params, tx = params_of(name), adamw(1e-5, name, weight_decay=0.0)
    state = optax.chain(tx).init(params)
    first = masters(state, {PARAMS: params})
    for _ in range(5):
        updates, state = optax.chain(tx).update(grads_of(0), state, params)
        params = fp8jax.apply_updates(params, updates)
    got = masters(state, params)
    assert got["w"].dtype == jnp.float32 and jax.tree.structure(got) == jax.tree.structure(grads_of(0))
    moved = jnp.abs(got["w"] - first["w"])
    least = {"O3": 0, "O2": 0}.get(name, 4e-5)
    assert least <= float(jnp.mean(moved)) < 6e-5
    assert jnp.max(jnp.abs(got["w"] - quantization.value(params["w"]))) < 0.02
    plain = convert(state, got, "te")
    adamw(1e-3, "te").update(grads_of(0), plain[0], got)
    with pytest.raises(ValueError, match="`params`: expected the parameters that `state` was made for"):
        masters(state, {"w": jnp.ones((2, 2))})
    with pytest.raises(ValueError, match="`state`: expected the state of one `adam` or `adamw`; got 0"):
        masters(optax.sgd(1.0).init(params), params)


@pytest.mark.parametrize("rate", [1e-3, optax.linear_schedule(1e-3, 1e-4, 4)], ids=["fixed", "schedule"])
def test_back_to_optax(rate):
    """The moments and the count as optax.adamw has them: its next step is the same as ours."""
    params, name = params_of("fp8"), "fp8"
    state = adamw(rate, name).init(params)
    for _ in range(2):
        updates, state = adamw(rate, name).update(grads_of(0), state, params)
        params = fp8jax.apply_updates(params, updates)
    plain, tx = masters(state, params), optax.adamw(rate)
    state = convert(state, plain, "te")
    # Copied, because a schedule's count would be Adam's array, which cannot be donated twice.
    of_optax = jax.tree.map(jnp.copy, optax.tree.set(tx.init(plain), **state.adam._asdict()))
    got, _ = jax.jit(tx.update, donate_argnums=1)(grads_of(0), of_optax, plain)
    want, _ = adamw(rate, "te", weight_decay=1e-4).update(grads_of(0), state, plain)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-9), got, want)


def test_training_through_three_recipes():
    """fp8, then O2, then fp8: the loss falls in each part, and ends where fp8 alone ends."""
    model = fp8jax.transform(MLP(), "fp8")
    optimizers = {name: adamw(3e-3, name) for name in ("fp8", "O2")}
    train = {name: jax.jit(functools.partial(train_step, model, tx)) for name, tx in optimizers.items()}

    def run(names, steps=30):
        variables, state, losses = model.init(jax.random.key(0), X), None, []
        for name in names:
            state = optimizers[name].init(variables) if state is None else convert(state, variables, name)
            for _ in range(steps):
                loss, variables, state = train[name](variables, state)
            losses.append(float(loss))
        assert int(skipped(state)) == 0 and int(state.adam.count) == len(names) * steps
        return losses

    losses, alone = run(["fp8", "O2", "fp8"]), run(["fp8", "fp8", "fp8"])
    assert losses[2] < losses[1] < losses[0]
    np.testing.assert_allclose(losses[2], alone[2], rtol=0.05)


def test_small_steps_move_after_the_change():
    """20 steps at a rate of 1e-6 with the same gradient: O2's weights stay, those of `fp8` move, but for what
    E4M3's and E5M2's moments of small gradients lose."""

    def moved(name, params, state, steps=20):
        tx, first = adamw(1e-6, name, weight_decay=0.0), params["w"].dequantize()
        for _ in range(steps):
            updates, state = tx.update(grads_of(0), state, params)
            params = fp8jax.apply_updates(params, updates)
        rest = 0.0
        if state.remainder["w"] is not None:
            rest = state.remainder["w"].astype(jnp.float32) / 16 * params["w"].scale
        return float(jnp.abs(params["w"].dequantize() + rest - first).mean()), state, params

    params = params_of("O2")
    lost, state, params = moved("O2", params, adamw(1e-6, "O2").init(params))
    kept, _, _ = moved("fp8", params, convert(state, params, "fp8"))
    assert lost < 0.1 * 20e-6 and 0.9 * 20e-6 < kept < 20e-6


@pytest.mark.parametrize("pure", [lambda state: state, nnx.as_pure], ids=["variables", "values"])
def test_an_nnx_model_leaves_its_masters(pure):
    model = fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), "O3")
    optimizer = nnx.Optimizer(model, adamw(1e-2, "O3"), wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(model, fp8jax.value_and_grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)[1])
    plain = fp8jax.adapters.nnx.dequantize(model)
    before = plain.kernel[...]
    nnx.update(plain, masters(pure(optimizer.opt_state), pure(nnx.state(model, nnx.Param))))
    want = nnx.as_pure(optimizer.opt_state).master["kernel"].dequantize()
    np.testing.assert_array_equal(plain.kernel[...], want)
    assert jnp.any(before != want) and plain(X).shape == X.shape


def test_nnx_optimizer():
    """An `nnx.Optimizer`'s state: as pure arrays, and back."""
    model = fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), "fp8")

    def step(optimizer):
        loss, grads = fp8jax.value_and_grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)[:2]
        optimizer.update(model, grads)
        return float(loss)

    first = nnx.Optimizer(model, adamw(1e-2, "O2"), wrt=nnx.Param)
    losses = [step(first) for _ in range(5)]
    second = nnx.Optimizer(model, adamw(1e-2, "fp8"), wrt=nnx.Param)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    nnx.update(second.opt_state, nnx.state(convert(nnx.as_pure(first.opt_state), params, "fp8")))
    second.step[...] = first.step[...]
    losses += [step(second) for _ in range(5)]
    assert losses[9] < losses[5] < losses[4]
    assert int(nnx.as_pure(second.opt_state).adam.count) == int(second.step[...]) == 10


# Weights in another format ########################################################################


def with_weights(params, weight):
    """Parameters with their weights in another format."""
    w = quantization.value(params["w"]).astype(jnp.float32)
    is_scaled = weight in ("FP16", "E4M3")
    return {**params, "w": quantize(w, weight, power_of_two=True) if is_scaled else w.astype(weight)}


@pytest.mark.parametrize("new", ["O3", KAHAN_O3, "O3,master_weight=FP32"])
def test_remainders_of_16_bit_weights_are_not_those_of_e4m3_weights(new):
    """New master weights are the new weights."""
    params, state = trained("fp8")
    params = with_weights({**params, "w": masters(state, params)["w"]}, "E4M3")
    changed = converted(state, params, new)
    assert formats_of(changed) == formats_of(optimizer(new).init(params))
    np.testing.assert_array_equal(masters(changed, params)["w"], params["w"].dequantize())


@pytest.mark.parametrize("old, new", [("FP16", "bfloat16"), ("bfloat16", "FP16")])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: with_dequantized(optax.sgd(1e-3, 0.9))])
def test_scaled_and_plain_weights_of_16_bits(old, new, wrap):
    """The remainders begin again, and the moments go on."""
    tx = wrap(adamw(1e-3, "fp8"))
    first, params = with_weights(params_of("te"), old), with_weights(params_of("te"), new)
    _, state = tx.update(grads_of(0), tx.init(first), first)
    with pytest.raises(ValueError, match="remainders"):
        tx.update(grads_of(1), state, params)
    changed = convert(state, params, "fp8")
    assert formats_of(changed) == formats_of(tx.init(params))
    tx.update(grads_of(1), changed, params)


@pytest.mark.parametrize("has_muon", [True, False])
def test_states_of_muon_and_adam(has_muon):
    """The refusal does not advise `convert`, which changes no state of one into the other's."""
    params, pair = params_of("fp8"), [fp8jax.optim.muon(1e-3, "fp8"), adamw(1e-3, "fp8")]
    tx, other = pair if has_muon else pair[::-1]
    with pytest.raises(ValueError, match=r"Begin a new state with `init`: Muon"):
        tx.update(grads_of(0), convert(other.init(params), params, "fp8"), params)


@pytest.mark.parametrize(
    "tx", [adamw(1e-3, "fp8"), adamw(1e-3, "fp8_6"), adamw_8bit(1e-3), muon(1e-3, "fp8")]
)
def test_states_of_numpy_arrays(tx):
    """As `jax.device_get` and Flax's `from_bytes` return them."""
    params = params_of("fp8", (64, 256))
    _, state = tx.update(grads_of(0, (64, 256)), tx.init(params), params)

    def values(state):
        is_leaf = lambda node: hasattr(node, "dequantize")  # noqa: E731
        return jax.tree.map(jnp.asarray, moments(state), is_leaf=is_leaf)

    for change in (lambda state: state, lambda state: convert(state, params, "O1")):
        got, want = values(change(jax.device_get(state))), values(change(state))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_state_of_another_kind():
    params = params_of("fp8")
    state = with_dequantized(optax.lion(1e-3)).init(params)
    with pytest.raises(
        TypeError, match="expected the `AdamState`.*got a DequantizedState.*`init` for another"
    ):
        adamw(1e-3, "fp8").update(grads_of(0), state, params)


@pytest.mark.parametrize("labels", [{"f": "off", "t": "on"}, {"f": {"w": "off", "b": "off"}, "t": "on"}])
@pytest.mark.parametrize("name", ["O3", "fp8"])
def test_masters_beside_frozen_layers(name, labels):
    """A frozen layer has no master weight, and keeps its value."""
    params = {layer: {"w": params_of(name)["w"], "b": jnp.ones(64)} for layer in "ft"}
    tx = optax.partition({"on": adamw(1e-3, name), "off": optax.set_to_zero()}, labels)
    state = tx.init(params)
    got = masters(state, params)
    plain = jax.tree.map(quantization.value, params, is_leaf=quantization.is_scaled)
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    jax.tree.map(np.testing.assert_array_equal, got, plain)
    more = jax.tree.map(lambda x: 1.01 * x, plain)
    changed = fp8jax.optim.with_masters(state, {PARAMS: more})
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    got, want = masters(changed, params), more["t"]["w"] if name == "O3" else plain["t"]["w"]
    np.testing.assert_allclose(got["t"]["w"], want, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(got["f"]["w"], plain["f"]["w"])
    with pytest.raises(ValueError, match="other names are"):
        fp8jax.optim.with_masters(state, {"t": more["t"], "g": more["f"]})
