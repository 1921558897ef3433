"""Between torch and Flax: the same bits under other names, both ways, or an error that says what differs."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax import formats
from fp8jax.quantization import is_scaled

torch = pytest.importorskip("torch", reason="the bridge needs torch")

import fp8jax_torch  # noqa: E402
from fp8jax_torch import ScaledTensor  # noqa: E402
from fp8jax_torch.bridge import (  # noqa: E402
    GPT2,
    LLAMA,
    NameMap,
    Place,
    Rename,
    from_flax,
    mapping_of,
    optimizer_from_flax,
    optimizer_to_flax,
    to_flax,
)
from fp8jax_torch.bridge.arrays import to_jax, to_torch  # noqa: E402
from fp8jax_torch.optim.entries import entries_of, entry_of  # noqa: E402

WIDTH, OUT = 32, 48
HIDDEN = 2 * WIDTH
TOKENS = jnp.zeros((1, 2), int)
RECIPES = ["O1", "O2", "O3", "te", "O3, interval=4"]


class Twin(torch.nn.Module):
    """An embedding, a norm, two blocks and a last."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(WIDTH, HIDDEN)}) for _ in "ab"
        )
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.last = torch.nn.Linear(HIDDEN, OUT, bias=False)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(HIDDEN, name="up")(x)[..., :WIDTH], None


class Scanned(nn.Module):
    """The same, its blocks under a scan."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, WIDTH, name="embed")(tokens)
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="blocks")(x, None)
        x = nn.LayerNorm(name="norm")(jnp.concatenate([x, x], -1))
        return nn.Dense(OUT, use_bias=False, name="last")(x)


class Blocks(nn.Module):
    """A container, as torch's ModuleList."""

    @nn.compact
    def __call__(self, x):
        for name in "01":
            x, _ = Block(name=name)(x)
        return x


class Unrolled(nn.Module):
    """The same without a scan."""

    @nn.compact
    def __call__(self, tokens):
        x = Blocks(name="blocks")(nn.Embed(7, WIDTH, name="embed")(tokens))
        x = nn.LayerNorm(name="norm")(jnp.concatenate([x, x], -1))
        return nn.Dense(OUT, use_bias=False, name="last")(x)


MODELS = {"unrolled": Unrolled(), "scanned": Scanned()}
PLAIN = mapping_of(Twin())
MAPPINGS = {"unrolled": PLAIN, "scanned": PLAIN.stacked("blocks")}


def variables_of(model, recipe):
    """Zeros, which are made without running the model."""
    return zeros(fp8jax.transform(model, recipe).init, jax.random.key(0), TOKENS)


def zeros(init, *args):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(init, *args))


def noise(shape, dtype, seed=0):
    """Any bits at all, NaNs and subnormals among them."""
    dtype = jnp.dtype(dtype)
    bits = np.random.default_rng(seed).integers(0, 2 ** (8 * dtype.itemsize), shape, f"u{dtype.itemsize}")
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def scrambled(tree):
    """The same tree with other bits in every float array, scales among them; `one` is 1."""
    leaves, treedef = jax.tree.flatten_with_path(tree)
    new = []
    for i, (path, x) in enumerate(leaves):
        is_one = re.search(r"\bone\b|__fp8_one\b", jax.tree_util.keystr(path))
        is_float = jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.uint32
        new.append(jnp.ones_like(x) if is_one else jnp.asarray(noise(x.shape, x.dtype, i)) if is_float else x)
    return jax.tree.unflatten(treedef, new)


def transformed(recipe):
    """The torch twin with scaled weights and scaling state where a transformed model has them."""
    recipe = fp8jax.Recipe.parse(recipe)
    model = Twin()
    for module in [*model.modules()]:
        if isinstance(module, torch.nn.Linear):
            if recipe.weight != "FP32":
                weight = fp8jax_torch.quantize(module.weight, formats.get(recipe.weight), power_of_two=True)
                module.weight = torch.nn.Parameter(weight)
            module.fp8 = torch.nn.Module()
            module.fp8.register_buffer("scale", torch.ones(3))
            module.fp8.register_buffer("amax_history", torch.zeros(3, recipe.amax_history_len))
            if recipe.interval > 1:
                module.fp8.register_buffer("step", torch.zeros(()))
    return model


