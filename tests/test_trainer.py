"""The trainer: its settings, its batch, its step, for any Flax model."""

import dataclasses
import itertools
import os
import pathlib
import subprocess

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.inspect import program, targets
from fp8jax.optim.state import is_adam_state
from fp8jax.quantization import is_scaled, quantize, value
from fp8jax.train import config
from fp8jax.train import trainer as trainer_module
from fp8jax.train.config import TrainConfig
from fp8jax.train.step import batch_size
from fp8jax.train.step.batch_size import BatchSize, budget_of_device, largest_batch
from fp8jax.train.step.optimizers import optimizer_of, schedule_of
from fp8jax.train.trainer import Trainer

WIDTH, TIME, VOCABULARY = 32, 16, 48


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        y = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(y))


class Net(nn.Module):
    blocks: int = 2

    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(self.blocks):
            x = Block()(x, train)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(VOCABULARY)(x)


class Plain(nn.Module):
    """All kinds of state, and soon compiled."""

    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Dense(2 * WIDTH, use_bias=False)(nn.Embed(VOCABULARY, WIDTH)(tokens))
        x = nn.Dropout(0.1, deterministic=not train)(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(VOCABULARY)(nn.gelu(x))


class Small(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.down(nnx.gelu(self.norm(self.up(self.embed(tokens)))))


def loss(model, batch):
    logits = jax.nn.log_softmax(model(batch["tokens"][:, :-1]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], axis=-1))


def rows(count, seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, VOCABULARY, (count, TIME + 1)).astype(np.int32)}


def trained(model=None, steps=3, **settings):
    """The trainer, its last state, and its losses on one batch."""
    settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, **settings}
    trainer = Trainer(Plain() if model is None else model, loss, TrainConfig(**settings), rows(1))
    state, losses, batch = trainer.init(), [], rows(trainer.rows)
    for _ in range(steps):
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics.loss))
    return trainer, state, losses


@pytest.mark.parametrize("folder", ["~/programs", pathlib.Path("~/programs")])
def test_a_compile_cache_in_the_users_home(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [jax.config.values[name] for name in names]
    try:
        Trainer(Plain(), loss, TrainConfig(compile_cache=folder), rows(1))
        assert jax.config.values[names[0]] == str(tmp_path / "programs")
    finally:
        for name, value_before in zip(names, before, strict=True):
            jax.config.update(name, value_before)


# --- the first state --------------------------------------------------------------------------


def masters_of(state):
    [adam] = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam_state) if is_adam_state(x)]
    return jax.tree.leaves(jax.device_get(adam.master), is_leaf=is_scaled)


def assert_rounded_from(state, plain):
    """Masters have plain weights' values in FP16; and E4M3 weights, which are coarser, their masters'."""
    masters = masters_of(state)
    kernels = [leaf for leaf in jax.tree.leaves(plain) if leaf.ndim == 2 and leaf.shape[0] != VOCABULARY]
    assert len(masters) == len(kernels) == 2
    for master, kernel in zip(masters, kernels, strict=True):
        np.testing.assert_array_equal(value(master), value(quantize(kernel, "FP16", power_of_two=True)))


@pytest.mark.parametrize("settings", [{}, {"zero": 1, "devices": 2}, {"offload": True}], ids=str)
def test_first_masters_are_from_plain_weights(settings):
    """The E4M3 weights of O3 have lost 2.6% of them, in a new model and in a checkpoint."""
    settings = {"recipe": "O3", "per_device_train_batch_size": 4, **settings}
    trainer = Trainer(Plain(), loss, TrainConfig(**settings), rows(1))
    key, tokens = trainer.key, rows(1)["tokens"][:, :-1]
    state = trainer.init()
    plain = Plain().init({"params": key, "dropout": jax.random.fold_in(key, 1)}, tokens)
    assert_rounded_from(state, plain["params"])
    checkpoint = jax.tree.map(lambda x: 3 * x + 0.01, plain)
    started = trainer.init(checkpoint)
    assert_rounded_from(started, checkpoint["params"])
    for a, b, like in zip(*map(jax.tree.leaves, (state, started, trainer.like)), strict=True):
        assert a.sharding == b.sharding == like.sharding
    state, metrics = trainer.step(state, rows(trainer.rows))
    assert np.isfinite(metrics.loss)


