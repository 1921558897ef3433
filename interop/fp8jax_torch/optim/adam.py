"""Adam and AdamW with moments and master weights in a recipe's formats.

The step is `fp8jax.optim.adam`'s: float32 arithmetic, then moments are rounded, each tensor on a new
power-of-two scale. A step that would make a weight or a moment infinite or NaN is skipped and counted. The
state consists of plain tensors: `torch.load` reads it with `weights_only=True`.

Stochastic rounding takes its random bits from a counter, as `fp8jax.optim` does: they depend on the seed, the
step, the parameter's number and the entry's place in it. The number is `state_dict`'s: the parameter's
place among those of all groups, with or without a gradient. It is JAX's where the tree of parameters has the
same leaves in the same order, as a list has; a Flax model has names in alphabetical order and transposed
kernels, so the same seed gives it other bits.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.recipe import Recipe, check_weights
from fp8jax_torch import casts
from fp8jax_torch.optim.entries import (
    FIRST,
    NO_E4M4,
    SECOND,
    SECOND_ROOT,
    check_names,
    entries_of,
    entry_of,
    names_in,
    with_codes,
)
from fp8jax_torch.optim.skipping import Skipping, stays_finite
from fp8jax_torch.optim.step import (
    REMAINDER_STEP,
    AdamScalars,
    ParamState,
    is_16_bits,
    take_step,
)
from fp8jax_torch.optim.written import version_and_scale, version_of
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize, value


class Adam(Skipping, torch.optim.Optimizer):
    """`torch.optim.Adam` with moments and master weights in the recipe's formats; weight decay is L2.

    Args:
        params: parameters, or groups of them, as torch takes them: float tensors and `ScaledTensor`s.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.Adam`.
        recipe: the model's recipe, or its text; sets `moments`, `master_weight` and `rounding`. None: E4M3
            weights have FP16 masters, and moments are E4M3 + FP16, until `prepare` sets the recipe.
        seed: of the random bits, for a recipe that rounds stochastically; an option of the groups, and so
            saved with them.

    State of a parameter:
        step: shape=(), float32: steps taken.
        exp_avg, exp_avg_sq: the parameter's shape, float32.
        exp_avg_sq_root: instead of exp_avg_sq, its root, where the recipe says "root".
        master: the master weight; only of a parameter in E4M3, where the recipe has masters.
        remainder: the parameter's shape, E4M3 codes in sixteenths of the scale of the weight, or of the
            master weight: what rounding took from it; only where the recipe says "kahan". Of a plain bfloat16
            or float16 parameter int8, in 256ths of each weight's last bit.
        NAME_codes, NAME_scale: instead of NAME, where the recipe has another format than float32: codes of
            the parameter's shape, and the scale, shape=(), float32.

    Attributes: `skipped` and `has_skipped`, as in `Skipping`.

    Raises:
        ValueError: an illegal number, a parameter that is not floating, or a scaled parameter in another
            format than the recipe's weights.
    """

    decoupled = False
    default_decay = 0.0  # of `weight_decay`

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        recipe: Recipe | str | None = None,
        maximize: bool = False,
        seed: int = 0,
    ):
        weight_decay = self.default_decay if weight_decay is None else weight_decay
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        limits = {"betas": 1, "seed": 2**64}
        for name, option in options.items():
            numbers = option if isinstance(option, tuple | list) else [option]
            kinds = int if name == "seed" else int | float | torch.Tensor
            is_legal = len(numbers) == (2 if name == "betas" else 1) and all(
                isinstance(number, kinds) and 0 <= number < limits.get(name, math.inf) for number in numbers
            )
            if not is_legal:
                below = f", below {limits[name]}" if name in limits else ""
                kind = {"betas": ", two numbers", "seed": ", an integer"}.get(name, "")
                raise ValueError(f"`{name}`: expected 0 or more{below}{kind}; got {option!r}.")
        self.recipe = None if recipe is None else Recipe.parse(recipe)
        self._versions: dict[torch.Tensor, Any] = {}  # of parameters, when their masters were written
        # The last as torch's option, for `dequantize`.
        options |= {"maximize": maximize, "decoupled_weight_decay": self.decoupled}
        super().__init__(params, options)

    def add_param_group(self, param_group: Any) -> None:
        """See torch."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"`params`: expected floating parameters; got {parameter.dtype}.")
        check_recipe(self.recipe, [p for group in self.param_groups for p in group["params"]])

    @property
    def state_recipe(self) -> Recipe:
        """The recipe for the formats of the state: O3 if `recipe` is None."""
        return Recipe.O3 if self.recipe is None else self.recipe

    def rounds(self, parameter: torch.Tensor) -> tuple[str, str]:
        """`master_weight` and `rounding` of a parameter's steps, for `optim.written`."""
        has_master = "master" in names_in(self.state[parameter])
        return self.state_recipe.master_weight if has_master else "-", self.state_recipe.rounding[1]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step, skipped if a new weight or moment is not finite; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        listed = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        parameters = [
            (parameter, self._state_of(parameter), self._scalars(group, parameter, leaf))
            for leaf, (group, parameter) in enumerate(listed)
            if parameter.grad is not None
        ]
        self.has_skipped = not self.agrees(stays_finite(parameters))
        if self.has_skipped:
            self.skipped += 1
            return loss
        for parameter, state, scalars in parameters:
            take_step(state, scalars)
            self.state[parameter]["step"].fill_(scalars.step)
            codes, new = (x.codes if is_scaled(x) else x for x in (parameter, state.weight))
            if not codes.is_contiguous():  # the step wrote to a contiguous copy
                codes.copy_(new)
            self._versions[parameter] = version_and_scale(parameter)
        return loss

    def ensure_state(
        self, parameter: torch.Tensor, master: Float[torch.Tensor, "..."] | None = None
    ) -> dict[str, torch.Tensor]:
        """The state of a parameter, on its device, but for `step`; missing moments start at zero, a missing
        master at `master` or the parameter's value."""
        state = self.state[parameter]
        state |= {name: entry.to(parameter.device) for name, entry in state.items() if name != "step"}
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
        for name, format in self._formats_of(parameter).items():
            if entry_of(state, name) is not None:
                continue
            if name in ("master", "remainder"):
                self._versions[parameter] = version_and_scale(parameter)
            first = torch.zeros(parameter.shape, device=parameter.device)
            if name == "master":
                first = value(parameter.detach()) if master is None else master
            self._store(parameter, name, first, format)
        if self._has_plain_remainder(parameter):
            state.setdefault("remainder", torch.zeros_like(parameter, dtype=torch.int8).contiguous())
        elif "remainder" not in self._formats_of(parameter):  # as after `model.float()`
            state.pop("remainder", None)
        return state

    def _has_plain_remainder(self, parameter: torch.Tensor) -> bool:
        return is_16_bits(parameter) and self.state_recipe.rounding[1] == "kahan"

    def _formats_of(self, parameter: torch.Tensor) -> dict[str, Format]:
        """The formats of the entries of a parameter's state."""
        recipe, second = self.state_recipe, SECOND_ROOT if self.state_recipe.rounding[2] == "root" else SECOND
        if recipe.moments[1] == "E4M4":
            raise ValueError(f"`recipe`: {NO_E4M4}.")
        names: dict[str, str] = dict(zip((FIRST, second), recipe.moments, strict=True))
        if is_scaled(parameter):
            weight = casts.format_of(parameter.codes.dtype).name
            if recipe.master_weight != "-" and weight == recipe.weight:
                names["master"] = recipe.master_weight
            if recipe.rounding[1] == "kahan" and (weight == "FP16" or "master" in names):
                names["remainder"] = "E4M3"
        return {entry: formats.get(name) for entry, name in names.items()}

    def _store(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor, format: Format) -> None:
        """Stores a plain tensor as an entry of a parameter's state, quantized to a format."""
        if _has_scale(name, format):
            new = quantize(tensor, format, power_of_two=True)
        else:
            new = tensor.to(casts.dtype_of(format), copy=True)
        self.state[parameter] |= entries_of(name, _contiguous(new))

    def _refresh(self, parameter: Any) -> None:
        """Sets the master, and ends the remainder, where the weight was written since, as after loading.

        After a multiplication of the weight in place, which changes only the scale, the master is multiplied.
        """
        state: Any = self.ensure_state(parameter)
        weight = parameter.detach()
        master, remainder = entry_of(state, "master"), state.get("remainder")
        old_version, old_scale = self._versions.get(parameter, ((None, None), None))
        version, scale = self._versions[parameter] = version_and_scale(parameter)
        if version[0] == old_version[0] and version != old_version:
            if master is not None:
                (master.scale if is_scaled(master) else master).mul_(scale / old_scale)
            return
        if master is not None:
            rounded = value(master) * (1 / weight.scale)
        else:  # half of a remainder, a quarter of a step at most, does not round to another code
            rounded = casts.to_float(weight.codes).add(casts.to_float(remainder), alpha=REMAINDER_STEP / 2)
        rounded = casts.cast(rounded, casts.format_of(weight.codes.dtype))
        is_stale = casts.to_float(rounded) != casts.to_float(weight.codes)
        if not is_stale.any():
            return
        if master is not None:
            new = torch.where(is_stale, value(weight).float(), value(master))
            self._store(parameter, "master", new, self._formats_of(parameter)["master"])
        if remainder is not None:
            factor = 1.0 if master is None else master.scale / entry_of(state, "master").scale
            rest = torch.where(is_stale, 0.0, casts.to_float(remainder) * factor)
            state["remainder"] = casts.cast(rest, formats.E4M3)

    def _refresh_written(self, parameters: Iterable[Any]) -> None:
        """`_refresh` of those of the parameters that were written."""
        for parameter in parameters:
            has_entry = is_scaled(parameter) and names_in(self.state[parameter]) & {"master", "remainder"}
            version, _ = self._versions.get(parameter, (None, None))
            if has_entry and version != version_of(parameter) and not parameter.is_meta:
                self._refresh(parameter)

    def _state_of(self, parameter: Any) -> ParamState:
        if parameter.grad.is_sparse:
            raise RuntimeError("`params`: expected dense gradients; got a sparse one. Say sparse=False.")
        state = self.ensure_state(parameter)
        self._refresh_written([parameter])
        second = SECOND_ROOT if SECOND_ROOT in names_in(state) else SECOND
        mu, nu, *high_precision = (entry_of(state, name) for name in (FIRST, second, "master", "remainder"))
        return ParamState(
            _contiguous(parameter.grad), mu, nu, _contiguous(parameter.detach()), *high_precision
        )

    def _scalars(self, group: dict[str, Any], parameter: torch.Tensor, leaf: int) -> AdamScalars:
        numbers = [group[name] for name in ("lr", "eps", "weight_decay")]
        lr, eps, decay, beta1, beta2 = map(float, (*numbers, *group["betas"]))
        options = group["maximize"], group["seed"], self.decoupled, self.state_recipe.rounding
        step = int(self.state[parameter]["step"]) + 1
        return AdamScalars(lr, eps, decay, (beta1, beta2), *options, leaf, step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, or the state of a `torch.optim.Adam` or `AdamW`; moments are
        rounded to the recipe's formats. Raises ValueError for another number of parameters."""
        # With the state, torch's would cast the codes to the parameters' dtype.
        super().load_state_dict({**state_dict, "state": {}})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            if number in state_dict["state"]:
                self.load_param_state(parameter, state_dict["state"][number])

    def load_param_state(self, parameter: torch.Tensor, saved: dict[str, Any]) -> None:
        """Copies a parameter's saved state, rounded to the recipe's formats."""
        saved, wanted = with_codes(saved), self._formats_of(parameter)
        names = names_in(saved)
        for name in {"master", "remainder"} - names:
            wanted.pop(name, None)
        check_names(saved)
        self.state[parameter] = {"step": torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()}
        for name, format in wanted.items():
            source = name if name in names else {SECOND_ROOT: SECOND, SECOND: SECOND_ROOT}[name]
            entry = entry_of(saved, source)
            codes, has_scale = entry.codes if is_scaled(entry) else entry, _has_scale(name, format)
            if codes.shape != parameter.shape:
                want, got = list(parameter.shape), list(codes.shape)
                raise ValueError(f"`state_dict`: expected {name} of shape {want}; got {got}.")
            if source == name and codes.dtype == casts.dtype_of(format) and is_scaled(entry) == has_scale:
                new = _contiguous(entry.to(parameter.device, copy=True))
                self.state[parameter] |= entries_of(name, new)
                continue
            plain = value(entry).to(parameter.device, torch.float32)
            if source != name:
                plain = plain.sqrt() if name == SECOND_ROOT else plain.square()
            self._store(parameter, name, plain, format)
        if self._has_plain_remainder(parameter) and "remainder" in saved:
            remainder = torch.as_tensor(saved["remainder"])
            if remainder.shape != parameter.shape or remainder.dtype != torch.int8:
                want, got = list(parameter.shape), f"{remainder.dtype}{list(remainder.shape)}"
                raise ValueError(f"`state_dict`: expected an int8 remainder of shape {want}; got {got}.")
            self.state[parameter]["remainder"] = _contiguous(remainder.to(parameter.device, copy=True))
        self._versions[parameter] = version_and_scale(parameter)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and "skipped"; masters are of the present weights."""
        self._refresh_written(list(self.state))
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._refresh_written(list(self.state))
        return {**super().__getstate__(), "recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter, entries in self.state.items():
            self.state[parameter] = with_codes(entries)
        for group in self.param_groups:  # that torch's optimizer saved
            group.setdefault("seed", self.defaults["seed"])
            group["decoupled_weight_decay"] = self.decoupled
        # The weights and masters of a copy are of the same step.
        self._versions = {parameter: version_and_scale(parameter) for parameter in self.state}


class AdamW(Adam):
    """`torch.optim.AdamW` with the recipe's moments and masters; `weight_decay` is decoupled, see `Adam`."""

    decoupled = True
    default_decay = 1e-2


def check_recipe(recipe: Recipe | None, parameters: list[Any]) -> None:
    """Raises ValueError if the recipe's weights are not those of the parameters."""
    if recipe is not None:
        check_weights(recipe, {casts.format_of(p.codes.dtype).name for p in parameters if is_scaled(p)})


def _has_scale(name: str, format: Format) -> bool:
    return name != "remainder" and format != formats.FP32


def _contiguous(x: Any) -> Any:
    return ScaledTensor(x.codes.contiguous(), x.scale) if is_scaled(x) else x.contiguous()
