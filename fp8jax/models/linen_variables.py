"""Linen's variables as a user holds them, and as the module takes them.

{"params": {"fc": {"kernel": k}}, "_overwrite_with_gradient": {"fc": {"kernel": state}}}      # outside
{"params": {"fc": {"kernel": k, layers.STATES["kernel"]: state}}}                             # inside
"""

from collections.abc import Mapping
from typing import Any

import jax

from fp8jax.models import layers
from fp8jax.scaling.merge import to_max
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING


def merge(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables as the module takes them: each kernel's scaling state beside the kernel."""
    inside = {name: tree for name, tree in variables.items() if name not in (SCALING, LOSS_SCALE)}
    if jax.sharding.get_abstract_mesh().manual_axes:
        # On one of many devices there is nothing for a box of axis names to constrain.
        inside = layers.with_quiet_boxes(inside)
    inside[PARAMS], others = _merge_params(inside.get(PARAMS, {}), to_max(variables.get(SCALING, {})))
    return {**inside, **({SCALING: others} if others else {})}


def _merge_params(params: Any, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters with the states of their kernels, and the states of products that are no layer's."""
    merged, others = dict(params), {}
    for name, kept in state.items():
        if name not in params:
            others[name] = kept
        elif isinstance(params[name], Mapping):
            merged[name], below = _merge_params(params[name], kept)
            others.update({name: below} if below else {})
        else:
            merged[layers.STATES[name]] = kept
    return merged, others


def split(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `merge`."""
    outside = dict(variables)
    if PARAMS in outside:
        outside[PARAMS], state = _split_params(outside[PARAMS])
        if state:
            outside[SCALING] = _union(state, outside.get(SCALING, {}))
    return outside


def _split_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plain: dict[str, Any] = {}
    state: dict[str, Any] = {}
    names = {of_state: of_param for of_param, of_state in layers.STATES.items()}
    for name, leaf in params.items():
        if name in names:
            state[names[name]] = leaf
        elif isinstance(leaf, Mapping):
            plain[name], below = _split_params(leaf)
            if below:
                state[name] = below
        else:
            plain[name] = leaf
    return plain, state


def _union(a: Any, b: Any) -> Any:
    """The leaves of two trees of mappings."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return a
    return {name: _union(a.get(name, b.get(name)), b.get(name, a.get(name))) for name in {**a, **b}}
