"""Optimizers with small states: 8-bit AdamW against bitsandbytes' numbers, optax's against itself."""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax import formats, quantize
from fp8jax.optim import (
    Blockwise,
    adamw,
    adamw_8bit,
    moments,
    skipped,
    with_dequantized,
    with_masters,
)
from fp8jax.optim.storage.blockwise import dynamic_map
from fp8jax.quantization import is_scaled, value
from fp8jax.variables import PARAMS

DATA = np.load(pathlib.Path(__file__).parent / "data" / "bitsandbytes.npz")
SGD = with_dequantized(optax.sgd(1.0))
SIGNED = {"signed": True, "unsigned": False}

# The map and the codes ############################################################################


@pytest.mark.parametrize("name", SIGNED)
def test_the_map_and_the_codes_are_bitsandbytes(name):
    signed = SIGNED[name]
    np.testing.assert_array_equal(dynamic_map(signed), DATA[name])
    x = DATA["x"] if signed else np.abs(DATA["x"])
    q = jax.jit(lambda x: Blockwise.of(x, signed))(x)
    np.testing.assert_array_equal(q.codes, DATA[f"x_{name}"])
    np.testing.assert_array_equal(q.absmax, DATA["x_absmax"])
    np.testing.assert_array_equal(jnp.asarray(q), DATA[f"x_{name}_value"])


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_the_nearest_and_the_lower_of_two(signed):
    codes = dynamic_map(signed)
    middle = ((codes[1:].astype(np.float64) + codes[:-1]) / 2).astype(np.float32)
    spread = 10 ** np.random.default_rng(0).uniform(-8, 0, 4000) * np.tile([1, -1 if signed else 1], 2000)
    around = [np.nextafter(middle, np.float32(2 * side)) for side in (-1, 1)]
    x = np.concatenate([codes, middle, *around, np.float32(spread), np.float32([0, 1e-40])])
    x = x if signed else np.abs(x)
    # Each in a block of its own, whose absmax is 1.
    rows = np.zeros((len(x), 256), np.float32)
    rows[:, 0], rows[:, 1] = x, 1
    got = jax.jit(lambda x: Blockwise.of(x, signed))(rows).codes[:, 0]
    distance = np.abs(x[:, None].astype(np.float64) - codes.astype(np.float64))
    np.testing.assert_array_equal(got, distance.argmin(1))  # the first of equals


def test_zeros_and_the_smallest_numbers_are_clean():
    x = np.zeros((3, 256), np.float32)
    x[1, 0], x[2, 0] = 1e-40, 2.0**-126
    q = Blockwise.of(jnp.asarray(x), True)
    got = np.asarray(q.dequantize())
    assert np.isfinite(got).all() and not got[:2].any() and got[2, 0] == np.float32(2.0**-126)
    np.testing.assert_array_equal(Blockwise.zeros(x, signed=False).dequantize(), np.zeros_like(x))


# AdamW ############################################################################################


def test_steps_are_those_of_bitsandbytes():
    rate, b1, b2, eps, decay = map(float, DATA["hyper"])
    tx = adamw_8bit(rate, "te", b1, b2, eps, decay)
    params = {"w": jnp.asarray(DATA["w0"], jnp.float32)}
    state, run = tx.init(params), jax.jit(functools.partial(step_of, tx))
    for t in range(4):
        params, state = run(params, state, {"w": jnp.asarray(DATA[f"g{t}"], jnp.float32)})
        for name, moment in zip("mv", moments(state), strict=True):
            # torch adds with other roundings: a code may be the next one where it was near the middle.
            off = moment["w"].codes.astype(np.int32) - DATA[f"{name}{t + 1}"]
            assert np.abs(off).max() <= 1 and (off != 0).sum() <= 4
            np.testing.assert_allclose(moment["w"].absmax, DATA[f"{name}{t + 1}_absmax"], rtol=2e-7 * (t + 1))
        # Each step rounds the weight, below 4, once, here and there.
        np.testing.assert_allclose(params["w"], DATA[f"w{t + 1}"], rtol=0, atol=(t + 1) * 4 * 2.0**-24)


