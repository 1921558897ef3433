"""Variables through a step: gradients in their format, state replaced, weights requantized."""

import collections
import re

import flax.linen as nn
import gradients_apart
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.linen import fp8_ops
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import ScaledArray, formats, quantize
from fp8jax.optim import restore_weights
from fp8jax.quantization import is_scaled, value
from fp8jax.scaling.merge import FP8_GRAD, fm32

# No side of a kernel is so small that it stays wide by default.
OUT = 32


class MLP(nn.Module):
    """Two matched layers, the second only on request."""

    @nn.compact
    def __call__(self, x, deep=True):
        x = nn.relu(nn.Dense(48, name="first")(x))
        second = nn.Dense(OUT, name="second")
        return second(x) if deep or self.is_initializing() else x


RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((16, 64), np.float32))
Y = jnp.asarray(RNG.standard_normal((16, OUT), np.float32))


def mse(model):
    return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)


@pytest.fixture(scope="module")
def o2():
    model = fp8jax.transform(MLP(), "O2")
    return model, model.init(jax.random.key(0), X)


def test_gradients_are_in_the_formats_of_the_recipe(o2):
    model, variables = o2
    _, grads, new = jax.jit(fp8jax.value_and_grad(mse(model)))(variables, X, Y)
    kernel, bias = grads["first"]["kernel"], grads["first"]["bias"]
    assert is_scaled(kernel) and kernel.data.dtype == jnp.float8_e4m3fn
    assert kernel.scale.shape == variables["params"]["first"]["kernel"].scale.shape
    assert np.frexp(kernel.scale)[0] == 0.5  # a power of two
    assert bias.dtype == jnp.float32
    te = fp8jax.transform(MLP(), "te")
    _, grads, new = jax.jit(fp8jax.value_and_grad(mse(te)))(te.init(jax.random.key(0), X), X, Y)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_no_wide_gradient_of_a_kernel_exists_in_the_program(o2):
    """The gradient leaves the backward as codes: no float32 array of the kernel's shape is made of it."""
    model, variables = o2
    grad = lambda *args: fp8jax.value_and_grad(mse(model))(*args)[1]  # noqa: E731
    jaxpr = jax.make_jaxpr(grad)(variables, X, Y)
    kernels = [aval for aval in jaxpr.out_avals if aval.shape == (64, 48)]
    assert [str(aval.dtype) for aval in kernels] == ["float8_e4m3fn"]


def test_with_and_without_jit_and_with_aux_agree(o2):
    model, variables = o2
    loss = mse(model)
    jitted = jax.jit(fp8jax.value_and_grad(loss))(variables, X, Y)
    eager = fp8jax.value_and_grad(loss)(variables, X, Y)
    with_aux = lambda *args: (loss(*args), {"x": X})  # noqa: E731
    (value, aux), grads, new = jax.jit(fp8jax.value_and_grad(with_aux, has_aux=True))(variables, X, Y)
    for got in (eager, (value, grads, new)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, jitted)
    np.testing.assert_array_equal(aux["x"], X)


