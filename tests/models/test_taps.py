"""Heads on the output layer of any network: of its form, on the features that it sees."""

from __future__ import annotations

import json

import pytest
import torch
from tests.token_networks import NETWORKS, SQUARE_ONLY, dit, make, tapped, unet
from torch import nn

from optcov import Schedule
from optcov.bundle.errors import BundleError
from optcov.bundle.weights import load_head, save_head
from optcov.fitting import TrainingError, new_heads
from optcov.networks import Backbone, ConvHead, HeadedNetwork, Tap, TimedHead, build_head, head_config, tap_of
from optcov.networks.form import Form

CASES = [(name, size) for name in NETWORKS for size in ([(8, 8)] if name in SQUARE_ONLY else [(8, 8), (12, 8)])]


def copy_of(layer: nn.Module, head: ConvHead | TimedHead) -> None:
    """Give a head the output layer's own weights, once for each of its knots."""
    parts = head.parts if isinstance(head, TimedHead) else 1
    weight = layer.weight if isinstance(layer, nn.Conv2d) else layer.weight[:, :, None, None]
    head.conv.weight.data.copy_(weight.float().repeat(parts, 1, 1, 1))
    head.conv.bias.data.copy_(layer.bias.float().repeat(parts))


def linear_copy(backbone: Backbone, x: torch.Tensor, features: torch.Tensor, channels: int) -> ConvHead:
    tap = backbone.output_tap
    norm = backbone.module.get_submodule(tap.point) if tap.normalised else None
    groups, eps = (norm.num_groups, norm.eps) if norm is not None else (None, 1e-5)
    form = tap.form(features, x)
    head = ConvHead(features.shape[1], channels, groups, eps, "linear", form.kernel, form.patch, form.order)
    if norm is not None:
        head.norm.load_state_dict(norm.float().state_dict())
    copy_of(backbone.module.get_submodule(tap.layer), head)
    return head.eval()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_linear_head_with_the_layers_own_weights_gives_the_networks_own_output(name, size):
    backbone = tapped(make(name))
    x, time = torch.randn(3, 2, *size), torch.tensor([10.0, 500.0, 990.0])
    with torch.no_grad():
        seen = backbone(x, time)
        head = linear_copy(backbone, x, seen.features, seen.output.shape[1])
        copied = head(seen.features)
    assert copied.shape == seen.output.shape == (3, 4 if "sigma" in name else 2, *size)
    assert float(seen.output.std()) > 0.01
    torch.testing.assert_close(copied, seen.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["unet", "dit", "pixart", "sd3", "flux"])
def test_a_timed_head_has_the_layers_form_and_copies_it_at_every_level(name):
    network = HeadedNetwork(tapped(make(name)), Schedule.flow(), parameterisation="flow_prediction")
    x = torch.randn(3, 2, 8, 8)
    head = new_heads(network, x[:1], ["npr"])["npr"].module
    assert isinstance(head, TimedHead)
    layer = network.backbone.module.get_submodule(network.backbone.output_tap.layer)
    copy_of(layer, head)
    log_snr = torch.tensor([-7.0, 1.3, 4.0])
    with torch.no_grad():
        seen = network.features(x, torch.tensor([0.1, 0.5, 1.0]))
        raw = head.mix(head.last(head.inputs(seen.features)), log_snr)
    torch.testing.assert_close(raw, seen.output, rtol=1e-5, atol=1e-5)
    assert head(seen.features, None, log_snr).shape == x.shape


@pytest.mark.parametrize("name", ["dit", "sd3", "flux"])
@pytest.mark.parametrize("names", [["npr", "sn"], ["range"]])
def test_heads_on_tokens_are_one_number_per_pixel_and_are_kept_with_their_form(name, names, tmp_path):
    network = HeadedNetwork(tapped(make(name)), Schedule.vp_sde())
    x = torch.randn(2, 2, 8, 8)
    tasks = new_heads(network, x[:1], names)
    for head_name, task in tasks.items():
        nn.init.normal_(task.module.conv.weight, std=0.1)
        path = tmp_path / f"{head_name}.safetensors"
        save_head(path, task.module, "x")
        again = load_head(path, "x")
        assert head_config(again) == head_config(task.module)
        assert head_config(again)["patch"] == 2
        seen = network.features(x, 0.5)
        more = (seen.features, None, torch.zeros(2), torch.zeros_like(x))
        torch.testing.assert_close(again(*more), task.module.eval()(*more), rtol=1e-5, atol=1e-5)
        assert again(*more).shape == x.shape


