"""Plain bfloat16 and float16 parameters: what rounding takes from a weight waits in the optimizer's state."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import fp8jax
from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.optim import (
    adam,
    adamw,
    adamw_8bit,
    convert,
    masters,
    muon,
    scale_by_adam,
    skipped,
    with_dequantized,
)
from fp8jax.optim.step import fused
from fp8jax.optim.step.weight_rounding import decode_weight, encode_plain
from fp8jax.quantization import nearest

DTYPES = [jnp.bfloat16, jnp.float16]
named = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
STOCHASTIC = "O1,rounding=nearest+stochastic+value"


def trained(tx, params, steps, grads=None, apply=optax.apply_updates):
    """Parameters and state after steps along one gradient, of ones by default."""
    grads = jax.tree.map(jnp.ones_like, params) if grads is None else grads
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def exact(params, state):
    """The weights that the next step goes on from, float64."""
    return np.asarray(decode_weight(params, state.remainder), np.float64)


# Small steps ######################################################################################


@named
@pytest.mark.parametrize("rate", [1e-4, 1e-5, 1e-6])
def test_small_steps(dtype, rate):
    """Weights of all sizes from 0.01 to 1 go Adam's way in float32."""
    start = jnp.asarray(np.random.default_rng(0).uniform(0.01, 1, 4096), dtype)
    params, state = trained(adam(rate, "fp8"), start, 500)
    wide, _ = trained(optax.adam(rate), start.astype(jnp.float32), 500)
    way = np.asarray(wide, np.float64) - np.asarray(start, np.float64)
    error = exact(params, state) - np.asarray(wide, np.float64)
    assert abs(error.mean()) / abs(way).mean() < 0.01
    # Each step rounds the remainder to 1/256 of the last bit, up or down, and the first moment to E5M2.
    last_bit = 2.0 ** (np.frexp(exact(params, state))[1] - 1 - jnp.finfo(dtype).nmant)
    assert (abs(error) < 6 * np.sqrt(500) / 2 * last_bit / 256 + 0.05 * abs(way)).all()
    rest = abs(np.asarray(params, np.float64) - exact(params, state))
    assert (rest < 0.51 * 2 * last_bit).all() and (rest < 0.51 * last_bit).mean() > 0.99