class Shared(nn.Module):
    """A layer that is used twice."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(64)
        return nn.Dense(OUT)(layer(layer(x)))


def twice(model):
    return lambda variables, x, y: mse(model)(variables, x, y) + mse(model)(variables, 2 * x, y)


def placed(loss):
    """The loss of variables that an equation of its own has moved."""
    return lambda variables, x, y: loss(jax.lax.optimization_barrier(variables), x, y)


EAGER = {
    "a loss": (MLP, lambda model: fp8jax.value_and_grad(mse(model))),
    "two calls": (MLP, lambda model: fp8jax.value_and_grad(twice(model))),
    "a shared layer": (Shared, lambda model: fp8jax.value_and_grad(mse(model))),
    "a constraint": (MLP, lambda model: fp8jax.value_and_grad(placed(twice(model)))),
}


@pytest.mark.parametrize("recipe", ["te", "O2", "fp8", "block", "nvfp4"])
@pytest.mark.parametrize("kind", EAGER)
def test_an_eager_gradient_is_the_jitted_one_and_is_compiled_once(kind, recipe, caplog):
    model, gradient = EAGER[kind]
    model = fp8jax.transform(model(), recipe)
    variables, grad_fn = model.init(jax.random.key(0), X), gradient(model)
    eager = grad_fn(variables, X, Y)
    with jax.log_compiles():
        grad_fn(variables, X, Y)
        assert "Compiling" not in caplog.text
        jitted = jax.jit(grad_fn)(variables, X, Y)
        assert "Compiling" in caplog.text
    for got, want in zip(*map(jax.tree.leaves, (eager, jitted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_state_of_an_unused_layer_stays(o2):
    model, variables = o2
    loss = lambda variables: jnp.mean(model.apply(variables, X, deep=False) ** 2)  # noqa: E731
    _, grads, new = jax.jit(fp8jax.value_and_grad(loss))(variables)
    before, after = variables["_overwrite_with_gradient"], new["_overwrite_with_gradient"]
    jax.tree.map(np.testing.assert_array_equal, after["second"], before["second"])
    assert (after["first"]["kernel"]["amax_history"][:, 0] > 0).all()
    unused = grads["second"]["kernel"]
    assert not unused.dequantize().any() and np.isfinite(unused.scale).all()


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, FrozenDict])
@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_variables_keep_their_type(recipe, kind):
    """A scan over steps carries them, so that each step has to return the same tree."""
    x = jnp.ones((8, 32))
    model, tx = fp8jax.transform(nn.Dense(32), recipe), fp8jax.optim.adamw(1e-3, recipe)
    variables = kind(model.init(jax.random.key(0), x))
    loss = lambda variables: jnp.mean((model.apply(variables, x) - x) ** 2)  # noqa: E731

    def step(carry, _):
        variables, state = carry
        _, grads, variables = fp8jax.value_and_grad(loss)(variables)
        updates, state = tx.update(grads, state, variables["params"])
        return (restore_weights(fp8jax.apply_updates(variables, updates)), state), None

    (new, _), _ = jax.jit(lambda *carry: jax.lax.scan(step, carry, length=2))(
        variables, tx.init(variables["params"])
    )
    assert type(new) is kind and jax.tree.structure(new) == jax.tree.structure(variables)


def test_parameters_alone_are_variables_too():
    weight = quantize(jnp.asarray(RNG.standard_normal((8, 4), np.float32)), formats.FP16)
    params = {"w": weight, "b": jnp.ones((4,))}
    loss = lambda params, x: jnp.sum((x @ jnp.asarray(params["w"]) + params["b"][None]) ** 2)  # noqa: E731
    value, grads, same = fp8jax.value_and_grad(loss)(params, X[:, :8])
    assert same is params
    want = jax.value_and_grad(loss)({**params, "w": weight.dequantize()}, X[:, :8])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (value, grads), want)
    updated = fp8jax.apply_updates(params, jax.tree.map(lambda g: -0.01 * g, grads))
    assert is_scaled(updated["w"]) and updated["w"].data.dtype == jnp.float16


@pytest.mark.parametrize(
    "grad_of", [fp8jax.value_and_grad, lambda loss: fp8jax.accumulate_gradients(loss, 2)]
)
def test_two_models_in_one_tree_of_variables(grad_of):
    """Models inside of the collections train; collections inside of a tree of models are refused."""
    model = fp8jax.transform(MLP(), "te")
    both = {name: model.init(jax.random.key(i), X) for i, name in enumerate("gd")}
    of_one = mse(model)
    of_both = lambda variables, x, y: of_one(variables["g"], x, y) + of_one(variables["d"], x, y)  # noqa: E731
    for wrong in (both, {"params": both}):
        with pytest.raises(ValueError, match=r"`variables`: .*inside of them, at \['d'\].*: \{name"):
            grad_of(lambda v, *args: of_both(v.get("params", v), *args))(wrong, X, Y)

    collections = {key: {name: both[name][key] for name in both} for key in both["g"]}
    apart = lambda v: {name: {key: v[key][name] for key in v} for name in both}  # noqa: E731
    tx = fp8jax.optim.adamw(1e-3, "te")
    loss, grads, new = jax.jit(grad_of(lambda v, *args: of_both(apart(v), *args)))(collections, X, Y)
    updates, _ = tx.update(grads, tx.init(collections["params"]), collections["params"])
    trained = apart(fp8jax.apply_updates(new, updates))
    for name in both:
        _, grad, alone = grad_of(of_one)(both[name], X, Y)
        update, _ = tx.update(grad, tx.init(both[name]["params"]), both[name]["params"])
        want = fp8jax.apply_updates(alone, update)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), trained[name], want)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_steps_under_checks_for_nan_and_inf(recipe):
    """Also with unused layers, which have no new state. Without jit, JAX cannot check a state for inf."""
    model = fp8jax.transform(lambda p, x: jnp.log(x @ p["first"]) @ p["second"], recipe)
    params = {"first": jnp.ones((64, 32)), "second": jnp.ones((32, 32))}
    variables = model.init(params, X)
    loss = lambda variables, x: jnp.mean(model.apply(variables, x))  # noqa: E731
    unused = fp8jax.value_and_grad(lambda v, x: jnp.sum(x @ v["params"]["first"]))
    step, refused = fp8jax.value_and_grad(loss), pytest.raises(FloatingPointError, match="recipe bf16")
    with jax.debug_nans(True):
        assert np.isfinite(step(variables, jnp.abs(X))[0]) and np.isfinite(unused(variables, X)[0])
        with refused:
            jax.jit(step)(variables, -X)
    with jax.debug_infs(True):
        assert np.isfinite(jax.jit(step)(variables, jnp.abs(X))[0])
        assert np.isfinite(jax.jit(unused)(variables, X)[0])
        assert jax.jit(fp8jax.statistics(loss, ["current"]))(variables, jnp.abs(X)).rows
        with refused:
            step(variables, jnp.abs(X))

    def missing(variables):
        raise NotImplementedError("a part of the user's own")

    with jax.debug_nans(True), pytest.raises(NotImplementedError, match="user's own"):
        fp8jax.value_and_grad(missing)(variables)


def test_a_layer_with_fp8_of_flax_beside_ours():
    """Both have states in one collection, with dtypes that are equal."""

    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(32, name="ours")(x)
            return nn.Dense(32, name="flax", dot_general_cls=fp8_ops.Fp8DotGeneral)(x)

    model = fp8jax.transform(Mixed(), "te")
    variables = model.init(jax.random.key(0), X)
    _, _, new = jax.jit(fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X))))(variables)
    state = new["_overwrite_with_gradient"]
    [of_flax] = state["flax"].values()
    assert of_flax["input_amax_history"][0] > 0 and state["ours"]["kernel"]["amax_history"][0, 0] > 0
    assert fm32 == fp8_ops.fm32 and hash(fm32) == hash(fp8_ops.fm32) and FP8_GRAD not in (fm32, fp8_ops.fm32)
    of_half = type(fm32)(jnp.float16)
    assert of_half == fp8_ops.fp8_meta_dtype_wrapper(jnp.float16) and of_half not in (fm32, fp8_ops.fm32)


def test_apply_updates_adds_requantizes_and_replaces(o2):
    _, variables = o2
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 0.25), variables["params"], is_leaf=is_scaled)
    new = jax.jit(fp8jax.apply_updates)(variables, updates)
    kernel = variables["params"]["first"]["kernel"]
    expected = quantize(kernel.dequantize() + 0.25, formats.FP16, power_of_two=True, blocks=(1, 1))
    jax.tree.map(np.testing.assert_array_equal, new["params"]["first"]["kernel"], expected)
    np.testing.assert_array_equal(new["params"]["first"]["bias"], 0.25)
    states = (tree["_overwrite_with_gradient"] for tree in (new, variables))
    jax.tree.map(np.testing.assert_array_equal, *states)
    alone = jax.jit(fp8jax.apply_updates)(variables["params"], updates)
    jax.tree.map(np.testing.assert_array_equal, alone, new["params"])
    assert jax.tree.structure(new) == jax.tree.structure(variables)
    kept = fp8jax.apply_updates({"params": {"b": jnp.ones(2)}, "other": 3}, {"b": None})
    assert kept["other"] == 3 and (kept["params"]["b"] == 1).all()


@pytest.mark.parametrize("updates", [{"first": 0}, {"params": {}, "momentum": {}}])
def test_apply_updates_refuses_other_trees(o2, updates):
    with pytest.raises(ValueError, match=r"`updates`: expected the tree of the parameters"):
        fp8jax.apply_updates(o2[1], updates)


def test_a_scaling_state_among_updates_or_gradients_is_refused(o2):
    """The form of version 0.1.0, and of JAX's own gradient of whole variables."""
    _, variables = o2
    with pytest.raises(ValueError, match=r"`updates`: expected a tree like variables\['params'\]"):
        fp8jax.apply_updates(variables, variables)
    tx = fp8jax.optim.adamw(0.1, "O2")
    with pytest.raises(ValueError, match=r"`updates`: .*got also '_overwrite_with_gradient'"):
        tx.update(variables, tx.init(variables), variables)


