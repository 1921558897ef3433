"""Mixture of experts: against a loop over experts, alone, under recipes and over devices."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import fp8_dots

import fp8jax
from fp8jax import formats
from fp8jax.adapters import moe
from fp8jax.adapters.moe import exchange
from fp8jax.adapters.moe.exchange import Way
from fp8jax.dot import (
    ExpertSharding,
    dot_general,
    high_precision_ragged_dot,
    init_ragged_state,
    init_state,
    ragged_dot,
)
from fp8jax.dot.row_tiles import row_tiles
from fp8jax.scaling.merge import from_fm32, to_fm32

MATRICES = (((1,), (0,)), ((), ()))
WIDTH, HIDDEN, EXPERTS = 32, 48, 4


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def layer_of(**options):
    return moe.linen.MoE(HIDDEN, EXPERTS, **options)


def by_hand(layer, params, x):
    """Every expert on every token, and a token's gates: 0 for experts that it does not go to."""
    tokens = x.reshape(-1, x.shape[-1])
    p = jax.nn.softmax(tokens @ params["router"]["kernel"])
    gates, chosen = jax.lax.top_k(p, layer.top_k)
    if layer.top_k > 1:
        gates = gates / gates.sum(1, keepdims=True)
    weights = jnp.sum(jax.nn.one_hot(chosen, layer.num_experts) * gates[..., None], axis=1)
    out = jnp.zeros_like(tokens)
    for e in range(layer.num_experts):
        hidden = tokens @ params["up"]["kernel"][e]
        if layer.gated:
            hidden = layer.activation(tokens @ params["gate"]["kernel"][e]) * hidden
        else:
            hidden = layer.activation(hidden)
        out += weights[:, e, None] * (hidden @ params["down"]["kernel"][e])
    return out.reshape(x.shape)


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(x - y), initial=0)) for x, y in pairs)


@pytest.mark.parametrize(
    "options", [{"gated": True, "activation": nn.silu}, pytest.param({"top_k": 1}, marks=pytest.mark.long)]
)
def test_layer_is_a_loop_over_experts(options):
    layer, x, target = layer_of(**options), normal(0, 3, 20, WIDTH), normal(1, 3, 20, WIDTH)
    params = layer.init(jax.random.key(2), x)["params"]

    def values(forward):
        def loss(params, x):
            out = forward(params, x)
            return jnp.sum((out - target) ** 2), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    with jax.default_matmul_precision("highest"):
        ours = values(lambda params, x: layer.apply({"params": params}, x))
        theirs = values(lambda params, x: by_hand(layer, params, x))
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(theirs))
    assert largest_difference(ours, theirs) < 1e-5 * max(scale, 1)


def test_nnx_layer_is_linens():
    layer, x = layer_of(gated=True), normal(0, 24, WIDTH)
    variables = layer.init(jax.random.key(2), x)
    ours = moe.nnx.MoE(WIDTH, HIDDEN, EXPERTS, gated=True, rngs=nnx.Rngs(0))
    for name, below in variables["params"].items():
        assert getattr(ours, name).kernel.shape == below["kernel"].shape
        getattr(ours, name).kernel.set_value(below["kernel"])
    out, sown = layer.apply(variables, x, mutable=["intermediates"])
    np.testing.assert_array_equal(ours(x), out)
    assert float(moe.auxiliary_loss(ours)) == float(moe.auxiliary_loss(sown))


