"""Many processes: start them, let process 0 decide, and end together.

    initialize(config, "train_gpt")             # before JAX finds its devices; nothing without --distributed
    folder = decide(lambda: new_folder())       # process 0 decides, all get the result
    if any_of(is_interrupted): ...              # all get the same answer
    return leave(2, "train_gpt: bad input")     # ends this process, and so the others

In a single process each function is what it would be without other processes.
"""

import contextlib
import itertools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the processes' key-value store has no public name
from jax.experimental import multihost_utils

from fp8jax import signals
from fp8jax.train.config import DeviceConfig
from fp8jax.train.errors import BadInput

LOST = 75  # exit status when another process is gone: EX_TEMPFAIL of sysexits.h, "try again later"
_DAY = 24 * 3600 * 1000  # ms: process 0 may take long; if it dies, JAX ends the wait
_LOSS = ("gloo", "nccl", "coordination")  # words of JAX 0.10's errors when another process is gone
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_numbers = itertools.count()


def cluster_of(config: DeviceConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `jax.distributed.initialize` that flags and torchrun's variables give.

    JAX itself knows Slurm, Open MPI, Kubernetes and TPUs, and fills in what is missing.

    Raises:
        ValueError: flags and variables contradict each other, or a value is malformed.
    """
    unset = {"coordinator": "", "processes": 0, "process": -1}
    given = {name: getattr(config, name) for name in unset if getattr(config, name) != unset[name]}
    if not config.distributed:
        for name in given:
            raise ValueError(f"--{name} is for many processes; add --distributed or leave it out")
        return {}
    torchrun = _torchrun(environ)
    for name in given.keys() & torchrun.keys():
        if given[name] != torchrun[name]:
            raise ValueError(f"--{name} {given[name]} contradicts torchrun's {torchrun[name]}; leave it out")
    address, count, index = ({**torchrun, **given}.get(name) for name in unset)
    if address and not re.fullmatch(r"\S+:\d{1,5}", address):
        raise ValueError(f"the coordinator must be HOST:PORT; got {address}")
    if count and index is not None and index >= count:
        raise ValueError(f"{count} processes are numbered from 0 to {count - 1}; got process {index}")
    arguments = {"coordinator_address": address, "num_processes": count, "process_id": index}
    if None not in arguments.values():
        arguments["cluster_detection_method"] = "deactivate"
    if torchrun and environ.get("LOCAL_WORLD_SIZE", "1") != "1":  # else a process has all of its machine's
        arguments["local_device_ids"] = int(environ["LOCAL_RANK"])
    return {name: value for name, value in arguments.items() if value is not None}


def _torchrun(environ: Mapping[str, str]) -> dict[str, Any]:
    # Scripts for Slurm may set some of the variables for torch; then JAX reads Slurm's.
    if not all(name in environ for name in _TORCHRUN):
        return {}
    try:
        port, count, index = (int(environ[name]) for name in _TORCHRUN[1:])
    except ValueError as error:
        raise ValueError(f"{', '.join(_TORCHRUN[1:])} must be whole numbers: {error}") from None
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun listens on that port itself
    return {"coordinator": f"{environ['MASTER_ADDR']}:{port}", "processes": count, "process": index}


def initialize(config: DeviceConfig) -> None:
    """Connects the processes. Only process 0 prints to the standard output from then on.

    Raises:
        ValueError: flags and variables do not say which process this is, or contradict each other.
    """
    arguments = cluster_of(config, os.environ)
    if not config.distributed or jax.distributed.is_initialized():
        return
    # Its SIGTERM handler would keep processes alive; `stop_requests` has its own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=config.patience,
            heartbeat_timeout_seconds=config.heartbeat,
        )
    except ValueError as error:
        raise ValueError(
            f"--distributed found no launcher ({error}); expected --coordinator HOST:PORT --processes N "
            f"--process I, or torchrun's variables ({', '.join(_TORCHRUN)}), or Slurm's (start with srun)"
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the processes cannot meet: {error}") from None
    if not is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    state = distributed.global_state
    print(
        f"{state.num_processes} processes with {jax.device_count()} devices; process 0 is at "
        f"{state.coordinator_address}",
        flush=True,
    )


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return distributed.global_state.process_id == 0


def devices(count: int, is_distributed: bool = False) -> list[Any]:
    """The devices of all processes; in a single process the first `count`, or all for 0.

    Raises:
        ValueError: there are fewer, or JAX finds none; or `is_distributed`, and this process is alone.
    """
    if is_distributed and not jax.distributed.is_initialized():
        raise ValueError(
            "--distributed: expected connected processes, got this one alone; call "
            "`fp8jax.train.distributed.initialize(config)` first in the program, or leave --distributed out"
        )
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX finds no devices: {error}") from None
    if jax.distributed.is_initialized():
        return found
    if count > len(found):
        raise ValueError(
            f"--devices must be at most the {len(found)} that this process has; got {count}. A CPU is more "
            f"than one with XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return found[: count or None]


def decide(make: Callable[[], Any]) -> Any:
    """Calls `make` in process 0 and gives its result, or raises its ValueError, in all processes.

    Args:
        make: gives a value that JSON can hold.
    """
    client = distributed.global_state.client
    if client is None:
        return make()
    name = f"fp8jax/decision-{next(_numbers)}"
    if is_first():
        try:
            outcome = [make(), None]
        except ValueError as error:
            outcome = [None, str(error)]
        client.key_value_set(name, json.dumps(outcome))
    value, error = json.loads(client.blocking_key_value_get(name, _DAY))
    if error is not None:
        raise ValueError(error)
    return value


def wait_for_all() -> None:
    """Waits until all processes are here."""
    client = distributed.global_state.client
    if client:
        client.wait_at_barrier(f"fp8jax/barrier-{next(_numbers)}", _DAY)


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any process; all processes have to ask."""
    return bool(largest(int(flag)))


def largest(number: int) -> int:
    """The largest of the processes' numbers; all processes have to ask."""
    if distributed.global_state.client is None:
        return number
    return int(multihost_utils.process_allgather(np.array(number)).max())


def warn(text: str) -> None:
    """Prints a warning, once for all processes."""
    if is_first():
        print(f"warning: {text}", file=sys.stderr)


def is_loss(error: Exception) -> bool:
    """Whether JAX reports by this error that another process is gone."""
    return distributed.global_state.client is not None and any(word in str(error).lower() for word in _LOSS)


def leave(status: int, line: str) -> int:
    """Prints an error and gives `status`; one of many processes ends at once.

    Python's own exit would wait for the other processes, which wait in a collective for this one.
    """
    with contextlib.suppress(OSError):  # the standard error may be a closed pipe
        print(line, file=sys.stderr, flush=True)
    if distributed.global_state.client is not None:
        if is_first():
            time.sleep(1)  # the others still read from it what it decided
        os._exit(status)
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk: the interpreter would complain once more at its end
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return status


def run_program(name: str, program: Callable[[], int]) -> int:
    """Runs a program and returns its exit status. What its user can mend is an error of one line.

    The status is the program's, or 2 for such an error, 75 where another process is gone, 130 after a Ctrl-C.

    Args:
        name: of the program, with which the line begins.
        program: returns its status; raises `BadInput` for bad input, OSError if a file cannot be written.
    """
    interrupted = f"{name}: interrupted; --resume goes on from the last checkpoint"
    try:
        with signals.ends_program(interrupted):
            return program()
    except (BadInput, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.errno and not error.filename:
            reason = f"its output cannot be written ({error.strerror})"
        return leave(2, f"{name}: {reason}")
    except KeyboardInterrupt:
        return leave(signals.INTERRUPTED, interrupted)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        if is_loss(error):
            return leave(LOST, f"{name}: another process is gone ({text}); start all again with --resume")
        if isinstance(error, jax.errors.JaxRuntimeError) and "out of memory" in text.lower():
            return leave(2, f"{name}: {text}; use a smaller model or batch")
        if distributed.global_state.client is not None:
            leave(1, traceback.format_exc())
        raise
