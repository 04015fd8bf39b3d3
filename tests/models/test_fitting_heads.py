"""Stage 2: heads against closed-form moments, Fisher scoring against gradient descent, numbers per time."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from optcov import Bridge, ForwardProcess, ReverseProcess, Schedule, oracle
from optcov.covariances import LearnedRange, Regression, range_ends
from optcov.fitting import (
    Batches,
    HeadObjective,
    NoiseObjective,
    Training,
    TrainingConfig,
    TrainingError,
    calibrate,
    fit_closed_form,
    interpolation_error,
    measure,
    new_heads,
    numbers_per_time,
    stage2,
    time_grid,
    train_heads,
)
from optcov.fitting.closed_form import (
    Rows,
    apply,
    fit_gamma,
    fit_least_squares,
    layer_rows,
    log_estimate,
    transposed_product,
)
from optcov.fitting.objectives import observe
from optcov.fitting.rows import cut
from optcov.fitting.stage2 import FeatureStream
from optcov.forward import first_step_variance
from optcov.gaussian import Diagonal, Gaussian, Isotropic, kl_divergence
from optcov.networks import (
    Backbone,
    ConvHead,
    DenseHead,
    HeadedNetwork,
    TimedHead,
    build_head,
    fingerprint,
    head_config,
)
from tiny_training import images, tiny_network


def fitting(network, names=("sn", "npr", "range"), kind="conv", loss="gamma", batch_size=16):
    tasks = new_heads(network, images().x_0(torch.arange(1)), names, kind, loss)
    return tasks, Batches(images(), network.schedule, batch_size)


# targets


@pytest.mark.parametrize("schedule", [Schedule.linear(), Schedule.vp_sde()], ids=repr)
def test_the_range_target_is_the_variational_loss_with_the_mean_detached(schedule):
    network = tiny_network(schedule)
    process = ForwardProcess(schedule)
    batch = Batches(images(), schedule, 16)(1)
    with torch.no_grad():
        example, _ = observe(network, process, batch)
    regression = LearnedRange.regression(example, "noise")
    v = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8).expand_as(batch.x_0)
    log_g = regression.log_estimate(v).double()
    ours = 0.5 * (regression.target.double() * torch.exp(-log_g) + log_g)
    unit = 1 if schedule.steps else 1e-3
    for b in range(16):
        t = batch.times[b].item()
        if t < 3 * unit:
            continue
        bridge: Bridge = process.bridge(t, t - unit)
        x_t, x_0 = example.prediction.x_t[b : b + 1].double(), batch.x_0[b : b + 1].double()
        signal, noise = schedule.alpha_bar(t).sqrt(), schedule.beta_bar(t).sqrt()
        x0_hat = (x_t - noise * example.prediction.noise[b : b + 1].double()) / signal
        low, high = (end.log() for end in range_ends(bridge, schedule.beta_bar(t), first_step_variance(schedule)))
        share = (v[b : b + 1].double() + 1) / 2
        true = Gaussian(bridge.clean_weight * x_0, Isotropic(bridge.variance))
        model = Gaussian(bridge.clean_weight * x0_hat, Diagonal(torch.exp(share * high + (1 - share) * low)))
        expected = kl_divergence(true, model) + 0.5 * (1 + bridge.variance.log()) * 64
        assert float(ours[b].sum()) == pytest.approx(float(expected), rel=1e-4)


# positive squared noise


def test_the_score_of_a_regression_is_the_slope_of_its_deviance():
    generator = torch.Generator().manual_seed(0)
    square = torch.rand(64, generator=generator, dtype=torch.float64) * 4
    target = torch.randn(64, generator=generator, dtype=torch.float64)
    log_g = torch.randn(64, generator=generator, dtype=torch.float64, requires_grad=True)
    for spread in (None, 4 * square):
        regression = Regression.plain(target.square() if spread is None else target, spread)
        (slope,) = torch.autograd.grad(regression.deviance(log_g).sum(), log_g)
        torch.testing.assert_close(regression.score(log_g), -slope, rtol=1e-9, atol=1e-9)


def test_without_a_prediction_the_regression_of_the_excess_is_the_gamma_regression():
    target, log_g = torch.rand(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    plain, excess = Regression.plain(target), Regression.plain(target, torch.full_like(target, 1e-9))
    torch.testing.assert_close(excess.score(log_g), plain.score(log_g), rtol=1e-6, atol=1e-6)
    shift = excess.deviance(log_g) - plain.deviance(log_g)
    torch.testing.assert_close(shift, torch.full_like(shift, math.log(2)), rtol=1e-6, atol=1e-6)


def test_the_excess_of_the_squared_noise_has_the_variance_that_its_weights_assume():
    """y = u^2 - u_hat^2 with u = u_hat + r: mean g, variance 4 u_hat^2 g + 2 g^2. 200,000 draws, 5 standard errors."""
    g, u_hat = 0.3, 1.2
    r = g**0.5 * torch.randn(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (u_hat + r).square() - u_hat**2
    expected = 4 * u_hat**2 * g + 2 * g**2
    assert float(y.mean()) == pytest.approx(g, abs=5 * (expected / len(y)) ** 0.5)
    assert float(y.var()) == pytest.approx(expected, rel=0.03)


def test_squared_noise_heads_are_positive_by_their_form():
    network = tiny_network()
    tasks, batches = fitting(network, ("sn", "npr"), kind=None)
    head = tasks["sn"].module
    assert (head.unit, head.about) == ("velocity", "prediction")
    fit = fit_closed_form(network, tasks, batches, images=64)
    assert list(fit.reports["sn"].losses) == sorted(fit.reports["sn"].losses, reverse=True)
    fitted = HeadedNetwork(network.backbone, network.schedule, fit.heads).eval()
    process = ReverseProcess(fitted, ForwardProcess(network.schedule), "sn", data_range=None)
    x_t = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        lowest = [float(process.posterior(x_t, t).variance.min()) for t in (0.01, 0.3, 0.7, 1.0)]
    assert min(lowest) > 0
    assert process.bounds.below == 0


def test_the_papers_form_of_squared_noise_stays_linear_and_its_difference_is_clamped():
    network = tiny_network()
    tasks, batches = fitting(network, ("sn",), kind=None, loss="mse")
    head = tasks["sn"].module
    assert (head.kind, head.transform, head.unit, head.about) == ("conv", "linear", "noise", "zero")
    fit = fit_closed_form(network, tasks, batches, images=64, loss="mse")
    fitted = HeadedNetwork(network.backbone, network.schedule, fit.heads).eval()
    process = ReverseProcess(fitted, ForwardProcess(network.schedule), "sn", data_range=None)
    x_t = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = [process.posterior(x_t, t).variance for t in (0.01, 0.3, 0.7, 1.0)]
        h, eps_hat = (lambda p: (p.heads["sn"], p.noise))(fitted(x_t, 0.3))
    assert process.bounds.below == sum(int((v == 0).sum()) for v in found) > 0
    factor = float(torch.exp(-network.schedule.log_snr(0.3)))
    torch.testing.assert_close(found[1], factor * (h - eps_hat.square()).clamp(min=0), rtol=1e-4, atol=1e-6)


def test_what_a_head_is_about_is_kept_with_it():
    tasks, _ = fitting(tiny_network(), ("sn",), kind=None)
    config = head_config(tasks["sn"].module)
    assert (config["unit"], config["about"]) == ("velocity", "prediction")
    again = build_head(config)
    assert (again.unit, again.about) == ("velocity", "prediction")
    with pytest.raises(ValueError, match="about zero or about the prediction, not about 'one'"):
        build_head({**config, "about": "one"})


# closed form


def test_fisher_scoring_reaches_the_loss_of_a_long_gradient_descent(tmp_path):
    network = tiny_network()
    tasks, batches = fitting(network, ("sn", "npr"))
    stream = FeatureStream(network, tasks, batches, 4)
    rows = list(stream())
    heads = {name: task.module for name, task in tasks.items()}
    reports = fit_gamma(lambda: rows, heads)  # as `optcov fit` does: by its own tolerance
    for name in heads:
        last = ConvHead(8, 1, groups=4).conv.double()
        optimizer = torch.optim.LBFGS(
            last.parameters(),
            max_iter=2000,
            tolerance_grad=1e-12,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )
        inputs = torch.cat([r.inputs for r in rows]).double()
        y = torch.cat([r.regressions[name].target for r in rows]).double()

        def loss(last=last, inputs=inputs, y=y):
            log_g = last(inputs)
            return (y * torch.exp(-log_g) + log_g).mean()

        def closure(optimizer=optimizer, loss=loss):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)
        descent = loss().item()
        assert min(reports[name].losses) <= descent + 1e-3 * abs(descent)
        assert reports[name].converged


def test_the_mse_fit_equals_its_normal_equations():
    network = tiny_network()
    tasks, batches = fitting(network, ("sn", "npr"), loss="mse")
    rows = list(FeatureStream(network, tasks, batches, 4)())
    heads = {name: task.module for name, task in tasks.items()}
    factor = {"sn": lambda t: torch.ones(len(t), dtype=torch.float64), "npr": lambda t: 1 + t.double()}
    reports = fit_least_squares(lambda: rows, heads, factor)
    for name, head in heads.items():
        x = torch.cat([layer_rows(head.last, r).double() for r in rows]).flatten(0, 1)
        y = torch.cat([r.regressions[name].target.double().flatten() for r in rows])
        weight = torch.cat([factor[name](r.times) for r in rows]).repeat_interleave(64)
        exact = torch.linalg.lstsq(weight.sqrt()[:, None] * x, weight.sqrt()[:, None] * y[:, None]).solution
        ours = torch.cat([head.conv.weight.flatten(), head.conv.bias]).double()
        assert torch.allclose(x @ ours[:, None], x @ exact, atol=1e-5)
        error = (weight * (y - (x @ exact).squeeze(1)).square()).sum() / weight.sum()
        assert reports[name].losses[0] == pytest.approx(float(error), rel=1e-6)


def test_a_start_that_overflows_gives_way_to_a_fresh_head():
    """One target in a hundred is 1e36 times the others: the regression of logarithms lies too far below it."""
    generator = torch.Generator().manual_seed(0)
    target = torch.where(torch.rand(4096, 1, generator=generator) < 0.01, 1e25, 1e-11)
    features = torch.randn(4096, 3, generator=generator)
    rows = [Rows(features, torch.ones(4096), torch.zeros(4096), {"npr": Regression.plain(target)})]
    report = fit_gamma(lambda: rows, {"npr": DenseHead(3, 1)}, passes=40)["npr"]
    assert all(math.isfinite(loss) for loss in report.losses)
    assert report.losses == tuple(sorted(report.losses, reverse=True))
    assert not report.converged  # and it does not claim what it did not reach


def test_a_fit_of_values_that_are_not_finite_says_so():
    broken = Regression.plain(torch.full((8, 1), math.nan))
    rows = [Rows(torch.randn(8, 3), torch.ones(8), torch.zeros(8), {"npr": broken})]
    with pytest.raises(TrainingError, match="not finite"):
        fit_gamma(lambda: rows, {"npr": DenseHead(3, 1)})


@pytest.mark.parametrize("kind", ["conv", "timed"])
def test_a_closed_form_fit_leaves_the_backbone_bit_identical(kind):
    network = tiny_network()
    before = fingerprint(network.backbone)
    tasks, batches = fitting(network, kind=kind)
    fit = fit_closed_form(network, tasks, batches, images=64)
    assert fingerprint(network.backbone) == before
    assert all(report.losses[-1] <= report.losses[0] for report in fit.reports.values())
    assert bool((fit.numbers.mean_square_residual > 0).all())


class CountedBatches(Batches):
    """Batches that remember which were asked for."""

    def __call__(self, step):
        self.__dict__.setdefault("asked", []).append(step)
        return super().__call__(step)


def rooms_of_a_stream():
    """A room that holds every row of `fitting`'s images, one that holds a fifth, and one that holds less than a row."""
    network = tiny_network()
    tasks, batches = fitting(network)
    whole = sum(rows.nbytes for rows in FeatureStream(network, tasks, batches, 3)())
    return network, tasks, batches, whole


