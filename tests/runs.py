"""Runs of the main job, as small as they can be, and of the command `fp8jax`."""

import json

import corpus
import numpy as np

from fp8jax import cli
from fp8jax.train.metrics import Curves, ScaleMetrics, StepMetrics

PROGRAM = "examples/train_gpt.py"
SIZES = "--layers 2 --heads 2 --width 32 --context 16 --batch 4 --eval-batches 2".split()
TINY = [*SIZES, "--no-statistics"]  # which are a program more to compile


def status_of(arguments):
    """The exit status of the command `fp8jax`."""
    try:
        return cli.main(arguments)
    except SystemExit as exit:
        return exit.code


def short_text(folder):
    """The path of a text, soon read, of the default one's characters: its models are the default's."""
    path, whole = folder / "short.txt", corpus.standard_library()
    path.write_text("".join(sorted(set(whole))) + whole[:30_000], encoding="utf-8")
    return str(path)


def curves(run):
    """Everything that a run recorded but its time. JSON keeps every bit of a float."""
    newest = sorted(run.glob("checkpoints/step_????????"))[-1]
    recorded = json.loads((newest / "run/metadata").read_text())["curves"]
    for of_one_model in recorded:
        del of_one_model["seconds"]
    models = json.loads((run / "result.json").read_text())["models"]
    losses = {name: (model["training_losses"], model["validation_losses"]) for name, model in models.items()}
    return recorded, losses


def make_curves(steps=30, tensors=3):
    """The curves of a run of three spans."""
    curves = Curves()
    for begin in range(0, steps, 10):
        watched = [
            ScaleMetrics(np.full(tensors, 0.5 + i, np.float32), np.full(tensors, 0.1 * i, np.float32))
            for i in range(10)
        ]
        losses = [np.float64(4.0 - 0.1 * (begin + i)) for i in range(10)]
        curves.add([StepMetrics(loss, 0, of_one) for loss, of_one in zip(losses, watched, strict=True)], 0.25)
    curves.validation += [(15, 3.5), (steps, 1.25)]
    return curves
