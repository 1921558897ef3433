"""The code of README.md and of all pages under docs/ runs, and its commands exist.

- ```python blocks of one section run in one namespace, in order; each section starts afresh. They print
  what stands in the section's ```text blocks.
- ```python title="before each answer" is run before every section of its page.
- ```text title="fp8jax ..." blocks are what this command prints, or a part of it.
- each line of a ```sh block names a program, and flags that the program's own --help lists.
- ```pycon and unmarked blocks are left alone. ```py blocks are lines of a program (test_frameworks.py) or of
  a command's advice (test_advise.py).
"""

import functools
import importlib.util
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
import tomllib
from typing import NamedTuple

import pytest

from fp8jax import cli
from fp8jax.inspect import targets

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Block(NamedTuple):
    """A fenced block: info string ("python", "sh"), its section's heading, its code, its first line."""

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
    titles = [word.removeprefix("title=") for word in shlex.split(block.info) if word.startswith("title=")]
    return shlex.split(titles[0]) if titles else []


def prints(block, printed):
    """Whether a block is a part of what was printed, but for lines on what is installed where it ran."""
    wanted, found = (
        [line.rstrip() for line in text.splitlines() if "installed" not in line]
        for text in (block.code, printed)
    )
    return any(found[start : start + len(wanted)] == wanted != [] for start in range(len(found)))


def without_torch(blocks, shown):
    """The code of a section that needs no torch, and the outputs that stand below it."""

    def above(output):
        return max((block for block in blocks if block.line < output.line), key=lambda block: block.line)

    others = [block for block in blocks if "torch" not in block.code]
    return others, [output for output in shown if above(output) in others]


def run_section(blocks, name, shared=None):
    """Runs the blocks in a fresh namespace, or a copy of `shared`; errors point at the lines of the file."""
    namespace = {"__name__": "__readme__", **(shared or {})}
    for block in blocks:
        code = compile("\n" * (block.line - 1) + block.code, name, "exec")
        exec(code, namespace)
    return namespace


def complaint_about(line, helps, extras):
    """What a line of a ```sh block names that this project does not have, or None.

    helps: gives the help of a program's words, e.g. ("fp8jax", "plan"); None if there is no such program.
    extras: those that pip can install.
    """
    words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    script = next((word for word in words if word.endswith(".py")), None)
    if words[:2] == ["pip", "install"]:
        unknown = set(re.findall(r"\[(\w+)\]", words[2])) - extras
        return f"no extra {unknown}" if unknown else None
    program = (script,) if script else tuple(words[:2])
    text = helps(program)
    if text is None:
        return f"there is no {' '.join(program)}"
    flags = re.findall(r"(?<!\S)--[a-z][\w-]*", line.partition(program[-1])[2])  # also those in the comment
    unknown = sorted(set(flags) - set(re.findall(r"--[a-z][\w-]*", text)))
    return f"{' '.join(program)} does not know {', '.join(unknown)}" if unknown else None


@pytest.fixture
def helps(capsys, monkeypatch):
    """The help of a program of this project, for which it is run."""

    def text_of(program):
        if program[0] == "./dev":
            listed = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True).stdout
            if not re.search(rf"^  {re.escape(program[1])}\b", listed, re.MULTILINE):
                return None
            # Its arguments go on to the program.
            programs = {"train": "examples/train_gpt.py", "test-clients": "examples/frameworks/keras_fit.py"}
            program = (programs[program[1]],) if program[1] in programs else program
        if program[0] == "./dev":
            return ""
        if program[0] == "fp8jax":
            run = lambda: cli.main([*program[1:], "--help"])  # noqa: E731
        elif (ROOT / program[0]).is_file():
            monkeypatch.syspath_prepend((ROOT / program[0]).parent)
            run = lambda: runpy.run_path(str(ROOT / program[0]), run_name="__main__")  # noqa: E731
        else:
            return None
        monkeypatch.setattr(sys, "argv", [program[0], "--help"])
        before = signal.getsignal(
            signal.SIGINT
        )  # train_gpt.py lets Ctrl-C end the process during its imports
        try:
            with pytest.raises(SystemExit) as end:
                run()
        finally:
            signal.signal(signal.SIGINT, before)
        return capsys.readouterr().out if end.value.code in (0, None) else None

    return text_of


# Page -> text. The project may be installed without its documentation.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/**/*.md"))]
}
SHARED = 'python title="before each answer"'
# All cells of a tutorial share a namespace; test_tutorials.py runs them.
TUTORIALS = "docs/tutorials/"
SECTIONS = [
    (page, section)
    for page, text in PAGES.items()
    if not page.startswith(TUTORIALS)
    for section in python_sections(text)
]
COMMANDS = sorted(
    {
        line
        for text in PAGES.values()
        for block in blocks_of(text)
        if block.info.split()[:1] == ["sh"]
        for line in block.code.replace("\\\n", " ").splitlines()
        if line
    }
)
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@functools.cache
def shared_names(page):
    """The names that the blocks for all sections of a page define. Values of JAX do not change."""
    blocks = [block for blocks in python_sections(PAGES[page]).values() for block in blocks]
    return run_section([block for block in blocks if block.info == SHARED], page)


