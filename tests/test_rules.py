"""Rules that count blocks, and rules as text."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from fp8jax import Rule, train
from fp8jax.checkpoints.tree import named
from fp8jax.rewrite import names_of
from fp8jax.rewrite.patterns import transformer_blocks

WIDTH, BLOCKS = 32, 4
X = jnp.ones((32, WIDTH))
BF16 = "rule: gemm=BF16"


# What counts as blocks ###########################################################################

GPT = [f"h_{i}/{name}" for i in range(12) for name in ("attn/qkv_0", "attn/qkv_1", "mlp/up", "mlp/down")]
EXPERTS = [f"layers/{i}/experts/{j}" for i in range(3) for j in range(8)]
T5 = [f"{side}/block_{i}/{name}" for side in ("encoder", "decoder") for i in range(4) for name in "qkv"]


@pytest.mark.parametrize(
    "paths, first, last, blocks",
    [
        (["wte", *GPT, "Dense_0", "Dense_1"], None, 0.25, ["h_9/", "h_10/", "h_11/"]),
        (GPT, 1, 2, ["h_0/", "h_10/", "h_11/"]),
        (GPT, None, 0.15, ["h_10/", "h_11/"]),  # 1.8, rounded up
        (GPT[:40], None, 0.1, ["h_9/"]),  # 1
        (GPT[:40], 0.3, None, ["h_0/", "h_1/", "h_2/"]),  # 3, and not 3.0000000000000004
        (GPT[::-1], 1, 99, [f"h_{i}/" for i in range(12)]),
        (EXPERTS, None, 1, ["layers/2/"]),  # not the experts, of which there are more
        ([f"stage_{i}/block_{j}/w" for i in range(2) for j in range(9)], None, 1, ["stage_1/"]),
        (["0", "1", "2"], 1, None, ["0/"]),
        (["w1", "w2"], None, 1, ["w2/"]),
        (
            [path for path in T5 if path.startswith("enc")],
            None,
            0.5,
            ["encoder/block_2/", "encoder/block_3/"],
        ),
    ],
)
def test_transformer_blocks_of_a_model(paths, first, last, blocks):
    found = transformer_blocks(paths, first, last)
    assert list(found) == blocks


@pytest.mark.parametrize(
    "paths, says",
    [
        (T5, r"two series of them, encoder/block_\* and decoder/block_\*; give the path of one, as in path="),
        (["h/attn/qkv", "h/mlp/up"], "found none. If a scan stacks the blocks in one path, build the model"),
        (["fc_1", "head"], "found none"),
    ],
)
def test_without_one_series_of_blocks_it_raises(paths, says):
    with pytest.raises(ValueError, match=says):
        transformer_blocks(paths, None, 0.25)


# In a model ######################################################################################


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x))), None


class Named(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(BLOCKS):
            x, _ = Block(name=f"layers_{number}")(x)
        return nn.Dense(WIDTH, name="out")(x)


class Auto(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        for _ in range(BLOCKS):
            x, _ = Block()(x)
        return x


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Block, length=BLOCKS, variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = scan(name="h")(x, None)
        return nn.Dense(WIDTH, name="out_1")(nn.Dense(WIDTH, name="out_0")(x))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        blocks = [nnx.Sequential(*(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in "ab")) for _ in range(BLOCKS)]
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


PARAMS = {"layers": [{"in": {"w": X.T @ X}, "out": {"w": X.T @ X}} for _ in range(BLOCKS)]}


def of_params(params, x, blocks=BLOCKS):
    for layer in params["layers"][:blocks]:
        x = jax.nn.gelu(x @ layer["in"]["w"]) @ layer["out"]["w"]
    return x


def in_bf16(report):
    reasons = {row.path: row.reason for row in report.rows}
    assert set(reasons.values()) == {"", BF16}
    return {path for path, reason in reasons.items() if reason}


@pytest.mark.parametrize(
    "module, rule, layers",
    [
        (Named(), Rule(last=0.25), {"layers_3/up", "layers_3/down"}),
        (Named(), Rule(first=1, last=1), {f"layers_{i}/{n}" for i in (0, 3) for n in ("up", "down")}),
        (Named(), Rule("*/up", last=2), {"layers_2/up", "layers_3/up"}),
        (Named(), Rule(kind="Dense", last=0.25), {"layers_3/up", "layers_3/down"}),
        (Auto(), Rule(last=0.25), {"Block_3/up", "Block_3/down"}),
    ],
)
def test_linen(module, rule, layers):
    model = fp8jax.transform(module, "nvfp4", rules=[rule])
    variables = model.init(jax.random.key(0), X)
    assert in_bf16(model.report(X)) == layers
    # NVFP4's state is a key for each dot in FP4.
    assert len(jax.tree.leaves(variables["_overwrite_with_gradient"])) == 2 * BLOCKS + 1 - len(layers)


def test_blocks_are_those_of_the_parameters_and_not_of_a_call():
    model = fp8jax.transform(of_params, "te", rules=[Rule(first=1, last=1)])
    report = model.report(PARAMS, X, 3)
    assert in_bf16(report) == {"layers/0/in", "layers/0/out"} and len(report.rows) == 6


@pytest.mark.parametrize("inputs", [None, (X,)])
def test_nnx(inputs):
    model = fp8jax.transform(OfNnx(nnx.Rngs(0)), "nvfp4", rules=[Rule(first=1, last=0.25)], inputs=inputs)
    layers = {f"blocks/{i}/layers/{j}" for i in (0, 3) for j in (0, 1)}
    assert in_bf16(fp8jax.report(model, X)) == layers


def test_function_of_a_list_of_parameters():
    model = fp8jax.transform(of_params, "mxfp8", rules=[Rule(last=0.5)])
    layers = {f"layers/{i}/{name}" for i in (2, 3) for name in ("in", "out")}
    assert in_bf16(model.report(PARAMS, X)) == layers


def test_a_scan_has_no_blocks_to_count():
    """Also where layers outside of the scan are numbered."""
    model = fp8jax.transform(Scanned(), "te", rules=[Rule(last=0.25)])
    with pytest.raises(
        ValueError, match="Rule.*last=0.25.* found none. If a scan .* build the model without"
    ):
        model.init(jax.random.key(0), X)


@pytest.mark.parametrize("number", [0, -1, 1.0, 1.5, 0.0, float("nan")])
def test_a_number_of_blocks_that_means_nothing_raises(number):
    with pytest.raises(
        ValueError, match="Rule: `last` is a number of blocks, a share of them between 0 and 1"
    ):
        Rule(last=number)


@pytest.mark.parametrize("number", ["0.25", True])
def test_what_is_no_number_raises(number):
    with pytest.raises(TypeError, match="Rule: `first` is a number of blocks, .*; got"):
        Rule(first=number)


# By the parameter ################################################################################


GATED = {"mlp": {name: jnp.ones((WIDTH, WIDTH)) for name in ("w", "v", "kernel")}, "out": {"w": X.T @ X}}


def gated(params, x):
    mlp = params["mlp"]
    return (jax.nn.silu(x @ mlp["w"]) * (x @ mlp["v"])) @ mlp["kernel"] @ params["out"]["w"]


def test_parameters_beside_each_other_have_rows_of_their_own():
    """In a layer of one kernel its name is left out; kernels beside each other are told apart by theirs."""
    model = fp8jax.transform(gated, "te")
    paths = [row.path for row in model.report(GATED, X).rows]
    assert sorted(paths) == ["mlp/kernel", "mlp/v", "mlp/w", "out"]
    text = str(jax.make_jaxpr(model.apply)(model.init(GATED, X), X).pretty_print(name_stack=True))
    assert "fp8jax:mlp.kernel" in text


def test_an_array_in_a_wrapper_has_the_wrappers_layer():
    """As in Haliax, whose weights are arrays with names of axes: `lm_head/weight/0`."""
    wrap = lambda *shape: {"weight": [jnp.ones(shape)]}  # noqa: E731
    params = {"up": wrap(WIDTH, WIDTH), "lm_head": wrap(WIDTH, 64), "list": {"w": [X.T @ X, X.T @ X]}}

    def fn(params, x):
        x = x @ params["up"]["weight"][0] @ params["list"]["w"][0] @ params["list"]["w"][1]
        return x @ params["lm_head"]["weight"][0]

    rows = fp8jax.transform(fn, "te").report(params, X).rows
    assert {row.path: row.fp8 for row in rows} == {
        "up": True,
        "lm_head": False,
        "list/w/0": True,
        "list/w/1": True,
    }


def test_what_may_be_a_head_is_told():
    """Heads go by name; the report names another one."""
    vocabulary = 100

    def fn(params, tokens):
        x = params["embed"][tokens] + params["positions"][jnp.arange(16)][None]
        x = jax.nn.relu(x @ params["up"]["w"]) @ params["down"]["w"]
        return x @ params["to_logits"]["w"]

    shapes = {"up": (WIDTH, 64), "down": (64, WIDTH), "to_logits": (WIDTH, vocabulary)}
    params = {name: {"w": jnp.ones(shape)} for name, shape in shapes.items()}
    params |= {"embed": jnp.ones((vocabulary, WIDTH)), "positions": jnp.ones((64, WIDTH))}
    tokens = jnp.zeros((2, 16), int)
    report = fp8jax.transform(fn, "te").report(params, tokens)
    told = "{} may be the output head, which `exclude` finds by name: Rule('{}') keeps it in bf16"
    assert told.format("to_logits", "to_logits") in str(report) and str(report).count("may be") == 1
    model = fp8jax.transform(fn, "te", rules=[Rule("to_logits")])
    assert "may be" not in str(model.report(params, tokens))


@pytest.mark.parametrize(
    "pattern, layers",
    [
        ("w", {"mlp/w", "out"}),
        ("mlp/w", {"mlp/w"}),
        ("*/kernel", {"mlp/kernel"}),
        ("re:out/w", {"out"}),
        ("out", {"out"}),
        ("mlp", {"mlp/w", "mlp/kernel"}),  # where the layer's path ends
    ],
)
def test_patterns_name_layers_or_parameters(pattern, layers):
    """`exclude=w` means parameters of that name."""
    for recipe, rules in ((f"te,exclude={pattern}", []), ("te", [Rule(pattern)])):
        model = fp8jax.transform(gated, recipe, rules=rules)
        assert {row.path for row in model.report(GATED, X).rows if not row.fp8} == layers
    lora = fp8jax.transform(gated, f"te,exclude={pattern}", lora=fp8jax.LoRA(rank=4))
    assert {row.path for row in lora.report(GATED, X).rows if not row.lora} == layers
    adapters = jax.tree.leaves(lora.init(GATED, X)["params"])
    assert len(adapters) == 2 * (len(lora.report(GATED, X).rows) - len(layers))


# As text #########################################################################################


@pytest.mark.parametrize(
    "text, rule",
    [
        ("last=0.25", Rule(last=0.25)),
        ("first=1,last=2:te,margin=1", Rule(first=1, last=2, recipe="te,margin=1")),
        ("lm_head:O2", Rule("lm_head", "O2")),
        ("blocks/0/*", Rule("blocks/0/*")),
        ("re:.*/(q|k):margin=1", Rule("re:.*/(q|k)", "margin=1")),
        ("re:.*q", Rule("re:.*q")),
        ("re:te", Rule("re:te")),
        ("re:(?:fc|q)", Rule("re:(?:fc|q)")),
        ("re:(?:fc|q):O2,margin=1", Rule("re:(?:fc|q)", "O2,margin=1")),
        ("re:(?=f)fc:gemm=BF16", Rule("re:(?=f)fc", "gemm=BF16")),
        ("kind=Dense,path=re:(?:fc|q)", Rule("re:(?:fc|q)", kind="Dense")),
        ("core:O2", Rule("core", "O2")),
        ("path=*/up,kind=Dense,smaller_than=99:bf16", Rule("*/up", "bf16", "Dense", 99)),
    ],
)
def test_a_rule_of_text(text, rule):
    assert Rule.parse(text) == rule
    assert train.TrainConfig(rules=f"{text} out:te").layer_rules == (rule, Rule("out", "te"))


@pytest.mark.parametrize(
    "text", ["lst=0.25", "last=", "last=quarter", "last=1,last=2", "where=x", "last=0.5,up"]
)
def test_text_that_is_no_rule_raises(text):
    with pytest.raises(ValueError, match="rule: expected a path, or field=value with a field of path, kind,"):
        train.TrainConfig(rules=text)


@pytest.mark.parametrize(
    "rule",
    [Rule(), Rule("re:a|b[0]", "margin=1"), Rule(first=1, last=0.25), Rule(kind="Dense", smaller_than=9)],
)
def test_a_rule_as_code(rule):
    assert eval(repr(rule)) == Rule(**rule.options()) == rule


def test_a_trainer_takes_rules():
    config = train.TrainConfig(recipe="nvfp4", rules="last=0.25")
    trainer = train.Trainer(Named(), lambda model, x: jnp.mean(model(x) ** 2), config, X)
    assert trainer.layers.count(BF16) == 2


class Fields(NamedTuple):
    """Parameters of which one has the name of the attribute of a box."""

    value: Any
    scale: Any


def test_a_field_with_the_name_value():
    """It is a layer like others; a box of a single array has no name of its own."""
    weights = 0.1 * jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH))
    params = {"attn": Fields(*weights)}
    fn = lambda p, x: jnp.mean(x @ p["attn"].value @ p["attn"].scale)  # noqa: E731
    model = fp8jax.transform(fn, "te", rules=[Rule("attn/value")])
    reasons = {row.path: row.reason for row in model.report(params, X).rows}
    assert reasons == {"attn/value": BF16, "attn/scale": ""}
    variables = fp8jax.transform(fn, "te").init(params, X)
    assert set(variables["_overwrite_with_gradient"]["attn"]) == {"value", "scale"}
    assert {("params", "attn", "value"), ("params", "attn", "scale")} <= set(named(variables).leaves)

    boxes = {"a": nn.Partitioned(X, names=("x", None)), "b": nnx.Param(X), "c": params["attn"]}
    paths = [path for path, _ in jax.tree.leaves_with_path(boxes)]
    assert names_of(paths) == [("a",), ("b",), ("c", "value"), ("c", "scale")]
