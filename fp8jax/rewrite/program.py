"""A function of parameters, traced for inputs of some shapes, with the plan of its FP8 dot products."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import backends
from fp8jax.dot import Weight
from fp8jax.recipe import Recipe
from fp8jax.rewrite.choose import choose, layer_path, report
from fp8jax.rewrite.evaluate import Context, evaluate
from fp8jax.rewrite.follow import Tracked, Way
from fp8jax.rewrite.plan import Plan, find
from fp8jax.rewrite.report import Report
from fp8jax.rewrite.rules import Rules
from fp8jax.scaled import is_scaled
from fp8jax.scaling.merge import to_max


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function."""

    jaxpr: Any
    out: Any  # tree of the outputs
    paths: list[tuple[str, ...]]  # of the parameters
    context: Context
    report: Report

    def __repr__(self) -> str:
        return f"Program({len(self.context.plan.chosen)} dot products of {self.report.recipe})"

    def run(
        self, leaves: list[Any], states: Mapping[Any, Any], arrays: list[Any], consts: list[Any]
    ) -> list[Any]:
        """The outputs.

        Args:
            leaves: of the parameters; some may be on their way already.
            states: scaling states by key, see `Chosen`.
            arrays: the other inputs.
            consts: of the jaxpr.
        """
        pairs = zip(leaves, self.paths, strict=True)
        ins = [Tracked.of(x, path, aval_of(x).dtype) if is_followed(x) else x for x, path in pairs]
        return evaluate(self.context, self.jaxpr, consts, [*ins, *arrays], to_max(states))


def trace(
    fn: Callable[..., Any], recipe: Recipe, rules: Rules, backend: str, params: Any, args: Any, kwargs: Any
) -> tuple[Program, list[Any]]:
    """`fn(params, *args, **kwargs)` as a program, and the constants of its jaxpr.

    What is no array among the arguments is part of the program.
    """
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_kernel)
    paths, leaves = [names_of(path) for path, _ in flat], [aval_of(leaf) for _, leaf in flat]
    others, others_treedef = jax.tree.flatten((args, kwargs))

    def call(leaves: list[Any], arrays: list[Any]) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if is_array(x) else x for x in others]
        args, kwargs = jax.tree.unflatten(others_treedef, filled)
        return fn(jax.tree.unflatten(treedef, leaves), *args, **kwargs)

    arrays = [x for x in others if is_array(x)]
    closed, out = jax.make_jaxpr(call, return_shape=True)(leaves, arrays)
    ways = [
        Way.of(path, leaf.shape, leaf.dtype) if is_followed(leaf) else None
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    found = find(closed.jaxpr, [*ways, *[None] * len(arrays)])
    chosen, choices = choose(found, rules)
    rules.check([layer_path(dot.path) for dot, _ in choices if dot.path])
    of_all = report(recipe, found, choices, backends.note(backend) or "")
    context = Context(Plan.of(chosen), backend)
    return Program(closed.jaxpr, jax.tree.structure(out), paths, context, of_all), closed.consts


def is_kernel(x: Any) -> bool:
    """Whether a leaf of the parameters is one that is stored in a format of its own."""
    return is_scaled(x) or isinstance(x, Weight)


def is_array(x: Any) -> bool:
    """Whether an argument is an input of the program, not a constant of it."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_followed(x: Any) -> bool:
    """Whether a leaf of the parameters can be the kernel of a dot product, and is not yet on its way."""
    if isinstance(x, Tracked):
        return False
    return is_kernel(x) or (is_array(x) and len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.floating))


def aval_of(leaf: Any) -> Any:
    """Shape and dtype that the function sees."""
    if not is_kernel(leaf):
        return leaf
    stored = leaf.value if isinstance(leaf, Weight) else leaf
    dtype = jnp.float32 if is_scaled(stored) else stored.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def names_of(path: Any) -> tuple[str, ...]:
    """A path of a tree as names, without that of a box around a leaf: of axis names, or an `nnx.Variable`."""
    if len(path) > 1 and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    names = []
    for part in path:
        name = next((getattr(part, of) for of in ("key", "name", "idx") if hasattr(part, of)), part)
        names.append(str(name))
    return tuple(names)
