"""Which layers run in FP8, which do not, and why: nothing falls back silently."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

# Products of what stands under `scope(path)` are the layer's.
_SCOPE = "fp8jax:"

# The reason of a layer whose product is the user's choice, which may be FP8 too.
OWN_DOT = "the layer has a dot_general of its own"


class Row(NamedTuple):
    """One layer."""

    path: str  # as in "params", joined by "/"
    kind: str  # the layer's class
    kernel_shape: tuple[int, ...]  # within one layer of a scan; () if it has no kernel
    fp8: bool
    reason: str  # why not; empty if it is
    flops: int = 0  # of its products in one forward pass: two for each multiplication
    lora: int = 0  # rank of its adapters; 0 if it has none
    gemm: tuple[int, int, int] | None = (
        None  # rows, inputs and outputs of its first product; of experts a block's
    )


Rows = dict[str, Row]


class Report(NamedTuple):
    """The layers of a model, in the order of their first call; `str` is a table."""

    recipe: str
    rows: tuple[Row, ...]
    flops: int  # of all products in one forward pass, the layers' and others
    note: str = ""

    @property
    def fp8_share(self) -> float:
        """The part of all FLOPs of products that is in FP8."""
        return sum(row.flops for row in self.rows if row.fp8) / max(self.flops, 1)

    def largest(self, count: int) -> list[Row]:
        """The layers with most FLOPs that do not run in FP8."""
        rows = [row for row in self.rows if not row.fp8]
        return sorted(rows, key=lambda row: -row.flops)[:count]

    def __str__(self) -> str:
        def share(flops: int) -> str:
            return f"{100 * flops / max(self.flops, 1):.1f}%"

        cells = [("layer", "kind", "kernel", "FLOPs", "FP8")]
        for row in self.rows:
            shape = "x".join(map(str, row.kernel_shape))
            cells.append(
                (
                    row.path or "(root)",
                    row.kind,
                    shape,
                    share(row.flops),
                    ("yes" if row.fp8 else row.reason)
                    + (f", adapters of rank {row.lora}" if row.lora else ""),
                )
            )
        others = self.flops - sum(row.flops for row in self.rows)
        if others > 0:
            cells.append(("(no layer's)", "", "", share(others), "products of activations stay as they are"))
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in cells
        ]
        count = sum(row.fp8 for row in self.rows)
        summary = f"{self.recipe}: {count} of {len(self.rows)} layers in FP8, "
        summary += f"{100 * self.fp8_share:.0f}% of the FLOPs of products"
        return "\n".join([summary, *lines, *([self.note] if self.note else [])])


def scope(path: str) -> Any:
    """A context in which products count as those of the layer at `path`."""
    return jax.named_scope(_SCOPE + path.replace("/", "."))


def layer_of(name: str) -> str | None:
    """The layer in whose `scope` an operation of a program stands, by the operation's name; "/" in its path
    is ".". None if it is no layer's."""
    found = re.findall(rf"{_SCOPE}([^/()]*)", name)
    return found[-1] if found else None


def trace(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`jax.make_jaxpr(function)` with respect to arrays and `jax.ShapeDtypeStruct`s: other arguments, such
    as `train=False`, are what they are."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if dynamic else leaf for leaf, dynamic in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return jax.tree.leaves(function(*args, **kwargs))

    return jax.make_jaxpr(call)(*(leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic))


def measured(recipe: str, rows: Rows, jaxpr: Any, note: str = "") -> Report:
    """The report of a forward pass that was traced to `jaxpr`.

    A layer that was to multiply in FP8 and made no product is reported as one that did not.
    """
    flops: dict[str, int] = {}
    gemms: dict[str, tuple[int, int, int]] = {}
    total = _count(jaxpr.jaxpr, 1, "", flops, gemms)
    counted = []
    for row in rows.values():
        name = row.path.replace("/", ".")
        row = row._replace(flops=flops.get(name, 0), gemm=gemms.get(name))
        if row.fp8 and not row.flops and math.prod(row.kernel_shape) and total:
            row = row._replace(fp8=False, reason="made no product for these inputs")
        counted.append(row)
    return Report(recipe, tuple(counted), total, note)


def _count(
    jaxpr: Any, times: int, outer: str, flops: dict[str, int], gemms: dict[str, tuple[int, int, int]]
) -> int:
    """Adds the FLOPs of a jaxpr's products to those of their layers; the sum. All branches of a `cond`
    count, and a `while_loop`'s body once: how it goes is not known here. Notes the layers' first GEMMs."""
    total = 0
    for eqn in jaxpr.eqns:
        layer = _layer_of(eqn) or outer
        name, own = eqn.primitive.name, times * _flops(eqn)
        if own:
            flops[layer] = flops.get(layer, 0) + own
            if name == "dot_general":
                gemms.setdefault(layer, _sides(eqn))
            total += own
            continue
        below = list(jex.jaxprs_in_params(eqn.params))
        if name == "by_platform":
            below = [eqn.params["default"].jaxpr]
        repeats = eqn.params["length"] if name == "scan" else 1
        total += sum(_count(inner, times * repeats, layer, flops, gemms) for inner in below)
    return total


def _layer_of(eqn: Any) -> str:
    names = str(eqn.source_info.name_stack).split("/")
    found = [name.removeprefix(_SCOPE) for name in names if name.startswith(_SCOPE)]
    return found[-1] if found else ""


def _sides(eqn: Any) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a `dot_general`'s matrices."""
    (contracted, batched), (lhs, rhs) = eqn.params["dimension_numbers"], (x.aval.shape for x in eqn.invars)

    def free(side: int, shape: tuple[int, ...]) -> int:
        return math.prod(n for axis, n in enumerate(shape) if axis not in (*contracted[side], *batched[side]))

    return free(0, lhs), math.prod(lhs[axis] for axis in contracted[0]), free(1, rhs)


def _flops(eqn: Any) -> int:
    """Of one product: two for each multiplication."""
    if not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
        return 0
    out = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if eqn.primitive.name == "ragged_dot_general":
        numbers, (rows, _, sizes) = eqn.params["ragged_dot_dimension_numbers"], (x.aval for x in eqn.invars)
        contracted, _ = numbers.dot_dimension_numbers[0]
        each = 2 * out * math.prod(rows.shape[axis] for axis in contracted)
        # Where the groups are of what is summed over, each is one of the outputs.
        return each // sizes.shape[-1] if set(numbers.lhs_ragged_dimensions) <= set(contracted) else each
    if "contracting_dims" in eqn.params:  # TransformerEngine's GEMM, one operand after the other's scale
        contracted, _ = eqn.params["contracting_dims"]
        return 2 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        return 2 * out * math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
    return 0
