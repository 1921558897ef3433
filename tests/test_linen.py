"""FP8 in Linen modules: same values, same names, state where it belongs, and a report that is true."""

import dataclasses
import functools
import pickle

import flax.linen as nn
import gradients_apart
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from flax import serialization

import fp8jax
from fp8jax import Recipe, ScaledArray
from fp8jax.quantization import TYPICAL, is_scaled
from fp8jax.recipe import DEFAULT_EXCLUDE

# No side of a kernel is so small that it stays wide by default.
WIDTH, VOCAB = 32, 33


class Block(nn.Module):
    """One of each matched kind of layer, compact."""

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(h, h)
        h = nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.DenseGeneral(WIDTH, name="down")(h), None


class Net(nn.Module):
    """Blocks under scan and remat, an einsum, an embedding, a convolution, a head."""

    depth: int = 3

    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.conv = nn.Conv(WIDTH, (3,))
        blocks = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
        )
        self.blocks = blocks()
        self.mix = nn.Einsum((WIDTH, 2, WIDTH // 2), "bti,ihd->bthd")
        self.lm_head = nn.Dense(VOCAB)

    def __call__(self, tokens):
        x, _ = self.blocks(self.conv(self.embed(tokens)), None)
        return self.lm_head(self.mix(x).reshape(*x.shape))


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, 8))


@functools.cache
def plain_variables():
    """Not made on import, which every worker does."""
    return Net().init(jax.random.key(0), TOKENS)


def relative(got, want):
    return float(jnp.linalg.norm(jnp.ravel(got - want)) / jnp.linalg.norm(jnp.ravel(want)))


def squares(model):
    return lambda variables: jnp.mean(model.apply(variables, TOKENS) ** 2)


@pytest.fixture(scope="module")
def o2():
    model = fp8jax.transform(Net(), "O2")
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    return model, variables, jax.jit(fp8jax.value_and_grad(squares(model)))


def test_init_gives_the_modules_own_values_and_names(o2):
    model, variables, _ = o2
    assert sorted(variables) == ["_overwrite_with_gradient", "params"]
    plain = model.dequantize(variables)
    assert jax.tree.structure(plain) == jax.tree.structure(plain_variables())
    # FP16 with a power-of-two scale keeps 11 bits.
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=2**-11, atol=1e-6),
        plain,
        plain_variables(),
    )
    te = fp8jax.transform(Net(), "te").init(jax.random.key(0), TOKENS)
    jax.tree.map(np.testing.assert_array_equal, te["params"], plain_variables()["params"])


