"""The bytes are those of the public protocol, and every message survives the way there and back.

Expected bytes are put together here by hand, from protobuf's encoding rules and the field numbers of the public
schema; no generated code takes part in that.
"""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest

from lorry_jobs import wire, wire_pb2
from lorry_jobs.errors import UserError
from lorry_jobs.tensors import Datum, ModelInput, TensorData
from lorry_jobs.types import ForwardBackwardOutput, SampledSequence, SampleResponse, SamplingParams


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def num(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value)


def blob(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def packed(field: int, *values: int) -> bytes:
    return blob(field, b"".join(varint(value) for value in values))


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def longs(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4


def tensor(raw: bytes, dtype: int, *shape: int) -> bytes:
    return blob(1, raw) + num(3, dtype) + packed(4, *shape)


def csr(values: bytes, crow: bytes, col: bytes, dtype: int, *shape: int) -> bytes:
    return blob(2, blob(1, values) + blob(2, crow) + blob(3, col)) + num(3, dtype) + packed(4, *shape)


def text_chunk(*tokens: int) -> bytes:
    return blob(1, blob(1, ints(*tokens)))


def request(*chunks: bytes, **inputs: bytes) -> bytes:
    """The bytes of a ForwardBackwardRequest with one datum."""
    datum = b"".join(blob(1, chunk) for chunk in chunks)
    datum += b"".join(blob(2, blob(1, key) + blob(2, value)) for key, value in inputs.items())
    return blob(1, "a") + num(2, 3) + blob(3, datum) + blob(4, "cross_entropy")


TARGETS = tensor(longs(2, 3), INT64, 2)

# ------------------------------------------------------------------------------------------------- field numbers

# Appendix A of the public protocol's reference. (o) optional, (r) repeated, (m) map, all others single.
PUBLIC = {
    "Tensor": "bytes dense 1, SparseCsr sparse_csr 2, DType dtype 3, int64(r) shape 4",
    "SparseCsr": "bytes values 1, bytes crow_indices 2, bytes col_indices 3",
    "ForwardBackwardRequest": (
        "string model_id 1, int32 seq_id 2, Datum(r) data 3, string loss_fn 4, double(m) loss_fn_config 5, "
        "bool forward_only 6, LossConfigValue(m) loss_fn_config_v2 7"
    ),
    "LossConfigValue": "double number 1, string text 2",
    "Datum": "Chunk(r) model_input 1, Tensor(m) loss_fn_inputs 2",
    "Chunk": "EncodedTextChunk encoded_text 1, ImageChunk image 2",
    "EncodedTextChunk": "bytes tokens 1",
    "ImageChunk": "bytes data 1, string format 2, int32(o) expected_tokens 3",
    "ForwardBackwardOutput": "string loss_fn_output_type 1, ArrayRecord(r) loss_fn_outputs 2, double(m) metrics 3",
    "ArrayRecord": "string type_tag 1, BatchedTensor(m) fields 2, int64 num_datums 3",
    "BatchedTensor": "bytes data 1, bytes offsets 2, DType dtype 3, int64(r) trailing_shape 4",
    "SampleResponse": (
        "SampledSequence(r) sequences 1, bytes(o) prompt_logprobs 2, TopkLogprobs(o) topk_prompt_logprobs 3"
    ),
    "SampledSequence": "StopReason stop_reason 1, bytes tokens 2, bytes(o) logprobs 3",
    "TopkLogprobs": "bytes token_ids 1, bytes logprobs 2, uint32 k 3, uint32 length 4",
}
TYPES = {1: "double", 2: "float", 3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}


def described(field) -> str:
    def kind(of) -> str:
        if of.message_type:
            return of.message_type.name
        return of.enum_type.name if of.enum_type else TYPES[of.type]

    if field.message_type and field.message_type.GetOptions().map_entry:
        assert kind(field.message_type.fields_by_name["key"]) == "string"
        return f"{kind(field.message_type.fields_by_name['value'])}(m) {field.name} {field.number}"
    mark = ""
    if getattr(field, "is_repeated", None) if hasattr(field, "is_repeated") else field.label == 3:
        mark = "(r)"
    elif field.containing_oneof and field.containing_oneof.name == f"_{field.name}":
        mark = "(o)"
    return f"{kind(field)}{mark} {field.name} {field.number}"


@pytest.mark.parametrize("name", PUBLIC)
def test_messages_have_the_public_field_numbers(name):
    message = wire_pb2.DESCRIPTOR.message_types_by_name[name]
    assert sorted(described(field) for field in message.fields) == sorted(PUBLIC[name].split(", "))


def test_only_our_own_messages_are_not_public():
    assert set(wire_pb2.DESCRIPTOR.message_types_by_name) - set(PUBLIC) == {"SampleRequest", "SamplingParams"}


def test_enums_have_the_public_numbers():
    enums = {
        name: {value.name: value.number for value in enum.values}
        for name, enum in wire_pb2.DESCRIPTOR.enum_types_by_name.items()
    }
    assert enums == {
        "StopReason": {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1},
        "DType": {
            "DTYPE_UNSPECIFIED": 0,
            "DTYPE_FLOAT32": 1,
            "DTYPE_INT64": 2,
            "DTYPE_INT32": 3,
            "DTYPE_BFLOAT16": 4,
        },
    }


# ----------------------------------------------------------------------------------------------- training batches


def test_a_request_is_these_bytes():
    data = [Datum([1, 2], {"target_tokens": [2, 3]})]
    written = wire.encode_batch("a", 3, data, "cross_entropy", None, forward_only=False)
    assert written == request(text_chunk(1, 2), target_tokens=TARGETS)
    assert written.hex() == (
        "0a01611003"
        "1a380a0c0a0a0a080100000002000000"
        "12280a0d7461726765745f746f6b656e7312170a10020000000000000003000000000000001802220102"
        "220d63726f73735f656e74726f7079"
    )


def test_a_request_with_settings_is_these_bytes():
    data = [Datum([7], {"target_tokens": [8], "weights": [0.5]})]
    written = wire.encode_batch("a", 3, data, "ppo", {"clip": 0.25, "mode": "x"}, forward_only=True)
    datum = (
        blob(1, text_chunk(7))
        + blob(2, blob(1, "target_tokens") + blob(2, tensor(longs(8), INT64, 1)))
        + blob(2, blob(1, "weights") + blob(2, tensor(floats(0.5), FLOAT32, 1)))
    )
    assert written == (
        blob(1, "a")
        + num(2, 3)
        + blob(3, datum)
        + blob(4, "ppo")
        + num(6, 1)
        + blob(7, blob(1, "clip") + blob(2, double(1, 0.25)))
        + blob(7, blob(1, "mode") + blob(2, blob(2, "x")))
    )


def test_the_same_batch_is_always_the_same_bytes():
    # The digest of a retried request depends on it.
    config = {f"key{number}": float(number) for number in range(20)}
    data = [Datum([1], {"target_tokens": [1], "weights": [1], "advantages": [1], "logprobs": [1], "mask": [1]})]
    turned = [Datum([1], dict(reversed(data[0].loss_fn_inputs.items())))]
    first = wire.encode_batch("a", 1, data, "ppo", config, forward_only=False)
    assert first == wire.encode_batch("a", 1, turned, "ppo", dict(reversed(config.items())), forward_only=False)


def test_a_batch_survives_the_way():
    data = [
        Datum([5, 6, 7], {"target_tokens": [6, 7, -100], "weights": [0, 0.5, 1], "advantages": [-1, 0, 1e-8]}),
        Datum([2**31 - 1], {"target_tokens": [2**40]}),
        Datum([1, 2], {"target_tokens": [[1, 2, 3], [4, 5, 6]], "weights": [[1, 0, 0], [0, 1, 0]]}),
    ]
    payload = wire.encode_batch("a", 9, data, "ppo", {"clip": 0.2, "mode": "strict"}, forward_only=False)
    batch = wire.decode_batch(payload)
    assert (batch.loss_fn, batch.loss_fn_config) == ("ppo", {"clip": 0.2, "mode": "strict"})
    assert len(batch.data) == 3
    for got, sent in zip(batch.data, data, strict=True):
        assert got.model_input.to_ints() == sent.model_input.to_ints()
        assert set(got.loss_fn_inputs) == set(sent.loss_fn_inputs)
        for key, tensor_sent in sent.loss_fn_inputs.items():
            assert got.loss_fn_inputs[key].dtype == tensor_sent.dtype
            assert got.loss_fn_inputs[key].tolist() == tensor_sent.tolist()


def test_an_empty_batch_survives_the_way():
    batch = wire.decode_batch(wire.encode_batch("a", 1, [], "cross_entropy", {}, forward_only=False))
    assert (batch.data, batch.loss_fn, batch.loss_fn_config) == ([], "cross_entropy", {})


def test_several_text_chunks_are_one_sequence():
    targets = tensor(longs(2, 3, 4), INT64, 3)
    [datum] = wire.decode_batch(request(text_chunk(1, 2), text_chunk(3), target_tokens=targets)).data
    assert datum.model_input.to_ints() == [1, 2, 3]


def test_settings_in_the_older_form_are_read_too():
    payload = request(text_chunk(1, 2), target_tokens=TARGETS) + blob(5, blob(1, "clip") + double(2, 0.3))
    assert wire.decode_batch(payload).loss_fn_config == {"clip": 0.3}


def test_fields_from_a_newer_protocol_are_passed_over():
    payload = request(text_chunk(1, 2), target_tokens=TARGETS) + blob(99, "news") + num(98, 5)
    assert wire.decode_batch(payload).data[0].model_input.to_ints() == [1, 2]


def test_int32_and_sparse_tensors_are_read():
    # Row 0 holds 0.5 in column 1, row 1 holds 2 in column 0.
    weights = csr(floats(0.5, 2), longs(0, 1, 2), longs(1, 0), FLOAT32, 2, 2)
    targets = tensor(ints(1, 2, 3, 4), INT32, 2, 2)
    [datum] = wire.decode_batch(request(text_chunk(1, 2), target_tokens=targets, weights=weights)).data
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [[1, 2], [3, 4]]
    assert datum.loss_fn_inputs["weights"].tolist() == [[0, 0.5], [2, 0]]


def test_an_image_is_refused():
    image = blob(2, blob(1, b"\x89PNG") + blob(2, "png"))
    with pytest.raises(UserError, match="reads text only"):
        wire.decode_batch(request(text_chunk(1), image, target_tokens=TARGETS))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xff\xff\xff", "not a ForwardBackwardRequest"),
        (request(text_chunk(1, 2), target_tokens=TARGETS)[:-1], "not a ForwardBackwardRequest"),
        (blob(4, b"\xff\xfe"), "not a ForwardBackwardRequest"),  # a string that is not UTF-8
        (request(blob(1, blob(1, b"12345")), target_tokens=TARGETS), "not a ForwardBackwardRequest"),
        (request(text_chunk(1, -2), target_tokens=TARGETS), "negative"),
        (request(b"", target_tokens=TARGETS), "text only"),
        (request(text_chunk(1, 2), target_tokens=tensor(longs(2, 3), INT64, 3)), r"do not fill its shape \(3,\)"),
        (request(text_chunk(1, 2), target_tokens=tensor(b"12345", INT64, 2)), "do not fill"),
        (request(text_chunk(1, 2), target_tokens=tensor(b"1234", BFLOAT16, 2)), "dtype code 4"),
        (request(text_chunk(1, 2), target_tokens=tensor(longs(2, 3), 0, 2)), "dtype code 0"),
        (request(text_chunk(1, 2), target_tokens=TARGETS, colour=TARGETS), "unknown loss input 'colour'"),
        (request(text_chunk(1, 2)), "no 'target_tokens'"),
        (request(text_chunk(1, 2), target_tokens=csr(longs(1), longs(0, 1), longs(0), INT64, 2, 1)), "CSR"),
        (request(text_chunk(1, 2), target_tokens=csr(longs(1), b"123", longs(0), INT64, 2, 1)), "do not fill"),
        # A few bytes must not ask for terabytes.
        (request(text_chunk(1), target_tokens=csr(b"", longs(0, 0), b"", INT64, 1, 2**40)), "CSR"),
        (request(text_chunk(1), target_tokens=csr(b"", longs(0, 0), b"", INT64, 1, 2**62)), "CSR"),
    ],
)
def test_bytes_that_are_no_batch_are_a_user_error(payload, reason):
    with pytest.raises(UserError, match=reason):
        wire.decode_batch(payload)


