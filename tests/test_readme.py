"""README.md's code runs: its Python blocks as they stand, its shell blocks where they are quick.

- ```python blocks of one section run in one namespace, in order; each section starts afresh. They print
  what stands in the section's ```text blocks.
- ```text $ fp8jax ... blocks are what this command prints, or a part of it.
- ```sh quick blocks are run, in the root, with this Python first on the path.
- every other ```sh block is read: the ./dev commands, the programs and the flags it names must exist.
- ```pycon and unmarked blocks are left alone.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

from fp8jax import cli
from fp8jax.inspect import targets

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Block(NamedTuple):
    """A fenced block: info string ("python", "sh quick"), its section's heading, its code, its first line."""

    info: str
    section: str
    code: str
    line: int


def blocks_of(text):
    """The fenced blocks of a Markdown text, in order."""
    found, section, fence = [], "", None
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})\s*(.*)$", line)
        if fence is None and mark:
            fence, info, lines, start = mark[1], mark[2].strip(), [], number + 1
        elif fence is None:
            heading = re.match(r"#+\s+(.*)", line)
            section = f"{heading[1].strip()} (line {number})" if heading else section
        elif mark and mark[1].startswith(fence) and not mark[2]:
            found.append(Block(info, section, textwrap.dedent("\n".join(lines)), start))
            fence = None
        else:
            lines.append(line)
    if fence is not None:
        raise ValueError(f"the block before line {start} is never closed")
    return found


def python_sections(text):
    """{section: its ```python blocks}."""
    sections = {}
    for block in blocks_of(text):
        if block.info.split()[:1] == ["python"]:
            sections.setdefault(block.section, []).append(block)
    return sections


def outputs(text):
    """The ```text blocks."""
    return [block for block in blocks_of(text) if block.info.split()[:1] == ["text"]]


def command_of(block):
    """The words of the command that prints a ```text block; [] if the section's code does."""
    return shlex.split(block.info)[2:]


def prints(block, printed):
    """Whether a block is a part of what was printed, but for lines on what is installed where it ran."""
    wanted, found = (
        [line.rstrip() for line in text.splitlines() if "installed" not in line]
        for text in (block.code, printed)
    )
    return any(found[start : start + len(wanted)] == wanted for start in range(len(found)))


def run_section(blocks, name):
    """Runs the blocks in one fresh namespace; errors point at the lines of the file."""
    namespace = {"__name__": "__readme__"}
    for block in blocks:
        code = compile("\n" * (block.line - 1) + block.code, name, "exec")
        exec(code, namespace)
    return namespace


def shell_commands(block):
    """The block's command lines: comments dropped, continued lines joined, a leading $ taken off."""
    code = block.code.replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in code.splitlines())
    return [words[1:] if words[0] == "$" else words for words in lines if words]


