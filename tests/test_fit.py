"""A whole run of a trainer: stopped anywhere and resumed it is the run that was left alone."""

import copy
import dataclasses
import html.parser
import json
import math
import pathlib
import shlex
import shutil
import signal
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from flax import nnx

import fp8jax
from fp8jax import signals
from fp8jax.inspect import numerics
from fp8jax.inspect.numerics.rows import files_of_run
from fp8jax.train import Diverged, TrainConfig, Trainer, checkpoint, fit
from fp8jax.train.config import option
from fp8jax.train.data.loader import Examples
from fp8jax.train.report import figures
from fp8jax.train.run import checks, not_finite
from fp8jax.train.run.run import Run, validator
from fp8jax.train.run_folder import RunMetadata

FEATURES, WIDTH, STEPS = 32, 64, 12


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))
        return nn.Dense(FEATURES)(nn.Dropout(0.2, deterministic=not train)(x))


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(WIDTH, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(self.norm(self.up(x))))


def loss(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def loss_of_linen(model, batch):
    return loss(lambda x: model(x, train=False), batch)


def loss_of_nnx(model, batch):
    model.eval()
    return loss(model, batch)


def rows(count, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, FEATURES)).astype(np.float32)
    return [{"x": one, "y": np.roll(one, 1)} for one in x]


ROWS = rows(22)  # five batches an epoch, and two rows left over
ABOUT = {"data": "22 rows of a list", "who": {"asked": "nobody"}}
HELD_OUT = {"validation": rows(8, seed=1)}
SETTINGS = {"recipe": "te", "per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": STEPS}
SETTINGS["statistics"] = False  # a program more to compile
INTERVALS = {"logging_steps": 2, "eval_steps": 4, "save_steps": 5}


def at(trainer, folder, **settings):
    """The same trainer, compiled or not, for a run in another folder."""
    other = copy.copy(trainer)
    other.config = dataclasses.replace(trainer.config, output_dir=str(folder), **settings)
    return other


def bits(tree):
    """Every leaf's bytes; of a random key its data's."""
    leaves = jax.tree.leaves(tree)
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    arrays = [
        jax.random.key_data(leaf) if is_key else leaf for leaf, is_key in zip(leaves, keys, strict=True)
    ]
    return [np.asarray(array).tobytes() for array in arrays]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """What is drawn is tested elsewhere, and drawing takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("losses", "scales", "saturations"):
            patch.setattr(figures, name, lambda *args: b"PNG")
        yield


@pytest.fixture(scope="module", params=["nnx", pytest.param("linen", marks=pytest.mark.long)])
def alone(request, tmp_path_factory):
    """A trainer, what `fit` needs besides its rows, and a run of it that was left alone."""
    model, validation_loss = {
        "linen": (Linen(), loss_of_linen),
        "nnx": (OfNNX(nnx.Rngs(0)), loss_of_nnx),
    }[request.param]
    example = jax.tree.map(lambda x: x[None], ROWS[0])
    trainer = Trainer(model, loss, TrainConfig(**SETTINGS, **INTERVALS), example)
    trainer = at(trainer, tmp_path_factory.mktemp("alone") / "run")
    options = {**HELD_OUT, "validation_loss": validation_loss}
    return trainer, options, fit(trainer, ROWS, **options, about=ABOUT)


# What `fit` does with any trainer.
of_nnx = pytest.mark.parametrize("alone", ["nnx"], indirect=True)


def stopped_after(monkeypatch, spans):
    """Has the next runs asked to stop, by a SIGTERM, after so many spans of steps."""
    numbers = [0] * spans

    def asked(self):
        return numbers.pop() if numbers else signal.SIGTERM

    monkeypatch.setattr(signals.StopRequests, "asked", asked)


def assert_lines(run):
    """Metrics are written once for each span of steps."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == run.curves.scale_steps == [2, 4, 5, 6, 8, 10, 12]
    assert lines[0]["loss"] == pytest.approx(np.mean(run.curves.loss[:2]))
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8, 12]


