"""Classes of trees in programs that `jax.export` stores."""

import json
from typing import TypeVar

from jax import export

Class = TypeVar("Class", bound=type)


def stored_by_export(cls: Class) -> Class:
    """Registers a pytree class for `jax.export`, as "fp8jax." and its name; static fields are JSON values."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"fp8jax.{cls.__name__}",
        serialize_auxdata=lambda aux: json.dumps(aux).encode(),
        # Programs of older versions have no bytes for no static fields.
        deserialize_auxdata=lambda data: json.loads(data or b"null"),
    )
    return cls


def tuple_stored_by_export(cls: Class) -> Class:
    """Registers a NamedTuple for `jax.export`, as "fp8jax." and its name."""
    export.register_namedtuple_serialization(cls, serialized_name=f"fp8jax.{cls.__name__}")
    return cls
