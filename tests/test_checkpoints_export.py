"""Export: a Hugging Face folder has what the model multiplies with, and engines read it."""

import dataclasses
import json
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
from flax import nnx
from llama import TOKENS, trained
from safetensors import safe_open

import fp8jax
from fp8jax.checkpoints import FORMATS, GPT2, LLAMA, NameMap, Rename, load, save, weights
from fp8jax.checkpoints.folder import Writer, read
from fp8jax.checkpoints.serving import ServingFormat
from fp8jax.quantization import is_scaled, value
from fp8jax.scaling import LHS, RHS, of_recipe

RECIPES = ("te", "O2", "O3", "fp8", "current", "block", "block, scaling=block_float32", "mxfp8", "nvfp4")
PLAIN = NameMap((Rename(r"(.*)\.weight", r"\1/kernel", axes=(1, 0)), Rename(r"(.*)\.bias", r"\1/bias")))
LAYER = "model.layers.1.mlp.up_proj"
# Gaussian weights are quantized at 31.5 dB in E4M3 and at 20.5 dB in NVFP4.
SQNR = {"nvfp4": 19.0}

QUANTIZED = [name for name, format in FORMATS.items() if isinstance(format, ServingFormat)]
# Formats that hold what a recipe multiplies with: E4M3 with one scale, a power of two if it is stored so.
DELAYED = ("te", "O2", "O3", "fp8")
TENSOR = {name for name in QUANTIZED if "nvfp4" not in name}
ANY_SCALE = TENSOR - {"fp8:ue8m0", "compressed-tensors:mxfp8"}
HELD = {
    "te": ANY_SCALE,
    "O2": ANY_SCALE,
    "O3": TENSOR,
    "fp8": ANY_SCALE,
    "current": ANY_SCALE - {"fp8:static"},
    "block": {"fp8", "fp8:ue8m0", "compressed-tensors:block", "compressed-tensors:mxfp8"},
    "block, scaling=block_float32": {"fp8", "compressed-tensors:block"},
    "mxfp8": {"compressed-tensors:mxfp8"},
    "nvfp4": {"compressed-tensors:nvfp4"},
}


def exported(folder, model, variables, format, mapping=LLAMA, **options):
    return save(
        folder, model, variables, TOKENS, mapping=mapping, format=format, config=llama.CONFIG, **options
    )


def value_of(arrays, layer):
    """A kernel's value, as an engine computes it: (out, in)."""
    end = next(end for end in (".weight_scale_inv", ".weight_scale") if layer + end in arrays)
    scale = np.asarray(arrays[layer + end])
    scale = scale.view(jnp.float8_e8m0fnu) if scale.dtype == np.uint8 else scale
    scale = scale.astype(np.float32)
    if f"{layer}.weight_packed" in arrays:
        packed = np.asarray(arrays[f"{layer}.weight_packed"])
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        codes = np.concatenate([numbers, -numbers])[codes]
        scale = scale / np.asarray(arrays[f"{layer}.weight_global_scale"])
    else:
        codes = np.asarray(arrays[f"{layer}.weight"]).astype(np.float32)
    if scale.size == 1:
        return codes * scale.reshape(())
    for axis in (0, 1):
        size = {1: codes.shape[axis], codes.shape[axis]: 1}.get(scale.shape[axis])
        size = size or (
            128 if codes.shape[axis] / scale.shape[axis] > 32 else codes.shape[axis] // scale.shape[axis]
        )
        scale = np.repeat(scale, size, axis)
    return codes * scale[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_formats_hold_what_training_multiplies_with(tmp_path, recipe):
    """Bit for bit where the format can, and within the noise of one cast elsewhere."""
    x = jax.random.normal(jax.random.key(0), (32, 256))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], recipe)
    variables = model.init({"up": {"kernel": jax.random.normal(jax.random.key(1), (256, 384)) / 16}}, x)
    variables = fp8jax.value_and_grad(lambda v: (model.apply(v, x) ** 2).mean())(variables)[2]
    frozen = model.freeze(variables, x)["params"]["up"]["kernel"]
    if not is_scaled(frozen):
        want = np.asarray(of_recipe(model.recipe).quantize_operand(RHS, frozen, {}, (0,))[0].dequantize())
    else:
        want = np.asarray(frozen.dequantize()).T
    stored, held = np.asarray(value(variables["params"]["up"]["kernel"])).T, set()
    for format in QUANTIZED:
        if format == "fp8:static" and recipe not in DELAYED:
            continue
        report = save(tmp_path / format, model, variables, x, mapping=PLAIN, format=format, config={})
        entries = read(tmp_path / format).entries
        got = value_of({name: entry.array() for name, entry in entries.items()}, "up")
        if report.rows[0].sqnr is None:
            held.add(format)
            # NVFP4's scale of a tensor is stored as its reciprocal.
            np.testing.assert_allclose(got, want, rtol=3e-7 if recipe == "nvfp4" else 0)
        else:
            sqnr = 10 * np.log10((stored**2).mean() / ((got - stored) ** 2).mean())
            assert sqnr > SQNR.get(format.partition(":")[2], 30), format
            np.testing.assert_allclose(report.rows[0].sqnr, sqnr, atol=0.01)
    assert held == HELD[recipe]


