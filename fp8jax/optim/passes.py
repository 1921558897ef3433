"""One Adam step over many tensors, computed twice so that no float32 copy of one is stored.

    new, ok = advance(leaves, numbers, decays)

The first pass reduces the step to the amaxes of what is to be rounded, all of which go into
one array, from which all scales come; the second computes it again and writes the codes. The
barrier between them keeps a GPU's compiler from storing in float32 what it can recompute.
On a CPU both passes go through a tensor piece by piece (`pieces`).
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.optim import pieces
from fp8jax.optim.overwrite import Overwrite
from fp8jax.optim.step import Leaf, Numbers, before_rounding, moved, rounded, to_round
from fp8jax.platforms import by_platform
from fp8jax.scaled import (
    ScaledArray,
    amax_bits,
    amax_from_bits,
    format_of,
    is_scaled,
    scale_of,
    to_bits,
    value,
)

# A leaf's update, mu, nu and master.
Written = tuple[Any, Any, Any, Any]

# How partial amaxes are taken: at most so many, each of at least so many numbers.
_MOST_PARTS, _FEW = 16384, 64


def advance(
    leaves: list[Leaf], numbers: Numbers, decays: tuple[str, ...], axis_name: str | None = None
) -> tuple[list[Written], jax.Array]:
    """What is written of each leaf, and whether the step was taken.

    With `axis_name` the leaves are parts, one on each device of a mesh axis, of tensors that have one
    scale; or whole and the same on all.
    """
    packed, layout = _packed(leaves)
    options = {"whole": True, "layout": layout, "decays": decays}
    # Leaves as they are for a CPU, packed for a GPU: what a branch does not use is not computed.
    amaxes = by_platform(leaves, packed, numbers, cpu=_amaxes_in_pieces, default=_amaxes, **options)
    if axis_name is not None:
        # Not all that reduces over devices keeps a NaN.
        amaxes = lax.pmax(jnp.where(amaxes < jnp.inf, amaxes, jnp.inf), axis_name)
    nodes = [kept for leaf in leaves for kept in to_round(leaf)]
    limits = [np.full(_scale_size(kept), 1.0 if kept is None else format_of(kept).max) for kept in nodes]
    ok = jnp.all(amaxes < jnp.inf)
    scales = scale_of(amaxes, np.concatenate([[], *limits]).astype(np.float32), power_of_two=True)
    scales = (scales, packed[0][_places_of_old(leaves)] if packed[0].size else jnp.ones_like(scales))
    packed, numbers, scales, ok = lax.optimization_barrier((packed, numbers, scales, ok))
    new = by_platform(
        leaves, packed, numbers, scales, ok, cpu=_WRITTEN_IN_PIECES, default=_WRITTEN_WHOLE, **options
    )
    return new, ok


def as_written(leaves: list[Leaf], numbers: Numbers) -> tuple[list[Written], jax.Array]:
    """What `advance` gives of these leaves, in its shapes and in the shardings of the leaves."""
    del numbers
    new = []
    for leaf in leaves:
        moves = leaf.grad if leaf.param is None else leaf.param
        update = Overwrite.by(moves) if is_scaled(leaf.param) else value(moves)
        new.append((update, leaf.mu, leaf.nu, leaf.master))
    return new, jnp.array(True)


def _packed(leaves: list[Leaf]) -> tuple[Any, Any]:
    """The leaves with all scales in one array, and what `_unpacked` needs to undo it.

    Hundreds of scalars that are read, and written in place, are copied by a GPU one by one.
    """
    nodes, treedef = jax.tree.flatten(leaves, is_leaf=is_scaled)
    shapes = tuple(node.scale.shape if is_scaled(node) else None for node in nodes)
    scales = jnp.concatenate(
        [jnp.zeros(0, jnp.float32), *(node.scale.reshape(-1) for node in nodes if is_scaled(node))]
    )
    # The barrier, or the compiler would see the scalars behind their slices.
    packed = (lax.optimization_barrier(scales), [node.data if is_scaled(node) else node for node in nodes])
    return packed, (treedef, shapes)


def _unpacked(packed: Any, layout: Any) -> list[Leaf]:
    (scales, data), (treedef, shapes) = packed, layout
    parts = iter(_parts(scales, [math.prod(shape) for shape in shapes if shape is not None]))
    nodes = [
        node if shape is None else ScaledArray(node, next(parts).reshape(shape))
        for node, shape in zip(data, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, nodes)


def _parts(array: jax.Array, sizes: list[int]) -> list[jax.Array]:
    """Consecutive parts of these sizes."""
    return jnp.split(array, np.cumsum(sizes, dtype=int)[:-1]) if sizes else []


def _scale_size(kept: Any) -> int:
    return 1 if kept is None else kept.scale.size


def _amaxes(
    leaves: list[Leaf], packed: Any, numbers: Numbers, *, layout: Any, decays: tuple[str, ...]
) -> jax.Array:
    """The first pass."""
    del leaves
    partials = []
    for leaf, decay in zip(_unpacked(packed, layout), decays, strict=True):
        tensors = before_rounding(moved(leaf, numbers, decay), leaf)
        for tensor, kept in zip(tensors, to_round(leaf), strict=True):
            partials.append(_partial_amax(tensor, () if kept is None else kept.scale.shape))
    return amax_from_bits(_maxima(partials))


def _amaxes_in_pieces(
    leaves: list[Leaf], packed: Any, numbers: Numbers, *, layout: Any, decays: tuple[str, ...]
) -> jax.Array:
    del packed, layout
    groups = pieces.groups(leaves, decays)
    found = [pieces.amaxes([leaves[i] for i in group], numbers, decays[group[0]]) for group in groups]
    # From the order of the groups to that of the leaves, in one go.
    places = [place for group in groups for place in _places(leaves, group).reshape(-1)]
    flat = [jnp.zeros(0, jnp.float32), *(amaxes.reshape(-1) for amaxes in found)]
    return jnp.concatenate(flat)[np.argsort(places)] if places else flat[0]


def _places_of_old(leaves: list[Leaf]) -> np.ndarray[Any, Any]:
    """Where the scale of each of what is rounded is among all of the leaves; anywhere if it has none."""
    places, seen = [], 0
    for leaf in leaves:
        of_node = {}
        for node in filter(is_scaled, leaf):
            of_node[id(node)] = np.arange(seen, seen + node.scale.size)
            seen += node.scale.size
        places += [of_node.get(id(kept), np.zeros(1, int)) for kept in to_round(leaf)]
    return np.concatenate([np.zeros(0, int), *places])


def _places(leaves: list[Leaf], group: list[int]) -> np.ndarray[Any, Any]:
    """Where a group's scales are among those of all leaves, a row for each of its leaves."""
    sizes = [sum(map(_scale_size, to_round(leaf))) for leaf in leaves]
    ends = np.cumsum(sizes)
    return np.array([np.arange(ends[number] - sizes[number], ends[number]) for number in group])


