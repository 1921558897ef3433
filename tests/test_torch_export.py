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


class WithToken(torch.nn.Module):
    """A layer, and a parameter and a buffer at the root."""

    def __init__(self):
        super().__init__()
        self.cls = torch.nn.Parameter(torch.arange(128.0))
        self.register_buffer("ids", torch.tensor([3, 1]))
        self.up = torch.nn.Linear(128, 128)


def test_tensors_at_the_root(tmp_path):
    model = fp8jax_torch.transform(WithToken(), "O3")
    save(tmp_path / "out", model, config={}, format="fp8")
    entries, state = read(tmp_path / "out").entries, model.state_dict()
    assert sorted(entries) == ["cls", "ids", "up.bias", "up.weight", "up.weight_scale_inv"]
    assert (entries["cls"].array() == state["cls"].numpy()).all()


def test_a_single_layer(tmp_path):
    model = fp8jax_torch.transform(torch.nn.Linear(128, 128), "O3")
    save(tmp_path / "out", model, config={}, format="fp32")
    entries = read(tmp_path / "out").entries
    assert sorted(entries) == ["bias", "weight"]
    assert (entries["weight"].array() == fp8jax_torch.value(model.weight).detach().numpy()).all()


def compiled(model, request):
    return torch.compile(model)


def compiled_over_processes(model, request):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    request.addfinalizer(torch.distributed.destroy_process_group)
    return torch.compile(torch.nn.parallel.DistributedDataParallel(model))


@pytest.mark.parametrize("wrapped", [compiled, compiled_over_processes])
def test_names_inside_of_wrappers(tmp_path, request, wrapped):
    """`torch.compile` and DDP name their model `_orig_mod` and `module`, which no engine knows."""
    model = fp8jax_torch.transform(torch.nn.Sequential(torch.nn.Linear(128, 128)), "block")
    report = save(tmp_path / "out", wrapped(model, request), config={})
    assert [row.name for row in report.rows] == ["0"]
    assert sorted(read(tmp_path / "out").entries) == ["0.bias", "0.weight", "0.weight_scale_inv"]


def test_a_compiled_layer_is_refused(tmp_path):
    model = fp8jax_torch.transform(torch.nn.Sequential(torch.nn.Linear(128, 128)), "block")
    model[0] = torch.compile(model[0])
    with pytest.raises(ValueError, match=r"`model`: expected .*; got 0\._orig_mod"):
        save(tmp_path / "out", model, config={})
    assert not (tmp_path / "out").exists()


def test_a_plain_model_is_refused(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama.CONFIG))
    with pytest.raises(ValueError, match="`model`: expected layers in FP8"):
        save(tmp_path / "out", model, config=llama.CONFIG)