def test_a_run_leaves_what_it_did(alone):
    trainer, _, run = alone
    assert run.steps == STEPS == len(run.curves.loss) == int(run.state.step)
    assert run.curves.loss[-1] < run.curves.loss[0]
    assert [step for step, _ in run.curves.validation] == [4, 8, 12]
    assert_lines(run)
    assert run.curves.validation[-1][1] < run.curves.validation[0][1]
    names = {path.name for path in run.folder.iterdir()}
    assert names == {
        "checkpoints",
        "settings.json",
        "saved.json",
        "metrics.jsonl",
        "report.html",
        "result.json",
    } | {f"{name}.png" for name in ("losses", "scales", "saturation")}
    steps = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert steps == ["step_00000005", "step_00000010", "step_00000012"]
    [model] = json.loads((run.folder / "result.json").read_text())["models"].values()
    assert model["training_losses"] == run.curves.loss and model["rows_per_second"] > 0
    # In two batches of four.
    evaluate = trainer.evaluator(alone[1]["validation_loss"])
    batch = jax.tree.map(lambda *rows: np.stack(rows), *HELD_OUT["validation"])
    assert run.curves.validation[-1][1] == pytest.approx(float(evaluate(run.state, batch)), rel=1e-6)


def test_stopped_killed_and_resumed_it_is_the_run_left_alone(alone, tmp_path, monkeypatch, capsys):
    trainer, options, expected = alone
    trainer = at(trainer, tmp_path / "run")
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        run = fit(trainer, ROWS, **options)
    assert (run.steps, run.exit_status) == (4, 143) and not (run.folder / "report.html").exists()
    assert "stopped and saved after step 4" in capsys.readouterr().out

    def dies(state, batch, step=trainer.step):
        if int(state.step) == 7:
            raise KeyboardInterrupt
        return step(state, batch)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, ROWS, resume=True, **options)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir())[-1] == "step_00000005"
    run = fit(trainer, ROWS, resume=True, **options)
    assert run.curves.loss == expected.curves.loss
    assert run.curves.validation == expected.curves.validation
    assert_lines(run)
    assert bits(run.state) == bits(expected.state)
    again = fit(trainer, ROWS, resume=True, **options)
    assert (again.steps, again.curves.loss, again.exit_status) == (STEPS, expected.curves.loss, 0)


@of_nnx
def test_no_duplicate_checkpoint(alone, tmp_path, monkeypatch):
    """A step that has a checkpoint is not saved again."""
    trainer, options, _ = alone
    trainer, saved = at(trainer, tmp_path / "run"), []

    def save(folder, step, *args, save=checkpoint.save, **more):
        saved.append(step)
        return save(folder, step, *args, **more)

    monkeypatch.setattr(checkpoint, "save", save)
    # Step 5 ends the third span, and is saved whether or not anybody asks to stop.
    for spans, steps in ((0, 0), (3, 5), (0, 5)):
        stopped_after(monkeypatch, spans)
        assert fit(trainer, ROWS, resume=True, or_start=True, **options).steps == steps
    assert saved == [0, 5]


def test_an_evaluation_changes_nothing(alone):
    trainer, options, run = alone
    before = bits(run.state)
    batch = jax.tree.map(lambda *rows: np.stack(rows), *ROWS[:3])
    evaluate = trainer.evaluator(options["validation_loss"])
    assert float(evaluate(run.state, batch)) == float(evaluate(run.state, batch))
    assert bits(run.state) == before


def test_a_validation_is_of_all_rows(alone):
    """The loss does not depend on the size of a batch, which need not divide the rows."""
    trainer, options, run = alone
    other = copy.copy(trainer)
    other.per_device = 6
    held_out = rows(6, seed=1), rows(9, seed=1)
    validate = [validator(each, held_out, options["validation_loss"]) for each in (trainer, other)]
    of_4, of_6 = (each(run.state, is_last=True) for each in validate)
    assert of_4 == pytest.approx(of_6, rel=1e-6)
    batch = jax.tree.map(lambda *rows: np.stack(rows), *held_out[1])
    mean = float(trainer.evaluator(options["validation_loss"])(run.state, batch))
    assert mean == pytest.approx(of_4, rel=1e-6)
    assert validate[1](run.state) != pytest.approx(of_6, rel=1e-3)  # other rows


