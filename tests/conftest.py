"""What every test runs under: the CPU, no rank promotion, examples drawn the same way each time."""

import collections
import gc
import importlib.util
import os
import pathlib
import signal
import sys

# Before jax is imported: its CUDA plugin, where somebody installed it, would look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before torch is imported: tests run side by side, and threads that wait for each other at each small
# operation take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background job of a shell ignores SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

jax.config.update("jax_numpy_rank_promotion", "raise")
# Their subject is `fp8jax_torch`. `./dev test --jax newest` has no torch.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_torch_*.py"]

# For collectives. Set here, not in the environment, so that the programs that tests start see one device.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_report_header():
    """Says what is left out."""
    return [f"without torch: {', '.join(collect_ignore_glob)} are not run"] if collect_ignore_glob else []


def pytest_configure():
    """Most of the time goes into compiling programs that run once, so nothing is done to make them fast.

    XLA's own passes, which move and remove casts, run as ever; LLVM's do not, the CPU's fusions are written
    by the simpler of XLA's two emitters, and a program is compiled by one thread. All tests compile as users
    do with XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the environment, from which programs that tests
    start have it too.
    """
    flags = "--xla_cpu_parallel_codegen_split_count=1"
    if jax.__version__.startswith("0.10."):  # XLA dies of a flag that it does not know
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_finish():
    """Imported modules stay alive, so no garbage collection looks at them again: 3% of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Files with long tests first, then those with many: a worker that began one last would be waited for."""
    counts = collections.Counter(item.path for item in items)
    are_long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: (item.path not in are_long, -counts[item.path]))


hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """A compiled program has several memory maps. Linux allows a process 65,530, and XLA dies of one more."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def root():
    """The project's root folder."""
    return ROOT


@pytest.fixture
def optimized():
    """LLVM's passes: for bits, since without them rounding depends on what is fused, and for long loops."""
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture
def strict_dtypes():
    """No implicit dtype promotion: for kernels (flax's LayerNorm in bf16 and optax.adamw need promotion)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def load_program():
    """Imports a program by its path from the root, e.g. `load_program("examples/bench/step.py")`."""

    def load(path):
        path = ROOT / path
        spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        # A program finds its neighbours as it would when run.
        sys.path.insert(0, str(path.parent))
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        return module

    return load
