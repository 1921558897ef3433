"""FP8 for a function of parameters.

    model = fp8jax.transform(fn, "O2")         # fn(params, *args): raw pytrees, Equinox, Haiku's apply, ...
    variables = model.init(params, *args)      # {"params": ..., "_overwrite_with_gradient": ...}
    loss, grads = fp8jax.value_and_grad(lambda v, x: loss(model.apply(v, x)))(variables, x)

A stacked parameter that a scan slices has a scale and a scaling state for each layer.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from fp8jax import backends, formats, loss_scale
from fp8jax.dot import init_ragged_state, init_state
from fp8jax.recipe import Recipe
from fp8jax.rewrite.call import call
from fp8jax.rewrite.plan import Chosen
from fp8jax.rewrite.program import Program, aval_of, is_array, is_kernel, trace
from fp8jax.rewrite.report import Report
from fp8jax.rewrite.rules import Rule, Rules
from fp8jax.scaled import format_of, is_scaled, quantize, value
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params

# A smaller share of the FLOPs in FP8 is worth a warning.
LOW_SHARE = 0.5


def transform(
    fn: Callable[..., Any], recipe: Recipe, rules: tuple[Rule, ...], backend: str
) -> "FunctionModel":
    """See `fp8jax.transform`."""
    backends.choose(backend)
    Rules(recipe, rules)
    return FunctionModel(fn, recipe, rules, backend)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A function of parameters under a recipe; made by `fp8jax.transform`.

    Attributes:
        fn: `fn(params, *args, **kwargs)`.
        recipe: the formats.
        rules: what some dot products do instead.
        backend: the GEMM backend.
    """

    fn: Callable[..., Any]
    recipe: Recipe
    rules: tuple[Rule, ...] = ()
    backend: str = "auto"
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def init(self, params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables: the parameters, with kernels in the recipe's weight format, and their scaling states.

        Args:
            params: the function's parameters, any tree of arrays.
            args, kwargs: its other arguments, or `jax.ShapeDtypeStruct`s: only shapes are read.

        Returns:
            `{"params": ..., "_overwrite_with_gradient": ...}`: the parameters in their tree, with a
            `ScaledArray` for each kernel that the recipe scales, and nested dicts of scaling states, named as
            the parameters. A parameter that several dot products take has a state for each: "kernel",
            "kernel#1" and so on.

        Raises:
            ValueError: nothing would run in FP8, or a rule or a pattern matches no dot product.
        """
        program, _ = self._program(params, args, kwargs)
        if self.recipe.gemm == "FP8":
            _check_share(program.report)
        kernels: dict[tuple[str, ...], Chosen] = {}
        states: dict[str, Any] = {}
        for chosen in program.context.plan.chosen.values():
            path = chosen.dot.path or ()
            # The use that slices a kernel most often decides how many scales it has.
            if path not in kernels or kernels[path].dot.depth < chosen.dot.depth:
                kernels[path] = chosen
            state = _first_state(chosen)
            if state:
                *parents, name = chosen.key
                below = states
                for parent in parents:
                    below = below.setdefault(parent, {})
                below[name] = state
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        pairs = zip(leaves, program.paths, strict=True)
        leaves = [_in_format(leaf, kernels[path]) if path in kernels else leaf for leaf, path in pairs]
        variables = {PARAMS: jax.tree.unflatten(treedef, leaves)}
        if states:
            variables[SCALING] = states
        if self.recipe.gemm == "FP16":
            variables[LOSS_SCALE] = loss_scale.init()
        return variables

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`fn(params, *args, **kwargs)` with the chosen dot products in FP8.

        Args:
            variables: those of `init`.
            args, kwargs: as `fn` takes them; what is no array is a constant of the program.

        Raises:
            ValueError: `variables` lack the scaling state of a dot product.
        """
        params = variables[PARAMS] if has_params(variables) else variables
        kept = variables.get(SCALING, {}) if has_params(variables) else {}
        program, consts = self._program(params, args, kwargs)
        states = {each.key: _state_of(kept, each) for each in program.context.plan.chosen.values()}
        leaves = jax.tree.leaves(params, is_leaf=is_kernel)
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
        return jax.tree.unflatten(program.out, call(program, leaves, states, arrays, consts))

    __call__ = apply

    def report(self, variables: Any, *args: Any, **kwargs: Any) -> Report:
        """Which dot products run in FP8 for these inputs, and why the others do not.

        Args: those of `init` or `apply`; arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.
        """
        params = variables[PARAMS] if has_params(variables) else variables
        return self._program(params, args, kwargs)[0].report

    def quantize(self, params: Any, like: Mapping[str, Any]) -> dict[str, Any]:
        """The function's own parameters, such as a checkpoint's, in the formats of the variables `like`."""

        def convert(target: Any, source: Any) -> Any:
            if not is_scaled(target):
                return source
            return quantize(source, format_of(target), power_of_two=True, blocks=target.scale.shape)

        return {**like, PARAMS: jax.tree.map(convert, like[PARAMS], params, is_leaf=is_scaled)}

    def dequantize(self, variables: Mapping[str, Any]) -> Any:
        """The function's own parameters: float32 arrays for scaled ones."""
        return jax.tree.map(value, variables[PARAMS], is_leaf=is_scaled)

    def _program(self, params: Any, args: Any, kwargs: Any) -> tuple[Program, list[Any]]:
        """The function as traced for such inputs, and the constants of its jaxpr."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_kernel)
        others, others_treedef = jax.tree.flatten((args, kwargs))
        constants = tuple((type(x), x) for x in others if not is_array(x))  # 1 is equal to True, and another
        avals = tuple(_key_of(x) for x in (*map(aval_of, leaves), *others) if is_array(x))
        key = treedef, others_treedef, avals, constants, jax.sharding.get_abstract_mesh()
        try:
            if key in self._programs:
                return self._programs[key]
            is_hashable = True
        except TypeError:
            is_hashable = False
        rules = Rules(self.recipe, self.rules)
        pair = trace(self.fn, self.recipe, rules, self.backend, params, args, kwargs)
        # A function may close over values of a trace that will have ended.
        if is_hashable and not any(isinstance(x, jax.core.Tracer) for x in pair[1]):
            self._programs[key] = pair
        return pair


def _key_of(x: Any) -> Any:
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return (
        tuple(x.shape),
        jnp.dtype(x.dtype),
        getattr(aval, "weak_type", False),
        getattr(aval, "sharding", None),
    )


def _check_share(report: Report) -> None:
    """Raises ValueError if nothing runs in FP8, and warns if little does."""
    if report.flops == 0 or not any(row.fp8 for row in report.rows):
        reasons = (
            "; ".join(f"{row.path}: {row.reason}" for row in report.largest(3)) or "it has no dot product"
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
    """A scaling state, with an axis for each scan that slices the kernel."""
    dot, recipe = chosen.dot, chosen.recipe
    if recipe.gemm != "FP8":
        return {}
    state = init_ragged_state(recipe, dot.groups) if dot.groups else init_state(recipe)
    if chosen.key != dot.path:
        state.pop("wgrad_scale", None)  # the parameter has one gradient
    layers = tuple(length for _, length in dot.loops)
    return {name: jnp.broadcast_to(x, (*layers, *x.shape)) for name, x in state.items()}


def _in_format(leaf: Any, chosen: Chosen) -> Any:
    """A kernel in the format that its recipe stores."""
    if is_scaled(leaf) or chosen.recipe.weight == "FP32":
        return leaf
    layers = tuple(length for _, length in chosen.dot.loops)
    if chosen.dot.groups:
        layers = (*layers, chosen.dot.groups)
    blocks = (*layers, *(1,) * (len(leaf.shape) - len(layers)))
    return quantize(leaf, formats.get(chosen.recipe.weight), power_of_two=True, blocks=blocks)


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
