"""Broken folders: one line that says what was expected and what was found. Nothing is executed or written."""

import json
import os
import re
import shutil
import struct
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import fp8jax
from fp8jax import extras
from fp8jax.checkpoints import NameMap, Rename, load, save
from fp8jax.formats import E4M3
from fp8jax.quantization import ScaledArray

MAPPING = NameMap((Rename(r"(.*)\.weight", r"\1/kernel", axes=(1, 0)), Rename(r"(.*)\.bias", r"\1/bias")))
SIZES = {"up": (256, 384), "down": (384, 128)}
KERNELS = {name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in SIZES.items()}
E4M3_KERNEL = ScaledArray(
    jax.ShapeDtypeStruct(SIZES["up"], E4M3.dtype), jax.ShapeDtypeStruct((), jnp.float32)
)
INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An FP8 folder of two files."""
    x = jnp.ones((8, 256))
    model = fp8jax.transform(lambda params, x: x @ params["up"]["kernel"] @ params["down"]["kernel"], "O3")
    params = {name: {"kernel": jax.random.normal(jax.random.key(0), shape)} for name, shape in SIZES.items()}
    folder = tmp_path_factory.mktemp("whole") / "out"
    variables = model.init(params, x)
    save(folder, model, variables, x, mapping=MAPPING, format="fp8", config={}, max_shard_bytes=99_000)
    assert sorted(os.listdir(folder)) == ["config.json", FIRST, FIRST.replace("00001", "00002", 1), INDEX]
    return folder


def config(**changes):
    """Changes `quantization_config`."""

    def change(folder):
        found = json.loads((folder / "config.json").read_text())
        found["quantization_config"] |= changes
        (folder / "config.json").write_text(json.dumps(found))

    return change


def text(file, new):
    return lambda folder: (folder / file).write_text(new)


def replaced(file, old, new):
    """Replaces bytes by as many others."""

    def change(folder):
        data = (folder / file).read_bytes()
        assert old in data and len(old) == len(new)
        (folder / file).write_bytes(data.replace(old, new, 1))

    return change


def indexed(name, file):
    """Changes the file of a name in the index."""

    def change(folder):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def tensors(**new):
    """One file with these tensors in the place of all, beside those of a right folder."""

    def change(folder):
        for file in folder.glob("model*"):
            file.unlink()
        right = {}
        for name, (rows, columns) in SIZES.items():
            right[f"{name}.weight"] = np.zeros((columns, rows), E4M3.dtype)
            right[f"{name}.weight_scale_inv"] = np.ones((columns // 128, rows // 128), np.float32)
        named = {name.replace("__", "."): array for name, array in new.items()}
        all_of = {name: array for name, array in {**right, **named}.items() if array is not None}
        save_file(all_of, folder / "model.safetensors")

    return change


def packed(of_tensor):
    """NVFP4 weights with these scales of a tensor."""
    weights = {"type": "float", "strategy": "tensor_group", "group_size": 16}
    new = {"weight": None, "weight_scale_inv": None, "weight_packed": np.zeros((384, 128), np.uint8)}
    new |= {"weight_scale": np.ones((384, 16), E4M3.dtype), "weight_global_scale": np.float32(of_tensor)}
    return both(
        config(quant_method="compressed-tensors", config_groups={"g": {"weights": weights}}),
        tensors(
            down__weight=np.zeros((128, 384), np.float32),
            down__weight_scale_inv=None,
            **{f"up__{end}": x for end, x in new.items()},
        ),
    )


def header(change_header):
    """Changes the header of the first file, and its length."""

    def change(folder):
        data = (folder / FIRST).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        new = change_header(data[8 : 8 + size])
        (folder / FIRST).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return change


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def linked(folder):
    (folder.parent / "secret.safetensors").write_bytes((folder / FIRST).read_bytes())
    indexed("down.weight", "../secret.safetensors")(folder)


def copied(folder):
    """The first file again under another name, which the index names."""
    shutil.copy(folder / FIRST, folder / "more.safetensors")
    indexed("other.weight", "more.safetensors")(folder)


BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "expected config.json in .*no such file"),
    "config no JSON": (text("config.json", "{"), "expected JSON in config.json"),
    "config a list": (text("config.json", "[]"), "expected a JSON object in config.json; got list"),
    "config too deep": (text("config.json", "[" * 100_000), "expected JSON in config.json"),
    "config twice": (text("config.json", '{"a": 1, "a": 2}'), "JSON in config.json; got 'a' twice"),
    "config binary": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "expected JSON in config.json",
    ),
    "unknown method": (config(quant_method="awq"), "expected `quant_method` fp8 .*; got 'awq'"),
    "no method": (config(quant_method=None), "expected `quant_method` fp8 .*; got 'None'"),
    "unknown fmt": (config(fmt="e5m2"), "expected `quant_method` fp8"),
    "odd blocks": (config(weight_block_size=[128]), "got 'a fp8 config of another form'"),
    "zero blocks": (config(weight_block_size=[0, 128]), r"scales of shape \[1, 2\] for"),
    "infinite blocks": (config(weight_block_size=[np.inf, 128]), "got 'a fp8 config of another form'"),
    "huge blocks": (config(weight_block_size=[2**63, 2**63]), "got 'a fp8 config of another form'"),
    "blocks of a fraction": (config(weight_block_size=[128.9, 128]), "got 'a fp8 config of another form'"),
    "config a pipe": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
        "expected JSON in config.json; got no file",
    ),
    "other blocks": (config(weight_block_size=[64, 64]), r"scales of shape .*, as config.json says; got \["),
    "integers": (
        config(quant_method="compressed-tensors", config_groups={"g": {"weights": {"type": "int"}}}),
        "got 'a compressed-tensors config of another form'",
    ),
    "rotated weights": (
        config(quant_method="compressed-tensors", transform_config={"config_groups": {}}),
        "got 'compressed-tensors with a transform_config'",
    ),
    "other torchao": (
        config(quant_method="torchao", quant_type={"default": {"_type": "Int4WeightOnlyConfig"}}),
        r"torchao \(Float8\) .*; got 'torchao Int4WeightOnlyConfig'",
    ),
    "old torchao": (
        config(quant_method="torchao", quant_type="int8"),
        "got 'a torchao config of another form'",
    ),
    "no groups": (
        config(quant_method="compressed-tensors"),
        "got 'a compressed-tensors config of another form'",
    ),
    "empty groups": (
        config(quant_method="compressed-tensors", config_groups={}),
        "got 'compressed-tensors without config_groups'",
    ),
    "no quantization_config": (
        text("config.json", "{}"),
        "scales and a `quantization_config`, for down.weight",
    ),
    "no files": (both(lambda f: (f / INDEX).unlink()), "expected model.safetensors in"),
    "missing shard": (lambda folder: (folder / FIRST).unlink(), f"expected {FIRST} in .*; got no such file"),
    "index no JSON": (text(INDEX, "?"), f"expected JSON in {INDEX}"),
    "empty index": (text(INDEX, "{}"), "expected a `weight_map`"),
    "index of numbers": (
        text(INDEX, '{"weight_map": {"a": 1}}'),
        "names of safetensors files .*; got 1 for 'a'",
    ),
    "path traversal": (linked, "of the folder in .*; got '../secret.safetensors' for 'down.weight'"),
    "absolute path": (indexed("down.weight", "/etc/passwd"), "got '/etc/passwd' for 'down.weight'"),
    "long file": (indexed("down.weight", "a" * 300 + ".safetensors"), "files of the folder in .*; got 'aaa"),
    "a pickle": (indexed("down.weight", "model.bin"), "names of safetensors files"),
    "name not in its file": (indexed("up.bias", FIRST), f"expected up.bias in {FIRST}, as .* says"),
    "duplicate names": (copied, r"expected down.weight\w* in one file; got it in .* and more.safetensors"),
    "truncated file": (
        lambda folder: os.truncate(folder / FIRST, 5000),
        f"a safetensors file in {FIRST}; got ",
    ),
    "truncated header": (
        lambda folder: os.truncate(folder / FIRST, 20),
        f"a safetensors file in {FIRST}; got ",
    ),
    "empty file": (lambda folder: os.truncate(folder / FIRST, 0), f"a safetensors file in {FIRST}; got "),
    "huge header": (
        lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 2**40) + b"{}"),
        f"a safetensors file in {FIRST}; got ",
    ),
    "flipped header": (replaced(FIRST, b'"data_offsets"', b'"data_offsetz"'), "a safetensors file in"),
    "flipped dtype": (replaced(FIRST, b"F8_E4M3", b"F8_E9M3"), "a safetensors file in"),
    "other dtype": (replaced(FIRST, b"F8_E4M3", b"F8_E5M2"), "expected a dtype of .*; got F8_E5M2"),
    "flipped shape": (replaced(FIRST, b"[128,384]", b"[128,389]"), "a safetensors file in"),
    "header twice": (
        header(lambda h: h.rstrip()[:-1] + b"," + h.strip()[1:]),
        "a safetensors file in .*; got ",
    ),
    "header a list": (header(lambda h: b"[]"), "a safetensors file in"),
    "wrong scale shape": (
        tensors(up__weight_scale_inv=np.ones((3, 3), np.float32)),
        r"shape \[3, 2\] for up.weight",
    ),
    "scale of a vector": (tensors(up__weight_scale_inv=np.ones(6, np.float32)), r"got \[6\]"),
    "no scale": (tensors(up__weight_scale_inv=None), "for up.weight; got float8_e4m3fn.*, no scale"),
    "NaN scale": (
        tensors(up__weight_scale_inv=np.full((3, 2), np.nan, np.float32)),
        "expected finite, positive scales for up.weight",
    ),
    "scale too large": (
        tensors(up__weight_scale_inv=np.full((3, 2), 3e38, np.float32)),
        "expected finite, positive scales for up.weight, and finite values",
    ),
    "scale too large for float32": (
        tensors(up__weight_scale_inv=np.full((3, 2), 1e300)),
        "expected finite, positive scales for up.weight",
    ),
    "two scales": (
        tensors(up__weight_scale=np.ones((3, 2), np.float32)),
        "for up.weight; got float8_e4m3fn.*, .weight_scale_inv, .weight_scale. Copy",
    ),
    "zero scale of a tensor": (
        packed([0]),
        "expected finite, positive scales for up.weight, and finite values",
    ),
    "two scales of a tensor": (packed([1, 1]), "for up.weight; got uint8"),
    "scale without codes": (tensors(up__weight=None), "got none for up.weight_scale_inv"),
    "codes of a vector": (
        tensors(up__weight=np.zeros(256, E4M3.dtype)),
        "codes of a matrix",
    ),
    "packed without scale": (tensors(up__weight_packed=np.zeros((384, 128), np.uint8)), "codes of a matrix"),
    "wrong shape": (
        tensors(
            up__weight=np.zeros((256, 384), E4M3.dtype), up__weight_scale_inv=np.ones((2, 3), np.float32)
        ),
        r"expected shape \[256, 384\] for params/up/kernel; got \[384, 256\] in up.weight. Check `axes`",
    ),
    "wrong size": (
        tensors(
            up__weight=np.zeros((384, 128), E4M3.dtype), up__weight_scale_inv=np.ones((3, 1), np.float32)
        ),
        r"expected shape \[256, 384\] for params/up/kernel; got \[128, 384\] in up.weight. Build the model",
    ),
    "too many dims": (tensors(more=np.zeros((1,) * 64, np.float32)), "got none for more. Check"),
    "scalar": (
        tensors(up__weight=np.zeros((), np.float32), up__weight_scale_inv=None),
        r"got \[\] in up.weight",
    ),
    "name of two lines": (
        tensors(**{"a\nb": np.zeros(3, np.float32)}),
        r"printable characters in .*; got 'a\\nb'",
    ),
    "long name": (tensors(**{"9" * 5000: np.zeros(3, np.float32)}), "at most 200 printable characters"),
    "unknown name": (tensors(gate__weight=np.zeros((3, 3), np.float32)), "got none for gate.weight. Check"),
    "name without a rename": (tensors(gate=np.zeros(3, np.float32)), "got none for gate. Check"),
    "missing name": (
        tensors(up__weight=None, up__weight_scale_inv=None),
        "a tensor for each parameter of `like`; got none for params/up/kernel. Check",
    ),
}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change, says", BROKEN.values(), ids=BROKEN)
def test_broken_folder(whole, tmp_path, change, says):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    change(folder)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"^`folder`: .*{says}") as caught:
        load(folder, like={"params": KERNELS}, mapping=MAPPING)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and message.endswith(".") and "; got" in message
    assert contents(tmp_path) == before


def test_a_folder_that_is_not_broken(whole):
    """The changes above are needed for the errors."""
    assert load(whole, like={"params": KERNELS}, mapping=MAPPING)["params"]["up"]["kernel"].shape == (
        256,
        384,
    )


def test_what_the_mapping_leaves_out_may_have_any_dtype(whole, tmp_path):
    """As masks of old GPT-2 checkpoints, and tables of positions."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    more = {"mask": np.ones((1, 4), bool), "old_mask": np.ones((1, 4), np.uint8), "positions": np.arange(4)}
    tensors(**more)(folder)
    with pytest.raises(ValueError, match="a dtype of F64.* for (mask|positions); got (BOOL|I64), which"):
        load(folder, like={"params": KERNELS}, mapping=MAPPING)
    mapping = NameMap((*MAPPING.renames, Rename("mask|old_mask|positions", None)))
    got = load(folder, like={"params": KERNELS}, mapping=mapping)["params"]
    assert all((got[name]["kernel"] == jnp.zeros(SIZES[name])).all() for name in SIZES)


