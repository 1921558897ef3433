"""Scales, bytes, curves, and the files of metrics."""

import json
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from flax import nnx

import fp8jax
from fp8jax import Recipe, ScaledArray
from fp8jax.quantization import UNSET
from fp8jax.train import metrics
from fp8jax.train.metrics import Curves, MetricsWriter, ScaledTensor, ScaleMetrics, StepMetrics


def scaling_state(scale, newest):
    history = np.zeros((*np.shape(scale), 4), np.float32)
    history[..., 0] = newest
    return {"scale": jnp.asarray(scale, jnp.float32), "amax_history": jnp.asarray(history)}


def variables(scale, newest):
    """Two layers: one alone, one scanned twice."""
    stacked = scaling_state([scale, scale], [newest, newest])
    return {
        "params": {},
        "_overwrite_with_gradient": {
            "h": {"fc": {"kernel": stacked}},
            "head": {"kernel": scaling_state(scale, newest)},
        },
    }


def test_saturation():
    """The new amax is compared with the scale that the step used."""
    before = variables([1.0, 2.0, 0.5], [9.0, 9.0, 9.0])
    after = variables([8.0, 16.0, 32.0], [448.0, 448.0, 4 * 57344.0])
    expected = {"HYBRID": [1.0, 0.5, 8.0], "E4M3": [1.0, 0.5, 8.0 * 57344 / 448]}
    for fp8_format, ratios in expected.items():
        recipe = Recipe.parse(f"te,fp8_format={fp8_format}")
        seen = jax.jit(metrics.scale_metrics, static_argnums=2)(before, after, recipe)
        np.testing.assert_allclose(seen.saturation, np.tile(ratios, 3), rtol=1e-6)
        np.testing.assert_array_equal(seen.scale, np.tile([8.0, 16.0, 32.0], 3))
    first = metrics.scale_metrics(variables([UNSET] * 3, [0.0] * 3), after, Recipe.TE)
    np.testing.assert_array_equal(first.saturation, np.ones(9))
    names = metrics.scaled_tensors(before)
    assert names[0] == ScaledTensor("h/fc", "0", "input") and names[5] == ScaledTensor(
        "h/fc", "1", "output gradient"
    )
    assert names[6:] == [ScaledTensor("head", "", operand) for operand in metrics.OPERANDS]


@pytest.mark.parametrize("recipe", ["te", "O3"])
def test_clipped_tensors_of_an_evaluation(recipe):
    """Inputs 10,000 times larger give a fraction of the output, and an evaluation changes no scale."""
    x, module = jax.random.normal(jax.random.key(0), (32, 32)), nn.Dense(64)
    model = fp8jax.transform(module, recipe)
    variables = model.init(jax.random.key(1), x)
    assert metrics.clipped(model, variables, x) == {}
    large = 1e4 * x
    want = module.apply(model.dequantize(variables), large)
    assert jnp.linalg.norm(model.apply(variables, large)) < 0.4 * jnp.linalg.norm(want)
    [(tensor, ratio)] = metrics.clipped(model, variables, large).items()
    assert tensor == ScaledTensor("kernel", "", "input")
    assert ratio == pytest.approx(jnp.abs(large).max() / 3584)


@pytest.mark.filterwarnings("error")
def test_weights_are_no_constants_of_an_evaluation():
    x, model = jnp.ones((32, 32)), fp8jax.transform(nn.Dense(64), "te")
    variables = model.init(jax.random.key(1), x)
    usual = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 1024)
    try:
        assert metrics.clipped(model, variables, x) == {}
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", usual)


def test_a_scale_of_the_tensors_own_amax_clips_nothing():
    """A frozen kernel has the amax that its scale was computed from, and amax / (amax / 448 * 448) rounds."""
    amax = np.random.default_rng(0).uniform(1, 2, 1000).astype(np.float32)
    ratios = amax / (amax / np.float32(448) * np.float32(448))
    kernel = ScaledTensor("fc", "", "weight")
    assert ratios.max() > 1 and metrics.only_clipped([kernel] * 1000, ratios) == {}
    assert metrics.only_clipped([kernel], [1.001]) == {kernel: 1.001}


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.fc = nnx.Linear(32, 64, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, factor=1.0):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.fc(self.dropout(self.norm(x)) * factor)


