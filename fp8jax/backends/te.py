"""FP8 GEMMs through NVIDIA TransformerEngine's cuBLASLt, and ways between its modules and ours.

    y = fp8jax.dot_general(x, w, numbers, recipe="te", state=state, backend="te")
    model = fp8jax.transform(model, "O2", backend="te")

What TransformerEngine does here is the three GEMMs of a product, on FP8 operands and scales that
are made as for every other backend. So all recipes work, scaling state is the same and is updated
the same way (amaxes of a layer that is used twice merge by max, a NaN is forgotten), and a
checkpoint goes from one backend to another as it is. Compiled for an H200, an MLP's program is that
of "xla" with other calls in the place of its GEMMs. TransformerEngine's casts are not used: for
scales per tensor they write rows and leave the transposes to XLA, as ours do, and XLA computes a
norm or an activation within a cast of its own only. Its LayerNorm with FP8 output is not used
either: in a Flax model a norm is a module of its own, whose output may go anywhere.

For users of TransformerEngine's own modules:

    recipe_of("te,margin=1")                  # its recipe object, for any of its interfaces
    with autocast("te"): ...                  # its modules in FP8
    nn.Dense(64, dot_general_cls=dot_general_cls("te"))
    to_te(state), from_te(state, "te")        # scaling state of its modules and of ours

Its modules add the state of a layer that is used twice, which makes the scale twice too large;
`fp8jax.dot_general_cls("te", backend="te")` takes their place and merges by max.

Limits. TransformerEngine is told of many devices by its own `MeshResource`: "auto" takes this
backend where there is one device. A product under `vmap` is one GEMM after the other.

References:
    TransformerEngine 2.20.2, transformer_engine/jax: cpp_extensions/gemm.py, quantize/quantizer.py,
    flax/module.py.
"""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fp8jax.backends import xla
from fp8jax.recipe import Recipe
from fp8jax.scaled import FIRST_SCALES, MAX_SCALE, MIN_SCALE, UNSET, ScaledArray, usable

NORMS = xla.NORMS  # what surrounds the GEMMs is XLA's

# cuBLASLt takes FP8 matrices whose sides are whole 16 bytes.
_MULTIPLE = 16

# Its names of a product's operands, in the order of ours.
_OPERANDS = ("x", "kernel", "grad")

# What `make_dot_general_cls` makes is called so within a layer.
_WRAPPER = "TEWrapper_dot_general_0"


def supports(*, is_batched: bool = False) -> str | None:
    """Why it cannot run here, or None.

    Args:
        is_batched: whether it is asked about a product with batch dimensions.
    """
    reason = _why_not_importable()
    if reason:
        return reason
    capability = _capability()
    if capability is None:
        return "transformer_engine needs an NVIDIA GPU, and JAX's default device is none"
    if capability < (8, 9):
        return "FP8 needs a GPU of compute capability 8.9, and this one has {}.{}".format(*capability)
    return "transformer_engine multiplies no batches of matrices" if is_batched else None


def dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    """The product of two matrices; see `fp8jax.backends`."""
    dims, _ = dimension_numbers
    multiply = functools.partial(_multiply, dims, out_dtype, precise)
    # One after the other where a vmap maps them: the GEMM has no rule for it.
    return jax.custom_batching.sequential_vmap(multiply)(lhs.data, lhs.scale, rhs.data, rhs.scale)


def _multiply(
    dims: tuple[Any, Any],
    out_dtype: Any,
    precise: bool,
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
) -> jax.Array:
    """One of its GEMMs."""
    quantize = importlib.import_module("transformer_engine.jax.quantize")
    gemm, is_plain = _gemm()
    # In plain JAX it casts before it scales, and XLA on a CPU adds in what it is cast to.
    dq_dtype = jnp.float32 if is_plain else out_dtype
    ((lhs_k,), (rhs_k,)) = dims
    m, n = lhs.shape[1 - lhs_k], rhs.shape[1 - rhs_k]
    lhs, rhs = _padded(lhs), _padded(rhs)
    if not quantize.is_fp8_gemm_with_all_layouts_supported():  # before Blackwell the contracted dim is last
        lhs, rhs, lhs_k, rhs_k = _with_last(lhs, lhs_k), _with_last(rhs, rhs_k), 1, 1

    def scaled(data: jax.Array, scale: jax.Array) -> Any:
        return quantize.ScaledTensorFactory.create_1x(
            data=data,
            scale_inv=scale.reshape(1),
            scaling_mode=quantize.ScalingMode.DELAYED_TENSOR_SCALING,
            dq_dtype=dq_dtype,
            flatten_axis=1,
        )

    operands = scaled(lhs, lhs_scale), scaled(rhs, rhs_scale)
    out = gemm(*operands, contracting_dims=((lhs_k,), (rhs_k,)), use_split_accumulator=precise)
    return out[:m, :n].astype(out_dtype)


