"""Our own backend: every recipe, with nothing but torch, on any device.

FP8 layers are the user's own modules with another `forward` (`linear`); their weights are `ScaledTensor`s
where the recipe keeps them narrow, their weight gradients leave in FP8, and Adam keeps its moments and
masters in the recipe's formats (`optim`). A GPU without FP8 tensor cores, and a CPU, emulate the products,
and the note says so.
"""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8jax import formats
from fp8jax.recipe import Recipe
from fp8jax_torch import layers
from fp8jax_torch.backends import base
from fp8jax_torch.linear import FP8Product, is_product, make_product
from fp8jax_torch.optim import Adam, AdamW
from fp8jax_torch.optim.skipping import Skipping, skipping
from fp8jax_torch.product import why_no_fp8
from fp8jax_torch.scaled import is_scaled, quantize
from fp8jax_torch.scaling import ScalingState

NAME = "native"


def supports(device: torch.device | None = None) -> str | None:
    """None: it runs wherever torch does."""
    return None


def refuses(recipe: Recipe) -> str | None:
    """Which column it cannot express, or None: all but `comm` it can, and that too on one process."""
    if recipe.comm != "FP32" and _world_size() > 1:
        return (
            f"native has no comm={recipe.comm}: torch's DistributedDataParallel moves gradients in float32; "
            "say comm=FP32,weight=FP32,weight_grad=FP32"
        )
    if (recipe.weight != "FP32" or recipe.weight_grad != "FP32") and _world_size() > 1:
        return (
            f"native has no weight={recipe.weight}, weight_grad={recipe.weight_grad} over several processes: "
            "torch's DistributedDataParallel adds plain tensors"
        )
    return None


def prepare(model: nn.Module, optimizer: Any, recipe: Recipe) -> base.Prepared:
    """Makes the chosen layers multiply as the recipe says, and the optimizer keep what it says.

    Args:
        model: changed in place.
        optimizer: of its parameters, or None. An Adam or AdamW becomes ours where the recipe keeps
            something narrow; any other stays itself, if the recipe leaves moments and masters to it.
        recipe: one that `refuses` lets pass.

    Raises:
        ValueError: a pattern of the recipe's matches no layer; an optimizer that cannot keep its state
            as the recipe says, or that has parameters the model has not; a model already prepared.
    """
    if any(is_product(module) for module in model.modules()):
        raise ValueError("`model`: expected a plain model; got one that was prepared already.")
    found, shared = layers.linears(model), layers.shared_weights(model)
    if recipe.gemm == "FP8":
        reasons, rows = base.plan(NAME, model, recipe, layers.why_not_called, base.no_product)
    else:
        reasons = {path: layers.why_not_called(module) for path, module in found.items()}
        said = {path: reason or f"gemm={recipe.gemm}" for path, reason in reasons.items()}
        rows = base.rows_of(model, said, base.no_product)
    chosen = {path: module for path, module in found.items() if reasons[path] is None}
    plain = {path for path in chosen if shared.get(path, path) not in chosen}
    changed = _Changed({}, {})
    for path, module in chosen.items():
        make_product(module, _of_shared(recipe) if path in plain else recipe, layers.is_conv1d(module))
        if path not in plain:
            changed.scale(module, recipe)
    _leave_fast_path(model)
    if optimizer is not None:
        optimizer = _prepared(optimizer, recipe, changed, set(model.parameters()))
        optimizer.register_step_post_hook(_AfterStep(_states(model)))
        optimizer = skipping(optimizer, Advancing)
    else:
        model.register_forward_pre_hook(_advance)
    return base.Prepared(model, optimizer, rows, note(model))


def note(model: nn.Module) -> str:
    """What to know of a prepared model where it now is."""
    layers_of_it: list[Any] = [module for module in model.modules() if isinstance(module, FP8Product)]
    devices = {layer.weight.device for layer in layers_of_it}
    said = [why for device in devices if (why := why_no_fp8(device))]
    if any(layer.fp8.recipe.weight == "FP32" for layer in layers_of_it) and any(
        layer.fp8.recipe.weight != "FP32" for layer in layers_of_it
    ):
        said.append(
            "weights that layers outside FP8 share stay in their own dtype, and so do their gradients"
        )
    return "; ".join(said)


def _leave_fast_path(model: nn.Module) -> None:
    """In evaluation torch's encoder reads its layers' weights and does not call them; so it does."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer) and any(map(is_product, module.modules())):
            module.activation_relu_or_gelu = 0


class _Changed(NamedTuple):
    """Parameters that took the place of others."""

    new: dict[nn.Parameter, nn.Parameter]  # by the plain one
    wide: dict[nn.Parameter, torch.Tensor]  # by the new one, the plain one's value

    def scale(self, module: nn.Module, recipe: Recipe) -> None:
        """Keeps a layer's weight in the recipe's format, once if it is several layers'."""
        plain: Any = module.weight
        if recipe.gemm != "FP8" or recipe.weight == "FP32" or is_scaled(plain):
            return
        if plain not in self.new:
            scaled = quantize(plain, formats.get(recipe.weight), power_of_two=True)
            self.new[plain] = nn.Parameter(scaled, plain.requires_grad)
            self.wide[self.new[plain]] = plain.detach()
        module.weight = self.new[plain]


