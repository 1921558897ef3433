"""FP8 in NNX modules: the user's idioms, values and names, and state where it belongs."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8jax
from fp8jax import Recipe, ScaledArray
from fp8jax.adapters.nnx.variables import FP8State
from fp8jax.optim import adamw, clip_by_global_norm, skipped
from fp8jax.quantization import is_scaled, value

# No side of a kernel is so small that it stays wide by default.
WIDTH, VOCAB, DEPTH = 32, 33, 3


def long(recipe):
    return pytest.param(recipe, marks=pytest.mark.long)


class Block(nnx.Module):
    """One of each matched kind of layer."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.LinearGeneral(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.drop(self.down(nnx.gelu(self.up(x))))


class Net(nnx.Module):
    """Blocks in a list, an einsum, statistics, an embedding, a convolution, a head."""

    def __init__(self, rngs, blocks=2):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.statistics = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.mix = nnx.Einsum("bti,ihd->bthd", (WIDTH, 2, WIDTH // 2), (2, WIDTH // 2), rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.conv(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.mix(self.statistics(x)).reshape(x.shape))


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, 8))


@functools.cache
def net(recipe=None, blocks=2):
    return Net(nnx.Rngs(0), blocks) if recipe is None else fp8jax.transform(net(blocks=blocks), recipe)


def squares(model, tokens):
    return jnp.mean(model(tokens) ** 2)


def relative(got, want):
    return float(jnp.linalg.norm(jnp.ravel(got - want)) / jnp.linalg.norm(jnp.ravel(want)))


def flat(grads):
    leaves = jax.tree.leaves(nnx.as_pure(grads), is_leaf=is_scaled)
    return jnp.concatenate([jnp.ravel(value(leaf)) for leaf in leaves])


def without_dropout(model):
    model = nnx.clone(model)
    model.set_attributes(deterministic=True, raise_if_not_found=False)
    return model


# Transform #######################################################################################


def test_transform_makes_a_copy_and_keeps_names_and_values():
    plain = Net(nnx.Rngs(0))
    graph, before = nnx.split(plain)
    before = jax.tree.map(np.asarray, jax.tree.map(lambda x: x, nnx.state(plain, nnx.Param)))
    model = fp8jax.transform(plain, "O2")
    assert isinstance(model, Net) and isinstance(model.blocks[0].up, nnx.Linear)
    assert nnx.split(plain)[0] == graph
    jax.tree.map(np.testing.assert_array_equal, nnx.state(plain, nnx.Param), before)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert paths == [path for path, _ in nnx.to_flat_state(before)]
    kernel = model.blocks[0].up.kernel.get_value()
    assert is_scaled(kernel) and kernel.data.dtype == jnp.float16 and kernel.scale.shape == (1, 1)
    np.testing.assert_allclose(value(kernel), plain.blocks[0].up.kernel[...], rtol=2**-11, atol=1e-6)
    plain_ones = [model.head.kernel, model.embed.embedding, model.conv.kernel, model.blocks[0].up.bias]
    assert not any(is_scaled(param.get_value()) for param in plain_ones)


def test_a_model_is_transformed_once():
    message = (
        "'blocks/0/attn/key' is transformed already.*original module, or `fp8jax.adapters.nnx.dequantize"
    )
    with pytest.raises(ValueError, match=message):
        fp8jax.transform(net("O2"), "te")
    table = "te,include=embedding"
    with pytest.raises(ValueError, match="layer '' is transformed already"):
        embed = nnx.Embed(VOCAB, WIDTH, rngs=nnx.Rngs(0))
        fp8jax.transform(fp8jax.transform(embed, table), table)


def test_the_output_is_the_plain_models_but_for_fp8_noise():
    # Untrained embeddings are smaller than what is typical.
    plain, model = without_dropout(net()), without_dropout(net("O2,first_scale=tensor"))
    assert relative(model(TOKENS), plain(TOKENS)) < 0.15
    wide = without_dropout(net("fp32"))
    np.testing.assert_allclose(wide(TOKENS), plain(TOKENS), rtol=1e-5, atol=1e-5)


