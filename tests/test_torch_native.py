"""The native torch backend: its products against JAX's, TransformerEngine's numbers and torchao, its loop."""

import copy
import importlib
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fp8jax_torch import casts, dequantize, gemm, prepare, report, transform
from fp8jax_torch.gemm import GEMMS, WGRAD, Operand, why_emulated
from fp8jax_torch.matmul import matmul
from fp8jax_torch.optim.entries import entry_of
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize, value
from fp8jax_torch.scaling import ScalingState
from torch import nn

import fp8jax
from fp8jax import Recipe, formats
from fp8jax.dot import dot_general, init_state
from fp8jax.scaling import GRAD, LHS, RHS

DATA = np.load(pathlib.Path(__file__).parent / "data" / "te.npz")
LEVELS = ("fp32", "bf16", "fp16_amp", "te", "te,scaling=current", "O1", "O2", "O3", "te+O2")
FP8_LEVELS = LEVELS[3:]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 64)
        self.norm = nn.LayerNorm(64)
        self.down = nn.Linear(64, 8, bias=False)
        self.lm_head = nn.Linear(8, 8)

    def forward(self, x):
        return self.lm_head(self.down(F.gelu(self.norm(self.up(x)))))


def batch(size=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 24, generator=generator), torch.randn(size, 8, generator=generator)


def train(model, optimizer, steps, x=None, y=None):
    if x is None:
        x, y = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# The product.

TE_CASES = {
    "delayed_hybrid_max_h4": Recipe.te(amax_history_len=4, first_scale="one"),
    "delayed_hybrid_recent_h4": Recipe.te(
        amax_history_len=4, amax_compute_algo="most_recent", first_scale="one"
    ),
    "delayed_e4m3_max_h8_margin1": Recipe.te("E4M3", margin=1, amax_history_len=8, first_scale="one"),
    "current_hybrid": Recipe.parse("te,scaling=current"),
}


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("case", TE_CASES)
def test_matmul_equals_transformer_engines(case, in_out):
    recipe = TE_CASES[case]
    state = ScalingState(recipe)
    for step in range(len(DATA[f"{case}/x"])):
        x, w, g = (torch.from_numpy(DATA[f"{case}/{name}"][step].copy()) for name in "xwg")
        x.requires_grad_()
        w = nn.Parameter(w if in_out else w.t().contiguous())
        y = matmul(x, w, state, in_out=in_out, dtype=torch.float32)
        y.backward(g)
        state.advance()
        dw = w.grad if in_out else w.grad.t()
        for name, got, rows in (("y", y, 4), ("dx", x.grad, 4), ("dw", dw, 6)):
            want = DATA[f"{case}/{name}"][step]
            # float32 sums of up to 64 products in another order.
            np.testing.assert_allclose(
                got.detach().numpy()[::rows], want, rtol=0, atol=70 * 2.0**-24 * max(np.abs(want).max(), 1e-9)
            )
        if recipe.scaling == "delayed":
            scales = [1 / DATA[f"{case}/state_{name}_scale"][step] for name in ("x", "kernel", "grad")]
            np.testing.assert_allclose(state.scale.numpy(), np.ravel(scales), rtol=1e-6)


