"""Labels of folders of images: a sub-folder per class, or metadata that name a class for each image."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_files import random_images, write_folder
from optcov import data
from optcov.data import DataError

NO_LABELS = "".join(f'{{"file_name": "00{i}.png", "label": {{}}}}\n' for i in range(3))
IMAGES = random_images(6, 1, 4, 4)


def classes(directory: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        write_folder(directory / name, IMAGES[2 * number : 2 * number + 2])
    return directory


def flat(directory: Path, **files: str) -> Path:
    write_folder(directory, IMAGES[:3])
    for name, text in files.items():
        (directory / f"metadata.{name}").write_text(text)
    return directory


def labels(directory: Path, split: str = "all") -> list[int] | None:
    found = data.load(directory, split).labels
    return None if found is None else found.tolist()


def test_sub_folders_are_classes_in_the_order_of_their_names(tmp_path):
    assert labels(classes(tmp_path / "set", "dog", "cat", "emu")) == [0, 0, 1, 1, 2, 2]


def test_classes_of_train_and_test_are_numbered_together(tmp_path):
    classes(tmp_path / "train", "dog", "cat", "emu")
    classes(tmp_path / "test", "dog", "emu")
    assert labels(tmp_path, "train") == [0, 0, 1, 1, 2, 2]
    assert labels(tmp_path, "test") == [1, 1, 2, 2]


def test_images_without_a_folder_or_in_only_one_have_no_labels(tmp_path):
    write_folder(tmp_path / "flat", IMAGES)
    assert labels(tmp_path / "flat") is None
    assert labels(classes(tmp_path / "one", "images")) is None
    classes(tmp_path / "mixed", "dog", "cat")
    write_folder(tmp_path / "mixed", IMAGES[:1])
    assert labels(tmp_path / "mixed") is None


@pytest.mark.parametrize(
    ("ending", "text", "expected"),
    [
        ("csv", "file_name,label\n000.png,2\n001.png,0\n002.png,1\n", [2, 0, 1]),
        ("csv", "file_name,text,label\n002.png,b,shoe\n001.png,a,bag\n000.png,c,shoe\n", [1, 0, 1]),
        ("jsonl", '{"file_name": "000.png", "label": 7}\n\n{"file_name": "001.png", "label": 3}\n'
         '{"file_name": "002.png", "label": 3}\n', [7, 3, 3]),
        ("csv", "file_name,text\n000.png,a\n001.png,b\n002.png,c\n", None),
        ("csv", "\ufefffile_name,label\n000.png,2\n001.png,0\n002.png,1\n", [2, 0, 1]),  # as spreadsheets write
    ],
)  # fmt: skip
def test_metadata_name_a_class_for_each_image(tmp_path, ending, text, expected):
    assert labels(flat(tmp_path / "set", **{ending: text})) == expected


@pytest.mark.parametrize(
    ("ending", "text", "reason"),
    [
        ("csv", "file_name,label\n000.png,2\n001.png,0\n", "has no label for 002.png"),
        ("csv", "file_name,label\n000.png,2\n001.png,\n002.png,1\n", "has no label for 001.png"),
        ("csv", "name,label\n000.png,2\n", "row 1 has no file_name"),
        ("jsonl", '{"file_name": "000.png"', "cannot read"),
        ("jsonl", "[" * 100_000, "cannot read"),
        ("jsonl", '["000.png", 1]', "row 1 has no file_name"),
        (
            "jsonl",
            NO_LABELS,
            "neither a whole number",
        ),
        ("csv", 'file_name,label\n000.png,"' + "x" * 200_000 + '"\n', "cannot read"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_metadata_that_cannot_be_used_are_named(tmp_path, ending, text, reason):
    place = flat(tmp_path / "set", **{ending: text})
    with pytest.raises(DataError, match=reason) as caught:
        data.load(place, "all")
    assert f"metadata.{ending}" in str(caught.value)
