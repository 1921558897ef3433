"""A training of any Flax model, as its `TrainConfig` says: the model, its loss and a batch are all it needs.

    def loss(model, batch):                                   # a mean over the rows of the batch
        logits = model(batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    trainer = Trainer(model, loss, TrainConfig(recipe="O2"), {"tokens": np.zeros((1, 1025), np.int32)})
    state = trainer.init()
    for batch in batches:                                     # of `trainer.rows` rows
        state, seen = trainer.step(state, batch)

The same in a plain loop: `fp8jax.transform`, `fp8jax.value_and_grad` or `fp8jax.accumulate_gradients`, an
optimizer of `fp8jax.optim`, `fp8jax.apply_updates`. The trainer is these, jitted once, its state donated.
"""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from fp8jax import adapters, optim
from fp8jax.inspect import memory, targets
from fp8jax.inspect import program as compiled_program
from fp8jax.rewrite.lora import LoRA
from fp8jax.train import observe, processes
from fp8jax.train.batch import Found, budget_of_device, largest_batch
from fp8jax.train.learner import Learner, Loss, State, learner_of
from fp8jax.train.loader import Loader
from fp8jax.train.observe import Seen
from fp8jax.train.optimizers import optimizer_of
from fp8jax.train.placement import Placement, over
from fp8jax.train.settings import TrainConfig
from fp8jax.train.to_device import DevicePrefetch, prefetch_to_device


