"""Flax NNX modules under a recipe: the call of a module as a function of its parameters, rewritten.

    model = transform(module, settings)             # a new module; the user's is untouched
    loss, grads = value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)                  # an `nnx.Optimizer`

The modules of the copy get other classes, subclasses of their own. The outermost call of one is traced with
plain arrays for parameters and evaluated with FP8 dot products; calls within it are part of that. Attributes
and parameters keep their names. Beside a kernel stands the scaling state of its dot product, `FP8State`s.
They are no `nnx.Param`s, so optimizers and plain gradients pass them by; `value_and_grad` gives them their
new values in place, as NNX does with a BatchNorm's statistics.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx
from flax.nnx import bridge

from fp8jax import formats, loss_scale
from fp8jax.dot import quantized_kernel
from fp8jax.models.moe.nnx import ExpertDense, ExpertRouter
from fp8jax.recipe import Recipe
from fp8jax.rewrite import SMALLEST, FunctionModel, Kernel, Layer, Report, Settings, is_array, is_wide
from fp8jax.scaled import own_value, quantize
from fp8jax.variables import FROZEN, PARAMS, SCALING

# The scaling state of `layer.kernel` is `layer.kernel__fp8_scale` and so on.
STATE = "__fp8_"

# The class that a frozen parameter had, where it was not `nnx.Param` itself.
CLASS = "class__fp8"

# The attribute of a module's class that says how its calls are rewritten. It is none of the module itself,
# since the bridge from Linen takes those for variables.
_REWRITTEN = "rewritten__fp8"

_KNOWN = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, ExpertDense)


class FP8State(nnx.Variable):
    """An array of a dot product's scaling state, see `fp8jax.init_state`; stacked as the kernel is."""


class Frozen(nnx.Variable):
    """A parameter that is not trained, of a model with adapters; stacked as it was."""


class LossScale(nnx.Variable):
    """The loss scale of a model whose GEMMs are float16, see `fp8jax.loss_scale`."""


# The bridge from Linen asks for names.
for _name, _variable in (("fp8_state", FP8State), ("frozen", Frozen), ("loss_scale", LossScale)):
    nnx.register_variable_name(_name, _variable)


@dataclasses.dataclass(frozen=True)
class _Rewritten:
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


def is_module(model: Any) -> bool:
    """Whether `model` is an NNX module."""
    return isinstance(model, nnx.Module)


def transform(model: nnx.Module, settings: Settings, inputs: tuple[Any, ...] | None = None) -> nnx.Module:
    """See `fp8jax.transform`."""
    settings.chosen()
    copy: Any = nnx.clone(model)
    for path, module in modules_of(copy):
        if _how(module) is not None:
            raise ValueError(
                f"`model`: expected a plain module; got one whose layer {'/'.join(map(str, path))!r} is "
                "transformed already. Transform the original module, or `fp8jax.dequantize(model)`."
            )
    if inputs is None:
        kernels = _kernels(copy, settings)
    else:
        _rewrite(copy, FunctionModel(_run, settings, own=2))
        rewritten: _Rewritten = getattr(type(copy), _REWRITTEN)
        _, operands = _operands(rewritten, _plain_method(copy, "__call__"), copy, inputs, {})
        kernels = rewritten.function.kernels(*operands)
        copy = _restored(copy)
    places = places_of(copy)
    for path, kernel in kernels.items():
        owner, name, param = places[path]
        for part, state in kernel.first_state(param.shape).items():
            setattr(owner, f"{name}{STATE}{part}", FP8State(state))
        if kernel.recipe.weight != "FP32":
            format = formats.get(kernel.recipe.weight)
            blocks = kernel.blocks(param.shape)
            q = quantize(param.get_value(), format, power_of_two=True, blocks=blocks)
            param.set_value(q.with_own_dtype(param.dtype))
    if settings.recipe.gemm == "FP16":
        copy.loss_scale__fp8 = LossScale(loss_scale.init())
    _rewrite(copy, FunctionModel(_run, settings._replace(kernels=kernels), own=2))
    return copy


