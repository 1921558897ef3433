"""Linen and NNX modules as functions of their parameters: whatever they multiply with, and however called."""

import dataclasses
import functools
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.adapters.adapter import FRAMEWORKS, Framework, adapter_of
from fp8jax.inspect import memory, report_check, subject
from fp8jax.quantization import is_scaled, value
from fp8jax.rewrite import FunctionModel
from fp8jax.train import TrainConfig, Trainer, metrics
from fp8jax.train.step.network import network_of
from fp8jax.variables import SCALING

WIDTH = 32
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


class Own(nn.Module):
    """Multiplies by itself: a raw matmul, an einsum, and a method beside `__call__`."""

    def setup(self):
        init = nn.initializers.lecun_normal()
        self.up = self.param("up", init, (WIDTH, 2 * WIDTH))
        self.down = self.param("down", init, (2 * WIDTH, WIDTH))

    def encode(self, x):
        return nn.gelu(x @ self.up)

    def __call__(self, x):
        return jnp.einsum("bf,fd->bd", self.encode(x), self.down)


class OwnNNX(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.up = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (2 * WIDTH, WIDTH)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def encode(self, x):
        return nnx.gelu(x @ self.up)

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return jnp.einsum("bf,fd->bd", self.encode(x), self.down[...])


def relative(got, want):
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def test_bound_model():
    """A model with its variables has the module's methods, in FP8."""
    model = fp8jax.transform(Own(), "O2")
    variables = model.init(jax.random.key(0), X)
    bound, plain = model.bind(variables), Own().bind(model.dequantize(variables))
    np.testing.assert_array_equal(bound(X), model.apply(variables, X))
    np.testing.assert_array_equal(bound.encode(X), model.apply(variables, X, method="encode"))
    assert 0 < relative(bound.encode(X), plain.encode(X)) < 0.06


def test_report_of_method():
    """A report of another method than `__call__` names what that one multiplies with."""
    model, module = fp8jax.transform(Own(), "te"), fp8jax.transform(OwnNNX(nnx.Rngs(0)), "te")
    for report in (fp8jax.report(model, X, method="encode"), fp8jax.report(module, X, method="encode")):
        assert [row.path for row in report.rows if row.fp8] == ["up"]
    assert [row.path for row in model.report(X).rows] == ["up", "down"]


@pytest.mark.parametrize("recipe", ["te", "current", "block", "mxfp8", "fp8"])
def test_nnx_method_as_the_outermost_call(recipe):
    """A public method computes its module's own kernels in FP8, as its report says, with and without a
    scaling state."""
    plain = OwnNNX(nnx.Rngs(0))
    model = fp8jax.transform(plain, recipe)
    assert 0 < relative(model.encode(X), plain.encode(X)) < 0.06
    assert [row.fp8 for row in fp8jax.report(model, X, method="encode").rows] == [True]


class Methods(OwnNNX):
    """Methods that a trace cannot replace, and decorated ones."""

    __call__ = nnx.jit(OwnNNX.__call__)
    compiled, saved, _private = nnx.jit(OwnNNX.encode), nnx.remat(OwnNNX.encode), nnx.jit(OwnNNX.encode)
    relu, double, steps = jax.nn.relu, staticmethod(jax.jit(lambda x: 2 * x)), 0

    def replace(self):
        self.up = nnx.Param(jnp.ones_like(self.up[...]))

    def reset(self):
        self.up.set_value(jnp.ones_like(self.up[...]))

    def add(self):
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def count(self):
        self.steps += 1

    def kernel(self):
        return self.up


@pytest.mark.parametrize("recipe", ["te", "current"])
def test_nnx_methods_that_change_the_module(recipe):
    """They run as they are, and say so: their changes would be lost in a trace."""
    for method, has_changed in {
        "replace": lambda model: float(model.up[0, 0]) == 1,
        "reset": lambda model: float(model.up[0, 0]) == 1,
        "add": lambda model: isinstance(model.head, nnx.Linear),
        "count": lambda model: model.steps == 1,
    }.items():
        model = fp8jax.transform(Methods(nnx.Rngs(0)), recipe)
        with pytest.warns(
            UserWarning, match=f"Methods.{method} changes parameters or attributes, and cannot"
        ):
            getattr(model, method)()
        assert has_changed(model), method
    assert model.kernel() is model.up  # the module's own, not a copy


@pytest.mark.parametrize("recipe", ["te", "current"])
def test_decorated_nnx_methods(recipe):
    plain = Methods(nnx.Rngs(0))
    model = fp8jax.transform(plain, recipe)
    for method in ("__call__", "compiled", "saved"):
        assert all(row.fp8 for row in fp8jax.report(model, X, method=method).rows)
        assert 0 < relative(getattr(model, method)(X), getattr(plain, method)(X)) < 0.1, method
    assert int(model.calls.get_value()) == 1
    assert float(model.relu(-1.0)) == 0 and float(model.double(1.0)) == 2  # these get no module
    with pytest.raises(ValueError, match="expected a public method of Methods; got '_private'"):
        fp8jax.report(model, X, method="_private")


def test_nnx_call_that_makes_a_parameter():
    """A parameter made in a traced call would be lost."""

    class Lazy(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            self.bias = nnx.Param(jnp.zeros((1, WIDTH)))
            return self.fc(x) + self.bias

    with pytest.raises(ValueError, match="expected a call that changes no parameter; it makes 'bias'"):
        fp8jax.transform(Lazy(nnx.Rngs(0)), "te")(X)


def test_report_of_a_private_method_of_nnx():
    """A private method runs as it is, so it has no report."""
    model = fp8jax.transform(OwnNNX(nnx.Rngs(0)), "current")
    for method in ("_encode", "train"):
        with pytest.raises(ValueError, match=f"expected a public method of OwnNNX; got '{method}'"):
            fp8jax.report(model, X, method=method)


@pytest.mark.parametrize("inputs", [None, [X]], ids=["guessed", "inputs"])
@pytest.mark.parametrize("recipe", ["te", "current", "fp8"])
def test_nnx_parameters_in_containers(recipe, inputs):
    """Parameters in an `nnx.List` or an `nnx.Dict` are those of the module that has it."""

    class Layers(nnx.List):
        pass

    class Held(nnx.Module):
        def __init__(self, rngs):
            own = OwnNNX(rngs)
            self.all = Layers([nnx.Dict(up=own.up), own.down])

        def __call__(self, x):
            return self.decode(nnx.gelu(x @ self.all[0]["up"]))

        def decode(self, x):
            return x @ self.all[1]

    plain = Held(nnx.Rngs(0))
    model = fp8jax.transform(plain, recipe, inputs=inputs)
    assert [row.path for row in fp8jax.report(model, X).rows if row.fp8] == ["all/0/up", "all/1"]
    assert 0 < relative(model(X), plain(X)) < 0.1
    assert 0 < relative(model.decode(hidden := jnp.tile(X, 2)), plain.decode(hidden)) < 0.06
    _, grads = fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)
    assert all(jnp.any(value(leaf) != 0) for leaf in jax.tree.leaves(nnx.as_pure(grads), is_leaf=is_scaled))


def test_nnx_layer_replaced_after_transform():
    """A layer from outside has no scaling state."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    model = fp8jax.transform(Net(nnx.Rngs(0)), "te")
    model.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="[.] Replace or move layers of an NNX module before `transform`"):
        model(X)


def test_interceptors_are_part_of_a_program():
    """An eager call under a user's interceptor is not one without."""
    model = fp8jax.transform(nn.Dense(WIDTH), "te")
    variables = model.init(jax.random.key(0), X)
    once = model.apply(variables, X)
    with nn.intercept_methods(lambda call, args, kwargs, context: 2 * call(*args, **kwargs)):
        np.testing.assert_array_equal(model.apply(variables, X), 2 * once)
    np.testing.assert_array_equal(model.apply(variables, X), once)


class Constrained(nn.Module):
    """Dense layers with a constraint by logical axis names between them."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.with_logical_constraint(nn.Dense(2 * WIDTH)(x), ("batch", "mlp")))


class ConstrainedNNX(nnx.Module):
    """The same in NNX."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nn.with_logical_constraint(self.up(x), ("batch", "mlp")))


@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx with inputs", "function"])
def test_logical_axis_rules_are_part_of_a_program(kind):
    """An eager call without rules, then calls under two sets of rules."""
    variables = Constrained().init(jax.random.key(0), X)
    if kind.startswith("nnx"):
        inputs = [X] if "inputs" in kind else None
        call = fp8jax.transform(ConstrainedNNX(), "current", inputs=inputs)
    else:
        plain = Constrained() if kind == "linen" else Constrained().apply
        call = functools.partial(fp8jax.transform(plain, "current").apply, variables)

    def specs():
        eqns = jax.make_jaxpr(lambda x: call(x))(X).eqns
        return [eqn.params["sharding"].spec for eqn in eqns if eqn.primitive.name == "sharding_constraint"]

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        call(X)
        assert specs() == []
        with nn.logical_axis_rules((("batch", "data"), ("mlp", "model"))):
            assert specs() == [P("data", "model")]
        with nn.logical_axis_rules([("batch", "model"), ("mlp", None)]):
            assert specs() == [P("model", None)]


def test_precision_is_part_of_a_program():
    """What a trace depends on besides its inputs makes another program."""
    model = fp8jax.transform(lambda params, x: (x @ params["w"], x @ x.T), "te")
    variables = model.init({"w": X[:, :].T @ X}, X)
    traced = []
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            model.apply(variables, X)
            traced.append(len(model._programs))
    assert traced[1] == traced[0] + 1


@pytest.mark.parametrize("recipe", ["te", "O2", "O3"])
def test_nnx_module_with_matmuls_of_its_own(recipe):
    """With example inputs its kernels have the recipe's format, without they stay float32."""
    plain = OwnNNX(nnx.Rngs(0))
    given, guessed = fp8jax.transform(plain, recipe, inputs=[X]), fp8jax.transform(plain, recipe)
    assert is_scaled(given.up.get_value()) == (recipe != "te") and not is_scaled(guessed.up.get_value())
    for model in (given, guessed):
        assert fp8jax.report(model, X).fp8_share == 1
        assert relative(model(X), plain(X)) < 0.1
        before = int(model.calls[...])
        _, grads = fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)
        assert int(model.calls[...]) == before + 1
        assert is_scaled(grads["up"].get_value()) == (recipe != "te" and model is given)
        assert float(model.up__fp8_amax_history[0, 0]) == np.abs(X).max()
    np.testing.assert_array_equal(fp8jax.adapters.nnx.dequantize(guessed).up[...], plain.up[...])
    assert vars(fp8jax.adapters.nnx.dequantize(given)).keys() == vars(plain).keys()


