"""The formats that a recipe stores moments, master weights and remainders in, and their initial values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.optim.state import is_adam_state, is_masked
from fp8jax.optim.step.codecs import zeros
from fp8jax.optim.step.weight_rounding import is_rounded
from fp8jax.optim.storage import Blockwise, LinearInt8
from fp8jax.optim.storage.base import scaled_zeros
from fp8jax.optim.wrappers import filled, in_variables, with_variables_inside, without_variables
from fp8jax.quantization import format_of, is_scaled, quantize, value
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, has_params

# Names of storages beside those of formats and of `STORAGES`.
NONE, ROOT, INT8 = "none", "root of ", "int8"

# The smallest array with blockwise moments, as in bitsandbytes (`min_8bit_size`).
FEWEST = 4096

TO_NEAREST = ("nearest", "nearest", "value")


class StoredFormats(NamedTuple):
    """The names of the formats in which the state of one parameter is stored."""

    mu: str
    nu: str
    master: str
    remainder: str


def first_state(params: Any, recipe: Recipe, in_8_bits: bool, matrices: tuple[Any, ...]) -> list[Any]:
    """The trees of first moments, second moments, master weights and remainders, see `AdamState`.

    Args:
        params: the parameters, arrays and `ScaledArray`s.
        recipe: the formats.
        in_8_bits: whether moments are in 8-bit blocks instead.
        matrices: for each parameter, what Muon needs to know of it; None for a parameter of Adam.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    pairs = zip(leaves, matrices, strict=True)
    each = [
        _first_of(leaf, stored_formats(leaf, recipe, in_8_bits, is_matrix=axes is not None))
        for leaf, axes in pairs
    ]
    return [treedef.unflatten(stored[i] for stored in each) for i in range(4)]


def stored_formats(param: Any, recipe: Recipe, in_8_bits: bool, *, is_matrix: bool = False) -> StoredFormats:
    """The formats in which a recipe stores the state of one parameter, an array or a `ScaledArray`. A matrix
    of Muon has no second moment, and a first one in `LinearInt8` unless the recipe's are float32."""
    mu, nu = recipe.moments
    if in_8_bits:
        mu = nu = "FP32" if param.size < FEWEST else Blockwise.name
    elif recipe.rounding[2] == "root":
        nu = ROOT + nu
    if is_matrix:
        mu, nu = mu if mu == "FP32" else LinearInt8.name, NONE
    master = remainder = NONE
    if is_scaled(param):
        weight = format_of(param).name
        if recipe.master_weight != "-" and weight == recipe.weight:
            master = recipe.master_weight
        if recipe.rounding[1] == "kahan" and (weight == "FP16" or master != NONE):
            remainder = "E4M3"
    elif recipe.rounding[1] == "kahan" and is_rounded(param, "kahan"):
        remainder = INT8
    return StoredFormats(mu, nu, master, remainder)


def _first_of(param: Any, stored: StoredFormats) -> list[Any]:
    """The first moments, master weight and remainder of one parameter."""
    mu, nu = (
        None if name == NONE else zeros(param, name, signed=signed)
        for name, signed in ((stored.mu, True), (stored.nu, False))
    )
    return [mu, nu, _master_of(param, stored.master), first_remainder(param, stored)]


def first_remainder(param: Any, stored: StoredFormats) -> Any:
    """Zeros for the remainders of one parameter; None for `NONE`."""
    if stored.remainder == NONE:
        return None
    return (
        jnp.zeros_like(param, jnp.int8)
        if stored.remainder == INT8
        else scaled_zeros(param, formats.E4M3).data
    )


def first_key(recipe: Recipe, seed: Any) -> Any:
    """The key of an `AdamState`, shape=(2,), uint32; None for a recipe that rounds to nearest."""
    if recipe.rounding == TO_NEAREST:
        return None
    return jnp.stack([jnp.zeros([], jnp.uint32), jnp.asarray(seed, jnp.uint32)])


def has_roundings(params: list[Any], recipe: Recipe) -> bool:
    """Whether a recipe rounds one of these weights, or its remainder, stochastically.

    Without weights, whether it rounds any: `optax.tree_map_params` calls `init` with a placeholder for them.
    """
    rounding = recipe.rounding[1]
    return rounding != "nearest" and (
        not params or any(is_scaled(param) or is_rounded(param, rounding) for param in params)
    )


