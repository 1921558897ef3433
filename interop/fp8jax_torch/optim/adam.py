"""Adam and AdamW whose moments and masters are kept in the formats of a recipe.

    >>> import torch
    >>> from fp8jax_torch.optim import AdamW
    >>> weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> optimizer = AdamW([weight], lr=0.5, recipe="O2")
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[weight]["exp_avg"].dtype, optimizer.state[weight]["exp_avg_sq"].dtype
    (torch.float8_e4m3fn, torch.float16)

It is the step of `fp8jax.optim.adam`, see there: float32 arithmetic, moments rounded afterwards, each
tensor on a fresh power-of-two scale; a step that would make a weight or a moment infinite or NaN changes
nothing and is counted. The state is plain tensors: `torch.load` reads it with `weights_only=True`.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

import math
from typing import Any

import torch

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.recipe import Recipe, check_weights
from fp8jax_torch import casts
from fp8jax_torch.optim.step import Kept, Leaf, Numbers, amaxes_of_step, take_step
from fp8jax_torch.scaled import is_scaled, quantize, value

# Gradients below it, squared, are far from float32's end.
_SAFE = 2.0**60
_SCALE = "_scale"


class Adam(torch.optim.Optimizer):
    """`torch.optim.Adam` with the recipe's moments and masters; weight decay is L2.

    Args:
        params: parameters, or groups of them, as torch takes them: float tensors and `ScaledTensor`s.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.Adam`.
        recipe: that of the model, or the text of one: its `moments` and `master_weight` columns are read.
            None: FP8 weights get FP16 masters, and moments are E4M3 + FP16; `prepare` tells its recipe.

    State of a parameter:
        step: shape=(), float32: steps taken.
        exp_avg, exp_avg_sq: of the parameter's shape, in the moments' formats.
        exp_avg_scale, exp_avg_sq_scale: shape=(), float32; only where the moments are narrow.
        master, master_scale: of a parameter in E4M3, where the recipe keeps masters.

    Attributes:
        skipped: steps not taken because something in them was not finite.

    Raises:
        ValueError: an illegal number, a parameter whose dtype is not floating, or a scaled parameter in
            another format than the recipe's weights.
    """

    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        recipe: Recipe | str | None = None,
        maximize: bool = False,
    ):
        for name, number, fits in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not fits:
                raise ValueError(f"`{name}`: expected 0 or more (betas: below 1); got {number}.")
        self.recipe = None if recipe is None else Recipe.parse(recipe)
        self.skipped, self.has_skipped = 0, False
        self._written: dict[torch.Tensor, Any] = {}  # the versions of parameters that their masters are of
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Any) -> None:
        """See torch."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"`params`: expected floating parameters; got {parameter.dtype}.")
        self.check_weights()

    def check_weights(self) -> None:
        """Raises ValueError if the recipe's weights are not those of the parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        formats = {casts.format_of(p.codes.dtype).name for p in parameters if is_scaled(p)}
        if self.recipe is not None:
            check_weights(self.recipe, formats)

    @property
    def kept(self) -> Recipe:
        """The recipe whose moments are kept, and whose masters where weights are in its format."""
        return Recipe.O3 if self.recipe is None else self.recipe

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step, or none if something in it is not finite; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        leaves = [
            (self._leaf(parameter), self._numbers(group, parameter), parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self.has_skipped = not _is_finite(leaves)
        if self.has_skipped:
            self.skipped += 1
            return loss
        for leaf, numbers, parameter in leaves:
            take_step(leaf, numbers)
            self.state[parameter]["step"].fill_(numbers.step)
            codes = _codes(parameter)
            if not codes.is_contiguous():
                codes.copy_(leaf.weight.codes)
            self._written[parameter] = _versions(parameter)
        return loss

    def ensure_state(self, parameter: torch.Tensor, wide: torch.Tensor | None = None) -> dict[str, Any]:
        """The state of a parameter, of which what is missing starts at zero.

        Args:
            parameter: one of the optimizer's.
            wide: the value that a master starts from; by default the parameter's.
        """
        state = self.state[parameter]
        first, second = map(formats.get, self.kept.moments)
        state.setdefault("step", torch.zeros(()))
        for name, format in (("exp_avg", first), ("exp_avg_sq", second)):
            if name not in state:
                self.put(parameter, name, torch.zeros(parameter.shape, device=parameter.device), format)
        if self._has_master(parameter) and "master" not in state:
            source = value(parameter.detach()) if wide is None else wide
            self.put(parameter, "master", source, formats.get(self.kept.master_weight))
            self._written[parameter] = _versions(parameter)
        return state

    def put(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor, format: Format) -> None:
        """Keeps a float tensor as an entry of a parameter's state, in a format."""
        state = self.state[parameter]
        if format == formats.FP32:
            state[name] = tensor.float().clone(memory_format=torch.contiguous_format)
            return
        q = quantize(tensor, format, power_of_two=True)
        state[name], state[name + _SCALE] = q.codes.contiguous(), q.scale

    def _has_master(self, parameter: Any) -> bool:
        if self.kept.master_weight == "-" or not is_scaled(parameter):
            return False
        return casts.format_of(parameter.codes.dtype).name == self.kept.weight

    def _refresh_master(self, parameter: Any) -> None:
        """Where a weight is no rounding of its master, as one that was loaded is not, the weight counts."""
        state, weight = self.state[parameter], parameter.detach()
        scale = state.get("master" + _SCALE)
        wide = casts.to_float(state["master"]) if scale is None else casts.to_float(state["master"]) * scale
        rounded = casts.cast(wide * (1 / weight.scale), casts.format_of(weight.codes.dtype))
        stale = casts.to_float(rounded) != casts.to_float(weight.codes)
        if stale.any():
            format = formats.get(self.kept.master_weight)
            self.put(parameter, "master", torch.where(stale, value(weight).float(), wide), format)

    def _leaf(self, parameter: Any) -> Leaf:
        if parameter.grad.is_sparse:
            raise RuntimeError("`params`: expected dense gradients; got a sparse one. Say sparse=False.")
        state = self.ensure_state(parameter)
        if "master" in state and self._written.get(parameter) != _versions(parameter):
            self._refresh_master(parameter)
        kept = [
            Kept(state[name], state.get(name + _SCALE)) if name in state else None
            for name in ("exp_avg", "exp_avg_sq", "master")
        ]
        mu, nu, master = kept
        return Leaf(_kept(parameter.grad), mu, nu, _kept(parameter.detach()), master)  # pyright: ignore

    def _numbers(self, group: dict[str, Any], parameter: torch.Tensor) -> Numbers:
        step = int(self.state[parameter]["step"]) + 1
        lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = group["betas"]
        betas = (float(beta1), float(beta2))
        return Numbers(lr, betas, eps, decay, self.decoupled, group["maximize"], step)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and "skipped"."""
        return {**super().state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, or the state of a `torch.optim.Adam` or `AdamW`: moments are brought
        into the recipe's formats where they are in others.

        Raises:
            ValueError: it is not that of as many parameters.
        """
        # torch's own would cast the codes to the parameters' dtype.
        super().load_state_dict({**state_dict, "state": {}})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            if number in state_dict["state"]:
                self.take_state(parameter, state_dict["state"][number])
        self.skipped = state_dict.get("skipped", 0)

    def take_state(self, parameter: torch.Tensor, saved: dict[str, Any]) -> None:
        """Puts a parameter's state, copied, in the recipe's formats."""
        first, second = map(formats.get, self.kept.moments)
        wanted = {"exp_avg": first, "exp_avg_sq": second}
        if self._has_master(parameter) and "master" in saved:
            wanted["master"] = formats.get(self.kept.master_weight)
        unknown = {name.removesuffix(_SCALE) for name in saved} - {"step", "master", *wanted}
        if unknown:
            raise ValueError(
                "`state_dict`: expected the state of an Adam or AdamW without amsgrad; got the entries "
                f"{sorted(unknown)} too."
            )
        self.state[parameter] = {"step": torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()}
        for name, format in wanted.items():
            tensor, scale = saved[name].to(parameter.device), saved.get(name + _SCALE)
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"`state_dict`: expected {name} of shape {list(parameter.shape)}; got "
                    f"{list(tensor.shape)}."
                )
            if tensor.dtype == casts.dtype_of(format) and (scale is None) == (format == formats.FP32):
                self.state[parameter][name] = tensor.clone(memory_format=torch.contiguous_format)
                if scale is not None:
                    self.state[parameter][name + _SCALE] = scale.to(parameter.device, copy=True)
            else:
                wide = casts.to_float(tensor)
                self.put(parameter, name, wide if scale is None else wide * scale.to(wide.device), format)
        self._written[parameter] = _versions(parameter)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "recipe": self.recipe, "skipped": self.skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.has_skipped = False
        # Of a copy, weights and masters are of one time.
        self._written = {parameter: _versions(parameter) for parameter in self.state}


class AdamW(Adam):
    """`torch.optim.AdamW` with the recipe's moments and masters; weight decay is decoupled, see `Adam`."""

    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        recipe: Recipe | str | None = None,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, recipe=recipe, maximize=maximize)


def _codes(parameter: Any) -> torch.Tensor:
    """What a parameter's numbers are kept in."""
    return parameter.codes if is_scaled(parameter) else parameter


def _versions(parameter: Any) -> tuple[int, ...]:
    """Others whenever a scaled parameter was written."""
    if not is_scaled(parameter):
        return ()
    return id(parameter.codes), parameter.codes._version, parameter.scale._version


def _kept(tensor: Any) -> Kept:
    if is_scaled(tensor):
        return Kept(tensor.codes.contiguous(), tensor.scale)
    return Kept(tensor.contiguous(), None)


def _is_finite(leaves: list[Any]) -> bool:
    """Whether no step along any parameter makes a number infinite or NaN."""
    if not leaves:
        return True
    worst = max(torch.stack(amaxes).max().item() for amaxes in _by_device(leaves).values())
    if not math.isfinite(worst):
        return False
    is_tame = all(max(n.lr, n.weight_decay) < _SAFE and n.eps > 1 / _SAFE for _, n, _ in leaves)
    if worst < _SAFE and is_tame:
        return True
    return all(amaxes_of_step(leaf, numbers).isfinite().all() for leaf, numbers, _ in leaves)


def _by_device(leaves: list[Any]) -> dict[Any, list[torch.Tensor]]:
    """The gradients' amaxes."""
    found: dict[Any, list[torch.Tensor]] = {}
    for leaf, _, _ in leaves:
        found.setdefault(leaf.grad.codes.device, []).append(_amax(leaf.grad))
    return found


def amax_of(tensor: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of a plain or scaled tensor; inf where there is inf or NaN."""
    return _amax(_kept(tensor))


def _amax(kept: Kept) -> torch.Tensor:
    """Largest magnitude; inf where there is inf or NaN."""
    if kept.codes.dtype != torch.float8_e4m3fn or not kept.codes.numel():
        seen = casts.amax(kept.codes)
    else:
        # As bytes without their sign, codes have the order of their magnitudes, and NaN beyond all. The
        # largest signed byte is the largest positive code, the largest unsigned one the largest negative.
        positive, negative = kept.codes.view(torch.int8).max(), kept.codes.view(torch.uint8).max() & 0x7F
        largest = torch.maximum(positive.clamp(min=0).to(torch.uint8), negative)
        seen = casts.amax(largest.view(torch.float8_e4m3fn).float())
    return (
        seen if kept.scale is None else (seen * kept.scale).nan_to_num(nan=float("inf"), posinf=float("inf"))
    )
