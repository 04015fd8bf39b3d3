from __future__ import annotations

import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, Schedule
from optcov.prediction import to_noise


@pytest.mark.parametrize(
    ("schedule", "times"), [(Schedule.linear(), (1, 500, 1000)), (Schedule.ve_sde(), (0.01, 0.5, 1.0))]
)
def test_every_parameterisation_gives_the_same_noise(schedule, times):
    generator = torch.Generator().manual_seed(0)
    x_0, eps = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    for t in times:
        alpha_bar, beta_bar = schedule.alpha_bar(t), schedule.beta_bar(t)
        x_t = ForwardProcess(schedule).diffuse(x_0, t, eps)
        outputs = {
            "epsilon": eps,
            "sample": x_0,
            "v_prediction": alpha_bar.sqrt() * eps - beta_bar.sqrt() * x_0,
        }
        for name, output in outputs.items():
            torch.testing.assert_close(to_noise(output, x_t, alpha_bar, beta_bar, name), eps, rtol=1e-9, atol=1e-9)


def test_an_unknown_parameterisation_is_named():
    with pytest.raises(ValueError, match="unknown parameterisation 'score'; choose one of epsilon, sample"):
        to_noise(torch.zeros(1), torch.zeros(1), torch.ones(()), torch.ones(()), "score")


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
    assert NoisePrediction(noise, {"sn": head}).bad_samples().tolist() == [False, True, False, True]
