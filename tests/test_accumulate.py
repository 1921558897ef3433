"""Several microbatches, one gradient: in one call, and over optimizer calls."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8jax
from fp8jax import formats
from fp8jax.inspect import program
from fp8jax.optim import adamw, clip_by_global_norm, multi_steps, skipped
from fp8jax.quantization import is_scaled, value
from fp8jax.rewrite.interpreter.find import scan_parts
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

PARTS = 4
OUT = 48  # no side of a kernel is so small that it stays wide by default
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
X[5] *= 10  # one part has the largest amax
Y = np.random.default_rng(1).normal(size=(16, OUT)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(OUT, name="out")(scan(name="blocks")(x, None)[0])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.gelu(nn.Dense(32, name="fc")(x)), None


@functools.cache
def model_of(recipe):
    model = fp8jax.transform(Net(), recipe)
    return model, jax.jit(model.init)(jax.random.key(0), X)


def loss_of(model):
    return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)


def values(tree):
    return jax.tree.map(lambda leaf: np.asarray(value(leaf), np.float32), tree, is_leaf=is_scaled)


def norm(tree):
    return float(optax.tree.norm(values(tree)))


def difference(a, b):
    return norm(jax.tree.map(np.subtract, values(a), values(b))) / norm(b)


def compiles_quickly():
    return jax.config.read("jax_disable_most_optimizations")


@functools.cache
def parts_of(recipe, is_quick):
    """Gradients of the parts, each scaled by the first state."""
    assert is_quick == compiles_quickly()
    model, variables = model_of(recipe)
    grad = jax.jit(fp8jax.value_and_grad(loss_of(model)))
    return [grad(variables, X[i::PARTS], Y[i::PARTS]) for i in range(PARTS)]


@functools.cache
def accumulated(recipe, format, is_quick):
    assert is_quick == compiles_quickly()
    model, variables = model_of(recipe)
    return jax.jit(fp8jax.accumulate_gradients(loss_of(model), PARTS, format=format))(variables, X, Y)


@pytest.mark.usefixtures("optimized")  # amaxes to the bit
@pytest.mark.parametrize(
    "recipe, format",
    [
        pytest.param("te", "FP16", marks=pytest.mark.long),
        pytest.param("O2", "FP32", marks=pytest.mark.long),
        ("O2", "E4M3"),
        pytest.param("O3", "FP16", marks=pytest.mark.long),
    ],
)
def test_the_mean_of_the_parts_in_the_formats_of_one(recipe, format):
    loss, grads, new = accumulated(recipe, format, compiles_quickly())
    parts = parts_of(recipe, compiles_quickly())
    np.testing.assert_allclose(loss, np.mean([loss for loss, _, _ in parts]), rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(parts[0][1])
    jax.tree.map(lambda a, b: (a.dtype, a.shape) == (b.dtype, b.shape) or pytest.fail(), grads, parts[0][1])
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *(values(g) for _, g, _ in parts))
    # Rounding: at the end to E4M3, by 1/32 of a number at most in the mean square; in between, to the format.
    final = 2.0**-5 if recipe != "te" else 2.0**-20
    between = {"FP16": 2.0**-11, "FP32": 2.0**-23, "E4M3": 2.0**-4}[format] if recipe != "te" else 0
    assert difference(grads, mean) < final + between
    merged = jax.tree.map(lambda *leaves: np.max(leaves, axis=0), *(v[SCALING] for _, _, v in parts))
    state = new[SCALING]["blocks"]["fc"]["kernel"]
    expected = merged["blocks"]["fc"]["kernel"]
    np.testing.assert_array_equal(state["amax_history"], expected["amax_history"])
    np.testing.assert_array_equal(state["scale"], expected["scale"])


def test_accumulator_is_fp16():
    """The scan carries the kernels' sums in FP16: 2 bytes a number and a few scales."""
    model, variables = model_of("O2")
    grad = fp8jax.accumulate_gradients(loss_of(model), PARTS)
    [scan] = [eqn for eqn in _all(jax.make_jaxpr(grad)(variables, X, Y)) if _is_outer_scan(eqn)]
    _, carry, _ = scan_parts(scan, scan.invars)
    kernels = [v.aval for v in carry if v.aval.shape in ((2, 32, 32), (32, OUT))]
    assert len(kernels) == 2 and {aval.dtype for aval in kernels} == {jnp.dtype(jnp.float16)}


