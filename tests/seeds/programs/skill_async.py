"""As a skill's examples go: types at the top level, chat prompts, groups sampled at once, and `sample_async` awaited
twice in one place and once in another."""

import asyncio

import numpy as np

import lorry as trio

MODEL = "Qwen/Qwen3-0.6B"


async def main() -> None:
    service = trio.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=MODEL, rank=8)
    tokenizer = training.get_tokenizer()
    prompts = [
        tokenizer.encode(f"user: How many r are in {word}?\nassistant:", add_special_tokens=False)
        for word in ("lorry", "river", "mirror")
    ]
    params = trio.SamplingParams(max_tokens=5, temperature=1.0, top_p=1.0, stop=["<|im_end|>"])

    async def group(sampler: trio.SamplingClient, prompt: list[int]) -> list[trio.Datum]:
        result = await sampler.sample_async(
            prompt=trio.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params, return_text=True
        )
        rewards = np.array([len(sequence.text) for sequence in result.sequences], np.float32)
        datums = []
        for sequence, advantage in zip(result.sequences, rewards - rewards.mean(), strict=True):
            before = len(prompt) - 1
            datums.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(prompt + list(sequence.tokens)[:-1]),
                    loss_fn_inputs={
                        "target_tokens": np.asarray([0] * before + list(sequence.tokens), np.int64),
                        "logprobs": np.asarray([0.0] * before + list(sequence.logprobs), np.float32),
                        "advantages": np.asarray([0.0] * before + [advantage] * len(sequence.tokens), np.float32),
                    },
                )
            )
        return datums

    for _ in range(2):
        sampler = await training.save_weights_and_get_sampling_client_async()
        groups = await asyncio.gather(*(group(sampler, prompt) for prompt in prompts))
        data = [datum for each in groups for datum in each]
        backward = await training.forward_backward_async(data, "importance_sampling")
        optim = await training.optim_step_async(trio.AdamParams(learning_rate=4e-5, beta1=0.9, beta2=0.95))
        print("outputs", len((await backward).loss_fn_outputs))
        await optim

    saving = training.save_weights_for_sampler(name="the-skill")
    base = service.create_sampling_client(base_model=MODEL)
    tuned = service.create_sampling_client(base_model=MODEL, model_path=saving.result().path)
    greedy = trio.SamplingParams(max_tokens=6, temperature=0.0)
    for name, client in (("base", base), ("tuned", tuned)):
        future = await client.sample_async(
            prompt=trio.ModelInput.from_ints(prompts[0]), sampling_params=greedy, num_samples=1
        )
        result = await future
        print(name, repr(result.sequences[0].text))
    resumed = await service.create_training_client_from_state_with_optimizer_async(
        (await training.save_state("s")).path
    )
    print("step", (await resumed.save_state("t")).path.endswith("/weights/t"))


asyncio.run(main())
