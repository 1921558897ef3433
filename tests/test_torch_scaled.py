"""Casts, scales, scaled tensors on torch: bit for bit those of JAX, and tensors wherever torch wants one."""

import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fp8jax_torch import casts
from fp8jax_torch.scaled import ScaledTensor, quantize, quantize_gradient, value
from fp8jax_torch.views import View
from torch import nn

import fp8jax
from fp8jax import formats, quantization

FORMATS = (formats.E4M3, formats.E5M2, formats.FP16, formats.BF16)
NARROW = (formats.E4M3, formats.E5M2, formats.FP16)
FLT_MAX, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def hostile(format):
    """Every code and every midpoint of two, a float32 step around each, and what no scale helps."""
    size = format.bits
    codes = np.arange(2**size).astype(f"u{size // 8}").view(format.dtype).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    middles = (codes[1:].astype(np.float64) + codes[:-1]) / 2
    some = np.concatenate([codes, middles.astype(np.float32)])
    around = [np.nextafter(some, np.float32(side)) for side in (-np.inf, np.inf)]
    rest = [0.0, -0.0, FLT_MAX, -FLT_MAX, np.inf, -np.inf, np.nan, 1e30]
    x = np.concatenate([some, *around, np.array(rest, np.float32)]).astype(np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)  # XLA takes subnormals for zero


def bits(array):
    array = array.detach() if isinstance(array, torch.Tensor) else np.asarray(array)
    size = array.dtype.itemsize
    if isinstance(array, torch.Tensor):
        return array.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy().view(f"u{size}")
    return array.view(f"u{size}")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_casts_equal_jaxs(format):
    x = hostile(format)
    want = jax.jit(lambda x: quantization.cast(x, format))(x)
    got = casts.cast(torch.from_numpy(x), format)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(bits(got)[~is_nan], bits(want)[~is_nan])
    assert got.float()[torch.from_numpy(is_nan)].isnan().all()


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.__setitem__(1, 1.25),
        lambda w: w.__setitem__(1, torch.tensor(1.25, dtype=torch.bfloat16)),
        lambda w: w.mul_(torch.tensor([1.0, 0.5], dtype=torch.bfloat16)),
        lambda w: w.add_(torch.tensor([0.0, 1.0], dtype=torch.bfloat16), alpha=-0.25),
        lambda w: w.addcdiv_(torch.tensor([0.0, 1.0]), torch.ones(2), value=-0.25),
        lambda w: w.clamp_(-1.25, 1.25),
        lambda w: w.masked_fill_(torch.tensor([False, True]), 1.25),
        lambda w: w.clamp_max_(1.25),
        lambda w: torch._foreach_add_([w], [torch.tensor([0.0, -1.0], dtype=torch.bfloat16)], alpha=0.25),
        lambda w: torch._foreach_sub_([w], [torch.tensor([0.0, 1.0], dtype=torch.bfloat16)], alpha=0.25),
        lambda w: torch._foreach_mul_([w], [torch.tensor([1.0, 0.5], dtype=torch.bfloat16)]),
        lambda w: torch._foreach_div_([w], [torch.tensor([1.0, 2.0], dtype=torch.bfloat16)]),
        lambda w: torch._foreach_addcmul_([w], [torch.tensor([0.0, 1.0])], [torch.ones(2)], value=-0.25),
        lambda w: torch._foreach_addcdiv_([w], [torch.tensor([0.0, 1.0])], [torch.ones(2)], value=-0.25),
        lambda w: torch._foreach_addcdiv_(
            [w], *([torch.tensor([0, 1], dtype=w.dtype)], [w.float()]), [-0.25]
        ),
        lambda w: torch._foreach_clamp_max_([w], 1.25),
        lambda w: torch._foreach_clamp_max_([w], [torch.tensor([2.0, 1.25], dtype=torch.bfloat16)]),
        lambda w: [torch._foreach_clamp_min_([w.mul_(-1)], -1.25), w.mul_(-1)],
    ],
)
def test_writes_leave_the_other_bits(write):
    """FP16 codes of a bfloat16 model have three bits more than bfloat16."""
    codes = torch.tensor([1 + 2**-10, 1.5], dtype=torch.float16)
    weight = ScaledTensor(codes, torch.tensor(1.0), torch.bfloat16)
    write(weight)
    assert weight.dequantize(torch.float32)[0] == 1 + 2**-10
    assert weight.dequantize(torch.float32)[1] < 1.5


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_to_float_is_exact(format):
    codes = np.arange(2**format.bits).astype(f"u{format.bits // 8}").view(format.dtype)
    kept = torch.from_numpy(codes.view(f"i{format.bits // 8}")).view(casts.dtype_of(format))
    want = codes.astype(np.float32)
    np.testing.assert_array_equal(casts.to_float(kept).numpy(), want)
    is_nan = np.isnan(want)
    without = casts.to_float(kept[torch.from_numpy(~is_nan)])
    np.testing.assert_array_equal(bits(without), bits(want[~is_nan]))


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("limit", [448.0, 57344.0, 65504.0])
def test_scales_equal_jaxs(limit, power_of_two, margin):
    amaxes = np.concatenate(
        [
            np.random.default_rng(0).lognormal(0, 20, 4000).astype(np.float32),
            np.exp2(np.arange(-149, 128)).astype(np.float32),
            np.float32([0, np.inf, np.nan, TINY, FLT_MAX, limit, np.nextafter(np.float32(limit), 0)]),
        ]
    )
    amaxes = np.where(np.abs(amaxes) < TINY, 0, amaxes)  # XLA takes subnormals for zero
    options = {"margin": margin, "power_of_two": power_of_two, "otherwise": 7.0}
    want = jax.jit(lambda x: quantization.scale_of(x, limit, **options))(amaxes)
    got = casts.scale_of(torch.from_numpy(amaxes), limit, **options)
    np.testing.assert_array_equal(got.numpy(), np.asarray(want))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", NARROW, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantize_equals_jaxs(format, power_of_two, dtype):
    x = np.random.default_rng(1).standard_normal((37, 53)).astype(np.float32)
    x[0, :4] = [0, 300, 1e-7, -1e-4]
    want = fp8jax.quantize(jnp.asarray(x, dtype), format, power_of_two=power_of_two)
    got = quantize(torch.from_numpy(x).to(getattr(torch, dtype)), format, power_of_two=power_of_two)
    assert got.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(bits(got.codes), bits(want.data))
    assert got.scale.item() == float(want.scale)
    np.testing.assert_array_equal(got.dequantize(torch.float32).numpy(), np.asarray(want.dequantize()))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", [*NARROW, formats.FP16], ids=str)