def test_no_damage_to_a_batch_is_anything_but_a_user_error():
    data = [
        Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [0.5, 1, 1]}),
        Datum([9, 8], {"target_tokens": [[1, 2], [3, 4]]}),
    ]
    whole = wire.encode_batch("a", 3, data, "ppo", {"clip": 0.25, "mode": "x"}, forward_only=False)
    dice, refused = random.Random(5), 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            wire.decode_batch(bytes(damaged[: dice.choice([None, dice.randrange(len(damaged))])]))
        except UserError:
            refused += 1
    assert refused > 1000


# ------------------------------------------------------------------------------------------------ training outputs


def output(*rows: dict, **metrics: float) -> ForwardBackwardOutput:
    tensors = [{key: TensorData(value) for key, value in row.items()} for row in rows]
    return ForwardBackwardOutput(loss_fn_outputs=tensors, metrics=metrics)


def test_an_output_is_these_bytes():
    batched = blob(1, floats(-1, -2, -3)) + blob(2, longs(0, 8, 12)) + num(3, FLOAT32)
    record = blob(2, blob(1, "logprobs") + blob(2, batched)) + num(3, 2)
    expected = blob(1, "ArrayRecord") + blob(2, record) + blob(3, blob(1, "loss:sum") + double(2, 6.0))
    made = output({"logprobs": [-1.0, -2.0]}, {"logprobs": [-3.0]}, **{"loss:sum": 6.0})
    assert wire.encode_output(made) == expected


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"logprobs": [-1.0, -2.0]}],
        [{"logprobs": [-1.0, -2.0]}, {"logprobs": [-3.0]}, {"logprobs": [-4.0, -5.0, -6.0]}],  # ragged
        [{"logprobs": [[-1.0, -2.0], [-3.0, -4.0]]}, {"logprobs": [[-5.0, -6.0]]}],  # (N, K)
        # (N,) and (N, K) mixed, and K differing; the order of datums is kept.
        [{"logprobs": [-1.0]}, {"logprobs": [[-2.0, -3.0]]}, {"logprobs": [-4.0, -5.0]}, {"logprobs": [[-6.0] * 3]}],
        [{"logprobs": [-1.0], "argmax": [5]}, {"logprobs": [-2.0, -3.0], "argmax": [6, 7]}],
        [{"logprobs": [-1.0]}, {"logprobs": [-1.0], "argmax": [6]}],  # fields differ
    ],
)
def test_an_output_survives_the_way(rows):
    sent = output(*rows, **{"loss:sum": 6.0, "weights:sum": 4.0, "tokens:sum": 5.0})
    got = wire.decode_output(wire.encode_output(sent), cycle=17)
    assert got.metrics == {"loss:sum": 6.0, "weights:sum": 4.0, "tokens:sum": 5.0}
    assert (got.loss, got.cycle) == (1.5, 17)
    assert [{key: value.tolist() for key, value in row.items()} for row in got.loss_fn_outputs] == rows
    for row, row_sent in zip(got.loss_fn_outputs, sent.loss_fn_outputs, strict=True):
        assert {key: value.dtype for key, value in row.items()} == {k: v.dtype for k, v in row_sent.items()}


