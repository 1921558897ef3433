"""The optimizer behind `adam`, `adamw` and `muon`: its state, its checks, and a fused step."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.comm import Zero
from fp8jax.optim import checks
from fp8jax.optim.guard.lost_tags import check_finite_scales, check_tags
from fp8jax.optim.muon_matrices import Muon, matrices_of, spread, warn_of_stacks
from fp8jax.optim.state import AdamState
from fp8jax.optim.state.convert import check_formats
from fp8jax.optim.state.stored_formats import first_key, first_state
from fp8jax.optim.step import (
    NO_DECAY,
    AdamScalars,
    ParamState,
    Rounding,
    Written,
    advance_over_devices,
    as_directions,
    as_written,
    directions,
    fused_adam,
    largest_update,
    nesterov_shares,
)
from fp8jax.optim.storage import is_stored
from fp8jax.optim.transforms import plain_mask, takes_variables
from fp8jax.optim.wrappers import filled, in_variables, with_variables_inside, without_variables
from fp8jax.platforms import with_auto_axes
from fp8jax.quantization import (
    is_scaled,
    leaf_seeds,
    with_float32_scales,
)
from fp8jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """The hyperparameters. Without a learning rate the updates are Adam directions."""

    recipe: Recipe | None
    b1: Any
    b2: Any
    eps: Any
    learning_rate: Any = None
    weight_decay: Any = 0.0
    mask: Any = None
    decay: str = NO_DECAY
    zero: Zero | None = None
    seed: int = 0
    in_8_bits: bool = False
    muon: Muon | None = None

    @property
    def state_recipe(self) -> Recipe:
        """The recipe of the state's formats and rounding. O3 has master weights for 8-bit weights only."""
        return self.recipe or Recipe.O3


def optimizer(rule: UpdateRule) -> optax.GradientTransformationExtraArgs:
    """The optimizer with these hyperparameters, for parameters or whole variables."""
    checks.check_rate(rule.learning_rate)
    checks.check_adam(rule.b1, rule.b2, rule.eps, rule.weight_decay, rule.seed)
    functions = functools.partial(_init, rule), functools.partial(_update, rule)
    return takes_variables(optax.GradientTransformation(*functions))


def _init(rule: UpdateRule, params: Any) -> AdamState:
    checks.check_weights(rule.recipe, params)
    checks.refuse_complex("params", params)
    if rule.learning_rate is None:
        checks.refuse_8_bits(params)
        checks.refuse_rounding(rule.recipe, params)
    leaves, treedef = jax.tree.flatten(without_variables(params), is_leaf=is_scaled)
    plain_params = treedef.unflatten(leaves)
    _decays(rule, treedef, plain_params)
    matrices = matrices_of(rule.muon, treedef, plain_params)
    warn_of_stacks(rule.muon, plain_params)
    betas = (None, None) if rule.in_8_bits else (rule.b1, rule.b2)
    checks.warn_of_rounding(rule.recipe, params, rule.learning_rate, *betas)

    arrays = first_state(params, rule.state_recipe, rule.in_8_bits, matrices)
    checks.check_groups(rule.zero, arrays[:2])
    # Not one zero twice, which a loop that donates its state would donate twice.
    zeros = [jnp.zeros([], jnp.int32) for _ in range(2)]
    numbers: Any = (*zeros, first_key(rule.state_recipe, rule.seed))
    if rule.zero is not None:
        arrays = [rule.zero.place_state(tree, params) for tree in arrays]
        numbers = jax.tree.map(rule.zero.replicated, numbers)
    mu, nu, master, remainder = (with_variables_inside(tree) for tree in arrays)
    count, skipped, key = numbers
    return AdamState(optax.ScaleByAdamState(count, mu, nu), master, skipped, remainder, key)


