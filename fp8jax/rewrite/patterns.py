"""Paths of layers, and the patterns that match them."""

import collections
import fnmatch
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
