"""`restore` on a bundle: seeds, batches, refusals, the result, the command line."""

from __future__ import annotations

import pytest
import torch

from class_bundles import class_bundle
from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, oracle
from optcov.bundle import Bundle
from optcov.bundle.spectra import Spectra
from optcov.inverse import Average, Blur, Identity, Linear, Mask, Operator, restore
from optcov.inverse.scores import coverage, crps, psnr
from small_bundles import SHAPE, small_bundle

MASK = Mask.box(SHAPE, 2, 2, 3, 3)
CORRELATED = ("CNPR-DDPM", "Spectral-DDPM")
METHODS = ("NPR-DDPM", "SN-DDIM", "A-DDPM", *CORRELATED, "npr_isotropic", "isotropic", "DPS", "PiGDM", "DiffPIR")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    times = torch.tensor([1.0, 500.0, 1000.0], dtype=torch.float64)
    low = 1 / (1 + torch.arange(8.0)[:, None] + torch.arange(8.0))  # power by frequency: neighbours vary together
    powers = (low / low.mean()).expand(3, *SHAPE).clone()
    return small_bundle(Schedule.linear()).with_spectra(
        Spectra(times, dict.fromkeys(("residual", "npr", "sn"), powers))
    )


def measurement(count: int = 2) -> torch.Tensor:
    images = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return MASK.apply(images)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_finite_samples_that_do_not_depend_on_the_batch(bundle: Bundle, method: str):
    y = measurement()
    whole = restore(bundle, y, MASK, 0.1, steps=3, samples=3, method=method)
    parts = restore(bundle, y, MASK, 0.1, steps=3, samples=3, method=method, batch_size=2)
    assert whole.samples.shape == (2, 3, *SHAPE)
    tolerance = 1e-3 if method in CORRELATED else 1e-4  # conjugate gradients stop at 1e-4 of their system
    assert torch.allclose(whole.samples, parts.samples, atol=tolerance)
    fewer = restore(bundle, y[0], MASK, 0.1, steps=3, samples=2, method=method)
    assert torch.allclose(whole.samples[0, :2], fewer.samples, atol=tolerance)
    assert not torch.allclose(whole.samples[0, 0], whole.samples[0, 1], atol=1e-2)
    assert float(whole.samples.abs().max()) <= 1
    assert whole.evaluations == 3


@pytest.mark.parametrize("noise_std", [0.1, 0.0])
@pytest.mark.parametrize("method", ["NPR-DDPM", "CNPR-DDPM"])
def test_systems_of_conjugate_gradients_do_not_depend_on_the_batch_either(
    bundle: Bundle, method: str, noise_std: float
):
    """Without noise the system of a blur is singular to all digits of float32; it is solved all the same."""
    blur = Blur.gaussian(SHAPE, 1.5)
    y = blur.apply(measurement())
    whole, parts = (
        restore(bundle, y, blur, noise_std, steps=3, samples=3, method=method, batch_size=size) for size in (6, 2)
    )
    assert torch.allclose(whole.samples, parts.samples, atol=1e-3)
    assert whole.unsolved == 0


def test_random_probes_do_not_depend_on_the_batch_either(bundle: Bundle):
    probing = bundle.reverse_process("OCM-DDPM", ocm_probes=2)
    whole, parts = (restore(probing, measurement(), MASK, 0.1, steps=3, samples=3, batch_size=size) for size in (6, 2))
    assert torch.allclose(whole.samples, parts.samples, atol=1e-4)


def test_pixels_that_are_hidden_may_be_nan(bundle: Bundle):
    y = measurement(1)
    marked = torch.where(MASK.mask > 0, y, float("nan"))
    first, second = (restore(bundle, each, MASK, 0.1, steps=2, samples=1) for each in (y, marked))
    assert torch.equal(first.samples, second.samples)


