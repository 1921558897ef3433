"""A Linen module whose kernels are frozen and whose adapters are trained.

    model = fp8jax.transform(module, "O2", lora=fp8jax.LoRA(rank=8))
    variables = model.adapt(key, pretrained, x)       # or model.init(key, x)
    {"params": {"fc": {"lora_a": a, "lora_b": b}},    # what is trained
     "frozen": {"fc": {"kernel": k, "bias": b}},      # the module's own parameters
     "_overwrite_with_gradient": ...}

Since "params" is what gradients, optimizers and checkpoints look at, all of them see the adapters alone.
Inside `apply` the adapters stand beside their kernels, as scaling states do, so that `nn.scan`, `nn.remat`
and `nn.vmap` split and stack them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from fp8jax import backends, loss_scale
from fp8jax.dot import init_state
from fp8jax.layout import Layout
from fp8jax.models import blocks, layers, linen
from fp8jax.models.linen_variables import split
from fp8jax.models.lora import A, LoRA, frozen_rules, is_able
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import Rows, trace
from fp8jax.rewrite.rules import Rule
from fp8jax.scaled import is_scaled, value
from fp8jax.variables import FROZEN, LOSS_SCALE, OURS, PARAMS, SCALING


def transform(
    module: nn.Module,
    recipe: Recipe,
    rules: tuple[Rule, ...],
    backend: str,
    lora: LoRA,
    checkpointing: blocks.Checkpointing | None = None,
    attention: str | None = None,
) -> "LoRAModel":
    """See `fp8jax.transform`."""
    backends.choose(backend)
    frozen_rules(recipe, rules)
    return LoRAModel(module, recipe, backend, rules, checkpointing, attention, lora)


@dataclasses.dataclass(frozen=True)
class LoRAModel(linen.LinenModel):
    """A Linen module with adapters; made by `fp8jax.transform`.

    Attributes:
        module, recipe, backend, rules: as in `LinenModel`; the recipe's weight, weight gradient and master
            columns are without meaning here.
        lora: which layers have adapters, and how the rest is kept.
    """

    lora: LoRA = LoRA()

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`adapt` of `module.init(rngs, ...)`."""
        return self.adapt(rngs, self.module.init(rngs, *args, **kwargs), *args, **kwargs)

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """`init`, and what the model gives then."""
        variables = self.init(rngs, *args, **kwargs)
        rngs = rngs if isinstance(rngs, Mapping) else {}
        streams = {name: key for name, key in rngs.items() if name != PARAMS}
        others = [name for name in variables if name not in OURS]
        out, _ = self.apply(variables, *args, rngs=streams, mutable=others, **kwargs)
        return out, variables

    def adapt(self, rngs: Any, plain: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This model's variables, from those of the untransformed module.

        Args:
            rngs: a random key, or a dict with one under "params": for A.
            plain: variables of the module, e.g. a pretrained model's.
            args, kwargs: the model's inputs; arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.

        Returns:
            plain's collections; its "params" are in "frozen", kernels that multiply under the recipe in the
            format that `LoRA.weight` says, and "params" holds the adapters, float32.

        Raises:
            ValueError: a pattern of the recipe's, a rule or a target matches no layer, or a target one that
                can have no adapters; a kernel is missing in `plain`, or has another shape.
        """
        products, states = self._trace(rngs, *args, **kwargs)
        key = rngs[PARAMS] if isinstance(rngs, Mapping) else rngs
        frozen, adapters = linen.collection("plain", plain), {}
        given = linen.by_path(frozen)
        for path, (recipe, layout) in products.items():
            parts, rank = [*filter(None, path.split("/"))], len(layout.rhs.shape)
            name, shape = "/".join([*parts, "kernel"]), layout.rhs.shape
            found = {name: given[name].shape[-rank:]} if name in given else {}
            linen.check_same("plain", found, {name: shape}, "the module")

            def narrow(kernel: Any, recipe: Recipe = recipe, rank: int = rank) -> Any:
                return self.lora.narrow(kernel, recipe, rank)

            if self.lora.chooses(path, self.recipe) and is_able(layout):
                kernel = meta.unbox(_at(frozen, parts)["kernel"])
                _put(adapters, parts, self.lora.new(key, path, kernel, layout))
            frozen = _with(frozen, _put({}, parts, {A: None}), _on_kernel(lambda k, _, f=narrow: f(k)))
        others = {name: tree for name, tree in plain.items() if name not in (PARAMS, SCALING, LOSS_SCALE)}
        variables = {**others, PARAMS: adapters, FROZEN: frozen, **({SCALING: states} if states else {})}
        if self.recipe.gemm == "FP16":
            variables[LOSS_SCALE] = loss_scale.init()
        return variables

    def merge(self, variables: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The untransformed module's variables, with the adapters in its kernels: W + (alpha / rank) A B.

        Args:
            variables: this model's.
            base: the untransformed module's variables that it started from; without them W is the frozen
                kernel, which the FP8 format has rounded.
        """
        plain = self._base(variables) if base is None else self._checked("base", base, variables)
        return {**plain, PARAMS: self._with_adapters(plain[PARAMS], variables[PARAMS], 1.0)}

    def unmerge(self, merged: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """The way back: `merged` without the adapters of `variables`, W up to float32 rounding."""
        merged = self._checked("merged", merged, variables)
        return {**merged, PARAMS: self._with_adapters(merged[PARAMS], variables[PARAMS], -1.0)}

    def quantize(self, plain: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """Variables with another plain model's values below the adapters of `like`; see `LinenModel`."""
        new = super().quantize(plain, {PARAMS: linen.collection("like", like, FROZEN)})
        return {**like, **new, PARAMS: like[PARAMS], FROZEN: new[PARAMS]}

    def dequantize(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """`merge(variables)`: what the untransformed module takes to compute the same, but for rounding."""
        return self.merge(variables)

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The variables: their kernels are as GEMMs take them."""
        del args, kwargs
        return dict(variables)

    def _checked(self, argument: str, plain: Any, variables: Any) -> dict[str, Any]:
        """Variables of the untransformed module, if they are what it started from or could have."""
        params = linen.shapes_of(linen.by_path(linen.collection(argument, plain)))
        frozen = linen.shapes_of(linen.by_path(linen.collection("variables", variables, FROZEN)))
        linen.check_same(argument, params, frozen, "`variables`")
        return dict(plain)

    def _base(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: tree for name, tree in variables.items() if name not in OURS}
        frozen = linen.collection("variables", variables, FROZEN)
        values = jax.tree.map(value, frozen, is_leaf=is_scaled)
        return {**plain, PARAMS: layers.with_plain_boxes(values)}

    def _with_adapters(self, params: Any, adapters: Any, times: float) -> Any:
        return _with(params, adapters, _on_kernel(lambda k, own: self.lora.added(k, own, times)))

    def _inside(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        if FROZEN not in variables:
            raise ValueError(
                "`variables`: expected the collection 'frozen'; got "
                f"{', '.join(sorted(variables))}. `model.adapt(key, plain, *inputs)` makes "
                "them of a plain model's."
            )
        params = _with(variables[FROZEN], variables[PARAMS], lambda layer, own: {**layer, **own})
        others = {name: tree for name, tree in variables.items() if name != FROZEN}
        return super()._inside({**others, PARAMS: params})

    def _interceptor(self, rows: Rows) -> layers.Interceptor:
        rules = frozen_rules(self.recipe, self.rules)
        return layers.Interceptor(self.module, rules, self.backend, rows, self.lora)

    def _trace(
        self, rngs: Any, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, tuple[Recipe, Layout]], dict[str, Any]]:
        """The layers that multiply under the recipe, and the first scaling states."""
        rows, shapes = {}, {}
        interceptor = self._interceptor(rows)
        rules = interceptor.rules

        def init(*args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(interceptor):
                variables = split(self.module.init(rngs, *args, **kwargs))
            shapes.update(jax.tree.map(jnp.shape, variables.get(SCALING, {})))
            return ()

        trace(init, *args, **kwargs)
        rules.check(linen.paths_of(rows))
        products = interceptor.products
        able = [path for path, (_, layout) in products.items() if is_able(layout)]
        self.lora.check(able, [path for path in linen.paths_of(rows) if path not in able])

        def state(keys: Any, shape: tuple[int, ...]) -> jax.Array:
            *path, _, name = (key.key for key in keys)
            recipe, _ = interceptor.recipes.get("/".join(path), (rules.recipe, 0))
            return jnp.broadcast_to(init_state(recipe)[name], shape)

        is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
        return products, jax.tree_util.tree_map_with_path(state, shapes, is_leaf=is_shape)


def _at(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree[part]
    return tree


def _put(tree: dict[str, Any], parts: list[str], new: dict[str, Any]) -> dict[str, Any]:
    """The nested dicts with a layer's entries put at its path."""
    below = tree
    for part in parts:
        below = below.setdefault(part, {})
    below.update(new)
    return tree


def _with(params: Any, adapters: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The parameters, each layer that has adapters as `change(layer, adapters)` makes it."""
    if A in adapters:
        return change(params, adapters)
    below = {name: _with(params[name], own, change) for name, own in adapters.items()}
    return {**params, **below}


def _on_kernel(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A change of a layer's kernel, in its box."""

    def on_layer(layer: Any, adapters: Any) -> Any:
        boxed = layer["kernel"]
        return {**layer, "kernel": layers.boxed_as(boxed, change(meta.unbox(boxed), adapters))}

    return on_layer
