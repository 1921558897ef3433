"""Flax Linen modules under a recipe: `module.apply` as a function of parameters, rewritten.

    model = transform(module, recipe)
    variables = model.init(key, x)      # "params" as the module's, kernels in their format
    y = model.apply(variables, x)

The scaling states are in a collection of their own, a tree named as "params":

    {"params": {"fc": {"kernel": k}},
     "_overwrite_with_gradient": {"fc": {"kernel": {"scale": ..., "amax_history": ...}}}}
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.linen.module as linen_module
import jax
import jax.numpy as jnp
from flax.core.scope import DenyList, in_filter

from fp8jax.adapters.linen.boxes import with_own_boxes, with_plain_boxes, with_quiet_boxes
from fp8jax.quantization import is_scaled, own_value, quantize_like
from fp8jax.recipe import Recipe
from fp8jax.rewrite import FunctionModel, Report, Rule, Settings, check_like
from fp8jax.variables import FROZEN, LOSS_SCALE, OURS, PARAMS, SCALING


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
        function = FunctionModel(self._apply, self.settings, own=1, context=_interceptors)
        object.__setattr__(self, "_function", function)

    @property
    def recipe(self) -> Recipe:
        """The formats."""
        return self.settings.recipe

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What some layers do instead."""
        return self.settings.rules

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`module.init`: variables whose matched kernels are in the recipe's weight format.

        Returns:
            The module's variables and, where the recipe keeps any, the scaling state in
            "_overwrite_with_gradient" or, for float16 GEMMs, "loss_scale". The values are those
            of `module.init` with the same `rngs`, rounded to the weight format.

        Raises:
            ValueError: nothing would run in FP8, or a rule or a pattern matches no layer.
        """
        return self.init_with_output(rngs, *args, **kwargs)[1]

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """`module.init_with_output`, its output the plain module's; see `init`."""
        out, plain = self.module.init_with_output(rngs, *args, **kwargs)
        plain, options = dict(plain), self._options(plain, rngs, kwargs)
        states = plain.pop(SCALING, {})
        new = self._planned(self._function.init, plain, *args, **options)
        states = _union(states, new.pop(SCALING, {}))
        new[PARAMS] = with_own_boxes(new[PARAMS])
        return out, {**plain, **new, **({SCALING: states} if states else {})}

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with `init`'s variables or a plain model's parameters in them.

        Gradients taken with `fp8jax.value_and_grad` carry the new scaling state; applying
        the model alone changes no state.

        Raises:
            ValueError: `variables` lack the scaling state of a matched layer.
        """
        states = variables.get(SCALING, {})
        others = {name: tree for name, tree in variables.items() if name not in OURS}
        own = _without(states, variables.get(FROZEN, variables.get(PARAMS, {})))
        others |= {SCALING: own} if own else {}
        mutable = kwargs.get("mutable", False)
        ours = [name for name in (PARAMS, SCALING) if in_filter(mutable, name) and name in variables]
        if ours:
            names = [mutable] if isinstance(mutable, str) else mutable
            is_list = not isinstance(names, bool | DenyList)
            kwargs["mutable"] = (
                [n for n in names if n not in ours] if is_list else DenyList((PARAMS, SCALING))
            )
        inside = {PARAMS: {}, **{name: variables[name] for name in OURS if name in variables}}
        result = self._function.apply(inside, others, *args, **kwargs)
        if not ours:
            return result
        return result[0], {**result[1], **{name: variables[name] for name in ours}}

    def bind(self, variables: Mapping[str, Any], **kwargs: Any) -> "Bound":
        """The model with variables, to be called without them."""
        return Bound(self, variables, kwargs)

    def tabulate(self, rngs: Any, *args: Any, **kwargs: Any) -> str:
        """`module.tabulate`."""
        return self.module.tabulate(rngs, *args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Which layers run in FP8 for these example inputs, and why the others do not.

        Args: those of `module.apply` after the variables; arrays or `jax.ShapeDtypeStruct`s. With
            `method=` of that method. Nothing is computed.

        Raises:
            ValueError: an include or exclude pattern matches no layer.
        """
        kwargs.pop("mutable", None)
        rngs = {name: jax.random.key(0) for name in (PARAMS, *kwargs.pop("rngs", {}))}
        plain = dict(shapes_of_call(lambda *a, **k: self.module.init(rngs, *a, **k), *args, **kwargs))
        return self._planned(self._function.report, plain, *args, **self._options(plain, rngs, kwargs))

    def quantize(self, plain: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """A plain model's variables in this model's formats.

        Args:
            plain: variables of the untransformed module, e.g. a checkpoint.
            like: this model's variables, as `init` gives them: formats and scaling state.

        Returns:
            Variables with plain's values, rounded where `like` has a `ScaledArray`.

        Raises:
            ValueError: they are not those of one module, or `like` has shapes alone.
        """
        check_like(like)
        # Without the boxes of axis names, which are of different classes, and back into like's.
        sources, targets = by_path(collection("plain", plain)), by_path(collection("like", like))
        check_same("plain", shapes_of(sources), shapes_of(targets), "`like`")
        boxes = jax.tree.structure(like[PARAMS], is_leaf=is_scaled)
        params = boxes.unflatten([quantize_like(sources[path], target) for path, target in targets.items()])
        return {**like, **plain, PARAMS: params}

    def dequantize(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """These variables as the untransformed module takes them: plain float32 arrays for
        scaled ones, no scaling state, no loss scale."""
        params = collection("variables", variables)
        plain = {name: tree for name, tree in variables.items() if name not in (SCALING, LOSS_SCALE)}
        plain[PARAMS] = with_plain_boxes(jax.tree.map(own_value, params, is_leaf=is_scaled))
        return plain

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables for repeated inference: each matched kernel as its GEMM takes it, in FP8.

        `apply` gives the same with them as with `variables`, and casts no kernel. They are not to
        be trained: a kernel's value is rounded.

        Args: the variables, then the model's inputs; arrays or `jax.ShapeDtypeStruct`s.
        """
        others = {name: tree for name, tree in variables.items() if name not in OURS}
        frozen = self._function.freeze(variables, others, *args, **kwargs)
        return {**variables, PARAMS: with_own_boxes(frozen[PARAMS])}

    def _planned(self, of_function: Any, plain: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """What the rewritten function says of the call that `init` made."""
        params = plain.get(PARAMS, {})
        try:
            return of_function(params, {k: v for k, v in plain.items() if k != PARAMS}, *args, **options)
        except ValueError:
            # A decoder that finds its cache takes other inputs than one that makes it.
            return of_function(params, {}, *args, **options)

    def _options(self, plain: Mapping[str, Any], rngs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `init` as `apply` takes them when it makes the same call."""
        rngs = rngs if isinstance(rngs, Mapping) else {PARAMS: rngs}
        mutable = [name for name in plain if name not in (PARAMS, LOSS_SCALE, FROZEN)]
        return {
            **{k: v for k, v in options.items() if k != "mutable"},
            "rngs": dict(rngs),
            "mutable": mutable,
        }

    def _apply(self, params: Any, others: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain module's `apply`, of plain parameters."""
        variables = {**others, PARAMS: with_plain_boxes(params)}
        if jax.sharding.get_abstract_mesh().manual_axes:
            # On one of many devices there is nothing for a box of axis names to constrain.
            variables = with_quiet_boxes(variables)
        annotations = self._function.annotations

        def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            path = "/".join(context.module.path)
            if context.method_name != "__call__":
                annotations.modules.setdefault(path, context.module)
                return call(*args, **kwargs)
            with annotations.call(path, context.module):
                return call(*args, **kwargs)

        with nn.intercept_methods(note):
            return self.module.apply(variables, *args, **kwargs)


def _interceptors() -> tuple[Any, ...]:
    """The user's own, under which a module does something else. Flax has no public name for them."""
    return tuple(linen_module._global_interceptor_stack)


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


def shapes_of_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`jax.eval_shape` with respect to arrays; other arguments, as `train=False`, are what they are."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return function(*args, **kwargs)

    return jax.eval_shape(call, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])


def _without(states: Any, params: Any) -> dict[str, Any]:
    """The states of products that are no parameter's: those that the module's own code keeps."""
    own = {}
    for name, kept in states.items():
        if name.partition("#")[0] not in params:
            own[name] = kept
        elif isinstance(params[name.partition("#")[0]], Mapping) and (
            below := _without(kept, params[name.partition("#")[0]])
        ):
            own[name] = below
    return own


def _union(a: Any, b: Any) -> Any:
    """The leaves of two trees of mappings."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return a
    return {name: _union(a.get(name, b.get(name)), b.get(name, a.get(name))) for name in {**a, **b}}


def collection(argument: str, variables: Any, name: str = PARAMS) -> Any:
    """One of the collections of an argument.

    Raises:
        ValueError: there is none.
    """
    if isinstance(variables, Mapping) and name in variables:
        return variables[name]
    got = (
        ", ".join(map(repr, sorted(variables)))
        if isinstance(variables, Mapping)
        else type(variables).__name__
    )
    raise ValueError(f"`{argument}`: expected variables with {name!r}; got {got or 'an empty dict'}.")


def by_path(params: Any) -> dict[str, Any]:
    """Parameters by their paths, without the boxes of axis names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nn.unbox(params), is_leaf=is_scaled)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def shapes_of(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters by path."""
    return {path: jnp.shape(leaf) for path, leaf in params.items()}


def check_same(
    argument: str, shapes: Mapping[str, Any], like: Mapping[str, tuple[int, ...]], whose: str
) -> None:
    """Raises ValueError if parameters, of these shapes by path, are not those of `like`."""
    for path in sorted({*shapes, *like}):
        if path not in shapes:
            wrong = f"{path!r} is missing"
        elif path not in like:
            wrong = f"it has no {path!r}"
        elif shapes[path] != like[path]:
            wrong = f"{path!r} has shape {shapes[path]}, not {like[path]}"
        else:
            continue
        raise ValueError(f"`{argument}`: expected the parameters of {whose}; {wrong}.")
