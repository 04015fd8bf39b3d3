"""Hidden layers of heads, trained on the features that a closed-form fit keeps, before the closed form itself.

The network is not asked again. All heads share the same hidden layers. AdamW trains them for all heads together, on the
sum of the heads' deviances, with last layers that are thrown away. Then the closed form fits the last layers on what
the hidden layers give, as it does without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from optcov.fitting.batches import step_generator
from optcov.fitting.closed_form import log_estimate
from optcov.fitting.config import TrainingError
from optcov.fitting.rows import Rows
from optcov.gaussian import sum_pixels
from optcov.networks import TimedHead

STEPS = 3000
LEARNING_RATE = 2e-3
IMAGES = 32  # of a step, of each process
CLIP = 1.0  # largest norm of a gradient
MOST_SKIPPED = 0.02  # of the steps, whose gradient is not finite
LOWEST = -12.0  # logarithm of the least estimate relative to its base, while the layers train

Note = Callable[[int, int], None]  # steps done, and steps in all


def train_hidden_layers(
    rows: Sequence[Rows],
    heads: Mapping[str, TimedHead],
    accelerator: Accelerator,
    seed: int = 0,
    note: Note | None = None,
) -> None:
    """Train the hidden layers of the heads on rows whose inputs are the features; the last layers stay as they were."""
    first = next(iter(heads.values())).hidden
    assert first is not None
    before = {name: [p.detach().clone() for p in head.last.parameters()] for name, head in heads.items()}
    weights = [*first.parameters(), *(p for head in heads.values() for p in head.last.parameters())]
    gradients = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=1e-4)
    rate = OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    generator = step_generator(seed, "hidden layers", accelerator.process_index)
    skipped = 0
    with torch.enable_grad():
        for step in range(1, STEPS + 1):
            some = _some(rows, generator)
            loss = _deviance(some, heads, first(some.inputs))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if accelerator.num_processes > 1:
                for weight in weights:
                    weight.grad = accelerator.reduce(weight.grad, "mean")
            norm = nn.utils.clip_grad_norm_(weights, CLIP)
            if bool(norm.isfinite()):
                optimizer.step()
            else:  # a target far off may overflow; the next batch has others
                skipped += 1
                _check_skipped(skipped)
            rate.step()
            if note is not None:
                note(step, STEPS)
    for weight, wanted in zip(weights, gradients, strict=True):
        weight.requires_grad_(wanted)
    for name, head in heads.items():
        for weight, old in zip(head.last.parameters(), before[name], strict=True):
            weight.copy_(old)
        if head.hidden is not first:
            assert head.hidden is not None
            head.hidden.load_state_dict(first.state_dict())


def _check_skipped(skipped: int) -> None:
    """Refuse to go on if too many steps were left out."""
    if skipped > MOST_SKIPPED * STEPS:
        raise TrainingError(
            f"the gradients of {skipped} of {STEPS} steps of the hidden layers were NaN or infinite; look for data or "
            f"outputs of the network that are far too large, or fit heads of kind timed"
        )


def _some(rows: Sequence[Rows], generator: torch.Generator) -> Rows:
    """Some images of one batch."""
    batch = rows[int(torch.randint(len(rows), (), generator=generator))]
    return batch.part(torch.randperm(len(batch.times), generator=generator)[:IMAGES])


def _deviance(rows: Rows, heads: Mapping[str, TimedHead], inputs: Tensor) -> Tensor:
    """Mean over images and pixels of the sum of the heads' deviances, ()."""
    total = inputs.new_zeros(len(inputs))
    for name, head in heads.items():
        regression = rows.regressions[name]
        raw = head.mix(head.last(inputs), rows.log_snr).clamp(min=LOWEST)
        log_g = log_estimate(head, rows, regression, raw)
        weight = regression.weight.to(inputs)
        total = total + weight * sum_pixels(regression.deviance(log_g)) / regression.target[0].numel()
    return total.mean()