def _gemm() -> tuple[Any, bool]:
    """Its GEMM, and whether it is what it has in plain JAX where its custom calls are switched off.

    Its public `gemm` accumulates forward and backward alike, as an environment variable says.
    """
    module = importlib.import_module("transformer_engine.jax.cpp_extensions.gemm")
    if module.GemmPrimitive.enabled():
        return module._te_gemm, False
    return module._jax_gemm, True


def _with_last(x: jax.Array, axis: int) -> jax.Array:
    """A matrix with `axis` last."""
    # Without the constraint XLA may compute all that is before, the wide tensor too, in the layout in
    # which the transpose costs nothing, and transpose that.
    return x if axis == 1 else with_layout_constraint(x, Layout(major_to_minor=(0, 1))).T


def _padded(x: jax.Array) -> jax.Array:
    """A matrix with zeros up to sides that cuBLASLt takes; they add nothing to a product."""
    return jnp.pad(x, [(0, -size % _MULTIPLE if size else _MULTIPLE) for size in x.shape])


@functools.cache
def _why_not_importable() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    try:
        importlib.import_module("transformer_engine.jax")
        _gemm()
    except Exception as error:  # a missing library, GPU or part: each of its layers fails in its own way
        return f"transformer_engine.jax cannot be used: {type(error).__name__}: {error}".splitlines()[0]
    return None


def _capability() -> tuple[int, int] | None:
    """The compute capability of JAX's default device; None if that is no NVIDIA GPU."""
    config: Any = jax.config
    chosen = config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    capability = getattr(chosen, "compute_capability", "")
    major, _, minor = str(capability).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def recipe_of(recipe: Recipe | str) -> Any:
    """TransformerEngine's recipe object for the recipe's GEMM column.

    Args:
        recipe: a `Recipe`, or the text of one. Its other columns are not TransformerEngine's, whose
            modules keep weights, gradients and moments wide. `first_scale` is not either: its
            modules start with scale 1, so the first step differs.

    Returns:
        A `transformer_engine.common.recipe.DelayedScaling` or `Float8CurrentScaling`.

    Raises:
        ValueError: the recipe asks for what TransformerEngine's JAX modules do not do.
        ImportError: TransformerEngine is not installed.
    """
    recipe = Recipe.parse(recipe)
    _refuse(recipe, "gemm", recipe.gemm == "FP8")
    _refuse(recipe, "interval", recipe.interval == 1)
    _refuse(recipe, "override_linear_precision", not any(recipe.override_linear_precision))
    if recipe.scaling == "current":
        _refuse(recipe, "margin", recipe.margin == 0, ", with scaling=current")
    theirs = importlib.import_module("transformer_engine.common.recipe")
    fp8_format = theirs.Format[recipe.fp8_format]
    if recipe.scaling == "current":
        return theirs.Float8CurrentScaling(fp8_format=fp8_format)
    return theirs.DelayedScaling(
        margin=recipe.margin,
        fp8_format=fp8_format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
    )


def _refuse(recipe: Recipe, field: str, fits: bool, where: str = "") -> None:
    if not fits:
        raise ValueError(
            f"`recipe`: TransformerEngine's JAX modules have no {field}={getattr(recipe, field)}{where}. "
            "Under `fp8jax.transform` its GEMMs can be used with any recipe."
        )


def autocast(recipe: Recipe | str, mesh_resource: Any = None) -> AbstractContextManager[None]:
    """A context in which TransformerEngine's own modules multiply in FP8.

    Args:
        recipe: see `recipe_of`.
        mesh_resource: its `MeshResource`, for many devices.

    Raises: see `recipe_of`.
    """
    te_recipe = recipe_of(recipe)
    te = importlib.import_module("transformer_engine.jax")
    mesh_resource = te.MeshResource() if mesh_resource is None else mesh_resource
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=te_recipe, mesh_resource=mesh_resource)
    return te.fp8_autocast(enabled=True, fp8_recipe=te_recipe, mesh_resource=mesh_resource)


def dot_general_cls(recipe: Recipe | str) -> Any:
    """TransformerEngine's own class for `nn.Dense(dot_general_cls=...)`, with its own scaling state.

    Args:
        recipe: see `recipe_of`.

    Raises: see `recipe_of`.
    """
    te_recipe = recipe_of(recipe)
    return importlib.import_module("transformer_engine.jax.flax").make_dot_general_cls(te_recipe)


