"""Many processes: who starts them, what they compute, and what becomes of the others when one dies.

The runs are of the real program in real processes, on 127.0.0.1 with gloo, one CPU device each.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import ScaledArray
from fp8jax.train import BadInput, checkpoint, distributed
from fp8jax.train.config import DeviceConfig
from fp8jax.train.step.placement import place

# --- who says which process this is -------------------------------------------------------------

TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2"}
FLAGS = {"coordinator": "host:12", "processes": 4, "process": 2}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # it listens on MASTER_PORT itself
ONE_OF_TWO = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}  # of this machine's processes: one device each
ONE_OF_ONE = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
FOR_TORCH = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "4"}  # as scripts for Slurm set them


@pytest.mark.parametrize(
    "flags, environ, expected",
    [
        (FLAGS, {}, ["host:12", 4, 2, None]),
        ({**FLAGS, "process": 0}, {}, ["host:12", 4, 0, None]),
        ({}, TORCHRUN, ["10.0.0.1:29500", 4, 2, None]),
        ({"processes": 4}, TORCHRUN, ["10.0.0.1:29500", 4, 2, None]),
        ({}, {**TORCHRUN, **AGENT}, ["10.0.0.1:29501", 4, 2, None]),
        ({}, {**TORCHRUN, **ONE_OF_ONE}, ["10.0.0.1:29500", 4, 2, None]),
        ({}, {**TORCHRUN, **ONE_OF_TWO}, ["10.0.0.1:29500", 4, 2, 1]),
        ({}, {**SLURM, **TORCHRUN}, ["10.0.0.1:29500", 4, 2, None]),
        # JAX finds what is missing: in the variables of Slurm and Open MPI, by asking Kubernetes, on a TPU.
        ({}, SLURM, [None, None, None, None]),
        ({}, {**SLURM, **FOR_TORCH}, [None, None, None, None]),
        ({"coordinator": "host:12"}, SLURM, ["host:12", None, None, None]),
        ({}, {}, [None, None, None, None]),
    ],
)
def test_the_place_among_the_processes(flags, environ, expected):
    arguments = distributed.cluster_of(DeviceConfig(distributed=True, **flags), environ)
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    assert [arguments.get(name) for name in names] == expected
    assert ("cluster_detection_method" in arguments) == (None not in expected[:3])


@pytest.mark.parametrize(
    "flags, environ, says",
    [
        ({}, {**TORCHRUN, "RANK": "4"}, "4 processes are numbered from 0 to 3; got process 4"),
        ({}, {**TORCHRUN, "RANK": "two"}, "MASTER_PORT, WORLD_SIZE, RANK must be whole numbers: invalid"),
        ({}, {**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT, WORLD_SIZE, RANK must be whole numbers: invalid"),
        ({"process": 0}, TORCHRUN, "--process 0 contradicts torchrun's 2; leave it out"),
        ({"coordinator": "host:1"}, TORCHRUN, "--coordinator host:1 contradicts torchrun's 10.0.0.1:29500"),
        ({**FLAGS, "coordinator": "host"}, {}, "the coordinator must be HOST:PORT; got host"),
        ({**FLAGS, "process": 4}, {}, "4 processes are numbered from 0 to 3; got process 4"),
        (
            {"distributed": False, "process": 0},
            TORCHRUN,
            "--process is for many processes; add --distributed",
        ),
    ],
)
def test_contradictory_places(flags, environ, says):
    with pytest.raises(ValueError) as caught:
        distributed.cluster_of(DeviceConfig(**{"distributed": True, **flags}), environ)
    assert says in str(caught.value)


def test_without_distributed_variables_mean_nothing():
    assert distributed.cluster_of(DeviceConfig(), {**TORCHRUN, **SLURM}) == {}


@pytest.mark.long
def test_without_a_launcher():
    code = "from fp8jax.train import distributed, config\n"
    code += "distributed.initialize(config.DeviceConfig(distributed=True, processes=4))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = ended.stderr.splitlines()[-1]
    assert "--distributed found no launcher (" in last and "expected --coordinator HOST:PORT" in last


def test_errors_of_a_program(capsys):
    """What its user can mend is one line; a defect stays what it is."""

    def status(error):
        def program():
            raise error

        return distributed.run_program("name", program)

    assert status(BadInput("no such option")) == 2
    assert status(OSError("losses.png cannot be written (No space left on device)")) == 2
    assert status(OSError(28, "No space left on device")) == 2  # as of `print`
    assert status(jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 8 bytes\nmore")) == 2
    assert status(KeyboardInterrupt()) == 130
    bad, full, output, memory, interrupted = capsys.readouterr().err.splitlines()
    assert bad == "name: no such option"
    assert full == "name: losses.png cannot be written (No space left on device)"
    assert output == "name: its output cannot be written (No space left on device)"
    assert memory.startswith("name: INTERNAL: Out of memory allocating 8 bytes more; use a smaller model")
    assert interrupted.startswith("name: interrupted; --resume")
    for defect in (jax.errors.JaxRuntimeError("a defect"), ValueError("a defect")):
        with pytest.raises(type(defect), match="a defect"):
            status(defect)
    assert distributed.run_program("name", lambda: 143) == 143


def test_a_process_alone_decides_by_itself(capsys):
    assert distributed.decide(lambda: {"any": (1, "value")}) == {"any": (1, "value")}
    with pytest.raises(ValueError, match="as it is"):
        distributed.decide(lambda: int("as it is"))
    assert [distributed.any_of(True), distributed.any_of(False), distributed.is_first()] == [
        True,
        False,
        True,
    ]
    distributed.wait_for_all()
    assert distributed.leave(2, "what is wrong") == 2 and capsys.readouterr().err == "what is wrong\n"
    assert distributed.devices(1) == jax.devices()[:1]
    assert distributed.devices(0) == jax.devices()
    with pytest.raises(ValueError, match="--devices must be at most the .*; got 99"):
        distributed.devices(99)


# --- where arrays are ---------------------------------------------------------------------------


def test_devices_get_the_rows_of_a_batch_in_order():
    batch = np.arange(24).reshape(8, 3)
    fed = place(jax.devices()[:4]).put(batch)
    assert [shard.data.shape for shard in fed.addressable_shards] == [(2, 3)] * 4
    np.testing.assert_array_equal(fed, batch)


def make_state(devices, seed):
    """Arrays of all kinds that a training state has, half of them cut over the devices."""
    mesh = place(jax.devices()[:devices]).mesh
    cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    values = jax.random.normal(jax.random.key(seed), (8, 4))
    dtypes = (jnp.float32, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    state = [jax.device_put(values.astype(dtype), where) for dtype in dtypes for where in (cut, whole)]
    kernel = ScaledArray(
        jax.device_put(values.astype(jnp.float8_e4m3fn), cut), jax.device_put(2.0 + seed, whole)
    )
    return {"leaves": state, "kernel": kernel, "count": jax.device_put(jnp.int32(seed), whole)}


@pytest.mark.parametrize("before, after", [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_a_checkpoint_fits_any_number_of_devices(tmp_path, before, after):
    state, like = make_state(before, seed=1), make_state(after, seed=0)
    checkpoint.save(tmp_path, 7, state)
    found, skipped = checkpoint.restore(tmp_path, like)
    assert found.step == 7 and skipped == [] and checkpoint.last_step(tmp_path) == 7
    for new, old, wanted in zip(*map(jax.tree.leaves, (found.state, state, like)), strict=True):
        assert new.dtype == old.dtype and new.sharding == wanted.sharding
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


# --- runs ---------------------------------------------------------------------------------------

RUN = [*runs.TINY, "--no-twin", "--steps", "120"]
RUN += "--log-interval 5 --eval-interval 60 --checkpoint-interval 10 --heartbeat 4 --data text".split()
# Each process rounds its gradients to FP8, on first scales of its own, before they are added: that moves a
# loss by some ten-thousandths, and the runs part slowly. A batch that was left out or seen twice shows as
# differences like those between batches, some hundredths.
EARLY, LATE = 1e-3, 0.02

# The program, which also tells after each checkpoint what this process has in its own memory.
TELLING = """
import hashlib, sys
import jax, numpy as np
import train_gpt
from fp8jax.train import run_folder