def test_the_loss_is_a_mean_over_weights_or_else_the_sum():
    assert wire.mean_loss({"loss:sum": 6.0, "weights:sum": 4.0}) == 1.5
    assert wire.mean_loss({"loss:sum": 6.0, "weights:sum": 0.0}) == 6.0
    assert wire.mean_loss({"loss:sum": 6.0}) == 6.0
    assert math.isnan(wire.mean_loss({}))


def test_an_output_that_is_none_is_a_user_error():
    whole = wire.encode_output(output({"logprobs": [-1.0, -2.0]}, {"logprobs": [-3.0]}))
    dice, refused = random.Random(6), 0
    for _ in range(1000):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            wire.decode_output(bytes(damaged[: dice.choice([None, dice.randrange(len(damaged))])]))
        except UserError:
            refused += 1
    assert refused > 300


# ------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=1, seed=0, temperature=0.0, top_k=1, top_p=0.1),
        SamplingParams(seed=2**64 - 1, max_tokens=2**31 - 1),
        SamplingParams(stop="\n\n"),
        SamplingParams(stop=["a", "Ω"], stop_token_ids=[4, 5]),
        SamplingParams(stop=[7, 8], stop_token_ids=[9]),
        SamplingParams(stop=[]),
        SamplingParams(stop=[], stop_token_ids=[3]),
    ],
)
@pytest.mark.parametrize("path", [None, "lorry://a/sampler_weights/b"])
def test_a_sample_request_survives_the_way(params, path):
    prompt = ModelInput.from_ints([0, 2**31 - 1, 7])
    sent = wire.SampleRequest("m", path, prompt, 3, params, prompt_logprobs=True, topk_prompt_logprobs=5)
    got = wire.decode_sample_request(wire.encode_sample_request(sent))
    assert (got.base_model, got.model_path, got.prompt, got.num_samples) == ("m", path, prompt, 3)
    assert (got.prompt_logprobs, got.topk_prompt_logprobs) == (True, 5)
    for name in ("max_tokens", "seed", "temperature", "top_k", "top_p"):
        assert getattr(got.params, name) == getattr(params, name)
    # The forms of `stop` may differ, what they mean may not.
    for meaning in ("stop_strings", "all_stop_token_ids", "ignore_eos"):
        assert getattr(got.params, meaning) == getattr(params, meaning)