RECIPES = (
    "te",
    "te,first_scale=one,amax_history_len=4",
    "te,interval=3,margin=2",
    "te,amax_compute_algo=most_recent,fp8_format=E4M3",
    "te,scaling=current,margin=1",
    "te,override_linear_precision=True+False+False",
    "te,override_linear_precision=False+True+True",
    "O2",
    "O3",
    "O2,scaling=current",
)
# Each column once; the others are compiled by the long tests.
QUICK = [(RECIPES[i], "float32") for i in (0, 2, 3, 6, 8)] + [("O2", "bfloat16")]


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *(
            pytest.param(recipe, dtype, marks=[] if (recipe, dtype) in QUICK else pytest.mark.long)
            for dtype in ("float32", "bfloat16")
            for recipe in RECIPES
        )
    ],
)
def test_matmul_equals_jaxs(recipe, dtype):
    row = Recipe.parse(recipe)
    numpy = np.random.default_rng(0)
    state, jax_state = ScalingState(row), init_state(row)
    layer = jax.jit(lambda *args: jax_product(row, dtype, *args))
    for step in range(5):
        x, w, g = (
            (10.0 ** (step - 2) * numpy.standard_normal(shape)).astype(np.float32)
            for shape in ((16, 48), (48, 32), (16, 32))
        )
        jax_x, jax_g = (jnp.asarray(a, dtype) for a in (x, g))
        jax_w, torch_w = jnp.asarray(w, dtype), torch.from_numpy(w).to(getattr(torch, dtype))
        if row.weight != "FP32":
            format = formats.get(row.weight)
            jax_w = fp8jax.quantize(jax_w, format, power_of_two=True)
            torch_w = quantize(torch_w, format, power_of_two=True)
        y, dx, dw, jax_state = layer(jax_x, jax_w, jax_g, jax_state)
        torch_x = torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_()
        weight = nn.Parameter(torch_w)
        out = matmul(torch_x, weight, state, in_out=True, dtype=getattr(torch, dtype))
        out.backward(torch.from_numpy(g).to(getattr(torch, dtype)))
        state.advance()
        assert is_scaled(weight.grad) == (row.weight_grad == "E4M3")
        # Sums of up to 48 exact products in another order, then one rounding to the dtype.
        error = 60 * 2.0**-24 if dtype == "float32" else 2.0**-8
        for name, got, want in (("y", out, y), ("dx", torch_x.grad, dx)):
            want = np.asarray(want, np.float32)
            got = got.detach().float().numpy()
            np.testing.assert_allclose(
                got, want, rtol=error, atol=error * np.abs(want).max(), err_msg=f"{name} of step {step}"
            )
        wide = np.asarray(dw, np.float32)
        coarse = 2.0**-3 if row.weight_grad == "E4M3" else error  # a code's step, where a tie went apart
        got = value(weight.grad).float().numpy()
        np.testing.assert_allclose(got, wide, rtol=coarse, atol=coarse * 2.0**-6 * np.abs(wide).max())
        assert (np.abs(got - wide) > error * np.abs(wide).max()).mean() <= 0.01
        if row.scaling == "delayed":
            # Operands that are the same have the same amaxes; the gradient's and the scales too.
            for name in ("scale", "amax_history", *(["step"] if row.interval > 1 else [])):
                want = np.asarray(jax_state[name])
                np.testing.assert_array_equal(getattr(state, name).numpy(), want)


def jax_product(recipe, dtype, x, w, g, state):
    matrices = (((1,), (0,)), ((), ()))
    scaled = isinstance(w, fp8jax.ScaledArray)

    def product(x, w, slot, state):
        kernel = fp8jax.dot.Weight(w, slot) if scaled else w
        return dot_general(x, kernel, matrices, recipe=recipe, state=state, out_dtype=jnp.dtype(dtype))

    if not scaled:
        y, pull = jax.vjp(lambda x, w, state: product(x, w, None, state), x, w, state)
        return (y, *pull(g))
    slot = fp8jax.dot.GradSlot.zeros(jnp.zeros(w.shape)) if recipe.weight_grad == "E4M3" else None
    y, pull = jax.vjp(lambda x, slot, state: product(x, w, slot, state), x, slot, state)
    dx, dslot, state = pull(g)
    return y, dx, dslot.gradient().dequantize(), state


@pytest.mark.parametrize("recipe", ["O2", "O2,override_linear_precision=True+False+False"])
def test_fp16_weights_of_a_bfloat16_model(recipe):
    """Their codes have more bits than bfloat16, and the GEMMs read all of them."""
    row, random = Recipe.parse(recipe), np.random.default_rng(0)
    x, w, g = (random.normal(size=shape).astype(np.float32) for shape in ((8, 48), (48, 32), (8, 32)))
    jax_w = fp8jax.quantize(w, "FP16", power_of_two=True).with_own_dtype(jnp.bfloat16)
    y, dx, *_ = jax_product(row, "float32", jnp.asarray(x), jax_w, jnp.asarray(g), init_state(row))
    q, x = quantize(torch.from_numpy(w), "FP16", power_of_two=True), torch.from_numpy(x).requires_grad_()
    weight = nn.Parameter(ScaledTensor(q.codes, q.scale, torch.bfloat16))
    out = matmul(x, weight, ScalingState(row), in_out=True, dtype=torch.float32)
    out.backward(torch.from_numpy(g))
    for got, want in ((out, y), (x.grad, dx)):
        np.testing.assert_allclose(got.detach(), want, atol=1e-4)
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("features", [40, 128])
@pytest.mark.parametrize("recipe", ["te", "block", "nvfp4"])
def test_outputs_are_written_in_place(recipe, features):
    """Also where the GEMM pads them."""
    plain = nn.Sequential(nn.Linear(64, features, bias=False), nn.ReLU())
    model = transform(nn.Sequential(plain[0], nn.ReLU(inplace=True)), recipe)
    x = torch.randn(16, 64, requires_grad=True)
    y = model(x)
    torch.testing.assert_close(y, transform(plain, recipe)(x), rtol=0, atol=0)
    y.sum().backward()
    assert x.grad is not None and x.grad.any()