def save_and_tell(folder, step, states, *args, save=run_folder.save):
    save(folder, step, states, *args)
    digest = hashlib.sha256()
    parts = 0
    for leaf in jax.tree.leaves(states):
        assert len(leaf.devices()) == 2 and len(leaf.addressable_shards) == 1
        parts += not leaf.is_fully_replicated
        if leaf.is_fully_replicated:
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
    assert parts > 10  # of moments
    print(f"after {step} steps {digest.hexdigest()}", file=sys.stderr, flush=True)

run_folder.save = save_and_tell
sys.exit(train_gpt.main())
"""


# A run of a trainer: each process reads its rows of a batch.
FITTING = """
import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from fp8jax import train

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))

def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

config = train.TrainConfig(**train.config.read(train.TrainConfig))
train.distributed.initialize(config)
numbers = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
rows = [{"x": row[:32], "y": row[32:]} for row in numbers]
trainer = train.Trainer(Net(), loss, config, {name: x[None] for name, x in rows[0].items()})
train.fit(trainer, rows[32:], validation=rows[:32], validation_loss=loss)
"""
# Each process has another seed, and every second row.
APART = "import dataclasses\n" + FITTING.replace(
    ", config, {", ", dataclasses.replace(config, seed=config.process), {"
)
APART = APART.replace("rows[32:],", "rows[32 + config.process :: 2],")
# `save` in all processes, of the same variables whole and sharded.
SAVING = """
import os, sys
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import fp8jax
from fp8jax import train
from fp8jax.checkpoints import NameMap, Rename, save

