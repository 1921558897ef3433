"""The variables of a transformed NNX module, and where its parameters are."""

from typing import Any, NamedTuple

from flax import nnx

# The scaling state of `layer.kernel` is `layer.kernel__fp8_scale` and so on.
STATE = "__fp8_"

# The class that a frozen parameter had, where it was not `nnx.Param` itself.
CLASS = "class__fp8"


class FP8State(nnx.Variable):
    """An array of a dot product's scaling state, see `fp8jax.init_state`; stacked as the kernel is."""


class Frozen(nnx.Variable):
    """A parameter that is not trained, of a model with adapters; stacked as it was."""


class LossScale(nnx.Variable):
    """The loss scale of a model whose GEMMs are float16, see `fp8jax.loss_scale`."""


# The bridge from Linen asks for names.
for _name, _variable in (("fp8_state", FP8State), ("frozen", Frozen), ("loss_scale", LossScale)):
    nnx.register_variable_name(_name, _variable)


def modules_of(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """The modules within a module, and itself, by path."""
    return list(nnx.iter_modules(model))


class Place(NamedTuple):
    """Where a parameter is."""

    owner: Any  # the module that has it
    name: str  # of its attribute; "a/b" within one that is a dict or a list
    param: Any


def places_of(model: nnx.Module) -> dict[tuple[str, ...], Place]:
    """The parameters of a module by path; a shared one is at its first."""
    modules, places = dict(modules_of(model)), {}
    for parts, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param | Frozen):
            at = next(n for n in range(len(parts) - 1, -1, -1) if parts[:n] in modules)
            place = Place(modules[parts[:at]], "/".join(map(str, parts[at:])), param)
            places[tuple(map(str, parts))] = place
    return places


def state_path(path: Any) -> list[Any]:
    """The path of a scaling state's array in the tree of states: that of its parameter, and its own name."""
    *parents, name = path
    if not (isinstance(name, str) and STATE in name):
        return [*parents, name]
    param, part = name.split(STATE)
    return [*parents, *param.split("/"), part]


def thaw(nodes: Any) -> None:
    """Makes frozen variables parameters again."""
    for _, variable in list(nnx.iter_graph(nodes)):
        if isinstance(variable, Frozen):
            cls = variable.get_metadata().get(CLASS, nnx.Param)
            if cls is not nnx.Param:
                variable.del_metadata(CLASS)
            object.__setattr__(variable, "__class__", cls)
