"""Tracing a function to a `TracedFunction`: its jaxpr, the plan of its FP8 dot products and its report."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from fp8jax.dot import Weight, with_state
from fp8jax.quantization import checked_parameter, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite.choose import choose, layer_of
from fp8jax.rewrite.interpreter.dots import Dot
from fp8jax.rewrite.interpreter.evaluate import evaluate
from fp8jax.rewrite.interpreter.find import FoundDots, find_dots
from fp8jax.rewrite.interpreter.param_view import (
    ParamView,
    Tracked,
    aval_of,
    can_be_kernel,
    is_array,
    names_of,
)
from fp8jax.rewrite.lora import LoRA
from fp8jax.rewrite.patterns import layer_path
from fp8jax.rewrite.plan import DotState, Kernel, Plan, PlannedDot, kernels_of
from fp8jax.rewrite.remat import Calls, Checkpointing, with_checkpoints
from fp8jax.rewrite.report import Report, make_report
from fp8jax.rewrite.rules import Rule, Rules, UsedRule
from fp8jax.scaling.merge import to_fm32
from fp8jax.variables import FROZEN, PARAMS


class Settings(NamedTuple):
    """How a function is rewritten."""

    recipe: Recipe
    rules: tuple[Rule, ...] = ()
    backend: str = "auto"
    lora: LoRA | None = None
    checkpointing: Checkpointing | None = None
    # the kernels with scaling states, if already initialized
    kernels: Mapping[tuple[str, ...], Kernel] | None = None

    @property
    def own(self) -> str:
        """The collection of the model's own parameters; with adapters "params" has the adapters."""
        return PARAMS if self.lora is None else FROZEN

    def new_rules(self, paths: Iterable[tuple[str, ...]] = ()) -> Rules:
        """A new `Rules`, without records of matches, for parameters of these paths. With adapters,
        `LoRA.freeze` stores the kernels."""
        return Rules(self.recipe, self.rules, self.lora is not None, map(layer_path, paths))


@dataclasses.dataclass
class Annotations:
    """The modules that a function records while it is traced."""

    modules: dict[str, Any] = dataclasses.field(default_factory=dict)  # by path; for rules and reports
    calls: Calls | None = None  # with gradient checkpointing

    def clear(self, calls: Calls | None = None) -> None:
        """Clears the records of the last trace."""
        self.modules.clear()
        self.calls = calls

    @contextlib.contextmanager
    def call(self, path: str, module: Any) -> Iterator[None]:
        """A context for tracing a module call."""
        self.modules.setdefault(path, module)
        kind = type(module).__name__
        with contextlib.nullcontext() if self.calls is None else self.calls.recorded(path, kind):
            yield


class StaticTree(NamedTuple):
    """A tree without its arrays."""

    treedef: Any
    leaves: tuple[Any, ...]  # with None for each array

    @classmethod
    def of(cls, tree: Any) -> tuple["StaticTree", list[Any]]:
        """The tree without its arrays, and the arrays."""
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        return cls(treedef, tuple(None if is_array(leaf) else leaf for leaf in leaves)), arrays

    def filled(self, arrays: Iterable[Any]) -> Any:
        """The tree with these arrays."""
        rest = iter(arrays)
        return self.treedef.unflatten([next(rest) if leaf is None else leaf for leaf in self.leaves])


