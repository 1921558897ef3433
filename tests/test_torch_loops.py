"""A prepared torch model under what users do to one: copied, cast, pickled, loaded, clipped, recomputed."""

import copy
import io
import subprocess
import sys
import threading

import pytest
import torch
from fp8jax_torch import ScaledTensor, dequantize, optim, prepare, quantize, report, transform
from fp8jax_torch.casts import amax
from fp8jax_torch.linear import FP8
from fp8jax_torch.mixins import mixed
from fp8jax_torch.optim import AdamW
from fp8jax_torch.optim.entries import entry_of
from fp8jax_torch.safetensors_keys import split
from fp8jax_torch.scaled import value
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8jax import formats

LEVELS = ("te", "O1", "O2", "O3")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def prepared(level, model=None, **options):
    model = net() if model is None else model
    return prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), level, **options)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()


def numbers(model):
    return {name: value(tensor).clone() for name, tensor in model.state_dict().items()}


def assert_same(model, other):
    for name, tensor in numbers(model).items():
        torch.testing.assert_close(numbers(other)[name], tensor, rtol=0, atol=0)


def saved_and_loaded(whole, **options):
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    return torch.load(file, **{"weights_only": False, **options})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_train_alike(level, copied):
    pair = prepared(level)
    train(*pair)
    twin = copied(pair)
    train(*pair)
    train(*twin)
    assert_same(pair[0], twin[0])
    assert twin[0][0].fp8.amax_history[0].count_nonzero() == 4


def test_unpickling_in_a_new_process():
    pair = prepared("O2")
    mixed.cache_clear()
    twin = saved_and_loaded(pair)
    assert isinstance(twin[0][0], FP8)
    assert isinstance(twin[0][0], nn.Linear)
    assert_same(pair[0], twin[0])


class Linear(nn.Linear):
    """Of the same name as torch's."""


def test_subclass_with_an_equal_name():
    model = transform(nn.Sequential(nn.Linear(16, 16), Linear(16, 16)), "te")
    assert not isinstance(model[0], Linear)
    assert isinstance(model[1], Linear)
    assert [type(layer) for layer in dequantize(model)] == [nn.Linear, Linear]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_cast_model_keeps_float32_scaling_state(dtype):
    model, optimizer = prepared("te")
    train(model, optimizer)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.to(dtype).named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)
    assert model.to("meta")(torch.empty(3, 16, dtype=dtype, device="meta")).shape == (3, 16)


@pytest.mark.parametrize("format", [formats.E4M3, formats.FP16], ids=str)
def test_assignment_to_data(format):
    parameter = nn.Parameter(quantize(torch.ones(4, 4), format))
    parameter.data = torch.full((4, 4), 3.0)
    torch.testing.assert_close(parameter.detach().dequantize(), torch.full((4, 4), 3.0))
    assert parameter.codes.dtype == quantize(X, format).codes.dtype
    parameter.data = quantize(torch.full((4, 4), 5.0), format)
    torch.testing.assert_close(parameter.detach().dequantize(), torch.full((4, 4), 5.0))
    nn.utils.vector_to_parameters(torch.full((16,), 7.0), [parameter])
    torch.testing.assert_close(parameter.detach().dequantize(), torch.full((4, 4), 7.0))


def test_shared_memory():
    model = transform(net(), "O2").share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert model(X).isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_noncontiguous_weight(level):
    models = [net(), net()]
    models[0][0].weight = nn.Parameter(models[1][0].weight.detach().t().contiguous().t())
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        train(model, optimizer, 1)
        train(*prepare(model, optimizer, level, inplace=True))
    assert_same(*models)


@pytest.mark.parametrize("level", ["O3", "O3,master_weight=FP32"])
def test_loaded_weight_replaces_its_master(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    model.load_state_dict(net(seed=1).state_dict())
    loaded = numbers(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer)
    for name, tensor in numbers(model).items():
        if "fp8" not in name:
            torch.testing.assert_close(tensor, loaded[name], rtol=0, atol=0)


MULTIPLICATIONS = {
    "mul": lambda w: w.mul_(0.97),
    "div": lambda w: w.div_(torch.tensor(1 / 0.97)),
    "data": lambda w: w.data.mul_(0.97),
    "foreach": lambda w: torch._foreach_mul_([w], 0.97),
    "foreach_div": lambda w: torch._foreach_div_([w], 1 / 0.97),
}


@pytest.mark.parametrize("level", ["O3", "O3,master_weight=FP32", "fp8"])
@pytest.mark.parametrize("multiply", MULTIPLICATIONS.values(), ids=MULTIPLICATIONS)
def test_masters_follow_a_multiplication_of_the_weight(multiply, level):
    """It changes no code, only the scale."""
    model = net()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), 0.0, weight_decay=0.0), level)
    train(model, optimizer, 1)

    def exact():
        weight = model[0].weight
        master = entry_of(optimizer.state[weight], "master")
        return value(weight.detach() if master is None else master).clone()

    first, weight = exact(), value(model[0].weight.detach())
    for i in range(10):
        with torch.no_grad():
            multiply(model[0].weight)
        model[2].weight.grad[0, 0] = float("nan") if i == 5 else 0.0
        optimizer.step()  # also one that is skipped
        train(model, optimizer, 1)
    torch.testing.assert_close(exact(), 0.97**10 * first, rtol=3e-3, atol=1e-5)
    torch.testing.assert_close(value(model[0].weight.detach()), 0.97**10 * weight, rtol=0.15, atol=1e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, None], ids=["copy", "pickle", "state"])
