"""Arrays in messages: what is packed is read, and what is no array is refused."""

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
def test_what_is_packed_is_read(field: str, values: list[float]) -> None:
    message = Completion(**{field: packed(field, values)})  # type: ignore[arg-type]
    assert read_array(message, field).tolist() == values
    assert array_length(message, field) == len(values)


def test_numbers_are_little_endian_and_arrays_are_taken_as_they_are() -> None:
    assert packed("token_ids_u32", [1, 258]) == packed("token_ids_u32", array("I", [1, 258])) == b"\1\0\0\0\2\1\0\0"
    assert packed("logprobs_f32", array("d", [1.0])) == b"\0\0\x80\x3f"


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        packed("token_ids_u32", [-1])


def test_a_part_of_an_item_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="logprobs_f32 has 5 bytes, which is no multiple of 4"):
        array_length(Completion(logprobs_f32=bytes(5)), "logprobs_f32")
