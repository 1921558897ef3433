"""The doctor finds what is there, and what a program does not multiply in FP8 although the report says so."""

import functools
import importlib.metadata
import json
import subprocess
import sys
import tomllib
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import fp8jax
from fp8jax import backends, cli, extras
from fp8jax.inspect import device as devices
from fp8jax.inspect import report_check, targets
from fp8jax.inspect.program import Gemm
from fp8jax.inspect.subject import subject
from fp8jax.rewrite.report import LayerRow, Report

needs_plugin = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))


class MLP(nn.Module):
    """Two layers and a head, of which the recipes leave the head out."""

    width: int = 32
    wrap: object = staticmethod(lambda layer: layer)

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(self.width, name="up", dtype=x.dtype)(x))
        x = self.wrap(nn.Dense)(48, name="down", dtype=x.dtype)(x)
        return nn.Dense(16, name="lm_head", dtype=x.dtype)(x)


class Projections(nn.Module):
    """Layers that share an operand."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(128, name="in", dtype=x.dtype)(x)
        q, k, v = (nn.Dense(128, name=name, dtype=x.dtype)(x) for name in "qkv")
        return q * k + v


class Experts(nn.Module):
    """Code of one's own that multiplies by a kernel, with a scaling state, for each expert."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(batch_axis=0), (4, 128, 64))
        first = lambda: jax.tree.map(lambda s: jnp.stack([s] * 4), fp8jax.dot.init_state("te"))  # noqa: E731
        state = self.variable("_overwrite_with_gradient", "product", first).value
        multiply, x = functools.partial(fp8jax.dot.einsum, "bi,io->bo", recipe="te"), nn.Dense(128)(x)
        return jax.vmap(lambda x, w, s: multiply(x, w, state=s), (None, 0, 0))(x, w, state)


class OnNNX(nnx.Module):
    def __init__(self, rngs):
        self.up, self.lm_head = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.down = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return self.lm_head(self.down(nnx.gelu(self.up(x))))


def inputs(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp_and_inputs():
    return MLP(), (inputs(24, 32),)


def counted(rows):
    return {row.layer: (row.report == "FP8", row.fp8, row.others) for row in rows}


def complaints(rows):
    return {row.layer: row.complaint for row in rows if row.complaint}


HEAD = (False, 0, 3)

# Model, recipe, {layer: (FP8 by the report, FP8 GEMMs, others)}; the first layer's input needs no gradient.
MODELS = {
    "linen": (MLP(), "O2", {"up": (True, 2, 0), "down": (True, 3, 0), "lm_head": HEAD}),
    "transformed": (
        fp8jax.transform(MLP(), "te", rules=[fp8jax.Rule("up", "gemm=BF16")]),
        "te",
        {"up": (False, 0, 2), "down": (True, 3, 0), "lm_head": HEAD},
    ),
    "wide wgrad": (
        MLP(),
        "te,override_linear_precision=False+False+True",
        {"up": (True, 1, 1), "down": (True, 2, 1), "lm_head": HEAD},
    ),
    "bf16": (MLP(), "bf16", {"up": (False, 0, 2), "down": (False, 0, 3), "lm_head": HEAD}),
    # The backward needs quantized operands again, and no product of theirs.
    "remat": (MLP(wrap=nn.remat), "O1", {"up": (True, 2, 0), "down": (True, 3, 0), "lm_head": HEAD}),
    "nnx": (OnNNX(nnx.Rngs(0)), "O2", {"up": (True, 2, 0), "down": (True, 3, 0), "lm_head": HEAD}),
    "nnx transformed": (
        fp8jax.transform(OnNNX(nnx.Rngs(0)), "te,scaling=current"),
        "te,scaling=current",
        {"up": (True, 2, 0), "down": (True, 3, 0), "lm_head": HEAD},
    ),
}


def test_a_function_of_parameters():
    """Its parameters are the first of its inputs; its loss gets the others."""
    params = jax.eval_shape(MLP().init, jax.random.key(0), inputs(24, 32))["params"]
    fn, losses = lambda params, x: MLP().apply({"params": params}, x), []

    def loss(y, *others):
        losses.append([x.shape for x in others])
        return jnp.sum(y)

    _, recipe, expected = MODELS["linen"]
    rows = report_check.check((fn, (params, inputs(24, 32)), loss), recipe)
    assert counted(rows) == expected and not complaints(rows) and losses[0] == [(24, 32)]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_cpu_is_given_is_counted_by_layer(name):
    model, recipe, expected = MODELS[name]
    rows = report_check.check((model, inputs(24, 32)), recipe)
    assert counted(rows) == expected and not complaints(rows)
    narrow = [number for is_told, number, _ in expected.values() if is_told]
    shown = f"{sum(narrow)} FP8 GEMMs in the {len(narrow)} layers" if narrow else "no layer"
    assert report_check.verdict(rows).startswith(f"as reported: {shown}")


def test_scanned_layers_and_products_of_no_layer_are_counted():
    small = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}
    rows = report_check.check(subject("gpt", **small), "O2")
    layers = {f"layers/{name}": (True, 3, 0) for name in ("qkv", "out", "up", "down")}
    assert counted(rows) == {**layers, "lm_head": HEAD, report_check.NO_LAYER: (False, 0, 8)}
    assert not complaints(rows)


