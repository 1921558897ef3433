"""How scales are chosen, against a plain model of the definition; how states that meet are merged."""

import dataclasses
import functools

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen.fp8_ops import fm32
from jax import lax

import fp8jax
from fp8jax import Recipe, backends, formats, quantization, scaling
from fp8jax.backends import xla
from fp8jax.comm import Zero
from fp8jax.dot import dot_general, init_state
from fp8jax.inspect import chart, device
from fp8jax.quantization import MAX_SCALE, MIN_SCALE, TYPICAL, UNSET
from fp8jax.recipe import legal_values
from fp8jax.scaling import tensor
from fp8jax.scaling.base import QuantizedRows, ScaleMethod
from fp8jax.scaling.merge import (
    FP8_GRAD,
    broadcast_under_vmap,
    from_fm32,
    from_fp8_grad,
    marked,
    settled,
    to_fm32,
    to_fp8_grad,
    zero_fp8_grad,
)

LIMITS = np.float32([448, 448, 57344])  # lhs, rhs, grad
OPERANDS = len(LIMITS)
STEPS = 12
TINY = np.finfo(np.float32).tiny

RECIPES = {
    "max": Recipe.te(amax_history_len=3),
    "most recent": Recipe.te(amax_history_len=3, amax_compute_algo="most_recent"),
    "margin": Recipe.te(amax_history_len=2, margin=5),
    "interval": Recipe.te(amax_history_len=4, interval=3),
    "tensor": Recipe.te(amax_history_len=3, first_scale="tensor"),
    "interval, tensor": Recipe.te(amax_history_len=4, interval=3, first_scale="tensor"),
    "interval, one": Recipe.te(amax_history_len=2, interval=2, first_scale="one", margin=1),
    "one": Recipe.te(amax_history_len=4, first_scale="one"),
    "one, most recent": Recipe.te(amax_history_len=1, amax_compute_algo="most_recent", first_scale="one"),
    "current": Recipe.parse("te,scaling=current"),
    "current, margin": Recipe.parse("te,scaling=current,margin=4"),
}


def says_something(amax):
    return TINY <= amax < np.inf


def scale_of(amax, limit, margin):
    """amax / limit * 2**margin as TransformerEngine rounds it: the reciprocal of a rounded factor."""
    with np.errstate(over="ignore"):
        # In float64, whose quotient is not infinite before the margin is in it.
        factor = np.float32(np.float64(limit) / np.float64(amax) * 2.0**-margin)
    return np.float32(1) / np.clip(factor, np.float32(MIN_SCALE), np.float32(MAX_SCALE))


class DelayedModel:
    """One operand under delayed scaling, by the definition."""

    def __init__(self, recipe, limit, typical):
        self.recipe, self.limit = recipe, limit
        self.kept = {"one": np.float32(1), "typical": np.float32(typical), "tensor": None}[recipe.first_scale]
        self.seen = []  # one amax per step, newest last; 0 for one that says nothing

    def casts_with(self, amax):
        """The scale of this step's cast."""
        if self.kept is not None:
            return self.kept
        return scale_of(amax, self.limit, self.recipe.margin) if says_something(amax) else np.float32(1)

    def update(self, amax):
        """Chooses the next step's scale."""
        # An interval is counted from the first step on, but nobody waits for a scale of his own.
        waits = self.recipe.first_scale == "one" or any(self.history)
        is_due = len(self.seen) % self.recipe.interval == 0 or not waits
        self.seen.append(amax if says_something(amax) else np.float32(0))
        window = self.seen[-self.recipe.amax_history_len :]
        chosen = self.seen[-1] if self.recipe.amax_compute_algo == "most_recent" else max(window)
        if is_due and chosen > 0:
            self.kept = scale_of(chosen, self.limit, self.recipe.margin)

    @property
    def history(self):
        """Newest first, 0 where nothing was seen."""
        length = self.recipe.amax_history_len
        return (self.seen[::-1] + [np.float32(0)] * length)[:length]


@functools.cache
def runner(name):
    """Compiled: amaxes (STEPS, OPERANDS) to each step's scales and the state after it."""
    chosen = scaling.of_recipe(RECIPES[name]).method

    def step(state, amaxes):
        scales = [chosen.scale(state, i, amaxes[i], float(LIMITS[i])) for i in range(OPERANDS)]
        state = chosen.update(state, amaxes, jnp.asarray(LIMITS))
        return state, (jnp.stack(scales), state)

    return jax.jit(lambda amaxes: lax.scan(step, chosen.init(OPERANDS), amaxes)[1])


