"""Adapters on frozen kernels: what is trained, what is not, and that a merged model is the adapted one."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax import LoRA, Rule
from fp8jax.quantization import is_scaled
from fp8jax.variables import FROZEN, PARAMS, SCALING

OUT = 32  # no side of a kernel is so small that it stays wide by default
X = jax.random.normal(jax.random.key(1), (16, 32))
Y = jnp.tanh(X[:, :OUT])
LEVELS = [
    "fp32",
    "O2",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("bf16", "fp16_amp", "te", "O3")),
]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(OUT, name="down")(nn.gelu(nn.Dense(64, name="up")(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32, name="fc")(nn.LayerNorm()(x)), None


class Stack(nn.Module):
    """Three layers, scanned and rematerialized."""

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(nn.remat(Layer), length=3, variable_axes={"params": 0}, split_rngs={"params": True})
        return scanned(name="layers")(x, None)[0][:, :OUT]


def loss_of(apply):
    return lambda variables: jnp.mean((apply(variables, X) - Y) ** 2)


@functools.cache
def trained(recipe, module=Net, steps=5):
    """A model, its plain start, its variables before and after steps, and the optimizer's state."""
    model = fp8jax.transform(module(), recipe, lora=LoRA(rank=4, alpha=6.0))
    plain = jax.jit(model.module.init)(jax.random.key(0), X)
    start = model.adapt(jax.random.key(2), plain, X)
    tx = fp8jax.optim.adamw(1e-2, recipe)

    @jax.jit
    def step(variables, state):
        loss, grads, variables = fp8jax.value_and_grad(loss_of(model.apply))(variables)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss

    variables, state, losses = start, tx.init(start), []
    for _ in range(steps):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    assert steps == 1 or losses[-1] < losses[0]
    return model, plain, start, variables, state


def kernels(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat if "kernel" in jax.tree_util.keystr(path)}


# The merged model has the same kernels, so what differs is the rounding of two layers' inputs: noise of
# 0.026 of a product's size in E4M3 (31.6 dB), 0.002 in bf16 with its kernel's; some five times that, of
# outputs near 1.
BOUNDS = {"fp32": 2e-6, "bf16": 0.03, "fp16_amp": 0.005, "te": 0.2, "O2": 0.2, "O3": 0.2}


@pytest.mark.parametrize("recipe", LEVELS)
def test_training_and_merging_adapters(recipe):
    """Only adapters are trained, and merged with the kernels they give the same model."""
    model, plain, start, variables, state = trained(recipe)
    # The frozen values, and everything that the state has moments for.
    jax.tree.map(np.testing.assert_array_equal, variables[FROZEN], start[FROZEN])
    shapes = {"up": {"lora_a": (32, 4), "lora_b": (4, 64)}, "down": {"lora_a": (64, 4), "lora_b": (4, OUT)}}
    for tree in (variables[PARAMS], *fp8jax.optim.moments(state)):
        assert jax.tree.map(lambda x: x.shape, tree, is_leaf=is_scaled) == shapes
    for layer, old in start[PARAMS].items():
        assert not old["lora_b"].any() and (variables[PARAMS][layer]["lora_b"] != 0).any()
    # As kept: bytes per number of the kernels.
    wide = recipe in ("fp32", "bf16", "fp16_amp")
    for name, kernel in kernels(variables[FROZEN]).items():
        assert is_scaled(kernel) != wide and (kernel if wide else kernel.data).dtype.itemsize == (
            4 if wide else 1
        ), name
    got = jax.jit(model.apply)(variables, X)
    merged = jax.jit(model.module.apply)(model.merge(variables), X)
    np.testing.assert_allclose(got, merged, rtol=0, atol=BOUNDS[recipe])
    # It is not the base model.
    assert np.abs(jax.jit(model.module.apply)(plain, X) - got).max() > 0.1


@pytest.mark.parametrize("recipe", ["fp32", "O2"])
def test_unmerging_gives_back_the_base(recipe):
    model, plain, _, variables, _ = trained(recipe)
    merged = model.merge(variables, plain)
    back = model.unmerge(merged, variables)
    # Added and taken away: two roundings of numbers below 2.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2 * 2.0**-23), back, plain)
    moved = [
        np.abs(a - b).max() for a, b in zip(kernels(merged).values(), kernels(plain).values(), strict=True)
    ]
    assert min(moved) > 1e-3
    # Other pretrained values below the same adapters, and what the frozen kernels are.
    other = model.quantize(merged, like=variables)
    for (name, kernel), rounded in zip(kernels(merged).items(), kernels(other[FROZEN]).values(), strict=True):
        unit = float(rounded.scale.max()) * 16 if recipe == "O2" else 0.0  # half an ulp at 448
        assert np.abs(jnp.asarray(rounded) - kernel).max() <= unit, name
    jax.tree.map(np.testing.assert_array_equal, other[PARAMS], variables[PARAMS])
    assert jax.tree.structure(other) == jax.tree.structure(variables)


