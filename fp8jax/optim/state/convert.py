"""Optimizer states of one recipe in the formats of another, and checks of a state's formats."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.optim import checks
from fp8jax.optim.state import AdamState, DequantizedState, is_masked, is_ours
from fp8jax.optim.state.stored_formats import (
    NONE,
    TO_NEAREST,
    StoredFormats,
    first_key,
    first_remainder,
    first_roundings,
    has_roundings,
    one_adam,
    stored_formats,
)
from fp8jax.optim.step import ParamState
from fp8jax.optim.step.codecs import decode, encode_alone, name_of, zeros
from fp8jax.optim.step.weight_rounding import decode_weight
from fp8jax.optim.storage import is_stored
from fp8jax.optim.wrappers import filled, in_variables, with_variables_inside, without_variables
from fp8jax.quantization import format_of, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, has_params

_LABELS = StoredFormats("first moments", "second moments", "master weights", "remainders")


def convert(
    state: Any,
    params: Any,
    recipe: Recipe | str | None,
    *,
    seed: int = 0,
    zero: Zero | None = None,
    in_8_bits: bool = False,
) -> Any:
    """An optimizer state in the formats of another recipe, so that a run can go on with that recipe.

        state = fp8jax.optim.convert(state, params, "fp8")
        tx = fp8jax.optim.adamw(3e-4, "fp8")

    Moments and master weights are decoded to float32 and rounded to nearest; those that have the format
    already keep their bits. New remainders are zero. New master weights are the weights, see `with_masters`.
    Step counts and all other states stay.

    A state does not tell bfloat16 from float16 weights. After a cast from one to the other first drop the
    remainders, by a recipe that rounds weights to nearest, as "fp8,rounding=stochastic+nearest+root".

    The state of `optax.adam` or `optax.adamw` becomes the one of this package's `adam` and `adamw`, with the
    moments and the number of steps, from which a schedule goes on.

    Args:
        state: the state of an optimizer of this package, or of `optax.adam` or `optax.adamw`; or a state that
            contains such states: of `optax.chain`, `optax.MultiSteps`, `optax.masked`,
            `optax.multi_transform`, `optax.inject_hyperparams`.
        params: the parameters, or whole variables. They are not changed.
        recipe: the recipe of the new optimizer, as in `adamw`.
        seed: as in `adamw`; for a state that has no random key yet.
        zero: as in `adamw`: the new state is placed as `init` places it.
        in_8_bits: True for `adamw_8bit`.

    Raises:
        ValueError: `state` has no such state, or belongs to other parameters; or the weights of the recipe
            are not those of the parameters; or `optax.inject_hyperparams` has an `eps_root` that is not 0.
    """
    row = checks.recipe_of(recipe)
    params = without_variables(params[PARAMS] if has_params(params) else params)
    checks.check_weights(row, params)
    if not any(map(_is_known, jax.tree.leaves(state, is_leaf=_is_known))):
        raise ValueError(
            "`state`: expected the state of an optimizer of fp8jax.optim, of optax.adam or of optax.adamw in "
            "it; got none."
        )

    def rebuild(node: Any) -> Any:
        node = _of_optax(node) if _is_of_optax(node) else node
        if _is_injected(node):
            inner = jax.tree.map(rebuild, node.inner_state, is_leaf=_is_known)
            return node._replace(inner_state=inner, hyperparams=_without_eps_root(node.hyperparams))
        if isinstance(node, DequantizedState):
            return _converted_roundings(node, params, row, seed)
        if isinstance(node, AdamState):
            return _converted(node, params, row or Recipe.O3, seed, zero, in_8_bits)
        return node

    return jax.tree.map(rebuild, state, is_leaf=_is_known)


def masters(state: Any, params: Any) -> Any:
    """The parameters in float32, as exact as the state has them: to go on without its master weights.

        plain = {"params": fp8jax.optim.masters(opt_state, variables)}

    Args:
        state: an optimizer state that contains one `adam`, `adamw` or `muon`.
        params: its parameters, or whole variables.

    Returns:
        A tree like the parameters, with the master weight, or the weight where there is none, plus the
        remainder. Parameters that `optax.partition` or `masked` freezes have their values.

    Raises:
        ValueError: `state` has no Adam or more than one, or belongs to other parameters.
    """
    tree, adam = params[PARAMS] if has_params(params) else params, one_adam(state)
    treedef, mus, _, *rows = _flat(adam, without_variables(tree))
    new = []
    for mu, param, master, remainder in zip(mus, *rows, strict=True):
        if is_masked(mu):
            new.append(jax.tree.map(decode, param, is_leaf=is_scaled))
            continue
        parts = jax.tree.map(_fetched, (param if master is None else master, remainder))
        new.append(decode_weight(*parts))
    return in_variables(tree, treedef.unflatten(new))


def check_formats(
    leaves: list[ParamState],
    key: Any,
    recipe: Recipe | None,
    in_8_bits: bool,
    matrices: tuple[Any, ...],
) -> None:
    """Raises ValueError if an Adam's state does not have the formats of its recipe.

    Args:
        leaves: the state of each parameter.
        key: the random key of the state.
        recipe: the optimizer's recipe.
        in_8_bits: whether moments are in 8-bit blocks.
        matrices: as in `first_state`.
    """
    row, differences = recipe or Recipe.O3, []
    for leaf, axes in zip(leaves, matrices, strict=True):
        param, is_matrix = leaf.grad if leaf.param is None else leaf.param, axes is not None
        wanted = stored_formats(param, row, in_8_bits, is_matrix=is_matrix)
        if leaf.param is None:  # directions, without weights
            wanted = wanted._replace(remainder=NONE)
        have = StoredFormats(*map(_name_of, (leaf.mu, leaf.nu, leaf.master, leaf.remainder)))
        each = zip(_LABELS, have, wanted, strict=True)
        differences += [f"{what}: {got} instead of {want}" for what, got, want in each if got != want]
    _refuse([*differences, *_of_keys(key, row.rounding != TO_NEAREST)], recipe, in_8_bits)


def check_roundings(leaves: list[Any], remainders: list[Any], key: Any, recipe: Recipe | None) -> None:
    """Raises ValueError if a `DequantizedState` does not have the remainders and the key of its recipe.

    Args:
        leaves: the parameters.
        remainders: their remainders.
        key: the random key of the state.
        recipe: the recipe of the optimizer.
    """
    wanted = [stored_formats(leaf, recipe or Recipe.FP8, False).remainder for leaf in leaves]
    pairs = zip(map(_name_of, remainders), wanted, strict=True)
    differences = [f"{_LABELS.remainder}: {got} instead of {want}" for got, want in pairs if got != want]
    needs_key = has_roundings(leaves, recipe or Recipe.FP8)
    _refuse([*differences, *_of_keys(key, needs_key)], recipe, False)


def _is_known(node: Any) -> bool:
    return is_ours(node) or _is_of_optax(node) or _is_injected(node)


def _is_of_optax(node: Any) -> bool:
    """Whether a node is the state of `optax.adam` or `optax.adamw`, a tuple, or of `optax.scale_by_adam`.

    A tuple with other states than counts of steps is a chain of the user's, of which nothing may be lost.
    """
    first, *others = node if type(node) is tuple and node else (node,)
    return isinstance(first, optax.ScaleByAdamState) and all(x.ndim == 0 for x in jax.tree.leaves(others))


def _is_injected(node: Any) -> bool:
    """Whether a node is the state of `optax.inject_hyperparams` around an Adam of optax."""
    inner = jax.tree.leaves(getattr(node, "inner_state", ()), is_leaf=_is_of_optax)
    return hasattr(node, "hyperparams") and any(map(_is_of_optax, inner))


def _without_eps_root(hyperparams: Any) -> dict[str, Any]:
    """The hyperparameters without one that this package's optimizers do not have."""
    others = dict(hyperparams)
    eps_root = others.pop("eps_root", 0)
    if not isinstance(eps_root, jax.core.Tracer) and eps_root != 0:
        raise ValueError(
            f"`state`: expected the hyperparameter eps_root=0; got {eps_root:g}. Set it to 0, or call `init`."
        )
    return others


