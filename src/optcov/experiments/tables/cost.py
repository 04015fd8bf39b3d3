"""What an evaluation costs (tab:mem_time): size of the networks, time per evaluation, what each head adds."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from optcov.bundle import Bundle
from optcov.bundle.conditions import labels_in_rows
from optcov.covariances import find_covariance
from optcov.experiments.tables.cells import Cell, Plan, Result, result_of
from optcov.experiments.tables.published import published
from optcov.experiments.tables.result import Entry, Row, Section, TableResult
from optcov.experiments.timing import Timing, Work, interleaving, peak_memory, ratio
from optcov.methods import find_method

BARE = "noise"


def compute_cost(bundle: Bundle, settings: Mapping[str, Any]) -> Generator[float, None, Result]:
    """Time the noise predictor alone and with each head, in turns."""
    whole = bundle.network
    networks = {BARE: whole.with_only_heads().eval()} | {
        name: whole.with_only_heads(name).eval() for name in bundle.heads
    }
    device = next(bundle.unet.parameters()).device
    x_t = torch.zeros(int(settings["batch"]), *bundle.image_shape, device=device)
    (t,) = bundle.schedule.grid([(bundle.schedule.grid_size + 1) // 2])
    told = {name: value.to(device) for name, value in labels_in_rows(bundle.class_numbers, len(x_t)).items()}
    work: dict[str, Work] = {
        name: torch.no_grad()(partial(network, x_t, t, **told)) for name, network in networks.items()
    }
    timings: dict[str, Timing] = {}
    rounds = int(settings["rounds"])
    for number, timings in enumerate(interleaving(work, rounds), start=1):  # noqa: B007
        yield number / rounds
    result: Result = {"peak_memory_megabytes": round(peak_memory(), 1), "networks": {}}
    for name, timing in timings.items():
        share, error = ratio(timing, timings[BARE])
        result["networks"][name] = {
            "megabytes": megabytes(networks[name]),
            "milliseconds": 1000 * timing.median,
            "ratio": share,
            "ratio_error": error,
        }
    return result


def megabytes(network: nn.Module) -> float:
    """Size of the weights in MB of 2^20 bytes."""
    return sum(p.numel() * p.element_size() for p in network.parameters()) / 2**20


def cost_ratio(result: Result, method: str) -> float:
    """Time of an evaluation with the head of a method over that without; what lies below 1 is noise of the clock."""
    covariance = find_method(method).covariance
    head = covariance and find_covariance(covariance).head
    return max(1.0, float(result["networks"].get(head, {"ratio": 1.0})["ratio"]))


def cost_note(result: Result) -> str:
    """What the heads cost as it was measured, for tables that count it."""
    heads = {name: found for name, found in result["networks"].items() if name != BARE}
    measured = ", ".join(f"{name} {found['ratio']:.3f} ± {found['ratio_error']:.3f}" for name, found in heads.items())
    return f"Time of an evaluation with a head over that without, counted as no less than 1: {measured or 'no head'}."


def cost_plan(cell: Cell, setting: str | None) -> Plan[TableResult]:
    """The table from its one cell; setting: the paper's."""
    result = yield from result_of(cell)
    paper = published("cost")["settings"].get(setting, {})
    rows = []
    for name, found in result["networks"].items():
        theirs = paper.get(name, {})
        extra = theirs.get("extra_percent", 0.0 if name == BARE and theirs else None)
        entries = (
            Entry(found["megabytes"], paper=theirs.get("megabytes")),
            Entry(found["milliseconds"], paper=theirs.get("milliseconds")),
            Entry(100 * (found["ratio"] - 1), 100 * found["ratio_error"], extra),
        )
        rows.append(Row("noise alone" if name == BARE else f"noise and {name}", entries))
    batch, device = cell.settings["batch"], published("cost")["device"]
    columns = ("size, MB", f"time at batch {batch}, ms", "extra time, %")
    return TableResult(
        "cost",
        "Size and time of a network evaluation",
        "size and time",
        (Section("cost of an evaluation", columns, tuple(rows), setting),),
        (
            f"Medians of {cell.settings['rounds']} rounds in turns; the paper's times are of a {device}.",
            f"Peak memory of the process: {result['peak_memory_megabytes']} MB.",
        ),
    )