MATRICES = NameMap((Rename(r"(.*)\.(\d+)\.weight", r"\1/[\2]/kernel", axes=(1, 0)),))
EYE = jnp.eye(64)
EYES, ROWS = jnp.stack([EYE] * 3), jnp.tile(EYE, (3, 1))
OF_RECIPE = {"nvfp4": "compressed-tensors:nvfp4", "block": "fp8", "mxfp8": "compressed-tensors:mxfp8"}


@pytest.mark.parametrize("recipe", OF_RECIPE)
@pytest.mark.parametrize(
    "multiply, x, is_alone",
    [
        (lambda kernel, x: jnp.einsum("nd,edf->enf", x, kernel), EYE, False),
        (lambda kernel, x: jax.vmap(lambda w: x @ w)(kernel), EYE, False),
        (lambda kernel, x: jnp.stack(jnp.split(x @ jnp.concatenate([*kernel], 1), 3, 1)), EYE, False),
        (lambda kernel, x: jnp.einsum("eni,eio->eno", x, kernel), EYES, True),
        (lambda kernel, x: jax.lax.ragged_dot(x, kernel, jnp.full(3, 64, jnp.int32)), ROWS, True),
        (lambda kernel, x: jax.lax.scan(lambda _, w: (0, x @ w), 0, kernel)[1], EYE, True),
        (lambda kernel, x: jnp.stack([x @ w for w in kernel]), EYE, True),
    ],
)
def test_matrices_of_one_gemm(tmp_path, recipe, multiply, x, is_alone):
    """They share blocks, and NVFP4's scale of the tensor; engines have a GEMM for each."""
    sizes = jnp.array([0.01, 1, 37])[:, None, None]
    params = {"e": {"kernel": sizes * jax.random.normal(jax.random.key(0), (3, 64, 64))}}
    model = fp8jax.transform(lambda params, x: multiply(params["e"]["kernel"], x), recipe)
    variables, options = model.init(params, x), {"mapping": MATRICES, "format": OF_RECIPE[recipe]}
    report = save(tmp_path / "out", model, variables, x, config={}, **options)
    # Blocks of 32 inputs have nothing of another matrix.
    assert [row.is_unchanged for row in report.rows] == [is_alone or recipe == "mxfp8"] * 3
    arrays = weights(model, variables, x, **options)
    got = np.stack([value_of(arrays, f"e.{number}").T for number in range(3)])
    want = model.apply(variables, x).reshape(3, 64, 64)
    assert report.rows[0].is_unchanged == np.allclose(got, want, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "recipe, format", [("O3", "fp8"), ("te", "fp8:ue8m0"), ("nvfp4", "compressed-tensors:nvfp4")]
)
def test_report(tmp_path, recipe, format):
    report = exported(tmp_path / "out", *trained(recipe), format)
    rows = {row.name: row for row in report.rows}
    assert len(rows) == 15 and not rows["lm_head"].is_quantized
    line = next(line for line in str(report).splitlines() if line.startswith(LAYER))
    if format in HELD[recipe]:
        assert rows[LAYER].sqnr is None and line.endswith("  unchanged")
    else:
        assert 30 < rows[LAYER].sqnr < 34 and line.endswith(f"  quantized, SQNR {rows[LAYER].sqnr:.1f} dB")


@pytest.mark.parametrize("format", ["fp8", "fp8:ue8m0", "fp8:static", "compressed-tensors:nvfp4"])
def test_files_are_the_arrays(tmp_path, format):
    """Of scanned layers, in several files, and those that compiled code gives."""
    torch = pytest.importorskip("torch")
    (model, variables), mapping = trained("O3", is_scanned=True), LLAMA.stacked("layers")
    exported(tmp_path / "out", model, variables, format, mapping, max_shard_bytes=200_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    arrays = jax.jit(lambda v: weights(model, v, TOKENS, mapping=mapping, format=format))(variables)
    assert set(arrays) == set(index["weight_map"]) and len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in arrays.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            got = opened.get_tensor(name)
        bits = np.asarray(arrays[name]).reshape(-1).view(np.uint8)
        assert got.shape == arrays[name].shape and (got.reshape(-1).view(torch.uint8).numpy() == bits).all()


def test_config(tmp_path):
    exported(tmp_path / "out", *trained("O3"), "fp8:ue8m0")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["lm_head"],
    }
    assert config == llama.CONFIG


def test_excluded_layers(tmp_path):
    rules = [fp8jax.Rule("*/1/self_attn/*", "bf16"), fp8jax.Rule("*/down_proj", "bf16")]
    model = fp8jax.transform(llama.Llama(), "O3", rules=rules)
    variables = model.init(jax.random.key(0), TOKENS)
    exported(tmp_path / "out", model, variables, "compressed-tensors:channel")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    attention = [f"model.layers.1.self_attn.{name}_proj" for name in "kqov"]
    others = ["lm_head", *(f"model.layers.{number}.mlp.down_proj" for number in "01")]
    assert sorted(config["ignore"]) == sorted([*others, *attention])
    arrays = weights(model, variables, TOKENS, mapping=LLAMA, format="compressed-tensors:channel")
    assert arrays["model.layers.1.self_attn.q_proj.weight"].dtype == jnp.float32
    assert arrays["model.layers.0.self_attn.q_proj.weight"].dtype == jnp.float8_e4m3fn


