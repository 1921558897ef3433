"""The first moments, master weights and remainders of Adam, in a recipe's formats."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.optim.nnx_variables import in_variables, without_variables
from fp8jax.optim.state import is_adam_state
from fp8jax.optim.step import Root
from fp8jax.optim.step.codecs import blockwise_zeros, zeros
from fp8jax.quantization import format_of, is_scaled, quantize, value
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, has_params


def first_state(params: Any, recipe: Recipe, in_8_bits: bool) -> list[Any]:
    """The trees of first moments, second moments, master weights and remainders, see `AdamState`.

    Args:
        params: the parameters, arrays and `ScaledArray`s.
        recipe: the formats.
        in_8_bits: whether moments are in 8-bit blocks instead.
    """

    def zero(number: int, param: Any) -> Any:
        if in_8_bits:
            return blockwise_zeros(param, signed=number == 0)
        moment = zeros(param, formats.get(recipe.moments[number]))
        return Root(moment) if number == 1 and recipe.rounding[2] == "root" else moment

    each = (
        lambda param: zero(0, param),
        lambda param: zero(1, param),
        lambda param: _master_of(param, recipe),
        lambda param: _remainder_of(param, recipe),
    )
    return [jax.tree.map(first, params, is_leaf=is_scaled) for first in each]


def with_masters(state: Any, params: Any) -> Any:
    """The optimizer state with master weights from plain weights: a checkpoint, or a new model.

    `init` sees only the FP8 weights, which have lost 2.6% of the plain ones, and sets master weights to their
    values. With this function they are those of `fp8jax_torch.prepare`, which sees the plain weights:

        variables = model.init(key, x)
        opt_state = with_masters(tx.init(variables), module.init(key, x))

    Args:
        state: an optimizer state that contains one `adam` or `adamw`.
        params: parameters of the same structure, plain arrays or `ScaledArray`s, or whole variables.

    Raises:
        ValueError: `state` has no Adam or more than one, or `params` has other names or shapes.
    """
    tree = params[PARAMS] if has_params(params) else params
    found = [node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node)]
    if len(found) != 1:
        raise ValueError(f"`state`: expected the state of one `adam` or `adamw`; got {len(found)} of them.")

    def rebuild(node: Any) -> Any:
        if not is_adam_state(node):
            return node
        new = _masters_from(without_variables(tree), without_variables(node.master))
        return node._replace(master=in_variables(node.master, new))

    return jax.tree.map(rebuild, state, is_leaf=is_adam_state)


def _masters_from(params: Any, masters: Any) -> Any:
    """Master weights with the values of `params`; the boxes around both may be of different classes."""

    def is_place(node: Any) -> bool:
        return node is None or is_scaled(node)

    sources, _ = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    places, treedef = jax.tree.flatten_with_path(masters, is_leaf=is_place)
    names, expected = ([_names(path) for path, _ in leaves] for leaves in (sources, places))
    if names != expected:
        other = sorted({"/".join(path) for path in names} ^ {"/".join(path) for path in expected})
        raise ValueError(f"`params`: expected the parameters of the optimizer; other names are {other[:4]}.")
    new = []
    for name, (_, source), (_, old) in zip(names, sources, places, strict=True):
        if old is not None and old.shape != source.shape:
            raise ValueError(f"`params`: expected shape {old.shape} of {'/'.join(name)}; got {source.shape}.")
        new.append(old if old is None else _like(old, value(source)))
    return treedef.unflatten(new)


def _names(path: Any) -> tuple[str, ...]:
    """The names and numbers of a leaf's path, without those of boxes."""
    kinds = jax.tree_util.DictKey, jax.tree_util.SequenceKey
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds))


def _like(kept: Any, new: jax.Array) -> Any:
    """`new`, a float32 array, in the format of `kept`."""
    if not is_scaled(kept):
        return new.astype(jnp.float32)
    return quantize(new, format_of(kept), power_of_two=True, blocks=kept.scale.shape)


def _master_of(param: Any, recipe: Recipe) -> Any:
    """The master weight of a parameter in the recipe's weight format; None for other parameters."""
    if recipe.master_weight == "-" or not is_scaled(param) or format_of(param).name != recipe.weight:
        return None
    format = formats.get(recipe.master_weight)
    if format == formats.FP32:
        return value(param)
    return quantize(value(param), format, power_of_two=True, blocks=param.scale.shape)


def _remainder_of(param: Any, recipe: Recipe) -> Any:
    """Zeros for what rounding takes from a parameter or its master weight; None for other parameters."""
    if recipe.rounding[1] != "kahan" or not is_scaled(param):
        return None
    is_kept = format_of(param) == formats.FP16 or _master_of(param, recipe) is not None
    return jnp.zeros_like(param.data, formats.E4M3.dtype) if is_kept else None
