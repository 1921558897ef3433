"""`FunctionModel`: a function of parameters under a recipe.

    model = fp8jax.transform(fn, "O2")         # fn(params, *args): raw pytrees, Equinox, Haiku's apply, ...
    variables = model.init(params, *args)      # {"params": ..., "_overwrite_with_gradient": ...}
    loss, grads, variables = fp8jax.value_and_grad(lambda v, x: loss(model.apply(v, x)))(variables, x)

A stacked parameter that a scan slices has a scale and a scaling state for each layer.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core

# The context of a trace (mesh, precision, dtype promotion) has no public API.
from jax._src.config import trace_context
from jaxtyping import PRNGKeyArray, PyTree

from fp8jax import backends, loss_scale, scaling
from fp8jax.quantization import is_scaled, own_value, quantize_like, refuse_dicts
from fp8jax.recipe import Recipe
from fp8jax.rewrite.cache import Programs, contents_of
from fp8jax.rewrite.call import call
from fp8jax.rewrite.interpreter.param_view import aval_of, can_be_kernel, is_array, names_of
from fp8jax.rewrite.patterns import layer_names
from fp8jax.rewrite.plan import DotState, Kernel, PlannedDot
from fp8jax.rewrite.report import Report, check_share, warn_of_none
from fp8jax.rewrite.traced_function import Annotations, Settings, StaticTree, TracedFunction, trace
from fp8jax.variables import FROZEN, LOSS_SCALE, OURS, PARAMS, SCALING, has_params


def _no_context() -> None:
    """The key of a function whose trace depends on its arguments alone."""


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A function of parameters under a recipe; made by `fp8jax.transform`.

    Attributes:
        fn: `fn(params, *args, **kwargs)`.
        settings: the recipe, rules, GEMM backend and adapters.
        annotations: filled by `fn` while it is traced.
        num_states: number of arguments after `params` that are model state, such as batch statistics, not
            inputs.
        context: returns a key of everything else that a trace of `fn` depends on.
        remedy: for errors, how to get scaling states of this recipe; None for those of `init`.

    Raises:
        ValueError: the backend is unknown, or a rule changes a column of the whole model.
        TypeError: a rule is not a `Rule`.
    """

    fn: Callable[..., Any]
    settings: Settings
    annotations: Annotations = dataclasses.field(default_factory=Annotations, repr=False)
    num_states: int = 0
    context: Callable[[], Any] = _no_context
    remedy: str | None = None
    _programs: Programs = dataclasses.field(default_factory=Programs, repr=False)

    def __post_init__(self) -> None:
        backends.choose(self.settings.backend, scaling.of_recipe(self.recipe).granularity)
        self.settings.new_rules()

    @property
    def recipe(self) -> Recipe:
        """The model's recipe."""
        return self.settings.recipe

    def plain(self) -> Callable[..., Any]:
        """The user's function."""
        return self.fn

    def init(self, params: PyTree, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables: the parameters, with kernels in the recipe's weight format, and the scaling states.

        Args:
            params: the function's parameters, any tree of arrays.
            args, kwargs: the function's other arguments, or `jax.ShapeDtypeStruct`s: only shapes are read.

        Returns:
            A dict of "params" and "_overwrite_with_gradient", with the parameters in their tree, a
            `ScaledArray` for each quantized kernel, and nested dicts of scaling states, named as the
            parameters. A parameter of several dot products has a state for each: "kernel", "kernel#1" and so
            on. With adapters see `adapt`.

        Raises:
            ValueError: nothing would run in FP8, or a rule or a pattern matches no dot product.
        """
        lora = self.settings.lora
        if lora is not None:
            return self.adapt(jax.random.key(lora.seed), params, *args, **kwargs)
        program, _ = self._program(params, args, kwargs)
        if self.recipe.is_quantized:
            check_share(program.report)
        formatted = _with_kernels(params, program, lambda x, planned: planned.kernel.in_format(x))
        return {PARAMS: formatted, **self._states(program)}

    def init_with_inputs(self, *args: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The variables of `init`, and the arguments after the parameters."""
        return self.init(*args), args[1:]

    def adapt(self, key: PRNGKeyArray, params: PyTree, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables of a model with adapters.

        Args:
            key: random key for A.
            params, args, kwargs: as in `init`.

        Returns:
            A dict of "params" and "frozen", with `lora_a` and `lora_b`, float32, at the path of each layer
            that `LoRA.targets` matches, and with the function's parameters, whose kernels are in the format
            of `LoRA.weight`.

        Raises:
            ValueError: a target matches no layer, or a layer that cannot have adapters.
        """
        lora = self.settings.lora
        assert lora is not None
        program, _ = self._program(params, args, kwargs)
        adapters = {}
        for path, planned in program.adapted.items():
            if planned is not None:
                dot = planned.dot
                at = path if dot.layer == "/".join(path) else layer_names(path)
                adapters[tuple(at)] = lora.new(key, dot.layer, planned.kernel.layers, dot.gemm)

        def freeze(x: Any, planned: PlannedDot) -> Any:
            inputs = planned.dot.gemm[1] if planned.dot.is_matrix else None
            return x if planned.dot.is_computed else lora.freeze(x, planned.kernel, inputs)

        frozen = _with_kernels(params, program, freeze)
        return {PARAMS: _nested(adapters), FROZEN: frozen, **self._states(program)}

    def _states(self, program: TracedFunction) -> dict[str, Any]:
        """The initial scaling states and loss scale."""
        dots = program.plan.dots.values()
        states = _nested({each.key: state for each in dots if (state := each.first_state())})
        variables: dict[str, Any] = {SCALING: states} if states else {}
        if self.recipe.gemm == "FP16":
            variables[LOSS_SCALE] = loss_scale.init()
        return variables

    def apply(self, variables: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """`fn(params, *args, **kwargs)` with the chosen dot products in FP8.

        Args:
            variables: variables from `init`.
            args, kwargs: arguments of `fn`; those that are no arrays are constants: each value compiles anew.

        Raises:
            ValueError: `variables` lack the scaling state of a dot product.
        """
        scales = variables.get(SCALING, {}) if has_params(variables) else {}
        params, adapters = self._split(variables)
        params, (program, consts) = self._found(params, variables, args, kwargs)
        if self.recipe.is_quantized:
            warn_of_none(program.report)
        own = self._adapters(adapters, program.shapes, program.adapted)
        states = {
            each.key: DotState(dict(each.state_in(scales, self.remedy)), own.get(each.path))
            for each in program.plan.dots.values()
        }
        leaves = jax.tree.leaves(params, is_leaf=is_scaled)
        _, arrays = StaticTree.of((args, kwargs))
        return program.out.filled(call(program, leaves, states, arrays, consts))

    __call__ = apply

    def split(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The variables and the inputs among the arguments of `apply`."""
        return args[0], args[1:]

    def report(self, variables: PyTree, *args: Any, **kwargs: Any) -> Report:
        """Which dot products run in FP8 for these inputs, and why the others do not.

        The arguments are those of `init` or `apply`, arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.
        """
        _, (program, _) = self._found(_params_of(variables), variables, args, kwargs)
        return program.report

    def kernels(self, params: PyTree, *args: Any, **kwargs: Any) -> dict[tuple[str, ...], Kernel]:
        """The kernels that the recipe or a rule applies to for these inputs, by path."""
        _, (program, _) = self._found(_params_of(params), params, args, kwargs)
        if self.recipe.is_quantized:
            check_share(program.report)
        return {path: planned.kernel for path, planned in program.plan.kernels().items()}

    def quantize(self, params: PyTree, like: Mapping[str, Any]) -> dict[str, Any]:
        """Variables with the function's parameters, such as a checkpoint's, in the formats of `like`."""
        check_like(like)
        name = self.settings.own
        targets, treedef = jax.tree.flatten(like[name], is_leaf=is_scaled)
        sources = treedef.flatten_up_to(params)
        return {**like, name: treedef.unflatten(map(quantize_like, sources, targets))}

    def dequantize(self, variables: Mapping[str, Any]) -> PyTree:
        """The function's parameters: dequantized arrays, with merged adapters."""
        params, adapters = self._split(variables)
        refuse_dicts(params)
        return self.with_adapters(params, adapters)

    def with_adapters(self, params: PyTree, adapters: PyTree, times: float = 1.0) -> PyTree:
        """The function's parameters, dequantized, with W + times (alpha / rank) A B for each kernel with
        adapters."""
        flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
        leaves = dict(zip(names_of([path for path, _ in flat]), (leaf for _, leaf in flat), strict=True))
        shapes, known = {path: tuple(x.shape) for path, x in leaves.items() if can_be_kernel(x)}, {}
        for program, _ in self._programs:
            if program.shapes == shapes:
                known |= {path: each for path, each in program.adapted.items() if each or path not in known}
        found = self._adapters(adapters, shapes, known)

        pairs = ((found.get(path), leaf) for path, leaf in leaves.items())
        return treedef.unflatten(own.merged(x, times) if own else own_value(x) for own, x in pairs)

    def _adapters(self, adapters: PyTree, shapes: Any, known: Any) -> dict[tuple[str, ...], Any]:
        """See `LoRA.of_kernels`."""
        # NNX chose the kernels without a trace.
        lora, is_complete = self.settings.lora, self.settings.kernels is None
        return lora.of_kernels(adapters, shapes, known, self.recipe, is_complete) if lora else {}

    def _split(self, variables: PyTree) -> tuple[Any, Any]:
        """The function's parameters, and the adapters."""
        if self.settings.lora is None:
            return _params_of(variables), {}
        if not isinstance(variables, Mapping) or FROZEN not in variables:
            got = ", ".join(sorted(variables)) if isinstance(variables, Mapping) else type(variables).__name__
            raise ValueError(
                f"`variables`: expected the collection 'frozen'; got {got}. Make them with `model.init` or "
                "`model.adapt`."
            )
        return variables[FROZEN], variables[PARAMS]

    def _found(self, params: PyTree, variables: PyTree, args: Any, kwargs: Any) -> tuple[PyTree, Any]:
        """The function's parameters, which are `params` or `variables`, and the program with its constants.

        Without another collection of ours, `{"params": ...}` may be the function's own parameters, as those
        of a wrapped Linen `apply`. These are tried second.
        """
        try:
            return params, self._program(params, args, kwargs)
        except Exception:
            if not has_params(variables) or any(name in variables for name in OURS if name != PARAMS):
                raise
            with contextlib.suppress(Exception):
                return variables, self._program(variables, args, kwargs)
            raise

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Variables for repeated inference: each kernel quantized once to its GEMM's format.

        `apply` returns the same outputs and casts no kernel. Do not train these variables. With adapters the
        kernels are quantized already.

        The arguments are those of `apply`; args and kwargs may be `jax.ShapeDtypeStruct`s.
        """
        if self.settings.lora is not None:
            return dict(variables)
        program, _ = self._program(variables[PARAMS], args, kwargs)

        def quantized(leaf: Any, planned: PlannedDot) -> Any:
            if planned.dot.is_computed or not planned.kernel.recipe.is_quantized:
                return leaf
            return planned.kernel.for_inference(leaf, planned.state_in(variables.get(SCALING, {})))

        return {**variables, PARAMS: _with_kernels(variables[PARAMS], program, quantized)}

    def _program(self, params: PyTree, args: Any, kwargs: Any) -> tuple[TracedFunction, list[Any]]:
        """The cached trace of the function for these inputs' types, and the constants of its jaxpr."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        if any(callable(leaf) for leaf in leaves):
            raise _not_arrays(params)
        static, arrays = StaticTree.of((args, kwargs))
        # With the type, because 1 == True, and with the sign of zero.
        constants = tuple((type(x), repr(x) if isinstance(x, float) else x) for x in static.leaves)
        avals = tuple(_key_of(x) for x in (*map(aval_of, leaves), *arrays) if is_array(x))
        types = treedef, static.treedef, avals, trace_context(), self.context()
        before = contents_of(self.fn)
        if (found := self._programs.find(before, types, constants)) is not None:
            return found
        refuse_dicts(params)
        num_state_arrays = sum(map(is_array, jax.tree.leaves(args[: self.num_states])))
        try:
            pair = trace(self.fn, self.settings, self.annotations, params, static, arrays, num_state_arrays)
        except Exception as error:
            texts = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, str | bytes)]
            if texts:
                error.add_note(
                    f"fp8jax: the argument {texts[0]!r} is a {type(texts[0]).__name__}, no array; the model "
                    "got it as a constant."
                )
            raise
        # Do not cache a function that closes over tracers, which are invalid after their trace.
        if not any(isinstance(x, jax.core.Tracer) for x in pair[1]):
            self._programs.add(before, contents_of(self.fn), types, constants, pair)
        return pair


