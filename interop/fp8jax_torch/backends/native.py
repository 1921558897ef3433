"""The backend without other libraries: every recipe, on any device.

FP8 layers are the user's modules with another `forward` (`linear`). Their weights are `ScaledTensor`s in the
recipe's format, their weight gradients are FP8, and Adam keeps moments and masters in the recipe's formats
(`optim`). FP8 GEMMs are emulated on CPUs and on GPUs without FP8 tensor cores; the note says so.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fp8jax import formats
from fp8jax.recipe import Recipe
from fp8jax_torch import layers
from fp8jax_torch.backends import base
from fp8jax_torch.gemm import why_emulated
from fp8jax_torch.linear import FP8, Converted, convert
from fp8jax_torch.optim import Adam, AdamW
from fp8jax_torch.optim.adam import check_recipe
from fp8jax_torch.optim.entries import NO_E4M4
from fp8jax_torch.optim.skipping import Skipping, skipping
from fp8jax_torch.optim.written import version_of
from fp8jax_torch.processes import are_several
from fp8jax_torch.scaled import is_scaled, quantize
from fp8jax_torch.scaling import SCALINGS, ScalingState, advance, is_in_backward, of_recipe

NAME = "native"

# Options of torch's Adam that `fp8jax_torch.optim` does not have.
_OPTIONS_OF_TORCH = "params amsgrad foreach capturable differentiable fused decoupled_weight_decay".split()


def supports(device: torch.device) -> str | None:
    """None: this backend runs everywhere."""
    return None


def refuses(recipe: Recipe) -> str | None:
    """The field of the recipe that is not here, or that several processes cannot have, or None."""
    if recipe.is_quantized and (reason := base.refused(NAME, recipe, {"scaling": tuple(SCALINGS)})):
        return reason
    if recipe.moments[1] == "E4M4":
        return f"moments={'+'.join(recipe.moments)}: {NO_E4M4}"
    if not are_several():
        return None
    reason = base.refused(NAME, recipe, {name: ("FP32",) for name in ("comm", "weight", "weight_grad")})
    plain = dataclasses.replace(recipe.with_plain_weights(), comm="FP32")
    return reason and (
        f"{reason}, over several processes, where torch's DistributedDataParallel adds plain gradients in "
        f"float32; say comm=FP32,weight=FP32,weight_grad=FP32, as in the recipe {str(plain)!r}"
    )


def prepare(model: nn.Module, optimizer: Any, recipe: Recipe) -> base.Prepared:
    """Makes the chosen layers and the optimizer follow the recipe; see `base`.

    Block scaling raises RuntimeError for a model on a GPU. What raises leaves model and optimizer unchanged.

    An Adam or AdamW of torch becomes `fp8jax_torch.optim`'s where the recipe has low-precision weights,
    moments or masters. Other optimizers stay, where the recipe leaves moments and masters in float32, and
    rounds to nearest.
    """
    found = layers.linears(model)
    if recipe.is_quantized:
        of_recipe(recipe).check_device(layers.device_of(model))
        rows = base.plan(NAME, model, recipe, layers.why_not_converted, base.no_gemm)
        chosen, shared = {row.path for row in rows if row.fp8}, layers.shared_weights(model)
        # A layer that shares its weight with a module outside FP8 keeps a plain weight.
        plain = recipe.with_plain_weights()
        recipes = {path: recipe if shared.get(path, path) in chosen else plain for path in chosen}
    else:
        reasons = {path: layers.why_not_converted(module) for path, module in found.items()}
        shown = {path: reason or f"gemm={recipe.gemm}" for path, reason in reasons.items()}
        rows = base.rows_of(model, shown, base.no_gemm)
        recipes = {path: recipe for path, reason in reasons.items() if reason is None}
    new = _quantized((found[path].weight, own) for path, own in recipes.items())
    base.check_no_hooks((name, old) for name, old in model.named_parameters() if old in new)
    if optimizer is not None:
        optimizer = _prepared(optimizer, recipe, new, set(model.parameters()))
    for path, own in recipes.items():
        layer: Any = found[path]
        convert(layer, own, path)
        layer.weight = new.get(layer.weight, layer.weight)
    _leave_fast_path(model)
    if optimizer is None:
        model.register_forward_pre_hook(advance_before_forward)
        for state in _states(model):
            state.is_without_optimizer = True
    else:
        optimizer = skipping(optimizer, Advancing)
        optimizer.scaling_states = _states(model)
        model.register_forward_pre_hook(AdvanceAfterOtherOptimizer())
    return base.Prepared(model, optimizer, rows, note(model))


def note(model: nn.Module) -> str:
    """A note on a prepared model on its present device."""
    fp8: list[Any] = [module for module in model.modules() if isinstance(module, FP8)]
    notes = [why for device in {layer.weight.device for layer in fp8} if (why := why_emulated(device))]
    if len({layer.fp8.recipe.weight == "FP32" for layer in fp8}) > 1:
        notes.append("weights shared with layers outside FP8 keep their dtype, and so do their gradients")
    return "; ".join(notes)


def uncalled(model: nn.Module) -> set[str]:
    """The paths of FP8 layers that were not called, if others were: a model may read their weights itself."""
    states = _states(model)
    is_run = any(state.is_called for state in states)
    return {state.path for state in states if is_run and not state.is_called}


def _leave_fast_path(model: nn.Module) -> None:
    """Makes torch's encoder call its layers in evaluation, where its fast path reads their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            if any(isinstance(child, Converted) for child in module.modules()):
                module.activation_relu_or_gelu = 0