@pytest.mark.parametrize("zero", [0, 3])
def test_a_validation_on_two_devices_is_of_the_rows_that_they_share(zero):
    """Of nine rows four, and four, and none alone; of seven four and two."""
    config = TrainConfig(recipe="fp32", per_device_train_batch_size=2, devices=2, zero=zero)
    of_mean = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    trainer = Trainer(nn.Dense(FEATURES), of_mean, config, jax.tree.map(lambda x: x[None], rows(1)[0]))
    state = trainer.init()
    for count, shared in ((9, 8), (7, 6)):
        held_out = rows(count, seed=1)
        found = validator(trainer, (held_out, None), of_mean)(state)
        kernel = np.asarray(state.variables["params"]["kernel"])
        x = np.stack([row["x"] for row in held_out[:shared]])
        assert found == pytest.approx(float(np.mean((x @ kernel) ** 2)), rel=1e-5)


def test_extra_lines_of_the_report(alone):
    """The report shows the lines that it is given, and refuses names that it has already."""
    trainer, _, run = alone
    result = json.loads((run.folder / "result.json").read_text())
    own = result.keys() - ABOUT.keys()
    assert {name: result[name] for name in ABOUT} == ABOUT and len(own) == 12
    for name in own:
        with pytest.raises(ValueError, match=f"the report itself says `{name}`"):
            fit(trainer, ROWS, about={name: 0})


def test_options_that_are_infinite(trainer, tmp_path):
    """JSON has no such numbers: the report has their names."""

    @dataclasses.dataclass(frozen=True)
    class Clipping:
        clip: float = option(math.inf, "the largest norm")

    run = at(trainer, tmp_path / "run", max_steps=2)
    found = [fit(run, ROWS, options=Clipping(), resume=resume) for resume in (False, True)][-1]
    told = json.loads((found.folder / "result.json").read_text(), parse_constant=pytest.fail)
    assert told["settings"] == {"clip": "Infinity", "rows": 4}


def test_memory_is_told_by_part(alone):
    trainer, _, run = alone
    [model] = json.loads((run.folder / "result.json").read_text())["models"].values()
    lines = {line.pop("part").split(":")[0].split(",")[0]: line for line in model["memory"]}
    taken = lines["arguments of a step"]
    assert taken["compiled"] == pytest.approx(taken["arrays"], abs=8)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.variables))
    assert lines["weights"]["arrays"] == size
    assert lines["moments"]["arrays"] > 2 * 4 * 2 * FEATURES * WIDTH
    total = lines["peak"]
    assert total["compiled"] == trainer.program.total == trainer.plan().total
    assert total["compiled"] == taken["compiled"] + lines["gradients"]["compiled"]


class Page(html.parser.HTMLParser):
    """The text of a page, and how many images are in it."""

    def __init__(self, content):
        super().__init__()
        self.text, self.images, self.open = "", 0, []
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images += dict(attributes)["src"].startswith("data:image/png;base64,")
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, content):
        self.text += content


def test_the_page_has_each_section(alone):
    page = Page((alone[2].folder / "report.html").read_text())
    assert page.images == 3 and page.open == []
    for expected in (
        "te: 12 steps on 22 rows of a list",
        "te: 2 of 2 layers in FP8",
        "rows/s",
        "Skipped steps: none.",
        "Memory of a step",
        "logging_steps",
        " UTC",
        "h from start to end",
        shlex.join(sys.orig_argv),
    ):
        assert expected in page.text, expected
    assert "<th>arrays</th><th>compiled</th>" in (alone[2].folder / "report.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"devices": 2, "zero": 2, "recipe": "O2"},
        {"offload": True, "recipe": "O2"},
        {"lora_rank": 4},
        {"recipe": "", "fp16": True, "gradient_accumulation_steps": 2},
        {"optim": "adafactor", "gradient_checkpointing": "none", "dataloader_num_workers": 1},
        {"optim": "adamw_8bit", "recipe": "O3"},
    ],
)
def test_a_run_of_any_kind_has_its_report(settings, tmp_path):
    settings = TrainConfig(**{**SETTINGS, **settings, "max_steps": 3, "output_dir": str(tmp_path / "run")})
    trainer = Trainer(Linen(), loss, settings, jax.tree.map(lambda x: x[None], ROWS[0]))
    run = fit(trainer, ROWS, **HELD_OUT, validation_loss=loss_of_linen)
    assert run.steps == 3 and np.all(np.isfinite(run.curves.loss))
    text = Page((run.folder / "report.html").read_text()).text
    assert "Memory of a step" in text
    [model] = json.loads((run.folder / "result.json").read_text())["models"].values()
    memory = {line["part"].split(":")[0]: line for line in model["memory"]}
    taken = memory["arguments of a step"]
    if not settings.offload:
        assert taken["compiled"] == pytest.approx(taken["arrays"], abs=64)


