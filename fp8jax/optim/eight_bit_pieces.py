"""The 8-bit Adam step in pieces of whole blocks, which stay in a CPU's cache, written in place.

XLA on a CPU stores in float32 whatever is decoded by a table: both moments, before and after the step. A loop
over pieces stores a piece; see `pieces` for how one has to be written for that.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.optim.blockwise import BLOCK, Blockwise, block_absmax
from fp8jax.optim.pieces import Cut, bits_of, cut_of, data_of, decoded, each, rows_of
from fp8jax.optim.step import Leaf, Moved, Numbers, moved, rounded
from fp8jax.scaled import amax, is_scaled, value

# Blocks in a piece: of fewer a round of a loop is dear, more leave the cache. A tensor of fewer pieces is not
# worth two loops that have to be compiled.
_LEAST, _MOST, _FEWEST = 8, 64, 4


def cut_in_blocks(leaf: Leaf) -> Cut | None:
    """How the arrays of a leaf are cut; None if it is small, not `Blockwise`, or not cut evenly in blocks."""
    cut = cut_of(leaf) if isinstance(leaf.mu, Blockwise) else None
    if cut is None or cut.slab % BLOCK:
        return None
    blocks = cut.slab // BLOCK
    most = max((count for count in range(_LEAST, _MOST + 1) if blocks % count == 0), default=blocks)
    cut = cut._replace(piece=most * BLOCK)
    return cut if cut.pieces >= _FEWEST else None


def found(leaf: Leaf, numbers: Numbers, decay: str, cut: Cut) -> tuple[Any, ...]:
    """What a step has to know before it writes: absmaxes of both moments, amaxes of weight and master, a
    number that is finite if the step is."""
    arrays, scaled = _arrays(leaf), [x for x in (leaf.param, leaf.master) if is_scaled(x)]

    def look(i: jax.Array, carry: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        absmaxes, maxima = carry
        slab, _, _ = cut.at(i)
        new = moved(_piece(leaf, rows_of([arrays], cut, i), cut, i), numbers, decay)
        absmaxes = [
            lax.dynamic_update_slice(old, block_absmax(x), (_first_block(cut, i),))
            for old, x in zip(absmaxes, (new.mu, new.nu), strict=True)
        ]
        seen = [amax(new.weight) for _ in scaled]
        seen = jnp.stack([*seen, amax(jnp.abs(new.mu) + new.nu + jnp.abs(new.update))])[:, None]
        column = lax.dynamic_slice(maxima, (0, slab), seen.shape)
        return absmaxes, lax.dynamic_update_slice(maxima, jnp.maximum(column, seen), (0, slab))

    first = [jnp.zeros_like(x.absmax) for x in (leaf.mu, leaf.nu)]
    maxima = jnp.zeros((len(scaled) + 1, cut.slabs), jnp.float32)
    absmaxes, maxima = lax.fori_loop(0, cut.pieces, look, (first, maxima))
    rows = iter(maxima)
    of_scaled = [_shaped(next(rows), x) if is_scaled(x) else None for x in (leaf.param, leaf.master)]
    return *absmaxes, *of_scaled, jnp.max(next(rows))


def written(
    leaf: Leaf,
    numbers: Numbers,
    decay: str,
    cut: Cut,
    absmaxes: Sequence[jax.Array],
    scales: list[jax.Array],
    ok: jax.Array,
) -> Leaf:
    """The arrays that a step makes of a leaf's, or the old ones; the update in the place of the gradient.

    Args:
        leaf: of one tensor.
        numbers: of the step.
        decay: where weight decay goes.
        cut: as `cut_in_blocks` gives it.
        absmaxes: of the blocks of both new moments.
        scales: those of a scaled weight and master.
        ok: whether the step is taken.
    """
    plain, columns = not is_scaled(leaf.param), [scale.reshape(1, -1) for scale in scales]
    if plain:
        leaf = leaf._replace(grad=value(leaf.grad).astype(jnp.float32))

    def load(arrays: Leaf, i: Any) -> Leaf:
        # The update of a plain weight is written over the gradient, and the weight only read.
        read = {"grad": arrays.param, "param": leaf.param} if plain else {"grad": data_of(leaf.grad)}
        return rows_of([arrays._replace(**read)], cut, i)

    def move(i: jax.Array, carry: tuple[Leaf, Leaf]) -> tuple[Leaf, Leaf]:
        arrays, rows = carry
        slab, start, _ = cut.at(i)

        def take(rows: Leaf) -> Leaf:
            piece = _piece(leaf, rows, cut, i)
            new = moved(piece, numbers, decay)
            kept = _coded(new, piece, (leaf.mu.signed, leaf.nu.signed), cut, i, absmaxes, columns)
            return kept._replace(param=new.update) if plain else kept

        def leave(rows: Leaf) -> Leaf:
            return rows._replace(grad=None, param=rows.grad if plain else rows.param)

        # What a branch gives is stored, and not computed again for each array.
        new = lax.cond(ok, take, leave, rows)
        arrays = jax.tree.map(
            lambda array, row: lax.dynamic_update_slice(array, row, (slab, start)), arrays, new
        )
        return arrays, load(arrays, i + 1)

    def go_through(old: Leaf) -> Leaf:
        arrays = jax.tree.map(lambda data: bits_of(data).reshape(cut.slabs, cut.slab), old)
        arrays, _ = lax.fori_loop(0, cut.pieces, move, (arrays, load(arrays, 0)))
        return jax.tree.map(
            lambda bits, data: lax.bitcast_convert_type(bits, data.dtype).reshape(data.shape), arrays, old
        )

    arrays = _arrays(leaf)
    old = arrays._replace(grad=None, param=arrays.grad if plain else arrays.param)
    # What a branch gives up has to be what it got, or a CPU copies the other one's.
    new = lax.cond(ok, go_through, lambda old: old, old)
    # -0: of zeros XLA makes one array with those that a scan's gradients start from.
    return new._replace(grad=jnp.where(ok, new.param, -0.0), param=None) if plain else new


def _coded(
    new: Moved,
    piece: Leaf,
    signed: Sequence[bool],
    cut: Cut,
    i: Any,
    absmaxes: Sequence[jax.Array],
    columns: list[jax.Array],
) -> Leaf:
    """What is kept of a piece, as rows of numbers and codes."""
    slab, _, _ = cut.at(i)
    here = [lax.dynamic_slice_in_dim(x, slab if x.size > 1 else 0, 1, axis=1) for x in columns]
    kept = rounded(new, piece, here)
    mu, nu = (
        Blockwise.of(x, sign, _of_blocks(absmax, cut, i)).codes
        for x, sign, absmax in zip((new.mu, new.nu), signed, absmaxes, strict=True)
    )
    return each(lambda node: bits_of(data_of(node)), kept._replace(mu=mu, nu=nu))


def _arrays(leaf: Leaf) -> Leaf:
    """Numbers and codes, without scales and absmaxes."""
    return each(data_of, leaf._replace(mu=leaf.mu.codes, nu=leaf.nu.codes))


def _shaped(maxima: jax.Array, node: Any) -> jax.Array:
    """The amaxes of slabs as a scale of the node would have them."""
    return (maxima if node.scale.size > 1 else jnp.max(maxima)).reshape(node.scale.shape)


def _piece(leaf: Leaf, rows: Leaf, cut: Cut, i: Any) -> Leaf:
    """The rows of piece i as a leaf, its moments in float32, shape=(1, piece)."""
    slab, _, _ = cut.at(i)
    piece = decoded([leaf], rows, slab)

    def widened(codes: jax.Array, node: Blockwise) -> jax.Array:
        return Blockwise(codes, _of_blocks(node.absmax, cut, i), node.signed).dequantize()

    return piece._replace(mu=widened(rows.mu, leaf.mu), nu=widened(rows.nu, leaf.nu))


def _first_block(cut: Cut, i: Any) -> jax.Array:
    """The number of the first block of piece i."""
    slab, start, _ = cut.at(i)
    return (slab * cut.slab + start) // BLOCK


def _of_blocks(absmax: jax.Array, cut: Cut, i: Any) -> jax.Array:
    """Those of the blocks of piece i."""
    return lax.dynamic_slice(absmax, (_first_block(cut, i),), (cut.piece // BLOCK,))
