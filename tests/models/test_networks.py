"""Networks: what is tapped, what heads start as, and which time a network sees."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from close_outputs import assert_close_outputs
from optcov import Schedule
from optcov.identity import changes
from optcov.networks import (
    Backbone,
    ConvHead,
    DenseHead,
    HeadedNetwork,
    ResidualHead,
    TimeArgument,
    TimedHead,
    TimeMatch,
    build_head,
    fingerprint,
    head_config,
)
from optcov.networks.activation import Activation, activated
from optcov.networks.thin import ThinConv2d, thin_weight_gradient

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "steps.json").read_text())


class TinyNet(nn.Module):
    """Stands for any image network: body, time embedding, tapped normalisation, output."""

    def __init__(self, channels: int = 1, out: int | None = None, width: int = 8):
        super().__init__()
        self.body = nn.Conv2d(channels, width, 3, padding=1)
        self.time_embedding = nn.Linear(1, 6)
        self.shift = nn.Linear(6, width)
        self.conv_norm_out = nn.GroupNorm(4, width)
        self.conv_out = nn.Conv2d(width, out or channels, 3, padding=1)

    def forward(self, x, time):
        embedded = self.time_embedding(time[:, None] / 1000)
        hidden = self.body(x) + self.shift(embedded)[..., None, None]
        self.seen_time = time
        return self.conv_out(torch.nn.functional.silu(self.conv_norm_out(hidden)))


def tiny(channels: int = 1, seed: int = 0, **options) -> TinyNet:
    torch.manual_seed(seed)
    return TinyNet(channels, **options).eval()


def network(schedule=None, heads=None, **options) -> HeadedNetwork:
    return HeadedNetwork(Backbone.of(tiny()), schedule or Schedule.vp_sde(), heads, **options).eval()


@pytest.fixture
def x_t() -> torch.Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_features_are_what_the_output_is_computed_from(x_t):
    module = tiny()
    seen = Backbone.of(module)(x_t, torch.zeros(3))
    again = module.conv_out(torch.nn.functional.silu(module.conv_norm_out(seen.features)))
    assert torch.equal(again, seen.output)
    assert seen.time_embedding.shape == (3, 6)


def test_no_hook_stays_on_somebody_elses_module(x_t):
    module = tiny()
    Backbone.of(module)(x_t, torch.zeros(3))
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in module.modules())


def test_an_unknown_tap_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"no submodule 'nothing'.*conv_norm_out"):
        Backbone(tiny(), tap="nothing")


def test_a_diffusers_unet_is_tapped_without_a_change_to_its_output():
    from optcov.networks.unet import build_unet

    unet = build_unet((1, 8, 8), channels=(8, 16), groups=4, head_dim=8).eval()
    x, time = torch.randn(2, 1, 8, 8), torch.tensor([3.5, 900.0])
    with torch.no_grad():
        plain = unet(x, time).sample
        seen = Backbone.of(unet)(x, time)
    assert torch.equal(seen.output, plain)
    assert seen.features.shape == (2, 8, 8, 8)
    assert seen.time_embedding.shape == (2, 32)


def test_a_unet_that_cannot_halve_its_images_is_refused():
    from optcov.networks.unet import build_unet

    with pytest.raises(ValueError, match="28x28 cannot be halved 3 times"):
        build_unet((1, 28, 28), channels=(8, 8, 8, 8), groups=4, head_dim=8)


@pytest.mark.parametrize(
    "head",
    [
        ConvHead(8, 3, groups=4),
        ConvHead(8, 3, groups=4, transform="linear"),
        ResidualHead(8, 3, 6, groups=4),
        ResidualHead(8, 3, 6, groups=4, scale_shift=True, hidden_channels=12, transform="linear", residual_scale=0.7),
        TimedHead(8, 3, groups=4, base="noise"),
    ],
    ids=lambda head: head.kind,
)
def test_a_head_is_rebuilt_from_its_config_and_starts_flat(head):
    again = build_head(json.loads(json.dumps(head_config(head))))
    again.load_state_dict(head.state_dict())
    features, time = torch.randn(2, 8, 5, 5), torch.randn(2, 6)
    more = (torch.tensor([1.0, -3.0]), torch.zeros(2, 3, 5, 5))
    out = head(features, time, *more)
    assert out.shape == (2, 3, 5, 5)
    assert_close_outputs(again(features, time, *more), out)
    assert out.std() == 0  # the last layer starts at zero


def test_a_thin_convolution_is_a_convolution_with_its_gradient():
    thin, plain = ThinConv2d(5, 2).double(), nn.Conv2d(5, 2, 3, padding=1).double()
    plain.load_state_dict(thin.state_dict())
    x = torch.randn(3, 5, 7, 6, dtype=torch.float64)
    out, expected = thin(x), plain(x)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(out)
    expected.backward(gradient)
    assert torch.allclose(thin_weight_gradient(x, gradient), plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_exponential_heads_are_positive_and_finite_for_wild_features():
    head = ConvHead(8, 1, groups=4)
    nn.init.normal_(head.conv.weight, std=1e3)
    out = head(1e6 * torch.randn(2, 8, 5, 5))
    assert bool(((out > 0) & out.isfinite()).all())


def test_a_timed_head_stays_below_its_ceiling_and_follows_the_level():
    head = TimedHead(8, 1, groups=4, ceiling=5.0)
    nn.init.normal_(head.conv.weight, std=10.0)
    head.log_scale.copy_(head.scale_levels * 0.5)
    level = torch.tensor([-6.0, 2.0])
    out = head(torch.randn(2, 8, 5, 5), None, -level, None)
    assert bool((out.amax((1, 2, 3)) <= 5 * torch.exp(level / 2) * 1.001).all())
    hats = head.hats(-level)
    assert torch.allclose(hats.sum(1), torch.ones(2))
    assert torch.allclose(hats[1], torch.tensor([0.0, 2 / 3, 1 / 3]))


def test_a_residual_head_without_a_time_embedding_says_what_to_do():
    with pytest.raises(ValueError, match="time embedding"):
        ResidualHead(8, 1, 6, groups=4)(torch.zeros(1, 8, 4, 4))


@pytest.mark.parametrize("config", [{"kind": "none"}, {"kind": "conv", "in_channels": 8, "out": 1}, {}])
def test_an_unknown_head_config_is_refused(config):
    with pytest.raises(ValueError, match="head"):
        build_head(config)


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="divides"):
        ConvHead(10, 1, groups=4)


def test_dense_heads_serve_vectors():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out = nn.Linear(3, 16), nn.Linear(16, 2)

        def forward(self, x, time):
            return self.out(torch.tanh(self.body(torch.cat([x, time[:, None]], 1))))

    net = HeadedNetwork(Backbone(Mlp(), tap="out"), Schedule.vp_sde(), {"npr": DenseHead(16, 2, (8,))})
    prediction = net(torch.zeros(4, 2), 0.5)
    assert prediction.noise.shape == prediction.head("npr").shape == (4, 2)
    assert torch.equal(prediction.head("npr"), torch.ones(4, 2))


@pytest.mark.parametrize("row", GOLDEN["network_time_argument"]["rows"], ids=str)
def test_the_time_argument_is_the_authors(row):
    name, n, expected = row
    steps = int(name.split("N=")[1].split()[0])
    if name.startswith("DTWrapper"):
        value = TimeArgument(1000 / steps, 1 if "shift1=True" in name else 0)(n)
    else:
        value = TimeArgument(999.0)(n / steps)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(expected, rel=1e-6)


def test_times_reach_the_backbone_as_one_float_per_sample(x_t):
    net = network(Schedule.linear(), time_argument=TimeArgument(1.0, shift=1))
    net(x_t, torch.tensor([1, 2, 1000]))
    assert net.backbone.module.seen_time.tolist() == [0.0, 1.0, 999.0]
    net(x_t, 500)
    assert net.backbone.module.seen_time.tolist() == [499.0] * 3
    assert net.backbone.module.seen_time.dtype == torch.float32


def test_times_of_another_schedule_have_the_same_alpha_bar():
    linear, vp = Schedule.linear(), Schedule.vp_sde()
    n = torch.tensor([1, 10, 500, 990])
    on_vp = TimeMatch(linear, vp)(n)
    assert torch.allclose(vp.log_alpha_bar(on_vp), linear.log_alpha_bar(n), rtol=1e-10)
    t = torch.tensor([0.01, 0.3, 0.99], dtype=torch.float64)
    on_linear = TimeMatch(vp, linear)(t)
    low, high = linear.log_alpha_bar(on_linear.floor()), linear.log_alpha_bar(on_linear.ceil())
    share = on_linear - on_linear.floor()
    assert torch.allclose((1 - share) * low + share * high, vp.log_alpha_bar(t), rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_precision_of_a_network_is_part_of_what_its_predictions_depend_on(dtype):
    usual, other = network().to(dtype).float().identity(), network().to(dtype).identity()
    assert changes(usual, other) == [f"the precision changed from none to {str(dtype).removeprefix('torch.')}"]


def test_a_schedule_matched_to_itself_keeps_its_times():
    t = torch.tensor([1e-5, 0.2, 1.0], dtype=torch.float64)
    assert torch.allclose(TimeMatch(Schedule.vp_sde(), Schedule.vp_sde())(t), t, rtol=1e-9)
    n = torch.arange(1, 1001)
    assert torch.allclose(TimeMatch(Schedule.cosine(), Schedule.cosine())(n), n.double(), rtol=1e-9)


@pytest.mark.parametrize("schedule", [Schedule.edm(), Schedule.ve_sde(), Schedule.flow(), Schedule.vp_sde()], ids=repr)
@pytest.mark.parametrize("native", [Schedule.linear(), Schedule.vp_sde(), Schedule.flow(), Schedule.ve_sde()], ids=repr)
@pytest.mark.parametrize("number", [300, 1000])
@pytest.mark.filterwarnings("ignore:.*outside those the network was trained on")
def test_x_t_is_scaled_to_the_noise_that_the_network_knows(native, schedule, number):
    t = schedule.grid([number])[0]
    match = TimeMatch(schedule, native)
    log_snr = schedule.log_snr(t).clamp(native.log_snr(native.final_time), native.log_snr(native.first_time))
    known = {"flow": torch.sigmoid(-log_snr / 2), "ve_sde": torch.exp(-log_snr / 2)}
    spread = known.get(native.name, torch.sigmoid(-log_snr).sqrt())
    torch.testing.assert_close(match.scale(t) * schedule.levels(t)[1], spread, rtol=1e-9, atol=0)
    x_t = torch.randn(3, 1, 8, 8)
    assert network(native).with_schedule(schedule)(x_t, t).output.shape == x_t.shape


def test_a_network_on_another_schedule_sees_the_matched_time(x_t):
    native = network(Schedule.vp_sde())
    moved = native.with_schedule(Schedule.linear())
    t = float(TimeMatch(Schedule.linear(), Schedule.vp_sde())(400))
    assert torch.allclose(moved(x_t, 400).noise, native(x_t, t).noise, rtol=1e-6)


def test_a_variance_exploding_schedule_is_scaled_to_unit_power(x_t):
    native, ve = network(Schedule.vp_sde()), Schedule.ve_sde(sigma_max=10.0)
    t = float(TimeMatch(ve, Schedule.vp_sde())(0.7))
    scale = math.sqrt(1 + float(ve.beta_bar(0.7)))
    assert torch.allclose(native.with_schedule(ve)(x_t, 0.7).noise, native(x_t / scale, t).noise, atol=1e-6)


def test_a_network_without_some_of_its_heads_predicts_the_same_by_the_others(x_t):
    heads = {name: ConvHead(8, 1, groups=4) for name in ("sn", "npr")}
    nn.init.normal_(heads["sn"].conv.weight)
    whole = network(heads=heads).with_schedule(Schedule.linear())
    part = whole.with_only_heads("sn", "range")
    assert not part.training
    found, expected = part(x_t, 300), whole(x_t, 300)
    assert list(found.heads) == ["sn"]
    assert torch.equal(found.noise, expected.noise)
    assert torch.equal(found.heads["sn"], expected.heads["sn"])
    assert list(whole.heads) == ["sn", "npr"]
    assert not whole.with_only_heads().heads


def test_noise_levels_never_trained_on_are_clamped_with_one_warning(x_t):
    moved = network(Schedule.linear()).with_schedule(Schedule.vp_sde())
    with pytest.warns(UserWarning, match="outside those the network was trained on"):
        clamped = moved(x_t, 1e-6).noise
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved(x_t, 1e-6)
    assert_close_outputs(clamped, network(Schedule.linear())(x_t, 1).noise)


def test_the_end_of_the_linear_schedule_is_near_enough_to_the_vp_sde_for_no_warning(x_t):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network(Schedule.vp_sde()).with_schedule(Schedule.linear())(x_t, 1000)


@pytest.mark.parametrize("parameterisation", ["sample", "v_prediction"])
def test_other_parameterisations_give_the_noise_they_imply(parameterisation, x_t):
    schedule = Schedule.vp_sde()
    net = network(schedule, parameterisation=parameterisation)
    raw = network(schedule)(x_t, 0.3).noise.double()
    a, b = float(schedule.alpha_bar(0.3)), float(schedule.beta_bar(0.3))
    x = x_t.double()
    if parameterisation == "sample":
        expected = (x - math.sqrt(a) * raw) / math.sqrt(b)
    else:
        expected = math.sqrt(a) * raw + math.sqrt(b) * x
    assert torch.allclose(net(x_t, 0.3).noise.double(), expected, atol=1e-5)


def test_twice_the_channels_need_learned_range(x_t):
    module = tiny(out=2)
    backbone = Backbone.of(module)
    with pytest.raises(ValueError, match="learned_range=True"):
        HeadedNetwork(backbone, Schedule.linear())(x_t, 5)
    prediction = HeadedNetwork(backbone, Schedule.linear(), learned_range=True)(x_t, 5)
    raw = module(x_t, torch.full((3,), 5.0))
    assert torch.equal(prediction.noise, raw[:, :1])
    assert torch.equal(prediction.head("range"), raw[:, 1:])


def test_a_wrong_channel_count_is_named(x_t):
    with pytest.raises(ValueError, match="returned 3 channels for images with 1"):
        HeadedNetwork(Backbone.of(tiny(out=3)), Schedule.linear())(x_t, 5)


def test_the_fingerprint_knows_every_weight_and_not_its_storage_type():
    a, b = tiny(), tiny()
    assert fingerprint(a) == fingerprint(b)
    with torch.no_grad():
        b.body.weight[0, 0, 0, 0] += 1e-6
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(a.half()) == fingerprint(a.float())


def test_the_fingerprint_does_not_know_the_memory_layout():
    plain, last = nn.Conv2d(8, 1, 3), nn.Conv2d(8, 1, 3)
    last.load_state_dict(plain.state_dict())
    assert fingerprint(last.to(memory_format=torch.channels_last)) == fingerprint(plain)


class ActivatedNet(TinyNet):
    """The same with its activation as a module, as diffusers' UNet2DModel has it."""

    def __init__(self):
        super().__init__()
        self.conv_act = nn.SiLU()
        nn.init.normal_(self.conv_norm_out.weight)

    def forward(self, x, time):
        hidden = self.body(x) + self.shift(self.time_embedding(time[:, None] / 1000))[..., None, None]
        return self.conv_out(self.conv_act(self.conv_norm_out(hidden)))


