"""Where a torch tensor is in a Flax model: names, and the order of a tensor's dims.

    >>> mapping = NameMap((Rename(r"(.*)\\.weight", r"\\1/kernel", axes=(1, 0)),))
    >>> mapping.place("layers.3.up.weight")
    Place(path=('layers', '3', 'up', 'kernel'), layer=(), axes=(1, 0), shape=None)
    >>> mapping.stacked("layers").place("layers.3.up.weight")  # layers that Flax scans
    Place(path=('layers', 'up', 'kernel'), layer=(3,), axes=(1, 0), shape=None)

A map is read from torch's names to Flax's only. The way back needs no inverse: both ways start from
the names that the torch model has.
"""

import dataclasses
import re
from typing import NamedTuple

import torch


@dataclasses.dataclass(frozen=True)
class Rename:
    r"""What becomes of the torch tensors whose names a pattern fits.

    Attributes:
        torch: regular expression of whole names in a `state_dict`.
        flax: path of its place, with the groups of the pattern as `\1`; a "." counts as "/". A segment
            `[3]` is no name but an index: the tensor is element 3 along axis 0 of the array at the
            path without the segment. None: the tensor has no place in a Flax model and is left out.
        axes: torch's dims in Flax's order, as `torch.permute` takes them; None is as they are.
        shape: the Flax array's shape where it has other dims than these, one of them may be -1:
            (-1, heads, width) of an attention's kernel, whose heads torch has in one dim.
    """

    torch: str
    flax: str | None
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuses what no tensor can be moved by."""
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
    """Where one torch tensor is among Flax variables, and in which order."""

    path: tuple[str, ...]
    layer: tuple[int, ...] = ()
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """A torch tensor in Flax's order."""
        ordered = tensor if self.axes is None else tensor.permute(self.axes)
        return ordered if self.shape is None else ordered.reshape(self.shape)

    def restore(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A tensor in Flax's order in torch's, there of shape `shape`."""
        if self.axes is None:
            return tensor.reshape(shape)
        inverse = [self.axes.index(axis) for axis in range(len(self.axes))]
        return tensor.reshape([shape[axis] for axis in self.axes]).permute(inverse)


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Renames, of which the first that fits a name decides, and moves of the paths that they give.

    Maps add up: in `NameMap((Rename(...),)) + GPT2` the new rule goes before GPT-2's.

    Attributes:
        renames: in the order in which they are tried.
        moves: pairs of a regular expression and what replaces it in a path, each applied in turn.
    """

    renames: tuple[Rename, ...]
    moves: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: "NameMap") -> "NameMap":
        return NameMap(self.renames + other.renames, self.moves + other.moves)

    def moved(self, pattern: str, path: str) -> "NameMap":
        r"""The same tensors elsewhere, wherever a regular expression fits a part of a path.

        Args:
            pattern: regular expression, e.g. `"^transformer/"`.
            path: what to put there, e.g. `""`.
        """
        return dataclasses.replace(self, moves=(*self.moves, (pattern, path)))

    def stacked(self, name: str) -> "NameMap":
        """The same with numbered layers along axis 0 of each array, as `nn.scan` and `nnx.scan` keep them.

        Args:
            name: what holds the layers: with "h", `h/3/attn/...` is element 3 of `h/attn/...`.
        """
        return self.moved(rf"(^|/){re.escape(name)}/(\d+)/", rf"\g<1>{name}/[\g<2>]/")

    def fitting(self, name: str) -> Rename | None:
        """The first rename that fits a torch name."""
        return next((rename for rename in self.renames if re.fullmatch(rename.torch, name)), None)

    def place(self, name: str) -> Place | None:
        """Where the torch tensor of a name is; None if no rename fits or it has no place."""
        rename = self.fitting(name)
        if rename is None or rename.flax is None:
            return None
        fit = re.fullmatch(rename.torch, name)
        assert fit is not None, rename
        path = fit.expand(rename.flax).replace(".", "/")
        for pattern, replacement in self.moves:
            path = re.sub(pattern, replacement, path)
        segments = [segment for segment in path.split("/") if segment]
        indices = tuple(int(s[1:-1]) for s in segments if re.fullmatch(r"\[\d+\]", s))
        names = tuple(s for s in segments if not re.fullmatch(r"\[\d+\]", s))
        return Place(names, indices, rename.axes, rename.shape)
