"""FP8 for functions of parameters: the jaxpr computes what the function says, with FP8 dot products."""

import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations

import fp8jax
from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.quantization import is_scaled, value
from fp8jax.recipe import PRESETS

LEVELS = ("te", "O1", "O2", "O3")
LAYERS, WIDTH, HIDDEN, WORDS = 3, 32, 64, 50


def decoder(params, tokens):
    """Raw pytrees: an embedding, scanned and rematerialized layers, a transposed kernel, a tied head."""

    def layer(x, p):
        hidden = jax.nn.silu(jnp.einsum("btd,df->btf", x, p["up"].astype(jnp.bfloat16)))
        return x + hidden @ p["down"].astype(jnp.bfloat16), None

    x = params["embedding"][tokens].astype(jnp.bfloat16)
    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    x = x @ params["mid"].astype(jnp.bfloat16).T
    return jnp.einsum("btd,vd->btv", x, params["embedding"].astype(jnp.bfloat16)).astype(jnp.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@functools.cache
def decoder_inputs():
    layers = {"up": normal(0, LAYERS, WIDTH, HIDDEN), "down": normal(1, LAYERS, HIDDEN, WIDTH)}
    params = {"embedding": normal(2, WORDS, WIDTH), "mid": normal(3, WIDTH, WIDTH), "layers": layers}
    params = jax.tree.map(lambda x: 0.1 * x, params)
    return params, jax.random.randint(jax.random.key(4), (4, 17), 0, WORDS)


def cross_entropy(apply, params, tokens):
    logits = apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def trained(apply, variables, tx, steps=20):
    tokens = decoder_inputs()[1]

    @jax.jit
    def step(variables, state):
        loss = functools.partial(cross_entropy, apply)
        loss, grads, variables = fp8jax.value_and_grad(loss)(variables, tokens)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss

    state = tx.init(variables)
    for _ in range(steps):
        variables, state, loss = step(variables, state)
    return float(loss), variables


@functools.cache
def loss_of_bf16():
    return trained(decoder, decoder_inputs()[0], optax.adamw(3e-3))[0]


@pytest.mark.parametrize("level", LEVELS)
def test_decoder_trains(level):
    """Every level trains a decoder of raw pytrees as bf16 does, with its chart's kernels and gradients."""
    params, tokens = decoder_inputs()
    model = fp8jax.transform(decoder, level)
    variables = model.init(params, tokens)
    tx = fp8jax.optim.adamw(3e-3, level)
    loss, after = trained(model.apply, variables, tx)
    assert loss < 3.0 and abs(loss / loss_of_bf16() - 1) < 0.05
    up, state = after["params"]["layers"]["up"], after["_overwrite_with_gradient"]["layers"]["up"]
    assert state["scale"].shape == (LAYERS, 3)
    assert is_scaled(up) == (level != "te") and not is_scaled(after["params"]["embedding"])
    if level != "te":
        assert up.scale.shape == (LAYERS, 1, 1)
        grads = jax.eval_shape(fp8jax.value_and_grad(functools.partial(cross_entropy, model)), after, tokens)[
            1
        ]
        assert grads["layers"]["up"].data.dtype == formats.E4M3.dtype


def test_report_of_decoder():
    """The report names every dot product of a parameter, and why some are not in FP8."""
    report = fp8jax.transform(decoder, "te").report(*decoder_inputs())
    assert [(row.path, row.fp8, row.reason) for row in report.rows] == [
        ("layers/up", True, ""),
        ("layers/down", True, ""),
        ("mid", True, ""),
        ("embedding", False, "embeddings stay as they are, unless a rule names them"),
    ]
    tokens = 4 * 17
    assert report.rows[0].flops == LAYERS * 2 * tokens * WIDTH * HIDDEN
    assert report.flops == sum(row.flops for row in report.rows)


def everything(params, x, flag):
    """Control flow, custom derivatives and effects of every kind around dot products."""

    @jax.custom_vjp
    def doubled(w, x):
        return 2 * x @ w

    doubled.defvjp(
        lambda w, x: (doubled(w, x), (w, x)), lambda kept, g: (2 * kept[1].T @ g, 2 * g @ kept[0].T)
    )
    y = doubled(params["a"], x)
    y = lax.cond(flag, lambda y: y @ params["b"], lambda y: y @ params["a"], y)
    frozen, still = lax.stop_gradient((params["b"], y))
    y = y + lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ frozen), (0, still))[1]
    y = lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y @ params["b"]), y)
    y, ys = lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), y, params["stack"])
    left, right = jnp.split(params["wide"], 2, axis=1)
    y = jnp.sin(y @ left) + jax.jit(lambda y, w: y @ w.T.reshape(WIDTH, WIDTH))(y, right.T)
    return y, ys, jnp.linalg.norm(params["b"]), params["a"][0], jax.nn.softplus(params["b"])


def everything_inputs():
    params = {"a": normal(0, WIDTH, WIDTH), "b": normal(1, WIDTH, WIDTH), "stack": normal(2, 2, WIDTH, WIDTH)}
    params["wide"] = normal(3, WIDTH, 2 * WIDTH)
    return jax.tree.map(lambda w: 0.2 * w, params), normal(4, 8, WIDTH), jnp.array(True)


