"""Adam's state, between a `torch.optim.Optimizer` and an optax state.

    torch, per parameter                                  optax, a tree of each
    exp_avg, exp_avg_scale                                adam.mu: ScaledArray, or array without a scale
    exp_avg_sq, exp_avg_sq_scale                          adam.nu
    master, master_scale (where the recipe has masters)   master
    step                                                  adam.count, the same for all
    the optimizer's attribute `skipped`                   skipped

What else a chain keeps stays as it is, but for its schedules' counters: these count skipped steps, too.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fp8jax_torch.bridge.adam_state import MASTER, MOMENTS, adam_in, counters, entries
from fp8jax_torch.bridge.check import check
from fp8jax_torch.bridge.move import merged, split
from fp8jax_torch.bridge.names import NameMap
from fp8jax_torch.bridge.slots import paired
from fp8jax_torch.bridge.trees import Key, codes_and_scale, named
from fp8jax_torch.scaled import ScaledTensor, is_scaled


def optimizer_to_flax(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, mapping: NameMap, like: Any
) -> Any:
    """The optax state of a torch Adam, bit for bit.

    Args:
        optimizer: `fp8jax_torch.optim`'s or torch's own Adam or AdamW, after a step at least.
        model: whose parameters it trains.
        mapping: what is where, as for `to_flax`.
        like: state of the optax optimizer, `tx.init(variables)`, of the same recipe; for NNX
            `optimizer.opt_state`.

    Returns:
        A state of the structure of `like`. The FP8 moments of stacked layers have a scale per layer, as in
        torch, also where `like` has one for all (biases and norms).

    Raises:
        ValueError: a parameter's state has no like on the other side, or one of another shape or format;
            parameters took different numbers of steps; or `like` has no Adam, or more than one.
    """
    tree = named(like)
    adam, link = adam_in(tree)
    parameters = _parameters(optimizer, model)
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    _refuse_other_states(states)
    leaves: dict[Key, Any] = {}
    for entry, prefix in entries(adam, link).items():
        below = tree.below(prefix)
        tensors = {name: _tensor(state, entry) for name, state in states.items() if entry in state}
        slots = paired(tensors, mapping, below)
        check(f"optimizer` ({entry}) and `like", tensors, slots, below)
        leaves |= {(*prefix, *key): leaf for key, leaf in merged(tensors, slots, below, share=False).items()}
    steps = {int(state["step"]) for state in states.values()}
    if len(steps) != 1:
        raise ValueError(
            "`optimizer`: expected parameters that took the same number of steps, which is one number in "
            f"optax; got {sorted(steps)}."
        )
    skipped = int(getattr(optimizer, "skipped", 0))
    return tree.rebuilt(leaves | counters(tree, adam, link, steps.pop(), skipped))


def optimizer_from_flax(
    state: Any, model: torch.nn.Module, mapping: NameMap, like: torch.optim.Optimizer
) -> dict[str, Any]:
    """The torch `state_dict` of an optax Adam's state: what `optimizer_to_flax` does, undone.

        optimizer.load_state_dict(optimizer_from_flax(state, model, GPT2, like=optimizer))

    Args:
        state: of an optax chain with one Adam; for NNX `optimizer.opt_state`.
        model: whose parameters the torch optimizer trains.
        mapping: what is where, as for `to_flax`.
        like: the torch optimizer; its hyperparameters are kept.

    Returns:
        What `like.state_dict()` gives, with the optax state's moments, masters and step; and under
        "skipped" the number of steps skipped, where optax counts them. All of it is copied.

    Raises:
        ValueError: a parameter has no like on the other side, or one of another shape; or `state` has no
            Adam, or more than one.
    """
    tree = named(state)
    adam, link = adam_in(tree)
    parameters = _parameters(like, model)
    count = float(tree.leaves[(*adam, "count")])
    states: dict[str, dict[str, Any]] = {
        name: {"step": torch.tensor(count, dtype=torch.float32)} for name in parameters
    }
    for entry, prefix in entries(adam, link).items():
        below = tree.below(prefix)
        dtypes = {key: codes_and_scale(leaf) for key, leaf in below.leaves.items()}
        wanted = {}
        for name, parameter in parameters.items():
            place = mapping.place(name)
            if entry == MASTER and (place is None or place.path not in below.leaves):
                continue  # of an optimizer with masters not every parameter has one
            wanted[name] = _like(parameter, dtypes.get(place.path) if place else None)
        slots = paired(wanted, mapping, below)
        check(f"state` ({'/'.join(prefix)}) and `like", wanted, slots, below)
        for name, tensor in split(wanted, slots, below, share=False).items():
            states[name] |= _in_entries(entry, tensor)
    new = like.state_dict()
    new["state"] = dict(enumerate(states[name] for name in parameters))
    if (*link, "skipped") in tree.leaves:
        new["skipped"] = int(tree.leaves[(*link, "skipped")])
    return new


def _parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in the order of the numbers in its `state_dict`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in listed):
        raise ValueError("`model`: expected the model whose parameters the optimizer trains; got another.")
    return {names[id(parameter)]: parameter for parameter in listed}


def _refuse_other_states(states: Mapping[str, Mapping[str, Any]]) -> None:
    known = {"step", *(name for entry in (*MOMENTS, MASTER) for name in (entry, f"{entry}_scale"))}
    for name, state in states.items():
        absent = {"step", *MOMENTS} - set(state)
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
    """One moment or master; scaled if torch has a scale for it."""
    scale = state.get(f"{entry}_scale")
    return state[entry] if scale is None else ScaledTensor(state[entry], scale)


def _in_entries(entry: str, tensor: Any) -> dict[str, torch.Tensor]:
    if is_scaled(tensor):
        return {entry: tensor.codes, f"{entry}_scale": tensor.scale}
    return {entry: tensor}


def _like(parameter: torch.Tensor, arrays: Any) -> torch.Tensor:
    """A tensor without memory of a parameter's shape, in the format of Flax arrays."""
    if arrays is None:
        return torch.empty_like(parameter, device="meta")
    codes, scale = arrays
    dtype = getattr(torch, str(codes.dtype))
    empty = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    return empty if scale is None else ScaledTensor(empty, torch.ones((), device=parameter.device))
