"""GPUs as values, and programs compiled for a GPU that is not here.

    compiled = targets.compile_for(step, variables, batch, target="h200")
    print(program.read(compiled))       # e.g. 6 cublaslt_f8 GEMMs, 51 kernels, 0.638 GB of temporaries

XLA compiles ahead of time for a described GPU. The result is the optimized program that the GPU would run:
its FP8 library calls, fusions, collectives and memory. XLA cannot autotune without the GPU: GEMMs go to
cuBLASLt and not to Triton, as on a GPU that is here (`fp8jax.backends.xla`). Compiling needs XLA's compiler
for GPUs (`fp8jax install-compiler`), and neither a GPU nor its driver.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fp8jax.backends import BACKENDS, Device
from fp8jax.inspect import compiler
from fp8jax.inspect.compiler import why_not as why_not
from fp8jax.inspect.program.lowered import equations


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as the compiler sees it."""

    name: str  # as users write it: "h200"
    device: str  # as its driver names it: "NVIDIA H200"
    capability: tuple[int, int]  # compute capability, (major, minor). FP8 GEMMs need (8, 9)
    cores: int  # streaming multiprocessors
    memory: int  # bytes
    bandwidth: int  # of the memory, bytes per second
    l2: int  # bytes of the level-2 cache
    clock_ghz: float  # highest clock of the multiprocessors
    shared_memory: int = 228 * 1024  # bytes per multiprocessor; a block can have 1 KiB less
    threads: int = 2048  # resident threads per multiprocessor
    flops: float = 0.0  # highest FLOP/s of dense bf16 GEMMs; 0 if not known, and then there is no estimate
    link: float = 0.0  # bytes per second that it sends to the other GPUs of a host

    @property
    def as_device(self) -> Device:
        """The GPU as backends see it."""
        return Device(self.device, "gpu", self.capability)


# As drivers report them; capability, cores and L2 are those of XLA's target_config/specs, too. FLOP/s and
# links are those of NVIDIA's data sheets: dense, half of the sheets' figures with sparsity; and one way.
_GPUS = (
    Target(
        "h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 84_929_347_584, 3_352_320_000_000, 52_428_800, 1.98,
        flops=989.4e12, link=450e9,
    ),
    Target(
        "h200", "NVIDIA H200", (9, 0), 132, 150_754_820_096, 4_800_000_000_000, 52_428_800, 1.98,
        flops=989.4e12, link=450e9,
    ),
    Target(
        "b200", "NVIDIA B200", (10, 0), 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965,
        flops=2250e12, link=900e9,
    ),
    Target(
        "l40s", "NVIDIA L40S", (8, 9), 142, 48_305_799_168, 864_000_000_000, 100_663_296, 2.52, 102_400, 1536,
        flops=362.05e12, link=32e9,
    ),
)  # fmt: skip
TARGETS = {gpu.name: gpu for gpu in _GPUS}

# Autotuning times kernels, and there is no device to time them on; untuned, Triton would take every GEMM.
COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def get(target: str | Target) -> Target:
    """The target with this name; a `Target` is returned unchanged.

    Raises:
        ValueError: no such target; the message lists the legal names.
    """
    if isinstance(target, Target):
        return target
    if target.lower() not in TARGETS:
        raise ValueError(f"`target`: expected one of {', '.join(TARGETS)}, or a `Target`; got {target!r}.")
    return TARGETS[target.lower()]


def mesh(target: str | Target | None = None, devices: int = 1) -> Mesh:
    """A mesh of `devices` devices along an axis "devices".

    Args:
        target: name of a GPU, or a `Target`: GPUs of one host that are not here. None: devices of this
            process.
        devices: how many.

    Returns:
        A mesh for the `NamedSharding`s of the arguments of `compile_for`.

    Raises:
        ValueError: no such target, `devices` is not positive, or this process has fewer devices.
        RuntimeError: the compiler is missing, or its version is not jaxlib's.
    """
    if devices < 1:
        raise ValueError(f"`devices`: expected a positive number; got {devices}.")
    if target is not None:
        return _mesh_of(get(target), devices)
    found = jax.devices()
    if len(found) < devices:
        raise ValueError(
            f"`devices`: expected at most {len(found)}, as this process has; got {devices}. Call "
            f'`jax.config.update("jax_num_cpu_devices", {devices})` before JAX looks for devices, start the '
            f"process with XLA_FLAGS=--xla_force_host_platform_device_count={devices}, or give a target."
        )
    return Mesh(np.array(found[:devices]), ("devices",))


@functools.cache
def _mesh_of(gpu: Target, devices: int) -> Mesh:
    devices_of_host = compiler.devices(gpu.name, _description(gpu), devices)
    return Mesh(np.array(devices_of_host), ("devices",))


