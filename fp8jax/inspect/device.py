"""The devices here: formats of their GEMMs, versions of the software, and packages to install.

    print(text(examine()))                   # this machine
    print(text(examine("h200")))             # a GPU that is not here

No program runs: devices, versions and packages are only read; "not found" stands for what is unknown. On a
GPU a small GEMM is compiled, to see that it is in FP8. `fp8jax.inspect.report_check` has a model's GEMMs.
"""

import collections
import dataclasses
import importlib
import os
import pathlib
import platform
import shutil
from typing import Any

import jax

from fp8jax import backends, scaling
from fp8jax.backends import FIRST_WITH_FP8
from fp8jax.extras import install, version
from fp8jax.inspect import targets
from fp8jax.inspect.tables import align
from fp8jax.platforms import capability_of
from fp8jax.recipe import Recipe
from fp8jax.recipe.legal_values import FIELDS_OF_SCALING

NATIVE, EMULATED, WIDER = "native", "emulated, exactly", "in a wider format"
NOT_SUPPORTED, UNKNOWN = "not supported", "not known"

# Extra -> its packages, its purpose.
EXTRAS = {
    "train": (
        ("grain", "jsonargparse", "matplotlib", "orbax-checkpoint", "pyyaml", "rich"),
        "./dev train and pictures",
    ),
    "serving": (("safetensors",), "Hugging Face folders in and out"),
    "torch": (("torch",), "fp8jax_torch, the same recipes on PyTorch"),
}
TARGETS = "programs compiled for a GPU that is not here"
CUDA_EXTRA = 'pip install -U "jax[cuda13]<0.13"'

_EXACT = (EMULATED, "FP8 and FP4 numbers are exact in the wider format")
# Operands, scaling, the first compute capability with such GEMMs, a CPU's way, backend, granularity.
_HIGH_PRECISION: tuple[tuple[Any, ...], ...] = (
    ("BF16", "-", (8, 0), (WIDER, "float32 where the processor has no bfloat16 GEMMs"), "xla", "tensor"),
    ("FP16", "loss scale", (7, 0), (WIDER, "float32"), "xla", "tensor"),
)
# Granularity -> quantized operands.
_OPERANDS = {
    "tensor": ("FP8, E4M3 x E4M3 (forward)", "FP8, E5M2 x E4M3 (backward)"),
    "1x128": ("FP8, blocks of 1x128 and 128x128",),
    "1x32": ("MXFP8, blocks of 32 with E8M0 scales",),
    "1x16": ("NVFP4, blocks of 16 with E4M3 scales",),
}

# Library -> its name in JAX's CUDA plugin.
_LIBRARIES = {
    "CUDA runtime": "cuda_runtime",
    "CUDA driver": "cuda_driver",
    "cuDNN": "cudnn",
    "cuBLAS": "cublas",
}


def examine(target: str | targets.Target | None = None) -> dict[str, Any]:
    """Describes this machine in JSON values, which `text` prints.

    Args:
        target: a GPU that is not here, in place of this machine's devices; the software is this machine's.

    Returns:
        Under "devices" the devices by kind, with name, platform, compute capability (None if it is no GPU of
        NVIDIA's), number, and the rows of `gemms_of`. Under "versions" those of the software by name. Under
        "backends" for each GEMM backend what computes the GEMMs, why the device lacks them ("" if it has
        them), and whether "auto" selects it. Under "packages" for each optional part whether it is there, and
        what to install. Under "troubles" why a device is not used, and what to do about it.

    Raises:
        ValueError: no such target.
    """
    if target is not None:
        gpu = targets.get(target)
        devices, troubles, client = [_device(gpu.device, "gpu", gpu.capability, 1)], [], ""
    else:
        devices, troubles, client = _devices_here()
        on = backends.Device.here() if devices else None
        troubles += filter(None, (on and each.why_not_fp8(on) for each in backends.BACKENDS.values()))
    is_gpu = target is None and any(device["platform"] == "gpu" for device in devices)
    names = ("jax", "jaxlib", "flax", "optax", "fp8jax")
    versions = {"Python": platform.python_version()} | {name: version(name) or "not found" for name in names}
    versions["XLA"] = f"of jaxlib {versions['jaxlib']}" + (f": {client}" if client else "")
    if target is None and any(device["capability"] for device in devices):
        versions |= cuda_versions()
    packages, first = _packages(is_gpu), devices[:1]
    found = [row for each in first for row in _backends(each["name"], each["platform"], each["capability"])]
    return dict(devices=devices, versions=versions, backends=found, packages=packages, troubles=troubles)


