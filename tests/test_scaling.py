"""The model of a step's time that benchmarks.scaling predicts with."""

from dataclasses import replace

import pytest

from benchmarks.scaling import FLOATS, Link, StepModel, fitted_link

LINK = Link(bytes_per_s=1e9, latency_s=1e-5)
MODEL = StepModel(overhead=0.01, sample=0.001, data=0.0005, loaders=1, checkpoint=0.0, gradient_bytes=4e7)


def test_a_ring() -> None:
    assert LINK.all_reduce_s(1e9, 1) == 0
    assert LINK.all_reduce_s(1e9, 2) == pytest.approx(2e-5 + 1)
    # Twice all bytes at most, however many there are; the latencies add up.
    assert LINK.all_reduce_s(1e9, 1000) == pytest.approx(2 * 999 * 1e-5 + 2 * 0.999)


def test_what_a_step_waits_for() -> None:
    assert MODEL.step_s(100, 1, LINK) == pytest.approx(0.11)
    # 40 MB both ways take 40 ms, of which two thirds of 60 ms are beside the computing.
    assert MODEL.step_s(100, 2, LINK) == pytest.approx(0.06 + max(0.0, 0.04002 - 0.04), abs=1e-4)
    slow = Link(1e8, 1e-5)
    assert MODEL.step_s(100, 2, slow) == pytest.approx(0.06 + 0.40002 - 0.04)
    loading = StepModel(overhead=0.01, sample=0.001, data=0.002, loaders=1, checkpoint=0.003, gradient_bytes=0)
    assert loading.step_s(100, 1, LINK) == pytest.approx(0.203)
    assert replace(loading, loaders=2).step_s(100, 1, LINK) == pytest.approx(0.113)
    assert replace(loading, loaders=0).step_s(100, 1, LINK) == pytest.approx(0.313)


def test_efficiency_falls_with_workers_and_larger_batches_help() -> None:
    assert MODEL.efficiency(64, 1, LINK, per_worker=True) == 1
    falling = [MODEL.efficiency(64, workers, LINK, per_worker=True) for workers in (2, 8, 64, 512)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.8 < MODEL.efficiency(512, 512, LINK, per_worker=True)
    assert MODEL.efficiency(64, 8, LINK, per_worker=False) < MODEL.efficiency(64, 8, LINK, per_worker=True)


def test_a_link_is_found_again_in_its_times() -> None:
    found = fitted_link([LINK.all_reduce_s(4 * size, 2) for size in FLOATS])
    assert found.bytes_per_s == pytest.approx(LINK.bytes_per_s)
    assert found.latency_s == pytest.approx(LINK.latency_s)