def test_a_product_of_the_users_own_may_be_fp8():
    def own(lhs, rhs, dimension_numbers, **options):
        return fp8jax.dot.dot_general(lhs, rhs, dimension_numbers, recipe="te,scaling=current", state={})

    [row] = report_check.check((nn.Sequential([nn.Dense(48, dot_general=own)]), inputs(8, 32)), "bf16")
    assert (row.fp8, row.others, row.complaint) == (2, 0, "")


@pytest.fixture
def broken_backend(monkeypatch):
    """XLA's backend, where it multiplies bf16 numbers that are not the codes."""

    def dot(lhs, rhs, dimension_numbers, *, out_dtype, precise):
        wide = (lax.reduce_precision(x.dequantize().astype(jnp.bfloat16), 8, 7) for x in (lhs, rhs))
        return lax.dot_general(*wide, dimension_numbers).astype(out_dtype)

    monkeypatch.setitem(backends.BACKENDS, "xla", backends.BACKENDS["xla"]._replace(dot=dot))
    jax.clear_caches()  # else products that were traced before are taken from there
    yield
    jax.clear_caches()


def test_a_broken_backend_is_found_and_the_command_fails(broken_backend, capsys):
    small = "--layers 1 --width 32 --heads 2 --context 16 --vocabulary 64".split()
    assert cli.main(["doctor", "--compile", *small]) == 1
    printed = capsys.readouterr().out
    assert "layers/qkv    FP8              0          3" in printed
    assert "layers/qkv: fprop and dgrad and wgrad: JAX gives XLA a GEMM of bf16 x bf16, not FP8" in printed
    assert "lm_head:" not in printed


@needs_plugin
def test_what_a_gpu_would_run_is_as_reported():
    rows = report_check.check((MLP(), inputs(48, 32, dtype=jnp.bfloat16)), "O2", target="h200")
    assert counted(rows) == MODELS["linen"][2] and not complaints(rows)


# What XLA makes of such models on a GPU is seen here, and nowhere else: no error, no warning.
FALLEN = {
    "joined": (Projections(), "te,scaling=current", {"q", "k", "v"}, "dot_merger_threshold_mb=0"),
    "batch": (Experts(), "te", {"(no layer's)"}, "a batch of GEMMs with a scale each"),
    "vector": (
        fp8jax.transform(nn.Dense(1), "te", rules=[fp8jax.Rule(recipe="te")]),
        "te",
        {"kernel"},
        "one of its dimensions is 1",
    ),
}


@needs_plugin
@pytest.mark.parametrize("name", ["joined", pytest.param("batch", marks=pytest.mark.long), "vector"])
def test_what_falls_back_on_a_gpu_is_named_with_its_cause(name):
    model, recipe, layers, cause = FALLEN[name]
    found = complaints(
        report_check.check((model, inputs(256, 128, dtype=jnp.bfloat16)), recipe, target="h200")
    )
    assert set(found) == layers
    assert all(cause in complaint for complaint in found.values())


