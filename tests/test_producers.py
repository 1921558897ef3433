"""Inputs of dots that the kernel which quantizes them computes: a gelu, an RMS norm, a gated product."""

import functools
import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fp8jax
from fp8jax.inspect import program, targets
from fp8jax.quantization import BLOCK_1X128, MXFP8, Computed, Operation, quantize_rows_and_columns
from fp8jax.quantization.kernels import rows_and_columns
from fp8jax.rewrite.producers import producers

evaluate = importlib.import_module(
    "fp8jax.rewrite.interpreter.evaluate"
)  # the package has a function of this name

ROWS, WIDTH = (2, 128), 256
FULL, ROW, COLUMN = (*ROWS, WIDTH), (*ROWS, 1), (1, 1, WIDTH)


def gelu(x, bias):
    return nn.gelu(x + bias)


def rms_norm(x, inverse, scale):
    return (x.astype(jnp.float32) * inverse * scale).astype(jnp.bfloat16)


def gated(gate, up):
    return nn.silu(gate) * up


def squared_relu(x):
    return nn.relu(x) ** 2


def reciprocal(x):
    return (1 + x * x) ** -3


def cast(x):
    return x.astype(jnp.float16)


CASES = [
    (gelu, [FULL, COLUMN]),
    (rms_norm, [FULL, ROW, COLUMN]),
    (gated, [FULL, FULL]),
    (squared_relu, [FULL]),
    (reciprocal, [FULL]),
    (cast, [FULL]),
]
MADE = pytest.mark.parametrize("function, shapes", CASES, ids=[case[0].__name__ for case in CASES])


def arrays(shapes, dtype=jnp.float32):
    made = [np.random.default_rng(n).normal(size=shape) for n, shape in enumerate(shapes)]
    return [jnp.asarray(x, jnp.float32 if len(shapes) == 3 else dtype) for x in made]


def strictly(function, *args):
    """Computed with all roundings of bfloat16, which XLA on a CPU leaves out within fusions."""
    compiled = jax.jit(function).lower(*args).compile(compiler_options={"xla_allow_excess_precision": False})
    return compiled(*args)


def source_of(function, *args):
    """How the input of a dot is computed, and the values of its inputs."""
    kernel = jnp.ones((WIDTH, 8), function(*args).dtype)
    jaxpr = jax.make_jaxpr(lambda *args: function(*args) @ kernel)(*args).jaxpr
    [number] = [number for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    found = producers(jaxpr, {number: 0}).get(number)
    return found and (found, [dict(zip(jaxpr.invars, args, strict=True))[var] for var in found.inputs])


def computed(function, *args):
    made = source_of(function, *args)
    assert made is not None
    found, values = made
    return found.of(strictly(function, *args).reshape(-1, WIDTH), values)


@MADE
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", [BLOCK_1X128, MXFP8], ids=lambda method: method.scale)
def test_kernel_computes_its_input(function, shapes, dtype, method, monkeypatch):
    """The kernel, interpreted, has the codes and scales of the matrix that XLA computes, to the bit."""
    monkeypatch.setattr(rows_and_columns, "INTERPRET", True)
    matrix, expression, inputs = computed(function, *arrays(shapes, dtype))
    static = {"method": method, "transposes": (False, True)}
    unread = jnp.full_like(matrix, jnp.nan)
    ours = strictly(lambda x: rows_and_columns._at_once(unread, x, expression=expression, **static), inputs)
    expected = rows_and_columns._one_by_one(matrix, **static)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one.scale).view(np.uint8), other.scale.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(one.data).view(np.uint8), other.data.view(np.uint8))


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX lowers Triton only beside a GPU's mesh")
@MADE
def test_kernel_in_triton(function, shapes):
    """The kernel can be lowered: Triton has each of the operations in bfloat16."""
    matrix, expression, inputs = computed(function, *arrays(shapes, jnp.bfloat16))
    static = {"method": BLOCK_1X128, "transposes": (False, True), "expression": expression}
    kernel = jax.jit(functools.partial(rows_and_columns._at_once, **static))
    text = kernel.trace(matrix, inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize(
    "primitive, drops_nan", [(lax.max_p, np.fmax), (lax.min_p, np.fmin)], ids=["max", "min"]
)
def test_nan_of_a_maximum(primitive, drops_nan, monkeypatch):
    """A relu of NaN is NaN, also by Triton's maximum, which gives the other operand."""
    operation = Operation(primitive, (), (0, 1), jnp.float32)
    x, y = jnp.array([jnp.nan, 1.0, -2.0, jnp.nan]), jnp.array([0.0, jnp.nan, jnp.inf, jnp.nan])
    expected = primitive.bind(x, y)
    monkeypatch.setattr(primitive, "bind", lambda x, y: jnp.asarray(drops_nan(x, y)))
    np.testing.assert_array_equal(operation.of([x, y], lax.div), expected)


@MADE
def test_cpu_reads_the_matrix(function, shapes):
    """On a CPU the matrix itself is quantized."""
    matrix, expression, inputs = computed(function, *arrays(shapes))
    wrong = Computed(matrix, expression, tuple(x + 1 for x in inputs))
    for one, other in zip(
        quantize_rows_and_columns(wrong, MXFP8), quantize_rows_and_columns(matrix, MXFP8), strict=True
    ):
        np.testing.assert_array_equal(one.dequantize(), other.dequantize())


def layer_norm(x, mean, inverse):
    return (x - mean) * inverse


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x: x, [FULL]),
        (lambda x: jnp.swapaxes(x, 0, 1) + 1, [(128, 2, WIDTH)]),
        (lambda x: x[..., :WIDTH] * x[..., WIDTH:], [(*ROWS, 2 * WIDTH)]),
        (lambda x: jax.nn.softmax(x), [FULL]),
        (lambda x: jnp.cos(x) + 1, [FULL]),
        (lambda x: jax.lax.reduce_precision(x, 8, 7) + 1, [FULL]),
        (layer_norm, [FULL, ROW, ROW]),
    ],
    ids=["argument", "transpose", "slices", "sum", "unknown", "rounded", "two rows"],
)
def test_others_are_left(function, shapes):
    """The kernel reads what it cannot compute, or what would be stored all the same."""
    assert source_of(function, *arrays(shapes)) is None


