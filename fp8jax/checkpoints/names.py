"""Maps from torch's tensor names to Flax paths, with the order of the dimensions.

    >>> mapping = NameMap((Rename(r"(.*)\\.weight", r"\\1/kernel", axes=(1, 0)),))
    >>> mapping.place("layers.3.up.weight")
    Place(path=('layers', '3', 'up', 'kernel'), layer=(), axes=(1, 0), shape=None)
    >>> mapping.stacked("layers").place("layers.3.up.weight")  # layers that Flax scans
    Place(path=('layers', 'up', 'kernel'), layer=(3,), axes=(1, 0), shape=None)

A map leads only from torch's names to Flax's. The way back also starts from the torch model's names, so it
needs no inverse.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Rename:
    r"""The place in Flax of the torch tensors with names that match a pattern.

    Attributes:
        torch: regular expression of whole names in a `state_dict`.
        flax: path of the place, with the groups of the pattern as `\1`; a "." counts as "/". A segment `[3]`
            is an index: the tensor is element 3 along axis 0 of the array at the path without the segment.
            None: the Flax model has no such array, and the tensor is left out.
        axes: torch's dimensions in Flax's order, as `torch.permute` takes them; None keeps the order.
        shape: the Flax array's shape where dimensions are split or joined, at most one of them -1:
            (-1, heads, width) for an attention kernel, where torch has one dimension for all heads.
    """

    torch: str
    flax: str | None
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an illegal pattern, permutation or shape."""
        try:
            re.compile(self.torch)
        except re.error as error:
            raise ValueError(
                f"`torch`: expected a regular expression; got {self.torch!r}: {error}."
            ) from None
        if self.axes is not None and sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"`axes`: expected a permutation such as (1, 0); got {self.axes}.")
        if self.shape is not None and self.shape.count(-1) > 1:
            raise ValueError(f"`shape`: expected at most one -1; got {self.shape}.")


class Place(NamedTuple):
    """The place of one torch tensor among Flax variables."""

    path: tuple[str, ...]
    layer: tuple[int, ...] = ()
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    def arrange(self, tensor: Any) -> Any:
        """Brings a torch tensor, or an array in torch's order, into Flax's order."""
        ordered = tensor if self.axes is None else _permuted(tensor, self.axes)
        return ordered if self.shape is None else ordered.reshape(self.shape)

    def restore(self, tensor: Any, shape: Sequence[int]) -> Any:
        """Brings a tensor or array from Flax's order into torch's, with the shape `shape`."""
        if self.axes is None:
            return tensor.reshape(tuple(shape))
        inverse = [self.axes.index(axis) for axis in range(len(self.axes))]
        return _permuted(tensor.reshape(tuple(shape[axis] for axis in self.axes)), inverse)


def _permuted(tensor: Any, axes: Sequence[int]) -> Any:
    """`torch.permute`, or `transpose` of an array."""
    return tensor.permute(*axes) if hasattr(tensor, "permute") else tensor.transpose(axes)


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Renames from torch's names to Flax's paths, and moves within the paths.

    The sum of two maps, `NameMap((Rename(...),)) + GPT2`, tries the first map's renames first.

    Attributes:
        renames: the first rename that matches decides.
        moves: pairs of a regular expression and its replacement in a path, applied in turn.
    """

    renames: tuple[Rename, ...]
    moves: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: "NameMap") -> "NameMap":
        return NameMap(self.renames + other.renames, self.moves + other.moves)

    def moved(self, pattern: str, path: str) -> "NameMap":
        r"""The map with a part of each path, a regular expression such as `"^transformer/"`, replaced."""
        return dataclasses.replace(self, moves=(*self.moves, (pattern, path)))

    def stacked(self, name: str) -> "NameMap":
        """The map with the numbered layers of a container along axis 0 of each array, as `nn.scan` and
        `nnx.scan` keep them: with the name "h", `h/3/attn/...` is element 3 of `h/attn/...`."""
        return self.moved(rf"(^|/){re.escape(name)}/(\d+)/", rf"\g<1>{name}/[\g<2>]/")

    def rename_of(self, name: str) -> Rename | None:
        """The first rename that matches a torch name."""
        return next((rename for rename in self.renames if re.fullmatch(rename.torch, name)), None)

    def place(self, name: str) -> Place | None:
        """The place of a torch tensor by its name; None if no rename matches or Flax has no such array."""
        rename = self.rename_of(name)
        if rename is None or rename.flax is None:
            return None
        match = re.fullmatch(rename.torch, name)
        assert match is not None, rename
        path = match.expand(rename.flax).replace(".", "/")
        for pattern, replacement in self.moves:
            path = re.sub(pattern, replacement, path)
        segments = [segment for segment in path.split("/") if segment]
        indices = tuple(int(s[1:-1]) for s in segments if re.fullmatch(r"\[\d+\]", s))
        names = tuple(s for s in segments if not re.fullmatch(r"\[\d+\]", s))
        return Place(names, indices, rename.axes, rename.shape)
