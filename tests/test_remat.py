"""Gradient checkpointing of a model's blocks: the same step from fewer residuals."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import fp8jax
from fp8jax import comm
from fp8jax.dot import through_fp8

# No side of a kernel is so small that it stays wide by default.
MODEL, WIDTH = 32, 128  # of what goes from block to block, and inside of one
X = jax.random.normal(jax.random.key(5), (256, MODEL))
KEEPS = ("full", "fp8", "dots")


class Block(nn.Module):
    """What a block may have: statistics, dropout, intermediates, arguments that are no arrays."""

    @nn.compact
    def __call__(self, x, train: bool, *, scale=None):
        y = nn.gelu(nn.Dense(WIDTH, name="up")(nn.LayerNorm()(x)))
        y = nn.BatchNorm(use_running_average=not train)(y)
        self.sow("intermediates", "mean", jnp.mean(y))
        y = nn.Dropout(0.5, deterministic=not train)(y)
        return x + nn.Dense(MODEL, name="down")(y) * scale, "and a string"


class Listed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for i in range(2):
            x, text = Block(name=f"h_{i}")(x, train, scale=2.0)
            assert text == "and a string"
        return nn.Dense(4, name="lm_head")(x)


class Twice(nn.Module):
    """One block, called twice."""

    @nn.compact
    def __call__(self, x, train=True):
        block = Block(name="block")
        for _ in range(2):
            x, _ = block(x, train, scale=0.5)
        return x


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.gelu(nn.Dense(WIDTH, name="up")(nn.LayerNorm()(x)))
        y = nn.Dropout(0.5, deterministic=not train)(y)
        return x + nn.Dense(MODEL, name="down")(y), None


REMAT = functools.partial(nn.remat, static_argnums=(2,))


class Scanned(nn.Module):
    wrap: object = staticmethod(lambda block: block)

    @nn.compact
    def __call__(self, x, train=True):
        rngs = {"params": True, "dropout": True}
        scanned = nn.scan(
            self.wrap(Body), variable_axes={"params": 0}, split_rngs=rngs, length=3, in_axes=nn.broadcast
        )
        return scanned(name="layers")(x, train)[0]


@functools.cache
def variables_of(module):
    model = fp8jax.transform(module, "te")
    return model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)


def loss_of(module, keep, recipe="te", **options):
    """The loss and what else changes, and the trainable and other variables."""
    model = fp8jax.transform(module, recipe, gradient_checkpointing=keep, **options)
    variables = {**variables_of(module)}
    stats = {name: variables.pop(name) for name in ("batch_stats", "intermediates") if name in variables}

    def loss(variables):
        collections = ["batch_stats", "intermediates"]
        rngs = {"dropout": jax.random.key(3)}
        out, new = model.apply({**variables, **stats}, X, rngs=rngs, mutable=collections)
        return jnp.mean(out**2), new

    return loss, variables


@functools.cache
def step_of(module, keep):
    loss, variables = loss_of(module, keep)
    return jax.jit(fp8jax.value_and_grad(loss, has_aux=True))(variables)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    # What is computed twice may be fused in another way: a rounding of float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, want)


long = functools.partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "module, keep",
    [
        (Listed(), "fp8"),
        *(long(Listed(), keep) for keep in ("full", "dots")),
        *(long(Twice(), keep) for keep in KEEPS),
        (Scanned(), "full"),
        *(long(Scanned(), keep) for keep in ("fp8", "dots")),
    ],
)
def test_loss_gradients_states_and_statistics_are_the_same(module, keep):
    assert_same(step_of(module, keep), step_of(module, "none"))


@functools.cache
def kept_bytes(module, keep):
    """Bytes of the residuals."""
    loss, variables = loss_of(module, keep)
    kept = jax.eval_shape(lambda variables: jax.vjp(loss, variables, has_aux=True)[1], variables)
    sizes = (math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in jax.tree.leaves(kept))
    return sum(sizes)


@pytest.mark.filterwarnings("ignore:a gradient is taken with respect to weights")
@pytest.mark.parametrize("module", [Listed(), Scanned()])
def test_each_keeps_less_than_the_next(module):
    full, fp8, dots, none = (kept_bytes(module, keep) for keep in (*KEEPS, "none"))
    assert full < fp8 < dots < none
    blocks, tokens = (2 if isinstance(module, Listed) else 3), len(X)
    # The codes of both dots' inputs and kernels.
    assert fp8 - full == pytest.approx(blocks * (tokens * (MODEL + WIDTH) + 2 * MODEL * WIDTH), rel=0.01)
    # The first dot's output in float32. The second one's output is the input of the next block.
    assert dots - full == blocks * tokens * WIDTH * 4


@functools.cache
def casts(module, keep):
    """Casts to FP8 in the loss and its gradient, a scan's body counted once."""
    loss, variables = loss_of(module, keep)
    jaxpr = jax.make_jaxpr(fp8jax.value_and_grad(loss, has_aux=True))(variables).jaxpr
    found = jaxprs.equations(jaxpr, "convert_element_type", "default")
    return sum(str(eqn.outvars[0].aval.dtype) in jaxprs.FLOAT8 for eqn in found)


