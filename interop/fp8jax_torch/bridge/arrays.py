"""A tensor's bits, from torch to JAX and back without rounding.

Dlpack shares memory where both libraries have the device. Elsewhere the bits are copied through host memory
as unsigned integers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Shaped

from fp8jax_torch.scaled import is_scaled

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}


def to_jax(
    tensor: Shaped[torch.Tensor, "..."], sharding: jax.sharding.Sharding | None = None
) -> Shaped[jax.Array, "..."]:
    """A dense tensor as a JAX array, in the same memory where possible.

    Without a sharding the array is on dlpack's device, or on JAX's first device.
    """
    tensor = tensor.detach().contiguous()
    if _PLATFORMS.get(tensor.device.type) == jax.default_backend():
        array = jnp.from_dlpack(tensor)
    else:
        bits = tensor.cpu().reshape(-1).view(_BITS[tensor.element_size()]).numpy()
        array = jnp.asarray(bits.view(jnp.dtype(dtype_name(tensor))).reshape(tensor.shape))
    return array if sharding is None else jax.device_put(array, sharding)


def to_torch(
    array: Shaped[jax.Array | np.ndarray, "..."], device: torch.device
) -> Shaped[torch.Tensor, "..."]:
    """An array as a torch tensor on a device, in the same memory where possible."""
    array = jnp.asarray(array)
    devices = array.devices()
    platform = next(iter(devices)).platform
    if len(devices) == 1 and platform == _PLATFORMS.get(device.type):
        return torch.from_dlpack(array).to(device)
    host = np.array(array)  # a copy, which torch may write to
    bits = host.reshape(-1).view(f"u{host.itemsize}")
    dtype = getattr(torch, dtype_name(array))
    return torch.from_numpy(bits).view(dtype).reshape(host.shape).to(device)


def check_64_bits(name: str, tensor: Shaped[torch.Tensor, "..."]) -> None:
    """Raises ValueError if JAX would change values of 64 bits: it has 32 without `jax_enable_x64`."""
    if tensor.element_size() < 8:
        return
    given = tensor.detach().cpu().numpy()
    with np.errstate(over="ignore"):
        held = given.astype(jax.dtypes.canonicalize_dtype(given.dtype))
    if not np.array_equal(held, given, equal_nan=True):
        raise ValueError(
            f"`state_dict`: expected values of {name} that {held.dtype} holds; got {given.dtype} values that "
            "it does not. Convert them in torch, or switch on JAX's `jax_enable_x64`."
        )


def dtype_name(x: Any) -> str:
    """The name of an array's or tensor's dtype, which both libraries spell alike."""
    return str(x.dtype).removeprefix("torch.")


def codes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A `ScaledTensor`'s codes, or the plain tensor itself; detached."""
    return (tensor.codes if is_scaled(tensor) else tensor).detach()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one form have the same codes and scales; NaNs are compared by their bits."""

    def bits(x: torch.Tensor) -> list[torch.Tensor]:
        parts = [x.codes, x.scale] if is_scaled(x) else [x]
        return [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in parts]

    return all(map(torch.equal, bits(a), bits(b)))
