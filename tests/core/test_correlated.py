"""Spectral and correlated covariances on Gaussian data, where every moment is known; bounds against dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.distributions import kl_divergence as torch_kl

from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, cost_table, elbo, sample
from optcov.covariances import (
    CorrelatedResidual,
    CorrelatedSquaredNoise,
    Example,
    Residual,
    SpectralResidual,
    Spectrum,
)
from optcov.fitting.spectra import SpectrumMeter
from optcov.gaussian import Correlated, Spectral, cosine_matrix
from optcov.likelihood.cells import NodeSums
from optcov.likelihood.priced import default_covariances
from optcov.likelihood.profile import Nodes, Steps, column_costs, node_count
from optcov.likelihood.terms import observe, transition_cost
from optcov.oracle import GaussianMixture
from optcov.prediction import Prediction

d = 16
B = cosine_matrix(d)
SCHEDULE = Schedule.linear()
POWERS = 4.0 / (1 + torch.arange(d, dtype=torch.float64)).square()  # red, as images are
STATIONARY = GaussianMixture([1.0], [[0.1] * d], [(B.mT @ torch.diag(POWERS) @ B).tolist()])
_scale = torch.linspace(0.3, 1.5, d, dtype=torch.float64)
_correlation = torch.exp(-(torch.arange(d)[:, None] - torch.arange(d)).abs().double() / 3)
UNEVEN = GaussianMixture([1.0], [[0.0] * d], [(_scale[:, None] * _correlation * _scale).tolist()])
KINDS = {"spectral": SpectralResidual, "npr_correlated": CorrelatedResidual, "sn_correlated": CorrelatedSquaredNoise}


def exact_spectrum(data: GaussianMixture, name: str, t: float, schedule: Schedule = SCHEDULE) -> Tensor:
    """What the powers of residuals tend to, by the posterior's covariance in closed form."""
    x_t = torch.zeros(1, d, dtype=torch.float64)
    covariance = data.clean_moments(x_t, schedule, t).covariance[0]  # the same for all x_t
    if name == "spectral":
        alpha_bar, beta_bar = schedule.alpha_bar(t), schedule.beta_bar(t)
        return (B @ covariance @ B.mT).diagonal() * (alpha_bar + beta_bar) / beta_bar
    root = covariance.diagonal().sqrt()
    return (B @ (covariance / root[:, None] / root) @ B.mT).diagonal()


def process_of(data: GaussianMixture, name: str, eta: float = 1.0, schedule: Schedule = SCHEDULE) -> ReverseProcess:
    spectrum = Spectrum(lambda t: exact_spectrum(data, name, float(t), schedule))
    return ReverseProcess(data.network(schedule), ForwardProcess(schedule, eta), name, None, spectrum=spectrum)


def measured(data: GaussianMixture, name: str, t: float, count: int) -> Tensor:
    meter = SpectrumMeter((d,), {"npr": None, "sn": None})
    forward = ForwardProcess(SCHEDULE)
    x_0 = data.sample(count, seed=count)
    noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    x_t = forward.diffuse(x_0, t, noise)
    prediction = Prediction.of(data.network(SCHEDULE)(x_t, t), x_t, t, *forward.levels(t))
    example = Example(prediction, x_0, noise, torch.full((count,), t, dtype=torch.float64), forward)
    return meter.sums(example)[KINDS[name].spectrum][0] / count


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("t", [20, 400, 900])
def test_measured_spectra_reach_their_closed_form_as_data_grows(name, t):
    data = STATIONARY if name == "spectral" else UNEVEN
    exact = exact_spectrum(data, name, t)
    for count in (250, 4000):
        error = (measured(data, name, t, count) / exact - 1).abs()
        assert float(error.max()) < 4 * math.sqrt(2 / count)  # a power is a mean of squares of Gaussians


