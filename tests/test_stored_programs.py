"""Whole training steps stored by `jax.export`, whose trees have fp8jax's classes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.export import _export

import fp8jax
from fp8jax.formats import E4M3
from fp8jax.optim.guard.replace_update import ReplaceUpdate
from fp8jax.optim.storage import STORAGES
from fp8jax.quantization import ScaledArray, ScaledGradient, quantize
from fp8jax.quantization.packed import PackedE2M1

X = jax.random.normal(jax.random.key(0), (8, 64))
MODULE = nn.Dense(64)

OPTIMIZERS = {
    "adamw": lambda: fp8jax.optim.adamw(1e-2, "fp8"),
    "E4M4": lambda: fp8jax.optim.adamw(1e-2, "fp8_6"),
    "8 bits": lambda: fp8jax.optim.adamw_8bit(1e-2, "fp8"),
    "muon": lambda: fp8jax.optim.muon(1e-2, "fp8"),
    "any": lambda: fp8jax.optim.with_dequantized(optax.sgd(1e-2, 0.9), "fp8"),
}


@pytest.fixture(autouse=True)
def tuples_of_optax(monkeypatch):
    """Registers those of this file's optimizers, which a process can do once, for one test."""
    for table in ("serialization_registry", "deserialization_registry"):
        ours = {
            key: row
            for key, row in getattr(_export, table).items()
            if "optax" not in getattr(key, "__module__", key)
        }
        monkeypatch.setattr(_export, table, ours)
    for name in ("ScaleByAdamState", "EmptyState", "TraceState"):
        jax.export.register_namedtuple_serialization(getattr(optax, name), serialized_name=f"optax.{name}")


def stored(function, *args):
    """The function, exported, serialized and read again."""
    return jax.export.deserialize(jax.export.export(jax.jit(function))(*args).serialize()).call


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stored_training_step(name):
    """It has the bits of the compiled step, in each format of optimizer states."""
    model, tx = fp8jax.transform(MODULE, "fp8"), OPTIMIZERS[name]()
    grad_fn = fp8jax.value_and_grad(lambda variables: jnp.mean((model.apply(variables, X) - X) ** 2))

    def step(variables, state):
        loss, grads, variables = grad_fn(variables)
        updates, state = tx.update(grads, state, variables["params"])
        return fp8jax.apply_updates(variables, updates), state, loss

    variables = model.init(jax.random.key(1), X)
    first = variables, tx.init(variables["params"])
    assert_same(stored(step, *first)(*first), jax.jit(step)(*first))


def test_each_class_of_trees():
    """Classes with `jax.export`'s names keep their static fields."""
    x = quantize(X, E4M3)
    trees = [
        x,
        ScaledGradient.of(x, is_power_of_two=False),
        ReplaceUpdate.by(x),
        ScaledArray(PackedE2M1.cast(X), jnp.float32(1)),
        *(storage.zeros(X, signed=signed) for storage in STORAGES.values() for signed in (True, False)),
    ]
    assert_same(stored(lambda trees: trees, trees)(trees), trees)


def test_a_program_stored_before_fields_were():
    """A `ScaledArray` had no bytes for its static fields."""
    # JAX has no public way to make an old program.
    _, read, _ = _export.deserialization_registry["fp8jax.ScaledArray"]
    assert read(b"") is None