def test_without_safetensors_the_error_names_the_extra(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=f"^not installed: safetensors; {re.escape(extras.install('serving'))}$"
    ):
        load(whole, like={"params": KERNELS}, mapping=MAPPING)


def test_two_tensors_of_one_parameter(whole):
    everything = NameMap((Rename(r".*\.weight", "up/kernel", axes=(1, 0)),))
    with pytest.raises(ValueError, match="one tensor for up/kernel; got down.weight and up.weight"):
        load(whole, like={"params": {"up": KERNELS["up"]}}, mapping=everything)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_infinity_that_would_be_quantized(whole, tmp_path, number):
    """An amax that is not finite gives scale 1, which rounds small weights away."""
    weight = np.full((384, 256), 0.01, np.float32)
    weight[3, 5] = number
    shutil.copytree(whole, tmp_path / "model")
    tensors(up__weight=weight, up__weight_scale_inv=None)(tmp_path / "model")
    plain = load(tmp_path / "model", like={"params": KERNELS}, mapping=MAPPING)["params"]["up"]["kernel"]
    assert np.array_equal(plain, weight.T, equal_nan=True)
    with pytest.raises(ValueError, match=r"finite numbers in up.weight, which is quantized; got an infinity"):
        load(tmp_path / "model", like={"params": KERNELS | {"up": {"kernel": E4M3_KERNEL}}}, mapping=MAPPING)


