"""Gradient transformations: clipping, optax's own, masks over whole variables, accumulation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax import ScaledArray, formats, quantize
from fp8jax.optim import adamw, clip_by_global_norm, dequantize, moments, scale_by_adam
from fp8jax.quantization import as_gradients, is_scaled, value
from fp8jax.variables import PARAMS, SCALING


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMETERS = {"w": quantize(normal(0, 4, 8), formats.FP16, power_of_two=True), "b": normal(1, 8)}
GRADIENTS = {"w": quantize(normal(2, 4, 8), formats.E4M3, power_of_two=True), "b": normal(3, 8)}
STATE = {"w": {"scale": jnp.full(3, 2.0)}}
VARIABLES = {PARAMS: PARAMETERS, SCALING: STATE}


def values(tree):
    return jax.tree.map(value, tree, is_leaf=is_scaled)


def step(tx, variables, gradients):
    updates, _ = tx.update(gradients, tx.init(variables), variables)
    return fp8jax.apply_updates(variables, updates)


def assert_close(got, expected, rtol=1e-6, atol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), values(got), values(expected))


@pytest.mark.parametrize("link", [lambda: adamw(1e-3, "O2"), lambda: clip_by_global_norm(1.0), dequantize])
def test_transformations_behind_an_optimizer_raise(link):
    tx = optax.chain(adamw(1e-3, "O2"), link())
    with pytest.raises(TypeError, match="`updates`: expected gradients; got the new values"):
        tx.update(GRADIENTS, tx.init(PARAMETERS), PARAMETERS)


# Clipping ########################################################################################

MIXED = {
    **GRADIENTS,
    "h": normal(4, 5).astype(jnp.bfloat16),
    "rows": quantize(normal(5, 4, 6), formats.E5M2, blocks=(4, 1)),
}


@pytest.mark.parametrize("max_norm", [0.5, 3.0])
def test_clipping(max_norm):
    """It is optax's on the values, and multiplies only the scales."""
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


