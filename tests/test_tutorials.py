"""The tutorials run, and their pages show the code that runs."""

import os
import re
import subprocess
import sys

import pytest

TUTORIALS = ("fifteen_minutes", "nnx_and_torch")


@pytest.fixture(scope="module")
def render(load_program):
    return load_program("docs/tutorials/render.py")


def code_of(page):
    return re.findall(r"^```python\n(.*?)\n```$", page, re.M | re.S)


def test_every_tutorial_is_here(root):
    names = {path.stem for path in (root / "docs" / "tutorials").glob("*.py")}
    assert names == {*TUTORIALS, "render"}


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_page_has_its_tutorials_text_and_code(name, render, root):
    """A change to the notebook that was not rendered is found here."""
    folder = root / "docs" / "tutorials"
    page = (folder / f"{name}.md").read_text()
    cells = render.cells((folder / f"{name}.py").read_text())
    assert code_of(page) == [cell.text for cell in cells if cell.is_code]
    assert [cell.text for cell in cells if not cell.is_code and cell.text not in page] == []
    assert all((folder / link).exists() for link in re.findall(r"!\[.*?\]\((.*?)\)", page))


@pytest.mark.long
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs(name, root, tmp_path):
    """In a process of its own, as a reader runs it: with one CPU device, compiled as users compile."""
    folder = root / "docs" / "tutorials"
    run = [sys.executable, folder / "render.py", f"{name}.py", "--out", tmp_path]
    subprocess.run(
        run, check=True, env={**os.environ, "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    )
    new, old = ((place / f"{name}.md").read_text() for place in (tmp_path, folder))
    assert new.count("```text") == old.count("```text") and new.count("![](") == old.count("![](") > 0
    assert "nan" not in new.lower().split("```text", 1)[1]


def test_cells_are_told_apart(render):
    source = "# ---\n# jupyter: {}\n# ---\n\n# %% [markdown]\n# # Title\n#\n# Text\n\n# %%\nx = 1\nx + 1\n"
    text, code = render.cells(source)
    assert text == render.Cell(False, "# Title\n\nText")
    assert code.is_code and render.run(code.text, {}) == "2"
    assert render.run("print(3); None", {}) == "3"