def _update(rule: UpdateRule, updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
    if rule.learning_rate is not None:
        checks.check_params(params)
    checks.check_state(state, AdamState)
    # An `nnx.State` has an `nnx.Variable` around each leaf, and no key where there is none.
    boxes = updates, state.adam.mu, state.adam.nu, state.master, state.remainder
    updates, *arrays = map(without_variables, boxes)
    check_tags(updates)
    checks.refuse_complex("updates", updates)
    params = without_variables(params)
    check_finite_scales(params)
    params = with_float32_scales(params)
    grads, treedef = jax.tree.flatten(updates, is_leaf=is_scaled)
    count = jnp.asarray(optax.safe_increment(state.adam.count))
    mu, nu, master, remainder = _flat_state(arrays, treedef, updates)
    olds = [None] * len(grads) if rule.learning_rate is None else treedef.flatten_up_to(params)
    parts = zip(grads, mu, nu, olds, master, remainder, strict=True)
    leaves = [ParamState(*part) for part in parts]
    _check_shapes(leaves)
    checks.check_weights(rule.recipe, params)
    matrices = matrices_of(rule.muon, treedef, params)
    check_formats(leaves, state.key, rule.recipe, rule.in_8_bits, matrices)
    new, ok = _stepped(rule, leaves, matrices, _decays(rule, treedef, params), state, count)
    updates, mu, nu, master, remainder = (
        in_variables(box, treedef.unflatten([leaf[i] for leaf in new])) for i, box in enumerate(boxes)
    )
    adam = optax.ScaleByAdamState(jnp.where(ok, count, state.adam.count), mu, nu)
    skipped = state.skipped + jnp.where(ok, 0, 1)
    return updates, AdamState(adam, master, skipped, remainder, state.key)


def _stepped(
    rule: UpdateRule,
    leaves: list[ParamState],
    matrices: Any,
    decays: tuple[str, ...],
    state: AdamState,
    count: Any,
) -> tuple[list[Written], jax.Array]:
    """The parameters' results of step number `count`, and whether the step is not skipped."""
    scalars = _scalars(rule, state.adam.count, count)
    seeds = None if state.key is None else leaf_seeds(state.key, count, len(leaves))
    rounding = Rounding(*rule.state_recipe.rounding[:2])
    if rule.muon is not None:
        ways = (
            functools.partial(directions, matrices=matrices, rms=rule.muon.consistent_rms),
            functools.partial(as_directions, matrices=matrices),
        )
        pairs = zip(leaves, with_auto_axes(*ways, leaves, scalars.muon), strict=True)
        leaves = [leaf._replace(direction=direction) for leaf, direction in pairs]
    if rule.zero is not None:
        return advance_over_devices(rule.zero, leaves, scalars, seeds, decays, rounding)
    step = functools.partial(fused_adam, decays=decays, rounding=rounding)
    return with_auto_axes(step, as_written, leaves, scalars, seeds)


def _scalars(rule: UpdateRule, old: Any, count: Any) -> AdamScalars:
    """The scalars of step number `count`, after `old` steps."""
    rate: Any = rule.learning_rate(old) if callable(rule.learning_rate) else rule.learning_rate
    steps = jnp.float32(count)
    scalars = AdamScalars(
        (rule.b1, rule.b2),
        (1 - rule.b1, 1 - rule.b2),
        (1 - jnp.float32(rule.b1) ** steps, jnp.sqrt(1 - jnp.float32(rule.b2) ** steps)),
        rule.eps,
        None if rate is None else -rate,
        rule.weight_decay,
    )
    if rule.muon is not None:
        nesterov = nesterov_shares(rule.b1, count)
        scalars = scalars._replace(nesterov=nesterov, muon=rule.muon.scalars(old, count))
    scalars = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), scalars)
    return scalars._replace(limit=largest_update(scalars, rule.eps))


def _flat_state(arrays: list[Any], treedef: Any, updates: Any) -> list[list[Any]]:
    """The leaves of a state's trees for each gradient.

    Raises:
        ValueError: the state is of other parameters.
    """
    try:
        nothing = [None] * treedef.num_leaves
        flat = [nothing if tree is None else treedef.flatten_up_to(filled(tree, updates)) for tree in arrays]
        if all(hasattr(mu, "shape") for mu in flat[0]):
            return flat
    except (TypeError, ValueError):
        pass
    given, seen = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_stored)}
        for tree in (updates, arrays[0])
    )
    pairs = ("without", given - seen), ("with", seen - given)
    others = " and ".join(f"{word} {min(names)}" for word, names in pairs if names) or "in other containers"
    raise ValueError(
        f"`state`: expected the state of the parameters of `updates`; got that of others, {others}. Begin "
        "with `init`, and copy `adam.count` and, of the layers that stay, the entries in the state's trees."
    )


def _check_shapes(leaves: list[ParamState]) -> None:
    for leaf in leaves:
        if leaf.grad.shape != leaf.mu.shape:
            raise ValueError(
                f"`updates`: expected gradients of the shapes that `init` saw, here {leaf.mu.shape}; got "
                f"{leaf.grad.shape}."
            )


_WANTED_MASK = (
    "`mask`: expected a tree of booleans like the parameters, or a function from the parameters to one"
)


def _decays(rule: UpdateRule, treedef: Any, params: Any) -> tuple[str, ...]:
    """The kind of weight decay of each leaf.

    Raises:
        ValueError: the mask is not a tree of booleans like the parameters.
    """
    if rule.learning_rate is None or rule.mask is None:
        return (rule.decay,) * treedef.num_leaves
    mask: Any = plain_mask(rule.mask)
    mask = mask(params) if callable(mask) else mask
    try:
        decays = spread(mask, treedef, params)
    except (TypeError, ValueError):
        wanted, got = (
            "{" + ", ".join(map(repr, x)) + "}" if isinstance(x, Mapping) else type(x).__name__
            for x in (params, mask)
        )
        raise ValueError(f"{_WANTED_MASK}; got {got} for parameters {wanted}.") from None
    is_leaf = jax.tree_util.treedef_is_leaf
    is_bool = [isinstance(x, bool) or (getattr(x, "dtype", 0) == jnp.bool_ and not x.ndim) for x in decays]
    if not all(is_bool) or (is_leaf(jax.tree.structure(mask)) and not is_leaf(treedef)):
        got = " ".join(repr(mask).split())
        raise ValueError(
            f"{_WANTED_MASK}; got {got}. Leave `mask` out if all decay. optax.inject_hyperparams calls a "
            "mask with the number of a step unless you say static_args=('recipe', 'mask')."
        )
    return tuple(rule.decay if decay else NO_DECAY for decay in decays)
