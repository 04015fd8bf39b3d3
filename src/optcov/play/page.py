"""The page: tabs, fields and buttons by gradio; what the buttons do is in `actions`.

Everything runs here: no share link, no telemetry, no fonts from elsewhere. One computation runs at a time, the others
wait. What does not fit is said in one sentence.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from ipaddress import ip_address
from typing import Any, final

import gradio as gr
from PIL import Image
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from torch import Tensor

from optcov.bundle import Bundle
from optcov.console import out_of_memory
from optcov.likelihood.result import BITS, NATS
from optcov.play import actions
from optcov.play.inputs import (
    ANY,
    EACH,
    MAX_BYTES,
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_STEPS,
    MIN_STEPS,
    blank,
    check_playable,
    enlarged,
    read_upload,
)

HERE = ("127.0.0.1", "localhost")
WAITING = 32  # requests that may wait
KEPT = 3600  # seconds that pictures stay in the server's temporary directory
FORMATS = [".png", ".jpg", ".jpeg", ".bmp", ".webp"]
GREYS, COLOURS = ["#ffffff", "#a0a0a0", "#000000"], ["#ffffff", "#000000", "#d62728", "#2ca02c", "#1f77b4", "#ffdd55"]
ERASER = "#ff3030"
LONG_STEPS = "The variances of Improved DDPM and beta-tilde are for short steps. In few steps their bounds are high."
# names of fonts that the system has: the usual themes fetch theirs
SYSTEM, MONOSPACE = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]


def build(bundle: Bundle, examples: Tensor | None = None) -> gr.Blocks:
    """The page on a bundle. examples: 8-bit images (n, C, H, W) to begin with; samples of the bundle otherwise."""
    check_playable(bundle)
    with gr.Blocks(title=f"optcov: {bundle.name}", analytics_enabled=False, delete_cache=(KEPT, KEPT)) as blocks:
        gr.Markdown(f"# {html.escape(bundle.name)}\nWhat a diffusion model draws, and what it knows of its own error.")
        page = _Page(bundle, examples)
        for name, tab in (
            ("Samples", page.samples),
            ("Denoising path", page.path),
            ("Uncertainty", page.uncertainty),
            ("Bits/dim", page.bits),
            ("Restoration", page.restoration),
        ):
            with gr.Tab(name):
                tab()
    return blocks.queue(max_size=WAITING, api_open=False, default_concurrency_limit=1)


def is_here(host: str) -> bool:
    """Whether only this machine can reach a server at this address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host in HERE


def launch(blocks: gr.Blocks, host: str, port: int | None) -> str:
    """Serve the page in threads of its own; returns its address. A port in use is an OSError."""
    guard = [Middleware(TrustedHostMiddleware, allowed_hosts=[*HERE, f"[{host}]", host])] if is_here(host) else []
    guard.append(Middleware(Leaving))
    _, address, _ = blocks.launch(
        server_name=host,
        server_port=port,
        share=False,
        inbrowser=False,
        prevent_thread_lock=True,
        quiet=True,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        max_file_size=MAX_BYTES,
        theme=gr.themes.Default(font=SYSTEM, font_mono=MONOSPACE),
        app_kwargs={"middleware": guard},
    )
    return str(address)


@final
class Leaving:
    """A visitor who closes the page while a request is on its way is no error of the server."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as the page does; if nobody is left to answer, end in silence."""
        with suppress(ClientDisconnect):
            await self.app(scope, receive, send)


def in_one_sentence(action: Callable[..., Any]) -> Callable[..., Any]:
    """Show what a visitor can mend as a message, without a traceback; anything else is an error of ours."""

    @wraps(action)
    def guarded(*values: Any) -> Any:
        try:
            return action(*values)
        except (ValueError, OSError) as error:
            text = str(error)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            text = "there is not enough memory for this; choose fewer images"
        raise gr.Error(html.escape(text, quote=False), print_exception=False)

    return guarded