def test_a_sample_response_is_these_bytes():
    response = SampleResponse(
        sequences=[
            SampledSequence(tokens=[5, 6], logprobs=[-0.5, -1.0], stop_reason="length"),
            SampledSequence(tokens=[], logprobs=[], stop_reason="stop"),
        ],
        prompt_logprobs=[None, -2.0],
        topk_prompt_logprobs=[None, [(3, -0.25), (4, -0.5)]],
    )
    topk = blob(1, ints(0, 0, 3, 4)) + blob(2, floats(-99999, -99999, -0.25, -0.5)) + num(3, 2) + num(4, 2)
    assert wire.encode_sample_response(response) == (
        blob(1, num(1, 1) + blob(2, ints(5, 6)) + blob(3, floats(-0.5, -1)))
        + blob(1, blob(3, b""))
        + blob(2, np.array([np.nan, -2], "<f4").tobytes())
        + blob(3, topk)
    )


@pytest.mark.parametrize("prompt_logprobs", [None, [], [None], [None, -1.5, -2.0]])
@pytest.mark.parametrize("topk", [None, [], [None, None], [None, [(1, -0.5)], [(2, -0.25), (3, -1.5)]]])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_sample_response_survives_the_way(prompt_logprobs, topk, count):
    sequences = [
        SampledSequence(tokens=list(range(n)), logprobs=[-0.5] * n, stop_reason="length" if n else "stop", text=f"t{n}")
        for n in range(count)
    ]
    sent = SampleResponse(sequences=sequences, prompt_logprobs=prompt_logprobs, topk_prompt_logprobs=topk)
    got = wire.decode_sample_response(wire.encode_sample_response(sent), [f"t{n}" for n in range(count)])
    assert got == sent


def test_text_is_optional_in_a_sample_response():
    sent = SampleResponse(sequences=[SampledSequence(tokens=[1], logprobs=[-1], stop_reason="stop", text="hello")])
    assert wire.decode_sample_response(wire.encode_sample_response(sent)).sequences[0].text is None


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff\xff",
        blob(1, "m") + blob(3, b"12345"),  # a prompt of five bytes
        blob(1, "m") + blob(3, ints(1, -2)),
        blob(1, "m") + blob(3, ints(1)) + blob(5, double(3, -1.0)),  # a negative temperature
    ],
)
def test_bytes_that_are_no_sample_request_are_a_user_error(payload):
    with pytest.raises(UserError):
        wire.decode_sample_request(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff\xff",
        blob(1, blob(2, b"12345")),
        blob(2, b"123"),
        blob(3, blob(1, ints(1)) + blob(2, floats(-1)) + num(3, 2) + num(4, 2)),  # 1 cell for a table of 4
    ],
)
def test_bytes_that_are_no_sample_response_are_a_user_error(payload):
    with pytest.raises(UserError):
        wire.decode_sample_response(payload)