@pytest.mark.parametrize("sizes", [[0, 0, 0], [5, 0, 59], [16, 16, 16], [64, 0, 0], [1, 1, 1]])
def test_row_tiles_cover_each_row_of_a_group_once(sizes):
    blocks = jax.tree.map(np.asarray, row_tiles(jnp.array(sizes), 64, 16))
    owner = np.full(64 + 16, -1)
    for group, start, own in zip(*blocks, strict=True):
        taken = slice(start, start + min(own, 16))
        assert (owner[taken] == -1).all()
        owner[taken] = group
    ends = np.cumsum(sizes)
    wanted = [int(np.searchsorted(ends, row, side="right")) if row < ends[-1] else -1 for row in range(80)]
    np.testing.assert_array_equal(owner, wanted)
    assert (np.diff(blocks.start) >= 0).all()  # what runs over a group's end is written over


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_wide_product_is_jaxs(dtype):
    x, w, g = (
        normal(seed, *shape).astype(dtype) for seed, shape in enumerate([(80, 24), (4, 24, 20), (80, 20)])
    )
    sizes = jnp.array([21, 0, 40, 7])

    def run(product):
        y, vjp = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return y, *vjp(g)

    with jax.default_matmul_precision("highest"):
        for ours, theirs in zip(
            run(jax.jit(high_precision_ragged_dot)), run(jax.jit(jax.lax.ragged_dot)), strict=True
        ):
            assert ours.dtype == theirs.dtype == dtype
            ours, theirs = (part.astype(jnp.float32) for part in (ours, theirs))
            bound = float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(theirs)))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=4 * bound)


SIZES, ROWS = np.array([21, 0, 40, 7]), 80
MAGNITUDES = jnp.array([1e-3, 1.0, 1e2, 1e4])[:, None, None]


def of_groups(recipe):
    """A product of groups of very different magnitude, its gradients and new state, as a dict."""
    x, w, g = normal(0, ROWS, 32), MAGNITUDES * normal(1, 4, 32, 48), normal(2, ROWS, 48)

    def run(x, w, state):
        def product(x, w, state):
            return ragged_dot(x, w, jnp.array(SIZES), recipe=recipe, state=state)

        y, vjp = jax.vjp(product, x, w, to_fm32(state))
        dx, dw, new = vjp(g)
        return {"y": y, "dx": dx, "dw": dw, "state": from_fm32(new)}

    return (x, w, g), jax.jit(run)(x, w, init_ragged_state(recipe, 4))


def of_each(recipe, x, w, g):
    """The same of one group, by `dot_general`."""

    def run(x, w, state):
        product = lambda x, w, state: dot_general(x, w, MATRICES, recipe=recipe, state=state)  # noqa: E731
        y, vjp = jax.vjp(product, x, w, to_fm32(state))
        dx, dw, new = vjp(g)
        return {"y": y, "dx": dx, "dw": dw, "state": from_fm32(new)}

    return jax.jit(run)(x, w, init_state(recipe))


def rows_of(group):
    start = int(SIZES[:group].sum())
    return slice(start, start + int(SIZES[group]))


@pytest.mark.parametrize(
    "recipe",
    [
        "te,amax_history_len=4",
        pytest.param("te,scaling=current", marks=pytest.mark.long),
        pytest.param("te,override_linear_precision=True+False+False", marks=pytest.mark.long),
        pytest.param("te,override_linear_precision=False+True+True", marks=pytest.mark.long),
    ],
)
def test_a_group_is_a_dot_of_its_own(recipe):
    (x, w, g), found = of_groups(recipe)
    for group in (0, 2, 3):
        rows = rows_of(group)
        one = of_each(recipe, x[rows], w[group], g[rows])
        ours = {"y": found["y"][rows], "dx": found["dx"][rows], "dw": found["dw"][group]}
        for name, value in ours.items():
            bound = 1e-6 * float(jnp.max(jnp.abs(one[name])))
            np.testing.assert_allclose(value, one[name], rtol=0, atol=bound)
        for name, kept in one["state"].items():
            np.testing.assert_array_equal(found["state"][name][group], kept)
    # Rows of no group.
    assert not found["y"][68:].any() and not found["dx"][68:].any()


