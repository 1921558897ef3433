"""Muon with quantized weights, gradients and momentum."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import fp8jax
from fp8jax import Recipe, ScaledArray, quantize
from fp8jax.comm import Zero
from fp8jax.optim import convert, moments, muon, skipped
from fp8jax.optim.step import arithmetic
from fp8jax.optim.storage import LinearInt8
from fp8jax.quantization import as_gradients, is_scaled, value

Axes = optax.contrib.MuonDimensionNumbers
SHAPES = {"wide": (32, 96), "tall": (96, 32), "stack": (3, 32, 48), "bias": (48,)}


def weight_of(name, weight):
    x = jnp.asarray(np.random.default_rng(len(name)).normal(0, 0.05, SHAPES[name]), jnp.float32)
    if weight == "FP32" or name == "bias":
        return x
    return quantize(x, weight, power_of_two=True, blocks=(3, 1, 1) if name == "stack" else ())


def params_of(recipe):
    return {name: weight_of(name, Recipe.parse(recipe).weight) for name in SHAPES}


def grads_of(number):
    random = np.random.default_rng(number + 1)
    return {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def trained(tx, params, steps=4, every=grads_of):
    state, update = tx.init(params), jax.jit(tx.update)
    for number in range(steps):
        updates, state = update(every(number), state, params)
        params = fp8jax.apply_updates(params, updates)
    return params, state


def values(tree):
    return {name: np.asarray(value(leaf)) for name, leaf in tree.items()}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


DIMENSIONS = {"wide": Axes(), "tall": Axes(), "stack": Axes(1, 2), "bias": None}


def distance(params, wanted, start):
    """How far the matrices are from the wanted ones, relative to their way."""
    params, wanted, start = map(values, (params, wanted, start))
    return max(
        np.linalg.norm(params[name] - wanted[name]) / np.linalg.norm(wanted[name] - start[name])
        for name in ("wide", "tall", "stack")
    )


@pytest.fixture
def float32_iteration(monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(arithmetic, "DTYPE", jnp.float32)
    yield monkeypatch.setattr(arithmetic, "COEFFICIENTS", (3.4445, -4.775, 2.0315))
    jax.clear_caches()


@pytest.mark.parametrize("options", [{}, {"consistent_rms": 0.2}, {"weight_decay": 0.5, "beta": 0.8}])
def test_steps_are_those_of_optax(options, float32_iteration):
    """Where the Newton-Schulz iteration is in float32, as optax's."""
    start = params_of("te")
    tx = muon(1e-2, "te", **options, weight_dimension_numbers=DIMENSIONS)
    theirs = optax.contrib.muon(
        1e-2, **options, muon_weight_dimension_numbers=DIMENSIONS, mu_dtype=jnp.float32
    )
    params, wanted = trained(tx, start), trained(theirs, start)
    assert distance(params[0], wanted[0], start) < 1e-4
    for other in ({"beta": 0.9}, {"consistent_rms": 0.3}, {"weight_decay": 2.0}):
        off = muon(1e-2, "te", **{**options, **other}, weight_dimension_numbers=DIMENSIONS)
        assert distance(trained(off, start)[0], wanted[0], start) > 0.02
    [theirs] = [x for x in jax.tree.leaves(wanted[1], is_leaf=is_muon) if is_muon(x)]
    np.testing.assert_allclose(moments(params[1])[0]["stack"], theirs.mu["stack"], rtol=1e-5, atol=1e-7)


def is_muon(node):
    return isinstance(node, optax.contrib.MuonState)


@pytest.mark.parametrize("recipe", ["O1", "O2", "O3", "fp8", "fp8,moments=E5M2+E4M4", "te,weight=FP16"])
def test_quantized_steps_are_close(recipe):
    start = jax.tree.map(value, params_of(recipe), is_leaf=is_scaled)
    wanted, _ = trained(muon(1e-2, "te", weight_dimension_numbers=DIMENSIONS), start)
    params, state = trained(muon(1e-2, recipe, weight_dimension_numbers=DIMENSIONS), params_of(recipe))
    weights = {**params, **{name: x for name, x in state.master.items() if x is not None}}
    assert distance(weights, wanted, start) < (0.1 if recipe == "O2" else 0.05)
    assert moments(state)[1]["stack"] is None and moments(state)[1]["bias"] is not None
    assert int(skipped(state)) == 0 and int(state.adam.count) == 4


def test_hyperparameters_are_injected():
    options = {"beta": 0.9, "consistent_rms": 0.2, "weight_dimension_numbers": DIMENSIONS}
    injected = optax.inject_hyperparams(muon, static_args=("recipe", "weight_dimension_numbers"))
    start = params_of("fp8")
    got, _ = trained(injected(1e-2, "fp8", **options), start)
    assert distance(got, trained(muon(1e-2, "fp8", **options), start)[0], start) < 0.02