def _quantized(weights: Iterable[tuple[Any, Recipe]]) -> dict[nn.Parameter, nn.Parameter]:
    """The new parameters by the old parameters, which are the weights of layers and their recipes."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for old, recipe in weights:
        if recipe.weight != "FP32" and not is_scaled(old) and old not in new:
            scaled = quantize(old, formats.get(recipe.weight), power_of_two=True)
            new[old] = nn.Parameter(scaled, old.requires_grad)
    return new


def _prepared(
    optimizer: Any, recipe: Recipe, new: dict[nn.Parameter, nn.Parameter], known: set[nn.Parameter]
) -> Any:
    """An optimizer of the new parameters, with its state in the recipe's formats; checks before it writes."""
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("`optimizer`: expected only parameters of the model; got others too.")
    columns = recipe.moments, recipe.master_weight, recipe.rounding
    has_formats = columns != (Recipe.FP32.moments, "-", Recipe.FP32.rounding)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and (has_formats or new):
        return _as_ours(optimizer, recipe, new)
    if isinstance(optimizer, Adam):
        told = recipe if optimizer.recipe is None and not optimizer.state else optimizer.recipe
        own = told or optimizer.state_recipe
        if (own.moments, own.rounding) != (recipe.moments, recipe.rounding):
            raise ValueError(f"`optimizer`: expected one with moments and rounding of {recipe}; got {own}.")
        check_recipe(told, [new.get(p, p) for group in optimizer.param_groups for p in group["params"]])
        if recipe.master_weight not in ("-", own.master_weight):
            raise ValueError(f"`optimizer`: expected one with the masters of {recipe}; got {own}.")
        optimizer.recipe = told
    elif has_formats:
        raise ValueError(
            f"`optimizer`: expected an Adam or AdamW, of torch or fp8jax_torch.optim, to keep moments="
            f"{'+'.join(recipe.moments)}, master_weight={recipe.master_weight}, rounding="
            f"{'+'.join(recipe.rounding)}; got {type(optimizer).__name__}. Or say moments=FP32+FP32,"
            "rounding=nearest+nearest+value, and no weight=E4M3."
        )
    for group in optimizer.param_groups:
        # In place, since an optimizer may know the list, as torch's LBFGS does.
        group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
    for old, parameter in new.items():
        if old in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(old)
    return optimizer