@named
@pytest.mark.parametrize("rate", [1e-4, 1e-5, 1e-6])
def test_distance_to_float32_over_the_way(dtype, rate):
    """The setting of examples/bench/rounding.py: weights of 0.02, gradients that keep their signs."""
    random = np.random.default_rng(2)
    sign, size = random.choice([-1.0, 1.0], (2, 4096)), random.uniform(0.5, 1.5, (500, 4096))
    start = jnp.asarray(0.02 * sign[0] * random.uniform(0.5, 1.5, 4096), dtype)
    grads = jnp.asarray(sign[1] * size, jnp.float32)

    def train(tx, params):
        def step(carry, grad):
            updates, state = tx.update(grad.astype(carry[0].dtype), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), grads)[0])(params)

    wide = np.asarray(train(optax.adam(rate), start.astype(jnp.float32))[0], np.float64)
    way = np.linalg.norm(wide - np.asarray(start, np.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nearest, _ = train(adam(rate, "O2"), start)
    assert np.linalg.norm(exact(*train(adam(rate, "fp8"), start)) - wide) / way < 0.03
    assert np.linalg.norm(np.asarray(nearest, np.float64) - wide) / way > 0.03


@named
def test_a_weight_of_one_half(dtype):
    """200 steps of 1e-4 are 0.02, and the last bit of 0.5 is 0.004."""
    for recipe, moves in (("fp8", True), ("O1,rounding=nearest+kahan+value", True), ("te", False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            params, _ = trained(adamw(1e-4, recipe, weight_decay=0.0), jnp.full(64, 0.5, dtype), 200)
        moved = 0.5 - np.asarray(params, np.float64)
        if moves:
            np.testing.assert_allclose(moved, 0.02, rtol=0.02, atol=0.51 * 0.5 * float(jnp.finfo(dtype).eps))
        elif dtype == jnp.bfloat16:
            assert not moved.any()


@named
def test_bytes_per_parameter(dtype):
    """2 for the weight, and 1 + 2 + 1: with a gradient of 2 bytes 8."""
    params = {"w": jnp.ones((64, 64), dtype)}
    _, state = trained(adamw(1e-3, "fp8"), params, 1)
    kept = [x for x in jax.tree.leaves((params, state)) if x.size == 64 * 64]
    assert sorted(str(x.dtype) for x in kept) == sorted(
        ["float16", "float8_e5m2", "int8", jnp.dtype(dtype).name]
    )
    assert sum(x.nbytes for x in kept) == 6 * 64 * 64


@named
def test_other_recipes_round_to_nearest_and_say_so(dtype):
    """O2 and te have no remainder by their `rounding`."""
    params = {"w": jnp.full((64, 64), 0.1, dtype)}
    for recipe in ("O2", "te", None):
        with pytest.warns(UserWarning, match=r"learning_rate=1e-06 is below the last bit .* weights"):
            state = adamw(1e-6, recipe).init(params)
        assert not jax.tree.leaves(state.remainder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adamw(1e-6, "fp8").init(params)
        adamw(1e-2, "O2").init(params)
        adamw(1e-6, "O2").init({"w": jnp.ones((64, 64))})


@named
def test_stochastic_rounding(dtype):
    params, state = trained(adam(1e-5, STOCHASTIC), jnp.full(2**14, 0.5, dtype), 100)
    assert state.remainder is None
    assert abs((0.5 - np.asarray(params, np.float64)).mean() / 1e-3 - 1) < 0.05


# Exact updates ####################################################################################


def weights_of(dtype, count, seed):
    """Of all exponents and signs, zeros and subnormal numbers of float16."""
    bits = np.random.default_rng(seed).integers(0, 2**16, count).astype(np.uint16)
    x = bits.view(dtype).astype(np.float32)
    tiny = np.finfo(np.float32).tiny  # XLA takes subnormal numbers of float32 for 0
    x = np.where(np.isfinite(x) & ((x == 0) | (abs(x) >= tiny)), x, 0)
    return x.astype(dtype)


def test_rounding_to_16_bits():
    """That of ml_dtypes, for all bfloat16 and float16 numbers, midpoints and their neighbours."""
    for format in (formats.BF16, formats.FP16):
        codes = weights_of(format.dtype, 2**18, 0).astype(np.float32)
        near = np.float32([np.nextafter(codes, np.float32(end)) for end in (-np.inf, np.inf)])
        middle = (codes.view(np.uint32) + (1 << (22 - format.mantissa_bits))).view(np.float32)
        x = np.concatenate([codes, *near, middle, np.nextafter(middle, 0), np.float32(0.7) * codes])
        x = x[np.isfinite(x) & (abs(x) <= format.max) & (abs(x) >= np.finfo(np.float32).tiny)]
        got = np.asarray(jax.jit(nearest, static_argnums=1)(x, format))
        want = x.astype(format.dtype).astype(np.float32)
        keep = abs(want) >= np.finfo(np.float32).tiny
        np.testing.assert_array_equal(got[keep], want[keep])


@named
@pytest.mark.parametrize("far", [False, True])
def test_updates_give_the_weight(dtype, far):
    """The weight that `optax.apply_updates` writes is the one that the remainder belongs to: in another
    program, in one program, and in `fp8jax.apply_updates`; near steps and steps to any other weight."""
    old = jnp.asarray(weights_of(dtype, 2**16, 1))
    format = formats.get("BF16" if dtype == jnp.bfloat16 else "FP16")
    if far:
        new = jnp.asarray(weights_of(dtype, 2**16, 2).astype(np.float32)) * np.float32(1 + 1e-3)
    else:
        change = np.random.default_rng(3).normal(0, 2.0**-8, old.shape).astype(np.float32)
        new = old.astype(jnp.float32) * (1 + change)
    new = jnp.clip(jnp.where(jnp.isfinite(new), new, 1), -0.4 * format.max, 0.4 * format.max)
    old = jnp.clip(old, -0.4 * format.max, 0.4 * format.max).astype(dtype)
    random = jnp.zeros(old.shape, jnp.uint32)

    def encoded(new, old):
        return encode_plain(new, old, rounding="kahan", random=random)

    def both(new, old):
        update, remainder = encoded(new, old)
        return optax.apply_updates(old, update), remainder

    update, remainder = jax.jit(encoded)(new, old)
    assert update.dtype == jnp.float32 and remainder.dtype == jnp.int8
    got = optax.apply_updates(old, update)
    assert got.dtype == dtype
    for other in (jax.jit(optax.apply_updates)(old, update), jax.jit(both)(new, old)[0],
                  fp8jax.apply_updates(old, update)):  # fmt: skip
        np.testing.assert_array_equal(np.asarray(other, np.float32), np.asarray(got, np.float32))
    wide = np.asarray(new, np.float64)
    # Where a float32 sum can be as small as the weight: the nearest of the format.
    is_near = abs(np.asarray(old, np.float64)) < 2.0**12 * abs(wide)
    assert is_near.mean() > (0.4 if far else 0.9)
    tiny = np.finfo(np.float32).tiny * 256
    want = np.asarray(new).astype(format.dtype).astype(np.float64)
    fine = is_near & (abs(want) > tiny)
    np.testing.assert_array_equal(np.asarray(got, np.float64)[fine], want[fine])
    # With the remainder: the weight in float32, but for 1/256 of the last bit, and a float32's of the step.
    last_bit = np.maximum(abs(want), format.smallest_normal) * float(jnp.finfo(dtype).eps)
    value = np.asarray(decode_weight(got, remainder), np.float64)
    step = abs(wide - np.asarray(old, np.float64))
    assert (abs(value - wide) <= last_bit / 256 * 1.01 + step * 2.0**-23 + 2.0**-100)[abs(wide) > tiny].all()


@named
def test_optax_and_fp8jax_write_the_same(dtype):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(0, 0.05, (64, 64)), dtype), "b": jnp.zeros(64, dtype)}
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), params)
    runs = [
        trained(adamw(1e-4, "fp8"), params, 20, grads, f) for f in (optax.apply_updates, fp8jax.apply_updates)
    ]
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    [(params, state), _] = runs
    assert {x.dtype for x in jax.tree.leaves(state.remainder)} == {jnp.dtype(jnp.int8)}


def test_float32_parameters_keep_their_bits():
    """They have no remainder, also beside 16-bit parameters: the update is the step's."""
    params = {"a": jnp.full((4, 4), 0.5), "b": jnp.full((4, 4), 0.5, jnp.bfloat16)}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 2.0), params)
    tx = adamw(1e-4, "fp8", weight_decay=0.0)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["a"], -1e-4, rtol=1e-5)
    assert state.remainder["a"] is None and not np.asarray(updates["b"]).any()
    assert np.asarray(state.remainder["b"]).all()


