"""Linen models of every make train at O2 without an edit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import Recipe, Rule
from fp8jax.optim import adamw
from fp8jax.quantization import is_scaled

# No side of a kernel is so small that it stays wide by default.
WIDTH = 32
X = np.random.default_rng(0).normal(size=(4, 8, WIDTH)).astype(np.float32)
LECUN = nn.initializers.lecun_normal()


class Layer(nn.Module):
    """A layer for a scan, its kernel with the names of its axes."""

    @nn.compact
    def __call__(self, x, _=None):
        kernel_init = nn.with_logical_partitioning(LECUN, ("embed", "mlp"))
        return nn.Dense(WIDTH, kernel_init=kernel_init)(x), None


class Scanned(nn.Module):
    broadcast: bool = False

    @nn.compact
    def __call__(self, x):
        how = {"variable_axes": {"params": 0}, "metadata_params": {nn.PARTITION_NAME: "layers"}}
        if self.broadcast:
            how = {"variable_broadcast": "params"}
        layers = nn.scan(nn.remat(Layer), split_rngs={"params": not self.broadcast}, length=3, **how)
        return layers()(x, None)[0]


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2 * WIDTH, kernel_init=nn.with_partitioning(LECUN, ("embed", "mlp")))(x)


class Inner(nn.Module):
    def setup(self):
        self.fc = nn.Dense(WIDTH)

    def __call__(self, x):
        return self.fc(x)


class Shared(nn.Module):
    def setup(self):
        self.inner = Inner()
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


class Mapped(nn.Module):
    """A layer whose kernel is kept transposed."""

    @nn.compact
    def __call__(self, x):
        def transposed(tree):
            params = dict(tree.get("params", {}))
            params.update({"kernel": jax.tree.map(jnp.transpose, params["kernel"])} if params else {})
            return {**tree, "params": params}

        dense = nn.map_variables(
            nn.Dense, "params", transposed, transposed, init=self.is_initializing(), mutable=True
        )
        return dense(2 * WIDTH, name="fc")(x)


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(WIDTH)(x)


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x):
        a, b = nn.Dense(WIDTH, name="a"), nn.Dense(WIDTH, name="b")
        if self.is_initializing():
            a(x), b(x)
        return nn.cond(jnp.sum(x) > 0, lambda _, x: a(x), lambda _, x: b(x), self, x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(WIDTH))(x)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(WIDTH))(x)


MODELS = {
    "WeightNorm": Normed(),
    "scan": Scanned(),
    "scan, one layer broadcast": Scanned(broadcast=True),
    "partitioned": Partitioned(),
    "share_scope": Shared(),
    "map_variables": Mapped(),
    "vmap": Ensemble(),
    "cond": Branches(),
    "RNN": Recurrent(),
    "odd dims": nn.Sequential([nn.Dense(WIDTH + 5), nn.Dense(WIDTH + 3)]),
    "batch dims": nn.DenseGeneral(WIDTH, axis=-1, batch_dims=(0,)),
    "bound": nn.Dense(WIDTH).bind(nn.Dense(WIDTH).init(jax.random.key(0), X)),
}


@pytest.mark.long
@pytest.mark.parametrize("module", MODELS.values(), ids=MODELS.keys())
def test_it_trains(module):
    model = fp8jax.transform(module, "O2")
    variables = model.init(jax.random.key(0), X)
    tx = adamw(3e-3, "O2")
    target = np.resize(np.roll(X, 1), module.apply(model.dequantize(variables), X).shape)

    def loss_fn(variables, apply=model.apply):
        return jnp.mean((apply(variables, X) - target) ** 2)

    plain = loss_fn(model.dequantize(variables), module.apply)

    @jax.jit
    def step(variables, state):
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss

    state, losses = tx.init(variables), []
    structure = jax.tree.structure((variables, state))
    for _ in range(8):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    np.testing.assert_allclose(losses[0], plain, rtol=0.1)
    assert losses[-1] < losses[0] and jax.tree.structure((variables, state)) == structure
    assert all(row.fp8 and row.flops for row in model.report(X).rows)


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(WIDTH))(x, update_stats=False)


class NormedWhole(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(WIDTH), variable_filter=None)(x)


@pytest.mark.parametrize("module", [Spectral(), NormedWhole()])
def test_kernel_and_bias_under_a_norm(module):
    """The GEMM is in FP8, and the parameters that a norm computes from are plain."""
    model = fp8jax.transform(module, "O2")
    variables, plain = model.init(jax.random.key(0), X), module.init(jax.random.key(0), X)
    states = variables.pop("_overwrite_with_gradient")
    jax.tree.map(np.testing.assert_array_equal, variables, plain)
    [kept] = jax.tree.leaves(states, is_leaf=lambda node: "scale" in node)
    assert set(kept) == {"scale", "amax_history", "one"}
    got, want = model.apply({**variables, "_overwrite_with_gradient": states}, X), module.apply(plain, X)
    assert 0 < jnp.linalg.norm(got - want) < 0.1 * jnp.linalg.norm(want)
    # The layer's own product; the norm's, of parameters and statistics alone, are left.
    report = model.report(X)
    assert max(report.rows, key=lambda row: row.flops).fp8 and sum(row.fp8 for row in report.rows) == 1


def test_a_frozen_model_keeps_a_normed_kernel():
    model = fp8jax.transform(Normed(), "O2")
    variables = model.init(jax.random.key(0), X)
    frozen = model.freeze(variables, X)
    np.testing.assert_array_equal(model.apply(frozen, X), model.apply(variables, X))


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_normed_kernel(recipe):
    """The parameter under the norm is plain, and the GEMM is in FP8."""
    model = fp8jax.transform(Normed(), recipe)
    variables = model.init(jax.random.key(0), X)
    plain = Normed().init(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])
    loss = lambda apply: lambda variables: jnp.mean(apply(variables, X) ** 3)  # noqa: E731
    _, grads, new = fp8jax.value_and_grad(loss(model.apply))(variables)
    want = jax.grad(loss(Normed().apply))(plain)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.1 * jnp.max(jnp.abs(b))),
        grads,
        want["params"],
    )
    [kept] = jax.tree.leaves(new["_overwrite_with_gradient"], is_leaf=lambda node: "scale" in node)
    assert set(kept) == {"scale", "amax_history", "one"} and kept["amax_history"][0, 0] == np.max(np.abs(X))
    assert all(row.fp8 for row in model.report(X).rows)


def test_a_batch_of_nothing():
    model = fp8jax.transform(nn.Dense(2 * WIDTH), "O2")
    variables = model.init(jax.random.key(0), X)
    assert model.apply(variables, X[:0]).shape == (0, 8, 2 * WIDTH)
    loss, grads, new = fp8jax.value_and_grad(lambda v: jnp.sum(model.apply(v, X[:0])))(variables)
    assert loss == 0 and not np.any(grads["kernel"].dequantize())
    state = variables["_overwrite_with_gradient"]["kernel"]["scale"]
    np.testing.assert_array_equal(new["_overwrite_with_gradient"]["kernel"]["scale"][0], state[0])


def test_the_names_of_axes_survive():
    model = fp8jax.transform(Scanned(), "O2")
    variables = model.init(jax.random.key(0), X)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    specs = nn.get_partition_spec(variables)
    [layer] = specs["params"].values()
    kernel = layer["Dense_0"]["kernel"]
    assert (kernel.data, kernel.scale) == (P("layers", "embed", "mlp"), P("layers", None, None))
    assert set(jax.tree.leaves(specs["_overwrite_with_gradient"], is_leaf=is_spec)) == {P()}
    unboxed = nn.unbox(variables)
    assert jax.tree.structure(unboxed) == jax.tree.structure(specs, is_leaf=is_spec)
    np.testing.assert_array_equal(model.apply(unboxed, X), model.apply(variables, X))
    # Plain variables of a module with such names convert, too.
    plain = Scanned().init(jax.random.key(0), X)
    assert jax.tree.structure(nn.unbox(model.dequantize(variables))) == jax.tree.structure(nn.unbox(plain))
    again = model.quantize(plain, like=variables)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(again), unboxed)


def test_layer_with_its_own_matmul():
    """A layer that calls no layer of Flax is in FP8, too."""

    class Own(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", self.kernel_init, (x.shape[-1], self.features))

    model = fp8jax.transform(Own(2 * WIDTH), "O2")
    variables = model.init(jax.random.key(0), X)
    [row] = model.report(X).rows
    assert row.fp8 and row.reason == "" and row.kind == "Own"
    assert row.flops == 2 * 32 * WIDTH * 2 * WIDTH and is_scaled(variables["params"]["kernel"])
    got, want = model.apply(variables, X), Own(2 * WIDTH).apply(model.dequantize(variables), X)
    assert 0 < jnp.linalg.norm(got - want) < 0.1 * jnp.linalg.norm(want)


def test_a_table_of_the_model():
    assert "kernel" in fp8jax.transform(nn.Dense(WIDTH), "O2").tabulate(jax.random.key(0), X)


# Rules ###########################################################################################


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.gelu(nn.Dense(WIDTH * (i + 1), name=f"fc_{i}")(x))
        return nn.DenseGeneral(4, name="lm_head")(x)


def choices(*rules, recipe="O2"):
    model = fp8jax.transform(Mlp(), recipe, rules=rules)
    variables = model.init(jax.random.key(0), X)
    rows = {row.path: row.reason or "FP8" for row in model.report(X).rows}
    return rows, variables


@pytest.mark.parametrize(
    "rule, layers",
    [
        (Rule("fc_0"), ["fc_0"]),
        (Rule("re:fc_[12]"), ["fc_1", "fc_2"]),
        (Rule(smaller_than=WIDTH * 2 * WIDTH), ["fc_0", "lm_head"]),
        (Rule(kind=nn.DenseGeneral), ["lm_head"]),
        (Rule(kind="Dense", path="*_2"), ["fc_2"]),
        (Rule(where=lambda layer: layer.kernel_shape[-1] == 2 * WIDTH), ["fc_1"]),
        (Rule(where=lambda layer: layer.module.features == 3 * WIDTH, recipe="gemm=FP32"), ["fc_2"]),
    ],
)
def test_rules_take_layers_out_of_fp8(rule, layers):
    rows, variables = choices(rule)
    gemm = "FP32" if rule.recipe == "gemm=FP32" else "BF16"
    expected = {name: "FP8" for name in ("fc_0", "fc_1", "fc_2")} | {"lm_head": "exclude=lm_head"}
    assert rows == expected | {name: f"rule: gemm={gemm}" for name in layers}
    assert not any(is_scaled(variables["params"][name]["kernel"]) for name in layers)


@pytest.mark.long
def test_rules_for_any_column():
    """A rule can change any column of a layer's recipe, and the first rule that matches decides."""
    rules = (
        Rule("lm_head", "te,amax_history_len=4"),
        Rule("fc_0", "weight=FP32,weight_grad=FP32"),
        Rule("fc_*", "margin=3,scaling=current"),
    )
    rows, variables = choices(*rules)
    assert set(rows.values()) == {"FP8"}
    state = variables["_overwrite_with_gradient"]
    assert state["lm_head"]["kernel"]["amax_history"].shape == (3, 4)
    assert set(state["fc_0"]["kernel"]) == {"scale", "amax_history", "one"}
    assert "fc_1" not in state
    scaled = [is_scaled(variables["params"][name]["kernel"]) for name in ("lm_head", "fc_0", "fc_1")]
    assert scaled == [False, False, True]
    model = fp8jax.transform(Mlp(), "O2", rules=rules)
    _, grads, variables = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2))(variables)
    tx = adamw(1e-3, "O2")
    updates, _ = tx.update(grads, tx.init(variables), variables)
    new = fp8jax.apply_updates(variables, updates)
    assert jax.tree.structure(new) == jax.tree.structure(variables)