@pytest.mark.parametrize("module", [Listed(), Scanned()])
def test_with_fp8_no_operand_is_cast_twice(module):
    blocks = 2 if isinstance(module, Listed) else 1
    none = casts(module, "none")
    assert casts(module, "fp8") == none
    assert casts(module, "full") == none + 4 * blocks  # both operands of both dots


# Which are blocks ################################################################################


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(MODEL)(x)


class Half(nn.Module):
    """An encoder, whose two kinds of parts repeat only with it."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Sequential([Attention(), nn.relu, nn.Dense(MODEL)], name=f"layer_{i}")(x)
        return x


class Single(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(Attention(name="attn")(x))


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Half(name="encoder")(nn.Dense(MODEL)(x))


@pytest.mark.parametrize(
    "module, names, found",
    [
        (Listed(), None, "h_0 (Block), h_1 (Block)"),
        (Scanned(), None, "layers (Body, scanned)"),
        (Twice(), None, "block (Block)"),
        (Nested(), None, "encoder/layer_0 (Sequential), encoder/layer_1 (Sequential)"),
        (Nested(), "encoder", "encoder (Half)"),
        (Nested(), ["Attention"], "encoder/Attention_0 (Attention), encoder/Attention_1 (Attention)"),
        (Listed(), ["re:.*_1"], "h_1 (Block)"),
        (Scanned(), ["Body"], "layers (Body, scanned)"),
    ],
)
def test_blocks_are_found(module, names, found):
    model = fp8jax.transform(module, "te", gradient_checkpointing="full", checkpoint_blocks=names)
    report = str(model.report(X, rngs={"dropout": jax.random.key(0)}))
    assert report.endswith(f"gradient_checkpointing=full: of {found}")


@pytest.mark.parametrize(
    "module, options, message",
    [
        (
            Single(),
            {},
            r"name some with `checkpoint_blocks`. The modules that hold layers are attn \(Attention\)",
        ),
        (
            Listed(),
            {"checkpoint_blocks": ["Blok"]},
            r"'Blok' matches no module.* h_0 \(Block\), h_1 \(Block\)",
        ),
    ],
)
def test_models_without_blocks_or_with_remat_are_refused(module, options, message):
    model = fp8jax.transform(module, "te", gradient_checkpointing="full", **options)
    with pytest.raises(ValueError, match=message):
        model.report(X, rngs={"dropout": jax.random.key(0)})
    if module == Scanned(REMAT):
        with pytest.raises(ValueError, match=message):
            model.apply(variables_of(module), X, rngs={"dropout": jax.random.key(0)})


@pytest.mark.parametrize(
    "recipe, options, message",
    [
        ("te", {"gradient_checkpointing": "all"}, "expected none, full, dots, .*fp8; got 'all'"),
        ("te", {"checkpoint_blocks": ["Block"]}, "expected with `gradient_checkpointing`"),
        ("bf16", {"gradient_checkpointing": "fp8"}, "gemm=BF16 has none; take dots or full"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(recipe, options, message):
    with pytest.raises(ValueError, match=message):
        fp8jax.transform(Listed(), recipe, **options)
    with pytest.raises(TypeError, match="`checkpoint_blocks`: expected names"):
        fp8jax.transform(Listed(), "te", gradient_checkpointing="full", checkpoint_blocks=[Block])


def test_a_rule_with_fp8_is_enough_to_keep_its_operands():
    rules = [fp8jax.Rule("up", "te")]
    model = fp8jax.transform(Listed(), "bf16", rules=rules, gradient_checkpointing="fp8")
    assert "gradient_checkpointing=fp8" in str(model.report(X, False))


def test_intermediates_are_captured_once():
    model = fp8jax.transform(Listed(), "te", gradient_checkpointing="full")
    _, new = model.apply(
        variables_of(Listed()), X, False, mutable=["intermediates"], capture_intermediates=True
    )
    [(_, text)] = new["intermediates"]["h_0"]["__call__"]
    assert text == "and a string" and len(new["intermediates"]["h_0"]["up"]["__call__"]) == 1


# NNX #############################################################################################


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.up = nnx.LayerNorm(MODEL, rngs=rngs), nnx.Linear(MODEL, WIDTH, rngs=rngs)
        self.stats, self.down = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, MODEL, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, train: bool, *, scale=None):
        y = self.stats(nnx.gelu(self.up(self.norm(x))), use_running_average=not train)
        self.sow(nnx.Intermediate, "mean", jnp.mean(y))
        return x + self.down(self.drop(y, deterministic=not train)) * scale, "and a string"


class NnxListed(nnx.Module):
    def __init__(self, rngs, block=NnxBlock):
        self.blocks = nnx.List([block(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(MODEL, 4, rngs=rngs)

    def __call__(self, x, train=True):
        for block in self.blocks:
            x, text = block(x, train, scale=2.0)
            assert text == "and a string"
        return self.lm_head(x)


class NnxScanned(nnx.Module):
    """Layers made under `nnx.vmap`, run under `nnx.scan`."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: NnxBlock(rngs), in_axes=0, out_axes=0)
        self.layers = make(nnx.Rngs(0).fork(split=3))

    def __call__(self, x, train=True):
        axes = nnx.StateAxes({nnx.Intermediate: 0, ...: 0})
        run = nnx.scan(
            lambda block, x: block(x, train, scale=1.0)[0], in_axes=(axes, nnx.Carry), out_axes=nnx.Carry
        )
        return run(self.layers, x)


