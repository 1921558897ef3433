"""torch's stochastic rounding, remainders and roots: JAX's, bit for bit."""

import copy
import io

import fp8jax_torch
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from fp8jax_torch import casts, random
from fp8jax_torch.optim import Adam, AdamW, step
from fp8jax_torch.optim.entries import entries_of, entry_of
from fp8jax_torch.scaled import quantize, value
from test_rounding import FORMATS, numbers
from test_torch_optim import gradient
from torch import nn

import fp8jax
from fp8jax import Recipe, formats
from fp8jax.optim.step.weight_rounding import decode_weight
from fp8jax.quantization import cast_stochastically
from fp8jax.quantization.rounding import leaf_seeds, other_bits, random_bits

FP8 = "fp8"
OF_O2 = "O2,rounding=stochastic+nearest+value"
OF_O3 = "O3,rounding=stochastic+kahan+root"
SHAPES = ((48, 40), (64, 64), (7,))
ENTRIES = {"exp_avg": "mu", "exp_avg_sq": "nu", "exp_avg_sq_root": "nu", "master": "", "remainder": ""}


def bits(x):
    """The bits of an array or a tensor."""
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous()
        return x.view(-1).view(getattr(torch, f"uint{8 * x.itemsize}")).numpy().reshape(x.shape)
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_stochastic_casts_equal_jaxs(format):
    edges = np.float32([np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30])
    nans = np.uint32([2**31 - 1, 2**32 - 1]).view(np.float32)  # random bits carry into their sign
    x = np.concatenate([numbers(format), edges, nans])
    chances = np.random.default_rng(0).integers(0, 2**32, x.shape, np.uint32)
    for given in (chances, np.zeros_like(chances), np.full_like(chances, 2**32 - 1)):
        want = cast_stochastically(jnp.asarray(x), format, jnp.asarray(given))
        got = casts.cast_stochastically(torch.from_numpy(x), format, torch.from_numpy(given.view(np.int32)))
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("key", [(0, 0), (0, 3), (7, 2**32 - 1)], ids=str)
def test_random_bits_equal_jaxs(key):
    """Of the parameter, and of parts of it; the counter passes 2**31 and wraps as JAX's."""
    seed = (key[0] << 32) + key[1]
    want_seeds = leaf_seeds(jnp.asarray(key, jnp.uint32), jnp.int32(1000), 3)
    for leaf, want_seed in enumerate(want_seeds):
        own = random.leaf_seed(seed, 1000, leaf)
        assert int(own) % 2**32 == int(want_seed)
        first = random_bits(want_seed, (5, 64))
        got = random.random_bits(own, 0, torch.empty(5, 64))
        for each, want in zip((got, *random.other_bits(got)), (first, *other_bits(first)), strict=True):
            np.testing.assert_array_equal(bits(each), np.asarray(want))
        part = random.random_bits(own, 128, torch.empty(3, 64))
        np.testing.assert_array_equal(bits(part), np.asarray(first)[2:])
    last = random.random_bits(own, 2**31 - 1, torch.empty(2))
    assert len({int(part[0]) for part in (last, *random.other_bits(last))}) == 3


def pair(recipe, make, **options):
    """Parameters and their optimizers on both sides: two kernels and a bias."""
    row, numbers = Recipe.parse(recipe), np.random.default_rng(0)
    ours, jaxs = [], []
    for shape in SHAPES:
        w = 0.02 * numbers.standard_normal(shape).astype(np.float32)
        is_kernel = w.ndim > 1
        format = formats.get(row.weight)
        jaxs.append(
            fp8jax.quantize(jnp.asarray(w), format, power_of_two=True) if is_kernel else jnp.asarray(w)
        )
        ours.append(
            quantize(torch.from_numpy(w), format, power_of_two=True) if is_kernel else torch.tensor(w)
        )
    ours = [nn.Parameter(w) for w in ours]
    tx = getattr(fp8jax.optim, make)(1e-3, recipe, weight_decay=0.1, **options)
    kind = {"adam": Adam, "adamw": AdamW}[make]
    return (jaxs, tx), (ours, kind(ours, 1e-3, weight_decay=0.1, recipe=recipe, **options))


def grads_of(number):
    """(JAX's, torch's)."""
    found = [gradient(number + i, shape, narrow=len(shape) > 1) for i, shape in enumerate(SHAPES)]
    return [each[0] for each in found], [each[1] for each in found]


def advance(parameters, own, number):
    for parameter, grad in zip(parameters, grads_of(number)[1], strict=True):
        parameter.grad = grad
    own.step()


