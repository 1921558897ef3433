"""`call`: a call of a program as one equation of a loss's jaxpr.

`fp8jax.value_and_grad` traces a loss with plain parameters, then evaluates the jaxpr with the stored kernels,
which reach the function's dot products through this equation. A `jax.vmap` of it in the loss leaves one
equation, if it maps inputs only. Other transformations of it there (`jax.grad`, a `jax.vmap` over parameters)
transform the evaluated program.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir

from fp8jax.platforms import jvp_of
from fp8jax.rewrite.interpreter.find import PROGRAM
from fp8jax.rewrite.traced_function import TracedFunction, vmapped

_are_plain = contextvars.ContextVar("fp8jax_plain_parameters", default=False)


@contextlib.contextmanager
def plain_parameters() -> Iterator[None]:
    """A context for tracing a loss with plain parameters."""
    token = _are_plain.set(True)
    try:
        yield
    finally:
        _are_plain.reset(token)


def has_plain_parameters() -> bool:
    """Whether this code is traced inside of `plain_parameters`."""
    return _are_plain.get()


def call(program: TracedFunction, *operands: Any) -> list[Any]:
    """`program.run(*operands)`; one equation under `plain_parameters`, and compiled once for eager calls."""
    flat, treedef = jax.tree.flatten(operands)
    if not _are_plain.get() and any(isinstance(x, jax.core.Tracer) for x in flat):
        return program.run(*operands)
    return _program_p.bind(*flat, program=program, treedef=treedef, batched=())


def _run(*flat: Any, program: TracedFunction, treedef: Any, batched: Any) -> list[Any]:
    return program.run(*treedef.unflatten(flat), batched=batched)


def _abstract(*avals: Any, program: TracedFunction, treedef: Any, batched: Any) -> Any:
    del avals, treedef
    outs, effects = [var.aval for var in program.jaxpr.outvars], program.jaxpr.effects
    for _, axis in batched:
        outs = [jex.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in outs]
        effects = {effect for effect in effects if getattr(effect, "name", None) != axis.name}
    return outs, effects


def _batch(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    dims = tuple(dims)
    leaves, states, *_ = params["treedef"].unflatten([dim is not None for dim in dims])
    if any(jax.tree.leaves((leaves, states))):
        out = vmapped(functools.partial(_run, **params), dims, axis)(*args)
    elif any(dim is not None for dim in dims) or axis.name in _axes_of(params["program"]):
        out = _program_p.bind(*args, **{**params, "batched": (*params["batched"], (dims, axis))})
    else:
        return _program_p.bind(*args, **params), [None] * len(params["program"].jaxpr.outvars)
    return out, [0] * len(out)


def _axes_of(program: TracedFunction) -> set[Any]:
    """The names of axes around a program that its collectives read."""
    return {getattr(effect, "name", None) for effect in program.jaxpr.effects}


_program_p = jex.Primitive(PROGRAM)
_program_p.multiple_results = True
_program_p.def_impl(jax.jit(_run, static_argnames=("program", "treedef", "batched")))
_program_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_program_p] = jvp_of(_run)
batching.fancy_primitive_batchers[_program_p] = _batch
mlir.register_lowering(_program_p, mlir.lower_fun(_run, multiple_results=True))