def test_a_map_that_cannot_be_differentiated_is_restored_by_every_baseline(bundle: Bundle):
    half = Linear(lambda x: x.detach() / 2, lambda y: y.detach() / 2, SHAPE)
    for method in ("NPR-DDPM", "DPS", "PiGDM", "DiffPIR"):
        restore(bundle, torch.zeros(SHAPE), half, 0.1, steps=2, samples=1, method=method)


def test_entries_that_no_part_reaches_do_not_count_in_the_residual():
    """The first row of the average lies over hidden pixels alone."""
    shape = (1, 8, 8)
    average = Average(shape, 4) @ Mask.box(shape, 0, 0, 4, 8)
    assert average.seen[0].tolist() == [[0, 0], [1, 1]]


def test_a_correlated_covariance_moves_hidden_pixels_without_a_gradient(bundle: Bundle):
    """One step to the end: a diagonal covariance leaves the hidden pixels at x0_hat, a correlated one does not."""
    y = [torch.zeros(1, *SHAPE), 0.5 * MASK.apply(torch.ones(1, *SHAPE))]
    hidden = MASK.mask == 0
    options = {"steps": 2, "samples": 1, "way": "proximal", "trajectory": Trajectory([1000])}
    moved = {}
    for method in ("NPR-DDPM", "CNPR-DDPM"):
        first, second = (restore(bundle, each, MASK, 0.05, method=method, **options).samples for each in y)
        moved[method] = float((first - second)[0, 0][hidden].abs().mean())
    assert moved["NPR-DDPM"] == 0 < moved["CNPR-DDPM"]


def test_a_class_that_is_none_is_refused():
    bundle = class_bundle()
    for label in (99, -1):
        with pytest.raises(ValueError, match="class"):
            restore(bundle, torch.zeros(SHAPE), MASK, 0.1, steps=2, condition={"class_labels": torch.tensor([label])})


def test_half_precision_is_measured_in_single(bundle: Bundle):
    found = restore(bundle, measurement(1).half(), Blur.gaussian(SHAPE, 1.0), 0.1, steps=2, samples=1)
    assert found.samples.dtype == torch.float32


def test_saving_again_leaves_no_older_samples(bundle: Bundle, tmp_path):
    for samples in (4, 2):
        restore(bundle, measurement(1)[0], MASK, 0.1, steps=2, samples=samples).save(tmp_path)
    assert len(list((tmp_path / "samples").iterdir())) == 2
    found = restore(bundle, measurement(1)[0], MASK, 0.1, steps=2, samples=1)
    with pytest.raises(ValueError, match="the truth is no finite tensor"):
        found.save(tmp_path / "other", torch.full(SHAPE, float("nan")))
    assert not (tmp_path / "other").exists()


def test_another_seed_gives_other_samples(bundle: Bundle):
    first, second = (restore(bundle, measurement(1), MASK, 0.1, steps=2, samples=1, seed=seed) for seed in (0, 1))
    assert not torch.allclose(first.samples, second.samples, atol=1e-2)


def test_pixels_seen_without_noise_are_kept(bundle: Bundle):
    found = restore(bundle, measurement(), MASK, 0.0, steps=3, samples=2)
    assert float(found.residual.max()) < 1e-5


def test_guidance_counts_its_passes_back(bundle: Bundle):
    found = restore(bundle, measurement(1), MASK, 0.1, steps=3, samples=2)
    assert (found.evaluations, found.gradients) == (3, 3)
    assert restore(bundle, measurement(1), MASK, 0.1, steps=3, samples=2, way="proximal").gradients == 0


