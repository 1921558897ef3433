"""`FunctionModel`: a function of parameters under a recipe.

    model = fp8jax.transform(fn, "O2")         # fn(params, *args): raw pytrees, Equinox, Haiku's apply, ...
    variables = model.init(params, *args)      # {"params": ..., "_overwrite_with_gradient": ...}
    loss, grads = fp8jax.value_and_grad(lambda v, x: loss(model.apply(v, x)))(variables, x)

A stacked parameter that a scan slices has a scale and a scaling state for each layer.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

# The context of a trace (mesh, precision, dtype promotion) has no public API.
from jax._src.config import trace_context

from fp8jax import backends, formats, loss_scale
from fp8jax.dot import init_ragged_state, init_state, quantized_kernel
from fp8jax.quantization import is_scaled, own_value, quantize, quantize_like
from fp8jax.recipe import Recipe
from fp8jax.rewrite.call import call
from fp8jax.rewrite.choose import Kernel
from fp8jax.rewrite.lora import adapters_at
from fp8jax.rewrite.plan import Chosen
from fp8jax.rewrite.program import (
    Annotations,
    Program,
    Settings,
    aval_of,
    is_array,
    is_followed,
    names_of,
    trace,
)
from fp8jax.rewrite.report import Report
from fp8jax.rewrite.rules import layer_names, layer_path
from fp8jax.variables import FROZEN, LOSS_SCALE, PARAMS, SCALING, has_params

# Number of cached programs of one model, for different input shapes.
_KEPT = 128

# Warn if a smaller share of the FLOPs is in FP8.
LOW_SHARE = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A function of parameters under a recipe; made by `fp8jax.transform`.

    Attributes:
        fn: `fn(params, *args, **kwargs)`.
        settings: the recipe, rules, GEMM backend and adapters.
        annotations: filled by `fn` while it is traced.
        own: number of arguments after `params` that are model state, such as batch statistics, not inputs.
        context: returns a key of everything else that a trace of `fn` depends on.

    Raises:
        ValueError: the backend is unknown, or a rule changes a column of the whole model.
        TypeError: a rule is not a `Rule`.
    """

    fn: Callable[..., Any]
    settings: Settings
    annotations: Annotations = dataclasses.field(default_factory=Annotations, repr=False)
    own: int = 0
    context: Callable[[], Any] = lambda: None
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        backends.choose(self.settings.backend)
        self.settings.chosen()

    @property
    def recipe(self) -> Recipe:
        """The model's recipe."""
        return self.settings.recipe

    def init(self, params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables: the parameters, with kernels in the recipe's weight format, and the scaling states.

        Args:
            params: the function's parameters, any tree of arrays.
            args, kwargs: the function's other arguments, or `jax.ShapeDtypeStruct`s: only shapes are read.

        Returns:
            `{"params": ..., "_overwrite_with_gradient": ...}`: the parameters in their tree, with a
            `ScaledArray` for each quantized kernel, and nested dicts of scaling states, named as the
            parameters. A parameter of several dot products has a state for each: "kernel", "kernel#1" and so
            on. With adapters see `adapt`.

        Raises:
            ValueError: nothing would run in FP8, or a rule or a pattern matches no dot product.
        """
        lora = self.settings.lora
        if lora is not None:
            return self.adapt(jax.random.key(lora.seed), params, *args, **kwargs)
        program, _ = self._program(params, args, kwargs)
        if self.recipe.gemm == "FP8":
            _check_share(program.report)
        kernels = _kernels(program)
        return {PARAMS: _changed(params, program, kernels, _in_format), **self._states(program)}

    def adapt(self, key: jax.Array, params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables of a model with adapters.

        Args:
            key: random key for A.
            params, args, kwargs: as in `init`.

        Returns:
            `{"params": adapters, "frozen": params, ...}`: `lora_a` and `lora_b`, float32, at the path of each
            layer that `LoRA.targets` matches, and the function's parameters with kernels in the format of
            `LoRA.weight`.

        Raises:
            ValueError: a target matches no layer, or a layer that cannot have adapters.
        """
        lora = self.settings.lora
        assert lora is not None
        program, _ = self._program(params, args, kwargs)
        kernels, adapters = _kernels(program), {}
        for path, chosen in kernels.items():
            layer = layer_path(path)
            if chosen.dot.is_matrix and lora.chooses(layer, self.recipe):
                _put(adapters, layer_names(path), lora.new(key, layer, _layers(chosen), chosen.dot.gemm))

        def narrow(leaf: Any, chosen: Chosen) -> Any:
            return leaf if chosen.dot.is_computed else lora.narrow(leaf, chosen.recipe, _rank(leaf, chosen))

        frozen = _changed(params, program, kernels, narrow)
        return {PARAMS: adapters, FROZEN: frozen, **self._states(program)}

    def _states(self, program: Program) -> dict[str, Any]:
        """The initial scaling states and loss scale."""
        variables, states = {}, {}
        for chosen in program.context.plan.chosen.values():
            if state := _first_state(chosen):
                _put(states, chosen.key, state)
        if states:
            variables[SCALING] = states
        if self.recipe.gemm == "FP16":
            variables[LOSS_SCALE] = loss_scale.init()
        return variables

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`fn(params, *args, **kwargs)` with the chosen dot products in FP8.

        Args:
            variables: variables from `init`.
            args, kwargs: arguments of `fn`; arguments that are not arrays are constants of the program.

        Raises:
            ValueError: `variables` lack the scaling state of a dot product.
        """
        params, adapters = self._split(variables)
        kept = variables.get(SCALING, {}) if has_params(variables) else {}
        program, consts = self._program(params, args, kwargs)
        states = {
            each.key: {**_state_of(kept, each), **adapters_at(adapters, each.dot.path or ())}
            for each in program.context.plan.chosen.values()
        }
        leaves = jax.tree.leaves(params, is_leaf=is_scaled)
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
        return program.out.filled(call(program, leaves, states, arrays, consts))

    __call__ = apply

    def report(self, variables: Any, *args: Any, **kwargs: Any) -> Report:
        """Which dot products run in FP8 for these inputs, and why the others do not.

        Args: as in `init` or `apply`, arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.
        """
        has_adapters = has_params(variables) and FROZEN in variables
        params = variables[FROZEN if has_adapters else PARAMS] if has_params(variables) else variables
        return self._program(params, args, kwargs)[0].report

    def kernels(self, params: Any, *args: Any, **kwargs: Any) -> dict[tuple[str, ...], Kernel]:
        """The kernels that the recipe or a rule applies to for these inputs, by path."""
        params = params[PARAMS] if has_params(params) else params
        program, _ = self._program(params, args, kwargs)
        if self.recipe.gemm == "FP8":
            _check_share(program.report)
        leaves = dict(zip(program.paths, jax.tree.leaves(params, is_leaf=is_scaled), strict=True))
        return {
            path: Kernel(chosen.recipe, _rank(leaves[path], chosen), chosen.dot.groups)
            for path, chosen in _kernels(program).items()
        }

    def quantize(self, params: Any, like: Mapping[str, Any]) -> dict[str, Any]:
        """Variables with the function's parameters, such as a checkpoint's, in the formats of `like`."""
        check_like(like)
        name = PARAMS if self.settings.lora is None else FROZEN
        targets, treedef = jax.tree.flatten(like[name], is_leaf=is_scaled)
        sources = treedef.flatten_up_to(params)
        return {**like, name: treedef.unflatten(map(quantize_like, sources, targets))}

    def dequantize(self, variables: Mapping[str, Any]) -> Any:
        """The function's parameters: dequantized arrays, with merged adapters."""
        params, adapters = self._split(variables)
        return self.with_adapters(jax.tree.map(own_value, params, is_leaf=is_scaled), adapters)

    def with_adapters(self, params: Any, adapters: Any, times: float = 1.0) -> Any:
        """The function's parameters, with W + times (alpha / rank) A B for each kernel with adapters."""
        lora = self.settings.lora
        if lora is None:
            return params

        def merge(path: Any, leaf: Any) -> Any:
            own = adapters_at(adapters, names_of(path)) if is_followed(leaf) else {}
            return lora.added(leaf, own, times) if own else leaf

        return jax.tree_util.tree_map_with_path(merge, params, is_leaf=is_scaled)

    def _split(self, variables: Any) -> tuple[Any, Any]:
        """The function's parameters, and the adapters."""
        if self.settings.lora is None:
            return (variables[PARAMS] if has_params(variables) else variables), {}
        if not isinstance(variables, Mapping) or FROZEN not in variables:
            got = ", ".join(sorted(variables)) if isinstance(variables, Mapping) else type(variables).__name__
            raise ValueError(
                f"`variables`: expected the collection 'frozen'; got {got}. `model.adapt` makes them of a "
                "plain model's."
            )
        return variables[FROZEN], variables[PARAMS]

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables for repeated inference: each kernel quantized once to its GEMM's format.

        `apply` returns the same outputs and casts no kernel. Do not train these variables.

        Args: as in `apply`; args and kwargs may be `jax.ShapeDtypeStruct`s.
        """
        program, _ = self._program(variables[PARAMS], args, kwargs)

        def frozen(leaf: Any, chosen: Chosen) -> Any:
            if chosen.dot.is_computed or chosen.recipe.gemm != "FP8":
                return leaf
            state = _state_of(variables.get(SCALING, {}), chosen)
            return quantized_kernel(leaf, chosen.recipe, state, _rank(leaf, chosen))

        return {**variables, PARAMS: _changed(variables[PARAMS], program, _kernels(program), frozen)}

    def _program(self, params: Any, args: Any, kwargs: Any) -> tuple[Program, list[Any]]:
        """The cached trace of the function for these inputs' types, and the constants of its jaxpr."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        if any(callable(leaf) for leaf in leaves):
            raise _no_array(params)
        others, others_treedef = jax.tree.flatten((args, kwargs))
        constants = tuple((type(x), x) for x in others if not is_array(x))  # with the type, because 1 == True
        avals = tuple(_key_of(x) for x in (*map(aval_of, leaves), *others) if is_array(x))
        key = treedef, others_treedef, avals, constants, trace_context(), self.context()
        try:
            if key in self._programs:
                return self._programs[key]
            is_hashable = True
        except TypeError:
            is_hashable = False
        own = sum(map(is_array, jax.tree.leaves(args[: self.own])))
        pair = trace(self.fn, self.settings, self.annotations, params, args, kwargs, own)
        # Do not cache a function that closes over tracers, which are invalid after their trace.
        if is_hashable and not any(isinstance(x, jax.core.Tracer) for x in pair[1]):
            while len(self._programs) >= _KEPT:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = pair
        return pair


def _key_of(x: Any) -> Any:
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return (
        tuple(x.shape),
        x.dtype,
        getattr(aval, "weak_type", False),
        getattr(aval, "sharding", None),
    )


def _no_array(params: Any) -> TypeError:
    """The error for a function in the tree of parameters, as in an Equinox module."""
    pairs, _ = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    kind, at = next((type(x).__name__, jax.tree_util.keystr(path)) for path, x in pairs if callable(x))
    return TypeError(
        f"`params`: expected a tree of arrays; got a {kind} at {at}. Give the arrays alone, of an Equinox "
        "module `params, static = eqx.partition(module, eqx.is_array)`, and combine them in the function."
    )


def check_like(like: Any) -> None:
    """Raises ValueError if `like` has shapes in place of arrays, because its scaling state is reused."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like)):
        raise ValueError(
            "`like`: expected the variables that `model.init` gives; got shapes of them. Their first scaling "
            "state is taken over, so call `model.init` itself."
        )


def _check_share(report: Report) -> None:
    """Raises ValueError if nothing runs in FP8; warns if the share of FLOPs is below `LOW_SHARE`."""
    if report.flops == 0 or not any(row.fp8 for row in report.rows):
        reasons = (
            "; ".join(f"{row.path}: {row.reason}" for row in report.largest(3))
            or "it has no dot product of a parameter"
        )
        raise ValueError(
            f"`model`: expected a dot product that can run in FP8; got none ({reasons}). Give a rule for "
            'those that shall, `rules=[fp8jax.Rule("PATH", "te")]`, or use the recipe bf16.'
        )
    if report.fp8_share < LOW_SHARE:
        left = ", ".join(f"{row.path} ({row.reason})" for row in report.largest(3))
        warnings.warn(
            f"{100 * report.fp8_share:.0f}% of the FLOPs of dot products run in FP8; the largest others are: "
            f"{left or 'dot products of activations'}.",
            stacklevel=4,
        )


def _first_state(chosen: Chosen) -> Any:
    """The initial scaling state, with a leading axis for each scan that slices the kernel."""
    dot, recipe = chosen.dot, chosen.recipe
    if recipe.gemm != "FP8":
        return {}
    state = init_ragged_state(recipe, dot.groups) if dot.groups else init_state(recipe)
    if chosen.key != dot.path:
        state.pop("wgrad_scale", None)  # the parameter has one gradient
    layers = tuple(length for _, length in dot.loops)
    # On a mesh with explicit axes the copy has the same type as the states that a step returns.
    return {name: jnp.copy(jnp.broadcast_to(x, (*layers, *x.shape))) for name, x in state.items()}


def _kernels(program: Program) -> dict[tuple[str, ...], Chosen]:
    """The kernels of the plan by path. If several dot products use a kernel, the use inside the most scans
    decides its number of scales."""
    kernels: dict[tuple[str, ...], Chosen] = {}
    for chosen in program.context.plan.chosen.values():
        path = chosen.dot.path or ()
        if path not in kernels or kernels[path].dot.depth < chosen.dot.depth:
            kernels[path] = chosen
    return kernels


def _changed(
    params: Any,
    program: Program,
    kernels: Mapping[tuple[str, ...], Chosen],
    change: Callable[[Any, Chosen], Any],
) -> Any:
    """The parameters with `change(leaf, chosen)` for each kernel."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    pairs = zip(leaves, program.paths, strict=True)
    return treedef.unflatten([change(leaf, kernels[p]) if p in kernels else leaf for leaf, p in pairs])


def _put(tree: dict[str, Any], path: Sequence[str], new: Any) -> None:
    """Inserts `new` into nested dicts."""
    if not path:
        tree.update(new)
        return
    *parents, name = path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = new


def _layers(chosen: Chosen) -> tuple[int, ...]:
    """The leading axes of a kernel with a scale for each index: layers, then experts."""
    layers = tuple(length for _, length in chosen.dot.loops)
    return (*layers, chosen.dot.groups) if chosen.dot.groups else layers


def _rank(leaf: Any, chosen: Chosen) -> int:
    """The rank of the array that one scale covers."""
    return len(leaf.shape) - len(_layers(chosen))


def _in_format(leaf: Any, chosen: Chosen) -> Any:
    """A kernel in its recipe's weight format."""
    if is_scaled(leaf) or chosen.recipe.weight == "FP32":
        return leaf
    blocks = (*_layers(chosen), *(1,) * _rank(leaf, chosen))
    q = quantize(leaf, formats.get(chosen.recipe.weight), power_of_two=True, blocks=blocks)
    return q.with_own_dtype(leaf.dtype)


def _state_of(states: Mapping[str, Any], chosen: Chosen) -> Any:
    fresh = _first_state(chosen)
    if not fresh:
        return fresh
    found: Any = states
    for name in chosen.key:
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None and chosen.key != chosen.dot.path:
        return _state_of(states, dataclasses.replace(chosen, key=chosen.dot.path))  # merged by max
    if found is None:
        raise ValueError(
            f"`variables`: expected the scaling state of {'/'.join(chosen.key)!r} in the collection "
            f"{SCALING!r}; got none. Take it from `model.init(...)`, and give `apply` all of the variables, "
            "not 'params' alone."
        )
    return found
