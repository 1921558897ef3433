"""The repeated blocks of a model, found by the numbers in the paths of its layers."""

import collections
import math
import numbers
import re
from collections.abc import Iterable


def transformer_blocks(paths: Iterable[str], first: float | None, last: float | None) -> tuple[str, ...]:
    """The first and the last blocks, as the beginnings of paths.

    Names under one parent that differ in the number at their end are a series: h_0, h_1; layers/0, layers/1.
    The blocks are the members of the series with the most layers inside, in the order of their numbers.

    Args:
        paths: of layers, joined by "/".
        first, last: how many blocks, as an integer, or a share of them, rounded up.

    Raises:
        ValueError: there is no series, or a second one beside it has more than half as many layers.
    """
    layers = collections.Counter[str]()  # by series
    blocks: dict[str, dict[int, str]] = collections.defaultdict(dict)  # by series and number
    for path in paths:
        for number in re.finditer(r"(\d+)(/|$)", path):
            series = path[: number.start()]
            layers[series] += 1
            blocks[series][int(number[1])] = f"{path[: number.end(1)]}/"
    ranked = [series for series, _ in layers.most_common() if len(blocks[series]) > 1]
    if not ranked:
        raise ValueError(
            "counts blocks by the numbers in paths, as in h_0, h_1 or layers/0, layers/1, and found none. If "
            "a scan stacks the blocks in one path, build the model without a scan, or with one scan for the "
            "first blocks and one for the last, and give the path of the last ones"
        )
    largest, *others = ranked
    inside = tuple(blocks[largest].values())
    for other in others:
        if not other.startswith(inside) and 2 * layers[other] > layers[largest]:
            raise ValueError(
                f"counts blocks, and found two series of them, {largest}* and {other}*; give the path of "
                f"one, as in path={f'{largest}*'!r}"
            )
    ordered = [block for _, block in sorted(blocks[largest].items())]
    from_first, from_last = (
        int(number) if isinstance(number, numbers.Integral) else math.ceil(round(number * len(ordered), 6))
        for number in (first or 0, last or 0)
    )
    start = max(len(ordered) - from_last, from_first)
    return tuple(ordered[:from_first] + ordered[start:])
