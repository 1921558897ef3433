"""Train a character-level GPT in FP8 next to its bf16 twin.

    python examples/train_gpt.py                                   # on the standard library's source
    python examples/train_gpt.py --data shakespeare.txt --steps 2000
    python examples/train_gpt.py --recipe te,amax_history_len=16 --no-twin
    python examples/train_gpt.py --config run.yaml --steps 500     # the command line wins over the file
    python examples/train_gpt.py --out runs/gpt-1 --resume         # go on with a run that was stopped
    torchrun --nproc-per-node 2 examples/train_gpt.py --distributed --out runs/gpt-2    # or srun

Recipe and twin start from the same weights and see the same batches. The run leaves report.html, pictures,
metrics.jsonl and result.json in its folder. Killed and resumed, it ends with the same losses, bit for bit, as
a run that was left alone; over many processes, or resumed by more or fewer of them, with almost the same.
`./dev train` does it in an environment of its own; --help lists the options.

Exit status: 0: the run is done; 2: the input or the disk is wrong, and one line says how; 75: another process
is gone; 130: stopped by Ctrl-C; 143: by SIGTERM. A run that was stopped while it trained is saved, and
--resume goes on with it.
"""

import signal

if __name__ == "__main__":
    # The imports take seconds. Until they are done Ctrl-C ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_config import Config
from gpt_model import GPT, GPTConfig

from fp8jax import Recipe, train
from fp8jax.train import config, distributed, run_folder

FINAL_BATCHES = 400  # of the validation after the last step: all of the validation text, unless it is long


class Run(NamedTuple):
    """A run before it begins."""

    config: Config
    text: corpus.Text
    trainers: list[train.Trainer]  # of the recipe, and of its twin


def loss(model: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next character; tokens: shape=(batch, context + 1)."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def prepare(argv: Sequence[str] | None) -> Run:
    """Reads the options and the text, and makes the trainers; writes nothing."""
    given = config.read(Config, argv, __doc__ or "")
    asked = Config(**given)
    distributed.initialize(asked)
    folder = run_folder.choose(asked.out, resume=asked.resume, or_start=asked.or_start)
    names = [field.name for field in dataclasses.fields(Config)]
    settings = run_folder.read(folder, names).settings.items()
    options = Config(**{**{name: value for name, value in settings if name in names}, **given})
    text = corpus.load(options.data)
    corpus.check_length(text, options.batch, options.context)
    sizes = {name: size for name, size in vars(options).items() if hasattr(GPTConfig, name)}
    is_ours = options.gradient_checkpointing != "none"  # in place of the model's own remat
    sizes |= {"vocabulary": len(text.vocabulary), "remat": options.remat and not is_ours}
    gpt = GPT(GPTConfig(**sizes))
    devices = len(distributed.devices(options.devices))
    example = np.zeros((1, options.context + 1), np.int32)
    place = str(folder), devices
    of_twin = dataclasses.replace(options, gradient_checkpointing="dots" if is_ours else "none")
    configs = [options.trainer(options.recipe, *place, options.rules), of_twin.trainer("bf16", *place)]
    has_twin = options.twin and configs[0].precision != Recipe.BF16
    trainers = [train.Trainer(gpt, loss, each, example) for each in configs[: 1 + has_twin]]
    return Run(options, text, trainers)


def fit(run: Run) -> train.Fitted:
    """Trains on random windows of the text, and leaves a report."""
    options, text = run.config, run.text
    size = options.context, options.batch
    return train.fit(
        run.trainers[0],
        corpus.RandomWindows(text.train, *size, options.steps, options.seed),
        twin=run.trainers[1] if len(run.trainers) > 1 else None,
        shuffle=False,
        # The vocabulary is in this fingerprint alone, so that runs that began before it was there go on.
        validation=corpus.RandomWindows(
            text.validation, *size, options.eval_batches, options.seed, "validation", text.vocabulary
        ),
        final_validation=corpus.windows(text.validation, options.batch, options.context, FINAL_BATCHES),
        validation_loss=loss,
        resume=options.resume,
        or_start=options.or_start,
        options=options,
        about={
            "data": text.name,
            "loss": "nats per character",
            "characters": len(text.train) + len(text.validation),
            "vocabulary": len(text.vocabulary),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""

    def program() -> int:
        with train.blame_input():
            run = prepare(argv)
        return fit(run).exit_status

    return distributed.run_program("train_gpt", program)


if __name__ == "__main__":
    sys.exit(main())