def _all(closed):
    for eqn in closed.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _all(inner)


def _is_outer_scan(eqn):
    if eqn.primitive.name != "scan" or eqn.params["length"] != PARTS:
        return False
    return len(scan_parts(eqn, eqn.invars)[1]) > 4


@pytest.mark.long
def test_auxiliary_outputs_and_keyword_arguments():
    """Auxiliary outputs of the microbatches are stacked, and keyword arguments are not split."""
    model, variables = model_of("te")

    def loss(variables, x, y, *, factor):
        assert factor.shape == (4,)
        out = model.apply(variables, x)
        return jnp.sum(factor) * jnp.mean((out - y) ** 2), out

    accumulate = jax.jit(fp8jax.accumulate_gradients(loss, PARTS, has_aux=True))
    (_, out), grads, new = accumulate(variables, X, Y, factor=jnp.ones(4))
    assert out.shape == (PARTS, 4, OUT)
    _, once, _ = accumulated("te", "FP16", compiles_quickly())
    assert difference(grads, jax.tree.map(lambda g: 4 * g, once)) < 1e-2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_batch_stays_on_its_devices(kind):
    """Each device computes its own rows of every microbatch, and gathers none."""
    model, variables = model_of("te")
    batch = np.tile(X, (16, 1)), np.tile(Y, (16, 1))
    grad = jax.jit(fp8jax.accumulate_gradients(loss_of(model), PARTS))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    one = grad.lower(variables, *batch).compile()
    with jax.set_mesh(mesh):
        variables = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))
        sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
        many = grad.lower(variables, *sharded).compile()
        got, _, _ = many(variables, *sharded)
    np.testing.assert_allclose(got, grad(model_of("te")[1], *batch)[0], rtol=1e-6)
    assert "all-gather" not in {collective.kind for collective in program.read(many).collectives}
    assert many.cost_analysis()["flops"] < 0.5 * one.cost_analysis()["flops"]


# Random keys #####################################################################################


def bits_of(**options):
    """The random numbers that the loss of each of four parts draws: a function of its keyword arguments."""

    def loss(params, x, *, key=None, rngs=None):
        key = rngs["dropout"] if key is None else key
        return jnp.mean(params["w"] * x), jax.random.bits(key)

    grad = fp8jax.accumulate_gradients(loss, PARTS, has_aux=True, **options)
    return lambda *args, **kwargs: grad({"w": jnp.ones(())}, X, *args, **kwargs)[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "key", "key": jax.random.key(7)},
        {"keys": ["key"], "key": jax.random.PRNGKey(7)},
        {
            "keys": ("rngs",),
            "rngs": {"dropout": jax.random.key(7), "noise": jax.random.split(jax.random.key(8))},
        },
    ],
    ids=["typed", "raw", "Linen's rngs"],
)
def test_each_part_draws_by_a_key_of_its_own(options):
    bits = bits_of(keys=options.pop("keys"))(**options)
    want = [jax.random.bits(jax.random.fold_in(jax.random.key(7), i)) for i in range(PARTS)]
    assert bits.tolist() == [int(each) for each in want]
    # One key for all parts is to be asked for.
    assert len(set(bits_of(keys=())(**options).tolist())) == 1


def test_positional_keys_are_split_as_a_batch_is():
    def loss(params, x, keys):
        return jnp.mean(params["w"] * x), jax.random.bits(keys[0])

    keys = jax.random.split(jax.random.key(7), PARTS)
    grad = fp8jax.accumulate_gradients(loss, PARTS, has_aux=True)
    (_, bits), _, _ = grad({"w": jnp.ones(())}, X, keys)
    assert bits.tolist() == [int(jax.random.bits(key)) for key in keys]


