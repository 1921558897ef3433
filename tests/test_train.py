"""examples/train_gpt.py as its user runs it: two steps, and bad input."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache

import fp8jax
from fp8jax import Recipe, train
from fp8jax.quantization import is_scaled, value
from fp8jax.recipe import PRESETS
from fp8jax.train.run.run import spans
from fp8jax.train.run_folder import RunMetadata
from fp8jax.train.step.optimizers import decays, schedule_of


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Programs that were compiled once; most of the time here would go into compiling them again."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return runs.short_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def program(load_program):
    return load_program(runs.PROGRAM)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- two steps --------------------------------------------------------------------------------

EVERYTHING_ELSE = "--no-twin --bias --no-remat --dtype bfloat16 --recipe te,scaling=current,exclude="


@pytest.mark.parametrize(
    "options, names, layers",
    [
        pytest.param([], ["fp8", "bf16"], 4, id="default"),
        pytest.param(
            EVERYTHING_ELSE.split(),
            ["te,scaling=current,exclude="],
            5,
            id="everything else",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_steps(program, folder, capsys, options, names, layers):
    assert program.main([*runs.TINY, "--steps", "2", *options]) == 0
    printed = capsys.readouterr().out
    assert f"{names[0]}: {layers} of " in printed and "report: runs/gpt-1/report.html" in printed
    result = json.loads((folder / "runs/gpt-1/result.json").read_text())
    assert list(result["models"]) == names
    for model in result["models"].values():
        losses = model["training_losses"]
        # Nothing was learned yet: a uniform guess among the vocabulary, within what the start adds.
        np.testing.assert_allclose(losses, np.log(result["vocabulary"]), atol=0.1)
        assert len(losses) == 2 and losses[0] != losses[1]
        assert [step for step, _ in model["validation_losses"]] == [2]
        memory = {line["part"].split(":")[0]: line for line in model["memory"]}
        taken, total = memory["arguments of a step"], memory["peak"]
        # The compiled step leaves out the random key, which nothing uses.
        assert taken["arrays"] - 8 == taken["compiled"] < total["compiled"]
    page = (folder / "runs/gpt-1/report.html").read_text()
    assert ("has no delayed scales" in page) == ("current" in names[0])


def test_remat_of_operands_is_the_recipes_alone(program, folder, short):
    """The twin in bf16 has no FP8 operands to save."""
    options = [*runs.TINY, "--data", short, "--recipe", "te", "--gradient-checkpointing", "fp8"]
    trainers = program.prepare(options).trainers
    assert [each.config.gradient_checkpointing for each in trainers] == ["fp8", "dots"]


@pytest.mark.long
def test_a_finished_run_can_be_resumed_to_report_again(program, folder, short, capsys):
    assert program.main([*runs.TINY, "--data", short, "--steps", "2", "--out", "run"]) == 0
    before = runs.curves(folder / "run")
    (folder / "run/report.html").unlink()
    assert program.main(["--out", "run", "--resume"]) == 0
    assert runs.curves(folder / "run") == before and list(before[1]) == ["fp8", "bf16"]
    assert (folder / "run/report.html").exists() and capsys.readouterr().err == ""


def test_a_second_run_gets_a_folder_of_its_own(program, folder, short, capsys):
    for run in ("gpt-1", "gpt-2"):
        assert (
            program.main([*runs.TINY, "--data", short, "--steps", "2", "--no-twin", "--recipe", "bf16"]) == 0
        )
        assert f"report: runs/{run}/report.html" in capsys.readouterr().out
    first, second = (json.loads((folder / f"runs/gpt-{n}/result.json").read_text()) for n in (1, 2))
    assert first["gap"] is None and list(first["models"]) == ["bf16"]
    assert first["models"]["bf16"]["training_losses"] == second["models"]["bf16"]["training_losses"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(program, folder, short, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    options = ["--data", short, "--steps", "2", "--recipe", "bf16", "--out", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "init", interrupt)
        assert program.main([*runs.TINY, *options]) == 130
    assert capsys.readouterr().err.startswith("train_gpt: interrupted;")
    assert program.main(["--out", "run", "--resume"]) == 0
    assert "no checkpoint in run, so the run starts at step 0" in capsys.readouterr().err
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step_00000002"]


def test_recipe_and_twin_start_from_the_same_weights(program):
    gpt = program.GPT(program.GPTConfig(17, layers=2, heads=2, width=32))
    tokens = jnp.zeros((1, 4), jnp.int32)
    ours, twins = (
        jax.jit(fp8jax.transform(gpt, recipe).init)(jax.random.key(1), tokens)["params"]
        for recipe in ("O2", "bf16")
    )
    ours = jax.tree.leaves(ours, is_leaf=is_scaled)
    assert sum(map(is_scaled, ours)) == 4
    for leaf, other in zip(ours, jax.tree.leaves(twins), strict=True):
        assert other.dtype == jnp.float32
        np.testing.assert_allclose(value(leaf), other, rtol=2**-11, atol=1e-9)


def test_learning_rate_is_nanogpts(program):
    config = program.Config(steps=2000)
    rate = schedule_of(config.trainer("O2", "", 1))
    expected = {0: 1e-3 / 101, 50: 1e-3 * 51 / 101, 100: 1e-3, 1050: 0.5 * (1e-3 + 1e-4), 2000: 1e-4}
    for step, at_step in expected.items():
        assert float(rate(jnp.int32(step))) == pytest.approx(at_step, rel=1e-5), step
    assert np.isfinite(float(schedule_of(program.Config(steps=1).trainer("O2", "", 1))(0)))


@pytest.mark.parametrize("is_plain", [True, False])
def test_only_matrices_decay(program, is_plain):
    config = program.GPTConfig(17, layers=3, heads=2, width=8, bias=not is_plain, tied=is_plain)
    params = jax.eval_shape(
        program.GPT(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    )["params"]
    decaying = {
        "/".join(key.key for key in path)
        for path, has_decay in jax.tree_util.tree_leaves_with_path(decays(params))
        if has_decay
    }
    kernels = {f"h/{name}/kernel" for name in ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")}
    head = set() if is_plain else {"lm_head/kernel"}
    assert decaying == kernels | head | {"wte/embedding", "wpe/embedding"}


@pytest.mark.parametrize(
    "name, dtype, bound",
    [
        ("xla", "float32", 1e-6),
        ("xla", "bfloat16", 2**-7),
    ],
)
def test_attention_by_name_is_the_one_written_out(load_program, name, dtype, bound):
    """In bfloat16 both round their weights and their sums: half an ulp each, relative to the largest."""
    model = load_program("examples/gpt_model.py")
    config = model.GPTConfig(17, heads=2, width=16, dtype=dtype)
    plain, by_name = (model.Attention(dataclasses.replace(config, attention=of)) for of in ("plain", name))
    x = jax.random.normal(jax.random.key(0), (2, 8, 16), dtype)
    params = jax.tree.map(lambda leaf: 20 * leaf, jax.jit(plain.init)(jax.random.key(1), x))

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(module, params, x):
        def loss(params, x):
            y = module.apply(params, x).astype(jnp.float32)
            return jnp.sum(y**2), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    one, other = gradients(plain, params, x), gradients(by_name, params, x)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(b, a, rtol=0, atol=2 * bound * np.abs(a).max())


def test_an_attention_that_there_is_not_is_refused(program):
    with pytest.raises(ValueError, match="plain, xla, cudnn, cached; got 'flash'"):
        program.GPTConfig(17, attention="flash")


def test_a_token_sees_only_what_came_before_it(program):
    model = program.GPT(program.GPTConfig(17, layers=2, heads=2, width=8, context=6))
    tokens = jnp.array([[1, 2, 3, 4, 5, 6]])
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    apply = jax.jit(model.apply)
    before, after = apply(params, tokens), apply(params, tokens.at[0, 3].set(9))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.all(np.any(np.asarray(before != after)[:, 3:], axis=-1))


@pytest.mark.parametrize(
    "start, stop, intervals, expected",
    [
        (0, 10, (5,), [(0, 5), (5, 10)]),
        (0, 10, (4, 6), [(0, 4), (4, 6), (6, 8), (8, 10)]),
        (8, 10, (4, 6), [(8, 10)]),
        (10, 10, (4,), []),
        (0, 3, (10,), [(0, 3)]),
    ],
)
def test_spans_lie_on_one_grid_wherever_a_run_resumes(start, stop, intervals, expected):
    assert list(spans(start, stop, *intervals)) == expected


# --- bad input --------------------------------------------------------------------------------

BAD = [
    (
        ["--data", "nowhere.txt"],
        "--data nowhere.txt cannot be read (No such file or directory); give a text file",
    ),
    (["--data", "short.txt"], "--data short.txt is too short"),
    (["--data", "empty.txt"], "--data empty.txt is empty"),
    (["--data", "."], "--data . cannot be read"),
    (
        ["--recipe", "O9"],
        "expected one of fp32, bf16, fp16_amp, te, O1, O2, O3, te+O2, fp8, block, mxfp8, nvfp4, current, ",
    ),
    (["--recipe", "O2,margin=-1"], "recipe: `margin` is one of: an integer from 0 to 100; got '-1'."),
    (["--recipe", "O2,exclude=nothing"], "the exclude pattern 'nothing' matches no layer"),
    (["--config", "unknown.yaml"], "Option 'stepz' is not accepted (did you mean --steps?)"),
    (["--config", "broken.yaml"], "Problems parsing config"),
    (["--config", "types.yaml"], "\"steps\": Expected a <class 'int'>. Got value: many"),
    (["--config", "nowhere.yaml"], "File does not exist: "),
    (["--steps", "many"], "\"steps\": Expected a <class 'int'>. Got value: many"),
    (["--steps", "0"], "--steps must be at least 1 and below 2147483648; got 0"),
    (["--stepz", "3"], "unrecognized arguments: --stepz 3 (did you mean --steps?)"),
    (["--lr", "-1"], "--lr must be at least 0"),
    (["--beta2", "1"], "--beta2 must be at least 0 and below 1"),
    (["--heads", "3"], "--width 128 is no multiple of --heads 3"),
    (["--optim", "lion"], "--optim must be one of adamw"),
    (["--optim", "adafactor", "--zero", "1"], "--zero shares the moments of adamw; got --optim adafactor"),
    (
        ["--optim", "adafactor", "--recipe", "O3"],
        "--optim adafactor keeps no master weights, and O3 needs them",
    ),
    (["--dtype", "float8"], "--dtype must be one of float32, bfloat16; got float8"),
    (["--out", "taken"], "taken holds a run already: add --resume to go on with it"),
    (["--out", "short.txt"], "short.txt is a file"),
    (["--out", "taken", "--resume", "--recipe", "te"], "has --recipe O2, not te; leave --recipe as it was"),
    (["--out", "taken", "--resume", "--batch", "24"], "has --batch 12, not 24; leave --batch as it was"),
    (["--out", "taken", "--resume", "--data", "other.txt"], "began with other data"),
    (["--out", "nothing", "--resume"], "--resume found no run in nothing; give the folder of one, or add"),
    (["--data", "binary"], "--data binary is a binary file"),
    (["--config", "twice.yaml"], "says `steps` twice"),
    (["--config", "huge.yaml"], "--steps must be at least 1 and below 2147483648; got 999999"),
    (["--lr", "1e-5"], "--min-lr 0.0001 must be at most --lr 1e-05"),
]


@pytest.mark.parametrize("argv, says", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_one_line_and_writes_nothing(program, folder, capsys, argv, says):
    began = RunMetadata({"recipe": "O2", "steps": 5, "batch": 12, "rows": 12}, "of this run")
    files = {
        "short.txt": "too short to fill a batch",
        "empty.txt": "",
        "other.txt": "another text, " * 200,
        "unknown.yaml": "stepz: 3",
        "broken.yaml": "steps: [1",
        "types.yaml": "steps: many",
        "twice.yaml": "steps: 3\nsteps: 4",
        "huge.yaml": "steps: 999999999999999999999999",
        "binary": "\0" * 20_000,
        "taken/settings.json": json.dumps({**began._asdict(), "digest": began.digest}),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    assert program.main(argv) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("train_gpt: ") and says in line
    assert captured.out == ""
    found = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert found == files


# --- around a run -----------------------------------------------------------------------------


@pytest.mark.long
def test_levels_are_compared_in_a_table_and_a_picture(load_program, folder, capsys):
    levels = load_program("examples/levels.py")
    options = [*runs.TINY, "--steps", "2", "--out", "runs/levels"]
    assert levels.main(["--levels", "bf16", "O3", "nvfp4-mixed", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {row["level"]: row for row in json.loads((folder / "runs/levels/levels.json").read_text())}
    assert set(rows) == {"bf16", "O3", "nvfp4-mixed"} and lines[-1] == "runs/levels/levels.png"
    assert (
        round(rows["bf16"]["bytes"], 2) == 16 and 7 < rows["O3"]["bytes"] < 10
    )  # embeddings and norms are float32
    assert rows["O3"]["rounding"] == "nearest+nearest+value"
    assert rows["bf16"]["unchanged"] == [] and 0 <= rows["O3"]["unchanged"][-1] <= 1
    for row in rows.values():
        assert np.isfinite(row["validation loss"]) and row["update ms"] > 0 and len(row["curve"]) == 2
        assert any(line.startswith(row["level"] + " ") for line in lines)
    assert (folder / "runs/levels/levels.png").read_bytes().startswith(b"\x89PNG")
    assert levels.main(options) == 2 and "exists; name another" in capsys.readouterr().err


def test_model_larger_than_the_memory(program, folder, capsys):
    """It is refused, and its folder is removed."""
    assert program.main([*runs.TINY, "--no-twin", "--width", "2000000000", "--out", "run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "GB of each device, and there are" in line and not (folder / "run").exists()


def test_a_platform_that_there_is_not_is_one_line(program, monkeypatch, capsys):
    def devices():
        raise RuntimeError("Unable to initialize backend 'bogus'")

    monkeypatch.setattr(jax, "devices", devices)
    assert program.main([]) == 2
    assert capsys.readouterr().err == (
        "train_gpt: JAX finds no devices: Unable to initialize backend 'bogus'\n"
    )


def test_recipes_of_the_help_exist(program):
    text = program.Config.__dataclass_fields__["recipe"].metadata["help"]
    for name in PRESETS:
        assert name in text and Recipe.parse(name)
