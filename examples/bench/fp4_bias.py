"""Bias of a GPT's gradients in NVFP4, with and without its methods: the error of a mean over many batches.

    python examples/bench/fp4_bias.py --data shakespeare.txt
    python examples/bench/fp4_bias.py --data shakespeare.txt --steps 1000 --batches 256 --json

The GPT of train_gpt.py trains in bf16 for some steps. Then its gradients of the blocks' kernels in FP4 are
averaged over batches, with nvfp4 and some `fp4_options`, and in float32. "1 batch" and "64 batches" are the
norm of the difference / the norm of the float32 gradient. Random errors get smaller with the batches, and a
bias stays. In "backward" only dgrad and wgrad are in FP4; in "all" the forward is, too.
"""

import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import output

import fp8jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import corpus
import train_gpt

OPTIONS = (
    "",
    "hadamard+stochastic",
    "hadamard+stochastic+46",
    "2d",
    "stochastic+2d",
    "hadamard+stochastic+2d",
    "46",
    "hadamard+stochastic+2d+46",
    "eden",
    "46+eden",
)
PLACES = {"backward": "True+False+False", "all": "False+False+False"}


def gradients(module: Any, recipe: str, params: Any, batches: list[np.ndarray]) -> list[np.ndarray]:
    """The gradient of each batch: the kernels of the blocks as one vector."""
    model = fp8jax.transform(module, recipe)
    variables = model.quantize(params, model.init(jax.random.key(0), batches[0][:, :-1]))
    loss = lambda variables, tokens: train_gpt.loss(lambda x: model.apply(variables, x), tokens)  # noqa: E731
    step, found = jax.jit(fp8jax.value_and_grad(loss)), []
    for tokens in batches:
        _, grads, variables = step(variables, tokens)  # with other random bits for the next batch
        kernels = [np.ravel(x) for x in jax.tree.leaves(grads["h"]) if x.ndim == 3]
        found.append(np.concatenate(kernels))
    return found


def errors(found: list[np.ndarray], exact: list[np.ndarray]) -> tuple[float, float]:
    """The mean error of a batch, and the error of the mean over all batches."""
    ratio = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))  # noqa: E731
    single = np.mean([ratio(a, b) for a, b in zip(found, exact, strict=True)])
    return float(single), ratio(np.mean(found, 0), np.mean(exact, 0))


def main() -> None:
    """Trains, measures and prints."""
    tiny = {"steps": 2, "batches": 2}
    args = output.parse(__doc__, tiny=tiny, data="", steps=300, batches=64, fp4_options=list(OPTIONS))
    options = ["--recipe", "bf16", "--no-twin", "--steps", str(args.steps)]
    options += ["--data", args.data] if args.data else []
    options += ["--layers", "1", "--width", "32", "--context", "16"] if args.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        run = train_gpt.prepare([*options, "--out", f"{folder}/run"])
    (trainer,), config = run.trainers, run.config
    size = config.context, config.batch
    state = trainer.init()
    train = corpus.RandomWindows(run.text.train, *size, args.steps, config.seed)
    for number in range(args.steps):
        state, _ = trainer.step(state, train.step(number))
    held_out = corpus.RandomWindows(run.text.validation, *size, args.batches, config.seed)
    batches = [held_out.step(number) for number in range(args.batches)]
    module, params = trainer.model.module, {"params": state.variables["params"]}
    exact, rows = gradients(module, "fp32", params, batches), []
    for name in args.fp4_options:
        row: dict[str, Any] = {"fp4_options": name or "none"}
        for place, override in PLACES.items():
            recipe = f"nvfp4,fp4_options={name},override_linear_precision={override}"
            single, whole = errors(gradients(module, recipe, params, batches), exact)
            row |= {f"{place}, 1 batch": single, f"{place}, {args.batches} batches": whole}
        rows.append(row)
    output.finish("fp4_bias", output.device(), {"NVFP4's gradients": rows}, args)


if __name__ == "__main__":
    main()
