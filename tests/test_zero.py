"""ZeRO on eight devices, which are this machine's processor eight times."""

import functools
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fp8jax
from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.inspect import program
from fp8jax.quantization import is_scaled, value
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

DEVICES = 8
pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason="conftest.py asks for eight CPU devices")

STAGES = (*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3)
X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)


class Layer(nn.Module):
    """One of a stack."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32, name="down")(nn.gelu(nn.Dense(64, name="up")(x))), None


class Net(nn.Module):
    """Scanned layers, a norm, a layer of its own, and one that no device count divides."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(32, name="last")(nn.Dense(35, name="odd")(nn.LayerNorm()(x)))


@functools.cache
def mesh(devices=DEVICES, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(kind,))


def training(model, recipe, zero, *, clip=0.1, microbatches=0):
    """The first state of a training, and its step."""
    tx = optax.chain(
        fp8jax.optim.clip_by_global_norm(clip), fp8jax.optim.adamw(1e-2, recipe, weight_decay=0.1, zero=zero)
    )

    def loss_fn(variables, x, y):
        return jnp.mean((model.apply(variables, x) - y) ** 2)

    gradient = (
        fp8jax.accumulate_gradients(loss_fn, microbatches, zero=zero)
        if microbatches
        else fp8jax.value_and_grad(loss_fn, zero=zero)
    )

    def first(key):
        variables = model.init(key, X)
        variables = variables if zero is None else zero.place(variables)
        return variables, tx.init(variables)

    def step(state, x, y):
        variables, opt_state = state
        loss, grads, variables = gradient(variables, x, y)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return (fp8jax.apply_updates(variables, updates), opt_state), loss, grads

    return jax.jit(first)(jax.random.key(0)), jax.jit(step)


class Training(NamedTuple):
    """Four steps of one, compiled once."""

    step: Any
    program: Any  # the compiled step
    first: Any  # state
    last: Any
    losses: list[float]
    grads: Any  # of the first step


def trained(recipe, zero, steps=4, **options):
    """A training of `Net`."""
    first, step = training(fp8jax.transform(Net(), recipe), recipe, zero, **options)
    step = step.lower(first, X, Y).compile()
    state, losses, all_grads = first, [], []
    for _ in range(steps):
        state, loss, grads = step(state, X, Y)
        losses.append(float(loss))
        all_grads.append(grads)
    return Training(step, program.read(step), first, state, losses, all_grads[0])


@functools.cache
def of_one(recipe):
    return trained(recipe, None)


@functools.cache
def of_stage(recipe, stage):
    return trained(recipe, Zero(mesh(), recipe, stage))


def same_on_all_devices(tree):
    """Where arrays are whole on every device, all have the same bytes."""
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.is_fully_replicated:
            shards = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
            assert len(set(shards)) == 1


def kernels(tree):
    """Those of the layers."""
    return [tree["layers"]["up"]["kernel"], tree["layers"]["down"]["kernel"], tree["last"]["kernel"]]


# The largest difference of losses of so few examples, from E4M3's 4 bits: each device's first scale of an
# input is its own. (Over a training it averages out, see examples/bench/zero.py.)
NOISE = 0.03

# O2 in every stage, the other recipes in one or two.
RECIPES = [
    ("O2", 3),
    *(
        pytest.param(recipe, stage, marks=pytest.mark.long)
        for recipe, stage in [
            ("O2", 0),
            ("O2", 1),
            ("O2", 2),
            ("te", 2),
            ("O3", 1),
            ("O3", 3),
            ("bf16", 3),
            ("fp16_amp", 2),
            ("O2,scaling=current", 2),
            ("O2,comm=BF16", 1),
            ("te,comm=FP8", 3),
        ]
    ),
]


@pytest.mark.parametrize("recipe, stage", RECIPES)
def test_the_losses_are_those_of_one_device(recipe, stage):
    run = of_stage(recipe, stage)
    np.testing.assert_allclose(run.losses, of_one(recipe).losses, rtol=NOISE)
    assert run.losses[-1] < run.losses[0]
    same_on_all_devices(run.last)
    if recipe == "fp16_amp":
        assert run.last[0][LOSS_SCALE]["good_steps"] == 4


