"""A training step on torch by recipe: the same losses as on the CPU, and the time beside bfloat16.

    python examples/bench/torch_step.py
    python examples/bench/torch_step.py --tiny

MLP blocks (LayerNorm, Linear 4096 -> 16384, gelu, Linear -> 4096, residual) in bfloat16, trained by AdamW
through `fp8jax_torch.prepare(..., backend="native")`. "apart" is the largest distance of the first losses of
a small model from the same on the CPU, relative to the loss. The ways take turns; "compiled" ones are modules
through `torch.compile`.
"""

from collections.abc import Callable
from typing import Any

import clock
import fp8jax_torch
import output
import torch
from torch import nn

RECIPES = ("bf16", "te", "te,scaling=current", "O2", "fp8")
COMPILED = " compiled"
WAYS = (*RECIPES, *(recipe + COMPILED for recipe in ("bf16", "te", "O2")))
STEPS = 4


class Block(nn.Module):
    """A transformer's MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def step_of(way: str, width: int, tokens: int, blocks: int, device: str) -> Callable[[], torch.Tensor]:
    """A step that goes on from the step before, and returns its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(blocks)]).to(device)
    x = torch.randn(tokens, width).to(device, torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recipe = way.removesuffix(COMPILED)
    if recipe != "bf16":
        model, optimizer = fp8jax_torch.prepare(model, optimizer, recipe, backend="native")
    called: Any = torch.compile(model) if way != recipe else model

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = (called(x).float() ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def apart(way: str, device: str) -> float:
    """The largest distance of the first losses from the CPU's, relative."""
    losses = []
    for place in (device, "cpu"):
        step = step_of(way if place == device else way.removesuffix(COMPILED), 256, 512, 2, place)
        losses.append(torch.stack([step().cpu() for _ in range(STEPS)]))
    return float(((losses[0] - losses[1]) / losses[1]).abs().max())


def rows(width: int, tokens: int, rounds: int, skipped: dict[str, str]) -> output.Rows:
    """One row per recipe."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    turns, distances = {}, {}
    for way in WAYS if device == "cuda" else RECIPES:
        try:
            distances[way] = apart(way, device)
            step = step_of(way, width, tokens, 1, device)
            turns[way] = clock.timer(step, lambda _: torch.cuda.synchronize() if device == "cuda" else None)
        except Exception as error:  # the others are measured
            skipped[way] = output.first_line(error)
    times = clock.take_turns(turns, rounds)
    return [
        {
            "way": way,
            "apart": distances[way],
            **clock.row(times, way),
            "/ bf16": clock.ratio(times, way, "bf16"),
        }
        for way in times
    ]


def main() -> None:
    """Measures and prints."""
    args = output.parse(
        __doc__, tiny={"width": 32, "tokens": 64, "rounds": 2}, width=4096, tokens=8192, rounds=10
    )
    skipped: dict[str, str] = {}
    title = f"torch, width {args.width}, {args.tokens} tokens, {args.rounds} rounds"
    found = rows(args.width, args.tokens, args.rounds, skipped)
    name = torch.cuda.get_device_name().split()[1].lower() if torch.cuda.is_available() else output.cpu_name()
    output.finish("torch_step", name, {title: found}, args, ("torch",), skipped)


if __name__ == "__main__":
    main()