def test_largest_floats_stay_finite(format, power_of_two):
    x = np.float32([np.finfo(np.float32).max, -1e38])
    want = fp8jax.quantize(x, format, power_of_two=power_of_two)
    got = quantize(torch.from_numpy(x), format.name, power_of_two=power_of_two)
    assert got.scale.item() == float(want.scale) and got.dequantize().isfinite().all()
    np.testing.assert_array_equal(got.dequantize().numpy(), np.asarray(want.dequantize()))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_gradient_quantizes_to_nan(bad):
    x = np.ones((4, 4), np.float32)
    x[1, 2] = bad
    got, want = quantize_gradient(torch.from_numpy(x)), quantization.quantize_gradient(x)
    assert got.scale.item() == float(want.scale) == 1
    np.testing.assert_array_equal(got.dequantize().isnan().numpy(), ~np.isfinite(x))
    np.testing.assert_array_equal(np.isnan(np.asarray(want.dequantize())), ~np.isfinite(x))


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.zeros(3, 3), torch.full((2,), 1e-41)])
def test_zeros_and_empty_tensors(x):
    q = quantize(x, formats.E4M3)
    assert q.scale == 1
    assert q.shape == x.shape
    assert not q.dequantize().any()


def test_illegal_input():
    with pytest.raises(TypeError, match=r"`x`: expected a floating tensor to quantize; got torch.int64"):
        quantize(torch.arange(3), formats.E4M3)
    with pytest.raises(ValueError, match=r"`format`: .*E8M0"):
        quantize(torch.ones(3), formats.E8M0)
    with pytest.raises(ValueError, match=r"`scale`: expected float32 of shape \(\); got float64\[2\]"):
        ScaledTensor(torch.ones(3), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.0, 1e-40, -0.01, np.nan, np.inf, 2.0**127])
def test_illegal_scales(scale):
    for given in (scale, torch.tensor(scale)):
        with pytest.raises(ValueError, match=r"`scale`: expected a finite, positive, normal number.*; got "):
            quantize(torch.ones(3), formats.E4M3, given)
    with pytest.raises(ValueError, match="`scale`"):
        fp8jax.quantize(jnp.ones(3), formats.E4M3, scale)