def step_of(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return fp8jax.apply_updates(params, updates), state


MATRIX = jax.random.normal(jax.random.key(0), (256, 128))


def kernel(format):
    return MATRIX if format is None else quantize(MATRIX, format, power_of_two=True)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_bytes_of_state_a_parameter():
    """The guide's 8, 2 and next to nothing; small arrays keep float32 moments."""
    params, size = {"w": MATRIX}, MATRIX.size
    assert nbytes(moments(adamw(1e-3, "te").init(params))) == 8 * size
    assert nbytes(moments(adamw_8bit(1e-3, "te").init(params))) == (2 + 2 * 4 / 256) * size
    # Adafactor: a row and a column (and a number in the place of what is not kept).
    assert nbytes(adafactor(1e-3, "te").init(params).inner) < 4 * (256 + 128) + 64
    small, large = jnp.ones(4095), jnp.ones(4096)
    mu, _ = moments(adamw_8bit(1e-3, "te").init({"small": small, "large": large}))
    assert mu["small"].dtype == jnp.float32 and isinstance(mu["large"], Blockwise)


# Every level ######################################################################################


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.gelu(nn.Dense(160, name="up")(x)))
        return nn.Dense(8, name="down")(x)


X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
Y = np.tanh(X @ np.random.default_rng(1).normal(size=(32, 8)) / 5).astype(np.float32)


def adafactor(rate, recipe):
    return with_dequantized(optax.adafactor(rate), recipe)


MAKERS = {"adamw": adamw, "adamw_8bit": adamw_8bit, "adafactor": adafactor}
LONG = [
    pytest.param(name, level, marks=pytest.mark.long)
    for name in ("adamw_8bit", "adafactor")
    for level in ("bf16", "fp16_amp", "te", "O1", "te+O2")
]


@functools.cache
def training(name, recipe, rate):
    """A compiled step, and what it starts from."""
    model = fp8jax.transform(Net(), recipe)
    tx = optax.chain(fp8jax.optim.clip_by_global_norm(1.0), MAKERS[name](rate, recipe))

    def start():
        variables = model.init(jax.random.key(0), X)
        return variables, tx.init(variables)

    def step(variables, state, spoil):
        loss_fn = lambda variables: jnp.mean((model.apply(variables, X * spoil) - Y) ** 2)  # noqa: E731
        loss, grads, new = fp8jax.value_and_grad(loss_fn)(variables)
        return *step_of(tx, variables, state, grads), loss

    return jax.jit(start)(), jax.jit(step)


def last_loss(name, recipe, rate, steps):
    (variables, state), step = training(name, recipe, rate)
    for _ in range(steps):
        variables, state, loss = step(variables, state, np.float32(1))
    assert int(skipped(state)) == 0 and step._cache_size() == 1
    return float(loss)


@pytest.mark.parametrize(
    "name, level", [("adamw_8bit", "O2"), ("adamw_8bit", "O3"), ("adafactor", "O2"), *LONG]
)
def test_it_learns_as_adamw_does_and_skips_a_bad_step(name, level):
    # Adafactor scales its steps by the size of the weights.
    rate = 3e-2 if name == "adafactor" else 3e-3
    expected = last_loss("adamw", "te" if level != "fp16_amp" else level, 3e-3, 100)
    assert last_loss(name, level, rate, 100) < expected + 0.02
    (variables, state), step = training(name, level, rate)
    after, new, _ = step(variables, state, np.float32(np.nan))
    assert int(skipped(new)) == 1
    # All but the count of skipped steps.
    arrays = [[x for x in jax.tree.leaves(tree) if x.dtype != jnp.int32] for tree in (state, new)]
    jax.tree.map(np.testing.assert_array_equal, (variables[PARAMS], arrays[0]), (after[PARAMS], arrays[1]))


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(32, 160, rngs=rngs), nnx.LayerNorm(160, rngs=rngs)
        self.down = nnx.Linear(160, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(nnx.gelu(self.up(x))))