def test_copied_masters_are_of_the_written_weight(copied):
    model, optimizer = prepared("O3")
    train(model, optimizer, 1)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[2].weight[0, 0] = 3.0
    twin = copied((model, optimizer)) if copied else prepared("O3", net(seed=1))
    if not copied:
        for new, old in zip(twin, (model, optimizer), strict=True):
            new.load_state_dict(copy.deepcopy(old.state_dict()))
    for pair in ((model, optimizer), twin):
        train(*pair, 1)
    assert_same(model, twin[0])
    assert model[2].weight[0, 0] > 2.9


@pytest.mark.parametrize("is_model_first", [True, False])
def test_masters_load_in_any_order(is_model_first):
    pair = prepared("O3")
    train(*pair)
    saved = [copy.deepcopy(part.state_dict()) for part in pair]
    train(*pair)
    twin = prepared("O3", net(seed=1))
    for i in (0, 1) if is_model_first else (1, 0):
        twin[i].load_state_dict(saved[i])
    train(*twin)
    assert_same(pair[0], twin[0])
    for p, q in zip(pair[0].parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(twin[1].state[q], pair[1].state[p], rtol=0, atol=0)


def test_write_before_the_backward_raises():
    model = transform(net(), "O3")
    loss = model(X).sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_foreach_clipping_changes_only_scales():
    model, _ = prepared("O2")
    model(X).square().sum().backward()
    codes, scale = model[0].weight.grad.codes.clone(), model[0].weight.grad.scale.clone()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    assert torch.equal(model[0].weight.grad.codes.view(torch.uint8), codes.view(torch.uint8))
    assert model[0].weight.grad.scale < scale


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_advances_nothing(use_reentrant):
    states = []
    for call in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        model = transform(net(), "te")
        model(X).sum().backward()
        x = X.clone().requires_grad_()
        (call(model, x).sum() + call(model, 9 * x).square().sum()).backward()
        model(X)
        states.append(model)
    assert_same(*states)


def test_transformer_encoder_in_evaluation():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = transform(nn.TransformerEncoder(layer, 1), "te").eval()
    x, mask = X.view(2, 4, 16), torch.zeros(2, 4, dtype=torch.bool)
    want = model(x, src_key_padding_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=mask), want)


@pytest.mark.parametrize("level", LEVELS)
def test_steps_that_a_loss_scaler_skips(level):
    pair = prepared(level)
    twin = copy.deepcopy(pair)
    for (model, optimizer), factors in ((pair, (1, 50, 2)), (twin, (1, 2))):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for factor in factors:
            optimizer.zero_grad()
            scaler.scale(model(factor * X).square().mean()).backward()
            if factor == 50:
                model[2].bias.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update(2.0)
    assert_same(pair[0], twin[0])


@pytest.mark.parametrize("level", LEVELS)
def test_layers_without_features(level):
    model, optimizer = prepared(level, nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 16)))
    train(model, optimizer)
    torch.testing.assert_close(model(X), model[1].bias.expand(8, 16))


def test_errors():
    model = transform(net(), "O2")
    with pytest.raises(RuntimeError, match="fp8jax_torch.dequantize"):
        model[0].weight.storage()
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match="Make the scheduler of the returned optimizer, after `prepare`"):
        prepare(plain, optimizer, "O2", inplace=True)
    _, same = prepare(net(), None, "te")
    assert same is None
    embedding = nn.Embedding(8, 16, sparse=True)
    model, optimizer = prepared("O2", nn.Sequential(embedding, nn.Linear(16, 16)))
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="expected dense gradients"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O3", "fp8"])
def test_a_state_with_scales_is_no_state_of_torchs_optimizer(level):
    """torch would take the codes for moments."""
    trained, (_, optimizer) = prepared(level), prepared("te")
    train(*trained)
    with pytest.raises(ValueError, match="`state_dict`: .* got exp_avg.*_scale, .*another recipe"):
        optimizer.load_state_dict(trained[1].state_dict())


