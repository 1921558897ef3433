"""Block scaling with sharded and frozen kernels, experts, remat and resumed runs."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import Recipe
from fp8jax.comm import Zero
from fp8jax.comm.shard import ShardSpec
from fp8jax.dot import Weight, dot_general, init_ragged_state, init_state, ragged_dot
from fp8jax.inspect import program, targets
from fp8jax.quantization import NVFP4_16X16, is_scaled, quantize, value
from fp8jax.quantization.kernels import rows_and_columns_fp4
from fp8jax.scaling import nvfp4, seeds
from fp8jax.train import checkpoint, metrics
from fp8jax.variables import FROZEN, PARAMS, SCALING

RECIPES = ["block", "mxfp8", "nvfp4"]
long = functools.partial(pytest.param, marks=pytest.mark.long)
DEVICES = 4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def same_bits(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# Sharded kernels #################################################################################

# A kernel's shape, how many of its first axes are contracted, and the sharded axis.
ROWS, COLUMNS = ((512, 256), 1, -2), ((256, 512), 1, -1)
HEADS, RUNS = ((256, 8, 64), 1, -2), ((2, 512, 128), 2, -2)


def run_sharded(recipe, kernel, contracted, axis):
    """Output and gradient of the input on each device, and the compiled program; without `axis` on one."""
    x = normal(1, 24, *kernel.shape[:contracted])
    numbers = ((tuple(range(1, contracted + 1)), tuple(range(contracted))), ((), ()))

    def on_device(kernel):
        shard = None if axis is None else ShardSpec("data", axis, DEVICES, "FP32", True)
        weight = Weight(kernel, jnp.zeros(kernel.shape, jnp.float32), shard)
        state = init_state(recipe)
        out, pull = jax.vjp(lambda x: dot_general(x, weight, numbers, recipe=recipe, state=state), x)
        return out, pull(jnp.sin(out))[0]

    if axis is None:
        return jax.jit(on_device)(kernel), ""
    spec = P(*("data" if i == axis % kernel.ndim else None for i in range(kernel.ndim)))
    spec = jax.tree.map(lambda leaf: spec if leaf.ndim else P(), kernel)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(spec,), out_specs=P(), check_vma=False)
    run = jax.jit(run).lower(kernel).compile()
    return run(kernel), run.as_text()


def gathered_bytes(text):
    """The bytes that a device has after the all-gathers of a program, by dtype."""
    sizes, found = {"u8": 1, "u16": 2, "u32": 4, "f32": 4}, {}
    for shapes in re.findall(r"= (.*?) all-gather(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            count = int(np.prod([int(n) for n in shape.split(",") if n]))
            found[dtype] = found.get(dtype, 0) + count * sizes[dtype]
    return found


# All-gathers of what forward and backward send alike. In JAX 0.10 XLA for CPUs drops the barrier between
# them, and shares one; in 0.12 the barrier holds.
GATHERS = 1 if jax.__version_info__ < (0, 11) else 2


@pytest.mark.parametrize(
    "case, format",
    [
        (ROWS, None),
        (RUNS, None),
        (COLUMNS, "E4M3"),
        *(long(*each) for each in ((COLUMNS, None), (HEADS, None), (ROWS, "FP16"))),
    ],
    ids=["rows", "runs", "E4M3", "columns", "heads", "FP16"],
)
@pytest.mark.parametrize("recipe", [*RECIPES, long("nvfp4,fp4_options=stochastic")])
def test_sharded_kernels_are_sent_as_codes(recipe, case, format):
    """Forward and backward gather codes and scales, and compute what the whole kernel does, to the bit."""
    shape, contracted, axis = case
    kernel = normal(0, *shape)
    kernel = kernel if format is None else quantize(kernel, format, power_of_two=True)
    expected, _ = run_sharded(recipe, kernel, contracted, None)
    ours, text = run_sharded(recipe, kernel, contracted, axis)
    same_bits(ours, expected)
    # Bytes a value: a code, and the scales of blocks.
    each = {"block": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16**2}
    each = each.get(recipe, 0.5 + 1 / 16)
    # E4M3 codes are sent as they are.
    total = GATHERS if format == "E4M3" and not recipe.startswith("nvfp4") else 2 * each
    assert sum(gathered_bytes(text).values()) == total * np.prod(shape)


@pytest.mark.parametrize("recipe, shape", [("block", (256, 64)), ("mxfp8", (64, 48)), ("nvfp4", (32, 48))])
def test_shards_without_whole_blocks_are_sent_as_stored(recipe, shape):
    kernel = normal(0, *shape)
    expected, _ = run_sharded(recipe, kernel, 1, None)
    ours, text = run_sharded(recipe, kernel, 1, -2)
    same_bits(ours, expected)
    # MX blocks along the columns are whole, so dgrad's copy is sent as codes; 48 columns are padded to 64.
    codes, gathers = ({"u8": 64 * (64 + 2)}, 1) if recipe == "mxfp8" else ({}, GATHERS)
    assert gathered_bytes(text) == {"f32": 4 * kernel.size * gathers, **codes}


@pytest.mark.long
def test_kernel_with_the_amax_of_a_whole_tensor(monkeypatch):
    """NVFP4's Pallas kernel, interpreted, gives a shard the codes that the emulation gives it."""
    monkeypatch.setattr(rows_and_columns_fp4, "INTERPRET", True)
    static = {"method": NVFP4_16X16, "transposes": (False, True), "transform": False, "seeds": nvfp4._seeds}
    ways = rows_and_columns_fp4._at_once, rows_and_columns_fp4._one_by_one
    ours, expected = (way(normal(0, 128, 64), None, jnp.full((1, 1), 9.5), **static) for way in ways)
    same_bits(ours, expected)


