"""Adam with narrow moments: optax's contract for an optimizer, and what a step means."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax import Recipe, formats, quantize
from fp8jax.optim import adam, adamw, adamw_8bit, moments, scale_by_adam, with_dequantized
from fp8jax.quantization import is_scaled, value
from fp8jax.variables import PARAMS, SCALING

LR, B1, B2, EPS, DECAY = 0.01, 0.8, 0.95, 1e-6, 0.1
MAKERS = {
    "scale_by_adam": lambda recipe: scale_by_adam(recipe, B1, B2, EPS),
    "adam": lambda recipe: adam(LR, recipe, B1, B2, EPS, weight_decay=DECAY),
    "adamw": lambda recipe: adamw(LR, recipe, B1, B2, EPS, weight_decay=DECAY),
}
# A matrix, the stacked matrices of a scan with a scale each, and a vector that stays as it is.
SHAPES = {"fc": {"kernel": (8, 16), "bias": (16,)}, "blocks": {"kernel": (3, 8, 8)}}


@functools.cache
def maker_of_trees(format):
    """Compiled: kernels in `format`, or as they are where it is None."""

    def leaf(x):
        if format is None or x.ndim < 2:
            return x
        return quantize(x, format, power_of_two=True, blocks=(3, 1, 1) if x.ndim == 3 else ())

    return jax.jit(lambda tree: jax.tree.map(leaf, tree))


def tree_of(seed, format, size):
    rng = np.random.default_rng(seed)
    draw = lambda shape: np.float32(size * rng.normal(size=shape))  # noqa: E731
    return maker_of_trees(format)(jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple)))


def params_of(level):
    return tree_of(0, None if level == "fp32" else formats.FP16, 1.0)


def grads_of(level, seed=1, size=1e-3):
    return tree_of(seed, None if level == "fp32" else formats.E4M3, size)


def scaling_state(scale):
    return {"fc": {"kernel": {"scale": jnp.full(3, scale), "amax_history": jnp.full((3, 4), scale)}}}


def values(tree):
    return jax.tree.map(value, tree, is_leaf=is_scaled)


class Stepper:
    """A compiled step, and how often it was traced."""

    def __init__(self, tx):
        self.tx, self.traces = tx, 0

        @jax.jit
        def run(params, state, grads):
            self.traces += 1
            updates, state = tx.update(grads, state, params)
            return fp8jax.apply_updates(params, updates), state, updates

        self.run = run

    def along(self, params, grads, steps):
        """Parameters, state and last updates after steps along one gradient."""
        state = self.tx.init(params)
        for _ in range(steps):
            params, state, updates = self.run(params, state, grads)
        return params, state, updates


@functools.cache
def stepper(name, level):
    return Stepper(MAKERS[name](level))


def adam_states(state):
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    return [node for node in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(node)]


def assert_close(got, expected, rtol, atol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), values(got), values(expected))


@pytest.mark.parametrize(
    "name, level",
    [
        ("scale_by_adam", "O2"),
        ("adam", "O1"),
        ("adam", "O2"),
        ("adamw", "fp32"),
        ("adamw", "O1"),
        ("adamw", "O2"),
    ],
)
def test_steps_are_traced_once_and_keep_structure_and_dtypes(name, level):
    compiled, params = stepper(name, level), params_of(level)
    state = compiled.tx.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, jax.eval_shape(compiled.tx.init, params))
    old_params, old_state = params, state
    for seed in (1, 2, 3):
        params, state, updates = compiled.run(params, state, grads_of(level, seed))
        chex.assert_trees_all_equal_shapes_and_dtypes((params, state), (old_params, old_state))
        # A scaled parameter's new codes as integers, with float32 tags; float32 otherwise.
        replaced = {"uint16", "uint32"} if level != "fp32" and name != "scale_by_adam" else set()
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(updates)} == {"float32"} | replaced
        chex.assert_tree_all_finite(values(params))
    assert compiled.traces == 1
    for new, old in zip(jax.tree.leaves(values(params)), jax.tree.leaves(values(old_params)), strict=True):
        assert (new != old).mean() > 0.9
    assert [int(node.count) for node in adam_states(state)] == [3]


@pytest.mark.parametrize("level, bytes_each", [("fp32", 8), ("O1", 8), ("O2", 3)])
def test_the_state_costs_so_many_bytes_a_parameter(level, bytes_each):
    params = params_of(level)
    live = [leaf for tree in moments(adamw(LR, level).init(params)) for leaf in jax.tree.leaves(tree)]
    count = sum(leaf.size for leaf in jax.tree.leaves(values(params)))
    scales = 2 * (1 + 1 + 3) * 4 if level == "O2" else 0
    assert sum(leaf.nbytes for leaf in live) == bytes_each * count + scales
    if level == "O2":
        assert {str(leaf.dtype) for leaf in live} == {"float8_e4m3fn", "float16", "uint32"}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_with_float32_moments_it_is_optaxs_own(name):
    """Both compute in float32, ours with four roundings a step more: sqrt(v) / sqrt(c) for sqrt(v / c)."""
    params = params_of("fp32")
    ours = stepper(name, "fp32")
    theirs = {
        "adam": optax.chain(optax.add_decayed_weights(DECAY), optax.adam(LR, B1, B2, EPS)),
        "adamw": optax.adamw(LR, B1, B2, EPS, weight_decay=DECAY),
    }[name]
    got, state, _ = ours.along(params, grads_of("fp32"), 5)
    expected, optax_state, _ = Stepper(theirs).along(params, grads_of("fp32"), 5)
    assert_close(got, expected, rtol=0, atol=5 * (LR * 8 * 2.0**-24 + 4 * 2.0**-24))
    for a, b in zip(moments(state), moments(optax_state), strict=True):
        # Four roundings a step, of terms up to DECAY times the largest weight.
        assert_close(a, b, rtol=20 * 2.0**-24, atol=20 * 2.0**-24 * 0.4)


def reference(params, grads, steps, decoupled):
    """Adam in float64 along one gradient: weights, first and second moments."""
    w, g = (jax.tree.map(lambda x: np.asarray(x, np.float64), values(tree)) for tree in (params, grads))
    m = v = jax.tree.map(np.zeros_like, w)
    for t in range(1, steps + 1):
        total = g if decoupled else jax.tree.map(lambda g, w: g + DECAY * w, g, w)
        m = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, m, total)
        v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, v, total)

        def new(w, m, v, t=t):
            direction = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
            return w - LR * (direction + (DECAY * w if decoupled else 0))

        w = jax.tree.map(new, w, m, v)
    return w, m, v


@pytest.mark.parametrize("name, decoupled", [("adam", False), ("adamw", True)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_adam_decays_in_the_gradient_and_adamw_apart_from_it(name, decoupled, level):
    params, grads = params_of(level), grads_of(level)
    got, state, _ = stepper(name, level).along(params, grads, 4)
    w, m, v = reference(params, grads, 4, decoupled)
    # Each step rounds the weight to FP16, and in O2 the first moment to E4M3, by 1/16 of it: what is rounded
    # moves later steps, of size LR, by as much. The weight was larger by such steps; its decay is twice that.
    rounding = 2.0**-4 if level == "O2" else 2.0**-22
    assert_close(got, w, rtol=4 * 2.0**-11, atol=4 * LR * (4 * 2.0**-11 + rounding))
    # Adam's gradient has DECAY * w in it, and so the weights' drift; no weight is larger than 4.
    through_decay = 0 if decoupled else DECAY * (4 * 2.0**-11 * 4 + 4 * LR * rounding)
    mu, nu = moments(state)
    assert_close(mu, m, rtol=4 * rounding, atol=through_decay + 1e-5 * rounding)
    assert_close(nu, v, rtol=4 * 2.0**-11 if level == "O2" else 2.0**-20, atol=2 * 0.4 * through_decay + 1e-9)


def test_the_step_uses_moments_that_are_not_yet_rounded():
    """The first direction is g / (|g| + eps), whatever the formats; from rounded moments it is 1/16 off."""
    params, grads = params_of("O2"), grads_of("O2")
    _, state, directions = stepper("scale_by_adam", "O2").along(params, grads, 1)
    for got, g in zip(jax.tree.leaves(directions), jax.tree.leaves(values(grads)), strict=True):
        np.testing.assert_allclose(got, g / (np.abs(g) + EPS), rtol=1e-5)
    mu, _ = moments(state)
    for leaf, g in zip(jax.tree.leaves(mu, is_leaf=is_scaled), jax.tree.leaves(values(grads)), strict=True):
        # Within half a code, and not exactly: the moment that is kept is rounded.
        exact = (1 - B1) * np.asarray(g)
        assert 0 < np.abs(leaf.dequantize() - exact).max() <= 16.001 * np.asarray(leaf.scale).max()
        assert leaf.data.dtype == jnp.float8_e4m3fn and (np.frexp(leaf.scale)[0] == 0.5).all()


def test_a_moment_has_as_many_scales_as_its_parameter():
    mu, nu = moments(scale_by_adam("O2").init(params_of("O2")))
    for tree, dtype in ((mu, jnp.float8_e4m3fn), (nu, jnp.float16)):
        assert tree["blocks"]["kernel"].scale.shape == (3, 1, 1)
        assert tree["fc"]["kernel"].scale.shape == tree["fc"]["bias"].scale.shape == ()
        assert {leaf.data.dtype for leaf in jax.tree.leaves(tree, is_leaf=is_scaled)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("level, dtype", [("fp32", jnp.bfloat16), ("O2", jnp.bfloat16), ("O2", jnp.float16)])
def test_plain_narrow_parameters_are_updated(level, dtype):
    """MS-AMP's fused LBAdamW leaves them as they were."""
    params = {"w": jnp.full((4, 4), 1.0, dtype)}
    got, _, updates = Stepper(adamw(0.1, level)).along(params, {"w": jnp.ones((4, 4), dtype)}, 2)
    assert got["w"].dtype == dtype and updates["w"].dtype == jnp.float32
    np.testing.assert_allclose(got["w"], 0.8, rtol=2 * 2.0**-8)


