"""Adam and AdamW with moments and master weights in a recipe's formats.

    >>> import torch
    >>> from fp8jax_torch.optim import AdamW
    >>> weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> optimizer = AdamW([weight], lr=0.5, recipe="O2")
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[weight]["exp_avg"].dtype, optimizer.state[weight]["exp_avg_sq"].dtype
    (torch.float8_e4m3fn, torch.float16)

The step is that of `fp8jax.optim.adam`: float32 arithmetic, then moments are rounded, each tensor on a new
power-of-two scale. A step that would make a weight or a moment infinite or NaN is skipped and counted. The
state consists of plain tensors: `torch.load` reads it with `weights_only=True`.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

import math
from typing import Any

import torch
from jaxtyping import Float

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.recipe import Recipe, check_weights
from fp8jax_torch import casts
from fp8jax_torch.optim.skipping import Skipping, largest
from fp8jax_torch.optim.step import AdamScalars, ParamState, amaxes_of_step, take_step
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize, value

# Gradients below this limit, squared, are far from float32's max.
_SAFE = 2.0**60
_SCALE = "_scale"


class Adam(Skipping, torch.optim.Optimizer):
    """`torch.optim.Adam` with moments and master weights in the recipe's formats; weight decay is L2.

    Args:
        params: parameters, or groups of them, as torch takes them: float tensors and `ScaledTensor`s.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.Adam`.
        recipe: the model's recipe, or its text, with rounding to nearest; sets `moments` and
            `master_weight`. None: E4M3 weights have
            FP16 masters, and moments are E4M3 + FP16, until `prepare` sets the recipe.

    State of a parameter:
        step: shape=(), float32: steps taken.
        exp_avg, exp_avg_sq: the parameter's shape, in the moments' formats.
        exp_avg_scale, exp_avg_sq_scale: shape=(), float32; only of quantized moments.
        master, master_scale: the master weight; only of a parameter in E4M3, where the recipe has masters.

    Attributes:
        skipped: number of skipped steps.
        has_skipped: whether the last step was skipped.

    Raises:
        ValueError: an illegal number, a recipe with another rounding, a parameter that is not floating, or a
            scaled parameter in another format than the recipe's weights.
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
    ):
        weight_decay = self.default_decay if weight_decay is None else weight_decay
        for name, number, fits in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not fits:
                raise ValueError(f"`{name}`: expected 0 or more (betas: below 1); got {number}.")
        self.recipe = None if recipe is None else rounding_to_nearest(Recipe.parse(recipe))
        self._versions: dict[torch.Tensor, Any] = {}  # of parameters, when their masters were written
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
        names = {casts.format_of(p.codes.dtype).name for p in parameters if is_scaled(p)}
        if self.recipe is not None:
            check_weights(self.recipe, names)

    @property
    def state_recipe(self) -> Recipe:
        """The recipe for the formats of the state: O3 if `recipe` is None."""
        return Recipe.O3 if self.recipe is None else self.recipe

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step, skipped if a new weight or moment is not finite; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [
            (parameter, self._state_of(parameter), self._scalars(group, parameter))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self.has_skipped = not _is_finite(parameters)
        if self.has_skipped:
            self.skipped += 1
            return loss
        for parameter, state, scalars in parameters:
            take_step(state, scalars)
            self.state[parameter]["step"].fill_(scalars.step)
            codes, new = (x.codes if is_scaled(x) else x for x in (parameter, state.weight))
            if not codes.is_contiguous():  # the step wrote to a contiguous copy
                codes.copy_(new)
            self._versions[parameter] = _version(parameter)
        return loss

    def ensure_state(
        self, parameter: torch.Tensor, master: Float[torch.Tensor, "..."] | None = None
    ) -> dict[str, torch.Tensor]:
        """The state of a parameter; missing moments start at zero.

        Args:
            parameter: of the optimizer.
            master: first value of a missing master weight; by default the parameter's value.
        """
        state = self.state[parameter]
        state.setdefault("step", torch.zeros(()))
        for name, format in self._formats_of(parameter).items():
            if name in state:
                continue
            if name == "master":
                first = value(parameter.detach()) if master is None else master
                self._versions[parameter] = _version(parameter)
            else:
                first = torch.zeros(parameter.shape, device=parameter.device)
            self._store(parameter, name, first, format)
        return state

    def _formats_of(self, parameter: torch.Tensor) -> dict[str, Format]:
        """The formats of a parameter's moments and, if it has one, of its master weight."""
        recipe = self.state_recipe
        names: dict[str, str] = dict(zip(("exp_avg", "exp_avg_sq"), recipe.moments, strict=True))
        if recipe.master_weight != "-" and is_scaled(parameter):
            if casts.format_of(parameter.codes.dtype).name == recipe.weight:
                names["master"] = recipe.master_weight
        return {entry: formats.get(name) for entry, name in names.items()}

    def _store(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor, format: Format) -> None:
        """Stores a plain tensor as an entry of a parameter's state, quantized to a format."""
        state = self.state[parameter]
        if format == formats.FP32:
            state[name] = tensor.float().clone(memory_format=torch.contiguous_format)
            return
        q = quantize(tensor, format, power_of_two=True)
        state[name], state[name + _SCALE] = q.codes.contiguous(), q.scale

    def _entry(self, parameter: torch.Tensor, name: str) -> Any:
        """An entry of a parameter's state: a plain tensor, a `ScaledTensor`, or None."""
        state = self.state[parameter]
        if name + _SCALE in state:
            return ScaledTensor(state[name], state[name + _SCALE])
        return state.get(name)

    def _refresh_master(self, parameter: Any) -> None:
        """Sets the master to the weight where the weight is not the rounded master, as after loading."""
        weight, master = parameter.detach(), value(self._entry(parameter, "master"))
        rounded = casts.cast(master * (1 / weight.scale), casts.format_of(weight.codes.dtype))
        is_stale = casts.to_float(rounded) != casts.to_float(weight.codes)
        if is_stale.any():
            master = torch.where(is_stale, value(weight).float(), master)
            self._store(parameter, "master", master, self._formats_of(parameter)["master"])

    def _state_of(self, parameter: Any) -> ParamState:
        if parameter.grad.is_sparse:
            raise RuntimeError("`params`: expected dense gradients; got a sparse one. Say sparse=False.")
        state = self.ensure_state(parameter)
        if "master" in state and self._versions.get(parameter) != _version(parameter):
            self._refresh_master(parameter)
        mu, nu, master = (self._entry(parameter, name) for name in ("exp_avg", "exp_avg_sq", "master"))
        return ParamState(_contiguous(parameter.grad), mu, nu, _contiguous(parameter.detach()), master)

    def _scalars(self, group: dict[str, Any], parameter: torch.Tensor) -> AdamScalars:
        step = int(self.state[parameter]["step"]) + 1
        lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return AdamScalars(lr, (beta1, beta2), eps, decay, self.decoupled, group["maximize"], step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, or the state of a `torch.optim.Adam` or `AdamW`; moments are
        rounded to the recipe's formats.

        Raises:
            ValueError: the state has another number of parameters.
        """
        # With the state, torch's would cast the codes to the parameters' dtype.
        super().load_state_dict({**state_dict, "state": {}})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            if number in state_dict["state"]:
                self.load_param_state(parameter, state_dict["state"][number])

    def load_param_state(self, parameter: torch.Tensor, saved: dict[str, Any]) -> None:
        """Copies a parameter's saved state, rounded to the recipe's formats."""
        wanted = self._formats_of(parameter)
        if "master" not in saved:
            wanted.pop("master", None)
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
                plain = casts.to_float(tensor) * (1.0 if scale is None else scale.to(tensor.device))
                self._store(parameter, name, plain, format)
        self._versions[parameter] = _version(parameter)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The weights and masters of a copy are of the same step.
        self._versions = {parameter: _version(parameter) for parameter in self.state}


def rounding_to_nearest(recipe: Recipe) -> Recipe:
    """The recipe; raises ValueError if it rounds otherwise, which only `fp8jax.optim` can."""
    if recipe.rounding != ("nearest", "nearest", "value"):
        raise ValueError(
            f"`recipe`: expected rounding=nearest+nearest+value on torch; got {recipe} with rounding="
            f"{'+'.join(recipe.rounding)}, which fp8jax.optim does in JAX. Take O2."
        )
    return recipe


class AdamW(Adam):
    """`torch.optim.AdamW` with the recipe's moments and masters; `weight_decay` is decoupled, see `Adam`."""

    decoupled = True
    default_decay = 1e-2


def _version(parameter: Any) -> tuple[int, ...]:
    """Changes whenever a scaled parameter is written."""
    if not is_scaled(parameter):
        return ()
    return id(parameter.codes), parameter.codes._version, parameter.scale._version


def _contiguous(x: Any) -> Any:
    return ScaledTensor(x.codes.contiguous(), x.scale) if is_scaled(x) else x.contiguous()


def _is_finite(parameters: list[tuple[Any, ParamState, AdamScalars]]) -> bool:
    """Whether no parameter's step makes a number infinite or NaN."""
    worst = largest(state.grad for _, state, _ in parameters)
    if not math.isfinite(worst):
        return False
    is_tame = all(max(s.lr, s.weight_decay) < _SAFE and s.eps > 1 / _SAFE for _, _, s in parameters)
    if worst < _SAFE and is_tame:
        return True
    return all(amaxes_of_step(state, scalars).isfinite().all() for _, state, scalars in parameters)
