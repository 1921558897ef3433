"""The cells of the chart: formats that a program, its arrays and a layer's jaxpr have, and the evidence."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import adapters, formats, gradients, optim
from fp8jax.inspect import program
from fp8jax.inspect.program.lowered import equations
from fp8jax.inspect.subject import loss_of
from fp8jax.optim.state.stored_formats import ROOT
from fp8jax.optim.step.codecs import name_of
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.find import scan_parts
from fp8jax.scaling.merge import is_state
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

WIDTH, TOKENS = 256, 128  # of the model, and per device
SHAPES = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
LAYERS, ROWS = 2, 3 * TOKENS  # of the model whose residuals are read: no kernel is as large as an activation

# Format -> dtypes, by XLA's names and numpy's. FP8 codes cross between devices as bytes.
_DTYPES = {
    "FP4": ("f4e2m1fn",),
    "FP8": ("f8e4m3fn", "f8e5m2", "u8", "uint8", "float8_e4m3fn", "float8_e5m2"),
    "FP16": ("f16", "float16"),
    "BF16": ("bf16", "bfloat16"),
    "FP32": ("f32", "float32"),
}
_FORMATS = {dtype: name for name, dtypes in _DTYPES.items() for dtype in dtypes}
_BITS = {"FP4": 4, "FP8": 8, "FP16": 16, "BF16": 16, "FP32": 32}
NEEDS = ("nothing", "state", "value_and_grad")
# XLA's names of the dtypes of scales, as "f8e8m0fnu" for float8_e8m0fnu.
_SCALE_FORMATS = {re.sub("loat|_", "", each.dtype.name): each.name for each in formats.ALL}


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """The layer whose programs are read: parameters of `SHAPES`, inputs (rows, WIDTH)."""
    return x + jax.nn.gelu(x @ params["up"].astype(x.dtype)) @ params["down"].astype(x.dtype)


# Each of these returns the formats that it finds, and the evidence.


def of_gemms(gemms: Sequence[program.Gemm]) -> tuple[str, str]:
    """The wider operand's format of each GEMM."""
    wider = [max(format_of(gemm.lhs), format_of(gemm.rhs), key=bits_of) for gemm in gemms]
    return mixed(wider), _counted(f"{gemm.lhs} x {gemm.rhs} {gemm.kind}" for gemm in gemms)


def of_scales(loss_fn: Any, variables: Any, *inputs: Any) -> tuple[str, str]:
    """The parts of GEMM operands that have a scale, in a CPU's program, and ", history" or ""."""
    traced = jax.jit(gradients.value_and_grad(loss_fn)).trace(variables, *inputs)
    lowered = traced.lower(lowering_platforms=("cpu",))
    gemms = [gemm for gemm in program.read_lowered(lowered) if gemm.is_fp8]
    found = [block for gemm in gemms for block in gemm.blocks or ("tensor",)]
    history = ", history" * any(map(is_state, jax.tree.leaves(variables.get(SCALING, {}), is_leaf=is_state)))
    names = [re.sub(r"\w+$", lambda dtype: _SCALE_FORMATS.get(dtype[0], dtype[0]), block) for block in found]
    return mixed(name + history * (name == "tensor") for name in names), _counted(found)


