"""Scaling states of another recipe: Linen modules, functions, NNX modules and single dots refuse them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

import fp8jax
from fp8jax.dot import dot_general, init_ragged_state, init_state, ragged_dot
from fp8jax.variables import PARAMS, SCALING

X = jnp.ones((32, 32))
# The model's recipe, that of the state, and the name that is missing.
PAIRS = [
    ("nvfp4", "te", "key"),
    ("te", "nvfp4", "amax_history"),
    ("te,interval=2", "te", "step"),
    ("nvfp4+O2", "O2", "key"),
]


def sums(model):
    return lambda variables: jnp.sum(model.apply(variables, X))


def model_and_variables(kind, recipe):
    if kind == "function":
        model = fp8jax.transform(lambda params, x: x @ params["fc"], recipe)
        return model, model.init({"fc": jnp.ones((32, 32))}, X)
    model = fp8jax.transform(nn.Dense(32), recipe)
    return model, model.init(jax.random.key(0), X)


@pytest.mark.parametrize("recipe, other, missing", PAIRS)
@pytest.mark.parametrize("kind", ["Linen", "function"])
def test_variables_of_another_recipe(kind, recipe, other, missing):
    (model, variables), (_, foreign) = (model_and_variables(kind, name) for name in (recipe, other))
    mixed = {**variables, SCALING: foreign[SCALING]}
    for run in (sums(model), lambda v: fp8jax.value_and_grad(sums(model))(v)):
        with pytest.raises(
            ValueError, match=rf"`variables`: .*for {recipe.split('+')[0]}.*without '{missing}'"
        ) as error:
            run(mixed)
        assert "\n" not in str(error.value)
    sums(model)(variables)


@pytest.mark.parametrize("recipe, other, missing", PAIRS)
def test_nnx_modules_with_states_of_another_recipe(recipe, other, missing):
    model, foreign = (
        fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), name) for name in (recipe, other)
    )
    for name in [name for name in vars(model) if "__fp8_" in name]:
        delattr(model, name)
    for name, state in vars(foreign).items():
        if "__fp8_" in name:
            setattr(model, name, state)
    with pytest.raises(ValueError, match=f"without '{missing}'"):
        model(X)
    with pytest.raises(ValueError, match=f"without '{missing}'"):
        fp8jax.value_and_grad(lambda model: jnp.sum(model(X)))(model)


@pytest.mark.parametrize("recipe, other, missing", PAIRS)
def test_dots_with_states_of_another_recipe(recipe, other, missing):
    numbers = (((1,), (0,)), ((), ()))
    with pytest.raises(ValueError, match=f"`state`: expected .*without '{missing}'"):
        dot_general(X, X, numbers, recipe=recipe, state=init_state(other))
    with pytest.raises(ValueError, match=f"`state`: expected .*without '{missing}'"):
        ragged_dot(X, X[None], jnp.array([32]), recipe=recipe, state=init_ragged_state(other, 1))
    with pytest.raises(ValueError, match=r"`state`: expected .*; got nothing"):
        dot_general(X, X, numbers, recipe=recipe, state={})


# The amax_history_len of the model's recipe, and that of the state.
LENGTHS = [("te,amax_history_len=16", 16, "te", 1024), ("te", 1024, "O2", 16)]


@pytest.mark.parametrize("recipe, wanted, other, got", LENGTHS)
@pytest.mark.parametrize("kind", ["Linen", "function", "NNX"])
def test_amax_histories_of_another_length(kind, recipe, wanted, other, got):
    """The maximum would be that of the steps that the state holds, and not that of the recipe's."""
    expected = rf"`variables`: expected amax_history_len={wanted} .*; got {got}\. .*amax_history_len={got}"
    if kind == "NNX":
        model, foreign = (
            fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), name) for name in (recipe, other)
        )
        vars(model)["kernel__fp8_amax_history"].set_value(foreign.kernel__fp8_amax_history.get_value())
        with pytest.raises(ValueError, match=expected):
            model(X)
        with pytest.raises(ValueError, match=expected):
            fp8jax.value_and_grad(lambda model: jnp.sum(model(X)))(model)
        return
    (model, variables), (_, foreign) = (model_and_variables(kind, name) for name in (recipe, other))
    for run in (sums(model), lambda v: fp8jax.value_and_grad(sums(model))(v)):
        with pytest.raises(ValueError, match=expected) as error:
            run({**variables, SCALING: foreign[SCALING]})
        assert "\n" not in str(error.value)


