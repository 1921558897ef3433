"""Gradient transformations: clipping, optax's own, masks over whole variables, accumulation."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax import ScaledArray, formats, quantize
from fp8jax.optim import adamw, clip_by_global_norm, dequantize, moments, on_params, scale_by_adam
from fp8jax.quantization import as_gradients, is_scaled, value
from fp8jax.variables import PARAMS, SCALING


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMETERS = {"w": quantize(normal(0, 4, 8), formats.FP16, power_of_two=True), "b": normal(1, 8)}
GRADIENTS = {"w": quantize(normal(2, 4, 8), formats.E4M3, power_of_two=True), "b": normal(3, 8)}
OLD, NEW = ({"w": {"scale": jnp.full(3, scale)}} for scale in (1.0, 2.0))
VARIABLES = {PARAMS: PARAMETERS, SCALING: OLD}
ALL_GRADIENTS = {PARAMS: GRADIENTS, SCALING: NEW}


def values(tree):
    return jax.tree.map(value, tree, is_leaf=is_scaled)


def step(tx, variables, gradients):
    updates, _ = tx.update(gradients, tx.init(variables), variables)
    return fp8jax.apply_updates(variables, updates)


def assert_close(got, expected, rtol=1e-6, atol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), values(got), values(expected))


# Clipping ########################################################################################

MIXED = {
    **GRADIENTS,
    "h": normal(4, 5).astype(jnp.bfloat16),
    "rows": quantize(normal(5, 4, 6), formats.E5M2, blocks=(4, 1)),
}


@pytest.mark.parametrize("max_norm", [0.5, 3.0])
def test_clipping_is_optaxs_on_the_values_and_multiplies_scales_alone(max_norm):
    clip = clip_by_global_norm(max_norm)
    got, _ = clip.update(MIXED, clip.init(MIXED))
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32), values(MIXED)
    )  # optax's norm of bfloat16 is bfloat16
    theirs = optax.clip_by_global_norm(max_norm)
    expected, _ = theirs.update(wide, theirs.init(wide))
    for name in MIXED:
        # A rounding or two more in ours, of the factor; of bfloat16's result to bfloat16.
        rtol = 2.0**-7 if name == "h" else 4 * 2.0**-24
        np.testing.assert_allclose(np.float32(value(got[name])), expected[name], rtol, err_msg=name)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, MIXED)
    for name in ("w", "rows"):
        np.testing.assert_array_equal(got[name].data, MIXED[name].data)
        factor = np.asarray(got[name].scale) / np.asarray(MIXED[name].scale)
        np.testing.assert_allclose(factor, max_norm / optax.tree.norm(wide), rtol=1e-6)


@pytest.mark.parametrize("gradients", [MIXED, jax.tree.map(jnp.zeros_like, MIXED)], ids=["small", "zero"])
def test_a_norm_below_the_limit_changes_no_bit(gradients):
    clip = clip_by_global_norm(1e3)
    got, _ = clip.update(gradients, clip.init(gradients))
    chex.assert_trees_all_equal(got, gradients)


def test_clipping_sees_the_parameters_gradients_alone():
    clip = clip_by_global_norm(1.0)
    huge = {PARAMS: GRADIENTS, SCALING: jax.tree.map(lambda x: 1e9 * x, NEW)}
    got, _ = clip.update(huge, clip.init(VARIABLES))
    expected, _ = clip.update(GRADIENTS, clip.init(PARAMETERS))
    chex.assert_trees_all_equal(got[PARAMS], expected)
    assert got[SCALING] is huge[SCALING]


def test_the_norm_is_that_of_the_values_in_float32():
    """448**2 times the number of codes overflows float16, and the codes' norm is not the gradient's."""
    gradient = {"w": ScaledArray(jnp.full((64, 64), 448.0, jnp.float8_e4m3fn), jnp.float32(2.0**-9))}
    clip = clip_by_global_norm(1.0)
    got, _ = clip.update(gradient, clip.init(gradient))
    np.testing.assert_allclose(optax.tree.norm(values(got)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(got["w"].scale, 1 / (448 * 64), rtol=1e-6)


# optax's own ######################################################################################

RAW = {
    "scale": optax.scale(-0.1),
    "sgd": optax.sgd(0.1),
    "clip": optax.clip(0.1),
    "sgd with momentum": optax.sgd(0.1, 0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "clip_by_global_norm": optax.clip_by_global_norm(0.1),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
}


@pytest.mark.parametrize("name", RAW)
def test_a_raw_link_on_fp8_gradients_makes_the_step_raise(name):
    """It would act on codes and on scales apart: scaling by -0.1 would be scaling by 0.01, uphill."""
    with pytest.raises((TypeError, ValueError)):
        step(RAW[name], PARAMETERS, GRADIENTS)


@pytest.mark.parametrize("name", RAW)
def test_after_dequantize_every_raw_link_works(name):
    tx = optax.chain(dequantize(), RAW[name])
    params, gradients = values(PARAMETERS), values(GRADIENTS)
    # What optax computes from the values; the weight is then rounded to FP16.
    expected = step(RAW[name], params, gradients)
    got = step(tx, PARAMETERS, GRADIENTS)
    assert_close(got, expected, rtol=2.0**-10, atol=1e-6)
    whole = step(on_params(tx), VARIABLES, ALL_GRADIENTS)
    chex.assert_trees_all_equal(whole, {PARAMS: got, SCALING: NEW})


@pytest.mark.parametrize("name", RAW)
def test_in_on_params_a_raw_link_lets_the_scaling_state_through(name):
    """A scaling state is no gradient: what clips or scales it leaves scales that mean nothing."""
    variables = {PARAMS: values(PARAMETERS), SCALING: OLD}
    gradients = {PARAMS: values(GRADIENTS), SCALING: NEW}
    got = step(on_params(RAW[name]), variables, gradients)
    expected = step(RAW[name], variables[PARAMS], gradients[PARAMS])
    chex.assert_trees_all_equal(got, {PARAMS: expected, SCALING: NEW})


# Whole variables, as `value_and_grad` takes and gives them.
WHOLE = {PARAMS: {"w": normal(6, 4, 8)}, SCALING: OLD}


def gradients_of(variables, **options):
    return fp8jax.value_and_grad(lambda v: jnp.sum(v[PARAMS]["w"] ** 2), **options)(variables)[1]


@pytest.mark.parametrize("name", [*RAW, "MultiSteps", "clip, then ours"])
def test_a_raw_link_cannot_reach_the_scaling_state(name):
    """Clipped, scaled or averaged, it is wrong without a word: scales that fit no tensor."""
    others = {
        "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2),
        "clip, then ours": optax.chain(optax.clip_by_global_norm(0.1), adamw(0.1, "te")),
    }
    tx = {**RAW, **others}[name]

    def whole(variables):
        return step(tx, variables, gradients_of(variables))

    with pytest.raises((TypeError, ValueError), match=r"fp8jax\.optim"):
        jax.jit(whole)(WHOLE)
    with pytest.raises((TypeError, ValueError), match=r"fp8jax\.optim"):  # behind one of ours, too
        jax.jit(lambda v: step(optax.chain(clip_by_global_norm(1.0), tx), v, gradients_of(v)))(WHOLE)


@pytest.mark.parametrize("outer", [optax.clip_by_global_norm(0.1), optax.scale(0.5)])
def test_a_raw_link_shows_outside_of_compiled_code(outer):
    """Windows of amaxes move by one a step: those that were scaled are others at the second."""
    model = fp8jax.transform(nn.Dense(32), "te")
    variables = model.init(jax.random.key(0), jnp.ones((4, 32)))
    tx, ours = optax.chain(outer, adamw(0.1, "te")), optax.chain(adamw(0.1, "te"))
    grad_fn = jax.jit(fp8jax.value_and_grad(lambda v: jnp.sum(model.apply(v, jnp.ones((4, 32))) ** 2)))

    def train(tx, variables):
        state = tx.init(variables)
        for _ in range(3):
            updates, state = tx.update(grad_fn(variables)[1], state, variables)
            variables = fp8jax.apply_updates(variables, updates)

    train(ours, variables)
    with pytest.raises(TypeError, match=r"something changed the scaling state.*fp8jax\.optim\.on_params"):
        train(tx, variables)


def test_optaxs_apply_updates_would_add_the_scaling_states():
    updates, _ = clip_by_global_norm(1.0).update(gradients_of(WHOLE), optax.EmptyState(), WHOLE)
    with pytest.raises(ValueError, match=r"take the step by fp8jax\.apply_updates"):
        optax.apply_updates(WHOLE, updates)


@pytest.mark.parametrize("make", [fp8jax.value_and_grad, lambda f: fp8jax.accumulate_gradients(f, 2)])
def test_gradients_of_whole_variables_are_a_dict_to_look_at(make):
    """Compiled code takes and gives them; only steps along all of them at once are refused."""
    loss = lambda v, x: jnp.mean((x @ v[PARAMS]["w"]) ** 2)  # noqa: E731
    grads = jax.jit(make(loss))(WHOLE, jnp.ones((2, 4)))[1]
    assert sorted(grads) == sorted(WHOLE) and isinstance(grads, dict) and type(new[SCALING]) is dict
    chex.assert_trees_all_equal(new[SCALING], OLD)
    again = jax.jit(lambda g: jax.lax.scan(lambda g, _: (g, None), g, None, 2)[0])(jax.device_get(grads))
    chex.assert_trees_all_equal(dict(again), dict(grads))
    assert all(jax.tree.leaves(jax.tree.map(lambda x: bool(jnp.all(jnp.isfinite(x))), grads)))
    for mesh_free in (
        fp8jax.optim.dequantize(),
        adamw(0.1, "te"),
        fp8jax.optim.multi_steps(adamw(0.1, "te"), 2),
    ):
        updates, _ = mesh_free.update(grads, mesh_free.init(WHOLE), WHOLE)
        assert sorted(updates) == sorted(grads)
        new = fp8jax.apply_updates(WHOLE, updates)
        assert jax.tree.structure(new) == jax.tree.structure(WHOLE)


def test_apply_if_finite_is_built_in():
    """It would put zeros in the place of the scaling state, or of a weight's new value."""
    tx = optax.apply_if_finite(adamw(0.1), 3)
    for run in (
        lambda: step(tx, WHOLE, gradients_of(WHOLE)),
        lambda: step(tx, PARAMETERS, GRADIENTS),
        lambda: step(on_params(tx), VARIABLES, ALL_GRADIENTS),
    ):
        with pytest.raises(TypeError, match=r"fp8jax\.optim\.skipped.*apply_if_finite is not needed"):
            run()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_scaled_kernel_can_be_frozen(is_compiled):
    """As Flax's guide does it; the optimizer of the others sees that a gradient is FP8 in any case."""
    both = {PARAMS: {"w": PARAMETERS["w"], "frozen": PARAMETERS["w"]}, SCALING: {}}
    grads = {PARAMS: as_gradients({"w": GRADIENTS["w"], "frozen": GRADIENTS["w"]}), SCALING: {}}
    labels = {"w": "trainable", "frozen": "frozen"}
    tx = on_params(optax.multi_transform({"trainable": adamw(0.1), "frozen": optax.set_to_zero()}, labels))
    way = jax.jit if is_compiled else lambda f: f
    got = way(lambda v, g: step(tx, v, g))(both, grads)
    expected = step(adamw(0.1), PARAMETERS, {**GRADIENTS, "b": jnp.zeros(8)})
    chex.assert_trees_all_equal(got[PARAMS]["frozen"], PARAMETERS["w"])
    chex.assert_trees_all_equal(got[PARAMS]["w"], expected["w"])