@pytest.mark.parametrize("recipe", ["O2,scaling=current", "te"])
def test_training_reaches_the_loss_of_float32_in_one_trace(recipe):
    def train(recipe):
        model = fp8jax.transform(MLP(), recipe)
        variables = model.init(jax.random.key(0), X)
        tx = optax.chain(fp8jax.optim.clip_by_global_norm(1.0), fp8jax.optim.adamw(3e-3, recipe))
        opt_state = tx.init(variables)

        traces = []

        @jax.jit
        def step(variables, opt_state):
            traces.append(recipe)
            loss, grads, variables = fp8jax.value_and_grad(mse(model))(variables, X, Y)
            updates, opt_state = tx.update(grads, opt_state, variables)
            return fp8jax.apply_updates(variables, updates), opt_state, loss

        avals = [jax.typeof(leaf) for leaf in jax.tree.leaves((variables, opt_state))]
        for _ in range(60):
            variables, opt_state, loss = step(variables, opt_state)
        assert [jax.typeof(leaf) for leaf in jax.tree.leaves((variables, opt_state))] == avals
        assert len(traces) == 1
        return float(loss)

    first, last = float(jnp.mean(Y**2)), train(recipe)
    assert last < 0.1 * first
    assert abs(last - train("fp32")) < 0.03