def test_zero_gradients_leave_moments_zero_and_their_scales_one():
    zeros = grads_of("O2", size=0.0)
    _, state, directions = stepper("scale_by_adam", "O2").along(params_of("O2"), zeros, 2)
    assert not any(leaf.any() for leaf in jax.tree.leaves(directions))
    for leaf in jax.tree.leaves(moments(state), is_leaf=is_scaled):
        assert not leaf.data.astype(jnp.float32).any() and (leaf.scale == 1).all()


# Around it #######################################################################################


def test_whole_variables_and_parameters_alone_give_the_same():
    params, grads = params_of("O2"), grads_of("O2")
    variables = {PARAMS: params, SCALING: scaling_state(1.0), "batch_stats": {"mean": jnp.ones(3)}}
    got, state, updates = Stepper(MAKERS["adamw"]("O2")).along(variables, grads, 2)
    expected, expected_state, expected_updates = stepper("adamw", "O2").along(params, grads, 2)
    chex.assert_trees_all_equal(got, {**variables, PARAMS: expected})
    chex.assert_trees_all_equal(state, expected_state)
    chex.assert_trees_all_equal(updates, expected_updates)


def test_a_schedule_is_asked_for_every_step():
    schedule = lambda count: jnp.float32([0.0, 0.5, 0.25])[count]  # noqa: E731
    params, grads = params_of("fp32"), grads_of("O2")
    compiled, direction = Stepper(adamw(schedule, "O2", B1, B2, EPS, 0.0)), stepper("scale_by_adam", "O2")
    state, direction_state = compiled.tx.init(params), direction.tx.init(params)
    for rate in (0.0, 0.5, 0.25):
        _, state, updates = compiled.run(params, state, grads)
        _, direction_state, directions = direction.run(params, direction_state, grads)
        assert_close(updates, jax.tree.map(lambda x, rate=rate: -rate * x, directions), rtol=1e-6)
    assert compiled.traces == 1


