"""What kernels move, cast and transpose: on real programs and on planted text."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fp8jax.inspect import targets

needs_plugin = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))


@pytest.fixture(scope="module")
def read(load_program):
    """The traffic of a compiled program."""
    return load_program("examples/bench/traffic.py").read


def planted(text):
    """A compiled program with this text."""
    return types.SimpleNamespace(as_text=lambda: text)


# As JAX lowers TransformerEngine's call: each operand is followed by its scale, then come a bias, which is
# not there, and two factors.
TE = """HloModule te

ENTRY %main (a: f8e5m2[64,48], sa: f32[1], b: f8e4m3fn[32,48], sb: f32[1]) -> bf16[64,32] {
  %a = f8e5m2[64,48]{1,0} parameter(0)
  %sa = f32[1]{0} parameter(1)
  %b = f8e4m3fn[32,48]{1,0} parameter(2)
  %sb = f32[1]{0} parameter(3)
  %none = bf16[0]{0} constant({})
  %one = f32[1]{0} constant({1})
  %call = (bf16[64,32]{1,0}, u8[1024]{0}) custom-call(%a, %sa, %b, %sb, %none, /*index=5*/%one, %one), custom_call_target="te_gemm_v2_ffi", api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(f)/dgrad/te_gemm_v2_ffi"}, backend_config={lhs_axis_boundary = 1 : i64, use_split_accumulator = true}
  ROOT %out = bf16[64,32]{1,0} get-tuple-element(%call), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "text, lhs, is_fp8, size",
    [(TE, "f8e5m2", True, 1), (TE.replace("f8e5m2", "bf16").replace("f8e4m3fn", "bf16"), "bf16", False, 2)],
)
def test_te_gemm_formats(read, text, lhs, is_fp8, size):
    traffic = read(planted(text))
    [kernel] = traffic.kernels
    assert (kernel.gemm.kind, kernel.gemm.lhs, kernel.gemm.out_shape) == ("te", lhs, (64, 32))
    assert kernel.gemm.is_fp8 == is_fp8 and not kernel.gemm.fast
    # Its workspace is not counted.
    assert traffic.gemms == size * (64 + 32) * 48 + 4 * 4 + 2 * 64 * 32 and traffic.other == 0


@needs_plugin
def test_bytes_of_gemms_on_an_h200(read):
    """The bytes of the operands, as often as the GEMM runs."""

    def fn(x, kernels, narrow, scale, batch):
        x = lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]
        wide = (lax.optimization_barrier(narrow).astype(jnp.bfloat16) * scale for _ in range(2))
        return x, lax.dot_general(*wide, (((1,), (1,)), ((), ()))), jnp.einsum("bij,bkj->bik", batch, batch)

    shapes = ((128, 256), (3, 256, 256), (512, 64), (), (8, 64, 32))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.bfloat16, jnp.bfloat16)
    traffic = read(targets.compile_for(fn, *(map(jax.ShapeDtypeStruct, shapes, dtypes)), target="h200"))
    found = {(k.gemm.kind, k.gemm.is_fp8, k.runs, k.moved) for k in traffic.kernels if k.gemm}
    in_loop = 2 * (2 * 128 * 256 + 256 * 256)
    scales = 2 * 4
    assert found == {
        ("cublaslt", False, 3, in_loop),
        ("cublaslt_f8", True, 1, 2 * 512 * 64 + 2 * 512 * 512 + scales),
        ("cublaslt", False, 1, 2 * (2 * 8 * 64 * 32 + 8 * 64 * 64)),
    }
    assert traffic.gemms == sum(runs * moved for _, _, runs, moved in found)


