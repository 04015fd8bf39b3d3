"""Every network with every head that the authors published, against a forward pass written out from raw weights.

tests/golden/networks.json has outputs of the authors' code for some of them. Here the same structures are evaluated
by torch.nn.functional alone, which holds the import of all others: residual heads, heads beside a learned range,
beside score_sde and beside LSUN Bedroom.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu
from typer.testing import CliRunner

import optcov
from checkpoint_files import (
    GOLDEN_TIMES,
    as_ddim,
    as_score_sde,
    filled,
    full_size_networks,
    golden_entries,
    golden_input,
    golden_networks,
    golden_state,
    prefixed,
)
from optcov.checkpoints import export_checkpoint, import_checkpoint, import_model
from optcov.cli import app
from optcov.networks import Backbone

HEAD_PREFIXES = ("out2", "norm_out2", "conv_out2", "before_out", "gn_out2")
SIZE = 32  # all are convolutional, so that a small image does
# full-size network -> (its reduced copy in networks.json, the name to import it by)
NETWORKS = {
    "cifar10_iddpm": ("cifar10_iddpm_w32_plain", "cifar10-cs"),
    "imagenet64_iddpm": ("imagenet64_iddpm_w32_plain_out6", "imagenet64"),
    "celeba64_ddpm": ("celeba64_ddpm_w32_plain", "celeba64"),
    "lsun_ddpm": ("lsun_ddpm_w32_res64_plain", "lsun-bedroom"),
    "cifar10_vpsde_ncsnpp": ("cifar10_vpsde_ncsnpp_nf32_plain", "cifar10-vp-sde"),
}


class Weights:
    """A state_dict that knows which of its keys were read."""

    def __init__(self, state: dict[str, Tensor]):
        self.state, self.used = state, set()

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.state

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        return self.state[key]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])

    def conv(self, name: str, x: Tensor, padding: int = 1, stride: int = 1) -> Tensor:
        return functional.conv2d(x, self[f"{name}.weight"], self[f"{name}.bias"], stride, padding)

    def norm(self, name: str, x: Tensor, eps: float, groups: int = 32) -> Tensor:
        return functional.group_norm(x, groups, self[f"{name}.weight"], self[f"{name}.bias"], eps)

    def group(self, prefix: str, first: int = 0) -> list[str]:
        """prefix.0, prefix.1, ... as far as there are any."""
        names, n = [], first
        while any(key.startswith(f"{prefix}.{n}.") for key in self.state):
            names.append(f"{prefix}.{n}")
            n += 1
        return names


def positions(time: Tensor, width: int, last: int, cosine_first: bool) -> Tensor:
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2 - last))
    angles = time[:, None] * frequencies
    parts = (angles.cos(), angles.sin()) if cosine_first else (angles.sin(), angles.cos())
    return torch.cat(parts, dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, C, T) each."""
    scores = torch.einsum("bci,bcj->bij", q, k) / math.sqrt(q.shape[1])
    return torch.einsum("bij,bcj->bci", scores.softmax(-1), v)


def doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")


def improved_block(w: Weights, name: str, x: Tensor, time: Tensor) -> Tensor:
    hidden = w.conv(f"{name}.in_layers.2", silu(w.norm(f"{name}.in_layers.0", x, 1e-5)))
    scale, shift = w.linear(f"{name}.emb_layers.1", silu(time))[..., None, None].chunk(2, dim=1)
    hidden = w.norm(f"{name}.out_layers.0", hidden, 1e-5) * (1 + scale) + shift
    hidden = w.conv(f"{name}.out_layers.3", silu(hidden))
    return (w.conv(f"{name}.skip_connection", x, padding=0) if f"{name}.skip_connection" in w else x) + hidden


