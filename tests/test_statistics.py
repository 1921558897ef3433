"""`fp8jax.statistics` against float64 NumPy, what-if against transformed models, frameworks, optimizers."""

import functools
import itertools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import fp8jax
from fp8jax.dot import ExpertSharding
from fp8jax.dot.ragged import high_precision_ragged_dot
from fp8jax.inspect import numerics
from fp8jax.inspect.numerics.rows import OUTLIER, WEAK, as_json

RECIPES = ("te", "te,fp8_format=E4M3", "mxfp8", "O2")
X = np.array(
    jax.random.normal(jax.random.key(0), (96, 64)) * np.exp(np.linspace(-12, 0, 64))[None], np.float32
)
X[:, 5] *= 300


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, use_bias=False, name="down")(nn.relu(nn.Dense(64, name="up")(x)))


class OfNNX(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 32, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def mean_square(y):
    return jnp.mean(jnp.square(y))


@functools.cache
def variables():
    return Linen().init(jax.random.key(1), X)


def loss_of(model):
    return lambda variables, x: mean_square(model.apply(variables, x))


plain_loss = loss_of(Linen())


def rows_of(found):
    return {(row.name, row.operand, row.recipe): row for row in found.rows}


@functools.cache
def plain_rows():
    return rows_of(jax.jit(fp8jax.statistics(plain_loss, [*RECIPES, "block", "nvfp4"]))(variables(), X))


def tensors():
    """Input, kernel, output gradient and weight gradient of "up", from JAX alone."""
    params = variables()["params"]

    def loss(shift, params):
        y = X @ params["up"]["kernel"] + params["up"]["bias"][None] + shift
        return mean_square(nn.relu(y) @ params["down"]["kernel"])

    of_shift, of_params = jax.grad(loss, argnums=(0, 1))(jnp.zeros((96, 64)), params)
    found = (X, params["up"]["kernel"], of_shift, of_params["up"]["kernel"])
    return dict(zip(numerics.OPERANDS, map(np.asarray, found), strict=True))


E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)


def by_tensor(x, format):
    """Quantized on one scale, in float64."""
    dtype, limit = format
    scale = np.abs(x).max() / limit
    return (x / scale).astype(dtype).astype(np.float64) * scale


def by_32(x, axis):
    """MXFP8: a power of two, rounded up, for each 32 entries along an axis."""
    x = np.moveaxis(x, axis, -1)
    blocks = x.reshape(-1, 32)
    exact = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-30) / 448.0
    scale = np.exp2(np.ceil(np.log2(exact)))
    q = (blocks / scale).astype(E4M3[0]).astype(np.float64) * scale
    return np.moveaxis(q.reshape(x.shape), -1, axis)


def by_blocks(x, rows, columns):
    """A power of two, rounded up, for each block; the last ones may be smaller."""
    q = np.zeros_like(x)
    for row, column in itertools.product(range(0, len(x), rows), range(0, x.shape[1], columns)):
        at = np.s_[row : row + rows, column : column + columns]
        q[at] = stored(x[at]) if x[at].any() else 0
    return q


