"""Matched noise in a bundle: measured, drawn with, saved and loaded strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optcov import Schedule, Trajectory, load
from optcov.bundle import Bundle, BundleError, Sampler
from optcov.reverse import Step
from optcov.storage import read_tensors, write_tensors
from small_bundles import SHAPE, small_bundle

IMAGES = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return small_bundle(Schedule.linear()).with_matched_noise(IMAGES, steps=4, samples=32)


@pytest.fixture
def saved(bundle: Bundle, tmp_path: Path) -> Path:
    bundle.save(tmp_path / "small")
    return tmp_path / "small"


def test_an_image_depends_on_seed_and_number_alone(bundle: Bundle) -> None:
    together = bundle.sample(5, method="matched 2m", steps=4, seed=3, progress=False)
    by_two = bundle.sample(5, method="Matched 2M", steps=4, seed=3, batch_size=2, progress=False)
    assert torch.allclose(together, by_two, atol=1e-3)  # an untrained network makes large numbers, and their rounding
    assert float(together.abs().max()) <= 1
    assert not torch.allclose(together, bundle.sample(5, method="Matched 2M", steps=4, progress=False), atol=1e-2)


def test_a_saved_bundle_draws_the_same_images(bundle: Bundle, saved: Path) -> None:
    again = load(saved)
    assert again.matched_noise(4).trajectory == bundle.matched_noise(4).trajectory
    for name, values in bundle.matched_noise(4).tensors().items():
        assert torch.equal(again.matched_noise(4).tensors()[name], values)
    expected = bundle.sample(2, method="Matched 2M", steps=4, progress=False)
    assert torch.allclose(again.sample(2, method="Matched 2M", steps=4, progress=False), expected, atol=1e-5)


def test_the_last_step_starts_where_noise_is_one_over_the_steps(bundle: Bundle) -> None:
    first = bundle.matched_noise(4).trajectory.times[0]
    assert float(-bundle.schedule.log_snr(first) / 2) == pytest.approx(torch.tensor(0.25).log().item(), abs=0.02)


def test_each_schedule_and_number_of_steps_has_its_own(bundle: Bundle) -> None:
    more = bundle.with_matched_noise(IMAGES, steps=3, samples=32)
    assert sorted(len(entry.trajectory) for entry in more.matched) == [3, 4]
    replaced = more.with_matched_noise(IMAGES, steps=3, samples=32, trajectory=Trajectory((10, 100, 1000)))
    assert len(replaced.matched) == 2
    assert replaced.matched_noise(3).trajectory.times == (10, 100, 1000)
    with pytest.raises(BundleError, match=r"no matched noise for 4 steps .* \(it has: none\)"):
        bundle.with_schedule("cosine").matched_noise(4)
    with pytest.raises(BundleError, match=r"no matched noise for 7 steps .* \(it has: 4\)"):
        bundle.sample(1, method="Matched 2M", steps=7, progress=False)


def test_a_callback_sees_the_density_of_every_drawn_step(bundle: Bundle) -> None:
    seen: list[Step] = []
    Sampler(bundle, "Matched 2M", 4).draw(range(3), callback=seen.append)
    assert [step.s for step in seen] == [*reversed(bundle.matched_noise(4).trajectory.times[:-1]), 0]
    assert all(step.log_prob().shape == (3,) and bool(step.log_prob().isfinite().all()) for step in seen[:-1])


def test_settings_tell_measured_noises_apart(bundle: Bundle) -> None:
    other = bundle.with_matched_noise(IMAGES, steps=4, samples=32, eta=1.0)
    ours, theirs = (Sampler(model, "Matched 2M", 4).settings() for model in (bundle, other))
    assert ours["step_noise"] != theirs["step_noise"]
    assert ours["times"] == theirs["times"]


def test_bad_requests_are_refused_by_name(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match=r"\(1, 4, 4\)"):
        bundle.with_matched_noise(torch.zeros(40, 1, 4, 4))
    with pytest.raises(ValueError, match="3 images are too few"):
        bundle.with_matched_noise(IMAGES[:3])
    with pytest.raises(BundleError, match="steps = 1"):
        bundle.with_matched_noise(IMAGES, steps=1)
    with pytest.raises(BundleError, match="samples = 'ten'"):
        bundle.with_matched_noise(IMAGES, samples="ten")
    with pytest.raises(BundleError, match="no option 'sample'"):
        bundle.with_matched_noise(IMAGES, sample=3)
    with pytest.raises(BundleError, match="is not a Trajectory"):
        bundle.with_matched_noise(IMAGES, trajectory="karras")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="times and a last step of its own"):
        Sampler(bundle, "Matched 2M", 4, trajectory="karras")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, m: t.pop("0.gain"), "lacks"),
        (lambda t, m: t.update(more=t["0.gain"]), "unknown"),
        (lambda t, m: t.update({"0.power": -t["0.power"]}), "positive"),
        (lambda t, m: t.update({"0.shift": t["0.shift"] * float("nan")}), "NaN"),
        (lambda t, m: t.update({"0.gain": t["0.gain"].double()}), "float32"),
        (lambda t, m: t.update({name: value[..., :4] for name, value in t.items()}), "images of shape"),
        (lambda t, m: m.pop("entries"), "metadata"),
        (lambda t, m: m.update(entries="3"), "list"),
        (lambda t, m: m.update(entries=m["entries"].replace("eta", "beta")), "exactly"),
        (lambda t, m: m.update(entries=m["entries"].replace("1000]", "2000]")), "2000"),
        (lambda t, m: m.update(entries=json.dumps([{**json.loads(m["entries"])[0], "eta": 2.0}])), "eta = 2"),
    ],
)
def test_a_damaged_file_is_refused_by_name(saved: Path, change, reason: str) -> None:
    path = saved / "matched.safetensors"
    tensors, metadata = read_tensors(path)
    change(tensors, metadata)
    write_tensors(path, tensors, metadata)
    with pytest.raises(BundleError, match=reason) as caught:
        load(saved)
    assert "matched.safetensors" in str(caught.value)
