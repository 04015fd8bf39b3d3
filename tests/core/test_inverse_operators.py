"""Linear operators: adjoints, what they know of themselves, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from optcov.gaussian import Diagonal, Full
from optcov.gaussian.correlated import Correlated, Spectral
from optcov.inverse import Average, Blur, Identity, Linear, Mask, Operator
from optcov.inverse.conditioning import StoppingRule, System, conjugate_gradients

IMAGE = (2, 6, 6)
KERNEL = torch.tensor([[0.1, 0.0, 0.2], [0.0, 0.5, 0.1], [0.05, 0.05, 0.0]])
OPERATORS: dict[str, Operator] = {
    "identity": Identity(IMAGE),
    "box": Mask.box(IMAGE, 2, 1, 3, 4),
    "random": Mask.random(IMAGE, 0.6, seed=3),
    "average": Average(IMAGE, 3),
    "periodic": Blur(IMAGE, KERNEL),
    "zero": Blur(IMAGE, KERNEL, "zero"),
    "separable": Blur.gaussian(IMAGE, 1.0, 5, "zero"),
    "linear of a blur": Linear(lambda x: x[..., 0], lambda y: pad(y.unsqueeze(-1), (0, 5)), IMAGE)
    @ Blur.gaussian(IMAGE, 0.8),
    "composition": Average(IMAGE, 2) @ Blur.gaussian(IMAGE, 0.8) @ Mask.box(IMAGE, 0, 0, 2, 2),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(operator: Operator) -> Tensor:
    size = torch.Size(operator.shape).numel()
    return operator.apply(torch.eye(size, dtype=torch.float64).reshape(size, *operator.shape)).flatten(1).T


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_adjoints_are_transposed_maps(operator: Operator):
    x, y = noise(3, *operator.shape), noise(3, *operator.measurement_shape, seed=1)
    left, right = (operator.apply(x) * y).sum(), (x * operator.adjoint(y)).sum()
    assert float((left - right).abs()) < 1e-10 * float(x.norm() * y.norm())


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_a_diagonal_that_is_claimed_is_the_whole_matrix(operator: Operator):
    variance = noise(1, *operator.shape).square()
    A = dense(operator)
    matrix = A @ torch.diag(variance.flatten()) @ A.T
    claimed = operator.diagonal(variance)
    is_diagonal = float((matrix - torch.diag(matrix.diagonal())).abs().max()) < 1e-12
    assert (claimed is not None) == is_diagonal
    if claimed is not None:
        assert torch.allclose(claimed.flatten(), matrix.diagonal())


def test_a_separable_blur_is_the_blur_by_the_outer_product():
    weights = torch.tensor([0.25, 0.5, 0.25])
    x = noise(2, *IMAGE)
    for border in ("periodic", "zero"):
        whole = Blur(IMAGE, torch.outer(weights, weights), border)
        assert torch.allclose(Blur(IMAGE, weights, border).apply(x), whole.apply(x))


def test_a_periodic_blur_is_a_convolution():
    x = noise(1, *IMAGE)
    expected = sum(KERNEL.double()[i, j] * x.roll((i - 1, j - 1), (-2, -1)) for i in range(3) for j in range(3))
    assert torch.allclose(Blur(IMAGE, KERNEL).apply(x), torch.as_tensor(expected))


@pytest.mark.parametrize("noise_std", [0.0, 0.2])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_systems_are_solved_for_diagonal_and_full_covariances(operator: Operator, noise_std: float):
    A, root = dense(operator), noise(72, 72, seed=4) / 8
    matrix = root @ root.T + 0.3 * torch.eye(72, dtype=torch.float64)
    mean, like = noise(1, *IMAGE, seed=5), noise(1, *IMAGE, seed=6)
    y = operator.apply(like)
    for covariance, v in (
        (Diagonal(matrix.diagonal().reshape(1, *IMAGE)), torch.diag(matrix.diagonal())),
        (Full(matrix[None]), matrix),
    ):
        system = System(operator, covariance, noise_std, mean, StoppingRule(1e-10, 500))
        inner = A @ v @ A.T + noise_std**2 * torch.eye(len(A), dtype=torch.float64)
        gain = v @ A.T @ torch.linalg.pinv(inner, hermitian=True, rtol=1e-13)
        expected = mean.flatten() + gain @ (y.flatten() - A @ mean.flatten())
        assert torch.allclose(system.conditioned_mean(mean, y).flatten(), expected, atol=1e-5)
        assert system.unsolved == 0


@pytest.mark.parametrize("name", ["box", "random", "average"])
def test_correlated_pixels_take_few_iterations(name: str):
    """A spectrum as at the noisiest times of CIFAR-10; by the diagonal alone it takes 150 to 400 iterations."""
    shape = (1, 16, 16)
    operator = {"box": Mask.box(shape, 4, 4, 8, 8), "random": Mask.random(shape, 0.5), "average": Average(shape, 2)}[
        name
    ]
    rows = torch.arange(16.0)
    spectrum = 700 / (1 + rows[:, None].square() + rows.square()).pow(2)[None, None]
    variance = 0.1 + 0.1 * torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    for covariance in (Correlated(variance, spectrum), Spectral(spectrum / 50)):
        system = System(operator, covariance, 0.05, variance, StoppingRule(1e-4, 60))
        right = operator.apply(noise(3, *shape, seed=1).float())
        solution = system.solve(right)
        assert system.unsolved == 0
        assert float((system.apply(solution) - right).norm()) < 2e-4 * float(right.norm())


def test_conjugate_gradients_say_if_they_do_not_converge():
    operator = Blur.gaussian(IMAGE, 1.5)
    system = System(operator, Diagonal(noise(2, *IMAGE).square()), 0.01, noise(2, *IMAGE), StoppingRule(1e-10, 3))
    system.solve(noise(2, *IMAGE, seed=2))
    assert system.unsolved == 2


def test_a_sample_is_solved_alike_in_every_batch():
    matrix = torch.diag_embed(torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01)
    right = noise(3, 8)

    def solve(rows: slice) -> Tensor:
        return conjugate_gradients(
            lambda x: (matrix[rows] @ x.unsqueeze(-1)).squeeze(-1), right[rows], lambda r: r, StoppingRule(1e-2, 50)
        )[0]

    assert torch.allclose(solve(slice(0, 3))[1:2], solve(slice(1, 2)), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Linear(lambda x: 2 * x, lambda y: 3 * y, (5,)), "adjoint is not the adjoint of apply"),
        (lambda: Linear(lambda x: x[:, :3], lambda y: y, (5,)), "adjoint returned"),
        (lambda: Linear(lambda x: x + 1, lambda y: y, (5,)), "apply is not linear"),
        (lambda: Linear(lambda x: x.sum(), lambda y: y, (5,)), "apply returned"),
        (lambda: Mask(torch.ones(5, 5), IMAGE), "a mask of shape \\(5, 5\\) does not fit"),
        (lambda: Mask(torch.zeros(6, 6), IMAGE), "hides every pixel"),
        (lambda: Mask(torch.full((6, 6), 0.5), IMAGE), "zeros \\(hidden\\) and ones"),
        (lambda: Mask.box(IMAGE, 4, 4, 4, 4), "does not lie inside"),
        (lambda: Mask.random(IMAGE, 1.5), "not a share"),
        (lambda: Average(IMAGE, 4), "does not divide"),
        (lambda: Blur(IMAGE, torch.ones(2, 2)), "odd sides"),
        (lambda: Blur(IMAGE, torch.ones(7, 7)), "larger than"),
        (lambda: Blur(IMAGE, KERNEL, "mirror"), "not one of periodic, zero"),
        (lambda: Blur(IMAGE, torch.tensor([float("nan")])), "not all 0"),
        (lambda: Blur.gaussian(IMAGE, -1), "not a positive"),
        (lambda: Average(IMAGE, 2) @ Average(IMAGE, 2), "takes images of shape"),
        (lambda: Identity(()), "no axis"),
        (lambda: Mask.box(IMAGE, "a", 0, 2, 2), "top = 'a' is not a whole number"),
        (lambda: Mask.random(IMAGE, None), "hidden = None is not a number"),
        (lambda: Mask.random(IMAGE, 0.5, seed="a"), "seed = 'a'"),
        (lambda: Blur.gaussian(IMAGE, None), "std = None is not a number"),
        (lambda: Blur.gaussian(IMAGE, float("inf")), "not a positive"),
        (lambda: Linear(lambda x: x @ torch.ones(3, 3), lambda y: y, (5,)), "apply failed on a batch"),
        (lambda: Linear(lambda x: x[:, :3], lambda y: y @ torch.ones(7, 7), (5,)), "adjoint failed on a batch"),
        (lambda: Linear(lambda x: {}["a"], lambda y: y, (5,)), "apply failed on a batch .*'a'"),
        (
            lambda: Linear(lambda x: x.reshape(2, 5), lambda y: y.reshape(2, 5), (5,)),
            r"apply failed on a batch \(3, 5\)",
        ),
        (lambda: Linear(lambda x: x - x.mean(0), lambda y: y - y.mean(0), (5,)), "apply is not linear"),
        (lambda: Blur.gaussian(IMAGE, 1.0, 10**9 + 1), "size = 1000000001 is not an odd .* from 1 to 5"),
        (lambda: Blur(IMAGE, torch.full((3, 3), 1e30)), "numbers up to 1e\\+06"),
        (lambda: Blur(IMAGE, [1.0]), "got a list; convert it"),
        (lambda: Linear(lambda x: 0 * x, lambda y: 0 * y, (5,)), "nothing but 0"),
        (lambda: Linear(lambda x: x[:, :0], lambda y: torch.zeros(len(y), 5), (5,)), "nothing but 0"),
        (lambda: Linear(lambda x: x.mul_(2), lambda y: 2 * y, (5,)), "apply changes the batch that it is given"),
        (lambda: Linear(lambda x: x > 0, lambda y: y, (5,)), "apply returned torch.bool .* dense tensor of real"),
        (lambda: Linear(torch.fft.fft, lambda y: torch.fft.ifft(y).real, (5,)), "apply returned torch.complex64"),
        (lambda: Linear(lambda x: x.to("meta"), lambda y: y, (5,)), "apply returned a tensor without values"),
        (lambda: Linear(lambda x: x / 0, lambda y: y, (5,)), "apply gives NaN or infinity"),
        (lambda: Linear(lambda x: x, lambda y: y * float("nan"), (5,)), "adjoint gives NaN or infinity"),
        (lambda: Linear(lambda x: x, lambda y: y, (5,), 3), "name = 3 is not a text"),
        (lambda: Mask(torch.eye(6).to_sparse(), IMAGE), "mask is a sparse tensor, not a dense"),
        (lambda: Mask(torch.ones(6, 6, device="meta"), IMAGE), "mask is a tensor without values"),
        (lambda: Blur(IMAGE, torch.eye(3).to_sparse()), "got a sparse tensor"),
        (lambda: Blur(IMAGE, torch.ones(3, device="meta")), "got a tensor without values"),
        (lambda: Blur.gaussian((1, 4, 8), 1.0, 5), "size = 5 is not an odd number of pixels; pass one from 1 to 3"),
        (lambda: Average(IMAGE, "2"), "factor = '2' does not divide"),
    ],
)
def test_what_is_no_operator_is_refused_in_a_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_map_by_a_matrix_in_single_precision_is_checked_without_noise():
    matrix = torch.ones(5, 2) / 2
    linear = Linear(lambda x: x @ matrix, lambda y: y @ matrix.T, (5,))
    assert linear.outside_range(torch.tensor([[1.0, 1.0], [1.0, -1.0]])).tolist() == pytest.approx([0, 1], abs=1e-4)


def test_a_measurement_is_looked_at_on_its_own_device():
    """Not on the one where torch makes new tensors."""
    y, blur = noise(1, *IMAGE), Blur(IMAGE, KERNEL)
    with torch.device("meta"):
        assert float(blur.outside_range(y)) < 1e-3


def test_a_mask_that_was_computed_with_gradients_is_one_without():
    assert not Mask(torch.ones(6, 6, requires_grad=True), IMAGE).mask.requires_grad


def test_a_factor_may_be_a_whole_float():
    assert Average(IMAGE, 2.0).measurement_shape == (IMAGE[0], 3, 3)


def test_a_very_wide_blur_is_the_mean_over_its_kernel():
    blur = Blur.gaussian(IMAGE, 1e300)
    assert torch.allclose(blur.kernel, blur.kernel.mean().expand_as(blur.kernel))
