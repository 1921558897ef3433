"""An optimizer step on torch: time, bytes a parameter, temporary memory.

    python examples/bench/torch_update.py
    python examples/bench/torch_update.py --leaves 100 --rounds 20 --record examples/records

Square parameters (14 of 1871 x 1871 are 49 millions) with gradients in the recipe's format, on the GPU if
there is one. The references are torch's AdamW in float32, `foreach` and `fused`. The ways take turns. "kept"
are parameter, gradient and state; "aside" is the most that a step allocates besides, in bytes per parameter
of a leaf. "/ foreach" is the median over the rounds of the ratio of two steps.
"""

import statistics
import time
import weakref
from typing import Any

import clock
import output
import torch
from fp8jax_torch import quantize
from fp8jax_torch.optim import AdamW
from fp8jax_torch.scaled import is_scaled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8jax import Recipe, formats

FOREACH, FUSED = "torch foreach", "torch fused"
WAYS = [FOREACH, FUSED, "te", "O1", "O2", "O3", "fp8"]


class Aside(TorchDispatchMode):
    """Counts the bytes that operations allocate, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not is_scaled(t)]
        known = {t.untyped_storage()._cdata for t in given}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in known | self.seen:
                    self._follow(storage)
        self.peak = max(self.peak, self.live)
        return out

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.live += size
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def optimizer_of(way: str, leaves: int, size: int, device: torch.device) -> Any:
    """An optimizer of parameters with gradients."""
    recipe = Recipe.FP32 if way.startswith("torch") else Recipe.parse(way)
    parameters = []
    for _ in range(leaves):
        weight, grad = torch.randn(2, size, size, device=device)
        tensors = [weight * 0.02, grad * 1e-3]
        for i, column in enumerate((recipe.weight, recipe.weight_grad)):
            if column != "FP32":
                tensors[i] = quantize(tensors[i], formats.get(column), power_of_two=True)
        parameters.append(torch.nn.Parameter(tensors[0]))
        parameters[-1].grad = tensors[1]
    if way in (FOREACH, FUSED):
        return torch.optim.AdamW(parameters, foreach=way == FOREACH, fused=way == FUSED)
    return AdamW(parameters, recipe=recipe)


def kept(optimizer: Any) -> int:
    """Bytes of parameters, gradients and state."""
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    for parameter in optimizer.param_groups[0]["params"]:
        for tensor in (parameter.detach(), parameter.grad):
            tensors += [tensor.codes, tensor.scale] if is_scaled(tensor) else [tensor]
    return sum(tensor.nbytes for tensor in tensors)


def timed(optimizer: Any, device: torch.device) -> float:
    """Seconds of a step."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begun = time.perf_counter()
    optimizer.step()
    synchronize()
    return time.perf_counter() - begun


def measure(ways: list[str], leaves: int, size: int, rounds: int, device: torch.device) -> output.Rows:
    """One row per way."""
    torch.manual_seed(0)
    optimizers = {way: optimizer_of(way, leaves, size, device) for way in ways}
    for optimizer in optimizers.values():
        for _ in range(3):  # the first step makes the state
            optimizer.step()
    turns = {way: lambda each=each: timed(each, device) for way, each in optimizers.items()}
    times, numbers, rows = clock.take_turns(turns, rounds), leaves * size**2, []
    for way, optimizer in optimizers.items():
        with Aside() as aside:
            optimizer.step()
        rows.append(
            {
                "way": way,
                "step ms": 1e3 * statistics.median(times[way]),
                "ns / parameter": 1e9 * statistics.median(times[way]) / numbers,
                f"/ {ways[0].removeprefix('torch ')}": clock.ratio(times, way, ways[0]),
                "bytes kept / parameter": kept(optimizer) / numbers,
                "aside, / of a leaf": aside.peak / size**2,
            }
        )
    return rows


def main() -> None:
    """Measures and prints."""
    tiny = {"leaves": 2, "size": 64, "rounds": 2}
    args = output.parse(
        __doc__, tiny=tiny, choices={"ways": WAYS}, ways=WAYS, leaves=14, size=1871, rounds=10
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name().split()[-1].lower() if device.type == "cuda" else output.cpu_name()
    title = f"{name}, {args.leaves} leaves of {args.size} x {args.size}, {args.rounds} rounds"
    sections = {title: measure(args.ways, args.leaves, args.size, args.rounds, device)}
    output.finish("torch_update", name, sections, args, packages=("torch", "ml_dtypes"))


if __name__ == "__main__":
    main()
