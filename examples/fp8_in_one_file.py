"""FP8 training from scratch: a small GPT, its FP8 matmuls and its training, from nothing but JAX.

    python examples/fp8_in_one_file.py            # trains in FP8 and in float32, prints both losses

An FP8 number has 8 bits. E4M3 has 4 bits of exponent and 3 of mantissa: it reaches from 2**-9 to 448, and
rounding is off by up to 1/16 of a number. E5M2 reaches from 2**-16 to 57344, and is off by up to 1/8. A GPU
multiplies FP8 matrices twice as fast as bfloat16 ones, and adds the products in float32. So all that
training in FP8 has to do is to bring the operands of each matmul into FP8.

**Scale.** The entries of a tensor may be around 1e-6, and E4M3 has nothing below 2e-3. So a tensor is stored
as codes and one float32 scale: value = codes * scale. The scale maps the largest magnitude, the amax, to the
largest code. Nothing overflows, and entries of a 200,000th of the amax still have a code. Taking the amax of
the tensor itself is called current scaling. It reads the tensor twice; delayed scaling takes the amax of the
steps before, and needs a state.

**Three matmuls.** For y = x @ w the backward needs dx = dy @ w.T and dw = x.T @ dy. JAX would differentiate
the cast to FP8, which has no useful derivative, and would multiply in high precision. So `fp8_dot` says by
`jax.custom_vjp` what its derivative is: the two matmuls with FP8 operands. The forward saves the codes of x
and w, not x and w: a byte for each entry. Output gradients have a wide spread of magnitudes and are stored in
E5M2, all else in E4M3. The gradient passes through the casts as if they were not there (straight-through).

**What stays.** Weights, their gradients and Adam's moments stay float32, and so do norms, the softmax and
attention's scores. The output head stays in high precision, too: its errors go into the loss at once.
That is all of it. docs/from-scratch.md says what a library adds.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LAYERS, HEADS, WIDTH, CONTEXT, WORDS, BATCH = 2, 4, 64, 32, 61, 16


class Scaled(NamedTuple):
    """An array in FP8: value = codes * scale."""

    codes: jax.Array
    scale: jax.Array

    @property
    def T(self) -> "Scaled":
        """The transposed matrix."""
        return Scaled(self.codes.T, self.scale)


def quantize(x: jax.Array, dtype: Any) -> Scaled:
    """`x` in FP8, on a scale of its own, rounded to nearest."""
    largest = float(jnp.finfo(dtype).max)
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(amax > 0, 1 / jnp.where(amax > 0, largest / amax, 1), 1)
    return Scaled(jnp.clip(x * (1 / scale), -largest, largest).astype(dtype), scale)


def matmul(a: Scaled, b: Scaled) -> jax.Array:
    """a @ b in float32. On a GPU the dot is one FP8 matmul; a CPU computes the same in float32."""
    return a.codes.astype(jnp.float32) @ b.codes.astype(jnp.float32) * a.scale * b.scale


@jax.custom_vjp
def fp8_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in FP8; x: (..., n), w: (n, m)."""
    return forward(x, w)[0]


def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    """The product, and what the backward needs: the operands in FP8."""
    rows, kernel = quantize(x.reshape(-1, x.shape[-1]), E4M3), quantize(w, E4M3)
    return matmul(rows, kernel).reshape(*x.shape[:-1], w.shape[1]), (rows, kernel)


def backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and w."""
    rows, kernel = saved
    grad = quantize(dy.reshape(-1, dy.shape[-1]), E5M2)
    dx = matmul(grad, kernel.T).reshape(*dy.shape[:-1], kernel.codes.shape[0])
    return dx, matmul(rows.T, grad)


fp8_dot.defvjp(forward, backward)


def gpt(dot: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Logits of the next token: (batch, time) -> (batch, time, words). `dot` multiplies by the kernels."""

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        batch, time = x.shape[:2]
        qkv = dot(norm(x), w["qkv"]).reshape(batch, time, 3, HEADS, WIDTH // HEADS)
        y = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + dot(y.reshape(x.shape), w["out"])
        return x + dot(jax.nn.gelu(dot(norm(x), w["up"])), w["down"]), None

    x = params["tokens"][tokens] + params["places"][None, : tokens.shape[1]]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return norm(x) @ params["lm_head"]


def init(key: jax.Array) -> Any:
    """The parameters; those of the blocks are stacked."""
    sides: Any = {"tokens": (WORDS, WIDTH), "places": (CONTEXT, WIDTH), "lm_head": (WIDTH, WORDS)}
    widths = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    sides["blocks"] = {name: (LAYERS, n * WIDTH, m * WIDTH) for name, (n, m) in widths.items()}
    shapes, tree = jax.tree.flatten(sides, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(shapes))
    return tree.unflatten(0.02 * jax.random.normal(*each) for each in zip(keys, shapes, strict=True))


def adam(grad: Any, state: Any, step: Any) -> tuple[Any, Any]:
    """The direction of Adam for one parameter, and its new moments."""
    m, v = 0.9 * state[0] + 0.1 * grad, 0.99 * state[1] + 0.01 * grad * grad
    return m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8), (m, v)


def batch_of(step: int) -> jax.Array:
    """Sequences to learn: walks over the words, each by a pace of its own."""
    start, pace = jax.random.randint(jax.random.fold_in(jax.random.key(1), step), (2, BATCH, 1), 1, WORDS)
    return (start + (pace % 4 + 1) * jnp.arange(CONTEXT + 1)[None]) % WORDS


def train(model: Any, steps: int, rate: float = 3e-3) -> list[float]:
    """Trains a model (params, tokens) -> logits; returns the losses."""
    leaves, tree = jax.tree.flatten(init(jax.random.key(0)))
    states = [(jnp.zeros_like(x), jnp.zeros_like(x)) for x in leaves]

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(model(params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    @jax.jit
    def update(leaves: Any, states: Any, tokens: jax.Array, step: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(tree.unflatten(leaves), tokens)
        moved = [adam(*pair, step) for pair in zip(jax.tree.leaves(grads), states, strict=True)]
        leaves = [x - rate * direction for x, (direction, _) in zip(leaves, moved, strict=True)]
        return loss, leaves, [state for _, state in moved]

    losses = []
    for step in range(1, steps + 1):
        loss, leaves, states = update(leaves, states, batch_of(step), step)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    for name, dot in (("FP8", fp8_dot), ("float32", jnp.matmul)):
        print(f"{name}: loss {train(functools.partial(gpt, dot), 300)[-1]:.4f}")
