"""What is planned: a GPT of any size, or a model of the user's own.

subject("gpt-7b", batch=2)
subject("gpt", experts=8, top_k=2)       # a mixture of experts in each layer
subject("my_package.models:tiny")        # a function that returns (model, example inputs)
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.inspect.models import GPT, GPTS


class Subject(NamedTuple):
    """A model with one device's inputs."""

    model: Any
    inputs: tuple[Any, ...]
    loss: Callable[..., Any]  # of the outputs and the inputs


def subject(
    name: str, *, batch: int = 1, dtype: str = "bfloat16", remat: bool = True, **sizes: int
) -> Subject:
    """A model by its name.

    Args:
        name: "gpt", one of `GPTS`, or "module:function".
        batch: sequences on one device. This and what follows is a GPT's.
        dtype: of activations between matrix products.
        remat: whether only products are kept for the backward.
        sizes: layers, heads, width, context, vocabulary, where they are not as `name` says; experts and
            top_k.

    Raises:
        ValueError: no such model, or the sizes do not go together.
    """
    if ":" in name:
        return _of_user(name)
    if name != "gpt" and name not in GPTS:
        raise ValueError(
            f"`model`: expected gpt, {', '.join(GPTS)} or package.module:function; got {name!r}."
        )
    whole: dict[str, Any] = {"vocabulary": 50304, **GPTS.get(name, GPTS["gpt-125m"]), **sizes}
    if min(batch, *whole.values()) < 1:
        raise ValueError(f"`model`: expected positive sizes; got {whole} and batch={batch}.")
    if whole["width"] % whole["heads"]:
        raise ValueError(f"`width` {whole['width']} is no multiple of `heads` {whole['heads']}; change one.")
    if "top_k" in sizes and "experts" not in sizes:
        raise ValueError(f"`top_k`: expected with `experts`, whose number it is; got {sizes['top_k']} alone.")
    tokens = jax.ShapeDtypeStruct((batch, whole["context"]), jnp.int32)
    return Subject(GPT(**whole, dtype=jnp.dtype(dtype), remat=remat), (tokens,), next_token_loss)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy in float32; which token is the next one makes no difference to memory."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def mean_square(outputs: jax.Array, *inputs: Any) -> jax.Array:
    """The mean of the outputs' squares, whatever the inputs: a loss for a model that has none."""
    del inputs
    return jnp.mean(jnp.square(outputs.astype(jnp.float32)))


def _of_user(name: str) -> Subject:
    module, _, function = name.partition(":")
    if not (module and function):
        raise ValueError(f"`model`: expected package.module:function; got {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (Exception, SystemExit) as error:  # of a program that is not ours
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"`model`: expected a function package.module:function; {name!r}: {reason}."
        ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"`model`: expected {name} to return (model, inputs), or (model, inputs, loss); got "
            f"{type(made).__name__}."
        )
    model, inputs, *loss = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return Subject(model, inputs, loss[0] if loss else mean_square)