def lower_for(
    fn: Callable[..., PyTree],
    *args: PyTree,
    target: str | Target | None = "h200",
    devices: int = 1,
    donate_argnums: int | tuple[int, ...] = (),
) -> jax.stages.Lowered:
    """`jax.jit(fn)` lowered for GPUs that are not here, or for this process's devices.

    Args:
        fn: the function. Its arguments are trees of arrays.
        *args: arrays or `jax.ShapeDtypeStruct`s; only shapes, dtypes and weak types are used. A struct with a
            sharding on `mesh(target, devices)` keeps the sharding; every other argument is replicated.
        target: name of a GPU (one of `TARGETS`), or a `Target`; None for this process's devices.
        devices: GPUs of one host.
        donate_argnums: as in `jax.jit`.

    Returns:
        The lowered program, for `compile` and `program.read_lowered`.

    Raises:
        ValueError: no such target, `devices` is not positive, or the GPU lacks block-scaled GEMMs of the
            program.
        RuntimeError: the compiler is missing, or its version is not jaxlib's.
    """
    jitted = jax.jit(fn, donate_argnums=donate_argnums)
    if target is None:
        return jitted.lower(*args)
    on = mesh(target, devices)
    replicated = NamedSharding(on, PartitionSpec())

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        sharding = leaf.sharding if aval is leaf and leaf.sharding is not None else replicated
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)

    args = jax.tree.map(place, args)
    on = next((leaf.sharding.mesh for leaf in jax.tree.leaves(args)), on)
    gpu = get(target)
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):  # Pallas reads the GPU from it
        traced = jitted.trace(*args)
        if reason := missing_gemms(traced.jaxpr, gpu.as_device):
            raise ValueError(
                f"`target`: the program's block-scaled GEMMs cannot run on {gpu.device}: {reason}."
            )
        return traced.lower()


def missing_gemms(program: Any, device: Device) -> str | None:
    """None, or the reason why a program has block-scaled GEMMs that a GPU does not have.

    XLA would dequantize the operands of cuDNN's and say nothing; JAX does not lower FP8 in Pallas kernels.

    Args:
        program: its closed jaxpr.
        device: the GPU.
    """
    pairs = [(each.primitive, each.supports(device, False)) for each in BACKENDS.values() if each.primitive]
    lacking = [(primitive, reason) for primitive, reason in pairs if reason]
    for equation in equations(program.jaxpr) if lacking else ():
        for primitive, reason in lacking:
            is_named = equation.primitive.name.startswith(primitive)
            if is_named and any(map(_is_fp8, (*equation.invars, *equation.outvars))):
                return reason
    return None


def _is_fp8(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize == 1


def compile(
    lowered: jax.stages.Lowered, target: str | Target | None, **options: bool | str
) -> jax.stages.Compiled:
    """Compiles a program of `lower_for`, with the compiler options that its target needs, and with others."""
    if target is None:
        return lowered.compile(compiler_options=dict(options))
    with jax.sharding.use_abstract_mesh(mesh(target).abstract_mesh), warnings.catch_warnings():
        # JAX's compilation cache writes programs for GPUs that are not here, and cannot read them.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
        return lowered.compile(compiler_options={**COMPILER_OPTIONS, **options})


def compile_for(
    fn: Callable[..., PyTree], *args: PyTree, target: str | Target | None = "h200", **options: Any
) -> jax.stages.Compiled:
    """`jax.jit(fn)` compiled for GPUs that are not here, or for this process's devices.

    Args, Raises: see `lower_for`.

    Returns:
        The compiled program: for `program.read`, `as_text()`, `memory_analysis()`. A program for a target
        cannot be called.
    """
    return compile(lower_for(fn, *args, target=target, **options), target)


def _description(target: Target) -> str:
    """The target as the text of XLA's GpuTargetConfigProto."""
    major, minor = target.capability
    # JAX's Pallas looks the name up. It knows the L40, and not the L40S, which has the same instructions.
    name = target.device.replace("L40S", "L40")
    # Literal numbers are the same on every GPU with FP8 GEMMs.
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {target.shared_memory - 1024}
          shared_memory_per_core: {target.shared_memory}
          threads_per_core_limit: {target.threads}
          core_count: {target.cores}
          fpus_per_core: 128
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {target.bandwidth}
          l2_cache_size: {target.l2}
          clock_rate_ghz: {target.clock_ghz}
          device_memory_size: {target.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          dnn_version: "9.12.0"
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 12 }}
        runtime_version {{ major: 13 minor: 0 patch: 0 }}
        device_description_str: "{name}"
    """
