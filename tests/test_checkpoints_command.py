"""`fp8jax export`: what `checkpoints.save` writes of the model, from the run's folder alone."""

import json
import os
import shutil
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from flax import nnx

import fp8jax.train
from fp8jax.checkpoints import GPT2, NameMap, Rename, save
from fp8jax.checkpoints.export import CONFIG
from fp8jax.train import TrainConfig, Trainer, fit, run_folder
from fp8jax.train.export import export

NAMES = """
from fp8jax.checkpoints import GPT2

BACK = ("^(?!lm_head/)", "transformer/")
SCANNED = GPT2.stacked("h").moved("^transformer/", "", back=BACK)
ALONE = GPT2.moved(r"h/(\\d+)/", r"h_\\1/", back=(r"h_(\\d+)/", r"h/\\1/"))
ALONE = ALONE.moved("^transformer/", "", back=BACK)
NUMBER = 3
"""
BACK = ("^(?!lm_head/)", "transformer/")
MAPPINGS = {
    "SCANNED": GPT2.stacked("h").moved("^transformer/", "", back=BACK),
    "ALONE": GPT2.moved(r"h/(\d+)/", r"h_\1/", back=(r"h_(\d+)/", r"h/\1/")).moved(
        "^transformer/", "", back=BACK
    ),
}
OF_GPT2 = {"model_type": "gpt2", "n_layer": 2}


@pytest.fixture(scope="module")
def program(load_program):
    return load_program(runs.PROGRAM)


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory):
    """The folder of a run of two steps."""
    made = {}

    def run(recipe, *options):
        if (recipe, options) not in made:
            folder = tmp_path_factory.mktemp("runs")
            text = ["--data", runs.short_text(folder)]
            arguments = [*runs.TINY, *text, "--recipe", recipe, "--steps", "2", *options, "--no-twin"]
            assert program.main([*arguments, "--out", str(folder / "run")]) == 0
            made[recipe, options] = folder / "run"
        return made[recipe, options]

    return run


