"""The command line: only parses and prints; each command drains an iterator from below.

One file per command, with a function `command`. A file imports typer at its top and everything heavy inside the
function, so that `optcov --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys

import typer

from optcov.cli.console import errors

START, USE, MAKE = "Start here", "Use a model", "Make a model"

COMMANDS = {  # file name -> heading under which the help lists it
    "demo": START,
    "info": USE,
    "frechet": USE,
    "data": MAKE,
    "sample": USE,
    "bpd": USE,
    "trajectory": USE,
    "table": USE,
    "report": USE,
    "bench": MAKE,
    "train": MAKE,
    "fit": MAKE,
    "import_": MAKE,
}

app = typer.Typer(
    name="optcov",
    help="The optimal reverse covariance of a diffusion model you already have: better samples in few steps, "
    "tighter likelihoods, per-pixel uncertainty.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Hold the options that belong to no command."""
    if version:
        from optcov import __version__

        typer.echo(__version__)
        raise typer.Exit


for _name, _panel in COMMANDS.items():
    _module = importlib.import_module(f"optcov.cli.{_name}")
    app.command(_name.rstrip("_"), rich_help_panel=_panel)(_module.command)


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2.

    OPTCOV_TRACEBACK=1 shows where an error came from.
    """
    try:
        app()
    except ValueError as error:
        if os.environ.get("OPTCOV_TRACEBACK"):
            raise
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