amaxes_of_a_tensor = st.one_of(
    st.floats(float(np.float32(1e-12)), float(np.float32(1e12)), width=32),
    st.floats(0, float(np.float32(2**127)), width=32, exclude_max=True),
    st.sampled_from([0.0, np.nan, np.inf, 1e-45, 1e-40, float(TINY), 448.0, 57344.0, 1.0]),
)
sequences = st.lists(
    st.lists(amaxes_of_a_tensor, min_size=OPERANDS, max_size=OPERANDS), min_size=STEPS, max_size=STEPS
).map(np.float32)


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("current")])
@hypothesis.given(amaxes=sequences)
@hypothesis.settings(max_examples=40)
def test_delayed_scales_and_histories(name, amaxes):
    """They are those of the definition."""
    recipe = RECIPES[name]
    scales, states = jax.tree.map(np.asarray, runner(name)(amaxes))
    models = [DelayedModel(recipe, *of) for of in zip(LIMITS, TYPICAL, strict=True)]
    for t, seen in enumerate(amaxes):
        np.testing.assert_array_equal(scales[t], [m.casts_with(a) for m, a in zip(models, seen, strict=True)])
        for model, amax in zip(models, seen, strict=True):
            model.update(amax)
        kept = [np.float32(UNSET) if m.kept is None else m.kept for m in models]
        np.testing.assert_array_equal(states["scale"][t], kept)
        np.testing.assert_array_equal(states["amax_history"][t], [m.history for m in models])
    assert (np.isfinite(scales) & (scales >= MIN_SCALE) & (scales <= MAX_SCALE)).all()


@pytest.mark.parametrize("name", ["current", "current, margin"])
@hypothesis.given(amaxes=sequences)
@hypothesis.settings(max_examples=40)
def test_current_scales_come_from_the_tensor_itself(name, amaxes):
    scales, states = runner(name)(amaxes)
    expected = [
        [
            scale_of(amax, limit, RECIPES[name].margin) if says_something(amax) else 1
            for amax, limit in zip(row, LIMITS, strict=True)
        ]
        for row in amaxes
    ]
    np.testing.assert_array_equal(scales, np.float32(expected))
    assert states == {}


def test_a_window_of_amaxes_by_hand():
    """The step that sees an amax casts with the scale of before; then it counts for three steps."""
    amaxes = np.float32([[4.48, 448, 57344]] + [[44.8, 1, 1], [0, np.nan, np.inf]] + [[1, 2, 4]] * 9)
    scales, states = runner("max")(amaxes)
    np.testing.assert_array_equal(scales[0], TYPICAL)  # there is none before the first
    np.testing.assert_array_equal(runner("tensor")(amaxes)[0][0], scales[1])  # but its own, if asked for
    np.testing.assert_allclose(scales[1], [4.48 / 448, 1, 1], rtol=2e-7)
    np.testing.assert_allclose(scales[2], [44.8 / 448, 1, 1], rtol=2e-7)
    np.testing.assert_allclose(scales[4], [44.8 / 448, 2 / 448, 4 / 57344], rtol=2e-7)
    np.testing.assert_allclose(scales[5], [1 / 448, 2 / 448, 4 / 57344], rtol=2e-7)
    np.testing.assert_array_equal(
        states["amax_history"][2], np.float32([[0, 44.8, 4.48], [0, 1, 448], [0, 1, 57344]])
    )


@pytest.mark.parametrize(
    "name, first, keys",
    [
        ("max", TYPICAL, {"scale": (3,), "amax_history": (3, 3), "one": (3,)}),
        ("tensor", UNSET, {"scale": (3,), "amax_history": (3, 3), "one": (3,)}),
        ("one", 1, {"scale": (3,), "amax_history": (3, 4), "one": (3,)}),
        ("interval", TYPICAL, {"scale": (3,), "amax_history": (3, 4), "one": (3,), "step": ()}),
        ("current", None, {}),
    ],
)
def test_the_state_before_the_first_step(name, first, keys):
    state = scaling.of_recipe(RECIPES[name]).init()
    assert {key: leaf.shape for key, leaf in state.items()} == keys
    assert all(leaf.dtype == jnp.float32 for leaf in state.values())
    for key, leaf in state.items():
        np.testing.assert_array_equal(leaf, {"scale": first, "one": 1}.get(key, 0))


