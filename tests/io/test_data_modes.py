"""Images of every colour mode: converted as people expect, and said once; what would lose more is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from optcov import data
from optcov.data.modes import say_once, with_channels

RED, CLEAR = (200, 10, 30), (0, 0, 0, 0)


@pytest.fixture(autouse=True)
def nothing_said_before() -> Iterator[None]:
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def folder(directory: Path, *images: Image.Image) -> Path:
    for number, image in enumerate(images):
        image.save(directory / f"{number:03}.png")
    return directory


def first_pixel(directory: Path) -> list[int]:
    return data.load(directory, "all").images[-1, :, 0, 0].tolist()


def test_transparent_images_are_put_on_white_and_it_is_said_once(tmp_path, caplog):
    folder(tmp_path, *(Image.new("RGBA", (4, 5), CLEAR) for _ in range(10)), Image.new("RGBA", (4, 5), (*RED, 255)))
    for split in ("train", "test"):  # the folder is read for each
        data.load(tmp_path, split)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path.name}: converted 11 RGBA images to RGB on white"
    ]
    images = data.load(tmp_path, "all").images
    assert images.shape == (11, 3, 5, 4)
    assert bool((images[:10] == 255).all())
    assert images[10, :, 0, 0].tolist() == list(RED)


def test_half_transparent_pixels_are_half_white(tmp_path):
    assert first_pixel(folder(tmp_path, Image.new("RGBA", (2, 2), (*RED, 51)))) == [244, 206, 210]


def palette(transparent: bool) -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, *RED])
    if transparent:
        image.info["transparency"] = 1
    return image


@pytest.mark.parametrize(
    ("image", "pixel", "said"),
    [
        (palette(transparent=False), [*RED], "1 palette images to RGB"),
        (palette(transparent=True), [255, 255, 255], "1 palette images to RGB"),
        (Image.new("1", (4, 4), 1), [255], "1 black-and-white images to grey"),
        (Image.new("LA", (4, 4), (90, 255)), [90], "1 grey images with transparency to grey on white"),
        (Image.new("LA", (4, 4), (90, 0)), [255], "1 grey images with transparency to grey on white"),
    ],
    ids=["palette", "palette with a hole", "two levels", "grey and solid", "grey and clear"],
)
def test_an_image_of_another_mode_becomes_what_it_looks_like(tmp_path, caplog, image, pixel, said):
    assert first_pixel(folder(tmp_path, image)) == pixel
    assert said in caplog.text


def test_jpegs_of_four_inks_become_rgb(tmp_path):
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(tmp_path / "ink.jpg")
    assert first_pixel(tmp_path) == [255, 255, 255]


@pytest.mark.parametrize("order", ["grey first", "colour first"])
def test_grey_images_among_coloured_ones_become_rgb(tmp_path, caplog, order):
    images = [Image.new("L", (4, 5), 77), Image.new("RGB", (4, 5), RED)]
    folder(tmp_path, *(images if order == "grey first" else reversed(images)))
    loaded = sorted(data.load(tmp_path, "all").images[:, :, 0, 0].tolist())
    assert loaded == [[77, 77, 77], list(RED)]
    assert "converted 1 grey images to RGB, as there are coloured ones among them" in caplog.text


def test_plain_images_are_read_without_a_word(tmp_path, caplog):
    folder(tmp_path, Image.new("L", (4, 5), 77), Image.new("L", (4, 5), 78))
    assert data.load(tmp_path, "all").images.shape == (2, 1, 5, 4)
    assert not caplog.records


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_arrays_with_transparency_are_put_on_white(tmp_path, caplog, layout):
    array = np.zeros((10, 6, 5, 4), np.uint8)
    array[0] = (*RED, 255)
    np.save(tmp_path / "a.npy", array if layout == "NHWC" else array.transpose(0, 3, 1, 2))
    images = data.load(tmp_path / "a.npy", "all").images
    assert images.shape == (10, 3, 6, 5)
    assert images[0, :, 0, 0].tolist() == list(RED)
    assert bool((images[1:] == 255).all())
    assert "converted 10 RGBA images to RGB on white" in caplog.text


def test_images_get_the_channels_that_a_network_takes(caplog):
    grey = data.ImageSet(torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8), torch.arange(4), "mine")
    colour = with_channels(grey, 3)
    assert colour.shape == (3, 8, 8)
    assert bool((colour.images == grey.images).all())
    assert torch.equal(with_channels(colour, 1).images, grey.images)  # grey levels come back
    assert colour.labels is grey.labels
    assert with_channels(grey, 1) is grey
    assert [r.message for r in caplog.records] == [
        "mine: converted 4 grey images to RGB, which the network takes",
        "mine: converted 4 RGB images to grey, which the network takes",
    ]


def test_rgb_becomes_the_grey_that_pillow_makes_of_it():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 7, 9, 3), dtype=np.uint8)
    ours = with_channels(data.ImageSet(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())), 1).images
    theirs = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in pixels])
    assert np.array_equal(ours[:, 0].numpy(), theirs)


def test_a_name_that_would_steer_a_terminal_is_escaped(caplog):
    with caplog.at_level(logging.WARNING):
        with_channels(data.ImageSet(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), name="a\x1b[31mb"), 3)
    assert "\x1b" not in caplog.text


def test_rows_of_the_hub_are_converted_too(monkeypatch, caplog):
    kinds = {"Image": type("Image", (), {}), "ClassLabel": type("ClassLabel", (), {})}
    rows = [Image.new("RGBA", (4, 5), CLEAR), Image.new("L", (4, 5), 77), Image.new("RGB", (4, 5), RED)]

    class Table(list):  # type: ignore[type-arg]
        features = {"picture": kinds["Image"]()}  # noqa: RUF012

    fake = SimpleNamespace(**kinds, load_dataset=lambda name, split: Table({"picture": image} for image in rows))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    images = data.load("hf:some/clothes").images
    assert images[:, :, 0, 0].tolist() == [[255, 255, 255], [77, 77, 77], list(RED)]
    assert "converted 1 RGBA images to RGB on white" in caplog.text
    rows.append(Image.new("I;16", (4, 5)))
    with pytest.raises(data.DataError, match=r"row 3 has the colour mode I;16; convert it"):
        data.load("hf:some/clothes")
