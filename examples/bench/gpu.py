"""Measure fp8jax on a GPU: correctness first, then speed, memory and convergence, in under 8 minutes.

    python examples/bench/gpu.py                                  # a record in examples/records/
    python examples/bench/gpu.py --minutes 20 --data text.txt     # a longer convergence
    python examples/bench/gpu.py --only correctness gemm --cache /tmp/programs --profiles /tmp/profiles
    python examples/bench/gpu.py --device cpu --tiny --record runs     # the dry run: no GPU needed

Needs JAX with CUDA, Flax and optax; torch, TransformerEngine and others are measured where they are
installed. fp8jax itself is that of this checkout. A section is a benchmark of this folder, run as a program
with a share of the time: one that fails, hangs or takes the GPU down with it is noted, and the next goes on.
Sections without times (correctness, convergence) run first, side by side; then the others, one after another,
each with what those before it left unused. The record is written anew after each section, and says of each
target: held, missed, or why it was not run.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import output

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Section(NamedTuple):
    """A benchmark, and its share of the time: seconds out of `MINUTES`."""

    share: float
    program: str
    options: Sequence[str] = ()
    is_timed: bool = True  # alone on the machine
    flags: str = "--xla_gpu_enable_triton_gemm=false"  # of XLA; as importing fp8jax sets them


MINUTES = 7.5  # by default
# The sizes of TransformerEngine's published figures, see layer.py.
LAYER = "--layers 1 --width 4096 --heads 32 --batch 31 --context 512 --input-gradient 1 --rounds 6".split()
TE, CURRENT, BLOCK, FLAX = "fp8jax te", "fp8jax te,scaling=current", "fp8jax block", "flax Fp8DotGeneral"
FP8_WEIGHTS = ("fp8jax O2", "fp8jax fp8")
THROUGH_TE = (f"{TE} through TransformerEngine", f"{CURRENT} through TransformerEngine")
ALONE = ("TransformerEngine delayed", "TransformerEngine current")
OPTIMIZERS = ("optax.adamw", "te", "O2", "fp8", "fp8,moments=E5M2+E4M4")
UPDATE = ("--target", "", "--leaves-here", "24", "--size", "3840", "--rounds", "15", "--ways", *OPTIMIZERS)
# Of the Pallas kernel for scales of blocks; the first one is its default.
TILINGS = ("128x128x8x3x16", "128x128x8x4x16")
TRITON = "--xla_gpu_enable_triton_gemm=true"  # XLA's default: faster in bf16, and without FP8 GEMMs
LEVELS = ("bf16", "te", "O2", "fp8")
RESIDUALS = ("bf16", "bf16 dots_fp8", "fp8 dots_fp8")
GPT_350M = ("--size", "GPT-350M", "--rounds", "8", "--levels")
SECTIONS = {
    "correctness": Section(90, "correctness", is_timed=False),
    "convergence": Section(90, "convergence", is_timed=False),
    "layer": Section(60, "step", (*LAYER, "--ways", "bf16", FLAX, TE, CURRENT, BLOCK, *FP8_WEIGHTS)),
    "gemm": Section(60, "gemm", ("--rounds", "4", "--tilings", *TILINGS)),
    "optimizer": Section(35, "update", UPDATE),
    "GPT-350M": Section(60, "gpt", (*GPT_350M, *LEVELS)),
    "bf16 with Triton, layer": Section(20, "step", (*LAYER, "--ways", "bf16"), flags=TRITON),
    "bf16 with Triton, GPT-350M": Section(25, "gpt", (*GPT_350M, "bf16"), flags=TRITON),
    "FP8 residuals": Section(45, "gpt", (*GPT_350M, *RESIDUALS)),
    "TransformerEngine": Section(15, "step", (*LAYER, "--ways", "bf16", *THROUGH_TE, *ALONE)),
    "torch": Section(40, "torch_step"),
}
PROFILED = ("step", "update", "gpt", "gemm")


class Target(NamedTuple):
    """A figure that is judged: a cell of a section's first row of that name."""

    what: str
    section: str
    row: str
    column: str
    at_most: float
    at_least: float = float("-inf")


