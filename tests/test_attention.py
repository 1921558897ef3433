"""Every implementation of attention is the plain formula, with its gradients; chunked holds few scores."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax import attention
from fp8jax.attention import dot_product_attention


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks so small that these short sequences need several, the last of them ragged."""
    monkeypatch.setattr(attention, "CHUNK", 16)


def operands(time=45, sources=37, heads=4, groups=4, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(2, time, heads, 8), (2, sources, groups, 8), (2, sources, groups, 8)]
    query, key, value = (jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=False))
    mask = jax.random.bernoulli(keys[3], 0.7, (2, 1, time, sources)).at[:, :, 3].set(False)
    bias = jax.random.normal(keys[4], (heads, time, sources))
    return query, key, value, mask, bias


def formula(query, key, value, mask=None, bias=None, is_causal=False):
    """In float64, on numpy."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[-2] // key.shape[-2], axis=-2) for x in (key, value))
    scores = np.einsum("bthc,bshc->bhts", query, key) / np.sqrt(query.shape[-1])
    scores = scores + (0 if bias is None else np.asarray(bias, np.float64))
    low = np.finfo(np.float32).min
    scores = np.where(True if mask is None else mask, scores, low)
    scores = np.where(np.tri(*scores.shape[-2:], dtype=bool) if is_causal else True, scores, low)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshc->bthc", weights / weights.sum(-1, keepdims=True), value)


CASES = {
    "plain": (4, ()),
    "causal": (4, ("is_causal",)),
    "masked": (4, ("mask",)),
    "one key head": (1, ("mask",)),
    "all": (2, ("mask", "bias", "is_causal")),
}


@pytest.mark.parametrize("implementation", ["eager", "xla", "chunked"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] if c in ("plain", "masked") else []) for c in CASES]
)
def test_values_are_the_formulas(case, implementation, small_chunks):
    groups, names = CASES[case]
    query, key, value, mask, bias = operands(groups=groups)
    options = {n: x for n, x in {"mask": mask, "bias": bias, "is_causal": True}.items() if n in names}
    out = dot_product_attention(query, key, value, implementation=implementation, **options)
    # A dozen float32 roundings of numbers up to 3.
    np.testing.assert_allclose(out, formula(query, key, value, **options), atol=3e-6)


def test_gradients_are_those_of_the_formula(small_chunks):
    query, key, value, mask, bias = operands(groups=2)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, query, key, value, bias):
        def loss(query, key, value, bias):
            options = {"mask": mask, "bias": bias, "is_causal": True, "implementation": implementation}
            return jnp.sum(jnp.sin(dot_product_attention(query, key, value, **options)))

        return jax.grad(loss, argnums=(0, 1, 2, 3))(query, key, value, bias)

    want = gradients("eager", query, key, value, bias)
    got = gradients("chunked", query, key, value, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


AT = np.arange(45)
HIDDEN_BY_BIAS = {
    "window": (AT[:, None] < AT) | (AT[:, None] >= AT + 4),
    "left padding": np.broadcast_to(AT < 30, (45, 45)),
    "a query that sees nothing": (AT[:, None] == 3) & (AT >= 0),
}


@pytest.mark.parametrize("case", HIDDEN_BY_BIAS)
def test_minus_infinity_in_a_bias_hides_as_in_jax(case, small_chunks):
    """Whole tiles too; a query that sees nothing has NaN in all implementations, as in JAX's."""
    query, key, value, *_ = operands(sources=45, groups=2)
    bias = jnp.where(HIDDEN_BY_BIAS[case], -jnp.inf, 0.0)

    def everything(implementation):
        def loss(*args):
            out = dot_product_attention(*args, bias=bias, implementation=implementation)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    want = everything("xla")
    assert np.isnan(want[1]).any() == (case == "a query that sees nothing")
    for implementation in ("eager", "chunked"):
        got = everything(implementation)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, want)


def test_narrow_operands(small_chunks):
    query, key, value, *_ = operands(dtype=jnp.bfloat16)
    out = dot_product_attention(query, key, value, implementation="chunked")
    assert out.dtype == jnp.bfloat16
    # Weights and results are rounded to 8 bits; values are up to 3.
    np.testing.assert_allclose(out.astype(jnp.float32), formula(query, key, value), atol=3 * 2**-7)


def test_transformations(small_chunks):
    query, key, value, mask, _ = operands()
    attend = functools.partial(dot_product_attention, is_causal=True, implementation="chunked")
    want = attend(query, key, value, mask=mask)
    # By vmap there is no batch within; a scan goes over it.
    mapped = jax.vmap(lambda q, k, v, m: attend(q, k, v, mask=m))(query, key, value, mask)
    np.testing.assert_allclose(mapped, want, atol=1e-6)
    one = lambda _, x: (None, attend(*x[:3], mask=x[3]))  # noqa: E731
    np.testing.assert_allclose(jax.lax.scan(one, None, (query, key, value, mask))[1], want, atol=1e-6)
    more = (x.reshape(1, 2, *x.shape[1:]) for x in (query, key, value))
    np.testing.assert_allclose(attend(*more, mask=mask[None])[0], want, atol=1e-6)


