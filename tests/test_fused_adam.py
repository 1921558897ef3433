"""One fused Adam step of many tensors: on several devices, under vmap, with scales of any layout."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8jax
from fp8jax import Recipe, formats, quantize
from fp8jax.inspect import program
from fp8jax.optim import adamw, adamw_8bit, with_dequantized
from fp8jax.optim.state import skipped
from fp8jax.optim.step import fused
from fp8jax.quantization import is_scaled

# One scale, a scale a layer, a scale a block, empty tensors, and tensors that are not scaled.
SHAPES = {
    "long": ((260, 258), (1, 1)),
    "stacked": ((4, 130, 132), (4, 1, 1)),
    "blocks": ((8, 16), (4, 2)),
    "short": ((4, 8), ()),
    "empty": ((0, 4), (1, 1)),
    "bias": ((64,), None),
    "table": ((400, 100), None),
}


def tree(level, column, seed, size):
    """Parameters or gradients in the format of a recipe's column."""
    rng, format = np.random.default_rng(seed), formats.get(getattr(Recipe.parse(level), column))

    def leaf(shape, blocks):
        x = jnp.asarray(size * rng.normal(size=shape), jnp.float32)
        is_plain = format == formats.FP32 or blocks is None
        return x if is_plain else quantize(x, format, power_of_two=True, blocks=blocks)

    return {name: leaf(*given) for name, given in SHAPES.items()}


