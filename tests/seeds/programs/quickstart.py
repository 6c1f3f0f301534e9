"""As quickstarts go: supervised steps first, then rewards with importance sampling. Everything waited for at once."""

import random

import lorry as mint
from lorry import types

random.seed(0)
service = mint.ServiceClient()
training = service.create_lora_training_client(
    base_model="Qwen/Qwen3-0.6B", rank=16, train_mlp=True, train_attn=True, train_unembed=True
)
tokenizer = training.get_tokenizer()
print("vocabulary", tokenizer.vocab_size)


def example(question: str, answer: str) -> types.Datum:
    prompt = tokenizer.encode(f"Question: {question}\nAnswer:", add_special_tokens=True)
    completion = [*tokenizer.encode(f" {answer}", add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    weights = [0] * len(prompt) + [1] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


data = [example(f"What is {a} times {b}?", str(a * b)) for a, b in ((3, 4), (5, 6), (7, 8))]
for _ in range(8):
    result = training.forward_backward(data, loss_fn="cross_entropy").result()
    total = weight = 0.0
    for datum, output in zip(data, result.loss_fn_outputs, strict=True):
        for logprob, w in zip(output["logprobs"].tolist(), datum.loss_fn_inputs["weights"].tolist(), strict=True):
            total, weight = total - logprob * w, weight + w
    training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    print(f"Loss: {total / weight:.4f}", f"the same {abs(total / weight - result.loss) < 1e-4}")
print("state", training.save_state(name="quickstart-sft").result().path)

for step in range(2):
    sampler = training.save_weights_and_get_sampling_client(name=f"quickstart-rl-{step}")
    datums = []
    for question in ("What is 2 times 3?", "What is 4 times 5?"):
        prompt = tokenizer.encode(f"Question: {question}\nAnswer:")
        params = types.SamplingParams(max_tokens=6, temperature=0.7, stop_token_ids=[tokenizer.eos_token_id])
        group = sampler.sample(
            prompt=types.ModelInput.from_ints(tokens=prompt), num_samples=4, sampling_params=params
        ).result()
        rewards = [float(sum(sequence.tokens) % 2) for sequence in group.sequences]
        for sequence, reward in zip(group.sequences, rewards, strict=True):
            tokens, before = list(sequence.tokens), len(prompt) - 1
            advantage = reward - sum(rewards) / len(rewards)
            datums.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens=(prompt + tokens)[:-1]),
                    loss_fn_inputs={
                        "target_tokens": (prompt + tokens)[1:],
                        "weights": [0.0] * before + [1.0] * len(tokens),
                        "logprobs": [0.0] * before + list(sequence.logprobs),
                        "advantages": [0.0] * before + [advantage] * len(tokens),
                    },
                )
            )
    for loss_fn in ("importance_sampling", "ppo"):
        outputs = training.forward_backward(datums, loss_fn=loss_fn).result().loss_fn_outputs
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        print(loss_fn, len(outputs) == len(datums))
print("state", training.save_state(name="quickstart-rl").result().path)
