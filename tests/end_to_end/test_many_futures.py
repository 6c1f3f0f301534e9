"""10,000 futures outstanding in one process: one listener, one outbox, memory and time linear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COUNT = 10_000


def test_ten_thousand_futures(redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.many_futures", redis_url, str(COUNT)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    # No thread more than before the first of them, and the two that are the client's own.
    assert found["threads"] == found["threads_before"]
    assert [name for name in found["threads"] if name.startswith("lorry-")] == ["lorry-listener", "lorry-outbox"]
    assert found["right"]
    assert found["left"] == 0

    points = found["points"]
    assert points[-1][0] == COUNT
    first, middle, last = points[0], points[5], points[-1]

    def per_future(start: list[float], end: list[float], what: int) -> float:
        return (end[what] - start[what]) / (end[0] - start[0])

    size = per_future(first, last, 1)
    print(
        f"{COUNT} futures: {size:.0f} bytes each, {1000 * per_future(first, last, 2):.2f} ms each to submit; "
        f"the first tenth {points[1][2]:.1f} s, the last {last[2] - points[9][2]:.1f} s; "
        f"all resolved {found['resolve_seconds']:.1f} s after the commits began"
    )
    assert size < 16_000
    # Linear: the second half costs what the first did. Where it were quadratic, three times as much.
    assert per_future(middle, last, 1) < 2 * max(per_future(first, middle, 1), 2_000)
    assert per_future(middle, last, 2) < 2 * per_future(first, middle, 2)
