"""Storages of moments: E4M4, and storages that are added from outside of the package."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import fp8jax
from fp8jax import Recipe, formats, quantize
from fp8jax.comm import Zero
from fp8jax.inspect import chart
from fp8jax.optim import adamw, convert, moments, skipped, storage
from fp8jax.optim.storage import RootE4M4, Storage
from fp8jax.quantization import is_scaled
from fp8jax.recipe import legal_values

ONE_BYTE = "fp8,moments=E5M2+E4M4"

# E4M4 #############################################################################################

# The numbers of E4M4, restated: 16 subnormal ones, and 15 exponents from -6 to 8.
NUMBERS = np.array(
    [m / 16 * 2.0**-6 for m in range(16)] + [(1 + m / 16) * 2.0**e for e in range(-6, 9) for m in range(16)]
)


def test_the_numbers_of_e4m4():
    one = RootE4M4(jnp.arange(256, dtype=jnp.uint8)[None], jnp.full((1, 2), 127, jnp.uint8))
    np.testing.assert_array_equal(jnp.asarray(one)[0], np.float32(NUMBERS**2))
    assert (NUMBERS.max(), NUMBERS[16], NUMBERS[1]) == (
        formats.E4M4.max,
        formats.E4M4.smallest_normal,
        formats.E4M4.smallest_subnormal,
    )


def encoded(x, random):
    zeros = RootE4M4.zeros(jnp.zeros(x.shape), signed=False)
    return jax.jit(lambda x, random: zeros.encode(x, zeros.maxima(x), random))(x, random)


def restated(x, random):
    """Codes and exponents by the formula, in float64 but for the root, which is float32's."""
    root = np.sqrt(x).astype(np.float64)
    groups = np.stack([root[:, i : i + 128].max(1) for i in range(0, x.shape[1], 128)], 1)
    least = np.ceil(np.log2(np.maximum(groups, 1e-300) / NUMBERS.max()))
    exponents = np.clip(least, 1 - 127, 253 - 127)
    scaled = root / 2.0 ** np.repeat(exponents, 128, 1)[:, : x.shape[1]]
    below = np.searchsorted(NUMBERS, scaled, side="right") - 1
    above = np.minimum(below + 1, 255)
    gap = np.where(above > below, NUMBERS[above] - NUMBERS[below], 1)
    # The upper 19 of the random bits decide: as many as float32 has below a mantissa of 4.
    share = (random >> 13) / 2.0**19
    codes = np.where((scaled - NUMBERS[below]) / gap + share >= 1, above, below)
    codes = np.maximum(codes, x > 0)
    return codes.astype(np.uint8), (exponents + 127).astype(np.uint8)


def hostile(rows, columns):
    """Second moments: of wide and narrow spreads, zeros, one huge entry, the smallest numbers."""
    random = np.random.default_rng(0)
    x = np.exp(random.normal(0, 1, (rows, columns)) * random.choice([0.5, 2.0, 8.0], (rows, 1)))
    x *= 10.0 ** random.uniform(-24, 12, (rows, 1))
    x[::7] = 0
    x[1::7, ::3] = 0
    x[2::7, 5 % columns] *= 1e8
    x[3::7] = np.float32(2.0**-126)
    x[4::7, 1::2] *= 1e-12
    x = np.float32(x)
    return np.where(x < np.finfo(np.float32).tiny, 0, x)  # XLA has no subnormal numbers