def with_backbones_norm(
    net: nn.Module, head: ConvHead | TimedHead | ResidualHead
) -> ConvHead | TimedHead | ResidualHead:
    """A head as a fit makes it: its last layer fitted, its first normalisation the backbone's."""
    nn.init.normal_(head.last.weight, std=0.1)
    (head.norm1 if isinstance(head, ResidualHead) else head.norm).load_state_dict(net.conv_norm_out.state_dict())
    return head.eval()


@pytest.mark.parametrize(
    "head",
    [ConvHead(8, 1, groups=4), TimedHead(8, 1, groups=4, base="noise"), ResidualHead(8, 1, 6, groups=4)],
    ids=lambda head: head.kind,
)
def test_a_head_with_the_backbones_normalisation_takes_over_its_activation(head, x_t, monkeypatch):
    torch.manual_seed(0)
    net = ActivatedNet().eval().requires_grad_(False)
    with_backbones_norm(net, head).requires_grad_(False)
    seen = Backbone.of(net)(x_t, torch.zeros(3))
    more = (torch.tensor([1.0, 0.0, -3.0]), torch.zeros(3, 1, 8, 8))
    own = head(seen.features, seen.time_embedding, *more)
    norm = head.norm1 if isinstance(head, ResidualHead) else head.norm
    monkeypatch.setattr(norm, "forward", lambda features: pytest.fail("the activation was computed again"))
    assert torch.equal(head(seen.features, seen.time_embedding, *more, seen.activation), own)


