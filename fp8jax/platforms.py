"""`by_platform`: one operation with an implementation for CPU and one for other platforms; sharding; devices.

    out = by_platform(x, y, cpu=f, default=g, axis=0)     # f(x, y, axis=0) or g(x, y, axis=0)

The choice is made when the program is lowered, so a program traced on a laptop can be compiled for a GPU.
`jax.lax.platform_dependent` chooses by a value, which the backward of a scan hoists out of the loop, so that
the program contains both. `by_platform` is a primitive with both functions as parameters; the function for
other platforms is traced when a program is lowered for one of them.

It has no derivative: it is used inside custom derivative rules, whose results are `differentiable_once`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

# What `jax.shard_map(..., check_vma=...)` sets, and all that traces depend on, have no public API.
from jax._src.config import _check_vma as check_vma
from jax._src.config import trace_context
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jaxtyping import Array, PyTree, Shaped

_NO_DERIVATIVE = (
    "a cast to FP8, or an amax, has no derivative, nor has a step of `fp8jax.optim`, which takes amaxes: "
    "expected a gradient that goes by way of `dot_general`, or that `jax.lax.stop_gradient` stops before the "
    "cast. For a gradient through an optimizer take optax's."
)

_by_platform_p = jex.Primitive("by_platform")
_by_platform_p.multiple_results = True


def by_platform(
    *args: PyTree,
    cpu: Callable[..., Any],
    default: Callable[..., Any],
    is_deferred: bool = True,
    **static: Any,
) -> PyTree:
    """`cpu(*args, **static)` on a CPU, `default(*args, **static)` on other platforms.

    Args:
        args: trees of arrays.
        cpu: a module-level function that returns a tree of arrays.
        default: a module-level function that returns the same structure, shapes and dtypes.
        is_deferred: whether `default` is traced only for a program that needs it. JAX looks for primitives
            that are partitioned by rules of their own, and does not find them in a deferred function.
        static: hashable keyword arguments of both.
    """
    leaves, treedef = jax.tree.flatten(args)
    leaves = [jax.numpy.asarray(leaf) for leaf in leaves]
    avals = tuple(jax.typeof(leaf) for leaf in leaves)
    static_items = tuple(sorted(static.items()))
    # The mesh is in the types of the values within, and the default device chooses kernels.
    context = trace_context()
    on_cpu, elsewhere, out = _trace(cpu, default, static_items, treedef, avals, is_deferred, context)
    return jax.tree.unflatten(out, _by_platform_p.bind(*leaves, cpu=on_cpu, default=elsewhere))


def gpu_barrier(tree: PyTree) -> PyTree:
    """`jax.lax.optimization_barrier`; nothing on a CPU, where a barrier only costs compile time."""
    return by_platform(tree, cpu=_identity, default=lax.optimization_barrier)


def _identity(tree: Any) -> Any:
    return tree


class Deferred:
    """A jaxpr that is traced when it is needed."""

    def __init__(self, function: Callable[..., Any], args: Any) -> None:
        self._function, self._args = function, args

    def __repr__(self) -> str:
        """The same in every process, since jaxprs are printed and compared."""
        return f"Deferred({getattr(self._function, 'func', self._function).__name__})"

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The closed jaxpr."""
        return _plain_jaxpr(self._function, self._args)


@functools.lru_cache(maxsize=4096)
def _trace(
    cpu: Any, default: Any, static: Any, treedef: Any, avals: Any, is_deferred: bool, context: Any
) -> tuple[Any, Any, Any]:
    """The jaxprs of both functions, and the structure of their result; `context` is a key of the cache."""
    del context
    args, types = (treedef.unflatten(map(each, avals)) for each in (_shape, _type))
    cpu, default = (functools.partial(function, **dict(static)) for function in (cpu, default))
    on_cpu, shapes = jax.make_jaxpr(cpu, return_shape=True)(*types)
    elsewhere = Deferred(default, args) if is_deferred else _plain_jaxpr(default, args)
    return on_cpu, elsewhere, jax.tree.structure(shapes)


def _plain_jaxpr(function: Callable[..., Any], args: Any) -> Any:
    """The jaxpr without the types of a `jax.shard_map` around it, which Pallas kernels lack."""
    with check_vma(False):
        return jax.make_jaxpr(function)(*args)


