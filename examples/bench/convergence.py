"""GPT-124M learns in bfloat16, at O2 and by `fp8`, from the same weights and on the same batches.

    python examples/bench/convergence.py --seconds 300 --data text.txt
    python examples/bench/convergence.py --tiny

The levels take turns of a few steps, so they end with equal steps; after a warm-up the learning rate is
constant, since the number of steps is not known before. Tokens are characters, see corpus.py.
"""

import pathlib
import sys
import time
from typing import Any

import gpt
import numpy as np
import output

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import corpus
from train_gpt import loss

LEVELS = ("bf16", "O2", "fp8")
CHARACTERS = 20_000_000  # of the standard library


class Run:
    """The training of a level."""

    def __init__(self, level: str, size: gpt.Size) -> None:
        self.trainer = gpt.trainer_of(size, level, lr_scheduler_type="constant")
        self.losses: list[Any] = []

    def start(self) -> None:
        """Makes the first state."""
        self.state, self.evaluate = self.trainer.init(), self.trainer.evaluator(loss)

    def advance(self, batches: list[np.ndarray]) -> None:
        """One step per batch; waits for the last."""
        for batch in batches:
            self.state, seen = self.trainer.step(self.state, batch)
            self.losses.append(seen.loss)
        self.losses[-1].block_until_ready()

    def validate(self, batches: np.ndarray) -> float:
        """The mean loss of the batches."""
        return float(np.mean([self.evaluate(self.state, batch) for batch in batches], dtype=np.float64))


def rows(text: corpus.Text, size: gpt.Size, turn: int, most: int, seconds: float) -> output.Rows:
    """One row per level, after as many steps as there is time for."""
    end = time.time() + seconds
    runs = {level: Run(level, size) for level in LEVELS}
    gpt.compile_all([run.trainer for run in runs.values()])
    drawn = corpus.RandomWindows(text.train, size.context, size.batch, most, seed=0)
    held_out = corpus.windows(text.validation, size.batch, size.context, most=turn)
    held_out = held_out.reshape(-1, size.batch, size.context + 1)
    done, reserve = 0, 0.0
    for run in runs.values():
        run.start()
        run.validate(held_out[:1])  # compiles
    while done < most and time.time() + reserve < end:
        begun = time.time()
        for run in runs.values():
            run.advance([drawn.step(step) for step in range(done, done + turn)])
        done += turn
        reserve = 3 * (time.time() - begun)  # for one more turn, and the validation
    found = []
    for level, run in runs.items():
        trained = float(np.mean(run.losses[-turn:]))
        row = {"level": level, "steps": done, "training loss": trained}
        found.append({**row, "validation loss": run.validate(held_out)})
    base = found[0]["validation loss"]
    return [{**row, f"- {LEVELS[0]}": row["validation loss"] - base} for row in found]


def main() -> None:
    """Trains and prints."""
    tiny = {"turn": 2, "most": 6}
    args = output.parse(__doc__, tiny=tiny, data="", seconds=95.0, turn=20, most=20_000)
    text = corpus.load(args.data, CHARACTERS)
    size = gpt.TINY if args.tiny else gpt.SIZES["GPT-124M"]
    size = size._replace(vocabulary=max(size.vocabulary, len(text.vocabulary)))
    title = f"GPT-124M, {size.batch} x {size.context} characters a step"
    found = rows(text, size, args.turn, args.most, args.seconds)
    output.finish("convergence", output.device(), {title: found}, args)


if __name__ == "__main__":
    main()
