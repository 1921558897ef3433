"""What leaves a product on torch is what leaves one in JAX, bit for bit, on numbers that no sum rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import Recipe, formats, quantize
from fp8jax.dot import GradSlot, Weight, dot_general, init_state
from fp8jax.quantization import is_scaled

torch = pytest.importorskip("torch", reason="the same on torch needs torch")

import fp8jax_torch  # noqa: E402
from fp8jax_torch.matmul import matmul  # noqa: E402
from fp8jax_torch.scaled import value  # noqa: E402
from fp8jax_torch.scaling import ScalingState  # noqa: E402

MATRICES = (((1,), (0,)), ((), ()))
M, K, N = 16, 48, 32

# What is added to one number of the output gradient, step by step.
BAD = (0.0, np.inf, np.nan, 0.0, -np.inf)

RECIPES = (
    "te",
    "te,override_linear_precision=False+True+True",
    "O1,weight_grad=FP32",
    "O2",
    "te,scaling=current",
    "te,first_scale=tensor",
    "te,override_linear_precision=False+False+True",
    "O3,scaling=current",
)


def operands(step):
    """x, w and g, float32: small integers, and each format's max. So scales are powers of two, codes are
    exact, and sums need fewer bits than float32's 24, but more than bf16's 8."""
    rng = np.random.default_rng(step)
    x, w, g = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    x[0, 0], w[1, 0], g[1, 1] = 448.0, -448.0, 57344.0
    g[2, 3] += BAD[step]
    return x, w, g


def steps_in_jax(recipe):
    """y, dx, dw and the state after it, of each step: its output is bf16, its kernel not."""

    @jax.jit
    def step(x, w, g, state):
        slot = jnp.zeros(w.shape)
        if recipe.weight_grad == "E4M3":
            slot = GradSlot.zeros(slot)
        if recipe.weight != "FP32":
            w = quantize(w, formats.get(recipe.weight), power_of_two=True)

        def product(x, kernel, slot, state):
            rhs = Weight(w, slot) if is_scaled(w) else kernel
            return dot_general(x, rhs, MATRICES, recipe=recipe, state=state, out_dtype=jnp.bfloat16)

        y, pull = jax.vjp(product, x, 0.0 if is_scaled(w) else w, slot, state)
        dx, dw, dslot, state = pull(g)
        dw = dslot if is_scaled(w) else dw
        if recipe.weight_grad == "E4M3":
            dw = dw.gradient().dequantize()
        return y, dx, dw, state

    state = init_state(recipe)
    for x, w, g in map(operands, range(len(BAD))):
        y, dx, dw, state = step(jnp.asarray(x, jnp.bfloat16), w, jnp.asarray(g, jnp.bfloat16), state)
        yield y, dx, dw, {name: state[name] for name in ("scale", "amax_history") if name in state}


def steps_on_torch(recipe):
    """The same on torch."""
    state = ScalingState(recipe)
    for x, w, g in map(operands, range(len(BAD))):
        x, w = torch.from_numpy(x).bfloat16().requires_grad_(), torch.from_numpy(w)
        if recipe.weight != "FP32":
            w = fp8jax_torch.quantize(w, formats.get(recipe.weight), power_of_two=True)
        w = torch.nn.Parameter(w)
        y = matmul(x, w, state, in_out=True, dtype=torch.bfloat16)
        y.backward(torch.from_numpy(g).bfloat16())
        state.advance()
        yield y.detach(), x.grad, value(w.grad), state.state_dict()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_equal_jaxs(recipe):
    recipe = Recipe.parse(recipe)
    _, dgrad_is_high, wgrad_is_high = recipe.override_linear_precision
    for bad, in_jax, on_torch in zip(BAD, steps_in_jax(recipe), steps_on_torch(recipe), strict=True):
        *_, state = in_jax
        assert {name: tensor.tolist() for name, tensor in on_torch[3].items()} == {
            name: array.tolist() for name, array in state.items()
        }
        wanted = [np.asarray(array, np.float32) for array in in_jax[:3]]
        got = [tensor.float().numpy() for tensor in on_torch[:3]]
        for name, want, found in zip(("y", "dx", "dw"), wanted, got, strict=True):
            np.testing.assert_array_equal(found, want, err_msg=f"{name}, {bad} in the gradient")
        _, dx, dw = got
        if bad == 0:
            # A weight gradient that is kept in float32 leaves its GEMM so, and not by way of bf16.
            is_rounded = (dw == torch.from_numpy(dw).bfloat16().float().numpy()).all()
            assert is_rounded == (recipe.weight_grad == "E4M3")
        else:
            assert np.isnan(dx).all() != dgrad_is_high and np.isnan(dw).all() != wgrad_is_high
