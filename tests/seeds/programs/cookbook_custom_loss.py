"""As a cookbook's preference example goes: two completions, and a loss of one's own on their log-probabilities."""

import torch

import lorry as mint
from lorry import types

training = mint.ServiceClient().create_lora_training_client("Qwen/Qwen3-0.6B", rank=4)
tokenizer = training.get_tokenizer()
prompt = tokenizer.encode("User: Why do backups matter?\nAssistant:")


def completion(text: str) -> types.Datum:
    tokens = [*tokenizer.encode(f" {text}", add_special_tokens=False), tokenizer.eos_token_id]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=(prompt + tokens)[:-1]),
        loss_fn_inputs={
            "target_tokens": (prompt + tokens)[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(tokens),
        },
    )


def preference(data, logprobs):
    chosen, rejected = (
        torch.dot(each.flatten().float(), datum.loss_fn_inputs["weights"].to_torch().flatten().float())
        for datum, each in zip(data, logprobs, strict=True)
    )
    loss = -torch.nn.functional.logsigmoid(chosen - rejected)
    return loss, {"margin": float((chosen - rejected).detach())}


data = [completion("They shorten the way back."), completion("No idea.")]
margins = []
for _ in range(4):
    result = training.forward_backward_custom(data, preference).result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    margins.append(result.metrics["margin"])
print("the margin grew", margins[-1] > margins[0])
