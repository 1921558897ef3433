"""The reader of compiled programs, on real programs and on planted text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fp8jax import backends
from fp8jax.inspect import program, targets

needs_plugin = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))

M, K, N = 256, 512, 128


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def scaled_dot(lhs, rhs, lhs_scale, rhs_scale, lhs_dtype, precision):
    """The pattern that XLA makes one FP8 GEMM of, its casts pinned by barriers."""
    lhs = lax.optimization_barrier(lhs.astype(lhs_dtype)).astype(jnp.bfloat16) * lhs_scale
    rhs = lax.optimization_barrier(rhs.astype(jnp.float8_e4m3fn)).astype(jnp.bfloat16) * rhs_scale
    return lax.dot(lhs, rhs, precision=precision)


@needs_plugin
@pytest.mark.parametrize(
    "dtype, printed, precision, fast",
    [
        (jnp.float8_e4m3fn, "f8e4m3fn", lax.Precision.DEFAULT, True),
        (jnp.float8_e5m2, "f8e5m2", lax.Precision.HIGHEST, False),
    ],
)
def test_fp8_gemm_is_read(dtype, printed, precision, fast):
    def fn(lhs, rhs, scale):
        return scaled_dot(lhs, rhs, scale, scale, dtype, precision)

    read = program.read(targets.compile_for(fn, bf16(M, K), bf16(K, N), bf16()))
    [gemm] = read.gemms
    assert gemm[:7] == ("cublaslt_f8", printed, "f8e4m3fn", "bf16", (M, N), fast, 1)
    assert "dot_general" in gemm.name
    assert read.count("cublaslt_f8") == read.count() == 1
    # Two casts, one of them with the transpose that cuBLASLt wants, the GEMM, and its scales in float32.
    assert 3 <= read.kernels <= 5
    assert read.arguments == 2 * (M * K + K * N + 1)
    assert read.outputs == 2 * M * N


@needs_plugin
def test_bf16_and_float32_gemms_are_not_fp8():
    def fn(lhs, rhs):
        wide = lax.dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        return lhs @ rhs, wide

    read = program.read(targets.compile_for(fn, bf16(M, K), bf16(K, N)))
    assert sorted((gemm.kind, gemm.lhs, gemm.out, gemm.fast) for gemm in read.gemms) == [
        ("cublaslt", "bf16", "bf16", True),
        ("cublaslt", "f32", "f32", False),
    ]
    assert read.count("cublaslt_f8") == 0
    assert str(read).startswith("2 cublaslt GEMMs")


@needs_plugin
def test_gemms_in_a_loop_are_counted_once_with_their_runs():
    def fn(x, kernels):
        return lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]

    looped = program.read(targets.compile_for(fn, bf16(M, K), bf16(6, K, K)))
    [gemm] = looped.gemms
    assert gemm.runs == 6
    # The body's kernels count once: more layers, no more kernels.
    longer = program.read(targets.compile_for(fn, bf16(M, K), bf16(12, K, K)))
    assert looped.kernels == longer.kernels > 1


@needs_plugin
def test_donated_arguments_are_read():
    def fn(x, y):
        return x + y

    read = program.read(targets.compile_for(fn, bf16(M, N), bf16(M, N), donate_argnums=0))
    assert read.donated == read.outputs == 2 * M * N
    assert read.total == read.arguments + read.temporaries == 2 * 2 * M * N


def test_a_program_of_this_machine_is_read():
    compiled = jax.jit(lambda x, y: x @ y).lower(jnp.ones((M, K)), jnp.ones((K, N))).compile()
    [gemm] = program.read(compiled).gemms
    assert (gemm.lhs, gemm.rhs, gemm.out, gemm.out_shape) == ("f32", "f32", "f32", (M, N))


class Planted:
    """A compiled program with this text."""

    def __init__(self, text):
        self.as_text = lambda: text

    def memory_analysis(self):
        return jax.jit(jnp.sin).lower(1.0).compile().memory_analysis()


@pytest.mark.parametrize(
    "collective, numbers",
    [
        (lambda x: lax.psum(x, "devices"), 2 * 3 / 4 * 1024),
        (lambda x: lax.all_gather(x, "devices"), 3 * 1024),
        (lambda x: lax.psum_scatter(x, "devices", tiled=True), 3 / 4 * 1024),
        (lambda x: lax.all_to_all(x, "devices", 0, 0, tiled=True), 3 / 4 * 1024),
        (lambda x: lax.ppermute(x, "devices", [(i, (i + 1) % 4) for i in range(4)]), 1024),
        (lambda x: x, 0),
    ],
)
def test_bytes_sent_around_a_ring(collective, numbers):
    """By hand, of 1024 numbers on each of 4 devices; in a loop as often as that runs."""
    mesh, parts = targets.mesh(devices=4), jax.P("devices")
    x = jax.ShapeDtypeStruct((4 * 1024,), jnp.float32, sharding=jax.NamedSharding(mesh, parts))

    def repeated(x):
        return lax.scan(lambda _, i: (None, collective(x * i)), None, jnp.arange(5.0))[1]

    for function, runs, spec in ((collective, 1, parts), (repeated, 5, jax.P(None, "devices"))):
        run = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=spec, check_vma=False)
        read = program.read(jax.jit(run).lower(x).compile())
        assert read.sent(4) == 4 * numbers * runs and read.sent(4) == sum(c.sent(4) for c in read.collectives)


TEXT = """HloModule planted

