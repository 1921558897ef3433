"""Descriptions of GPUs, and compiling for each of them on a machine that has none."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.inspect import compiler, program, targets

needs_plugin = pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))


def fp8_dot(lhs, rhs, scale):
    """The pattern that XLA makes one FP8 GEMM of."""
    lhs, rhs = (
        jax.lax.optimization_barrier(x.astype(jnp.float8_e4m3fn)).astype(jnp.bfloat16) * scale
        for x in (lhs, rhs)
    )
    return lhs @ rhs


# FP8 operations per second of NVIDIA's data sheets, halved where they count sparsity.
PEAKS = {"h100": 1978.9e12, "h200": 1978.9e12, "b200": 4500e12, "l40s": 733e12}

ARGS = (
    jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((128, 32), jnp.bfloat16),
    jax.ShapeDtypeStruct((), jnp.bfloat16),
)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_description_is_consistent(name):
    target = targets.get(name)
    assert target.name == name
    assert name.upper() in target.device
    assert target.capability >= (8, 9)  # or it has no FP8
    # Dense FP8 operations per core and clock; data sheets count with a clock up to 10% below the highest.
    per_clock = {(8, 9): 2048, (9, 0): 8192, (10, 0): 16384}[target.capability]
    assert PEAKS[name] == pytest.approx(per_clock * target.cores * target.clock_ghz * 1e9, rel=0.1)
    assert 2 * target.flops == pytest.approx(PEAKS[name], rel=0.02)
    assert 1e10 < target.link < target.bandwidth


def test_a_target_is_a_value():
    h200 = targets.get("H200")
    assert h200 is targets.TARGETS["h200"]
    assert pickle.loads(pickle.dumps(h200)) == h200
    assert hash(dataclasses.replace(h200)) == hash(h200)
    assert targets.get(h200) is h200


@needs_plugin
@pytest.mark.parametrize("name", targets.TARGETS)
def test_every_target_compiles(name):
    compiled = targets.compile_for(fp8_dot, *ARGS, target=name)
    assert program.read(compiled).count("cublaslt_f8") == 1


@needs_plugin
def test_a_gpu_without_fp8_gets_no_fp8_gemm():
    a100 = dataclasses.replace(
        targets.get("h100"), name="a100", device="NVIDIA A100", capability=(8, 0), cores=108
    )
    read = program.read(targets.compile_for(fp8_dot, *ARGS, target=a100))
    assert read.count("cublaslt_f8") == 0
    assert read.count() == 1


@needs_plugin
def test_arrays_keys_and_python_numbers_are_arguments():
    def fn(tree, key, factor):
        return tree["x"] * factor + jax.random.normal(key, (3,))

    arguments = ({"x": jnp.ones(3)}, jax.random.key(0), 2.0)
    assert program.read(targets.compile_for(fn, *arguments)).outputs == 12


@needs_plugin
def test_shardings_on_the_targets_mesh_are_kept():
    spread = NamedSharding(targets.mesh("h200", 8), PartitionSpec("devices"))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=spread)
    compiled = targets.compile_for(lambda x: x.sum(0), x, devices=8)
    assert "all-reduce" in compiled.as_text()
    assert program.read(compiled).arguments == 64 * 16 * 4 / 8


@needs_plugin
def test_compilation_cache(tmp_path, recwarn):
    """A user's cache has programs for GPUs that are not here, which JAX cannot read back."""
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        functions = [lambda *args: fp8_dot(*args) for _ in range(2)]  # JAX remembers what it compiled
        first, second = (targets.compile_for(function, *ARGS).as_text() for function in functions)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        compilation_cache.reset_cache()
    assert list(tmp_path.iterdir()) and first == second
    assert not list(recwarn)


@needs_plugin
def test_compiling_starts_no_device_and_needs_no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    compiled = targets.compile_for(fp8_dot, *ARGS)
    assert "__triton" not in compiled.as_text()
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: targets.get("v100"), "expected one of h100, h200, b200, l40s"),
        (lambda: targets.mesh("h200", 0), "`devices`: expected a positive number; got 0"),
        (lambda: targets.compile_for(fp8_dot, *ARGS, target="tpu"), "got 'tpu'"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_plugin_of_another_version_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "folder", lambda: tmp_path)  # nothing is installed
    versions = {"jax-cuda13-plugin": "0.9.0", "jaxlib": "0.10.2"}
    monkeypatch.setattr(compiler, "version", versions.get)
    targets._mesh_of.cache_clear()
    with pytest.raises(RuntimeError, match="jax-cuda13-plugin 0.9.0 does not match jaxlib 0.10.2"):
        targets.compile_for(fp8_dot, *ARGS)