@pytest.mark.parametrize("method", ["NPR-DDPM", "DPS", "PiGDM"])
def test_gradients_are_kept_for_one_batch_at_a_time(bundle: Bundle, method: str, monkeypatch):
    """So memory is bounded by the batch size, whatever the number of samples and measurements."""
    sizes = []
    predict = ReverseProcess.predict

    def counted(self, x_t, t, **condition):
        assert x_t.grad_fn is None  # nothing is kept of the steps before
        sizes.append((len(x_t), torch.is_grad_enabled()))
        return predict(self, x_t, t, **condition)

    monkeypatch.setattr(ReverseProcess, "predict", counted)
    restore(bundle, measurement(2), MASK, 0.1, steps=2, samples=4, batch_size=3, method=method)
    assert {grad for _, grad in sizes} == {True}
    assert max(size for size, _ in sizes) == 3
    assert sum(size for size, _ in sizes) == 2 * 2 * 4


def test_a_covariance_between_pixels_needs_no_gradient():
    schedule = Schedule.linear()
    data = oracle.GaussianMixture([1.0], [[0.0, 0.0]], [[[1.0, 0.9], [0.9, 1.0]]])
    prior = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "npr_full", data_range=None)
    hidden, y = Mask(torch.tensor([1.0, 0.0])), torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert restore(prior, y, hidden, 0.1, steps=2, samples=2).method == "npr_full, proximal"
    assert restore(prior, y, hidden, 0.1, steps=2, samples=2, method="npr").method == "npr, guidance"


def test_the_result_is_data_that_prints(bundle: Bundle, tmp_path):
    found = restore(bundle, measurement(), MASK, 0.1, steps=2, samples=4)
    assert torch.allclose(found.mean, found.samples.mean(1))
    assert found.std.shape == (2, *SHAPE)
    assert "evaluations per sample" in str(found)
    assert "<table>" in found._repr_html_()
    assert found.plot(tmp_path / "found.png", truth=measurement()).stat().st_size > 1000


def test_systems_that_are_not_solved_are_told(bundle: Bundle):
    blur = Blur.gaussian(SHAPE, 1.5)
    with pytest.warns(RuntimeWarning, match="did not reach the tolerance"):
        found = restore(bundle, blur.apply(measurement(1)), blur, 1e-4, steps=2, samples=1, iterations=1)
    assert found.unsolved > 0


def test_a_condition_belongs_to_its_measurement():
    schedule = Schedule.linear()
    data = oracle.GaussianMixture([0.5, 0.5], [[-3.0, -3.0], [3.0, 3.0]], [0.01, 0.01], labels=[0, 1])
    prior = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "npr_full", data_range=None)
    hidden = Mask(torch.tensor([1.0, 0.0]))
    found = restore(
        prior,
        torch.zeros(2, 2, dtype=torch.float64),
        hidden,
        10.0,
        steps=5,
        samples=3,
        condition={"class_labels": torch.tensor([0, 1])},
    )
    assert bool((found.samples[0] < -2).all())
    assert bool((found.samples[1] > 2).all())


class WrongAdjoint(Operator):
    """2 x, with the adjoint 3 y."""

    shape = measurement_shape = SHAPE

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def adjoint(self, y: torch.Tensor) -> torch.Tensor:
        return 3 * y