def temporaries(implementation, time):
    x = jax.ShapeDtypeStruct((1, time, 2, 16), jnp.float32)

    def loss(query, key, value):
        return jnp.sum(
            dot_product_attention(query, key, value, is_causal=True, implementation=implementation)
        )

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_chunked_keeps_tiles_where_others_keep_all_scores():
    scores = 4 * 2 * 2048 * 2048
    assert temporaries("xla", 2048) > 2 * scores
    assert temporaries("chunked", 2048) < scores / 2
    # Twice as long, it takes twice as much.
    assert temporaries("chunked", 4096) < 2.2 * temporaries("chunked", 2048)


def test_auto_chooses_by_length_and_says_why():
    of = lambda time: jax.ShapeDtypeStruct((1, time, 2, 16), jnp.bfloat16)  # noqa: E731
    short, long = attention.choose(of(1024), of(1024)), attention.choose(of(1025), of(1024))
    assert (short.implementation, long.implementation) == ("xla", "chunked")
    assert "the device is a cpu, no NVIDIA GPU" in short.reason and "1025 x 1024 scores" in long.reason


class Hopper:
    platform, compute_capability = "gpu", "9.0"


@pytest.mark.parametrize(
    "channels, dtype, time, bias, why",
    [
        (64, jnp.bfloat16, 7, None, None),
        (256, jnp.float16, 7, None, None),
        (64, jnp.float32, 8, None, "not float32"),
        (12, jnp.bfloat16, 8, None, "12 channels a head are not a multiple of 8 up to 256"),
        (264, jnp.bfloat16, 8, None, "264 channels"),
        (64, jnp.bfloat16, 7, 1, "time and sources must be even"),
    ],
)
def test_cudnn_is_chosen_where_it_can(monkeypatch, channels, dtype, time, bias, why):
    monkeypatch.setattr(attention, "_device", Hopper)
    x = jax.ShapeDtypeStruct((1, time, 2, channels), dtype)
    if why is None:
        assert attention.choose(x, x, bias).implementation == "cudnn"
    else:
        assert why in attention.choose(x, x, bias).reason


@pytest.mark.parametrize(
    "change, message",
    [
        ({"implementation": "flash"}, "`implementation`: expected one of auto, eager, xla, cudnn, chunked"),
        ({"implementation": "cudnn"}, "cudnn cannot compute this attention: the device is a cpu"),
        ({"mask": jnp.ones((45, 37))}, "`mask`: expected bool; got float32"),
    ],
)
def test_what_it_cannot_do_raises(change, message):
    query, key, value, *_ = operands()
    with pytest.raises(ValueError, match=message):
        dot_product_attention(query, key, value, **change)
    with pytest.raises(ValueError, match="in equal groups"):
        dot_product_attention(query, key[:, :, :3], value[:, :, :3])


@pytest.mark.parametrize("implementation", ["eager", "xla", "chunked"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": None}, "`query`: expected an array; got NoneType"),
        ({"mask": [[True]]}, "`mask`: expected an array; got list"),
        ({"query": jnp.ones((2, 45, 4, 8), int)}, "one floating dtype; got query int32, key float32"),
        (
            {"query": jnp.ones((2, 45, 4, 8), jnp.bfloat16)},
            "one floating dtype; got query bfloat16, key float32",
        ),
        (
            {"bias": jnp.ones((45, 37), bool)},
            "`bias`: expected a floating array; got bool. What hides is a `mask`",
        ),
        (
            {"bias": jnp.ones((7, 37))},
            r"`bias`: .*\(..., heads, time, sources\), here \(2, 4, 45, 37\); got \(7, 37\)",
        ),
        ({"mask": jnp.ones((3, 4, 45, 37), bool)}, r"`mask`: expected a shape .*; got \(3, 4, 45, 37\)"),
        (
            {"query": jnp.ones((2, 1, 4, 8)), "bias": jnp.ones((45, 37))},
            r"`bias`: expected a shape .*; got \(45, 37\)",
        ),
        ({name: jnp.ones((2, 5, 0, 8)) for name in ("query", "key", "value")}, "at least one of each"),
    ],
)
def test_arguments_that_do_not_fit_raise_one_line(change, message, implementation):
    query, key, value, *_ = operands()
    with pytest.raises((TypeError, ValueError), match=message) as error:
        dot_product_attention(
            **{"query": query, "key": key, "value": value} | change, implementation=implementation
        )
    assert "\n" not in str(error.value)