# --- refused ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer():
    example = jax.tree.map(lambda x: x[None], ROWS[0])
    return Trainer(Linen(), loss, TrainConfig(**SETTINGS), example)


WITH_NAN = [{**row, "x": np.full_like(row["x"], np.nan)} for row in ROWS]


@pytest.mark.parametrize(
    "source, most, says",
    [
        (WITH_NAN, 100, r"the last 12 steps .*was step 1; batch\['x'\] of the data has such numbers"),
        (ROWS[:5] + WITH_NAN, 4, "the last 4 steps were all skipped, .*was step 2; "),
    ],
)
@of_nnx
def test_a_run_that_trains_nothing_ends_with_an_error(alone, tmp_path, source, most, says):
    trainer, options, _ = alone
    run = at(trainer, tmp_path / "run", max_skipped_steps=most, save_steps=100)
    with pytest.raises(Diverged, match=says) as caught:
        fit(run, source, shuffle=False, **options)
    assert "; run the recipe bf16 to see whether FP8 matters; " in str(caught.value)
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] is None and last["skipped_steps"] >= 4
    assert html.escape(str(caught.value)) in (tmp_path / "run/report.html").read_text()
    assert json.loads((tmp_path / "run/result.json").read_text())["diverged"] == str(caught.value)


def test_a_run_with_a_twin_that_trains_nothing_has_its_report(trainer, tmp_path):
    """The twin does the steps after which the run ends, too: a report compares curves of equal length."""
    run = at(trainer, tmp_path / "run", max_skipped_steps=2, save_steps=100)
    with pytest.raises(Diverged, match="the last 2 steps were all skipped"):
        fit(run, WITH_NAN, twin=of_twin(recipe="bf16"))
    models = json.loads((tmp_path / "run/result.json").read_text())["models"].values()
    assert len({len(model["training_losses"]) for model in models}) == 1 and len(models) == 2


def test_arrays_in_boxes_that_are_not_finite():
    """The codes of a moment, which have the axis names of the parameter."""
    kernel = nn.Partitioned(jnp.ones((4, 4)), (None, "model"))
    state = fp8jax.optim.adamw(1e-3, "fp8").init({"kernel": kernel})
    assert not_finite.bad_arrays(state) == []
    nan = lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float8_e5m2 else x  # noqa: E731
    assert len(not_finite.bad_arrays(jax.tree.map(nan, state))) == 1


@of_nnx
def test_a_state_that_is_not_finite_is_not_saved(alone, tmp_path, caplog):
    """One batch with a NaN leaves the statistics of a BatchNorm NaN for good, though the step is skipped."""
    trainer, options, _ = alone
    source = [*ROWS[:20], *ROWS[:4], *WITH_NAN[:4], *ROWS]  # the NaN is in step 7
    run = at(trainer, tmp_path / "run")
    says = (
        "after step 10 the state has .*, in .*; the loss is not finite since step 7; .*goes on after step 5"
    )
    with pytest.raises(Diverged, match=says):
        fit(run, source, shuffle=False, **options)
    assert "not finite since step 7" in (tmp_path / "run/report.html").read_text()
    found, skipped = checkpoint.restore(tmp_path / "run/checkpoints", [run.like])
    assert found.step == 5 and skipped == []
    assert checks.bad_arrays(run, found.state[0]) == []
    with jax.log_compiles():
        assert checks.bad_arrays(run, found.state[0]) == [] and "Compiling" not in caplog.text
    # Resumed, it is the run again from before that step.
    with pytest.raises(Diverged, match="goes on after step 5"):
        fit(run, source, shuffle=False, **options, resume=True)


class Overflows(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="up")(x)
        masked = jnp.where(x > 0, x, -jnp.inf)  # an infinity by intent
        x = nn.Dense(WIDTH, name="down")(jnp.maximum(masked, 0))
        return nn.Dense(FEATURES, name="head")(x)