def _of_shared(recipe: Recipe) -> Recipe:
    """For a layer whose weight another module reads as it is."""
    if recipe.gemm != "FP8":
        return recipe
    return dataclasses.replace(recipe, weight="FP32", weight_grad="FP32", master_weight="-")


def _prepared(optimizer: Any, recipe: Recipe, changed: _Changed, known: set[Any]) -> Any:
    """An optimizer of the new parameters, in whose state the recipe's formats are."""
    known = known | set(changed.new)
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("`optimizer`: expected one of the model's parameters; got one with others too.")
    is_narrow = recipe.moments != ("FP32", "FP32") or recipe.master_weight != "-"
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and (is_narrow or changed.new):
        return _as_ours(optimizer, recipe, changed)
    if isinstance(optimizer, Adam) and optimizer.recipe is None and not optimizer.state:
        optimizer.recipe = recipe
    if isinstance(optimizer, Adam) and optimizer.kept.moments != recipe.moments:
        raise ValueError(f"`optimizer`: expected one with moments of {recipe}; got {optimizer.kept}.")
    if is_narrow and not isinstance(optimizer, Adam):
        raise ValueError(
            f"`optimizer`: expected an Adam or AdamW, of torch or fp8jax_torch.optim, to keep moments="
            f"{'+'.join(recipe.moments)}, master_weight={recipe.master_weight}; got "
            f"{type(optimizer).__name__}. Or say moments=FP32+FP32, and no weight=E4M3."
        )
    for group in optimizer.param_groups:
        group["params"] = [changed.new.get(parameter, parameter) for parameter in group["params"]]
    for plain, new in changed.new.items():
        if plain in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(plain)
    if isinstance(optimizer, Adam):
        optimizer.check_weights()
    return optimizer


def _as_ours(optimizer: Any, recipe: Recipe, changed: _Changed) -> Adam:
    """Our Adam or AdamW in the place of torch's, with its groups, and its state in the recipe's formats."""
    groups = []
    for group in optimizer.param_groups:
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                raise ValueError(f"`optimizer`: expected {name}=False, which FP8 moments have not; got True.")
        kept = {name: option for name, option in group.items() if name not in _OPTIONS_OF_TORCH}
        groups.append({**kept, "params": [changed.new.get(p, p) for p in group["params"]]})
    is_decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )
    ours = (AdamW if is_decoupled else Adam)(groups, recipe=recipe)
    for old, group in zip(optimizer.param_groups, groups, strict=True):
        for plain, parameter in zip(old["params"], group["params"], strict=True):
            if optimizer.state.get(plain):
                ours.take_state(parameter, optimizer.state[plain])
            if parameter in changed.wide:
                ours.ensure_state(parameter, changed.wide[parameter])
    return ours


_OPTIONS_OF_TORCH = {
    "params",
    "amsgrad",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}


class _AfterStep:
    """Brings the amaxes of a step into the scaling states, or drops those of a skipped one."""

    def __init__(self, states: list[ScalingState]):
        self.states = states

    def __call__(self, optimizer: Any, *ignored: Any) -> None:
        if getattr(optimizer, "has_skipped", False):
            self.forget()
            return
        for state in self.states:
            state.advance()

    def forget(self) -> None:
        """Drops what was seen since the last step."""
        for state in self.states:
            state.forget()


class Advancing(Skipping):
    """Mixin of an optimizer, which torch copies and pickles without its hooks: with the one that advances."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """As torch's; what was seen goes with the gradients, as after a step that a loss scaler skipped."""
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]
        self.on_skip()

    def on_skip(self: Any) -> None:
        """Drops what was seen since the last step."""
        for hook in self._optimizer_step_post_hooks.values():
            if isinstance(hook, _AfterStep):
                hook.forget()

    def __getstate__(self: Any) -> dict[str, Any]:
        hooks = self._optimizer_step_post_hooks
        ours = OrderedDict((key, hook) for key, hook in hooks.items() if isinstance(hook, _AfterStep))
        return {**super().__getstate__(), "_optimizer_step_post_hooks": ours}  # pyright: ignore


def _advance(model: nn.Module, inputs: Any) -> None:
    """Without an optimizer a step ends where the next forward begins."""
    # Not one that recomputes activations, which a backward has begun.
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        return
    for state in _states(model):
        state.advance()


def _states(model: nn.Module) -> list[ScalingState]:
    return [module for module in model.modules() if isinstance(module, ScalingState)]


def _world_size() -> int:
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