def test_matched_kernels_are_scaled_per_layer_of_a_scan(o2):
    _, variables, _ = o2
    kernel = variables["params"]["blocks"]["up"]["kernel"]
    assert isinstance(kernel, ScaledArray) and kernel.data.dtype == jnp.float16
    assert kernel.shape == (3, WIDTH, 2 * WIDTH) and kernel.scale.shape == (3, 1, 1)
    query = variables["params"]["blocks"]["attn"]["query"]["kernel"]
    assert query.shape == (3, WIDTH, 2, WIDTH // 2) and query.scale.shape == (3, 1, 1, 1)
    plain = [variables["params"]["lm_head"]["kernel"], variables["params"]["embed"]["embedding"]]
    assert not any(map(is_scaled, plain))


def test_state_is_shaped_like_params_with_a_layer_axis(o2):
    _, variables, _ = o2
    state = variables["_overwrite_with_gradient"]
    assert sorted(state) == ["blocks", "mix"]
    assert sorted(state["blocks"]) == ["attn", "down", "up"]
    up, mix = state["blocks"]["up"]["kernel"], state["mix"]["kernel"]
    assert {k: v.shape for k, v in up.items()} == {
        "scale": (3, 3),
        "amax_history": (3, 3, 16),
        "one": (3, 3),
    }
    assert {k: v.shape for k, v in mix.items()} == {
        "scale": (3,),
        "amax_history": (3, 16),
        "one": (3,),
    }
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32"}


def test_forward_and_gradients_beside_the_plain_module(o2):
    """They differ by the noise of FP8 only."""
    model, variables, value_and_grad = o2
    plain = model.dequantize(variables)
    assert relative(jax.jit(model.apply)(variables, TOKENS), jax.jit(Net().apply)(plain, TOKENS)) < 0.15
    loss, grads, new = value_and_grad(variables)
    want_loss, want = jax.jit(jax.value_and_grad(squares(Net())))(plain)
    assert abs(float(loss) - float(want_loss)) < 0.1 * float(want_loss)
    got = jax.tree.map(lambda g: g.dequantize() if is_scaled(g) else g, grads, is_leaf=is_scaled)
    flat = [jnp.concatenate([jnp.ravel(g) for g in jax.tree.leaves(t)]) for t in (got, want["params"])]
    assert relative(*flat) < 0.25
    assert is_scaled(grads["blocks"]["up"]["kernel"])
    assert grads["blocks"]["up"]["kernel"].data.dtype == jnp.float8_e4m3fn


def test_a_step_records_what_each_layer_saw(o2):
    _, variables, value_and_grad = o2
    before = variables["_overwrite_with_gradient"]
    np.testing.assert_array_equal(before["mix"]["kernel"]["scale"], TYPICAL)
    _, grads, new = value_and_grad(variables)
    after = new["_overwrite_with_gradient"]
    assert jax.tree.structure(after) == jax.tree.structure(before)
    history = after["blocks"]["up"]["kernel"]["amax_history"]
    assert (history[:, :, 0] > 0).all() and (history[:, :, 1:] == 0).all()
    kernel = variables["params"]["blocks"]["up"]["kernel"].dequantize()
    np.testing.assert_array_equal(history[:, 1, 0], jnp.max(jnp.abs(kernel), axis=(1, 2)))
    for leaf in jax.tree.leaves(after):
        assert np.isfinite(leaf).all()


def test_applying_changes_no_state_and_needs_all_variables(o2):
    model, variables, _ = o2
    copy = jax.tree.map(np.array, variables)
    model.apply(variables, TOKENS)
    jax.tree.map(np.testing.assert_array_equal, variables, copy)
    with pytest.raises(
        ValueError, match=r"state of 'blocks/attn/query/kernel' in the collection '_overwrite"
    ):
        model.apply({"params": variables["params"]}, TOKENS)
    # A state of another name is one of a product of raw code.
    wrong = {**variables, "_overwrite_with_gradient": {"body": {"scale": jnp.ones(3)}}}
    with pytest.raises(
        ValueError, match=r"state of 'blocks/attn/query/kernel' in the collection '_overwrite"
    ):
        model.apply(wrong, TOKENS)


def test_reported_gemms_in_the_jaxpr(o2):
    """The GEMMs of the report, and no others, have float8 operands in the jaxpr."""
    model, variables, _ = o2
    count, wide = jaxprs.fp8_dots(fp8jax.value_and_grad(squares(model)), variables)
    matched = [row for row in model.report(TOKENS).rows if row.fp8]
    assert len(matched) == 7
    # Three GEMMs a layer; remat runs a block's forward again, but for its last layer, which nothing needs.
    recomputed = sum(row.path.startswith("blocks/") for row in matched) - 1
    assert count == 3 * len(matched) + recomputed
    plain_count, plain_wide = jaxprs.fp8_dots(jax.value_and_grad(squares(Net())), plain_variables())
    assert plain_count == 0 and count + wide == plain_wide


def test_report_names_every_layer_and_why_not(o2):
    model, *_ = o2
    rows = {row.path: row for row in model.report(TOKENS).rows}
    assert {path: row.reason for path, row in rows.items() if not row.fp8} == {
        "embed": "embeddings stay as they are",
        "conv": "convolutions stay as they are",
        "lm_head": "exclude=lm_head",
    }
    assert rows["blocks/attn/query"].kernel_shape == (WIDTH, 2, WIDTH // 2)
    assert rows["mix"].kind == "Einsum"
    text = str(model.report(jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)))
    assert "7 of 10 layers in FP8" in text and "exclude=lm_head" in text


@pytest.mark.parametrize(
    "recipe, fp8",
    [
        ("te,exclude=", {"blocks", "mix", "lm_head"}),
        ("te,include=mix", {"mix"}),
        ("te,include=blocks/*,exclude=up+blocks/attn/*", {"blocks"}),
        ("bf16", set()),
    ],
)
def test_rules_choose_layers(recipe, fp8):
    model = fp8jax.transform(Net(), recipe)
    found = {row.path.split("/")[0] for row in model.report(TOKENS).rows if row.fp8}
    assert found == fp8
    if recipe.endswith("attn/*"):
        assert [row.path for row in model.report(TOKENS).rows if row.fp8] == ["blocks/down"]


def test_the_default_patterns_beside_others_need_not_match():
    recipe = dataclasses.replace(Recipe.TE, exclude=(*DEFAULT_EXCLUDE, "up"))
    report = fp8jax.transform(Net(), recipe).report(TOKENS)
    assert {row.path for row in report.rows if "exclude=" in (row.reason or "")} == {"blocks/up", "lm_head"}


@pytest.mark.parametrize("rule", ["include=nothing", "exclude=lm_head+blocks/attention/*", "exclude=router"])
def test_a_rule_that_matches_nothing_raises(rule):
    model = fp8jax.transform(Net(), f"te,{rule}")
    pattern = rule.split("=")[1].split("+")[-1].replace("*", r"\*")
    for run in (lambda: model.report(TOKENS), lambda: jax.eval_shape(model.init, jax.random.key(0), TOKENS)):
        with pytest.raises(ValueError, match=f"pattern '{pattern}' matches no layer.*blocks/up"):
            run()


class Twice(nn.Module):
    """A layer used twice; the second input is three times the first."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(WIDTH, name="shared")
        return layer(x) + layer(3 * x)


class Broadcast(nn.Module):
    """One layer's weights in every step of a scan, on growing inputs."""

    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return 2 * x, nn.Dense(WIDTH, name="shared")(x)

        scan = nn.scan(Body, variable_broadcast="params", split_rngs={"params": False}, length=4)
        return scan(name="loop")(x, None)[1]


class Mapped(nn.Module):
    """One layer's weights for every example of a vmap, on growing inputs."""

    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})
        return mapped(WIDTH, name="shared")(jnp.stack([x, 2 * x, 5 * x]))