@pytest.mark.parametrize("devices", [{}, {"devices": 2, "zero": 2, "per_device_train_batch_size": 2}])
def test_the_error_names_the_first_layer_that_went_bad(tmp_path, devices):
    """Products with a kernel near float32's largest number are infinite, and all gradients are NaN."""
    settings = {**SETTINGS, "recipe": "bf16", "max_skipped_steps": 3, "output_dir": str(tmp_path / "run")}
    settings |= devices
    example = jax.tree.map(lambda x: x[None], ROWS[0])
    trainer = Trainer(Overflows(), loss, TrainConfig(**settings), example)
    plain = jax.tree.map(jnp.zeros_like, trainer.init().variables)
    kernels = {name: np.ones(x["kernel"].shape, np.float32) for name, x in plain["params"].items()}
    kernels["down"] *= 1e38
    params = {name: {**plain["params"][name], "kernel": kernel} for name, kernel in kernels.items()}
    with pytest.raises(
        Diverged,
        match=r"step 1; .*; the first layer that computed one was down \(dot_general[^;]*; "
        "in your own loop, with the recipe bf16, JAX_DEBUG_NANS=true names the operation$",
    ):
        fit(trainer, ROWS, plain={"params": params}, **HELD_OUT, validation_loss=loss)


@of_nnx
def test_a_callback_gets_each_line_of_metrics(alone, tmp_path):
    trainer, options, _ = alone
    seen = []
    run = fit(at(trainer, tmp_path / "run"), ROWS, **options, callback=lambda *line: seen.append(line))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": step, "model": name, **values} for step, name, values in seen] == lines


def test_statistics_of_a_run(alone, tmp_path, capsys):
    """At the evaluations; a run that is resumed from step 10 measures step 12 again. E4M3 rounds most of the
    smallest inputs to zero, and the losses are those of a run that is not measured."""
    trainer, options, left_alone = alone
    wide = [{**row, "x": row["x"] * np.exp2(-np.arange(FEATURES, dtype=np.float32))} for row in ROWS]
    run = at(trainer, tmp_path / "run", statistics=True)
    found = fit(run, wide, **options)
    np.testing.assert_array_equal(
        found.curves.loss, fit(at(trainer, tmp_path / "other"), wide, **options).curves.loss
    )
    files = [found.folder / f"statistics/000000{step}.json" for step in ("04", "08", "12")]
    assert files_of_run(found.folder) == files
    series = numerics.load_run(found.folder)
    assert series == list(map(numerics.load, files)) and len({rows[0].amax for rows in series}) == 3
    shares = [{f"{row.name} {row.operand}": row.underflow for row in rows if row.is_own} for rows in series]
    assert found.curves.underflow == list(zip((4, 8, 12), shares, strict=True))
    assert all(0.2 < next(iter(share.values())) < 0.9 for share in shares)  # the first layer's input
    assert "Not measured" not in (found.folder / "report.html").read_text()
    lines = [json.loads(line) for line in (found.folder / "metrics.jsonl").read_text().splitlines()]
    largest = {line["step"]: line["largest_underflow"] for line in lines if "largest_underflow" in line}
    assert largest == {step: max(each.values()) for step, each in found.curves.underflow}
    assert runs.status_of(["advise", "--statistics", str(found.folder)]) == 0
    assert capsys.readouterr().out.endswith(f"{fp8jax.advise(series, target='h100')}\n")
    shutil.rmtree(found.folder / "checkpoints/step_00000012")
    shutil.copy(files[0], files[0].with_name("00000011.json"))  # of another eval_steps
    resumed = fit(run, wide, **options, resume=True)
    assert resumed.curves.underflow == found.curves.underflow
    assert files_of_run(found.folder) == files and numerics.load_run(found.folder) == series
    with pytest.raises(ValueError, match=r"expected a run of fp8jax.train with --statistics .* has no"):
        numerics.load_run(left_alone.folder)


