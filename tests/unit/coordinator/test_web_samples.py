"""The page's samples: chosen, sorted, bounded, and those of a run's folder after the run."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.web import samples as module
from coordinator.web.folder import FolderSource
from coordinator.web.samples import SamplePages, segments
from servicekit.errors import ConfigError, InvalidRequest, Unavailable
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import MaskedSpan, TextSpan
from tests.kit.folders import stored, write_samples

# Group to the rewards of its samples.
REWARDS = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


@pytest.fixture
def pages(tmp_path: Path) -> SamplePages:
    folder = SampleFolder(tmp_path)
    for iteration in (3, 5, 9):
        samples = [
            stored(g, k, iteration=iteration, reward=reward, num_tokens=g + 1, completion=f"{iteration} says {g} {k}")
            for g, rewards in enumerate(REWARDS)
            for k, reward in enumerate(rewards)
        ]
        write_samples(folder, iteration, "train", samples[: 4 if iteration == 5 else 6])
    write_samples(folder, 9, "heldout", [stored(kind="heldout", source="heldout.jsonl")])
    return SamplePages(folder)


def order(found: dict[str, Any]) -> list[str]:
    return [group["group_id"][4:5] for group in found["groups"]]


@pytest.mark.parametrize(
    ("query", "groups"),
    [
        ({}, "102"),
        ({"sort": "best"}, "201"),
        ({"sort": "mixed"}, "012"),
        ({"sort": "longest"}, "210"),
        ({"sort": "shortest"}, "012"),
        ({"sort": "order"}, "012"),
        ({"sort": "order", "offset": "1", "limit": "1"}, "1"),
        ({"limit": "0"}, ""),
        ({"search": "says [02] 1"}, "02"),
        ({"group": "i1.g1.row2"}, "1"),
        ({"iteration": "5"}, "10"),
    ],
)
def test_groups_are_chosen_and_sorted(pages: SamplePages, query: dict[str, str], groups: str) -> None:
    assert "".join(order(pages.groups(query))) == groups


def test_a_group_has_the_columns_that_rewards_take(tmp_path: Path) -> None:
    columns = {"level": 3, "hint": "x" * 300, "unused": 1}
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [stored(columns=json.dumps(columns), reward_columns=("level", "hint"))])
    (group,) = SamplePages(folder).groups({})["groups"]
    assert group["columns"]["level"] == "3"
    assert "[... 100 characters ...]" in group["columns"]["hint"]
    assert "unused" not in group["columns"]


def test_an_answer_says_what_else_there_is(pages: SamplePages) -> None:
    found = pages.groups({})
    assert (found["iteration"], found["kind"], found["num_groups"]) == (9, "train", 3)
    assert (found["iterations"], found["kinds"], found["all_kinds"]) == (
        [3, 5, 9],
        ["train", "heldout"],
        ["heldout", "train"],
    )
    mixed = found["groups"][1]
    assert [sample["reward"] for sample in mixed["samples"]] == [0.0, 1.0]
    assert (mixed["row"], mixed["source"], mixed["reward_mean"], mixed["num_samples"]) == (1, "train.jsonl", 0.5, 2)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("query", "error", "said"),
    [
        ({"iteration": "7"}, ConfigError, "no samples of iteration 7"),
        ({"iteration": "-1"}, InvalidRequest, "iteration '-1' is not a number"),
        ({"offset": "9" * 40}, InvalidRequest, "is not a number"),
        ({"sort": "x"}, InvalidRequest, "sort 'x' is not one of worst"),
        ({"search": "("}, ConfigError, "not a regular expression"),
        ({"kind": "../../etc"}, ConfigError, "no samples of kind"),
    ],
)
def test_a_bad_request_is_named(pages: SamplePages, query: dict[str, str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        pages.groups(query)


def test_the_same_row_is_found_in_an_earlier_iteration(pages: SamplePages) -> None:
    row = {"kind": "train", "source": "train.jsonl", "row": "3", "before": "9"}
    assert pages.earlier(row)["iteration"] == 3  # iteration 5 does not have it
    assert pages.earlier({**row, "row": "2"})["iteration"] == 5
    assert pages.earlier({**row, "row": "2", "order": "first"})["iteration"] == 3
    assert pages.earlier(row)["group"]["samples"][0]["segments"][0]["text"].startswith("3 says 2")
    assert pages.earlier({**row, "source": "other.jsonl"}) == {"iteration": None, "group": None}
    assert pages.earlier({**row, "before": "3"}) == {"iteration": None, "group": None}


@pytest.mark.parametrize("sort", ["worst", "best", "mixed"])
def test_a_sample_without_a_reward_is_the_last_and_counts_in_no_mean(tmp_path: Path, sort: str) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [stored(0, k, reward=reward) for k, reward in enumerate((None, 1.0, 0.0))])
    (group,) = SamplePages(folder).groups({"sort": sort})["groups"]
    assert group["samples"][-1]["reward"] is None
    assert group["reward_mean"] == 0.5
    write_samples(folder, 1, "train", [stored(reward=None)])
    assert SamplePages(folder).groups({"sort": sort})["groups"][0]["reward_mean"] is None


def test_a_failed_score_comes_with_its_reason(tmp_path: Path) -> None:
    write_samples(SampleFolder(tmp_path), 1, "train", [stored(errors={"math": "IndexError"}), stored(0, 1)])
    samples = SamplePages(SampleFolder(tmp_path)).groups({"sort": "order"})["groups"][0]["samples"]
    assert [sample["errors"] for sample in samples] == [{"math": "IndexError"}, {}]
    assert [sample["turns"] for sample in samples] == [None, None]


def test_an_episode_says_what_its_turns_got_and_why_it_ended(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "no", "branch": True}, {"role": "assistant", "content": "then 3"}]
    said = {"messages": messages, "rewards": [None, 1.0], "end": "failed", "error": "g#0: late"}
    write_samples(SampleFolder(tmp_path), 1, "train", [stored(transcript=json.dumps(said))])
    (sample,) = SamplePages(SampleFolder(tmp_path)).groups({})["groups"][0]["samples"]
    assert sample["turns"] == {"rewards": [None, 1.0], "contexts": 2, "end": "failed", "error": "g#0: late"}


def test_long_texts_are_cut_in_their_middle_unless_one_is_asked_for(tmp_path: Path) -> None:
    folder, text = SampleFolder(tmp_path), "a" * 2_000 + "b" * 7_000 + "c" * 1_000
    write_samples(folder, 1, "train", [stored(k // 64, k % 64, completion=text, prompt=text) for k in range(6 * 64)])
    found = SamplePages(folder).groups({"limit": "20"})
    assert len(json.dumps(found)) < 3 * 2**20
    shown = found["groups"][0]["samples"][0]["segments"]
    assert shown[0]["text"] == "a" * len(shown[0]["text"])
    assert shown[-1]["text"] == "c" * len(shown[-1]["text"])
    assert sum(segment.get("left_out") or len(segment["text"]) for segment in shown) == len(text)
    (whole,) = SamplePages(folder).groups({"group": "i1.g0.row1", "sample": "5"})["groups"][0]["samples"]
    assert (whole["sample"], whole["segments"]) == (5, [{"text": text, "version": 0}])


@pytest.mark.parametrize("limit", [100, 12, 6])
def test_a_text_is_cut_where_its_version_changes(limit: int) -> None:
    spans = (TextSpan(end=1, text_end=3, policy_version=4), TextSpan(end=9, text_end=999, policy_version=5))
    found = segments(stored(completion="abcdefghijklmno", version_spans=spans), limit)
    texts = [(segment["text"], segment["version"]) for segment in found if "text" in segment]
    assert texts[0] == ("abc", 4)
    assert all(version == 5 for _, version in texts[1:])
    assert sum(len(text) for text, _ in texts) == min(limit, 15)


def test_masked_parts_are_segments_of_their_own() -> None:
    spans = (TextSpan(end=2, text_end=4, policy_version=4), TextSpan(end=9, text_end=8, policy_version=5))
    masks = (MaskedSpan(start=0, end=1, text_start=0, text_end=2), MaskedSpan(start=1, end=3, text_start=3, text_end=6))
    found = segments(stored(completion="abcdefgh", version_spans=spans, masked_spans=masks), 100)
    assert found == [
        {"text": "ab", "version": 4, "masked": True},
        {"text": "c", "version": 4},
        {"text": "d", "version": 4, "masked": True},
        {"text": "ef", "version": 5, "masked": True},
        {"text": "gh", "version": 5},
    ]
    assert "left_out" in segments(stored(completion="abcdefgh", masked_spans=masks), 4)[1]


def test_readers_wait_for_each_other_but_not_for_ever(pages: SamplePages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN_S", 0.05)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with pages._reading():
            entered.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(20)
    with pytest.raises(Unavailable, match="try again"):
        pages.groups({})
    go_on.set()
    thread.join(20)
    assert pages.groups({})["num_groups"] == 3


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.resolved.yaml").write_text(yaml.safe_dump({"run": {"iterations": 9}}))
    return tmp_path


def write_state(run_dir: Path, **state: Any) -> None:
    (run_dir / "state.json").write_text(json.dumps({"iteration": 2, "policy_version": 2, "wall_s": 7.0, **state}))


def test_the_page_of_a_finished_run_is_that_of_its_folder(run_dir: Path) -> None:
    write_state(run_dir, status="finished", initial_accuracy=0.25, last_progress_s=1.0)
    rows = [{"iteration": i, "reward_mean": i / 10, "iteration_s": 2.0, "heldout_accuracy": None} for i in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FolderSource(run_dir)
    shown = json.loads(json.dumps(source.picture(), allow_nan=False))
    assert (shown["state"], shown["iteration"], shown["total_iterations"]) == ("finished", 2, 9)
    assert shown["curves"][0]["points"] == [[1, 0.1], [2, 0.2]]
    assert shown["curves"][1]["points"] == [[0, 0.25]]
    assert (shown["alerts"], shown["replicas"], shown["worked_s"]) == ([], [], 7.0)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**rows[0], "iteration": 3}) + "\n")
    os.utime(run_dir / "metrics.jsonl", ns=(1, 1))
    assert len(source.picture()["curves"][0]["points"]) == 3


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("model: [", []),
        ("run: {iterations: 9}", []),
        ("model: {dtype: bfloat16}\ngrpo: {logprob_diff_limit: 0.2}", []),
        ("model: {dtype: float32}", ["TandemLogprobMismatch"]),
        ("model: {dtype: float32}\ngrpo: {logprob_diff_limit: 0.2}", []),
    ],
)
def test_a_mismatch_is_judged_by_the_type_of_the_run(run_dir: Path, config: str, told: list[str]) -> None:
    """Rows of older releases have no quantile; of a run whose type is not known 0.1 may be as it should."""
    (run_dir / "config.resolved.yaml").write_text(config)
    write_state(run_dir, status="finished")
    row = {"iteration": 1, "reward_mean": 0.5, "logprob_abs_diff_max": 0.1, "logprob_abs_diff_mean": 0.01}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert [alert["name"] for alert in FolderSource(run_dir).picture()["alerts"]] == told


@pytest.mark.parametrize(
    ("state", "title", "told"),
    [
        ({"initial_accuracy": 0.6}, "held-out accuracy", ["TandemAccuracyBelowStart"]),
        ({"initial_accuracy": 0.54}, "held-out accuracy", []),
        ({"initial_accuracy": 0.6, "accuracy_std": 0.3}, "held-out accuracy", ["TandemAccuracyBelowStart"]),
        ({"initial_accuracy": 0.6, "best_accuracy": 1.5}, "held-out reward", []),
    ],
)
def test_held_out_scores_of_an_older_release_are_judged_as_shares_if_they_can_be(
    run_dir: Path, state: dict[str, float], title: str, told: list[str]
) -> None:
    """A state of an older release has no standard deviation."""
    write_state(run_dir, status="finished", last_accuracy=0.5, **state)
    row = {"iteration": 1, "reward_mean": 0.5, "heldout_accuracy": 0.5}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    shown = FolderSource(run_dir).picture()
    assert (shown["heldout_title"], [alert["name"] for alert in shown["alerts"]]) == (title, told)


@pytest.mark.parametrize(
    ("state", "age_s", "shown"),
    [
        (None, 0, "not started"),
        ({"status": "running"}, 0, "running"),
        ({"status": "running"}, 3600, "interrupted"),
        ({"status": "failed", "error": "no space left"}, 3600, "failed"),
    ],
)
def test_the_state_of_a_run_that_nothing_runs_here(
    run_dir: Path, state: dict[str, Any] | None, age_s: float, shown: str
) -> None:
    if state is not None:
        write_state(run_dir, **state)
        path = run_dir / "state.json"
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
    found = FolderSource(run_dir).picture()
    assert found["state"] == shown
    assert shown != "failed" or [alert["text"] for alert in found["alerts"]] == ["The run has failed: no space left"]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run's folder: it has no config\.resolved\.yaml"):
        FolderSource(tmp_path)