@pytest.mark.parametrize("recipe", ["te", "te,scaling=current", "block", "mxfp8", "nvfp4", "O2"])
def test_other_number_of_features(recipe):
    """Padded to whole blocks, both operands could have the same size."""
    model = transform(nn.Sequential(nn.Linear(32, 8)), recipe)
    with pytest.raises(RuntimeError, match=r"`0`: expected an input with 32 features; got .*20"):
        model(torch.ones(4, 20))


def test_empty_batch():
    model = transform(nn.Linear(24, 8), "te")
    x = torch.zeros(0, 24, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 8)
    assert not model.weight.grad.any()


@pytest.mark.parametrize("shape", [(3, 20, 7), (16, 32, 48), (1, 5, 1), (4, 0, 8)])
@pytest.mark.parametrize("pairs", [*GEMMS, WGRAD[::-1]], ids=["fprop", "dgrad", "wgrad", "transposed"])
def test_scaled_mm_equals_the_emulation(pairs, shape, monkeypatch):
    """`torch._scaled_mm` runs on a CPU too, slowly."""
    shapes = {LHS: shape[:2], RHS: shape[1:], GRAD: shape[::2]}
    numbers = [torch.randn(shapes[operand]) for operand, _ in pairs]
    operands = [quantize(x, form) for x, form in zip(numbers, "E5M2 E4M3".split(), strict=True)]
    lhs, rhs = (Operand(q.codes, q.scale) for q in operands)
    sizes = lhs.contracted_last(*pairs[0]).data.shape[0], rhs.contracted_last(*pairs[1]).data.shape[0]
    emulated = gemm.gemm(lhs, rhs, pairs, sizes, torch.float32)
    monkeypatch.setattr(gemm, "why_emulated", lambda device: None)
    got = gemm.gemm(lhs, rhs, pairs, sizes, torch.float32)
    assert got.shape == emulated.shape == sizes
    torch.testing.assert_close(got, emulated, rtol=1e-5, atol=1e-5)


def test_why_emulated():
    assert why_emulated(torch.device("cpu")).endswith("emulated, exactly: FP8 needs a CUDA device; got cpu")


def sqnr(got, want):
    return float(10 * torch.log10((want**2).sum() / ((got - want) ** 2).sum()))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("recipe", ["te", "te,scaling=current", "O2"])
