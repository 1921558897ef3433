"""Linen modules' blocks, rematerialized without a change to their code.

A trace of the model finds the calls that are blocks. When it then runs, such a call is made through Flax's
lifted `nn.remat`, which hands on parameters, scaling states, statistics, intermediates and random streams.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core as jex

from fp8jax.models.blocks import Call, Checkpointing, choose, filled
from fp8jax.models.layers import LEFT_ALONE, MATCHED
from fp8jax.rewrite.report import trace

# Operations of a call have its number in their name.
_NUMBER = "fp8jax_call:"

_Key = tuple[str, int]  # a call's path and nesting


def find(apply: Callable[..., Any], setting: Checkpointing, *args: Any, **kwargs: Any) -> list[Call]:
    """The calls of `apply(*args, **kwargs)` that are blocks; nothing is computed.

    Raises:
        ValueError: see `blocks.choose`.
    """
    calls = [Call("", "")]

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with _recording(calls):
            apply(*args, **kwargs)
        return ()

    jaxpr = trace(recorded, *args, **kwargs)
    _see_loops(jaxpr.jaxpr, calls, ())
    return choose(calls[0], setting)


@contextlib.contextmanager
def _recording(calls: list[Call]) -> Iterator[None]:
    active = [calls[0]]

    def record(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        module = context.module
        path, kind = "/".join(module.path), type(module).__name__
        key = path, _nesting(path, [call.path for call in active[1:]])
        # A scan's body is traced more than once.
        found = [call for call in active[-1].below if (call.path, call.nesting) == key]
        if found:
            found[0].times += 1
        else:
            is_layer = isinstance(module, MATCHED) or kind in LEFT_ALONE
            found = [Call(path, kind, key[1], is_layer)]
            active[-1].below.append(found[0])
            calls.append(found[0])
        active.append(found[0])
        try:
            with jax.named_scope(f"{_NUMBER}{calls.index(found[0])}"):
                return call(*args, **kwargs)
        finally:
            active.pop()

    with nn.intercept_methods(record):
        yield


def _nesting(path: str, active: list[str]) -> int:
    return sum(other == path for other in active)


def _see_loops(jaxpr: Any, calls: list[Call], around: tuple[Any, ...]) -> None:
    """Notes of each call which loops and checkpoints its operations are in. `around`: numbers of the calls,
    and names of the primitives, that an operation is in, the outermost first."""
    for eqn in jaxpr.eqns:
        numbers = map(int, re.findall(rf"{_NUMBER}(\d+)", str(eqn.source_info.name_stack)))
        here = (*around, *(number for number in numbers if number not in around))
        of_calls = [calls[each] for each in here if isinstance(each, int)]
        for index, each in enumerate(here):
            if isinstance(each, int):
                calls[each].in_loop |= "scan" in here[:index]
                calls[each].in_scan |= index > 0 and "scan" in _since_call(here[:index])
        if any(call.is_layer for call in of_calls) and {"checkpoint", "remat", "remat2"} & {*here}:
            for call in of_calls:
                call.rematerializes = True
        name = eqn.primitive.name
        inner = (*here, name) if name in ("scan", "checkpoint", "remat", "remat2") else here
        for below in jex.jaxprs_in_params(eqn.params):
            _see_loops(below, calls, inner)


def _since_call(around: tuple[Any, ...]) -> tuple[Any, ...]:
    """The primitives within the innermost call."""
    last = max((index for index, each in enumerate(around) if isinstance(each, int)), default=-1)
    return around[last + 1 :]


@contextlib.contextmanager
def checkpointed(blocks: Iterable[Call], setting: Checkpointing | None) -> Iterator[None]:
    """While it lasts, these calls are rematerialized."""
    if setting is None:
        yield
        return
    in_loop = {(call.path, call.nesting): call.in_loop for call in blocks}
    active: list[str] = []

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        module, path = context.module, "/".join(context.module.path)
        key: _Key = path, _nesting(path, active)
        active.append(path)
        try:
            if key in in_loop and not module.is_initializing():
                return _rematerialized(module, setting.policy, not in_loop[key], args, kwargs)
            return call(*args, **kwargs)
        finally:
            active.pop()

    with nn.intercept_methods(intercept):
        yield


def _rematerialized(module: Any, policy: Any, prevent_cse: bool, args: Any, kwargs: Any) -> Any:
    """The module's call. What is no array is known when it is traced, as it would be without."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
    is_traced = [_is_array(leaf) or _is_module(leaf) for leaf in leaves]
    returned: list[Any] = []

    def checkpointed(module: Any, *traced: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(treedef, filled(leaves, is_traced, traced))
        # The bare method: what Flax notes of a call, it notes of the one outside.
        bare: Any = type(module).__call__
        out, structure = jax.tree.flatten(bare.__wrapped__(module, *args, **kwargs))
        are_arrays = [_is_array(leaf) for leaf in out]
        returned[:] = structure, [None if a else leaf for a, leaf in zip(are_arrays, out, strict=True)]
        returned.append(are_arrays)
        return [leaf for a, leaf in zip(are_arrays, out, strict=True) if a]

    lifted = nn.remat(checkpointed, policy=policy, prevent_cse=prevent_cse)
    arrays = lifted(module, *(leaf for t, leaf in zip(is_traced, leaves, strict=True) if t))
    structure, out, are_arrays = returned
    return jax.tree.unflatten(structure, filled(out, are_arrays, arrays))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _is_module(leaf: Any) -> bool:
    return isinstance(leaf, nn.Module)