def complaint_about(words, root):
    """What the command names that this project does not have, or None."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
    program = next((word for word in words if word.endswith(".py") and "/" in word), None)
    if words and words[0].endswith("./dev"):
        command = words[1] if len(words) > 1 else "help"
        if not re.search(rf"^#   {re.escape(command)}\b", (root / "dev").read_text(), re.MULTILINE):
            return f"./dev has no command {command}"
        program = "examples/train_gpt.py" if command == "train" else None
    if program is None:
        return None
    if not (root / program).is_file():
        return f"there is no {program}"
    sources = [root / program, *(root / "fp8jax" / "train").glob("*.py")]
    source = "".join(path.read_text() for path in sources)
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in source and flag[2:].replace("-", "_") not in source]
    return f"{program} does not know {', '.join(unknown)}" if unknown else None


def run_quick(block, root):
    """Runs a ```sh quick block and returns what it printed; a failing command raises."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["sh", "-euc", block.code], cwd=root, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if run.returncode:
        raise AssertionError(f"line {block.line}: exit status {run.returncode}\n{run.stdout}{run.stderr}")
    return run.stdout


def readme_text():
    path = ROOT / "README.md"
    return path.read_text() if path.is_file() else ""


def shell_blocks(quick):
    blocks = [block for block in blocks_of(readme_text()) if block.info.split()[:1] in (["sh"], ["bash"])]
    return [block for block in blocks if ("quick" in block.info.split()) == quick]


@pytest.mark.parametrize("section", python_sections(readme_text()))
def test_python_blocks_run_and_print_what_is_shown(section, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_section(python_sections(readme_text())[section], "README.md")
    printed = capsys.readouterr().out
    shown = [block for block in outputs(readme_text()) if block.section == section and not command_of(block)]
    assert [block.line for block in shown if not prints(block, printed)] == [], printed


def test_every_output_is_of_code_or_of_a_command():
    sections = python_sections(readme_text())
    strays = [block for block in outputs(readme_text()) if not command_of(block)]
    assert [block.line for block in strays if block.section not in sections] == []


def marks_of(block):
    """A GPU's program needs the plugin, and takes long."""
    is_of_gpu = bool({"--target", "--paper"} & set(command_of(block)))
    reason = targets.why_not() if is_of_gpu else None
    long = [pytest.mark.long] if is_of_gpu else []
    return [pytest.mark.skipif(reason is not None, reason=str(reason)), *long]


COMMAND_OUTPUTS = [
    pytest.param(block, marks=marks_of(block), id=f"line{block.line}")
    for block in outputs(readme_text())
    if command_of(block)
]


@pytest.mark.parametrize("block", COMMAND_OUTPUTS)
def test_commands_print_what_is_shown(block, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program, *words = command_of(block)
    assert program == "fp8jax" and cli.main(words) == 0
    printed = capsys.readouterr().out
    assert prints(block, printed), printed


@pytest.mark.parametrize("block", shell_blocks(quick=True), ids=lambda block: f"line{block.line}")
def test_quick_commands_run(block):
    assert run_quick(block, ROOT) is not None


@pytest.mark.parametrize("block", shell_blocks(quick=False), ids=lambda block: f"line{block.line}")
def test_other_commands_name_what_exists(block):
    complaints = [complaint_about(words, ROOT) for words in shell_commands(block)]
    assert [complaint for complaint in complaints if complaint] == []


def test_every_name_in_the_package_is_found_after_its_import():
    """`import fp8jax` alone is what the text has in mind where it says `fp8jax.train.fit`."""
    names = sorted(set(re.findall(r"\bfp8jax(?:\.[A-Za-z_]\w*)+", readme_text())))
    assert {"fp8jax.train.fit", "fp8jax.inspect.memory.plan", "fp8jax.inspect.gemms.check"} <= set(names)
    program = """
        import sys
        import fp8jax
        for name in sys.argv[1:]:
            found = fp8jax
            for part in name.split(".")[1:]:
                found = getattr(found, part, None)
            if found is None:
                print(name)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *names], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


PLANTED = """
# First
```python
x = 1
```
Prose.
```python
y = x + 1
```
## Second
```python
assert "x" not in globals()
z = 3
```
```sh quick
# a comment
echo "two words" \\
  more
```
````text
```python
raise RuntimeError
```
````
"""


def test_extractor_finds_sections_and_lines():
    sections = python_sections(PLANTED)
    assert [len(blocks) for blocks in sections.values()] == [2, 1]
    first, second = sections.values()
    assert run_section(first, "planted")["y"] == 2
    assert run_section(second, "planted")["z"] == 3
    assert [block.line for block in first] == [4, 8]


def test_outputs_are_compared_line_by_line():
    text = "# A\n```text $ fp8jax plan --width 8\na  1\nb  2\nx is not installed\n```\n```text\nb  2\n```\n"
    of_command, of_code = outputs(text)
    assert (command_of(of_command), command_of(of_code)) == (["fp8jax", "plan", "--width", "8"], [])
    assert prints(of_command, "title\na  1  \nb  2\nx is installed\n") and prints(of_code, "a  1\nb  2\n")
    assert not prints(of_command, "a  1\nc  3\nb  2\n") and not prints(of_code, "b  3\n")


def test_extractor_points_at_the_line_that_fails():
    text = "# A\n\n```python\nok = 1\nboom()\n```\n"
    with pytest.raises(NameError) as error:
        run_section(python_sections(text)["A (line 1)"], "planted.md")
    assert error.traceback[-1].lineno + 1 == 5


def test_unclosed_block_is_an_error():
    with pytest.raises(ValueError, match="never closed"):
        blocks_of("```python\nx = 1\n")


def test_shell_blocks_are_read_and_run(tmp_path):
    [block] = [block for block in blocks_of(PLANTED) if block.info == "sh quick"]
    assert shell_commands(block) == [["echo", "two words", "more"]]
    assert run_quick(block, tmp_path) == "two words more\n"
    with pytest.raises(AssertionError, match="exit status 3"):
        run_quick(block._replace(code="exit 3"), tmp_path)


@pytest.mark.parametrize(
    "line, says",
    [
        ("./dev help", None),
        ("JAX_PLATFORMS=cpu ./dev test -q", None),
        ("./dev launch", "./dev has no command launch"),
        ("python examples/missing.py", "there is no examples/missing.py"),
        ("python examples/known.py --steps 3", None),
        ("python examples/known.py --stepz=3", "examples/known.py does not know --stepz"),
        ("pip install fp8jax", None),
    ],
)
def test_commands_that_name_what_is_missing_are_found(tmp_path, line, says):
    (tmp_path / "dev").write_text((ROOT / "dev").read_text())
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "known.py").write_text("parser.add_argument('--steps')")
    assert complaint_about(shlex.split(line), tmp_path) == says