def first_roundings(params: Any, recipe: Recipe | None, seed: Any) -> tuple[Any, Any, Any]:
    """The first remainders, key and step count of a `DequantizedState`; None where the recipe needs none.

    Args:
        params: the parameters, arrays and `ScaledArray`s.
        recipe: its `rounding` says how weights are rounded; None for `fp8`'s.
        seed: of the random bits.
    """
    row = recipe or Recipe.FP8
    if not has_roundings(jax.tree.leaves(params, is_leaf=is_scaled), row):
        return None, None, None
    remainder = None
    if row.rounding[1] == "kahan":
        remainder = with_variables_inside(
            jax.tree.map(
                lambda x: first_remainder(x, stored_formats(x, row, False)), params, is_leaf=is_scaled
            )
        )
    return remainder, first_key(row, seed), jnp.zeros([], jnp.int32)


def with_masters(state: Any, params: Any) -> Any:
    """The optimizer state with master weights from plain weights: a checkpoint, or a new model.

    `init` sees only the FP8 weights, which differ from the plain ones by 2.6%, and sets master weights to
    their values. With this function master weights are the plain ones, as `fp8jax_torch.prepare` has them:

        variables = model.init(key, x)
        opt_state = with_masters(tx.init(variables), module.init(key, x))

    Args:
        state: an optimizer state that contains one `adam` or `adamw`.
        params: parameters of the same structure, plain arrays or `ScaledArray`s, or whole variables.

    Raises:
        ValueError: `state` has no Adam or more than one, or `params` has other names or shapes.
    """
    tree = params[PARAMS] if has_params(params) else params
    one_adam(state)

    def rebuild(node: Any) -> Any:
        if not is_adam_state(node):
            return node
        masters = filled(without_variables(node.master), without_variables(node.adam.mu))
        new = _masters_from(without_variables(tree), masters)
        return node._replace(master=in_variables(node.master, new))

    return jax.tree.map(rebuild, state, is_leaf=is_adam_state)


def one_adam(state: Any) -> Any:
    """The only `AdamState` in an optimizer state; raises ValueError if there is none, or more than one."""
    found = [node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node)]
    if len(found) != 1:
        raise ValueError(f"`state`: expected the state of one `adam` or `adamw`; got {len(found)} of them.")
    return found[0]


def _masters_from(params: Any, masters: Any) -> Any:
    """Master weights with the values of `params`; the boxes around both may be of different classes."""

    def is_place(node: Any) -> bool:
        return node is None or is_scaled(node) or is_masked(node)

    places, treedef = jax.tree.flatten_with_path(masters, is_leaf=is_place)
    places = [(_names(path), old) for path, old in places]
    frozen = [name for name, old in places if is_masked(old)]
    expected = [name for name, old in places if not is_masked(old)]
    sources, _ = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    sources = [(_names(path), source) for path, source in sources]
    sources = [pair for pair in sources if not any(pair[0][: len(name)] == name for name in frozen)]
    names = [name for name, _ in sources]
    if names != expected:
        other = sorted({"/".join(path) for path in names} ^ {"/".join(path) for path in expected})
        raise ValueError(f"`params`: expected the parameters of the optimizer; other names are {other[:4]}.")
    new, rest = [], iter(sources)
    for name, old in places:
        source = None if is_masked(old) else next(rest)[1]
        if old is None or source is None:
            new.append(old)
            continue
        if old.shape != source.shape:
            raise ValueError(f"`params`: expected shape {old.shape} of {'/'.join(name)}; got {source.shape}.")
        new.append(_like(old, value(source)))
    return treedef.unflatten(new)


def _names(path: Any) -> tuple[str, ...]:
    """The names and numbers of a leaf's path, without those of boxes."""
    kinds = jax.tree_util.DictKey, jax.tree_util.SequenceKey
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds))


def _like(stored: Any, new: jax.Array) -> Any:
    """`new`, a float32 array, in the format of `stored`."""
    if not is_scaled(stored):
        return new.astype(jnp.float32)
    return quantize(new, format_of(stored), power_of_two=True, blocks=stored.scale.shape)


def _master_of(param: Any, name: str) -> Any:
    """The master weight of a parameter in a format; None for `NONE`."""
    if name == NONE:
        return None
    if name == "FP32":
        return value(param)
    return quantize(value(param), formats.get(name), power_of_two=True, blocks=param.scale.shape)
