"""Stochastic rounding, remainders, and the optimizer's `rounding` column."""

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import Recipe, formats
from fp8jax.comm import Zero
from fp8jax.quantization import cast, cast_stochastically, is_scaled, remainder_of, value
from fp8jax.quantization.rounding import leaf_seeds, random_bits

FORMATS = [formats.E4M3, formats.E5M2, formats.FP16]


def numbers(format):
    """All codes, midpoints, their neighbours, and numbers of all sizes."""
    bits = np.arange(2**format.bits).astype(f"uint{format.bits}")
    codes = bits.view(format.dtype).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    random = np.random.default_rng(0)
    sizes = random.uniform(-1, 1, 20000) * 2.0 ** random.integers(-30, 16, 20000)
    around = [np.nextafter(middles, np.float32(end)) for end in (-1e9, 1e9)]
    found = np.concatenate([codes, middles, *around, sizes, [0.0, -0.0]]).astype(np.float32)
    # XLA takes subnormal numbers of float32 for 0.
    return found[(found == 0) | (abs(found) >= np.finfo(np.float32).tiny)]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_remainder(format):
    x = numbers(format)
    x = x[abs(x) <= format.max]
    rest = np.asarray(jax.jit(remainder_of, static_argnums=1)(x, format), np.float64)
    codes = x.astype(format.dtype).astype(np.float64)
    np.testing.assert_array_equal(codes + rest, x)
    steps = np.maximum(2.0 ** (np.frexp(x)[1] - 1 - format.mantissa_bits), format.smallest_subnormal)
    assert (abs(rest) <= steps / 2).all() and abs(rest).max() > 0


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_stochastic_neighbours(format):
    """All-zero bits round towards zero and all-one bits away from it; a number of the format stays."""
    x = numbers(format)
    x = x[abs(x) <= format.max]
    down, up = (
        np.asarray(cast_stochastically(x, format, jnp.full(x.shape, bits, jnp.uint32)), np.float64)
        for bits in (0, 2**32 - 1)
    )
    codes = x.astype(format.dtype).astype(np.float32)
    is_code = codes == x
    assert (down[is_code] == x[is_code]).all() and (up[is_code] == x[is_code]).all()
    assert (abs(down) <= abs(x)).all() and (abs(up) >= abs(down)).all() and (abs(up) <= format.max).all()
    # The nearest code is one of both.
    assert ((codes == down) | (codes == up)).all()
    # Far from a code, the other neighbour is away from zero.
    middles = np.isin(x, x[~is_code]) & (abs(x) > format.smallest_subnormal / 2)
    assert (abs(up)[middles] > abs(down)[middles]).mean() > 0.9


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_stochastic_mean(format):
    """The mean of 2**16 roundings is the number, within 6 standard errors."""
    least = format.smallest_subnormal
    x = np.float32([0.3 * least, 2.7 * least, 1.01, -1.01, 0.3333, 0.999 * format.max])
    tiled = np.tile(x, (2**16, 1))
    bits = jax.random.bits(jax.random.key(0), tiled.shape, jnp.uint32)
    rounded = np.asarray(cast_stochastically(tiled, format, bits), np.float64)
    error = rounded.std(0) / 2**8
    assert (error > 0).all()
    np.testing.assert_array_less(abs(rounded.mean(0) - x), 6 * error)


def test_stochastic_edges():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30], jnp.float32)
    for format in FORMATS:
        out = np.asarray(cast_stochastically(x, format, jnp.full(4, 7, jnp.uint32)), np.float32)
        np.testing.assert_array_equal(out, [np.nan, format.max, -format.max, format.max])