def _backends(*device: Any) -> list[dict[str, Any]]:
    """The rows of "backends" for the fields of a `backends.Device`, see `examine`."""
    on, table = backends.Device(*device), backends.BACKENDS
    granularities = {each for backend in table.values() for each in backend.granularities}
    able = [each for each in granularities if backends.why_not("auto", each, device=on) is None]
    auto = {backends.choose("auto", each, device=on).name for each in able}
    rows = [(name, each.gemms, each.supports(on, False) or "", name in auto) for name, each in table.items()]
    return [dict(zip(("name", "gemms", "reason", "is_auto"), row, strict=True)) for row in rows]


def gemms_of(platform: str, capability: tuple[int, int] | None) -> list[dict[str, str]]:
    """How devices of a platform and a compute capability compute GEMMs, by the format of the operands."""
    on = backends.Device("", platform, capability)

    def way(least: tuple[int, int], on_cpu: tuple[str, str], backend: str, granularity: str) -> Any:
        if platform == "cpu":
            return on_cpu
        if capability is None:
            return UNKNOWN, "not a CPU or NVIDIA GPU; `fp8jax doctor --compile` shows what runs"
        if reason := backends.why_not(backend, granularity, device=on):
            return NOT_SUPPORTED, reason
        below = f"compute capability {_dotted(capability)} is below {_dotted(least)}: XLA uses a wider format"
        name = backends.choose(backend, granularity, device=on).name
        gemms = f"{name}: {backends.BACKENDS[name].gemms}"
        return (NATIVE, gemms) if capability >= least else (NOT_SUPPORTED, below)

    ways = [(operands, scaling, *way(*of)) for operands, scaling, *of in (*_HIGH_PRECISION, *_quantized())]
    return [dict(zip(("operands", "scaling", "how", "reason"), row, strict=True)) for row in ways]


def _quantized() -> list[tuple[Any, ...]]:
    """Rows as in `_HIGH_PRECISION` for each granularity of the scalings."""
    names = collections.defaultdict(list)
    for name, fields in FIELDS_OF_SCALING.items():
        values = {field: value for field, (value, _) in fields.items()}
        recipe = dataclasses.replace(Recipe.te(), scaling=name, **values)
        names[scaling.of_recipe(recipe).granularity].append(name)
    return [
        (operands, ", ".join(scalings), FIRST_WITH_FP8, _EXACT, "auto", granularity)
        for granularity, scalings in names.items()
        for operands in _OPERANDS.get(granularity, (f"FP8, a scale per {granularity}",))
    ]


def _device(name: str, platform: str, capability: tuple[int, int] | None, number: int) -> dict[str, Any]:
    kind = {"name": name, "platform": platform, "capability": capability, "number": number}
    return {**kind, "gemms": gemms_of(platform, capability)}


def _devices_here() -> tuple[list[dict[str, Any]], list[str], str]:
    """This machine's devices, their troubles, and the version of the first device's client."""
    try:
        local = jax.local_devices()
    except RuntimeError as error:  # e.g. JAX_PLATFORMS names a missing device
        return [], [f"JAX has no device: {error}", *_hidden_gpu()], ""
    kinds = collections.Counter((each.device_kind, each.platform, capability_of(each)) for each in local)
    devices = [_device(*kind, number) for kind, number in kinds.items()]
    only_cpus = all(device["platform"] == "cpu" for device in devices)
    client = " ".join(str(getattr(local[0].client, "platform_version", "")).split())
    return devices, _hidden_gpu() if only_cpus else [], client if client != local[0].platform else ""


