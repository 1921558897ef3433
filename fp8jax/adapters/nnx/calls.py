"""Calls of a transformed NNX module. Each of its modules gets a subclass with rewritten methods.

The outermost call is traced with plain arrays for parameters and evaluated with FP8 dot products. Inner calls
are part of that trace. Afterwards the module gets the variables that the call changed or created.
"""

import contextlib
import contextvars
import copyreg
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from flax import nnx
from flax.traverse_util import unflatten_dict

from fp8jax.adapters.nnx.variables import (
    STATE,
    FP8State,
    Frozen,
    changed,
    modules_of,
    places_of,
    state_path,
    thaw,
    values_of,
)
from fp8jax.quantization import is_scaled
from fp8jax.rewrite import FunctionModel, StaticTree, has_plain_parameters
from fp8jax.variables import FROZEN, PARAMS, SCALING


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """How a module's calls are rewritten; an attribute of its class, because the bridge from Linen takes the
    attributes of a module for variables."""

    function: FunctionModel  # one for all modules of a model
    path: tuple[Any, ...]
    has_kernels: bool  # of its own, beside those of the modules in it


@dataclasses.dataclass(frozen=True)
class _Call:
    """The constants of a method call."""

    graph: Any  # of the module and the modules among its arguments
    method: Callable[..., Any]
    path: tuple[Any, ...]
    arguments: StaticTree  # without NNX objects


class _ChangesModule(ValueError):
    """A traced call changed a parameter or an attribute, and the change would be lost."""


# Errors of a function that needs values while it is traced.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_active: contextvars.ContextVar[FunctionModel | None] = contextvars.ContextVar("fp8jax_nnx", default=None)


def rewrite(model: nnx.Module, function: FunctionModel) -> None:
    """Rewrites the calls of a module and of the modules in it."""
    places = places_of(model)
    owners = {id(places[path].owner) for path in function.settings.kernels or ()}
    for path, module in modules_of(model):
        rewritten = Rewritten(function, path, id(module) in owners)
        _change_class(module, functools.partial(_subclass, rewritten=rewritten))


def restore(model: nnx.Module) -> None:
    """Undoes `rewrite`, and removes everything else that `transform` put into the modules."""
    for _, module in modules_of(model):
        for name in [name for name in vars(module) if name.endswith("__fp8") or STATE in name]:
            delattr(module, name)
        # Look in the class itself: a user may have subclassed a rewritten class.
        _change_class(module, lambda cls: vars(cls).get("plain__fp8", cls))


def rewritten_of(model: nnx.Module) -> Rewritten | None:
    """How a module's calls are rewritten; None for a plain module."""
    return getattr(type(model), "rewritten__fp8", None)


def _subclass(cls: type, rewritten: Rewritten) -> type:
    """A subclass with rewritten methods."""
    names: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__doc__", "__qualname__")}
    for base in reversed([base for base in cls.__mro__ if base not in nnx.Module.__mro__]):
        for name, method in vars(base).items():
            if _is_method(method) and (name == "__call__" or name[0] != "_"):
                names[name] = _rewritten_method(method)
    return _pickled(type(cls))(
        cls.__name__, (cls,), {**names, "plain__fp8": cls, "rewritten__fp8": rewritten}
    )


@functools.cache
def _pickled(metaclass: type) -> type:
    """A metaclass whose classes are pickled as arguments of `_subclass`: they have no name to import."""
    own = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(own, lambda cls: (_subclass, (cls.plain__fp8, cls.rewritten__fp8)))
    return own


def _change_class(module: nnx.Module, class_of: Callable[[type], type]) -> None:
    # NNX would take a plain assignment for an attribute of the model.
    object.__setattr__(module, "__class__", class_of(type(module)))


def _is_method(attribute: Any) -> bool:
    """Whether a class's attribute is a function, or a decorated one that gets the module, as by `nnx.jit`."""
    is_decorated = callable(attribute) and hasattr(attribute, "__wrapped__") and hasattr(attribute, "__get__")
    is_static = isinstance(attribute, staticmethod)
    return isinstance(attribute, types.FunctionType) or (is_decorated and not is_static)


