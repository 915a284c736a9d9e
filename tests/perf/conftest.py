"""Fixtures of the benchmarks: a course through a small model, recorded and judged by the reference.

In `make test` every benchmark runs its event once, as a test. `make perf` passes --benchmark-enable, which times it.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from instep_speed.gate.cases import Course, lay
from support.inputs.checkpoints import write


@pytest.fixture(scope="session")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("course")
    return lay(write(folder / "model"), folder / "course.jsonl", batch=4, rounds=2, num_steps=3)


@pytest.fixture
def benchmark(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> BenchmarkFixture:
    benchmark.disabled = not request.config.getoption("benchmark_enable")
    return benchmark