def test_dots_with_amax_histories_of_another_length():
    numbers, recipe = (((1,), (0,)), ((), ())), "te,amax_history_len=16"
    expected = "`state`: expected amax_history_len=16 for te,amax_history_len=16; got 1024"
    with pytest.raises(ValueError, match=expected):
        dot_general(X, X, numbers, recipe=recipe, state=init_state("te"))
    with pytest.raises(ValueError, match=expected):
        ragged_dot(X, X[None], jnp.array([32]), recipe=recipe, state=init_ragged_state("te", 1))


# The model's recipe, which needs no state of its casts, and the recipe of the state.
NEEDS_NONE = [
    ("te,scaling=current", "te"),
    ("block", "te"),
    ("bf16", "te"),
    ("fp32", "te"),
    ("bf16", "nvfp4"),
    ("O2,scaling=current", "O2"),
]


@pytest.mark.parametrize("recipe, other", NEEDS_NONE)
@pytest.mark.parametrize("kind", ["Linen", "function"])
def test_states_that_the_recipe_does_not_need(kind, recipe, other):
    """They would come back unchanged from each step, too old for a model of their own recipe."""
    expected = "`variables`: expected nothing"
    (model, variables), (_, foreign) = (model_and_variables(kind, name) for name in (recipe, other))
    for run in (sums(model), lambda v: fp8jax.value_and_grad(sums(model))(v)):
        with pytest.raises(ValueError, match=rf"{expected} in the .* for {recipe}; got \w+") as error:
            run({**variables, SCALING: foreign[SCALING]})
        assert "\n" not in str(error.value)
    sums(model)({**variables, SCALING: variables.get(SCALING, {})})


def test_nnx_modules_with_unneeded_states():
    model, foreign = (
        fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), name) for name in ("te,scaling=current", "te")
    )
    for name in ("scale", "amax_history"):
        setattr(model, f"kernel__fp8_{name}", getattr(foreign, f"kernel__fp8_{name}"))
    with pytest.raises(ValueError, match="`variables`: expected nothing in the scaling state of 'kernel'"):
        model(X)


@pytest.mark.parametrize(
    "recipe, other", [("te", "fp8"), ("current", "te"), ("te", "nvfp4"), ("te", "current")]
)
def test_what_nnx_modules_are_told(recipe, other):
    """An NNX module has no `model.init`."""
    model, foreign = (
        fp8jax.transform(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), name) for name in (recipe, other)
    )
    for name in [name for name in vars(model) if "__fp8_" in name]:
        delattr(model, name)
    for name in [name for name in vars(foreign) if "__fp8_" in name]:
        setattr(model, name, getattr(foreign, name))
    with pytest.raises(ValueError, match=r"nnx\.state\(old, nnx\.Param\)") as error:
        model(X)
    assert "model.init" not in str(error.value)


class Layers(nnx.Module):
    def __init__(self, seed):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(seed)) for _ in range(2)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("recipe, got", [("fp8", "FP16"), ("O3", "E4M3")])
