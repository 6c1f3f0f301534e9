"""The linear layers that add the active adapters to a frozen base weight.

Installed once over every layer that an adapter may target. Which adapters are active is told to all layers at
once, through one `ActiveAdapters` that they share; adding or removing an adapter touches no module. The output
layer is not among them: `head` applies its adapters chunk by chunk.

Layers that read the same input (q, k and v; gate and up) form a group: the first of them to be called computes
all of them, with one product x·[A_q; A_k; A_v]ᵀ per adapter, and the others take what is theirs. In the backward
pass the gradient of that input is summed up in place instead of layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Adapter
from .bank import Bank, Factors, Segment
from .products import FrozenLinear, add_linear, linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


class ActiveAdapters:
    """Which adapter each token of the running pass uses. `bank` None: the base model alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.groups: list[LoraGroup] = []
        self.dtype = dtype
        self.bank: Bank | None = None
        # Outputs must be part of the autograd graph even where the input is not (in the first layer).
        self.anchor = torch.empty(0, requires_grad=True)

    def make_bank(self, adapters: Sequence[Adapter], *, gradients: bool) -> Bank:
        return Bank(adapters, [group.paths for group in self.groups], self.dtype, gradients=gradients)

    @contextmanager
    def use(self, bank: Bank | None) -> Iterator[None]:
        """Inside, forward passes use the segments of `bank`. A backward pass that recomputes activations must
        be inside as well."""
        before, self.bank = self.bank, bank
        try:
            yield
        finally:
            self.bank = before
            for group in self.groups:
                group.forget()

    def use_one(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Every token through `adapter`, without gradients."""
        if adapter is None:
            return self.use(None)
        bank = self.make_bank([adapter], gradients=False)
        bank.segments = (Segment(0, 0, None),)
        return self.use(bank)


class LoraLinear(nn.Module):
    """y = W·x + bias, and for the tokens of an active adapter + scaling · B·(A·x).

    The weight keeps the name it had (`<path>.weight`), and is the same tensor. Under a half-precision base
    model the low-rank product runs in the base's dtype on a rounded copy of A and B; the parameters and
    their gradients stay float32.
    """

    def __init__(self, base: nn.Linear, path: str, active: ActiveAdapters) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.path = path
        self.active = active
        self.group: LoraGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        bank = self.active.bank
        factors = bank.factors.get(self.group.paths) if bank is not None and self.group is not None else None
        if factors is None:
            y = FrozenLinear.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
            return y.view(*x.shape[:-1], y.shape[-1])
        return self.group.output(self, x, factors, bank.segments)

    def extra_repr(self) -> str:
        return f"{self.path}, in={self.weight.shape[1]}, out={self.weight.shape[0]}"


class LoraGroup:
    """Layers of one block that read the same input."""

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self.layers = tuple(layers)
        self.paths = tuple(layer.path for layer in layers)
        self._input: Tensor | None = None
        self._waiting: dict[str, Tensor] = {}
        for layer in layers:
            layer.group = self

    def output(self, layer: LoraLinear, x: Tensor, factors: Factors, segments: Sequence[Segment]) -> Tensor:
        """What `layer` gives for x (..., in)."""
        if self._input is not x or layer.path not in self._waiting:
            rows = x.reshape(-1, x.shape[-1])  # (T, in)
            outputs = _GroupedLora.apply(rows, layer.active.anchor, self.layers, factors, segments)
            self._input = x
            self._waiting = {
                path: y.view(*x.shape[:-1], y.shape[-1]) for path, y in zip(self.paths, outputs, strict=True)
            }
        y = self._waiting.pop(layer.path)
        if not self._waiting:
            self._input = None
        return y

    def forget(self) -> None:
        """A pass that ended halfway may have left outputs that nobody took."""
        self._input = None
        self._waiting = {}


class _GroupedLora(torch.autograd.Function):
    """All layers of a group on T tokens: y_m = W_m·x + B_m·(A_m·x), each token with its own adapter's A and B.

    Where all segments have one length and all adapters one shape, the low-rank products of all adapters are one
    batched product each; else one product per adapter, so that no rank and no segment is padded. The gradients
    of A and B are added to the bank's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        layers: tuple[LoraLinear, ...],
        factors: Factors,
        segments: Sequence[Segment],
    ) -> tuple[Tensor, ...]:
        outputs = tuple(linear(x, layer.weight, layer.bias) for layer in layers)
        parts = _parts(factors, segments, len(x))
        lows = [part.add_low_rank(x, outputs) for part in parts]
        ctx.save_for_backward(x, *lows)
        ctx.layers, ctx.parts = layers, parts
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *lows = ctx.saved_tensors
        gradients = tuple(gradient.contiguous() for gradient in gradients)  # (T, out) each
        into: Tensor | None = None
        if ctx.needs_input_grad[0]:
            into = linear(gradients[0], ctx.layers[0].weight.t())
            for gradient, layer in zip(gradients[1:], ctx.layers[1:], strict=True):
                into = add_linear(into, gradient, layer.weight.t())
        for part, low in zip(ctx.parts, lows, strict=True):
            part.add_gradients(x, low, gradients, into)
        return into, None, None, None, None


