"""Loading Hugging Face folders: the same bits where a parameter can have them, one error where it cannot."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from llama import TOKENS, trained
from safetensors.numpy import save_file

import fp8jax
from fp8jax.checkpoints import FORMATS, LLAMA, MIXTRAL, QWEN3, NameMap, Rename, load, save
from fp8jax.formats import E4M3
from fp8jax.quantization import ScaledArray, is_scaled, value

UP = ("model", "layers", "1", "mlp", "up_proj", "kernel")
PLAIN = NameMap((Rename(r"(.*)\.weight", r"\1/kernel", axes=(1, 0)), Rename(r"(.*)\.bias", r"\1/bias")))
EXACT_FORMATS = [name for name in FORMATS if name != "bf16" and "nvfp4" not in name]


def at(tree, path=UP):
    for name in path:
        tree = tree[name]
    return tree


def shapes_of(variables):
    """The variables with shapes in the place of the model's own parameters."""
    own = "frozen" if "frozen" in variables else "params"
    return {**variables, own: jax.eval_shape(lambda: variables[own])}


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and (np.asarray(a) == np.asarray(b)).all(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "format, is_scanned",
    [*((name, False) for name in EXACT_FORMATS), ("fp8", True), ("compressed-tensors:channel", True)],
)
def test_round_trip(tmp_path, format, is_scanned):
    """Codes and scales come back bit for bit, and the loss is where it was."""
    model, variables = trained("O3", is_scanned)
    mapping = LLAMA.stacked("layers") if is_scanned else "llama"
    save(tmp_path / "out", model, variables, TOKENS, mapping=mapping, format=format, config=llama.CONFIG)
    got = load(tmp_path / "out", like=shapes_of(variables), mapping=mapping)
    assert_same(got, variables)
    loss = jax.jit(fp8jax.value_and_grad(lambda v: (model.apply(v, TOKENS) ** 2).mean()))
    assert loss(got)[0] == loss(variables)[0]


@pytest.mark.parametrize("format", ["fp8", "fp8:tensor"])
def test_scales_that_are_no_powers_of_two(tmp_path, format):
    """E4M3 parameters take codes with any scale, and an optimizer goes on from them."""
    source, variables = trained("te")
    save(tmp_path / "out", source, variables, TOKENS, mapping=LLAMA, format=format, config=llama.CONFIG)
    want = at(source.freeze(variables, TOKENS)["params"])
    model, like = trained("O3")
    got = load(tmp_path / "out", like=shapes_of(like), mapping=LLAMA)
    kernel = at(got["params"])
    assert (kernel.data == want.data).all() and kernel.scale == want.scale and np.log2(kernel.scale) % 1
    again = tmp_path / "again"
    report = save(again, model, got, TOKENS, mapping=LLAMA, format="fp8:ue8m0", config=llama.CONFIG)
    assert not any(row.is_unchanged for row in report.rows if row.is_quantized)
    plain = load(again, like=jax.eval_shape(llama.Llama().init, jax.random.key(0), TOKENS), mapping=LLAMA)
    np.testing.assert_allclose(at(plain["params"]), value(kernel), atol=float(abs(value(kernel)).max()) / 16)
    tx = fp8jax.optim.adamw(1e-3, "O3")
    loss, grads, got = fp8jax.value_and_grad(lambda v: (model.apply(v, TOKENS) ** 2).mean())(got)
    updates, _ = tx.update(grads, tx.init(got["params"]), got["params"])
    after = fp8jax.apply_updates(got, updates)
    assert np.isfinite(loss) and 0 < abs(value(at(after["params"])) - value(kernel)).max() < 0.01


@pytest.mark.parametrize("recipe", ["te", "O2", "O3", "current", "block"])
def test_other_formats_are_quantized_once(tmp_path, recipe):
    """From the values of the folder, by the format and the scales of the parameter."""
    model, other = trained("block")[0], trained(recipe)
    # The scales of blocks differ.
    larger = lambda x: x.at[:128].multiply(8) if x.ndim == 2 else x  # noqa: E731
    source = jax.tree.map(larger, trained("block")[1])
    save(tmp_path / "out", model, source, TOKENS, mapping=LLAMA, format="fp8", config=llama.CONFIG)
    plain = load(
        tmp_path / "out", like=jax.eval_shape(llama.Llama().init, jax.random.key(0), TOKENS), mapping=LLAMA
    )
    got = load(tmp_path / "out", like=shapes_of(other[1]), mapping=LLAMA)
    assert_same(got, other[0].quantize(plain, like=other[1]))
    codes, want = at(plain["params"]), at(source["params"])
    assert 0 < abs(codes - want).max() < abs(want).max() / 16


