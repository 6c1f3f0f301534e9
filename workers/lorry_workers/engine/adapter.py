"""A LoRA adapter: what a job trains and what a sampler adds to the base model.

peft decides which modules get a pair of matrices, how they are initialised and what they are called in a
file. So that no base weight is touched or copied, peft works on a *shell*: the same module tree with every
base parameter replaced by a tensor of stride 0, which has a shape and no memory.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): y = W·x + (alpha / r) · B·(A·x).
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import Any

import peft
import torch
from torch import Tensor, nn

from lorry_jobs.errors import UserError
from lorry_jobs.types import LoraConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

Pair = tuple[nn.Parameter, nn.Parameter]
"""A (r, in) and B (out, r) of one module."""


class Adapter:
    """The A and B of every target module, as views into one flat float32 tensor.

    One flat tensor for the values and one for the gradients make the optimizer, the gradient norm and a
    snapshot one operation each, however many modules there are. `pairs` maps a module's path in the base
    model ("model.layers.0.self_attn.q_proj") to its parameters.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: peft.LoraConfig,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        trainable: bool = True,
    ) -> None:
        self.config = config
        self.seed = seed
        self.scaling = float(config.lora_alpha) / config.r
        self.flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).to(device, torch.float32)
        self.flat_grad: Tensor | None = None
        self._named: dict[str, nn.Parameter] = {}
        start = 0
        for name, tensor in tensors.items():
            view = self.flat[start : start + tensor.numel()].view(tensor.shape)
            self._named[name] = nn.Parameter(view, requires_grad=trainable)
            start += tensor.numel()
        self.pairs: dict[str, Pair] = {
            name[len(_PREFIX) : -len(_A)]: (a, self._named[name[: -len(_A)] + _B])
            for name, a in self._named.items()
            if name.endswith(_A)
        }

    @property
    def rank(self) -> int:
        return int(self.config.r)

    @property
    def target_modules(self) -> list[str]:
        """The last parts of the target modules' names, sorted: ["down_proj", "gate_proj", ...]."""
        return sorted(self.config.target_modules)

    def parameters(self) -> list[nn.Parameter]:
        """Every A and B, in the order of peft's state dict."""
        return list(self._named.values())

    def require_gradients(self) -> Tensor:
        """The flat gradient, made (zero) at first use. Each parameter's `.grad` is a view into it, so
        that a backward pass adds to it in place."""
        if self.flat_grad is None:
            self.flat_grad = torch.zeros_like(self.flat)
            for parameter, grad in zip(self._named.values(), self._views(self.flat_grad), strict=True):
                parameter.grad = grad
        return self.flat_grad

    def zero_gradients(self) -> None:
        if self.flat_grad is not None:
            self.flat_grad.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """A copy on the CPU under peft's file names: `base_model.model.<path>.lora_A.weight`."""
        return self.named_copy(self.flat)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of `tensors`, which must have exactly this adapter's names and shapes."""
        self.copy_named(tensors, self.flat)

    def named_copy(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat`, a tensor laid out as `self.flat`, cut up and named as in `state_dict`."""
        copied = flat.to("cpu", copy=True)
        return dict(zip(self._named, (view.clone() for view in self._views(copied)), strict=True))

    def copy_named(self, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        """The reverse of `named_copy`. Nothing is changed when a name or a shape does not fit."""
        missing, unexpected = self._named.keys() - tensors.keys(), tensors.keys() - self._named.keys()
        if missing or unexpected:
            raise UserError(
                f"the adapter's modules differ: {len(missing)} tensors are missing"
                f"{_example(missing)} and {len(unexpected)} are not in this adapter{_example(unexpected)}"
            )
        for name, parameter in self._named.items():
            if tensors[name].shape != parameter.shape:
                raise UserError(
                    f"{name} has shape {tuple(tensors[name].shape)}, but this adapter has {tuple(parameter.shape)}"
                )
        for name, view in zip(self._named, self._views(flat), strict=True):
            view.copy_(tensors[name])

    def adapter_config(self) -> dict[str, Any]:
        """peft's `adapter_config.json`, as `LoraConfig.save_pretrained` writes it, for inference."""
        fields = self.config.to_dict()
        fields["inference_mode"] = True
        return {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self._named.values()]
        parts = flat.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._named.values(), strict=True)]


def make_shell(model: nn.Module) -> nn.Module:
    """`model`'s module tree without its memory, on the CPU: parameters keep shape and dtype, at stride 0."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        hollow = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(hollow, requires_grad=False)
    shell = copy.deepcopy(model, memo)
    # peft warns about an adapter on a tied lm_head because merging it would change the embedding too.
    # Lorry never merges into the tie: the adapter is added to the head's output only.
    shell.config.tie_word_embeddings = False
    return shell


def create_adapter(
    shell: nn.Module,
    config: LoraConfig,
    *,
    base_model: str,
    device: torch.device | str = "cpu",
    fallback_seed: int | None = None,
) -> Adapter:
    """A new adapter with the values of `torch.manual_seed(seed); peft.get_peft_model(model, ...)`.

    Without a seed in `config`, `fallback_seed` is used, else one is drawn. `Adapter.seed` keeps it.
    """
    drawn = secrets.randbelow(2**31) if fallback_seed is None else fallback_seed
    seed = drawn if config.seed is None else config.seed
    if seed >= 2**63:
        raise UserError(f"lora.seed must be below 2**63, got {seed}")
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        target_modules=target_modules(shell, config),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(make_shell(shell), peft_config)
    peft_config.base_model_name_or_path = base_model
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return Adapter(tensors, peft_config, device=device, seed=seed)


def read_adapter(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
) -> Adapter:
    """The adapter of a peft folder's two files, for sampling: nothing in it is trained."""
    return Adapter(tensors, peft.LoraConfig.from_peft_type(**config), device=device, trainable=False)


def target_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """The names of the linear layers that `config` trains."""
    found = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = {
        "train_attn": ATTENTION if config.train_attn else (),
        "train_mlp": MLP if config.train_mlp else (),
        "train_unembed": (head_name(model),) if config.train_unembed else (),
    }
    for option, names in wanted.items():
        missing = [name for name in names if name not in found]
        if missing:
            raise UserError(
                f"{type(model).__name__} cannot be trained with {option}=True: it has no linear layers called "
                f"{', '.join(missing)} (its linear layers: {', '.join(sorted(found)) or 'none'})"
            )
    return [name for names in wanted.values() for name in names]


def head_name(model: nn.Module) -> str:
    """The path of the layer that makes the logits: "lm_head"."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and head is not None:
            return name
    raise UserError(f"{type(model).__name__} has no output layer")


def _example(names: set[str]) -> str:
    return f" (such as {min(names)})" if names else ""
