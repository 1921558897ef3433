"""The contract of GEMM backends: every backend inherits `Contract`, and runs it where it can run."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax import Recipe, backends, quantize, scaling
from fp8jax.backends import Backend, Device
from fp8jax.dot import dot_general, init_state
from fp8jax.inspect import targets
from fp8jax.quantization import quantize_blocks
from fp8jax.recipe import PRESETS
from fp8jax.scaling import GRAD, LHS, RHS

RECIPES = ["te,scaling=current", "block", "block,scaling=block_float32", "mxfp8", "nvfp4,fp4_options="]
MATRICES = (((1,), (0,)), ((), ()))
A100, H100, B200 = (
    Device(name, "gpu", capability)
    for name, capability in (("A100", (8, 0)), ("H100", (9, 0)), ("B200", (10, 0)))
)


def granularity_of(recipe):
    return scaling.of_recipe(Recipe.parse(recipe)).granularity


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def quantized(recipe, operand, x):
    """An operand of a GEMM, with the contracted axis last."""
    recipe = Recipe.parse(recipe)
    if granularity_of(recipe) == "tensor":
        return jax.jit(quantize, static_argnums=1)(x, scaling.of_recipe(recipe).format(operand))
    return jax.jit(quantize_blocks, static_argnums=1)(x, scaling.of_recipe(recipe).method(operand))


def skip_without(name, recipe, *, is_batched=False):
    reason = backends.why_not(name, granularity_of(recipe))
    if reason := reason or backends.BACKENDS[name].supports(None, is_batched):
        pytest.skip(reason)


def pytest_generate_tests(metafunc):
    """Gives a test of the contract the recipes with operands that its backend multiplies."""
    if metafunc.cls is not None and {"recipe", "other"} & set(metafunc.fixturenames):
        known = backends.BACKENDS[metafunc.cls.name].granularities
        own = [recipe for recipe in RECIPES if granularity_of(recipe) in known]
        if "recipe" in metafunc.fixturenames:
            metafunc.parametrize("recipe", own)
        else:
            metafunc.parametrize("other", [recipe for recipe in RECIPES if recipe not in own])


class Contract:
    """What holds for every backend."""

    name: str
    runs_on = {"A100": True, "H100": True, "B200": True}

    def test_entry_is_the_file(self):
        backend = importlib.import_module(f"fp8jax.backends.{self.name}").BACKEND
        assert backends.BACKENDS[self.name] is backend and isinstance(backend, Backend)
        assert backend.gemms and backend.norms and backend.granularities
        assert set(backend.granularities) <= {granularity_of(recipe) for recipe in RECIPES}

    def test_gpus_without_its_gemms_are_refused(self):
        """With a reason, by `supports` and by `choose`."""
        [granularity, *_] = backends.BACKENDS[self.name].granularities
        for gpu in (A100, H100, B200):
            reason = backends.why_not(self.name, granularity, device=gpu)
            if reason is None:
                assert self.runs_on[gpu.name]
                assert backends.choose(self.name, granularity, device=gpu) == (self.name, "as asked for")
                continue
            assert not self.runs_on[gpu.name] or "transformer_engine" in reason
            with pytest.raises(ValueError, match=f"`backend`: {self.name} cannot run here: ") as error:
                backends.choose(self.name, granularity, device=gpu)
            assert reason in str(error.value) and str(error.value).endswith("reference.")

    def test_other_operands_are_refused(self, other):
        """`transform` and `dot_general` raise one error, with the backends that can."""
        granularity, known = granularity_of(other), backends.BACKENDS[self.name].granularities
        expected = (
            f"`backend`: {self.name} cannot run here: it multiplies operands with a scale per "
            f"{' or '.join(known)}, not per {granularity}. With a scale per {granularity} these can: .*ref"
        )
        x, w = jnp.ones((32, 128)), jnp.ones((128, 64))
        with pytest.raises(ValueError, match=expected):
            fp8jax.transform(lambda w, x: x @ w, other, backend=self.name)
        with pytest.raises(ValueError, match=expected):
            dot_general(x, w, MATRICES, recipe=other, state=init_state(other), backend=self.name)

    @pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("shape", [(130, 384, 200), (3, 32, 256, 48), (1, 128, 16), (0, 128, 16)])
    def test_gemm_is_exact_but_for_rounding(self, recipe, shape, out_dtype):
        """Products of codes are exact in float32, and k of them are added in any order."""
        backend, (*batch, m, k, n) = backends.BACKENDS[self.name], shape
        skip_without(self.name, recipe, is_batched=bool(batch))
        lhs, rhs = (quantized(recipe, i, normal(i, *batch, rows, k)) for i, rows in ((LHS, m), (RHS, n)))
        axes = tuple(range(len(batch)))
        numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (axes, axes))

        @jax.jit
        def multiplied(lhs, rhs):
            return backend.dot(lhs, rhs, numbers, out_dtype=out_dtype, precise=True)

        got = multiplied(lhs, rhs)
        a, b = (np.asarray(x.dequantize(), np.float64) for x in (lhs, rhs))
        expected, magnitude = a @ b.swapaxes(-1, -2), np.abs(a) @ np.abs(b).swapaxes(-1, -2)
        assert got.shape == expected.shape and got.dtype == out_dtype
        bound = (k + 4) * 2.0**-24 * magnitude + float(jnp.finfo(out_dtype).eps) * np.abs(expected)
        assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()

    def test_gemm_under_vmap(self, recipe):
        skip_without(self.name, recipe)
        lhs, rhs = (quantized(recipe, i, normal(i, rows, 256)) for i, rows in ((LHS, 32), (RHS, 48)))
        numbers = (((1,), (1,)), ((), ()))

        def multiplied(lhs, rhs):
            options = {"out_dtype": jnp.float32, "precise": True}
            return backends.BACKENDS[self.name].dot(lhs, rhs, numbers, **options)

        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), lhs)
        expected = jax.jit(multiplied)(lhs, rhs)
        for out in jax.jit(jax.vmap(multiplied, (0, None)))(stacked, rhs):
            np.testing.assert_allclose(out, expected, rtol=1e-6)

    def test_forward_and_backward(self, recipe):
        """All three GEMMs, against the products of dequantized operands in float64."""
        skip_without(self.name, recipe)
        x, w, g = normal(0, 128, 256), normal(1, 256, 384), normal(2, 128, 384)

        def product(x, w):
            options = {"recipe": recipe, "state": init_state(recipe), "backend": self.name}
            return dot_general(x, w, MATRICES, **options)

        @jax.jit
        def run(x, w, g):
            out, pull = jax.vjp(product, x, w)
            return out, *pull(g)

        rounded = lambda operand, x: np.asarray(quantized(recipe, operand, x).dequantize(), np.float64)  # noqa: E731
        expected = (
            rounded(LHS, x) @ rounded(RHS, w.T).T,
            rounded(GRAD, g) @ rounded(RHS, w).T,
            rounded(LHS, x.T) @ rounded(GRAD, g.T).T,
        )
        for got, want in zip(run(x, w, g), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())

    def test_report_names_it(self, recipe):
        skip_without(self.name, recipe)
        model = fp8jax.transform(lambda w, x: x @ w, recipe, backend=self.name)
        report = model.report(jnp.ones((128, 256)), jnp.ones((32, 128)))
        assert [row.backend for row in report.rows] == [self.name]
        *_, norms, last = str(report).splitlines()
        assert (norms, last) == (backends.BACKENDS[self.name].norms, f"backend: {self.name} (as asked for)")


class TestXla(Contract):
    name = "xla"


class TestTe(Contract):
    """`tests/test_backend_te.py` has more, and runs it on a CPU."""

    name = "te"
    runs_on = {"A100": False, "H100": True, "B200": True}


class TestPallas(Contract):
    name = "pallas"
    runs_on = {"A100": False, "H100": True, "B200": True}


class TestCudnn(Contract):
    name = "cudnn"
    runs_on = {"A100": False, "H100": False, "B200": True}


class TestReference(Contract):
    name = "reference"


# The table ########################################################################################


def test_every_backend_has_an_entry_a_file_and_a_test():
    folder = pathlib.Path(backends.__file__).parent
    files = [path for path in folder.glob("**/*.py") if "\nBACKEND = Backend(" in path.read_text()]
    names = {path.relative_to(folder).parts[0].removesuffix(".py") for path in files}
    assert names == set(backends.BACKENDS) == {each.name for each in Contract.__subclasses__()}


@pytest.mark.parametrize("field", ["gemms", "norms", "granularities", "dot", "calls"])
def test_half_a_backend_raises(field):
    fields = {**backends.BACKENDS["te"]._asdict()}
    del fields[field]
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{field}'"):
        Backend(**fields)


@pytest.mark.parametrize("preset", [name for name, recipe in PRESETS.items() if recipe.is_quantized])
def test_auto_has_a_backend_for_every_preset(preset):
    granularity = granularity_of(preset)
    choice = backends.choose("auto", granularity, device=B200)
    assert (
        granularity in backends.BACKENDS[choice.name].granularities
        and not backends.BACKENDS[choice.name].is_reference
    )


@pytest.mark.parametrize(
    "recipe, device, choice",
    [
        ("block", H100, ("pallas", "a Pallas kernel")),
        ("block,scaling=block_float32", B200, ("pallas", "a Pallas kernel")),
        ("mxfp8", B200, ("cudnn", "cuDNN, through jax.nn.scaled_matmul")),
        ("nvfp4", B200, ("cudnn", "cuDNN, through jax.nn.scaled_matmul")),
        ("block", Device("cpu", "cpu", None), ("pallas", "emulated on a CPU")),
        ("nvfp4", Device("cpu", "cpu", None), ("cudnn", "emulated on a CPU")),
    ],
)
def test_auto_is_the_backend_of_the_operands(recipe, device, choice):
    """The name is the one of the kernel, also where a CPU emulates it for a program that a GPU may run."""
    assert backends.choose("auto", granularity_of(recipe), device=device) == choice


def test_a_granularity_without_a_backend_raises():
    with pytest.raises(
        ValueError, match="auto cannot run here: no backend multiplies .* 1x64.* can: reference"
    ):
        backends.choose("auto", "1x64")


def test_an_unknown_name_raises():
    with pytest.raises(
        ValueError, match="expected auto or one of te, xla, pallas, cudnn, reference; got 'XLA'"
    ):
        backends.choose("XLA")


def test_choosing_a_tensor_backend_touches_no_device(monkeypatch):
    """A process may call `jax.distributed.initialize` after `transform`."""
    monkeypatch.setattr(Device, "here", None)
    if backends.why_not("te", device=B200):
        assert backends.choose("auto").name == "xla"
    assert backends.choose("xla").name == "xla"


@pytest.mark.parametrize(
    "given,expected",
    [
        ("", "--xla_gpu_enable_triton_gemm=false"),
        ("--xla_cpu_use_x=1", "--xla_cpu_use_x=1 --xla_gpu_enable_triton_gemm=false"),
        ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
    ],
)
def test_xla_is_told_to_keep_triton_from_gemms(monkeypatch, given, expected):
    monkeypatch.setenv("XLA_FLAGS", given)
    backends.xla.add_flag()
    assert os.environ["XLA_FLAGS"] == expected
    backends.xla.add_flag()
    assert os.environ["XLA_FLAGS"] == expected


def test_an_xla_that_may_lack_the_flag_is_not_given_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(backends.xla, "_LAST", (0, 9))
    backends.xla.add_flag()
    assert os.environ["XLA_FLAGS"] == ""


def test_importing_the_package_sets_the_flag():
    program = "import os, fp8jax; print(os.environ['XLA_FLAGS'])"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.stdout.strip() == "--xla_gpu_enable_triton_gemm=false", ended.stderr


WITHOUT_TRITON = """
import sys