@pytest.mark.parametrize("level", ["O2", "O3", "fp8"])
def test_torchs_optimizer_finds_no_moments_in_codes(level):
    """A plain optimizer of torch checks no names as it loads, so its step must find none."""
    model, optimizer = prepared(level)
    train(model, optimizer)
    plain = dequantize(model)
    torchs = torch.optim.AdamW(plain.parameters(), 1e-2)
    torchs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(plain, torchs, 1)


@pytest.mark.parametrize(
    "make",
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"amsgrad": True})],
    ids=["SGD", "amsgrad"],
)
def test_moments_of_other_optimizers_are_not_dequantized(make):
    model = net()
    optimizer = make[0](model.parameters(), lr=1e-2, **make[1])
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match="expected the state of an Adam or AdamW without amsgrad"):
        optim.dequantize(optimizer.state_dict())


def test_second_moments_of_a_byte_are_refused():
    with pytest.raises(ValueError, match="PyTorch has no E4M4 here; take moments=E5M2"):
        prepared("fp8_6")


@pytest.mark.parametrize("level", ["te", "O2", "O3", "fp8"])
def test_torchs_optimizer_continues_from_dequantized_moments(level):
    model, optimizer = prepared(level)
    train(model, optimizer, 5)
    plain = dequantize(model)
    torchs = torch.optim.AdamW(plain.parameters())
    torchs.load_state_dict(optim.dequantize(optimizer.state_dict()))
    assert torchs.param_groups[0]["lr"] == 1e-2 and "seed" not in torchs.param_groups[0]
    for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
        state, entries = torchs.state[parameter], optimizer.state[own]
        second = value(entry_of(entries, "exp_avg_sq"))
        second = value(entry_of(entries, "exp_avg_sq_root")) ** 2 if second is None else second
        assert torch.equal(state["exp_avg"], value(entry_of(entries, "exp_avg")))
        assert torch.equal(state["exp_avg_sq"], second)
    train(plain, torchs, 1)
    train(model, optimizer, 1)
    assert torchs.state[plain[0].weight]["step"] == 6
    weight, own = plain[0].weight.detach(), value(model[0].weight.detach())
    assert (weight - own).norm() < 0.04 * own.norm()  # E4M3 rounds by 2.6%


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_dequantized_state_has_the_kind_of_weight_decay(is_decoupled):
    """torch's Adam has it as an option, which is False in a state without it."""

    def make(parameters):
        return torch.optim.Adam(parameters, 1e-2, weight_decay=0.1, decoupled_weight_decay=is_decoupled)

    model = net()
    model, optimizer = prepare(model, make(model.parameters()), "O2")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    train(model, optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0].pop("decoupled_weight_decay", None)  # as in older states
    optimizer.load_state_dict(saved)
    torchs = make([{"params": dequantize(model).parameters()}, {"params": [torch.ones(3)]}])
    torchs.load_state_dict(optim.dequantize(optimizer.state_dict()))
    assert [group["decoupled_weight_decay"] for group in torchs.param_groups] == [is_decoupled] * 2


@pytest.mark.parametrize("level", ["O2", "O3", "fp8"])
def test_states_with_older_names_load(level):
    """Codes had the names of plain entries."""
    model, optimizer = prepared(level)
    train(model, optimizer)
    older = optimizer.state_dict()
    older["state"] = {
        number: {name.removesuffix("_codes"): entry for name, entry in state.items()}
        for number, state in older["state"].items()
    }
    other, again = prepared(level)
    again.load_state_dict(older)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        old, new = optimizer.state[parameter], again.state[twin]
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name].float(), new[name].float()) for name in old)
    plain, same = (optim.dequantize(state) for state in (older, optimizer.state_dict()))
    assert torch.equal(plain["state"][0]["exp_avg"], same["state"][0]["exp_avg"])


def test_state_dicts_load_with_weights_only():
    pair = prepared("O3")
    train(*pair)
    model, _ = saved_and_loaded([part.state_dict() for part in pair], weights_only=True)
    assert isinstance(model["0.weight"], ScaledTensor)


# Misuse ###########################################################################################


def replaced(model):
    model[0].weight = nn.Parameter(torch.zeros(16, 16))


def assigned(model):
    model.load_state_dict(net(seed=1).state_dict(), assign=True)


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("change", [replaced, assigned, swapped])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_plain_parameter_in_an_fp8_layer_is_refused(level, change):
    """It would train in float32, and the optimizer would move the old parameter."""
    model, _ = prepared(level)
    change(model)
    with pytest.raises(TypeError, match="`0.weight`: expected a ScaledTensor"):
        model(X.to(model[0].bias.dtype))


