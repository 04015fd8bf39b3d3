from __future__ import annotations

import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, Schedule
from optcov.prediction import PARAMETERISATIONS, UNITS, Prediction, check_kind, output_of

SCHEDULES = {
    "linear": (Schedule.linear(), (1, 500, 1000)),
    "ve_sde": (Schedule.ve_sde(), (0.01, 0.5, 1.0)),
    "edm": (Schedule.edm(), (0.002, 1.0, 80.0)),
    "flow": (Schedule.flow(), (0.001, 0.5, 0.999)),
}


def points() -> torch.Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def predict(kind, schedule, t, x_0, eps) -> Prediction:
    signal, spread = schedule.levels(t)
    x_t = ForwardProcess(schedule).diffuse(x_0, t, eps)
    return Prediction(x_t, t, output_of(kind, x_0, eps, signal, spread), kind, signal, spread)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", PARAMETERISATIONS)
def test_every_parameterisation_gives_the_same_noise_and_clean_data(name, kind):
    x_0, eps = points()
    schedule, times = SCHEDULES[name]
    for t in (*times, torch.tensor([times[0], times[1], times[1], times[2]])):
        prediction = predict(kind, schedule, t, x_0, eps)
        # one of the two is divided by a small signal or little noise, and loses as many digits
        tolerance = 1e-12 * max(1.0, float(torch.exp(schedule.log_snr(t).abs() / 2).max()))
        torch.testing.assert_close(prediction.noise, eps, rtol=0, atol=tolerance)
        torch.testing.assert_close(prediction.clean, x_0, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["sample", "v_prediction", "flow_prediction"])
def test_predictions_are_finite_where_no_signal_is_left(kind):
    x_0, eps = points()
    prediction = predict(kind, Schedule.flow(), 1.0, x_0, eps)
    torch.testing.assert_close(prediction.clean, x_0, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(prediction.noise, eps, rtol=1e-12, atol=1e-12)


def test_predicted_noise_says_nothing_of_clean_data_where_no_signal_is_left():
    x_0, eps = points()
    with pytest.raises(ValueError, match="at time 1.0 no signal is left"):
        _ = predict("epsilon", Schedule.flow(), 1.0, x_0, eps).clean


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("unit", UNITS)
def test_a_variance_in_any_unit_is_the_same_variance_of_clean_data(name, unit):
    """At fixed x_t, x_0 moves by the square root of the factor when the unit's quantity moves by one."""
    x_0, eps = points()
    schedule, times = SCHEDULES[name]
    for t in times:
        here = predict("sample", schedule, t, x_0, eps)
        moved = Prediction(here.x_t, t, x_0 + 1, "sample", here.signal, here.spread)
        change = (moved.in_unit(unit) - here.in_unit(unit)).square()
        torch.testing.assert_close(here.factor(unit) * change, torch.ones_like(change), rtol=1e-5, atol=1e-7)


def test_velocity_units_stay_finite_where_no_signal_is_left():
    x_0, eps = points()
    prediction = predict("flow_prediction", Schedule.flow(), 1.0, x_0, eps)
    head = prediction.with_heads({"npr": torch.ones_like(x_0)}, {"npr": "velocity"})
    torch.testing.assert_close(head.head_in_clean_units("npr"), torch.ones_like(x_0))


def test_an_unknown_parameterisation_is_named():
    with pytest.raises(ValueError, match="unknown parameterisation 'score'; choose one of epsilon, sample"):
        check_kind("score")


def test_heads_must_have_the_shape_of_the_noise():
    with pytest.raises(ValueError, match=r"head 'npr' has shape \(2, 1\), .* must have \(2, 3\)"):
        NoisePrediction(torch.zeros(2, 3), {"npr": torch.zeros(2, 1)})
    with pytest.raises(ValueError, match=r"head 'sn_full' .* must have \(2, 4, 4\)"):
        NoisePrediction(torch.zeros(2, 2, 2), {"sn_full": torch.zeros(2, 2, 2)})
    full = NoisePrediction(torch.zeros(2, 2, 2), {"sn_full": torch.zeros(2, 4, 4)})
    assert full.head("sn_full").shape == (2, 4, 4)


def test_a_missing_head_is_refused_with_the_heads_there_are():
    prediction = NoisePrediction(torch.zeros(1, 1), {"sn": torch.zeros(1, 1), "range": torch.zeros(1, 1)})
    with pytest.raises(ValueError, match=r"needs the head 'npr', .* only these heads: range, sn; fit the head"):
        prediction.head("npr")
    with pytest.raises(ValueError, match="only these heads: none"):
        NoisePrediction(torch.zeros(1, 1)).head("npr")


def test_bad_samples_are_marked_in_noise_and_heads():
    noise, head = torch.zeros(4, 2), torch.zeros(4, 2)
    noise[1, 0], head[3, 1] = float("nan"), float("inf")
    prediction = Prediction.of(NoisePrediction(noise, {"sn": head}), noise, 5, *Schedule.linear().levels(5))
    assert prediction.bad_samples().tolist() == [False, True, False, True]


def test_a_condition_has_one_entry_per_image():
    from optcov.prediction import check_condition

    labels = torch.zeros(4, dtype=torch.long)
    assert check_condition({"class_labels": labels}, 4)["class_labels"] is labels
    for wrong, message in (
        (labels[:3], r"is shape \(3,\)"),
        ([0] * 4, "is a list"),
        (torch.tensor(1), r"is shape \(\)"),
    ):
        with pytest.raises(ValueError, match=f"condition 'class_labels' {message}.*each of 4 images"):
            check_condition({"class_labels": wrong}, 4)


def test_heads_are_fitted_in_units_of_order_one_and_say_which(tmp_path):
    """The mean target of a velocity head stays of order 1 where that of a noise head vanishes."""
    from optcov.fitting import Batches, new_heads
    from optcov.fitting.objectives import observe
    from optcov.networks import HeadedNetwork, build_head, head_config
    from tiny_training import images, tiny_network

    network = HeadedNetwork(tiny_network().backbone, Schedule.vp_sde(), parameterisation="v_prediction")
    tasks = new_heads(network, images().x_0(torch.arange(1)), ["npr", "sn"])
    assert {name: task.module.unit for name, task in tasks.items()} == {"npr": "velocity", "sn": "velocity"}
    assert build_head(head_config(tasks["npr"].module)).unit == "velocity"
    paper = new_heads(network, images().x_0(torch.arange(1)), ["npr"], "conv", "mse")
    assert paper["npr"].module.unit == "noise"
    batch = Batches(images(), network.schedule, 16)(1)
    noisiest = batch.times.argmax()
    example, _ = observe(network, ForwardProcess(network.schedule), batch)
    velocity, noise = (example.residual(unit).square().flatten(1).mean(1)[noisiest] for unit in ("velocity", "noise"))
    assert 0.05 < float(velocity) < 20
    ratio = network.schedule.alpha_bar(batch.times)[noisiest]
    assert float(noise) == pytest.approx(float(ratio * velocity), rel=1e-2)
