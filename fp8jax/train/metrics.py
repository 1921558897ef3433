"""Metrics of a training run: loss, scales, saturation, bytes; and the files that they are written to.

    names = scaled_tensors(variables)               # [ScaledTensor("h/attn/c_attn", "0", "input"), ...]
    metrics = scale_metrics(before, after, recipe)  # inside of the jitted step
    metrics.saturation                              # above 1.07: the cast of this step clipped

The scaling state after a step says how well its FP8 casts fitted: the newest amax is the step's, and
the scale before the step, times the largest value of the format, is the range that the cast had.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, PyTree

from fp8jax.adapters.adapter import adapter_of
from fp8jax.extras import need
from fp8jax.quantization import UNSET, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite import StaticTree
from fp8jax.scaling import GRAD, LHS, RHS, of_recipe
from fp8jax.scaling.merge import is_state
from fp8jax.train import distributed
from fp8jax.train.errors import unwritten
from fp8jax.train.run_folder import write
from fp8jax.variables import PARAMS, SCALING, named_leaves

MOST_ROWS = 1000  # of the scales in a `Curves`; a picture of them has hardly more columns
OPERANDS = ("input", "weight", "output gradient")  # the order in a dot's scaling state


class ScaledTensor(NamedTuple):
    """One operand of one FP8 layer."""

    layer: str  # path in "params"
    number: str  # index in a scan over layers, else ""
    operand: str  # one of OPERANDS


class ScaleMetrics(NamedTuple):
    """The casts of one step, in the order of `scaled_tensors`."""

    scale: Float32[Array, " tensors"]  # the scale for the next step
    saturation: Float32[Array, " tensors"]  # amax / (scale of this step * the format's max)


class StepMetrics(NamedTuple):
    """The metrics of one step; on the devices, to be fetched later."""

    loss: Float32[Array, ""]
    skipped: Int32[Array, ""]  # steps skipped so far because of a gradient that was not finite
    scales: ScaleMetrics


def scaled_tensors(variables: PyTree) -> list[ScaledTensor]:
    """The tensors with a delayed scale, in the order of `scale_metrics`."""
    found = []
    for path, state in _delayed_states(variables):
        for *number, operand in np.ndindex(state["scale"].shape):
            found.append(ScaledTensor(path, ",".join(map(str, number)), OPERANDS[operand]))
    return found


def scale_metrics(before: PyTree, after: PyTree, recipe: Recipe) -> ScaleMetrics:
    """The scales and the saturation of a step.

    Args:
        before: variables that the step began with.
        after: variables that it ended with.
        recipe: the formats of the casts are those of its scaling.
    """
    scales, saturations = [jnp.zeros(0)], [jnp.zeros(0)]
    limits = jnp.array([of_recipe(recipe).format(operand).max for operand in (LHS, RHS, GRAD)], jnp.float32)
    for (_, old), (_, new) in zip(_delayed_states(before), _delayed_states(after), strict=True):
        largest = old["scale"] * jnp.broadcast_to(limits, old["scale"].shape)
        ratio = new["amax_history"][..., 0] / largest
        # The first step takes the scale from the tensor itself, which then fits.
        ratio = jnp.where(old["scale"] == UNSET, 1.0, ratio)
        scales.append(new["scale"].reshape(-1))
        saturations.append(ratio.reshape(-1))
    return ScaleMetrics(jnp.concatenate(scales), jnp.concatenate(saturations))


def clipped(model: Any, *args: Any, **kwargs: Any) -> dict[ScaledTensor, float]:
    """The inputs and weights that a call of a model clips, and how many times larger than the range each is.

    A call casts with the scales that training left. Inputs much larger than those of training are clipped,
    and since an evaluation changes no scale, they stay clipped.

        clipped(model, variables, x)      # a Linen model, or a function
        clipped(model, x)                 # an NNX module

    Args:
        model: from `fp8jax.transform`.
        args, kwargs: the arguments of `model.apply`, of an NNX module those of the module. The module's
            variables stay as they are.

    Returns:
        The tensors whose largest magnitude is above the range of their cast; up to 1.07 times the range only
        rounding changes it. {} if all fit. Empty, too, without delayed scaling.

    Raises:
        TypeError: `model` is not transformed.
    """
    adapter = adapter_of(model)
    variables, inputs = adapter.split(*args)
    states, recipe = variables.get(SCALING, {}), adapter.settings.recipe
    # What a jitted function closes over would be constants of its program.
    static, arrays = StaticTree.of((variables, inputs, kwargs))

    def outputs(states: PyTree, arrays: list[Array]) -> Float32[Array, ""]:
        variables, inputs, kwargs = static.filled(arrays)
        leaves = jax.tree.leaves(adapter.apply({**variables, SCALING: states}, *inputs, **kwargs))
        floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.sum(leaf, dtype=jnp.float32) for leaf in floats), jnp.float32(0))

    @jax.jit
    def saturation(states: PyTree, arrays: list[Array]) -> Float32[Array, " tensors"]:
        # The gradient of a scaling state is the state after the step, with the newest amaxes.
        after = jax.grad(outputs)(states, arrays)
        return scale_metrics({SCALING: states}, {SCALING: after}, recipe).saturation

    names = scaled_tensors({SCALING: states})
    return only_clipped(names, saturation(states, arrays)) if names else {}


def only_clipped(names: Sequence[ScaledTensor], saturation: Any) -> dict[ScaledTensor, float]:
    """The inputs and weights with a saturation above 1."""
    pairs = zip(names, map(float, saturation), strict=True)
    limit = 1 + 1e-6  # a scale computed from this very amax is off by its rounding
    return {name: ratio for name, ratio in pairs if ratio > limit and name.operand != OPERANDS[2]}


def _delayed_states(variables: PyTree) -> list[tuple[str, Mapping[str, Any]]]:
    """(layer, state) of every dot with delayed scales, in the order of their paths."""
    found = named_leaves(variables.get(SCALING, {}), is_state)
    return [(path.removesuffix("/kernel"), state) for path, state in found if is_state(state)]


class Bytes(NamedTuple):
    """Bytes per parameter of the arrays of a step."""

    weights: float
    gradients: float
    optimizer: float
    scaling: float  # amax histories and scales: a few per layer


def parameters(variables: PyTree) -> int:
    """Number of trained values; scales are not counted."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables[PARAMS], is_leaf=is_scaled))