@pytest.mark.parametrize("stage", STAGES)
def test_each_device_keeps_what_the_stage_says(stage):
    run = of_stage("O2", stage)
    variables, opt_state = run.last
    mu, nu = fp8jax.optim.moments(opt_state)
    for tree, is_split in (
        (run.grads, stage >= 1),
        (mu, stage >= 1),
        (nu, stage >= 1),
        (variables[PARAMS], stage == 3),
    ):
        for kernel in kernels(tree):
            data, scale = (kernel.data, kernel.scale) if is_scaled(kernel) else (kernel, None)
            assert data.addressable_shards[0].data.size * (DEVICES if is_split else 1) == data.size
            assert scale is None or scale.sharding.is_fully_replicated
        assert tree["odd"]["bias"].sharding.is_fully_replicated if tree is variables[PARAMS] else True
    for leaf in jax.tree.leaves(variables[SCALING]):
        assert leaf.sharding.is_fully_replicated


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_the_whole_batch(stage):
    """They are in the recipe's format."""
    one, many = of_one("O2").grads, of_stage("O2", stage).grads
    assert jax.tree.structure(many) == jax.tree.structure(one)
    for a, b in zip(*(jax.tree.leaves(t, is_leaf=is_scaled) for t in (many, one)), strict=True):
        if is_scaled(b):
            assert a.data.dtype == formats.E4M3.dtype and a.scale.shape == b.scale.shape
        assert np.linalg.norm(value(a) - value(b)) < 0.15 * np.linalg.norm(value(b))