def test_five_bytes_per_parameter():
    params, state = trained(muon(1e-2, "fp8"), params_of("fp8"))
    size = params["wide"].size
    kept = params["wide"].data, state.adam.mu["wide"], state.adam.nu["wide"], state.remainder["wide"]
    each = [sum(x.nbytes for x in jax.tree.leaves(tree)) / size for tree in kept]
    assert each == [2, 1 + 1 / 96, 0, 1]  # a row of 96 has a scale; and the gradient's one


@pytest.mark.parametrize(("recipe", "tolerance"), [("te", 1e-5), ("O2", 0.1), ("fp8", 0.15)])
def test_the_rest_is_optaxs_adam(recipe, tolerance):
    options = {"adam_learning_rate": 3e-3, "adam_b1": 0.8, "adam_weight_decay": 0.1}
    start = {"bias": params_of("fp8")["bias"]}

    def every(number):
        return {"bias": grads_of(number)["bias"]}

    ours, _ = trained(muon(1e-2, recipe, **options), start, 4, every)
    wanted, _ = trained(optax.contrib.muon(1e-2, **options), start, 4, every)
    ours, wanted = (np.asarray(x["bias"] - start["bias"]) for x in (ours, wanted))
    assert np.linalg.norm(ours - wanted) < tolerance * np.linalg.norm(wanted)


def test_matrices_of_a_stack_are_orthogonalized_each():
    """A stack's directions are those of its matrices, and each has singular values near 1."""
    start, lr = params_of("O2"), 1.0
    params, _ = trained(muon(lr, "O2"), start, 1)
    moved = (values(params)["stack"] - values(start)["stack"]) / np.sqrt(48 / 32)
    for number in range(3):
        assert 0.4 < np.linalg.svd(moved[number])[1].min() and np.linalg.svd(moved[number])[1].max() < 1.4
        one = {"wide": ScaledArray(start["stack"].data[number], start["stack"].scale[number].reshape(()))}
        grads = {"wide": grads_of(0)["stack"][number]}
        alone, _ = trained(muon(lr, "O2"), one, 1, lambda _, grads=grads: grads)
        step = np.asarray(value(alone["wide"])) - np.asarray(value(one["wide"]))
        np.testing.assert_allclose(step / np.sqrt(48 / 32), moved[number], atol=2e-2)