@of_nnx
def test_a_run_does_not_end_for_its_statistics(alone, tmp_path, monkeypatch, capsys):
    trainer, options, left_alone = alone

    def fails(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nallocations")

    monkeypatch.setattr(Trainer, "statistics", fails)
    found = fit(at(trainer, tmp_path / "run", statistics=True), ROWS, **options)
    reason = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    said = f"warning: te: from here on no statistics of its operands: {reason}"
    assert capsys.readouterr().err.splitlines().count(said) == 1
    np.testing.assert_array_equal(found.curves.loss, left_alone.curves.loss)
    assert "Not measured" in (found.folder / "report.html").read_text()


@pytest.mark.parametrize(
    "batch, says",
    [
        (
            {"x": [[1.0] * 32] * 4, "y": [[0.0] * 32] * 4},
            r"`batch\['x'\]`: expected float32\[4,32\], .*; got a list, and 1 more",
        ),
        ({"x": "text", "y": np.zeros((4, 32))}, r"`batch\['x'\]`: .*; got a str\.$"),
        (np.zeros((4, 32)), r"""`batch`: expected arrays at \["\['x'\]", .*; got \['one array'\]\."""),
        (
            {str(name): np.zeros(3) for name in range(1000)},
            r"`batch`: expected arrays at .*; got \[.*\.\.\.\]",
        ),
    ],
)
def test_a_wrong_batch_is_told_by_the_first_array_that_differs(trainer, batch, says):
    with pytest.raises(ValueError, match=says) as caught:
        trainer.step(None, batch)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "result, got",
    [
        (lambda errors: (errors.mean(), {"most": 1.0}), r"\(.*float32\[\]'?, \{'most': '1.0'\}\)"),
        (lambda errors: errors.mean(axis=1), r"float32\[4\]"),
    ],
)
@of_nnx
def test_a_loss_is_a_scalar(alone, tmp_path, result, got):
    """Of a validation and of a training; the run's folder stays free."""
    trainer, options, _ = alone

    def errors(model, batch):
        return result(batch["y"] ** 2)

    of_run = {**options, "validation_loss": errors}
    says = "expected a scalar as its result, the mean over the rows of the batch; got"
    with pytest.raises(TypeError, match=f"`validation_loss`: {says} {got}. Return the mean alone"):
        fit(at(trainer, tmp_path / "run"), ROWS, **of_run)
    example = jax.tree.map(lambda x: x[None], ROWS[0])
    config = TrainConfig(**SETTINGS, output_dir=str(tmp_path / "run"))
    with pytest.raises(TypeError, match=f"`loss`: {says} {got}. Return the mean alone"):
        fit(Trainer(Linen(), errors, config, example), ROWS)
    assert not (tmp_path / "run").exists()


@of_nnx
@pytest.mark.parametrize("name", ["validation", "final_validation"])
def test_validation_rows_that_do_not_fit_are_found_before_the_first_step(alone, tmp_path, name):
    trainer, options, _ = alone
    other = [{**row, "x": row["x"][:-1]} for row in HELD_OUT["validation"]]
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions to have the same shape"):
        fit(at(trainer, tmp_path / "run"), ROWS, **{**options, name: other})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("source", [dict(enumerate(ROWS)), iter(ROWS)])
def test_a_source_without_numbers_is_refused(trainer, source):
    with pytest.raises(TypeError, match="`source`: expected examples by number, such as a list"):
        fit(trainer, source)
    with pytest.raises(TypeError, match="`validation`: expected examples by number, such as a list"):
        fit(trainer, ROWS, validation=source, validation_loss=loss)


def write_settings(folder, settings, data=None):
    """As if a run on ROWS had begun in the folder."""
    begun = RunMetadata(settings, data or Examples(ROWS, None).fingerprint())
    (folder / "settings.json").write_text(json.dumps({**begun._asdict(), "digest": begun.digest}))


WITHOUT_Y = [{"x": row["x"]} for row in ROWS]
ODD = [ROWS[0], {**ROWS[1], "x": ROWS[1]["x"][:9]}]
VALIDATED = {"validation_loss": loss}


@dataclasses.dataclass(frozen=True)
class Own:
    rows: int = option(64, "rows of the data")