def test_gradient_of_a_shared_float16_weight():
    """The sum over the uses is float32, and is rounded once."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(64, name="layer")
            return layer(layer(x))

    model = fp8jax.transform(Twice(), "O2")
    variables = model.init(jax.random.key(0), X)
    loss = lambda variables: jnp.mean(model.apply(variables, X) ** 2)  # noqa: E731
    _, grads, new = jax.jit(fp8jax.value_and_grad(loss))(variables)
    got = grads["layer"]["kernel"]
    assert isinstance(got, ScaledArray) and got.data.dtype == jnp.float8_e4m3fn
    plain = jax.grad(lambda v: jnp.mean(Twice().apply(v, X) ** 2))(model.dequantize(variables))
    want = plain["params"]["layer"]["kernel"]
    assert float(jnp.linalg.norm(got.dequantize() - want) / jnp.linalg.norm(want)) < 0.12


WRONG = {
    "the pair that tx.update gives": (lambda p: (p, {"count": 0}), "got a tuple"),
    "a leaf less": (lambda p: {"b": p["b"]}, r"without \['w'\]"),
    "a leaf more": (lambda p: {**p, "x": p["b"]}, r"with \['x'\]"),
    "whole variables": (lambda p: {"params": p}, r"without \['b'\]"),
    "another shape": (lambda p: {**p, "b": p["b"][:1]}, r"float32\[4\] at \['b'\]; got float32\[1\]"),
    "optax's masked leaf": (lambda p: {**p, "b": optax.MaskedNode()}, r"at \['b'\]; got MaskedNode"),
}


def test_an_fp8_layer_beside_float16_layers():
    """The loss is scaled for the float16 layer, and both gradients are divided by the loss scale."""
    model = fp8jax.transform(MLP(), "fp16_amp", rules=[fp8jax.Rule("first", "O2,scaling=current")])
    variables = model.init(jax.random.key(0), X)
    _, grads, new = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2))(variables)
    params = jax.tree.map(value, variables["params"], is_leaf=is_scaled)
    want = jax.grad(lambda params: jnp.mean(MLP().apply({"params": params}, X) ** 2))(params)
    for name in ("first", "second"):
        got, expected = value(grads[name]["kernel"]), want[name]["kernel"]
        assert is_scaled(grads[name]["kernel"]) == (name == "first")
        assert np.linalg.norm(got - expected) < 0.2 * np.linalg.norm(expected)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_updates_of_another_tree_are_refused_in_a_line(name, is_whole):
    change, says = WRONG[name]
    params = {"w": quantize(jnp.ones((4, 4)), formats.FP16), "b": jnp.ones(4)}
    updates = change({"w": jnp.ones((4, 4)), "b": jnp.ones(4)})
    if is_whole:
        params, updates = {"params": params}, {"params": updates}
    with pytest.raises(ValueError, match=f"`updates`: expected .*{says}.*tx.update") as error:
        fp8jax.apply_updates(params, updates)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("module", ["MLP", "scan", "vmap"])
def test_vmap_of_value_and_grad(module):
    """Codes are not summed over the examples: each has a gradient, and a state, of its own."""
    model = fp8jax.transform(MLP() if module == "MLP" else Uses(module), "O2")
    variables, x = jax.jit(model.init)(jax.random.key(0), X), jnp.split(X, 4)
    grad = fp8jax.value_and_grad(lambda variables, x: jnp.mean(model.apply(variables, x) ** 2))

    def of_example(variables, x):
        loss, grads, new = grad(variables, x)
        return loss, grads, new["_overwrite_with_gradient"]

    together = jax.vmap(of_example, (None, 0))(variables, jnp.stack(x))
    compiled = jax.jit(of_example)
    each = [compiled(variables, part) for part in x]

    def check(together, *each):
        assert not is_scaled(together) or together.data.dtype == jnp.float8_e4m3fn
        wanted = jnp.stack([value(one) for one in each])
        np.testing.assert_allclose(value(together), wanted, rtol=1e-6, atol=1e-6 * jnp.max(jnp.abs(wanted)))

    jax.tree.map(check, together, *each, is_leaf=is_scaled)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_a_gradient_inside_the_loss_is_taken_once(recipe):
    """Codes have no derivative: a penalty on a gradient would be trained with none, which raises."""
    model = fp8jax.transform(MLP(), recipe)
    variables = jax.jit(model.init)(jax.random.key(0), X)

    def slope(variables, x):
        return jax.grad(lambda x: mse(model)(variables, x, Y))(x)

    with pytest.raises(NotImplementedError, match="an FP8 product is differentiable once.*stop_gradient"):
        jax.eval_shape(fp8jax.value_and_grad(lambda v: jnp.sum(slope(v, X) ** 2)), variables)

    def attacked(variables):
        return mse(model)(variables, X + jax.lax.stop_gradient(0.1 * jnp.sign(slope(variables, X))), Y)

    got = jax.jit(fp8jax.value_and_grad(attacked))(variables)
    other = X + 0.1 * jnp.sign(jax.jit(slope)(variables, X))
    want = jax.jit(fp8jax.value_and_grad(mse(model)))(variables, other, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


def test_casts_have_no_derivative():
    with pytest.raises(NotImplementedError, match="a cast to FP8, or an amax, has no derivative"):
        jax.grad(lambda x: jnp.sum(quantize(x, formats.E4M3).dequantize()))(X)


def test_steps_of_optimizers_have_no_derivative():
    params = {"w": X}
    tx = fp8jax.optim.adamw(1e-2, "te")
    state = tx.init(params)
    with pytest.raises(NotImplementedError, match="no derivative, nor has a step of `fp8jax.optim`.*optax's"):
        jax.grad(lambda grads: jnp.sum(tx.update(grads, state, params)[0]["w"]))(params)


class Uses(nn.Module):
    """One layer, used twice: one after the other, in a scan, or for each example of a vmap."""

    kind: str

    @nn.compact
    def __call__(self, x):
        xs = jnp.stack([x, x])
        if self.kind == "vmap":
            mapped = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})
            return mapped(OUT, use_bias=False, name="layer")(xs)
        layer = nn.Dense(OUT, use_bias=False, name="layer")
        if self.kind == "scan":
            body = lambda layer, _, x: (None, layer(x))  # noqa: E731
            return nn.scan(body, variable_broadcast="params", split_rngs={"params": False})(layer, None, xs)[
                1
            ]
        return jnp.stack([layer(x), layer(x)])


def of_two_devices(**options):
    """`value_and_grad` on two devices, by ZeRO or by hand."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    if options:
        return lambda loss: fp8jax.value_and_grad(loss, zero=fp8jax.comm.Zero(mesh, "te", **options))

    def by_hand(loss):
        def on_each(variables, *parts):
            grad = fp8jax.value_and_grad(loss, axis_name="data")
            value, grads, variables = grad(variables, *parts)
            return value, fp8jax.comm.all_reduce(grads, "data", "te"), variables

        specs = (P(), P("data"), P("data"))
        return jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    return by_hand