def hugging_face(kind, dtype, folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"vocab_size": llama.WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    sizes |= {"num_local_experts": 4} if kind == "Mixtral" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=0, eos_token_id=0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind, mapping", [("Llama", LLAMA), ("Qwen3", QWEN3), ("Mixtral", MIXTRAL)])
def test_plain_folders_of_transformers(tmp_path, kind, mapping, dtype):
    torch = pytest.importorskip("torch")
    model = hugging_face(kind, dtype, tmp_path)
    shapes = {}
    for name, shape in shapes_in(tmp_path).items():
        place = mapping.place(name)
        arranged = place.arrange(np.zeros(shape, np.int8)).shape
        experts = (4,) if place.layer else ()
        shapes[place.path] = jax.ShapeDtypeStruct((*experts, *arranged), jnp.float32)
    like = {}
    for path, shape in shapes.items():
        at_parent = like
        for part in ("params", *path[:-1]):
            at_parent = at_parent.setdefault(part, {})
        at_parent[path[-1]] = shape
    got = load(tmp_path, like=like, mapping=mapping)["params"]
    total = sum(float(parameter.double().abs().sum()) for parameter in model.parameters())
    np.testing.assert_allclose(
        sum(np.abs(np.float64(x)).sum() for x in jax.tree.leaves(got)), total, rtol=1e-12
    )
    query = got["model"]["layers"]["1"]["self_attn"]["q_proj"]["kernel"]
    want = model.model.layers[1].self_attn.q_proj.weight.detach().to(torch.float32).numpy()
    assert (query == want.T).all()


def shapes_in(folder):
    from safetensors import safe_open

    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    return shapes


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors:mxfp8"])
def test_adapters_on_a_block_scaled_folder(tmp_path, format):
    """The frozen kernels are the folder's codes and scales, also of smaller blocks; training starts there."""
    save(tmp_path / "out", *trained("block"), TOKENS, mapping=LLAMA, format=format, config=llama.CONFIG)
    model = fp8jax.transform(llama.Llama(), "block", lora=fp8jax.LoRA(rank=2))
    fresh = model.init(jax.random.key(9), TOKENS)
    variables = load(tmp_path / "out", like=shapes_of(fresh), mapping=LLAMA)
    kernel, plain = at(variables["frozen"]), at(trained("block")[1]["params"])
    want = model.adapt(jax.random.key(0), {"params": trained("block")[1]["params"]}, TOKENS)
    assert kernel.scale.shape == (2, 3)
    assert_same(kernel, at(want["frozen"]))
    assert_same(variables["params"], fresh["params"])
    np.testing.assert_allclose(value(kernel), plain, atol=float(abs(plain).max()) / 16)
    loss, grads, _ = fp8jax.value_and_grad(lambda v: (model.apply(v, TOKENS) ** 2).mean())(variables)
    assert np.isfinite(loss) and at(grads, UP[:-1])["lora_b"].any()


@pytest.mark.parametrize("recipe", ["te", "O3"])
def test_arrays_are_sharded_as_they_are_read(tmp_path, recipe):
    model, variables = trained(recipe)
    save(tmp_path / "out", model, variables, TOKENS, mapping=LLAMA, format="fp8", config=llama.CONFIG)
    mesh = jax.make_mesh((8,), ("data",))

    def sharded(x):
        spec = PartitionSpec("data") if x.shape and x.shape[0] % 8 == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    like = {**variables, "params": jax.tree.map(sharded, variables["params"])}
    got = load(tmp_path / "out", like=like, mapping=LLAMA)
    kernel = at(got["params"])
    data = kernel.data if is_scaled(kernel) else kernel
    assert data.sharding.spec == PartitionSpec("data") and data.addressable_shards[0].data.shape == (32, 384)
    if recipe == "O3":
        assert_same(jax.device_get(got), jax.device_get(variables))


def test_smaller_blocks_are_quantized_again(tmp_path):
    """Scales of 1x32 blocks that differ are no scales of 128x128 blocks."""
    save(
        tmp_path / "out",
        *trained("mxfp8"),
        TOKENS,
        mapping=LLAMA,
        format="compressed-tensors:mxfp8",
        config={},
    )
    model = fp8jax.transform(llama.Llama(), "block", lora=fp8jax.LoRA(rank=2))
    variables = load(tmp_path / "out", like=shapes_of(model.init(jax.random.key(9), TOKENS)), mapping=LLAMA)
    got, want = at(variables["frozen"]), at(trained("mxfp8")[1]["params"])
    np.testing.assert_allclose(value(got), want, atol=float(abs(want).max()) / 16)


def test_heads_of_an_fp8_kernel(tmp_path):
    """Blocks of scales that a split dimension cuts."""
    model, variables = trained("block")
    save(tmp_path / "out", model, variables, TOKENS, mapping=LLAMA, format="fp8", config=llama.CONFIG)
    leave_others = Rename(r"(?!model.layers.1.mlp.up_proj).*", None)
    up = Rename(r".*up_proj.weight", "up", axes=(1, 0))
    heads = dataclasses.replace(up, shape=(256, 4, 96))
    kernel = ScaledArray(
        jax.ShapeDtypeStruct((256, 4, 96), E4M3.dtype), jax.ShapeDtypeStruct((), jnp.float32)
    )
    for like in (jax.ShapeDtypeStruct((256, 4, 96), jnp.float32), kernel):
        got = load(tmp_path / "out", like={"up": like}, mapping=NameMap((leave_others, heads)))["up"]
        matrix = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape and (256, 384), x.dtype), like)
        want = load(tmp_path / "out", like={"up": matrix}, mapping=NameMap((leave_others, up)))["up"]
        assert (value(got) == value(want).reshape(256, 4, 96)).all() and value(got).any()


