"""The tree of a model's calls of modules, and the blocks among them."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator

import jax

from fp8jax.rewrite.interpreter.dots import Dot
from fp8jax.rewrite.interpreter.find import SCAN
from fp8jax.rewrite.patterns import matches

# Named scope of a call, followed by the call's number and trace count.
_CALL = "fp8jax_call:"


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """All calls of one module by one parent call.

    Attributes:
        path, kind: the module's path and class name.
        number: the call's number in named scopes.
        dots: the number of parameters' dot products outside submodules, per call.
        in_scan: whether a scan is between the call and its parent call.
        in_loop: whether the call is inside a scan.
        times: how often the module was traced.
        below: the calls of submodules.
    """

    path: str
    kind: str
    number: int = 0
    dots: int = 0
    in_scan: bool = False
    in_loop: bool = False
    times: int = 1
    below: list["ModuleCall"] = dataclasses.field(default_factory=list)

    @property
    def holds_layers(self) -> bool:
        """Whether submodules have dot products, or the module itself has more than one."""
        return self.dots > 1 or any(call.dots for call in self.all_below())

    def all_below(self) -> Iterator["ModuleCall"]:
        """All calls inside this call, outer calls first."""
        for call in self.below:
            yield call
            yield from call.all_below()

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}{', scanned' if self.in_loop else ''})"


class Calls:
    """The tree of a model's calls, recorded while it is traced."""

    def __init__(self) -> None:
        self.all = [ModuleCall("", "")]
        self._active = [self.all[0]]

    @contextlib.contextmanager
    def recorded(self, path: str, kind: str) -> Iterator[None]:
        """A context for tracing a call of the module at `path`."""
        siblings = self._active[-1].below
        call = next((call for call in siblings if call.path == path), None)
        if call is None:
            call = ModuleCall(path, kind, len(self.all))
            siblings.append(call)
            self.all.append(call)
        else:
            call.times += 1  # a scan's body is traced more than once
        self._active.append(call)
        try:
            with jax.named_scope(f"{_CALL}{call.number}.{call.times}"):
                yield
        finally:
            self._active.pop()

    def record_dots(self, dots: Iterable[Dot]) -> None:
        """Records the dot products of parameters in each call, and the loops around them."""
        counts: collections.Counter[tuple[int, int]] = collections.Counter()
        for dot in dots:
            around, in_scan, in_loop, innermost = [], False, False, None
            for scope in dot.place.scopes:
                in_scan, in_loop = in_scan or scope == SCAN, in_loop or scope == SCAN
                for innermost in calls_in(scope):
                    call = self.all[innermost[0]]
                    if call not in around:
                        around.append(call)
                        call.in_scan |= in_scan
                        call.in_loop |= in_loop
                        in_scan = False
            counts.update([innermost] if innermost else [])
        for (number, _), count in counts.items():
            self.all[number].dots = max(self.all[number].dots, count)


def calls_in(scope: str) -> list[tuple[int, int]]:
    """(number, trace count) of each call around an operation with this named scope, outermost first."""
    return [(int(number), int(time)) for number, time in re.findall(rf"{_CALL}(\d+)\.(\d+)", scope)]


class NoBlocksError(ValueError):
    """Gradient checkpointing of a model without repeated modules."""


# The choice of blocks ############################################################################


def find_blocks(root: ModuleCall, names: tuple[str, ...] | None) -> list[ModuleCall]:
    """The calls to checkpoint, of modules with these class names or path patterns; None for repeated modules.

    Raises:
        NoBlocksError: a ValueError: there is none.
        ValueError: a pattern matches none.
    """
    blocks = list(_repeated(root) if names is None else _named(root, names))
    holders = [call for call in root.all_below() if call.holds_layers]
    # Each path and class once, in order.
    kinds = ", ".join({f"{call.path} ({call.kind})": None for call in holders if call.path}) or "none"
    for name in names or ():
        if not any(_fits(name, call) for call in holders):
            raise ValueError(
                f"`checkpoint_blocks`: {name!r} matches no module that holds layers; they are {kinds}."
            )
    if not blocks:
        raise NoBlocksError(
            "`gradient_checkpointing`: no module that holds layers repeats in this model, so there are no "
            f"blocks to find; name some with `checkpoint_blocks`. The modules that hold layers are {kinds}."
        )
    return blocks


def _repeated(root: ModuleCall) -> Iterator[ModuleCall]:
    held = [call for call in root.below if call.holds_layers]
    for call in held:
        alike = {other.path for other in held if other.kind == call.kind}
        is_scan = any(inner.in_scan for inner in call.below)
        if call.in_scan or (len(alike) > 1 and not is_scan):
            yield call
        else:
            within = list(_repeated(call))
            yield from within or ([call] if call.path and call.times > 1 else [])


def _named(root: ModuleCall, names: tuple[str, ...]) -> Iterator[ModuleCall]:
    for call in root.below:
        is_scan = any(inner.in_scan and inner.path == call.path for inner in call.below)
        if call.path and call.holds_layers and not is_scan and any(_fits(name, call) for name in names):
            yield call
        else:
            yield from _named(call, names)


def _fits(name: str, call: ModuleCall) -> bool:
    return name == call.kind or matches(name, call.path)
