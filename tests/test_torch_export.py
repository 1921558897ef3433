"""A torch model's folder has the codes and scales that its layers multiply with."""

import jax.numpy as jnp
import llama
import numpy as np
import pytest

from fp8jax.checkpoints.folder import read

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fp8jax_torch  # noqa: E402
from fp8jax_torch.bridge import save  # noqa: E402

TOKENS = torch.from_numpy(llama.TOKENS)
LAYER = "model.layers.1.mlp.up_proj"


def trained(recipe):
    """A Llama after two steps."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama.CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fp8jax_torch.prepare(model, optimizer, recipe)
    for _ in range(2):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("recipe, format", [("O3", "fp8"), ("te", "fp8:static"), ("block", "fp8")])
def test_codes_and_logits(tmp_path, recipe, format):
    model = trained(recipe)
    report = save(tmp_path / "out", model, config=llama.CONFIG, format=format)
    assert [row.name for row in report.rows if not row.is_quantized] == ["lm_head"]
    assert all(row.is_unchanged for row in report.rows) and len(report.rows) == 15
    entries, layer = read(tmp_path / "out").entries, model.get_submodule(LAYER)
    codes, scale = entries[f"{LAYER}.weight"].array(), entries[f"{LAYER}.weight_scale_inv"].array()
    if recipe == "O3":
        assert (codes.view(np.uint8) == layer.weight.codes.view(torch.uint8).numpy()).all()
        assert (scale == layer.weight.scale.numpy()).all()
    if recipe == "te":
        assert scale == layer.fp8.scale[1].numpy()
        assert entries[f"{LAYER}.activation_scale"].array() == layer.fp8.scale[0].numpy()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    weight = loaded.get_submodule(LAYER).weight.detach().numpy()
    value = (
        codes.astype(np.float32).reshape(3, 128, 2, 128) * jnp.broadcast_to(scale, (3, 2))[:, None, :, None]
    )
    assert (weight == value.reshape(384, 256)).all()


def test_plain_weights(tmp_path):
    model = trained("fp8")
    report = save(tmp_path / "out", model, config=llama.CONFIG, format="fp32")
    assert not any(row.is_quantized for row in report.rows) and len(report.rows) == 15
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    want = fp8jax_torch.dequantize(model).state_dict()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, want[name]), name


def test_a_plain_model_is_refused(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama.CONFIG))
    with pytest.raises(ValueError, match="`model`: expected layers in FP8"):
        save(tmp_path / "out", model, config=llama.CONFIG)
