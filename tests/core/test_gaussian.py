from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.distributions import kl_divergence as torch_kl

from optcov.gaussian import Diagonal, Full, Gaussian, Isotropic, kl_divergence, per_sample, ratio_excess

SHAPE = (3, 2, 2)  # 3 samples of 4 pixels
GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def positive_matrix() -> Tensor:
    root = randn(3, 4, 4)
    return root @ root.mT + 0.1 * torch.eye(4, dtype=torch.float64)


COVARIANCES = {
    "isotropic": Isotropic(torch.tensor(0.7, dtype=torch.float64)),
    "isotropic per sample": Isotropic(torch.tensor([0.7, 1.3, 0.1], dtype=torch.float64)),
    "diagonal": Diagonal(randn(*SHAPE).exp()),
    "full": Full(positive_matrix()),
}


def as_torch(gaussian: Gaussian) -> MultivariateNormal:
    """The same Gaussian by torch's own class."""
    if isinstance(gaussian.covariance, Full):
        matrix = gaussian.covariance.matrix
    else:
        matrix = torch.diag_embed(gaussian.variance.expand(SHAPE).flatten(1))
    return MultivariateNormal(gaussian.mean.flatten(1), matrix)


@pytest.mark.parametrize("name", COVARIANCES)
def test_density_and_entropy_are_exact(name):
    gaussian = Gaussian(randn(*SHAPE), COVARIANCES[name])
    x = randn(*SHAPE)
    torch.testing.assert_close(gaussian.log_prob(x), as_torch(gaussian).log_prob(x.flatten(1)), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gaussian.entropy(), as_torch(gaussian).entropy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("p_name", COVARIANCES)
@pytest.mark.parametrize("q_name", COVARIANCES)
def test_kl_is_exact_between_all_shapes(p_name, q_name):
    p, q = Gaussian(randn(*SHAPE), COVARIANCES[p_name]), Gaussian(randn(*SHAPE), COVARIANCES[q_name])
    torch.testing.assert_close(kl_divergence(p, q), torch_kl(as_torch(p), as_torch(q)), rtol=1e-10, atol=1e-10)


def test_kl_matches_the_reference_values(golden):
    for (mean_p, variance_p, mean_q, variance_q), expected in golden["kl_between_normal"]:
        p, q = (
            Gaussian(torch.tensor([[m]], dtype=torch.float64), Isotropic(torch.tensor(v, dtype=torch.float64)))
            for m, v in [(mean_p, variance_p), (mean_q, variance_q)]
        )
        assert float(kl_divergence(p, q)) == pytest.approx(expected, rel=1e-10, abs=1e-15)


@given(st.one_of(st.integers(1, 100).map(lambda ulps: ulps * 2.0**-23), st.floats(1e-7, 1e-1)))
def test_kl_of_nearly_equal_variances_keeps_its_digits_in_float32(excess):
    near = torch.tensor(1 + excess, dtype=torch.float32)
    exact = mpmath.mpf(float(near)) - 1 - mpmath.log(mpmath.mpf(float(near)))
    assert float(ratio_excess(near, torch.tensor(1.0))) == pytest.approx(float(exact), rel=1e-4)


@pytest.mark.parametrize("name", COVARIANCES)
def test_square_root_reproduces_the_covariance(name):
    covariance = COVARIANCES[name]
    basis = torch.eye(4, dtype=torch.float64).reshape(4, 1, 2, 2).expand(4, *SHAPE)
    columns = torch.stack([covariance.sqrt_apply(e).flatten(1) for e in basis], dim=-1)  # (3, 4, 4)
    expected = as_torch(Gaussian(torch.zeros(SHAPE, dtype=torch.float64), covariance)).covariance_matrix
    torch.testing.assert_close(columns @ columns.mT, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", COVARIANCES)
@pytest.mark.parametrize("factor", [torch.tensor(0.3), torch.tensor([0.3, 2.0, 0.0])])
def test_scaling_and_adding_act_on_every_sample(name, factor):
    factor = factor.double()
    mean = torch.zeros(SHAPE, dtype=torch.float64)
    before = COVARIANCES[name].diagonal(mean).expand(SHAPE)
    after = COVARIANCES[name].affine(factor, factor).diagonal(mean)
    column = factor.reshape(-1, 1, 1) if factor.ndim else factor
    torch.testing.assert_close(after.expand(SHAPE), column * before + column)


def test_clamping_counts_what_it_moves():
    variance = torch.tensor([[-1.0, 0.5], [3.0, -2.0]])
    covariance, counts = Diagonal(variance).clamped(1.0)
    assert covariance.diagonal(variance).tolist() == [[0.0, 0.5], [1.0, 0.0]]
    assert (int(counts.below), int(counts.above), counts.total) == (2, 1, 4)
    _, unbounded = Diagonal(variance).clamped(None)
    assert (int(unbounded.below), int(unbounded.above)) == (2, 0)


@pytest.mark.parametrize("make", [Isotropic, Diagonal])
def test_a_negative_variance_is_refused_where_one_draws(make):
    variance = torch.tensor([0.5, -1e-6, 0.0])
    covariance = make(variance if make is Isotropic else variance.reshape(3, 1))
    half, white = torch.tensor(0.5), torch.tensor(1e-9)
    for shape in (covariance, covariance.affine(half, white)):
        with pytest.raises(ValueError, match="variance has negative entries, so that nothing can be drawn; clamp"):
            Gaussian(torch.zeros(3, 1), shape).sample(torch.ones(3, 1))
    for shape in (covariance.clamped(None)[0], covariance.floored(0.0, torch.ones(3, 1))):
        drawn = Gaussian(torch.zeros(3, 1), shape.affine(half, white)).sample(torch.ones(3, 1))
        torch.testing.assert_close(drawn.square(), torch.tensor([[0.25 + 1e-9], [1e-9], [1e-9]]))


def test_a_draw_from_bounded_variances_does_not_look_at_them(monkeypatch):
    """Which would make a device wait at every step."""
    bounded, _ = Diagonal(torch.ones(3, 1)).clamped(1.0)
    monkeypatch.setattr(Tensor, "__bool__", lambda _: pytest.fail("looked at a value"))
    bounded.affine(torch.tensor(0.5), torch.tensor(1.0)).sqrt_apply(torch.ones(3, 1))


def test_an_indefinite_matrix_is_clamped_counted_and_sampled():
    matrix = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]], dtype=torch.float64)  # eigenvalues 3 and -1
    clamped, counts = Full(matrix).clamped(None)
    assert int(counts.below) == 1
    assert counts.total == 2
    torch.testing.assert_close(torch.linalg.eigvalsh(clamped.matrix), torch.tensor([[0.0, 3.0]], dtype=torch.float64))
    roots = torch.cat([Full(matrix).sqrt_apply(e[None]) for e in torch.eye(2, dtype=torch.float64)])
    torch.testing.assert_close(roots @ roots.T, clamped.matrix[0])