def test_accuracy_is_at_least_torchaos(recipe):
    """torchao scales by the tensor itself in each step; delayed scaling's first step does too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x = torch.randn(512, 256)
    plain = MLP()
    theirs = convert_to_float8_training(copy.deepcopy(plain), config=Float8LinearConfig(emulate=True))
    figures = {}
    for name, model in (("plain", plain), ("torchao", theirs), ("ours", transform(plain, recipe))):
        inputs = x.clone().requires_grad_()
        y = model(inputs)
        (y * torch.linspace(-1, 1, 256)).square().mean().backward()
        results = (y.detach(), inputs.grad, value(model.up.weight.grad))
        if name == "plain":
            exact = results
            continue
        figures[name] = [sqnr(got, want) for got, want in zip(results, exact, strict=True)]
    # O2 rounds the weight gradient once more, to E4M3. 0.1 dB is what chance does to so many roundings.
    compared = slice(2) if recipe == "O2" else slice(3)
    for got, want in zip(figures["ours"][compared], figures["torchao"][compared], strict=True):
        assert got >= want - 0.1, figures


# The model and its optimizer.


@pytest.mark.parametrize("level", LEVELS)
def test_levels_train(level):
    net = Net()
    plain = train(net_copy := copy.deepcopy(net), torch.optim.AdamW(net_copy.parameters(), 3e-3), 60)
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
    losses = train(model, optimizer, 60)
    assert losses[0] == pytest.approx(plain[0], rel=0.02)
    assert losses[-1] == pytest.approx(plain[-1], rel=0.08)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("level", LEVELS)
def test_recipe_columns_are_the_stored_formats(level):
    recipe = Recipe.parse(level)
    net = Net()
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
    train(model, optimizer, 1)
    state = optimizer.state[model.up.weight]
    stored = {
        "weight": model.up.weight.detach(),
        "weight_grad": model.up.weight.grad,
        "exp_avg": entry_of(state, "exp_avg"),
        "exp_avg_sq": entry_of(state, "exp_avg_sq"),
    }
    wanted = dict(zip(stored, (recipe.weight, recipe.weight_grad, *recipe.moments), strict=True))
    for name, tensor in stored.items():
        assert format_of(tensor) == wanted[name], name
    if recipe.master_weight != "-":
        assert format_of(entry_of(state, "master")) == recipe.master_weight
    # What is not of an FP8 layer stays float32, but for its moments.
    for parameter in (model.up.bias, model.norm.weight, model.lm_head.weight):
        assert not is_scaled(parameter)
        assert parameter.dtype == torch.float32
        assert format_of(entry_of(optimizer.state[parameter], "exp_avg")) == recipe.moments[0]


def format_of(x):
    return casts.format_of(x.codes.dtype if is_scaled(x) else x.dtype).name


def test_prepare_copies():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    before = copy.deepcopy(net.state_dict())
    train(*prepare(net, optimizer, "O2"), 3)
    assert type(net.up) is nn.Linear
    assert not optimizer.state
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    model, _ = prepare(net, optimizer, "O2", inplace=True)
    assert model is net
    assert is_scaled(net.up.weight)


def test_layers_stay_linear():
    net = Net()
    model, _ = prepare(net, None, "O2")
    assert isinstance(model.up, nn.Linear)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]


def test_prepared_optimizer_keeps_groups_and_state():
    net = Net()
    decayed = [net.up.weight, net.down.weight]
    others = [p for p in net.parameters() if not any(p is d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.3, "name": "decayed"}, {"params": others, "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, 3e-3, betas=(0.8, 0.95), eps=1e-6)
    train(net, optimizer, 3)
    model, own = prepare(net, optimizer, "O2")
    assert [group["lr"] for group in own.param_groups] == [3e-3, 1e-4]
    assert own.param_groups[0]["name"] == "decayed"
    assert own.param_groups[0]["weight_decay"] == 0.3
    assert own.param_groups[1]["betas"] == (0.8, 0.95)
    state, plain = own.state[model.up.weight], optimizer.state[net.up.weight]
    assert state["step"] == 3
    got = entry_of(state, "exp_avg").dequantize()
    torch.testing.assert_close(
        got, plain["exp_avg"], rtol=2**-4, atol=float(plain["exp_avg"].abs().max()) / 1e5
    )
    reference = train(net, optimizer, 10)
    assert train(model, own, 10)[-1] == pytest.approx(reference[-1], rel=0.05)


def test_groups_added_later_have_the_users_options():
    net = Net()
    for layer in (net.norm, net.lm_head):
        layer.requires_grad_(False)
    options = {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    trained = [*net.up.parameters(), *net.down.parameters()]
    model, own = prepare(net, torch.optim.AdamW(trained, **options), "O2")
    own.add_param_group({"params": model.lm_head.parameters(), "eps": 1e-5})
    assert {name: own.param_groups[1][name] for name in options} == {**options, "eps": 1e-5}


def test_weight_decay_of_adam_and_adamw():
    net = Net()
    _, own = prepare(net, torch.optim.Adam(net.parameters(), weight_decay=0.1), "O2")
    assert not own.decoupled
    _, own = prepare(net, torch.optim.AdamW(net.parameters()), "O2")
    assert own.decoupled


@pytest.mark.parametrize("level", ["te", "O1"])
def test_other_optimizers_stay(level):
    net = Net()
    model, optimizer = prepare(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), level)
    assert isinstance(optimizer, torch.optim.SGD)
    losses = train(model, optimizer, 40)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"foreach": True}], ids=str)
def test_momentum_of_sgd_is_float32(options):
    """torch's SGD begins it as a clone of the gradient, which is in E4M3."""
    net = Net()
    model, optimizer = prepare(net, torch.optim.SGD(net.parameters(), 0.1, 0.9, **options), "O1")
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), 0.1, 0.9, **options)
    for step in range(4):
        optimizer.zero_grad()
        F.mse_loss(model(batch()[0]), batch()[1]).backward()
        assert is_scaled(model.up.weight.grad)
        for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
            twin.grad = value(parameter.grad).clone()
        optimizer.step()
        reference.step()
        for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(value(parameter), value(twin)), step
    assert not any(is_scaled(state["momentum_buffer"]) for state in optimizer.state.values())


