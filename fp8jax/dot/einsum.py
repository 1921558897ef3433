"""Einsum of two operands by one `dot_general`.

>>> from fp8jax.dot.einsum import is_single_dot
>>> is_single_dot("bthd,hdm->btm"), is_single_dot("bt,tm->b")     # the second sums `m` away
(True, False)
"""

import itertools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def is_single_dot(subscripts: str) -> bool:
    """Whether one `dot_general` and a transpose compute the einsum: `subscripts` has two operands and "->",
    no repeated letter in an operand, and no letter summed in one operand only."""
    operands, arrow, out = subscripts.partition("->")
    if not arrow or operands.count(",") != 1:
        return False
    lhs, rhs = operands.replace("...", "").split(",")
    out = out.replace("...", "")
    is_repeated = any(len(set(term)) < len(term) for term in (lhs, rhs, out))
    alone = set(lhs) ^ set(rhs)
    return not is_repeated and alone <= set(out) <= set(lhs) | set(rhs) and "..." not in rhs


def einsum_by(
    subscripts: str, lhs: Any, rhs: Any, dot_general: Callable[..., Any], out_sharding: Any = None
) -> Any:
    """`jnp.einsum(subscripts, lhs, rhs)` by `dot_general(lhs, rhs, dimension_numbers)`.

    Args:
        subscripts: `is_single_dot(subscripts)` must hold; lhs may have "...", rhs may not.
        lhs, rhs: operands of `dot_general`; only their `ndim` is used here.
        dot_general: called once; with `out_sharding` if it is given.
        out_sharding: sharding of the output, a `PartitionSpec` or a sharding.
    """
    left, right, out = _spell_out(subscripts, lhs.ndim)
    shared = [letter for letter in left if letter in right]
    batch = [letter for letter in shared if letter in out]
    contracted = [letter for letter in shared if letter not in out]

    def axes(term: str, letters: list[str]) -> tuple[int, ...]:
        return tuple(term.index(letter) for letter in letters)

    dimension_numbers: lax.DotDimensionNumbers = (
        (axes(left, contracted), axes(right, contracted)),
        (axes(left, batch), axes(right, batch)),
    )
    made = "".join(batch) + "".join(c for term in (left, right) for c in term if c not in shared)
    order = [made.index(letter) for letter in out]
    if out_sharding is None:
        return dot_general(lhs, rhs, dimension_numbers).transpose(order)
    spec = getattr(out_sharding, "spec", out_sharding)
    of_letter = dict(itertools.zip_longest(out, spec))
    made_spec = PartitionSpec(*(of_letter[letter] for letter in made))
    if isinstance(out_sharding, NamedSharding):
        made_spec = NamedSharding(out_sharding.mesh, made_spec)
    return dot_general(lhs, rhs, dimension_numbers, out_sharding=made_spec).transpose(order)


def _spell_out(subscripts: str, lhs_ndim: int) -> tuple[str, str, str]:
    """The three terms, with "..." replaced by unused letters."""
    operands, _, out = subscripts.partition("->")
    left, right = operands.split(",")
    unused = (c for c in map(chr, range(ord("A"), 0x250)) if c.isalpha() and c not in subscripts)
    hidden = lhs_ndim - len(left.replace("...", "")) if "..." in left else 0
    letters = "".join(next(unused) for _ in range(hidden))
    return left.replace("...", letters), right, out.replace("...", letters)