@dataclasses.dataclass(frozen=True, eq=False)
class TracedFunction:
    """A traced function."""

    jaxpr: jex.Jaxpr
    out: StaticTree
    paths: list[tuple[str, ...]]  # paths of the parameters
    plan: Plan
    recipe: Recipe
    rules: tuple[UsedRule, ...]
    report: Report
    adapted: Mapping[tuple[str, ...], PlannedDot | None]  # with adapters; None for others that are read

    def __repr__(self) -> str:
        return f"TracedFunction({len(self.plan.dots)} dot products of {self.report.recipe})"

    @property
    def shapes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The shapes of the parameters that can be kernels, by path."""
        avals: list[Any] = [var.aval for var in self.jaxpr.invars[: len(self.paths)]]
        pairs = zip(self.paths, avals, strict=True)
        return {path: tuple(aval.shape) for path, aval in pairs if can_be_kernel(aval)}

    def run(
        self,
        leaves: list[Any],
        states: Mapping[Any, DotState],
        arrays: list[Any],
        consts: list[Any],
        batched: Sequence[tuple[Any, Any]] = (),
    ) -> list[Any]:
        """The outputs.

        Args:
            leaves: leaves of the parameters; some may be `Tracked` already.
            states: states by key, see `PlannedDot`.
            arrays: the other inputs.
            consts: constants of the jaxpr.
            batched: the `jax.vmap`s of the call, the innermost first: the mapped axes of all operands, of
                which those of arrays and constants are the last, and JAX's data of the axis.
        """

        def run(*inputs: Any) -> list[Any]:
            return self._run(leaves, states, inputs[: len(arrays)], inputs[len(arrays) :])

        inputs = (*arrays, *consts)
        for dims, axis in batched:
            run = vmapped(run, dims[len(dims) - len(inputs) :], axis)
        return run(*inputs)

    def _run(self, leaves: list[Any], states: Mapping[Any, DotState], arrays: Any, consts: Any) -> list[Any]:
        """The outputs, see `run`."""
        leaves, states = self._checked(leaves, states)
        pairs = zip(leaves, self.paths, strict=True)
        ins = [
            Tracked(Weight(checked_parameter(x)), ParamView.of(path, aval_of(x))) if can_be_kernel(x) else x
            for x, path in pairs
        ]
        states = {key: state._replace(scaling=to_fm32(state.scaling)) for key, state in states.items()}
        return evaluate(self.plan, self.jaxpr, consts, [*ins, *arrays], states)

    def _checked(
        self, leaves: list[Any], states: Mapping[Any, DotState]
    ) -> tuple[list[Any], Mapping[Any, DotState]]:
        """The same arguments. A gradient of other parameters than FP8 kernels warns if it drops the state."""
        state = next((state.scaling for state in states.values() if state.scaling), None)
        # A plug-in that goes around others, as of statistics, has the only gradient, and trains nothing.
        is_measured = any(hasattr(state.plugin, "around") for state in states.values())
        if state is None or is_measured or any(isinstance(leaf, Tracked) for leaf in leaves):
            return leaves, states
        dots = self.plan.dots.values()
        quantized = {each.path for each in dots if each.kernel.recipe.is_quantized}
        others, kernels = {}, {}
        for i, (leaf, path) in enumerate(zip(leaves, self.paths, strict=True)):
            if path in quantized or is_scaled(leaf):
                kernels[i] = leaf
            elif jnp.issubdtype(leaf.dtype, jnp.floating):
                others[i] = leaf
        plugins = {key: state.plugin for key, state in states.items()}
        others, plugins = with_state((others, plugins), kernels, state)
        leaves = [others.get(i, leaf) for i, leaf in enumerate(leaves)]
        return leaves, {key: state._replace(plugin=plugins[key]) for key, state in states.items()}


def vmapped(function: Callable[..., Any], dims: tuple[Any, ...], axis: Any) -> Callable[..., Any]:
    """`jax.vmap` of a function; `axis` is JAX's data of the axis."""
    names = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    return jax.vmap(function, in_axes=dims, axis_size=axis.size, **names)


