"""Batches: each example once an epoch, the same ones whoever reads them, and from anywhere on."""

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.train import BadInput, Loader, TokenFile, checkpoint, prefetch_to_device, write_tokens
from fp8jax.train.data.loader import Examples


def numbers(loader, count=None):
    """The next batches of a loader of numbers, or all of them."""
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def loader_of(examples=23, **options):
    return Loader(np.arange(examples), **{"batch": 4, "seed": 0, **options})


class Pair(NamedTuple):
    x: np.ndarray
    y: int


class Rows:
    """A source that has what one needs, and no more; rows as Hugging Face's datasets give them."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"ids": [index, index + 1, index + 2], "label": index, "nested": {"weight": index / 2}}


@pytest.mark.parametrize(
    "source, second",
    [
        (np.arange(12.0).reshape(6, 2), np.array([[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]])),
        ([[1, 2]] * 3 + [[3, 4]] * 3, np.array([[3, 4]] * 3)),
        ([(np.float32(i), i) for i in range(6)], (np.array([3, 4, 5], np.float32), np.array([3, 4, 5]))),
        (
            [Pair(np.ones(2) * i, i) for i in range(6)],
            Pair(np.ones((3, 2)) * [[3], [4], [5]], np.arange(3, 6)),
        ),
        (
            Rows(),
            {
                "ids": np.array([[3, 4, 5], [4, 5, 6], [5, 6, 7]]),
                "label": np.array([3, 4, 5]),
                "nested": {"weight": np.array([1.5, 2.0, 2.5])},
            },
        ),
    ],
    ids=["array", "lists", "tuples", "named tuples", "dicts"],
)
def test_examples_of_any_kind_are_stacked(source, second):
    _, batch = Loader(source, batch=3, seed=0, shuffle=False, epochs=1)
    assert jax.tree.structure(batch) == jax.tree.structure(second)
    for found, expected in zip(jax.tree.leaves(batch), jax.tree.leaves(second), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("examples, batch", [(24, 4), (23, 4), (5, 5)])
def test_an_epoch_has_each_example_at_most_once(examples, batch):
    loader = loader_of(examples, batch=batch, epochs=3)
    found = numbers(loader)
    assert len(found) == 3 * loader.batches_per_epoch == 3 * (examples // batch)
    epochs = [sum(found[i::1][: examples // batch], []) for i in range(0, len(found), examples // batch)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == examples // batch * batch
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(loader) == []


def test_without_shuffling_the_order_is_the_source_s():
    assert numbers(loader_of(9, shuffle=False), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_the_order_is_the_seed_s():
    """Grain adds the epoch to its seed: taken as it is, the next seed's first epoch is this one's second."""
    orders = {seed: numbers(loader_of(seed=seed), 10) for seed in (0, 1, 2, 2**40)}
    assert numbers(loader_of(seed=1), 10) == orders[1]
    epochs = [str(order[at : at + 5]) for order in orders.values() for at in (0, 5)]
    assert len(set(epochs)) == 8


def test_the_order_is_what_it_was():
    """A run that goes on with a newer grain has to see the same batches: if this fails, tell users."""
    assert numbers(loader_of(), 7)[::3] == [[18, 8, 16, 7], [21, 15, 3, 2], [0, 7, 10, 16]]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_have_their_rows_of_the_same_batches(count):
    parts = [loader_of(epochs=2, shard=(index, count)) for index in range(count)]
    joined = [sum(rows, []) for rows in zip(*map(numbers, parts), strict=True)]
    assert joined == numbers(loader_of(epochs=2))
    assert all(part.state() == parts[0].state() for part in parts)


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 9, 10])
def test_any_position_can_be_gone_back_to(taken):
    expected = numbers(loader_of(epochs=2))
    first = loader_of(epochs=2)
    assert numbers(first, taken) == expected[:taken]
    state = json.loads(json.dumps(first.state()))
    assert numbers(first) == expected[taken:]
    for options in ({}, {"prefetch": 0}, {"prefetch": 3}):
        other = loader_of(epochs=2, **options)
        numbers(other, 3)
        other.restore(state)
        assert other.state() == state and numbers(other) == expected[taken:]
    part = loader_of(epochs=2, shard=(1, 2))  # what one process wrote, one of two reads
    part.restore(state)
    assert numbers(part) == [rows[2:] for rows in expected[taken:]]


def test_a_position_has_no_numbers_of_numpy():
    state = loader_of(seed=np.int64(0), batch=np.int64(4)).state()
    assert json.loads(json.dumps(state)) == loader_of().state()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"seed": 1}, "its seed was 0, here it is 1"),
        ({"batch": 8}, "its batch was 4, here it is 8"),
        ({"examples": 24}, "its examples was 23, here it is 24"),
        ({"shuffle": False}, "its shuffle was True, here it is False"),
    ],
)
def test_the_state_of_another_order_is_refused(options, says):
    with pytest.raises(ValueError) as caught:
        loader_of(**options).restore(loader_of().state())
    assert str(caught.value).startswith("`state` is of another loader: ") and says in str(caught.value)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"batch": 0}, "`batch` must be at least 1; got 0"),
        ({"seed": -1}, "`seed` must be at least 0; got -1"),
        ({"workers": -1}, "`workers` must be at least 0; got -1"),
        ({"workers": 1, "prefetch": 0}, "`prefetch` must be at least 1; got 0"),
        ({"epochs": 0}, "`epochs` must be at least 1; got 0"),
        ({"shard": (2, 2)}, "`shard` must be (index, count) with 0 <= index < count; got (2, 2)"),
        ({"shard": (0, 3)}, "`batch` must be a multiple of the 3 shards; got 4"),
        ({"examples": 3}, "`source` has 3 examples, fewer than one `batch` of 4"),
    ],
)
def test_bad_arguments_say_what_is_legal(options, says):
    with pytest.raises(ValueError) as caught:
        loader_of(**options)
    assert str(caught.value) == says


def test_a_mapped_array_is_not_copied_to_workers(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.uint16, "w+", shape=(9, 2))
    with pytest.raises(ValueError, match="give a TokenFile, or workers=0"):
        Loader(mapped, batch=2, seed=0, workers=1)
    assert next(Loader(mapped, batch=2, seed=0)).shape == (2, 2)


@pytest.mark.parametrize("example", [None, {"x": None}, object()])
def test_what_is_no_array_is_refused(example):
    """Grain alone takes None for an example that a filter took away, and looks for the next one, for ever."""
    with pytest.raises(TypeError, match="an example must be an array"):
        next(Loader([example] * 5, batch=2, seed=0))


@pytest.mark.parametrize(
    "row, says",
    [
        ({"x": np.ones(2), "y": 0}, r"shape \(3,\) at row 7\['x'\], as in row 0; got shape \(2,\)\. Leave"),
        ({"x": np.ones(3)}, r"shape \(\) at row 7\['y'\], as in row 0; got no array\."),
        ({"x": np.ones(3), "y": 0, "z": 0}, r"no array at row 7\['z'\], as in row 0; got shape \(\)"),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_row_of_another_shape(row, says, batch):
    source = [{"x": np.ones(3), "y": i} for i in range(12)]
    source[7] = row
    with pytest.raises(BadInput, match=f"`source`: expected {says}"):
        list(Loader(source, batch=batch, seed=0, epochs=1))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_row_that_raises_stop_iteration(prefetch):
    """An iterator would take it for its end, and go on after the batch."""

    def transform(example):
        return next(iter([] if example == 7 else [example]))

    loader = Loader(range(12), batch=4, seed=0, shuffle=False, transform=transform, prefetch=prefetch)
    batches = prefetch_to_device(loader, size=0)
    assert next(batches).tolist() == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="`source`: reading row 7 raised StopIteration"):
            next(batches)
    assert batches.state()["taken"] == 1


@pytest.mark.parametrize("count", [1, 2, 16, 1000])
def test_a_fingerprint(count):
    """Other examples between the first and the last change it. Runs of 0.1.0 have one of these two."""
    data = np.arange(count)
    found = Examples(data, None).fingerprint()
    assert Examples(list(data), None).fingerprint(found) == found
    other = data.copy()
    other[1:-1] = -1
    assert (Examples(other, None).fingerprint(found) == found) == (count < 3)
    ends = b"".join(b"int64()" + data[i].tobytes() for i in (0, -1))
    old = hashlib.sha256(str(count).encode() + ends).hexdigest()
    assert Examples(data, None).fingerprint(old) == old


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_failed_is_not_skipped(prefetch):
    broken = [True]

    def transform(example):
        if broken[0] and example == expected[2][1]:
            raise OSError("the disk is away")
        return example

    expected = numbers(loader_of(), 6)
    loader = loader_of(transform=transform, prefetch=prefetch)
    assert numbers(loader, 2) == expected[:2]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is away"):
            next(loader)
    broken[0] = False
    assert loader.state()["taken"] == 2 and numbers(loader, 4) == expected[2:]


# --- to the device ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3])
def test_what_is_read_ahead_is_not_taken(size):
    expected = numbers(loader_of(epochs=2))
    loader = loader_of(epochs=2)
    batches = prefetch_to_device(loader, size)
    assert batches.state() == loader_of(epochs=2).state()
    for taken, rows in enumerate(expected[:4], 1):
        batch = next(batches)
        assert isinstance(batch, jax.Array) and batch.tolist() == rows
        assert batches.state()["taken"] == taken
        assert loader.state()["taken"] == taken + size
    state = batches.state()
    assert numbers(batches) == expected[4:]
    assert batches.state()["taken"] == 10 and list(batches) == []
    batches.restore(state)
    assert batches.state() == state and numbers(batches) == expected[4:]


def test_batches_are_spread_over_devices():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    source = [{"x": np.full(3, i), "y": i} for i in range(8)]
    batch = next(prefetch_to_device(Loader(source, batch=8, seed=0, shuffle=False), sharding=sharding))
    assert batch["x"].sharding == batch["y"].sharding == sharding
    assert batch["x"].addressable_shards[1].data.tolist() == [[2] * 3, [3] * 3]


def test_a_number_of_batches_ahead_that_there_is_not():
    with pytest.raises(ValueError, match="`size` must be at least 0; got -1"):
        prefetch_to_device(loader_of(), -1)


def test_a_checkpoint_has_where_the_batches_stopped(tmp_path):
    weights, expected = {"w": jax.numpy.ones(2)}, numbers(loader_of(), 12)
    batches = prefetch_to_device(loader_of())
    numbers(batches, 7)
    checkpoint.save(tmp_path, 7, weights, {"data": batches.state()})
    numbers(batches, 2)  # as a run does until it is killed
    resumed = prefetch_to_device(loader_of())
    found, _ = checkpoint.restore(tmp_path, weights)
    resumed.restore(found.metadata["data"])
    assert numbers(resumed, 5) == expected[7:]
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 9, weights, {"data": loader_of()})
    assert checkpoint.last_step(tmp_path) == 7 and len(list(tmp_path.iterdir())) == 1


# --- workers ----------------------------------------------------------------------------------


def with_reader(window):
    """A window, who read it, and whether that one would look for a GPU, or has looked for anything."""
    from jax._src import xla_bridge

    only_cpu = os.environ["JAX_PLATFORMS"] == "cpu" == sys.modules["jax"].config.jax_platforms
    return {"ids": window, "by": os.getpid(), "off": only_cpu and not xla_bridge.backends_are_initialized()}


def token_loader(folder, **options):
    path = folder / "ids.npy"
    if not path.exists():
        write_tokens(path, np.arange(1000))
    options = {"batch": 4, "seed": 3, "epochs": 2, **options}
    return Loader(TokenFile(path, 30), **options)  # 33 windows, 8 batches an epoch


def test_a_worker_goes_on_where_a_thread_stopped(tmp_path, monkeypatch):
    expected = list(token_loader(tmp_path))
    alone = token_loader(tmp_path)
    list(itertools.islice(alone, 6))
    monkeypatch.setenv("JAX_PLATFORMS", "")  # which a worker inherits
    with token_loader(tmp_path, workers=1, transform=with_reader) as loader:
        batches = prefetch_to_device(loader)
        batches.restore(alone.state())
        found = list(batches)
    np.testing.assert_array_equal(np.stack([batch["ids"] for batch in found]), np.stack(expected[6:]))
    assert len({int(pid) for batch in found for pid in batch["by"]} | {os.getpid()}) == 2
    assert all(batch["off"].all() for batch in found)


@pytest.mark.long
def test_workers_change_nothing(tmp_path):
    """15 batches: one worker has more than the other."""
    options = {"batch": 6, "epochs": 3}
    expected = list(token_loader(tmp_path, **options))
    with token_loader(tmp_path, workers=2, transform=with_reader, **options) as loader:
        first = list(itertools.islice(loader, 5))
        state = loader.state()
        rest = list(loader)
        loader.restore(state)
        again = list(loader)
    assert len({int(pid) for batch in first for pid in batch["by"]}) == 2
    for found in (first + rest, first + again):
        np.testing.assert_array_equal(np.stack([batch["ids"] for batch in found]), np.stack(expected))


@pytest.mark.long
def test_workers_of_a_shard_go_on(tmp_path):
    """Three of them, from the 6th of 16 batches."""
    alone = token_loader(tmp_path, shard=(1, 2))
    list(itertools.islice(alone, 5))
    with token_loader(tmp_path, workers=3, shard=(1, 2), transform=with_reader) as loader:
        loader.restore(alone.state())
        found = list(loader)
    assert len({int(pid) for batch in found for pid in batch["by"]}) == 3
    np.testing.assert_array_equal(np.stack([batch["ids"] for batch in found]), np.stack(list(alone)))


@pytest.mark.long
def test_a_worker_that_fails_or_dies_is_told_of(tmp_path):
    there = tmp_path / "there"
    there.touch()

    def fail(window):
        if there.exists() and window[0] == 30:
            if there.read_text() == "die":
                os._exit(7)
            raise OSError("the disk is away")
        return window

    expected = list(token_loader(tmp_path))
    with token_loader(tmp_path, workers=1, transform=fail) as loader:
        found = []

        def take_all():
            for batch in loader:
                found.append(batch)

        for content, error, says in (("", OSError, "the disk is away"), ("die", RuntimeError, "exit code 7")):
            there.write_text(content)
            with pytest.raises(error, match=says):
                take_all()
        there.unlink()
        take_all()
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))


PROGRAM = """
import os, signal, subprocess, sys
import numpy as np
from fp8jax.train import Loader

if __name__ == "__main__":
    loader = Loader(np.arange(100).reshape(20, 5), batch=4, seed=0, workers=1)
    print(next(loader).shape, flush=True)
    if sys.argv[1:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:] == ["stopped"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
            subprocess.run(["kill", f"-{number:d}", "0"])  # all of the group, as a terminal does
        assert len([next(loader) for _ in range(20)]) == 20
"""


@pytest.mark.long
def test_end_of_a_program_with_workers(tmp_path):
    """Grain alone prints tracebacks at the end, leaves a process behind, and loses its workers to Ctrl-C."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for arguments, status in ([], 0), (["killed"], -signal.SIGKILL), (["stopped"], 0):
        run = [sys.executable, str(tmp_path / "program.py"), *arguments]
        # Workers have the pipes too: this returns when the last of them has ended.
        ended = subprocess.run(run, capture_output=True, text=True, timeout=120, start_new_session=True)
        assert (ended.returncode, ended.stdout) == (status, "(4, 5)\n")
        assert status or not ended.stderr
