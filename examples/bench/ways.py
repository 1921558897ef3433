"""The ways of multiplying that the benchmarks compare: one model, its layers' GEMMs done by each of them.

A benchmark's model takes its `nn.Dense` from outside. A way says which one, what is done to the finished
model, and how its loss is differentiated. Attention's own products stay in the model's dtype for all.
`WAYS` run on any machine where `why_not()` is None; `THROUGH_TE` need TransformerEngine, and so a GPU.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

import fp8jax
from fp8jax import backends


def _nothing() -> None:
    return None


class Way(NamedTuple):
    """One way of multiplying."""

    name: str
    dtype: Any  # of the model's computations
    dense: Callable[..., nn.Module]
    transform: Callable[[nn.Module], Any]  # makes the model that has `init` and `apply`
    value_and_grad: Callable[..., Callable[..., Any]] = jax.value_and_grad
    why_not: Callable[[], str | None] = _nothing  # None, or what is missing here


def _same(model: nn.Module) -> nn.Module:
    return model


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


def _ours(recipe: str) -> Way:
    transform = functools.partial(fp8jax.transform, recipe=recipe)
    return Way(f"fp8jax {recipe}", jnp.bfloat16, BF16, transform, fp8jax.value_and_grad)


def _through_te(recipe: str) -> Way:
    """Our recipe, the products by TransformerEngine."""
    way, transform = _ours(recipe), functools.partial(fp8jax.transform, recipe=recipe, backend="te")
    name = f"{way.name} through TransformerEngine"
    return way._replace(name=name, transform=transform, why_not=_why_not_te)


def _why_not_te() -> str | None:
    return backends.BACKENDS["te"].supports(is_batched=False)


def _te_dense(recipe: str, features: int, **options: Any) -> nn.Module:
    """A dense layer whose product is TransformerEngine's own, under one of its recipes."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    te_flax = importlib.import_module("transformer_engine.jax.flax")
    product = te_flax.make_dot_general_cls(getattr(recipes, recipe)())
    return BF16(features, dot_general_cls=product, **options)


def _of_te(name: str, recipe: str) -> Way:
    """TransformerEngine by itself."""
    dense = functools.partial(_te_dense, recipe)
    why_not = functools.partial(_missing, "transformer_engine")
    return Way(f"TransformerEngine {name}", jnp.bfloat16, dense, _same, why_not=why_not)


BF16 = functools.partial(nn.Dense, dtype=jnp.bfloat16)


OURS = ("te", "te,scaling=current", "O2", "O2,scaling=current")

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("float32", jnp.float32, functools.partial(nn.Dense, dtype=jnp.float32), _same),
        Way("bf16", jnp.bfloat16, BF16, _same),
        Way(
            "flax Fp8DotGeneral",
            jnp.bfloat16,
            functools.partial(BF16, dot_general_cls=fp8_ops.Fp8DotGeneral),
            _same,
        ),
        Way("qwix", jnp.bfloat16, BF16, _qwix, why_not=functools.partial(_missing, "qwix")),
        *map(_ours, OURS),
    )
}

THROUGH_TE: dict[str, Way] = {
    way.name: way
    for way in (
        *map(_through_te, OURS[:2]),
        _of_te("delayed", "DelayedScaling"),
        _of_te("current", "Float8CurrentScaling"),
    )
}


def loss_and_gradient(
    way: Way, model: nn.Module, *, input_too: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """The model made this way, and a function of (variables, input) that gives loss and gradients.

    The loss is the mean square of the output. With `input_too` the input has a gradient as well, as it would
    inside a larger model: it counts as one more parameter.
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
