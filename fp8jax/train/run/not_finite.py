"""Numbers that are not finite: the arrays of a state that have some, and the layer that computed the first.

    bad_arrays(state)                           # ["batch_stats/norm/mean"]; [] if all is well
    first_bad_layer(gradients, variables, batch)    # "layers/up 3 (dot_general)"

`first_bad_layer` runs a function again, one operation after the other, and so is for runs that have failed.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from fp8jax.quantization import is_scaled
from fp8jax.rewrite.interpreter.evaluate import last_uses
from fp8jax.rewrite.interpreter.find import CALLS, REMATS, inner_jaxpr, scan_parts
from fp8jax.rewrite.interpreter.param_view import bind
from fp8jax.rewrite.report import layer_of
from fp8jax.variables import named_leaves


class _Found(Exception):
    """The place of the first number that is not finite."""


def bad_arrays(tree: PyTree, is_good: Callable[[Array], Bool[Array, "..."]] = jnp.isfinite) -> list[str]:
    """The paths of arrays with a number that is not good; of a `ScaledArray` codes and scales count.

    Args:
        tree: arrays of any dtype, on all processes; only floating ones are looked at.
        is_good: by default infinite numbers and NaN are not. A call with the same function compiles nothing.
    """
    found = []
    for path, leaf in named_leaves(tree, is_scaled):
        parts = jax.tree.leaves((leaf.data, leaf.scale)) if is_scaled(leaf) else (leaf,)
        # One at a time: on a CPU of several devices, programs with collectives must not overlap.
        if not all(bool(_all_good(_on_device(x), is_good)) for x in parts if _is_float(x)):
            found.append(path)
    return found


@functools.partial(jax.jit, static_argnames="is_good")
def _all_good(x: Array, is_good: Callable[[Array], Bool[Array, "..."]]) -> Bool[Array, ""]:
    return jnp.all(is_good(x))


def _on_device(x: jax.Array) -> jax.Array:
    """The array in the memory that programs compute in; moments may be in the host's."""
    memory = next(iter(x.sharding.device_set)).default_memory().kind
    own = x.sharding.memory_kind
    return x if own in (None, memory) else jax.device_put(x, x.sharding.with_memory_kind(memory))


def first_bad_layer(fn: Callable[..., PyTree], *args: PyTree) -> str:
    """The layer, and the operation, that computes the first number of a function that is not finite.

    An infinite constant, as in the mask of an attention, is none.

    Args:
        fn: a pure function; loops and calls inside of it are looked into, `jax.shard_map` is not.
        *args: arrays.

    Returns:
        E.g. "layers/up 3 (dot_general)", with the number in a scan over layers; named scopes where no layer
        is known. "" if the arguments have such numbers already, or the function computes none.
    """
    if not all(map(_is_finite, jax.tree.leaves(args))):
        return ""
    closed = jax.make_jaxpr(fn)(*args)
    try:
        _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), "", ())
    except _Found as found:
        return str(found)
    return ""


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], scope: str, numbers: tuple[int, ...]
) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jex.Literal) else env[var]

    for eqn, last in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
        ins = [read(var) for var in eqn.invars]
        outs = bind(eqn, *ins)
        if not all(map(_is_finite, outs)) and all(map(_is_finite, ins)):
            _look_inside(eqn, ins, f"{scope}/{eqn.source_info.name_stack}", numbers)
        env.update(zip(eqn.outvars, outs, strict=True))
        for var in last:
            env.pop(var, None)
    return [read(var) for var in jaxpr.outvars]


def _look_inside(eqn: Any, ins: list[Any], scope: str, numbers: tuple[int, ...]) -> None:
    """Raises `_Found` for an equation that computes the first such number."""
    name = eqn.primitive.name
    if name in (*CALLS, *REMATS):
        _run(*inner_jaxpr(eqn), ins, scope, numbers)
    elif name == "scan":
        (jaxpr, inner_consts), (consts, carry, xs) = inner_jaxpr(eqn), scan_parts(eqn, ins)
        order = range(eqn.params["length"])
        for number in reversed(order) if eqn.params["reverse"] else order:
            args = [*consts, *carry, *(lax.index_in_dim(x, number, keepdims=False) for x in xs)]
            carry = _run(jaxpr, inner_consts, args, scope, (*numbers, number))[: len(carry)]
    layer = (layer_of(scope) or "").replace(".", "/") or "/".join(_named(scope)) or "no layer's"
    raise _Found(" ".join([layer, *map(str, numbers), f"({name})"]))


def _named(scope: str) -> list[str]:
    """The named scopes without those of transformations, as "jvp(MLP)" for "MLP"."""
    parts = re.sub(r"\b(?:jit|jvp|transpose|vmap|checkpoint|rematted_computation)\b", "", scope)
    return [part for part in re.split(r"[/()]+", parts) if part]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating) if hasattr(x, "dtype") else isinstance(x, float)


def _is_finite(x: Any) -> bool:
    return not _is_float(x) or bool(jnp.all(jnp.isfinite(x)))
