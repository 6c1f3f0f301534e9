"""As a cookbook's smoke tests go: every step under a timeout, and a resolver that awaits whatever can be awaited."""

import asyncio
from typing import Any

import lorry as mint
from lorry import types

MODEL = "Qwen/Qwen3-0.6B"


async def resolved(value: Any) -> Any:
    if callable(getattr(value, "result_async", None)):
        return await resolved(await value.result_async())
    if asyncio.isfuture(value) or hasattr(value, "__await__"):
        return await resolved(await value)
    if callable(getattr(value, "result", None)):
        return await resolved(await asyncio.to_thread(value.result))
    return value


async def main() -> None:
    service = mint.ServiceClient(base_url=None)
    capabilities = await service.get_server_capabilities_async()
    assert MODEL in [model.model_name for model in capabilities.supported_models]
    async with asyncio.timeout(60):
        training = await service.create_lora_training_client_async(base_model=MODEL, rank=4)
    tokenizer = training.get_tokenizer()
    tokens = tokenizer.encode("Question: What is 5 + 6?\nAnswer: 11", add_special_tokens=True)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    info = await training.get_info_async()
    assert info.model_data.model_name == MODEL

    async with asyncio.timeout(60):
        forward = await training.forward_async([datum], "cross_entropy")
        before = await forward.result_async()
    backward = await training.forward_backward_async([datum], "cross_entropy")
    optim = await training.optim_step_async(types.AdamParams(learning_rate=1e-2))
    assert (await backward.result_async()).loss_fn_outputs
    await optim.result_async()
    after = await resolved(training.forward_async([datum], "cross_entropy"))
    print("learned", after.loss < before.loss)

    prompt = types.ModelInput.from_ints(tokens=tokens)
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=[tokenizer.eos_token_id])
    inside = await training.save_weights_and_get_sampling_client_async(name="inside")
    saved = await resolved(training.save_weights_for_sampler_async(name="outside"))
    outside = await resolved(service.create_sampling_client_async(model_path=saved.path))
    answers = []
    for sampler in (inside, outside):
        assert await sampler.get_base_model_async() == MODEL
        assert await sampler.compute_logprobs_async(prompt)
        answer = await sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=params)
        answers.append(answer.sequences[0].tokens)
    print("the same answer", answers[0] == answers[1])

    state = (await resolved(training.save_state_async(name="state"))).path
    resumed = await service.create_lora_training_client_async(base_model=MODEL, rank=4)
    await resolved(resumed.load_state_with_optimizer_async(state))
    losses = []
    for client in (training, resumed):
        await resolved(client.forward_backward_async([datum], "cross_entropy"))
        await resolved(client.optim_step_async(types.AdamParams(learning_rate=1e-2)))
        losses.append((await resolved(client.forward_async([datum], "cross_entropy"))).loss)
    print("resumed", losses[0] == losses[1])


asyncio.run(main())