@pytest.mark.parametrize("stage", STAGES)
def test_the_scaling_state_is_that_of_one_device(stage):
    """Output gradients are shares of the whole batch's mean: a state moves between numbers of devices."""
    many, one = of_stage("O2", stage).last[0][SCALING], of_one("O2").last[0][SCALING]
    assert jax.tree.structure(many) == jax.tree.structure(one)
    for a, b in zip(kernels(many), kernels(one), strict=True):
        ratio = np.asarray(a["amax_history"])[..., :4] / np.asarray(b["amax_history"])[..., :4]
        np.testing.assert_allclose(ratio, 1, atol=0.5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_number_on_one_device_makes_all_skip_the_step(stage):
    run = of_stage("O2", stage)
    for bad in (np.inf, np.nan):
        x = X.copy()
        x[9, 3] = bad  # of the third device's part
        after = run.step(run.last, x, Y)[0]
        assert fp8jax.optim.skipped(after[1]) == 1
        same_on_all_devices(after)
        params = (jax.tree.leaves(state[0][PARAMS]) for state in (after, run.last))
        for a, b in zip(*params, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert np.isfinite(run.step(after, X, Y)[1])


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_batch_in_parts_on_each_device(stage):
    run = trained("O2", Zero(mesh(), "O2", stage), microbatches=2)
    np.testing.assert_allclose(run.losses, of_one("O2").losses, rtol=NOISE)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_kernel_used_twice(stage):
    """Its gradient is a sum, so it leaves in float32."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(32)
            return nn.Dense(32)(layer(layer(x)))

    found = []
    for zero in (None, Zero(mesh(), "O2", stage)):
        state, step = training(fp8jax.transform(Twice(), "O2"), "O2", zero)
        losses = []
        for _ in range(3):
            state, loss, grads = step(state, X, Y)
            losses.append(float(loss))
        found.append(losses)
        assert grads["Dense_0"]["kernel"].data.dtype == formats.E4M3.dtype
    np.testing.assert_allclose(*found, rtol=NOISE)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_gradients_cross_in_eight_bits(stage):
    """Read from the compiled program: what is as large as a kernel's part."""
    read = of_stage("O2", stage).program
    large = {(c.kind, c.dtype) for c in read.collectives if c.numbers >= 32 * 64 // DEVICES}
    assert ("all-to-all", "u8") in large
    assert ("all-gather", "u16" if stage in (1, 2) else "u8") in large
    floats = {(kind, dtype) for kind, dtype in large if dtype[0] in "fb"}
    assert floats <= {("all-reduce", "f32"), ("all-gather", "f32"), ("reduce-scatter", "f32")}
    assert read.arguments < of_stage("O2", 0).program.arguments or stage == 0


@pytest.mark.parametrize("stage, sent", [(1, 1), (2, 2)])
def test_when_gradients_of_kernels_are_reduced(stage, sent):
    """In stage 1 together, after the backward; in stage 2 one by one inside of it, and never stored whole."""
    model, x = fp8jax.transform(nn.Sequential([nn.Dense(64), nn.Dense(128)]), "O2"), jnp.ones((32, 32))
    zero = Zero(mesh(), stage=stage)
    variables = zero.place(model.init(jax.random.key(0), x))
    grad = fp8jax.value_and_grad(lambda variables, x: jnp.mean(model.apply(variables, x) ** 2), zero=zero)
    assert str(jax.make_jaxpr(grad)(variables, x)).count("all_to_all[") == sent


class NNXNet(nnx.Module):
    """Two layers, and a norm whose statistics are kept but not used."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.0, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        self.norm(x)
        return self.down(nnx.gelu(x))


@functools.cache
def nnx_run(stage):
    """Losses and the trained model; with None on one device."""
    zero = None if stage is None else Zero(mesh(), "O2", stage)
    model = fp8jax.transform(NNXNet(nnx.Rngs(0)), "O2")
    if zero is not None:
        nnx.update(model, zero.place(nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, fp8jax.optim.adamw(1e-2, "O2", zero=zero), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss_fn = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
        loss, grads = fp8jax.value_and_grad(loss_fn, zero=zero)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, X, Y)) for _ in range(3)], model


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_nnx(stage):
    (losses, model), (alone, plain) = nnx_run(stage), nnx_run(None)
    np.testing.assert_allclose(losses, alone, rtol=NOISE)
    part = model.up.kernel.get_value().data.addressable_shards[0].data
    assert part.size * (DEVICES if stage == 3 else 1) == 32 * 64
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=0.1)


def test_microbatches_on_devices_draw_by_keys_of_their_own():
    def loss_fn(params, x, key):
        return jnp.mean(params["w"] * x), jax.random.bits(key)

    zero, parts = Zero(mesh(2), "O2"), 2
    params, key = {"w": jnp.ones(())}, jax.random.key(7)
    grad = fp8jax.accumulate_gradients(loss_fn, parts, has_aux=True, zero=zero, keys="key")
    (_, bits), _, _ = grad(params, X, key=key)
    want = [int(jax.random.bits(jax.random.fold_in(key, i))) for i in range(2 * parts)]
    assert bits.tolist() == [want[:parts], want[parts:]]
    for raw in (key, jax.random.PRNGKey(7)):
        with pytest.raises(ValueError, match="expected arrays of a batch; got a random key"):
            grad(params, X, raw)
        with pytest.raises(ValueError, match="expected arrays of a batch; got a random key"):
            fp8jax.value_and_grad(loss_fn, has_aux=True, zero=zero)(params, X, raw)


@pytest.mark.parametrize("kind", ["variables", "module"])
def test_a_loss_that_closes_over_its_batch_is_refused(kind):
    """Each device would compute all of it. Values that all devices share come as keyword arguments."""
    if kind == "module":
        params, loss_fn = nnx.Linear(32, 32, rngs=nnx.Rngs(0)), lambda model: jnp.mean(model(X))
    else:
        params, loss_fn = {"w": jnp.ones(())}, lambda params: jnp.mean(X * params["w"])
    zero = Zero(mesh(2), "O2")
    with pytest.raises(ValueError, match="`args`: expected arrays of a batch after the variables; got none"):
        fp8jax.value_and_grad(loss_fn, zero=zero)(params)
    assert fp8jax.value_and_grad(loss_fn, zero=Zero(mesh(1), "O2"))(params)[0].shape == ()
    shared = fp8jax.value_and_grad(lambda params, *, x: loss_fn(params) + jnp.mean(x), zero=zero)
    assert shared(params, x=X)[0].shape == ()


def test_random_bits_of_microbatches_on_devices():
    """Each microbatch of an NNX module on each device draws bits of its own."""

    def loss_fn(model, x):
        out = model(jnp.ones_like(x))
        return jnp.mean(out), out

    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    grad = fp8jax.accumulate_gradients(loss_fn, 2, has_aux=True, zero=Zero(mesh(2), "O2"))
    (_, out), _ = nnx.jit(grad)(model, X)
    assert len({np.asarray(part).tobytes() for part in out.reshape(4, -1)}) == 4
    assert int(model.rngs.count[...]) == 1


@pytest.mark.long
def test_a_mesh_with_explicit_axes():
    explicit = mesh(kind=AxisType.Explicit)
    with jax.set_mesh(explicit):
        run = trained("O2", Zero(explicit, "O2", 2))
    np.testing.assert_allclose(run.losses, of_one("O2").losses, rtol=NOISE)


@pytest.mark.parametrize("recipe", ["O2", "te"])
def test_a_jitted_init_on_a_mesh_with_explicit_axes(recipe):
    """First states do not depend on arrays, so without `jax.set_mesh` JAX knows no devices, and says so."""
    explicit = mesh(kind=AxisType.Explicit)
    zero = Zero(explicit, recipe, 2)
    params = zero.place({"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)})
    tx = fp8jax.optim.adamw(1e-3, recipe, zero=zero)
    with pytest.raises(ValueError, match="enter your `jit` into a mesh context via `jax.set_mesh`"):
        jax.jit(tx.init)(params)
    with jax.set_mesh(explicit):
        got, want = jax.jit(tx.init)(params), tx.init(params)
    types = lambda tree: [(jax.typeof(x), x.sharding) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert types(got) == types(want)
    assert "data" in str(types(got))


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_with_kernels_sharded_along_another_axis(stage):
    """Tensor parallelism is the user's mesh and JAX's partitioner; ZeRO is of the other axis."""
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = Zero(two, "O2", stage, axis_name="data")
    state, step = training(fp8jax.transform(Net(), "O2"), "O2", zero)
    for name, spec in (
        ("up", PartitionSpec(None, None, "model")),
        ("down", PartitionSpec(None, "model", None)),
    ):
        kernel = state[0][PARAMS]["layers"][name]["kernel"]
        data = jax.device_put(kernel.data, NamedSharding(two, spec)) if stage == 0 else kernel.data
        state[0][PARAMS]["layers"][name]["kernel"] = fp8jax.ScaledArray(data, kernel.scale)
    losses = []
    for _ in range(3):
        state, loss, _ = step(state, X, Y)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, of_one("O2").losses[:3], rtol=NOISE)


@pytest.mark.parametrize("recipe, devices, stage", [("O2", 3, 0), ("fp8", 6, 2)])
def test_devices_that_are_no_power_of_two(recipe, devices, stage):
    """The sum of their FP8 gradients is that of one device, whose scale is a power of two."""
    model = fp8jax.transform(nn.Dense(48), recipe)
    x = jax.random.normal(jax.random.key(1), (30, 36))
    variables = model.init(jax.random.key(0), x)
    loss_fn = lambda variables, x: jnp.mean((model.apply(variables, x) - 1) ** 2)  # noqa: E731
    found = []
    for zero in (None, Zero(mesh(devices), stage=stage)):
        _, grads, _ = jax.jit(fp8jax.value_and_grad(loss_fn, zero=zero))(variables, x)
        found.append(grads["kernel"].dequantize())
    one, several = found
    assert np.linalg.norm(several - one) < 0.06 * np.linalg.norm(one)


@pytest.mark.parametrize("stage, first", [(0, None), (1, None), (3, "data")])
def test_placing_keeps_the_sharding_over_another_axis(stage, first):
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    zero = Zero(two, "O2", stage, axis_name="data")
    columns = NamedSharding(two, PartitionSpec(None, "model"))
    kernel = fp8jax.quantize(jnp.ones((32, 64)), formats.FP16)
    kernel = fp8jax.ScaledArray(jax.device_put(kernel.data, columns), kernel.scale)
    params = zero.place({"kernel": kernel, "plain": jax.device_put(jnp.ones((32, 64)), columns)})
    assert params["kernel"].data.sharding.spec == PartitionSpec(first, "model")
    assert params["plain"].sharding.spec == PartitionSpec(first, "model")
    mu, nu = fp8jax.optim.moments(fp8jax.optim.adamw(1e-2, "O2", zero=zero).init(params))
    for moment in (mu["kernel"].data, nu["kernel"].data, mu["plain"].data):
        assert moment.sharding.spec == PartitionSpec("data" if stage else None, "model")


@pytest.mark.long
def test_zero_on_one_device():
    run = trained("O2", Zero(mesh(1), "O2", 3))
    np.testing.assert_array_equal(run.losses, of_one("O2").losses)
    assert max(collective.numbers for collective in run.program.collectives) < 32 * 64


@pytest.mark.parametrize(
    "recipe, stage",
    [
        ("O2", 0),
        ("O2", 2),
        ("te,comm=FP8", 2),
        pytest.param("te,comm=FP8", 0, marks=pytest.mark.long),
        *(pytest.param("O2,comm=BF16", stage, marks=pytest.mark.long) for stage in (0, 2)),
    ],
)
def test_scale_with_zero_gradients_on_one_device(recipe, stage):
    """Rows of padding on one device, and inputs that are zero on all: zero parts."""
    model = fp8jax.transform(nn.Dense(32, use_bias=False), recipe)
    variables = model.init(jax.random.key(0), X)
    x = X.copy()
    x[4:8] = 0
    x[:, :2] = 0

    def loss_fn(variables, x):
        return 1e-4 * jnp.mean(model.apply(variables, x) ** 2)

    many = fp8jax.value_and_grad(loss_fn, zero=Zero(mesh(), recipe, stage))(variables, x)[1]["kernel"]
    one = fp8jax.value_and_grad(loss_fn)(variables, x)[1]["kernel"]
    assert np.linalg.norm(value(many) - value(one)) < 0.15 * np.linalg.norm(value(one)) != 0


def test_zeros_cross_with_others():
    found = jax.jit(
        jax.shard_map(
            lambda x: (
                fp8jax.comm.all_reduce(x[0], "data", floats="FP8"),
                fp8jax.comm.all_gather(x, "data", floats="FP8"),
            ),
            mesh=mesh(),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(jnp.array([1e-5, 0, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5])[:, None])
    np.testing.assert_allclose(found[0], 0.875e-5, rtol=0.07)
    np.testing.assert_allclose(found[1][:3, 0], [1e-5, 0, 1e-5], rtol=0.07)


@pytest.mark.parametrize("recipe", [pytest.param("te", marks=pytest.mark.long), "O2"])
def test_boxes_of_axis_names_and_flags(recipe):
    """The axes of a user's mesh have other names than the devices', and a flag is no array."""

    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            x = nn.Dense(32, kernel_init=init, name="up")(x)
            return nn.Dense(32, kernel_init=init, name="lm_head")(x) * (2 if train else 1)

    model = fp8jax.transform(Boxed(), recipe)
    variables = model.init(jax.random.key(0), X)

    def loss_fn(variables, x, *, train):
        return jnp.mean(model.apply(variables, x, train=train) ** 2)

    one, _, _ = fp8jax.value_and_grad(loss_fn)(variables, X, train=True)
    many, grads, new = fp8jax.value_and_grad(loss_fn, zero=Zero(mesh(), recipe, 2))(variables, X, train=True)
    np.testing.assert_allclose(many, one, rtol=NOISE)
    assert isinstance(grads["lm_head"]["kernel"], nn.Partitioned)


@pytest.mark.parametrize("kind", ["logical", "spec", "sharding", "reshard", "out_sharding"])
def test_constraints_over_the_devices_are_refused(kind):
    """Each device has its part of the batch; one sentence says so, for each of JAX's own errors."""
    P, own = (
        PartitionSpec,
        mesh(2, AxisType.Explicit if kind in ("reshard", "out_sharding") else AxisType.Auto),
    )
    constrained = {
        "logical": lambda x: nn.with_logical_constraint(x, ("batch", None)),
        "spec": lambda x: jax.lax.with_sharding_constraint(x, P("data")),
        "sharding": lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(own, P("data"))),
        "reshard": lambda x: jax.sharding.reshard(x, P("data", None)),
        "out_sharding": lambda x: jnp.matmul(x, jnp.eye(32), out_sharding=P("data", None)),
    }
    model = fp8jax.transform(lambda params, x: constrained[kind](x @ params["w"]), "current")
    loss = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)  # noqa: E731
    step = jax.jit(fp8jax.value_and_grad(loss, zero=Zero(own, stage=2)))
    with jax.set_mesh(own), nn.logical_axis_rules((("batch", "data"),)):
        x = jax.device_put(X, NamedSharding(own, P("data")))
        with pytest.raises(ValueError, match="constraints, and rules of logical axes, without 'data'"):
            step({"params": {"w": jnp.ones((32, 32))}}, x)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["te", "mxfp8"])