def _rewrite(model: nnx.Module, function: FunctionModel) -> None:
    """Makes the calls of a module, and of those within it, rewritten ones."""
    for path, module in modules_of(model):
        _change_class(module, functools.partial(_subclass, rewritten=_Rewritten(function, path)))


def _restored(model: Any) -> Any:
    """Undoes `_rewrite`, and removes what else `transform` put into the modules."""
    for _, module in modules_of(model):
        for name in [name for name in vars(module) if name.endswith("__fp8") or STATE in name]:
            delattr(module, name)
        # A class of the user's may have the name of its base: only what `transform` made is undone.
        _change_class(module, lambda cls: vars(cls).get("plain__fp8", cls))
    return model


def _kernels(model: nnx.Module, settings: Settings) -> dict[tuple[str, ...], Kernel]:
    """The parameters that dot products may take, by path.

    No inputs are known here: what Flax's own layers multiply with is stored in the recipe's weight format; of
    other modules each parameter of two or more axes has a scaling state, and stays float32.
    """
    rules, found, paths = settings.chosen(), {}, []
    for path, (module, name, param) in places_of(model).items():
        leaf, is_known = param.get_value(), isinstance(module, _KNOWN)
        if not _may_multiply(module) or (is_known and name != "kernel"):
            continue
        if not is_array(leaf) or leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        rank = _rank(module) if is_known else leaf.ndim
        groups = leaf.shape[-3] if isinstance(module, ExpertDense) else 0
        shape = tuple(leaf.shape[leaf.ndim - rank - bool(groups) :])
        layer = Layer.of(path, module, shape)
        choice = rules.choose(layer)
        paths.append(layer.path)
        is_table = isinstance(module, nnx.Embed)
        is_small = is_known and min(_sides(module, shape)) < SMALLEST
        is_left = (is_table or is_small) and choice.reason is None and not rules.names(layer)
        if is_left or (choice.reason is not None and not is_wide(choice)):
            continue
        recipe = choice.recipe if is_known else choice.recipe.with_plain_weights()
        found[path] = Kernel(recipe, rank, groups)
    rules.check(paths)
    if settings.recipe.gemm == "FP8" and not found:
        raise ValueError(
            "`model`: expected a kernel that can multiply in FP8; got none of "
            f"{', '.join(paths) or 'any path'}. Give a rule for those that shall, "
            '`rules=[fp8jax.Rule("PATH", "te")]`, or use the recipe bf16.'
        )
    return found


def _may_multiply(module: Any) -> bool:
    """Whether a module may multiply with its parameters: of Flax's own, layers do, norms do not."""
    is_flax = type(module).__module__.startswith("flax.") and not isinstance(module, bridge.ToNNX)
    return isinstance(module, (*_KNOWN, nnx.Embed)) or not (is_flax or isinstance(module, ExpertRouter))


def _rank(layer: Any) -> int:
    """The rank of one kernel; a stack of layers, made under `nnx.vmap`, has more axes in front, and so
    have the kernels of experts."""
    if isinstance(layer, nnx.Einsum):
        return len(layer.kernel_shape)
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    return 2


