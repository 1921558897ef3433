"""Runs of the main job, as small as they can be."""

import json

import numpy as np

from fp8jax.train import data

PROGRAM = "examples/train_gpt.py"
TINY = "--layers 2 --heads 2 --width 32 --context 16 --batch 4 --eval-batches 2".split()


def short_text(folder):
    """The path of a text, soon read, of the default one's characters: its models are the default's."""
    path, whole = folder / "short.txt", data.standard_library()
    path.write_text("".join(sorted(set(whole))) + whole[:30_000], encoding="utf-8")
    return str(path)


def curves(run):
    """Everything that a run recorded, to the bit, but not how long it took."""
    newest = sorted(run.glob("checkpoints/step-*"))[-1]
    with np.load(newest / "history.npz") as file:
        recorded = {name: file[name].tobytes() for name in file if "seconds" not in name}
    models = json.loads((run / "result.json").read_text())["models"]
    losses = {name: (model["training_losses"], model["validation_losses"]) for name, model in models.items()}
    return recorded, losses
