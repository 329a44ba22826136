"""Arrays in messages: both forms are read alike, and what is no array is refused."""

from array import array

import pytest

from servicekit.errors import InvalidRequest
from servicekit.rpc.arrays import array_length, packed, read_array
from tandem_api.rollout.v1.rollout_pb2 import Completion


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("token_ids_u32", [0, 7, 2**32 - 1]),
        ("logprobs_f32", [-0.0, float("-inf"), -1.5]),
        ("loss_mask_u8", [1, 0]),
        ("token_ids_u32", []),
    ],
)
def test_bytes_and_the_repeated_field_before_them_are_read_alike(field: str, values: list[float]) -> None:
    new = Completion(**{field: packed(field, values)})  # type: ignore[arg-type]
    old = Completion(**{field.rpartition("_")[0]: list(map(bool, values)) if field == "loss_mask_u8" else values})  # type: ignore[arg-type]
    assert read_array(new, field).tolist() == values
    assert read_array(new, field) == read_array(old, field)
    assert array_length(new, field) == array_length(old, field) == len(values)


def test_numbers_are_little_endian_and_arrays_are_taken_as_they_are() -> None:
    assert packed("token_ids_u32", [1, 258]) == packed("token_ids_u32", array("I", [1, 258])) == b"\1\0\0\0\2\1\0\0"
    assert packed("logprobs_f32", array("d", [1.0])) == b"\0\0\x80\x3f"


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        packed("token_ids_u32", [-1])


def test_both_forms_or_a_part_of_an_item_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="token_ids and token_ids_u32 are both set"):
        read_array(Completion(token_ids=[1], token_ids_u32=bytes(4)), "token_ids_u32")
    with pytest.raises(InvalidRequest, match="logprobs_f32 has 5 bytes, which is no multiple of 4"):
        array_length(Completion(logprobs_f32=bytes(5)), "logprobs_f32")
