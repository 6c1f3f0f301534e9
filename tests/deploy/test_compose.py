"""compose.yaml without Docker: valid by the official schema, and nothing named in it is missing here."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import flower.options  # noqa: F401 - defines the options that FLOWER_... variables set
import jsonschema
import pytest
import yaml
from tornado.options import options as tornado_options

import lorry_jobs.paths
from lorry.stack.redis_server import RedisServer
from lorry.stack.settings import StackSettings

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
FILES = ["compose.yaml", "compose.gpu.yaml"]

# What the official images bring along, as far as it is used.
IMAGE_COMMANDS = {"redis:8-alpine": {"redis-server", "redis-cli", "grep"}}
# Variables of other programs, with where they are documented.
FOREIGN_VARIABLES = {
    "REDISCLI_AUTH": "redis-cli --help",
    "CELERY_BROKER_URL": "celery/app/utils.py",
}

Compose = dict[str, Any]
VARIABLE = re.compile(r"\$\{(\w+)(:?[-?])?([^}]*)\}")


def load(name: str) -> Compose:
    loaded: Compose = yaml.safe_load((ROOT / name).read_text())
    return loaded


COMPOSE = load("compose.yaml")
SERVICES: Compose = COMPOSE["services"]


class Stage:
    """One `FROM ... AS name` of a Dockerfile, with the lines of the stages that it builds upon."""

    def __init__(self, dockerfile: Path, target: str) -> None:
        text = dockerfile.read_text().replace("\\\n", " ")
        stages: dict[str, tuple[str, list[str]]] = {}
        for line in text.splitlines():
            if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
                stages[match[2]] = (match[1], [])
                current = match[2]
            elif stages and line and not line.startswith("#"):
                stages[current][1].append(line)
        parent, self.lines = stages[target]
        while parent in stages:
            parent, lines = stages[parent]
            self.lines = lines + self.lines
        self.image = parent

    def every(self, instruction: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.lines if line.startswith(instruction + " ")]

    @property
    def entrypoint(self) -> list[str]:
        found: list[str] = json.loads(self.every("ENTRYPOINT")[-1])
        return found


def stage_of(service: Compose) -> Stage | None:
    build = service.get("build")
    return Stage(ROOT / build["context"] / build["dockerfile"], build["target"]) if build else None


STAGES = {name: stage for name, service in SERVICES.items() if (stage := stage_of(service))}


def commands() -> list[tuple[str, list[str]]]:
    """Every command line that the services run, health checks too, as (service, words)."""
    found = []
    for name, service in SERVICES.items():
        stage = STAGES.get(name)
        entrypoint = service.get("entrypoint") or (stage.entrypoint if stage else [])
        found.append((name, [*entrypoint, *service.get("command", [])]))
        kind, *test = service.get("healthcheck", {}).get("test", ["NONE"])
        if kind == "CMD":
            found.append((name, test))
        elif kind == "CMD-SHELL":
            found.extend((name, part.split()) for part in re.split(r"\||&&|;", test[0]))
    return found


# -- the file itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid_by_the_compose_specification(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(load(name))


def test_the_schema_is_strict_about_what_we_use() -> None:
    for path, wrong in [(("services", "worker"), "helthcheck"), (("services", "redis", "healthcheck"), "intervall")]:
        broken = copy.deepcopy(COMPOSE)
        part = broken
        for key in path:
            part = part[key]
        part[wrong] = {}
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(broken)


def test_overrides_add_to_services_that_exist() -> None:
    assert set(load("compose.gpu.yaml")["services"]) <= set(SERVICES)


def test_volumes_and_configs_are_declared_and_used() -> None:
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert mounted == set(COMPOSE["volumes"])
    used = {config["source"] for service in SERVICES.values() for config in service.get("configs", [])}
    assert used == set(COMPOSE["configs"])


# -- what an operator relies on --------------------------------------------------------------------------


def test_everything_that_keeps_running_has_a_health_check_and_a_restart_policy() -> None:
    for name, service in SERVICES.items():
        if "profiles" not in service:
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped", name


def test_services_wait_for_a_healthy_redis() -> None:
    for name in ("worker", "flower"):
        assert SERVICES[name]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_workers_can_be_scaled_and_have_time_to_stop() -> None:
    worker = SERVICES["worker"]
    assert not {"container_name", "ports", "hostname"} & set(worker)
    assert worker["stop_grace_period"] == "2m"


def test_images_are_pinned_and_ours_run_as_a_user() -> None:
    for name, service in SERVICES.items():
        stage = STAGES.get(name)
        image = stage.image if stage else service["image"]
        assert re.fullmatch(r"[a-z/]+:\d[\w.-]*", image), name
        if stage:
            assert stage.every("USER")[-1:] == ["lorry"], name


def test_data_lies_on_volumes_that_belong_to_the_user() -> None:
    for name, stage in STAGES.items():
        made = " ".join(stage.every("RUN"))
        for volume in SERVICES[name].get("volumes", []):
            assert f" {volume.split(':')[1]}" in made, name


def test_redis_is_configured_as_lorry_up_configures_it(tmp_path: Path) -> None:
    """Both files say the same, apart from address, port, folder and how the server is kept running."""
    content = COMPOSE["configs"]["redis.conf"]["content"]
    by_compose = set(VARIABLE.sub(_default, content).splitlines())
    by_lorry_up = set(RedisServer(tmp_path, 1, "", tmp_path / "log")._config().splitlines())
    own = ("bind ", "port ", "dir ", "daemonize ", "protected-mode ", "requirepass ")
    assert {line for line in by_compose if not line.startswith(own)} == {
        line for line in by_lorry_up if not line.startswith(own)
    }


def _default(variable: re.Match[str]) -> str:
    return variable[3] if variable[2] == ":-" else ""


# -- nothing that it names is missing --------------------------------------------------------------------


def test_dockerfiles_copy_files_that_are_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for stage in STAGES.values():
        for copied in stage.every("COPY"):
            for source in copied.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in kept, source


def test_installed_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {
        extra
        for stage in STAGES.values()
        for line in stage.every("RUN")
        for extra in re.findall(r"'\.\[(\w+)\]'", line)
    }
    assert installed == {"worker", "monitor"}
    assert installed <= set(extras)


@pytest.mark.parametrize(("service", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_exist(service: str, words: list[str]) -> None:
    program, *rest = words
    stage = STAGES.get(service)
    if stage is None:
        assert program in IMAGE_COMMANDS[SERVICES[service]["image"]]
    elif program == "python" and rest[0] == "-m":
        assert_runnable_module(rest[1])
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], service, "exec")
    else:
        assert_console_script(program, rest[0])


def assert_runnable_module(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    if spec.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{name}.__main__") is not None, name
    else:
        assert spec.origin is not None
        assert '__name__ == "__main__"' in Path(spec.origin).read_text(), name


def assert_console_script(program: str, command: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if program == "lorry":
        assert program in project["scripts"]
        assert command in project["entry-points"]["lorry.commands"]
    else:
        assert importlib.metadata.entry_points(group="console_scripts", name=program)
        assert importlib.metadata.entry_points(group=f"{program}.commands", name=command)


def variables_of_the_example() -> set[str]:
    return set(re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", FILES)
def test_variables_that_compose_reads_are_in_the_example(name: str) -> None:
    text = "\n".join(line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#"))
    read = {match[1] for match in VARIABLE.finditer(text)}
    assert read <= variables_of_the_example()
    assert text.count("$") == len(VARIABLE.findall(text))


def test_every_variable_of_the_example_is_read() -> None:
    read = {match[1] for match in VARIABLE.finditer((ROOT / "compose.yaml").read_text())}
    assert read == variables_of_the_example()


def test_passwords_have_no_default() -> None:
    for match in VARIABLE.finditer((ROOT / "compose.yaml").read_text()):
        if match[1].endswith("PASSWORD"):
            assert match[2] == ":?", match[0]
    assert re.findall(r"^\w+PASSWORD=(.+)$", (ROOT / ".env.example").read_text(), re.MULTILINE) == []


def test_variables_that_the_services_get_mean_something() -> None:
    known = {f"LORRY_{field.upper()}" for field in StackSettings.model_fields}
    known |= set(re.findall(r"LORRY_\w+", lorry_jobs.paths.__doc__ or ""))
    given = {name for service in SERVICES.values() for name in service.get("environment", {})}
    given |= {
        line.partition("=")[0] for stage in STAGES.values() for line in stage.every("ENV") if line.startswith("LORRY_")
    }
    for name in given - known - set(FOREIGN_VARIABLES):
        assert name.startswith("FLOWER_"), name
        assert name.removeprefix("FLOWER_").lower() in tornado_options, name


def test_the_variables_shared_with_lorry_up_have_the_same_defaults() -> None:
    for match in VARIABLE.finditer((ROOT / "compose.yaml").read_text()):
        field = StackSettings.model_fields.get(match[1].removeprefix("LORRY_").lower())
        if field is not None and match[2] == ":-" and field.default is not None:
            assert match[3] == str(field.default), match[1]