def test_inputs_are_for_nnx():
    with pytest.raises(ValueError, match="`inputs`: expected None for a model that is not an NNX module"):
        fp8jax.transform(Own(), "te", inputs=[X])


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_bridged_modules(recipe):
    """A Linen module as an NNX one, and an NNX module as a Linen one."""
    as_nnx = bridge.ToNNX(Own(), rngs=nnx.Rngs(0)).lazy_init(X)
    model = fp8jax.transform(as_nnx, recipe, inputs=[X])
    assert fp8jax.report(model, X).fp8_share == 1 and 0 < relative(model(X), as_nnx(X)) < 0.1
    _, grads = fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)
    assert all(map(is_scaled, jax.tree.leaves(nnx.as_pure(grads), is_leaf=is_scaled))) == (recipe == "O2")

    class Nested(nn.Module):  # its parameters are in dicts of the NNX module
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x)))

    nested = bridge.ToNNX(Nested(), rngs=nnx.Rngs(0)).lazy_init(X)
    for model in (fp8jax.transform(nested, recipe, inputs=[X]), fp8jax.transform(nested, recipe)):
        assert fp8jax.report(model, X).fp8_share == 1
        _, grads = fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)
        assert jnp.any(jnp.asarray(value(grads["Dense_0"]["kernel"].get_value())) != 0)
        plain = fp8jax.adapters.nnx.dequantize(model)
        assert 0 < relative(model(X), plain(X)) < 0.1 and vars(plain).keys() == vars(nested).keys()

    as_linen = bridge.ToLinen(nnx.Linear, args=(WIDTH, WIDTH))
    model = fp8jax.transform(as_linen, recipe)
    variables = model.init(jax.random.key(0), X)
    assert is_scaled(jax.tree.leaves(variables["params"], is_leaf=is_scaled)[-1]) == (recipe == "O2")
    assert model.report(X).fp8_share == 1
    assert 0 < relative(model.apply(variables, X), as_linen.apply(model.dequantize(variables), X)) < 0.1
    loss, grads, new = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2))(variables)
    assert jnp.isfinite(loss) and any(jax.tree.leaves(jax.tree.map(jnp.any, grads)))


