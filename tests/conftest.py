"""float64, one thread, and the markers `slow` and `gpu`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Deadlines measure the machine; the function-scoped fixtures below serve every example alike.
settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.register_profile("night", settings.get_profile("local"), max_examples=300)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device that tests use (default: cpu)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out unless `-m` says otherwise, and gpu tests without `--device cuda`."""
    chosen = bool(config.getoption("-m"))
    on_gpu = str(config.getoption("--device")).startswith("cuda")
    left_out = [item for item in items if item.get_closest_marker("slow") and not chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"a test's name holds an address, so workers disagree: {unstable[0]}")
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs --device cuda"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """pytest-xdist's workers share the cores; more threads per worker would fight for them."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def float32(float64: None) -> None:
    """As users have it."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def hecate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit code, its output and its errors."""

    def call(*argv: object) -> tuple[int, str, str]:
        from hecate.cli import main

        with pytest.raises(SystemExit) as caught:
            main([str(part) for part in argv])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call
