"""Types to bytes and back, by the schema of `wire.proto`. Tensors travel as raw little-endian numpy bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from . import wire_pb2 as pb
from .errors import UserError
from .tensors import Datum, ModelInput, TensorData, dense_from_csr
from .types import ForwardBackwardOutput, SampledSequence, SampleResponse, SamplingParams

_DTYPES: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_NO_LOGPROB = -99999.0


@dataclass(frozen=True)
class TrainingBatch:
    """The request of a forward or forward_backward."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str]


@dataclass(frozen=True)
class SampleRequest:
    """`model_path` None: the base model itself."""

    base_model: str
    model_path: str | None
    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Bytes that do not parse, or whose parts do not fit together, are the sender's mistake."""
    try:
        yield
    except UserError:
        raise
    except (DecodeError, ValueError, LookupError) as error:
        raise UserError(f"the bytes are not a {what}: {error}") from None


# ------------------------------------------------------------------------------------------------ training batches


def encode_batch(
    job: str,
    seq: int,
    data: Sequence[Datum],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
    *,
    forward_only: bool,
) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=job, seq_id=seq, loss_fn=loss_fn, forward_only=forward_only)
    for datum in data:
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = datum.model_input.tokens.astype("<i4").tobytes()
        for name, tensor in datum.loss_fn_inputs.items():
            _encode_tensor(row.loss_fn_inputs[name], tensor)
    for key, value in (config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = float(value)
    return message.SerializeToString(deterministic=True)


@_reading("ForwardBackwardRequest")
def decode_batch(payload: bytes) -> TrainingBatch:
    message = pb.ForwardBackwardRequest.FromString(payload)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return TrainingBatch([_decode_datum(row) for row in message.data], message.loss_fn, config)


def _decode_datum(row: pb.Datum) -> Datum:
    pieces = []
    for chunk in row.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError("this base model reads text only, but the request holds an image")
        pieces.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    inputs = {name: _decode_tensor(tensor) for name, tensor in row.loss_fn_inputs.items()}
    return Datum(ModelInput.from_ints(tokens), inputs)


def _encode_tensor(message: pb.Tensor, tensor: TensorData) -> None:
    array = tensor.array
    message.dtype = pb.DTYPE_FLOAT32 if array.dtype.kind == "f" else pb.DTYPE_INT64
    message.dense = np.ascontiguousarray(array, _DTYPES[message.dtype]).tobytes()
    message.shape.extend(array.shape)


def _decode_tensor(message: pb.Tensor) -> NDArray[Any]:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"a tensor has the dtype code {message.dtype}; float32 and int64 are understood")
    shape = tuple(message.shape)
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            sparse = message.sparse_csr
            return dense_from_csr(
                np.frombuffer(sparse.values, dtype),
                np.frombuffer(sparse.crow_indices, "<i8"),
                np.frombuffer(sparse.col_indices, "<i8"),
                shape,
            )
        return np.frombuffer(message.dense, dtype).reshape(shape)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"a tensor's bytes do not fill its shape {shape}: {error}") from None


# ------------------------------------------------------------------------------------------------- training outputs


