from __future__ import annotations

import json
import signal
import time
from importlib import resources
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from close_outputs import assert_close_outputs
from optcov import Schedule, Trajectory, bundle, data, storage
from optcov.bundle import Bundle, BundleError
from optcov.bundle import directory as directories
from optcov.networks import Backbone, HeadedNetwork, TimeArgument, fingerprint
from optcov.sampling import sample
from small_bundles import SHAPE, small_bundle, small_head, small_numbers, small_unet
from warm_commands import WarmCommands


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundles") / "small"
    small_bundle().with_provenance(seeds={"data": 1}, data="abc").save(directory)
    return directory


def test_a_bundle_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    before = small_bundle().with_provenance(seed=3)
    before.save(tmp_path / "a")
    after = bundle.load(tmp_path / "a")
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    one, other = before.network(x, 0.4), after.network(x, 0.4)
    assert_close_outputs(other.noise, one.noise)
    assert_close_outputs(other.head("npr"), one.head("npr"))
    assert_close_outputs(other.head("sn"), one.head("sn"))
    weights = after.network.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in before.network.state_dict().items())
    assert before.fingerprint == after.fingerprint
    assert after.provenance == {"seed": 3}
    assert after.name == "a"
    assert not any(parameter.requires_grad for parameter in after.network.parameters())
    for name, values in before.numbers.tensors().items():  # type: ignore[union-attr]
        assert torch.equal(values, after.numbers.tensors()[name])  # type: ignore[union-attr]


def test_diffusers_reads_the_noise_predictor(saved: Path) -> None:
    from diffusers import UNet2DModel

    unet = UNet2DModel.from_pretrained(saved / "unet")
    assert fingerprint(unet) == bundle.load(saved).fingerprint


def test_loading_leaves_the_callers_random_numbers_alone(saved: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    bundle.load(saved)
    assert torch.equal(torch.rand(3), expected)


def test_rounded_weights_are_stored_in_half_the_space_and_lose_nothing_more(tmp_path: Path) -> None:
    plain = Bundle(HeadedNetwork(Backbone.of(small_unet()), Schedule.vp_sde()), SHAPE)
    original = fingerprint(plain.unet)
    half = plain.with_float16_weights()
    assert fingerprint(plain.unet) == original
    plain.save(tmp_path / "whole")
    half.save(tmp_path / "half")
    weights = [tmp_path / name / "unet" / "diffusion_pytorch_model.safetensors" for name in ("half", "whole")]
    assert weights[0].stat().st_size < 0.65 * weights[1].stat().st_size
    loaded = bundle.load(tmp_path / "half")
    assert loaded.fingerprint == half.fingerprint
    assert next(loaded.unet.parameters()).dtype == torch.float32
    with pytest.raises(BundleError, match="before fitting heads"):
        small_bundle().with_float16_weights()


def test_a_head_of_another_backbone_is_refused_in_words(saved: Path, tmp_path: Path) -> None:
    other = Bundle(HeadedNetwork(Backbone.of(small_unet(seed=5)), Schedule.vp_sde()), SHAPE)
    mine = bundle.load(saved).fingerprint
    with pytest.raises(ValueError, match="fitted on another backbone") as caught:
        other.with_heads({"npr": small_head()}, mine)
    assert mine not in str(caught.value)
    other.with_heads({"npr": small_head()}, other.fingerprint).save(tmp_path / "other")
    target = tmp_path / "other" / "heads" / "npr.safetensors"
    target.write_bytes((saved / "heads" / "npr.safetensors").read_bytes())
    with pytest.raises(BundleError, match="fitted on another backbone") as caught:
        bundle.load(tmp_path / "other")
    assert str(target) in str(caught.value)


def test_a_network_that_was_trained_on_is_not_saved_with_its_old_heads(tmp_path: Path) -> None:
    changed = small_bundle()
    with torch.no_grad():
        next(changed.unet.parameters()).add_(1)
    with pytest.raises(BundleError, match="weights of the noise predictor changed"):
        changed.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (Schedule.vp_sde(0.2, 15.0), "vp_sde"),
        (Schedule.linear(), "linear"),
        (Schedule.linear(50, scale=False), "linear"),
        (Schedule.cosine(40), "cosine"),
        (Schedule.from_betas([0.1, 0.2, 0.3]), "betas"),
    ],
    ids=str,
)
def test_schedules_survive_being_written_down(schedule: Schedule, kind: str) -> None:
    spec = json.loads(json.dumps(bundle.schedule_spec(schedule)))
    assert spec["kind"] == kind
    again = bundle.build_schedule(spec)
    times = torch.linspace(0, 1, 7, dtype=torch.float64) if schedule.steps is None else torch.arange(schedule.steps + 1)
    assert torch.equal(again.log_alpha_bar(times), schedule.log_alpha_bar(times))