def live_jaxpr(fn: Callable[..., Any], *args: Any) -> tuple[jex.Jaxpr, list[Any], Any]:
    """`fn(*args)` as an open jaxpr, the jaxpr's constants, and the shapes of the result.

    The jaxpr has no dead code, which would count as uses of parameters, such as the parameters that a scan
    returns unchanged.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jaxpr, closed.consts, shapes


def trace(
    fn: Callable[..., Any],
    settings: Settings,
    annotations: Annotations,
    params: Any,
    static: StaticTree,
    arrays: list[Any],
    num_state_arrays: int = 0,
) -> tuple[TracedFunction, list[Any]]:
    """`fn(params, *args, **kwargs)` as a program, and the constants of its jaxpr.

    Args:
        fn: the function; it may fill `annotations`.
        settings: how it is rewritten.
        annotations: cleared before and after the trace.
        params: the parameters.
        static, arrays: `StaticTree.of((args, kwargs))`.
        num_state_arrays: number of the first arrays that are model state, not inputs.
    """
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    paths, leaves = names_of([path for path, _ in flat]), [aval_of(leaf) for _, leaf in flat]
    out = static

    def call(leaves: list[Any], arrays: list[Any]) -> list[Any]:
        nonlocal out
        args, kwargs = static.filled(arrays)
        out, arrays = StaticTree.of(fn(treedef.unflatten(leaves), *args, **kwargs))
        return arrays

    annotations.clear(None if settings.checkpointing is None else Calls())
    jaxpr, consts, _ = live_jaxpr(call, leaves, arrays)
    views = [
        ParamView.of(path, x) if can_be_kernel(x) else None for path, x in zip(paths, leaves, strict=True)
    ]
    views += [None] * num_state_arrays
    kernels = [path for path, leaf in zip(paths, leaves, strict=True) if can_be_kernel(leaf)]
    rules, lora, modules = settings.new_rules(kernels), settings.lora, annotations.modules
    found, notes = find_dots(jaxpr, views), []
    if settings.checkpointing is not None and annotations.calls is not None:
        dots = [dot for dot in found.dots if dot.path is not None]
        precise = [dot for dot in dots if rules.leaves_out(layer_of(dot, modules))]
        jaxpr, note = with_checkpoints(jaxpr, settings.checkpointing, annotations.calls, dots, precise)
        found = find_dots(jaxpr, views)
        notes.append(note)
    planned, choices = choose(found, rules, modules, settings.kernels)
    if settings.kernels is None:
        rules.check([layer_of(dot, modules) for dot, _ in choices])
    notes.append(rules.recipe.lost_to_rounding)
    report = make_report(str(rules.recipe), found, choices, modules, settings.backend, notes)
    adapted = {}
    if lora is not None:
        report, adapted = _with_adapters(report, lora, settings, found, planned)
    annotations.clear()
    plan = Plan.of(planned, [dot for dot, _ in choices], backend=settings.backend)
    return TracedFunction(jaxpr, out, paths, plan, settings.recipe, rules.used, report, adapted), consts


def _with_adapters(
    report: Report, lora: LoRA, settings: Settings, found: FoundDots, planned: list[PlannedDot]
) -> tuple[Report, dict[tuple[str, ...], PlannedDot | None]]:
    """The report with the ranks of adapters, and the kernels that are read, with None for no adapters."""
    matrices = {path: each for path, each in kernels_of(planned).items() if each.dot.is_matrix}
    alike = collections.Counter(
        each.path for each in planned if each.path in matrices and _is_like(each.dot, matrices[each.path].dot)
    )
    able = {path: each for path, each in matrices.items() if alike[path] == found.uses[path].reads}
    layers = {each.dot.layer for each in able.values()}
    if settings.kernels is None:  # NNX checked them without a trace, and a method may use none of them
        lora.check(
            sorted(layers), [row.path for row in report.rows if row.path not in layers and row.kernel_shape]
        )
    recipe = settings.recipe
    adapted = {p: each for p, each in able.items() if lora.chooses(each.dot.layer, "/".join(p), recipe)}
    ranks = {each.dot.layer: lora.rank for each in adapted.values()}
    rows = [row._replace(lora=ranks.get(row.path, 0)) for row in report.rows]
    notes = [
        f"{each.dot.layer} has no adapters: another operation than a matmul over its first axes reads it"
        for path, each in matrices.items()
        if path not in able
    ]
    note = "\n".join(filter(None, [report.note, *notes]))
    return report._replace(rows=tuple(rows), note=note), {path: adapted.get(path) for path in found.uses}


def _is_like(dot: Dot, other: Dot) -> bool:
    """Whether two dot products of a kernel take the same adapters."""
    lengths = [[length for _, length in each.loops] for each in (dot, other)]
    return dot.is_matrix and dot.gemm[1:] == other.gemm[1:] and lengths[0] == lengths[1]