@pytest.mark.parametrize("format", [formats.E8M0, formats.E4M4, "E2M1"])
def test_formats_without_codes_in_torch(format):
    with pytest.raises(ValueError, match="`format`: expected a format of tensors; got E"):
        quantize(torch.ones(2, 2), format)


@pytest.mark.parametrize("x", [np.ones(3, np.float32), [1.0, 2.0], 1.0])
def test_quantize_takes_tensors_only(x):
    with pytest.raises(
        TypeError, match="`x`: expected a floating tensor to quantize; got (ndarray|list|float)"
    ):
        quantize(x, formats.E4M3)


def weight(format=formats.FP16):
    return quantize(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), format, power_of_two=True)


def test_arithmetic():
    q, x = weight(), torch.randn(7, 5)
    for got, want in (
        (q + 1, q.dequantize() + 1),
        (2 - q, 2 - q.dequantize()),
        (q @ x, q.dequantize() @ x),
        (q.t(), q.dequantize().t()),
        (q[1:3], q.dequantize()[1:3]),
        (torch.zeros_like(q), torch.zeros(5, 7)),
        (q.to(torch.bfloat16), q.dequantize().to(torch.bfloat16)),
        (torch.nn.functional.linear(x.t(), q), x.t() @ q.dequantize().t()),
    ):
        assert type(got) in (torch.Tensor, View)
        torch.testing.assert_close(got + 0, want, rtol=0, atol=0)


def test_in_place_writes_are_quantized():
    q = weight(formats.E4M3)
    want = quantize(q.dequantize() * 3 + 100, formats.E4M3, power_of_two=True)
    kept = q.codes
    q.mul_(3)
    assert q.codes is kept
    q.add_(100)
    assert q.codes is kept
    np.testing.assert_array_equal(bits(q.codes), bits(want.codes))
    assert q.scale == want.scale
    q.zero_()
    assert not q.dequantize().any()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("x", [torch.ones(2, 3).t(), torch.ones(()), torch.ones(2, 3)])
def test_zeroing(x, format):
    q = quantize(x, format)
    codes = q.codes
    assert q.zero_() is q and q.codes is codes and q.shape == x.shape
    assert not q.dequantize().any() and not codes.float().any()