def test_keras_model():
    """A Keras model can be called, but its variables are no parameters of the call."""

    class Functional:
        def __call__(self, x):
            return x

        def stateless_call(self, trainable, non_trainable, x):
            return x @ trainable[0], non_trainable

    with pytest.raises(TypeError, match=r"got a Functional, .*: transform its `.stateless_call`"):
        fp8jax.transform(Functional(), "te")
    assert fp8jax.transform(Functional().stateless_call, "te") is not None


def test_callables_that_keep_their_weights():
    """Weights that a function holds are no parameters of the call, so no GEMM would run in FP8."""
    module = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="got a method of Linear, which keeps .*: transform the module"):
        fp8jax.transform(module.__call__, "current")
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="got a torch module, Linear, for which there is `fp8jax_torch.prep"):
        fp8jax.transform(torch.nn.Linear(4, 4), "current")


def test_wrapper_of_module():
    """Something that holds a module is told from a function."""

    class Pretrained(types.SimpleNamespace):
        def __call__(self, x):
            return x

    with pytest.raises(
        TypeError, match=r"got a Pretrained, which holds a Flax module: transform its `.module`"
    ):
        fp8jax.transform(Pretrained(module=Own()), "te")


def test_nnx_call_that_looks_at_values():
    """A loop that asks for numbers runs as it is; what it calls is in FP8."""

    class Sampler(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            while float(jnp.abs(x).max()) < 4:
                x = 2 * self.fc(x)
            return x

    plain = Sampler(nnx.Rngs(0))
    model = fp8jax.transform(plain, "O2")
    with pytest.warns(UserWarning, match="Sampler.__call__ looks at values of arrays"):
        got = model(0.1 * X)
    assert 0 < relative(got, plain(0.1 * X)) < 0.2
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: model(x))(X)


