"""What stands around a training: checkpoints of every level, from level to level, TrainState, averages."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state

import fp8jax
from fp8jax.optim import adamw, clip_by_global_norm, moments, with_masters
from fp8jax.quantization import is_scaled, value
from fp8jax.recipe import PRESETS
from fp8jax.variables import PARAMS

pytestmark = pytest.mark.usefixtures("optimized")

WIDTH, OUT = 64, 32

X = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)
Y = np.tanh(X[:, :OUT])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(OUT, name="out")(scan(name="blocks")(x, None)[0])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.LayerNorm()(x + nn.gelu(nn.Dense(WIDTH, name="fc")(x))), None


class Level:
    """A model, an optimizer and a compiled step under a recipe."""

    def __init__(self, recipe):
        self.model = fp8jax.transform(Net(), recipe)
        self.tx = optax.chain(clip_by_global_norm(1.0), adamw(3e-3, recipe))
        self.variables = jax.jit(self.model.init)(jax.random.key(0), X)
        self.opt_state = jax.jit(self.tx.init)(self.variables)
        self.grad = jax.jit(fp8jax.value_and_grad(self.loss))
        self.step = jax.jit(self._step)

    def loss(self, variables):
        return jnp.mean((self.model.apply(variables, X) - Y) ** 2)

    def _step(self, variables, opt_state):
        loss, grads, variables = fp8jax.value_and_grad(self.loss)(variables)
        updates, opt_state = self.tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    def train(self, create, steps):
        """A TrainState after some steps."""

        @jax.jit
        def step(state):
            _, grads, variables = fp8jax.value_and_grad(self.loss)(state.params)
            if isinstance(state, fp8jax.TrainState):
                return state.apply_gradients(grads=grads, variables=variables)
            name = "_overwrite_with_gradient"
            return state.apply_gradients(grads={PARAMS: grads, name: variables[name]})

        state = create(apply_fn=self.model.apply, params=self.variables, tx=self.tx)
        for _ in range(steps):
            state = step(state)
        return state

    def run(self, steps):
        variables, opt_state = self.variables, self.opt_state
        for _ in range(steps):
            variables, opt_state, loss = self.step(variables, opt_state)
        return variables, opt_state, loss


@functools.cache
def level(recipe):
    return Level(recipe)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# One for each kind of state that there is.
KINDS = ["fp16_amp", "te", "O2", "O3"]


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_orbax_keeps_every_level_to_the_bit(name, tmp_path):
    trained = level(name)
    variables, opt_state, _ = trained.run(3)
    kept = {"variables": variables, "opt_state": opt_state}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.StandardSave(kept))
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, kept)
        back = checkpointer.restore(tmp_path / "state", args=ocp.args.StandardRestore(like))
    assert jax.tree.structure(back) == jax.tree.structure(kept) and bits(back) == bits(kept)
    # And so the next step is the same.
    assert bits(trained.step(back["variables"], back["opt_state"])) == bits(
        trained.step(variables, opt_state)
    )


# By how much a weight may change on its way into a format, relative to itself.
ROUNDING = {"FP32": 0.0, "FP16": 2.0**-11, "E4M3": 2.0**-4}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("fp16_amp", "te", "O3")), "O2"]
)
def test_plain_checkpoints_go_into_a_level_and_back(name):
    trained = level(name)
    plain = jax.jit(Net().init)(jax.random.key(1), X)
    variables = trained.model.quantize(plain, like=trained.variables)
    assert jax.tree.structure(variables) == jax.tree.structure(trained.variables)
    back = trained.model.dequantize(variables)
    assert jax.tree.structure(back) == jax.tree.structure(plain)
    rounding = ROUNDING[PRESETS[name].weight]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding * 2.0**-9), back, plain
    )
    loss = float(jax.jit(trained.loss)(variables))
    np.testing.assert_allclose(loss, np.mean((jax.jit(Net().apply)(plain, X) - Y) ** 2), rtol=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    "source, target",
    [("te", "O3"), ("O2", "te"), ("O3", "O2")],
)
def test_a_run_goes_on_at_another_level(source, target):
    """What is lost: weights are rounded to the target's format, scaling states start again; moments too are
    the optimizer's to convert, and start again here."""
    before, after = level(source), level(target)
    variables, opt_state, loss = before.run(60)
    plain = before.model.dequantize(variables)
    moved = after.model.quantize(plain, like=after.variables)
    state = after.tx.init(moved)
    if PRESETS[target].master_weight != "-":
        state = with_masters(state, plain)
    for _ in range(30):
        moved, state, new_loss = after.step(moved, state)
    assert float(new_loss) < float(loss)


# TrainState ######################################################################################


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("fp16_amp", "te", "O3")), "O2"]
)
def test_a_train_state_does_what_a_loop_does(name):
    trained = level(name)
    state = trained.train(fp8jax.TrainState.create, 2)
    variables, opt_state, _ = trained.run(2)
    assert isinstance(state, train_state.TrainState) and int(state.step) == 2
    assert bits(state.params) == bits(variables) and bits(state.opt_state) == bits(opt_state)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("te", "O3")), "O2"]
)
def test_flaxs_own_train_state_does_too(name):
    trained = level(name)
    state = trained.train(train_state.TrainState.create, 2)
    variables, _, _ = trained.run(2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.params, variables)


# Around ##########################################################################################


def test_an_average_of_weights_is_one_of_their_values():
    trained = level("O2")
    variables, opt_state, _ = trained.run(1)
    average = trained.model.dequantize(variables)[PARAMS]
    for _ in range(3):
        variables, opt_state, _ = trained.step(variables, opt_state)
        average = optax.incremental_update(trained.model.dequantize(variables)[PARAMS], average, 0.1)
    again = trained.model.quantize({PARAMS: average}, like=variables)
    # FP16 weights keep 11 bits.
    rounded = trained.model.dequantize(again)[PARAMS]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-11, atol=1e-7), rounded, average)
    assert float(jax.jit(trained.loss)(again)) < 2


def test_every_parameter_has_a_home():
    """Kernels of matched layers in the weight format; norms and biases float32; all with narrow moments."""
    trained = level("O2")
    for tree, wide, narrow in (
        (trained.variables[PARAMS], "float32", "float16"),
        (moments(trained.opt_state)[0], "float8_e4m3fn", "float8_e4m3fn"),
        (moments(trained.opt_state)[1], "float16", "float16"),
    ):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_scaled)[0]:
            is_kernel = path[-1].key == "kernel"
            data = leaf.data if is_scaled(leaf) else leaf
            assert str(data.dtype) == (narrow if is_kernel else wide), path
    assert all(
        np.isfinite(value(leaf)).all() for leaf in jax.tree.leaves(trained.variables, is_leaf=is_scaled)
    )
