"""Estimated times of training steps: on planted programs, and on one compiled for a GPU that is not here."""

import dataclasses
import json

import pytest

from fp8jax import cli
from fp8jax.inspect import estimate, subject, targets
from fp8jax.inspect.estimate import Estimate, report
from fp8jax.inspect.estimate.time import BEST, LIKELY, WORST, Cost, Efficiency, of_program

needs_plugin = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
H200 = targets.get("h200")
IDEAL = Efficiency(1, 1, 1, 1, 1, 1, 1, 1, 0)

# XLA's own cost of this FP8 GEMM is 90 ms; its FLOPs take 69 us at the peak.
PROGRAM = """
body (p: f8e4m3fn[4096,4096]) -> bf16[4096,4096] {
  %a = f8e4m3fn[4096,4096]{1,0} parameter(0)
  ROOT %g = (bf16[4096,4096]{1,0}, s8[33554432]{0}) custom-call(%a, %a), \
custom_call_target="__cublas$lt$matmul$f8", \
metadata={op_name="jit(step)/fp8jax:up/fprop/dot_general"}, backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}},"reification_cost":[{\
"end_to_end_cycles":0,"exec_time_us":90193.92,"compute_time_us":0,"memory_access_time_us":0,"name":"sol"}]}
}

fused (p: bf16[4096]) -> bf16[4096] {
  ROOT %x = bf16[4096]{0} parameter(0)
}

ENTRY main (p: bf16[4096]) -> bf16[4096] {
  %p = bf16[4096]{0} parameter(0)
  %w = bf16[4096]{0} while(%p), condition=%body, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %f = bf16[400000000]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(MLP)/mul"}, \
backend_config={"reification_cost":[{"end_to_end_cycles":9,"exec_time_us":984.5,"compute_time_us":978.9,\
"memory_access_time_us":112.5,"name":""},{"end_to_end_cycles":0,"exec_time_us":428.5,"compute_time_us":0,\
"memory_access_time_us":0,"name":"sol"}]}
  %s = bf16[4096]{0} fusion(%p), kind=kCustom, calls=%fused, \
metadata={op_name="jit(step)/jvp(MLP)/broadcast_in_dim"}, \
backend_config={"reification_cost":[{"end_to_end_cycles":9,"exec_time_us":2.9e7,"compute_time_us":1.5,\
"memory_access_time_us":2.9e7,"name":""},{"end_to_end_cycles":0,"exec_time_us":1e-8,"compute_time_us":0,\
"memory_access_time_us":0,"name":"sol"}]}
  %u = bf16[4096]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/optimizer/add"}
  ROOT %r = f32[45000000]{0} all-gather(%p), dimensions={0}
}
"""


def test_a_planted_program():
    """GEMMs by their FLOPs, not XLA's cost; trip counts; fusions by XLA's cost; collectives by the link."""
    found = of_program(PROGRAM, "te", H200, devices=8)
    # The body is the loop's condition, too.
    [gemm, again, fusion, softmax, update, gather] = found.costs
    assert (gemm.layer, gemm.part, gemm.dtype, gemm.runs) == ("up", "GEMMs", "fp8", 3)
    assert gemm.seconds(IDEAL) == pytest.approx(3 * 2 * 4096**3 / 1978.8e12)
    assert again == gemm
    assert (fusion.part, fusion.seconds(IDEAL)) == ("other", pytest.approx(428.5e-6))
    assert fusion.seconds(BEST) == pytest.approx(112.5e-6 / BEST.memory)
    # Its 29 s by XLA's cost model are more than its operand and its result take.
    assert softmax.part == "other"
    assert softmax.seconds(IDEAL) == pytest.approx(2 * 2 * 4096 / 4.8e12)
    assert (update.part, update.seconds(IDEAL)) == ("optimizer", pytest.approx(2 * 2 * 4096 / 4.8e12))
    assert update.seconds(LIKELY) == LIKELY.launch
    assert gather.part == "collectives"
    assert gather.seconds(IDEAL) == pytest.approx(7 / 8 * 4 * 45e6 / 450e9)
    assert found.seconds(IDEAL, ["GEMMs"]) == pytest.approx(2 * gemm.seconds(IDEAL))
    [up, *_] = report.layers(found)
    assert up["limited by"] == "FLOPs 100%"


def test_efficiencies_are_ordered_shares():
    for best, likely, worst in zip(BEST[:-1], LIKELY[:-1], WORST[:-1], strict=True):
        assert 0 <= min(best, worst) <= likely <= max(best, worst) <= 1
    assert BEST.launch < LIKELY.launch < WORST.launch


def of_gemms(recipe, dtype, flops, launches):
    gemm = Cost("up", "GEMMs", 1, dtype, flops, 0.0, 0.0, 0.0)
    small = Cost("up", "casts", launches, "", 0.0, 0.0, 0.0, 0.0)
    return Estimate(recipe, "h200", 1, (gemm, small))