config = train.TrainConfig(**train.config.read(train.TrainConfig))
train.distributed.initialize(config)
mesh = Mesh(jax.devices(), "data")
whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
model, x = fp8jax.transform(nn.Dense(64), "te"), jnp.ones((32, 64))
variables = jax.jit(lambda: model.init(jax.random.key(0), x), out_shardings=whole)()
options = {"mapping": NameMap((Rename("up.weight", "kernel"), Rename("up.bias", "bias"))), "config": {}}
rows = [save("saved/whole", model, variables, x, **options).rows]
sharded = {**variables, "params": jax.device_put(variables["params"], cut)}
try:
    save("saved/sharded", model, sharded, x, **options)
except ValueError as error:
    print(error, file=sys.stderr, flush=True)
rows.append(save("saved/again", model, jax.device_put(sharded, whole), x, **options).rows)
assert [len(each) for each in rows] == [1 - jax.process_index()] * 2
train.distributed.wait_for_all()
assert sorted(os.listdir("saved")) == ["again", "whole"]
"""
FIT = "--recipe te --max-steps 12 --eval-steps 6 --save-steps 6 --learning-rate 1e-3".split()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Group:
    """The program in `count` processes that know of each other; alone with 0."""

    def __init__(self, root, folder, cache, count, *argv, code=None):
        program = ["-c", code] if code else [str(root / "examples/train_gpt.py")]
        environ = {
            **os.environ,
            "PYTHONPATH": f"{root}:{root / 'examples'}",
            "JAX_COMPILATION_CACHE_DIR": cache,
        }
        environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        meeting = ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
        self.logs, self.members = [], []
        for i in range(max(count, 1)):
            flags = [*meeting, "--process", str(i)] if count else []
            self.logs.append(folder / f"{time.monotonic_ns()}.log")
            with self.logs[-1].open("w") as log:
                command = [sys.executable, *program, *flags, *argv]
                self.members.append(
                    subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT)
                )

    def printed(self, i):
        return self.logs[i].read_text()

    def last_line(self, i):
        return self.printed(i).rstrip().splitlines()[-1]

    def wait_for(self, happened):
        deadline = time.monotonic() + 200
        while not happened():
            ended = [i for i, member in enumerate(self.members) if member.poll() is not None]
            assert not ended, f"{ended} ended too early:\n{self.printed(ended[0])}"
            assert time.monotonic() < deadline, f"nothing happened:\n{self.printed(0)}"
            time.sleep(0.01)

    def end(self, i, by=None):
        """The exit status of a member, after a signal if one is given."""
        if by is not None:
            self.members[i].send_signal(by)
        return self.members[i].wait(timeout=200)


@pytest.fixture(scope="module")
def start(request, tmp_path_factory):
    """Starts groups in one folder, that share what they compile; none outlives the tests."""
    folder, cache = tmp_path_factory.mktemp("runs"), str(tmp_path_factory.mktemp("compiled"))
    # Soon read, and soon validated.
    (folder / "text").write_text(corpus.standard_library(100_000), encoding="utf-8")
    groups = []

    def start(count, *argv, **more):
        groups.append(Group(request.config.rootpath, folder, cache, count, *argv, **more))
        return groups[-1]

    start.folder = folder
    yield start
    for member in (member for group in groups for member in group.members if member.poll() is None):
        member.kill()


def checkpoints(run):
    """The steps of complete checkpoints: each process has added its checksums."""

    def is_complete(path):
        try:
            files = [file.read_text() for file in path.glob("sha256.*.json")]
        except FileNotFoundError:  # the run deletes this checkpoint
            return False
        counts = [json.loads(text)["processes"] for text in files if text]
        return len(counts) > 0 and set(counts) == {len(counts)}

    paths = filter(is_complete, run.glob("checkpoints/step_????????"))
    return sorted(int(path.name.removeprefix("step_")) for path in paths)


def assert_lost(group, i, status=None):
    """A member ended because another was gone: by an error of a collective, or aborted by JAX."""
    status = group.end(i) if status is None else status
    if status == distributed.LOST:
        # JAX's threads may log after it.
        own = [line for line in group.printed(i).splitlines() if line.startswith("train_gpt: ")]
        assert own[-1].startswith("train_gpt: another process is gone ("), group.printed(i)
        assert own[-1].endswith("start all again with --resume")
    else:
        assert status == -signal.SIGABRT and "another task died" in group.printed(i), group.printed(i)


def losses(run):
    [model] = json.loads((run / "result.json").read_text())["models"].values()
    return np.array(model["training_losses"]), np.array(model["validation_losses"])


@pytest.fixture(scope="module")
def alone(start):
    """The losses of one process that nothing happened to."""
    group = start(0, *RUN, "--out", "alone")
    assert group.end(0) == 0, group.printed(0)
    return losses(start.folder / "alone")


def assert_goes_on(run, alone):
    """The curve of a run that was interrupted is that of the run alone."""
    for ours, theirs in zip(losses(run), alone, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=10 * LATE)
        assert np.mean(np.abs(ours - theirs)) < LATE
    np.testing.assert_allclose(losses(run)[0][:10], alone[0][:10], atol=EARLY)


@pytest.fixture(scope="module")
def killed(start):
    """A run of two, of which one was killed after the first checkpoint."""
    run, group = start.folder / "run", start(2, *RUN, "--out", "run", "--zero", "2", code=TELLING)
    group.wait_for(lambda: all("after 10 steps" in group.printed(i) for i in range(2)))
    assert group.end(1, by=signal.SIGKILL) == -signal.SIGKILL
    begun = time.monotonic()
    status = group.end(0)
    return group, status, time.monotonic() - begun, checkpoints(run)


def test_two_processes_compute_what_one_does_and_hold_the_same(start, killed, alone):
    group, *_ = killed
    first, second = (re.findall("after 10 steps (.*)", group.printed(i)) for i in range(2))
    assert first == second != []
    content = json.loads((start.folder / "run/checkpoints/step_00000010/run/metadata").read_text())
    np.testing.assert_allclose(content["curves"][0]["loss"], alone[0][:10], atol=EARLY)
    assert "2 processes with 2 devices; process 0 is at 127.0.0.1:" in group.printed(0)
    assert "compiling" in group.printed(0) and "compiling" not in group.printed(1)


@pytest.mark.long
def test_two_processes_fit_a_trainer_as_one_does(start):
    alone = start(0, *FIT, "--per-device-train-batch-size", "8", "--output-dir", "fit-1", code=FITTING)
    both = start(2, *FIT, "--per-device-train-batch-size", "4", "--output-dir", "fit-2", code=FITTING)
    assert alone.end(0) == 0, alone.printed(0)
    assert [both.end(i) for i in range(2)] == [0, 0], both.printed(0)
    for ours, theirs in zip(losses(start.folder / "fit-2"), losses(start.folder / "fit-1"), strict=True):
        # Batches differ by a tenth; sums over two devices by roundings that move a code here and there.
        np.testing.assert_allclose(ours, theirs, rtol=EARLY)


@pytest.mark.long
def test_processes_with_other_settings_or_data_are_refused(start):
    flags = ["--per-device-train-batch-size", "4", "--output-dir", "apart", "--max-steps", "2"]
    group = start(2, *flags, code=APART)
    assert [group.end(i) for i in range(2)] == [1, 1], group.printed(0)
    for i, got in enumerate(("another process got others", "process 1 got other seed, data than process 0")):
        says = "BadInput: expected the same settings and data in all processes, "
        assert says in group.printed(i) and f"; {got}" in group.printed(i)
    assert not (start.folder / "apart").exists()


def test_one_of_two_processes_saves_a_folder(start):
    group = start(2, "--output-dir", "none", code=SAVING)
    assert [group.end(i) for i in range(2)] == [0, 0], group.printed(0) + group.printed(1)
    for i in range(2):
        refused = "`variables`: expected arrays that each process has whole; got params/bias, sharded over"
        assert refused in group.printed(i)
    files = [
        (start.folder / "saved" / name / "model.safetensors").read_bytes() for name in ("whole", "again")
    ]
    assert files[0] == files[1]


def test_killed_process_stops_the_others(killed):
    group, status, seconds, found = killed
    assert seconds < 60 and found  # 4 s are the heartbeat; the machine may be slow
    assert_lost(group, 0, status)


@pytest.mark.long
def test_a_run_of_two_goes_on_in_one_from_its_last_checkpoint(start, killed, alone):
    group = start(0, "--out", "run", "--resume")
    assert group.end(0) == 0, group.printed(0)
    assert_goes_on(start.folder / "run", alone)


@pytest.mark.long
def test_four_processes_lose_one_and_two_go_on(start, alone):
    run, group = start.folder / "four", start(4, *RUN, "--out", "four", "--zero", "3")
    group.wait_for(lambda: checkpoints(run))
    group.end(2, by=signal.SIGKILL)
    for i in (0, 1, 3):
        assert_lost(group, i)
    group = start(2, "--out", "four", "--resume", "--zero", "1")
    assert [group.end(i) for i in range(2)] == [0, 0], group.printed(0)
    assert_goes_on(run, alone)


@pytest.mark.long
def test_stopped_killed_and_silent_processes(start, alone):
    """The other processes never wait for them without end."""
    run = start.folder / "troubled"

    def go_on(*argv):
        before = checkpoints(run)
        group = start(2, "--out", "troubled", *argv)
        group.wait_for(lambda: "tokens/s" in group.printed(0) and checkpoints(run) != before)
        return group

    # One is asked to stop: both save after the same step.
    group = go_on(*RUN)
    assert (group.end(1, by=signal.SIGTERM), group.end(0)) == (143, 143), group.printed(0)
    assert (
        group.last_line(0)
        == f"stopped and saved after step {checkpoints(run)[-1]} in troubled; --resume goes on with it"
    )
    # The first is killed: it is the coordinator, and JAX aborts the others.
    group = go_on("--resume", "--heartbeat", "4")
    group.end(0, by=signal.SIGKILL)
    assert_lost(group, 1)
    # One falls silent, its connections stay open: only the missed heartbeat tells.
    group = go_on("--resume", "--heartbeat", "4")
    group.members[1].send_signal(signal.SIGSTOP)
    assert_lost(group, 0)
    group.members[1].send_signal(signal.SIGCONT)
    assert_lost(group, 1)
    group = start(2, "--out", "troubled", "--resume")
    assert [group.end(i) for i in range(2)] == [0, 0], group.printed(0)
    assert_goes_on(run, alone)


@pytest.mark.long
@pytest.mark.parametrize(
    "argv, says",
    [
        (["--out", "."], ". holds files and no run (settings.json is missing)"),
        (["--batch", "5"], "--batch must be a multiple of the 2 devices; got --batch 5"),
        (["--recipe", "O9"], "expected one of fp32, bf16"),
    ],
    ids=["decided by the first", "about all of them", "of each"],
)
def test_bad_input_ends_all_processes(start, argv, says):
    group = start(2, *RUN, *argv)
    for i in range(2):
        assert group.end(i) == 2 and says in group.last_line(i)


@pytest.mark.long
def test_processes_that_do_not_meet(start):
    group = start(2, *RUN, "--out", "apart", "--processes", "3", "--patience", "2")
    for i in range(2):
        assert group.end(i) in (2, -signal.SIGABRT) and "DEADLINE_EXCEEDED" in group.printed(i)