def test_excluded_function_is_the_same():
    """With nothing chosen, the evaluated jaxpr computes bit for bit what the function computes."""
    params, *args = everything_inputs()
    model = fp8jax.transform(everything, "te,exclude=*")
    with pytest.raises(ValueError, match="expected a dot product that can run in FP8"):
        model.init(params, *args)
    pairs = [jax.jit(f)(v, *args) for f, v in ((model.apply, {"params": params}), (everything, params))]
    for new, old in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_array_equal(new, old)


def test_inputs_without_rows_are_told_of():
    model = fp8jax.transform(lambda params, x: x @ params["w"], "te")
    with pytest.raises(
        ValueError, match="expected a dot product with numbers to multiply; all are empty, as"
    ):
        model.init({"w": normal(0, WIDTH, HIDDEN)}, normal(1, 0, WIDTH))


@pytest.mark.parametrize("level", ("fp32", "bf16", "fp16_amp"))
def test_wide_gemms(level):
    """A wider recipe multiplies in its format, and scales a float16 loss."""
    x, w = normal(0, 16, WIDTH), normal(1, WIDTH, HIDDEN)
    model = fp8jax.transform(lambda params, x: x @ params["w"], level)
    variables = model.init({"w": w}, x)
    assert ("loss_scale" in variables) == (level == "fp16_amp")
    dtype = formats.get(model.recipe.gemm).dtype
    exact = jnp.dot(x.astype(dtype), w.astype(dtype)).astype(jnp.float32)
    # XLA may keep the product in float32.
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), exact, rtol=2**-7, atol=0.02)
    _, grads, new = fp8jax.value_and_grad(lambda v, x: jnp.sin(model.apply(v, x)).mean())(variables, x)
    assert grads["w"].dtype == jnp.float32 and 0.01 < jnp.linalg.norm(grads["w"]) < 1


def test_adapters_of_function():
    """Adapters beside the kernels of a function, one for each layer of a scan."""
    params, tokens = decoder_inputs()
    model = fp8jax.transform(decoder, "O2", lora=fp8jax.LoRA(rank=4))
    start = model.init(params, tokens)
    assert start["params"]["layers"]["up"]["lora_a"].shape == (LAYERS, WIDTH, 4)
    assert sorted(start["params"]) == ["layers"]  # "mid" is read transposed: its outputs come first
    loss, after = trained(model.apply, start, fp8jax.optim.adamw(3e-3, "O2"))
    assert loss < cross_entropy(model.apply, start, tokens)
    jax.tree.map(np.testing.assert_array_equal, after["frozen"], start["frozen"])
    merged = cross_entropy(decoder, model.dequantize(after), tokens)
    np.testing.assert_allclose(cross_entropy(model.apply, after, tokens), merged, rtol=0.02)
    assert {row.path: row.lora for row in model.report(start, tokens).rows}["layers/up"] == 4


def residuals(keep):
    """Bytes that the forward keeps for the backward of a scanned function."""
    x, params = normal(0, 64, WIDTH), {"up": normal(1, LAYERS, WIDTH, HIDDEN)}
    params["down"] = normal(2, LAYERS, HIDDEN, WIDTH)

    def fn(params, x):
        layer = lambda x, p: (x + jax.nn.gelu(x @ p["up"]) @ p["down"], None)  # noqa: E731
        return lax.scan(layer, x, params)[0]

    model = fp8jax.transform(fn, "te", gradient_checkpointing=keep)
    variables = model.init(params, x)
    kept = jax.eval_shape(lambda v: jax.vjp(lambda v: model.apply(v, x).sum(), v)[1], variables)
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 4) for leaf in jax.tree.leaves(kept))


def test_checkpointed_scans():
    """The bodies of a function's scans are its blocks."""
    kept = [residuals(keep) for keep in ("full", "fp8", "dots", "none")]
    assert kept == sorted(set(kept))
    model = fp8jax.transform(lambda params, x: x @ params, "te", gradient_checkpointing="full")
    with pytest.raises(ValueError, match="expected a function that scans stacked parameters"):
        model.init(normal(0, WIDTH, WIDTH), normal(1, 8, WIDTH))


def test_parameters_that_are_one_array():
    """A function of one kernel has its scaling state in the place of a tree of states."""
    model, x = fp8jax.transform(lambda w, x: x @ w, "O2"), normal(1, 8, WIDTH)
    variables = model.init(normal(0, WIDTH, WIDTH), x)
    assert sorted(variables["_overwrite_with_gradient"]) == ["amax_history", "one", "scale"]
    _, grads, new = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2))(variables)
    assert is_scaled(value_of := grads) and value_of.shape == (WIDTH, WIDTH)


def test_reasons():
    """A dot product whose parameter cannot be followed is named with the reason."""
    params, *args = everything_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables = fp8jax.transform(everything, "te").init(params, *args)
    rows = fp8jax.transform(everything, "te").report(params, *args).rows
    assert {(row.path, row.reason) for row in rows} == {
        (
            "a",
            "it is inside of a custom_vjp_call, which has a gradient of its own: take the matmul out of it",
        ),
        ("a", ""),
        ("b", "it is inside of a while: make it a scan"),
        ("b", ""),
        ("stack", ""),
        ("wide", ""),
    }
    assert set(variables["_overwrite_with_gradient"]) == {"a", "b", "b#1", "stack", "wide", "wide#1"}


