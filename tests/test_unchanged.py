"""The share of the weights that a step leaves unchanged."""

import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8jax.quantization import value
from fp8jax.train import TrainConfig, Trainer, fit
from fp8jax.train.metrics import Bytes, Curves, ScaleMetrics, StepMetrics
from fp8jax.train.report import Outcome, Progress, report
from fp8jax.train.step.unchanged_weights import ENTRIES, Sample, _stored_weights, _strides, unchanged_share

WIDTH = 384


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.tanh(nn.Dense(WIDTH)(nn.Dense(WIDTH)(x))))


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 32, rngs=rngs)
        self.middle = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.middle(self.up(x))))


def loss(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def rows(count):
    x = np.random.default_rng(0).standard_normal((2, count, 32)).astype(np.float32)
    return [{"x": x[0, i], "y": x[1, i]} for i in range(count)]


BATCH = jax.tree.map(lambda *x: np.stack(x), *rows(8))


def trainer_of(model=None, **settings):
    given = {"per_device_train_batch_size": 8 // settings.get("devices", 1), "lr_scheduler_type": "constant"}
    config = TrainConfig(**{**given, "learning_rate": 3e-5, **settings})
    return Trainer(Linen() if model is None else model, loss, config, BATCH)


def updated_weights(trainer, state):
    """(values, whether the first moment is not zero) of each weight that is rounded to nearest."""
    kept = _stored_weights(trainer.network.collections(state.variables)["params"], state.opt_state)
    return [
        (
            np.asarray(value(weight)),
            np.asarray(jnp.asarray(jnp.ones(weight.shape) if moment is None else moment)) != 0,
        )
        for weight, moment in kept
    ]


def counted(trainer, steps=3):
    """The sampled share of the last step, that of all weights, and the number of entries."""
    state = trainer.init()
    for _ in range(steps):
        before, old = trainer.sample(state), updated_weights(trainer, state)
        state, _ = trainer.step(state, BATCH)
    after, new = trainer.sample(state), updated_weights(trainer, state)
    same = [(x == y)[moves] for (x, _), (y, moves) in zip(old, new, strict=True)]
    truth = np.mean(np.concatenate(same))
    return unchanged_share(before, after), truth, len(after.value), sum(x.size for x, _ in new)


@pytest.mark.parametrize(
    "model, settings",
    [
        (None, {"recipe": "O2"}),
        (None, {"recipe": "O1"}),
        (None, {"recipe": "O3"}),
        (None, {"recipe": "O2", "optim": "adafactor"}),
        (None, {"recipe": "O2", "optim": "adamw_8bit"}),
        (OfNNX, {"recipe": "O2"}),
        (None, {"recipe": "O2", "devices": 2, "zero": 0}),
        (None, {"recipe": "O3", "devices": 2, "zero": 1}),
        (None, {"recipe": "O2", "devices": 2, "zero": 3}),
    ],
)
def test_share_of_a_sample_is_that_of_all_weights(model, settings):
    """Within six standard errors. Some weights move and some do not."""
    trainer = trainer_of(model and model(nnx.Rngs(0)), **settings)
    share, truth, entries, weights = counted(trainer)
    assert share is not None and 0.05 < truth < 0.95
    assert ENTRIES <= entries < 0.6 * weights
    assert abs(share - truth) < 6 * 0.5 / entries**0.5


@pytest.mark.parametrize("settings", [{"recipe": name} for name in ("fp8", "te", "bf16")])
def test_nothing_is_counted_where_nothing_is_lost(settings):
    assert trainer_of(**settings).sample is None


def test_nothing_is_counted_on_the_host():
    assert trainer_of(recipe="O3", offload=True).sample is None


@pytest.mark.parametrize("stage", [1, 3])
def test_axes_that_are_split_over_devices_stay_whole(stage):
    trainer = trainer_of(recipe="O2", devices=2, zero=stage)
    like = trainer.like
    for weight, moment in _stored_weights(like.variables["params"], like.opt_state):
        part = moment.data.sharding.shard_shape(moment.shape)
        [split] = [axis for axis in range(2) if part[axis] != moment.shape[axis]]
        assert _strides(weight, moment)[split] == 1
    assert _strides(weight, moment)[1 - split] > 1


def test_only_updated_weights_count():
    before = Sample(np.float32([1, 2, 3, 4]), np.full(4, True), np.float32([1, 1, 1, 5]))
    after = Sample(np.float32([1, 9, 3, 4]), np.array([True, True, False, True]), before.weights)
    assert unchanged_share(before, after) == pytest.approx(6 / 7)
    assert unchanged_share(before, after._replace(moves=np.full(4, False))) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A fine-tune at a rate that FP16 weights do not follow, next to one that loses nothing."""
    folder = str(tmp_path_factory.mktemp("runs") / "run")
    settings = {"learning_rate": 1e-7, "max_steps": 4, "logging_steps": 2, "output_dir": folder}
    o2, fp8 = (trainer_of(recipe=recipe, **settings) for recipe in ("O2", "fp8"))
    return fit(o2, rows(32), twin=fp8)


def test_a_run_tells_its_unchanged_weights(run):
    assert [step for step, _ in run.curves.unchanged] == [2, 4]
    assert all(share > 0.9 for _, share in run.curves.unchanged) and run.twin.curves.unchanged == []
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("unchanged_weights") for line in lines[::2]] == [x for _, x in run.curves.unchanged]
    assert all("unchanged_weights" not in line for line in lines[1::2])
    text = (run.folder / "report.html").read_text()
    assert re.search(r"a step left unchanged: mean, last</td><td>\d+%, \d+%</td><td>-</td>", text)
    assert "Take the recipe fp8, or a larger learning rate." in text
    result = json.loads((run.folder / "result.json").read_text())["models"]
    assert result["O2"]["unchanged_weights"] == [list(pair) for pair in run.curves.unchanged]


def test_the_display_tells_them(run, capsys):
    with Progress({"O2": run.curves, "fp8": run.twin.curves}, steps=4, amount=8, unit="rows") as progress:
        progress.show()
    ours, twins = capsys.readouterr().out.split(" | fp8: ")
    assert re.search(r"rows/s, \d+% of weights unchanged$", ours) and "unchanged" not in twins


def test_the_table_tells_them_and_what_to_do(capsys):
    outcome = Outcome(Curves([1.0], unchanged=[(1, 0.5), (2, 0.75)]), 8, 1, Bytes(2, 1, 3, 0), [], "", [])
    other = outcome._replace(curves=Curves([1.0]))
    label = "weights that a step left unchanged: mean, last"
    assert report.rows({"O2": outcome, "fp8": other})[-1] == [label, "62%, 75%", "-"]
    assert label not in [row[0] for row in report.rows({"fp8": other})]
    report.show({"O2": outcome})
    printed = " ".join(capsys.readouterr().out.split())
    assert "On average a step of O2 left 62% of the weights unchanged" in printed
    assert printed.endswith("Take the recipe fp8, or a larger learning rate.")
    few = outcome._replace(curves=Curves([1.0], unchanged=[(1, 0.25)]))
    assert report.advice({"O2": few, "fp8": other}) == []


def test_a_skipped_step_is_not_counted():
    curves = Curves()
    for step, skips in enumerate([0, 1, 1]):
        metrics = StepMetrics(1.0, np.int32(skips), ScaleMetrics(np.zeros(0), np.zeros(0)))
        curves.add([metrics], 0.1, unchanged=1.0 if skips else 0.1 * step)
    assert curves.unchanged == [(1, 0.0), (3, 1.0)]
    assert Curves.from_json(json.loads(json.dumps(curves.to_json()))) == curves
