"""Any argv, quoted once, arrives byte for byte: through SSH, the login shell, pct and the container's init."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.orchestrator.localnode.conftest import rootfs_of, run

_FORMAT = "%s\\0"  # printf repeats it for each argument

any_bytes = st.binary(max_size=40).map(lambda raw: raw.replace(b"\0", b"0"))
any_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40).map(
    str.encode
)
shell_text = st.text(st.sampled_from("'\"\\$`!*?[]{}()<>|&;#~ \t\n\r=-%^\x01\x7f"), max_size=20).map(
    str.encode
)
dashes = st.sampled_from(
    [b"-", b"--", b"-n", b"--keep-env", b"--keep-env=0", b"-rf", b"", b"~", b"$HOME", b"*", b"\n"]
)
arguments = st.one_of(any_bytes, any_text, shell_text, dashes)


def _quoted(argv: list[bytes]) -> bytes:
    return os.fsencode(shlex.join([os.fsdecode(part) for part in argv]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argv=st.lists(arguments, min_size=1, max_size=8))
def test_an_argv_quoted_once_arrives_byte_exact_in_the_container(client, argv):
    done = run(client, _quoted([b"pct", b"exec", b"200", b"--", b"printf", _FORMAT.encode(), *argv]))
    assert done.stderr == b""
    assert done.stdout.split(b"\0")[:-1] == argv
    assert done.status == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=shell_text.filter(lambda raw: b"/" not in raw and raw.strip(b".") != b""), text=any_bytes)
def test_the_name_of_the_command_itself_may_be_anything(client, running_node, name, text):
    program = Path(os.fsdecode(os.fsencode(rootfs_of(running_node) / "tmp") + b"/" + name))
    program.write_bytes(b'#!/bin/sh\nprintf "%s\\0" "$0" "$1"\n')
    program.chmod(0o755)
    try:
        done = run(client, _quoted([b"pct", b"exec", b"200", b"--", os.fsencode(program), text]))
    finally:
        program.unlink()
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(program), text]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200_000))
def test_input_and_output_are_bytes_all_the_way(client, data):
    done = run(client, "pct exec 200 -- tee /dev/stderr", data)
    assert done.stdout == data
    assert done.stderr == data


def test_an_argv_of_a_hundred_thousand_bytes_arrives(client):
    argv = [b"x" * 100_000, b"'" * 5]
    done = run(client, _quoted([b"pct", b"exec", b"200", b"--", b"printf", _FORMAT.encode(), *argv]))
    assert done.stdout.split(b"\0")[:-1] == argv


def test_five_megabytes_on_standard_input_arrive(client):
    data = bytes(range(256)) * 20_000
    assert run(client, "pct exec 200 -- sha256sum", data).stdout == run(client, "sha256sum", data).stdout
    assert run(client, "pct exec 200 -- wc -c", data).stdout.strip() == str(len(data)).encode()
