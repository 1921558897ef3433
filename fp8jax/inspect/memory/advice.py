"""Dimensions that waste work: their cost, and better sizes.

    print("\n".join(advise(model.report(*inputs))))
    up: 1000 outputs: no multiple of 16, so XLA pads copies to 1008, 2% of the work on tiles ...; take ...

A GPU computes a GEMM in tiles. The part of the last tile outside of the matrix takes as much time as the part
inside. cuBLASLt's FP8 GEMMs take dimensions that are multiples of 16. A dimension is a side of the output in
two of a layer's three GEMMs, and is contracted in the third.

References:
    NVIDIA, Matrix Multiplication Background User's Guide, sections on tensor core requirements and tile
    quantization; cuBLAS documentation, `cublasLtMatmul` (FP8: dimensions are multiples of 16).
"""

from collections.abc import Iterable

from fp8jax.rewrite.report import Report

ALIGNED = 16  # numbers: the unit of an FP8 operand's dimensions

# Sides of cuBLAS's tiles: 64 for dimensions up to 64, else 128.
TILE, SMALL_TILE = 128, 64

WORTH_TELLING = 0.01  # of the work


def advise(*reports: Report) -> list[str]:
    """A line for each dimension of FP8 layers that is worth changing."""
    return list(dict.fromkeys(line for report in reports for line in _lines(report)))


def _lines(report: Report) -> Iterable[str]:
    layers: dict[tuple[str, int], list[str]] = {}
    for row in report.rows:
        if row.fp8 and row.gemm is not None:
            rows = "rows of a block" if row.kind == "ExpertDense" else "rows"
            for name, size in zip((rows, "inputs", "outputs"), row.gemm, strict=True):
                layers.setdefault((name, size), []).append(row.path or "(root)")
    for (name, size), paths in layers.items():
        tile = TILE if size > SMALL_TILE else SMALL_TILE
        above = _round_up(size, tile)
        costs = []
        if size % ALIGNED:
            padded = _round_up(size, ALIGNED)
            costs.append(f"no multiple of {ALIGNED}, so XLA pads copies to {padded}")
        if (wasted := 1 - size / above) >= WORTH_TELLING:
            costs.append(f"{wasted:.0%} of the work on tiles of {tile} is wasted")
        better = f"{above - tile} or {above}" if above > tile else str(above)
        if name == "rows of a block":
            better = "more tokens for each expert"
        if costs:
            yield f"{', '.join(paths)}: {size} {name}: {', '.join(costs)}; take {better}"


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