RAW_ON_FP8 = {name: tx for name, tx in RAW.items() if name != "clip_by_global_norm"}


@pytest.mark.parametrize("name", RAW_ON_FP8)
def test_a_raw_link_on_an_fp8_gradient_is_told_what_to_do(name):
    grads = as_gradients(GRADIENTS)
    for tx in (RAW[name], optax.chain(RAW[name], adamw(0.1))):
        with pytest.raises((TypeError, ValueError), match=r"fp8jax\.optim"):
            jax.jit(lambda p, g, tx=tx: step(tx, p, g))(PARAMETERS, grads)


def test_a_gradient_is_no_update():
    """What was never an optimizer's is refused, or shows as NaN where compiled code cannot raise."""
    grads = as_gradients(GRADIENTS)
    for update in (grads["w"], jax.tree.map(lambda x: x, grads["w"])):
        with pytest.raises(TypeError, match="expected arrays; got a ScaledArray"):
            fp8jax.apply_updates(PARAMETERS["w"], update)
    assert np.isnan(value(jax.jit(fp8jax.apply_updates)(PARAMETERS["w"], grads["w"]))).all()


def test_optaxs_own_take_variables_without_scaling_state():
    variables = {PARAMS: {"w": normal(6, 4, 8)}}
    got = step(optax.adamw(0.1), variables, gradients_of(variables))
    expected = step(optax.adamw(0.1), variables, jax.grad(lambda v: jnp.sum(v[PARAMS]["w"] ** 2))(variables))
    chex.assert_trees_all_close(got, expected, rtol=1e-6)


