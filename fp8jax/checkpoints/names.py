"""Maps from torch's tensor names to Flax paths, with the order of the dimensions.

    >>> mapping = NameMap((Rename(r"(.*)\\.weight", r"\\1/kernel", axes=(1, 0)),))
    >>> mapping.place("layers.3.up.weight")
    Place(path=('layers', '3', 'up', 'kernel'), layer=(), axes=(1, 0), shape=None)
    >>> mapping.stacked("layers").place("layers.3.up.weight")  # layers that Flax scans
    Place(path=('layers', 'up', 'kernel'), layer=(3,), axes=(1, 0), shape=None)

    >>> mapping.names_of(("layers", "3", "up", "kernel"), (8, 16))
    {(): 'layers.3.up.weight'}

A map leads from torch's names to Flax's. `names_of` leads back where each pattern consists of names and
groups.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


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
            (-1, heads, width) for an attention kernel, where torch has one dimension for all heads, and
            (heads, width) without `axes` for its bias, which is written as a vector. Beside `axes`, -1 is the
            first or last dimension, which torch has, too, and the others are one dimension in torch.
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
        """Brings a torch tensor, or an array in torch's order, into Flax's order.

        Raises:
            ValueError: `shape` does not fit, or `torch_shape` of the result would be another shape.
        """
        ordered = tensor if self.axes is None else _permuted(tensor, self.axes)
        if self.shape is None:
            return ordered
        arranged = ordered.reshape(self.shape)
        if self.axes and self._has_way_back and self.torch_shape(arranged.shape) != tuple(tensor.shape):
            raise ValueError(
                f"`mapping`: expected shape={self.shape} of {'/'.join(self.path)} to have -1 for the "
                f"dimension that torch has, too; got a tensor of shape {list(tensor.shape)}."
            )
        return arranged

    def restore(self, tensor: Any, shape: Sequence[int]) -> Any:
        """Brings a tensor or array from Flax's order into torch's, with the shape `shape`."""
        if self.axes is None:
            return tensor.reshape(tuple(shape))
        inverse = [self.axes.index(axis) for axis in range(len(self.axes))]
        return _permuted(tensor.reshape(tuple(shape[axis] for axis in self.axes)), inverse)

    def torch_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in torch of an array with the shape `shape` in Flax.

        Raises:
            ValueError: it does not follow, because dimensions in the middle are split or joined; or `shape`
                is no shape that `arrange` gives.
        """
        shape, axes = tuple(shape), self.axes
        if self.shape is not None:
            if not self._has_way_back:
                raise ValueError(
                    f"`mapping`: expected a `Rename` with two axes and a shape with -1 at an end for "
                    f"{'/'.join(self.path)}; got axes={axes}, shape={self.shape}."
                )
            if not all(wanted in (-1, got) for wanted, got in itertools.zip_longest(self.shape, shape)):
                raise ValueError(
                    f"`mapping`: expected shape {self.shape} for {'/'.join(self.path)}; got {list(shape)}."
                )
            if axes is None:
                return (math.prod(shape),)  # a vector: the bias of all heads
            split = 1 if self.shape[0] == -1 else len(shape) - 1
            shape = (math.prod(shape[:split]), math.prod(shape[split:]))
        if axes is None:
            return shape
        if len(axes) != len(shape):
            raise ValueError(
                f"`mapping`: expected {len(axes)} dims for {'/'.join(self.path)}; got shape {list(shape)}. "
                "Layers under a scan, and no others, want `mapping.stacked(name of their container)`."
            )
        return tuple(shape[axes.index(axis)] for axis in range(len(axes)))

    @property
    def _has_way_back(self) -> bool:
        """Whether `torch_shape` can tell the dimensions that `shape` splits."""
        if self.axes is None or self.shape is None:
            return True
        return len(self.axes) == 2 and -1 in (self.shape[0], self.shape[-1])


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
        backs: the same for the way back, of moves that do not stack; None if there is no way back.
    """

    renames: tuple[Rename, ...]
    moves: tuple[tuple[str, str], ...] = ()
    backs: tuple[tuple[str, str] | None, ...] = ()

    def __add__(self, other: "NameMap") -> "NameMap":
        return NameMap(self.renames + other.renames, self.moves + other.moves, self.backs + other.backs)

    def moved(self, pattern: str, path: str, back: tuple[str, str] | None = None) -> "NameMap":
        r"""The map with a part of each path, a regular expression such as `"^transformer/"`, replaced.

        `back`, a regular expression and its replacement, undoes that: `("^(?!lm_head/)", "transformer/")`.
        """
        return dataclasses.replace(self, moves=(*self.moves, (pattern, path)), backs=(*self.backs, back))

    def stacked(self, name: str) -> "NameMap":
        """The map with the numbered layers of a container along axis 0 of each array, as `nn.scan` and
        `nnx.scan` keep them: with the name "h", `h/3/attn/...` is element 3 of `h/attn/...`."""
        move = (rf"(^|/){re.escape(name)}/(\d+)/", rf"\g<1>{name}/[\g<2>]/")
        return dataclasses.replace(self, moves=(*self.moves, move))

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

    def names_of(self, path: Sequence[str], shape: Sequence[int]) -> dict[tuple[int, ...], str]:
        """The torch names of the array at a path, by index: `{(): name}` unless it is a stack of layers.

        Args:
            path: of the array in Flax.
            shape: of the array. A stack has its layers, and a layer its experts, on the first axes.

        Raises:
            ValueError: no rename leads to the path, or to one of its layers.
        """
        before = "/".join(path)
        for back in reversed(self.backs):
            before = re.sub(*back, before) if back else ""
        texts = [rename.flax or "" for rename in self.renames] + [new for _, new in self.moves]
        depths = range(min(len(shape), 2), -1, -1) if any("[" in text for text in texts) else (0,)
        for depth in depths:
            for segments in _with_numbers(tuple(before.split("/")), depth):
                if (first := self._name(segments, (0,) * depth)) is not None:
                    place = self.place(first)
                    if place is not None and (place.path, place.layer) == (tuple(path), (0,) * depth):
                        names = {index: self._name(segments, index) for index in np.ndindex(*shape[:depth])}
                        if lost := [index for index, name in names.items() if name is None]:
                            raise ValueError(
                                f"`mapping`: expected a name for layer {list(lost[0])} of {'/'.join(path)}; "
                                r"got none. `(\d+)` in its `Rename` also has numbers above 9."
                            )
                        return {index: str(name) for index, name in names.items()}
        raise ValueError(
            f"`mapping`: expected a rename that leads to {'/'.join(path)}; got none. Add a `Rename` with a "
            "pattern of names and groups, as `NameMap((Rename(...),)) + mapping`, or `back` of `moved`."
        )

    def _name(self, segments: Sequence[str], index: tuple[int, ...]) -> str | None:
        """The torch name by the first rename with an inverse that matches a path, with numbers filled in."""
        path = ".".join(segments).format(*index)
        for inverse in filter(None, map(_inverse, self.renames)):
            if match := inverse[0].fullmatch(path):
                name = "".join(part if isinstance(part, str) else match[f"g{part}"] for part in inverse[1])
                return None if "[" in name else name
        return None


def _with_numbers(path: tuple[str, ...], depth: int) -> Iterator[list[str]]:
    """The path with `depth` slots of numbers, as names or as indices."""
    for places in itertools.combinations(range(1, len(path)), depth):
        for forms in itertools.product(("{}", "[{}]"), repeat=depth):
            segments = list(path)
            for place, form in reversed(list(zip(places, forms, strict=True))):
                segments.insert(place, form)
            yield segments


@functools.cache
def _inverse(rename: Rename) -> tuple[re.Pattern[str], list[str | int]] | None:
    """A pattern of Flax paths, joined by ".", and the parts of torch's names: texts, and numbers of groups.

    None without an inverse: the pattern has more than names and groups without groups inside.
    """
    parts: list[str | int] = []
    groups: list[str] = []
    # A group, with groups that capture nothing inside; an escaped character; a character of a name.
    token = re.compile(r"(\((?!\?)(?:\\.|\[[^\]]*\]|\(\?:[^()]*\)|[^()\\])*\))|\\(\W)|([\w.])")
    position = 0
    while position < len(rename.torch):
        if (match := token.match(rename.torch, position)) is None:
            return None
        position = match.end()
        if match[1]:
            groups.append(match[1][1:-1])
        parts.append(len(groups) if match[1] else match[2] or match[3])
    if rename.flax is None:
        return None
    pattern, used = "", set[int]()
    for piece in re.split(r"(\\\d)", rename.flax.replace("/", ".")):
        number = int(piece[1:]) if re.fullmatch(r"\\\d", piece) else 0
        if not number:
            pattern += re.escape(piece)
        elif number in used:
            pattern += f"(?P=g{number})"
        else:
            pattern += f"(?P<g{number}>{groups[number - 1]})"
            used.add(number)
    return (re.compile(pattern), parts) if used >= set(range(1, len(groups) + 1)) else None
