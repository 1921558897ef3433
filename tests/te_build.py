"""Makes .venv-te: NVIDIA TransformerEngine's JAX package, on a machine that may have no GPU.

    ./dev test-te                    # runs this, and then tests/test_backend_te.py in what it made
    python3.12 tests/te_build.py     # this alone: some minutes, 4 GB of disk, a C++ compiler

Apart from the everyday environment, which has another JAX and should not wait for a gigabyte. The
package's C++ half comes as sources alone. It needs CUDA's headers and libraries, all of which come
as wheels, and no GPU and no nvcc; its setup asks JAX's CUDA plugin for the version of CUDA, for which
the CUDA runtime has to be there.
"""

import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ROOT / ".venv-te"

# TransformerEngine, and a JAX that its release was built for.
TRANSFORMER_ENGINE = "2.20.2"
JAX = "0.11.2"

# What fp8jax and its tests import.
PACKAGES = [
    f"jax[cuda13-local]=={JAX}",
    "flax==0.12.12",
    "hypothesis==6.170.15",
    "jaxtyping==0.3.11",
    "ml_dtypes==0.6.0",
    "optax==0.2.8",
    "orbax-checkpoint==0.12.8",
    "pytest==9.2.0",
]

# What the sources are compiled with: any version, as of most parts of CUDA below.
TOOLS = ["setuptools", "wheel", "packaging", "pybind11", "pydantic", "importlib-metadata"]

# Headers, and the libraries that TransformerEngine's own opens when it is loaded.
CUDA = [
    "nvidia-cublas",
    "nvidia-curand",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13==9.24.1.1",  # older ones lack what the headers ask for, newer ones need a GPU's driver
    "nvidia-cudnn-frontend==1.32.0",
    "nvidia-nccl-cu13",
    "nvidia-nvtx",
]


def main() -> None:
    """Makes what is not there yet; what an older version of this file made is made anew."""
    if sys.version_info < (3, 12):
        sys.exit(f"te_build: jax {JAX} needs Python 3.12 or newer; this is {sys.version.split()[0]}.")
    done = HERE / "made-by"
    if done.exists() and done.read_text() == pathlib.Path(__file__).read_text():
        return
    venv.create(HERE, clear=True, with_pip=True)
    install("JAX and the tests", *PACKAGES, *TOOLS)
    # Without dependencies: those that they name are these, and PyTorch's.
    install("CUDA's libraries and headers", "--no-deps", *CUDA)
    wheels = [f"transformer_engine{part}=={TRANSFORMER_ENGINE}" for part in ("", "_cu13", "_jax")]
    install("TransformerEngine's libraries", "--no-deps", *wheels[:2])
    install("TransformerEngine's C++ (minutes)", "--no-deps", "--no-build-isolation", *wheels[2:])
    done.write_text(pathlib.Path(__file__).read_text())


def install(what: str, *packages: str) -> None:
    """Installs packages; what pip says goes to a log, and to the screen if it fails."""
    print(f"te_build: installing {what}", file=sys.stderr, flush=True)
    log = HERE / "install.log"
    # The headers are those of the wheels, whatever CUDA the machine has.
    env = {**os.environ, "NVTE_BUILD_USE_NVIDIA_WHEELS": "1", "NVTE_FRAMEWORK": "jax"}
    pip = [str(HERE / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *packages]
    with log.open("w") as out:
        failed = subprocess.run(pip, env=env, stdout=out, stderr=subprocess.STDOUT).returncode
    if failed:
        lines = log.read_text().splitlines()
        sys.exit("\n".join([*lines[-15:], f"te_build: pip failed; all it said is in {log}"]))


if __name__ == "__main__":
    main()