@pytest.mark.parametrize("columns", [1, 100, 128, 300])
def test_codes_are_those_of_the_formula(columns):
    x = hostile(10_000 // columns + 8, columns)
    random = np.random.default_rng(1).integers(0, 2**32, x.shape, np.uint32)
    got = encoded(x, random)
    codes, exponents = restated(x, random)
    np.testing.assert_array_equal(got.exponents, exponents)
    np.testing.assert_array_equal(got.codes, codes)


def test_rounding_is_unbiased():
    x = np.float32(np.random.default_rng(2).uniform(0.1, 1, (1, 128)) ** 2)
    random = np.random.default_rng(3).integers(0, 2**32, (10_000, 128), np.uint32)
    roots = np.sqrt(np.asarray(encoded(np.repeat(x, 10_000, 0), random), np.float64))
    error = np.abs(roots.mean(0) - np.sqrt(x[0]))
    assert (error < 4 * roots.std(0) / 100 + 1e-7).all()


def test_without_random_bits_the_nearest_code():
    x = np.square(NUMBERS[None, 1:] * np.float32(1.01)).astype(np.float32)
    x[0, -1] = NUMBERS[-1] ** 2
    got = encoded(x[:, -128:], None)
    np.testing.assert_array_equal(got.codes[0], np.arange(128, 256))


# The optimizer ####################################################################################


def params_of(recipe, shape=(64, 256)):
    w = jnp.asarray(np.random.default_rng(0).normal(0, 0.05, shape), jnp.float32)
    weight = Recipe.parse(recipe).weight
    w = w if weight == "FP32" else quantize(w, weight, power_of_two=True)
    return {"w": w, "b": jnp.zeros(shape[1]), "s": jnp.zeros(())}


def grads_of(number, shape=(64, 256)):
    random = np.random.default_rng(number + 1)
    return {
        "w": jnp.asarray(random.normal(size=shape), jnp.float32),
        "b": jnp.ones(shape[1]),
        "s": jnp.ones(()),
    }


def trained(tx, params, steps=3, shape=(64, 256)):
    state, update = tx.init(params), jax.jit(tx.update)
    for number in range(steps):
        updates, state = update(grads_of(number, shape), state, params)
        params = fp8jax.apply_updates(params, updates)
    return params, state


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_six_bytes_per_parameter():
    params, state = trained(adamw(1e-3, ONE_BYTE), params_of(ONE_BYTE))
    size = params["w"].size
    kept = [params["w"].data, state.adam.mu["w"].data, state.adam.nu["w"], state.remainder["w"]]
    each = [sum(x.nbytes for x in jax.tree.leaves(tree)) / size for tree in kept]
    assert each == [2, 1, 1 + 1 / 128, 1]  # and the gradient's one


@pytest.mark.parametrize("recipe", [ONE_BYTE, "te,moments=E5M2+E4M4,rounding=stochastic+nearest+root"])
def test_updates_are_those_of_float32_moments(recipe):
    """The root of a second moment is off by at most a code, 6%, and not always to one side."""
    start = params_of("te")
    exact, _ = trained(adamw(1e-3, "te"), start, 200)
    params, state = trained(adamw(1e-3, recipe), params_of(recipe), 200)
    way, other = ((np.asarray(x["w"]) - np.asarray(start["w"])).ravel() for x in (exact, params))
    assert np.corrcoef(way, other)[0, 1] > 0.97 and abs(np.dot(way, other) / np.dot(way, way) - 1) < 0.03
    assert int(skipped(state)) == 0


def test_a_gradient_that_is_not_finite_changes_nothing():
    tx, params = adamw(1e-3, ONE_BYTE), params_of(ONE_BYTE)
    params, state = trained(tx, params)
    for bad in (np.inf, np.nan, 3e38):  # the square of the last one is infinite
        grads = grads_of(9) | {"w": grads_of(9)["w"].at[3, 200].set(bad)}
        updates, after = jax.jit(tx.update)(grads, state, params)
        assert bits(after.adam) == bits(state.adam) and int(after.skipped) == 1
        assert bits(fp8jax.apply_updates(params, updates)) == bits(params)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_same_bits_on_any_devices(stage):
    zero = Zero(jax.make_mesh((4,), ("data",)), ONE_BYTE, stage=stage)
    # The columns of the second are shared; both have whole groups on each device.
    for shape in ((64, 256), (6, 512)):
        alone = trained(adamw(1e-3, ONE_BYTE), params_of(ONE_BYTE, shape), 3, shape)
        params = zero.place(params_of(ONE_BYTE, shape))
        assert bits(trained(adamw(1e-3, ONE_BYTE, zero=zero), params, 3, shape)) == bits(alone)


@pytest.mark.parametrize("columns", [320, 480])
def test_shards_that_cut_groups_are_refused(columns):
    zero = Zero(jax.make_mesh((4,), ("data",)), ONE_BYTE, stage=1)
    with pytest.raises(ValueError, match=rf"`zero`: .* \(6, {columns}\)"):
        adamw(1e-3, ONE_BYTE, zero=zero).init(params_of(ONE_BYTE, (6, columns)))


def test_states_of_fp8_become_states_of_one_byte_and_back():
    params, state = trained(adamw(1e-3, "fp8"), params_of("fp8"))
    with pytest.raises(ValueError, match="second moments: root of FP16 instead of root of E4M4"):
        adamw(1e-3, ONE_BYTE).update(grads_of(0), state, params)
    changed = convert(state, params, ONE_BYTE)
    assert jax.tree.structure(changed) == jax.tree.structure(adamw(1e-3, ONE_BYTE).init(params))
    ratio = np.sqrt(np.asarray(moments(changed)[1]["w"]) / np.asarray(moments(state)[1]["w"]))
    assert np.abs(ratio - 1).max() < 0.04 and np.abs(ratio.mean() - 1) < 1e-3
    jax.jit(adamw(1e-3, ONE_BYTE).update)(grads_of(0), changed, params)
    again = convert(changed, params, "fp8")
    np.testing.assert_allclose(moments(again)[1]["w"], moments(changed)[1]["w"], rtol=2e-3)


def test_states_go_through_flax_bytes_and_nnx():
    params, state = trained(adamw(1e-3, ONE_BYTE), params_of(ONE_BYTE))
    back = serialization.from_bytes(state, serialization.to_bytes(state))
    assert bits(back) == bits(state) and jax.tree.structure(back) == jax.tree.structure(state)
    model = fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), ONE_BYTE)
    optimizer = nnx.Optimizer(model, adamw(1e-2, ONE_BYTE), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = fp8jax.value_and_grad(lambda model: jnp.mean((model(jnp.ones((16, 32))) - 1) ** 2))(
            model
        )
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_recipes_with_one_byte():
    assert str(Recipe.parse(ONE_BYTE)) == ONE_BYTE
    with pytest.raises(ValueError, match=r"moments=E5M2\+E4M4 stores the second moment's root"):
        Recipe.parse("fp8,moments=E5M2+E4M4,rounding=stochastic+kahan+value")
    row = chart.measure(ONE_BYTE, devices=1)
    assert row.differences == [] and row.cells["moments"].formats == "FP8 + FP8"
    assert row.cells["rounding"].formats == "stochastic + kahan + root"


def test_an_optimizer_of_torch_refuses_it():
    torch = pytest.importorskip("torch")
    import fp8jax_torch

    model = torch.nn.Linear(32, 32)
    optimizer = fp8jax_torch.optim.AdamW(model.parameters(), recipe=ONE_BYTE)
    model(torch.ones(16, 32)).sum().backward()
    with pytest.raises(ValueError, match="`recipe`: PyTorch has no E4M4 here; take moments=E5M2"):
        optimizer.step()


# A storage from outside ###########################################################################


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RootBF16(Storage):
    """A root in bfloat16, as CONTRIBUTING.md says."""

    root: jax.Array

    name = "root of BF16"

    @classmethod
    def zeros(cls, param, *, signed):
        return cls(jnp.zeros_like(param.data if is_scaled(param) else param, jnp.bfloat16))

    def dequantize(self):
        return jnp.square(self.root.astype(jnp.float32))

    def encode(self, x, scale, random):
        return RootBF16(jnp.sqrt(x).astype(jnp.bfloat16))


@pytest.fixture
def bf16(monkeypatch):
    monkeypatch.setitem(legal_values._LEGAL, "moments", (*legal_values._LEGAL["moments"], ("E5M2", "BF16")))
    monkeypatch.setitem(storage.STORAGES, RootBF16.name, RootBF16)
    return "fp8,moments=E5M2+BF16"


def test_a_new_storage(bf16):
    params, state = trained(adamw(1e-3, bf16), params_of(bf16), 20)
    assert isinstance(state.adam.nu["w"], RootBF16)
    _, wanted = trained(adamw(1e-3, "te"), params_of("te"), 20)
    np.testing.assert_allclose(moments(state)[1]["w"], moments(wanted)[1]["w"], rtol=0.1)
    row = chart.measure(bf16, devices=1)
    assert row.cells["moments"].formats == "FP8 + BF16" and row.differences == []
    zero = Zero(jax.make_mesh((4,), ("data",)), bf16, stage=1)
    assert bits(trained(adamw(1e-3, bf16, zero=zero), zero.place(params_of(bf16)), 20)) == bits(
        (params, state)
    )
    changed = convert(convert(state, params, "fp8"), params, bf16)
    assert jax.tree.structure(changed) == jax.tree.structure(state)


def test_half_a_storage_raises(bf16, monkeypatch):
    monkeypatch.delitem(storage.STORAGES, RootBF16.name)
    with pytest.raises(
        NotImplementedError, match=r"an entry in `fp8jax.optim.storage.STORAGES`; got 'root of BF16'"
    ):
        adamw(1e-3, bf16).init(params_of(bf16))

    @dataclasses.dataclass(frozen=True, eq=False)
    class Half(Storage):
        root: jax.Array
        name = RootBF16.name

        @classmethod
        def zeros(cls, param, *, signed):
            return cls(param)

    monkeypatch.setitem(storage.STORAGES, RootBF16.name, Half)
    with pytest.raises(TypeError, match="abstract methods.*dequantize.*encode"):
        adamw(1e-3, bf16).init(params_of(bf16))