def test_unset_sentinel():
    """No scale can have the value `UNSET`."""
    assert np.isfinite(np.float32(UNSET)) and UNSET > MAX_SCALE and np.float32(UNSET) == UNSET


# Merging #########################################################################################


@jax.custom_vjp
def use(x, state, seen):
    """A layer: reads its state, and returns `seen` as the new one."""
    return x * 2


use.defvjp(
    lambda x, state, seen: (x * 2, (from_fm32(state), seen)),
    lambda kept, g: (g * 2, to_fm32(kept[0] * 0 + kept[1]), jnp.zeros_like(kept[1])),
)


def new_state(loss, state):
    return from_fm32(jax.jit(jax.grad(loss, allow_int=True))(to_fm32(state)))


STATE = jnp.float32([3.0, 5.0])
SEEN = (jnp.float32([1.0, 40.0]), jnp.float32([7.0, 2.0]))


def test_two_uses_merge_by_max_and_not_with_the_old_value():
    merged = new_state(lambda s: use(use(1.0, s, SEEN[0]), s, SEEN[1]), STATE)
    np.testing.assert_array_equal(merged, [7, 40])
    np.testing.assert_array_equal(new_state(lambda s: use(1.0, s, SEEN[0]), STATE), SEEN[0])


@pytest.mark.parametrize("name", ["one, most recent", "most recent", "max", "tensor", "interval"])
def test_merged_state_of_an_unused_layer(name):
    """Its scale is the old one, or that of a window of the past, and may be larger than that of the other."""
    chosen, limits = scaling.of_recipe(RECIPES[name]).method, jnp.asarray(LIMITS)
    old = {**chosen.init(OPERANDS), "scale": jnp.full(OPERANDS, 2.0**20)}
    amaxes = jnp.float32([[1, 0, 2], [3, np.nan, 0], [np.inf, 0, 5]])
    uses = [marked(chosen.update(old, each, limits)) for each in amaxes]
    unused = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), old)
    met = jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), unused, *uses)
    # The amaxes merged, and a scale derived from them.
    expected = chosen.update(old, jnp.float32([3, 0, 5]), limits)
    jax.tree.map(np.testing.assert_array_equal, settled(met, old), expected)
    assert expected["scale"][1] == 2.0**20
    jax.tree.map(np.testing.assert_array_equal, settled(unused, old), old)


def test_uses_without_an_amax_leave_the_scale_of_the_window():
    chosen, limits = scaling.of_recipe(RECIPES["max"]).method, jnp.asarray(LIMITS)
    state = chosen.init(OPERANDS)
    for amax in (100.0, 10.0, 0.0, 0.0):
        two = [marked(chosen.update(state, jnp.full(OPERANDS, each), limits)) for each in (amax, 0.0)]
        state = settled(jax.tree.map(jnp.maximum, *two), state)
    np.testing.assert_allclose(state["scale"], 10 / LIMITS, rtol=1e-6)  # 100 has left the window of 3


def test_gradient_of_a_state():
    """It is the next state, by JAX's own transformations, too."""
    recipe = RECIPES["one, most recent"]
    state, x, kernel = init_state(recipe), jnp.ones((4, 8)), jnp.ones((8, 4))

    @jax.jit
    @jax.grad
    def next_state(state, factor):
        state = to_fm32(state)
        uses = [
            dot_general(x, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state) for _ in range(2)
        ]
        return factor * jnp.sum(uses[0]) + 0 * jnp.sum(uses[1])

    np.testing.assert_allclose(next_state(state, 2.0)["scale"], [1 / 448, 1 / 448, 2 / 57344], rtol=1e-6)
    np.testing.assert_allclose(next_state(state, 0.0)["scale"], [1 / 448, 1 / 448, 1], rtol=1e-6)