@pytest.mark.parametrize("module, largest", [(Twice(), (1, 3)), (Broadcast(), (8,)), (Mapped(), (5,))])
@pytest.mark.parametrize(
    "recipe, how",
    [
        ("te", "jax.grad"),
        pytest.param("te", "value_and_grad", marks=pytest.mark.long),
        ("O2", "value_and_grad"),  # the gradient of a float16 weight needs ours
    ],
)
def test_states_of_a_shared_layer(module, largest, recipe, how):
    """One use many times, in a scan or a vmap, merges amaxes by max. Peers add them: a scale doubled by two
    uses, fourfold after a scan over four."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, WIDTH), np.float32))
    model = fp8jax.transform(module, recipe)
    variables = model.init(jax.random.key(0), x)
    loss = lambda variables: jnp.mean(model.apply(variables, x) ** 2)  # noqa: E731
    grad = fp8jax.value_and_grad(loss) if how == "value_and_grad" else gradients_apart.value_and_grad(loss)
    _, grads, new = jax.jit(grad)(variables)
    want = jax.jit(jax.grad(lambda v: jnp.mean(module.apply(v, x) ** 2)))(model.dequantize(variables))

    def shared(tree):
        return (tree["loop"] if "loop" in tree else tree)["shared"]

    got = shared(grads)["kernel"]
    got = got.dequantize() if is_scaled(got) else got
    assert relative(got, shared(want["params"])["kernel"]) < 0.1
    states = shared(new["_overwrite_with_gradient"])
    assert sorted(states) == ["kernel", "kernel#1"][: len(largest)]
    for state, times in zip((states[name] for name in sorted(states)), largest, strict=True):
        np.testing.assert_allclose(state["amax_history"][0, 0], times * jnp.max(jnp.abs(x)), rtol=1e-6)
        np.testing.assert_allclose(state["scale"][0], times * jnp.max(jnp.abs(x)) / 448, rtol=1e-6)


def test_dense_at_the_root_and_other_layers():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, WIDTH), np.float32))
    model = fp8jax.transform(nn.Dense(WIDTH), "O2")
    variables = model.init(jax.random.key(0), x)
    assert is_scaled(variables["params"]["kernel"])
    assert variables["_overwrite_with_gradient"]["kernel"]["scale"].shape == (3,)
    own = nn.Dense(WIDTH, dot_general=lambda *args, **kwargs: 2 * jax.lax.dot_general(*args, **kwargs))
    summed = nn.Einsum((WIDTH, 3, WIDTH), "bi,iko->bo", use_bias=False)  # a sum, then a dot product
    for layer in (own, summed):
        module = nn.Sequential([layer])
        model = fp8jax.transform(module, "te")
        [row] = model.report(x).rows
        assert row.fp8 and row.reason == ""
        variables = model.init(jax.random.key(0), x)
        assert relative(model.apply(variables, x), module.apply(model.dequantize(variables), x)) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["bf16", "fp32"])
def test_wide_recipes_multiply_in_their_format(recipe, optimized):
    model = fp8jax.transform(Net(), recipe)
    variables, plain = (each.init(jax.random.key(0), TOKENS) for each in (model, Net()))
    jax.tree.map(np.testing.assert_array_equal, variables, plain)
    apply, plain_apply = jax.jit(model.apply), jax.jit(Net().apply)
    error = relative(apply(variables, TOKENS), plain_apply(plain, TOKENS))
    assert error < (1e-6 if recipe == "fp32" else 0.02)
    assert (error > 1e-4) == (recipe == "bf16")
    # All of the layers' GEMMs, backward ones too, are in it; those of attention itself are the module's own.
    jaxpr = str(jax.make_jaxpr(jax.grad(squares(model)))(variables))
    assert ("bf16" in jaxpr) == (recipe == "bf16")


def test_conversion_of_plain_variables(o2):
    """Plain variables and the transformed model's convert into each other."""
    model, variables, _ = o2
    noisy = jax.tree.map(lambda p: p + 0.01, plain_variables())
    loaded = model.quantize(noisy, like=variables)
    assert jax.tree.structure(loaded) == jax.tree.structure(variables)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=2**-11, atol=1e-6),
        model.dequantize(loaded),
        noisy,
    )
    # Plain float32 parameters in place of scaled ones work as they are.
    mixed = {**variables, "params": plain_variables()["params"]}
    got, want = jax.jit(model.apply)(mixed, TOKENS), jax.jit(Net().apply)(plain_variables(), TOKENS)
    assert relative(got, want) < 0.15