def test_the_report_says_why():
    report = fp8jax.report(net("O2"), TOKENS)
    rows = {row.path: row for row in report.rows}
    assert rows["blocks/0/up"].fp8 and rows["blocks/0/up"].kernel_shape == (WIDTH, 2 * WIDTH)
    assert rows["blocks/1/attn/query"].kernel_shape == (WIDTH, 2, WIDTH // 2)
    assert rows["head"].reason == "exclude=head"
    assert rows["conv"].reason == "convolutions stay as they are"
    assert rows["embed"].reason == "embeddings stay as they are"
    assert rows["blocks/0/up"].flops == 2 * TOKENS.size * WIDTH * 2 * WIDTH
    assert rows["head"].flops == 2 * TOKENS.size * WIDTH * VOCAB
    assert rows["conv"].flops == 2 * TOKENS.size * WIDTH * WIDTH * 3
    others = 2 * 2 * (2 * 4 * 2 * 8 * 8 * WIDTH // 2)  # scores and mixing of 2 blocks
    assert report.flops == sum(row.flops for row in report.rows) + others
    fp8 = sum(row.flops for row in report.rows if row.fp8)
    assert report.fp8_share == fp8 / report.flops
    assert f"{100 * report.fp8_share:.0f}% of the FLOPs" in str(report)
    with pytest.raises(TypeError, match="expected a model from fp8jax.transform; got Net"):
        fp8jax.report(net(), TOKENS)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_reported_gemms_in_the_jaxpr(recipe):
    """The GEMMs of the report, and no others, have float8 operands in the jaxpr."""
    model = fp8jax.transform(Net(nnx.Rngs(0)), recipe)
    rows = fp8jax.report(model, TOKENS).rows
    matched = [row for row in rows if row.fp8]
    assert len(matched) == 2 * 6 + 1 and not next(row for row in rows if row.path == "head").fp8
    graph, state = nnx.split(model)

    def kept(state):
        loss, grads = fp8jax.value_and_grad(squares)(nnx.merge(graph, state), TOKENS)
        return loss, jax.tree.leaves(grads)

    # The gradients are used, or nothing would be left of the backward.
    count, wide = jaxprs.fp8_dots(kept, state)
    plain_graph, plain = nnx.split(Net(nnx.Rngs(0)))

    def plain_kept(state):
        return jax.tree.leaves(nnx.grad(squares)(nnx.merge(plain_graph, state), TOKENS))

    plain_count, plain_wide = jaxprs.fp8_dots(plain_kept, plain)
    assert count == 3 * len(matched)
    assert plain_count == 0 and count + wide == plain_wide


def test_a_layer_with_a_dot_of_its_own_is_in_fp8_as_any_other():
    def twice(*args, **kwargs):
        return 2 * jax.lax.dot_general(*args, **kwargs)

    plain = nnx.Linear(WIDTH, WIDTH, dot_general=twice, rngs=nnx.Rngs(0))
    model, x = fp8jax.transform(plain, "O2"), jax.random.normal(jax.random.key(1), (4, WIDTH))
    [row] = fp8jax.report(model, x).rows
    assert row.path == "kernel" and row.fp8 and row.reason == ""
    assert 0 < relative(model(x), plain(x)) < 0.1


def test_a_lora_layers_kernel_is_in_fp8_and_its_adapter_is_not():
    plain = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=nnx.Rngs(0))
    model = fp8jax.transform(plain, "O3")
    x = jax.random.normal(jax.random.key(1), (4, WIDTH))
    assert relative(model(x), plain(x)) < 0.1
    assert is_scaled(model.kernel.get_value()) and not is_scaled(model.lora.lora_a.get_value())
    rows = {row.path: row for row in fp8jax.report(model, x).rows}
    assert rows["kernel"].fp8 and sorted(rows) == ["kernel", "lora/lora_a", "lora/lora_b"]
    adapters = [rows["lora/lora_a"], rows["lora/lora_b"]]
    assert {row.reason for row in adapters} == {"its kernel has fewer than 32 rows or columns"}
    assert not any(row.fp8 for row in adapters)


# Training ########################################################################################


@functools.cache
def step_of(clip=None):
    @nnx.jit
    def step(model, optimizer, tokens):
        loss, grads = fp8jax.value_and_grad(squares)(model, tokens)
        optimizer.update(model, grads)
        return loss

    return step


@pytest.mark.parametrize(
    "recipe",
    [
        long("te"),
        pytest.param("O2", marks=pytest.mark.long),
        "O3",
        pytest.param("fp16_amp", marks=pytest.mark.long),
    ],
)
def test_a_loop_of_nnx_idioms_stays_one(recipe):
    model = nnx.clone(net(recipe, blocks=1))
    tx = optax.chain(clip_by_global_norm(1.0), adamw(3e-3, recipe))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    structure = jax.tree.structure(nnx.state(optimizer))
    statistics = np.asarray(model.statistics.mean[...])
    losses = [float(step_of()(model, optimizer, TOKENS)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert jax.tree.structure(nnx.state(optimizer)) == structure
    assert int(optimizer.step[...]) == 20 and int(skipped(nnx.as_pure(optimizer.opt_state))) == 0
    assert (np.asarray(model.statistics.mean[...]) != statistics).all()
    if Recipe.parse(recipe).gemm == "FP8":
        history = model.blocks[0].up.kernel__fp8_amax_history[...]
        assert int((history[0] > 0).sum()) == min(20, Recipe.parse(recipe).amax_history_len)


@pytest.mark.long
def test_gradients_beside_the_plain_model():
    """They are the plain model's, in the recipe's formats."""
    model = without_dropout(net("O2", blocks=1))
    loss, grads = fp8jax.value_and_grad(squares)(model, TOKENS)
    plain = without_dropout(net(blocks=1))
    want_loss, want = nnx.value_and_grad(squares)(plain, TOKENS)
    assert abs(float(loss) - float(want_loss)) < 0.1 * float(want_loss)
    kernel = grads["blocks"][0]["up"]["kernel"]
    assert isinstance(kernel, nnx.Param) and kernel.get_value().data.dtype == jnp.float8_e4m3fn
    assert relative(flat(grads), flat(want)) < 0.25


@pytest.mark.long
def test_auxiliary_outputs_and_microbatches():
    model = without_dropout(net("O2"))
    model.statistics.use_running_average = True

    def loss_fn(model, tokens):
        out = model(tokens)
        return jnp.mean(out**2), out

    (loss, out), grads = fp8jax.value_and_grad(loss_fn, has_aux=True)(nnx.clone(model), TOKENS)
    parts = nnx.clone(model)
    (mean, outs), sums = fp8jax.accumulate_gradients(loss_fn, 2, has_aux=True)(parts, TOKENS)
    np.testing.assert_allclose(mean, loss, rtol=0.02)
    assert out.shape == (4, 8, VOCAB) and outs.shape == (2, 2, 8, VOCAB)
    assert relative(flat(sums), flat(grads)) < 0.1
    history = parts.blocks[0].up.kernel__fp8_amax_history[...]
    assert int((history[0] > 0).sum()) == 1


def test_each_microbatch_has_random_streams_of_its_own():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(jnp.ones_like(self.fc(x)))

    def loss_fn(model, x):
        out = model(x)
        return jnp.mean(out), out

    model = fp8jax.transform(Noisy(nnx.Rngs(0)), "te")
    grad = nnx.jit(fp8jax.accumulate_gradients(loss_fn, 4, has_aux=True))
    masks = [np.asarray(grad(model, jnp.ones((8, WIDTH)))[0][1]) for _ in range(2)]
    assert len({mask.tobytes() for step in masks for mask in step}) == 8
    assert jax.random.key_data(model.drop.rngs.key[...]).shape == (2,)
    assert int(model.drop.rngs.count[...]) == 2


def test_a_module_used_twice_merges_its_amaxes_by_max():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.fc(100 * self.fc(x))

    model = fp8jax.transform(Twice(nnx.Rngs(0)), "O2")
    x = jnp.ones((4, WIDTH))
    largest = float(jnp.max(jnp.abs(100 * model.fc(x))))
    _, grads = fp8jax.value_and_grad(lambda model: jnp.mean(model(x)))(model)
    np.testing.assert_allclose(model.fc.kernel__fp8_amax_history[0, 0], largest, rtol=0.1)
    assert is_scaled(grads["fc"]["kernel"].get_value())


@pytest.mark.parametrize(
    "freeze",
    [
        lambda layer: nnx.update(layer, jax.lax.stop_gradient(nnx.state(layer, nnx.Param))),
        lambda layer: layer.kernel.set_value(jax.lax.stop_gradient(layer.kernel.get_value())),
    ],
    ids=["a state", "a variable"],
)
def test_stop_gradient_inside_the_loss_freezes_a_layer(freeze):
    layers = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(2)]
    model = fp8jax.transform(nnx.Sequential(*layers), "O2")

    def loss(model):
        freeze(model.layers[0])
        return jnp.mean(model(jnp.ones((4, WIDTH))) ** 2)

    _, grads = fp8jax.value_and_grad(loss)(model)
    first, second = (value(grads["layers"][i]["kernel"].get_value()) for i in range(2))
    np.testing.assert_array_equal(first, 0)
    assert jnp.any(second != 0) and float(model.layers[0].kernel__fp8_amax_history[0, 0]) == 1


class Pair(nnx.Module):
    """Its kernels have shapes of their own, so that no other test's trace stands for one of it."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(36, 52, rngs=rngs), nnx.Linear(52, 36, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.gelu(self.layers[0](x)))


@pytest.mark.parametrize("recipe", ["te", "O2"])
@pytest.mark.parametrize("pure", [lambda state: state, nnx.as_pure], ids=["variables", "values"])
def test_split_states_are_variables_too(recipe, pure):
    model, x = fp8jax.transform(Pair(nnx.Rngs(0)), recipe), jnp.ones((4, 36))
    graph, params, scaling, rest = nnx.split(model, nnx.Param, FP8State, ...)
    variables = {"params": pure(params), "_overwrite_with_gradient": pure(scaling)}

    def loss(variables, x):
        parts = variables["params"], variables["_overwrite_with_gradient"], rest
        return squares(nnx.merge(graph, *parts), x)

    (got, grads, new), (want, of_module) = (
        fp8jax.value_and_grad(loss)(variables, x),
        fp8jax.value_and_grad(squares)(model, x),
    )
    assert float(got) == float(want)
    jax.tree.map(np.testing.assert_array_equal, grads, pure(of_module))
    renewed = pure(nnx.state(model, FP8State))
    jax.tree.map(np.testing.assert_array_equal, new["_overwrite_with_gradient"], renewed)
    updates = jax.tree.map(lambda g: -value(g), grads, is_leaf=is_scaled)
    after = fp8jax.apply_updates(new, updates)
    assert jax.tree.structure(after) == jax.tree.structure(variables) and float(loss(after, x)) < float(got)


@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_gradient_of_the_parameters_alone(recipe):
    """The new scaling state is lost, and that is said."""
    model, x = fp8jax.transform(Pair(nnx.Rngs(0)), recipe), jnp.ones((5, 36))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        return squares(nnx.merge(graph, params, rest), x)

    with pytest.warns(UserWarning, match="its new amaxes are lost"):
        _, grads, new = fp8jax.value_and_grad(loss)(params, x)
    want = fp8jax.value_and_grad(squares)(model, x)[1]
    assert type(grads) is type(params) and relative(flat(grads), flat(want)) < 0.05
    if recipe == "te":
        with pytest.warns(UserWarning, match="its new amaxes are lost"):
            jax.value_and_grad(loss)(params, jnp.ones((6, 36)))


# Transforms ######################################################################################


class Stack(nnx.Module):
    """Layers made under `nnx.vmap`, run under `nnx.scan` and `nnx.remat`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


@pytest.mark.parametrize("recipe", ["te", long("O3")])
def test_layers_under_vmap_scan_and_remat(recipe):
    model = fp8jax.transform(Stack(nnx.Rngs(0)), recipe)
    x = jax.random.normal(jax.random.key(0), (2, 4, WIDTH))
    scale = model.blocks.up.kernel__fp8_scale[...]
    assert scale.shape == (DEPTH, 3)
    if recipe != "te":
        assert model.blocks.up.kernel.get_value().scale.shape == (DEPTH, 1, 1)
    [row] = [row for row in fp8jax.report(model, x).rows if row.path == "blocks/up"]
    assert row.kernel_shape == (WIDTH, 2 * WIDTH) and row.flops == DEPTH * 2 * 8 * WIDTH * 2 * WIDTH
    optimizer = nnx.Optimizer(model, adamw(3e-3, recipe), wrt=nnx.Param)
    losses = [float(step_of()(model, optimizer, x)) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    new = model.blocks.up.kernel__fp8_scale[...]
    assert (new != scale).all() and len(set(map(float, new[:, 0]))) > 1


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("recipe", ["te", "O2"])
def test_a_vmap_over_stacked_layers_inside_of_the_call(recipe, given):
    """An ensemble is one dot product with a batch axis: the members' gradients are those of the plain model,
    and their states are the same."""

    class Ensemble(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), in_axes=0, out_axes=0)
            self.members = nnx.split_rngs(splits=DEPTH)(make)(rngs)

        def __call__(self, x):
            run = nnx.vmap(lambda member, x: member(x), in_axes=(0, None), out_axes=0)
            return run(self.members, x).mean(0)

    x, plain = jax.random.normal(jax.random.key(0), (8, WIDTH)), Ensemble(nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    model = fp8jax.transform(plain, recipe, inputs=(x,) if given else None)
    exact = nnx.grad(loss)(plain, x)["members"]["kernel"].get_value()
    for _ in range(2):
        grad = fp8jax.value_and_grad(loss)(model, x)[1]["members"]["kernel"].get_value()
        for got, want in zip(value(grad), exact, strict=True):
            assert jnp.linalg.norm(got - want) < 0.15 * jnp.linalg.norm(want)
    history = model.members.kernel__fp8_amax_history[...]
    history = history.reshape(-1, *history.shape[-2:])
    np.testing.assert_array_equal(history, jnp.broadcast_to(history[:1], history.shape))
    assert (history[0, :, :2] > 0).all()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
def test_layers_stacked_along_another_axis(axis, given):
    """`StateAxes({nnx.Param: 1, ...: 0})`: as stacked along the first, with and without example inputs."""
    x, results = jax.random.normal(jax.random.key(0), (8, WIDTH)), []
    for axes in (0, axis, nnx.StateAxes({nnx.Param: axis, ...: 0})):

        class Layers(nnx.Module):
            def __init__(self, rngs, axes=axes):
                every = nnx.StateAxes({nnx.RngState: 0, ...: None})
                make = functools.partial(nnx.Linear, WIDTH, 2 * WIDTH, use_bias=False)
                stack = nnx.vmap(lambda rngs: make(rngs=rngs), in_axes=(every,), out_axes=axes)
                self.layers = nnx.split_rngs(splits=DEPTH)(stack)(rngs)

            def __call__(self, x, axes=axes):
                run = lambda layer, x: x + layer(x)[:, WIDTH:]  # noqa: E731
                return nnx.scan(run, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

        model = fp8jax.transform(Layers(nnx.Rngs(0)), "O2", inputs=(x,) if given else None)
        loss, grads = fp8jax.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        grad = grads["layers"]["kernel"].get_value()
        assert is_scaled(model.layers.kernel.get_value()) and grad.scale.size == DEPTH
        assert fp8jax.report(model, x).rows[0].kernel_shape == (WIDTH, 2 * WIDTH)
        where = axes if isinstance(axes, int) else axis
        results.append((loss, jnp.moveaxis(value(grad), where, 0)))
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], result)


@pytest.mark.long
def test_state_axes_may_leave_the_scaling_state_out():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=DEPTH)(make)(rngs)

        def __call__(self, x, axes):
            scan = nnx.scan(lambda layer, x: layer(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
            return scan(self.layers, x)

    model, x = fp8jax.transform(Layers(nnx.Rngs(0)), "te"), jnp.ones((4, WIDTH))
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    out = model(x, axes)
    np.testing.assert_array_equal(out, model(x, 0))
    np.testing.assert_array_equal(
        out, model(x, nnx.StateAxes({(nnx.Param, fp8jax.adapters.nnx.FP8State): 0, ...: None}))
    )
    assert relative(out, fp8jax.adapters.nnx.dequantize(model)(x, axes)) < 0.1
    optimizer = nnx.Optimizer(model, adamw(3e-3, "te"), wrt=nnx.Param)
    step = nnx.jit(fp8jax.value_and_grad(lambda model, x: jnp.mean(model(x, axes) ** 2)))
    losses = []
    for _ in range(8):
        loss, grads = step(model, x)
        optimizer.update(model, grads)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    history = model.layers.kernel__fp8_amax_history[...]
    assert history.shape[0] == DEPTH and ((history[..., :8] > 0).sum(-1) == 8).all()


def test_several_models_at_once():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(WIDTH, 2 * WIDTH, rngs=nnx.Rngs(key))

    model = fp8jax.transform(make(jax.random.split(jax.random.key(0), 5)), "O2")
    assert model.kernel.get_value().scale.shape == (5, 1, 1)
    x = jax.random.normal(jax.random.key(1), (5, 2, WIDTH))
    out = nnx.jit(nnx.vmap(lambda model, x: model(x)))(model, x)
    np.testing.assert_allclose(
        out, jnp.einsum("nbi,nio->nbo", x, value(model.kernel.get_value())), atol=0.2, rtol=0.2
    )


@pytest.mark.long
def test_split_merge_state_and_a_checkpoint(tmp_path):
    model = nnx.clone(net("O3"))
    fp8jax.value_and_grad(squares)(model, TOKENS)
    graph, params, states, rest = nnx.split(model, nnx.Param, FP8State, ...)
    assert len(nnx.to_flat_state(states)) == 3 * (2 * 6 + 1)
    again = nnx.merge(graph, params, states, rest)
    same = without_dropout(again)(TOKENS)
    np.testing.assert_array_equal(same, without_dropout(model)(TOKENS))
    checkpointer = ocp.StandardCheckpointer()
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    checkpointer.save(tmp_path / "model", pure)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "model", jax.tree.map(ocp.utils.to_shape_dtype_struct, pure))
    fresh = nnx.clone(net("O3"))
    state = nnx.state(fresh, nnx.Not(nnx.RngState))
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(fresh, state)
    np.testing.assert_array_equal(without_dropout(fresh)(TOKENS), same)


def test_evaluation_changes_nothing():
    model = without_dropout(net("te"))
    nnx.jit(fp8jax.value_and_grad(squares))(model, TOKENS)
    model.statistics.use_running_average = True
    before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, (nnx.Param, FP8State))))
    nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS)
    after = jax.tree.leaves(nnx.as_pure(nnx.state(model, (nnx.Param, FP8State))))
    assert len(after) > 20
    assert all(np.array_equal(a, b) for a, b in zip(after, jax.tree.leaves(before), strict=True))


