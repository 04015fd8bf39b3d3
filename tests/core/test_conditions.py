"""A condition is an argument that every layer passes to the network, entry i with image i: exact on a mixture."""

from __future__ import annotations

import math

import pytest
import torch

from class_mixture import MIXTURE, SIMPLE, Labelled, exact_network
from optcov import (
    METHODS,
    ForwardProcess,
    ReverseProcess,
    Schedule,
    Trajectory,
    cost_table,
    elbo,
    generate,
    oracle,
    sample,
)
from optcov.bundle import Bundle, Sampler
from optcov.data import ImageSet
from optcov.fitting import (
    Batches,
    Conditioned,
    TrainingConfig,
    TrainingError,
    calibrate,
    fit_closed_form,
    measure,
    new_heads,
    train_heads,
)
from optcov.fitting.batches import Labels
from optcov.fitting.score import SampleScore, ScoreSettings
from optcov.likelihood import ode_likelihood
from optcov.methods import draw
from optcov.networks import Backbone, HeadedNetwork
from optcov.networks.unet import build_unet
from optcov.solvers import euler_maruyama, gotta_go_fast, peer, probability_flow

LINEAR, VP = Schedule.linear(), Schedule.vp_sde()
LABELS = torch.tensor([0, 1, 1, 0, 2, 1, 0, 2])  # 2 is the empty class
TOLD = {"class_labels": LABELS}


def points(count=8, seed=0, dtype=torch.float64):
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def process(data, schedule=LINEAR, covariance="npr", eta=1.0):
    return ReverseProcess(data.network(schedule), ForwardProcess(schedule, eta), covariance, None)


def of_each_class(run):
    """What `run` gives for each class's own data, each image's row taken from the run of its class."""
    parts = [run(MIXTURE.of_class(label)) for label in range(3)]
    return torch.stack([parts[label][row] for row, label in enumerate(LABELS.tolist())])


# the oracle


@pytest.mark.parametrize("t", [1, 300, 1000])
def test_moments_given_the_class_are_those_of_its_components(t):
    x_t = points()
    for name in ("noise_moments", "clean_moments"):
        ours = getattr(MIXTURE, name)(x_t, LINEAR, t, LABELS)
        for field in ("mean", "covariance"):
            expected = of_each_class(lambda data, n=name, f=field: getattr(getattr(data, n)(x_t, LINEAR, t), f))
            torch.testing.assert_close(getattr(ours, field), expected, rtol=1e-12, atol=1e-12)
    density = of_each_class(lambda data: data.log_density(x_t, LINEAR, t))
    torch.testing.assert_close(MIXTURE.log_density(x_t, LINEAR, t, LABELS), density, rtol=1e-12, atol=1e-12)
    empty = MIXTURE.log_density(x_t, LINEAR, t, torch.full((8,), 2))
    torch.testing.assert_close(empty, MIXTURE.log_density(x_t, LINEAR, t), rtol=1e-12, atol=1e-12)


def test_class_probabilities_are_bayes_rule():
    x_t = points()
    joint = torch.stack(
        [
            math.log(share) + MIXTURE.log_density(x_t, VP, 0.3, torch.full((8,), label))
            for label, share in enumerate((0.4, 0.6))
        ],
        1,
    )
    found = MIXTURE.class_log_probabilities(x_t, VP, 0.3)
    torch.testing.assert_close(found, joint.log_softmax(1), rtol=1e-9, atol=1e-9)


def test_labelled_samples_are_the_samples_with_their_classes():
    x_0, labels = MIXTURE.sample_labelled(4000, seed=2)
    assert torch.equal(x_0, MIXTURE.sample(4000, seed=2))
    assert abs(float((labels == 0).double().mean()) - 0.4) < 4.5 * math.sqrt(0.24 / 4000)
    spread = (MIXTURE.covariances[0].diagonal() / 1600).sqrt()
    assert bool(((x_0[labels == 0].mean(0) - MIXTURE.means[0]).abs() < 5 * spread).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MIXTURE.network(LINEAR)(points(), 5), "needs the condition class_labels"),
        (lambda: MIXTURE.network(LINEAR)(points(), 5, class_labels=LABELS[:3]), r"shape \(3,\), but there are 8"),
        (lambda: MIXTURE.network(LINEAR)(points(), 5, class_labels=LABELS + 1), "class 3 is none of 0..1"),
        (lambda: MIXTURE.of_class(0).network(LINEAR)(points(), 5, class_labels=LABELS), "has no classes"),
        (lambda: MIXTURE.of_class(0).sample_labelled(3), "has no classes"),
        (lambda: oracle.GaussianMixture([1.0], [[0.0]], [1.0], labels=[1]), "from 0 without a gap"),
        (lambda: oracle.GaussianMixture([1.0], [[0.0]], [1.0], labels=[0.5]), "whole numbers"),
    ],
)
def test_labels_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# steps, samples, bounds


