"""Commands in the process of the tests."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from unittest import mock

import pytest
from typer.testing import CliRunner

from optcov.cli import app, main

runner = CliRunner()


def run(*arguments: object) -> str:
    """Run a command that must succeed, and return what it printed."""
    result = runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class CommandLine:
    """`optcov ARGUMENTS` in this process, without the training that `train` would begin after reading its data."""

    def __init__(self, capture: pytest.CaptureFixture[str]):
        self._capture = capture

    def __call__(self, *arguments: object) -> Said:
        self._capture.readouterr()
        argv = ["optcov", *map(str, arguments)]
        no_training = mock.patch("optcov.fitting.stage1.train_noise_predictor", return_value=())
        with mock.patch.object(sys, "argv", argv), no_training, pytest.raises(SystemExit) as stop:
            main()
        said = self._capture.readouterr()
        return Said(int(stop.value.code or 0), said.out, said.err)
