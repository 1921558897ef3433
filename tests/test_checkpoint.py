"""Checkpoints: every bit is restored, and damage is skipped."""

import hashlib
import json
import pathlib
import resource
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import ScaledArray
from fp8jax.dot import init_ragged_state, init_state
from fp8jax.optim import adamw
from fp8jax.optim.wrappers import without_variables
from fp8jax.scaling.old_states import without_one
from fp8jax.train import checkpoint, run_folder
from fp8jax.train.metrics import ScaleMetrics
from fp8jax.train.step.network import RunState


def make_state(seed=0):
    """One leaf of every dtype and container that a training state has."""
    values = jax.random.normal(jax.random.key(seed), (4, 8))
    arrays = {
        str(dtype): values.astype(dtype) for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn")
    }
    arrays["grad"] = values.astype(jnp.float8_e5m2)
    scaled = {"kernel": ScaledArray(values.astype(jnp.float16), jnp.full((4, 1), 0.5 + seed))}
    return [(arrays, scaled), ScaleMetrics(jnp.int32(seed), jnp.float32(seed)), None, ()]


def bits(tree):
    """Every leaf as (dtype, shape, bytes)."""
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 2, 3 and 4, the newest three of four."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    for step in (1, 2, 3, 4):
        checkpoint.save(
            folder, step, make_state(step), {"loss": [0.1 * step, float("inf")], "data": {"taken": step}}
        )
    return folder


def copy_of(folder, tmp_path):
    copy = tmp_path / "copy"
    for path in folder.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(folder)).write_bytes(path.read_bytes())
    return copy


def test_checkpoint_keeps_every_bit(saved):
    found, skipped = checkpoint.restore(saved, like=make_state())
    assert found.step == 4 and skipped == []
    assert jax.tree.structure(found.state) == jax.tree.structure(make_state(4))
    assert bits(found.state) == bits(make_state(4))
    assert found.metadata["loss"] == [0.1 * 4, float("inf")] and found.metadata["data"] == {"taken": 4}


def test_a_folder_may_be_a_text(tmp_path):
    state = {"w": jnp.ones(3)}
    assert checkpoint.save(str(tmp_path), 1, [state]).parent == tmp_path
    found, skipped = checkpoint.restore(str(tmp_path), like=[state])
    assert found.step == 1 and skipped == []
    with pytest.raises(ValueError, match="is no checkpoint of `fp8jax.train.fit`"):
        checkpoint.read_variables(str(tmp_path))


def test_only_the_newest_are_kept(saved):
    assert sorted(path.name for path in saved.iterdir()) == [f"step_0000000{n}" for n in (2, 3, 4)]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [cut, flip, pathlib.Path.unlink], ids=["cut", "flip", "delete"])
def test_damage_to_any_file_is_noticed(saved, tmp_path, harm):
    files = [p.relative_to(saved) for p in sorted((saved / "step_00000004").rglob("*")) if p.is_file()]
    assert len(files) > 4
    copy = copy_of(saved, tmp_path)
    for file in files:
        before = (saved / file).read_bytes()
        if not before:
            continue
        harm(copy / file)
        found, skipped = checkpoint.restore(copy, like=make_state())
        assert found.step == 3 and len(skipped) == 1, file
        assert "step_00000004" in skipped[0] and "missing or damaged" in skipped[0]
        (copy / file).write_bytes(before)
    assert bits(found.state) == bits(make_state(3))


def test_a_checkpoint_may_be_a_link(saved, tmp_path):
    """As of one that was moved to another disk. Orbax fails where it deletes one."""
    copy, elsewhere = copy_of(saved, tmp_path), tmp_path / "elsewhere"
    (copy / "step_00000004").rename(elsewhere)
    (copy / "step_00000004").symlink_to(elsewhere)
    found, skipped = checkpoint.restore(copy, like=make_state())
    assert (found.step, skipped) == (4, [])
    for step in (4, 5, 6, 7):  # the first is set aside, as a run that goes on from step 3 would
        checkpoint.save(copy, step, make_state(step))
        if step == 4:
            assert (copy / "damaged-step_00000004").is_symlink()
            shutil.rmtree(copy / "step_00000004")
            (copy / "damaged-step_00000004").rename(copy / "step_00000004")
    names = [f"step_0000000{n}" for n in (5, 6, 7)]
    assert sorted(path.name for path in copy.iterdir()) == names and (elsewhere / "sha256.0.json").exists()


def test_a_partial_checkpoint_is_removed(saved, tmp_path):
    """The next save removes it; a reader changes nothing."""
    copy = copy_of(saved, tmp_path)
    (copy / "step_00000004").rename(copy / "step_00000004.orbax-checkpoint-tmp")
    before = sorted(copy.rglob("*"))
    found, skipped = checkpoint.restore(copy, like=make_state())
    assert found.step == 3 and not skipped
    assert sorted(copy.rglob("*")) == before  # another process may be writing it
    checkpoint.save(copy, 5, make_state(5))
    assert sorted(path.name for path in copy.iterdir()) == [f"step_0000000{n}" for n in (2, 3, 5)]


