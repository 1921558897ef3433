"""A model's weights and scaling state, between torch's `state_dict` and Flax variables."""

from collections.abc import Mapping
from typing import Any

import torch

from fp8jax_torch.bridge.check import check
from fp8jax_torch.bridge.move import merged, same_bits, split
from fp8jax_torch.bridge.names import NameMap
from fp8jax_torch.bridge.slots import paired, ties
from fp8jax_torch.bridge.trees import named, nested


def to_flax(
    state_dict: Mapping[str, torch.Tensor], mapping: NameMap, like: Any = None, *, share: bool = False
) -> Any:
    """The Flax variables of a torch model, bit for bit.

    A `ScaledTensor` becomes a `ScaledArray` of the same codes on the same scale, a plain tensor an array
    of its dtype, and the buffers of a layer's `fp8` the scaling state of its kernel.

    Args:
        state_dict: torch's, of a model that is transformed or not.
        mapping: what is where: `GPT2`, `LLAMA`, `mapping_of(model)`, or a `NameMap` of yours.
        like: variables of the Flax model, transformed by the same recipe: `model.init(...)`, or what
            `jax.eval_shape` makes of it; for NNX `nnx.state(model)`. Names, shapes, formats and
            shardings are its. What torch does not have stays as it is here: `wgrad_scale`, and
            collections other than parameters and scaling state. None: Linen variables of what torch
            has, unchecked.
        share: whether to use torch's memory where the order of dims allows it. What torch then writes in
            place (a step of its optimizer) JAX sees; give one side up before the other goes on.

    Returns:
        Variables of the structure of `like` (`nnx.update(model, them)` puts them into an NNX model), or
        nested dicts. Of tied tensors Flax gets the one that it has a place for.

    Raises:
        ValueError: a tensor has no like on the other side, or one of another shape or format; all that
            do are listed.
    """
    tree = None if like is None else named(like)
    slots = paired(state_dict, mapping, tree)
    check("state_dict", state_dict, slots, tree)
    leaves = merged(state_dict, slots, tree, share=share)
    return nested(leaves) if tree is None else tree.rebuilt(leaves)


def from_flax(
    variables: Any, mapping: NameMap, like: Mapping[str, torch.Tensor], *, share: bool = False
) -> dict[str, torch.Tensor]:
    """The torch `state_dict` of a Flax model, bit for bit: what `to_flax` does, undone.

        model.load_state_dict(from_flax(variables, GPT2, like=model.state_dict()))

    Args:
        variables: of a Linen model, or `nnx.state(model)`.
        mapping: what is where, as for `to_flax`: from torch's names.
        like: `state_dict` of the torch model, transformed by the same recipe. Names, shapes, formats and
            devices are its; what Flax does not have (a rename to None) stays as it is here.
        share: whether to use JAX's memory where it can be. Nothing may then write to the tensors;
            `load_state_dict` copies them.

    Returns:
        A tensor or `ScaledTensor` for each name in `like`.

    Raises:
        ValueError: an array has no like on the other side, or one of another shape or format; all that
            do are listed. Or torch ties two tensors that are different in Flax.
    """
    tree = named(variables)
    slots = paired(like, mapping, tree)
    check("variables", like, slots, tree)
    new = split(like, slots, tree, share=share)
    for name, first in ties(like).items():
        if name in new and first in new and not same_bits(new[name], new[first]):
            raise ValueError(
                f"`like`: expected {first} and {name}, one tensor in torch, to be the same in Flax; got "
                "two that differ. Untie them in the torch model (Hugging Face: `tie_word_embeddings=False`)."
            )
    return {name: new.get(name, tensor) for name, tensor in like.items()}
