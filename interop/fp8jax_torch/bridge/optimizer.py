"""Adam's state, between a `torch.optim.Optimizer` and an optax state.

    torch, per parameter                                  optax, a tree each
    exp_avg                                               adam.mu: array, or ScaledArray
    exp_avg_sq                                            adam.nu
    exp_avg_sq_root                                       adam.nu, a tree of `Root`s
    master (where the recipe has masters)                 master
    remainder (where the recipe says "kahan")             remainder
    NAME_codes, NAME_scale (quantized entries)            a ScaledArray
    step                                                  adam.count, one for all
    the groups' option `seed`, the upper 32 bits first    key
    the optimizer's attribute `skipped`                   skipped

The names of its fields find the optax state anywhere in a chain: `AdamState(adam, master, skipped, remainder,
key)` of fp8jax, or `ScaleByAdamState(count, mu, nu)` of optax. Other states of the chain stay, except the
counters of schedules, which count skipped steps, too.

A run that changes sides keeps its seed, but rounds on by other random bits, which are as good: a parameter's
number and an entry's place are those of the side, see `fp8jax_torch.optim.adam`.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import torch
from jaxtyping import PyTree

from fp8jax.checkpoints import NameMap
from fp8jax.checkpoints.tree import ROOT, Key, Tree, codes_and_scale, named
from fp8jax_torch.bridge.pairs import paired
from fp8jax_torch.bridge.weights import leaves_of, tensors_of
from fp8jax_torch.optim.entries import (
    FIRST,
    SECOND,
    SECOND_ROOT,
    entries_of,
    entry_of,
    names_in,
    not_adams,
)
from fp8jax_torch.scaled import ScaledTensor

_OF_SOME = ("master", "remainder")  # entries that not every parameter has


def optimizer_to_flax(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, mapping: NameMap, like: PyTree
) -> PyTree:
    """The optax state of a torch Adam, bit for bit.

    Args:
        optimizer: an Adam or AdamW of `fp8jax_torch.optim` or torch, after at least one step.
        model: with the optimizer's parameters.
        mapping: from torch's names, as for `to_flax`.
        like: state of the optax optimizer with the same recipe, `tx.init(variables)`; for NNX
            `optimizer.opt_state`. The result has its structure. FP8 moments of stacked layers have a scale
            per layer, as in torch, also where `like` has one for all (biases and norms).

    Raises:
        ValueError: a parameter's state has no partner on the other side, or one of another shape or format;
            parameters took different numbers of steps; or `like` has no Adam, or more than one.
    """
    tree = named(like)
    _refuse_groups("like", tree)
    keys, parameters = _keys_in(tree), _parameters(optimizer, model)
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    step, skipped = _steps_of(states), int(getattr(optimizer, "skipped", 0))
    leaves: dict[Key, Any] = {}
    for entry, (prefix, suffix) in _places_in(tree, keys).items():
        below = tree.below(prefix, suffix)
        tensors = {name: entry_of(state, entry) for name, state in states.items() if entry in names_in(state)}
        pairs = paired(f"optimizer` ({entry}) and `like", tensors, mapping, below)
        new = leaves_of(tensors, pairs, below, share=False)
        leaves |= {(*prefix, *key, *suffix): leaf for key, leaf in new.items()}
    if keys["key"] in tree.leaves:
        seed = _one({group.get("seed", 0) for group in optimizer.param_groups}, "groups with one seed")
        leaves[keys["key"]] = jnp.array([seed >> 32, seed % 2**32], jnp.uint32)
    counters = {keys["count"]: step, keys["skipped"]: skipped}
    adam = keys["count"][:-1]
    for key, old in tree.leaves.items():
        if key[-1] == "count" and key[: len(adam)] != adam:
            counters[key] = step + skipped  # of a schedule
        if key in counters:
            leaves[key] = jnp.full(old.shape, counters[key], old.dtype)
    return tree.rebuilt(leaves)


def optimizer_from_flax(
    state: PyTree, model: torch.nn.Module, mapping: NameMap, like: torch.optim.Optimizer
) -> dict[str, Any]:
    """The torch `state_dict` of an optax Adam's state: the inverse of `optimizer_to_flax`.

        optimizer.load_state_dict(optimizer_from_flax(state, model, GPT2, like=optimizer))

    Args:
        state: of an optax chain with one Adam; for NNX `optimizer.opt_state`.
        model: with the torch optimizer's parameters.
        mapping: from torch's names, as for `to_flax`.
        like: the torch optimizer; its hyperparameters stay, except the seed.

    Raises:
        ValueError: a parameter has no partner on the other side, or one of another shape; or `state` has no
            Adam, or more than one.
    """
    tree = named(state)
    _refuse_groups("state", tree)
    keys = _keys_in(tree)
    parameters = _parameters(like, model)
    step = torch.tensor(float(tree.leaves[keys["count"]]), dtype=torch.float32)
    states: dict[str, dict[str, Any]] = {name: {"step": step.clone()} for name in parameters}
    for entry, (prefix, suffix) in _places_in(tree, keys).items():
        below = tree.below(prefix, suffix)
        wanted = {}
        for name, parameter in parameters.items():
            place = mapping.place(name)
            leaf = below.leaves.get(place.path) if place else None
            if leaf is not None or entry not in _OF_SOME:
                wanted[name] = _like(parameter, leaf)
        pairs = paired(f"state` ({'/'.join(prefix)}) and `like", wanted, mapping, below)
        for name, tensor in tensors_of(below, pairs, wanted, share=False).items():
            states[name] |= entries_of(entry, tensor)
    new = like.state_dict()
    new["state"] = dict(enumerate(states.values()))
    if keys["skipped"] in tree.leaves:
        new["skipped"] = int(tree.leaves[keys["skipped"]])
    if keys["key"] in tree.leaves:
        high, low = map(int, tree.leaves[keys["key"]])
        new["param_groups"] = [{**group, "seed": (high << 32) + low} for group in new["param_groups"]]
    return new


def _refuse_groups(argument: str, tree: Tree) -> None:
    """Raises ValueError if moments have a scale for each group of entries, as PyTorch's have not here."""
    grouped = next((key for key in tree.leaves if key[-1:] == ("exponents",)), None)
    if grouped is not None:
        raise ValueError(
            f"`{argument}`: expected moments that PyTorch has here; got {'/'.join(grouped[:-1])} with scales "
            "of groups. Take the recipe fp8 instead of fp8_6, and adamw instead of muon, on both sides."
        )


