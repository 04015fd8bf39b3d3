"""Stage 1: batches, losses, the loop, and a run that is killed for real."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optcov import ForwardProcess, Schedule
from optcov.bundle.weights import load_unet
from optcov.data import ImageSet
from optcov.fitting import (
    Batches,
    JointObjective,
    NoiseObjective,
    Training,
    TrainingConfig,
    TrainingError,
    UNetShape,
    new_heads,
)
from optcov.fitting.batches import Labels, NoiseLevels, draw_times, step_generator
from optcov.fitting.checkpoint import Checkpoint, CheckpointStore
from optcov.fitting.objectives import squared_error
from optcov.fitting.score import SampleScore, ScoreSettings
from optcov.fitting.stage1 import train_noise_predictor
from optcov.networks import HeadedNetwork
from optcov.prediction import NoisePrediction
from tiny_training import images, same, tiny_network, training, weights

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "steps.json").read_text())


# losses


def golden_loss_inputs():
    full = GOLDEN["inputs_full"]
    shape = (2, 1, 4, 4)
    x_0 = torch.tensor(full["u8"], dtype=torch.float64).reshape(shape) / 127.5 - 1
    eps = torch.tensor(full["eps"], dtype=torch.float64).reshape(shape)
    times = torch.tensor([3, 700])
    x_t = ForwardProcess(Schedule.linear()).diffuse(x_0, times, eps)
    t = times.double()[:, None, None, None]
    eps_hat = 0.9 * torch.tanh(x_t * (1 + 0.001 * t))
    g = 0.2 + 0.1 * torch.cos(x_t + 0.002 * t)
    h = eps_hat**2 + 0.3 + 0.1 * torch.sin(2 * x_t + 0.001 * t)
    return eps, NoisePrediction(eps_hat, {"sn": h, "npr": g})


def test_the_four_losses_are_the_authors():
    eps, prediction = golden_loss_inputs()
    residual, g = (eps - prediction.noise).square(), prediction.head("npr")
    ours = {
        "dsm": squared_error(eps, prediction.noise),
        "SN (dt_dsdm, eps_eps2)": squared_error(eps.square(), prediction.head("sn")),
        "NPR (dt_dsdm_err, eps_epsc)": squared_error(residual, g),
        "variant dt_dsdm with eps_epsc: |eps^2-(g+eps_hat^2)|^2": squared_error(
            eps.square(), g + prediction.noise.square()
        ),
    }
    for name, values in GOLDEN["training_loss"]["values"].items():
        assert ours[name].tolist() == pytest.approx(values, rel=1e-10), name


def test_the_noise_objective_is_the_mean_square_over_pixels():
    network = tiny_network()
    batch = Batches(images(), network.schedule, 4)(1)
    x_t = ForwardProcess(network.schedule).diffuse(batch.x_0, batch.times, batch.noise)
    expected = (batch.noise - network(x_t, batch.times).noise).square().flatten(1).mean(1)
    assert torch.allclose(NoiseObjective(network)(batch), expected)


@pytest.mark.parametrize("kind", ["sample", "v_prediction"])
def test_the_objective_compares_what_the_network_predicts(kind):
    network = tiny_network()
    network = HeadedNetwork(network.backbone, network.schedule, parameterisation=kind)
    batch = Batches(images(), network.schedule, 4)(1)
    x_t = ForwardProcess(network.schedule).diffuse(batch.x_0, batch.times, batch.noise)
    output = network.features(x_t, batch.times).output
    signal, noise = (
        level(batch.times).sqrt().float()[:, None, None, None]
        for level in (network.schedule.alpha_bar, network.schedule.beta_bar)
    )
    target = batch.x_0 if kind == "sample" else signal * batch.noise - noise * batch.x_0
    expected = (target - output).square().flatten(1).mean(1)
    assert torch.allclose(NoiseObjective(network)(batch), expected, rtol=1e-5)


# batches


def test_a_step_has_the_same_batch_whatever_came_before():
    batches = Batches(images(), Schedule.vp_sde(), 16, seed=3, flip=True)
    later = batches(7)
    for step in (1, 2, 3):
        batches(step)
    again = batches(7)
    assert all(torch.equal(getattr(later, name), getattr(again, name)) for name in ("x_0", "times", "noise"))
    assert not torch.equal(batches(8).noise, later.noise)


def test_every_image_is_seen_once_per_epoch():
    batches = Batches(images(40), Schedule.vp_sde(), 16)
    order = torch.cat([batches._indices(step) for step in range(1, 6)])
    assert len(order) == 80
    assert sorted(order[:40].tolist()) == sorted(order[40:].tolist()) == list(range(40))


def test_times_are_stratified_over_the_training_range():
    times = draw_times(Schedule.vp_sde(), 1000, step_generator(0, "test", 0))
    assert 1e-5 <= float(times.min()) < 1e-3
    assert float(times.max()) <= 1
    assert torch.histc(times, 10, 0, 1).tolist() == pytest.approx([100] * 10, abs=1)
    steps = draw_times(Schedule.linear(), 5000, step_generator(0, "test", 1))
    counts = torch.bincount(steps, minlength=1001)
    assert int(counts[0]) == 0
    assert int(counts[1:].min()) >= 3
    assert int(steps.max()) == 1000


@pytest.mark.parametrize("schedule", [Schedule.vp_sde(), Schedule.linear()])
def test_noise_levels_are_normal_inside_the_schedule(schedule):
    levels = NoiseLevels(mean=-0.8, std=1.6)
    times = draw_times(schedule, 4000, step_generator(0, "test", 2), levels)
    log_sigma = -schedule.log_snr(times).numpy() / 2
    quantiles = np.quantile(log_sigma, [0.1, 0.5, 0.9])
    assert quantiles == pytest.approx([-0.8 - 1.2816 * 1.6, -0.8, -0.8 + 1.2816 * 1.6], abs=0.02)
    assert float(times.min()) >= (1 if schedule.steps else 1e-5)
    assert float(times.max()) <= schedule.final_time


def test_a_share_of_the_labels_is_left_out():
    source = ImageSet(images(40).images, torch.arange(40) % 10)
    batches = Batches(source, Schedule.vp_sde(), 40, labels=Labels(10, 0.25))
    found = torch.cat([batches(step).condition["class_labels"] for step in range(1, 26)])
    assert abs(float((found == 10).double().mean()) - 0.25) < 0.05  # 1,000 draws: 3.6 standard errors
    kept = batches(1).condition["class_labels"]
    own = source.labels[batches._indices(1)]
    assert bool(((kept == own) | (kept == 10)).all())
    part = batches(1).part(1, 2)
    assert torch.equal(part.condition["class_labels"], kept[20:])


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(TrainingError, match="no labels"):
        Batches(images(), Schedule.vp_sde(), 4, labels=Labels(10))
    with pytest.raises(TrainingError, match="labels run from 0 to 9, but 5 classes are 0 to 4"):
        Batches(ImageSet(images(40).images, torch.arange(40) % 10), Schedule.vp_sde(), 4, labels=Labels(5))


def test_a_class_conditional_unet_is_trained_on_labels(tmp_path):
    source = ImageSet(images(40).images, torch.arange(40) % 3)
    shape = UNetShape((8, 8), 1, 0, 4, 8, classes=3)
    config = TrainingConfig(steps=2, batch_size=4)
    options = {"prediction_type": "v_prediction", "levels": NoiseLevels()}
    list(train_noise_predictor(source, tmp_path, config, shape, flip=False, **options))
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["prediction_type"], run["network"]["classes"]) == ("v_prediction", 3)
    assert json.loads((tmp_path / "unet" / "config.json").read_text())["num_class_embeds"] == 4
    other = ImageSet(source.images, (torch.arange(40) + 1) % 3)
    with pytest.raises(TrainingError, match="the labels changed"):
        list(train_noise_predictor(other, tmp_path, config, shape, flip=False, **options))


def test_a_training_begins_with_given_weights(tmp_path):
    source, shape = images(40), UNetShape((8, 8), 1, 0, 4, 8)
    config = TrainingConfig(steps=1, batch_size=4, learning_rate=1e-30)

    def trained(name, shape=shape, **options):
        list(train_noise_predictor(source, tmp_path / name, config, shape, flip=False, **options))
        return load_unet(tmp_path / name / "unet").state_dict()

    first = trained("first")
    other = replace(config, seed=1)
    list(train_noise_predictor(source, tmp_path / "other", other, shape, flip=False))
    fresh = load_unet(tmp_path / "other" / "unet").state_dict()
    for start in ("other", "other/unet"):
        again = trained(f"from {start.replace('/', ' ')}", start=tmp_path / start)
        assert all(torch.equal(again[name], fresh[name]) for name in fresh)
    assert not torch.equal(again["conv_in.weight"], first["conv_in.weight"])
    with pytest.raises(TrainingError, match="the start changed"):
        trained("from other", start=tmp_path / "first")
    with pytest.raises(TrainingError, match="another shape"):
        trained("wider", UNetShape((16, 8), 1, 0, 4, 8), start=tmp_path / "first")


def test_flips_are_mirror_images():
    plain, flipped = (Batches(images(), Schedule.vp_sde(), 16, flip=flip)(1).x_0 for flip in (False, True))
    for a, b in zip(plain, flipped, strict=True):
        assert torch.equal(a, b) or torch.equal(a.flip(-1), b)
    assert not torch.equal(plain, flipped)


@pytest.mark.parametrize("size", [0, 10**12])
def test_a_batch_that_no_memory_holds_is_refused(size):
    with pytest.raises(TrainingError, match=f"batch_size = {size} must be at least 1 and at most"):
        Batches(images(), Schedule.vp_sde(), size)


# schedule of the optimizer


def test_learning_rate_and_average_follow_their_formulas():
    config = TrainingConfig(steps=110, warmup=10, learning_rate=2.0, ema=0.99)
    rates = [config.learning_rate_at(step) for step in (1, 5, 10, 60, 110)]
    assert rates == pytest.approx([0.2, 1.0, 2.0, 1.0, 0.0], abs=1e-12)
    assert [config.ema_decay_at(n) for n in (0, 1, 90, 10_000)] == pytest.approx([0.1, 2 / 11, 0.91, 0.99])


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"batch_size": 0}, {"learning_rate": -1.0}, {"ema": 1.0}, {"decay": "steps"}, {"clip": 0.0},
        {"warmup": -1}, {"keep_every": -1}, {"weight_decay": float("nan")},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(TrainingError, match=next(iter(wrong))):
        TrainingConfig(**{"steps": 1, **wrong})


# the loop


def test_training_lowers_the_loss_and_leaves_the_average_in_the_network(tmp_path):
    network = tiny_network()
    run = training(tmp_path, 60, network, ema=0.5)
    losses = [record.loss for record in run.run()]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert same({f"network.{k}": v for k, v in network.state_dict().items()}, run.average)


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(tmp_path):
    whole, halves = tiny_network(), tiny_network()
    list(training(tmp_path / "a", network=whole).run())
    for record in training(tmp_path / "b", network=halves).run():
        if record.step == 5:  # one step beyond the checkpoint of step 4
            break
    again = tiny_network()
    steps = [record.step for record in training(tmp_path / "b", network=again).run()]
    assert steps == [5, 6]
    assert json.loads((tmp_path / "b" / "run.json").read_text())["optcov"] == version("optcov")
    assert same(weights(whole), weights(again))
    logged = [json.loads(line)["step"] for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert logged == [6]


def test_a_stopped_run_with_dropout_ends_with_the_weights_of_one_that_was_not(tmp_path):
    """Dropout draws from torch's own generator, whose state at a restart is anybody's guess."""

    def noisy_network():
        network = tiny_network()
        network.backbone.module.body = nn.Sequential(network.backbone.module.body, nn.Dropout(0.5))
        return network

    whole, again = noisy_network(), noisy_network()
    torch.manual_seed(1)
    list(training(tmp_path / "a", network=whole).run())
    torch.manual_seed(2)
    records = training(tmp_path / "b", network=noisy_network()).run()
    assert [next(records).step for _ in range(3)] == [1, 2, 3]
    records.close()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    list(training(tmp_path / "b", network=again).run())
    assert same(weights(whole), weights(again))
    assert torch.equal(torch.get_rng_state(), state)  # and the caller's generator is as it was


def test_a_finished_run_does_nothing_more(tmp_path):
    first, second = tiny_network(), tiny_network()
    list(training(tmp_path, network=first).run())
    assert list(training(tmp_path, network=second).run()) == []
    assert same(weights(first), weights(second))


def test_a_run_that_was_killed_before_it_removed_an_old_checkpoint_removes_it(tmp_path):
    run = training(tmp_path, keep=1)
    list(run.run())
    assert run.store.steps() == [6]
    run.store.path(4).write_bytes(run.store.path(6).read_bytes())  # as if killed between the two
    assert list(training(tmp_path, keep=1).run()) == []
    assert run.store.steps() == [6]


def test_other_settings_do_not_continue_a_run(tmp_path):
    list(training(tmp_path).run())
    with pytest.raises(TrainingError, match=r"the learning rate changed from 0.01 to 0.5"):
        list(training(tmp_path, learning_rate=0.5).run())


def test_data_may_move_to_another_directory_but_not_change(tmp_path):
    config, network = TrainingConfig(steps=2, batch_size=4, checkpoint_every=1), tiny_network()
    batches = Batches(images(), network.schedule, 4)

    def run(name: str, checksum: str) -> list[object]:
        data = {"data": {"name": name, "checksum": checksum}}
        return list(Training(NoiseObjective(network), batches, config, tmp_path, data).run())

    assert len(run("here", "1")) == 2
    assert run("there", "1") == []
    with pytest.raises(TrainingError, match="belongs to another run: the images changed; undo that"):
        run("here", "2")


def test_a_setting_that_a_run_had_and_this_one_lacks_is_another_setting(tmp_path):
    config, network = TrainingConfig(steps=2, batch_size=4, checkpoint_every=1), tiny_network()
    batches = Batches(images(), network.schedule, 4)
    list(Training(NoiseObjective(network), batches, config, tmp_path, {"score": {"samples": 4}}).run())
    with pytest.raises(TrainingError, match=r"the score changed; undo that"):
        list(Training(NoiseObjective(tiny_network()), batches, config, tmp_path).run())


def test_the_retention_rule_keeps_the_latest_the_multiples_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_every=4)
    for step in range(1, 10):
        store.save(Checkpoint(step, {}, {}, {}, {}, best=(3, 0.5) if step >= 3 else None))
    assert store.steps() == [3, 4, 8, 9]
    assert store.latest().best == (3, 0.5)


def test_the_best_checkpoint_is_that_of_the_lowest_score(tmp_path):
    scores = iter([3.0, 1.0, 2.0])
    network = tiny_network()
    config = TrainingConfig(steps=6, batch_size=4, checkpoint_every=2, keep=1)
    run = Training(
        NoiseObjective(network), Batches(images(), network.schedule, 4), config, tmp_path, score=lambda: next(scores)
    )
    list(run.run())
    assert run.store.steps() == [4, 6]
    assert run.store.latest().best == (4, 1.0)
    best = run.store.load(4).average
    assert same({f"network.{k}": v for k, v in network.state_dict().items()}, best)


def test_checkpoints_are_scored_by_samples_of_the_averaged_weights(tmp_path):
    network = tiny_network()
    source = ImageSet(torch.randint(0, 256, (20, 1, 28, 28), generator=torch.Generator().manual_seed(1)).byte())
    score = SampleScore(network, source, ScoreSettings(samples=8, steps=2))
    first = score()
    assert first == score()
    assert first > 0
    with torch.no_grad():
        network.backbone.module.conv_out.bias += 0.5
    assert score() != first


def test_a_score_that_cannot_be_computed_is_refused_at_the_start():
    with pytest.raises(ValueError, match="28, 28"):
        SampleScore(tiny_network(), images(), ScoreSettings(samples=8, steps=2))  # features of other images
    for wrong in ({"samples": 1}, {"steps": 1}):
        with pytest.raises(TrainingError, match="2"):
            ScoreSettings(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"channels": (0, 8)}, {"channels": ()}, {"layers_per_block": 0}, {"attention_levels": 4}, {"groups": 0},
        {"groups": 3}, {"head_dim": 0}, {"dropout": 1.0},
    ],
)  # fmt: skip
def test_unets_that_cannot_be_built_are_refused(wrong):
    with pytest.raises(TrainingError, match=f"{next(iter(wrong))}"):
        UNetShape(**wrong)


def test_a_nan_loss_stops_with_the_last_checkpoint_intact(tmp_path):
    network = tiny_network()
    run = training(tmp_path, network=network)
    records = run.run()
    assert [next(records).step for _ in range(3)] == [1, 2, 3]
    with torch.no_grad():
        network.backbone.module.body.weight[0] = float("nan")
    with pytest.raises(TrainingError, match=r"loss is nan.*step 4.*checkpoint of step 2 is intact"):
        next(records)
    saved = CheckpointStore(tmp_path / "checkpoints", 2).latest()
    assert saved.step == 2
    assert all(bool(value.isfinite().all()) for value in saved.weights.values())


def test_a_full_disk_stops_with_the_last_checkpoint_intact(tmp_path, monkeypatch):
    records = training(tmp_path).run()
    assert [next(records).step for _ in range(3)] == [1, 2, 3]
    real = os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"step-00000004.*No space left"):
        next(records)
    monkeypatch.setattr(os, "fsync", real)
    assert CheckpointStore(tmp_path / "checkpoints", 2).latest().step == 2
    assert not list((tmp_path / "checkpoints").glob("*.part"))


def test_two_processes_do_not_share_a_run(tmp_path):
    first = training(tmp_path).run()
    next(first)
    with pytest.raises(ValueError, match="in use by another process"):
        next(training(tmp_path).run())


def test_joint_training_moves_backbone_and_heads(tmp_path):
    network = tiny_network()
    tasks = new_heads(network, images().x_0(torch.arange(1)), ["sn", "npr"], kind="conv")
    before = weights(network)
    objective = JointObjective(network, tasks)
    config = TrainingConfig(steps=3, batch_size=4, learning_rate=1e-2, ema=0.0)
    list(Training(objective, Batches(images(), network.schedule, 4), config, tmp_path).run())
    assert not same(before, weights(network))
    assert all(bool((task.module.conv.weight != 0).any()) for task in tasks.values())


# the command, killed for real


def write_npz(path: Path) -> Path:
    np.savez(path, images=np.random.default_rng(0).integers(0, 256, (32, 8, 8, 1), dtype=np.uint8))
    return path


def command(data: Path, out: Path) -> list[str]:
    options = "--steps 8 --batch-size 4 --channels 8,8 --groups 4 --head-dim 8 --checkpoint-every 1 --warmup 2"
    return ["train", str(data), "--out", str(out), *options.split()]


def test_a_killed_training_ends_with_exactly_the_weights_of_an_uninterrupted_one(commands, tmp_path):
    """All three runs are processes of one kind with one thread each, as equal bytes need."""
    data = write_npz(tmp_path / "images.npz")
    fault = {"of": ["replace"], "at": 6, "how": "kill"}  # a checkpoint that is written and has no name yet
    assert commands.run(*command(data, tmp_path / "b"), cwd=tmp_path, fault=fault).code == -signal.SIGKILL
    assert list((tmp_path / "b" / "checkpoints").glob("step-0000000[3-6]*"))
    assert not (tmp_path / "b" / "unet").exists()
    for out in ("a", "b"):
        ended = commands.run(*command(data, tmp_path / out), cwd=tmp_path)
        assert ended.code == 0, ended.err
    name = "unet/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_missing_data_is_one_sentence_and_exit_code_2(commands, tmp_path):
    ended = commands.run(*command(tmp_path / "nothing", tmp_path / "run"), cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert "nothing" in ended.err
    assert "Traceback" not in ended.err