def _of_optax(state: Any) -> AdamState:
    """A state of optax as one of this package with float32 moments."""
    adam = state if isinstance(state, optax.ScaleByAdamState) else state[0]
    mu, nu = jax.tree.map(lambda x: x.astype(jnp.float32), (adam.mu, adam.nu))
    return AdamState(optax.ScaleByAdamState(adam.count, mu, nu), None, jnp.zeros([], jnp.int32))


def _of_keys(key: Any, needs_key: bool) -> list[str]:
    if (key is not None) == needs_key:
        return []
    return [f"random key: {'none instead of one' if needs_key else 'one instead of none'}"]


def _refuse(differences: list[str], recipe: Recipe | None, in_8_bits: bool) -> None:
    if not differences:
        return
    name = None if recipe is None else str(recipe)
    change = f"`fp8jax.optim.convert(state, params, {name!r}{', in_8_bits=True' if in_8_bits else ''})`"
    remedy = f"Change the state with {change}, or begin a new one with `init`."
    if any(each.startswith(_LABELS.nu) and NONE in each for each in differences):
        remedy = (
            "Begin a new state with `init`: Muon has no second moments, and `convert` makes no state of Adam "
            "from one of Muon, or the reverse. `fp8jax.optim.masters(state, params)` gives the weights."
        )
    raise ValueError(
        f"`state`: expected the formats of the optimizer's recipe, {name}; got "
        f"{', '.join(dict.fromkeys(differences))}. {remedy}"
    )


def _name_of(stored: Any) -> str:
    """The name of a storage, as in `StoredFormats`."""
    return NONE if stored is None else name_of(stored)


