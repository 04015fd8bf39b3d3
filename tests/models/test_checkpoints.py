"""The paper's networks through the real import path, against outputs of the authors' code."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import UNet2DModel
from diffusers.models.resnet import ResnetBlock2D
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkpoint_files import (
    GOLDEN,
    GOLDEN_TIMES,
    as_analytic_dpm,
    as_ddim,
    as_score_sde,
    filled,
    golden_entries,
    golden_input,
    golden_networks,
    golden_state,
    prefixed,
)
from close_outputs import assert_close_outputs
from optcov.checkpoints import SOURCES, CheckpointError, export_checkpoint, import_checkpoint, read_gamma
from optcov.checkpoints.architecture import Architecture, unet_config
from optcov.checkpoints.layout import export_state, headwise_qkv
from optcov.checkpoints.sources import FAMILIES, by_name, find_family
from optcov.networks import Backbone, ConvHead, DenseHead, fingerprint
from optcov.networks.paper_unet import PaperUNet
from optcov.schedule import Schedule

CIFAR10, CIFAR10_HEAD = "cifar10_iddpm_w32_plain", "cifar10_iddpm_w32_simple"
IMAGENET = "imagenet64_iddpm_w32_plain_out6"
CELEBA, CELEBA_HEAD = "celeba64_ddpm_w32_plain", "celeba64_ddpm_w32_simple"
LSUN, VP_SDE = "lsun_ddpm_w32_res64_plain", "cifar10_vpsde_ncsnpp_nf32_plain"

# network -> (how its authors wrap the file, options, what import finds out by itself)
CASES = {
    CIFAR10: (lambda state: state, {"name": "cifar10-cs"}, ("cifar10-cs", 32)),
    CIFAR10_HEAD: (as_analytic_dpm, {"name": "cifar10-ls", "head": "npr"}, ("cifar10-ls", 32)),
    IMAGENET: (lambda state: state, {}, ("imagenet64", 64)),
    CELEBA: (as_ddim, {}, ("celeba64", 64)),
    CELEBA_HEAD: (prefixed, {"head": "sn"}, ("celeba64", 64)),
    LSUN: (lambda state: state, {}, ("lsun-bedroom", 64)),
    VP_SDE: (as_score_sde, {}, ("cifar10-vp-sde", 32)),
}


def imported(tmp_path, state, name=None, **options):
    torch.save(state, tmp_path / "model.pth")
    return import_checkpoint(tmp_path / "model.pth", name, **options)


def assert_golden(output, expected):
    difference = golden_entries(output).double() - torch.tensor(expected["entries"], dtype=torch.float64)
    assert difference.abs().max() <= 5e-5
    assert tuple(output.shape) == tuple(expected["shape"])
    assert abs(output.double().sum().item() - expected["sum"]) <= 5e-5 * output.numel() ** 0.5
    assert output.double().square().sum().item() == pytest.approx(expected["sumsq"], rel=1e-4)


@pytest.mark.parametrize("network", CASES)
def test_networks_and_heads_give_what_the_authors_code_gives(tmp_path, network):
    wrap, options, (source, size) = CASES[network]
    golden = golden_networks()[network]
    model = imported(tmp_path, wrap(golden_state(network)), **options)
    assert (model.source, model.image_shape) == (source, (3, size, size))
    with torch.no_grad():
        result = Backbone.of(model.unet)(golden_input(size), GOLDEN_TIMES)
        heads = [head(result.features, result.time_embedding) for head in model.heads.values()]
    assert_golden(result.output, golden["eps" if heads else "out"])
    assert list(model.heads) == ([options["head"]] if heads else [])
    for head in heads:
        assert_golden(head, golden["head"])
    assert model.learned_range == (network == IMAGENET)


@pytest.mark.parametrize("network", [CIFAR10_HEAD, IMAGENET, CELEBA_HEAD, VP_SDE])
def test_export_gives_back_the_authors_file(tmp_path, network):
    state = golden_state(network)
    _, options, _ = CASES[network]
    model = imported(tmp_path, state, **options)
    exported = export_checkpoint(model.unet, model.heads.get(options.get("head")))
    assert {key: value.shape for key, value in exported.items()} == {k: v.shape for k, v in state.items()}
    for key, value in exported.items():
        assert key == "sigmas" or torch.equal(value, state[key]), key


def test_only_what_the_authors_could_load_is_exported(tmp_path):
    unet = imported(tmp_path, golden_state(LSUN)).unet
    with pytest.raises(CheckpointError, match='ends by .exp.; fit it with loss="mse"'):
        export_checkpoint(unet, ConvHead(32, 3))
    with pytest.raises(CheckpointError, match="ddpm has no keys for a head of kind 'dense'"):
        export_checkpoint(unet, DenseHead(32, 3))
    small = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    with pytest.raises(CheckpointError, match="this UNet2DModel is none of the paper's networks"):
        export_checkpoint(UNet2DModel(**small))
    like_ddpm = small | {"norm_eps": 1e-6, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1}
    assert "temb.dense.0.weight" in export_checkpoint(UNet2DModel(**like_ddpm, attention_head_dim=None))
    for setting in ({"attention_head_dim": 8}, {"attention_head_dim": None, "act_fn": "gelu"}):
        with pytest.raises(CheckpointError, match="none of the paper's networks"):
            export_checkpoint(UNet2DModel(**like_ddpm, **setting))


def test_exported_sigmas_are_the_constant_of_score_sde(tmp_path):
    sigmas = export_checkpoint(imported(tmp_path, golden_state(VP_SDE)).unet)["sigmas"]
    assert (sigmas.dtype, len(sigmas)) == (torch.float64, 1000)
    assert [float(sigmas[0]), float(sigmas[-1])] == pytest.approx([50.0, 0.01])
    assert torch.allclose(sigmas[1:] / sigmas[:-1], sigmas[1] / sigmas[0])


@pytest.mark.parametrize("network", [CIFAR10, IMAGENET, CELEBA, VP_SDE])
def test_a_converted_network_saves_and_loads_by_diffusers(tmp_path, network):
    model = imported(tmp_path, golden_state(network), **CASES[network][1])
    model.unet.save_pretrained(tmp_path / "unet")
    loaded = PaperUNet.from_pretrained(tmp_path / "unet").eval()
    x = golden_input(32)
    with torch.no_grad():
        assert_close_outputs(loaded(x, GOLDEN_TIMES).sample, model.unet(x, GOLDEN_TIMES).sample)
    assert fingerprint(loaded) == fingerprint(model.unet)


def test_time_arguments_are_those_of_the_authors():
    names = {
        "CIFAR10 LS/CS": ("cifar10-ls", "cifar10-cs"),
        "CelebA64, LSUN": ("celeba64", "lsun-bedroom"),
        "ImageNet64": ("imagenet64",),
        "CIFAR10 VP SDE": ("cifar10-vp-sde",),
    }
    rows = json.loads((GOLDEN / "steps.json").read_text())["network_time_argument"]["rows"]
    checked = set()
    for label, n, expected in rows:
        for name in names[label.split("(")[-1].rstrip(")")]:
            source = SOURCES[name]
            t = n if source.schedule().steps else n / 1000
            assert source.time_argument(t) == torch.tensor(expected, dtype=torch.float32)
            checked.add(name)
    assert checked == set(SOURCES)


def test_the_config_carries_the_time_argument(tmp_path):
    model = imported(tmp_path, golden_state(IMAGENET))
    assert (model.unet.config["time_shift"], model.unet.config["time_scale"]) == (1.0, 0.25)
    assert (model.time_argument.shift, model.time_argument.scale) == (1.0, 0.25)


def test_settings_are_the_papers():
    schedules = {name: source.schedule() for name, source in SOURCES.items()}
    assert {name: s.steps for name, s in schedules.items()} == {
        "cifar10-ls": 1000,
        "cifar10-cs": 1000,
        "cifar10-vp-sde": None,
        "celeba64": 1000,
        "imagenet64": 4000,
        "lsun-bedroom": 1000,
    }
    assert torch.equal(schedules["imagenet64"].betas, Schedule.cosine(4000).betas)
    assert torch.equal(schedules["lsun-bedroom"].betas, Schedule.linear(1000).betas)
    caps = {name: source.noise_caps for name, source in SOURCES.items()}
    assert {name for name, cap in caps.items() if 2.0 in cap.values()} == {"cifar10-ls", "celeba64", "cifar10-vp-sde"}
    assert caps["celeba64"]["SN-DDIM"] == 1.0
    assert caps["cifar10-vp-sde"] == {"A-DPM": 2.0, "NPR-DPM": 2.0, "SN-DPM": 2.0}


RESIDUAL_HEADS = {
    "improved-diffusion": ("out2.0.in_layers.0", "out2.0.in_layers.2", "out2.0.emb_layers.1", "out2.0.out_layers.0",
                           "out2.0.out_layers.3", "out2.1", "out2.3"),
    "ddpm": ("before_out.norm1", "before_out.conv1", "before_out.temb_proj", "before_out.norm2", "before_out.conv2",
             "norm_out2", "conv_out2"),
}  # fmt: skip


def residual_head(family, scale_shift):
    """A residual head in the authors' layout, and the same by diffusers' block."""
    block = ResnetBlock2D(
        in_channels=32,
        temb_channels=128,
        eps=1e-5 if scale_shift else 1e-6,
        time_embedding_norm="scale_shift" if scale_shift else "default",
    )
    norm = nn.GroupNorm(32, 32, eps=1e-5 if scale_shift else 1e-6)
    conv = nn.Conv2d(32, 3, 3, padding=1)
    layers = (block.norm1, block.conv1, block.time_emb_proj, block.norm2, block.conv2, norm, conv)
    state = {}
    for prefix, layer in zip(RESIDUAL_HEADS[family], layers, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.data = filled(f"{prefix}.{name}", list(parameter.shape))
            state[f"{prefix}.{name}"] = parameter.data
    return state, lambda features, time: conv(nn.functional.silu(norm(block(features, time))))


@pytest.mark.parametrize(("network", "family"), [(IMAGENET, "improved-diffusion"), (LSUN, "ddpm")])
def test_residual_heads_are_known_as_sn_and_agree_with_diffusers_block(tmp_path, network, family):
    state, expected = residual_head(family, scale_shift=family == "improved-diffusion")
    model = imported(tmp_path, golden_state(network) | state)
    assert list(model.heads) == ["sn"]
    torch.manual_seed(0)
    features, time = torch.randn(2, 32, 8, 8), torch.randn(2, 128)
    with torch.no_grad():
        assert torch.allclose(model.heads["sn"](features, time), expected(features, time), atol=1e-5)
    exported = export_checkpoint(model.unet, model.heads["sn"])
    assert all(torch.equal(exported[key], value) for key, value in state.items())


def test_a_convolution_beside_imagenet_or_lsun_is_the_npr_head(tmp_path):
    head = {key: value for key, value in golden_state(CELEBA_HEAD).items() if "out2" in key}
    assert list(imported(tmp_path, golden_state(LSUN) | head).heads) == ["npr"]


def test_a_head_beside_score_sde(tmp_path):
    keys = {"gn_out2.weight": [32], "gn_out2.bias": [32], "conv_out2.weight": [3, 32, 3, 3], "conv_out2.bias": [3]}
    state = {key: filled(key, shape) for key, shape in keys.items()}
    head = imported(tmp_path, golden_state(VP_SDE) | state, head="npr").heads["npr"]
    features = golden_input(32).repeat(1, 11, 1, 1)[:, :32]
    norm = nn.functional.group_norm(features, 8, state["gn_out2.weight"], state["gn_out2.bias"], 1e-6)
    expected = nn.functional.conv2d(
        nn.functional.silu(norm), state["conv_out2.weight"], state["conv_out2.bias"], padding=1
    )
    with torch.no_grad():
        assert torch.allclose(head(features), expected, atol=1e-5)


def test_both_heads_come_from_two_files_of_the_same_network(tmp_path):
    state = golden_state(CELEBA_HEAD)
    torch.save(state, tmp_path / "sn.pth")
    model = imported(tmp_path, golden_state(CELEBA), npr=tmp_path / "sn.pth", sn=tmp_path / "sn.pth")
    assert set(model.heads) == {"npr", "sn"}
    torch.save(state | {"conv_in.weight": -state["conv_in.weight"]}, tmp_path / "sn.pth")
    with pytest.raises(CheckpointError, match=r"sn.pth: its head belongs to another network: conv_in.weight"):
        imported(tmp_path, golden_state(CELEBA), sn=tmp_path / "sn.pth")
    with pytest.raises(CheckpointError, match=r"holds a head 'sn' already; leave --sn out"):
        imported(tmp_path, state, head="sn", sn=tmp_path / "sn.pth")
    torch.save(golden_state(CELEBA), tmp_path / "sn.pth")
    with pytest.raises(CheckpointError, match=r"sn.pth: it holds no head beside the network"):
        imported(tmp_path, golden_state(CELEBA), sn=tmp_path / "sn.pth")
    torch.save({key: value.to(torch.complex64) for key, value in state.items()}, tmp_path / "sn.pth")
    with pytest.raises(CheckpointError, match=r"sn.pth: .* holds torch.complex64, not plain floating-point numbers"):
        imported(tmp_path, golden_state(CELEBA), sn=tmp_path / "sn.pth")


@pytest.mark.parametrize(
    ("network", "options", "reason"),
    [
        (CIFAR10, {}, "fits more than one network; say how it was trained by --as cifar10-ls or --as cifar10-cs"),
        (CIFAR10, {"name": "cifar10"}, "unknown network 'cifar10'; choose one of cifar10-ls"),
        (CIFAR10, {"name": "celeba64"}, "--as celeba64 is a network of ddpm, but its keys are those of improved"),
        (
            CIFAR10,
            {"name": "imagenet64"},
            "--as imagenet64 has other .*; its keys are those of cifar10-ls or cifar10-cs",
        ),
        (CELEBA, {"name": "lsun-bedroom"}, "--as lsun-bedroom has other widths .*; its keys are those of celeba64"),
        (CIFAR10_HEAD, {"name": "cifar10-ls"}, "do not say which one; add --head npr or --head sn"),
        (CIFAR10_HEAD, {"name": "cifar10-ls", "head": "range"}, "unknown head 'range'; choose one of npr, sn"),
        (CELEBA, {"head": "sn"}, "--head sn was given, but the file holds no head"),
        (CELEBA, {"image_size": 40}, "images of 40 pixels cannot be halved 4 times; check --image-size"),
    ],
)
def test_what_the_keys_do_not_tell_must_be_said(tmp_path, network, options, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        imported(tmp_path, golden_state(network), **options)
    assert str(tmp_path / "model.pth") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("sn.pth", "sn"), ("cifar10_LS-NPR.pth", "npr"), ("snapshot.pth", None), ("sn_npr.pth", None)]
)
def test_a_word_of_the_files_name_tells_which_head_it_holds(tmp_path, name, kind):
    torch.save(golden_state(CIFAR10_HEAD), tmp_path / name)
    if kind is None:
        with pytest.raises(CheckpointError, match="do not say which one"):
            import_checkpoint(tmp_path / name, "cifar10-ls")
    else:
        assert list(import_checkpoint(tmp_path / name, "cifar10-ls").heads) == [kind]


@pytest.mark.parametrize("network", [CIFAR10, CELEBA, VP_SDE])
def test_every_key_is_accounted_for(tmp_path, network):
    options = CASES[network][1]
    state = golden_state(network)
    victim = next(key for key in reversed(state) if state[key].ndim == 4)
    wrong = {key: value for key, value in state.items() if key != victim} | {"extra.weight": torch.zeros(3)}
    first = next(key for key in state if state[key].ndim == 1 and key != "sigmas")
    wrong[first] = torch.zeros(7)
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path, wrong, **options)
    message = str(caught.value)
    if f"the key {victim} is missing" not in message:  # the last layer also tells the number of outputs
        assert f"1 missing keys: {victim}" in message
        assert "1 unexpected keys: extra.weight" in message
        assert f"1 mis-shaped keys: {first} has shape (7,) instead of {tuple(state[first].shape)}" in message


@pytest.mark.parametrize("name", ["cifar10_ls", "CIFAR10 (LS)", "cifar10-LS"])
def test_a_network_may_be_named_as_in_the_paper(name):
    assert by_name(name) is SOURCES["cifar10-ls"]
    assert by_name("LSUN") is SOURCES["lsun-bedroom"]
    assert all(by_name(source.title) is source for source in SOURCES.values())


def filled_with(shape, *keys):
    return {key: torch.zeros(shape) for key in keys}


@pytest.mark.parametrize(
    "change",
    [
        filled_with((0, 32, 3, 3), "down.0.block.0.conv1.weight"),
        filled_with((10**9, 0, 3, 3), "down.0.block.0.conv1.weight"),
        filled_with((32, 0, 3, 3), "conv_in.weight") | filled_with((0, 32, 3, 3), "conv_out.weight"),
        filled_with((32, 1, 1, 1), *(f"down.{n}.block.{i}.conv1.weight" for n in range(100) for i in range(2))),
        filled_with((32, 1, 1, 1), *(f"down.{n}.block.{i}.conv1.weight" for n in range(6) for i in range(100))),
    ],
    ids=["no channels", "too many channels", "no colours", "100 levels", "100 blocks"],
)
def test_keys_of_impossible_networks_are_refused_before_anything_is_built(tmp_path, change):
    with pytest.raises(CheckpointError, match="which no network of this kind has"):
        imported(tmp_path, golden_state(LSUN) | change, "lsun-bedroom")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    state = golden_state(LSUN)
    state["conv_in.bias"] = torch.full((32,), torch.nan)
    with pytest.raises(CheckpointError, match=r"conv_in.bias holds NaN or infinite numbers"):
        imported(tmp_path, state)
    state["conv_in.bias"] = torch.ones(32, dtype=torch.int64)
    with pytest.raises(CheckpointError, match=r"conv_in.bias holds torch.int64, not plain floating-point numbers"):
        imported(tmp_path, state)


@st.composite
def architectures(draw):
    levels = draw(st.integers(2, 4))
    widths = sorted(draw(st.lists(st.sampled_from((32, 64, 96)), min_size=levels, max_size=levels)))
    attention = tuple(draw(st.lists(st.booleans(), min_size=levels, max_size=levels)))
    channels = draw(st.sampled_from((1, 3)))
    return Architecture(tuple(widths), draw(st.integers(1, 3)), attention, channels, channels)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(deadline=None, derandomize=True, max_examples=15)
@given(plan=architectures())
def test_any_architecture_is_inferred_from_its_keys(family, plan):
    with torch.device("meta"):
        ours = PaperUNet(**unet_config(family, plan, 32)).state_dict()
    table = family.table(plan)
    assert sorted(name for entry in table for name in entry.ours) == sorted(ours)  # every weight, once
    state = {entry.foreign: entry.layout.to_foreign([ours[name] for name in entry.ours]) for entry in table}
    assert find_family(state) is family
    assert family.infer(state) == plan


def test_without_attention_the_image_size_must_be_said(tmp_path):
    family = SOURCES["celeba64"].family
    plan = Architecture((32, 64), 1, (False, False), 3, 3)
    torch.manual_seed(0)
    unet = PaperUNet(**unet_config(family, plan, 8))
    state = export_state(family.table(plan), unet.state_dict())
    with pytest.raises(CheckpointError, match="has the widths of no network of the paper; say how it was trained"):
        imported(tmp_path, state)
    with pytest.raises(CheckpointError, match="do not tell the size of its images; add --image-size"):
        imported(tmp_path, state, "celeba64")
    assert imported(tmp_path, state, "celeba64", image_size=8).image_shape == (3, 8, 8)


def test_qkv_rows_are_ordered_by_head_first():
    rows = torch.arange(2 * 3 * 2)  # 2 heads of 2 channels: q q k k v v, q q k k v v
    q, k, v = headwise_qkv(2, 0).to_ours(rows)
    assert [q.tolist(), k.tolist(), v.tolist()] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_gamma_of_the_authors(tmp_path):
    gamma = torch.linspace(0, 1, 1001, dtype=torch.float32)
    torch.save(gamma.numpy(), tmp_path / "gamma.pth")
    values = read_gamma(tmp_path / "gamma.pth", Schedule.linear())
    assert torch.equal(values, gamma[1:].double())
    assert torch.equal(read_gamma(tmp_path / "gamma.pth", Schedule.vp_sde()), values)
    with pytest.raises(CheckpointError, match=r"an array of 4001 numbers, one per time 0..4000; this is \(1001,\)"):
        read_gamma(tmp_path / "gamma.pth", Schedule.cosine(4000))
    torch.save(torch.zeros(1001, dtype=torch.complex64), tmp_path / "gamma.pth")
    with pytest.raises(CheckpointError, match="this is .*complex64"):
        read_gamma(tmp_path / "gamma.pth", Schedule.linear())
    torch.save(-gamma.numpy(), tmp_path / "gamma.pth")
    with pytest.raises(CheckpointError, match="Gamma is a mean of squares"):
        read_gamma(tmp_path / "gamma.pth", Schedule.linear())
