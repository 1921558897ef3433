"""The way back: from paths in Flax to torch's names."""

import re

import numpy as np
import pytest

from fp8jax.checkpoints import GPT2, LLAMA, MIXTRAL, QWEN3, NameMap, Rename

FLAT_GPT2 = GPT2.stacked("h").moved("^transformer/", "", back=("^(?!lm_head/)", "transformer/"))


@pytest.mark.parametrize(
    "mapping, path, shape, first, count",
    [
        (LLAMA, "lm_head/kernel", (8, 9), "lm_head.weight", 1),
        (QWEN3, "model/layers/3/self_attn/q_norm/scale", (8,), "model.layers.3.self_attn.q_norm.weight", 1),
        (LLAMA.stacked("layers"), "model/norm/scale", (8,), "model.norm.weight", 1),
        (
            LLAMA.stacked("layers"),
            "model/layers/mlp/up_proj/kernel",
            (3, 8, 9),
            "model.layers.0.mlp.up_proj.weight",
            3,
        ),
        (LLAMA.stacked("layers"), "model/layers/x_norm/scale", (3, 8), "model.layers.0.x_norm.weight", 3),
        (LLAMA.stacked("layers"), "model/layers/gate/bias", (3,), "model.layers.0.gate.bias", 3),
        (FLAT_GPT2, "wte/embedding", (9, 8), "transformer.wte.weight", 1),
        (FLAT_GPT2, "lm_head/kernel", (8, 9), "lm_head.weight", 1),
        (FLAT_GPT2, "h/attn/c_attn/bias", (2, 24), "transformer.h.0.attn.c_attn.bias", 2),
        (
            MIXTRAL,
            "layers/1/block_sparse_moe/gate/kernel",
            (8, 4),
            "layers.1.block_sparse_moe.gate.weight",
            1,
        ),
        (MIXTRAL, "layers/1/experts/w1/kernel", (4, 8, 9), "layers.1.experts.0.w1.weight", 4),
        (
            MIXTRAL.stacked("layers"),
            "layers/experts/w1/kernel",
            (2, 4, 8, 9),
            "layers.0.experts.0.w1.weight",
            8,
        ),
        (NameMap((Rename("a.weight", "b/w"),)), "b/w", (3,), "a.weight", 1),
        (NameMap((Rename(r"(\w+)\.weight", r"\1/\1_in/w"),)), "a/a_in/w", (3,), "a.weight", 1),
    ],
)
def test_names_of(mapping, path, shape, first, count):
    """Each name leads to the path and its own index."""
    path = tuple(path.split("/"))
    names = mapping.names_of(path, shape)
    assert len(names) == count and next(iter(names.values())) == first
    for index, name in names.items():
        place = mapping.place(name)
        assert (place.path, place.layer) == (path, index)


@pytest.mark.parametrize(
    "mapping, path",
    [
        (LLAMA, ("model", "mixer", "kernel")),
        (GPT2.moved("^transformer/", ""), ("wte", "embedding")),
        (NameMap((Rename("(a|b(c))", r"\1/w"),)), ("a", "w")),
        (NameMap((Rename("a+", "a/w"),)), ("a", "w")),
        (NameMap((Rename(r"(\w+)\.weight", "a/w"),)), ("a", "w")),
        (NameMap((Rename("a", "w"), Rename("a", "v"))), ("v",)),
    ],
)
def test_paths_without_a_name(mapping, path):
    """No rename leads there, or its pattern has no inverse."""
    with pytest.raises(
        ValueError, match=f"`mapping`: expected a rename that leads to {re.escape('/'.join(path))}"
    ):
        mapping.names_of(path, (3, 4))


def test_a_pattern_without_the_last_layers():
    mapping = NameMap((Rename(r"layers\.(\d)\.weight", r"layers/[\1]/kernel"),))
    assert len(mapping.names_of(("layers", "kernel"), (10, 3, 4))) == 10
    with pytest.raises(ValueError, match=r"a name for layer \[10\] of layers/kernel; got none. `\(\\d\+\)`"):
        mapping.names_of(("layers", "kernel"), (11, 3, 4))


def test_the_bias_of_all_heads():
    """(heads, width) in Flax, a vector in torch; and back."""
    mapping = NameMap((Rename(r"query\.bias", "query/bias", shape=(2, 3)),))
    place, bias = mapping.place("query.bias"), np.arange(6.0)
    assert place.torch_shape((2, 3)) == (6,)
    np.testing.assert_array_equal(place.restore(place.arrange(bias), (6,)), bias)


@pytest.mark.parametrize(
    "shape, flax, torch", [((-1, 4, 16), (64, 4, 16), (64, 64)), ((4, 16, -1), (4, 16, 48), (48, 64))]
)
def test_heads_both_ways(shape, flax, torch):
    place = NameMap((Rename("q", "q", axes=(1, 0), shape=shape),)).place("q")
    assert place.arrange(np.zeros(torch)).shape == flax and place.torch_shape(flax) == torch
    for other in ((64, 8, 8), (2, *flax)):
        with pytest.raises(ValueError, match=r"`mapping`: expected shape \(.*\) for q; got \["):
            place.torch_shape(other)


@pytest.mark.parametrize("shape, torch", [((64, 4, -1), (64, 64)), ((-1, 16, 48), (48, 64))])
def test_a_number_for_the_wrong_dimension(shape, torch):
    """-1 is the dimension that torch has, too; else `save` would join the wrong dimensions."""
    place = NameMap((Rename("q", "q", axes=(1, 0), shape=shape),)).place("q")
    with pytest.raises(
        ValueError, match=r"`mapping`: expected shape=\(.*\) of q to have -1 for the dimension"
    ):
        place.arrange(np.zeros(torch))