def test_a_head_before_there_were_forms_is_what_it_was():
    head = TimedHead(8, 3, groups=4)
    assert set(head_config(head)) == {
        "kind", "in_channels", "out_channels", "groups", "eps", "base", "ceiling", "knots", "scale_knots",
    }  # fmt: skip
    assert set(head_config(ConvHead(8, 3, groups=4))) == {
        "kind", "in_channels", "out_channels", "groups", "eps", "transform",
    }  # fmt: skip
    assert head_config(build_head(json.loads(json.dumps(head_config(head))))) == head_config(head)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"kernel": 2}, "kernel"), ({"patch": 0}, "patch"), ({"patch": 2.0}, "patch"), ({"order": "qpc"}, "order")],
)
def test_a_form_that_no_layer_has_is_refused(wrong, named, tmp_path):
    head = ConvHead(8, 1, None, kernel=1, patch=2)
    with pytest.raises(ValueError, match=named):
        build_head({**head_config(head), **wrong})
    head.config = {**head.config, **wrong}
    save_head(tmp_path / "npr.safetensors", head, "x")
    with pytest.raises(BundleError, match=named):
        load_head(tmp_path / "npr.safetensors", "x")


def test_a_head_of_another_form_than_its_weights_is_refused(tmp_path):
    head = ConvHead(8, 1, None, kernel=1, patch=2)
    head.config = {**head.config, "patch": 4}
    save_head(tmp_path / "npr.safetensors", head, "x")
    with pytest.raises(BundleError, match="has the shape"):
        load_head(tmp_path / "npr.safetensors", "x")


@pytest.mark.parametrize("order", ["pqc", "cpq"])
def test_channels_and_pixels_are_each_others_inverse(order):
    form = Form(1, 3, order)
    pixels = torch.randn(2, 4, 6, 9)
    assert form.channels(pixels).shape == (2, 36, 2, 3)
    assert torch.equal(form.pixels(form.channels(pixels)), pixels)
    if order == "cpq":
        assert torch.equal(form.pixels(form.channels(pixels)), nn.functional.pixel_shuffle(form.channels(pixels), 3))


# modules of one's own


