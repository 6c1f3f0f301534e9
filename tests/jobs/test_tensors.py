from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.errors import UserError
from lorry_jobs.tensors import IGNORED_TARGET, Datum, ModelInput, TensorData

# --------------------------------------------------------------------------------------------------- ModelInput


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 0, 7],
        (5, 0, 7),
        np.array([5, 0, 7], np.int32),
        np.array([5, 0, 7], np.uint8),
        torch.tensor([5, 0, 7]),
        torch.tensor([5, 0, 7], dtype=torch.int32, requires_grad=False),
        TensorData([5, 0, 7]),
        ModelInput.from_ints([5, 0, 7]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tokens_from_anything_that_holds_integers(tokens):
    made = ModelInput.from_ints(tokens)
    assert made.tokens.dtype == np.int64
    assert made.to_ints() == made.tolist() == [5, 0, 7]
    assert (made.length, len(made)) == (3, 3)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([1, -2], "negative, got -2"),
        ([[1, 2]], r"one-dimensional, got shape \(1, 2\)"),
        ([1.5, 2.0], "integers, got float64"),
        (["a", "b"], "must hold numbers"),
        ([[1], [2, 3]], "rectangular"),
        ("hello", "must hold numbers"),
        ([None, 1], "must hold numbers"),
        ([True, False], "integers, got bool"),
    ],
)
def test_what_is_no_token_sequence_is_refused(tokens, reason):
    with pytest.raises(UserError, match=reason):
        ModelInput.from_ints(tokens)


def test_an_empty_input_is_empty_and_integer():
    for made in (ModelInput.empty(), ModelInput.from_ints([]), ModelInput.from_ints(np.zeros(0))):
        assert made.length == 0
        assert made.tokens.dtype == np.int64
    assert ModelInput.empty() == ModelInput.from_ints([])


def test_appending_makes_a_new_input():
    first = ModelInput.from_ints([1, 2])
    assert first.append(ModelInput.from_ints([3])).append([4, 5]).append_int(6).to_ints() == [1, 2, 3, 4, 5, 6]
    assert first.to_ints() == [1, 2]
    with pytest.raises(UserError, match="negative"):
        first.append_int(-1)


def test_inputs_are_equal_by_their_tokens():
    assert ModelInput.from_ints([1, 2]) == ModelInput.from_ints(np.array([1, 2]))
    assert ModelInput.from_ints([1, 2]) != ModelInput.from_ints([1, 3])
    assert ModelInput.from_ints([1, 2]) != [1, 2]


def test_the_callers_array_may_change_afterwards():
    mine = np.array([1, 2, 3])
    tokens, tensor = ModelInput.from_ints(mine), TensorData(mine)
    datum = Datum(ModelInput.from_ints(mine), {"target_tokens": mine})
    mine[0] = 99
    assert tokens.to_ints() == tensor.tolist() == datum.loss_fn_inputs["target_tokens"].tolist() == [1, 2, 3]


# --------------------------------------------------------------------------------------------------- TensorData


@pytest.mark.parametrize(
    ("data", "dtype", "array"),
    [
        ([1, 2], "int64", [1, 2]),
        ([1, 2.5], "float32", [1.0, 2.5]),
        (np.array([1, 2], np.uint8), "int64", [1, 2]),
        (np.array([1.5], np.float64), "float32", [1.5]),
        (np.array([1.5], np.float16), "float32", [1.5]),
        (torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True), "float32", [1.5]),
        (torch.tensor([[1], [2]]), "int64", [[1], [2]]),
        (TensorData([1.5]), "float32", [1.5]),
        ([True, False], "int64", [1, 0]),
    ],
)
def test_the_dtype_follows_the_data(data, dtype, array):
    tensor = TensorData(data)
    assert tensor.dtype == dtype
    assert tensor.tolist() == array


