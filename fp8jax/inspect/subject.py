"""The model to inspect: a GPT of any size or the user's own model, transformed, with its loss.

subject("gpt-7b", batch=2)
subject("gpt", experts=8, top_k=2)       # a mixture of experts in each layer
subject("my_package.models:tiny")        # a function that returns (model, inputs) or (fn, (params, *inputs))
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from fp8jax import adapters
from fp8jax.adapters.adapter import FRAMEWORKS, adapter_of, is_transformed
from fp8jax.extras import look_up
from fp8jax.inspect.models import GPT, GPTS, LAYER_SIZES, LAYERS
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import Report


class Subject(NamedTuple):
    """A model with one device's inputs.

    `inputs` are the arguments of `fp8jax.report`: for a function of parameters `(params, *inputs)`, since it
    keeps no parameters. Its loss gets the inputs without the parameters.
    """

    model: Any
    inputs: tuple[PyTree, ...]
    loss: Callable[..., jax.Array]  # loss(outputs, *inputs)


def subject(
    name: str, *, batch: int | None = None, dtype: str = "bfloat16", remat: bool = True, **sizes: int
) -> Subject:
    """A model by its name.

    Args:
        name: "gpt", one of `GPTS` or of `LAYERS`, or "module:function". The other arguments are for a GPT; a
            layer takes batch, context, width, heads and dtype.
        batch: sequences on one device; by default 1, and for a layer as in `LAYER_SIZES`.
        dtype: of activations.
        remat: whether the backward keeps only the outputs of GEMMs.
        sizes: layers, heads, width, context, vocabulary, experts or top_k, in place of the named model's.

    Raises:
        ValueError: there is no such model, or the sizes contradict each other.
    """
    if ":" in name:
        return _of_user(name)
    if name not in ("gpt", *GPTS, *LAYERS):
        raise ValueError(
            f"`model`: expected gpt, {', '.join([*GPTS, *LAYERS])} or package.module:function; got {name!r}."
        )
    own = {"batch": 1, "vocabulary": 50304, **GPTS.get(name, GPTS["gpt-125m"])}
    own = LAYER_SIZES if name in LAYERS else own
    sizes |= {} if batch is None else {"batch": batch}
    if name in LAYERS and (odd := sizes.keys() - own.keys()):
        raise ValueError(f"`model`: {name} has {', '.join(sorted(own))}; got {', '.join(sorted(odd))}.")
    whole: dict[str, Any] = {**own, **sizes}
    if min(whole.values()) < 1:
        raise ValueError(f"`model`: expected positive sizes; got {whole}.")
    if whole["width"] % whole["heads"]:
        raise ValueError(f"`width` {whole['width']} is no multiple of `heads` {whole['heads']}; change one.")
    if "top_k" in sizes and "experts" not in sizes:
        raise ValueError(f"`top_k`: expected with `experts`, whose number it is; got {sizes['top_k']} alone.")
    shape = whole.pop("batch"), whole["context"]
    if name in LAYERS:
        x = jax.ShapeDtypeStruct((*shape, whole["width"]), jnp.dtype(dtype))
        return Subject(LAYERS[name](whole["heads"]), (x,), mean_square)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    return Subject(GPT(**whole, dtype=jnp.dtype(dtype), remat=remat), (tokens,), next_token_loss)


def _of_user(name: str) -> Subject:
    try:
        made = look_up(name)()
    except (Exception, SystemExit) as error:  # the user's program may raise anything
        got = f"{name!r}, which raised {type(error).__name__}: {error}"
        raise ValueError(f"`model`: expected a function package.module:function; got {got}.") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"`model`: expected {name} to return (model, inputs), or (model, inputs, loss); got "
            f"{type(made).__name__}."
        )
    model, inputs, *loss = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return Subject(model, inputs, loss[0] if loss else mean_square)


def next_token_loss(
    logits: Float[Array, "batch time vocabulary"], tokens: Int[Array, "batch time"]
) -> Float[Array, ""]:
    """The mean cross-entropy in float32. Targets are not shifted, which makes no difference to memory."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def mean_square(outputs: Float[Array, "..."], *inputs: PyTree) -> Float[Array, ""]:
    """The mean square of the outputs, a loss for any model."""
    del inputs
    return jnp.mean(jnp.square(outputs.astype(jnp.float32)))


def recipe_of(model: Any) -> Recipe | None:
    """The recipe of a transformed model; None for a plain one."""
    return adapter_of(model).settings.recipe if is_transformed(model) else None


def transformed(model: Any, recipe: Recipe | str, **options: Any) -> Any:
    """The model under the recipe; one that has it already is returned as it is. Shapes replace NNX arrays.

    Args:
        model: a Linen or NNX module, a function of parameters, or a model of an entry of `FRAMEWORKS`.
        recipe: a `Recipe`, or the text of one.
        options: of `fp8jax.transform`.

    Raises:
        TypeError: see `fp8jax.transform`; the model gets options and is transformed already.
        ValueError: the recipe cannot be parsed, or the model is transformed with another one.
    """
    if not options and (own := recipe_of(model)) is not None:
        if own != Recipe.parse(recipe):
            raise ValueError(
                f"`model`: expected a plain module for the recipe {recipe}; got one transformed with {own}. "
                f"Give the plain module, or take the recipe {own}."
            )
        return model
    transform = functools.partial(adapters.transform, recipe=recipe, **options)
    found = [framework for framework in FRAMEWORKS.values() if framework.is_plain(model)]
    return found[0].eval_shape(transform, model) if found else transform(model)


def loss_of(
    model: Any, inputs: tuple[PyTree, ...], loss: Callable[..., jax.Array] = mean_square
) -> tuple[Callable[..., jax.Array], tuple[PyTree, ...]]:
    """The loss of a transformed model as a function of variables, and the shapes of its arguments.

    Args:
        model: the result of `transformed`.
        inputs: arrays or `jax.ShapeDtypeStruct`s, see `Subject`.
        loss: `loss(outputs, *inputs)`.

    Returns:
        `loss_fn(variables, *inputs)`, and its arguments, trees of `jax.ShapeDtypeStruct`s.
    """
    adapter = adapter_of(model)

    def loss_of_variables(variables: Any, *inputs: Any) -> jax.Array:
        return loss(adapter.apply(variables, *inputs), *inputs)

    variables, inputs = jax.eval_shape(lambda *x: adapter.init_with_inputs(*x), *inputs)
    return loss_of_variables, (variables, *inputs)


def report_of(model: Any, inputs: tuple[PyTree, ...]) -> Report:
    """The report of a transformed model. The model is traced, and computes nothing."""
    found: list[Report] = []
    # Outside a trace, the random key for a Linen model's variables would be computed on a device.
    jax.eval_shape(lambda: found.append(adapters.report(model, *inputs)))
    return found[0]