def test_random_bits_are_uniform_and_independent():
    seeds = leaf_seeds(jnp.array([0, 1], jnp.uint32), jnp.int32(3), 4)
    bits = np.stack([np.asarray(random_bits(seed, (256, 256))) for seed in seeds]).reshape(4, -1)
    assert len(set(np.asarray(seeds).tolist())) == 4
    flags = (bits[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    # Means of 2**16 flags: 6 standard errors.
    assert abs(flags.mean(1) - 0.5).max() < 6 * 0.5 / 2**8
    fractions = bits / 2**32
    neighbours = [np.corrcoef(fractions[i, 1:], fractions[i, :-1])[0, 1] for i in range(4)]
    assert abs(np.array([*neighbours, np.corrcoef(fractions)[0, 1]])).max() < 6 / 2**8


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_random_bits_of_shards(axis):
    seed = leaf_seeds(jnp.array([0, 1], jnp.uint32), jnp.int32(0), 1)[0]
    whole = np.asarray(random_bits(seed, (4, 8, 12)))
    shape = [4, 8, 12]
    shape[axis] //= 4
    parts = [random_bits(seed, tuple(shape), (axis, jnp.int32(i), 4)) for i in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts, axis), whole)


# The optimizer ###################################################################################


def params_of(recipe, shape=(16, 64)):
    random = np.random.default_rng(0)
    weight = fp8jax.quantize(
        jnp.asarray(random.normal(0, 0.02, shape), jnp.float32), recipe.weight, power_of_two=True
    )
    return {"w": weight, "b": jnp.zeros(shape[1])}


def grads_of(step, shape=(16, 64)):
    random = np.random.default_rng(step + 1)
    return {"w": jnp.asarray(random.normal(size=shape), jnp.float32), "b": jnp.ones(shape[1])}


def trained(recipe, steps=5, zero=None, rate=1e-3, **options):
    recipe = Recipe.parse(recipe)
    tx = fp8jax.optim.adamw(rate, recipe, zero=zero, **options)
    params = params_of(recipe)
    if zero is not None:
        params = zero.place(params)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return fp8jax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, grads_of(number))
    return params, state