@needs_plugin
@pytest.mark.long
def test_keeping_products_apart_brings_them_back(monkeypatch):
    options = {**targets.COMPILER_OPTIONS, "xla_gpu_dot_merger_threshold_mb": 0}
    monkeypatch.setattr(targets, "COMPILER_OPTIONS", options)
    model = (Projections(), inputs(256, 128, dtype=jnp.bfloat16))
    assert not complaints(report_check.check(model, "te,scaling=current", target="h200"))


@needs_plugin
@pytest.mark.long
def test_the_gpt_of_plans_is_as_reported_on_every_target():
    of = subject("gpt-125m", layers=3, width=128, heads=2, context=128, vocabulary=256)
    for name in targets.TARGETS:
        rows = report_check.check(of, "O2", target=name)
        assert not complaints(rows)
        assert {row.runs for row in rows if row.report == "FP8"} == {3}


@needs_plugin
@pytest.mark.long
def test_the_gpt_that_trains_is_as_reported(load_program):
    model = load_program("examples/gpt_model.py")
    config = model.GPTConfig(vocabulary=96, dtype="bfloat16", remat=False)
    rows = report_check.check(
        (model.GPT(config), inputs(12, config.context, dtype=jnp.int32)), "O2", target="h200"
    )
    assert not complaints(rows)
    # Forward and two backward products in FP8 for each layer of the report, and none besides.
    assert {row.fp8 for row in rows if row.report == "FP8"} == {3}
    assert {row.fp8 for row in rows if row.report != "FP8"} == {0}
    assert sum(row.report == "FP8" for row in rows) == 4


def gemm(role="fprop", *, kind="cublaslt_f8", formats=("f8e4m3fn", "f8e4m3fn"), shape=(64, 32), layer="up"):
    name = f"jit(step)/jvp(M)/{layer}/fp8jax:{layer}/jit(_dot)/{role}/dot_general"
    return Gemm(kind, *formats, "bf16", shape, True, 1, name)


GIVEN = [gemm(role, kind="dot") for role in ("fprop", "dgrad", "wgrad")]
RAN = [gemm(role) for role in ("fprop", "dgrad", "wgrad")]
WIDE = ("bf16", "bf16")
E5M2 = gemm("wgrad", kind="dot", formats=("f8e5m2", "f8e5m2"))
FELL = gemm("wgrad", kind="cublaslt", formats=WIDE)


@pytest.mark.parametrize(
    "given, ran, capability, says",
    [
        (GIVEN, RAN, (9, 0), ""),
        (GIVEN, [gemm("add"), *RAN[1:]], (9, 0), ""),  # a bias in the GEMM: its name is the addition's
        ([*GIVEN, GIVEN[0]], RAN, (9, 0), ""),  # what was recomputed and is the same
        (GIVEN, [*RAN[:2], gemm("wgrad", kind="triton")], (9, 0), ""),
        ([], [gemm(role, kind="te") for role in ("fprop", "dgrad", "wgrad")], (9, 0), ""),  # none is XLA's
        (
            GIVEN,
            [*RAN[:2], FELL],
            (9, 0),
            "wgrad: a cublaslt GEMM of bf16 x bf16, not FP8; XLA did not match",
        ),
        (GIVEN, [*RAN, FELL], (9, 0), "a GEMM: a cublaslt GEMM of bf16 x bf16"),
        (GIVEN, [FELL] * 3, (8, 0), "compute capability 8.0 has no FP8 GEMMs"),
        ([*GIVEN[:2], E5M2], [*RAN[:2], FELL], (9, 0), "no GEMM of E5M2 with E5M2"),
        (GIVEN, RAN[:2], (9, 0), "wgrad: computed without a GEMM of its own"),
        ([*GIVEN[:2], FELL], [*RAN[:2], FELL], (9, 0), "wgrad: JAX gives XLA a GEMM of bf16 x bf16"),
        ([], [], (9, 0), "none of its GEMMs is in the program"),
    ],
)
def test_what_became_of_a_layer_is_judged(given, ran, capability, says):
    report = Report("te", (LayerRow("up", "Dense", (64, 32), True, "", 1),), 1)
    [row] = report_check._compared(report, set(), given, ran, capability)
    assert says in row.complaint and bool(says) == bool(row.complaint)