WAYS = {
    "uses": ("", fp8jax.value_and_grad),
    "scan": ("scan", fp8jax.value_and_grad),
    "vmap": ("vmap", fp8jax.value_and_grad),
    "jax.grad": ("", gradients_apart.value_and_grad),
    "microbatches": ("", lambda loss: fp8jax.accumulate_gradients(loss, 2)),
    "all_reduce": ("", of_two_devices()),
    "zero": ("", of_two_devices(stage=2)),
}
OF_HALVES = ("microbatches", "all_reduce", "zero")
LIMITS = np.float32([448, 448, 57344])


@pytest.mark.parametrize("way", WAYS)
def test_scale_beside_zero_gradients(way):
    """The old scale, where a gradient is zero, is not larger than that of another gradient's amax."""
    kind, grad = WAYS[way]
    model = fp8jax.transform(Uses(kind), "te,amax_history_len=1,amax_compute_algo=most_recent")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    weights = jnp.ones((16, 2, 1))  # of rows and uses
    weights = weights.at[8:].set(0) if way in OF_HALVES else weights.at[:, 1].set(0)

    def loss(variables, x, weights):
        return 1e-6 * jnp.mean(weights.swapaxes(0, 1) * model.apply(variables, x) ** 2)

    step = jax.jit(grad(loss))
    for _ in range(2):
        _, grads, new = step(variables, X, weights)
        variables = {**variables, "_overwrite_with_gradient": new["_overwrite_with_gradient"]}
    state = variables["_overwrite_with_gradient"]["layer"]["kernel"]
    np.testing.assert_allclose(state["scale"], state["amax_history"][:, 0] / LIMITS, rtol=1e-6)
    assert state["amax_history"][2, 0] < 1e-6


