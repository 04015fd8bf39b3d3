"""The diagonal of a denoiser's Jacobian by probes: E[z * (J^T z)] = diag(J) for z of independent random signs.

J = d x0_hat / d x_t. If x0_hat is the mean of x_0 given x_t, then Cov[x_0 | x_t] = (beta_bar / a) J with
a = sqrt(alpha_bar): Tweedie's formula, of second order. One backward pass gives J^T z, for every network that can be
trained. The error of a probe is sum_j J_ij z_i z_j over the other pixels j; that of m probes is smaller by sqrt(m).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess
from optcov.gaussian import per_sample
from optcov.noise import image_generator, image_numbers
from optcov.prediction import Network, Prediction
from optcov.schedule import Time


def probed_diagonal(clean: Tensor, x_t: Tensor, probes: Iterable[Tensor]) -> Tensor:
    """Mean of z * (J^T z) over probes z (B, *D), for x0_hat with its graph from x_t, each (B, *D).

    With the rows of a Hadamard matrix as probes it is the diagonal itself.
    """
    values = [z * torch.autograd.grad(clean, x_t, z, retain_graph=True)[0] for z in probes]
    if not values:
        raise ValueError("there are no probes; pass one or more")
    return torch.stack(values).mean(0).detach()


def clean_variance(prediction: Prediction, diagonal: Tensor, unit: str) -> Tensor:
    """What diag(J) says of the variance of a unit's quantity, (B, *D); at times with signal.

    (beta_bar / a) J in units of x_0, divided by the unit's factor: a J for the noise, (a^2 + b^2) / a J for velocity.
    """
    power = prediction.signal.square() + prediction.spread.square()
    weight = prediction.signal if unit == "noise" else power / prediction.signal
    return (per_sample(weight, diagonal) if weight.ndim else weight) * diagonal


def random_signs(seed: int, images: Sequence[int], streams: Sequence[int], count: int, shape: Sequence[int]) -> Tensor:
    """Probes of each image, (count, B, *shape), by (seed, image, stream) alone; more probes include fewer."""
    bits = torch.empty(count, len(images), *shape, dtype=torch.int8)
    for place, (image, stream) in enumerate(zip(images, streams, strict=True)):
        # steps and times count from 0: no noise of theirs is drawn from a negative stream
        generator = image_generator(seed, image, -1 - stream)
        bits[:, place] = torch.randint(0, 2, (count, *shape), generator=generator, dtype=torch.int8)
    return 2 * bits - 1


@final
class ProbedNetwork:
    """A network with the head "ocm", made of its own Jacobian at every call: probes backward passes more.

    indices: the number of each image, as in `sample`; without them its place in the batch. Where no signal is left the
    Jacobian is 0 and says nothing: there it is taken at the last time of the full grid that has signal.
    """

    def __init__(
        self, network: Network, forward: ForwardProcess, probes: int, seed: int, indices: Sequence[int] | None = None
    ):
        self.network, self.forward, self.probes, self.seed, self.indices = network, forward, probes, seed, indices

    def __call__(self, x_t: Tensor, t: Time, **condition: Tensor) -> Prediction:
        signal, spread = self.forward.levels(t)
        seen, answer = self._variance(x_t, self._time_with_signal(t, signal), **condition)
        if bool((signal == 0).any()) or (torch.is_grad_enabled() and x_t.requires_grad):
            answer = Prediction.of(self.network(x_t, t, **condition), x_t, t, signal, spread)
        heads, units = {**answer.heads, "ocm": seen.to(answer.x_t.dtype)}, {**answer.units, "ocm": "velocity"}
        return answer.with_heads(heads, units, answer.excesses - {"ocm"})

    def _time_with_signal(self, t: Time, signal: Tensor) -> Time:
        if not bool((signal == 0).any()):
            return t
        times, last = self.forward.schedule.check_times(t), self.forward.schedule.last_time_with_signal
        return torch.where(signal == 0, torch.as_tensor(last, dtype=times.dtype), times)

    def _variance(self, x_t: Tensor, t: Time, **condition: Tensor) -> tuple[Tensor, Prediction]:
        """The variance in velocity units, and the network's answer without its graph."""
        levels, schedule = self.forward.levels(t), self.forward.schedule
        streams = [schedule.stream(time) for time in schedule.check_times(t).expand(len(x_t)).tolist()]
        images = image_numbers(self.indices, len(x_t))
        with torch.inference_mode(False), torch.enable_grad():
            x = x_t.detach().clone().requires_grad_()
            answer = Prediction.of(self.network(x, t, **condition), x, t, *levels)
            signs = random_signs(self.seed, images, streams, self.probes, x_t.shape[1:]).to(x_t.device)
            if not answer.clean.requires_grad:
                raise ValueError(
                    "the network keeps no gradient from x_t to its output, so that its Jacobian cannot be probed; "
                    "remove torch.no_grad from it, or use the covariance with a fitted head"
                )
            diagonal = probed_diagonal(answer.clean, x, (z.to(answer.clean.dtype) for z in signs))
        return clean_variance(answer, diagonal, "velocity"), answer.without_graph()