def test_nnx_call_that_changes_a_constant():
    """A number that a traced call counts up would be lost."""

    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.fc, self.calls = nnx.Linear(WIDTH, WIDTH, rngs=rngs), 0

        def __call__(self, x):
            self.calls += 1
            return self.fc(x)

    model = fp8jax.transform(Counting(nnx.Rngs(0)), "te")
    with pytest.raises(
        ValueError, match="changed the attribute 'calls' from 0 to 1. Make it an nnx.Variable"
    ):
        model(X)


def test_nnx_shared_kernel():
    """Two layers that share a kernel have one scaling state, and its gradient is the sum."""

    class Shared(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.b(jnp.tanh(self.a(x)))

    plain = Shared(nnx.Rngs(0))
    model, loss = fp8jax.transform(plain, "O2"), lambda model: jnp.mean(model(X) ** 2)
    assert not hasattr(model.b, "kernel__fp8_scale") and is_scaled(model.b.kernel.get_value())
    (got, grads), (want, exact) = fp8jax.value_and_grad(loss)(model), nnx.value_and_grad(loss)(plain)
    assert abs(got / want - 1) < 0.05
    assert relative(value(grads["a"]["kernel"].get_value()), exact["a"]["kernel"][...]) < 0.15


def test_nnx_call_that_makes_variables():
    """What a call sows or changes is in the module, at the first call and at the second."""

    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.fc, self.drop = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, *, twice=False):
            y = self.fc(x)
            self.sow(nnx.Intermediate, "mean", jnp.mean(y))
            return (self.drop(y), "text") if twice else self.drop(y)

    model = fp8jax.transform(Sowing(nnx.Rngs(0)), "te")
    first, (second, text) = model(X), model(X, twice=True)
    assert text == "text" and len(model.mean.get_value()) == 2
    assert int(model.drop.rngs.count[...]) == 2 and (np.asarray(first == 0) != np.asarray(second == 0)).any()
    jitted = jax.jit(lambda x: nnx.clone(model).fc(x))  # a call that changes nothing, of a module outside
    np.testing.assert_array_equal(jitted(X), model.fc(X))


def llama(params, tokens):
    """A decoder of bfloat16 parameters, as Llama's checkpoints have them."""

    def norm(x, weight):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return wide.astype(x.dtype) * weight[None, None]

    def layer(x, p):
        assert p["gate"].dtype == p["norm"].dtype == x.dtype == jnp.bfloat16
        y = norm(x, p["norm"])
        y = jax.nn.silu(jnp.einsum("btd,df->btf", y, p["gate"])) * jnp.einsum("btd,df->btf", y, p["up"])
        return x + jnp.einsum("btf,fd->btd", y, p["down"]), None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return jnp.einsum("btd,vd->btv", x, params["embed"]).astype(jnp.float32)


