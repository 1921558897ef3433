"""One operation, two ways to compute it: the CPU's and the GPU's.

    out = by_platform(x, y, cpu=f, default=g, axis=0)     # f(x, y, axis=0) or g(x, y, axis=0)

Which one is compiled is decided when the program is lowered, so what was traced on a laptop
compiles for a GPU that is not there. `jax.lax.platform_dependent` promises the same, but its
choice is a value, which a scan's backward hoists out of the loop: both ways end up inside.
Here it is a primitive, which shows both ways as jaxprs and lowers to one.

Not differentiable: it is used inside custom derivative rules, the results of which are differentiable
once (`differentiable_once`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh

_NO_DERIVATIVE = (
    "a cast to FP8, or an amax, has no derivative: expected a gradient that goes by way of `dot_general`, "
    "or that `jax.lax.stop_gradient` stops before the cast."
)

_choose_p = jex.Primitive("by_platform")
_choose_p.multiple_results = True


def by_platform(*args: Any, cpu: Callable[..., Any], default: Callable[..., Any], **static: Any) -> Any:
    """`cpu(*args, **static)` on a CPU, `default(*args, **static)` elsewhere.

    Args:
        args: trees of arrays.
        cpu: a module-level function that gives a tree of arrays.
        default: the same for other platforms, with a result of the same structure.
        static: hashable keyword arguments of both.
    """
    leaves, treedef = jax.tree.flatten(args)
    leaves = [jax.numpy.asarray(leaf) for leaf in leaves]
    avals = tuple(jax.typeof(leaf) for leaf in leaves)
    on_cpu, elsewhere, out = _trace(cpu, default, tuple(sorted(static.items())), treedef, avals)
    return jax.tree.unflatten(out, _choose_p.bind(*leaves, cpu=on_cpu, default=elsewhere))


def gpu_barrier(tree: Any) -> Any:
    """`jax.lax.optimization_barrier`; on a CPU the tree as it is, where a barrier costs compile time."""
    return by_platform(tree, cpu=_as_it_is, default=lax.optimization_barrier)


def _as_it_is(tree: Any) -> Any:
    return tree


@functools.lru_cache(maxsize=4096)
def _trace(cpu: Any, default: Any, static: Any, treedef: Any, avals: Any) -> tuple[Any, Any, Any]:
    args = treedef.unflatten([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])
    (on_cpu, _), (elsewhere, shapes) = (
        jax.make_jaxpr(functools.partial(way, **dict(static)), return_shape=True)(*args)
        for way in (cpu, default)
    )
    return on_cpu, elsewhere, jax.tree.structure(shapes)


@_choose_p.def_abstract_eval
def _abstract(*avals: Any, cpu: Any, default: Any) -> Any:
    del avals, cpu
    return default.out_avals


@functools.lru_cache(maxsize=4096)
def _compiled(branch: Any) -> Callable[..., Any]:
    return jax.jit(jex.jaxpr_as_fun(branch))


@_choose_p.def_impl
def _run(*args: jax.Array, cpu: Any, default: Any) -> Any:
    devices = {device for arg in args for device in arg.devices()}
    on_cpu = {device.platform for device in devices} == {"cpu"}
    return _compiled(cpu if on_cpu else default)(*args)


def differentiable_once(out: Any, of: Any, message: str) -> Any:
    """`out` as it is, made of `of` by a derivative rule that has no derivative.

    Args:
        out, of: trees of arrays.
        message: of the NotImplementedError where a gradient comes back to `out`. One that
            `jax.lax.stop_gradient` stops does not.
    """
    given = jax.tree.leaves(of)
    return jax.tree.map(lambda leaf: _once_p.bind(leaf, *given, message=message), out)


_once_p = jex.Primitive("differentiable_once")
_once_p.def_impl(lambda out, *of, message: out)
_once_p.def_abstract_eval(lambda out, *of, message: out)
mlir.register_lowering(_once_p, lambda ctx, out, *of, message: [out])
batching.primitive_batchers[_once_p] = lambda args, dims, **params: (_once_p.bind(*args, **params), dims[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _refusing(out: Any, of: Any, message: str) -> Any:
    return out


def _refuse(message: str, kept: None, cotangents: Any) -> Any:
    raise NotImplementedError(message)


_refusing.defvjp(lambda out, of, message: (out, None), _refuse)


def _differentiate(primitive: Any, message: str, primals: Any, tangents: Any, params: Any) -> Any:
    """Results, and tangents that cannot be transposed."""
    out, tangents = primitive.bind(*primals, **params), tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *of: _refusing(out, of, message), primals, tangents)


ad.primitive_jvps[_once_p] = lambda primals, tangents, **params: _differentiate(
    _once_p, params["message"], primals, tangents, params
)
ad.primitive_jvps[_choose_p] = lambda primals, tangents, **params: _differentiate(
    _choose_p, _NO_DERIVATIVE, primals, tangents, params
)


def explicit_mesh(*args: Any) -> Any:
    """The mesh of arrays whose shardings are part of their types; None if there is none."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def with_auto_axes(function: Callable[..., Any], out: Any, *args: Any) -> Any:
    """`function(*args)`, in which XLA chooses shardings, also where the axes of a mesh are explicit.

    Explicit axes make shardings part of types, which a custom derivative rule and a primitive of
    our own do not carry.

    Args:
        function: of arrays, or trees of them.
        out: the wanted sharding; or a function of the same arguments that gives a tree of arrays
            of function's structure and the wanted shardings, only traced, and only where an axis
            is explicit.
        args: what both take.
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


def with_sharding(x: jax.Array, sharding: Any) -> jax.Array:
    """`x` sharded so, on a mesh of either kind."""
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.sharding.reshard(x, sharding) if is_explicit else lax.with_sharding_constraint(x, sharding)


def over_axis(function: Callable[..., Any], mesh: Mesh, axis_name: str, spec: Any) -> Callable[..., Any]:
    """`jax.shard_map` of one axis of a mesh, within or outside of another one.

    Args:
        function: of trees of arrays, what each device does.
        mesh: taken where the program has none yet; one that it has must have the axis too.
        axis_name: the axis.
        spec: how every array in and out is split.
    """
    here = jax.sharding.get_abstract_mesh()
    chosen: Any = mesh if here.empty else here
    options = {"axis_names": {axis_name}, "check_vma": False}
    return jax.shard_map(function, mesh=chosen, in_specs=spec, out_specs=spec, **options)


def _batch(args: Any, dims: Any, *, cpu: Any, default: Any) -> Any:
    def batched(branch: Any) -> Any:
        return jax.make_jaxpr(jax.vmap(jex.jaxpr_as_fun(branch), in_axes=dims))(*args)

    out = _choose_p.bind(*args, cpu=batched(cpu), default=batched(default))
    return out, [0] * len(out)


batching.primitive_batchers[_choose_p] = _batch


def _lower(ctx: Any, *args: Any, cpu: Any, default: Any) -> Any:
    del cpu
    return mlir.lower_fun(jex.jaxpr_as_fun(default), multiple_results=True)(ctx, *args)


def _lower_on_cpu(ctx: Any, *args: Any, cpu: Any, default: Any) -> Any:
    del default
    return mlir.lower_fun(jex.jaxpr_as_fun(cpu), multiple_results=True)(ctx, *args)


mlir.register_lowering(_choose_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(_choose_p, _lower)