def test_gradients_are_those_of_the_formula():
    model, plain, _, variables, _ = trained("fp32")
    base = plain[PARAMS]

    def written_out(adapters):
        def layer(x, name):
            own = adapters[name]
            low_rank = 6.0 / 4 * (x @ own["lora_a"]) @ own["lora_b"]
            return x @ base[name]["kernel"] + low_rank + base[name]["bias"][None]

        return jnp.mean((layer(nn.gelu(layer(X, "up")), "down") - Y) ** 2)

    expected = jax.jit(jax.grad(written_out))(variables[PARAMS])
    _, grads, new = fp8jax.value_and_grad(loss_of(model.apply))(variables)
    assert set(grads) == set(variables[PARAMS]) and set(new) == set(variables)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, expected)


@pytest.mark.parametrize("recipe", ["bf16", "O2"])
def test_no_gradient_of_a_frozen_kernel_is_in_the_program(recipe):
    """The products that XLA is left with: of each layer the kernel's, with its input and, but for the first
    layer, with its output gradient; and five of its adapters, but for the first four."""
    model, _, start, *_ = trained(recipe)
    step = jax.jit(lambda variables: fp8jax.value_and_grad(loss_of(model.apply))(variables))
    program = step.lower(start).compile().as_text()
    dots = [line for line in program.splitlines() if " dot(" in line]
    assert not any("32,64]" in line.split("=")[1].split("{")[0] for line in dots)  # the shape of up's kernel
    # up: y, xA, (xA)B, dB, d(xA), dA; down: the same, dx, d(xA) A^T.
    assert len(dots) == 6 + 8
    casts = [line for line in program.splitlines() if "cast_rhs" in line]
    assert not casts


def test_adapters_of_scanned_layers():
    """Scanned and rematerialized layers have stacks of adapters."""
    model, _, _, variables, _ = trained("O2", Stack)
    own = variables[PARAMS]["layers"]["fc"]
    assert own["lora_a"].shape == (3, 32, 4) and own["lora_b"].shape == (3, 4, 32)
    assert variables[FROZEN]["layers"]["fc"]["kernel"].scale.shape == (3, 1, 1)
    assert variables[SCALING]["layers"]["fc"]["kernel"]["scale"].shape == (3, 3)
    apply = jax.jit(model.apply)
    got, merged = apply(variables, X), jax.jit(model.module.apply)(model.merge(variables), X)
    # The bound is for outputs near 1; these, sums of three layers and their input, are near 1.6.
    np.testing.assert_allclose(got, merged, rtol=0, atol=BOUNDS["O2"] * np.std(merged))
    # Each layer's own: the base with the adapters of one layer left out is another model.
    without = jax.tree.map(lambda x: x.at[1].set(0), variables[PARAMS])
    assert np.abs(apply({**variables, PARAMS: without}, X) - got).max() > 0.01