@pytest.mark.parametrize(
    "source, options, says",
    [
        (ROWS[:3], {}, "`source` has 3 examples, fewer than one `batch` of 4"),
        ([], {}, "`source` is empty"),
        (WITHOUT_Y, {}, """`batch`: expected arrays at ["['x']", "['y']"]; got ["['x']"]."""),
        (
            [{"x": row["x"][:9], "y": row["y"]} for row in ROWS],
            {},
            "`batch['x']`: expected float32[4,32], 4 rows for each device; got float32[4,9].",
        ),
        (ROWS, HELD_OUT, "`validation` and `validation_loss` go together"),
        (ROWS, {"validation_loss": loss}, "`validation` and `validation_loss` go together"),
        (ROWS, {"final_validation": rows(9)}, "`final_validation` needs both"),
        (ROWS, {"validation": ODD, **VALIDATED}, "`validation`: expected shape (32,) at row 1['x'], as in"),
        (
            ROWS,
            {**HELD_OUT, "final_validation": ODD, **VALIDATED},
            "`final_validation`: expected shape (32,)",
        ),
        (ROWS, {"validation": [], "validation_loss": loss}, "`validation` has 0 rows, fewer than the 1"),
        (ROWS, {"output": "taken"}, "taken holds a run already: add --resume to go on with it"),
        (ROWS, {"output": "file"}, "file is a file; give a folder for the run"),
        (ROWS, {"output": "taken", "resume": True, "seed": 1}, "has --seed 0, not 1; leave --seed as it was"),
        (ROWS, {"resume": True}, "--resume found no run in "),
        (ROWS, {"or_start": True}, "--or-start is an option of --resume; add that"),
        (rows(22, seed=3), {"output": "taken", "resume": True}, "began with other data; give that"),
        (ROWS[:21], {"output": "taken", "resume": True}, "began with other data; give that"),
        (
            [ROWS[0], *rows(20, seed=3), ROWS[-1]],
            {"output": "taken", "resume": True},
            "began with other data; give that",
        ),
        (
            ROWS,
            {"about": {"at": pathlib.Path("x")}},
            "`about`: expected names with values that JSON can hold",
        ),
        (ROWS, {"about": {"rate": float("nan")}}, "`about`: expected names with values that JSON can hold"),
        (
            ROWS,
            {"options": Own()},
            "`options`: expected no field `rows`, which a run itself saves; give it another name",
        ),
        (ROWS, {"about": {3: "three"}}, "`about`: expected names with values that JSON can hold; got 3"),
        (
            ROWS,
            {"about": {"settings": {}}},
            "`about`: the report itself says `settings`; give it another name",
        ),
        (ROWS, {"about": {"models": 1, "gap": 2}}, "`about`: the report itself says `gap`, `models`; give"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(trainer, tmp_path, source, options, says):
    (tmp_path / "taken").mkdir()
    write_settings(tmp_path / "taken", {"seed": 0})
    (tmp_path / "file").touch()
    options = dict(options)
    settings = {name: options.pop(name) for name in ("seed",) if name in options}
    trainer = at(trainer, tmp_path / options.pop("output", "new"), **settings)
    with pytest.raises(ValueError) as caught:
        fit(trainer, source, **options)
    assert says in str(caught.value)
    assert {path.name for path in tmp_path.rglob("*")} == {"taken", "settings.json", "file"}


@pytest.mark.parametrize(
    "options, says",
    [
        ({"validation": rows(8, seed=2)}, "began with other `validation` rows; give that"),
        ({}, "began with other `validation` rows"),
        ({**HELD_OUT, "final_validation": rows(9)}, "began with other `final_validation` rows"),
        (HELD_OUT, None),
    ],
)
def test_a_run_goes_on_with_its_validation_rows_only(trainer, tmp_path, monkeypatch, options, says):
    """Older runs have no fingerprint of these rows, and go on with any."""
    began = checks.fingerprint([Examples(ROWS, None), Examples(HELD_OUT["validation"], None), None])
    monkeypatch.setattr("fp8jax.train.run_folder.taken", lambda *args: pytest.fail("it was not refused"))
    options = {**options, "validation_loss": loss} if options else options
    for number, data in enumerate((began, None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_settings(folder, {"seed": 0}, data)
        is_refused = says and data
        with pytest.raises(ValueError if is_refused else pytest.fail.Exception) as caught:
            fit(at(trainer, folder), ROWS, resume=True, **options)
        assert (says if is_refused else "it was not refused") in str(caught.value)


@pytest.mark.parametrize(
    "began, settings, says",
    [
        (8, {}, "devices (1) x --gradient-accumulation-steps (1) x --per-device-train-batch-size must be 8"),
        (
            12,
            {"devices": 3, "gradient_accumulation_steps": 2},
            "devices (3) x --gradient-accumulation-steps (2)",
        ),
    ],
)
def test_a_run_goes_on_with_its_batches_only(tmp_path, began, settings, says):
    settings = TrainConfig(**SETTINGS | settings, output_dir=str(tmp_path))
    trainer = Trainer(Linen(), loss, settings, jax.tree.map(lambda x: x[None], ROWS[0]))
    write_settings(tmp_path, {"rows": began})
    with pytest.raises(ValueError) as caught:
        fit(trainer, ROWS, resume=True)
    assert f"has batches of {began} rows; got {trainer.rows}: " in str(caught.value) and says in str(
        caught.value
    )


@pytest.mark.parametrize(
    "settings, got",
    [
        ({"per_device_train_batch_size": 8}, "8 rows over 1"),
        ({"devices": 2, "per_device_train_batch_size": 2}, "4 rows over 2"),
    ],
)
def test_a_twin_has_the_same_batches(trainer, tmp_path, settings, got):
    with pytest.raises(ValueError) as caught:
        fit(at(trainer, tmp_path / "run"), ROWS, twin=of_twin(recipe="bf16", **settings))
    says = "`twin`: expected batches of 4 rows over 1 devices, as the trainer's; got "
    assert str(caught.value) == says + got
    assert not (tmp_path / "run").exists()


class Killed(BaseException):
    """Leaves the folder of a run as a kill does."""


def of_twin(**settings):
    return Trainer(
        Linen(), loss, TrainConfig(**SETTINGS | settings), jax.tree.map(lambda x: x[None], ROWS[0])
    )


def test_a_run_goes_on_with_its_twin_only(trainer, tmp_path, monkeypatch):
    """A twin's options are the run's. Older runs have none of them, and go on with any."""

    def killed(*args):
        raise Killed

    monkeypatch.setattr(Run, "begin", killed)
    run = at(trainer, tmp_path)
    with pytest.raises(Killed):
        fit(run, ROWS, twin=of_twin(recipe="bf16", weight_decay=0.1))
    is_same = {"recipe": "", "bf16": True, "weight_decay": 0.1, "logging_steps": 3}
    with pytest.raises(Killed):
        fit(run, ROWS, twin=of_twin(**is_same), resume=True)
    began = r"has a twin with --recipe bf16 --weight-decay 0\.1"
    other = of_twin(recipe="fp32", learning_rate=1.0)
    with pytest.raises(ValueError, match=f"{began}; got --recipe fp32 --learning-rate 1.0; leave `twin` as"):
        fit(run, ROWS, twin=other, resume=True)
    with pytest.raises(ValueError, match=f"{began}; got none; leave `twin` as it was"):
        fit(run, ROWS, resume=True)
    settings = json.loads((tmp_path / "settings.json").read_text())["settings"]
    write_settings(tmp_path, {name: settings[name] for name in settings if name != "of_twin"})
    with pytest.raises(Killed):
        fit(run, ROWS, twin=other, resume=True)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(FEATURES)(nn.relu(nn.Dense(WIDTH)(x)))


@pytest.mark.long
@pytest.mark.parametrize(
    "settings, other",
    [
        ({}, {"per_device_train_batch_size": 8}),
        ({"recipe": "O2", "zero": 2}, {"gradient_accumulation_steps": 2, "zero": 0}),
    ],
)
def test_a_run_goes_on_with_another_number_of_devices(settings, other, tmp_path, monkeypatch):
    example = jax.tree.map(lambda x: x[None], ROWS[0])
    settings = {**SETTINGS, **INTERVALS, **settings}
    two, one = (
        Trainer(Plain(), loss, TrainConfig(**{**settings, **more}), example)
        for more in ({"devices": 2}, other)
    )
    expected = fit(at(two, tmp_path / "alone"), ROWS).curves.loss
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        assert fit(at(two, tmp_path / "run"), ROWS).steps == 4
    found = fit(at(one, tmp_path / "run"), ROWS, resume=True).curves.loss
    assert found[:4] == expected[:4]
    # The same rows, in sums and FP8 scales of other parts of a batch; other rows differ by more.
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert np.mean(np.abs(np.diff(expected)) > 0.02 * np.mean(expected)) > 0.5


def test_a_loss_that_calls_only_methods_has_no_report():
    example = jax.tree.map(lambda x: x[None], ROWS[0])
    of_method = lambda model, batch: jnp.mean(model.up(batch["x"]))  # noqa: E731
    trainer = Trainer(OfNNX(nnx.Rngs(0)), of_method, TrainConfig(**SETTINGS), example)
    with pytest.raises(ValueError, match="`loss`: expected it to call `model"):
        _ = trainer.layers
