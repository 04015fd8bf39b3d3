"""The head of optimal covariance matching: fitted on one probe per image, it approaches the exact diagonal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optcov import Schedule, fit, load, oracle
from optcov.covariances import Covariance, Example, Ocm
from optcov.fitting import Batches, TrainingError, fit_closed_form, new_heads, train_heads
from optcov.fitting.objectives import JointObjective, observe
from optcov.forward import ForwardProcess
from optcov.networks import Backbone, HeadedNetwork
from small_bundles import small_bundle, small_unet
from tiny_training import images, tiny_network

SCHEDULE = Schedule.vp_sde()
MIXTURE = oracle.GaussianMixture(
    [0.5, 0.5], [[-0.6, 0.1], [0.5, -0.2]], [[[0.05, 0.02], [0.02, 0.1]], [[0.2, -0.05], [-0.05, 0.1]]]
)


class Exact(nn.Module):
    """A perfect denoiser of the mixture, whose features are what its moments depend on."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(7, 2, bias=False)
        self.out.weight.data = torch.eye(2, 7)

    def forward(self, x, time):
        t = (time / 999).double()
        moments = MIXTURE.noise_moments(x, SCHEDULE, t)
        shares = MIXTURE.responsibilities(x, SCHEDULE, t)
        features = torch.cat([moments.mean, x.double(), shares, SCHEDULE.log_snr(t)[:, None] / 3], 1)
        return self.out(features.float())


class Points:
    def __init__(self, count: int, seed: int = 5):
        self.points = MIXTURE.sample(count, seed=seed).float()

    def __len__(self) -> int:
        return len(self.points)

    def x_0(self, index):
        return self.points[index]


def relative_error(head: str, loss: str, images: int) -> float:
    """Root mean square error of the variance in velocity units, relative to it, after a fit on so many points."""
    backbone = Backbone(Exact(), tap="out") if head == "ocm" else Backbone.of(Exact(), "out")
    network = HeadedNetwork(backbone, SCHEDULE).eval()
    tasks = new_heads(network, torch.zeros(1, 2), [head], loss=loss)
    tasks[head].module.unit = "velocity"
    done = fit_closed_form(network, tasks, Batches(Points(images), SCHEDULE, 512), images, loss)
    fitted = HeadedNetwork(network.backbone, SCHEDULE, done.heads).eval()
    test = Batches(Points(4096, seed=6), SCHEDULE, 4096, seed=9)(1)
    x_t = ForwardProcess(SCHEDULE).diffuse(test.x_0, test.times, test.noise)
    with torch.no_grad():
        prediction = fitted(x_t, test.times)
    exact = MIXTURE.velocity_moments(x_t, SCHEDULE, test.times).covariance.diagonal(dim1=-2, dim2=-1)
    found = Covariance.registry[head]().second_moment(prediction).variance.double()
    found = found / prediction.factor("velocity").reshape(-1, 1)
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


CASES = [("ocm", "gamma", 0.1), ("ocm", "mse", 0.1), ("npr", "gamma", 0.17), ("sn", "gamma", 0.17)]


@pytest.mark.parametrize(("head", "loss", "bound"), CASES)
def test_a_head_approaches_the_exact_diagonal_as_data_grows(head, loss, bound):
    """A head of three knots in time cannot be exact: with 65,536 points NPR and SN are at 0.11."""
    few, many = relative_error(head, loss, 512), relative_error(head, loss, 16_384)
    assert many < bound
    assert many < few / 2


def test_a_probe_has_the_variance_of_x_0_on_average():
    network = HeadedNetwork(Backbone(Exact(), tap="out"), SCHEDULE).eval()
    batch = Batches(Points(20_000), SCHEDULE, 20_000)(1)
    example, output = observe(network, ForwardProcess(SCHEDULE), batch, probe=True)
    assert not output.features.requires_grad
    assert not example.prediction.output.requires_grad
    target = Ocm.regression(example, "velocity").target.double()
    moments = MIXTURE.velocity_moments(example.prediction.x_t, SCHEDULE, batch.times)
    exact = moments.covariance.diagonal(dim1=-2, dim2=-1)
    error = (target - exact).mean(0) / ((target - exact).var(0) / len(target)).sqrt()
    assert float(error.abs().max()) < 4


def test_an_example_without_a_probe_is_refused():
    network = tiny_network()
    example, _ = observe(network, ForwardProcess(network.schedule), Batches(images(), network.schedule, 4)(1))
    assert isinstance(example, Example)
    with pytest.raises(ValueError, match="fitted on probes of the Jacobian, but this example has none"):
        Ocm.regression(example, "noise")


def test_a_fit_of_all_heads_makes_a_bundle_that_draws_and_scores(tmp_path):
    model = (small_unet(), Schedule.linear(), "epsilon")
    pixels = images(64).x_0(torch.arange(64))
    quick = {"images": 32, "measure_images": 2, "times": 3, "calibration_samples": 128, "progress": False}
    bundle = fit(model, pixels, heads=("sn", "npr", "ocm"), **quick)
    assert set(bundle.heads) == {"sn", "npr", "ocm"}
    assert set(bundle.provenance["calibration"]) == {"sn", "npr", "ocm"}
    bundle.save(tmp_path / "b")
    bundle = load(tmp_path / "b")
    for method in ("OCM-DDPM", "OCM-DDIM"):
        assert bool(bundle.sample(2, method=method, steps=3, progress=False).isfinite().all())
    score = bundle.bits_per_dim(pixels[:2], steps=3, methods=["OCM-DDPM"], progress=False)
    assert score.of("ocm", 3).mean > 0


def test_heads_are_sn_and_npr_unless_told():
    import inspect

    assert inspect.signature(fit).parameters["heads"].default == ("sn", "npr")


def test_a_bundle_without_the_head_draws_by_probes_when_asked():
    bundle = small_bundle(Schedule.linear())
    with pytest.raises(ValueError, match="has no head 'ocm'"):
        bundle.sample(2, method="OCM-DDPM", steps=3, progress=False)
    drawn = bundle.sample(3, method="OCM-DDPM", steps=3, ocm_probes=2, progress=False)
    apart = bundle.sample(3, method="OCM-DDPM", steps=3, ocm_probes=2, batch_size=1, progress=False)
    torch.testing.assert_close(drawn, apart, rtol=0, atol=1e-4)
    assert bool(drawn.isfinite().all())
    process = bundle.reverse_process("OCM-DDIM", ocm_probes=2)
    assert process.posterior(torch.zeros(1, 1, 8, 8), 500).variance.shape == (1, 1, 8, 8)
    with pytest.raises(ValueError, match="ocm_probes belongs to"):
        bundle.sample(2, method="NPR-DDPM", steps=3, ocm_probes=2, progress=False)


def test_probes_are_not_trained_together_with_the_mean():
    network = tiny_network()
    tasks = new_heads(network, images().x_0(torch.arange(1)), ["ocm"], "conv")
    with pytest.raises(TrainingError, match="need a network that is trained already"):
        JointObjective(network, tasks)


def test_residual_heads_learn_from_probes_by_gradient_descent(tmp_path):
    from optcov.fitting import TrainingConfig

    network = tiny_network()
    tasks = new_heads(network, images().x_0(torch.arange(1)), ["ocm", "npr"], "residual")
    config = TrainingConfig(steps=3, batch_size=8, learning_rate=1e-3, checkpoint_every=10)
    records = list(train_heads(network, tasks, Batches(images(), network.schedule, 8), config, tmp_path))
    assert len(records) == 3
    assert any(bool((p != 0).any()) for p in tasks["ocm"].module.last.parameters())
