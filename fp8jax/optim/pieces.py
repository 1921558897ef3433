"""An Adam step in pieces that stay in a CPU's cache, written in place.

XLA on a CPU stores whatever it reduces, and copies a donated array that two of its loops
read before one of them writes it. Both cost float32 copies of every tensor at once. A loop
over pieces stores a piece: it loads the next one after writing the one before, so
that every array is read and written in one order, and nothing is copied.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.optim.step import Leaf, Numbers, before_rounding, moments, moved, rounded, to_round
from fp8jax.scaled import ScaledArray, amax, is_scaled, to_bytes

# Numbers in a piece, and the fewest that a slab of several must have to be worth a round of the loop.
_PIECE, _FEW = 16384, 1024


class _Cut(NamedTuple):
    """How a tensor is cut: slabs with a scale each, in pieces that overlap where they do not fit."""

    slabs: int
    slab: int  # numbers in one
    piece: int

    @property
    def per_slab(self) -> int:
        return -(-self.slab // self.piece)

    @property
    def pieces(self) -> int:
        return self.slabs * self.per_slab

    def at(self, i: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of piece i: its slab, where in it the piece begins, and how much of it the piece before had."""
        slab, begin = i // self.per_slab, i % self.per_slab * self.piece
        start = jnp.minimum(begin, self.slab - self.piece)
        return slab, start, begin - start


def _cut(leaf: Leaf) -> _Cut | None:
    """None where a scale is not one of whole slabs, or there is too little to cut."""
    shape, slabs = leaf.grad.shape, 1
    for node in leaf:
        if is_scaled(node) and node.scale.size > 1:
            leading = next((axis for axis, n in enumerate(node.scale.shape) if n == 1), len(shape))
            if node.scale.shape != shape[:leading] + (1,) * (len(shape) - leading):
                return None
            if slabs not in (1, node.scale.size):
                return None
            slabs = node.scale.size
    size = math.prod(shape) // slabs if slabs else 0
    return _Cut(slabs, size, min(size, _PIECE)) if size >= (_FEW if slabs > 1 else 1) else None