def test_rounding_is_not_counted_as_a_negative_eigenvalue():
    root = randn(100, 4, 2).float()
    _, counts = Full(root @ root.mT).clamped(None)
    assert int(counts.below) == 0


def test_a_bad_matrix_stays_bad_without_harming_its_neighbours():
    matrix = torch.eye(2).repeat(3, 1, 1)
    matrix[1, 0, 0] = torch.nan
    drawn = Full(matrix).sqrt_apply(torch.ones(3, 2))
    assert drawn.isnan().any(1).tolist() == [False, True, False]


def test_a_matrix_is_floored_by_its_symmetric_part_and_a_bad_one_stays_bad():
    turned = torch.tensor([[2.0, 1.0], [-1.0, 0.1]]).double()  # its symmetric part is diagonal
    floored = Full(torch.stack([turned, torch.full((2, 2), torch.nan).double()])).floored(0.5, randn(2, 2)).matrix
    torch.testing.assert_close(floored[0], torch.diag(torch.tensor([2.0, 0.5]).double()))
    assert bool(floored[1].isnan().all())


def test_shapes_that_do_not_fit_are_refused_rather_than_broadcast():
    gaussian = Gaussian(torch.zeros(3, 4), Isotropic(torch.tensor(1.0)))
    narrow = Gaussian(torch.zeros(3, 1), Isotropic(torch.tensor(1.0)))
    for ask in (
        lambda: gaussian.sample(torch.zeros(4)),
        lambda: gaussian.log_prob(torch.zeros(3, 1)),
        lambda: kl_divergence(narrow, gaussian),
        lambda: Gaussian(torch.zeros(3, 4), Diagonal(torch.ones(4))).sample(torch.zeros(3, 4)),
    ):
        with pytest.raises(ValueError, match="shape"):
            ask()


def test_the_upper_bound_of_a_full_covariance_holds_for_its_diagonal():
    clamped, counts = Full(4 * positive_matrix()).clamped(1.0)
    assert bool((clamped.matrix.diagonal(dim1=-2, dim2=-1) <= 1 + 1e-12).all())
    assert int(counts.above) > 0
    assert float(torch.linalg.eigvalsh(clamped.matrix).min()) >= 0


def test_zero_variance_draws_the_mean_and_has_no_density():
    gaussian = Gaussian(randn(*SHAPE), Isotropic(torch.zeros((), dtype=torch.float64)))
    assert torch.equal(gaussian.sample(randn(*SHAPE)), gaussian.mean)
    for ask in (
        gaussian.entropy,
        lambda: gaussian.log_prob(gaussian.mean),
        lambda: kl_divergence(gaussian, gaussian),
    ):
        with pytest.raises(ValueError, match=r"smallest variance 0\.0\); a step with zero covariance"):
            ask()


def test_entropy_of_one_pixel():
    gaussian = Gaussian(torch.zeros(1, 1), Isotropic(torch.tensor(1.0)))
    assert float(gaussian.entropy()) == pytest.approx(0.5 * math.log(2 * math.pi * math.e))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Isotropic(torch.zeros(2, 3)), "one number, or one per sample"),
        (lambda: Full(torch.zeros(2, 3)), r"shape \(B, d, d\)"),
        (lambda: Full(torch.zeros(1, 2, 3)), r"shape \(B, d, d\)"),
        (lambda: per_sample(torch.zeros(2), torch.zeros(3, 1)), "the batch has 3 samples"),
    ],
)
def test_bad_shapes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
