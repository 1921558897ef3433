"""Block scaling: codes and scales as TransformerEngine's, and GEMMs of them."""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jaxprs import equations

import fp8jax
from fp8jax import Recipe, formats, scaling
from fp8jax.backends import cudnn, pallas, reference
from fp8jax.comm import Zero
from fp8jax.dot import dot_general, init_ragged_state, init_state, ragged_dot
from fp8jax.inspect import program, targets
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
    PackedE2M1,
    ScaledArray,
    hadamard,
    quantize_blocks,
)
from fp8jax.quantization.blocks import SIGNS
from fp8jax.quantization.kernels import rows_and_columns, rows_and_columns_fp4
from fp8jax.scaling import block, seeds

DATA = np.load(pathlib.Path(__file__).parent / "data" / "te_block.npz")
METHODS = [BLOCK_1X128, BLOCK_128X128, MXFP8, NVFP4_1X16, NVFP4_16X16]
RECIPES = ["block", "block,scaling=block_float32", "mxfp8", "mxfp8,fp8_format=HYBRID", "nvfp4"]
FP4_OPTIONS = ("", "46+eden", "hadamard+stochastic+2d+46")
MATRICES = (((1,), (0,)), ((), ()))


def bits(x):
    return np.asarray(x).view(np.uint8)


def name_of(method):
    return f"{method.format}-{method.block[0]}x{method.block[1]}"


def quantized(x, method):
    return jax.jit(quantize_blocks, static_argnums=1)(jnp.asarray(x), method)


def sides(field):
    """The recorded input and its transpose, each with the name of what was recorded of it."""
    return [(DATA["x"], field), (DATA["x"].T, f"{field}_t")]


@pytest.mark.parametrize("kind, scale", [("pow2", "power_of_two"), ("fp32", "float32")])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("format", [formats.E4M3, formats.E5M2], ids=str)
def test_golden_block(format, rows, kind, scale):
    case = f"block{rows}x128_{format.name.lower()}_{kind}"
    for x, side in sides("data"):
        q = quantized(x, BlockMethod(format, (rows, 128), scale))
        np.testing.assert_array_equal(bits(q.data), DATA[f"{case}/{side}"])
        np.testing.assert_array_equal(q.scale, DATA[f"{case}/{side.replace('data', 'scale')}"])


def test_golden_mxfp8():
    for x, side in sides("data"):
        q = quantized(x, MXFP8)
        scale = DATA[f"mxfp8/{side.replace('data', 'scale_e8m0')}"]
        np.testing.assert_array_equal(bits(q.scale), scale)
        is_zero = np.repeat(scale == 0, 32, axis=1)
        assert is_zero.any() and not is_zero.all()
        np.testing.assert_array_equal(bits(q.data)[~is_zero], DATA[f"mxfp8/{side}"][~is_zero])
        assert (bits(q.data)[is_zero] == 0).all()