@pytest.mark.parametrize("key", [jax.random.key(7), jax.random.PRNGKey(7)], ids=["typed", "raw"])
@pytest.mark.parametrize("parts", [2, PARTS])
def test_a_key_that_parts_would_share_or_cut_is_refused(key, parts):
    def loss(params, x, key):
        return jnp.mean(params["w"] * x) + jax.random.uniform(key)

    grad = fp8jax.accumulate_gradients(loss, parts)
    params = {"w": jnp.ones(())}
    advice = r'a keyword argument, with its name in `keys`, as in accumulate_gradients\(.*, keys="key"\)'
    with pytest.raises(ValueError, match=f"expected arrays of a batch; got a random key .*{advice}"):
        grad(params, X, key)
    with pytest.raises(ValueError, match=r"`keys`: .*'key' holds a random key.*keys=\(\)"):
        grad(params, X, key=key)


def test_keys_that_name_no_random_key_are_refused():
    with pytest.raises(
        ValueError, match="`keys`: expected names of keyword arguments.*'kye' is none; got key"
    ):
        bits_of(keys="kye")(key=jax.random.key(7))
    with pytest.raises(ValueError, match=r"`keys`: expected random keys in 'key'; got float32\[3\]"):
        bits_of(keys="key")(key=jnp.ones(3))
    with pytest.raises(TypeError, match="`keys`: expected names of keyword arguments, .*; got .*Array"):
        bits_of(keys=jax.random.key(7))


def test_wrong_batch_or_format():
    """A batch that does not divide into the microbatches, or an unknown format, raises."""
    model, variables = model_of("te")
    with pytest.raises(ValueError, match=r"divisible by `microbatches`=3 and not 0; got shape \(16, 32\)"):
        fp8jax.accumulate_gradients(loss_of(model), 3)(variables, X, Y)
    with pytest.raises(ValueError, match="`format`: expected FP16, FP32 or E4M3; got 'BF16'"):
        fp8jax.accumulate_gradients(loss_of(model), 2, format="BF16")
    with pytest.raises(ValueError, match=r"got shape \(\)\. Pass arguments that are not split as keyword"):
        fp8jax.accumulate_gradients(loss_of(model), 2)(variables, X, 0.5)
    with pytest.raises(ValueError, match=r"divisible by `microbatches`=2.*got shape \(0, 32\)"):
        fp8jax.accumulate_gradients(loss_of(model), 2)(variables, X[:0], Y[:0])
    with pytest.raises(ValueError, match="`args`: expected arrays of a batch after the variables; got none"):
        fp8jax.accumulate_gradients(loss_of(model), 2)(variables)
    with pytest.raises(ValueError, match="Keyword arguments are not split"):
        key = jax.random.key(0)
        fp8jax.accumulate_gradients(loss_of(model), 2, keys="key")(variables, x=X, y=Y, key=key)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, None, "2"])
def test_a_number_of_parts_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match=f"`microbatches`: expected a positive integer; got {bad!r}"):
        fp8jax.accumulate_gradients(loss_of(model_of("te")[0]), bad)


@pytest.mark.parametrize(
    "gradient", [fp8jax.value_and_grad, functools.partial(fp8jax.accumulate_gradients, microbatches=2)]
)
def test_a_loss_and_a_zero_of_other_types_are_refused(gradient):
    with pytest.raises(TypeError, match="`loss_fn`: expected a function; got NoneType"):
        gradient(None)
    with pytest.raises(TypeError, match="`zero`: expected a fp8jax.comm.Zero or None; got 2"):
        gradient(lambda variables: 0.0, zero=2)


