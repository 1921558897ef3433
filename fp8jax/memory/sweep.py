"""The most memory that a graph needs at once, when its kernels run one after the other.

    most = sweep(graph, donated=avals)
    most.bytes, most.live

A stored value takes memory from the kernel that writes it to the last that reads it; an input that is
counted elsewhere takes none. A loop's carry is written in place, and its stacked outputs are there from its
start. An elementwise kernel may write where it reads.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fp8jax.memory.fusion import Kernel, Kernels, kernels
from fp8jax.memory.graph import Graph, Op, Value
from fp8jax.memory.orders import order


class Most(NamedTuple):
    """The moment at which memory is fullest."""

    bytes: int  # besides inputs that cost nothing
    live: list[Value]  # values that are there; the rest is in the body of a loop, or scratch
    op: Op | None  # what runs


def sweep(graph: Graph, donated: Sequence[Value] = ()) -> Most:
    """The fullest moment of a graph.

    Args:
        graph: what `of_jaxpr` made.
        donated: inputs whose memory is taken by outputs of the same size and dtype.
    """
    fused = graph.fused = graph.fused or kernels(graph)
    room = [(value.bytes, value.dtype) for value in donated]
    kept = {id(value) for value in graph.fixed}
    for output in graph.outputs:
        for value in fused.stored(output).values():
            kept.add(id(value))
            if value.op is not None and (value.bytes, output.dtype) in room:
                room.remove((value.bytes, output.dtype))
                value.cost = 0
    return _Sweep(fused, kept, order(fused, kept)).most


class _Sweep:
    """One pass over a graph's kernels."""

    def __init__(self, fused: Kernels, kept: set[int], numbers: Sequence[int]) -> None:
        self.fused = fused
        self.last: dict[int, int] = {}  # when each value is read last
        for now, number in enumerate(numbers):
            self.last.update(dict.fromkeys(fused.kernels[number].reads, now))
        self.last.update(dict.fromkeys(kept, len(numbers)))
        self.live = {id(v): v for v in fused.graph.inputs if v.cost and id(v) in self.last}
        self.used = sum(value.cost for value in self.live.values())
        self.most = Most(self.used, list(self.live.values()), None)
        for self.now, number in enumerate(numbers):
            self._run(fused.kernels[number])

    def _run(self, kernel: Kernel) -> None:
        inside, reused = kernel.scratch, 0
        if kernel.op.name == "cond":
            inside, reused = self._branches(kernel.op)
        elif kernel.op.kind == "loop":
            inside, reused = self._body(kernel.op)
        elif kernel.op.kind == "update":
            reused = self._take(kernel.op.reads[0], kernel.writes[0])
        elif kernel.op.kind == "fusible":
            sizes = {value.bytes for value in kernel.writes}
            dying = (value for value in kernel.reads.values() if self._dies(value) and id(value) in self.live)
            reused = next((value.cost for value in dying if value.bytes in sizes), 0)
        total = self.used + sum(value.cost for value in kernel.writes) + inside - reused
        if total > self.most.bytes:
            live = {**self.live, **{id(value): value for value in kernel.writes}}
            self.most = Most(total, list(live.values()), kernel.op)
        for value in kernel.writes:
            if id(value) in self.last:
                self.live[id(value)] = value
                self.used += value.cost
        for value in kernel.reads.values():
            if self._dies(value) and self.live.pop(id(value), None):
                self.used -= value.cost

    def _dies(self, value: Value) -> bool:
        return self.last.get(id(value)) == self.now

    def _take(self, operand: Value, result: Value) -> int:
        """Lets a result take its operand's place, if nothing reads that later; returns what this saves."""
        behind = list(self.fused.stored(operand).values())
        if len(behind) != 1 or not self._dies(behind[0]) or behind[0].bytes != result.bytes:
            return 0
        result.cost = behind[0].cost
        return result.cost

    def _body(self, op: Op) -> tuple[int, int]:
        """What a loop's body needs besides its carry, and what of the carry was there before."""
        if op.name == "scan":
            reads, first, carried = op.reads, op.params["num_consts"], op.params["num_carry"]
        else:
            reads, first = op.reads[op.params["cond_nconsts"] :], op.params["body_nconsts"]
            carried = len(op.writes)
        [body] = op.bodies
        reused, carry = 0, body.inputs[first : first + carried]
        for before, inside, after in zip(reads[first:], carry, op.writes, strict=False):
            after.cost = after.bytes
            reused += self._take(before, after)
            inside.cost = after.cost
        return sweep(body).bytes - sum(value.cost for value in carry), reused

    def _branches(self, op: Op) -> tuple[int, int]:
        """What the larger branch needs besides its results, and what these reuse."""
        reused, taken = 0, set()
        for result in op.writes:
            for operand in op.reads[1:]:
                is_alike = (operand.shape, operand.dtype) == (result.shape, result.dtype)
                behind = tuple(self.fused.stored(operand))
                if is_alike and behind not in taken and self.last.get(behind[0]) == self.now:
                    taken.add(behind)
                    reused += self._take(operand, result)
                    break
        return max(sweep(body, op.writes).bytes for body in op.bodies), reused
