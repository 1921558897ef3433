"""One program in many processes: they meet, agree, and none waits for one that is gone.

    join(launch, "train_gpt")                   # before JAX finds its devices; nothing without --distributed
    folder = decide(lambda: new_folder())       # process 0 decides, all get the answer
    if any_of(stop_asked): ...                  # all get the same answer
    return leave(2, "train_gpt: bad input")     # ends this process at once, and so the others

Alone, each of them is what it would be without other processes. When a process dies, collectives of
the others fail at once, or JAX's coordinator misses its heartbeat and JAX aborts them: either way they
say in one line what happened and what to do, and end with the exit status `LOST`.
"""

import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # its client, the key-value store of all processes, has no public name
from jax.experimental import multihost_utils

from fp8jax.train import launch as launching

LOST = 75  # exit status when another process is gone: sysexits.h's EX_TEMPFAIL, "try again later"
_DAY = 24 * 3600 * 1000  # ms: process 0 may take long for what the others wait for; its death ends the wait
# How errors of collectives and of the coordinator read, with JAX 0.10, gloo and NCCL.
_SIGNS = ("gloo", "nccl", "coordination")
_numbers = itertools.count()
_ending = threading.Lock()
_words: list[Callable[[str], str]] = []  # what to say at a loss; its reason comes in
_called_by_c: list[Any] = []  # has to live as long as the process


def join(launch: launching.Launch, program: str) -> None:
    """Meets the other processes. Of all standard outputs only that of process 0 stays open.

    Args:
        launch: says whether to, and where.
        program: its name, for its last words.

    Raises:
        ValueError: nothing says which process this is, or things contradict each other.
    """
    place = launching.find(launch, os.environ)
    if place is None or jax.distributed.is_initialized():
        return
    # Its SIGTERM handler would keep processes alive; `fp8jax.train.stop` has its own.
    jax.config.update("jax_enable_preemption_service", False)
    where = place.coordinator or "their coordinator"
    _words[:] = [
        lambda reason: (
            f"not all processes met at {where} within {launch.patience} s ({reason}); start as many as there "
            "are to be, give each a number of its own from 0, and all the address of process 0"
        )
    ]
    _tell_of_losses(program)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            place.local_device,
            cluster_detection_method="deactivate" if None not in place[:3] else None,
            initialization_timeout=launch.patience,
            heartbeat_timeout_seconds=launch.heartbeat,
        )
    except ValueError as error:
        raise ValueError(
            f"--distributed found no launcher ({error}); expected {launching.EXPECTED}"
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"process 0 cannot listen at {where} ({error}); give another port") from None
    on_loss(lambda: "start all of them again")
    if not is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    state = distributed.global_state
    found = f"{state.num_processes} processes with {jax.device_count()} devices, found by {place.source}"
    print(f"{found}; they meet at {state.coordinator_address}", flush=True)


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return distributed.global_state.process_id == 0


def devices(asked: int) -> list[Any]:
    """All devices of all processes; without other processes as many as are asked for, 0 for all.

    Raises:
        ValueError: there are not so many, or JAX_PLATFORMS names none.
    """
    try:
        there = jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX finds no devices: {error}") from None
    if jax.distributed.is_initialized():
        return there
    if asked > len(there):
        raise ValueError(
            f"--devices must be at most the {len(there)} that this process has; got {asked}. A CPU is more "
            f"than one with XLA_FLAGS=--xla_force_host_platform_device_count={asked}"
        )
    return there[: asked or None]


def decide(make: Callable[[], Any]) -> Any:
    """What `make` gives, or the ValueError that it raises, in process 0; the same in all processes.

    Args:
        make: called in process 0 only; gives something that JSON can hold.
    """
    client = distributed.global_state.client
    if client is None:
        return make()
    name = f"fp8jax/decision-{next(_numbers)}"
    if is_first():
        try:
            outcome = {"value": make()}
        except ValueError as error:
            outcome = {"error": str(error)}
        client.key_value_set(name, json.dumps(outcome))
    outcome = json.loads(client.blocking_key_value_get(name, _DAY))
    if "error" in outcome:
        raise ValueError(outcome["error"])
    return outcome["value"]


def meet() -> None:
    """Waits until all processes are here."""
    client = distributed.global_state.client
    if client is not None:
        client.wait_at_barrier(f"fp8jax/meeting-{next(_numbers)}", _DAY)


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any of the processes, all of which have to ask."""
    if distributed.global_state.client is None:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def warn(text: str) -> None:
    """Prints a warning, once for all processes."""
    if is_first():
        print(f"warning: {text}", file=sys.stderr)


def on_loss(advice: Callable[[], str]) -> None:
    """What to say from now on when another process is gone: that, and the advice."""
    _words[:] = [lambda reason: f"another process is gone ({reason}); {advice()}"]


def leave(status: int, line: str) -> int:
    """Prints an error and gives `status`, or ends one of many processes with it at once.

    Python's own way out would wait for the others, and they wait in a collective for this one.
    """
    if distributed.global_state.client is not None:
        _end(status, line)
    print(line, file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # a pipe that is closed, a disk that is full: the interpreter would complain at its end
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return status


def _end(status: int, line: str) -> None:
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # another thread is at it
    print(line, file=sys.stderr, end="\n" if line else "", flush=True)
    if is_first():
        time.sleep(1)  # it is the coordinator: the others still learn from it what it had decided
    sys.stdout.flush()
    os._exit(status)


def _tell_of_losses(program: str) -> None:
    """Has the loss of a process told in one line, wherever it shows."""

    def on_error(kind: Any, error: Any, traceback: Any) -> None:
        text = " ".join(str(error).split())
        if any(sign in text.lower() for sign in _SIGNS):
            _end(LOST, f"{program}: {_words[0](text[:200])}")
        sys.__excepthook__(kind, error, traceback)
        _end(1, "")

    # When its coordinator reports a loss, JAX calls abort() in a thread of its own. It takes no Python
    # function to call instead (std::bad_cast in 0.10), but after such an abort Python can still run.
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def on_abort(number: int) -> None:
        _end(LOST, f"{program}: {_words[0]('JAX says above why')}")

    _called_by_c.append(on_abort)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(on_abort, ctypes.c_void_p))
    sys.excepthook = on_error