@pytest.mark.parametrize("recipe", ["te", "O1", "O2", "O3"])
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_bfloat16_parameters(recipe, jitted):
    """Scaled kernels are bfloat16 to the model and when they are dequantized, also after steps."""
    shapes = {"gate": (2, WIDTH, 64), "up": (2, WIDTH, 64), "down": (2, 64, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), 8))
    layers = {name: 0.1 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    layers["norm"] = jnp.ones((2, WIDTH))
    params = {"embed": 0.1 * jax.random.normal(next(keys), (50, WIDTH)), "layers": layers}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = jax.random.randint(next(keys), (2, 17), 0, 50)
    model, tx = fp8jax.transform(llama, recipe), fp8jax.optim.adamw(3e-3)
    variables = model.init(params, tokens)

    def step(variables, state):
        def loss(variables):
            logits = jax.nn.log_softmax(model.apply(variables, tokens[:, :-1]))
            return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

        loss, grads, variables = fp8jax.value_and_grad(loss)(variables)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss

    before, state, losses = variables, tx.init(variables), []
    for _ in range(8 if jitted else 2):
        variables, state, loss = (jax.jit(step) if jitted else step)(variables, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype, before, variables)
    assert all(jax.tree.leaves(same)) and is_scaled(variables["params"]["layers"]["up"]) == (recipe != "te")
    assert {x.dtype for x in jax.tree.leaves(model.dequantize(variables))} == {jnp.dtype(jnp.bfloat16)}
    again = model.quantize(model.dequantize(variables), like=variables)
    pairs = zip(*map(jax.tree.leaves, (again, variables)), strict=True)
    assert all(new.dtype == old.dtype for new, old in pairs)


def test_explicit_mesh_is_one_program():
    """On a mesh of explicit axes the first step's variables have the types of the second's."""
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.sharding.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec(None, "x")
        params = {"w": jax.reshard(jnp.ones((WIDTH, 64)), spec)}
        model, tx = fp8jax.transform(lambda params, x: x @ params["w"], "O2"), fp8jax.optim.adamw(1e-3)
        variables = model.init(params, jnp.asarray(X))

        @jax.jit
        def step(variables, state):
            loss, grads, variables = fp8jax.value_and_grad(
                lambda v: jnp.mean(model.apply(v, jnp.asarray(X)) ** 2)
            )(variables)
            updates, state = tx.update(grads, state, variables)
            return fp8jax.apply_updates(variables, updates), state, loss

        state, losses = tx.init(variables), []
        for _ in range(3):
            variables, state, loss = step(variables, state)
            losses.append(float(loss))
    assert step._cache_size() == 1 and losses[-1] < losses[0]
    assert jax.typeof(variables["params"]["w"].data).sharding.spec == spec


class Shrinks(nnx.Module):
    """A call that changes a parameter."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        self.dense.kernel.set_value(0.9 * self.dense.kernel[...])
        return self.dense(x)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_nnx_call_that_changes_a_parameter(recipe):
    """The module would not keep it."""
    model = fp8jax.transform(Shrinks(nnx.Rngs(0)), recipe)
    with pytest.raises(ValueError, match=r"changes no parameter; it assigns to a Param of shape \(64, 64\)"):
        model(jnp.ones((4, 64)))


def transformed_call(kind):
    """A transformed model, its call, and the arguments of the call."""
    if kind == "nnx":
        module = fp8jax.transform(nnx.Linear(WIDTH, 2 * WIDTH, rngs=nnx.Rngs(0)), "te")
        return module, module, (X,)
    plain = nn.Dense(2 * WIDTH) if kind == "linen" else lambda params, x: x @ params["w"]
    model = fp8jax.transform(plain, "te")
    start = jax.random.key(0) if kind == "linen" else {"w": jnp.ones((WIDTH, 2 * WIDTH))}
    return model, model.apply, (model.init(start, X), X)


@pytest.mark.parametrize("kind", ["linen", "nnx", "function"])
def test_adapter(kind):
    """Variables and inputs of a call, and the same call with other scaling states."""
    model, call, args = transformed_call(kind)
    adapter = adapter_of(model)
    variables, inputs = adapter.split(*args)
    assert len(inputs) == 1 and str(adapter.settings.recipe) == "te"
    np.testing.assert_array_equal(adapter.apply(variables, *inputs), call(*args))
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, 2.0**-12), variables[SCALING])
    assert not np.allclose(adapter.apply({**variables, SCALING: spoilt}, *inputs), call(*args), rtol=0.1)


def test_statistics_among_the_variables_of_nnx():
    """They are a collection of `NNXModel`, as of a Linen model."""
    parts = (
        nnx.BatchNorm(WIDTH, use_running_average=True, rngs=nnx.Rngs(0)),
        nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)),
    )
    adapter = adapter_of(fp8jax.transform(nnx.Sequential(*parts), "te"))
    variables, inputs = adapter.split(X)
    changed = {**variables, "batch_stats": jax.tree.map(lambda x: x + 1, variables["batch_stats"])}
    assert not np.allclose(adapter.apply(changed, *inputs), adapter.apply(variables, *inputs))


def test_adapter_of_plain_model():
    for plain in (nn.Dense(4), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.sin):
        with pytest.raises(TypeError, match="expected a model from fp8jax.transform"):
            adapter_of(plain)


def test_nnx_bias_with_the_axes_of_a_kernel():
    """Without inputs, the parameter of a Flax layer with the most axes is the kernel."""
    layer = nnx.LinearGeneral(WIDTH, (WIDTH, 2), rngs=nnx.Rngs(0))
    model = fp8jax.transform(layer, "O2")
    assert model.bias.ndim == 2
    assert is_scaled(model.kernel.get_value()) and not is_scaled(model.bias.get_value())


# A framework from outside ########################################################################


def equinox_net():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.up, self.down = (
                eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[0]),
                eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[1]),
            )

        def encode(self, x):
            return jax.nn.gelu(jax.vmap(self.up)(x))

        def __call__(self, x):
            return jax.vmap(self.down)(self.encode(x))

    return eqx, Net(jax.random.key(0))


@dataclasses.dataclass(frozen=True, eq=False)
class EquinoxModel:
    """An Equinox module under a recipe, as CONTRIBUTING.md says."""

    module: Any
    settings: Any

    def plain(self):
        return self.module

    def _of(self, method):
        eqx, _ = equinox_net()
        _, static = eqx.partition(self.module, eqx.is_array)
        call = lambda params, *args: getattr(eqx.combine(params, static), method)(*args)  # noqa: E731
        return FunctionModel(call, self.settings)

    def init(self, *args):
        eqx, _ = equinox_net()
        return self._of("__call__").init(eqx.filter(self.module, eqx.is_array), *args)

    def init_with_inputs(self, *args):
        return self.init(*args), args

    def split(self, variables, *inputs):
        return variables, inputs

    def apply(self, variables, *args, method="__call__"):
        return self._of(method).apply(variables, *args)

    def report(self, *args, method="__call__"):
        eqx, _ = equinox_net()
        return self._of(method).report(eqx.filter(self.module, eqx.is_array), *args)

    def kernels(self, variables, *args):
        return self._of("__call__").kernels(variables, *args)

    def freeze(self, variables, *args):
        return self._of("__call__").freeze(variables, *args)


@pytest.fixture
def equinox_adapter(monkeypatch):
    eqx, net = equinox_net()
    framework = Framework(
        is_plain=lambda model: isinstance(model, eqx.Module),
        transform=EquinoxModel,
        is_transformed=lambda model: isinstance(model, EquinoxModel),
        adapter=lambda model: model,
    )
    monkeypatch.setitem(FRAMEWORKS, "equinox", framework)
    return net


@pytest.mark.parametrize("recipe", ["te", "fp8", "block"])
def test_a_new_framework(equinox_adapter, recipe):
    """Equinox modules with a method train, and reach the report and the list of GEMMs."""
    x = jnp.tile(X, (2, 1))
    model = fp8jax.transform(equinox_adapter, recipe)
    variables, tx = model.init(x), fp8jax.optim.adamw(1e-2, recipe)
    assert model.apply(variables, x, method="encode").shape == (32, 2 * WIDTH)
    state = tx.init(variables["params"])

    @jax.jit
    def step(variables, state):
        loss_fn = lambda variables: jnp.mean((model.apply(variables, x) - x) ** 2)  # noqa: E731
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
        updates, state = tx.update(grads, state, variables["params"])
        return fp8jax.apply_updates(variables, updates), state, loss

    losses = []
    for _ in range(10):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
    assert [row.path for row in fp8jax.report(model, x).rows if row.fp8] == ["up", "down"]
    assert adapter_of(model).plain() is equinox_adapter
    assert (
        metrics.clipped(model, variables, 0.1 * x).keys() <= metrics.clipped(model, variables, 1e3 * x).keys()
    )


@pytest.mark.parametrize(
    "method", ["plain", "init_with_inputs", "split", "apply", "kernels", "freeze", "report"]
)
def test_half_a_framework_raises(equinox_adapter, monkeypatch, method):
    with pytest.raises(TypeError, match="is_transformed"):
        Framework(is_plain=callable, transform=EquinoxModel, adapter=lambda model: model)
    monkeypatch.delattr(EquinoxModel, method)
    x = jnp.ones((32, WIDTH))
    for call in (
        lambda: fp8jax.report(fp8jax.transform(equinox_adapter, "te"), x),
        lambda: report_check.check((equinox_adapter, x), "te"),
        lambda: memory.plan(equinox_adapter, "te", x),
    ):
        with pytest.raises(TypeError, match=rf"FRAMEWORKS\['equinox'\]: expected an adapter with .*{method}"):
            call()


def test_doctor_and_plan_of_a_new_framework(equinox_adapter):
    """They are those of the same module as a function of its parameters."""
    eqx, net = equinox_net()
    params, static = eqx.partition(net, eqx.is_array)
    fn, x = lambda params, x: eqx.combine(params, static)(x), jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
    rows = report_check.check((equinox_adapter, x), "te")
    assert [(row.layer, row.report, row.fp8, row.others) for row in rows[:2]] == [
        ("up", "FP8", 2, 0),
        ("down", "FP8", 3, 0),
    ]
    assert rows == report_check.check((fp8jax.transform(equinox_adapter, "te"), x), "te")
    assert rows == report_check.check((fn, (params, x)), "te")
    planned = memory.plan(equinox_adapter, "te", x)
    assert planned == memory.plan(fn, "te", params, x) and planned.inputs < 2 * 4 * x.size


def test_models_that_the_trainer_does_not_know(equinox_adapter):
    """A framework without an entry among the trainer's, and a function of parameters."""
    loss, config = lambda model, x: jnp.mean(model(x) ** 2), TrainConfig(recipe="te")
    for model, got in ((equinox_adapter, "a model of equinox"), (lambda params, x: x, "a function of param")):
        with pytest.raises(TypeError, match=f"`model`: fp8jax.train expects a Flax module, .*; got {got}"):
            Trainer(model, loss, config, X)
    with pytest.raises(TypeError, match="`model`: expected a model from fp8jax.transform; got Linear"):
        network_of(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), loss)


