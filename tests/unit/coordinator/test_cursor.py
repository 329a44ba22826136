"""Which rows a run takes, and that a resumed one takes the same."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

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
    return CursorState(sources=(SourcePosition(epoch=0, position=position, num_prompts=SIZES["a"]),), waves=0)


COPIES = [(30, 32), (20, 100), (5, 4)]


def of_counts(tmp_path: Path, counts: list[int]) -> Callable[..., DataCursor]:
    """A cursor over rows that repeat prompt n (`n+1=`) this often."""
    codec = TextCodec.from_folders(write_small_model(tmp_path / "model"))
    path = write_data(tmp_path / "a.jsonl", [(n, 1) for n, count in enumerate(counts) for _ in range(count)])
    prompts = load_prompts(DataSection.model_validate({"train": path}), "train", codec)

    def make(*, knows: bool = True, seed: int = 3, shuffle: bool = True) -> DataCursor:
        texts = [scan.texts for scan in prompts.scans] if knows else None
        return DataCursor(prompts, seed=seed, shuffle=shuffle, texts=texts)

    return make


def texts(cursor: DataCursor, count: int) -> list[str]:
    return [prompt.text for prompt in cursor.take(count)]


@pytest.mark.parametrize(("different", "times"), COPIES)
def test_different_prompts_are_drawn_before_a_copy(tmp_path: Path, different: int, times: int) -> None:
    make = of_counts(tmp_path, [times] * different)
    for seed in range(3):
        cursor = make(seed=seed)
        for _ in range(2 * times):
            assert len(set(texts(cursor, different))) == different
    rows = [prompt.name for prompt in make().take(different * times)]
    assert len(set(rows)) == different * times


@pytest.mark.parametrize("counts", [[3, 1, 2, 1, 1, 2], [1] * 90 + [2] * 10, [7] + [1] * 40, [1, 2, 3, 4, 5] * 8])
def test_copies_are_far_from_each_other(tmp_path: Path, counts: list[int]) -> None:
    """A round of an epoch holds each prompt that has a copy left; half of those that have none follow a prompt."""
    make = of_counts(tmp_path, counts)
    for seed in range(5):
        drawn = texts(make(seed=seed), sum(counts))
        assert Counter(drawn) == {f"{n}+1=": count for n, count in enumerate(counts)}
        assert len(set(drawn[: len(counts)])) == len(counts)
        for n in range(len(counts)):
            places = [place for place, text in enumerate(drawn) if text == f"{n}+1="]
            for copy, (one, other) in enumerate(pairwise(places), 1):
                left = sum(each > copy for each in counts)
                assert other - one >= left + (sum(each == copy for each in counts)) // 2


def test_rows_without_copies_are_drawn_as_ever(tmp_path: Path) -> None:
    make = of_counts(tmp_path, [1] * 20)
    assert texts(make(), 50) == texts(make(knows=False), 50)
    assert make().state().order == "rows"
    assert not make().keeps_old_order


def test_without_shuffling_copies_stay_in_the_files_order(tmp_path: Path) -> None:
    assert texts(of_counts(tmp_path, [2, 2])(shuffle=False), 4) == ["0+1=", "0+1=", "1+1=", "1+1="]


def test_a_run_of_before_keeps_its_order_and_says_so(tmp_path: Path) -> None:
    make = of_counts(tmp_path, [4] * 5)
    before, resumed = make(knows=False), make()
    before.take(7)
    saved = json.loads(json.dumps(asdict(before.state())))
    del saved["order"]
    resumed.restore(TypeAdapter(CursorState).validate_python(saved))
    assert texts(before, 40) == texts(resumed, 40)
    assert resumed.keeps_old_order
    assert resumed.state().order == "rows"


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("count", [1, 3, 4, 8, 20])
def test_a_cursor_goes_on_exactly_from_every_position_in_both_orders(tmp_path: Path, knows: bool, count: int) -> None:
    make = of_counts(tmp_path, [3, 1, 2, 1, 1])
    whole, states, rows = make(knows=knows), [], []
    for _ in range(20):
        states.append(whole.state())
        rows.append(taken(whole, count))
    for place, state in enumerate(states):
        resumed = make()
        resumed.restore(state)
        resumed.read_ahead(count)
        assert resumed.state() == state
        assert [taken(resumed, count) for _ in range(20 - place)] == rows[place:]
