"""NNX modules' blocks, rematerialized in the transformed copy.

A block gets another class, a subclass of its own that makes its call through `nnx.remat`, which hands on what
the call changes: statistics, intermediates, random streams. Which modules are blocks is seen in the module
itself; a stack of layers, made under `nnx.vmap`, is taken for what an `nnx.scan` goes over.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from flax import nnx

from fp8jax.models.blocks import Call, Checkpointing, choose, filled, refuse_rematerialized
from fp8jax.models.multiply import PRODUCT
from fp8jax.models.subclass import change_class, subclass

# The attribute of a block that says how.
_KEPT = "checkpointing__fp8"


def find(
    model: nnx.Module,
    setting: Checkpointing,
    is_layer: Callable[[Any], bool],
    stack_of: Callable[[Any], int],
) -> list[Call]:
    """The modules that are blocks.

    Args:
        model: the module.
        setting: which modules.
        is_layer: whether a module is a layer that multiplies.
        stack_of: how many layers a layer is a stack of; 0 if it is one.

    Raises:
        ValueError: see `blocks.choose`.
    """
    calls: dict[tuple[Any, ...], Call] = {}
    for parts, module in sorted(nnx.iter_modules(model), key=lambda found: len(found[0])):
        call = Call("/".join(map(str, parts)), type(module).__name__, is_layer=is_layer(module))
        call.in_loop = bool(parts) and _is_stack(module, is_layer, stack_of)
        above = next((calls[parts[:n]] for n in range(len(parts) - 1, -1, -1) if parts[:n] in calls), None)
        if above is not None:
            above.below.append(call)
        calls[parts] = call
    _see_bodies(calls[()])
    return choose(calls[()], setting)


def _is_stack(module: Any, is_layer: Callable[[Any], bool], stack_of: Callable[[Any], int]) -> bool:
    """Whether all layers and parameters of a module are stacks of the same size."""
    sizes = {stack_of(each) for _, each in nnx.iter_modules(module) if is_layer(each)}
    params = (variable.shape for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)))
    return len(sizes) == 1 and 0 not in sizes and {shape[:1] for shape in params} <= {tuple(sizes)}


def _see_bodies(call: Call) -> None:
    """The outermost stack is a scan's body, unless it only contains it."""
    for inner in call.below:
        if inner.in_loop and len(inner.below) == 1 and not inner.below[0].is_layer:
            inner.in_loop = False
        inner.in_scan = inner.in_loop and not call.in_loop
        _see_bodies(inner)


def checkpoint(model: nnx.Module, blocks: Iterable[Call], setting: Checkpointing) -> None:
    """Makes these modules of the model rematerialize their calls."""
    in_loop = {call.path: call.in_loop for call in blocks}
    for parts, module in nnx.iter_modules(model):
        path = "/".join(map(str, parts))
        if path in in_loop:
            setattr(module, _KEPT, _Kept(setting, path, in_loop[path]))
            change_class(module, _rematerializing)


def restore(model: nnx.Module) -> None:
    """Undoes `checkpoint`."""
    for _, module in list(nnx.iter_modules(model)):
        if hasattr(module, _KEPT):
            delattr(module, _KEPT)
            change_class(module, lambda cls: vars(cls).get("plain__fp8", cls))


def checkpointed(model: nnx.Module) -> tuple[Checkpointing | None, list[Call]]:
    """What `checkpoint` made of a model."""
    found = [(module, getattr(module, _KEPT, None)) for _, module in nnx.iter_modules(model)]
    kept = [(module, each) for module, each in found if each is not None]
    calls = [Call(each.path, type(module).__name__, in_loop=each.in_loop) for module, each in kept]
    return (kept[0][1].setting if kept else None), calls


class _Kept(NamedTuple):
    """How a block is rematerialized: a constant of the model's graph."""

    setting: Checkpointing
    path: str
    in_loop: bool


@functools.cache
def _rematerializing(cls: type) -> type:
    """A subclass whose calls are rematerialized."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        kept: _Kept = getattr(module, _KEPT)
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        is_traced = [isinstance(leaf, jax.Array) or _is_node(leaf) for leaf in leaves]
        returned: list[Any] = []

        def bare(module: Any, *traced: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(treedef, filled(leaves, is_traced, traced))
            out, structure = jax.tree.flatten(cls.__call__(module, *args, **kwargs))  # pyright: ignore
            are_arrays = [isinstance(leaf, jax.Array) for leaf in out]
            static = [None if a else leaf for a, leaf in zip(are_arrays, out, strict=True)]
            returned[:] = structure, static, are_arrays
            return [leaf for a, leaf in zip(are_arrays, out, strict=True) if a]

        traced = [leaf for t, leaf in zip(is_traced, leaves, strict=True) if t]
        _refuse_twice(kept, bare, module, *traced)
        lifted = nnx.remat(bare, policy=kept.setting.policy, prevent_cse=not kept.in_loop)
        arrays = lifted(module, *traced)
        structure, static, are_arrays = returned
        return jax.tree.unflatten(structure, filled(static, are_arrays, arrays))

    return subclass(cls, {"__call__": call})


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _refuse_twice(kept: _Kept, bare: Callable[..., Any], *nodes: Any) -> None:
    """Raises ValueError if the model's own code rematerializes this call, or layers within it."""
    graph, state = nnx.split(nodes)
    jaxpr = jax.make_jaxpr(lambda state: bare(*nnx.merge(graph, state)))(state)
    if _is_in_remat() or _has_remat(jaxpr.jaxpr, False):
        call = Call(kept.path, "block", rematerializes=True)
        refuse_rematerialized([call])


def _is_in_remat() -> bool:
    try:
        nnx.graphlib.current_update_context("remat")
    except ValueError:
        return False
    return True


def _has_remat(jaxpr: Any, is_within: bool) -> bool:
    """Whether a layer's product is in a `jax.checkpoint`."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == PRODUCT and is_within:
            return True
        inner = is_within or eqn.primitive.name in ("checkpoint", "remat", "remat2")
        if any(_has_remat(below, inner) for below in jex.jaxprs_in_params(eqn.params)):
            return True
    return False
