"""A mesh with explicit axes, `jax.make_mesh`'s default, gives what one with automatic axes does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import formats, quantize
from fp8jax.inspect import program, targets
from fp8jax.platforms import with_sharding
from fp8jax.quantization import amax, quantize_gradient, without_infinities

X = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))


class Module(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.mix = nnx.Einsum("bi,io->bo", (64, 8), rngs=rngs)

    def __call__(self, x):
        return self.mix(nnx.relu(self.up(x)))


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def spread(tree, mesh, spec):
    """Kernels sharded by `spec`, the rest everywhere."""

    def put(x):
        is_kernel = x.ndim == 2 and x.shape[0] % 8 == 0
        return jax.device_put(x, NamedSharding(mesh, spec if is_kernel else P()))

    return jax.tree.map(put, tree)


def two_steps(recipe, kind, spec):
    model, mesh = fp8jax.transform(Net(), recipe), mesh_of(kind)
    variables = model.init(jax.random.key(0), X)
    tx = fp8jax.optim.adam(1e-2, recipe)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    @jax.jit
    def step(variables, state, x):
        loss, grads, variables = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2))(variables)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, grads, loss

    with jax.set_mesh(mesh):
        variables = spread(variables, mesh, spec)
        state = jax.jit(tx.init)(variables)
        for _ in range(2):
            variables, state, grads, loss = step(variables, state, x)
    return variables, state, grads, loss


@pytest.mark.parametrize(
    "recipe, spec",
    [
        ("O2", P("data", None)),
        pytest.param("te", P(None, "model"), marks=pytest.mark.long),
        pytest.param("O3", P("model", None), marks=pytest.mark.long),
    ],
)
def test_explicit_axes_change_nothing(recipe, spec):
    got, want = (two_steps(recipe, kind, spec) for kind in (AxisType.Explicit, AxisType.Auto))
    for new in jax.tree.leaves(got[:3]):
        is_kernel = new.ndim == 2 and new.shape[0] % 8 == 0
        assert new.sharding.spec == (spec if is_kernel else P(*(None,) * new.ndim))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_modules_without_a_mesh_in_the_context(recipe):
    def losses(kind):
        model, mesh = fp8jax.transform(Module(), recipe), mesh_of(kind)
        graph, state = nnx.split(model)
        model = nnx.merge(graph, spread(state, mesh, P("data", None)))
        optimizer = nnx.Optimizer(model, fp8jax.optim.adam(1e-2, recipe), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = fp8jax.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        return [float(step(model, optimizer, x)) for _ in range(3)]

    np.testing.assert_allclose(losses(AxisType.Explicit), losses(AxisType.Auto), rtol=1e-5)


class Sharded(nnx.Module):
    """Layers that are told how their outputs are sharded: their operands alone do not say it."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.mix = nnx.Einsum("btw,wo->tbo", (64, 8), rngs=rngs)

    def __call__(self, x, sharded):
        hidden, out = (P("data", None, "model"), P(None, "data", "model")) if sharded else (None, None)
        return self.mix(self.up(x, out_sharding=hidden), out_sharding=out)


@pytest.mark.parametrize("recipe", ["te", "bf16"])
def test_outputs_are_sharded_as_a_model_says(recipe):
    model = fp8jax.transform(Sharded(), recipe)
    x = np.tile(X[:, None], (1, 4, 1))
    want = nnx.jit(lambda model: model(x, False))(model)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(model)
        model = nnx.merge(graph, spread(state, mesh, P("data", "model")))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        loss = lambda model: (lambda out: (jnp.mean(out**2), out))(model(x, True))  # noqa: E731
        (_, got), grads = nnx.jit(fp8jax.value_and_grad(loss, has_aux=True))(model)
    assert got.sharding.spec == P(None, "data", "model")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert grads["mix"]["kernel"].get_value().sharding.spec == P("data", "model")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("recipe", ["current", "O2"])