def test_scales_of_inputs():
    model, variables = trained("te")
    arrays = weights(model, variables, TOKENS, mapping=LLAMA, format="fp8:static")
    state = variables["_overwrite_with_gradient"]["model"]["layers"]["1"]["mlp"]["up_proj"]["kernel"]
    assert arrays[f"{LAYER}.activation_scale"] == state["scale"][LHS] != 8
    model, variables = trained("block")
    with pytest.raises(ValueError, match="`format`: expected delayed scaling for fp8:static"):
        weights(model, variables, TOKENS, mapping=LLAMA, format="fp8:static")


@pytest.mark.parametrize("recipe", ["te", "fp8", "O2"])
@pytest.mark.parametrize("format", ["fp8:tensor", "fp8:ue8m0"])
def test_delayed_scaling_before_a_first_amax(tmp_path, recipe, format):
    """The first scale clips large weights; the folder has the scales of their own amaxes."""
    x, mapping = jnp.ones((32, 64)), NameMap((Rename("d.weight", "kernel", axes=(1, 0)),))
    model = fp8jax.transform(nn.Dense(64, use_bias=False), recipe)
    kernel = 20 * jax.random.normal(jax.random.key(1), (64, 64))
    variables = model.quantize({"params": {"kernel": kernel}}, like=model.init(jax.random.key(0), x))
    options = {"mapping": mapping, "format": format}
    [row] = save(tmp_path / "new", model, variables, x, config={}, **options).rows
    assert not row.is_unchanged and row.sqnr > 30
    arrays = jax.jit(lambda v: weights(model, v, x, **options))(variables)
    error = value_of({name: np.asarray(x).astype(np.float32) for name, x in arrays.items()}, "d").T - kernel
    np.testing.assert_allclose(row.sqnr, 10 * np.log10((kernel**2).mean() / (error**2).mean()), atol=0.01)
    variables = fp8jax.value_and_grad(lambda v: (model.apply(v, x) ** 2).mean())(variables)[2]
    [row] = save(tmp_path / "old", model, variables, x, config={}, **options).rows
    assert row.is_unchanged == (format == "fp8:tensor")


def test_scales_of_inputs_that_no_step_has_seen(tmp_path):
    """But an expert without rows in the last steps keeps its scale."""
    x, mapping = jnp.ones((32, 64)), NameMap((Rename("d.weight", "kernel", axes=(1, 0)),))
    model = fp8jax.transform(nn.Dense(64, use_bias=False), "te")
    variables = model.init(jax.random.key(0), x)
    options = {"mapping": mapping, "format": "fp8:static"}
    with pytest.raises(
        ValueError, match="expected an amax of the inputs of d for fp8:static; .* Run a training"
    ):
        save(tmp_path / "out", model, variables, x, config={}, **options)
    assert not list(tmp_path.iterdir())
    assert jnp.isnan(jax.jit(lambda v: weights(model, v, x, **options))(variables)["d.activation_scale"])
    state = variables["_overwrite_with_gradient"]["kernel"]
    state = {**state, "scale": jnp.array([0.5, 0.25, 1])}
    variables = {**variables, "_overwrite_with_gradient": {"kernel": state}}
    save(tmp_path / "out", model, variables, x, config={}, **options)
    assert weights(model, variables, x, **options)["d.activation_scale"] == 0.5