def test_dequantize_turns_every_leaf_to_its_value_and_keeps_the_rest():
    got, _ = dequantize().update(MIXED, dequantize().init(MIXED))
    chex.assert_trees_all_equal(got, values(MIXED))
    assert got["h"] is MIXED["h"] and got["w"].dtype == jnp.float32
    whole, _ = dequantize().update(ALL_GRADIENTS, dequantize().init(VARIABLES))
    assert whole[SCALING] is NEW


# Parts of a tree, parts of a batch ###############################################################


@pytest.mark.parametrize(
    "mask",
    [
        {"w": True, "b": False},
        lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params, is_leaf=is_scaled),
    ],
    ids=["tree", "function"],
)
def test_masked_acts_on_whole_leaves(mask):
    tx = on_params(
        optax.chain(
            optax.masked(adamw(0.1), mask), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
        )
    )
    got = step(tx, VARIABLES, ALL_GRADIENTS)
    expected = step(adamw(0.1), {"w": PARAMETERS["w"]}, {"w": GRADIENTS["w"]})
    chex.assert_trees_all_equal(got, {PARAMS: {"w": expected["w"], "b": PARAMETERS["b"]}, SCALING: NEW})
    held = jax.tree.leaves(moments(tx.init(VARIABLES))[0], is_leaf=is_scaled)
    assert [leaf.shape for leaf in held] == [(4, 8)]


