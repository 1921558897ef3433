"""Runs the tutorials and writes their pages, with what the cells print and draw.

    python docs/tutorials/render.py                      # all of them; a minute or two
    python docs/tutorials/render.py fifteen_minutes.py

A tutorial is a notebook in jupytext's percent format: `jupytext --to ipynb FILE` makes an .ipynb of it. Its
page is FILE.md, beside it, and its pictures are in images/.
"""

import argparse
import ast
import contextlib
import datetime
import io
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).resolve().parent


class Cell(NamedTuple):
    """A cell of a notebook."""

    is_code: bool
    text: str  # Python, or Markdown without comment signs


def cells(source: str) -> list[Cell]:
    """The cells of a notebook in percent format, without its header."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)[1:]
    found = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        is_code = "[markdown]" not in kind
        found.append(Cell(is_code, (text if is_code else re.sub("^# ?", "", text, flags=re.M)).strip("\n")))
    return found


def run(code: str, namespace: dict[str, Any]) -> str:
    """Runs a cell; returns what it prints, and the value of a last expression, as a notebook shows them."""
    tree, printed = ast.parse(code), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            if shown is not None:
                print(repr(shown))
    return printed.getvalue().rstrip()


def pictures(stem: str, folder: pathlib.Path) -> list[str]:
    """Saves and closes the open figures; returns Markdown that shows them on light and on dark pages."""
    import matplotlib.pyplot as plt

    links = []
    for number in plt.get_fignums():
        name = f"{stem}-{len(list(folder.glob(f'{stem}-*.svg'))) + 1}.svg"
        plt.figure(number).savefig(
            folder / name, bbox_inches="tight", transparent=True, metadata={"Date": None}
        )
        links.append(f"![]({folder.name}/{name})")
    plt.close("all")
    return links


def render(path: pathlib.Path, to: pathlib.Path) -> str:
    """Runs a tutorial; returns its page and saves its pictures in the folder `to`."""
    import matplotlib

    grey = {f"{part}.color": "#888888" for part in ("text", "axes.label", "xtick", "ytick")}
    grey = {name.replace("label.color", "labelcolor"): color for name, color in grey.items()}
    matplotlib.use("agg")
    matplotlib.rcParams.update(
        grey | {"axes.edgecolor": "#888888", "svg.hashsalt": "fp8jax", "legend.framealpha": 0}
    )
    to.mkdir(exist_ok=True, parents=True)
    for old in to.glob(f"{path.stem}-*.svg"):
        old.unlink()
    namespace, page = {"__name__": "__main__"}, []
    for cell in cells(path.read_text(encoding="utf-8")):
        page.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        if cell.is_code:
            printed = run(cell.text, namespace)
            page += [f"```text\n{printed}\n```"] if printed else []
            page += pictures(path.stem, to)
    return "\n\n".join([*page, _about(path)]) + "\n"


def _about(path: pathlib.Path) -> str:
    import jax

    where = f"{os.cpu_count()} cores of a CPU, Python {platform.python_version()}, JAX {jax.__version__}"
    return (
        f"*Run with `python docs/tutorials/render.py {path.name}` on {where}, {datetime.date.today()}. "
        f"The notebook is [{path.name}]({path.name}).*"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Renders the named tutorials, by default all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME.py", help="(default: all tutorials)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=FOLDER, help="folder of the pages (default: beside)"
    )
    args = parser.parse_args(argv)
    everything = sorted({path.name for path in FOLDER.glob("*.py")} - {pathlib.Path(__file__).name})
    for name in args.names or everything:
        page = render(FOLDER / name, args.out / "images")
        (args.out / name).with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
