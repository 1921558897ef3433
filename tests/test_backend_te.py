"""TransformerEngine as a backend, against the real package; what is said where it is missing.

Here it is not installed, so the tests that need it are skipped; `./dev test-te` runs them. On a CPU it
multiplies in plain JAX (`NVTE_JAX_CUSTOM_CALLS=false`, which `./dev test-te` sets), by the same calls as on
a GPU but for the last one.
"""

import functools
import importlib
import importlib.util
import os
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax import Recipe, backends, formats, quantize
from fp8jax.backends import Device, reference, te
from fp8jax.backends.te import gemm as te_gemm
from fp8jax.dot import dot_general, init_state
from fp8jax.inspect import program, targets
from fp8jax.quantization import UNSET

MATRICES = (((1,), (0,)), ((), ()))
MISSING = te_gemm._why_not_importable()
# `./dev test-te` sets it, and is not to pass by skipping.
assert MISSING is None or "NVTE_JAX_CUSTOM_CALLS" not in os.environ, MISSING
needs_te = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# TransformerEngine's factor starts at 1: where it is compared with, our scales do too.
DELAYED = {
    "hybrid": Recipe.te(amax_history_len=4, first_scale="one"),
    "most_recent": Recipe.te(amax_history_len=4, first_scale="one", amax_compute_algo="most_recent"),
    "e4m3, margin": Recipe.te("E4M3", margin=1, amax_history_len=3, first_scale="one"),
    "history of one": Recipe.te(amax_history_len=1, first_scale="one"),
}
CURRENT = {
    "current": Recipe.parse("te,scaling=current"),
    "current, e4m3": Recipe.parse("te,scaling=current,fp8_format=E4M3"),
}
RECIPES = DELAYED | CURRENT


@pytest.fixture
def gpu(monkeypatch):
    """TransformerEngine believes in an H100.

    It asks the GPU for its compute capability before it does anything in FP8, on a CPU too. What it does
    there depends on the answer in one thing: whether operands are transposed.
    """
    if Device.here().capability is None:
        assert os.environ.get("NVTE_JAX_CUSTOM_CALLS") == "false", "or it calls kernels that a CPU has not"
        monkeypatch.setattr(Device, "here", lambda: Device("NVIDIA H100", "gpu", (9, 0)))
        import transformer_engine_jax

        monkeypatch.setattr(transformer_engine_jax, "get_device_compute_capability", lambda gpu=0: 90)
    with jax.numpy_rank_promotion("allow"):  # its plain JAX has scales of shape (1,)
        yield


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def installed(monkeypatch, capability):
    """As on a machine that has TransformerEngine and a GPU of that capability, or None."""
    monkeypatch.setattr(te_gemm, "_why_not_importable", lambda: None)
    monkeypatch.setattr(Device, "here", lambda: Device("device", "gpu" if capability else "cpu", capability))
    monkeypatch.setattr(backends.xla, "_computes_fp8", lambda: True)


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="down")(nn.gelu(nn.Dense(64, name="up")(x)))


class Twice(nn.Module):
    """One layer used twice; its second input is 8 times the first."""

    dot_general_cls: object = None

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(32, use_bias=False, dot_general_cls=self.dot_general_cls, name="layer")
        return layer(x) + layer(8 * x)


# ---- without it ----


def test_the_reasons(monkeypatch):
    if MISSING:
        assert te.supports(None, False) == MISSING
    for capability, reason in (
        (None, "transformer_engine needs an NVIDIA GPU, and device is none"),
        ((8, 6), "compute capability 8.6 has no GEMMs of FP8, which need 8.9; use the recipe bf16"),
        ((8, 9), None),
        ((10, 0), None),
    ):
        installed(monkeypatch, capability)
        assert te.supports(None, False) == reason
    assert te.supports(None, True) == "transformer_engine multiplies no batches of matrices"


def test_device_here_is_the_default_device():
    for cpu in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(cpu):
            assert Device.here() == ("cpu", "cpu", None)


def test_a_package_that_cannot_be_loaded_is_a_reason(monkeypatch):
    def broken(name, *rest):
        raise OSError("libcublas.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", broken)
    reason = te_gemm._why_not_importable.__wrapped__()
    assert (
        reason
        == "transformer_engine.jax cannot be used: OSError: libcublas.so.13: cannot open shared object file"
    )


