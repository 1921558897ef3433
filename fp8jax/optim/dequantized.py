"""Any optax optimizer for models with quantized weights and gradients.

    tx = fp8jax.optim.with_dequantized(optax.lion(1e-4))
    tx = fp8jax.optim.adafactor(1e-3)

The optax optimizer gets dequantized float32 arrays. The new value of a quantized weight is rounded to the
weight's format. The optimizer's state is not quantized.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.comm import Zero
from fp8jax.optim.checks import (
    check_rate,
    check_weights,
    recipe_of,
    refuse_8_bits,
    refuse_masters,
    refuse_zero,
)
from fp8jax.optim.replace_update import ReplaceUpdate
from fp8jax.optim.spoilt import check_tags, spoilt_updates
from fp8jax.optim.state import DequantizedState
from fp8jax.optim.transforms import plain_mask, takes_variables
from fp8jax.quantization import amax, format_of, is_scaled, quantize, value, with_float32_scales
from fp8jax.recipe import Recipe


def adafactor(
    learning_rate: Any = None,
    recipe: Recipe | str | None = None,
    *,
    zero: Zero | None = None,
    weight_decay_mask: Any = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adafactor` for quantized weights and gradients.

    The second moment is factored into row and column statistics if the two largest axes have
    `min_dim_size_to_factor` (128) entries or more. There is no first moment.

    Args:
        learning_rate: number or schedule; None scales steps by each weight's root mean square only.
        recipe: the model's recipe, without master weights; or None.
        zero: None; a shard's rows and columns are not the tensor's.
        weight_decay_mask: as `mask` in `adam`.
        options: options of `optax.adafactor`.

    Returns:
        An optimizer as from `with_dequantized`.

    Raises:
        TypeError: `learning_rate` is a recipe.
        ValueError: the recipe has master weights, or `zero` is given; from `init`, 8-bit weights, or weights
            in another format than the recipe's.

    References:
        Adafactor, arXiv 1804.04235.
    """
    check_rate(learning_rate)
    row = recipe_of(recipe)
    if row is not None:
        refuse_masters(row)
    refuse_zero(zero, "adafactor", "rows and columns of a tensor's parts are not the tensor's")
    options["weight_decay_mask"] = plain_mask(weight_decay_mask)
    return _with_dequantized(optax.adafactor(learning_rate, **options), row)


def with_dequantized(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on the dequantized float32 values of parameters and gradients.

    A step that would make a weight or a float of tx's state infinite or NaN is skipped, and
    `fp8jax.optim.skipped` counts it.

    Args:
        tx: an optimizer of plain arrays; of a chain, everything after `clip_by_global_norm`.

    Returns:
        An optimizer for parameters or whole variables; `update` needs them. The updates of plain parameters
        are arrays to add. The updates of `ScaledArray`s are their new values (`ReplaceUpdate`), in the same
        format on new power-of-two scales, rounded to nearest. So this optimizer is the last in a chain.

    Raises:
        ValueError: a weight has 8 bits, so that small steps would be lost. Use `adam` or `adamw`, which have
            master weights.
    """
    return _with_dequantized(tx, None)


def _with_dequantized(
    tx: optax.GradientTransformation, recipe: Recipe | None
) -> optax.GradientTransformationExtraArgs:
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> DequantizedState:
        check_weights(recipe, params)
        refuse_8_bits(params)
        return DequantizedState(tx.init(_values(params)), jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, DequantizedState]:
        if params is None:
            raise ValueError(
                "`params`: expected the parameters; got None. Call `update(grads, state, params)`."
            )
        params = with_float32_scales(params)
        broken, grads = check_tags(updates), _values(updates)
        new, inner = tx.update(grads, state.inner, _values(params), **extra)
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        weights = [
            value(leaf).astype(jnp.float32) + update
            for leaf, update in zip(leaves, treedef.flatten_up_to(new), strict=True)
        ]
        ok = jnp.all(jnp.stack([amax(x) < jnp.inf for x in _floats([weights, inner])]))
        inner = jax.tree.map(lambda new, old: jnp.where(ok, new, old), inner, state.inner)
        written = [
            _written(leaf, weight, update, ok)
            for leaf, weight, update in zip(leaves, weights, treedef.flatten_up_to(new), strict=True)
        ]
        updates = spoilt_updates(treedef.unflatten(written), params, broken, grads)
        return updates, DequantizedState(inner, state.skipped + jnp.where(ok, 0, 1))

    return takes_variables(optax.GradientTransformationExtraArgs(init, update))


def _values(tree: Any) -> Any:
    return jax.tree.map(value, tree, is_leaf=is_scaled)


def _floats(tree: Any) -> list[jax.Array]:
    arrays = map(jnp.asarray, jax.tree.leaves(tree))
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]


def _written(leaf: Any, weight: jax.Array, update: jax.Array, ok: jax.Array) -> Any:
    """The update of one parameter; no change unless `ok`."""
    if not is_scaled(leaf):
        return jnp.where(ok, update, 0)
    new = quantize(weight, format_of(leaf), power_of_two=True, blocks=leaf.scale.shape)
    return ReplaceUpdate.by(jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, leaf))
