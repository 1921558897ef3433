"""XLA's compiler for GPUs: its folder, its installation, and that JAX does not know it."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from fp8jax import cli
from fp8jax.cli.commands import configure
from fp8jax.inspect import compiler, targets
from fp8jax.inspect import device as devices


@pytest.fixture
def without_plugin(monkeypatch, tmp_path):
    """An environment in which JAX has no plugin, and the folder of the compiler is empty."""
    version = compiler.version
    monkeypatch.setattr(compiler, "version", lambda name: None if name == compiler._PLUGIN else version(name))
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
            is_toolkit = "nvidia-nvvm" in command[-1]
            file = compiler._TOOLKIT / compiler._FUNCTIONS if is_toolkit else compiler._LIBRARY
            file = pathlib.Path(command[command.index("--target") + 1]) / file
            file.parent.mkdir(parents=True)
            file.write_text("")
        return subprocess.CompletedProcess(command, self.status, "", self.stderr)


def test_the_compiler_of_this_jaxlib_is_installed_once(without_plugin, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", pip := Pip())
    old = compiler.folder().with_name("jax-cuda13-pjrt-0.0.1")
    old.mkdir(parents=True)
    assert "fp8jax install-compiler" in compiler.why_not()
    assert cli.main(["install-compiler"]) == cli.main(["install-compiler"]) == 0
    [command] = pip.commands
    version = jax.lib.__version__
    assert command[-2:] == [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
    assert "--no-deps" in command
    assert capsys.readouterr().out.split() == [str(compiler.folder())] * 2
    assert list(compiler.folder().parent.iterdir()) == [compiler.folder()]
    assert compiler.why_not() is None


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_toolkit_is_installed_where_there_is_none(has_compiler, without_plugin, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", pip := Pip())
    if has_compiler:  # of a version that did not install it
        (compiler.folder() / compiler._LIBRARY.parent).mkdir(parents=True)
        (compiler.folder() / compiler._LIBRARY).write_text("")
        assert compiler.why_not() is None
    monkeypatch.setattr(compiler, "_TOOLKITS", ())  # and the tests have no wheels of NVIDIA
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    expected = "NVIDIA's assembler" if has_compiler else "XLA's compiler"
    assert f"needs {expected}" in str(compiler.why_not())
    assert cli.main(["install-compiler"]) == cli.main(["install-compiler"]) == 0
    assert [command[-1].split("=")[0] for command in pip.commands][-1] == "nvidia-nvvm>"
    assert len(pip.commands) == 2 - has_compiler
    assert (compiler.folder() / compiler._LIBRARY).exists() and compiler.why_not() is None
    assert list(compiler.folder().parent.iterdir()) == [compiler.folder()]


def test_nothing_is_left_where_pip_fails(without_plugin, monkeypatch, capsys):
    said = "WARNING: a cache\nERROR: No matching distribution found\n"
    monkeypatch.setattr(subprocess, "run", Pip(1, said))
    assert cli.main(["install-compiler"]) == 2
    assert re.search(
        r"could not install jax-cuda13-plugin==\S+ jax-cuda13-pjrt==\S+, which exist for Linux only: "
        r"ERROR: No matching distribution found\. With another pip: pip install --no-deps .*"
        r" --target \S+/jax-cuda13-pjrt-\S+ jax-cuda13-plugin==\S+ jax-cuda13-pjrt==",
        capsys.readouterr().err,
    )
    assert list(compiler.folder().parent.iterdir()) == []


def test_a_missing_compiler_is_one_clear_error(without_plugin, capsys):
    with pytest.raises(RuntimeError, match="needs XLA's compiler: fp8jax install-compiler"):
        targets.compile_for(jnp.sin, jnp.ones(3))
    states = {package["purpose"]: package["state"] for package in devices.examine()["packages"]}
    assert "fp8jax install-compiler" in states[devices.TARGETS]


def wheels():
    """The folder with the compiler's wheels: its own, or one beside JAX; None if they are not here."""
    folders = (compiler.folder(), *map(pathlib.Path, sys.path))
    return next((folder for folder in folders if (folder / compiler._LIBRARY).exists()), None)


PROGRAM = """
    import pathlib, sys
    import jax, jax.numpy as jnp
    from jax._src import xla_bridge
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.sharding import NamedSharding, PartitionSpec
    from fp8jax.inspect import compiler, targets

    xla_bridge.discover_pjrt_plugins = lambda: None  # JAX has none
    compiler.folder = lambda: pathlib.Path(sys.argv[1])
    compiler.version = {"jaxlib": "of the wheels"}.get
    platforms = set(xla_bridge._backend_factories)
    print(jax.devices())

    sharding = NamedSharding(targets.mesh("h200", 8), PartitionSpec("devices"))
    x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32, sharding=sharding)
    square = custom_partitioning(jnp.square)
    square.def_partition(
        partition=lambda mesh, args, out: (mesh, jnp.square, out.sharding, (args[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
        sharding_rule="i j k -> i j k",
    )
    text = targets.compile_for(lambda x: jnp.linalg.qr(square(x)), x, devices=8).as_text()
    print("cusolver_geqrf_ffi" in text, "all-gather" in text, "CustomSPMD" in text)
    print(set(xla_bridge._backend_factories) - platforms, jax.default_backend())
"""


@pytest.mark.skipif(wheels() is None, reason=str(compiler.why_not()))
def test_jax_knows_no_platform_of_the_compiler():
    """Kernels of JAX's and rules of partitioning are compiled, and no platform is added for JAX to start."""
    folder = wheels()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[CpuDevice(id=0)]", "True False False", "set() cpu"]


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
    monkeypatch.setattr(devices, "version", lambda name: "1.0" if name in installed else None)
    monkeypatch.setattr(devices, "sees_nvidia", lambda: nvidia)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    chosen = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    configure(is_cpu=False)
    assert chosen == ({"jax_platforms": "cpu"} if expected else {})
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # the user's choice
    chosen.clear()
    configure(is_cpu=False)
    assert chosen == {}