class Mixed(nn.Module):
    """Layers of each kind; the second einsum contracts its kernel's second axis."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((4, 8), name="heads")(x)
        x = nn.DenseGeneral(48, axis=(-2, -1), name="out")(x)
        x = nn.Einsum((48, 64), "bd,dh->bh", name="first")(x)
        x = nn.Einsum((32, 64), "bd,hd->bh", name="second")(x)
        return nn.Dense(8, name="lm_head")(x)


def test_layers_of_each_kind_and_the_report():
    lora = LoRA(rank=3)
    model = fp8jax.transform(Mixed(), "te", rules=[Rule("first", "gemm=BF16")], lora=lora)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    shapes = {
        name: (own["lora_a"].shape[0], own["lora_b"].shape[1]) for name, own in variables[PARAMS].items()
    }
    assert shapes == {"heads": (32, 32), "out": (32, 48), "first": (48, 64)}
    assert not is_scaled(variables[FROZEN]["first"]["kernel"]) and is_scaled(
        variables[FROZEN]["second"]["kernel"]
    )
    random = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape) * 0.3, variables[PARAMS])
    wide = fp8jax.transform(Mixed(), "fp32", lora=LoRA(rank=3, targets=tuple(shapes)))
    changed = {PARAMS: random, FROZEN: model.dequantize(variables)[PARAMS]}
    np.testing.assert_allclose(
        jax.jit(wide.apply)(changed, X), jax.jit(Mixed().apply)(wide.merge(changed), X), rtol=1e-4, atol=1e-5
    )
    report = str(model.report(X))
    assert "yes, adapters of rank 3" in report and "rule: gemm=BF16, adapters of rank 3" in report
    assert {row.path: row.lora for row in model.report(X).rows}["second"] == 0


@pytest.mark.parametrize(
    "lora, text",
    [
        (lambda: LoRA(rank=0), "`rank`"),
        (lambda: LoRA(weight="INT4"), "`weight`"),
        (lambda: LoRA(targets="up"), "`targets`"),
        (lambda: LoRA(targets=["up"]), r"`targets`: expected a tuple of patterns.*got \['up'\]"),
        (lambda: LoRA(targets=(3,)), r"`targets`: expected a tuple of patterns.*got \(3,\)"),
        (lambda: LoRA(rank=True), "`rank`"),
        *(
            (functools.partial(LoRA, alpha=bad), "`alpha`: .*got")
            for bad in (0, -1.0, None, "x", np.nan, np.inf)
        ),
        *((functools.partial(LoRA, seed=bad), "`seed`: .*got") for bad in (-1, None, "a", 0.5)),
        (lambda: LoRA(targets=("sideways",)), "matches no layer"),
        (lambda: LoRA(targets=("second",)), "cannot have adapters"),
        (lambda: LoRA(targets=("lm_head",)), "exclude"),
    ],
)
def test_what_cannot_be_is_refused(lora, text):
    with pytest.raises(ValueError, match=text):
        fp8jax.transform(Mixed(), "te", lora=lora()).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="'frozen'"):
        fp8jax.transform(Net(), "te", lora=LoRA()).apply(Net().init(jax.random.key(0), X), X)


def test_variables_and_modules_of_another_model_are_refused():
    model, other = fp8jax.transform(Net(), "O2", lora=LoRA(rank=2)), nn.Dense(OUT, name="up")
    plain = Net().init(jax.random.key(0), X)
    variables = model.adapt(jax.random.key(1), plain, X)
    wide = jax.tree.map(lambda x: jnp.concatenate([x, x]), plain)
    foreign = {"params": {"sideways": other.init(jax.random.key(0), X)["params"]}}
    for act, message in (
        (
            lambda: model.adapt(jax.random.key(1), wide, X),
            r"`plain`: .*'down/bias' has shape \(64,\), not \(32,\)",
        ),
        (lambda: model.adapt(jax.random.key(1), foreign, X), "`plain`: .*'down/bias' is missing"),
        (
            lambda: model.adapt(jax.random.key(1), plain["params"], X),
            "`plain`: expected variables with 'params'",
        ),
        (lambda: model.merge(plain), "`variables`: expected variables with 'frozen'; got 'params'"),
        (lambda: model.merge(variables, wide), r"`base`: .*'down/bias' has shape \(64,\), not \(32,\)"),
        (lambda: model.unmerge(foreign, variables), "`merged`: .*'down/bias' is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            act()
    adapted = fp8jax.transform(Plain(nnx.Rngs(0)), "O2", lora=LoRA(rank=2))
    for act, name in (
        (lambda other: fp8jax.adapters.nnx.merge(adapted, other), "base"),
        (lambda other: fp8jax.adapters.nnx.unmerge(other, adapted), "merged"),
    ):
        with pytest.raises(
            ValueError, match=f"`{name}`: .*layer 'down' with a kernel of shape .64, {OUT}.; got none"
        ):
            act(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
        with pytest.raises(TypeError, match=f"`{name}`: expected an NNX module; got dict"):
            act({})


@pytest.mark.parametrize("weight, dtype", [("BF16", "bfloat16"), ("FP16", "float16"), ("FP32", "float32")])
def test_frozen_kernels_can_have_other_formats(weight, dtype):
    _, plain, *_ = trained("O2")
    expected = jax.jit(Net().apply)(plain, X)
    for recipe in ("bf16", "O2"):
        model = fp8jax.transform(Net(), recipe, lora=LoRA(weight=weight))
        variables = model.adapt(jax.random.key(0), plain, X)
        kernel = variables[FROZEN]["up"]["kernel"]
        assert (kernel.data if weight == "FP16" else kernel).dtype == dtype
        # In O2 the GEMM rounds the kernel as well.
        atol = 1.5 * BOUNDS[recipe]
        np.testing.assert_allclose(jax.jit(model.apply)(variables, X), expected, rtol=0, atol=atol)


# NNX ##############################################################################################


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, OUT, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def nnx_model(recipe):
    """The NNX twin of `trained(recipe)` at its start."""
    _, plain, start, *_ = trained(recipe)
    module = Plain(nnx.Rngs(0))
    for name in ("up", "down"):
        for part in ("kernel", "bias"):
            getattr(getattr(module, name), part).set_value(plain[PARAMS][name][part])
    model = fp8jax.transform(module, recipe, lora=LoRA(rank=4, alpha=6.0))
    for name, own in start[PARAMS].items():
        assert getattr(model, name).lora_a.shape == own["lora_a"].shape
        getattr(model, name).lora_a.set_value(own["lora_a"])
    return module, model


@pytest.mark.parametrize("recipe", ["fp32", "O2"])
def test_an_nnx_module_does_the_same(recipe):
    linen, _, _, expected, _ = trained(recipe)
    module, model = nnx_model(recipe)
    optimizer = nnx.Optimizer(model, fp8jax.optim.adamw(1e-2, recipe), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        _, grads = fp8jax.value_and_grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(5):
        step(model, optimizer)
    assert set(nnx.to_flat_state(nnx.state(model, nnx.Param)).paths) == {
        (name, part) for name in ("up", "down") for part in ("lora_a", "lora_b")
    }
    got = jax.jit(linen.apply)(expected, X)
    np.testing.assert_allclose(model(X), got, rtol=0, atol=1e-5 if recipe == "fp32" else 1e-2)
    merged = fp8jax.adapters.nnx.merge(model)
    assert type(merged) is Plain and type(merged.up.kernel) is nnx.Param and type(merged.up) is nnx.Linear
    np.testing.assert_allclose(merged(X), model(X), rtol=0, atol=BOUNDS[recipe])
    np.testing.assert_array_equal(fp8jax.adapters.nnx.dequantize(model).up.kernel[...], merged.up.kernel[...])
    back = fp8jax.adapters.nnx.unmerge(fp8jax.adapters.nnx.merge(model, module), model)
    np.testing.assert_allclose(back.up.kernel[...], module.up.kernel[...], rtol=0, atol=2 * 2.0**-23)
    assert "adapters of rank 4" in str(fp8jax.report(model, X))
    assert type(module.up.kernel) is nnx.Param  # the user's is not touched


def test_nnx_adapters_with_example_inputs():
    """Kernels that a trace finds get the adapters of kernels that their layers name."""
    module = Plain(nnx.Rngs(0))
    models = [fp8jax.transform(module, "O2", lora=LoRA(rank=2), inputs=inputs) for inputs in (None, [X])]
    named, found = (nnx.state(model) for model in models)
    jax.tree.map(np.testing.assert_array_equal, found, named)
    np.testing.assert_array_equal(models[1](X), models[0](X))


class Stacked(nnx.Module):
    """Two layers made under `nnx.vmap` and scanned."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(32, 32, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        axes = nnx.StateAxes(
            {(nnx.Param, fp8jax.adapters.nnx.FP8State, fp8jax.adapters.nnx.Frozen): 0, ...: None}
        )

        @nnx.scan(in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return x + layer(x)

        return run(self.layers, x)[:, :OUT]


def test_nnx_layers_are_scanned():
    model = fp8jax.transform(Stacked(nnx.Rngs(0)), "O2", lora=LoRA(rank=2))
    assert model.layers.lora_a.shape == (2, 32, 2) and model.layers.kernel.get_value().scale.shape == (
        2,
        1,
        1,
    )
    tx = optax.chain(fp8jax.optim.clip_by_global_norm(1.0), fp8jax.optim.adamw(1e-2, "O2"))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    step = nnx.jit(lambda model: fp8jax.value_and_grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model))
    first, grads = step(model)
    optimizer.update(model, grads)
    assert step(model)[0] < first and (model.layers.lora_b.get_value() != 0).any()


