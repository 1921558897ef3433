"""The benchmarks run, and the programs compiled for an H200 are what fp8jax promises."""

import functools
import json
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from fp8jax.inspect import program, targets
from fp8jax.inspect.program import hlo

ROOT = pathlib.Path(__file__).parent.parent

needs_plugin = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))


def long(value):
    return pytest.param(value, marks=pytest.mark.long)


# Of two recipes and two scalings each is there once; the crossed ones are long.
OURS = ("fp8jax te", long("fp8jax te,scaling=current"), long("fp8jax O2"), "fp8jax O2,scaling=current")


@pytest.fixture
def bench(load_program, monkeypatch, capsys):
    """Runs a benchmark with these arguments and returns what it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        load_program(f"examples/bench/{name}.py").main()
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def compiled(load_program):
    """Reads the MLP of examples/bench/program.py, compiled for an H200 in a way; each program once."""

    @functools.cache
    def compile_once(way, count):
        program = load_program("examples/bench/program.py")
        return program.compile_blocks(program.ways.WAYS[way], count, 8192, 4096, "h200")

    return compile_once


@pytest.mark.long
def test_step_prints_and_keeps_a_row_per_way(bench, tmp_path):
    names = ["bf16", "flax Fp8DotGeneral", "fp8jax O2"]
    lines = bench("step", "--tiny", "--record", str(tmp_path), "--ways", *names).splitlines()
    assert lines[1].split()[:3] == ["way", "step", "ms"]
    assert [line[:18].strip() for line in lines[2:]] == names
    [folder] = tmp_path.iterdir()
    assert folder.name.endswith("_step")
    kept = json.loads((folder / "result.json").read_text())
    assert kept["environment"]["command"].startswith("python examples/bench/step.py --tiny")
    assert {"date", "device", "commit", "jax"} <= set(kept["environment"])
    [rows] = kept["results"].values()
    assert [row["way"] for row in rows] == names
    assert all(row["step ms"] > 0 and row["temporaries MB"] > 0 for row in rows)
    assert rows[0]["/ bf16"] == 1.0


@pytest.mark.long
def test_compile_measures_both_programs():
    names = ["bf16", "fp8jax O2"]
    run = [sys.executable, str(ROOT / "examples/bench/compile.py"), "--tiny", "--json", "--ways", *names]
    sections = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert list(sections) == ["loss and gradients", "whole step"]
    for rows in sections.values():
        assert [row["way"] for row in rows] == names
        assert all(row["compile s"] > 0 and row["total s"] > row["lower s"] > 0 for row in rows)


@pytest.mark.long
def test_load_counts_the_bytes_of_arrays(bench):
    """E4M3 weights are half of a bf16 folder's bytes, but for the files' headers."""
    ways = ["bf16 into bf16", "bf16 into O3's E4M3 weights"]
    [rows] = json.loads(bench("load", "--tiny", "--json", "--ways", *ways)).values()
    assert [row["what"] for row in rows] == ways
    assert [round(row["arrays"], 1) for row in rows] == [1.0, 0.5]
    assert all(row["first s"] > 0 for row in rows)


@pytest.mark.long
def test_fp4_bias_measures_gradients(bench):
    [rows] = json.loads(bench("fp4_bias", "--tiny", "--json", "--fp4-options", "", "46+eden")).values()
    assert [row["fp4_options"] for row in rows] == ["none", "46+eden"]
    assert all(0.05 < row["all, 1 batch"] < 0.5 for row in rows)
    assert all(0 < row["backward, 2 batches"] < row["backward, 1 batch"] for row in rows)


def test_rounding_finds_none_in_float32(bench):
    """Adam in float32 moves as in float64, and O2's idle row does not."""
    names = ["te", "O2", "COAT", "FlashOptim"]
    out = json.loads(bench("rounding", "--tiny", "--json", "--recipes", *names))
    idle, zipf, small, plain, spread, tuned = out.values()
    assert [row["recipe"] for row in spread] == names and [row["recipe"] for row in tuned] == names[:2]
    for te, o2, *others in (idle, small):
        for row in others:
            found = [value for name, value in row.items() if name != "recipe"]
            assert any(value != pytest.approx(round(value), abs=1e-3) for value in found)
            assert all(value == pytest.approx(round(value), abs=0.05) for value in found)
        exact = 0.0 if "lr 1e-04" in te else 1.0
        assert all(value == pytest.approx(exact, abs=1e-3) for name, value in te.items() if name != "recipe")
        assert any(abs(value - exact) > 0.02 for name, value in o2.items() if name != "recipe")
    assert [row["way"] for row in zipf] == ["float64", *names]
    assert zipf[1]["/ float64"] == pytest.approx(1, abs=1e-3)
    assert spread[0]["update / float64"] == pytest.approx(1, abs=1e-3)
    assert [row["bytes"] for row in plain] == [12, 7, 12, 7]


