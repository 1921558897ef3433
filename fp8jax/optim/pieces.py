"""An Adam step in pieces that stay in a CPU's cache, written in place.

XLA on a CPU stores whatever it reduces, and copies a donated array that two of its loops
read before one of them writes it. Both cost float32 copies of every tensor at once. A loop
over pieces stores a piece: it loads the next one after writing the one before, so
that every array is read and written in one order, and nothing is copied.

Tensors that are alike go through one loop, a row each, and are compiled once: a model has a
few kinds of kernels, and many of each.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.optim.step import Leaf, Numbers, before_rounding, moments, moved, rounded, to_round
from fp8jax.scaled import ScaledArray, amax, is_scaled, to_bytes

# Numbers in a round of a loop, the fewest of one tensor that are worth one, and the most tensors in one.
_PIECE, _FEW, _MOST_TOGETHER = 16384, 1024, 16

# Numbers in a slab: a piece's place in it is an int32.
_MOST = 2**31 - 1

# Bytes of float8 arrays that one loop may write: XLA on a CPU writes into copies of them. More, if that is
# little beside the largest tensor.
_COPIED, _COPIED_SHARE = 2**19, 0.25


class Cut(NamedTuple):
    """How a tensor is cut: slabs with a scale each, in pieces that overlap where they do not fit."""

    slabs: int
    slab: int  # numbers in one
    piece: int

    @property
    def per_slab(self) -> int:
        """Pieces in a slab."""
        return -(-self.slab // self.piece)

    @property
    def pieces(self) -> int:
        """Of all slabs."""
        return self.slabs * self.per_slab

    def at(self, i: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of piece i: its slab, where in it the piece begins, and how much of it the piece before had."""
        slab, begin = i // self.per_slab, i % self.per_slab * self.piece
        start = jnp.minimum(begin, self.slab - self.piece)
        return slab, start, begin - start


