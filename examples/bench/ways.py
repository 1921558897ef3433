"""The ways of multiplying that the benchmarks compare: one model, its layers' GEMMs done by each of them.

A benchmark's model takes its `nn.Dense` from outside. A way says which one, what is done to the finished
model, and how its loss is differentiated. Attention's own products stay in the model's dtype for all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import qwix
from flax.linen import fp8_ops

import fp8jax


class Way(NamedTuple):
    """One way of multiplying."""

    name: str
    dtype: Any  # of the model's computations
    dense: Callable[..., nn.Module]
    transform: Callable[[nn.Module], Any]  # makes the model that has `init` and `apply`
    value_and_grad: Callable[..., Callable[..., Any]] = jax.value_and_grad


def _same(model: nn.Module) -> nn.Module:
    return model


def _qwix(model: nn.Module) -> nn.Module:
    rule = qwix.QtRule(
        module_path=".*",
        op_names=("dot_general",),  # nn.Dense's; attention multiplies with einsum
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


def _ours(recipe: str) -> Way:
    bf16 = functools.partial(nn.Dense, dtype=jnp.bfloat16)
    transform = functools.partial(fp8jax.transform, recipe=recipe)
    return Way(f"fp8jax {recipe}", jnp.bfloat16, bf16, transform, fp8jax.value_and_grad)


OURS = ("te", "te,scaling=current", "O2", "O2,scaling=current")

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("float32", jnp.float32, functools.partial(nn.Dense, dtype=jnp.float32), _same),
        Way("bf16", jnp.bfloat16, functools.partial(nn.Dense, dtype=jnp.bfloat16), _same),
        Way(
            "flax Fp8DotGeneral",
            jnp.bfloat16,
            functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=fp8_ops.Fp8DotGeneral),
            _same,
        ),
        Way("qwix", jnp.bfloat16, functools.partial(nn.Dense, dtype=jnp.bfloat16), _qwix),
        *map(_ours, OURS),
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