def test_layers_that_are_not_reported_may_have_no_fp8():
    report = Report("te", (LayerRow("up", "Dense", (64, 32), False, "exclude=up", 1),), 1)
    [row] = report_check._compared(report, set(), GIVEN, RAN, (9, 0))
    assert row.complaint == "3 GEMMs are FP8, and the report says no"
    raw = [g._replace(name=g.name.replace("fp8jax:up", "nothing")) for g in GIVEN]
    [row] = report_check._compared(
        Report("te", (), 0), set(), raw, [FELL._replace(name="dgrad/x")] * 3, (9, 0)
    )
    assert row.layer == report_check.NO_LAYER and row.complaint.startswith(
        "fprop and dgrad and wgrad: a cublaslt"
    )


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="`model`: expected a Flax module, .* or a function of parameters"):
        report_check.check((object(), inputs(2, 2)), "O2")
    with pytest.raises(ValueError, match="`target`: expected one of h100"):
        report_check.check((MLP(), inputs(24, 32)), "O2", target="h300")


def ways(gemms):
    """How GEMMs without blocks are computed, by format."""
    rows = [gemm for gemm in gemms if "blocks" not in gemm["operands"]]
    return {gemm["operands"].partition(",")[0]: gemm["how"] for gemm in rows}


@pytest.mark.parametrize(
    "platform, capability, fp8, bf16, mxfp8",
    [
        ("cpu", None, devices.EMULATED, devices.WIDER, devices.EMULATED),
        ("gpu", (7, 5), devices.NOT_SUPPORTED, devices.NOT_SUPPORTED, devices.NOT_SUPPORTED),
        ("gpu", (8, 0), devices.NOT_SUPPORTED, devices.NATIVE, devices.NOT_SUPPORTED),
        ("gpu", (8, 9), devices.NATIVE, devices.NATIVE, devices.NOT_SUPPORTED),
        ("gpu", (10, 0), devices.NATIVE, devices.NATIVE, devices.NATIVE),
        ("gpu", None, devices.UNKNOWN, devices.UNKNOWN, devices.UNKNOWN),
        ("tpu", None, devices.UNKNOWN, devices.UNKNOWN, devices.UNKNOWN),
    ],
)
def test_what_a_device_multiplies(platform, capability, fp8, bf16, mxfp8):
    gemms = devices.gemms_of(platform, capability)
    assert (ways(gemms)["FP8"], ways(gemms)["BF16"]) == (fp8, bf16)
    blocks = {gemm["scaling"]: gemm["how"] for gemm in gemms if "blocks" in gemm["operands"]}
    assert blocks == {"block, block_float32": fp8, "mxfp8": mxfp8, "nvfp4": mxfp8}
    assert all(gemm["reason"] for gemm in gemms)


def test_this_machine_is_described():
    found = devices.examine()
    [device] = found["devices"]
    assert (device["platform"], device["number"]) == ("cpu", len(jax.local_devices()))
    assert found["versions"]["jax"] == jax.__version__ and "CUDA driver" not in found["versions"]
    assert [each["name"] for each in found["backends"]] == list(backends.BACKENDS)
    assert [each["name"] for each in found["backends"] if each["is_auto"]] == ["xla", "pallas", "cudnn"]
    shown = devices.text(found)
    assert "emulated, exactly" in shown and "dequantized operands  can run" in shown
    [device] = json.loads(json.dumps(found))["devices"]
    assert [gemm["how"] for gemm in device["gemms"]] == [devices.WIDER] * 2 + ["emulated, exactly"] * 5


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_target_is_described_in_the_place_of_what_is_here(name):
    [device] = devices.examine(name)["devices"]
    assert device["name"] == targets.get(name).device
    assert ways(device["gemms"]) == dict.fromkeys(["FP8", "BF16", "FP16"], devices.NATIVE)
    assert [gemm["reason"].partition(":")[0] for gemm in device["gemms"][:5]] == ["xla"] * 4 + ["pallas"]