def _keys_in(tree: Tree) -> dict[str, Key]:
    """The keys of the one Adam's fields in an optax state."""
    found = {
        key[:i]
        for key in tree.leaves
        for i, name in enumerate(key)
        if name == "mu" and (*key[:i], "count") in tree.leaves
    }
    if len(found) != 1:
        raise ValueError(
            f"`like` or `state`: expected an optax state with one Adam (fields `mu`, `nu`, `count`); "
            f"got {len(found)}."
        )
    [adam] = found
    outer = adam[:-1] if adam[-1:] == ("adam",) else adam
    keys = {name: (*adam, name) for name in ("mu", "nu", "count")}
    return keys | {name: (*outer, name) for name in ("master", "remainder", "key", "skipped")}


def _places_in(tree: Tree, keys: Mapping[str, Key]) -> dict[str, tuple[Key, Key]]:
    """For each of torch's entries how the keys of its leaves in an optax state begin and end."""
    is_root = any(key[-1] == ROOT for key in tree.leaves)
    second = {SECOND_ROOT: (keys["nu"], (ROOT,))} if is_root else {SECOND: (keys["nu"], ())}
    return {FIRST: (keys["mu"], ()), **second, **{name: (keys[name], ()) for name in _OF_SOME}}


def _one(numbers: set[int], expected: str) -> int:
    if len(numbers) != 1:
        raise ValueError(f"`optimizer`: expected {expected}, as optax has; got {sorted(numbers)}.")
    return numbers.pop()


def _parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in the order of its `state_dict`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in listed):
        raise ValueError("`model`: expected the model whose parameters the optimizer trains; got another.")
    return {names[id(parameter)]: parameter for parameter in listed}


def _steps_of(states: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of steps that each parameter took; raises ValueError for other states than Adam's."""
    for name, state in states.items():
        if got := not_adams(state):
            raise ValueError(
                "`optimizer`: expected the state of an Adam of every parameter, without amsgrad, after a "
                "step in which it had a gradient (before that `tx.init` gives the state); got "
                f"{got}, for {name}."
            )
    return _one(
        {int(state["step"]) for state in states.values()}, "parameters that took the same number of steps"
    )


def _like(parameter: torch.Tensor, leaf: Any) -> torch.Tensor:
    """An empty tensor with a parameter's shape and a Flax leaf's format."""
    if leaf is None:
        return torch.empty_like(parameter, device="meta")
    codes, scale = codes_and_scale(leaf)
    dtype = getattr(torch, str(codes.dtype))
    empty = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    return (
        empty
        if scale is None
        else ScaledTensor(empty, torch.ones((), dtype=torch.float32, device=parameter.device))
    )
