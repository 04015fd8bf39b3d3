"""Statistics that are gathered once: resumed after a kill, compact, and refused if they belong to other images."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from command_line import CommandLine, run
from optcov import storage
from optcov.data import ImageSet
from optcov.metrics import Extractor, FeatureStatistics, MetricError, gather_statistics, measure_kernel
from optcov.metrics.gathering import kept_rows, progress_file
from warm_commands import WarmCommands


def some_images(n: int = 107, seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    return ImageSet(torch.randint(0, 256, (n, 1, 28, 28), generator=generator, dtype=torch.uint8), name="noise")


def first_pixels(images: Tensor) -> Tensor:
    return images.flatten(1)[:, :6].float() / 255


MINE = Extractor(first_pixels, "FD-mine")


def gather(images: ImageSet, path: Path, most: int = 10**9, extractor: Extractor = MINE) -> list[int]:
    """How many images were done after each batch; most: batches after which the run is left where it is."""
    done = []
    for step in gather_statistics(images, extractor, path, rows=20, batch=10, keep_every=2):
        done.append(step.done)
        if len(done) == most:
            break
    return done


def test_statistics_are_those_of_all_images_with_some_of_their_features(tmp_path: Path) -> None:
    images, path = some_images(), tmp_path / "s.npz"
    assert gather(images, path) == [*range(10, 101, 10), 107]
    found, features = FeatureStatistics.load(path), MINE.features(images)
    whole = FeatureStatistics.of(features)
    torch.testing.assert_close(found.mean, whole.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-6, atol=1e-7)
    assert (found.count, found.features, found.images) == (107, "FD-mine", images.checksum)
    assert found.rows is not None
    assert torch.equal(found.rows, features[kept_rows(107, 20)].half())
    with np.load(path) as arrays:
        assert (arrays["sigma"].dtype, arrays["rows"].dtype) == (np.float32, np.float16)
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["s.npz"]
    assert gather(images, path) == []  # it is there already


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    images = some_images()
    gather(images, tmp_path / "straight.npz")
    gather(images, tmp_path / "resumed.npz", most=5)
    assert gather(images, tmp_path / "resumed.npz")[:2] == [40, 50]  # the fifth batch was not kept
    assert (tmp_path / "resumed.npz").read_bytes() == (tmp_path / "straight.npz").read_bytes()


KILLED = """
import os, signal
from pathlib import Path
import torch
from optcov.data import ImageSet
from optcov.metrics import Extractor, gather_statistics

generator = torch.Generator().manual_seed(0)
images = ImageSet(torch.randint(0, 256, (107, 1, 28, 28), generator=generator, dtype=torch.uint8), name="noise")
mine = Extractor(lambda images: images.flatten(1)[:, :6].float() / 255, "FD-mine")
for step in gather_statistics(images, mine, Path("killed.npz"), rows=20, batch=10, keep_every=2):
    if step.done == 70:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_goes_on_to_the_same_bytes(commands: WarmCommands, tmp_path: Path) -> None:
    killed, straight = tmp_path / "killed.npz", tmp_path / "straight.npz"
    assert commands.start_code(KILLED, cwd=tmp_path).wait().code == -signal.SIGKILL
    assert not killed.exists()
    assert gather(some_images(), killed)[0] == 60
    gather(some_images(), straight)
    assert killed.read_bytes() == straight.read_bytes()


def test_what_belongs_to_other_images_or_features_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    gather(some_images(), path, most=4)
    with pytest.raises(MetricError, match=r"the images changed; undo that to go on, or remove the file"):
        gather(some_images(seed=1), path)
    other = Extractor(first_pixels, "FD-other")
    with pytest.raises(MetricError, match="the features changed from FD-mine to FD-other"):
        gather(some_images(), path, extractor=other)
    gather(some_images(), path)
    with pytest.raises(MetricError, match=r"s\.npz belongs to another run: the images changed; remove it"):
        gather(some_images(seed=1), path)
    with pytest.raises(MetricError, match="the features changed from FD-mine to FD-other; remove it"):
        gather(some_images(), path, extractor=other)


def test_a_file_that_no_run_left_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    storage.write_tensors(progress_file(path), {"mean": torch.zeros(6)}, {"identity": "{}"})
    with pytest.raises(MetricError, match="remove it to begin again"):
        gather(some_images(), path)


def test_two_processes_do_not_gather_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    with storage.claim(tmp_path / ".s.npz.lock"), pytest.raises(MetricError, match="by another process"):
        gather(some_images(), path)


def test_rows_that_are_no_features_are_refused(tmp_path: Path) -> None:
    statistics = FeatureStatistics.of(torch.rand(9, 4))
    for rows in (torch.zeros(5, 3), torch.zeros(5, 4) / 0, torch.zeros(5, 4, dtype=torch.int64)):
        with pytest.raises(MetricError, match=r"rows of features must be finite numbers \(k, 4\)"):
            replace(statistics, rows=rows)
    np.savez(tmp_path / "s.npz", mu=np.zeros(4), sigma=np.eye(4), rows=np.zeros((5, 4), int))
    with pytest.raises(MetricError, match="rows of features must be floating-point numbers"):
        FeatureStatistics.load(tmp_path / "s.npz")


def test_the_command_gathers_what_frechet_compares_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, n in (("a", 60), ("b", 40)):
        np.save(tmp_path / f"{name}.npy", some_images(n, n).images[:, 0].numpy())
    out = tmp_path / "a.npz"
    said = run("statistics", tmp_path / "a.npy", out, "--features", "fashion", "--rows", 50)
    assert f"wrote {out}" in said
    assert json.loads(run("statistics", tmp_path / "a.npy", out, "--features", "fashion", "--rows", 50, "--json"))[
        "there_before"
    ]
    result = json.loads(run("frechet", tmp_path / "b.npy", out, "--kernel", "--json"))
    assert result["counts"] == [40, 60]
    assert result["kernel"]["counts"] == [40, 50]
    rows = FeatureStatistics.load(out).rows
    assert rows is not None
    assert result["kernel"]["standard_error"] > 0
    packed = tmp_path / "packed.npz"
    run("statistics", tmp_path / "a.npy", packed, "--features", "fashion", "--rows", 50, "--packed")
    plain = FeatureStatistics.load(out)
    torch.testing.assert_close(FeatureStatistics.load(packed).covariance, plain.covariance)
    replace(plain, rows=None).save(tmp_path / "plain.npz")
    refused = CommandLine(capsys)("frechet", tmp_path / "b.npy", tmp_path / "plain.npz", "--kernel")
    assert refused.code == 2
    assert "leave --kernel out" in refused.err
    refused = CommandLine(capsys)("statistics", tmp_path / "a.npy", tmp_path / "a.pt", "--features", "fashion")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "must end in .npz" in refused.err
    assert measure_kernel(rows, rows[:20]).counts == (50, 20)