class Shapeless(Operator):
    """Does not say what it takes."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def adjoint(self, y: torch.Tensor) -> torch.Tensor:
        return y


class Listed(Shapeless):
    """Says it by lists."""

    def __init__(self) -> None:
        self.shape = self.measurement_shape = list(SHAPE)  # type: ignore[assignment]


COLUMN = torch.ones(8, 1) / 8  # of single precision
SINGLE = Linear(lambda x: (x @ COLUMN)[:, 0, :, 0], lambda y: y[:, None, :, None] @ COLUMN.T, SHAPE)
BAD = [
    ({"noise_std": -0.1}, "noise_std = -0.1 is not a standard deviation"),
    ({"noise_std": float("nan")}, "not a standard deviation"),
    ({"measurement": torch.full(SHAPE, float("nan"))}, "NaN or infinite"),
    ({"measurement": torch.zeros(1, 5, 5)}, "but mask of images"),
    ({"measurement": torch.ones(SHAPE), "noise_std": 0.0}, "without noise no image gives this measurement"),
    ({"operator": "mask"}, "operator is a str"),
    ({"method": "NRP-DDPM"}, "unknown method 'NRP-DDPM'"),
    ({"method": "DDIM"}, "no measurement can move it"),
    ({"method": "Improved DDPM"}, "no head 'range'"),
    ({"method": "Euler-Maruyama"}, "a solver without a covariance"),
    ({"way": "magic"}, "not one of proximal, guidance"),
    ({"strength": 2.0}, "for DPS and DiffPIR only"),
    ({"strength": 2.0, "method": "PiGDM"}, "for DPS and DiffPIR only"),
    ({"strength": 0.0, "method": "DPS"}, "strength = 0.0 is not above 0"),
    ({"way": "proximal", "method": "DPS"}, "DPS has its own"),
    ({"steps": 1}, "steps = 1 has no step from noise to noise"),
    ({"operator": WrongAdjoint()}, "adjoint is not the adjoint of apply"),
    ({"measurement": torch.zeros(8, dtype=torch.float64), "operator": SINGLE}, "apply failed on a batch .*float64"),
    ({"samples": 0}, "samples = 0"),
    ({"tolerance": 2.0}, "tolerance"),
    ({"trajectory": "zigzag"}, "not one of even"),
    ({"trajectory": ["even"]}, "not one of even"),
    ({"bundle": 3}, "bundle is a int"),
    ({"noise_std": 1e300}, "not a standard deviation from 0 to 1e\\+06"),
    ({"measurement": torch.full(SHAPE, 1e30)}, "values beyond 1e\\+06"),
    ({"measurement": torch.zeros(1, 4, 4), "operator": Identity((1, 4, 4))}, r"draws \(1, 8, 8\)"),
    ({"samples": 2.5}, "samples = 2.5"),
    ({"iterations": 1.5}, "iterations = 1.5"),
    ({"tolerance": None}, "tolerance = None"),
    ({"method": "DPS", "strength": float("inf")}, "strength = inf"),
    ({"noise_std": 10**400}, "noise_std = 1000* is not a number"),
    ({"noise_std": torch.tensor(0.1, device="meta")}, "noise_std = .* is not a number"),
    ({"measurement": torch.zeros(SHAPE).to_sparse()}, "the measurement is a sparse tensor; pass a dense tensor"),
    ({"measurement": torch.zeros(SHAPE, device="meta")}, "the measurement is a tensor without values"),
    ({"measurement": torch.zeros(SHAPE, dtype=torch.int32)}, "the measurement is torch.int32"),
    ({"measurement": torch.zeros(SHAPE).to(torch.float8_e5m2)}, "the measurement is torch.float8_e5m2"),
    ({"operator": Shapeless()}, r"the operator's shape = \(\) has no axis"),
    ({"operator": Mask.box(SHAPE, 0, 0, 4, 8) @ Mask.box(SHAPE, 4, 0, 4, 8)}, "nothing but 0"),
    ({"samples": 10**6}, "1000000 samples of 1 measurements are too many"),
    ({"steps": 10**9}, "outside 2..1000"),
    ({"steps": 10**9, "trajectory": "karras"}, "not a whole number of times from 2 to 1000"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_refused_in_a_sentence(bundle: Bundle, change, said):
    given = {"bundle": bundle, "measurement": torch.zeros(SHAPE), "operator": MASK, "noise_std": 0.1, **change}
    main = [given.pop(name) for name in ("bundle", "measurement", "operator", "noise_std")]
    with pytest.raises(ValueError, match=said):
        restore(*main, **{"steps": 2, **given})


def test_names_may_have_spaces_around_them(bundle: Bundle):
    for method in (" DPS ", " isotropic", "npr-ddpm "):
        assert restore(bundle, torch.zeros(SHAPE), MASK, 0.1, steps=2, samples=1, method=method).evaluations == 2


def test_an_operator_may_say_its_shapes_by_lists(bundle: Bundle):
    assert restore(bundle, torch.zeros(SHAPE), Listed(), 0.1, steps=2, samples=1).samples.shape == (1, *SHAPE)


def test_a_measurement_that_is_no_image_is_left_out_of_the_picture(bundle: Bundle, tmp_path):
    numbers = Linear(lambda x: x.flatten(1), lambda y: y.reshape(-1, *SHAPE), SHAPE)
    found = restore(bundle, torch.zeros(64), numbers, 0.1, steps=2, samples=1)
    assert found.plot(tmp_path / "found.png").stat().st_size > 1000


def test_a_blurred_measurement_outside_the_range_is_refused_without_noise(bundle: Bundle):
    """A map whose rows repeat cannot give different numbers for them."""
    twice = Linear(lambda x: torch.cat([x, x], 1), lambda y: y[:, :1] + y[:, 1:], SHAPE)
    with pytest.raises(ValueError, match="without noise no image gives"):
        restore(bundle, torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)), twice, 0.0, steps=2)
    ok = restore(bundle, torch.cat([measurement(1)[0]] * 2), twice, 0.0, steps=2, samples=1)
    assert ok.samples.shape == (1, *SHAPE)


def test_averages_are_always_in_the_range(bundle: Bundle):
    found = restore(bundle, torch.rand(1, 4, 4), Average(SHAPE, 2), 0.0, steps=2, samples=1)
    assert found.samples.shape == (1, *SHAPE)


def test_coverage_of_exchangeable_draws_is_the_level():
    draws = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    for level in (0.5, 0.9):
        share = coverage(draws[:, 1:, None], draws[:, :1], level).mean()
        assert abs(float(share) - level) < 0.02
    same = torch.zeros(1, 4, 1)
    assert float(coverage(same, same[:, 0], 0.9)) == pytest.approx(0.9)  # ties share their places


def test_crps_is_least_for_the_right_spread():
    truth = torch.randn(3000, 1, generator=torch.Generator().manual_seed(1))
    draws = torch.randn(3000, 10, 1, generator=torch.Generator().manual_seed(2))
    right, narrow, wide = (float(crps(scale * draws, truth).mean()) for scale in (1.0, 0.3, 3.0))
    assert right < narrow
    assert right < wide
    assert right == pytest.approx(1 / 3.14159**0.5, abs=0.02)  # of a standard normal


def test_psnr_of_a_known_error():
    assert float(psnr(torch.full((1, 4), 0.2), torch.zeros(1, 4))) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("score", "samples", "truth", "said"),
    [
        (lambda s, x: coverage(s, x, 0.9), torch.zeros(1, 0, 3), torch.zeros(1, 3), "S of at least 1"),
        (lambda s, x: coverage(s, x, None), torch.zeros(1, 2, 3), torch.zeros(1, 3), "level = None"),
        (lambda s, x: coverage(s, x, 0.9), torch.full((1, 2, 3), float("nan")), torch.zeros(1, 3), "NaN"),
        (crps, torch.zeros(1, 1, 3), torch.zeros(1, 3), "S of at least 2"),
        (crps, torch.zeros(1, 2, 3), torch.full((1, 3), float("inf")), "infinity"),
        (crps, torch.zeros(1, 2, 3), torch.zeros(1, 4), "but the truth has"),
        (crps, [[0.0]], torch.zeros(1, 3), "the samples are a list"),
        (psnr, torch.zeros(1, 3).numpy(), torch.zeros(1, 3), "is not a tensor"),
        (psnr, torch.tensor(1.0), torch.tensor(1.0), "is not a tensor"),
        (psnr, torch.full((1, 3), float("nan")), torch.zeros(1, 3), "NaN"),
        (lambda s, x: psnr(s, x, 0.0), torch.zeros(1, 3), torch.zeros(1, 3), "width = 0.0"),
    ],
)
def test_what_has_no_score_is_refused(score, samples, truth, said):
    with pytest.raises(ValueError, match=said):
        score(samples, truth)