def test_a_backend_that_was_asked_for_and_cannot_raises(monkeypatch):
    installed(monkeypatch, (8, 0))
    expected = "`backend`: te cannot run here: compute capability 8.0 has no GEMMs of FP8, .* can: xla"
    with pytest.raises(ValueError, match=expected):
        fp8jax.transform(MLP(), "te", backend="te")
    with pytest.raises(ValueError, match=expected):
        dot_general(draw(0, 4, 16), draw(1, 16, 8), MATRICES, recipe="te", state={}, backend="te")
    installed(monkeypatch, (9, 0))
    batched = (((2,), (1,)), ((0,), (0,)))
    with pytest.raises(ValueError, match="te cannot run here: transformer_engine multiplies no batches"):
        dot_general(draw(0, 2, 4, 16), draw(1, 2, 16, 8), batched, recipe="te", state={}, backend="te")


def test_auto_chooses_by_device_and_says_why(monkeypatch, one_device):
    for capability, choice in (
        (None, "xla (transformer_engine needs an NVIDIA GPU, and device is none)"),
        ((8, 0), "xla (compute capability 8.0 has no GEMMs of FP8, which need 8.9; use the recipe bf16)"),
        ((9, 0), "te (TransformerEngine's cuBLASLt calls)"),
    ):
        installed(monkeypatch, capability)
        assert str(backends.choose("auto")) == choice
    assert str(backends.choose("auto", is_batched=True)) == (
        "xla (transformer_engine multiplies no batches of matrices)"
    )
    assert str(backends.choose("reference")) == "reference (as asked for)"
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert backends.choose("auto").name == "xla"


def test_report_names_te_backend(monkeypatch, one_device):
    x = jnp.ones((16, 32))
    monkeypatch.setattr(te_gemm, "_why_not_importable", lambda: "transformer_engine is not installed")
    for backend, line in (
        ("auto", "backend: xla (transformer_engine is not installed)"),
        ("reference", "backend: reference (as asked for)"),
    ):
        report = fp8jax.transform(MLP(), "te", backend=backend).report(x)
        assert str(report).splitlines()[-1] == line
    installed(monkeypatch, (9, 0))
    batched = lambda params, x: jnp.einsum("bmk,bkn->bmn", x @ params["dense"], params["batch"])  # noqa: E731
    params = {"dense": jnp.ones((32, 32)), "batch": jnp.ones((4, 32, 32))}
    report = fp8jax.transform(batched, "te").report(params, jnp.ones((4, 16, 32)))
    assert [row.backend for row in report.rows] == ["te", "xla"]
    assert str(report).splitlines()[-2:] == [
        "backend: te (TransformerEngine's cuBLASLt calls)",
        "backend: xla (transformer_engine multiplies no batches of matrices)",
    ]


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ("bf16", "gemm=BF16"),
        ("te,interval=2", "interval=2"),
        (
            "te,override_linear_precision=False+False+True",
            r"override_linear_precision=\(False, False, True\)",
        ),
        ("te,scaling=current,margin=1", "margin=1, with scaling=current"),
    ],
)
def test_a_recipe_that_its_modules_do_not_follow_is_refused(recipe, field):
    with pytest.raises(ValueError, match=f"TransformerEngine's JAX modules have no {field}"):
        te.recipe_of(recipe)
    with pytest.raises(ValueError, match=field):
        te.autocast(recipe)
    with pytest.raises(ValueError, match=field):
        te.dot_general_cls(recipe)


def test_state_goes_there_and_back():
    recipe = Recipe.te(amax_history_len=3)
    entry = {
        "scale": jnp.array([0.5, UNSET, 4.0]),
        "amax_history": jnp.array([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0], [6.0, 5.0, 4.0]]),
        "one": jnp.ones(3),
    }
    theirs = te.to_te({"a": {"kernel": entry}, "b": {"c": {"kernel": entry}}})
    assert set(theirs) == {"a", "b"} and set(theirs["b"]) == {"c"}
    assert theirs["a"].keys() == {"TEWrapper_dot_general_0"}
    factors = {"x_scale": [2.0], "kernel_scale": [1.0], "grad_scale": [0.25]}
    histories = {"x_amax_history": [0.0, 2.0, 3.0], "grad_amax_history": [0.0, 5.0, 6.0]}
    for name, value in (factors | histories).items():
        np.testing.assert_array_equal(theirs["a"]["TEWrapper_dot_general_0"][name], value)
    back = te.from_te(theirs, recipe)
    assert jax.tree.structure(back) == jax.tree.structure(
        {"a": {"kernel": entry}, "b": {"c": {"kernel": entry}}}
    )
    # The oldest amax is gone, and a scale that was not set is TransformerEngine's first.
    np.testing.assert_array_equal(back["a"]["kernel"]["scale"], [0.5, 1.0, 4.0])
    np.testing.assert_array_equal(back["a"]["kernel"]["amax_history"], [[3, 2, 0], [0, 0, 0], [6, 5, 0]])


