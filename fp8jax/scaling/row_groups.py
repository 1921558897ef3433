"""Rows that are sorted by group, and group sizes of shape (groups,)."""

import jax
import jax.numpy as jnp


def starts_of(sizes: jax.Array) -> jax.Array:
    """The first row of each group."""
    return jnp.cumsum(sizes) - sizes


def groups_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row, int32; the number of groups for rows past the last group's end."""
    row = jnp.arange(rows, dtype=sizes.dtype)
    return jnp.sum(jnp.cumsum(sizes)[:, None] <= row[None], axis=0, dtype=jnp.int32)


def in_aligned_groups(rows: jax.Array, sizes: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The rows with zeros after each group, up to a multiple of `size`; and the sizes of these groups."""
    aligned = -(-sizes // size) * size
    total = -(-(rows.shape[0] + sizes.shape[0] * (size - 1)) // size) * size
    number = groups_of_rows(aligned, total)
    group = jnp.minimum(number, sizes.shape[0] - 1)
    within = jnp.arange(total, dtype=sizes.dtype) - starts_of(aligned)[group]
    is_own = (number < sizes.shape[0]) & (within < sizes[group])
    some = rows if rows.shape[0] else jnp.zeros((1, *rows.shape[1:]), rows.dtype)
    taken = jnp.take(some, starts_of(sizes)[group] + within, axis=0, mode="clip")
    return jnp.where(is_own[:, None], taken, jnp.zeros((), rows.dtype)), aligned