def test_control_flow():
    """With two GEMMs in high precision, gradients are right through loops, conditions and slices."""
    params, *args = everything_inputs()

    def loss(apply, params, *args):
        return sum(jnp.sum(jnp.square(y)) for y in jax.tree.leaves(apply(params, *args)))

    exact, of_exact = jax.value_and_grad(functools.partial(loss, everything))(
        params, args[0], jnp.array(True)
    )
    for level in ("te", "O2,weight=FP32"):
        level += ",override_linear_precision=True+True+False,scaling=current"
        model = fp8jax.transform(everything, level)
        variables = model.init(params, *args)
        got, grads, new = fp8jax.value_and_grad(functools.partial(loss, model.apply))(variables, *args)
        np.testing.assert_allclose(got, exact, rtol=1e-5)
        for new, old in zip(
            jax.tree.leaves(grads, is_leaf=is_scaled), jax.tree.leaves(of_exact), strict=True
        ):
            error = jnp.linalg.norm(value(new) - old) / jnp.linalg.norm(old)
            assert error < 10 ** (-21 / 20)  # 21 dB, of E5M2 gradients


WAYS = {
    "plain": (lambda w: w, (WIDTH, HIDDEN)),
    "bf16": (lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), (WIDTH, HIDDEN)),
    "transposed": (lambda w: w.T, (HIDDEN, WIDTH)),
    "reshaped": (lambda w: w.reshape(WIDTH, HIDDEN), (WIDTH, HIDDEN // 4, 4)),
    "reshaped after a transpose": (
        lambda w: w.transpose(1, 0, 2).reshape(WIDTH, HIDDEN),
        (4, WIDTH, HIDDEN // 4),
    ),
    "squeezed": (lambda w: w[0], (1, WIDTH, HIDDEN)),
    "sliced": (lambda w: w[:, HIDDEN:], (WIDTH, 2 * HIDDEN)),
    "indexed": (lambda w: w[1], (2, WIDTH, HIDDEN)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ("te", "O2"))
def test_fidelity(way, level):
    """y and all gradients are the float32 results of the quantized operands."""
    get, shape = WAYS[way]
    x, w, g = normal(0, 16, WIDTH), normal(1, *shape), normal(2, 16, HIDDEN)
    model = fp8jax.transform(lambda params, x: x @ get(params["w"]), f"{level},scaling=current")
    variables = model.init({"w": w}, x)

    def loss(variables, x):
        return jnp.vdot(model.apply(variables, x), g)

    (dw, dx) = jax.tree.leaves(
        (fp8jax.value_and_grad(loss)(variables, x)[1]["w"], jax.grad(loss, 1)(variables, x)),
        is_leaf=is_scaled,
    )

    def rounded(x, format):
        return value(fp8jax.quantize(x, format))

    if way == "bf16":  # rounded once, from what is stored
        get = lambda w: w  # noqa: E731
    kernel = value(variables["params"]["w"])
    q_x, q_w, q_g = rounded(x, formats.E4M3), rounded(get(kernel), formats.E4M3), rounded(g, formats.E5M2)
    if way in ("sliced", "indexed"):  # on the scale of the whole
        assert variables["params"]["w"].shape == shape
    np.testing.assert_allclose(model.apply(variables, x), q_x @ q_w, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, q_g @ q_w.T, rtol=1e-5, atol=1e-4)
    whole = jax.vjp(get, kernel)[1](q_x.T @ q_g)[0]
    expected = value(fp8jax.quantize(whole, formats.E4M3, power_of_two=True)) if level == "O2" else whole
    np.testing.assert_allclose(value(dw), expected, rtol=1e-5, atol=1e-4)


def test_jaxpr_has_fp8_dots():
    """Each dot product of a parameter multiplies FP8 codes, forward and backward."""
    params, tokens = decoder_inputs()
    model = fp8jax.transform(decoder, "O2")
    variables = model.init(params, tokens)
    loss = functools.partial(cross_entropy, model.apply)
    text = str(jax.make_jaxpr(fp8jax.value_and_grad(loss))(variables, tokens))
    assert "f8_e4m3fn" in text and "f8_e5m2" in text


def test_shared_kernel_has_a_state_for_each_dot():
    """Two dot products of one kernel have input scales of their own."""

    def fn(params, x):
        return (x @ params["w"]) * 100 @ params["w"].T

    x, w = normal(0, 16, WIDTH), normal(1, WIDTH, WIDTH)
    model = fp8jax.transform(fn, "te,amax_history_len=1")
    variables = model.init({"w": w}, x)
    _, grads, new = fp8jax.value_and_grad(lambda v, x: model.apply(v, x).sum())(variables, x)
    states = new["_overwrite_with_gradient"]
    first, second = (states[name]["amax_history"][:, 0] for name in ("w", "w#1"))
    np.testing.assert_allclose(first[0], jnp.abs(x).max())
    assert second[0] > 50 * first[0]
    np.testing.assert_allclose(first[1], second[1])


def test_small_and_excluded_kernels():
    """Routers, heads and what a rule excludes stay wide; a rule puts them into FP8."""

    def fn(params, x):
        return x @ params["gate"], x @ params["lm_head"]["kernel"], x @ params["up"]["kernel"]

    x = normal(0, 16, WIDTH)
    params = {"gate": normal(1, WIDTH, 4), "up": {"kernel": normal(2, WIDTH, HIDDEN)}}
    params["lm_head"] = {"kernel": normal(3, WIDTH, HIDDEN)}
    rows = {row.path: row for row in fp8jax.transform(fn, "te").report(params, x).rows}
    assert [rows[name].fp8 for name in ("gate", "lm_head", "up")] == [False, False, True]
    assert rows["gate"].reason == "its kernel has fewer than 32 rows or columns"
    rules = [fp8jax.Rule("gate", "te"), fp8jax.Rule("lm_head", "te")]
    assert fp8jax.transform(fn, "te", rules=rules).report(params, x).fp8_share == 1
    with pytest.raises(ValueError, match="matches no layer"):
        fp8jax.transform(fn, "te", rules=[fp8jax.Rule("nothing", "te")]).init(params, x)


def test_missing_state_is_refused():
    """Parameters alone lack the scaling states."""
    params, tokens = decoder_inputs()
    model = fp8jax.transform(decoder, "te")
    with pytest.raises(ValueError, match="expected the scaling state of 'layers/up'"):
        model.apply({"params": params}, tokens)


def test_experts():
    """The kernels of a ragged dot have a scale and a state for each group."""

    def fn(params, x, sizes):
        return lax.ragged_dot(x, params["experts"], sizes)

    x, sizes = normal(0, 48, WIDTH), jnp.array([16, 0, 32])
    model = fp8jax.transform(fn, "O2")
    variables = model.init({"experts": normal(1, 3, WIDTH, HIDDEN)}, x, sizes)
    assert variables["params"]["experts"].scale.shape == (3, 1, 1)
    assert variables["_overwrite_with_gradient"]["experts"]["scale"].shape == (3, 3)
    y = model.apply(variables, x, sizes)
    exact = fn(model.dequantize(variables), x, sizes)
    assert jnp.linalg.norm(y - exact) < 0.06 * jnp.linalg.norm(exact)


def test_eager_calls_are_compiled_once():
    """A second call of the same shapes and constants traces nothing."""
    calls = []

    def fn(params, x, factor):
        calls.append(factor)
        return x @ params["w"] * factor

    model = fp8jax.transform(fn, "te")
    x = normal(0, 16, WIDTH)
    variables = model.init({"w": normal(1, WIDTH, HIDDEN)}, x, 1)
    for _ in range(3):
        model.apply(variables, x, 1)
    assert calls == [1]
    model.apply(variables, x, True)
    model.apply(variables, x, 2.0)
    assert calls == [1, True, 2.0]
    assert np.signbit(model.apply(variables, abs(x), -0.0)[0, 0]) != np.signbit(
        model.apply(variables, abs(x), 0.0)[0, 0]
    )


OFFSET = 0.0


def decorated(fn):
    return functools.wraps(fn)(lambda *args: fn(*args))


def as_object(fn):
    return type("Function", (), {"__call__": staticmethod(fn)})()


@pytest.mark.parametrize("wrap", [lambda fn: fn, functools.partial, decorated, as_object])
def test_what_a_function_closes_over_may_be_replaced(wrap):
    """A new value is seen as by the function itself, and known objects need no new trace."""
    global OFFSET
    shift, calls = jnp.zeros(()), []

    def fn(params, x):
        calls.append(None)
        return x @ params["w"] + shift + sum(OFFSET for _ in range(1))

    model = fp8jax.transform(wrap(fn), "current")
    params, x = {"w": jnp.zeros((WIDTH, WIDTH))}, normal(0, 16, WIDTH)
    shifts = [jnp.float32(number) for number in range(2)]
    for shift, OFFSET in [*zip(shifts, (0.0, 2.0), strict=True)] * 2:
        for call in (model, model, jax.jit(lambda *args: model(*args))):
            np.testing.assert_array_equal(call(params, x), shift + OFFSET)
    assert len(calls) == 2


COUNT = 0


@pytest.mark.parametrize("is_global", [False, True])
def test_functions_that_count_their_traces(is_global):
    """A variable that each trace rebinds asks for no new trace."""
    global COUNT
    COUNT = count = 0

    def of_global(params, x):
        global COUNT
        COUNT += 1
        return x @ params["w"]

    def of_closure(params, x):
        nonlocal count
        count += 1
        return x @ params["w"]

    model = fp8jax.transform(of_global if is_global else of_closure, "current")
    params = {"w": jnp.zeros((WIDTH, WIDTH))}
    for rows in (16, 32) * 3:
        model(params, normal(0, rows, WIDTH))
    assert (COUNT, count) == ((2, 0) if is_global else (0, 2))


def test_few_values_of_what_a_function_reads_are_kept():
    data = jnp.zeros(())
    model = fp8jax.transform(lambda params, x: x @ params["w"] + data, "current")
    params, x = {"w": jnp.zeros((WIDTH, WIDTH))}, normal(0, 16, WIDTH)
    for number in range(8):
        data = jnp.float32(number)
        np.testing.assert_array_equal(model(params, x), number)
    assert len(model._programs) == 4


PENALTIES = {
    "weight decay": lambda w: 0.5 * jnp.sum(jnp.square(w)),
    "norm": lambda w: optax.global_norm({"w": w}),
    "spectral": lambda w: jnp.vdot(jnp.ones(w.shape[0]) @ w, jnp.ones(w.shape[0]) @ w),
    "average": lambda w: jnp.sum(jnp.square(0.9 * lax.stop_gradient(w) + 0.1 * w)),
    "cast": lambda w: jnp.sum(w.astype(jnp.bfloat16).astype(jnp.float32)[3] ** 2),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("level", ("te", "O2", "O3"))
def test_kernel_read_by_the_loss(penalty, level):
    """What the loss does with a kernel beside its dot product adds to the kernel's gradient."""
    x, w = normal(0, 16, WIDTH), normal(1, WIDTH, HIDDEN)
    model = fp8jax.transform(lambda params, x: x @ params["fc"]["kernel"], level)
    variables = model.init({"fc": {"kernel": w}}, x)

    def loss(variables, x):
        return PENALTIES[penalty](variables["params"]["fc"]["kernel"]) + 0 * model.apply(variables, x).sum()

    _, grads, new = jax.jit(fp8jax.value_and_grad(loss))(variables, x)
    got = grads["fc"]["kernel"]
    exact = jax.grad(PENALTIES[penalty])(value(variables["params"]["fc"]["kernel"]))
    if level == "te":
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
    else:
        assert jnp.linalg.norm(value(got) - exact) < 10 ** (-28 / 20) * jnp.linalg.norm(exact)  # of E4M3
    history = new["_overwrite_with_gradient"]["fc"]["kernel"]["amax_history"]
    np.testing.assert_allclose(history[0, 0], jnp.abs(x).max())


@pytest.mark.parametrize("level", LEVELS)
def test_stop_gradient(level):
    """A kernel whose gradient the loss stops has none; it multiplies in FP8 all the same."""
    x, params = normal(0, 16, WIDTH), {name: normal(1, WIDTH, WIDTH) for name in ("a", "b")}
    model = fp8jax.transform(lambda params, x: (x @ params["a"]) @ params["b"], level)
    variables = model.init(params, x)

    def loss(variables, x):
        params = {**variables["params"], "a": lax.stop_gradient(variables["params"]["a"])}
        return jnp.square(model.apply({**variables, "params": params}, x)).sum()

    _, grads, new = fp8jax.value_and_grad(loss)(variables, x)
    norms = [jnp.linalg.norm(value(grads[name])) for name in ("a", "b")]
    assert norms[0] == 0 and norms[1] > 0
    for name in ("a", "b"):
        assert new["_overwrite_with_gradient"][name]["amax_history"][0, 0] > 0


@pytest.mark.parametrize("level", [name for name, recipe in PRESETS.items() if recipe.is_quantized])
def test_frozen_use_before_the_trained_one(level):
    """A teacher with the student's weights multiplies first: the student's gradient is its own, in the
    recipe's format."""

    def fn(params, x):
        teacher = jnp.tanh(x @ lax.stop_gradient(params["w"]))
        return jnp.square(jnp.tanh(1.2 * (x @ params["w"])) - teacher).mean()

    x, w = normal(0, 32, WIDTH), 0.2 * normal(1, WIDTH, WIDTH)
    model = fp8jax.transform(fn, level)
    variables = model.init({"w": w}, x)
    grad_fn = fp8jax.value_and_grad(model.apply)
    grad, exact = grad_fn(variables, x)[1]["w"], jax.grad(fn)({"w": w}, x)["w"]
    assert is_scaled(grad) == (model.recipe.weight_grad == "E4M3")
    bound = 0.6 if level == "nvfp4" else 0.3  # both outputs are rounded, and the loss is of their difference
    assert jnp.linalg.norm(value(grad) - exact) < bound * jnp.linalg.norm(exact)


def test_loss_is_traced_once():
    """Tracing the gradient calls the function once, at every level, also where a kernel is shared."""
    calls = []

    def fn(params, x):
        calls.append(1)
        return jnp.tanh(x @ params["w"]) @ params["w"].T

    x, w = normal(0, 16, WIDTH), normal(1, WIDTH, WIDTH)
    for level in LEVELS:
        model = fp8jax.transform(fn, level)
        variables = model.init({"w": w}, x)
        calls.clear()
        x = jnp.concatenate([x, x])  # of another shape: init's program does not serve
        jax.eval_shape(fp8jax.value_and_grad(lambda v, x, model=model: model.apply(v, x).sum()), variables, x)
        assert len(calls) == 1


class ScannedLayers(nn.Module):
    """As in scalable T5: the layers' axis is the second one of each kernel."""

    axis: int

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(WIDTH, False, name="down")(
                    nn.gelu(nn.Dense(HIDDEN, False, name="up")(x))
                ), None

        scan = nn.scan(Layer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS)
        return scan(name="layers")(x, None)[0]


@pytest.mark.parametrize("level", ("te", "O2", "O3", "nvfp4", "block+O2"))
def test_scan_along_another_axis(level):
    """Scans along the first and the second axis of what is stored: equal gradients, in equal formats."""
    x, params = normal(0, 32, WIDTH), ScannedLayers(0).init(jax.random.key(1), normal(0, 32, WIDTH))
    results = []
    for axis in (0, 1):
        model = fp8jax.transform(ScannedLayers(axis), level)
        plain = jax.tree.map(lambda w, axis=axis: jnp.moveaxis(w, 0, axis), params)
        variables = model.quantize(plain, model.init(jax.random.key(1), x))
        loss = functools.partial(lambda apply, v, x: jnp.square(apply(v, x)).mean(), model.apply)
        out, grads, new = fp8jax.value_and_grad(loss)(variables, x)
        frozen = model.freeze(variables, x)
        np.testing.assert_array_equal(model.apply(frozen, x), model.apply(variables, x))
        kernel, grad = (tree["layers"]["up"]["kernel"] for tree in (variables["params"], grads))
        assert is_scaled(kernel) == (model.recipe.weight != "FP32")
        assert is_scaled(grad) == (model.recipe.weight_grad != "FP32")
        assert all(row.fp8 and not row.plain for row in model.report(x).rows)
        if is_scaled(grad):
            assert grad.scale.shape == ((LAYERS, 1, 1), (1, LAYERS, 1))[axis]
        results.append((out, jnp.moveaxis(value(grad), axis, 0), new.get("_overwrite_with_gradient")))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_scan_along_another_axis_over_devices():
    """Devices with shards of kernels give the gradients of one device."""
    x, model = normal(0, 32, WIDTH), fp8jax.transform(ScannedLayers(1), "O2")
    variables = model.init(jax.random.key(1), x)
    zero = Zero(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), "O2", stage=3)
    loss = lambda v, x: jnp.square(model.apply(v, x)).mean()  # noqa: E731
    _, one, _ = jax.jit(fp8jax.value_and_grad(loss))(variables, x)
    _, many, _ = jax.jit(fp8jax.value_and_grad(loss, zero=zero))(zero.place(variables), x)
    for name in ("up", "down"):
        got, exact = (np.asarray(value(grads["layers"][name]["kernel"])) for grads in (many, one))
        assert np.linalg.norm(got - exact) < 2 * 10 ** (-28 / 20) * np.linalg.norm(exact)  # of E4M3, twice


def test_plain_weights_are_told():
    """Kernels that the function computes multiply in FP8, and the report says that they are stored as they
    were."""

    def fn(params, x):
        stack = jnp.stack([params["a"], params["b"]])
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        x = x @ (params["normed"] / jnp.linalg.norm(params["normed"]))
        return x @ params["own"]

    params, x = {name: jnp.eye(64) for name in ("a", "b", "normed", "own")}, normal(0, 32, 64)
    rows = {row.path: row for row in fp8jax.transform(fn, "O2").report(params, x).rows}
    assert all(row.fp8 for row in rows.values())
    plain = "weight and gradient stay FP32: its kernel is computed ("
    assert rows["a"].plain.startswith(plain) and rows["a"].plain.endswith("), of 2 parameters")
    assert rows["normed"].plain == f"{plain}div)" and rows["own"].plain == ""
    report = fp8jax.transform(fn, "O2").report(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x)
    assert "yes, but weight and gradient stay BF16" in str(report)
    assert "stay" not in str(fp8jax.transform(fn, "te").report(params, x)).split("backend")[0]


def test_gradient_of_one_use_is_codes():
    """Where one dot product takes a kernel, no float32 gradient of its shape is in the program."""
    x, w = normal(0, 16, WIDTH), normal(1, WIDTH, HIDDEN)
    model = fp8jax.transform(lambda params, x: x @ params["w"], "O2")
    variables = model.init({"w": w}, x)

    def wide(loss):
        jaxpr = jax.make_jaxpr(fp8jax.value_and_grad(loss))(variables, x)
        return sum(eqn.primitive.name == "add_any" for eqn in jaxpr.jaxpr.eqns)

    assert wide(lambda v, x: model.apply(v, x).sum()) == 0
    assert wide(lambda v, x: model.apply(v, x).sum() + jnp.square(v["params"]["w"]).sum()) > 0


def test_zero():
    """Over four devices, with parameters split, a function learns as on one."""
    params, tokens = decoder_inputs()
    zero = Zero(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), "O2", stage=3)
    model = fp8jax.transform(decoder, "O2")
    losses = []
    for each in (None, zero):
        tx = fp8jax.optim.adamw(3e-3, "O2", zero=each)
        variables = model.init(params, tokens)
        variables = variables if each is None else each.place(variables)
        state = tx.init(variables)

        @jax.jit
        def step(variables, state, tx=tx, zero=each):
            grad_fn = fp8jax.value_and_grad(functools.partial(cross_entropy, model.apply), zero=zero)
            loss, grads, variables = grad_fn(variables, tokens)
            updates, state = tx.update(grads, state, variables)
            return fp8jax.apply_updates(variables, updates), state, loss

        for _ in range(5):
            variables, state, loss = step(variables, state)
        losses.append(float(loss))
    np.testing.assert_allclose(*losses, rtol=0.01)


@pytest.mark.parametrize("level", ("te", "O2"))
def test_nnx_states(level):
    """An NNX module that multiplies by itself trains as a function of its split state."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (WIDTH, HIDDEN)))
            self.down = nnx.Param(0.1 * jax.random.normal(rngs.params(), (HIDDEN, WIDTH)))

        def __call__(self, x):
            return jax.nn.gelu(self.norm(x) @ self.up[...]) @ self.down[...]

    graph, params = nnx.split(Block(nnx.Rngs(0)))
    x = normal(0, 64, WIDTH)

    def loss_after_training(apply, variables, tx):
        state = tx.init(variables)

        @jax.jit
        def step(variables, state):
            grad_fn = fp8jax.value_and_grad(lambda v: jnp.mean((apply(v, x) - jnp.sin(x)) ** 2))
            loss, grads, variables = grad_fn(variables)
            updates, state = tx.update(grads, state, variables)
            return fp8jax.apply_updates(variables, updates), state, loss

        for _ in range(20):
            variables, state, loss = step(variables, state)
        return float(loss)

    model = fp8jax.transform(lambda params, x: nnx.merge(graph, params)(x), level)
    assert [row.path for row in model.report(params, x).rows if row.fp8] == ["up", "down"]
    loss = loss_after_training(model.apply, model.init(params, x), fp8jax.optim.adamw(3e-3, level))
    exact = loss_after_training(lambda params, x: nnx.merge(graph, params)(x), params, optax.adamw(3e-3))
    assert abs(loss / exact - 1) < 0.05


def test_stop_gradient_over_devices():
    """Where each device has a part of the batch, a kernel whose gradient the loss stops has none either."""
    x, params = normal(0, 16, WIDTH), {name: normal(1, WIDTH, WIDTH) for name in ("a", "b")}
    zero = Zero(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), "O2", stage=1)
    model = fp8jax.transform(lambda params, x: (x @ params["a"]) @ params["b"], "O2")
    variables = zero.place(model.init(params, x))

    def loss(variables, x):
        params = {**variables["params"], "a": lax.stop_gradient(variables["params"]["a"])}
        return jnp.square(model.apply({**variables, "params": params}, x)).mean()

    _, grads, new = jax.jit(fp8jax.value_and_grad(loss, zero=zero))(variables, x)
    norms = [jnp.linalg.norm(value(grads[name])) for name in ("a", "b")]
    assert norms[0] == 0 and norms[1] > 0


def test_gradient_of_each_example():
    """A `vmap` of the gradient gives what a loop over the examples gives."""
    x, w = normal(0, 4, 16, WIDTH), normal(1, WIDTH, HIDDEN)
    model = fp8jax.transform(lambda params, x: x @ params["w"], "O2")
    variables = model.init({"w": w}, x[0])
    grad = fp8jax.value_and_grad(lambda v, x: jnp.square(model.apply(v, x)).mean())
    together = jax.vmap(grad, (None, 0))(variables, x)[1]["w"]
    each = jnp.stack([value(grad(variables, part)[1]["w"]) for part in x])
    np.testing.assert_allclose(value(together), each, rtol=1e-6, atol=1e-6 * jnp.abs(each).max())


def test_names_of_a_vmap_in_the_loss():
    """The axis of a collective in the model, and the mesh axis of a mapped axis, by `spmd_axis_name`."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w = normal(0, 4, 16, WIDTH), normal(1, WIDTH, HIDDEN)

    def call(params, x):
        x = lax.with_sharding_constraint(x @ params["w"], NamedSharding(mesh, P("model", None)))
        return x - lax.pmean(x, "parts")

    def loss(fn, params, x):
        parts = jax.vmap(lambda x: fn(params, x), axis_name="parts", spmd_axis_name="data")(x)
        return jnp.square(parts).mean()

    model = fp8jax.transform(call, "current")
    grad = fp8jax.value_and_grad(functools.partial(loss, model.apply))
    got, want = (
        grad({"params": {"w": w}}, x)[:2],
        jax.value_and_grad(functools.partial(loss, call))({"w": w}, x),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.1 * jnp.abs(b).max()), got, want)
    constraints = equations(jax.make_jaxpr(grad)({"params": {"w": w}}, x).jaxpr, "sharding_constraint", "cpu")
    assert {tuple(eqn.params["sharding"].spec)[:2] for eqn in constraints} == {("data", "model")}


def convolved(x, kernel):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=numbers)[0]


