"""The command `fp8jax`.

fp8jax chart      the precision chart, read back from compiled programs
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from fp8jax.recipe import PRESETS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="fp8jax", description="FP8 training for JAX and Flax.")
    commands = parser.add_subparsers(dest="command", required=True)
    chart = commands.add_parser("chart", help="the precision chart, read back from compiled programs")
    chart.add_argument("recipes", nargs="*", default=list(PRESETS), help="by default all levels")
    chart.add_argument("--target", help="a GPU that is not here: h100, h200, b200 or l40s")
    chart.add_argument("--devices", type=int, default=8, help="that share the batch (default 8)")
    chart.add_argument("--json", action="store_true", help="print JSON")
    chart.add_argument("--png", metavar="FILE", help="draw the chart, too")
    args = parser.parse_args(argv)
    try:
        return run_chart(args)
    except (ValueError, RuntimeError) as error:
        print(f"fp8jax {args.command}: {error}", file=sys.stderr)
        return 2


def run_chart(args: argparse.Namespace) -> int:
    """Prints the chart; 1 if a program is not what its recipe says."""
    if args.target:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    from fp8jax import chart

    rows = [chart.measure(recipe, target=args.target, devices=args.devices) for recipe in args.recipes]
    where = args.target or jax.devices()[0].device_kind
    if args.png:
        chart.picture(rows, args.png, f"read from a train step compiled for {args.devices} x {where}")
    if args.json:
        print(json.dumps(chart.as_data(rows), indent=1))
    else:
        print(f"{chart.table(rows)}\n\nread from a train step compiled for {args.devices} x {where}:\n")
        print(chart.evidence(rows))
    return 1 if any(row.differences for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
