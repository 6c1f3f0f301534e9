"""The SDK as a user installs it, without torch, on every Python it is for; the workers stay on the one of this run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lorry.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
# Without torch these cannot run: a worker of its own, the custom loss, tensors.
NEEDS_TORCH = (
    "--deselect=tests/seeds/test_dialects.py::test_a2_4_a_custom_loss",
    "--deselect=tests/seeds/test_programs.py::test_cookbook_custom_loss",
    "--ignore=tests/jobs/test_tensors.py",
)


def interpreter(version: str) -> str | None:
    """One that starts: a shim of pyenv may be there without its Python."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)):
        if candidate is None:
            continue
        asked = [str(candidate), "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return str(candidate)
    return None


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with `lorry[embedded]` from a wheel, and pytest."""
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} on this machine, on the PATH or under pyenv")
    folder = tmp_path_factory.mktemp(f"python{request.param}")
    source = folder / "source"  # a copy: building must not write into the working tree
    for name in ("jobs", "sdk", "workers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python = folder / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    for command in (
        [found, "-m", "venv", str(folder / "venv")],
        [*pip, f"{source}[embedded]", "pytest", "pytest-timeout"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return python


def run(python: Path, *argv: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "LORRY" not in name}
    return subprocess.run(
        [str(python), *argv],
        cwd=ROOT,
        env={**inherited, "LORRY_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def passed(python: Path, *argv: str, home: Path, **env: str) -> tuple[int, int]:
    """Run pytest there. -> (passed, skipped)"""
    argv = ("-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={home / 'pytest'}", *NEEDS_TORCH, *argv)
    done = run(python, *argv, home=home, **env)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])}
    return counts["passed"], counts.get("skipped", 0)


def test_the_environment_has_no_torch(python: Path, tmp_path: Path) -> None:
    program = "import importlib.util as u, lorry; print([u.find_spec(n) for n in ('torch', 'peft')], lorry.__file__)"
    done = run(python, "-c", program, home=tmp_path)
    assert done.stdout.startswith("[None, None]"), done.stderr
    assert str(python.parents[1]) in done.stdout  # the installed one, not this folder's


def test_the_documents_and_the_dialects(python: Path, stack: Stack, tmp_path: Path) -> None:
    """The seeds' scripts and every row of the dialects, against the stack of this process."""
    files = [f"tests/seeds/test_{name}.py" for name in ("seeds", "dialects", "programs")]
    there, skipped = passed(
        python, "--noconftest", "-p", "tests.seeds.running_stack", *files, home=tmp_path, LORRY_URL=stack.url
    )
    assert there >= 70
    assert skipped <= 2  # seed 002's script has a model of its own; the documents may not be here to compare with


def test_futures_and_the_mailbox(python: Path, tmp_path: Path) -> None:
    """Every way of waiting, as asyncio of this version has it; and what the SDK shares with the workers."""
    there, skipped = passed(
        python, "tests/sdk/test_futures.py", "tests/sdk/test_imports.py", "tests/jobs", home=tmp_path
    )
    assert there >= 400
    assert skipped == 0


def test_a_custom_loss_says_that_it_needs_torch(python: Path, stack: Stack, tmp_path: Path) -> None:
    program = """
import lorry
from tests.conftest import QWEN_SMALL
client = lorry.ServiceClient().create_lora_training_client(QWEN_SMALL, rank=2)
data = [lorry.Datum(lorry.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})]
try:
    client.forward_backward_custom(data, lambda data, logprobs: (logprobs[0].sum(), {})).result(60)
except lorry.UserError as error:
    print("refused:", error)
client.forward_backward(data).result(60)
client.optim_step(lorry.AdamParams()).result(60)
print("goes on")
"""
    done = run(python, "-c", program, home=tmp_path, LORRY_URL=stack.url)
    assert re.search(r"refused: .*torch", done.stdout), done.stdout + done.stderr
    assert "goes on" in done.stdout
