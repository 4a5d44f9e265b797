"""Every recipe has a test that carries its name, or one that is named here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

RECIPES = {
    "RN": (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 15, 16, 17, 19),  # numerics
    "RV": (1, 2, 3, 4, 5, 6, 7, 11),  # packed sequences
    "RM": (1, 2, 3, 5, 6, 7),  # memory and indexing
    "RA": (1, 2, 3, 5, 6),  # autograd
    "RR": (1, 2, 3, 5, 7, 8, 9, 10, 11),  # compile, graphs, devices, determinism
    "RP": (1, 2, 3, 4),  # contract and serving
    "RF": (1, 2, 3),  # performance
}
OTHERS = {
    "RR11": ("test_packaging.py", "test_wheel_holds_exactly_the_package"),
    "RF1": ("test_bench.py", "test_tables"),
    "RF3": ("reference/test_reference_cost.py", "test_memory_is_linear_in_tokens"),
}
"""Tests whose name does not say which recipe they are."""

ON_A_GPU_TOO = ("RM1", "RM2", "RM7", "RV2", "RV7", "RR1", "RR2", "RR5", "RR8", "RR9", "RF2", "RF3")
"""What only kernels can break, or only a GPU can show."""

NAMES = [f"{kind}{number}" for kind, numbers in RECIPES.items() for number in numbers]


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def named(folder: Path) -> set[str]:
    """Recipes of which a test under a folder has the name, as in `test_rn1_strong_decay_dg`."""
    names = (name for path in folder.rglob("test_*.py") for name in functions_of(path))
    return {match[1].upper() for name in names if (match := re.match(r"test_(r[nvmarpf]\d+)_", name))}


@pytest.mark.parametrize("recipe", NAMES)
def test_recipe_has_a_test(recipe):
    if recipe == "RP4" and not (TESTS / "test_serving.py").exists():
        pytest.skip("state pools come with the serving functions")
    if recipe in OTHERS:
        file, name = OTHERS[recipe]
        assert name in functions_of(TESTS / file)
    else:
        assert recipe in named(TESTS)


@pytest.mark.parametrize("recipe", ON_A_GPU_TOO)
def test_recipe_runs_on_a_gpu(recipe):
    assert recipe in named(TESTS / "gpu")


def test_no_unknown_recipe():
    assert named(TESTS) <= set(NAMES)
