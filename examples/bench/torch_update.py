"""What an optimizer step costs on torch: time, bytes a parameter, memory aside.

    python examples/bench/torch_update.py
    python examples/bench/torch_update.py --leaves 100 --rounds 20 --record examples/records

Square parameters whose gradients come in the recipe's format, on the GPU if there is one; torch's own AdamW
in float32 is the reference, by its `foreach` and its `fused` way. The ways take turns. "kept" is parameter,
gradient and state; "aside" the most that a step allocates besides, in bytes a parameter of the largest leaf.
"/ foreach" is the median over the rounds of the ratio of two steps that follow each other.
"""

import argparse
import statistics
import time
import weakref
from typing import Any

import output
import torch
from fp8jax_torch import quantize, value
from fp8jax_torch.optim import AdamW
from fp8jax_torch.scaled import is_scaled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8jax import Recipe, formats

FOREACH, FUSED = "torch foreach", "torch fused"
WAYS = [FOREACH, FUSED, "te", "O1", "O2", "O3"]


class Aside(TorchDispatchMode):
    """Counts the bytes that operations allocate and nobody has freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation."""
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
    """An optimizer whose parameters have gradients."""
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
    if way == FOREACH:
        return torch.optim.AdamW(parameters, foreach=True)
    return torch.optim.AdamW(parameters, fused=True) if way == FUSED else AdamW(parameters, recipe=recipe)


def kept(optimizer: Any) -> int:
    """Bytes of parameters, gradients and state."""
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    for parameter in optimizer.param_groups[0]["params"]:
        for tensor in (parameter.detach(), parameter.grad):
            tensors += [tensor.codes, tensor.scale] if hasattr(tensor, "codes") else [tensor]
    return sum(tensor.nbytes for tensor in tensors)


def timed(optimizer: Any, device: torch.device) -> float:
    """Seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(ways: list[str], leaves: int, size: int, rounds: int, device: torch.device) -> list[Any]:
    """One row a way."""
    torch.manual_seed(0)
    optimizers = {way: optimizer_of(way, leaves, size, device) for way in ways}
    for optimizer in optimizers.values():
        for _ in range(3):  # the state, and what a step guesses from the steps before
            optimizer.step()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            times[way].append(timed(optimizers[way], device))
    rows, numbers = [], leaves * size**2
    for way, optimizer in optimizers.items():
        ratios = [own / other for own, other in zip(times[way], times[ways[0]], strict=True)]
        with Aside() as aside:
            optimizer.step()
        parameter = optimizer.param_groups[0]["params"][0].detach()
        rows.append(
            {
                "way": way,
                "step ms": 1e3 * statistics.median(times[way]),
                "ns / parameter": 1e9 * statistics.median(times[way]) / numbers,
                f"/ {ways[0].removeprefix('torch ')}": statistics.median(ratios),
                "bytes kept / parameter": kept(optimizer) / numbers,
                "aside, / of a leaf": aside.peak / value(parameter).numel(),
            }
        )
    return rows


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument(
        "--leaves", type=int, default=14, help="parameters; 14 of 1871 x 1871 are 49 millions"
    )
    parser.add_argument("--size", type=int, default=1871, help="rows and columns of a parameter")
    parser.add_argument("--rounds", type=int, default=10)
    output.add_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.leaves, args.size, args.rounds = 2, 64, 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name().split()[-1].lower() if device.type == "cuda" else output.cpu_name()
    title = f"{name}, {args.leaves} leaves of {args.size} x {args.size}, {args.rounds} rounds"
    sections = {title: measure(args.ways, args.leaves, args.size, args.rounds, device)}
    output.finish("torch_update", name, sections, args, packages=("torch", "ml_dtypes"))


if __name__ == "__main__":
    main()
