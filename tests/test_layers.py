"""Imports point one way: down the ranks of the design, and every library stays in its room.

A room is a root file or a folder of `fp8jax/`; `rooms.py` has the table. A module may import its own room and
rooms of a lower rank. `interop/fp8jax_torch` stands outside the ranks and may import `formats`, `recipe`,
`quantization`, `rewrite`, for its rules, `scaling`, for its blocks, and `checkpoints`, for its name maps. The
checker reads the sources (lazy imports included) and imports nothing.
"""

import ast
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest
import rooms
from rooms import RANKS

ANYWHERE = {"jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy", "fp8jax"} | set(sys.stdlib_module_names)

# Library -> the modules or folders that may import it; a "lazy" one only inside a function.
LIBRARIES = {
    "flax": {
        "adapters": "eager",
        "inspect": "eager",  # models to look at a recipe with
        "train.step.network": "eager",
        "scaling.merge": "eager",  # borrows the dtype whose addition is max
    },
    "optax": {"optim": "eager", "train.step.optimizers": "eager"},
    "orbax": {"train": "eager"},
    "rich": {"train": "lazy"},
    "jsonargparse": {"train.options": "lazy"},
    "absl": {"train.data.loader": "lazy"},  # grain's flags
    "grain": {"train": "lazy"},  # seconds to import, and most programs read no data through it
    "matplotlib": {"train": "lazy", "inspect.chart": "lazy"},
    "yaml": {"recipe": "lazy"},
    "transformer_engine": {"backends.te": "lazy"},
    "safetensors": {"checkpoints.folder": "lazy"},
}

INTEROP_MAY_IMPORT = {"checkpoints", "extras", "formats", "recipe", "quantization", "rewrite", "scaling"}

# Libraries beside torch -> the one module of interop/fp8jax_torch that imports each, inside functions.
INTEROP_LIBRARIES = {
    "msamp": "backends.msamp",
    "torchao": "backends.torchao",
    "transformer_engine": "backends.te",
    "transformers": None,
}


class Import(NamedTuple):
    """One imported name, e.g. Import("fp8jax.scaling.delayed", 12, lazy=False)."""

    name: str
    line: int
    lazy: bool


def module_name(path, top):
    """Dotted name below `top`: scaling/__init__.py -> scaling, scaling/merge.py -> scaling.merge."""
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def package_of(path, top):
    """The package that relative imports of the file start from."""
    return [top.name, *path.relative_to(top).parts[:-1]]


def imports_of(path, top):
    """Every import in the file: statements, and import_module, __import__ or `need` of a constant."""
    tree = ast.parse(path.read_text(), str(path))
    lazy_nodes = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        lazy = node in lazy_nodes
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = package_of(path, top)[: -node.level + 1 or None] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                yield Import(".".join([*base, alias.name]), node.lineno, lazy)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__", "need")
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno, lazy)