def test_variables_of_another_model_are_not_converted():
    model = fp8jax.transform(nn.Dense(32), "O2")
    plain, wide = (nn.Dense(n).init(jax.random.key(0), jnp.ones((1, 32))) for n in (32, 48))
    variables = model.quantize(plain, model.init(jax.random.key(0), jnp.ones((1, 32))))
    for bad, message in (
        (wide, r"`plain`: expected the parameters of `like`; 'bias' has shape \(48,\), not \(32,\)"),
        ({"params": {"kernel": 0.0}}, "`plain`: expected the parameters of `like`; 'bias' is missing"),
        (
            {"params": {**plain["params"], "scale": 0.0}},
            "expected the parameters of `like`; it has no 'scale'",
        ),
        (plain["params"], "`plain`: expected variables with 'params'; got 'bias', 'kernel'"),
        (None, "`plain`: expected variables with 'params'; got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            model.quantize(bad, variables)
    with pytest.raises(
        ValueError, match="`variables`: expected variables with 'params'; got 'bias', 'kernel'"
    ):
        model.dequantize(variables["params"])
    with pytest.raises(
        TypeError, match=r"got LinenModel. Of a Linen model, call `model.dequantize\(variables"
    ):
        fp8jax.adapters.nnx.dequantize(model)


def test_the_users_module_is_not_touched(o2):
    module = Net()
    model = fp8jax.transform(module, "O2")
    jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    assert model.module is module and module.scope is None
    jax.tree.map(np.testing.assert_array_equal, module.init(jax.random.key(0), TOKENS), plain_variables())


def test_mutable_collections_come_back_as_the_module_has_them():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(32, name="fc")(x))

    x = jnp.ones((4, 32))
    model = fp8jax.transform(Norm(), "O2")
    variables = model.init(jax.random.key(0), x)
    assert sorted(variables) == ["_overwrite_with_gradient", "batch_stats", "params"]
    _, mutated = model.apply(variables, x, mutable=["batch_stats"])
    assert sorted(mutated) == ["batch_stats"]

    def loss(variables, x):
        out, mutated = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(out**2), mutated

    (_, aux), grads, variables = jax.jit(fp8jax.value_and_grad(loss, has_aux=True))(variables, x)
    assert sorted(grads) == ["BatchNorm_0", "fc"] and sorted(aux) == ["batch_stats"]
    updates, _ = fp8jax.optim.dequantize().update(grads, ())
    updated = fp8jax.apply_updates(variables, updates)
    assert sorted(updated) == sorted(variables)
    jax.tree.map(np.testing.assert_array_equal, updated["batch_stats"], variables["batch_stats"])


@pytest.mark.parametrize(
    "model, recipe, error, message",
    [
        (object(), "O2", TypeError, "expected a Flax module, .* or a function of parameters; got object"),
        (nn.Dense, "O2", TypeError, "or a function of parameters; got the class Dense, not an instance"),
        (
            fp8jax.transform(nn.Dense(4), "te"),
            "O2",
            TypeError,
            r"got a transformed model \(LinenModel\); transform the plain model, .*\.plain\(\)`",
        ),
        (
            fp8jax.transform(lambda params, x: x @ params, "te"),
            "O2",
            TypeError,
            r"got a transformed model \(FunctionModel\); transform the plain model, .*\.plain\(\)`",
        ),
        (nn.Dense(4), "O4", ValueError, "expected one of fp32, bf16, .*got 'O4'"),
    ],
)
def test_transform_refuses(model, recipe, error, message):
    with pytest.raises(error, match=message):
        fp8jax.transform(model, recipe)


def test_recipe_objects_and_text_are_the_same():
    x = jnp.ones((2, 32))
    by_text, by_value = (fp8jax.transform(nn.Dense(32), recipe) for recipe in ("O2", Recipe.O2))
    assert by_text.recipe == by_value.recipe
    assert str(by_text.report(x)) == str(by_value.report(x))


def test_layers_called_by_keyword():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.DenseGeneral(features=32)(inputs=nn.Dense(64)(inputs=x))

    x = jnp.ones((2, 48))
    model = fp8jax.transform(Net(), "O2")
    assert model.apply(model.init(jax.random.key(0), x), x).shape == (2, 32)
    assert [row.kernel_shape for row in model.report(x).rows] == [(48, 64), (64, 32)]


@pytest.mark.parametrize("recipe", ["te", "O2", "O3", "fp8", "O2 adamw_8bit"])
def test_flax_serialization_keeps_every_bit(recipe):
    """`flax.serialization` writes and reads scaled weights, moments and states."""
    recipe, _, optimizer = recipe.partition(" ")
    model = fp8jax.transform(nn.Dense(128), recipe)
    variables = model.init(jax.random.key(0), jnp.ones((4, 32)))
    tx = getattr(fp8jax.optim, optimizer or "adamw")(1e-3, recipe)
    grads = fp8jax.value_and_grad(lambda variables: model.apply(variables, jnp.ones((4, 32))).sum())(
        variables
    )[1]
    state = variables, tx.update(grads, tx.init(variables), variables)[1]
    again = serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new, old)
    if recipe == "O3":
        other = fp8jax.transform(nn.Dense(64), recipe).init(jax.random.key(0), jnp.ones((4, 32)))
        with pytest.raises(ValueError, match=r"expected codes float8_e4m3fn\[32, 64\].*; got .*\[32, 128\]"):
            serialization.from_bytes(other, serialization.to_bytes(variables))


