"""Adam whose moments are kept in the formats of the recipe's `moments` column.

Each step, in float32, per tensor:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    update = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)

with the new m and v not yet rounded; then they are rounded to their formats, each tensor on
a fresh power-of-two scale. E4M3 + FP16 costs 3 bytes per parameter instead of 8.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax import formats
from fp8jax.optim.links import dequantize, on_params, plain_mask
from fp8jax.recipe import Recipe
from fp8jax.scaled import ScaledArray, is_scaled, quantize, value

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
        A link with state `optax.ScaleByAdamState(count, mu, nu)`; the leaves of mu and nu are
        `ScaledArray`s, with as many scales as the parameter has, or float32 arrays. Updates
        are float32.
    """
    first, second = (formats.get(name) for name in Recipe.parse(recipe).moments)

    def init(params: Any) -> optax.ScaleByAdamState:
        def zeros(format: formats.Format) -> Any:
            return jax.tree.map(lambda p: _zeros(p, format), params, is_leaf=is_scaled)

        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(first), zeros(second))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        correction = (1 - jnp.float32(b1) ** count, 1 - jnp.float32(b2) ** count)

        def leaf(grad: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
            g = value(grad).astype(jnp.float32)
            m = b1 * value(mu) + (1 - b1) * g
            v = b2 * value(nu) + (1 - b2) * jnp.square(g)
            root = jnp.sqrt(v) / jnp.sqrt(correction[1])
            return m / correction[0] / (root + eps), _keep(m, mu, first), _keep(v, nu, second)

        grads, treedef = jax.tree.flatten(updates, is_leaf=is_scaled)
        kept = (treedef.flatten_up_to(tree) for tree in (state.mu, state.nu))
        new = [leaf(*leaves) for leaves in zip(grads, *kept, strict=True)]
        directions, mu, nu = (treedef.unflatten([leaf[i] for leaf in new]) for i in range(3))
        return directions, optax.ScaleByAdamState(count, mu, nu)

    return on_params(optax.GradientTransformation(init, update))


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
        recipe, b1, b2, eps: as in `scale_by_adam`.
        weight_decay: strength of the L2 term.
        mask: which parameters decay: a tree of booleans, or a function that gives one from
            the parameters (a `ScaledArray` counts as one leaf of its value's shape).
    """
    return on_params(
        optax.chain(
            dequantize(),
            optax.add_decayed_weights(weight_decay, plain_mask(mask)),
            scale_by_adam(recipe, b1, b2, eps),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


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
    """
    return on_params(
        optax.chain(
            scale_by_adam(recipe, b1, b2, eps),
            optax.add_decayed_weights(weight_decay, plain_mask(mask)),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def moments(state: Any) -> tuple[Any, Any]:
    """The trees of first and second moments in an optimizer state, however deep.

    Raises:
        ValueError: the state holds no Adam moments, or more than one pair.
    """

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    found = [node for node in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(node)]
    if len(found) != 1:
        raise ValueError(
            f"`state`: expected an optimizer state with one pair of Adam moments; got {len(found)}."
        )
    return found[0].mu, found[0].nu


def _zeros(param: Any, format: formats.Format) -> Any:
    zeros = jnp.zeros(param.shape, format.dtype)
    if format == formats.FP32:
        return zeros
    scale_shape = param.scale.shape if is_scaled(param) else ()
    return ScaledArray(zeros, jnp.ones(scale_shape, jnp.float32))


def _keep(moment: jax.Array, old: Any, format: formats.Format) -> Any:
    """A new moment in the old one's format."""
    if not is_scaled(old):
        return moment
    return quantize(moment, format, power_of_two=True, blocks=old.scale.shape)