def test_no_use_leaves_minus_infinity():
    np.testing.assert_array_equal(new_state(lambda s: 1.0, STATE), [-np.inf, -np.inf])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_a_state_broadcast_in_a_scan_merges_by_max(wrap):
    seen = jnp.float32([[1, 9], [8, 2], [3, 3]])

    def loss(state):
        return lax.scan(lambda x, seen: (wrap(use)(x, state, seen), None), 1.0, seen)[0]

    np.testing.assert_array_equal(new_state(loss, STATE), [8, 9])


def test_a_state_shared_by_the_examples_of_a_vmap_merges_by_max():
    seen = jnp.float32([[1, 9], [8, 2], [3, 3]])

    def loss(state):
        return jnp.sum(
            jax.vmap(lambda x, seen: use(x, broadcast_under_vmap(state, x), seen))(jnp.ones(3), seen)
        )

    np.testing.assert_array_equal(new_state(loss, STATE), [8, 9])


def test_a_state_shared_under_two_vmaps_merges_by_max():
    seen = jnp.float32([[[1, 9], [8, 2]], [[3, 3], [4, 4]]])

    def loss(state):
        of_one = lambda seen: use(1.0 + 0 * seen[0], broadcast_under_vmap(state, seen), seen)  # noqa: E731
        return jnp.sum(jax.vmap(jax.vmap(of_one))(seen))

    np.testing.assert_array_equal(new_state(loss, STATE), [8, 9])


def test_state_of_scanned_layers_under_checkpoint():
    """There is a state for each layer."""
    states, seen = jnp.float32([[1, 2], [3, 4]]), jnp.float32([[10, 20], [30, 40]])

    def loss(states):
        return lax.scan(lambda x, layer: (jax.checkpoint(use)(x, *layer), None), 1.0, (states, seen))[0]

    np.testing.assert_array_equal(new_state(loss, states), seen)


def test_fm32_round_trip():
    """Scales as fm32 and back; other leaves stay as they are."""
    tree = {"a": STATE, "b": to_fm32(STATE)}
    wide = to_fm32(tree)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {fm32}
    for leaf in jax.tree.leaves(from_fm32(wide)):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, STATE)
    np.testing.assert_array_equal(from_fm32({"a": STATE})["a"], STATE)


DATA = jnp.arange(-8.0, 8.0).reshape(4, 4)


@jax.custom_vjp
def once(x, slot):
    """A layer whose weight gradient is DATA times its output's gradient; it never reads its slot."""
    return x


once.defvjp(lambda x, slot: (x, None), lambda kept, g: (g, to_fp8_grad((DATA * g).astype(jnp.float8_e4m3fn))))


def scanned_over(slots):
    return lax.scan(lambda x, slot: (once(x, slot), None), 1.0, slots)[0]


@pytest.mark.parametrize(
    "loss, shape",
    [
        (lambda slot: once(1.0, slot), (4, 4)),
        (lambda slot: jax.checkpoint(once)(1.0, slot), (4, 4)),
        (scanned_over, (3, 4, 4)),
    ],
    ids=["once", "checkpoint", "scanned over"],
)
def test_codes_are_cotangents(loss, shape):
    grad = jax.grad(loss, allow_int=True)
    codes = jax.jit(lambda: from_fp8_grad(grad(zero_fp8_grad(jnp.zeros(shape)))))()
    assert codes.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(codes.astype(jnp.float32), jnp.broadcast_to(DATA, shape))


def test_broadcast_under_vmap():
    """It does nothing outside of `vmap`, and where the state is mapped, too."""
    np.testing.assert_array_equal(broadcast_under_vmap(STATE, 1.0), STATE)
    states, seen = jnp.stack(SEEN), jnp.stack(SEEN[::-1])

    def loss(states):
        return jnp.sum(
            jax.vmap(lambda x, s, seen: use(x, broadcast_under_vmap(s, x), seen))(jnp.ones(2), states, seen)
        )

    np.testing.assert_array_equal(new_state(loss, states), seen)


def test_codes_are_of_their_own_dtype_and_start_at_zero():
    start = jax.eval_shape(lambda: zero_fp8_grad(jnp.zeros((2, 3))))
    assert start.dtype == FP8_GRAD and start.shape == (2, 3)
    np.testing.assert_array_equal(from_fp8_grad(zero_fp8_grad(jnp.zeros((2, 3)))), np.zeros((2, 3)))


# A new scaling ####################################################################################


