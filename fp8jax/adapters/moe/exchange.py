"""Tokens to their experts and back.

    rows, sizes, way = send(x, experts, num_experts)      # each token's rows, sorted by expert
    y = ...                                               # each row through its expert
    x = bring_back(y, gates, way)                         # the sum of a token's rows by their gates

No expert has a capacity: there is room for all rows wherever they go, and none is dropped.

Over a mesh axis each device has its part of the experts and of the tokens. It gets all tokens (an
all-gather), takes the rows of its own experts, and the sums that devices made of their rows are added
where the token came from (a reduce-scatter in float32). For what must fit without a capacity that is
less on the wire than an all-to-all, whose parts must each have room for every row: a token crosses once,
not `top_k` times.

References:
    GShard, arXiv 2006.16668, section 3.2 (experts over devices); MegaBlocks, arXiv 2211.15841.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8jax.dot import ExpertSharding, wide_ragged_dot
from fp8jax.platforms import over_axis


class Way(NamedTuple):
    """Where rows came from; over a mesh axis each device's, one after the other."""

    order: jax.Array  # shape=(rows,), int32: the choice, token * top_k + i, of each row
    place: jax.Array  # shape=(tokens, top_k), int32: the row of each choice; `rows` if it is not here


def send(x: jax.Array, experts: jax.Array, num_experts: int, over: ExpertSharding | None = None) -> Any:
    """The rows of all experts.

    Args:
        x: shape=(tokens, width).
        experts: int32, shape=(tokens, top_k): those of each token, none twice.
        num_experts: how many there are.
        over: the mesh axis over which tokens and experts are split, if they are.

    Returns:
        rows, shape=(tokens * top_k, width), sorted by expert; the number of each expert's,
        shape=(num_experts,), int32; and the way back. Over devices all three are those of one device
        after the other, with room for `tokens * min(top_k, its experts)` rows on each.
    """
    here = _parts(num_experts, x.shape[0], over)
    return _on_each(functools.partial(_send, here, over), over)(x, experts)


def bring_back(y: jax.Array, gates: jax.Array, way: Way, over: ExpertSharding | None = None) -> jax.Array:
    """The sum of each token's rows, times their gates, in float32.

    Args:
        y: shape=(rows, width), in the order that `send` gave.
        gates: float32, shape=(tokens, top_k).
        way: what `send` gave.
        over: as for `send`.

    Returns:
        float32, shape=(tokens, width).
    """
    return _on_each(functools.partial(_bring_back, over), over)(y, gates, way)


def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any, over: ExpertSharding | None = None) -> jax.Array:
    """`lax.ragged_dot` of floats, of each device's rows and experts; see `fp8jax.dot.wide_ragged_dot`."""
    return wide_ragged_dot(lhs, rhs, group_sizes, over)


def _on_each(function: Any, over: ExpertSharding | None) -> Any:
    if over is None:
        return function
    return over_axis(function, over.mesh, over.axis_name, P(over.axis_name))


def _parts(experts: int, tokens: int, over: ExpertSharding | None) -> int:
    """The experts of one device; raises ValueError if the devices cannot have equal parts."""
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


def _send(experts_here: int, over: ExpertSharding | None, x: jax.Array, experts: jax.Array) -> Any:
    first = 0
    if over is not None:
        x, experts = (lax.all_gather(part, over.axis_name, tiled=True) for part in (x, experts))
        first = lax.axis_index(over.axis_name) * experts_here
    tokens, top_k = experts.shape
    own = experts.reshape(-1) - first
    own = jnp.where((own >= 0) & (own < experts_here), own, experts_here)  # others last
    order = jnp.argsort(own, stable=True).astype(jnp.int32)
    sizes = jnp.zeros(experts_here, jnp.int32).at[own].add(1, mode="drop")
    rows = tokens * min(top_k, experts_here)
    place = (
        jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
    place = jnp.where(place < jnp.sum(sizes), place, rows).reshape(tokens, top_k)
    way = Way(order[:rows], place)
    return _to_rows(x, way), sizes, way


def _bring_back(over: ExpertSharding | None, y: jax.Array, gates: jax.Array, way: Way) -> jax.Array:
    if over is not None:
        gates = lax.all_gather(gates, over.axis_name, tiled=True)
    sums = jnp.sum(_to_choices(y, way).astype(jnp.float32) * gates[:, :, None], axis=1)
    if over is None:
        return sums
    return lax.psum_scatter(sums, over.axis_name, tiled=True)


# Each is the other's transpose. JAX's own transpose of a gather is a scatter, slow and on a GPU not always
# the same; where each choice has one row, it can be a gather too.


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
