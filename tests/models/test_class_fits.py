"""Fits, samples, bounds and classes of a class-conditional bundle: labels that come with the data, or are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import optcov
from class_bundles import CLASSES, class_bundle, class_unet
from optcov import Schedule
from optcov.bundle import Sampler
from optcov.fitting import TrainingError
from optcov.fitting.fit import FitPlan
from optcov.fitting.settings import FitSettings
from small_bundles import SHAPE, small_bundle

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (40, *SHAPE), generator=GENERATOR, dtype=torch.uint8)
LABELS = torch.arange(40) % CLASSES
QUICK = {"images": 16, "measure_images": 2, "times": 3, "calibration_samples": 16, "batch_size": 8}
MODEL = (class_unet(), Schedule.vp_sde())


def plan(data, model=MODEL, condition=None, **settings):
    return FitPlan(model, data, ("npr",), FitSettings(**{**QUICK, **settings}), condition=condition)


def told(part):
    return part.condition(torch.arange(len(part)))["class_labels"]


# conditions with the data


def test_labels_of_the_data_are_told_to_a_network_with_classes():
    seen = []
    unet = class_unet()
    unet.register_forward_pre_hook(lambda module, args, known: seen.append(known["class_labels"]), with_kwargs=True)
    fitted = optcov.fit((unet, Schedule.vp_sde()), (IMAGES, LABELS), empty_class=3, half=False, progress=False, **QUICK)
    assert (fitted.classes, sorted(fitted.heads)) == (CLASSES, ["npr", "sn"])
    assert set(torch.cat(seen).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_images_is_fitted_without_its_label_by_seed_and_image(share):
    images = IMAGES.repeat(25, 1, 1, 1)
    data = (images, LABELS.repeat(25)[: len(images)])
    first, again, other = (told(plan(data, empty_class=3, empty_share=share, seed=seed).train) for seed in (1, 1, 2))
    assert abs(float((first == 3).double().mean()) - share) < 4.5 * (share * (1 - share) / 900) ** 0.5 + 1e-9
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (share in (0.0, 1.0))


def test_without_an_empty_class_every_image_keeps_its_label():
    found = plan((IMAGES, LABELS), (class_unet(CLASSES), Schedule.vp_sde()))
    assert set(told(found.train).tolist()) == {0, 1, 2}
    assert found.bundle.empty_condition == {}


def test_data_without_labels_is_fitted_with_the_empty_condition():
    assert not hasattr(plan(IMAGES, empty_class=3).train, "condition")
    fitted = optcov.fit(MODEL, IMAGES, heads=["npr"], empty_class=3, progress=False, **QUICK)
    assert fitted.sample(2, steps=2, progress=False).shape == (2, *SHAPE)


def test_data_without_labels_for_a_network_without_an_empty_class_is_refused():
    with pytest.raises(TrainingError, match=r"3 classes and none that stands for no class, but .* has no labels"):
        plan(IMAGES, (class_unet(CLASSES), Schedule.vp_sde()))


@pytest.mark.parametrize("strange", [-1, CLASSES, 99])
def test_labels_out_of_range_are_refused_by_name_before_any_work(strange):
    """The empty class is none that data may have."""
    with pytest.raises(ValueError, match=f"has images of class {strange}, but the 3 classes of .* are 0 to 2"):
        plan((IMAGES, torch.where(LABELS == 2, strange, LABELS)), empty_class=3)


def test_labels_of_the_data_do_not_matter_to_a_network_without_classes():
    assert not hasattr(plan((IMAGES, LABELS + 50), small_bundle()).train, "condition")


def test_the_identity_of_a_fit_knows_the_labels_and_the_empty_class():
    one, other = plan((IMAGES, LABELS), empty_class=3), plan((IMAGES, (LABELS + 1) % CLASSES), empty_class=3)
    assert one.identity["condition"] != other.identity["condition"]
    assert one.identity["classes"] == CLASSES
    assert one.identity["empty condition"] is not None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"empty_class": -1}, "empty_class = -1 is no class"),
        ({"empty_class": 9}, "empty_class = 9 is none of the 4 classes 0 to 3"),
        ({"empty_class": 1.5}, "empty_class = 1.5 is no class"),
        ({"empty_share": 2.0}, "empty_share = 2.0 is no share"),
        ({"empty_share": float("nan")}, "empty_share = nan is no share"),
    ],
    ids=str,
)
def test_settings_of_the_empty_class_are_checked(settings, reason):
    with pytest.raises(ValueError, match=reason):
        plan((IMAGES, LABELS), **settings)


def test_an_empty_class_of_a_network_without_classes_is_refused():
    with pytest.raises(ValueError, match="knows no classes, so that none of them can be the empty one"):
        plan((IMAGES, LABELS), small_bundle(), empty_class=1)


# samples

BUNDLE = class_bundle()


def drawn(n=4, bundle=BUNDLE, **options):
    return bundle.sample(n, method="NPR-DDIM", steps=3, progress=False, **options)


def test_labels_are_a_number_or_one_for_each_image():
    condition = {"class_labels": torch.tensor([1, 1, 1, 1])}
    expected = drawn(condition=condition)
    for labels in (1, [1, 1, 1, 1], np.ones(4, dtype=int), torch.ones(4, dtype=torch.int64)):
        torch.testing.assert_close(drawn(labels=labels), expected, atol=1e-5, rtol=0)
    assert float((drawn(labels=2) - expected).abs().max()) > 1e-3


def test_no_label_is_the_empty_class():
    torch.testing.assert_close(drawn(), drawn(labels=CLASSES), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"labels": CLASSES + 1}, "no class 4 in classes; its classes are 0 to 3, of which 3 stands for no class"),
        ({"labels": -1}, "no class -1 in classes"),
        ({"labels": [0, 1]}, r"shape \(2,\); pass one whole number, or one for each of 4"),
        ({"labels": [0.5] * 4}, "torch.float32"),
        ({"labels": "three"}, "no whole numbers"),
        ({"labels": 1, "condition": {"class_labels": torch.zeros(4)}}, "leave one of them out"),
        ({"condition": {"class_labels": torch.zeros(3, dtype=torch.int64)}}, "one entry for each of 4 images"),
        ({"condition": {"class_labels": torch.zeros(4)}}, "pass whole numbers"),
        ({"labels": 1, "guidance": float("nan")}, "guidance = nan is no weight"),
        ({"labels": 1, "guidance": -2.0}, "guidance = -2.0 is no weight"),
        ({"guidance": 2.0}, "moves towards a condition, but none is given"),
    ],
    ids=str,
)
def test_conditions_that_do_not_fit_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        drawn(**options)


def test_labels_for_a_bundle_without_classes_are_refused():
    with pytest.raises(ValueError, match="small knows no classes; leave the labels out"):
        drawn(bundle=small_bundle(), labels=1)
    with pytest.raises(ValueError, match=r"guidance = 2.0 needs an empty condition .* and small has none"):
        drawn(bundle=small_bundle(), guidance=2.0)


def test_a_bundle_without_an_empty_class_needs_labels_and_cannot_be_guided():
    bundle = class_bundle(empty=False)
    with pytest.raises(ValueError, match="3 classes and none that stands for no class; pass labels"):
        drawn(bundle=bundle)
    with pytest.raises(ValueError, match="needs an empty condition"):
        drawn(bundle=bundle, labels=1, guidance=2.0)
    assert drawn(bundle=bundle, labels=1).shape == (4, *SHAPE)


@pytest.mark.parametrize("method", ["NPR-DDIM", "SN-DDPM", "A-DDPM", "Probability flow", "Gotta Go Fast", "UniPC"])
def test_guidance_of_1_costs_nothing_and_others_twice_as_many_evaluations(method):
    condition, counts = {"class_labels": torch.tensor([0, 1])}, []
    handle = BUNDLE.unet.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
    options = {"method": method, "steps": 4, "condition": condition, "tolerance": 0.5}
    plain, guided = (Sampler(BUNDLE, **options, guidance=w) for w in (1.0, 3.0))
    one, other = plain.draw(range(2)), guided.draw(range(2))
    handle.remove()
    assert float((one.x_0 - other.x_0).abs().max()) > 1e-4
    assert sum(counts) == int(one.evaluations.sum() + other.evaluations.sum())
    assert "guidance 3" in guided.title
    assert guided.settings()["guidance"] == 3.0
    assert "guidance" not in plain.settings()


def test_guided_images_depend_on_their_number_and_condition_alone():
    together = drawn(4, labels=[0, 1, 2, 0], guidance=2.5)
    apart = drawn(4, labels=[0, 1, 2, 0], guidance=2.5, batch_size=1)
    # guidance multiplies rounding, which depends on the batch, by up to 2 w - 1 = 4 in each step
    torch.testing.assert_close(together, apart, atol=1e-3, rtol=0)
    assert (together[0] - together[3]).abs().max() > 0.1  # of the same class


# bounds


def test_labels_that_come_with_images_are_told_to_the_bound():
    options = {"steps": 4, "methods": ["NPR-DDPM"], "progress": False}
    images, labels = IMAGES[:6], LABELS[:6]
    by_set = BUNDLE.bits_per_dim((images, labels), **options).of("npr", 4).mean
    by_hand = BUNDLE.bits_per_dim(images, labels=labels, **options).of("npr", 4).mean
    without = BUNDLE.bits_per_dim(images, **options).of("npr", 4).mean
    empty = BUNDLE.bits_per_dim(images, labels=CLASSES, **options).of("npr", 4).mean
    assert by_set == pytest.approx(by_hand, abs=1e-6)
    assert without == pytest.approx(empty, abs=1e-6)
    assert abs(by_set - without) > 1e-5


@pytest.mark.parametrize(
    ("bundle", "options", "reason"),
    [
        (BUNDLE, {"guidance": 2.0}, "guidance = 2.0 has no likelihood"),
        (BUNDLE, {"labels": 9}, "no class 9 in classes"),
        (small_bundle(), {"labels": 1}, "small knows no classes"),
        (class_bundle(empty=False), {}, "none that stands for no class; pass labels"),
    ],
)
def test_a_bound_that_cannot_be_is_refused(bundle, options, reason):
    with pytest.raises(ValueError, match=reason):
        bundle.bits_per_dim(IMAGES[:2], steps=3, progress=False, **options)


# classes


@pytest.mark.parametrize("empty", [True, False])
def test_class_log_probabilities_are_a_distribution_and_do_not_depend_on_batches(empty):
    bundle = class_bundle(empty=empty)
    found = bundle.class_log_probabilities(IMAGES[:5], steps=3, progress=False)
    assert (found.dtype, found.shape) == (torch.float64, (5, CLASSES))
    torch.testing.assert_close(found.exp().sum(1), torch.ones(5, dtype=torch.float64))
    apart = bundle.class_log_probabilities(IMAGES[:5], steps=3, batch_size=2, progress=False)
    torch.testing.assert_close(apart, found, atol=1e-2, rtol=1e-3)
    other = bundle.class_log_probabilities(IMAGES[:5], steps=3, seed=1, progress=False)
    assert float((other - found).abs().max()) > 1e-2


def test_classes_are_told_apart_by_one_variance_per_time_unless_told():
    """Not by the tightest bound: see docs/how-to/classes-and-guidance.md for what was measured."""
    found, chosen, other = (
        BUNDLE.class_log_probabilities(IMAGES[:2], steps=3, progress=False, **method)
        for method in ({}, {"method": "A-DDPM"}, {"method": "DDPM, beta-tilde"})
    )
    assert torch.equal(found, chosen)
    assert not torch.equal(found, other)


def test_class_log_probabilities_are_the_bounds_of_the_classes():
    found = BUNDLE.class_log_probabilities(IMAGES[:2], steps=3, method="SN-DDPM", progress=False)
    process = BUNDLE.reverse_process("SN-DDPM")
    x_0 = IMAGES[:2].float() / 127.5 - 1
    bounds = [
        optcov.elbo(process, x_0, BUNDLE.trajectory(3), condition={"class_labels": torch.full((2,), label)}).total
        for label in range(CLASSES)
    ]
    torch.testing.assert_close(found, (-torch.stack(bounds, 1)).log_softmax(1), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    ("bundle", "options", "reason"),
    [
        (small_bundle(), {}, "knows no classes, so that it cannot tell them apart"),
        (BUNDLE, {"steps": 1}, "steps = 1 is not"),
        (BUNDLE, {"batch_size": 0}, "batch_size = 0 is not"),
        (BUNDLE, {"seed": 0.5}, "seed = 0.5 is not"),
        (BUNDLE, {"method": "NPR-DDIM"}, "NPR-DDIM has no finite variational bound"),
    ],
    ids=str,
)
def test_classes_that_cannot_be_told_are_refused(bundle, options, reason):
    with pytest.raises(ValueError, match=reason):
        bundle.class_log_probabilities(IMAGES[:2], **{"steps": 3, "progress": False, **options})