# Frozen kernels ##################################################################################

# Bytes a number of a frozen kernel: of the codes, and of the scales.
STORED = {"block": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16**2}
X = normal(3, 16, 256)


class Net(nn.Module):
    """Layers of whole blocks, scanned ones, one of heads and one of other sides."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(256, name="fc")(x), None

        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x = nn.DenseGeneral((4, 64), name="heads")(stack(name="layers")(x, None)[0])
        return nn.Dense(72, name="odd")(nn.DenseGeneral(256, axis=(-2, -1), name="out")(nn.gelu(x)))


@functools.cache
def adapted(recipe):
    """A model with adapters that are not zero, and its variables."""
    model = fp8jax.transform(Net(), recipe, lora=fp8jax.LoRA(rank=4))
    variables = model.init(jax.random.key(0), X)
    keys = iter(jax.random.split(jax.random.key(1), 20))
    random = lambda x: 0.1 * jax.random.normal(next(keys), x.shape)  # noqa: E731
    return model, {**variables, PARAMS: jax.tree.map(random, variables[PARAMS])}


def gradient(model, variables):
    loss_fn = lambda variables: jnp.mean(jnp.sin(model.apply(variables, X)))  # noqa: E731
    return jax.jit(fp8jax.value_and_grad(loss_fn))(variables)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_kernels_are_stored_in_blocks(recipe):
    """Codes and scales, in E4M3 with one scale where the sides are not whole blocks; no float32 kernel."""
    model, variables = adapted(recipe)
    plain = Net().init(jax.random.key(0), X)[PARAMS]
    for layer, below in variables[FROZEN].items():
        kernel = below.get("fc", below)["kernel"].validate()
        is_whole = layer != "odd" or recipe == "mxfp8"  # 256 rows of MX blocks, and 72 columns
        of_tensors = 4 * (2 if layer == "layers" else 1) * (recipe == "nvfp4" or not is_whole)
        assert kernel.nbytes == (STORED[recipe] if is_whole else 1) * kernel.size + of_tensors, layer
        # Half a step at the format's max, on a scale that is up to twice, or for E4M3 a 16th, too large.
        bound = 1 / 6 * 17 / 16 if recipe == "nvfp4" else 16 / 224
        exact = plain[layer].get("fc", plain[layer])["kernel"]
        assert jnp.max(jnp.abs(value(kernel) - exact)) <= bound * jnp.max(jnp.abs(exact))


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_kernels_multiply_as_plain_ones(recipe):
    """Loss and gradients of adapters equal, to the bit, those of a float32 kernel: for block and mxfp8 of the
    dequantized values; for nvfp4, whose codes would be rounded again, of the values before freezing."""
    model, variables = adapted(recipe)
    if recipe == "nvfp4":
        frozen = Net().init(jax.random.key(0), X)[PARAMS]
        frozen["odd"] = jax.tree.map(value, variables[FROZEN]["odd"], is_leaf=is_scaled)
    else:
        frozen = jax.tree.map(value, variables[FROZEN], is_leaf=is_scaled)
    ours, expected = gradient(model, variables), gradient(model, {**variables, FROZEN: frozen})
    same_bits(ours[:2], expected[:2])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_frozen_kernels_are_written_and_read(recipe, dtype, tmp_path):
    """From plain values into the formats of variables, by msgpack and by orbax; a model's dtype is kept."""
    layer = nn.Dense(128, param_dtype=dtype)
    model = fp8jax.transform(layer, recipe, lora=fp8jax.LoRA(rank=2))
    plain, other = (layer.init(jax.random.key(seed), X) for seed in (0, 1))
    variables = model.adapt(jax.random.key(2), plain, X)
    kernel = variables[FROZEN]["kernel"]
    assert kernel.own_dtype == dtype and model.apply(variables, X.astype(dtype)).dtype == dtype
    like = model.adapt(jax.random.key(2), other, X)
    same_bits(model.quantize(plain, like=like), variables)
    same_bits(serialization.from_bytes(like, serialization.to_bytes(variables)), variables)
    checkpoint.save(tmp_path, 1, variables)
    found, skipped = checkpoint.restore(tmp_path, like)
    assert found is not None and not skipped
    same_bits(found.state, variables)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_kernels_of_nnx(recipe):
    layer = nnx.LinearGeneral(256, (4, 64), rngs=nnx.Rngs(0))
    model = fp8jax.transform(layer, recipe, lora=fp8jax.LoRA(rank=2))
    assert model.kernel.get_value().nbytes == STORED[recipe] * layer.kernel.size + 4 * (recipe == "nvfp4")
    plain = fp8jax.transform(layer, recipe)
    np.testing.assert_array_equal(model(X), plain(X))