def test_flax_serialization_of_another_model_or_recipe():
    """A plain model's checkpoint, and moments of another recipe, are refused in one line."""
    module, key, x = nn.Dense(64), jax.random.key(0), jnp.ones((4, 32))
    plain, params = (model.init(key, x)["params"] for model in (module, fp8jax.transform(module, "fp8")))
    got = r"expected \['data', 'scale'\] of a ScaledArray, .*; got float32\[32, 64\]\. "
    with pytest.raises(ValueError, match=got + r".*model\.quantize\(plain, like=variables\)"):
        serialization.from_bytes(params, serialization.to_bytes(plain))
    with pytest.raises(ValueError, match=got):
        serialization.from_state_dict(params, serialization.to_state_dict(plain))
    te, fp8, one_byte = (
        fp8jax.optim.adamw(1e-3, recipe).init(weights)
        for recipe, weights in (("te", plain), ("fp8", params), ("fp8_6", params))
    )
    with pytest.raises(
        ValueError, match=r"of a ScaledArray, .*; got float32\[64\]\. .*fp8jax\.optim\.convert"
    ):
        serialization.from_bytes(fp8, serialization.to_bytes(te))
    with pytest.raises(ValueError, match=r"expected \['codes', .*; got \['"):
        serialization.from_bytes(one_byte, serialization.to_bytes(fp8))


def test_a_pickled_model_is_the_same_model(o2):
    model, variables, _ = o2
    out = model.apply(variables, TOKENS)  # a call caches programs, which no pickle holds
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).apply(variables, TOKENS), out)


def test_a_subclass_for_loops_that_check_for_a_linen_module():
    """What docs/guides/frameworks.md gives to such loops; a transformed module is no `nn.Module`."""
    fp8 = fp8jax.transform(Net(depth=2), "current")
    InFP8 = type("Net", (Net,), {"apply": staticmethod(fp8.apply)})
    model = InFP8(depth=2)
    assert isinstance(model, nn.Module) and not isinstance(fp8, nn.Module)
    assert model.tabulate(jax.random.key(0), TOKENS).count("lm_head") == 1
    variables = model.init(jax.random.key(0), TOKENS)
    jax.tree.map(np.testing.assert_array_equal, variables, Net(depth=2).init(jax.random.key(0), TOKENS))
    out = model.apply(variables, TOKENS)
    np.testing.assert_array_equal(out, fp8.apply(variables, TOKENS))
    assert not np.array_equal(out, Net(depth=2).apply(variables, TOKENS))
