"""Checks that `fit` makes before it trains: of the rows, the checkpoint, and whether a step is left to do."""

import pathlib

import jax
import numpy as np

from fp8jax.train.checkpoint import Checkpoint
from fp8jax.train.data.loader import Examples
from fp8jax.train.errors import BadInput
from fp8jax.train.metrics import Curves
from fp8jax.train.run_folder import RunMetadata
from fp8jax.train.trainer import Trainer

MOST_SKIPPED = 100  # steps in a row; a loss scale of 2**15 is found in far fewer


def check_trained(name: str, curves: Curves, max_steps: int, examples: Examples) -> None:
    """Raises BadInput if the last `MOST_SKIPPED` steps, or all, were skipped."""
    most = min(MOST_SKIPPED, max_steps)
    if curves.skipped[-most:] != list(range(len(curves.loss) - most + 1, len(curves.loss) + 1)):
        return
    rows = (examples[i] for i in range(min(len(examples), MOST_SKIPPED)))
    bad = {
        jax.tree_util.keystr(path)
        for row in rows
        for path, leaf in jax.tree.leaves_with_path(row)
        if not np.all(np.isfinite(leaf))
    }
    cause = (
        f"batch{min(bad)} of the data has such numbers"
        if bad
        else "the data's first rows have no such number"
    )
    raise BadInput(
        f"{name}: nothing is trained: the last {most} steps were all skipped, because gradients were "
        f"infinite or not a number; {cause}. Run the recipe bf16 to see whether FP8 matters, and look for "
        "the operation with JAX_DEBUG_NANS=true"
    )


def check_rows(trainer: Trainer, examples: Examples, folder: pathlib.Path, found: RunMetadata) -> None:
    """Raises ValueError if the rows do not fit the trainer, or the trainer's batches not the run's."""
    if not len(examples):
        raise ValueError("`source` is empty")
    trainer.check(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((trainer.rows, *x.shape), x.dtype), examples[0])
    )
    rows = found.settings.get("rows", trainer.rows)
    if rows != trainer.rows:
        raise ValueError(
            f"the run in {folder} has batches of {rows} rows; got {trainer.rows}: devices "
            f"({trainer.placement.mesh.size}) x --gradient-accumulation-steps "
            f"({trainer.config.gradient_accumulation_steps}) x --per-device-train-batch-size must be {rows}"
        )


def check_metadata(folder: pathlib.Path, found: Checkpoint, models: int) -> None:
    """Raises ValueError if metrics or position in the data are not those of the checkpoint's step."""
    content = found.metadata
    try:
        lengths = [len(Curves.from_json(each).loss) for each in content["curves"]]
        is_whole = lengths == [found.step] * models and content["data"]["taken"] == found.step
    except (LookupError, TypeError, ValueError, AttributeError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"the checkpoint of step {found.step} in {folder} has not the metrics and the position in the "
            "data of this step; move it away and resume"
        )