# Experts #########################################################################################

SIZES = jnp.array([200, 0, 133, 5])


def grouped(recipe, x, w, g, sizes=SIZES):
    """Output and gradients of a ragged dot, and the bytes of its residuals beside the kernels."""
    state = init_ragged_state(recipe, len(w))
    run = lambda x, w, state: ragged_dot(x, w, sizes, recipe=recipe, state=state)  # noqa: E731
    y, pull = jax.vjp(run, x, w, state)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.size != w.size and leaf.ndim > 1)
    return (y, *pull(g)[:2]), kept


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_experts_are_dots_of_each_group(recipe):
    """Rows of a group have the scale blocks of `dot_general`, without rows of other groups."""
    x, w, g = normal(0, 352, 256), normal(1, 4, 256, 160), normal(2, 352, 160)
    x = x.at[210, 3].set(jnp.nan)
    ours, kept = grouped(recipe, x, w, g)
    numbers, start = (((1,), (0,)), ((), ())), 0
    for group, size in enumerate(SIZES):
        rows = slice(start, start + int(size))
        start += int(size)
        dot = lambda x, w: dot_general(x, w, numbers, recipe=recipe, state={})  # noqa: E731
        y, pull = jax.vjp(dot, x[rows], w[group])
        dx, dw = pull(g[rows])
        for one, other in ((ours[0][rows], y), (ours[1][rows], dx), (ours[2][group], dw)):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
    assert not ours[0][start:].any() and not ours[1][start:].any()
    # The rows, each group padded to whole blocks, a byte a number and a scale a block.
    each, block_size = (1 + 4 / 128, 128) if recipe == "block" else (1 + 1 / 32, 32)
    total = -(-(352 + 4 * (block_size - 1)) // block_size) * block_size
    assert kept == each * total * 256


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_without_rows(recipe):
    (y, dx, dw), _ = grouped(recipe, normal(0, 0, 32), normal(1, 4, 32, 16), normal(2, 0, 16), 0 * SIZES)
    assert (y.shape, dx.shape, dw.shape) == ((0, 16), (0, 32), (4, 32, 16)) and not dw.any()


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize(
    "recipe, target, kind",
    [
        ("block", "h200", "pallas"),
        ("mxfp8", "b200", "cudnn"),
        ("nvfp4", "b200", "cudnn"),
    ],
)
def test_compiled_gemms_of_experts(recipe, target, kind):
    """One GEMM in each of three loops over blocks of rows, and no cast of a kernel in a loop."""
    state = init_ragged_state(recipe, 4)
    shapes = ((2048, 256), (4, 256, 384), (2048, 384))
    x, w, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def run(x, w, state, g, sizes):
        dot = lambda x, w, state: ragged_dot(x, w, sizes, recipe=recipe, state=state)  # noqa: E731
        y, pull = jax.vjp(dot, x, w, state)
        return y, *pull(g)

    compiled = targets.compile_for(run, x, w, state, g, sizes, target=target)
    read = program.read(compiled)
    assert [gemm.kind for gemm in read.gemms] == [kind] * 3 and all(gemm.is_fp8 for gemm in read.gemms)
    casts = [line for line in compiled.as_text().splitlines() if "cast_rhs" in line]
    assert casts and not any("/while/body/" in line for line in casts)


# Remat ###########################################################################################


class Blocks(nn.Module):
    """Two blocks of two layers, whose second input is computed from the first output."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x + nn.Dense(256, name="down")(jnp.sin(nn.Dense(512, name="up")(x)))

        return Block(name="second")(Block(name="first")(x))


@functools.cache
def checkpointed(recipe, policy):
    """The loss and its gradients, and the bytes of the residuals."""
    model = fp8jax.transform(Blocks(), recipe, gradient_checkpointing=policy)
    x = normal(4, 128, 256)
    variables = model.init(jax.random.key(0), x)
    loss_fn = lambda variables: jnp.mean(jnp.sin(model.apply(variables, x)))  # noqa: E731
    pull = jax.eval_shape(lambda variables: jax.vjp(loss_fn, variables)[1], variables)
    sizes = (np.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in jax.tree.leaves(pull))
    return jax.jit(fp8jax.value_and_grad(loss_fn))(variables), sum(sizes)


@pytest.mark.filterwarnings("ignore:a gradient is taken with respect to weights")
@pytest.mark.parametrize("policy", ["fp8", "full", long("dots")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_remat_gives_the_same_bits(recipe, policy):
    """Also of gradients that NVFP4 rounds at random. "full" is the default policy of `jax.checkpoint`."""
    same_bits(checkpointed(recipe, policy)[0], checkpointed(recipe, "none")[0])


@pytest.mark.filterwarnings("ignore:a gradient is taken with respect to weights")
@pytest.mark.parametrize("recipe, each", [("block", 1 + 4 / 128), ("mxfp8", 1 + 1 / 32), ("nvfp4", 9 / 16)])
def test_remat_saves_codes(recipe, each):
    """For each layer the codes and scales of its input for wgrad, and nothing in high precision."""
    full, fp8, none = (checkpointed(recipe, policy)[1] for policy in ("full", "fp8", "none"))
    of_tensors = 4 * 4 * (recipe == "nvfp4")
    assert fp8 - full == 2 * 128 * (256 + 512) * each + of_tensors
    assert fp8 < none


# Steps ###########################################################################################


def training(recipe):
    """The first state of a training, and its step."""
    model, tx = fp8jax.transform(Blocks(), recipe), fp8jax.optim.adamw(1e-2, recipe)
    variables = model.init(jax.random.key(0), normal(4, 64, 256))

    @jax.jit
    def step(state, x):
        loss_fn = lambda variables, x: jnp.mean((model.apply(variables, x) - jnp.sin(x)) ** 2)  # noqa: E731
        variables, opt_state = state
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables, x)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return (fp8jax.apply_updates(variables, updates), opt_state), loss

    return (variables, tx.init(variables)), step


@pytest.mark.parametrize("recipe", ["nvfp4", long("nvfp4+O2"), long("mxfp8+fp8")])
def test_a_resumed_run_has_the_same_bits(recipe, tmp_path):
    """Random bits of NVFP4's gradients come from the steps that the saved state counts."""
    state, step = training(recipe)
    for i in range(4):
        state, loss = step(state, normal(i, 64, 256))
        if i == 1:
            checkpoint.save(tmp_path, 2, state)
    like, step = training(recipe)
    found, _ = checkpoint.restore(tmp_path, like)
    assert found is not None
    resumed = found.state
    for i in (2, 3):
        resumed, loss_of_resumed = step(resumed, normal(i, 64, 256))
    same_bits((resumed, loss_of_resumed), (state, loss))
    if recipe == "nvfp4":
        # A key that begins anew draws other bits.
        (variables, opt_state), (first, _) = found.state, like
        (other, _), _ = step(({**variables, SCALING: first[SCALING]}, opt_state), normal(2, 64, 256))
        (same, _), _ = step(found.state, normal(2, 64, 256))
        assert (other[PARAMS]["first"]["up"]["kernel"] != same[PARAMS]["first"]["up"]["kernel"]).any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_and_optimizer_states(recipe):
    """Accumulated gradients are the mean of those of microbatches, NVFP4 counts one step, and optimizers have
    the states that they have for bf16."""
    model, x = fp8jax.transform(Blocks(), recipe), normal(4, 64, 256)
    variables = model.init(jax.random.key(0), x)
    loss_fn = lambda variables, x: jnp.mean((model.apply(variables, x) - jnp.sin(x)) ** 2)  # noqa: E731
    _, grads, new = jax.jit(fp8jax.accumulate_gradients(loss_fn, 2, format="FP32"))(variables, x)
    states = [
        {name: seeds.for_part(variables[name], n) for name in variables if name == SCALING} for n in range(2)
    ]
    parts = [
        jax.jit(fp8jax.value_and_grad(loss_fn))({**variables, **state}, half)[1]
        for state, half in zip(states, (x[::2], x[1::2]), strict=True)
    ]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, mean)
    if recipe == "nvfp4":
        key, old = (tree[SCALING]["first"]["up"]["kernel"]["key"] for tree in (new, variables))
        np.testing.assert_array_equal(key, [old[0], 1])
    ours, theirs = (fp8jax.optim.adamw(1e-2, name).init(variables) for name in (recipe, "bf16"))
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_report_and_metrics(recipe):
    """The report has the layers; scales that are computed from their blocks have no metrics."""
    model, x = fp8jax.transform(Blocks(), recipe), normal(4, 64, 256)
    variables = model.init(jax.random.key(0), x)
    report = model.report(x)
    assert report.fp8_share == 1 and all(row.fp8 for row in report.rows) and len(report.rows) == 4
    found = metrics.scale_metrics(variables, variables, Recipe.parse(recipe))
    assert found.scale.size == found.saturation.size == 0