def test_refused_arguments():
    net = Net()
    with pytest.raises(ValueError, match=r"`optimizer`: expected an Adam or AdamW.*got SGD"):
        prepare(net, torch.optim.SGD(net.parameters(), 0.1), "O2")
    with pytest.raises(ValueError, match="expected amsgrad=False"):
        prepare(net, torch.optim.AdamW(net.parameters(), amsgrad=True), "O2")
    with pytest.raises(ValueError, match="only parameters of the model"):
        prepare(net, torch.optim.AdamW(Net().parameters()), "O2")
    message = "got a Net that was prepared already. Give the original model, or `fp8jax_torch.dequantize"
    with pytest.raises(ValueError, match=message):
        prepare(prepare(net, None, "O2")[0], None, "O2")
    with pytest.raises(ValueError, match="got a Sequential with a Net in it that was prepared already"):
        transform(nn.Sequential(transform(net, "te"), nn.Linear(8, 8)), "te")
    both = nn.Sequential(transform(net, "te"), nn.Linear(8, 8))
    assert report(transform(dequantize(both), "te"))
    with pytest.raises(ValueError, match="pattern 'nowhere' matches no layer"):
        prepare(net, None, "O2,include=nowhere")
    with pytest.raises(ValueError, match="layer that can run in FP8; got none"):
        prepare(nn.Sequential(nn.LayerNorm(3)), None, "O2")
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module; got str"):
        prepare("net", None, "O2")
    with pytest.raises(TypeError, match="that fp8jax_torch.prepare returned"):
        report(net)


def test_report():
    model, _ = prepare(Net(), None, "O2,exclude=lm_head+down")
    text = str(report(model))
    assert [row.path for row in report(model).rows] == ["up", "norm", "down", "lm_head"]
    assert "1 of 4 modules with weights in FP8" in text
    assert "native: msamp is not installed; transformer_engine is not installed" in text
    assert "exclude=down" in text
    assert "emulated, exactly: FP8 needs a CUDA device; got cpu" in text


def test_plain_checkpoint_round_trip():
    net = Net()
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), "O2")
    train(model, optimizer, 3)
    model.load_state_dict(net.state_dict())
    assert is_scaled(model.up.weight)
    torch.testing.assert_close(
        value(model.up.weight.detach()), net.up.weight.detach(), rtol=2**-11, atol=1e-6
    )
    plain = dequantize(model)
    assert type(plain.up) is nn.Linear
    assert list(plain.state_dict()) == list(net.state_dict())
    net.load_state_dict(plain.state_dict())
    assert is_scaled(model.up.weight)


def test_checkpoint_round_trip(tmp_path):
    net = Net()
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), "O2")
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    fresh = Net()
    again, other = prepare(fresh, torch.optim.AdamW(fresh.parameters(), 1.0), "O2")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(again, other, 5) == train(model, optimizer, 5)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self, between):
            super().__init__()
            self.embed, self.mid, self.out = (
                nn.Embedding(16, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 16, bias=False),
            )
            if between == "linears":
                self.out = nn.Linear(8, 8)
                self.out.weight = self.mid.weight
            else:
                self.out.weight = self.embed.weight

        def forward(self, tokens):
            return self.out(F.gelu(self.mid(self.embed(tokens))))

    for between in ("linears", "embedding"):
        net = Tied(between)
        model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 1e-2), "O2")
        one, other = (model.mid, model.out) if between == "linears" else (model.embed, model.out)
        assert one.weight is other.weight
        assert is_scaled(one.weight) == (between == "linears")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(16)).square().mean().backward()
            optimizer.step()
        assert one.weight is other.weight
        assert ("share" in report(model).note) == (between == "embedding")


@pytest.mark.parametrize("level", ["te", "O2"])
def test_microbatches_merge_by_the_largest_amax(level):
    x, y = batch()
    net = Net()
    states = []
    for parts in (1, 4):
        model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
        for _ in range(2):
            optimizer.zero_grad()
            for rows, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.mse_loss(model(rows), target) / parts).backward()
            optimizer.step()
        states.append(model.up.fp8)
    torch.testing.assert_close(states[0].amax_history[0], states[1].amax_history[0], rtol=0, atol=0)
    assert (states[1].amax_history[0] > 0).sum() == 2