@pytest.mark.parametrize(
    "rule, error, message",
    [
        (Rule("fc_7"), ValueError, "rule .*fc_7.* matches no layer; the layers are fc_0, fc_1"),
        (Rule("fc_1", "moments=FP32+FP32"), ValueError, "moments is a column of the whole model"),
        (
            Rule("*", "current,exclude=fc_1"),
            ValueError,
            r"a rule's layers are its `path`; Rule\(.*changes exclude",
        ),
        (Rule("fc_1", "include=fc_1"), ValueError, "a rule's layers are its `path`"),
        (Rule("fc_1", "te,comm=FP32"), ValueError, "comm is a column of the whole model"),
        (Rule("fc_1", "te,moments=E5M2+FP16"), ValueError, "moments is a column of the whole model"),
        (Rule("fc_1", "O1,rounding=stochastic+kahan+root"), ValueError, "rounding is a column of the whole"),
        (Rule("fc_1", Recipe.parse("te,exclude=fc_1")), ValueError, "a rule's layers are its `path`"),
        (Rule("fc_1", "te,"), ValueError, "expected field=value after the preset"),
        (Rule("fc_1", "gem=BF16"), ValueError, "expected field=value"),
        (Rule("fc_1", "O3"), ValueError, "master_weight is a column of the whole model"),
        ("fc_1", TypeError, "expected fp8jax.Rule; got str"),
    ],
)
def test_rules_that_cannot_be_kept_raise(rule, error, message):
    with pytest.raises(error, match=message):
        choices(rule)