def test_another_schedule_matches_noise_levels_of_network_and_numbers(saved: Path) -> None:
    own, linear = bundle.load(saved), bundle.load(saved, schedule="linear")
    assert linear.schedule.steps == 1000
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    level = float(linear.schedule.log_alpha_bar(500))
    a, b = (20 - 0.1) / 2, 0.1  # log alpha-bar = -(b t + a t^2) of the VP SDE
    t = (-b + (b * b - 4 * a * level) ** 0.5) / (2 * a)
    assert torch.allclose(linear.network(x, 500).noise, own.network(x, t).noise, atol=1e-5)
    assert linear.per_time("mean_square_noise")(500).item() == pytest.approx(
        own.per_time("mean_square_noise")(t).item(), abs=1e-9
    )


def test_numbers_per_time_are_exact_where_they_were_measured() -> None:
    small = small_bundle(Schedule.linear(50))
    numbers = small.numbers
    assert numbers is not None
    at = small.per_time("mean_square_residual")
    assert torch.equal(at(numbers.times), numbers.mean_square_residual)
    assert at(20).shape == ()
    between = at(torch.tensor([20, 21]))
    assert between.shape == (2,)


def test_methods_get_what_they_need(saved: Path) -> None:
    small = bundle.load(saved, schedule="linear")
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    npr = small.reverse_process("NPR-DDPM").step(x, 500, 400)
    expected = small.reverse_process("DDPM, beta-tilde", covariance="npr").step(x, 500, 400)
    assert_close_outputs(npr.variance, expected.variance)
    gamma = small.per_time("mean_square_noise")(500)
    v = (1 - gamma) * torch.exp(-small.schedule.log_snr(500))
    analytic = small.reverse_process("A-DDIM").posterior(x, 500).variance
    assert torch.allclose(analytic.flatten()[0], v.clamp(max=1.0))
    with pytest.raises(BundleError, match="no head 'range'"):
        small.reverse_process("Improved DDPM")
    with pytest.raises(ValueError, match="continuous time"):
        small.reverse_process("SN-DPM")
    bare = Bundle(small.network, SHAPE)
    with pytest.raises(BundleError, match="no numbers per time"):
        bare.reverse_process("A-DDPM")


@pytest.mark.parametrize(("method", "heads"), [("NPR-DDIM", ["npr"]), ("DDPM, beta-tilde", []), ("A-DDPM", [])])
def test_a_sampler_computes_the_head_of_its_method_alone(method: str, heads: list[str]) -> None:
    model = small_bundle(Schedule.linear(50))
    sampler = bundle.Sampler(model, method, 3)
    assert sampler.process is not None
    assert list(sampler.process.predict(torch.zeros(2, *SHAPE), 5).heads) == heads
    whole = model.reverse_process(method)
    assert list(whole.predict(torch.zeros(2, *SHAPE), 5).heads) == ["npr", "sn"]
    drawn = sample(whole, model.trajectory(3), (2, *SHAPE), noise_cap=model.noise_cap(method))
    assert_close_outputs(sampler.draw(range(2)).x_0, drawn)