def test_sharding_of_a_transposed_kernel(recipe, kind):
    """FSDP by hand: the stored kernel is sharded over the devices of the batch, its transpose is gathered."""
    w = np.random.default_rng(1).standard_normal((4, 8, 32)).astype(np.float32)

    def grads_of(gathered, x, w):
        call = lambda params, x: jnp.einsum("bi,ijk->bjk", x, gathered(params["w"].transpose(2, 0, 1)))  # noqa: E731
        model = fp8jax.transform(call, recipe)
        variables = model.init({"w": w}, x)
        loss = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)  # noqa: E731
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(model.apply)(variables, x).eqns]
        return jax.jit(fp8jax.value_and_grad(loss))(variables, x)[:2], names

    want, _ = grads_of(lambda w: w, jnp.asarray(X), jnp.asarray(w))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded = jax.device_put((X, w), NamedSharding(mesh, P("data")))
        got, names = grads_of(lambda w: with_sharding(w, P(None, None, "model")), *sharded)
    # On explicit axes a product of the sharded kernel is an error of types.
    assert kind == AxisType.Explicit or names.count("sharding_constraint") == 1
    assert got[1]["w"].shape == (4, 8, 32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5), got, want)


def test_on_a_mesh_of_both_kinds_and_within_shard_map():
    recipe, dims = fp8jax.Recipe.parse("te"), (((1,), (0,)), ((), ()))
    x, w = jnp.asarray(X), jnp.asarray(X[:8].T)

    def product(x, w, **options):
        state = fp8jax.dot.init_state(recipe)
        return fp8jax.dot.dot_general(x, w, dims, recipe=recipe, state=state, **options)

    want = product(x, w)
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    given = jax.device_put(x, NamedSharding(mixed, P("data"))), jax.device_put(w, NamedSharding(mixed, P()))
    out = jax.jit(product)(*given)
    assert jax.typeof(out).sharding.spec == P("data", None)
    np.testing.assert_allclose(out, want, rtol=1e-5)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        told = product(x, w, out_sharding=P("data", None))
        x = jax.device_put(
            x, NamedSharding(mesh, P("data"))
        )  # on explicit axes JAX wants the spec's sharding
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
        rows = jax.jit(jax.shard_map(product, check_vma=False, **specs))(x, w)
    assert told.sharding.spec == P("data", None)
    np.testing.assert_allclose(told, want, rtol=1e-5)
    # Each device's scale is of its own rows.
    assert np.linalg.norm(rows - want) < 0.05 * np.linalg.norm(want)


def test_a_cast_keeps_an_explicit_sharding():
    mesh = mesh_of(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
    q = jax.jit(lambda x: quantize(x, formats.E4M3))(x)
    assert q.data.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(q.dequantize(), quantize(jnp.asarray(X), formats.E4M3).dequantize())


@pytest.mark.parametrize(
    "function",
    [
        amax,
        lambda x: amax(x, (4, 2)),
        without_infinities,
        lambda x: quantize(x, formats.E4M3),
        lambda x: quantize(x, formats.E4M3, blocks=(4, 2)),
        quantize_gradient,
    ],
)
@pytest.mark.parametrize("spec", [P("data", "model"), P("data", None), P(None, "model")])
def test_casts_and_amaxes_of_sharded_arrays(function, spec):
    """Under `jax.jit` they leave an explicit sharding and the values as they are."""
    x = X.copy()
    x[3, 5] = np.inf
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        out = jax.jit(function)(jax.device_put(x, NamedSharding(mesh, spec)))
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(jax.jit(function)(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
        if got.shape == x.shape:
            assert got.sharding.spec == spec


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize("recipe", ["current", "te", "O2", "fp8"])
def test_kernels_sharded_by_hand_are_gathered_as_codes(recipe):
    """FSDP by shardings of one's own: on an H200 XLA gathers what the GEMM reads, FP8."""
    mesh = targets.mesh("h200", 4)

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def split(leaf):
        return P("devices") if len(leaf.shape) == 2 and leaf.shape[0] > 1 else P()

    dense = nn.Dense(1024, dtype=jnp.bfloat16)
    model = fp8jax.transform(nn.Sequential([dense, nn.relu, dense.clone()]), recipe)
    x = placed(jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16), P("devices"))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: placed(leaf, split(leaf)), variables.pop("params"))
    variables = {"params": params, **jax.tree.map(lambda leaf: placed(leaf, P()), variables)}
    loss = lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))  # noqa: E731
    read = program.read(targets.compile_for(fp8jax.value_and_grad(loss), variables, x, devices=4))
    gathered = [each.dtype for each in read.collectives if each.kind == "all-gather" and each.numbers > 10**6]
    assert gathered and set(gathered) == {"f8e4m3fn"}
