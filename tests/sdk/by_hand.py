"""A worker played by the test: it takes ops from a real mailbox and commits what, and when, the test says."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from lorry_jobs import ops, results, wire
from lorry_jobs.errors import LorryError
from lorry_jobs.mailbox import Mailbox, Placement
from lorry_jobs.redis_client import connect
from lorry_jobs.settings import QueueSettings
from lorry_jobs.types import GetInfoResponse, ModelData, ModelInfo, SampledSequence, SampleResponse

MODEL = "by-hand"
TTL = 3600


class HandWorker:
    """Serves `MODEL` under the name `hand`. Every method is one step of a real worker."""

    name = "hand"

    def __init__(self, url: str) -> None:
        self.mailbox = Mailbox(connect(QueueSettings(url=url)))
        self._threads: list[threading.Thread] = []
        self.model = ModelInfo(
            name=MODEL, vocab_size=100, context_length=64, arch="none", parameters=0, tokenizer_sha256="none"
        )

    def hello(self) -> None:
        accepted = self.mailbox.hello(
            self.name,
            MODEL,
            slots=10_000,
            seats=10_000,
            lease_seconds=3600,
            info="{}",
            model_info=self.model.model_dump_json(),
        )
        assert accepted == "ok"

    def create(self, job: str) -> None:
        """Commit the job's create_model."""
        data = ModelData(model_id=job, model_name=MODEL, lora_rank=8)
        info = GetInfoResponse(model_id=job, model_name=MODEL, lora_rank=8, model_data=data)
        self.commit(job, info.model_dump(mode="json"), seq=0)

    def step(self, job: str, seq: int) -> None:
        """Commit an optim_step. Its seq stands in the metrics, so that a test sees whose result it got."""
        self.commit(job, {"metrics": {"seq": float(seq)}}, seq=seq)

    def commit(
        self, job: str, info: dict[str, Any] | None = None, *, seq: int, error: LorryError | None = None
    ) -> None:
        """Wait until the op is there, and commit it."""
        placement = self._take(job, seq)
        task = ops.task_id(job, seq)
        record, output = (results.failure(task, error), b"") if error else results.success(task, info or {})
        pipe = self.mailbox.redis.pipeline(transaction=False)
        self.mailbox.commit(
            job,
            seq,
            self.name,
            placement.epoch,
            task=task,
            meta=record,
            output=output,
            ttl=TTL,
            channel=self._channel(job, seq),
            incomplete="-",
            effect="1",
            entry='{"status":"ok"}',
            pipe=pipe,
        )
        assert pipe.execute() == [b"ok"]

    def commit_steps(self, job: str, last: int) -> None:
        """Commit the optim_steps 1 to `last` in one go; all of them must be there."""
        placement = self._take(job, 1)
        channel = self._channel(job, 1)
        pipe = self.mailbox.redis.pipeline(transaction=False)
        for seq in range(1, last + 1):
            task = ops.task_id(job, seq)
            record, _ = results.success(task, {"metrics": {"seq": float(seq)}})
            self.mailbox.commit(
                job,
                seq,
                self.name,
                placement.epoch,
                task=task,
                meta=record,
                output=b"",
                ttl=TTL,
                channel=channel,
                incomplete="-",
                effect="1",
                entry='{"status":"ok"}',
                pipe=pipe,
            )
        assert set(pipe.execute()) == {b"ok"}

    def answer(self, task: str, tokens: list[int]) -> None:
        """Finish a sampling request."""
        deadline = time.monotonic() + 20
        while self.mailbox.take_request(task, self.name) is None:
            assert time.monotonic() < deadline, f"{task} has not arrived"
            time.sleep(0.005)
        sequence = SampledSequence(tokens=tokens, logprobs=[-1.0] * len(tokens), stop_reason="stop")
        response = SampleResponse(sequences=[sequence], prompt_logprobs=[None, -0.5, -0.25])
        record, output = results.success(task, {"texts": ["text"]}, wire.encode_sample_response(response))
        channel = self.mailbox.redis.hget(f"lorry:request:{task}", "channel")
        assert isinstance(channel, bytes)
        pipe = self.mailbox.redis.pipeline(transaction=False)
        self.mailbox.finish_request(
            task, self.name, meta=record, output=output, ttl=TTL, channel=channel.decode(), pipe=pipe
        )
        assert pipe.execute() == [b"ok"]

    def soon(self, *calls: Any, after: float = 0.1) -> None:
        """Make `calls`, one after the other, from another thread and a moment later."""

        def run() -> None:
            time.sleep(after)
            for call in calls:
                call()

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _take(self, job: str, seq: int) -> Placement:
        deadline = time.monotonic() + 20
        while True:
            placement = self.mailbox.adopt(job, self.name)
            if placement is not None and self.mailbox.take(job, seq, self.name) is not None:
                return placement
            assert time.monotonic() < deadline, f"op {seq} of {job} has not arrived"
            time.sleep(0.005)

    def _channel(self, job: str, seq: int) -> str:
        [(_, envelope, _)] = self.mailbox.journal(job, seq, seq)
        assert envelope is not None
        return str(json.loads(envelope)["headers"]["lorry_channel"])