def test_a_shape_with_a_number_for_the_wrong_dimension(tmp_path):
    model, x = fp8jax.transform(lambda params, x: x @ params["q"], "O3"), jnp.ones((32, 64))
    variables = model.init({"q": jnp.ones((64, 64))}, x)
    plain = NameMap((Rename("q.weight", "q", axes=(1, 0)),))
    save(tmp_path / "out", model, variables, x, mapping=plain, format="bf16", config={})
    heads = NameMap((Rename("q.weight", "q", axes=(1, 0), shape=(64, 4, -1)),))
    like = {"q": jax.ShapeDtypeStruct((64, 4, 16), jnp.float32)}
    with pytest.raises(ValueError, match=r"got \[64, 64\] in q.weight. .* Check shape=\(64, 4, -1\) of its"):
        load(tmp_path / "out", like=like, mapping=heads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("to", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_plain_numbers_of_all_dtypes(tmp_path, dtype, to):
    """Converted as NumPy does, subnormals and NaN, too; a number that becomes an infinity is refused."""
    numbers = np.arange(2**16, dtype=np.uint16)
    dtype = jnp.dtype(dtype)
    numbers = (
        (numbers.astype(np.uint32) * 65521).view(np.float32) if dtype == np.float32 else numbers.view(dtype)
    )
    (tmp_path / "config.json").write_text("{}")
    save_file({"up.weight": numbers.reshape(256, 256)}, tmp_path / "model.safetensors")
    like = {"params": {"up": {"kernel": jax.ShapeDtypeStruct((256, 256), to)}}}
    with np.errstate(all="ignore"):
        overflows = np.isinf(numbers.astype(to)) & np.isfinite(numbers)
    if overflows.any():
        name = jnp.dtype(to).name
        with pytest.raises(ValueError, match=f"`folder`: expected numbers up to .*{name}.*in up.weight; got"):
            load(tmp_path, like=like, mapping=PLAIN)
        numbers[overflows] = np.inf
        save_file({"up.weight": numbers.reshape(256, 256)}, tmp_path / "model.safetensors")
    got = load(tmp_path, like=like, mapping=PLAIN)["params"]["up"]["kernel"]
    assert got.dtype == to
    with np.errstate(all="ignore"):
        want = numbers.reshape(256, 256).T.astype(to)
        assert np.array_equal(np.isnan(want), np.isnan(got)) and ((got == want) | np.isnan(want)).all()


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32"])
def test_numbers_of_float64_that_overflow(tmp_path, to):
    (tmp_path / "config.json").write_text("{}")
    like = {"up": {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.dtype(to))}}
    for number in (1e39, 1.0):
        save_file({"up.weight": np.full((8, 4), number)}, tmp_path / "model.safetensors")
        if number == 1:
            assert (load(tmp_path, like=like, mapping=PLAIN)["up"]["kernel"] == 1).all()
        else:
            with pytest.raises(
                ValueError, match="expected numbers up to 3.40282e.38, float32's largest, in up.weight"
            ):
                load(tmp_path, like=like, mapping=PLAIN)


@pytest.mark.parametrize("number", [65519, 65520, 1e6, -1e6, np.inf, np.nan])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_numbers_that_overflow_in_float16(tmp_path, number, is_stacked):
    """65519 is rounded to 65504, and 65520 would be to infinity; what is no number in the folder stays."""
    (tmp_path / "config.json").write_text("{}")
    weight = np.full((8, 4), number, np.float32)
    save_file(
        {"h.0.up.weight": weight, "h.1.up.weight": np.ones_like(weight)}, tmp_path / "model.safetensors"
    )
    ups = [{"up": {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.float16)}}] * 2
    like, mapping = {"h": dict(zip("01", ups, strict=True))}, PLAIN
    if is_stacked:
        like, mapping = (
            {"h": {"up": {"kernel": jax.ShapeDtypeStruct((2, 4, 8), jnp.float16)}}},
            PLAIN.stacked("h"),
        )
    if np.isfinite(number) and abs(number) >= 65520:
        says = (
            r"`folder`: expected numbers up to 65504, float16's largest, in h.0.up.weight; got a larger one"
        )
        with pytest.raises(ValueError, match=says):
            load(tmp_path, like=like, mapping=mapping)
        return
    got = jax.tree.leaves(load(tmp_path, like=like, mapping=mapping))[0]
    want = 65504 if number == 65519 else number
    assert np.array_equal(got.reshape(-1)[:32], np.full(32, want), equal_nan=True)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_nnx(tmp_path):
    model, other = (fp8jax.transform(Net(nnx.Rngs(seed)), "O3") for seed in (0, 1))
    save(tmp_path / "out", model, mapping=PLAIN, format="fp8", config={})
    nnx.update(other, load(tmp_path / "out", like=nnx.state(other, nnx.Param), mapping=PLAIN))
    assert_same(nnx.state(other, nnx.Param), nnx.state(model, nnx.Param))
    x = jax.random.normal(jax.random.key(0), (8, 128))
    assert (other(x) == model(x)).all()