NNX = {"listed": NnxListed, "scanned": NnxScanned}


@functools.cache
def nnx_step_of(name, keep):
    model = fp8jax.transform(NNX[name](nnx.Rngs(0)), "te", gradient_checkpointing=keep)

    @nnx.jit
    def step(model):
        return fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)

    loss, grads = step(model)
    state = nnx.state(model, nnx.Not(nnx.RngKey))
    return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(state), str(fp8jax.report(model, X))


@pytest.mark.parametrize(
    "name, keep, found",
    [
        ("listed", "full", "blocks/0 (NnxBlock), blocks/1 (NnxBlock)"),
        *(long("listed", keep, "blocks/0 (NnxBlock), blocks/1 (NnxBlock)") for keep in ("fp8", "dots")),
        *(long("scanned", keep, "layers (NnxBlock, scanned)") for keep in KEEPS),
    ],
)
def test_nnx_gives_the_same(name, keep, found):
    *got, report = nnx_step_of(name, keep)
    assert report.endswith(f"gradient_checkpointing={keep}: of {found}")
    assert_same(got, list(nnx_step_of(name, "none")[:-1]))


def nnx_casts(keep):
    graph, state = nnx.split(fp8jax.transform(NnxListed(nnx.Rngs(0)), "te", gradient_checkpointing=keep))
    gradient = fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))
    jaxpr = jax.make_jaxpr(lambda state: jax.tree.leaves(gradient(nnx.merge(graph, state))))(state).jaxpr
    found = jaxprs.equations(jaxpr, "convert_element_type", "default")
    return sum(str(eqn.outvars[0].aval.dtype) in jaxprs.FLOAT8 for eqn in found)


def test_nnx_casts_as_linen_does():
    none = nnx_casts("none")
    assert (nnx_casts("fp8"), nnx_casts("full")) == (none, none + 8)


def test_nnx_modules_without_blocks_are_refused():
    of = functools.partial(fp8jax.transform, recipe="te", gradient_checkpointing="full")
    with pytest.raises(ValueError, match="no module that holds layers repeats"):
        of(nnx.Sequential(nnx.Linear(MODEL, MODEL, rngs=nnx.Rngs(0))))(X)
    with pytest.raises(ValueError, match="'Blok' matches no module"):
        of(NnxListed(nnx.Rngs(0)), checkpoint_blocks=["Blok"])(X)


