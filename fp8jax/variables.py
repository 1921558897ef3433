"""A model's variables: collections by name, as in Flax.

    {"params": {"fc": {"kernel": k}},                              # trained
     "_overwrite_with_gradient": {"fc": {"kernel": state}},        # scaling states
     "loss_scale": {"scale": s, "good_steps": n},                  # float16 GEMMs only
     "frozen": {"fc": {"kernel": k}}}                              # not trained; models with adapters only

Flax's TrainState, TransformerEngine and MaxText know the name of the second collection: its "gradient" is its
new value.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

PARAMS = "params"
SCALING = "_overwrite_with_gradient"
LOSS_SCALE = "loss_scale"
FROZEN = "frozen"
STATISTICS = "batch_stats"  # Flax's collection of a BatchNorm's means and variances

# Other collections, such as batch statistics, belong to the module.
OURS = (PARAMS, SCALING, LOSS_SCALE, FROZEN)

# The collections of Flax's own modules without parameters.
OF_FLAX = (STATISTICS, "cache", "intermediates", "params_axes", "perturbations")


def has_params(variables: Any) -> bool:
    """Whether `variables` are collections rather than parameters."""
    return isinstance(variables, Mapping) and PARAMS in variables


def params_of(variables: Any) -> Any:
    """The parameters among collections, or the tree itself."""
    return params_of(variables[PARAMS]) if has_params(variables) else variables


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths as text, as "fc/kernel"."""
    found = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]


def with_collections(variables: Any, new: dict[str, Any]) -> Any:
    """The variables with new collections: a dict, a `FrozenDict` or another mapping as before."""
    return variables | new if isinstance(variables, dict) else type(variables)({**variables, **new})
