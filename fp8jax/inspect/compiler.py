"""XLA's compiler for NVIDIA GPUs, in a folder that JAX does not search.

    compiler.install()                                   # or: fp8jax install-compiler
    compiler.devices("h200", description, number=8)      # devices to compile for, and not to run on

The compiler is the library of the wheel jax-cuda13-pjrt. Installed beside jax, the wheel is a plugin of every
JAX program of the environment: JAX looks for a GPU and for NVIDIA's libraries when a program starts. Where
they are missing, it prints a traceback, and it can crash. `install` puts the wheel into a folder of its own,
and only `devices` loads the library.
"""

import functools
import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
from jax.experimental import topologies

# `jax.experimental.topologies` takes only platforms of plugins, which JAX starts, too.
from jaxlib import xla_client

_PLUGIN = "jax-cuda13-plugin"  # what a machine with GPUs has beside jax
_WHEEL = "jax-cuda13-pjrt"
_LIBRARY = pathlib.Path("jax_plugins", "xla_cuda13", "xla_cuda_plugin.so")


def folder() -> pathlib.Path:
    """Where `install` puts the compiler of this environment's jaxlib."""
    return pathlib.Path(sys.prefix, "share", "fp8jax", f"{_WHEEL}-{_version('jaxlib')}")


def why_not() -> str | None:
    """None if programs can be compiled for GPUs that are not here, else the reason and what to do."""
    here, plugin = _version("jaxlib"), _version(_PLUGIN)
    if plugin == here or (folder() / _LIBRARY).exists():
        return None
    if plugin is None:
        return (
            "compiling for a GPU that is not here needs XLA's compiler: fp8jax install-compiler (Linux only)."
        )
    return (
        f"{_PLUGIN} {plugin} does not match jaxlib {here}, and they must be of one version: "
        f"pip install {_PLUGIN}=={here}, or fp8jax install-compiler."
    )


def install() -> pathlib.Path:
    """Downloads the compiler of this environment's jaxlib by pip, unless it is there.

    Returns:
        Its folder.

    Raises:
        RuntimeError: pip failed; the message has its reason, and a command to try.
    """
    to = folder()
    if (to / _LIBRARY).exists():
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, also if pip is stopped, and with another `install` beside this one.
    with tempfile.TemporaryDirectory(dir=to.parent) as partial:
        _pip_install(wheel := pathlib.Path(partial, "wheel"), to)
        for old in set(to.parent.glob(f"{_WHEEL}-*")) - {to}:
            shutil.rmtree(old, ignore_errors=True)
        if not to.exists():
            wheel.rename(to)
    return to


def _pip_install(partial: pathlib.Path, to: pathlib.Path) -> None:
    """Installs the wheel into the folder `partial`; an error names the folder `to`."""
    wheel = f"{_WHEEL}=={_version('jaxlib')}"
    options = ["install", "--no-deps", "--only-binary", ":all:", "--target"]
    run = [sys.executable, "-m", "pip", *options, str(partial), wheel]
    done = subprocess.run(run, capture_output=True, text=True)
    if done.returncode or not (partial / _LIBRARY).exists():
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            done.stderr.strip()
        ]
        raise RuntimeError(
            f"pip could not install {wheel}, which exists for Linux only: {said[-1] or 'it said nothing'}. "
            f"With another pip: pip {' '.join(options)} {to} {wheel}"
        )


def devices(name: str, description: str, number: int) -> list[jax.Device]:
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
    if _version(_PLUGIN) == _version("jaxlib"):
        return topologies.get_topology_desc(name, "cuda", **described).devices
    topology = xla_client.make_c_api_device_topology(_load(folder() / _LIBRARY), name, **described)
    return topology._make_compile_only_devices()  # as `topologies` does


@functools.cache
def _load(library: pathlib.Path) -> Any:
    """The compiler's interface. No platform is registered: JAX does not start the library as a backend."""
    return xla_client.load_pjrt_plugin_dynamically("cuda_compiler", str(library))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