@pytest.mark.parametrize("level", ["te", "O2"])
def test_skipped_steps_and_evaluation_keep_scaling_state(level):
    net = Net()
    model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
    train(model, optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with torch.no_grad():
        model(1000 * batch()[0])
    model(1000 * batch()[0])
    for name, tensor in model.state_dict().items():
        assert torch.equal(value(tensor), value(before[name])), name
    x, y = batch()
    train(model, optimizer, 1, x * torch.nan, y)
    assert optimizer.skipped == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(value(tensor), value(before[name])), name
    assert np.isfinite(train(model, optimizer, 2)).all()


OTHERS = {
    "AdamW": {},
    "AdamW of one kernel": {"fused": True},
    "AdamW in float64": {},
    "SGD": {"momentum": 0.9},
    "SparseAdam": {},
    "LBFGS": {"max_iter": 2},
}


@pytest.mark.parametrize("level", ["te", "O1"])
@pytest.mark.parametrize("case", OTHERS)
def test_torch_optimizers_skip(case, level):
    """Called with a closure or without one, they change neither a weight nor their own state."""
    model = nn.Sequential(nn.Embedding(8, 16, sparse=True) if case == "SparseAdam" else nn.Linear(16, 16))
    model = model.append(nn.Linear(16, 16)).to(torch.float64 if case.endswith("float64") else None)
    x = torch.arange(8) if case == "SparseAdam" else torch.randn(8, 16, dtype=model[1].weight.dtype)
    trained = model[0].parameters() if case == "SparseAdam" else model.parameters()
    optimizer = getattr(torch.optim, case.partition(" ")[0])(trained, lr=1e-3, **OTHERS[case])
    model, optimizer = prepare(model, optimizer, level)

    def closure(bad=1.0):
        optimizer.zero_grad()
        loss = model(x).square().mean() * bad
        loss.backward()
        return loss

    def everything():
        return copy.deepcopy((list(model.state_dict().values()), list(optimizer.state.values())))

    assert optimizer.step(closure).isfinite()
    before = everything()
    for bad in (torch.nan, torch.inf):
        assert not optimizer.step(lambda bad=bad: closure(bad)).isfinite()
        if case != "LBFGS":  # which cannot do without a closure
            closure(bad)
            optimizer.step()
    assert optimizer.skipped == (2 if case == "LBFGS" else 4) and optimizer.has_skipped
    torch.testing.assert_close(
        *(jax.tree.map(value, each) for each in (everything(), before)), rtol=0, atol=0
    )
    assert optimizer.step(closure).isfinite() and not optimizer.has_skipped
    assert not torch.equal(value(model[0].weight), value(before[0][0]))


def test_schedulers_hooks_and_scalers_around_a_skip():
    """Schedulers made before or after, copies, checkpoints, hooks, a loss scaler."""
    net, (x, y) = Net(), batch()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    early = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer = prepare(net, optimizer, "te", inplace=True)
    late, steps = torch.optim.lr_scheduler.ConstantLR(optimizer), []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    with warnings.catch_warnings(action="error"):
        for x_of_step in (x, x * torch.nan, x):
            train(model, optimizer, 1, x_of_step, y)
            early.step()
            late.step()
    assert optimizer.skipped == 1 and len(steps) == 2
    model, other = copy.deepcopy((model, optimizer))
    assert other.skipped == 1
    train(model, other, 1, x * torch.nan, y)
    assert other.skipped == 2 and all(p.isfinite().all() for p in model.parameters())
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.skipped == 2
    torch.optim.AdamW(net.parameters()).load_state_dict(other.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(F.mse_loss(model(x * torch.inf), y)).backward()
    scaler.step(other)
    scaler.update()
    assert scaler.get_scale() == 2.0 and all(p.isfinite().all() for p in model.parameters())


def test_residuals_are_one_byte_a_number():
    model, saved = transform(nn.Linear(256, 512, bias=False), "te"), []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(64, 256, requires_grad=True))
    assert sum(saved) <= 64 * 256 + 512 * 256 + 64


# Accelerate's defects, as far as they are torch's (tests/test_accelerate.py has the others).


def test_defect_7_odd_layers_and_norms():
    norms = [nn.LayerNorm(7, elementwise_affine=False), nn.LayerNorm(33, bias=False)]
    net = nn.Sequential(nn.Linear(24, 7), norms[0], nn.Linear(7, 33, bias=False), norms[1], nn.Linear(33, 48))
    model = transform(net, "te")
    assert [row.fp8 for row in report(model).rows] == [True, False, True, False, True]
    assert model[1].weight is None
    assert model[3].bias is None
    x = torch.randn(5, 24)
    torch.testing.assert_close(model(x), net(x), rtol=0.2, atol=0.2)
    bare = transform(nn.Linear(24, 7), "te")
    assert report(bare).rows[0].fp8
    bare(x).sum().backward()


@pytest.mark.parametrize("recipe", ["te", "fp8", "te,scaling=current", "block", "bf16"])
def test_complex_layers_stay(recipe):
    net = nn.Sequential(nn.Linear(16, 16, dtype=torch.complex64), nn.Linear(16, 16))
    model = transform(net, recipe)
    assert report(model).rows[0].reason == "its weight is complex64"
    x = torch.randn(4, 16, dtype=torch.complex64)
    torch.testing.assert_close(model[0](x), net[0](x), rtol=0, atol=0)
    if recipe != "bf16":
        with pytest.raises(RuntimeError, match="`1`: expected a real input; got torch.complex64"):
            model(x)


def test_defect_9_excluded_layers_are_reported():
    recipe = Recipe.from_accelerate({"backend": "te"})
    for model in (transform(Net(), recipe), prepare(Net(), None, recipe)[0]):
        assert [row.path for row in report(model).rows if row.fp8] == ["up", "down"]
        assert report(model).rows[-1].reason == "exclude=lm_head"


def test_missing_torch(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "fp8jax_torch":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"run `pip install .\.\[torch\]"):
        importlib.import_module("fp8jax_torch")


# Models by others, from their configurations.


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)
        return transformers.BertForMaskedLM(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=8, **sizes)
    return transformers.ViTForImageClassification(config)