@pytest.mark.parametrize("recipe", ["mxfp8", long("block"), long("nvfp4")])
def test_sharded_experts_are_sent_as_codes(recipe):
    """In ZeRO's stage 3 each device has rows of all kernels, and computes its own tokens."""
    x, w = normal(0, 64, 512), normal(1, 3, 512, 128)
    sizes, state = jnp.array([40, 0, 20]), init_ragged_state(recipe, 3)

    def on_device(w, shard=None):
        weight = Weight(w, jnp.zeros(w.shape), shard)
        run = lambda x: ragged_dot(x, weight, sizes, recipe=recipe, state=state)  # noqa: E731
        out, pull = jax.vjp(run, x)
        return out, pull(jnp.sin(out))[0]

    shard = ShardSpec("data", -2, DEVICES, "FP32", True)
    run = jax.shard_map(
        functools.partial(on_device, shard=shard),
        mesh=Mesh(np.array(jax.devices()[:DEVICES]), ("data",)),
        in_specs=P(None, "data"),
        out_specs=P(),
        check_vma=False,
    )
    run = jax.jit(run).lower(w).compile()
    same_bits(run(w), jax.jit(on_device)(w))
    found = gathered_bytes(run.as_text())
    assert set(found) <= {"u8", "u32"} and sum(found.values()) == 2 * STORED[recipe] * w.size


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_adapters_on_frozen_blocks_train_over_devices(recipe):
    """ZeRO's stage 3 leaves frozen kernels whole, and gives the loss and gradients of one device.

    The scale blocks of inputs and output gradients lie in rows.
    """
    model, variables = adapted(recipe)
    loss_fn = lambda variables, x: jnp.mean(jnp.sin(model.apply(variables, x)))  # noqa: E731
    zero = Zero(Mesh(np.array(jax.devices()[:DEVICES]), ("data",)), recipe, stage=3)
    ours = jax.jit(fp8jax.value_and_grad(loss_fn, zero=zero))(zero.place(variables), X)
    expected = gradient(model, variables)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(expected[1]), strict=True):
        error = jnp.linalg.norm(one - other) / jnp.linalg.norm(other)
        assert error < 1e-5


