"""One operation, two ways to compute it: the CPU's and the GPU's.

    out = by_platform(x, y, cpu=f, default=g, axis=0)     # f(x, y, axis=0) or g(x, y, axis=0)

Which one is compiled is decided when the program is lowered, so what was traced on a laptop
compiles for a GPU that is not there. `jax.lax.platform_dependent` promises the same, but its
choice is a value, which a scan's backward hoists out of the loop: both ways end up inside.
Here it is a primitive, which shows both ways as jaxprs and lowers to one.

Not differentiable: it is used inside custom derivative rules.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import batching, mlir

_choose_p = jex.Primitive("by_platform")
_choose_p.multiple_results = True


def by_platform(*args: jax.Array, cpu: Callable[..., Any], default: Callable[..., Any], **static: Any) -> Any:
    """`cpu(*args, **static)` on a CPU, `default(*args, **static)` elsewhere.

    Args:
        args: arrays.
        cpu: a module-level function that gives one array.
        default: the same for other platforms, with a result of the same shape and dtype.
        static: hashable keyword arguments of both.
    """
    avals = tuple(jax.typeof(arg) for arg in args)
    branches = _trace(cpu, default, tuple(sorted(static.items())), avals)
    (out,) = _choose_p.bind(*args, cpu=branches[0], default=branches[1])
    return out


@functools.lru_cache(maxsize=4096)
def _trace(cpu: Any, default: Any, static: Any, avals: Any) -> tuple[Any, Any]:
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    on_cpu, elsewhere = (
        jax.make_jaxpr(functools.partial(way, **dict(static)))(*shapes) for way in (cpu, default)
    )
    return on_cpu, elsewhere


@_choose_p.def_abstract_eval
def _abstract(*avals: Any, cpu: Any, default: Any) -> Any:
    del avals, cpu
    return default.out_avals


@functools.lru_cache(maxsize=4096)
def _compiled(branch: Any) -> Callable[..., Any]:
    return jax.jit(jex.jaxpr_as_fun(branch))


@_choose_p.def_impl
def _run(*args: jax.Array, cpu: Any, default: Any) -> Any:
    (platform,) = {device.platform for arg in args for device in jax.numpy.asarray(arg).devices()}
    return _compiled(cpu if platform == "cpu" else default)(*args)


def _batch(args: Any, dims: Any, *, cpu: Any, default: Any) -> Any:
    def batched(branch: Any) -> Any:
        return jax.make_jaxpr(jax.vmap(jex.jaxpr_as_fun(branch), in_axes=dims))(*args)

    out = _choose_p.bind(*args, cpu=batched(cpu), default=batched(default))
    return out, [0] * len(out)


batching.primitive_batchers[_choose_p] = _batch


def _lower(ctx: Any, *args: Any, branch: Any) -> Any:
    return mlir.lower_fun(jex.jaxpr_as_fun(branch), multiple_results=True)(ctx, *args)


mlir.register_lowering(
    _choose_p, lambda ctx, *args, cpu, default: _lower(ctx, *args, branch=cpu), platform="cpu"
)
mlir.register_lowering(_choose_p, lambda ctx, *args, cpu, default: _lower(ctx, *args, branch=default))
