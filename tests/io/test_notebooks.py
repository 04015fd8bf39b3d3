"""The notebooks of the documentation run from top to bottom, and hold what they last printed and drew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebooks import LARGEST_PICTURE, PLACE, Cell, Notebook, markdown, pictures, read, run, source

NAMES = ["likelihoods-and-trajectories", "what-a-model-does-not-know", "your-model-in-ten-minutes"]


def notebook(name: str) -> Notebook:
    return read(PLACE / f"{name}.ipynb")


def test_all_notebooks_are_tested():
    assert sorted(path.stem for path in PLACE.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_draws_what_it_shows(name):
    shown = notebook(name)
    done = run(shown, name)
    assert len(pictures(done)) == len(pictures(shown)) >= 1
    assert [words(cell) for cell in done["cells"]] == [words(cell) for cell in shown["cells"]]
    for cell, printed in zip(done["cells"], shown["cells"], strict=True):  # other CPUs round otherwise
        assert numbers(cell) == pytest.approx(numbers(printed), rel=0.03, abs=0.03), source(cell)


def texts(cell: Cell) -> list[str]:
    """The outputs of a cell as text."""
    return ["".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in cell.get("outputs", [])]


def words(cell: Cell) -> list[list[str]]:
    """What each output of a cell says, without numbers and spaces."""
    return [re.findall(r"[A-Za-z_]{2,}", text) for text in texts(cell)]


def numbers(cell: Cell) -> list[float]:
    """The numbers that a cell prints."""
    return [float(found) for text in texts(cell) for found in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_there_and_small(name):
    shown = notebook(name)
    counts = [cell["execution_count"] for cell in shown["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(len(picture) <= LARGEST_PICTURE for picture in pictures(shown))
    described = [o["data"]["text/plain"] for c in shown["cells"] for o in c.get("outputs", []) if "image/png" in str(o)]
    assert all(len("".join(text)) > 20 for text in described), "name a figure by what it shows: num=..."


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_somewhere(name):
    text = "".join(source(cell) for cell in notebook(name)["cells"] if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    assert targets
    for target in targets:
        assert (PLACE / target).exists(), target


def test_a_page_shows_text_code_and_outputs():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": ["print('said')\n", "1 + 1"], "outputs": []},
        {"cell_type": "code", "source": ["1 + 2;"], "outputs": []},
    ]
    page = markdown(run({"cells": cells}, "small"))
    assert page.startswith("# Title\nwords\n\n```python\nprint('said')\n1 + 1\n```")
    assert "```text\nsaid\n```\n\n```text\n2\n```" in page
    assert page.endswith("```python\n1 + 2;\n```\n")


def test_a_cell_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    cells = [{"cell_type": "code", "source": ["1 / 0"], "outputs": []}]
    with pytest.raises(ZeroDivisionError) as caught:
        run({"cells": cells}, "bad")
    assert "bad, cell 1" in str(caught.traceback[-1].path)
    assert Path.cwd() == tmp_path
