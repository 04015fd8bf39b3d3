"""The command line: only parses and prints; each command drains an iterator from below.

One file per command, with a function `command`, imported when it is asked for. A file imports typer at its top and
everything heavy inside the function, so that neither `optcov --help` nor `optcov COMMAND --help` waits for torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from optcov.processes import leave

if TYPE_CHECKING:
    from collections.abc import Mapping

TASKS: Mapping[str, Mapping[str, str]] = {  # what one wants to do -> command -> what it does, in a few words
    "See what it does": {
        "demo": "the methods side by side on the embedded model, and their bits/dim",
        "play": "a local page: draw, erase, compare, measure, on any bundle",
        "info": "what a bundle holds: network, schedule, heads, calibration, sizes",
    },
    "Use a model that you have": {
        "fit": "heads for the covariance, on your frozen network: makes a bundle",
        "import": "one of the paper's checkpoints, or a diffusers model, as a bundle",
        "sample": "images by any method; --compare and --variance-map make pictures",
        "bpd": "bits/dim of images, for every covariance and number of steps",
        "restore": "an image from a damaged one, with its uncertainty: mask, blur",
        "trajectory": "find the timesteps with the lowest bound, and save them",
    },
    "Train one, and measure": {
        "data": "fetch Fashion-MNIST or CIFAR-10, verified by checksum",
        "train": "a noise predictor from images, resumable",
        "statistics": "compute reference statistics for FID and other distances",
        "frechet": "the distance between two sets of images, or samples",
        "table": "a table of the paper on your bundle, beside the paper's numbers",
        "report": "tables, samples, variances and their errors on one HTML page",
        "bench": "the speed of everything, as ratios within one run",
    },
}
COMMANDS = [name for commands in TASKS.values() for name in commands]
EXPERIMENTS = ("table", "report", "bench")  # commands of that room
SUMMARY = "The best variance for each sampling step of a diffusion model you have."
UsageError: Any = typer.BadParameter.__bases__[0]  # click's, which typer keeps in different places
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class TwoScreens(TyperCommand):
    """A command whose help shows the options that most people need, and all of them by --help-all."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Show every option if --help-all is among the words."""
        if "--help-all" in args:
            parameters: list[Any] = list(self.params)
            for parameter in parameters:
                parameter.hidden = False
            self.epilog, args = None, ["--help"]
        return super().parse_args(ctx, args)


class TaskGroup(TyperGroup):
    """Lists commands by task on one screen, and imports the file of a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands, in the order of the help."""
        return COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the file of a command; None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        room = "experiments.commands" if cmd_name in EXPERIMENTS else "cli"
        module = importlib.import_module(f"optcov.{room}.{'import_' if cmd_name == 'import' else cmd_name}")
        alone = typer.Typer(add_completion=False, context_settings=SETTINGS)
        alone.command(cmd_name, cls=TwoScreens)(module.command)
        command: Any = typer.main.get_command(alone)
        shown: tuple[str, ...] = getattr(module, "FIRST_SCREEN", ())  # options that most people need; none for all
        for parameter in command.params if shown else ():
            parameter.hidden = parameter.param_type_name == "option" and parameter.name not in shown
        more = sum(bool(getattr(parameter, "hidden", False)) for parameter in command.params)
        command.epilog = f"{more} more options, for rarer needs: optcov {cmd_name} --help-all" if more else None
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help that starts from tasks."""
        lines = ["Usage: optcov COMMAND [OPTIONS]", "", SUMMARY, ""]
        for task, commands in TASKS.items():
            lines += [task, *(f"  {name:11} {what}" for name, what in commands.items())]
        lines += ["Start by: optcov demo. Each command explains itself, as in: optcov sample --help"]
        formatter.write("\n".join(lines) + "\n")


app = typer.Typer(
    name="optcov", cls=TaskGroup, add_completion=False, pretty_exceptions_enable=False, context_settings=SETTINGS
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    """Hold the options that belong to no command; without a command, help."""
    from optcov import __version__

    if version or ctx.invoked_subcommand is None:
        typer.echo(__version__ if version else ctx.get_help())


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2.

    OPTCOV_TRACEBACK=1 shows where an error came from.
    """
    if os.environ.get("RANK", "0") != "0":  # under Accelerate, one process speaks for all
        logging.getLogger("optcov").setLevel(logging.ERROR)
    try:
        code = app(standalone_mode=False)
    except (ValueError, OSError, UsageError) as error:
        if os.environ.get("OPTCOV_TRACEBACK"):
            raise
        from optcov.console import fail

        fail(_sentence(error) if isinstance(error, UsageError) else str(error))
    except (MemoryError, RuntimeError) as error:
        from optcov.console import fail, out_of_memory

        if os.environ.get("OPTCOV_TRACEBACK") or not out_of_memory(error):
            raise
        fail("there is not enough memory for this; use a smaller batch, smaller images or a smaller network")
    except typer.Abort:
        code = 130  # what shells say for Ctrl-C
    leave()
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(error: Any) -> str:
    """What is wrong with the words of a command, and where the right ones are."""
    command = [word for word in sys.argv[1:2] if word in COMMANDS]
    said = error.format_message().rstrip(".")
    given = [f"{entry['input']!r:.80}" for entry in getattr(error.__cause__, "errors", list)()]  # pydantic's
    unsaid = [value for value in given if value not in said]
    got = f", got {', '.join(unsaid)}" if unsaid else ""
    return f"{said}{got}; {' '.join(['optcov', *command, '--help'])} tells what there is"
