"""An Adam step along moments that are kept `Blockwise`, or in float32.

As in `passes` a step is computed twice: first what its scales come from and whether it is finite, then, with
all of that known, what is written. A GPU keeps no float32 copy of a moment in between; nor does a CPU, which
goes through large tensors piece by piece (`eight_bit_pieces`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.optim import eight_bit_pieces
from fp8jax.optim.blockwise import Blockwise, block_absmax
from fp8jax.optim.overwrite import Overwrite
from fp8jax.optim.passes import Written
from fp8jax.optim.step import Leaf, Moved, Numbers, moved, rounded
from fp8jax.platforms import by_platform
from fp8jax.scaled import ScaledArray, amax, format_of, is_scaled, scale_of, to_bits

# Parameters of fewer numbers keep float32 moments, as in bitsandbytes (`min_8bit_size`).
FEWEST = 4096


def first_moments(param: Any) -> tuple[Any, Any]:
    """The moments that a parameter starts with."""
    like = param.data if is_scaled(param) else param
    if like.size < FEWEST:
        return jnp.zeros_like(like, jnp.float32), jnp.zeros_like(like, jnp.float32)
    return Blockwise.zeros(like, signed=True), Blockwise.zeros(like, signed=False)


def advance(leaves: list[Leaf], numbers: Numbers, decays: tuple[str, ...]) -> tuple[list[Written], jax.Array]:
    """As `passes.advance`."""
    found = by_platform(
        leaves, numbers, cpu=_all_found_in_pieces, default=_all_found, decays=decays, whole=True
    )
    ok = jnp.all(jnp.stack([jnp.array(True), *(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(found))]))
    leaves, numbers, found, ok = lax.optimization_barrier((leaves, numbers, found, ok))
    ways: dict[str, Any] = {"cpu": _all_written_in_pieces, "default": _all_written}
    return by_platform(leaves, numbers, found, ok, **ways, decays=decays, whole=True), ok


def _all_found(leaves: list[Leaf], numbers: Numbers, *, decays: tuple[str, ...]) -> list[Any]:
    """The first pass."""
    return [_found(_step(leaf, numbers, decay), leaf) for leaf, decay in zip(leaves, decays, strict=True)]


def _all_found_in_pieces(leaves: list[Leaf], numbers: Numbers, *, decays: tuple[str, ...]) -> list[Any]:
    def one(leaf: Leaf, decay: str) -> tuple[Any, ...]:
        cut = eight_bit_pieces.cut_in_blocks(leaf)
        if cut is None:
            return _found(_step(leaf, numbers, decay), leaf)
        return eight_bit_pieces.found(leaf, numbers, decay, cut)

    return [one(leaf, decay) for leaf, decay in zip(leaves, decays, strict=True)]


def _all_written(
    leaves: list[Leaf], numbers: Numbers, found: list[Any], ok: jax.Array, *, decays: tuple[str, ...]
) -> list[Written]:
    """The second pass."""
    return [
        _written(leaf, _step(leaf, numbers, decay), known, ok)
        for leaf, decay, known in zip(leaves, decays, found, strict=True)
    ]


def _all_written_in_pieces(
    leaves: list[Leaf], numbers: Numbers, found: list[Any], ok: jax.Array, *, decays: tuple[str, ...]
) -> list[Written]:
    def one(leaf: Leaf, decay: str, known: tuple[Any, ...]) -> Written:
        cut = eight_bit_pieces.cut_in_blocks(leaf)
        if cut is None:
            return _written(leaf, _step(leaf, numbers, decay), known, ok)
        scales = _scales(leaf, known)
        arrays = eight_bit_pieces.written(leaf, numbers, decay, cut, known[:2], scales, ok)
        return _assembled(leaf, arrays, known, scales, ok)

    return [one(*each) for each in zip(leaves, decays, found, strict=True)]


def _step(leaf: Leaf, numbers: Numbers, decay: str) -> Moved:
    return moved(_wide(leaf), numbers, decay)


def _wide(leaf: Leaf) -> Leaf:
    """A leaf whose moments are float32 arrays."""
    mu, nu = (x.dequantize() if isinstance(x, Blockwise) else x for x in (leaf.mu, leaf.nu))
    return leaf._replace(mu=mu, nu=nu)


def _found(new: Moved, leaf: Leaf) -> tuple[Any, ...]:
    """What is to be known before a leaf is written: absmaxes of its moments, amaxes of what is scaled, and
    one number that is finite if the step is."""
    absmaxes = [block_absmax(x) if isinstance(leaf.mu, Blockwise) else None for x in (new.mu, new.nu)]
    amaxes = [
        amax(new.weight, kept.scale.shape) if is_scaled(kept) else None for kept in (leaf.param, leaf.master)
    ]
    return *absmaxes, *amaxes, amax(jnp.abs(new.mu) + new.nu + jnp.abs(new.update))


def _written(leaf: Leaf, new: Moved, known: tuple[Any, ...], ok: jax.Array) -> Written:
    """What a step makes of a leaf: the new, or if the step is not taken the old."""
    kept = [
        (Blockwise.of(x, old.signed, absmax) if isinstance(old, Blockwise) else x, old)
        for x, old, absmax in zip((new.mu, new.nu), (leaf.mu, leaf.nu), known[:2], strict=True)
    ]
    weights = rounded(new, _wide(leaf), _scales(leaf, known))
    pairs = [*kept, (weights.param, leaf.param if is_scaled(leaf.param) else None)]
    pairs.append((weights.master, leaf.master))
    mu, nu, weight, master = (
        jax.tree.map(lambda new, old: _choose(ok, new, old), new, old) for new, old in pairs
    )
    update = Overwrite.by(weight) if is_scaled(leaf.param) else jnp.where(ok, new.update, -0.0)
    return update, mu, nu, master


def _scales(leaf: Leaf, known: tuple[Any, ...]) -> list[jax.Array]:
    """The new scales of a weight and a master that have some."""
    return [
        scale_of(found, format_of(old).max, power_of_two=True)
        for found, old in zip(known[2:4], (leaf.param, leaf.master), strict=True)
        if found is not None
    ]


def _assembled(
    leaf: Leaf, arrays: Leaf, known: tuple[Any, ...], scales: list[jax.Array], ok: jax.Array
) -> Written:
    """What is written of a leaf, from its new arrays and what was found of it."""
    rest = iter(scales)
    mu, nu = (
        Blockwise(codes, jnp.where(ok, new, old.absmax), old.signed)
        for codes, new, old in zip((arrays.mu, arrays.nu), known[:2], (leaf.mu, leaf.nu), strict=True)
    )
    param, master = (
        ScaledArray(new, jnp.where(ok, next(rest), old.scale)) if is_scaled(old) else new
        for new, old in ((arrays.param, leaf.param), (arrays.master, leaf.master))
    )
    return Overwrite.by(param) if is_scaled(leaf.param) else arrays.grad, mu, nu, master


def _choose(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating) or new.dtype == jnp.float32:
        return jnp.where(ok, new, old)
    # Codes as integers: XLA on CPU would select among float8 ones by way of float16.
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)
