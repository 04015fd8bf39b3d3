"""The notebooks of docs/notebooks: run them, keep what they print and draw, and show them as pages.

`python scripts/notebooks.py [NAME ...]` runs them from top to bottom, here, and writes their outputs into the files.
Jupyter runs the same files. It is not needed for this, nor for the site: see notebook_pages.py.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "notebooks"
DOTS_PER_INCH = 80
LARGEST_PICTURE = 60_000  # bytes

Notebook = dict[str, Any]
Cell = dict[str, Any]


def read(path: Path) -> Notebook:
    """A notebook as JSON."""
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def write(notebook: Notebook, path: Path) -> None:
    """As Jupyter writes it."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def source(cell: Cell) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def run(notebook: Notebook, name: str) -> Notebook:
    """The same notebook with fresh outputs. It is run in an empty directory; anything that goes wrong raises."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    with tempfile.TemporaryDirectory() as place, _directory(Path(place)), _fresh_figures():
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                cells.append(cell)
                continue
            count += 1
            outputs = _outputs(source(cell), f"{name}, cell {count}", namespace, count)
            cells.append({**cell, "execution_count": count, "outputs": outputs})
    return {**notebook, "cells": cells}


def markdown(notebook: Notebook) -> str:
    """The notebook as a page: its text, its code, what it printed, what it drew."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        parts += [_shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def pictures(notebook: Notebook) -> list[bytes]:
    """Every picture among the outputs, as PNG."""
    found = [output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [base64.b64decode(data["image/png"]) for data in found if "image/png" in data]


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        described = "".join(data.get("text/plain", ["a picture"]))
        return f'<img alt="{described}" src="data:image/png;base64,{data["image/png"]}">'
    text = "".join(output.get("text", data.get("text/plain", [])))
    return f"```text\n{text.rstrip()}\n```"


def _outputs(code: str, name: str, namespace: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell: what it printed, what it drew, and the value of its last line."""
    tree = ast.parse(code, name)
    quiet = code.rstrip().endswith(";")  # as in Jupyter
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not quiet else None
    said, value = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": said.getvalue().splitlines(keepends=True)})
    outputs += _drawn()
    if value is not None:
        text = str(value).splitlines(keepends=True)
        result = {"data": {"text/plain": text}, "execution_count": count, "metadata": {}}
        outputs.append({**result, "output_type": "execute_result"})
    return outputs


def _drawn() -> list[dict[str, Any]]:
    """Take the open figures. A figure is described by its label: `plt.figure("what it shows")`."""
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        data = {"image/png": base64.b64encode(_png(figure)).decode(), "text/plain": [figure.get_label() or "plot"]}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close(figure)
    return found


def _png(figure: Any) -> bytes:
    """With 128 colours, so that it is small."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


@contextlib.contextmanager
def _fresh_figures() -> Iterator[None]:
    """No figures but those of the notebook, with matplotlib's own settings."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["image.interpolation"] = "nearest"  # pixels as they are, and small files
        yield


@contextlib.contextmanager
def _directory(place: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def main(names: list[str]) -> None:
    """Run notebooks by name, or all of them, and keep their outputs."""
    for path in sorted(PLACE.glob("*.ipynb")):
        if not names or path.stem in names:
            done = run(read(path), path.stem)
            write(done, path)
            sizes = [len(picture) for picture in pictures(done)]
            sys.stdout.write(f"{path.relative_to(ROOT)}: pictures of {sizes} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