def _converted(
    state: AdamState, params: Any, recipe: Recipe, seed: int, zero: Zero | None, in_8_bits: bool
) -> AdamState:
    treedef, *rows = _flat(state, params)
    new = []
    for mu, nu, param, master, remainder in zip(*rows, strict=True):
        if is_masked(mu):
            new.append([mu] * 4)
            continue
        old = ParamState(None, mu, nu, param, master, remainder)
        leaf = _converted_leaf(old, stored_formats(param, recipe, in_8_bits, is_matrix=nu is None))
        new.append(leaf if zero is None else [zero.place_state(stored, param) for stored in leaf])
    mu, nu, master, remainder = (
        with_variables_inside(treedef.unflatten(leaf[i] for leaf in new)) for i in range(4)
    )
    key = first_key(recipe, seed)
    key = state.key if key is not None and state.key is not None else key
    numbers: Any = state.adam.count, state.skipped, key
    count, skipped, key = numbers if zero is None else jax.tree.map(zero.replicated, numbers)
    return AdamState(optax.ScaleByAdamState(count, mu, nu), master, skipped, remainder, key)


def _flat(state: AdamState, params: Any) -> tuple[Any, ...]:
    """The tree of a state, in which `is_masked` nodes are leaves, and its moments, parameters, master weights
    and remainders; beside a masked leaf are parts of the other trees.

    Raises:
        ValueError: the state is of other parameters.
    """
    mus, nus, *others = (without_variables(tree) for tree in (*state.adam[1:], state.master, state.remainder))
    nus, *others = (filled(tree, mus) for tree in (nus, *others))
    mus, treedef = jax.tree.flatten(mus, is_leaf=_is_stored)
    nothing = [None] * len(mus)
    try:
        nus, params = treedef.flatten_up_to(nus), treedef.flatten_up_to(params)
        others = [nothing if tree is None else treedef.flatten_up_to(tree) for tree in others]
    except (TypeError, ValueError):
        raise ValueError(
            "`params`: expected the parameters that `state` was made for; got another tree."
        ) from None
    for mu, param in zip(mus, params, strict=True):
        if not is_masked(mu) and mu.shape != param.shape:
            raise ValueError(
                f"`params`: expected the parameters that `state` was made for, here {mu.shape}; got "
                f"{param.shape}."
            )
    return treedef, mus, nus, params, *others


def _converted_roundings(
    state: DequantizedState, params: Any, recipe: Recipe | None, seed: int
) -> DequantizedState:
    remainder, key, count = first_roundings(params, recipe, seed)
    if state.remainder is not None and remainder is not None:
        new, old = (filled(without_variables(tree), params) for tree in (remainder, state.remainder))
        remainder = with_variables_inside(jax.tree.map(_same_remainder, new, old, is_leaf=_is_none))
    if state.key is not None and key is not None:
        key, count = state.key, state.count
    return DequantizedState(state.inner, state.skipped, remainder, key, count)


def _is_stored(node: Any) -> bool:
    return is_stored(node) or is_masked(node)


def _converted_leaf(old: ParamState, wanted: StoredFormats) -> list[Any]:
    """The moments, the master weight and the remainder of one parameter in other formats."""
    old = jax.tree.map(_fetched, old)
    old = old if _is_of_weight(old) else old._replace(remainder=None)
    master = old.master
    if _name_of(master) != wanted.master:
        weight = decode_weight(old.param if master is None else master, old.remainder)
        master = None if wanted.master == NONE else _stored_as(weight, wanted.master, old.param)
    remainder = None
    if wanted.remainder != NONE:
        # A remainder belongs to the codes of one array, the weight or the master weight.
        is_same = old.remainder is not None and _name_of(old.master) == wanted.master
        remainder = old.remainder if is_same else first_remainder(old.param, wanted)
    moments = [
        moment
        if moment is None or _name_of(moment) == name
        else _stored_as(decode(moment), name, old.param, signed)
        for moment, name, signed in ((old.mu, wanted.mu, True), (old.nu, wanted.nu, False))
    ]
    return [*moments, master, remainder]


def _is_none(node: Any) -> bool:
    return node is None


def _same_remainder(new: Any, old: Any) -> Any:
    """The old remainder, if it is of a weight in the new one's format."""
    return old if new is not None and old is not None and old.dtype == new.dtype else new


def _is_of_weight(old: ParamState) -> bool:
    """Whether the remainder can be of the parameter, or of the master weight: an FP16 weight's is not of the
    E4M3 weight or the 16-bit array that the weight became."""
    if old.remainder is None or old.master is not None:
        return True
    if is_scaled(old.param):
        return format_of(old.param) == formats.FP16 and old.remainder.dtype == formats.E4M3.dtype
    return old.remainder.dtype == jnp.int8


def _fetched(x: jax.Array) -> jax.Array:
    """The array, copied to the device if `Zero.offload` put it into the host's memory, where JAX does not
    compute."""
    is_offloaded = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if is_offloaded else x


def _stored_as(x: jax.Array, name: str, param: Any, signed: bool = True) -> Any:
    """A float32 array in the storage of this name, with the scale blocks of a parameter."""
    return encode_alone(x, zeros(param, name, signed=signed))
