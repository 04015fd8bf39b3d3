"""Heads on tokens, and on a layer of one's own, fitted in closed form: exact, calibrated, and in float32."""

from __future__ import annotations

import pytest
import torch
from tests.token_networks import make, tapped
from torch import nn

from optcov import Schedule
from optcov.covariances import Regression
from optcov.data import ImageSet
from optcov.fitting import Batches, calibrate, closed_form, fit_closed_form, new_heads
from optcov.fitting.closed_form import Rows, apply, fit_gamma, fit_least_squares, layer_rows, transposed_product
from optcov.forward import ForwardProcess
from optcov.networks import Backbone, ConvHead, HeadedNetwork, TimedHead
from optcov.networks.thin import ThinConv2d, thin_weight_gradient


def token_rows(head: ConvHead | TimedHead, count: int = 400) -> tuple[Rows, torch.Tensor]:
    """Features, and targets whose mean is exp of what the head says with random weights; that mean's logarithm."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, 5, 3, 4, generator=generator)
    log_snr = 12 * torch.rand(count, generator=generator) - 6
    weights = 0.4 * torch.randn(_rows_of(head), _columns_of(head), generator=generator)
    rows = Rows(features, torch.full((count,), 0.5), log_snr, {})
    log_g = head.squash(apply(head, rows, weights))
    target = log_g.exp() * torch.randn(log_g.shape, generator=generator).square()
    return Rows(features, rows.times, log_snr, {"npr": Regression.plain(target)}), log_g


def _rows_of(head) -> int:
    return (head.parts if isinstance(head, TimedHead) else 1) * (head.conv.in_channels + 1)


def _columns_of(head) -> int:
    return head.conv.out_channels // (head.parts if isinstance(head, TimedHead) else 1)


def on_tokens(kind: str) -> ConvHead | TimedHead:
    settings = {"kernel": 1, "patch": 2, "order": "cpq"}
    return ConvHead(5, 2, None, **settings) if kind == "conv" else TimedHead(5, 2, None, ceiling=50.0, **settings)


@pytest.mark.parametrize("kind", ["conv", "timed"])
def test_fisher_scoring_finds_the_variances_of_each_pixel_of_a_token(kind):
    head = on_tokens(kind)
    rows, log_g = token_rows(head)
    report = fit_gamma(lambda: [rows], {"npr": head})["npr"]
    found = head(rows.inputs, None, rows.log_snr).log().detach()
    assert found.shape == rows.regressions["npr"].target.shape == (400, 2, 6, 8)
    assert report.converged
    # 4,800 tokens for 6 or 18 numbers by channel, each log y with a deviation of 2.2
    assert float((found - log_g).square().mean().sqrt()) < 0.15
    assert float(log_g.std()) > 0.5


def test_least_squares_on_tokens_equal_their_normal_equations():
    head = ConvHead(5, 2, None, transform="linear", kernel=1, patch=2)
    rows, _ = token_rows(head)
    fit_least_squares(lambda: [rows], {"npr": head})
    x = layer_rows(head.last, rows).double().flatten(0, 1)
    y = head.to_channels(rows.regressions["npr"].target).flatten(2).mT.flatten(0, 1).double()
    exact = torch.linalg.lstsq(x, y).solution
    ours = torch.cat([head.conv.weight.flatten(1), head.conv.bias[:, None]], 1).double().T
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_product_with_the_rows_is_that_of_the_matrix(kernel):
    head = TimedHead(5, 1, None, kernel=kernel, patch=2)
    generator = torch.Generator().manual_seed(1)
    rows = Rows(torch.randn(7, 5, 3, 4, generator=generator), torch.zeros(7), torch.linspace(-8, 8, 7), {})
    residual = torch.randn(7, 1, 6, 8, generator=generator)
    x = layer_rows(head.last, rows)  # (B, L, P)
    whole = torch.einsum("bk,blp->bklp", head.hats(rows.log_snr), x).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    y = head.to_channels(residual).flatten(2).mT.flatten(0, 1)
    torch.testing.assert_close(transposed_product(head, rows, residual), (whole.T @ y).double(), rtol=1e-4, atol=1e-4)
    weights = torch.randn(whole.shape[1], y.shape[1], generator=generator)
    values = head.to_channels(apply(head, rows, weights)).flatten(2).mT.flatten(0, 1)
    torch.testing.assert_close(values, whole @ weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [1, 5])
def test_a_thin_convolution_of_any_odd_kernel_is_a_convolution(kernel):
    thin = ThinConv2d(5, 2, kernel).double()
    plain = nn.Conv2d(5, 2, kernel, padding=kernel // 2).double()
    plain.load_state_dict(thin.state_dict())
    x = torch.randn(3, 5, 7, 6, dtype=torch.float64)
    out, expected = thin(x), plain(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(thin(x), expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(out)
    expected.backward(gradient)
    torch.testing.assert_close(thin_weight_gradient(x, gradient, kernel), plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_the_matrix_is_the_same_when_memory_is_scarce(monkeypatch):
    fitted = []
    for size in (2**28, 1):
        monkeypatch.setattr(closed_form, "CHUNK_BYTES", size)
        head = on_tokens("timed")
        rows, _ = token_rows(head, 50)
        fit_gamma(lambda rows=rows: [rows], {"npr": head})
        fitted.append(head.conv.weight.clone())
    torch.testing.assert_close(*fitted, rtol=1e-4, atol=1e-5)


# calibration


def half_known(count: int = 256) -> ImageSet:
    """Images of one grey on the left and of noise on the right: the residual depends on the place."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (count, 2, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[..., :4] = 100
    return ImageSet(pixels)