# Kernels that something else reads #################################################################

W = {"w": jax.random.normal(jax.random.key(5), (32, 32)) * 0.2}
WV = {**W, "v": jax.random.normal(jax.random.key(6), (32, 64)) * 0.2}


def bumped(variables):
    """The variables with adapters that change the output."""
    return {**variables, PARAMS: jax.tree.map(lambda x: x + 0.1, variables[PARAMS])}


@pytest.mark.parametrize(
    "read",
    [
        lambda w, x: (x @ w) @ w.T,
        lambda w, x: (x @ w) * jnp.sum(w**2),
        lambda w, x: (x @ w) * jax.lax.stop_gradient(w).max(),
        lambda w, x: (x + w[jnp.arange(16)]) @ w,
        lambda w, x: (x @ w) + (x[0] @ w)[None],
        lambda w, x: (x @ w) + jax.vmap(lambda w: w * 2)(w)[:16],
        lambda w, x: (x @ w) + jnp.tile(x[:, :16] @ w.reshape(16, 64), (1, 1))[:, :32],
        lambda w, x: jax.lax.scan(lambda x, row: (x + row[None], None), x, w)[0] @ w,
    ],
    ids=["transposed", "sum", "frozen", "table", "vector", "vmap", "reshaped", "scan"],
)
def test_no_adapters_on_a_kernel_with_other_reads(read):
    """Adapters add to the output of a matmul alone, so that another read would not see them."""
    fn = lambda params, x: read(params["w"], x) @ params["v"]  # noqa: E731
    model = fp8jax.transform(fn, "fp32", lora=LoRA(rank=4))
    variables = bumped(model.init(WV, X))
    assert list(variables[PARAMS]) == ["v"]
    report = model.report(variables, X)
    assert {row.path: row.lora for row in report.rows if row.kernel_shape}["w"] == 0
    assert "w has no adapters: another operation" in report.note
    got = model.apply(variables, X)
    np.testing.assert_allclose(got, fn(model.dequantize(variables), X), rtol=2e-4, atol=2e-4)
    with pytest.raises(
        ValueError, match="layer 'w', .* cannot have adapters.*no other operation may read it"
    ):
        fp8jax.transform(fn, "fp32", lora=LoRA(targets=("w",))).init(WV, X)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jax.jit(jnp.matmul)(x @ w, w),
        lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) + x @ w.T.T,
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: 2 * x @ w, x),
        lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x) @ w.reshape(32, 4, 8).reshape(32, 32),
    ],
    ids=["jit", "cast", "cond", "remat"],
)
def test_adapters_on_a_kernel_of_several_matmuls(fn):
    model = fp8jax.transform(lambda params, x: fn(params["w"], x), "fp32", lora=LoRA(rank=4))
    variables = bumped(model.init(W, X))
    got, merged = model.apply(variables, X), fn(model.dequantize(variables)["w"], X)
    np.testing.assert_allclose(got, merged, rtol=0, atol=0.02 * np.abs(merged).max())
    assert np.abs(got - fn(W["w"], X)).max() > 0.1 * np.abs(merged).max()


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.gelu(self.a(x)) @ self.a.kernel[...].T)


