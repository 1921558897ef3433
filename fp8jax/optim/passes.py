"""One Adam step over many tensors, computed twice so that no float32 copy of one is stored.

    new, ok = advance(step, leaves, numbers, decays)

The first pass reduces the step to the amaxes of what is to be rounded, all of which go into
one array, from which all scales come; the second computes it again and writes the codes. The
barrier between them keeps a GPU's compiler from storing in float32 what it can recompute.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax import formats
from fp8jax.optim.overwrite import Overwrite, to_bits
from fp8jax.recipe import Recipe
from fp8jax.scaled import ScaledArray, amax, is_scaled, quantize, scale_of, value


@dataclasses.dataclass(frozen=True)
class Step:
    """The hyperparameters of a step; without a learning rate it moves no weights."""

    recipe: Recipe
    b1: Any
    b2: Any
    eps: Any
    learning_rate: Any = None
    weight_decay: Any = 0.0
    mask: Any = None
    decoupled: bool = True


# How partial amaxes are taken: at most so many, each of at least so many numbers.
_MOST_PARTS, _FEW = 16384, 64


class Leaf(NamedTuple):
    """What a step reads of one parameter."""

    grad: Any
    mu: Any
    nu: Any
    param: Any  # None if the step moves no weights
    master: Any  # None if there is none


class Numbers(NamedTuple):
    """Scalars of one step."""

    rate: Any
    decay: Any
    corrections: tuple[Any, Any]


class _Moved(NamedTuple):
    """A step along one parameter, float32 of its shape, nothing rounded yet."""

    mu: jax.Array
    nu: jax.Array
    update: jax.Array  # to add to the weight; the direction if the step moves no weights
    weight: Any  # the new weight, or None


def format_of(kept: Any) -> formats.Format:
    """The format of an array, or of a `ScaledArray`'s codes."""
    dtype = kept.data.dtype if is_scaled(kept) else kept.dtype
    return next(format for format in formats.ALL if format.dtype == dtype)


def advance(
    step: Step, leaves: list[Leaf], numbers: Numbers, decays: list[bool]
) -> tuple[list[Any], jax.Array]:
    """(update, mu, nu, master) of each leaf, and whether the step was taken."""
    packed, unpacked = _packed(leaves)

    # First pass: amaxes.
    seen = [
        found
        for leaf, decay in zip(unpacked(packed), decays, strict=True)
        for found in _seen(_moved(step, leaf, decay, numbers), leaf)
    ]
    amaxes = _maxima([partial for partial, _, _ in seen])
    limits = np.concatenate([[], *(np.full(len(partial), limit) for partial, limit, _ in seen)])
    ok = jnp.all(amaxes < jnp.inf)
    scales = scale_of(amaxes, limits.astype(np.float32), power_of_two=True)

    # Second pass: codes.
    kept = jnp.concatenate([jnp.zeros(0), *(scale.reshape(-1) for _, _, scale in seen)])
    packed, numbers, scales, kept, ok = lax.optimization_barrier((packed, numbers, scales, kept, ok))
    scales = _Scales(seen, scales, jnp.where(ok, scales, kept), jnp.where(ok, scales, 0))
    new = [
        _written(_moved(step, leaf, decay, numbers), leaf, scales, ok)
        for leaf, decay in zip(unpacked(packed), decays, strict=True)
    ]
    return new, ok


def _packed(leaves: list[Leaf]) -> tuple[Any, Callable[[Any], list[Leaf]]]:
    """The leaves with all scales in one array, and the way back.

    Hundreds of scalars that are read, and written in place, are copied by a GPU one by one.
    """
    nodes, treedef = jax.tree.flatten(leaves, is_leaf=is_scaled)
    shapes = [node.scale.shape for node in nodes if is_scaled(node)]
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=int)

    def unpacked(packed: Any) -> list[Leaf]:
        scales, data = packed
        parts = iter(zip(jnp.split(scales, ends), shapes, strict=False))

        def restored(node: Any, part: jax.Array) -> Any:
            if not is_scaled(node):
                return part
            scale, shape = next(parts)
            return ScaledArray(part, scale.reshape(shape))

        return jax.tree.unflatten(treedef, list(map(restored, nodes, data)))

    scales = jnp.concatenate([jnp.zeros(0), *(node.scale.reshape(-1) for node in nodes if is_scaled(node))])
    # The barrier, or the compiler would see the scalars behind their slices.
    packed = (lax.optimization_barrier(scales), [node.data if is_scaled(node) else node for node in nodes])
    return packed, unpacked