@pytest.mark.parametrize("kind", ["1x16", "16x16", "1x16_rht"])
def test_golden_nvfp4(kind):
    method = NVFP4_16X16 if kind == "16x16" else NVFP4_1X16
    for x, side in sides("data"):
        x = jnp.asarray(x, jnp.bfloat16)
        q = quantized(hadamard(x) if kind == "1x16_rht" and side == "data_t" else x, method)
        np.testing.assert_array_equal(q.data.bytes, DATA[f"nvfp4_{kind}/{side}"])
        scale = np.repeat(bits(q.scale.data), method.block[0], axis=0)
        np.testing.assert_array_equal(scale, DATA[f"nvfp4_{kind}/{side.replace('data', 'scale_e4m3')}"])
        amax = DATA[f"nvfp4_{kind}/{side.replace('data', 'amax')}"]
        np.testing.assert_allclose(q.scale.scale, amax.reshape(1, 1) / (448 * 6), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_error_is_half_a_step(method):
    """Each value is within half a step at the format's max, times its block's scale."""
    x = DATA["x"]
    q = quantized(x, method)
    largest = 2.0 ** (np.floor(np.log2(method.format.max)) - method.format.mantissa_bits) / 2
    scale = np.repeat(np.asarray(jnp.asarray(q.scale).astype(jnp.float32)), method.block[1], axis=1)
    scale = np.repeat(scale, method.block[0], axis=0)
    # An E4M3 scale of a block is rounded by a 16th, so that its largest number may saturate.
    slack = method.format.max / 16 if method.scale == "E4M3" else 0
    is_normal = scale >= scale.max() * formats.E4M3.smallest_normal / 448 if slack else scale > 0
    assert is_normal.mean() > 0.1
    assert (abs(q.dequantize() - x) <= (largest + slack) * scale * 1.001 + 1e-30)[is_normal].all()


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_padding_is_zeros(method):
    x = np.random.default_rng(0).normal(size=(40, 200)).astype(np.float32)
    q = quantized(x, method)
    assert q.shape == method.padded(x.shape) and q.validate() is q
    whole = np.zeros(q.shape, np.float32)
    whole[:40, :200] = x
    for part, expected in zip(jax.tree.leaves(q), jax.tree.leaves(quantized(whole, method)), strict=True):
        np.testing.assert_array_equal(bits(part), bits(expected))
    assert (q.dequantize()[40:] == 0).all() and (q.dequantize()[:, 200:] == 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_a_bad_number_makes_its_block_nan(method, bad):
    x = np.ones((256, 256), np.float32)
    x[3, 5] = bad
    out = np.asarray(quantized(x, method).dequantize())
    rows, columns = (256, 256) if method.scale == "E4M3" else method.block
    is_bad = np.zeros(x.shape, bool)
    is_bad[3 // rows * rows :, :columns][:rows] = True
    np.testing.assert_array_equal(np.isnan(out), is_bad)
    assert (out[~is_bad] == 1).all()


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_zero_and_tiny_blocks(method):
    x = np.ones((256, 256), np.float32)
    x[:128, :128] = 0
    x[128:, 128:] = 1e-30
    out = np.asarray(quantized(x, method).dequantize())
    assert (out[:128, :128] == 0).all() and (out[:128, 128:] == 1).all()
    # The scale of an NVFP4 block has eight bits.
    expected = 0 if method.scale == "E4M3" else 1e-30
    np.testing.assert_allclose(out[128:, 128:], expected, rtol=1 / 16)
    assert (np.asarray(quantized(np.zeros((128, 128), np.float32), method).dequantize()) == 0).all()


def test_packed_codes():
    """All codes, in pairs of all; also as a constant, which XLA folds."""
    codes = np.stack(np.meshgrid(np.arange(16), np.arange(16)), -1).reshape(16, 32).astype(np.uint8)
    values = codes.view(formats.E2M1.dtype).astype(np.float32)
    packed = PackedE2M1.pack(jnp.asarray(codes))
    assert packed.shape == (16, 32) and packed.nbytes == 16 * 16 and packed.dtype == formats.E2M1.dtype
    for read in (packed, PackedE2M1.cast(jnp.asarray(values))):
        np.testing.assert_array_equal(read.astype(jnp.float32), values)
        np.testing.assert_array_equal(jax.jit(lambda: read.astype(jnp.float32))(), values)  # noqa: B023
    np.testing.assert_array_equal(packed.codes, codes)


def test_e2m1_rounds_to_nearest_even():
    x = np.linspace(-8, 8, 4097, dtype=np.float32)[:-1]
    expected = np.clip(x, -6, 6).astype(formats.E2M1.dtype).astype(np.float32)
    np.testing.assert_array_equal(PackedE2M1.cast(jnp.asarray(x)).astype(jnp.float32), expected)


def test_hadamard_is_orthogonal():
    a, b = np.random.default_rng(0).normal(size=(2, 8, 64)).astype(np.float32)
    np.testing.assert_allclose(hadamard(a) @ hadamard(b).T, a @ b.T, atol=1e-4)
    one = np.asarray(hadamard(jnp.eye(16)))
    np.testing.assert_array_equal(abs(one), 0.25)


# The dot #########################################################################################


def operands(m=40, k=200, n=72, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(m, k), (k, n), (m, n)]
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def gradients(recipe, x, w, g, **options):
    recipe = Recipe.parse(recipe)
    state = init_state(recipe)

    def product(x, w, state):
        return dot_general(x, w, MATRICES, recipe=recipe, state=state, **options)

    @jax.jit
    def run(x, w, state, g):
        y, pull = jax.vjp(product, x, w, state)
        return y, *pull(g)

    return run(x, w, state, g)


def sqnr(exact, x):
    exact, x = np.asarray(exact, np.float64), np.asarray(x, np.float64)
    return 10 * np.log10((exact**2).sum() / ((exact - x) ** 2).sum())


@pytest.mark.parametrize("recipe", [*RECIPES, *(f"nvfp4,fp4_options={chosen}" for chosen in FP4_OPTIONS)])
def test_dot_is_that_of_the_dequantized_operands(recipe):
    """Output and both gradients, of shapes that are no multiples of a block."""
    x, w, g = operands()
    y, dx, dw, _ = gradients(recipe, x, w, g)
    recipe, state = Recipe.parse(recipe), init_state(recipe)
    quantized = jax.jit(scaling.of_recipe(recipe).quantize_operand, static_argnums=0)
    pairs = [quantized(i, each, state) for i, each in enumerate((x, w, g))]
    (x1, x2), (w1, w2), (g1, g2) = ([part.dequantize() for part in pair] for pair in pairs)
    for ours, exact in ((y, x1 @ w1.T), (dx, g1 @ w2.T), (dw, x2 @ g2.T)):
        exact = exact[: ours.shape[0], : ours.shape[1]]
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * abs(exact).max())


@pytest.mark.parametrize(
    "recipe, least",
    [
        ("block", (27, 27, 27)),
        ("mxfp8", (27, 27, 27)),
        ("nvfp4", (13, 13, 13)),
        ("nvfp4,fp4_options=hadamard+stochastic+2d+46", (16, 14.5, 15)),
        ("nvfp4,fp4_options=46+eden", (17.5, 16.5, 16.5)),
    ],
)
def test_dot_is_close_to_float32(recipe, least):
    """Decibels of the output and both gradients. The rotations of "eden" cancel in each GEMM."""
    x, w, g = operands(128, 256, 384)
    found = gradients(recipe, x, w, g)[:3]
    for ours, exact, bound in zip(found, (x @ w, g @ w.T, x.T @ g), least, strict=True):
        assert sqnr(exact, ours) > bound


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@pytest.mark.parametrize("outliers, margins", [(1, (-0.2, 3.5, 3.5)), (1e5, (-0.2, 3.5, 20))])
def test_margin_over_current_scaling(recipe, outliers, margins):
    """Decibels more than with one scale and E5M2 gradients: y, dx, and dw of channels without outliers."""
    x, w, g = operands(256, 512, 384)
    x, g = (each.at[:, ::100].multiply(outliers) for each in (x, g))
    exact, parts = (x @ w, g @ w.T, x.T @ g), (np.s_[:], np.s_[:], np.s_[1:100, 1:100])
    ours, current = (gradients(name, x, w, g)[:3] for name in (recipe, "te,scaling=current"))
    for at, margin, one, other, true in zip(parts, margins, ours, current, exact, strict=True):
        assert sqnr(true[at], one[at]) > sqnr(true[at], other[at]) + margin


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_small_tokens(recipe):
    """Tokens of a hundred-thousandth of the largest keep their precision; one scale for all loses them."""
    x, w, g = operands(128, 256, 384)
    x = x.at[:64].multiply(1e-5)
    ours, current = (gradients(name, x, w, g)[0][:64] for name in (recipe, "te,scaling=current"))
    exact = (x @ w)[:64]
    assert sqnr(exact, ours) > 27 > 20 > sqnr(exact, current)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 8, 4), (4, 0, 8), (4, 8, 0)])