@pytest.fixture
def fixed(monkeypatch):
    """A scaling named "fixed", added as CONTRIBUTING.md says: every scale is 2."""

    def build(recipe):
        return ScaleMethod(
            init=lambda operands: {},
            scale=lambda state, operand, amax, limit: jnp.float32(2),
            update=lambda state, amaxes, limits: state,
        )

    monkeypatch.setitem(legal_values.FIELDS_OF_SCALING, "fixed", legal_values.FIELDS_OF_SCALING["current"])
    monkeypatch.setitem(scaling.SCALINGS, "fixed", functools.partial(tensor.TensorScaling, build))
    return "te,scaling=fixed"


def test_a_new_scaling_is_used(fixed):
    """And not that of blocks: 1000 / 2 is above E4M3's max and saturates."""
    x, kernel = jnp.full((4, 256), 1000.0), jnp.eye(256)
    numbers = (((1,), (0,)), ((), ()))
    out, pullback = jax.vjp(lambda x: dot_general(x, kernel, numbers, recipe=fixed, state={}), x)
    np.testing.assert_array_equal(out, np.full((4, 256), 896.0))
    np.testing.assert_array_equal(*pullback(jnp.full((4, 256), 3.0)), np.full((4, 256), 3.0))
    assert str(Recipe.parse(fixed)) == fixed


def test_a_new_scaling_with_options_of_its_own_has_a_text(fixed, monkeypatch):
    monkeypatch.setitem(legal_values.FIELDS_OF_SCALING, "fixed", {"margin": (3, "it has no other")})
    assert str(Recipe.parse(f"{fixed},margin=3")) == f"{fixed},margin=3"
    with pytest.raises(ValueError, match="scaling=fixed needs margin=3: it has no other; got margin=0"):
        Recipe.parse(fixed)


def test_a_new_scaling_is_used_in_a_model(fixed):
    x = jnp.full((4, 256), 1000.0)
    model = fp8jax.transform(nn.Dense(256, kernel_init=nn.initializers.ones, use_bias=False), fixed)
    variables = model.init(jax.random.key(0), x)
    assert "backend: xla" in str(model.report(x)).splitlines()[-1]
    np.testing.assert_allclose(model.apply(variables, x), 896.0 * 256)


def test_the_tables_of_scalings_have_the_same_names():
    """One that is missing in a table is refused when it is used; here it is seen before that."""
    names = list(legal_values.FIELDS_OF_SCALING)
    assert list(scaling.SCALINGS) == names
    for name, fields in legal_values.FIELDS_OF_SCALING.items():
        legal = {field: value for field, (value, _) in fields.items()}
        assert scaling.of_recipe(dataclasses.replace(Recipe.te(), scaling=name, **legal)).granularity
    pytest.importorskip("torch")
    import fp8jax_torch.scaling

    assert list(fp8jax_torch.scaling.SCALINGS) == names


def test_a_half_added_scaling_is_refused(fixed, monkeypatch):
    monkeypatch.delitem(scaling.SCALINGS, "fixed")
    with pytest.raises(NotImplementedError, match="scaling=fixed: expected an entry in .*SCALINGS"):
        fp8jax.transform(nn.Dense(32), fixed).init(jax.random.key(0), jnp.ones((16, 32)))


@pytest.fixture
def averaged(monkeypatch):
    """A scaling named "averaged" with a state of its own: a running mean of amaxes, and a count."""

    def build(recipe):
        return ScaleMethod(
            init=lambda n: {"mean": jnp.ones(n), "count": jnp.zeros(())},
            scale=lambda state, i, amax, limit: quantization.scale_of(2 * state["mean"][i], limit),
            update=lambda state, amaxes, limits: {
                "mean": (state["mean"] + amaxes) / 2,
                "count": state["count"] + 1,
            },
        )

    row = legal_values.FIELDS_OF_SCALING["current"]
    monkeypatch.setitem(legal_values.FIELDS_OF_SCALING, "averaged", row)
    monkeypatch.setitem(scaling.SCALINGS, "averaged", functools.partial(tensor.TensorScaling, build))
    return "te,scaling=averaged"


