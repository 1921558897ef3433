"""Adam's state, between a `torch.optim.Optimizer` and an optax state.

    torch, per parameter                                  optax, a tree each
    exp_avg, exp_avg_scale                                adam.mu: ScaledArray, or array without a scale
    exp_avg_sq, exp_avg_sq_scale                          adam.nu
    master, master_scale (where the recipe has masters)   master
    step                                                  adam.count, one for all
    the optimizer's attribute `skipped`                   skipped

The optax state is found by the names of its fields, anywhere in a chain: `AdamState(adam, master, skipped)`
of fp8jax, or `ScaleByAdamState(count, mu, nu)` of optax. Other states of a chain stay, except the counters of
schedules, which count skipped steps, too.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from fp8jax_torch.bridge.names import NameMap
from fp8jax_torch.bridge.pairs import paired
from fp8jax_torch.bridge.tree import Key, Tree, codes_and_scale, named
from fp8jax_torch.bridge.weights import leaves_of, tensors_of
from fp8jax_torch.scaled import ScaledTensor

_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
_MASTER = "master"


def optimizer_to_flax(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, mapping: NameMap, like: Any
) -> Any:
    """The optax state of a torch Adam, bit for bit.

    Args:
        optimizer: an Adam or AdamW of `fp8jax_torch.optim` or torch, after at least one step.
        model: with the optimizer's parameters.
        mapping: from torch's names, as for `to_flax`.
        like: state of the optax optimizer, `tx.init(variables)`, with the same recipe; for NNX
            `optimizer.opt_state`.

    Returns:
        A state with the structure of `like`. FP8 moments of stacked layers have a scale per layer, as in
        torch, also where `like` has one for all (biases and norms).

    Raises:
        ValueError: a parameter's state has no partner on the other side, or one of another shape or format;
            parameters took different numbers of steps; or `like` has no Adam, or more than one.
    """
    tree = named(like)
    adam, outer = _adam_in(tree)
    parameters = _parameters(optimizer, model)
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    _check_states(states)
    leaves: dict[Key, Any] = {}
    for entry, prefix in _entries(adam, outer).items():
        below = tree.below(prefix)
        tensors = {name: _tensor(state, entry) for name, state in states.items() if entry in state}
        pairs = paired(f"optimizer` ({entry}) and `like", tensors, mapping, below)
        leaves |= {
            (*prefix, *key): leaf for key, leaf in leaves_of(tensors, pairs, below, share=False).items()
        }
    steps = {int(state["step"]) for state in states.values()}
    if len(steps) != 1:
        raise ValueError(
            "`optimizer`: expected parameters that took the same number of steps, which is one number in "
            f"optax; got {sorted(steps)}."
        )
    skipped = int(getattr(optimizer, "skipped", 0))
    return tree.rebuilt(leaves | _counters(tree, adam, outer, steps.pop(), skipped))


def optimizer_from_flax(
    state: Any, model: torch.nn.Module, mapping: NameMap, like: torch.optim.Optimizer
) -> dict[str, Any]:
    """The torch `state_dict` of an optax Adam's state: the inverse of `optimizer_to_flax`.

        optimizer.load_state_dict(optimizer_from_flax(state, model, GPT2, like=optimizer))

    Args:
        state: of an optax chain with one Adam; for NNX `optimizer.opt_state`.
        model: with the torch optimizer's parameters.
        mapping: from torch's names, as for `to_flax`.
        like: the torch optimizer; its hyperparameters stay.

    Returns:
        `like.state_dict()` with copies of the optax state's moments, masters and step, and under "skipped"
        the number of skipped steps, where optax counts them.

    Raises:
        ValueError: a parameter has no partner on the other side, or one of another shape; or `state` has no
            Adam, or more than one.
    """
    tree = named(state)
    adam, outer = _adam_in(tree)
    parameters = _parameters(like, model)
    count = float(tree.leaves[(*adam, "count")])
    states: dict[str, dict[str, Any]] = {
        name: {"step": torch.tensor(count, dtype=torch.float32)} for name in parameters
    }
    for entry, prefix in _entries(adam, outer).items():
        below = tree.below(prefix)
        wanted = {}
        for name, parameter in parameters.items():
            place = mapping.place(name)
            leaf = below.leaves.get(place.path) if place else None
            if entry != _MASTER or leaf is not None:  # not every parameter has a master
                wanted[name] = _like(parameter, leaf)
        pairs = paired(f"state` ({'/'.join(prefix)}) and `like", wanted, mapping, below)
        for name, tensor in tensors_of(below, pairs, wanted, share=False).items():
            if isinstance(tensor, ScaledTensor):
                states[name] |= {entry: tensor.codes, f"{entry}_scale": tensor.scale}
            else:
                states[name][entry] = tensor
    new = like.state_dict()
    new["state"] = dict(enumerate(states[name] for name in parameters))
    if (*outer, "skipped") in tree.leaves:
        new["skipped"] = int(tree.leaves[(*outer, "skipped")])
    return new


def _adam_in(tree: Tree) -> tuple[Key, Key]:
    """The names of the one Adam in a state, and of fp8jax's state around it; the same for optax's Adam."""
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
    return adam, adam[:-1] if adam[-1:] == ("adam",) else adam


def _entries(adam: Key, outer: Key) -> dict[str, Key]:
    """The entries of a parameter's torch state, and the names of their optax trees."""
    return {entry: (*adam, tree) for entry, tree in _MOMENTS.items()} | {_MASTER: (*outer, _MASTER)}