@pytest.mark.parametrize("name, level", [("adamw_8bit", "O3"), ("adafactor", "O2")])
def test_an_nnx_optimizer_takes_the_step_of_variables(name, level):
    """The same parameters and gradients as arrays: the same new weights and state, in place."""
    tx = MAKERS[name](3e-3, level)
    model = fp8jax.transform(Plain(nnx.Rngs(0)), level)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss_fn = lambda model: jnp.mean((model(X) - Y) ** 2)  # noqa: E731

    @nnx.jit
    def step(model, optimizer):
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        _, grads = fp8jax.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return params, nnx.to_pure_dict(grads)

    params, grads = step(model, optimizer)
    expected, state = jax.jit(functools.partial(step_of, tx))(params, tx.init(params), grads)
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    kept = jax.tree.leaves(optimizer.opt_state)
    assert len(kept) == len(jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.leaves(state))
    step(model, optimizer)


# optax's ##########################################################################################


def test_with_dequantized():
    tx, options = adafactor(1e-2, "O2"), {"w": kernel(formats.FP16), "b": jnp.ones(8)}
    grads = {"w": quantize(MATRIX * 1e-3, formats.E4M3, power_of_two=True), "b": jnp.ones(8)}
    values = lambda tree: jax.tree.map(value, tree, is_leaf=is_scaled)  # noqa: E731
    theirs = optax.adafactor(1e-2)
    expected = optax.apply_updates(
        values(options), theirs.update(values(grads), theirs.init(values(options)), values(options))[0]
    )
    got, _ = step_of(tx, options, tx.init(options), grads)
    np.testing.assert_array_equal(got["b"], expected["b"])
    rounded = quantize(expected["w"], formats.FP16, power_of_two=True)
    np.testing.assert_array_equal(value(got["w"]), value(rounded))
    # optax.apply_updates puts the same in place.
    updates, _ = tx.update(grads, tx.init(options), options)
    jax.tree.map(np.testing.assert_array_equal, optax.apply_updates(options, updates), got)


# Rounding, written by any optimizer of optax ######################################################


def fp16_weights(shape=(64, 64)):
    """Weights of 0.02, whose last bit is 1.5e-5."""
    return {"w": quantize(jnp.full(shape, 0.02), formats.FP16, power_of_two=True), "b": jnp.zeros(shape[1])}


def followed(tx, steps, params=None, grads=None):
    """The parameters and the state after steps along one gradient."""
    params = fp16_weights() if params is None else params
    grads = jax.tree.map(jnp.ones_like, values_of(params)) if grads is None else grads
    state, step = tx.init(params), jax.jit(functools.partial(step_of, tx))
    for _ in range(steps):
        params, state = step(params, state, grads)
    return params, state


def values_of(tree):
    return jax.tree.map(value, tree, is_leaf=is_scaled)


def test_evaluation_of_schedule_free():
    """The averaged weights are in the state of optax's optimizer, and in float32."""
    theirs = optax.contrib.schedule_free(optax.adamw(1e-2, b1=0.0), 1e-2)
    start = fp16_weights()
    ours, state = followed(with_dequantized(theirs, "fp8"), 10, start)
    plain, plain_state = followed(theirs, 10, values_of(start))
    got = optax.contrib.schedule_free_eval_params(state.inner, values_of(ours))
    want = optax.contrib.schedule_free_eval_params(plain_state, plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)
    assert abs(want["w"] - plain["w"]).min() > 1e-3


ROUNDINGS = [(None, 0.01), ("fp8", 0.01), ("O2,rounding=nearest+stochastic+value", 0.2), ("O2", None)]


