"""The entries of a parameter's state in Adam: plain tensors, and `ScaledTensor`s as codes and a scale.

A quantized moment has other names than torch's, so that `torch.optim.AdamW` finds no moment in its codes:

    exp_avg                              a float32 tensor
    exp_avg_codes, exp_avg_scale         a quantized tensor
"""

from collections.abc import Mapping
from typing import Any

import torch

from fp8jax_torch.scaled import ScaledTensor, is_scaled, value

CODES, SCALE = "_codes", "_scale"
FIRST, SECOND, SECOND_ROOT = "exp_avg", "exp_avg_sq", "exp_avg_sq_root"
NO_E4M4 = "PyTorch has no E4M4 here; take moments=E5M2+FP16, as fp8 has"
ENTRIES = {"step", FIRST, SECOND, SECOND_ROOT, "master", "remainder"}


def entry_of(state: Mapping[str, Any], name: str) -> Any:
    """An entry of a parameter's state: a plain tensor, a `ScaledTensor`, or None."""
    codes = state.get(name + CODES)
    return state.get(name) if codes is None else ScaledTensor(codes, state[name + SCALE])


def entries_of(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse of `entry_of`: what a parameter's state stores."""
    return {name + CODES: x.codes, name + SCALE: x.scale} if is_scaled(x) else {name: x}


def names_in(state: Mapping[str, Any]) -> set[str]:
    """The names of the entries in a parameter's state."""
    return {name.removesuffix(CODES).removesuffix(SCALE) for name in state}


def not_adams(state: Mapping[str, Any]) -> str:
    """Which entries say that a parameter's state is not that of an Adam, as text; "" if none."""
    names = names_in(state)
    absent, unknown = {"step", FIRST} - names, names - ENTRIES
    if unknown:
        return f"the entries {sorted(unknown)} too"
    return f"none of the entries {sorted(absent)}" if absent else ""


def check_names(state: Mapping[str, Any]) -> None:
    """Raises ValueError if a parameter's state is not that of an Adam."""
    if got := not_adams(state):
        raise ValueError(f"`state_dict`: expected the state of an Adam or AdamW without amsgrad; got {got}.")


def with_codes(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state with these names; older states have codes under the names of plain entries."""
    return {name + CODES if name + SCALE in saved else name: entry for name, entry in saved.items()}


def dequantize(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state of `torch.optim.Adam` or `AdamW`, from the `state_dict` of `fp8jax_torch.optim`'s.

        plain = fp8jax_torch.dequantize(model)
        optimizer = torch.optim.AdamW(plain.parameters())
        optimizer.load_state_dict(fp8jax_torch.optim.dequantize(own.state_dict()))

    The tensors are copies, and moments are float32. Master weights and remainders are left out, since the
    plain model has the weights.

    Raises:
        ValueError: the state is of another optimizer.
    """

    def plain(saved: Mapping[str, Any]) -> dict[str, Any]:
        state = with_codes(saved)
        check_names(state)
        first, second, root = (value(entry_of(state, name)) for name in (FIRST, SECOND, SECOND_ROOT))
        moments = {FIRST: first, SECOND: second if root is None else root.square()}
        return {name: x.clone() for name, x in {"step": state["step"], **moments}.items()}

    groups = [{**group} for group in state_dict["param_groups"]]
    for group in groups:
        group.pop("seed", None)
    return {"state": {n: plain(state) for n, state in state_dict["state"].items()}, "param_groups": groups}