for name in ("jax.experimental.pallas.triton", "jax._src.pallas.triton", "jax._src.lib.triton"):
    sys.modules[name] = None
import jax, jax.numpy as jnp
from fp8jax import backends
from fp8jax.dot import dot_general, init_state

def gemms(x, recipe):
    state = init_state(recipe)
    out, pull = jax.vjp(lambda x: dot_general(x, x, (((1,), (0,)), ((), ())), recipe=recipe, state=state), x)
    return out, pull(out)

run, x = jax.jit(gemms, static_argnums=1), jnp.ones((128, 128))
for recipe in ("block", "nvfp4"):
    assert jnp.all(run(x, recipe)[0] == 128)
for capability in ((9, 0), (10, 0)):
    print(backends.why_not("pallas", "1x128", device=backends.Device("a GPU", "gpu", capability)))
print("triton" in run.trace(x, "nvfp4").lower(lowering_platforms=("cuda",)).as_text())
"""


def test_without_pallas_for_triton():
    """JAX may drop it: a CPU and other kernels need none, and GPUs for which there is no other are told."""
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    hopper, blackwell, has_triton = ended.stdout.splitlines()
    assert (hopper, has_triton) == ("None", "False")
    assert re.fullmatch("this JAX has no Pallas for Triton, .*; use the recipe te", blackwell)


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize("triton,calls", [(False, 3), (True, 0)])
def test_with_triton_xla_multiplies_in_bfloat16(triton, calls):
    """The reason for the flag: when XLA has learned better, this test says so."""

    def loss(x, kernel):
        state = init_state("te")
        out = dot_general(x, kernel, MATRICES, recipe="te", state=state)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    operands = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)] * 2
    lowered = targets.lower_for(jax.grad(loss, (0, 1)), *operands, target="h100")
    compiled = targets.compile(lowered, "h100", xla_gpu_enable_triton_gemm=triton)
    assert str(compiled.as_text()).count(f'custom_call_target="{backends.xla.FP8_CALL}"') == calls


@pytest.mark.parametrize(
    "device, says",
    [
        (A100, "dequantizes .* 8.0 has no GEMMs"),
        (H100, "its Triton .* XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"),
    ],
)
def test_a_gpu_that_multiplies_in_high_precision_is_told(monkeypatch, device, says):
    monkeypatch.setattr(backends.xla, "_computes_fp8", lambda: False)
    assert backends.xla.why_not_fp8(Device("cpu", "cpu", None)) is None
    reason = backends.xla.why_not_fp8(device)
    monkeypatch.setattr(Device, "here", classmethod(lambda cls: device))
    assert reason in backends.notes([backends.ChosenBackend("xla", "")])
    assert reason not in backends.notes([backends.ChosenBackend("pallas", "")])
    operand = quantized("te,scaling=current", LHS, normal(0, 32, 32))
    with pytest.warns(UserWarning, match=says):
        backends.xla._dot_on_gpu(
            operand, operand, dimension_numbers=MATRICES, out_dtype=jnp.bfloat16, precise=False
        )
    monkeypatch.setattr(backends.xla, "_computes_fp8", lambda: True)
    assert (backends.xla.why_not_fp8(device) is None) == (device is H100)
