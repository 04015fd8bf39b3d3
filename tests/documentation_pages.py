"""README and docs as a reader follows them: blocks of a page in order, in one directory, with one Python namespace.

`python tests/documentation_pages.py PAGE` follows one page, long commands too. Pictures of RENEWED pages are copied to
docs/images from where the page's own code wrote them; those of other pages have scripts of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]\((?:\.\./)*(?:docs/)?images/([\w-]+\.png)\)")
RENEWED = ("docs/tutorials/3-mixture-of-gaussians.md",)  # its code draws what it shows, with no stand-in for a model
# page -> how a command begins, or a line of Python -> why the tests do not run it
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": "installs the project; what it then runs, optcov demo, is run by test_release.py",
        "make test": "runs the tests, and they follow this page",
    },
    "docs/benchmarks.md": {
        "python benchmarks/page.py": "takes a quarter of an hour; test_bench_page.py runs its parts"
    },
    "docs/data.md": {"optcov data": "fetches from the publishers; test_data.py fetches from a local mirror"},
    "docs/how-to/many-gpus.md": {
        "accelerate launch": "needs four GPUs; test_sampling_cli.py and test_fitting_processes.py launch two",
        "ACCELERATE_USE_CPU=true torchrun": "test_sampling_cli.py launches two processes on CPUs by accelerate",
    },
    "docs/results.md": {"optcov table": "takes hours; test_tables_cli.py makes small tables"},
    "docs/results-restoration.md": {"python benchmarks/restoration.py": "takes hours; it restores thousands of images"},
    "docs/metrics.md": {
        "pip install": "installs from elsewhere; an extra that the tests have already",
        "optcov statistics data/cifar10": "takes hours; test_gathering.py gathers those of a few images",
        "optcov frechet out/samples cifar10-train.npz": "needs that file; test_gathering.py makes a small one",
    },
    "docs/how-to/play.md": {
        "pip install": "installs from elsewhere; an extra that the tests have already",
        "optcov play": "serves until it is ended; test_play_browser.py opens it in a browser",
    },
    "docs/install.md": {
        "pip install --no-deps": "installs from elsewhere; test_integrations_azula.py runs where it is installed",
        "pip install": "installs the project; test_release.py installs its wheel",
    },
    "docs/tables.md": {
        "optcov table fid --bundle fashion": "takes hours",
        "optcov table fid --full": "takes days, and needs a checkpoint of the paper and the Inception network",
    },
    "docs/training.md": {
        "optcov data": "fetches from the publishers; test_data.py fetches from a local mirror",
        "optcov train": "takes hours; test_fitting.py trains for a few steps",
        "optcov fit": "fits on what the command before trained; test_fit_command.py fits on a small network",
    },
}


@dataclass(frozen=True)
class Piece:
    """One command, or one block of Python."""

    page: str  # relative to the project
    line: int
    language: str  # "bash" or "python"
    text: str

    @property
    def title(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def pages() -> list[str]:
    """README and every page of the documentation."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def pieces(page: str) -> list[Piece]:
    """Every command and every block of Python of a page, in order."""
    text, found = read(page), []
    for match in FENCE.finditer(text):
        language, content = match.groups()
        line = text.count("\n", 0, match.start(2)) + 1
        if language == "python":
            found.append(Piece(page, line, language, content))
        elif language == "bash":
            found += [Piece(page, line + number, language, command) for number, command in _commands(content)]
    return found


def _commands(block: str) -> Iterator[tuple[int, str]]:
    """Lines that end in a backslash go on; comments go."""
    whole, first = "", 0
    for number, line in enumerate(block.splitlines()):
        first = first if whole else number
        whole += line.split(" #")[0].strip()
        if whole.endswith("\\"):
            whole = whole[:-1]
        elif whole and not whole.startswith("#"):
            yield first, whole
            whole = ""
        else:
            whole = ""


def reason(table: dict[str, dict[str, str]], piece: Piece) -> str | None:
    """Why a table takes a piece out; None if it does not."""
    for start, why in table.get(piece.page, {}).items():
        if start == "*" or piece.text.startswith(start) or (piece.language == "python" and start in piece.text):
            return why
    return None


