"""Tables on a bundle of a few thousand weights: cells computed once, resumed, searched, rendered, judged."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from class_bundles import class_bundle
from optcov import Schedule, storage
from optcov.bundle import Bundle
from optcov.data import ImageSet
from optcov.experiments.tables import (
    SIZES,
    TABLES,
    Cell,
    CellStore,
    Evaluation,
    TableImages,
    TableResult,
    TableRun,
    drawing,
    scoring,
    table_run,
)
from optcov.experiments.tables.cells import Plan, Result, read_cells, results_of
from optcov.experiments.tables.claims import Difference, judge, row_differences
from optcov.experiments.tables.distances import distance_entry, distance_notes
from optcov.experiments.tables.likelihoods import repeats_cells, repeats_plan
from optcov.experiments.tables.normalised import baseline_steps, normalised_steps
from optcov.experiments.tables.render import comma_separated, latex, markdown, section_title, write_table
from optcov.experiments.tables.result import Entry, Row, Section
from optcov.experiments.tables.timesteps import search_steps
from optcov.metrics import Extractor, FeatureStatistics, features_of, find_extractor, measure_kernel
from optcov.metrics.extractors import _Inception
from optcov.metrics.kernel import KernelSide
from optcov.metrics.sources import Drawing
from optcov.solvers import PEERS
from small_bundles import SHAPE, save_with_images, small_bundle, small_head

TINY = replace(
    SIZES["quick"],
    steps=(3, 4),
    samples=8,
    reference_images=0,
    likelihood_steps=(3, 5),
    images=4,
    train_images=4,
    times=8,
    repeats=2,
    search_limit=6,
    target_steps=3,
    timing_rounds=2,
)
FEATURES = Extractor(lambda images: images.flatten(1)[:, :3].double() / 255, "FD-test")


def evaluation(bundle: Bundle | None = None, **options: object) -> Evaluation:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, *SHAPE), generator=generator, dtype=torch.uint8)
    parts = [ImageSet(part, None, "noise") for part in pixels.split(12)]
    images = TableImages(parts[0], parts[1], parts[0], "noise")
    settings: dict[str, object] = {"schedules": ("linear", "vp_sde"), "batch_size": 8, **options}
    return Evaluation(bundle or small_bundle(), images, FEATURES, TINY, **settings)  # type: ignore[arg-type]


def drained(run: TableRun[TableResult]) -> TableResult:
    for _ in run:
        pass
    return run.table


def counting(calls: list[str], fail_at: int | None = None):  # type: ignore[no-untyped-def]
    def compute(cell: Cell, scratch: Path) -> Generator[float, None, Result]:
        calls.append(cell.label)
        if len(calls) == fail_at:
            raise RuntimeError("stopped")
        yield 0.5
        return {"number": cell.settings["number"]}

    return compute


def plan_of(numbers: list[int]) -> Plan[int]:
    results = yield from results_of(
        {number: Cell("test", {"number": number}, 1.0, f"cell {number}") for number in numbers}
    )
    return sum(result["number"] for result in results.values())


def test_the_full_size_chooses_trajectories_on_as_many_images_as_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = {"CIFAR10 (LS)": 7, "LSUN Bedroom": 5}
    monkeypatch.setattr("optcov.experiments.tables.evaluation.paper_images", lambda setting, use: paper.get(setting))
    for setting, wanted in ((None, 7), ("LSUN Bedroom", 5), ("CelebA 64x64", 12)):  # 12 training images in all
        tables = evaluation(paper=setting)
        tables.size = replace(tables.size, train_images=SIZES["full"].train_images)
        assert tables.likelihood_cell("linear").settings["train_images"] == wanted


def test_the_full_size_takes_the_papers_steps_reference_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SIZES["full"]
    size = replace(TINY, steps=full.steps, reference_images=full.reference_images, images=full.images)
    monkeypatch.setattr("test_tables.TINY", size)
    assert evaluation().distance_steps("linear") == [10, 25, 50, 100, 200, 1000]
    imagenet = evaluation(small_bundle(Schedule.linear(4000)), schedules=None, paper="ImageNet 64x64")
    assert imagenet.distance_steps("own") == [25, 50, 100, 200, 400, 4000]
    of_paper = {("CelebA 64x64", "reference_images"): 7}
    monkeypatch.setattr("optcov.experiments.tables.evaluation.paper_images", lambda *asked: of_paper.get(asked))
    assert evaluation(paper="CelebA 64x64").reference.name.startswith("7 training images")
    assert evaluation().reference.name.startswith("12 training images")
    monkeypatch.setattr("optcov.experiments.tables.evaluation.published", lambda name: {"images": 5})
    assert evaluation().likelihood_cell("linear", seed=1).settings["images"] == 5
    assert evaluation().likelihood_cell("linear").settings["images"] == 12


def test_repeats_take_the_seeds_behind_the_one_that_is_given() -> None:
    for seed in (0, 7):
        cells = repeats_cells(evaluation(seed=seed, schedules=("linear",)))
        assert [cell.settings["noise_seed"] for cell in cells.values()] == [seed + 1, seed + 2]


def test_a_reference_that_is_drawn_shares_no_noise_with_the_rows(tmp_path: Path) -> None:
    source = f"{save_with_images(tmp_path, Schedule.linear(24)) / 'small'}:DDIM"
    rows = features_of(source, FEATURES, Drawing(samples=500))
    drawn = evaluation(reference=source).reference.features(FEATURES)
    assert isinstance(rows, torch.Tensor)
    assert isinstance(drawn, torch.Tensor)
    drawn = drawn[: len(rows)]
    assert drawn.shape == rows.shape
    assert not torch.equal(drawn, rows)
    assert abs(float(torch.corrcoef(torch.stack([drawn[:, 0], rows[:, 0]]))[0, 1])) < 0.18  # 4 standard errors


def test_images_of_a_table_get_the_channels_of_the_network(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", train=np.zeros((3, 8, 8), np.uint8), test=np.zeros((2, 8, 8), np.uint8))
    images = TableImages.load(str(tmp_path / "grey.npz"), "small", 3)
    assert images.train.shape == images.test.shape == images.reference.shape == (3, 8, 8)


def test_images_of_a_source_sorted_by_class_are_mixed(tmp_path: Path) -> None:
    pixels = torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, *SHAPE)
    np.savez(tmp_path / "sorted.npz", train=pixels.numpy(), test=pixels.numpy())
    images = TableImages.load(str(tmp_path / "sorted.npz"), "small")
    for part in (images.train, images.test, images.reference):
        values = part.images[:, 0, 0, 0]
        assert values.sort().values.tolist() == list(range(100))
        assert 30 < float(values[:25].double().mean()) < 70  # 12 if they were sorted


def test_many_images_count_as_exact_wherever_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcov.experiments.tables.reference.EXACT", 12)
    here = evaluation()
    np.save(tmp_path / "same.npy", here.images.reference.images.numpy())
    named = evaluation(reference=str(tmp_path / "same.npy"))
    for work in (here, named):
        assert isinstance(work.reference.features(FEATURES), FeatureStatistics)
    monkeypatch.setattr("optcov.experiments.tables.reference.EXACT", 13)
    for work in (here, named):
        assert isinstance(work.reference.features(FEATURES), torch.Tensor)


def test_a_small_reference_that_is_named_is_mixed(tmp_path: Path) -> None:
    pixels = torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, *SHAPE)
    np.save(tmp_path / "sorted.npy", pixels.numpy())
    found = evaluation(reference=str(tmp_path / "sorted.npy")).reference.features(FEATURES)
    assert isinstance(found, torch.Tensor)
    values = found[:, 0]
    assert values.sort().values.tolist() == pytest.approx([n / 255 for n in range(100)])
    assert 30 < 255 * float(values[:25].mean()) < 70  # 12 if they were sorted


def test_costs_of_two_devices_are_two_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    here = evaluation().cost_cell()
    assert here.settings["device"] == "cpu"
    monkeypatch.setattr("optcov.experiments.tables.evaluation.device_name", lambda device: "another")
    assert evaluation().cost_cell().key != here.key


def test_data_that_are_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"draws data in \(0.0, 1.0\); images need the range"):
        evaluation(replace(small_bundle(), data_range=(0.0, 1.0)))


def test_another_module_under_the_same_name_is_another_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        monkeypatch.setattr("test_tables.FEATURES", Extractor(module, "FD-mine"))
        keys.append(evaluation().distance_cell("linear", "DDIM", 3).key)
    assert keys[0] != keys[1]
    pools = [Extractor(torch.nn.Sequential(torch.nn.MaxPool2d(n), torch.nn.Flatten()), "FD-mine") for n in (1, 2)]
    assert pools[0].identity != pools[1].identity
    with pytest.raises(ValueError, match="has no weights yet; call it once before"):
        _ = Extractor(torch.nn.LazyLinear(2), "FD-mine").identity


def test_kid_is_measured_beside_fid_and_no_other_distance(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Pixels(_Inception):
        def __init__(self) -> None: ...

        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images.flatten(1)[:, :3].double() / 255)
            return seen[-1]

    work = evaluation()
    cell = work.distance_cell("linear", "DDIM", 2)
    assert "kernel" not in _exhaust(work.compute(cell, tmp_path / "other"))
    work = evaluation()
    work._extractor = Extractor(Pixels(), "FID")
    found = _exhaust(work.compute(cell, tmp_path / "fid"))
    drawn, reference = torch.cat(seen)[-work.size.samples :], work.reference_features
    assert isinstance(reference, torch.Tensor)
    expected = measure_kernel(KernelSide.of(drawn, mix=False), reference)
    assert found["kernel"]["value"] == pytest.approx(expected.value)
    assert found["kernel"]["standard_error"] == pytest.approx(expected.standard_error)


def test_fid_of_as_many_samples_as_the_papers_is_not_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"name": "FID", "value": 3.6, "limit": 3.1, "standard_error": 0.1}
    assert distance_entry({**result, "samples": 50_000}).value == 3.6
    assert distance_entry({**result, "samples": 49_999}).value == 3.1
    assert distance_entry({**result, "name": "FD-mine", "samples": 50_000}).value == 3.1
    work = evaluation()
    inception = object.__new__(_Inception)
    work._extractor = Extractor(inception, "FID")
    assert any("50,000 samples, and not extrapolated" in note for note in distance_notes(work))
    assert any("of other networks" in note for note in distance_notes(work))
    work.size = replace(work.size, samples=50_000)
    assert distance_notes(work)[0].startswith("FID is of 50000 samples")
    monkeypatch.setattr("optcov.experiments.tables.evaluation.SOURCES", {work.bundle.name: None})
    assert not any("of other networks" in note for note in distance_notes(work))


@pytest.mark.parametrize("method", ["UniPC", "DDIM"])
def test_rows_that_bpd_lacks_are_refused_before_the_sweep(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=f"{method} is no row of this table; choose among: DDPM, beta-tilde"):
        drained(table_run("bpd", evaluation(methods=[method, "NPR-DDPM"]), tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("table", "methods"), [("bpd", ["SN-DDPM"]), ("fid", ["SN-DDPM"]), ("peers", ["SN-DDIM"]), ("normalised", None)]
)
def test_rows_that_the_bundle_cannot_run_are_refused_before_the_work(
    tmp_path: Path, table: str, methods: list[str] | None
) -> None:
    bare = replace(small_bundle(), network=small_bundle().network.with_only_heads("npr" if methods else "none"))
    bare = bare if methods else replace(bare, numbers=None)
    with pytest.raises(ValueError, match="no head 'sn'" if methods else "numbers per time"):
        drained(table_run(table, evaluation(bare, methods=methods), tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_cost_of_a_schedule_with_an_odd_number_of_times_is_measured(tmp_path: Path) -> None:
    odd = small_bundle(Schedule.from_betas([0.1] * 25))
    assert drained(table_run("cost", evaluation(odd, schedules=None), tmp_path)).sections[0].rows


def test_features_of_another_shape_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="small has .*; choose other features, such as --features lite0"):
        Evaluation(small_bundle(), evaluation().images, find_extractor("fashion"), TINY)


def test_a_stopped_run_goes_on_and_computes_each_cell_once(tmp_path: Path) -> None:
    store, calls = CellStore(tmp_path, "fid"), []
    run = TableRun(plan_of([1, 2, 3]), 3.0, store, counting(calls, fail_at=3))
    with pytest.raises(RuntimeError, match="stopped"):
        list(run)
    with pytest.raises(ValueError, match="not finished"):
        _ = run.table
    again = TableRun(plan_of([1, 2, 3]), 3.0, store, counting(calls))
    last = list(again)[-1]
    assert again.table == 6
    assert calls == ["cell 1", "cell 2", "cell 3", "cell 3"]
    assert (last.found, last.computed, last.done) == (2, 1, 3.0)


def test_two_runs_of_one_directory_share_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcov.experiments.tables.cells.WAIT", 0.0)
    calls: tuple[list[str], list[str]] = ([], [])
    runs = [TableRun(plan_of([1, 2, 3]), 3.0, CellStore(tmp_path, "fid"), counting(mine)) for mine in calls]
    steps = [iter(run) for run in runs]
    next(steps[0])  # is at cell 1, and holds it
    other = [next(steps[1]).label for _ in range(4)]
    assert other == ["cell 2", "cell 2", "cell 3", "cell 3"]
    for iterator in steps:
        list(iterator)
    assert calls == (["cell 1"], ["cell 2", "cell 3"])
    assert [run.table for run in runs] == [6, 6]
    assert not list((tmp_path / "scratch").iterdir())


def test_progress_counts_the_work_that_is_done(tmp_path: Path) -> None:
    run = TableRun(plan_of([1, 2]), 2.0, CellStore(tmp_path, "fid"), counting([]))
    assert [step.done for step in run] == [0.5, 1.0, 1.5, 2.0]


def test_a_cell_is_found_by_its_settings_alone(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path, "fid"), Cell("test", {"number": 1, "times": (1, 2)}, 1.0, "a")
    store.put(cell, {"x": 1}, 0.1)
    assert store.get(replace(cell, label="b", work=5.0)) == {"x": 1}
    assert store.get(replace(cell, settings={"number": 2, "times": (1, 2)})) is None


def test_a_file_holds_the_cells_of_a_table_in_order_whoever_adds_to_it(tmp_path: Path) -> None:
    stores = [CellStore(tmp_path, "fid"), CellStore(tmp_path, "fid"), CellStore(tmp_path, "peers")]
    cells = [Cell("test", {"number": number}, 1.0, f"cell {number}") for number in (3, 1, 2)]
    for store, cell in zip(stores, cells, strict=True):
        store.put(cell, dict(cell.settings), 0.1)
    for store in stores:
        assert [store.get(cell) for cell in cells] == [cell.settings for cell in cells]
    lines = [json.loads(line) for line in (tmp_path / "fid.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == ["cell 1", "cell 3"]
    assert list(read_cells(tmp_path / "peers.jsonl")) == [cells[2].key]


def test_a_store_that_is_killed_while_it_writes_keeps_what_it_had(tmp_path: Path) -> None:
    store, cells = CellStore(tmp_path, "fid"), [Cell("test", {"number": n}, 1.0, f"cell {n}") for n in (1, 2)]
    store.put(cells[0], {"x": 1}, 0.1)
    left = tmp_path / ".fid.jsonl.nxlah6yv.part"
    left.write_text('{"key": "half')
    again = CellStore(tmp_path, "fid")
    assert [again.get(cell) for cell in cells] == [{"x": 1}, None]
    again.put(cells[1], {"x": 2}, 0.1)
    assert not left.exists()
    assert [store.get(cell) for cell in cells] == [{"x": 1}, {"x": 2}]


def test_a_line_that_is_not_the_record_of_a_cell_is_refused(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path, "fid"), Cell("test", {"number": 1}, 1.0, "a")
    store.put(cell, {"value": 0.1}, 0.1)
    whole = store.path.read_text()
    record = json.loads(whole)
    other = {**record, "settings": {"number": 2}}
    wrong = [({**record, "result": []}, "is not the record"), ([], "is not the record"), (other, "has the key of")]
    for line, fault in [*((json.dumps(found), fault) for found, fault in wrong), (whole[:-20], "is not JSON")]:
        store.path.write_text(f"{whole}{line}\n")
        with pytest.raises(storage.StorageError, match=f"line 2 of .*fid.jsonl {fault}.*; remove it to compute"):
            store.get(cell)


def test_a_number_that_was_changed_on_disk_is_refused(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path, "fid"), Cell("test", {"number": 1}, 1.0, "a")
    store.put(cell, {"value": 0.1, "by_length": {10: (1, 2.5)}}, 0.1)
    assert store.get(cell) == {"value": 0.1, "by_length": {"10": [1, 2.5]}}
    record = json.loads(store.path.read_text())
    for result in ({}, {**record["result"], "value": 0.7}):
        store.path.write_text(json.dumps({**record, "result": result}) + "\n")
        with pytest.raises(storage.StorageError, match=r"line 1 of .*fid.jsonl was changed after it was written"):
            store.get(cell)


@pytest.fixture(scope="module")
def fid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TableResult]:
    directory = tmp_path_factory.mktemp("tables")
    return directory, drained(table_run("fid", evaluation(), directory))


def test_fid_has_every_row_and_the_papers_numbers(fid: tuple[Path, TableResult]) -> None:
    _, result = fid
    discrete, continuous = result.sections
    assert [row.name for row in discrete.rows][-4:] == ["DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM"]
    assert [row.name for row in continuous.rows][:2] == ["Euler-Maruyama", "Ancestral sampling"]
    assert all(e.value is not None and e.error is not None for s in result.sections for r in s.rows for e in r.entries)
    assert all(len(e.details["replicates"][0]) == 4 for s in result.sections for r in s.rows for e in r.entries)
    assert (discrete.paper_setting, continuous.paper_setting) == ("CIFAR10 (LS)", "CIFAR10 (VP SDE)")
    for section in result.sections:
        for group in {row.group for row in section.rows}:
            for column in range(2):
                entries = [row.entries[column] for row in section.rows if row.group == group]
                assert {e.value for e in entries if e.best} == {min(e.value for e in entries if e.value is not None)}


def test_an_interrupted_cell_ends_with_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcov.experiments.tables.drawing.SAVE_EVERY", 0.0)
    work = evaluation(batch_size=4)
    cell = work.distance_cell("linear", "SN-DDIM", 3)
    whole = _exhaust(work.compute(cell, tmp_path / "whole"))
    parts = work.compute(cell, tmp_path / "part")
    next(parts)
    parts.close()  # after the first of two batches, which is on disk
    assert (tmp_path / "part.safetensors").exists()
    fresh = work.compute(cell, tmp_path / "part")
    assert next(fresh) == 1.0
    assert _exhaust(fresh) == whole


def test_damaged_parts_of_a_cell_are_refused_with_a_remedy(tmp_path: Path) -> None:
    work, path = evaluation(), tmp_path / "part.safetensors"
    cell = work.distance_cell("linear", "SN-DDIM", 3)
    for tensors in ({"x": torch.zeros(3)}, {"features": torch.zeros(2, 3), "evaluations": torch.zeros(3)}):
        storage.write_tensors(path, tensors)
        with pytest.raises(storage.StorageError, match="holds no parts of a distance; remove it"):
            next(work.compute(cell, tmp_path / "part"))
    path.write_bytes(b"nothing")
    with pytest.raises(storage.StorageError, match="remove it to draw its images again"):
        next(work.compute(cell, tmp_path / "part"))


def test_tables_share_cells_in_a_directory(fid: tuple[Path, TableResult]) -> None:
    directory, _ = fid
    run = table_run("peers", evaluation(), directory)
    last = list(run)[-1]
    assert last.found == 12  # six rows of the paper at two lengths
    computed = 2 * len(PEERS) - 1  # diffusers' at two lengths, of which one cannot do 3 steps of 1000
    assert last.computed == computed + 2  # and Bridge 2M
    assert {row.group for row in run.table.sections[0].rows} == {"ours", "diffusers"}


def test_rows_and_steps_can_be_chosen_and_keep_their_cells(fid: tuple[Path, TableResult]) -> None:
    directory, whole = fid
    run = table_run("fid", evaluation(methods=["sn-ddim", "SN-DPM", "Euler-Maruyama"], steps=[4]), directory)
    assert list(run)[-1].computed == 0
    discrete, continuous = run.table.sections
    assert [row.name for row in (*discrete.rows, *continuous.rows)] == ["SN-DDIM", "Euler-Maruyama", "SN-DPM"]
    assert discrete.columns == ("K = 4",)
    wanted = next(row for row in whole.sections[0].rows if row.name == "SN-DDIM").entries[1]
    assert discrete.rows[0].entries[0].value == wanted.value
    with pytest.raises(ValueError, match="unknown method 'SN'; did you mean SN-DDPM"):
        evaluation(methods=["SN"])
    with pytest.raises(ValueError, match="Improved DDPM is no row of this table; choose among: DDPM, beta-tilde"):
        table_run("fid", evaluation(methods=["SN-DDIM", "Improved DDPM"]), directory)


def test_a_choice_of_bpd_rows_does_not_sweep_again(tmp_path: Path) -> None:
    drained(table_run("bpd", evaluation(), tmp_path))
    run = table_run("bpd", evaluation(methods=["NPR-DDPM", "isotropic NPR-DDPM"], steps=[5]), tmp_path)
    assert list(run)[-1].computed == 0
    (section,) = run.table.sections
    assert section.columns == ("K = 5",)
    assert [row.name for row in section.rows if row.group == "OT"] == ["OT isotropic NPR-DDPM", "OT NPR-DDPM"]
    with pytest.raises(ValueError, match="K = 9 cannot be scored on 8 times"):
        drained(table_run("bpd", evaluation(steps=[5, 9]), tmp_path))


def test_steps_that_a_schedule_lacks_are_refused_if_asked_for_and_dropped_if_usual(tmp_path: Path) -> None:
    short = small_bundle(Schedule.from_betas([0.3] * 3))
    assert evaluation(short, schedules=None).distance_steps("own") == [3]  # of 3 and 4
    for steps, wrong in (([3, 4], 4), ([1], 1), ([-5, 3], -5)):
        with pytest.raises(ValueError, match=f"K = {wrong} cannot be drawn by the 3 times of own"):
            table_run("fid", evaluation(short, schedules=None, steps=steps), tmp_path)
    with pytest.raises(ValueError, match="K = 3 cannot be drawn by the 2 times"):
        table_run("fid", evaluation(small_bundle(Schedule.from_betas([0.3] * 2)), schedules=None), tmp_path)


def test_the_papers_own_networks_are_put_beside_its_numbers(tmp_path: Path) -> None:
    discrete = small_bundle(Schedule.linear(24))
    assert evaluation(discrete, schedules=None).paper_setting("own") is None
    assert evaluation(replace(discrete, name="celeba64"), schedules=None).paper_setting("own") == "CelebA 64x64"


def test_a_reference_that_cannot_be_compared_is_refused_before_images_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optcov.experiments.tables.drawing.Sampler.draw", None)
    for dimension, sign, reason in ((5, 1, "3 and of 5 dimensions"), (3, -1, "3.npz: this is no covariance")):
        path = tmp_path / f"{dimension}.npz"
        FeatureStatistics(torch.zeros(dimension).double(), sign * torch.eye(dimension).double(), 9).save(path)
        with pytest.raises(ValueError, match=reason):
            drained(table_run("fid", evaluation(reference=str(path)), tmp_path / "out"))


def test_another_content_of_the_reference_is_another_cell(tmp_path: Path) -> None:
    path, keys = tmp_path / "reference.npz", set()
    for scale in (1.0, 2.0, 2.0):
        FeatureStatistics(torch.zeros(3).double(), scale * torch.eye(3).double(), 9).save(path)
        keys.add(evaluation(reference=str(path)).distance_cell("linear", "DDIM", 3).key)
    assert len(keys) == 2


def test_another_content_of_a_directory_of_reference_is_another_cell(tmp_path: Path) -> None:
    keys, png = [], tmp_path / "images" / "a" / "1.png"
    for bundle in (small_bundle(), small_bundle(Schedule.linear(24))):
        for content in (b"one", b"two", b"two"):
            storage.write_bytes(png, content)
            bundle.save(tmp_path / "small")
            sources = (tmp_path / "images", f"{tmp_path / 'small'}:DDIM")
            keys.append([evaluation(reference=str(s)).distance_cell("linear", "DDIM", 3).key for s in sources])
    by_images, by_bundle = zip(*keys, strict=True)
    assert [by_images.index(key) for key in by_images] == [0, 1, 1, 0, 1, 1]
    assert [by_bundle.index(key) for key in by_bundle] == [0, 0, 0, 3, 3, 3]


def test_an_embedded_model_as_reference_is_known_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optcov.bundle.loading._models", lambda: tmp_path)
    keys = []
    for bundle in (small_bundle(), small_bundle(Schedule.linear(24)), small_bundle()):
        bundle.save(tmp_path / "small")
        keys.append(evaluation(reference="small:DDIM").distance_cell("linear", "DDIM", 3).key)
    assert [keys.index(key) for key in keys] == [0, 1, 0]


def test_optimal_trajectories_of_bpd_are_sampled_along(tmp_path: Path) -> None:
    chosen = {"methods": ["NPR-DDPM", "NPR-DDIM"], "schedules": ("linear",), "steps": [3]}
    bounds = drained(table_run("bpd", evaluation(**{**chosen, "methods": ["NPR-DDPM"]}), tmp_path))
    run = table_run("fid", evaluation(**chosen), tmp_path, optimal=True)
    last = list(run)[-1]
    assert last.found == 1  # the sweeps
    assert last.done == last.total
    rows = {row.name: row.entries[0] for row in run.table.sections[0].rows}
    assert list(rows) == ["NPR-DDPM", "NPR-DDPM, OT", "NPR-DDIM"]
    times = next(row for row in bounds.sections[0].rows if row.name == "OT NPR-DDPM").entries[0].details["times"]
    stored = read_cells(tmp_path / "fid.jsonl").values()
    assert times in [record["settings"]["times"] for record in stored]
    assert run.table.claims[-1].statement == "optimal trajectories do not help the distance of samples"


def test_rows_of_the_vp_sde_step_as_the_papers_do() -> None:
    conventions = {
        name: evaluation().distance_cell("vp_sde", name, 3).settings["convention"]
        for name in ("Euler-Maruyama", "Probability flow", "SN-DPM")
    }
    assert conventions == {"Euler-Maruyama": "score_sde", "Probability flow": "score_sde", "SN-DPM": "exact"}


def test_another_model_does_not_find_the_cells_of_the_first(tmp_path: Path) -> None:
    first = evaluation().distance_cell("linear", "DDIM", 3)
    bundle = small_bundle()
    other = evaluation(bundle.with_heads({"sn": small_head(7)}, bundle.fingerprint)).distance_cell("linear", "DDIM", 3)
    assert first.key != other.key


def test_bpd_scores_both_kinds_and_judges_the_claims(tmp_path: Path) -> None:
    result = drained(table_run("bpd", evaluation(), tmp_path))
    (section,) = result.sections
    names = [row.name for row in section.rows]
    assert "ET NPR-DDPM" in names
    assert "OT A-DDPM" in names
    assert section.columns == ("K = 3", "K = 5")
    assert any("optimal trajectories" in claim.statement for claim in result.claims)
    assert any("of other networks" in note for note in result.notes)
    npr = next(row for row in section.rows if row.name == "OT NPR-DDPM")
    assert len(npr.entries[0].details["times"]) == 3
    assert not list((tmp_path / "scratch").glob("*"))


def test_a_trajectory_through_all_times_is_no_evidence_on_optimal_ones(tmp_path: Path) -> None:
    result = drained(table_run("bpd", evaluation(steps=[5, 8]), tmp_path))
    (claim,) = (claim for claim in result.claims if claim.statement.startswith("optimal trajectories"))
    assert "K = 5" in claim.evidence
    assert "K = 8" not in claim.evidence  # of eight times all eight: even and optimal are one


def test_iddpm_reuses_the_cells_of_bpd_and_needs_its_head(tmp_path: Path) -> None:
    bundle = small_bundle()
    ranged = bundle.with_heads({"range": small_head(5)}, bundle.fingerprint)
    drained(table_run("bpd", evaluation(ranged), tmp_path))
    run = table_run("iddpm", evaluation(ranged), tmp_path)
    assert list(run)[-1].computed == 0
    assert [row.name for row in run.table.sections[0].rows] == ["ET NPR-DDPM", "ET Improved DDPM"]
    with pytest.raises(ValueError, match="no head 'range'"):
        drained(table_run("iddpm", evaluation(), tmp_path))


def test_repeats_report_the_spread_over_seeds(tmp_path: Path) -> None:
    result = drained(table_run("repeats", evaluation(), tmp_path))
    for row in result.sections[0].rows:
        (entry,) = row.entries
        runs = entry.details["runs"]
        assert len(runs) == 2
        assert entry.value == pytest.approx(sum(runs) / 2)
        assert entry.error == pytest.approx(abs(runs[0] - runs[1]) / 2**0.5)
        assert entry.paper_text is None  # the paper has all 1000 times, this size 8


def test_repeats_of_fewer_times_do_not_call_them_full(tmp_path: Path) -> None:
    for schedule in ("linear", "vp_sde"):
        (claim,) = drained(table_run("repeats", evaluation(schedules=(schedule,)), tmp_path)).claims
        assert claim.statement.endswith("at K = 8, not the full timesteps")


def test_repeats_at_full_timesteps_stand_beside_the_papers_deviation(tmp_path: Path) -> None:
    work = evaluation(schedules=("linear",))
    cells = {("linear", seed): Cell("test", {"seed": seed, "times": 1000}, 1.0, "") for seed in (1, 2)}
    cells = {key: replace(c, settings={**c.settings, "images": 4, "train_images": 0}) for key, c in cells.items()}
    plan = repeats_plan(work, cells)
    next(plan)
    row = {"covariance": "npr", "K": 1000, "bits_per_dim": {"mean": 3.5}}
    with pytest.raises(StopIteration) as stopped:
        plan.send({cell.key: {"rows": [row]} for cell in cells.values()})
    table = stopped.value.value
    assert table.sections[0].rows[1].entries[0].paper_text == "3.57204 ± 0.00039"
    assert "3.57204 ± 0.00039" in comma_separated(table)


def test_cost_counts_the_weights_of_each_head(tmp_path: Path) -> None:
    bundle = small_bundle()
    result = drained(table_run("cost", evaluation(bundle), tmp_path))
    sizes = {row.name: row.entries[0].value for row in result.sections[0].rows}
    weights = sum(p.numel() for p in bundle.unet.parameters())
    assert sizes["noise alone"] == pytest.approx(4 * weights / 2**20)
    head = sum(p.numel() for p in bundle.heads["npr"].parameters())
    assert sizes["noise and npr"] == pytest.approx(4 * (weights + head) / 2**20)


@pytest.mark.parametrize("least", [2, 3, 7, 10, 11, 25, 40, 41])
@pytest.mark.parametrize("start", [2, 10, 40])
def test_the_search_finds_the_least_steps_in_few_trials(least: int, start: int) -> None:
    search = search_steps(start, 40)
    trials = [next(search)]
    with pytest.raises(StopIteration) as stopped:  # noqa: PT012
        while True:
            trials.append(search.send(least <= trials[-1]))
    assert stopped.value.value == (least if least <= 40 else None)
    assert len(trials) == len(set(trials)) <= 10


def test_timesteps_searches_each_method(tmp_path: Path) -> None:
    result = drained(table_run("timesteps", evaluation(schedules=("linear",)), tmp_path))
    rows = {row.name: row.entries[0] for row in result.sections[0].rows}
    assert rows["Improved DDPM"].text == "-"  # the bundle has no such head
    assert rows["Analytic-DPM"].details["steps"] <= 3  # which set the target
    assert rows["SN-DPM"].paper_text == "1.005×17, FID 5.81"
    assert {claim.holds for claim in result.claims} == {None}  # a number of steps has no error to judge it by


def test_timesteps_puts_only_the_papers_own_schedule_beside_ours(tmp_path: Path) -> None:
    other = drained(
        table_run("timesteps", evaluation(schedules=("linear",), paper="CIFAR10 (CS)"), tmp_path, target=1e9)
    ).sections[0]
    assert other.paper_setting is None
    assert {row.entries[0].paper_text for row in other.rows} == {None}


def test_timesteps_aims_at_what_the_searched_process_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def found_nothing(*arguments: object) -> Plan[None]:
        asked.append(arguments)
        yield from ()

    monkeypatch.setattr("optcov.experiments.tables.timesteps._search", found_nothing)
    for paper, method in (("CIFAR10 (LS)", "A-DDIM"), ("LSUN Bedroom", "A-DDPM")):
        asked.clear()
        work = evaluation(schedules=("linear",), paper=paper)
        drained(table_run("timesteps", work, tmp_path))
        reached = CellStore(tmp_path, "fid").get(work.distance_cell("linear", method, 3))
        assert reached is not None
        assert asked[0][3] == reached["limit"]


def test_timesteps_finds_what_fid_has_drawn(fid: tuple[Path, TableResult]) -> None:
    directory, _ = fid
    run = table_run("timesteps", evaluation(schedules=("linear",)), directory, target=1e9)
    assert list(run)[-1].found >= 5  # every method starts at K = 3, which lies there
    assert [row.entries[0].details["steps"] for row in run.table.sections[0].rows if row.entries[0].value] == [2] * 5


def test_timesteps_searches_no_further_than_the_schedule(tmp_path: Path) -> None:
    short = evaluation(small_bundle(Schedule.from_betas([0.3] * 4)), schedules=None)
    result = drained(table_run("timesteps", short, tmp_path, target=1e-9))
    assert {row.entries[0].text for row in result.sections[0].rows} == {"-", "> 4"}
    for target in (float("nan"), -1.0, 0.0):
        with pytest.raises(ValueError, match="cannot be reached; give a positive distance"):
            drained(table_run("timesteps", short, tmp_path, target=target))


@pytest.mark.parametrize(
    ("steps", "ratio", "expected"),
    [
        (25, 1.005, 24),
        (50, 1.015, 49),
        (25, 1.045, 23),
        (50, 1.045, 47),
        (29, 1.007, 28),
        (329, 1.007, 326),
        (25, 1, 24),
    ],
)
def test_normalised_steps_are_the_papers(steps: int, ratio: float, expected: int) -> None:
    assert normalised_steps(steps, ratio) == expected
    assert expected * ratio < steps <= (expected + 1) * ratio


def test_normalised_has_gotta_go_fast_at_its_own_evaluations(fid: tuple[Path, TableResult]) -> None:
    directory, _ = fid
    result = drained(table_run("normalised", evaluation(), directory))
    assert [section.heading for section in result.sections] == ["linear", "vp_sde", "vp_sde, beside Gotta Go Fast"]
    fast = result.sections[-1].rows[0].entries[0]
    assert result.sections[-1].columns == (f"NFE = {fast.details['evaluations']:.0f}",)
    assert "Gotta Go Fast 247.79, 116.91" in result.notes[-1]


@pytest.mark.parametrize("name", ["normalised", "timesteps"])
def test_tables_that_count_the_cost_of_heads_say_how_well_it_is_known(fid: tuple[Path, TableResult], name: str) -> None:
    result = drained(table_run(name, evaluation(schedules=("linear",)), fid[0]))
    (note,) = (note for note in result.notes if "Time of an evaluation" in note)
    assert re.search(r"npr \d+\.\d{3} ± \d+\.\d{3}", note)


def test_normalised_takes_every_number_of_steps_that_is_asked_for() -> None:
    assert baseline_steps(evaluation(steps=[10, 25, 100]), "linear") == [10, 25, 100]
    work = evaluation()
    work.size = SIZES["middle"]
    assert baseline_steps(work, "linear") == [25, 50]


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_normalised_leaves_out_what_would_not_take_less_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    monkeypatch.setattr("optcov.experiments.tables.normalised.cost_ratio", lambda cost, method: ratio)
    result = drained(table_run("normalised", evaluation(schedules=("linear",), steps=[2, 3]), tmp_path))
    rows = {row.name: [entry.value for entry in row.entries] for row in result.sections[0].rows}
    assert None not in rows["A-DDPM"]
    assert rows["NPR-DDPM"][0] is None  # one step would be too few, and two take as long
    assert (rows["NPR-DDPM"][1] is None) == (ratio == 2)


def test_normalised_stands_beside_the_papers_numbers_where_it_has_any(tmp_path: Path) -> None:
    for setting, expected in ((None, [11.57, 10.88, 7.94]), ("CelebA 64x64", [None] * 3)):  # which is of DDPM alone
        chosen = evaluation(schedules=("vp_sde",), steps=[25], paper=setting)
        result = drained(table_run("normalised", chosen, tmp_path))
        assert [row.entries[0].paper for row in result.sections[0].rows] == expected


def test_rows_that_need_a_missing_head_say_so(tmp_path: Path) -> None:
    bundle = small_bundle()
    plain = replace(bundle, network=type(bundle.network)(bundle.network.backbone, bundle.schedule))
    result = drained(table_run("fid", evaluation(plain, schedules=("linear",)), tmp_path))
    entry = next(row for row in result.sections[0].rows if row.name == "SN-DDPM").entries[0]
    assert entry.value is None
    assert "no head 'sn'" in entry.details["reason"]


def test_rows_of_solvers_that_a_schedule_does_not_allow_say_so(tmp_path: Path) -> None:
    result = drained(table_run("fid", evaluation(small_bundle(Schedule.edm()), schedules=None), tmp_path))
    rows = {row.name: row.entries[0] for row in result.sections[0].rows}
    assert [name for name, entry in rows.items() if entry.value is None] == ["Euler-Maruyama", "Probability flow"]
    assert "reverses the VP SDE" in rows["Euler-Maruyama"].details["reason"]


def test_images_of_another_shape_are_refused() -> None:
    images = ImageSet(torch.zeros(4, 1, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="has images of shape"):
        Evaluation(small_bundle(), TableImages(images, images, images, "black"), FEATURES, TINY)


def test_unknown_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"choose one of {', '.join(TABLES)}"):
        table_run("figures", evaluation(), tmp_path)


def _example() -> TableResult:
    rows = (
        Row("DDPM, beta", (Entry(2.0, 0.5, 3.04), Entry(5.0, None)), "DDPM"),
        Row("SN_DDPM", (Entry(1.0, 0.25, 3.65), Entry(text="-")), "DDPM"),
    )
    section = Section("linear", ("K = 10", "K = 25 %"), rows, "CIFAR10 (LS)").with_best()
    claim = judge("less is more", [Difference("K = 10", -1.0, 0.1)])
    return TableResult("fid", "Title", "FID", (section,), ("A note.",), (claim,), {"command": "optcov table fid"})


def test_markdown_has_the_best_in_bold_and_the_papers_number_beside() -> None:
    text = markdown(_example())
    assert "| SN_DDPM | **1.00 ± 0.25** (3.65) | - |" in text
    assert "| DDPM, beta | 2.00 ± 0.50 (3.04) | 5.00 |" in text
    assert "holds: less is more (K = 10: -1 ± 0.1)" in text


def test_brackets_are_announced_where_there_are_any() -> None:
    section = _example().sections[0]
    assert section_title(section) == "linear (the paper's CIFAR10 (LS) in brackets)"
    bare = tuple(replace(row, entries=tuple(replace(e, paper=None) for e in row.entries)) for row in section.rows)
    assert section_title(replace(section, rows=bare)) == "linear"


def test_latex_escapes_what_tex_reserves() -> None:
    text = latex(_example())
    assert r"SN\_DDPM & \textbf{1.00 $\pm$ 0.25} (3.65) & - \\" in text
    assert r"K = 25 \%" in text
    rows = (Row(r"a\b{c}$d~e^f#&", (Entry(1.0),)),)
    strange = replace(_example(), title="two\nlines", sections=(Section("x\ny", ("K",), rows),))
    first, *_, row, _, _ = latex(strange).splitlines()
    assert first == "% two lines; x y"
    assert row == r"a\textbackslash{}b\{c\}\$d\textasciitilde{}e\textasciicircum{}f\#\& & 1.00 \\"


def test_csv_reads_back_number_by_number() -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(_example()))))
    assert [(r["row"], r["column"], r["value"], r["best"]) for r in rows][2] == ("SN_DDPM", "K = 10", "1", "1")


def test_what_a_killed_run_was_writing_of_a_table_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".fid.md.nxlah6yv.part", ".bpd.md.nxlah6yv.part", ".fid.notes.part"):
        (tmp_path / name).write_text("half")
    assert all(path.is_file() for path in write_table(_example(), tmp_path))
    assert sorted(path.name for path in tmp_path.glob(".*.part")) == [".bpd.md.nxlah6yv.part", ".fid.notes.part"]


def test_json_reads_back_whole(tmp_path: Path) -> None:
    write_table(_example(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "fid.csv", "fid.json", "fid.md", "fid.tex"]
    assert TableResult.from_json(json.loads((tmp_path / "fid.json").read_text())) == _example()
    with pytest.raises(ValueError, match="not the record of a table"):
        TableResult.from_json({"rows": []})


@pytest.mark.parametrize(
    ("means", "holds"), [([-1.0, -2.0], True), ([-1.0, 0.1], None), ([-1.0, 0.5], False), ([], None)]
)
def test_a_claim_needs_every_difference_beyond_its_error(means: list[float], holds: bool | None) -> None:
    assert judge("claim", [Difference("K", mean, 0.1) for mean in means]).holds is holds


def test_rows_of_the_same_noise_are_compared_group_by_group() -> None:
    spread = [1.0, 2.0, 3.0, 4.0]  # of both rows alike, so that their difference is exact

    def section(other: list[float]) -> Section:
        entries = [Entry(d, 2.0, details={"replicates": [part, []]}) for d, part in ((1.0, spread), (2.0, other))]
        rows = tuple(Row(name, (entry,)) for name, entry in zip("ab", entries, strict=True))
        return Section("linear", ("K = 5",), rows)

    (paired,) = row_differences(section([value + 1 for value in spread]), "a", "b")
    assert (paired.mean, paired.error, paired.holds()) == (-1.0, 0.0, True)
    (crossed,) = row_differences(section(spread[::-1]), "a", "b")
    assert crossed.error == pytest.approx(15**0.5)  # of -3, -1, 1, 3: sqrt(3/4 * 20)
    (apart,) = row_differences(section([1.0]), "a", "b")  # resampled by other groups
    assert apart.error == pytest.approx(8**0.5)


def _exhaust(parts: Generator[float, None, Result]) -> Result:
    with pytest.raises(StopIteration) as stopped:  # noqa: PT012
        while True:
            next(parts)
    result: Result = stopped.value.value
    return result


def test_every_group_that_is_left_out_has_all_classes():
    """Else leaving one out changes the mixture of classes, and the extrapolation to many samples is far off."""
    bundle = class_bundle()
    drawn = torch.arange(120.0)[:, None]  # image number i has class i % 3
    rows = drawing._by_class(drawn, {"labels": "in turn"}, bundle)
    assert sorted(rows[:, 0].tolist()) == drawn[:, 0].tolist()
    for group in range(20):
        counts = torch.bincount(rows[group::20, 0].long() % 3, minlength=3)
        assert counts.tolist() == [2, 2, 2]
    assert torch.equal(drawing._by_class(drawn, {}, bundle), drawn)


def test_a_table_tells_a_network_of_classes_the_labels_of_the_images(tmp_path):
    bundle = class_bundle()
    pixels = torch.randint(0, 256, (8, *bundle.image_shape), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    bits = []
    for known in (labels, None):
        images = ImageSet(pixels.to(torch.uint8), known, "images")
        sets = TableImages(images, images, images, "images")
        size = replace(SIZES["quick"], images=8, train_images=4, times=3)
        evaluation = Evaluation(bundle, sets, None, size, schedules=["own"], steps=[3])
        cell = evaluation.likelihood_cell("own")
        assert ("labels" in cell.settings) == (known is not None)
        sweep = scoring._sweep(bundle, images, cell.settings, str(tmp_path / f"state-{len(bits)}"), 8, "test", 8)
        list(sweep)
        bits.append(sweep.table.group_bits_per_dim("npr", bundle.trajectory(3)).mean())
    assert bits[0] != bits[1]
