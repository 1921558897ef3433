"""A primitive for calls of transformed functions, so that a call is one equation of a loss's jaxpr.

`fp8jax.value_and_grad` traces a loss with plain parameters, then evaluates the jaxpr with the stored kernels,
which reach the function's dot products through this equation. JAX's own transformations of this equation in
the loss (`jax.grad`, `jax.vmap`) transform the evaluated program.
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

from fp8jax.rewrite.plan import PROGRAM
from fp8jax.rewrite.program import Program

_program_p = jex.Primitive(PROGRAM)
_program_p.multiple_results = True


_are_plain = contextvars.ContextVar("fp8jax_plain_parameters", default=False)


@contextlib.contextmanager
def plain_parameters() -> Iterator[None]:
    """A context for tracing a loss with plain parameters."""
    token = _are_plain.set(True)
    try:
        yield
    finally:
        _are_plain.reset(token)


def call(program: Program, *operands: Any) -> list[Any]:
    """`program.run(*operands)`; one equation under `plain_parameters`, and compiled once for eager calls."""
    flat, treedef = jax.tree.flatten(operands)
    if not _are_plain.get() and any(isinstance(x, jax.core.Tracer) for x in flat):
        return program.run(*operands)
    return _program_p.bind(*flat, program=program, treedef=treedef)


def _run(*flat: Any, program: Program, treedef: Any) -> list[Any]:
    return program.run(*treedef.unflatten(flat))


@functools.lru_cache(maxsize=1024)
def _compiled(program: Program, treedef: Any) -> Any:
    return jax.jit(functools.partial(_run, program=program, treedef=treedef))


@_program_p.def_impl
def _impl(*flat: Any, program: Program, treedef: Any) -> list[Any]:
    return _compiled(program, treedef)(*flat)


@_program_p.def_effectful_abstract_eval
def _abstract(*avals: Any, program: Program, treedef: Any) -> Any:
    del avals, treedef
    return [var.aval for var in program.jaxpr.outvars], program.jaxpr.effects


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*values: Any) -> list[Any]:
        given = dict(zip(moving, values, strict=True))
        return _run(*(given.get(i, x) for i, x in enumerate(primals)), **params)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    out = jax.vmap(functools.partial(_run, **params), in_axes=tuple(dims))(*args)
    return out, [0] * len(out)


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    return mlir.lower_fun(functools.partial(_run, **params), multiple_results=True)(ctx, *args)


ad.primitive_jvps[_program_p] = _jvp
batching.primitive_batchers[_program_p] = _batch
mlir.register_lowering(_program_p, _lower)