class Trainer:
    """A training step for batches of one size.

    Attributes:
        config: as given.
        model: the transformed model.
        place: the devices.
        found: how the batch size was found, if it was "auto".
        per_device: rows that a device takes at once.
        rows: of the batch that `step` takes: those of all devices and accumulation steps.
    """

    def __init__(self, model: Any, loss: Loss, config: TrainConfig, example: Any) -> None:
        """Compiles nothing, unless the batch size is "auto".

        Args:
            model: a Flax module, Linen or NNX; it is not changed.
            loss: `loss(model, batch)`, see this module.
            config: the settings.
            example: a batch, of any number of rows.

        Raises:
            ValueError: the settings do not go together, or one row does not fit into the memory.
        """
        if config.compile_cache:
            jax.config.update("jax_compilation_cache_dir", config.compile_cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self.config, self._loss = config, loss
        options: dict[str, Any] = {}
        if config.gradient_checkpointing != "none":
            options["gradient_checkpointing"] = config.gradient_checkpointing
            options["checkpoint_blocks"] = tuple(config.checkpoint_blocks.split()) or None
        if config.lora_rank:
            options["lora"] = LoRA(rank=config.lora_rank, alpha=config.lora_alpha)
        self.model = adapters.transform(model, config.precision, **options)
        self._row = jax.tree.map(lambda x: _shape_of(x, np.shape(x)[1:]), example)
        self._devices = processes.devices(config.devices)
        self.found = self._largest() if config.is_auto else None
        self.per_device = self.found.rows if self.found else int(config.per_device_train_batch_size)
        self.place, self.learner = self._for(self.per_device)
        self.rows = self._rows(self.per_device)

    @functools.cached_property
    def key(self) -> jax.Array:
        """What all randomness of the run comes from."""
        return jax.random.key(self.config.seed)

    @functools.cached_property
    def _compiled_init(self) -> Any:
        return self._compile_init(self.learner, self.rows)

    @functools.cached_property
    def _compiled_step(self) -> Any:
        return self._compile_step(self.place, self.learner, self.like, self.rows)

    @functools.cached_property
    def like(self) -> State:
        """Shapes, dtypes and places of a state, as `checkpoint.newest` takes them."""
        return self._like(self.learner, self._compiled_init, self.rows)

    @functools.cached_property
    def program(self) -> compiled_program.Program:
        """What the step's program is made of, and the memory that it needs."""
        return compiled_program.read(self._compiled_step)

    def loader(self, source: Any, transform: Any = None) -> DevicePrefetch:
        """Batches of `rows` rows on the devices, as the config says: see `Loader` and `prefetch_to_device`.

        Args:
            source: rows by number, as a `TokenFile`, a list or a dataset.
            transform: row -> row, run by the workers.
        """
        config = self.config
        host = Loader(
            source,
            batch=self.rows,
            seed=config.seed,
            workers=config.dataloader_num_workers,
            shard=(jax.process_index(), jax.process_count()),
            transform=transform,
        )
        return prefetch_to_device(host, config.dataloader_prefetch_factor, self.place.rows)

    def init(self, plain: Any = None) -> State:
        """The first state, on the devices.

        Args:
            plain: variables of the untransformed Linen module to start from, as a checkpoint has them; an NNX
                module brings its own.
        """
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._batch(self.rows))
        state = self._compiled_init(self.key, zeros)
        if plain is None:
            return state
        restart = jax.jit(self.learner.restart, out_shardings=self._compiled_init.output_shardings)
        return restart(self.model.quantize(plain, state.variables))

    def step(self, state: State, batch: Any) -> tuple[State, Seen]:
        """The state after an optimizer step, and what was seen of it; the state that came is used up.

        Args:
            state: from `init` or a step before.
            batch: arrays of `rows` rows, on the host or as `place.feed` puts them on the devices.

        Raises:
            ValueError: the batch is not like the example, or of another size.
        """
        self.check(batch)
        return self.place.one_at_a_time(self._compiled_step)(state, self.fed(batch), self.key)

    def fed(self, batch: Any) -> Any:
        """A batch of the host on the devices."""
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else self.place.feed(x), batch)

    def evaluator(self, loss: Loss) -> Callable[[State, Any], jax.Array]:
        """A jitted function `(state, batch) -> loss` that changes nothing in the state.

        Args:
            loss: `loss(model, batch)`, a mean over rows, which calls the model as it is to be evaluated:
                `model(x, train=False)`, or of an NNX module `model.eval()` first. A Linen model gets no
                random streams and no mutable collections, so Flax raises where it asks for them; of an NNX
                module what changes is a copy.

        Returns:
            The function; its batch has any number of rows that the devices divide, and is on the host or on
            the devices. It compiles for each number anew.

        Raises:
            ValueError: from the function: the devices do not divide the rows of `batch`.
        """
        evaluate = functools.partial(self.learner.evaluate, loss)
        jitted = self.place.one_at_a_time(jax.jit(evaluate, out_shardings=self.place.everywhere))

        def mean_loss(state: State, batch: Any) -> jax.Array:
            rows, devices = len(jax.tree.leaves(batch)[0]), self.place.mesh.size
            if rows % devices:
                raise ValueError(
                    f"`batch`: expected rows that {devices} devices divide; got {rows}. Leave the last out."
                )
            with self._precision():
                return jitted(state.variables, self.fed(batch))

        return mean_loss

    def compile(self, per_device: int | None = None, target: str | None = None) -> jax.stages.Compiled:
        """The step's program, for another batch size or for one GPU that is not here."""
        rows = self._rows(per_device or self.per_device)
        place, learner = self._for(per_device or self.per_device)
        if not target:
            state = self._like(learner, self._init_of_one, rows)
            return self._compile_step(place, learner, state, rows)
        step, batch = functools.partial(self._step, learner), self._batch(rows)
        with self._precision():
            state = jax.eval_shape(learner.init, self.key, batch)
            return targets.compile_for(step, state, batch, self.key, target=target, donate_argnums=0)

    @functools.cached_property
    def _init_of_one(self) -> jax.stages.Compiled:
        """Of one row for each device: where a state is does not depend on the rows of a batch."""
        return self._compile_init(self._for(1)[1], self._rows(1))

    def _compile_init(self, learner: Learner, rows: int) -> jax.stages.Compiled:
        """What makes the first state, and says where its arrays are."""
        with self._precision():
            return jax.jit(learner.init).lower(self.key, self._batch(rows)).compile()

    def _like(self, learner: Learner, init: jax.stages.Compiled, rows: int) -> State:
        """The shapes of a state, where `init` puts it."""
        with self._precision():
            state = jax.eval_shape(learner.init, self.key, self._batch(rows))
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, init.output_shardings
        )

    def _compile_step(
        self, place: Placement, learner: Learner, state: State, rows: int
    ) -> jax.stages.Compiled:
        """The step's program, which leaves a state where it was."""
        at = jax.tree.map(lambda x: x.sharding, state)
        step = functools.partial(self._step, learner)
        with self._precision():
            jitted = jax.jit(step, donate_argnums=0, out_shardings=(at, place.everywhere))
            return jitted.lower(state, self._batch(rows, place.rows), self.key).compile()

    def plan(self, target: str | None = None) -> memory.Plan:
        """The memory of a step on one device, read from the compiled program.

        Args:
            target: name of one GPU that is not here; None for the trainer's devices.

        Raises:
            ValueError: `target` with several devices or with moments on the host.
        """
        devices = self.place.mesh.size
        if target and (devices > 1 or self.config.offload):
            raise ValueError(f"`target`: {target} is one device with everything on it; leave it out.")
        if target:
            state = jax.eval_shape(self.learner.init, self.key, self._batch(self.rows))
            read, batch = compiled_program.read(self.compile(target=target)), self._batch(self.rows)
        else:
            state, read, batch = self.like, self.program, self.batch
        return memory.plan_of(
            state.variables,
            state.opt_state,
            (batch, self.key, state.step),
            total=read.total,
            sent=read.sent(devices),
            recipe=str(self.config.precision),
            stage=self.config.zero,
            devices=devices,
        )

    @functools.cached_property
    def layers(self) -> str:
        """Which layers run in FP8, and why the others do not: see `fp8jax.report`.

        Raises:
            ValueError: the loss does not call the model, but methods of it.
        """
        return self.learner.report(self._batch(self.per_device))

    @property
    def batch(self) -> Any:
        """Shapes, dtypes and places of a batch that `step` takes."""
        return self._batch(self.rows, self.place.rows)

    def gradients(self) -> dict[str, Any]:
        """Shapes and dtypes of a step's gradients, in "params"."""
        return jax.eval_shape(self.learner.gradients, self.like, self._batch(self.rows), self.key)

    def _step(self, learner: Learner, state: State, batch: Any, key: jax.Array) -> tuple[State, Seen]:
        new, loss = learner.step(state, batch, key)
        before, after = map(learner.collections, (state.variables, new.variables))
        watched = observe.watch(before, after, self.config.precision)
        return new, Seen(loss, optim.skipped(new.opt_state), watched)

    def _largest(self) -> Found:
        config = self.config
        if config.target and len(self._devices) > 1:
            raise ValueError(
                f"--target {config.target} is one device that is not here; got {len(self._devices)} "
                "--devices: leave one of them out"
            )
        budget = config.memory_budget * 1e9 or budget_of_device(config.target)
        peak = lambda rows: compiled_program.read(self.compile(rows, config.target or None)).total  # noqa: E731
        return largest_batch(peak, budget)

    def _for(self, per_device: int) -> tuple[Placement, Learner]:
        """The devices and the step for so many rows of each."""
        place = over(self._devices, self._rows(per_device))
        zero = place.zero(self.config.precision, self.config)
        parts, tx = self.config.gradient_accumulation_steps, optimizer_of(self.config, zero)
        return place, learner_of(self.model, self._loss, tx, microbatches=parts, zero=zero)

    def _rows(self, per_device: int) -> int:
        return per_device * len(self._devices) * self.config.gradient_accumulation_steps

    def _batch(self, rows: int, sharding: Any = None) -> Any:
        """The shapes of a batch of so many rows."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype, sharding=sharding), self._row
        )

    def check(self, batch: Any) -> None:
        """Raises ValueError if `step` would not take a batch of these arrays, or shapes and dtypes."""
        expected = self._batch(self.rows)
        got = jax.tree.map(lambda x: _shape_of(x, np.shape(x)), batch)
        if got != expected:
            raise ValueError(
                f"`batch`: expected {expected}, {self.per_device} rows for each device; got {got}."
            )

    def _precision(self) -> AbstractContextManager[Any]:
        """Of products in float32."""
        if not self.config.tf32:
            return contextlib.nullcontext()
        return jax.default_matmul_precision("tensorfloat32")


def _shape_of(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """With the dtype that an array has on a device: float32 for NumPy's float64."""
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))
