"""The README's figures are those of the committed measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "notebooks" / "results" / "h200"


def forward_rows() -> dict[str, dict[str, float]]:
    """Row name -> column -> milliseconds, and the worst ratio to a peer of the same run."""
    table: dict[str, dict[str, float]] = {}
    for file in ("bench-forward.json", "bench-flash-qla.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            times = row["time_ms"]
            entry = table.setdefault(row["name"], {"flashqla": times["flashqla"], "ratio": 0.0})
            for peer in times.keys() - {"flashqla"}:
                entry[peer] = times[peer]
                entry["ratio"] = max(entry["ratio"], times["flashqla"] / times[peer])
    return table


def test_the_table_of_the_readme_is_the_committed_one():
    pattern = r"^\| ([0-9]+/[0-9]+ [0-9x+]+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$"
    shown = {match[0]: match[1:] for match in re.findall(pattern, (ROOT / "README.md").read_text(), re.MULTILINE)}
    measured = forward_rows()
    assert shown.keys() == measured.keys()
    for name, cells in shown.items():
        entry = measured[name]
        for cell, column in zip(cells, ("flashqla", "flash_qla", "flashinfer", "ratio"), strict=True):
            digits = 2 if column == "ratio" else 3
            assert cell == (f"{entry[column]:.{digits}f}" if column in entry else "-"), (name, column)


def test_every_measured_row_was_right():
    for file in ("bench-forward.json", "bench-flash-qla.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            assert row["error"]["flashqla"]["o"] < 6e-3 and row["error"]["flashqla"]["final_state"] < 6e-3
    assert all(case["ok"] for case in json.loads((RESULTS / "selftest.json").read_text())["rows"])