def bits(x):
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert bits(one) == bits(other)


def torch_bits(x):
    parts = [x.codes, x.scale] if isinstance(x, ScaledTensor) else [x]
    return [(p.dtype, p.shape, p.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for p in parts]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", MODELS)
def test_round_trip_of_any_bits(layout, recipe):
    like, model = variables_of(MODELS[layout], recipe), transformed(recipe)
    variables = scrambled(like)
    kernels = [leaf for leaf in jax.tree.leaves(variables, is_leaf=is_scaled) if is_scaled(leaf)]
    assert len(kernels) == {"te": 0}.get(recipe, {"unrolled": 3, "scanned": 2}[layout])
    state_dict = from_flax(variables, MAPPINGS[layout], model.state_dict())
    model.load_state_dict(state_dict)
    for name, tensor in model.state_dict().items():
        assert torch_bits(tensor) == torch_bits(state_dict[name]), name
    again = to_flax(model.state_dict(), MAPPINGS[layout], like=variables)
    assert_same(again, variables)


@pytest.mark.parametrize("share", [False, True])
def test_kernel_is_the_transpose(share):
    model = transformed("O3")
    [variables, like] = [
        to_flax(model.state_dict(), PLAIN, like=like, share=share)
        for like in (None, variables_of(Unrolled(), "O3"))
    ]
    for tree in (variables, like):
        kernel, weight = tree["params"]["last"]["kernel"], model.last.weight
        assert bits(kernel.data) == bits(
            weight.codes.detach().view(torch.uint8).numpy().T.view(kernel.data.dtype)
        )
        assert kernel.scale.shape == (1, 1) and float(kernel.scale[0, 0]) == weight.scale.item()
        state = tree["_overwrite_with_gradient"]["blocks"]["1"]["up"]["kernel"]
        assert bits(state["amax_history"]) == bits(np.zeros((3, 16), np.float32))
    assert "one" not in variables["_overwrite_with_gradient"]["last"]["kernel"]
    assert "one" in like["_overwrite_with_gradient"]["last"]["kernel"]
    assert like["params"]["embed"]["embedding"].shape == (7, WIDTH)
    assert like["params"]["norm"]["scale"].shape == (HIDDEN,)


def test_shared_memory():
    model = Twin()
    state_dict = model.state_dict()
    address = state_dict["embed.weight"].data_ptr()

    def pointer(tree):
        return tree["params"]["embed"]["embedding"].unsafe_buffer_pointer()

    assert address % 64 == 0  # else dlpack copies
    assert pointer(to_flax(state_dict, PLAIN, share=True)) == address
    own = to_flax(state_dict, PLAIN)
    before = jax.tree.map(bits, own)
    with torch.no_grad():
        for tensor in state_dict.values():
            tensor.zero_()
    assert jax.tree.map(bits, own) == before
    shared = from_flax(own, PLAIN, state_dict, share=True)
    assert shared["embed.weight"].data_ptr() == pointer(own)
    copied = from_flax(own, PLAIN, state_dict)
    for tensor in copied.values():
        assert tensor.is_contiguous()
        tensor.zero_()
    assert jax.tree.map(bits, own) == before


@pytest.mark.parametrize("format", ["E4M3", "E5M2", "FP16", "BF16", "FP32"])
@pytest.mark.parametrize("shape", [(2, 8), (), (0, 3)], ids=str)
def test_bits_cross_without_shared_memory(monkeypatch, format, shape):
    array = jnp.asarray(noise(shape, formats.get(format).dtype))
    tensor = to_torch(array, torch.device("cpu"))
    assert torch_bits(tensor)[0][2] == list(np.asarray(array).tobytes())
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert bits(to_jax(tensor)) == bits(array)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spread = jax.device_put(array, jax.NamedSharding(mesh, jax.P("i") if shape else jax.P()))
    assert torch_bits(to_torch(spread, tensor.device)) == torch_bits(tensor)


def test_leaves_get_the_templates_sharding():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")

    def placed(leaf):
        return jax.device_put(
            leaf, jax.NamedSharding(mesh, jax.P("i" if leaf.shape[:1] == (WIDTH,) else None))
        )

    boxed = nn.with_partitioning(nn.initializers.ones, (None, "i"))
    model = fp8jax.transform(nn.Dense(HIDDEN, kernel_init=boxed), "O3")
    like = jax.tree.map(
        lambda leaf: placed(leaf) if leaf.ndim else leaf,
        zeros(model.init, jax.random.key(0), jnp.ones((1, WIDTH))),
    )
    layer = transformed("O3").blocks[0]["up"]
    got = to_flax(layer.state_dict(), mapping_of(layer), like=like)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    assert [leaf.sharding for leaf in jax.tree.leaves(got)] == [
        leaf.sharding for leaf in jax.tree.leaves(like)
    ]
    back = from_flax(got, mapping_of(layer), layer.state_dict())
    for name, tensor in layer.state_dict().items():
        assert torch_bits(back[name]) == torch_bits(tensor), name


def test_template_of_shapes():
    model = fp8jax.transform(Scanned(), "O2")
    like = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    state_dict = transformed("O2").state_dict()
    got = to_flax(state_dict, MAPPINGS["scanned"], like=like)
    want = to_flax(state_dict, MAPPINGS["scanned"], like=variables_of(Scanned(), "O2"))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert bits(a) == bits(b)


# What does not fit.


def with_changes(state_dict, **changes):
    new = {**state_dict, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    return {name: tensor for name, tensor in new.items() if tensor is not None}


@pytest.mark.parametrize(
    "recipe, changes, says",
    [
        ("O2", {"norm__bias": None}, f"only in Flax: params/norm/bias, float32[{HIDDEN}]"),
        (
            "O2",
            {"last__fp8__scale": None},
            "only in Flax: _overwrite_with_gradient/last/kernel/scale, float32[3]",
        ),
        ("O2", {"blocks__1__up__bias": None}, f"only in Flax: params/blocks/up/bias[1], float32[{HIDDEN}]"),
        ("O2", {"last__bias": torch.zeros(OUT)}, "no rename fits: last.bias"),
        ("O2", {"blocks__2__up__bias": torch.zeros(HIDDEN)}, "no rename fits: blocks.2.up.bias"),
        (
            "O2",
            {"norm__bias": torch.zeros(HIDDEN + 1)},
            f"different: torch's norm.bias would be params/norm/bias, float32[{HIDDEN + 1}]; "
            f"Flax has float32[{HIDDEN}]",
        ),
        (
            "O3",
            {},
            f"different: torch's last.weight would be params/last/kernel, float16[{HIDDEN}, {OUT}] codes on "
            f"a scale; Flax has float8_e4m3fn[{HIDDEN}, {OUT}] codes on a scale",
        ),
        ("te", {}, f"Flax has float32[{HIDDEN}, {OUT}]"),
        ("O2", {"last__weight": torch.zeros(3)}, "but shape [3] does not take axes=(1, 0)"),
        ("O2, amax_history_len=4", {}, "float32[3, 16]; Flax has float32[3, 4]"),
    ],
)
def test_error_names_differences(recipe, changes, says):
    like = variables_of(Scanned(), recipe)
    state_dict = with_changes(transformed("O2").state_dict(), **changes)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        to_flax(state_dict, MAPPINGS["scanned"], like=like)
    assert "by one recipe" in str(error.value) and "`mapping`" in str(error.value)
    with pytest.raises(ValueError, match=re.escape(says)):
        from_flax(like, MAPPINGS["scanned"], state_dict)


def test_error_lists_all_differences():
    with pytest.raises(ValueError, match="and 3 more") as error:
        to_flax(
            with_changes(transformed("O2, interval=4").state_dict(), x=torch.ones(1)),
            PLAIN,
            like=variables_of(Scanned(), "te"),
        )
    lines = str(error.value).splitlines()[1:-1]
    assert [sum(kind in line for line in lines) for kind in ("in torch", "in Flax", "different", "fits")] == [
        9,
        4,
        2,
        1,
    ]
    with pytest.raises(ValueError, match="are both params/w"):
        to_flax({"a": torch.ones(1), "b": torch.ones(1)}, NameMap((Rename(".", "w"),)))
    with pytest.raises(ValueError, match=r"only in Flax: params/w\[0\]"):
        to_flax({"w1": torch.ones(1)}, NameMap((Rename(r"w(\d)", r"w/[\1]"),)))


# Maps.


@pytest.mark.parametrize(
    "mapping, name, place",
    [
        (GPT2, "transformer.wte.weight", Place(("transformer", "wte", "embedding"))),
        (GPT2, "wpe.weight", Place(("wpe", "embedding"))),
        (GPT2, "h.0.attn.c_attn.weight", Place(("h", "0", "attn", "c_attn", "kernel"))),
        (GPT2, "h.0.attn.c_attn.bias", Place(("h", "0", "attn", "c_attn", "bias"))),
        (GPT2, "h.0.attn.bias", None),
        (GPT2, "transformer.ln_f.weight", Place(("transformer", "ln_f", "scale"))),
        (GPT2, "lm_head.weight", Place(("lm_head", "kernel"), axes=(1, 0))),
        (GPT2.stacked("h"), "transformer.h.11.ln_1.bias", Place(("transformer", "h", "ln_1", "bias"), (11,))),
        (GPT2.moved("^transformer/", ""), "transformer.h.1.ln_1.bias", Place(("h", "1", "ln_1", "bias"))),
        (
            LLAMA,
            "model.layers.2.self_attn.o_proj.weight",
            Place(("model", "layers", "2", "self_attn", "o_proj", "kernel"), axes=(1, 0)),
        ),
        (
            LLAMA,
            "model.layers.0.input_layernorm.weight",
            Place(("model", "layers", "0", "input_layernorm", "scale")),
        ),
        (LLAMA, "model.norm.weight", Place(("model", "norm", "scale"))),
        (
            LLAMA,
            "model.layers.0.self_attn.q_norm.weight",
            Place(("model", "layers", "0", "self_attn", "q_norm", "scale")),
        ),
        (
            LLAMA.stacked("layers"),
            "layers.3.mlp.up_proj.weight",
            Place(("layers", "mlp", "up_proj", "kernel"), (3,), (1, 0)),
        ),
    ],
)
def test_places(mapping, name, place):
    assert mapping.place(name) == place


def test_name_map_is_a_checked_value():
    special = NameMap((Rename("lm_head.weight", "last/w"),)) + GPT2
    assert special.place("lm_head.weight") == Place(("last", "w"))
    assert special == NameMap((Rename("lm_head.weight", "last/w"),)) + GPT2 and hash(special)
    for arguments, says in [
        (("(", "a"), "`torch`"),
        (("a", "a", (0, 2)), "`axes`"),
        (("a", "a", None, (-1, -1)), "`shape`"),
    ]:
        with pytest.raises(ValueError, match=says):
            Rename(*arguments)
    with pytest.raises(ValueError, match="MultiheadAttention does, here 'a'"):
        mapping_of(torch.nn.ModuleDict({"a": torch.nn.MultiheadAttention(4, 2)}))


class Attends(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(x)


def test_attention_heads():
    empty = zeros(fp8jax.transform(Attends(), "O3").init, jax.random.key(0), jnp.ones((1, 2, WIDTH)))
    like = scrambled(empty)
    mapping = NameMap(
        (
            Rename(r"(query|key|value)\.weight", r"attn/\1/kernel", (1, 0), (-1, 2, WIDTH // 2)),
            Rename(r"(query|key|value)\.bias", r"attn/\1/bias", shape=(2, WIDTH // 2)),
            Rename(r"out\.weight", "attn/out/kernel", (1, 0), (2, WIDTH // 2, -1)),
            Rename(r"out\.bias", "attn/out/bias"),
        )
    )
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    )
    state_dict = {}
    for name, layer in model.items():
        state_dict[f"{name}.weight"] = fp8jax_torch.quantize(layer.weight, formats.E4M3)
        state_dict[f"{name}.bias"] = layer.bias.detach()
        state_dict[f"{name}.fp8.scale"] = torch.ones(3)
        state_dict[f"{name}.fp8.amax_history"] = torch.ones(3, 16)
    got = from_flax(like, mapping, state_dict)
    assert_same(to_flax(got, mapping, like=like), like)
    kernel = to_flax(state_dict, mapping, like=empty)["params"]["attn"]["query"]["kernel"]
    want = state_dict["query.weight"].codes.view(torch.uint8).numpy().T.reshape(WIDTH, 2, WIDTH // 2)
    assert bits(np.asarray(kernel.data).view(np.uint8)) == bits(want)


# NNX.


class NNXTwin(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Dict(up=nnx.Linear(WIDTH, HIDDEN, rngs=rngs)) for _ in "ab"])
        self.embed = nnx.Embed(7, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, OUT, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = self.blocks[0]["up"](x) + self.blocks[1]["up"](x)
        return self.last(self.norm(x))


def test_nnx_round_trip():
    model = nnx.eval_shape(lambda: fp8jax.transform(NNXTwin(nnx.Rngs(0)), "O3"))
    state = scrambled(nnx.state(model))
    state_dict = from_flax(state, PLAIN, transformed("O3").state_dict())
    again = to_flax(state_dict, PLAIN, like=state)
    assert_same(again, state)
    nnx.update(model, again)
    assert_same(nnx.state(model), state)
    pure = nnx.to_pure_dict(state)
    assert_same(to_flax(state_dict, PLAIN, like=pure), pure)


# Hugging Face's models.


def hugging_face(kind, tied):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    if kind == "GPT2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **small)).eval()
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_key_value_heads": 1}
    sizes["num_attention_heads"] = 2
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **small)).eval()


def test_gpt2_logits_equal_in_flax(load_program):
    program = load_program("examples/gpt_model.py")
    flax = program.GPT(
        program.GPTConfig(13, layers=2, heads=2, width=8, context=16, bias=True, tied=True, remat=False)
    )
    tokens = np.random.default_rng(0).integers(0, 13, (2, 16))
    like = zeros(flax.init, jax.random.key(0), tokens)
    model = hugging_face("GPT2", tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    mapping = GPT2.stacked("h").moved("^transformer/", "")
    variables = to_flax(model.state_dict(), mapping, like=like)
    want = model(torch.from_numpy(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(jax.jit(flax.apply)(variables, tokens), want, atol=2e-5)
    other = hugging_face("GPT2", tied=True)
    other.load_state_dict(from_flax(variables, mapping, other.state_dict()))
    for name, tensor in other.state_dict().items():
        assert torch_bits(tensor) == torch_bits(model.state_dict()[name]), name


@pytest.mark.parametrize("kind, mapping", [("GPT2", GPT2), ("LLAMA", LLAMA)])
def test_maps_of_hugging_face(kind, mapping):
    model = hugging_face(kind, tied=False)
    variables = to_flax(model.state_dict(), mapping)
    leaves = jax.tree.leaves(variables)
    assert len(leaves) == len(model.state_dict())
    assert sum(leaf.size for leaf in leaves) == sum(p.numel() for p in model.parameters())
    params = variables["params"]
    if kind == "GPT2":
        assert params["transformer"]["h"]["1"]["attn"]["c_attn"]["kernel"].shape == (8, 24)
        assert params["transformer"]["h"]["0"]["ln_1"]["scale"].shape == (8,)
        assert params["transformer"]["wte"]["embedding"].shape == (13, 8)
    else:
        layer = params["model"]["layers"]["1"]
        assert layer["self_attn"]["k_proj"]["kernel"].shape == (8, 4)
        assert layer["mlp"]["down_proj"]["kernel"].shape == (12, 8)
        assert (
            layer["post_attention_layernorm"]["scale"].shape == params["model"]["norm"]["scale"].shape == (8,)
        )
        assert params["model"]["embed_tokens"]["embedding"].shape == (13, 8)
    assert params["lm_head"]["kernel"].shape == (8, 13)
    assert_same(to_flax(model.state_dict(), mapping_of(model)), variables)
    back = from_flax(variables, mapping, model.state_dict())
    assert_same(to_flax(back, mapping, like=variables), variables)


def test_tied_tensors():
    model = hugging_face("LLAMA", tied=True)
    variables = to_flax(model.state_dict(), LLAMA)
    assert "lm_head" not in variables["params"]
    back = from_flax(variables, LLAMA, model.state_dict())
    assert torch_bits(back["lm_head.weight"]) == torch_bits(back["model.embed_tokens.weight"])
    # A head that multiplies in FP8 keeps its scaling state with the embedding, as Flax's `attend` does.
    state_dict = {**model.state_dict(), "lm_head.fp8.scale": torch.ones(3)}
    scaling = to_flax(state_dict, LLAMA)["_overwrite_with_gradient"]
    assert list(scaling["model"]["embed_tokens"]["embedding"]) == ["scale"]
    untied = to_flax(hugging_face("LLAMA", tied=False).state_dict(), LLAMA)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        from_flax(untied, LLAMA, model.state_dict())


# Optimizers.


def torch_adam(model, recipe, step=3, skipped=2):
    """An optimizer as `fp8jax_torch.optim`'s leaves it, with any bits in its state."""
    recipe = fp8jax.Recipe.parse(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer.skipped = skipped

    def put(state, name, format, shape, seed):
        codes = noise(shape, format.dtype, seed)
        new = torch.from_numpy(codes.view(f"u{codes.itemsize}")).view(getattr(torch, str(codes.dtype)))
        if format.bits < 32 and name != "remainder":
            new = ScaledTensor(new, torch.tensor(2.0**seed))
        state |= entries_of(name, new)

    for seed, parameter in enumerate(model.parameters()):
        state = optimizer.state[parameter] = {"step": torch.tensor(float(step))}
        second = "exp_avg_sq_root" if recipe.rounding[2] == "root" else "exp_avg_sq"
        for name, format in zip(("exp_avg", second), map(formats.get, recipe.moments), strict=True):
            put(state, name, format, tuple(parameter.shape), seed)
        if recipe.master_weight != "-" and isinstance(parameter, ScaledTensor):
            put(state, "master", formats.get(recipe.master_weight), tuple(parameter.shape), seed)
        if recipe.rounding[1] == "kahan" and isinstance(parameter, ScaledTensor):
            put(state, "remainder", formats.E4M3, tuple(parameter.shape), seed)
    if recipe.rounding != fp8jax.Recipe.O2.rounding:
        optimizer.param_groups[0]["seed"] = 2**40 + 2**31 + 7
    return optimizer


ROUNDED = ["fp8", "O3,rounding=stochastic+kahan+root", "O2,rounding=stochastic+nearest+value"]


@pytest.mark.parametrize("recipe", ["O1", "O2", "O3", "O3, master_weight=FP32", "te", *ROUNDED])
@pytest.mark.parametrize("layout", MODELS)
def test_optimizer_round_trip(layout, recipe):
    model, variables = transformed(recipe), variables_of(MODELS[layout], recipe)
    optimizer = torch_adam(model, recipe)
    schedule = optax.scale_by_schedule(lambda step: 1.0)
    tx = optax.chain(schedule, fp8jax.optim.adamw(0.1, recipe))
    state = optimizer_to_flax(optimizer, model, MAPPINGS[layout], like=tx.init(variables))
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(variables))
    assert state[1].adam.count == 3 and state[1].skipped == 2 and state[0].count == 5
    assert state[1].adam.count.dtype == state[1].skipped.dtype == jnp.int32
    mu = state[1].adam.mu["last"]["kernel"]
    moment = entry_of(optimizer.state[model.last.weight], "exp_avg")
    codes = moment.codes if isinstance(moment, ScaledTensor) else moment
    assert (
        bits(mu.data if is_scaled(mu) else mu)[2]
        == codes.t().contiguous().view(torch.uint8).numpy().tobytes()
    )
    if recipe in ROUNDED:
        assert bits(state[1].key) == bits(np.uint32([2**8, 2**31 + 7]))
    like = torch_adam(model, recipe)
    like.param_groups[0].pop("seed", None)
    back = optimizer_from_flax(state, model, MAPPINGS[layout], like=like)
    want = optimizer.state_dict()
    assert back["skipped"] == 2 and back["param_groups"] == want["param_groups"]
    assert back["state"].keys() == want["state"].keys()
    for number, entries in want["state"].items():
        assert {k: torch_bits(v) for k, v in back["state"][number].items()} == {
            k: torch_bits(v) for k, v in entries.items()
        }


def test_stacked_norms_step_in_jax():
    model = torch.nn.ModuleDict(
        {"norms": torch.nn.ModuleList(torch.nn.LayerNorm(8, bias=False) for _ in "ab")}
    )
    params = {"norms": {"scale": jnp.zeros((2, 8))}}
    tx = fp8jax.optim.adamw(0.1, "O2")
    like, mapping = tx.init(params), mapping_of(model).stacked("norms")
    state = optimizer_to_flax(torch_adam(model, "O2"), model, mapping, like=like)
    assert like.adam.mu["norms"]["scale"].scale.shape == ()
    np.testing.assert_array_equal(state.adam.mu["norms"]["scale"].scale, [[1], [2]])
    _, new = jax.jit(tx.update)(params, jax.tree.map(jnp.ones_like, state), params)
    assert new.adam.mu["norms"]["scale"].scale.shape == (2, 1) and new.adam.count == 2
    # The other way round, layers that share a scale each have it.
    back = optimizer_from_flax(like, model, mapping, like=torch_adam(model, "O2"))
    assert [entries["exp_avg_scale"].item() for entries in back["state"].values()] == [1, 1]


@pytest.mark.parametrize("make", ["fp8_6", "muon"])
def test_moments_that_torch_does_not_have_are_refused(make):
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(32, 64)})
    params = {"up": {"kernel": jnp.zeros((32, 64)), "bias": jnp.zeros(64)}}
    tx = fp8jax.optim.muon(0.1, "fp8") if make == "muon" else fp8jax.optim.adamw(0.1, make)
    state, mapping, like = tx.init(params), mapping_of(model), torch_adam(model, "fp8")
    for change in (
        lambda: optimizer_to_flax(like, model, mapping, like=state),
        lambda: optimizer_from_flax(state, model, mapping, like=like),
    ):
        with pytest.raises(
            ValueError, match="expected moments that PyTorch has here; got adam/.*/up/.* with scales"
        ):
            change()


def test_torchs_adam_and_optaxs():
    model = Twin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    tx = optax.adamw(optax.constant_schedule(0.1))
    like = tx.init(to_flax(model.state_dict(), PLAIN)["params"])
    state = optimizer_to_flax(optimizer, model, PLAIN, like=like)
    assert [int(leaf) for leaf in jax.tree.leaves(state) if leaf.shape == ()] == [1, 1]
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    other.load_state_dict(optimizer_from_flax(state, model, PLAIN, like=other))
    for parameter in model.parameters():
        for name, tensor in optimizer.state[parameter].items():
            assert torch.equal(other.state[parameter][name], tensor), name
    # What torch then writes in place is torch's alone.
    before = jax.tree.map(bits, state)
    other.step()
    assert jax.tree.map(bits, state) == before


@pytest.mark.parametrize("recipe", ["O3", "O3,rounding=stochastic+kahan+root"])
def test_nnx_optimizers(recipe):

    def build():
        model = fp8jax.transform(NNXTwin(nnx.Rngs(0)), recipe)
        return nnx.Optimizer(model, fp8jax.optim.adamw(0.1, recipe), wrt=nnx.Param)

    optimizer = nnx.eval_shape(build)
    twin = transformed(recipe)
    source = torch_adam(twin, recipe)
    state = optimizer_to_flax(source, twin, PLAIN, like=optimizer.opt_state)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    assert state.adam.count.get_value() == 3
    back = optimizer_from_flax(state, twin, PLAIN, like=source)
    for number, entries in source.state_dict()["state"].items():
        for name, tensor in entries.items():
            assert torch_bits(back["state"][number][name]) == torch_bits(tensor)


def change_steps(optimizer):
    next(iter(optimizer.state.values()))["step"] += 1


@pytest.mark.parametrize(
    "recipe, change, says",
    [
        (
            "O2",
            lambda optimizer: optimizer.state.clear(),
            "`optimizer`: expected the state of an Adam of every",
        ),
        ("O2", change_steps, r"same number of steps.*\[3, 4\]"),
        ("O2", lambda o: next(iter(o.state.values())).update(max_exp_avg_sq=1), "amsgrad"),
        ("fp8", lambda optimizer: None, r"`optimizer` \(exp_avg\) and `like`: (.|\n)*Flax has float8_e5m2"),
        (
            "O2,rounding=stochastic+kahan+root",
            lambda optimizer: None,
            r"\(exp_avg_sq_root\) and `like`: (.|\n)*only in Flax: ",
        ),
        (
            "O2,rounding=stochastic+kahan+value",
            lambda optimizer: None,
            r"\(remainder\)(.|\n)*only in Flax: last/kernel, float8",
        ),
        (
            "O2,rounding=stochastic+nearest+value",
            lambda optimizer: optimizer.add_param_group({"params": [], "seed": 3}),
            r"groups with one seed.*\[0, 3\]",
        ),
        ("O1", lambda optimizer: None, r"`optimizer` \(exp_avg\) and `like`: (.|\n)*Flax has float32"),
        ("O3", lambda optimizer: None, r"\(master\)(.|\n)*only in Flax: last/kernel, float16"),
    ],
)
def test_optimizer_that_does_not_fit(recipe, change, says):
    model = transformed("O2")
    optimizer = torch_adam(model, "O2")
    change(optimizer)
    like = fp8jax.optim.adamw(0.1, recipe).init(variables_of(Unrolled(), recipe))
    with pytest.raises(ValueError, match=says):
        optimizer_to_flax(optimizer, model, PLAIN, like=like)


def test_refused_optimizer_states():
    model = transformed("O2")
    optimizer = torch_adam(model, "O2")
    with pytest.raises(ValueError, match="one Adam.*got 0"):
        optimizer_to_flax(optimizer, model, PLAIN, like=optax.sgd(0.1).init({"a": jnp.ones(1)}))
    with pytest.raises(ValueError, match="`model`"):
        optimizer_to_flax(optimizer, Twin(), PLAIN, like=optax.scale_by_adam().init({"a": jnp.ones(1)}))


def test_optimizer_of_plain_16_bit_parameters():
    """The remainders of bfloat16 weights go to Flax and back; a kernel's is transposed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8)).bfloat16()
    optimizer = fp8jax_torch.optim.AdamW(model.parameters(), 1e-4, recipe="fp8")
    for _ in range(3):
        model(torch.ones(4, 16, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    mapping = mapping_of(model)
    params = {"0": {"kernel": jnp.zeros((16, 8), jnp.bfloat16), "bias": jnp.zeros(8, jnp.bfloat16)}}
    like = fp8jax.optim.adamw(1e-4, "fp8").init(params)
    state = optimizer_to_flax(optimizer, model, mapping, like=like)
    own = optimizer.state[model[0].weight]
    assert own["remainder"].any()
    found = optax.tree.get(state, "remainder")
    np.testing.assert_array_equal(found["0"]["kernel"], own["remainder"].numpy().T)
    back = optimizer_from_flax(state, model, mapping, like=optimizer)
    for number, parameter in enumerate(model.parameters()):
        assert torch.equal(back["state"][number]["remainder"], optimizer.state[parameter]["remainder"])
    optimizer.load_state_dict(back)


@pytest.mark.parametrize(
    "tensor, is_held",
    [
        (torch.tensor([2**31 - 1, -(2**31)]), True),
        (torch.tensor([2**31]), False),
        (torch.tensor([0.5, float("inf"), float("nan")], dtype=torch.float64), True),
        (torch.tensor([1e300], dtype=torch.float64), False),
        (torch.tensor([0.1], dtype=torch.float64), False),
    ],
)
def test_64_bits(tensor, is_held):
    """JAX has 32 bits without `jax_enable_x64`."""
    mapping = NameMap((Rename("ids", "ids"),))
    if is_held:
        array = to_flax({"ids": tensor}, mapping)["params"]["ids"]
        np.testing.assert_array_equal(array, tensor.numpy())
    else:
        with pytest.raises(
            ValueError, match=r"`state_dict`: expected values of ids that .*32 holds; got .*64"
        ):
            to_flax({"ids": tensor}, mapping)
    with jax.enable_x64(True):
        array = to_flax({"ids": tensor}, mapping)["params"]["ids"]
        np.testing.assert_array_equal(array, tensor.numpy(), strict=True)
