"""Covariances by frequencies: every operation against the dense matrix that they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.distributions import kl_divergence as torch_kl

from optcov.gaussian import (
    PLAIN,
    Basis,
    Correlated,
    Diagonal,
    Full,
    Gaussian,
    Isotropic,
    Spectral,
    cosine_matrix,
    kl_divergence,
)
from optcov.gaussian import basis as bases

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = {"image": (3, 1, 8, 8), "colour": (3, 4, 4, 4), "vector": (3, 64), "sequence": (3, 4, 16)}  # d = 64 each


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def basis_of(shape: tuple[int, ...]) -> Basis:
    channels = shape[1] if len(shape) > 2 else 1
    return Basis(None if channels == 1 else torch.linalg.qr(randn(channels, channels)).Q.contiguous())


def dense_basis(basis: Basis, shape: tuple[int, ...]) -> Tensor:
    """B as a matrix, built by Kronecker products of its factors."""
    sides = shape[1:] if len(shape) == 2 else shape[2:]
    matrix = torch.ones(1, 1, dtype=torch.float64) if basis.channels is None else basis.channels
    for n in sides:
        matrix = torch.kron(matrix, cosine_matrix(n))
    return matrix


def covariances(shape: tuple[int, ...]) -> dict[str, tuple[Spectral | Correlated, Tensor]]:
    """Shapes with their matrices, which are computed here by dense algebra alone."""
    basis, d = basis_of(shape), math.prod(shape[1:])
    B = dense_basis(basis, shape)
    power, variance = randn(*shape).exp(), randn(*shape).exp()
    one = power[:1] / power[:1].mean()
    middle = B.mT @ torch.diag_embed(power.flatten(1)) @ B
    common = B.mT @ torch.diag(one.flatten()) @ B
    root = (variance.flatten(1) / common.diagonal()).sqrt()
    assert middle.shape == (3, d, d)
    return {
        "spectral": (Spectral(power, basis), middle),
        "correlated": (Correlated(variance, one, basis), root.unsqueeze(-1) * common * root.unsqueeze(-2)),
    }


CASES = [(kind, name) for kind in SHAPES for name in ("spectral", "correlated")]
close = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_operation_equals_that_of_the_dense_matrix(kind, name):
    shape = SHAPES[kind]
    covariance, matrix = covariances(shape)[name]
    x, mean = randn(*shape), randn(*shape)
    dense = MultivariateNormal(mean.flatten(1), matrix)
    gaussian = Gaussian(mean, covariance)
    torch.testing.assert_close(covariance.dense(x), matrix, **close)
    torch.testing.assert_close(gaussian.log_prob(x), dense.log_prob(x.flatten(1)), **close)
    torch.testing.assert_close(gaussian.entropy(), dense.entropy(), **close)
    torch.testing.assert_close(gaussian.variance.flatten(1), matrix.diagonal(dim1=1, dim2=2), **close)
    product = (matrix @ x.flatten(1).unsqueeze(-1)).reshape(x.shape)
    torch.testing.assert_close(covariance.apply(x), product, **close)
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(covariance.inverse_diagonal(x).flatten(1), inverse.diagonal(dim1=1, dim2=2), **close)
    identity = torch.eye(64, dtype=torch.float64).reshape(64, 1, *shape[1:]).expand(64, *shape)
    root = torch.stack([covariance.sqrt_apply(column) for column in identity]).flatten(2).permute(1, 2, 0)
    torch.testing.assert_close(root @ root.mT, matrix, **close)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_kl_from_the_bridge_and_from_any_gaussian_is_exact(kind, name):
    shape = SHAPES[kind]
    covariance, matrix = covariances(shape)[name]
    q = Gaussian(randn(*shape), covariance)
    dense = MultivariateNormal(q.mean.flatten(1), matrix)
    for other in (Isotropic(torch.tensor(0.3, dtype=torch.float64)), Diagonal(randn(*shape).exp())):
        p = Gaussian(randn(*shape), other)
        exact = MultivariateNormal(p.mean.flatten(1), torch.diag_embed(p.variance.expand(shape).flatten(1)))
        torch.testing.assert_close(kl_divergence(p, q), torch_kl(exact, dense), **close)
        torch.testing.assert_close(kl_divergence(q, p), torch_kl(dense, exact), **close)


def test_kl_takes_no_matrix_where_one_side_or_both_are_diagonal_in_one_basis():
    """On more pixels than a matrix is made for."""
    shape = (2, 3, 64, 64)
    mean, power, other = randn(*shape), randn(*shape).exp(), randn(*shape).exp()
    p, q = (Gaussian(mean, Spectral(each)) for each in (power, other))
    ratio = (power / other).flatten(1)
    torch.testing.assert_close(kl_divergence(p, q), (ratio - 1 - ratio.log()).sum(1) / 2, **close)
    correlated, white = Gaussian(mean, Correlated(other, power[:1])), Gaussian(mean, Diagonal(power))
    found = kl_divergence(correlated, white)
    log_dets = power.log().flatten(1).sum(1) - correlated.covariance.log_det(mean)
    torch.testing.assert_close(found, ((other / power).flatten(1).sum(1) - 3 * 64 * 64 + log_dets) / 2, **close)
    with pytest.raises(ValueError, match="matrix over"):
        kl_divergence(correlated, q)


@pytest.mark.parametrize("name", ["diagonal", "spectral", "correlated"])
def test_a_draw_without_variance_has_a_finite_gradient(name):
    variance = torch.tensor([[0.0, 0.0, 4.0, 1.0]], dtype=torch.float64, requires_grad=True)
    covariance = {
        "diagonal": lambda: Diagonal(variance),
        "spectral": lambda: Spectral(variance),
        "correlated": lambda: Correlated(variance, torch.ones(1, 4, dtype=torch.float64)),
    }[name]()
    covariance.sqrt_apply(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert bool(variance.grad.isfinite().all())
    assert float(variance.grad[0, 2]) != 0


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_moments_of_draws_are_those_of_the_matrix(kind, name):
    shape = SHAPES[kind]
    covariance, matrix = covariances(shape)[name]
    n = 10_000
    one = Spectral(covariance.power[:1], covariance.basis) if name == "spectral" else None
    repeated = one or Correlated(covariance.variance[:1], covariance.spectrum, covariance.basis)
    draws = repeated.sqrt_apply(randn(n, *shape[1:])).flatten(1)
    found = draws.mT @ draws / n
    variance = matrix[0].diagonal()
    error = ((matrix[0].square() + variance[:, None] * variance) / n).sqrt()  # standard error of each entry
    assert float(((found - matrix[0]) / error).abs().max()) < 5.0  # of 2,080 entries: 5 standard errors
    assert float((draws.mean(0) / (variance / n).sqrt()).abs().max()) < 4.5


@pytest.mark.parametrize("kind", SHAPES)
def test_white_noise_is_added_exactly_where_the_form_allows_it(kind):
    shape = SHAPES[kind]
    shapes = covariances(shape)
    factor, variance = torch.tensor([0.5, 2.0, 1.0]).double(), torch.tensor([0.1, 0.0, 3.0]).double()
    x = randn(*shape)
    identity = torch.eye(64, dtype=torch.float64)
    spectral, matrix = shapes["spectral"]
    wanted = factor[:, None, None] * matrix + variance[:, None, None] * identity
    torch.testing.assert_close(spectral.affine(factor, variance).dense(x), wanted, **close)
    correlated, matrix = shapes["correlated"]
    zero = torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(correlated.affine(factor, zero).dense(x), factor[:, None, None] * matrix, **close)
    moved = correlated.affine(factor, variance)
    pixels = factor[:, None] * correlated.variance.flatten(1) + variance[:, None]
    torch.testing.assert_close(moved.dense(x).diagonal(dim1=1, dim2=2), pixels, **close)  # as a diagonal one has
    flat = Correlated(correlated.variance, torch.ones_like(correlated.spectrum), correlated.basis)
    torch.testing.assert_close(flat.affine(factor, variance).dense(x), torch.diag_embed(pixels), **close)


def test_the_fast_form_is_the_formula_of_its_documentation():
    variance, spectrum = randn(3, 1, 8, 8).exp(), randn(1, 1, 8, 8).exp()
    spectrum = spectrum / spectrum.mean()
    moved = Correlated(variance, spectrum).affine(
        torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)
    )
    total = 0.2 + 0.7 * variance
    a = (0.2 / total).flatten(1).mean(1)[:, None, None, None]
    torch.testing.assert_close(moved.variance, total, **close)
    torch.testing.assert_close(moved.spectrum, a + (1 - a) * spectrum, **close)


@pytest.mark.parametrize("n", [129, 130, 200])
def test_long_axes_are_transformed_by_the_fast_fourier_transform_to_the_same_numbers(n):
    x, matrix = randn(2, 3, n), cosine_matrix(n)
    torch.testing.assert_close(Basis().transform(x), x @ matrix.mT, **close)
    torch.testing.assert_close(Basis().inverse(x), x @ matrix, **close)
    torch.testing.assert_close(Basis().pixel_variances(x), x @ matrix.square(), **close)
    assert n > bases.LONGEST_MATRIX


def test_gradients_pass_through_draws_and_densities():
    variance = randn(2, 1, 4, 4).exp().requires_grad_()
    spectrum, noise, x = randn(1, 1, 4, 4).exp(), randn(2, 1, 4, 4), randn(2, 1, 4, 4)

    def loss(v: Tensor) -> Tensor:
        shape = Correlated(v, spectrum)
        return (Gaussian(shape.sqrt_apply(noise), shape).log_prob(x)).sum()

    assert torch.autograd.gradcheck(loss, (variance,))


def test_a_transform_in_inference_mode_leaves_later_gradients_alone():
    with torch.inference_mode():
        PLAIN.transform(randn(2, 1, 23, 19))  # sides that no other test has: their matrices are made here
    x = randn(2, 1, 23, 19).requires_grad_()
    PLAIN.transform(x).sum().backward()
    assert bool(x.grad.isfinite().all())


def test_bounds_act_on_the_variances_of_pixels():
    variance = torch.tensor([[-1.0, 0.5, 2.0, 3.0]]).double()
    bounded, counts = Correlated(variance, torch.ones(1, 4).double()).clamped(1.0)
    assert bounded.variance.tolist() == [[0.0, 0.5, 1.0, 1.0]]
    assert (int(counts.below), int(counts.above), counts.total) == (1, 2, 4)
    power = torch.tensor([[8.0, 1.0, 0.5, -1.0], [1.0, 1.0, 1.0, 1.0]]).double()
    bounded, counts = Spectral(power).clamped(1.0)
    assert float(bounded.power[0].mean()) == pytest.approx(1.0)
    assert bounded.power[1].tolist() == [1.0] * 4
    assert (int(counts.below), int(counts.above), counts.total) == (1, 4, 8)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="orthogonal"):
        Basis(torch.ones(2, 2))
    with pytest.raises(ValueError, match="does not fit data of shape"):
        Spectral(torch.ones(1, 3, 4, 4), Basis(torch.eye(2))).sqrt_apply(randn(2, 3, 4, 4))
    with pytest.raises(ValueError, match="does not fit a mean of shape"):
        Gaussian(torch.zeros(2, 1, 4, 4), Spectral(torch.ones(1, 1, 4, 5))).sample(randn(2, 1, 4, 4))
    with pytest.raises(ValueError, match="has shape"):
        Spectral(torch.ones(4))
    with pytest.raises(ValueError, match="per-sample coefficient"):
        Correlated(torch.ones(3, 4), torch.ones(1, 4)).affine(torch.ones(2), torch.ones(2))


def test_nothing_is_drawn_by_negative_powers():
    mean, z, ones = torch.zeros(2, 1, 4, 4), randn(2, 1, 4, 4).float(), torch.ones(1, 1, 4, 4)
    for covariance, name in (
        (Spectral(-ones), "power"),
        (Correlated(ones, -ones), "spectrum"),
        (Correlated(-ones, ones), "variance"),
    ):
        with pytest.raises(ValueError, match=f"{name} has negative entries, so that nothing can be drawn"):
            Gaussian(mean, covariance).sample(z)
    assert torch.equal(Gaussian(mean, Spectral(-ones).clamped(None)[0]).sample(z), mean)
    with pytest.raises(ValueError, match=r"spectrum has shape \(4, 4\), but variance has \(1, 1, 4, 4\); pass"):
        Correlated(ones, torch.ones(4, 4))


def test_an_empty_batch_is_drawn_and_scored():
    nothing = torch.zeros(0, 1, 4, 4)
    for covariance in (
        Spectral(torch.ones(1, 1, 4, 4)),
        Spectral(nothing),
        Correlated(nothing, torch.ones(1, 1, 4, 4)),
    ):
        found = Gaussian(nothing, covariance.clamped(1.0)[0].affine(torch.tensor(0.5), torch.tensor(0.1)))
        assert found.sample(nothing).shape == nothing.shape
        assert found.log_prob(nothing).shape == (0,)


def test_nothing_of_the_size_of_the_matrix_is_made_for_large_images():
    large = torch.ones(1, 3, 64, 64)
    with pytest.raises(ValueError, match="12,288 x 12,288 pixels is not made"):
        Spectral(large).dense(large)
    with pytest.raises(ValueError, match="is not made"):
        Diagonal(large).dense(large)
    covariance = Correlated(large, large).affine(torch.tensor(1.0), torch.tensor(0.5))
    assert covariance.log_det(large).shape == (1,)


def test_a_full_matrix_knows_the_diagonal_of_its_inverse():
    root = randn(3, 4, 4)
    matrix = root @ root.mT + torch.eye(4, dtype=torch.float64)
    found = Full(matrix).inverse_diagonal(randn(3, 2, 2))
    torch.testing.assert_close(found.flatten(1), torch.linalg.inv(matrix).diagonal(dim1=1, dim2=2), **close)
