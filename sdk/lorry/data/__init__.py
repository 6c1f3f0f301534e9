"""Your data as `Datum`s: chats, prompts with completions, JSONL files.

    tokenizer = training_client.get_tokenizer()
    data = lorry.data.load_jsonl("train.jsonl", tokenizer, max_length=1024)
    print(data.report)
    for batch in lorry.data.batches(data, 16, seed=0, epochs=3):
        training_client.forward_backward(batch, "cross_entropy")

The tokens are exactly those of the tokenizer's own chat template. Only what the assistant says has a loss, unless
`train_on` says otherwise. Start reading at `encode.py`; `dataset.py` is about rows and files.
"""

from .dataset import Dataset, Report, Skipped, batches, from_rows, load_jsonl
from .encode import Messages, TrainOn, chat, chat_prompt, completion, from_tokens, turns

__all__ = [
    "Dataset",
    "Messages",
    "Report",
    "Skipped",
    "TrainOn",
    "batches",
    "chat",
    "chat_prompt",
    "completion",
    "from_rows",
    "from_tokens",
    "load_jsonl",
    "turns",
]