class _Scales:
    """The scales of what is written, one after the other: the new one, the one to keep (the old one where
    the step is skipped), and the one of an update (0 there)."""

    def __init__(self, seen: Any, *scales: jax.Array):
        ends = np.cumsum([len(partial) for partial, _, _ in seen])
        self.parts = zip(*(jnp.split(array, ends) for array in scales), strict=True)

    def __call__(self, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return tuple(part.reshape(shape) for part in next(self.parts))

    def skip(self) -> None:
        next(self.parts)


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


def _moved(step: Step, leaf: Leaf, decay: bool, numbers: Numbers) -> _Moved:
    g, w = value(leaf.grad).astype(jnp.float32), None
    if leaf.param is not None:
        w = value(leaf.param if leaf.master is None else leaf.master).astype(jnp.float32)
        if decay and not step.decoupled:
            g = g + numbers.decay * w
    m = step.b1 * value(leaf.mu) + (1 - step.b1) * g
    v = step.b2 * value(leaf.nu) + (1 - step.b2) * jnp.square(g)
    root = jnp.sqrt(v) / jnp.sqrt(numbers.corrections[1])
    direction = m / numbers.corrections[0] / (root + step.eps)
    if w is None:
        return _Moved(m, v, direction, None)
    if decay and step.decoupled:
        direction = direction + numbers.decay * w
    update = -numbers.rate * direction
    return _Moved(m, v, update, w + update)


def _seen(moved: _Moved, leaf: Leaf) -> list[tuple[jax.Array, float, jax.Array]]:
    """What the first pass must know: amaxes of parts of each block of what is rounded, the top of its format
    and its old scale, in the order in which `_written` takes scales. Wide tensors are only looked at for
    what is not finite."""
    found = []
    written = (
        (moved.mu, leaf.mu),
        (moved.nu, leaf.nu),
        (moved.weight, leaf.param),
        (moved.weight, leaf.master),
    )
    for new, kept in written:
        if is_scaled(kept):
            found.append((_partial_amax(new, kept.scale.shape), format_of(kept).max, kept.scale))
    if not (is_scaled(leaf.nu) and is_scaled(leaf.param)):
        found.append((_partial_amax(moved.nu + jnp.abs(moved.update), ()), 1.0, jnp.ones(1)))
    return found


def _written(moved: _Moved, leaf: Leaf, scales: _Scales, ok: jax.Array) -> tuple[Any, Any, Any, Any]:
    """(update, mu, nu, master) in their formats; the old ones if not `ok`."""

    def keep(new: jax.Array, kept: Any) -> Any:
        if not is_scaled(kept):
            return jnp.where(ok, new, kept)
        scale, kept_scale, _ = scales(kept.scale.shape)
        codes = quantize(new, format_of(kept), scale).data
        return ScaledArray(_choose(ok, codes, kept.data), kept_scale)

    mu, nu = keep(moved.mu, leaf.mu), keep(moved.nu, leaf.nu)
    update, new, master = jnp.where(ok, moved.update, 0.0), moved.weight, None
    if is_scaled(leaf.param):
        scale, _, update_scale = scales(leaf.param.scale.shape)
        if leaf.master is not None:
            # From the master as it is kept, so that the weight can be recomputed from it.
            master = keep(new, leaf.master)
            new = value(master)
        codes = quantize(new, format_of(leaf.param), scale).data
        update = Overwrite(to_bits(codes), update_scale)
    if not (is_scaled(leaf.nu) and is_scaled(leaf.param)):
        scales.skip()  # of no format: only looked at
    return update, mu, nu, master


def _choose(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Codes as integers: XLA on CPU would select among float8 ones by way of float16."""
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)
