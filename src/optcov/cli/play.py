"""`optcov play`: open a local page to play with a bundle."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import typer

from optcov.console import announce, output

if TYPE_CHECKING:
    from torch import Tensor

    from optcov.bundle import Bundle

MAX_PORT = 65535
EXAMPLES = 200  # images at most that the page takes turns with


def command(
    bundle: str = typer.Argument("fashion", help="A bundle: an embedded model's name, or a directory."),
    data: str | None = typer.Option(
        None,
        help="Images to begin with. By default test images of the embedded model, or samples.",
        show_default=False,
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen at. 0.0.0.0 lets other machines in."),
    port: int | None = typer.Option(
        None, help="Port to listen at. By default the first free one from 7860.", show_default=False
    ),
) -> None:
    """Open a page to play with a bundle: samples, paths, uncertainty, bits/dim, restoration.

    It needs gradio: pip install 'optcov\\[play]'. Everything runs on this machine.
    """
    if port is not None and not 1 <= port <= MAX_PORT:
        raise ValueError(f"--port {port} is no port; choose one from 1 to {MAX_PORT}, or leave it out")
    require_free(host, port)
    page = load_page()
    from optcov import bundle as bundles
    from optcov.processes import this_process

    model = bundles.load(bundle)
    model.network.to(this_process().device)
    blocks = page.build(model, _examples(bundle, model, data))
    address = page.launch(blocks, host, port)
    output.print(f"{model.name}: {address}", markup=False, highlight=False, soft_wrap=True)
    announce("open it in a browser; Ctrl-C ends it")
    _wait(blocks)


def require_free(host: str, port: int | None) -> None:
    """Refuse an address at which nothing can listen, before the model is loaded."""
    if not host.strip():
        raise ValueError("--host is empty; give an address such as 127.0.0.1, or leave it out")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host!r:.80} is no address of this machine; use 127.0.0.1 or 0.0.0.0") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"--port {port} is in use; choose another one, or leave it out") from error
            if error.errno == errno.EACCES:
                raise ValueError(f"--port {port} is not allowed for you; choose one above 1023") from error
            raise ValueError(f"--host {host} is no address of this machine; use 127.0.0.1 or 0.0.0.0") from error


def load_page() -> Any:
    """The module of the page; a ValueError with the remedy where gradio is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio looks when it is imported
    try:
        from optcov.play import page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "gradio":
            raise
        raise ValueError("optcov play needs gradio; install it by pip install 'optcov[play]'") from error
    return page


def _examples(source: str, model: Bundle, data: str | None) -> Tensor | None:
    """Images to begin with, uint8 (n, C, H, W)."""
    from optcov.bundle import BundleError, embedded_models, test_images
    from optcov.data import load_mixed, to_8bit
    from optcov.data.tensors import fitted_to

    if data is not None:
        taken = fitted_to(load_mixed(data, "test"), model.picture_shape, model.name)
        return to_8bit(taken.select(slice(0, EXAMPLES)).x_0())
    if source not in embedded_models():
        return None
    try:
        return to_8bit(test_images(source)[:EXAMPLES])
    except BundleError:  # a model that comes without images
        return None


def _wait(blocks: Any) -> None:
    """Serve until somebody ends it."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        announce("closed")
    finally:
        blocks.close(verbose=False)
