"""The libraries that a recipe can run on in torch: what each expresses, where, how it is called and chosen.

torchao is here and runs. In the place of MS-AMP and TransformerEngine, which need a GPU, stand those of
`released.py`.
"""

import copy
import dataclasses
import sys
import types

import pytest
import torch
from fp8jax_torch import backends, blocks, layers, prepare, report, transform
from fp8jax_torch.backends import base, msamp, te, torchao
from fp8jax_torch.gemm import why_no_fp8
from fp8jax_torch.mixins import unmixed
from released import TE, Format, fake_msamp, fake_te
from torch import nn
from torch.nn import functional

from fp8jax.recipe import Recipe
from fp8jax.rewrite import rules

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CURRENT = Recipe.parse("te,scaling=current")


@pytest.fixture
def absent(monkeypatch):
    """Neither MS-AMP nor TransformerEngine, whatever is installed here."""
    for name in ("msamp", "transformer_engine", "transformer_engine.common.recipe"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def native(monkeypatch):
    """A backend that always can, in native's place."""
    module = types.ModuleType("fp8jax_torch.backends.native")
    module.NAME, module.supports, module.refuses = "native", lambda device=None: None, lambda recipe: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    """Sets what torch says of the GPU."""

    def set_to(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return set_to


class Block(nn.Module):
    """One layer of each kind that a backend has to think about."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.odd = nn.Linear(16, 10)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.no_bias = nn.LayerNorm(16, bias=False)
        self.no_affine = nn.LayerNorm(16, elementwise_affine=False)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.down(functional.gelu(self.up(x))) + self.odd(x).mean(-1, keepdim=True)
        return self.lm_head(self.no_affine(self.no_bias(x)))


def block():
    torch.manual_seed(0)
    return Block()


TOKENS = torch.arange(32).reshape(2, 16)


def sqnr(right, got):
    """Signal to noise in dB."""
    right, got = right.detach(), got.detach()
    return float(10 * torch.log10(right.square().sum() / (right - got).square().sum()))


# Layers and patterns.


@pytest.mark.parametrize(
    "pattern, path, is_match",
    [
        ("c_attn", "h/0/attn/c_attn", True),
        ("c_*", "h/0/attn/c_attn", True),
        ("h", "h/0/attn/c_attn", False),
        ("h/0/*", "h/0/attn/c_attn", True),
        ("h/1/*", "h/0/attn/c_attn", False),
        ("*/attn/*", "h/0/attn/c_attn", True),
        ("re:h/[0-9]/attn/.*", "h/0/attn/c_attn", True),
        ("re:attn", "h/0/attn/c_attn", False),
        ("C_attn", "c_attn", False),
        ("*", "", True),
    ],
)
def test_patterns(pattern, path, is_match):
    assert rules.matches(pattern, path) is is_match


def test_patterns_choose_layers():
    recipe = dataclasses.replace(Recipe.TE, include=("h/*",), exclude=("*_proj",))
    model = nn.ModuleDict({"h": nn.ModuleDict({"fc": nn.Linear(2, 2), "c_proj": nn.Linear(2, 2)})})
    model["out"] = nn.Linear(2, 2)
    reasons = layers.choose(model, recipe, lambda module: None)
    assert reasons == {"h/fc": None, "h/c_proj": "exclude=*_proj", "out": "not in include=h/*"}
    assert set(layers.choose(model, Recipe.BF16, lambda module: None).values()) == {"gemm=BF16"}


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_pattern_without_a_layer(field):
    recipe = dataclasses.replace(Recipe.TE, **{field: ("*", "qkv")})
    with pytest.raises(
        ValueError, match=f"the {field} pattern 'qkv' matches no layer; the layers are odd, up"
    ):
        layers.choose(block(), recipe, lambda module: None)
    layers.choose(block(), Recipe.TE, lambda module: None)  # the default exclude need not match


def test_conv1d_is_a_linear_layer():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 3)
    assert layers.is_conv1d(conv1d) and layers.is_linear(conv1d)
    assert not layers.is_linear(nn.Conv1d(4, 3, 1))
    assert layers.is_linear(nn.Linear(3, 4)) and not layers.is_conv1d(nn.Linear(3, 4))


def test_rows():
    recipe = dataclasses.replace(Recipe.TE, exclude=())
    rows = base.plan("any", block(), recipe, lambda module: None, base.no_gemm)
    assert [(row.path, row.kind, row.shape) for row in rows] == [
        ("embed", "Embedding", (32, 16)),
        ("norm", "LayerNorm", (16,)),
        ("odd", "Linear", (10, 16)),
        ("up", "Linear", (32, 16)),
        ("down", "Linear", (16, 32)),
        ("no_bias", "LayerNorm", (16,)),
        ("no_affine", "LayerNorm", ()),
        ("lm_head", "Linear", (32, 16)),
    ]
    assert all(row.fp8 == (row.kind == "Linear") == (row.reason is None) for row in rows)


def test_unusual_linear_layers_are_left_alone():
    class Gated(nn.Linear):
        def forward(self, x):
            return super().forward(x).sigmoid()

    hooked, replaced = nn.Linear(16, 16), nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *args: None)
    replaced.forward = lambda x: x
    for module, says in [
        (Gated(16, 16), "overrides forward"),
        (hooked, "hooks"),
        (replaced, "forward was replaced"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), "computed from others"),
        (nn.LazyLinear(16), "before its first call"),
        (nn.MultiheadAttention(16, 2).out_proj, "does not call it"),
    ]:
        assert says in layers.why_not_replaced(module, "a library")
    assert layers.why_not_replaced(nn.Linear(16, 16), "a library") is None


# What each backend expresses.

REFUSED = [
    (te, "O1", "te has no comm=FP8, only FP32"),
    (te, "bf16", "te has no gemm=BF16, only FP8"),
    (te, "te,comm=BF16", "te has no comm=BF16"),
    (te, "te,moments=E4M3+FP16", "te has no moments=E4M3+FP16, only FP32+FP32"),
    (te, "te,weight=FP16", "te has no weight=FP16"),
    (te, "te,weight_grad=E4M3", "te has no weight_grad=E4M3"),
    (te, "te,interval=2", "te has no interval=2 since transformer_engine 1.8, only 1"),
    (
        te,
        "te,override_linear_precision=False+False+True",
        "only False+False+False, since transformer_engine 2.0",
    ),
    (te, "te,scaling=current,margin=1", "te has no margin=1, only 0, with scaling=current"),
    (msamp, "te", "msamp has no weight=FP32, only FP16"),
    (msamp, "O1,comm=FP32", "msamp has no comm=FP32, only FP8"),
    (msamp, "O3", "msamp has no weight=E4M3, only FP16"),
    (msamp, "O2,weight_grad=FP32", "msamp has no weight_grad=FP32"),
    (msamp, "O2,scaling=current", "msamp has no scaling=current, only delayed"),
    (msamp, "te+O2,interval=2", "msamp has no interval=2"),
    (msamp, "fp32", "msamp has no gemm=FP32"),
    (torchao, "te", "torchao has no scaling=delayed, only current"),
    (torchao, "te,scaling=current,margin=1", "torchao has no margin=1, only 0"),
    (torchao, "O2,scaling=current", "torchao has no comm=FP8"),
    (torchao, "te,scaling=current,weight=FP16", "torchao has no weight=FP16"),
    (torchao, "block", "torchao has no scaling=block, only current or mxfp8 or block_float32 or nvfp4"),
    (torchao, "mxfp8,fp8_format=HYBRID", "torchao has no fp8_format=HYBRID, only E4M3"),
    (
        torchao,
        "mxfp8,override_linear_precision=True+False+False",
        "has no override_linear_precision=True",
    ),
    (
        torchao,
        "nvfp4,override_linear_precision=False+False+True",
        "has no override_linear_precision=False",
    ),
    (torchao, "nvfp4,fp4_options=2d", "torchao has no fp4_options=2d, only hadamard+stochastic+2d"),
    (torchao, "mxfp8+O2", "torchao has no comm=FP8"),
    (te, "mxfp8", "te has no scaling=mxfp8, only delayed or current"),
    (te, "nvfp4", "te has no gemm=FP4"),
    (msamp, "block+O2", "msamp has no scaling=block, only delayed"),
]
ACCEPTED = [
    (te, "te"),
    (te, "te,fp8_format=E4M3,margin=2,amax_history_len=16,amax_compute_algo=most_recent,first_scale=one"),
    (te, "te,scaling=current,fp8_format=E4M3,include=h/*,exclude="),
    (msamp, "O1"),
    (msamp, "O2,exclude=head"),
    (msamp, "te+O2"),
    (msamp, "te+O2,moments=FP32+FP32"),
    (msamp, "O2,margin=1"),
    (torchao, "te,scaling=current"),
    (torchao, "te,scaling=current,fp8_format=E4M3,override_linear_precision=False+True+True"),
    (torchao, "te,scaling=current,amax_history_len=7"),
    (torchao, "mxfp8"),
    (torchao, "mxfp8,override_linear_precision=False+False+True"),
    (torchao, "block,scaling=block_float32"),
    (torchao, "nvfp4"),
]


@pytest.mark.parametrize("backend, recipe, says", REFUSED)
def test_refused_recipes(absent, backend, recipe, says):
    assert says in backend.refuses(Recipe.parse(recipe))


@pytest.mark.parametrize("backend, recipe", ACCEPTED)
def test_accepted_recipes(absent, backend, recipe):
    assert backend.refuses(Recipe.parse(recipe)) is None


def test_msamp_uses_te(absent):
    assert [
        msamp.uses_te(Recipe.parse(r)) for r in ("O1", "O2", "te+O2", "O2,amax_compute_algo=most_recent")
    ] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "version, refused",
    [
        ("1.1", "te,scaling=current"),
        ("1.1", "te,override_linear_precision=True+False+False"),
        ("1.13", "te,interval=2"),
        ("2.8", "te,override_linear_precision=False+False+True"),
        ("2.18", "te,interval=2"),
    ],
)
def test_te_versions(monkeypatch, version, refused):
    fake_te(monkeypatch, version)
    assert te.refuses(Recipe.parse(refused)).startswith("te has no ")
    for accepted in {
        "1.1": ["te,interval=2", "te,override_linear_precision=False+False+True"],
        "1.13": ["te,override_linear_precision=False+False+True"],
    }.get(version, ["te,scaling=current"]):
        assert te.refuses(Recipe.parse(accepted)) is None


# Where each runs.


def test_hardware_is_named(monkeypatch, gpu):
    fake_te(monkeypatch, "2.18")
    fake_msamp(monkeypatch)
    assert te.supports(CPU) == "transformer_engine needs a CUDA device; got cpu"
    assert msamp.supports(CPU) == "msamp needs a CUDA device; got cpu"
    assert torchao.supports(CPU) is None
    gpu("NVIDIA A100", (8, 0))
    for backend in (te, msamp, torchao):
        assert "needs compute capability 8.9 or higher; got 8.0 (NVIDIA A100)" in backend.supports(CUDA)
    gpu("NVIDIA H200", (9, 0))
    assert te.supports(CUDA) is None
    assert 'has "h100" in it; got NVIDIA H200' in msamp.supports(CUDA)
    gpu("NVIDIA H100 80GB HBM3", (9, 0))
    assert msamp.supports(CUDA) is None and torchao.supports(CUDA) is None


@pytest.mark.parametrize("version", TE)
def test_te_own_reason(monkeypatch, gpu, version):
    fake_te(monkeypatch, version, available=False)
    gpu("NVIDIA L4", (8, 9))
    assert te.supports(CUDA) == "transformer_engine says: CUDA is too old."


def test_install_hint(absent, gpu):
    gpu("NVIDIA H100", (9, 0))
    assert "pip install" in te.supports(CUDA) and "transformer_engine[pytorch]" in te.supports(CUDA)
    assert "github.com/Azure/MS-AMP" in msamp.supports(CUDA)


def test_failed_import_is_a_reason(monkeypatch, tmp_path, gpu):
    (tmp_path / "msamp.py").write_text("raise OSError('libmsamp_dist.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "msamp", raising=False)
    gpu("NVIDIA H100", (9, 0))
    assert "cannot be imported (libmsamp_dist.so: cannot open)" in msamp.supports(CUDA)


# The choosing.


def test_auto_without_a_library(absent, native):
    assert backends.choose("auto", Recipe.TE, CPU) == (
        native,
        "native: msamp is not installed; transformer_engine is not installed",
    )


def test_auto_order(monkeypatch, absent, native, gpu):
    gpu("NVIDIA H100", (9, 0))
    fake_te(monkeypatch, "2.18")
    assert backends.choose("auto", Recipe.TE, CUDA) == (te, "te: msamp is not installed")
    fake_msamp(monkeypatch)
    assert backends.choose("auto", Recipe.O2, CUDA) == (msamp, "msamp: the first choice")
    module, why = backends.choose("auto", Recipe.TE, CUDA)
    assert module is te and "msamp has no weight=FP32" in why
    module, why = backends.choose("auto", Recipe.O3, CUDA)
    assert module is native and "msamp has no weight=E4M3" in why and "te has no comm=FP8" in why
    module, why = backends.choose("auto", Recipe.O2, CPU)
    assert module is native and "msamp needs a CUDA device; got cpu; te has no comm=FP8" in why


def test_auto_imports_only_what_the_recipe_needs(monkeypatch, tmp_path, native, gpu):
    (tmp_path / "msamp.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "msamp", raising=False)
    gpu("NVIDIA H100", (9, 0))
    _, why = backends.choose("auto", CURRENT, CPU)
    assert "msamp has no weight=FP32" in why


def test_named_backend(monkeypatch, absent, native, gpu):
    assert backends.choose("torchao", CURRENT, CPU) == (torchao, "torchao: asked for")
    assert backends.choose("native", CURRENT, CPU)[0] is native
    with pytest.raises(ImportError, match="'msamp' cannot run here: msamp is not installed. Get it with"):
        backends.choose("msamp", Recipe.O2, CPU)
    with pytest.raises(
        ValueError, match="'torchao' cannot express the recipe te: torchao has no scaling=delayed"
    ):
        backends.choose("torchao", Recipe.TE, CPU)
    fake_te(monkeypatch, "2.18")
    gpu("NVIDIA A100", (8, 0))
    with pytest.raises(RuntimeError, match="'te' cannot run here: .*needs compute capability 8.9 .* got 8.0"):
        backends.choose("te", Recipe.TE, CUDA)
    with pytest.raises(ValueError, match="expected one of auto, msamp, te, torchao, native; got 'TE'"):
        backends.choose("TE", Recipe.TE, CPU)
    native.refuses = lambda recipe: "native has no such thing"
    with pytest.raises(ValueError, match="native has no such thing. Change the recipe.$"):
        backends.choose("auto", Recipe.O2, CPU)


# TransformerEngine.


@pytest.mark.parametrize("version", TE)
def test_te_prepare(monkeypatch, version):
    entered = fake_te(monkeypatch, version)
    model = block()
    expected, parameters, names = model(TOKENS), dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = te.prepare(model, optimizer, Recipe.te(margin=1, amax_history_len=16))
    reasons = {row.path: row.reason for row in prepared.rows}
    assert [row.path for row in prepared.rows if row.fp8] == ["up", "down"]
    assert "dims [10, 16] are not all multiples of 16" in reasons["odd"]
    assert reasons["lm_head"] == "exclude=lm_head"
    assert reasons["norm"].endswith("te.LayerNorm")
    assert reasons["no_bias"].endswith("still, without a bias")
    assert reasons["no_affine"].endswith("still, without a weight")
    assert type(model.no_bias) is nn.LayerNorm and model.no_bias.bias is None
    assert {type(getattr(model, name)).__module__ for name in ("up", "down", "norm")} == {"released"}
    # The same objects: the optimizer, the tied head and a checkpoint see what they saw.
    now = dict(prepared.model.named_parameters())
    state = prepared.model.state_dict()
    assert names == [name for name in state if not name.endswith("_extra_state")] != list(state)
    assert prepared.model.load_state_dict(block().state_dict()).missing_keys == []
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert prepared.optimizer is optimizer
    before = model.up.weight.clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    assert torch.equal(model.up.weight, before) and optimizer.skipped == 1

    # E4M3 has 4 significant bits: an operand's error is at most 6%.
    error = torch.linalg.norm(prepared.model(TOKENS) - expected) / torch.linalg.norm(expected)
    assert 0.001 < error < 0.1
    [given] = entered
    newer = "autocast" in TE[version]
    assert given["by"] == ("autocast" if newer else "fp8_autocast") and given["enabled"] is True
    recipe = given["recipe" if newer else "fp8_recipe"]
    assert (recipe.margin, recipe.amax_history_len, recipe.fp8_format) == (1, 16, Format.HYBRID)
    assert "scale 1" in prepared.note


def test_te_autocast_of_a_bare_linear(monkeypatch):
    entered = fake_te(monkeypatch, "2.18")
    prepared = te.prepare(nn.Linear(16, 32), None, CURRENT)
    assert unmixed(type(prepared.model)).__module__ == "released" and prepared.note == ""
    with pytest.raises(RuntimeError):
        prepared.model(torch.ones(3, 7))
    prepared.model(torch.ones(3, 16))
    copy.deepcopy(prepared.model)(torch.ones(3, 16))
    assert len(entered) == 3 and type(entered[0]["recipe"]).__name__ == "Float8CurrentScaling"
    with pytest.raises(AssertionError, match="not under the autocast"):
        prepared.model.forward(torch.ones(3, 16))


def test_te_old_fields(monkeypatch):
    entered = fake_te(monkeypatch, "1.1")
    recipe = Recipe.te(
        interval=4, override_linear_precision=(False, False, True), amax_compute_algo="most_recent"
    )
    te.prepare(nn.Linear(16, 32), None, recipe).model(torch.ones(3, 16))
    said = entered[0]["fp8_recipe"]
    assert (said.interval, said.amax_compute_algo) == (4, "most_recent")
    assert said.override_linear_precision.wgrad and not said.override_linear_precision.fprop


@pytest.mark.parametrize("backend, recipe", [(te, Recipe.TE), (torchao, CURRENT)])
def test_layer_in_two_places(monkeypatch, backend, recipe):
    fake_te(monkeypatch, "2.18")
    shared = nn.Linear(16, 16)
    model = backend.prepare(nn.Sequential(shared, nn.ReLU(), shared), None, recipe).model
    assert shared not in (model[0], model[2])
    assert model[0].weight is model[2].weight is shared.weight


@pytest.mark.parametrize("backend, recipe", [(te, Recipe.TE), (torchao, CURRENT), (msamp, Recipe.O2)])
def test_model_without_an_fp8_layer(monkeypatch, backend, recipe):
    fake_te(monkeypatch, "2.18")
    fake_msamp(monkeypatch)
    model = nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(16, 16), nn.LayerNorm(16))
    with pytest.raises(ValueError, match=f"^{backend.NAME}: expected a layer .*0: Conv1D keeps .*native"):
        backend.prepare(model, None, recipe)


def test_auto_passes_over_a_library_without_a_layer(monkeypatch, absent, native, gpu):
    fake_te(monkeypatch, "2.18")
    gpu("NVIDIA H200", (9, 0))
    model = nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(16, 16))
    module, why = backends.choose("auto", Recipe.TE, CUDA, model)
    assert module is native and why.endswith("; te can take no layer of the model")
    assert backends.choose("auto", Recipe.TE, CUDA, block())[0] is te


# MS-AMP.


@pytest.mark.parametrize("recipe, level", [(Recipe.O1, "O1"), (Recipe.O2, "O2")])
def test_msamp_level(monkeypatch, recipe, level):
    [calls, model] = fake_msamp(monkeypatch), block()
    optimizer = torch.optim.AdamW(
        [{"params": [model.up.weight, model.embed.weight], "lr": 0.1}, {"params": [model.up.bias]}]
    )
    before = copy.deepcopy(optimizer.state_dict())
    prepared = msamp.prepare(model, optimizer, dataclasses.replace(recipe, exclude=("odd",)))
    [given] = calls
    assert (given["opt_level"], given["use_te"], given["model"]) == (level, False, model)
    reasons = {row.path: row.reason for row in prepared.rows}
    assert [row.path for row in prepared.rows if row.fp8] == ["up", "down"]
    assert reasons["lm_head"] == "its weight is also the weight of embed, and MS-AMP would separate the two"
    assert (
        model.odd.use_fp32_linear
        and model.lm_head.use_fp32_linear
        and not hasattr(model.up, "use_fp32_linear")
    )
    made = prepared.optimizer
    assert made is not optimizer and [group["lr"] for group in made.param_groups] == [0.1, 1e-3]
    assert made.given["exp_avg_dtype"] == (torch.uint8 if level == "O2" else torch.float32)
    assert made.use_adam is False and made.given["weight_decay"] == 1e-2
    assert optimizer.state_dict() == before and "fused" in optimizer.defaults
    assert "all_reduce_grads" in prepared.note


def test_msamp_layer_in_two_places(monkeypatch):
    fake_msamp(monkeypatch)
    shared = nn.Linear(16, 16)
    rows = msamp.prepare(nn.Sequential(shared, nn.Linear(16, 16), shared), None, Recipe.O2).rows
    assert [row.fp8 for row in rows] == [False, True] and "more than one place" in rows[0].reason


def test_msamp_combined_with_te(monkeypatch):
    entered = fake_te(monkeypatch, "1.1")
    calls, model = fake_msamp(monkeypatch), block()
    prepared = msamp.prepare(model, torch.optim.Adam(model.parameters()), Recipe.TE_O2)
    assert (calls[0]["opt_level"], calls[0]["use_te"]) == ("O2", True)
    assert [row.path for row in prepared.rows if row.fp8] == ["up", "down"]
    assert type(model.up).__module__ == "released" and prepared.optimizer.use_adam is True
    prepared.model(TOKENS)
    assert entered[0]["fp8_recipe"].amax_history_len == 1024


def test_msamp_refuses_optimizers(monkeypatch):
    calls, model = fake_msamp(monkeypatch), block()
    with pytest.raises(ValueError, match="takes torch.optim.Adam or AdamW; got SGD"):
        msamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), Recipe.O2)
    with pytest.raises(ValueError, match="amsgrad"):
        msamp.prepare(model, torch.optim.Adam(model.parameters(), amsgrad=True), Recipe.O2)
    stepped = torch.optim.AdamW(model.parameters())
    model(TOKENS).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="has stepped already"):
        msamp.prepare(model, stepped, Recipe.O2)
    assert calls == []
    assert "made the optimizer" in msamp.prepare(block(), None, Recipe.O2).note


# The arithmetic of the layers: torchao's own, and that of TransformerEngine's stand-in.


def products(linear, x, g):
    """Output, input gradient, weight gradient."""
    x = x.clone().requires_grad_()
    y = linear(x)
    return [y, *torch.autograd.grad(y, [x, linear.weight], g)]


@pytest.fixture
def gaussian():
    """A layer, an input and an output gradient."""
    torch.manual_seed(0)
    return nn.Linear(256, 128, bias=False), torch.randn(64, 256), torch.randn(64, 128)


@pytest.mark.parametrize("fp8_format, least", [("HYBRID", (25, 21, 21)), ("E4M3", (25, 25, 25))])
@pytest.mark.parametrize("backend, recipe", [(te, Recipe.TE), (torchao, CURRENT)])
def test_all_three_gemms_are_in_fp8(monkeypatch, gaussian, backend, recipe, fp8_format, least):
    """E4M3xE4M3 of Gaussians has 28.6 dB, E5M2xE4M3 24.6. With one operand in high precision it were 31.6."""
    fake_te(monkeypatch, "2.18")
    linear, x, g = gaussian
    prepared = backend.prepare(
        copy.deepcopy(linear), None, dataclasses.replace(recipe, fp8_format=fp8_format)
    )
    found = [sqnr(*pair) for pair in zip(products(linear, x, g), products(prepared.model, x, g), strict=True)]
    assert all(low <= db < low + 5 for low, db in zip(least, found, strict=True)), found
    assert ("emulates" in prepared.note) == (backend is torchao)


@pytest.mark.parametrize("override", [(True, False, False), (False, True, False), (False, True, True)])
def test_torchao_override_linear_precision(gaussian, override):
    linear, x, g = gaussian
    recipe = dataclasses.replace(CURRENT, override_linear_precision=override)
    got = products(torchao.prepare(copy.deepcopy(linear), None, recipe).model, x, g)
    found = [sqnr(*pair) for pair in zip(products(linear, x, g), got, strict=True)]
    assert tuple(db > 100 for db in found) == override


def test_torchao_trains():
    def train(model, optimizer):
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten().roll(-1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = block()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    model = block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = torchao.prepare(model, optimizer, dataclasses.replace(CURRENT, exclude=("odd",)))
    assert [row.path for row in prepared.rows if row.fp8] == ["up", "down", "lm_head"]
    assert prepared.optimizer is optimizer and model.lm_head.weight is model.embed.weight
    found = train(prepared.model, prepared.optimizer)
    assert found[-1] < found[0] / 2
    assert found == pytest.approx(expected, rel=0.05)
    assert found != expected


def test_torchao_defaults_stay():
    from torchao.float8 import Float8LinearConfig

    torchao.prepare(nn.Linear(16, 16), None, dataclasses.replace(CURRENT, fp8_format="E4M3"))
    assert Float8LinearConfig().cast_config_grad_output.target_dtype == torch.float8_e5m2


def bf16(bias=True):
    return nn.Linear(128, 256, bias=bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8,override_linear_precision=False+False+True"])
def test_torchaos_mxfp8_is_native(recipe):
    """torchao's emulation and native's: output and gradients but for the order of sums."""
    torch.manual_seed(0)
    plain, x, g = nn.Linear(96, 64), torch.randn(2, 32, 96), torch.randn(2, 32, 64)
    results = []
    for backend in ("torchao", "native"):
        model = transform(plain, recipe, backend)
        inputs = x.clone().requires_grad_()
        y = model(inputs)
        y.backward(g)
        results.append((y, inputs.grad, model.weight.grad, model.bias.grad))
    assert type(transform(plain, recipe, "torchao")).__name__ == "MXFP8Linear"
    for theirs, ours in zip(*results, strict=True):
        assert sqnr(ours.double(), theirs.double()) > 100


def test_torchaos_mxfp8_trains():
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer = prepare(model, optimizer, "mxfp8", "torchao")
    rows = {row.path: row.reason for row in report(model).rows}
    assert rows == {"0": None, "2": None, "3": "its dims [10, 32] are not all multiples of 32"}
    x, y, losses = torch.randn(64, 64), torch.randn(64, 10), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_torchaos_block_layers(monkeypatch, gpu):
    """Where they run, and how they are made; none of them runs on a CPU."""
    for recipe, name in (("block,scaling=block_float32", "Float8BlockwiseLinear"), ("nvfp4", "NVFP4Linear")):
        with pytest.raises(base.NoLayer, match=f"{name} needs a CUDA device; got cpu"):
            transform(bf16(), recipe, "torchao")
    gpu("NVIDIA H100", (9, 0))
    module = types.ModuleType("torchao.prototype.blockwise_fp8_training.linear")
    module.Float8BlockwiseLinear = types.SimpleNamespace(from_float=nn.Sequential)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    layer = types.SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16, device="meta"), bias=None)
    monkeypatch.setattr(torchao, "why_no_fp8", lambda *args: why_no_fp8(args[0], CUDA, args[2]))
    reasons = {}
    for scaling in torchao._LAYERS:
        reasons[scaling] = torchao._why_no_blocks(layer, scaling)
    assert reasons.pop("block_float32") is None
    assert {why.partition(" ")[2] for why in reasons.values()} == {
        "needs compute capability 10.0 or higher; got 9.0 (NVIDIA H100)"
    }
    old, scaling = bf16(bias=False), "block_float32"
    assert "has no bias" in torchao._why_no_blocks(bf16(), scaling)
    why = torchao._why_no_blocks(nn.Linear(128, 128, bias=False), scaling)
    assert why == "Float8BlockwiseLinear computes in bfloat16, and its weight is torch.float32"
    [inside] = torchao._replaced(old, Recipe.parse("block,scaling=block_float32"), emulate=False)
    assert inside is old


def test_torchaos_block_layers_are_of_the_recipe(monkeypatch):
    old = bf16()
    new = torchao._replaced(old, Recipe.NVFP4, emulate=False)
    assert type(new).__name__ == "NVFP4Linear" and new.weight is old.weight and new.bias is old.bias
    assert list(new.rht_sign_vector) == blocks.SIGNS.tolist()
    wgrad = dataclasses.replace(Recipe.MXFP8, override_linear_precision=(False, False, True))
    for recipe, emulate in ((Recipe.MXFP8, False), (wgrad, True)):
        new = torchao._replaced(old, recipe, emulate=emulate)
        assert new.weight is old.weight and new.bias is old.bias
        assert new.kernel_preference.name == ("EMULATED" if emulate else "AUTO")
        assert new.wgrad_with_hp is emulate and new.scale_calculation_mode.name == "RCEIL"