def in_jax(state, weights, leaf):
    """JAX's arrays of one parameter, by the names of torch's."""
    mu, nu = fp8jax.optim.moments(state)
    nu = nu[leaf]
    second = ("exp_avg_sq_root", nu.root) if isinstance(nu, fp8jax.optim.storage.Root) else ("exp_avg_sq", nu)
    found = dict([("exp_avg", mu[leaf]), second, ("weight", weights[leaf])])
    found |= {"master": state.master[leaf], "remainder": state.remainder[leaf]}
    scaled = {name: x for name, x in found.items() if fp8jax.quantization.is_scaled(x)}
    plain = {name: x for name, x in found.items() if x is not None and name not in scaled}
    return (
        plain
        | {f"{name}_codes": x.data for name, x in scaled.items()}
        | {f"{name}_scale": x.scale for name, x in scaled.items()}
    )


def on_torch(parameter, own):
    return {**own.state[parameter], **entries_of("weight", parameter.detach())}


@pytest.mark.parametrize("make", ["adamw", "adam"])
@pytest.mark.parametrize("recipe", [FP8, OF_O2, OF_O3])
def test_steps_equal_jaxs(recipe, make):
    """Step after step, all bits of AdamW. Of Adam, and where XLA fuses no multiply-adds (tests compile fast,
    see conftest.py), few codes are others, most of them remainders, which hold a weight's last bits."""
    is_exact = make == "adamw" and not jax.config.read("jax_disable_most_optimizations")
    (weights, tx), (parameters, own) = pair(recipe, make, seed=5)
    state, update, apply = tx.init(weights), jax.jit(tx.update), jax.jit(fp8jax.apply_updates)
    for number in range(6):
        updates, state = update(grads_of(number)[0], state, weights)
        weights = apply(weights, updates)
        advance(parameters, own, number)
        for leaf, parameter in enumerate(parameters):
            want, got = in_jax(state, weights, leaf), on_torch(parameter, own)
            assert got.keys() - {"step"} == want.keys()
            for name, array in want.items():
                different = (bits(got[name]) != bits(array)).mean()
                if name.endswith("_scale") or (is_exact and len(SHAPES[leaf]) > 1):
                    assert different == 0, (number, leaf, name)
                elif array.dtype == jnp.float32:
                    np.testing.assert_allclose(got[name].detach(), array, rtol=1e-6)
                else:
                    assert different <= 0.005, (number, leaf, name)
    assert {str(x.dtype) for x in own.state[parameters[0]].values()} == {
        "torch.float32", "torch.float16", f"torch.{formats.get(Recipe.parse(recipe).moments[0]).dtype.name}",
        *(["torch.float8_e4m3fn"] if "kahan" in Recipe.parse(recipe).rounding else []),
    }  # fmt: skip


# Plain 16-bit parameters ###########################################################################

PLAIN = "O1,rounding=nearest+stochastic+value"
of_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def plain_pair(dtype, recipe, rate=1e-3, decay=0.1):
    """Plain parameters with weights of all sizes, some of them 0, and their optimizers on both sides."""
    w = np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32)
    w *= np.exp2(np.random.default_rng(1).integers(-12, 1, (48, 40)))
    w[:2] = 0
    parameter = nn.Parameter(torch.from_numpy(w).to(dtype))
    jaxs = jnp.asarray(parameter.detach().float().numpy(), str(dtype).removeprefix("torch."))
    tx = fp8jax.optim.adamw(rate, recipe, weight_decay=decay, seed=5)
    return (jaxs, tx), (parameter, AdamW([parameter], rate, weight_decay=decay, recipe=recipe, seed=5))


@of_16_bits
@pytest.mark.parametrize("recipe", [FP8, PLAIN])
def test_steps_of_16_bit_parameters_equal_jaxs(dtype, recipe):
    (weights, tx), (parameter, own) = plain_pair(dtype, recipe)
    state, update = tx.init(weights), jax.jit(tx.update)
    for number in range(6):
        grad = np.random.default_rng(number).standard_normal((48, 40)).astype(np.float32)
        grad = torch.from_numpy(grad).to(dtype)
        updates, state = update(jnp.asarray(grad.float().numpy(), weights.dtype), state, weights)
        weights = optax.apply_updates(weights, updates)
        parameter.grad = grad
        own.step()
        assert (bits(parameter) != bits(weights)).mean() <= 0.005
        if recipe == FP8:
            # A code of a float16 remainder is as small as float32's rounding of a step.
            remainder = own.state[parameter]["remainder"]
            assert (remainder.numpy() != np.asarray(state.remainder)).mean() <= 0.05
            ours = step._dequantized(parameter.detach(), 1.0, remainder)
            theirs = decode_weight(weights, state.remainder)
            code = step._fraction(parameter.detach().float(), dtype).numpy()
            error = np.abs(ours.numpy() - np.asarray(theirs))
            assert (error > 1.01 * code).mean() <= 0.02 and error.max() <= 1e-3 * 1e-3  # of the rate