def test_scaled_values_index_as_arrays():
    x = fp8jax.quantize(jnp.arange(6.0).reshape(2, 3), fp8jax.formats.FP16, power_of_two=True)
    assert isinstance(x[...], ScaledArray)
    np.testing.assert_array_equal(x[1], [3, 4, 5])


# Back, and inference #############################################################################


def test_dequantize_without_a_removed_layer():
    model, x = fp8jax.transform(Pair(nnx.Rngs(0)), "te"), jnp.ones((4, 36))
    model.layers = nnx.List([model.layers[0], lambda x: x])
    assert relative(model(x), fp8jax.adapters.nnx.dequantize(model)(x)) < 0.1


@pytest.mark.parametrize("recipe", ["O3", "fp16_amp"])
def test_the_plain_model_comes_back(recipe):
    plain, model = net(), net(recipe)
    again = fp8jax.adapters.nnx.dequantize(model)
    assert nnx.split(again)[0] == nnx.split(plain)[0]
    assert type(again.blocks[0].up) is nnx.Linear
    format = {"te": 0, "O3": 2**-4}.get(recipe, 0)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (again, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=format, atol=0.002 * (format > 0))
    assert type(model.blocks[0].up) is not nnx.Linear


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["te"])
def test_a_frozen_model_gives_the_same(recipe):
    model = without_dropout(net(recipe))
    model.statistics.use_running_average = True
    for _ in range(2):
        frozen = fp8jax.adapters.nnx.freeze(model)
        np.testing.assert_array_equal(frozen(TOKENS), model(TOKENS))
        assert frozen.blocks[0].up.kernel.get_value().data.dtype == jnp.float8_e4m3fn
        fp8jax.value_and_grad(squares)(model, TOKENS)
    stack = fp8jax.transform(Stack(nnx.Rngs(0)), recipe)
    assert fp8jax.adapters.nnx.freeze(stack).blocks.up.kernel.get_value().scale.shape == (DEPTH, 1, 1)


