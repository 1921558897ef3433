"""torch's Adam with narrow moments: MS-AMP's recorded numbers, JAX's, and what a bad gradient does."""

import copy
import functools
import io
import pathlib

import fp8jax_torch
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from fp8jax_torch import casts
from fp8jax_torch.optim import Adam, AdamW
from fp8jax_torch.optim.entries import entries_of, entry_of
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize, quantize_gradient, value
from torch import nn

import fp8jax
from fp8jax import ScaledArray, formats

DATA = np.load(pathlib.Path(__file__).parent / "data" / "msamp.npz")
CASES = ("adamw_o2", "adamw_o2_zero_first_grad", "adam_o2", "adamw_o1")
DTYPES = {"grad": torch.float8_e4m3fn, "w": torch.float16, "m": torch.float8_e4m3fn, "v": torch.float16}
ENTRIES = {"m": "exp_avg", "v": "exp_avg_sq"}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def recorded(case, name, step):
    """A recorded tensor and its scale, or None."""
    data = torch.from_numpy(DATA[f"{case}/{name}_data"][step])
    if data.dtype == torch.float32:
        return data, None
    return data.view(DTYPES[name]), torch.tensor(DATA[f"{case}/{name}_scale"][step])


def optimizer(case, parameter):
    lr, b1, b2, eps, weight_decay = (float(number) for number in DATA[f"{case}/hyper"])
    make = AdamW if DATA[f"{case}/decoupled"] else Adam
    return make([parameter], lr, (b1, b2), eps, weight_decay, recipe="O1" if case.endswith("o1") else "O2")


def steps(case, *, freely):
    """Weight and moments after each step, from the recorded ones before it or, `freely`, from its own."""
    first = torch.from_numpy(DATA[f"{case}/w0_data"]).view(torch.float16)
    parameter = nn.Parameter(ScaledTensor(first.clone(), torch.tensor(DATA[f"{case}/w0_scale"])))
    tx = optimizer(case, parameter)
    for step in range(len(DATA[f"{case}/grad_data"])):
        if step and not freely:
            codes, scale = recorded(case, "w", step - 1)
            parameter.data = ScaledTensor(codes.clone(), scale.clone())
            for name, entry in ENTRIES.items():
                codes, scale = recorded(case, name, step - 1)
                new = codes.clone() if scale is None else ScaledTensor(codes.clone(), scale.clone())
                tx.state[parameter] |= entries_of(entry, new)
        parameter.grad = ScaledTensor(*recorded(case, "grad", step))
        tx.step()
        state = tx.state[parameter]
        after = {"w": (parameter.detach().codes.clone(), parameter.detach().scale.clone())}
        for name, entry in ENTRIES.items():
            x = entry_of(state, entry)
            after[name] = (x.codes.clone(), x.scale.clone()) if is_scaled(x) else (x.clone(), None)
        yield step, after


def order(codes):
    """Codes as integers in the order of their values, neighbours one apart."""
    size = codes.dtype.itemsize
    bits = codes.view({1: torch.uint8, 2: torch.int16}[size]).long() & (256**size - 1)
    sign_bit = 1 << (8 * size - 1)
    return torch.where((bits & sign_bit) != 0, -(bits & (sign_bit - 1)), bits)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_msamps(case):
    decayed_into_gradient = not DATA[f"{case}/decoupled"] and DATA[f"{case}/hyper"][4]
    moved, total = 0, 0
    for step, after in steps(case, freely=False):
        for name, (codes, scale) in after.items():
            want, want_scale = recorded(case, name, step)
            if decayed_into_gradient and name != "w":
                continue  # MS-AMP stores the moments of the gradient without its decay, a defect
            if scale is None:
                torch.testing.assert_close(codes, want, rtol=2e-6, atol=1e-7 * float(want.abs().max()))
                continue
            assert scale == want_scale, (step, name)
            distance = (order(codes) - order(want)).abs()
            if name == "w":  # near zero float16 is finer than float32's rounding of the update
                error = (codes.double() - want.double()).abs() * scale.double()
                limit = 1e-6 * want.double().abs().max() * scale.double()
                assert ((distance <= 1) | (error <= limit)).all()
            else:
                assert distance.max() <= 1, (step, name)
            moved, total = moved + int((distance > 0).sum()), total + distance.numel()
    assert total == 0 or moved <= 0.003 * total