def amaxes(leaf: Leaf, numbers: Numbers, decay: str) -> list[jax.Array]:
    """The amaxes of `before_rounding`, float32 of the scales' shapes."""
    cut, kept = _cut(leaf), to_round(leaf)
    shapes = [() if node is None else node.scale.shape for node in kept]
    if cut is None:
        tensors = before_rounding(moved(leaf, numbers, decay), leaf)
        return [amax(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
    arrays = _each(_data, leaf)

    def look(i: jax.Array, found: jax.Array) -> jax.Array:
        slab, _, _ = cut.at(i)
        piece = _decoded(leaf, _each(lambda array: _load(array, cut, i), arrays), slab)
        seen = jnp.stack([amax(tensor) for tensor in before_rounding(moved(piece, numbers, decay), piece)])
        column = lax.dynamic_slice(found, (0, slab), (len(kept), 1))
        return lax.dynamic_update_slice(found, jnp.maximum(column, seen[:, None]), (0, slab))

    found = lax.fori_loop(0, cut.pieces, look, jnp.zeros((len(kept), cut.slabs)))
    return [
        (row if math.prod(shape) == cut.slabs else jnp.max(row)).reshape(shape)
        for row, shape in zip(found, shapes, strict=True)
    ]


# Small tensors ###################################################################################


def groups(leaves: list[Leaf], decays: tuple[str, ...]) -> list[list[int]]:
    """The numbers of leaves that are alike and small, together; each of the others alone.

    The time to compile a step is that of its leaves, most of which are biases and norms.
    """
    alike: dict[Any, list[int]] = {}
    for number, (leaf, decay) in enumerate(zip(leaves, decays, strict=True)):
        nodes = [node for node in leaf if node is not None]
        is_small = 0 < math.prod(leaf.grad.shape) <= _PIECE
        if is_small and all(node.scale.size == 1 for node in nodes if is_scaled(node)):
            formats = tuple(None if node is None else (is_scaled(node), _data(node).dtype) for node in leaf)
            alike.setdefault((formats, decay), []).append(number)
        else:
            alike[number] = [number]
    return list(alike.values())


def stacked(leaves: list[Leaf]) -> Leaf:
    """Small leaves as the rows of one, filled up with zeros, a scale for each row."""
    longest = max(math.prod(leaf.grad.shape) for leaf in leaves)

    def stack(*nodes: Any) -> Any:
        flat = [_bits(_data(node)).reshape(-1) for node in nodes]
        rows = jnp.stack([jnp.pad(row, (0, longest - len(row))) for row in flat])
        if not is_scaled(nodes[0]):
            return rows
        scale = jnp.concatenate([node.scale.reshape(1, 1) for node in nodes])
        return ScaledArray(lax.bitcast_convert_type(rows, nodes[0].data.dtype), scale)

    return jax.tree.map(stack, *leaves, is_leaf=is_scaled)


def unstacked(rows: Leaf, leaves: list[Leaf]) -> list[Leaf]:
    """The arrays of each leaf, of those of `stacked(leaves)`."""

    def row(array: jax.Array, number: int) -> jax.Array:
        shape = leaves[number].grad.shape
        bits = _bits(array)[number, : math.prod(shape)].reshape(shape)
        return lax.bitcast_convert_type(bits, array.dtype)

    return [jax.tree.map(lambda array, i=i: row(array, i), rows) for i in range(len(leaves))]


# Tensors in place ################################################################################


def way_to_write(leaf: Leaf) -> Callable[..., Leaf] | None:
    """How to write a leaf in place; None if there is no such way."""
    if is_scaled(leaf.param):
        return _written if _cut(leaf) is not None else None
    return None if is_scaled(leaf.mu) or is_scaled(leaf.nu) else _written_plain


def _written_plain(leaf: Leaf, numbers: Numbers, decay: str, scales: list[jax.Array], ok: jax.Array) -> Leaf:
    """A leaf of which nothing is rounded: the update comes from the new moments, so that these may replace
    the old ones."""
    del scales
    m, v = lax.cond(
        ok,
        lambda old: moments(leaf._replace(mu=old[0], nu=old[1]), numbers, decay),
        lambda old: old,
        (leaf.mu, leaf.nu),
    )
    return Leaf(jnp.where(ok, moved(leaf, numbers, decay, (m, v)).update, 0.0), m, v, None, None)


def _written(leaf: Leaf, numbers: Numbers, decay: str, scales: list[jax.Array], ok: jax.Array) -> Leaf:
    """What a step makes of a leaf's arrays; they stay as they are if not `ok`."""
    cut = _cut(leaf)
    assert cut is not None

    def take(old: Leaf) -> Leaf:
        arrays = _each(lambda data: _bits(data).reshape(cut.slabs, cut.slab), old)
        gradient = _data(leaf.grad)

        def loaded(arrays: Leaf, i: Any) -> Leaf:
            return _each(lambda array: _load(array, cut, i), arrays._replace(grad=gradient))

        def move(i: jax.Array, carry: tuple[Leaf, Leaf]) -> tuple[Leaf, Leaf]:
            arrays, bits = carry
            slab, start, had = cut.at(i)
            piece = _decoded(leaf, bits, slab)
            new = rounded(moved(piece, numbers, decay), piece, [_at(scale, slab) for scale in scales])
            due = jnp.arange(cut.piece) >= had

            def write(array: jax.Array, new: Any, old: jax.Array) -> jax.Array:
                new = jnp.where(due, _bits(_data(new)), old)
                return lax.dynamic_update_slice(array, new[None], (slab, start))

            arrays = jax.tree.map(write, arrays, new, bits._replace(grad=None))
            return arrays, loaded(arrays, i + 1)

        arrays, _ = lax.fori_loop(0, cut.pieces, move, (arrays, loaded(arrays, 0)))
        return jax.tree.map(
            lambda bits, data: lax.bitcast_convert_type(bits, data.dtype).reshape(data.shape), arrays, old
        )

    return lax.cond(ok, take, lambda old: old, _each(_data, leaf._replace(grad=None)))


def _each(function: Callable[[Any], Any], leaf: Leaf) -> Any:
    return jax.tree.map(function, leaf, is_leaf=is_scaled)


def _data(node: Any) -> jax.Array:
    return node.data if is_scaled(node) else node


def _bits(data: jax.Array) -> jax.Array:
    """What a CPU can slice: not float8."""
    return to_bytes(data) if data.dtype.itemsize == 1 else data


def _load(array: jax.Array, cut: _Cut, i: jax.Array) -> jax.Array:
    """Piece i."""
    slab, start, _ = cut.at(i)
    if array.dtype.itemsize == 1:
        # The barrier keeps the compiler from making bytes of the whole array before the loop.
        array, _ = lax.optimization_barrier((array, i))
    array = _bits(array).reshape(cut.slabs, cut.slab)
    return lax.dynamic_slice(array, (slab, start), (1, cut.piece)).reshape(-1)


def _decoded(leaf: Leaf, loaded: Leaf, slab: jax.Array) -> Leaf:
    """The leaf with pieces of a slab in the place of its tensors."""

    def decoded(node: Any, piece: jax.Array) -> Any:
        if not is_scaled(node):
            return piece
        return ScaledArray(lax.bitcast_convert_type(piece, node.data.dtype), _at(node.scale, slab))

    return jax.tree.map(decoded, leaf, loaded, is_leaf=is_scaled)


def _at(scale: jax.Array, slab: jax.Array) -> jax.Array:
    return scale.reshape(()) if scale.size == 1 else scale.reshape(-1)[slab]
