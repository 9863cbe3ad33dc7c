"""What all tests share: CUDA tests are skipped without CUDA, CI may refuse other skips."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# how fast a busy machine draws examples says nothing of what is tested
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forbid-skips",
        action="store_true",
        help="fail when a test was skipped that is not marked gpu",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipWatch(config.getoption("--forbid-skips")), "skip-watch")


@pytest.fixture(scope="session", autouse=True)
def measured_links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what programs measure here apart from what this machine's user has measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_CACHE_DIR", str(tmp_path_factory.mktemp("links")))
        yield


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of later collections: tests collect to count descriptors."""
    gc.collect()
    gc.freeze()


class SkipWatch:
    """Remembers what was skipped without the mark `gpu`, and fails the run for it if asked."""

    def __init__(self, forbid: bool) -> None:
        self.forbid = forbid
        self.skipped: list[str] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
            self.skipped.append(f"{report.nodeid}: {_reason(report)}")

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and not report.nodeid.startswith("tests/gpu"):
            self.skipped.append(f"{report.nodeid}: {_reason(report)}")

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbid and self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.forbid and self.skipped:
            terminalreporter.section("skipped, but only gpu tests may be", red=True)
            for line in self.skipped:
                terminalreporter.line(line)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last, and what needs CUDA is skipped where there is none.

    The browser's driver keeps an event loop in this thread for as long as it lives, in which no
    other test could run one.  Torch is imported only if that matters.
    """
    items.sort(key=lambda item: "/tests/browser/" in item.path.as_posix())
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
