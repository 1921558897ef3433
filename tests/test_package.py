"""The sdist, the wheel that is built from it, and what the wheel installs into an empty environment."""

import email
import pathlib
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import venv
import zipfile

import numpy
import pytest
from packaging.version import Version

import fp8jax
from fp8jax import extras

PACKAGES = ("fp8jax", "interop/fp8jax_torch")


def run(*command, cwd):
    """What a command printed, stdout and stderr."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    return done.stdout + done.stderr


def build(kind, source, to):
    """The path of the sdist or wheel of a folder."""
    said = run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to, cwd=source)
    [path] = to.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    assert path.exists(), said
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", pathlib.Path(__file__).parent.parent, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / f"fp8jax-{fp8jax.__version__}", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An environment with the wheel; its dependencies are those of this one, which it finds by their path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    said = run(*pip, cwd=folder)
    assert "Successfully installed fp8jax" in said
    [packages] = folder.glob("lib/python3*/site-packages")
    # The packages of a folder in a .pth file are found, and the .pth files in it, such as ours, are not read.
    (packages / "dependencies.pth").write_text(str(pathlib.Path(numpy.__file__).parent.parent))
    return python


def test_a_wheel_has_the_files_of_both_packages(wheel, root):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to((root / package).parent).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected | {"fp8jax_command.py"}
    assert {"fp8jax/py.typed", "fp8jax_torch/py.typed", "fp8jax/train/report/page.html"} <= names


def test_an_editable_wheel_finds_each_package_and_the_command(root, tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", tmp_path, cwd=root)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        finder = archive.read("_editable_impl_fp8jax.py").decode()
    found = dict(re.findall(r"map_module\('(\w+)', '(.*)'\)", finder))
    assert found == {
        "fp8jax": str(root / "fp8jax/__init__.py"),
        "fp8jax_command": str(root / "fp8jax_command.py"),
        "fp8jax_torch": str(root / "interop/fp8jax_torch/__init__.py"),
    }


def test_the_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == fp8jax.__version__
    assert {"train", "torch"} <= set(metadata.get_all("Provides-Extra"))
    needed = {
        re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra" not in line
    }
    assert {"jax", "flax", "optax"} <= needed and not {"torch", "orbax-checkpoint"} & needed


def test_no_extra_brings_a_plugin_of_jax(root):
    """A plugin makes every JAX program of the environment look for a GPU."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = sum(project["optional-dependencies"].values(), project["dependencies"])
    assert [name for name in needed if "cuda" in name or name.startswith("jax[")] == []


def test_no_text_installs_fp8jax_from_an_index(root):
    """No index has it, and anybody may take its name there."""
    said = re.compile(r"""pip install (-\S+ )*["']?fp8jax|fp8jax\[\w+[],]""")
    texts = [root / "README.md", root / "CONTRIBUTING.md"]
    for folder in ("fp8jax", "interop", "docs", "examples", "tests"):
        texts += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".md")]
    found = [path for path in texts if path != pathlib.Path(__file__) and said.search(path.read_text())]
    assert [path.relative_to(root).as_posix() for path in found] == []


def test_an_sdist_has_what_the_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "dev",
        "tests/conftest.py",
        "tests/data/te.npz",
        "tests/pins.txt",
        "examples/train_gpt.py",
    } <= names
    assert not [name for name in names if name.startswith((".venv", "runs"))]


def test_an_installed_wheel_imports(python, tmp_path):
    pytest.importorskip("torch")
    program = "import fp8jax, fp8jax_torch; print(fp8jax.__version__, fp8jax.__file__, fp8jax_torch.__file__)"
    version, *files = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert version == fp8jax.__version__
    environment = str(python.parent.parent)
    assert len(files) == 2 and all(file.startswith(environment) for file in files)


def test_an_installed_wheel_has_the_command(python, tmp_path):
    assert "fp8jax" in run(python.parent / "fp8jax", "--help", cwd=tmp_path)


def test_without_orbax_the_error_names_the_extra():
    program = """
        import sys
        class Hide:
            def find_spec(name, path, target=None):
                if name == "orbax":
                    raise ModuleNotFoundError("No module named 'orbax'", name=name)
        sys.meta_path.insert(0, Hide)
        import fp8jax, fp8jax.inspect
        import fp8jax.train
    """
    said = run(sys.executable, "-c", textwrap.dedent(program), cwd=pathlib.Path(__file__).parent.parent)
    assert said.splitlines()[-1] == f"ImportError: not installed: orbax.checkpoint; {extras.install('train')}"


def test_without_torch_the_error_names_the_extra(python, tmp_path):
    program = "import sys; sys.modules['torch'] = None; import fp8jax_torch"
    said = run(python, "-I", "-c", program, cwd=tmp_path)
    assert said.splitlines()[-1] == (
        f"ImportError: fp8jax_torch needs torch, which cannot be imported: {extras.install('torch')}"
    )


@pytest.mark.parametrize(
    "path, pattern", [("CITATION.cff", r"^version: (.*)$"), ("CHANGELOG.md", r"^## \[?(\d[^\] ]*)")]
)
def test_the_version_is_told_the_same(root, path, pattern):
    """The last release's; between releases the package is a later version."""
    released = Version(re.search(pattern, (root / path).read_text(), re.M)[1])
    version = Version(fp8jax.__version__)
    assert not released.is_prerelease
    if version.is_devrelease:
        assert version > released and "\n## Unreleased\n" in (root / "CHANGELOG.md").read_text()
    else:
        assert version == released
