"""Adam's losses to rounding: each recipe's weights and moments beside Adam in float64.

    python examples/bench/rounding.py
    python examples/bench/rounding.py --recipes te O2 --json
    python examples/bench/rounding.py --recipes te fp8,moments=E5M2+E4M4 COAT FlashOptim

- "idle row": a row of a table gets one gradient, and none in the 2000 steps after it (learning rate 1e-3).
  The figure is how far the row moves, as a multiple of its way in float64.
- "Zipf embedding": 1024 words occur with Zipf's frequencies, 32 draws a step, 3000 steps (rate 1e-3).
  The figure is how far the rarest eighth of the words moves (root mean square).
- "small steps": weights of 0.02 get gradients of one sign for 500 steps. The figure is the distance to the
  float64 weights, as a fraction of their way.
- "plain weights": the same for bfloat16 and float16 arrays as parameters. "stored" is of the weights with
  their remainders, from which the next step goes on; without a remainder both are the same. Also the bytes
  per parameter of the weight, the optimizer's state, and a gradient in the weight's dtype.
- "small gradients": one tensor has gradients spread over 1e-6 to 1, from small to large, and in any order,
  so that a group with one scale has all of them. The figure is the last update of the lowest decade, as a
  multiple of the update in float64.
- "fine-tuning": an MLP is trained in float32, and then at rate 1e-6 to other targets for 1000 steps. The
  figure is how far its loss falls, as a multiple of the fall with te, which has float32 weights.

Except in fine-tuning, gradients are float32 arrays, so that all differences are the optimizer's. COAT and
FlashOptim stand for their codes of moments beside float32 weights; they have no rows for "plain weights" and
"fine-tuning".
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import output
from codes import decode, encode, through_coat

import fp8jax
from fp8jax import Recipe, formats
from fp8jax.optim.step.weight_rounding import decode_weight

BETAS = ((0.9, 0.95), (0.95, 0.999), (0.9, 0.999))
RATES = (1e-4, 1e-5, 1e-6)
Gradient = Callable[[int], np.ndarray]  # step -> float32 gradient


def exact(start: np.ndarray, gradient: Gradient, steps: int, rate: float, betas: tuple[float, float]) -> Any:
    """The weights after these steps of Adam in float64, and the last update."""
    weights, m, v = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    update = m
    for step in range(steps):
        g = gradient(step).astype(np.float64)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        root = np.sqrt(v / (1 - betas[1] ** (step + 1)))
        update = -rate * m / (1 - betas[0] ** (step + 1)) / (root + 1e-8)
        weights = weights + update
    return weights, update


# Code -> what a first moment and a second one are after they were stored.
OTHERS: dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]] = {
    "COAT": (through_coat, through_coat),
    "FlashOptim": (
        lambda m: decode(encode(m, False), m.shape, False),
        lambda v: decode(encode(v, True), v.shape, True),
    ),
}


def in_other_code(
    code: str, start: np.ndarray, gradient: Gradient, steps: int, rate: float, betas: tuple[float, float]
) -> Any:
    """The same in float32, with moments stored in one of `OTHERS`."""
    store_first, store_second = OTHERS[code]

    @jax.jit
    def step(weights: Any, m: Any, v: Any, grads: jax.Array, number: jax.Array) -> tuple[Any, Any, Any]:
        m, v = betas[0] * m + (1 - betas[0]) * grads, betas[1] * v + (1 - betas[1]) * jnp.square(grads)
        root = jnp.sqrt(v / (1 - betas[1] ** number))
        update = -rate * m / (1 - betas[0] ** number) / (root + 1e-8)
        return weights + update, store_first(m), store_second(v)

    weights = old = jnp.asarray(start)
    m = v = jnp.zeros(start.shape)
    for number in range(steps):
        old = weights
        weights, m, v = step(weights, m, v, jnp.asarray(gradient(number)), jnp.float32(number + 1))
    end, before = np.asarray(weights, np.float64), np.asarray(old, np.float64)
    return end, end - before


def trained(
    recipe: str, start: np.ndarray, gradient: Gradient, steps: int, rate: float, betas: tuple[float, float]
) -> Any:
    """The same by `fp8jax.optim.adam` with the recipe's weights and moments, or in another code."""
    if recipe in OTHERS:
        return in_other_code(recipe, start, gradient, steps, rate, betas)
    row = Recipe.parse(recipe)
    weights: Any = jnp.asarray(start)
    if row.weight != "FP32":
        weights = fp8jax.quantize(weights, formats.get(row.weight), power_of_two=True)
    weights, old, _ = after(row, weights, gradient, steps, rate, betas)
    end, before = (np.asarray(getattr(w, "dequantize", lambda w=w: w)(), np.float64) for w in (weights, old))
    return end, end - before


