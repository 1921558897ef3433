"""Linen models of every make train at O2 without an edit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import Recipe, Rule
from fp8jax.optim import adamw
from fp8jax.scaled import is_scaled

X = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
LECUN = nn.initializers.lecun_normal()


class Layer(nn.Module):
    """A layer for a scan, its kernel with the names of its axes."""

    @nn.compact
    def __call__(self, x, _=None):
        kernel_init = nn.with_logical_partitioning(LECUN, ("embed", "mlp"))
        return nn.Dense(16, kernel_init=kernel_init)(x), None


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
        return nn.Dense(32, kernel_init=nn.with_partitioning(LECUN, ("embed", "mlp")))(x)


class Inner(nn.Module):
    def setup(self):
        self.fc = nn.Dense(16)

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
        return dense(8, name="fc")(x)


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(8)(x)


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x):
        a, b = nn.Dense(16, name="a"), nn.Dense(16, name="b")
        if self.is_initializing():
            a(x), b(x)
        return nn.cond(jnp.sum(x) > 0, lambda _, x: a(x), lambda _, x: b(x), self, x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(16))(x)


MODELS = {
    "scan": Scanned(),
    "scan, one layer broadcast": Scanned(broadcast=True),
    "partitioned": Partitioned(),
    "share_scope": Shared(),
    "map_variables": Mapped(),
    "vmap": Ensemble(),
    "cond": Branches(),
    "RNN": Recurrent(),
    "odd dims": nn.Sequential([nn.Dense(13), nn.Dense(7)]),
    "batch dims": nn.DenseGeneral(8, axis=-1, batch_dims=(0,)),
    "bound": nn.Dense(8).bind(nn.Dense(8).init(jax.random.key(0), X)),
}


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
        loss, grads = fp8jax.value_and_grad(loss_fn)(variables)
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


def test_a_batch_of_nothing():
    model = fp8jax.transform(nn.Dense(8), "O2")
    variables = model.init(jax.random.key(0), X)
    assert model.apply(variables, X[:0]).shape == (0, 8, 8)
    loss, grads = fp8jax.value_and_grad(lambda v: jnp.sum(model.apply(v, X[:0])))(variables)
    assert loss == 0 and not np.any(grads["params"]["kernel"].dequantize())
    state = variables["_overwrite_with_gradient"]["kernel"]["scale"]
    np.testing.assert_array_equal(grads["_overwrite_with_gradient"]["kernel"]["scale"][0], state[0])


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


def test_a_layer_that_multiplies_in_its_own_way_is_not_claimed():
    class Own(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", self.kernel_init, (x.shape[-1], self.features))

    model = fp8jax.transform(Own(8), "O2")
    variables = model.init(jax.random.key(0), X)
    [row] = model.report(X).rows
    assert not row.fp8 and row.reason == "the layer multiplies in its own way"
    assert row.flops == 2 * 32 * 16 * 8 and not is_scaled(variables["params"]["kernel"])


def test_a_table_of_the_model():
    assert "kernel" in fp8jax.transform(nn.Dense(8), "O2").tabulate(jax.random.key(0), X)


# Rules ###########################################################################################


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.gelu(nn.Dense(16 * (i + 1), name=f"fc_{i}")(x))
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
        (Rule(smaller_than=16 * 32), ["fc_0", "lm_head"]),
        (Rule(kind=nn.DenseGeneral), ["lm_head"]),
        (Rule(kind="Dense", path="*_2"), ["fc_2"]),
        (Rule(where=lambda layer: layer.kernel_shape[-1] == 32), ["fc_1"]),
        (Rule(where=lambda layer: layer.module.features == 48, recipe="gemm=FP32"), ["fc_2"]),
    ],
)
def test_rules_take_layers_out_of_fp8(rule, layers):
    rows, variables = choices(rule)
    gemm = "FP32" if rule.recipe == "gemm=FP32" else "BF16"
    expected = {name: "FP8" for name in ("fc_0", "fc_1", "fc_2")} | {"lm_head": "exclude=lm_head"}
    assert rows == expected | {name: f"rule: gemm={gemm}" for name in layers}
    assert not any(is_scaled(variables["params"][name]["kernel"]) for name in layers)


def test_a_rule_may_change_any_column_of_a_layer_and_the_first_that_fits_decides():
    rules = (
        Rule("lm_head", "te,amax_history_len=4"),
        Rule("fc_0", "weight=FP32,weight_grad=FP32"),
        Rule("fc_*", "margin=3,scaling=current"),
    )
    rows, variables = choices(*rules)
    assert set(rows.values()) == {"FP8"}
    state = variables["_overwrite_with_gradient"]
    assert state["lm_head"]["kernel"]["amax_history"].shape == (3, 4)
    assert set(state["fc_0"]["kernel"]) == {"scale", "amax_history"}
    assert set(state["fc_1"]["kernel"]) == {"wgrad_scale"}
    scaled = [is_scaled(variables["params"][name]["kernel"]) for name in ("lm_head", "fc_0", "fc_1")]
    assert scaled == [False, False, True]
    model = fp8jax.transform(Mlp(), "O2", rules=rules)
    _, grads = fp8jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2))(variables)
    tx = adamw(1e-3, "O2")
    updates, _ = tx.update(grads, tx.init(variables), variables)
    new = fp8jax.apply_updates(variables, updates)
    assert jax.tree.structure(new) == jax.tree.structure(variables)


@pytest.mark.parametrize(
    "rule, error, message",
    [
        (Rule("fc_7"), ValueError, "rule .*fc_7.* matches no layer; the layers are fc_0, fc_1"),
        (Rule("fc_1", "moments=FP32+FP32"), ValueError, "moments is a column of the whole model"),
        (Rule("fc_1", "gem=BF16"), ValueError, "expected field=value"),
        (Rule("fc_1", "O3"), ValueError, "master_weight is a column of the whole model"),
        ("fc_1", TypeError, "expected fp8jax.Rule; got str"),
    ],
)
def test_rules_that_cannot_be_kept_raise(rule, error, message):
    with pytest.raises(error, match=message):
        choices(rule)


def test_a_rule_is_for_one_model():
    """Two models of one module and recipe do not share what was found of their rules."""
    rows, _ = choices(Rule("fc_0"), recipe=Recipe.TE)
    assert rows["fc_0"] == "rule: gemm=BF16"
    rows, _ = choices(recipe=Recipe.TE)
    assert rows["fc_0"] == "FP8"