def test_a_dequantized_nnx_module_is_plain():
    model = fp8jax.adapters.nnx.dequantize(
        fp8jax.transform(NnxListed(nnx.Rngs(0)), "te", gradient_checkpointing="full")
    )
    assert [type(block) for block in model.blocks] == [NnxBlock, NnxBlock]
    assert not [name for name in vars(model.blocks[0]) if "fp8" in name]


# Experts ##########################################################################################

EXPERTS, LAYERS = 4, 3


def experts(params, x):
    """Scanned layers of experts, one for each token."""

    def layer(x, w):
        choice = jnp.argmax(x @ w["router"], -1)
        order, sizes = jnp.argsort(choice), jnp.bincount(choice, length=EXPERTS).astype(jnp.int32)
        y = nn.gelu(jax.lax.ragged_dot(x[order], w["up"], sizes))
        return x + jax.lax.ragged_dot(y, w["down"], sizes)[jnp.argsort(order)], None

    return jax.lax.scan(layer, x, params)[0]


@pytest.mark.parametrize("recipe", ["bf16", "te", "te,scaling=current", "block"])
def test_outputs_of_experts_are_saved_in_fp8(recipe):
    """A byte for each entry and for each 128, or row of fewer, instead of four."""
    random = np.random.default_rng(0)
    shapes = {"router": (MODEL, EXPERTS), "up": (EXPERTS, MODEL, WIDTH), "down": (EXPERTS, WIDTH, MODEL)}
    params = {
        name: jnp.float32(random.normal(size=(LAYERS, *shape)) / shape[-2] ** 0.5)
        for name, shape in shapes.items()
    }
    sizes, losses = {}, {}
    for keep in ("dots", "dots_fp8"):
        model = fp8jax.transform(experts, recipe, gradient_checkpointing=keep)
        variables = model.init(params, X)
        loss = lambda variables, model=model: jnp.mean(model.apply(variables, X) ** 2)  # noqa: E731
        kept = jax.eval_shape(lambda variables, loss=loss: jax.vjp(loss, variables)[1], variables)
        leaves = jax.tree.leaves(kept)
        sizes[keep] = sum(math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves)
        losses[keep] = float(loss(variables))
        assert str(model.report(params, X)).endswith(f"={keep}: of the bodies of its scans")
    rows = len(X)
    floats, bytes_ = 4 * rows * WIDTH, rows * (WIDTH + 1)  # the router's outputs stay float32
    assert sizes["dots"] - sizes["dots_fp8"] == LAYERS * (floats - bytes_)
    assert losses["dots_fp8"] == pytest.approx(losses["dots"], rel=0.03)
    assert losses["dots_fp8"] != losses["dots"]


