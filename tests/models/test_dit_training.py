"""A transformer trained by flow matching: `optcov train --network dit`."""

from __future__ import annotations

import json

import pytest
import torch
from tests.command_line import runner
from tests.tiny_training import images

from optcov.bundle.weights import load_unet
from optcov.cli import app
from optcov.data import ImageSet
from optcov.fitting import DiTShape, TrainingConfig, TrainingError, UNetShape, train_noise_predictor
from optcov.networks.dit import build_dit

SHAPE = DiTShape(patch_size=4, width=8, layers=1, head_dim=4, classes=3)


def labelled() -> ImageSet:
    return ImageSet(images(40).images, torch.arange(40) % 3)


def train(directory, steps: int, shape=SHAPE, **options) -> list:
    config = TrainingConfig(steps=steps, batch_size=4, learning_rate=1e-2, decay="constant", checkpoint_every=2)
    flow = {"schedule": "flow", "prediction_type": "flow_prediction", **options}
    return list(train_noise_predictor(labelled(), directory, config, shape, flip=False, **flow))


def test_a_dit_is_trained_by_flow_matching_and_read_again(tmp_path):
    losses = [record.loss for record in train(tmp_path, 60)]
    assert sum(losses[-20:]) < sum(losses[:20])
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["schedule"], run["network"]["kind"], run["network"]["classes"]) == ("flow", "dit", 3)
    dit = load_unet(tmp_path / "unet")
    empty = dit(torch.zeros(1, 1, 8, 8), torch.tensor([500.0]), class_labels=torch.tensor([3])).sample
    assert empty.shape == (1, 1, 8, 8)


def test_a_training_of_a_dit_goes_on_where_it_stopped(tmp_path):
    whole = train(tmp_path / "whole", 6)
    part = train_noise_predictor(
        labelled(),
        tmp_path / "part",
        TrainingConfig(steps=6, batch_size=4, learning_rate=1e-2, decay="constant", checkpoint_every=2),
        SHAPE,
        "flow",
        False,
        prediction_type="flow_prediction",
    )
    for _ in range(4):
        next(part)
    part.close()
    rest = train(tmp_path / "part", 6)
    assert [record.step for record in rest] == [5, 6]
    assert rest[-1].loss == pytest.approx(whole[-1].loss, rel=1e-5)


def test_blocks_see_the_same_label_in_training():
    dit = build_dit((1, 8, 8), width=8, layers=2, head_dim=4, classes=3).train()
    torch.nn.init.normal_(dit.proj_out_2.weight)
    torch.nn.init.normal_(dit.proj_out_1.weight)
    x, time, label = torch.randn(1, 1, 8, 8), torch.tensor([500.0]), torch.tensor([1])
    first = dit(x, time, class_labels=label).sample
    assert all(torch.equal(dit(x, time, class_labels=label).sample, first) for _ in range(20))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"classes": 0}, "labels"), ({"width": 10}, "head_dim"), ({"patch_size": 0}, "patch_size"),
        ({"layers": 0}, "layers"), ({"dropout": 1.0}, "dropout"),
    ],
)  # fmt: skip
def test_dits_that_cannot_be_built_are_refused(wrong, named):
    with pytest.raises(TrainingError, match=named):
        DiTShape(**{"classes": 3, "width": 8, "head_dim": 4, **wrong})


def test_images_that_cannot_be_cut_into_patches_are_refused():
    with pytest.raises(ValueError, match="8x8 cannot be cut into patches of 3x3"):
        build_dit((1, 8, 8), patch_size=3)


def test_noise_is_not_learnt_alone_where_nothing_else_is_left(tmp_path):
    with pytest.raises(TrainingError, match="flow_prediction"):
        train(tmp_path, 1, UNetShape((8, 8), 1, 0, 4, 8), prediction_type="epsilon")


def test_an_unknown_network_is_refused(tmp_path):
    said = runner.invoke(app, ["train", "x", "--out", str(tmp_path / "run"), "--network", "transformer"])
    assert "neither unet nor dit" in str(said.exception or said.output)
