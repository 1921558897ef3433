"""Measure fp8jax on a GPU: correctness first, then speed, memory and convergence, in under 8 minutes.

    python examples/bench/gpu.py                                  # a record in examples/records/
    python examples/bench/gpu.py --minutes 20 --data text.txt     # more rounds, a longer convergence
    python examples/bench/gpu.py --only correctness gemm
    python examples/bench/gpu.py --device cpu --tiny --record runs     # the dry run: no GPU needed

Needs JAX with CUDA, Flax, optax and matplotlib; torch, TransformerEngine and others are measured where they
are installed. fp8jax itself is that of this checkout. Sections run in order of worth (on_gpu/ has a file for
each), each in a process of its own with a share of the time: one that fails, hangs or takes the GPU down with
it is noted, and the next goes on. What a section leaves unused goes to those after it, and convergence gets
the rest. The record is written anew after each section, and says of each target: held, missed, or why it was
not run.
"""

import argparse
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# This checkout's fp8jax, installed or not; this folder is on the path as that of the program.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import output
from on_gpu import convergence, correctness, gemm, layers, optimizer, record, train
from on_gpu.notes import Given, Notes

HERE = pathlib.Path(__file__).resolve().parent


class Section(NamedTuple):
    """A measurement, and its share of the time: seconds out of 450."""

    measure: Callable[[Given, Notes], None]
    share: float


SECTIONS = {
    "correctness": Section(correctness.measure, 60),
    "gemm": Section(gemm.measure, 40),
    "layer": Section(layers.measure, 80),
    "optimizer": Section(optimizer.measure, 40),
    "GPT-350M": Section(functools.partial(train.measure, name="GPT-350M"), 85),
    "GPT-124M": Section(functools.partial(train.measure, name="GPT-124M"), 50),
    "convergence": Section(convergence.measure, 95),
}

GRACE_S = 15  # that a section may be late before it is killed
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "ml_dtypes", "numpy", "torch")
PACKAGES += ("transformer_engine", "transformer_engine_jax", "nvidia-cublas", "nvidia-cudnn-cu13")

# For every section's process. Triton off: what NVIDIA advises for JAX, and untimed GEMMs compile faster; the
# same for all ways. Memory is not taken in advance, so that torch finds some.
XLA_FLAGS = "--xla_gpu_enable_triton_gemm=false"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
}


def run_section(name: str, given: Given, path: pathlib.Path) -> None:
    """Measures, in this process; the notes are in the file."""
    notes = Notes(path)
    with notes.attempt(name):
        if given.device == "gpu" and jax.default_backend() != "gpu":
            raise RuntimeError(f"JAX found no GPU: its devices are {jax.devices()}")
        SECTIONS[name].measure(given, notes)
    notes.add("state", "after", record.gpu("clocks.sm,power.draw,temperature.gpu"))


def run_apart(name: str, given: Given, path: pathlib.Path, cache: str) -> None:
    """Measures in a process of its own, which is killed if it is late."""
    command = [sys.executable, str(HERE / "gpu.py"), "--device", given.device, "--data", given.data]
    command += ["--section", name, "--until", str(given.until), "--notes", str(path)]
    command += ["--tiny"] if given.tiny else []
    command += ["--batch", str(given.batch)] if given.batch else []
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    if given.device == "gpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
        environment |= {**ENVIRONMENT, "XLA_FLAGS": flags}
    said = path.with_suffix(".log")
    with said.open("w") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = child.wait(timeout=max(given.left, 0) + GRACE_S)
            reason = f"its process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = "it was late and was killed"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if reason:
        notes = Notes(path, resume=True)
        notes.skip(name, reason)
        notes.add("errors", name, said.read_text(errors="replace")[-4000:])


def measure_all(args: argparse.Namespace, kept: record.Record) -> None:
    """The sections in order, each with its share of the time that is left."""
    end = time.time() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(args.only):
            begun = time.time()
            shares = [SECTIONS[other].share for other in args.only[number:]]
            until = begun + (end - begun) * shares[0] / sum(shares)
            given = Given(args.device, args.tiny, until, args.data, args.batch)
            path = pathlib.Path(folder) / f"{number}.json"
            print(f"{name}: at most {given.left:.0f} s", flush=True)
            if args.apart:
                run_apart(name, given, path, folder)
            else:
                run_section(name, given, path)
            found = json.loads(path.read_text())
            kept.add(name, {**found, "seconds": time.time() - begun})
            for title, rows in found["tables"].items():
                print(f"{title}\n{output.table(rows)}\n", flush=True)
            for what, reason in found["skipped"].items():
                print(f"not measured: {what}: {reason}", flush=True)


def start(args: argparse.Namespace) -> record.Record:
    """An empty record."""
    driver = record.gpu("name,driver_version,memory.total,power.limit,clocks.max.sm")
    words = driver.split(",")[0].removeprefix("NVIDIA ").lower().split()
    device = words[0] if args.device == "gpu" and words else output.cpu_name()
    about: dict[str, Any] = output.environment(device, PACKAGES)
    about |= {"gpu": driver, "XLA_FLAGS": XLA_FLAGS if args.device == "gpu" else "", "minutes": args.minutes}
    name = f"{about['date']}_{device}_gpu{'_tiny' if args.tiny else ''}"
    is_judged = args.device == "gpu" and not args.tiny
    return record.Record(record.free_folder(pathlib.Path(args.record), name), about, is_judged)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--minutes", type=float, default=7.5, help="of all sections together")
    parser.add_argument("--data", default="", help="text for the convergence; by default Python's own source")
    parser.add_argument("--record", metavar="DIR", default=str(HERE.parent / "records"))
    parser.add_argument(
        "--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION"
    )
    parser.add_argument("--batch", type=int, help="sequences a step of the GPTs; by default 8 and 16")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--apart", action="store_true", help="a process a section on a CPU too")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.apart |= args.device == "gpu"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, records, prints; returns the exit status."""
    args = parse(argv)
    if args.tiny:  # less time on programs that only show that they run
        jax.config.update("jax_disable_most_optimizations", True)
    if args.section:
        given = Given(args.device, args.tiny, args.until, args.data, args.batch)
        run_section(args.section, given, args.notes)
        return 0
    if args.device == "gpu" and not record.gpu("name"):
        print(
            "gpu: no NVIDIA GPU here (nvidia-smi finds none); --device cpu --tiny is the dry run",
            file=sys.stderr,
        )
        return 2
    kept = start(args)
    try:
        measure_all(args, kept)
    finally:
        kept.write()
        if reason := kept.draw():
            print(reason, file=sys.stderr)
        print(f"{output.table(kept.targets)}\n\n{kept.folder}", flush=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is there is drawn
    sys.exit(main())
