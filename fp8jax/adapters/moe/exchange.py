"""Tokens to their experts and back.

    rows, sizes, way = send(x, experts, num_experts)      # each token's rows, sorted by expert
    y = ...                                               # each row through its expert
    x = bring_back(y, gates, way)                         # the sum of each token's rows times their gates

Experts have no capacity: there is room for all rows wherever they go, and no token is dropped.

Over a mesh axis each device has some of the experts and some of the tokens. An all-gather gives it all
tokens, of which it takes the rows of its own experts. A reduce-scatter in float32 adds the devices' sums on
the device that has the token. Without a capacity this sends less than an all-to-all, in which each pair of
devices needs room for every row: a token is sent once, not `top_k` times.

References:
    GShard, arXiv 2006.16668, section 3.2 (experts over devices); MegaBlocks, arXiv 2211.15841.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.adapters.moe.routing import Route
from fp8jax.dot import ExpertSharding
from fp8jax.dot.row_tiles import on_each

Dense = Callable[[jax.Array, jax.Array], jax.Array]  # (rows, sizes of the experts' groups) to rows


class Way(NamedTuple):
    """The origin of the rows; over a mesh axis each device's, concatenated."""

    order: Int[Array, " rows"]  # int32, the choice, token * top_k + i, of each row
    place: Int[Array, "tokens top_k"]  # int32, the row of each choice; `rows` if the row is elsewhere


def feed_forward(
    x: Shaped[Array, "*batch width"],
    chosen: Route,
    up: Dense,
    gate: Dense | None,
    down: Dense,
    activation: Callable[[jax.Array], jax.Array],
    over: ExpertSharding | None,
) -> Shaped[Array, "*batch width"]:
    """Each token through its experts, `down(activation(up(x)))` or `down(activation(gate(x)) * up(x))`."""
    tokens = x.reshape(-1, x.shape[-1])
    rows, sizes, way = send(tokens, chosen.experts, chosen.load.size, over)
    hidden = up(rows, sizes)
    hidden = activation(hidden) if gate is None else activation(gate(rows, sizes)) * hidden
    out = down(hidden, sizes)
    return bring_back(out, chosen.gates, way, over).astype(out.dtype).reshape(x.shape)


def send(
    x: Shaped[Array, "tokens width"],
    experts: Int[Array, "tokens top_k"],
    num_experts: int,
    over: ExpertSharding | None = None,
) -> tuple[Shaped[Array, "rows width"], Int[Array, " num_experts"], Way]:
    """The rows of all experts.

    Args:
        x: the tokens.
        experts: int32, the experts of each token, all different.
        num_experts: number of experts.
        over: the mesh axis that shards tokens and experts, if any.

    Returns:
        The rows sorted by expert, tokens * top_k of them; the number of rows of each expert, int32; and the
        way back. Over a mesh axis all three are concatenated over the devices, with room for
        `tokens * min(top_k, experts of a device)` rows on each.
    """
    own = _experts_of_device(num_experts, x.shape[0], over)

    def on_device(x: jax.Array, experts: jax.Array) -> Any:
        first: Any = 0
        if over is not None:
            x, experts = (lax.all_gather(part, over.axis_name, tiled=True) for part in (x, experts))
            first = lax.axis_index(over.axis_name) * own
        tokens, top_k = experts.shape
        group = experts.reshape(-1) - first
        group = jnp.where((group >= 0) & (group < own), group, own)  # other devices' experts last
        order = jnp.argsort(group, stable=True).astype(jnp.int32)
        sizes = jnp.zeros(own, jnp.int32).at[group].add(1, mode="drop")
        rows = tokens * min(top_k, own)
        numbers = jnp.arange(order.size, dtype=order.dtype)
        place = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
        place = jnp.where(place < jnp.sum(sizes), place, rows).reshape(tokens, top_k)
        way = Way(order[:rows], place)
        return _to_rows(x, way), sizes, way

    return on_each(on_device, over)(x, experts)


def bring_back(
    y: Shaped[Array, "rows width"],
    gates: Float[Array, "tokens top_k"],
    way: Way,
    over: ExpertSharding | None = None,
) -> Float[Array, "tokens width"]:
    """The sum of each token's rows times their gates, in float32.

    Args:
        y: the experts' outputs, in the order of `send`'s rows.
        gates: float32.
        way: from `send`.
        over: as in `send`.
    """

    def on_device(y: jax.Array, gates: jax.Array, way: Way) -> jax.Array:
        if over is not None:
            gates = lax.all_gather(gates, over.axis_name, tiled=True)
        sums = jnp.sum(_to_choices(y, way).astype(jnp.float32) * gates[:, :, None], axis=1)
        return sums if over is None else lax.psum_scatter(sums, over.axis_name, tiled=True)

    return on_each(on_device, over)(y, gates, way)


def _experts_of_device(experts: int, tokens: int, over: ExpertSharding | None) -> int:
    """The number of experts on a device; raises ValueError if the devices cannot have equal shares."""
    if over is None:
        return experts
    mesh, axis = over
    if axis not in mesh.axis_names:
        raise ValueError(f"`expert_axis`: expected one of the mesh's axes {mesh.axis_names}; got {axis!r}.")
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            "`mesh`: expected Auto axes; got Explicit ones. Make it with `jax.sharding.Mesh(devices, names)`."
        )
    if axis in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"`expert_axis`: expected an axis that is not split already; got {axis!r} within a `shard_map` "
            "over it. Take another axis of the mesh for the experts than for the batch."
        )
    devices = mesh.shape[axis]
    for name, count in (("num_experts", experts), ("the number of tokens", tokens)):
        if count % devices:
            raise ValueError(f"{name} must divide by the {devices} devices of axis {axis!r}; got {count}.")
    return experts // devices


# Each function is the other's transpose. JAX's own transpose of a gather is a scatter, which is slow, and on
# a GPU not deterministic. Here each choice has at most one row, so the transpose is a gather, too.


@jax.custom_vjp
def _to_rows(x: jax.Array, way: Way) -> jax.Array:
    """(tokens, width) to (rows, width)."""
    return x[way.order // way.place.shape[1]]


@jax.custom_vjp
def _to_choices(y: jax.Array, way: Way) -> jax.Array:
    """(rows, width) to (tokens, top_k, width), 0 where a choice has no row here."""
    return y.at[way.place].get(mode="fill", fill_value=0)


def _rows_backward(way: Way, grad: jax.Array) -> tuple[jax.Array, None]:
    sums = jnp.sum(_to_choices(grad, way).astype(jnp.float32), axis=1)
    return sums.astype(grad.dtype), None


def _choices_backward(way: Way, grad: jax.Array) -> tuple[jax.Array, None]:
    rows = grad.reshape(-1, grad.shape[-1])[way.order]
    has_choice = jnp.arange(rows.shape[0]) < jnp.sum(way.place < rows.shape[0])
    return jnp.where(has_choice[:, None], rows, jnp.zeros_like(rows)), None


_to_rows.defvjp(lambda x, way: (_to_rows(x, way), way), _rows_backward)
_to_choices.defvjp(lambda y, way: (_to_choices(y, way), way), _choices_backward)