def by_nvfp4(x, rows):
    """E2M1, an E4M3 scale for each block of `rows` and 16 columns, and one for the tensor."""
    whole, q = np.abs(x).max() / (6.0 * 448.0), np.zeros_like(x)
    for row, column in itertools.product(range(0, len(x), rows), range(0, x.shape[1], 16)):
        at = np.s_[row : row + rows, column : column + 16]
        scale = (np.abs(x[at]).max() / 6.0 / whole).astype(E4M3[0]).astype(np.float64) * whole
        codes = np.clip(x[at] / (scale or 1.0), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        q[at] = codes.astype(np.float64) * scale
    return q


def stored(x):
    """An E4M3 weight gradient, on a power of two."""
    scale = np.exp2(-np.floor(np.log2(448.0 / np.abs(x).max())))
    return (x / scale).astype(E4M3[0]).astype(np.float64) * scale


def weak_channels(x, q, axis):
    noise, signal = (np.sum(part**2, axis) for part in (x - q, x))
    return np.sum((signal > 0) & (noise > signal * 10 ** (-WEAK / 10)))


EXPECTED = {
    ("te", "input"): lambda x: by_tensor(x, E4M3),
    ("te", "kernel"): lambda x: by_tensor(x, E4M3),
    ("te", "output gradient"): lambda x: by_tensor(x, E5M2),
    ("te", "weight gradient"): lambda x: x,
    ("te,fp8_format=E4M3", "output gradient"): lambda x: by_tensor(x, E4M3),
    ("mxfp8", "input"): lambda x: by_32(x, 1),
    ("mxfp8", "kernel"): lambda x: by_32(x, 0),
    ("mxfp8", "output gradient"): lambda x: by_32(x, 1),
    ("block", "input"): lambda x: by_blocks(x, 1, 128),
    ("block", "kernel"): lambda x: by_blocks(x, 128, 128),
    ("block", "output gradient"): lambda x: by_blocks(x, 1, 128),
    ("nvfp4", "input"): lambda x: by_nvfp4(x, 1),
    ("nvfp4", "kernel"): lambda x: by_nvfp4(x, 16),
    ("O2", "weight gradient"): stored,
}


@pytest.mark.parametrize(("recipe", "operand"), EXPECTED)
def test_against_float64(recipe, operand):
    x = tensors()[operand].astype(np.float64)
    q, row = EXPECTED[recipe, operand](x), plain_rows()["up", operand, recipe]
    nonzero, noise = x != 0, np.sum((x - q) ** 2)
    assert row.amax == pytest.approx(np.abs(x).max(), rel=1e-5)
    assert row.underflow == pytest.approx(np.mean(q[nonzero] == 0), abs=2e-3)
    assert row.saturation == 0 or recipe == "nvfp4"  # its scales are rounded down, too
    assert row.sqnr == (pytest.approx(10 * np.log10(np.sum(x**2) / noise), abs=0.02) if noise else np.inf)
    ends = np.abs(q[q != 0])
    weak = [weak_channels(x, q, axis) for axis in range(1 + (operand in ("kernel", "weight gradient")))]
    assert row.weak == sum(weak)
    assert row.range == pytest.approx(np.log2(ends.max() / ends.min()), abs=0.6)  # of one rare smallest code
    sides = [np.abs(x).max(0)] + [np.abs(x).max(1)] * (operand in ("kernel", "weight gradient"))
    assert row.outliers == sum(np.sum(side > OUTLIER * np.median(side[side > 0])) for side in sides)


def test_underflow_and_outliers_are_there():
    """The numbers of the test above are not all zero."""
    row = plain_rows()["up", "input", "te"]
    assert row.underflow > 0.05 and row.outliers > 0 and 0 < row.weak < 64
    assert plain_rows()["up", "input", "mxfp8"].underflow < row.underflow / 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_if_is_the_statistic_of_a_transformed_model(recipe):
    model = fp8jax.transform(Linen(), recipe)
    loss = loss_of(model)
    found = rows_of(jax.jit(fp8jax.statistics(loss, ["te"]))(model.init(jax.random.key(1), X), X))
    for operand in ("input", "kernel"):
        own, other = found["up", operand, recipe], plain_rows()["up", operand, recipe]
        assert own.is_own and not other.is_own
        stored_in_16_bits = recipe == "O2" and operand == "kernel"
        assert own[5:] == pytest.approx(other[5:], rel=1e-3 if stored_in_16_bits else 1e-6)


def test_saturation_of_the_models_own_state():
    """A delayed scale of smaller inputs clips larger ones, in float64 as many."""
    model = fp8jax.transform(Linen(), "te")
    loss = loss_of(model)
    _, _, after = jax.jit(fp8jax.value_and_grad(loss))(model.init(jax.random.key(1), X), X)
    rows = rows_of(jax.jit(fp8jax.statistics(loss, ["te", "current"]))(after, 4 * X))
    clipped = np.mean(4 * np.abs(X.astype(np.float64)) > np.abs(X).max())
    assert clipped > 0
    assert rows["up", "input", "te"].saturation == pytest.approx(clipped, rel=1e-5)
    assert rows["up", "input", "te,scaling=current"].saturation == 0


def test_stacked_layers_have_rows_of_their_own():
    factors = jnp.array([1.0, 4.0, 1.0])[:, None, None]
    kernels = jax.random.normal(jax.random.key(2), (3, 64, 64)) / 8 * factors

    def loss(params, x):
        def step(x, kernel):
            return jnp.tanh(x @ kernel), None

        return mean_square(jax.lax.scan(jax.checkpoint(step), x, params["stack"])[0])

    rows = rows_of(jax.jit(fp8jax.statistics(loss, ["te"]))({"stack": kernels}, X))
    amaxes = [rows[f"stack[{i}]", "kernel", "te"].amax for i in range(3)]
    assert amaxes == pytest.approx(np.abs(kernels).max((1, 2)))


SIZES = (40, 0, 24, 8)  # of experts; 24 rows more are of none


def experts_loss(over=None):
    def loss(params, x):
        y = high_precision_ragged_dot(x, params["up"]["kernel"], jnp.array(SIZES), over)
        return jnp.sum(jnp.sin(y)) / 100

    return loss


def expert_kernels():
    return jax.random.normal(jax.random.key(3), (4, 64, 32)) * jnp.array([1.0, 2.0, 1.0, 0.1])[:, None, None]


@pytest.mark.parametrize("own", [None, "te", "mxfp8"])
def test_an_expert_has_the_rows_of_a_layer_of_its_own(own):
    def found_of(loss, kernel, x):
        loss = loss if own is None else fp8jax.transform(loss, own)
        params = {"up": {"kernel": kernel}}
        variables = params if own is None else loss.init(params, x)
        return rows_of(jax.jit(fp8jax.statistics(loss, ["te", "mxfp8", "O2", "nvfp4"]))(variables, x))

    found = found_of(experts_loss(), expert_kernels(), X)
    starts = np.cumsum((0, *SIZES))
    assert {name for name, *_ in found} == {"up[0]", "up[2]", "up[3]"}
    for number in (0, 2, 3):
        one = lambda params, x: jnp.sum(jnp.sin(x @ params["up"]["kernel"])) / 100  # noqa: E731
        alone = found_of(one, expert_kernels()[number], X[starts[number] : starts[number + 1]])
        assert len(alone) in (16, 20)
        assert own or alone["up", "input", "nvfp4"].saturation > 0
        for (_, *key), row in alone.items():
            if key == ["output gradient", "nvfp4"]:  # rounded stochastically
                continue
            of_expert = found[f"up[{number}]", *key]
            assert of_expert.is_own == row.is_own
            assert of_expert[5:] == pytest.approx(row[5:], rel=1e-4, abs=1e-6), (number, key)


def test_experts_on_two_devices():
    """Each device has half of the rows, and those past its experts' are of none."""
    over = ExpertSharding(Mesh(np.array(jax.devices()[:2]), "expert"), "expert")
    params, parts = {"up": {"kernel": expert_kernels()}}, (X[:40], X[48:80], X[40:48], X[80:])
    measure = lambda over, x: jax.jit(fp8jax.statistics(experts_loss(over), ["te"]))(params, x)  # noqa: E731
    shared, alone = measure(over, X), measure(None, np.concatenate(parts))
    assert [row[5:] for row in shared.rows] == [pytest.approx(row[5:], rel=1e-5) for row in alone.rows]


def test_a_shared_layer_is_the_mean_of_its_uses():
    kernel = jax.random.normal(jax.random.key(2), (64, 64))
    parts = jnp.stack([X[:48], X[48:] ** 3])

    def loss(params, parts):
        def step(total, x):
            return total + mean_square(x @ params["w"]), None

        return jax.lax.scan(step, 0.0, parts)[0]

    measure = jax.jit(fp8jax.statistics(loss, ["te"]))
    both, *each = (
        rows_of(measure({"w": kernel}, x))["w", "input", "te"] for x in (parts, parts[:1], parts[1:])
    )
    assert each[0].underflow != each[1].underflow
    assert both.underflow == pytest.approx(np.mean([row.underflow for row in each]), rel=1e-5)
    noise = np.mean([10 ** (-row.sqnr / 10) for row in each])
    assert both.sqnr == pytest.approx(-10 * np.log10(noise), rel=1e-5)
    assert both.amax == max(row.amax for row in each)


@pytest.mark.parametrize("recipe", [None, "te"])
def test_nnx_modules_stay_as_they_are(recipe):
    model = OfNNX() if recipe is None else fp8jax.transform(OfNNX(), recipe, inputs=(X,))
    model.calls = nnx.Variable(jnp.zeros(()))
    before = jax.tree.map(jnp.copy, nnx.state(model))

    def loss(model, x):
        model.calls.set_value(model.calls.get_value() + 1)
        return mean_square(model(x))

    rows = rows_of(fp8jax.statistics(loss, ["te"])(model, X))
    assert {name for name, *_ in rows} == {"up", "down"}
    assert rows["up", "input", "te"].is_own == (recipe is not None)
    assert rows["up", "input", "te"].underflow == pytest.approx(plain_rows()["up", "input", "te"].underflow)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_the_recipe_and_rules_of_a_module():
    """A class is a rule for the layers that it was chosen for, and NumPy's numbers go into a file."""
    rules = [fp8jax.Rule(kind=nnx.Linear, smaller_than=np.int64(4096)), fp8jax.Rule("up", "margin=1")]
    model = fp8jax.transform(OfNNX(), "te", rules=rules, inputs=(X,))
    rows = fp8jax.statistics(lambda model, x: mean_square(model(x)), ["te"])(model, X).rows
    assert str(rows.recipe) == "te"
    assert rows.rules == ((fp8jax.Rule("re:down"), ("down",)), (fp8jax.Rule("up", "margin=1"), ("up",)))
    rule = fp8jax.Rule("down", smaller_than=np.int64(4096))
    assert json.loads(as_json(numerics.Rows(rows, rules=[(rule, ("down",))])))["rules"] == [
        [{"path": "down", "smaller_than": 4096}, ["down"]]
    ]


def test_a_slice_of_rows_is_of_the_same_model():
    row = numerics.OperandRow("first", (), "input", "te", True, 3.0, 0.1, 0.0, 31.0, 2.0, 0, 0, 4)
    of_model = fp8jax.Recipe.TE, ((fp8jax.Rule("first"), ("first",)),), ("other",)
    rows = numerics.Rows((row, row._replace(operand="kernel")), *of_model)
    assert rows[:1].rules == rows.rules and rows[:1] == numerics.Rows((row,), *of_model)
    assert rows[1].operand == "kernel"
    assert len(rows) == len(list(rows)) == 2 and row in rows
    assert rows != numerics.Rows(rows.rows) and rows != rows.rows


def test_training_steps_are_the_same_program():
    """Statistics leave nothing behind: the next trace of a step is the one before."""
    model = fp8jax.transform(Linen(), "te")
    first = model.init(jax.random.key(1), X)

    def text():
        return jax.jit(fp8jax.value_and_grad(loss_of(model))).lower(first, X).as_text()

    before = text()
    assert fp8jax.statistics(loss_of(model), ["te"])(first, X).rows
    assert text() == before


def test_layers_below_a_stop_gradient_are_named(tmp_path):
    params = {name: variables()["params"]["up"]["kernel"] for name in ("frozen", "trained")}

    def loss(params, x, stops=("frozen",)):
        for name in params:
            x = jnp.tanh(x @ params[name])
            x = jax.lax.stop_gradient(x) if name in stops else x
        return mean_square(x)

    found = fp8jax.statistics(loss, ["current"])(params, X)
    found.save(tmp_path / "rows.json")
    note = "not measured, since no gradient reaches them: frozen"
    assert str(found).splitlines()[-1] == note
    assert note in fp8jax.advise(numerics.load(tmp_path / "rows.json"), target="h100").reasons
    other = fp8jax.statistics(lambda params, x: loss(params, x, ()), ["current"])(params, X)
    assert not any(
        "not measured" in reason for reason in fp8jax.advise([found, other], target="h100").reasons
    )
    none = fp8jax.statistics(lambda params, x: loss(params, x, params), ["current"])(params, X)
    with pytest.raises(ValueError, match="with rows; got none. No gradient reaches: frozen, trained.$"):
        fp8jax.advise(none, target="h100")


def test_a_model_with_adapters_does_not_warn_of_its_state(recwarn):
    model = fp8jax.transform(Linen(), "te", lora=fp8jax.LoRA(rank=2))
    found = fp8jax.statistics(loss_of(model), ["te"])(model.init(jax.random.key(1), X), X)
    assert {row.layer for row in found.rows if row.is_own} == {"up", "down"}
    assert not [str(each.message) for each in recwarn if "scaling state" in str(each.message)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statistics_under_x64(dtype):
    """The numbers are float32, and those without x64."""
    want = jax.jit(fp8jax.statistics(plain_loss, RECIPES))(variables(), X)
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: np.asarray(x, dtype), (variables(), X))
        found = jax.jit(fp8jax.statistics(plain_loss, RECIPES))(*inputs)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    for a, b in zip(found.rows, want.rows, strict=True):
        assert a[:3] == b[:3]
        np.testing.assert_allclose(a.sqnr, b.sqnr, rtol=1e-4)


def test_rules_and_errors():
    rule = fp8jax.Rule("down")
    found = fp8jax.statistics(plain_loss, ["te"], rules=[rule])(variables(), X)
    assert {row.layer for row in found.rows} == {"up"}
    for one in ("te", fp8jax.Recipe.parse("te")):
        assert fp8jax.statistics(plain_loss, one, rules=[rule])(variables(), X).layers == found.layers
    with pytest.raises(ValueError, match="no layer"):
        fp8jax.statistics(plain_loss, ["te"], rules=[fp8jax.Rule("other")])(variables(), X)
    with pytest.raises(ValueError, match="`recipes`: expected at least one"):
        fp8jax.statistics(plain_loss, [])
    with pytest.raises(ValueError, match="got none"):
        fp8jax.statistics(lambda params: jnp.sum(params["bias"]), ["te"])({"bias": jnp.ones(64)})


def test_a_vmap_of_a_transformed_model():
    """Rows are those of a loop over the examples; a vmap over parameters hides the model's layers."""
    params = variables()["params"]
    fn = lambda p, x: x @ p["up"]["kernel"]  # noqa: E731
    over_examples = lambda fn: jax.vmap(fn, in_axes=(None, 0))  # noqa: E731
    model = fp8jax.transform(fn, "current")
    inside = fp8jax.transform(over_examples(fn), "current")
    x, stacked = X.reshape(2, 48, 64), jax.tree.map(lambda w: jnp.stack([w, w]), params)
    with pytest.raises(ValueError, match="put the vmap into the function that you transform"):
        fp8jax.statistics(lambda p, x: mean_square(jax.vmap(model)(p, x)), "current")(stacked, x)
    rows, each = (
        fp8jax.statistics(lambda p, x: mean_square(of_batch(p, x)), "current")(params, x).rows  # noqa: B023
        for of_batch in (over_examples(model), lambda p, x: jnp.stack([model(p, one) for one in x]))
    )
    assert [(row.layer, row.operand) for row in rows] == [(row.layer, row.operand) for row in each]
    for name in ("amax", "underflow", "sqnr", "outliers"):
        got, wanted = ([getattr(row, name) for row in some] for some in (rows, each))
        np.testing.assert_allclose(got, wanted, rtol=1e-3)
    assert fp8jax.statistics(lambda p, x: mean_square(inside(p, x)), "current")(params, x).rows
    assert fp8jax.statistics(lambda p, x: mean_square(over_examples(fn)(p, x)), "current")(params, x).rows


def test_an_input_without_rows():
    params = variables()["params"]

    def loss(params, x):
        outputs = [rows @ params["up"]["kernel"] for rows in (x[:0], x)]
        return jnp.square(jnp.concatenate(outputs)).mean()

    assert fp8jax.statistics(loss, "current")(params, X).rows


def test_rows_as_json_and_merged(tmp_path):
    found = fp8jax.statistics(plain_loss, ["te"])(variables(), X)
    found.save(tmp_path / "rows.json")
    assert numerics.load(tmp_path / "rows.json") == found.rows
    assert vars(numerics.load(tmp_path / "rows.json")) == vars(found.rows)
    merged = found.merged(fp8jax.statistics(plain_loss, ["te"])(variables(), 2 * X)).rows
    assert merged[0].amax == pytest.approx(2 * found.rows[0].amax)
    assert merged[0].underflow == pytest.approx(found.rows[0].underflow)
    (tmp_path / "rows.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected rows of fp8jax.statistics"):
        numerics.load(tmp_path / "rows.json")


@pytest.mark.parametrize(("recipe", "lost"), [("O2", True), ("fp8", False)])
def test_updates_lost_to_rounding(recipe, lost):
    """FP16 weights ignore steps below half of their last bit; the byte of `fp8` keeps them."""
    params = {"w": fp8jax.quantize(jax.random.normal(jax.random.key(0), (64, 64)), "FP16", power_of_two=True)}
    tx = fp8jax.optim.adamw(1e-6, recipe, weight_decay=0.0)
    grads = {"w": jax.random.normal(jax.random.key(1), (64, 64)).at[0].set(0)}
    state = tx.init(params)
    updates, new = tx.update(grads, state, params)
    after = fp8jax.apply_updates(params, updates)
    row = numerics.step_statistics(grads, (params, state), (after, new))["w"]
    changed = (np.asarray(params["w"]) != np.asarray(after["w"]))[1:].mean()
    assert row.lost == pytest.approx(1 - changed, abs=1e-6) if lost else row.lost < 0.05 < 1 - changed
    assert lost == (row.lost > 0.9)


@pytest.mark.parametrize("second", ["1", "2"])
@pytest.mark.parametrize("of_subtrees", [False, True])
def test_step_of_partitioned_optimizers(second, of_subtrees):
    """A parameter has the moments of the optimizer that updates it, and a frozen one none. A label of a
    subtree masks the whole subtree by one node."""
    w = jax.random.normal(jax.random.key(0), (64, 64))
    params = {name: {"w": w, "b": w[:, 1]} for name in ("first", "second", "frozen")}
    grads = jax.tree.map(lambda x: x.at[0].set(0), params)
    transforms = {name: fp8jax.optim.adamw(1e-3, "te") for name in ("1", second)}
    labels = {"first": "1", "second": second, "frozen": "-"}
    if not of_subtrees:
        labels = {
            name: jax.tree.map(lambda _, label=label: label, params[name]) for name, label in labels.items()
        }
    tx = optax.partition({**transforms, "-": optax.set_to_zero()}, labels)
    state = tx.init(params)
    updates, new = tx.update(grads, state, params)
    rows = numerics.step_statistics(grads, (params, state), (optax.apply_updates(params, updates), new))
    for name in "wb":
        assert rows[f"first/{name}"] == rows[f"second/{name}"] == (0.0, 0.0, 0.0)
        lost, *moments = rows[f"frozen/{name}"]
        assert lost == 1.0 and np.isnan(moments).all()


def test_moments_that_underflow():
    """E4M3 holds 2**-10 of the largest moment as a code, and nothing below it."""
    grads = {"w": jnp.array([[1.0, 1e-2, 1e-7, 0.0]] * 32)}
    params = {"w": jnp.zeros((32, 4))}
    tx = fp8jax.optim.adamw(1e-3, "O2")
    updates, new = tx.update(grads, tx.init(params), params)
    after = fp8jax.apply_updates(params, updates)
    row = numerics.step_statistics(grads, (params, tx.init(params)), (after, new))["w"]
    assert row.first_underflow == pytest.approx(1 / 3)
    assert row.second_underflow == pytest.approx(1 / 3)


def test_saved_rows_are_strict_json(tmp_path):
    """Null stands for infinity and NaN. Older files, which have them, load, too."""
    nan, inf = float("nan"), float("inf")
    names = ("first", (), "input", "te", True)
    rows = [
        numerics.OperandRow(*names, 3.0, 0.1, 0.0, inf, 2.0, 0, 0, 4),  # nothing is rounded
        numerics.OperandRow(*names, inf, nan, 0.0, nan, 0.0, 4, 0, 4),
    ]
    (tmp_path / "new.json").write_text(as_json(rows))
    (tmp_path / "old.json").write_text(json.dumps([row._asdict() for row in rows]))
    json.loads((tmp_path / "new.json").read_text(), parse_constant=pytest.fail)
    for name in ("new", "old"):
        assert str(list(numerics.load(tmp_path / f"{name}.json"))) == str(rows)
