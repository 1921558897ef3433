"""The devices here: formats of their GEMMs, versions of the software, and packages to install.

    print(text(examine()))                   # this machine
    print(text(examine("h200")))             # a GPU that is not here

No program runs: devices, versions and packages are only read; "not found" stands for what is unknown. The
GEMMs of a model are in `fp8jax.inspect.gemms`.
"""

import collections
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
from typing import Any, NamedTuple

import jax

from fp8jax import backends
from fp8jax.inspect import targets
from fp8jax.inspect.gemms import FIRST_WITH_FP8, capability_of
from fp8jax.inspect.tables import align

NATIVE, EMULATED, WIDER = "native", "emulated, exactly", "in a wider format"
NOT_SUPPORTED, UNKNOWN = "not supported", "not known"

# Extra -> its packages, its purpose. JAX's own extra brings NVIDIA's libraries, too.
EXTRAS = {
    "target": (("jax-cuda13-plugin", "jax-cuda13-pjrt"), "programs compiled for a GPU that is not here"),
    "train": (("grain", "matplotlib", "pyyaml", "rich"), "./dev train and pictures"),
    "torch": (("torch",), "fp8jax_torch, the same recipes on PyTorch"),
}
CUDA_EXTRA = 'pip install -U "jax[cuda13]"'

_EXACT = (EMULATED, "FP8 numbers are exact in the wider format")
# Operands, scaling, the first compute capability with such GEMMs, and how a CPU computes them.
_FORMATS = (
    ("FP8, E4M3 x E4M3 (forward)", "delayed, current", FIRST_WITH_FP8, _EXACT),
    ("FP8, E5M2 x E4M3 (backward)", "delayed, current", FIRST_WITH_FP8, _EXACT),
    ("BF16", "-", (8, 0), (WIDER, "float32 where the processor has no bfloat16 GEMMs")),
    ("FP16", "loss scale", (7, 0), (WIDER, "float32")),
    ("FP8, blocks of 1x128 and 128x128", "block", None, None),  # None: no recipe has them
    ("MXFP8, blocks of 32 with E8M0 scales", "block", None, None),
)

# Library -> getter in JAX's CUDA plugin, and the divisors of its version: 91200 is 9.12.0.
_LIBRARIES = {
    "CUDA runtime": ("cuda_runtime_get_version", (1000, 10)),
    "CUDA driver": ("cuda_driver_get_version", (1000, 10)),
    "cuDNN": ("cudnn_get_version", (10000, 100, 1)),
    "cuBLAS": ("cublas_get_version", (10000, 100, 1)),
}


class Support(NamedTuple):
    """How a device computes GEMMs of such operands."""

    operands: str
    scaling: str  # "-": none
    how: str  # one of the constants above
    reason: str


class Device(NamedTuple):
    """Devices of one kind."""

    name: str
    platform: str  # "cpu", "gpu", ...
    capability: tuple[int, int] | None  # of NVIDIA's GPUs
    number: int

    @property
    def gemms(self) -> list[Support]:
        """How the device computes GEMMs, by format."""
        return [
            Support(operands, scaling, *self._computes(least, on_cpu))
            for operands, scaling, least, on_cpu in _FORMATS
        ]

    def _computes(self, least: tuple[int, int] | None, on_cpu: tuple[str, str] | None) -> tuple[str, str]:
        if least is None or on_cpu is None:
            return NOT_SUPPORTED, "no recipe of this release has it"
        if self.platform == "cpu":
            return on_cpu
        if self.capability is None:
            return UNKNOWN, "not a CPU or NVIDIA GPU; `fp8jax doctor --compile` shows what runs"
        if self.capability >= least:
            return NATIVE, "cuBLASLt, through XLA"
        below = f"compute capability {_dotted(self.capability)} is below {_dotted(least)}"
        return NOT_SUPPORTED, f"{below}: XLA uses a wider format"


class Backend(NamedTuple):
    """A backend for FP8 GEMMs."""

    name: str
    reason: str  # why it cannot run here; "" if it can
    is_auto: bool  # whether "auto" takes it here


class Package(NamedTuple):
    """An optional part."""

    purpose: str
    is_there: bool
    state: str  # "installed", or what to install


class Machine(NamedTuple):
    """The devices and the software of a machine; `text` prints it."""

    devices: tuple[Device, ...]
    versions: dict[str, str]
    backends: tuple[Backend, ...]
    packages: tuple[Package, ...]
    troubles: tuple[str, ...]  # why a device is not used, and what to do about it


