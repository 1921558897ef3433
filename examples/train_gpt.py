"""Train a character-level GPT in FP8 next to its bf16 twin.

    python examples/train_gpt.py                                   # on the standard library's source
    python examples/train_gpt.py --data shakespeare.txt --steps 2000
    python examples/train_gpt.py --recipe te,amax_history_len=16 --no-twin
    python examples/train_gpt.py --config run.yaml --steps 500     # the command line wins over the file
    python examples/train_gpt.py --out runs/gpt-1 --resume         # go on with a run that was stopped
    torchrun --nproc-per-node 2 examples/train_gpt.py --distributed --out runs/gpt-2    # or srun

Recipe and twin start from the same weights and see the same batches. The run leaves report.html,
pictures and result.json in its folder. Killed and resumed, it ends with the same losses, bit for
bit, as one never killed; over many processes, or resumed by more or fewer of them, with almost the
same. `./dev train` does it in an environment of its own; --help lists options.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_config import Config
from gpt_model import GPT, GPTConfig

import fp8jax
from fp8jax import train
from fp8jax.inspect import program
from fp8jax.train.observe import Curves, Seen
from fp8jax.train.settings import OPTIMIZERS

MOST_FINAL_BATCHES = 400  # of the validation text at the end: all of it, unless it is long


class State(NamedTuple):
    """What a step changes."""

    variables: Any  # {"params": ..., "_overwrite_with_gradient": ...}
    opt_state: Any


class Learner(NamedTuple):
    """The training of a model under one recipe."""

    step: Callable[[State, jax.Array], tuple[State, Seen]]  # takes the state over
    loss: Callable[[State, jax.Array], jax.Array]
    gradients: Any  # their shapes and dtypes
    compiled: program.Program  # a step's


def learning_rate(config: Config) -> optax.Schedule:
    """A linear warm-up, then a cosine down to `min_lr` at the last step."""

    def schedule(step: Any) -> jax.Array:
        rising = config.lr * (step + 1) / (config.warmup + 1)
        part = (step - config.warmup) / max(config.steps - config.warmup, 1)
        falling = config.min_lr + 0.5 * (1 + jnp.cos(jnp.pi * part)) * (config.lr - config.min_lr)
        return jnp.where(step < config.warmup, rising, falling)

    return schedule


def decays(params: Any) -> Any:
    """Which parameters decay: matrices and embeddings, not norms and biases."""

    def is_matrix(path: Any, leaf: Any) -> bool:
        stacked = path[0].key == "h"  # the scan's axis comes first
        return leaf.ndim - stacked >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def optimizer(config: Config, recipe: fp8jax.Recipe, zero: Any) -> optax.GradientTransformation:
    """The optimizer that `config` names, after clipping."""
    return train.optimizers.clipped(
        OPTIMIZERS[config.optim],
        learning_rate(config),
        recipe,
        (config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        mask=decays,
        max_norm=config.clip,
        zero=zero,
    )


def build(config: Config, model: Any, place: train.placement.Placement) -> tuple[Learner, State]:
    """Compiles the training of `model`, and makes its first state."""
    recipe, zero = model.recipe, place.zero(model.recipe, config)
    tx = optimizer(config, recipe, zero)

    def loss_fn(variables: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply(variables, batch[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    # Jitted by itself so that it is traced once, for the step and for the gradients' shapes.
    loss_and_grads = jax.jit(fp8jax.value_and_grad(loss_fn, zero=zero))

    def step(state: State, batch: jax.Array) -> tuple[State, Seen]:
        loss, grads = loss_and_grads(state.variables, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.variables)
        variables = fp8jax.apply_updates(state.variables, updates)
        watched = train.observe.watch(state.variables, variables, recipe)
        return State(variables, opt_state), Seen(loss, fp8jax.optim.skipped(opt_state), watched)

    def first_state(key: jax.Array, tokens: jax.Array) -> State:
        variables = model.init(key, tokens)
        variables = zero.place(variables) if zero else variables
        return State(variables, tx.init(variables))

    batch = np.zeros((config.batch, config.context + 1), np.int32)
    start, key, first = jax.jit(first_state), jax.random.key(config.seed), batch[:, :-1]
    with train.blame_input():
        shared_by = place.mesh.size if config.zero else 1
        train.footprint.check_fits(jax.eval_shape(start, key, first), shared_by)
    state = start(key, first)
    kept = (jax.tree.map(lambda x: x.sharding, state), place.everywhere)
    batch = place.feed(batch)
    loss = jax.jit(lambda state, batch: loss_fn(state.variables, batch), out_shardings=place.everywhere)
    # Compiled here, so that the time of the first step says something.
    step = jax.jit(step, donate_argnums=0, out_shardings=kept).lower(state, batch).compile()
    learner = Learner(
        step=place.one_at_a_time(step),
        loss=place.one_at_a_time(loss.lower(state, batch).compile()),
        gradients=jax.eval_shape(loss_and_grads, state.variables, batch)[1],
        compiled=program.read(step),
    )
    return learner, state


class Run(NamedTuple):
    """A run, by the names of its recipes; states and curves are replaced and added to as it goes."""

    config: Config
    folder: pathlib.Path
    began: train.rundir.Began
    text: train.data.Text
    place: train.placement.Placement
    layers: dict[str, str]  # which of them run in FP8, and why the others do not
    learners: dict[str, Learner]
    states: dict[str, State]
    curves: dict[str, Curves]

    def batches(self, purpose: str, numbers: range) -> list[jax.Array]:
        """Batches of one part of the text, the same for every model and after every resume."""
        tokens = self.text.train if purpose == "train" else self.text.validation
        size, context, seed = self.config.batch, self.config.context, self.config.seed
        drawn = (train.data.batch(tokens, (seed, purpose, number), size, context) for number in numbers)
        return [self.place.feed(batch) for batch in drawn]

    def save(self, step: int) -> None:
        """Writes a checkpoint."""
        history = train.observe.pack(self.curves.values())
        states = list(self.states.values())
        train.rundir.keep(self.folder, step, states, history, run=self.began.digest)

    def restore(self) -> int:
        """Goes back to the newest whole checkpoint; returns the steps done by then."""
        states, or_start = list(self.states.values()), self.config.or_start
        with train.blame_input():
            found = train.rundir.resume(self.folder, states, self.began.digest, or_start)
        if found is None:
            return 0
        self.states.update(zip(self.states, found.state, strict=True))
        self.curves.update(zip(self.curves, train.observe.unpack(found.history), strict=True))
        return found.step


def prepare(argv: Sequence[str] | None) -> Run:
    """Reads the input and compiles; raises `BadInput`, and writes nothing, if the input makes no run."""
    with train.blame_input():
        train.extras.check()
        given = train.config.read(Config, argv, __doc__ or "")
        asked = Config(**given)
        train.processes.join(asked, "train_gpt")
        folder = train.rundir.choose(asked.out, asked.resume, asked.or_start)
        found = train.rundir.began(folder, [field.name for field in dataclasses.fields(Config)])
        config = Config(**{**found.settings, **given})
        devices = train.processes.devices(config.devices)
        recipes = [fp8jax.Recipe.parse(config.recipe)]
        if config.twin and recipes[0] != fp8jax.Recipe.BF16:
            recipes.append(fp8jax.Recipe.BF16)
        for recipe in recipes:
            optimizer(config, recipe, None)  # refuses a recipe that it cannot be for
        text = train.data.load(config.data)
        train.data.check_length(text, config.batch, config.context)
        now = train.rundir.Began(train.config.kept(config), text.fingerprint)
        train.rundir.check_same(folder, found, now)
        sizes = {name: size for name, size in vars(config).items() if hasattr(GPTConfig, name)}
        gpt = GPT(GPTConfig(**{**sizes, "vocabulary": len(text.vocabulary)}))
        models = {str(recipe): fp8jax.transform(gpt, recipe) for recipe in recipes}
        place = train.placement.over(devices, config.batch)
        tokens = jax.ShapeDtypeStruct((config.batch, config.context), jnp.int32)
        layers = {name: str(model.report(tokens)) for name, model in models.items()}
        train.rundir.start(folder, found, now)
    learners, states = {}, {}
    with train.rundir.given_back(folder, found):
        for name, model in models.items():
            print(f"{layers[name].splitlines()[0]}; compiling", flush=True)
            learners[name], states[name] = build(config, model, place)
    began, curves = found if found.settings else now, {name: Curves() for name in models}
    return Run(config, folder, began, text, place, layers, learners, states, curves)


def fit(run: Run, done: int, stop_asked: Callable[[], bool]) -> int:
    """Trains until the last step or until asked to stop; returns the steps done."""
    config, saved = run.config, done or None  # a run that starts has no checkpoint
    intervals = (config.log_interval, config.eval_interval, config.checkpoint_interval)
    with train.Progress(run.curves, config.steps, config.batch * config.context) as progress:
        for begin, end in train.spans(done, config.steps, *intervals):
            if stop_asked():
                if begin != saved:
                    run.save(begin)
                return begin
            batches = run.batches("train", range(begin, end))
            for name, learner in run.learners.items():
                run.states[name] = train.advance(learner.step, run.states[name], batches, run.curves[name])
            if end % config.eval_interval == 0 and end < config.steps:
                validate(run, end, run.batches("validation", range(config.eval_batches)))
            progress.show()
            if end % config.checkpoint_interval == 0 or end == config.steps:
                run.save(end)
                saved = end
    return config.steps


def validate(run: Run, step: int, batches: list[jax.Array]) -> None:
    """Adds the validation loss of every model to its curve."""
    for name, learner in run.learners.items():
        losses = jax.device_get([learner.loss(run.states[name], batch) for batch in batches])
        run.curves[name].validation.append((step, float(np.mean(losses, dtype=np.float64))))


def report(run: Run) -> None:
    """Validates on all of the text, prints the comparison and writes the page."""
    config, text, outcomes = run.config, run.text, {}
    windows = train.data.windows(text.validation, config.batch, config.context, MOST_FINAL_BATCHES)
    windows = [run.place.feed(batch) for batch in windows]
    validate(run, config.steps, windows)
    if not train.processes.is_first():
        return
    for name, learner in run.learners.items():
        variables, opt_state = run.states[name]
        outcomes[name] = train.report.Outcome(
            curves=run.curves[name],
            amount=config.batch * config.context,
            parameters=train.observe.parameters(variables),
            bytes=train.observe.bytes_per_parameter(variables, learner.gradients, opt_state),
            tensors=train.observe.tensors(variables),
            layers=run.layers[name],
            footprint=train.footprint.footprint(variables, opt_state, windows[0], learner.compiled),
        )
    about = {
        "data": text.name,
        "loss": "nats per character",
        "characters": len(text.train) + len(text.validation),
        "vocabulary": len(text.vocabulary),
        **train.report.machine(),
        "settings": train.config.kept(config),
    }
    page = train.report.write(run.folder, about, outcomes)
    train.report.show(outcomes)
    print(f"report: {page}")


def train_and_report(argv: Sequence[str] | None) -> None:
    """The program, but for what its user or its input does wrong."""
    run = prepare(argv)
    train.processes.on_loss(lambda: train.rundir.how_to_go_on(run.folder))
    train.processes.meet()  # compiling takes some longer than others
    done = run.restore() if run.config.resume else 0
    with train.stop.requests() as stop_asked:
        done = fit(run, done, stop_asked)
    if done < run.config.steps:
        print(f"stopped and saved after step {done}; go on with: ./dev train --out {run.folder} --resume")
        return
    report(run)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    try:
        train_and_report(argv)
    except (train.BadInput, OSError) as error:  # OSError: the disk is full, or cannot be written
        return train.processes.leave(2, f"train_gpt: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        reason = str(error).splitlines()[0]
        return train.processes.leave(2, f"train_gpt: {reason}; give a smaller model, --batch or --context")
    except KeyboardInterrupt:
        return train.processes.leave(130, "train_gpt: interrupted; --resume goes on from the last checkpoint")
    return 0


if __name__ == "__main__":
    sys.exit(main())
