"""A recipe's paths mean the same wherever they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.data.rows import read_rows
from payload.errors import PayloadError
from payload.places import place, place_or_hub_name
from payload.recipe import TargetSpec
from payload.target import Target
from payload.target_shape import shape_of


def test_a_relative_path_lies_below_the_containers_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_ROOT", str(tmp_path))
    assert place("models/small") == tmp_path / "models/small"
    assert place("/elsewhere/model") == Path("/elsewhere/model")
    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n')
    [row] = read_rows(["rows.jsonl"], "train", None, 0)
    assert row.content == {"text": "hello"}


def test_the_home_of_a_user_that_there_is_not_is_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_ROOT", str(tmp_path))
    assert place("~nosuch/model") == tmp_path / "~nosuch/model"
    with pytest.raises(PayloadError, match=r"no folder .*~nosuch/model"):
        place_or_hub_name("~nosuch/model")
    with pytest.raises(PayloadError, match="~nosuch/model are not known here"):
        shape_of("~nosuch/model")


def test_a_name_is_a_folder_when_there_is_one_and_the_hubs_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_ROOT", str(tmp_path))
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert place_or_hub_name("models/small") == str(tmp_path / "models/small")
    assert place_or_hub_name("someone/model") == "someone/model"


def test_a_target_that_is_nowhere_is_told_with_the_folder_that_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_ROOT", str(tmp_path))
    with pytest.raises(PayloadError, match=str(tmp_path / "models/none")):
        Target.load(TargetSpec(model="./models/none"))