def test_a_stack_whose_axis_is_not_in_front(recipe):
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=8)
            return layers(name="layers")(x, None)[0]

    model = fp8jax.transform(Stack(), recipe)
    variables = model.init(jax.random.key(0), X)
    loss_fn = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)  # noqa: E731
    one, _, _ = fp8jax.value_and_grad(loss_fn)(variables, X)
    for stage in (2, 3):
        zero = Zero(mesh(), recipe, stage)
        many, _, _ = fp8jax.value_and_grad(loss_fn, zero=zero)(zero.place(variables), X)
        np.testing.assert_allclose(many, one, rtol=NOISE)


def test_nnx_streams_constants_and_intermediates():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(32, 32, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.least = nnx.BatchStat(jnp.full((4,), jnp.finfo(jnp.float32).min))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "mask", self.dropout(jnp.ones_like(x[:, :32])) > 0)
            return self.layer(x)

    model = fp8jax.transform(Noisy(nnx.Rngs(0)), "O2")
    key = jax.random.key_data(model.dropout.rngs.key[...])
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    fp8jax.value_and_grad(loss_fn, zero=Zero(mesh(), "O2", 0))(model, X)
    np.testing.assert_array_equal(model.least[...], jnp.finfo(jnp.float32).min)
    np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), key)
    [mask] = model.mask.get_value()
    assert mask.shape == (len(X), 32)
    parts = np.asarray(mask).reshape(DEVICES, -1)
    assert len({part.tobytes() for part in parts}) == DEVICES


