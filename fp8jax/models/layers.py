"""One layer's call under a recipe: Linen's Dense, DenseGeneral and Einsum, and our ExpertDense.

The layer's own code runs, with two of its attributes replaced for the length of the call:
`promote_dtype`, so that the kernel reaches the dot in the format it is kept in, and
`dot_general` (an ExpertDense's `ragged_dot`). `nn.Einsum` has no such seam; its product is made here.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.module import merge_param
from jax.sharding import PartitionSpec

from fp8jax import formats
from fp8jax.contraction import is_dot
from fp8jax.dot import Weight, init_ragged_state, init_state
from fp8jax.layout import Layout
from fp8jax.models.lora import A, AdaptedDot, B, LoRA
from fp8jax.models.moe import exchange
from fp8jax.models.moe.linen import ExpertDense
from fp8jax.models.multiply import GEMM_DTYPES, FP8Dot, WideDot
from fp8jax.recipe import Recipe
from fp8jax.rewrite import refuse_plain_parameters
from fp8jax.rewrite.report import OWN_DOT, Row, Rows, scope
from fp8jax.rewrite.rules import Choice, Layer, Rules
from fp8jax.scaled import ScaledArray, is_scaled, quantize

# The names of parameters and of their scaling states, which are parameters too within a model. They share
# no word: `nn.WeightNorm` and its like choose what they change by a part of the name.
STATES = {"kernel": "fp8__of_weight", "embedding": "fp8__of_table"}

MATCHED = (nn.Dense, nn.DenseGeneral, nn.Einsum, ExpertDense)

Product = FP8Dot | WideDot | AdaptedDot

# What computes the kernel of the layer within from its parameters, which therefore stay float32.
NORMED = (nn.WeightNorm, nn.SpectralNorm)


def _takes_all(module: Any) -> bool:
    """Whether a `NORMED` module would take a scaling state for a weight."""
    return isinstance(module, nn.SpectralNorm) or not module.variable_filter


# Layers that multiply but stay as they are; the report says why.
LEFT_ALONE = {
    "Conv": "convolutions stay as they are",
    "ConvTranspose": "convolutions stay as they are",
    "ConvLocal": "convolutions stay as they are",
    "Embed": "embeddings stay as they are",
    "ExpertRouter": "routers stay in float32",
}


class Interceptor:
    """A Flax method interceptor that runs matched layers under a recipe.

    Args:
        root: the model.
        rules: which layers, and how.
        backend: who multiplies.
        rows: gets one row per layer that was called.
        lora: given, layers have the adapters that are beside their kernels.

    Attributes:
        recipes: of the layers that multiplied in FP8, by path, with the rank of what has one scale.
        products: of layers that could have adapters, by path: the layer's recipe and its product.
    """

    def __init__(self, root: nn.Module, rules: Rules, backend: str, rows: Rows, lora: LoRA | None = None):
        refuse_plain_parameters()
        self.root, self.rules, self.backend, self.rows, self.lora = root, rules, backend, rows, lora
        self.recipes: dict[str, tuple[Recipe, int]] = {}
        self.products: dict[str, tuple[Recipe, Layout]] = {}
        self._norms: list[Any] = []

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Flax's protocol: makes the method's call, `call(*args, **kwargs)`."""
        module, method = context.module, context.method_name
        path, kind = "/".join(module.path), type(module).__name__
        if kind in LEFT_ALONE and method in ("__call__", "attend"):
            path += ".attend" if method == "attend" else ""
            choice = self._choose_attend(module, path) if method == "attend" else None
            self.rows[path] = Row(path, kind, (), False, LEFT_ALONE[kind])
            with scope(path):
                if choice is None:
                    return call(*args, **kwargs)
                return self._attend(module, path, choice, *args, **kwargs)
        if method == "__call__" and isinstance(module, NORMED):
            self._norms.append(module)
            try:
                return call(*args, **kwargs)
            finally:
                self._norms.pop()
        if method != "__call__" or not isinstance(module, MATCHED):
            return call(*args, **kwargs)
        recipe, reason = self._choose(module, path, args, kwargs)
        if self._norms and reason is None:
            taken = [type(norm).__name__ for norm in self._norms if _takes_all(norm)]
            reason = f"{taken[0]} takes all that the layer has for weights" if taken else None
            recipe = dataclasses.replace(recipe, weight="FP32", weight_grad="FP32", master_weight="-")
        multiply = None
        if reason is None:
            multiply = FP8Dot(recipe, self.backend, lambda: self._state(module, recipe), module.param_dtype)
        elif recipe.gemm in GEMM_DTYPES and not _has_own_dot(module):
            multiply = WideDot(GEMM_DTYPES[recipe.gemm], module.param_dtype)
        product, rank = self._adapted(module, path, recipe, multiply)
        with scope(path):
            out = _call(call, module, product, args, kwargs)
        if isinstance(multiply, FP8Dot) and not multiply.is_used:
            reason = "the layer multiplies in its own way"
        if reason is None and module.is_initializing() and recipe.weight != "FP32":
            _narrow_kernel(module, recipe)
        self.rows[path] = Row(
            path, kind, _kernel_shape(module, *args, **kwargs), reason is None, reason or "", lora=rank
        )
        if reason is None and not self._norms:
            self.recipes[path] = recipe, len(self.rows[path].kernel_shape) - experts_axes(module)
        return out

    def _adapted(self, module: Any, path: str, recipe: Recipe, multiply: Any) -> tuple[Any, int]:
        """The layer's product with its adapters', and their rank, 0 if it has none."""
        is_given = not path and not isinstance(self.root, MATCHED)
        if self.lora is None or multiply is None or self._norms or is_given:
            return multiply, 0
        adapters = None
        if module.has_variable("params", A):
            adapters = tuple(module.get_variable("params", name) for name in (A, B))

        def seen(layout: Layout) -> None:
            self.products[path] = recipe, layout

        product = AdaptedDot(multiply, adapters, self.lora.scale, seen)
        return product, self.lora.rank if adapters else 0

    def _choose(self, module: Any, path: str, args: Any, kwargs: Any) -> Choice:
        if _has_own_dot(module):
            return Choice(self.rules.recipe, OWN_DOT)
        if not path and not isinstance(self.root, MATCHED):
            # `layer.apply({"params": ...}, x)` inside of a model, as for a tied head.
            return Choice(self.rules.recipe, "the layer is applied to parameters that it is given")
        choice = self.rules.choose(Layer(path, module, _kernel_shape(module, *args, **kwargs)))
        is_einsum = isinstance(module, nn.Einsum) and choice.reason is None
        if is_einsum and not is_dot(_subscripts(module, *args, **kwargs)):
            return Choice(choice.recipe, "the einsum is not a single dot product")
        return choice

    def _choose_attend(self, module: nn.Embed, path: str) -> Choice | None:
        return self.rules.choose_attend(Layer(path, module, module.embedding.shape[::-1]))

    def _attend(self, module: Any, path: str, choice: Choice, query: Any) -> Any:
        """What `nn.Embed.attend` does, in FP8."""
        state = functools.partial(self._state, module, choice.recipe, "embedding")
        multiply = FP8Dot(choice.recipe, self.backend, state, module.param_dtype)
        query, table, _ = multiply.operands(query, module.embedding, None, module.dtype)
        self.rows[path] = Row(path, type(module).__name__, table.shape[::-1], True, "")
        return multiply.dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())))

    def _state(self, module: Any, recipe: Recipe, kernel: str = "kernel") -> Any:
        name, fresh = STATES[kernel], init_state(recipe)
        if isinstance(module, ExpertDense):
            fresh = init_ragged_state(recipe, module.num_experts)
        if not fresh:
            return fresh
        if module.has_variable("params", name):
            return module.get_variable("params", name)
        if not module.is_initializing():
            raise ValueError(
                f"`variables`: expected the scaling state of layer {'/'.join(module.path)!r} in "
                "the collection '_overwrite_with_gradient'; got none. Take it from "
                "`model.init(...)`, and give `apply` all of the variables, not 'params' alone."
            )
        # Not `module.param`, which would draw a key and so change the layer's own draws.
        module.put_variable("params", name, fresh)
        return fresh


