"""Runs a command of `fp8jax`."""

import os
import sys
from collections.abc import Sequence

from fp8jax import signals
from fp8jax.cli.options import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Raises SystemExit for bad arguments and for --help."""
    args = parser().parse_args(argv)
    try:
        with signals.ends_program(f"fp8jax {args.command}: interrupted"):
            status = args.run(args)
        sys.stdout.flush()  # a closed pipe raises here, not at the interpreter's end
        return status
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return 141  # the shell's status of a closed pipe
    except KeyboardInterrupt:
        message, status = "interrupted", signals.INTERRUPTED
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        message, status = str(error), 2
    except Exception as error:  # the user's own model may raise anything
        if ":" not in (getattr(args, "model", None) or ""):
            raise
        message, status = f"--model {args.model}: {type(error).__name__}: {error}", 2
    print(f"fp8jax {args.command}: {' '.join(message.split())[:1000]}", file=sys.stderr)
    return status
