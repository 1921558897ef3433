"""What a run shows of itself: its curves, its scales, its bytes.

    names = tensors(variables)                      # [Tensor("h/attn/c_attn", "0", "input"), ...]
    seen = watch(before, after, recipe)             # inside the jitted step
    seen.saturation                                 # above 1: the cast of this step clipped

The scaling state of a step says how well its FP8 casts fitted: the newest amax, which the step
saw, against the largest value that the scale it used can represent.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import formats
from fp8jax.quantization import UNSET, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, SCALING

OPERANDS = ("input", "weight", "output gradient")  # the order of a dot's scaling state


class Tensor(NamedTuple):
    """One operand of one FP8 layer."""

    layer: str  # path in "params"
    number: str  # within a scan over layers, else ""
    operand: str  # a value of OPERANDS


class Watched(NamedTuple):
    """One step's casts, in the order of `tensors`."""

    scale: jax.Array  # shape=(tensors,), float32: the scale for the next step
    saturation: jax.Array  # shape=(tensors,), float32: amax / (scale used * the format's max)


class Seen(NamedTuple):
    """What is seen of a step; on the devices, so that it can be fetched later."""

    loss: jax.Array  # shape=(), float32
    skipped: jax.Array  # shape=(), int32: steps that were skipped so far, for a number that was not finite
    watched: Watched  # its casts


def tensors(variables: Any) -> list[Tensor]:
    """The tensors with a delayed scale, in the order of `watch`."""
    found = []
    for path, state in _delayed(variables):
        for *number, operand in np.ndindex(state["scale"].shape):
            found.append(Tensor(path, ",".join(map(str, number)), OPERANDS[operand]))
    return found


def watch(before: Any, after: Any, recipe: Recipe) -> Watched:
    """The scales and the saturation of the step that made `after` of `before`.

    Args:
        before: variables that the step started from.
        after: variables that it ended with.
        recipe: says which formats the casts were to.
    """
    scales, saturations = [], []
    forward, backward = (formats.get(name).max for name in recipe.gemm_formats)
    limits = jnp.array([forward, forward, backward], jnp.float32)
    for (_, old), (_, new) in zip(_delayed(before), _delayed(after), strict=True):
        largest = old["scale"] * jnp.broadcast_to(limits, old["scale"].shape)
        ratio = new["amax_history"][..., 0] / largest
        # Before the first step the scale comes from the tensor itself, which then fits.
        ratio = jnp.where(old["scale"] == UNSET, 1.0, ratio)
        scales.append(new["scale"].reshape(-1))
        saturations.append(ratio.reshape(-1))
    if not scales:
        return Watched(jnp.zeros((0,)), jnp.zeros((0,)))
    return Watched(jnp.concatenate(scales), jnp.concatenate(saturations))


def _delayed(variables: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(layer, state) of every dot with delayed scales, in a fixed order."""

    def visit(path: tuple[str, ...], node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if not isinstance(node, Mapping):
            return
        if "amax_history" in node:
            yield "/".join(path).removesuffix("/kernel"), node
            return
        for name in sorted(node):
            yield from visit((*path, name), node[name])

    return visit((), variables.get(SCALING, {}))


class Bytes(NamedTuple):
    """Bytes per parameter of what a step keeps, every leaf counted."""

    weights: float
    gradients: float
    optimizer: float
    scaling: float  # amax histories and scales: per layer, so little in a large model


def parameters(variables: Any) -> int:
    """Number of trained values; a scale is not one."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables[PARAMS], is_leaf=is_scaled))


def bytes_per_parameter(variables: Any, gradients: Any, opt_state: Any) -> Bytes:
    """What the arrays take, divided by the number of parameters.

    Args:
        variables: with "params" and, if the recipe keeps any, the scaling state.
        gradients: as `fp8jax.value_and_grad` gives them, or their shapes (`jax.eval_shape`).
        opt_state: any pytree.
    """

    def size(tree: Any) -> float:
        return sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / count

    count = parameters(variables)
    scaling = size(variables.get(SCALING, {}))
    return Bytes(size(variables[PARAMS]), size(gradients[PARAMS]), size(opt_state), scaling)


@dataclasses.dataclass
class Curves:
    """What one model did so far; the lists grow."""

    loss: list[float] = dataclasses.field(default_factory=list)  # of every step
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (steps done, loss)
    seconds: float = 0.0  # in training steps, compiling excluded
    watched: list[tuple[int, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)  # numbers of those steps, from 1
    skips: int = 0  # as the optimizer counts them

    def add(self, seen: Sequence[Seen], seconds: float) -> None:
        """Appends a span of steps: its losses, which were skipped, the last scales, the worst saturation."""
        for step in seen:
            self.loss.append(float(step.loss))
            if step.skipped > self.skips:
                self.skipped.append(len(self.loss))
            self.skips = int(step.skipped)
        self.seconds += seconds
        saturation = np.max([step.watched.saturation for step in seen], axis=0)
        self.watched.append((len(self.loss), np.asarray(seen[-1].watched.scale), saturation))

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as arrays, for a checkpoint; inverse of `from_arrays`."""
        steps, scales, saturations = zip(*self.watched, strict=True) if self.watched else ((), (), ())
        return {
            "loss": np.array(self.loss),
            "validation": np.array(self.validation).reshape(-1, 2),
            "seconds": np.array(self.seconds),
            "watched_steps": np.array(steps, int),
            "scales": np.array(scales, np.float32),
            "saturations": np.array(saturations, np.float32),
            "skipped": np.array(self.skipped, int),
            "skips": np.array(self.skips),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Curves":
        """Curves that go on where `arrays` ends."""
        rows = zip(arrays["watched_steps"].tolist(), arrays["scales"], arrays["saturations"], strict=True)
        return cls(
            loss=arrays["loss"].tolist(),
            validation=[(int(step), loss) for step, loss in arrays["validation"].tolist()],
            seconds=float(arrays["seconds"]),
            watched=list(rows),
            skipped=arrays["skipped"].tolist(),
            skips=int(arrays["skips"]),
        )


def pack(curves: Iterable[Curves]) -> dict[str, np.ndarray]:
    """The curves of several models as arrays by name, for a checkpoint; inverse of `unpack`."""
    each = enumerate(one.arrays() for one in curves)
    return {f"{i}.{name}": array for i, arrays in each for name, array in arrays.items()}


def unpack(history: Mapping[str, np.ndarray]) -> list[Curves]:
    """The curves in their order."""
    models: dict[int, dict[str, np.ndarray]] = {}
    for key, array in history.items():
        i, name = key.split(".")
        models.setdefault(int(i), {})[name] = array
    return [Curves.from_arrays(models[i]) for i in sorted(models)]
