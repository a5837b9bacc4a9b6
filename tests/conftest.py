"""What all tests share: an option that forbids skipping, their order, and the ground that live probes stand on."""

from __future__ import annotations

import gc
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from probes.bpf import BpfUnavailable, Kernel

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a test that would be skipped fails: for machines that must be able to run everything",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What watches this machine comes last: then nothing else of ours runs on it."""
    items.sort(key=lambda item: _watches(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """With ``pytest -n 2`` two processes share the tests by files; all that watches this machine goes to one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "live" if _watches(config.rootpath / file) else file

    config.option.loadscopereorder = False  # it would put the largest first
    return ByFile(config, log)


@cache
def _watches(file: Path) -> bool:
    text = file.read_text()
    return "mark.live" in text or "root_and_bpf" in text


def pytest_collection_finish() -> None:
    """What was collected lives to the end. Each full garbage collection would go through all of it, which takes a
    fifth of a second, and falls into whatever is measured just then."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("--no-skips"):
        _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if collector.config.getoption("--no-skips"):
        _forbid(report)
    return report


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skip; an expected failure is reported as skipped too, and stays."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"--no-skips: {reason}"


@pytest.fixture(scope="session")
def root_and_bpf(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """A kernel that takes our BPF programs; skips, saying what is missing, where there is none."""
    try:
        return Kernel(tmp_path_factory.mktemp("headers"))
    except BpfUnavailable as error:
        pytest.skip(f"live probes cannot be loaded here: {error}")