def _narrow_kernel(module: Any, recipe: Recipe) -> None:
    """Puts the kernel that `init` just made into the recipe's weight format."""
    boxed = module.get_variable("params", "kernel")
    kernel = meta.unbox(boxed)
    if not is_scaled(kernel):
        format = formats.get(recipe.weight)
        blocks = (*kernel.shape[: experts_axes(module)], *(1,) * (kernel.ndim - experts_axes(module)))
        kernel = quantize(kernel, format, power_of_two=True, blocks=blocks)
        module.put_variable("params", "kernel", boxed_as(boxed, kernel))


def boxed_as(boxed: Any, kernel: Any) -> Any:
    """A kernel in the box of axis names, if there is one, of another of its shape."""
    if is_scaled(kernel) and isinstance(boxed, meta.Partitioned) and not hasattr(boxed, "plain"):
        boxed = _box_of_scaled(type(boxed))(**vars(boxed))
    return meta.replace_boxed(boxed, kernel)


def with_plain_boxes(tree: Any) -> Any:
    """The tree with the module's own boxes of axis names in the place of those of `ScaledArray`s."""

    def is_box(node: Any) -> bool:
        return isinstance(node, meta.AxisMetadata)

    def plain(node: Any) -> Any:
        return node.plain(**vars(node)) if hasattr(node, "plain") else node

    return jax.tree.map(plain, tree, is_leaf=is_box)


def with_quiet_boxes(tree: Any) -> Any:
    """The tree with boxes of axis names that constrain nothing when they are opened."""

    def quiet(node: Any) -> Any:
        if not isinstance(node, meta.Partitioned) or hasattr(node, "plain"):
            return node
        return _box_of_scaled(type(node))(**vars(node))

    return jax.tree.map(quiet, tree, is_leaf=lambda node: isinstance(node, meta.AxisMetadata))


