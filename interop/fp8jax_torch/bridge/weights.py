"""A model's weights and scaling state, between torch's `state_dict` and Flax variables.

Torch does all reordering, splitting and stacking, in both directions: XLA on a CPU would move float8 arrays
by way of float16.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flax import traverse_util
from jaxtyping import PyTree, Shaped

from fp8jax.checkpoints import NameMap, Place
from fp8jax.checkpoints.tree import Key, Tree, codes_and_scale, named
from fp8jax.quantization import ScaledArray
from fp8jax_torch.bridge.arrays import check_64_bits, codes_of, same_bits, to_jax, to_torch
from fp8jax_torch.bridge.pairs import Pair, paired, ties
from fp8jax_torch.scaled import ScaledTensor


def to_flax(
    state_dict: Mapping[str, Shaped[torch.Tensor, "..."]],
    mapping: NameMap,
    like: PyTree = None,
    *,
    share: bool = False,
) -> PyTree:
    """The Flax variables of a torch model, bit for bit.

    A `ScaledTensor` becomes a `ScaledArray`, a plain tensor an array of the same dtype, and the buffers of a
    layer's `fp8` the scaling state of its kernel.

    Args:
        state_dict: of a torch model.
        mapping: `GPT2`, `LLAMA`, `mapping_of(model)`, or another `NameMap`.
        like: variables of the Flax model, transformed by the same recipe: `model.init(...)`, or its
            `jax.eval_shape`; for NNX `nnx.state(model)`, and `nnx.update` puts the result into a model.
            Collections other than parameters and scaling state stay. None: nested dicts of Linen variables
            made from torch's tensors, unchecked.
        share: whether to use torch's memory where the order of dimensions allows it. JAX then sees torch's
            in-place writes (a step of its optimizer); stop using one side before the other goes on.

    Raises:
        ValueError: a tensor has no partner on the other side, or one of another shape or format; one error
            lists all. Or a tensor has values of 64 bits that JAX would change.
    """
    tree = None if like is None else named(like)
    pairs = paired("state_dict", state_dict, mapping, tree)
    for pair in pairs:
        check_64_bits(pair.name, state_dict[pair.name])
    leaves = leaves_of(state_dict, pairs, tree, share=share)
    return traverse_util.unflatten_dict(leaves) if tree is None else tree.rebuilt(leaves | tree.ones())


def from_flax(
    variables: PyTree,
    mapping: NameMap,
    like: Mapping[str, Shaped[torch.Tensor, "..."]],
    *,
    share: bool = False,
) -> dict[str, torch.Tensor]:
    """The torch `state_dict` of a Flax model, bit for bit: the inverse of `to_flax`.

        model.load_state_dict(from_flax(variables, GPT2, like=model.state_dict()))

    Args:
        variables: of a Linen model, or `nnx.state(model)`.
        mapping: from torch's names, as for `to_flax`.
        like: `state_dict` of the torch model, transformed by the same recipe. It gives names, shapes, formats
            and devices. Tensors that Flax does not have (a rename to None) stay.
        share: whether to use JAX's memory where possible. Nothing may then write to the tensors;
            `load_state_dict` copies them.

    Raises:
        ValueError: an array has no partner on the other side, or one of another shape or format; one error
            lists all. Or torch ties two tensors that differ in Flax.
    """
    tree = named(variables)
    new = tensors_of(tree, paired("variables", like, mapping, tree), like, share=share)
    for name, first in ties(like).items():
        if name in new and first in new and not same_bits(new[name], new[first]):
            raise ValueError(
                f"`like`: expected {first} and {name}, one tensor in torch, to be the same in Flax; got "
                "two that differ. Untie them in the torch model (Hugging Face: `tie_word_embeddings=False`)."
            )
    return {name: new.get(name, tensor) for name, tensor in like.items()}


def leaves_of(
    tensors: Mapping[str, torch.Tensor], pairs: Sequence[Pair], tree: Tree | None, *, share: bool
) -> dict[Key, Any]:
    """The Flax leaves of paired torch tensors, on the devices of the tree's leaves.

    Each of the stacked layers gets its scale, also where the tree has one scale for all: for FP8 moments of
    parameters that are not scaled.
    """
    parts: dict[Key, dict[tuple[int, ...], tuple[Any, Place]]] = {}
    for pair in pairs:
        parts.setdefault(pair.key, {}).setdefault(pair.place.layer, (tensors[pair.name], pair.place))
    leaves = {}
    for key, by_index in parts.items():
        like = (None, None) if tree is None else codes_and_scale(tree.leaves[key])
        layers = tuple(n + 1 for n in max(by_index))
        ordered = [by_index[index] for index in sorted(by_index)]
        first = ordered[0][0]
        codes = _stacked([place.arrange(codes_of(tensor)) for tensor, place in ordered], layers)
        is_shared = codes.untyped_storage().data_ptr() == codes_of(first).untyped_storage().data_ptr()
        if is_shared and not share and codes.is_contiguous():
            codes = codes.clone()
        scale = None
        if isinstance(first, ScaledTensor):
            scale = _stacked([tensor.scale.detach() for tensor, _ in ordered], layers).clone()
            is_whole = like[1] is not None and not like[1].ndim
            if layers or not is_whole:
                scale = scale.reshape(layers + (1,) * (codes.ndim - len(layers)))
            scale = to_jax(scale, None if is_whole else getattr(like[1], "sharding", None))
        array = to_jax(codes, getattr(like[0], "sharding", None))
        leaves[key] = array if scale is None else ScaledArray(array, scale)
    return leaves


def tensors_of(
    tree: Tree, pairs: Sequence[Pair], like: Mapping[str, torch.Tensor], *, share: bool
) -> dict[str, torch.Tensor]:
    """The torch tensors of paired Flax leaves, with the shapes and on the devices of `like`."""
    whole: dict[Key, tuple[torch.Tensor, torch.Tensor | None]] = {}
    parts = {}
    for name, key, place in pairs:
        device, shape = like[name].device, like[name].shape
        if key not in whole:
            codes, scale = codes_and_scale(tree.leaves[key])
            whole[key] = to_torch(codes, device), None if scale is None else to_torch(scale, device)
        codes, scale = whole[key]
        part = place.restore(codes[place.layer], shape)
        part = part if share else part.clone(memory_format=torch.contiguous_format)
        if scale is not None:
            scale = scale[place.layer] if scale.ndim else scale
            part = ScaledTensor(part, scale.reshape(()).clone(), like[name].dtype)
        parts[name] = part
    return parts


def _stacked(parts: list[torch.Tensor], layers: tuple[int, ...]) -> torch.Tensor:
    return torch.stack(parts).reshape(layers + tuple(parts[0].shape)) if layers else parts[0]
