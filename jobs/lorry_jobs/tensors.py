"""Token sequences and tensors as users give them, held as numpy arrays and checked on construction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UserError

TensorDtype = Literal["float32", "int64"]

FLOAT_INPUTS = ("weights", "advantages", "logprobs", "mask", "sequence_ratio_mask")
INT_INPUTS = ("target_tokens",)
IGNORED_TARGET = -100
"""A target with this value has weight 0, as in transformers and PyTRIO."""
MAX_CSR_CELLS = 2**26


class LorryModel(BaseModel):
    """Base of all request and result types: frozen, no unknown fields, and bad input is a `UserError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise UserError(_readable(type(self), error)) from None


def _readable(model: type[BaseModel], error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(x) for x in item["loc"])
        if item["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            parts.append(f"unknown field '{field}' (the fields are: {known})")
        else:
            parts.append(f"{field}: {item['msg']}" if field else str(item["msg"]))
    return f"{model.__name__}: " + "; ".join(parts)


def as_tokens(values: Any, what: str) -> NDArray[np.int64]:
    """1-D int64 token ids from a list, numpy array, torch tensor, `TensorData` or `ModelInput`."""
    array = _as_array(values, what)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1:
        raise UserError(f"{what} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise UserError(f"{what} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _as_array(values: Any, what: str) -> NDArray[Any]:
    if isinstance(values, TensorData):
        return values.array
    if isinstance(values, ModelInput):
        return values.tokens
    if hasattr(values, "detach"):  # torch, without importing it
        values = values.detach().cpu()
        values = values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(f"{what} is not a rectangular array of numbers: {error}") from None
    if array.dtype.kind not in "iufb":
        raise UserError(f"{what} must hold numbers, got {array.dtype}")
    return array


class ModelInput(LorryModel):
    """What the model reads: a sequence of tokens.

    `tokens` is 1-D int64, at least 0 each (checked against the vocabulary when the request is made).
    """

    tokens: NDArray[np.int64]

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | NDArray[Any]) -> ModelInput:
        array = as_tokens(tokens, "tokens")
        if array.size and array.min() < 0:
            raise UserError(f"token ids must not be negative, got {int(array.min())}")
        return cls(tokens=array)

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(tokens=np.zeros(0, np.int64))

    def append(self, other: ModelInput | Sequence[int]) -> ModelInput:
        """A new input with more tokens at its end; this one does not change."""
        more = other if isinstance(other, ModelInput) else ModelInput.from_ints(other)
        return ModelInput(tokens=np.concatenate([self.tokens, more.tokens]))

    def append_int(self, token: int) -> ModelInput:
        return self.append([token])

    def to_ints(self) -> list[int]:
        return [int(token) for token in self.tokens]

    def tolist(self) -> list[int]:
        return self.to_ints()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelInput) and np.array_equal(self.tokens, other.tokens)


class TensorData(LorryModel):
    """A float32 or int64 array. CSR input (`sparse_*`) is made dense at once."""

    array: NDArray[Any]

    def __init__(
        self,
        data: Any = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
        *,
        array: Any = None,
    ) -> None:
        values = _as_array(data if array is None else array, "data")
        if dtype is None:
            dtype = "float32" if values.dtype.kind == "f" else "int64"
        if dtype not in ("float32", "int64"):
            raise UserError(f"dtype must be 'float32' or 'int64', got {dtype!r}")
        if (
            dtype == "int64"
            and values.dtype.kind == "f"
            and not np.all(np.isfinite(values) & (values == np.trunc(values)))
        ):
            raise UserError("int64 data has fractional or infinite values")
        values = values.astype(dtype)
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            values = dense_from_csr(values, sparse_crow_indices, sparse_col_indices, shape)
        elif shape is not None:
            try:
                values = values.reshape(tuple(shape))
            except ValueError:
                raise UserError(f"{values.size} values do not fill the shape {tuple(shape)}") from None
        super().__init__(array=values)

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> TensorData:
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        return cls(tensor)

    @property
    def data(self) -> list[Any]:
        """All values, flat."""
        return self.array.ravel().tolist()

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def tolist(self) -> list[Any]:
        """Nested lists, flat for a 1-D tensor."""
        return self.array.tolist()  # type: ignore[no-any-return]

    def to_numpy(self) -> NDArray[Any]:
        return self.array

    def to_torch(self) -> Any:
        import torch

        return torch.from_numpy(self.array.copy())

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.array)

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorData) and np.array_equal(self.array, other.array)


def dense_from_csr(
    values: NDArray[Any],
    crow_indices: Any,
    col_indices: Any,
    shape: Sequence[int] | None,
) -> NDArray[Any]:
    """The dense matrix of a compressed-sparse-row triple; cells that are not listed are 0."""
    if shape is None or len(shape) != 2 or crow_indices is None or col_indices is None:
        raise UserError("a CSR tensor needs sparse_crow_indices, sparse_col_indices and a shape of two numbers")
    rows, cols = (int(n) for n in shape)
    if rows * cols > MAX_CSR_CELLS:  # before anything is allocated: a few bytes could ask for terabytes
        raise UserError(f"a CSR tensor of shape ({rows}, {cols}) has more than {MAX_CSR_CELLS} cells")
    crow, col = np.asarray(crow_indices, np.int64), np.asarray(col_indices, np.int64)
    counts = np.diff(crow)
    if len(crow) != rows + 1 or (len(crow) and crow[0] != 0) or np.any(counts < 0) or crow[-1] != len(col):
        raise UserError(f"CSR row pointers do not describe {rows} rows and {len(col)} values")
    if len(values) != len(col) or (len(col) and (col.min() < 0 or col.max() >= cols)):
        raise UserError(f"CSR columns must lie in [0, {cols}) and match the values")
    dense = np.zeros((rows, cols), values.dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense


class Datum(LorryModel):
    """One training example: position i of `model_input` predicts `target_tokens[i]`.

    `loss_fn_inputs` may hold lists, numpy arrays, torch tensors, `TensorData` or `ModelInput`; they become
    `TensorData`: `target_tokens` int64 of shape (N,) or (N, K) with N = `model_input.length`, everything else
    float32 and finite. Without `weights` every target has weight 1.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any]) -> None:
        if not isinstance(model_input, ModelInput):
            model_input = ModelInput.from_ints(model_input)
        super().__init__(
            model_input=model_input,
            loss_fn_inputs={key: _loss_input(key, value) for key, value in loss_fn_inputs.items()},
        )
        self._check_shapes()

    def _check_shapes(self) -> None:
        length = self.model_input.length
        if length == 0:
            raise UserError("Datum: model_input has no tokens")
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise UserError("Datum: loss_fn_inputs has no 'target_tokens'")
        for key, value in self.loss_fn_inputs.items():
            if value.array.ndim not in (1, 2) or len(value.array) != length:
                raise UserError(
                    f"Datum: {key} has shape {tuple(value.shape)}, but model_input has {length} tokens; "
                    "every loss input needs one entry per input token"
                )
        weights = self.loss_fn_inputs.get("weights")
        if weights is not None and weights.shape != targets.shape:
            raise UserError(
                f"Datum: weights {tuple(weights.shape)} and target_tokens {tuple(targets.shape)} differ in shape"
            )


def _loss_input(key: str, value: Any) -> TensorData:
    known = (*INT_INPUTS, *FLOAT_INPUTS)
    if key not in known:
        raise UserError(f"Datum: unknown loss input '{key}' (known: {', '.join(known)})")
    array = _as_array(value, f"Datum: {key}")
    if key in INT_INPUTS:
        tensor = TensorData(array, dtype="int64")
        bad = (tensor.array < 0) & (tensor.array != IGNORED_TARGET)
        if bad.any():
            raise UserError(f"Datum: {key} has the negative token {int(tensor.array[bad][0])}")
        return tensor
    tensor = TensorData(array, dtype="float32")
    finite = np.isfinite(tensor.array)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise UserError(f"Datum: {key} is {tensor.array[where]} at position {where}; it must be finite")
    return tensor
