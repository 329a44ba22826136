"""Which rows a run takes, and that a resumed one takes the same."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.data.cursor import CursorState, DataCursor, SourcePosition
from coordinator.data.prompts import load_prompts
from servicekit.errors import ConfigError
from tandem_config.schema import DataSection
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import write_data, write_small_model

Make = Callable[..., DataCursor]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a cursor over files of 7, 5, ... rows with these weights; None: a single file."""
    codec = TextCodec.from_folders(write_small_model(tmp_path / "model"))
    paths = [write_data(tmp_path / f"{name}.jsonl", [(1, n) for n in range(size)]) for name, size in SIZES.items()]

    def make(*weights: float, seed: int = 0, shuffle: bool = True) -> DataCursor:
        train: Any = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=False)]
        data = DataSection.model_validate({"train": train or paths[0]})
        return DataCursor(load_prompts(data, "train", codec), seed=seed, shuffle=shuffle)

    return make


SIZES = {"a": 7, "b": 5, "c": 3}


def taken(cursor: DataCursor, count: int) -> list[str]:
    return [prompt.name for prompt in cursor.take(count)]


def test_an_epoch_takes_every_prompt_once(make: Make) -> None:
    cursor = make(seed=3)
    rows = taken(cursor, 3) + taken(cursor, 3) + taken(cursor, 8)
    assert Counter(rows[:7]) == Counter(rows[7:]) == Counter(f"row{n}" for n in range(1, 8))
    assert rows[:7] != rows[7:]


def test_orders_depend_on_the_seed_alone(make: Make) -> None:
    orders = [taken(make(1, 2, seed=seed), 30) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_the_files_order_repeats(make: Make) -> None:
    assert taken(make(shuffle=False), 10) == [f"row{n}" for n in (1, 2, 3, 4, 5, 6, 7, 1, 2, 3)]


def test_a_take_larger_than_the_data_spans_epochs(make: Make) -> None:
    assert set(Counter(taken(make(), 21)).values()) == {3}


@pytest.mark.parametrize("weights", [(2, 1), (1, 1, 1), (0.5, 3, 0.01), (1, 1e-6)])
def test_sources_take_turns_at_the_rates_of_their_weights(make: Make, weights: tuple[float, ...]) -> None:
    """In every beginning of a run, to less than a prompt for two sources and two for three."""
    rows = taken(make(*weights), 300)
    for end in range(1, 301):
        counts = Counter(row[0] for row in rows[:end])
        for name, weight in zip(SIZES, weights, strict=False):
            assert abs(counts[name] - end * weight / sum(weights)) < len(weights) - 1


def test_each_source_has_epochs_of_its_own(make: Make) -> None:
    rows = [row for row in taken(make(2, 1), 45) if row.startswith("b")]
    epochs = [rows[start : start + 5] for start in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [[f"b.row{n}" for n in range(1, 6)]] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("weights", [(), (2, 1), (0.3, 1, 5)])
@pytest.mark.parametrize("before", [0, 1, 6, 7, 8, 20, 133])
def test_a_restored_cursor_goes_on_exactly(make: Make, weights: tuple[float, ...], before: int) -> None:
    original, restored = make(*weights, seed=5), make(*weights, seed=5)
    original.take(before)
    restored.restore(original.state())
    assert taken(original, 40) == taken(restored, 40)


def test_other_data_is_refused_on_restore(make: Make) -> None:
    with pytest.raises(ValueError, match=r"data.train has 7 usable prompts, but the checkpoint was made with 8"):
        make().restore(CursorState(sources=(SourcePosition(epoch=0, position=0, num_prompts=8),)))
    with pytest.raises(ValueError, match=r"data.train has 7 \+ 5 usable prompts, .* with 7:"):
        make(1, 1).restore(make().state())


@pytest.mark.parametrize("weights", [(), (2, 1)])
@pytest.mark.parametrize("before", [0, 5, 7])
def test_what_is_read_ahead_is_taken_next_and_counts_when_it_is_taken(
    make: Make, weights: tuple[float, ...], before: int
) -> None:
    plain, ahead = make(*weights, seed=5), make(*weights, seed=5)
    for cursor in (plain, ahead):
        cursor.take(before)
    ahead.read_ahead(6)
    ahead.read_ahead(6)
    assert ahead.state() == plain.state()
    resumed = make(*weights, seed=5)
    resumed.restore(ahead.state())
    assert taken(ahead, 6) == taken(plain, 6) == taken(resumed, 6)
    assert ahead.state() == plain.state()
    assert taken(ahead, 20) == taken(plain, 20)


def test_a_take_of_another_number_and_a_restore_forget_what_was_read_ahead(make: Make) -> None:
    plain, other, restored = make(), make(), make()
    for cursor in (other, restored):
        cursor.read_ahead(6)
    start = make().state()
    restored.restore(start)
    assert taken(other, 4) + taken(other, 6) == taken(plain, 10) == taken(restored, 10)


def test_a_row_that_cannot_be_read_ahead_is_an_error_when_it_is_taken(make: Make, tmp_path: Path) -> None:
    cursor = make()
    (tmp_path / "a.jsonl").unlink()
    cursor.read_ahead(3)
    assert cursor.state() == make_state(0)
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        cursor.take(3)


def make_state(position: int) -> CursorState:
    return CursorState(sources=(SourcePosition(epoch=0, position=position, num_prompts=SIZES["a"]),))
