"""A client that submits more than is ever done while it lives. Run by test_dead_clients, which kills it."""

from __future__ import annotations

import sys

import lorry
from tests.chaos.cell import MODEL
from tests.chaos.workload import RANK, fb, step, submit

if __name__ == "__main__":
    service = lorry.ServiceClient(base_url=sys.argv[1])
    client = service.create_lora_training_client(MODEL, rank=RANK)
    sampler = service.create_sampling_client(base_model=MODEL)
    for number in range(10_000):
        submit(client, fb(number))
        last = submit(client, step())
        sampler.sample(lorry.ModelInput.from_ints([1, 2, 3]), 1, lorry.SamplingParams(max_tokens=1))
        if number == 5:
            print(client.model_id, flush=True)
        if number % 200 == 199:
            last.result()