def after(
    recipe: Recipe, weights: Any, gradient: Gradient, steps: int, rate: float, betas: tuple[float, float]
) -> Any:
    """The weights, those before the last step, and the optimizer's state."""
    tx = fp8jax.optim.adam(rate, recipe, *betas)

    @jax.jit
    def step(weights: Any, state: Any, grads: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, weights)
        return fp8jax.apply_updates(weights, updates), state

    state, old = tx.init(weights), weights
    for number in range(steps):
        old = weights
        weights, state = step(weights, state, jnp.asarray(gradient(number)))
    return weights, old, state


def rms(x: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(x))))


def idle_row(recipe: str, betas: tuple[float, float], steps: int) -> float:
    """How far the row moves / how far it moves in float64."""
    noise = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    start = np.float32(0.02) * noise

    def gradient(step: int) -> np.ndarray:
        used = np.random.default_rng(step).standard_normal(64, np.float32)
        return np.stack([used, noise[1] if step == 0 else np.zeros(64, np.float32)])

    ours, theirs = (
        rms((way(start, gradient, steps, 1e-3, betas)[0] - start)[1])
        for way in (lambda *args: trained(recipe, *args), exact)
    )
    return ours / theirs


def zipf_rows(recipes: list[str], steps: int, words: int = 1024, width: int = 16) -> output.Rows:
    """One row per way, float64 first."""
    chances = 1 / np.arange(1, words + 1)
    start = np.float32(0.02) * np.random.default_rng(1).standard_normal((words, width), np.float32)

    def gradient(step: int) -> np.ndarray:
        random = np.random.default_rng(step)
        counts = random.multinomial(32, chances / chances.sum())
        noise = random.standard_normal((words, width), np.float32)
        return np.float32(1e-2) * noise * counts[:, None].astype(np.float32)

    def end(way: Callable[..., Any]) -> float:
        return rms((way(start, gradient, steps, 1e-3, BETAS[0])[0] - start)[-words // 8 :])

    reference = end(exact)
    found = [{"way": "float64", "rms": reference, "/ float64": 1.0}]
    for recipe in recipes:
        value = end(lambda *args, recipe=recipe: trained(recipe, *args))
        found.append({"way": recipe, "rms": value, "/ float64": value / reference})
    return found


def one_signed() -> tuple[np.ndarray, Gradient]:
    """Weights, and gradients that keep their signs."""
    random = np.random.default_rng(2)
    start = (
        np.float32(0.02) * random.choice([-1, 1], 4096).astype(np.float32) * random.uniform(0.5, 1.5, 4096)
    )
    start, sign = start.astype(np.float32), random.choice([-1, 1], 4096).astype(np.float32)

    def gradient(step: int) -> np.ndarray:
        return sign * np.random.default_rng(step).uniform(0.5, 1.5, 4096).astype(np.float32)

    return start, gradient


def plain_steps(recipe: str, dtype: str, rates: tuple[float, ...], steps: int) -> dict[str, Any]:
    """The row of plain 16-bit weights."""
    start, gradient = one_signed()
    weights = jnp.asarray(start, dtype)
    row: dict[str, Any] = {"recipe": recipe, "weights": dtype}
    begun = np.asarray(weights, np.float64)
    for rate in rates:
        theirs = exact(begun, gradient, steps, rate, BETAS[0])[0]
        new, _, state = after(Recipe.parse(recipe), weights, gradient, steps, rate, BETAS[0])
        stored = decode_weight(new, state.remainder)
        for name, found in (("", new), (" stored", stored)):
            distance = rms(np.asarray(found, np.float64) - theirs)
            row[f"lr {rate:.0e}{name}"] = distance / rms(theirs - begun)
        # Scales and counters are a few numbers for each tensor.
        kept = [x for x in jax.tree.leaves((new, state)) if x.size == new.size]
        row["bytes"] = sum(x.nbytes for x in kept) / new.size + new.dtype.itemsize
    return row


def small_steps(recipe: str, rate: float, steps: int) -> float:
    """Distance to the float64 weights / how far these moved."""
    start, gradient = one_signed()
    begun = trained(recipe, start, gradient, 0, rate, BETAS[0])[0]
    theirs = exact(begun, gradient, steps, rate, BETAS[0])[0]
    return rms(trained(recipe, start, gradient, steps, rate, BETAS[0])[0] - theirs) / rms(theirs - begun)


def small_gradients(recipe: str, steps: int, *, is_mixed: bool) -> float:
    """The last update of the lowest decade / that in float64."""
    size, start = np.logspace(-6, 0, 6000).astype(np.float32), np.zeros(6000, np.float32)
    lowest = slice(0, 1000)
    if is_mixed:
        order = np.random.default_rng(7).permutation(6000)
        size, lowest = size[order], np.flatnonzero(order < 1000)

    def gradient(step: int) -> np.ndarray:
        return size * np.random.default_rng(step).standard_normal(6000, np.float32)

    ours, theirs = (
        rms(way(start, gradient, steps, 1e-3, BETAS[2])[1][lowest])
        for way in (lambda *args: trained(recipe, *args), exact)
    )
    return ours / theirs


class MLP(nn.Module):
    """The model of fine-tuning."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """64 outputs."""
        return nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.gelu(nn.Dense(256)(x)))))


def trained_mlp(recipe: str, plain: Any, x: jax.Array, y: jax.Array, rate: float, steps: int) -> Any:
    """The plain variables after these steps from `plain`, and the mean losses of the first and last tenth."""
    model, tx = fp8jax.transform(MLP(), recipe), fp8jax.optim.adam(rate, recipe, *BETAS[0])
    variables = model.quantize(plain, model.init(jax.random.key(0), x))

    @jax.jit
    def step(variables: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss_fn = lambda variables: jnp.mean((model.apply(variables, x) - y) ** 2)  # noqa: E731
        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables)
        updates, state = tx.update(grads, state, variables["params"])
        return fp8jax.apply_updates(variables, updates), state, loss

    state, losses = tx.init(variables["params"]), []
    for _ in range(steps):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    tenth = -(-steps // 10)
    return model.dequantize(variables), float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:]))


def fine_tuning(recipes: list[str], steps: int) -> output.Rows:
    """One row per recipe, float32 weights first."""
    x, y, other = np.random.default_rng(3).standard_normal((3, 512, 64)).astype(np.float32)
    plain, _, _ = trained_mlp("fp32", MLP().init(jax.random.key(0), x), x, y, 1e-3, steps)
    found: output.Rows = []
    for recipe in ["te", *(recipe for recipe in recipes if recipe != "te")]:
        _, first, last = trained_mlp(recipe, plain, x, y + np.float32(0.5) * other, 1e-6, steps)
        fall = 1.0 if not found else (first - last) / (found[0]["first tenth"] - found[0]["last tenth"])
        found.append({"recipe": recipe, "first tenth": first, "last tenth": last, "fall / te": fall})
    return found


def main() -> None:
    """Measures and prints."""
    args = output.parse(
        __doc__,
        tiny={"idle": 20, "zipf": 20, "small": 20, "tune": 20},
        recipes=["te", "O2", "O3", "fp8"],
        idle=2000,
        zipf=3000,
        small=500,
        tune=1000,
    )
    idle = [
        {"recipe": recipe, **{f"betas {b}": idle_row(recipe, b, args.idle) for b in BETAS}}
        for recipe in args.recipes
    ]
    small = [
        {
            "recipe": recipe,
            **{f"lr {rate:.0e}": small_steps(recipe, rate, args.small) for rate in RATES},
        }
        for recipe in args.recipes
    ]
    recipes = [recipe for recipe in args.recipes if recipe not in OTHERS]
    plain = [
        plain_steps(recipe, dtype, RATES, args.small)
        for dtype in ("bfloat16", "float16")
        for recipe in recipes
    ]
    orders = {"update / float64": False, "in any order": True}
    spread = [
        {"recipe": recipe}
        | {name: small_gradients(recipe, args.small, is_mixed=mixed) for name, mixed in orders.items()}
        for recipe in args.recipes
    ]
    sections = {
        "idle row: way / way in float64": idle,
        "Zipf embedding: the rarest words": zipf_rows(args.recipes, args.zipf),
        "small steps: error / way": small,
        "plain weights: error / way": plain,
        "small gradients: the lowest decade": spread,
        "fine-tuning: the loss": fine_tuning(recipes, args.tune),
    }
    output.finish("rounding", output.cpu_name(), sections, args)


if __name__ == "__main__":
    main()
