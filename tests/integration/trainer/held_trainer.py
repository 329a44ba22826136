"""A rank of the real trainer that stops in the middle of a checkpoint's write where a test says so, until it is killed.

`python -m tests.integration.trainer.held_trainer` takes the arguments of `python -m trainer_service`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

from safetensors.torch import save_file

from tandem_files.atomic import replace_folder
from tests.kit.waiting import until
from trainer_service.checkpoints import writing

HOLD_S = 300.0
Point = Literal["half-written", "unpublished"]
HALF_WRITTEN: Final = "half-written"
UNPUBLISHED: Final = "unpublished"


def order_hold(run_dir: Path, rank: int, point: Point) -> None:
    """Let a rank stop at this point of the next checkpoint."""
    (run_dir / f"hold-{rank}-{point}").touch()


def is_held(run_dir: Path, rank: int, point: Point) -> bool:
    """Whether the rank has come there."""
    return (run_dir / f"held-{rank}-{point}").exists()


def _stop_if_ordered(point: Point) -> None:
    run_dir, rank = Path(os.environ["TANDEM_RUN_DIR"]), os.environ["RANK"]
    order = run_dir / f"hold-{rank}-{point}"
    if order.exists():
        order.rename(run_dir / f"held-{rank}-{point}")
        until(lambda: False, HOLD_S, f"the end of rank {rank}, held at {point},")


def _save_half(original: Callable[..., None]) -> Callable[..., None]:
    """Leave half of a file, stop there if that is ordered, then write all of it."""

    def save(tensors: Any, path: Path, **named: Any) -> None:
        original(tensors, path, **named)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        _stop_if_ordered(HALF_WRITTEN)
        path.write_bytes(content)

    return save


def _stop_before(original: Callable[..., None]) -> Callable[..., None]:
    """Stop before the rename by which a checkpoint appears."""

    def replace(*arguments: Any) -> None:
        _stop_if_ordered(UNPUBLISHED)
        original(*arguments)

    return replace


if __name__ == "__main__":
    # Not above: the test imports this module too, beside other services, whose metrics have some of the same names.
    from trainer_service.__main__ import main

    mock.patch.object(writing, "save_file", _save_half(save_file)).start()
    mock.patch.object(writing, "replace_folder", _stop_before(replace_folder)).start()
    sys.exit(main())