@pytest.mark.parametrize("recipe, bound", ROUNDINGS)
def test_small_steps_of_any_optimizer(recipe, bound):
    """200 steps of lion at 1e-6, a fifteenth of the weights' last bit: O2 rounds them all away."""
    params, state = followed(with_dequantized(optax.lion(1e-6, weight_decay=0.0), recipe), 200)
    moved = np.asarray(value(params["w"]) - value(fp16_weights()["w"]))
    if bound is None:
        assert not moved.any() and state.remainder is None and state.key is None
    else:
        assert abs(moved.mean() / -2e-4 - 1) < bound
    np.testing.assert_allclose(params["b"], -2e-4, rtol=1e-5)


AUTOMATIC = {
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "adafactor": lambda: optax.adafactor(3e-2),
}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_rates_that_grow_from_little_steps(name):
    """The loss is that of float32 weights, at its lowest: mechanize's jumps up and down. Under O2 its first
    steps move nothing."""
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    w = np.random.default_rng(1).normal(0, 0.1, (32, 32)).astype(np.float32)
    loss_fn = lambda params: jnp.mean((x @ params["w"] - np.roll(x, 1, 1)) ** 2)  # noqa: E731

    def lowest_loss(weight, recipe):
        tx = with_dequantized(AUTOMATIC[name](), recipe)
        params, state = {"w": weight}, tx.init({"w": weight})

        @jax.jit
        def step(params, state):
            loss, grads = jax.value_and_grad(loss_fn)(values_of(params))
            return *step_of(tx, params, state, grads), loss

        losses = []
        for _ in range(200):
            params, state, loss = step(params, state)
            losses.append(float(loss))
        return min(losses)

    expected = lowest_loss(jnp.asarray(w), "te")
    ratio = lowest_loss(quantize(w, formats.FP16, power_of_two=True), "fp8") / expected
    assert abs(ratio - 1) < 0.1, ratio


