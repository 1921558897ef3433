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


def _parts(x: ScaledArray | Storage) -> dict[str, Any]:
    """The codes and scales, or the arrays and `ScaledArray`s of a storage."""
    if isinstance(x, ScaledArray):
        return {"data": x.data, "scale": x.scale}
    return {name: part for name, part in vars(x).items() if not isinstance(part, bool)}


def _to_state(x: ScaledArray | Storage) -> dict[str, Any]:
    return {name: serialization.to_state_dict(part) for name, part in _parts(x).items()}


def _from_state(target: Any, state: Any) -> Any:
    """The inverse of `_to_state`; raises ValueError for the state of another model or recipe."""
    parts, has_parts = _parts(target), isinstance(state, Mapping)
    if not has_parts or not parts.keys() <= state.keys():
        raise ValueError(
            f"`state`: expected {sorted(parts)} of a {type(target).__name__}, as the target has them; got "
            f"{sorted(state) if has_parts else shown(state)}. Restore into variables and states like those "
            "that were saved, then call `model.quantize(plain, like=variables)` or `fp8jax.optim.convert`."
        )
    restored = {name: serialization.from_state_dict(part, state[name]) for name, part in parts.items()}
    new = dataclasses.replace(target, **restored)
    if is_scaled(new) and (new.data.dtype, new.shape) != (target.data.dtype, target.shape):
        raise ValueError(
            f"`state`: expected codes {target.data.dtype}{list(target.shape)}, as the target has them; got "
            f"{new.data.dtype}{list(new.shape)}."
        )
    return new


# For `flax.serialization.to_bytes` and `from_bytes`.
serialization.register_serialization_state(PackedE2M1, lambda x: x.bytes, lambda _, state: PackedE2M1(state))
for scaled_or_storage in (ScaledArray, *STORAGES.values()):
    serialization.register_serialization_state(scaled_or_storage, _to_state, _from_state)


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
