"""forward_backward_custom: the user's torch function, exact gradients, and its failures."""

from __future__ import annotations

import pytest
import torch

import lorry
from tests.conftest import QWEN_SMALL


def rows() -> list[lorry.Datum]:
    tokens = [[5, 6, 7, 8, 9], [20, 21, 22]]
    return [lorry.Datum(lorry.ModelInput.from_ints(t[:-1]), {"target_tokens": t[1:]}) for t in tokens]


def make_client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(QWEN_SMALL, rank=4, seed=3, train_unembed=False)


def test_negative_logprob_sum_is_cross_entropy(service: lorry.ServiceClient) -> None:
    """The same gradients, so the same step and the same loss after it."""
    built_in, custom = make_client(service), make_client(service)
    expected = built_in.forward_backward(rows())
    norm = built_in.optim_step(lorry.AdamParams(learning_rate=1e-2))
    found = custom.forward_backward_custom(rows(), lambda data, logprobs: (-sum(x.sum() for x in logprobs), {}))
    custom_norm = custom.optim_step(lorry.AdamParams(learning_rate=1e-2))
    assert found.result().loss == pytest.approx(expected.result().metrics["loss:sum"], rel=1e-5)
    assert custom_norm.result().metrics["grad_norm"] == pytest.approx(norm.result().metrics["grad_norm"], rel=1e-5)
    assert custom.forward(rows()).result().loss == pytest.approx(built_in.forward(rows()).result().loss, rel=1e-5)


def test_a_loss_that_is_no_sum_over_tokens(service: lorry.ServiceClient) -> None:
    """-logsigmoid of a difference of sequence scores, as in DPO: dC/dx is known in closed form."""
    client = make_client(service)

    def preference(data: list[lorry.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        margin = logprobs[0].sum() - logprobs[1].sum()
        return -torch.nn.functional.logsigmoid(margin), {"margin": margin.item()}

    scores = [out["logprobs"].to_numpy().sum() for out in client.forward(rows()).result().loss_fn_outputs]
    result = client.forward_backward_custom(rows(), preference).result()
    margin = float(scores[0] - scores[1])
    slope = 1 / (1 + torch.tensor(margin).exp().item())  # -dC/dmargin
    assert result.metrics["margin"] == pytest.approx(margin, rel=1e-4)
    assert result.loss == result.metrics["loss:sum"]
    # What cross_entropy saw: -Σ w·x with w = slope on the first row and -slope on the second.
    assert result.metrics["surrogate_loss:sum"] == pytest.approx(-slope * margin, rel=1e-3)


def test_extra_inputs_are_for_the_users_function(service: lorry.ServiceClient) -> None:
    client = make_client(service)
    data = [
        lorry.Datum(row.model_input, {**row.loss_fn_inputs, "advantages": [1.0] * row.model_input.length})
        for row in rows()
    ]

    def weighted(data: list[lorry.Datum], logprobs: list[torch.Tensor], config: dict[str, float]):  # type: ignore[no-untyped-def]
        total = sum((x * d.loss_fn_inputs["advantages"].to_torch()).sum() for d, x in zip(data, logprobs, strict=True))
        return -config["scale"] * total, {}

    plain = client.forward(rows()).result().metrics["loss:sum"]
    result = client.forward_backward_custom(data, weighted, loss_fn_config={"scale": 2.0}).result()
    assert result.loss == pytest.approx(2 * plain, rel=1e-5)


def test_a_function_that_raises_fails_its_future_and_the_next_step(service: lorry.ServiceClient) -> None:
    client = make_client(service)

    def broken(data: list[lorry.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("no reward")

    failed = client.forward_backward_custom(rows(), broken)
    refused = client.optim_step()
    good = client.forward_backward(rows())
    step = client.optim_step()
    with pytest.raises(lorry.UserError, match="ZeroDivisionError: no reward"):
        failed.result(60)
    with pytest.raises(lorry.AccumulationIncomplete):
        refused.result(60)
    assert good.result(60).loss > 0
    assert step.result(60).metrics["grad_norm"] > 0


def test_what_is_not_a_loss_is_refused(service: lorry.ServiceClient) -> None:
    client = make_client(service)
    with pytest.raises(lorry.UserError, match="scalar torch tensor"):
        client.forward_backward_custom(rows(), lambda data, logprobs: (logprobs[0], {})).result(60)
    with pytest.raises(lorry.UserError, match="not finite, at datum 0"):
        client.forward_backward_custom(rows(), lambda d, x: ((x[0] * float("nan")).sum(), {})).result(60)
    with pytest.raises(lorry.UserError, match="logprobs"):
        client.forward_backward_custom(rows(), lambda d, x: (x[0].sum(), {}), "logits")


def test_the_async_form(service: lorry.ServiceClient) -> None:
    import asyncio

    async def run() -> float:
        client = await service.create_lora_training_client_async(QWEN_SMALL, rank=4)
        future = await client.forward_backward_custom_async(rows(), lambda d, x: (-sum(v.sum() for v in x), {}))
        return (await future).loss

    assert asyncio.run(run()) > 0