class Odd(nn.Module):
    """Parameters named "kernel" with other uses: stacked vectors, a convolution's, a matrix used twice."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                gain = self.param("kernel", nn.initializers.ones, (128,))
                return x * gain[None] + nn.Dense(128, name="fc")(x), None

        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)
        x, _ = layers()(x, None)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (128, 128))
        return (x + x @ kernel + jnp.sin(kernel[:1]))[:, :, None] + nn.Conv(16, (3,))(x[:, :, None])


def test_other_parameters_named_kernel():
    """ZeRO's stage 3 gathers them, too, where a recipe without scaling states does not tell them apart."""
    model, x = fp8jax.transform(Odd(), "mxfp8"), normal(0, 16, 128)
    variables = model.init(jax.random.key(0), x)
    loss_fn = lambda variables, x: jnp.mean(jnp.sin(model.apply(variables, x)))  # noqa: E731
    zero = Zero(Mesh(np.array(jax.devices()[:DEVICES]), ("data",)), "mxfp8", stage=3)
    one, expected, _ = jax.jit(fp8jax.value_and_grad(loss_fn))(variables, x)
    many, grads, new = jax.jit(fp8jax.value_and_grad(loss_fn, zero=zero))(zero.place(variables), x)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(b)))),
        grads,
        expected,
    )
