"""The calls of a transformed NNX module: its modules get subclasses whose methods are rewritten.

The outermost call is traced with plain arrays for parameters and evaluated with FP8 dot products; calls
inside of it are part of that trace. What the call changed or made is put into the module afterwards.
"""

import contextlib
import contextvars
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
from flax import nnx

from fp8jax.adapters.nnx.variables import STATE, FP8State, Frozen, modules_of, state_path, thaw
from fp8jax.rewrite import FunctionModel, is_array
from fp8jax.variables import FROZEN, PARAMS, SCALING

# The attribute of a module's class that says how its calls are rewritten. It is none of the module itself,
# since the bridge from Linen takes those for variables.
_REWRITTEN = "rewritten__fp8"


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """How a module's calls are rewritten: a constant of the model's graph."""

    function: FunctionModel  # one for all modules of a model
    path: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is constant in a call of a method."""

    graph: Any  # of the module, and of the modules among its arguments
    method: Callable[..., Any]
    path: tuple[Any, ...]
    leaves: tuple[Any, ...]  # of the arguments; None for arrays, `_NODE` for modules
    treedef: Any


_NODE = object()
# What a function cannot do while it is traced.
_LOOKS_AT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_is_traced: contextvars.ContextVar[Any] = contextvars.ContextVar("fp8jax_nnx_call", default=None)


def rewrite(model: nnx.Module, function: FunctionModel) -> None:
    """Makes the calls of a module, and of those within it, rewritten ones."""
    for path, module in modules_of(model):
        _change_class(module, functools.partial(_subclass, rewritten=Rewritten(function, path)))


def restored(model: Any) -> Any:
    """Undoes `_rewrite`, and removes what else `transform` put into the modules."""
    for _, module in modules_of(model):
        for name in [name for name in vars(module) if name.endswith("__fp8") or STATE in name]:
            delattr(module, name)
        # A class of the user's may have the name of its base: only what `transform` made is undone.
        _change_class(module, lambda cls: vars(cls).get("plain__fp8", cls))
    return model


def plain_method(model: Any, name: str) -> Callable[..., Any]:
    """The method as the user wrote it."""
    return vars(getattr(type(model), name))["__wrapped__"]


def rewritten_of(model: Any) -> Rewritten | None:
    """How a module's calls are rewritten; None if they are not."""
    return getattr(type(model), _REWRITTEN, None)


def _subclass(cls: type, rewritten: Rewritten) -> type:
    """A subclass whose methods are rewritten."""
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    methods = {}
    for base in reversed([base for base in cls.__mro__ if base not in nnx.Module.__mro__]):
        for name, method in vars(base).items():
            if isinstance(method, types.FunctionType) and (name == "__call__" or name[0] != "_"):
                methods[name] = _method(method)
    own = {"plain__fp8": cls, _REWRITTEN: rewritten}
    return type(cls)(cls.__name__, (cls,), {**names, **methods, **own})


def _method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = rewritten_of(module)
        is_call = method.__name__ == "__call__"
        if rewritten is None or not (is_call or _multiplies(module)):
            return method(module, *args, **kwargs)
        if _is_traced.get() is rewritten.function:
            path = "/".join(map(str, rewritten.path))
            annotations = rewritten.function.annotations
            with annotations.call(path, module) if is_call else contextlib.nullcontext():
                return method(module, *args, **kwargs)
        return _rewritten_call(rewritten, method, module, args, kwargs)

    return call


def _multiplies(module: Any) -> bool:
    """Whether a module has kernels of its own."""
    return any(name.endswith(f"{STATE}scale") for name in vars(module))


def _rewritten_call(rewritten: Rewritten, method: Any, module: Any, args: Any, kwargs: Any) -> Any:
    nodes, operands = operands_of(rewritten, method, module, args, kwargs)
    try:
        result, changes = rewritten.function.apply(*operands)
    except _LOOKS_AT_VALUES:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise
        name = f"{type(module).__name__}.{method.__name__}"
        warnings.warn(
            f"{name} looks at values of arrays, as `if` or `int(...)` do, and cannot be traced: it runs as "
            "it is, and only the modules that it calls in FP8.",
            stacklevel=3,
        )
        return method(module, *args, **kwargs)
    for (path, variable), is_new in changes:
        if is_new:
            *parents, name = path
            setattr(functools.reduce(_child, parents, nodes), name, variable)
        else:
            nnx.update(nodes, nnx.from_flat_state([(path, variable)]))
    return result


def _child(node: Any, name: Any) -> Any:
    return node[name] if isinstance(name, int) else getattr(node, name)


