"""A model's variables: collections by name, as Flax keeps them.

    {"params": {"fc": {"kernel": k}},                              # what is trained
     "_overwrite_with_gradient": {"fc": {"kernel": state}},        # how FP8 tensors are scaled
     "loss_scale": {"scale": s, "good_steps": n},                  # float16 GEMMs only
     "frozen": {"fc": {"kernel": k}}}                              # what is not trained, beside adapters

The second collection has the name that Flax's TrainState, TransformerEngine and MaxText know:
its "gradient" is its new value.
"""

from collections.abc import Mapping
from typing import Any

PARAMS = "params"
SCALING = "_overwrite_with_gradient"
LOSS_SCALE = "loss_scale"
FROZEN = "frozen"

# All others are the module's own, such as batch statistics, and change as it says.
OURS = (PARAMS, SCALING, LOSS_SCALE, FROZEN)


def has_params(variables: Any) -> bool:
    """Whether `variables` are collections, not parameters alone."""
    return isinstance(variables, Mapping) and PARAMS in variables
