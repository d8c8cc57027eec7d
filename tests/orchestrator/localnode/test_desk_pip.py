"""What pip on the desk is told of indexes reaches uv in the container, by pip's own rules of precedence."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.inventory import load_inventory
from orchestrator.localnode import desk_pip, node
from orchestrator.localnode.desk_pip import desk_index, desk_torch, torch_is_at_hand
from orchestrator.localnode.provision import base_python
from orchestrator.settings import IndexSettings, TorchPin

USER_FILE = ".config/pip/pip.conf"


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty desk: (environment, home folder, prefix of the venv)."""
    monkeypatch.setattr(desk_pip, "_SYSTEM_FILE", tmp_path / "etc/pip.conf")
    home, prefix = tmp_path / "home", tmp_path / "venv"
    home.mkdir()
    prefix.mkdir()
    return {"HOME": str(home), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}, home, prefix


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_settings_there_is_nothing_to_pass_on(desk):
    environment, _, prefix = desk
    assert desk_index(environment, prefix) == IndexSettings()


def test_the_environment_is_read(desk):
    environment, _, prefix = desk
    environment |= {
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://one.example/simple  https://two.example/simple",
        "PIP_FIND_LINKS": "/wheels https://links.example/",
        "PIP_CERT": "/ca.pem",
        "PIP_PROXY": "http://proxy.example:3128",
        "PIP_DEFAULT_TIMEOUT": "900",
        "PIP_NO_INDEX": "1",
    }
    assert desk_index(environment, prefix) == IndexSettings(
        index_url="https://mirror.example/simple",
        extra_index_urls=("https://one.example/simple", "https://two.example/simple"),
        find_links=("/wheels", "https://links.example/"),
        certificate="/ca.pem",
        http_proxy="http://proxy.example:3128",
        https_proxy="http://proxy.example:3128",
        timeout_s=900,
        offline=True,
    )


def test_a_configuration_file_is_read_with_lists_over_several_lines(desk):
    environment, home, prefix = desk
    write(home / USER_FILE, "[global]\nextra-index-url =\n    https://a.example/\n    https://b.example/\n")
    assert desk_index(environment, prefix).extra_index_urls == ("https://a.example/", "https://b.example/")


def test_each_source_goes_over_the_one_before(desk, tmp_path):
    environment, home, prefix = desk
    steps = [
        (tmp_path / "xdg/pip/pip.conf", "xdg"),
        (tmp_path / "etc/pip.conf", "system"),
        (home / ".pip/pip.conf", "legacy"),
        (home / USER_FILE, "user"),
        (prefix / "pip.conf", "venv"),
    ]
    for path, name in steps:
        write(path, f"[global]\nindex-url = https://{name}.example\n")
        assert desk_index(environment, prefix).index_url == f"https://{name}.example"
    chosen = tmp_path / "chosen.conf"
    write(chosen, "[global]\nindex-url = https://chosen.example\n")
    environment["PIP_CONFIG_FILE"] = str(chosen)
    assert desk_index(environment, prefix).index_url == "https://chosen.example"
    environment["PIP_INDEX_URL"] = "https://environment.example"
    assert desk_index(environment, prefix).index_url == "https://environment.example"


def test_the_section_of_install_goes_over_the_global_one_and_others_are_not_read(desk):
    environment, home, prefix = desk
    write(
        home / USER_FILE,
        "[install]\ncert = /install\n[global]\ncert = /global\ntimeout = 400\n[download]\ncert = /other\n",
    )
    assert (desk_index(environment, prefix).certificate, desk_index(environment, prefix).timeout_s) == (
        "/install",
        400,
    )


def test_a_chosen_file_takes_the_place_of_the_users(desk, tmp_path):
    environment, home, prefix = desk
    write(home / USER_FILE, "[global]\ncert = /user\n")
    write(tmp_path / "chosen", "[global]\ntimeout = 500\n")
    environment["PIP_CONFIG_FILE"] = str(tmp_path / "chosen")
    assert desk_index(environment, prefix) == IndexSettings(timeout_s=500)