@of_16_bits
def test_small_steps_of_16_bit_parameters(dtype):
    """200 steps of 1e-4 are 0.02, and the last bit of 0.5 is 0.004 or 0.0005. The remainder has the rest."""
    parameter = nn.Parameter(torch.full((64,), 0.5, dtype=dtype))
    own = AdamW([parameter], 1e-4, recipe=FP8, weight_decay=0.0)
    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        own.step()
    state = own.state[parameter]
    assert state["remainder"].dtype == torch.int8
    assert sum(x.nbytes for x in state.values() if x.ndim) == 64 * 4
    exact = step._dequantized(parameter.detach(), 1.0, state["remainder"])
    np.testing.assert_allclose(0.5 - exact, 0.02, rtol=0.05)  # first moments have two bits
    np.testing.assert_allclose(0.5 - exact.mean(), 0.02, rtol=0.01)
    last_bit = 0.5 * float(torch.finfo(dtype).eps)
    assert (exact - parameter.detach().float()).abs().max() <= 0.51 * last_bit


@of_16_bits
def test_state_of_16_bit_parameters_loads(dtype):
    """A run that was saved goes on with the same bits; another remainder is refused."""
    (_, _), (parameter, own) = plain_pair(dtype, FP8)
    (_, _), (again, other) = plain_pair(dtype, FP8)

    def advance(parameter, own, number):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        own.step()

    for number in range(3):
        advance(parameter, own, number)
    buffer = io.BytesIO()
    torch.save({"weight": parameter.detach(), "optimizer": own.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    other.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        again.copy_(saved["weight"])
    for number in range(3, 6):
        advance(parameter, own, number)
        advance(again, other, number)
    assert_same(snapshot([parameter], own), snapshot([again], other))
    saved["optimizer"]["state"][0]["remainder"] = torch.zeros(3, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"expected an int8 remainder of shape \[48, 40\]; got"):
        other.load_state_dict(saved["optimizer"])


def test_parts_do_not_change_bits(monkeypatch):
    whole, parts = pair(FP8, "adamw")[1], pair(FP8, "adamw")[1]
    advance(*whole, 0)
    monkeypatch.setattr(step, "_PART", {"cpu": 100})
    advance(*parts, 0)
    assert_same(snapshot(*whole), snapshot(*parts))


def snapshot(parameters, own):
    return [{name: bits(x).copy() for name, x in on_torch(p, own).items()} for p in parameters]


def assert_same(one, other):
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("recipe", [FP8, OF_O3])
@pytest.mark.parametrize("copied", ["saved", "deepcopy"])
def test_round_trip(recipe, copied):
    parameters, own = pair(recipe, "adamw", seed=2**32 - 2)[1]
    for number in range(2):
        advance(parameters, own, number)
    if copied == "deepcopy":
        again, other = copy.deepcopy((parameters, own))
    else:
        file = io.BytesIO()
        torch.save({"optimizer": own.state_dict(), "parameters": [p.detach() for p in parameters]}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = [nn.Parameter(p) for p in saved["parameters"]]
        other = AdamW(again, recipe=recipe, seed=1)
        other.load_state_dict(saved["optimizer"])
        assert_same(snapshot(again, other), snapshot(parameters, own))
    for side in ((parameters, own), (again, other)):
        advance(*side, 2)
    assert_same(snapshot(again, other), snapshot(parameters, own))


def test_seeds_differ():
    sides = [pair(FP8, "adamw", seed=seed)[1] for seed in (1, 2)]
    for side in sides:
        advance(*side, 0)
    first, other = (snapshot(*side)[0] for side in sides)
    assert all((first[name] != other[name]).any() for name in ("remainder", "exp_avg_codes"))
    with pytest.raises(ValueError, match="`seed`: expected 0 or more"):
        AdamW([nn.Parameter(torch.ones(2))], seed=-1)


def test_skipped_step_keeps_everything():
    parameters, own = pair(FP8, "adamw")[1]
    advance(parameters, own, 0)
    before = snapshot(parameters, own)
    for parameter, grad in zip(parameters, grads_of(1)[1], strict=True):
        parameter.grad = grad
    parameters[-1].grad = torch.full(SHAPES[-1], torch.inf)
    own.step()
    assert own.skipped == 1
    assert_same(before, snapshot(parameters, own))


@pytest.mark.parametrize("recipe, bound", [(FP8, 0.05), ("O2,rounding=nearest+stochastic+value", 0.3)])
def test_small_steps(recipe, bound):
    """Weights of 0.02 follow 200 steps of 1e-6 in one direction; those of O2 stand still."""
    weight = nn.Parameter(quantize(torch.full((64, 64), 0.02), formats.FP16, power_of_two=True))
    own, start = Adam([weight], 1e-6, recipe=recipe), value(weight.detach())
    for _ in range(200):
        weight.grad = torch.ones(64, 64)
        own.step()
    assert abs((value(weight.detach()) - start).mean() / -2e-4 - 1) < bound


def test_states_of_other_recipes_load():
    """The second moment's value becomes its root and comes back; a remainder starts at zero."""
    (parameters, o2), (others, fp8) = pair("O2", "adamw")[1], pair(FP8, "adamw")[1]
    advance(parameters, o2, 0)
    fp8.load_state_dict(o2.state_dict())
    old, new = o2.state[parameters[0]], fp8.state[others[0]]
    moment = value(entry_of(old, "exp_avg_sq"))
    root = value(entry_of(new, "exp_avg_sq_root"))
    torch.testing.assert_close(root**2, moment, rtol=2e-3, atol=1e-12)
    assert "remainder" not in new
    advance(others, fp8, 1)
    o2.load_state_dict(fp8.state_dict())
    assert o2.state[parameters[0]].keys() == old.keys()
    assert fp8.state[others[0]]["remainder"].float().abs().max() > 0


@pytest.mark.parametrize("recipe", [FP8, OF_O3])
def test_weight_written_by_others(recipe):
    """Where another value was written to the weight, the remainder ends; elsewhere it stays."""
    parameters, own = pair(recipe, "adamw")[1]
    for number in range(3):
        advance(parameters, own, number)
    weight, state = parameters[0], own.state[parameters[0]]
    kept = state["remainder"].float()
    codes = weight.detach().codes
    codes[:24] = (codes[:24].float() / 64).to(codes.dtype)
    own._refresh(weight)
    assert (kept[:24] != 0).float().mean() > 0.5
    large = kept[:24].abs() > 16 * codes[:24].float().abs() * 2**-9
    assert (state["remainder"].float()[:24][large] == 0).all() and large.any()
    np.testing.assert_array_equal(state["remainder"].float()[24:], kept[24:])


@pytest.mark.parametrize("recipe", [FP8, OF_O3, "O1,rounding=nearest+kahan+value"])
def test_prepare(recipe):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number in range(2):  # a step before, whose moments are taken over
        nn.functional.mse_loss(model(torch.ones(8, 32)), torch.zeros(8, 32)).backward()
        optimizer.step()
        if number == 0:
            model, optimizer = fp8jax_torch.prepare(model, optimizer, recipe, "native")
    assert optimizer.recipe == Recipe.parse(recipe) and optimizer.skipped == 0
    assert optimizer.state[model[0].weight]["remainder"].float().abs().max() > 0
    assert fp8jax_torch.report(fp8jax_torch.transform(nn.Linear(64, 64), recipe, "native")).rows[0].fp8


@pytest.mark.parametrize("backend", ["te", "msamp", "torchao"])
def test_other_backends_refuse(backend):
    module = __import__(f"fp8jax_torch.backends.{backend}", fromlist=["refuses"])
    recipe = Recipe.parse("te,moments=E4M3+FP16,rounding=stochastic+nearest+value")
    assert module.refuses(Recipe.FP8).startswith(f"{backend} has no ")
    assert module.refuses(recipe).startswith(f"{backend} has no ")


def test_optimizers_that_round_otherwise_are_refused():
    model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="to keep moments=FP32\\+FP32.*rounding=nearest\\+kahan\\+value"):
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        fp8jax_torch.prepare(model, sgd, "O1,rounding=nearest+kahan+value", "native")
    with pytest.raises(ValueError, match="`optimizer`: expected one with moments and rounding of O2,round"):
        fp8jax_torch.prepare(model, AdamW(model.parameters(), recipe="O2"), OF_O2, "native")
