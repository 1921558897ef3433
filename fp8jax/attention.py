"""Attention: which implementation, and one whose memory does not grow with time times time.

    y = dot_product_attention(query, key, value, is_causal=True)              # "auto"
    y = dot_product_attention(query, key, value, implementation="chunked")

| implementation | who computes | keeps at once |
|---|---|---|
| `eager` | the formula, written out | all scores, in float32, and their softmax |
| `xla` | `jax.nn.dot_product_attention` | the same |
| `cudnn` | cuDNN's flash attention, by way of JAX: float16 or bfloat16 on an NVIDIA GPU | a number a query |
| `chunked` | here, anywhere: Rabe & Staats, arXiv 2112.05682 | the scores of one tile of queries and keys |

"auto" is cuDNN where JAX's default device is an NVIDIA GPU and cuDNN takes these shapes and dtypes; else
"chunked" from `LONG` scores per head on, and "xla" below. `choose` says which, and why.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

IMPLEMENTATIONS = ("auto", "eager", "xla", "cudnn", "chunked")

# Scores of one head, times x sources, from which "auto" takes them in chunks: those of 1024 x 1024. Below,
# they are smaller than what a layer keeps besides, and in chunks each would be computed twice.
LONG = 2**20

# Queries, and keys, of a tile at most: its scores are 1 MiB in float32.
CHUNK = 512

# The score of what a mask hides; finite, so that a query that sees nothing gets the mean of all values, as in
# `jax.nn.dot_product_attention`.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


class Choice(NamedTuple):
    """Who computes, and why."""

    implementation: str  # one of `IMPLEMENTATIONS`, but not "auto"
    reason: str


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """`softmax(scale * query . key + bias) . value`, where `mask` and `is_causal` allow.

    All implementations take products in the operands' dtype with float32 results, and the softmax in
    float32; its weights are cast to value's dtype for the second product. They differ by rounding.
    Gradients, `jit`, `vmap`, `scan` and `jax.checkpoint` work.

    Args:
        query: shape=(..., time, heads, channels).
        key, value: shape=(..., sources, groups, channels); each group of keys serves heads / groups heads.
        bias: float, added to the scores; its shape broadcasts to (..., heads, time, sources). -inf hides a
            key; a query for which it hides all of them gets NaN, as in `jax.nn.dot_product_attention`.
        mask: bool, false where a query must not see a key; shaped as bias. A query that sees nothing gets
            the mean of the values.
        is_causal: whether a query sees only keys that are no later than itself.
        scale: of the scores; None: 1 / sqrt(channels).
        implementation: see this module.

    Returns:
        shape=(..., time, heads, channels), of query's dtype.

    Raises:
        ValueError: no such implementation; shapes do not go together; "cudnn" cannot, and why.
        TypeError: query, key and value are not floating arrays of one dtype, or `bias` or `mask` is no array.

    References:
        Self-attention Does Not Need O(n^2) Memory, arXiv 2112.05682, sections 2 and 3.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation`: expected one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}."
        )
    _check(query, key, value, bias, mask)
    if implementation == "auto":
        implementation = choose(query, key, bias, mask).implementation
    elif implementation == "cudnn" and (why := why_not_cudnn(query, key, bias, mask)):
        raise ValueError(f"`implementation`: cudnn cannot compute this attention: {why}.")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    batch, heads = query.shape[:-3], query.shape[-2]
    scores = (*batch, heads, query.shape[-3], key.shape[-3])
    shape = query.shape[:-1] + value.shape[-1:]
    query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    bias, mask = _in_four("bias", bias, scores), _in_four("mask", mask, scores)
    if implementation in ("eager", "chunked"):
        attend: Any = _eager if implementation == "eager" else _chunked
    else:
        if implementation == "cudnn":  # which broadcasts neither queries nor keys
            bias, mask = (None if x is None else _whole(x, scores) for x in (bias, mask))
        of_jax: Any = jax.nn.dot_product_attention
        attend = functools.partial(of_jax, implementation=implementation)
    out = attend(query, key, value, bias=bias, mask=mask, is_causal=is_causal, scale=scale)
    return out.reshape(shape).astype(query.dtype)


def choose(query: Any, key: Any, bias: Any = None, mask: Any = None) -> Choice:
    """What "auto" takes for such arguments, arrays or `jax.ShapeDtypeStruct`s, on JAX's default device."""
    why_not = why_not_cudnn(query, key, bias, mask)
    if why_not is None:
        return Choice("cudnn", "an NVIDIA GPU, and cuDNN takes these shapes")
    time, sources = query.shape[-3], key.shape[-3]
    if time * sources > LONG:
        return Choice("chunked", f"no cuDNN: {why_not}; {time} x {sources} scores a head are many")
    return Choice("xla", f"no cuDNN: {why_not}; {time} x {sources} scores a head are few")


def why_not_cudnn(query: Any, key: Any, bias: Any = None, mask: Any = None) -> str | None:
    """Why cuDNN's attention does not take these on JAX's default device; None if it does."""
    device = _device()
    if device.platform not in ("gpu", "cuda") or not hasattr(device, "compute_capability"):
        return f"the device is a {device.platform}, no NVIDIA GPU"
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"it takes float16 and bfloat16, not {query.dtype}"
    capability = float(device.compute_capability)
    channels, largest = query.shape[-1], 256 if capability >= 9 else 128
    if capability < 8:
        return f"compute capability {capability} is below 8"
    if channels > largest or channels % 8:
        return f"{channels} channels a head are not a multiple of 8 up to {largest}"
    if (bias is not None or mask is not None) and (query.shape[-3] % 2 or key.shape[-3] % 2):
        return "with a bias or a mask, time and sources must be even"
    return None


def _device() -> Any:
    """The device that a program runs on if nothing else is said."""
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return default if hasattr(default, "platform") else jax.local_devices(backend=default)[0]


def _check(query: Any, key: Any, value: Any, bias: Any, mask: Any) -> None:
    operands = {"query": query, "key": key, "value": value}
    for name, x in {**operands, "bias": bias, "mask": mask}.items():
        if not hasattr(x, "dtype") and (x is not None or name in operands):
            raise TypeError(f"`{name}`: expected an array; got {type(x).__name__}.")
    if not jnp.issubdtype(query.dtype, jnp.floating) or {query.dtype} != {key.dtype, value.dtype}:
        got = ", ".join(f"{name} {x.dtype}" for name, x in operands.items())
        raise TypeError(f"expected query, key and value of one floating dtype; got {got}.")
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if min(query.ndim, key.ndim) < 3 or key.shape != value.shape or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"expected (..., time, heads, channels), key and value of one shape; got {shapes}.")
    if query.shape[-1] != key.shape[-1] or query.shape[-2] % max(key.shape[-2], 1):
        raise ValueError(f"expected the same channels, and heads in equal groups; got {shapes}.")
    if 0 in (*query.shape[-3:], *key.shape[-3:]):
        raise ValueError(f"expected at least one of each of time, heads and channels; got {shapes}.")
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"`bias`: expected a floating array; got {bias.dtype}. What hides is a `mask`.")
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"`mask`: expected bool; got {mask.dtype}. Numbers to be added go into `bias`.")


def _in_four(name: str, x: jax.Array | None, scores: tuple[int, ...]) -> jax.Array | None:
    """A bias or mask with the four axes of (batch, heads, time, sources), each 1 or whole."""
    if x is None:
        return None
    shape = (1,) * (len(scores) - x.ndim) + x.shape
    if len(shape) > len(scores) or any(n not in (1, whole) for n, whole in zip(shape, scores, strict=False)):
        raise ValueError(
            f"`{name}`: expected a shape that broadcasts to (..., heads, time, sources), here {scores}; got "
            f"{x.shape}."
        )
    x = x.reshape(shape)
    if math.prod(x.shape[:-3]) > 1:
        x = jnp.broadcast_to(x, (*scores[:-3], *x.shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _whole(x: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(x, (*x.shape[:-2], *scores[-2:]))


def _scores(query: jax.Array, key: jax.Array, scale: float) -> jax.Array:
    """Of (batch, time, group, head, channel) and (batch, source, group, channel), in float32: (batch, group,
    head, time, source)."""
    scores = jnp.einsum("btghc,bsgc->bghts", query, key, preferred_element_type=jnp.float32)
    return scores * scale


def _grouped(x: jax.Array | None, groups: int) -> jax.Array | None:
    """A bias or mask with an axis of groups before that of heads."""
    if x is None:
        return None
    by = groups if x.shape[1] > 1 else 1
    return x.reshape(x.shape[0], by, x.shape[1] // by, *x.shape[2:])


def _positions(scores: jax.Array, axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, scores.shape, axis)


def _eager(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bias: Any, mask: Any, is_causal: bool, scale: float
) -> jax.Array:
    groups = key.shape[2]
    query = query.reshape(*query.shape[:2], groups, -1, query.shape[-1])
    scores, (bias, mask) = _scores(query, key, scale), (_grouped(x, groups) for x in (bias, mask))
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, _HIDDEN)
    if is_causal:
        scores = jnp.where(_positions(scores, 3) >= _positions(scores, 4), scores, _HIDDEN)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bghts,bsgc->btghc", weights, value, preferred_element_type=jnp.float32)


# In chunks #######################################################################################


class _Tile(NamedTuple):
    """What is known of a tile besides its keys and values."""

    first: jax.Array  # position of its first query, or key
    bias: Any
    mask: Any


def _chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bias: Any, mask: Any, is_causal: bool, scale: float
) -> jax.Array:
    """Queries in chunks, one after the other; each goes over chunks of keys. In the backward both are
    computed anew, so that only the inputs and one chunk's statistics are kept."""
    (batch, time, heads, channels), (_, sources, groups, _) = query.shape, key.shape
    rows, columns = _Split.of(time, CHUNK), _Split.of(sources, CHUNK)
    query = rows.cut(query.reshape(batch, time, groups, heads // groups, channels), 1)
    keys, values = columns.cut(key, 1), columns.cut(value, 1)
    bias, mask = (_grouped(x, groups) for x in (bias, mask))
    by_row = _Tile(rows.firsts(), *(None if x is None else rows.cut(x, 3) for x in (bias, mask)))

    @functools.partial(jax.checkpoint, prevent_cse=False)  # of a scan's body there is no other copy
    def attend(query: jax.Array, keys: jax.Array, values: jax.Array, row: _Tile) -> jax.Array:
        of_columns = _Tile(columns.firsts(), *(None if x is None else columns.cut(x, 4) for x in row[1:]))

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(carry: Any, tile: tuple[jax.Array, jax.Array, _Tile]) -> tuple[Any, None]:
            key, value, column = tile
            scores = _scores(query, key, scale)
            if column.bias is not None:
                scores = scores + column.bias
            if column.mask is not None:
                scores = jnp.where(column.mask, scores, _HIDDEN)
            there = column.first + _positions(scores, 4)
            if is_causal:
                scores = jnp.where(row.first + _positions(scores, 3) >= there, scores, _HIDDEN)
            if columns.padded > sources:
                scores = jnp.where(there < sources, scores, -jnp.inf)
            return _add_tile(carry, scores, value), None

        shape = (batch, groups, heads // groups, rows.size)
        largest = jnp.full((*shape, 1), -jnp.inf)
        start = (largest, jnp.zeros((*shape, 1)), jnp.zeros((*shape, values.shape[-1])))
        (_, total, out), _ = lax.scan(step, start, (keys, values, of_columns))
        return jnp.moveaxis(out / total, 3, 1).astype(query.dtype)

    _, out = lax.scan(lambda _, x: (None, attend(x[0], keys, values, x[1])), None, (query, by_row))
    return rows.join(out, 1).reshape(batch, time, heads, -1)


def _add_tile(carry: tuple[Any, Any, Any], scores: jax.Array, value: jax.Array) -> tuple[Any, Any, Any]:
    """The largest score so far, the sum of exponentials below it, and of what they weigh (section 2)."""
    largest, total, out = carry
    # A constant shift of the scores changes no softmax, so it has no gradient either.
    new = lax.stop_gradient(jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True)))
    # Where a bias has hidden all keys so far, -inf - -inf would be NaN; a later tile may show some.
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    weights, shrink = jnp.exp(scores - shift), jnp.exp(largest - shift)
    added = jnp.einsum(
        "bghts,bsgc->bghtc", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return new, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), out * shrink + added


@dataclasses.dataclass(frozen=True)
class _Split:
    """An axis cut into equal parts, with zeros after its end."""

    count: int
    size: int
    length: int

    @classmethod
    def of(cls, length: int, chunk: int) -> "_Split":
        """As few parts as are needed, and no longer than they must be."""
        count = max(math.ceil(length / chunk), 1)
        return cls(count, math.ceil(length / count), length)

    @property
    def padded(self) -> int:
        return self.count * self.size

    def firsts(self) -> jax.Array:
        """The position of each part's first element."""
        return self.size * jnp.arange(self.count)

    def cut(self, x: jax.Array, axis: int) -> jax.Array:
        """The parts along a new first axis; an axis of 1 is the same in all."""
        if x.shape[axis] == 1:
            return jnp.broadcast_to(x, (self.count, *x.shape))
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, self.padded - x.shape[axis])
        x = jnp.pad(x, pads) if self.padded > x.shape[axis] else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :]), axis, 0)

    def join(self, parts: jax.Array, axis: int) -> jax.Array:
        """The inverse of `cut`."""
        x = jnp.moveaxis(parts, 0, axis)
        x = x.reshape(*x.shape[:axis], self.padded, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, self.length, axis=axis)