def fit(model, optimizer, name, steps=50):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(64, (8, 16), generator=generator)
    images, classes = torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8)
    inputs = (
        {"pixel_values": images, "labels": classes}
        if name == "vit"
        else {"input_ids": tokens, "labels": tokens}
    )
    model.eval()  # without dropout, so that two runs see the same
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# (name, FP8 layers at the default patterns)
MODELS = {"gpt2": 8, "bert": 14, "llama": 14, "vit": 12}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("bert", "vit"))]
)
def test_transformers_models_train(name):
    net = hugging_face(name)
    losses = {}
    for level in ("bf16", "O2", "te"):
        model, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), 3e-3), level)
        losses[level] = fit(model, optimizer, name)
        if level == "bf16":
            continue
        rows = report(model).rows
        assert sum(row.fp8 for row in rows) == MODELS[name]
        wanted = {
            path.replace(".", "/")
            for path, module in net.named_modules()
            if isinstance(module, nn.Linear | nn.LayerNorm) or "Norm" in type(module).__name__
        }
        assert wanted <= {row.path for row in rows}
        assert all(row.fp8 or row.reason for row in rows)
    for level in ("O2", "te"):
        assert losses[level][0] == pytest.approx(losses["bf16"][0], rel=0.01)
        gap = np.abs(np.subtract(losses[level], losses["bf16"])).mean()
        assert gap < 0.03 * losses["bf16"][0]
        assert losses[level][-1] < 0.7 * losses[level][0]


def test_accelerate_loop(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    x, y = batch()

    def run(prepared):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
        if prepared:
            net, optimizer = prepare(net, optimizer, "O2")
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        losses = []
        for epoch in range(8):
            for inputs, targets in loader:
                with accelerator.accumulate(net):
                    loss = F.mse_loss(net(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
            if epoch == 3 and prepared:
                accelerator.save_state(tmp_path / "run", safe_serialization=False)
                after = copy.deepcopy(net.state_dict())
        if prepared:
            accelerator.load_state(tmp_path / "run")
            for name, tensor in net.state_dict().items():
                assert torch.equal(value(tensor), value(after[name])), name
            assert is_scaled(accelerator.unwrap_model(net).up.weight)
        return losses

    losses, plain = run(True), run(False)
    assert np.mean(losses[-4:]) == pytest.approx(np.mean(plain[-4:]), rel=0.08)