def test_empty_operands(recipe, shape):
    x, w, g = operands(*shape)
    y, dx, dw, _ = gradients(recipe, x, w, g)
    assert (y.shape, dx.shape, dw.shape) == (g.shape, x.shape, w.shape)
    assert not any(np.asarray(each).any() for each in (y, dx, dw))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_constant_input(recipe):
    """A closed-over input, which XLA folds, has the gradients of an argument; shapes are whole blocks."""
    x, w, g = operands(128, 256, 128)
    expected = gradients(recipe, x, w, g)
    constant = jax.jit(lambda w, g: gradients(recipe, x, w, g))(w, g)
    for ours, other in zip(constant[:3], expected[:3], strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_vmap(recipe):
    """A vmap of one or both operands gives each example's output and gradients."""
    (x, w, g), state = operands(), init_state(recipe)
    x = jnp.stack([x, operands(seed=1)[0], 2 * x])

    def run(x, w):
        product = functools.partial(dot_general, recipe=recipe)
        y, pull = jax.vjp(lambda x, w, state: product(x, w, MATRICES, state=state), x, w, state)
        return y, *pull(g)[:2]

    for axes in ((0, None), (None, 0), (0, 0)):
        given = [jnp.stack([w, 2 * w, 3 * w]) if axes[1] == 0 else w]
        given = [x if axes[0] == 0 else x[0], *given]
        ours = jax.vmap(run, axes)(*given)
        for i in range(3):
            each = run(*(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)))
            for one, other in zip(ours, each, strict=True):
                np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-5 * abs(other).max())