@pytest.mark.parametrize("covariance", ["npr", "sn", "npr_full", "range"])
@pytest.mark.parametrize(("t", "s"), [(700, 300), (40, 0), (torch.arange(100, 900, 100), torch.arange(8) * 10)])
def test_a_step_takes_the_class_of_each_point(covariance, t, s):
    x_t = points()
    step = process(MIXTURE, covariance=covariance).step(x_t, t, s, **TOLD)
    for name in ("mean", "variance"):
        expected = of_each_class(lambda data, n=name: getattr(process(data, covariance=covariance).step(x_t, t, s), n))
        torch.testing.assert_close(getattr(step, name), expected, rtol=1e-10, atol=1e-12)


def test_the_posterior_is_exact_given_the_class():
    x_t = points()
    found = process(MIXTURE, covariance="npr_full").posterior(x_t, 400, **TOLD)
    exact = MIXTURE.clean_moments(x_t, LINEAR, 400, LABELS)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.covariance.matrix, exact.covariance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("eta", [1.0, 0.0])
def test_each_image_is_drawn_from_its_own_class(eta):
    trajectory = Trajectory.even(LINEAR, 7)
    found = sample(process(MIXTURE, eta=eta), trajectory, (8, 2), seed=4, condition=TOLD, dtype=torch.float64)
    expected = of_each_class(
        lambda data: sample(process(data, eta=eta), trajectory, (8, 2), seed=4, dtype=torch.float64)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    batches = generate(process(MIXTURE, eta=eta), trajectory, (2,), 8, 3, seed=4, condition=TOLD, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([batch.images for batch in batches]), found, rtol=1e-9, atol=1e-10)


def test_samples_of_each_class_have_its_moments():
    """20 steps are exact for the Gaussian of class 0 with the full covariance: mean and covariance at 4.5 errors."""
    labels = torch.arange(6000) % 3
    found = sample(
        process(MIXTURE, covariance="npr_full"),
        Trajectory.even(LINEAR, 20),
        (6000, 2),
        condition={"class_labels": labels},
        last_step="draw",
        dtype=torch.float64,
    )
    own, exact = found[labels == 0], MIXTURE.covariances[0]
    assert bool(((own.mean(0) - MIXTURE.means[0]).abs() < 4.5 * (exact.diagonal() / 2000).sqrt() + 1e-3).all())
    error = ((exact.diagonal()[:, None] * exact.diagonal() + exact.square()) / 2000).sqrt()
    assert bool(((own.T.cov() - exact).abs() < 4.5 * error).all())
    whole = MIXTURE.weights @ MIXTURE.means  # few steps leave some bias for classes of several components
    assert bool(((found[labels == 2].mean(0) - whole).abs() < 0.1).all())


def test_the_bound_takes_the_class_of_each_image():
    x_0, labels = MIXTURE.sample_labelled(64, seed=5)
    trajectory = Trajectory.even(LINEAR, 10)
    scores = {}
    for name, told in {"right": labels, "empty": torch.full((64,), 2), "wrong": 1 - labels}.items():
        scores[name] = elbo(process(MIXTURE), x_0, trajectory, condition={"class_labels": told}).total
    assert float(scores["right"].mean()) < float(scores["empty"].mean()) < float(scores["wrong"].mean())
    own = elbo(process(MIXTURE.of_class(0)), x_0, trajectory).total
    torch.testing.assert_close(scores["right"][labels == 0], own[labels == 0], rtol=1e-9, atol=1e-9)
    lower = -MIXTURE.log_density(x_0, LINEAR, 0, labels)
    assert float((scores["right"] - lower).mean()) > 0


def test_a_table_of_costs_is_the_bound_given_the_classes(tmp_path):
    x_0, labels = MIXTURE.sample_labelled(32, seed=6)
    told = {"class_labels": labels}
    times = range(50, 1001, 50)
    trajectory = Trajectory([50, 200, 500, 1000])
    options = {"times": times, "batch_size": 5, "state": tmp_path / "sweep.safetensors"}
    table = cost_table(process(MIXTURE), x_0, ["npr"], condition=told, **options)
    terms = elbo(process(MIXTURE), x_0, trajectory, condition=told)
    assert table.score("npr", trajectory).mean == pytest.approx(float(terms.bits_per_dim().mean()), rel=1e-6)
    with pytest.raises(ValueError, match="the condition changed"):
        cost_table(process(MIXTURE), x_0, ["npr"], condition={"class_labels": 1 - labels}, **options)
    source = Conditioned(Labelled(MIXTURE, 32, seed=6), told)
    offered = cost_table(process(MIXTURE), source, ["npr"], times=times)
    assert offered.score("npr", trajectory).mean == pytest.approx(table.score("npr", trajectory).mean, rel=1e-5)


def test_the_ode_likelihood_is_the_density_of_the_class():
    """Diagonal Jacobians make Hutchinson exact: within 3e-3 nats per dimension on average, over 64 points."""
    x_0, labels = SIMPLE.sample_labelled(64, seed=7)
    network = SIMPLE.network(VP)
    found = ode_likelihood(network, VP, x_0, None, condition={"class_labels": labels}).log_density
    gap = (found - SIMPLE.log_density(x_0, VP, 0, labels)) / 2
    assert abs(float(gap.mean())) < 3e-3
    assert float(gap.abs().max()) < 3e-2


# solvers

SOLVERS = {
    "euler_maruyama": lambda network, **o: euler_maruyama(network, VP, points(), 12, seed=3, **o),
    "probability_flow": lambda network, **o: probability_flow(network, VP, points(), 12, **o),
    "gotta_go_fast": lambda network, **o: gotta_go_fast(network, VP, points(), 0.05, seed=3, **o),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_tells_the_network_the_class_of_each_image(name):
    """Gotta Go Fast also when images are done at different times, so that its batch shrinks."""
    found = SOLVERS[name](MIXTURE.network(VP), condition=TOLD)
    expected = of_each_class(lambda data: SOLVERS[name](data.network(VP)).x_0)
    torch.testing.assert_close(found.x_0, expected, rtol=1e-8, atol=1e-9)
    if name == "gotta_go_fast":
        assert len(set(found.evaluations.tolist())) > 1


@pytest.mark.parametrize("name", ["DPM-Solver++", "DDPM (diffusers)"])
def test_a_peer_tells_the_network_the_class_of_each_image(name):
    start = points(dtype=torch.float32)
    found = peer(name, MIXTURE.network(LINEAR), LINEAR, start, 10, condition=TOLD).x_0
    expected = of_each_class(lambda data: peer(name, data.network(LINEAR), LINEAR, start, 10).x_0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["NPR-DDIM", "Improved DDPM", "SN-DPM", "Euler-Maruyama", "Gotta Go Fast"])
def test_every_method_is_drawn_with_a_condition(name):
    schedule = VP if METHODS[name].continuous else LINEAR

    def drawn(data, condition=None):
        options = {"data_range": None, "relative_tolerance": 0.5, "condition": condition}
        return draw(METHODS[name], data.network(schedule), schedule, 5, (2,), range(8), **options).x_0

    found, expected = drawn(MIXTURE, TOLD), of_each_class(drawn)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# fitting


def test_numbers_per_time_are_measured_given_the_classes(tmp_path):
    """Given the class Gamma_t = 1 - g_t with g_t = ab S / (ab S + bb): at 5 standard errors, of each class alone."""
    network = exact_network(SIMPLE, LINEAR)
    source = Labelled(SIMPLE, 4096)
    times = [10, 300, 900]
    for label, variance in ((0, 0.02), (1, 0.6)):
        own = Labelled(SIMPLE, 4096)
        own.points, own.labels = own.points[source.labels == label], own.labels[source.labels == label]
        for record in measure(network, Conditioned.by_labels(own), times, images=1024):
            a, b = LINEAR.alpha_bar(record.time), LINEAR.beta_bar(record.time)
            g = float(a * variance / (a * variance + b))
            assert abs(record.mean_square_residual - g) < 5 * record.mean_square_residual_error + 1e-6
            assert abs(record.mean_square_noise - (1 - g)) < 5 * record.mean_square_noise_error + 1e-6
    list(measure(network, Conditioned.by_labels(source), times, images=64, directory=tmp_path))
    calls = network.backbone.module.calls
    list(measure(network, Conditioned.by_labels(source), times, images=64, directory=tmp_path))
    assert network.backbone.module.calls == calls
    other = Conditioned(source, {"class_labels": 1 - source.labels})
    with pytest.raises(TrainingError, match="the condition changed"):
        list(measure(network, other, times, images=64, directory=tmp_path))


def test_a_head_is_fitted_and_calibrated_given_the_classes():
    """g = ab S / (ab S + bb) of each class within a tenth, and calibrated within 5 errors in every part."""
    network = exact_network(SIMPLE, LINEAR)
    source = Conditioned.by_labels(Labelled(SIMPLE, 8192))
    first = torch.arange(1)
    tasks = new_heads(network, source.x_0(first), ["npr"], condition=source.condition(first))
    fitted = fit_closed_form(network, tasks, Batches(source, LINEAR, 512), images=16_384)
    network = HeadedNetwork(network.backbone, LINEAR, fitted.heads, network.time_argument).eval()
    times = torch.arange(50, 951, 100)
    for label, variance in ((0, 0.02), (1, 0.6)):
        told = torch.full((len(times),), label)
        with torch.no_grad():
            found = network(torch.zeros(len(times), 2), times, class_labels=told).heads["npr"].mean(1).double()
        a, b = LINEAR.alpha_bar(times), LINEAR.beta_bar(times)
        expected = a * variance / (a * variance + b)
        assert float((found / expected).log().abs().max()) < 0.12, label
    held_out = Conditioned.by_labels(Labelled(SIMPLE, 4096, seed=8))
    calibration = calibrate(network, held_out, ["npr"], samples=4096, parts=4)["npr"]
    assert bool(((calibration.ratio - 1).abs() < 5 * calibration.error + 0.03).all())
    wrong = Conditioned(held_out.source, {"class_labels": 1 - held_out.labels})
    assert float((calibrate(network, wrong, ["npr"], samples=4096, parts=4)["npr"].ratio - 1).abs().max()) > 0.3


@pytest.mark.parametrize("schedule", [Schedule.flow(), Schedule.edm(), LINEAR], ids=repr)
def test_a_conditional_network_serves_other_schedules_by_its_noise_levels(schedule):
    network, x_t = exact_network(SIMPLE, VP).with_schedule(schedule), points()
    for t in schedule.grid([100, 400, 600]):
        with torch.no_grad():
            found = network((schedule.unit_data_std(t) * x_t).float(), t, **TOLD).noise.double()
        expected = SIMPLE.noise_moments(schedule.unit_data_std(t) * x_t, schedule, t, LABELS).mean
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_training_of_heads_notices_another_condition(tmp_path):
    network = exact_network(SIMPLE, LINEAR)
    source = Labelled(SIMPLE, 64)
    config = TrainingConfig(steps=1, batch_size=8)
    first = torch.arange(1)

    def train(labels):
        told = Conditioned(source, {"class_labels": labels})
        tasks = new_heads(network, source.x_0(first), ["npr"], condition=told.condition(first))
        return list(train_heads(network, tasks, Batches(told, LINEAR, 8), config, tmp_path))

    assert len(train(source.labels)) == 1
    with pytest.raises(TrainingError, match="the condition changed"):
        train(1 - source.labels)


def test_a_share_of_an_offered_condition_is_left_out():
    source = Conditioned(Labelled(SIMPLE, 400), {"class_labels": torch.zeros(400, dtype=torch.long)})
    told = Batches(source, LINEAR, 400, labels=Labels(2, 0.25))(1).condition["class_labels"]
    assert set(told.tolist()) == {0, 2}
    assert 60 < int((told == 2).sum()) < 140


# bundles


def conditional_bundle():
    unet = build_unet((1, 8, 8), (8, 8), 1, 0, 4, 8, classes=3)
    return Bundle(HeadedNetwork(Backbone.of(unet), LINEAR).eval(), (1, 8, 8))


def test_an_image_of_a_bundle_belongs_to_its_number_and_condition():
    bundle, told = conditional_bundle(), torch.tensor([0, 1, 2, 3])
    sampler = Sampler(bundle, "DDIM", 3, condition={"class_labels": told})
    whole = sampler.draw(range(4)).x_0
    torch.testing.assert_close(sampler.draw([2, 0]).x_0, whole[[2, 0]], rtol=0, atol=1e-3)
    other = Sampler(bundle, "DDIM", 3, condition={"class_labels": told.flip(0)})
    assert float((other.draw(range(4)).x_0 - whole).abs().amax((1, 2, 3)).min()) > 1e-2
    assert sampler.settings()["condition"] != other.settings()["condition"]
    assert Sampler(bundle.with_empty_class(3), "DDIM", 3).settings()["condition"] is None
    with pytest.raises(ValueError, match="condition 'class_labels' has 4 entries, but image number 5 is asked for"):
        sampler.draw([5])


def test_samples_of_a_score_are_told_what_images_are_told():
    unet = build_unet((1, 28, 28), (8, 8), 1, 0, 4, 8, classes=3)
    network = HeadedNetwork(Backbone.of(unet), VP)
    pixels = torch.randint(0, 256, (20, 1, 28, 28), generator=torch.Generator().manual_seed(1)).byte()
    images = ImageSet(pixels, torch.arange(20) % 3)
    told = []
    unet.register_forward_pre_hook(lambda module, args, named: told.append(named["class_labels"]), with_kwargs=True)
    score = SampleScore(network, images, ScoreSettings(samples=20, steps=2), Conditioned.by_labels(images))
    assert score() == score() > 0
    assert torch.cat(told).bincount().tolist() == (4 * images.labels.bincount()).tolist()  # two steps, twice


# what does not fit


def refuses(x_t, t, **condition):
    raise AssertionError("the network was asked before the condition was refused")


def refusing(schedule=LINEAR):
    return ReverseProcess(refuses, ForwardProcess(schedule), "beta_tilde", None)


@pytest.mark.parametrize(
    "call",
    [
        lambda told: refusing().step(points(), 5, 3, **told),
        lambda told: refusing().posterior(points(), 5, **told),
        lambda told: refusing().predict(points(), 5, **told),
        lambda told: sample(refusing(), Trajectory.even(LINEAR, 3), (8, 2), condition=told),
        lambda told: list(generate(refusing(), Trajectory.even(LINEAR, 3), (2,), 8, condition=told)),
        lambda told: elbo(refusing(), points(), Trajectory.even(LINEAR, 3), condition=told),
        lambda told: cost_table(refusing(), points(), ["beta_tilde"], condition=told),
        lambda told: ode_likelihood(refuses, VP, points(), None, condition=told),
        lambda told: euler_maruyama(refuses, VP, points(), 5, condition=told),
        lambda told: probability_flow(refuses, VP, points(), 5, condition=told),
        lambda told: gotta_go_fast(refuses, VP, points(), condition=told),
        lambda told: peer("UniPC", refuses, LINEAR, points(), 5, condition=told),
        lambda told: draw(METHODS["DDIM"], refuses, LINEAR, 5, (2,), range(8), condition=told),
        lambda told: Conditioned(Labelled(SIMPLE, 8), told),
        lambda told: new_heads(exact_network(SIMPLE, LINEAR), points(8), ["npr"], condition=told),
    ],
)
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"class_labels": LABELS[:3]}, r"condition 'class_labels' is shape \(3,\).*each of 8 images"),
        ({"class_labels": [0] * 8}, "condition 'class_labels' is a list; it must be a tensor"),
        ({"text": torch.tensor(1)}, r"condition 'text' is shape \(\)"),
    ],
)
def test_a_condition_that_does_not_fit_is_refused_by_name_before_any_work(call, told, message):
    with pytest.raises(ValueError, match=message):
        call(told)


@pytest.mark.parametrize("told", [{"class_labels": [0, 1]}, {"a": torch.zeros(3), "b": torch.zeros(4)}])
def test_a_sampler_refuses_a_condition_that_does_not_fit_at_once(told):
    with pytest.raises(ValueError, match="condition '"):
        Sampler(conditional_bundle(), "DDIM", 3, condition=told)


class Lying(Labelled):
    def condition(self, index):
        return {"class_labels": self.labels[:3]}


def test_a_source_whose_condition_does_not_fit_is_refused_before_the_network_runs():
    network = exact_network(SIMPLE, LINEAR)
    source = Lying(SIMPLE, 16)
    for work in (
        lambda: list(measure(network, source, [10, 900], images=8)),
        lambda: Batches(source, LINEAR, 8)(1),
        lambda: cost_table(ReverseProcess(refuses, ForwardProcess(LINEAR), "npr", None), source, ["npr"]),
    ):
        with pytest.raises(ValueError, match="condition 'class_labels' is shape"):
            work()
    assert network.backbone.module.calls == 0
