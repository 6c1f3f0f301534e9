"""The stack: a real Redis, a real Flower, and processes that stand in for workers and say so.

See `stand_in/lorry_workers`. That the real workers do their part is proven by the end-to-end tests.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from lorry.cli import app
from lorry.cli import plugins as cli_plugins
from lorry.local import local
from lorry.stack import Stack, StackSettings, process, running_stack
from lorry.stack.process import ProcessSpec, describe_exit, restart_delay
from lorry.stack.programs import complete_models, free_port, worker_specs
from lorry.stack.redis_server import RedisServer
from lorry.stack.settings import load_settings
from lorry.stack.state import StackRunning
from lorry_jobs.errors import ServiceUnavailable, UserError
from lorry_jobs.mailbox import Mailbox
from lorry_jobs.settings import masked_url

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"

SLEEPER = ProcessSpec("sleeper", (sys.executable, "-c", "import time; time.sleep(600)"))


@pytest.fixture(autouse=True)
def stand_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find the stand-in for the workers first, and nothing of the user's."""
    for name in [name for name in os.environ if name.startswith("LORRY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (STAND_IN, ROOT / "jobs", ROOT / "sdk"))))
    monkeypatch.setenv("LORRY_HOME", str(tmp_path / "home"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def stack_of(
    home: Path, *processes: ProcessSpec, events: list[str] | None = None, start_timeout: float = 30.0
) -> Stack:
    return Stack(
        StackSettings(home=home, flower=False, start_timeout_seconds=start_timeout),
        processes=processes or (SLEEPER,),
        on_event=None if events is None else events.append,
    )


def python(name: str, program: str, **options: float) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-u", "-c", program), **options)


def runs(pid: int) -> bool:
    """Whether there is such a process; a zombie that no init has buried is none."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.strip().startswith("Z")


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


# -- start, state, stop ----------------------------------------------------------------------------------


def test_a_running_stack_can_be_found_and_leaves_nothing_behind(home: Path) -> None:
    with stack_of(home) as stack:
        info = running_stack(home)
        assert info is not None
        assert info.pid == os.getpid()
        assert info.pids == stack.pids
        assert set(info.pids) == {"redis", "sleeper"}
        with redis.Redis.from_url(info.url) as client:
            assert client.ping()
        assert stat.S_IMODE((home / "stack.json").stat().st_mode) == 0o600
        assert stat.S_IMODE((home / "logs" / "sleeper.log").stat().st_mode) == 0o600
        assert "password" not in repr(info)
        assert info.url not in repr(info)
    assert running_stack(home) is None
    assert not (home / "stack.json").exists()
    assert not [pid for pid in info.pids.values() if runs(pid)]


def test_url_and_data_stay_from_run_to_run(home: Path) -> None:
    with stack_of(home) as stack:
        first = stack.url
        with redis.Redis.from_url(first) as client:
            client.set("key", "kept")
    with stack_of(home) as stack:
        assert stack.url == first
        with redis.Redis.from_url(first) as client:
            assert client.get("key") == b"kept"


def test_a_remembered_port_that_is_taken_is_replaced(home: Path) -> None:
    (home / "redis").mkdir(parents=True)
    with RedisServer(home / "other", free_port(), "pw", home / "other.log") as other:
        (home / "redis" / "port").write_text(str(other.port))
        with stack_of(home) as stack:
            assert f":{other.port}/" not in stack.url


def test_a_second_stack_in_one_home_is_refused(home: Path) -> None:
    with stack_of(home) as stack:
        with pytest.raises(StackRunning) as caught, stack_of(home):
            pass
        message = str(caught.value)
        assert f"pid {os.getpid()}" in message
        assert "since 2" in message
        assert masked_url(stack.url) in message
        assert "lorry down" in message
        assert stack.url not in message
        assert running_stack(home) is not None  # the refusal has not touched the first one's state


def test_a_stale_state_file_is_not_believed(home: Path) -> None:
    with stack_of(home):
        left = {name: (home / name).read_text() for name in ("stack.json", "stack.lock")}
    for name, text in left.items():
        (home / name).write_text(text)
    assert running_stack(home) is None
    with stack_of(home):
        assert running_stack(home) is not None


def test_children_are_told_where_everything_is(home: Path) -> None:
    program = "import os, json; print(json.dumps(dict(os.environ))); import time; time.sleep(600)"
    log = home / "logs" / "teller.log"
    with stack_of(home, python("teller", program)) as stack:
        eventually(lambda: log.read_text().endswith("}\n"))
        told = json.loads(log.read_text())
        assert told["LORRY_URL"] == stack.url
        assert told["LORRY_HOME"] == str(home)
        assert told["LORRY_STORE_DIR"] == str(home / "store")
        assert told["LORRY_MODELS_DIR"] == str(home / "models")


def test_a_process_that_ends_before_it_is_ready_stops_the_start(home: Path) -> None:
    waits = ProcessSpec("waits", SLEEPER.argv, ready=lambda url, pid: False)
    stack = stack_of(home, waits, python("broken", "print('no such model'); raise SystemExit(3)"))
    with pytest.raises(ServiceUnavailable, match=r"broken \(pid \d+\) ended with exit code 3") as caught:
        stack.start()
    assert "no such model" in str(caught.value)
    assert running_stack(home) is None
    with stack_of(home):  # the lock is free again
        pass


def test_a_process_that_is_never_ready_is_said_with_its_log(home: Path) -> None:
    program = "import time; print('loading'); time.sleep(600)"
    slow = ProcessSpec("slow", (sys.executable, "-uc", program), ready=lambda url, pid: False)
    with pytest.raises(ServiceUnavailable, match=r"slow .* not ready after 1 s") as caught:
        stack_of(home, slow, start_timeout=1.0).start()
    assert "loading" in str(caught.value)


def test_the_last_runs_log_is_kept(home: Path) -> None:
    for run in ("first", "second"):
        program = f"print('{run}'); import time; time.sleep(600)"
        with stack_of(home, python("speaker", program)):
            eventually(lambda: (home / "logs" / "speaker.log").read_text())
    assert (home / "logs" / "speaker.log").read_text() == "second\n"
    assert (home / "logs" / "speaker.log.1").read_text() == "first\n"


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(home: Path) -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
        "time.sleep(600)"
    )
    log = home / "logs" / "deaf.log"
    with stack_of(home, python("deaf", program, stop_seconds=0.3)) as stack:
        eventually(lambda: log.read_text().endswith("\n"))
        grandchild = int(log.read_text())
        pids = [*stack.pids.values(), grandchild]
    assert not [pid for pid in pids if runs(pid)]


# -- an existing Redis -----------------------------------------------------------------------------------


def test_lorry_url_is_used_and_left_running(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(home / "other", free_port(), "pw", home / "other.log") as other:
        monkeypatch.setenv("LORRY_URL", other.url)
        with Stack(StackSettings(flower=False), processes=[SLEEPER]) as stack:
            assert stack.url == other.url
            assert set(stack.pids) == {"sleeper"}
        assert other.is_running


def test_a_lorry_url_where_nothing_answers_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORRY_URL", f"redis://:secret@127.0.0.1:{free_port()}/0")
    with pytest.raises(ServiceUnavailable, match="Unset LORRY_URL") as caught:
        Stack(StackSettings(flower=False), processes=[SLEEPER]).start()
    assert "secret" not in str(caught.value)


# -- looking after the children --------------------------------------------------------------------------


def test_a_killed_worker_is_started_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RESTART_DELAYS_SECONDS", (0.1,))
    events: list[str] = []
    with stack_of(home, SLEEPER, events=events) as stack:
        before = stack.pids["sleeper"]
        os.kill(before, signal.SIGKILL)
        eventually(lambda: stack.pids["sleeper"] != before)
        eventually(lambda: (info := running_stack(home)) and info.pids == stack.pids)
        assert runs(stack.pids["sleeper"])
        assert stack.failure is None
    assert [line for line in events if "starts again in 0.1 s: sleeper" in line and "SIGKILL" in line]


def test_a_worker_that_keeps_ending_is_given_up_and_the_last_one_ends_the_stack(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RESTART_DELAYS_SECONDS", (0.05, 0.05, 0.05))
    events: list[str] = []
    stack = stack_of(home, python("failing", "print('oh no'); raise SystemExit(7)"), events=events)
    # No sign of readiness is asked for; a start-up that is over before the end of the process is likely,
    # and the other order is `test_a_process_that_ends_before_it_is_ready_stops_the_start`.
    monkeypatch.setattr(stack, "_wait_until_ready", lambda seconds: None)
    with stack, pytest.raises(ServiceUnavailable, match="no worker is left: failing") as caught:
        stack.wait()
    assert "oh no" in str(caught.value)
    assert sum("starts again" in line for line in events) == 3
    assert sum("given up after 4 ends" in line for line in events) == 1


def test_the_death_of_redis_ends_the_stack(home: Path) -> None:
    with stack_of(home) as stack:
        pids = stack.pids
        os.kill(pids["redis"], signal.SIGKILL)
        with pytest.raises(ServiceUnavailable, match=r"lost its Redis: redis .* was ended by SIGKILL"):
            stack.wait()
        eventually(lambda: not runs(pids["sleeper"]))
        assert running_stack(home) is None


def test_a_killed_guard_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RESTART_DELAYS_SECONDS", (0.05,))
    with stack_of(home) as stack:
        guard, child = stack._guard.pid, stack.pids["sleeper"]
        for pid in (guard, child):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: stack.pids["sleeper"] != child)
        eventually(lambda: runs(stack._guard.pid) and stack._guard.pid != guard)
        assert stack.failure is None


def test_pauses_grow_and_end() -> None:
    assert [restart_delay(failures) for failures in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, None]


def test_exits_are_described() -> None:
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-signal.SIGTERM) == "was ended by SIGTERM"
    assert "memory" in describe_exit(-signal.SIGKILL)


# -- Flower ----------------------------------------------------------------------------------------------


def test_flower_needs_its_login_and_shows_no_secret_in_ps(home: Path) -> None:
    taken = free_port()
    with RedisServer(home / "other", taken, "pw", home / "other.log"):
        settings = StackSettings(home=home, flower_port=taken)
        with Stack(settings, processes=[SLEEPER]) as stack:
            flower = stack.flower
            assert flower is not None
            assert not flower.url.endswith(f":{taken}")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{flower.url}/workers")
            login = base64.b64encode(f"{flower.user}:{flower.password}".encode()).decode()
            request = urllib.request.Request(f"{flower.url}/workers", headers={"Authorization": f"Basic {login}"})
            with urllib.request.urlopen(request) as page:
                assert page.status == 200
            shown = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True).stdout
            assert "celery flower" in shown
            assert flower.password not in shown
            assert (home / "redis" / "password").read_text().strip() not in shown
            pid = stack.pids["flower"]
        assert not runs(pid)


# -- settings and command lines --------------------------------------------------------------------------


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORRY_MODELS", "smollm2, tiny=/models/tiny,smollm2")
    monkeypatch.setenv("LORRY_WORKERS", "2")
    monkeypatch.setenv("LORRY_URL", "")
    monkeypatch.setenv("LORRY_REDIS_PASSWORD", "secret")
    settings = load_settings(workers=3)
    assert settings.models == ["smollm2", "tiny=/models/tiny"]
    assert settings.workers == 3
    assert settings.url is None
    assert "secret" not in str(settings.describe())
    assert settings.describe()["redis_password"] == "**********"


def test_a_wrong_setting_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORRY_URL", "https://user:secret@example.org")
    with pytest.raises(UserError, match=r"url: .*redis://") as caught:
        load_settings()
    assert "secret" not in str(caught.value)
    assert load_settings(own_redis=True).url is None


def test_each_model_gets_its_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    specs = worker_specs(["smollm2", "org/model=weights"], workers=2)
    assert [spec.name for spec in specs] == [
        "worker-smollm2-1",
        "worker-smollm2-2",
        "worker-org-model-1",
        "worker-org-model-2",
    ]
    assert specs[3].argv[2:] == (
        *("-m", "lorry_workers"),
        *("--model", f"org/model={tmp_path}/weights"),
        *("--name", "org-model-2"),
    )


def test_only_complete_models_are_found(tmp_path: Path) -> None:
    for name in (
        "smollm2/lorry-model.json",
        "Qwen/small/lorry-model.json",
        ".smollm2-x/lorry-model.json",
        "copied/config.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    assert complete_models(tmp_path) == ["Qwen/small", "smollm2"]
    assert complete_models(tmp_path / "missing") == []


# -- lorry.local() ---------------------------------------------------------------------------------------


def test_local_runs_a_stack_inside_the_block(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORRY_URL", "http://a-gateway:8000")
    with local("tiny", workers=2) as stack:
        assert os.environ["LORRY_URL"] == stack.url
        assert set(stack.pids) == {"redis", "worker-tiny-1", "worker-tiny-2"}
        with redis.Redis.from_url(stack.url) as client:
            assert len(Mailbox(client).live_workers("tiny")) == 2
        assert not home.exists()  # nothing in the user's home
        pids, temporary = stack.pids, stack.home
        warm = stack.logs / "worker-tiny-1.log"
        assert "serves tiny" in warm.read_text()
    assert os.environ["LORRY_URL"] == "http://a-gateway:8000"
    assert not [pid for pid in pids.values() if runs(pid)]
    assert not temporary.exists()


def test_local_says_why_a_worker_is_not_ready() -> None:
    with pytest.raises(ServiceUnavailable, match="this model cannot be loaded"), local("broken"):
        pass
    with (
        pytest.raises(ServiceUnavailable, match="serves never-ready"),
        local("never-ready", start_timeout=2.0),
    ):
        pass
    assert "LORRY_URL" not in os.environ


def test_local_without_a_model_needs_one_on_the_disk() -> None:
    with pytest.raises(UserError, match="lorry models fetch smollm2"), local():
        pass


def test_local_notes_on_your_error_that_the_stack_has_failed() -> None:
    def work(stack: Stack) -> None:
        os.kill(stack.pids["redis"], signal.SIGKILL)
        eventually(lambda: stack.failure)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, local("tiny") as stack:
        work(stack)
    assert "lost its Redis" in caught.value.__notes__[0]


# -- the command line ------------------------------------------------------------------------------------


class Up:
    """`lorry up` as a process of its own."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.output = home.parent / "up.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lorry", "up", *options], stdout=output, stderr=output
            )

    def wait_until_ready(self) -> dict[str, int]:
        eventually(lambda: running_stack(self.home) or self.process.poll() is not None, seconds=60)
        info = running_stack(self.home)
        assert info is not None, self.output.read_text()
        return info.pids

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
            self.process.wait(60)


@pytest.fixture
def up(home: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*options: str) -> Up:
        started.append(Up(home, *options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def lorry(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lorry", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_up_stops_everything(up: Callable[..., Up], home: Path, number: signal.Signals) -> None:
    running = up("--model", "tiny", "--no-flower")
    pids = running.wait_until_ready()
    assert set(pids) == {"redis", "worker-tiny-1"}
    running.send(number)
    assert running.process.wait(20) == 0
    assert not [pid for pid in pids.values() if runs(pid)]
    assert running_stack(home) is None
    printed = running.output.read_text()
    assert "Lorry is up" in printed
    assert "export LORRY_URL='redis://:" in printed
    assert printed.endswith("Stopped.\n")
    assert "warm stop" in (home / "logs" / "worker-tiny-1.log").read_text()


def test_a_signal_while_it_starts_stops_everything(up: Callable[..., Up], home: Path) -> None:
    running = up("--model", "never-ready", "--no-flower")
    eventually(lambda: (home / "logs" / "worker-never-ready-1.log").exists(), seconds=60)
    running.send(signal.SIGINT)
    assert running.process.wait(20) == 0
    assert running.output.read_text().endswith("Stopped.\n")


def test_when_up_is_killed_its_children_end(up: Callable[..., Up], home: Path) -> None:
    running = up("--model", "tiny", "--no-flower")
    pids = running.wait_until_ready()
    running.send(signal.SIGKILL)
    running.process.wait(10)
    eventually(lambda: not [pid for pid in pids.values() if runs(pid)])
    assert running_stack(home) is None


def test_status_down_and_the_second_up(up: Callable[..., Up], home: Path) -> None:
    nothing = lorry("status")
    assert nothing.returncode == 1
    assert "Nothing runs" in nothing.stdout
    running = up("--model", "tiny", "--no-flower")
    running.wait_until_ready()
    second = lorry("up", "--model", "tiny")
    assert second.returncode == 1
    assert "already" in second.stderr
    assert str(running.process.pid) in second.stderr
    assert "Traceback" not in second.stderr
    shown = lorry("status")
    assert shown.returncode == 0
    assert "worker-tiny-1" in shown.stdout
    assert ":***@" in shown.stdout
    assert (home / "redis" / "password").read_text().strip() not in shown.stdout
    stopped = lorry("down")
    assert stopped.returncode == 0
    assert stopped.stdout == "Stopped.\n"
    assert running.process.wait(5) == 0
    assert "Nothing runs" in lorry("down").stdout


def test_down_does_not_end_the_program_that_holds_a_local_stack(home: Path) -> None:
    with local("tiny", home=home):
        refused = lorry("down")
        assert refused.returncode == 1
        assert "lorry.local()" in refused.stderr
        assert running_stack(home) is not None


def test_up_serves_what_is_on_the_disk_or_says_how_to_get_something(up: Callable[..., Up], home: Path) -> None:
    without = lorry("up")
    assert without.returncode == 1
    assert "lorry models fetch smollm2" in " ".join(without.stderr.split())  # however the path before it wraps
    for model in ("one", "two"):
        (home / "models" / model).mkdir(parents=True)
        (home / "models" / model / "lorry-model.json").write_text("{}")
    assert set(up("--no-flower").wait_until_ready()) == {"redis", "worker-one-1", "worker-two-1"}


def test_version() -> None:
    shown = CliRunner().invoke(app, ["version"])
    assert shown.exit_code == 0
    assert f"celery {importlib.metadata.version('celery')}" in shown.stdout


# -- commands of plugins ---------------------------------------------------------------------------------


def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    """An installed package whose entry point adds `lorry plugged`."""
    (tmp_path / "plugged_in.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("plugged_in", None)
    entry = importlib.metadata.EntryPoint("plugged", "plugged_in:command", cli_plugins.GROUP)
    monkeypatch.setattr(cli_plugins, "entry_points", lambda group: [entry])


@pytest.mark.parametrize(
    "source",
    [
        "def command(name: str, loud: bool = False):\n    print('hello', name, loud)",
        "import typer\ncommand = typer.Typer()\n"
        "@command.command()\ndef only(name: str, loud: bool = False):\n    print('hello', name, loud)",
    ],
)
def test_a_plugin_is_a_function_or_a_typer_app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    plugin(monkeypatch, tmp_path, source)
    shown = CliRunner().invoke(app, ["plugged", "you", "--loud"])
    assert shown.exit_code == 0, shown.output
    assert "hello you True" in shown.stdout
    assert "--loud" in CliRunner().invoke(app, ["plugged", "--help"]).stdout


def test_help_lists_a_plugin_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugin(monkeypatch, tmp_path, "raise SystemExit('imported')")
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert "plugged" in shown.stdout
    assert "plugged_in" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_torch", "needs the module 'no_such_torch'"),
        ("from typing import NoSuchName", "cannot be loaded"),
        ("nothing = 1", "cannot be loaded"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, message: str
) -> None:
    plugin(monkeypatch, tmp_path, source)
    shown = CliRunner().invoke(app, ["plugged"])
    assert isinstance(shown.exception, cli_plugins.CommandUnavailable)
    assert message in str(shown.exception)
