"""A train step of a GPT by level of the precision chart: speed, memory, and the optimizer's part of the time.

    python examples/bench/gpt.py                                         # GPT-350M in bf16 and O2
    python examples/bench/gpt.py --size GPT-124M --levels bf16 te O1 O2 O3
    python examples/bench/gpt.py --levels bf16 "bf16 dots_fp8" fp8 "fp8 dots_fp8"     # FP8 residuals
    python examples/bench/gpt.py --batch 32 --levels "bf16 remat=False" "O2 remat=False"
    python examples/bench/gpt.py --tiny

The model is that of train_gpt.py with activations in bfloat16 and, on a GPU, cuDNN's attention; the step is
that of `Trainer`. The levels take turns, and "/ bf16" is the median over the rounds of the ratio to the first
level in bfloat16. "GB" is XLA's peak memory of the compiled step. "update ms" is the optimizer, compiled by
itself. `--profile FOLDER` adds the time of each kernel on a GPU.
"""

import ast
import concurrent.futures
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import clock
import jax
import kernels
import layer
import numpy as np
import output

import fp8jax
from fp8jax import ScaledArray
from fp8jax.quantization import as_gradients, is_scaled
from fp8jax.train import TrainConfig, Trainer
from fp8jax.train.step.optimizers import optimizer_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from gpt_model import GPT, GPTConfig
from train_gpt import loss

# nanoGPT's for GPT-124M, with a shorter warm-up.
SETTINGS: dict[str, Any] = {
    "learning_rate": 6e-4,
    "min_learning_rate": 6e-5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 100,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
}


class Size(NamedTuple):
    """Sizes of a model and its batch."""

    layers: int
    heads: int
    width: int
    batch: int  # sequences a step
    context: int = 1024
    vocabulary: int = 50304


SIZES = {"GPT-350M": Size(24, 16, 1024, 8), "GPT-124M": Size(12, 12, 768, 16)}
TINY = Size(1, 2, 32, 2, 16, 256)


def model_of(size: Size, attention: str = "", **options: Any) -> GPT:
    """The GPT; its attention is cuDNN's where it can run."""
    sizes = {name: value for name, value in size._asdict().items() if name != "batch"}
    return GPT(GPTConfig(**sizes, **options, dtype="bfloat16", attention=attention or layer.attention()))


def trainer_of(size: Size, level: str, **settings: Any) -> Trainer:
    """The trainer of a level: a recipe, then `gradient_checkpointing` and options of `GPTConfig`, if any."""
    recipe, *words = level.split()
    options: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words):
        if value:
            options[name] = ast.literal_eval(value)
        else:
            settings["gradient_checkpointing"] = name
    config = TrainConfig(**{**SETTINGS, **settings}, recipe=recipe, per_device_train_batch_size=size.batch)
    model = model_of(size, **options)
    return Trainer(model, loss, config, np.zeros((1, size.context + 1), np.int32))


def compile_all(trainers: list[Trainer]) -> None:
    """Compiles the first states and the steps, side by side."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda trainer: (trainer.like, trainer.program), trainers))


def steps(trainer: Trainer, tokens: np.ndarray) -> Callable[[], jax.Array]:
    """A step that goes on from the step before, and returns its loss."""
    state = trainer.init()

    def step() -> jax.Array:
        nonlocal state
        state, seen = trainer.step(state, tokens)
        return seen.loss

    return step


def _ones(leaf: Any) -> Any:
    """Codes of 1 on scales of 1, or an array of ones."""
    if is_scaled(leaf):
        return ScaledArray(np.ones(leaf.shape, leaf.data.dtype), np.ones(leaf.bits.shape, np.float32))
    return np.ones(leaf.shape, leaf.dtype)


def updates(trainer: Trainer, variables: Any, opt_state: Any) -> Callable[[], Any]:
    """`tx.update` and `apply_updates` of a trainer, each going on from the one before. Donates the state."""
    tx = optimizer_of(trainer.config)

    def update(variables: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        return fp8jax.apply_updates(variables, updates), opt_state

    grads = as_gradients(jax.tree.map(_ones, trainer.gradients(), is_leaf=is_scaled))
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(variables, opt_state, grads).compile()
    grads = jax.device_put(grads)

    def step() -> Any:
        nonlocal variables, opt_state
        variables, opt_state = compiled(variables, opt_state, grads)
        return variables, opt_state

    return step


def rows(levels: list[str], size: Size, rounds: int, runs: dict[str, Any]) -> output.Rows:
    """One row per level; the steps go into `runs`."""
    shape = size.batch, size.context + 1
    tokens = np.random.default_rng(0).integers(size.vocabulary, size=shape).astype(np.int32)
    trainers = {level: trainer_of(size, level) for level in levels}
    compile_all(list(trainers.values()))
    turns = {}
    for level, trainer in trainers.items():
        runs[level] = steps(trainer, tokens)
        turns[level] = clock.timer(runs[level], least_s=clock.LEAST_S_OF_NEW)  # several steps, then a wait
        state = trainer.init()
        turns[f"{level} update"] = clock.timer(updates(trainer, state.variables, state.opt_state))
    times = clock.take_turns(turns, rounds)
    plain = next((level for level in levels if level.split()[0] == "bf16"), "")
    base, found = trainers.get(plain), []
    for level, trainer in trainers.items():
        timed, read = clock.row(times, level), trainer.program
        found.append(
            {
                "level": level,
                **timed,
                "/ bf16": clock.ratio(times, level, plain),
                "tokens/s": round(1e3 * size.batch * size.context / timed["ms"]),
                "update ms": clock.row(times, f"{level} update")["ms"],
                "GB": read.total / 1e9,
                "GB / bf16": base and read.total / base.program.total,
                **output.gemms(read),
                "kernels": read.kernels,
            }
        )
    return found


def main() -> None:
    """Measures and prints."""
    args = output.parse(
        __doc__,
        tiny={"rounds": 2},
        choices={"size": SIZES},
        size="GPT-350M",
        levels=["bf16", "O2"],
        rounds=30,
        batch=0,
        profile="",
    )
    size = TINY if args.tiny else SIZES[args.size]
    size = size._replace(batch=args.batch or size.batch)
    title = f"{args.size}, train step, {size.batch} x {size.context} tokens"
    runs: dict[str, Any] = {}
    sections = {title: rows(args.levels, size, args.rounds, runs)}
    output.finish("gpt", output.device(), sections, args)
    kernels.add("gpt", runs, sections, args)


if __name__ == "__main__":
    main()
