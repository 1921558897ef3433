"""One Adam step over many tensors, computed twice so that no float32 copy of one is stored.

    new, ok = advance(leaves, numbers, decays)

The first pass reduces the step to the amaxes of what is to be rounded, all of which go into
one array, from which all scales come; the second computes it again and writes the codes. The
barrier between them keeps a GPU's compiler from storing in float32 what it can recompute.
On a CPU both passes go through a tensor piece by piece (`pieces`).
"""

import functools
import math
from collections.abc import Callable, Iterator
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
    amaxes = by_platform(
        packed, numbers, cpu=_amaxes_in_pieces, default=_amaxes, whole=True, layout=layout, decays=decays
    )
    nodes = [kept for leaf in _unpacked(packed, layout) for kept in to_round(leaf)]
    limits = [np.full(_scale_size(kept), 1.0 if kept is None else format_of(kept).max) for kept in nodes]
    olds = [jnp.ones(1) if kept is None else kept.scale.reshape(-1) for kept in nodes]
    ok = jnp.all(amaxes < jnp.inf)
    scales = scale_of(amaxes, np.concatenate([[], *limits]).astype(np.float32), power_of_two=True)
    scales = (scales, jnp.concatenate([jnp.zeros(0), *olds]))
    packed, numbers, scales, ok = lax.optimization_barrier((packed, numbers, scales, ok))
    new = by_platform(
        packed,
        numbers,
        scales,
        ok,
        cpu=_written_in_pieces,
        default=_written,
        whole=True,
        layout=layout,
        decays=decays,
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


def _amaxes(packed: Any, numbers: Numbers, *, layout: Any, decays: tuple[str, ...]) -> jax.Array:
    """The first pass."""
    partials = []
    for leaf, decay in zip(_unpacked(packed, layout), decays, strict=True):
        tensors = before_rounding(moved(leaf, numbers, decay), leaf)
        for tensor, kept in zip(tensors, to_round(leaf), strict=True):
            partials.append(_partial_amax(tensor, () if kept is None else kept.scale.shape))
    return _maxima(partials)


def _amaxes_in_pieces(packed: Any, numbers: Numbers, *, layout: Any, decays: tuple[str, ...]) -> jax.Array:
    amaxes = []
    for leaf, decay in zip(_unpacked(packed, layout), decays, strict=True):
        amaxes += pieces.amaxes(leaf, numbers, decay)
    return jnp.concatenate([jnp.zeros(0), *(amax.reshape(-1) for amax in amaxes)])


def _written(
    packed: Any,
    numbers: Numbers,
    scales: tuple[jax.Array, jax.Array],
    ok: jax.Array,
    *,
    layout: Any,
    decays: tuple[str, ...],
    way_of: Callable[[Leaf], Callable[..., Leaf] | None] = lambda leaf: None,
) -> list[Written]:
    """The second pass."""
    leaves = _unpacked(packed, layout)
    sizes = [_scale_size(kept) for leaf in leaves for kept in to_round(leaf)]
    new, old = scales
    new_scales, kept_scales = (iter(_parts(array, sizes)) for array in (new, jnp.where(ok, new, old)))
    written = []
    for leaf, decay in zip(leaves, decays, strict=True):
        way = way_of(leaf) or _written_whole
        data = way(leaf, numbers, decay, _shaped(leaf, new_scales), ok)
        kept = iter(_shaped(leaf, kept_scales))
        mu, nu, weight, master = (
            ScaledArray(new, next(kept)) if is_scaled(old) else new
            for new, old in zip(data[1:], leaf[1:], strict=True)
        )
        written.append((Overwrite.by(weight) if is_scaled(leaf.param) else data.grad, mu, nu, master))
    return written


_written_in_pieces = functools.partial(_written, way_of=pieces.way_to_write)


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
