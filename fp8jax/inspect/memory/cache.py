"""The figures of programs on disk, so that `fp8jax plan` compiles a program only once.

A program has a small JSON file. Its name is a hash of the lowered program, of the compiler's version and
options, and of the device.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax

from fp8jax.inspect import targets

_VERSION = 1  # of `Figures`; raise it when a field changes its meaning


class Figures(NamedTuple):
    """The figures of a compiled program that a plan needs."""

    total: int  # bytes of the peak on one device
    sent: int  # bytes that each device sends in a step


def default_folder() -> pathlib.Path:
    """The user's cache folder: `fp8jax/plan` in `$XDG_CACHE_HOME`, which is by default `~/.cache`."""
    given = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification ignores relative paths.
    base = given if given.is_absolute() else pathlib.Path.home() / ".cache"
    return base / "fp8jax" / "plan"


def path_of(
    lowered: jax.stages.Lowered, target: str | targets.Target | None, folder: pathlib.Path
) -> pathlib.Path:
    """A program's file in `folder`. `target` None stands for this process's devices."""
    device = jax.devices()[0].device_kind if target is None else repr(targets.get(target))
    versions = [str(_VERSION), jax.__version__, importlib.metadata.version("jaxlib")]
    options = [str(targets.COMPILER_OPTIONS), os.environ.get("XLA_FLAGS", "")]
    parts = json.dumps([*versions, *options, device, lowered.as_text()])
    return folder / f"{hashlib.sha256(parts.encode()).hexdigest()}.json"


def cached(path: pathlib.Path, compute: Callable[[], Figures]) -> Figures:
    """The figures in a file, or computed and written to it where it is missing or damaged.

    The file is written atomically. A folder that cannot be written is no error.
    """
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = Figures(**json.loads(path.read_text(encoding="utf-8")))
        if all(type(number) is int and number >= 0 for number in found):
            return found
    found = compute()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(found._asdict(), file)
        os.replace(file.name, path)
    return found
