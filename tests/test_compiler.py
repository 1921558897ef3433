"""XLA's compiler for GPUs: its folder, its installation, and that JAX does not know it."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8jax import cli
from fp8jax.inspect import compiler, targets
from fp8jax.inspect import device as devices


@pytest.fixture
def without_plugin(monkeypatch, tmp_path):
    """An environment in which JAX has no plugin, and the folder of the compiler is empty."""
    version = compiler._version
    monkeypatch.setattr(
        compiler, "_version", lambda name: None if name == compiler._PLUGIN else version(name)
    )
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    targets._mesh_of.cache_clear()
    yield tmp_path
    targets._mesh_of.cache_clear()


class Pip:
    """Stands in for pip: makes the library, or fails."""

    def __init__(self, status=0, stderr=""):
        self.status, self.stderr, self.commands = status, stderr, []

    def __call__(self, command, **options):
        self.commands.append(command)
        if not self.status:
            library = pathlib.Path(command[command.index("--target") + 1]) / compiler._LIBRARY
            library.parent.mkdir(parents=True)
            library.write_text("")
        return subprocess.CompletedProcess(command, self.status, "", self.stderr)


def test_the_compiler_of_this_jaxlib_is_installed_once(without_plugin, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", pip := Pip())
    old = compiler.folder().with_name("jax-cuda13-pjrt-0.0.1")
    old.mkdir(parents=True)
    assert "fp8jax install-compiler" in compiler.why_not()
    assert cli.main(["install-compiler"]) == cli.main(["install-compiler"]) == 0
    [command] = pip.commands
    assert command[-1] == f"jax-cuda13-pjrt=={jax.lib.__version__}" and "--no-deps" in command
    assert capsys.readouterr().out.split() == [str(compiler.folder())] * 2
    assert list(compiler.folder().parent.iterdir()) == [compiler.folder()]
    assert compiler.why_not() is None


def test_nothing_is_left_where_pip_fails(without_plugin, monkeypatch, capsys):
    said = "WARNING: a cache\nERROR: No matching distribution found\n"
    monkeypatch.setattr(subprocess, "run", Pip(1, said))
    assert cli.main(["install-compiler"]) == 2
    assert re.search(
        r"could not install jax-cuda13-pjrt==\S+, which .* only: ERROR: No matching distribution found\. "
        r"With another pip: pip install --no-deps .* --target \S+/jax-cuda13-pjrt-\S+ jax-cuda13-pjrt==",
        capsys.readouterr().err,
    )
    assert list(compiler.folder().parent.iterdir()) == []


def test_a_missing_compiler_is_one_clear_error(without_plugin, capsys):
    with pytest.raises(RuntimeError, match="needs XLA's compiler: fp8jax install-compiler"):
        targets.compile_for(jnp.sin, jnp.ones(3))
    states = {package["purpose"]: package["state"] for package in devices.examine()["packages"]}
    assert "fp8jax install-compiler" in states[devices.TARGETS]


def library():
    """The compiler's library, in its folder or in JAX's plugin; None if neither is here."""
    beside = (pathlib.Path(folder) / compiler._LIBRARY for folder in sys.path)
    return next((path for path in (compiler.folder() / compiler._LIBRARY, *beside) if path.exists()), None)


@pytest.mark.skipif(library() is None, reason=str(compiler.why_not()))
def test_jax_knows_no_platform_of_the_compiler(without_plugin):
    """Programs are compiled, and no backend is registered, which JAX would start with its own."""
    from jax._src import xla_bridge

    folder, found = compiler.folder(), library()
    folder.mkdir(parents=True)
    (folder / "jax_plugins").symlink_to(found.parent.parent)
    jax.devices()
    before = set(xla_bridge._backend_factories)
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    compiled = targets.compile_for(lambda x: x @ x + jax.random.normal(jax.random.key(0), x.shape), x)
    assert "__cublas$lt$matmul" in compiled.as_text()
    assert set(xla_bridge._backend_factories) == before


@pytest.mark.parametrize(
    "installed, nvidia, expected",
    [
        ((), False, False),
        (("jax-cuda13-plugin",), False, True),
        (("jax-cuda12-plugin",), False, True),
        (("jax-cuda13-plugin",), True, False),
        (("jax-cuda13-plugin", "libtpu"), False, False),
    ],
)
def test_commands_choose_the_cpu_where_a_plugin_has_no_gpu(installed, nvidia, expected, monkeypatch):
    monkeypatch.setattr(devices, "_version", lambda name: "1.0" if name in installed else None)
    monkeypatch.setattr(devices, "sees_nvidia", lambda: nvidia)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    chosen = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    cli._configure(is_cpu=False)
    assert chosen == ({"jax_platforms": "cpu"} if expected else {})
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # the user's choice
    chosen.clear()
    cli._configure(is_cpu=False)
    assert chosen == {}