def examine(target: str | targets.Target | None = None) -> Machine:
    """Describes this machine.

    Args:
        target: a GPU that is not here, in place of this machine's devices; the software is this machine's.

    Raises:
        ValueError: no such target.
    """
    if target is not None:
        gpu = targets.get(target)
        devices, troubles, client = (Device(gpu.device, "gpu", gpu.capability, 1),), (), ""
    else:
        devices, troubles, client = _devices_here()
    is_gpu = target is None and any(device.platform == "gpu" for device in devices)
    names = ("jax", "jaxlib", "flax", "optax", "fp8jax")
    versions = {"Python": platform.python_version()} | {name: _version(name) or "not found" for name in names}
    versions["XLA"] = f"that of jaxlib {versions['jaxlib']}" + (f": {client}" if client else "")
    if target is None and any(device.capability for device in devices):
        versions |= cuda_versions()
    auto = backends.choose("auto").name
    reasons = {name: backend.supports(is_batched=False) or "" for name, backend in backends.BACKENDS.items()}
    found = tuple(Backend(name, reason, name == auto) for name, reason in reasons.items())
    return Machine(devices, versions, found, _packages(is_gpu), troubles)


def _devices_here() -> tuple[tuple[Device, ...], tuple[str, ...], str]:
    """This machine's devices, their troubles, and the version of the first device's client."""
    try:
        local = jax.local_devices()
    except RuntimeError as error:  # e.g. JAX_PLATFORMS names a missing device
        return (), (f"JAX has no device: {error}", *_hidden_gpu()), ""
    kinds = collections.Counter((each.device_kind, each.platform, capability_of(each)) for each in local)
    devices = tuple(Device(*kind, number) for kind, number in kinds.items())
    only_cpus = all(device.platform == "cpu" for device in devices)
    client = " ".join(str(getattr(local[0].client, "platform_version", "")).split())
    return devices, _hidden_gpu() if only_cpus else (), client if client != local[0].platform else ""


def _hidden_gpu() -> tuple[str, ...]:
    """The reason why JAX does not see an NVIDIA GPU that the system has; empty without such a GPU."""
    if not sees_nvidia():
        return ()
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if wanted and not {"cuda", "gpu"} & set(wanted.split(",")):
        reason = f"JAX_PLATFORMS={wanted} keeps JAX from it: unset that"
    elif any(_version(name) for name in ("jax-cuda13-plugin", "jax-cuda12-plugin")):
        reason = (
            "JAX's CUDA plugin is installed and does not start: it needs NVIDIA's libraries, "
            f"{CUDA_EXTRA}, and a driver of their age (JAX_PLATFORMS=cuda shows the error)"
        )
    else:
        reason = CUDA_EXTRA
    return (f"this system has an NVIDIA GPU, but JAX has only CPUs: {reason}",)


def sees_nvidia() -> bool:
    """Whether the system has an NVIDIA GPU, also one that JAX does not see."""
    return pathlib.Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _packages(has_gpu: bool) -> tuple[Package, ...]:
    without = CUDA_EXTRA if sees_nvidia() else f"no NVIDIA GPU here; where there is one, {CUDA_EXTRA}"
    found = [Package("training on an NVIDIA GPU", has_gpu, "installed" if has_gpu else without)]
    for extra, (names, purpose) in EXTRAS.items():
        missing = [name for name in names if not _version(name)]
        problem = f'pip install "fp8jax[{extra}]": without {", ".join(missing)}' if missing else None
        if extra == "target" and not missing:
            problem = targets.why_not()  # its packages must have jaxlib's version
        found.append(Package(purpose, problem is None, problem or "installed"))
    return tuple(found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_versions() -> dict[str, str]:
    """The versions of NVIDIA's libraries that JAX's plugin finds, or "not found"."""
    plugin, versions = _plugin(), {}
    for name, (getter, divisors) in _LIBRARIES.items():
        try:
            number, parts = int(getattr(plugin, getter)()), []
        except Exception:  # the plugin raises anything where a library is missing or of another version
            versions[name] = "not found"
            continue
        for divisor in divisors:
            part, number = divmod(number, divisor)
            parts.append(str(part))
        versions[name] = ".".join(parts)
    return versions


def _plugin() -> Any:
    for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            return importlib.import_module(f"{name}._versions")
        except ImportError:
            continue
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def text(machine: Machine) -> str:
    """The machine as tables."""
    parts: list[str] = []
    for device in machine.devices:
        has = f", compute capability {_dotted(device.capability)}" if device.capability else ""
        parts += [f"{device.number} x {device.name} ({device.platform}{has})", align(device.gemms)]
    parts.append(", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    runs = [
        (each.name, each.reason or "can run", "auto" if each.is_auto else "") for each in machine.backends
    ]
    states = [(package.purpose, package.state) for package in machine.packages]
    for title, rows in (("backend on this machine", runs), ("what for, and what to install", states)):
        parts.append("\n  ".join([title, *align(rows).splitlines()]))
    return "\n\n".join([*parts, *(f"TROUBLE: {trouble}" for trouble in machine.troubles)])


def as_data(machine: Machine) -> dict[str, Any]:
    """The machine for JSON."""
    devices = [
        {**device._asdict(), "gemms": [row._asdict() for row in device.gemms]} for device in machine.devices
    ]
    named = {key: [row._asdict() for row in getattr(machine, key)] for key in ("backends", "packages")}
    return {"devices": devices, "versions": machine.versions, **named, "troubles": list(machine.troubles)}