# Around it ########################################################################################


@named
def test_skipped_steps_keep_everything(dtype):
    params, state = trained(adamw(1e-4, "fp8"), jnp.full(64, 0.3, dtype), 3)
    assert np.asarray(state.remainder).any()
    updates, new = adamw(1e-4, "fp8").update(jnp.full(64, jnp.nan), state, params)
    assert int(new.skipped) == 1
    np.testing.assert_array_equal(optax.apply_updates(params, updates), params)
    np.testing.assert_array_equal(new.remainder, state.remainder)


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda rate: adamw(rate, "te", weight_decay=0.0),
        lambda rate: adamw(rate, "O2", weight_decay=0.0),
        lambda rate: adamw(rate, "fp8", weight_decay=0.0),
        lambda rate: muon(rate, "te"),
        lambda rate: with_dequantized(optax.sgd(rate), "te"),
        lambda rate: with_dequantized(optax.sgd(rate), "fp8"),
        lambda rate: with_dequantized(optax.sgd(rate), STOCHASTIC),
    ],
)
@named
@pytest.mark.filterwarnings("ignore:.* rounds to nearest")
def test_steps_beyond_the_largest_number(dtype, make, is_gpu, monkeypatch):
    """The new weight is finite in float32, and infinite in the weight's dtype: skipped and counted."""
    if is_gpu:
        monkeypatch.setattr(fused, "_by_tensor", fused._all_at_once)
    largest = float(jnp.finfo(dtype).max)
    last_bit = largest - float(jnp.nextafter(jnp.asarray(largest, dtype), jnp.zeros((), dtype)))
    for sign, bits, count in ((1, 0.75, 1), (-1, 0.75, 1), (1, 0.25, 0)):
        params = {"w": jnp.full((8, 8), sign * largest, dtype)}
        new, state = trained(make(bits * last_bit), params, 1, {"w": -sign * jnp.eye(8, dtype=dtype)})
        assert int(skipped(state)) == count
        np.testing.assert_array_equal(*(np.asarray(x["w"], np.float32) for x in (new, params)))


