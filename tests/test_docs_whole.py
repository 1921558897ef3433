"""The documentation is whole: public names have entries, links lead to files, pages are in the navigation.

`mkdocs build --strict`, which `./dev docs` runs, finds the same of anchors and of the entries' names.
"""

import ast
import re

import pytest
from test_docs import PAGES, ROOT

# The modules with names for users; their names are those that their `__init__` exports.
PUBLIC = (
    "fp8jax",
    "fp8jax.adapters",
    "fp8jax.adapters.linen",
    "fp8jax.adapters.moe",
    "fp8jax.adapters.nnx",
    "fp8jax.backends.te",
    "fp8jax.comm",
    "fp8jax.dot",
    "fp8jax.gradients",
    "fp8jax.inspect",
    "fp8jax.inspect.memory",
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
    """The folder of a package of this project."""
    return next(
        folder for root in (".", "interop") if (folder := ROOT / root / module.replace(".", "/")).is_dir()
    )


def exported(module):
    """Name -> the module that it is imported from, of the names that a package's `__init__` exports."""
    aliases = [
        (node.module, alias)
        for node in ast.walk(ast.parse((folder_of(module) / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return {alias.name: source for source, alias in aliases if alias.asname == alias.name}


def has_entry(module, name, source, found):
    """Whether a name has an entry: in its package or in one around it, where it is defined, or its parts."""
    parts = module.split(".")
    owners = {source, *(".".join(parts[:n]) for n in range(1, len(parts) + 1))}
    if source != module and (folder_of(module) / f"{name}.py").is_file():
        owners.remove(module)  # its name is that of a file, which the entry would show
    return any(f"{owner}.{name}" in found for owner in owners) or any(
        entry.startswith(f"{module}.{name}.") for entry in found - {f"{source}.{name}"}
    )


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="there is no documentation here")
@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module):
    found = set().union(*(documented(text) for page, text in PAGES.items() if "/api/" in page))
    names = {name: source for name, source in exported(module).items() if name != "extra"}
    assert [name for name, source in names.items() if not has_entry(module, name, source, found)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL))
    files = [link.partition("#")[0] for link in found if "://" not in link]
    assert [link for link in files if not ((ROOT / page).parent / link).exists()] == []


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()) if len(PAGES) > 1 else []
    assert sorted(f"docs/{page}" for page in listed) == sorted(page for page in PAGES if page != "README.md")


def test_entries_of_a_page_are_found():
    text = "# A\n\n::: fp8jax.optim\n    options:\n      members: false\n\n## B {#fp8jax.dot.GEMMS}\n"
    assert documented(text) == {"fp8jax.optim", "fp8jax.dot.GEMMS"}


def test_entries_are_found_where_they_are():
    found = {"fp8jax.optim.adamw", "fp8jax.train.data.Text", "fp8jax.rewrite.Report"}
    assert has_entry("fp8jax.optim", "adamw", "fp8jax.optim.adam", found)
    assert has_entry("fp8jax.optim.step", "adamw", "fp8jax.optim.step.fused", found)
    assert has_entry("fp8jax.train", "data", "fp8jax.train", found)
    assert not has_entry("fp8jax.optim", "adam", "fp8jax.optim.adam", {*found, "fp8jax.optim.adam"})
    assert has_entry("fp8jax.optim", "adam", "fp8jax.optim.adam", {*found, "fp8jax.optim.adam.adam"})
