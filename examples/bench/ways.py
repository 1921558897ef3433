"""The ways of computing a model's dense layers that the benchmarks compare.

A benchmark's model takes its `nn.Dense` as an argument. A way gives the dense layer, transforms the model,
and differentiates its loss. Attention's GEMMs stay in the model's dtype. `WAYS` run on any machine where
`why_not()` is None; `IN_BLOCKS` on GPUs that have their GEMMs, and fp8jax's also on CPUs; `THROUGH_TE` need
TransformerEngine, and so a GPU.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

import fp8jax
from fp8jax import backends

BF16 = functools.partial(nn.Dense, dtype=jnp.bfloat16)
OURS = ("te", "te,scaling=current", "O2", "O2,scaling=current", "fp8")


class Way(NamedTuple):
    """One way of computing the dense layers."""

    name: str
    dense: Callable[..., nn.Module] = BF16
    transform: Callable[[nn.Module], Any] = lambda model: model  # returns a model with `init` and `apply`
    value_and_grad: Callable[..., Callable[..., Any]] = jax.value_and_grad
    why_not: Callable[[], str | None] = lambda: None  # None, or what is missing here
    dtype: Any = jnp.bfloat16  # of the model's activations


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"the package {package} is not installed"


def _qwix(model: nn.Module) -> nn.Module:
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        op_names=("dot_general",),  # nn.Dense's; attention multiplies with einsum
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


def value_and_grad(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """fp8jax's, with the results of JAX's own: loss and gradients, and beside these the new scaling state.

    The parameters are not returned: a program of loss and gradients alone would copy them.
    """

    def loss_and_grads(variables: Any, *args: Any) -> Any:
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables, *args)
        return loss, {**variables, "params": grads}

    return loss_and_grads


def _ours(recipe: str) -> Way:
    transform = functools.partial(fp8jax.transform, recipe=recipe)
    return Way(f"fp8jax {recipe}", transform=transform, value_and_grad=value_and_grad)


def _through_te(recipe: str) -> Way:
    """fp8jax's recipe, with GEMMs by TransformerEngine."""
    return _ours(recipe)._replace(
        name=f"fp8jax {recipe} through TransformerEngine",
        transform=functools.partial(fp8jax.transform, recipe=recipe, backend="te"),
        why_not=lambda: backends.why_not("te"),
    )


def _te_dense(recipe: str, features: int, **options: Any) -> nn.Module:
    """A dense layer with TransformerEngine's own dot product, under a recipe of TransformerEngine."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    te_flax = importlib.import_module("transformer_engine.jax.flax")
    return BF16(features, dot_general_cls=te_flax.make_dot_general_cls(getattr(recipes, recipe)()), **options)


def _of_te(name: str, recipe: str) -> Way:
    """TransformerEngine alone."""
    dense = functools.partial(_te_dense, recipe)
    return Way(f"TransformerEngine {name}", dense, why_not=lambda: _missing("transformer_engine"))


def _scaled_dot_general(mode: str, features: int, **options: Any) -> nn.Module:
    """A dense layer with `jax.nn.scaled_dot_general`."""

    def dot(lhs: jax.Array, rhs: jax.Array, dims: Any, precision: Any = None) -> jax.Array:
        configs: Any = [jax.nn.get_scaled_dot_general_config(mode)] * 3  # pyright: ignore[reportArgumentType]
        return jax.nn.scaled_dot_general(lhs, rhs, dims, preferred_element_type=lhs.dtype, configs=configs)

    return BF16(features, dot_general=dot, **options)


def _of_jax(mode: str) -> Way:
    """JAX alone."""
    return Way(f"jax.nn.scaled_dot_general {mode}", functools.partial(_scaled_dot_general, mode))


def _named(*ways: Way) -> dict[str, Way]:
    return {way.name: way for way in ways}


WAYS = _named(
    Way("float32", functools.partial(nn.Dense, dtype=jnp.float32), dtype=jnp.float32),
    Way("bf16"),
    Way("flax Fp8DotGeneral", functools.partial(BF16, dot_general_cls=fp8_ops.Fp8DotGeneral)),
    Way("qwix", transform=_qwix, why_not=lambda: _missing("qwix")),
    *map(_ours, OURS),
)
IN_BLOCKS = _named(
    *map(_ours, ("block", "mxfp8", "nvfp4", "nvfp4,fp4_options=46+eden")), *map(_of_jax, ("mxfp8", "nvfp4"))
)
THROUGH_TE = _named(
    *map(_through_te, OURS[:2]),
    _of_te("delayed", "DelayedScaling"),
    _of_te("current", "Float8CurrentScaling"),
)


def loss_and_gradient(
    way: Way, model: nn.Module, *, input_too: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """The transformed model, and a function of (variables, input) that returns the loss and its gradients.

    Beside the gradients is the new scaling state. The loss is the mean square of the output. With
    `input_too` the input has a gradient, too, as it would
    inside a larger model: it becomes one more parameter.
    """
    made = way.transform(model)

    def mean_square(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(made.apply(variables, x).astype(jnp.float32) ** 2)

    def loss_with_input(variables: Any) -> jax.Array:
        params = dict(variables["params"])
        x = params.pop("input")
        return mean_square({**variables, "params": params}, x)

    def step_with_input(variables: Any, x: jax.Array) -> Any:
        with_input = {**variables, "params": {**variables["params"], "input": x}}
        return way.value_and_grad(loss_with_input)(with_input)

    return made, step_with_input if input_too else way.value_and_grad(mean_square)


def shapes(way: Way, model: Any, shape: tuple[int, ...]) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Shapes of the model's variables and of an input."""
    x = jax.ShapeDtypeStruct(shape, way.dtype)
    return jax.eval_shape(model.init, jax.random.key(0), x), x
