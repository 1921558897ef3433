"""Tracing a function to a `Program`: its jaxpr, the plan of its FP8 dot products and its report."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from fp8jax import backends
from fp8jax.platforms import explicit_mesh
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite.blocks import Calls, Checkpointing, lines, remat_of
from fp8jax.rewrite.choose import Kernel, choose, report
from fp8jax.rewrite.evaluate import Context, evaluate
from fp8jax.rewrite.follow import Tracked, Way
from fp8jax.rewrite.lora import LoRA, frozen_rules, without_adapters
from fp8jax.rewrite.plan import Chosen, Plan, find
from fp8jax.rewrite.report import Report
from fp8jax.rewrite.rules import Rule, Rules, layer_path
from fp8jax.scaling.merge import to_fm32


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function."""

    jaxpr: Any
    out: "Output"
    paths: list[tuple[str, ...]]  # paths of the parameters
    context: Context
    report: Report

    def __repr__(self) -> str:
        return f"Program({len(self.context.plan.chosen)} dot products of {self.report.recipe})"

    def run(
        self, leaves: list[Any], states: Mapping[Any, Any], arrays: list[Any], consts: list[Any]
    ) -> list[Any]:
        """The outputs.

        Args:
            leaves: leaves of the parameters; some may be `Tracked` already.
            states: scaling states by key, see `Chosen`.
            arrays: the other inputs.
            consts: constants of the jaxpr.
        """
        pairs = zip(leaves, self.paths, strict=True)
        ins = [Tracked(x, None, _way(path, x)) if is_followed(x) else x for x, path in pairs]
        states = {key: {**kept, **to_fm32(without_adapters(kept))} for key, kept in states.items()}
        return evaluate(self.context, self.jaxpr, consts, [*ins, *arrays], states)


@dataclasses.dataclass
class Annotations:
    """The modules and notes that a function records while it is traced."""

    modules: dict[str, Any] = dataclasses.field(default_factory=dict)  # by path; for rules and reports
    notes: list[str] = dataclasses.field(default_factory=list)  # lines of the report
    calls: Calls | None = None  # with gradient checkpointing
    paths: list[str] = dataclasses.field(default_factory=list)  # paths of the active module calls

    def clear(self, calls: Calls | None = None) -> None:
        """Clears the records of the last trace."""
        self.modules.clear()
        self.notes.clear()
        self.calls = calls

    @contextlib.contextmanager
    def call(self, path: str, module: Any) -> Iterator[None]:
        """A context for tracing a module call."""
        self.modules.setdefault(path, module)
        self.paths.append(path)
        try:
            kind = type(module).__name__
            with contextlib.nullcontext() if self.calls is None else self.calls.recorded(path, kind):
                yield
        finally:
            self.paths.pop()


class Settings(NamedTuple):
    """How a function is rewritten."""

    recipe: Recipe
    rules: tuple[Rule, ...] = ()
    backend: str = "auto"
    lora: LoRA | None = None
    checkpointing: Checkpointing | None = None
    kernels: Mapping[tuple[str, ...], Kernel] | None = (
        None  # the kernels with scaling states, if already initialized
    )

    def chosen(self) -> Rules:
        """A new `Rules`, without records of matches."""
        return (Rules if self.lora is None else frozen_rules)(self.recipe, self.rules)


class Output(NamedTuple):
    """The tree that a function returns, without its arrays."""

    treedef: Any
    leaves: list[Any]  # the leaves, with None for each array

    @classmethod
    def of(cls, out: Any) -> tuple["Output", list[Any]]:
        """The output without its arrays, and the arrays."""
        leaves, treedef = jax.tree.flatten(out)
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        return cls(treedef, [None if is_array(leaf) else leaf for leaf in leaves]), arrays

    def filled(self, arrays: Iterable[Any]) -> Any:
        """The output with these arrays."""
        rest = iter(arrays)
        return self.treedef.unflatten([next(rest) if leaf is None else leaf for leaf in self.leaves])