def test_coats_code_against_float64(load_program):
    """Its power takes the range of a group into E4M3's; a group of zeros, or of one number, stays."""
    codes = load_program("examples/bench/codes.py")
    random = np.random.default_rng(0)
    x = random.normal(size=300) * np.exp2(random.integers(-12, 12, 300))
    x[:5] = 0
    got = np.asarray(codes.through_coat(jnp.float32(x)), np.float64)
    for begin in (0, 128, 256):
        group, found = x[begin : begin + 128], got[begin : begin + 128]
        size = np.abs(group[group != 0])
        middle = np.sqrt(size.min() * size.max())
        power = np.floor(16 * np.log2(448**2 / 2) / np.log2(size.max() / size.min())) / 16
        unit = (size.max() / middle) ** power / 448
        rounded = np.asarray((size / middle) ** power / unit).astype(ml_dtypes.float8_e4m3fn)
        wanted = np.sign(group[group != 0]) * (rounded.astype(np.float64) * unit) ** (1 / power) * middle
        # float32 may round what is halfway to the other code.
        off = np.abs(found[group != 0] / wanted - 1) > 1e-4
        assert off.mean() < 0.02 and (found[group == 0] == 0).all()
    for constant in (0.0, 3.0):
        np.testing.assert_allclose(codes.through_coat(jnp.full(128, constant)), constant, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:O2 rounds to nearest")
def test_fp8_is_fine_tuned_as_float32_weights_are(load_program, optimized):
    """At a rate of 1e-6 the loss falls as with float32 weights; with O2 it does not."""
    te, o2, fp8 = load_program("examples/bench/rounding.py").fine_tuning(["O2", "fp8"], 400)
    assert te["recipe"] == "te" and te["last tenth"] < te["first tenth"]
    assert o2["fall / te"] < 0.2 and fp8["fall / te"] == pytest.approx(1, abs=0.1)


@needs_plugin
@pytest.mark.long
def test_program_finds_fp8_gemms(bench):
    out = bench("program", "--tiny", "--json", "--ways", "bf16", "fp8jax O2")
    (layer, whole), (mlp, rows), (deep, kept) = json.loads(out).items()
    assert layer.startswith("h200, a transformer layer, 64 tokens")
    assert [(row["FP8 GEMMs"], row["casts"], row["transposes"]) for row in whole] == [(0, 0, 0), (12, 1, 1)]
    assert deep.startswith("h200, GPT, 12 layers")
    # Each tensor is cast once, also where what lies between the products is computed anew.
    casts = {row["kept"]: row["casts"] for row in kept if row["recipe"] == "te"}
    assert casts == {
        "everything": 1,
        "products": 2,
        "FP8 operands": 1,
        "FP8 products": 2,
        "FP8 products and inputs": 2,
    }
    gemms = {row["kept"]: row["FP8 GEMMs"] for row in kept if row["recipe"] == "te"}
    assert (
        gemms["FP8 products"] == gemms["FP8 products and inputs"] == gemms["products"] == gemms["everything"]
    )
    assert mlp.startswith("h200, 1 MLP block(s), 64 tokens")
    assert [(row["FP8 GEMMs"], row["other GEMMs"]) for row in rows] == [(0, 6), (6, 0)]


def test_moe_multiplies_blocks_in_fp8(bench):
    names = ("lax.ragged_dot", "te")
    _, rows = json.loads(bench("moe", "--tiny", "--json", "--ways", *names)).values()
    assert [(row["FP8 GEMMs"], row["other GEMMs"]) for row in rows] == [(0, 3), (3, 0)]
    # Of 4 experts' 128 rows: all of them with each kernel, and in blocks of 16, one more for each expert.
    work = 6 * 32 * 64 / 1e12
    assert [row["GEMM TFLOP"] for row in rows] == pytest.approx([4 * 128 * work, (128 + 4 * 16) * work])


def test_program_says_what_is_missing(bench, monkeypatch):
    monkeypatch.setattr(targets, "why_not", lambda: "the plugin is missing")
    with pytest.raises(SystemExit, match="the plugin is missing"):
        bench("program", "--tiny")


@needs_plugin
@pytest.mark.parametrize("way", OURS)
def test_mlp_on_an_h200(compiled, way):
    read, bf16 = compiled(way, 1), compiled("bf16", 1)
    fp8 = [gemm for gemm in read.gemms if gemm.kind == "cublaslt_f8"]
    assert len(fp8) == len(read.gemms) == 6
    # Forward fast; the gradients of input and weight precise.
    assert sorted(gemm.fast for gemm in fp8) == [False] * 4 + [True] * 2
    # A weight gradient that is kept in float32 leaves its GEMM so.
    assert sorted(gemm.out for gemm in fp8) == ["bf16"] * (6 if "O2" in way else 4) + ["f32"] * (
        2 - 2 * ("O2" in way)
    )
    assert read.total < bf16.total


@needs_plugin
@pytest.mark.long
@pytest.mark.parametrize(
    "target, kind, most_bytes",
    [
        ("h200", "pallas", {"fp8jax block": 1.25}),
        ("b200", "cudnn", {"fp8jax mxfp8": 1.2, "fp8jax nvfp4": 1.4}),
    ],
)
def test_scales_of_blocks(load_program, target, kind, most_bytes):
    """All GEMMs of an MLP are block-scaled, no copy of an operand is dequantized, and few bytes move."""
    bench = load_program("examples/bench/program.py")

    def compiled(name):
        blocks = bench.Blocks(bench.WAYS[name].dense, jnp.bfloat16, 1)
        return bench.compile_way(bench.WAYS[name], blocks, (8192, 4096), target)

    bf16 = bench.program.read(compiled("bf16"))
    for way in most_bytes:
        read = bench.program.read(ours := compiled(way))
        assert [gemm.kind for gemm in read.gemms] == [kind] * 6
        assert read.temporaries < 0.7 * bf16.temporaries
        module = hlo.parse(ours.as_text())
        inside = [each for executed in module.executed() for each in module.inside(executed.instruction)]
        converts = [each for each in inside if each.opcode == "convert" and len(each.first.dims) > 1]
        assert not [each for each in converts if each.operands[0].first.dtype.startswith(("f8", "f4"))]
    _, *rows = bench.layer_rows([*most_bytes], (31, 512, 4096), target)
    assert [row["way"] for row in rows] == [*most_bytes]
    for row in rows:
        assert row["FP8 GEMMs"] == 12 and row["/ bf16"] < most_bytes[row["way"]]


@needs_plugin
def test_fp8_puts_a_quarter_of_float32s_bytes_on_the_wire(bench):
    here, there = json.loads(bench("wire", "--json", "--tiny", "--size", "128")).values()
    for rows in (here, there):
        sizes = {(row["what"], row["way"]): row["MB sent"] for row in rows}
        for what in {row["what"] for row in rows}:
            assert sizes[what, "FP8"] <= 0.27 * sizes[what, "float32"]
            assert sizes[what, "FP8"] <= 0.52 * sizes[what, "bfloat16"]
        assert {row["as"] for row in rows if row["way"] == "FP8"} == {"u8"}
    # Three for a whole tree: scales, codes there, codes back.
    assert [row["collectives"] for row in there if row["way"] == "FP8"] == [3, 2, 2]


@needs_plugin
@pytest.mark.parametrize(
    "recipe, leaves, kernels",
    [
        # From 96 amaxes on, more than XLA concatenates in one kernel, each can cost a kernel of its own.
        ("O2", 32, 40),
        pytest.param("O2", 100, 78, marks=pytest.mark.long),
        ("te", 16, 38),
        ("O1", 16, 16),
        ("O3", 32, 33),
        ("fp8", 8, 32),
        ("fp8,moments=E5M2+E4M4", 8, 40),
    ],
)
def test_update_compiled_for_an_h200(load_program, recipe, leaves, kernels):
    """The update stores no float32 copy of the parameters, and starts few kernels."""
    row = load_program("examples/bench/update.py").on_target(recipe, leaves, 1871, "h200")
    assert row["kernels"] <= kernels
    assert row["temporaries %"] <= 2
    # Each is read twice and written once: a gradient is not written.
    assert row["/ state"] <= 4


@needs_plugin
@pytest.mark.parametrize("target", ["h100", "h200", "b200"])
@pytest.mark.parametrize("recipe", ["O2", "fp8"])
def test_large_tensors_have_no_temporaries(load_program, recipe, target):
    """XLA decides by the GPU and the sizes what to store: on an H200 it stored each second moment's root."""
    row = load_program("examples/bench/update.py").on_target(recipe, 2, 3840, target)
    assert row["temporaries %"] <= 0.2
    assert row["/ state"] <= 3


@needs_plugin
@pytest.mark.parametrize("recipe, outputs", [("O2", 6), ("O3", 8), ("fp8", 4)])
def test_large_tensors_are_updated_two_in_a_kernel(load_program, recipe, outputs):
    """XLA takes up to ten, with more registers than a multiprocessor has for many threads."""
    update = load_program("examples/bench/update.py")
    tx, *shapes = update.arguments(recipe, 4, 2048)
    compiled = targets.compile_for(update.step_of(tx), *shapes, target="h200", donate_argnums=(0, 1))
    results = re.findall(r" = \((.*?)\) fusion\(", compiled.as_text())
    assert max(result.count("[2048,2048]") for result in results) == outputs


@needs_plugin
def test_groups_of_large_tensors_have_a_kernel_for_each(load_program):
    """A kernel for the groups of several tensors reads them entry by entry, and keeps its sums in memory."""
    update = load_program("examples/bench/update.py")
    tx, *shapes = update.arguments("fp8,moments=E5M2+E4M4", 4, 2048)
    compiled = targets.compile_for(update.step_of(tx), *shapes, target="h200", donate_argnums=(0, 1))
    results = re.findall(r"%input_reduce\S* = (\S+|\(.*?\)) fusion\(", compiled.as_text())
    assert [found for result in results if (found := result.count("u8[2048,16]"))] == [1, 1, 1, 1]


def test_update_takes_turns_here(load_program):
    rows = load_program("examples/bench/update.py").here(["optax.adamw", "O2"], 2, 64, 2, {})
    assert [row["way"] for row in rows] == ["optax.adamw", "O2"]
    assert all(row["step ms"] > 0 and row["temporaries GB"] >= 0 for row in rows)


class NormedMLP(nn.Module):
    """A norm and two layers, whose dims no FP8 GEMM takes if they are odd."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = nn.gelu(nn.Dense(self.hidden, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x)))
        return nn.Dense(width, dtype=jnp.bfloat16)(x)


@needs_plugin
@pytest.mark.parametrize("width, hidden", [(1024, 4096), (130, 250)])
def test_norms_and_odd_dims(width, hidden):
    """Norms are cast where they are computed, and odd dims are padded."""
    model = fp8jax.transform(NormedMLP(hidden), "te")
    x = jax.ShapeDtypeStruct((2048, width), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert "XLA computes a norm within the cast" in str(model.report(x))

    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    compiled = targets.compile_for(fp8jax.value_and_grad(loss), variables, x, target="h200")
    assert [gemm.kind for gemm in program.read(compiled).gemms] == ["cublaslt_f8"] * 6
    # Of what the forward computes before its first product, only FP8 codes have the input's size.
    entry = compiled.as_text().split("ENTRY")[1].split("custom-call(")[0]
    outputs = [line.split(" fusion(")[0] for line in entry.splitlines() if " fusion(" in line]
    assert set(re.findall(rf"(\w+)\[2048,{width}\]", " ".join(outputs))) == {"f8e4m3fn"}


@needs_plugin
def test_peers_on_an_h200_are_as_recorded(compiled):
    """The harness itself: figures found independently of it (with jax 0.10.2 and 0.12.0.1 alike)."""
    bf16, flax = compiled("bf16", 1), compiled("flax Fp8DotGeneral", 1)
    assert (round(bf16.temporaries / 1e9, 2), bf16.kernels) == (0.94, 27)
    assert (round(flax.temporaries / 1e9, 3), flax.kernels) == (0.805, 72)


@pytest.mark.long
@needs_plugin
def test_peers_of_four_blocks_on_an_h200_are_as_recorded(compiled):
    bf16, flax = (2.920e9, 2.318e9) if jax.__version_info__ < (0, 11) else (2.890e9, 1.949e9)
    assert compiled("bf16", 4).temporaries == pytest.approx(bf16, rel=1e-3)
    assert compiled("flax Fp8DotGeneral", 4).temporaries == pytest.approx(flax, rel=1e-3)


@needs_plugin
@pytest.mark.parametrize("way", ["fp8jax te", long("fp8jax te,scaling=current")])
def test_residuals_on_an_h200_are_kept_in_fp8(compiled, way):
    one = compiled(way, 1)
    if way == "fp8jax te" and jax.__version_info__ >= (0, 11):
        # XLA of jax 0.12 computes the amax of the activation in the backward, where it reads its inputs
        # anyway. It moves 7% fewer bytes, and the gradient does not take the activation's memory.
        assert one.temporaries < 0.81e9 and one.moved < 6.7e9
    else:
        assert one.temporaries < 0.65e9
    assert compiled(way, 4).temporaries < 0.62 * compiled("bf16", 4).temporaries


@needs_plugin
@pytest.mark.parametrize("way", OURS)
def test_fewer_kernels_than_flax_on_an_h200(compiled, way):
    assert compiled(way, 1).kernels < compiled("flax Fp8DotGeneral", 1).kernels