def test_a_kill_before_the_checksums(saved, tmp_path):
    copy = copy_of(saved, tmp_path)
    (copy / "step_00000004/sha256.0.json").unlink()
    found, [skipped] = checkpoint.restore(copy, like=make_state())
    assert found.step == 3 and "step_00000004: its checksums are missing" in skipped


def test_the_checksums_of_every_process_are_needed(saved, tmp_path):
    copy = copy_of(saved, tmp_path)
    path = copy / "step_00000004/sha256.0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processes": 2}))
    found, [skipped] = checkpoint.restore(copy, like=make_state())
    assert found.step == 3 and "step_00000004: its checksums are missing" in skipped


def sign_again(path):
    """New checksums, as if the damage had been written."""
    listed = json.loads((path / "sha256.0.json").read_text())
    found = [file for name in listed["files"] if (file := path / name).exists()]
    files = {
        file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in found
    }
    (path / "sha256.0.json").write_text(json.dumps({**listed, "files": files}))


@pytest.mark.parametrize(
    "harm, says",
    [
        (lambda path: shutil.rmtree(path / "state"), "its arrays cannot be read ("),
        (lambda path: [cut(file) for file in path.glob("state/**/d/*")], "its arrays cannot be"),
        (lambda path: (path / "run/metadata").unlink(), "its checksums are missing or damaged"),
    ],
)
def test_damage_that_the_checksums_agree_with(saved, tmp_path, harm, says):
    copy = copy_of(saved, tmp_path)
    harm(copy / "step_00000004")
    sign_again(copy / "step_00000004")
    found, [skipped] = checkpoint.restore(copy, like=make_state())
    assert found.step == 3 and f"step_00000004: {says}" in skipped
    assert bits(found.state) == bits(make_state(3))


def swap(folder):
    """Step 3 under the name of step 4, and the other way round."""
    (folder / "step_00000003").rename(folder / "x")
    (folder / "step_00000004").rename(folder / "step_00000003")
    (folder / "x").rename(folder / "step_00000004")


def replaced(make):
    def harm(folder):
        (folder / "step_00000004").rename(folder.parent / "moved")
        make(folder / "step_00000004")

    return harm


@pytest.mark.parametrize(
    "harm, step, says",
    [
        (swap, 2, "it is the checkpoint of step 3 under another name"),
        (lambda folder: (folder / "step_00000004").rename(folder / "step_00000009"), 3, "of step 4 under"),
        (replaced(pathlib.Path.touch), 3, "its checksums are missing"),
        (replaced(pathlib.Path.mkdir), 3, "its checksums are missing"),
        (replaced(lambda path: path.symlink_to("nowhere")), 3, "its checksums are missing"),
        (replaced(lambda path: path.symlink_to("step_00000003")), 3, "of step 3 under another name"),
        (replaced(lambda path: path.symlink_to(path.parent.parent / "moved")), 4, None),
        (lambda folder: (folder / "step_00000004/sha256.0.json").write_text("{}"), 3, "its checksums are"),
        (lambda folder: [(folder / name).touch() for name in ("step_x", "step_", "notes")], 4, None),
    ],
)
def test_a_checkpoint_knows_its_step(saved, tmp_path, harm, step, says):
    """What is no checkpoint, or not that of its name, is skipped and does not hinder the next save."""
    copy = copy_of(saved, tmp_path)
    harm(copy)
    found, skipped = checkpoint.restore(copy, like=make_state())
    assert found.step == step and bits(found.state) == bits(make_state(step))
    assert says is None if not skipped else says in skipped[0]
    checkpoint.save(copy, 4, make_state(7))
    found, _ = checkpoint.restore(copy, like=make_state())
    assert found.step == 4 and bits(found.state) == bits(make_state(7))


def test_a_checkpoint_of_0_1_0_has_other_scaling_states(tmp_path):
    state = {"kernel": init_state("O2"), "layers": init_ragged_state("O2", 3), "step": jnp.ones(())}
    old = {**without_one(state), "stateless": {"wgrad_scale": jnp.ones(())}}
    old["layers"]["wgrad_scale"] = jnp.ones(3)
    assert jax.tree.structure(old) != jax.tree.structure(state)
    checkpoint.save(tmp_path, 1, old)
    found, skipped = checkpoint.restore(tmp_path, like=state)
    assert jax.tree.structure(found.state) == jax.tree.structure(state) and skipped == []
    assert bits(found.state) == bits(state)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_6", "O2"])
def test_a_checkpoint_with_boxes_around_whole_moments(recipe, tmp_path):
    """As an earlier version wrote it, for a Linen model with names of axes."""
    kernel = nn.Partitioned(jax.random.normal(jax.random.key(0), (4, 256)), (None, "model"))
    state = adamw(1e-3, recipe).init({"kernel": kernel})
    old = without_variables(state)
    assert isinstance(old.adam.mu["kernel"], nn.Partitioned)
    checkpoint.save(tmp_path, 1, old)
    found, skipped = checkpoint.restore(tmp_path, like=state)
    assert jax.tree.structure(found.state) == jax.tree.structure(state) and skipped == []
    assert bits(found.state) == bits(state)