def trace(
    fn: Callable[..., Any],
    settings: Settings,
    annotations: Annotations,
    params: Any,
    args: Any,
    kwargs: Any,
    own: int = 0,
) -> tuple[Program, list[Any]]:
    """`fn(params, *args, **kwargs)` as a program, and the constants of its jaxpr.

    Arguments that are not arrays become constants of the program. `fn` may fill `annotations`. The first
    `own` arrays are model state, not inputs.
    """
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    paths, leaves = [names_of(path) for path, _ in flat], [aval_of(leaf) for _, leaf in flat]
    others, others_treedef = jax.tree.flatten((args, kwargs))

    outputs: list[Output] = []

    def call(leaves: list[Any], arrays: list[Any]) -> list[Any]:
        rest = iter(arrays)
        filled = [next(rest) if is_array(x) else x for x in others]
        args, kwargs = jax.tree.unflatten(others_treedef, filled)
        output, arrays = Output.of(fn(jax.tree.unflatten(treedef, leaves), *args, **kwargs))
        outputs[:] = [output]
        return arrays

    annotations.clear(None if settings.checkpointing is None else Calls())
    arrays = [x for x in others if is_array(x)]
    closed = jax.make_jaxpr(call)(leaves, arrays)
    # Dead code would count as uses of parameters, such as the parameters that a scan returns unchanged.
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    ways = [_way(path, x) if is_followed(x) else None for path, x in zip(paths, leaves, strict=True)]
    found = find(jaxpr, [*ways, *[None] * own])
    rules, lora = settings.chosen(), settings.lora
    chosen, choices = choose(found, rules, annotations.modules, settings.kernels)
    if settings.kernels is None:
        rules.check([layer_path(dot.path) for dot, _ in choices if dot.path is not None])
    remat, blocks = None, []
    if settings.checkpointing is not None and annotations.calls is not None:
        remat, blocks = remat_of(settings.checkpointing, annotations.calls, jaxpr, found)
    notes = [backends.note(settings.backend), *lines(settings.checkpointing, blocks), *annotations.notes]
    note = "\n".join(filter(None, notes))
    of_all = report(rules.recipe, found, choices, annotations.modules, note)
    if lora is not None:
        of_all = _with_adapters(of_all, lora, settings.recipe, chosen)
    annotations.clear()
    named = [dot for dot, _ in choices]
    context = Context(
        Plan.of(chosen, named=named), settings.backend, 1.0 if lora is None else lora.scale, remat
    )
    return Program(jaxpr, outputs[0], paths, context, of_all), closed.consts


def _with_adapters(report: Report, lora: LoRA, recipe: Recipe, chosen: list[Chosen]) -> Report:
    """The report with the ranks of adapters."""
    able = {layer_path(each.key) for each in chosen if each.dot.is_matrix}
    lora.check(sorted(able), [row.path for row in report.rows if row.path not in able and row.kernel_shape])
    adapted = {path for path in able if lora.chooses(path, recipe)}
    rows = [row._replace(lora=lora.rank) if row.path in adapted else row for row in report.rows]
    return report._replace(rows=tuple(rows))


def _way(path: tuple[str, ...], leaf: Any) -> Way:
    return Way.of(path, leaf.shape, aval_of(leaf).dtype)


def is_array(x: Any) -> bool:
    """Whether an argument is an input of the program rather than a constant."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_followed(x: Any) -> bool:
    """Whether a parameter leaf can be a kernel and is not yet a `Tracked`."""
    if isinstance(x, Tracked):
        return False
    return is_scaled(x) or (is_array(x) and len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.floating))


def aval_of(leaf: Any) -> Any:
    """The leaf with the shape and dtype that the function sees."""
    if not is_scaled(leaf):
        return leaf
    # On a mesh with explicit axes the sharding is part of the type.
    is_typed = isinstance(leaf.data, jax.Array) and explicit_mesh(leaf.data)
    sharding = jax.typeof(leaf.data).sharding if is_typed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.own_dtype, sharding=sharding)


def names_of(path: Any) -> tuple[str, ...]:
    """A tree path as names, without the "value" of a box around a leaf, such as an `nnx.Variable`."""
    if len(path) > 1 and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    names = []
    for part in path:
        name = next((getattr(part, of) for of in ("key", "name", "idx") if hasattr(part, of)), part)
        names.append(str(name))
    return tuple(names)
