"""Every command and every piece of Python in README and docs runs as printed.

Pages are followed from top to bottom, each in a directory of its own. What is slow runs in the long suite; what
cannot run here is in NOT_RUN of documentation_pages.py, with the reason.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import DDPMPipeline, DDPMScheduler
from torch.distributed.run import get_args_parser

from documentation_pages import NOT_RUN, PICTURE, ROOT, Piece, Reader, pages, pieces, prepare, read, reason
from optcov import Schedule
from optcov.covariances import Covariance
from optcov.integrations.diffusers import attach
from small_bundles import small_bundle, small_unet

# page -> how a command begins -> why it runs in the long suite only; "*" for the whole page
LONG: dict[str, dict[str, str]] = {
    "README.md": {
        "optcov fit": "as many images and times as by default",
        "optcov bpd": "two sweeps with every covariance",
    },
    "docs/benchmarks.md": {"*": "benchmarks take minutes"},
    "docs/tutorials/2-likelihood.md": {"*": "sweeps all 1,000 times again and again"},
    "docs/tutorials/3-mixture-of-gaussians.md": {"optcov demo": "1,000 points by every method"},
    "docs/metrics.md": {"*": "draws 100 images of the embedded model"},
    "docs/tables.md": {"*": "a quick table takes minutes"},
}

COMMAND = re.compile(r"^ {4}(?:optcov|make|python|accelerate|pip) ", re.MULTILINE)
INDENTED = {  # pages whose commands are not in blocks, and why they are not run by this file
    "docs/model-zoo.md": "test_checkpoints_zoo.py holds them to the networks they name",
    "docs/results-0.1.md": "they made the numbers of the page, in hours",
}


def quick(page: str) -> list[Piece]:
    return [p for p in pieces(page) if not reason(NOT_RUN, p) and not reason(LONG, p)]


def follow(page: str, directory: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[Piece]) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    prepare(page, directory, wanted)
    reader = Reader()
    for piece in wanted:
        reader.follow(piece)


@pytest.mark.parametrize("page", [page for page in pages() if quick(page)])
def test_a_page_runs_as_printed(page, tmp_path, monkeypatch, capsys):
    follow(page, tmp_path, monkeypatch, quick(page))
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in pages() if page in LONG])
def test_a_page_runs_with_its_long_commands(page, tmp_path, monkeypatch):
    follow(page, tmp_path, monkeypatch, [p for p in pieces(page) if not reason(NOT_RUN, p)])


@pytest.mark.parametrize(("table", "page"), [(t, page) for t in (NOT_RUN, LONG) for page in t])
def test_what_is_not_run_is_there_and_has_a_reason(table, page):
    assert page in pages()
    for start, why in table[page].items():
        assert len(why) >= 10
        assert start == "*" or any(reason({page: {start: why}}, piece) for piece in pieces(page)), start


@pytest.mark.parametrize("page", pages())
def test_commands_are_in_blocks_that_are_run(page):
    if page not in INDENTED:
        assert not COMMAND.findall(read(page)), "put commands into a ```bash block, where this file finds them"


def test_no_page_has_marks_of_an_unfinished_merge():
    assert not [page for page in pages() if re.search("^(<<<<<<<|>>>>>>>) ", read(page), flags=re.MULTILINE)]


@pytest.mark.parametrize("page", pages())
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
    for name in PICTURE.findall(text):
        assert (ROOT / "docs" / "images" / name).stat().st_size < 400_000


def test_tests_named_in_the_pages_are_there():
    named = {name for page in pages() for name in re.findall(r"tests/[\w/]+\.\w+", read(page))}
    assert len(named) >= 8
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_torchrun_passes_the_options_of_printed_commands_on():
    page = read("docs/how-to/many-gpus.md")
    (command,) = re.findall(r"^ACCELERATE_USE_CPU=true torchrun (.*)$", page, flags=re.MULTILINE)
    found = get_args_parser().parse_args(shlex.split(command))
    assert (found.nproc_per_node, found.module, found.training_script) == ("2", True, "optcov")
    assert found.training_script_args == ["sample", "my-bundle", *["--steps", "5", "--n", "8", "--out", "samples"]]


def test_the_table_of_covariances_has_them_all():
    page = read("docs/tutorials/3-mixture-of-gaussians.md")
    table = page.partition("## The covariances, in one table")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    own = {name for name, kind in Covariance.registry.items() if kind.__module__.startswith("optcov.")}
    assert own == {name for row in rows for name in re.findall("`(\\w+)`", row)}


def test_the_readme_is_short():
    words = re.sub(r"```.*?```", "", read("README.md"), flags=re.DOTALL).split()
    assert len(words) <= 700


def test_readme_draws_by_what_it_fits_and_the_tutorial_by_the_default_method():
    first = {page: _first_draw(page) for page in ("README.md", "docs/tutorials/1-your-diffusers-model.md")}
    assert 'method="NPR-DDPM"' in first["README.md"]
    assert "method" not in first["docs/tutorials/1-your-diffusers-model.md"]


def _first_draw(page: str) -> str:
    lines = [line for piece in pieces(page) for line in piece.text.splitlines()]
    return next(line for line in lines if "bundle.sample(" in line or line.startswith("optcov sample"))


def test_readme_and_the_tutorial_attach_by_the_default_method_of_attach():
    attached = inspect.signature(attach).parameters["method"].default
    for page in ("README.md", "docs/tutorials/1-your-diffusers-model.md"):
        lines = [line for piece in pieces(page) for line in piece.text.splitlines()]
        shown = next(line for line in lines if "attach(pipeline" in line)
        assert f'method="{attached}"' in shown, page


def test_loading_an_attached_pipeline_is_shown_with_the_import_that_it_needs():
    page = "docs/tutorials/1-your-diffusers-model.md"
    loading = [p.text for p in pieces(page) if 'DDPMPipeline.from_pretrained("my-pipeline-with-npr")' in p.text]
    assert loading
    assert all("import optcov.integrations.diffusers\n" in text for text in loading)


@pytest.mark.long
def test_an_attached_pipeline_loads_in_a_process_that_has_imported_nothing_else(tmp_path):
    pipeline = DDPMPipeline(small_unet(), DDPMScheduler(50))
    attach(pipeline, small_bundle(Schedule.linear(50))).save_pretrained(tmp_path / "my-pipeline-with-npr")
    page = "docs/tutorials/1-your-diffusers-model.md"
    shown = [p.text for p in pieces(page) if "my-pipeline-with-npr" in p.text and "attach(" not in p.text]
    assert len(shown) == 2
    for text in shown:
        subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True)