@pytest.mark.parametrize("recipe", ["te", "O2", pytest.param("O3", marks=pytest.mark.long)])
@pytest.mark.parametrize("stop", [jax.lax.stop_gradient, lambda t: jax.tree.map(jax.lax.stop_gradient, t)])
def test_stop_gradient_inside_the_loss_freezes_a_layer(recipe, stop):
    """FP8 codes are no floats, which is all that JAX stops by itself."""
    model = fp8jax.transform(MLP(), recipe)
    variables = jax.jit(model.init)(jax.random.key(0), X)

    def loss(variables, frozen):
        params = variables["params"]
        params = {name: stop(layer) if name in frozen else layer for name, layer in params.items()}
        return mse(model)({**variables, "params": params}, X, Y)

    grad = jax.jit(fp8jax.value_and_grad(loss), static_argnums=1)
    (_, free, with_free), (_, frozen, with_frozen) = grad(variables, ()), grad(variables, ("first",))
    for leaf in jax.tree.leaves(frozen["first"], is_leaf=is_scaled):
        np.testing.assert_array_equal(value(leaf), 0)
    jax.tree.map(np.testing.assert_array_equal, frozen["second"], free["second"])
    after = with_frozen["_overwrite_with_gradient"]["first"]["kernel"]
    seen = with_free["_overwrite_with_gradient"]["first"]["kernel"]["amax_history"]
    np.testing.assert_array_equal(after["amax_history"], seen)  # the layer still multiplies, and is scaled
    assert is_scaled(frozen["first"]["kernel"]) == is_scaled(free["first"]["kernel"]) == (recipe != "te")