def test_the_spectral_posterior_of_stationary_data_is_the_exact_one():
    for t in (1, 300, 999):
        x_t = STATIONARY.sample(3, seed=1)
        found = process_of(STATIONARY, "spectral").posterior(x_t, t)
        exact = STATIONARY.clean_moments(x_t, SCHEDULE, t)
        torch.testing.assert_close(found.covariance.dense(x_t), exact.covariance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["npr_correlated", "sn_correlated"])
def test_single_pixels_of_a_correlated_step_have_the_variances_of_the_head(name):
    x_t = UNEVEN.sample(5)
    for t, s in ((900, 800), (400, 100), (50, 0)):
        correlated = process_of(UNEVEN, name).step(x_t, t, s)
        diagonal = ReverseProcess(UNEVEN.network(SCHEDULE), ForwardProcess(SCHEDULE), name.split("_")[0], None)
        torch.testing.assert_close(correlated.variance, diagonal.step(x_t, t, s).variance, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(correlated.mean, diagonal.step(x_t, t, s).mean)


@pytest.mark.parametrize("name", KINDS)
def test_the_bound_of_a_transition_equals_the_dense_divergence(name):
    process, x_0 = process_of(UNEVEN, name), UNEVEN.sample(4)
    noise = {
        t: torch.randn(4, d, generator=torch.Generator().manual_seed(t), dtype=torch.float64) for t in (300, 700, 1000)
    }
    terms = elbo(process, x_0, Trajectory([300, 700, 1000]), lambda t: noise[int(t)])
    for place, (t, s) in enumerate(((700, 300), (1000, 700))):
        x_t = process.forward.diffuse(x_0, t, noise[t])
        bridge, step = process.forward.bridge(t, s), process.step(x_t, t, s)
        assert isinstance(step.covariance, Spectral | Correlated)
        true = bridge.clean_weight * x_0 + bridge.noisy_weight * x_t
        p = MultivariateNormal(true, bridge.variance * torch.eye(d, dtype=torch.float64))
        q = MultivariateNormal(step.mean, step.covariance.dense(x_0))
        torch.testing.assert_close(terms.transitions[:, place], torch_kl(p, q), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "data"), [("npr_correlated", UNEVEN), ("spectral", STATIONARY)])
def test_correlations_make_the_bound_tighter_on_data_that_has_them(name, data):
    x_0, trajectory = data.sample(100), Trajectory.even(SCHEDULE, 10)
    diagonal = ReverseProcess(data.network(SCHEDULE), ForwardProcess(SCHEDULE), "npr", None)
    gain = elbo(diagonal, x_0, trajectory).bits_per_dim() - elbo(process_of(data, name), x_0, trajectory).bits_per_dim()
    assert float(gain.mean()) > 5 * float(gain.std()) / 10 > 0


@pytest.mark.parametrize("eta", [1.0, 0.0])
def test_samples_by_the_spectral_covariance_have_the_datas_covariance(eta):
    drawn = sample(process_of(STATIONARY, "spectral", eta), Trajectory.even(SCHEDULE, 4), (4000, d), last_step="draw")
    found = (drawn.double() - 0.1).mT @ (drawn.double() - 0.1) / len(drawn)
    exact = STATIONARY.covariances[0]
    error = ((exact.square() + exact.diagonal()[:, None] * exact.diagonal()) / len(drawn)).sqrt()
    assert float(((found - exact).abs() / error).max()) < 5.0


SPECTRA = {"residual": POWERS / POWERS.sum(), "npr": POWERS / POWERS.mean(), "sn": POWERS / POWERS.mean()}