def folders_of(module):
    """The module and the folders that it is in: a.b.c, a.b, a."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def target_of(parts):
    """The room that an import of fp8jax.`parts` reaches; a name of the root is of `__init__`."""
    return parts[0] if parts and (parts[0] in RANKS or len(parts) > 1) else "__init__"


def complaint_about(module, imported):
    """Why `module` may not import that, or None."""
    library, *rest = imported.name.split(".")
    room = module.split(".")[0]
    if library == "fp8jax":
        target = target_of(rest)
        if target not in RANKS:
            return f"{target} is no room of the design, add it to tests/rooms.py with its rank"
        # `from fp8jax import Recipe` goes through the root, which stands above everything.
        if target == room or RANKS[target] < RANKS[room]:
            return None
        return f"{room} (rank {RANKS[room]}) imports {target} (rank {RANKS[target]})"
    if library in ANYWHERE:
        return None
    users = LIBRARIES.get(library, {})
    allowed = next((users[name] for name in folders_of(module) if name in users), None)
    if allowed == "eager" or (allowed == "lazy" and imported.lazy):
        return None
    if allowed == "lazy":
        return f"{library} is imported by {module} when it loads: import it in the function that needs it"
    return f"{library} is imported by {module}; it belongs to {', '.join(sorted(users)) or 'no room'}"


def violations(top):
    """Lines that say which import of the package at `top` breaks which rule."""
    found = []
    for path in sorted(top.rglob("*.py")):
        module = module_name(path, top)
        where = path.relative_to(top.parent)
        if module.split(".")[0] not in RANKS:
            found.append(f"{where}: no room of the design, add it to tests/rooms.py with its rank")
            continue
        for imported in imports_of(path, top):
            complaint = complaint_about(module, imported)
            if complaint:
                found.append(f"{where}:{imported.line}: {complaint}")
    return found


def interop_violations(top):
    """The same for interop/fp8jax_torch, which sees some rooms of fp8jax."""
    found = []
    for path in sorted(top.rglob("*.py")):
        module = module_name(path, top)
        for imported in imports_of(path, top):
            library, *rest = imported.name.split(".")
            allowed = INTEROP_LIBRARIES.get(library, module) == module
            lazy_enough = library not in INTEROP_LIBRARIES or imported.lazy
            is_room = library != "fp8jax" or (rest and rest[0] in INTEROP_MAY_IMPORT)
            if not (allowed and lazy_enough and is_room):
                found.append(f"{path.relative_to(top.parent)}:{imported.line}: imports {imported.name}")
    return found


def shadowing(top):
    """Names that the root exports and one of its files has too: `import fp8jax.name` would get the export."""
    files = {path.stem for path in top.iterdir() if path.suffix == ".py" or path.is_dir()}
    return [
        f"fp8jax/__init__.py:{imported.line}: exports {name}, and a file has that name"
        for imported in imports_of(top / "__init__.py", top)
        for parent, _, name in [imported.name.rpartition(".")]
        if name in files and parent != "fp8jax"
    ]


def plant(folder, files):
    """Writes {path: source} under folder/fp8jax and returns that."""
    top = folder / "fp8jax"
    for path, source in {"__init__.py": "", **files}.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(textwrap.dedent(source))
    return top


def test_imports_point_down(root):
    assert violations(root / "fp8jax") == []


def test_interop_sees_its_rooms(root):
    assert interop_violations(root / "interop" / "fp8jax_torch") == []


def test_no_file_is_named_as_an_export(root):
    assert shadowing(root / "fp8jax") == []


def unused(top):
    """Rooms, and rooms of libraries in the table above, that the package at `top` lacks."""
    modules = {module_name(path, top): path for path in top.rglob("*.py")}
    users = set()
    for module, path in modules.items():
        for imported in imports_of(path, top):
            library = imported.name.partition(".")[0]
            users |= {(library, folder) for folder in folders_of(module)}
    found = {module.split(".")[0] for module in modules}
    stale = [f"room {room}" for room in RANKS if room not in found]
    wanted = ((library, module) for library, allowed in LIBRARIES.items() for module in allowed)
    return stale + [f"{library} in {module}" for library, module in wanted if (library, module) not in users]


def test_every_exception_is_used(root):
    assert unused(root / "fp8jax") == []


def test_an_unused_exception_is_found(tmp_path):
    found = unused(plant(tmp_path, {"optim/adam.py": "import optax"}))
    assert {"room dot", "flax in inspect"} <= set(found)
    assert not {"room optim", "optax in optim"} & set(found)


@pytest.mark.parametrize(
    "path, source, says",
    [
        ("formats.py", "from fp8jax.recipe import Recipe", "formats (rank 0) imports recipe (rank 1)"),
        ("recipe.py", "import fp8jax.quantization", "recipe (rank 1) imports quantization (rank 1)"),
        ("scaling/delayed.py", "from ..dot import dot_general", "scaling (rank 2) imports dot (rank 4)"),
        ("scaling/__init__.py", "from ..backends import xla", "scaling (rank 2) imports backends (rank 3)"),
        ("dot.py", "from . import rewrite", "dot (rank 4) imports rewrite (rank 5)"),
        ("dot.py", "def f():\n    import fp8jax.gradients", "dot (rank 4) imports gradients (rank 6)"),
        ("dot.py", "from fp8jax import Recipe", "dot (rank 4) imports __init__ (rank 10)"),
        ("train/loop.py", "import fp8jax", "train (rank 9) imports __init__ (rank 10)"),
        ("adapters/linen.py", "from fp8jax import train", "adapters (rank 7) imports train (rank 9)"),
        ("optim/adam.py", "import flax.linen as nn", "flax is imported by optim.adam"),
        ("scaling/delayed.py", "from flax.linen import fp8_ops", "flax is imported by scaling.delayed"),
        (
            "adapters/linen.py",
            "import optax",
            "optax is imported by adapters.linen; it belongs to optim",
        ),
        ("recipe/yaml_file.py", "import yaml", "yaml is imported by recipe.yaml_file when it loads"),
        ("inspect/chart.py", "from rich import table", "rich is imported by inspect.chart; it belongs to"),
        (
            "quantization.py",
            "import importlib\nimportlib.import_module('torch')",
            "torch is imported by quantization",
        ),
        (
            "backends/xla.py",
            "import transformer_engine.jax",
            "transformer_engine is imported by backends.xla",
        ),
        ("backends/te/__init__.py", "import transformer_engine.jax", "by backends.te when it loads"),
        ("backends/te/gemm.py", "import transformer_engine.jax", "by backends.te.gemm when it loads"),
        (
            "backends/te_gemm.py",
            "def load():\n    import transformer_engine.jax",
            "transformer_engine is imported by backends.te_gemm; it belongs to backends.te",
        ),
        ("utils.py", "", "no room of the design"),
    ],
)
def test_planted_violation_is_found(tmp_path, path, source, says):
    [found] = violations(plant(tmp_path, {path: source}))
    assert says in found


def test_what_the_design_allows_passes(tmp_path):
    files = {
        "__init__.py": "from fp8jax.adapters import transform as transform\nfrom fp8jax import optim",
        "recipe/yaml_file.py": "def load():\n    import yaml",
        "recipe/recipe.py": "from fp8jax.formats import E4M3\nfrom . import yaml_file",
        "scaling/__init__.py": "from . import delayed\nfrom .merge import to_max",
        "scaling/delayed.py": "import jax\nfrom fp8jax.quantization import amax",
        "scaling/merge.py": "from flax.linen.fp8_ops import fm32",
        "backends/te/gemm.py": "def load():\n    import transformer_engine.jax",
        "optim/adam.py": "import optax\nimport ml_dtypes\nfrom ..quantization import ScaledArray",
        "adapters/linen.py": "import flax.linen as nn\nfrom fp8jax import dot",
        "inspect/chart.py": "from fp8jax.inspect import targets",
    }
    top = plant(tmp_path, files)
    assert violations(top) == []
    assert shadowing(top) == []


def test_planted_shadowing_is_found(tmp_path):
    top = plant(tmp_path, {"__init__.py": "from fp8jax.adapters import dot as dot", "dot.py": ""})
    [found] = shadowing(top)
    assert "exports dot" in found


def test_planted_interop_violation_is_found(tmp_path):
    top = tmp_path / "fp8jax_torch"
    top.mkdir()
    (top / "linear.py").write_text(
        "import torch\nfrom fp8jax.quantization import amax\nfrom fp8jax.dot import dot_general\n"
    )
    (top / "backends").mkdir()
    (top / "backends" / "te.py").write_text(
        "import transformer_engine.pytorch\n"
        "def f():\n    import transformer_engine.common\n    import msamp\n"
    )
    assert [found.partition("fp8jax_torch/")[2] for found in interop_violations(top)] == [
        "backends/te.py:1: imports transformer_engine.pytorch",
        "backends/te.py:4: imports msamp",
        "linear.py:3: imports fp8jax.dot.dot_general",
    ]


def test_import_of_the_package():
    """It loads no optional package, and touches no device."""
    program = """
        import sys
        import fp8jax
        from jax._src import xla_bridge
        extras = {"matplotlib", "grain", "orbax", "qwix", "torch", "transformer_engine"}
        extras |= {"fp8jax.inspect", "fp8jax.train"}
        extras &= set(sys.modules)
        print(sorted(extras), xla_bridge.backends_are_initialized())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[] False"


def test_rooms_of_libraries():
    assert {room.split(".")[0] for users in LIBRARIES.values() for room in users} <= set(RANKS)


def test_rooms_are_drawn():
    """The table and the picture of docs/architecture.md are those of `python tests/rooms.py`."""
    assert rooms.table() in rooms.PAGE.read_text()
    assert rooms.picture() == rooms.PICTURE.read_text()
