"""The report: one page that holds everything it shows, escaped, and asks for nothing."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from browsers import find_chromium
from optcov import ForwardProcess, Schedule
from optcov.bundle import Bundle
from optcov.bundle.pictures import Drawn, compare, draw_comparison, draw_deviations, draw_grid, errors_of
from optcov.data import ImageSet
from optcov.experiments.report.page import PageSection, picture, render_page, table_body, write_page
from optcov.experiments.report.page_figures import (
    VarianceAndError,
    against_steps,
    chosen_times,
    lengths_of,
    variance_against_error,
)
from optcov.experiments.report.page_sections import (
    bundle_sections,
    paper_figures,
    provenance_section,
    read_tables,
    table_sections,
)
from optcov.experiments.report.size import QUICK, ReportSize
from optcov.experiments.tables import Claim, Entry, Row, Section, TableResult, write_table
from optcov.noise import batch_noise
from optcov.trajectory import Trajectory
from small_bundles import SHAPE, small_bundle

PNG = b"\x89PNG\r\n\x1a\n"
TINY = replace(
    QUICK,
    grid_steps=(3,),
    grid_images=1,
    map_images=1,
    curve_steps=4,
    curve_images=2,
    error_images=3,
    error_times=4,
)


class _Reader(HTMLParser):
    """Collects tags, and checks that they close in order."""

    void = ("meta", "img", "br", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def table() -> TableResult:
    def entry(value: float) -> Entry:
        return Entry(value, 0.1, 3.04, details={"times": [1, 500, 1000]})

    rows = (
        Row("ET NPR-DDPM", (entry(2.0), entry(1.5)), "ET"),
        Row("OT NPR-DDPM", (entry(1.0), entry(0.5)), "OT"),
        Row("OT <b>A-DDPM", (entry(1.5), Entry(text="-")), "OT"),
    )
    section = Section("linear", ("K = 3", "K = 4"), rows[:2], "CIFAR10 (LS)").with_best()
    other = Section("a < b", ("size, MB",), (Row("<b>A-DDPM", (entry(1.5),)),)).with_best()
    claims = (Claim("less", True, "1 < 2"), Claim("more", False, ""), Claim("equal", None, ""))
    return TableResult(
        "bpd", "Bits & pieces", "bits/dim", (section, other), ("A note.",), claims, {"command": "optcov x"}
    )


def test_a_page_is_well_formed_and_asks_for_nothing() -> None:
    page = render_page(
        "A <title>", [PageSection("One", table_body(table())), PageSection("Two", picture(PNG, '"a" & b'))]
    )
    reader = read(page)
    addresses = [
        value for _, attributes in reader.tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert addresses
    assert all(address and address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert not re.search(r"https?://|@import|url\(", page)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in reader.tags}
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    images, name = torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "a$_$b"
    draw_grid(images, tmp_path / "a.png", name)
    draw_comparison([Drawn("DDIM", 3, images, 3.0)], tmp_path / "b.png", name)
    draw_deviations(images, torch.ones(1, 1, 8, 8), tmp_path / "c.png", name)
    assert all((tmp_path / f"{letter}.png").read_bytes().startswith(PNG) for letter in "abc")


def test_links_lead_to_sections() -> None:
    reader = read(render_page("t", [PageSection("One", ""), PageSection("Two", "")]))
    ids = {attributes.get("id") for tag, attributes in reader.tags if tag == "section"}
    assert {attributes["href"] for tag, attributes in reader.tags if tag == "a"} == {f"#{name}" for name in ids}


def test_texts_are_escaped_and_the_best_is_bold() -> None:
    body = table_body(table())
    assert "<b>A-DDPM" not in body
    assert "&lt;b&gt;A-DDPM" in body
    assert '<td><b>0.50 <span class="error">± 0.10</span></b>' not in body  # alone in its group: nothing to be best of
    two = replace(table().sections[0], rows=tuple(replace(r, group="") for r in table().sections[0].rows)).with_best()
    body = table_body(replace(table(), sections=(two,)))
    assert '<td><b>0.50 <span class="error">± 0.10</span></b> <span class="paper">(3.04)</span></td>' in body
    for verdict in ("holds", "does not hold", "no clear difference"):
        assert f"<i>{verdict}</i>" in body


def test_a_picture_is_embedded_whole() -> None:
    found = re.search(r"base64,([A-Za-z0-9+/=]+)", picture(PNG + b"rest", "caption"))
    assert found
    assert base64.b64decode(found[1]) == PNG + b"rest"


def test_only_columns_of_steps_become_a_plot() -> None:
    first, other = table().sections
    assert lengths_of(first) == [3, 4]
    assert lengths_of(other) == []
    assert against_steps(first, "bits/dim").startswith(PNG)


def test_tables_are_read_from_their_directories(tmp_path: Path) -> None:
    write_table(table(), tmp_path / "a")
    tables = read_tables([tmp_path / "a"])
    assert tables == [table()]
    assert dict(chosen_times(tables[0])) == {"OT NPR-DDPM (linear)": {3: [1, 500, 1000], 4: [1, 500, 1000]}}
    titles = [section.title for section in table_sections(tables)]
    assert titles == ["Bits & pieces", "Optimal trajectories"]
    other = replace(table(), made_by={"command": "optcov y"})
    shown = provenance_section([*tables, other], {"command": "optcov report"}).body
    assert all(command in shown for command in ("optcov x", "optcov y", "optcov report"))
    with pytest.raises(ValueError, match="holds no table"):
        read_tables([tmp_path])
    (tmp_path / "a" / "bpd.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bpd.json: this is not the record"):
        read_tables([tmp_path / "a"])


def _damage(record: dict[str, Any], where: str, value: object) -> None:
    part: Any = record
    *path, last = (int(word) if word.isdigit() else word for word in where.split("/"))
    for word in path:
        part = part[word]
    part[last] = value


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        ("sections/0/rows/0/entries/0/value", "1.0", "finite number or None, not '1.0'"),
        ("sections/0/rows/0/entries/0/value", float("nan"), "finite number or None, not nan"),
        ("sections/0/rows/0/entries/0/error", [1], r"finite number or None, not \[1\]"),
        ("sections/0/rows/0/entries/0/details", None, "the details of an entry have names, but got None"),
        ("sections/0/rows/0/entries", [], "row 'ET NPR-DDPM' has 0 entries for 2 columns"),
        ("sections/0/rows/0/name", 3, "3 stands where a text should"),
        ("sections/0/columns", [3, 4], "3 stands where a text should"),
        ("sections/0/decimals", -1, "-1 is no number of decimals"),
        ("sections/0/decimals", 10**6, "1000000 is no number of decimals"),
        ("sections/0/paper_setting", 5, "5 stands where a text should"),
        ("sections/0/heading", "\ud800", "surrogates not allowed"),
        ("sections/0/rows/0/entries/0/text", 5, "5 stands where a text should"),
        ("sections/0/rows/0/entries/0/paper_text", 5, "5 stands where a text should"),
        ("sections/0/rows/0/entries/0/paper", 10**400, "a number of 401 digits"),
        ("sections/0/rows/0/entries/0/error", -0.1, "a standard error is not negative, as -0.1 is"),
        ("sections/0/rows/1/entries/0/details/times", 5, "5 are no times of a trajectory"),
        ("sections/0/rows/1/entries/0/details/times", ["abc"], r"\['abc'\] are no times of a trajectory"),
        ("claims/0/holds", "maybe", "not 'maybe'"),
        ("claims/0/evidence", None, "None stands where a text should"),
        ("notes", [5], "5 stands where a text should"),
        ("title", 5, "5 stands where a text should"),
        ("made_by", [1], "cannot convert"),
    ],
)
def test_a_damaged_table_is_refused_by_its_name(tmp_path: Path, where: str, value: object, reason: str) -> None:
    record = json.loads(json.dumps(table().to_json()))
    _damage(record, where, value)
    (tmp_path / "bpd.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"bpd.json(: this is not the record of a table)? .*{reason}"):
        read_tables([tmp_path])


def test_a_file_in_place_of_its_directory_is_refused_with_the_directory(tmp_path: Path) -> None:
    write_table(table(), tmp_path)
    with pytest.raises(ValueError, match=rf"bpd.json is a file; give the directory .*, {tmp_path}"):
        read_tables([tmp_path / "bpd.json"])
    (tmp_path / "bpd.json").write_text("{")
    with pytest.raises(ValueError, match="bpd.json is not valid JSON") as caught:
        read_tables([tmp_path])
    assert str(caught.value).count("bpd.json") == 1


def test_a_table_without_numbers_or_times_has_no_plots() -> None:
    rows = (Row("OT NPR-DDPM", (Entry(text="-"), Entry(text="-"))),)
    empty = replace(table(), sections=(Section("linear", ("K = 3", "K = 4"), rows),))
    (section,) = table_sections([empty])
    assert "<img" not in section.body


def test_a_bundle_shows_all_it_has(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = ImageSet(torch.randint(0, 256, (40, *SHAPE), generator=generator, dtype=torch.uint8))
    bundle = small_bundle()
    linear = bundle.with_schedule("linear")
    linear = linear.with_trajectories("NPR-DDPM", [Trajectory.even(linear.schedule, 5)])
    linear = linear.with_trajectories("SN-DDPM", [Trajectory.even(linear.schedule, 7)])  # no usual number of steps
    cosine = bundle.with_schedule("cosine")
    cosine = cosine.with_trajectories("NPR-DDPM", [Trajectory.even(cosine.schedule, 5)])
    bundle = replace(bundle, trajectories=(*linear.trajectories, *cosine.trajectories))
    parts = bundle_sections(bundle, images, TINY)
    assert [name for name, _ in parts] == [
        "samples",
        "variance maps",
        "variances",
        "variance against error",
        "trajectories",
    ]
    sections = [make() for _, make in parts]
    assert [section.body.count("<img") for section in sections] == [1, 2, 1, 1, 3]
    write_page(tmp_path / "report.html", "tiny", sections)
    read((tmp_path / "report.html").read_text())


def test_a_bundle_of_few_times_and_images_is_shown_by_those() -> None:
    bundle = small_bundle(Schedule.from_betas([0.3] * 4))
    image = ImageSet(torch.zeros(1, *SHAPE, dtype=torch.uint8))
    sections = [make() for _, make in bundle_sections(bundle, image, replace(ReportSize(), grid_images=1))]
    assert [section.title for section in sections] == [
        "Samples",
        "Variance maps",
        "Variance against time",
        "Variance against error",
    ]
    assert [section.body.count("<img") for section in sections] == [1, 4, 1, 1]
    assert "1 held-out images at 4 times" in sections[-1].body


def test_a_variance_of_one_image_or_without_an_error_has_no_standard_error() -> None:
    alone = VarianceAndError.of(torch.tensor([2.0]), torch.tensor([1.0]))
    assert alone == VarianceAndError(2.0, 1.0, None)
    perfect = VarianceAndError.of(torch.tensor([2.0, 1.0]), torch.zeros(2))
    assert perfect == VarianceAndError(1.5, 0.0, None)
    assert variance_against_error([1, 2], {"npr": [alone, perfect]}).startswith(PNG)


def test_what_a_bundle_cannot_draw_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="has images of shape"):
        bundle_sections(small_bundle(), ImageSet(torch.zeros(4, 1, 4, 4, dtype=torch.uint8)), TINY)
    with pytest.raises(ValueError, match="K = 100 is outside 2..24"):
        paper_figures(small_bundle(Schedule.linear(24)), "CIFAR10 (LS)")
    with pytest.raises(ValueError, match="'NPR-DPM' runs in continuous time"):
        paper_figures(small_bundle(Schedule.linear(24)), "CIFAR10 (VP SDE)")
    with pytest.raises(ValueError, match="no setting 'MNIST'"):
        paper_figures(small_bundle(), "MNIST")


def test_the_variance_beside_the_error_is_that_which_steps_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of SN may be right about E[eps^2] while what is left of it below the squared mean is not."""
    seen = {}

    def curves(times: list[float], found: dict[str, list[VarianceAndError]]) -> bytes:
        seen.update(found)
        return PNG

    monkeypatch.setattr("optcov.experiments.report.page_sections.variance_against_error", curves)
    pixels = torch.randint(0, 256, (3, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    model = small_bundle().with_schedule("linear")
    dict(bundle_sections(model, ImageSet(pixels), TINY))["variance against error"]()
    process = model.reverse_process("SN-DDPM")
    x_0 = ImageSet(pixels).x_0()
    x_t = process.forward.diffuse(x_0, 1000, batch_noise(0, range(3), 3, SHAPE))
    with torch.no_grad():
        posterior = process.posterior(x_t, 1000)
    last = seen["sn"][-1]
    assert last.predicted == pytest.approx(float(posterior.variance.mean()), rel=1e-5)
    assert last.measured == pytest.approx(float((x_0 - posterior.mean).square().mean()), rel=1e-5)
    assert [p.measured for p in seen["npr"]] == [p.measured for p in seen["sn"]]
    assert variance_against_error([1, 2, 3, 4], seen).startswith(PNG)


def test_the_error_of_a_ratio_is_that_of_repeated_experiments() -> None:
    """200 experiments of 50 images with a ratio of 2; the level is 4 standard errors of a standard deviation, 0.2."""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        measured = 1 + 0.3 * torch.rand(50, generator=g)
        found.append(VarianceAndError.of(2 * measured + 0.1 * torch.randn(50, generator=g), measured))
    ratios = torch.tensor([f.predicted / f.measured for f in found])
    assert float(ratios.mean()) == pytest.approx(2, abs=4 * float(ratios.std()) / 200**0.5)
    assert float(ratios.std()) == pytest.approx(sum(f.ratio_error for f in found) / 200, rel=0.2)


def test_the_papers_figures_have_its_methods_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def compare(
        bundle: Bundle, methods: list[str], steps: list[int], count: int, seed: int
    ) -> Iterator[SimpleNamespace]:
        drawn.append((bundle.schedule.steps, *methods, *steps))
        images = torch.zeros(count, *SHAPE, dtype=torch.uint8)
        yield SimpleNamespace(method=methods[0], steps=steps[0], images=images)

    monkeypatch.setattr("optcov.experiments.report.page_sections.compare", compare)
    images = ImageSet(torch.zeros(2, *SHAPE, dtype=torch.uint8))
    bodies = [section.body for section in paper_figures(small_bundle(), "CIFAR10 (LS)", images, count=1)]
    assert [body.count("<img") for body in bodies] == [3, 8]  # the first shows the data set too
    assert drawn[:3] == [(1000, "NPR-DDIM", 23), (1000, "SN-DDIM", 17), (1000, "NPR-DDPM", 10)]


def test_without_images_only_samples_are_shown() -> None:
    assert [name for name, _ in bundle_sections(small_bundle(), None, TINY)] == ["samples"]


@pytest.mark.long
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    browser = find_chromium()
    if browser is None:
        pytest.skip("no Chromium is installed")
    images = ImageSet(torch.zeros(4, *SHAPE, dtype=torch.uint8))
    sections = list(table_sections([table()]))
    sections += [make() for _, make in bundle_sections(small_bundle(), images, TINY)]
    write_page(tmp_path / "report.html", "tiny", sections)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    shown = subprocess.run(
        [browser, *options, (tmp_path / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    titles = ["Bits &amp; pieces", "Optimal trajectories", "Samples", "Variance maps", "Variance against time"]
    assert all(f">{title}</h2>" in shown for title in [*titles, "Variance against error"])
    assert shown.count("<img") == sum(section.body.count("<img") for section in sections) == 8
    for scheme, background in (("1", 255), ("0", 18)):  # light and dark, as Chromium paints them
        shot = tmp_path / f"{scheme}.png"
        subprocess.run(
            [
                browser,
                *options[:-1],
                f"--blink-settings=preferredColorScheme={scheme}",
                "--window-size=1000,3000",
                f"--screenshot={shot}",
                (tmp_path / "report.html").as_uri(),
            ],
            capture_output=True,
            timeout=120,
            check=True,
        )
        pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
        assert tuple(pixels[2, 2]) == (background,) * 3
        blue = (abs(pixels - (31, 119, 180)) < 30).all(-1)  # the colour of the first curve, so the plots are there
        assert blue.sum() > 50


def test_what_a_report_shows_and_what_a_fit_prints_have_two_names_that_the_glossary_explains() -> None:
    images = ImageSet(torch.zeros(4, *SHAPE, dtype=torch.uint8))
    names = [name for name, _ in bundle_sections(small_bundle(), images, TINY)]
    assert "variance against error" in names
    assert "calibration" not in names
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    assert all(f"**{name}.**" in glossary for name in ("calibration", "variance against error"))


def test_a_comparison_shows_the_error_that_each_method_expects_beside_the_true_one(tmp_path: Path) -> None:
    bundle = small_bundle(Schedule.linear())
    methods = ["DDPM, beta-tilde", "DDPM, beta", "NPR-DDPM"]
    x_0 = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = errors_of(bundle, methods, x_0, 300, noises=1)
    noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(0))
    x_t = ForwardProcess(bundle.schedule).diffuse(x_0, 300, noise)
    known = bundle.posterior(x_t, 300)
    torch.testing.assert_close(found.true, (known.mean - x_0).abs().float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.expected["NPR-DDPM"], known.variance.sqrt().float(), rtol=1e-4, atol=1e-5)
    assert float(found.expected["DDPM, beta-tilde"].max()) == 0
    assert float(found.expected["DDPM, beta"].std()) < 1e-6  # the same for every pixel
    draw_comparison(list(compare(bundle, methods, [2, 3], count=4)), tmp_path / "all.png", "all", found)
    draw_comparison(list(compare(bundle, methods, [2, 3], count=4)), tmp_path / "samples.png", "samples")
    with Image.open(tmp_path / "all.png") as larger, Image.open(tmp_path / "samples.png") as smaller:
        assert larger.width > smaller.width  # a column more,
        assert larger.height > smaller.height  # whose five pictures are more than three methods
