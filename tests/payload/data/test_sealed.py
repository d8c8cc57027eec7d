from __future__ import annotations

from pathlib import Path

import pytest
import torch

from payload.data import feature_cache
from payload.data.feature_cache import FeatureCache, FeatureShape, write_feature_cache
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


SHAPE = FeatureShape(rows=5, length=4, features=6, teacher=3, dtype="bfloat16")


def made(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4, 6), row, dtype=torch.bfloat16), torch.full((4, 3), -row, dtype=torch.bfloat16)


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int = 5) -> None:
    monkeypatch.setattr(feature_cache, "_SHARD_BYTES", 2 * SHAPE.row_bytes)
    write_feature_cache(folder, SHAPE, (made(row) for row in range(rows)), lambda line: None)


def test_features_come_back_from_their_shards_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "cache", monkeypatch)
    cache = FeatureCache(tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 3
    for row in (4, 0, 3, 1, 2):
        features, teacher = cache.read(row)
        assert torch.equal(features, made(row)[0])
        assert teacher is not None
        assert torch.equal(teacher, made(row)[1])


def test_the_size_is_known_before_and_is_the_size_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "cache", monkeypatch)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors"))
    assert SHAPE.total_bytes <= on_disk <= SHAPE.total_bytes + 3 * 400


def test_a_cache_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    huge = FeatureShape(rows=10**12, length=4096, features=20480, teacher=0, dtype="bfloat16")
    with pytest.raises(PayloadError, match="GB free"):
        write_feature_cache(tmp_path / "cache", huge, iter(()), lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_with_a_missing_row_or_a_damaged_shard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PayloadError, match="4 rows instead of 5"):
        write(tmp_path / "short", monkeypatch, rows=4)
    write(tmp_path / "cache", monkeypatch)
    with (tmp_path / "cache" / "features-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    cache = FeatureCache(tmp_path / "cache")
    cache.read(0)
    with pytest.raises(PayloadError, match="missing or damaged"):
        cache.read(2)
