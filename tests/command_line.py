"""Commands in the process of the tests."""

from __future__ import annotations

from typer.testing import CliRunner

from optcov.cli import app

runner = CliRunner()


def run(*arguments: object) -> str:
    """Run a command that must succeed, and return what it printed."""
    result = runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