@pytest.mark.parametrize("number", [0.0, 1.0])
def test_a_limit_of_zero_gives_zeros(number):
    """Gradients of zero have the norm 0, and 0 / 0 is NaN."""
    x = jnp.full((4, 4), number)
    clip = clip_by_global_norm(0.0)
    got, _ = clip.update({"w": fp8jax.quantize(x, formats.E4M3), "b": x}, clip.init(None))
    assert not any(np.asarray(value(leaf)).any() for leaf in got.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_factors_are_float32(dtype):
    """float16 takes 1e-8 for 0."""
    gradient = jnp.full((1000, 1000), 1000.0, dtype)
    clip = clip_by_global_norm(0.01)
    got, _ = clip.update(gradient, clip.init(gradient))
    assert got.dtype == dtype and jnp.all(got == jnp.asarray(1e-5, dtype))


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


@pytest.mark.parametrize(
    "tx", [adamw(0.1), clip_by_global_norm(0.1), dequantize()], ids=["adamw", "clip", "to floats"]
)
def test_ours_take_parameters_or_whole_variables(tx):
    expected, _ = tx.update(GRADIENTS, tx.init(PARAMETERS), PARAMETERS)
    got, _ = tx.update(GRADIENTS, tx.init(VARIABLES), VARIABLES)
    chex.assert_trees_all_equal(got, expected)
    wrapped = {PARAMS: GRADIENTS}  # of a function whose own parameters have this name
    got, _ = tx.update(wrapped, tx.init({PARAMS: PARAMETERS}), {PARAMS: PARAMETERS})
    chex.assert_trees_all_equal(got, {PARAMS: expected})


def test_apply_if_finite_is_built_in():
    """It would put zeros in the place of a weight's new value."""
    tx = optax.apply_if_finite(adamw(0.1), 3)
    with pytest.raises(TypeError, match=r"fp8jax\.optim\.skipped.*apply_if_finite is not needed"):
        step(tx, PARAMETERS, GRADIENTS)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_scaled_kernel_can_be_frozen(is_compiled):
    """As Flax's guide does it; the optimizer of the others sees that a gradient is FP8 in any case."""
    both = {"w": PARAMETERS["w"], "frozen": PARAMETERS["w"]}
    grads = as_gradients({"w": GRADIENTS["w"], "frozen": GRADIENTS["w"]})
    labels = {"w": "trainable", "frozen": "frozen"}
    tx = optax.multi_transform({"trainable": adamw(0.1), "frozen": optax.set_to_zero()}, labels)
    way = jax.jit if is_compiled else lambda f: f
    got = way(lambda v, g: step(tx, v, g))(both, grads)
    expected = step(adamw(0.1), PARAMETERS, {**GRADIENTS, "b": jnp.zeros(8)})
    chex.assert_trees_all_equal(got["frozen"], PARAMETERS["w"])
    chex.assert_trees_all_equal(got["w"], expected["w"])


RAW_ON_FP8 = {name: tx for name, tx in RAW.items() if name != "clip_by_global_norm"}


@pytest.mark.parametrize("name", RAW_ON_FP8)
def test_optax_transform_on_fp8_gradient_raises(name):
    """The error names the transformation to put in front."""
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


def test_dequantize():
    """Every scaled leaf becomes its value, and all other leaves stay."""
    got, _ = dequantize().update(MIXED, dequantize().init(MIXED))
    chex.assert_trees_all_equal(got, values(MIXED))
    assert got["h"] is MIXED["h"] and got["w"].dtype == jnp.float32


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
    tx = optax.chain(
        optax.masked(adamw(0.1), mask), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    )
    got = step(tx, PARAMETERS, GRADIENTS)
    expected = step(adamw(0.1), {"w": PARAMETERS["w"]}, {"w": GRADIENTS["w"]})
    chex.assert_trees_all_equal(got, {"w": expected["w"], "b": PARAMETERS["b"]})
    held = jax.tree.leaves(moments(tx.init(PARAMETERS))[0], is_leaf=is_scaled)
    assert [leaf.shape for leaf in held] == [(4, 8)]


@pytest.mark.parametrize("freeze", ["partition", "multi_transform", "masked"])
@pytest.mark.parametrize("is_leaf", [None, is_scaled], ids=["leaves", "arrays"])
def test_labels_by_path(freeze, is_leaf):
    """A label for codes and another for the scale freeze nothing, and are refused with what to do."""

    def labels(params):
        name = lambda path, _: "frozen" if "w" in jax.tree_util.keystr(path) else "trained"  # noqa: E731
        return jax.tree_util.tree_map_with_path(name, params, is_leaf=is_leaf)

    parts = {"trained": adamw(1e-2, "O2"), "frozen": optax.set_to_zero()}
    if freeze == "masked":
        is_trained = lambda params: jax.tree.map(lambda label: label == "trained", labels(params))  # noqa: E731
        tx = optax.masked(parts["trained"], is_trained)
    else:
        tx = getattr(optax, freeze)(parts, labels)
    if is_leaf is None:
        with pytest.raises(TypeError, match=r"`params`: expected whole scaled arrays.*is_leaf=fp8jax"):
            tx.init(PARAMETERS)
        return
    state, grads = tx.init(PARAMETERS), {**GRADIENTS, "w": as_gradients(GRADIENTS["w"])}
    updates, _ = tx.update(grads, state, PARAMETERS)
    if freeze != "masked":
        new = fp8jax.apply_updates(PARAMETERS, updates)
        np.testing.assert_array_equal(new["w"].data, PARAMETERS["w"].data)
        assert jnp.any(new["b"] != PARAMETERS["b"])


def test_each_label_can_have_its_own_optimizer():
    tx = optax.multi_transform(
        {"narrow": adamw(0.1, "O2"), "wide": adamw(0.1, "fp32")}, {"w": "narrow", "b": "wide"}
    )
    got = step(tx, PARAMETERS, GRADIENTS)
    for name, recipe in (("w", "O2"), ("b", "fp32")):
        expected = step(adamw(0.1, recipe), {name: PARAMETERS[name]}, {name: GRADIENTS[name]})
        chex.assert_trees_all_equal(got[name], expected[name])


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
    """`optax.MultiSteps` for gradients and parameters that are plain arrays."""
    params, first = values(PARAMETERS), values(GRADIENTS)
    second = jax.tree.map(lambda g: 3 * g, first)
    tx = optax.MultiSteps(adamw(0.1, "O1"), 2).gradient_transformation()
    state = tx.init(params)
    updates, state = tx.update(first, state, params)
    halfway = fp8jax.apply_updates(params, updates)
    chex.assert_trees_all_equal(halfway, params)
    updates, state = tx.update(second, state, halfway)
    got = fp8jax.apply_updates(halfway, updates)
    expected = step(adamw(0.1, "O1"), params, jax.tree.map(lambda g: 2 * g, first))
    assert_close(got, expected, rtol=1e-5)
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
def test_moments_of_two_adams_raise(tx, count):
    """`moments` needs exactly one Adam in the state."""
    with pytest.raises(ValueError, match=f"`state`: expected .* one pair of Adam moments; got {count}"):
        moments(tx.init(PARAMETERS))


@pytest.mark.parametrize("name", ["te", "fp8"])
def test_training_goes_on_after_a_microbatch_of_nans(name):
    """optax multiplies the sum by zero between steps, which leaves a NaN."""
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    tx = fp8jax.optim.multi_steps(adamw(1e-2, name, weight_decay=0.0), 2)
    update, state = jax.jit(tx.update), tx.init(params)
    before = params
    for number in range(6):
        given = jax.tree.map(lambda x, is_bad=number == 0: x * jnp.nan if is_bad else x, grads)
        updates, state = update(given, state, params)
        params = fp8jax.apply_updates(params, updates)
    assert fp8jax.optim.skipped(state) == 1 and state.gradient_step == 3
    steps = jax.tree.map(lambda new, old: new - old, params, before)
    chex.assert_trees_all_close(steps, jax.tree.map(lambda x: jnp.full_like(x, -0.02), before), rtol=0.2)


@pytest.mark.parametrize("make", [lambda: adamw(0.1, "te"), lambda: clip_by_global_norm(1.0), dequantize])
def test_gradients_beside_params_are_not_dropped(make):
    grads = {PARAMS: {"w": jnp.ones((4, 4))}, "log_temp": jnp.ones(())}
    tx = make()
    with pytest.raises(ValueError, match="`updates`: expected.*'params' alone; got.*'log_temp'.*'model'"):
        tx.update(grads, tx.init(grads), grads)
    with pytest.raises(ValueError, match="'log_temp'"):
        fp8jax.optim.global_norm(grads)


@pytest.mark.parametrize("name", ["batch_stats", "loss_scale", "intermediates"])
def test_gradients_of_collections_without_parameters_are_dropped(name):
    """JAX's own gradient of whole variables has them."""
    grads = {PARAMS: {"w": jnp.ones((4, 4))}, name: {"mean": jnp.ones(4)}, "empty": {}}
    tx = adamw(0.1, "te")
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert updates.keys() == {PARAMS} and fp8jax.optim.global_norm(grads) == 4


def test_stateful_transformations_and_those_of_the_parameters():
    """Inside of `with_dequantized` the state of a skipped step is not kept, and the parameters are floats."""
    tx = optax.chain(
        optax.ema(0.9), optax.adaptive_grad_clip(0.1), optax.scale_by_trust_ratio(), optax.adamw(0.1)
    )
    tx = fp8jax.optim.with_dequantized(tx, "fp8")
    state, params = tx.init(PARAMETERS), PARAMETERS
    for number in range(4):
        grads = jax.tree.map(lambda x: jnp.nan * x, values(GRADIENTS)) if number == 1 else GRADIENTS
        updates, state = tx.update(grads, state, params)
        params = fp8jax.apply_updates(params, updates)
    assert fp8jax.optim.skipped(state) == 1
    moved = jax.tree.map(lambda new, old: jnp.max(jnp.abs(new - old)), values(params), values(PARAMETERS))
    assert 0.1 < moved["w"] < 1 and 0.1 < moved["b"] < 1
