"""Folders that Transformers quantized, by its FP8 quantizer and by torchao, from random weights."""

import json

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest

from fp8jax.checkpoints import LLAMA, MIXTRAL, load
from fp8jax.formats import E4M3
from fp8jax.quantization import ScaledArray

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
SIZES = {name: n for name, n in llama.CONFIG.items() if isinstance(n, int)}
FP8 = {"block": {}, "ue8m0": {"scale_fmt": "ue8m0"}, "tensor": {"weight_block_size": None}}


def quantized(kind, config, folder):
    """A folder of a quantized model, and the bfloat16 numbers that it was made from, by name."""
    more = {"Mixtral": {"num_local_experts": 2}, "Qwen3": {"head_dim": 64}}.get(kind, {})
    torch.manual_seed(0)
    sizes = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    plain = getattr(transformers, f"{kind}ForCausalLM")(sizes).to(torch.bfloat16)
    plain.save_pretrained(folder / "plain")
    model = type(plain).from_pretrained(folder / "plain", quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "out")
    return model, {name: x.float().numpy() for name, x in plain.state_dict().items()}


@pytest.fixture
def fp8_config(monkeypatch):
    """Makes a config of the FP8 quantizer; it refuses a CPU, where all of its quantization runs."""
    pytest.importorskip("accelerate")
    module = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(module.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    return transformers.FineGrainedFP8Config


def like(weights, scales_of=None):
    """Variables for weights by torch's names; `scales_of` gives the shape of an E4M3 kernel's scales."""
    tree = {}
    for name, x in weights.items():
        *parents, last = ("params", *LLAMA.place(name).path)
        leaf = jax.ShapeDtypeStruct(LLAMA.place(name).arrange(x).shape, jnp.float32)
        if scales_of and "_proj" in name:
            scale = jax.ShapeDtypeStruct(scales_of(leaf.shape), jnp.float32)
            leaf = ScaledArray(jax.ShapeDtypeStruct(leaf.shape, E4M3.dtype), scale)
        parent = tree
        for part in parents:
            parent = parent.setdefault(part, {})
        parent[last] = leaf
    return tree


def at(tree, name):
    for part in ("params", *LLAMA.place(name).path):
        tree = tree[part]
    return tree


def assert_codes(got, folder, codes, scale):
    """Each kernel has the codes and scales of the file, which have these ends of names, bit for bit."""
    stored = load_file(folder / "model.safetensors")
    names = [name.removesuffix(codes) for name in stored if name.endswith(f"_proj{codes}")]
    assert len(names) == 7 * llama.LAYERS
    for name in names:
        kernel, grid = at(got, f"{name}.weight"), stored[name + scale].float().numpy().T
        want = stored[name + codes].view(torch.uint8).numpy().T
        assert (np.asarray(kernel.data).view(np.uint8) == want).all()
        assert (kernel.scale == grid.reshape(kernel.scale.shape)).all()


@pytest.mark.parametrize("options", FP8.values(), ids=FP8)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_folders_of_the_fp8_quantizer(tmp_path, fp8_config, kind, options):
    """Bit for bit into E4M3 kernels with such scales; else the plain numbers, within their quantization."""
    _, weights = quantized(kind, fp8_config(**options), tmp_path)
    blocks = (
        (lambda shape: ()) if "weight_block_size" in options else lambda shape: tuple(d // 128 for d in shape)
    )
    got = load(tmp_path / "out", like=like(weights, blocks), mapping=LLAMA)
    assert_codes(got, tmp_path / "out", ".weight", ".weight_scale_inv")
    plain = load(tmp_path / "out", like=like(weights), mapping=LLAMA)
    for name, want in weights.items():
        # Half an ulp at E4M3's max; a scale that is a power of two is up to twice as large.
        limit = abs(want).max() / (14 if "scale_fmt" in options else 28) if "_proj" in name else 0
        want = LLAMA.place(name).arrange(want)
        np.testing.assert_allclose(at(plain, name), want, rtol=0, atol=1.001 * limit)


def test_experts_of_the_fp8_quantizer(tmp_path, fp8_config):
    """Transformers 5.23 writes codes for each expert, and scales for all, which it does not read back."""
    quantized("Mixtral", fp8_config(), tmp_path)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(".w1.weight_scale_inv" in name for name in stored), "read these folders, and test that"
    with pytest.raises(ValueError, match=r"experts\.\d\.w\d\.weight; got float8_e4m3fn.*, no scale\. Copy"):
        load(tmp_path / "out", like={"params": {"a": jnp.zeros(1)}}, mapping=MIXTRAL)


@pytest.mark.parametrize("granularity", ["PerTensor", "PerRow"])
def test_folders_of_torchao(tmp_path, granularity):
    """Codes and scales bit for bit, and torchao's values for a scale for each row."""
    torchao = pytest.importorskip("torchao.quantization")
    config = torchao.Float8WeightOnlyConfig(granularity=getattr(torchao, granularity)())
    model, weights = quantized("Llama", transformers.TorchAoConfig(config), tmp_path)
    if granularity == "PerTensor":
        got = load(tmp_path / "out", like=like(weights, lambda shape: ()), mapping=LLAMA)
        assert_codes(got, tmp_path / "out", "._weight_qdata", "._weight_scale")
    plain = load(tmp_path / "out", like=like(weights), mapping=LLAMA)
    for name, x in model.state_dict().items():
        want = x.dequantize(torch.float32) if "_proj" in name else x.float()
        assert (at(plain, name) == LLAMA.place(name).arrange(want).numpy()).all(), name


def test_other_configs_of_torchao(tmp_path):
    """Only Float8 is read; the line says what was found."""
    torchao = pytest.importorskip("torchao.quantization")
    quantized("Llama", transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig()), tmp_path)
    with pytest.raises(ValueError, match=r"torchao \(Float8\) in .*; got 'torchao Int8WeightOnlyConfig'"):
        load(tmp_path / "out", like={"params": {"a": jnp.zeros(1)}}, mapping=LLAMA)
    file = tmp_path / "out" / "config.json"
    (tmp_path / "plain" / "config.json").write_text(
        json.dumps({"quantization_config": json.loads(file.read_text())["quantization_config"]})
    )
    with pytest.raises(ValueError, match=r"torchao \(Float8\) in .*; got 'torchao Int8WeightOnlyConfig'"):
        load(tmp_path / "plain", like={"params": {"a": jnp.zeros(1)}}, mapping=LLAMA)
