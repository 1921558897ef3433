"""A decoder block written by hand, in plain JAX without layers, with its GEMMs in FP8.

    python examples/handwritten.py                # trains it in FP8 and in bfloat16, prints both losses
    python examples/handwritten.py --steps 50 --recipe "te,scaling=current"

RMSNorm, rotary positions, grouped-query attention and SwiGLU: seven GEMMs with weights, each an
`fp8jax.dot.einsum` with its scaling state. A block without FP8 differs in three things:

1. `gemm` calls `jnp.einsum`, not `fp8jax.dot.einsum` with a state;
2. there are no states beside the parameters, in `variables["_overwrite_with_gradient"]`;
3. `jax.value_and_grad` does, where `fp8jax.value_and_grad` also returns the variables with each GEMM's new
   state.

GEMMs of two activations, as in attention, stay in bfloat16.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax

WIDTH, HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY, TIME = 64, 4, 2, 16, 128, 32, 32

# Each GEMM with a weight: the weight's shape, and the einsum.
GEMMS = {
    "query": ((WIDTH, HEADS, DIM), "btw,whd->bthd"),
    "key": ((WIDTH, KV_HEADS, DIM), "btw,whd->bthd"),
    "value": ((WIDTH, KV_HEADS, DIM), "btw,whd->bthd"),
    "out": ((HEADS, DIM, WIDTH), "bthd,hdw->btw"),
    "gate": ((WIDTH, HIDDEN), "btw,wh->bth"),
    "up": ((WIDTH, HIDDEN), "btw,wh->bth"),
    "down": ((HIDDEN, WIDTH), "bth,hw->btw"),
}
STATES = "_overwrite_with_gradient"


def init(key: jax.Array, recipe: str | None) -> dict[str, Any]:
    """The parameters, and with a recipe a state for each GEMM."""
    names = [*GEMMS, "embedding"]
    shapes = {**{name: shape for name, (shape, _) in GEMMS.items()}, "embedding": (VOCABULARY, WIDTH)}
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    params = {name: jax.random.normal(keys[name], shapes[name]) * 0.1 for name in names}
    params |= {"attention norm": jnp.ones(WIDTH), "mlp norm": jnp.ones(WIDTH), "norm": jnp.ones(WIDTH)}
    if recipe is None:
        return {"params": params}
    return {"params": params, STATES: {name: fp8jax.dot.init_state(recipe) for name in GEMMS}}


def logits(variables: dict[str, Any], tokens: jax.Array, recipe: str | None) -> jax.Array:
    """(batch, time) -> (batch, time, vocabulary)."""
    params = variables["params"]

    def gemm(name: str, x: jax.Array) -> jax.Array:
        _, subscripts = GEMMS[name]
        weight = params[name].astype(jnp.bfloat16)
        if recipe is None:
            return jnp.einsum(subscripts, x, weight)
        return fp8jax.dot.einsum(subscripts, x, weight, recipe=recipe, state=variables[STATES][name])

    def norm(name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return (wide * scale * params[name]).astype(jnp.bfloat16)

    x = params["embedding"][tokens].astype(jnp.bfloat16)
    y = norm("attention norm", x)
    query, key = rotated(gemm("query", y)), rotated(gemm("key", y))
    y = jax.nn.dot_product_attention(query, key, gemm("value", y), is_causal=True)
    x = x + gemm("out", y)
    y = norm("mlp norm", x)
    x = x + gemm("down", jax.nn.silu(gemm("gate", y)) * gemm("up", y))
    return jnp.einsum("btw,vw->btv", norm("norm", x), params["embedding"].astype(jnp.bfloat16))


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: (batch, time, heads, dim) -> the same."""
    angles = np.arange(x.shape[1])[:, None] / 100.0 ** (np.arange(DIM // 2) / (DIM // 2))
    cos, sin = (jnp.asarray(f(angles), x.dtype)[:, None] for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def batch(rng: np.random.Generator, size: int = 32) -> np.ndarray[Any, Any]:
    """Sequences in which each token is the sum of the two before it, but for some noise."""
    tokens = rng.integers(0, VOCABULARY, (size, TIME + 1))
    for t in range(2, TIME + 1):
        noisy = rng.random(size) < 0.05
        tokens[:, t] = np.where(noisy, tokens[:, t], (tokens[:, t - 1] + tokens[:, t - 2]) % VOCABULARY)
    return tokens


def train(recipe: str | None, steps: int, seed: int = 0) -> float:
    """The mean loss of the last tenth of the steps."""
    variables = init(jax.random.key(seed), recipe)
    tx = fp8jax.optim.adamw(3e-3, recipe or "bf16")

    def loss_fn(variables: dict[str, Any], tokens: jax.Array) -> jax.Array:
        out = jax.nn.log_softmax(logits(variables, tokens[:, :-1], recipe).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(out[:, 1:], tokens[:, 2:, None], axis=-1))

    @jax.jit
    def step(variables: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables, tokens)
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    opt_state, rng, losses = tx.init(variables["params"]), np.random.default_rng(seed), []
    for _ in range(steps):
        variables, opt_state, loss = step(variables, opt_state, jnp.asarray(batch(rng)))
        losses.append(float(loss))
    return float(np.mean(losses[-max(steps // 10, 1) :]))


def main() -> None:
    """Trains with and without FP8, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--recipe", default="te", help="its GEMM columns are used")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, recipe in (("bf16", None), (args.recipe, args.recipe)):
        print(f"{name:8} loss {train(recipe, args.steps, args.seed):.4f}", flush=True)


if __name__ == "__main__":
    main()
