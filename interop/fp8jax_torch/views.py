"""Views of a `ScaledTensor`: its values, which cannot be written.

torch's views share memory with their tensor. A dequantized view is a copy, so that a write to it would be
lost.
"""

from typing import Any

import torch
from jaxtyping import Shaped
from torch.utils import _pytree as pytree


class View(torch.Tensor):
    """Values that can be read, as a tensor, and raise RuntimeError where they are written.

    Attributes:
        plain: the values.
    """

    plain: Shaped[torch.Tensor, "..."]

    @staticmethod
    def __new__(cls, plain: Shaped[torch.Tensor, "..."]) -> "View":
        """See the class."""
        options: dict[str, Any] = {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
        options |= {"dtype": plain.dtype, "device": plain.device}
        self = torch.Tensor._make_wrapper_subclass(cls, plain.shape, **options)
        self.plain = plain
        return self

    def __init__(self, plain: Any):
        pass

    # Results of operations are plain tensors, except for views.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(x, View):
                raise RuntimeError(
                    "`ScaledTensor`: expected no write to a part or a view of it, which is a copy; got "
                    f"{func}. Write items, as in `weight[0] = x`, or the whole tensor, as in "
                    "`weight.copy_(x)`."
                )
        plain = pytree.tree_map(lambda x: x.plain if isinstance(x, View) else x, (args, kwargs or {}))
        return as_views(func, func(*plain[0], **plain[1]))

    def numpy(self, *, force: bool = False) -> Any:
        """As torch's."""
        return self.plain.numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        """A copy of the values, which may be written."""
        return self.plain.clone().__dlpack__(**options)

    def tolist(self) -> Any:
        """As torch's."""
        return self.plain.tolist()

    def __repr__(self, **ignored: Any) -> str:
        return repr(self.plain)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def as_views(func: Any, out: Any) -> Any:
    """The results of an operation on values, as `View`s if the operation is one of torch's views."""
    kinds = [result.alias_info for result in func._schema.returns]
    if not any(kind is not None and not kind.is_write for kind in kinds):
        return out
    return pytree.tree_map(lambda x: View(x) if type(x) is torch.Tensor else x, out)
