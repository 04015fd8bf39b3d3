"""Benchmarks: that each does its work on a tiny network, and that ratios are what they say. No speed is judged here."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from optcov.experiments.bench import BENCHMARKS, BenchSize, run_benchmarks
from optcov.experiments.bench.work import FEWEST, Contest
from optcov.experiments.timing import Timing, interleaving, machine, paired_ratio, peak_memory, ratio

TINY = BenchSize(rounds=2, batch=2, image_size=8, channels=(32, 32), times=40)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_gives_a_positive_ratio(name: str) -> None:
    (result,) = run_benchmarks([name], TINY, memory=False)
    assert result.name == name
    assert result.ratio > 0
    assert (result.low, result.high) == (None, None)  # two rounds cannot tell
    assert result.words() == f"{result.ratio:.3f}"
    assert result.rounds == 2
    assert result.peak_megabytes is None


@pytest.mark.long
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    (result,) = run_benchmarks(["dynamic_program"], TINY)
    assert result.peak_megabytes is not None
    assert 50 < result.peak_megabytes < 5000


def test_a_part_of_the_work_counts_as_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest("ours", lambda: time.sleep(0.02), "theirs", lambda: time.sleep(0.01), scale=0.1)
    monkeypatch.setitem(BENCHMARKS, "naps", lambda size: contest)
    (result,) = run_benchmarks(["naps"], TINY, memory=False)
    assert result.theirs_seconds >= 0.1  # a tenth took 0.01 s
    assert 0.05 <= result.ratio <= result.ours_seconds / 0.1  # a busy machine sleeps longer


def test_rounds_end_when_the_time_is_used_up_but_there_are_enough_for_an_interval(monkeypatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "naps", lambda size: Contest("a", lambda: None, "b", lambda: None, bound=1e9))
    (result,) = run_benchmarks(["naps"], BenchSize(rounds=1000, seconds=0), memory=False)
    assert result.rounds == FEWEST
    assert result.low is not None
    assert result.high is not None
    assert 0 < result.low <= result.ratio <= result.high
    assert result.words() == f"{result.ratio:.3f} [{result.low:.3f}, {result.high:.3f}]"


def test_unknown_benchmarks_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown benchmark 'magic'"):
        list(run_benchmarks(["magic"], TINY))


def test_rounds_take_turns_in_alternating_order() -> None:
    calls: list[str] = []
    *_, timings = interleaving({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba"  # the first is the warm-up
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]
    with pytest.raises(ValueError, match="rounds = 0"):
        list(interleaving({"a": lambda: None}, rounds=0))


def test_the_clock_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("wait"))
    list(interleaving({"a": lambda: waits.append("work")}, rounds=2))
    assert waits == ["work", *["wait", "work", "wait"] * 2]  # the first is the warm-up


def test_the_interval_of_a_paired_ratio_is_that_of_the_sign_test() -> None:
    ones = Timing((1.0,) * 10)
    # of 10 rounds, P(at most 1 below the median) = 11/1024 and P(at most 2) = 56/1024: the second to the ninth
    assert paired_ratio(Timing(tuple(float(n) for n in range(10, 0, -1))), ones) == (5.5, 2.0, 9.0)
    assert paired_ratio(Timing((1.0, 2.0)), Timing((1.0, 1.0))) == (1.5, 0.0, math.inf)


def test_the_interval_of_a_paired_ratio_covers_the_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    runs, ones = 2000, Timing((1.0,) * 21)
    ratios = np.exp(generator.standard_cauchy((runs, 21)).clip(-50, 50))  # median 1, heavy tails as of other load
    hits = sum(low <= 1 <= high for _, low, high in (paired_ratio(Timing(tuple(row)), ones) for row in ratios))
    assert 0.95 <= hits / runs <= 0.99  # exactly 97.3 % for 21 rounds; its standard error is 0.4 %


def test_a_ratio_is_the_median_over_rounds_whatever_slow_rounds_do_to_both_sides() -> None:
    value, error = ratio(Timing((2.0, 4.0, 100.0)), Timing((1.0, 2.0, 50.0)))
    assert value == 2.0
    assert error == 0.0
    with pytest.raises(ValueError, match="two rounds or more"):
        ratio(Timing((3.0,)), Timing((2.0,)))
    assert ratio(Timing((1.1, 11.0, 12.0)), Timing((1.0, 10.0, 2.0)))[0] == pytest.approx(1.1)  # the medians give 5.5


def test_the_peak_is_no_less_than_what_was_held() -> None:
    held = np.ones(2**24)  # 128 MB
    assert peak_memory() >= held.nbytes / 2**20


def test_a_childs_peak_is_its_own_and_not_that_of_the_process_that_started_it() -> None:
    held = np.ones(2**26)  # 512 MB, more than the child needs
    program = "from optcov.experiments.timing import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(child.stdout) < held.nbytes / 2**20 < peak_memory()


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    found = machine()
    assert (
        found["versions"]["torch"] == torch.__version__.split("+")[0] or found["versions"]["torch"] == torch.__version__
    )
    assert platform.node() not in str(found["processor"])
