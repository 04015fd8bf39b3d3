from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optcov import Schedule, __version__, cli
from optcov.cli import COMMANDS, TASKS, app, main
from small_bundles import save_with_images

runner = CliRunner()


def test_help_lists_every_command_and_fits_a_screen():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for task, commands in TASKS.items():
        assert task in result.output
        for name, what in commands.items():
            assert f"{name:11} {what}\n" in result.output
    lines = result.output.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_without_a_command_there_is_help():
    result = runner.invoke(app, [])
    assert result.exit_code == 0
    assert "optcov demo" in result.output


def test_an_unknown_command_is_a_users_mistake():
    result = runner.invoke(app, ["nothing"])
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.output


def test_every_file_of_a_command_is_in_the_help():
    rooms = (Path(cli.__file__).parent, Path(cli.__file__).parents[1] / "experiments" / "commands")
    files = {path.stem.rstrip("_") for room in rooms for path in room.glob("*.py")}
    assert files - {"__init"} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name):
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("words", [[], ["sample"], ["fit"]])
def test_help_does_not_wait_for_torch(words):
    heavy = "('torch', 'diffusers', 'matplotlib', 'accelerate', 'numpy')"
    code = (
        f"import sys; from optcov.cli import app; app({[*words, '--help']}, standalone_mode=False); "
        f"print(*[name in sys.modules for name in {heavy}], file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stderr.split() == ["False"] * 5
    assert "Usage" in shown.stdout


def test_importing_the_package_does_not_wait_for_diffusers():
    code = "import sys, optcov; optcov.ReverseProcess; print('diffusers' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == __version__


def test_a_users_mistake_is_one_sentence_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["optcov", "sample", "no-such-bundle"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "no-such-bundle" in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["sample small", "bpd small x", "trajectory small x", "train x", "table cost"])
def test_no_command_writes_other_files_into_a_bundle(tmp_path, monkeypatch, command):
    monkeypatch.chdir(save_with_images(tmp_path, Schedule.linear(24)))
    before = sorted(Path("small").rglob("*"))
    with pytest.raises(ValueError, match="--out small is a bundle, which other files would spoil"):
        runner.invoke(app, [*command.split(), "--out", "small"], catch_exceptions=False)
    assert sorted(Path("small").rglob("*")) == before


def test_the_mixture_demo_writes_a_picture_and_numbers(tmp_path):
    out = tmp_path / "demo.png"
    result = runner.invoke(app, ["demo", "--mixture", "--out", str(out), "--json", "--points", "200"])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    rows = {row["method"]: row for row in json.loads(result.stdout)["rows"]}
    assert {"OCM-DDPM", "SN-DPM", "data"} < set(rows)
    assert float(rows["SN-DDPM"]["distance"]) < float(rows["DDPM, beta"]["distance"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--images", "100000"), "--images 100000 is more than the 512 test images"),
        (("--steps", "5"), "--steps and --points are of --mixture"),
        (("--mixture", "--images", "5"), "--images is not of --mixture"),
        (("--out", ""), "--out is empty"),
        (("--out", "."), "--out is empty"),
        (("--out", "/proc/demo.png"), "cannot write /proc/demo.png"),
    ],
)
def test_the_demo_refuses_what_it_cannot_do_before_it_draws(words, reason, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("optcov.bundle.pictures.compare", lambda *_, **__: pytest.fail("it drew"))
    result = runner.invoke(app, ["demo", *words])
    assert isinstance(result.exception, ValueError)
    assert reason in str(result.exception)
    assert not any(tmp_path.iterdir())


def test_unknown_attributes_of_the_package_are_refused():
    import optcov

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        optcov.nothing  # noqa: B018
    assert "ReverseProcess" in dir(optcov)
    for name in optcov.__all__:
        assert getattr(optcov, name) is not None


def test_help_takes_less_than_0_7_seconds_of_a_core():
    assert seconds_of_a_core("--help") < 0.7


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_takes_less_than_0_7_seconds_of_a_core(name):
    assert seconds_of_a_core(name, "--help") < 0.7


def seconds_of_a_core(*words: str, repeats: int = 3) -> float:
    """CPU time of a command: how long it takes where nothing else runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(repeats):
        subprocess.run([sys.executable, "-m", "optcov", *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / repeats


@pytest.mark.parametrize(("rank", "heard"), [("0", True), ("1", False)])
def test_what_a_library_says_is_said_by_one_process(rank, heard, monkeypatch, caplog):
    logger = logging.getLogger("optcov.data")
    with caplog.at_level(logging.WARNING, "optcov"), monkeypatch.context() as patch:
        patch.setenv("RANK", rank)
        patch.setattr(sys, "argv", ["optcov", "--version"])
        with pytest.raises(SystemExit):
            main()
        logger.warning("converted")
    assert ("converted" in caplog.text) == heard


def test_the_first_screen_of_a_command_has_few_options_and_help_all_has_every_one():
    import typer

    from optcov.cli import app

    group = typer.main.get_command(app)
    for name in COMMANDS:
        options = [p for p in group.get_command(None, name).params if p.param_type_name == "option"]
        shown = [option.name for option in options if not option.hidden]
        assert len(shown) <= 10, (name, shown)
        everything = CliRunner().invoke(app, [name, "--help-all"], env={"COLUMNS": "200"}).output
        for option in options:
            assert max(option.opts, key=len) in everything, (name, option.name)
        first = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert ("--help-all" in first) == (len(shown) < len(options))


def test_help_keeps_the_brackets_of_an_extra():
    assert "pip install 'optcov[play]'" in CliRunner().invoke(app, ["play", "--help"], env={"COLUMNS": "200"}).output