def test_which_parameters_are_matrices():
    state = muon(1e-2, "te").init(params_of("te"))
    assert {name for name, nu in moments(state)[1].items() if nu is None} == {"wide", "tall"}
    state = muon(1e-2, "O2").init(params_of("O2"))
    assert {name for name, nu in moments(state)[1].items() if nu is None} == {"wide", "tall", "stack"}
    some = {"wide": Axes(), "tall": None, "stack": Axes((0, 1), 2), "bias": None}
    for given in (some, lambda params: {name: some[name] for name in params}):
        state = muon(1e-2, "O2", weight_dimension_numbers=given).init(params_of("O2"))
        assert {name for name, nu in moments(state)[1].items() if nu is None} == {"wide", "stack"}
    one_kernel = {"attention": {"kernel": jnp.ones((8, 2, 4))}}
    state = muon(1e-2, "te", weight_dimension_numbers={"attention": Axes(0, (1, 2))}).init(one_kernel)
    assert moments(state)[1]["attention"]["kernel"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": "O2"}, "The rate comes first"),
        ({"beta": 1.0}, "`beta`: expected a finite number from 0 on and below 1; got 1"),
        ({"consistent_rms": float("nan")}, "`consistent_rms`: expected a finite number"),
        ({"weight_decay": -1.0}, "`weight_decay`: expected a finite number"),
        ({"adam_b2": 1.5}, "`b2`"),
        (
            {"weight_dimension_numbers": {"wide": Axes(0, 2)}},
            r"expected axes of a parameter.* shape \(32, 96\)",
        ),
        ({"weight_dimension_numbers": {"wide": Axes(1, -1)}}, "none of them twice"),
        ({"weight_dimension_numbers": {"other": Axes()}}, "`weight_dimension_numbers`: expected a tree like"),
        ({"weight_dimension_numbers": {"wide": (0, 1)}}, "`weight_dimension_numbers`: expected"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        muon(**{"learning_rate": 1e-2, "recipe": "te", **options}).init({"wide": params_of("te")["wide"]})


@pytest.mark.parametrize("recipe", ["te", "O1", "O2", "O3", "fp8"])
def test_a_gradient_that_is_not_finite_changes_nothing(recipe):
    tx = muon(1e-2, recipe)
    params, state = trained(tx, params_of(recipe))
    for name in SHAPES:
        for bad in (np.inf, np.nan):
            grads = grads_of(9)
            grads[name] = grads[name].at[(0,) * grads[name].ndim].set(bad)
            updates, after = jax.jit(tx.update)(grads, state, params)
            assert bits(after.adam) == bits(state.adam) and int(after.skipped) == 1
            assert bits(fp8jax.apply_updates(params, updates)) == bits(params)


@pytest.mark.parametrize("recipe", ["O1", "O2", "fp8"])
def test_a_gradient_that_lost_its_tag_is_loud(recipe):
    """Arithmetic on an FP8 gradient's leaves makes the parameters NaN, and the state stays."""
    params, state = trained(muon(1e-2, recipe), params_of(recipe))

    def quantized(grads):
        return as_gradients(
            {
                name: x if name == "bias" else quantize(x, "E4M3", power_of_two=True)
                for name, x in grads.items()
            }
        )

    update = jax.jit(muon(1e-2, recipe).update)
    right, _ = update(quantized(grads_of(7)), state, params)
    assert np.isfinite(values(fp8jax.apply_updates(params, right))["wide"]).all()
    spoilt = jax.jit(lambda grads: jax.tree.map(lambda x: x + x, grads))(quantized(grads_of(7)))
    updates, after = update(spoilt, state, params)
    assert np.isnan(values(fp8jax.apply_updates(params, updates))["wide"]).any()
    assert bits(after.adam) == bits(state.adam)


def test_the_iteration_in_bfloat16():
    """Its rounding is amplified, as in Muon's reference, and is not to one side."""
    start = params_of("te")
    wanted, _ = trained(optax.contrib.muon(1e-2, muon_weight_dimension_numbers=DIMENSIONS), start)
    params, _ = trained(muon(1e-2, "te", weight_dimension_numbers=DIMENSIONS), start)
    assert distance(params, wanted, start) < 0.08
    way, ours = (values(tree)["wide"] - values(start)["wide"] for tree in (wanted, params))
    assert abs(np.vdot(ours, way) / np.vdot(way, way) - 1) < 0.02


@pytest.mark.parametrize(
    ("recipe", "stage"), [("te", 0), ("te", 1), ("te", 3), ("O3", 2), ("fp8", 1), ("fp8", 3)]
)
def test_sharded_steps(recipe, stage):
    """Sums of the iteration have another order over devices."""
    zero = Zero(jax.make_mesh((4,), ("data",)), recipe, stage=stage)
    alone, _ = trained(muon(1e-2, recipe), params_of(recipe))
    params, state = trained(muon(1e-2, recipe, zero=zero), zero.place(params_of(recipe)))
    assert distance(params, alone, params_of("te")) < (0.05 if recipe == "te" else 0.15)
    sharded = moments(state)[0]["wide"]
    codes = sharded.codes if isinstance(sharded, LinearInt8) else sharded
    assert codes.sharding.is_fully_replicated == (stage == 0)


def test_offloading_is_refused():
    zero = Zero(jax.make_mesh((4,), ("data",)), "fp8", stage=1, offload=True)
    with pytest.raises(ValueError, match="`zero`: expected one without `offload`"):
        muon(1e-2, "fp8", zero=zero)


def test_states_of_other_recipes_and_optimizers():
    params, state = trained(muon(1e-2, "O2"), params_of("O2"))
    with pytest.raises(ValueError, match=r"remainders: none instead of E4M3.*convert"):
        muon(1e-2, "fp8").update(grads_of(0), state, params)
    changed = convert(state, params, "fp8")
    assert jax.tree.structure(changed) == jax.tree.structure(muon(1e-2, "fp8").init(params))
    trained_on, _ = jax.jit(muon(1e-2, "fp8").update)(grads_of(0), changed, params)
    assert np.isfinite(values(fp8jax.apply_updates(params, trained_on))["wide"]).all()
    with pytest.raises(ValueError, match="second moments: none instead of FP16"):
        fp8jax.optim.adamw(1e-2, "O2").update(grads_of(0), state, params)
    adam = fp8jax.optim.adamw(1e-2, "O2").init(params)
    with pytest.raises(ValueError, match="second moments: FP16 instead of none"):
        muon(1e-2, "O2").update(grads_of(0), adam, params)


def test_a_resumed_run_goes_on_to_the_bit():
    tx = muon(1e-2, "fp8")
    whole = trained(tx, params_of("fp8"), 6)
    params, state = trained(tx, params_of("fp8"), 3)
    state = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    update = jax.jit(tx.update)
    for number in range(3, 6):
        updates, state = update(grads_of(number), state, params)
        params = fp8jax.apply_updates(params, updates)
    assert bits((params, state)) == bits(whole)


@pytest.mark.parametrize("recipe", ["te", "O2", "fp8"])
def test_muon_in_an_nnx_optimizer(recipe):
    model = fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), recipe)
    optimizer = nnx.Optimizer(model, muon(1e-2, recipe), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = fp8jax.value_and_grad(lambda model: jnp.mean((model(jnp.ones((16, 32))) - 1) ** 2))(
            model
        )
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


# The momentum's codec #############################################################################


def hostile(rows):
    """Rows of normal entries, zeros, one huge entry, subnormal numbers, and single signs."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 320)).astype(np.float32) * 10.0 ** random.integers(-30, 30, (rows, 1))
    x[1::7] = 0
    x[2::7, 5] = 3e38
    x[3::7] *= np.float32(1e-30)
    x[4::7] = np.abs(x[4::7])
    return x.astype(np.float32)


def test_codes_are_those_of_the_formula():
    """Of 10,000 hostile gradients, restated in float64, to nearest and at random."""
    x = hostile(10_000 // 320 * 7)
    random = np.random.default_rng(1).integers(0, 2**32, x.shape, np.uint32)
    for bits in (None, random):
        zeros = LinearInt8.zeros(jnp.zeros(x.shape), signed=True)
        got = jax.jit(lambda x, bits, zeros=zeros: zeros.encode(x, zeros.maxima(x), bits))(x, bits)
        groups = np.stack([np.abs(x[:, i : i + 128]).max(1) for i in range(0, x.shape[1], 128)], 1)
        # The quotient is rounded to float32, and a scale is at least 2**-126.
        least = np.maximum((groups / np.float32(127)).astype(np.float64), 2.0**-126)
        exponents = np.ceil(np.log2(least)).astype(int)
        normal = groups / np.float32(127) >= 2.0**-126
        np.testing.assert_array_equal(np.where(normal, got.exponents, 1), exponents + 127)
        scaled = x.astype(np.float64) / 2.0 ** np.repeat(exponents, 128, 1)[:, :320]
        uniform = 0.5 if bits is None else (bits >> 8) / 2.0**24
        wanted = np.clip(
            np.floor((scaled.astype(np.float32) + np.float32(uniform)).astype(np.float64)), -127, 127
        )
        is_normal = np.repeat(normal, 128, 1)[:, :320]
        np.testing.assert_array_equal(np.where(is_normal, got.codes, 0), np.where(is_normal, wanted, 0))
        error = np.abs(np.asarray(got, np.float64) - x) / 2.0 ** np.repeat(exponents, 128, 1)[:, :320]
        assert error[is_normal].max() <= (0.5 if bits is None else 1)


def test_random_rounding_has_no_bias():
    x = jnp.broadcast_to(jnp.linspace(-1, 1, 127), (10_000, 127))
    random = jax.random.bits(jax.random.key(0), x.shape)
    zeros = LinearInt8.zeros(x, signed=True)
    values = np.asarray(zeros.encode(x, zeros.maxima(x), random), np.float64)
    deviation = (values.mean(0) - np.asarray(x[0], np.float64)) / (values.std(0) / 100 + 1e-6)
    assert np.abs(deviation).max() < 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))), None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return layers(name="layers")(x)[0]


def test_stacked_biases_and_scales_are_no_matrices():
    x = jnp.ones((8, 32))
    variables = fp8jax.transform(Stacked(), "fp8").init(jax.random.key(0), x)
    with warnings.catch_warnings(action="error"):
        _, nu = moments(muon(1e-2, "fp8").init(variables["params"]))
    by_muon = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree.leaves_with_path(nu, is_leaf=lambda leaf: leaf is None)
        if leaf is None
    ]
    assert by_muon == ["layers/Dense_0/kernel", "layers/Dense_1/kernel"]


def test_plain_stacks_that_adam_updates_are_named():
    variables = fp8jax.transform(Stacked(), "te").init(jax.random.key(0), jnp.ones((8, 32)))
    with pytest.warns(UserWarning, match="muon updates layers/Dense_0/kernel, layers/Dense_1/kernel by Adam"):
        muon(1e-2, "te").init(variables["params"])


def test_groups_that_shards_would_cut():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    params = {"k": quantize(jnp.ones((100, 320)), "FP16", power_of_two=True)}
    with pytest.raises(ValueError, match="INT8 groups has a scale .* Leave the parameter to Adam, by"):
        muon(1e-2, "fp8", zero=Zero(mesh, "fp8", stage=1)).init(params)