def command(folder, *arguments):
    """The command as its user runs it, in a folder with a module of names and a config."""
    (folder / "names_of_gpt.py").write_text(NAMES)
    (folder / "config.json").write_text(json.dumps(OF_GPT2))
    code = "import sys, fp8jax_command; sys.exit(fp8jax_command.main())"
    return subprocess.run(
        [sys.executable, "-c", code, "export", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "recipe, options, names, format",
    [
        ("O3", (), "SCANNED", "fp8"),
        pytest.param("te", (), "SCANNED", "fp8:static", marks=pytest.mark.long),
        ("block", ("--no-scan", "--rules", "first=1:gemm=BF16"), "ALONE", "fp8:ue8m0"),
    ],
)
def test_export_of_a_run(program, trained, tmp_path, recipe, options, names, format):
    """The same bytes and report as those of the model."""
    run = trained(recipe, *options)
    argv = ["--mapping", f"names_of_gpt:{names}", "--config", "config.json", "--format", format]
    done = command(tmp_path, run, "out", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    trainer = program.prepare(["--out", str(run), "--resume"]).trainers[0]
    found = run_folder.restore(run, [trainer.like], "", False)
    report = save(
        tmp_path / "want",
        trainer.model,
        found.state[0].variables,
        trainer.put(runs.np.zeros((4, 17), "int32"))[:, :-1],
        mapping=MAPPINGS[names],
        config=OF_GPT2,
        format=format,
    )
    assert done.stdout == f"{report._replace(step=2)}\n" and done.stdout.startswith(f"{format}, of step 2\n")
    assert "unchanged" in done.stdout
    for name in (CONFIG, "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "want" / name).read_bytes()
    if options:
        assert "transformer.h.0.mlp.c_fc  " in done.stdout and done.stdout.count("high precision") == 5


class OwnLinear(nnx.Module):
    """A layer of a class that fp8jax does not know."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (128, 128)))

    def __call__(self, x):
        return x @ self.kernel[...]


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(48, 128, rngs=rngs)
        self.h = nnx.List([nnx.Linear(128, 128, rngs=rngs), OwnLinear(rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)  # random states, which are not exported

    def __call__(self, tokens):
        x = self.wte(tokens)
        for layer in self.h:
            x = x + nnx.gelu(layer(x))
        return self.dropout(x) @ self.wte.embedding.T


NAMES_OF_NNX = NameMap(
    (
        Rename(r"wte\.weight", "wte/embedding"),
        Rename(r"h\.(\d+)\.weight", r"h/\1/kernel", axes=(1, 0)),
        Rename(r"h\.(\d+)\.bias", r"h/\1/bias"),
    )
)


def run_of_nnx(folder, **settings):
    """A run of two steps of an NNX module, and the module that it ended with."""

    def loss(model, batch):
        logits = jax.nn.log_softmax(model(batch["tokens"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, batch["tokens"][..., None], axis=-1).mean()

    rows = [{"tokens": row} for row in np.random.default_rng(0).integers(0, 48, (16, 8)).astype(np.int32)]
    settings = TrainConfig(
        max_steps=2, per_device_train_batch_size=4, output_dir=str(folder / "run"), **settings
    )
    trainer = Trainer(OfNNX(nnx.Rngs(0)), loss, settings, jax.tree.map(lambda x: x[None], rows[0]))
    run = fit(trainer, rows)
    return run.folder, trainer.network._module(run.state.variables)


@pytest.mark.parametrize("recipe, format", [("O3", "fp8"), ("te", "fp8:static"), ("block", "fp8")])
def test_export_of_an_nnx_run(tmp_path, recipe, format):
    """The same bytes and report as those of the module."""
    run, module = run_of_nnx(tmp_path, recipe=recipe)
    options = {"mapping": NAMES_OF_NNX, "config": OF_GPT2, "format": format}
    report = export(run, tmp_path / "out", **options)
    want = save(tmp_path / "want", module, **options)
    assert (
        report == want._replace(step=2)
        and sum(row.is_unchanged for row in report.rows if row.is_quantized) == 2
    )
    for name in (CONFIG, "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "want" / name).read_bytes()


@pytest.mark.parametrize("recipe", ["te", "fp8"])
def test_export_of_a_run_with_names_of_axes(tmp_path, recipe):
    """A kernel in a box of Flax has the path of one without."""
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    settings = TrainConfig(
        max_steps=1, per_device_train_batch_size=4, output_dir=str(tmp_path / "run"), recipe=recipe
    )
    loss_fn = lambda apply, batch: jnp.mean(apply(batch["x"]) ** 2)  # noqa: E731
    rows = [{"x": np.full(32, i, np.float32)} for i in range(4)]
    example = jax.tree.map(lambda x: x[None], rows[0])
    trainer = Trainer(nn.Dense(64, kernel_init=boxed), loss_fn, settings, example)
    run = fit(trainer, rows)
    options = {"mapping": NameMap((Rename("weight", "kernel", (1, 0)), Rename("bias", "bias"))), "config": {}}
    export(run.folder, tmp_path / "out", **options)
    save(tmp_path / "want", trainer.model, run.state.variables, example["x"], **options)
    model = "model.safetensors"
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "want" / model).read_bytes()


def test_export_of_adapters_is_refused(tmp_path):
    run, _ = run_of_nnx(tmp_path, recipe="te", lora_rank=2)
    with pytest.raises(ValueError, match="expected one of a model without adapters"):
        export(run, tmp_path / "out", mapping=NAMES_OF_NNX, config=OF_GPT2)
    assert not (tmp_path / "out").exists()


def cut_kernels(run):
    [path] = run.glob("checkpoints/step_*")
    content = json.loads((path / "run/metadata").read_text())
    del content["kernels"]
    (path / "run/metadata").write_text(json.dumps(content))
    for file in path.glob("sha256.*"):
        file.unlink()
    fp8jax.train.checkpoint._write_checksums(path)


def damage(run):
    [path] = run.glob("checkpoints/step_*")
    (path / "state/manifest.ocdbt").write_bytes(b"")


def empty(run):
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize(
    "change, arguments, says",
    [
        (
            None,
            {"--mapping": "gpt3"},
            "`mapping`: expected gpt2, llama, mixtral, qwen3, or package.module:name",
        ),
        (None, {"--mapping": "names_of_gpt:NUMBER"}, "got 'names_of_gpt:NUMBER', which is 3"),
        (
            None,
            {"--mapping": "names_of_gpt:NOTHING"},
            "which is AttributeError: module 'names_of_gpt' has no",
        ),
        (None, {"--mapping": "llama"}, "`mapping`: expected a rename that leads to "),
        (None, {"--format": "fp5"}, "`format`: expected one of bf16, fp32, fp8, "),
        (None, {"--config": "names_of_gpt.py"}, "--config: expected a JSON object in names_of_gpt.py; got "),
        (None, {"--config": "nothing.json"}, "No such file or directory: 'nothing.json'"),
        (cut_kernels, {}, "by this version of fp8jax; got "),
        (damage, {}, "the checkpoints are damaged: "),
        (empty, {}, "cannot be read: no checkpoint is there"),
    ],
)
def test_export_refuses(trained, tmp_path, monkeypatch, capsys, change, arguments, says):
    """One line, status 2, and nothing is written."""
    run = tmp_path / "run"
    shutil.copytree(trained("O3"), run)
    if change:
        change(run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names_of_gpt.py").write_text(NAMES)
    (tmp_path / "config.json").write_text(json.dumps(OF_GPT2))
    before = sorted(os.listdir(tmp_path))
    capsys.readouterr()  # the run's
    options = {"--mapping": "names_of_gpt:SCANNED", "--config": "config.json", **arguments}
    status = runs.status_of(["export", str(run), "out", *(text for pair in options.items() for text in pair)])
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("fp8jax export: ") and says in printed.err
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == set(before)


def test_export_names_damaged_checkpoints(tmp_path, capsys):
    """And the step that it took instead."""
    run, _ = run_of_nnx(tmp_path, recipe="bf16", save_steps=1)
    newest = run / "checkpoints/step_00000002"
    (newest / "state/manifest.ocdbt").write_bytes(b"")
    capsys.readouterr()
    report = export(run, tmp_path / "out", mapping=NAMES_OF_NNX, config=OF_GPT2, format="fp32")
    assert report.step == 1 and str(report).splitlines()[0] == "fp32, of step 1"
    assert capsys.readouterr().err == (
        f"warning: skipping {newest}: state/manifest.ocdbt is missing or damaged\n"
    )


def test_export_overwrites_nothing(trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    done = command(
        tmp_path, trained("O3"), "out", "--mapping", "names_of_gpt:SCANNED", "--config", "config.json"
    )
    assert done.returncode == 2 and os.listdir(tmp_path / "out") == ["mine"]
    assert done.stderr == (
        "fp8jax export: `folder`: expected a new or empty folder; got out, which has mine.\n"
    )