def _params_of(variables: PyTree) -> Any:
    """The function's parameters among variables, which may be the parameters alone."""
    return variables.get(FROZEN, variables[PARAMS]) if has_params(variables) else variables


def _key_of(x: Any) -> Any:
    """The type of an array, hashable."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return tuple(x.shape), x.dtype, getattr(aval, "weak_type", False), getattr(aval, "sharding", None)


def _not_arrays(params: PyTree) -> TypeError:
    """The error for a function in the tree of parameters, as in an Equinox module."""
    pairs, _ = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    kind, path = next((type(x).__name__, jax.tree_util.keystr(path)) for path, x in pairs if callable(x))
    return TypeError(
        f"`params`: expected a tree of arrays; got a {kind} at {path}. Of an Equinox module, give only the "
        "arrays, `params, static = eqx.partition(module, eqx.is_array)`, and combine both in the function."
    )


def check_like(like: PyTree) -> None:
    """Raises ValueError if `like` has shapes in place of arrays, because its scaling state is reused."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like)):
        raise ValueError(
            "`like`: expected the variables that `model.init` gives; got shapes of them. Their first scaling "
            "state is taken over, so call `model.init` itself."
        )


def _with_kernels(params: PyTree, program: TracedFunction, change: Callable[[Any, PlannedDot], Any]) -> Any:
    """The parameters with `change(leaf, planned)` for each kernel."""
    kernels = program.plan.kernels()
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    pairs = zip(leaves, program.paths, strict=True)
    return treedef.unflatten([change(x, kernels[path]) if path in kernels else x for x, path in pairs])


def _nested(found: Mapping[Sequence[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Nested dicts of the entries that each path has."""
    root: dict[str, Any] = {}
    for path, entries in found.items():
        tree = root
        for name in path:
            tree = tree.setdefault(name, {})
        tree.update(entries)
    return root
