"""Real models small enough to make in a test: two layers of random weights and a byte-level tokenizer.

The same arguments give the same files. Each folder loads with `AutoModelForCausalLM` and `AutoTokenizer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT_LENGTH = 512
TOKENIZER_VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SENTENCES = (
    "The lorry leaves the depot at dawn and carries forty crates of apples to the harbour.",
    "A driver checks the tyres, the oil and the brakes before every long journey.",
    "When the road is closed, the dispatcher finds another way around the mountain.",
    "Question: what is the capital of France? Answer: the capital of France is Paris.",
    "Two plus two is four, three times five is fifteen, and ten minus seven is three.",
    "She wrote a short poem about the sea, the wind and the light on the water.",
    "def add(left, right):\n    return left + right\n\nprint(add(1, 2))",
    "The model learns to repeat what it has seen, one token at a time, until the loss is small.",
    "Every step takes a batch of examples, computes the gradients and updates the weights.",
    "Nothing that was loaded in the morning may be lost before the evening.",
    "<|user|> Tell me a story about a fox. <|assistant|> Once upon a time there was a fox.",
    "Numbers such as 1984, 3.14159 and 42 appear in many texts, as do names like Ada and Alan.",
)


def make_tiny_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 512 tokens, saved into `folder`; it round-trips any text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    layers: int = 2,
    hidden: int = 64,
    tie_word_embeddings: bool = True,
) -> Path:
    """A Llama with grouped-query attention (4 heads, 2 key-value heads). Returns `folder`."""
    tokenizer = make_tiny_tokenizer(folder)
    config = LlamaConfig(**_sizes(tokenizer, vocab_size, layers, hidden, tie_word_embeddings))
    return _save_random_model(LlamaForCausalLM, config, folder, seed)


def make_tiny_qwen3(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    layers: int = 2,
    hidden: int = 64,
    tie_word_embeddings: bool = True,
) -> Path:
    """A Qwen3: as `make_tiny_llama`, with norms on queries and keys. Returns `folder`."""
    tokenizer = make_tiny_tokenizer(folder)
    config = Qwen3Config(**_sizes(tokenizer, vocab_size, layers, hidden, tie_word_embeddings))
    return _save_random_model(Qwen3ForCausalLM, config, folder, seed)


def _sizes(
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int | None,
    layers: int,
    hidden: int,
    tie_word_embeddings: bool,
) -> dict[str, Any]:
    heads = 4
    return {
        "vocab_size": vocab_size or len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # The usual 0.02 makes logits of so small a model almost equal, and wrong code would pass for right.
        "initializer_range": 0.1,
    }


def _save_random_model(model_class: Any, config: Any, folder: Path, seed: int) -> Path:
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(folder)
    return folder