def test_high_precision_gemms():
    x, w, g = operands()
    flags = "False+True+True"
    _, dx, dw, _ = gradients(f"block,override_linear_precision={flags}", x, w, g)
    np.testing.assert_allclose(dx, g @ w.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dw, x.T @ g, rtol=1e-4, atol=1e-3)


def test_stochastic_rounding_is_unbiased():
    """The mean of 10,000 draws is the number within 4 standard errors, and each draw is a neighbour."""
    x, count = np.linspace(-5.99, 5.99, 61, dtype=np.float32), 10_000
    random = jax.random.bits(jax.random.key(0), (count, 62), jnp.uint32)
    x = np.append(x, np.float32(0.1))
    draws = np.asarray(PackedE2M1.cast(jnp.asarray(np.tile(x, (count, 1))), random).astype(jnp.float32))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    below = values[np.searchsorted(values, abs(x), side="right") - 1]
    above = values[np.searchsorted(values, abs(x), side="right")]
    assert (np.isin(abs(draws), values) & (abs(draws) >= below) & (abs(draws) <= above)).all()
    share = (abs(x) - below) / (above - below)
    error = (above - below) * np.sqrt(share * (1 - share) / count)
    assert (abs(draws.mean(0) - x) <= 4 * error + 1e-6).all()


def test_stochastic_gradients_differ_by_step_and_tensor():
    x, w, g = operands(32, 64, 48)
    state = init_state("nvfp4")
    later = {**state, **scaling.of_recipe(Recipe.NVFP4).update(state, None)}
    draws = [
        scaling.of_recipe(Recipe.NVFP4).quantize_operand(block.GRAD, each, at)[0].data.bytes
        for each, at in (
            (g, state),
            (g, state),
            (g, later),
            (2 * g, state),
        )
    ]
    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).any() and (draws[0] != draws[3]).any()


def test_state_counts_steps():
    *_, state = gradients("nvfp4", *operands())
    np.testing.assert_array_equal(state["key"], [0, 1])
    assert init_state("nvfp4,fp4_options=2d") == {} == init_state("block")


def test_seeds_of_layers():
    """Each layer, and each of a stack, has a seed of its own, which is the same in each process."""
    model, x = fp8jax.transform(Stack(), "nvfp4"), jnp.ones((16, 48))
    states = model.init(jax.random.key(0), x)["_overwrite_with_gradient"]
    keys = np.concatenate([np.reshape(key, (-1, 2)) for key in jax.tree.leaves(states)])
    assert len(keys) > 2 and len(set(keys[:, 0])) == len(keys) and (keys[:, 1] == 0).all()
    again = jax.tree.leaves(model.init(jax.random.key(1), x)["_overwrite_with_gradient"])
    for one, other in zip(jax.tree.leaves(states), again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_seeds_of_nnx_layers():
    """The same as of the Linen layers of the same paths."""

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x):
            return self.b(self.a(x))

    model = fp8jax.transform(Two(nnx.Rngs(0)), "nvfp4")
    keys = [leaf for path, leaf in nnx.to_flat_state(nnx.state(model)) if "fp8_key" in str(path)]
    first = seeds.with_seeds(init_state("nvfp4"), "a/kernel")["key"]
    np.testing.assert_array_equal(keys[0].get_value(), first)
    assert len(keys) == 2 and keys[0].get_value()[0] != keys[1].get_value()[0]