def test_state_in_modules_and_of_stacked_layers():
    stacked = {"scale": jnp.full((5, 3), 0.25), "amax_history": jnp.ones((5, 3, 4))}
    theirs = te.to_te({"dense": {"kernel": stacked}}, name="")
    assert theirs["dense"]["grad_scale"].shape == (5, 1)
    assert theirs["dense"]["x_amax_history"].shape == (5, 4)
    back = te.from_te(theirs, "O2,amax_history_len=4", name="DotGeneral_0")
    assert jax.tree.map(jnp.shape, back) == {
        "dense": {"DotGeneral_0": {"scale": (5, 3), "amax_history": (5, 3, 4), "one": (5, 3)}}
    }
    assert te.to_te({}) == te.from_te({}, "te,scaling=current") == {}


def test_from_te_drops_non_finite():
    """A scale or amax that is not finite in TransformerEngine's state is dropped."""
    theirs = te.to_te({"scale": jnp.ones(3), "amax_history": jnp.ones((3, 4))})
    theirs["x_scale"] = jnp.array([jnp.inf])
    theirs["grad_amax_history"] = jnp.array([0.0, jnp.nan, jnp.inf, 2.0])
    for first_scale, scale in (("one", 1.0), ("tensor", UNSET)):
        ours = te.from_te(theirs, Recipe.te(amax_history_len=4, first_scale=first_scale))
        np.testing.assert_array_equal(ours["scale"], [scale, 1.0, 1.0])
        np.testing.assert_array_equal(ours["amax_history"][2], [2.0, 0.0, 0.0, 0.0])


def test_states_that_mean_something_else_are_refused():
    ours = init_state("te,interval=2,amax_history_len=4")
    with pytest.raises(ValueError, match="got a state with interval > 1"):
        te.to_te({"dense": {"kernel": ours}})
    with pytest.raises(ValueError, match="expected scale and amax_history of delayed scaling; got up"):
        te.to_te({"dense": {"up": jnp.ones(3)}})
    theirs = te.to_te(init_state("te,amax_history_len=4"))
    with pytest.raises(
        ValueError, match="expected scaling=delayed with amax_history_len=4, as the state has"
    ):
        te.from_te(theirs, "te")
    with pytest.raises(ValueError, match="expected x_scale.*; got x_0_scale"):
        te.from_te({"mlp": {"x_0_scale": jnp.ones(1)}}, "te")


# ---- with it ----


@needs_te
@pytest.mark.parametrize("spec", [(1, 0), (1, 1), (0, 0)])
@pytest.mark.parametrize("shape", [(32, 48, 16), (5, 7, 3), (1, 16, 10), (4, 0, 16), (0, 8, 8)])
def test_one_gemm_of_any_shape(spec, shape, gpu):
    m, k, n = shape
    lhs = quantize(draw(0, *((m, k) if spec[0] else (k, m))), formats.E4M3, jnp.float32(0.013))
    rhs = quantize(draw(1, *((n, k) if spec[1] else (k, n))), formats.E5M2, jnp.float32(1.7))
    numbers = (((spec[0],), (spec[1],)), ((), ()))
    got, expected = (
        jax.jit(
            functools.partial(module.dot, dimension_numbers=numbers, out_dtype=jnp.float32, precise=True)
        )(lhs, rhs)
        for module in (te, reference)
    )
    assert got.shape == expected.shape == (m, n) and got.dtype == jnp.float32
    # Both multiply the same codes exactly and add k products in float32, in any order; and each rounds twice
    # more for the scales.
    magnitude = jax.lax.dot_general(*(jnp.abs(x.dequantize()) for x in (lhs, rhs)), numbers)
    assert (jnp.abs(got - expected) <= 2 * (k + 4) * 2.0**-24 * magnitude).all()