def test_a_new_scaling_with_a_state(averaged):
    """Layers in a scan have the states of the same layers one after the other; and the chart reads it."""
    kernels = 0.1 * jax.random.normal(jax.random.key(0), (3, 64, 64))
    x = jax.random.normal(jax.random.key(1), (32, 64))
    layer = lambda x, kernel: (x + x @ kernel, None)  # noqa: E731
    scanned = lambda params, x: lax.scan(layer, x, params["w"])[0]  # noqa: E731

    def unrolled(params, x):
        for name in "abc":
            x, _ = layer(x, params[name])
        return x

    results = []
    for function, params in ((scanned, {"w": kernels}), (unrolled, dict(zip("abc", kernels, strict=True)))):
        model = fp8jax.transform(function, averaged)
        variables = model.init(params, x)
        loss_fn = lambda variables, x: jnp.mean(model(variables, x) ** 2)  # noqa: B023, E731
        for _ in range(2):
            loss, _, variables = jax.jit(fp8jax.value_and_grad(loss_fn))(variables, x)
        results.append((loss, variables["_overwrite_with_gradient"]))
    (loss, stacked), (other, states) = results
    np.testing.assert_allclose(loss, other, rtol=1e-6)
    for name in ("mean", "count"):
        np.testing.assert_allclose(stacked["w"][name], [states[key][name] for key in "abc"], rtol=1e-5)
    np.testing.assert_array_equal(stacked["w"]["count"], [2, 2, 2])
    assert chart.measure(averaged, devices=2).differences == []


@pytest.mark.parametrize("fields", [{}, {"fp8_format": ("E4M3", "it has no other")}])
def test_statistics_of_a_new_scaling_with_a_state(averaged, monkeypatch, fields):
    """A plain model has no state for it, so its scales are the tensor's own, as those of delayed scaling."""
    row = legal_values.FIELDS_OF_SCALING["averaged"] | fields
    monkeypatch.setitem(legal_values.FIELDS_OF_SCALING, "averaged", row)
    w, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(64, 64), (32, 64)]))
    recipes = [Recipe.parse(f"{name},fp8_format=E4M3") for name in (averaged, "current")]
    rows = fp8jax.statistics(lambda w, x: jnp.mean((x @ w) ** 2), recipes)(w, x).rows
    of_averaged, of_current = (
        [row._replace(recipe="") for row in rows if row.recipe == str(recipe)] for recipe in recipes
    )
    assert of_averaged == of_current and len(of_current) == 4


def test_only_a_seed_has_the_name_of_a_seed(averaged, monkeypatch):
    build = lambda recipe: ScaleMethod(  # noqa: E731
        init=lambda n: {"key": jnp.ones(n)},
        scale=lambda state, i, amax, limit: quantization.scale_of(state["key"][i], limit),
        update=lambda state, amaxes, limits: {"key": amaxes},
    )
    monkeypatch.setitem(scaling.SCALINGS, "averaged", functools.partial(tensor.TensorScaling, build))
    with pytest.raises(ValueError, match="expected a seed .*'key'; got 3 numbers"):
        fp8jax.transform(nn.Dense(32), averaged).init(jax.random.key(0), jnp.ones((32, 32)))


# A new scaling with its own operands, and the backend that multiplies them ########################


@dataclasses.dataclass(frozen=True)
class RowScaling(scaling.Scaling):
    """A scale for each row of lhs and each column of rhs of every GEMM: torchao's "rowwise"."""

    recipe: Recipe
    axes = (("mk", "km"), ("nk", "kn"), ("mn", "nm"))  # copies, each with its contracted axis last
    is_residual_quantized = False
    granularity = "row"
    scales = "row FP32"
    rows_multiple = None  # the GEMMs of groups quantize their rows

    def init(self):
        return {}

    def format(self, operand):
        return formats.E4M3

    def _copy(self, x, is_transposed):
        x = jnp.swapaxes(x, -1, -2) if is_transposed else x
        q = quantization.quantize(x, formats.E4M3, blocks=(*x.shape[:-1], 1))
        return quantization.as_bytes(q)

    def quantize(self, state, operand, x, uses):
        return tuple(self._copy(x, i == 1) if uses[i] else None for i in range(2)), jnp.zeros(())

    def quantize_rows(self, state, operand, x, sizes, uses):
        return QuantizedRows(None, None, jnp.zeros(sizes.shape), sizes)

    def prepare(self, state, rhs, kernel, groups):
        return rhs, jnp.zeros((groups,) if groups else ())

    def kernel(self, state, residual, kernel, use):
        return self._copy(kernel.to_matrix(quantization.value(kernel.gathered(residual))), use == 0)

    def update(self, state, seen):
        return {}