class Routed(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        logits = nn.Dense(MODEL, name="router")(x)
        self.sow("intermediates", "logits", logits)
        return x + nn.Dense(MODEL, name="up")(x) * nn.softmax(logits), None


@pytest.mark.parametrize("recipe", ["bf16", "te,scaling=current"])
def test_outputs_of_layers_that_the_recipe_leaves_out_are_not_rounded(recipe):
    """A router's logits are saved as they are, and its dot does not run twice."""
    layers = nn.scan(
        Routed, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=2
    )
    found, gemms = {}, {}
    for keep in ("none", "dots_fp8"):
        model = fp8jax.transform(layers(), recipe, gradient_checkpointing=keep)
        variables = model.init(jax.random.key(0), X)
        params = {name: tree for name, tree in variables.items() if name != "intermediates"}
        (out, _), kept = model.apply(params, X, mutable=["intermediates"])
        found[keep] = np.asarray(kept["intermediates"]["logits"][0][0]), np.asarray(out)
        loss = lambda params, model=model: jnp.mean(model.apply(params, X)[0] ** 2)  # noqa: E731
        jaxpr = jax.make_jaxpr(fp8jax.value_and_grad(loss))(params).jaxpr
        gemms[keep] = len(jaxprs.equations(jaxpr, "dot_general", "default"))
    np.testing.assert_array_equal(found["dots_fp8"][0], found["none"][0])
    assert (found["dots_fp8"][1] != found["none"][1]).any() and gemms["dots_fp8"] == gemms["none"]


def test_a_shard_map_in_a_block_is_refused_for_fp8_outputs():
    mesh, rows = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")

    def body(x, w):
        f = jax.shard_map(
            lambda x, w: x + jnp.tanh(x @ w), mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
        )
        return f(x, w), None

    stacked = lambda params, x: jax.lax.scan(body, x, params["w"])[0]  # noqa: E731
    params = {"w": jnp.ones((2, MODEL, MODEL)) / MODEL}
    for keep in ("dots_fp8", "dots_fp8_inputs"):
        model = fp8jax.transform(stacked, "te,scaling=current", gradient_checkpointing=keep)
        with pytest.raises(ValueError, match=f"expected no jax.shard_map around 'w' with {keep}"):
            model.init(params, X)
    fp8jax.transform(stacked, "te,scaling=current", gradient_checkpointing="dots").init(params, X)


# Remat of the model's own #########################################################################


class Inside(nn.Module):
    """A block whose own code has remat."""

    @nn.compact
    def __call__(self, x, train):
        up = nn.remat(lambda module, x: nn.gelu(nn.Dense(WIDTH, name="up")(nn.LayerNorm()(x))))
        y = nn.Dropout(0.5, deterministic=not train)(up(self, x))
        return x + nn.Dense(MODEL, name="down")(y), None


class Pairs(Scanned):
    """Remat around the whole scan, and around its body."""

    @nn.compact
    def __call__(self, x, train=True):
        rngs = {"params": True, "dropout": True}
        scanned = nn.scan(
            REMAT(Body), variable_axes={"params": 0}, split_rngs=rngs, length=3, in_axes=nn.broadcast
        )
        return REMAT(scanned)(name="layers")(x, train)[0]


OWN = {
    "around": Scanned(REMAT),
    "by a policy": Scanned(functools.partial(REMAT, policy=jax.checkpoint_policies.dots_saveable)),
    "inside": Scanned(lambda _: Inside),
    "twice": Pairs(),
}


@pytest.mark.parametrize("keep", ["full", "dots_fp8"])
@pytest.mark.parametrize("own", OWN)
def test_our_remat_takes_the_place_of_the_models_own(own, keep):
    """The same residuals, casts and numbers as of the model without remat, and the report says it."""
    model = fp8jax.transform(OWN[own], "te", gradient_checkpointing=keep)
    report = str(model.report(X, rngs={"dropout": jax.random.key(0)}))
    assert report.endswith("(Inside, scanned), in place of the model's own remat") or report.endswith(
        "(Body, scanned), in place of the model's own remat"
    )
    assert kept_bytes(OWN[own], keep) == kept_bytes(Scanned(), keep)
    assert casts(OWN[own], keep) == casts(Scanned(), keep)
    assert_same(step_of(OWN[own], keep), step_of(Scanned(), keep))


def nnx_own(around):
    class Block(NnxBlock):
        @nnx.remat
        def rise(self, x):
            return self.up(x)

        def __call__(self, x, train, *, scale):
            return x + self.down(self.rise(x)), "and a string"

    class Plain(NnxBlock):
        def __call__(self, x, train, *, scale):
            return x + self.down(self.up(x)), "and a string"

    class Around(NnxListed):
        def __call__(self, x):
            for block in self.blocks:
                x = nnx.remat(lambda block, x: block(x, True, scale=1.0)[0])(block, x)
            return x

    class Listed(NnxListed):
        def __call__(self, x):
            for block in self.blocks:
                x = block(x, True, scale=1.0)[0]
            return x

    return Around(nnx.Rngs(0), Plain) if around else Listed(nnx.Rngs(0), Block), Listed(nnx.Rngs(0), Plain)


@pytest.mark.parametrize("around", [True, False])
def test_our_remat_takes_the_place_of_an_nnx_models_own(around):
    grads = []
    for module in nnx_own(around):
        graph, state = nnx.split(fp8jax.transform(module, "te", gradient_checkpointing="full"))
        gradient = fp8jax.value_and_grad(lambda model: jnp.mean(model(X) ** 2))
        step = lambda state: jax.tree.leaves(gradient(nnx.merge(graph, state)))  # noqa: B023, E731
        found = jaxprs.equations(jax.make_jaxpr(step)(state).jaxpr, "convert_element_type", "default")
        counted = sum(str(eqn.outvars[0].aval.dtype) in jaxprs.FLOAT8 for eqn in found)
        grads.append((counted, jax.jit(step)(state)))
    assert_same(*grads)


# Around ##########################################################################################


@pytest.mark.long
def test_on_two_devices_with_zero():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def gradient(keep):
        model = fp8jax.transform(Scanned(), "O2", gradient_checkpointing=keep)
        zero = comm.Zero(mesh, "O2", 2)
        variables = zero.place(model.init(jax.random.key(0), X, False))
        loss_fn = lambda variables, x: jnp.mean(model.apply(variables, x, False) ** 2)  # noqa: E731
        return jax.jit(fp8jax.value_and_grad(loss_fn, zero=zero))(variables, X)

    of = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)  # noqa: E731
    assert_same(of(gradient("fp8")), of(gradient("none")))