@pytest.mark.parametrize("second, largest", [(100.0, "kernel#1"), (0.01, "kernel"), (0.0, "kernel")])
def test_scales_of_inputs_of_a_layer_called_twice(second, largest):
    """The larger of the two calls' scales, unless a call had only zeros, for which the scale stays 1."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(128, name="d")
            return dense(second * nn.gelu(dense(x)))

    x = jax.random.normal(jax.random.key(0), (32, 128))
    model = fp8jax.transform(Twice(), "te")
    variables = model.init(jax.random.key(1), x)
    variables = fp8jax.value_and_grad(lambda v: (model.apply(v, x) ** 2).mean())(variables)[2]
    states = variables["_overwrite_with_gradient"]["d"]
    want = states[largest]["scale"][LHS]
    assert set(states) == {"kernel", "kernel#1"}
    assert second == 0 or want == max(state["scale"][LHS] for state in states.values())
    assert weights(model, variables, x, mapping=PLAIN, format="fp8:static")["d.activation_scale"] == want


def logits_in_torch(folder, **options):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.from_numpy(np.array(TOKENS))).logits.numpy()


CODES, FLOAT32 = (jnp.float8_e4m3fn, (384, 256)), jnp.float32
REQUIRED = {
    "bf16": {"weight": (jnp.bfloat16, (384, 256))},
    "fp32": {"weight": (FLOAT32, (384, 256))},
    "fp8": {"weight": CODES, "weight_scale_inv": (FLOAT32, (3, 2))},
    "fp8:ue8m0": {"weight": CODES, "weight_scale_inv": (jnp.float8_e8m0fnu, (3, 2))},
    "fp8:tensor": {"weight": CODES, "weight_scale_inv": (FLOAT32, ())},
    "fp8:static": {"weight": CODES, "weight_scale_inv": (FLOAT32, ()), "activation_scale": (FLOAT32, ())},
    "compressed-tensors:tensor": {"weight": CODES, "weight_scale": (FLOAT32, (1,))},
    "compressed-tensors:channel": {"weight": CODES, "weight_scale": (FLOAT32, (384, 1))},
    "compressed-tensors:block": {"weight": CODES, "weight_scale": (FLOAT32, (3, 2))},
    "compressed-tensors:mxfp8": {"weight": CODES, "weight_scale": (jnp.uint8, (384, 8))},
    "compressed-tensors:nvfp4": {
        "weight_packed": (jnp.uint8, (384, 128)),
        "weight_scale": (jnp.float8_e4m3fn, (384, 16)),
        "weight_global_scale": (FLOAT32, (1,)),
    },
}


@pytest.mark.parametrize("format", FORMATS)
def test_what_loaders_require(format):
    """Names, dtypes and shapes that vLLM and Transformers make parameters of."""
    model, variables = trained("O3")
    arrays = jax.eval_shape(lambda v: weights(model, v, TOKENS, mapping=LLAMA, format=format), variables)
    found = {
        name.removeprefix(f"{LAYER}."): (x.dtype, x.shape) for name, x in arrays.items() if LAYER in name
    }
    assert found == REQUIRED[format]


def test_inputs_of_whole_blocks():
    x = jnp.ones((32, 72))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], "O3")
    variables = model.init({"up": {"kernel": jnp.ones((72, 64))}}, x)
    with pytest.raises(ValueError, match="`format`: expected a multiple of 32 inputs for up.weight; got 72"):
        weights(model, variables, x, mapping=PLAIN, format="compressed-tensors:mxfp8")
    assert weights(model, variables, x, mapping=PLAIN, format="fp8")["up.weight_scale_inv"].shape == (1, 1)


@pytest.mark.parametrize(
    "recipe, format",
    [
        ("te", "fp8:tensor"),
        ("te", "fp8:static"),
        ("O3", "fp8"),
        ("O3", "fp8:ue8m0"),
        ("block", "fp8"),
        ("block", "fp8:tensor"),
    ],
)
def test_transformers_loads_a_llama(tmp_path, recipe, format):
    model, variables = trained(recipe)
    exported(tmp_path / "out", model, variables, format)
    got = logits_in_torch(tmp_path / "out")
    loaded = load(
        tmp_path / "out", like=jax.eval_shape(llama.Llama().init, jax.random.key(0), TOKENS), mapping=LLAMA
    )
    np.testing.assert_allclose(got, llama.Llama().apply(loaded, TOKENS), atol=2e-5)
    if format in HELD[recipe] and recipe != "block":
        frozen = model.dequantize(model.freeze(variables, TOKENS))
        np.testing.assert_allclose(got, llama.Llama().apply(frozen, TOKENS), atol=2e-5)


@pytest.mark.parametrize(
    "recipe, format",
    [("O3", name) for name in FORMATS if name.startswith("compressed")]
    + [("nvfp4", "compressed-tensors:nvfp4")],
)
def test_compressed_tensors_decompresses(tmp_path, recipe, format):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    exported(tmp_path / "out", *trained(recipe), format)
    plain = transformers.CompressedTensorsConfig(run_compressed=False)
    got = logits_in_torch(tmp_path / "out", quantization_config=plain)
    loaded = load(
        tmp_path / "out", like=jax.eval_shape(llama.Llama().init, jax.random.key(0), TOKENS), mapping=LLAMA
    )
    want = llama.Llama().apply(loaded, TOKENS)
    # It decompresses FP4 to bfloat16.
    np.testing.assert_allclose(got, want, atol=0.05 if format.endswith("nvfp4") else 2e-5)


@pytest.mark.parametrize("recipe", ["O3", "fp8", "block"])
@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_plain_weights(tmp_path, recipe, format):
    """All weights in one dtype, which Transformers loads without a word of quantization."""
    model, variables = trained(recipe)
    others = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float16"}
    config = {**llama.CONFIG, **others}
    report = save(tmp_path / "out", model, variables, TOKENS, mapping=LLAMA, format=format, config=config)
    assert not any(row.is_quantized for row in report.rows) and len(report.rows) == 15
    dtype = {"bf16": jnp.bfloat16, "fp32": jnp.float32}[format]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == config["torch_dtype"] == np.dtype(dtype).name
    want = jax.tree.map(lambda x: value(x).astype(dtype), variables["params"], is_leaf=is_scaled)
    arrays = [entry.array() for entry in read(tmp_path / "out").entries.values()]
    assert {np.dtype(array.dtype) for array in arrays} == {np.dtype(dtype)}
    like = jax.eval_shape(llama.Llama().init, jax.random.key(0), TOKENS)
    loaded = load(tmp_path / "out", like=like, mapping=LLAMA)["params"]
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree.map(lambda x: x.astype(jnp.float32), want))
    got = logits_in_torch(tmp_path / "out")
    np.testing.assert_allclose(got, llama.Llama().apply({"params": loaded}, TOKENS), atol=2e-5)


@pytest.mark.parametrize("name", ["up", "lm_head"])
def test_plain_weights_are_finite(tmp_path, name):
    """bfloat16's largest number is below float32's."""
    x, kernel = jnp.ones((32, 64)), jnp.ones((64, 32)).at[0, 0].set(3.4e38)
    model = fp8jax.transform(
        lambda params, x: sum(x @ params[name]["kernel"] for name in ("up", "lm_head")), "te"
    )
    params = {"up": {"kernel": jnp.ones((64, 32))}, "lm_head": {"kernel": jnp.ones((64, 32))}}
    variables = model.init({**params, name: {"kernel": kernel}}, x)
    save(tmp_path / "fp32", model, variables, x, mapping=PLAIN, format="fp32", config={})
    with pytest.raises(ValueError, match=f"`variables`: expected finite numbers in {name}"):
        save(tmp_path / "bf16", model, variables, x, mapping=PLAIN, format="bf16", config={})
    assert os.listdir(tmp_path) == ["fp32"]


def gpt2_config(config):
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.context,
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize("format", ["fp8", "fp8:tensor"])
def test_transformers_loads_a_gpt2(load_program, tmp_path, format):
    """Conv1D kernels, (in, out), under a scan, and no module around the blocks."""
    program = load_program("examples/gpt_model.py")
    sizes = program.GPTConfig(
        llama.WORDS, layers=2, heads=2, width=128, context=16, bias=True, tied=True, remat=False
    )
    model = fp8jax.transform(program.GPT(sizes), "O3")
    variables = model.init(jax.random.key(0), TOKENS)
    mapping = GPT2.stacked("h").moved("^transformer/", "", back=("^", "transformer/"))
    save(
        tmp_path / "out", model, variables, TOKENS, mapping=mapping, format=format, config=gpt2_config(sizes)
    )
    want = program.GPT(sizes).apply(model.dequantize(variables), TOKENS)
    np.testing.assert_allclose(logits_in_torch(tmp_path / "out"), want, atol=2e-5)
    written = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert written["modules_to_not_convert"] == ["lm_head"]
    with pytest.raises(ValueError, match=r"expected an fp8 one for transformer.h.0.attn.c_attn.weight"):
        weights(model, variables, TOKENS, mapping=mapping, format="compressed-tensors:mxfp8")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("recipe", ["te", "O3"])
def test_nnx_and_functions(tmp_path, recipe):
    """The same arrays from an NNX module and from a function of its parameters."""
    net, x = Net(nnx.Rngs(0)), jnp.ones((8, 128))
    graph, params = nnx.split(net, nnx.Param)
    function = fp8jax.transform(lambda params, x: nnx.merge(graph, params)(x), recipe)
    variables = function.init(nnx.to_pure_dict(params), x)
    model = fp8jax.transform(net, recipe)
    # Delayed scales are the kernels' own after a step.
    variables = fp8jax.value_and_grad(lambda v: (function.apply(v, x) ** 2).mean())(variables)[2]
    fp8jax.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    report = save(tmp_path / "out", model, mapping=PLAIN, format="fp8", config={})
    assert [row.sqnr for row in report.rows] == [None, None]
    got = weights(model, mapping=PLAIN, format="fp8")
    want = weights(function, variables, x, mapping=PLAIN, format="fp8")
    assert set(got) == set(want) and got["up.weight"].dtype == jnp.float8_e4m3fn
    for name in got:
        assert (got[name] == want[name]).all(), name


class OwnExperts(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (3, 64, 64)))

    def __call__(self, x):
        return jnp.einsum("end,edf->enf", x, self.kernel[...])


@pytest.mark.parametrize(
    "make, is_known",
    [
        (lambda rngs: nnx.Einsum("eni,eio->eno", (3, 64, 64), rngs=rngs), True),
        (lambda rngs: nnx.LinearGeneral(64, 64, batch_axis={0: 3}, use_bias=False, rngs=rngs), True),
        (lambda rngs: nnx.Einsum("ni,eio->eno", (3, 64, 64), rngs=rngs), False),
        (OwnExperts, False),
    ],
)
def test_matrices_of_one_gemm_in_nnx(tmp_path, make, is_known):
    """Only the layers of Flax say which axes batch their dot product."""
    model = fp8jax.transform(nnx.Dict(e=make(nnx.Rngs(0))), "nvfp4")
    format = "compressed-tensors:nvfp4"
    report = save(tmp_path / "out", model, mapping=MATRICES, format=format, config={})
    assert [row.is_unchanged for row in report.rows] == [is_known] * 3


def test_attention_heads():
    """Kernels of more dimensions are matrices in the folder."""
    heads = NameMap(
        (
            Rename("q.weight", "q/kernel", axes=(1, 0), shape=(-1, 4, 32)),
            Rename("o.weight", "o/kernel", axes=(1, 0), shape=(4, 32, -1)),
        )
    )

    def attend(params, x):
        y = jnp.einsum("td,dhk->thk", x, params["q"]["kernel"])
        return jnp.einsum("thk,hkd->td", y, params["o"]["kernel"])

    q, o = jax.random.normal(jax.random.key(0), (2, 64 * 128))
    params = {"q": {"kernel": q.reshape(64, 4, 32)}, "o": {"kernel": o.reshape(4, 32, 64)}}
    x = jnp.ones((8, 64))
    model = fp8jax.transform(attend, "O3")
    variables = model.init(params, x)
    arrays = weights(model, variables, x, mapping=heads, format="fp8")
    stored = model.dequantize(variables)
    assert (value_of(arrays, "q") == stored["q"]["kernel"].reshape(64, 128).T).all()
    assert (value_of(arrays, "o") == stored["o"]["kernel"].reshape(128, 64).T).all()


@pytest.mark.parametrize("format", ["fp8", "bf16"])
@pytest.mark.parametrize("name, shape", [("q", (64, 4, -1)), ("o", (-1, 32, 64))])
def test_a_shape_that_joins_other_dimensions_than_the_model(name, shape, format):
    class Attends(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.DenseGeneral((4, 32), use_bias=False, name="q")(x)
            return nn.DenseGeneral(64, axis=(-2, -1), use_bias=False, name="o")(x)

    shapes = {"q": (-1, 4, 32), "o": (4, 32, -1)}
    x, model = jnp.ones((32, 64)), fp8jax.transform(Attends(), "block")
    variables = model.init(jax.random.key(0), x)

    def heads(shapes):
        renames = (Rename(f"{n}.weight", f"{n}/kernel", (1, 0), shape) for n, shape in shapes.items())
        return {"mapping": NameMap(tuple(renames)), "format": format}

    arrays = weights(model, variables, x, **heads(shapes))
    assert arrays["q.weight"].shape == (128, 64) and arrays["o.weight"].shape == (64, 128)
    with pytest.raises(
        ValueError, match=f"`mapping`: expected .* inputs and .* outputs for {name}.weight; got"
    ):
        weights(model, variables, x, **heads(shapes | {name: shape}))


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors:nvfp4", "bf16"])
def test_the_weight_of_a_root_layer(tmp_path, format):
    x, mapping = jnp.ones((32, 64)), NameMap((Rename("weight", "kernel", axes=(1, 0)),))
    model = fp8jax.transform(nn.Dense(96, use_bias=False), "block")
    variables = model.init(jax.random.key(0), x)
    report = save(tmp_path / "out", model, variables, x, mapping=mapping, format=format, config={})
    assert [row.name for row in report.rows] == ["weight"]
    assert set(read(tmp_path / "out").entries) == set(REQUIRED[format])
    loaded = load(tmp_path / "out", like=variables, mapping=mapping)["params"]["kernel"]
    np.testing.assert_allclose(loaded, variables["params"]["kernel"], atol=0.1)


def test_a_kernel_whose_scales_have_no_name(tmp_path):
    """Only `X.weight` has a `X.weight_scale_inv`; plain weights have any name."""
    x, mapping = jnp.ones((32, 64)), NameMap((Rename("attn.in_proj_weight", "kernel", axes=(1, 0)),))
    model = fp8jax.transform(nn.Dense(96, use_bias=False), "block")
    variables = model.init(jax.random.key(0), x)
    options = {"mapping": mapping, "config": {}}
    with pytest.raises(ValueError, match="a name that ends in .weight, .*; got attn.in_proj_weight. Exclude"):
        save(tmp_path / "out", model, variables, x, format="fp8", **options)
    assert not list(tmp_path.iterdir())
    report = save(tmp_path / "out", model, variables, x, format="bf16", **options)
    assert (
        [row.name for row in report.rows] == list(read(tmp_path / "out").entries) == ["attn.in_proj_weight"]
    )


def scanned(axis=0):
    """Two layers under a scan; along axis 0 they have a gate, a learned scalar."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            gate = 1 if axis else self.param("gate", nn.initializers.normal(), ())
            return x + gate * nn.Dense(64, name="d")(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            over = {"params": axis}
            scan = nn.scan(Layer, variable_axes=over, split_rngs={"params": True}, length=2)
            return scan(name="layers")(x, None)[0]

    return Net()


def test_a_scalar_of_scanned_layers(tmp_path):
    x, mapping = jnp.ones((32, 64)), NameMap((*PLAIN.renames, Rename(r"(.*)\.gate", r"\1/gate")))
    model, options = fp8jax.transform(scanned(), "current"), {"mapping": mapping.stacked("layers")}
    variables = model.init(jax.random.key(0), x)
    save(tmp_path / "out", model, variables, x, format="fp32", config={}, **options)
    entries = read(tmp_path / "out").entries
    assert entries["layers.0.gate"].shape == entries["layers.1.gate"].shape == ()
    loaded = load(tmp_path / "out", like=variables, **options)
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)


