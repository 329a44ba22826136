import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.checkpoints.loading import load_newest
from coordinator.data.cursor import CursorState, SourcePosition
from coordinator.record.resuming import order_differences
from coordinator.record.state import KEPT_SYNCS, DataOrder, RunState, SourceOrder, Totals
from servicekit.errors import ConfigError
from tandem_clients.flow import GroupScores
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import COORDINATOR_FILE, mark_complete, step_folder
from tandem_files.metrics_file import Heldout, MetricsFile
from weightsync.membership.rendezvous import Evicted


def state_at(iteration: int, fingerprint: str = "f00d") -> RunState:
    rng = np.random.default_rng(3)
    return RunState(
        iteration=iteration,
        cursor=CursorState(sources=(SourcePosition(epoch=1, position=5, num_prompts=9),)),
        batch_rng=dict(rng.bit_generator.state),
        model_fingerprint=fingerprint,
    )


def heldout(scores: Sequence[float]) -> GroupScores:
    return GroupScores(rewards_PG=np.array([scores], dtype=np.float64).T, accuracy=float(np.mean(scores)))


def config(model: str) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": Path(model)}, "data": {"train": Path("train.jsonl")}})


def save_checkpoint(run_dir: Path, state: RunState) -> Path:
    folder = step_folder(run_dir, state.iteration)
    folder.mkdir(parents=True)
    state.save(folder / COORDINATOR_FILE)
    mark_complete(folder, iteration=state.iteration, model="models/a", model_fingerprint=state.model_fingerprint)
    return folder


def test_a_saved_state_is_the_same_and_its_generator_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rng.permutation(10)
    state = state_at(4)
    state.batch_rng = dict(rng.bit_generator.state)
    for scores in ([1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]):
        state.note_accuracy(heldout(scores))
    state.save(tmp_path / "state.json")
    loaded = RunState.load(tmp_path / "state.json")
    assert loaded == state
    assert (loaded.initial_accuracy, loaded.best_accuracy, loaded.last_accuracy) == (0.25, 0.75, 0.5)
    assert loaded.accuracy_std == pytest.approx(np.std([1, 1, 0, 0], ddof=1))
    other = np.random.default_rng(0)
    other.bit_generator.state = loaded.batch_rng
    assert other.permutation(50).tolist() == rng.permutation(50).tolist()


@pytest.mark.parametrize(
    ("scores", "title"),
    [
        ([1, 0, 0, 1], "held-out accuracy"),
        ([0, 0, 0, 0], "held-out accuracy"),
        ([1, 0, 0.5, 1], "held-out reward"),
        ([1, -1, 1, 1], "held-out reward"),
        ([-6, -5, -5.5, -5], "held-out reward"),
        ([100, 0, 0, 0], "held-out reward"),
    ],
)
def test_what_a_held_out_figure_is_called_follows_from_its_scores(scores: list[float], title: str) -> None:
    state = state_at(0)
    state.note_accuracy(heldout(scores))
    assert Heldout.of_state(vars(state)).title == title
    state.note_accuracy(heldout([1, 1, 1, 1]))  # once it was no share it stays none
    assert Heldout.of_state(vars(state)).title == title
    state.forget_set("heldout")
    assert Heldout.of_state(vars(state)) == Heldout()


def test_a_resumed_state_of_an_older_release_says_what_it_can() -> None:
    old = state_at(4).model_dump(exclude={"accuracy_std", "accuracy_is_share"}) | {"initial_accuracy": -0.46}
    state = RunState.model_validate(old)
    assert Heldout.of_state(vars(state)) == Heldout(initial=-0.46, title="held-out reward")
    state.note_accuracy(heldout([1, -1, 1, 1]))
    assert Heldout.of_state(vars(state)).std == pytest.approx(1.0)


