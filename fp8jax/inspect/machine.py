"""What is there to train on, what it multiplies, and what is missing.

    print(text(examine()))                   # this machine
    print(text(examine("h200")))             # a GPU that is not here

Nothing is run: devices, versions and packages say it all, and what cannot be found out is "not found". What
a model's own products become is another question, see `fp8jax.inspect.gemms`.
"""

import collections
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from fp8jax import backends
from fp8jax.inspect import targets
from fp8jax.inspect.gemms import FIRST_WITH_FP8, capability_of

NATIVE, EMULATED, WIDER = "native", "emulated, exactly", "in a wider format"
NOT_SUPPORTED, UNKNOWN = "not supported", "not known"

# The optional parts: extra, its packages, what it is for. JAX's own extra has NVIDIA's libraries too.
EXTRAS = {
    "target": (("jax-cuda13-plugin", "jax-cuda13-pjrt"), "programs compiled for a GPU that is not here"),
    "train": (("grain", "matplotlib", "pyyaml", "rich"), "./dev train and pictures"),
    "torch": (("torch",), "fp8jax_torch, the same recipes on PyTorch"),
}
CUDA_EXTRA = 'pip install -U "jax[cuda13]"'

_FP8 = (
    ("FP8, E4M3 x E4M3 (forward)", "delayed, current"),
    ("FP8, E5M2 x E4M3 (backward)", "delayed, current"),
)
_NOWHERE = (
    ("FP8, blocks of 1x128 and 128x128", "block"),
    ("MXFP8, blocks of 32 with E8M0 scales", "block"),
)


class Product(NamedTuple):
    """What becomes of GEMMs with such operands."""

    operands: str
    scaling: str  # "-": none
    how: str  # one of the constants above
    reason: str


class Device(NamedTuple):
    """Devices of one kind."""

    name: str
    platform: str  # "cpu", "gpu", ...
    capability: tuple[int, int] | None  # NVIDIA's; None of what is not theirs
    number: int

    @property
    def products(self) -> list[Product]:
        """What it multiplies."""
        nowhere = [Product(*each, NOT_SUPPORTED, "no recipe of this release has it") for each in _NOWHERE]
        return [*_products(self.platform, self.capability), *nowhere]


class Backend(NamedTuple):
    """One answer to who multiplies FP8."""

    name: str
    reason: str  # why it cannot run here; "" if it can
    is_auto: bool  # whether "auto" takes it here


class Package(NamedTuple):
    """An optional part."""

    purpose: str
    is_there: bool
    state: str  # "installed", or what to install


class Machine(NamedTuple):
    """A machine, as far as training on it goes; `text` prints it."""

    devices: tuple[Device, ...]
    versions: dict[str, str]
    backends: tuple[Backend, ...]
    packages: tuple[Package, ...]
    troubles: tuple[str, ...]  # what keeps the machine from what it could do, and what to do about it


def examine(target: str | targets.Target | None = None) -> Machine:
    """What there is.

    Args:
        target: a GPU that is not here, in the place of this machine's devices; software is that of here.

    Raises:
        ValueError: no such target.
    """
    if target is not None:
        gpu = targets.get(target)
        devices, troubles, text = (Device(gpu.device, "gpu", gpu.capability, 1),), (), ""
    else:
        devices, troubles, text = _devices_here()
    versions = _versions(text)
    if target is None and any(device.capability for device in devices):
        versions |= cuda_versions()
    has_gpu = target is None and any(device.platform == "gpu" for device in devices)
    return Machine(devices, versions, _backends(), _packages(has_gpu), troubles)


def _devices_here() -> tuple[tuple[Device, ...], tuple[str, ...], str]:
    """This machine's, what is wrong with them, and what the first one's client says of its version."""
    try:
        local = jax.local_devices()
    except RuntimeError as error:  # e.g. JAX_PLATFORMS asks for what is not there
        return (), (f"JAX has no device: {error}", *_hidden_gpu()), ""
    kinds = collections.Counter((each.device_kind, each.platform, capability_of(each)) for each in local)
    devices = tuple(Device(*kind, number) for kind, number in kinds.items())
    only_cpus = all(device.platform == "cpu" for device in devices)
    text = " ".join(str(getattr(local[0].client, "platform_version", "")).split())
    return devices, _hidden_gpu() if only_cpus else (), text if text != local[0].platform else ""


def _hidden_gpu() -> tuple[str, ...]:
    """An NVIDIA GPU that the system sees and JAX does not, and why."""
    if not sees_nvidia():
        return ()
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if wanted and not {"cuda", "gpu"} & set(wanted.split(",")):
        what = f"JAX_PLATFORMS={wanted} keeps JAX from it: unset that"
    elif any(_version(name) for name in ("jax-cuda13-plugin", "jax-cuda12-plugin")):
        what = (
            "JAX's CUDA plugin is installed and does not start: it needs NVIDIA's libraries, "
            f"{CUDA_EXTRA}, and a driver of their age (JAX_PLATFORMS=cuda shows the error)"
        )
    else:
        what = CUDA_EXTRA
    return (f"this system has an NVIDIA GPU, but JAX has only CPUs: {what}",)