def test_noise_caps_of_the_bundle_come_before_the_papers(tmp_path: Path) -> None:
    import dataclasses

    capped = dataclasses.replace(small_bundle(), noise_caps={"SN-DDPM": 2.0, "A-DDPM": None})
    capped.save(tmp_path / "a")
    loaded = bundle.load(tmp_path / "a")
    assert [loaded.noise_cap(method) for method in ("sn-ddpm", "A-DDPM", "NPR-DDPM", "DDIM")] == [2.0, None, 1.0, None]


def test_optimal_trajectories_are_kept_by_schedule_method_and_length(tmp_path: Path) -> None:
    linear = small_bundle().with_schedule("linear")
    both = linear.with_trajectories("NPR-DDPM", [Trajectory((1, 30, 1000)), Trajectory((5, 1000))])
    both = both.with_trajectories("npr-ddpm", [Trajectory((1, 40, 1000))])
    both.save(tmp_path / "a")
    loaded = bundle.load(tmp_path / "a", schedule="linear")
    assert loaded.trajectory(3, "optimal") == Trajectory((1, 40, 1000))
    assert loaded.trajectory(2, "optimal") == Trajectory((5, 1000))
    with pytest.raises(BundleError, match="stored lengths: 2, 3"):
        loaded.trajectory(4, "optimal")
    with pytest.raises(BundleError, match="stored lengths: none"):
        bundle.load(tmp_path / "a").trajectory(3, "optimal")
    assert loaded.trajectory(3) == Trajectory.even(loaded.schedule, 3)
    assert loaded.trajectory(3, "quadratic") == Trajectory.quadratic(loaded.schedule, 3)
    with pytest.raises(BundleError, match="unknown kind"):
        loaded.trajectory(3, "best")


def test_optimal_trajectories_go_with_the_head_or_the_numbers_they_were_found_with() -> None:
    full = small_bundle()
    for method in ("NPR-DDPM", "SN-DDPM", "A-DDPM", "DDPM, beta"):
        full = full.with_trajectories(method, [Trajectory((0.5, 1.0))])
    headed = full.with_heads({"npr": small_head(3)}, full.fingerprint)
    assert {entry.method for entry in headed.trajectories} == {"SN-DDPM", "A-DDPM", "DDPM, beta"}
    measured = full.with_numbers(small_numbers(full.schedule))
    assert {entry.method for entry in measured.trajectories} == {"NPR-DDPM", "SN-DDPM", "DDPM, beta"}


def test_other_time_arguments_parameterisations_and_ranges_survive(tmp_path: Path) -> None:
    network = HeadedNetwork(
        Backbone.of(small_unet(out_channels=2)),
        Schedule.linear(40),
        time_argument=TimeArgument(25.0, shift=1),
        parameterisation="v_prediction",
        learned_range=True,
    )
    Bundle(network, SHAPE, data_range=None).save(tmp_path / "a")
    loaded = bundle.load(tmp_path / "a")
    assert loaded.network.time_argument == TimeArgument(25.0, 1)
    assert loaded.network.parameterisation == "v_prediction"
    assert loaded.data_range is None
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert loaded.reverse_process("Improved DDPM").step(x, 10, 5).variance.shape == x.shape