TARGETS = (
    Target("correctness: rows that did not hold", "correctness", "rows that did not hold", "measured", 0),
    Target(
        "FP8 GEMMs of a Dense step", "correctness", "Dense step: FP8 GEMMs in the program", "measured", 3, 3
    ),
    Target("FP8 GEMM 8192^3, speed / torch._scaled_mm", "gemm", "fp8jax", "torch /", float("inf"), 0.9),
    Target(
        "GEMMs with scales of blocks, 4096^3 and 8192^3, least speed / the FP8 GEMM's",
        "gemm",
        "block, least speed / the FP8 GEMM's",
        "fp8jax /",
        float("inf"),
        0.75,
    ),
    Target("transformer layer, te, time / bf16", "layer", TE, "/ bf16", 1 / 1.7),
    Target("transformer layer, te,scaling=current, time / bf16", "layer", CURRENT, "/ bf16", 1 / 1.6),
    Target("transformer layer, block, time / bf16", "layer", BLOCK, "/ bf16", 1 / 1.45),
    Target("transformer layer, te, time / flax", "layer", TE, "/ flax", 1),
    Target("transformer layer, te,scaling=current, time / flax", "layer", CURRENT, "/ flax", 1),
    Target("optimizer step, O2, time / float32 optax.adamw", "optimizer", "O2", "/ optax.adamw", 0.6),
    Target("optimizer step, fp8, time / float32 optax.adamw", "optimizer", "fp8", "/ optax.adamw", 0.6),
    Target("GPT-350M train step, O2, time / bf16", "GPT-350M", "O2", "/ bf16", 0.8),
    Target("GPT-350M train step, fp8, time / bf16", "GPT-350M", "fp8", "/ bf16", 0.8),
    Target("GPT-350M train step, O2, peak memory / bf16", "GPT-350M", "O2", "GB / bf16", 0.7),
    Target("GPT-350M train step, fp8, peak memory / bf16", "GPT-350M", "fp8", "GB / bf16", 0.7),
    Target("GPT-124M, validation loss, O2 - bf16", "convergence", "O2", "- bf16", 0.01),
    Target("GPT-124M, validation loss, fp8 - bf16", "convergence", "fp8", "- bf16", 0.01),
)

GRACE_S = 15  # that a section may be late before it is killed
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "ml_dtypes", "numpy", "torch")
PACKAGES += ("transformer_engine", "transformer_engine_jax", "nvidia-cublas", "nvidia-cudnn-cu13")

# Memory is not taken in advance, so that torch finds some.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
}


def run(
    section: Section, args: argparse.Namespace, seconds: float, cache: str, profile: str = ""
) -> dict[str, Any]:
    """Runs a section, which is killed if it is late; its tables, and what was not measured and why."""
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "interop"), os.environ.get("PYTHONPATH")]))
    # XLA's choices of kernels are cached, too; those made beside another section are not for timed ones.
    cache = str(pathlib.Path(cache) / ("timed" if section.is_timed else "untimed"))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": cache}
    if args.device == "gpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} {section.flags}".strip()
        environment |= {**ENVIRONMENT, "XLA_FLAGS": flags}
    elif args.tiny:  # less time on programs that only show that they run
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, str(HERE / f"{section.program}.py"), *section.options]
    command += ["--tiny"] if args.tiny else []
    command += ["--profile", profile] if profile and section.program in PROFILED else []
    if section.program == "convergence":
        command += ["--data", args.data, "--seconds", str(seconds)]
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        command += ["--record", folder]
        try:
            options: dict[str, Any] = {"capture_output": True, "text": True, "env": environment}
            ended = subprocess.run(command, **options, timeout=max(seconds, 0) + GRACE_S)
            reason = f"its process ended with status {ended.returncode}" if ended.returncode else ""
            errors = ended.stderr[-4000:] if reason else ""
        except subprocess.TimeoutExpired as late:
            said: Any = late.stderr or b""  # bytes, also with text=True
            reason, errors = "it was late and was killed", said.decode(errors="replace")[-4000:]
        kept = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*/result.json")]
    found = kept[0] if kept else {"results": {}}
    if kept and args.device == "gpu" and found["environment"]["device"] == output.cpu_name():
        found, reason = {"results": {}}, "JAX found no GPU"
    skipped = found.get("skipped", {}) | ({"the section": reason} if reason else {})
    found = {"tables": found["results"], "skipped": skipped, "errors": errors, "seconds": time.time() - begun}
    return found | {"state": gpu("clocks.sm,power.draw,temperature.gpu")}


def judge(sections: dict[str, dict[str, Any]], is_judged: bool) -> output.Rows:
    """One row per target.

    Args:
        sections: what was found.
        is_judged: whether the figures are a GPU's at full size.
    """
    judged = []
    for target in TARGETS:
        found = sections.get(target.section, {"tables": {}, "skipped": {"": "the section was left out"}})
        rows = [row for table in found["tables"].values() for row in table]
        measured = next((row[target.column] for row in rows if target.row in row.values()), None)
        low, high = target.at_least, target.at_most
        bound = f"<= {high:.3g}" if low == float("-inf") else f">= {low:g}"
        bound = f"{low:g}" if low == high else bound
        if measured is None:
            reasons = "; ".join(dict.fromkeys(found["skipped"].values()))
            verdict = f"not run: {reasons or 'the section ended without it'}"
        elif not is_judged:
            verdict = "not judged: a dry run"
        else:
            verdict = "held" if low <= measured <= high else "missed"
        judged.append({"target": target.what, "bound": bound, "measured": measured, "verdict": verdict})
    return judged