def test_auxiliary_outputs_and_keyword_arguments():
    """Auxiliary outputs are stacked, and keyword arguments are not split."""
    model = fp8jax.transform(Net(), "O2")
    zero = Zero(mesh(), "O2", 0)

    def loss_fn(variables, x, *, factor):
        y = model.apply(variables, x)
        return jnp.mean(y**2) * factor[0], {"mean": jnp.mean(y), "rows": len(x)}

    gradient = fp8jax.value_and_grad(loss_fn, has_aux=True, zero=zero)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    (loss, aux), _, _ = gradient(variables, X, factor=jnp.full((3,), 2.0))  # not jitted
    whole = jax.jit(model.apply)(variables, X)
    assert aux["mean"].shape == (DEVICES,) and (aux["rows"] == len(X) // DEVICES).all()
    np.testing.assert_allclose(loss, 2 * np.mean(whole**2), rtol=0.05)
    np.testing.assert_allclose(np.mean(aux["mean"]), np.mean(whole), atol=0.02)


@pytest.mark.long
def test_moments_in_the_hosts_memory():
    zero = Zero(mesh(), "O2", 1, offload=True)
    run = trained("O2", zero)
    np.testing.assert_allclose(run.losses, of_stage("O2", 1).losses, rtol=1e-6)
    mu, _ = fp8jax.optim.moments(run.last[1])
    for kernel in kernels(mu):
        assert kernel.data.sharding.memory_kind == "pinned_host"


COMM = {"te": "float32", "block": "float32", "bf16": "float32", "O2": "uint8", "te,comm=BF16": "bfloat16"}


@pytest.mark.parametrize("recipe", COMM)
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_sent_in_the_format_of_the_model(recipe, stage):
    """`Zero` is not told the recipe again."""
    module, zero = nn.Dense(64), Zero(mesh(), stage=stage)
    model = fp8jax.transform(module, recipe)
    variables = model.init(jax.random.key(0), X)
    grad_fn = fp8jax.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2), zero=zero)
    found = collectives(jax.make_jaxpr(grad_fn)(zero.place(variables), X).jaxpr)
    sent = {str(eqn.invars[0].aval.dtype) for eqn in found}
    assert sent == {COMM[recipe]}