def test_optimizer_of_replaced_parameters_is_refused():
    model, optimizer = prepared("O2")
    model.load_state_dict(prepared("O2", net(seed=1))[0].state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"`optimizer`: expected gradients .*assign=True"):
        train(model, optimizer)
    for step in (lambda: optimizer.step(None), lambda: optimizer.step(closure=None)):  # as accelerate does
        with pytest.raises(RuntimeError, match=r"`optimizer`: expected gradients .*assign=True"):
            step()


def test_items_are_written():
    """In the weight and in `data`; torch would write to a copy that nobody sees."""
    for level in ("O2", "O3"):
        model, _ = prepared(level)
        before = value(model[0].weight.detach())
        with torch.no_grad():
            model[0].weight[0] = 0.5
        model[0].weight.data[1, 2:4] = torch.tensor([0.25, 0.0])
        after = value(model[0].weight.detach())
        assert (after[0] == 0.5).all() and after[1, 2:4].tolist() == [0.25, 0.0]
        torch.testing.assert_close(after[2:], before[2:], rtol=0.07, atol=1e-3)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.view(-1)[:4].zero_(),
        lambda x: x[0].fill_(1),
        lambda x: x.t().copy_(torch.ones(16, 16)),
        lambda x: x.chunk(2)[0].mul_(2),
        nn.init.orthogonal_,
    ],
)
def test_writes_to_views_are_refused(write):
    model, _ = prepared("O2")
    before = value(model[0].weight.detach())
    with pytest.raises(RuntimeError, match="`ScaledTensor`: expected no write to a part"), torch.no_grad():
        write(model[0].weight)
    assert torch.equal(value(model[0].weight.detach()), before)


def test_views_are_read_and_differentiated():
    model, _ = prepared("O1")
    weight = model[0].weight
    (weight.t()[:, :4].sum() + weight.view(4, -1)[0].square().sum()).backward()
    want = torch.zeros(16, 16)
    want[:4] += 1 + 2 * value(weight.detach())[:4]
    torch.testing.assert_close(value(weight.grad), want)
    assert type(weight[0] * 2) is torch.Tensor


@pytest.mark.parametrize("inplace", [False, True])
def test_optimizer_that_prepare_replaced_is_refused(inplace):
    model = net()
    old = torch.optim.AdamW(model.parameters(), 1e-2)
    new_model, new = prepare(model, old, "O2", inplace=inplace)
    new_model(X).sum().backward()
    with pytest.raises(RuntimeError, match="`optimizer`: expected the one that `prepare` returned"):
        old.step()
    new.step()
    if not inplace:  # the plain model and its optimizer may go on
        model(X).sum().backward()
        old.step()


def of_others(parameters):
    return torch.optim.AdamW([*parameters, nn.Parameter(torch.ones(1))])


def with_scheduler(parameters):
    optimizer = torch.optim.AdamW(parameters)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


@pytest.mark.parametrize(
    "make, level",
    [
        (lambda parameters: torch.optim.SGD(parameters, 0.1), "O2"),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), "O2"),
        (lambda parameters: AdamW(parameters, recipe="O2"), "O3"),
        (lambda parameters: AdamW(parameters, recipe="O2"), "fp8"),
        (of_others, "O2"),
        (of_others, "te"),
        (with_scheduler, "O2"),
    ],
    ids=["SGD", "amsgrad", "other weights", "other rounding", "others", "others of te", "scheduler"],
)
def test_refused_optimizers_leave_the_model_as_it_is(make, level):
    model = net()
    parameters = list(model.parameters())
    optimizer = make(parameters)
    groups = [group["params"][:] for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="`optimizer`|`recipe`: expected one with E4M3 weights"):
        prepare(model, optimizer, level, inplace=True)
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    for before, group in zip(groups, optimizer.param_groups, strict=True):
        assert all(one is other for one, other in zip(before, group["params"], strict=True))
    prepare(model, torch.optim.AdamW(parameters), level, inplace=True)


def test_objects_that_are_no_optimizer_are_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for wrong in ([optimizer], "adamw", torch.optim.AdamW, optimizer.state_dict(), model):
        with pytest.raises(TypeError, match="`optimizer`: expected a torch.optim.Optimizer or None"):
            prepare(model, wrong, "te")


def test_parameters_of_another_optimizer_are_warned_of():
    model = net()
    with pytest.warns(UserWarning, match=r"2 of 4 trainable parameters.*2.weight"):
        prepare(model, torch.optim.AdamW(model[0].parameters()), "O2")
    model[2].requires_grad_(False)
    prepare(model, torch.optim.AdamW(model[0].parameters()), "O2")