def rowwise_dot(lhs, rhs, dimension_numbers, *, out_dtype, precise):
    """The GEMM of codes, which XLA computes in FP8 on a GPU; the scales are applied to its output."""
    ones = [jnp.ones((), jnp.float32)] * 2
    codes = [quantization.ScaledArray(x.data, one) for x, one in zip((lhs, rhs), ones, strict=True)]
    out = xla.dot(*codes, dimension_numbers, out_dtype=jnp.float32, precise=precise)
    return (out * lhs.scale * jnp.swapaxes(rhs.scale, -1, -2)).astype(out_dtype)


@pytest.fixture
def rowwise(monkeypatch):
    """Rowwise scaling, added as CONTRIBUTING.md says: an entry in each of three tables."""
    backend = backends.Backend("cuBLASLt", "norms are stored", ("row",), rowwise_dot, xla.BACKEND.calls)
    monkeypatch.setitem(legal_values.FIELDS_OF_SCALING, "rowwise", legal_values.FIELDS_OF_SCALING["current"])
    monkeypatch.setitem(scaling.SCALINGS, "rowwise", RowScaling)
    monkeypatch.setitem(backends.BACKENDS, "rowwise", backend)
    return "te,scaling=rowwise,fp8_format=E4M3"


def fake_rowwise(x, axis):
    amax = np.abs(x).max(axis, keepdims=True)
    scale = np.where(amax > 0, amax / np.float32(448), 1).astype(np.float32)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def test_a_backend_that_names_no_calls_is_refused():
    """Its GEMMs would be in no count."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'calls'"):
        backends.Backend("cuBLASLt", "norms are stored", ("row",), rowwise_dot)


def test_rowwise_in_the_table_of_devices(rowwise, monkeypatch):
    """`fp8jax doctor` names the backend of a new scaling, and a reason where its GEMMs are not in FP8."""
    on_gpu, on_cpu = device.gemms_of("gpu", (9, 0))[-1], device.gemms_of("cpu", None)[-1]
    assert on_gpu["scaling"] == "rowwise" and on_gpu["operands"] == "FP8, a scale per row"
    assert (on_gpu["how"], on_gpu["reason"]) == (device.NATIVE, "rowwise: cuBLASLt")
    assert on_cpu["how"] == device.EMULATED
    slow = backends.BACKENDS["rowwise"]._replace(why_not_fp8=lambda device: f"slow on {device.name}")
    monkeypatch.setitem(backends.BACKENDS, "rowwise", slow)
    assert "slow on cpu" in device.examine()["troubles"]
    assert "slow on cpu" in backends.notes([backends.ChosenBackend("rowwise", "")])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rowwise_gemms(rowwise, backend):
    """All three GEMMs are fake quantization along their contracted axes."""
    random = np.random.default_rng(0)
    x, grad = (random.normal(size=shape).astype(np.float32) for shape in ((32, 64), (32, 48)))
    kernel = (random.normal(size=(64, 48)) * 10.0 ** random.uniform(-3, 3, 48)).astype(np.float32)
    options = {"recipe": rowwise, "state": {}, "backend": backend}
    dot = lambda x, kernel: dot_general(x, kernel, (((1,), (0,)), ((), ())), **options)  # noqa: E731
    out, pullback = jax.vjp(dot, x, kernel)
    dx, dkernel = pullback(grad)
    wanted = fake_rowwise(x, 1) @ fake_rowwise(kernel, 0)
    np.testing.assert_allclose(out, wanted, rtol=2e-2, atol=1e-3 * np.abs(wanted).max(0).min())
    want_x = fake_rowwise(grad, 1) @ fake_rowwise(kernel, 1).T
    want_kernel = fake_rowwise(x, 0).T @ fake_rowwise(grad, 0)
    for got, want in ((dx, want_x), (dkernel, want_kernel)):
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("weights", ["", ",weight=FP16,weight_grad=E4M3"])
def test_rowwise_in_a_model(rowwise, weights):
    """It trains, and reaches the report, the chart, ZeRO and experts."""
    recipe, x = rowwise + weights, jnp.tile(jnp.linspace(-1, 1, 256), (32, 1))
    model = fp8jax.transform(nn.Dense(256), recipe)
    variables = model.init(jax.random.key(0), x)
    assert "backend: rowwise (" in str(model.report(x))
    row = chart.measure(recipe, devices=2)
    assert row.cells["scaling"].declared == "row FP32" and row.cells["needs"].formats == (
        "value_and_grad" if weights else "nothing"
    )
    assert row.cells["gemm"].formats == "FP8" and row.differences == ["scaling"]  # it reads blocks only
    loss_fn = lambda variables, x: jnp.mean((model.apply(variables, x) - x) ** 2)  # noqa: E731
    alone = jax.jit(fp8jax.value_and_grad(loss_fn))(variables, x)
    zero = Zero(jax.make_mesh((2,), ("data",)), recipe, stage=3)
    loss, grads, _ = jax.jit(fp8jax.value_and_grad(loss_fn, zero=zero))(zero.place(variables), x)
    np.testing.assert_allclose(loss, alone[0], rtol=1e-5)
    a, b = (quantization.value(g["params"] if "params" in g else g)["kernel"] for g in (grads, alone[1]))
    a, b = map(quantization.value, (a, b))
    assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)


@pytest.mark.parametrize(
    "owner, table, says",
    [
        (backends, "BACKENDS", "no backend multiplies operands with a scale per row"),
        (scaling, "SCALINGS", "scaling=rowwise: expected an entry in .*scaling.SCALINGS"),
        (legal_values, "FIELDS_OF_SCALING", "`scaling` is one of: delayed .*; got 'rowwise'"),
    ],
)
def test_half_of_rowwise_is_refused(rowwise, monkeypatch, owner, table, says):
    monkeypatch.delitem(getattr(owner, table), "rowwise")
    with pytest.raises((ValueError, NotImplementedError), match=says):
        fp8jax.transform(nn.Dense(32), rowwise).init(jax.random.key(0), jnp.ones((32, 32)))


@pytest.mark.parametrize("name", sorted(scaling.Scaling.__abstractmethods__))
def test_a_scaling_without_a_method_is_refused(rowwise, monkeypatch, name):
    partial = type("Partial", (scaling.Scaling,), {k: v for k, v in vars(RowScaling).items() if k != name})
    monkeypatch.setitem(scaling.SCALINGS, "rowwise", partial)
    with pytest.raises(TypeError, match=f"Partial .*{name}"):
        fp8jax.transform(nn.Dense(32), rowwise)


@pytest.mark.parametrize("name", ["axes", "is_residual_quantized"])
def test_a_scaling_without_an_attribute_is_refused(name):
    with pytest.raises(TypeError, match=f"Partial: expected the attribute `{name}`"):
        type("Partial", (scaling.Scaling,), {k: v for k, v in vars(RowScaling).items() if k != name})


def test_rowwise_with_lora(rowwise):
    """The frozen kernels are stored in the recipe's format, as RowScaling has none of its own."""
    x = jnp.tile(jnp.linspace(-1, 1, 32), (32, 1))
    model = fp8jax.transform(nn.Dense(32), rowwise, lora=fp8jax.LoRA(2))
    variables = model.init(jax.random.key(0), x)
    assert jnp.isfinite(model.apply(variables, x)).all()


def test_a_new_scaling_without_its_twin_on_torch_is_refused(fixed):
    pytest.importorskip("torch")
    import fp8jax_torch

    with pytest.raises(ValueError, match="scaling=fixed"):
        fp8jax_torch.transform(fp8jax_torch.extra.torch.nn.Linear(16, 16), fixed)


def test_variables_of_numpy_arrays():
    """As a checkpoint may restore them; the seeds of NVFP4 are changed where they are."""
    model = fp8jax.transform(lambda params, x: x @ params["w"], "nvfp4")
    x = jnp.ones((32, 32))
    variables = model.init({"w": jnp.ones((32, 32))}, x)
    run = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2))
    for got, want in zip(
        *(jax.tree.leaves(run(v)) for v in (jax.device_get(variables), variables)), strict=True
    ):
        np.testing.assert_array_equal(got, want)