def operands_of(rewritten: Rewritten, method: Any, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The module and those among its arguments, and the operands of the rewritten function."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = (module, *(leaf for leaf in leaves if _is_node(leaf)))
    arrays = [leaf for leaf in leaves if not _is_node(leaf) and is_array(leaf)]
    static = tuple(_NODE if _is_node(x) else None if is_array(x) else x for x in leaves)
    has_adapters = rewritten.function.settings.lora is not None
    kinds: Any = nnx.Any(nnx.Param, Frozen)
    kinds = nnx.All(kinds, nnx.Not(nnx.LoRAParam)) if has_adapters else kinds
    graph, params, rest = nnx.split(nodes, kinds, ...)
    states, adapters = {}, {}
    for path, variable in nnx.to_flat_state(rest):
        names = [*map(str, rewritten.path), *map(str, path[1:])]
        if path[0] == 0 and isinstance(variable, FP8State):
            _put(states, state_path(names), variable.get_value())
        elif path[0] == 0 and isinstance(variable, nnx.LoRAParam):
            _put(adapters, names, variable.get_value())
    own, others = ({k: v for k, v in params.items() if (k == 0) == is_own} for is_own in (True, False))
    tree = own.get(0, {})
    for name in reversed(rewritten.path):
        tree = {str(name): tree}
    variables = {PARAMS: tree, SCALING: states}
    if has_adapters:
        variables = {PARAMS: adapters, FROZEN: tree, SCALING: states}
    call = _Call(graph, method, rewritten.path, static, treedef)
    return nodes, (variables, others, rest, arrays, call)


def _put(tree: dict[str, Any], path: list[str], new: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = new


def run_call(params: Any, others: Any, rest: Any, arrays: Any, call: _Call) -> Any:
    """The plain call, of plain parameters: its result, and the variables that it changed or made."""
    for name in call.path:
        params = params[str(name)]
    params = nnx.State({**({0: params} if params else {}), **others})
    module, *nodes = nnx.merge(call.graph, params, rest)
    rewritten: Any = rewritten_of(module)
    annotations = rewritten.function.annotations
    thaw((module, *nodes))
    _refuse_changes((module, *nodes))
    before = {path: variable.get_value() for path, variable in _variables((module, *nodes))}
    constants = _constants((module, *nodes))
    given, of_nodes = iter(arrays), iter(nodes)
    leaves = [
        next(of_nodes) if leaf is _NODE else next(given) if leaf is None else leaf for leaf in call.leaves
    ]
    args, kwargs = call.treedef.unflatten(leaves)
    token = _is_traced.set(rewritten.function)
    try:
        with annotations.call("/".join(map(str, call.path)), module):
            result = call.method(module, *args, **kwargs)
    finally:
        _is_traced.reset(token)
    _refuse_changed(constants, _constants((module, *nodes)))
    changes = []
    for path, variable in _variables((module, *nodes)):
        is_new = path not in before
        if not isinstance(variable, nnx.Param | Frozen | FP8State) and (
            is_new or not _is_same(before[path], variable.get_value())
        ):
            changes.append(((path, variable), is_new))
    return result, changes


def _constants(nodes: Any) -> dict[Any, Any]:
    """The numbers and texts among the attributes, by path."""
    found = nnx.iter_graph(nodes)
    return {path: x for path, x in found if x is None or isinstance(x, bool | int | float | str)}


def _refuse_changed(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Raises ValueError if a call changed an attribute that is no variable: the module would not have it."""
    for path, old in before.items():
        new = after.get(path, old)
        if type(new) is not type(old) or new != old:
            raise ValueError(
                f"`model`: expected a call that changes variables alone; it changed the attribute "
                f"{'/'.join(map(str, path[1:]))!r} from {old!r} to {new!r}. Make it an nnx.Variable."
            )


def _refuse_changes(nodes: Any) -> None:
    """Makes an assignment to a parameter raise: the module would not have it."""

    def refuse(param: Any, new: Any) -> Any:
        del new
        raise ValueError(
            f"`model`: expected a call that changes no parameter; it assigns to a {type(param).__name__} of "
            f"shape {param.shape}. Assign outside of the call, or make it an nnx.Variable of another kind."
        )

    for _, variable in nnx.iter_graph(nodes):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(on_set_value=refuse)


def _variables(nodes: Any) -> Iterator[tuple[Any, Any]]:
    return iter(nnx.to_flat_state(nnx.state(nodes)))


def _is_same(old: Any, new: Any) -> bool:
    olds, news = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(olds) == len(news) and all(a is b for a, b in zip(olds, news, strict=True))


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _change_class(module: Any, class_of: Callable[[type], type]) -> None:
    # NNX would take an assignment for an attribute of the model.
    object.__setattr__(module, "__class__", class_of(type(module)))
