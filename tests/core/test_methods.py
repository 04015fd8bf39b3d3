from __future__ import annotations

import pytest
import torch

from optcov import METHODS, Schedule, Trajectory, sample
from optcov.covariances import Spectrum, find_covariance
from optcov.methods import DEFAULT_METHOD, HEAD_METHOD, PEER_METHODS, draw, find_method
from optcov.oracle import GaussianMixture

PAPER_ROWS = """DDPM, beta-tilde;DDPM, beta;A-DDPM;NPR-DDPM;SN-DDPM;DDIM;A-DDIM;NPR-DDIM;SN-DDIM;
Improved DDPM;Euler-Maruyama;Ancestral sampling;Probability flow;A-DPM;NPR-DPM;SN-DPM;Gotta Go Fast"""
OWN_ROWS = "Spectral-DDPM;Spectral-DDIM;CNPR-DDPM;CNPR-DDIM;CSN-DDPM;CSN-DDIM"


def test_every_row_of_the_paper_has_its_method():
    paper = [row.strip() for row in PAPER_ROWS.split(";")]
    assert list(METHODS)[: len(paper)] == paper
    assert set(OWN_ROWS.split(";")) <= set(METHODS)
    assert {"OCM-DDPM", "OCM-DDIM"} <= set(METHODS) - set(paper)


def test_every_row_is_composed_as_the_paper_says():
    table = {  # eta, covariance, y
        "DDPM, beta-tilde": (1.0, "beta_tilde", None),
        "DDPM, beta": (1.0, "beta", None),
        "A-DDPM": (1.0, "analytic", 1.0),
        "NPR-DDPM": (1.0, "npr", 1.0),
        "SN-DDPM": (1.0, "sn", 1.0),
        "DDIM": (0.0, "beta_tilde", None),
        "A-DDIM": (0.0, "analytic", 1.0),
        "NPR-DDIM": (0.0, "npr", 1.0),
        "SN-DDIM": (0.0, "sn", 1.0),
        "Improved DDPM": (1.0, "range", None),
        "Ancestral sampling": (1.0, "beta", None),
        "A-DPM": (1.0, "analytic", 2.0),
        "NPR-DPM": (1.0, "npr", 2.0),
        "SN-DPM": (1.0, "sn", 2.0),
        "OCM-DDPM": (1.0, "ocm", 1.0),
        "OCM-DDIM": (0.0, "ocm", 1.0),
    }
    found = {n: (m.eta, m.covariance, m.noise_cap) for n, m in METHODS.items() if m.covariance}
    assert {name: found[name] for name in table} == table
    assert found["Spectral-DDIM"] == (0.0, "spectral", 1.0)
    assert found["CNPR-DDPM"] == (1.0, "npr_correlated", 1.0)
    assert found["CSN-DDIM"] == (0.0, "sn_correlated", 1.0)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.solver is None])
def test_every_reverse_method_samples(name):
    method = METHODS[name]
    schedule = Schedule.vp_sde() if method.continuous else Schedule.linear()
    data = GaussianMixture([0.5, 0.5], [[-0.5, 0.0], [0.5, 0.0]], [0.01, 0.02])
    needed = find_covariance(method.covariance).spectrum is not None
    spectrum = Spectrum.of(torch.tensor([1.5, 0.5])) if needed else None
    process = method.reverse_process(
        data.network(schedule), schedule, mean_square_noise=lambda t: 0.9, spectrum=spectrum
    )
    drawn = sample(process, Trajectory.even(schedule, 10), (5, 2), noise_cap=method.noise_cap)
    assert drawn.shape == (5, 2)
    assert bool(drawn.isfinite().all())
    assert process.forward.eta == method.eta


def test_names_are_found_whatever_their_case():
    assert find_method("sn-ddim") == METHODS["SN-DDIM"]


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("SNDDIM", "did you mean SN-DDIM"),
        ("npr_ddim", "did you mean NPR-DDIM"),
        ("NPR", "did you mean NPR-DDPM, NPR-DDIM or NPR-DPM?"),
        ("unipcc", "did you mean UniPC"),
        ("euler", "did you mean Euler-Maruyama"),
        ("beta tilde", "did you mean DDPM, beta-tilde"),
        ("magic", f"take {DEFAULT_METHOD}; optcov sample --help lists them all"),
    ],
)
def test_a_mistyped_method_is_answered_by_the_nearest_names(typed, nearest):
    with pytest.raises(ValueError, match="unknown method") as refusal:
        find_method(typed)
    assert nearest in str(refusal.value)
    assert sum(name in str(refusal.value) for name in [*METHODS, *PEER_METHODS]) <= 4


def test_the_name_of_a_covariance_is_answered_by_its_methods():
    for typed, rows in (("npr_correlated", "CNPR-DDPM or CNPR-DDIM"), ("range", "Improved DDPM")):
        with pytest.raises(ValueError, match=rf"unknown method '{typed}'; did you mean {rows}\?"):
            find_method(typed)


def test_the_default_methods_are_known():
    assert find_method(DEFAULT_METHOD).solver == "bridge"
    assert METHODS[HEAD_METHOD].covariance == "npr"


def test_bad_names_and_schedules_are_named():
    with pytest.raises(ValueError, match="'SN-DPM' runs in continuous time, .* or 'SN-DDPM'"):
        METHODS["SN-DPM"].forward(Schedule.linear())
    with pytest.raises(ValueError, match=r"'Gotta Go Fast' is a solver"):
        METHODS["Gotta Go Fast"].forward(Schedule.vp_sde())


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["DDIM"]  # type: ignore[index]


def test_hand_crafted_covariances_are_sampled_without_a_noise_cap():
    assert {name for name, m in METHODS.items() if m.noise_cap is None and m.covariance} == {
        "DDPM, beta-tilde", "DDPM, beta", "DDIM", "Improved DDPM", "Ancestral sampling",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["Probability flow", "Euler-Maruyama", "Gotta Go Fast", "UniPC"])
def test_a_trajectory_that_a_solver_would_not_look_at_is_refused(name):
    method = find_method(name)
    schedule = Schedule.vp_sde() if method.continuous else Schedule.linear()
    data = GaussianMixture([1.0], [[0.0, 0.0]], [0.25])
    with pytest.raises(ValueError, match=f"{name} has times of its own; leave trajectory out"):
        draw(method, data.network(schedule), schedule, 4, (2,), range(2), trajectory=Trajectory.even(schedule, 4))