def test_adapters_on_a_tied_nnx_kernel_are_refused():
    for targets in (None, ("a",)):
        model = fp8jax.transform(Tied(nnx.Rngs(0)), "fp32", lora=LoRA(rank=4, targets=targets))
        with pytest.raises(ValueError, match="`lora`: .* first axes read; got unexpected ones for 'a'"):
            model(X)
    model = fp8jax.transform(Tied(nnx.Rngs(0)), "fp32", lora=LoRA(rank=4, targets=("b",)))
    model.b.lora_b.set_value(model.b.lora_b[...] + 0.1)
    np.testing.assert_allclose(model(X), fp8jax.adapters.nnx.merge(model)(X), rtol=1e-4, atol=1e-4)


def test_an_nnx_method_without_a_matmul_needs_no_adapters():
    class Norm(nnx.Linear):
        def norm(self):
            return jnp.sum(self.kernel[...] ** 2)

    plain = Norm(32, 32, rngs=nnx.Rngs(0))
    model = fp8jax.transform(plain, "te", lora=LoRA(rank=4))
    assert float(model.norm()) == pytest.approx(float(plain.norm()), rel=0.01)


def test_parameters_beside_the_adapters():
    """A new head is trained with them, and is no adapter."""
    model = fp8jax.transform(nn.Sequential([nn.Dense(32)]), "te", lora=LoRA(rank=4))
    variables = model.init(jax.random.key(0), X)
    variables[PARAMS]["head"] = {"kernel": jnp.ones((32, 3))}

    def loss_fn(variables):
        return jnp.mean((model.apply(variables, X) @ variables[PARAMS]["head"]["kernel"]) ** 2)

    _, grads, _ = fp8jax.value_and_grad(loss_fn)(variables)
    assert jnp.any(grads["head"]["kernel"] != 0) and jnp.any(grads["layers_0"]["lora_b"] != 0)
    assert set(model.merge(variables)[PARAMS]) == {"layers_0"}


# Adapters of another model ##########################################################################