class _OneAdapter:
    """The tokens start:stop and the A (R, in) and B (out, r) that they run through."""

    def __init__(self, factors: Factors, segment: Segment) -> None:
        self.factors = factors.of[segment.slot]
        self.rows = slice(segment.start, segment.stop)

    def add_low_rank(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Adds to each (T, out), in place. -> x·Aᵀ (n, R)"""
        low = linear(x[self.rows], self.factors.a)
        for m, ranks, b in self.factors.members():
            outputs[m][self.rows].addmm_(low[:, ranks], b.t())
        return low

    def add_gradients(self, x: Tensor, low: Tensor, gradients: Sequence[Tensor], into: Tensor | None) -> None:
        """`gradients`: of the outputs. Adds to those of A, B and, if wanted, of x: `into` (T, in)."""
        of_low = torch.empty_like(low)
        for m, ranks, b in self.factors.members():
            gradient = gradients[m][self.rows]
            of_low[:, ranks] = linear(gradient, b.t())
            _add_product(self.factors.grad_b[m], gradient.t(), low[:, ranks])
        _add_product(self.factors.grad_a, of_low.t(), x[self.rows])
        if into is not None:
            into[self.rows].addmm_(of_low, self.factors.a)


class _AllAdapters:
    """As `_OneAdapter`, for segments of equal length and adapters of equal shape: J of each at once."""

    def __init__(self, factors: Factors) -> None:
        self.factors = factors.stacked
        self.count = len(factors.of)

    def add_low_rank(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        low = torch.bmm(self._by_adapter(x), self.factors.a.transpose(1, 2))  # (J, n, R)
        for m, ranks, b in self.factors.members():
            self._by_adapter(outputs[m]).baddbmm_(low[..., ranks], b.transpose(1, 2))
        return low

    def add_gradients(self, x: Tensor, low: Tensor, gradients: Sequence[Tensor], into: Tensor | None) -> None:
        of_low = torch.empty_like(low)
        for m, ranks, b in self.factors.members():
            gradient = self._by_adapter(gradients[m])  # (J, n, out)
            of_low[..., ranks] = torch.bmm(gradient, b)
            _add_product(self.factors.grad_b[m], gradient.transpose(1, 2), low[..., ranks])
        _add_product(self.factors.grad_a, of_low.transpose(1, 2), self._by_adapter(x))
        if into is not None:
            self._by_adapter(into).baddbmm_(of_low, self.factors.a)

    def _by_adapter(self, rows: Tensor) -> Tensor:
        return rows.view(self.count, -1, rows.shape[-1])  # (T, ·) -> (J, n, ·)


def _parts(factors: Factors, segments: Sequence[Segment], tokens: int) -> list[_OneAdapter] | list[_AllAdapters]:
    if len(segments) > 1:
        if segments[-1].stop != tokens:
            raise ValueError(f"{tokens} tokens arrived where the active adapters expect {segments[-1].stop}")
        if factors.stacked is not None and len({s.length for s in segments}) == 1:
            return [_AllAdapters(factors)]
    return [_OneAdapter(factors, segment) for segment in segments if factors.of[segment.slot] is not None]


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left·right, of matrices or of batches of them; the sum is float32 whatever they are."""
    if into.dtype == left.dtype:
        into.baddbmm_(left, right) if into.dim() == 3 else into.addmm_(left, right)
    elif left.is_cuda:
        into.add_((torch.bmm if into.dim() == 3 else torch.mm)(left, right, out_dtype=into.dtype))
    else:
        into.add_(left @ right)


def install_lora_linears(model: nn.Module) -> ActiveAdapters:
    """Replace every attention and MLP projection of `model` by a `LoraLinear` around the same weight."""
    active = ActiveAdapters(dtype=next(model.parameters()).dtype)
    for parent_path, parent in list(model.named_modules()):
        for names in GROUPS:
            layers = []
            for name in names:
                module = getattr(parent, name, None)
                if isinstance(module, nn.Linear):
                    layers.append(LoraLinear(module, f"{parent_path}.{name}".lstrip("."), active))
                    setattr(parent, name, layers[-1])
            if layers:
                active.groups.append(LoraGroup(layers))
    return active