@pytest.mark.parametrize("split", ["microbatches", "devices"])
def test_parts_of_a_batch_have_bits_of_their_own(split):
    """Two equal parts: their mean gradient is not that of one, and the seed stays."""
    model = fp8jax.transform(nn.Dense(64, use_bias=False), "nvfp4")
    x = jax.random.normal(jax.random.key(0), (32, 64))
    variables = model.init(jax.random.key(1), x)
    loss = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)  # noqa: E731
    _, one, after_one = fp8jax.value_and_grad(loss)(variables, x)
    if split == "microbatches":
        _, grads, new = fp8jax.accumulate_gradients(loss, 2)(variables, jnp.repeat(x, 2, axis=0))
    else:
        zero = Zero(Mesh(np.array(jax.devices()[:2]), ("data",)), "nvfp4", stage=0)
        twice = jnp.concatenate([x, x])
        _, grads, new = fp8jax.value_and_grad(loss, zero=zero)(zero.place(variables), twice)
    assert (grads["kernel"] != one["kernel"]).mean() > 0.5
    for ours, other in zip(
        *(jax.tree.leaves(g["_overwrite_with_gradient"]) for g in (new, after_one)), strict=True
    ):
        np.testing.assert_array_equal(ours, other)


def test_hadamard_of_float16_does_not_overflow():
    x = np.tile(SIGNS * 20000, (16, 1)).astype(np.float16)
    assert float(hadamard(jnp.asarray(x)).max()) == 80000


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4+fp8", "block", "bf16,fp4_options=2d"])
def test_a_layer_of_single_vectors_is_left_out(recipe):
    class Pool(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="pool")(jnp.mean(nn.Dense(64, name="a")(x), 0))

    rows = {row.path: row for row in fp8jax.transform(Pool(), recipe).report(jnp.ones((32, 64))).rows}
    assert not rows["pool"].fp8 and rows["pool"].reason == "it multiplies a single vector"
    assert rows["a"].fp8 == recipe.startswith(("nvfp4", "block"))


def test_bits_depend_on_the_seed():
    x, w, g = operands()
    first, second = ({"key": jnp.array([seed, 0.0])} for seed in (0, 1))
    copies = [
        scaling.of_recipe(Recipe.NVFP4).quantize_operand(block.GRAD, g, state)[0] for state in (first, second)
    ]
    assert (copies[0].data.bytes != copies[1].data.bytes).any()


def test_a_state_without_gradient_warns():
    x, w, _ = operands()
    state = init_state("nvfp4")
    with pytest.warns(UserWarning, match="its count of steps does not advance. Take it with"):
        jax.grad(lambda w: dot_general(x, w, MATRICES, recipe="nvfp4", state=state).sum())(w)


def test_second_derivative_raises():
    x, w, g = operands()
    with pytest.raises(NotImplementedError, match="differentiable once"):
        jax.grad(lambda x: gradients("block", x, w, g)[2].sum())(x)


@pytest.mark.parametrize("recipe, least", [("block", 27), ("mxfp8", 27), ("nvfp4", 13)])
def test_experts(recipe, least):
    """Rows sorted by expert, one expert without rows, and rows past the last expert's."""
    random = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((60, 64), (3, 64, 48), (60, 48))
    )
    sizes, state = jnp.array([20, 0, 35]), init_ragged_state(recipe, 3)
    y, pull = jax.vjp(lambda x, w, state: ragged_dot(x, w, sizes, recipe=recipe, state=state), x, w, state)
    dx, dw, state = pull(g)
    exact, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
    for ours, expected in zip((y, dx, dw), (exact, *pull(g)), strict=True):
        assert sqnr(expected, ours) > least
    assert (y[55:] == 0).all() and (dx[55:] == 0).all() and (dw[1] == 0).all()
    if recipe == "nvfp4":
        np.testing.assert_array_equal(state["key"], [[0, 1]] * 3)


