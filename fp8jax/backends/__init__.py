"""GEMM backends: what multiplies the quantized operands of a dot.

| backend | on a GPU | on a CPU | scales |
|---|---|---|---|
| `xla` | cuBLASLt, through XLA | emulated | one for a tensor |
| `te` | TransformerEngine's cuBLASLt calls | - | one for a tensor |
| `pallas` | a Pallas kernel | emulated | 1x128 and 128x128 blocks |
| `cudnn` | cuDNN, through `jax.nn.scaled_matmul` | emulated | MXFP8's and NVFP4's blocks |
| `reference` | dequantized, a float32 matmul | the same | all |

`BACKENDS` has a `base.Backend` for each name, in the file of this name. `choose` selects one of them.
"""

from typing import NamedTuple

import jax

from fp8jax.backends import cudnn, pallas, reference, te, xla
from fp8jax.backends.base import FIRST_WITH_BLOCKS as FIRST_WITH_BLOCKS
from fp8jax.backends.base import FIRST_WITH_FP8 as FIRST_WITH_FP8
from fp8jax.backends.base import Backend as Backend
from fp8jax.backends.base import Call as Call
from fp8jax.backends.base import Device as Device

# "auto" is the first of these that can compute a dot, and is not the reference.
BACKENDS = {
    "te": te.BACKEND,
    "xla": xla.BACKEND,
    "pallas": pallas.BACKEND,
    "cudnn": cudnn.BACKEND,
    "reference": reference.BACKEND,
}


class ChosenBackend(NamedTuple):
    """The selected backend, and the reason."""

    name: str  # a key of `BACKENDS`
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose(
    name: str, granularity: str = "tensor", *, is_batched: bool = False, device: Device | None = None
) -> ChosenBackend:
    """The backend `name`, or for "auto" the first that can compute the dot and is not the reference.

    Args:
        name: "auto", or a key of `BACKENDS`.
        granularity: what has a scale in the operands, see `fp8jax.scaling.base.Scaling`.
        is_batched: whether the dot has batch dimensions.
        device: None for JAX's default device. A program that is traced on a CPU for an absent GPU has the
            backend of the CPU, which is not "te".

    Raises:
        ValueError: the backend is unknown, or cannot compute the dot.
    """
    found, why = _first(name, granularity, is_batched, device)
    if found is None:
        able = [each for each in BACKENDS if _first(each, granularity, is_batched, device)[0]]
        raise ValueError(
            f"`backend`: {name} cannot run here: {why}. With a scale per {granularity} these can: "
            f"{', '.join(able) or 'none'}."
        )
    return ChosenBackend(found, why)


def why_not(name: str, granularity: str = "tensor", *, device: Device | None = None) -> str | None:
    """None, or the reason why `choose` raises."""
    found, why = _first(name, granularity, False, device)
    return None if found else why


def _first(name: str, granularity: str, is_batched: bool, device: Device | None) -> tuple[str | None, str]:
    """The first backend that can compute a dot, or None; and the reason."""
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"`backend`: expected auto or one of {', '.join(BACKENDS)}; got {name!r}.")
    if name != "auto":
        known = BACKENDS[name].granularities
        reason = f"it multiplies operands with a scale per {' or '.join(known)}, not per {granularity}"
        if BACKENDS[name].is_reference or granularity in known:
            reason = BACKENDS[name].supports(device, is_batched)
        return (None, reason) if reason else (name, "as asked for")
    reasons = []
    for each, backend in BACKENDS.items():
        if backend.is_reference or granularity not in backend.granularities:
            continue
        reason = backend.supports(device, is_batched)
        if reason is None and not backend.is_for_meshes and jax.device_count() > 1:
            reason = f"{each} is chosen for one device, and there are several"
        if reason is None:
            is_cpu = not reasons and (device or Device.here()).platform == "cpu"
            return each, "; ".join(reasons) or ("emulated on a CPU" if is_cpu else backend.gemms)
        reasons.append(reason)
    return None, "; ".join(reasons) or f"no backend multiplies operands with a scale per {granularity}"


def notes(choices: list[ChosenBackend]) -> list[str]:
    """A report's lines for the backends of a model's dots: norms, and names with reasons."""
    norms = [BACKENDS[choice.name].norms for choice in choices]
    found = list(dict.fromkeys([*norms, *(f"backend: {choice}" for choice in choices)]))
    device = Device.here()
    names = dict.fromkeys(choice.name for choice in choices)
    found += filter(None, (BACKENDS[name].why_not_fp8(device) for name in names))
    if found and device.platform != "cpu" and device.capability is None:
        found.append(f"untested on {device.name}, where XLA may compute in bf16")
    return found
