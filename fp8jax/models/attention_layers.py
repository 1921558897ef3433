"""Flax's attention layers, with another function between their products.

    transform(model, recipe, attention="chunked")

`nn.MultiHeadDotProductAttention` (with `nn.SelfAttention` and `nn.MultiHeadAttention`) and
`nnx.MultiHeadAttention` call their attribute `attention_fn`. Where that is Flax's own, one that calls
`fp8jax.attention.dot_product_attention` takes its place: in Linen for the length of the call, in NNX in the
transformed copy. What the new one cannot do is done by the old one, and the report says so.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fp8jax.attention import IMPLEMENTATIONS, choose, dot_product_attention

# Of each layer that was called, by path: what computes its attention.
Found = dict[str, str]

_OWN = {
    "dropout": "dropout of the attention's weights needs them all",
    "module": "its weights are sown",
    "precision": "it has a precision of its own",
    "einsum": "it has an einsum of its own",
    "one": "a single query, as decoding from a cache has, has nothing to save",
    "decode": "it keeps a cache to decode from",
    "function": "it has an attention_fn of its own",
}


def check(implementation: str | None) -> None:
    """Raises ValueError if there is no such implementation."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`attention`: expected one of {', '.join(IMPLEMENTATIONS)}, or None to leave the model as it "
            f"is; got {implementation!r}."
        )


def lines(implementation: str | None, found: Found) -> list[str]:
    """What a report says: each thing that computes attention, and in which layers."""
    layers_of: dict[str, list[str]] = {}
    for path, what in found.items():
        layers_of.setdefault(what, []).append(path or "(root)")
    return [f"attention={implementation}: {what} in {', '.join(of)}" for what, of in layers_of.items()]


def raise_if_none(implementation: str | None, found: Found) -> None:
    """Raises ValueError unless some layer's function is replaced, whatever it then does."""
    if implementation is not None and set(found.values()) <= {_left(_OWN["function"]), _left(_OWN["decode"])}:
        what = "; ".join(lines(implementation, found)) or "there is none"
        raise ValueError(
            f"`attention`: {implementation} is for Flax's MultiHeadDotProductAttention, SelfAttention and "
            f"MultiHeadAttention with Flax's own attention_fn; {what}. In a model's own code call "
            "`fp8jax.attention.dot_product_attention`."
        )


def _left(reason: str) -> str:
    return f"Flax's own ({reason})"


def _why_own(query: Any, options: dict[str, Any]) -> str | None:
    """Why Flax's own function is called, or None."""
    if options.get("dropout_rate", 0.0) > 0.0 and not options.get("deterministic", False):
        return _OWN["dropout"]
    if options.get("module") is not None:
        return _OWN["module"]
    if options.get("precision") is not None:
        return _OWN["precision"]
    if any(options.get(name) is not None for name in options if "einsum" in name):
        return _OWN["einsum"]
    return _OWN["one"] if query.shape[-3] == 1 else None


def _in_place_of(own: Callable[..., Any], implementation: str, note: Callable[[str], None]) -> Any:
    """A function that a layer calls in the place of its own, with its signature, at which Flax looks."""

    @functools.wraps(own)
    def attend(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Any:
        if reason := _why_own(query, options):
            note(_left(reason))
            return own(query, key, value, bias=bias, mask=mask, **options)
        promote = options.get("promote_dtype", promote_dtype)
        query, key, value = promote((query, key, value), dtype=options.get("dtype"))
        chosen = implementation
        if implementation == "auto":
            chosen, why = choose(query, key, bias, mask)
            note(f"{chosen} ({why})")
        else:
            note(chosen)
        mask = None if mask is None else mask.astype(bool)
        is_causal = options.get("is_causal", False)
        of = {"bias": bias, "mask": mask, "is_causal": is_causal, "implementation": chosen}
        return dot_product_attention(query, key, value, **of)

    return attend


# Linen ###########################################################################################


@contextlib.contextmanager
def intercepted(implementation: str | None) -> Iterator[Found]:
    """While it lasts, the attention layers of Linen modules call another function; gives what they did."""
    found: Found = {}
    if implementation is None:
        yield found
        return

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        is_attention = isinstance(module, nn.MultiHeadDotProductAttention)
        if not is_attention or context.method_name != "__call__" or path in calling:
            return call(*args, **kwargs)
        own = module.attention_fn
        if module.decode or own is not nn.dot_product_attention:
            found[path] = _left(_OWN["decode" if module.decode else "function"])
            return call(*args, **kwargs)
        calling.add(path)  # `nn.SelfAttention` calls its base
        attend = _in_place_of(own, implementation, functools.partial(found.__setitem__, path))
        try:
            with _replaced(module, "attention_fn", attend):
                return call(*args, **kwargs)
        finally:
            calling.remove(path)

    calling: set[str] = set()
    with nn.intercept_methods(intercept):
        yield found


@contextlib.contextmanager
def _replaced(module: Any, name: str, new: Any) -> Iterator[None]:
    """One attribute of a bound module, which Flax freezes, replaced for a while. The bound
    module is Flax's own copy for this call; the user's module is never touched."""
    old = getattr(module, name)
    object.__setattr__(module, name, new)
    try:
        yield
    finally:
        object.__setattr__(module, name, old)


# NNX #############################################################################################


def replace(model: nnx.Module, implementation: str | None) -> None:
    """Gives the attention layers of an NNX module another function.

    Raises:
        ValueError: none of them could have one.
    """
    if implementation is None:
        return
    found: Found = {}
    for path, layer in _attentions(model):
        if layer.attention_fn is nnx.dot_product_attention:
            layer.attention_fn = _noting(implementation)
            found[path] = implementation
        else:
            found[path] = _left(_OWN["function"])
    raise_if_none(implementation, found)


@functools.cache
def _noting(implementation: str) -> Any:
    """One function for all layers, since it is a constant of the model's graph."""
    attend = _in_place_of(nnx.dot_product_attention, implementation, lambda what: _note.get()(what))
    attend.attention__fp8 = implementation
    return attend


_note: contextvars.ContextVar[Callable[[str], None]] = contextvars.ContextVar(
    "fp8jax_attention", default=lambda what: None
)


@contextlib.contextmanager
def noted(model: nnx.Module, path: Callable[[], str]) -> Iterator[Found]:
    """While it lasts, an NNX module's attention layers note what they do; `path` says which is called."""
    layers = _attentions(model)
    found = {at: _left(_OWN["function"]) for at, layer in layers if implementation_of(layer) is None}
    token = _note.set(lambda what: found.__setitem__(path(), what))
    try:
        yield found if len(found) < len(layers) else {}
    finally:
        _note.reset(token)


def implementation_of(layer: Any) -> str | None:
    """Who computes a layer's attention, if it is not Flax."""
    return getattr(layer.attention_fn, "attention__fp8", None)


def restore(model: nnx.Module) -> None:
    """Undoes `replace`."""
    for _, layer in _attentions(model):
        if implementation_of(layer) is not None:
            layer.attention_fn = nnx.dot_product_attention


def _attentions(model: nnx.Module) -> list[tuple[str, Any]]:
    modules = nnx.iter_modules(model)
    return [
        ("/".join(map(str, parts)), layer)
        for parts, layer in modules
        if isinstance(layer, nnx.MultiHeadAttention)
    ]