def test_dev_null_as_the_chosen_file_turns_all_files_off(desk):
    environment, home, prefix = desk
    write(home / USER_FILE, "[global]\ncert = /user\n")
    write(prefix / "pip.conf", "[global]\ncert = /venv\n")
    environment["PIP_CONFIG_FILE"] = "/dev/null"
    assert desk_index(environment, prefix) == IndexSettings()


@pytest.mark.parametrize(
    "junk", [b"no section\n", b"[global\n", b"\xff\xfe\x00", b"[global]\ncert\n", b"[global]\n[global]\n"]
)
def test_a_file_that_cannot_be_read_counts_as_empty(desk, junk):
    environment, home, prefix = desk
    write(home / USER_FILE, "")
    (home / USER_FILE).write_bytes(junk)
    assert desk_index(environment, prefix) == IndexSettings()


def test_a_percent_sign_is_just_a_percent_sign(desk):
    environment, home, prefix = desk
    write(home / USER_FILE, "[global]\nindex-url = https://user:p%40ss@mirror.example/simple\n")
    assert desk_index(environment, prefix).index_url == "https://user:p%40ss@mirror.example/simple"


def test_folders_of_links_become_absolute(desk, tmp_path, monkeypatch):
    environment, home, prefix = desk
    monkeypatch.chdir(tmp_path)
    environment["PIP_FIND_LINKS"] = "wheels ~/mine file:///there"
    assert desk_index(environment, prefix).find_links == (
        str(tmp_path / "wheels"),
        str(home / "mine"),
        "file:///there",
    )


def test_proxies_and_certificates_of_the_environment_count_as_they_do_for_pip(desk):
    environment, _, prefix = desk
    environment |= {
        "HTTP_PROXY": "http://a",
        "https_proxy": "http://b",
        "NO_PROXY": "x,y",
        "REQUESTS_CA_BUNDLE": "/ca",
    }
    assert desk_index(environment, prefix) == IndexSettings(
        http_proxy="http://a", https_proxy="http://b", no_proxy="x,y", certificate="/ca"
    )


@pytest.mark.parametrize(
    ("text", "timeout_s"),
    [("15", 300), ("301", 301), ("600.5", 600), ("soon", 300), ("inf", 300), ("nan", 300)],
)
def test_a_timeout_is_at_least_what_a_gigabyte_needs(desk, text, timeout_s):
    environment, _, prefix = desk
    environment["PIP_TIMEOUT"] = text
    assert desk_index(environment, prefix).timeout_s == timeout_s


def test_the_settings_are_those_that_pip_itself_reports(desk, tmp_path):
    """Compared with a real pip where the desk has one."""
    python = next(
        (found for name in ("python3", base_python()) if (found := shutil.which(name)) and _has_pip(found)),
        None,
    )
    if python is None:
        pytest.skip("no pip on this machine")
    environment, home, prefix = desk
    write(home / USER_FILE, "[global]\nfind-links = /a /b\ntimeout = 700\n")
    write(tmp_path / "xdg/pip/pip.conf", "[global]\nindex-url = https://xdg.example\ntimeout = 1\n")
    environment["PIP_EXTRA_INDEX_URL"] = "https://extra.example"
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    reported = dict(line.split("=", 1) for line in listed.splitlines())
    ours = desk_pip.pip_settings(environment, prefix)
    assert reported["global.index-url"] == f"'{ours['index-url']}'"
    assert reported["global.find-links"] == f"'{ours['find-links']}'"
    assert reported["global.timeout"] == f"'{ours['timeout']}'"
    assert reported[":env:.extra-index-url"] == f"'{ours['extra-index-url']}'"


def _has_pip(python: str) -> bool:
    return (
        subprocess.run([python, "-c", "import pip"], capture_output=True, timeout=30, check=False).returncode
        == 0
    )