def write(folder: pathlib.Path, about: dict[str, Any], sections: dict[str, Any], is_judged: bool) -> None:
    """Writes result.json for programs and table.md for people, all tables, the targets first."""
    targets = judge(sections, is_judged)
    kept = {"environment": about, "targets": targets, "sections": sections}
    (folder / "result.json").write_text(json.dumps(kept, indent=1) + "\n")
    lines = [f"# fp8jax on {about['device']}, {about['date']}", ""]
    if not is_judged:
        lines += ["A dry run: it shows that everything runs, and its figures say nothing.", ""]
    lines += [f"`{about['command']}`", "", "## Targets", "", output.markdown(targets), ""]
    for name, found in sections.items():
        lines += [f"## {name}, {found['seconds']:.0f} s", ""]
        for title, rows in found["tables"].items():
            lines += [f"{title}:", "", output.markdown(rows), ""]
        lines += [f"- not measured: {what}: {reason}" for what, reason in found["skipped"].items()]
        lines += [f"- the GPU right after it: {found['state']}"] if found["state"] else []
        lines += [""]
    rows = [{"what": what, "is": value} for what, value in about.items()]
    (folder / "table.md").write_text("\n".join([*lines, "## Versions", "", output.markdown(rows), ""]))


def gpu(query: str) -> str:
    """The answer of nvidia-smi to a query of the first GPU; "" without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    return lines[0] if lines else ""


def free_folder(parent: pathlib.Path, name: str) -> pathlib.Path:
    """A folder that is not there yet: a second run of a day does not write over the first."""
    number = 1
    while (folder := parent / (name if number == 1 else f"{name}_{number}")).exists():
        number += 1
    return folder


def start(args: argparse.Namespace) -> tuple[pathlib.Path, dict[str, Any]]:
    """The folder of the record, and the device and versions."""
    driver = gpu("name,driver_version,memory.total,power.limit,clocks.max.sm")
    words = driver.split(",")[0].removeprefix("NVIDIA ").lower().split()
    device = words[0] if args.device == "gpu" and words else output.cpu_name()
    about: dict[str, Any] = output.environment(device, PACKAGES)
    about |= {"gpu": driver, "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "minutes": args.minutes}
    name = f"{about['date']}_{device}_gpu{'_tiny' if args.tiny else ''}"
    folder = free_folder(pathlib.Path(args.record or HERE.parent / "records"), name)
    folder.mkdir(parents=True)
    return folder, about


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """Sections that run side by side: all without times, then each of the others."""
    untimed = [name for name in names if not SECTIONS[name].is_timed]
    return [*([untimed] if untimed else []), *([name] for name in names if SECTIONS[name].is_timed)]


def main() -> int:
    """Measures, records, prints; returns the exit status."""
    choices = {"device": ("gpu", "cpu"), "only": SECTIONS}
    defaults: dict[str, Any] = {"minutes": MINUTES, "data": "", "cache": "", "profiles": ""}
    args = output.parse(__doc__, choices=choices, device="gpu", only=list(SECTIONS), **defaults)
    if args.device == "gpu" and not gpu("name"):
        print(
            "gpu: no NVIDIA GPU here (nvidia-smi finds none); --device cpu --tiny is the dry run",
            file=sys.stderr,
        )
        return 2
    is_judged = args.device == "gpu" and not args.tiny
    folder, about = start(args)
    sections: dict[str, Any] = {}
    end = time.time() + 60 * args.minutes
    groups = groups_of(args.only)
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor() as pool:
        for number, group in enumerate(groups):
            shares = [max(SECTIONS[name].share for name in names) for names in groups[number:]]
            seconds = (end - time.time()) * shares[0] / sum(shares)
            print(f"{', '.join(group)}: at most {seconds:.0f} s", flush=True)

            def found_by(name: str, seconds: float = seconds) -> Any:
                profile = str(pathlib.Path(args.profiles or scratch) / re.sub(r"\W+", "_", name))
                return run(SECTIONS[name], args, seconds, args.cache or scratch, profile)

            for name, found in zip(group, pool.map(found_by, group), strict=True):
                sections[name] = found
                for title, rows in found["tables"].items():
                    print(f"{title}\n{output.table(rows)}\n", flush=True)
                for what, reason in found["skipped"].items():
                    print(f"not measured: {what}: {reason}", flush=True)
            write(folder, about, sections, is_judged)
    print(f"{output.table(judge(sections, is_judged))}\n\n{folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
