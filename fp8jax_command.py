"""The console command `fp8jax`. Ctrl-C ends it with one line, also while the package is imported.

This is no module of the package, because `fp8jax/__init__.py` imports JAX, which takes seconds.
"""

import os
import signal
from typing import Any


def main() -> int:
    """Runs `fp8jax.cli.main` with the arguments of this process; returns its exit status."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from fp8jax import cli

    return cli.main()


def _end(number: int, frame: Any) -> None:
    # No KeyboardInterrupt: modules that are half imported turn it into other errors.
    os.write(2, b"fp8jax: interrupted\n")
    os._exit(128 + number)
