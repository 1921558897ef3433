"""NNX objects among the other arguments of a loss: random streams, metrics, second modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.comm import Zero
from fp8jax.quantization import is_scaled, value

WIDTH = 32
X = jax.random.normal(jax.random.key(0), (16, WIDTH))


class Noisy(nnx.Module):
    def __init__(self, seed):
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.drop(self.fc(x), rngs=rngs)


class Critic(nnx.Module):
    def __init__(self, seed):
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.0, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return self.norm(self.fc(x))


class Pair(nnx.Module):
    def __init__(self, seed):
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return self.fc(x)


def zero(stage):
    return Zero(jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,)), stage=stage)


GRADIENTS = {
    "whole": lambda: fp8jax.value_and_grad,
    "microbatches": lambda: functools.partial(fp8jax.accumulate_gradients, microbatches=2),
    "zero": lambda: functools.partial(fp8jax.value_and_grad, zero=zero(0)),
    "zero and microbatches": lambda: functools.partial(
        fp8jax.accumulate_gradients, microbatches=2, zero=zero(2)
    ),
}
PARTS = {"whole": 1, "microbatches": 2, "zero": 8, "zero and microbatches": 16}
each_gradient = pytest.mark.parametrize("name", GRADIENTS)


@each_gradient
@pytest.mark.parametrize("given", ["positional", "keyword", "nested"])
def test_random_streams(name, given):
    """They go on, and each microbatch and each device draws numbers of its own."""

    def loss_fn(model, x, *args, more=None):
        rngs = args[0] if args else more["streams"][0] if isinstance(more, dict) else more
        out = model(jnp.ones_like(x), rngs)
        return jnp.mean(out**2), out == 0

    model, rngs = fp8jax.transform(Noisy(0), "te"), nnx.Rngs(dropout=7)
    key = jax.random.key_data(rngs.dropout.key[...])
    grad = GRADIENTS[name]()(loss_fn, has_aux=True)
    args = (rngs,) if given == "positional" else ()
    kwargs = {} if args else {"more": rngs if given == "keyword" else {"streams": (rngs, None)}}
    step = nnx.jit(lambda model, args, kwargs: grad(model, X, *args, **kwargs)[0][1])
    masks = [np.asarray(step(model, args, kwargs)).reshape(PARTS[name], -1) for _ in range(2)]
    assert len({mask.tobytes() for masks_of_step in masks for mask in masks_of_step}) == 2 * PARTS[name]
    assert int(rngs.dropout.count[...]) == 2
    np.testing.assert_array_equal(jax.random.key_data(rngs.dropout.key[...]), key)


@each_gradient
@pytest.mark.parametrize("recipe", ["te", "fp8"])
def test_a_second_module(name, recipe):
    """Its statistics change; the gradient is that of the first module alone, as if the second one were a
    constant."""
    model, critic = (fp8jax.transform(cls(seed), recipe) for seed, cls in enumerate((Pair, Critic)))
    still = nnx.clone(critic)
    loss_fn = lambda model, critic, x: jnp.mean(critic(model(x)) ** 2 + model(x) ** 2)  # noqa: E731
    _, grads = GRADIENTS[name]()(loss_fn)(model, critic, X)
    assert jnp.any(critic.norm.mean[...] != 0)
    assert nnx.split(critic)[0] == nnx.split(still)[0]
    params = (nnx.as_pure(nnx.state(each, nnx.Param)) for each in (critic, still))
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert [path for path, _ in nnx.to_flat_state(grads)] == [("fc", "bias"), ("fc", "kernel")]
    if name == "whole":
        means = critic.norm.mean[...]
        still(model(X))
        np.testing.assert_allclose(means, still.norm.mean[...], rtol=0.1, atol=0.05)


@each_gradient
def test_a_teacher(name):
    """Microbatches and devices do not cut its kernels."""
    student, teacher = fp8jax.transform(Pair(0), "current"), Pair(1)
    loss_fn = lambda student, teacher, x: jnp.mean((student(x) - teacher(x)) ** 2)  # noqa: E731
    loss, grads = GRADIENTS[name]()(loss_fn)(student, teacher, X)
    want, wants = nnx.value_and_grad(loss_fn)(student, teacher, X)
    np.testing.assert_allclose(loss, want, rtol=0.02)
    got, ref = grads["fc"]["kernel"].get_value(), wants["fc"]["kernel"].get_value()
    assert jnp.linalg.norm(value(got) - ref) < 0.1 * jnp.linalg.norm(ref)


def test_one_module_twice():
    """A module among the arguments that is the model itself is trained, too."""
    model = fp8jax.transform(Pair(0), "current")
    twice = fp8jax.value_and_grad(lambda a, b: jnp.mean(b(a(X))))(model, model)[1]
    same = fp8jax.value_and_grad(lambda a: jnp.mean(a(a(X))))(model)[1]
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(twice), nnx.as_pure(same))


@each_gradient
def test_metrics(name):
    """One loss of the whole batch updates a metric. Metrics of parts cannot be merged, and are refused."""

    def loss_fn(model, x, metrics):
        loss = jnp.mean(model(x) ** 2)
        metrics.update(loss=loss)
        return loss

    model, metrics = fp8jax.transform(Pair(0), "fp8"), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    grad = GRADIENTS[name]()(loss_fn)
    if name != "whole":
        with pytest.raises(
            ValueError, match=r"updates no nnx.Metric.*it changes 'loss/count'.*`has_aux=True`"
        ):
            grad(model, X, metrics)
        return
    losses = [float(grad(model, X, metrics)[0]) for _ in range(2)]
    np.testing.assert_allclose(metrics.compute()["loss"], np.mean(losses), rtol=1e-6)


def test_an_assignment_to_a_parameter_of_another_module():
    """The new value would be lost, so it is refused."""

    def loss_fn(model, teacher, x):
        teacher.fc.kernel[...] = 0.9 * teacher.fc.kernel[...]
        return jnp.mean((model(x) - teacher(x)) ** 2)

    with pytest.raises(ValueError, match="changes no parameter; it assigns to a Param of shape"):
        fp8jax.value_and_grad(loss_fn)(fp8jax.transform(Pair(0), "te"), Pair(1), X)


def test_states_and_variables():
    """A variable, or a state of variables, among the arguments."""

    def loss_fn(model, seen, state, x):
        seen[...] += 1
        state["b"][...] *= 2
        return jnp.mean(model(x) ** 2)

    model, seen = fp8jax.transform(Pair(0), "fp8"), nnx.Variable(jnp.zeros(()))
    state = nnx.State({"b": nnx.Variable(jnp.ones(3)), "a": nnx.Variable(jnp.ones(()))})
    _, grads = fp8jax.value_and_grad(loss_fn)(model, seen, state, X)
    assert seen[...] == 1 and state["b"][0] == 2 and is_scaled(grads["fc"]["kernel"].get_value())


def test_statistics_change_no_argument():
    model, critic, rngs = fp8jax.transform(Noisy(0), "te"), Critic(1), nnx.Rngs(dropout=7)
    loss_fn = lambda model, critic, x, rngs: jnp.mean(critic(model(x, rngs)) ** 2)  # noqa: E731
    fp8jax.statistics(loss_fn, ["te"])(model, critic, X, rngs=rngs)
    assert not jnp.any(critic.norm.mean[...]) and int(rngs.dropout.count[...]) == 0
