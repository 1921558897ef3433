"""The mean loss of held-out rows."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fp8jax.train.data.loader import Examples, Loader, Source
from fp8jax.train.step.network import Loss, RunState
from fp8jax.train.trainer import Trainer


def validator(
    trainer: Trainer,
    sources: tuple[Source | None, Source | None],
    transform: Callable[[Any], Any] | None,
    loss: Loss | None,
) -> Callable[..., float] | None:
    """A function of a state, the mean loss of the first source, or after the last step of the second.

    It evaluates batches of a microbatch's rows on each device, at most `most`, and a smaller batch of the
    rows that are left, for which a second program is compiled. Up to devices - 1 rows are left out.
    """
    is_given = [each is not None for each in (*sources, loss)]
    if is_given[0] != is_given[2] or is_given == [False, True, False]:
        raise ValueError(
            "`validation` and `validation_loss` go together: rows, and the loss of them; `final_validation` "
            "needs both"
        )
    if loss is None:
        return None
    evaluate, devices = trainer.evaluator(loss), trainer.placement.mesh.size
    for count in (len(source) for source in sources if source is not None):
        if count < devices:
            raise ValueError(f"`validation` has {count} rows, fewer than the {devices} devices")

    def validate(state: RunState, *, is_last: bool = False, most: int | None = None) -> float:
        source: Any = sources[is_last]
        shared = len(source) // devices * devices
        rows = min(trainer.per_device * devices, shared)
        with Loader(source, batch=rows, seed=0, shuffle=False, epochs=1, transform=transform) as batches:
            # One after the other: a queue of batches would take the memory of the next step.
            losses = [float(evaluate(state, batch)) for batch in itertools.islice(batches, most)]
        weights = [rows] * len(losses)
        if rest := shared % rows:
            examples = Examples(source, transform)
            last = [examples[i] for i in range(shared - rest, shared)]
            losses.append(float(evaluate(state, jax.tree.map(lambda *leaves: np.stack(leaves), *last))))
            weights.append(rest)
        return float(np.average(losses, weights=weights))

    return validate