def test_report_names_what_is_left():
    """Convolutions each by its kernel, a dot product without contraction, a weight that is no parameter."""
    constant = jnp.ones((64, 64))

    def fn(params, x):
        x = convolved(convolved(x, params["c0"]), params["c1"])
        x = jnp.einsum("ld,dn->ldn", x, params["outer"]).sum(-1)
        return x @ params["w"] @ constant

    params = {"c0": jnp.ones((3, 64, 64)), "c1": jnp.ones((3, 64, 64)), "outer": jnp.ones((64, 64))}
    params["w"] = jnp.ones((64, 64))
    report = fp8jax.transform(fn, "te").report(params, jnp.ones((8, 64)))
    one = 2 * 8 * 64 * 64
    assert {row.path: (row.fp8, row.flops, row.reason) for row in report.rows} == {
        "c0": (False, 3 * one, "convolutions stay as they are"),
        "c1": (False, 3 * one, "convolutions stay as they are"),
        "outer": (False, one, "it sums over no axis"),
        "w": (True, one, ""),
        "(constants)": (False, one, "its kernel is a constant of the function: make it a parameter"),
    }
    assert report.flops == 9 * one


@pytest.mark.parametrize("recipe", ("te", "O2", "block", "bf16", "fp16_amp"))
def test_complex_dots_stay_as_they_are(recipe):
    """A state space as S5's: its complex matmuls are exact and named by their matrix."""

    def fn(params, x):
        step = jnp.exp(params["log_step"][:, 0])
        b = (1j * step)[:, None] * lax.complex(params["B"][..., 0], params["B"][..., 1])
        return ((x @ b.T) @ lax.complex(params["C"][..., 0], params["C"][..., 1])).real @ params["out"]

    params = {"B": normal(0, 48, 64, 2), "C": normal(1, 48, 64, 2), "log_step": normal(2, 48, 1)}
    params = jax.tree.map(lambda x: 0.1 * x, {**params, "out": normal(3, 64, 64)})
    x = normal(4, 32, 64)
    model = fp8jax.transform(fn, recipe)
    rows = {row.path: row for row in model.report(params, x).rows}
    assert set(rows) == {"B", "C", "out"}
    assert [rows[name].reason for name in "BC"] == ["it multiplies complex numbers"] * 2
    assert rows["out"].fp8 == model.recipe.is_quantized
    assert rows["B"].flops == 4 * 2 * 32 * 64 * 48  # four multiplications of real numbers for one
    if model.recipe.is_quantized:
        with pytest.warns(UserWarning, match="B .it multiplies complex"):
            variables = model.init(params, x)
    else:
        variables = model.init(params, x)
    mean = lambda apply: lambda v: jnp.square(apply(v, x)).mean()  # noqa: E731
    grads, exact = fp8jax.value_and_grad(mean(model.apply))(variables)[1], jax.grad(mean(fn))(params)
    for name, grad in exact.items():
        got = value(grads[name])
        assert jnp.linalg.norm(got - grad) < 0.1 * jnp.linalg.norm(grad)


