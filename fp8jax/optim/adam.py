"""Adam whose moments are kept in the formats of the recipe's `moments` column.

Each step, in float32, per tensor:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    direction = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)

with the new m and v not yet rounded; then they are rounded to their formats, each tensor on
a fresh power-of-two scale. E4M3 + FP16 costs 3 bytes per parameter instead of 8.

A step is computed twice: a first pass reduces it to the amaxes, all of which go into one
array, and from whose scales a second pass writes the codes. The barrier between them keeps
the compiler from storing in float32 what it can recompute.

A step that would make any weight or moment infinite or NaN changes none, and is counted.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp8jax import formats
from fp8jax.optim.links import on_params, plain_mask
from fp8jax.optim.overwrite import Overwrite, to_bits
from fp8jax.optim.state import AdamState, is_adam_state
from fp8jax.recipe import Recipe
from fp8jax.scaled import ScaledArray, amax, is_scaled, quantize, scale_of, value
from fp8jax.variables import PARAMS, has_params

Schedule = Callable[[Any], Any]


def scale_by_adam(
    recipe: Recipe | str = "O2", b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with the recipe's moments.

    Args:
        recipe: its `moments` column is read: FP32+FP32, or E4M3+FP16.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.

    Returns:
        A link whose state is an `AdamState` without masters. Updates are float32, and zero
        where a step is skipped.

    Raises:
        ValueError: the recipe keeps master weights, which only `adam` and `adamw` can.
    """
    row = Recipe.parse(recipe)
    if row.master_weight != "-":
        raise ValueError(
            f"`recipe`: {row} keeps master weights, which are updated by `adam` and `adamw`; use one of them."
        )
    return _optimizer(_Step(row, b1, b2, eps))


def adam(
    learning_rate: Any,
    recipe: Recipe | str = "O2",
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam; weight decay, if any, is added to the gradient (L2), as in MS-AMP's `LBAdam`.

    Args:
        learning_rate: number or schedule.
        recipe: its `moments` and `master_weight` columns are read.
        b1, b2, eps: as in `scale_by_adam`.
        weight_decay: strength of the L2 term.
        mask: which parameters decay: a tree of booleans, or a function that gives one from
            the parameters (a `ScaledArray` counts as one leaf of its value's shape).

    Returns:
        An optimizer whose state is an `AdamState`; `update` needs the parameters. Updates of
        plain parameters are float32 arrays to add; those of `ScaledArray`s are their new
        values (`Overwrite`), which `fp8jax.apply_updates` puts in place. Links that change
        updates therefore come before it.
    """
    return _optimizer(_Step(Recipe.parse(recipe), b1, b2, eps, learning_rate, weight_decay, mask, False))


def adamw(
    learning_rate: Any,
    recipe: Recipe | str = "O2",
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW: `optax.adamw` with the recipe's moments.

    Args: as in `adam`; the weight decay is decoupled: `learning_rate * weight_decay * w` is
        subtracted from the weight.

    Returns: as `adam`.
    """
    return _optimizer(_Step(Recipe.parse(recipe), b1, b2, eps, learning_rate, weight_decay, mask, True))


def with_masters(state: Any, params: Any) -> Any:
    """An optimizer state whose master weights are those of a wider model.

    `init` can only give them the values of the FP8 weights; this gives them a checkpoint's.

    Args:
        state: an optimizer state, with one `adam` or `adamw` in it.
        params: parameters of the same structure, plain arrays or `ScaledArray`s, or whole
            variables.
    """

    def rebuild(node: Any) -> Any:
        if not is_adam_state(node):
            return node
        tree = params[PARAMS] if has_params(params) else params
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_scaled)
        masters = treedef.flatten_up_to(node.master)
        new = [m if m is None else _like(m, value(leaf)) for m, leaf in zip(masters, leaves, strict=True)]
        return node._replace(master=treedef.unflatten(new))

    return jax.tree.map(rebuild, state, is_leaf=is_adam_state)


def _like(kept: Any, new: jax.Array) -> Any:
    """A float32 array in the format of what is kept in its place."""
    if not is_scaled(kept):
        return new.astype(jnp.float32)
    return quantize(new, _format_of(kept), power_of_two=True, blocks=kept.scale.shape)


def _format_of(kept: Any) -> formats.Format:
    dtype = kept.data.dtype if is_scaled(kept) else kept.dtype
    return next(format for format in formats.ALL if format.dtype == dtype)


@dataclasses.dataclass(frozen=True)
class _Step:
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


class _Leaf(NamedTuple):
    """What a step reads of one parameter."""

    grad: Any
    mu: Any
    nu: Any
    param: Any  # None if the step moves no weights
    master: Any  # None if there is none


class _Numbers(NamedTuple):
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


def _optimizer(step: _Step) -> optax.GradientTransformationExtraArgs:
    first, second = (formats.get(name) for name in step.recipe.moments)

    def init(params: Any) -> AdamState:
        def zeros(format: formats.Format) -> Any:
            return jax.tree.map(lambda p: _zeros(p, format), params, is_leaf=is_scaled)

        adam = optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(first), zeros(second))
        master = jax.tree.map(lambda p: _master_of(p, step.recipe), params, is_leaf=is_scaled)
        return AdamState(adam, master, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        if params is None and step.learning_rate is not None:
            raise ValueError(
                "`params`: expected the parameters; got None. Call `update(grads, state, params)`."
            )
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_scaled)
        count = optax.safe_increment(state.adam.count)
        numbers = _Numbers(
            step.learning_rate(state.adam.count) if callable(step.learning_rate) else step.learning_rate,
            step.weight_decay,
            (1 - jnp.float32(step.b1) ** count, 1 - jnp.float32(step.b2) ** count),
        )
        kept = [treedef.flatten_up_to(tree) for tree in (state.adam.mu, state.adam.nu, state.master)]
        olds = [None] * len(grads) if step.learning_rate is None else treedef.flatten_up_to(params)
        mu, nu, master = kept
        leaves = [_Leaf(*parts) for parts in zip(grads, mu, nu, olds, master, strict=True)]
        new, ok = _advance(step, leaves, numbers, _decays(step, treedef, params))
        directions, mu, nu, master = (treedef.unflatten([leaf[i] for leaf in new]) for i in range(4))
        adam = optax.ScaleByAdamState(jnp.where(ok, count, state.adam.count), mu, nu)
        return directions, AdamState(adam, master, state.skipped + jnp.where(ok, 0, 1))

    return on_params(optax.GradientTransformation(init, update))