@pytest.mark.parametrize("level", ["te", "nvfp4"])
def test_scaling_states_that_leave_meta_start_anew(level):
    want = transform(net(), level)
    model = transform(net(), level).to("meta").to_empty(device="cpu")
    model.load_state_dict(net().state_dict())  # a plain checkpoint has no scaling states
    for (name, got), (_, start) in zip(model.named_buffers(), want.named_buffers(), strict=True):
        assert torch.equal(got, start), name


@pytest.mark.parametrize("level", ["te", "O2", "O3", "fp8"])
@pytest.mark.parametrize("is_made_on_meta", [False, True])
def test_models_that_leave_meta_train(level, is_made_on_meta):
    with torch.device("meta" if is_made_on_meta else "cpu"):
        model = net()
    model = transform(model, level).to("meta").to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    other = transform(net(), level)
    assert_same(model, other)
    for each in (model, other):
        train(each, AdamW(each.parameters(), 1e-2, recipe=level))
    assert_same(model, other)


def test_scales_and_amaxes_under_another_default_dtype():
    with torch.device("meta"):
        model = transform(net(), "O2")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, largest = model.to_empty(device="cpu"), amax(torch.empty(0))
    finally:
        torch.set_default_dtype(default)
    assert model[0].weight.scale.dtype == largest.dtype == torch.float32


@pytest.fixture
def default_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("level", ["te,interval=2", "O3", "fp8"])
def test_states_under_another_default_dtype(level, default_bfloat16):
    model, optimizer = prepared(level)
    train(model, optimizer)
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())
    if level != "te,interval=2":
        assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values())


