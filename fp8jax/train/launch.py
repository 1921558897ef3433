"""Who started this process, and as which of how many: flags, torchrun, Kubernetes, Slurm.

    find(Launch(True, "10.0.0.1:1234", 4, 2), {})                      # the command line says it all
    find(Launch(True), {"MASTER_ADDR": ..., "MASTER_PORT": ..., "WORLD_SIZE": ..., "RANK": ...})
    find(Launch(True, "train-0.train:1234", 4), {"JOB_COMPLETION_INDEX": "2"})
    find(Launch(True), {"SLURM_PROCID": ...})                          # all is left to JAX

JAX itself knows Slurm, Open MPI, TPUs, and Kubernetes with the `kubernetes` package and the rights
that it needs; here is what it lacks. Flags and variables complete each other; where they contradict
each other, that is an error.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8jax.train.config import knob

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
KNOWN_TO_JAX = {"SLURM_PROCID": "Slurm", "OMPI_COMM_WORLD_RANK": "Open MPI"}
NEEDED = ("coordinator", "processes", "process")
FLAGS = "--coordinator HOST:PORT --processes N --process I"
EXPECTED = (
    f"{FLAGS}, or torchrun's variables ({', '.join(TORCHRUN)}), or Slurm's (start with srun), or, in a "
    "Kubernetes Indexed Job, --coordinator and --processes"
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a run is started over many devices and processes; a resumed run may be started in another way."""

    distributed: bool = knob(False, "train over many processes; flags or launcher say how", kept=False)
    coordinator: str = knob("", "HOST:PORT where process 0 awaits the others", kept=False)
    processes: int = knob(0, "how many they are; 0 is what the launcher says", least=0, kept=False)
    process: int = knob(-1, "which one this is, from 0; -1 is what the launcher says", least=-1, kept=False)
    patience: int = knob(300, "seconds that processes wait for each other at the start", least=1, kept=False)
    heartbeat: int = knob(30, "seconds of silence after which a process counts as gone", least=2, kept=False)
    devices: int = knob(
        1, "devices that share the batch, 0 for all; with --distributed always all", least=0, kept=False
    )
    zero: int = knob(
        0, "ZeRO: devices share 1 moments, 2 and gradients, 3 and weights", least=0, below=4, kept=False
    )
    offload: bool = knob(False, "keep moments in the host's memory", kept=False)


class Place(NamedTuple):
    """The place of this process among all; None is left to JAX."""

    coordinator: str | None  # HOST:PORT
    processes: int | None
    process: int | None
    local_device: int | None  # of this machine's accelerators, the one for this process
    source: str  # who said so


def find(launch: Launch, environ: Mapping[str, str]) -> Place | None:
    """The place that flags and variables say; None without `--distributed`.

    Args:
        launch: the flags.
        environ: as `os.environ`.

    Raises:
        ValueError: they are half given or contradict each other.
    """
    flags = _flags(launch)
    if not launch.distributed:
        if flags:
            raise ValueError(f"{_said(flags)} is for many processes; add --distributed or leave it out")
        return None
    launcher = next((name for variable, name in KNOWN_TO_JAX.items() if variable in environ), "")
    variables = _torchrun(environ, launcher) or _kubernetes(environ, flags)
    for name in flags.keys() & variables.keys():
        if flags[name].value != variables[name].value:
            raise ValueError(
                f"{flags[name].how} contradicts {variables[name].how} in the environment; leave the flag out"
            )
    found = variables | flags
    missing = [name for name in NEEDED if name not in found]
    if missing and found and not launcher:
        raise ValueError(
            f"--distributed found {_said(found)} but no {' and no '.join(missing)}; expected {EXPECTED}"
        )
    _check(found)
    by_variables = "torchrun's variables" if "coordinator" in variables else "JOB_COMPLETION_INDEX"
    sources = [name for name, facts in (("flags", flags), (by_variables, variables)) if facts]
    if missing:
        sources.append(launcher or "JAX")
    return Place(
        **{name: found[name].value if name in found else None for name in NEEDED},
        local_device=_local_device(environ, variables),
        source=" and ".join(sources),
    )


class _Fact(NamedTuple):
    value: Any
    how: str  # --process 1, RANK=1


def _said(facts: Mapping[str, _Fact]) -> str:
    return ", ".join(dict.fromkeys(fact.how for fact in facts.values()))


def _flags(launch: Launch) -> dict[str, _Fact]:
    unset = {"coordinator": "", "processes": 0, "process": -1}
    given = {name: getattr(launch, name) for name in NEEDED if getattr(launch, name) != unset[name]}
    return {name: _Fact(value, f"--{name} {value}") for name, value in given.items()}


def _torchrun(environ: Mapping[str, str], launcher: str) -> dict[str, _Fact]:
    """What torchrun's variables say, if it started this process."""
    given = {name: environ[name] for name in TORCHRUN if name in environ}
    # Scripts for Slurm set the address for torch alone; then Slurm's own variables have the rest.
    if not given.keys() & {"WORLD_SIZE", "RANK"} or (launcher and len(given) < len(TORCHRUN)):
        return {}
    how = {name: f"{name}={value}" for name, value in given.items()}
    missing = [name for name in TORCHRUN if name not in given]
    if missing:
        raise ValueError(
            f"--distributed found {', '.join(how.values())} but no {' and no '.join(missing)}; set all of "
            f"torchrun's variables, or none of them and give {FLAGS}"
        )
    port = _number(environ, "MASTER_PORT")
    # torchrun's agent then listens on that port itself.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = f"{given['MASTER_ADDR']}:{port}"
    return {
        "coordinator": _Fact(address, f"{how['MASTER_ADDR']} {how['MASTER_PORT']}"),
        "processes": _Fact(_number(environ, "WORLD_SIZE"), how["WORLD_SIZE"]),
        "process": _Fact(_number(environ, "RANK"), how["RANK"]),
    }


def _kubernetes(environ: Mapping[str, str], flags: Mapping[str, _Fact]) -> dict[str, _Fact]:
    """The index of an Indexed Job's pod, if flags say the rest; if not, JAX asks Kubernetes for all."""
    name = "JOB_COMPLETION_INDEX"
    if name not in environ or not flags:
        return {}
    return {"process": _Fact(_number(environ, name), f"{name}={environ[name]}")}


def _local_device(environ: Mapping[str, str], variables: Mapping[str, _Fact]) -> int | None:
    """torchrun starts one process per accelerator, or one per machine, which then has them all."""
    alone = environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    return None if alone or "coordinator" not in variables else _number(environ, "LOCAL_RANK")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name} in the environment must be a whole number; got {text!r}")
    return int(text)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _check(found: Mapping[str, _Fact]) -> None:
    address, count, index = (found.get(name) for name in NEEDED)
    if address and not (re.fullmatch(r"\S+:\d{1,5}", address.value) and _port(address.value) < 2**16):
        raise ValueError(f"the coordinator must be HOST:PORT, with a port below 65536; got {address.how}")
    if count and index and not 0 <= index.value < count.value:
        raise ValueError(
            f"processes count from 0, so with {count.how} the last is {count.value - 1}; got {index.how}"
        )
