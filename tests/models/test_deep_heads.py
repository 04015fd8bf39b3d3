"""Heads with hidden layers: trained on the features that a fit keeps, and finished in closed form."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import optcov
import optcov.fitting.fit as fit_module
from close_outputs import assert_close_outputs
from optcov.fitting import Batches, TrainingError, calibrate, fit_closed_form, hidden, new_heads
from optcov.fitting.closed_form import log_estimate
from optcov.fitting.stage2 import FeatureStream
from optcov.networks import HeadedNetwork, build_head, fingerprint, head_config
from tiny_training import images, tiny_network


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(hidden, "STEPS", 300)


@functools.cache
def fitted(kind, names=("npr",)):
    """Of a small network; nobody may change it."""
    network = tiny_network()
    tasks = new_heads(network, images().x_0(torch.arange(1)), names, kind)
    fit = fit_closed_form(network, tasks, Batches(images(), network.schedule, 32), images=1280)
    return network, tasks, fit


@torch.no_grad()
def deviance(network, tasks):
    """On noises of their own, in nats a pixel."""
    others = Batches(images(), network.schedule, 32, seed=1)
    plain = new_heads(network, images().x_0(torch.arange(1)), tuple(tasks), "timed")
    total = 0.0
    for rows in FeatureStream(network, plain, others, 10)():
        head, regression = tasks["npr"].module, rows.regressions["npr"]
        inputs = rows.inputs if head.hidden is None else head.hidden(rows.inputs)
        log_g = log_estimate(head, rows, regression, head.mix(head.last(inputs), rows.log_snr))
        total += float(regression.deviance(log_g).mean()) / 10
    return total


def test_hidden_layers_predict_errors_that_a_linear_head_cannot():
    """The error of a wrong mean grows with the square of features."""
    plain, deep = (deviance(*fitted(kind)[:2]) for kind in ("timed", "deep"))
    assert deep < plain - 0.05


def test_deep_heads_are_calibrated_and_leave_the_network_as_it_is():
    before = fingerprint(tiny_network().backbone)
    network, _, fit = fitted("deep", ("npr", "sn"))
    assert fingerprint(network.backbone) == before
    headed = HeadedNetwork(network.backbone, network.schedule, fit.heads)
    found = calibrate(headed, images(), ["npr"], samples=1280, parts=5, batch_size=32, seed=0)["npr"]
    assert found.ratio.tolist() == pytest.approx([1.0] * 5, abs=0.05)
    first, second = (head.hidden.state_dict() for head in fit.heads.values())
    assert all(torch.equal(first[name], second[name]) for name in first)  # one body, that of both


def test_too_many_gradients_that_are_not_finite_are_named(monkeypatch):
    """2 % of 300 steps may be left out."""
    scales = itertools.chain([1.0], itertools.repeat(torch.inf))
    monkeypatch.setattr(hidden, "_deviance", lambda rows, heads, inputs: next(scales) * inputs.sum())
    with pytest.raises(TrainingError, match="gradients of 7 of 300 steps of the hidden layers were NaN or infinite"):
        fitted.__wrapped__("deep")


def test_a_deep_head_is_rebuilt_from_what_is_kept_of_it():
    _, _, fit = fitted("deep")
    head = fit.heads["npr"]
    again = build_head(head_config(head))
    again.load_state_dict(head.state_dict())
    features, levels = torch.randn(3, 8, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([-4.0, 0, 4])
    with torch.no_grad():
        assert_close_outputs(again(features, log_snr=levels), head(features, log_snr=levels))


def test_a_bundle_keeps_deep_heads(tmp_path):
    model = (tiny_network().backbone.module, optcov.Schedule.vp_sde(), "epsilon")
    quick = {"images": 64, "measure_images": 2, "times": 3, "calibration_samples": 0, "progress": False}
    made = optcov.fit(model, images().x_0(torch.arange(40)), kind="deep", layer="conv_out", **quick)
    assert all(head.hidden is not None for head in made.heads.values())
    assert made.provenance["heads"]["kind"] == "deep"
    both = optcov.fit(made, images().x_0(torch.arange(40)), heads=("range",), **quick)
    assert set(both.heads) == {"sn", "npr", "range"}
    earlier = both.provenance["earlier heads"]
    assert {name: how["kind"] for name, how in earlier.items()} == {"sn": "deep", "npr": "deep"}
    again = optcov.fit(both, images().x_0(torch.arange(40)), heads=("sn", "npr"), **quick)
    assert set(again.provenance["earlier heads"]) == {"range"}  # those that stay
    assert "hidden layers" in str(both)
    assert bool(made.sample(2, method="SN-DDPM", steps=3, progress=False).isfinite().all())


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (("npr", "range"), {}, "'range' has no hidden layers; fit it in a second call"),
        (("npr",), {"loss": "mse"}, 'deep heads are positive, so they need loss "gamma"'),
    ],
)
def test_what_deep_heads_cannot_do_is_said_before_any_work(names, options, said):
    with pytest.raises(TrainingError, match=said):
        new_heads(tiny_network(), images().x_0(torch.arange(1)), names, "deep", **options)


def test_a_fit_that_has_no_room_for_hidden_layers_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(fit_module, "CACHE_BYTES", 2**16)
    model = (tiny_network().backbone.module, optcov.Schedule.vp_sde(), "epsilon")
    with pytest.raises(TrainingError, match=r"there is room for those of \d+; use fewer images, or kind timed"):
        optcov.fit(model, images().x_0(torch.arange(40)), kind="deep", layer="conv_out")


def test_hidden_layers_need_the_features_of_whole_images():
    network = tiny_network()
    tasks = new_heads(network, images().x_0(torch.arange(1)), ("npr",), "deep")
    stream = FeatureStream(network, tasks, Batches(images(), network.schedule, 32), 2, cache_bytes=2**16)
    with pytest.raises(TrainingError, match=r"there is room for those of \d+; use fewer images, or kind timed"):
        next(stream())
