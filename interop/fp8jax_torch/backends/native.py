"""The backend without other libraries: every recipe, on any device.

FP8 layers are the user's modules with another `forward` (`linear`). Their weights are `ScaledTensor`s in the
recipe's format, their weight gradients FP8, and Adam keeps moments and masters in the recipe's formats
(`optim`). CPUs, and GPUs without FP8 tensor cores, emulate the GEMMs; the note says so.
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

# Options of torch's Adam that `fp8jax_torch.optim` does not have.
_OPTIONS_OF_TORCH = "params amsgrad foreach capturable differentiable fused decoupled_weight_decay".split()


def supports(device: torch.device | None = None) -> str | None:
    """None: this backend runs everywhere."""
    return None


def refuses(recipe: Recipe) -> str | None:
    """None, or the column that several processes cannot have."""
    if _world_size() == 1:
        return None
    ddp = "torch's DistributedDataParallel"
    if recipe.comm != "FP32":
        return (
            f"native has no comm={recipe.comm}: {ddp} moves gradients in float32; say "
            "comm=FP32,weight=FP32,weight_grad=FP32"
        )
    if recipe.weight != "FP32" or recipe.weight_grad != "FP32":
        return (
            f"native has no weight={recipe.weight}, weight_grad={recipe.weight_grad} over several processes: "
            f"{ddp} adds plain tensors"
        )
    return None


def prepare(model: nn.Module, optimizer: Any, recipe: Recipe) -> base.Prepared:
    """Makes the chosen layers and the optimizer follow the recipe; see `base`.

    An Adam or AdamW of torch becomes that of `fp8jax_torch.optim` where the recipe has low-precision weights,
    moments or masters. Other optimizers stay, where the recipe leaves moments and masters in float32.
    """
    if any(is_product(module) for module in model.modules()):
        raise ValueError("`model`: expected a plain model; got one that was prepared already.")
    found, shared = layers.linears(model), layers.shared_weights(model)
    if recipe.gemm == "FP8":
        reasons, rows = base.plan(NAME, model, recipe, layers.why_not_called, base.no_gemm)
    else:
        reasons = {path: layers.why_not_called(module) for path, module in found.items()}
        said = {path: reason or f"gemm={recipe.gemm}" for path, reason in reasons.items()}
        rows = base.rows_of(model, said, base.no_gemm)
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
    """A note on a prepared model on its present device."""
    fp8: list[Any] = [module for module in model.modules() if isinstance(module, FP8Product)]
    notes = [why for device in {layer.weight.device for layer in fp8} if (why := why_no_fp8(device))]
    if len({layer.fp8.recipe.weight == "FP32" for layer in fp8}) > 1:
        notes.append(
            "weights that layers outside FP8 share stay in their own dtype, and so do their gradients"
        )
    return "; ".join(notes)


def _leave_fast_path(model: nn.Module) -> None:
    """Makes torch's encoder call its layers in evaluation, where its fast path reads their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer) and any(map(is_product, module.modules())):
            module.activation_relu_or_gelu = 0


class _Changed(NamedTuple):
    """Parameters that replace plain parameters."""

    new: dict[nn.Parameter, nn.Parameter]  # plain -> new
    wide: dict[nn.Parameter, torch.Tensor]  # new -> value of the plain parameter

    def scale(self, module: nn.Module, recipe: Recipe) -> None:
        """Quantizes a layer's weight to the recipe's format; a shared weight once."""
        plain: Any = module.weight
        if recipe.gemm != "FP8" or recipe.weight == "FP32" or is_scaled(plain):
            return
        if plain not in self.new:
            scaled = quantize(plain, formats.get(recipe.weight), power_of_two=True)
            self.new[plain] = nn.Parameter(scaled, plain.requires_grad)
            self.wide[self.new[plain]] = plain.detach()
        module.weight = self.new[plain]


def _of_shared(recipe: Recipe) -> Recipe:
    """The recipe of a layer that shares its weight with a module outside FP8."""
    if recipe.gemm != "FP8":
        return recipe
    return dataclasses.replace(recipe, weight="FP32", weight_grad="FP32", master_weight="-")


def _prepared(optimizer: Any, recipe: Recipe, changed: _Changed, known: set[Any]) -> Any:
    """An optimizer of the new parameters, with its state in the recipe's formats."""
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
    """The `Adam` or `AdamW` that replaces torch's, with its groups, and its state in the recipe's formats."""
    groups = []
    for group in optimizer.param_groups:
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                raise ValueError(f"`optimizer`: expected {name}=False, which FP8 moments have not; got True.")
        kept = {name: option for name, option in group.items() if name not in _OPTIONS_OF_TORCH}
        groups.append({**kept, "params": [changed.new.get(p, p) for p in group["params"]]})
    ours = (AdamW if base.is_decoupled(optimizer) else Adam)(groups, recipe=recipe)
    for old, group in zip(optimizer.param_groups, groups, strict=True):
        for plain, parameter in zip(old["params"], group["params"], strict=True):
            if optimizer.state.get(plain):
                ours.take_state(parameter, optimizer.state[plain])
            if parameter in changed.wide:
                ours.ensure_state(parameter, changed.wide[parameter])
    return ours


class _AfterStep:
    """A hook that advances the scaling states after a step, and forgets the amaxes of a skipped step."""

    def __init__(self, states: list[ScalingState]):
        self.states = states

    def __call__(self, optimizer: Any, *ignored: Any) -> None:
        for state in self.states:
            state.forget() if getattr(optimizer, "has_skipped", False) else state.advance()

    def forget(self) -> None:
        """Drops the amaxes since the last step."""
        for state in self.states:
            state.forget()


class Advancing(Skipping):
    """Mixin of an optimizer that keeps `_AfterStep` in copies and pickles, where torch drops all hooks."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """As torch's; drops amaxes with the gradients, as after a step that a loss scaler skipped."""
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]
        self.on_skip()

    def on_skip(self: Any) -> None:
        """Drops the amaxes since the last step."""
        for hook in self._own_hooks().values():
            hook.forget()

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizer_step_post_hooks": self._own_hooks()}  # pyright: ignore

    def _own_hooks(self: Any) -> OrderedDict[int, _AfterStep]:
        hooks = self._optimizer_step_post_hooks.items()
        return OrderedDict((key, hook) for key, hook in hooks if isinstance(hook, _AfterStep))


def _advance(model: nn.Module, inputs: Any) -> None:
    """Advances the scaling states before a forward, where no optimizer ends a step."""
    # A forward within a backward recomputes activations.
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        return
    for state in _states(model):
        state.advance()


def _states(model: nn.Module) -> list[ScalingState]:
    return [module for module in model.modules() if isinstance(module, ScalingState)]


def _world_size() -> int:
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
