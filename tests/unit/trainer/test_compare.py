"""A policy is compared with a folder: equal bytes, numbers apart, and NaN on one side or on both."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.kit.stores import Tensors
from trainer_service.checkpoints.compare import Comparison, compare

NAN, INF = float("nan"), float("inf")


def compared(folder: Path, mine: dict[str, list[float]], theirs: Tensors | dict[str, list[float]]) -> Comparison:
    save_file({name: torch.as_tensor(values) for name, values in theirs.items()}, folder / "model.safetensors")
    return compare({name: torch.tensor(values) for name, values in mine.items()}, folder)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_nan_on_one_side_is_a_difference_whatever_comes_after_it(tmp_path: Path, swapped: bool) -> None:
    sides = {"a": [NAN, 1.0], "b": [2.0, 3.0]}, {"a": [1.0, 1.0], "b": [2.0, 3.0]}
    found = compared(tmp_path, *(sides[::-1] if swapped else sides))
    assert (found.unlike_nan, found.num_equal, found.largest) == (["a"], 1, 0.0)
    assert not found.is_within(1e9)
    assert str(found).endswith("the largest absolute difference is 0; NaN on one side only in a")


def test_numbers_are_compared_beside_a_nan(tmp_path: Path) -> None:
    found = compared(tmp_path, {"a": [NAN, 1.0], "b": [2.0, 3.0]}, {"a": [0.0, 1.5], "b": [2.0, 3.25]})
    assert (found.largest, found.where) == (0.5, "a")
    assert str(found).endswith("is 0.5, in a; NaN on one side only in a")


def test_equal_nan_and_infinity_are_no_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, {"a": [NAN, INF, -INF]}, {"a": [NAN, INF, -INF]})
    assert (found.num_equal, found.is_within(0.0), str(found)) == (1, True, "1 tensors, all bitwise equal")
    assert not compared(tmp_path, {"a": [INF]}, {"a": [-INF]}).is_within(1e9)


def test_equal_numbers_of_another_type_or_sign_are_within_any_tolerance(tmp_path: Path) -> None:
    found = compared(tmp_path, {"a": [0.0, 2.0]}, {"a": torch.tensor([-0.0, 2.0])})
    assert (found.num_equal, found.largest, found.is_within(0.0)) == (0, 0.0, True)
    found = compared(tmp_path, {"a": [0.5, 2.0]}, {"a": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)})
    assert (found.num_equal, found.is_within(0.0)) == (0, True)