@needs_te
def test_a_product_under_vmap_is_that_of_each_example(gpu):
    x, w = draw(0, 3, 8, 16), draw(1, 3, 16, 24)

    def one(x, w, backend="te"):
        return dot_general(x, w, MATRICES, recipe="te,scaling=current", state={}, backend=backend)

    expected = jnp.stack([one(x, w) for x, w in zip(x, w, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(x, w), expected)
    grad = jax.grad(lambda x, w: jax.vmap(one)(x, w).sum())(x, w)
    assert grad.shape == x.shape and (jnp.abs(grad).max(axis=(1, 2)) > 0).all()


def exact_inputs(recipe, count=6):
    """x (32, 48), w (48, 64) and g (32, 64) of each step, on which no order of adding rounds anything.

    Small integers and one element that is the format's max, times powers of two: all scales are powers of
    two, all codes exact, and no sum needs more than 24 bits, as the large ones never meet.
    """
    rng = np.random.default_rng(0)
    top = 448.0 if recipe.fp8_format == "E4M3" else 57344.0
    steps = []
    for step in range(count):
        x, w, g = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((32, 48), (48, 64), (32, 64)))
        x[0, 0], w[1, 0], g[1, 1] = 448.0, -448.0, top
        g = np.zeros_like(g) if step == 3 else g
        # Growing, and falling at once: casts clip, and a window of any length makes a difference.
        grow = 2.0 ** (step if step != 4 else -3)
        steps.append((x * np.float32(grow), w / np.float32(grow), g * np.float32(grow / 64)))
    return [jnp.array(operands) for operands in zip(*steps, strict=True)]


def steps_of(recipe, backend, out_dtype=jnp.float32):
    """y, dx, dw and the state after it, of each step."""

    def step(state, inputs):
        x, w, g = inputs

        def product(x, w, state):
            return dot_general(
                x, w, MATRICES, recipe=recipe, state=state, out_dtype=out_dtype, backend=backend
            )

        y, pull = jax.vjp(product, x, w, state)
        dx, dw, state = pull(g.astype(out_dtype))
        return state, {"y": y, "dx": dx, "dw": dw, "state": state}

    inputs = exact_inputs(Recipe.parse(recipe))
    return jax.jit(lambda *inputs: jax.lax.scan(step, init_state(recipe), inputs)[1])(*inputs)


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@needs_te
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", RECIPES)
def test_same_gemms_and_states_as_other_backends(case, out_dtype, gpu):
    """Bit for bit."""
    got = steps_of(RECIPES[case], "te", out_dtype)
    assert len(np.unique(got["y"].astype(jnp.float32))) > 50
    assert got["y"].dtype == out_dtype
    for backend in ("reference", "xla"):
        assert_same(got, steps_of(RECIPES[case], backend, out_dtype))


def steps_of_its_own(recipe):
    """The same of TransformerEngine's own `nn.Dense(dot_general_cls=...)`."""
    layer = nn.Dense(64, use_bias=False, dot_general_cls=te.dot_general_cls(recipe))
    x, w, g = exact_inputs(recipe)
    state = layer.init(jax.random.key(0), x[0]).get("_overwrite_with_gradient", {})

    def step(state, inputs):
        x, w, g = inputs

        def apply(x, w, state):
            return layer.apply({"params": {"kernel": w}, "_overwrite_with_gradient": state}, x)

        y, pull = jax.vjp(apply, x, w, state)
        dx, dw, state = pull(g)
        return state, {"y": y, "dx": dx, "dw": dw, "state": state}

    return jax.jit(lambda *inputs: jax.lax.scan(step, state, inputs)[1])(x, w, g)


@needs_te
@pytest.mark.parametrize("case", RECIPES)
def test_same_gemms_as_its_own_modules(case, gpu):
    """Bit for bit, and the states convert."""
    recipe = RECIPES[case]
    ours, theirs = steps_of(recipe, "te"), steps_of_its_own(recipe)
    for name in ("y", "dx", "dw"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert_same(te.to_te({"kernel": ours["state"]} if ours["state"] else {}), theirs["state"])
    back = te.from_te(theirs["state"], recipe)
    if recipe.scaling == "current":
        assert back == ours["state"] == {}
    else:
        # All but the oldest amax, which TransformerEngine has dropped.
        kept = ours["state"] | {"amax_history": ours["state"]["amax_history"].at[..., -1].set(0.0)}
        assert_same(back["kernel"], kept)


@needs_te
def test_exchange_of_states_with_its_modules(gpu):
    recipe = DELAYED["hybrid"]
    layers = {
        "theirs": nn.Dense(32, dot_general_cls=te.dot_general_cls(recipe)),
        "ours": fp8jax.transform(nn.Dense(32), recipe, backend="te"),
    }
    names = {"theirs": "TEWrapper_dot_general_0", "ours": "kernel"}
    x, y = draw(0, 32, 48), draw(1, 32, 32)

    @functools.partial(jax.jit, static_argnums=0)
    def step(name, variables):
        loss, grads = jax.value_and_grad(lambda v: jnp.mean((layers[name].apply(v, x) - y) ** 2))(variables)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], grads["params"])
        return {"params": params, "_overwrite_with_gradient": grads["_overwrite_with_gradient"]}, loss

    def run(name, variables, count):
        losses = []
        for _ in range(count):
            variables, loss = step(name, variables)
            losses.append(float(loss))
        return variables, losses

    def moved(variables, to):
        state = variables["_overwrite_with_gradient"]
        state = te.to_te(state) if to == "theirs" else te.from_te(state, recipe)
        assert state.keys() == {names[to]}
        return {**variables, "_overwrite_with_gradient": state}

    start, _ = run("theirs", layers["theirs"].init(jax.random.key(0), x), 6)
    _, whole = run("theirs", start, 6)
    middle, first = run("ours", moved(start, "ours"), 3)
    _, last = run("theirs", moved(middle, "theirs"), 3)
    assert whole[-1] < 0.9 * whole[0]
    # Each side's scale is the other's reciprocal, to one rounding, and each adds in an order of its own: a
    # few of the codes are the neighbouring ones.
    np.testing.assert_allclose([*first, *last], whole, rtol=1e-3)


