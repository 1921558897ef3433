"""`statistics`: what FP8 does to the operands of a model's dots, and what other recipes would do.

    found = fp8jax.statistics(loss_fn)(variables, batch)
    print(found)

The loss is traced as `fp8jax.value_and_grad` traces it, and evaluated with a `Recorder` in each matched dot.
A transformed model's dots stay in FP8, a plain model's in high precision.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx as flax_nnx

from fp8jax.adapters.nnx import is_module
from fp8jax.adapters.nnx.gradient import gradient_of_module, gradient_of_states
from fp8jax.dot import Weight
from fp8jax.gradients.traced import TracedLoss
from fp8jax.inspect.numerics.recorder import Recorder, Records
from fp8jax.inspect.numerics.rows import MeasuredLayer, Statistics
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite import FoundDots, Plan, Rule, Tracked, aval_of
from fp8jax.rewrite.choose import choose, layer_of
from fp8jax.rewrite.patterns import layer_path
from fp8jax.rewrite.plan import DotState, PlannedDot
from fp8jax.rewrite.rules import Rules
from fp8jax.variables import PARAMS

# The recipes that are measured by default: per-tensor scales with E5M2 and with E4M3 gradients, blocks, and
# FP8 weights' gradients.
RECIPES = ("te", "te,fp8_format=E4M3", "current", "block", "mxfp8", "nvfp4", "O2")


def statistics(
    loss_fn: Callable[..., Any],
    recipes: Recipe | str | Iterable[Recipe | str] = RECIPES,
    *,
    rules: Iterable[Rule] = (),
    has_aux: bool = False,
) -> Callable[..., Statistics]:
    """Statistics of the tensors of each matched layer, under the model's own recipe and under others.

        found = jax.jit(fp8jax.statistics(loss_fn))(variables, batch)

    The tensors are those of one forward and backward of the model that is passed in: of a plain model in high
    precision, of a transformed one those that its FP8 dots get. Each is quantized as each recipe would.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` or `loss_fn(nnx_module, *args, **kwargs)`, with a plain
            or a transformed model; returns a scalar, or with `has_aux` a scalar and auxiliary outputs.
        recipes: recipes, or their texts; or one of them. Delayed scaling has the scale of this batch's amax;
            only the model's own recipe has its state, once that has an amax. The recipe of the layer is
            measured, too.
        rules: of a plain model, as in `transform`: layers that they keep out of FP8 are not measured. The
            first recipe says which layers it includes. A transformed model has its own.
        has_aux: whether `loss_fn` also returns auxiliary outputs; they are dropped.

    Returns:
        A function of the arguments of `loss_fn` that returns `Statistics`, a pytree. The model and its states
        do not change. Compile the function, as the example does; it is one program with a forward, a
        backward without the gradients of parameters, and the casts of all recipes.

    Raises:
        ValueError: the loss has no matched layer, a rule matches none, or two models in it have different
            layers of one path.
    """
    recipes = [recipes] if isinstance(recipes, Recipe | str) else recipes
    parsed, rules = tuple(map(Recipe.parse, recipes)), tuple(rules)
    if not parsed:
        raise ValueError(f"`recipes`: expected at least one recipe, as {', '.join(RECIPES)}; got none.")

    def grad_of(loss_and_aux: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
            out = _statistics(loss_and_aux, variables, args, kwargs, parsed, rules)
            return out, variables[PARAMS], variables

        return wrapped

    @functools.wraps(loss_fn)
    def with_aux(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        return out if has_aux else (out, None)

    of_module = gradient_of_module(with_aux, True, grad_of, lambda state: state, 1)
    of_variables = gradient_of_states(with_aux, grad_of)

    @functools.wraps(loss_fn)
    def of_any(model: Any, *args: Any, **kwargs: Any) -> Statistics:
        if is_module(model):
            model, args, kwargs = flax_nnx.clone((model, args, kwargs))  # the loss may change them
            return of_module(model, *args, **kwargs)[0][0]
        return of_variables(model, *args, **kwargs)[0][0]

    return of_any


def _statistics(
    loss_and_aux: Callable[..., Any],
    variables: Any,
    args: Any,
    kwargs: Any,
    recipes: tuple[Recipe, ...],
    rules: tuple[Rule, ...],
) -> tuple[Statistics, Any]:
    """The statistics, and the auxiliary outputs of the loss."""
    leaves = jax.tree.leaves(variables[PARAMS], is_leaf=is_scaled)
    traced = TracedLoss.of(loss_and_aux, variables, args, kwargs, [aval_of(leaf) for leaf in leaves], {})
    found, views = traced.found, traced.views
    rules = () if found.programs else rules
    of_plain = Rules(recipes[0], rules, paths=[layer_path(view.path) for view in views if view is not None])
    planned, plan = _of_programs(found) if found.programs else _of_plain(found, of_plain)
    recorders = {key: Recorder.of(each, recipes) for key, each in planned.items()}
    layers = tuple(
        MeasuredLayer(_name(planned[key]), each.recipes, each.own) for key, each in recorders.items()
    )

    def loss(records: list[Records], leaves: list[Any], arrays: list[Any]) -> Any:
        pairs = zip(recorders.items(), records, strict=True)
        states = {key: DotState({}, dataclasses.replace(each, records=new)) for (key, each), new in pairs}
        ins = [x if view is None else Tracked(Weight(x), view) for x, view in zip(leaves, views, strict=True)]
        return traced.evaluate(plan, [*ins, *arrays], states)

    # See `gradients.traced`: only compiled code adds cotangents of an extended dtype.
    grad_fn = jax.jit(jax.grad(loss, has_aux=True, allow_int=True))
    numbers, aux = grad_fn([each.records for each in recorders.values()], leaves, traced.arrays)
    model, used = next(iter(found.recipes), None), dict.fromkeys([*found.rules, *of_plain.used])
    return Statistics(tuple(each.numbers() for each in numbers), layers, model, tuple(used)), aux


def _of_programs(found: FoundDots) -> tuple[dict[Any, PlannedDot], Plan]:
    """The dot products of the transformed models, by key."""
    planned: dict[Any, PlannedDot] = {}
    for each in found.planned:
        other = planned.setdefault(each.key, each)
        if (other.dot.shape, other.kernel) != (each.dot.shape, each.kernel):
            raise ValueError(
                f"`loss_fn`: expected one transformed model; got two with a layer {_name(each)!r}, of shapes "
                f"{other.dot.shape} and {each.dot.shape}. Take the statistics of each in a loss of its own."
            )
    return planned, Plan.of((), programs=found.programs)


def _of_plain(found: FoundDots, rules: Rules) -> tuple[dict[Any, PlannedDot], Plan]:
    """The dot products of a plain model that the first recipe includes, in high precision."""
    chosen, choices = choose(found, rules, {})
    rules.check([layer_of(dot, {}) for dot, _ in choices])
    high = [
        each._replace(kernel=each.kernel._replace(recipe=Recipe.FP32))
        for each in chosen
        if each.kernel.recipe.is_quantized
    ]
    if not high:
        raise ValueError(
            f"`loss_fn`: expected a matmul of a parameter that {rules.recipe} includes; got none. `report` "
            "of the transformed model says why. A `jax.vmap` over a transformed model's parameters hides its "
            "layers: put the vmap into the function that you transform, or measure the plain model."
        )
    return {each.key: each for each in high}, Plan.of(high)


def _name(planned: PlannedDot) -> str:
    """The path of the layer; of a parameter's second dot product with its number."""
    _, _, number = planned.key[-1].partition("#") if planned.key else ("", "", "")
    return f"{planned.dot.layer}#{number}" if number else planned.dot.layer