def _advance(
    step: _Step, leaves: list[_Leaf], numbers: _Numbers, decays: list[bool]
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


def _packed(leaves: list[_Leaf]) -> tuple[Any, Callable[[Any], list[_Leaf]]]:
    """The leaves with all scales in one array, and the way back.

    Hundreds of scalars that are read, and written in place, are copied by a GPU one by one.
    """
    nodes, treedef = jax.tree.flatten(leaves, is_leaf=is_scaled)
    shapes = [node.scale.shape for node in nodes if is_scaled(node)]
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=int)

    def unpacked(packed: Any) -> list[_Leaf]:
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


def _moved(step: _Step, leaf: _Leaf, decay: bool, numbers: _Numbers) -> _Moved:
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


def _seen(moved: _Moved, leaf: _Leaf) -> list[tuple[jax.Array, float, jax.Array]]:
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
            found.append((_partial_amax(new, kept.scale.shape), _format_of(kept).max, kept.scale))
    if not (is_scaled(leaf.nu) and is_scaled(leaf.param)):
        found.append((_partial_amax(moved.nu + jnp.abs(moved.update), ()), 1.0, jnp.ones(1)))
    return found


def _written(moved: _Moved, leaf: _Leaf, scales: _Scales, ok: jax.Array) -> tuple[Any, Any, Any, Any]:
    """(update, mu, nu, master) in their formats; the old ones if not `ok`."""

    def keep(new: jax.Array, kept: Any) -> Any:
        if not is_scaled(kept):
            return jnp.where(ok, new, kept)
        scale, kept_scale, _ = scales(kept.scale.shape)
        codes = quantize(new, _format_of(kept), scale).data
        return ScaledArray(_choose(ok, codes, kept.data), kept_scale)

    mu, nu = keep(moved.mu, leaf.mu), keep(moved.nu, leaf.nu)
    update, new, master = jnp.where(ok, moved.update, 0.0), moved.weight, None
    if is_scaled(leaf.param):
        scale, _, update_scale = scales(leaf.param.scale.shape)
        if leaf.master is not None:
            # From the master as it is kept, so that the weight can be recomputed from it.
            master = keep(new, leaf.master)
            new = value(master)
        codes = quantize(new, _format_of(leaf.param), scale).data
        update = Overwrite(to_bits(codes), update_scale)
    if not (is_scaled(leaf.nu) and is_scaled(leaf.param)):
        scales.skip()  # of no format: only looked at
    return update, mu, nu, master


def _choose(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Codes as integers: XLA on CPU would select among float8 ones by way of float16."""
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)


def _decays(step: _Step, treedef: Any, params: Any) -> list[bool]:
    """Which leaves decay."""
    if step.learning_rate is None:
        return [False] * treedef.num_leaves
    if step.mask is None:
        return [True] * treedef.num_leaves
    mask: Any = plain_mask(step.mask)
    mask = mask(params) if callable(mask) else mask
    spread = jax.tree.map(lambda m, below: jax.tree.map(lambda _: m, below, is_leaf=is_scaled), mask, params)
    return treedef.flatten_up_to(spread)


def _master_of(param: Any, recipe: Recipe) -> Any:
    """The master of a parameter that is kept in the recipe's weight format, where it has one."""
    if recipe.master_weight == "-" or not is_scaled(param) or _format_of(param).name != recipe.weight:
        return None
    format = formats.get(recipe.master_weight)
    if format == formats.FP32:
        return value(param)
    return quantize(value(param), format, power_of_two=True, blocks=param.scale.shape)


def _zeros(param: Any, format: formats.Format) -> Any:
    zeros = jnp.zeros(param.shape, format.dtype)
    if format == formats.FP32:
        return zeros
    scale_shape = param.scale.shape if is_scaled(param) else ()
    return ScaledArray(zeros, jnp.ones(scale_shape, jnp.float32))
