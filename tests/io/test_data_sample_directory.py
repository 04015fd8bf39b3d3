from __future__ import annotations

import pytest
import torch

from optcov.data import DataError
from optcov.data.sample_directory import SampleDirectory

IMAGES = torch.arange(10 * 3 * 2 * 2, dtype=torch.uint8).reshape(10, 3, 2, 2)


@pytest.mark.parametrize("file_format", ["png", "npz"])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_interrupted_run_goes_on_and_never_repeats_or_skips_an_image(tmp_path, file_format, channels):
    images = IMAGES[:, :channels]
    directory = SampleDirectory(tmp_path, {"seed": 1}, file_format)
    assert list(directory.missing(4)) == [0, 1, 2, 3]
    directory.save(images[[0, 1, 4, 5]], [0, 1, 4, 5])
    again = SampleDirectory(tmp_path, {"seed": 1}, file_format)
    assert list(again.missing(7)) == [2, 3, 6]
    again.save(images[[2, 3, 6]], [2, 3, 6])
    assert list(again.missing(7)) == []
    assert torch.equal(again.first(7), images[:7])


def test_a_file_that_was_never_finished_does_not_count(tmp_path):
    directory = SampleDirectory(tmp_path, {}, "png")
    directory.save(IMAGES[:1], [0])
    (tmp_path / "images" / ".000001.png.abc.part").write_bytes(b"half")
    assert list(directory.missing(2)) == [1]


def test_another_run_in_the_same_directory_is_refused(tmp_path):
    SampleDirectory(tmp_path, {"seed": 1, "method": "DDIM"}, "png").save(IMAGES[:1], [0])
    with pytest.raises(DataError, match="belongs to another run: the seed changed from 1 to 2; undo that"):
        SampleDirectory(tmp_path, {"seed": 2, "method": "DDIM"}, "png")
    with pytest.raises(DataError, match="the format changed from png to npz"):
        SampleDirectory(tmp_path, {"seed": 1, "method": "DDIM"}, "npz")
    with pytest.raises(DataError, match="unknown format 'gif'"):
        SampleDirectory(tmp_path / "new", {}, "gif")
    assert not (tmp_path / "new").exists()
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(DataError, match="does not describe a run"):
        SampleDirectory(tmp_path, {"seed": 1}, "png")


def test_a_run_that_draws_nothing_leaves_the_directory_free(tmp_path):
    SampleDirectory(tmp_path, {"seed": 1}, "png")
    SampleDirectory(tmp_path, {"seed": 2}, "npz").save(IMAGES[:1], [0])


def test_images_without_a_description_are_not_taken_for_ones_own(tmp_path):
    SampleDirectory(tmp_path, {"seed": 1}, "png").save(IMAGES[:1], [0])
    (tmp_path / "run.json").unlink()
    with pytest.raises(DataError, match="holds images of an unknown run"):
        SampleDirectory(tmp_path, {"seed": 1}, "png")


def test_an_image_of_another_shape_among_those_of_a_run_is_named(tmp_path):
    directory = SampleDirectory(tmp_path, {}, "png")
    directory.save(IMAGES[:1], [0])
    directory.save(IMAGES[1:2, :1], [1])
    with pytest.raises(DataError, match=r"000001\.png has the shape \(1, 2, 2\), but 000000\.png has \(3, 2, 2\)"):
        directory.first(2)
