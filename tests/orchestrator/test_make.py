"""make's variables: each reaches its command as it was typed, whatever is in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.localnode.node import NodeInfo

REPOSITORY = Path(__file__).parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
RECIPES: dict[str, str] = dict(re.findall(r"^([a-z][a-z-]*): .*\n\t@\$\(RUN\) (.*)$", MAKEFILE, re.MULTILINE))
ENVIRONMENT = ("DFLASH_HOST", "DFLASH_CT", "DFLASH_INVENTORY", "DFLASH_RECIPE")


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program in the commands' place: it prints its arguments and what make exports."""
    program = tmp_path_factory.mktemp("make") / "echo"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"print(json.dumps([sys.argv[1:], {{n: os.environ.get(n) for n in {ENVIRONMENT}}}]))\n"
    )
    program.chmod(0o755)
    return program


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "--old-file=.venv/.desk", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "HOST": "from-the-shell"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def variables(recipe: str, kinds: str) -> list[str]:
    return re.findall(rf"\$\(call (?:{kinds}),(?:--[a-z-]+,)?([A-Z_]+)\)", recipe)


values = st.text(
    st.characters(exclude_characters="\n\0", exclude_categories=["Cs"])
    | st.sampled_from("'\"$`\\;#&|()%:=*~ {}"),
    min_size=1,
    max_size=12,
).filter(lambda text: text == text.strip() and text not in ("", "0", "no", "false", "off"))
"""White space around a value is make's own."""


@settings(max_examples=25, deadline=None)
@given(target=st.sampled_from(sorted(RECIPES)), value=values)
@example("script", "it's.sh")
@example("put", 'it\'s $HOME `id` $(id) $(shell id) \\ "q" ; exit 1 # x')
@example("train", "data.train=['a.jsonl','b $x.jsonl']")
@example("cache", "it's")
@example("evaluate", "$$1")
def test_every_value_arrives_as_it_was_typed(echo: Path, target: str, value: str) -> None:
    one, many = (variables(RECIPES[target], kinds) for kinds in ("option|argument", "options|arguments"))
    names = {*one, *many, "HOST", "CT", "INVENTORY", "RECIPE"}
    done = make(target, f"RUN={echo}", *(f"{name}={value}" for name in sorted(names)))
    assert done.returncode == 0, done.stderr
    arguments, exported = json.loads(done.stdout)
    assert set(exported.values()) == {value}
    for name in one:
        assert value in arguments, name
    for name in many:
        words = [word for word in re.split("[ \\t\\v\\f\\r]+", value) if word]
        assert set(words) <= set(arguments), name


def test_all_commands_are_covered() -> None:
    assert {"deploy", "train", "logs", "put", "script", "evaluate", "cache", "locks"} <= RECIPES.keys()
    assert variables(RECIPES["script"], "option|argument") == ["TIMEOUT", "FILE"]
    assert not re.search(r"'\$\([A-Z]", MAKEFILE), (
        "a value between quotes of the Makefile's own ends at a quote"
    )


def test_words_stay_apart_and_a_line_break_is_refused(echo: Path) -> None:
    done = make("script", f"RUN={echo}", "FILE=a b", "ARGS=it's  -x $HOME", "TIMEOUT=3")
    assert json.loads(done.stdout)[0] == ["script", "--timeout", "3", "--", "a b", "it's", "-x", "$HOME"]
    done = make("train", f"RUN={echo}", "SET=a='b' c=d")
    assert json.loads(done.stdout)[0] == ["train", "--set", "a='b'", "--set", "c=d"]
    broken = make("script", f"RUN={echo}", "FILE=a\necho ran")
    assert broken.returncode == 2
    assert "line break" in broken.stderr
    assert broken.stdout == ""


def test_a_script_with_a_quote_in_its_name_runs(local_node: NodeInfo, tmp_path: Path) -> None:
    file = tmp_path / "it's $1.sh"
    file.write_text('#!/bin/sh\necho "$1"\n')
    place = ("HOST=local", "CT=200", f"INVENTORY={local_node.inventory}")
    assert make("deploy", *place).returncode == 0
    done = make("script", f"FILE={file}", "ARGS=it's", *place)
    assert (done.returncode, done.stdout) == (0, "it's\n"), done.stderr


def test_the_variables_reach_the_real_commands_and_a_host_from_the_shell_does_not(
    local_node: NodeInfo,
) -> None:
    assert "HOST is missing" in make("status").stderr
    done = make("status", "HOST=local", f"INVENTORY={local_node.inventory}")
    assert "CT is missing: which container on local?" in done.stderr