# Outputs of dots in FP8 ###########################################################################


def hostile_rows():
    random = np.random.default_rng(0)
    x = np.float32(random.normal(size=(64, 256)) * 10.0 ** random.uniform(-30, 30, (64, 1)))
    x[::5] = 0
    x[1::5, 7] *= 1e5
    x[2::5] = 2.0**-126
    return np.clip(x, -1e35, 1e35)


def restated(x, group=128):
    """The rounding by its formula: the least power of two with which no entry of a group is above 448."""
    groups = x.reshape(*x.shape[:-1], -1, group)
    amax = np.abs(groups.astype(np.float64)).max(-1, keepdims=True)
    scale = np.where(amax > 0, 2.0 ** np.ceil(np.log2(np.maximum(amax, 1e-300) / 448)), 1)
    scale = np.maximum(scale, 2.0**-126)
    codes = np.float32(groups / scale).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_outputs_through_fp8(dtype):
    x = jnp.asarray(hostile_rows(), dtype)
    got = np.asarray(jax.jit(through_fp8)(x), np.float64)
    np.testing.assert_array_equal(got, restated(np.asarray(x, np.float32)).astype(dtype).astype(np.float64))
    narrow = np.asarray(x[:, :40], np.float32)
    want = restated(narrow, 40).astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(np.asarray(through_fp8(x[:, :40]), np.float64), want)


def test_outputs_that_are_not_finite():
    x = jnp.ones((2, 256)).at[0, 3].set(jnp.inf).at[1, 200].set(jnp.nan)
    got = np.isfinite(through_fp8(x))
    np.testing.assert_array_equal(got, np.repeat([[False, True], [True, False]], 128, 1))


def test_the_gradient_passes_straight_through():
    x, grad = jnp.asarray(hostile_rows()), jnp.ones((64, 256))
    np.testing.assert_array_equal(jax.vjp(through_fp8, x)[1](grad)[0], grad)


@functools.partial(
    jax.jit, inline=True, static_argnums=2, static_argnames=("precision", "preferred_element_type")
)
def rounded_dot(lhs, rhs, numbers, precision=None, preferred_element_type=None):
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    return through_fp8(jax.lax.dot_general(lhs, rhs, numbers, **options))


class ByHand(nn.Module):
    """Blocks that say what "dots_fp8" does."""

    has_inputs: bool = False
    dot_general: object = rounded_dot

    @nn.compact
    def __call__(self, x, train=True):
        for i in range(2):
            x = HandBlock(self.dot_general, self.has_inputs, name=f"h_{i}")(x)
        return nn.Dense(4, name="lm_head")(x)


class HandBlock(nn.Module):
    dot_general: object
    has_inputs: bool

    @nn.compact
    def __call__(self, x):
        x = through_fp8(x) if self.has_inputs else x
        y = nn.gelu(nn.Dense(WIDTH, name="up", dot_general=self.dot_general)(nn.LayerNorm()(x)))
        return x + nn.Dense(MODEL, name="down", dot_general=self.dot_general)(y)


def plain_blocks(has_inputs=False):
    return ByHand(has_inputs=False, dot_general=jax.lax.dot_general)


