"""`Backend`, what a GEMM backend consists of, and the device that it is asked about."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax

from fp8jax.platforms import capability_of

# Compute capability of the first GPUs with GEMMs of FP8, and of MXFP8 and NVFP4.
FIRST_WITH_FP8, FIRST_WITH_BLOCKS = (8, 9), (10, 0)


class Device(NamedTuple):
    """A device that computes GEMMs, here or not."""

    name: str  # as its driver says, "NVIDIA H200"
    platform: str  # "cpu" or "gpu"
    capability: tuple[int, int] | None  # compute capability of an NVIDIA GPU

    @classmethod
    def here(cls) -> Self:
        """JAX's default device."""
        config: Any = jax.config
        chosen = config.jax_default_device
        if chosen is None or isinstance(chosen, str):
            chosen = jax.local_devices(backend=chosen)[0]
        return cls(chosen.device_kind, chosen.platform, capability_of(chosen))


def lacks(device: Device | None, formats: str, first: tuple[int, int], instead: str) -> str | None:
    """None, or the reason why a device has no GEMMs of these formats. A CPU emulates all of them.

    Args:
        device: None for JAX's default device.
        formats: as the reason names them.
        first: the compute capability of the first GPUs that have them.
        instead: the recipe to use instead.
    """
    device = device or Device.here()
    if device.platform == "cpu":
        return None
    if device.capability is None:
        return f"{device.name} is no NVIDIA GPU, and has no GEMMs of {formats} here; use the recipe te"
    if device.capability >= first:
        return None
    shown, least = (".".join(map(str, each)) for each in (device.capability, first))
    return (
        f"compute capability {shown} has no GEMMs of {formats}, which need {least}; use the recipe {instead}"
    )


def lacks_fp8(device: Device | None) -> str | None:
    """None, or the reason why a device has no FP8 GEMMs."""
    return lacks(device, "FP8", FIRST_WITH_FP8, "bf16")


def in_fp8(device: Device) -> None:
    """None, for a backend that computes in FP8 wherever it runs."""
    del device


def supports_all(device: Device | None, is_batched: bool) -> None:
    """None, for a backend that runs everywhere."""
    del device, is_batched


class Call(NamedTuple):
    """A custom call of compiled programs that computes a GEMM, as reports read it."""

    target: str  # the call's target
    kind: str  # how reports name its GEMMs
    rhs: int = 1  # the number of the operand that is rhs; lhs is 0
    # Whether other kernels have this target, too. Its GEMMs have an FP8 lhs with the contracted axis last,
    # and the matrices of a batch may be below each other.
    is_kernel: bool = False
    share: str = ""  # the field of `fp8jax.inspect.estimate.time.Efficiency`; "" for that of its dtype


class Backend(NamedTuple):
    """A GEMM backend.

    `dot(lhs, rhs, dimension_numbers, *, out_dtype, precise)` is the GEMM of two `ScaledArray`s with a scalar
    scale, or with scales of blocks along the contracted axis, which is the last one. It accumulates in
    float32, applies the scales and casts to `out_dtype`. `precise` requires full float32 accumulation;
    otherwise the hardware's faster, less precise accumulation is allowed.

    `supports(device, is_batched)` is None, or the reason why it cannot compute dots on a device, with batch
    dimensions if `is_batched`. Device None is JAX's default device.
    """

    gemms: str  # what computes the GEMMs
    norms: str  # how norms and activations before a cast are computed
    granularities: tuple[str, ...]  # of operands that it multiplies, see `fp8jax.scaling.base.Scaling`
    dot: Callable[..., jax.Array]
    calls: tuple[Call, ...]  # its custom calls; () if all of its GEMMs are XLA's dots
    supports: Callable[[Device | None, bool], str | None] = supports_all
    # None, or the reason why it computes in high precision on JAX's default device, though it runs there.
    why_not_fp8: Callable[[Device], str | None] = in_fp8
    is_reference: bool = False  # for comparison: it multiplies all operands, and "auto" never selects it
    is_for_meshes: bool = True  # whether "auto" selects it for several devices
    is_call_on_gpu: bool = False  # whether a program for a GPU has calls, and one for a CPU has dots
    # How the names of its primitives begin, if a program with them fails on a GPU that it does not support.
    primitive: str = ""
