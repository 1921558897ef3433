"""Codes and scales that a checkpoint gives as dicts, because it was restored without a target."""

from collections.abc import Mapping
from typing import Any

from fp8jax.formats import ALL, BF16
from fp8jax.quantization.array import ScaledArray, is_scaled
from fp8jax.variables import named_leaves

# The dtypes of the codes of stored parameters.
_CODES = tuple(format.dtype for format in ALL if format.bits <= 16 and format != BF16)


def refuse_dicts(tree: Any) -> None:
    """Raises TypeError if a tree has the codes and scale of a `ScaledArray` as a dict."""
    for name, node in named_leaves(tree, lambda x: is_scaled(x) or _is_dict_of_parts(x)):
        if _is_dict_of_parts(node):
            raise TypeError(
                f"expected a `ScaledArray` at {name!r}; got its codes and scale as a dict, as a checkpoint "
                "gives them without a target. Put them together: "
                "flax.serialization.from_state_dict(target, restored), with a target like the tree that was "
                "saved, such as the variables of `model.init`."
            )


def _is_dict_of_parts(node: Any) -> bool:
    if not isinstance(node, Mapping) or set(node) != {"data", "scale"}:
        return False
    if getattr(node["data"], "dtype", None) not in _CODES or not hasattr(node["scale"], "dtype"):
        return False
    try:
        ScaledArray(**node).validate()  # the scale, or its bits
    except ValueError:
        return False  # a user's own parameters of these names
    return True
