"""Features come back bit for bit whoever wrote their shards and however often that was interrupted, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from payload.data.feature_cache import (
    FeatureCache,
    Features,
    FeatureShape,
    begin_features,
    is_whole,
    seal_features,
    shape_of,
    write_features,
)
from payload.errors import PayloadError

SHAPE = FeatureShape(rows=5, length=4, features=6, teacher=3, dtype="bfloat16", rows_per_shard=2)


def made(rows: range) -> Features:
    generator = torch.Generator()

    def random(row: int, width: int) -> torch.Tensor:
        return torch.randn(4, width, generator=generator.manual_seed(row)).bfloat16()

    return torch.stack([random(row, 6) for row in rows]), torch.stack([random(-row - 1, 3) for row in rows])


def write(
    folder: Path, compute: Callable[[range], Features] = made, claim: Callable[[], int] | None = None
) -> list[int]:
    """What was told to have been written."""
    told: list[int] = []
    begin_features(folder, SHAPE)
    write_features(folder, SHAPE, claim or count().__next__, compute, told.append)
    return told


def assert_whole(folder: Path) -> None:
    cache = FeatureCache(folder)
    for row in (4, 0, 3, 1, 2):
        features, teacher = cache.read(row)
        expected, expected_teacher = made(range(row, row + 1))
        assert torch.equal(features, expected[0])
        assert expected_teacher is not None
        assert teacher is not None
        assert torch.equal(teacher, expected_teacher[0])


def test_features_come_back_from_their_shards_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "features" / "cache"
    assert write(folder) == [2, 2, 1]
    assert not is_whole(folder)
    seal_features(folder, SHAPE)
    assert is_whole(folder)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert [path.name for path in folder.parent.iterdir()] == ["cache"]
    assert_whole(folder)


def test_features_without_a_teacher_come_back_too(tmp_path: Path) -> None:
    shape = FeatureShape(rows=3, length=3, features=5, teacher=0, dtype="float32", rows_per_shard=2)
    rows = torch.randn(3, 3, 5)
    begin_features(tmp_path / "cache", shape)
    write_features(
        tmp_path / "cache",
        shape,
        count().__next__,
        lambda some: (rows[some.start : some.stop], None),
        lambda rows: None,
    )
    seal_features(tmp_path / "cache", shape)
    cache = FeatureCache(tmp_path / "cache")
    for number, row in enumerate(rows):
        features, teacher = cache.read(number)
        assert torch.equal(features, row)
        assert teacher is None


def test_ranks_share_the_shards_and_none_is_computed_twice(tmp_path: Path) -> None:
    folder, claimed, computed = tmp_path / "cache", count(), []

    def compute(rows: range) -> Features:
        if rows.start == 0:
            # Another rank does all the others while this one is busy.
            write(folder, other, claimed.__next__)
        computed.append(rows)
        return made(rows)

    def other(rows: range) -> Features:
        computed.append(rows)
        return made(rows)

    write(folder, compute, claimed.__next__)
    assert computed == [range(2, 4), range(4, 5), range(2)]
    seal_features(folder, SHAPE)
    assert_whole(folder)


def test_what_an_interrupted_job_wrote_is_kept_and_the_rest_is_computed(tmp_path: Path) -> None:
    folder, computed = tmp_path / "cache", []

    def stops(rows: range) -> Features:
        if rows.start == 4:
            raise KeyboardInterrupt
        return made(rows)

    with pytest.raises(KeyboardInterrupt):
        write(folder, stops)
    with pytest.raises(PayloadError, match=r"lacks features-00002\.safetensors"):
        seal_features(folder, SHAPE)
    assert not is_whole(folder)

    def compute(rows: range) -> Features:
        computed.append(rows)
        return made(rows)

    (tmp_path / ".cache.partial/.features-00002.safetensors.dead").touch()
    assert "4 kept from before" in begin_features(folder, SHAPE)
    assert write(folder, compute) == [2, 2, 1]
    assert computed == [range(4, 5)]
    seal_features(folder, SHAPE)
    assert len(list(folder.iterdir())) == 4
    assert_whole(folder)


def test_the_size_is_known_before_and_is_the_size_on_disk(tmp_path: Path) -> None:
    write(tmp_path / "cache")
    seal_features(tmp_path / "cache", SHAPE)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors"))
    assert SHAPE.total_bytes <= on_disk <= SHAPE.total_bytes + 3 * 500


def test_a_cache_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    huge = shape_of(rows=10**3, length=4096, features=2**40, teacher=0, dtype="bfloat16")
    assert huge.rows_per_shard == 1
    with pytest.raises(PayloadError, match="GB free"):
        begin_features(tmp_path / "cache", huge)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_cannot_be_written_is_told_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    begin_features(folder, SHAPE)
    (tmp_path / ".cache.partial").rmdir()
    with pytest.raises(PayloadError, match="cannot be written") as raised:
        write_features(folder, SHAPE, count().__next__, made, lambda rows: None)
    assert raised.value.hint == "Shards written so far are kept."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["a bit of the features", "a bit of the teacher", "cut", "gone"])
def test_a_damaged_shard_is_refused_and_the_others_can_be_read(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    write(folder)
    seal_features(folder, SHAPE)
    shard = folder / "features-00001.safetensors"
    content = bytearray(shard.read_bytes())
    features, teacher = made(range(2, 3))
    assert teacher is not None
    marked = features if "features" in damage else teacher
    content[content.index(marked.view(torch.uint8).numpy().tobytes())] ^= 4
    match damage:
        case "cut":
            shard.write_bytes(content[:-1])
        case "gone":
            shard.unlink()
        case _:
            shard.write_bytes(content)
    cache = FeatureCache(folder)
    cache.read(0)
    cache.read(4)
    with pytest.raises(PayloadError, match=r"00001\.safetensors is missing or damaged"):
        cache.read(2)


def test_a_folder_that_was_not_sealed_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="no whole feature cache"):
        FeatureCache(tmp_path)
