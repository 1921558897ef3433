"""Flax Linen modules under a recipe: `module.apply` as a function of parameters, rewritten.

    model = transform(module, recipe)
    variables = model.init(key, x)      # "params" with the module's names, kernels in the recipe's format
    y = model.apply(variables, x)

The scaling states are a collection with the tree of "params":

    {"params": {"fc": {"kernel": k}},
     "_overwrite_with_gradient": {"fc": {"kernel": {"scale": ..., "amax_history": ...}}}}
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import in_filter, subtract_filters
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8jax.adapters.flax_context import flax_context
from fp8jax.adapters.linen.boxes import with_plain_boxes, with_scaled_boxes, without_constraints
from fp8jax.quantization import is_scaled, quantize_like
from fp8jax.recipe import Recipe
from fp8jax.rewrite import FunctionModel, Kernel, Report, Settings, StaticTree, check_like
from fp8jax.variables import FROZEN, LOSS_SCALE, OURS, PARAMS, SCALING, named_leaves


def is_module(model: Any) -> bool:
    """Whether `model` is a Linen module."""
    return isinstance(model, nn.Module)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen module under a recipe; made by `fp8jax.transform`.

    Attributes:
        module: the user's module.
        settings: the recipe, rules, GEMM backend and adapters.
    """

    module: nn.Module
    settings: Settings
    _function: FunctionModel = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        function = FunctionModel(self._apply, self.settings, num_states=1, context=flax_context)
        object.__setattr__(self, "_function", function)

    @property
    def recipe(self) -> Recipe:
        """The model's recipe."""
        return self.settings.recipe

    def plain(self) -> nn.Module:
        """The user's module."""
        return self.module

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`module.init`, with kernels in the recipe's weight format.

        Returns:
            The module's variables, with the values of `module.init` rounded to the weight format; and, if the
            recipe needs them, the scaling states in "_overwrite_with_gradient" or, for float16 GEMMs,
            "loss_scale".

        Raises:
            ValueError: nothing would run in FP8, or a rule or a pattern matches no layer.
        """
        return self.init_with_output(rngs, *args, **kwargs)[1]

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """`module.init_with_output`; the output is the plain module's. See `init`."""
        out, plain = self.module.init_with_output(rngs, *args, **kwargs)
        return out, self._from_plain(self._function.init, rngs, dict(plain), *args, **kwargs)

    def init_with_inputs(self, *args: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The variables of `init` for these inputs, and the inputs."""
        return self.init(jax.random.key(0), *args), args

    def _from_plain(
        self, init: Callable[..., Any], rngs: Any, plain: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Variables from those of the plain module, by the `init` of the rewritten function."""
        new = self._planned(init, rngs, plain, *args, **kwargs)
        for name in (PARAMS, FROZEN):
            if name in new:
                new[name] = with_scaled_boxes(new[name])
        states = {**flatten_dict(new.pop(SCALING, {})), **flatten_dict(plain.pop(SCALING, {}))}
        return {**plain, **new, **({SCALING: unflatten_dict(states)} if states else {})}

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with variables from `init`, in which "params" may be a plain model's.

        `fp8jax.value_and_grad` of a loss returns the variables with the new scaling state. `apply` alone
        changes no state.

        Raises:
            ValueError: `variables` lack the scaling state of a matched layer.
        """
        inside = {PARAMS: {}, **{name: variables[name] for name in OURS if name in variables}}
        mutable = kwargs.get("mutable", False)
        ours = [name for name in (PARAMS, SCALING) if name in variables and in_filter(mutable, name)]
        if not ours:
            return self._function.apply(inside, module_variables(variables), *args, **kwargs)
        rest = subtract_filters(mutable, tuple(ours))
        kwargs["mutable"] = sorted(rest) if isinstance(rest, set) else rest  # hashable, to be cached
        out, changed = self._function.apply(inside, module_variables(variables), *args, **kwargs)
        return out, {**changed, **{name: variables[name] for name in ours}}

    def split(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The variables and the inputs among the arguments of `apply`."""
        return args[0], args[1:]

    def bind(self, variables: Mapping[str, Any], **kwargs: Any) -> "Bound":
        """The model with variables, called without them; `kwargs` are arguments of each call."""
        return Bound(self, variables, kwargs)

    def tabulate(self, rngs: Any, *args: Any, **kwargs: Any) -> str:
        """`module.tabulate`."""
        return self.module.tabulate(rngs, *args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Which layers run in FP8 for these example inputs, and why the others do not.

        The arguments are those of `module.apply` after the variables, arrays or `jax.ShapeDtypeStruct`s. With
        `method=` the report is of that method. Nothing is computed.

        Raises:
            ValueError: an include or exclude pattern matches no layer.
        """
        kwargs.pop("mutable", None)
        rngs = {name: jax.random.key(0) for name in (PARAMS, *kwargs.pop("rngs", {}))}
        return self._planned(self._function.report, rngs, self._shapes(rngs, args, kwargs), *args, **kwargs)

    def quantize(self, plain: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """A plain model's variables in this model's formats.

        Args:
            plain: variables of the untransformed module, e.g. a checkpoint.
            like: this model's variables from `init`: formats and scaling state.

        Returns:
            Variables with the values of `plain`, rounded where `like` has a `ScaledArray`.

        Raises:
            ValueError: the parameters of `plain` and `like` differ, or `like` has shapes instead of arrays.
        """
        check_like(like)
        name = self.settings.own
        sources, targets = leaves_of("plain", plain), leaves_of("like", like, name)
        check_same("plain", sources, targets, "`like`")
        # The boxes of axis names in `plain` and `like` are of different classes; keep those of `like`.
        boxes = jax.tree.structure(like[name], is_leaf=is_scaled)
        params = boxes.unflatten([quantize_like(sources[path], target) for path, target in targets.items()])
        return {**like, **plain, PARAMS: like[PARAMS], name: params}

    def dequantize(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The variables for the untransformed module: dequantized arrays, no scaling state, no loss scale.

        Arrays that are not quantized are those of `variables`: copy them before a step donates these.
        """
        collection("variables", variables, self.settings.own)
        params = self._function.dequantize(variables)
        return {**_without_ours(variables), PARAMS: with_plain_boxes(params)}

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables for repeated inference: each kernel quantized once to its GEMM's format, but under block
        scaling as it is.

        `apply` returns the same outputs and casts no kernel. Do not train these variables. With adapters the
        kernels are quantized already.

        The arguments are the variables, then the model's inputs, arrays or `jax.ShapeDtypeStruct`s.
        """
        frozen = self._function.freeze(variables, _without_ours(variables), *args, **kwargs)
        return {**variables, PARAMS: with_scaled_boxes(frozen[PARAMS])}

    def kernels(
        self, variables: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[tuple[str, ...], Kernel]:
        """The kernels that the recipe or a rule applies to for these inputs, by path."""
        return self._function.kernels(variables, _without_ours(variables), *args, **kwargs)

    def _shapes(self, rngs: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """The shapes of the module's variables. Arguments that are not arrays, as `train=False`, stay."""
        static, arrays = StaticTree.of((args, kwargs))

        def init(arrays: list[Any]) -> Any:
            args, kwargs = static.filled(arrays)
            return self.module.init(rngs, *args, **kwargs)

        return dict(jax.eval_shape(init, arrays))

    def _planned(
        self, function: Callable[..., Any], rngs: Any, plain: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`function` of the plain module's variables, for the `apply` that makes the same call as `init`."""
        own = {name: tree for name, tree in plain.items() if name != PARAMS}
        kwargs["rngs"] = dict(rngs) if isinstance(rngs, Mapping) else {PARAMS: rngs}
        kwargs["mutable"] = [name for name in own if name not in (LOSS_SCALE, FROZEN)]
        try:
            return function(plain.get(PARAMS, {}), own, *args, **kwargs)
        except ValueError:
            # A decoder with a cache takes other inputs than one that creates it.
            return function(plain.get(PARAMS, {}), {}, *args, **kwargs)

    def _apply(self, params: Any, others: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain module's `apply`, of plain parameters."""
        variables = {**others, PARAMS: with_plain_boxes(params)}
        if jax.sharding.get_abstract_mesh().manual_axes:
            # Inside `jax.shard_map`, a sharding constraint is an error.
            variables = without_constraints(variables)
        annotations = self._function.annotations

        def note(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path, module = "/".join(context.module.path), context.module
            is_call = context.method_name == "__call__"
            annotations.modules.setdefault(path, module)
            with annotations.call(path, module) if is_call else contextlib.nullcontext():
                return call(*args, **kwargs)

        with nn.intercept_methods(note):
            return self.module.apply(variables, *args, **kwargs)


class Bound:
    """A model with its variables: calls and methods are those of the module under the recipe."""

    def __init__(self, model: LinenModel, variables: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._model, self._variables, self._options = model, variables, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`model.apply(variables, *args, **kwargs)`."""
        return self._model.apply(self._variables, *args, **{**self._options, **kwargs})

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model.module, name)
        if not callable(found) or name.startswith("_"):
            return found
        return lambda *args, **kwargs: self(*args, method=name, **kwargs)


def module_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The module's own collections, and the states that its own code keeps beside fp8jax's."""
    params = flatten_dict(dict(variables.get(FROZEN, variables.get(PARAMS, {}))))
    states = {}
    for path, state in flatten_dict(dict(variables.get(SCALING, {}))).items():
        names = tuple(name.partition("#")[0] for name in path)
        if not any(names[:n] in params for n in range(1, len(names))):
            states[path] = state
    own = _without_ours(variables)
    return {**own, SCALING: unflatten_dict(states)} if states else own


def _without_ours(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree for name, tree in variables.items() if name not in OURS}


def collection(argument: str, variables: Any, name: str = PARAMS) -> Any:
    """One of the collections of an argument; raises ValueError if it is missing."""
    got = type(variables).__name__
    if isinstance(variables, Mapping):
        if name in variables:
            return variables[name]
        got = ", ".join(map(repr, sorted(variables))) or "an empty dict"
    raise ValueError(f"`{argument}`: expected variables with {name!r}; got {got}.")


def leaves_of(argument: str, variables: Any, name: str = PARAMS) -> dict[str, Any]:
    """The parameters in a collection of an argument by path, without boxes of axis names."""
    return dict(named_leaves(nn.unbox(collection(argument, variables, name)), is_scaled))


def check_same(argument: str, params: Mapping[str, Any], like: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError if parameters have other paths or shapes than those of `like`."""
    for path in sorted({*params, *like}):
        if path not in params:
            wrong = f"{path!r} is missing"
        elif path not in like:
            wrong = f"it has no {path!r}"
        elif jnp.shape(params[path]) != jnp.shape(like[path]):
            wrong = f"{path!r} has shape {jnp.shape(params[path])}, not {jnp.shape(like[path])}"
        else:
            continue
        raise ValueError(f"`{argument}`: expected the parameters of {whose}; {wrong}.")