def _counters(tree: Tree, adam: Key, outer: Key, step: int, skipped: int) -> dict[Key, jax.Array]:
    """The counters of a state after so many steps taken and skipped."""
    numbers = {}
    for key in tree.leaves:
        if key == (*adam, "count"):
            numbers[key] = step
        elif key == (*outer, "skipped"):
            numbers[key] = skipped
        elif key[-1] == "count" and key[: len(adam)] != adam:
            numbers[key] = step + skipped  # a schedule's, which does not know of skipped steps
    return {
        key: jnp.full(tree.leaves[key].shape, number, tree.leaves[key].dtype)
        for key, number in numbers.items()
    }


def _parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in the order of its `state_dict`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in listed):
        raise ValueError("`model`: expected the model whose parameters the optimizer trains; got another.")
    return {names[id(parameter)]: parameter for parameter in listed}


def _check_states(states: Mapping[str, Mapping[str, Any]]) -> None:
    known = {"step", *(name for entry in (*_MOMENTS, _MASTER) for name in (entry, f"{entry}_scale"))}
    for name, state in states.items():
        absent = {"step", *_MOMENTS} - set(state)
        if absent:
            raise ValueError(
                f"`optimizer`: expected the state of an Adam of every parameter; for {name} got "
                f"none of {sorted(absent)}. It has them after a step in which the parameter had a gradient; "
                "before that, `tx.init` gives the state."
            )
        if set(state) - known:
            raise ValueError(
                f"`optimizer`: expected an Adam; got one that keeps {sorted(set(state) - known)}, here for "
                f"{name}, which optax's does not (`amsgrad`)."
            )


def _tensor(state: Mapping[str, Any], entry: str) -> torch.Tensor:
    """A moment or master, as a `ScaledTensor` where torch has a scale."""
    scale = state.get(f"{entry}_scale")
    return state[entry] if scale is None else ScaledTensor(state[entry], scale)


def _like(parameter: torch.Tensor, leaf: Any) -> torch.Tensor:
    """An empty tensor with a parameter's shape and a Flax leaf's format."""
    if leaf is None:
        return torch.empty_like(parameter, device="meta")
    codes, scale = codes_and_scale(leaf)
    dtype = getattr(torch, str(codes.dtype))
    empty = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    return empty if scale is None else ScaledTensor(empty, torch.ones((), device=parameter.device))