def test_remainders_end_with_their_16_bit_parameters():
    model, optimizer = prepared("fp8", net().to(torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)(X.to(dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ("remainder" in optimizer.state[model[2].bias]) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("level", ["O2", "O3", "fp8"])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_follows_a_model_that_moves(level, steps):
    model, optimizer = prepared(level)
    train(model, optimizer, steps)
    weight = model.to("meta")[0].weight
    assert weight is optimizer.param_groups[0]["params"][0]
    devices = {name: entry.device.type for name, entry in optimizer.ensure_state(weight).items()}
    assert devices.pop("step") == "cpu" and set(devices.values()) == {"meta"}


def test_late_steps_under_another_default_dtype(default_bfloat16):
    """The number 299 is not one of bfloat16."""
    parameters = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        parameters.append(nn.Parameter(torch.ones(4, dtype=torch.float32)))
        optimizer = AdamW(parameters[-1:], 0.1, recipe="te")
        optimizer.ensure_state(parameters[-1])["step"].fill_(298)
        parameters[-1].grad = torch.ones(4, dtype=torch.float32)
        optimizer.step()
    assert torch.equal(*parameters)


def test_import_under_other_defaults():
    defaults = "torch.set_default_dtype(torch.bfloat16); torch.set_default_device('meta')"
    subprocess.run([sys.executable, "-c", f"import torch; {defaults}; import fp8jax_torch"], check=True)


def test_cast_scaling_state_is_refused():
    """FSDP's MixedPrecision(buffer_dtype=) casts buffers so."""
    model = transform(net(), "te")
    for buffer in model.buffers():
        buffer.data = buffer.to(torch.bfloat16)
    with pytest.raises(TypeError, match="`0`: expected float32 scales; got bfloat16.*buffer_dtype"):
        model(X)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_bad_scales_are_not_loaded(bad):
    model = transform(net(), "te")
    saved = copy.deepcopy(model.state_dict())
    saved["2.fp8.scale"][1] = bad
    with pytest.raises(RuntimeError, match="2.fp8.scale: expected finite positive scales"):
        model.load_state_dict(saved)


@pytest.mark.parametrize("changes", ["fp8_format=E4M3", "margin=2", "amax_compute_algo=most_recent"])
def test_loaded_scales_are_of_the_recipe(changes):
    """The scales of `te` map amaxes to the maxima of its formats; the amaxes are those of any recipe."""
    models = [prepared(level)[0] for level in ("te", f"te,{changes}")]
    for model in models:
        for factor in (3, 1):
            model(factor * X).square().sum().backward()
            model[0].fp8.advance()
            model[2].fp8.advance()
    first = {"0.fp8.scale": torch.full((3,), 7.0), "0.fp8.amax_history": torch.zeros(3, 1024)}
    for target, source in (models, models[::-1]):
        other = prepared(str(report(target).recipe))[0]
        history = target[0].fp8.amax_history.clone()
        state = {**source.state_dict(), "0.fp8.amax_history": history}
        saved = copy.deepcopy(state)
        other.load_state_dict(state)
        torch.testing.assert_close(other[0].fp8.scale, target[0].fp8.scale, rtol=0, atol=0)
        assert (other[0].fp8.scale != source[0].fp8.scale).any()
        assert torch.equal(state["0.fp8.scale"], saved["0.fp8.scale"])
        other.load_state_dict({**state, **first})
        assert other[0].fp8.scale.tolist() == [7, 7, 7]  # without an amax


def test_frozen_layers_have_scales_of_their_inputs():
    """No backward reaches the first layer, and small inputs would vanish on the first scale."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = prepare(model, sgd(model), "te")
    for _ in range(2):
        optimizer.zero_grad()
        model(X / 100).sum().backward()
        optimizer.step()
    history = model[0].fp8.amax_history[:, :3]
    assert history[0].tolist() == [(X / 100).abs().max()] * 2 + [0]
    assert (history[1, :2] > 0).all() and (history[2] == 0).all()
    with torch.no_grad():
        model(9 * X)
    optimizer.step()
    assert torch.equal(model[0].fp8.amax_history[:, :3], history)


def test_frozen_layers_advance_where_gradients_end_before_the_backward():
    """A frozen layer's amaxes are recorded by the forward, and a loss scaler skips no forward."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = prepare(model, sgd(model), "te")
    for _ in range(2):
        loss = model(X / 100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model[0].fp8.amax_history[0, :3].tolist() == [(X / 100).abs().max()] * 2 + [0]
    assert model[2].fp8.amax_history[2].count_nonzero() == 2


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    "make, recipe",
    [
        (torch.optim.AdamW, "te"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), "te"),
        (lambda parameters: AdamW(parameters, recipe="te"), "te"),
        (lambda parameters: AdamW(parameters, recipe="O3"), "O3"),
    ],
    ids=["torch", "fused", "own", "O3"],
)
def test_another_optimizer_advances_the_scales(make, recipe, copied):
    """Once a step of two microbatches, also if gradients end before a backward and the writes are counted."""
    model, _ = prepared(recipe)
    model = copy.deepcopy(model) if copied else model
    optimizer = make(model.parameters())
    for factor in (1, 2, 3):
        for part in (factor, 0.5):
            loss = model(part * X).square().mean()
            if part == factor and not optimizer.defaults.get("fused"):
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if optimizer.defaults.get("fused"):
            optimizer.zero_grad()
        with torch.no_grad():
            model(9 * X)
    largest = X.abs().max()
    assert model[0].fp8.amax_history[0, :4].tolist() == [3 * largest, 2 * largest, largest, 0]


@pytest.mark.parametrize("recipe", ["te", "O1", "nvfp4"])
def test_models_called_by_their_parts(recipe):
    """Without an optimizer each layer advances as the model's own call would advance all."""
    whole, parts = (transform(net(), recipe) for _ in range(2))
    for _ in range(3):
        whole(X).square().sum().backward()
        hidden = parts[0](X)
        checkpoint(nn.Sequential(parts[1], parts[2]), hidden, use_reentrant=False).square().sum().backward()
        for model in (whole, parts):
            model.zero_grad()
    assert_same(whole, parts)
    first = transform(net(), recipe)
    assert any((numbers(parts)[name] != new).any() for name, new in numbers(first).items())


def test_replicas_of_data_parallel_are_refused():
    """Their amaxes would be lost."""
    replica = transform(net(), "te")[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = (torch.ones(shape) for shape in ((16, 16), 16))
    with pytest.raises(RuntimeError, match=r"`model`: .*DataParallel.*DistributedDataParallel"):
        replica(X)


def test_forwards_between_the_steps_of_its_optimizer_advance_nothing():
    """Also with gradients that are gone, as in an attack on the inputs, and with written weights."""
    model, optimizer = prepared("te")
    train(model, optimizer, 1)
    optimizer.zero_grad()
    for _ in range(3):
        x = X.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        with torch.no_grad():
            model[0].bias += 1
    model(X).sum().backward()
    optimizer.step()
    assert model[0].fp8.amax_history[0].count_nonzero() == 2


def test_a_dequantized_model_is_torchs_alone():
    for model in (prepared("te")[0], transform(net(), "te")):
        plain = dequantize(model)
        assert not plain._forward_pre_hooks and model._forward_pre_hooks


@pytest.mark.parametrize("level", ["O3", "fp8"])
def test_another_optimizer_without_masters_is_refused(level):
    model, _ = prepared(level)
    with pytest.raises(RuntimeError, match="fp8jax_torch.optim.AdamW"):
        train(model, torch.optim.AdamW(model.parameters(), 1e-2), 3)


class Scaled(torch.optim.SGD):
    """A user's optimizer, with attributes of its own."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, lr=1e-2)
        self.factor, self.first = factor, self.param_groups[0]["params"][0]

    def step(self, closure=None):
        self.first.grad.mul_(self.factor)
        return super().step(closure)


def test_attributes_of_an_optimizer_are_copied():
    model = net()
    new, optimizer = prepare(model, Scaled(model.parameters(), 0.0), "te")
    train(new, optimizer)
    assert optimizer.first is new[0].weight
    assert torch.equal(new[0].weight, model[0].weight) and not torch.equal(new[0].bias, model[0].bias)
    uncopied = Scaled(model.parameters(), threading.Lock())
    with pytest.raises(ValueError, match="`optimizer`: .*got factor, .*Say inplace=True"):
        prepare(model, uncopied, "te")
    prepare(model, uncopied, "te", inplace=True)


@pytest.mark.parametrize("level", ["te", "O2"])
@pytest.mark.parametrize("inplace", [False, True])
def test_hooks_of_an_optimizer_are_kept(level, inplace):
    model, calls = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    prepare(model, optimizer, level)
    model, optimizer = prepare(model, optimizer, level, inplace=inplace)
    train(model, optimizer, 1)
    optimizer.state_dict()
    assert calls == ["before", "after", "saved"]
    optimizer.zero_grad()
    if not inplace:
        optimizer.step()  # not refused as a step of the given one


def with_hook(parameter):
    parameter.register_hook(torch.zeros_like)


def with_late_hook(parameter):
    parameter.register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter))
    )


@pytest.mark.parametrize("register", [with_hook, with_late_hook])
def test_hooks_of_parameters_are_not_lost(register):
    model = net()
    register(model[0].weight)
    for level, inplace in (("te", False), ("O2", False), ("O2", True)):
        with pytest.raises(ValueError, match=r"`model`: .* got hooks of 0\.weight.*after `prepare`"):
            transform(model, level, inplace=inplace)
    copied = copy.deepcopy(model)
    model = transform(model, "te", inplace=True)
    model(X).sum().backward()
    assert not model[0].weight.grad.any() and model[2].weight.grad.any()
    register(copied[0].weight)
    copied.requires_grad_(False)
    transform(copied, "te")  # where no hook is called


def test_layers_that_the_model_does_not_call_are_reported():
    """It may read their weights itself, in high precision."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.read = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return nn.functional.linear(self.called(x), self.read.weight)

    model = transform(Reads(), "te")
    assert [row.reason for row in report(model).rows] == [None, None]
    model(X)
    assert [row.reason for row in report(model).rows] == [None, "not called yet"]


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)


@pytest.mark.parametrize("level", ["O3", "fp8"])
def test_optimizer_without_masters_is_refused_after_transform(level):
    """`transform` does not see the optimizer; torch's would round E4M3 weights to nearest in each step."""
    model = transform(net(), level)
    optimizer = sgd(model)
    model(X).sum().backward()
    model(X).sum().backward()  # no step between: microbatches
    optimizer.step()
    with pytest.raises(RuntimeError, match="fp8jax_torch.optim.AdamW"):
        model(X)
    model = transform(net(), level)
    train(model, AdamW(model.parameters(), 1e-2, recipe=level), 3)


SMALLER = {
    "no recipe": lambda model: AdamW(model.parameters(), 1e-3),
    "recipe": lambda model: AdamW(model.parameters(), 1e-3, recipe="O2"),
    "skipping": lambda model: optim.skipping(torch.optim.AdamW(model.parameters(), 1e-3)),
    "sgd": sgd,
}


@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("make", SMALLER.values(), ids=SMALLER)
def test_optimizer_that_rounds_weights_otherwise_is_refused(make, has_optimizer):
    """Also after steps of the right optimizer, and until it steps again or the weights are loaded."""
    model, own = prepared("fp8") if has_optimizer else (transform(net(), "fp8"), None)
    own = own or AdamW(model.parameters(), 1e-3, recipe="fp8")
    train(model, own)
    state = copy.deepcopy(model.state_dict())
    model(X).square().sum().backward()
    make(model).step()
    for part in (model, model, model[0], model[2]):
        with pytest.raises(RuntimeError, match="master_weight=- .*nearest.*fp8jax_torch.optim.AdamW"):
            part(X)
    model.load_state_dict(state)
    train(model, own)


@pytest.mark.parametrize("level", ["fp8", "O3"])
def test_writes_by_no_optimizer_are_legal(level):
    teacher = transform(net(), level).requires_grad_(False)
    for _ in range(2):  # records its amaxes in a forward
        teacher(X)
        teacher.load_state_dict(teacher.state_dict())
    model = transform(net(), level)
    for write in (lambda: model.load_state_dict(teacher.state_dict()), lambda: model[0].weight.clamp_(-1, 1)):
        model(X).sum().backward()
        with torch.no_grad():
            write()
        model.zero_grad()
        model(X)
    for parameters in (dict(model.named_parameters()), copy.deepcopy(model.state_dict())):
        torch.func.functional_call(model, parameters, (X.clone().requires_grad_(),)).sum().backward()
    optimizer = AdamW(model.parameters(), 1e-3, recipe=level)
    model(X).sum().backward()
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.has_skipped
    nn.init.zeros_(model[0].weight)
    model(X)


@pytest.mark.parametrize("level", [*LEVELS, "fp8", "nvfp4"])
def test_inference_mode(level):
    """Its tensors count no writes."""
    with torch.inference_mode():
        for model in (transform(net(), level), prepared(level)[0]):
            model[2].weight[0, 0] = 2.0
            assert torch.equal(model(X), model(X))
        torch._foreach_mul_([model[0].weight], 0.5)
        model.load_state_dict(net().state_dict())
        assert copy.deepcopy(prepared(level)[1]).state_dict()["skipped"] == 0


TRANSFORMS = {
    "torch.jit.trace": lambda model: torch.jit.trace(model, (X,), check_trace=False),
    "torch.export": lambda model: torch.export.export(model, (X,)),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "vmap": lambda model: torch.func.vmap(model)(X),
    "jvp": lambda model: torch.func.jvp(model, (X,), (X,)),
}


@pytest.mark.parametrize("level", ["te", "fp8", "te,scaling=current", "block"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_fp8_layers_are_refused(name, level):
    got = name if "." in name else "a transform of torch.func"
    for part in (model := transform(net(), level), model[0]):
        with pytest.raises(RuntimeError, match=f"got {got}. Take .*dequantize"):
            TRANSFORMS[name](part)
    TRANSFORMS[name](dequantize(model))


@pytest.mark.parametrize("level", ["te", "te,scaling=current"])
def test_differentiated_steps(level):
    """MAML's: a step on parameters that are passed to the model."""
    model = transform(net(), level)
    own = dict(model.named_parameters())
    loss = torch.func.functional_call(model, own, (X,)).square().mean()
    grads = torch.autograd.grad(loss, list(own.values()))
    fast = {name: p - 0.1 * grad for (name, p), grad in zip(own.items(), grads, strict=True)}
    new = torch.func.functional_call(model, fast, (X,)).square().mean()
    new.backward()
    assert new < loss and all(p.grad is not None for p in model.parameters())


def test_options_of_adam():
    for name, wrong in (("betas", (0.9,)), ("betas", 0.9), ("seed", 1.5), ("lr", "1e-3"), ("lr", None)):
        with pytest.raises(ValueError, match=f"`{name}`: expected"):
            AdamW([nn.Parameter(torch.ones(3))], **{name: wrong})


def test_state_dict_in_parts(tmp_path):
    """It has every bit, and does not fit a plain model."""
    safetensors_torch = pytest.importorskip("safetensors.torch")
    model, optimizer = prepared("fp8")
    train(model, optimizer)
    parts = split(model.state_dict())
    assert {"0.weight.codes", "0.weight.scale", "0.bias"} <= set(parts) and "0.weight" not in parts
    safetensors_torch.save_file(parts, tmp_path / "model.safetensors")
    saved = safetensors_torch.load_file(tmp_path / "model.safetensors")
    other, _ = prepared("fp8", net(1))
    assert not any(other.load_state_dict(saved))
    for name in ("0.weight", "2.weight"):
        ours, theirs = (each.state_dict()[name] for each in (model, other))
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scale, theirs.scale)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"0.weight\""):
        net().load_state_dict(saved)


@pytest.mark.parametrize("level", ["fp8", pytest.param("O3", marks=pytest.mark.long)])
def test_transformers_trainer_saves_and_resumes(level, tmp_path):
    """The steps after a resumed checkpoint have the losses of before, bit for bit."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    tokens = torch.randint(0, 64, (24, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    model, optimizer = prepared(level, model)

    def losses(resume=None):
        given = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_steps=2,
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = transformers.Trainer(model, given, train_dataset=data, optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=resume)
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    first = losses()
    assert losses(str(tmp_path / "checkpoint-2")) == first
    # The model with its own way to save is copied and pickled as before, and a plain one saves as before.
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(model), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for each, name in ((loaded, "again"), (dequantize(model), "plain")):
        each.save_pretrained(tmp_path / name)
    with pytest.importorskip("safetensors").safe_open(tmp_path / "again/model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.up_proj.weight.codes" in file.keys()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(again(tokens[:1]).logits, dequantize(model)(tokens[:1]).logits)