@needs_te
def test_its_modules_under_autocast_and_its_older_name(gpu, monkeypatch):
    import transformer_engine.jax as package

    recipe = DELAYED["hybrid"]
    layer = package.flax.DenseGeneral(features=16, dtype=jnp.float32)
    x = draw(0, 32, 48)

    def state_after(variables):
        loss = lambda v: jnp.mean(layer.apply(v, x) ** 2)  # noqa: E731
        return jax.grad(loss)(variables)["fp8_metas"]

    states = []
    for _ in range(2):
        with te.autocast(recipe):
            states.append(state_after(layer.init(jax.random.key(0), x)))
        monkeypatch.delattr(package, "autocast", raising=False)  # as before 2.9
    assert_same(*states)
    assert "fp8_metas" not in layer.init(jax.random.key(0), x)  # it ended with the context
    back = te.from_te({"layer": states[0]}, recipe)
    assert float(back["layer"]["kernel"]["amax_history"][0, 0]) == float(jnp.abs(x).max())
    again = te.to_te(back, name="")["layer"]
    # A reciprocal's reciprocal is the same number but for one rounding.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-23), again, states[0])


@needs_te
def test_recipes_say_the_same_there():
    theirs = te.recipe_of(Recipe.te("E4M3", margin=1, amax_history_len=7, amax_compute_algo="most_recent"))
    assert type(theirs).__name__ == "DelayedScaling" and theirs.fp8_format.name == "E4M3"
    assert (theirs.margin, theirs.amax_history_len, theirs.amax_compute_algo) == (1, 7, "most_recent")
    theirs = te.recipe_of("O2,scaling=current")
    assert type(theirs).__name__ == "Float8CurrentScaling" and theirs.fp8_format.name == "HYBRID"


@needs_te
def test_layer_used_twice(gpu):
    """Each use has a state; TransformerEngine's own module adds the states."""
    recipe = Recipe.te(amax_history_len=4, first_scale="one")
    x = draw(0, 16, 32)
    states = {}
    for name, model, grad in (
        ("theirs", Twice(te.dot_general_cls(recipe)), jax.grad),
        (
            "ours",
            fp8jax.transform(Twice(), recipe, backend="te"),
            lambda f: lambda v: fp8jax.value_and_grad(f)(v)[2],
        ),
    ):
        variables = model.init(jax.random.key(0), x)
        new = grad(lambda v, model=model: jnp.sum(model.apply(v, x) ** 2))(variables)
        states[name] = new["_overwrite_with_gradient"]
    added = te.from_te(states["theirs"], recipe)["layer"]["kernel"]
    largest = float(8 * jnp.abs(x).max())
    for name, amax in (("kernel", largest / 8), ("kernel#1", largest)):
        own = states["ours"]["layer"][name]
        assert float(own["amax_history"][0, 0]) == amax
        assert float(own["scale"][0]) == pytest.approx(amax / 448, rel=1e-6)
    assert float(added["amax_history"][0, 0]) == pytest.approx(largest / 8 + largest)  # which no tensor has