@pytest.mark.parametrize("recipe", ["te", "O3"])
def test_clipped_tensors_of_an_nnx_module(recipe):
    """The arguments are those of the module. Its variables stay as they are."""
    x = jax.random.normal(jax.random.key(0), (32, 32))
    model = fp8jax.transform(Normed(nnx.Rngs(0)), recipe)
    before = jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngState))))
    assert metrics.clipped(model, x) == {}
    [(tensor, ratio)] = metrics.clipped(model, x, factor=1e4).items()
    assert tensor == ScaledTensor("fc", "", "input") and 2 < ratio < 20
    after = jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngState))))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert model.calls.get_value() == 0 and jnp.isfinite(model(x)).all()
    current = fp8jax.transform(Normed(nnx.Rngs(0)), "te,scaling=current")
    assert metrics.clipped(current, 1e9 * x) == {}


def test_clipped_needs_a_transformed_model():
    with pytest.raises(TypeError, match="`model`: expected .*fp8jax.transform"):
        metrics.clipped(Normed(nnx.Rngs(0)), jnp.ones((32, 32)))


def test_nothing_is_clipped_without_delayed_scales():
    x = jnp.ones((32, 32))
    model = fp8jax.transform(nn.Dense(64), "te,scaling=current")
    assert metrics.clipped(model, model.init(jax.random.key(0), x), 1e9 * x) == {}


def test_nothing_is_watched_without_delayed_scales():
    plain = {"params": {"kernel": jnp.ones(3)}}
    seen = metrics.scale_metrics(plain, plain, Recipe.BF16)
    assert seen.scale.shape == seen.saturation.shape == (0,) and metrics.scaled_tensors(plain) == []


def test_bytes_count_every_leaf():
    kernel = ScaledArray(jnp.zeros((10, 10), jnp.float16), jnp.ones((1, 1)))
    params = {"kernel": kernel, "bias": jnp.zeros((10,), jnp.float32)}
    grads = {
        "kernel": ScaledArray(jnp.zeros((10, 10), jnp.float8_e4m3fn), jnp.ones(())),
        "bias": jnp.zeros(10),
    }
    state = {"kernel": scaling_state(np.ones(3), np.ones(3))}
    whole = {"params": params, "_overwrite_with_gradient": state}
    assert metrics.parameters(whole) == 110
    count = metrics.bytes_per_parameter(whole, grads, {"mu": jnp.zeros((5,), jnp.int8)})
    np.testing.assert_allclose(
        count, np.array([200 + 4 + 40, 100 + 4 + 40, 5, 3 * 4 + 3 * 4 * 4]) / 110, rtol=1e-12
    )


@pytest.mark.parametrize("tensors", [0, 3])
def test_curves_survive_a_file(tensors):
    """JSON keeps every bit."""
    curves = runs.make_curves(tensors=tensors)
    curves.loss[3] = float("nan")
    again = Curves.from_json(json.loads(json.dumps(curves.to_json())))
    assert np.isnan(again.loss[3])
    curves.loss[3] = again.loss[3] = 0.0
    assert again == curves and len(again.scales) == 3 and len(again.scales[0]) == tensors
    assert Curves.from_json(Curves().to_json()) == Curves()


def test_skipped_steps_across_checkpoints():
    def span(*skips):
        return [StepMetrics(2.5, np.int32(count), ScaleMetrics(np.zeros(3), np.zeros(3))) for count in skips]

    curves = Curves()
    curves.add(span(1, 1, 2), 0.1)
    curves = Curves.from_json(curves.to_json())
    # Two optimizers in one may both count a step; it is one.
    curves.add(span(2, 4, 4), 0.1)
    assert curves.skipped == [1, 3, 5] and curves.skips == 4 and curves.loss == [2.5] * 6


def test_metrics_of_a_span_of_steps():
    """The last scale, and the largest saturation."""
    curves = runs.make_curves()
    assert curves.scale_steps[0] == 10 and curves.scales[0] == [9.5] * 3
    assert curves.saturations[0] == [float(np.float32(0.1 * 9))] * 3