@functools.cache
def _box_of_scaled(cls: type[meta.Partitioned]) -> type[meta.Partitioned]:
    """A box of axis names for a `ScaledArray`: the codes have the names, the scale those of its own axes."""

    def get_partition_spec(box: Any) -> Any:
        spec, kernel = cls.get_partition_spec(box), box.value
        if not is_scaled(kernel):
            return spec
        own = (name if n > 1 else None for name, n in zip(spec, kernel.scale.shape, strict=True))
        return ScaledArray(spec, PartitionSpec(*own))

    def get_sharding(box: Any, mesh: Any) -> Any:
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        specs = get_partition_spec(box)
        return jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    def unbox(box: Any, apply_constraint: bool = True) -> Any:
        """Without a constraint: codes, scale and slot of a kernel have shapes of their own."""
        del apply_constraint
        return box.value

    members = {"plain": cls, "get_partition_spec": get_partition_spec, "get_sharding": get_sharding}
    members["unbox"] = unbox
    return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(members))


def _kernel_shape(module: Any, inputs: Any, *rest: Any, **options: Any) -> tuple[int, ...]:
    """The shape of the kernel that the layer has, or will have."""
    if module.has_variable("params", "kernel"):
        return tuple(meta.unbox(module.get_variable("params", "kernel")).shape)
    if isinstance(module, nn.Einsum):
        return tuple(module.shape)
    if isinstance(module, ExpertDense):
        return module.num_experts, jnp.shape(inputs)[-1], module.features
    del rest, options
    shape: Any = jnp.shape(inputs)
    if not isinstance(module, nn.DenseGeneral):
        return shape[-1], module.features
    axes, features = (x if isinstance(x, tuple) else (x,) for x in (module.axis, module.features))
    return tuple(shape[axis] for axis in (*module.batch_dims, *axes)) + tuple(features)


def experts_axes(module: Any) -> int:
    """How many axes of the layer's kernel have a scale for each index."""
    return int(isinstance(module, ExpertDense))


def _has_own_dot(module: Any) -> bool:
    if isinstance(module, ExpertDense):
        return module.ragged_dot is not exchange.ragged_dot
    own = (getattr(module, name, None) for name in ("dot_general", "dot_general_cls"))
    return any(dot is not None for dot in own)


def _call(call: Callable[..., Any], module: Any, multiply: Product | None, args: Any, kwargs: Any) -> Any:
    """The layer's call, multiplying with `multiply` if given."""
    kernel = meta.unbox(module.get_variable("params", "kernel")) if module.scope is not None else None
    if isinstance(kernel, Weight) and kernel.spread and kernel.spread.is_part:
        with replaced(module, "param", functools.partial(_param, module, module.param, kernel)):
            return _call_with(call, module, multiply, args, kwargs)
    return _call_with(call, module, multiply, args, kwargs)


def _param(module: Any, param: Callable[..., Any], kernel: Weight, name: str, *args: Any, **kw: Any) -> Any:
    """The layer's parameter; its kernel as this device's part, which Flax would take for a wrong shape."""
    return kernel if name == "kernel" else param(name, *args, **kw)


def _call_with(
    call: Callable[..., Any], module: Any, multiply: Product | None, args: Any, kwargs: Any
) -> Any:
    if multiply is None:
        return call(*args, **kwargs)

    def promote_dtype(inputs: Any, kernel: Any, bias: Any, dtype: Any = None, inexact: bool = True) -> Any:
        del inexact
        return multiply.operands(inputs, kernel, bias, dtype)

    with replaced(module, "promote_dtype", promote_dtype):
        if isinstance(module, nn.Einsum):
            return _call_einsum(module, multiply, *args, **kwargs)
        if isinstance(module, ExpertDense):
            with replaced(module, "ragged_dot", multiply.ragged_dot):
                return call(*args, **kwargs)
        with replaced(module, "dot_general", multiply.dot_general):
            return call(*args, **kwargs)


@contextlib.contextmanager
def replaced(module: Any, name: str, new: Any) -> Iterator[None]:
    """One attribute of a bound module, which Flax freezes, replaced for a while. The bound
    module is Flax's own copy for this call; the user's module is never touched."""
    old = getattr(module, name)
    object.__setattr__(module, name, new)
    try:
        yield
    finally:
        object.__setattr__(module, name, old)


def _subscripts(module: nn.Einsum, inputs: Any, einsum_str: str | None = None) -> str:
    del inputs
    return merge_param("einsum_str", module.einsum_str, einsum_str).replace(" ", "")


def _call_einsum(
    module: Any, multiply: Product, inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    """What `nn.Einsum.__call__` does, with our product."""
    subscripts = _subscripts(module, inputs, einsum_str)
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    bias, broadcast = None, ()
    if module.use_bias:
        shape, broadcast = module._get_bias_shape(subscripts, inputs, kernel)
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    inputs, kernel, bias = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    out = multiply.einsum(subscripts, inputs, kernel)
    return out if bias is None else out + jnp.reshape(bias, broadcast)