def test_a_kernel_that_is_stored_as_torchs(tmp_path):
    """(out, in), as Equinox has it: `axes=(0, 1)` says that it is no Conv1D's."""
    x, format = jnp.ones((32, 64)), "compressed-tensors:mxfp8"
    model = fp8jax.transform(lambda params, x: x @ params["up"]["weight"].T, "mxfp8")
    kernel = jax.random.normal(jax.random.key(0), (96, 64))
    variables = model.init({"up": {"weight": kernel}}, x)
    rename = Rename(r"(.*)\.weight", r"\1/weight")
    with pytest.raises(ValueError, match=r"up.weight, whose `Rename` has no `axes`, .* `axes=\(0, 1\)` if"):
        weights(model, variables, x, mapping=NameMap((rename,)), format=format)
    mapping = NameMap((dataclasses.replace(rename, axes=(0, 1)),))
    [row] = save(tmp_path / "out", model, variables, x, mapping=mapping, format=format, config={}).rows
    assert row.is_unchanged
    got = value_of(weights(model, variables, x, mapping=mapping, format=format), "up")
    np.testing.assert_allclose(got, kernel, atol=0.3)
    loaded = load(tmp_path / "out", like=variables, mapping=mapping)["params"]["up"]["weight"]
    np.testing.assert_array_equal(loaded, got)


