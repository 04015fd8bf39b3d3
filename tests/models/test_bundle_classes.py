"""Class-conditional networks as bundles: saved, loaded, imported, opened from a run; and files that lie about them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler
from safetensors.torch import save_file

import optcov
from class_bundles import CLASSES, class_bundle, class_unet
from close_outputs import assert_close_outputs
from optcov import Schedule, bundle, storage
from optcov.bundle import Bundle, BundleError
from optcov.checkpoints import CheckpointError, import_model
from optcov.fitting import TrainingError
from optcov.fitting.sources import open_model, open_predictor
from optcov.networks import Backbone, HeadedNetwork
from small_bundles import SHAPE, small_bundle, small_unet

X_T = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
LABELS = {"class_labels": torch.tensor([0, 2])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classes") / "classes"
    class_bundle().save(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def outputs(found: Bundle, **condition: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return found.network(X_T, 0.4, **condition).output


def test_a_bundle_with_classes_is_the_same_after_saving_and_loading(saved: Path) -> None:
    before, after = class_bundle(), bundle.load(saved)
    assert after.classes == CLASSES
    assert after.class_numbers == [0, 1, 2]
    assert after.empty_condition["class_labels"].tolist() == [CLASSES]
    assert after.digest() == before.digest()
    for told in (LABELS, {}):
        torch.testing.assert_close(outputs(after, **told), outputs(before, **told), atol=1e-5, rtol=0)


def test_a_bundle_without_classes_is_still_of_version_1(saved: Path, tmp_path: Path) -> None:
    small_bundle().save(tmp_path / "small")
    content = json.loads((tmp_path / "small" / "config.json").read_text())
    assert content["version"] == 1
    assert "classes" not in content
    assert not (tmp_path / "small" / "conditions.safetensors").exists()
    content = json.loads((saved / "config.json").read_text())
    assert (content["version"], content["classes"], content["empty_condition"]) == (2, CLASSES, ["class_labels"])


def test_no_condition_is_the_empty_one() -> None:
    found = class_bundle()
    empty = {"class_labels": torch.full((2,), CLASSES)}
    torch.testing.assert_close(outputs(found), outputs(found, **empty), atol=1e-6, rtol=0)
    assert float((outputs(found) - outputs(found, **LABELS)).abs().max()) > 1e-3
    for other in (found.with_schedule("linear").on_its_own_schedule(), found.with_heads({}, found.fingerprint)):
        torch.testing.assert_close(outputs(other), outputs(found), atol=1e-6, rtol=0)


def test_classes_and_the_empty_condition_are_part_of_the_identity() -> None:
    found = class_bundle()
    other = found.with_empty_class(0)
    assert other.digest() != found.digest()
    assert other.class_numbers == [1, 2, 3]
    plain = small_bundle().identity()
    assert not {"classes", "empty condition"} & set(plain)


def test_a_network_without_an_empty_class_asks_for_labels() -> None:
    found = class_bundle(empty=False)
    assert (found.classes, found.empty_condition) == (CLASSES, {})
    assert outputs(found, **LABELS).shape == X_T.shape
    with pytest.raises(ValueError, match='conditional on a class, but no class is told; pass the condition "class_lab'):
        outputs(found)


def test_half_of_a_condition_is_refused() -> None:
    with pytest.raises(ValueError, match="the condition lacks 'class_labels'"):
        outputs(class_bundle(), other=torch.zeros(2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"classes": CLASSES + 1}, "3 classes and an empty one, but 4 classes are told"),
        ({"classes": None}, "3 classes and an empty one, but no classes are told"),
        ({"classes": 0}, '"classes" is'),
        ({"classes": 2**40}, '"classes" is'),
        ({"classes": True}, '"classes" is'),
        ({"empty_condition": []}, "the network has 4 classes, but 3 classes are told"),
        ({"empty_condition": ["class_labels", "surprise"]}, "but the config names class_labels, surprise"),
        ({"empty_condition": ["class_labels"] * 2}, "names one argument twice"),
        ({"empty_condition": ["../x"]}, "names of arguments"),
        ({"empty_condition": "class_labels"}, "names of arguments"),
        ({"version": 1}, "unknown"),
        ({"surprise": 1}, "unknown"),
    ],
    ids=str,
)
def test_a_config_that_lies_about_conditions_is_refused(copy: Path, changes: dict[str, Any], reason: str) -> None:
    edit(copy / "config.json", **changes)
    with pytest.raises(BundleError, match=reason):
        bundle.load(copy)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"class_labels": torch.tensor([CLASSES + 1])}, "one whole number from 0 to 3"),
        ({"class_labels": torch.tensor([-1])}, "one whole number from 0 to 3"),
        ({"class_labels": torch.tensor([3, 3])}, "a tensor of one entry"),
        ({"class_labels": torch.tensor(3)}, "a tensor of one entry"),
        ({"class_labels": torch.tensor([3], dtype=torch.int32)}, "int64"),
        ({"class_labels": torch.tensor([3.0])}, "one whole number"),
        ({"class_labels": torch.tensor([float("nan")])}, "NaN"),
        ({"class_labels": torch.tensor([[3]])}, "one whole number"),
        ({"other": torch.tensor([3])}, "holds other, but the config names class_labels"),
        ({"class_labels": torch.tensor([3]), "other": torch.tensor([3])}, "holds class_labels, other"),
    ],
    ids=str,
)
def test_a_file_of_conditions_that_does_not_fit_is_refused(copy: Path, tensors: dict[str, Any], reason: str) -> None:
    save_file(tensors, copy / "conditions.safetensors")
    with pytest.raises(BundleError, match=reason):
        bundle.load(copy)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 100)])
def test_a_missing_or_damaged_file_of_conditions_is_named(copy: Path, damage: Callable[[Path], Any]) -> None:
    damage(copy / "conditions.safetensors")
    with pytest.raises(storage.StorageError, match=r"conditions\.safetensors"):
        bundle.load(copy)


def test_an_empty_condition_of_no_argument_is_refused(copy: Path) -> None:
    edit(copy / "config.json", empty_condition=["class_labels", "sample"])
    save_file({"class_labels": torch.tensor([3]), "sample": torch.zeros(1, 2)}, copy / "conditions.safetensors")
    with pytest.raises(BundleError, match="'sample' is nothing that a UNet2DModel can be told"):
        bundle.load(copy)


def test_a_network_with_classes_in_a_bundle_of_version_1_is_refused(tmp_path: Path) -> None:
    small_bundle().save(tmp_path / "small")
    class_bundle(heads=False).save(tmp_path / "classes")
    shutil.rmtree(tmp_path / "small" / "unet")
    shutil.copytree(tmp_path / "classes" / "unet", tmp_path / "small" / "unet")
    with pytest.raises(BundleError, match="the network has 4 classes, but no classes are told"):
        bundle.load(tmp_path / "small")


@pytest.mark.parametrize("label", [-1, 4, 1.5, "3", None])
def test_an_empty_class_that_is_none_is_refused(label: Any) -> None:
    with pytest.raises(BundleError, match="none of the 4 classes 0 to 3"):
        class_bundle().with_empty_class(label)


def test_a_bundle_without_classes_has_no_empty_class() -> None:
    with pytest.raises(BundleError, match="small knows no classes"):
        small_bundle().with_empty_class(0)


# foreign models and runs


def pipeline_of(directory: Path, **options: Any) -> Path:
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(small_unet(**options), DDPMScheduler()).save_pretrained(directory)
    return directory


def test_a_pipeline_with_classes_is_imported(tmp_path: Path) -> None:
    place = pipeline_of(tmp_path / "pipeline", num_class_embeds=5)
    assert import_model(place).unet.config.num_class_embeds == 5
    assert open_model(place).classes == 5
    opened = open_model(place, empty_class=4)
    assert (opened.classes, opened.class_numbers) == (4, [0, 1, 2, 3])
    opened.save(tmp_path / "bundle")
    again = open_model(tmp_path / "bundle", empty_class=4)
    assert again.digest() == opened.digest()
    with pytest.raises(TrainingError, match="has the empty class 4 already"):
        open_model(tmp_path / "bundle", empty_class=3)


def test_other_embeddings_of_classes_are_refused_by_name(tmp_path: Path) -> None:
    place = pipeline_of(tmp_path / "pipeline", class_embed_type="timestep")
    with pytest.raises(CheckpointError, match="it embeds classes by 'timestep'"):
        import_model(place)
    network = HeadedNetwork(Backbone.of(small_unet(class_embed_type="timestep")), Schedule.linear())
    with pytest.raises(BundleError, match="embeds classes by 'timestep'"):
        Bundle(network, SHAPE).check_loadable()


def run_of(directory: Path, classes: Any, entries: int | None) -> Path:
    from optcov.bundle.weights import save_unet

    save_unet(directory / "unet", class_unet(entries) if entries else small_unet())
    network = {} if classes is None else {"classes": classes}
    (directory / "run.json").write_text(json.dumps({"schedule": "vp_sde", "network": network}))
    return directory


def test_a_run_on_labels_knows_its_classes_and_its_empty_one(tmp_path: Path) -> None:
    opened = open_predictor(run_of(tmp_path / "run", CLASSES, CLASSES + 1), half=True)
    assert (opened.classes, opened.empty_condition["class_labels"].tolist()) == (CLASSES, [CLASSES])
    opened.check_loadable()
    assert open_predictor(run_of(tmp_path / "plain", None, None)).classes is None


@pytest.mark.parametrize(("classes", "entries"), [(2, 4), (None, 4), (3, None), ("3", 4), (-1, 4), (True, 2)])
def test_a_run_whose_classes_are_not_those_of_its_network_is_refused(
    tmp_path: Path, classes: Any, entries: int | None
) -> None:
    with pytest.raises(TrainingError, match=r"run\.json tells of"):
        open_predictor(run_of(tmp_path / "run", classes, entries))


def test_a_model_in_memory_with_classes_is_opened() -> None:
    opened = open_model((class_unet(), optcov.Schedule.linear()), empty_class=3)
    assert opened.classes == CLASSES


@pytest.mark.parametrize("label", [1, None])
def test_a_pipeline_of_diffusers_draws_a_class_or_images_of_any_class(label, tmp_path):
    """Same start and step noise through DDPMPipeline and through optcov.sample; saved and loaded, it draws the same."""
    bundle = class_bundle(Schedule.linear())
    pipeline = optcov.attach(DDPMPipeline(bundle.unet, DDPMScheduler()), bundle, "NPR-DDPM", label=label)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(tmp_path)
    loaded = DDPMPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    options = {"batch_size": 2, "num_inference_steps": 4, "output_type": "pt"}
    drawn, again = (p(**options, generator=torch.Generator().manual_seed(1)).images for p in (pipeline, loaded))
    assert_close_outputs(again, drawn)
    generator, shape = torch.Generator().manual_seed(1), (2, *bundle.image_shape)
    x_0 = optcov.sample(
        bundle.reverse_process("NPR-DDPM"),
        bundle.trajectory(4),
        start=torch.randn(shape, generator=generator),
        noise=lambda t, s: torch.randn(shape, generator=generator),
        noise_cap=bundle.noise_cap("NPR-DDPM"),
        condition={} if label is None else {"class_labels": torch.tensor([label, label])},
    )
    assert (drawn - (x_0 / 2 + 0.5).clamp(0, 1)).abs().max() <= 1e-5


def test_a_label_is_refused_where_there_are_no_classes():
    bundle = small_bundle()
    with pytest.raises(ValueError, match="label = 1, but small knows no classes; leave it out"):
        optcov.attach(DDPMPipeline(bundle.unet, DDPMScheduler()), bundle, "NPR-DDPM", label=1)