class Reader:
    """Somebody who follows one page, in the current directory."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    def follow(self, piece: Piece) -> None:
        """Do what a piece says; anything that goes wrong raises."""
        if piece.language == "python":
            code = compile("\n" * (piece.line - 1) + piece.text, piece.page, "exec")
            exec(code, self.namespace)
            return
        words = shlex.split(piece.text)
        if words[0] == "optcov":
            self._optcov(words[1:], piece)
        elif words[0] == "python" and words[1].endswith(".py"):
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        else:
            raise AssertionError(f"{piece.title}: nobody here can run {words[0]!r}; say why in the test's table")

    @staticmethod
    def _optcov(words: list[str], piece: Piece) -> None:
        """In this process: importing torch and diffusers again for each command would take most of the time."""
        from typer.testing import CliRunner

        from optcov.cli import app

        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(f"{piece.title}\n{result.output}") from result.exception
        assert result.exit_code == 0, f"{piece.title}\n{result.output}"


def prepare(page: str, directory: Path, wanted: list[Piece]) -> None:
    """Put into the directory what a page says that the reader has, but not what the wanted pieces fit themselves."""
    with _chdir(directory):
        for make in PREPARED.get(page, ()):
            make()
        for piece in wanted:
            if piece.text.startswith("optcov fit"):
                words = shlex.split(piece.text)
                shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)


@contextlib.contextmanager
def _chdir(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _own_pipeline() -> None:
    from diffusers import DDPMPipeline, DDPMScheduler

    from small_bundles import small_unet

    pipeline = DDPMPipeline(small_unet(), DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained("my-pipeline")


def _own_images() -> None:
    import numpy as np
    from PIL import Image

    Path("images").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)):
        Image.fromarray(pixels).save(f"images/{number}.png")


def _own_bundle() -> None:
    from optcov import Schedule
    from small_bundles import small_bundle

    for name in ("my-bundle", "my-fit"):
        small_bundle(Schedule.linear()).save(name)


def _own_classes() -> None:
    """A pipeline with three classes and an empty one, and images with labels."""
    import numpy as np
    from diffusers import DDPMPipeline, DDPMScheduler

    from small_bundles import small_unet

    DDPMPipeline(small_unet(num_class_embeds=4), DDPMScheduler()).save_pretrained("my-class-pipeline")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez("images.npz", images=pixels, labels=np.arange(60) % 3)


def _own_models() -> None:
    """Tiny pipelines of every kind under the names of the page, and images with captions and with labels."""
    import numpy as np

    import tiny_models as tiny

    for name, kind in {"my-stable-diffusion": "sd", "my-sd3": "sd3", "my-flux": "flux", "my-dit": "dit"}.items():
        tiny.pipeline(kind).save_pretrained(name)
    tiny.write_folder(Path("pictures"), tiny.CAPTIONS, 12)
    np.savez("labelled.npz", images=tiny.images(12).numpy(), labels=np.arange(12))


def _given_fashion() -> None:
    """Fashion-MNIST as `optcov data` leaves it, but few images of it."""
    import gzip
    import struct

    from optcov.bundle import test_images
    from optcov.data import to_8bit

    Path("data/fashion-mnist").mkdir(parents=True)
    pixels = to_8bit(test_images("fashion")).numpy()[:, 0]
    for name, images in (("train", pixels[:48]), ("t10k", pixels[48:64])):
        count, height, width = images.shape
        with gzip.open(f"data/fashion-mnist/{name}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">IIII", 0x0803, count, height, width) + images.tobytes())
        with gzip.open(f"data/fashion-mnist/{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">II", 0x0801, count) + bytes(count))


def _checkpoints() -> None:
    """Files of a network of reduced width under the names of the page."""
    from zoo_files import write_files

    write_files(Path.cwd(), "cifar10-ls")


PREPARED: dict[str, tuple[Callable[[], None], ...]] = {
    "README.md": (_own_pipeline, _own_images, _own_bundle),
    "docs/diffusers.md": (_own_pipeline, _own_bundle),
    "docs/data.md": (_given_fashion,),
    "docs/how-to/my-model.md": (_own_models,),
    "docs/how-to/classes-and-guidance.md": (_own_classes,),
    "docs/few-steps.md": (_own_pipeline,),
    "docs/model-zoo.md": (_checkpoints,),
    "docs/tutorials/1-your-diffusers-model.md": (_own_pipeline, _own_images),
    "docs/tutorials/2-likelihood.md": (_own_images, _own_bundle),
    "docs/metrics.md": (_given_fashion,),
}


def main(page: str) -> None:
    """Follow a page from start to end, and keep the pictures it shows if its code draws them."""
    shown = set(PICTURE.findall(read(page))) if page in RENEWED else set()
    with tempfile.TemporaryDirectory() as place, _chdir(Path(place)):
        wanted = [piece for piece in pieces(page) if not reason(NOT_RUN, piece)]
        prepare(page, Path(place), wanted)
        reader = Reader()
        for piece in wanted:
            print(piece.title, flush=True)  # noqa: T201
            with contextlib.redirect_stdout(io.StringIO()) as said:
                reader.follow(piece)
            print(said.getvalue(), flush=True)  # noqa: T201
        for name in sorted(shown):
            for made in Path(place).rglob(name):
                shutil.copy(made, ROOT / "docs" / "images" / name)
                print(f"docs/images/{name}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
