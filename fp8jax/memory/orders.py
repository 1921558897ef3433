"""In which order XLA runs a graph's kernels.

On a CPU what is ready first runs first, so that several can run at once: what depends on no other kernel is
computed at the start, and kept. On a GPU kernels run one after the other, in an order that keeps little in
memory: that of XLA's `DFSMemoryScheduler`. What waits at a barrier comes after all that goes through it. What
reduces a tensor to a scale is fused with the first kernel that reads the tensor, so it runs then. A body
writes its slices of stacked outputs at its end.
"""

from fp8jax.memory.fusion import SMALL, Kernel, Kernels


def order(fused: Kernels, kept: set[int]) -> list[int]:
    """The numbers of the kernels, in the order in which they run.

    Args:
        fused: a graph's kernels.
        kept: ids of values that are read after the last kernel.
    """
    users = _users(fused)
    if fused.graph.platform == "cpu":
        found = _breadth_first(users)
    else:
        found = _with_early_reductions(fused, _depth_first(fused, users, kept), users)
    return sorted(found, key=lambda number: fused.kernels[number].op.kind == "store")


def _users(fused: Kernels) -> list[set[int]]:
    """Of each kernel, those that read what it writes."""
    writer = {id(v): number for number, kernel in enumerate(fused.kernels) for v in kernel.writes}
    users: list[set[int]] = [set() for _ in fused.kernels]
    for number, kernel in enumerate(fused.kernels):
        for value in (*kernel.reads, *kernel.waits):
            if value in writer:
                users[writer[value]].add(number)
    return users


def _needed(users: list[set[int]]) -> list[list[int]]:
    """Of each kernel, those whose results it reads."""
    needed: list[list[int]] = [[] for _ in users]
    for number, later in enumerate(users):
        for user in later:
            needed[user].append(number)
    return needed


def _breadth_first(users: list[set[int]]) -> list[int]:
    waiting = [len(needed) for needed in _needed(users)]
    queue = [number for number, count in enumerate(waiting) if not count]
    for number in queue:
        for user in sorted(users[number]):
            waiting[user] -= 1
            if not waiting[user]:
                queue.append(user)
    return queue


def _depth_first(fused: Kernels, users: list[set[int]], kept: set[int]) -> list[int]:
    """What has the most shared and the largest things behind it comes first."""
    needed = _needed(users)
    sizes = [sum(value.cost for value in kernel.writes) for kernel in fused.kernels]
    shared = [max(len(later) - 1, 0) if needed[number] else 0 for number, later in enumerate(users)]
    behind, most = list(sizes), sum(sizes)
    for number, before in enumerate(needed):
        shared[number] = min(shared[number] + sum(shared[n] for n in before), 10**9)
        behind[number] = min(behind[number] + sum(behind[n] for n in before), most)

    def key(number: int) -> tuple[int, int]:
        return -shared[number], -behind[number]

    ends = [n for n, later in enumerate(users) if not later or _writes_one_of(fused.kernels[n], kept)]
    return _after(sorted(ends, key=key), [sorted(before, key=key) for before in needed])


def _with_early_reductions(fused: Kernels, numbers: list[int], users: list[set[int]]) -> list[int]:
    """The order, but what only reduces tensors to little does so as soon as they are there."""
    needed = _needed(users)

    def is_early(number: int) -> bool:
        kernel = fused.kernels[number]
        return kernel.op.kind == "reduce" and all(value.bytes <= SMALL for value in kernel.writes)

    place = {number: (at, 0) for at, number in enumerate(numbers)}
    for number in numbers:
        if is_early(number):
            place[number] = max((place[before] for before in needed[number]), default=place[number])
    return sorted(numbers, key=lambda number: place[number])


def _writes_one_of(kernel: Kernel, kept: set[int]) -> bool:
    return any(id(value) in kept for value in kernel.writes)


def _after(ends: list[int], needed: list[list[int]]) -> list[int]:
    """Each kernel right after what it needs, in the orders given."""
    done: dict[int, None] = {}
    stack = [(number, False) for number in reversed(ends)]
    while stack:
        number, is_ready = stack.pop()
        if is_ready:
            done[number] = None
        elif number not in done:
            stack.append((number, True))
            stack += [(before, False) for before in reversed(needed[number])]
    return list(done)