def bytes_per_parameter(variables: PyTree, gradients: PyTree, opt_state: PyTree) -> Bytes:
    """The bytes of arrays, divided by the number of parameters.

    Args:
        variables: with "params" and, if the recipe has any, the scaling state.
        gradients: as `fp8jax.value_and_grad` gives them, or their shapes.
        opt_state: any pytree.
    """

    def size(tree: PyTree) -> float:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / count

    count = parameters(variables)
    scaling = size(variables.get(SCALING, {}))
    return Bytes(size(variables[PARAMS]), size(gradients), size(opt_state), scaling)


@dataclasses.dataclass
class Curves:
    """The metrics of a model over its run; the lists grow, those of scales and saturations to `MOST_ROWS`."""

    loss: list[float] = dataclasses.field(default_factory=list)  # of every step
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (steps done, loss)
    seconds: float = 0.0  # in training steps, without compiling
    skipped: list[int] = dataclasses.field(default_factory=list)  # numbers of the skipped steps, from 1
    skips: int = 0  # the optimizer's count of them
    scale_steps: list[int] = dataclasses.field(default_factory=list)  # steps done, of each row below
    scales: list[list[float]] = dataclasses.field(default_factory=list)  # rows as in `ScaleMetrics`
    saturations: list[list[float]] = dataclasses.field(default_factory=list)
    # (steps done, share of the weights that the last of them left unchanged), see `step.unchanged_weights`
    unchanged: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    # (steps done, tensor -> share of its numbers that the cast rounds to zero)
    underflow: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)

    def add(self, steps: Sequence[StepMetrics], seconds: float, unchanged: float | None = None) -> None:
        """Appends a span of steps: each loss, the skipped steps, the last scales, the largest saturation, and
        the share of the weights that the last step left unchanged, if it was counted."""
        for step in steps:
            self.loss.append(float(step.loss))
            if step.skipped > self.skips:
                self.skipped.append(len(self.loss))
            self.skips = int(step.skipped)
        if unchanged is not None and len(self.loss) not in self.skipped[-1:]:
            self.unchanged.append((len(self.loss), unchanged))
        self.seconds += seconds
        self._make_room()
        self.scale_steps.append(len(self.loss))
        self.scales.append(np.asarray(steps[-1].scales.scale).tolist())
        self.saturations.append(np.max([step.scales.saturation for step in steps], axis=0).tolist())

    def _make_room(self) -> None:
        """Merges each two neighbours of too many rows: the last scales, the larger saturations."""
        while (count := len(self.scale_steps)) >= MOST_ROWS:
            last = [min(first + 1, count - 1) for first in range(0, count, 2)]
            self.scale_steps = [self.scale_steps[i] for i in last]
            self.scales = [self.scales[i] for i in last]
            rows = np.array(self.saturations)
            self.saturations = np.maximum(rows[::2], rows[last]).tolist()

    @property
    def steps_per_second(self) -> float:
        """The mean speed of training steps, without compiling and validation."""
        return len(self.loss) / max(self.seconds, 1e-9)

    def line(self, steps: int, amount: int, unit: str) -> dict[str, float]:
        """The metrics of the last `steps` steps, of `amount` rows or tokens each."""
        line = {
            "loss": float(np.mean(self.loss[-steps:])),
            "skipped_steps": self.skips,
            f"{unit}_per_second": self.steps_per_second * amount,
        }
        if self.saturations[-1]:
            line["largest_saturation"] = max(self.saturations[-1])
        if self.unchanged and self.unchanged[-1][0] == len(self.loss):
            line["unchanged_weights"] = self.unchanged[-1][1]
        if self.underflow and self.underflow[-1][0] == len(self.loss):
            line["largest_underflow"] = max(self.underflow[-1][1].values(), default=0.0)
        if self.validation and self.validation[-1][0] == len(self.loss):
            line["validation_loss"] = self.validation[-1][1]
        return line

    def to_json(self) -> dict[str, Any]:
        """All fields, for a checkpoint."""
        return vars(self).copy()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Curves":
        """The inverse of `to_json`, through a file too."""
        pairs = {
            name: list(map(tuple, content.get(name, ()))) for name in ("validation", "unchanged", "underflow")
        }
        return cls(**{**content, **pairs})


