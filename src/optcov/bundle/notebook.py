"""How a bundle shows itself: lines of text at a prompt, a table with some of its images in a notebook."""

from __future__ import annotations

import base64
import html

import torch

from optcov.bundle.bundle import Bundle
from optcov.bundle.description import describe
from optcov.bundle.lines import lines
from optcov.bundle.sampler import draw_many
from optcov.data.export import grid, png_bytes
from optcov.data.images import to_8bit

THUMBNAILS, STEPS = 8, 10
SMALL = 10_000_000  # weights times images up to which drawing some takes seconds on a CPU


def text(bundle: Bundle) -> str:
    """What it is, a line each."""
    return "\n".join(f"{name:13} {words}" for name, words in lines(describe(bundle)))


def page(bundle: Bundle) -> str:
    """The same as a table, with a few images if the network is small enough to draw them at once."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(words)}</td></tr>"
        for name, words in lines(describe(bundle))
    )
    return f"<table>{rows}</table>{_thumbnails(bundle)}"


def _thumbnails(bundle: Bundle) -> str:
    weights = sum(parameter.numel() for parameter in bundle.unet.parameters())
    if weights > SMALL or len(bundle.image_shape) != 3 or bundle.image_shape[0] not in (1, 3) or not bundle.data_range:
        return ""
    with torch.no_grad():
        drawn = draw_many(bundle, THUMBNAILS, None, THUMBNAILS, progress=False, method=None, steps=STEPS)
    picture = base64.b64encode(png_bytes(grid(to_8bit(drawn), THUMBNAILS))).decode()
    return f"<img alt='images drawn by the bundle' src='data:image/png;base64,{picture}'>"