def test_each_label_can_have_its_own_optimizer():
    tx = optax.multi_transform(
        {"narrow": adamw(0.1, "O2"), "wide": adamw(0.1, "fp32")}, {"w": "narrow", "b": "wide"}
    )
    got = step(on_params(tx), VARIABLES, ALL_GRADIENTS)
    for name, recipe in (("w", "O2"), ("b", "fp32")):
        expected = step(adamw(0.1, recipe), {name: PARAMETERS[name]}, {name: GRADIENTS[name]})
        chex.assert_trees_all_equal(got[PARAMS][name], expected[name])


NOBODY = {
    "empty tree": (scale_by_adam("O2"), {}),
    "masked out": (optax.masked(scale_by_adam("O2"), {"w": False}), {"w": jnp.ones(3)}),
    "label without parameters": (
        optax.multi_transform({"on": scale_by_adam("O2"), "off": optax.set_to_zero()}, {"w": "off"}),
        {"w": jnp.ones(3)},
    ),
}


@pytest.mark.parametrize("name", NOBODY)
def test_no_parameters_are_no_error(name):
    """optax's optimizers take an empty tree, and so what a mask or a label leaves of one."""
    tx, tree = NOBODY[name]
    got, _ = tx.update(tree, tx.init(tree), tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)


def test_gradients_accumulate_over_microbatches():
    """`optax.MultiSteps` inside `on_params`, for gradients and parameters that are plain arrays."""
    params, first, second = (
        values(PARAMETERS),
        values(GRADIENTS),
        jax.tree.map(lambda g: 3 * g, values(GRADIENTS)),
    )
    tx = on_params(optax.MultiSteps(adamw(0.1, "O1"), 2).gradient_transformation())
    variables = {PARAMS: params, SCALING: OLD}
    state = tx.init(variables)
    updates, state = tx.update({PARAMS: first, SCALING: NEW}, state, variables)
    halfway = fp8jax.apply_updates(variables, updates)
    chex.assert_trees_all_equal(halfway, {PARAMS: params, SCALING: NEW})
    updates, state = tx.update({PARAMS: second, SCALING: OLD}, state, halfway)
    got = fp8jax.apply_updates(halfway, updates)
    expected = step(adamw(0.1, "O1"), params, jax.tree.map(lambda g: 2 * g, first))
    assert_close(got[PARAMS], expected, rtol=1e-5)
    chex.assert_trees_all_equal(got[SCALING], OLD)
    assert int(optax.tree.get(state, "gradient_step")) == 1


def test_fp8_gradients_do_not_accumulate_silently():
    """Codes on different scales cannot be added; the values can, along the values of the parameters."""
    tx = optax.MultiSteps(adamw(0.1, "O1"), 2)
    with pytest.raises((TypeError, ValueError)):
        step(tx, PARAMETERS, GRADIENTS)
    state, params = tx.init(values(PARAMETERS)), PARAMETERS
    for _ in range(2):
        updates, state = tx.update(values(GRADIENTS), state, values(params))
        params = fp8jax.apply_updates(params, updates)
    assert_close(params, step(adamw(0.1, "O1"), PARAMETERS, GRADIENTS), rtol=2.0**-10, atol=1e-6)


# moments #########################################################################################


def test_moments_are_found_however_deep():
    direct = moments(scale_by_adam("O2").init(PARAMETERS))
    for tx in (
        optax.chain(clip_by_global_norm(1.0), adamw(0.1)),
        optax.inject_hyperparams(adamw, static_args=("recipe",))(learning_rate=0.1),
        optax.apply_if_finite(adamw(0.1), 3),
    ):
        chex.assert_trees_all_equal(moments(tx.init(PARAMETERS)), direct)
    mu, nu = moments(adamw(0.1, "O1").init(VARIABLES))
    chex.assert_trees_all_equal((mu, nu), (jax.tree.map(jnp.zeros_like, values(PARAMETERS)),) * 2)


@pytest.mark.parametrize(
    "tx, count", [(optax.sgd(0.1), 0), (optax.chain(adamw(0.1), scale_by_adam("O1")), 2)], ids=["none", "two"]
)
def test_moments_raise_where_there_is_not_one_pair(tx, count):
    with pytest.raises(ValueError, match=f"`state`: expected .* one pair of Adam moments; got {count}"):
        moments(tx.init(PARAMETERS))