def _hidden_gpu() -> list[str]:
    """The reason why JAX does not see an NVIDIA GPU that the system has; empty without such a GPU."""
    if not sees_nvidia():
        return []
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if wanted and not {"cuda", "gpu"} & set(wanted.split(",")):
        reason = f"JAX_PLATFORMS={wanted} keeps JAX from it: unset that"
    elif any(version(name) for name in ("jax-cuda13-plugin", "jax-cuda12-plugin")):
        reason = (
            "JAX's CUDA plugin is installed and does not start: it needs NVIDIA's libraries, "
            f"{CUDA_EXTRA}, and a driver of their age (JAX_PLATFORMS=cuda shows the error)"
        )
    else:
        reason = CUDA_EXTRA
    return [f"this system has an NVIDIA GPU, but JAX has only CPUs: {reason}"]


def sees_nvidia() -> bool:
    """Whether the system has an NVIDIA GPU, also one that JAX does not see."""
    return pathlib.Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def has_idle_plugin() -> bool:
    """Whether JAX's CUDA plugin is here, with no GPU to use it: it would complain, and can crash."""
    plugins = ("jax-cuda13-plugin", "jax-cuda12-plugin")
    return any(map(version, plugins)) and not sees_nvidia() and not version("libtpu")


def _packages(has_gpu: bool) -> list[dict[str, Any]]:
    without = CUDA_EXTRA if sees_nvidia() else f"no NVIDIA GPU here; where there is one, {CUDA_EXTRA}"
    problems = {"training on an NVIDIA GPU": None if has_gpu else without, TARGETS: targets.why_not()}
    for extra, (names, purpose) in EXTRAS.items():
        missing = [name for name in names if not version(name)]
        problems[purpose] = f"without {', '.join(missing)}: {install(extra)}" if missing else None
    return [
        {"purpose": purpose, "is_there": problem is None, "state": problem or "installed"}
        for purpose, problem in problems.items()
    ]


def cuda_versions() -> dict[str, str]:
    """The versions of NVIDIA's libraries that JAX's plugin finds, or "not found"."""
    plugin, versions = _plugin(), {}
    for name, library in _LIBRARIES.items():
        try:
            number = int(getattr(plugin, f"{library}_get_version")())
        except Exception:  # the plugin raises anything where a library is missing or of another version
            versions[name] = "not found"
            continue
        parts = (number // 10000, number // 100 % 100, number % 100)  # 91200 is 9.12.0
        if name.startswith("CUDA"):
            parts = (number // 1000, number // 10 % 100)  # 13020 is 13.2
        versions[name] = ".".join(map(str, parts))
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


def text(machine: dict[str, Any]) -> str:
    """The machine as tables."""
    parts: list[str] = []
    for device in machine["devices"]:
        has = f", compute capability {_dotted(device['capability'])}" if device["capability"] else ""
        parts.append(f"{device['number']} x {device['name']} ({device['platform']}{has})")
        parts.append(align(row.values() for row in device["gemms"]))
    parts.append(", ".join(f"{name} {version}" for name, version in machine["versions"].items()))
    runs = [
        (each["name"], each["gemms"], each["reason"] or "can run", "auto" if each["is_auto"] else "")
        for each in machine["backends"]
    ]
    states = [(package["purpose"], package["state"]) for package in machine["packages"]]
    for title, rows in (("backend of GEMMs", runs), ("what for, and what to install", states)):
        parts.append("\n  ".join([title, *align(rows).splitlines()]))
    return "\n\n".join([*parts, *(f"TROUBLE: {trouble}" for trouble in machine["troubles"])])