class Own(nn.Module):
    """A network of one's own: its output layer is a convolution with no normalisation before it."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Conv2d(4, 6, 5, padding=2), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x, time):
        place = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype).expand(len(x), 1, *x.shape[2:])
        level = (time / 1000).to(x.dtype)[:, None, None, None].expand_as(place)
        return self.last(torch.tanh(2 * self.body(torch.cat([x, place, level], 1))))


def own() -> Backbone:
    torch.manual_seed(0)
    return Backbone.of(Own().requires_grad_(False), "last")


def fitted(backbone: Backbone, names=("npr",), images: int = 1024) -> HeadedNetwork:
    network = HeadedNetwork(backbone, Schedule.flow(), parameterisation="flow_prediction").eval()
    source = half_known()
    tasks = new_heads(network, source.x_0(torch.arange(1)), names)
    heads = fit_closed_form(network, tasks, Batches(source, network.schedule, 64), images).heads
    return HeadedNetwork(network.backbone, network.schedule, heads, parameterisation="flow_prediction").eval()


@torch.no_grad()
def by_decile(network: HeadedNetwork) -> tuple[torch.Tensor, float]:
    """Predicted over measured variances in tenths of the pixels by what is predicted, at fresh noise; their spread."""
    batch = Batches(half_known(), network.schedule, 256, seed=9)(1)
    process = ForwardProcess(network.schedule)
    x_t = process.diffuse(batch.x_0, batch.times, batch.noise)
    prediction = network(x_t, batch.times)
    predicted = prediction.head_in_clean_units("npr").double().flatten()
    measured = (batch.x_0 - prediction.clean).square().double().flatten()
    scale = prediction.factor("velocity").repeat_interleave(x_t[0].numel())
    order = (predicted / scale).argsort()
    tenths = [((predicted / scale)[part].mean(), (measured / scale)[part].mean()) for part in order.tensor_split(10)]
    lowest, highest = tenths[0][0], tenths[-1][0]
    return torch.stack([p / m for p, m in tenths]), float(highest / lowest)


@pytest.mark.parametrize("network", ["dit", "flux", "own"])
def test_heads_of_any_form_are_calibrated_by_level_and_by_decile(network):
    headed = fitted(own() if network == "own" else tapped(make(network)))
    levels = calibrate(headed, half_known(), ["npr"], samples=512, parts=5, batch_size=64, seed=5)["npr"]
    assert levels.ratio.tolist() == pytest.approx([1.0] * 5, abs=0.08)
    ratios, spread = by_decile(headed)
    assert ratios.tolist() == pytest.approx([1.0] * 10, abs=0.15)
    assert spread > 1.5  # not one number for all


def test_squared_noise_and_range_are_fitted_on_tokens_too():
    headed = fitted(tapped(make("dit")), ("npr", "sn"), 256)
    x_t = torch.randn(4, 2, 8, 8)
    with torch.no_grad():
        prediction = headed(x_t, 0.5)
    assert all(bool((prediction.heads[name] > 0).all()) for name in ("npr", "sn"))
    network = HeadedNetwork(tapped(make("dit")), Schedule.vp_sde(), parameterisation="v_prediction").eval()
    tasks = new_heads(network, x_t[:1], ["range"])
    report = fit_closed_form(network, tasks, Batches(half_known(), network.schedule, 64), 128).reports["range"]
    assert report.losses[-1] <= report.losses[0]


@pytest.mark.parametrize("network", ["dit", "unet"])
def test_heads_fitted_on_a_network_in_half_precision_are_float32_and_calibrated(network):
    headed = fitted(tapped(make(network).to(torch.bfloat16)))
    assert {weight.dtype for weight in headed.backbone.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in headed.heads.parameters()} == {torch.float32}
    result = calibrate(headed, half_known(), ["npr"], samples=512, parts=5, batch_size=64, seed=5)["npr"]
    assert result.ratio.tolist() == pytest.approx([1.0] * 5, abs=0.08)


def test_a_network_that_returns_another_grid_of_pixels_is_refused():
    class Square(nn.Module):
        """Puts its tokens on a square, whatever the image, as diffusers' DiT does."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(2, 2)

        def forward(self, x, time):
            return self.last(x.flatten(2).mT).mT.reshape(len(x), 2, 4, 4)

    network = HeadedNetwork(Backbone.of(Square(), "last"), Schedule.flow())
    with pytest.raises(ValueError, match=r"\(4, 4\) pixels for images of \(2, 8\)"):
        network.features(torch.zeros(1, 2, 2, 8), 0.5)
