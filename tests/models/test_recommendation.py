"""What a bundle recommends, by its heads and its own calibration; one default method everywhere."""

from __future__ import annotations

import pytest

from optcov import Schedule
from optcov.bundle.description import describe, lines
from optcov.bundle.recommendation import possible_covariances, recommendations
from optcov.bundle.sampler import suggested_method
from optcov.methods import DEFAULT_METHOD
from small_bundles import small_bundle, small_head

GOOD, BAD = [0.85, 1.0, 1.2], [0.9, 1.6, 1.0]


def calibrated(**ratios):
    record = {name: {"ratio": values} for name, values in ratios.items()}
    return small_bundle(Schedule.linear()).with_provenance(calibration=record)


def test_a_good_npr_head_is_recommended_for_everything():
    found = recommendations(calibrated(npr=GOOD))
    assert {purpose: best.covariance for purpose, best in found.items()} == dict.fromkeys(found, "npr")
    assert list(found) == ["images", "likelihood", "uncertainty"]
    assert found["images"].method == DEFAULT_METHOD
    assert "0.85 to 1.20 times what was measured" in found["images"].why


def test_a_head_that_was_not_calibrated_is_taken_at_its_word():
    assert "not calibrated" in recommendations(small_bundle(Schedule.linear()))["likelihood"].why
    assert suggested_method(small_bundle(Schedule.linear())) == DEFAULT_METHOD


def test_a_bad_head_gives_way_to_one_number_per_time_and_says_why():
    bundle = calibrated(npr=BAD, sn=GOOD)
    found = recommendations(bundle)
    assert found["images"].method == suggested_method(bundle) == "A-DDIM"
    assert found["likelihood"].covariance == found["uncertainty"].covariance == "npr_isotropic"
    assert "the head npr predicts 1.60 times what was measured" in found["images"].why
    assert "small difference of large numbers" in found["images"].why  # the SN head is about zero


def test_a_positive_sn_head_and_an_ocm_head_may_take_its_place():
    bundle = calibrated(npr=BAD, sn=GOOD, ocm=GOOD)
    bundle = bundle.with_heads({"ocm": small_head(3)}, bundle.fingerprint)
    assert suggested_method(bundle) == "OCM-DDIM"
    bundle.heads["sn"].about = "prediction"
    assert suggested_method(bundle) == "SN-DDIM"


def test_without_heads_and_numbers_there_is_plain_ddim():
    from dataclasses import replace

    from optcov.networks import HeadedNetwork

    bundle = small_bundle(Schedule.linear())
    network = HeadedNetwork(bundle.network.backbone, bundle.schedule)
    bare = replace(bundle, network=network, numbers=None)
    assert possible_covariances(bare) == ["beta_tilde", "beta"]
    found = recommendations(bare)
    assert (found["images"].method, found["likelihood"].covariance) == ("DDIM", "beta")
    assert found["images"].why == "there is no head"


@pytest.mark.parametrize("record", [None, 3, {"npr": 1}, {"npr": {"ratio": "a"}}, {"npr": {"ratio": []}}])
def test_a_history_that_holds_something_else_counts_as_no_calibration(record):
    bundle = small_bundle(Schedule.linear()).with_provenance(calibration=record)
    assert suggested_method(bundle) == DEFAULT_METHOD


def test_a_description_shows_what_a_bundle_can_do_and_what_is_recommended():
    content = describe(calibrated(npr=GOOD))
    assert content["covariances"] == ["beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr"]
    assert content["recommended"]["images"]["method"] == DEFAULT_METHOD
    shown = dict(lines(content))
    assert shown["recommended"] == f"for images {DEFAULT_METHOD}, for likelihood npr, for uncertainty npr"