def of_other_models():
    """Adapters that do not belong to `Net` with adapters of rank 4 on all layers, and what the error says."""
    own = fp8jax.transform(Net(), "fp32", lora=LoRA(rank=4)).init(jax.random.key(0), X)[PARAMS]
    other = fp8jax.transform(Net(), "fp32", lora=LoRA(rank=8)).init(jax.random.key(0), X)[PARAMS]
    turned = {name: {"lora_a": pair["lora_b"].T, "lora_b": pair["lora_a"].T} for name, pair in own.items()}
    shapes = r"expected lora_a of shape .64, 4. and lora_b of shape .4, 32. for 'down/kernel'; got "
    return {
        "rank": (other, "expected adapters of rank 4 for 'down/kernel'; got rank 8"),
        "turned": (turned, shapes + r"\(32, 4\) and \(4, 64\)"),
        "swapped": ({"up": own["down"], "down": own["up"]}, shapes + r"\(32, 4\) and \(4, 64\)"),
        "prefix": ({"model": own}, "expected adapters .*; got unexpected ones for 'model/down'"),
        "none": ({}, "expected adapters .*; got none"),
        "one lacks": ({"up": own["up"]}, "expected adapters for 'down/kernel'; got none"),
        "half": (
            {**own, "up": {"lora_a": own["up"]["lora_a"]}},
            "expected adapters .*; got unexpected ones for 'up'",
        ),
        "more": ({**own, "head": own["up"]}, "expected adapters .*; got unexpected ones for 'head'"),
    }


@pytest.mark.parametrize("case", of_other_models())
def test_adapters_of_another_model_are_refused(case):
    """Otherwise the base model ran, or the adapters had another alpha / rank."""
    adapters, message = of_other_models()[case]
    model = fp8jax.transform(Net(), "fp32", lora=LoRA(rank=4))
    plain = Net().init(jax.random.key(0), X)
    wrong = {**model.adapt(jax.random.key(0), plain, X), PARAMS: adapters}
    function = fp8jax.transform(
        lambda params, x: Net().apply({"params": params}, x), "fp32", lora=LoRA(rank=4)
    )
    function.init(plain["params"], X)
    untraced = fp8jax.transform(Net(), "fp32", lora=LoRA(rank=4))
    acts = [
        lambda: model.apply(wrong, X),
        lambda: fp8jax.value_and_grad(loss_of(model.apply))(wrong),
        lambda: model.merge(wrong),
        lambda: model.merge(wrong, plain),
        lambda: model.unmerge(plain, wrong),
        lambda: model.dequantize(wrong),
        lambda: function.apply(wrong, X),
        lambda: function.dequantize(wrong),
    ]
    # Without a trace nothing tells which layers had adapters.
    if case not in ("one lacks", "half"):
        acts.append(lambda: untraced.merge(wrong))
    for act in acts:
        with pytest.raises(ValueError, match="^`lora`: " + message):
            act()


def test_adapters_of_layers_that_are_no_targets_are_refused():
    own = fp8jax.transform(Net(), "fp32", lora=LoRA(rank=4)).init(jax.random.key(0), X)
    model = fp8jax.transform(Net(), "fp32", lora=LoRA(rank=4, targets=("up",)))
    for act in (lambda: model.apply(own, X), lambda: model.merge(own)):
        with pytest.raises(
            ValueError, match="`lora`: .*that `targets` choose .*; got unexpected ones for 'down'"
        ):
            act()


def test_nnx_adapters_of_another_model_are_refused():
    def model(**options):
        return fp8jax.transform(Plain(nnx.Rngs(0)), "fp32", lora=LoRA(**{"rank": 4, **options}))

    own, other = (nnx.state(model(rank=rank), nnx.LoRAParam) for rank in (4, 8))
    swapped = nnx.State({"up": own["down"], "down": own["up"]})
    for state, options, message in (
        (other, {}, "expected adapters of rank 4 for 'down/kernel'; got rank 8"),
        (swapped, {}, r"expected lora_a of shape \(64, 4\) .* for 'down/kernel'; got \(32, 4\) and"),
        (own, {"targets": ("up",)}, "`targets` choose .*; got unexpected ones for 'down'"),
    ):
        wrong = model(**options)
        nnx.update(wrong, state)
        for act in (wrong, lambda x, wrong=wrong: fp8jax.adapters.nnx.merge(wrong)):
            with pytest.raises(ValueError, match="^`lora`: .*" + message):
                act(X)


def test_an_nnx_layer_alone_uses_its_adapters():
    model = fp8jax.transform(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), "fp32", lora=LoRA(rank=4))
    base = model(X)
    model.lora_b.set_value(model.lora_b[...] + 0.1)
    np.testing.assert_allclose(model(X), fp8jax.adapters.nnx.merge(model)(X), rtol=1e-4, atol=1e-4)
    assert np.abs(model(X) - base).max() > 0.1