NARROW = """HloModule narrow

%cast (p: bf16[64,48]) -> f8e4m3fn[64,48] {
  %p = bf16[64,48]{1,0} parameter(0)
  ROOT %c = f8e4m3fn[64,48]{1,0} convert(%p), metadata={op_name="jit(f)/jvp(M)/up/fp8jax:up/jit(_dot)/cast_lhs/convert"}
}

%recast (p.1: bf16[64,48]) -> (f8e4m3fn[64,48], f8e4m3fn[64,48], f8e5m2[64,48]) {
  %p.1 = bf16[64,48]{1,0} parameter(0)
  %c.1 = f8e4m3fn[64,48]{1,0} convert(%p.1), metadata={op_name="jit(f)/checkpoint/rematted/up/fp8jax:up/jit(_dot)/cast_lhs/convert"}
  %c.2 = f8e4m3fn[64,48]{1,0} convert(%p.1), metadata={op_name="jit(f)/checkpoint/rematted/up/fp8jax:up/jit(_dot)/cast_lhs/again"}
  %g = f8e5m2[64,48]{1,0} convert(%p.1), metadata={op_name="jit(f)/transpose/up/fp8jax:up/jit(_dot)/cast_grad/convert"}
  ROOT %both = (f8e4m3fn[64,48]{1,0}, f8e4m3fn[64,48]{1,0}, f8e5m2[64,48]{1,0}) tuple(%c.1, %c.2, %g)
}

%widen (p.2: f8e4m3fn[64,48]) -> bf16[64,48] {
  %p.2 = f8e4m3fn[64,48]{1,0} parameter(0)
  %few = f8e4m3fn[] convert(%p.2)
  %t.2 = f8e4m3fn[48,64]{1,0} transpose(%p.2), dimensions={1,0}
  ROOT %w = bf16[64,48]{1,0} convert(%t.2)
}

%turn (p.3: u8[64,48]) -> u8[48,64] {
  %p.3 = u8[64,48]{1,0} parameter(0)
  ROOT %t.3 = u8[48,64]{1,0} transpose(%p.3), dimensions={1,0}
}

ENTRY %main (x: bf16[64,48], y: bf16[64,48]) -> u8[48,64] {
  %x = bf16[64,48]{1,0} parameter(0)
  %y = bf16[64,48]{1,0} parameter(1)
  %q = f8e4m3fn[64,48]{1,0} fusion(%x), kind=kLoop, calls=%cast, metadata={op_name="jit(f)/attention/x"}
  %q.1 = (f8e4m3fn[64,48]{1,0}, f8e4m3fn[64,48]{1,0}, f8e5m2[64,48]{1,0}) fusion(%y), kind=kLoop, calls=%recast
  %wide = bf16[64,48]{1,0} fusion(%q), kind=kLoop, calls=%widen
  %wide.t = bf16[48,64]{1,0} transpose(%wide), dimensions={1,0}
  %bytes = u8[64,48]{1,0} bitcast(%q)
  %copy = f8e4m3fn[64,48]{0,1} copy(%q)
  ROOT %turned = u8[48,64]{1,0} fusion(%bytes), kind=kInput, calls=%turn
}
"""  # noqa: E501


def test_casts_and_transposes_are_counted_by_tensor(read):
    traffic = read(planted(NARROW))
    # In two places, the second of which writes it twice at once; a single number is no tensor.
    assert traffic.casts == {"up cast_lhs": 2, "up cast_grad": 1}
    # As bytes too; a transpose of the wide tensor, and one on the way to another format, is none.
    assert traffic.transposes == {"q": 2}
    assert (traffic.most_casts, traffic.most_transposes) == (2, 2)
    size = 64 * 48
    assert traffic.gemms == 0
    # What each reads and writes, in bytes a number: %q, %q.1, %wide, %wide.t, %copy, %turned.
    assert traffic.other == size * ((2 + 1) + (2 + 3) + (1 + 2) + (2 + 2) + (1 + 1) + (1 + 1))
    assert traffic.outside("attention") == traffic.other - 3 * size


def test_a_program_without_products_casts_nothing(read):
    traffic = read(jax.jit(jnp.sin).lower(jnp.ones(8)).compile())
    assert (traffic.most_casts, traffic.most_transposes, traffic.gemms) == (0, 0, 0)
    assert traffic.other == 2 * 4 * 8