def _rewritten_method(method: Callable[..., Any]) -> Callable[..., Any]:
    is_call = method.__name__ == "__call__"

    @functools.wraps(method, updated=())
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        function, path = module.rewritten__fp8.function, module.rewritten__fp8.path
        if not (is_call or module.rewritten__fp8.has_kernels):
            return method(module, *args, **kwargs)
        if _active.get() is not function:
            return _run(method, module, args, kwargs)
        name = "/".join(map(str, path))
        with function.annotations.call(name, module) if is_call else contextlib.nullcontext():
            return method(module, *args, **kwargs)

    call.plain__fp8 = method  # pyright: ignore
    return call


def _run(method: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    """The outermost call."""
    nodes, operands = _operands(method, module, args, kwargs)
    function, is_call = module.rewritten__fp8.function, method.__name__ == "__call__"
    try:
        if not is_call and not any(row.kernel_shape for row in function.report(*operands).rows):
            return method(module, *args, **kwargs)  # it multiplies with no parameter
        result, changes = function.apply(*operands)
    except (_ChangesModule, *_NEEDS_VALUES) as error:
        why = "looks at values of arrays, as `if` or `int(...)` do"
        if isinstance(error, _ChangesModule):
            if is_call:
                raise
            why = "changes parameters or attributes"
        elif any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise
        warnings.warn(
            f"{type(module).__name__}.{method.__name__} {why}, and cannot be traced: it runs as it is, and "
            "only the modules that it calls in FP8.",
            stacklevel=3,
        )
        return method(module, *args, **kwargs)
    nnx.update(nodes, changes)
    return result


def operands_of(module: nnx.Module, method: str, args: Any, kwargs: Any) -> Any:
    """The operands of a rewritten module's function for a call of a method, given by its name."""
    plain = getattr(getattr(type(module), method, None), "plain__fp8", None)
    if plain is None:
        raise ValueError(
            f"`method`: expected a public method of {type(module).__name__}; got {method!r}, which runs as "
            "it is."
        )
    return _operands(plain, module, args, kwargs)[1]


def _operands(method: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The module and those among its arguments, and the operands of the rewritten function."""
    taken, others = without_nodes((args, kwargs))
    nodes, (arguments, arrays) = (module, *others), StaticTree.of(taken)
    function, path = module.rewritten__fp8.function, module.rewritten__fp8.path
    has_adapters = function.settings.lora is not None

    def is_param(path: Any, variable: Any) -> bool:
        is_adapter = has_adapters and isinstance(variable, nnx.LoRAParam)
        return path[0] == 0 and isinstance(variable, nnx.Param | Frozen) and not is_adapter

    graph, params, rest = nnx.split(nodes, is_param, ...)
    if not has_plain_parameters():
        check_kernels(module)
    states, adapters = {}, {}
    for (node, *below), variable in nnx.to_flat_state(rest):
        names = [*map(str, path), *map(str, below)]
        if node == 0 and isinstance(variable, FP8State):
            states[state_path(names)] = variable.get_value()
        elif node == 0 and has_adapters and isinstance(variable, nnx.LoRAParam):
            adapters[tuple(names)] = variable.get_value()
    tree = params.get(0, {})
    for name in reversed(path):
        tree = {str(name): tree}
    variables = {PARAMS: unflatten_dict(adapters), FROZEN: tree} if has_adapters else {PARAMS: tree}
    variables[SCALING] = unflatten_dict(states)
    return nodes, (variables, rest, arrays, _Call(graph, method, path, arguments))


def check_kernels(model: nnx.Module) -> None:
    """Raises ValueError if a kernel of transformed modules is a float array where `transform` made codes."""
    for at, module in modules_of(model):
        rewritten = rewritten_of(module)
        if rewritten is None or (at and rewritten.path):  # a part of a module that is looked at
            continue
        kernels = rewritten.function.settings.kernels or {}
        for below, param in nnx.iter_graph(module):
            kernel = kernels.get(tuple(map(str, (*rewritten.path, *below))))
            if kernel is None or kernel.recipe.weight in ("FP32", "BF16") or not isinstance(param, nnx.Param):
                continue
            if not is_scaled(param.get_value()):
                name, recipe = "/".join(map(str, (*at, *below))), kernel.recipe
                raise ValueError(
                    f"`model`: expected {recipe.weight} codes in {name!r}, as `transform` made them for "
                    f"{recipe}; got {param.dtype}{list(param.shape)}. Load plain weights, or replace layers, "
                    "before `transform`; or quantize one kernel: `param.set_value(fp8jax.quantization."
                    "quantize_like(array, param.get_value()))`."
                )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _NodeNumber:
    """The number of an NNX object among those in the arguments; a tree without leaves."""

    number: int


def without_nodes(arguments: Any) -> tuple[Any, list[Any]]:
    """The arguments with a `_NodeNumber` for each NNX object, and these objects."""
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=_is_node)
    nodes = [leaf for leaf in leaves if _is_node(leaf)]
    numbers = map(_NodeNumber, range(len(nodes)))
    return treedef.unflatten([next(numbers) if _is_node(leaf) else leaf for leaf in leaves]), nodes


def with_nodes(arguments: Any, nodes: Sequence[Any]) -> Any:
    """The inverse of `without_nodes`, with these objects."""

    def node(leaf: Any) -> Any:
        return nodes[leaf.number] if isinstance(leaf, _NodeNumber) else leaf

    return jax.tree.map(node, arguments, is_leaf=lambda leaf: isinstance(leaf, _NodeNumber))


def _is_node(leaf: Any) -> bool:
    """Whether a leaf of arguments is an NNX object: a module, random streams, a metric, a variable."""
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def run_call(params: Any, rest: Any, arrays: Any, call: _Call) -> tuple[Any, nnx.State]:
    """The plain call with plain parameters: its result, and the variables that it changed or created."""
    for name in call.path:
        params = params[str(name)]
    nodes = nnx.merge(call.graph, nnx.State({0: params} if params else {}), rest)
    module: Any = nodes[0]
    thaw(nodes)
    _remove_states(module)
    refuse_assignments(nodes)
    values = values_of(nnx.state(nodes))
    watched = _watched(nodes)
    args, kwargs = with_nodes(call.arguments.filled(arrays), nodes[1:])
    function = module.rewritten__fp8.function
    token = _active.set(function)
    try:
        with function.annotations.call("/".join(map(str, call.path)), module):
            result = call.method(module, *args, **kwargs)
    finally:
        _active.reset(token)
    _check_watched(watched, _watched(nodes))
    changes = [
        (path, variable)
        for path, variable in changed(nnx.state(nodes), values)
        if not isinstance(variable, nnx.Param | Frozen | FP8State)
    ]
    return result, nnx.from_flat_state(changes)


def _remove_states(module: nnx.Module) -> None:
    """Removes the scaling states from a copy of the module, which a user's scan or vmap over it may not fit:
    `evaluate` has them."""
    for _, each in modules_of(module):
        for name in [name for name, x in vars(each).items() if isinstance(x, FP8State)]:
            delattr(each, name)


def refuse_assignments(nodes: Any) -> None:
    """Makes an assignment to a parameter raise: the new value would be lost."""
    for _, variable in nnx.iter_graph(nodes):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(on_set_value=_refuse)


def _refuse(param: Any, new: Any) -> Any:
    del new
    raise _ChangesModule(
        f"`model`: expected a call that changes no parameter; it assigns to a {type(param).__name__} of "
        f"shape {param.shape}. Assign outside of the call, or make it an nnx.Variable of another kind."
    )


def _watched(nodes: Any) -> dict[Any, Any]:
    """The parameters, and the numbers and texts among the attributes, by path."""
    kinds = nnx.Param | bool | int | float | str | None
    return {path: x for path, x in nnx.iter_graph(nodes) if isinstance(x, kinds)}


def _check_watched(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Raises ValueError if a call made a parameter, or changed an attribute that is no variable: the new
    value would be lost."""
    for path, new in after.items():
        old, name = before.get(path), "/".join(map(str, path[1:]))
        if isinstance(new, nnx.Param):
            if new is not old:
                raise _ChangesModule(
                    f"`model`: expected a call that changes no parameter; it makes {name!r}. Make it outside "
                    "of the call."
                )
        elif type(new) is not type(old) or new != old:
            raise _ChangesModule(
                f"`model`: expected a call that changes variables alone; it changed the attribute {name!r} "
                f"from {old!r} to {new!r}. Make it an nnx.Variable."
            )