def _as_ours(optimizer: Any, recipe: Recipe, new: dict[nn.Parameter, nn.Parameter]) -> Adam:
    """The `Adam` or `AdamW` that replaces torch's, with its groups, and its state in the recipe's formats."""
    base.check_no_scheduler(optimizer)
    groups = []
    for group in optimizer.param_groups:
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                raise ValueError(
                    f"`optimizer`: expected {name}=False, which low-precision moments need; got True."
                )
        options = {name: option for name, option in group.items() if name not in _OPTIONS_OF_TORCH}
        groups.append({**options, "params": [new.get(old, old) for old in group["params"]]})
    ours = (AdamW if base.is_decoupled(optimizer) else Adam)(groups, recipe=recipe)
    # Of groups that are added later.
    names = ours.defaults.keys() & optimizer.defaults.keys() - {"decoupled_weight_decay"}
    ours.defaults |= {name: optimizer.defaults[name] for name in names}
    for group in optimizer.param_groups:
        for old in group["params"]:
            parameter: Any = new.get(old, old)
            if optimizer.state.get(old):
                ours.load_param_state(parameter, optimizer.state[old])
            if parameter is not old:
                ours.ensure_state(parameter, old.detach())
    return ours


class Advancing(Skipping):
    """Mixin of an optimizer that advances scaling states.

    The model's `scaling_states` advance after a step. A skipped step drops the recorded amaxes. `zero_grad`
    drops those of backwards, as after a step that a loss scaler skipped.
    """

    scaling_states: list[ScalingState]

    def step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; then the scaling states advance.

        Raises:
            RuntimeError: the model has other parameters than the optimizer, or its recipe is refused over
                several processes.
        """
        self._claim()
        _check_processes(self.scaling_states)
        grads = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        has_backward = any(state.has_backward for state in self.scaling_states)
        if has_backward and closure is None and all(grad is None for grad in grads):
            raise RuntimeError(
                "`optimizer`: expected gradients of its parameters after a backward; got none. The model has "
                "other parameters, as after `load_state_dict(assign=True)`: make the optimizer of those."
            )
        loss = super().step(closure, *args, **kwargs)
        if not self.has_skipped:
            advance(self.scaling_states)
        for state in self.scaling_states:
            state.forget()
        return loss

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]  # the optimizer's step calls the hooks

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """As torch's; drops the amaxes that backwards recorded with the gradients."""
        self._claim()
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]
        for state in self.scaling_states:
            if state.has_backward:  # a frozen layer's forward may be of the next step
                state.forget()

    def _claim(self) -> None:
        for state in self.scaling_states:
            state.has_optimizer = True

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super().__getstate__(), "scaling_states": self.scaling_states}


class AdvanceAfterOtherOptimizer:
    """A hook before a forward: advances scaling states that no `Advancing` optimizer advances.

    These are of a copy of the model, or of a model whose user made another optimizer. A step has ended if a
    backward recorded amaxes, and parameters were written since the last forward or have no gradients. Both
    are looked at, since some optimizers write without a count, and some loops leave gradients until later.
    """

    versions: Any = None

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        """As torch calls a hook before a forward."""
        states = _states(model)
        if any(state.has_optimizer for state in states):
            return
        parameters = list(model.parameters())
        old, self.versions = self.versions, [*map(version_of, parameters)]
        is_written = old not in (None, self.versions)
        if is_written or all(parameter.grad is None for parameter in parameters):
            if any(state.has_backward for state in states):
                advance_before_forward(model, inputs)

    def __reduce__(self) -> Any:  # a copy has other parameters
        return AdvanceAfterOtherOptimizer, ()


def advance_before_forward(model: nn.Module, inputs: Any) -> None:
    """A hook before a forward: advances the scaling states of the backwards since the last forward."""
    if is_in_backward():
        return
    # One of several processes may evaluate alone, and `advance` waits for all.
    if are_several() and not (model.training or torch.is_grad_enabled()):
        return
    states = _states(model)
    _check_processes(states)
    advance(states)


def forget_hooks(model: nn.Module) -> None:
    """Removes this backend's hooks from a model."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is advance_before_forward or isinstance(hook, AdvanceAfterOtherOptimizer):
            del model._forward_pre_hooks[key]


def _check_processes(states: list[ScalingState]) -> None:
    """Raises RuntimeError for a recipe that several processes cannot have; `prepare` may have seen one."""
    for recipe in {state.recipe for state in states} if are_several() else ():
        if reason := refuses(recipe):
            raise RuntimeError(f"`model`: {NAME} cannot express the recipe {recipe}: {reason}.")


def _states(model: nn.Module) -> list[ScalingState]:
    return [module for module in model.modules() if isinstance(module, ScalingState)]