@pytest.mark.parametrize(("eta", "data_range"), [(1.0, None), (1.0, (-1, 1)), (0.5, (-1, 1))])
def test_the_sweep_scores_them_as_the_bound_does(eta, data_range):
    """Also with a clipped x_0 beside raw noise (eta = 0.5 with a data range)."""
    x_0 = UNEVEN.sample(6).clamp(-1, 1)
    network, forward = UNEVEN.network(SCHEDULE, error=0.1), ForwardProcess(SCHEDULE, eta)
    base = ReverseProcess(network, forward, "npr", data_range)
    spectra = {name: Spectrum.of(power) for name, power in SPECTRA.items()}
    table = cost_table(base, x_0, list(KINDS), times=[1, 150, 500, 800, 1000], spectra=spectra, groups=2)
    trajectory = Trajectory([1, 500, 800, 1000])
    for name, kind in KINDS.items():
        process = ReverseProcess(network, forward, name, data_range, spectrum=SPECTRA[kind.spectrum])
        terms = elbo(process, x_0, trajectory)
        expected = torch.cat([terms.reconstruction[:, None], terms.transitions], 1).sum(0)
        torch.testing.assert_close(table.group_terms(name, trajectory).sum(1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["spectral", "npr_correlated"])
def test_costs_between_the_nodes_of_a_sweep_are_those_of_the_steps(name):
    forward = ForwardProcess(SCHEDULE, 0.5)
    process = ReverseProcess(UNEVEN.network(SCHEDULE, error=0.1), forward, name, spectrum=SPECTRA[KINDS[name].spectrum])
    x_0, group = UNEVEN.sample(5).clamp(-1, 1), torch.tensor([0, 1, 0, 1, 1])
    seen = observe(process, x_0, 900, UNEVEN.sample(5, seed=2))
    mean = process.bounds.clip(seen.prediction.clean)
    v = process.posterior_from(seen.prediction).covariance
    steps = Steps.between(forward, 900, torch.arange(1, 900, dtype=torch.float64))
    nodes = Nodes.covering(steps, node_count([steps]))
    assert not nodes.exact
    sums = NodeSums(nodes, 2, 3)
    sums.add(v, x_0 - mean, seen.prediction.clean - mean, group)
    found = column_costs(sums.profile(nodes).transpose(0, 1), nodes, steps).sum(0)
    for s in (1, 2, 40, 333, 898, 899):
        assert float(found[s - 1]) == pytest.approx(float(transition_cost(process, seen, s).sum()), rel=1e-7)


def test_a_sweep_prices_them_unasked_only_with_their_spectra():
    assert not set(KINDS) & set(default_covariances(["npr", "sn"], ForwardProcess(SCHEDULE)))
    given = {"residual": Spectrum.of(POWERS), "npr": Spectrum.of(POWERS)}
    found = set(default_covariances(["npr", "sn"], ForwardProcess(SCHEDULE), given))
    assert found & set(KINDS) == {"spectral", "npr_correlated"}


def test_what_bins_cannot_say_of_correlated_pixels_is_refused():
    process = ReverseProcess(UNEVEN.network(SCHEDULE), ForwardProcess(SCHEDULE), "spectral", spectrum=POWERS)
    x_0, trajectory = UNEVEN.sample(2).clamp(-1, 1), Trajectory.even(SCHEDULE, 3)
    with pytest.raises(ValueError, match='single pixels; score it with last_variance="paper"'):
        elbo(process, x_0, trajectory, last_variance="own")
    assert bool(elbo(process, x_0, trajectory).bits_per_dim().isfinite().all())
    table = cost_table(process, x_0, ["spectral"], times=[1, 500, 1000], spectra={"residual": Spectrum.of(POWERS)})
    with pytest.raises(ValueError, match="8-bit bins are single pixels"):
        table.costs("spectral", "own")


def test_unbounded_data_is_scored_by_the_density_of_the_covariance_itself():
    process, x_0 = process_of(STATIONARY, "spectral"), STATIONARY.sample(3)
    terms = elbo(process, x_0, Trajectory([400, 1000]), lambda t: torch.zeros(3, d).double(), last_variance="own")
    step = process.step(process.forward.diffuse(x_0, 400, torch.zeros(3, d).double()), 400, 0)
    dense = MultivariateNormal(step.mean, step.covariance.dense(x_0))
    torch.testing.assert_close(terms.reconstruction, -dense.log_prob(x_0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("spectrum", "message"),
    [
        (None, "needs powers per frequency: pass spectrum="),
        (3, "neither a Spectrum, nor a callable"),
        (torch.ones(5), "one power per frequency, as many as an image has pixels"),
        (torch.zeros(d), "not positive and finite; measure it again"),
        (lambda t: 1.0, "return a tensor of powers"),
        (lambda t: torch.ones(d, dtype=torch.complex64), "is torch.complex64; return a tensor of powers"),
        (lambda t, s: torch.ones(d), "a spectrum is a function of the time t alone"),
        ([["a"]], r"spectrum = \[\['a'\]\] is neither a Spectrum"),
        (torch.ones(40, 40) > 0, "^spectrum = .* is neither a Spectrum"),
    ],
)
def test_spectra_that_do_not_fit_are_refused(spectrum, message):
    def step() -> object:
        process = ReverseProcess(UNEVEN.network(SCHEDULE), ForwardProcess(SCHEDULE), "spectral", spectrum=spectrum)
        return process.step(UNEVEN.sample(2), 100, 50)

    with pytest.raises(ValueError, match=message):
        step()


def test_a_spectrum_is_a_function_with_a_basis():
    for wrong in (None, 3, torch.eye(40)):
        with pytest.raises(ValueError, match=r"^a spectrum is a function of the time t alone, not .*; pass one$"):
            Spectrum(wrong)
    with pytest.raises(ValueError, match=r"^basis = .* is not a Basis; pass optcov.gaussian.Basis"):
        Spectrum(lambda t: torch.ones(d), torch.eye(3))


def test_powers_may_be_a_list_or_an_array():
    x, powers = UNEVEN.sample(2), torch.arange(1.0, d + 1)
    expected, *others = (
        ReverseProcess(UNEVEN.network(SCHEDULE), ForwardProcess(SCHEDULE), "spectral", None, spectrum=given)
        for given in (powers, powers.tolist(), powers.numpy(), lambda t: powers.tolist())
    )
    for other in others:
        assert torch.equal(other.step(x, 100, 50).variance, expected.step(x, 100, 50).variance)


@pytest.mark.parametrize("name", KINDS)
def test_an_empty_batch_has_an_empty_step(name):
    spectrum = torch.ones(d)
    process = ReverseProcess(UNEVEN.network(SCHEDULE), ForwardProcess(SCHEDULE), name, None, spectrum=spectrum)
    nothing = UNEVEN.sample(2)[:0]
    step = process.step(nothing, 100, 50)
    assert step.sample(nothing).shape == (*step.log_prob(nothing).shape, d) == (0, d)


def test_a_spectrum_beside_another_covariance_is_refused():
    network, forward = UNEVEN.network(SCHEDULE), ForwardProcess(SCHEDULE)
    for covariance, said in (
        ("npr", 'spectrum belongs to spectral, npr_correlated, sn_correlated, not to "npr"; take "npr_correlated"'),
        (Residual(), 'not to "npr"; take "npr_correlated", or leave it out'),
        ("beta_tilde", 'not to "beta_tilde"; take one of them, or leave it out'),
        (SpectralResidual(torch.ones(d)), "an object that has its own; leave one of them out"),
    ):
        with pytest.raises(ValueError, match=said):
            ReverseProcess(network, forward, covariance, None, spectrum=torch.ones(d))


def test_times_may_differ_between_the_samples_of_a_batch():
    process = ReverseProcess(
        UNEVEN.network(SCHEDULE),
        ForwardProcess(SCHEDULE),
        "npr_correlated",
        None,
        spectrum=lambda t: (
            POWERS + torch.as_tensor(t).double().reshape(-1, 1) if torch.as_tensor(t).ndim else POWERS + t
        ),
    )
    x_t, t, s = UNEVEN.sample(2), torch.tensor([700, 200]), torch.tensor([300, 100])
    together = process.step(x_t, t, s)
    for i in range(2):
        alone = process.step(x_t[i : i + 1], int(t[i]), int(s[i]))
        torch.testing.assert_close(together.covariance.dense(x_t)[i : i + 1], alone.covariance.dense(x_t[:1]))