class SmallEinsum(nnx.Module):
    def __init__(self, rngs):
        self.up, self.out = nnx.Linear(32, 64, rngs=rngs), nnx.Einsum("bi,io->bo", (64, 8), (8,), rngs=rngs)

    def __call__(self, x):
        return self.out(self.up(x))


def test_a_small_nnx_einsum_has_no_adapters():
    """Its dot product is not replaced under an FP8 recipe, unless a rule names it."""
    for recipe, rules, has_adapters in (
        ("te", (), False),
        ("te", [Rule("out", "te")], True),
        ("fp32", (), True),
    ):
        model = fp8jax.transform(SmallEinsum(nnx.Rngs(0)), recipe, rules=rules, lora=LoRA(rank=4))
        assert hasattr(model.out, "lora_a") == has_adapters
        assert np.isfinite(model(X)).all()


def test_a_method_of_some_layers_ignores_the_adapters_of_others():
    model = fp8jax.transform(Plain(nnx.Rngs(0)), "fp32", lora=LoRA(rank=4))
    np.testing.assert_allclose(model.up(X), Plain(nnx.Rngs(0)).up(X), atol=1e-5)


# From the variables of an FP8 model #################################################################


@pytest.mark.parametrize("recipe", ["O1", "O2", "fp8"])
def test_the_variables_of_an_fp8_model_are_requantized(recipe):
    """Trained weights in FP16 become E4M3, and a merged model has plain variables."""
    trained_in_fp8 = fp8jax.transform(Net(), recipe).init(jax.random.key(0), X)
    assert trained_in_fp8[PARAMS]["up"]["kernel"].data.dtype == jnp.float16
    model = fp8jax.transform(Net(), recipe, lora=LoRA(rank=4))
    variables = model.adapt(jax.random.key(1), trained_in_fp8, X)
    expected = model.adapt(jax.random.key(1), Net().init(jax.random.key(0), X), X)
    for name, kernel in kernels(variables[FROZEN]).items():
        assert kernel.data.dtype == jnp.float8_e4m3fn, name
        np.testing.assert_allclose(
            jnp.asarray(kernel), kernels(expected[FROZEN])[name], atol=2.0**-4
        )  # an ulp
    for plain in (model.merge(variables, trained_in_fp8), model.unmerge(trained_in_fp8, variables)):
        assert list(plain) == [PARAMS] and not any(map(is_scaled, kernels(plain).values()))
        assert np.isfinite(Net().apply(plain, X)).all()
    wide = fp8jax.transform(Net(), recipe, lora=LoRA(rank=4, weight="FP32"))
    frozen = wide.adapt(jax.random.key(1), trained_in_fp8, X)[FROZEN]
    assert {kernel.dtype for kernel in kernels(frozen).values()} == {jnp.dtype("float32")}


def test_an_nnx_base_in_fp8_is_merged_as_its_plain_module():
    base = fp8jax.transform(Plain(nnx.Rngs(0)), "O2")
    merged = fp8jax.adapters.nnx.merge(fp8jax.transform(Plain(nnx.Rngs(0)), "O2", lora=LoRA(rank=4)), base)
    assert type(merged) is Plain and merged.up.kernel.get_value().dtype == jnp.float32
    expected = fp8jax.adapters.nnx.dequantize(base).up.kernel[...]
    np.testing.assert_array_equal(merged.up.kernel[...], expected)


# On many devices ##################################################################################


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_train_over_devices(stage):
    model, _, start, expected, _ = trained("O2", steps=1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    zero = fp8jax.comm.Zero(mesh, "O2", stage=stage)
    tx = fp8jax.optim.adamw(1e-2, "O2", zero=zero)
    loss_fn = lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)  # noqa: E731

    @jax.jit
    def step(variables):
        variables = zero.place(variables)
        loss, grads, variables = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, X, Y)
        updates, _ = tx.update(grads, tx.init(variables), variables)
        return fp8jax.apply_updates(variables, updates), loss

    variables, _ = step(start)
    jax.tree.map(np.testing.assert_array_equal, variables[FROZEN], start[FROZEN])
    for got, want in zip(jax.tree.leaves(variables[PARAMS]), jax.tree.leaves(expected[PARAMS]), strict=True):
        # Adam's first step is the gradient's sign, which FP8 on the wire may turn where it is next to zero.
        assert np.mean(np.abs(got - want) > 1e-4) < 0.02


