from __future__ import annotations

from pathlib import Path

import pytest

from payload.data.sealed import open_sealed, sealed_folder
from payload.errors import PayloadError


def test_a_sealed_folder_appears_whole_and_knows_its_facts(tmp_path: Path) -> None:
    with sealed_folder(tmp_path / "a" / "thing", step=3) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_bytes(b"abc")
        assert not (tmp_path / "a" / "thing").exists()
    assert open_sealed(tmp_path / "a" / "thing")["step"] == 3


def test_an_error_while_filling_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), sealed_folder(tmp_path / "thing"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["change", "cut", "delete", "unlist"])
def test_any_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    with sealed_folder(tmp_path / "thing") as partial:
        (partial / "file").write_bytes(b"abc")
    file = tmp_path / "thing" / "file"
    match damage:
        case "change":
            file.write_bytes(b"abd")
        case "cut":
            file.write_bytes(b"ab")
        case "delete":
            file.unlink()
        case "unlist":
            (tmp_path / "thing" / "manifest.json").write_text("{")
    with pytest.raises(PayloadError):
        open_sealed(tmp_path / "thing")