@final
@dataclass
class _Page:
    """The tabs; each builds its fields and says what its button runs."""

    bundle: Bundle
    examples: Tensor | None
    _next: list[int] = field(default_factory=lambda: [0])  # number of the next example

    def samples(self) -> None:
        methods = actions.sampling_methods(self.bundle)
        gr.Markdown("Two methods from the same noise. Few steps show the difference best.")
        with gr.Row():
            first = gr.Dropdown(methods, value=actions.preferred(methods, "DDIM"), label="First method")
            second = gr.Dropdown(methods, value=actions.preferred(methods, "Bridge 2M"), label="Second method")
        with gr.Row():
            steps, seed = self._steps(5), self._seed()
            count = gr.Slider(1, MAX_IMAGES, 9, step=1, label="Images")
        with gr.Row():
            label, guidance = self._class(("each in turn", EACH)), self._guidance()
        go = _button("Draw", "samples")
        with gr.Row():
            titles, pictures = zip(
                _titled("First method", "samples-first"), _titled("Second method", "samples-second"), strict=True
            )
        self._run(go, _compare, [first, second, steps, count, seed, label, guidance], [*titles, *pictures])

    def path(self) -> None:
        methods = actions.path_methods(self.bundle)
        gr.Markdown("From noise to an image. Above is what the sampler holds, below what the network expects.")
        with gr.Row():
            method = gr.Dropdown(methods, value=actions.preferred(methods, "NPR-DDPM", "A-DDPM"), label="Method")
            steps, seed = self._steps(25), self._seed()
        with gr.Row():
            label, guidance = self._class(), self._guidance()
        go = _button("Follow", "path")
        outputs = [_shown("Path", "path-strip")]
        self._run(go, actions.denoising_path, [method, steps, seed, label, guidance], outputs)

    def uncertainty(self) -> None:
        known = actions.covariances(self.bundle)
        gr.Markdown("An image is hidden in noise. The map shows where the model is not sure what was there.")
        with gr.Row():
            editor = self._editor("uncertainty", drawing=True)
            with gr.Column():
                share = gr.Slider(actions.LEAST_NOISE, actions.MOST_NOISE, 50, step=1, label="Noise, in percent")
                kind = gr.Dropdown(known, value=actions.preferred(known), label="Covariance")
                seed, label = self._seed(), self._class()
        go = _button("Ask", "uncertainty")
        outputs = [_shown("What the model knows", "uncertainty-map")]
        self._run(go, actions.uncertainty, [editor, share, kind, seed, label], outputs)

    def bits(self) -> None:
        latents = self.bundle.decoder is not None
        gr.Markdown(
            "How improbable the model finds an image. Lower: less surprise."
            if latents
            else "How many bits per pixel and channel the model needs for an image. Fewer bits: less surprise."
        )
        with gr.Row():
            editor = self._editor("bits", drawing=True)
            with gr.Column():
                steps, seed, label = self._steps(10), self._seed(), self._class()
        go = _button("Measure", "bits")
        with gr.Row():
            table = gr.Markdown(elem_id="bits-table", min_height=120)
            few = 0 < len(self.bundle.class_numbers) <= actions.MAX_CLASSES
            classes = gr.Label(label="Class", elem_id="bits-classes", visible=few)
        self._run(go, _score, [editor, steps, seed, label], [table, classes])

    def restoration(self) -> None:
        methods = actions.restoring_methods(self.bundle)
        gr.Markdown("Paint over a part of the image. The model fills it in, in several ways.")
        with gr.Row():
            editor = self._editor("restoration", drawing=False)
            with gr.Column():
                method = gr.Dropdown(
                    methods, value=actions.preferred(methods, "NPR-DDPM", "SN-DDPM", "A-DDPM"), label="Method"
                )
                steps, seed, label = self._steps(25), self._seed(), self._class()
                count = gr.Slider(2, MAX_IMAGES, 9, step=1, label="Samples")
        go = _button("Restore", "restoration")
        with gr.Row():
            outputs = [_shown("Mean and standard deviation", "restoration-mean")]
            outputs.append(_shown("Samples", "restoration-samples"))
        self._run(go, actions.restoration, [editor, method, steps, count, seed, label], outputs)

    def _run(self, button: Any, action: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> None:
        def run(*values: Any) -> Any:
            return action(self.bundle, *values)

        _one_at_a_time(button.click, run, inputs, outputs)

    def _steps(self, value: int) -> Any:
        return gr.Slider(MIN_STEPS, MAX_STEPS, value, step=1, label="Steps")

    def _seed(self) -> Any:
        return gr.Number(0, label="Seed")

    def _class(self, *first: tuple[str, int]) -> Any:
        empty = [("any", ANY)] if self.bundle.empty_condition else []
        choices = [*first, *empty, *((f"class {label}", label) for label in self.bundle.class_numbers)]
        value = choices[0][1] if choices else None
        return gr.Dropdown(choices, value=value, label="Class", visible=self.bundle.classes is not None)

    def _guidance(self) -> Any:
        able = self.bundle.classes is not None and bool(self.bundle.empty_condition)
        return gr.Slider(0, MAX_GUIDANCE, 1, step=0.1, label="Guidance (1: none; needs a class)", visible=able)

    def _editor(self, name: str, drawing: bool) -> Any:
        shape = self.bundle.picture_shape
        start = blank(shape) if self.examples is None else enlarged(self.examples[0])
        colours = (GREYS if shape[0] == 1 else COLOURS) if drawing else [ERASER]
        brush = gr.Brush(default_size=start.width // 12, colors=colours, default_color=colours[0], color_mode="fixed")
        with gr.Column():
            editor = gr.ImageEditor(
                start,
                type="pil",
                format="png",
                sources=[],
                transforms=[],
                layers=False,
                buttons=[],
                brush=brush,
                eraser=gr.Eraser(default_size=start.width // 12),
                canvas_size=start.size,
                label="Draw on it" if drawing else "Paint over what is to be restored",
                elem_id=f"{name}-editor",
            )
            with gr.Row():
                example = gr.Button("Another example", size="sm", min_width=80, elem_id=f"{name}-example")
                empty = gr.Button("Blank", size="sm", min_width=80, visible=drawing)
                file = gr.UploadButton("Upload", size="sm", min_width=80, file_types=FORMATS, elem_id=f"{name}-upload")
        _one_at_a_time(example.click, self._example, [], [editor])
        _one_at_a_time(empty.click, lambda: blank(shape), [], [editor])
        _one_at_a_time(file.upload, lambda path: read_upload(path, shape), [file], [editor])
        return editor

    def _example(self) -> Image.Image:
        """The next held-out image; where there is none, a sample."""
        self._next[0] += 1
        if self.examples is not None:
            return enlarged(self.examples[self._next[0] % len(self.examples)])
        return enlarged(actions.example(self.bundle, self._next[0]))


def _compare(bundle: Bundle, first: Any, second: Any, *values: Any) -> tuple[str, str, Image.Image, Image.Image]:
    """Samples below the names of the methods that drew them."""
    left, right = actions.compare(bundle, first, second, *values)
    return f"**{first}**", f"**{second}**", left, right


def _score(bundle: Bundle, *values: Any) -> tuple[str, dict[str, float]]:
    rows, chances = actions.score(bundle, *values)
    unit = BITS if bundle.decoder is None else NATS
    lines = [f"| {name} | {bound:.3f} |" for name, bound in rows]
    return "\n".join([f"| method | {unit}, at most |", "|---|---:|", *lines, "", LONG_STEPS]), chances


def _button(text: str, name: str) -> Any:
    return gr.Button(text, variant="primary", elem_id=f"{name}-go")


def _shown(label: str, name: str) -> Any:
    """A picture below its title."""
    return _titled(label, name)[1]


def _titled(label: str, name: str) -> tuple[Any, Any]:
    """A title and the picture below it: gradio's own title would cover a corner of the picture."""
    look: dict[str, Any] = {"interactive": False, "buttons": ["download"], "show_label": False}
    with gr.Column():
        title = gr.Markdown(f"**{label}**", elem_id=f"{name}-title")
        return title, gr.Image(label=label, type="pil", format="png", elem_id=name, **look)


def _one_at_a_time(
    event: Callable[..., Any], action: Callable[..., Any], inputs: list[Any], outputs: list[Any]
) -> None:
    event(
        in_one_sentence(action), inputs, outputs, concurrency_id="work", concurrency_limit=1, api_visibility="private"
    )