def test_a_rule_that_earlier_rules_shadow_is_named():
    says = r"Rule\('fc_1'\) comes after Rule\(recipe='margin=1'\), which already matches fc_1: put it first"
    with pytest.raises(ValueError, match=says):
        choices(Rule("*", "margin=1"), Rule("fc_1"))
    rows, _ = choices(Rule("fc_1"), Rule("*", "margin=1"))
    assert rows["fc_1"] == "rule: gemm=BF16" and rows["fc_0"] == "FP8"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"path": None}, TypeError, "Rule: `path` is a pattern; got None"),
        ({"path": "re:("}, ValueError, r"Rule: `path` is no regular expression \(.*\): 're:\('"),
        ({"kind": (nn.Dense,)}, TypeError, "Rule: `kind` is a class, the name of one or None; got .*Dense"),
        ({"kind": nn.Dense(3)}, TypeError, "Rule: `kind` is a class"),
        ({"smaller_than": "3"}, TypeError, "Rule: `smaller_than` is a number or None; got '3'"),
        ({"where": 3}, TypeError, "Rule: `where` is a function of a Layer or None; got 3"),
    ],
)
def test_a_rule_that_means_nothing_raises_when_it_is_made(options, error, message):
    with pytest.raises(error, match=message):
        Rule(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rules": Rule("fc_0")}, "`rules`: expected a list of fp8jax.Rule; got Rule"),
        ({"rules": None}, "`rules`: expected a list of fp8jax.Rule; got NoneType"),
        ({"lora": 8}, r"`lora`: expected a fp8jax.LoRA, as LoRA\(rank=8\), or None; got 8"),
        (
            {"gradient_checkpointing": "full", "checkpoint_blocks": 3},
            "`checkpoint_blocks`: expected names of classes or patterns of paths; got 3",
        ),
    ],
)
def test_settings_of_other_types_raise_one_line(options, message):
    with pytest.raises(TypeError, match=message):
        fp8jax.transform(nn.Dense(WIDTH), "te", **options)


