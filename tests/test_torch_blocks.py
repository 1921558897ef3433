"""Block scaling on torch: JAX's codes, scales, random bits and products, and training."""

import collections
import copy
import io
import pathlib

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fp8jax_torch import blocks, bridge, dequantize, prepare, report, transform
from fp8jax_torch.gemm import Operand
from fp8jax_torch.matmul import matmul
from fp8jax_torch.scaled import is_scaled, quantize, value
from fp8jax_torch.scaling import ScalingState, of_recipe
from fp8jax_torch.scaling.block import BlockScaling
from test_torch_native import MODELS, Net, batch, fit, hugging_face, jax_product, sqnr, train
from torch import nn

import fp8jax
from fp8jax import Recipe, formats, scaling
from fp8jax.dot import init_state
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
    hadamard,
    quantize_blocks,
)
from fp8jax.scaling import block

DATA = np.load(pathlib.Path(__file__).parent / "data" / "te_block.npz")
METHODS = [BLOCK_1X128, BLOCK_128X128, MXFP8, NVFP4_1X16, NVFP4_16X16]
METHODS += [
    NVFP4_1X16.with_rule("four_or_six"),
    NVFP4_16X16.with_rule("four_or_six"),
    NVFP4_1X16.with_rule("eden"),
]
METHODS += [BlockMethod(formats.E5M2, (1, 128), "float32"), BlockMethod(formats.E5M2, (1, 32), "E8M0")]
RECIPES = ["block", "block,scaling=block_float32", "mxfp8", "mxfp8,fp8_format=HYBRID", "nvfp4"]
PLAIN_FP4 = "nvfp4,fp4_options="
NEW_FP4 = ["nvfp4,fp4_options=46+eden", "nvfp4,fp4_options=hadamard+stochastic+2d+46"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def bits(x):
    """The bytes of an array or a tensor."""
    if isinstance(x, torch.Tensor):
        x = torch.atleast_1d(x).contiguous()
        return x.flatten().view(torch.uint8).numpy().reshape(*x.shape[:-1], x.shape[-1] * x.itemsize)
    return np.atleast_1d(np.ascontiguousarray(x)).view(np.uint8)


def parts(q):
    """Codes, scales of blocks and the scale of the matrix of a JAX array, in the order of torch's."""
    codes = getattr(q.data, "bytes", q.data)
    has_tensor_scale = isinstance(q.scale, fp8jax.ScaledArray)
    return (codes, q.scale.data, q.scale.scale.reshape(())) if has_tensor_scale else (codes, q.scale, None)


def check_equal(ours, jaxs):
    for got, want in zip(ours, parts(jaxs), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert tuple(got.shape) == want.shape
            np.testing.assert_array_equal(bits(got), bits(want))


def numbers(shape, seed=0):
    """Normal numbers of many magnitudes: by row, by column, and outliers."""
    random = np.random.default_rng(seed)
    rows, columns = (np.exp2(random.integers(-12, 12, size)) for size in shape)
    x = random.normal(size=shape) * rows[:, None] * columns
    return np.where(random.random(shape) < 0.01, 1000 * x, x).astype(np.float32)


@pytest.mark.parametrize("kind, scale", [("pow2", "power_of_two"), ("fp32", "float32")])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("format", [formats.E4M3, formats.E5M2], ids=str)
def test_golden_block(format, rows, kind, scale):
    case = f"block{rows}x128_{format.name.lower()}_{kind}"
    for x, side in ((DATA["x"], ""), (DATA["x"].T, "_t")):
        q = blocks.quantize_blocks(torch.tensor(x), BlockMethod(format, (rows, 128), scale))
        np.testing.assert_array_equal(bits(q.data), DATA[f"{case}/data{side}"])
        np.testing.assert_array_equal(q.scale, DATA[f"{case}/scale{side}"])


def test_golden_mxfp8():
    for x, side in ((DATA["x"], ""), (DATA["x"].T, "_t")):
        q, scale = blocks.quantize_blocks(torch.tensor(x), MXFP8), DATA[f"mxfp8/scale_e8m0{side}"]
        np.testing.assert_array_equal(bits(q.scale), scale)
        is_zero = np.repeat(scale == 0, 32, axis=1)
        np.testing.assert_array_equal(bits(q.data)[~is_zero], DATA[f"mxfp8/data{side}"][~is_zero])
        assert is_zero.any() and not bits(q.data)[is_zero].any()


@pytest.mark.parametrize("kind", ["1x16", "16x16", "1x16_rht"])
def test_golden_nvfp4(kind):
    method = NVFP4_16X16 if kind == "16x16" else NVFP4_1X16
    for x, side in ((DATA["x"], ""), (DATA["x"].T, "_t")):
        x = torch.tensor(x).bfloat16()
        q = blocks.quantize_blocks(blocks.hadamard(x) if kind == "1x16_rht" and side else x, method)
        np.testing.assert_array_equal(q.data, DATA[f"nvfp4_{kind}/data{side}"])
        scale = np.repeat(bits(q.scale), method.block[0], axis=0)
        np.testing.assert_array_equal(scale, DATA[f"nvfp4_{kind}/scale_e4m3{side}"])


SHAPES = [(128, 256), (40, 200), (1, 1), (0, 8), (8, 0)]
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(
    "method, shape, dtype",
    [  # each method and each shape meets each dtype
        (method, shape, DTYPES[(i + j) % 3])
        for i, method in enumerate(METHODS)
        for j, shape in enumerate(SHAPES)
    ],
    ids=str,
)
def test_blocks_equal_jaxs(method, shape, dtype):
    """Codes, scales and values, of many magnitudes, of zeros in blocks, and of shapes that are padded."""
    x = numbers(shape).clip(-1e4, 1e4)
    x[: shape[0] // 2, : shape[1] // 2] = 0
    jaxs = jax.jit(quantize_blocks, static_argnums=1)(jnp.asarray(x, dtype), method)
    ours = blocks.quantize_blocks(torch.from_numpy(x).to(getattr(torch, dtype)), method)
    check_equal(ours, jaxs)
    np.testing.assert_array_equal(ours.dequantize(), jaxs.dequantize())


@pytest.mark.parametrize("edge", [0.0, -0.0, 1e-30, 2.0**-110, 3e38, -3e38, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_edges_equal_jaxs(method, edge):
    x = np.ones((256, 256), np.float32)
    x[3, 5], x[128:, 128:] = edge, edge
    jaxs = jax.jit(quantize_blocks, static_argnums=1)(jnp.asarray(x), method)
    ours = blocks.quantize_blocks(torch.from_numpy(x), method)
    np.testing.assert_array_equal(ours.dequantize(), jaxs.dequantize())
    if np.isfinite(edge):  # codes below a NaN scale have no meaning
        check_equal(ours, jaxs)


@pytest.mark.parametrize("random", [0, 2**31, 2**32 - 1, None])
def test_e2m1_codes_equal_jaxs(random):
    """All codes, their midpoints and the numbers next to them, by nearest and by random bits."""
    steps = np.linspace(-6, 6, 49, dtype=np.float32)
    x = np.concatenate([steps, np.nextafter(steps, np.float32(9)), np.nextafter(steps, np.float32(-9))])
    x = x[(abs(x) <= 6) & ((x == 0) | (abs(x) > 0.1))]  # XLA on a CPU takes subnormal numbers for 0
    x = np.pad(x, (0, -len(x) % 16))[None]
    # A block with 6, in a matrix with 6 * 448, has the scale 1.
    x = np.pad(x, [(0, 16), (0, 0)], constant_values=6)
    x[16] = 6 * 448
    given = None if random is None else np.full(x.shape, random, np.uint32)
    bits_of = (jnp.asarray, lambda given: torch.from_numpy(given.view(np.int32)))
    for_jax, for_torch = (None if given is None else make(given) for make in bits_of)
    jaxs = jax.jit(quantize_blocks, static_argnums=1)(jnp.asarray(x), NVFP4_1X16, for_jax)
    ours = blocks.quantize_blocks(torch.from_numpy(x), NVFP4_1X16, for_torch)
    check_equal(ours, jaxs)
    assert (ours.scale[1].float() == 1).all() and ours.matrix_scale == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hadamard_equals_jaxs(dtype):
    x = numbers((8, 64))
    want = np.asarray(hadamard(jnp.asarray(x, dtype)), np.float32)
    np.testing.assert_array_equal(
        blocks.hadamard(torch.from_numpy(x).to(getattr(torch, dtype))).float(), want
    )


@pytest.mark.parametrize("shape", [(40, 200), (128, 256)], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, PLAIN_FP4, "nvfp4,fp4_options=stochastic", *NEW_FP4])
def test_operands_equal_jaxs(recipe, shape):
    """Each operand for both of its GEMMs, with the transform and the random bits of two steps."""
    recipe, x = Recipe.parse(recipe), numbers(shape)
    quantized = jax.jit(scaling.of_recipe(recipe).quantize_operand, static_argnums=0)
    for step in (0, 3):
        state = init_state(recipe)
        state = {name: array.at[1].set(step) for name, array in state.items()}
        on_torch = ScalingState(recipe)
        if state:
            on_torch.key.copy_(torch.tensor(np.asarray(state["key"])))
        for operand in (block.LHS, block.RHS, block.GRAD):
            jaxs = quantized(operand, jnp.asarray(x), state)
            matrix = Operand(torch.from_numpy(x))
            copies = on_torch.scaling.quantize(on_torch, operand, matrix, None, (True, True))
            for got, want in zip(copies, jaxs, strict=True):
                check_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "recipe",
    [
        *RECIPES,
        PLAIN_FP4,
        *NEW_FP4,
        "block,override_linear_precision=True+False+True",
        "mxfp8,override_linear_precision=False+True+False",
        "block+O2",
        "nvfp4+O3",
    ],
)
def test_matmul_equals_jaxs(recipe, dtype):
    """Output and gradients of three steps, of shapes that are no multiples of a block."""
    row, of_torch = Recipe.parse(recipe), getattr(torch, dtype)
    state, jax_state = ScalingState(row), init_state(row)
    for name, array in jax_state.items():
        state.register_buffer(name, torch.tensor(np.asarray(array)))
    layer = jax.jit(lambda *args: jax_product(row, dtype, *args))
    for step in range(3):
        x, w, g = (numbers(shape, step) for shape in ((24, 200), (200, 40), (24, 40)))
        jax_w, torch_w = jnp.asarray(w, dtype), torch.from_numpy(w).to(of_torch)
        if row.weight != "FP32":
            jax_w = fp8jax.quantize(jax_w, row.weight, power_of_two=True)
            torch_w = quantize(torch_w, row.weight, power_of_two=True)
        y, dx, dw, jax_state = layer(jnp.asarray(x, dtype), jax_w, jnp.asarray(g, dtype), jax_state)
        for in_out in (True, False):
            torch_x = torch.from_numpy(x).to(of_torch).requires_grad_()
            given = torch_w if in_out else value(torch_w).t().contiguous()
            if is_scaled(torch_w) and not in_out:
                given = type(torch_w)(torch_w.codes.t(), torch_w.scale, torch_w.dtype)
            weight = nn.Parameter(given)
            out = matmul(torch_x, weight, state, in_out=in_out, dtype=of_torch)
            out.backward(torch.from_numpy(g).to(of_torch))
            assert is_scaled(weight.grad) == (row.weight_grad == "E4M3")
            dweight = value(weight.grad) if in_out else value(weight.grad).t()
            # Sums of up to 200 exact products in another order, then a rounding to the dtype, or to E4M3.
            least = 100 if dtype == "float32" else 45
            for got, want in ((out, y), (torch_x.grad, dx), (dweight, dw)):
                at_least = 30 if got is dweight and row.weight_grad == "E4M3" else least
                assert sqnr(got.detach().double(), torch.tensor(np.asarray(want, np.float64))) > at_least
        state.advance()
        if "key" in jax_state:
            np.testing.assert_array_equal(state.key, jax_state["key"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_residuals_are_codes_and_scales(recipe, monkeypatch):
    """At most a byte for each number of the input, with its scales; the weight is the parameter itself."""
    model, saved, quantize = transform(nn.Linear(256, 512, bias=False), recipe), [], blocks.quantize_blocks

    def pack(tensor):
        saved.append(0 if tensor.data_ptr() == model.weight.data_ptr() else tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(128, 256, requires_grad=True))
    of_codes, of_scale, block_size = (0.5, 1, 16) if recipe == "nvfp4" else (1, 4, 128)
    if recipe.startswith("mxfp8"):
        of_scale, block_size = 1, 32
    assert sum(saved) <= 128 * 256 * of_codes + 256 * 128 // block_size * of_scale + 4
    saved.clear()
    monkeypatch.setattr(blocks, "quantize_blocks", lambda *args: saved.append(args) or quantize(*args))
    with torch.no_grad():
        model(torch.randn(128, 256))
    assert len(saved) == 2  # no copy of the input for wgrad


def test_a_weight_without_a_gradient():
    """A frozen weight costs no residual of the input."""
    layer, saved = transform(nn.Linear(64, 32), "block"), []
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        y = layer(x)
    assert saved == [layer.weight.shape]
    y.sum().backward()
    assert x.grad is not None and x.grad.any() and layer.weight.grad is None


@pytest.mark.parametrize("recipe", ["block", "nvfp4"])
def test_empty_batch(recipe):
    model = transform(nn.Linear(24, 8), recipe)
    x = torch.zeros(0, 24, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (0, 24) and not model.weight.grad.any()


LEVELS = [
    "block",
    "block,scaling=block_float32",
    "mxfp8",
    "nvfp4",
    NEW_FP4[0],
    "block+O1",
    "mxfp8+O2",
    "nvfp4+O3",
    "block+fp8",
]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_train(level, make):
    net = Net()
    plain = train(net_copy := copy.deepcopy(net), make(net_copy.parameters(), 3e-3), 60)
    model, optimizer = prepare(net, make(net.parameters(), 3e-3), level)
    losses = train(model, optimizer, 60)
    assert losses[0] == pytest.approx(plain[0], rel=0.02)
    assert losses[-1] == pytest.approx(plain[-1], rel=0.3 if "nvfp4" in level else 0.08)
    assert losses[-1] < 0.3 * losses[0]
    assert [row.fp8 for row in report(model).rows][:1] == [True]
    plain_again = dequantize(model)
    assert type(plain_again.up) is nn.Linear and not is_scaled(plain_again.up.weight)


@pytest.mark.parametrize("level", ["nvfp4", "nvfp4+O3", "mxfp8+O2"])
def test_checkpoints_go_on(level):
    """A run that is saved and loaded has the losses of a run that goes on, to the bit."""
    net = Net()
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    other, its_optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
    other.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    assert ("up.fp8.key" in saved["model"]) == ("nvfp4" in level)
    assert train(other, its_optimizer, 3) == train(model, optimizer, 3)


def test_steps_of_the_key():
    """One for each step of the optimizer: not for microbatches, and not for a step that is skipped."""
    net, (x, y) = Net(), batch()
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), "nvfp4")
    for part in (x[:32], x[32:]):
        F.mse_loss(model(part), y[:32]).backward()
    optimizer.step()
    assert model.up.fp8.key[1] == 1
    train(model, optimizer, 1, x * torch.nan, y)
    assert model.up.fp8.key[1] == 1 and optimizer.skipped == 1
    model = model.to(torch.bfloat16)
    assert model.up.fp8.key.dtype == torch.float32


def test_steps_of_the_key_of_a_frozen_layer():
    """No backward reaches it, and its key counts the steps of the others, as in JAX."""
    net, (x, y) = Net(), batch()
    net.up.requires_grad_(False)
    model, optimizer = prepare(net, torch.optim.AdamW(net.down.parameters(), 3e-3), "nvfp4")
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert model.up.fp8.key[1] == model.down.fp8.key[1] == 2


class Twin(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm(epsilon=1e-5, name="norm")(linen.Dense(64, name="up")(x))
        return linen.Dense(32, use_bias=False, name="down")(linen.gelu(x, approximate=False))


@pytest.mark.parametrize("level", ["nvfp4", "mxfp8+O2"])
def test_seeds_and_runs_cross_to_jax(level):
    """A Flax model of the same names starts with the same seeds; the bridge carries weights and keys."""
    net = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32, bias=False))
    net = nn.Sequential(collections.OrderedDict(zip(("up", "norm", "gelu", "down"), net, strict=True)))
    x, y = torch.randn(40, 48), torch.randn(40, 32)
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
    twin = fp8jax.transform(Twin(), level)
    variables = twin.init(jax.random.key(0), x.numpy())
    first = {name: value for name, value in model.state_dict().items() if name.endswith("key")}
    assert len(first) == (2 if level == "nvfp4" else 0)
    for name, key in first.items():
        jaxs = variables["_overwrite_with_gradient"][name.split(".")[0]]["kernel"]["key"]
        np.testing.assert_array_equal(key, jaxs)
        assert key[0] > 0
    train(model, optimizer, 3, x, y)
    mapping = bridge.mapping_of(model)
    moved = bridge.to_flax(model.state_dict(), mapping, like=variables)
    out = model(x)
    np.testing.assert_allclose(twin.apply(moved, x.numpy()), out.detach(), atol=1e-2)

    def loss(variables):
        return ((twin.apply(variables, x.numpy()) - y.numpy()) ** 2).mean()

    optimizer.zero_grad()
    F.mse_loss(out, y).backward()
    optimizer.step()
    _, grads, new = fp8jax.value_and_grad(loss)(moved)
    for name in first:
        jaxs = new["_overwrite_with_gradient"][name.split(".")[0]]["kernel"]["key"]
        np.testing.assert_array_equal(model.state_dict()[name], jaxs)
    back = bridge.from_flax(moved, mapping, like=model.state_dict())
    assert {name: float(back[name][1]) for name in first} == dict.fromkeys(first, 3.0)


def test_gpus_are_refused(monkeypatch):
    with pytest.raises(RuntimeError, match='has no GEMMs for GPUs; got cuda. Use the recipe "te,scaling=cur'):
        of_recipe(Recipe.BLOCK).check_device(torch.device("cuda"))
    model = transform(Net(), "block")
    monkeypatch.setattr(BlockScaling, "check_device", lambda self, device: 1 / 0)
    for call in (lambda: model(batch()[0]), lambda: transform(Net(), "block")):
        with pytest.raises(ZeroDivisionError):
            call()
    transform(Net(), "te")(batch()[0])


def test_report_of_fp4():
    model = transform(Net(), "nvfp4")
    assert "nvfp4: 2 of 4 modules with weights in FP4" in str(report(model))
    assert transform(Net(), "block").up.fp8.state_dict() == {}


def test_transformers_models_train():
    """GPT-2, with Conv1D's weights of shape (in, out)."""
    net, losses = hugging_face("gpt2"), {}
    for level in ("bf16", "block"):
        model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
        losses[level] = fit(model, optimizer, "gpt2")
    assert sum(row.fp8 for row in report(model).rows) == MODELS["gpt2"]
    assert losses["block"][0] == pytest.approx(losses["bf16"][0], rel=0.01)
    assert np.abs(np.subtract(*losses.values())).mean() < 0.03 * losses["bf16"][0]


@pytest.mark.parametrize("recipe", ["block", "nvfp4", "mxfp8+O3"])
def test_gradient_checkpointing(recipe):
    """As torch recommends it: each residual is unpacked once."""
    torch.manual_seed(0)
    layer, x = transform(nn.Linear(64, 64), recipe), torch.randn(8, 64)
    other, grads = copy.deepcopy(layer), []
    for run in (layer, lambda x: torch.utils.checkpoint.checkpoint(other, x, use_reentrant=False)):
        inputs = x.clone().requires_grad_()
        run(inputs).square().sum().backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)
