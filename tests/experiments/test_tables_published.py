"""The paper's numbers as data: each table is there, and rows copied from its source agree."""

from __future__ import annotations

import re

import pytest

from optcov.experiments.tables import published, published_value
from optcov.experiments.tables.published import NAMES, check_setting
from optcov.methods import METHODS

# lines of the paper's source: table, setting and kind of each, as they stand there
EXCERPT = [
    ("fid", ("CIFAR10 (LS)", "CIFAR10 (CS)"), None, "DDPM, beta-tilde", r"""
44.45 & 21.83 & 15.21 & 10.94 & 8.23 & 5.11 &
34.76 & 16.18 & 11.11 & 8.38 & 6.66 & 4.92 \\"""),
    ("fid", ("CIFAR10 (LS)", "CIFAR10 (CS)"), None, "SN-DDIM", r"""
\textbf{12.19} & \textbf{4.28} & \textbf{3.39} & \textbf{3.23} & \textbf{3.22} & \textbf{3.65} &
\textbf{17.90} & \textbf{7.36} & \textbf{5.16} & \textbf{4.63} & \textbf{4.63} & \textbf{4.51} \\"""),
    ("fid", ("CelebA 64x64", "ImageNet 64x64"), None, "NPR-DDPM", r"""
28.37 & 15.74 & 10.89 & 8.23 & 7.03 & 5.33 &
28.27 & 20.89 & 18.06 & 16.96 & \textbf{16.32} & 16.38 \\"""),
    ("fid", ("CIFAR10 (VP SDE)",), None, "Euler-Maruyama", r"""
292.20 & 170.17 & 90.79 & 47.46 & 21.92 & \textbf{2.55} \\"""),
    ("bpd", ("CIFAR10 (LS)", "CIFAR10 (CS)"), "ET", "DDPM, beta", r"""
6.99 & 6.11 & 5.44 & 4.86 & 4.39 & 3.75 &
6.51 & 5.55 & 4.92 & 4.41 & 4.03 & 3.54 \\"""),
    ("bpd", ("CIFAR10 (LS)", "CIFAR10 (CS)"), "OT", "DDPM, beta", r"""
5.38 & 4.34 & 3.97 & 3.82 & 3.77 & 3.75 &
5.51 & 4.30 & 3.86 & 3.65 & 3.57 & 3.54 \\"""),
    ("bpd", ("CelebA 64x64", "ImageNet 64x64"), "OT", "NPR-DDPM", r"""
\textbf{2.88} & \textbf{2.69} & \textbf{2.66} & \textbf{2.66} & \textbf{2.65} & \textbf{2.65} &
\textbf{3.73} & \textbf{3.65} & \textbf{3.62} & \textbf{3.60} & \textbf{3.60} & \textbf{3.60} \\"""),
    ("iddpm", ("ImageNet 64x64",), None, "Improved DDPM", r"""
18.91 & 8.46 & 5.27 & 4.24 & 3.86 & 3.68 & \textbf{3.57} \\"""),
    ("normalised", ("CIFAR10 (LS)", "CIFAR10 (CS)", "CelebA 64x64", "ImageNet 64x64"), None, "SN-DDPM", r"""
\textbf{7.42} & \textbf{4.60} &
\textbf{6.15} & \textbf{4.20} &
\textbf{12.11} & \textbf{8.08} &
\textbf{29.05} & \textbf{20.80} & """),
]  # fmt: skip


@pytest.mark.parametrize(("table", "settings", "kind", "row", "source"), EXCERPT)
def test_rows_of_the_source_agree(
    table: str, settings: tuple[str, ...], kind: str | None, row: str, source: str
) -> None:
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", source)]
    found = [
        published_value(table, setting, row, K, kind)
        for setting in settings
        for K in published(table)["settings"][setting]["steps"]
    ]
    assert found == numbers


def test_costs_repeats_and_timesteps_of_the_source_agree() -> None:
    imagenet = published("cost")["settings"]["ImageNet 64x64"]
    assert imagenet["sn"] == {"megabytes": 463.47, "milliseconds": 75.56, "extra_percent": 4.5}
    assert published("repeats")["settings"]["CelebA 64x64"]["rows"]["NPR-DDPM"] == {
        "mean": 2.65257,
        "standard_deviation": 0.00113,
    }
    steps = published("timesteps")["settings"]
    assert steps["CelebA 64x64"]["SN-DPM"] == {"cost_ratio": 1.012, "steps": 22, "fid": 5.96}
    assert steps["LSUN Bedroom"]["DDIM"] == {"note": "Best FID > 6"}


@pytest.mark.parametrize("name", NAMES)
def test_every_file_names_its_source(name: str) -> None:
    assert "ICML 2022" in published(name)["source"]