def collectives(jaxpr):
    """The equations that reduce-scatter or exchange matrices."""
    found = []
    for eqn in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += collectives(inner)
        if eqn.primitive.name in ("reduce_scatter", "all_to_all") and eqn.invars[0].aval.size > 64:
            found.append(eqn)
    return found


def test_two_models_send_gradients_in_their_own_formats():
    models = {name: fp8jax.transform(nn.Dense(64), name) for name in ("te", "O2")}
    each = {name: model.init(jax.random.key(0), X) for name, model in models.items()}
    variables = {kind: {name: each[name][kind] for name in each} for kind in (PARAMS, SCALING)}

    def loss(variables, x):
        own = {name: {kind: tree[name] for kind, tree in variables.items()} for name in models}
        return sum(jnp.mean(model.apply(own[name], x) ** 2) for name, model in models.items())

    zero = Zero(mesh(), stage=2)
    grad_fn = fp8jax.value_and_grad(loss, zero=zero)
    found = collectives(jax.make_jaxpr(grad_fn)(zero.place(variables), X).jaxpr)
    assert sorted(str(eqn.invars[0].aval.dtype) for eqn in found) == ["float32", "uint8"]


def test_a_recipe_that_contradicts_the_model():
    model = fp8jax.transform(nn.Dense(64), "te")
    zero = Zero(mesh(), "O2", stage=2)
    grad_fn = fp8jax.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2), zero=zero)
    with pytest.raises(
        ValueError, match="`zero`: expected a recipe with comm=FP32, .*got O2 .*stage=2"
    ) as error:
        grad_fn(model.init(jax.random.key(0), X), X)
    assert "\n" not in str(error.value)


