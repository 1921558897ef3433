"""`transform`: a model of any framework under a recipe."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from fp8jax.adapters import linen, nnx
from fp8jax.adapters.adapter import FRAMEWORKS, adapter_of, is_transformed
from fp8jax.adapters.flax_context import flax_context
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
    """The model under a recipe, with the same code and the same parameter names.

    Args:
        model: a Flax Linen module, a Flax NNX module, or a function `fn(params, *args)` of any framework. It
            is not changed.
        recipe: a `Recipe`, or its text.
        rules: recipes of single layers; the first rule that matches a layer decides.
        backend: "auto", or a name of `fp8jax.backends.BACKENDS`: "xla" or "te" (TransformerEngine, on a GPU)
            for scales of tensors, "pallas" or "cudnn" for scales of blocks, "reference" (slow and exact) for
            both. The report names the backend of each layer, and the reasons.
        lora: adapters to train; the model's own parameters are then frozen.
        gradient_checkpointing: the residuals that each block saves: "none" saves all, "dots" the outputs of
            its layers' dots, "dots_fp8" these outputs in FP8, "dots_fp8_inputs" the block's inputs in FP8,
            too, "fp8" the FP8 operands of its dots, "full" only the block's inputs. The backward recomputes
            the others.
        checkpoint_blocks: class names of the blocks, or path patterns (see `Rule`). None takes the outermost
            repeated modules: siblings of one class, or the module of a scan.
        inputs: example inputs of an NNX module, arrays or `jax.ShapeDtypeStruct`s, to find the kernels by a
            trace. Without inputs, only kernels of Flax's own layers are stored in the recipe's weight format;
            parameters of other modules stay as they are, with FP8 GEMMs.

    Returns:
        A `fp8jax.adapters.linen.LinenModel` with the module's `init` and `apply`; an NNX module of the same
        class name; or a `fp8jax.rewrite.FunctionModel` with `init(params, *args)` and
        `apply(variables, *args)`. With `lora` a `fp8jax.adapters.linen.LoRAModel`, an NNX module with
        adapters, or a `FunctionModel`.

    Raises:
        TypeError: `model` is neither a Flax module nor a function, or is already transformed; an argument has
            another type.
        ValueError: the recipe cannot be parsed, or is not supported; an argument is unknown or contradicts
            the recipe; an NNX model is already transformed; a rule, pattern or argument matches nothing in an
            NNX model (`init` and `apply` raise this for other models).
    """
    if isinstance(rules, Rule) or not isinstance(rules, Iterable):
        raise TypeError(f"`rules`: expected a list of fp8jax.Rule; got {type(rules).__name__}.")
    if not isinstance(lora, LoRA | None):
        raise TypeError(f"`lora`: expected a fp8jax.LoRA, as LoRA(rank=8), or None; got {lora!r}.")
    recipe, rules = Recipe.parse(recipe), tuple(rules)
    remat = checkpointing(gradient_checkpointing, checkpoint_blocks, recipe, rules)
    settings = Settings(recipe, rules, backend, lora, remat)
    if inputs is not None and not nnx.is_module(model):
        raise ValueError(
            "`inputs`: expected None for a model that is not an NNX module; `init` takes inputs."
        )
    for framework in FRAMEWORKS.values():
        if framework.is_plain(model):
            options = {} if inputs is None else {"inputs": tuple(inputs)}
            return framework.transform(model, settings, **options)
    got = _not_a_function(model)
    if got is None:
        return FunctionModel(model, settings, context=flax_context)
    raise TypeError(f"`model`: expected a Flax module, Linen or NNX, or a function of parameters; got {got}.")


def _not_a_function(model: Any) -> str | None:
    """A description of an argument that is not a function of parameters; None for such a function."""
    if is_transformed(model):
        plain = "fp8jax.adapters.adapter.adapter_of(model).plain()"
        return f"a transformed model ({type(model).__name__}); transform the plain model, `{plain}`"
    held = getattr(model, "module", None)  # as in Hugging Face's FlaxPreTrainedModel
    if linen.is_module(held) or nnx.is_module(held):
        return (
            f"a {type(model).__name__}, which holds a Flax module: transform its `.module`, and give that "
            "its parameters"
        )
    if hasattr(model, "stateless_call"):  # Keras's `fit` calls this function, and not the model
        return (
            f"a {type(model).__name__}, which keeps its variables itself, as Keras does: transform its "
            "`.stateless_call`, see docs/guides/frameworks.md"
        )
    if callable(model) and not jax.tree_util.all_leaves([model]) and not isinstance(model, functools.partial):
        return (
            f"a {type(model).__name__}, a tree with its parameters, as in Equinox: transform a function "
            "of them. params, static = eqx.partition(model, eqx.is_array); "
            "transform(lambda params, x: eqx.combine(params, static)(x), recipe)"
        )
    if isinstance(model, type):
        return f"the class {model.__name__}, not an instance"
    if hasattr(model, "named_parameters"):
        return f"a torch module, {type(model).__name__}, for which there is `fp8jax_torch.prepare`"
    owner = getattr(model, "__self__", None)  # of a method
    if nnx.is_module(owner):
        return f"a method of {type(owner).__name__}, which keeps its parameters: transform the module"
    return None if callable(model) else type(model).__name__


def report(model: Any, *args: Any, **kwargs: Any) -> Report:
    """Which layers of a transformed model run in FP8 for these inputs, and why the others do not.

    Args:
        model: a model from `transform`.
        args, kwargs: the inputs of the model, for a function its parameters first; arrays or
            `jax.ShapeDtypeStruct`s. `method="encode"` reports another method than `__call__`. Nothing is
            computed.

    Raises:
        TypeError: `model` is not transformed.
    """
    return adapter_of(model).report(*args, **kwargs)
