"""The ways by which programs shard new optimizer states: boxes of axis names, and trees of shardings."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fp8jax
import fp8jax.inspect.numerics
from fp8jax.optim import adamw, adamw_8bit, muon, with_dequantized

X = jax.random.normal(jax.random.key(0), (8, 128))
RULES = (("batch", "data"), ("embed", "fsdp"), ("mlp", "tensor"))


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))


class Boxed(nn.Module):
    """Dense layers with logical names of axes, as MaxText's and T5X's."""

    @nn.compact
    def __call__(self, x):
        init, named = nn.initializers.lecun_normal(), nn.with_logical_partitioning
        bias = named(nn.initializers.zeros, ("mlp",))
        x = nn.Dense(256, kernel_init=named(init, ("embed", "mlp")), bias_init=bias, name="up")(x)
        return nn.Dense(128, kernel_init=named(init, ("mlp", "embed")), name="down")(nn.gelu(x))


OPTIMIZERS = {
    "fp8": lambda: adamw(1e-2, "fp8"),
    "fp8_6": lambda: adamw(1e-2, "fp8_6"),
    "O3": lambda: adamw(1e-2, "O3"),
    "8 bits": lambda: adamw_8bit(1e-2, "fp8"),
    "muon": lambda: muon(1e-2, "fp8"),
    "any": lambda: with_dequantized(optax.adamw(1e-2), "fp8"),
    "chain": lambda: optax.chain(fp8jax.optim.clip_by_global_norm(1.0), adamw(1e-2, "fp8")),
}


def shardings_of(tree):
    return [x.sharding.spec for x in jax.tree.leaves(tree)]


def codes(moment):
    return moment if hasattr(moment, "sharding") else jax.tree.leaves(moment)[0]


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# Boxes of axis names #############################################################################


def jitted_init(tx, params_of):
    """The parameters and the state of an optimizer, sharded by the names of their axes."""

    def init(key):
        params = params_of(key)
        return params, tx.init(params)

    specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(1)))
    shardings = nn.logical_to_mesh_sharding(specs, mesh(), RULES)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_of_axes_shard_the_state_of_a_plain_model(name):
    """Codes have their parameter's sharding, and scales are on all devices. A step is that of unboxed
    parameters, and keeps the boxes."""
    tx = OPTIMIZERS[name]()
    params, state = jitted_init(tx, lambda key: Boxed().init(key, X)["params"])
    mu, nu = fp8jax.optim.moments(state)
    assert codes(mu["up"]["kernel"]).sharding.spec == P("fsdp", "tensor")
    assert codes(mu["up"]["bias"]).sharding.spec == P("tensor")
    assert codes(mu["down"]["kernel"]).sharding.spec == P("tensor", "fsdp")
    if name != "muon":
        assert codes(nu["down"]["kernel"]).sharding.spec == P("tensor", "fsdp")

    grads = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(tx.update)
    updates, new = step(grads, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    grads, state, params = jax.tree.map(np.asarray, nn.unbox((grads, state, params)))
    assert_same(nn.unbox((updates, new)), step(grads, state, params))


def test_names_of_axes_shard_the_state_of_scaled_weights():
    """As MaxText: initialize boxed, unbox, and take the shardings for the step."""
    model, tx = fp8jax.transform(Boxed(), "fp8"), muon(1e-2, "fp8")
    boxed = jax.eval_shape(lambda key: tx.init(model.init(key, X)["params"]), jax.random.key(1))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh(), RULES)
    init = lambda key: tx.init(nn.unbox(model.init(key, X))["params"])  # noqa: E731
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(1))
    momentum = state.adam.mu["up"]["kernel"]
    assert (momentum.codes.sharding.spec, momentum.exponents.sharding.spec) == (P("fsdp", "tensor"), P())
    assert_same(state, init(jax.random.key(1)))


def test_conversion_of_boxed_states():
    params = Boxed().init(jax.random.key(1), X)["params"]
    for old, new in (("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8_6")):
        state = fp8jax.optim.convert(adamw(1e-2, old).init(params), params, new)
        assert jax.tree.structure(state) == jax.tree.structure(adamw(1e-2, new).init(params))
        assert_same(fp8jax.optim.masters(state, params), params)


def test_statistics_of_a_step_with_boxes():
    tx, boxed = adamw(1e-2, "fp8"), Boxed().init(jax.random.key(1), X)["params"]
    grads = jax.tree.map(jnp.ones_like, boxed)

    def rows(params, grads):
        state = tx.init(params)
        updates, new = tx.update(grads, state, params)
        after = optax.apply_updates(params, updates), new
        return fp8jax.inspect.numerics.step_statistics(grads, (params, state), after)

    assert_same(rows(boxed, grads), rows(*nn.unbox((boxed, grads))))