def _written(
    leaves: list[Leaf],
    packed: Any,
    numbers: Numbers,
    scales: tuple[jax.Array, jax.Array],
    ok: jax.Array,
    *,
    layout: Any,
    decays: tuple[str, ...],
    in_pieces: bool,
) -> list[Written]:
    """The second pass."""
    leaves = leaves if in_pieces else _unpacked(packed, layout)
    sizes = [_scale_size(kept) for leaf in leaves for kept in to_round(leaf)]
    new, old = scales
    # On a CPU not a choice, which would be made again, with all that leads to it, for each scale.
    kept = lax.cond(ok, lambda: new, lambda: old) if in_pieces else jnp.where(ok, new, old)
    kept_scales = iter(_parts(kept, sizes))
    arrays: dict[int, Leaf] = {}
    for group in pieces.groups(leaves, decays) if in_pieces else [[number] for number in range(len(leaves))]:
        together, decay = [leaves[number] for number in group], decays[group[0]]
        way = (pieces.way_to_write(together[0]) if in_pieces else None) or _each_whole
        if len(group) > 1 and pieces.is_small(together[0]):
            way = _stacked if any(map(is_scaled, together[0])) else _each_whole
        places = _places(leaves, group)
        # A slice where it can be: a GPU would gather with a kernel of its own.
        rows = new[places] if len(group) > 1 else new[places[0, 0] : places[0, -1] + 1][None]
        arrays.update(zip(group, way(together, numbers, decay, rows, ok), strict=True))
    return [
        _assembled(leaf, arrays[number], _shaped(leaf, kept_scales)) for number, leaf in enumerate(leaves)
    ]


_WRITTEN_IN_PIECES = functools.partial(_written, in_pieces=True)
_WRITTEN_WHOLE = functools.partial(_written, in_pieces=False)