@pytest.mark.parametrize(
    "write",
    [
        lambda q: q.squeeze_(),
        lambda q: q.unsqueeze_(0),
        lambda q: q.t_(),
        lambda q: q.transpose_(0, 1),
        lambda q: q.resize_(2, 2),
        lambda q: torch.add(torch.ones(2, 2), 1, out=q),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_writes_keep_the_shape(write):
    """codes and scale would keep theirs: `squeeze_` did nothing."""
    q = quantize(torch.arange(5.0)[None], formats.E4M3)
    want = q.dequantize()
    with pytest.raises(RuntimeError, match="`ScaledTensor`: expected a write that keeps the shape; got aten"):
        write(q)
    torch.testing.assert_close(q.dequantize(), want, rtol=0, atol=0)


def test_in_place_multiplication_by_a_number():
    q = weight(formats.E4M3)
    codes, scale = q.codes.clone(), q.scale.clone()
    q.mul_(torch.tensor(0.3))
    q.div_(2.0)
    np.testing.assert_array_equal(bits(q.codes), bits(codes))
    torch.testing.assert_close(q.scale, scale * 0.3 / 2, rtol=1e-6, atol=0)


def test_in_place_multiplication_by_a_tensor():
    q = weight()
    want = q.dequantize() * torch.arange(7.0)
    q.mul_(torch.arange(7.0))
    torch.testing.assert_close(q.dequantize(), want, rtol=2**-11, atol=1e-4)


@pytest.mark.parametrize("format", [formats.E4M3, formats.FP16], ids=str)
def test_parameter_round_trip(format):
    layer = nn.Linear(7, 5)
    layer.weight = nn.Parameter(weight(format))
    twin = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = nn.Linear(7, 5)
    other.weight = nn.Parameter(quantize(torch.ones(5, 7), format, power_of_two=True))
    other.load_state_dict(loaded)
    for kept in (twin.weight, loaded["weight"], other.weight):
        assert isinstance(kept, ScaledTensor)
        np.testing.assert_array_equal(bits(kept.codes), bits(layer.weight.codes))
        assert kept.scale == layer.weight.scale
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
    plain = nn.Linear(7, 5)
    plain.load_state_dict(loaded)
    assert type(plain.weight.data) is torch.Tensor
    torch.testing.assert_close(plain.weight.data, layer.weight.detach().dequantize(), rtol=0, atol=0)


def test_gradients_accumulate_and_clip():
    first, second = (quantize_gradient(torch.randn(5, 7)) for _ in range(2))
    total = quantize_gradient(first.dequantize() + second.dequantize())
    parameters = [nn.Parameter(weight()), nn.Parameter(torch.ones(3))]
    parameters[0].grad, parameters[1].grad = first, torch.full((3,), 2.0)
    parameters[0].grad += second
    np.testing.assert_array_equal(bits(parameters[0].grad.codes), bits(total.codes))
    codes = parameters[0].grad.codes.clone()
    plain = [value(p.grad).clone() for p in parameters]
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    want = torch.sqrt(sum((p**2).sum() for p in plain))
    torch.testing.assert_close(norm, want)
    np.testing.assert_array_equal(bits(parameters[0].grad.codes), bits(codes))
    for p, before in zip(parameters, plain, strict=True):
        torch.testing.assert_close(value(p.grad), before * 0.5 / want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count, error", [(4, 0.041), (64, 0.156)])
def test_error_of_a_sum_of_random_gradients(count, error):
    """docs/getting-started/pytorch.md has it: each sum is rounded to E4M3."""
    torch.manual_seed(0)
    grads = [quantize_gradient(torch.randn(256, 256)) for _ in range(count)]
    exact = sum(grad.dequantize() for grad in grads)
    total = grads[0]
    for grad in grads[1:]:
        total += grad  # as autograd does
    assert (value(total) - exact).norm() / exact.norm() == pytest.approx(error, rel=0.05)


def test_torch_optimizers_step():
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        p, plain = nn.Parameter(weight()), nn.Parameter(weight().dequantize())
        for parameter in (p, plain):
            make([parameter], lr=0.1)
            parameter.grad = torch.ones(5, 7)
        for parameter in (p, plain):
            make([parameter], lr=0.1).step()
        assert isinstance(p, ScaledTensor)
        torch.testing.assert_close(p.detach().dequantize(), plain.detach(), rtol=2**-11, atol=1e-6)


def test_values_leave_torch():
    """`float` and `cpu` change nothing, so the tensor is still quantized."""
    plain = torch.tensor([[0.5, -2.0], [1.5, 300.0]])
    weight = nn.Parameter(quantize(plain, formats.E4M3, power_of_two=True))
    want = value(weight.detach()).tolist()
    arrays = weight.detach().cpu().numpy(), weight.detach().float().numpy(), np.asarray(weight.detach())
    assert all(array.tolist() == want for array in arrays)
    assert weight.tolist() == want
    assert np.asarray(weight.detach(), dtype=np.float16).dtype == np.float16


@pytest.mark.parametrize("take", [np.from_dlpack, jnp.from_dlpack, torch.from_dlpack])
def test_values_leave_by_dlpack(take):
    """Of a weight, a gradient and a view: new memory with the values."""
    weight = nn.Parameter(quantize(torch.randn(4, 3), formats.E4M3))
    weight.grad = quantize_gradient(torch.randn(4, 3))
    for x in (weight.detach(), weight.grad, weight.t().detach()):
        got = take(x)
        assert np.asarray(got).tolist() == x.tolist()
    if take is torch.from_dlpack:
        got += 1
        assert weight.t().tolist() == x.tolist() != got.tolist()


@pytest.mark.parametrize("take", [value, lambda x: x.dequantize(), lambda x: x.dequantize(torch.float32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_differentiated(take, dtype):
    """As in a penalty on the weights."""
    weight = nn.Parameter(quantize(torch.randn(4, 3, dtype=dtype), formats.FP16))
    take(weight).square().sum().backward()
    assert weight.grad.dtype == dtype and type(weight.grad) is torch.Tensor
    torch.testing.assert_close(weight.grad, 2 * value(weight.detach()))
    with torch.no_grad():
        assert not take(weight).requires_grad
    assert not take(weight.detach()).requires_grad
    assert weight.tolist() == value(weight.detach()).tolist()
