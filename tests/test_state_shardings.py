"""The ways by which programs shard new optimizer states: boxes of axis names, and trees of shardings."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
import fp8jax.inspect.numerics
from fp8jax import formats
from fp8jax.optim import adamw, adamw_8bit, muon, with_dequantized
from fp8jax.variables import PARAMS

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

    def init(key, unbox=nn.unbox):
        variables = unbox(model.init(key, X))
        return variables, tx.init(variables["params"])

    boxed = jax.eval_shape(lambda key: init(key, lambda variables: variables), jax.random.key(1))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh(), RULES)
    variables, state = jax.jit(init, out_shardings=shardings)(jax.random.key(1))
    momentum = state.adam.mu["up"]["kernel"]
    assert (momentum.codes.sharding.spec, momentum.exponents.sharding.spec) == (P("fsdp", "tensor"), P())
    assert_same((variables, state), jax.jit(init)(jax.random.key(1)))


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


# Trees of shardings ##############################################################################


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(128, name="down")(nn.gelu(nn.Dense(256, name="up")(x)))


SPECS = {
    "up": {"kernel": P("fsdp", "tensor"), "bias": P("tensor")},
    "down": {"kernel": P("tensor", "fsdp"), "bias": P()},
}
OF_PARAMS = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), SPECS, is_leaf=lambda x: isinstance(x, P))
MASK = {"up": {"kernel": True, "bias": False}, "down": True}
LABELS = {"up": "muon", "down": "adam"}
OTHERS = {
    "masked": lambda: optax.masked(adamw(1e-2, "fp8"), MASK),
    "partition": lambda: optax.partition({"muon": muon(1e-2, "fp8"), "adam": adamw(1e-2, "fp8_6")}, LABELS),
    "MultiSteps": lambda: fp8jax.optim.multi_steps(adamw(1e-2, "fp8"), 2),
    "adafactor": lambda: with_dequantized(optax.adafactor(1e-2), "fp8"),
    "inject": lambda: optax.inject_hyperparams(adamw, static_args="recipe", hyperparam_dtype=jnp.float32)(
        1e-2, recipe="fp8"
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS | OTHERS)
def test_shardings_of_states(name):
    """Each array in a parameter's shape has its sharding, and none is indivisible."""
    tx, params = (OPTIMIZERS | OTHERS)[name](), Plain().init(jax.random.key(1), X)["params"]
    shapes = jax.eval_shape(tx.init, params)
    of_state = fp8jax.optim.shardings(shapes, params, OF_PARAMS)
    assert jax.tree.structure(of_state) == jax.tree.structure(shapes)
    state = jax.jit(tx.init, out_shardings=of_state)(params)
    arrays = jax.tree_util.tree_leaves_with_path(state)
    for (layer, kind), spec in flatten_dict(SPECS).items():
        place, shape = f"['{layer}']['{kind}']", params[layer][kind].shape
        found = [x for path, x in arrays if place in jax.tree_util.keystr(path) and x.shape == shape]
        assert {x.sharding.spec for x in found} <= {spec}
        assert found or kind == "bias" or name == "adafactor"
    assert_same(state, tx.init(params))


def stack_of(scales):
    return fp8jax.ScaledArray(jnp.ones((4, 6, 256), formats.E4M3.dtype), jnp.ones(scales))


@pytest.mark.parametrize(
    "scales, spec",
    [((), P()), ((4, 1, 1), P("data", None, None)), ((4, 1, 4), P("data", None, ("fsdp", "tensor")))]
    + [((4, 1, 2), P("data", None, None)), ((1, 3, 256), P(None, None, ("fsdp", "tensor")))],
)
def test_shardings_of_scales(scales, spec):
    """Axes with several scales are sharded, if the devices divide them."""
    params = {"layers": {"kernel": stack_of(scales)}}
    of_codes = NamedSharding(mesh(), P("data", None, ("fsdp", "tensor")))
    for given in (of_codes, fp8jax.ScaledArray(of_codes, NamedSharding(mesh(), P()))):
        state = {"step": 0, PARAMS: params}
        new = fp8jax.optim.shardings(state, params, {"layers": {"kernel": given}})
        kernel = new[PARAMS]["layers"]["kernel"]
        assert (kernel.data, kernel.bits.spec) == (of_codes, spec)
        assert new["step"].spec == P()
        jax.device_put(state, new)


def test_shardings_of_variables_and_states():
    """Of all that a step carries at once: scaled weights, scaling states, and the optimizer's state."""
    model, tx = fp8jax.transform(Plain(), "fp8"), adamw(1e-2, "fp8")

    def init(key):
        variables = model.init(key, X)
        return variables, tx.init(variables["params"])

    shapes = jax.eval_shape(init, jax.random.key(1))
    of_all = fp8jax.optim.shardings(shapes, shapes[0]["params"], OF_PARAMS)
    variables, state = jax.jit(init, out_shardings=of_all)(jax.random.key(1))
    kernel, momentum = variables["params"]["up"]["kernel"], state.adam.mu["up"]["kernel"]
    for array in (kernel, momentum):
        assert array.data.sharding.spec == P("fsdp", "tensor")
        assert array.bits.sharding.is_fully_replicated
    assert_same((variables, state), jax.jit(init)(jax.random.key(1)))


def test_shardings_of_an_nnx_module():
    """By the names in `nnx.Param`s, of which `nnx.get_named_sharding` makes one sharding each."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tensor"))

    def create():
        module = fp8jax.transform(nnx.Linear(128, 256, kernel_init=init, rngs=nnx.Rngs(0)), "fp8")
        return nnx.state(module)

    with jax.set_mesh(mesh()):
        shapes = jax.eval_shape(create)
        shardings = fp8jax.optim.shardings(shapes, shapes, nnx.get_named_sharding(shapes, mesh()))
        state = jax.jit(create, out_shardings=shardings)()
    kernel = state["kernel"].get_raw_value()
    assert kernel.data.sharding.spec == P("fsdp", "tensor")
    assert kernel.bits.sharding.is_fully_replicated


@pytest.mark.parametrize(
    "of_params, says",
    [
        ({"up": OF_PARAMS["up"]}, "`of_params`: expected a tree like `params`; got another"),
        (SPECS, "`of_params`: expected a jax.sharding.NamedSharding for each array; got P"),
    ],
)
def test_other_shardings_are_refused(of_params, says):
    params = Plain().init(jax.random.key(1), X)["params"]
    with pytest.raises(ValueError, match=says):
        fp8jax.optim.shardings(params, params, of_params)