@pytest.mark.parametrize("case", ["adamw_o2", "adamw_o2_zero_first_grad", "adamw_o1"])
def test_run_stays_with_msamp(case):
    for step, after in steps(case, freely=True):
        codes, scale = after["w"]
        want, want_scale = recorded(case, "w", step)
        got, want = codes.double() * scale.double(), want.double() * want_scale.double()
        assert (got - want).norm() <= 2**-10 * want.norm(), step


RECIPES = ("O1", "O2", "O3", "te", "te,moments=E4M3+FP16", "O3,master_weight=FP32")


def pair(recipe, make="adamw", weight_decay=0.1, shape=(48, 40)):
    """One parameter and its optimizer on both sides."""
    row = fp8jax.Recipe.parse(recipe)
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    jax_w, torch_w = jnp.asarray(w), torch.from_numpy(w.copy())
    if row.weight != "FP32":
        format = formats.get(row.weight)
        jax_w = fp8jax.quantize(jax_w, format, power_of_two=True)
        torch_w = quantize(torch_w, format, power_of_two=True)
    tx = getattr(fp8jax.optim, make)(1e-2, recipe, weight_decay=weight_decay)
    torch_w = nn.Parameter(torch_w)
    own = {"adam": Adam, "adamw": AdamW}[make]([torch_w], 1e-2, weight_decay=weight_decay, recipe=recipe)
    return (jax_w, tx), (torch_w, own)


def gradient(step, shape, *, narrow):
    g = np.random.default_rng(step + 1).standard_normal(shape).astype(np.float32) * 10.0 ** (step % 5 - 3)
    if not narrow:
        return jnp.asarray(g), torch.from_numpy(g)
    q = quantize_gradient(torch.from_numpy(g))
    codes = q.codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return ScaledArray(jnp.asarray(codes), jnp.float32(q.scale.item())), q


def as_jax(x):
    tensor, scale = (x.codes, x.scale) if is_scaled(x) else (x, None)
    size = tensor.dtype.itemsize
    array = tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy()
    array = array.view(casts.format_of(tensor.dtype).dtype)
    return array if scale is None else ScaledArray(array, np.float32(scale.item()))


def check_same(got, want, what):
    """Equal scales, and codes equal but for a few ties moved by one."""
    if not isinstance(got, ScaledArray):
        return np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, atol=1e-7, err_msg=what)
    assert float(got.scale) == float(want.scale), what
    got_order, want_order = (
        order(torch.from_numpy(np.array(q.data).view(f"i{q.data.dtype.itemsize}")).view(dtype))
        for q in (got, want)
        for dtype in [{1: torch.float8_e4m3fn, 2: torch.float16}[q.data.dtype.itemsize]]
    )
    distance = (got_order - want_order).abs()
    difference = np.abs(np.asarray(got.data, np.float64) - np.asarray(want.data, np.float64))
    # Near zero float16 is finer than float32's rounding of the update; with L2 decay more so.
    near_zero = difference <= 1e-5 * np.abs(np.asarray(want.data, np.float64)).max()
    assert ((distance <= 1).numpy() | near_zero).all(), what
    assert ((distance > 0).numpy() & ~near_zero).mean() <= 0.003, what