@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_scanned_layers_want_a_stacked_mapping(format):
    model, variables = trained("current", is_scanned=True)
    says = (
        r"`mapping`: expected 2 dims for model/layers/\S+; got shape \[2, .*`mapping.stacked\(name of their"
    )
    with pytest.raises(ValueError, match=says):
        weights(model, variables, TOKENS, mapping=LLAMA, format=format)


def test_a_format_with_scales_wants_a_kernel_with_scales(tmp_path):
    x = jnp.ones((32, 64))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], "bf16")
    variables = model.init({"up": {"kernel": jnp.ones((64, 64))}}, x)
    with pytest.raises(ValueError, match="`format`: expected bf16 or fp32 for a model without kernels in"):
        save(tmp_path / "out", model, variables, x, mapping=PLAIN, format="fp8", config={})
    assert not list(tmp_path.iterdir())
    save(tmp_path / "out", model, variables, x, mapping=PLAIN, format="bf16", config={})


@pytest.mark.parametrize("recipe", ["block", "bf16"])
def test_layers_along_another_axis_are_refused(recipe):
    """The rows of axis 0 are no layers."""
    x = jnp.ones((32, 64))
    model = fp8jax.transform(scanned(axis=1), recipe)
    variables = model.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"scans along axis 0 of layers/d/kernel; got one along axis 1"):
        weights(model, variables, x, mapping=PLAIN.stacked("layers"), format="bf16")