def encode_output(output: ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    # One record per run of datums with the same trailing shape: (N,) and (N, K) targets may be mixed.
    run: list[dict[str, TensorData]] = []
    for fields in output.loss_fn_outputs:
        if run and _trailing(fields) != _trailing(run[0]):
            _encode_record(message.loss_fn_outputs.add(), run)
            run = []
        run.append(fields)
    if run:
        _encode_record(message.loss_fn_outputs.add(), run)
    message.metrics.update(output.metrics)
    return message.SerializeToString()


def _trailing(fields: dict[str, TensorData]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.array.shape[1:] for name, tensor in fields.items()}


def _encode_record(record: pb.ArrayRecord, run: list[dict[str, TensorData]]) -> None:
    record.num_datums = len(run)
    for name in run[0]:
        arrays = [np.ascontiguousarray(fields[name].array) for fields in run]
        field = record.fields[name]
        field.dtype = pb.DTYPE_FLOAT32 if arrays[0].dtype.kind == "f" else pb.DTYPE_INT64
        arrays = [array.astype(_DTYPES[field.dtype], copy=False) for array in arrays]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        field.trailing_shape.extend(arrays[0].shape[1:])


@_reading("ForwardBackwardOutput")
def decode_output(payload: bytes, *, cycle: int | None = None) -> ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput.FromString(payload)
    rows: list[dict[str, TensorData]] = []
    for record in message.loss_fn_outputs:
        fresh: list[dict[str, TensorData]] = [{} for _ in range(record.num_datums)]
        for name, field in record.fields.items():
            dtype, trailing = _DTYPES[field.dtype], tuple(field.trailing_shape)
            offsets = np.frombuffer(field.offsets, "<i8")
            for index, row in enumerate(fresh):
                values = np.frombuffer(field.data[offsets[index] : offsets[index + 1]], dtype)
                row[name] = TensorData(values.reshape((-1, *trailing)))
        rows.extend(fresh)
    metrics = dict(message.metrics)
    return ForwardBackwardOutput(
        loss_fn_output_type=message.loss_fn_output_type or "ArrayRecord",
        loss_fn_outputs=rows,
        metrics=metrics,
        loss=mean_loss(metrics),
        cycle=cycle,
    )


def mean_loss(metrics: Mapping[str, float]) -> float:
    """Weighted mean per token; the plain sum where all weights are 0."""
    total, weight = metrics.get("loss:sum", float("nan")), metrics.get("weights:sum", 0.0)
    return total / weight if weight else total


# --------------------------------------------------------------------------------------------------------- sampling


def encode_sample_request(request: SampleRequest) -> bytes:
    params = request.params
    message = pb.SampleRequest(
        base_model=request.base_model,
        model_path=request.model_path or "",
        prompt=request.prompt.tokens.astype("<i4").tobytes(),
        num_samples=request.num_samples,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
    )
    out = message.params
    if params.max_tokens is not None:
        out.max_tokens = params.max_tokens
    if params.seed is not None:
        out.seed = params.seed
    out.temperature, out.top_k, out.top_p = params.temperature, params.top_k, params.top_p
    out.stop_strings.extend(params.stop_strings)
    out.stop_token_ids.extend(params.all_stop_token_ids)
    out.ignore_eos = params.ignore_eos
    return message.SerializeToString(deterministic=True)


@_reading("SampleRequest")
def decode_sample_request(payload: bytes) -> SampleRequest:
    message = pb.SampleRequest.FromString(payload)
    given = message.params
    stop: list[str] | None = list(given.stop_strings) or None
    params = SamplingParams(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        seed=given.seed if given.HasField("seed") else None,
        stop=[] if given.ignore_eos else stop,
        stop_token_ids=list(given.stop_token_ids) or None,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
    )
    return SampleRequest(
        base_model=message.base_model,
        model_path=message.model_path or None,
        prompt=ModelInput.from_ints(np.frombuffer(message.prompt, "<i4")),
        num_samples=message.num_samples,
        params=params,
        prompt_logprobs=message.prompt_logprobs,
        topk_prompt_logprobs=message.topk_prompt_logprobs,
    )


def encode_sample_response(response: SampleResponse) -> bytes:
    message = pb.SampleResponse()
    for sequence in response.sequences:
        item = message.sequences.add()
        item.stop_reason = pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        item.tokens = np.asarray(sequence.tokens, "<i4").tobytes()
        item.logprobs = np.asarray(sequence.logprobs, "<f4").tobytes()
    if response.prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(values, "<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        _encode_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs)
    return message.SerializeToString()


def _encode_topk(message: pb.TopkLogprobs, rows: list[list[tuple[int, float]] | None]) -> None:
    k = max((len(row) for row in rows if row), default=0)
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), _NO_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or []):
            ids[index, column], logprobs[index, column] = token, logprob
    message.k, message.length = k, len(rows)
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()


@_reading("SampleResponse")
def decode_sample_response(payload: bytes, texts: Sequence[str | None] | None = None) -> SampleResponse:
    """`texts`: the decoded text of each sequence, which the binary format has no place for."""
    message = pb.SampleResponse.FromString(payload)
    sequences = []
    for index, item in enumerate(message.sequences):
        sequences.append(
            SampledSequence(
                tokens=np.frombuffer(item.tokens, "<i4").tolist(),
                logprobs=np.frombuffer(item.logprobs, "<f4").tolist(),
                stop_reason="stop" if item.stop_reason == pb.STOP_REASON_STOP else "length",
                text=texts[index] if texts else None,
            )
        )
    prompt = None
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, "<f4")
        prompt = [None if np.isnan(value) else float(value) for value in values]
    topk = None
    if message.HasField("topk_prompt_logprobs"):
        topk = _decode_topk(message.topk_prompt_logprobs)
    return SampleResponse(sequences=sequences, prompt_logprobs=prompt, topk_prompt_logprobs=topk)


def _decode_topk(message: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    shape = (message.length, message.k)
    ids = np.frombuffer(message.token_ids, "<i4").reshape(shape)
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(shape)
    rows: list[list[tuple[int, float]] | None] = []
    for row_ids, row_logprobs in zip(ids, logprobs, strict=True):
        cells = [
            (int(token), float(logprob))
            for token, logprob in zip(row_ids, row_logprobs, strict=True)
            if logprob != _NO_LOGPROB
        ]
        rows.append(cells or None)
    return rows