@pytest.mark.parametrize("recipe", ["te", "O2", long("bf16"), long("block")])
@pytest.mark.parametrize("keep", ["dots_fp8", "dots_fp8_inputs"])
def test_blocks_are_those_written_by_hand(recipe, keep):
    """The first block's input is the model's input, which is saved as it is."""

    def step(module, keep):
        model = fp8jax.transform(module, recipe, gradient_checkpointing=keep)
        variables = fp8jax.transform(plain_blocks(), recipe).init(jax.random.key(0), X)
        loss_fn = lambda variables: jnp.mean(model.apply(variables, through_first(X)) ** 2)  # noqa: E731
        return jax.jit(fp8jax.value_and_grad(loss_fn))(variables)

    through_first = through_fp8 if keep == "dots_fp8_inputs" else lambda x: x
    got, want = step(plain_blocks(), keep), step(ByHand(keep == "dots_fp8_inputs"), "none")
    of = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)  # noqa: E731
    assert_same(of(got), of(want))
    plain = step(plain_blocks(), "none")
    assert abs(float(plain[0]) - float(got[0])) > 1e-5 * float(plain[0])


@pytest.mark.filterwarnings("ignore:a gradient is taken with respect to weights")
@pytest.mark.parametrize("module", [Listed(), Scanned()])
def test_fp8_outputs_take_a_byte(module):
    blocks, tokens = (2 if isinstance(module, Listed) else 3), len(X)
    full, outputs, inputs = (kept_bytes(module, keep) for keep in ("full", "dots_fp8", "dots_fp8_inputs"))
    # The codes of the outputs of the first dots, and an exponent for each row. The second one's output is in
    # the next block's input.
    assert outputs - full == blocks * tokens * (WIDTH + 1)
    # The input of a block: float32, or codes and an exponent. The first one is the model's.
    streams = blocks - isinstance(module, Listed)
    assert outputs - inputs == streams * tokens * (4 * MODEL - MODEL - 1)


@pytest.mark.parametrize("module", [Listed(), Scanned()])
@pytest.mark.parametrize("keep", ["dots_fp8", "dots_fp8_inputs"])
def test_fp8_outputs_cost_no_gemm(module, keep):
    def gemms(keep):
        loss, variables = loss_of(module, keep)
        jaxpr = jax.make_jaxpr(fp8jax.value_and_grad(loss, has_aux=True))(variables).jaxpr
        return len(jaxprs.equations(jaxpr, "dot_general", "default"))

    assert gemms(keep) == gemms("none") < gemms("full")


@pytest.mark.parametrize("name", ["listed", long("scanned")])
def test_nnx_with_fp8_outputs(name):
    loss, grads, *_, report = nnx_step_of(name, "dots_fp8")
    plain, wanted, *_ = nnx_step_of(name, "none")
    assert "gradient_checkpointing=dots_fp8: of" in report
    np.testing.assert_allclose(loss, plain, rtol=0.05)
    norm = lambda tree: float(optax.global_norm(tree))  # noqa: E731
    assert 0 < norm(jax.tree.map(jnp.subtract, grads, wanted)) < 0.2 * norm(wanted)


def test_a_function_with_fp8_outputs():
    """The blocks are the bodies of its scans."""

    def fn(params, x):
        body = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jax.lax.scan(body, x, params)[0]

    keys = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(keys[0], (3, MODEL, WIDTH)) / 6,
        "down": jax.random.normal(keys[1], (3, WIDTH, MODEL)) / 11,
    }

    def saved(keep):
        model = fp8jax.transform(fn, "te,scaling=current", gradient_checkpointing=keep)
        variables = model.init(params, X)
        loss_fn = lambda variables: jnp.mean(model.apply(variables, X) ** 2)  # noqa: E731
        kept = jax.eval_shape(lambda variables: jax.vjp(loss_fn, variables)[1], variables)
        size = sum(
            math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in jax.tree.leaves(kept)
        )
        return size, float(loss_fn(variables))

    (full, loss), (outputs, rounded), (inputs, _) = map(saved, ("full", "dots_fp8", "dots_fp8_inputs"))
    assert outputs - full == 3 * len(X) * (WIDTH + 1) and outputs - inputs == 3 * len(X) * (3 * MODEL - 1)
    np.testing.assert_allclose(loss, rounded, rtol=0.02)