def test_a_rule_is_for_one_model():
    """Two models of one module and recipe do not share what was found of their rules."""
    rows, _ = choices(Rule("fc_0"), recipe=Recipe.TE)
    assert rows["fc_0"] == "rule: gemm=BF16"
    rows, _ = choices(recipe=Recipe.TE)
    assert rows["fc_0"] == "FP8"


# Inference #######################################################################################


def casts(function, *args):
    """How many arrays of the kernels' sizes are rounded to FP8."""
    text = str(jax.make_jaxpr(function)(*args))
    return text.count("by_platform")


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe, module",
    [("te", Scanned()), ("te,scaling=current", Scanned()), ("O2", Mlp()), ("O3", Mlp())],
)
def test_frozen_variables_give_the_same_and_cast_no_kernel(module, recipe):
    model = fp8jax.transform(module, recipe)
    variables = model.init(jax.random.key(0), X)
    for _ in range(2):  # the second time the scales are those of a step
        frozen = model.freeze(variables, X)
        np.testing.assert_array_equal(model.apply(frozen, X), model.apply(variables, X))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(frozen["params"])} >= {"float8_e4m3fn"}
        if recipe != "O3":
            assert casts(model.apply, frozen, X) < casts(model.apply, variables, X)
        _, grads, new = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2))(variables)
        variables = {**variables, **{k: v for k, v in grads.items() if k != "params"}}


# Raw code ########################################################################################


