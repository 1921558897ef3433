"""The options that name a model, and the model."""

import argparse
from collections.abc import Iterable
from typing import Any

from fp8jax.recipe import Recipe

SIZES = {
    "layers": "blocks (default 12, or as the model's name says)",
    "heads": "attention heads (default 12, or as the model's name says)",
    "width": "channels (default 768, or as the model's name says)",
    "context": "tokens of a sequence (default 2048, or as the model's name says)",
    "vocabulary": "of the head (default 50304)",
    "experts": "of a mixture in the place of each MLP (default none)",
    "top_k": "experts of a token (default 2)",
    "batch": "sequences on each device (default {batch})",
}
OPTIONS = ("model", *SIZES, "dtype", "remat")


def integer(text: str) -> int:
    """An integer of 32 bits. Its lower limit is checked where it is used."""
    try:
        if abs(int(text)) < 2**31:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number below {2**31}; got {text[:50]!r}")


def add_model(command: argparse.ArgumentParser, default: str | None = "gpt", batch: str = "1") -> None:
    """The options of `subject_of`, with the default model, and what the help says of the default batch."""
    command.add_argument(
        "--model",
        default=default,
        help="gpt (as gpt-125m), gpt-125m, gpt-350m, gpt-7b, llama-8b, gpt-13b, gpt-175b; a transformer's "
        "layer, its mlp or its dense layers alone (31 x 512 tokens, width 4096, unless sizes say otherwise); "
        "or package.module:function, which returns (model, inputs) or (model, inputs, loss), for a "
        "function of parameters (fn, (params, *inputs)) or with a loss, inputs being one device's "
        f"(default {default or 'none'})",
    )
    for name, meaning in SIZES.items():
        command.add_argument(flags([name]), type=integer, help=f"of a gpt: {meaning.format(batch=batch)}")
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of a gpt (default bfloat16)"
    )
    command.add_argument(
        "--remat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of a gpt: keep only the outputs of GEMMs for the backward (default yes)",
    )


def subject_of(args: argparse.Namespace) -> Any:
    """The model that the options name, a `fp8jax.inspect.subject.Subject`."""
    from fp8jax.inspect.subject import subject

    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if ":" in args.model and sizes:
        raise ValueError(f"{flags(sizes)} is of a gpt, and {args.model} has its own sizes; leave it out")
    for recipe in args.recipe if isinstance(args.recipe, list) else ():
        Recipe.parse(recipe)
    return subject(args.model, dtype=args.dtype, remat=args.remat, **sizes)


def flags(names: Iterable[str]) -> str:
    """Options as they are typed."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