@pytest.mark.parametrize(
    "run",
    [
        lambda model: model(X),
        lambda model: model.layers[0](X),
        lambda model: fp8jax.value_and_grad(lambda model: jnp.sum(model(X)))(model),
        lambda model: fp8jax.value_and_grad(lambda pair: jnp.sum(pair[0](X)))(nnx.List([model])),
        lambda model: fp8jax.report(model, X),
    ],
    ids=["call", "layer", "gradient", "gradient of a list", "report"],
)
def test_plain_weights_in_a_transformed_nnx_module(recipe, got, run):
    """They would train in float32, in silence."""
    model = fp8jax.transform(Layers(0), recipe)
    nnx.update(model, nnx.state(Layers(1), nnx.Param))
    with pytest.raises(ValueError, match=rf"expected {got} codes in '.*kernel'.*got float32\[32, 32\]"):
        run(model)
    codes = fp8jax.transform(Layers(2), recipe)
    for layer, old in zip(model.layers, codes.layers, strict=True):
        layer.kernel.set_value(
            fp8jax.quantization.quantize_like(layer.kernel.get_value(), old.kernel.get_value())
        )
    run(model)


@pytest.mark.parametrize("recipe", ["te", "current"])
def test_plain_weights_where_kernels_are_plain(recipe):
    model, other = fp8jax.transform(Layers(0), recipe), Layers(1)
    nnx.update(model, nnx.state(other, nnx.Param))
    np.testing.assert_allclose(model(X), other(X), atol=0.2 * float(jnp.max(jnp.abs(other(X)))))


def test_a_rule_of_one_layer_needs_no_state():
    """The states of the other layers stay, and the message names the layer."""
    module = nn.Sequential([nn.Dense(32), nn.Dense(32)])
    variables = fp8jax.transform(module, "te").init(jax.random.key(0), X)
    model = fp8jax.transform(module, "te", rules=[fp8jax.Rule("layers_1", "bf16")])
    with pytest.raises(
        ValueError, match="expected nothing in the scaling state of 'layers_1/kernel' for bf16"
    ):
        sums(model)(variables)
    sums(model)({**variables, SCALING: {"layers_0": variables[SCALING]["layers_0"]}})


def test_states_of_the_same_scaling_fit():
    """The optimizer's columns do not change the state."""
    model = fp8jax.transform(nn.Dense(32), "fp8")
    variables = model.init(jax.random.key(0), X)
    other = fp8jax.transform(nn.Dense(32), "O2")
    sums(other)({**variables, SCALING: variables[SCALING]})
    assert PARAMS in variables


@pytest.mark.parametrize("kind", ["Linen", "function"])
def test_states_of_0_1_0_with_the_scale_of_the_gradient(kind):
    """The entry stays in the state and changes nothing."""
    for recipe in ("O2", "O2,scaling=current"):
        model, variables = model_and_variables(kind, recipe)
        path = ("fc",) if kind == "function" else ("kernel",)
        states = traverse_util.flatten_dict(variables.get(SCALING, {}))
        old = traverse_util.unflatten_dict({**states, (*path, "wgrad_scale"): jnp.float32(0.5)})
        grad_fn = jax.jit(fp8jax.value_and_grad(sums(model)))
        loss, grads, new = grad_fn({**variables, SCALING: old})
        want, expected, _ = grad_fn(variables)
        assert loss == want and jax.tree.structure(new[SCALING]) == jax.tree.structure(old)
        jax.tree.map(np.testing.assert_array_equal, grads, expected)


@pytest.mark.parametrize("recipe", ["te", "O2", "nvfp4"])
def test_scaling_states_that_were_cast(recipe):
    """`jax.tree.map(lambda x: x.astype(...), variables)` casts the scales too."""
    model = fp8jax.transform(nn.Dense(32), recipe)
    variables = model.init(jax.random.key(0), X)
    cast = {**variables, SCALING: jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables[SCALING])}
    for run in (sums(model), lambda v: fp8jax.value_and_grad(sums(model))(v)):
        with pytest.raises(
            ValueError, match="scaling state: expected float32; got bfloat16. Cast .*'params'"
        ):
            run(cast)


def test_text_in_the_place_of_an_array():
    """The module's own error, with a note of what it got."""
    model = fp8jax.transform(nn.Dense(32), "te")
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(IndexError) as error:
        model.apply(variables, "x")
    note = "fp8jax: the argument 'x' is a str, no array; the model got it as a constant."
    assert error.value.__notes__.count(note) == 1
