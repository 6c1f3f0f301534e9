"""A forward_backward that fails or is cancelled: its step is not taken, and the job goes on as if it had not been."""

from __future__ import annotations

import pytest

import lorry
from lorry_jobs.errors import AccumulationIncomplete, OpCancelled, UserError
from tests.chaos.cell import MODEL, Cell
from tests.chaos.workload import RANK, Op, Reference, fb, final_state, largest_gap, step, submit


def bad_pair(client: lorry.TrainingClient) -> tuple[lorry.APIFuture, lorry.APIFuture]:
    # Passes every check of the client; the worker refuses the option.
    failing = client.forward_backward(fb(1).data, "cross_entropy", {"nonsense": 1.0})
    return failing, client.optim_step(lorry.AdamParams(learning_rate=0.1))


def check_outcomes(failing: lorry.APIFuture, refused: lorry.APIFuture) -> None:
    with pytest.raises(UserError, match="nonsense") as failure:
        failing.result(60)
    assert (failure.value.op, failure.value.seq) == ("forward_backward", failing.seq)
    with pytest.raises(AccumulationIncomplete, match=f"seq {failing.seq}"):
        refused.result(60)


def check_state(cell: Cell, reference: Reference, client: lorry.TrainingClient, good: list[Op]) -> None:
    _, expected = reference.run(client.model_id, 7, good)
    assert largest_gap(final_state(cell.store, client), expected) == 0


def test_three_outcomes(calm_cell: Cell, reference: Reference) -> None:
    client = lorry.ServiceClient(base_url=calm_cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)
    good = [fb(10), step(), fb(11), step()]
    before = [submit(client, op) for op in good[:2]]
    kept = submit(client, fb(12))  # a good one of the accumulation that fails goes with it
    failing, refused = bad_pair(client)
    after = [submit(client, op) for op in good[2:]]
    check_outcomes(failing, refused)
    for future in [*before, kept, *after]:
        future.result(60)
    check_state(calm_cell, reference, client, good)


def test_a_step_with_nothing_accumulated(calm_cell: Cell) -> None:
    client = lorry.ServiceClient(base_url=calm_cell.url).create_lora_training_client(MODEL, rank=RANK)
    with pytest.raises(UserError, match="nothing is accumulated"):
        client.optim_step().result(60)
    client.forward_backward(fb(1).data)
    client.optim_step().result(60)


def test_a_cancelled_forward_backward(calm_cell: Cell, reference: Reference) -> None:
    client = lorry.ServiceClient(base_url=calm_cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)
    good = [op for seed in range(20) for op in (fb(seed), step())]
    ahead = [submit(client, op) for op in good]
    kept = submit(client, fb(50))
    cancelled = submit(client, fb(51))
    assert cancelled.cancel()
    refused = submit(client, step(0.1))
    last = [fb(52), step()]
    after = [submit(client, op) for op in last]
    with pytest.raises(OpCancelled):
        cancelled.result(60)
    assert cancelled.cancelled()
    with pytest.raises(AccumulationIncomplete, match=f"seq {cancelled.seq}"):
        refused.result(60)
    for future in [*ahead, kept, *after]:
        future.result(60)
    assert not after[-1].cancel()  # too late
    check_state(calm_cell, reference, client, good + last)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_death_in_between(calm_cell: Cell, reference: Reference, when: str) -> None:
    """What failed is remembered by the mailbox, not by the worker."""
    client = lorry.ServiceClient(base_url=calm_cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)
    good = [fb(10), step(), fb(11), step()]
    for op in good[:2]:
        submit(client, op).result(60)
    submit(client, fb(12)).result(60)
    failing = client.forward_backward(fb(1).data, "cross_entropy", {"nonsense": 1.0})
    assert failing.exception(60)
    refused = submit(client, step(0.1)) if when == "after the step" else None
    if refused is not None:
        assert refused.exception(60)
    calm_cell.kill(calm_cell.alive()[0])
    calm_cell.start_worker()
    refused = refused or submit(client, step(0.1))
    check_outcomes(failing, refused)
    for op in good[2:]:
        submit(client, op).result(60)
    check_state(calm_cell, reference, client, good)