@pytest.mark.parametrize("make", ["adam", "adamw"])
@pytest.mark.parametrize(
    "recipe",
    ["O2", "O3", *(pytest.param(r, marks=pytest.mark.long) for r in RECIPES if r not in ("O2", "O3"))],
)
def test_steps_equal_jaxs(recipe, make):
    """From JAX's state each time, so that a tie moved by one does not become two."""
    (w, tx), (parameter, own) = pair(recipe, make)
    state, row = tx.init(w), fp8jax.Recipe.parse(recipe)
    update = jax.jit(lambda g, s, w: tx.update(g, s, w))
    apply = jax.jit(fp8jax.apply_updates)
    for step in range(12):
        jax_g, g = gradient(step, w.shape, narrow=row.weight_grad == "E4M3")
        updates, state = update(jax_g, state, w)
        w = apply(w, updates)
        parameter.grad = g
        own.step()
        kept = own.state[parameter]
        mu, nu = fp8jax.optim.moments(state)
        pairs = {"exp_avg": mu, "exp_avg_sq": nu}
        if row.master_weight != "-":
            pairs["master"] = state.master
        for name, want in pairs.items():
            check_same(as_jax(entry_of(kept, name)), want, f"{name} of step {step}")
        check_same(as_jax(parameter.detach()), w, f"weight of step {step}")
        put(kept, pairs, parameter, w)


@pytest.mark.parametrize("recipe", ["O3", "O3,master_weight=FP32"])
def test_first_masters_equal_jaxs(recipe):
    """`prepare` and `with_masters` see the plain weight; 2.6% of its norm is lost in E4M3."""
    plain = np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32)
    layer = nn.Linear(40, 48, bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(plain))
    layer, own = fp8jax_torch.prepare(layer, torch.optim.AdamW(layer.parameters(), 1e-2), recipe)
    w = fp8jax.quantize(jnp.asarray(plain), formats.E4M3, power_of_two=True)
    tx = fp8jax.optim.adamw(1e-2, recipe)
    state = fp8jax.optim.with_masters(tx.init(w), plain)
    assert np.array_equal(as_jax(layer.weight.detach().codes), w.data)
    kept = own.state[layer.weight]
    got, want = as_jax(entry_of(kept, "master")), state.master
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for start, loses in ((want, (0, 2.0**-11)), (tx.init(w).master, (0.02, 0.03))):
        lost = np.linalg.norm(fp8jax.quantization.value(start) - plain) / np.linalg.norm(plain)
        assert loses[0] <= lost <= loses[1]


def put(kept, pairs, parameter, w):
    """JAX's state in the place of torch's."""

    def codes(x, like):
        array = np.array(x).view(f"i{like.dtype.itemsize}")
        return torch.from_numpy(array).view(like.dtype)

    for name, want in pairs.items():
        like = entry_of(kept, name)
        if isinstance(want, ScaledArray):
            new = ScaledTensor(codes(want.data, like.codes), torch.tensor(float(want.scale)))
        else:
            new = codes(want, like)
        kept |= entries_of(name, new)
    if isinstance(w, ScaledArray):
        like = parameter.detach().codes
        parameter.data = ScaledTensor(codes(w.data, like), torch.tensor(float(w.scale)))
    else:
        parameter.data = torch.from_numpy(np.array(w))


def snapshot(parameters, own):
    return copy.deepcopy([[p.detach() for p in parameters], [dict(own.state[p]) for p in parameters]])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("recipe", ["O2", "O3", "O1", "te"])
def test_nonfinite_steps_are_skipped(recipe, bad):
    parameters = [pair(recipe)[1][0], nn.Parameter(torch.ones(3))]
    own = AdamW(parameters, 1e-2, recipe=recipe)
    for step in range(3):
        _, parameters[0].grad = gradient(step, parameters[0].shape, narrow=recipe[0] == "O")
        parameters[1].grad = torch.ones(3)
        own.step()
    before = snapshot(parameters, own)
    parameters[1].grad = torch.tensor([1.0, bad, 1.0])
    own.step()
    assert own.skipped == 1
    assert own.has_skipped
    for old, new in zip(tree(before), tree(snapshot(parameters, own)), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)
    parameters[1].grad = torch.ones(3)
    own.step()
    assert own.skipped == 1
    assert not own.has_skipped
    assert all(value(p.detach()).isfinite().all() for p in parameters)