def to_te(state: Mapping[str, Any], *, name: str = _WRAPPER) -> dict[str, Any]:
    """Our scaling state as TransformerEngine's modules keep it.

    Its scale is the factor to multiply with, the reciprocal of ours; its history is oldest first
    behind an empty place, without our oldest amax, which no later scale depends on.

    Args:
        state: that of one product, or a tree of them: a collection "_overwrite_with_gradient". Arrays
            may have axes in front, as under `nn.scan`.
        name: what holds a product's state within a layer: by default what `make_dot_general_cls`
            makes; "" where the layer itself does, as TransformerEngine's `DenseGeneral` in its
            collection "fp8_metas".

    Returns:
        For each product `{x,kernel,grad}_scale`, shape=(..., 1), and `{x,kernel,grad}_amax_history`,
        shape=(..., history). A scale that is not set yet is 1, and the scale of FP8 weight gradients
        is left out.

    Raises:
        ValueError: what is there is no state of delayed scaling that is updated at every step.
    """
    if not state:
        return {}
    if "amax_history" in state:
        return _entry_to_te(state)
    _expect_tree(state, "scale and amax_history")
    moved = {}
    for key, below in state.items():
        if "amax_history" not in below:
            moved[key] = to_te(below, name=name)
        elif name:
            moved[name] = to_te(below)
        else:
            moved.update(to_te(below))
    return moved


def _entry_to_te(state: Mapping[str, Any]) -> dict[str, Any]:
    if "step" in state:
        raise ValueError("`state`: TransformerEngine updates at every step; got a state with interval > 1.")
    scale, history = state["scale"], state["amax_history"]
    factor = jnp.where(scale == UNSET, 1.0, 1 / scale)
    empty = jnp.zeros_like(history[..., :1])
    history = jnp.concatenate([empty, history[..., -2::-1]], axis=-1)[..., : history.shape[-1]]
    return {
        f"{operand}_{field}": value
        for i, operand in enumerate(_OPERANDS)
        for field, value in (("scale", factor[..., i : i + 1]), ("amax_history", history[..., i, :]))
    }


def from_te(state: Mapping[str, Any], recipe: Recipe | str, *, name: str = "kernel") -> dict[str, Any]:
    """TransformerEngine's scaling state as ours: the inverse of `to_te`.

    A factor or an amax that is not finite says nothing: the scale is then as at the start, the amax 0.

    Args:
        state: that of one product, or a tree of them: TransformerEngine's collection
            "_overwrite_with_gradient" or "fp8_metas".
        recipe: the recipe that the state is for, or the text of one.
        name: what holds a product's state within a layer: "kernel" in a model of `fp8jax.transform`,
            "DotGeneral_0" where a layer has `fp8jax.dot_general_cls`.

    Returns:
        For each product `scale`, shape=(..., 3), `amax_history`, shape=(..., 3, history), and what
        else the recipe keeps, as `fp8jax.init_state` gives it.

    Raises:
        ValueError: what is there is no state of TransformerEngine's delayed scaling, or its history is
            not as long as the recipe's.
    """
    recipe = Recipe.parse(recipe)
    if not state:
        return {}
    if "x_scale" in state:
        return _entry_from_te(state, recipe)
    _expect_tree(state, "x_scale, x_amax_history and those of kernel and grad")
    moved = {}
    for key, below in state.items():
        converted = from_te(below, recipe, name=name)
        if "x_scale" not in below:
            moved[key] = converted
        elif key.startswith("TEWrapper"):
            moved[name] = converted
        else:
            moved[key] = {name: converted}
    return moved


def _entry_from_te(state: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    factor = jnp.concatenate([state[f"{operand}_scale"] for operand in _OPERANDS], axis=-1)
    history = jnp.stack([state[f"{operand}_amax_history"] for operand in _OPERANDS], axis=-2)
    if recipe.scaling != "delayed" or history.shape[-1] != recipe.amax_history_len:
        raise ValueError(
            f"`recipe`: expected scaling=delayed with amax_history_len={history.shape[-1]}, as the "
            f"state has; got {recipe}."
        )
    scale, first = 1 / factor, jnp.array(FIRST_SCALES[recipe.first_scale], jnp.float32)
    history = jnp.where(usable(history), history, 0.0)
    oldest = jnp.zeros_like(history[..., :1])
    new = {
        "scale": jnp.where(usable(scale), jnp.clip(scale, MIN_SCALE, MAX_SCALE), first),
        "amax_history": jnp.concatenate([history[..., :0:-1], oldest], axis=-1),
    }
    if recipe.interval > 1:
        new["step"] = jnp.zeros(history.shape[:-2], jnp.float32)
    if recipe.weight_grad == "E4M3":
        new["wgrad_scale"] = jnp.ones(history.shape[:-2], jnp.float32)
    return new


def _expect_tree(state: Mapping[str, Any], expected: str) -> None:
    wrong = [key for key, below in state.items() if not isinstance(below, Mapping)]
    if wrong:
        raise ValueError(f"`state`: expected {expected} of delayed scaling; got {', '.join(wrong)}.")
