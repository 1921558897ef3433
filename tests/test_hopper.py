"""The GEMM kernel of blocks for Hopper."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax import backends, formats
from fp8jax.backends import Device, hopper, pallas, reference
from fp8jax.inspect import program, targets
from fp8jax.inspect.program.compiled import kernels_of
from fp8jax.inspect.program.hlo import parse
from fp8jax.quantization import BlockMethod, ScaledArray, quantize_blocks

BATCHED = (((2,), (2,)), ((0,), (0,)))
MOSAIC, TRITON = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"
needs_compiler = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))


def quantized(seed, shape, rows, format=formats.E4M3):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    row, column = np.mgrid[: shape[1], : shape[2]]
    x *= 2.0 ** (row // 32 % 5 + column // 128)  # blocks have different scales
    return jax.jit(quantize_blocks, static_argnums=1)(jnp.asarray(x), BlockMethod(format, (rows, 128)))


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="JAX 0.10 has no interpreter for it")
@pytest.mark.parametrize(
    "batch, m, n, k, rows, format, dtype",
    [
        (1, 130, 128, 700, 128, formats.E4M3, jnp.float32),  # two waves, and more steps than stages
        (2, 256, 130, 200, 1, formats.E5M2, jnp.bfloat16),
        (2, 300, 200, 128, 128, formats.E5M2, jnp.float32),  # one wave, three tiles for each of two cores
        (1, 100, 100, 300, 1, formats.E4M3, jnp.float16),
    ],
)
def test_kernel_is_the_reference(batch, m, n, k, rows, format, dtype, monkeypatch):
    """The kernel, interpreted, of shapes that are multiples of its tiles and of others."""
    a, b = quantized(0, (batch, m, k), 1, format), quantized(1, (batch, n, k), rows)
    monkeypatch.setattr(hopper, "INTERPRET", plgpu.InterpretGPUParams())
    monkeypatch.setattr(hopper, "CORES", 2)
    monkeypatch.setattr(pallas, "_is_hopper", lambda: True)
    ours = pallas.gemm(a, b, dtype)
    expected = reference.dot(a, b, BATCHED, out_dtype=jnp.float32, precise=True)
    # In each dtype half a unit in the last place, and float32's errors of sums.
    bound = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}[dtype]
    assert ours.dtype == dtype and ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=bound, atol=1e-6 * abs(expected).max())


# Programs of GPUs that are not here ###############################################################


def operands(batch=1, m=256, n=512, k=384, rows=128, sharding=None):
    """Shapes of two operands."""

    def operand(size, scales, sharding):
        data = jax.ShapeDtypeStruct((batch, size, k), formats.E4M3.dtype, sharding=sharding)
        return ScaledArray(data, jax.ShapeDtypeStruct((batch, scales, k // 128), jnp.float32))

    return operand(m, m, sharding), operand(n, n // rows, None)


def compiled(target, *args, tiling=None, **options):
    gemm = functools.partial(pallas.gemm, out_dtype=jnp.bfloat16, tiling=tiling)
    return targets.compile_for(gemm, *args, target=target, **options)


@needs_compiler
@pytest.mark.parametrize(
    "target, call", [("h100", MOSAIC), ("h200", MOSAIC), ("b200", TRITON), ("l40s", TRITON)]
)
def test_kernel_of_a_target(target, call):
    text = compiled(target, *operands()).as_text()
    assert [name in text for name in (MOSAIC, TRITON)] == [call == MOSAIC, call == TRITON]


@needs_compiler
def test_a_tiling_is_of_the_kernel_in_triton():
    """Benchmarks compare both kernels on Hopper."""
    text = compiled("h100", *operands(), tiling=pallas.TILING).as_text()
    assert TRITON in text and MOSAIC not in text


@needs_compiler
def test_triton_where_jax_lacks_mosaic_gpu(monkeypatch):
    monkeypatch.delattr(backends, "hopper")
    monkeypatch.setitem(sys.modules, "fp8jax.backends.hopper", None)
    text = compiled("h100", *operands()).as_text()
    assert TRITON in text and MOSAIC not in text


@needs_compiler
@pytest.mark.parametrize("batch, m, rows", [(1, 256, 128), (3, 256, 1), (2, 384, 128)])
def test_call_is_read(batch, m, rows):
    """Kind, name, FLOPs and bytes of a call, in which the matrices of a batch are below each other."""
    n, k = 512, 384
    text = compiled("h100", *operands(batch, m, n, k, rows))
    kernels = kernels_of(parse(text.as_text()))
    [kernel] = [kernel for kernel in kernels if kernel.gemm]
    assert kernel.gemm.kind == "pallas" and kernel.gemm.is_fp8 and "block_gemm" in kernel.gemm.name
    assert kernel.gemm.flops == 2 * batch * m * n * k
    scales = 4 * batch * (m + n // rows) * k // 128
    assert kernel.moved == batch * (m * k + n * k + 2 * m * n) + scales


@needs_compiler
def test_kernel_is_split_over_devices():
    mesh = targets.mesh("h100", 4)
    args = operands(m=1024, sharding=NamedSharding(mesh, P(None, "devices")))
    read = program.read(compiled("h100", *args, devices=4))
    assert [gemm.out_shape for gemm in read.gemms] == [(256, 512)]


@needs_compiler
@pytest.mark.parametrize("rows", [1, 128])
def test_kernel_fits_into_registers(rows, tmp_path, monkeypatch):
    """FP8 instructions and copies by TMA. JAX 0.10 spills two registers; a second accumulator has 64."""
    for name, value in {"TO": str(tmp_path), "PTXAS": "1"}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", value)
    compiled("h100", *operands(1, 4096, 4096, 4096, rows))
    [code], [said] = ([path.read_text() for path in tmp_path.glob(f"*.{end}")] for end in ("ptx", "ptxas"))
    # Two waves of 128 of k by instructions of 32.
    assert code.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 2 * 4
    assert re.search(r"setmaxnreg.inc.sync.aligned.u32\s+240", code) and "cp.async.bulk.tensor" in code
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= 2 * 4


# The GPU ##########################################################################################


@pytest.mark.parametrize(
    "name, is_hopper",
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H20", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA B200", False),
        ("NVIDIA L40S", False),
        ("cpu", False),
    ],
)
def test_gpu_of_a_mesh(name, is_hopper):
    """The GPU is the one of the mesh that a program is traced for."""
    mesh = jax.sharding.AbstractMesh((1,), ("devices",))
    device = jax.sharding.AbstractDevice(name, None, "gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        assert pallas._is_hopper() == is_hopper


@pytest.mark.parametrize("capability, is_hopper", [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_gpu_that_is_here(capability, is_hopper, monkeypatch):
    monkeypatch.setattr(Device, "here", lambda: Device("a GPU", "gpu", capability))
    assert pallas._is_hopper() == is_hopper


def test_another_default_device_before(monkeypatch):
    """A Hopper GPU gets its own kernel, after a trace of the same shapes for another default device."""

    def here():
        return Device("a GPU", "gpu", (8, 9) if jax.config.jax_default_device else (9, 0))

    def kernel():
        dot = functools.partial(backends.BACKENDS["pallas"].dot, dimension_numbers=BATCHED)
        text = str(jax.make_jaxpr(lambda a, b: dot(a, b, out_dtype=jnp.bfloat16, precise=False))(*operands()))
        return [name for name in ("wgmma", "fp8_tile_dot") if name in text]

    monkeypatch.setattr(Device, "here", here)
    with jax.default_device(jax.devices()[0]):
        assert kernel() == ["fp8_tile_dot"]
    assert kernel() == ["wgmma"]