def test_remainders_wait_through_a_skipped_step():
    tx = with_dequantized(optax.lion(1e-6), "fp8")
    params, state = followed(tx, 3)
    assert state.remainder["b"] is None and np.asarray(state.remainder["w"], np.float32).any()
    after, new = step_of(tx, params, state, {"w": jnp.ones((64, 64)), "b": jnp.full(64, jnp.nan)})
    assert (int(new.skipped), int(new.count), int(state.count)) == (1, 3, 3)
    for a, b in zip(*map(jax.tree.leaves, ((params, state.remainder), (after, new.remainder))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_that_begins_with_infinities():
    """`reduce_on_plateau` has the best loss so far, at first infinity. A step with NaN counts as ever."""
    plateau = optax.contrib.reduce_on_plateau(patience=1, accumulation_size=4)
    plain = optax.chain(optax.adam(1e-2), plateau)
    tx, params = with_dequantized(plain, "te"), {"w": jnp.ones((4, 4))}
    ours, theirs = (params, tx.init(params)), (params, plain.init(params))

    @functools.partial(jax.jit, static_argnums=0)
    def step(tx, params, state, loss, grad=1.0):
        updates, state = tx.update({"w": jnp.full((4, 4), grad)}, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        ours, theirs = step(tx, *ours, 1.0), step(plain, *theirs, 1.0)
    np.testing.assert_allclose(ours[0]["w"], theirs[0]["w"], rtol=1e-6)
    assert ours[0]["w"][0, 0] < 0.95 and skipped(ours[1]) == 0
    same, state = step(tx, *ours, 1.0, jnp.nan)
    assert skipped(state) == 1
    np.testing.assert_array_equal(same["w"], ours[0]["w"])


def test_seeds_give_other_bits():
    seeds = [followed(with_dequantized(optax.lion(1e-6), "fp8", seed=seed), 3)[1] for seed in (0, 0, 1)]
    bits = [np.asarray(state.remainder["w"]).tobytes() for state in seeds]
    assert bits[0] == bits[1] != bits[2]


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_remainders_do_not_depend_on_devices(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    at = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))  # noqa: E731
    spread = lambda x: jax.device_put(x, at("data") if x.ndim == 2 else at())  # noqa: E731
    tx, grads = (
        with_dequantized(optax.lion(1e-6), "fp8"),
        jax.tree.map(jnp.ones_like, values_of(fp16_weights())),
    )
    alone = followed(tx, 2, fp16_weights(), grads)
    parts = followed(tx, 2, jax.tree.map(spread, fp16_weights()), jax.tree.map(spread, grads))
    assert parts[1].remainder["w"].sharding.spec[0] == "data"
    for one, many in zip(*map(jax.tree.leaves, (alone, parts)), strict=True):
        np.testing.assert_array_equal(one, many)


def test_masters_are_kept_in_8_bit_adamw():
    params = {"w": kernel(formats.E4M3)}
    tx = adamw_8bit(1e-3, "O3")
    state = with_masters(tx.init(params), {"w": MATRIX})
    assert state.master["w"].data.dtype == jnp.float16
    new, after = step_of(tx, params, state, {"w": MATRIX})
    moved = value(state.master["w"]) - value(after.master["w"])
    np.testing.assert_allclose(moved, 1e-3 * np.sign(MATRIX), atol=4 * 2.0**-11 + 1e-6)
    requantized = quantize(value(after.master["w"]), formats.E4M3, power_of_two=True)
    np.testing.assert_array_equal(value(new["w"]), value(requantized))


def test_masters_of_boxed_and_nnx_parameters():
    """The boxes of axis names, and `nnx.Variable`s, stay around the master weights."""
    tx = adamw(1e-3, "O3")
    for box in (lambda x: nn.Partitioned(x, ("a", "b")), nnx.Param):
        state = tx.init({"w": box(kernel(formats.E4M3))})
        new = with_masters(state, {"w": box(MATRIX)})
        assert jax.tree.structure(new) == jax.tree.structure(state)
        want = with_masters(tx.init({"w": kernel(formats.E4M3)}), {"w": MATRIX})
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(new), jax.tree.leaves(want))


def test_masters_of_other_parameters_are_refused():
    state = adamw(1e-3, "O3").init({"w": kernel(formats.E4M3)})
    with pytest.raises(ValueError, match=r"`params`: expected shape \(.*\) of w; got \(.*, 1\)"):
        with_masters(state, {"w": MATRIX[:, :1]})
    with pytest.raises(ValueError, match=r"`params`: .* other names are \['v', 'w'\]"):
        with_masters(state, {"v": MATRIX})
    with pytest.raises(ValueError, match="`state`: expected the state of one `adam` or `adamw`; got 0"):
        with_masters(optax.adam(1e-3).init({"w": MATRIX}), {"w": MATRIX})


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: adafactor(1e-3, "O3").init({"w": kernel(formats.E4M3)}), "16 bits .* keep masters"),
        (lambda: SGD.init({"w": kernel(formats.E4M3)}), "16 bits"),
        (lambda: SGD.update({}, SGD.init({})), "`params`"),
        (lambda: adamw_8bit(1e-3, "O2", zero=object()), "`zero`"),
    ],
)
def test_what_cannot_be_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("name", ["fp8", "O2", None])
@pytest.mark.parametrize("kind", ["scaled", "bfloat16", "float32"])
def test_maps_over_the_parameters_of_a_state(name, kind):
    """optax makes a state of a placeholder without leaves, whose roundings are not known."""
    params = {"w": jnp.ones((8, 8), jnp.bfloat16 if kind == "bfloat16" else jnp.float32), "b": jnp.ones(8)}
    if kind == "scaled":
        params["w"] = quantize(params["w"], formats.FP16, power_of_two=True)
    tx = with_dequantized(optax.lion(1e-3), name)
    state = tx.init(params)
    mapped = optax.tree_map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert jnp.all(mapped.inner[0].mu["w"] == 1) and mapped.skipped == 0


def test_labels_without_parameters():
    tx = optax.partition({"none": with_dequantized(optax.lion(1e-3), "fp8"), "all": SGD}, {"w": "all"})
    params = {"w": jnp.ones(8)}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert jnp.all(updates["w"] == -1)
    fp8jax.optim.convert(state, params, "fp8")
