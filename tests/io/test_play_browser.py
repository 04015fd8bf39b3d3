"""`optcov play` in a real browser: every tab answers, and nothing that a visitor does stops the server.

OPTCOV_SCREENSHOTS=docs/images makes the pictures of the documentation on the way, with the embedded model.
"""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from PIL import Image

from browsers import find_chromium
from class_bundles import class_bundle

CHROMIUM = find_chromium()
MISSING = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
MISSING += [] if CHROMIUM else ["chromium"]
NEEDED = bool(os.environ.get("OPTCOV_NEEDS_BROWSER"))  # as in CI, where nothing may be left out in silence
pytestmark = pytest.mark.skipif(bool(MISSING) and not NEEDED, reason=f"not installed: {', '.join(MISSING)}")

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
SCREENSHOTS = os.environ.get("OPTCOV_SCREENSHOTS")
TABS = {  # name -> its title, and where the result is
    "samples": ("Samples", "#samples-second img"),
    "path": ("Denoising path", "#path-strip img"),
    "uncertainty": ("Uncertainty", "#uncertainty-map img"),
    "bits": ("Bits/dim", "#bits-table td"),
    "restoration": ("Restoration", "#restoration-samples img"),
}
SLOW = 120_000  # milliseconds; a loaded machine is no error


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a small bundle, or with the embedded model for pictures."""
    directory = tmp_path_factory.mktemp("play")
    bundle = "fashion"
    if not SCREENSHOTS:
        class_bundle().save(directory / "classes")
        bundle = str(directory / "classes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "optcov", "play", bundle, "--port", str(port)]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        assert server.stdout is not None
        said = server.stdout.readline()
        assert f"http://127.0.0.1:{port}" in said, (directory / "log").read_text()
        yield f"http://127.0.0.1:{port}/"
        assert server.poll() is None, "the server ended"
        server.terminate()
    assert "Traceback" not in (directory / "log").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


def opened(browser: Any, address: str) -> Any:
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.set_default_timeout(SLOW)
    page.goto(address)
    page.wait_for_selector("#samples-go")
    return page


def show(page: Any, name: str) -> None:
    page.get_by_role("tab", name=TABS[name][0]).click()
    page.wait_for_selector(f"#{name}-go", state="visible")


def paint(page: Any, name: str) -> None:
    """Paint over the middle of the image."""
    canvas = page.locator(f"#{name}-editor canvas").first
    canvas.wait_for()
    page.wait_for_timeout(1000)  # the editor sets its canvas up after it is there
    box = canvas.bounding_box()
    across, down = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for row in range(-1, 2):
        page.mouse.move(across - 40, down + 20 * row)
        page.mouse.down()
        page.mouse.move(across + 40, down + 20 * row, steps=8)
        page.mouse.up()
    page.wait_for_timeout(500)


def photograph(page: Any, path: Path) -> None:
    """The whole page without the blank part below its content, in 256 colours: a small file."""
    from PIL import Image, ImageChops

    with Image.open(io.BytesIO(page.screenshot(full_page=True))) as found:
        picture = found.convert("RGB")
    background = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    _, _, _, lowest = ImageChops.difference(picture, background).getbbox()
    picture = picture.crop((0, 0, picture.width, min(picture.height, lowest + 20)))
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def test_every_tab_answers_and_asks_nobody_else(browser, address):
    page = opened(browser, address)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    for name, (_, result) in TABS.items():
        show(page, name)
        if name == "restoration":
            paint(page, name)
        page.click(f"#{name}-go")
        page.wait_for_selector(result)
        if SCREENSHOTS:
            page.wait_for_timeout(1500)
            photograph(page, Path(SCREENSHOTS) / f"play-{name}.png")
    hosts = {urlsplit(url).hostname for url in asked if urlsplit(url).scheme in ("http", "https", "ws", "wss")}
    assert hosts == {"127.0.0.1"}
    page.close()


def test_what_does_not_fit_is_said_in_a_sentence_and_the_next_try_works(browser, address, tmp_path):
    wrong = tmp_path / "wrong.png"
    wrong.write_text("no image at all")
    page = opened(browser, address)
    show(page, "restoration")
    page.click("#restoration-go")
    page.get_by_text("nothing is erased yet").wait_for()
    with page.expect_file_chooser() as chooser:
        page.click("#restoration-upload")
    chooser.value.set_files(wrong)
    page.get_by_text("cannot read the image wrong.png").wait_for()
    assert "Traceback" not in page.inner_text("body")
    show(page, "samples")
    page.get_by_label("Seed").first.fill("")
    page.click("#samples-go")
    page.get_by_text("seed is empty").wait_for()
    page.get_by_label("Seed").first.fill("3")
    page.click("#samples-go")
    page.wait_for_selector("#samples-second img")
    assert page.inner_text("#samples-first-title").strip() == "DDIM"
    page.close()


def test_a_class_and_guidance_change_the_samples(browser, address):
    page = opened(browser, address)

    def drawn() -> str:
        page.click("#samples-go")
        page.wait_for_function("before => document.querySelector('#samples-first img')?.src !== before", arg=seen[-1])
        return str(page.locator("#samples-first img").get_attribute("src"))

    seen = [""]
    seen.append(drawn())
    page.get_by_label("Class").first.click()
    page.get_by_role("option", name="class 1", exact=True).click()
    seen.append(drawn())
    page.get_by_label("Guidance").first.fill("5")
    page.get_by_label("Guidance").first.press("Enter")
    seen.append(drawn())
    assert len(set(seen)) == 4
    page.close()


def test_bits_are_those_of_an_image_that_is_uploaded_or_drawn(browser, address, tmp_path):
    page = opened(browser, address)
    show(page, "bits")
    seen = [""]

    def scored() -> str:
        page.click("#bits-go")
        page.wait_for_function(
            "before => (t => t && t !== before)(document.querySelector('#bits-table')?.innerText)", arg=seen[-1]
        )
        return str(page.inner_text("#bits-table"))

    seen.append(scored())
    Image.effect_noise((50, 40), 80).save(tmp_path / "noise.png")
    with page.expect_file_chooser() as chooser:
        page.click("#bits-upload")
    chooser.value.set_files(tmp_path / "noise.png")
    page.wait_for_timeout(1500)  # the editor shows it
    seen.append(scored())
    paint(page, "bits")
    seen.append(scored())
    assert len(set(seen)) == 4
    page.close()


def test_a_page_of_another_site_cannot_reach_the_server(address):
    asked = Request(address, headers={"Host": "elsewhere.example"})
    with pytest.raises(HTTPError, match="400"):
        urlopen(asked)


def test_a_page_closed_in_mid_work_leaves_the_server_working(browser, address):
    page = opened(browser, address)
    page.get_by_label("Steps").first.fill("100")
    page.click("#samples-go")
    page.wait_for_timeout(300)
    assert page.locator("#samples-second img").count() == 0, "the work was done before the page was closed"
    page.close()
    again = opened(browser, address)
    show(again, "path")
    again.click("#path-go")
    again.wait_for_selector("#path-strip img")
    again.close()