@pytest.mark.parametrize("is_empty", [True, False])
def test_nothing_is_overwritten(tmp_path, is_empty):
    if is_empty:
        exported(tmp_path, *trained("O3"), "fp8")
        assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ValueError, match="`folder`: expected a new or empty folder"):
        exported(tmp_path, *trained("O3"), "fp8")
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_stopped_export_is_named(tmp_path):
    """A signal in `save` into an empty folder leaves a hidden folder, which `ls` does not show."""
    (tmp_path / "out" / ".out.yasxk87s").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"got .*out, which has \.out\.yasxk87s, of a stopped export: delete"
    ):
        exported(tmp_path / "out", *trained("O3"), "fp8")
    (tmp_path / "out" / ".out.yasxk87s").rename(tmp_path / "out" / "mine")
    with pytest.raises(ValueError, match="got .*out, which has mine.$"):
        exported(tmp_path / "out", *trained("O3"), "fp8")


def test_a_folder_that_another_process_writes(tmp_path, monkeypatch):
    def finish(writer, finish=Writer.finish):
        finish(writer)
        (tmp_path / "out" / "theirs").mkdir(parents=True)

    monkeypatch.setattr(Writer, "finish", finish)
    with pytest.raises(ValueError, match="expected that nothing else writes .*out; got Directory not empty"):
        exported(tmp_path / "out", *trained("O3"), "fp8")
    assert [os.listdir(tmp_path), os.listdir(tmp_path / "out")] == [["out"], ["theirs"]]


def test_other_users_may_read(tmp_path):
    """safetensors 0.8.0 writes files that only their owner reads; here the umask decides."""
    umask = os.umask(0o022)
    try:
        exported(tmp_path / "out", *trained("O3"), "fp8")
    finally:
        os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}


def spoilt(variables):
    layer = variables["params"]["model"]["layers"]["0"]["mlp"]["up_proj"]
    layer = {"kernel": layer["kernel"].at[0, 0].set(jnp.inf)}
    return jax.tree.map(lambda x: x, variables) | {"params": with_layer(variables["params"], layer)}


def with_layer(params, layer):
    new = jax.tree.map(lambda x: x, params)
    new["model"]["layers"]["0"]["mlp"]["up_proj"] = layer
    return new