def test_an_activation_is_not_shared_once_the_weights_differ_or_are_trained(x_t):
    torch.manual_seed(0)
    net = ActivatedNet().eval().requires_grad_(False)
    head = with_backbones_norm(net, ConvHead(8, 1, groups=4))
    activation = Backbone.of(net)(x_t, torch.zeros(3)).activation
    assert not activation.serves(head.norm)  # its gradient is wanted
    with torch.no_grad():
        assert activation.serves(head.norm)
        head.norm.bias.data[3] += 1e-6
        assert not activation.serves(head.norm)
        assert not activation.serves(nn.GroupNorm(8, 8))
        assert not activation.serves(nn.GroupNorm(4, 8, eps=1e-3))


def test_an_activation_is_shared_only_if_it_follows_the_tapped_normalisation(x_t):
    class Between(ActivatedNet):
        def forward(self, x, time):
            return self.conv_out(self.conv_act(2 * self.conv_norm_out(self.body(x))))

    assert Backbone(Between(), activation="conv_act")(x_t, torch.zeros(3)).activation is None
    assert Backbone.of(tiny())(x_t, torch.zeros(3)).activation is None
    other = ActivatedNet()
    other.conv_act = nn.GELU()
    assert Backbone.of(other)(x_t, torch.zeros(3)).activation is None
    other.conv_act = nn.SiLU(inplace=True)  # overwrites what a head with other weights would rescale
    assert Backbone.of(other)(x_t, torch.zeros(3)).activation is None