def _sides(layer: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a kernel; of an einsum not known before its call."""
    if isinstance(layer, nnx.Einsum):
        return SMALLEST, SMALLEST
    split = -1
    if isinstance(layer, nnx.LinearGeneral):
        split = len(layer.batch_axis) + len(layer.in_features)
        shape, split = shape[len(layer.batch_axis) :], split - len(layer.batch_axis)
    return math.prod(shape[:split]), math.prod(shape[split:])


def modules_of(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """The modules within a module, and itself, by path."""
    return list(nnx.iter_modules(model))


class Place(NamedTuple):
    """Where a parameter is."""

    owner: Any  # the module that has it
    name: str  # of its attribute; "a/b" within one that is a dict or a list
    param: Any


def places_of(model: nnx.Module) -> dict[tuple[str, ...], Place]:
    """The parameters of a module by path; a shared one is at its first."""
    modules, places = dict(modules_of(model)), {}
    for parts, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param | Frozen):
            at = next(n for n in range(len(parts) - 1, -1, -1) if parts[:n] in modules)
            place = Place(modules[parts[:at]], "/".join(map(str, parts[at:])), param)
            places[tuple(map(str, parts))] = place
    return places


# Calls ###########################################################################################


def _subclass(cls: type, rewritten: _Rewritten) -> type:
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
        rewritten = _how(module)
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


def _rewritten_call(rewritten: _Rewritten, method: Any, module: Any, args: Any, kwargs: Any) -> Any:
    nodes, operands = _operands(rewritten, method, module, args, kwargs)
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


def _operands(rewritten: _Rewritten, method: Any, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
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


def state_path(path: Any) -> list[Any]:
    """The path of a scaling state's array in the tree of states: that of its parameter, and its own name."""
    *parents, name = path
    if not (isinstance(name, str) and STATE in name):
        return [*parents, name]
    param, part = name.split(STATE)
    return [*parents, *param.split("/"), part]


def _put(tree: dict[str, Any], path: list[str], new: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = new


def _run(params: Any, others: Any, rest: Any, arrays: Any, call: _Call) -> Any:
    """The plain call, of plain parameters: its result, and the variables that it changed or made."""
    for name in call.path:
        params = params[str(name)]
    params = nnx.State({**({0: params} if params else {}), **others})
    module, *nodes = nnx.merge(call.graph, params, rest)
    rewritten: _Rewritten = getattr(type(module), _REWRITTEN)
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


def thaw(nodes: Any) -> None:
    """Makes frozen variables parameters again."""
    for _, variable in list(nnx.iter_graph(nodes)):
        if isinstance(variable, Frozen):
            cls = variable.get_metadata().get(CLASS, nnx.Param)
            if cls is not nnx.Param:
                variable.del_metadata(CLASS)
            object.__setattr__(variable, "__class__", cls)


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


# A transformed module ############################################################################


def report(model: nnx.Module, *args: Any, method: str = "__call__", **kwargs: Any) -> Report:
    """See `fp8jax.report`."""
    rewritten = _how(model)
    if rewritten is None:
        raise TypeError("`model`: expected what fp8jax.transform made; no layer of it is transformed.")
    _, operands = _operands(rewritten, _plain_method(model, method), model, args, kwargs)
    return rewritten.function.report(*operands)


def _plain_method(model: Any, name: str) -> Callable[..., Any]:
    return vars(getattr(type(model), name))["__wrapped__"]


def _how(model: Any) -> _Rewritten | None:
    return getattr(type(model), _REWRITTEN, None)


def recipes(model: nnx.Module) -> list[Recipe]:
    """Those of a module's kernels; empty if it is plain."""
    rewritten = _how(model)
    return [] if rewritten is None else [kernel.recipe for kernel in kernels_of(model).values()]


def settings_of(model: nnx.Module) -> Settings:
    """How a transformed module is rewritten."""
    rewritten = _how(model)
    assert rewritten is not None
    return rewritten.function.settings


def kernels_of(model: nnx.Module) -> dict[tuple[str, ...], Kernel]:
    """The kernels of a transformed module, by path."""
    rewritten = _how(model)
    return {} if rewritten is None else dict(rewritten.function.settings.kernels or {})


def placed_kernels(model: nnx.Module) -> Iterator[tuple[tuple[str, ...], Kernel, Place]]:
    """The kernels of a transformed module, each with its path and its place."""
    places = places_of(model)
    for path, kernel in kernels_of(model).items():
        yield path, kernel, places[path]


def dequantize(model: nnx.Module) -> nnx.Module:
    """See `fp8jax.dequantize`."""
    copy: Any = nnx.clone(model)
    for _, _, (_, _, param) in placed_kernels(copy):
        param.set_value(own_value(param.get_value()))
    return _restored(copy)


def freeze(model: nnx.Module) -> nnx.Module:
    """See `fp8jax.freeze`."""
    copy: Any = nnx.clone(model)
    for _, kernel, (owner, name, param) in placed_kernels(copy):
        if kernel.recipe.gemm == "FP8" and isinstance(owner, _KNOWN):
            state = {part: getattr(owner, f"{name}{STATE}{part}").get_value() for part in kernel.parts}
            leaf = quantized_kernel(param.get_value(), kernel.recipe, state, kernel.rank)
            param.set_value(leaf)
    return copy
