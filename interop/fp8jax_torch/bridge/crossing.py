"""A tensor's bits from torch to JAX and back: no value is read, so none is rounded.

    >>> codes = torch.tensor([0.1, float("nan")]).to(torch.float8_e4m3fn)
    >>> to_jax(codes).dtype
    dtype(float8_e4m3fn)

By dlpack, which shares memory, where both libraries have the device; else through the host's memory, as
unsigned integers of the codes' width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}


def to_jax(tensor: torch.Tensor, sharding: Any = None) -> jax.Array:
    """A dense tensor as a JAX array, in the same memory where it can be.

    Args:
        tensor: any dtype that JAX has, any shape; not a `ScaledTensor`.
        sharding: where the array is to be; None for where dlpack finds it, or JAX's first device.
    """
    tensor = tensor.detach().contiguous()
    if _PLATFORMS.get(tensor.device.type) == jax.default_backend():
        array = jnp.from_dlpack(tensor)
    else:
        bits = tensor.cpu().reshape(-1).view(_BITS[tensor.element_size()]).numpy()
        array = jnp.asarray(bits.view(jnp.dtype(name_of(tensor))).reshape(tensor.shape))
    return array if sharding is None else jax.device_put(array, sharding)


def to_torch(array: Any, device: torch.device) -> torch.Tensor:
    """An array as a torch tensor on a device, in the same memory where it can be.

    Args:
        array: JAX or numpy array of a dtype that torch has, any shape.
        device: where the tensor is to be.
    """
    array = jnp.asarray(array)
    devices = array.devices()
    platform = next(iter(devices)).platform
    if len(devices) == 1 and platform == _PLATFORMS.get(device.type):
        return torch.from_dlpack(array).to(device)
    host = np.array(array)  # a copy, which torch may write to
    bits = host.reshape(-1).view(f"u{host.itemsize}")
    dtype = getattr(torch, name_of(array))
    return torch.from_numpy(bits).view(dtype).reshape(host.shape).to(device)


def name_of(x: Any) -> str:
    """A dtype's name, which both libraries spell alike."""
    return str(x.dtype).removeprefix("torch.")
