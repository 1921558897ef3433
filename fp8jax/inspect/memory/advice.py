"""Dimensions that waste work: what they cost, and which sizes to take instead.

    print("\n".join(advise(model.report(*inputs))))
    up: 1000 outputs: no multiple of 16, so XLA multiplies copies padded to 1008, 2% of the work ...; take ...

A GPU computes a GEMM in tiles. The part of the last tile outside of the matrix takes as much time as the part
inside. cuBLASLt's FP8 GEMMs take dimensions that are multiples of 16. A dimension is a side of the output in
two of a layer's three GEMMs, and is contracted in the third.

References:
    NVIDIA, Matrix Multiplication Background User's Guide, sections on tensor core requirements and tile
    quantization; cuBLAS documentation, `cublasLtMatmul` (FP8: dimensions are multiples of 16).
"""

from fp8jax.rewrite.report import Report

ALIGNED = 16  # numbers: the unit of an FP8 operand's dimensions

# Sides of cuBLAS's tiles: 64 for dimensions up to 64, else 128.
TILE, SMALL_TILE = 128, 64

WORTH_TELLING = 0.01  # of the work


def advise(report: Report) -> list[str]:
    """A line for each dimension of FP8 layers that is worth changing."""
    layers: dict[tuple[str, int], list[str]] = {}
    for row in report.rows:
        if row.fp8 and row.gemm is not None:
            rows = "rows of a block" if row.kind == "ExpertDense" else "rows"
            for name, size in zip((rows, "inputs", "outputs"), row.gemm, strict=True):
                layers.setdefault((name, size), []).append(row.path or "(root)")
    lines = []
    for (name, size), paths in layers.items():
        if cost := costs(size):
            instead = "more tokens for each expert" if name == "rows of a block" else better(size)
            lines.append(f"{', '.join(paths)}: {size} {name}: {cost}; take {instead}")
    return lines


def costs(size: int) -> str:
    """The cost of a dimension of this size, in words; "" if it is small."""
    found = []
    if size % ALIGNED:
        found.append(f"no multiple of {ALIGNED}, so XLA multiplies copies padded to {_up(size, ALIGNED)}")
    if (lost := wasted(size)) >= WORTH_TELLING:
        found.append(f"{lost:.0%} of the work on tiles of {_tile(size)} is for nothing")
    return ", ".join(found)


def better(size: int) -> str:
    """The nearest sizes that fill their tiles."""
    above = _up(size, _tile(size))
    below = above - _tile(size)
    return f"{below} or {above}" if below and above != size else str(above)


def wasted(size: int) -> float:
    """The share of the tiles' work outside of a dimension of this size."""
    return 1 - size / _up(size, _tile(size))


def _tile(size: int) -> int:
    return TILE if size > SMALL_TILE else SMALL_TILE


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