def of_collectives(collectives: Sequence[program.Collective], devices: int) -> tuple[str, str]:
    """The formats of collectives with the size of a kernel or of one device's shard of a kernel."""
    found = [each for each in collectives if each.dtype in _FORMATS]
    large = [each for each in found if each.numbers >= 4 * WIDTH * WIDTH // devices]
    small = sum(each.numbers for each in found) - sum(each.numbers for each in large)
    shown = _counted(f"{each.kind} {each.dtype}[{each.numbers}]" for each in large)
    return mixed(format_of(each.dtype) for each in large), f"{shown}; {small} numbers in smaller ones"


def of_arrays(tree: Any) -> tuple[str, str]:
    """The formats of arrays or `ScaledArray`s."""
    found = [
        (str(leaf.data.dtype), " with scale") if is_scaled(leaf) else (str(leaf.dtype), "")
        for leaf in jax.tree.leaves(tree, is_leaf=is_scaled)
    ]
    return mixed(format_of(dtype) for dtype, _ in found), _counted(map("".join, found))


def of_rounding(model: Any, recipe: Recipe) -> tuple[str, str]:
    """How a step on this machine rounds: what depends on the optimizer's seed is rounded stochastically."""
    params = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in SHAPES.items()}
    variables = model.init(params, jnp.zeros((1, WIDTH)))
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), variables[PARAMS], is_leaf=is_scaled)

    def step(seed: int) -> tuple[Any, Any]:
        tx = optim.adamw(1e-3, recipe, seed=seed)
        updates, state = tx.update(grads, tx.init(variables), variables)
        return gradients.apply_updates(variables, updates)[PARAMS], state

    (weights, state), (other_weights, other) = step(0), step(1)
    mu, nu = optim.moments(state)
    of_mu = "nearest" if _same(mu, optim.moments(other)[0]) else "stochastic"
    of_weight = "nearest" if _same((weights, state.master), (other_weights, other.master)) else "stochastic"
    is_root = all(name_of(node).startswith(ROOT) for node in nu.values())
    formats = (
        of_mu,
        "kahan" if jax.tree.leaves(state.remainder) else of_weight,
        "root" if is_root else "value",
    )
    return " + ".join(formats), "two steps with different seeds"


def of_residuals(recipe: Recipe, dtype: Any, gradient_checkpointing: str) -> tuple[str, str]:
    """The activations that the forward's scan returns beside its carry, without scales and kernels."""

    def stack(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (mlp(layer, x), None), x, params)[0]

    model = adapters.transform(stack, recipe, gradient_checkpointing=gradient_checkpointing)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    params = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in SHAPES.items()}
    loss_fn, args = loss_of(model, (params, x))
    jaxpr = jax.make_jaxpr(gradients.value_and_grad(loss_fn))(*args)
    forward = next(each for each in equations(jaxpr.jaxpr) if each.primitive.name == "scan")
    _, carry, _ = scan_parts(forward, forward.invars)
    saved = [variable.aval for variable in forward.outvars[len(carry) :]]
    entries = {ROWS * WIDTH: "", 4 * ROWS * WIDTH: ""}
    # Two FP4 codes are a byte.
    entries |= {numbers // 2: "FP4" for numbers in entries}
    found = [(entries[size], aval) for aval in saved if (size := aval.size // LAYERS) in entries]
    shown = _counted(f"{aval.dtype}{list(aval.shape[1:])}" for _, aval in found)
    bytes_saved = sum(aval.size * aval.dtype.itemsize for _, aval in found)
    names = (name or format_of(str(aval.dtype)) for name, aval in found)
    return mixed(names), f"{shown}; {bytes_saved / LAYERS / ROWS / WIDTH:.1f} bytes for each input"


def of_needs(variables: Any, grads: Any) -> tuple[str, str]:
    """The needs of a training loop with these variables and gradients, and its states as evidence."""
    states = {name: tree for name, tree in variables.items() if name != PARAMS}
    leaves = jax.tree.leaves((variables[PARAMS], grads), is_leaf=is_scaled)
    is_plain = LOSS_SCALE not in states and not any(map(is_scaled, leaves))
    return NEEDS[bool(states) if is_plain else 2], f"states: {', '.join(states) or 'none'}"


def _same(tree: Any, other: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(jnp.array_equal, tree, other)))


def format_of(dtype: str) -> str:
    """The format of a dtype, by XLA's or numpy's name; the dtype if it has none."""
    return _FORMATS.get(dtype, dtype)


def bits_of(name: str) -> int:
    """The bits of a format; 64 for others."""
    return _BITS.get(name, 64)


def mixed(names: Iterable[str]) -> str:
    """Formats in a cell."""
    return " / ".join(sorted(set(names))) or "-"


def _counted(shown: Iterable[str]) -> str:
    return ", ".join(f"{count} {each}" for each, count in collections.Counter(shown).items()) or "none"