def test_a_given_dtype_and_shape_are_kept():
    tensor = TensorData([1, 2, 3, 4, 5, 6], "float32", [2, 3])
    assert (tensor.dtype, tensor.shape) == ("float32", [2, 3])
    assert tensor.data == [1, 2, 3, 4, 5, 6]
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert TensorData([1.0, 2.0], "int64").tolist() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (([1.5], "int64"), "fractional"),
        (([float("nan")], "int64"), "fractional"),
        (([float("inf")], "int64"), "fractional"),
        (([1], "float64"), "'float32' or 'int64'"),
        (([1, 2, 3], None, [2, 2]), r"3 values do not fill the shape \(2, 2\)"),
        (([[1], [2, 3]],), "rectangular"),
        (("text",), "must hold numbers"),
    ],
)
def test_data_that_is_no_tensor_is_refused(arguments, reason):
    with pytest.raises(UserError, match=reason):
        TensorData(*arguments)


def test_a_tensor_is_used_like_an_array():
    tensor = TensorData([[1.0, 2.0], [3.0, 4.0]])
    assert len(tensor) == 2
    assert [row.tolist() for row in tensor] == [[1, 2], [3, 4]]
    assert tensor[1, 0] == 3
    assert np.asarray(tensor).sum() == 10
    assert torch.equal(tensor.to_torch(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor.to_torch()[0, 0] = 99  # a copy
    assert tensor.tolist() == [[1, 2], [3, 4]]
    assert tensor == TensorData.from_numpy(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert tensor != TensorData.from_torch(torch.zeros(2, 2))


def test_csr_input_becomes_dense():
    # Row 0: 5 at column 2; row 1: nothing; row 2: 6 at column 0 and 7 at column 1.
    tensor = TensorData([5, 6, 7], "float32", [3, 3], sparse_crow_indices=[0, 1, 1, 3], sparse_col_indices=[2, 0, 1])
    assert tensor.dtype == "float32"
    assert tensor.tolist() == [[0, 0, 5], [0, 0, 0], [6, 7, 0]]
    assert TensorData([], "float32", [2, 1], [0, 0, 0], []).tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("crow", "col", "shape"),
    [
        ([0, 1, 2], [0, 1], None),
        ([0, 1, 2], [0, 1], [4]),
        ([0, 1, 2], None, [2, 2]),
        (None, [0, 1], [2, 2]),
        ([0, 2], [0, 1], [2, 2]),  # one row pointer too few
        ([1, 1, 2], [0, 1], [2, 2]),  # does not start at 0
        ([0, 3, 2], [0, 1], [2, 2]),  # falls
        ([0, 1, 1], [0, 1], [2, 2]),  # counts one value, two are there
        ([0, 1, 2], [0, 2], [2, 2]),  # no such column
        ([0, 1, 2], [-1, 0], [2, 2]),
        ([0, 1, 3], [0, 1, 1], [2, 2]),  # three columns for two values
        ([], [], [0, 2]),
        ([0], [], [-1, 2]),
    ],
)
def test_csr_that_does_not_fit_together_is_refused(crow, col, shape):
    with pytest.raises(UserError, match="CSR"):
        TensorData([1.0, 2.0], "float32", shape, crow, col)


# -------------------------------------------------------------------------------------------------------- Datum


def datum(n=3, **inputs):
    return Datum(ModelInput.from_ints(range(n)), {"target_tokens": list(range(1, n + 1)), **inputs})


def test_each_loss_input_has_the_dtype_of_its_key():
    made = datum(
        weights=[1, 0, 1],  # integers, as people write masks
        advantages=np.array([0.5, -1, 2], np.float64),
        logprobs=torch.tensor([-1, -2, -3]),
        mask=TensorData([1, 1, 0]),
        sequence_ratio_mask=[True, False, True],
    )
    assert {key: tensor.dtype for key, tensor in made.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
        "logprobs": "float32",
        "mask": "float32",
        "sequence_ratio_mask": "float32",
    }
    assert made.loss_fn_inputs["sequence_ratio_mask"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "targets",
    [
        [1, 2, 3],
        [1.0, 2.0, 3.0],
        np.array([1, 2, 3], np.int32),
        torch.tensor([1, 2, 3]),
        TensorData([1, 2, 3]),
        ModelInput.from_ints([1, 2, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_targets_from_anything_that_holds_integers(targets):
    made = Datum([1, 2, 3], {"target_tokens": targets})
    assert made.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert made.loss_fn_inputs["target_tokens"].tolist() == [1, 2, 3]
    assert made.model_input == ModelInput.from_ints([1, 2, 3])


def test_targets_may_have_several_candidates_per_position():
    made = Datum([1, 2], {"target_tokens": [[1, 2, 3], [4, 5, 6]], "weights": [[1, 0, 0], [0.5, 0.25, 0.25]]})
    assert made.loss_fn_inputs["weights"].shape == [2, 3]
    # Other inputs may keep one value per position.
    assert Datum([1, 2], {"target_tokens": [[1, 2], [3, 4]], "advantages": [1, 2]})


def test_an_ignored_target_is_the_only_negative_one():
    assert IGNORED_TARGET == -100
    assert Datum([1, 2], {"target_tokens": [-100, 2]})
    with pytest.raises(UserError, match="target_tokens has the negative token -1"):
        Datum([1, 2], {"target_tokens": [-100, -1]})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("key", ["weights", "advantages", "logprobs"])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_loss_input_that_is_not_finite_is_refused_with_its_place(key, value):
    with pytest.raises(UserError, match=rf"{key} is .*(nan|inf) at position \(2,\)"):
        datum(**{key: [1.0, 1.0, value]})


@pytest.mark.parametrize(
    ("tokens", "inputs", "reason"),
    [
        ([], {"target_tokens": []}, "model_input has no tokens"),
        ([1, 2], {}, "no 'target_tokens'"),
        ([1, 2], {"weights": [1, 1]}, "no 'target_tokens'"),
        ([1, 2], {"target_tokens": [1]}, r"shape \(1,\), but model_input has 2 tokens"),
        ([1, 2], {"target_tokens": 1}, r"shape \(\)"),
        ([1], {"target_tokens": [[[1]]]}, r"shape \(1, 1, 1\)"),
        ([1, 2], {"target_tokens": [1, 2], "weights": [1, 1, 1]}, r"weights has shape \(3,\)"),
        ([1, 2], {"target_tokens": [[1, 2], [3, 4]], "weights": [1, 1]}, r"weights \(2,\) and target_tokens \(2, 2\)"),
        ([1, 2], {"target_tokens": [1.5, 2]}, "fractional"),
        ([1, -2], {"target_tokens": [1, 2]}, "negative"),
        ([1, 2], {"target_tokens": [1, 2], "weights": "11"}, "weights must hold numbers"),
        ([1, 2], {"target_tokens": [1, 2], "weights": [[1], [1, 2]]}, "weights is not a rectangular array"),
    ],
)
def test_a_datum_whose_parts_do_not_fit_is_refused(tokens, inputs, reason):
    with pytest.raises(UserError, match=reason):
        Datum(tokens, inputs)


def test_an_unknown_loss_input_is_refused_and_the_known_ones_are_named():
    with pytest.raises(UserError) as caught:
        datum(weigths=[1, 1, 1])
    message = str(caught.value)
    assert "'weigths'" in message
    for known in ("target_tokens", "weights", "advantages", "logprobs", "mask", "sequence_ratio_mask"):
        assert known in message


def test_types_do_not_change():
    made = datum()
    for thing, name in ((made, "model_input"), (made.model_input, "tokens"), (TensorData([1]), "array")):
        with pytest.raises((ValueError, TypeError), match="frozen"):
            setattr(thing, name, None)
