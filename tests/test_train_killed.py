"""A run of train_gpt.py that is killed, stopped, damaged and resumed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import runs

# A minute and more; test_processes kills runs too, test_fit stops them.
pytestmark = pytest.mark.long

LONG = [*runs.TINY, "--no-twin", "--steps", "200", "--checkpoint-interval", "20", "--eval-interval", "50"]


class Process:
    """A training program in a process of its own, and what it printed so far."""

    def __init__(self, program, folder, cache, *argv):
        self.log = folder / f"{time.monotonic_ns()}.log"
        environment = {**os.environ, "PYTHONPATH": str(program.parent.parent)}
        if cache:
            environment |= {"JAX_COMPILATION_CACHE_DIR": cache}
            environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *argv],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def printed(self):
        return self.log.read_text()

    def wait_until(self, happened):
        deadline = time.monotonic() + 200
        while not happened():
            assert self.process.poll() is None, f"ended too early:\n{self.printed()}"
            assert time.monotonic() < deadline, f"nothing happened:\n{self.printed()}"
            time.sleep(0.002)

    def is_training(self):
        return "tokens/s" in self.printed()

    def end(self, by=None):
        """The exit status, after a signal if one is given."""
        if by is not None:
            self.process.send_signal(by)
        return self.process.wait(timeout=200)


@pytest.fixture(scope="module")
def journey(request, tmp_path_factory):
    """One run left alone, and one that was killed, stopped, damaged and resumed; what they did."""
    program, folder = request.config.rootpath / runs.PROGRAM, tmp_path_factory.mktemp("journey")
    cache, short = str(tmp_path_factory.mktemp("compiled")), runs.short_text(folder)
    spoiled, told = folder / "spoiled", {"folder": folder}

    def checkpoints():
        return sorted(path.name for path in spoiled.glob("checkpoints/step_????????"))

    # It compiles for itself: that gives the same program too.
    alone = Process(program, folder, None, *LONG, "--data", short, "--out", "alone")

    first = Process(program, folder, cache, *LONG, "--data", short, "--out", "spoiled")
    # While a checkpoint is being written, but not the first: there is one to go back to.
    first.wait_until(lambda: checkpoints() and list(spoiled.glob("checkpoints/*tmp*")))
    told["killed while writing"] = first.end(by=signal.SIGKILL)
    told["alone"] = alone.end()

    second = Process(program, folder, cache, "--out", "spoiled", "--resume")
    second.wait_until(second.is_training)
    time.sleep(random.Random(0).uniform(0.0, 0.5))
    told["stopped"] = second.end(by=signal.SIGINT)
    told["stopped says"], told["checkpoint of the stop"] = second.printed(), checkpoints()[-1]

    third = Process(program, folder, cache, "--out", "spoiled", "--resume")
    third.wait_until(third.is_training)
    time.sleep(random.Random(1).uniform(0.0, 0.5))
    told["killed at random"] = third.end(by=signal.SIGKILL)

    told["checkpoints before damage"] = checkpoints()
    files = [path for path in (spoiled / "checkpoints" / checkpoints()[-1]).rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-10])
    last = Process(program, folder, cache, "--out", "spoiled", "--resume")
    told["finished"], told["finished says"] = last.end(), last.printed()
    return told


def test_the_journey_went_as_planned(journey):
    assert journey["killed while writing"] == journey["killed at random"] == -signal.SIGKILL
    assert journey["alone"] == journey["finished"] == 0, journey["finished says"]
    assert journey["stopped"] == 130
    assert len(journey["checkpoints before damage"]) >= 2


def test_interrupting_saves_and_says_how_to_go_on(journey):
    last = journey["stopped says"].splitlines()[-1]
    step = int(journey["checkpoint of the stop"].removeprefix("step_"))
    assert last == f"stopped and saved after step {step} in spoiled; --resume goes on with it"


def test_a_damaged_checkpoint_is_skipped_with_a_warning(journey):
    newest = journey["checkpoints before damage"][-1]
    warnings = [line for line in journey["finished says"].splitlines() if line.startswith("warning: ")]
    assert [line for line in warnings if newest in line and "is missing or damaged" in line]


def test_killed_stopped_and_damaged_ends_as_if_left_alone(journey):
    alone, spoiled = (runs.curves(journey["folder"] / name) for name in ("alone", "spoiled"))
    assert len(alone[1]["fp8"][0]) == 200 and len(alone[0][0]["loss"]) == 200
    assert alone == spoiled