@pytest.mark.parametrize("recipe, least", [("block", 26), ("mxfp8", 26), ("nvfp4", 12)])
def test_a_group_in_scale_blocks_is_near_its_float32_dot(recipe, least):
    (x, w, g), found = of_groups(recipe)
    for group in (0, 2, 3):
        rows = rows_of(group)
        x_of, w_of, g_of = x[rows], w[group], g[rows]
        exact = {"y": x_of @ w_of, "dx": g_of @ w_of.T, "dw": x_of.T @ g_of}
        ours = {"y": found["y"][rows], "dx": found["dx"][rows], "dw": found["dw"][group]}
        for name, value in ours.items():
            noise = jnp.sum((value - exact[name]) ** 2)
            assert 10 * jnp.log10(jnp.sum(exact[name] ** 2) / noise) >= least, name
    assert not found["y"][68:].any() and not found["dx"][68:].any() and not found["dw"][1].any()


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("bad", [jnp.nan, 1e6])
def test_a_group_in_scale_blocks_is_independent_of_other_rows(recipe, bad):
    """Rows of another group, and rows of no group, change neither output nor gradients of a group."""

    @jax.jit
    def run(x, g):
        product = functools.partial(ragged_dot, recipe=recipe, state=init_ragged_state(recipe, 4))
        y, vjp = jax.vjp(lambda x, w: product(x, w, jnp.array(SIZES)), x, normal(1, 4, 32, 48))
        dx, dw = vjp(g)
        return y[rows_of(2)], dx[rows_of(2)], dw[2]

    x, g = normal(0, ROWS, 32), normal(2, ROWS, 48)
    others = [part.at[rows_of(3)].set(bad).at[68:].set(-bad) for part in (x, g)]
    for ours, wanted in zip(run(*others), run(x, g), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_each_group_has_the_precision_of_its_own_scale():
    (x, w, _), found = of_groups("te,scaling=current")
    for group in (0, 2, 3):
        rows, limit = rows_of(group), formats.E4M3
        fake = [fp8jax.quantize(part, limit).dequantize() for part in (x[rows], w[group])]
        with jax.default_matmul_precision("highest"):
            exact, wanted = fake[0] @ fake[1], x[rows] @ w[group]
        np.testing.assert_allclose(found["y"][rows], exact, rtol=0, atol=1e-6 * float(jnp.abs(exact).max()))
        noise = jnp.sum((found["y"][rows] - wanted) ** 2)
        assert 10 * jnp.log10(jnp.sum(wanted**2) / noise) >= 25


def test_a_group_without_rows_and_one_with_nan_disturb_no_other():
    recipe, sizes = "te,amax_history_len=2", jnp.array([9, 0, 11])
    x, w = normal(0, 20, 16).at[3, 3].set(jnp.nan), normal(1, 3, 16, 16)

    @jax.jit
    def step(w, state):
        loss = lambda w, state: jnp.sum(ragged_dot(x, w, sizes, recipe=recipe, state=state) ** 2)  # noqa: E731
        dw, new = jax.grad(loss, argnums=(0, 1), allow_int=True)(w, to_fm32(state))
        return dw, from_fm32(new)

    state = init_ragged_state(recipe, 3)
    for _ in range(3):
        dw, state = step(w, state)
    assert jnp.isnan(dw[0]).any() and not dw[1].any()
    assert jnp.isfinite(dw[2]).all() and dw[2].any()
    for kept in state.values():
        assert jnp.isfinite(kept).all()
    assert (state["scale"] > 0).all()
    assert not state["amax_history"][1, 0].any() and state["amax_history"][1, 1].all()


@pytest.mark.parametrize("recipe", ["te,amax_history_len=2", "te,scaling=current"])
def test_no_rows_have_an_empty_product_and_zero_gradients(recipe):
    def loss(x, w, state):
        return jnp.sum(ragged_dot(x, w, jnp.zeros(3, int), recipe=recipe, state=state))

    operands = jnp.ones((0, 16)), normal(1, 3, 16, 8), init_ragged_state(recipe, 3)
    out, (dx, dw, state) = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands)
    assert out == 0 and dx.shape == (0, 16) and dw.shape == (3, 16, 8) and not dw.any()
    if state:
        assert (state["amax_history"][:, 1, 0] > 0).all() and not state["amax_history"][:, ::2].any()
        np.testing.assert_array_equal(state["scale"][:, ::2], operands[2]["scale"][:, ::2])