class Stack(nn.Module):
    """Scanned blocks under remat, and a layer after them."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(48)(nn.gelu(nn.Dense(96)(nn.LayerNorm()(x)))), None

        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(48)(layers()(x, None)[0])


@functools.cache
def losses(recipe, stage=None, steps=6):
    x = jax.random.normal(jax.random.key(0), (16, 48))
    y = jnp.tanh(jnp.roll(x, 1, -1))
    zero = None if stage is None else Zero(Mesh(np.array(jax.devices()[:4]), ("data",)), recipe, stage=stage)
    model = fp8jax.transform(Stack(), recipe)
    tx = fp8jax.optim.adamw(3e-3, recipe, zero=zero)
    variables = model.init(jax.random.key(1), x)
    variables = variables if zero is None else zero.place(variables)
    state = tx.init(variables)

    def loss_fn(variables, x, y):
        return jnp.mean((model.apply(variables, x) - y) ** 2)

    @jax.jit
    def step(variables, state):
        loss, grads, variables = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, x, y)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss

    found = []
    for _ in range(steps):
        variables, state, loss = step(variables, state)
        found.append(float(jax.block_until_ready(loss)))
    return np.array(found)


@pytest.mark.parametrize(
    "recipe, other, bound",
    [("block", "bf16", 0.01), ("mxfp8", "bf16", 0.01), ("mxfp8+O3", "O3", 0.03), ("nvfp4+fp8", "bf16", 0.25)],
)
def test_models_learn(recipe, other, bound):
    """Losses beside those of other GEMMs. Those of nvfp4 fall by a step later in these six."""
    ours = losses(recipe)
    np.testing.assert_allclose(ours, losses(other), rtol=bound)
    assert ours[-1] < 0.5 * ours[0]


@pytest.mark.parametrize("recipe", ["block+O2", "nvfp4", "mxfp8+O3"])
def test_a_rule_keeps_a_layer_in_bf16(recipe):
    layers = nn.Sequential([nn.Dense(64), nn.Dense(64)])
    model = fp8jax.transform(layers, recipe, rules=[fp8jax.Rule("layers_1", "gemm=BF16")])
    first, last = sorted(model.report(jnp.ones((32, 64))).rows, key=lambda row: row.path)
    assert (first.fp8, last.fp8, last.reason) == (True, False, "rule: gemm=BF16")


@pytest.mark.parametrize("recipe", ["block+O2", "mxfp8+O3", pytest.param("mxfp8", marks=pytest.mark.long)])
def test_sharded_kernels(recipe):
    """In ZeRO's stage 3 a kernel is gathered for each of its GEMMs."""
    np.testing.assert_allclose(losses(recipe, stage=3), losses(recipe), rtol=0.01)


# GEMMs of a GPU ##################################################################################


@pytest.mark.parametrize("rows", [1, 128])
def test_kernel_is_the_emulation(rows, monkeypatch):
    """The Pallas kernel, interpreted, of shapes that are no multiples of its tiles."""
    random = np.random.default_rng(0)
    a = quantized(random.normal(size=(2, 130, 300)).astype(np.float32), BLOCK_1X128)
    b = quantized(
        random.normal(size=(2, 200, 300)).astype(np.float32), BlockMethod(formats.E4M3, (rows, 128))
    )
    monkeypatch.setattr(pallas, "INTERPRET", True)
    ours = pallas.gemm(a, b, jnp.float32)
    batched = (((2,), (2,)), ((0,), (0,)))
    expected = reference.dot(a, b, batched, out_dtype=jnp.float32, precise=True)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", [BLOCK_1X128, BLOCK_128X128, MXFP8], ids=name_of)
