"""Where does FP8 enter a model? Each function gives a model to the file that knows its kind."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from fp8jax import gradients
from fp8jax.adapters import linen, nnx, nnx_lora
from fp8jax.adapters.linen import LinenModel
from fp8jax.adapters.linen_lora import LoRAModel
from fp8jax.adapters.nnx_gradient import gradient_of_module, gradient_of_states, is_split, of_devices
from fp8jax.comm import Zero
from fp8jax.recipe import Recipe
from fp8jax.rewrite import FunctionModel, LoRA, Report, Rule, Settings, checkpointing


def transform(
    model: Any,
    recipe: Recipe | str,
    *,
    rules: Iterable[Rule] = (),
    backend: str = "auto",
    lora: LoRA | None = None,
    gradient_checkpointing: str = "none",
    checkpoint_blocks: Iterable[str] | str | None = None,
    inputs: Sequence[Any] | None = None,
) -> Any:
    """The same model with the recipe's formats: same code, same parameter names.

    Args:
        model: a Flax module, Linen or NNX, or a function of parameters, `fn(params, *args)`, of any
            framework. It is not changed.
        recipe: a `Recipe`, or the text of one (`Recipe.parse`).
        rules: what some layers do instead, see `Rule`; the first that fits a layer decides.
        backend: who multiplies: "auto", "xla", "te" (TransformerEngine, on a GPU) or "reference" (slow
            and exact); the report says which, and why.
        lora: given, the model's own parameters are frozen, and adapters are trained.
        gradient_checkpointing: what of each block is kept for the backward, which computes the rest anew:
            "none": everything; "dots": the outputs of its layers' products; "fp8": the FP8 operands of its
            products; "full": only its inputs.
        checkpoint_blocks: the blocks' classes, by name, or patterns of their paths as a `Rule` has them;
            None: the outermost modules that repeat, as siblings of one class or under a scan.
        inputs: example inputs of an NNX module, arrays or `jax.ShapeDtypeStruct`s: what it multiplies with
            is then known. Without, kernels of Flax's own layers are stored in the recipe's weight format,
            and parameters of other modules stay as they are, their GEMMs in FP8 all the same.

    Returns:
        For a Linen module a `fp8jax.adapters.linen.LinenModel`, with the module's `init` and
        `apply`; for an NNX module a module of the same kind, see `fp8jax.adapters.nnx`; for a function a
        `fp8jax.rewrite.FunctionModel`, with `init(params, *args)` and `apply(variables, *args)`. With `lora`
        see `fp8jax.adapters.linen_lora.LoRAModel` and `fp8jax.adapters.nnx_lora`.

    Raises:
        TypeError: `model` is no Flax module and no function, or what `transform` made of one; a setting is
            of another type.
        ValueError: the recipe cannot be parsed, or asks for what this release lacks; a setting is unknown, or
            contradicts the recipe; an NNX model is transformed already; of an NNX model, a rule, a pattern or
            a setting matches nothing (a Linen model's `init` and `apply` find that out).
    """
    if isinstance(rules, Rule) or not isinstance(rules, Iterable):
        raise TypeError(f"`rules`: expected a list of fp8jax.Rule; got {type(rules).__name__}.")
    if not isinstance(lora, LoRA | None):
        raise TypeError(f"`lora`: expected a fp8jax.LoRA, as LoRA(rank=8), or None; got {lora!r}.")
    recipe, rules = Recipe.parse(recipe), tuple(rules)
    kept = checkpointing(gradient_checkpointing, checkpoint_blocks, recipe, rules)
    if inputs is not None and not nnx.is_module(model):
        raise ValueError("`inputs`: expected none but for an NNX module; others get them in `init`.")
    settings = Settings(recipe, rules, backend, lora, kept)
    if linen.is_module(model):
        return (LinenModel if lora is None else LoRAModel)(model, settings)
    if nnx.is_module(model):
        given = None if inputs is None else tuple(inputs)
        return (nnx if lora is None else nnx_lora).transform(model, settings, given)
    if callable(model) and not isinstance(model, type | LinenModel | FunctionModel) and not _wraps(model):
        return FunctionModel(model, settings)
    raise TypeError(
        "`model`: expected a Flax module, Linen or NNX, or a function of parameters; got "
        f"{_described(model)}."
    )


def _wraps(model: Any) -> bool:
    """Whether `model` is no module itself but holds one, as Hugging Face's FlaxPreTrainedModel does."""
    held = getattr(model, "module", None)
    return linen.is_module(held) or nnx.is_module(held)


def _described(model: Any) -> str:
    if isinstance(model, LinenModel | FunctionModel):
        kept = "module" if isinstance(model, LinenModel) else "fn"
        return (
            f"a {type(model).__name__}, what fp8jax.transform made of one: transform the original, its "
            f"`.{kept}`, instead"
        )
    if _wraps(model):
        return (
            f"a {type(model).__name__}, which holds a Flax module: transform its `.module`, and give that "
            "its parameters"
        )
    if isinstance(model, type):
        return f"the class {model.__name__}, not an object of it"
    return type(model).__name__


def report(model: Any, *args: Any, **kwargs: Any) -> Report:
    """Which layers of a transformed model run in FP8 for these inputs, and why the others do not.

    Args:
        model: what `transform` made.
        args, kwargs: the model's inputs, after the variables if it is Linen; arrays or
            `jax.ShapeDtypeStruct`s. With `method="encode"` those of another method than `__call__`. Nothing
            is computed.

    Raises:
        TypeError: `model` is no transformed model.
    """
    if isinstance(model, LinenModel | FunctionModel):
        return model.report(*args, **kwargs)
    if nnx.is_module(model):
        return nnx.report(model, *args, **kwargs)
    raise TypeError(f"`model`: expected what fp8jax.transform made; got {type(model).__name__}.")


def dequantize(model: Any) -> Any:
    """The plain NNX module again: its own layers, float32 kernels, no scaling state.

    Of a Linen model, `model.dequantize(variables)` gives the plain module's variables. Adapters are merged
    into the kernels, see `merge`.

    Raises:
        TypeError: `model` is no NNX module.
    """
    model = _checked_nnx(model, "dequantize(variables)")
    return merge(model) if nnx_lora.is_adapted(model) else nnx.dequantize(model)


def merge(model: Any, base: Any = None) -> Any:
    """The plain NNX module with the adapters in its kernels, W + (alpha / rank) A B.

    Of a Linen model, see `LoRAModel.merge`.

    Args:
        model: an NNX module that `transform(..., lora=...)` made.
        base: the plain module that it was made of; without it W is the frozen kernel, which the FP8 format
            has rounded.

    Raises:
        TypeError: `model` has no adapters.
    """
    return nnx_lora.merge(model, base)


def unmerge(merged: Any, model: Any) -> Any:
    """The way back: a copy of a plain NNX module without the adapters of `model`; see `merge`."""
    return nnx_lora.unmerge(merged, model)


def freeze(model: Any) -> Any:
    """A copy of a transformed NNX module for repeated inference: matched kernels as their GEMMs take them.

    It gives the same outputs and casts no kernel. It is not to be trained: kernels are rounded. Of a
    Linen model, see `model.freeze(variables, *inputs)`.

    Raises:
        TypeError: `model` is no NNX module.
    """
    return nnx.freeze(_checked_nnx(model, "freeze(variables, *inputs)"))


def _checked_nnx(model: Any, of_linen: str) -> Any:
    if not nnx.is_module(model):
        raise TypeError(
            f"`model`: expected an NNX module; got {type(model).__name__}. Of a Linen model, call "
            f"`model.{of_linen}`."
        )
    return model


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, zero: Zero | None = None
) -> Callable[..., Any]:
    """`jax.value_and_grad` for models that hold scaled weights and scaling state.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` of Flax variables, or
            `loss_fn(model, *args, **kwargs)` of an NNX module, gives a scalar, or with `has_aux`
            a scalar and anything else. Variables may be an `nnx.State` of parameters, or
            `{"params": state, "_overwrite_with_gradient": state}` of `nnx.Param`s and
            `fp8jax.FP8State`s. Without the second, the new scaling state is lost.
        has_aux: as in `jax.value_and_grad`.
        zero: over which devices the batch is split, and what each keeps, see `gradients.value_and_grad`.
            An NNX module's statistics become the mean of those that the devices saw, its intermediates
            are put together, and each device draws from random streams of its own.

    Returns:
        A function of the same arguments. Of variables: see `gradients.value_and_grad`. Of a
        module: the loss and an `nnx.State` of gradients of its `nnx.Param`s, as
        `nnx.value_and_grad` gives them; the module has its new scaling state, as it has its new
        statistics.
    """
    grad_of = functools.partial(gradients.value_and_grad, zero=zero)
    return _of_either(loss_fn, grad_of, has_aux, functools.partial(_of_devices, zero), zero)


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    microbatches: int,
    *,
    has_aux: bool = False,
    format: str = "FP16",
    zero: Zero | None = None,
    keys: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` of a batch taken in parts, one after the other: the memory of one part.

    Args: see `gradients.accumulate_gradients`. Random keys go in as keyword arguments that `keys` names:
        each part, and with `zero` each device's, gets a key of its own. An NNX module's random streams need
        no word, each part has its own; all parts see the statistics that came in, and those of the last
        part are kept.
    """

    def grad_of(loss_fn: Any, has_aux: bool) -> Any:
        return gradients.accumulate_gradients(
            loss_fn, microbatches, has_aux=has_aux, format=format, zero=zero, keys=keys
        )

    def last(aux: Any) -> Any:
        return jax.tree.map(lambda x: x[-1], aux)

    return _of_either(loss_fn, grad_of, has_aux, lambda aux: last(_of_devices(zero, aux)), zero, microbatches)


def _of_devices(zero: Zero | None, stacked: Any) -> Any:
    return stacked if zero is None else of_devices(stacked)


def _of_either(
    loss_fn: Any,
    grad_of: Callable[..., Any],
    has_aux: bool,
    last: Callable[[Any], Any],
    zero: Zero | None,
    microbatches: int = 1,
) -> Callable[..., Any]:
    of_variables = grad_of(loss_fn, has_aux=has_aux)
    parts = microbatches * (1 if zero is None else zero.devices)
    of_module = gradient_of_module(loss_fn, has_aux, lambda pure: grad_of(pure, has_aux=True), last, parts)

    of_states = gradient_of_states(loss_fn, functools.partial(grad_of, has_aux=has_aux))

    @functools.wraps(loss_fn)
    def of_either(model: Any, *args: Any, **kwargs: Any) -> Any:
        if nnx.is_module(model):
            return of_module(model, *args, **kwargs)
        return (of_states if is_split(model) else of_variables)(model, *args, **kwargs)

    return of_either
