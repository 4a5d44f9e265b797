"""Tests in this folder need a Hopper GPU; elsewhere they say so and skip.

`pytest tests/gpu --evidence FILE` also writes what passed, as JSON with versions, GPU, date and commit; if the file is
there, its other tests stay in it.
"""

import json
from pathlib import Path

import pytest
import torch

from flashqla.console import environment, write_json

OUTCOMES: dict[str, dict] = {}


def pytest_addoption(parser):
    parser.addoption("--evidence", metavar="FILE", help="write the outcomes of tests/gpu as JSON")


def pytest_collection_modifyitems(items):
    reason = _missing()
    if reason:
        for item in items:
            if "/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report):
    outcome = OUTCOMES.setdefault(report.nodeid, {"name": report.nodeid, "ok": True, "seconds": 0.0})
    if report.skipped:
        outcome["ok"] = None
    elif report.failed:
        outcome["ok"] = False
    outcome["seconds"] = round(outcome["seconds"] + report.duration, 2)


def pytest_sessionfinish(session):
    path = session.config.getoption("--evidence", None)
    if path:
        before = json.loads(Path(path).read_text())["rows"] if Path(path).exists() else []
        rows = {row["name"]: row for row in before} | OUTCOMES
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_json(path, {"env": environment(device), "command": "pytest tests/gpu", "rows": list(rows.values())})


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs an SM90 GPU (here: cpu)"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"needs an SM90 GPU (here: SM{capability[0]}{capability[1]})"