def wheel(folder: Path, version: str, tag: str = "py3-none-any") -> Path:
    """A torch wheel with metadata and nothing else in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-{tag}.whl"
    info = f"torch-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,\n"])}.items():
            archive.writestr(name, text)
    return path


def index_of(folder: Path, *wheels: Path) -> str:
    """A folder in the layout of a simple index that holds ``wheels``; its URL."""
    project = folder / "torch"
    project.mkdir(parents=True)
    links = [shutil.copy(path, project) for path in wheels]
    project.joinpath("index.html").write_text(
        "".join(f'<a href="{Path(x).name}">{Path(x).name}</a>\n' for x in links)
    )
    return folder.as_uri()


def at_hand(version: str, **settings) -> bool:
    return torch_is_at_hand(version, IndexSettings(**settings), python=sys.executable)


def test_torch_is_at_hand_when_a_folder_of_links_holds_the_pinned_version(tmp_path):
    wheel(tmp_path / "links", "9.1.0+cpu")
    assert at_hand("9.1.0", find_links=(str(tmp_path / "links"),))
    assert at_hand("9.1.0", find_links=((tmp_path / "links").as_uri(), "https://nowhere.invalid/links"))
    assert not at_hand("9.2.0", find_links=(str(tmp_path / "links"),))


def test_a_wheel_for_another_python_is_not_at_hand(tmp_path):
    wheel(tmp_path / "links", "9.1.0", "cp27-none-any")
    assert not at_hand("9.1.0", find_links=(str(tmp_path / "links"),))


def test_torch_is_at_hand_in_any_of_several_indexes_that_are_folders(tmp_path):
    first = index_of(tmp_path / "first", wheel(tmp_path, "9.0.0"))
    second = index_of(tmp_path / "second", wheel(tmp_path, "9.1.0"))
    assert at_hand("9.0.0", extra_index_urls=(first, second))
    assert at_hand("9.1.0", extra_index_urls=(first, second))
    assert at_hand("9.1.0", index_url=first, extra_index_urls=(second, "https://nowhere.invalid/simple"))
    assert not at_hand("9.2.0", extra_index_urls=(first, second))


def test_no_local_source_means_not_at_hand_and_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert not at_hand("2.13.0")
    assert not at_hand(
        "2.13.0", index_url="https://mirror.invalid/simple", extra_index_urls=("https://x.invalid",)
    )


def test_folders_that_are_not_there_and_an_interpreter_that_is_not_there_mean_not_at_hand(tmp_path):
    assert not at_hand("9.1.0", find_links=(str(tmp_path / "nothing"),))
    assert not at_hand("9.1.0", extra_index_urls=((tmp_path / "nothing").as_uri(),))
    wheel(tmp_path / "links", "9.1.0")
    missing = str(tmp_path / "no-python")
    assert not torch_is_at_hand("9.1.0", IndexSettings(find_links=(str(tmp_path / "links"),)), python=missing)


def test_torch_comes_from_the_desk_where_it_has_the_version_and_else_from_the_cpu_index(tmp_path):
    wheel(tmp_path / "links", "9.1.0+cpu")
    environment = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": str(tmp_path / "links")}
    assert desk_torch(environment, version="9.1.0") == TorchPin(version="9.1.0", backend=None)
    assert desk_torch(environment, version="9.2.0") == TorchPin(version="9.2.0", backend="cpu")


def test_the_inventory_holds_the_desks_settings_and_takes_torch_from_where_it_is(tmp_path):
    wheel(tmp_path / "links", "9.1.0+cpu")
    environment = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(tmp_path / "links"),
        "PIP_INDEX_URL": "https://user:secret@mirror.example/simple",
    }
    state = tmp_path / "state"
    try:
        plan = node.ContainerPlan(torch_version="9.1.0")
        info = node.start(state, plan=plan, environment=environment)
        container = load_inventory(info.inventory).hosts["local"].containers["200"]
        assert container.index.find_links == (str(tmp_path / "links"),)
        assert container.index.index_url == "https://user:secret@mirror.example/simple"
        assert (container.torch.version, container.torch.backend) == ("9.1.0", None)
        node.start(state, environment={"PIP_CONFIG_FILE": "/dev/null"})
        container = load_inventory(info.inventory).hosts["local"].containers["200"]
        assert (container.index.find_links, container.torch.backend) == ((), "cpu")
        secrets = [path for path in state.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
        assert secrets == []
    finally:
        node.stop(state)