def test_saving_replaces_a_bundle_and_nothing_else(tmp_path: Path) -> None:
    small = small_bundle()
    small.save(tmp_path / "a")
    small.with_provenance(round=2).save(tmp_path / "a")
    assert bundle.load(tmp_path / "a").provenance == {"round": 2}
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"'notes.txt', which is no part of a bundle"):
        small.save(tmp_path / "a")
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BundleError, match="is no directory"):
        small.save(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_a_failed_save_leaves_the_old_bundle_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_bundle()
    small.save(tmp_path / "a")
    write_json = storage.write_json

    def full_disk(path: Path, content: object) -> None:
        if path.name == "provenance.json":
            raise storage.StorageError(f"cannot write {path}: No space left on device")
        write_json(path, content)

    monkeypatch.setattr(storage, "write_json", full_disk)
    with pytest.raises(storage.StorageError, match=rf"cannot write {tmp_path}/a/provenance.json: No space left"):
        small.with_provenance(round=2).save(tmp_path / "a")
    assert bundle.load(tmp_path / "a").provenance == {}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_without_an_exchange_in_one_step_the_old_directory_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "_exchange", lambda first, second: False)
    for content in ("one", "two"):
        with directories.atomic_directory(tmp_path / "d", frozenset({"file"})) as scratch:
            (scratch / "file").write_text(content)
    assert (tmp_path / "d" / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    for left in (".d.0123abcd.part", ".d.xy_4z678.part", ".other.0123abcd.part"):
        (tmp_path / left).mkdir()
    (tmp_path / ".d.0123abcd.lock").touch()
    (tmp_path / ".d.notes.lock").touch()
    with directories.atomic_directory(tmp_path / "d", frozenset()) as living:
        with directories.atomic_directory(tmp_path / "d", frozenset()):
            assert living.is_dir()
        assert living.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".d.notes.lock", ".other.0123abcd.part", "d"]


def test_a_failed_writer_leaves_nothing_beside_the_directory(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot write"), directories.atomic_directory(tmp_path / "d", frozenset()):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from importlib import resources
from pathlib import Path
from optcov.bundle.directory import atomic_directory
for number in range(100_000):
    with atomic_directory(Path(sys.argv[1]), frozenset({"a", "b"})) as scratch:
        (scratch / "a").write_text(str(number))
        (scratch / "b").write_text(str(number))
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_a_whole_directory(commands: WarmCommands, tmp_path: Path) -> None:
    target = tmp_path / "d"
    writer = commands.start_code(WRITER, target, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(writer.said().splitlines()) < 20:
        assert time.monotonic() < deadline, "the writer did not write"
        time.sleep(0.01)
    writer.signal(signal.SIGKILL)
    assert writer.wait().code == -signal.SIGKILL
    assert int((target / "a").read_text()) >= 19
    assert (target / "a").read_text() == (target / "b").read_text()


def test_names_resolve_to_embedded_models_and_paths_to_directories(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optcov.bundle.loading.embedded_models", lambda: {"small": saved})
    assert bundle.load("small").name == "small"
    monkeypatch.chdir(tmp_path)
    small_bundle().with_provenance(local=True).save("small")
    assert "local" not in bundle.load("small").provenance
    assert bundle.load("./small").provenance == {"local": True}
    assert bundle.load(Path("small")).provenance == {"local": True}
    with pytest.raises(BundleError, match=r"neither a directory nor an embedded model \(small\)"):
        bundle.load("../small")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match=r"it has no config.json"):
        bundle.load("empty")


def test_info_describes_a_bundle_for_people_and_machines(saved: Path) -> None:
    from optcov.cli import app

    result = CliRunner().invoke(app, ["info", str(saved), "--json"])
    content = json.loads(result.stdout)
    assert content["network"]["parameters"] == sum(p.numel() for p in small_unet().parameters())
    assert content["schedule"]["kind"] == "vp_sde"
    assert set(content["heads"]) == {"npr", "sn"}
    assert content["provenance"]["seeds"] == {"data": 1}
    assert content["sizes"]["in all"] == sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    shown = CliRunner().invoke(app, ["info", str(saved)])
    assert shown.exit_code == 0
    for told in ("vp_sde", "npr   conv", "seeds", "data 1", "predicts the noise", "next: optcov sample"):
        assert told in shown.stdout


def test_512_test_images_come_with_the_package_and_their_licence() -> None:
    images = bundle.test_images("fashion")
    assert images.shape == (512, 1, 28, 28)
    again = data.ImageSet(data.to_8bit(images))
    assert again.checksum == "3a24e9070359d49c55bdeac76ae53cdd2d0977d3af6ff8fc4304f3d90979720c"
    licence = resources.files("optcov") / "models" / "fashion-images" / "LICENSE.txt"
    assert "Zalando SE" in licence.read_text()
    for name in ("nothing", "../models/fashion"):
        with pytest.raises(BundleError, match="no test images come with"):
            bundle.test_images(name)
