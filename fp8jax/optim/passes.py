"""One Adam step over many tensors, computed twice so that no float32 copy of one is stored.

    new, ok = advance(leaves, numbers, decays)

The first pass reduces the step to the amaxes of what is to be rounded, all of which go into
one array, from which all scales come; the second computes it again and writes the codes. The
barrier between them keeps a GPU's compiler from storing in float32 what it can recompute.
On a CPU both passes go through a tensor piece by piece (`pieces`).
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.optim import pieces
from fp8jax.optim.overwrite import Overwrite, to_bits
from fp8jax.optim.step import Leaf, Numbers, before_rounding, moved, rounded, to_round
from fp8jax.platforms import by_platform
from fp8jax.scaled import ScaledArray, amax, format_of, is_scaled, scale_of

# A leaf's update, mu, nu and master.
Written = tuple[Any, Any, Any, Any]

# How partial amaxes are taken: at most so many, each of at least so many numbers.
_MOST_PARTS, _FEW = 16384, 64


def advance(leaves: list[Leaf], numbers: Numbers, decays: tuple[str, ...]) -> tuple[list[Written], jax.Array]:
    """What is written of each leaf, and whether the step was taken."""
    packed, layout = _packed(leaves)
    options = {"whole": True, "layout": layout, "decays": decays}
    # Leaves as they are for a CPU, packed for a GPU: what a branch does not use is not computed.
    amaxes = by_platform(leaves, packed, numbers, cpu=_amaxes_in_pieces, default=_amaxes, **options)
    nodes = [kept for leaf in _unpacked(packed, layout) for kept in to_round(leaf)]
    limits = [np.full(_scale_size(kept), 1.0 if kept is None else format_of(kept).max) for kept in nodes]
    olds = [jnp.ones(1) if kept is None else kept.scale.reshape(-1) for kept in nodes]
    ok = jnp.all(amaxes < jnp.inf)
    scales = scale_of(amaxes, np.concatenate([[], *limits]).astype(np.float32), power_of_two=True)
    scales = (scales, jnp.concatenate([jnp.zeros(0), *olds]))
    packed, numbers, scales, ok = lax.optimization_barrier((packed, numbers, scales, ok))
    new = by_platform(
        leaves, packed, numbers, scales, ok, cpu=_written_in_pieces, default=_written_from_packed, **options
    )
    return new, ok


def _packed(leaves: list[Leaf]) -> tuple[Any, Any]:
    """The leaves with all scales in one array, and what `_unpacked` needs to undo it.

    Hundreds of scalars that are read, and written in place, are copied by a GPU one by one.
    """
    nodes, treedef = jax.tree.flatten(leaves, is_leaf=is_scaled)
    shapes = tuple(node.scale.shape if is_scaled(node) else None for node in nodes)
    scales = jnp.concatenate([jnp.zeros(0), *(node.scale.reshape(-1) for node in nodes if is_scaled(node))])
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
    return _maxima(partials)


def _amaxes_in_pieces(
    leaves: list[Leaf], packed: Any, numbers: Numbers, *, layout: Any, decays: tuple[str, ...]
) -> jax.Array:
    del packed, layout
    found, places = [jnp.zeros(0)], []
    sizes = [sum(map(_scale_size, to_round(leaf))) for leaf in leaves]
    begins = np.cumsum([0, *sizes])
    for group in pieces.groups(leaves, decays):
        together, decay = [leaves[number] for number in group], decays[group[0]]
        if len(group) == 1:
            amaxes = [x.reshape(1, -1) for x in pieces.amaxes(together[0], numbers, decay)]
            found.append(jnp.concatenate(amaxes, axis=1).reshape(-1))
        else:
            tensors = before_rounding(moved(pieces.stacked(together), numbers, decay), together[0])
            found.append(jnp.concatenate([amax(x, (len(group), 1)) for x in tensors], axis=1).reshape(-1))
        places += [place for number in group for place in range(begins[number], begins[number + 1])]
    # From the order of the groups to that of the leaves, in one go.
    return jnp.concatenate(found)[np.argsort(places)] if places else jnp.zeros(0)


def _written_from_packed(
    leaves: list[Leaf],
    packed: Any,
    numbers: Numbers,
    scales: tuple[jax.Array, jax.Array],
    ok: jax.Array,
    *,
    layout: Any,
    decays: tuple[str, ...],
) -> list[Written]:
    """The second pass."""
    del leaves
    return _written(_unpacked(packed, layout), numbers, scales, ok, decays, in_pieces=False)


def _written_in_pieces(
    leaves: list[Leaf],
    packed: Any,
    numbers: Numbers,
    scales: tuple[jax.Array, jax.Array],
    ok: jax.Array,
    *,
    layout: Any,
    decays: tuple[str, ...],
) -> list[Written]:
    del packed, layout
    return _written(leaves, numbers, scales, ok, decays, in_pieces=True)


def _written(
    leaves: list[Leaf],
    numbers: Numbers,
    scales: tuple[jax.Array, jax.Array],
    ok: jax.Array,
    decays: tuple[str, ...],
    in_pieces: bool,
) -> list[Written]:
    sizes = [_scale_size(kept) for leaf in leaves for kept in to_round(leaf)]
    new, old = scales
    new_parts, kept_parts = (iter(_parts(array, sizes)) for array in (new, jnp.where(ok, new, old)))
    new_scales = [_shaped(leaf, new_parts) for leaf in leaves]
    arrays: dict[int, Leaf] = {}
    for group in pieces.groups(leaves, decays) if in_pieces else [[number] for number in range(len(leaves))]:
        together, decay = [leaves[number] for number in group], decays[group[0]]
        if len(group) == 1:
            way = (pieces.way_to_write(together[0]) if in_pieces else None) or _written_whole
            arrays[group[0]] = way(together[0], numbers, decay, new_scales[group[0]], ok)
            continue
        rows = [
            jnp.stack(parts).reshape(-1, 1)
            for parts in zip(*(map(jnp.ravel, new_scales[number]) for number in group), strict=True)
        ]
        written = _written_apart(pieces.stacked(together), numbers, decay, rows, ok)
        arrays.update(zip(group, pieces.unstacked(written, together), strict=True))
    return [_assembled(leaf, arrays[number], _shaped(leaf, kept_parts)) for number, leaf in enumerate(leaves)]


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


def _written_whole(leaf: Leaf, numbers: Numbers, decay: str, scales: list[jax.Array], ok: jax.Array) -> Leaf:
    """What a step makes of a leaf's arrays, the update in the place of the gradient."""
    new = moved(leaf, numbers, decay)
    kept = jax.tree.map(
        lambda new, old: _choose(ok, new, old),
        rounded(new, leaf, scales),
        leaf._replace(grad=None, param=leaf.param if is_scaled(leaf.param) else None),
        is_leaf=is_scaled,
    )
    return kept._replace(grad=jnp.where(ok, new.update, 0.0))