@pytest.mark.filterwarnings("ignore:.* rounds to nearest")
def test_injected_hyperparameters():
    """They can be changed without a new trace."""
    make = optax.inject_hyperparams(adamw, static_args=("recipe", "mask"))
    compiled = Stepper(make(learning_rate=LR, recipe="O2", b1=B1, b2=B2, eps=EPS, weight_decay=DECAY))
    params, grads = params_of("fp32"), grads_of("O2")
    state = compiled.tx.init(params)
    assert set(state.hyperparams) == {"learning_rate", "b1", "b2", "eps", "weight_decay", "seed"}
    _, _, expected = stepper("adamw", "O2").along(params, grads, 1)
    for factor in (1, 3):
        state.hyperparams["learning_rate"] = jnp.float32(factor * LR)
        _, new, got = compiled.run(params, state, grads)
        # 1 - b1 and the like are computed in float32 here, in double precision there.
        assert_close(got, jax.tree.map(lambda x, factor=factor: factor * x, expected), rtol=1e-5, atol=1e-9)
    assert compiled.traces == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


def test_hyperparameters_can_follow_a_schedule():
    schedule = optax.linear_schedule(0.0, 1.0, 2)
    tx = optax.inject_hyperparams(adamw)(schedule, Recipe.O2, B1, B2, EPS, 0.0)
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.float32([1.0, -2.0, 0.5])}
    _, state, updates = Stepper(tx).along(params, grads, 2)
    assert float(state.hyperparams["learning_rate"]) == 0.5
    # The second direction of a constant gradient is its sign, but for the rounding of the first moment.
    np.testing.assert_allclose(updates["w"], [-0.5, 0.5, -0.5], rtol=2.0**-4)