def step_of(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return fp8jax.apply_updates(params, updates), state

    return step


def spread(tree):
    """On several devices."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def put(x):
        spec = PartitionSpec("x") if x.ndim > 1 and x.shape[0] and x.shape[0] % 4 == 0 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def assert_one_code_apart(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.itemsize < 4 and a.dtype != bool:
            a, b = (np.int32(x.view(f"int{8 * x.dtype.itemsize}")) for x in (a, b))
            assert np.abs(a - b).max(initial=0) <= 1
            assert (a != b).mean() < 0.02 if a.size else True
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", ["te", "O2", pytest.param("O3", marks=pytest.mark.long)])
def test_on_several_devices(level):
    """The step of sharded tensors is that of whole ones, also where it is skipped."""
    tx = adamw(1e-2, level, weight_decay=0.1)
    params = tree(level, "weight", 0, 1.0)
    state, step = tx.init(params), step_of(tx)
    for seed, count in ((1, 0), (2, 0), (3, 1)):
        grads = tree(level, "weight_grad", seed, 1e-3)
        if count:
            grads["bias"] = grads["bias"].at[3].set(jnp.nan)
        expected = step(*spread((params, state, grads)))
        got = step(params, state, grads)
        assert_one_code_apart(got, expected)
        assert int(skipped(got[1])) == int(skipped(expected[1])) == count
        if count:
            jax.tree.map(np.testing.assert_array_equal, got, (params, state._replace(skipped=got[1].skipped)))
        params, state = got


def test_no_tensor_is_gathered():
    tx, params, grads = (
        adamw(1e-2, "O2"),
        tree("O2", "weight", 0, 1.0),
        tree("O2", "weight_grad", 1, 1e-3),
    )
    given = spread((params, tx.init(params), grads))
    step = step_of(tx)
    moved = program.read(step.lower(*given).compile()).collectives
    assert max(collective.numbers for collective in moved) < 1000
    for new, old in zip(jax.tree.leaves(step(*given)), jax.tree.leaves(given[:2]), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


def test_layouts_of_scales():
    """Tensors whose scales differ in layout move as each alone."""
    tx, layers = adamw(1e-2, "O2"), (4, 1, 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 100, 60)), jnp.float32)
    params = {name: quantize(x, formats.FP16, power_of_two=True, blocks=layers) for name in "ab"}
    grads = {
        "a": quantize(x, formats.E4M3, power_of_two=True, blocks=layers),
        "b": quantize(x, formats.E4M3, power_of_two=True),
    }
    together = step_of(tx)(params, tx.init(params), grads)[0]
    for name in "ab":
        one = {name: params[name]}
        alone = step_of(tx)(one, tx.init(one), {name: grads[name]})[0]
        assert_one_code_apart(together[name], alone[name])


def test_vmap():
    tx = adamw(1e-2, "O2")
    params = {"w": quantize(jnp.arange(12.0).reshape(3, 4) / 7, formats.FP16, power_of_two=True)}
    grads = [
        {"w": quantize(g * jnp.cos(jnp.arange(12.0)).reshape(3, 4), formats.E4M3, power_of_two=True)}
        for g in (1.0, jnp.nan, 2.0)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    step = step_of(tx)
    got, state = jax.vmap(step, in_axes=(None, None, 0))(params, tx.init(params), stacked)
    np.testing.assert_array_equal(state.skipped, [0, 1, 0])
    for i, each in enumerate(grads):
        alone = step(params, tx.init(params), each)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), (got, state), alone)
    assert is_scaled(got["w"])


@pytest.mark.parametrize("recipe", ["te", "O2", "fp8"])
@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize(
    "options, weight, gradient, count",
    [
        ({}, 1.0, 1.0, 0),
        ({"learning_rate": 1e4, "weight_decay": 1.0}, 1.0, 1e15, 0),
        ({"eps": 0.0}, 1.0, 1.0, 1),  # 0 / 0 where the gradient is 0
        ({"eps": 1e-30}, 1.0, 1.0, 0),
        ({"weight_decay": 1e38}, 1e5, 1.0, 1),
        ({"learning_rate": jnp.inf}, 1.0, 1.0, 1),
        ({}, 1.0, 1e20, 1),  # its square is infinite
        ({}, 1.0, jnp.nan, 1),
    ],
)
def test_a_step_to_inf_or_nan_is_skipped(recipe, is_gpu, options, weight, gradient, count, monkeypatch):
    """Also of float32 weights, which the check does not read."""
    if is_gpu:
        monkeypatch.setattr(fused, "_by_tensor", fused._all_at_once)
    options = {"learning_rate": 1e-3, "weight_decay": 0.0, **options}
    rate = options.pop("learning_rate")
    tx = adamw(lambda _: jnp.float32(rate), recipe, **options)
    params = {"w": jnp.full((64, 80), weight)}
    grads = {"w": jnp.full((64, 80), gradient).at[0, 0].set(0.0)}
    new, state = step_of(tx)(params, tx.init(params), grads)
    assert int(skipped(state)) == count
    assert jnp.all(jnp.isfinite(new["w"]))
    assert bool(jnp.all(new["w"] == params["w"])) == bool(count)


def arguments(tx, count):
    """Those of `step_of` for so many equal weights."""
    weight = quantize(jnp.ones((64, 64)), formats.FP16, power_of_two=True)
    params = {f"w{i}": weight for i in range(count)}
    grads = {name: quantize(jnp.ones((64, 64)), formats.E4M3, power_of_two=True) for name in params}
    return params, tx.init(params), grads


def compiled_step(tx, count):
    """The text of the step that a CPU runs for so many equal weights."""
    return step_of(tx).lower(*arguments(tx, count)).compile().as_text()


@pytest.mark.parametrize("tx", [adamw(1e-3, "O2"), adamw(1e-3, "fp8"), adamw_8bit(1e-3)])
def test_traces_for_a_gpu_grow_with_the_tensors(tx, monkeypatch):
    """Not with their square: each tensor takes only its own scales out of the array of all."""
    monkeypatch.setattr(fused, "_by_tensor", fused._all_at_once)
    few, many = (len(str(step_of(tx).trace(*arguments(tx, n)).jaxpr).splitlines()) for n in (8, 16))
    assert many < 2.1 * few


@pytest.mark.parametrize(
    "tx", [adamw(1e-3, "O2"), adamw(1e-3, "fp8"), with_dequantized(optax.lion(1e-3), "fp8")]
)
def test_programs_for_a_cpu_grow_with_the_tensors(tx):
    """Not with their square: no kernel computes again what all tensors' gradients say."""
    few, many = (len(compiled_step(tx, count).splitlines()) for count in (8, 16))
    assert many < 2.1 * few


@pytest.mark.parametrize("recipe", ["O2", "fp8"])
def test_equal_tensors_share_kernels_on_a_cpu(recipe):
    """XLA on a CPU compiles equal kernels once."""

    def numbered(body):
        names: dict[str, int] = {}
        return re.sub(r"%[\w.-]+", lambda match: f"%{names.setdefault(match[0], len(names))}", body)

    def kernels(count):
        text = re.sub(r", metadata=\{.*?\}", "", compiled_step(adamw(1e-3, recipe), count))
        found = [body for body in text.split("\n\n") if "fused_computation" in body.split(" ", 1)[0]]
        assert found
        return len({numbered(body.split("\n", 1)[1]) for body in found})

    assert kernels(16) < kernels(8) + 4, "but for what gathers the tensors' scalars"