@pytest.mark.parametrize(
    "platforms, plugin, says",
    [
        ("cpu", None, "JAX_PLATFORMS=cpu keeps JAX from it"),
        ("", None, 'pip install -U "jax[cuda13]<0.13"'),
        ("", "0.10.2", "CUDA plugin is installed and does not start"),
        ("cuda,cpu", "0.10.2", "CUDA plugin is installed and does not start"),
    ],
)
def test_a_gpu_that_jax_does_not_see_is_trouble(monkeypatch, platforms, plugin, says):
    monkeypatch.setattr(devices, "sees_nvidia", lambda: True)
    monkeypatch.setattr(devices, "version", lambda name: plugin)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    [trouble] = devices.examine()["troubles"]
    assert trouble.startswith("this system has an NVIDIA GPU, but JAX has only CPUs") and says in trouble
    assert cli.main(["doctor"]) == 1
    assert not devices.examine("h200")["troubles"]


def test_jax_without_any_device_is_trouble(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", fail)
    found = devices.examine()
    assert found["devices"] == [] and "Unable to initialize backend 'cuda'" in found["troubles"][0]
    assert "TROUBLE: JAX has no device" in devices.text(found)


def test_versions_of_libraries_are_read_or_not_found(monkeypatch):
    def missing():
        raise RuntimeError("no libcudnn")

    plugin = types.SimpleNamespace(
        cuda_runtime_get_version=lambda: 13020, cudnn_get_version=missing, cublas_get_version=lambda: 130001
    )
    monkeypatch.setattr(devices, "_plugin", lambda: plugin)
    found = devices.cuda_versions()
    assert found == {
        "CUDA runtime": "13.2",
        "CUDA driver": "not found",
        "cuDNN": "not found",
        "cuBLAS": "13.0.1",
    }
    monkeypatch.setattr(devices, "_plugin", lambda: None)
    assert set(devices.cuda_versions().values()) == {"not found"}


def test_what_is_missing_says_what_to_install(monkeypatch):
    def version(name):
        if name in ("torch", "rich"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    states = {package["purpose"]: package["state"] for package in devices.examine()["packages"]}
    assert states[devices.EXTRAS["torch"][1]] == f"without torch: {extras.install('torch')}"
    assert states[devices.EXTRAS["train"][1]] == f"without rich: {extras.install('train')}"


def test_extras_are_those_of_the_package(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(devices.EXTRAS) == set(project) - {"docs", "test", "test-jax"}
    for extra, (packages, _) in devices.EXTRAS.items():
        assert list(packages) == [needed.partition(">=")[0] for needed in project[extra]]


@pytest.mark.parametrize(
    "args, status, says",
    [
        (["--target", "h200"], 0, "1 x NVIDIA H200 (gpu, compute capability 9.0)"),
        (["--target", "h300"], 2, "expected one of h100"),
        (["--compile", "--model", "gpt-9"], 2, "`model`: expected gpt"),
        (["--layers", "3", "--recipe", "te"], 2, "--recipe, --layers is for --compile; add that"),
        (["--compile", "--recipe", "O4"], 2, "expected one of fp32"),
    ],
)
def test_the_command(args, status, says, capsys):
    assert cli.main(["doctor", *args]) == status
    assert says in "".join(capsys.readouterr())


def test_the_command_prints_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["platform"] == "cpu"
    model = f"{__name__}:mlp_and_inputs"
    assert cli.main(["doctor", "--compile", "--json", "--recipe", "O2", "bf16", "--model", model]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"O2", "bf16"}
    assert printed["O2"][0] == report_check.GemmRow("up", "FP8", 2, 0, 1, "")._asdict()


def test_importing_the_doctor_touches_no_device():
    code = (
        "import fp8jax.inspect.device\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_runs_are_shown_where_there_is_a_loop():
    row = report_check.GemmRow("up", "FP8", 3, 0, 12, "")
    assert report_check.table([row]).splitlines()[1].split() == ["up", "FP8", "3", "0", "12"]
    assert "runs" not in report_check.table([row._replace(runs=1)])