def test_rows_of_scales_are_merged(monkeypatch):
    """A long run keeps the last scale and the largest saturation of its older spans; the newest is alone."""
    curves = runs.make_curves(steps=20_000, tensors=2)
    assert metrics.MOST_ROWS == 1000 and 500 < len(curves.scales) == len(curves.saturations) <= 1000
    monkeypatch.setattr(metrics, "MOST_ROWS", 4)
    older = Curves.from_json({**Curves().to_json(), "scale_steps": [1, 2, 3, 4, 5], "loss": [1.0] * 5})
    older.scales, older.saturations = [[float(i)] for i in range(5)], [[0.5], [0.1], [3.0], [7.0], [2.0]]
    older.add([StepMetrics(1.0, 0, ScaleMetrics(np.ones(1), np.ones(1)))], 0.1)
    assert older.scale_steps == [2, 4, 5, 6] and older.scales == [[1.0], [3.0], [4.0], [1.0]]
    assert older.saturations == [[0.5], [7.0], [2.0], [1.0]] and older.line(1, 1, "rows")["loss"] == 1.0


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_of_metrics_are_not_repeated(tmp_path):
    """A resumed run removes the lines of the steps that it does again, and one that a kill cut off."""
    writer = MetricsWriter(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, "O2", {"loss": 1 / step, "skipped_steps": 0})
    writer.write(40, "O2", {"loss": float("nan")})
    writer.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [10, 20, 30, 40]
    assert lines_of(tmp_path)[1] == {"step": 20, "model": "O2", "loss": 0.05, "skipped_steps": 0}
    assert lines_of(tmp_path)[3]["loss"] is None
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5')
    writer = MetricsWriter(tmp_path, 20)
    writer.write(30, "O2", {"loss": 2.0})
    writer.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [10, 20, 30]
    assert lines_of(tmp_path)[2]["loss"] == 2.0


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 10, "model": "\xff"}',
        b'{"step": "10"}',
        b'{"step": true}',
        b'{"step": NaN}',
        b'{"step": null}',
        b"[10]",
        b"[" * 10**5,
        b"\0\0\0",
    ],
)
def test_lines_that_are_damaged_are_left_out_with_a_warning(tmp_path, line, capsys):
    file, whole = tmp_path / "metrics.jsonl", b'{"step": 10, "loss": 0.5}'
    file.write_bytes(b"\n".join([whole, line, whole, b'{"st']))
    MetricsWriter(tmp_path, 20).close()
    assert file.read_bytes() == whole + b"\n" + whole + b"\n"
    # The last line is what a kill cuts off.
    [told] = capsys.readouterr().err.splitlines()
    assert told == f"warning: {file}: 1 damaged lines are left out, the first is line 2"


@pytest.mark.parametrize("make", [pathlib.Path.mkdir, os.mkfifo])
def test_a_file_of_metrics_that_is_none_is_named(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="metrics.jsonl is no file; move it away and resume"):
        MetricsWriter(tmp_path, 0)


WITHOUT_ROOM = """
import pathlib, resource, sys
from fp8jax.train.metrics import MetricsWriter

folder = pathlib.Path(sys.argv[1])
writer = MetricsWriter(folder, 0)
writer.write(10, "O2", {"loss": 2.0})
limit = (folder / "metrics.jsonl").stat().st_size + 20
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writer.write(20, "O2", {"loss": 2.0})
"""


def test_a_full_disk_names_the_file_of_metrics(tmp_path):
    """The part of a line that was written is left out when the run is resumed."""
    command, file = [sys.executable, "-c", WITHOUT_ROOM, str(tmp_path)], tmp_path / "metrics.jsonl"
    told = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    todo = "free space or give write permission, then resume the run"
    assert told[-1] == f"OSError: {file} cannot be written (File too large); {todo}"
    assert len(file.read_bytes().splitlines()) == 2
    MetricsWriter(tmp_path, 20).close()
    assert [line["step"] for line in lines_of(tmp_path)] == [10]


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    class Board:
        def __init__(self, folder, purge_step):
            self.folder, self.purge_step, self.scalars, self.is_closed = folder, purge_step, [], False
            boards.append(self)

        def add_scalar(self, name, value, step):
            self.scalars.append((name, value, step))

        def close(self):
            self.is_closed = True

    boards = []
    monkeypatch.setattr(metrics, "_summary_writer", lambda folder, step: Board(folder, step))
    writer = MetricsWriter(tmp_path, 20)
    writer.write(30, "O2", {"loss": 2.0})
    writer.write(40, "O2", {"loss": 1.0})
    writer.close()
    [board] = boards
    assert (board.folder, board.purge_step, board.is_closed) == (tmp_path / "tensorboard/O2", 21, True)
    assert board.scalars == [("loss", 2.0, 30), ("loss", 1.0, 40)]
    monkeypatch.undo()
    for package in ("tensorboardX", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert metrics._summary_writer(tmp_path, 1) is None