def test_first_masters_of_nnx_are_from_the_module():
    settings = {"recipe": "O3", "per_device_train_batch_size": 4}
    module = Small(nnx.Rngs(0))
    state = Trainer(module, loss, TrainConfig(**settings), rows(1)).init()
    assert_rounded_from(state, nnx.to_pure_dict(nnx.state(module, nnx.Param)))


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "yaml, argv, expected",
    [
        ("per_device_train_batch_size: 16", [], {"per_device_train_batch_size": 16}),
        ("per_device_train_batch_size: auto", [], {"per_device_train_batch_size": "auto"}),
        ("", ["--per-device-train-batch-size", "auto"], {"per_device_train_batch_size": "auto"}),
        ("", ["--per-device-train-batch-size", "3"], {"per_device_train_batch_size": 3}),
        (
            "bf16: true\noptim: adamw_bnb_8bit",
            ["--zero", "0"],
            {"bf16": True, "optim": "adamw_bnb_8bit", "zero": 0},
        ),
    ],
)
def test_settings_from_yaml_and_the_command_line(tmp_path, yaml, argv, expected):
    (tmp_path / "run.yaml").write_text(yaml)
    given = config.read(TrainConfig, [*(["--config", str(tmp_path / "run.yaml")] if yaml else []), *argv])
    assert given == expected
    TrainConfig(**given)


def test_what_settings_mean():
    assert str(TrainConfig().precision) == str(TrainConfig(optim="adamw_8bit").precision) == "fp8"
    assert str(TrainConfig(optim="adafactor").precision) == "fp8"
    assert str(TrainConfig(bf16=True).precision) == "bf16"
    assert str(TrainConfig(fp16=True).precision) == "fp16_amp"
    assert TrainConfig(optim="adamw_torch_fused").optimizer == "adamw"
    assert TrainConfig(optim="adamw_bnb_8bit").optimizer == "adamw_8bit"
    assert TrainConfig(per_device_train_batch_size="auto").is_auto


# Options that are refused, and the beginning of the message.
REFUSED = [
    (
        {"per_device_train_batch_size": "8.5"},
        "--per-device-train-batch-size must be a whole number or one of auto; got 8.5",
    ),
    ({"per_device_train_batch_size": 0}, "--per-device-train-batch-size must be at least 1 and below 2"),
    (
        {"gradient_checkpointing": "all"},
        "--gradient-checkpointing must be one of none, full, dots, dots_fp8, dots_fp8_inputs, fp8; got all",
    ),
    (
        {"optim": "adamw_8bits"},
        "--optim must be one of adamw, adamw_torch, adamw_torch_fused, adamw_8bit, adam",
    ),
    ({"fp16": True, "bf16": True}, "--fp16 and --bf16 are two precisions; leave one out"),
    ({"recipe": "O2", "bf16": True}, "--bf16 and --recipe O2 are two precisions; leave one out"),
    ({"recipe": "O2", "fp16": True}, "--fp16 and --recipe O2 are two precisions; leave one out"),
    ({"tf32": True, "fp16": True}, "--tf32 is for float32 GEMMs, and --fp16 has none; leave it out"),
    ({"memory_budget": 1.0}, "--memory-budget and --target are for --per-device-train-batch-size auto; add"),
    ({"target": "h200"}, "--memory-budget and --target are for --per-device-train-batch-size auto; add that"),
    ({"optim": "adafactor", "recipe": "O3"}, "--optim adafactor keeps no master weights, and O3 needs them"),
    (
        {"optim": "adafactor", "zero": 1},
        "--zero shares the moments of adamw; got --optim adafactor; use adamw",
    ),
    (
        {"optim": "adamw_8bit", "zero": 2},
        "--zero shares the moments of adamw; got --optim adamw_8bit; use adamw",
    ),
    (
        {"optim": "adamw_8bit", "offload": True},
        "--offload is for the moments of adamw; got --optim adamw_8bit",
    ),
    (
        {"lora_rank": 4, "zero": 1},
        "--lora-rank has few moments and supports neither --zero nor --offload; leave",
    ),
    ({"lora_rank": 4, "fp16": True}, "--fp16 has no loss scale for adapters of --lora-rank; use --bf16"),
    ({"warmup_steps": 1000}, "--warmup-steps 1000 must be fewer than --max-steps 1000"),
    ({"min_learning_rate": 1.0}, "--min-learning-rate 1.0 must be at most --learning-rate 5e-05"),
]