def leaves_of(tree):
    return [np.asarray(x).view(f"uint{8 * x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def test_preset_takes_seven_bytes():
    """6 bytes of state for a weight, and an FP8 gradient."""
    params, state = trained("fp8", steps=1)
    kept = [
        params["w"].data,
        *(jax.tree.leaves(tree["w"])[0] for tree in state.adam[1:]),
        state.remainder["w"],
    ]
    assert [x.dtype.itemsize for x in kept] == [2, 1, 2, 1]
    assert Recipe.FP8.weight_grad == "E4M3"
    assert state.key.shape == (2,) and state.remainder["b"] is None


def test_levels_have_no_key_and_no_remainder():
    for recipe in ("O1", "O2"):
        _, state = trained(recipe, steps=1)
        assert state.key is None and jax.tree.leaves(state.remainder) == []


@pytest.mark.parametrize(
    "recipe", ["fp8", "O3,rounding=stochastic+kahan+root", "O2,rounding=stochastic+stochastic+value"]
)
def test_seeds_repeat_and_differ(recipe):
    first, again, other = (leaves_of(trained(recipe, seed=seed)) for seed in (1, 1, 2))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert any((x != y).any() for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_same_bits_on_any_devices(stage):
    """ZeRO's shards and XLA's partitions round as one device does."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    alone = trained("fp8")
    sharded = trained("fp8", zero=Zero(mesh, "fp8", stage=stage))
    for one, many in zip(leaves_of(alone), leaves_of(sharded), strict=True):
        np.testing.assert_array_equal(one, many)


def test_same_bits_where_xla_partitions():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    recipe, tx = Recipe.FP8, fp8jax.optim.adamw(1e-3, "fp8")
    params = params_of(recipe)

    def placed(tree):
        def put(x):
            spec = P(None, "model") if x.shape == (16, 64) else P()
            return jax.device_put(x, NamedSharding(mesh, spec))

        return jax.tree.map(put, tree)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return fp8jax.apply_updates(params, updates), state

    alone = step(params, tx.init(params), grads_of(0))
    parts = step(placed(params), placed(tx.init(params)), placed(grads_of(0)))
    for one, many in zip(leaves_of(alone), leaves_of(parts), strict=True):
        np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize(
    "recipe, bound", [("fp8", 0.05), ("O2,rounding=nearest+stochastic+value", 0.3), ("O2", None)]
)
def test_small_steps(recipe, bound):
    """Weights of 0.02 follow 200 steps of 1e-6 in one direction; those of O2 stand still."""
    recipe = Recipe.parse(recipe)
    tx = fp8jax.optim.adam(1e-6, recipe)
    weight = fp8jax.quantize(jnp.full((64, 64), 0.02), recipe.weight, power_of_two=True)
    state = tx.init(weight)

    @jax.jit
    def step(weight, state):
        updates, state = tx.update(jnp.ones((64, 64)), state, weight)
        return fp8jax.apply_updates(weight, updates), state

    start = value(weight)
    for _ in range(200):
        weight, state = step(weight, state)
    moved = float((value(weight) - start).mean())
    assert moved == 0 if bound is None else abs(moved / -2e-4 - 1) < bound


def test_second_moment_as_root():
    """`moments` gives its value; a gradient of 1e-6 beside one of 1 keeps its second moment."""
    tx = fp8jax.optim.scale_by_adam("fp8,weight=FP32,weight_grad=FP32,rounding=stochastic+nearest+root")
    grads = jnp.array([1.0, 1e-6])
    _, state = tx.update(grads, tx.init(grads))
    _, nu = fp8jax.optim.moments(state)
    assert not is_scaled(nu) and nu.root.data.dtype == jnp.float16
    np.testing.assert_allclose(jnp.asarray(nu), 1e-3 * grads**2, rtol=2e-2)
    assert nu.shape == (2,)


def test_skipped_step_keeps_everything():
    params, state = trained("fp8", steps=2)
    tx = fp8jax.optim.adamw(1e-3, "fp8")
    bad = {**grads_of(9), "b": jnp.full(64, jnp.inf)}
    updates, after = tx.update(bad, state, params)
    assert int(after.skipped) == 1
    for old, new in zip(
        leaves_of((params, state.adam, state.remainder, state.key)),
        leaves_of((fp8jax.apply_updates(params, updates), after.adam, after.remainder, after.key)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_6"])
@pytest.mark.parametrize("rule, has_remainder", [("gemm=BF16", False), ("te", False), ("O2", True)])
def test_rules_keep_the_models_rounding(recipe, rule, has_remainder):
    layers = nn.Sequential([nn.Dense(64), nn.Dense(64)])
    model = fp8jax.transform(layers, recipe, rules=[fp8jax.Rule("layers_0", rule)])
    variables = model.init(jax.random.key(0), jnp.ones((32, 64)))
    state = fp8jax.optim.adamw(1e-3, recipe).init(variables)
    assert (state.remainder["layers_0"]["kernel"] is not None) == has_remainder


def test_a_rule_cannot_change_the_rounding():
    rules = [fp8jax.Rule("*", "rounding=nearest+nearest+root")]
    with pytest.raises(ValueError, match="rounding is a column of the whole model"):
        fp8jax.transform(nn.Dense(64), "fp8", rules=rules).init(jax.random.key(0), jnp.ones((32, 64)))


# What rounding to nearest loses ###################################################################


INJECTED = optax.inject_hyperparams(
    fp8jax.optim.adamw, static_args=("recipe", "mask"), hyperparam_dtype=jnp.float32
)


def warnings_of(recipe, rate=1e-3, b1=0.9, b2=0.999, optimizer=fp8jax.optim.adamw):
    """The texts of the warnings of `init`, called twice."""
    params = params_of(Recipe.parse(recipe or "O2"), (64, 64))
    tx = optimizer(rate, recipe, b1, b2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        tx.init(params)
        jax.eval_shape(tx.init, params)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    "recipe, options, says",
    [
        ("O2", {}, None),
        ("O2", {"b2": 0.95}, "with b1=0.9 and b2=0.95, E4M3 first moments do not decay to zero"),
        ("O3", {"b1": 0.95}, "O3 rounds to nearest: with b1=0.95 and b2=0.999, E4M3 first moments"),
        (None, {"b2": 0.95}, "recipe=None rounds to nearest: with b1=0.9 and b2=0.95"),
        ("O2,rounding=stochastic+nearest+value", {"b2": 0.95}, None),
        ("O1", {"b1": 0.95, "b2": 0.95}, None),
        ("O2", {"b1": 0.5, "b2": 0.5}, None),
        ("O1", {"rate": 1e-6}, "learning_rate=1e-06 is below the last bit (0.0001) of FP16 weights of 0.1"),
        ("O2", {"rate": 1e-6}, "so most steps change nothing. Take the recipe fp8, or another `rounding`"),
        ("O3", {"rate": 1e-6}, "is below the last bit"),
        ("O3,master_weight=FP32", {"rate": 1e-6}, None),
        ("O2,rounding=nearest+kahan+value", {"rate": 1e-6}, None),
        ("O2", {"rate": lambda step: 1e-6}, "learning_rate=1e-06, the largest of a schedule's, is below"),
        ("O2", {"rate": optax.cosine_decay_schedule(1e-6, 1000)}, "learning_rate=1e-06, the largest of a"),
        ("O2", {"rate": optax.warmup_cosine_decay_schedule(0, 1e-3, 1000, 9000)}, None),
        ("O2", {"rate": lambda step: jnp.where((step > 1100) & (step < 2000), 1e-2, 1e-6)}, None),
        ("O2", {"rate": lambda step: [1e-6, 1e-6][int(step)]}, None),  # which ends
        ("fp8", {"rate": lambda step: 1e-6}, None),
        ("O2", {"rate": 0.0}, None),
        ("O2", {"rate": np.float32(1e-6)}, "learning_rate=1e-06 is below the last bit"),
        ("O2", {"rate": jnp.float32(1e-6)}, "learning_rate=1e-06 is below the last bit"),
        ("O2", {"b1": jnp.float32(0.95), "b2": jnp.float32(0.95)}, "with b1=0.95 and b2=0.95, E4M3 first"),
        ("O2", {"rate": 1e-6, "optimizer": INJECTED}, "learning_rate=1e-06 is below the last bit"),
        ("O2", {"rate": 1e-2, "optimizer": INJECTED}, None),
        ("O2", {"b2": 0.95, "optimizer": fp8jax.optim.adamw_8bit}, None),
        ("fp8", {"rate": 1e-6, "b1": 0.95, "b2": 0.95}, None),
    ],
)
def test_losses_are_one_warning(recipe, options, says):
    found = warnings_of(recipe, **options)
    assert len(found) == (says is not None) and (says is None or says in found[0])


def test_both_losses_are_one_warning():
    [text] = warnings_of("O2", 1e-6, 0.95, 0.95)
    assert "first moments" in text and "learning_rate" in text


@pytest.mark.filterwarnings("ignore:.* rounds to nearest")
@pytest.mark.parametrize(
    "recipe, b1, sticks",
    [
        ("O2", 0.945, True),
        ("O2", 0.944, False),
        ("O2,moments=E5M2+FP16", 0.901, True),
        ("O2,moments=E5M2+FP16", 0.899, False),
    ],
)
def test_first_moment_stalls_by_b1(recipe, b1, sticks):
    """200 steps without a gradient leave it in the binade where it was, or next to zero."""
    tx = fp8jax.optim.scale_by_adam(recipe, b1=b1)
    grads, state = jnp.array([1.0, 0.1]), tx.init(jnp.ones(2))
    _, state = tx.update(grads, state)
    first = fp8jax.optim.moments(state)[0]
    for _ in range(200):
        _, state = tx.update(grads.at[1].set(0.0), state)
    left = fp8jax.optim.moments(state)[0]
    share = float(value(left)[1] / value(first)[1])
    assert (0.5 <= share <= 1) if sticks else share < 0.01
    assert bool(warnings_of(recipe, b1=b1)) == sticks


@pytest.mark.parametrize(
    "recipe, line",
    [
        (
            "O1",
            "rounded to nearest: FP16 weights ignore updates below half of their last bit; the recipe fp8",
        ),
        ("O3", "rounded to nearest: E4M3 first moments do not decay to zero, FP16 weights ignore updates"),
        ("te", ""),
        ("fp8", ""),
    ],
)
def test_report_says_what_rounding_loses(recipe, line):
    model = fp8jax.transform(nn.Dense(64), recipe)
    report = str(model.report(jnp.ones((32, 64))))
    assert ("rounded to nearest" in report) == bool(line) and line in report


def test_cast_of_the_reference():
    """Rounding to nearest is ml_dtypes', which the remainder's test takes for the truth."""
    x = numbers(formats.E4M3)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(cast(jnp.asarray(x), formats.E4M3), np.float32), expected)
