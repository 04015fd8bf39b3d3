"""What a bundle recommends, by its heads and its own calibration; one default method everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from optcov import Schedule, load
from optcov.bundle.description import describe, lines
from optcov.bundle.recommendation import head_method, possible_covariances, recommendations
from optcov.methods import DEFAULT_METHOD, HEAD_METHOD
from optcov.networks import HeadedNetwork
from small_bundles import small_bundle, small_head

GOOD, BAD = [0.85, 1.0, 1.2], [0.9, 1.6, 1.0]


def calibrated(**ratios):
    record = {name: {"ratio": values} for name, values in ratios.items()}
    return small_bundle(Schedule.linear()).with_provenance(calibration=record)


def test_a_good_npr_head_is_recommended_for_all_but_images():
    found = recommendations(calibrated(npr=GOOD))
    assert list(found) == ["images", "likelihood", "uncertainty"]
    assert found["images"].name == DEFAULT_METHOD
    assert found["likelihood"].name == found["uncertainty"].name == "npr"
    assert "0.85 to 1.20 times what was measured" in found["uncertainty"].why
    assert head_method(calibrated(npr=GOOD)) == HEAD_METHOD
    assert found["images"].why.endswith(f"of the methods with a head, compare {HEAD_METHOD} with NPR-DDPM")


def test_correlations_that_were_measured_are_recommended_for_likelihoods():
    found = recommendations(load("fashion"))
    assert (found["likelihood"].name, found["uncertainty"].name) == ("npr_correlated", "npr")


def test_a_head_that_was_not_calibrated_is_taken_at_its_word():
    assert "not calibrated" in recommendations(small_bundle(Schedule.linear()))["likelihood"].why
    assert head_method(small_bundle(Schedule.linear())) == HEAD_METHOD


def test_a_bad_head_gives_way_to_one_number_per_time_and_says_why():
    found = recommendations(calibrated(npr=BAD, sn=GOOD))
    assert found["likelihood"].name == found["uncertainty"].name == "npr_isotropic"
    assert "the head npr predicts 1.60 times what was measured" in found["uncertainty"].why
    assert "small difference of large numbers" in found["uncertainty"].why  # the SN head is about zero


@pytest.mark.parametrize(("error", "best"), [(0.2, "npr"), (0.1, "npr_isotropic")])
def test_a_ratio_that_its_own_error_explains_is_no_reason_to_doubt(error, best):
    bundle = small_bundle(Schedule.linear())
    record = {"npr": {"ratio": [0.9, 1.6, 1.0], "error": [0.01, error, 0.01]}}
    found = recommendations(bundle.with_provenance(calibration=record))["uncertainty"]
    assert found.name == best
    assert ("0.90 to 1.60 times" if best == "npr" else "predicts 1.60 times") in found.why


@pytest.mark.parametrize("errors", ["a", [1.0], None])
def test_errors_that_do_not_fit_count_as_none(errors):
    bundle = small_bundle(Schedule.linear()).with_provenance(calibration={"npr": {"ratio": BAD, "error": errors}})
    assert recommendations(bundle)["uncertainty"].name == "npr_isotropic"


def test_a_positive_sn_head_and_an_ocm_head_may_take_its_place():
    bundle = calibrated(npr=BAD, sn=GOOD, ocm=GOOD)
    bundle = bundle.with_heads({"ocm": small_head(3)}, bundle.fingerprint)
    assert head_method(bundle) == "OCM-DDIM"
    bundle.heads["sn"].about = "prediction"
    assert head_method(bundle) == "SN-DDIM"
    assert recommendations(bundle)["images"].why.endswith("compare SN-DDIM with SN-DDPM")


def test_without_heads_and_numbers_images_are_drawn_all_the_same():
    bundle = small_bundle(Schedule.linear())
    network = HeadedNetwork(bundle.network.backbone, bundle.schedule)
    bare = replace(bundle, network=network, numbers=None)
    assert possible_covariances(bare) == ["beta_tilde", "beta"]
    found = recommendations(bare)
    assert (found["images"].name, found["likelihood"].name) == (DEFAULT_METHOD, "beta")
    assert found["likelihood"].why == "there is no head"
    assert bare.sample(2, steps=2, progress=False).isfinite().all()


@pytest.mark.parametrize("record", [None, 3, {"npr": 1}, {"npr": {"ratio": "a"}}, {"npr": {"ratio": []}}])
def test_a_history_that_holds_something_else_counts_as_no_calibration(record):
    bundle = small_bundle(Schedule.linear()).with_provenance(calibration=record)
    assert head_method(bundle) == HEAD_METHOD


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_images_are_drawn_by_the_default_method_in_any_number_of_steps(steps):
    bundle = small_bundle(Schedule.linear())
    drawn = bundle.sample(2, steps=steps, progress=False)
    assert torch.equal(drawn, bundle.sample(2, method=DEFAULT_METHOD, steps=steps, progress=False))


def test_a_description_shows_what_a_bundle_can_do_and_what_is_recommended():
    content = describe(calibrated(npr=GOOD))
    assert content["covariances"] == ["beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr"]
    assert content["recommended"]["images"]["name"] == DEFAULT_METHOD
    shown = dict(lines(content))
    best = "npr (NPR-DDPM)"
    assert shown["recommended"] == f"for images {DEFAULT_METHOD}, for likelihood {best}, for uncertainty {best}"
    assert "needs no head" in content["recommended"]["images"]["why"]


def test_a_prompt_and_a_notebook_show_the_recommendation_but_not_the_long_history():
    bundle = calibrated(npr=GOOD).with_provenance(heads={"images": 12_288}, calibration={"npr": {"ratio": GOOD}})
    for shown in (str(bundle), bundle._repr_html_()):
        assert "for uncertainty npr (NPR-DDPM)" in shown
        assert "0.85" in shown
        assert "12,288" not in shown
    assert dict(lines(describe(bundle)))["fitted by"] == "images 12,288"  # optcov info