@pytest.mark.parametrize(
    "loss, options, got",
    [
        (lambda params, x: x @ params, {}, r"float32\[2\]"),
        (lambda params, x: (jnp.sum(params), x), {}, r"\('float32\[\]', 'float32\[2, 3\]'\)"),
        (lambda params, x: jnp.sum(params), {"has_aux": True}, r"float32\[\]"),
        (lambda params, x: jnp.int32(1), {}, r"int32\[\]"),
        (lambda params, x: None, {}, "None"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss, options, got):
    with pytest.raises(TypeError, match=f"`loss_fn`: expected a float scalar.*; got {got}. Return the mean"):
        fp8jax.value_and_grad(loss, **options)(jnp.ones(3), jnp.ones((2, 3)))


def test_one_bad_part_lowers_the_loss_scale_once():
    model, variables = model_of("fp16_amp")
    bad = X.copy()
    bad[5] = np.inf
    _, grads, new = fp8jax.accumulate_gradients(loss_of(model), PARTS)(variables, bad, Y)
    assert float(new[LOSS_SCALE]["scale"]) == float(variables[LOSS_SCALE]["scale"]) / 2
    assert int(new[LOSS_SCALE]["good_steps"]) == 0


# Over optimizer calls ############################################################################


@pytest.mark.parametrize("recipe", ["O2", pytest.param("O3", marks=pytest.mark.long)])
def test_multi_steps_steps_once_along_the_mean(recipe):
    _, variables = model_of(recipe)
    base = optax.chain(
        clip_by_global_norm(0.1), adamw(0.01, recipe, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    )
    tx = multi_steps(base, PARTS)
    grads = [g for _, g, _ in parts_of(recipe, compiles_quickly())]

    @jax.jit
    def step(variables, state, grads):
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state

    state, now = jax.jit(tx.init)(variables), variables
    for i, part in enumerate(grads):
        before, (now, state) = now, step(now, state, part)
        if i < PARTS - 1:
            jax.tree.map(np.testing.assert_array_equal, now, before)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *(values(g) for g in grads))
    once = lambda variables: fp8jax.apply_updates(  # noqa: E731
        variables, base.update(mean, base.init(variables), variables)[0]
    )
    expected = jax.jit(once)(variables)
    # A tie of the mean's last bit moves a weight by a code, at most 1/8 of it in FP8.
    assert difference(now[PARAMS], expected[PARAMS]) < 1e-3
    assert difference(now[PARAMS], variables[PARAMS]) > 1e-3
    assert step._cache_size() == 1


def test_multi_steps_takes_parameters_alone():
    params = {"w": fp8jax.quantize(jnp.ones((4, 4)), formats.FP16, power_of_two=True)}
    grads = {"w": fp8jax.quantize(jnp.ones((4, 4)), formats.E4M3, power_of_two=True)}
    tx = multi_steps(adamw(0.1, "O2", weight_decay=0.0), 2)
    state = tx.init(params)
    for expected in (1.0, 0.9):
        updates, state = tx.update(grads, state, params)
        params = fp8jax.apply_updates(params, updates)
        np.testing.assert_allclose(value(params["w"]), expected, rtol=1e-3)


def test_a_bad_gradient_among_several_skips_their_step():
    _, variables = model_of("O2")
    tx = multi_steps(adamw(0.01, "O2"), 2)
    grads = [g for _, g, _ in parts_of("O2", compiles_quickly())]
    bad = fp8jax.gradients.tree_map(lambda x: x * jnp.nan, grads[1])
    update = jax.jit(tx.update)
    state, now = jax.jit(tx.init)(variables), variables
    for part in (grads[0], bad):
        updates, state = update(part, state, now)
        now = fp8jax.apply_updates(now, updates)
    jax.tree.map(np.testing.assert_array_equal, now, variables)
    assert int(skipped(state)) == 1


def test_optaxs_own_raises_on_fp8_gradients():
    _, variables = model_of("O2")
    tx = optax.MultiSteps(adamw(0.01, "O2"), 2)
    with pytest.raises((TypeError, ValueError)):
        tx.update(parts_of("O2", compiles_quickly())[0][1], tx.init(variables[PARAMS]), variables[PARAMS])