@pytest.mark.parametrize("page, section", SECTIONS, ids=[" ".join(pair) for pair in SECTIONS])
def test_python_blocks_run_and_print_what_is_shown(page, section, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGES[page]
    blocks = [block for block in python_sections(text)[section] if block.info != SHARED]
    shown = [block for block in outputs(text) if block.section == section and not command_of(block)]
    if any("torch" in block.code for block in blocks) and importlib.util.find_spec("torch") is None:
        blocks, shown = without_torch(blocks, shown)
        if not blocks:
            pytest.skip("torch is not installed")
    run_section(blocks, page, shared_names(page))
    printed = capsys.readouterr().out
    assert [block.line for block in shown if not prints(block, printed)] == [], printed


@pytest.mark.parametrize("page", PAGES)
def test_every_output_is_of_code_or_of_a_command(page):
    sections = python_sections(PAGES[page])
    strays = [block for block in outputs(PAGES[page]) if not command_of(block)]
    assert [block.line for block in strays if block.section not in sections] == []


def marks_of(block):
    """A GPU's program needs the plugin, and takes long."""
    is_of_gpu = "--target" in command_of(block)
    reason = targets.why_not() if is_of_gpu else None
    long = [pytest.mark.long] if is_of_gpu else []
    return [pytest.mark.skipif(reason is not None, reason=str(reason)), *long]


COMMAND_OUTPUTS = [
    pytest.param(block, marks=marks_of(block), id=f"{page}-{block.line}")
    for page, text in PAGES.items()
    for block in outputs(text)
    if command_of(block)
]


@pytest.mark.parametrize("block", COMMAND_OUTPUTS)
def test_commands_print_what_is_shown(block, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program, *words = command_of(block)
    assert program == "fp8jax" and cli.main(words) == 0
    printed = capsys.readouterr().out
    assert prints(block, printed), printed


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_flags(line, helps):
    assert complaint_about(line, helps, EXTRAS) is None


def test_every_name_in_the_package_is_found_after_its_import():
    """`import fp8jax` alone is what the text has in mind where it says `fp8jax.train.fit`."""
    # Code of a `::: name` line is for the API pages, which name files too.
    texts = [re.sub(r"^:::.*$", "", text, flags=re.MULTILINE) for text in PAGES.values()]
    names = sorted(set(re.findall(r"\bfp8jax(?:\.[A-Za-z_]\w*)+", "\n".join(texts))))
    assert {"fp8jax.train.fit", "fp8jax.inspect.memory.plan", "fp8jax.inspect.report_check.check"} <= set(
        names
    )
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
    text = '# A\n```text title="fp8jax plan --width 8"\na  1\nb  2\nx is not installed\n```\n'
    text += "```text\nb  2\n```\n"
    of_command, of_code = outputs(text)
    assert (command_of(of_command), command_of(of_code)) == (["fp8jax", "plan", "--width", "8"], [])
    assert prints(of_command, "title\na  1  \nb  2\nx is installed\n") and prints(of_code, "a  1\nb  2\n")
    assert not prints(of_command, "a  1\nc  3\nb  2\n") and not prints(of_code, "b  3\n")


def test_without_torch_its_tab_is_left_out():
    jax, torch = (f'=== "tab"\n\n    ```python\n    {code}\n    ```\n' for code in ("x = 1", "import torch"))
    output = "\n    ```text\n    {}\n    ```\n"
    text = f"# A\n{jax}{output.format('of jax')}{torch}{output.format('of torch')}"
    [blocks] = python_sections(text).values()
    blocks, shown = without_torch(blocks, outputs(text))
    assert ([block.code for block in blocks], [block.code for block in shown]) == (["x = 1"], ["of jax"])


def test_extractor_points_at_the_line_that_fails():
    text = "# A\n\n```python\nok = 1\nboom()\n```\n"
    with pytest.raises(NameError) as error:
        run_section(python_sections(text)["A (line 1)"], "planted.md")
    assert error.traceback[-1].lineno + 1 == 5


def test_unclosed_block_is_an_error():
    with pytest.raises(ValueError, match="never closed"):
        blocks_of("```python\nx = 1\n")


@pytest.mark.parametrize(
    "line, says",
    [
        ("./dev train --steps 3", None),
        ("JAX_PLATFORMS=cpu ./dev test -q", None),
        ("./dev launch", "there is no ./dev launch"),
        ("./dev train --stepz 3", "./dev train does not know --stepz"),
        ("python examples/missing.py", "there is no examples/missing.py"),
        ("torchrun --nproc-per-node 2 examples/train_gpt.py --steps 3", None),
        ("python examples/train_gpt.py    # --twins too", "examples/train_gpt.py does not know --twins"),
        ("fp8jax plan --target h200", None),
        ("fp8jax plans", "there is no fp8jax plans"),
        ("fp8jax plan --device 3", "fp8jax plan does not know --device"),
        ('pip install ".[train]"', None),
        ('pip install ".[trains]"', "no extra {'trains'}"),
    ],
)
def test_commands_that_name_what_is_missing_are_found(line, says, helps):
    assert complaint_about(line, helps, EXTRAS) == says