def test_a_frozen_model_computes_the_same():
    """Kernels of a model with adapters are quantized already, in a function as in a Linen module."""
    params = {"w": jax.random.normal(jax.random.key(3), (32, OUT))}
    function = fp8jax.transform(lambda params, x: x @ params["w"], "te", lora=LoRA(rank=2))
    module = fp8jax.transform(Net(), "te", lora=LoRA(rank=2))
    for model, first in ((function, params), (module, jax.random.key(0))):
        variables = model.init(first, X)
        frozen = model.freeze(variables, X)
        assert sorted(frozen) == sorted(variables)
        np.testing.assert_array_equal(model.apply(frozen, X), model.apply(variables, X))


# The gradient in a loop of one's own ##############################################################


def told(take):
    """What taking a gradient warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take()
    return [str(each.message) for each in caught]


LOST = [
    "a gradient is taken with respect to weights but not to the FP8 scaling state: its new amaxes are lost"
]


@pytest.mark.parametrize("module", [Net, Stack])
def test_adapters_alone_lose_the_scaling_state(module):
    """One warning, as for full training; none where the state is in the gradient or not there."""
    model = fp8jax.transform(module(), "te", lora=LoRA(rank=4))
    variables = model.init(jax.random.key(0), X)
    loss = loss_of(model.apply)
    found = told(lambda: jax.grad(lambda params: loss({**variables, PARAMS: params}))(variables[PARAMS]))
    assert [text.split(". ")[0] for text in found] == LOST
    compiled = jax.jit(jax.grad(lambda params: loss({**variables, PARAMS: params})))
    assert len(told(lambda: compiled(variables[PARAMS]))) == 1
    assert told(lambda: fp8jax.value_and_grad(loss)(variables)) == []
    assert told(lambda: jax.grad(lambda x: jnp.sum(model.apply(variables, x)))(X)) == []

    model = fp8jax.transform(module(), "te,scaling=current", lora=LoRA(rank=4))
    variables = model.init(jax.random.key(0), X)
    loss = loss_of(model.apply)
    grads = lambda: jax.grad(lambda params: loss({**variables, PARAMS: params}))(variables[PARAMS])  # noqa: E731
    assert told(grads) == []


class WithHead(nnx.Module):
    def __init__(self, rngs):
        self.up, self.head = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, OUT, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.up(x)))


def squares(model):
    return jnp.mean((model(X) - Y) ** 2)


def test_nnx_adapters_alone_lose_the_scaling_state():
    model = fp8jax.transform(WithHead(nnx.Rngs(0)), "te", lora=LoRA(rank=4))
    found = told(lambda: nnx.value_and_grad(squares, argnums=nnx.DiffState(0, nnx.LoRAParam))(model))
    assert [text.split(". ")[0] for text in found] == LOST
    assert told(lambda: fp8jax.value_and_grad(squares)(model)) == []


def test_a_head_alone_loses_the_scaling_state():
    """The layer in high precision is trained, the FP8 layers below are not: their inputs may still change."""
    model = fp8jax.transform(WithHead(nnx.Rngs(0)), "te")
    of_head = nnx.DiffState(0, lambda path, variable: isinstance(variable, nnx.Param) and "head" in path)
    assert [text.split(". ")[0] for text in told(lambda: nnx.grad(squares, argnums=of_head)(model))] == LOST
    of_all = nnx.DiffState(0, nnx.Param)
    assert set(text.split(". ")[0] for text in told(lambda: nnx.grad(squares, argnums=of_all)(model))) == {
        *LOST
    }


def test_merging_after_a_donated_step():
    """`adapt` shares what has no adapters with the pretrained variables, whose arrays a step then deletes."""
    module, x = nn.Dense(32), jnp.ones((4, 32))
    pretrained = module.init(jax.random.key(0), x)
    model = fp8jax.transform(module, "te", lora=LoRA(rank=2))
    variables = model.adapt(jax.random.key(1), pretrained, x)
    want = jax.tree.map(jnp.copy, model.merge(variables, pretrained))
    step = lambda v: jax.tree.map(lambda x: x.reshape(-1).reshape(x.shape), v)  # noqa: E731
    donated = jax.jit(step, donate_argnums=0)(variables)
    assert pretrained[PARAMS]["bias"].is_deleted()
    got = model.merge(donated, pretrained)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), got, want))
    module.apply(got, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_merged_kernels_have_the_dtype_of_the_module(dtype):
    x = jnp.ones((4, 32), dtype)
    module = nn.Dense(32, param_dtype=dtype)
    model = fp8jax.transform(module, "te", lora=LoRA(rank=2))
    pretrained = module.init(jax.random.key(0), x)
    variables = model.adapt(jax.random.key(1), pretrained, x)
    for merged in (model.merge(variables, pretrained), model.dequantize(variables)):
        assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(dtype)}