%fused (param: bf16[8,16], param.1: bf16[16,4]) -> f32[8,4] {
  %param = bf16[8,16]{1,0} parameter(0)
  %param.1 = bf16[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%param, %param.1), operand_precision={high,high}, metadata={op_name="a"}
}

%branch (param.2: f32[8,4]) -> f32[8,4] {
  %param.2 = f32[8,4]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,4]{1,0} copy(%param.2)
}

ENTRY %main (x: bf16[8,16], /*index=1*/y: bf16[16,4]) -> (f32[8,4], f32[8,4]) {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = bf16[16,4]{1,0} parameter(1)
  %pred = s32[] constant(0)
  %triton = f32[8,4]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused, backend_config={"kind":"__triton_gemm"}
  %lib = (f32[8,4]{1,0}, s8[64]{0:S(5)}) custom-call(%x, %y), custom_call_target="__cublas$gemm"
  %view = f32[8,4]{1,0} get-tuple-element(%lib), index=0
  %other = f32[8,4]{1,0} custom-call(%view), custom_call_target="something_else"
  %cond = f32[8,4]{1,0} conditional(%pred, %view, %view), branch_computations={%branch, %branch}
  %start = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-reduce-start(%view), to_apply=%branch
  %done = f32[8,4]{1,0} all-reduce-done(%start)
  ROOT %out = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%triton, %done)
}
"""


def test_planted_text_is_read():
    read = program.read(Planted(TEXT))
    assert [(gemm.kind, gemm.lhs, gemm.out, gemm.fast, gemm.name) for gemm in read.gemms] == [
        ("triton", "bf16", "f32", False, "a"),
        ("cublas", "bf16", "f32", True, ""),
    ]
    # triton, lib, other, a copy in each of two branches, all-reduce-start
    assert read.kernels == 6


def test_calls_of_a_backend_from_outside(monkeypatch):
    """An entry in `BACKENDS` is enough for its custom call to be read as a GEMM."""
    xla = backends.BACKENDS["xla"]
    monkeypatch.setitem(backends.BACKENDS, "mine", xla._replace(calls=(backends.Call("my_gemm", "mine"),)))
    read = program.read(Planted(TEXT.replace("__cublas$gemm", "my_gemm")))
    assert [gemm.kind for gemm in read.gemms] == ["triton", "mine"]


def test_operands_of_a_backend_from_outside(monkeypatch):
    """Where rhs is, and whether other kernels have the target, is said by the backend's `Call`."""
    text = """
ENTRY main (a: f8e4m3fn[64,128], s: f32[64], b: f8e5m2[32,128], c: f32[8]) -> bf16[64,32] {
  %a = f8e4m3fn[64,128]{1,0} parameter(0)
  %s = f32[64]{0} parameter(1)
  %b = f8e5m2[32,128]{1,0} parameter(2)
  %c = f32[8]{0} parameter(3)
  %other = f32[8]{0} custom-call(%c, %c, %c), custom_call_target="my_gemm"
  ROOT %g = bf16[64,32]{1,0} custom-call(%a, %s, %b), custom_call_target="my_gemm"
}
"""
    call = backends.Call("my_gemm", "mine", rhs=2, is_kernel=True, share="fp4")
    monkeypatch.setitem(backends.BACKENDS, "mine", backends.BACKENDS["xla"]._replace(calls=(call,)))
    [gemm] = program.read(Planted(text)).gemms
    assert gemm[:4] == ("mine", "f8e4m3fn", "f8e5m2", "bf16")
    assert (gemm.share, gemm.flops) == ("fp4", 2 * 64 * 32 * 128)


def test_a_program_with_a_primitive_that_the_gpu_lacks(monkeypatch):
    """Of a backend from outside; another backend with the primitive does not hide the reason."""

    def fn(x, y):
        return jax.lax.dot(x, y, preferred_element_type=jnp.float32)

    fp8, h200 = jnp.ones((32, 32), jnp.float8_e4m3fn), backends.Device("H200", "gpu", (9, 0))
    jaxpr = jax.make_jaxpr(jax.jit(fn))
    xla = backends.BACKENDS["xla"]
    lacks = xla._replace(primitive="dot_general", supports=lambda device, is_batched: f"not on {device.name}")
    monkeypatch.setitem(backends.BACKENDS, "lacks", lacks)
    monkeypatch.setitem(backends.BACKENDS, "has", xla._replace(primitive="dot_general"))
    assert targets.missing_gemms(jaxpr(fp8, fp8), h200) == "not on H200"
    assert targets.missing_gemms(jaxpr(jnp.ones((32, 32)), jnp.ones((32, 32))), h200) is None
    monkeypatch.delitem(backends.BACKENDS, "lacks")
    assert targets.missing_gemms(jaxpr(fp8, fp8), h200) is None


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        program.read(Planted("HloModule nothing\n"))


def test_flops_of_a_batch_of_gemms():
    def fn(lhs, rhs):
        return jnp.einsum("bmk,bkn->bmn", lhs, rhs), lhs[0] @ rhs[0]

    lowered = jax.jit(fn).lower(bf16(5, M, K), bf16(5, K, N))
    assert sorted(gemm.flops for gemm in program.read_lowered(lowered)) == [2 * M * K * N, 10 * M * K * N]