def test_flops_inside_of_shard_map():
    """Those of all devices, as everywhere else."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "x")

    def fn(params, x):
        y = x @ params["a"]
        return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec)(y, params["b"])

    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
    rows = fp8jax.transform(fn, "te").report(params, jnp.ones((8, 64))).rows
    assert {row.path: (row.fp8, row.flops) for row in rows} == {"a": (True, 65536), "b": (False, 65536)}


def test_functions_among_the_parameters():
    """An Equinox module has activations among its leaves."""
    params = {"w": jnp.ones((64, 64)), "activation": jax.nn.relu}
    with pytest.raises(TypeError, match=r"got .* at \['activation'\].*eqx.partition"):
        fp8jax.transform(lambda params, x: x @ params["w"], "te").init(params, jnp.ones((8, 64)))


@pytest.mark.parametrize("recipe", ("te", "block"))
@pytest.mark.parametrize("collections", ({}, {"batch_stats": {"mean": jnp.zeros(64)}}))
def test_own_parameters_with_a_collection_named_params(recipe, collections):
    """A wrapped Linen `apply` takes `{"params": ...}` as its own parameters, as model variables are."""
    params = {"params": {"fc": {"kernel": jnp.eye(64)}}, **collections}
    model = fp8jax.transform(lambda v, x: x @ v["params"]["fc"]["kernel"], recipe)
    x = normal(0, 32, 64)
    for _ in range(2):
        assert [row.path for row in model.report(params, x).rows if row.fp8] == ["params/fc"]
        variables = model.init(params, x)
        assert model.report(variables, x) == model.report(params, x)
        np.testing.assert_allclose(model.apply(variables, x), x, atol=0.1 * jnp.abs(x).max())
    if recipe == "block":
        np.testing.assert_array_equal(model.apply(params, x), model.apply(variables, x))
    with pytest.raises(KeyError, match="fc"):
        model.report({"params": {"params": {"other": jnp.eye(64)}}}, x)


def test_quantize_like_shapes():
    """Shapes alone hold no scaling state."""
    model, params = fp8jax.transform(lambda params, x: x @ params["w"], "te"), {"w": jnp.ones((64, 64))}
    like = jax.eval_shape(model.init, params, jnp.ones((8, 64)))
    with pytest.raises(
        ValueError, match="`like`: expected the variables that `model.init` gives; got shapes"
    ):
        model.quantize(params, like)


# Calls without FP8 ###############################################################################


def in_a_loop(params, x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] @ params["w"]), (0, x))[1]


@pytest.mark.parametrize(
    "function, shape, says",
    [
        (lambda p, x: x @ p["w"], (64, 16), r"w \(its kernel has fewer than 32 rows or columns\)"),
        (in_a_loop, (64, 64), "while"),
        (lambda p, x: jax.vmap(lambda row: row @ p["w"])(x), (64, 64), None),  # a matmul when it is traced
    ],
)
def test_a_call_without_fp8_warns(function, shape, says):
    """On the first rung no `init` tells."""
    model = fp8jax.transform(function, "current")
    params, x = {"w": jnp.ones(shape)}, jnp.ones((8, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(model)(params, x)
    found = [str(each.message) for each in caught if "runs in FP8" in str(each.message)]
    assert {each.filename for each in caught if "runs in FP8" in str(each.message)} <= {__file__}
    assert len(found) == (says is not None) and all(re.search(says or "", text) for text in found)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_vmap_over_single_examples_warns(framework):
    x = jnp.ones((8, 64))
    if framework == "linen":
        model = fp8jax.transform(nn.Dense(64), "te")
        variables = model.init(jax.random.key(0), x)
        call = lambda: jax.vmap(lambda row: model.apply(variables, row))(x)  # noqa: E731
    else:
        module = fp8jax.transform(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "te")
        call = lambda: nnx.vmap(lambda model, row: model(row), in_axes=(None, 0))(module, x)  # noqa: E731
    with pytest.warns(UserWarning, match="single vector.* Give it batches, not single examples") as caught:
        call()
    assert __file__ in {each.filename for each in caught}


class Tied(nn.Module):
    def setup(self):
        self.embed, self.up = nn.Embed(64, 64), nn.Dense(64)

    def __call__(self, tokens):
        return self.embed.attend(self.up(self.embed(tokens)))

    def logits(self, x):
        return self.embed.attend(x)


def test_heads_alone_do_not_warn():
    model, x = fp8jax.transform(lambda p, x: x @ p["head"], "current"), jnp.ones((8, 64))
    tied = fp8jax.transform(Tied(), "current")
    variables = tied.init(jax.random.key(0), jnp.zeros((8, 4), int))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model({"head": jnp.ones((64, 64))}, x)
        tied.apply(variables, x, method="logits")
    assert not [str(each.message) for each in caught]


def test_a_function_that_calls_a_transformed_model():
    model = fp8jax.transform(lambda params, x: x @ params["w"], "current")
    with pytest.raises(ValueError, match="w [(]it is in FP8 already: transform the plain model"):
        fp8jax.transform(model.apply, "current").init({"w": normal(1, WIDTH, HIDDEN)}, normal(0, 16, WIDTH))