def improved_attention(w: Weights, name: str, x: Tensor, heads: int = 4) -> Tensor:
    flat = x.flatten(2)
    normed = w.norm(f"{name}.norm", flat, 1e-5)
    rows = functional.conv1d(normed, w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"])
    q, k, v = rows.reshape(len(x) * heads, -1, rows.shape[-1]).chunk(3, dim=1)
    mixed = attend(q, k, v).reshape(flat.shape)
    return (flat + functional.conv1d(mixed, w[f"{name}.proj_out.weight"], w[f"{name}.proj_out.bias"])).reshape(x.shape)


def improved_sequence(w: Weights, prefix: str, x: Tensor, time: Tensor) -> Tensor:
    for name in w.group(prefix):
        if f"{name}.in_layers.0" in w:
            x = improved_block(w, name, x, time)
        elif f"{name}.qkv" in w:
            x = improved_attention(w, name, x)
        elif f"{name}.op" in w:
            x = w.conv(f"{name}.op", x, stride=2)
        elif f"{name}.conv" in w:
            x = w.conv(f"{name}.conv", doubled(x))
        else:
            x = w.conv(name, x)
    return x


def improved_diffusion(w: Weights, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
    width = len(w["input_blocks.0.0.bias"])
    time = w.linear("time_embed.2", silu(w.linear("time_embed.0", positions(t, width, 0, cosine_first=True))))
    skips = []
    for prefix in w.group("input_blocks"):
        x = improved_sequence(w, prefix, x, time)
        skips.append(x)
    x = improved_sequence(w, "middle_block", x, time)
    for prefix in w.group("output_blocks"):
        x = improved_sequence(w, prefix, torch.cat([x, skips.pop()], dim=1), time)
    output, head = w.conv("out.2", silu(w.norm("out.0", x, 1e-5))), None
    if "out2.3" in w:
        head = w.conv("out2.3", silu(w.norm("out2.1", improved_block(w, "out2.0", x, time), 1e-5)))
    elif "out2.2" in w:
        head = w.conv("out2.2", silu(w.norm("out2.0", x, 1e-5)))
    return output, head


def ddpm_block(w: Weights, name: str, x: Tensor, time: Tensor) -> Tensor:
    hidden = w.conv(f"{name}.conv1", silu(w.norm(f"{name}.norm1", x, 1e-6)))
    hidden = hidden + w.linear(f"{name}.temb_proj", silu(time))[..., None, None]
    hidden = w.conv(f"{name}.conv2", silu(w.norm(f"{name}.norm2", hidden, 1e-6)))
    return (w.conv(f"{name}.nin_shortcut", x, padding=0) if f"{name}.nin_shortcut" in w else x) + hidden


def ddpm_attention(w: Weights, name: str, x: Tensor) -> Tensor:
    normed = w.norm(f"{name}.norm", x, 1e-6)
    q, k, v = (w.conv(f"{name}.{part}", normed, padding=0).flatten(2) for part in "qkv")
    return x + w.conv(f"{name}.proj_out", attend(q, k, v).reshape(x.shape), padding=0)


def ddpm(w: Weights, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
    width = len(w["conv_in.bias"])
    time = w.linear("temb.dense.1", silu(w.linear("temb.dense.0", positions(t, width, 1, cosine_first=False))))
    x = w.conv("conv_in", x)
    skips = [x]
    for level in w.group("down"):
        for i, name in enumerate(w.group(f"{level}.block")):
            x = ddpm_block(w, name, x, time)
            x = ddpm_attention(w, f"{level}.attn.{i}", x) if f"{level}.attn.{i}.q" in w else x
            skips.append(x)
        if f"{level}.downsample.conv" in w:
            x = w.conv(f"{level}.downsample.conv", functional.pad(x, (0, 1, 0, 1)), padding=0, stride=2)
            skips.append(x)
    x = ddpm_block(w, "mid.block_2", ddpm_attention(w, "mid.attn_1", ddpm_block(w, "mid.block_1", x, time)), time)
    for level in reversed(w.group("up")):
        for i, name in enumerate(w.group(f"{level}.block")):
            x = ddpm_block(w, name, torch.cat([x, skips.pop()], dim=1), time)
            x = ddpm_attention(w, f"{level}.attn.{i}", x) if f"{level}.attn.{i}.q" in w else x
        if f"{level}.upsample.conv" in w:
            x = w.conv(f"{level}.upsample.conv", doubled(x))
    output, head = w.conv("conv_out", silu(w.norm("norm_out", x, 1e-6))), None
    if "conv_out2" in w:
        x = ddpm_block(w, "before_out", x, time) if "before_out.conv1" in w else x
        head = w.conv("conv_out2", silu(w.norm("norm_out2", x, 1e-6)))
    return output, head


def score_sde_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return w.norm(name, x, 1e-6, groups=min(x.shape[1] // 4, 32))


def score_sde_block(w: Weights, name: str, x: Tensor, time: Tensor, resample=lambda x: x) -> Tensor:
    hidden = w.conv(f"{name}.Conv_0", resample(silu(score_sde_norm(w, f"{name}.GroupNorm_0", x))))
    hidden = hidden + w.linear(f"{name}.Dense_0", silu(time))[..., None, None]
    hidden = w.conv(f"{name}.Conv_1", silu(score_sde_norm(w, f"{name}.GroupNorm_1", hidden)))
    x = resample(x)
    return ((w.conv(f"{name}.Conv_2", x, padding=0) if f"{name}.Conv_2" in w else x) + hidden) / math.sqrt(2)


def score_sde_attention(w: Weights, name: str, x: Tensor) -> Tensor:
    def mix(part: str, values: Tensor) -> Tensor:
        return torch.einsum("bct,cd->bdt", values, w[f"{name}.{part}.W"]) + w[f"{name}.{part}.b"][:, None]

    normed = score_sde_norm(w, f"{name}.GroupNorm_0", x).flatten(2)
    mixed = attend(*(mix(f"NIN_{i}", normed) for i in range(3)))
    return (x + mix("NIN_3", mixed).reshape(x.shape)) / math.sqrt(2)


def score_sde(w: Weights, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
    """4 levels of 4 blocks, attention at the second."""
    width = len(w["all_modules.2.bias"])
    names = iter(w.group("all_modules", first=3))
    time = positions(t, width, 1, cosine_first=False)
    time = w.linear("all_modules.1", silu(w.linear("all_modules.0", time)))
    x = w.conv("all_modules.2", x)
    skips = [x]
    for level in range(4):
        for _ in range(4):
            x = score_sde_block(w, next(names), x, time)
            x = score_sde_attention(w, next(names), x) if level == 1 else x
            skips.append(x)
        if level < 3:
            x = score_sde_block(w, next(names), x, time, lambda x: functional.avg_pool2d(x, 2))
            skips.append(x)
    x = score_sde_block(w, next(names), x, time)
    x = score_sde_attention(w, next(names), x)
    x = score_sde_block(w, next(names), x, time)
    for level in (3, 2, 1, 0):
        for _ in range(5):
            x = score_sde_block(w, next(names), torch.cat([x, skips.pop()], dim=1), time)
        x = score_sde_attention(w, next(names), x) if level == 1 else x
        x = score_sde_block(w, next(names), x, time, doubled) if level else x
    normed = silu(score_sde_norm(w, next(names), x))
    output, head = w.conv(next(names), normed), None
    if "conv_out2" in w:
        head = w.conv("conv_out2", silu(score_sde_norm(w, "gn_out2", x)))
    return output, head


def evaluate(state: dict[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and head of the network with these weights, all of which it must use."""
    w = Weights({key: value for key, value in state.items() if key != "sigmas"})
    network = improved_diffusion if "out.0" in w else ddpm if "conv_in" in w else score_sde
    with torch.no_grad():
        result = network(w, x, t)
    assert w.used == set(w.state)
    return result


def headed_state(network: str, mode: str) -> dict[str, Tensor]:
    """The reduced network, with the head of the full-size one scaled down."""
    state = golden_state(NETWORKS[network][0])
    for key, shape, *_ in full_size_networks()[f"{network}_{mode}"]["keys"]:
        if key.startswith(HEAD_PREFIXES):
            state[key] = filled(key, [length // 4 if length >= 128 else length for length in shape])
    return state


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 5e-5


@pytest.mark.parametrize("network", golden_networks())
def test_the_forward_pass_written_out_here_is_the_authors(network):
    golden = golden_networks()[network]
    output, head = evaluate(golden_state(network), golden_input(golden["R"]), GOLDEN_TIMES)
    for value, name in ((output, "out" if head is None else "eps"), (head, "head")):
        if value is not None:
            assert_close(golden_entries(value), torch.tensor(golden[name]["entries"]))


HEADED = [name.rsplit("_", 1) for name in full_size_networks() if not name.endswith("plain")]


@pytest.mark.parametrize(("network", "mode"), HEADED)
def test_every_head_beside_every_network(tmp_path, network, mode):
    state = headed_state(network, mode)
    torch.save(state, tmp_path / "model.pth")
    model = import_checkpoint(tmp_path / "model.pth", NETWORKS[network][1], head="sn")
    x = golden_input(SIZE)
    output, head = evaluate(state, x, GOLDEN_TIMES)
    with torch.no_grad():
        found = Backbone.of(model.unet)(x, GOLDEN_TIMES)
        assert_close(found.output, output)
        assert_close(model.heads["sn"](found.features, found.time_embedding), head)
    exported = export_checkpoint(model.unet, model.heads["sn"])
    assert set(exported) == set(state)
    assert all(torch.equal(exported[key], value) for key, value in state.items() if key != "sigmas")


def test_a_bundle_splits_noise_range_and_head(tmp_path):
    """Six output channels are the noise and v; the head comes beside them, not instead of v."""
    state = headed_state("imagenet64_iddpm", "complex")
    torch.save(state, tmp_path / "model.pt")
    result = CliRunner().invoke(app, ["import", str(tmp_path / "model.pt"), "--out", str(tmp_path / "bundle")])
    assert result.exit_code == 0
    x = golden_input(SIZE)
    output, head = evaluate(state, x, GOLDEN_TIMES)
    with torch.no_grad():
        prediction = optcov.load(tmp_path / "bundle").network(x, 4 * GOLDEN_TIMES + 1)  # its argument is (n - 1) / 4
    assert_close(prediction.noise, output[:, :3])
    assert_close(prediction.heads["range"], output[:, 3:])
    assert_close(prediction.heads["sn"], head)


def as_frozen_score_sde(state: dict[str, Tensor]) -> dict[str, object]:
    """Only the head was trained, so only it has averages."""
    trained = [key for key in state if key.startswith(HEAD_PREFIXES)]
    content = as_score_sde(state)
    content["model"] = prefixed({key: torch.zeros_like(v) if key in trained else v for key, v in state.items()})
    content["ema"]["shadow_params"] = [state[key] for key in trained]
    return content


def as_plain_list(state: dict[str, Tensor]) -> dict[str, object]:
    content = as_score_sde(state)
    return content | {"ema": content["ema"]["shadow_params"]}


@pytest.mark.parametrize(
    "wrap",
    [
        as_score_sde,
        as_frozen_score_sde,
        as_plain_list,
        lambda state: as_score_sde(state) | {"model": prefixed(state)},  # one set of numbers, saved under two names
    ],
    ids=["all averaged", "head averaged", "a list", "shared"],
)
def test_averages_of_score_sde_are_taken_however_they_are_listed(tmp_path, wrap):
    state = headed_state("cifar10_vpsde_ncsnpp", "simple")
    torch.save(wrap(state), tmp_path / "model.pth")
    model = import_model(tmp_path / "model.pth", head="npr")
    exported = export_checkpoint(model.unet, model.heads["npr"])
    assert all(torch.equal(exported[key], value) for key, value in state.items() if key != "sigmas")


def test_averages_that_share_their_numbers_with_the_network_are_read(tmp_path):
    state = golden_state(NETWORKS["celeba64_ddpm"][0])
    content = as_ddim(state)
    content[0] = prefixed(state)
    torch.save(content, tmp_path / "model.pth")
    exported = export_checkpoint(import_model(tmp_path / "model.pth").unet)
    assert all(torch.equal(exported[key], value) for key, value in state.items())
