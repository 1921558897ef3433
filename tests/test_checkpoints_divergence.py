"""The divergence of an engine from training: zero where both multiply the same codes, else as NumPy's."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import llama
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from llama import TOKENS, trained
from test_checkpoints_export import PLAIN, value_of

import fp8jax
from fp8jax.checkpoints import LLAMA, NameMap, Rename, divergence, save, weights

X = jax.random.normal(jax.random.key(0), (32, 256))
FLOAT32 = "block,scaling=block_float32"


@functools.cache
def layer(recipe, outputs=384):
    """One layer that gives logits, after a step that moves its scales."""
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], recipe)
    kernel = jax.random.normal(jax.random.key(1), (256, outputs)) / 16
    variables = model.init({"up": {"kernel": kernel}}, X)
    return model, fp8jax.value_and_grad(lambda v: (model.apply(v, X) ** 2).mean())(variables)[2]


def rounded(x, block, is_power_of_two):
    """Fake quantization of rows in blocks, in NumPy; 0 for one block."""
    cut = x.reshape(1, -1) if not block else x.reshape(-1, block)
    scale = abs(cut).max(-1, keepdims=True) / np.float32(448)
    scale = np.exp2(np.ceil(np.log2(scale))) if is_power_of_two else scale
    return ((cut / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


INPUTS = {
    "fp8": (128, False),
    "fp8:ue8m0": (128, True),
    "fp8:tensor": (0, False),
    "compressed-tensors:block": (128, False),
    "compressed-tensors:mxfp8": (32, True),
}
SAME = {
    ("block", "fp8:ue8m0"),
    (FLOAT32, "fp8"),
    (FLOAT32, "compressed-tensors:block"),
    ("current", "fp8:tensor"),
    ("mxfp8", "compressed-tensors:mxfp8"),
}


@pytest.mark.parametrize("format", INPUTS)
@pytest.mark.parametrize("recipe", ["te", "fp8", "O3", "current", "block", FLOAT32, "mxfp8"])
def test_divergence_of_one_layer(recipe, format):
    """Inputs are quantized as the format says, weights are those of the file, and the rest is float64."""
    model, variables = layer(recipe)
    got = divergence(model, variables, X, mapping=PLAIN, format=format)
    arrays = weights(model, variables, X, mapping=PLAIN, format=format)
    x = rounded(np.asarray(X), *INPUTS[format])
    trained = np.float64(model.apply(variables, X))
    log_p, log_q = (
        y - np.log(np.exp(y).sum(-1, keepdims=True)) for y in (x @ value_of(arrays, "up").T, trained)
    )
    want = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-8)
    assert got == 0 or (recipe, format) not in SAME


@pytest.mark.parametrize("recipe, format", [("block", "fp8:ue8m0"), ("current", "fp8:tensor")])
def test_divergence_is_compiled_over_scanned_layers(recipe, format):
    model, variables = trained(recipe, is_scanned=True)
    compute = lambda v: divergence(model, v, TOKENS, mapping=LLAMA.stacked("layers"), format=format)  # noqa: E731
    assert abs(jax.jit(compute)(variables)) < 1e-9


@pytest.mark.parametrize("recipe", ["block", "block+O2"])
def test_divergence_keeps_the_choice_of_layers(recipe):
    """Rules leave layers in high precision and quantize the head, here and in the engine."""
    texts = {"*/1/*": "gemm=BF16", "*/down_proj": "gemm=FP32", "lm_head": recipe}
    model = fp8jax.transform(llama.Llama(), recipe, rules=[fp8jax.Rule(*rule) for rule in texts.items()])
    variables = model.init(jax.random.key(0), TOKENS)
    assert divergence(model, variables, TOKENS, mapping=LLAMA, format="fp8:ue8m0") < 1e-9


def test_divergence_of_sides_that_are_no_whole_blocks():
    model, variables = layer("block", outputs=200)
    assert divergence(model, variables, X, mapping=PLAIN, format="fp8:ue8m0") < 1e-9


def test_divergence_of_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(256, 128, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    for recipe, is_same in (("block", True), ("te", False)):
        model = fp8jax.transform(Net(nnx.Rngs(0)), recipe)
        assert (divergence(model, X, mapping=PLAIN, format="fp8:ue8m0") == 0) == is_same


def test_divergence_of_numbers_that_are_not_finite():
    model, variables = layer("current")
    assert jnp.isnan(divergence(model, variables, X.at[0, 0].set(jnp.nan), mapping=PLAIN, format="fp8"))


@pytest.mark.parametrize(
    "format, returns, says",
    [
        ("fp8:static", lambda y: y, "`format`: expected one of fp8, .*; got 'fp8:static', and no recipe"),
        ("compressed-tensors:nvfp4", lambda y: y, "and no recipe quantizes inputs"),
        ("fp5", lambda y: y, "`format`: expected one of bf16, fp32, fp8, fp8:ue8m0, fp8:tensor, fp8:static"),
        ("fp8", lambda y: (y, y), "`model`: expected one that returns logits; got tuple"),
    ],
)
def test_divergence_refuses(format, returns, says):
    model = fp8jax.transform(lambda params, x: returns(x @ params["kernel"]), "block")
    variables = model.init({"kernel": jnp.ones((256, 128))}, X)
    mapping = NameMap((Rename("up.weight", "kernel", axes=(1, 0)),))
    with pytest.raises(ValueError, match=says):
        divergence(model, variables, X, mapping=mapping, format=format)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        return nn.Dense(384, name="up")(nn.Dropout(0.5, deterministic=not train)(x))


class DroppedNNX(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(256, 384, rngs=nnx.Rngs(0))

    def __call__(self, x, *, train):
        return self.up(x if train else x / 2)


@pytest.mark.parametrize("is_nnx", [False, True])
def test_keyword_inputs(tmp_path, is_nnx):
    model = fp8jax.transform(DroppedNNX() if is_nnx else Dropped(), "block")
    args = () if is_nnx else (model.init(jax.random.key(0), X, train=False), X)
    report = save(tmp_path / "out", model, *args, mapping=PLAIN, config={}, train=False)
    assert [row.name for row in report.rows] == ["up"]
    assert len(weights(model, *args, mapping=PLAIN, train=False)) == 3
    options = {"mapping": PLAIN, "format": "fp8:ue8m0"}
    assert divergence(model, *(args or (X,)), **options, train=False) == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_shards'"):
        save(tmp_path / "new", model, *args, mapping=PLAIN, config={}, train=False, max_shards=1)