def test_stop_gradient_of_one_use():
    """The stopped use's weight gradient is much larger: its scale is not to be taken."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = lambda layer, x, _: (layer(x), None)  # noqa: E731
            scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return scan(nn.Dense(64, use_bias=False, name="layer"), x, None)[0]

    model = fp8jax.transform(Stack(), "O2")
    variables = jax.jit(model.init)(jax.random.key(0), X)

    def alone(variables, y):
        return jnp.mean(model.apply(variables, y) ** 2)

    @jax.jit
    @fp8jax.value_and_grad
    def both(variables):
        stopped = {**variables, "params": jax.lax.stop_gradient(variables["params"])}
        y = model.apply(stopped, 500 * X)
        return alone(variables, y - jax.lax.stop_gradient(0.999 * y))

    _, got, _ = both(variables)
    y = jax.jit(model.apply)(variables, 500 * X)
    _, want, _ = jax.jit(fp8jax.value_and_grad(alone))(variables, y - 0.999 * y)
    got, want = (grads["layer"]["kernel"] for grads in (got, want))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jnp.all(jnp.any(got.data != 0, axis=(1, 2)))


def of_examples(model, way):
    """A loss of the examples of `X`, as one batch, or under one or two `jax.vmap`s."""

    def loss(variables, x):
        apply = lambda x: model.apply(variables, x)  # noqa: E731
        parts = x.reshape(2, -1, 4, x.shape[-1])
        if way == "two vmaps":
            out = jax.vmap(jax.vmap(apply), in_axes=1, out_axes=1)(parts)
        elif way == "a vmap in a scan":
            out = jax.lax.scan(lambda _, x: (None, jax.vmap(jax.jit(apply))(x)), None, parts)[1]
        elif way == "a vmap":
            out = jax.vmap(apply)(x.reshape(-1, 4, x.shape[-1]))
        else:
            out = apply(x)
        return jnp.mean((out - 0.3) ** 2)

    return loss


@pytest.mark.parametrize("way", ["a vmap", "two vmaps", "a vmap in a scan"])
@pytest.mark.parametrize("recipe", ["te", "fp8"])
def test_vmap_of_a_model(recipe, way):
    """The weights stay quantized, their gradients are FP8, and the states are those of the whole batch."""
    model = fp8jax.transform(MLP(), f"{recipe},amax_history_len=4")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    whole, mapped = (jax.jit(fp8jax.value_and_grad(of_examples(model, each))) for each in ("whole", way))
    for _ in range(2):
        loss, wanted, new = whole(variables, X)
        got, grads, states = mapped(variables, X)
        np.testing.assert_allclose(got, loss, rtol=1e-6)
        assert jax.tree.structure(grads) == jax.tree.structure(wanted)
        for one, other in zip(*(jax.tree.leaves(g, is_leaf=is_scaled) for g in (grads, wanted)), strict=True):
            np.testing.assert_allclose(value(one), value(other), atol=0.02 * float(abs(value(other)).max()))
        states, variables = states["_overwrite_with_gradient"], new
        jax.tree.map(np.testing.assert_array_equal, states, new["_overwrite_with_gradient"])


def test_vmap_of_a_model_over_devices():
    """A gradient is sent once, in bytes, not for each example."""
    model = fp8jax.transform(MLP(), "fp8,amax_history_len=4")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    zero = fp8jax.comm.Zero(mesh, "fp8", stage=2)
    sent = []
    for way in ("whole", "a vmap"):
        step = jax.jit(fp8jax.value_and_grad(of_examples(model, way), zero=zero))
        text = step.lower(zero.place(variables), X).as_text()
        sent.append(sum(int(size) for size in re.findall(r"all_to_all.*-> tensor<2x(\d+)xui8>", text)))
    assert sent[0] == sent[1] > 0


def test_axis_of_a_vmap_that_maps_no_input_of_the_model():
    """Its collectives see the axis all the same."""

    def fn(params, x):
        return x @ params["w"] * (1 + jax.lax.axis_index("copies"))

    model, params = fp8jax.transform(fn, "current"), {"w": jnp.eye(X.shape[-1])}
    copies = lambda fn, v: jax.vmap(lambda y: fn(v, X) * y, axis_name="copies")(jnp.ones(3))  # noqa: E731
    loss, *_ = fp8jax.value_and_grad(lambda v: jnp.mean(copies(model.apply, v) ** 2))({"params": params})
    assert loss == pytest.approx(float(jnp.mean(copies(fn, params) ** 2)), rel=0.1)


@pytest.mark.parametrize(
    "change", [lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float32), lambda x: x * 1.0]
)
def test_arithmetic_with_all_variables_in_the_loss(change):
    """Scaling states are no weights: JAX's errors name an internal dtype."""
    model = fp8jax.transform(MLP(), "te")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    loss = lambda variables: jnp.mean(model.apply(jax.tree.map(change, variables), X) ** 2)  # noqa: E731
    with pytest.raises(
        ValueError, match="`loss_fn`: expected scaling states .* Cast the collection 'params' alone"
    ):
        fp8jax.value_and_grad(loss)(variables)


def test_float16_parameters_with_a_loss_scale():
    """Gradients that the scale saved would become 0 in float16."""
    model = fp8jax.transform(lambda params, x: x @ params["w"], "fp16_amp")
    variables = model.init({"w": jnp.ones((64, 64), jnp.float16)}, X)
    with pytest.raises(
        ValueError, match="expected parameters in float32 or bfloat16 with a loss scale; got float16"
    ):
        fp8jax.value_and_grad(lambda variables: jnp.mean(model.apply(variables, X)))(variables)


def test_tree_map_keeps_shapes():
    """An FP8 gradient has scales for its own shape."""
    model = fp8jax.transform(MLP(), "O2")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    grads = fp8jax.value_and_grad(lambda variables: jnp.mean(model.apply(variables, X) ** 2))(variables)[1]
    with pytest.raises(ValueError, match="`f`: expected a result of the gradient's shape .* `dequantize`"):
        fp8jax.gradients.tree_map(lambda x: x.mean(0), grads)
