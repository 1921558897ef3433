"""Train the GPT of train_gpt.py as others save memory, for paired.py: bf16 weights, gradients and Adam.

    python examples/rivals.py --way bf16-adam --data shakespeare.txt --steps 2000 --out runs/rival
    python examples/rivals.py --way flashoptim --seed 2 --out runs/rival-2

Weights before they are rounded, batches, schedule, clipping, weight decay and validation are those of
`train_gpt.py --recipe bf16`, and its options for these work here. The folder must be new. The ways:

bf16-adam   Weights, gradients and both moments in bfloat16, by optax, rounded to nearest. 8 bytes.
flashoptim  FlashOptim's formats (arXiv 2602.23349 and its package 0.1.4), restated: bfloat16 weights with an
            int8 correction, both moments in a byte with a float16 scale for each 32. Its own kernels need a
            GPU. 7.1 bytes.
"""

import argparse
import contextlib
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import corpus
import jax
import jax.numpy as jnp
import optax
import train_gpt

from fp8jax.inspect import program
from fp8jax.train import blame_input, distributed
from fp8jax.train.metrics import bytes_per_parameter
from fp8jax.train.report.report import facts
from fp8jax.train.run.run import spans, validator
from fp8jax.train.step.network import RunState
from fp8jax.train.step.optimizers import decays, schedule_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
from codes import decode, encode


class Flash(NamedTuple):
    """FlashOptim's state: the numbers of trees are those of the parameters."""

    steps: jax.Array
    correction: Any  # int8: what the bfloat16 weight lacks, in 1/127 of half of its last bit
    first: Any
    second: Any


def _half_of_last_bit(weight: jax.Array) -> jax.Array:
    """Half of the distance of a bfloat16 number to the next one."""
    _, exponent = jnp.frexp(weight.astype(jnp.float32))
    return jnp.ldexp(jnp.float32(1), exponent - 9)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 weight as bfloat16 and its correction."""
    weight = x.astype(jnp.bfloat16)
    lacking = (x - weight.astype(jnp.float32)) / _half_of_last_bit(weight)
    return weight, jnp.round(jnp.clip(lacking, -1, 1) * 127).astype(jnp.int8)


def joined(weight: jax.Array, correction: jax.Array) -> jax.Array:
    """The float32 weight of `split`."""
    return weight.astype(jnp.float32) + correction.astype(jnp.float32) / 127 * _half_of_last_bit(weight)


def flash_init(params: Any) -> tuple[Any, Flash]:
    """The bfloat16 weights of float32 parameters, and the first state."""
    leaves, treedef = jax.tree.flatten(params)
    weights, corrections = zip(*map(split, leaves), strict=True)
    first, second = ([encode(jnp.zeros_like(x), which) for x in leaves] for which in (False, True))
    trees = (treedef.unflatten(part) for part in (corrections, first, second))
    return treedef.unflatten(weights), Flash(jnp.zeros((), jnp.int32), *trees)


def flash_step(grads: Any, state: Flash, params: Any, config: Any) -> tuple[Any, Flash]:
    """AdamW on the joined weights, with PyTorch's order: decay, then the step."""
    rate, steps = schedule_of(config)(state.steps), state.steps + 1
    b1, b2 = config.adam_beta1, config.adam_beta2
    leaves, treedef = jax.tree.flatten(params)
    of_trees = (treedef.flatten_up_to(tree) for tree in (grads, *state[1:], decays(params)))
    new: list[Any] = []
    for weight, grad, correction, first, second, decayed in zip(leaves, *of_trees, strict=True):
        grad, x = grad.astype(jnp.float32), joined(weight, correction)
        m = b1 * decode(first, x.shape, False) + (1 - b1) * grad
        v = b2 * decode(second, x.shape, True) + (1 - b2) * jnp.square(grad)
        x = x * (1 - rate * config.weight_decay * decayed)
        root = jnp.sqrt(v / (1 - b2**steps))
        x = x - rate * (m / (1 - b1**steps)) / (root + config.adam_epsilon)
        new.append((*split(x), encode(m, False), encode(v, True)))
    weights, *trees = (treedef.unflatten(part) for part in zip(*new, strict=True))
    return weights, Flash(steps, *trees)


class Trained(NamedTuple):
    """The end of a run."""

    variables: Any
    state: Any  # of the optimizer
    losses: list[float]
    peak: int  # bytes of the compiled step


def train(run: train_gpt.Run, way: str) -> Trained:
    """Trains, in a program of one step."""
    trainer, config = run.trainers[0], run.trainers[0].config
    clip = optax.clip_by_global_norm(config.max_grad_norm or math.inf)
    adam = optax.adamw(
        schedule_of(config),
        *(config.adam_beta1, config.adam_beta2, config.adam_epsilon),
        weight_decay=config.weight_decay,
        mask=decays,
    )

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return train_gpt.loss(lambda tokens: trainer.model.apply({"params": params}, tokens), batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads, _ = clip.update(grads, clip.init(params))
        if way == "flashoptim":
            return *flash_step(grads, state, params, config), value
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = trainer.init().variables["params"]
    if way == "flashoptim":
        params, state = flash_init(params)
    else:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        state = adam.init(params)
    options, losses = run.config, []
    example = jax.ShapeDtypeStruct((options.batch, options.context + 1), jnp.int32)
    compiled = step.lower(params, state, example).compile()
    source = corpus.RandomWindows(run.text.train, options.context, options.batch, options.steps, options.seed)
    with contextlib.closing(trainer.loader(source, shuffle=False)) as batches:
        for _, batch in zip(range(options.steps), batches, strict=False):
            params, state, value = compiled(params, state, batch)
            losses.append(value)
    return Trained({"params": params}, state, list(map(float, losses)), program.read(compiled).total)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and leaves the parts of a run's folder that paired.py reads; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=("bf16-adam", "flashoptim"), required=True)
    args, rest = parser.parse_known_args(argv)

    def program() -> int:
        with blame_input():
            run = train_gpt.prepare([*rest, "--recipe", "bf16", "--no-twin"])
            folder = pathlib.Path(run.trainers[0].config.output_dir)
            if folder.exists():
                raise ValueError(f"--out {folder}: expected a new folder; got one that is there")
        save(run, args.way, folder)
        return 0

    return distributed.run_program("rivals", program)


def save(run: train_gpt.Run, way: str, folder: pathlib.Path) -> None:
    """Trains, and writes the run's folder."""
    trainer, options, begun = run.trainers[0], run.config, time.time()
    variables, state, losses, peak = train(run, way)
    held_out = corpus.windows(run.text.validation, options.batch, options.context, train_gpt.FINAL_BATCHES)
    validate: Any = validator(trainer, (held_out, held_out), train_gpt.loss)
    bytes_of = bytes_per_parameter(variables, variables["params"], state)  # gradients are like weights
    about = facts(trainer, {**vars(options), "way": way}, begun, 0)
    model = {
        "validation_loss": validate(RunState(jnp.int32(len(losses)), variables, None), is_last=True),
        "bytes_per_parameter": bytes_of._asdict(),
        "memory": [{"part": "peak", "arrays": None, "compiled": peak}],
    }
    lines = [
        json.dumps({"step": end, "model": way, "loss": sum(losses[begin:end]) / (end - begin)})
        for begin, end in spans(0, len(losses), options.log_interval)
    ]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({**about, "models": {way: model}}, indent=1))
    print(f"{way}: validation loss {model['validation_loss']:.4f}, {sum(bytes_of):.2f} bytes a parameter")


if __name__ == "__main__":
    sys.exit(main())
