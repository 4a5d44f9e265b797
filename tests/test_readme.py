"""The README does what it says: its Python runs, its commands exist, its links lead somewhere."""

import pathlib
import re

import pytest

from flashqla.cli import build_parser

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("snippet", blocks("python"), ids=lambda snippet: snippet.splitlines()[-1][:40])
def test_python_snippet_runs(snippet):
    exec(compile(snippet, "README.md", "exec"), {})


def test_there_are_python_snippets():
    assert len(blocks("python")) >= 2


def test_every_command_named_exists():
    named = set(re.findall(r"python -m flashqla (\w+(?: --cpu)?)", README))
    assert {"demo", "doctor", "selftest", "bench --cpu", "warmup"} <= named
    for command in named:
        build_parser().parse_args(command.split())


def test_every_option_named_exists():
    usage = " ".join(sub.format_help() for sub in build_parser()._subparsers._group_actions[0].choices.values())
    for option in re.findall(r"`(--\w+)", README):
        assert option in usage, option


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_installs_and_tests_as_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text()
    (line,) = [line.split("#")[0].strip() for line in "".join(blocks("bash")).splitlines() if "pytest" in line]
    install, test = line.split(" && ")
    assert install.removeprefix("pip install ") in ci
    assert re.search(rf"^{test}$", ci, re.MULTILINE)