@pytest.mark.parametrize("shape", [(2, 130, 200), (256, 128)])
def test_kernel_of_both_copies(method, shape, monkeypatch):
    """The Pallas kernel, interpreted, gives the same codes and scales, of bad and tiny numbers, too."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x *= 2.0 ** np.arange(-shape[-1] // 2, shape[-1] // 2).astype(np.float32)
    x[..., :40, 64:] = 0
    x[..., 5, 3], x[..., 50, 100], x[..., 60, 20] = np.nan, np.inf, -np.inf
    monkeypatch.setattr(rows_and_columns, "INTERPRET", True)
    ours, expected = (
        way(jnp.asarray(x), method=method, transposes=(False, True))
        for way in (rows_and_columns._at_once, rows_and_columns._one_by_one)
    )
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(bits(one.scale), bits(other.scale))
        np.testing.assert_array_equal(one.data.astype(jnp.float32), other.data.astype(jnp.float32))


def kernels_of_bytes(batch, rows, columns):
    """The kernel that quantizes a matrix of this shape and the one that multiplies it, with arguments."""
    x = jax.ShapeDtypeStruct((batch, rows, columns), jnp.bfloat16)
    a = jax.ShapeDtypeStruct(x.shape, formats.E4M3.dtype)
    b = jax.ShapeDtypeStruct((batch, 256, columns), formats.E4M3.dtype)
    of_a = jax.ShapeDtypeStruct((batch, rows, columns // 128), jnp.float32)
    of_b = jax.ShapeDtypeStruct((batch, columns // 128, 256), jnp.float32)
    gemm = functools.partial(pallas._triton, jnp.bfloat16, pallas.TILING)
    return [
        (functools.partial(rows_and_columns._tiles, BLOCK_1X128, (False, True), None), x),
        (gemm, a, b, of_a, of_b),
    ]


@pytest.mark.parametrize(
    "batch, rows", [(1, 2**16), (1, 2**16 + 128), (3, 2**15), (1, 2**17), (1, 2**17 + 128)]
)
def test_kernels_reach_all_entries(batch, rows):
    """Pallas counts entries for Triton in 32 bits with a sign, or in 64 bits from 2^32 bytes on."""
    for kernel, *args in kernels_of_bytes(batch, rows, 2**15):
        jaxpr = jax.make_jaxpr(kernel)(*args)
        assert jaxpr.out_avals[0].shape[:2] == (batch, rows)
        [call] = equations(jaxpr.jaxpr, "pallas_call", "cpu")
        sizes = [(var.aval.size, var.aval.dtype.itemsize) for var in (*call.invars, *call.outvars)]
        assert all(size <= 2**31 or size * width > 2**32 for size, width in sizes)


def test_kernels_of_more_rows(monkeypatch):
    """Rows that only make an array large enough change nothing."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 256, 128)), jnp.float32)
    for module in (pallas, rows_and_columns):
        monkeypatch.setattr(module, "INTERPRET", True)

    def run():
        copies = rows_and_columns._at_once(x, method=BLOCK_1X128, transposes=(False, True))
        return copies, pallas.gemm(copies[0], copies[0], jnp.float32)

    expected = run()
    for module in (pallas, rows_and_columns):
        monkeypatch.setattr(module, "rows_in_reach", lambda shape: shape[1] + 3)
    jax.tree.map(np.testing.assert_array_equal, run(), expected)