# In layers #######################################################################################


class Linen(nn.Module):
    layer: type = nn.MultiHeadDotProductAttention
    options: tuple = ()

    @nn.compact
    def __call__(self, x, mask=None, **options):
        return self.layer(4, name="attn", **dict(self.options))(x, mask=mask, **options)


class Nnx(nnx.Module):
    def __init__(self, **options):
        self.attn = nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0), decode=False, **options)

    def __call__(self, x, mask=None, **options):
        return self.attn(x, mask=mask, **options)


X = jax.random.normal(jax.random.key(1), (2, 45, 32))
CAUSAL = nn.make_causal_mask(X[:, :, 0])


@pytest.fixture
def calls(monkeypatch):
    """The implementations that computed something."""
    made, chunked = [], attention._chunked
    monkeypatch.setattr(attention, "_chunked", lambda *args, **kw: made.append(1) or chunked(*args, **kw))
    return made


@pytest.mark.parametrize("layer", [nn.MultiHeadDotProductAttention, nn.SelfAttention, nn.MultiHeadAttention])
def test_linen_layers_call_it(layer, calls, small_chunks):
    model = fp8jax.transform(Linen(layer), "te", attention="chunked")
    plain = fp8jax.transform(Linen(layer), "te")
    variables = model.init(jax.random.key(0), X, CAUSAL)
    assert calls == [1]
    np.testing.assert_allclose(
        model.apply(variables, X, CAUSAL), plain.apply(variables, X, CAUSAL), atol=1e-5
    )
    assert calls == [1, 1]
    report = str(model.report(X, CAUSAL))
    assert report.endswith("attention=chunked: chunked in attn")


def test_nnx_layers_call_it(calls, small_chunks):
    model = fp8jax.transform(Nnx(), "te", attention="chunked")
    plain = fp8jax.transform(Nnx(), "te")
    np.testing.assert_allclose(model(X, CAUSAL), plain(X, CAUSAL), atol=1e-5)
    np.testing.assert_allclose(model(X, is_causal=True), plain(X, CAUSAL), atol=1e-5)
    assert calls == [1, 1]
    assert "attention=chunked: chunked in attn" in str(fp8jax.report(model, X))
    assert fp8jax.dequantize(model).attn.attention_fn is nnx.dot_product_attention


ALONE = [
    ({"dropout_rate": 0.5}, {"deterministic": False}, "dropout of the attention's weights"),
    ({}, {"sow_weights": True}, "its weights are sown"),
    ({"precision": jax.lax.Precision.HIGHEST}, {}, "it has a precision of its own"),
]


@pytest.mark.parametrize("kind", [Linen, Nnx])
@pytest.mark.parametrize("options, call, reason", ALONE)
def test_what_it_cannot_do_is_left_to_flax_and_said(kind, options, call, reason, calls):
    if kind is Linen:
        model = fp8jax.transform(Linen(options=tuple(options.items())), "te", attention="chunked")
        report = model.report(X, rngs={"dropout": jax.random.key(0)}, **call)
    else:
        model = fp8jax.transform(Nnx(**options), "te", attention="chunked")
        report = fp8jax.report(model, X, **call)
    assert f"attention=chunked: Flax's own ({reason}" in str(report)
    if kind is Linen:
        calls.clear()  # an init that drops nothing
    assert calls == []


def test_auto_says_what_it_took():
    model = fp8jax.transform(Linen(), "te", attention="auto")
    assert "attention=auto: xla (no cuDNN: the device is a cpu" in str(model.report(X))


def test_a_setting_that_matches_no_layer_raises():
    message = "with Flax's own attention_fn; there is none.*call `fp8jax.attention.dot_product_attention`"
    with pytest.raises(ValueError, match=message):
        fp8jax.transform(nn.Dense(32), "te", attention="chunked").init(jax.random.key(0), X)
    own = (("attention_fn", lambda query, key, value: value),)
    with pytest.raises(ValueError, match="an attention_fn of its own"):
        fp8jax.transform(Linen(options=own), "te", attention="chunked").init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="decode from"):
        decoder = fp8jax.transform(Linen(options=(("decode", True),)), "te", attention="chunked")
        decoder.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=message):
        fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), "te", attention="chunked")
    with pytest.raises(ValueError, match="`attention`: expected one of auto, eager"):
        fp8jax.transform(Linen(), "te", attention="flash")


def test_decoding_in_nnx_is_left_alone(calls):
    plain = Nnx()
    model = fp8jax.transform(plain, "te", attention="chunked")
    model.attn.init_cache((2, 45, 32))
    model(X[:, :1], decode=True)
    assert calls == []
