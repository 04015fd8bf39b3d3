"""What the page of `optcov play` does, without a browser: results, and bad input in one sentence."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import tiny_models as tiny
from class_bundles import class_bundle
from command_line import CommandLine
from optcov import Schedule, fit, play
from optcov.bundle import Bundle
from optcov.data import grid, to_8bit
from optcov.play import actions, inputs
from small_bundles import SHAPE, small_bundle

NAN = float("nan")


@pytest.fixture(scope="module")
def classes() -> Bundle:
    return class_bundle()


@pytest.fixture(scope="module")
def plain() -> Bundle:
    return small_bundle(Schedule.linear(50))


def drawing(box: tuple[int, int, int, int] | None = (80, 80, 199, 199)) -> dict[str, Any]:
    """What the editor gives: an image of two halves, and a stroke over a part of it."""
    pixels = torch.zeros(SHAPE, dtype=torch.uint8)
    pixels[..., 4:] = 200
    background = inputs.enlarged(pixels).convert("RGBA")
    stroke = Image.new("RGBA", background.size, (0, 0, 0, 0))
    if box:
        ImageDraw.Draw(stroke).rectangle(box, fill=(255, 48, 48, 255))
    return {"background": background, "layers": [stroke], "composite": Image.alpha_composite(background, stroke)}


def test_two_methods_start_from_the_same_noise(classes):
    first, again = actions.compare(classes, "DDIM", "DDIM", 3, 4, seed=5, label=1)
    other, _ = actions.compare(classes, "DDIM", "DDIM", 3, 4, seed=6, label=1)
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_a_class_and_guidance_change_samples(classes):
    shown = [
        actions.compare(classes, "DDIM", "DDIM", 3, 2, 0, label, guidance)[0].tobytes()
        for label, guidance in [(inputs.ANY, 1.0), (0, 1.0), (1, 1.0), (1, 3.0), (inputs.EACH, 1.0)]
    ]
    assert len(set(shown)) == 5


def test_each_class_is_drawn_in_turn(classes):
    known = classes.class_numbers
    told = inputs.condition(classes, inputs.EACH, len(known) + 1)
    assert told["class_labels"].tolist() == [*known, known[0]]


def test_only_methods_that_run_are_offered(plain):
    offered = actions.sampling_methods(plain)
    assert {"DDIM", "NPR-DDIM", "SN-DDPM", "Bridge 2M", "UniPC"} <= set(offered)
    assert not {"Improved DDPM", "Euler-Maruyama", "NPR-DPM", "Gotta Go Fast"} & set(offered)
    for name in offered:
        actions.compare(plain, name, name, 2, 1, 0)


def test_matched_2m_is_offered_where_it_was_prepared(plain):
    images = torch.rand(40, *plain.image_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ready = plain.with_matched_noise(images, steps=3, samples=16)
    assert "Matched 2M" in actions.sampling_methods(ready)
    assert "Matched 2M" not in actions.sampling_methods(plain)
    actions.compare(ready, "DDIM", "Matched 2M", 3, 1, 0)
    with pytest.raises(ValueError, match="no matched noise for 4 steps"):
        actions.compare(ready, "DDIM", "Matched 2M", 4, 1, 0)


def test_a_bundle_without_heads_has_a_page_all_the_same():
    bare = class_bundle(heads=False)
    assert "DDIM" in actions.sampling_methods(bare)
    assert actions.covariances(bare) == ["beta"]


@pytest.mark.parametrize("steps", [2, 30])
def test_a_path_is_a_strip_for_few_and_many_steps(plain, steps):
    strip = actions.denoising_path(plain, "NPR-DDPM", steps, 0)
    assert (strip.width > 3 * strip.height) == (steps > 2)


def test_more_noise_makes_the_model_less_sure(classes):
    shares = [actions._time_of(classes, share) for share in (0.01, 0.5, 0.99)]
    assert shares == sorted(set(shares))
    little, much = (actions.uncertainty(classes, drawing(), percent, "npr", 0, label=2) for percent in (1, 99))
    assert little.tobytes() != much.tobytes()


def test_bits_per_dim_come_least_first_with_the_probability_of_each_class(classes, plain):
    rows, chances = actions.score(classes, drawing(), 3, 0)
    assert [bits for _, bits in rows] == sorted(bits for _, bits in rows)
    assert {"NPR-DDPM", "SN-DDPM", "A-DDPM", "DDPM, beta"} <= {name for name, _ in rows}
    assert list(chances) == ["class 0", "class 1", "class 2"]
    assert sum(chances.values()) == pytest.approx(1)
    assert actions.score(plain, drawing(), 3, 0)[1] == {}


def test_restoration_keeps_what_was_not_erased(plain):
    hidden = inputs.erased_pixels(drawing(), SHAPE)
    assert hidden.sum() == 9
    assert hidden[2:5, 2:5].all()
    _, samples = actions.restoration(plain, drawing(), "NPR-DDPM", 3, 2, 0)
    factor = actions.SHEET // 22  # two images of 8 pixels with borders of 2
    shown = np.array(samples)[factor // 2 :: factor, factor // 2 :: factor, 0]
    for left in (2, 12):
        image = torch.from_numpy(shown[2:10, left : left + 8].copy())
        assert torch.equal(image[~hidden], inputs.background_pixels(drawing(), SHAPE)[0][~hidden])


@pytest.fixture(scope="module", params=["dit", "sd"])
def latents(request: pytest.FixtureRequest) -> Bundle:
    """A bundle of latents of 8 by 8, whose pictures are 16 by 16."""
    told: Any = tiny.CAPTIONS * 3 if request.param == "sd" else torch.arange(12)
    quick: dict[str, Any] = {"images": 8, "measure_images": 2, "times": 3, "calibration_samples": 0}
    return fit(tiny.pipeline(request.param), (tiny.images(12), told), **quick, batch_size=4, progress=False)


def test_a_bundle_of_latents_shows_decoded_pictures(latents):
    inputs.check_playable(latents)
    assert latents.picture_shape == (3, 16, 16)
    kind = actions.preferred(actions.covariances(latents))
    first, _ = actions.compare(latents, "DDIM", "Bridge 2M", 3, 1, 0)
    decoded = latents.decode(latents.sample(1, method="DDIM", steps=3, seed=0, progress=False))
    assert first.tobytes() == inputs.enlarged(grid(to_8bit(decoded), 1), actions.SHEET).tobytes()
    assert actions.denoising_path(latents, "DDIM", 3, 0).width > 100
    assert actions.uncertainty(latents, drawing(), 50, kind, 0).width > 100
    assert actions.example(latents, 1).shape == (3, 16, 16)
    rows, chances = actions.score(latents, drawing(), 3, 0)
    assert all(np.isfinite(bound) for _, bound in rows)
    assert not chances or len(chances) <= actions.MAX_CLASSES


def test_restored_latents_never_see_what_was_erased(latents):
    shown = []
    for colour in ("red", "blue"):
        given = drawing()
        stroke = given["layers"][0].getchannel("A")
        given["background"] = Image.composite(Image.new("RGBA", stroke.size, colour), given["background"], stroke)
        shown.append(actions.restoration(latents, given, actions.restoring_methods(latents)[0], 2, 2, 0)[1])
    assert shown[0].tobytes() == shown[1].tobytes()


def test_images_to_begin_with_are_shown_as_they_are(latents, tmp_path):
    from optcov.cli.play import _examples

    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16), dtype=np.uint8))
    np.savez(tmp_path / "images.npz", test=pictures.permute(0, 2, 3, 1).numpy())
    found = _examples("latents", latents, str(tmp_path / "images.npz"))
    assert sorted(image.tobytes() for image in found.numpy()) == sorted(image.tobytes() for image in pictures.numpy())


def test_a_drawing_goes_to_pixels_and_back_without_loss():
    pixels = torch.arange(64, dtype=torch.uint8).reshape(SHAPE)
    assert torch.equal(inputs.to_pixels(inputs.enlarged(pixels), SHAPE), pixels)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12)])
def test_an_upload_of_any_size_and_mode_gets_the_shape_of_the_bundle(tmp_path, mode, shape):
    Image.new(mode, (37, 90)).save(tmp_path / "any.png")
    assert inputs.to_pixels(inputs.read_upload(str(tmp_path / "any.png"), shape), shape).shape == shape


def bad_uploads(directory: Path) -> dict[str, Path | None]:
    (directory / "text.png").write_text("no image")
    (directory / "empty.png").write_bytes(b"")
    with (directory / "large.png").open("wb") as file:
        file.truncate(inputs.MAX_BYTES + 1)
    return {"no file": None, **{name: directory / f"{name}.png" for name in ("text", "empty", "large", "gone")}}


@pytest.mark.parametrize("name", ["no file", "text", "empty", "large", "gone"])
def test_a_wrong_upload_is_refused_without_telling_where_files_are(tmp_path, name):
    path = bad_uploads(tmp_path)[name]
    with pytest.raises((ValueError, OSError)) as refused:
        inputs.read_upload(path, SHAPE)
    assert str(tmp_path) not in str(refused.value)
    assert "\n" not in str(refused.value)


BAD = {
    "no steps": lambda b: actions.compare(b, "DDIM", "DDIM", None, 1, 0),
    "NaN steps": lambda b: actions.compare(b, "DDIM", "DDIM", NAN, 1, 0),
    "half a step": lambda b: actions.compare(b, "DDIM", "DDIM", 2.5, 1, 0),
    "too many steps": lambda b: actions.compare(b, "DDIM", "DDIM", 101, 1, 0),
    "too many images": lambda b: actions.compare(b, "DDIM", "DDIM", 2, 17, 0),
    "a text as seed": lambda b: actions.denoising_path(b, "DDIM", 2, "zero"),
    "a negative seed": lambda b: actions.denoising_path(b, "DDIM", 2, -1),
    "a method that does not run": lambda b: actions.compare(b, "DDIM", "Gotta Go Fast", 2, 1, 0),
    "no method": lambda b: actions.denoising_path(b, None, 2, 0),
    "a class that is none": lambda b: actions.compare(b, "DDIM", "DDIM", 2, 1, 0, label=7),
    "infinite guidance": lambda b: actions.compare(b, "DDIM", "DDIM", 2, 1, 0, label=1, guidance=float("inf")),
    "no image": lambda b: actions.uncertainty(b, None, 50, "npr", 0),
    "an empty editor": lambda b: actions.score(b, {"background": None, "layers": [], "composite": None}, 3, 0),
    "NaN noise": lambda b: actions.uncertainty(b, drawing(), NAN, "npr", 0),
    "no noise": lambda b: actions.uncertainty(b, drawing(), 0, "npr", 0),
    "an unknown covariance": lambda b: actions.uncertainty(b, drawing(), 50, "nothing", 0),
    "one step of a bound": lambda b: actions.score(b, drawing(), 1, 0),
    "nothing erased": lambda b: actions.restoration(b, drawing(None), "NPR-DDPM", 2, 2, 0),
    "everything erased": lambda b: actions.restoration(b, drawing((0, 0, 400, 400)), "NPR-DDPM", 2, 2, 0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_value_error_of_one_sentence(classes, name):
    with pytest.raises(ValueError, match=r".; .|out of range|first") as refused:
        BAD[name](classes)
    assert "\n" not in str(refused.value)


def test_data_that_is_no_picture_is_refused(classes):
    from dataclasses import replace

    with pytest.raises(ValueError, match="shows grey and RGB images, but classes has data of shape"):
        inputs.check_playable(replace(classes, image_shape=(4, 8, 8)))
    with pytest.raises(ValueError, match="without a range"):
        inputs.check_playable(replace(classes, data_range=None))


def test_a_visitor_who_leaves_while_a_request_is_on_its_way_is_no_error():
    pytest.importorskip("gradio")
    from starlette.requests import Request

    from optcov.play.page import Leaving

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()  # raises if the visitor has left
        raise AssertionError("the body never came")

    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    asyncio.run(Leaving(page)({"type": "http", "method": "POST", "headers": []}, left, None))


def test_without_gradio_the_command_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "optcov.play.page", raising=False)
    monkeypatch.delattr(play, "page", raising=False)
    said = CommandLine(capsys)("play", "fashion")
    assert said.code == 2
    assert said.err == "error: optcov play needs gradio; install it by pip install 'optcov[play]'\n"


def test_a_port_that_is_none_is_refused(capsys):
    said = CommandLine(capsys)("play", "fashion", "--port", "99999")
    assert said.code == 2
    assert "--port 99999 is no port" in said.err


def test_a_port_in_use_is_refused_before_the_model_is_loaded(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = CommandLine(capsys)("play", "no-such-bundle", "--port", str(port))
    assert said.code == 2
    assert said.err == f"error: --port {port} is in use; choose another one, or leave it out\n"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("", "--host is empty"),
        ("no-such-host.invalid", "is no address of this machine"),
        ("192.0.2.1", "is no address"),
    ],
)
def test_a_host_that_is_not_here_is_refused_before_the_model_is_loaded(capsys, host, reason):
    said = CommandLine(capsys)("play", "no-such-bundle", "--host", host)
    assert said.code == 2
    assert reason in said.err


def test_the_guard_against_other_sites_stands_wherever_only_this_machine_listens():
    pytest.importorskip("gradio")
    from optcov.play.page import is_here

    assert all(map(is_here, ("127.0.0.1", "127.0.0.2", "localhost", "::1")))
    assert not any(map(is_here, ("0.0.0.0", "192.168.0.1", "example.org")))


@pytest.mark.parametrize("value", [10**400, -(10**400), NAN, float("inf"), 2**31])
def test_numbers_out_of_range_are_refused_in_plain_digits(value):
    with pytest.raises(ValueError, match=r"seed .* is out of range; choose one from 0 to 2147483647"):
        inputs.whole("seed", value, 0, inputs.MAX_SEED)


@pytest.mark.parametrize("layers", [3, "x", [None], ["stroke"]])
def test_strokes_that_are_no_images_are_refused(layers):
    with pytest.raises(ValueError, match="the strokes are no images"):
        inputs.erased_pixels({**drawing(), "layers": layers}, (1, 8, 8))


def test_a_picture_without_pixels_is_no_picture():
    with pytest.raises(ValueError, match="there is no image yet"):
        inputs.drawn_pixels({"composite": Image.new("RGB", (0, 0))}, (1, 8, 8))


def test_too_little_memory_is_said_in_a_sentence_and_other_errors_are_not_hidden():
    gradio = pytest.importorskip("gradio")
    from optcov.play.page import in_one_sentence

    def fails(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(gradio.Error, match="not enough memory"):
        in_one_sentence(fails)("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        in_one_sentence(fails)("a fault of ours")