def _shape(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _type(aval: Any) -> Any:
    """The shape, inside of a `jax.shard_map` with the mesh axes that the array varies over."""
    if not aval.manual_axis_type.varying:
        return _shape(aval)
    types = {"sharding": aval.sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **types)


def _closed(default: Any) -> Any:
    return default.jaxpr if isinstance(default, Deferred) else default


@functools.partial(jax.jit, static_argnames=("cpu", "default"))
def _compiled(*args: jax.Array, cpu: Any, default: Any) -> Any:
    return _by_platform_p.bind(*args, cpu=cpu, default=default)


@_by_platform_p.def_impl
def _run(*args: jax.Array, cpu: Any, default: Any) -> Any:
    with jax.disable_jit(False):  # only the lowering knows the platform
        return _compiled(*args, cpu=cpu, default=default)


_by_platform_p.def_abstract_eval(lambda *avals, cpu, default: cpu.out_avals)


def _batch(args: Any, dims: Any, *, cpu: Any, default: Any) -> Any:
    shapes, types = ([each(jax.typeof(arg)) for arg in args] for each in (_shape, _type))

    def batched(*args: Any) -> Any:
        return jax.vmap(jex.jaxpr_as_fun(_closed(default)), in_axes=dims)(*args)

    on_cpu = jax.make_jaxpr(jax.vmap(jex.jaxpr_as_fun(cpu), in_axes=dims))(*types)
    deferred = isinstance(default, Deferred)
    elsewhere = Deferred(batched, shapes) if deferred else _plain_jaxpr(batched, shapes)
    out = _by_platform_p.bind(*args, cpu=on_cpu, default=elsewhere)
    return out, [0] * len(out)


batching.primitive_batchers[_by_platform_p] = _batch


def _lower(ctx: Any, *args: Any, cpu: Any, default: Any) -> Any:
    # Without the types of a `jax.shard_map`, as the jaxpr is.
    ctx = ctx.replace(avals_in=[jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in])
    with check_vma(False):
        return mlir.lower_fun(jex.jaxpr_as_fun(_closed(default)), multiple_results=True)(ctx, *args)


def _lower_on_cpu(ctx: Any, *args: Any, cpu: Any, default: Any) -> Any:
    return mlir.lower_fun(jex.jaxpr_as_fun(cpu), multiple_results=True)(ctx, *args)


mlir.register_lowering(_by_platform_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(_by_platform_p, _lower)


def differentiable_once(out: PyTree, of: PyTree, message: str) -> PyTree:
    """`out` unchanged. A derivative rule without a derivative computed it from `of`.

    Args:
        out, of: trees of arrays.
        message: message of the NotImplementedError that a gradient with respect to `of` raises, unless
            `jax.lax.stop_gradient` stops it.
    """
    given = jax.tree.leaves(of)
    return jax.tree.map(lambda leaf: _once_p.bind(leaf, *given, message=message), out)


_once_p = jex.Primitive("differentiable_once")
_once_p.def_impl(lambda out, *of, message: out)
_once_p.def_abstract_eval(lambda out, *of, message: out)
mlir.register_lowering(_once_p, lambda ctx, out, *of, message: [out])
batching.primitive_batchers[_once_p] = lambda args, dims, **params: (_once_p.bind(*args, **params), dims[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _raising(out: Any, of: Any, message: str) -> Any:
    return out


def _raise(message: str, residuals: None, cotangents: Any) -> Any:
    raise NotImplementedError(message)


_raising.defvjp(lambda out, of, message: (out, None), _raise)


def _jvp(primitive: Any, message: str, primals: Any, tangents: Any, params: Any) -> Any:
    """Results, and tangents that raise when they are transposed."""
    out, tangents = primitive.bind(*primals, **params), tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *of: _raising(out, of, message), primals, tangents)


ad.primitive_jvps[_once_p] = lambda primals, tangents, **params: _jvp(
    _once_p, params["message"], primals, tangents, params
)
ad.primitive_jvps[_by_platform_p] = lambda primals, tangents, **params: _jvp(
    _by_platform_p, _NO_DERIVATIVE, primals, tangents, params
)


def jvp_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The JVP rule of a primitive that evaluates `function`, by `jax.jvp`."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*values: Any) -> Any:
            given = dict(zip(moving, values, strict=True))
            return function(*(given.get(i, x) for i, x in enumerate(primals)), **params)

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])

    return rule


def explicit_mesh(*args: PyTree) -> Any:
    """The mesh of arrays whose shardings are part of their types; None if there is none."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def with_auto_axes(function: Callable[..., Any], out: Any, *args: PyTree) -> PyTree:
    """`function(*args)`, in which XLA chooses shardings, also on a mesh with explicit axes.

    On explicit axes shardings are part of types, which a custom derivative rule and our primitives lack.

    Args:
        function: maps trees of arrays to a tree of arrays.
        out: the output's sharding; or a function of the same arguments that returns arrays in the structure
            and the shardings of the output. It is only traced, and only if an axis is explicit.
        args: arguments of both.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return function(*args)
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in pairs if kind == AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        if callable(out):
            jaxpr, shapes = jax.make_jaxpr(out, return_shape=True)(*args)
            specs = [aval.sharding.spec for aval in jaxpr.out_avals]
            out = jax.tree.unflatten(jax.tree.structure(shapes), specs)
        return jax.sharding.auto_axes(function, axes=axes, out_sharding=out)(*args)


def with_sharding(x: Shaped[Array, "..."], sharding: Any) -> Shaped[Array, "..."]:
    """`x` with this sharding, on a mesh with explicit or automatic axes."""
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.sharding.reshard(x, sharding) if is_explicit else lax.with_sharding_constraint(x, sharding)


def any_of(flags: Sequence[jax.Array]) -> jax.Array:
    """Whether any of these bools of shape () holds.

    XLA makes `or`s of `jnp.any(jnp.stack(flags))`, and a CPU computes them again in each kernel that asks, so
    that a step of n tensors has n**2 of them. It keeps a reduction of integers.
    """
    return jnp.max(jnp.stack(flags).astype(jnp.int32)) > 0


def checked_axes(axis_name: str | Sequence[str]) -> Any:
    """An axis, or a tuple of axes; raises ValueError if no `jax.shard_map` or `jax.pmap` maps over one of
    them."""
    for name in [axis_name] if isinstance(axis_name, str) else axis_name:
        try:
            lax.axis_size(name)
        except NameError:
            mapped = jax.sharding.get_abstract_mesh().manual_axes
            raise ValueError(
                f"`axis_name`: expected an axis that `jax.shard_map` or `jax.pmap` maps over; got {name!r}"
                + (f" inside of {', '.join(map(repr, mapped))}." if mapped else " outside of both.")
            ) from None
    return axis_name if isinstance(axis_name, str) else tuple(axis_name)


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, None for any other device."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def is_at_hand(x: Any) -> bool:
    """Whether the values of an array can be read: not in compiled code, nor on other processes."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and not x.is_deleted() and x.is_fully_addressable