class ByHand(nn.Module):
    """A product of its own, with a state of its own, beside a layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="fc")(x)
        w = self.param("w", LECUN, (WIDTH, 8))
        state = self.variable("_overwrite_with_gradient", "product", fp8jax.dot.init_state, "te").value
        return fp8jax.dot.einsum("...i,io->...o", x, w, recipe="te", state=state)


@pytest.mark.long
@pytest.mark.parametrize(
    "model", [ByHand(), fp8jax.transform(ByHand(), "O2")], ids=["by hand", "by hand, transformed"]
)
def test_products_of_raw_code_keep_their_state(model):
    variables = model.init(jax.random.key(0), X)
    tx = adamw(1e-2, "O2" if hasattr(model, "recipe") else "te")

    @jax.jit
    def step(variables, state):
        loss_fn = lambda v: jnp.mean((model.apply(v, X) - jnp.tanh(X[..., :8])) ** 2)  # noqa: E731
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, loss

    state, losses = tx.init(variables), []
    for _ in range(20):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    kept = variables["_overwrite_with_gradient"]["product"]
    assert int(jnp.sum(kept["amax_history"][0] > 0)) == 20


@pytest.fixture
def rank_promotion():
    """As users have it."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("rank_promotion")
def test_a_block_written_by_hand_has_its_products_in_fp8(load_program):
    example = load_program("examples/handwritten.py")
    variables = example.init(jax.random.key(0), "te")
    tokens = np.zeros((2, example.TIME), int)
    loss = lambda variables: jnp.sum(example.logits(variables, tokens, "te").astype(jnp.float32))  # noqa: E731
    # Attention's two and the tied head's one stay as they are, and their gradients.
    assert jaxprs.fp8_dots(fp8jax.value_and_grad(loss), variables) == (3 * 7, 3 * 3)


@pytest.mark.long
@pytest.mark.usefixtures("rank_promotion")
def test_a_block_written_by_hand_learns_as_in_bf16(load_program):
    train = load_program("examples/handwritten.py").train
    fp8, bf16 = train("te", 100), train(None, 100)
    assert fp8 < 3.2 and abs(fp8 - bf16) < 0.1


def test_an_einsum_that_is_no_dot_raises():
    with pytest.raises(ValueError, match="expected an einsum that is one dot product"):
        fp8jax.dot.einsum("ii,ij->j", jnp.ones((2, 2)), jnp.ones((2, 2)), recipe="te", state={})
    with pytest.raises(ValueError, match="expected gemm=FP8 or FP4 for an FP8 dot; got gemm=BF16"):
        fp8jax.dot.einsum("bi,ij->bj", jnp.ones((2, 2)), jnp.ones((2, 2)), recipe="bf16", state={})


# Embeddings ######################################################################################

VOCAB = 48


class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.fc = nn.Dense(WIDTH)

    def __call__(self, tokens):
        return self.embed.attend(self.fc(self.embed(tokens)))


@pytest.mark.parametrize(
    "recipe, rules", [("O2", [Rule("embed", "O2")]), ("O2,include=*+embed", []), ("O2", [])]
)
def test_attend_is_in_fp8_where_it_is_asked_for(recipe, rules):
    tokens = np.arange(12).reshape(2, 6)
    model = fp8jax.transform(Tied(), recipe, rules=rules)
    variables = model.init(jax.random.key(0), tokens)
    rows = {row.path: row for row in model.report(tokens).rows}
    assert set(rows) == {"embed", "fc"}  # the table and the head are one row
    is_asked = bool(rules) or "embed" in recipe
    assert rows["embed"].fp8 == is_asked and rows["embed"].flops == 2 * 12 * WIDTH * VOCAB
    assert rows["embed"].reason == (
        "" if is_asked else "embeddings stay as they are, unless a rule names them"
    )
    assert ("embed" in variables["_overwrite_with_gradient"]) == is_asked
    assert not is_scaled(variables["params"]["embed"]["embedding"])
    loss_fn = lambda v, apply=model.apply: jnp.mean(apply(v, tokens) ** 2)  # noqa: E731
    _, grads, new = fp8jax.value_and_grad(loss_fn)(variables)
    want = jax.grad(lambda v: loss_fn(v, Tied().apply))(model.dequantize(variables))
    got, want = (g["embed"]["embedding"] for g in (grads, want["params"]))
    assert jnp.linalg.norm(got - want) < 0.1 * jnp.linalg.norm(want)
    assert is_scaled(grads["fc"]["kernel"])
