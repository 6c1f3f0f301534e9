"""The documents' snippets, run as they are, with only the import name changed, against real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lorry.stack import Stack

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(__file__).parents[3] / "shared" / "seeds" / "scripts"

IMPORTS = {
    "import mint": "import lorry as mint",
    "from mint import types": "from lorry import types",
    "import pytrio as trio": "import lorry as trio",
}


def text_of(name: str) -> str:
    """A script with its imports changed and nothing else."""
    lines = (SCRIPTS / name).read_text().splitlines()
    return "\n".join(IMPORTS.get(line.strip(), line) for line in lines)


def run(source: str, stack: Stack, tmp_path: Path, timeout: float = 240.0) -> str:
    script = tmp_path / "script.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(script)],
        env={**os.environ, "LORRY_URL": stack.url, "LORRY_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not SOURCE.is_dir(), reason="the documents are only there where the project is developed")
def test_the_scripts_are_the_documents() -> None:
    for script in SCRIPTS.glob("*.py"):
        assert script.read_bytes() == (SOURCE / script.name).read_bytes()


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"Loss(?: per token)?: (-?[\d.]+)", output)]


def test_000(stack: Stack, tmp_path: Path) -> None:
    found = losses(run(text_of("s000.py"), stack, tmp_path))
    assert len(found) == 4
    assert all(loss > 0 for loss in found)


# The slow way that seed 000 shows in comments; its `# ` removed and the loop completed as its own comment says.
ANTI_PATTERN = """
    for batch_text in batches:
        tokens = tokenizer.encode(batch_text)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        result = await training_client.forward_backward_async([datum], loss_fn="cross_entropy").result_async()
        print(f"Loss: {result.loss:.4f}")
        await training_client.optim_step_async(adam_params).result_async()
"""


def test_000_with_its_anti_pattern(stack: Stack, tmp_path: Path) -> None:
    before, mark, after = text_of("s000.py").partition("    # 推荐写法")
    assert mark
    found = losses(run(before + ANTI_PATTERN.lstrip("\n") + mark + after, stack, tmp_path))
    assert len(found) == 8
    # Four steps on four sentences: the same sentences afterwards are likelier.
    assert sum(found[4:]) < sum(found[:4])


def test_000_gather_of_the_bare_futures(stack: Stack, tmp_path: Path) -> None:
    """Its prose: "用 asyncio.gather(*futures) 并行等多个 future", and try/except around one that fails."""
    source = text_of("s000.py").replace(
        "fb_results = await asyncio.gather(*[f.result_async() for f in fb_futures])",
        "fb_results = await asyncio.gather(*fb_futures)\n"
        "    try:\n"
        "        await asyncio.gather(training_client.forward_backward_async([datum], loss_fn='no such loss'))\n"
        "    except ValueError as error:\n"
        "        print('refused:', error)\n"
        "    try:\n"
        "        await training_client.optim_step_async(adam_params).result_async()\n"
        "    except ValueError as error:\n"
        "        print('refused:', error)\n"
        "    await asyncio.gather(training_client.forward_backward_async([datum], loss_fn='cross_entropy'))\n",
    )
    output = run(source, stack, tmp_path)
    assert len(losses(output)) == 4
    assert "unknown loss_fn 'no such loss'" in output
    assert "forward_backward with seq 5 failed" in output


def test_001(stack: Stack, tmp_path: Path) -> None:
    output = run(text_of("s001.py"), stack, tmp_path)
    found = losses(output)
    assert len(found) == 15  # 30 ops were in flight before anything was awaited
    assert found[-1] < found[0] - 0.1
    assert "Base Responses:\n'" in output
    assert "SFT Responses:\n'" in output


def test_001_in_its_sync_form(stack: Stack, tmp_path: Path) -> None:
    source = text_of("s001.py")
    start, end = source.index("    print_task_queue = []"), source.index("    # 7. 推理与评估")
    loop = (
        "    for i in range(15):\n"
        "        fwdbwd_future = training_client.forward_backward(processed_examples, 'cross_entropy')\n"
        "        fwdbwd_future = fwdbwd_future.result()\n"
        "        print(f'Loss: {fwdbwd_future.loss:.4f}')\n"
        "        training_client.optim_step(trio.AdamParams(learning_rate=1e-4)).result()\n"
    )
    found = losses(run(source[:start] + loop + source[end:], stack, tmp_path))
    assert len(found) == 15
    assert found[-1] < found[0] - 0.1


def test_003(stack: Stack, tmp_path: Path) -> None:
    lines = run(text_of("s003.py"), stack, tmp_path).splitlines()
    assert lines[0].startswith("3 {")
    assert "'loss:sum'" in lines[0]
    assert lines[1] == "[]"