@pytest.mark.parametrize(
    "preset, format, blocks",
    [
        ("FP8", "float-quantized", (1, 1)),
        ("FP8_DYNAMIC", "float-quantized", (192, 1)),
        ("FP8_BLOCK", "float-quantized", (2, 2)),
        ("MXFP8", "mxfp8-quantized", (192, 8)),
        ("NVFP4A16", "nvfp4-pack-quantized", (192, 16)),
    ],
)
def test_folders_of_compressed_tensors(tmp_path, preset, format, blocks):
    """A kernel that the library compressed by its own rounding, on scales that are not powers of two."""
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from safetensors.torch import save_file

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = format
    weight = torch.randn(192, 256, generator=torch.Generator().manual_seed(3))
    padded = torch.zeros(256, 256)
    padded[:192] = weight
    rows = 256 if blocks[0] == 2 else 192
    cut = padded[:rows].reshape(blocks[0], rows // blocks[0], blocks[1], 256 // blocks[1])
    amax = cut.abs().amax((1, 3))
    scale = {"MXFP8": 2.0 ** torch.ceil(torch.log2(amax / 448))}.get(preset, amax / 448)
    parts = {"weight": weight, "weight_scale": scale.reshape(-1) if blocks == (1, 1) else scale}
    if preset == "NVFP4A16":
        whole = 448 * 6 / weight.abs().max()
        parts |= {"weight_global_scale": whole.reshape(1)}
        parts["weight_scale"] = (amax / 6 * whole).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(format)
    compressed = compressor.compress(parts, scheme)
    want = compressor.decompress(dict(compressed), scheme)["weight"].float().numpy()
    folder = tmp_path / "out"
    folder.mkdir()
    save_file(
        {f"up.{name}": tensor.contiguous() for name, tensor in compressed.items()},
        folder / "model.safetensors",
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, quantization_status="compressed"
    )
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": json.loads(config.model_dump_json())})
    )
    like = {"params": {"up": {"kernel": jax.ShapeDtypeStruct((256, 192), jnp.float32)}}}
    got = load(folder, like=like, mapping=PLAIN)["params"]["up"]["kernel"]
    # The library's FP4 is bfloat16, and its scales of MXFP8 are.
    np.testing.assert_allclose(got.T, want, rtol=2**-7 if "FP8" not in preset else 1e-6)
    assert abs(got.T - weight.numpy()).max() < 0.75
