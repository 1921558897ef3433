"""The page "In your framework" and its programs, without the frameworks. `./dev test-clients` runs them."""

import ast
import re
import subprocess
import textwrap

import pytest
from test_docs import ROOT, blocks_of

PROGRAMS = sorted((ROOT / "examples/frameworks").glob("*_*.py"))
PAGE = ROOT / "docs/guides/frameworks.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="there is no documentation here")


def strays(snippet, program):
    """The lines of a snippet that a program does not have."""
    lines = {line.strip() for line in program.splitlines()}
    return [line.strip() for line in snippet.splitlines() if line.strip() and line.strip() not in lines]


def names_in(program, function):
    """The names in a function of a program."""
    tree = ast.parse(program)
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    return {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}


def test_programs_of_the_table():
    named = re.findall(r"^\| \w[^|]* \| `(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(named) == [program.stem for program in PROGRAMS]


def test_programs_of_the_command():
    listed = re.search(r"test-clients takes (.*), got", (ROOT / "dev").read_text())[1]
    names = re.findall(r"\w+", listed.replace(" or ", " "))
    assert sorted(names) == [program.name.partition("_")[0] for program in PROGRAMS]


def test_snippets_are_lines_of_programs():
    """A section names its program, and its blocks have this program's lines."""
    sections = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        snippets = [block.code for block in blocks_of(section) if block.info == "py"]
        if snippets:
            [name] = set(re.findall(r"`(examples/frameworks/\w+\.py)`", section))
            sections[ROOT / name] = strays("\n".join(snippets), (ROOT / name).read_text())
            assert len([line for line in "\n".join(snippets).splitlines() if line.strip()]) <= 10
    assert sections == dict.fromkeys(PROGRAMS, [])


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.stem for program in PROGRAMS])
def test_loops_without_a_name_of_fp8jax(program):
    assert {name for name in names_in(program.read_text(), "loop") if name.startswith("fp8")} == set()


def test_strays_and_names_are_found():
    program = "def loop(x):\n    return fp8jax.report(x)\n"
    assert strays("    return fp8jax.report(x)\n\nreturn x\n", program) == ["return x"]
    assert names_in(textwrap.dedent(program), "loop") == {"fp8jax", "x"}


def test_the_command_refuses_another_name():
    run = subprocess.run([ROOT / "dev", "test-clients", "nobody"], capture_output=True, text=True)
    assert run.returncode == 1 and "test-clients takes" in run.stderr
