"""Checks of GEMMs for correctness.py: rows with a measured number, its bound, and whether the bound held.

The bounds are derived from what an H100 does: its FP8 GEMMs add 32 products and the sum so far at a time,
and cut each of them 13 bits below the largest; fast accumulation stays there, precise accumulation goes to
float32 every 128 products; outputs are rounded to bfloat16 once. (A model of this has 98% to 99% of an H100's
outputs to the bit; one of exact sums 93% to 97%.)
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from fp8jax import Recipe, backends, formats, scaling
from fp8jax.backends import pallas, reference
from fp8jax.quantization import BLOCK_1X128, BlockMethod, quantize_blocks, quantize_rows_and_columns
from fp8jax.rewrite.producers import producers

RECIPE = "te,scaling=current"  # scales that are not 1
REGISTER = 2.0**-13  # what is cut from a number in the tensor cores' registers, relative to the largest
HALF_ULP = 2.0**-9  # of bfloat16
# batch, m, n, k, rows of rhs with a scale, tiling of the kernel in Triton: no multiples of tiles. Hopper's
# kernel has one wave or two, more steps than stages, and more tiles than there are cores.
TAILS = (
    (2, 300, 200, 700, 128, None),
    (3, 100, 260, 100, 1, None),
    (1, 385, 330, 130, 1, None),
    (1, 2200, 2100, 100, 128, None),
    (2, 300, 330, 300, 128, pallas.TILING),
    (1, 300, 330, 300, 1, pallas.TILING),
)


def row(what: str, measured: Any, bound: Any, held: bool | None = None) -> dict[str, Any]:
    """A row of the table; by default the bound is the largest legal number."""
    held = measured <= bound if held is None else held
    return {"what": what, "measured": measured, "bound": bound, "held": bool(held)}


def here_and_there(here: Callable[..., Any], there: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """One function's results on the device and another's on the CPU, as numpy arrays."""
    found = []
    for function, device in ((here, jax.devices()[0]), (there, jax.devices("cpu")[0])):
        with jax.default_device(device):
            found.append(jax.device_get(function(*jax.device_put(args, device))))
    return found[0], found[1]


def products(is_tiny: bool) -> list[dict[str, Any]]:
    """The GEMMs of a dense layer, forward and backward, against the reference backend on the CPU."""
    x, kernel, grad = operands(is_tiny)
    ways = (jax.jit(functools.partial(three, RECIPE, backend)) for backend in ("auto", "reference"))
    ours, meant = here_and_there(*ways, x, kernel, grad)
    a, b, g = (np.asarray(operand, np.float32) for operand in (x, kernel, grad))
    # A cast can raise an operand by a sixteenth or, to E5M2, an eighth.
    lost = [1.13 * cut(a, b.T, x.shape[1]), 1.2 * cut(g, b, 128), 1.2 * cut(a.T, g.T, 128)]
    return compared("", ours, meant, lost)


def in_blocks(is_tiny: bool) -> list[dict[str, Any]]:
    """The same with scales of blocks: equal codes and scales, and GEMMs of them."""
    given, found = operands(is_tiny), []
    for name in ("block", "mxfp8", "nvfp4"):
        copies, meant = here_and_there(*[jax.jit(functools.partial(quantized, name))] * 2, *given)
        pairs = zip(jax.tree.leaves(copies), jax.tree.leaves(meant), strict=True)
        same = np.concatenate([(one.view(np.uint8) == other.view(np.uint8)).ravel() for one, other in pairs])
        # XLA's division on a GPU, of the scales of NVFP4's tensors, may be two units off: a number at a tie
        # has another code.
        most = 1e-3 if name == "nvfp4" else 0
        wrong = float(np.mean(~same))
        found.append(row(f"{name}: share of codes and scales that differ from the CPU's", wrong, most))
        if reason := backends.why_not("auto", scaling.of_recipe(Recipe.parse(name)).granularity):
            found.append(row(f"{name}, GEMMs: {reason}", None, None, True))
            continue
        (x1, x2), (w1, w2), (g1, g2) = (
            [np.asarray(jax.tree.map(jnp.asarray, copy).dequantize()) for copy in pair] for pair in meant
        )
        ways = [jax.jit(functools.partial(three, name, "auto"))] * 2
        ours, meant = here_and_there(*ways, *given)
        # The kernel for "block" goes to float32 every 128 products; of cuDNN that is not known.
        lengths = [128 if name == "block" else x.shape[1] for x in (x1, g1, x2)]
        operands_of = zip((x1, g1, x2), (w1, w2, g2), lengths, ours, strict=True)
        lost = [cut(a, b, every)[: out.shape[0], : out.shape[1]] for a, b, every, out in operands_of]
        found += compared(f"{name}, ", ours, meant, lost)
    return found


def operands(is_tiny: bool) -> list[jax.Array]:
    """An input, a kernel and an output gradient."""
    m, k, n = (32, 64, 48) if is_tiny else (512, 1024, 768)
    pairs = zip(jax.random.split(jax.random.key(0), 3), ((m, k), (k, n), (m, n)), strict=True)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs]


def three(recipe: str, backend: str, x: Any, kernel: Any, grad: Any) -> Any:
    """The output of a dense layer, and the gradients of its input and kernel."""

    def dot(x: Any, kernel: Any, state: Any) -> Any:
        dims = (((1,), (0,)), ((), ()))
        return fp8jax.dot.dot_general(x, kernel, dims, recipe=recipe, state=state, backend=backend)

    out, pull = jax.vjp(dot, x, kernel, fp8jax.dot.init_state(recipe))
    return out, *pull(grad)[:2]


def tails(is_tiny: bool) -> list[dict[str, Any]]:
    """The kernels for "block", into float32."""
    found = []
    for number, (batch, m, n, k, rows, tiling) in enumerate(TAILS[: 2 if is_tiny else None]):
        keys = jax.random.split(jax.random.key(number))
        a, b = (
            jax.jit(quantize_blocks, static_argnums=1)(
                jax.random.normal(key, (batch, size, k)), BlockMethod(formats.E4M3, (height, 128))
            )
            for key, size, height in zip(keys, (m, n), (1, rows), strict=True)
        )
        dot = reference.dot_by(functools.partial(pallas.gemm, tiling=tiling))
        options: Any = {"dimension_numbers": (((2,), (2,)), ((0,), (0,))), "out_dtype": jnp.float32}
        ways = (jax.jit(functools.partial(way, **options, precise=True)) for way in (dot, reference.dot))
        own, meant = here_and_there(*ways, a, b)
        left, right = (np.asarray(x.dequantize()) for x in (a, b))
        lost = [cut(one, other, 128) for one, other in zip(left, right, strict=True)]
        # Sums in float32 round, too.
        worst = float(np.max(np.abs(own - meant) / (np.stack(lost) + 1e-5 * np.abs(meant).max())))
        kernel = "Triton" if tiling else "the device's kernel"
        what = f"GEMM in blocks, {batch} x {m} x {n} x {k}, {rows} rows a scale, {kernel}"
        found.append(row(f"{what}: largest error / bound", worst, 1.0))
    return found


def computed(is_tiny: bool) -> list[dict[str, Any]]:
    """Operands that the kernel computes which quantizes them."""
    del is_tiny
    x, y = (jax.random.normal(key, (256, 256), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    inverse, scale = jnp.abs(x[:, :1].astype(jnp.float32)), y[:1].astype(jnp.float32)
    ways: dict[str, Any] = {
        "gelu": (nn.gelu, x),
        "gated product": (lambda x, y: nn.silu(x) * y, x, y),
        "norm": (lambda x, *by: (x * by[0] * by[1]).astype(x.dtype), x, inverse, scale),
        "relu of a row with NaN": (nn.relu, x.at[3].set(jnp.nan)),
    }
    found = []
    for name, (function, *args) in ways.items():
        codes = functools.partial(codes_of, function)
        pairs = zip(*map(jax.tree.leaves, here_and_there(codes, codes, *args)), strict=True)
        both = [np.asarray(pair, np.float32) for pair in pairs]
        same = [(own == other) | (np.isnan(own) & np.isnan(other)) for own, other in both]
        # A GPU's exp and tanh are not a CPU's: a number at a tie has another code.
        wrong = 1 - float(np.mean(np.concatenate([each.ravel() for each in same])))
        found.append(row(f"{name}, computed: share of codes and scales that differ", wrong, 1e-3))
    return found


def codes_of(function: Callable[..., jax.Array], *args: jax.Array) -> Any:
    """Both copies of `function(*args)`, which the kernel of a GPU computes."""
    kernel = jnp.ones((256, 1), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda *args: function(*args) @ kernel)(*args).jaxpr
    number = next(n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general")
    producer = producers(jaxpr, {number: 0})[number]

    def run(*args: jax.Array) -> Any:
        values = [args[jaxpr.invars.index(var)] for var in producer.inputs]
        return quantize_rows_and_columns(producer.of(function(*args), values), BLOCK_1X128)

    # XLA rounds to bfloat16 within a fusion, too, as the kernel does.
    lowered = jax.jit(run).lower(*args)
    return lowered.compile(compiler_options={"xla_allow_excess_precision": False})(*args)


def quantized(name: str, *given: jax.Array) -> Any:
    """Both copies of the three operands."""
    its: Any = scaling.of_recipe(Recipe.parse(name))
    return [its.quantize_operand(number, x, its.init()) for number, x in enumerate(given)]


def cut(a: Any, b: Any, every: int) -> Any:
    """The most that the tensor cores' registers can lose of each number of `a @ b.T`.

    Args:
        a, b: the operands, shape=(m, k) and (n, k), float32.
        every: products that are added before the sum goes to float32.
    """
    lost = np.zeros((len(a), len(b)), np.float32)
    total = np.zeros_like(lost)
    for begin in range(0, a.shape[1], 32):
        total *= bool(begin % every)
        largest = np.abs(total)
        for i in range(begin, min(begin + 32, a.shape[1])):
            np.maximum(largest, np.abs(np.outer(a[:, i], b[:, i])), out=largest)
        total += a[:, begin : begin + 32] @ b[:, begin : begin + 32].T
        lost += 33 * REGISTER * np.maximum(largest, np.abs(total))
    return lost


def compared(prefix: str, ours: Any, meant: Any, lost: Any) -> list[dict[str, Any]]:
    """Two rows for each GEMM.

    Args:
        prefix: of their names.
        ours, meant: the results of `three` here and on the CPU.
        lost: the most that registers lose of each number, see `cut`.
    """
    found = []
    for kind, own, other, most in zip(("fprop", "dgrad", "wgrad"), ours, meant, lost, strict=True):
        name = f"{prefix}{kind}"
        own, other = np.asarray(own, np.float32), np.asarray(other, np.float32)
        bound = most + 2 * HALF_ULP * np.abs(other)
        worst = float(np.max(np.abs(own - other) / bound))
        rms = float(np.sqrt(np.mean((own - other) ** 2) / np.mean(other**2)))
        found.append(row(f"{name}: largest error / bound", worst, 1.0))
        found.append(row(f"{name}: root mean square error, relative", rms, 2 * HALF_ULP))
    return found
