"""Random cases: all in the seed, broad enough, right for some seconds, and able to find a fault and repeat it."""

from __future__ import annotations

import json

import pytest
import torch

import flashqla
from flashqla import fuzz, selftest
from flashqla.cli import main


def fuzzing(*options: str) -> int:
    return main(["selftest", "--device", "cpu", "--fuzz", *options])


def test_a_seed_is_a_case():
    for seed in range(50):
        case = fuzz.draw(seed, 300)
        assert case == fuzz.draw(seed, 300)
        first, again = (case.arguments(torch.device("cpu")) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first[1], again[1], strict=True))
        assert torch.equal(first[0]["g"].nan_to_num(), again[0]["g"].nan_to_num())


def test_cases_are_broad():
    cases = [fuzz.draw(seed, 300) for seed in range(400)]
    assert {case.dtype for case in cases} == set(fuzz.DTYPES)
    assert {case.head_dims for case in cases} == set(fuzz.HEAD_DIMS)
    assert {case.gate for case in cases} == set(fuzz.GATES)
    assert {case.recipe for case in cases} == set(fuzz.RECIPES)
    flags = {flag for case in cases for flag in case.flags}
    assert flags == {selftest.L2NORM, selftest.GATE, selftest.BETA, selftest.NEGATIVE, selftest.V_FIRST}
    packed = [case for case in cases if case.lengths is not None]
    assert any(0 in case.lengths for case in packed)
    assert any(sum(case.lengths) < case.tokens for case in packed)
    assert all(sum(case.lengths) <= case.tokens for case in packed)
    assert {1, 2, 3} <= {case.batch for case in cases}
    assert {1, 3, 7, 8} <= {case.heads[1] // case.heads[0] for case in cases}
    assert {(case.initial_state, bool(case.resets), case.scale) for case in cases} >= {
        (True, False, None),
        (False, True, 1.0),
    }
    assert max(case.tokens for case in cases) > 200 and min(case.tokens for case in cases) == 1


def test_some_seconds_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "fuzz.json"
    code = fuzzing("5", "--seed", "100", "--json", str(path))
    out = capsys.readouterr().out
    assert code == 0, out
    written = json.loads(path.read_text())
    assert written["trials"] >= 2 and not written["failed"]
    assert f"{written['trials']} of {written['trials']} random cases within their limits, seeds from 100" in out


def test_long_cases_have_the_chunk_form_as_judge():
    case = fuzz.draw(0, 300)
    assert fuzz.oracle_of(case) is selftest.testing.oracle64
    long = selftest.Case("long", torch.float32, tokens=600, heads=(1, 8), head_dims=(16, 16))
    assert selftest.judge(long, torch.device("cpu"), oracle=fuzz.oracle_of(long))["ok"]


@pytest.mark.parametrize("kind", ["wrong", "raises"])
def test_finds_a_fault_and_repeats_it(monkeypatch, capsys, tmp_path, kind):
    """A fault in packed calls alone shows within a few seeds, and the seed it names shows it again."""
    right = flashqla.chunk_gated_delta_rule

    def faulty(*arguments, **keywords):
        o, final_state = right(*arguments, **keywords)
        if keywords.get("cu_seqlens") is None:
            return o, final_state
        if kind == "raises":
            raise RuntimeError("out of registers")
        return o, 1.1 * final_state

    monkeypatch.setattr(flashqla, "chunk_gated_delta_rule", faulty)
    monkeypatch.setattr(fuzz, "LOOP_TOKENS", 10**9)
    packed = next(seed for seed in range(100) if fuzz.draw(seed, 200).lengths is not None)
    path = tmp_path / "fuzz.json"
    assert fuzzing("0", "--seed", str(packed), "--json", str(path)) == 1
    out = capsys.readouterr().out
    assert f"--fuzz 0 --device cpu --backend auto --seed {packed}" in out
    assert ("out of registers" if kind == "raises" else "final_state 1.0e-01") in out
    assert [row["name"] for row in json.loads(path.read_text())["failed"]] == [f"seed {packed}"]
    dense = next(seed for seed in range(100) if fuzz.draw(seed, 200).lengths is None)
    assert fuzzing("0", "--seed", str(dense)) == 0
