"""XLA's compiler for NVIDIA GPUs, in a folder that JAX does not search.

    compiler.install()                                   # or: fp8jax install-compiler
    compiler.devices("h200", description, number=8)      # devices to compile for, and not to run on

The compiler is the library of the wheel jax-cuda13-pjrt; names of JAX's own kernels are in jax-cuda13-plugin.
Installed beside jax, the wheels are a plugin of every JAX program of the environment: JAX looks for a GPU and
for NVIDIA's libraries when a program starts. Where they are missing, it prints a traceback, and it can crash.
`install` puts the wheels into a folder of their own, and only `devices` loads them.

XLA's compiler calls NVIDIA's assembler, and reads its library of functions such as tanh. Both are in a CUDA
toolkit. Where there is none, `install` adds the wheels nvidia-cuda-nvcc and nvidia-nvvm to the folder, where
XLA looks for them.
"""

import functools
import importlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from jax._src import custom_partitioning
from jax.experimental import topologies

# `jax.experimental.topologies` takes only platforms of plugins, which JAX starts, too.
from jaxlib import xla_client

from fp8jax.extras import version

_PLUGIN, _PJRT = "jax-cuda13-plugin", "jax-cuda13-pjrt"  # wheels that a machine with GPUs has beside jax
_LIBRARY = pathlib.Path("jax_plugins", "xla_cuda13", "xla_cuda_plugin.so")
_EXTENSION = pathlib.Path("jax_cuda13_plugin", "__init__.py")
_RUNTIME = pathlib.Path("jax_cuda13_plugin", "libmosaic_gpu_runtime.so")
# Wheels with the assembler and the library of functions, and the library's place in a CUDA toolkit.
_TOOLS = ("nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14")
_FUNCTIONS = pathlib.Path("nvvm", "libdevice", "libdevice.10.bc")
_TOOLKIT = pathlib.Path("nvidia", "cu13")  # of those wheels
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")  # of a machine
# Modules of jaxlib that register kernels of the extension when imported, e.g. those of `jnp.linalg.qr`.
_KERNELS = ("gpu_linalg", "gpu_prng", "gpu_rnn", "gpu_solver", "gpu_sparse", "gpu_triton")


def folder() -> pathlib.Path:
    """Where `install` puts the compiler of this environment's jaxlib."""
    return pathlib.Path(sys.prefix, "share", "fp8jax", f"{_PJRT}-{version('jaxlib')}")


def why_not() -> str | None:
    """None if programs can be compiled for GPUs that are not here, else the reason and what to do."""
    here, plugin = version("jaxlib"), version(_PLUGIN)
    if plugin == here or (folder() / _LIBRARY).exists():
        if has_toolkit():
            return None
        remedy = "pip install nvidia-cuda-nvcc nvidia-nvvm" if plugin == here else "fp8jax install-compiler"
        return (
            "compiling for a GPU that is not here needs NVIDIA's assembler, and there is no CUDA toolkit: "
            f"{remedy} (on Linux)."
        )
    if plugin is None:
        return (
            "compiling for a GPU that is not here needs XLA's compiler: fp8jax install-compiler (on Linux)."
        )
    return (
        f"{_PLUGIN} {plugin} does not match jaxlib {here}, and they must be of one version: "
        f"pip install {_PLUGIN}=={here}, or fp8jax install-compiler."
    )


def has_toolkit() -> bool:
    """Whether there is a CUDA toolkit where XLA looks for one."""
    beside = sys.path if version(_PLUGIN) == version("jaxlib") else [folder(), *sys.path]
    wheels = [pathlib.Path(place, _TOOLKIT) for place in beside]
    places = [*wheels, *map(pathlib.Path, (*_TOOLKITS, os.environ.get("CUDA_ROOT", "")))]
    return any((place / _FUNCTIONS).exists() for place in places)