@pytest.mark.parametrize("name", ["fid", "bpd", "iddpm", "normalised"])
def test_every_row_is_a_method_with_a_number_per_length(name: str) -> None:
    for setting, section in published(name)["settings"].items():
        kinds = [section["rows"]] if name != "bpd" else list(section["rows"].values())
        for row, numbers in ((row, numbers) for rows in kinds for row, numbers in rows.items()):
            assert row in METHODS, (setting, row)
            assert len(numbers) == len(section["steps"])


def test_relative_costs_are_those_of_the_times_up_to_their_last_digit() -> None:
    for setting in published("cost")["settings"].values():
        for head in ("sn", "npr"):
            extra = 100 * (setting[head]["milliseconds"] / setting["noise"]["milliseconds"] - 1)
            assert extra == pytest.approx(setting[head]["extra_percent"], abs=0.06)


def test_settings_name_schedules_and_methods_that_exist() -> None:
    content = published("settings")
    assert {s["schedule"] for s in content["settings"].values()} == {"linear", "cosine", "vp_sde"}
    assert all(panel["method"] in METHODS for figure in content["figures"] for panel in figure["panels"])


def test_settings_per_data_set_are_those_of_the_appendix() -> None:
    content = published("settings")
    common, settings = content["common"], content["settings"]
    # "AdamW ... learning rate of 0.0001 ... 500K iterations ... EMA with a rate of 0.9999 ... every 10K iterations ...
    # best FID on 1000 generated samples ... FID score on 50K generated samples"
    assert (common["optimizer"], common["learning_rate"], common["ema"]) == ("AdamW", 0.0001, 0.9999)
    assert (common["iterations"], common["checkpoint_every"], common["checkpoint_samples"]) == (500_000, 10_000, 1000)
    assert common["fid_samples"] == 50_000

    def column(key: str) -> list[object]:
        names = ("CIFAR10 (LS)", "CIFAR10 (CS)", "CelebA 64x64", "ImageNet 64x64", "LSUN Bedroom")
        return [settings[name][key] for name in names]

    # "50K samples on CIFAR10, 10K samples on CelebA 64x64 and ImageNet 64x64"; LSUN Bedroom is not in tab:bpd
    assert column("trajectory_images") == [50_000, 50_000, 10_000, 10_000, None]
    assert column("steps") == [1000, 1000, 1000, 4000, 1000]
    # "a batch size of 64 on LSUN Bedroom, and 128 on other datasets"
    assert column("batch") == [128, 128, 128, 128, 64]
    # "with full timesteps, except for LSUN Bedroom ... with 100 timesteps"
    assert column("checkpoint_steps") == [1000, 1000, 1000, 4000, 100]
    # "the full training set on CIFAR10 and ImageNet 64x64, and 50K training samples on CelebA 64x64 and LSUN Bedroom"
    assert column("reference_images") == [None, None, 50_000, None, 50_000]
    # "y=2 on CIFAR10 (LS) and CelebA 64x64 under the DDPM forward process, and y=1 for other cases"
    assert [cap["DDPM"] for cap in column("noise_cap")] == [2, 1, 2, 1, 1]  # type: ignore[index]
    assert {cap["DDIM"] for cap in column("noise_cap")} == {1}  # type: ignore[index]
    # tab:nn2
    assert [head["sn"] for head in column("head")] == ["conv"] * 3 + ["residual+conv"] * 2  # type: ignore[index]
    hours = ["32 hours on 1 GPU"] * 2 + ["72 hours on 2 GPUs", "83 hours on 2 GPUs", "171 hours on 4 GPUs"]
    assert column("training") == hours


def test_the_training_cost_normalisation_and_gotta_go_fast_of_the_source_agree() -> None:
    content = published("normalised")
    trained = content["training_normalised"]["CIFAR10 (LS)"]
    assert trained["iterations"] == {"noise": 300_000, "head": 200_000, "original": 500_000}
    assert trained["rows"] == {"NPR-DDPM": [10.56, 6.24], "SN-DDPM": [7.51, 4.64]}
    fast = content["gotta_go_fast"]["CIFAR10 (VP SDE)"]
    assert fast["evaluations"] == [29, 39, 49, 147, 179, 274, 329]
    assert fast["normalised_evaluations"] == [28, 38, 48, 145, 177, 272, 326]
    assert fast["rows"]["SN-DPM"] == [6.62, 5.21, 4.55, 2.96, 2.85, 2.67, 2.64]


def test_what_the_paper_lacks_is_none_or_refused() -> None:
    assert published_value("fid", "CIFAR10 (LS)", "SN-DDPM", 11) is None
    assert published_value("bpd", "CIFAR10 (LS)", "SN-DDPM", 10, "ET") is None
    assert published_value("fid", None, "SN-DDPM", 10) is None
    with pytest.raises(ValueError, match="no table 'figures'"):
        published("figures")
    with pytest.raises(ValueError, match="no setting 'MNIST'"):
        check_setting("MNIST")