def test_rows_that_do_not_fit_into_memory_are_cut_to_windows_of_the_same_values():
    network, tasks, batches, whole = rooms_of_a_stream()
    counted = CountedBatches(**vars(batches))
    cut = FeatureStream(network, tasks, counted, 3, cache_bytes=whole // 5)
    full = list(FeatureStream(network, tasks, batches, 3, cache_bytes=whole)())
    kept = [list(cut()) for _ in range(2)][-1]
    assert counted.asked == [1, 2, 3]  # the network runs once, however many passes there are
    assert cut.side is not None
    assert sum(rows.nbytes for rows in kept) <= whole // 5
    layer = tasks["npr"].module.last
    for a, b in zip(full, kept, strict=True):
        places = layer_rows(layer, a), layer_rows(layer, b)
        assert places[1].shape[1] == cut.side**2
        for image in range(len(b.times)):  # each row is one of the whole image's, with its target
            distance = (places[1][image][:, None] - places[0][image]).abs().amax(2)
            assert float(distance.amin(1).max()) < 1e-5
            found = a.regressions["npr"].target[image].flatten()[distance.argmin(1)]
            torch.testing.assert_close(found, b.regressions["npr"].target[image].flatten())


@pytest.mark.parametrize("side", range(1, 12))
def test_the_windows_leave_no_part_of_an_image_out(side):
    """Borders are as likely as the middle: tiles cover each row and column once, but for one between two of them."""
    height, width = 11, 8
    steps = torch.cartesian_prod(torch.arange(0, 1, 1 / 64), torch.arange(0, 1, 1 / 64)).double()
    image = torch.arange(height * width).reshape(1, 1, height, width).float()
    positions = image.expand(len(steps), -1, -1, -1)
    whole = Rows(positions, steps[:, 0], steps[:, 0], {"npr": Regression.plain(positions)})
    tiles = cut(whole, side, 0, steps).inputs
    assert max(tiles.shape[-2:]) <= side
    once = torch.unique(tiles.flatten(1), dim=0).flatten().long().bincount(minlength=height * width)
    seams = [-(-length // side) - 1 for length in (height, width)]
    times = once.reshape(height, width)
    assert int(times.min()) == 1
    for counts, seam in ((times[:, 0], seams[0]), (times[0], seams[1])):
        assert int((counts - counts.min()).clamp(max=1).sum()) <= seam


def test_heads_on_windows_are_those_of_the_rows_in_them():
    """Products by convolution agree with the rows written out, at the edge of an image and inside it."""
    network, tasks, batches, whole = rooms_of_a_stream()
    rows = next(iter(FeatureStream(network, tasks, batches, 3, cache_bytes=whole // 5)()))
    head = tasks["npr"].module
    x = layer_rows(head.last, rows)
    weights = torch.randn(x.shape[2], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (x @ weights.float()).transpose(1, 2).reshape_as(rows.regressions["npr"].target)
    torch.testing.assert_close(apply(head, rows, weights), expected, rtol=1e-4, atol=1e-4)
    residual = rows.regressions["npr"].target
    product = torch.einsum("bnp,bnc->pc", x, residual.flatten(2).transpose(1, 2)).double()
    torch.testing.assert_close(transposed_product(head, rows, residual), product, rtol=1e-4, atol=1e-3)


def test_a_room_for_less_than_a_row_of_each_image_is_refused():
    network, tasks, batches, _ = rooms_of_a_stream()
    with pytest.raises(TrainingError, match="use fewer images"):
        next(iter(FeatureStream(network, tasks, batches, 3, cache_bytes=4)()))


@torch.no_grad()
def test_a_fit_on_windows_is_calibrated_on_whole_images(monkeypatch):
    network, _, batches, whole = rooms_of_a_stream()
    monkeypatch.setattr(stage2, "CACHE_BYTES", whole // 2)
    tasks, _ = fitting(network, ("npr",), kind="timed")
    fit_closed_form(network, tasks, batches, images=3 * batches.batch_size)
    head, estimated, true = tasks["npr"].module, 0.0, 0.0
    for rows in FeatureStream(network, tasks, batches, 3, cache_bytes=2**30)():
        regression = rows.regressions["npr"]
        estimated += float(
            log_estimate(head, rows, regression, head.mix(head.last(rows.inputs), rows.log_snr)).exp().sum()
        )
        true += float(regression.target.sum())
    assert estimated / true == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["npr", "sn"])
def test_timed_heads_are_calibrated_where_they_were_fitted(name):
    network = tiny_network()
    if name == "sn":  # a mean that is not far from the right one: the velocity of images of noise is unknown
        network = HeadedNetwork(network.backbone, network.schedule, parameterisation="v_prediction")
        with torch.no_grad():
            network.backbone.module.conv_out.weight.zero_()
            network.backbone.module.conv_out.bias.zero_()
    tasks, batches = fitting(network, (name,), kind="timed", batch_size=32)
    fit = fit_closed_form(network, tasks, batches, images=640)
    fitted = HeadedNetwork(network.backbone, network.schedule, fit.heads, parameterisation=network.parameterisation)
    result = calibrate(fitted, images(), [name], samples=640, parts=5, batch_size=32, seed=0)[name]
    assert result.ratio.tolist() == pytest.approx([1.0] * 5, abs=0.05)
    assert bool((result.error > 0).all())


def test_a_sample_without_signal_leaves_the_last_part_of_the_times_its_gain():
    schedule = Schedule.from_betas(torch.cat([Schedule.linear().betas[:-1], torch.ones(1, dtype=torch.float64)]))
    times = torch.arange(5, 1001, 5)
    target = torch.where(times > 950, 3.0, 1.0).reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    rows = Rows(torch.zeros(200, 4, 2, 2), times, schedule.log_snr(times).float(), {"npr": Regression.plain(target)})
    head = TimedHead(4, 1, groups=2)

    class Stream:
        network = SimpleNamespace(schedule=schedule)

        def __call__(self):
            yield rows

    with torch.no_grad():
        stage2.set_gains(Stream(), {"npr": head}, lambda total: total)
    assert float(head.log_gain[-1] - head.log_gain[0]) == pytest.approx(math.log(3), abs=0.1)


def test_samples_that_are_left_out_of_a_regression_do_not_change_the_gain():
    """As those of probes where no signal is left, whose target stands at 0."""
    schedule, times = Schedule.linear(), torch.arange(5, 1001, 5)
    seen = torch.arange(200) % 2 == 0
    target = torch.where(seen, 2.0, 0.0).reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    regression = replace(Regression.plain(target), weight=seen.double())
    rows = Rows(torch.zeros(200, 4, 2, 2), times, schedule.log_snr(times).float(), {"ocm": regression})
    stream = SimpleNamespace(network=SimpleNamespace(schedule=schedule))
    head = TimedHead(4, 1, groups=2)
    with torch.no_grad():
        stage2.set_gains(Streamed([rows], stream.network), {"ocm": head}, lambda total: total)
        estimate = head(torch.zeros(1, 4, 2, 2), None, torch.zeros(1))
    torch.testing.assert_close(estimate, torch.full((1, 1, 2, 2), 2.0))


class Streamed:
    """Rows as a stream that was made before."""

    def __init__(self, rows, network):
        self.rows, self.network = rows, network

    def __call__(self):
        yield from self.rows


def test_heads_that_read_features_differently_are_not_fitted_together():
    network = tiny_network()
    tasks, batches = fitting(network, ("sn", "npr"))
    with torch.no_grad():
        tasks["npr"].module.norm.weight *= 2
    with pytest.raises(TrainingError, match="'npr' reads the features in a way of its own"):
        fit_closed_form(network, tasks, batches, images=16)


def test_features_with_nan_are_refused():
    network = tiny_network()
    tasks, batches = fitting(network)
    with torch.no_grad():
        network.backbone.module.body.weight[0] = float("nan")
    with pytest.raises(ValueError, match="NaN|negative"):
        fit_closed_form(network, tasks, batches, images=16)


@pytest.mark.parametrize("wrong", [{"names": ["other"]}, {"names": []}, {"names": ["sn"], "kind": "cubic"}])
def test_unknown_heads_are_refused(wrong):
    with pytest.raises(ValueError, match="choose"):
        new_heads(tiny_network(), images().x_0(torch.arange(1)), **wrong)


# gradient descent


def test_stage_2_trains_heads_only_and_keeps_no_graph_of_the_backbone(tmp_path):
    network = tiny_network()
    tasks, batches = fitting(network, kind="residual")
    before = fingerprint(network.backbone)
    config = TrainingConfig(steps=30, batch_size=16, learning_rate=1e-2, ema=0.9, decay="constant")
    losses = [record.loss for record in train_heads(network, tasks, batches, config, tmp_path)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert fingerprint(network.backbone) == before
    assert all(parameter.grad is None for parameter in network.backbone.parameters())


def test_the_best_heads_are_those_of_the_lowest_score(tmp_path):
    network = tiny_network()
    tasks, batches = fitting(network, ("npr",), kind="residual")
    config = TrainingConfig(steps=6, batch_size=16, learning_rate=1e-2, ema=0.0, checkpoint_every=2)
    scores, seen = iter([3.0, 1.0, 2.0]), []

    def score():
        assert not tasks["npr"].module.training
        seen.append(tasks["npr"].module.conv.weight.clone())
        return next(scores)

    list(train_heads(network, tasks, batches, config, tmp_path, score=score))
    assert torch.equal(tasks["npr"].module.conv.weight, seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_the_backbones_features_carry_no_gradient():
    network = tiny_network()
    tasks, batches = fitting(network, ("npr",))
    objective = HeadObjective(network, tasks)
    seen = []
    inputs = tasks["npr"].module.inputs
    tasks["npr"].module.inputs = lambda features, time=None: (seen.append(features), inputs(features, time))[1]
    objective(batches(1)).sum().backward()
    assert not seen[0].requires_grad
    assert seen[0].grad_fn is None


@pytest.mark.parametrize("dropout", [False, True])
def test_the_frozen_backbone_is_in_eval_mode_unless_the_paper_is_followed(dropout):
    network = tiny_network()
    tasks, _ = fitting(network)
    objective = HeadObjective(network, tasks, dropout=dropout).train()
    assert network.backbone.module.training is dropout
    assert tasks["sn"].module.training
    objective.eval()
    assert not network.backbone.module.training


def test_heads_of_another_backbone_do_not_continue_a_run(tmp_path):
    config = TrainingConfig(steps=2, batch_size=16, checkpoint_every=1)
    for attempt in range(2):
        network = tiny_network()
        tasks, batches = fitting(network)
        if attempt:
            with torch.no_grad():
                network.backbone.module.body.bias += 1e-3
            with pytest.raises(TrainingError, match="backbone"):
                list(train_heads(network, tasks, batches, config, tmp_path))
        else:
            list(train_heads(network, tasks, batches, config, tmp_path))


class Mlp(nn.Module):
    """A backbone for points in the plane."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x, time):
        t = time[:, None] / 999
        return self.out(self.body(self.first(torch.cat([x, t, torch.log(t + 1e-3) / 3], 1))))


class Points:
    """Draws of a mixture as a source of data."""

    def __init__(self, data: oracle.GaussianMixture, count: int):
        self.points = data.sample(count, seed=5).float()

    def __len__(self) -> int:
        return len(self.points)

    def x_0(self, index):
        return self.points[index]


def r_squared(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    return 1 - float((estimate - truth).square().sum() / (truth - truth.mean()).square().sum())


@pytest.mark.long
def test_stage_2_approaches_the_oracle_on_an_mlp_backbone(tmp_path):
    """R^2 >= 0.95 pooled over t and x_t, for both heads, against the moments in closed form; seeds are fixed."""
    torch.manual_seed(0)
    schedule = Schedule.vp_sde()
    mixture = oracle.GaussianMixture([0.5, 0.3, 0.2], [[-1.0, 0.0], [1.0, 0.5], [0.3, -1.0]], [0.02, 0.1, 0.05])
    source = Points(mixture, 20_000)
    network = HeadedNetwork(Backbone(Mlp(), tap="out"), schedule)
    batches = Batches(source, schedule, 512)
    first = TrainingConfig(steps=800, batch_size=512, learning_rate=3e-3, warmup=50, ema=0.99, checkpoint_every=10_000)
    list(Training(NoiseObjective(network), batches, first, tmp_path / "1").run())
    tasks = new_heads(network, source.x_0(torch.arange(1)), ["sn", "npr"])
    second = TrainingConfig(
        steps=1500, batch_size=512, learning_rate=3e-3, warmup=50, ema=0.99, checkpoint_every=10_000
    )
    list(train_heads(network, tasks, batches, second, tmp_path / "2"))

    fitted = HeadedNetwork(network.backbone, schedule, {name: task.module for name, task in tasks.items()}).eval()
    test = Batches(Points(mixture, 4096), schedule, 4096, seed=9)(1)
    x_t = ForwardProcess(schedule).diffuse(test.x_0, test.times, test.noise)
    with torch.no_grad():
        prediction = fitted(x_t, test.times)
    moments = mixture.noise_moments(x_t, schedule, test.times)
    variance = moments.covariance.diagonal(dim1=-2, dim2=-1)
    residual = variance + (moments.mean - prediction.noise.double()).square()
    assert r_squared(prediction.head("sn").double(), variance + moments.mean.square()) >= 0.95
    in_noise_units = prediction.head_in_clean_units("npr").double() / prediction.factor("noise")[:, None]
    assert r_squared(in_noise_units, residual) >= 0.95


# numbers per time


def test_numbers_per_time_are_those_of_the_definition_and_resume(tmp_path):
    network = tiny_network().eval()
    grid = time_grid(network.schedule, 5)
    stopped = measure(network, images(), grid, images=32, batch_size=8, directory=tmp_path)
    first = [next(stopped) for _ in range(2)]
    stopped.close()
    records = list(measure(network, images(), grid, images=32, batch_size=16, directory=tmp_path))
    assert records[:2] == first
    assert len((tmp_path / "numbers.jsonl").read_text().splitlines()) == 6
    alone = list(measure(network, images(), grid, images=32, batch_size=32))
    numbers, again = numbers_per_time(records), numbers_per_time(alone)
    for name in ("mean_square_noise", "mean_square_residual", "mean_square_noise_error"):
        assert torch.allclose(numbers.tensors()[name], again.tensors()[name], rtol=1e-5)
    assert 0 < float(numbers.mean_square_noise_error[2]) < 0.1
    assert interpolation_error(numbers, network.schedule, "mean_square_residual") < 0.5


def test_numbers_of_another_measurement_are_not_mixed_in(tmp_path):
    network = tiny_network()
    grid = time_grid(network.schedule, 3)
    list(measure(network, images(), grid, images=8, directory=tmp_path))
    with pytest.raises(TrainingError, match="belongs to another run"):
        list(measure(network, images(), grid, images=16, directory=tmp_path))


def test_the_standard_error_is_that_of_independent_images():
    """Against the spread of 40 repetitions with other noise, which is itself known to about 11 %."""
    schedule = Schedule.vp_sde()
    network = tiny_network(schedule)
    record = next(measure(network, images(40), torch.tensor([0.5]), images=40))
    parts = [next(measure(network, images(40), torch.tensor([0.5]), images=40, seed=seed)) for seed in range(1, 41)]
    spread = float(np.std([part.mean_square_residual for part in parts], ddof=1))
    assert record.mean_square_residual_error == pytest.approx(spread, rel=0.5)


@pytest.mark.parametrize("schedule", [Schedule.linear(), Schedule.cosine(50), Schedule.vp_sde()], ids=repr)
def test_a_time_grid_ascends_and_has_both_ends(schedule):
    grid = time_grid(schedule, 20).double()
    assert bool((grid.diff() > 0).all())
    assert float(grid[-1]) == schedule.final_time
    assert float(grid[0]) == (1 if schedule.steps else 1e-5)
    if schedule.steps:
        assert time_grid(schedule).tolist() == list(range(1, schedule.steps + 1))


def test_interpolation_error_falls_with_the_square_of_the_spacing():
    network = tiny_network().eval()
    errors = []
    for count in (9, 33):
        numbers = numbers_per_time(measure(network, images(), time_grid(network.schedule, count), images=8))
        errors.append(interpolation_error(numbers, network.schedule, "mean_square_residual"))
    assert errors[1] < errors[0] / 4


def test_a_timed_head_says_the_same_inside_a_diffusers_model():
    from optcov.integrations.diffusers import UNetWithHead
    from optcov.networks.unet import build_unet

    schedule = Schedule.linear()
    unet = build_unet((1, 8, 8), channels=(8, 16), groups=4, head_dim=8).eval()
    network = HeadedNetwork(Backbone.of(unet), schedule)
    tasks, batches = fitting(network, ("sn",), kind="timed")
    heads = fit_closed_form(network, tasks, batches, images=32).heads
    fitted = HeadedNetwork(network.backbone, schedule, heads)
    n = torch.arange(1, 1001)
    wrapped = UNetWithHead.wrap(unet, heads["sn"], fitted.arguments(n).tolist(), schedule.log_snr(n).tolist())
    x_t = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prediction, inside = fitted(x_t, 300), wrapped(x_t, 299).sample
    assert torch.equal(inside[:, :1], prediction.noise)
    assert torch.allclose(inside[:, 1:], prediction.head("sn"), rtol=1e-5)