def install() -> pathlib.Path:
    """Downloads the compiler of this environment's jaxlib by pip, and the toolkit, unless they are there.

    Returns:
        Its folder.

    Raises:
        RuntimeError: pip failed; the message has its reason, and a command to try.
    """
    to = folder()
    if not (to / _LIBRARY).exists():
        _install([f"{wheel}=={version('jaxlib')}" for wheel in (_PLUGIN, _PJRT)], to, _LIBRARY.parts[0])
        for old in set(to.parent.glob(f"{_PJRT}-*")) - {to}:
            shutil.rmtree(old, ignore_errors=True)
    if not has_toolkit() and version(_PLUGIN) != version("jaxlib"):  # beside JAX XLA looks elsewhere
        _install(_TOOLS, to, _TOOLKIT.parts[0])
    return to


def _install(wheels: Sequence[str], to: pathlib.Path, needed: str) -> None:
    """Installs wheels into the folder `to`, which then has the folder `needed`."""
    options = ["install", "--no-deps", "--only-binary", ":all:", "--target"]
    to.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, also if pip is stopped, and with another `install` beside this one.
    with tempfile.TemporaryDirectory(dir=to.parent) as partial:
        found = pathlib.Path(partial, "wheels")
        run = [sys.executable, "-m", "pip", *options, str(found), *wheels]
        done = subprocess.run(run, capture_output=True, text=True)
        if done.returncode or not (found / needed).exists():
            said = done.stderr.strip() or "it said nothing"
            errors = [line for line in said.splitlines() if line.startswith("ERROR")]
            raise RuntimeError(
                f"pip could not install {' '.join(wheels)}, which exist for Linux only: "
                f"{errors[-1] if errors else said}. "
                f"With another pip: pip {' '.join(options)} {to} {' '.join(wheels)}"
            )
        if not to.exists():
            found.rename(to)
        elif not (to / needed).exists():
            (found / needed).rename(to / needed)


def devices(name: str, description: str, number: int) -> Sequence[Any]:
    """Devices of one host, to compile for.

    Args:
        name: what errors call them.
        description: one device, as the text of XLA's GpuTargetConfigProto.
        number: how many.

    Raises:
        RuntimeError: the compiler is missing; see `why_not`.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    described = {"target_config": description, "topology": f"1x{number}x1"}
    if version(_PLUGIN) == version("jaxlib"):
        return topologies.get_topology_desc(name, "cuda", **described).devices
    topology = xla_client.make_c_api_device_topology(_load(folder()), name, **described)
    return topology._make_compile_only_devices()  # as `topologies` does


@functools.cache
def _load(folder: pathlib.Path) -> Any:
    """The compiler's interface, which knows JAX's kernels and its rules of partitioning.

    JAX's plugin does the same, and registers a platform, too, which JAX would start with its own.
    """
    api = xla_client.load_pjrt_plugin_dynamically("cuda_compiler", str(folder / _LIBRARY))
    extension = _import_extension(folder / _EXTENSION)
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(folder / _RUNTIME)  # of kernels of Pallas's Mosaic GPU
    register = functools.partial(xla_client.register_custom_call_target, platform="CUDA")
    xla_client.register_custom_type_handler("CUDA", functools.partial(extension.register_custom_type, api))
    xla_client.register_custom_call_handler(
        "CUDA", functools.partial(extension.register_custom_call_target, api)
    )
    for name, value in extension.ffi_types().items():
        xla_client.register_custom_type(name, value, platform="CUDA")
    for name, value in extension.ffi_handlers().items():
        register(name, value, api_version=1)
    for module in _KERNELS:  # JAX imported them without the extension
        module = importlib.reload(importlib.import_module(f"jaxlib.{module}"))
        for name, value, number in getattr(module, "registrations", dict)().get("CUDA", ()):
            register(name, value, api_version=number)
        for name in getattr(module, "batch_partitionable_targets", list)():
            xla_client.register_custom_call_as_batch_partitionable(name, api)
    # JAX has no public way to have it done for a library that is no platform.
    xla_client.register_custom_call_partitioner(
        name=custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME,
        prop_user_sharding=custom_partitioning._custom_partitioning_propagate_user_sharding,
        partition=custom_partitioning._custom_partitioning_partition,
        infer_sharding_from_operands=custom_partitioning._custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
        c_api=api,
    )
    return api


def _import_extension(init: pathlib.Path) -> Any:
    """The plugin's extension, imported as `jax_cuda13_plugin` from outside of `sys.path`."""
    name, places = init.parent.name, [str(init.parent)]
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=places)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{name}.cuda_plugin_extension")