def _written_apart(leaf: Leaf, numbers: Numbers, decay: str, scales: list[jax.Array], ok: jax.Array) -> Leaf:
    """The same in a branch of its own, or it would be computed again for each row that is taken out."""
    return lax.cond(
        ok,
        lambda: _written_whole(leaf, numbers, decay, scales, jnp.array(True)),
        lambda: _written_whole(leaf, numbers, decay, scales, jnp.array(False)),
    )


def _choose(ok: jax.Array, new: Any, old: Any) -> jax.Array:
    if not is_scaled(new):
        return jnp.where(ok, new, old)
    # Codes as integers: XLA on CPU would select among float8 ones by way of float16.
    bits = jnp.where(ok, to_bits(new.data), to_bits(old.data))
    return lax.bitcast_convert_type(bits, new.data.dtype)


def _partial_amax(x: jax.Array, blocks: tuple[int, ...]) -> jax.Array:
    """The amax of parts of each block, shape=(blocks, parts): a GPU needs a second kernel to reduce these,
    and `_maxima` lets all tensors share it."""
    blocks = blocks or (1,) * x.ndim
    inner = [dim // count for dim, count in zip(x.shape, blocks, strict=True)]
    kept = next((axis for axis, dim in enumerate(inner) if 1 < dim <= _MOST_PARTS), None)
    if kept is None or math.prod(inner) < _FEW * inner[kept]:
        return amax(x, blocks).reshape(-1, 1)
    parts = tuple(
        dim if axis == kept else b for axis, (dim, b) in enumerate(zip(x.shape, blocks, strict=True))
    )
    split = (*blocks[: kept + 1], inner[kept], *blocks[kept + 1 :])
    return jnp.moveaxis(amax(x, parts).reshape(split), kept + 1, -1).reshape(-1, inner[kept])


def _maxima(partials: list[jax.Array]) -> jax.Array:
    """The largest of each row of these arrays, one after the other; a reduction per width."""
    groups: dict[int, list[jax.Array]] = {}
    for partial in partials:
        groups.setdefault(partial.shape[1], []).append(partial)
    found = {}
    for width, group in groups.items():
        ends = np.cumsum([len(partial) for partial in group])
        found[width] = iter(jnp.split(jnp.max(jnp.concatenate(group), axis=1), ends))
    return jnp.concatenate([jnp.zeros(0), *(next(found[partial.shape[1]]) for partial in partials)])