class Own(nn.Module):
    """A network that nobody knows, whose output layer is `last`."""

    def __init__(self, last: nn.Module):
        super().__init__()
        self.body, self.last = nn.Conv2d(2, 6, 3, padding=1), last

    def forward(self, x, time):
        hidden = torch.tanh(self.body(x) + time[:, None, None, None] / 1000)
        if isinstance(self.last, nn.Linear):
            tokens = nn.functional.pixel_unshuffle(hidden, 2).flatten(2).mT  # (B, L, 24)
            output = self.last(tokens)
            return Form(1, 2, "pqc").pixels(output.mT.reshape(len(x), -1, x.shape[2] // 2, x.shape[3] // 2))
        return self.last(hidden)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("size", [(8, 8), (6, 10)])
def test_a_convolution_of_ones_own_is_tapped_by_its_name(kernel, size):
    torch.manual_seed(0)
    backbone = Backbone.of(Own(nn.Conv2d(6, 2, kernel, padding=kernel // 2)), "last")
    x = torch.randn(3, 2, *size)
    with torch.no_grad():
        seen = backbone(x, torch.zeros(3))
        head = linear_copy(backbone, x, seen.features, 2)
        torch.testing.assert_close(head(seen.features), seen.output, rtol=1e-5, atol=1e-5)
    network = HeadedNetwork(backbone, Schedule.vp_sde())
    fitted = new_heads(network, x[:1], ["npr"])["npr"].module
    assert fitted.norm is None
    assert fitted.conv.kernel_size == (kernel, kernel)
    with pytest.raises(TrainingError, match="time embedding"):
        new_heads(network, x[:1], ["npr"], "residual")


@pytest.mark.parametrize("size", [(8, 8), (6, 10)])
def test_a_linear_layer_of_ones_own_finds_its_patch_from_the_images(size):
    torch.manual_seed(0)
    backbone = Backbone.of(Own(nn.Linear(24, 8)), "last")
    x = torch.randn(3, 2, *size)
    with torch.no_grad():
        seen = backbone(x, torch.zeros(3))
        assert seen.features.shape == (3, 24, size[0] // 2, size[1] // 2)
        head = linear_copy(backbone, x, seen.features, 2)
        assert head.form == Form(1, 2, "pqc")
        torch.testing.assert_close(head(seen.features), seen.output, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_on_vectors_gives_vectors():
    class Vectors(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x, time):
            return self.last(torch.tanh(self.body(torch.cat([x, time[:, None]], 1))))

    network = HeadedNetwork(Backbone.of(Vectors(), "last"), Schedule.vp_sde())
    assert new_heads(network, torch.zeros(1, 2), ["npr"])["npr"].module.kind == "timed"
    assert network.features(torch.zeros(5, 2), 0.5).features.shape == (5, 8)


def test_an_output_layer_that_is_not_there_is_refused_with_those_that_are():
    module = Own(nn.Conv2d(6, 2, 3, padding=1))
    with pytest.raises(ValueError, match=r"no output layer 'conv_out'; choose one of its layers: last, body"):
        Backbone.of(module, "conv_out")
    with pytest.raises(ValueError, match=r"layer of a Own is not known; name it, as layer=\.\.\.: last, body"):
        Backbone.of(module)
    with pytest.raises(ValueError, match=r"'last' of Own is a GroupNorm, .* choose one of these: body"):
        tap_of(Own(nn.GroupNorm(2, 6)), "last")
    with pytest.raises(ValueError, match="it has no Conv2d and no Linear"):
        tap_of(nn.ReLU())
    many = nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)])
    with pytest.raises(ValueError, match="29, 28, .* and 18 others"):
        tap_of(many, "30")


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 2, 2), nn.Conv2d(6, 2, 3), nn.Conv2d(6, 2, 3, padding=1, stride=2), nn.Conv2d(6, 2, (1, 3)),
        nn.Conv2d(6, 2, 3, padding=2, dilation=2), nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(6, 2, 3, padding=1, groups=2),
    ],
    ids=str,
)  # fmt: skip
def test_a_convolution_of_another_form_is_refused(layer):
    with pytest.raises(ValueError, match="square, odd kernel"):
        tap_of(Own(layer), "last")


def test_tokens_that_do_not_cover_the_image_are_refused():
    class Extra(nn.Module):
        """A token more than the image has, as that of a class."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(2, 2)

        def forward(self, x, time):
            tokens = self.last(nn.functional.pad(x.flatten(2).mT, (0, 0, 1, 0)))
            return tokens[:, 1:].mT.reshape(x.shape)

    with pytest.raises(ValueError, match="sees 65 tokens"):
        Backbone.of(Extra(), "last")(torch.zeros(1, 2, 8, 8), torch.zeros(1))


def test_a_unet_is_tapped_before_its_normalisation():
    assert tap_of(unet()) == Tap("conv_out", "conv_norm_out", False, 3, None, "cpq", "time_embedding", "conv_act")


# half precision


@pytest.mark.parametrize("name", ["unet", "conditional unet", "dit", "sd3", "flux"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_in_half_precision_stays_so_and_its_heads_are_float32(name, dtype):
    whole, half = make(name), make(name).to(dtype)
    x, t = torch.randn(3, 2, 8, 8), torch.tensor([0.1, 0.5, 0.9])
    network = HeadedNetwork(tapped(half), Schedule.flow(), parameterisation="flow_prediction").eval()
    heads = {name: task.module for name, task in new_heads(network, x[:1], ["npr", "sn"]).items()}
    network = HeadedNetwork(tapped(half), Schedule.flow(), heads, parameterisation="flow_prediction").eval()
    with torch.no_grad():
        prediction = network(x, t)
        exact = HeadedNetwork(tapped(whole), Schedule.flow(), parameterisation="flow_prediction")(x, t)
    assert {weight.dtype for weight in half.parameters()} == {dtype}
    assert {weight.dtype for head in heads.values() for weight in head.parameters()} == {torch.float32}
    assert prediction.output.dtype == torch.float32
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in prediction.heads.values())
    torch.testing.assert_close(prediction.output, exact.output, rtol=0.05, atol=0.05 * float(exact.output.std()) + 0.02)


def test_heads_stay_float32_when_the_network_around_them_is_halved():
    head = ConvHead(8, 2, groups=4)
    network = HeadedNetwork(tapped(make("unet")), Schedule.flow(), {"npr": head}, parameterisation="sample")
    nn.init.normal_(head.conv.weight, std=0.1)
    before = head.conv.weight.detach().clone()
    for move in (network.half, network.bfloat16, lambda: network.to(torch.bfloat16)):
        move()
        assert next(network.backbone.parameters()).dtype.itemsize == 2
        assert torch.equal(head.conv.weight, before)
    assert network(torch.randn(2, 2, 8, 8), 0.5).heads["npr"].dtype == torch.float32
    assert network.double().heads["npr"].conv.weight.dtype == torch.float64


def test_times_are_not_rounded_to_half_precision():
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x, time, text):
            seen.extend([x.dtype, time, text.dtype])
            return self.last(x)

    network = HeadedNetwork(Backbone.of(Net().to(torch.bfloat16), "last"), Schedule.flow())
    network.features(torch.zeros(1, 2, 4, 4), 0.99903, text=torch.zeros(1, 3))
    assert seen[0] == seen[2] == torch.bfloat16
    assert seen[1].dtype == torch.float32
    assert float(seen[1]) == pytest.approx(999.03, abs=1e-3)


def test_labels_stay_whole_numbers_in_half_precision():
    network = dit().to(torch.bfloat16).network
    out = Backbone.of(network)(torch.randn(2, 2, 8, 8), torch.full((2,), 500.0), class_labels=torch.tensor([0, 3]))
    assert out.output.dtype == out.features.dtype == torch.float32