@pytest.mark.parametrize("scale", [0, 1e-40])
def test_scales_that_are_no_scales(whole, tmp_path, scale):
    """A zero or subnormal scale is replaced, since its reciprocal is infinite."""
    shutil.copytree(whole, tmp_path / "model")
    new = np.full((3, 2), scale, np.float32)
    tensors(up__weight=np.ones((384, 256), E4M3.dtype), up__weight_scale_inv=new)(tmp_path / "model")
    like = {"params": KERNELS | {"up": {"kernel": E4M3_KERNEL}}}
    kernel = load(tmp_path / "model", like=like, mapping=MAPPING)["params"]["up"]["kernel"]
    assert kernel.scale == 1 and not kernel.dequantize().any()


@pytest.mark.parametrize(
    "change, says",
    [
        ({"like": None}, "`like`: expected a tree of arrays, .*; got None"),
        ({"like": {}}, "`like`: expected a tree of arrays, .*; got {}"),
        (
            {"like": fp8jax.transform(nn.Dense(8), "te")},
            "`like`: expected a tree of arrays, .*; got LinenModel",
        ),
        ({"mapping": None}, "`mapping`: expected gpt2, llama, .*; got None"),
        ({"mapping": "llama2"}, "`mapping`: expected gpt2, llama, .*; got 'llama2'"),
    ],
)
def test_arguments_of_another_kind(whole, change, says):
    with pytest.raises(ValueError, match=says):
        load(**{"folder": whole, "like": {"params": KERNELS}, "mapping": MAPPING, **change})


def test_like_has_states(whole):
    like = {"params": KERNELS, "other": {"scale": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    with pytest.raises(
        ValueError, match="`like`: expected shapes in the place of parameters only; got one for other"
    ):
        load(whole, like=like, mapping=MAPPING)
