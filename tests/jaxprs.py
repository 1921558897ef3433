"""Reads which dots of a jaxpr are FP8: the test's own eyes, independent of the library's report."""

import jax
import jax.extend.core as jex

FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}

# What may stand between an FP8 array and the dot that multiplies it.
TRANSPARENT = {
    "convert_element_type",
    "mul",
    "transpose",
    "reshape",
    "broadcast_in_dim",
    "copy",
    "optimization_barrier",
}


def dots(fn, *args):
    """[(lhs float8 dtype or None, rhs float8 dtype or None), ...] of every dot in fn's jaxpr as a CPU runs
    it, a scan's body counted once."""
    return list(_dots(jax.make_jaxpr(fn)(*args).jaxpr))


def fp8_dots(fn, *args):
    """How many dots multiply two FP8 arrays, and how many do not."""
    found = dots(fn, *args)
    count = sum(None not in operands for operands in found)
    return count, len(found) - count


def _dots(jaxpr):
    producer = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def origin(var):
        while not isinstance(var, jex.Literal):
            if str(var.aval.dtype) in FLOAT8:
                return str(var.aval.dtype)
            eqn = producer.get(var)
            if eqn is None or eqn.primitive.name not in TRANSPARENT:
                return None
            is_barrier = eqn.primitive.name == "optimization_barrier"
            var = eqn.invars[eqn.outvars.index(var) if is_barrier else 0]
        return None

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield tuple(origin(var) for var in eqn.invars)
        inner = eqn.params
        if eqn.primitive.name == "by_platform":
            inner = {"cpu": inner["cpu"]}
        for below in jex.jaxprs_in_params(inner):
            yield from _dots(below)


def equations(jaxpr, primitive, way):
    """All equations of a primitive, on the way that is taken on this platform: "cpu" or "default"."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            found.append(eqn)
        inner = eqn.params
        if eqn.primitive.name == "by_platform":
            inner = {way: inner[way] if way == "cpu" else inner[way].jaxpr}
        for below in jex.jaxprs_in_params(inner):
            found += equations(below, primitive, way)
    return found