def test_bad_input():
    for other in (jax.devices(), None, mesh().abstract_mesh):
        says = f"`mesh`: expected a jax.sharding.Mesh; got {type(other).__name__}."
        with pytest.raises(ValueError, match=re.escape(says)):
            Zero(other, stage=1)
    with pytest.raises(ValueError, match=r"`stage`: expected 0, 1, 2 or 3; got 4"):
        Zero(mesh(), "O2", 4)
    with pytest.raises(ValueError, match=r"`axis_name`.*'data'.*'rows'"):
        Zero(mesh(), "O2", 1, axis_name="rows")
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with pytest.raises(ValueError, match="the one to split the batch over"):
        Zero(two, "O2", 1)
    both = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match="`mesh`: expected Auto axes"):
        Zero(both, "O2", 1, axis_name="data")
    with pytest.raises(ValueError, match="no recipe|recipe"):
        Zero(mesh(), "O9", 1)
    _, step = training(fp8jax.transform(Net(), "O2"), "O2", Zero(mesh(), "O2", 0))
    state = of_one("O2").first
    with pytest.raises(
        ValueError, match=r"divisible by the 8 devices of axis 'data' and not 0; got shape \(30, 32\)"
    ):
        step(state, X[:30], Y[:30])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_after_orbax(tmp_path, name, kind):
    """What the optimizer counts is restored on the devices of the parameters."""
    zero = Zero(mesh(kind=kind), "fp8", stage=1)
    tx = getattr(fp8jax.optim, name)(1e-3, "fp8", zero=zero)
    params = zero.place({"k": fp8jax.quantize(jnp.ones((64, 256)), formats.FP16, power_of_two=True)})
    grads = jax.device_put({"k": jnp.ones((64, 256))}, NamedSharding(zero.mesh, PartitionSpec()))
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "kept", {"params": params, "state": state})
        like = {"params": params, "state": tx.init(params)}
        restored = checkpointer.restore(tmp_path / "kept", like)
    got = update(grads, restored["state"], restored["params"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(update(grads, state, params)), strict=True):
        np.testing.assert_array_equal(a, b)