class MetricsWriter:
    """Writes metrics.jsonl, one JSON object per line, and TensorBoard's files if a writer is installed.

    Args:
        folder: of the run.
        step: steps done. Lines of later steps, which a resumed run does again, are removed, and damaged
            lines, too.

    Raises:
        OSError: metrics.jsonl is no file, or cannot be read or written.
    """

    def __init__(self, folder: pathlib.Path, step: int) -> None:
        path = folder / "metrics.jsonl"
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is no file; move it away and resume")
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        steps = list(map(_step_of, lines))
        # The last is empty, or was cut off by a kill.
        damaged = [number for number, at in enumerate(steps[:-1], 1) if at is None]
        if damaged:
            distributed.warn(
                f"{path}: {len(damaged)} damaged lines are left out, the first is line {damaged[0]}"
            )
        pairs = zip(lines, steps, strict=True)
        write(path, b"".join(line + b"\n" for line, at in pairs if at is not None and at <= step))
        self._file = open(path, "a", encoding="utf-8")
        self._folder, self._step, self._boards = folder / "tensorboard", step, {}

    def write(self, step: int, model: str, values: Mapping[str, float]) -> None:
        """Writes the metrics of a model after `step` steps.

        Raises:
            OSError: metrics.jsonl cannot be written.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, "model": model, **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # it tries to write again
                self._file.close()
            raise unwritten(self._file.name, error) from None
        if model not in self._boards:
            self._boards[model] = _summary_writer(self._folder / model, self._step + 1)
        for name, value in values.items() if self._boards[model] else ():
            self._boards[model].add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        for board in filter(None, self._boards.values()):
            board.close()


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line is damaged."""
    try:
        step = json.loads(line)["step"]
    except (LookupError, RecursionError, TypeError, ValueError):
        return None
    return step if type(step) is int else None


def _summary_writer(folder: pathlib.Path, first_step: int) -> Any:
    """A TensorBoard writer; None if no package for it is installed."""
    if importlib.util.find_spec("tensorboardX"):
        module = "tensorboardX"
    elif importlib.util.find_spec("tensorboard") and importlib.util.find_spec("torch"):
        module = "torch.utils.tensorboard"
    else:
        return None
    return need(module).SummaryWriter(str(folder), purge_step=first_step)