def test_the_bounds_of_a_speedup():
    """A GEMM alone: what FP8 reaches of bf16's share, and nothing else, bounds the speed-up by FP8."""
    bf16, te = of_gemms("bf16", "gemm", 1.0, 0), of_gemms("te", "fp8", 0.5, 0)
    assert te.speedup(bf16) == pytest.approx((2 * LIKELY.fp8, 2 * WORST.fp8, 2 * BEST.fp8))
    assert bf16.speedup(bf16) == (1, 1, 1)


def test_the_width_at_which_a_recipe_pays():
    by_width = {
        width: [of_gemms("bf16", "gemm", width * 1e-7, 10), of_gemms("te", "fp8", width * 5e-8, 60)]
        for width in (4096, 1024, 2048)
    }
    speedups = {width: te.speedup(bf16) for width, (bf16, te) in by_width.items()}
    assert speedups[1024][0] < 1 < speedups[2048][0]
    assert speedups[2048][1] < 1 < speedups[4096][1]
    *_, last = report.widths_text(by_width).splitlines()
    assert last == "te: estimated to pay from width 2048, by the lower bound from 4096"
    del by_width[4096]
    assert report.widths_text(by_width).endswith("by the lower bound from none of these")


@needs_plugin
def test_a_gpu_without_costs_of_xla():
    """XLA's cost model does not know an L40S; FLOPs and bytes are known."""
    found = estimate.estimate(subject.subject("mlp", batch=1, context=256, width=256), "te", target="l40s")
    assert found.seconds() > 0 and not any(cost.xla for cost in found.costs)


@needs_plugin
def test_the_command(capsys, tmp_path):
    """An MLP of six GEMMs: in `te` all are FP8, and none is above the peak."""
    picture = tmp_path / "time.png"
    sizes = ["--model", "mlp", "--batch", "1", "--context", "1024", "--width", "512"]
    options = ["--recipe", "te", "mxfp8", "--target", "h200", "--picture", str(picture)]
    kept, estimates = estimate.estimate, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "estimate", lambda *a, **k: estimates.append(kept(*a, **k)) or estimates[-1])
        assert cli.main(["estimate", *sizes, *options]) == 0
    printed = capsys.readouterr()
    assert "mxfp8 is left out" in printed.err
    assert printed.out.startswith("ESTIMATED for 1 x NVIDIA H200, not measured")
    assert picture.stat().st_size > 5000
    bf16, te = estimates
    for row, dtype, peak in ((bf16, "gemm", 989.4e12), (te, "fp8", 1978.8e12)):
        gemms = [cost for cost in row.costs if cost.part == "GEMMs"]
        assert [cost.dtype for cost in gemms] == [dtype] * 6
        assert {cost.layer for cost in gemms} == {"up", "down"}
        # No GEMM is faster than 2 m n k at the peak, whatever reaches most of it.
        for at in (BEST, LIKELY, WORST):
            assert all(2 * 1024 * 512 * 2048 / cost.seconds(at) < peak for cost in gemms)
        assert sum(cost.flops for cost in gemms) * peak == pytest.approx(6 * 2 * 1024 * 512 * 2048)
    assert any(cost.part == "casts" and cost.xla for cost in te.costs)
    assert any(cost.part == "optimizer" for cost in te.costs)
    [first, second] = json.loads(json.dumps(report.as_data(estimates)))
    assert first["speedup"] == [1, 1, 1]
    assert second["seconds"][1] < second["seconds"][0] < second["seconds"][2]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--model", "mlp", "--experts", "2"], "mlp has batch, context, heads, width"),
        (["--model", "layer", "--heads", "3"], "multiple of `heads`"),
        (["--target", "cray"], "expected one of h100, h200, b200, l40s"),
        (["--model", "mine:tiny", "--widths", "64"], "--widths is of a gpt or a layer, and your model has"),
    ],
)
def test_wrong_options_are_told(options, says, capsys):
    assert cli.main(["estimate", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_gpu_without_a_peak_is_refused():
    unknown = dataclasses.replace(H200, name="x", flops=0.0)
    with pytest.raises(ValueError, match="`target`: expected a GPU with `flops` and `link`"):
        estimate.estimate(subject.subject("mlp"), "te", target=unknown)


@pytest.mark.parametrize("target, share", [("__gpu$xla.gpu.triton", "pallas"), ("mosaic_gpu_v2", "mosaic")])
def test_each_kernel_of_blocks_has_its_share(target, share):
    text = f"""
ENTRY main (a: f8e4m3fn[4096,4096]) -> bf16[4096,4096] {{
  %a = f8e4m3fn[4096,4096]{{1,0}} parameter(0)
  ROOT %g = bf16[4096,4096]{{1,0}} custom-call(%a, %a), custom_call_target="{target}"
}}
"""
    [gemm] = of_program(text, "block", H200).costs
    at = LIKELY._replace(**{share: LIKELY.fp8 / 2})
    assert gemm.dtype == share
    assert gemm.seconds(at) == pytest.approx(2 * 4096**3 / 1978.8e12 / LIKELY.gemm / at.fp8 * 2)
