"""`Trainer`: the compiled training step of any Flax model.

    def loss(model, batch):                                   # a mean over the rows of the batch
        logits = model(batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    trainer = Trainer(model, loss, TrainConfig(recipe="fp8"), {"tokens": np.zeros((1, 1025), np.int32)})
    state = trainer.init()
    for batch in batches:                                     # of `trainer.rows` rows
        state, metrics = trainer.step(state, batch)

The trainer jits `fp8jax.transform`, `fp8jax.value_and_grad` or `fp8jax.accumulate_gradients`, an optimizer of
`fp8jax.optim`, and `fp8jax.apply_updates` once, with the state donated.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fp8jax import adapters, optim
from fp8jax.inspect import memory, targets
from fp8jax.inspect import program as compiled_program
from fp8jax.inspect.numerics import Statistics
from fp8jax.rewrite import Kernel, LoRA
from fp8jax.scaling import with_fresh_scales
from fp8jax.train import distributed
from fp8jax.train.config import TrainConfig
from fp8jax.train.data.device import DevicePrefetch, prefetch_to_device
from fp8jax.train.data.loader import Loader
from fp8jax.train.metrics import StepMetrics, scale_metrics
from fp8jax.train.step.batch_size import BatchSize, budget_of_device, check_fits, largest_batch
from fp8jax.train.step.inputs import check_batch, shapes_of
from fp8jax.train.step.network import Loss, RunState, network_of
from fp8jax.train.step.optimizers import optimizer_of
from fp8jax.train.step.placement import place
from fp8jax.train.step.unchanged_weights import Sample, sampler_of
from fp8jax.variables import PARAMS


class Trainer:
    """The training step for batches of one size.

    Attributes:
        config: as given.
        model: the transformed model.
        network: the model and the loss as functions of variables.
        placement: of the state and of batches.
        found: the search for the batch size, if it was "auto".
        per_device: rows of a microbatch on a device.
        rows: rows of a batch, over all devices and microbatches.
    """

    def __init__(self, model: Any, loss: Loss, config: TrainConfig, example: PyTree) -> None:
        """Compiles nothing, unless the batch size is "auto".

        Args:
            model: a Flax module, Linen or NNX; it is not changed.
            loss: `loss(model, batch)`, a mean over the rows of the batch. `model` is a function that calls a
                Linen model, or the NNX module.
            config: the configuration.
            example: a batch of any number of rows.

        Raises:
            TypeError: the model is no Flax module, or a part of `example` is no array.
            ValueError: the options contradict each other, one row does not fit into the memory, or the option
                `distributed` is set and the processes are not connected.
        """
        if config.compile_cache:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compile_cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self.config = config
        self.model = adapters.transform(
            model,
            config.precision,
            rules=config.layer_rules,
            lora=LoRA(rank=config.lora_rank, alpha=config.lora_alpha) if config.lora_rank else None,
            gradient_checkpointing=config.gradient_checkpointing,
            checkpoint_blocks=config.checkpoint_blocks.split() or None,
        )
        self._row = jax.tree.map(lambda x: x.update(shape=x.shape[1:]), shapes_of(example))
        self.placement = place(distributed.devices(config.devices, config.distributed))
        zero = self.placement.zero(config)
        # Adapters have no master weights.
        self._has_masters = config.precision.master_weight != "-" and not config.lora_rank
        plain = model if self._has_masters else None
        self.network = network_of(self.model, loss, config.gradient_accumulation_steps, zero, plain)
        self._tx = optimizer_of(config, zero)
        self.found = self._search() if config.is_auto else None
        self.per_device = self.found.rows if self.found else int(config.per_device_train_batch_size)
        self.rows = self._rows(self.per_device)

    @functools.cached_property
    def key(self) -> PRNGKeyArray:
        """The random key of the run."""
        return jax.random.key(self.config.seed)

    @functools.cached_property
    def _compiled_init(self) -> jax.stages.Compiled:
        """Compiled for one row per device: a state does not depend on the rows of a batch."""
        with self.precision():
            return jax.jit(self._init).lower(self.key, self._batch(self._rows(1))).compile()

    @functools.cached_property
    def _shapes(self) -> RunState:
        """Shapes and dtypes of a state."""
        with self.precision():
            return jax.eval_shape(self._init, self.key, self._batch(self._rows(1)))

    @functools.cached_property
    def like(self) -> RunState:
        """Shapes, dtypes and shardings of a state, as `checkpoint.restore` takes them."""
        shardings = self._compiled_init.output_shardings
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), self._shapes, shardings)

    @functools.cached_property
    def _compiled_step(self) -> jax.stages.Compiled:
        return self.compile()

    @functools.cached_property
    def program(self) -> compiled_program.CompiledProgram:
        """The compiled step: its GEMMs, its collectives, its memory."""
        return compiled_program.read(self._compiled_step)

    @functools.cached_property
    def sample(self) -> Callable[[RunState], Sample] | None:
        """A compiled function from a state to entries of its weights, for `unchanged_share`; None if no
        weight is rounded to nearest."""
        return sampler_of(self.network, self.config.precision, self.like, self.placement)

    @functools.cached_property
    def layers(self) -> str:
        """Which layers run in FP8, and why the others do not: see `fp8jax.report`.

        Raises:
            ValueError: the loss does not call the model, but methods of it.
        """
        return self.network.report(self._batch(self.per_device))

    @functools.cached_property
    def kernels(self) -> dict[tuple[str, ...], Kernel]:
        """The kernels that the recipe or a rule applies to, by path."""
        return self.network.kernels(self._batch(self.per_device))

    def loader(self, source: Any, transform: Any = None, *, shuffle: bool = True) -> DevicePrefetch:
        """Batches of `rows` rows on the devices: see `Loader` and `prefetch_to_device`.

        Args:
            source: rows by number, as a `TokenFile`, a list or a dataset.
            transform: row -> row, run by the workers.
            shuffle: a new order each epoch; False keeps the order of the source.
        """
        loader = Loader(
            source,
            batch=self.rows,
            seed=self.config.seed,
            workers=self.config.dataloader_num_workers,
            shuffle=shuffle,
            shard=(jax.process_index(), jax.process_count()),
            transform=transform,
        )
        return prefetch_to_device(loader, self.config.dataloader_prefetch_factor, self.placement.by_rows)

    def init(self, plain: PyTree = None) -> RunState:
        """The first state, on the devices; master weights start from plain weights, before they are rounded.

        Args:
            plain: variables of the untransformed Linen module to start from, of any float dtype, as a
                checkpoint has them; an NNX module brings its own.

        Raises:
            TypeError: `plain` is given for an NNX module.
            ValueError: `plain` has other names or shapes; or a later call of the loss reaches variables of a
                Linen model that its first call does not.
        """
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._batch(self._rows(1)))
        state = self._compiled_init(self.key, zeros)
        if plain is not None:
            restart = jax.jit(self._first_state, out_shardings=self._compiled_init.output_shardings)
            state, plain = restart(self.network.from_plain(plain, state.variables)), plain[PARAMS]
        return self._with_masters(state, plain, zeros) if self._has_masters else state

    def step(self, state: RunState, batch: PyTree) -> tuple[RunState, StepMetrics]:
        """The state after an optimizer step, and the metrics of the step; the given state is donated.

        Args:
            state: from `init` or the step before.
            batch: arrays of `rows` rows, on the host (NumPy's, torch's tensors) or as `put` gives them.

        Raises:
            ValueError: the batch is not like the example, or of another size.
        """
        self.check(batch)
        return self.placement.one_at_a_time(self._compiled_step)(state, self.put(batch), self.key)

    def put(self, batch: PyTree) -> PyTree:
        """A batch of the host on the devices."""
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else self.placement.put(x), batch)

    def check(self, batch: PyTree) -> None:
        """Raises ValueError if `step` would not take a batch of these arrays, or shapes and dtypes."""
        check_batch(self._batch(self.rows), batch, self.per_device)

    def check_memory(self) -> None:
        """Raises ValueError if the state alone needs more memory than the devices have."""
        check_fits(self._shapes, self.placement.mesh.size if self.config.zero else 1)

    def evaluator(self, loss: Loss) -> Callable[[RunState, PyTree], Float[Array, ""]]:
        """A jitted function `(state, batch) -> loss` that changes nothing in the state.

        Args:
            loss: `loss(model, batch)`, a mean over rows, which calls the model for evaluation:
                `model(x, train=False)`, or `model.eval()` of an NNX module first. A Linen model gets no
                random streams and no mutable collections; Flax raises if it asks for them. An NNX module is a
                copy.

        Returns:
            The function. Its batch is on the host or on the devices and may have any number of rows that is a
            multiple of the devices; each number is compiled anew. It raises ValueError for other numbers.
        """
        evaluate = functools.partial(self.network.evaluate, loss)
        jitted = self.placement.one_at_a_time(jax.jit(evaluate, out_shardings=self.placement.replicated))

        def mean_loss(state: RunState, batch: PyTree) -> Float[Array, ""]:
            rows, devices = len(jax.tree.leaves(batch)[0]), self.placement.mesh.size
            if rows % devices:
                raise ValueError(f"`batch`: expected a multiple of {devices} devices; got {rows} rows.")
            with self.precision():
                return jitted(state.variables, self.put(batch))

        return mean_loss

    def statistics(self, state: RunState, batch: PyTree) -> Statistics:
        """Statistics of the operands of each layer under the recipe, see `fp8jax.statistics`.

        They are of a quarter of a microbatch, of rows from all over the batch, and take about the time of a
        step of a microbatch. Beside delayed scaling they have current scaling.

        Args:
            state: from `init` or `step`; it stays as it is.
            batch: as for `step`.

        Raises:
            ValueError: the model has no layer in FP8.
        """
        rows = max(self.per_device // 4, 1) * self.placement.mesh.size
        part = jax.tree.map(lambda x: x[:: self.rows // rows][:rows], self.put(batch))
        with self.precision():
            return self._statistics(state.variables, part)

    @functools.cached_property
    def _statistics(self) -> Callable[[PyTree, PyTree], Statistics]:
        recipes = dict.fromkeys([self.config.precision, with_fresh_scales(self.config.precision)])
        measure = functools.partial(self.network.statistics, recipes=recipes)
        return self.placement.one_at_a_time(jax.jit(measure, out_shardings=self.placement.replicated))

    def compile(self, per_device: int | None = None, target: str | None = None) -> jax.stages.Compiled:
        """The compiled step, for another batch size or for one GPU that is not here."""
        rows = self._rows(per_device or self.per_device)
        with self.precision():
            if target:
                arguments = self._shapes, self._batch(rows), self.key
                return targets.compile_for(self._step, *arguments, target=target, donate_argnums=0)
            # The new state is placed like the old one.
            shardings = jax.tree.map(lambda x: x.sharding, self.like), self.placement.replicated
            jitted = jax.jit(self._step, donate_argnums=0, out_shardings=shardings)
            return jitted.lower(self.like, self._batch(rows, self.placement.by_rows), self.key).compile()

    def plan(self, target: str | None = None) -> memory.MemoryPlan:
        """The memory of a step on one device, read from the compiled program.

        Args:
            target: name of one GPU that is not here; None for the trainer's devices.

        Raises:
            ValueError: `target` with several devices or with moments on the host.
        """
        devices = self.placement.mesh.size
        if target and (devices > 1 or self.config.offload):
            raise ValueError(f"`target`: {target} is one device with everything on it; leave it out.")
        state = self._shapes if target else self.like
        batch = self._batch(self.rows, None if target else self.placement.by_rows)
        program = compiled_program.read(self.compile(target=target)) if target else self.program
        return memory.plan_of(
            state.variables,
            state.opt_state,
            (batch, self.key, state.step),
            total=program.total,
            sent=program.sent(devices),
            recipe=str(self.config.precision),
            stage=self.config.zero,
            devices=devices,
        )

    def gradients(self) -> PyTree:
        """Shapes and dtypes of the gradients of a step."""
        arguments = self.like.variables, self._batch(self.rows), self.key
        return jax.eval_shape(self.network.gradients, *arguments)[1]

    def _init(self, key: PRNGKeyArray, batch: PyTree) -> RunState:
        return self._first_state(self.network.init(key, batch))

    def _first_state(self, variables: PyTree) -> RunState:
        variables = self.network.placed(variables)
        return RunState(jnp.zeros((), jnp.int32), variables, self._tx.init(self.network.trained(variables)))

    def _with_masters(self, state: RunState, plain: PyTree, batch: PyTree) -> RunState:
        """The state with master weights from plain parameters, by default those of a new model."""

        def masters(opt_state: PyTree, plain: PyTree, key: PRNGKeyArray) -> Any:
            plain = self.network.plain_params(key, batch) if plain is None else plain
            return optim.with_masters(opt_state, plain)

        at = self._compiled_init.output_shardings.opt_state
        with self.precision():
            jitted = jax.jit(masters, out_shardings=at, donate_argnums=0)
            return state._replace(opt_state=jitted(state.opt_state, plain, self.key))

    def _step(self, state: RunState, batch: PyTree, key: PRNGKeyArray) -> tuple[RunState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        loss, grads, variables = self.network.gradients(state.variables, batch, key)
        updates, opt_state = self._tx.update(grads, state.opt_state, self.network.trained(variables))
        new = RunState(state.step + 1, self.network.updated(variables, updates), opt_state)
        before, after = map(self.network.collections, (state.variables, new.variables))
        scales = scale_metrics(before, after, self.config.precision)
        return new, StepMetrics(loss, optim.skipped(opt_state), scales)

    def _search(self) -> BatchSize:
        target, devices = self.config.target, self.placement.mesh.size
        if target and devices > 1:
            raise ValueError(f"--target {target} is one device that is not here; got {devices} --devices")
        budget = self.config.memory_budget * 1e9 or budget_of_device(target)
        return largest_batch(lambda rows: compiled_program.read(self.compile(rows, target)).total, budget)

    def _rows(self, per_device: int) -> int:
        return per_device * self.placement.mesh.size * self.config.gradient_accumulation_steps

    def _batch(self, rows: int, sharding: Any = None) -> PyTree:
        """The shapes of a batch of so many rows."""
        return jax.tree.map(lambda x: x.update(shape=(rows, *x.shape), sharding=sharding), self._row)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of float32 GEMMs."""
        return jax.default_matmul_precision("tensorfloat32") if self.config.tf32 else contextlib.nullcontext()