def _assembled(leaf: Leaf, arrays: Leaf, scales: list[jax.Array]) -> Written:
    """What is written of a leaf, from its new arrays and the scales to keep."""
    rest = iter(scales)
    mu, nu, weight, master = (
        ScaledArray(new, next(rest)) if is_scaled(old) else new
        for new, old in zip(arrays[1:], leaf[1:], strict=True)
    )
    return Overwrite.by(weight) if is_scaled(leaf.param) else arrays.grad, mu, nu, master


def _shaped(leaf: Leaf, scales: Iterator[jax.Array]) -> list[jax.Array]:
    """The scales of a leaf."""
    shapes = [() if kept is None else kept.scale.shape for kept in to_round(leaf)]
    return [next(scales).reshape(shape) for shape in shapes]


def _each_whole(
    leaves: list[Leaf], numbers: Numbers, decay: str, scales: jax.Array, ok: jax.Array
) -> list[Leaf]:
    """What a step makes of each leaf's arrays, the update in the place of the gradient."""
    parts = [
        _shaped(leaf, iter(pieces.parted(row[None], leaf))) for leaf, row in zip(leaves, scales, strict=True)
    ]
    return [_whole(leaf, numbers, decay, part, ok) for leaf, part in zip(leaves, parts, strict=True)]


def _stacked(
    leaves: list[Leaf], numbers: Numbers, decay: str, scales: jax.Array, ok: jax.Array
) -> list[Leaf]:
    """The same, in a branch of its own, or it would be computed again for each row that is taken out."""
    rows, parts = pieces.stacked(leaves), pieces.parted(scales, leaves[0])
    written = lax.cond(
        ok,
        lambda: _whole(rows, numbers, decay, parts, jnp.array(True)),
        lambda: _whole(rows, numbers, decay, parts, jnp.array(False)),
    )
    return pieces.unstacked(written, leaves)


def _whole(leaf: Leaf, numbers: Numbers, decay: str, scales: list[jax.Array], ok: jax.Array) -> Leaf:
    new = moved(leaf, numbers, decay)
    kept = jax.tree.map(
        lambda new, old: _choose(ok, new, old),
        rounded(new, leaf, scales),
        leaf._replace(grad=None, param=leaf.param if is_scaled(leaf.param) else None),
        is_leaf=is_scaled,
    )
    # -0: of zeros XLA makes one array with those that a scan's gradients start from, and keeps it for this.
    return kept._replace(grad=jnp.where(ok, new.update, -0.0))


def _choose(ok: jax.Array, new: Any, old: Any) -> jax.Array:
    if not is_scaled(new):
        return jnp.where(ok, new, old)
    # Codes as integers: XLA on CPU would select among float8 ones by way of float16.
    bits = jnp.where(ok, to_bits(new.data), to_bits(old.data))
    return lax.bitcast_convert_type(bits, new.data.dtype)


def _partial_amax(x: jax.Array, blocks: tuple[int, ...]) -> jax.Array:
    """The `amax_bits` of parts of each block, shape=(blocks, parts): a GPU needs a second kernel to reduce
    these, and `_maxima` lets all tensors share it."""
    blocks = blocks or (1,) * x.ndim
    inner = [dim // count for dim, count in zip(x.shape, blocks, strict=True)]
    kept = next((axis for axis, dim in enumerate(inner) if 1 < dim <= _MOST_PARTS), None)
    if kept is None or math.prod(inner) < _FEW * inner[kept]:
        return amax_bits(x, blocks).reshape(-1, 1)
    parts = tuple(
        dim if axis == kept else b for axis, (dim, b) in enumerate(zip(x.shape, blocks, strict=True))
    )
    split = (*blocks[: kept + 1], inner[kept], *blocks[kept + 1 :])
    return jnp.moveaxis(amax_bits(x, parts).reshape(split), kept + 1, -1).reshape(-1, inner[kept])


def _maxima(partials: list[jax.Array]) -> jax.Array:
    """The largest of each row of these arrays, one after the other; a reduction per width."""
    groups: dict[int, list[jax.Array]] = {}
    for partial in partials:
        groups.setdefault(partial.shape[1], []).append(partial)
    found = {}
    for width, group in groups.items():
        ends = np.cumsum([len(partial) for partial in group])
        found[width] = iter(jnp.split(jnp.max(jnp.concatenate(group), axis=1), ends))
    return jnp.concatenate(
        [jnp.zeros(0, jnp.int32), *(next(found[partial.shape[1]]) for partial in partials)]
    )
