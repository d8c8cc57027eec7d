import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.checksum import file_sha256
from payload.compile.artifact import read_artifact, write_artifact
from payload.errors import PayloadError
from tests.payload.compile.builders import FACTS, other_facts


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(["target", "drafter", "both"]), st.binary(max_size=2000)))
def test_blobs_come_back_as_they_were(tmp_path_factory, blobs):
    path = tmp_path_factory.mktemp("artifact") / "artifact.bin"
    artifact = write_artifact(path, FACTS, blobs)
    assert read_artifact(path, FACTS) == blobs
    assert (artifact.bytes, artifact.sha256) == (path.stat().st_size, file_sha256(path))


def test_an_artifact_from_elsewhere_is_refused_with_every_difference_named(tmp_path):
    path = tmp_path / "artifact.bin"
    write_artifact(path, other_facts(torch="2.13.0", arch="NVIDIA A100 sm_80"), {"drafter": b"x"})
    with pytest.raises(PayloadError) as caught:
        read_artifact(path, FACTS)
    assert caught.value.kind == "refused"
    assert "torch: 2.13.0, not 2.11.0+cu128" in caught.value.message
    assert "arch: NVIDIA A100 sm_80, not NVIDIA H200 sm_90" in caught.value.message
    assert "triton" not in caught.value.message


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_no_changed_byte_ever_reaches_torch(tmp_path_factory, position, flip):
    path = tmp_path_factory.mktemp("artifact") / "artifact.bin"
    blobs = {"drafter": bytes(range(256))}
    write_artifact(path, FACTS, blobs)
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= flip
    path.write_bytes(content)
    # In the header another spelling of the same JSON may remain the same; everything else is refused.
    with contextlib.suppress(PayloadError):
        assert list(read_artifact(path, FACTS).values()) == list(blobs.values())


@pytest.mark.parametrize("content", [b"", b"{}", b"[]\n", b"not an artifact", b"\xff\xfe\n"])
def test_something_else_in_its_place_is_refused(tmp_path, content):
    path = tmp_path / "artifact.bin"
    path.write_bytes(content)
    with pytest.raises(PayloadError, match="damaged"):
        read_artifact(path, FACTS)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2000))
def test_a_file_that_is_cut_off_or_has_more_at_its_end_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("artifact") / "artifact.bin"
    write_artifact(path, FACTS, {"drafter": bytes(range(256)), "target": b"x" * 100})
    content = path.read_bytes()
    for changed in (content[: length % len(content)], content + b"\0" * (length + 1)):
        path.write_bytes(changed)
        with pytest.raises(PayloadError, match="damaged"):
            read_artifact(path, FACTS)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PayloadError, match="cannot be read"):
        read_artifact(tmp_path / "none.bin", FACTS)
