"""Buffers stay within two of the round's largest messages."""

import pytest
import torch

from weightsync.plans.limits import number_of_buffers
from weightsync.transfer.transports.collective import Buffers


@pytest.mark.parametrize(("size", "largest", "number"), [(100, 100, 2), (60, 100, 3), (50, 100, 4), (0, 0, 2)])
def test_as_many_as_two_of_the_largest_messages_hold(size: int, largest: int, number: int) -> None:
    assert number_of_buffers(size, largest) == number
    assert number * size <= 2 * largest


def test_a_buffer_is_used_again() -> None:
    buffers = Buffers(torch.device("cpu"))
    taken = [buffers.take() for _ in range(buffers.resize(64, 100))]
    assert len(taken) == 3
    buffers.give(taken[1])
    assert buffers.take().data_ptr() == taken[1].data_ptr()
    assert buffers.peak_bytes == 3 * 64


def test_larger_messages_get_larger_buffers() -> None:
    buffers = Buffers(torch.device("cpu"))
    buffers.resize(64, 64)
    buffers.give(buffers.take())
    buffers.resize(128, 128)
    assert buffers.take().numel() == 128
    assert buffers.peak_bytes == 128


def test_smaller_messages_give_back_what_they_may_not_use() -> None:
    buffers = Buffers(torch.device("cpu"))
    buffers.resize(10, 40)  # eight of 10
    for each in [buffers.take() for _ in range(8)]:
        buffers.give(each)
    buffers.resize(10, 20)  # four would do
    assert buffers.peak_bytes == 0
    assert buffers.take().numel() == 10
    buffers.resize(10, 40)
    assert buffers.peak_bytes == 10