def test_value_with_other_uses():
    """A value that others read, too, is computed in the kernel only if that reads no more."""
    x, y = jnp.ones((128, 128)), jnp.ones((128, 128))
    for function, is_computed in ((lambda x, y: x * y, False), (lambda x, y: x + 1, True)):
        jaxpr = jax.make_jaxpr(lambda x, y, f=function: (lambda z: (z @ y, z))(f(x, y)))(x, y).jaxpr
        assert bool(producers(jaxpr, {1: 0})) == is_computed


def test_named_input():
    """The kernel reads the value that `checkpoint_name` names, since a remat policy may save it."""
    x, y = jnp.ones((128, 128)), jnp.ones((128, 128))
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.square(checkpoint_name(x @ y, "a")) @ y)(x, y).jaxpr
    product, name, _, _ = jaxpr.eqns
    assert name.primitive.name == "name" and name.invars == product.outvars
    assert producers(jaxpr, {3: 0})[3].inputs == tuple(name.outvars)


def test_norm_of_flax():
    """Flax subtracts a mean of zeros in an RMS norm."""
    norm: Any = nn.RMSNorm(dtype=jnp.bfloat16)
    x = jnp.ones(FULL, jnp.bfloat16)
    variables = norm.init(jax.random.key(0), x)
    jaxpr = jax.make_jaxpr(lambda x: norm.apply(variables, x) @ jnp.ones((WIDTH, 8), x.dtype))(x).jaxpr
    [number] = [number for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    assert producers(jaxpr, {number: 0})[number].expression.inputs == ("m k", "m r", "c k")


class Block(nn.Module):
    """An RMS norm and a gated MLP, with a residual, or a gelu MLP."""

    is_gated: bool = True

    @nn.compact
    def __call__(self, x):
        dense = lambda width, name: nn.Dense(width, dtype=x.dtype, name=name)  # noqa: E731
        y = nn.RMSNorm(dtype=x.dtype)(x)
        up = dense(256, "up")(y)
        y = nn.silu(dense(256, "gate")(y)) * up if self.is_gated else nn.gelu(up)
        return x + dense(128, "down")(y)


def loss_of(model, recipe="mxfp8"):
    made = fp8jax.transform(model, recipe)
    return made, lambda variables, x: jnp.mean(made.apply(variables, x).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "gelu"])
def test_nothing_changes_on_a_cpu(is_gated, monkeypatch):
    """Loss and gradients are those without the kernel's inputs, to the bit."""
    made, loss = loss_of(Block(is_gated))
    x = jax.random.normal(jax.random.key(1), (128, 128), jnp.bfloat16)
    variables = made.init(jax.random.key(0), x)
    ours = jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)
    monkeypatch.setattr(evaluate, "producers", lambda jaxpr, operands: {})
    _, loss = loss_of(Block(is_gated))
    jax.tree.map(np.testing.assert_array_equal, ours, jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x))


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize("recipe, target", [("block", "h200"), ("mxfp8", "b200")])
def test_a_gpu_moves_fewer_bytes(recipe, target, monkeypatch):
    """The compiled program moves fewer bytes, in no more kernels."""
    x = jax.ShapeDtypeStruct((2, 512, 128), jnp.bfloat16)

    def compiled():
        made, loss = loss_of(Block(False), recipe)
        variables = jax.eval_shape(made.init, jax.random.key(0), x)
        return program.read(targets.compile_for(jax.value_and_grad(loss), variables, x, target=target))

    ours = compiled()
    monkeypatch.setattr(evaluate, "producers", lambda jaxpr, operands: {})
    others = compiled()
    assert ours.kernels <= others.kernels and ours.moved < others.moved
    assert ours.count() == others.count()