def test_losses_are_the_papers():
    logits = np.asarray(normal(0, 40, 5), np.float64)
    chosen = moe.route(jnp.asarray(logits, jnp.float32), 2)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    picked = np.argsort(-p, axis=1)[:, :2]
    f = np.bincount(picked.reshape(-1), minlength=5) / picked.size
    np.testing.assert_array_equal(chosen.experts, picked)
    gates = np.take_along_axis(p, picked, 1)
    np.testing.assert_allclose(chosen.gates, gates / gates.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(chosen.load, f, rtol=1e-6)
    np.testing.assert_allclose(chosen.load_balance_loss, 5 * (f * p.mean(0)).sum(), rtol=1e-6)
    np.testing.assert_allclose(chosen.router_z_loss, (np.log(np.exp(logits).sum(1)) ** 2).mean(), rtol=1e-5)


def test_losses_without_tokens_are_zero():
    chosen = moe.route(jnp.ones((0, 4)), 2)
    assert chosen.load_balance_loss == chosen.router_z_loss == 0 and not chosen.load.any()


def test_uniform_routing_has_the_least_loss():
    even = moe.route(jnp.eye(4)[jnp.arange(40) % 4], 1)
    np.testing.assert_allclose(even.load_balance_loss, 1, rtol=1e-6)
    crowded = moe.route(jnp.tile(jnp.array([[90.0, 80.0, 0.0, 0.0]]), (40, 1)), 1)
    np.testing.assert_allclose(crowded.load_balance_loss, 4, rtol=1e-4)
    for seed in range(5):
        assert moe.route(normal(seed, 40, 4), 2).load_balance_loss > 1 - 1e-3


def trained(recipe, model, make_loss, variables, steps=5):
    tx = fp8jax.optim.adamw(1e-2, recipe)

    @jax.jit
    def step(variables, opt_state):
        loss, grads, variables = fp8jax.value_and_grad(make_loss(model))(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss, grads

    opt_state, losses = tx.init(variables), []
    for _ in range(steps):
        variables, opt_state, loss, grads = step(variables, opt_state)
        losses.append(float(loss))
    return losses, grads, variables, opt_state


@pytest.mark.parametrize(
    "level", ["O3", *(pytest.param(level, marks=pytest.mark.long) for level in ("te", "O1", "O2", "bf16"))]
)
def test_levels_train(level):
    layer, x, target = layer_of(gated=True), normal(0, 60, WIDTH), normal(1, 60, WIDTH)
    model, recipe = fp8jax.transform(layer, level), fp8jax.Recipe.parse(level)
    variables = model.init(jax.random.key(2), x)

    def make_loss(model):
        def loss(variables):
            out, sown = model.apply(variables, x, mutable=["intermediates"])
            return jnp.mean((out - target) ** 2) + moe.auxiliary_loss(sown)

        return loss

    if recipe.gemm == "FP8":  # three products of three GEMMs; the router's, whose input has no gradient
        assert fp8_dots(fp8jax.value_and_grad(make_loss(model)), variables) == (9, 2)
    losses, grads, variables, opt_state = trained(level, model, make_loss, variables)
    assert all(b < a for a, b in zip(losses, losses[1:], strict=False)), losses
    kernel, grad = variables["params"]["up"]["kernel"], grads["up"]["kernel"]
    if recipe.weight != "FP32":
        assert kernel.scale.shape == (EXPERTS, 1, 1)
        assert kernel.data.dtype == formats.get(recipe.weight).dtype
    if recipe.weight_grad == "E4M3":
        assert grad.data.dtype == formats.E4M3.dtype and grad.scale.shape == (EXPERTS, 1, 1)
    if level == "O3":
        assert opt_state.master["up"]["kernel"].scale.shape == (EXPERTS, 1, 1)
    assert isinstance(variables["params"]["router"]["kernel"], jax.Array)


def test_report_names_experts_and_router():
    x = normal(0, 64, WIDTH)
    linen = fp8jax.transform(layer_of(), "te")
    plain = moe.nnx.MoE(WIDTH, HIDDEN, EXPERTS, rngs=nnx.Rngs(0))
    for report in (linen.report(x), fp8jax.report(fp8jax.transform(plain, "te"), x)):
        rows = {row.path: row for row in report.rows}
        assert rows["up"].fp8 and rows["up"].kernel_shape == (EXPERTS, WIDTH, HIDDEN)
        assert rows["down"].fp8 and rows["down"].kernel_shape == (EXPERTS, HIDDEN, WIDTH)
        assert not rows["router"].fp8 and rows["router"].reason == "exclude=router"
        assert rows["router"].flops == 2 * 64 * WIDTH * EXPERTS
        assert rows["up"].flops == rows["down"].flops == 2 * 128 * WIDTH * HIDDEN
    wide = fp8jax.transform(layer_of(), "te", rules=[fp8jax.Rule("up")]).report(x)
    assert {row.path: row.reason for row in wide.rows}["up"] == "rule: gemm=BF16"


def test_nnx_trains_and_is_plain_again():
    x, target = normal(0, 60, WIDTH), normal(1, 60, WIDTH)
    plain = moe.nnx.MoE(WIDTH, HIDDEN, EXPERTS, rngs=nnx.Rngs(0))
    model = fp8jax.transform(plain, "O1")
    assert model.up.kernel.get_value().scale.shape == (EXPERTS, 1, 1)
    assert model.up.kernel__fp8_scale.shape == (EXPERTS, 3)
    optimizer = nnx.Optimizer(model, fp8jax.optim.adamw(1e-2, "O1"), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss_fn(model):
            return jnp.mean((model(x) - target) ** 2) + moe.auxiliary_loss(model)

        loss, grads = fp8jax.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert all(b < a for a, b in zip(losses, losses[1:], strict=False)), losses
    np.testing.assert_array_equal(fp8jax.adapters.nnx.freeze(model)(x), model(x))
    again = fp8jax.adapters.nnx.dequantize(model)
    assert type(again.up) is type(plain.up) and again.up.kernel.get_value().dtype == jnp.float32


@pytest.mark.long
def test_nnx_stack_is_scanned():
    x = normal(0, 40, WIDTH)
    make = nnx.vmap(lambda key: moe.nnx.MoE(WIDTH, HIDDEN, EXPERTS, rngs=nnx.Rngs(key)))
    model = fp8jax.transform(make(jax.random.split(jax.random.key(0), 2)), "O2")
    assert model.up.kernel.get_value().scale.shape == (2, EXPERTS, 1, 1)

    def loss_fn(model):
        call = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean(call(x, model) ** 2) + moe.auxiliary_loss(model)

    loss, grads = nnx.jit(fp8jax.value_and_grad(loss_fn))(model)
    assert jnp.isfinite(loss) and grads.up.kernel.get_value().scale.shape == (2, EXPERTS, 1, 1)
    assert model.up.kernel__fp8_amax_history[...][:, :, 1, 0].all()
    assert (model.router_z_loss[...] > 0).all()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + layer_of()(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0, "intermediates": 0}, "split_rngs": {"params": True}}
        return nn.scan(nn.remat(Block, policy=fp8jax.dot.save_fp8_operands), length=2, **axes)(name="blocks")(
            x, None
        )[0]


@pytest.mark.long
def test_scan_of_remat_blocks_stacks_the_state():
    x = normal(0, 40, WIDTH)
    model = fp8jax.transform(Stack(), "O2")
    variables = model.init(jax.random.key(1), x)

    def loss(variables):
        out, sown = model.apply(variables, x, mutable=["intermediates"])
        return jnp.mean(out**2) + moe.auxiliary_loss(sown), sown

    (_, sown), grads, new = jax.jit(fp8jax.value_and_grad(loss, has_aux=True))(variables)
    [balance] = sown["intermediates"]["blocks"]["MoE_0"]["load_balance_loss"]
    assert balance.shape == (2,)
    up = grads["blocks"]["MoE_0"]["up"]["kernel"]
    assert up.data.shape == (2, EXPERTS, WIDTH, HIDDEN) and up.scale.shape == (2, EXPERTS, 1, 1)
    assert np.isfinite(up.dequantize()).all() and jnp.any(up.dequantize() != 0, axis=(2, 3)).all()
    state = new["_overwrite_with_gradient"]["blocks"]["MoE_0"]["up"]["kernel"]
    assert state["scale"].shape == (2, EXPERTS, 3)
    assert state["amax_history"][:, :, 1, 0].all()


def mesh_of(devices, name="expert"):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), (name,))


