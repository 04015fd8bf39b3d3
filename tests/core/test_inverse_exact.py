"""On a Gaussian prior `restore` is exact: its samples have the mean and covariance of the closed form.

The level: with the exact covariance each statistic below would be exceeded by chance in less than one run of 10,000.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from optcov import ForwardProcess, ReverseProcess, Schedule, oracle
from optcov.inverse import Average, Blur, Identity, Linear, Mask, Operator, Restoration, restore
from optcov.inverse.scores import coverage

IMAGE = (1, 4, 4)
D = 16
COUNT = 800
LEVEL = 1e-4


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ROOT = random_matrix(D, D, 1)
COVARIANCE = ROOT @ ROOT.T / D + 0.2 * torch.eye(D, dtype=torch.float64)
MEAN = random_matrix(1, D, 2)[0]
PRIOR = oracle.GaussianMixture([1.0], MEAN[None], COVARIANCE[None])
SCHEDULE = Schedule.linear()
MAP = random_matrix(5, D, 3)
KERNEL = torch.tensor([[0.0, 0.1, 0.0], [0.2, 0.6, 0.1], [0.0, 0.0, 0.1]])

OPERATORS: dict[str, Operator] = {
    "identity": Identity(IMAGE),
    "box": Mask.box(IMAGE, 1, 0, 2, 3),
    "random mask": Mask.random(IMAGE, 0.5),
    "average": Average(IMAGE, 2),
    "periodic blur": Blur(IMAGE, KERNEL, "periodic"),
    "blur with zeros outside": Blur(IMAGE, KERNEL, "zero"),
    "separable blur": Blur(IMAGE, torch.tensor([0.2, 0.6, 0.2]), "periodic"),
    "separable blur with zeros outside": Blur(IMAGE, torch.tensor([0.2, 0.6, 0.2]), "zero"),
    "any linear map": Linear(
        lambda x: x.flatten(1) @ MAP.to(x).T, lambda y: (y @ MAP.to(y)).reshape(-1, *IMAGE), IMAGE
    ),
    "average of a blur": Average(IMAGE, 2) @ Blur(IMAGE, KERNEL),
    "any linear map of a blur": Linear(
        lambda x: x.flatten(1) @ MAP.to(x).T, lambda y: (y @ MAP.to(y)).reshape(-1, *IMAGE), IMAGE
    )
    @ Blur(IMAGE, KERNEL),
    "mask of averages": Mask(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), (1, 2, 2)) @ Average(IMAGE, 2),
}


def process(covariance: str = "npr_full", eta: float = 1.0) -> ReverseProcess:
    return ReverseProcess(PRIOR.network(SCHEDULE), ForwardProcess(SCHEDULE, eta), covariance, data_range=None)


def matrix_of(operator: Operator) -> Tensor:
    """A, (m, d)."""
    return operator.apply(torch.eye(D, dtype=torch.float64).reshape(D, *IMAGE)).flatten(1).T


def measure(operator: Operator, noise_std: float) -> Tensor:
    seen = operator.apply(PRIOR.sample(1, seed=7).reshape(1, *IMAGE))[0]
    noise = torch.randn(seen.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return seen + noise_std * noise * operator.seen


def closed_form(A: Tensor, y: Tensor, noise_std: float) -> tuple[Tensor, Tensor]:
    inner = A @ COVARIANCE @ A.T + noise_std**2 * torch.eye(len(A), dtype=torch.float64)
    gain = COVARIANCE @ A.T @ torch.linalg.pinv(inner, hermitian=True, rtol=1e-12)
    return MEAN + gain @ (y.flatten() - A @ MEAN), COVARIANCE - gain @ A @ COVARIANCE


def draw(operator: Operator, noise_std: float, **options: object) -> tuple[Restoration, Tensor]:
    y = measure(operator, noise_std)
    prior = options.pop("prior", process())
    settings: dict[str, object] = {"steps": 3, "samples": COUNT, "batch_size": COUNT, "tolerance": 1e-9, **options}
    return restore(prior, y, operator, noise_std, **settings), y  # type: ignore[arg-type]


def assert_exact(found: Restoration, y: Tensor, noise_std: float) -> None:
    """In coordinates in which the closed form is a standard normal, samples are draws of it."""
    mean, covariance = closed_form(matrix_of(found.operator), y, noise_std)
    values, vectors = torch.linalg.eigh(covariance)
    centred = (found.samples.flatten(1) - mean) @ vectors
    known = values < 1e-9  # what the measurement fixes
    assert bool((centred[:, known].abs() < 1e-4).all())
    z = centred[:, ~known] / values[~known].sqrt()
    n, k = z.shape
    if not k:
        return
    assert float(n * z.mean(0).square().sum()) < chi2.ppf(1 - LEVEL, k)
    low, high = (chi2.ppf(tail, n * k) for tail in (LEVEL / 2, 1 - LEVEL / 2))
    assert low < float(z.square().sum()) < high  # 2.5 % of the variances, at k = 16
    identity = torch.eye(k, dtype=z.dtype)
    assert float(((z.T @ z / n - identity) * (n / (1 + identity)).sqrt()).abs().amax()) < 5.2


@pytest.mark.parametrize("noise_std", [0.0, 0.3])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_samples_of_a_gaussian_prior_have_the_exact_moments(operator: Operator, noise_std: float):
    found, y = draw(operator, noise_std)
    assert_exact(found, y, noise_std)
    assert found.unsolved == 0
    if noise_std == 0:
        assert float(found.residual.max()) < 1e-5


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_every_forward_process_is_exact(eta: float):
    found, y = draw(OPERATORS["any linear map"], 0.3, prior=process(eta=eta))
    assert_exact(found, y, 0.3)


@pytest.mark.parametrize("noise_std", [0.0, 0.3])
@pytest.mark.parametrize("name", ["box", "average", "periodic blur", "any linear map of a blur"])
def test_the_gradient_through_the_network_is_exact_too(name: str, noise_std: float):
    found, y = draw(OPERATORS[name], noise_std, way="guidance")
    assert_exact(found, y, noise_std)
    assert (found.evaluations, found.gradients) == (3, 3)


def test_sn_full_is_exact_as_well():
    found, y = draw(OPERATORS["box"], 0.3, prior=process("sn_full"))
    assert_exact(found, y, 0.3)


def test_a_wrong_covariance_is_noticed():
    """The test of exactness can fail: the diagonal of the covariance is not enough."""
    found, y = draw(OPERATORS["box"], 0.3, method="npr")
    with pytest.raises(AssertionError):
        assert_exact(found, y, 0.3)


ON_A_MIXTURE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "restoration_mixture.py"))
MIXTURE, A, OPERATOR, NOISE_STD, posterior, wasserstein = (
    ON_A_MIXTURE[name] for name in ("MIXTURE", "A", "OPERATOR", "NOISE_STD", "posterior", "wasserstein")
)


def on_a_mixture() -> ReverseProcess:
    prior: ReverseProcess = ON_A_MIXTURE["process"]("npr_full")
    return prior


def test_coverage_on_a_mixture_is_within_three_points_of_90_percent():
    """40 steps of the exact covariance: Gaussian steps for a posterior that is none."""
    count = 300
    truth = MIXTURE.sample(count, seed=3)
    noise = torch.randn(count, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    y = truth @ A.T + NOISE_STD * noise
    found = restore(on_a_mixture(), y, OPERATOR, NOISE_STD, steps=40, samples=19, batch_size=count * 19)
    # 600 answers of 300 points: one standard error is 1.2 to 1.7 points
    assert abs(float(coverage(found.samples, truth, 0.9).mean()) - 0.9) < 0.03
    assert abs(float(coverage(found.samples, truth, 0.5).mean()) - 0.5) < 0.05


def test_without_gradients_the_full_covariance_is_nearer_to_the_exact_posterior_than_its_diagonal():
    y, count = torch.tensor([-1.0], dtype=torch.float64), 200
    exact, others = (posterior(y).sample(count, seed=seed) for seed in (1, 2))
    by_chance = wasserstein(exact, others)

    def distance(method: str) -> float:
        options = {"steps": 20, "samples": count, "way": "proximal"}
        return float(
            wasserstein(restore(on_a_mixture(), y, OPERATOR, NOISE_STD, method=method, **options).samples, exact)
        )

    assert distance("npr_full") < 1.6 * by_chance  # a Gaussian posterior of x_0 is not exact here, so not 1
    assert distance("npr") > 1.4 * distance("npr_full")
