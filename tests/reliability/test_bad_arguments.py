"""Arguments of a wrong type, shape or value are refused by a ValueError that names them, before any work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler

import optcov
from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, elbo, sample
from optcov.data import load
from optcov.fitting.conditions import open_parts
from optcov.networks import Backbone, HeadedNetwork
from small_bundles import small_bundle, small_unet

NAN = float("nan")
LINEAR, FLOW, EDM = Schedule.linear(), Schedule.flow(), Schedule.edm()
FORWARD = ForwardProcess(LINEAR)
X = torch.zeros(2, 1, 8, 8)
THREE = Trajectory.even(LINEAR, 3)


def zero_noise(x_t, t, **condition):
    return NoisePrediction(torch.zeros_like(x_t), {"npr": torch.full_like(x_t, 0.1)})


PROCESS = ReverseProcess(zero_noise, FORWARD)


def process(**options):
    return ReverseProcess(zero_noise, FORWARD, **options)


CORE = {
    "edm of a word": (lambda: Schedule.edm("a"), "sigma_min = 'a' is not a number"),
    "edm of nothing": (lambda: Schedule.edm(sigma_max=None), "sigma_max = None is not a number"),
    "edm of NaN": (lambda: Schedule.edm(sigma_max=NAN), "sigma_max=nan"),
    "vp of a word": (lambda: Schedule.vp_sde("a"), "beta_min = 'a' is not a number"),
    "cosine of a word": (lambda: Schedule.cosine(10, "x"), "max_beta = 'x' is not a number"),
    "betas of a word": (lambda: Schedule.from_betas("abc"), "betas = 'abc' is not a sequence of numbers"),
    "betas of nothing": (lambda: Schedule.from_betas(None), "betas = None is not a sequence of numbers"),
    "a word as a time": (lambda: FLOW.alpha_bar("0.5"), "time '0.5' is not a number"),
    "nothing as a time": (lambda: LINEAR.log_snr(None), "time None is not a number"),
    "a complex time": (lambda: EDM.beta_bar(torch.tensor(1 + 2j)), "is not a number or a .* tensor of numbers"),
    "NaN as a time": (lambda: FLOW.alpha_bar(torch.tensor([NAN])), "time nan is outside this schedule"),
    "times beyond the flow": (lambda: FLOW.beta_bar(1.5), "time 1.5 is outside this schedule"),
    "eta of a word": (lambda: ForwardProcess(LINEAR, "1"), "eta = 1 is outside"),
    "lists to diffuse": (lambda: FORWARD.diffuse([1.0], 5, [1.0]), "x_0 is a list, not a torch tensor"),
    "a step to nowhere": (lambda: FORWARD.bridge(5, None), "time None is not a number"),
    "noise in a list": (lambda: NoisePrediction([1.0]), "the noise is a list, not a torch tensor"),
    "a head in a list": (lambda: NoisePrediction(X, {"npr": [1]}), "npr is a list, not a torch tensor"),
    "heads without names": (lambda: NoisePrediction(X, [X]), "heads is a list; pass a dictionary"),
    "a schedule as a process": (lambda: ReverseProcess(zero_noise, LINEAR), "is not a ForwardProcess; pass Forward"),
    "a number as a range": (lambda: process(data_range=1), "data_range = 1 is not"),
    "words as a range": (lambda: process(data_range="ab"), "data_range = ab is not"),
    "an infinite range": (lambda: process(data_range=(-1, float("inf"))), "data_range = .* is not"),
    "a word as a switch": (lambda: process(clip_mean="no"), "clip_mean = 'no' is not a switch"),
    "two times for three": (
        lambda: PROCESS.step(torch.zeros(3, 2), torch.tensor([1, 2]), 0),
        "there are 2 times for 3 data points; pass one time",
    ),
    "three ends for two": (lambda: PROCESS.step(X, 5, torch.tensor([0, 1, 2])), "there are 3 times for 2 data points"),
    "two times to predict": (
        lambda: PROCESS.predict(X[:1], torch.tensor([1, 2])),
        "there are 2 times for 1 data points",
    ),
    "another switch": (lambda: process(use_clipped_model_output="no"), "use_clipped_model_output = 'no' is not"),
    "a word as numbers": (
        lambda: process(covariance="analytic", mean_square_noise="x"),
        "mean_square_noise = 'x' is neither a tensor",
    ),
    "words per time": (
        lambda: process(covariance="analytic", mean_square_noise=lambda t: "x").step(X, 5, 1),
        "number per time at t = 5 is no number",
    ),
    "a condition without entries": (lambda: PROCESS.step(X, 5, 1, y=torch.tensor(3)), "one entry for each of 2 images"),
    "a trajectory of a word": (lambda: Trajectory.even("linear", 5), "schedule = 'linear' is not a Schedule"),
    "karras of nothing": (lambda: Trajectory.karras(None, 5), "schedule = None is not a Schedule"),
    "rho of a word": (lambda: Trajectory.karras(EDM, 5, rho="7"), "rho = '7' is not a number"),
    "a tiny rho": (lambda: Trajectory.karras(EDM, 5, rho=1e-3), "rho = 0.001 is not a number of at least 0.1"),
    "one time": (lambda: Trajectory(5), "times = 5 is not a sequence of times"),
    "a tensor of one time": (lambda: Trajectory(torch.tensor(1.0)), "is not a sequence of times"),
    "a time of nothing": (lambda: Trajectory([1, None]), "time None is not a number"),
    "half a length": (lambda: Trajectory.optimal(np.ones((4, 4)), 1.5), "K = 1.5 is outside 1..3"),
    "costs of words": (lambda: Trajectory.optimal("x", 1), "costs must be an .* array of numbers, got 'x'"),
    "a list as a trajectory": (lambda: sample(PROCESS, [1, 1000], (2, 1)), "is not a Trajectory; pass Trajectory"),
    "nothing as a process": (lambda: sample(None, THREE, (2, 1)), "process is a NoneType; pass ReverseProcess"),
    "a number as a shape": (lambda: sample(PROCESS, THREE, 5), "shape = 5 is not"),
    "half a pixel": (lambda: sample(PROCESS, THREE, (2, 1.5)), "shape = .* is not .* in whole numbers"),
    "a word as a seed": (lambda: sample(PROCESS, THREE, (2, 1), seed="a"), "seed = 'a' is not a whole number"),
    "an array to start from": (lambda: sample(PROCESS, THREE, start=np.zeros((2, 1))), "start is a ndarray"),
    "bytes to start from": (lambda: sample(PROCESS, THREE, start=X.long()), "start has torch.int64"),
    "noise that is no function": (lambda: sample(PROCESS, THREE, (2, 1), noise=5), "noise is a int; pass a function"),
    "noise of nothing": (lambda: sample(PROCESS, THREE, (2, 1), noise=lambda t, s: None), "noise is a NoneType"),
    "a cap of a word": (lambda: sample(PROCESS, THREE, (2, 1), noise_cap="a"), "noise_cap = 'a' must be"),
    "a device that is none": (lambda: sample(PROCESS, THREE, (2, 1), device="gpu"), "device = 'gpu' cannot be used"),
    "a type by its name": (lambda: sample(PROCESS, THREE, (2, 1), dtype="float32"), "dtype = float32"),
    "a condition of a number": (
        lambda: sample(PROCESS, THREE, (2, 1), condition=5),
        "condition = 5 is not a dictionary",
    ),
    "a condition without a name": (lambda: sample(PROCESS, THREE, (2, 1), condition={1: X}), "is not a dictionary"),
    "indices of a number": (lambda: sample(PROCESS, THREE, (2, 1), indices=5), "indices = 5 is not a sequence"),
    "half an index": (lambda: sample(PROCESS, THREE, (2, 1), indices=[0.5, 1]), "is not a sequence of whole numbers"),
    "an array to score": (lambda: elbo(PROCESS, X.numpy(), THREE), "x_0 is a ndarray, not a torch tensor"),
    "a bound along a list": (lambda: elbo(PROCESS, X, [1, 1000]), "pass a ReverseProcess and a Trajectory"),
    "a bound with no function": (lambda: elbo(PROCESS, X, THREE, noise=5), "noise is a int; pass a function"),
    "a mixture of words": (lambda: optcov.oracle.GaussianMixture("a", [[0.0]], [1.0]), "weights = 'a' are not numbers"),
}


@pytest.mark.parametrize("case", CORE)
def test_the_core_names_what_does_not_fit(case):
    call, message = CORE[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="device = 'cuda' cannot be used here"):
        sample(PROCESS, THREE, (2, 1), device="cuda")


@pytest.fixture(scope="module")
def bundle():
    return small_bundle(LINEAR)


QUICK = {"steps": 2, "progress": False}
BUNDLE = {
    "a method by its number": (lambda b: b.sample(1, method=3, **QUICK), "method = 3 is not a name of METHODS"),
    "an empty method": (lambda b: b.sample(1, method="", **QUICK), "unknown method ''"),
    "half a seed": (lambda b: b.sample(1, seed=1.5, **QUICK), "seed = 1.5 is not a whole number"),
    "an unknown option": (lambda b: b.sample(1, foo=3, **QUICK), "sample has no option 'foo'; it has seed"),
    "a list of times": (
        lambda b: b.sample(1, method="DDIM", trajectory=[1, 5], **QUICK),
        "neither a name such as even nor a Trajectory",
    ),
    "a tolerance of a word": (lambda b: b.sample(1, method="DDIM", tolerance="x", **QUICK), "tolerance = 'x' is not"),
    "a condition it cannot take": (
        lambda b: b.sample(2, condition={"prompt": torch.zeros(2)}, **QUICK),
        "UNet2DModel takes no condition 'prompt'; it takes class_labels",
    ),
    "classes it does not know": (
        lambda b: b.sample(2, condition={"class_labels": torch.zeros(2)}, **QUICK),
        "knows no classes; leave the labels out",
    ),
    "steps of a word": (lambda b: b.bits_per_dim(X, steps="2"), "steps = '2' must be numbers of steps"),
    "steps of nothing": (lambda b: b.bits_per_dim(X, steps=[2, None]), "must be numbers of steps"),
    "steps of a tensor": (lambda b: b.bits_per_dim(X, steps=torch.tensor(2)), "must be numbers of steps"),
    "no methods": (lambda b: b.bits_per_dim(X, methods=[], **QUICK), "names no method; pass a list"),
    "an unknown setting": (lambda b: b.bits_per_dim(X, foo=1, **QUICK), "bits_per_dim has no option 'foo'; it has"),
    "a batch of a word": (lambda b: b.bits_per_dim(X, batch_size="a", **QUICK), "batch_size = 'a' is not a positive"),
    "labels of words": (lambda b: b.bits_per_dim((X, "ab"), **QUICK), "'ab' is one text; give a list"),
    "data without values": (lambda b: b.bits_per_dim(X.to("meta"), **QUICK), "on the device meta"),
    "scores from nowhere": (lambda b: b.bits_per_dim("nowhere", **QUICK), "no images at nowhere"),
    "a posterior of colours": (
        lambda b: b.posterior(torch.zeros(2, 3, 8, 8), 5),
        r"x_t is \(2, 3, 8, 8\); small takes",
    ),
    "a posterior of one image": (lambda b: b.posterior(X[0], 5), "small takes a tensor of shape"),
    "a posterior of no images": (lambda b: b.posterior(X[:0], 5), "small takes a tensor of shape"),
    "a posterior of an array": (lambda b: b.posterior(X.numpy(), 5), "x_t is a ndarray"),
    "a posterior of a number": (lambda b: b.posterior(torch.tensor(1.0), 5), "small takes a tensor of shape"),
    "three times for two": (lambda b: b.posterior(X, torch.tensor([5, 6, 7])), "3 times for 2 data points"),
    "a covariance by its number": (lambda b: b.posterior(X, 5, 3), "unknown covariance 3"),
    "more images than fit": (lambda b: b.sample(10**30, **QUICK), "the tensor needs .* GB of memory"),
    "scores for a number": (lambda b: b.bits_per_dim(X, work=3, **QUICK), "3 is not a path"),
    "scores for no place": (lambda b: b.bits_per_dim(X, work="", **QUICK), "'' is not a path"),
    "scores of no data": (lambda b: b.bits_per_dim("", **QUICK), "'' is not a path"),
    "a bundle of a long name": (lambda b: optcov.load("a" * 5000), "is too long for the name of a file"),
    "a path of nothing": (lambda b: b.save(None), "None is not a path"),
    "an empty path": (lambda b: b.save(""), "'' is not a path"),
    "a schedule by its number": (lambda b: b.with_schedule(5), "schedule = 5 is not known"),
    "a bundle of nothing": (lambda b: optcov.load(None), "None is not a path"),
    "a name in the place of a bundle": (
        lambda b: optcov.attach(DDPMPipeline(small_unet(), DDPMScheduler()), "fashion"),
        "bundle = 'fashion' is not a Bundle; pass what optcov.load or optcov.fit returns",
    ),
}


@pytest.mark.parametrize("case", BUNDLE)
def test_a_bundle_names_what_does_not_fit(bundle, case):
    call, message = BUNDLE[case]
    with pytest.raises(ValueError, match=message):
        call(bundle)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_bundle_takes_data_of_any_precision(bundle, dtype):
    known, expected = (bundle.posterior(x, 300) for x in (X.to(dtype) + 0.5, X + 0.5))
    torch.testing.assert_close(known.mean.float(), expected.mean, rtol=1e-5, atol=1e-5)
    assert known.mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


IMAGES = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
FIT = {
    "heads of a number": ({"heads": 5}, "heads = 5 is not a list of names"),
    "heads of nothing": ({"heads": None}, "heads = None is not a list of names"),
    "a condition of a number": ({"condition": 5}, "condition = 5 is not a dictionary"),
    "too short a condition": ({"condition": {"class_labels": torch.zeros(3)}}, "one entry for each of 20 images"),
    "classes it does not know": ({"condition": {"class_labels": torch.zeros(20).long()}}, "knows no classes"),
    "a condition twice": (
        {"data": (IMAGES, {"class_labels": torch.zeros(20)}), "condition": {"class_labels": torch.zeros(20)}},
        "leave one of them out",
    ),
    "a condition for a path": ({"data": "images", "condition": {}}, "give data in memory with it, not a path"),
    "pixels as numbers": ({"data": IMAGES * 200}, "outside the data range .* as uint8"),
    "no path": ({"data": ""}, "the path of the data is empty"),
    "no model": ({"model": ""}, "'' is not a path"),
    "a class in the place of a model": ({"model": DDPMPipeline}, "model = the class DDPMPipeline is not a model"),
    "half a seed": ({"seed": 1.5}, "seed = 1.5 is not a whole number"),
    "too long a seed": ({"seed": 2**70}, "is not a whole number of 64 bits"),
    "a word as a switch": ({"flip": "no"}, "flip = 'no' is not a switch"),
    "a rate of a word": ({"learning_rate": "x"}, "learning_rate = 'x' is not a positive number"),
    "a place by its number": ({"work": 5}, "5 is not a path"),
    "a place without a name": ({"work": ""}, "'' is not a path"),  # pathlib takes it for the current directory
}


@pytest.mark.parametrize("case", FIT)
def test_a_fit_names_what_does_not_fit_before_it_begins(case, monkeypatch):
    monkeypatch.setattr("optcov.fitting.fit.fit_closed_form", lambda *_: pytest.fail("the fit began"))
    options, message = FIT[case]
    given = {"model": (small_unet(), LINEAR), "data": IMAGES, "progress": False, **options}
    with pytest.raises(ValueError, match=message):
        optcov.fit(given.pop("model"), given.pop("data"), **given)


@pytest.mark.parametrize("source", ["", "  ", None, 3, "a\0b", "a" * 5000])
def test_data_without_a_path_are_refused(source):
    with pytest.raises(ValueError, match="is not a path|is too long"):
        load(source)


def test_a_network_that_loses_data_points_is_refused_everywhere():
    class FirstAlone(torch.nn.Module):
        def forward(self, x, time):
            return x[:1]

    bundle = optcov.Bundle(HeadedNetwork(Backbone(FirstAlone(), None), LINEAR), (1, 8, 8))
    for method in ("UniPC", "DDIM", "Bridge 2M"):
        with pytest.raises(ValueError, match="returned 1; they must agree"):
            bundle.sample(3, method=method, **QUICK)


@pytest.mark.parametrize("kind", ["float", "uint8"])
def test_each_data_point_keeps_its_own_entry_of_the_condition(kind):
    """Values tell the number of their data point, as the entries do: also behind the split."""
    number = torch.arange(40)
    values = number.view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    data = values.byte() if kind == "uint8" else values / 40
    for given, condition in ((data, {"y": number}), ((data, {"y": number}), None)):
        train, test = open_parts(given, condition, True, (1, 8, 8), (-1, 1), "small")
        assert len(train) == 36
        assert len(test) == 4
        for part in (train, test):
            every = torch.arange(len(part))
            seen = part.x_0(every)[:, 0, 0, 0]
            found = (seen + 1) * 127.5 if kind == "uint8" else seen * 40
            assert found.round().long().tolist() == part.condition(every)["y"].tolist()


def test_a_fit_tells_the_network_its_condition(monkeypatch):
    monkeypatch.setattr(optcov.Bundle, "check_loadable", lambda self: None)
    unet = small_unet(num_class_embeds=3)
    seen = []
    unet.register_forward_pre_hook(lambda module, args, known: seen.append(known["class_labels"]), with_kwargs=True)
    plain = optcov.Bundle(HeadedNetwork(Backbone.of(unet), LINEAR).eval(), (1, 8, 8))
    quick = {"images": 8, "measure_images": 2, "times": 3, "calibration_samples": 64, "batch_size": 4}
    told = {"class_labels": torch.arange(20) % 3}
    fitted = optcov.fit(plain, IMAGES, heads="npr", condition=told, progress=False, **quick)
    assert list(fitted.heads) == ["npr"]
    assert set(torch.cat(seen).tolist()) == {0, 1, 2}
    drawn = fitted.sample(3, method="NPR-DDIM", steps=2, condition={"class_labels": torch.arange(3)}, progress=False)
    assert drawn.shape == (3, 1, 8, 8)