def cut_of(leaf: Leaf, together: int = 1) -> Cut | None:
    """How each of `together` leaves like this is cut; None where a scale is not one of whole slabs, or
    there is too little to cut, or too much."""
    shape, slabs = leaf.grad.shape, 1
    for node in leaf:
        if is_scaled(node) and node.scale.size > 1:
            leading = next((axis for axis, n in enumerate(node.scale.shape) if n == 1), len(shape))
            if node.scale.shape != shape[:leading] + (1,) * (len(shape) - leading):
                return None
            if slabs not in (1, node.scale.size):
                return None
            slabs = node.scale.size
    size = math.prod(shape) // slabs
    if not (_FEW if slabs > 1 else 1) <= size <= _MOST:
        return None
    return Cut(slabs, size, min(size, _PIECE // together))


def amaxes(leaves: list[Leaf], numbers: Numbers, decay: str) -> jax.Array:
    """The amaxes of `before_rounding` for each of a group's leaves, float32, a row for each leaf."""
    if len(leaves) > 1 and is_small(leaves[0]):
        tensors = before_rounding(moved(stacked(leaves), numbers, decay), leaves[0])
        return jnp.concatenate([amax(tensor, (len(leaves), 1)) for tensor in tensors], axis=1)
    cut, kept = cut_of(leaves[0], len(leaves)), to_round(leaves[0])
    if cut is None:
        [leaf] = leaves
        tensors = before_rounding(moved(leaf, numbers, decay), leaf)
        shapes = [() if node is None else node.scale.shape for node in kept]
        amaxes = [amax(tensor, shape).reshape(1, -1) for tensor, shape in zip(tensors, shapes, strict=True)]
        return jnp.concatenate(amaxes, axis=1)
    arrays = [each(data_of, leaf) for leaf in leaves]

    # Gathered rows are carried, so that they are stored; a tensor alone is read where it is needed.
    def load(i: Any) -> Leaf | None:
        return rows_of(arrays, cut, i) if len(leaves) > 1 else None

    def look(i: jax.Array, carry: tuple[jax.Array, Leaf | None]) -> tuple[jax.Array, Leaf | None]:
        found, rows = carry
        slab, _, _ = cut.at(i)
        piece = decoded(leaves, rows_of(arrays, cut, i) if rows is None else rows, slab)
        tensors = before_rounding(moved(piece, numbers, decay), piece)
        seen = jnp.stack([amax(tensor, (len(leaves), 1)) for tensor in tensors])
        start = (0, 0, slab)
        column = lax.dynamic_slice(found, start, seen.shape)
        return lax.dynamic_update_slice(found, jnp.maximum(column, seen), start), load(i + 1)

    found = jnp.zeros((len(kept), len(leaves), cut.slabs), jnp.float32)
    found, _ = lax.fori_loop(0, cut.pieces, look, (found, load(0)))
    has_slabs = [node is not None and node.scale.size == cut.slabs for node in kept]
    columns = zip(found, has_slabs, strict=True)
    return jnp.concatenate([x if own else jnp.max(x, axis=1, keepdims=True) for x, own in columns], axis=1)


def groups(leaves: list[Leaf], decays: tuple[str, ...]) -> list[list[int]]:
    """The numbers of leaves that are taken together: those that are alike and small, those that are alike
    and cut in the same way, each of the others alone."""
    largest = max((4 * math.prod(leaf.grad.shape) for leaf in leaves), default=0)
    most = max(_COPIED, _COPIED_SHARE * largest)
    alike: dict[Any, list[list[int]]] = {}
    for number, (leaf, decay) in enumerate(zip(leaves, decays, strict=True)):
        formats = tuple(node if node is None else _kind_of(node) for node in leaf)
        # Wide tensors are moved faster than they are gathered in rows.
        cut: Any = None if to_round(leaf) == [None] else cut_of(leaf)
        cut = math.prod(leaf.grad.shape) if is_small(leaf) else cut
        kind = number if cut is None else (formats, decay, cut)
        lists = alike.setdefault(kind, [[]])
        room = _MOST_TOGETHER if not _copied(leaf) else min(_MOST_TOGETHER, most // _copied(leaf))
        if not is_small(leaf) and lists[-1] and len(lists[-1]) >= room:
            lists.append([])
        lists[-1].append(number)
    return [group for lists in alike.values() for group in lists]


def _kind_of(node: Any) -> tuple[Any, ...]:
    """What is alike of alike nodes, besides their size."""
    return (node.data.dtype, node.scale.size) if is_scaled(node) else (node.dtype,)


def _copied(leaf: Leaf) -> int:
    """Bytes of the float8 arrays that a step writes."""
    return sum(node.data.size for node in leaf[1:] if is_scaled(node) and node.data.dtype.itemsize == 1)


def is_small(leaf: Leaf) -> bool:
    """Whether a leaf is one piece, and has a scale for the whole: such ones are `stacked`."""
    has_one_scale = all(node.scale.size == 1 for node in leaf if is_scaled(node))
    return 0 < math.prod(leaf.grad.shape) <= _PIECE and has_one_scale


# Small tensors ###################################################################################


def stacked(leaves: list[Leaf]) -> Leaf:
    """Small leaves as the rows of one, a scale for each row."""

    def stack(*nodes: Any) -> Any:
        rows = jnp.stack([bits_of(data_of(node)).reshape(-1) for node in nodes])
        if not is_scaled(nodes[0]):
            return rows
        scale = _columns([node.scale for node in nodes])
        return ScaledArray(lax.bitcast_convert_type(rows, nodes[0].data.dtype), scale)

    return jax.tree.map(stack, *leaves, is_leaf=is_scaled)


def unstacked(rows: Leaf, leaves: list[Leaf]) -> list[Leaf]:
    """The arrays of each leaf, of those of `stacked(leaves)`."""

    def row(array: jax.Array, number: int) -> jax.Array:
        bits = bits_of(array)[number].reshape(leaves[number].grad.shape)
        return lax.bitcast_convert_type(bits, array.dtype)

    return [jax.tree.map(lambda array, i=i: row(array, i), rows) for i in range(len(leaves))]


def parted(scales: jax.Array, leaf: Leaf) -> list[jax.Array]:
    """The columns of `scales`, whose rows are of leaves like this, for each of `to_round`."""
    sizes = [1 if node is None else node.scale.size for node in to_round(leaf)]
    return jnp.split(scales, np.cumsum(sizes, dtype=int)[:-1], axis=1)


# Tensors in place ################################################################################


def way_to_write(leaf: Leaf) -> Callable[..., list[Leaf]] | None:
    """How to write a group of leaves like this in place; None if there is no such way."""
    if is_scaled(leaf.param):
        return _written if cut_of(leaf) is not None else None
    return None if is_scaled(leaf.mu) or is_scaled(leaf.nu) else _written_plain


def _written_plain(
    leaves: list[Leaf], numbers: Numbers, decay: str, scales: jax.Array, ok: jax.Array
) -> list[Leaf]:
    """Leaves of which nothing is rounded: the update comes from the new moments, so that these may replace
    the old ones."""
    del scales
    old = [(leaf.mu, leaf.nu) for leaf in leaves]

    def take(old: Any) -> Any:
        pairs = zip(leaves, old, strict=True)
        return [moments(leaf._replace(mu=m, nu=v), numbers, decay) for leaf, (m, v) in pairs]

    new = lax.cond(ok, take, lambda old: old, old)
    return [
        Leaf(jnp.where(ok, moved(leaf, numbers, decay, (m, v)).update, 0.0), m, v, None, None)
        for leaf, (m, v) in zip(leaves, new, strict=True)
    ]


def _written(
    leaves: list[Leaf], numbers: Numbers, decay: str, scales: jax.Array, ok: jax.Array
) -> list[Leaf]:
    """What a step makes of the leaves' arrays; they stay as they are if not `ok`."""
    cut = cut_of(leaves[0], len(leaves))
    assert cut is not None
    new_scales = parted(scales, leaves[0])
    gradients = [data_of(leaf.grad) for leaf in leaves]

    def load(arrays: list[Leaf], i: Any) -> Leaf:
        both = zip(arrays, gradients, strict=True)
        return rows_of([array._replace(grad=gradient) for array, gradient in both], cut, i)

    def move(i: jax.Array, carry: tuple[list[Leaf], Leaf]) -> tuple[list[Leaf], Leaf]:
        arrays, rows = carry
        slab, start, had = cut.at(i)

        def take(rows: Leaf) -> Leaf:
            piece = decoded(leaves, rows, slab)
            new = rounded(moved(piece, numbers, decay), piece, [_column(scale, slab) for scale in new_scales])
            due = jnp.arange(cut.piece) >= had
            choose = lambda new, old: jnp.where(due, bits_of(data_of(new)), old)  # noqa: E731
            return jax.tree.map(choose, new, rows._replace(grad=None), is_leaf=is_scaled)

        # What a branch gives is stored, and not computed again for each row.
        new = lax.cond(ok, take, lambda rows: rows._replace(grad=None), rows)

        def write(number: int) -> Callable[..., jax.Array]:
            return lambda array, rows: lax.dynamic_update_slice(array, rows[number][None], (slab, start))

        arrays = [jax.tree.map(write(number), array, new) for number, array in enumerate(arrays)]
        return arrays, load(arrays, i + 1)

    def go_through(old: list[Leaf]) -> list[Leaf]:
        arrays = jax.tree.map(lambda data: bits_of(data).reshape(cut.slabs, cut.slab), old)
        arrays, _ = lax.fori_loop(0, cut.pieces, move, (arrays, load(arrays, 0)))
        return jax.tree.map(
            lambda bits, data: lax.bitcast_convert_type(bits, data.dtype).reshape(data.shape), arrays, old
        )

    # A branch again, so that the groups take turns: each has bytes in copies of its own.
    return lax.cond(
        ok, go_through, lambda old: old, [each(data_of, leaf._replace(grad=None)) for leaf in leaves]
    )


def each(function: Callable[[Any], Any], leaf: Leaf) -> Any:
    """The function of each node of a leaf."""
    return jax.tree.map(function, leaf, is_leaf=is_scaled)


def data_of(node: Any) -> jax.Array:
    """An array, or the codes of a scaled one."""
    return node.data if is_scaled(node) else node


def bits_of(data: jax.Array) -> jax.Array:
    """What a CPU can slice: not float8."""
    return to_bytes(data) if data.dtype.itemsize == 1 else data


def rows_of(arrays: list[Leaf], cut: Cut, i: Any) -> Leaf:
    """Piece i of each leaf's arrays, as rows."""
    return jax.tree.map(lambda *alike: jnp.concatenate([_load(array, cut, i) for array in alike]), *arrays)


def _load(array: jax.Array, cut: Cut, i: Any) -> jax.Array:
    """Piece i, shape=(1, piece)."""
    slab, start, _ = cut.at(i)
    if array.dtype.itemsize == 1:
        # The barrier keeps the compiler from making bytes of the whole array before the loop.
        array, _ = lax.optimization_barrier((array, i))
    array = bits_of(array).reshape(cut.slabs, cut.slab)
    return lax.dynamic_slice(array, (slab, start), (1, cut.piece))


def decoded(leaves: list[Leaf], rows: Leaf, slab: jax.Array) -> Leaf:
    """The leaves as one, with pieces of a slab as rows in the place of their tensors."""

    def decoded(rows: Any, *nodes: Any) -> Any:
        if not is_scaled(nodes[0]):
            return rows
        scale = _column(_columns([node.scale for node in nodes]), slab)
        return ScaledArray(lax.bitcast_convert_type(rows, nodes[0].data.dtype), scale)

    return jax.tree.map(decoded, rows, *leaves)


def _columns(scales: Any) -> jax.Array:
    """Scales of several leaves, a row each."""
    return jnp.stack([scale.reshape(-1) for scale in scales])


def _column(scales: jax.Array, slab: jax.Array) -> jax.Array:
    """Those of a slab, shape=(leaves, 1)."""
    return lax.dynamic_slice_in_dim(scales, slab if scales.shape[1] > 1 else 0, 1, axis=1)