@pytest.mark.parametrize(
    "recipe, operand",
    [("nvfp4", block.LHS), ("nvfp4", block.RHS), ("nvfp4", block.GRAD), ("nvfp4,fp4_options=", 2)],
)
@pytest.mark.parametrize("shape, bad", [((2, 130, 200), None), ((256, 128), np.inf), ((256, 128), np.nan)])
def test_kernel_of_both_fp4_copies(recipe, operand, bad, shape, monkeypatch):
    """The Pallas kernels, interpreted, give the same bytes and scales; infinities and NaN the same values."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x *= 2.0 ** np.linspace(-30, 10, shape[-1]).astype(np.float32)
    x[..., :40, 64:] = 0
    if bad is not None:
        x[..., 5, 3] = bad
    x, state = jnp.asarray(x, jnp.bfloat16), {"key": jnp.array([3.0, 5.0])}
    expected = scaling.of_recipe(Recipe.parse(recipe)).quantize_operand(operand, x, state)
    monkeypatch.setattr(rows_and_columns_fp4, "INTERPRET", True)
    monkeypatch.setattr(
        rows_and_columns_fp4,
        "by_platform",
        lambda *args, cpu, default, is_deferred, **static: default(*args, **static),
    )
    ours = scaling.of_recipe(Recipe.parse(recipe)).quantize_operand(operand, x, state)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(bits(one.scale.data), bits(other.scale.data))
        np.testing.assert_array_equal(one.scale.scale, other.scale.scale)
        np.testing.assert_array_equal(one.dequantize(), other.dequantize())
        assert one.shape == other.shape and (bad is not None or (one.data.bytes == other.data.bytes).all())


@pytest.mark.parametrize(
    "method, wanted", [(MXFP8, "float16"), (NVFP4_1X16, "float32")], ids=["mxfp8", "nvfp4"]
)
def test_float16_does_not_overflow(method, wanted):
    """The product of NVFP4 codes and scales of blocks is up to 6**2 * 448**2 before the scales of tensors."""
    q = quantized(np.ones((1, 16, 32), np.float32), method)
    jaxpr = jax.make_jaxpr(lambda a, b: cudnn.gemm(a, b, jnp.float16))(q, q)
    assert f"preferred_element_type={wanted}" in str(jaxpr) and jaxpr.out_avals[0].dtype == jnp.float16


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize(
    "recipe, target, kind",
    [
        ("block", "h200", "pallas"),
        ("mxfp8", "b200", "cudnn"),
        ("mxfp8,fp8_format=HYBRID", "b200", "cudnn"),
        ("nvfp4", "b200", "cudnn"),
        ("nvfp4,fp4_options=46+eden", "b200", "cudnn"),
    ],
)
def test_compiled_gemms(recipe, target, kind):
    """A layer's forward and both backward GEMMs are calls of block-scaled GEMMs, on codes."""
    state = init_state(recipe)
    x, w, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 384), (512, 384)))

    def run(x, w, state, g):
        y, pull = jax.vjp(lambda *a: dot_general(*a[:2], MATRICES, recipe=recipe, state=a[2]), x, w, state)
        return y, *pull(g)

    read = program.read(targets.compile_for(run, x, w, state, g, target=target))
    assert [gemm.kind for gemm in read.gemms] == [kind] * 3 and all(gemm.is_fp8 for gemm in read.gemms)


def assembly(function, *args, target, at):
    """The PTX of a function's kernels."""
    lowered = targets.lower_for(function, *args, target=target)
    lowered.compile(compiler_options={**targets.COMPILER_OPTIONS, "xla_dump_to": str(at)})
    files = list(at.glob("*.ptx"))
    if not files and jax.__version_info__ >= (0, 11):
        pytest.skip("since JAX 0.11 XLA compiles kernels for an absent GPU no further than their HLO")
    return "".join(path.read_text() for path in files)


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize(
    "recipe, target",
    [("block", "h200"), ("block,scaling=block_float32", "h200"), ("mxfp8", "b200"), ("nvfp4", "b200")],
)
def test_kernel_of_both_copies_exchanges_little(recipe, target, tmp_path):
    """Only packed codes pass between threads. A transpose of a tile of float32 waits for others 133 times.
    Divisions are rounded to nearest, as on a CPU; not XLA's, of the scales of tensors."""
    quantize = functools.partial(
        scaling.of_recipe(Recipe.parse(recipe)).quantize_operand, block.LHS, state={}
    )
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    code = assembly(quantize, x, target=target, at=tmp_path)
    assert 0 < code.count("bar.sync") < 16
    assert recipe == "nvfp4" or "div.full" not in code


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize("rows", [1, 128])
def test_kernel_uses_fp8_instructions(rows, tmp_path):
    """Hopper's FP8 instruction, and few reads of scales by each thread. JAX's own dot would give FP16's."""
    shapes = [(1, 256, 512), (1, 256, 512), (1, 256, 4), (1, 256 // rows, 4)]
    dtypes = [formats.E4M3.dtype] * 2 + [jnp.float32] * 2
    args = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
    code = assembly(
        functools.partial(pallas._whole_gemm, jnp.bfloat16, pallas.TILING), *args, target="h200", at=tmp_path
    )
    assert code.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 4 == 128 // 32
    assert "mma.sync" not in code and "cp.async" in code and 0 < code.count("ld.global") < 40


def test_scaled_array_of_blocks_is_a_tree():
    q = quantized(DATA["x"], NVFP4_1X16)
    leaves, treedef = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8, formats.E4M3.dtype, jnp.uint32]
    again = jax.tree.unflatten(treedef, leaves)
    assert isinstance(again, ScaledArray) and (again.dequantize() == q.dequantize()).all()