def test_directions_are_refused():
    with pytest.raises(ValueError, match="`recipe`: expected one that rounds weights to nearest; got fp8"):
        scale_by_adam("fp8").init(jnp.ones(4, jnp.bfloat16))
    tx, grads = scale_by_adam("fp8"), jnp.ones(4, jnp.bfloat16)
    tx.update(grads, tx.init(jnp.ones(4)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_same_bits_on_any_devices(stage):
    mesh = jax.make_mesh((4,), ("data",))
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(0, 0.05, (64, 64)), jnp.bfloat16), "b": jnp.zeros(64, jnp.bfloat16)}
    zero = Zero(mesh, "fp8", stage=stage)
    alone = trained(adamw(1e-4, "fp8"), params, 3)
    parts = trained(adamw(1e-4, "fp8", zero=zero), zero.place(params), 3)
    for one, many in zip(*map(jax.tree.leaves, (alone, parts)), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(many, np.float32))


@named
def test_conversion(dtype):
    """A state without remainders is refused in one line, and converted."""
    params = {"w": jnp.full((64, 64), 0.1, dtype)}
    params, state = trained(adamw(1e-2, "O2"), params, 2)
    tx, grads = adamw(1e-6, "fp8"), {"w": jnp.ones((64, 64), dtype)}
    with pytest.raises(ValueError, match="remainders: none instead of int8"):
        tx.update(grads, state, params)
    _, state = tx.update(grads, convert(state, params, "fp8"), params)
    assert np.asarray(state.remainder["w"]).any()
    again = convert(convert(state, params, "fp8"), params, "O2")
    assert again.remainder == {"w": None}


@pytest.mark.parametrize("make", [adamw, adamw_8bit, muon])
@pytest.mark.parametrize("old, new", [DTYPES, DTYPES[::-1]], ids=["to float16", "to bfloat16"])
@pytest.mark.filterwarnings("ignore:.* rounds to nearest")
def test_weights_in_another_dtype(old, new, make):
    """A recipe without remainders in between drops those of the old dtype; all else stays to the bit."""
    start = jnp.asarray(np.random.default_rng(0).uniform(0.01, 1, (64, 64)), old)
    options = {"in_8_bits": True} if make is adamw_8bit else {}
    params, state = trained(make(1e-5, "fp8"), start, 5)
    weights = masters(state, params)
    params = weights.astype(new)
    changed = state
    for recipe in ("fp8,rounding=stochastic+nearest+root", "fp8"):
        changed = convert(changed, params, recipe, **options)
    assert not changed.remainder.any() and changed.remainder.dtype == jnp.int8
    for kept in ("adam", "key", "skipped"):
        jax.tree.map(np.testing.assert_array_equal, getattr(changed, kept), getattr(state, kept))
    np.testing.assert_allclose(exact(params, changed), weights, rtol=jnp.finfo(new).eps / 2)
    make(1e-5, "fp8").update(jnp.ones_like(params), changed, params)


@pytest.mark.parametrize(
    "make", [adamw_8bit, lambda rate, recipe: with_dequantized(optax.lion(rate, weight_decay=0), recipe)]
)
@named
def test_other_optimizers(make, dtype):
    start = jnp.full((64, 64), 0.3, dtype)
    params, state = trained(make(1e-5, "fp8"), start, 100)
    moved = exact(params, state) - np.asarray(start, np.float64)
    np.testing.assert_allclose(moved.mean(), -1e-3, rtol=0.01)
    # 6 standard deviations of 100 roundings to 1/256 of the last bit.
    np.testing.assert_allclose(moved, -1e-3, atol=6 * 10 / 2 * float(jnp.finfo(dtype).eps) / 4 / 256 + 1e-6)


def test_train_state_of_flax():
    params = {"w": jnp.full((8, 8), 0.5, jnp.bfloat16)}
    tx = adamw(1e-4, "fp8", weight_decay=0.0)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    step = jax.jit(lambda state: state.apply_gradients(grads=params))
    for _ in range(200):
        state = step(state)
    np.testing.assert_allclose(np.asarray(state.params["w"], np.float64), 0.48, atol=1.1e-3)