def seen_by_the_mask(params):
    """Matrices decay; a ScaledArray must come as one leaf of its value's shape."""
    assert not any(is_scaled(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_scaled))
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


MASKS = {
    "tree": {"fc": {"kernel": True, "bias": False}, "blocks": {"kernel": True}},
    "prefix": {"fc": {"kernel": True, "bias": False}, "blocks": True},
    "function": seen_by_the_mask,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("make", [adam, adamw])
def test_a_mask_says_what_decays(make, mask):
    variables = {PARAMS: params_of("O1"), SCALING: scaling_state(1.0)}

    def updates(**decay):
        tx = make(LR, "O1", B1, B2, EPS, **decay)
        return tx.update(grads_of("O1"), tx.init(variables), variables)[0]

    got, everywhere, nowhere = (
        updates(weight_decay=DECAY, mask=MASKS[mask]),
        updates(weight_decay=DECAY),
        updates(weight_decay=0.0),
    )
    chex.assert_trees_all_equal(got["fc"]["kernel"], everywhere["fc"]["kernel"])
    chex.assert_trees_all_equal(got["blocks"], everywhere["blocks"])
    chex.assert_trees_all_equal(got["fc"]["bias"], nowhere["fc"]["bias"])
    assert (everywhere["fc"]["bias"] != nowhere["fc"]["bias"]).all()


# The recipe is told once #########################################################################


def kernel(format):
    return {"w": quantize(jnp.ones((4, 4)), format, power_of_two=True), "b": jnp.ones(4)}


@pytest.mark.parametrize("make", [adam, adamw, adamw_8bit])
def test_masters_follow_weight_format(make):
    """FP8 weights need masters, whoever forgot to say so: small steps would be lost in them."""
    states = {format: make(1e-3).init(kernel(format)) for format in (formats.E4M3, formats.FP16)}
    assert states[formats.E4M3].master["w"].data.dtype == jnp.float16
    assert states[formats.E4M3].master["b"] is None and states[formats.FP16].master["w"] is None
    told = {formats.E4M3: "O3", formats.FP16: "O2"}
    for format, state in states.items():
        chex.assert_trees_all_equal(state, make(1e-3, told[format]).init(kernel(format)))


CONTRADICTIONS = [
    *((formats.E4M3, level) for level in ("fp32", "bf16", "te", "O1", "O2")),
    *((formats.FP16, level) for level in ("fp32", "bf16", "te", "O3")),
]


def adafactor(rate, recipe):
    return with_dequantized(optax.adafactor(rate), recipe)


@pytest.mark.parametrize("format, level", CONTRADICTIONS, ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize("make", [adam, adamw, adamw_8bit, adafactor, scale_by_adam])
def test_a_recipe_for_other_weights_than_these_is_refused(make, format, level):
    """`model.init(...)` of a transformed model gives these; the optimizer was told of another model."""
    with pytest.raises(ValueError, match="`(recipe|params)`: ") as error:
        (make(level) if make is scale_by_adam else make(1e-3, level)).init(
            {PARAMS: kernel(format), SCALING: {}}
        )
    assert "\n" not in str(error.value)


def test_moments_are_a_column_of_their_own():
    """What does not depend on the weights: O1's moments for O2's weights, O2's for plain ones."""
    for level, params in (("O1", kernel(formats.FP16)), ("O2", {"w": jnp.ones((4, 4))})):
        mu, _ = moments(adamw(1e-3, level).init(params))
        assert is_scaled(mu["w"]) == (level == "O2")
    both = {"first": kernel(formats.E4M3), "second": kernel(formats.FP16)}  # by a `Rule`
    master = adamw(1e-3, "O3,master_weight=FP32").init(both).master
    assert master["first"]["w"].dtype == jnp.float32 and master["second"]["w"] is None


@pytest.mark.parametrize("make", [adam, adamw, adamw_8bit])
@pytest.mark.parametrize("rate", ["O2", Recipe.O2])
def test_a_recipe_in_the_rates_place_is_refused(make, rate):
    with pytest.raises(TypeError, match="`learning_rate`: expected a number or a schedule; got .*O2"):
        make(rate)


@pytest.mark.parametrize("tx", [adamw(1e-3, "fp8"), adamw_8bit(1e-3)])
def test_strict_dtypes(strict_dtypes, tx):
    """A compiled step promotes no dtype, or JAX raises."""
    params = {"w": quantize(jnp.ones((64, 64)), "FP16", power_of_two=True)}
    jax.jit(tx.update)({"w": jnp.ones((64, 64))}, tx.init(params), params)
