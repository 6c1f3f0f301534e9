"""docs/data.md is true: its program runs as printed, on the rows that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import StackMaker

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_program_runs_on_the_rows(make_stack: StackMaker, tiny_qwen3: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (rows,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.jsonl").write_text(rows)
    stack = make_stack(models=[f"smollm2={tiny_qwen3}"])
    program += "    losses = client.forward(list(data)).result().loss\n    print('loss', losses)\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LORRY_URL": stack.url, "LORRY_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "train.jsonl: 2 rows, 2 datums" in done.stdout
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3  # one batch in each of three epochs
    assert losses[2] < losses[1] < losses[0]