@pytest.mark.parametrize("settings, says", REFUSED)
def test_refused_options(settings, says):
    with pytest.raises(ValueError) as caught:
        TrainConfig(**settings)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"bf16": True, "gradient_checkpointing": "fp8"}, "fp8 saves FP8 operands, and gemm=BF16 has none"),
        ({"checkpoint_blocks": "Block"}, "`checkpoint_blocks`: expected with `gradient_checkpointing`"),
        ({"per_device_train_batch_size": "auto", "target": "h900"}, "`target`: expected one of h100, h200"),
        (
            {"distributed": True},
            r"--distributed: .*; call `fp8jax.train.distributed.initialize\(config\)` first",
        ),
    ],
)
def test_options_that_a_trainer_refuses(settings, says):
    with pytest.raises(ValueError, match=says):
        Trainer(Net(), loss, TrainConfig(**settings), rows(1))


def test_a_rule_has_operands_for_fp8_residuals():
    settings = TrainConfig(bf16=True, rules="*:te", gradient_checkpointing="fp8")
    assert "gradient_checkpointing=fp8: of" in Trainer(Net(), loss, settings, rows(1)).layers


@pytest.mark.parametrize(
    "kind, values",
    [("constant", [0.25, 0.5, 0.75, 1, 1, 1]), ("linear", [0.25, 0.5, 0.75, 1, 0.5, 0]), ("cosine", None)],
)
def test_the_schedule(kind, values):
    settings = TrainConfig(learning_rate=1.0, warmup_steps=3, max_steps=5, lr_scheduler_type=kind)
    found = [float(schedule_of(settings)(step)) for step in range(6)]
    np.testing.assert_allclose(found, values or [0.25, 0.5, 0.75, 1, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_only_matrices_decay(optim):
    rate = {"learning_rate": 0.1, "lr_scheduler_type": "constant"}
    settings = TrainConfig(recipe="fp32", optim=optim, weight_decay=0.5, **rate)
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    tx = optimizer_of(settings)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new = fp8jax.apply_updates(params, tx.update(zeros, tx.init(params), params)[0])
    np.testing.assert_allclose(new["kernel"], 0.95)
    np.testing.assert_array_equal(new["scale"], 1)
    np.testing.assert_array_equal(new["bias"], 1)


def test_adafactor_clips_no_updates():
    """A gradient that grows tenfold: adafactor's step is longer than one of a root mean square of 1."""
    settings = TrainConfig(
        recipe="fp32", optim="adafactor", learning_rate=0.1, max_grad_norm=0.0, lr_scheduler_type="constant"
    )
    params, tx = {"kernel": jnp.zeros((128, 128))}, optimizer_of(settings)
    state = tx.init(params)
    for size in (0.1, 1.0):
        updates, state = tx.update({"kernel": jnp.full((128, 128), size)}, state, params)
    kept = 1 - 2**-0.8  # of the second moment, at the second step
    np.testing.assert_allclose(updates["kernel"], -0.1 / np.sqrt(kept * 0.01 + 1 - kept), rtol=1e-5)


# --- the largest batch ------------------------------------------------------------------------

CURVES = {
    "a line": (lambda n: 100 + 7 * n, 1000),
    "with noise": (lambda n: 100 + 7 * n + 3 * (n % 5), 1000),
    "flat at first": (lambda n: max(600, 70 * n), 1000),
    "in steps of 8": (lambda n: 100 + 7 * (-(-n // 8) * 8), 1000),
    "one": (lambda n: 500 + n, 501),
    "many": (lambda n: 5 + 3 * n, 10**6),
    "a square": (lambda n: 100 + n * n, 10**5),
}


@pytest.mark.parametrize("curve", CURVES)
def test_the_largest_batch_fits_and_the_next_does_not(curve):
    bytes_of, budget = CURVES[curve]
    found = largest_batch(bytes_of, budget)
    assert found.bytes == bytes_of(found.rows) <= budget
    assert found.next_bytes == bytes_of(found.rows + 1) > budget
    assert len(found.compiled) <= 15


def test_a_batch_that_is_enough(monkeypatch):
    monkeypatch.setattr(batch_size, "MOST", 100)
    found = largest_batch(lambda n: n, 10**9)
    assert found.rows == 100
    assert found.next_bytes is None


def test_a_row_that_does_not_fit():
    with pytest.raises(ValueError, match="one row needs 2 GB, and the budget is 1 GB"):
        largest_batch(lambda n: 2 * 10**9 * n, 10**9)


def test_a_budget(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    memory = fp8jax.inspect.targets.get("h200").memory
    assert budget_of_device("h200") == 0.75 * memory
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert budget_of_device("h200") == 0.9 * memory
    with pytest.raises(ValueError, match="--memory-budget"):
        budget_of_device()


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"devices": 4, "zero": 2}])
def test_auto_compiles_what_fits(more):
    budget = 1e6
    settings = {"recipe": "te", "per_device_train_batch_size": "auto", "memory_budget": budget / 1e9}
    trainer = Trainer(Plain(), loss, TrainConfig(**settings, **more), rows(1))
    assert trainer.program.total <= budget
    assert program.read(trainer.compile(trainer.per_device + 1)).total > budget
    assert trainer.rows == trainer.found.rows * more.get("devices", 1) > 1


def test_auto_for_a_gpu_that_is_not_here_is_for_one():
    settings = TrainConfig(per_device_train_batch_size="auto", target="h200", devices=2)
    with pytest.raises(ValueError, match="h200 is one device that is not here; got 2"):
        Trainer(Plain(), loss, settings, rows(1))


# --- the step ---------------------------------------------------------------------------------


def test_a_plain_loop_does_the_same():
    trainer, state, losses = trained(steps=2, recipe="te", weight_decay=0.1)
    model, tx = fp8jax.transform(Plain(), "te"), optimizer_of(trainer.config)
    variables = {**trainer.init().variables}
    opt_state, batch = tx.init(variables), rows(4)

    @jax.jit
    def step(variables, opt_state, batch, key):
        def loss_fn(variables, batch):
            call = lambda *args: model.apply(variables, *args, rngs={"dropout": key}, mutable=["batch_stats"])  # noqa: E731
            kept = {}

            def apply(tokens):
                out, new = call(tokens)
                kept.update(new)
                return out

            return loss(apply, batch), kept

        (value, kept), grads, variables = fp8jax.value_and_grad(loss_fn, has_aux=True)(variables, batch)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return {**fp8jax.apply_updates(variables, updates), **kept}, opt_state, value

    for number, expected in enumerate(losses):
        key = jax.random.split(jax.random.fold_in(trainer.key, number), 1)[0]
        variables, opt_state, value = step(variables, opt_state, batch, key)
        assert float(value) == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(jax.tree.leaves(state.variables), jax.tree.leaves(variables), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_what_a_step_changes_and_shows():
    trainer, state, losses = trained()
    assert losses[2] < losses[0]
    assert int(state.step) == 3
    assert np.any(state.variables["batch_stats"]["BatchNorm_0"]["mean"] != 0)
    _, metrics = trainer.step(state, rows(4))
    assert int(metrics.skipped) == 0
    assert metrics.scales.scale.shape == metrics.scales.saturation.shape
    assert metrics.scales.scale.size
    with pytest.raises(ValueError, match="4 rows"):
        trainer.step(trainer.init(), rows(3))


@pytest.mark.parametrize("name", ["dropout", "noise"])
def test_each_call_in_a_loss_has_random_numbers_of_its_own(name):
    """Or the consistency of two calls, as of R-Drop and SimCSE, would be trivial."""

    class Random(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH)(x)
            return x + jax.random.normal(self.make_rng(name), x.shape)

    def consistency(model, x):
        return jnp.mean((model(x) - model(x)) ** 2)

    x = np.ones((8, WIDTH), np.float32)
    trainer = Trainer(Random(), consistency, TrainConfig(recipe="te"), x)
    state, losses = trainer.init(), []
    assert len(trainer.kernels) == 1 and "1 of 1 layers in FP8" in trainer.layers
    for _ in range(2):
        state, metrics = trainer.step(state, x)
        losses.append(float(metrics.loss))
    assert min(losses) > 1 and losses[0] != losses[1]  # 2, the variance of a difference
    assert trainer.statistics(state, x).rows


class Coder(nn.Module):
    def setup(self):
        self.down, self.up = nn.Dense(WIDTH), nn.Dense(WIDTH)
        self.norm = nn.BatchNorm(use_running_average=False)

    def encode(self, x):
        return self.down(x)

    def decode(self, z):
        return self.up(self.norm(z))

    def both(self, x):
        return self.decode(self.encode(x))


@pytest.mark.parametrize("name", ["decode", "up"])
def test_the_first_call_makes_all_variables(name):
    def by_parts(model, x):
        z = model(x, method="encode")
        return jnp.mean(model(z, method=lambda coder, z: getattr(coder, name)(z)))

    x = np.ones((8, WIDTH), np.float32)
    trainer = Trainer(Coder(), by_parts, TrainConfig(recipe="te"), x)
    with pytest.raises(ValueError, match=r"`loss`: expected its first call .* others: .*\. Write a method"):
        trainer.init()
    whole = Trainer(Coder(), lambda model, x: jnp.mean(model(x, method="both")), TrainConfig(recipe="te"), x)
    assert np.isfinite(whole.step(whole.init(), x)[1].loss) and len(whole.kernels) == 2


def test_the_first_call_has_the_key_of_its_step():
    """So a run that began with an older version goes on with the same dropout."""

    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x))

    x, key = np.ones((8, WIDTH), np.float32), jax.random.key(1)
    trainer = Trainer(Dropped(), lambda model, x: jnp.mean(model(x)), TrainConfig(recipe="fp32"), x)
    variables = trainer.init().variables
    found, _, _ = trainer.network.gradients(variables, x, key)
    expected = trainer.model.apply(variables, x, rngs={"dropout": jax.random.split(key, 1)[0]})
    assert found == jnp.mean(expected) != 0


def test_a_plan_is_the_trainers_program():
    config = TrainConfig(devices=2, zero=1, recipe="O2", per_device_train_batch_size=4)
    trainer = Trainer(Plain(), loss, config, rows(1))
    plan, state = trainer.plan(), trainer.init()
    here = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    assert plan.weights == here(state.variables)
    assert plan.moments + plan.master < here(state.opt_state) <= plan.stored - plan.weights
    assert (plan.recipe, plan.stage, plan.devices) == ("O2", 1, 2)
    assert plan.total == trainer.program.total and plan.sent == trainer.program.sent(2) > 0
    with pytest.raises(ValueError, match="`target`: h200 is one device"):
        trainer.plan("h200")


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
def test_a_plan_for_another_gpu():
    trainer = Trainer(Plain(), loss, TrainConfig(recipe="te", per_device_train_batch_size=4), rows(1))
    plan, found = trainer.plan("h200"), trainer.compile(target="h200").memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    assert plan.stored == found.argument_size_in_bytes
    assert plan.temporaries == found.temp_size_in_bytes + results
    assert plan[3:7] == trainer.plan()[3:7] and plan.total != trainer.plan().total


def test_rows_have_the_dtypes_of_arrays_on_a_device():
    """NumPy's float64 is float32 there, in the example and in batches."""
    example = {"x": np.zeros((1, 4))}
    config = TrainConfig(recipe="fp32", per_device_train_batch_size=2)
    trainer = Trainer(nn.Dense(4), lambda model, batch: jnp.mean(model(batch["x"]) ** 2), config, example)
    for dtype in (np.float64, np.float32):
        trainer.check({"x": np.ones((2, 4), dtype)})
    _, metrics = trainer.step(trainer.init(), {"x": np.ones((2, 4))})
    assert metrics.loss.dtype == jnp.float32
    with pytest.raises(ValueError, match="int32"):
        trainer.check({"x": np.ones((2, 4), np.int64)})


@pytest.mark.parametrize("example, where", [({"tokens": [[0] * 17]}, r"\['tokens'\]\[0\]\[0\]"), (3, "")])
def test_an_example_has_arrays(example, where):
    with pytest.raises(TypeError, match=f"`example{where}`: expected an array; got a int. Lists of numbers"):
        Trainer(Plain(), loss, TrainConfig(), example)


def test_tensors_of_torch_are_batches():
    torch = pytest.importorskip("torch")
    batch = {"x": torch.arange(8, dtype=torch.float64).reshape(2, 4)}
    config = TrainConfig(recipe="fp32", per_device_train_batch_size=2)
    of_mean = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    trainer = Trainer(nn.Dense(4), of_mean, config, batch)
    expected = trainer.evaluator(of_mean)(trainer.init(), {"x": batch["x"].numpy()})
    assert trainer.evaluator(of_mean)(trainer.init(), batch) == expected
    assert trainer.step(trainer.init(), batch)[1].loss == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ValueError, match=r"expected float32\[2,4\], .*; got int32\[2,4\]"):
        trainer.step(trainer.init(), {"x": batch["x"].long()})
    for bad in (batch["x"].bfloat16(), batch["x"].requires_grad_()):
        with pytest.raises(TypeError, match="`batch`: expected arrays that NumPy reads; got a Tensor"):
            trainer.step(trainer.init(), {"x": bad})


def test_nnx():
    trainer, state, losses = trained(Small(nnx.Rngs(0)), recipe="te")
    assert losses[2] < losses[0]
    _, metrics = trainer.step(state, rows(4))
    assert metrics.scales.scale.size == 2 * 3


@pytest.mark.parametrize("settings", [{}, {"devices": 2, "zero": 2, "gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("is_nnx", [False, True])
def test_underflow_of_the_casts(is_nnx, settings):
    trainer, state, _ = trained(Small(nnx.Rngs(0)) if is_nnx else None, recipe="te", **settings)
    is_kernel = lambda x: x.shape == (WIDTH, 2 * WIDTH)  # noqa: E731
    state = jax.tree.map(lambda x: x.at[::4].set(1e-9) if is_kernel(x) else x, state)
    before, name = jax.device_get(state), "up" if is_nnx else "Dense_0"
    found = trainer.statistics(state, rows(trainer.rows)).rows
    shares = {f"{row.name} {row.operand}": row.underflow for row in found if row.is_own}
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert shares[f"{name} kernel"] == pytest.approx(0.25, abs=0.01)
    assert all(shares[f"{name} {operand}"] < 0.1 for operand in ("input", "output gradient"))


def evaluation_loss(model, batch):
    return loss(lambda tokens: model(tokens, train=False), batch)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_evaluation_of_a_linen_model(devices):
    """It has no dropout, and changes no state."""
    trainer, state, _ = trained(steps=0, recipe="te", devices=devices)
    before = jax.device_get(state)
    evaluate, batch = trainer.evaluator(evaluation_loss), rows(6)
    found = [float(evaluate(state, batch)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, state, before)
    apply = jax.jit(lambda tokens: trainer.model.apply(before.variables, tokens, train=False))
    # In two parts and then in one, so that float32 sums of 6 x 16 losses are added in another order.
    np.testing.assert_allclose(found, 2 * [float(loss(apply, batch))], rtol=96 * 2**-24)
    assert float(evaluate(state, rows(2))) != found[0]
    with pytest.raises(flax.errors.FlaxError):
        trainer.evaluator(loss)(state, batch)  # it asks for dropout, and to change its statistics


def test_an_evaluation_takes_rows_that_the_devices_divide():
    settings = TrainConfig(per_device_train_batch_size=2, devices=2)
    trainer = Trainer(Plain(), loss, settings, rows(1))
    with pytest.raises(ValueError, match="`batch`: expected a multiple of 2 devices; got 3 rows"):
        trainer.evaluator(evaluation_loss)(None, rows(3))


def test_it_starts_from_a_plain_model():
    plain = Plain().init(
        {"params": jax.random.key(5), "dropout": jax.random.key(6)}, rows(4)["tokens"][:, :-1]
    )
    trainer = Trainer(Plain(), loss, TrainConfig(per_device_train_batch_size=4), rows(1))
    for dtype, container in ((jnp.float32, dict), (jnp.bfloat16, flax.core.freeze)):
        checkpoint = jax.tree.map(lambda x, to=dtype: x.astype(to), {**plain, "sown": {"x": jnp.ones(2)}})
        state = trainer.init(container(checkpoint))
        # A step is compiled for these.
        assert jax.tree.structure(state) == jax.tree.structure(trainer.like)
        for leaf, like in zip(*map(jax.tree.leaves, (state, trainer.like)), strict=True):
            assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        found = trainer.model.dequantize(state.variables)["params"]
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(checkpoint["params"]), strict=True):
            np.testing.assert_allclose(mine, theirs.astype(np.float32), rtol=2**-10, atol=1e-7)
    with pytest.raises(ValueError, match=r"`plain`: .*'BatchNorm_0/mean' has shape \(3,\), not \(64,\)"):
        trainer.init({**plain, "batch_stats": jax.tree.map(lambda x: x[:3], plain["batch_stats"])})


def test_a_plain_counter_stays_a_whole_number():
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("state", "count", lambda: jnp.zeros((), jnp.int32))
            return nn.Dense(4)(x)

    batch = {"x": jnp.ones((2, 4))}
    plain = Counts().init(jax.random.key(0), batch["x"])
    config = TrainConfig(recipe="fp32", per_device_train_batch_size=2)
    trainer = Trainer(Counts(), lambda model, batch: jnp.mean(model(batch["x"])), config, batch)
    assert trainer.init({**plain, "state": {"count": 3}}).variables["state"]["count"] == 3
    with pytest.raises(ValueError, match="`plain`: expected int32 at 'count'; got float32"):
        trainer.init({**plain, "state": {"count": 2.7}})


def test_an_nnx_module_brings_its_parameters():
    trainer = Trainer(Small(nnx.Rngs(0)), loss, TrainConfig(per_device_train_batch_size=4), rows(1))
    with pytest.raises(TypeError, match="`plain`: expected None, for an NNX module brings its .*got a dict"):
        trainer.init({"params": {}})


@pytest.mark.parametrize("recipe, policy", [("bf16", "dots_fp8"), ("te", "dots_fp8_inputs")])
def test_residuals_in_fp8(recipe, policy):
    config = TrainConfig(recipe=recipe, gradient_checkpointing=policy, per_device_train_batch_size=4)
    trainer = Trainer(Net(), loss, config, rows(1))
    assert f"gradient_checkpointing={policy}: of" in trainer.layers
    _, metrics = trainer.step(trainer.init(), rows(4))
    assert 0 < float(metrics.loss) < 100


# --- all pairs --------------------------------------------------------------------------------

# The techniques, each by one setting.
TECHNIQUES = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "tf32": {"recipe": "fp32", "tf32": True},
    **{recipe: {"recipe": recipe} for recipe in ("te", "O1", "O2", "O3", "te+O2")},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing full": {"gradient_checkpointing": "full"},
    "checkpointing dots": {"gradient_checkpointing": "dots"},
    "checkpointing fp8": {"gradient_checkpointing": "fp8"},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "adafactor": {"optim": "adafactor"},
    "LoRA": {"lora_rank": 4},
    "ZeRO 2": {"devices": 2, "zero": 2},
    "ZeRO 3": {"devices": 2, "zero": 3},
    "offload": {"offload": True},
    "auto batch": {"per_device_train_batch_size": "auto", "memory_budget": 0.01},
}


# Why two techniques do not go together.
TWO_PRECISIONS = r"--(fp16|bf16) and .* are two precisions; leave one out"
NO_OPERANDS = r"fp8 saves FP8 operands, and gemm=\w+ has none"
ADAMW_ONLY = r"for the moments of adamw; got --optim|--zero shares the moments of adamw; got --optim"
HIGH_PRECISION = ("bf16", "fp16", "tf32")
REFUSALS = {
    **{(half, other): TWO_PRECISIONS for half in ("bf16", "fp16") for other in [*TECHNIQUES][1:8]},
    **{(name, "checkpointing fp8"): NO_OPERANDS for name in HIGH_PRECISION},
    ("fp16", "LoRA"): "--fp16 has no loss scale for adapters of --lora-rank",
    ("O3", "adafactor"): "--optim adafactor keeps no master weights, and O3 needs them",
    **{
        (name, sharding): ADAMW_ONLY
        for name in ("adamw_8bit", "adafactor")
        for sharding in ("ZeRO 2", "ZeRO 3", "offload")
    },
    **{("LoRA", name): "--lora-rank .* supports neither" for name in ("ZeRO 2", "ZeRO 3", "offload")},
}


def pairs():
    """All pairs of techniques but two values of one setting."""
    for pair in itertools.combinations(TECHNIQUES, 2):
        first, second = (TECHNIQUES[name] for name in pair)
        if not set(first) & set(second):
            yield pair


LEGAL = [pair for pair in pairs() if pair not in REFUSALS]


def ids_of(pair):
    return f"{pair[0]} and {pair[1]}"


@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair in REFUSALS], ids=ids_of)
def test_refused_pairs(pair):
    with pytest.raises(ValueError, match=REFUSALS[pair]):
        Trainer(Tiny(), loss, TrainConfig(**TECHNIQUES[pair[0]], **TECHNIQUES[pair[1]]), rows(1))


class TinyBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(x)


class Tiny(nn.Module):
    """Soon traced, with blocks to rematerialize."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        return nn.Dense(VOCABULARY)(TinyBlock()(TinyBlock()(x)))


@pytest.mark.parametrize("pair", LEGAL, ids=ids_of)
def test_pairs_are_traced(pair, monkeypatch):
    monkeypatch.setattr(trainer_module, "largest_batch", lambda *args: BatchSize(4, 0, None, {}))
    settings = {"per_device_train_batch_size": 4, **TECHNIQUES[pair[0]], **TECHNIQUES[pair[1]]}
    trainer = Trainer(Tiny(), loss, TrainConfig(**settings), rows(1))
    with trainer.precision():
        before, batch = trainer._shapes, trainer._batch(trainer.rows)
        after, metrics = jax.eval_shape(trainer._step, before, batch, trainer.key)
    assert metrics.loss.shape == () and metrics.loss.dtype == jnp.float32
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


PARTS = 60


def part():
    """The part of the pairs that is trained: another one at each commit, or that of FP8JAX_PART."""
    chosen = os.environ.get("FP8JAX_PART")
    if chosen is None:
        git = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        chosen = int(commit or "0", 16)
    return int(chosen) % PARTS


PART = part()


@pytest.mark.long
@pytest.mark.parametrize("pair", LEGAL[PART::PARTS], ids=lambda pair: f"part {PART}: {ids_of(pair)}")
def test_pairs_train(pair):
    print(f"FP8JAX_PART={PART} chooses these pairs")
    # The search for a batch compiles a step for each of seven sizes.
    model = Plain() if "auto batch" in pair else Net(blocks=2)
    _, state, losses = trained(model, steps=5, **TECHNIQUES[pair[0]], **TECHNIQUES[pair[1]])
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]
    assert int(state.step) == 5


def test_each_setting_is_documented():
    for field in dataclasses.fields(TrainConfig):
        assert field.metadata["help"]


# --- the table of techniques ------------------------------------------------------------------


def test_techniques_differ_in_legal_settings(load_program):
    techniques = load_program("examples/techniques.py").TECHNIQUES
    for off, on in techniques.values():
        assert TrainConfig(**off) != TrainConfig(**on)


@pytest.mark.long
def test_techniques_are_measured(load_program, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "sys.argv", ["techniques.py", "--tiny", "--only", "LoRA of", "--record", str(tmp_path)]
    )
    load_program("examples/techniques.py").main()
    assert "PEFT: LoRA of rank 8" in capsys.readouterr().out
    assert list(tmp_path.glob("*_techniques/*.json"))