def own_norm(weight_of: nn.GroupNorm, seed: int = 3) -> nn.GroupNorm:
    """A normalisation of the same groups with weights of its own, as gradient descent leaves it."""
    norm = nn.GroupNorm(weight_of.num_groups, weight_of.num_channels, weight_of.eps).to(weight_of.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    for own, other in zip(norm.parameters(), weight_of.parameters(), strict=True):
        own.data = other.data + 0.3 * torch.randn(other.shape, generator=generator).to(other.dtype)
    return norm.requires_grad_(False)


def computed(norm: nn.GroupNorm, features: torch.Tensor) -> Activation:
    """What a backbone leaves behind, its features included in the graph."""
    normalised = norm(features)
    return Activation(norm, normalised, nn.functional.silu(normalised))


def backbones_norm(dtype: torch.dtype = torch.float32) -> nn.GroupNorm:
    norm = nn.GroupNorm(4, 8).to(dtype).requires_grad_(False)
    norm.weight.data = torch.linspace(-2.0, 2.0, 8, dtype=dtype)
    norm.bias.data = torch.linspace(-1.0, 1.0, 8, dtype=dtype)
    return norm


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_other_weights_of_the_same_groups_rescale_what_the_backbone_normalised(dtype, error, layout):
    norm = backbones_norm(dtype)
    own = own_norm(norm)
    features = (5 + 3 * torch.randn(4, 8, 6, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    features = features.to(memory_format=layout)
    known = computed(norm, features)
    before = known.normalised.clone()
    assert (known.rescaled(own) - own(features)).abs().max() < error
    assert (activated(own, features, known) - activated(own, features)).abs().max() < error
    assert torch.equal(known.normalised, before)  # it still belongs to the backbone


def test_a_head_with_a_normalisation_of_its_own_does_not_look_for_mean_and_deviation_again(x_t, monkeypatch):
    torch.manual_seed(0)
    net = ActivatedNet().eval().requires_grad_(False)
    net.conv_norm_out.weight.data = torch.linspace(0.5, 2.0, 8)
    head = with_backbones_norm(net, ConvHead(8, 1, groups=4)).requires_grad_(False)
    head.norm.weight.data += 0.1
    seen = Backbone.of(net)(x_t, torch.zeros(3))
    expected = head(seen.features)
    monkeypatch.setattr(head.norm, "forward", lambda features: pytest.fail("the features were normalised again"))
    assert torch.allclose(head(seen.features, activation=seen.activation), expected, rtol=1e-5, atol=0)


def test_a_gradient_goes_through_the_normalisation_itself():
    norm = backbones_norm(torch.float64)
    own = own_norm(norm)
    features = torch.randn(2, 8, 3, 3, dtype=torch.float64, requires_grad=True)
    known = computed(norm, features)
    assert known.rescaled(own) is None
    weights = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((activated(own, features, known) * weights).sum(), features)
    (expected,) = torch.autograd.grad((activated(own, features) * weights).sum(), features)
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert known.rescaled(own) is not None


def test_weights_in_training_get_their_gradient_past_the_rescaling():
    norm, features = backbones_norm(), torch.randn(2, 8, 3, 3)
    own = own_norm(norm).requires_grad_(True)
    known = computed(norm, features)
    activated(own, features, known).sum().backward()
    found = [parameter.grad.clone() for parameter in own.parameters()]
    own.zero_grad()
    activated(own, features).sum().backward()
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(found, own.parameters(), strict=True))
    with torch.no_grad():
        assert known.rescaled(own) is not None
        norm.requires_grad_(True)
    assert known.rescaled(own_norm(norm)) is None  # the backbone's own weights may be in training as well


def with_weight(norm: nn.GroupNorm, channel: int, weight: float) -> nn.GroupNorm:
    norm.weight.data[channel] = weight
    return norm


@pytest.mark.parametrize(
    ("norm", "own"),
    [
        (with_weight(backbones_norm(), 2, 0.0), own_norm(backbones_norm())),
        (with_weight(backbones_norm(), 2, 0.0), with_weight(own_norm(backbones_norm()), 2, 0.0)),
        (with_weight(backbones_norm(), 2, 1e-6), own_norm(backbones_norm())),
        (with_weight(backbones_norm(), 2, math.nan), own_norm(backbones_norm())),
        (nn.GroupNorm(4, 8, affine=False), own_norm(backbones_norm())),
        (backbones_norm(), nn.GroupNorm(4, 8, affine=False)),
        (backbones_norm(), nn.GroupNorm(2, 8).requires_grad_(False)),
        (backbones_norm(), nn.GroupNorm(4, 8, eps=1e-3).requires_grad_(False)),
        (backbones_norm(), own_norm(backbones_norm(torch.bfloat16))),
    ],
    ids=["zero", "both zero", "small", "nan", "backbone plain", "head plain", "groups", "eps", "type"],
)
def test_what_cannot_be_rescaled_exactly_is_normalised_from_the_features(norm, own):
    features = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    known = computed(norm, features)
    assert known.rescaled(own) is None
    if own.weight is None or own.weight.dtype == features.dtype:
        assert torch.equal(activated(own, features, known), activated(own, features))


def test_a_head_under_bfloat16_autocast_is_the_same_with_and_without_the_backbones_activation():
    norm, features = backbones_norm(), torch.randn(2, 8, 4, 4).bfloat16()
    own = own_norm(norm)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = activated(own, features, computed(norm, features)), activated(own, features)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)  # digits lost by the backbone's rounding are not taken over


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_thin_convolution_serves_both_memory_layouts(layout):
    thin = ThinConv2d(6, 3).double()
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64).to(memory_format=layout)
    expected = nn.functional.conv2d(x, thin.weight, thin.bias, padding=1)
    assert torch.allclose(thin(x), expected, rtol=1e-12, atol=1e-12)
    assert thin(x).is_contiguous()