@pytest.mark.parametrize("level", ["O2", pytest.param("fp32", marks=pytest.mark.long)])
def test_over_devices_it_is_the_layer_of_one(level):
    x, target = normal(0, 4, 10, WIDTH), normal(1, 4, 10, WIDTH)
    single, several = layer_of(), layer_of(mesh=mesh_of(4))
    models = [fp8jax.transform(layer, level) for layer in (single, several)]
    variables = models[0].init(jax.random.key(2), x)

    def gradients(model):
        def loss(variables, x):
            return jnp.mean((model.apply(variables, x) - target) ** 2)

        return jax.jit(lambda v, x: (model.apply(v, x), fp8jax.value_and_grad(loss)(v, x)))(variables, x)

    one, many = map(gradients, models)
    values = [
        jax.tree.map(fp8jax.quantization.value, each, is_leaf=fp8jax.quantization.is_scaled)
        for each in (one, many)
    ]
    for a, b in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1e-3, float(jnp.max(jnp.abs(a)))))


def test_over_devices_a_plain_forward_needs_no_placed_arguments():
    x, w, sizes = normal(0, 32, 16), normal(1, 4, 16, 16), jnp.array([3, 9, 16, 0])
    over = ExpertSharding(mesh_of(2), "expert")
    found = jax.jit(functools.partial(high_precision_ragged_dot, over=over))(x, w, sizes)
    # The first 16 rows are those of experts 0 and 1.
    rows = [*range(12), *range(16, 32)]
    np.testing.assert_allclose(
        found[jnp.array(rows)], high_precision_ragged_dot(x[jnp.array(rows)], w, sizes), rtol=1e-6
    )