@needs_te
@pytest.mark.parametrize(
    ("make", "recipe"),
    [(MLP, "te"), (MLP, "O1"), (MLP, "O3"), (Twice, "te+O2"), (Twice, "te,scaling=current")],
)
def test_every_level_and_a_changed_backend(make, recipe, gpu):
    """A checkpoint of one backend goes on with the other."""
    x, y = draw(0, 32, 32), draw(1, 32, 32)
    models = {name: fp8jax.transform(make(), recipe, backend=name) for name in ("te", "xla")}
    tx = fp8jax.optim.adamw(1e-2, recipe)
    start = models["te"].init(jax.random.key(0), x)

    @functools.partial(jax.jit, static_argnums=0)
    def step(name, variables, opt_state):
        loss_fn = lambda v: jnp.mean((models[name].apply(v, x) - y) ** 2)  # noqa: E731
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    def run(names):
        variables, opt_state, losses = start, tx.init(start), []
        for name in names:
            variables, opt_state, loss = step(name, variables, opt_state)
            losses.append(float(loss))
        return variables, losses

    whole, losses = run(["xla"] * 6)
    changed, changing = run(["te", "te", "xla", "xla", "te", "te"])
    assert jax.tree.structure(changed) == jax.tree.structure(whole)
    assert losses[-1] < losses[0]
    # Sums are added in other orders: a few codes, and Adam's smallest quotients, are the neighbouring ones.
    np.testing.assert_allclose(changing, losses, rtol=1e-3)
    assert "backend: te (as asked for)" in str(models["te"].report(x)).splitlines()
    rows = [row._replace(backend="xla") for row in models["te"].report(x).rows]
    assert rows == list(models["xla"].report(x).rows)


@needs_te
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU has a capability of its own")
@pytest.mark.parametrize(("capability", "transposes"), [(90, 3), (100, 0)])
def test_the_program_for_a_gpu_has_its_three_gemms(capability, transposes, monkeypatch, gpu):
    import transformer_engine.jax.quantize as package

    # Its GEMM and its quantizers each have their own name for the question.
    gemm = importlib.import_module("transformer_engine.jax.cpp_extensions.gemm")
    monkeypatch.setattr(gemm, "get_device_compute_capability", lambda gpu=0: capability)
    for module in (gemm, package):
        monkeypatch.setattr(module, "is_fp8_gemm_with_all_layouts_supported", lambda: capability >= 100)
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "true")
    jax.clear_caches()  # of products traced for another GPU
    x, w, state = jnp.ones((32, 48), jnp.bfloat16), jnp.ones((48, 64)), init_state("te")

    def loss(x, w, state):
        y = dot_general(x, w, MATRICES, recipe="te", state=state, out_dtype=jnp.bfloat16, backend="te")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(x, w, state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@te_gemm_v2_ffi" in line]
    types = [re.findall(r"tensor<\d+x\d+x(f8\w+|bf16|f32)>", line.split(" : (")[1]) for line in calls]
    assert types == [
        ["f8E4M3FN", "f8E4M3FN", "bf16"],
        ["f8E5M2", "f8E4M3FN", "bf16"],
        ["f8E4M3FN", "f8E5M2", "f32"],  # the gradient of a float32 weight
    ]
    assert ["use_split_accumulator = true" in line for line in calls] == [False, True, True]
    assert text.count("stablehlo.transpose") == transposes
    assert "stablehlo.dot_general" not in text

    if capability == 90 and targets.why_not() is None:
        read = program.read(
            targets.compile_for(jax.grad(loss, argnums=(0, 1, 2)), x, w, state, target="h200")
        )
        found = {(gemm.kind, gemm.lhs, gemm.rhs, gemm.out_shape, gemm.fast) for gemm in read.gemms}
        assert found == {
            ("te", "f8e4m3fn", "f8e4m3fn", (32, 64), True),
            ("te", "f8e5m2", "f8e4m3fn", (32, 48), False),
            ("te", "f8e4m3fn", "f8e5m2", (48, 64), False),
        }

    # What a report counts in such a program.
    model = fp8jax.transform(MLP(), "te", backend="te")
    report = model.report(jnp.ones((32, 32)))
    assert report.fp8_share == 1 and [row.flops for row in report.rows] == [2 * 32 * 32 * 64] * 2
    jax.clear_caches()
