"""Flax Linen: the dots of a module's layers, under a recipe, without touching the module.

    model = transform(module, recipe)
    variables = model.init(key, x)      # "params" as the module's, kernels in their format
    y = model.apply(variables, x)

While the module runs, its calls pass through a Flax interceptor. A layer that the recipe
matches finds, next to its kernel in "params", the scaling state of its dot, so that
`nn.scan`, `nn.remat` and `nn.vmap` split and stack the state as they do the kernel. Outside
the state lives in a collection of its own, "_overwrite_with_gradient", as a tree shaped
like "params":

    {"params": {"fc": {"kernel": k}},
     "_overwrite_with_gradient": {"fc": {"kernel": {"lhs": ..., "rhs": ..., "grad": ...}}}}
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8jax import backends, loss_scale
from fp8jax.dot import quantized_kernel
from fp8jax.models import attention_layers, blocks, blocks_linen, layers
from fp8jax.models.linen_variables import merge, split
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import Report, Rows, measured, trace
from fp8jax.rewrite.rules import Rule, Rules
from fp8jax.scaled import format_of, is_scaled, quantize, value
from fp8jax.variables import LOSS_SCALE, OURS, PARAMS, SCALING


def transform(
    module: nn.Module,
    recipe: Recipe,
    rules: tuple[Rule, ...],
    backend: str,
    checkpointing: blocks.Checkpointing | None = None,
    attention: str | None = None,
) -> "LinenModel":
    """See `fp8jax.transform`."""
    backends.choose(backend)
    Rules(recipe, rules)
    return LinenModel(module, recipe, backend, rules, checkpointing, attention)


def is_module(model: Any) -> bool:
    """Whether `model` is a Linen module."""
    return isinstance(model, nn.Module)


@dataclasses.dataclass(frozen=True)
class LinenModel:
    """A Linen module under a recipe; made by `fp8jax.transform`.

    Attributes:
        module: the user's module.
        recipe: the formats.
        backend: who multiplies.
        rules: what some layers do instead.
        checkpointing: what is rematerialized, or None.
        attention: who computes Flax's attention layers, or None for Flax.
    """

    module: nn.Module
    recipe: Recipe
    backend: str = "auto"
    rules: tuple[Rule, ...] = ()
    checkpointing: blocks.Checkpointing | None = None
    attention: str | None = None

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`module.init`: variables whose matched kernels are in the recipe's weight format.

        Returns:
            The module's variables and, where the recipe keeps any, the scaling state in
            "_overwrite_with_gradient" or, for float16 GEMMs, "loss_scale". The values are those
            of `module.init` with the same `rngs`, rounded to the weight format.

        Raises:
            ValueError: an include or exclude pattern matches no layer.
        """
        return self.init_with_output(rngs, *args, **kwargs)[1]

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """`module.init_with_output`; see `init`."""
        rows: Rows = {}
        with self._intercept(rows) as (rules, attentions):
            out, variables = self.module.init_with_output(rngs, *args, **kwargs)
        rules.check(paths_of(rows))
        attention_layers.raise_if_none(self.attention, attentions)
        variables = split(variables)
        if self.recipe.gemm == "FP16":
            variables[LOSS_SCALE] = loss_scale.init()
        return out, variables

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with `init`'s variables or a plain model's parameters in them.

        Gradients taken with `fp8jax.value_and_grad` carry the new scaling state; applying
        the model alone changes no state.

        Raises:
            ValueError: `variables` lack the scaling state of a matched layer; or there are no blocks to
                checkpoint.
        """
        with self._intercept({}, self._blocks(variables, *args, **kwargs)):
            result = self.module.apply(self._inside(variables), *args, **kwargs)
        if kwargs.get("mutable", False) is False:
            return result
        out, mutated = result
        return out, split(mutated)

    def tabulate(self, rngs: Any, *args: Any, **kwargs: Any) -> str:
        """`module.tabulate`."""
        with self._intercept({}):
            return self.module.tabulate(rngs, *args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Which layers run in FP8 for these example inputs, and why the others do not.

        Args: those of `module.apply` after the variables; arrays or `jax.ShapeDtypeStruct`s.

        Raises:
            ValueError: an include or exclude pattern matches no layer.
        """
        rows: Rows = {}
        kwargs.pop("mutable", None)
        rngs = {name: jax.random.key(0) for name in (PARAMS, *kwargs.pop("rngs", {}))}
        variables: dict[str, Any] = {}

        def init(*args: Any, **kwargs: Any) -> Any:
            variables.update(jax.eval_shape(lambda: self.init(rngs, *args, **kwargs)))
            return ()

        trace(init, *args, **kwargs)
        mutable = [name for name in variables if name not in OURS]
        attentions: attention_layers.Found = {}

        def call(variables: Any, *args: Any, **kwargs: Any) -> Any:
            with self._intercept(rows) as (_, found):
                out = self.module.apply(self._inside(variables), *args, rngs=rngs, mutable=mutable, **kwargs)
            attentions.update(found)
            return out

        jaxpr = trace(call, variables, *args, **kwargs)
        of_blocks = self._blocks(variables, *args, rngs=rngs, mutable=mutable, **kwargs)
        notes = [backends.note(self.backend), *blocks.lines(self.checkpointing, of_blocks)]
        notes += attention_layers.lines(self.attention, attentions)
        return measured(str(self.recipe), rows, jaxpr, "\n".join(filter(None, notes)))

    def quantize(self, plain: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """A plain model's variables in this model's formats.

        Args:
            plain: variables of the untransformed module, e.g. a checkpoint.
            like: this model's variables, as `init` gives them: formats and scaling state.

        Returns:
            Variables with plain's values, rounded where `like` has a `ScaledArray`.

        Raises:
            ValueError: they are not those of one module.
        """

        def convert(target: Any, source: Any) -> Any:
            if not is_scaled(target):
                return value(source)
            return quantize(source, format_of(target), power_of_two=True, blocks=target.scale.shape)

        # Without the boxes of axis names, which are of different classes, and back into like's.
        sources, targets = by_path(collection("plain", plain)), by_path(collection("like", like))
        check_same("plain", shapes_of(sources), shapes_of(targets), "`like`")
        boxes = jax.tree.structure(like[PARAMS], is_leaf=is_scaled)
        params = boxes.unflatten([convert(target, sources[path]) for path, target in targets.items()])
        return {**like, **plain, PARAMS: params}

    def dequantize(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """These variables as the untransformed module takes them: plain float32 arrays for
        scaled ones, no scaling state, no loss scale."""
        params = collection("variables", variables)
        plain = {name: tree for name, tree in variables.items() if name not in (SCALING, LOSS_SCALE)}
        plain[PARAMS] = layers.with_plain_boxes(jax.tree.map(value, params, is_leaf=is_scaled))
        return plain

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables for repeated inference: each matched kernel as its GEMM takes it, in FP8.

        `apply` gives the same with them as with `variables`, and casts no kernel. They are not to
        be trained: a kernel's value is rounded.

        Args: the variables, then the model's inputs; arrays or `jax.ShapeDtypeStruct`s.
        """
        interceptor = self._interceptor({})

        def call(*args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(interceptor):
                return self.module.apply(merge(variables), *args, **kwargs)

        trace(call, *args, **kwargs)
        params = variables[PARAMS]
        for path, (recipe, rank) in interceptor.recipes.items():
            parts = [*filter(None, path.split("/")), "kernel"]
            params = _replaced(params, variables.get(SCALING, {}), parts, recipe, rank)
        return {**variables, PARAMS: params}

    @contextlib.contextmanager
    def _intercept(
        self, rows: Rows, of_blocks: Iterable[blocks.Call] = ()
    ) -> Iterator[tuple[Rules, attention_layers.Found]]:
        interceptor = self._interceptor(rows)
        with (
            blocks_linen.checkpointed(of_blocks, self.checkpointing),
            nn.intercept_methods(interceptor),
            attention_layers.intercepted(self.attention) as attentions,
        ):
            yield interceptor.rules, attentions

    def _interceptor(self, rows: Rows) -> layers.Interceptor:
        return layers.Interceptor(self.module, Rules(self.recipe, self.rules), self.backend, rows)

    def _blocks(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> list[blocks.Call]:
        """Those that a call of `apply` checkpoints."""
        if self.checkpointing is None:
            return []

        def call(variables: Any, *args: Any, **kwargs: Any) -> None:
            with self._intercept({}):
                self.module.apply(self._inside(variables), *args, **kwargs)

        return blocks_linen.find(call, self.checkpointing, variables, *args, **kwargs)

    def _inside(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The variables as the module takes them."""
        return merge(variables)


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


def _replaced(params: Any, state: Any, parts: list[str], recipe: Recipe, rank: int) -> Any:
    """The parameters with the kernel at a path quantized for its GEMM."""
    name, *below = parts
    state = state.get(name, {})
    if below:
        return {**params, name: _replaced(params[name], state, below, recipe, rank)}
    [kernel], box = jax.tree.flatten(params[name], is_leaf=is_scaled)
    return {**params, name: jax.tree.unflatten(box, [quantized_kernel(kernel, recipe, state, rank)])}


def paths_of(rows: Rows) -> list[str]:
    """Those of the layers that a pattern may match."""
    return [row.path for row in rows.values() if row.kernel_shape]