@pytest.mark.parametrize(
    "recipe, change, options, says",
    [
        ("te", None, {"format": "fp4"}, "`format`: expected one of bf16, fp32, fp8, fp8:ue8m0, "),
        ("te", None, {"mapping": GPT2}, "`mapping`: expected a rename that leads to "),
        ("block", spoilt, {}, "`variables`: expected finite numbers in model.layers.0.mlp.up_proj"),
        ("te", lambda v: v["params"], {}, "`variables`: expected a tree with 'params', .*; got dict without"),
        (
            "te",
            lambda v: {"params": v["params"]},
            {"format": "bf16"},
            "`variables`: expected the scaling state of 'model/.*/kernel' in .*; got none with 'scale'",
        ),
        ("te", None, {"format": ["fp8"]}, r"`format`: expected one of bf16, .*; got \['fp8'\]"),
        ("te", None, {"mapping": None}, "`mapping`: expected gpt2, llama, .*; got None"),
        ("te", None, {"mapping": "llama2"}, "`mapping`: expected gpt2, llama, .*; got 'llama2'"),
        ("te", None, {"config": None}, "`config`: expected a dict that JSON can hold; got None"),
        ("te", None, {"config": []}, r"`config`: expected a dict that JSON can hold; got \[\]"),
        ("te", None, {"max_shard_bytes": "5GB"}, "`max_shard_bytes`: expected a positive number; got '5GB'"),
        ("te", None, {"max_shard_bytes": None}, "`max_shard_bytes`: expected a positive number; got None"),
        ("te", None, {"max_shard_bytes": 0}, "`max_shard_bytes`: expected a positive number; got 0"),
    ],
)
def test_refused(tmp_path, recipe, change, options, says):
    model, variables = trained(recipe)
    variables = change(variables) if change else variables
    options = {"mapping": LLAMA, "format": "fp8", "config": llama.CONFIG, **options}
    with pytest.raises(ValueError, match=says) as caught:
        save(tmp_path / "out", model, variables, TOKENS, **options)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_adapters_are_merged_first():
    model = fp8jax.transform(llama.Llama(), "block", lora=fp8jax.LoRA(rank=2))
    variables = model.init(jax.random.key(0), TOKENS)
    with pytest.raises(ValueError, match="`model`: expected one without adapters; merge them"):
        weights(model, variables, TOKENS, mapping=LLAMA)


@pytest.mark.parametrize("number", [np.inf, np.nan])
@pytest.mark.parametrize(
    "recipe, format",
    [
        ("te", "fp8:tensor"),
        ("current", "fp8"),
        ("block", "compressed-tensors:mxfp8"),
        ("nvfp4", "compressed-tensors:nvfp4"),
    ],
)
def test_kernels_that_are_not_finite_are_refused(tmp_path, recipe, format, number):
    """And a sampler gets scales that are NaN."""
    x = jnp.ones((32, 256))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], recipe)
    kernel = jax.random.normal(jax.random.key(1), (256, 384)) / 16
    variables = model.init({"up": {"kernel": kernel}}, x)
    broken = {**variables, "params": {"up": {"kernel": kernel.at[3, 5].set(number)}}}
    options = {"mapping": PLAIN, "format": format}
    with pytest.raises(ValueError, match="expected finite numbers in up; got an infinity or NaN"):
        save(tmp_path / "out", model, broken, x, config={}, **options)
    assert not list(tmp_path.iterdir())
    arrays = jax.jit(lambda v: weights(model, v, x, **options))(broken)
    [scale] = (x for name, x in arrays.items() if name.endswith(("weight_scale", "weight_scale_inv")))
    is_nan = scale == 255 if scale.dtype == jnp.uint8 else jnp.isnan(scale.astype(jnp.float32))
    assert is_nan.all()


def test_statistics_are_refused(tmp_path):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="up")(nn.BatchNorm(use_running_average=True, name="norm")(x))

    x = jnp.ones((32, 64))
    model = fp8jax.transform(Normed(), "te")
    with pytest.raises(ValueError, match="expected one whose parameters are all .*; got batch_stats"):
        save(tmp_path / "out", model, model.init(jax.random.key(0), x), x, mapping=PLAIN, config={})
    module = nnx.Sequential(nnx.BatchNorm(64, rngs=nnx.Rngs(0)), nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="got batch_stats"):
        save(tmp_path / "out", fp8jax.transform(module, "te"), mapping=PLAIN, config={})
    assert not list(tmp_path.iterdir())


def test_a_kernel_of_zeros_is_exact(tmp_path):
    x = jnp.ones((32, 256))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], "block")
    variables = model.init({"up": {"kernel": jnp.zeros((256, 384))}}, x)
    options = {"mapping": PLAIN, "format": "fp8:tensor", "config": {}}
    assert str(save(tmp_path / "out", model, variables, x, **options)).endswith("up  quantized, exact")


def test_folders_that_are_links_or_here(tmp_path, monkeypatch):
    x = jnp.ones((32, 256))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"], "O3")
    variables = model.init({"up": {"kernel": jnp.ones((256, 384))}}, x)
    here, linked = tmp_path / "here", tmp_path / "linked"
    here.mkdir()
    linked.mkdir()
    (tmp_path / "link").symlink_to(linked)
    monkeypatch.chdir(here)
    for folder in (".", tmp_path / "link"):
        save(folder, model, variables, x, mapping=PLAIN, config={})
    assert sorted(os.listdir(here)) == sorted(os.listdir(linked)) == ["config.json", "model.safetensors"]
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="`folder`: expected .*; got .*nowhere, which is no folder"):
        save(tmp_path / "nowhere", model, variables, x, mapping=PLAIN, config={})
    with pytest.raises(TypeError, match="NoneType"):
        save(None, model, variables, x, mapping=PLAIN, config={})
    with pytest.raises(ValueError, match="`folder`: expected a path below a folder; got .*config.json/out"):
        save(here / "config.json" / "out", model, variables, x, mapping=PLAIN, config={})
    with pytest.raises(ValueError, match="`config`: expected a dict that JSON can hold; got: Out of range"):
        save(tmp_path / "new", model, variables, x, mapping=PLAIN, config={"rope": float("nan")})