def test_a_class_with_its_bases_name_comes_back():
    Own = type("Linear", (nnx.Linear,), {"__qualname__": "Linear"})
    layers = nnx.List([Own(WIDTH, WIDTH, rngs=nnx.Rngs(0)), Own(WIDTH, WIDTH, rngs=nnx.Rngs(0))])
    model = fp8jax.transform(layers, "te,exclude=0")
    assert all(isinstance(layer, Own) and type(layer) is not Own for layer in model)
    assert [type(layer) for layer in fp8jax.adapters.nnx.dequantize(model)] == [Own, Own]


def test_functions_for_nnx_refuse_others():
    for function in (fp8jax.adapters.nnx.freeze, fp8jax.adapters.nnx.dequantize):
        with pytest.raises(TypeError, match="expected an NNX module; got dict"):
            function({})
    with pytest.raises(TypeError, match="expected a model from fp8jax.transform; got dict"):
        fp8jax.report({})


@dataclasses.dataclass
class Settings:
    """Without a hash, as most dataclasses of settings."""

    factor: float = 2.0


class WithArrays(nnx.Module):
    """Arrays and settings among the attributes, beside variables."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.frequencies = jnp.linspace(0, 1, 64)[None]
        self.tables = nnx.data({"a": jnp.ones((1, 64)), "b": [jnp.ones((1, 64))]})
        self.calls = jnp.zeros(())
        self.settings = Settings()

    def __call__(self, x):
        TRACED.append(1)
        self.calls = self.calls + 1
        return (
            self.settings.factor * self.linear(x * self.frequencies) + self.tables["a"] + self.tables["b"][0]
        )


TRACED = []


@pytest.mark.parametrize("inputs", [None, (jnp.ones((32, 64)),)])
def test_attributes_that_are_arrays(inputs):
    """They are inputs of the call, and a new array is assigned as in the plain module."""
    plain, x = WithArrays(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (32, 64))
    model = fp8jax.transform(plain, "O2", inputs=inputs)
    want, got = plain(x), model(x)
    assert jnp.linalg.norm(got - want) < 0.1 * jnp.linalg.norm(want)
    assert model.calls == plain.calls == 1
    model.tables = nnx.data({"a": 3 * jnp.ones((1, 64)), "b": [jnp.ones((1, 64))]})
    np.testing.assert_allclose(model(x), got + 2, rtol=1e-5, atol=1e-5)
    loss, grads = nnx.jit(fp8jax.value_and_grad(lambda model, x: jnp.square(model(x)).mean()))(model, x)
    assert is_scaled(grads["linear"]["kernel"].get_value()) and jnp.isfinite(loss)
    assert model.calls == 3
    assert [row.fp8 for row in fp8jax.report(model, x).rows] == [True]


def test_attributes_without_a_hash():
    """Calls are traced once, and again after such an attribute has changed in place."""
    model = fp8jax.transform(WithArrays(nnx.Rngs(0)), "te")
    x = jnp.ones((32, 64))
    got = model(x)
    TRACED.clear()
    for _ in range(3):
        model(x)
    assert not TRACED
    model.settings.factor = 4.0
    np.testing.assert_allclose(model(x) - 2, 2 * (got - 2), rtol=1e-5, atol=1e-5)
    model.settings = Settings()
    np.testing.assert_array_equal(model(x), got)
    assert len(TRACED) == 1


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.fc(self.embed(tokens)))


def test_attend_is_in_fp8_where_it_is_asked_for():
    tokens, plain = np.arange(12).reshape(2, 6), Tied(nnx.Rngs(0))
    model = fp8jax.transform(plain, "O2", rules=[fp8jax.Rule("embed", "O2")])
    rows = {row.path: row for row in fp8jax.report(model, tokens).rows}
    assert rows["embed"].fp8 and rows["embed"].flops == 2 * tokens.size * WIDTH * VOCAB
    _, grads = fp8jax.value_and_grad(squares)(model, tokens)
    _, want = nnx.value_and_grad(squares)(plain, tokens)
    assert relative(grads["embed"]["embedding"][...], want["embed"]["embedding"][...]) < 0.1
    assert float(model.embed.embedding__fp8_amax_history[0, 0]) > 0
    assert nnx.split(fp8jax.adapters.nnx.dequantize(model))[0] == nnx.split(plain)[0]
    default = fp8jax.report(fp8jax.transform(plain, "O2"), tokens)
    assert [row.path for row in default.rows if row.fp8] == ["fc"]


# Rules ###########################################################################################


@pytest.mark.long
def test_rules_choose_layers_of_a_module():
    rules = [
        fp8jax.Rule("blocks/0/*"),
        fp8jax.Rule("re:blocks/1/attn/(query|key)", "margin=2"),
        fp8jax.Rule(kind=nnx.Einsum, recipe="weight=FP32,weight_grad=FP32"),
        fp8jax.Rule("head", "te"),
    ]
    model = fp8jax.transform(net(), "O2", rules=rules)
    rows = {row.path: row for row in fp8jax.report(model, TOKENS).rows}
    assert rows["blocks/0/up"].reason == "rule: gemm=BF16" and rows["blocks/1/up"].fp8
    assert rows["head"].fp8 and rows["mix"].fp8
    assert not is_scaled(model.mix.kernel.get_value()) and is_scaled(model.blocks[1].up.kernel.get_value())
    optimizer = nnx.Optimizer(model, adamw(3e-3, "O2"), wrt=nnx.Param)
    losses = [float(step_of()(model, optimizer, TOKENS)) for _ in range(6)]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="fc_9.* matches no layer"):
        fp8jax.transform(net(), "O2", rules=[fp8jax.Rule("fc_9")])


def test_a_pickled_module_is_the_same_module():
    model = nnx.clone(net("O2"))
    model.eval()
    model(TOKENS)  # a call caches programs, which no pickle holds
    loaded, (graph, state) = pickle.loads(pickle.dumps(model)), nnx.split(model)
    merged = nnx.merge(pickle.loads(pickle.dumps(graph)), state)
    for each in (loaded, merged):
        np.testing.assert_array_equal(each(TOKENS), model(TOKENS))
        assert type(each).__name__ == "Net" and isinstance(each, Net)
    assert str(fp8jax.report(loaded, TOKENS)) == str(fp8jax.report(model, TOKENS))
