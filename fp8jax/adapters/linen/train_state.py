"""Flax's `TrainState` for scaled weights, scaling states and loss scales."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import serialization
from flax.training import train_state

from fp8jax.gradients import apply_updates
from fp8jax.gradients.keys import shown
from fp8jax.optim.storage import STORAGES, Storage
from fp8jax.quantization import PackedE2M1, ScaledArray, is_scaled
from fp8jax.variables import PARAMS, SCALING, has_params


def _to_state(x: ScaledArray) -> dict[str, Any]:
    data = x.data.bytes if isinstance(x.data, PackedE2M1) else x.data
    return {"data": data, "scale": _to_state(x.scale) if is_scaled(x.scale) else x.scale}


def _check_parts(target: Any, names: set[str], state: Any) -> None:
    """Raises ValueError if a state has no parts of these names, as one of another model or recipe."""
    has_parts = isinstance(state, Mapping)
    if not has_parts or not names <= state.keys():
        raise ValueError(
            f"`state`: expected {sorted(names)} of a {type(target).__name__}, as the target has them; got "
            f"{sorted(state) if has_parts else shown(state)}. Restore into variables and states like those "
            "that were saved, then call `model.quantize(plain, like=variables)` or `fp8jax.optim.convert`."
        )


def _from_state(target: ScaledArray, state: dict[str, Any]) -> ScaledArray:
    _check_parts(target, {"data", "scale"}, state)
    data, scale = state["data"], state["scale"]
    data = PackedE2M1(data) if isinstance(target.data, PackedE2M1) else data
    new = ScaledArray(data, _from_state(target.scale, scale) if is_scaled(target.scale) else scale)
    if (new.data.dtype, new.shape) != (target.data.dtype, target.shape):
        raise ValueError(
            f"`state`: expected codes {target.data.dtype}{list(target.shape)}, as the target has them; got "
            f"{new.data.dtype}{list(new.shape)}."
        )
    return new


def _storage_to_state(x: Storage) -> dict[str, Any]:
    return {name: serialization.to_state_dict(part) for name, part in _parts(x).items()}


def _storage_from_state(target: Storage, state: dict[str, Any]) -> Storage:
    parts = _parts(target)
    _check_parts(target, set(parts), state)
    restored = {name: serialization.from_state_dict(part, state[name]) for name, part in parts.items()}
    return dataclasses.replace(target, **restored)


def _parts(x: Storage) -> dict[str, Any]:
    """The arrays and `ScaledArray`s of a storage."""
    return {name: part for name, part in vars(x).items() if not isinstance(part, bool)}


# For `flax.serialization.to_bytes` and `from_bytes`.
serialization.register_serialization_state(ScaledArray, _to_state, _from_state)
for storage in STORAGES.values():
    serialization.register_serialization_state(storage, _storage_to_state, _storage_from_state)


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` whose `params` are whole variables.

        state = TrainState.create(apply_fn=model.apply, params=model.init(key, x), tx=tx)
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(state.params, batch)
        state = state.apply_gradients(grads=grads, variables=variables)

    Flax's own class works with FP8 GEMMs and `jax.value_and_grad`, too: its gradients of whole variables have
    the new scaling state in "_overwrite_with_gradient".
    """

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> "TrainState":
        """A state at step 0, with `tx.init(params["params"])`, or `tx.init(params)` of parameters alone."""
        return cls(
            step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=tx.init(_params(params)), **kwargs
        )

    def apply_gradients(self, *, grads: Any, variables: Any = None, **kwargs: Any) -> "TrainState":
        """The state after `tx.update` and `fp8jax.apply_updates`.

        Args:
            grads, variables: as `value_and_grad` returned them; or `grads` alone, JAX's own gradient of whole
                variables.
            kwargs: other fields to replace.

        Raises:
            ValueError: `variables` are missing, so that the new scaling state would be lost.
        """
        if variables is None and not (has_params(grads) and SCALING in grads):
            raise ValueError(
                "`variables`: expected those that `value_and_grad` returned, with the new scaling state; got "
                "None. Call `state.apply_gradients(grads=grads, variables=variables)`."
            )
        if variables is None:
            return super().apply_gradients(grads=grads, **kwargs)
        updates, opt_state = self.tx.update(grads, self.opt_state, _params(variables))
        params = apply_updates(variables, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)


def _params(variables: Any) -> Any:
    return variables[PARAMS] if has_params(variables) else variables