def sees_nvidia() -> bool:
    """Whether the system has an NVIDIA GPU, whatever JAX sees."""
    return pathlib.Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _products(platform: str, capability: tuple[int, int] | None) -> Iterable[Product]:
    if platform == "cpu":
        yield from (Product(*each, EMULATED, "codes are exact in the wider products") for each in _FP8)
        yield Product("BF16", "-", WIDER, "float32 where the processor has no bfloat16 products")
        yield Product("FP16", "loss scale", WIDER, "float32")
    elif capability is None:
        why = "this library was made for CPUs and NVIDIA's GPUs; `fp8jax doctor --compile` shows what runs"
        yield from (Product(*each, UNKNOWN, why) for each in (*_FP8, ("BF16", "-"), ("FP16", "loss scale")))
    else:
        found = f"compute capability {_dotted(capability)}"
        rows = [(*_FP8[0], FIRST_WITH_FP8), (*_FP8[1], FIRST_WITH_FP8)]
        for operands, scaling, least in (*rows, ("BF16", "-", (8, 0)), ("FP16", "loss scale", (7, 0))):
            if capability >= least:
                yield Product(operands, scaling, NATIVE, "cuBLASLt, through XLA")
            else:
                needed = f"{found} is below {_dotted(least)}"
                yield Product(operands, scaling, NOT_SUPPORTED, f"{needed}: XLA multiplies wider")


def _backends() -> tuple[Backend, ...]:
    auto = backends.choose("auto").name
    reasons = {name: backend.supports(is_batched=False) or "" for name, backend in backends.BACKENDS.items()}
    return tuple(Backend(name, reason, name == auto) for name, reason in reasons.items())


def _packages(has_gpu: bool) -> tuple[Package, ...]:
    without = CUDA_EXTRA if sees_nvidia() else f"no NVIDIA GPU here; where there is one, {CUDA_EXTRA}"
    found = [Package("training on an NVIDIA GPU", has_gpu, "installed" if has_gpu else without)]
    for extra, (names, purpose) in EXTRAS.items():
        missing = [name for name in names if not _version(name)]
        problem = f'pip install "fp8jax[{extra}]": without {", ".join(missing)}' if missing else None
        if extra == "target" and not missing:
            problem = targets.why_not()  # its packages must be of jaxlib's version
        found.append(Package(purpose, problem is None, problem or "installed"))
    return tuple(found)


def _versions(of_client: str) -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "fp8jax")
    found = {"Python": platform.python_version()} | {name: _version(name) or "not found" for name in names}
    return found | {"XLA": f"that of jaxlib {found['jaxlib']}" + (f": {of_client}" if of_client else "")}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_versions() -> dict[str, str]:
    """The versions of NVIDIA's libraries as JAX's plugin finds them, or "not found"."""
    wanted = {
        "CUDA runtime": ("cuda_runtime_get_version", (1000, 10)),
        "CUDA driver": ("cuda_driver_get_version", (1000, 10)),
        "cuDNN": ("cudnn_get_version", (10000, 100, 1)),
        "cuBLAS": ("cublas_get_version", (10000, 100, 1)),
    }
    plugin = _plugin()
    return {name: _read(plugin, getter, parts) for name, (getter, parts) in wanted.items()}


def _plugin() -> Any:
    for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            return importlib.import_module(f"{name}._versions")
        except ImportError:
            continue
    return None


def _read(plugin: Any, getter: str, parts: tuple[int, ...]) -> str:
    """A version that is one number, 91200, as "9.12.0"."""
    try:
        number = int(getattr(plugin, getter)())
    except Exception:  # a library is missing, or of another age: the plugin raises what it likes
        return "not found"
    digits = []
    for part in parts:
        digits.append(str(number // part))
        number %= part
    return ".".join(digits)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def text(machine: Machine) -> str:
    """The machine as tables."""
    lines: list[str] = []
    for device in machine.devices:
        has = f", compute capability {_dotted(device.capability)}" if device.capability else ""
        lines += [
            f"{device.number} x {device.name} ({device.platform}{has})",
            "",
            *_table(device.products),
            "",
        ]
    lines += [", ".join(f"{name} {version}" for name, version in machine.versions.items())]
    lines += ["", "backend on this machine"]
    shown = [(b.name, b.reason or "can run", "auto" if b.is_auto else "") for b in machine.backends]
    lines += ["  " + line for line in _table(shown)]
    lines += ["", "what for, and what to install"]
    lines += ["  " + line for line in _table((p.purpose, p.state) for p in machine.packages)]
    return "\n".join([*lines, *(f"\nTROUBLE: {trouble}" for trouble in machine.troubles)])


def _table(rows: Iterable[Iterable[str]]) -> list[str]:
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def as_data(machine: Machine) -> dict[str, Any]:
    """The machine for JSON."""
    devices = [
        {**device._asdict(), "products": [product._asdict() for product in device.products]}
        for device in machine.devices
    ]
    named = {key: [row._asdict() for row in getattr(machine, key)] for key in ("backends", "packages")}
    return {"devices": devices, "versions": machine.versions, **named, "troubles": list(machine.troubles)}