def test_combine_with_dropped_choices():
    """Choices without a row get zeros, and no row gets a gradient from them."""
    # Tokens 0 and 1 with two choices each, of which three have one of the four rows.
    way = Way(jnp.array([2, 0, 3, 1]), jnp.array([[1, 4], [0, 2]]))
    y, grad = normal(0, 4, 8), normal(1, 2, 2, 8)
    out, vjp = jax.vjp(lambda y: exchange._to_choices(y, way), y)
    wanted, theirs = jax.vjp(lambda y: exchange._to_choices.fun(y, way), y)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(out[0, 1], np.zeros(8))
    np.testing.assert_array_equal(vjp(grad)[0], theirs(grad)[0])


def test_devices_keep_their_own_experts():
    mesh = mesh_of(2)
    over = ExpertSharding(mesh, "expert")
    shard = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    x, w = normal(0, 32, 16), jax.device_put(normal(1, 4, 16, 16), shard)
    state = init_ragged_state("te", 4)

    def product(w):
        sizes = jnp.array([3, 9, 16, 0])
        return jnp.sum(ragged_dot(x, w, sizes, recipe="te", state=state, over=over))

    with pytest.warns(UserWarning, match="not to the FP8 scaling state"):
        dw = jax.jit(jax.grad(product))(w)
    assert dw.sharding.spec == shard.spec
    assert "all-gather" not in jax.jit(product).lower(w).compile().as_text()


def loss_on_two_axes(model):
    return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)


