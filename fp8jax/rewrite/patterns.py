"""Paths of layers: patterns that match them, and a model's repeated blocks, found by the numbers in paths."""

import collections
import fnmatch
import math
import numbers
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# Parameter names that are not part of the layer's path.
WEIGHTS = ("kernel", "embedding", "weight", "w")


def layer_names(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a parameter's layer, as names."""
    return path[:-1] if len(path) > 1 and path[-1] in WEIGHTS else path


def layer_path(path: tuple[str, ...]) -> str:
    """The path of a parameter's layer, joined by "/"."""
    return "/".join(layer_names(path))


def layer_paths(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The paths of the layers of dot products' parameters.

    Beside other such parameters, a parameter is a layer of its own. The array of a wrapper, as in Haliax's
    `weight/0`, has the wrapper's layer.
    """
    paths = set(paths)
    beside = collections.Counter(path[:-1] for path in paths)

    def name(path: tuple[str, ...]) -> str:
        if beside[path[:-1]] > 1:
            return "/".join(path)
        is_wrapped = path[-1:] == ("0",) and path[-2:-1] and path[-2] in WEIGHTS
        return layer_path(path[:-1] if is_wrapped else path)

    return {path: name(path) for path in paths}


class Layer(NamedTuple):
    """A layer, as a rule sees it."""

    path: str  # as in "params", joined by "/"
    module: Any  # the layer's module
    kernel_shape: tuple[int, ...]  # shape in one layer of a scan
    scans: tuple[int, ...] = ()  # lengths of the scans that stack it
    parameter: str = ""  # path of the kernel, as "fc/kernel"


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches: with "/" the path, without "/" the last name, in shell style; after "re:" a
    regular expression matches the whole path."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), path) is not None
    return fnmatch.fnmatchcase(path if "/" in pattern else path.rsplit("/", 1)[-1], pattern)


def pattern_of(*paths: str) -> str:
    """The pattern that matches these paths and no others."""
    is_plain = len(paths) == 1 and "/" in paths[0] and not set("*?[") & set(paths[0])
    return paths[0] if is_plain else f"re:{'|'.join(map(re.escape, paths))}"


def layer_matches(pattern: str, layer: Layer) -> bool:
    """Whether a pattern matches the layer's path; or its parameter's, if both end in the same name, as in "w"
    and "*/w"."""
    *parents, name = layer.parameter.split("/")
    paths = {layer.path, layer_path((*parents, name))}
    if pattern.rsplit("/", 1)[-1] == name:
        paths.add(layer.parameter)
    return any(matches(pattern, path) for path in paths)


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