def test_nonfinite_fp8_gradient():
    parameter, own = pair("O2")[1]
    for bad in (np.nan, np.inf):
        g = torch.ones(parameter.shape)
        g[3, 7] = bad
        parameter.grad = quantize_gradient(-g)
        own.step()
    assert own.skipped == 2


def tree(snapshot):
    weights, states = snapshot
    for w in weights:
        yield value(w)
    for state in states:
        for name in sorted(state):
            yield state[name].float()


def test_hostile_gradients():
    generator = np.random.default_rng(0)
    target = torch.randn(16, 16)
    parameter = nn.Parameter(quantize(torch.zeros(16, 16) + 0.1, formats.FP16, power_of_two=True))
    own = AdamW([parameter], 1e-2, recipe="O2", weight_decay=0)
    kinds = [np.inf, np.nan, 3e38, 1e-40, 0.0, 1e30, 1e-20]
    for _ in range(300):
        g = generator.standard_normal((16, 16)).astype(np.float32) * np.float32(kinds[generator.integers(7)])
        parameter.grad = quantize_gradient(torch.from_numpy(g))
        nn.utils.clip_grad_norm_([parameter], 1.0)
        own.step()
        assert value(parameter.detach()).isfinite().all()
    assert own.skipped > 0
    for _ in range(600):
        parameter.grad = quantize_gradient(2 * (value(parameter.detach()) - target) / 256)
        own.step()
    assert ((value(parameter.detach()) - target) ** 2).mean() < 1e-3


def trained(recipe="O2", steps=3):
    parameters = [pair(recipe)[1][0], nn.Parameter(torch.linspace(-1, 1, 7))]
    own = AdamW(parameters, 1e-2, recipe=recipe)
    for step in range(steps):
        advance(parameters, own, step, recipe)
    return parameters, own


def advance(parameters, own, step, recipe="O2"):
    _, parameters[0].grad = gradient(step, parameters[0].shape, narrow=recipe[0] == "O")
    parameters[1].grad = torch.full((7,), 0.1 * step)
    own.step()


@pytest.mark.parametrize("recipe", ["O2", "O3", "O1"])
def test_state_dict_round_trip(recipe):
    parameters, own = trained(recipe)
    own.skipped = 5
    file = io.BytesIO()
    torch.save({"optimizer": own.state_dict(), "parameters": [p.detach() for p in parameters]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(p) for p in saved["parameters"]]
    other = AdamW(again, 1.0, recipe=recipe)
    other.load_state_dict(saved["optimizer"])
    assert other.skipped == 5
    assert other.param_groups[0]["lr"] == 1e-2
    for side in ((parameters, own), (again, other)):
        advance(*side, 3, recipe)
    for one, two in zip(tree(snapshot(parameters, own)), tree(snapshot(again, other)), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_state_of_torchs_adamw_loads():
    plain = nn.Parameter(torch.randn(6, 5))
    torchs = torch.optim.AdamW([plain], lr=0.1)
    plain.grad = torch.randn(6, 5)
    torchs.step()
    own = AdamW([nn.Parameter(plain.detach().clone())], recipe="O2")
    own.load_state_dict(torchs.state_dict())
    (state,) = own.state.values()
    assert state["step"] == 1
    got = entry_of(state, "exp_avg").dequantize()
    torch.testing.assert_close(got, torchs.state[plain]["exp_avg"], rtol=2**-4, atol=1e-6)


def test_bytes_per_parameter():
    (w, tx), (parameter, own) = pair("O2", shape=(512, 512))
    parameter.grad = quantize_gradient(torch.ones(512, 512))
    own.step()
    leaves = jax.tree.leaves(tx.init(w))
    jax_bytes = sum(leaf.nbytes for leaf in leaves)
    kept = sum(t.nbytes for t in own.state[parameter].values())
    assert abs(kept - jax_bytes) <= 16
    total = kept + parameter.detach().codes.nbytes + parameter.grad.codes.nbytes
    assert round(total / parameter.numel(), 2) == 6.0


def test_illegal_arguments():
    w = [nn.Parameter(torch.ones(2))]
    for bad, match in (({"lr": -1}, "`lr`"), ({"betas": (0.9, 1.0)}, "`betas`"), ({"eps": -1}, "`eps`")):
        with pytest.raises(ValueError, match=match):
            AdamW(w, **bad)
    with pytest.raises(ValueError, match="expected floating parameters"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)])
    amsgrad = torch.optim.AdamW(w, amsgrad=True)
    w[0].grad = torch.ones(2)
    amsgrad.step()
    with pytest.raises(ValueError, match="without amsgrad"):
        AdamW(w).load_state_dict(amsgrad.state_dict())