def test_what_the_check_before_a_write_refuses_is_not_written(tmp_path: Path) -> None:
    def refuse() -> None:
        raise Evicted("another coordinator leads")

    state, metrics, folder = state_at(1), MetricsFile(tmp_path / "metrics.jsonl"), tmp_path / "step"
    folder.mkdir()
    writes: list[Callable[[], object]] = [
        lambda: state.save(tmp_path / "state.json", refuse, durable=False),
        lambda: state.save(tmp_path / "coordinator.json", refuse),
        lambda: metrics.append({"iteration": 1}, refuse),
        lambda: mark_complete(folder, refuse, iteration=1),
    ]
    for write in writes:
        with pytest.raises(Evicted):
            write()
    assert metrics.rows() == []
    assert not any((tmp_path / name).exists() for name in ("state.json", "coordinator.json", "step/complete.json"))


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(2))
    save_checkpoint(tmp_path, state_at(4))
    (save_checkpoint(tmp_path, state_at(6)) / "complete.json").unlink()
    loaded = load_newest(tmp_path, config("models/a"), "f00d", None)
    assert loaded is not None
    assert loaded.state.iteration == 4
    (damage,) = loaded.sound.skipped
    assert str(damage) == "the checkpoint of iteration 6 was not finished (it has no complete.json)"


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert load_newest(tmp_path, config("models/a"), "f00d", None) is None


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, state_at(2))
    with pytest.raises(ConfigError) as caught:
        load_newest(tmp_path, config("models/b"), "beef", None)
    for part in (str(folder), "models/a", "f00d", "models/b", "beef"):
        assert part in str(caught.value)


def test_a_state_of_another_release_is_named(tmp_path: Path) -> None:
    path = tmp_path / COORDINATOR_FILE
    state_at(2).save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "iteration": "many"}))
    with pytest.raises(
        ConfigError, match=r"coordinator\.json is not a coordinator state of this release of Tandem: iteration: "
    ):
        RunState.load(path)
    path.write_text(
        json.dumps({**data, "cursor": {"epoch": 0, "position": 5, "num_prompts": 9}})
    )  # as of one source only
    with pytest.raises(
        ConfigError, match=r"cursor\.sources: .*; resume with the release that wrote it, or start a new run"
    ):
        RunState.load(path)
    path.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        RunState.load(path)


def order(*digests: str, weight: float = 1.0, num_prompts: int = 9, **changes: Any) -> DataOrder:
    sources = [SourceOrder(weight=weight, num_prompts=num_prompts, digest=digest) for digest in digests]
    return DataOrder(**{"seed": 0, "shuffle": True, "sources": sources, "settings": {"tokenizer": "t"}, **changes})


def differences(old: DataOrder, new: DataOrder) -> list[str]:
    return order_differences(state_at(2).model_copy(update={"order": old}), new)


def test_what_differs_in_the_data_is_named_at_once() -> None:
    assert differences(order("a"), order("a")) == []
    assert differences(order("a"), order("b", num_prompts=12, seed=1, shuffle=False, settings={"data.x": "1"})) == [
        "run.seed: 0 in the checkpoint, 1 in the run",
        "data.shuffle: True in the checkpoint, False in the run",
        "data.train: other rows than those of the checkpoint (9 usable ones in the checkpoint, 12 in the run; the "
        "files have other bytes)",
        "data.x: unused in the checkpoint, 1 in the run",
        "tokenizer: t in the checkpoint, unused in the run",
    ]


def test_what_differs_in_a_mixture_is_named_by_source() -> None:
    assert differences(order("a", "b"), order("a")) == ["sources of data.train: 2 in the checkpoint, 1 in the run"]
    assert differences(order("a", "b"), order("b", "a", weight=2.0))[1].startswith("data.train, source 1: other rows")
    assert differences(order("a", "b"), order("a", "b", weight=2.0)) == [
        f"data.train, source {place}, weight: 1.0 in the checkpoint, 2.0 in the run" for place in (1, 2)
    ]


def test_the_state_of_a_long_run_is_as_large_as_that_of_a_short_one() -> None:
    """It is written anew in every iteration; it grew by the time of each weight sync."""
    state = state_at(2)
    state.totals.note_sync(9.0)
    sizes = []
    for _ in range(2):
        for _ in range(10_000):
            state.totals.note_sync(0.123456)
        sizes.append(len(state.model_dump_json()))
    assert sizes[0] == sizes[1] < 5000
    assert (state.totals.num_weight_syncs, state.totals.weight_sync_max_s) == (20_001, 9.0)


def test_a_state_with_the_times_of_all_syncs_still_counts_them() -> None:
    totals = Totals.model_validate({"weight_sync_s": [0.5, *[0.25] * 400]})
    assert (totals.num_weight_syncs, totals.weight_sync_max_s) == (401, 0.5)
    assert len(totals.weight_sync_s) == KEPT_SYNCS
    assert Totals.model_validate(totals.model_dump()) == totals
