"""The documentation is whole: public names have entries, links lead to files, pages are in the navigation.

`mkdocs build --strict`, which `./dev docs` runs, finds the same of anchors and of the entries' names.
"""

import ast
import dataclasses
import io
import re
import tokenize

import pytest
from test_docs import PAGES, ROOT

from fp8jax.train import TrainConfig, config

# The modules with names for users; their names are those that their `__init__` exports.
PUBLIC = (
    "fp8jax",
    "fp8jax.adapters",
    "fp8jax.adapters.linen",
    "fp8jax.adapters.moe",
    "fp8jax.adapters.nnx",
    "fp8jax.backends.te",
    "fp8jax.checkpoints",
    "fp8jax.comm",
    "fp8jax.dot",
    "fp8jax.gradients",
    "fp8jax.inspect",
    "fp8jax.inspect.memory",
    "fp8jax.inspect.numerics",
    "fp8jax.inspect.program",
    "fp8jax.optim",
    "fp8jax.quantization",
    "fp8jax.train",
    "fp8jax.train.data",
    "fp8jax.train.report",
    "fp8jax_torch",
    "fp8jax_torch.backends",
    "fp8jax_torch.bridge",
    "fp8jax_torch.optim",
)


def documented(text):
    """The names of a page's entries: those of `::: name`, and of headings with `{#name}`."""
    return set(re.findall(r"^(?:::: |#.*\{#)([\w.]+)", text, re.MULTILINE))


def folder_of(module):
    """The folder of a package of this project; None of a module that is a file."""
    folders = [ROOT / root / module.replace(".", "/") for root in (".", "interop")]
    return next((folder for folder in folders if folder.is_dir()), None)


def exported(module):
    """Name -> the module that it is imported from, of the names that a package's `__init__` exports."""
    aliases = [
        (node.module, alias)
        for node in ast.walk(ast.parse((folder_of(module) / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return {alias.name: source for source, alias in aliases if alias.asname == alias.name}


def way_of(module, name):
    """The packages that a name is imported through, and the module that defines it."""
    if not folder_of(module) or name not in exported(module):
        return [module]
    source = exported(module)[name]
    return [module, *(way_of(source, name) if source != module else [])]


def is_shown(module, name):
    """Whether `::: module.name` shows this name, and no file of the same name in a package on its way."""
    return not any((folder_of(package) / f"{name}.py").is_file() for package in way_of(module, name)[:-1])


def has_entry(module, name, found):
    """Whether a name has an entry: in its package or in one around it, where it is defined, or its parts."""
    parts = module.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    owners = {way_of(module, name)[-1], *(owner for owner in around if is_shown(owner, name))}
    return any(f"{owner}.{name}" in found for owner in owners) or any(
        entry.startswith(f"{module}.{name}.") and not entry.endswith(f".{name}.{name}") for entry in found
    )


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="there is no documentation here")
@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module):
    found = set().union(*(documented(text) for page, text in PAGES.items() if "/api/" in page))
    names = [name for name in exported(module) if name != "extra"]
    assert [name for name in names if not has_entry(module, name, found)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL))
    files = [link.partition("#")[0] for link in found if "://" not in link]
    assert [link for link in files if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    roots = [ROOT / root for root in (".", "fp8jax", "interop/fp8jax_torch")]
    named = re.findall(r"`((?:[\w.]+/)*\w+\.py)`", PAGES[page])
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()) if len(PAGES) > 1 else []
    assert sorted(f"docs/{page}" for page in listed) == sorted(page for page in PAGES if page != "README.md")


def headings(page, level):
    """The headings of a page, outside of its code."""
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    return re.findall(rf"^{'#' * level} (.*)", text, re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/recipes/")])
def test_the_pages_of_recipes_have_one_order(page):
    wanted = ["What is stored", "Scaling", "What is sent and gathered", "GPUs", "In code", "When to take it"]
    assert headings(page, 2) == wanted
    assert re.findall('^=== "(.*)"', PAGES[page], re.MULTILINE) == ["JAX", "PyTorch"]
    scaling = PAGES[page].partition("## Scaling")[2].partition("\n## ")[0]
    assert len(re.findall(r"!\[.+\]\(\.\./images/", scaling)) == 1


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page):
    assert len(PAGES[page].splitlines()) <= (120 if page == "README.md" else 250)


def code_lines(path):
    """The lines of a program without comments, docstrings and blank lines."""
    source, lines, documented = path.read_text(), set(), set()
    for node in ast.walk(ast.parse(source)):
        first = getattr(node, "body", [None])[0] if isinstance(getattr(node, "body", None), list) else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            documented |= {*range(first.lineno, first.end_lineno + 1)}
    empty = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


def test_the_sizes_of_the_parts_are_within_a_tenth():
    rows = re.findall(r"^\| (`.*`) \| ([\d,]+) \|", PAGES["docs/from-scratch.md"], re.MULTILINE)
    said = {parts: int(lines.replace(",", "")) for parts, lines in rows}
    folders = {
        parts: [ROOT / (f if f == "interop/" else f"fp8jax/{f}") for f in re.findall("`(.*?)`", parts)]
        for parts in said
    }
    for parts, found in folders.items():
        files = [file for part in found for file in ([part] if part.is_file() else part.rglob("*.py"))]
        assert sum(map(code_lines, files)) == pytest.approx(said[parts], rel=0.1), parts
    assert len(rows) > 9


def test_paths_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:fp8jax|tests|interop|docs|examples)/[\w/.]*)`", text)
    assert len(paths) > 20
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    names = {path.name for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"))}
    assert [name for name in re.findall(r"`(\w+\.py)`", text) if name not in names] == []


def options_table():
    """The lines of the table of `TrainConfig`: its own options, then those of `DeviceConfig`."""
    of_devices = {field.name for field in dataclasses.fields(config.DeviceConfig)}
    fields = sorted(dataclasses.fields(TrainConfig), key=lambda field: field.name in of_devices)
    rows = [f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |" for field in fields]
    return ["| name | default | meaning |", "|---|---|---|", *rows]


@pytest.mark.skipif("docs/api/train.md" not in PAGES, reason="there is no documentation here")
def test_the_table_of_options_is_that_of_the_configuration():
    table = options_table()
    assert "\n".join(table) in PAGES["docs/api/train.md"], "the page needs:\n" + "\n".join(table)


def test_entries_of_a_page_are_found():
    text = "# A\n\n::: fp8jax.optim\n    options:\n      members: false\n\n## B {#fp8jax.dot.GEMMS}\n"
    assert documented(text) == {"fp8jax.optim", "fp8jax.dot.GEMMS"}


def test_entries_are_found_where_they_are():
    assert way_of("fp8jax", "transform") == ["fp8jax", "fp8jax.adapters", "fp8jax.adapters.transform"]
    assert has_entry("fp8jax.optim", "adamw", {"fp8jax.optim.adamw"})
    assert has_entry("fp8jax.train", "data", {"fp8jax.train.data.Text"})
    assert not has_entry("fp8jax", "transform", {"fp8jax.transform", "fp8jax.adapters.transform"})
    assert has_entry("fp8jax", "transform", {"fp8jax.adapters.transform.transform"})
    assert has_entry("fp8jax.adapters", "transform", {"fp8jax.adapters.transform.transform"})
    assert not has_entry("fp8jax.optim", "adam", {"fp8jax.optim.adam", "fp8jax.optim.adamw"})