def test_groups_schedules_and_closures():
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    own = AdamW([{"params": [first], "weight_decay": 0.0}, {"params": [second], "lr": 0.0}], 0.1, recipe="O2")
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.5**step)

    def closure():
        own.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    assert own.step(closure) == 8
    schedule.step()
    torch.testing.assert_close(first.detach(), torch.full((4,), 0.9))
    torch.testing.assert_close(second.detach(), torch.ones(4))
    assert own.param_groups[0]["lr"] == 0.05
    assert functools.reduce(max, (group["lr"] for group in copy.deepcopy(own).param_groups)) == 0.05


def test_noncontiguous_and_bf16_parameters():
    base = torch.ones(4, 6)
    parameter = nn.Parameter(base.t())
    half = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    own = AdamW([parameter, half], 0.1, recipe="O2", weight_decay=0)
    parameter.grad, half.grad = torch.ones(4, 6).t(), torch.ones(4, 6, dtype=torch.bfloat16)
    own.step()
    torch.testing.assert_close(parameter.detach(), torch.full((6, 4), 0.9))
    torch.testing.assert_close(half.detach().float(), torch.full((4, 6), 0.9), rtol=2**-8, atol=0)


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_optimizer_without_a_recipe(make):
    for format, recipe in ((formats.E4M3, "O3"), (formats.FP16, "O2")):
        states = []
        for told in ({}, {"recipe": recipe}):
            parameter = nn.Parameter(quantize(torch.ones(4, 4), format, power_of_two=True))
            parameter.grad = torch.ones(4, 4)
            own = make([parameter], **told)
            own.step()
            states.append(own.state[parameter])
        assert {name: x.dtype for name, x in states[0].items()} == {n: x.dtype for n, x in states[1].items()}


@pytest.mark.parametrize(
    "format, recipe",
    [("E4M3", "te"), ("E4M3", "O1"), ("E4M3", "O2"), ("FP16", "bf16"), ("FP16", "te"), ("FP16", "O3")],
)
def test_recipe_for_other_weights_is_refused(format, recipe):
    parameter = nn.Parameter(quantize(torch.ones(4, 4), formats.get(format), power_of_two=True))
    with pytest.raises(ValueError, match=f"`recipe`: expected one with {format} weights.* got {recipe}"):
        AdamW([parameter], recipe=recipe)


def test_prepare_sets_the_recipe():
    """One of ours that was told nothing takes the recipe; one that was told of other weights is refused."""
    model = nn.Sequential(nn.Linear(16, 16))
    prepared, optimizer = fp8jax_torch.prepare(model, AdamW(model.parameters()), "O1", "native")
    assert optimizer.recipe == fp8jax.Recipe.O1 and model[0].weight.dtype == torch.float32
    with pytest.raises(ValueError, match="`recipe`: expected one with E4M3 weights.* got O2"):
        fp8jax_torch.prepare(model, AdamW(model.parameters(), recipe="O2"), "O3", "native")
    with pytest.raises(ValueError, match="`optimizer`: expected one with the masters of"):
        fp8jax_torch.prepare(model, AdamW(model.parameters(), recipe="O3"), "O3,master_weight=FP32", "native")