@functools.cache
def of_one_device():
    """Rows, targets, variables, and the loss and gradients without a mesh."""
    x, target = normal(0, 16, WIDTH), normal(1, 16, WIDTH)
    single = fp8jax.transform(layer_of(), "O2")
    variables = single.init(jax.random.key(2), x)
    loss, grads, _ = jax.jit(fp8jax.value_and_grad(loss_on_two_axes(single)))(variables, x, target)
    return x, target, variables, loss, grads


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_and_zero_on_two_axes(stage):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"))
    x, target, variables, wanted, theirs = of_one_device()
    model = fp8jax.transform(layer_of(mesh=mesh), "O2")
    zero = fp8jax.comm.Zero(mesh, "O2", stage=stage, axis_name="data")
    loss, grads, _ = jax.jit(fp8jax.value_and_grad(loss_on_two_axes(model), zero=zero))(
        zero.place(variables), x, target
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for name in ("up", "down"):
        a, b = (tree[name]["kernel"].dequantize() for tree in (grads, theirs))
        noise = jnp.sum((a - b) ** 2, axis=(1, 2)) / jnp.sum(b**2, axis=(1, 2))
        assert (10 * jnp.log10(noise) < -20).all()  # two roundings to E4M3 on the wire


@pytest.mark.parametrize(
    "options, says",
    [
        ({"top_k": 5}, "`top_k`: expected 1 to 4"),
        ({"top_k": 0}, "`top_k`: expected 1 to 4"),
        ({"num_experts": 0}, "`num_experts`: expected a positive number"),
        ({"mesh": mesh_of(3)}, "num_experts must divide by the 3 devices"),
        ({"mesh": mesh_of(4)}, "the number of tokens must divide by the 4 devices"),
        ({"mesh": mesh_of(2, "data")}, "`expert_axis`: expected one of the mesh's axes"),
        ({"mesh": jax.make_mesh((2,), ("expert",))}, "expected Auto axes"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    layer = dataclasses.replace(layer_of(), **options)
    with pytest.raises(ValueError, match=says):
        layer.init(jax.random.key(0), jnp.ones((6, WIDTH)))


def test_narrow_experts():
    """Kernels with fewer than 32 rows or columns stay as they are, in NNX without example inputs, too."""
    narrow, x = moe.nnx.MoE(16, HIDDEN, EXPERTS, rngs=nnx.Rngs(0)), jnp.ones((8, 16))
    for run in (
        lambda: fp8jax.transform(narrow, "O2"),
        lambda: fp8jax.transform(narrow, "O2", inputs=[x]),
        lambda: fp8jax.transform(layer_of(), "O2").init(jax.random.key(0), x),
    ):
        with pytest.raises(ValueError, match="in FP8; got none"):
            run()


def test_shapes_that_do_not_fit_are_refused():
    state = init_ragged_state("te", 2)
    with pytest.raises(ValueError, match=r"`rhs` \(groups, k, n\)"):
        ragged_dot(jnp.ones((4, 8)), jnp.ones((2, 9, 8)), jnp.array([2, 2]), recipe="te", state=state)
    with pytest.raises(ValueError, match="expected gemm=FP8"):
        ragged_dot(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([2, 2]), recipe="bf16", state=state)


@pytest.mark.parametrize("recipe", ["te", "O2", "nvfp4"])
def test_a_state_of_other_groups_is_refused(recipe):
    lhs, rhs, sizes = jnp.ones((8, 32)), jnp.ones((4, 32, 32)), jnp.array([2, 2, 2, 2])
    with pytest.raises(
        ValueError, match=r"^`state`: expected .* of 4 groups.*; got shape \(3,.*recipe, 4\)`.$"
    ):
        ragged_dot(lhs, rhs, sizes, recipe=recipe, state=init_ragged_state(recipe, 3))


def test_losses_that_were_not_collected_are_missed():
    with pytest.raises(ValueError, match="mutable=\\['intermediates'\\]"):
        moe.auxiliary_loss({"intermediates": {}})


def test_a_users_own_ragged_dot():
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, rows, sizes):
            kernel = self.param("kernel", moe.linen.EXPERTS_INIT, (2, WIDTH, HIDDEN))
            return jax.lax.ragged_dot(rows, kernel, sizes)

    model = fp8jax.transform(Experts(), "te")
    [row] = model.report(jnp.ones((6, WIDTH)), jnp.array([3, 3])).rows
    assert row.fp8 and row.kernel_shape == (2, WIDTH, HIDDEN) and row.gemm == (6, WIDTH, HIDDEN)