def test_a_checkpoint_of_another_run(tmp_path):
    checkpoint.save(tmp_path, 1, make_state(1), run="other")
    with pytest.raises(ValueError, match="step_00000001 is of another run, with other settings or data"):
        checkpoint.restore(tmp_path, make_state(), run="this")
    assert checkpoint.restore(tmp_path, make_state())[0].step == 1  # any run will do


def test_damaged_checkpoints_are_set_aside(saved, tmp_path):
    """They count for none of the three that are kept, and nothing of them is lost."""
    copy = copy_of(saved, tmp_path)
    for step in (3, 4):
        (copy / f"step_0000000{step}/sha256.0.json").unlink()
    assert checkpoint.restore(copy, make_state())[0].step == 2
    checkpoint.save(copy, 3, make_state(5))
    names = sorted(path.name for path in copy.iterdir())
    damaged = ["damaged-step_00000003", "damaged-step_00000004"]
    assert names == [*damaged, "step_00000002", "step_00000003"]
    assert bits(checkpoint.restore(copy, make_state())[0].state) == bits(make_state(5))


def test_full_disk(saved, tmp_path, capfd):
    """The error has one line, and the earlier checkpoints stay."""
    copy, limit = copy_of(saved, tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(copy.rglob("*"))
    state = [*make_state(5)[:2], jax.random.normal(jax.random.key(0), (100_000,)), ()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))  # Python has the system's signal ignored
    try:
        with pytest.raises(OSError) as caught:
            checkpoint.save(copy, 5, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    says = "step_00000005 cannot be written (File too large); mend that and resume: step 4 is the last that"
    assert says in str(caught.value) and len(str(caught.value)) < 400 and caught.value.__cause__ is None
    assert capfd.readouterr().err == "" and sorted(copy.rglob("*")) == before


@pytest.mark.parametrize("harm", ["damaged", "deleted", "deleted folder"])
def test_run_without_checkpoints(tmp_path, harm, capsys):
    """A run that lost all its checkpoints begins again only if it is told to."""
    assert (
        run_folder.restore(tmp_path, make_state(), "run", or_start=False) is None
    )  # killed before its first
    assert "no checkpoint in" in capsys.readouterr().err
    for step in (1, 2):
        run_folder.save(tmp_path, step, make_state(step), {}, "run")
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "step_00000002")
    assert run_folder.restore(tmp_path, make_state(), "run", or_start=False).step == 1
    assert "the checkpoint of step 2: it was saved in" in capsys.readouterr().err
    if harm == "damaged":
        cut(folder / "step_00000001/run/metadata")
    else:
        shutil.rmtree(folder / "step_00000001" if harm == "deleted" else folder)
    with pytest.raises(
        ValueError, match="are damaged or lost: .*; put one back, or begin at step 0 with --or-start"
    ):
        run_folder.restore(tmp_path, make_state(), "run", or_start=False)
    assert capsys.readouterr().err == ""
    assert run_folder.restore(tmp_path, make_state(), "run", or_start=True) is None
    assert "so the run starts at step 0" in capsys.readouterr().err


def test_no_checkpoint(tmp_path):
    assert checkpoint.restore(tmp_path / "nothing", like=make_state()) == (None, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state[:1],
        lambda state: [state[0], ScaleMetrics(jnp.zeros((2,)), jnp.float32(0)), *state[2:]],
    ],
)
def test_checkpoint_of_another_model(saved, change):
    with pytest.raises(ValueError) as caught:
        checkpoint.restore(saved, like=change(make_state()))
    assert "is of another model or recipe" in str(caught.value)


@pytest.mark.parametrize(
    "began, now, says",
    [
        (
            2,
            1,
            r"of another model or recipe: its \[1\]\.step is int32\[\], .*2 models, and 1 are given",
        ),
        (
            1,
            2,
            r"of another model or recipe: its \[1\]\.step is nothing, .*1 models, and 2 are given",
        ),
        (2, 3, r"of another model or recipe: its \[1\]\.variables\['w'\] is float32\[2\], this"),
        (1, 0, r"its .* this run's is int32\[\]; `fit` saves a list .*, so expected `like=\[trainer.like\]`"),
    ],
)
def test_checkpoint_with_another_twin(tmp_path, began, now, says):
    twin = RunState(jnp.int32(2), {"w": jnp.ones(2)}, {})
    runs = {0: twin, 1: [twin], 2: [twin, twin], 3: [twin, twin._replace(variables={"w": jnp.ones(3)})]}
    checkpoint.save(tmp_path, 2, runs[began])
    with pytest.raises(ValueError, match=says):
        checkpoint.restore(tmp_path, like=runs[now])