def test_transformed_models_of_the_commands(equinox_adapter):
    fn = lambda params, x: x @ params  # noqa: E731
    for plain in (nn.Dense(WIDTH), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), fn, equinox_adapter):
        model = fp8jax.transform(plain, "te")
        assert subject.transformed(model, "te") is model
        with pytest.raises(
            ValueError, match="expected a plain module for the recipe bf16; got one .* with te"
        ):
            subject.transformed(model, "bf16")
    with pytest.raises(TypeError, match="`model`: expected a Flax module, Linen or NNX, .*; got object"):
        subject.transformed(object(), "te")


def test_the_plain_model_has_no_adapters():
    lora, plain = fp8jax.LoRA(rank=4), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    model = fp8jax.transform(plain, "te", lora=lora)
    model.lora_b.set_value(jnp.ones_like(model.lora_b.get_value()))
    # The frozen kernel is in FP8, which rounds by a sixteenth at most.
    np.testing.assert_allclose(
        adapter_of(model).plain().kernel.get_value(), plain.kernel.get_value(), rtol=1 / 16, atol=1e-3
    )
    dense = nn.Dense(WIDTH)
    assert adapter_of(fp8jax.transform(dense, "te", lora=lora)).plain() is dense
    fn = lambda params, x: x @ params["w"]  # noqa: E731
    assert adapter_of(fp8jax.transform(fn, "te")).plain() is fn


def test_a_module_that_is_a_tree_is_no_function():
    _, net = equinox_net()
    with pytest.raises(TypeError, match="a tree with its parameters.*eqx.partition"):
        fp8jax.transform(net, "te")
    with_bound = jax.tree_util.Partial(lambda a, params, x: a * x @ params["w"], jnp.ones(()))
    fp8jax.transform(with_bound, "te").init({"w": jnp.ones((WIDTH, WIDTH))}, X)
