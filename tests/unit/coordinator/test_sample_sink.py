"""The sink of stored samples: what it makes of an iteration, which iterations it keeps, and what a resume replaces."""

import json
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.learn.evaluation import EvaluationResult
from coordinator.record.samples.sink import SampleSink, surplus
from coordinator.record.sinks import FinishedIteration
from coordinator.rewards.taken import ShownColumns
from servicekit.errors import Unavailable
from tandem_clients.flow import Completion, Generation, Group, GroupScores, IterationRecord, Prompt
from tandem_clients.transcript import Transcript
from tandem_config.schema import SamplesSection
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import MaskedSpan, StoredSample, TextSpan, plain
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import EOS, encode, held, write_model

PROMPT = Prompt(
    file="train.jsonl", row=7, token_ids=array("I", encode("1+2=")), answer="3", text="1+2=", columns={"level": 3}
)


def completion(text: str, *, truncated: bool = False, spans: tuple[tuple[int, int], ...] = ()) -> Completion:
    ids = [*encode(text), *([] if truncated else [EOS])]
    return Completion(
        token_ids=array("I", ids),
        logprobs=array("f", [0.0] * len(ids)),
        truncated=truncated,
        oldest_version=4,
        version_spans=spans or ((len(ids), 4),),
    )


def generation(*completions: Completion) -> Generation:
    groups = tuple(
        Group(group_id=f"i3.g{p}.row7", prompt=PROMPT, completions=completions[2 * p : 2 * p + 2])
        for p in range(len(completions) // 2)
    )
    return Generation(groups=groups, engine_s=0.1, retried_calls=0)


FOUR = generation(completion("3"), completion("4", truncated=True), completion("5"), completion("5"))


def finished(number: int, *, evaluated: bool = False, generated: Generation = FOUR, **scores: Any) -> FinishedIteration:
    scored = GroupScores(
        rewards_PG=np.array([[2.0, 0.0], [0.0, 0.0]]),
        accuracy=0.5,
        parts={"math": np.array([[1.0, 0.0], [0.0, 0.0]])},
        **scores,
    )
    record = IterationRecord(
        iteration=number,
        policy_version=5,
        generation=generated,
        scored=scored,
        advantages_PG=np.array([[0.7, -0.7], [0.0, 0.0]]),
        zero_variance_P=np.array([False, True]),
        dropped_P=np.array([False, True]),
        step=None,
        sync=None,
        staleness={0: 4},
    )
    sets = [EvaluationResult(name="heldout", policy_version=5, generation=FOUR, scored=scored)] if evaluated else []
    return FinishedIteration(record=record, row={"iteration": number}, evaluated=sets)


@pytest.fixture
def make_sink(tmp_path: Path) -> Any:
    codec = TextCodec.from_folders(write_model(tmp_path / "model"))

    def make(before_write: Any = lambda: None, **settings: Any) -> SampleSink:
        return SampleSink(
            folder=SampleFolder(tmp_path),
            settings=SamplesSection(**settings),
            codec=codec,
            truncated="mask",
            taken=ShownColumns(named=("level", "hint")),
            before_write=before_write,
        )

    return make


def load(tmp_path: Path, number: int, kind: str = "train") -> list[StoredSample]:
    return SampleFolder(tmp_path).load(number, kind, range(4))


def test_a_sample_has_all_that_there_is_to_tell(make_sink: Any, tmp_path: Path) -> None:
    make_sink().take(finished(3, evaluated=True))
    samples = load(tmp_path, 3)
    assert [(sample.use, sample.finish_reason, sample.completion) for sample in samples] == [
        ("trained", "stop", "3<eos>"),
        ("masked", "length", "4"),
        ("dropped", "stop", "5<eos>"),
        ("dropped", "stop", "5<eos>"),
    ]
    first = samples[0]
    assert (first.prompt, first.answer, first.columns, first.row) == ("1+2=", "3", '{"level": 3}', 7)
    assert first.reward_columns == ("level",)
    assert (first.reward, first.reward_parts, first.advantage) == (2.0, {"math": 1.0}, 0.7)
    assert (first.num_tokens, first.prompt_tokens, first.policy_version, first.token_ids) == (2, 4, 4, None)
    assert (first.source, first.version_spans, first.sample_id) == ("train.jsonl", (), "i3.g0.row7#0")
    heldout = load(tmp_path, 3, "heldout")[0]
    assert (heldout.kind, heldout.use, heldout.advantage, heldout.reward_parts) == (
        "heldout",
        "evaluated",
        None,
        {"math": 1.0},
    )


def test_a_sample_whose_score_failed_has_no_reward(make_sink: Any, tmp_path: Path) -> None:
    make_sink().take(finished(3, evaluated=True, missing_PG=np.array([[False, True], [False, False]])))
    for kind in ("train", "heldout"):
        samples = load(tmp_path, 3, kind)
        assert (samples[0].reward, samples[1].reward) == (2.0, None)
        assert [sample.use == "unscored" for sample in samples] == [False, True, False, False]


def test_a_sample_says_which_rewards_failed_and_why(make_sink: Any, tmp_path: Path) -> None:
    make_sink().take(finished(3, failures={2: {"math": "IndexError: \ud800"}}))
    assert [sample.errors for sample in load(tmp_path, 3)] == [{}, {}, {"math": "IndexError: ?"}, {}]
    assert [head.errors for head in SampleFolder(tmp_path).heads(3, "train")][2:] == [{"math": "IndexError: ?"}, {}]


def test_version_spans_end_in_the_text_where_they_end_in_the_tokens(make_sink: Any, tmp_path: Path) -> None:
    two = completion("12", spans=((1, 4), (3, 5)))
    make_sink(token_ids=True).take(finished(3, generated=generation(two, two, two, two)))
    sample = load(tmp_path, 3)[0]
    assert sample.version_spans == (
        TextSpan(end=1, text_end=1, policy_version=4),
        TextSpan(end=3, text_end=7, policy_version=5),
    )
    assert sample.token_ids == [*encode("12"), EOS]


def test_masked_spans_are_where_the_masked_tokens_are_in_the_text(make_sink: Any, tmp_path: Path) -> None:
    two, three = completion("12+3"), completion("4")
    two.loss_mask = array("B", [0, 1, 0, 0, 1])  # 1, +3
    make_sink().take(finished(3, generated=generation(two, three, three, three)))
    samples = load(tmp_path, 3)
    assert samples[0].masked_spans == (
        MaskedSpan(start=0, end=1, text_start=0, text_end=1),
        MaskedSpan(start=2, end=4, text_start=2, text_end=4),
    )
    assert (samples[0].num_tokens, samples[1].masked_spans) == (5, ())


def test_an_episode_keeps_what_was_said(make_sink: Any, tmp_path: Path) -> None:
    two, other = completion("12"), completion("4")
    said = [{"role": "assistant", "content": "12"}, {"role": "user", "content": "no"}]
    two.transcript = Transcript(messages=said, rewards=[0.5], end="max_turns")
    make_sink().take(finished(3, generated=generation(two, other, other, other)))
    samples = load(tmp_path, 3)
    assert json.loads(samples[0].transcript) == {
        "messages": said, "rewards": [0.5], "end": "max_turns", "error": ""
    }  # fmt: skip
    assert plain(samples[0])["transcript"]["end"] == "max_turns"
    assert (samples[1].transcript, plain(samples[1])["transcript"]) == ("", None)


def test_an_evaluation_before_the_first_iteration_is_iteration_0(make_sink: Any, tmp_path: Path) -> None:
    sets = finished(1, evaluated=True).evaluated
    make_sink().take(FinishedIteration(record=None, row={"iteration": 0}, evaluated=sets))
    assert SampleFolder(tmp_path).iterations() == {0: ["heldout"]}


def test_of_every_n_iterations_the_first_and_those_evaluated_are_kept(make_sink: Any, tmp_path: Path) -> None:
    sink = make_sink(every=4)
    for number in range(1, 10):
        sink.take(finished(number, evaluated=number == 6))
    assert list(SampleFolder(tmp_path).iterations()) == [1, 4, 6, 8]


def test_a_resume_replaces_the_iterations_after_its_checkpoint(make_sink: Any, tmp_path: Path) -> None:
    sink = make_sink()
    for number in range(1, 7):
        sink.take(finished(number, evaluated=number == 6))
    resumed = make_sink()
    resumed.take(finished(5))
    assert SampleFolder(tmp_path).iterations() == {number: ["train"] for number in range(1, 6)}


def test_what_the_process_before_did_not_store_is_told_once(make_sink: Any) -> None:
    for number in (1, 2):
        assert make_sink().take(finished(number)) is None
    resumed = make_sink()
    assert resumed.take(finished(5)) == "there are no samples of 2 iterations, 3 to 4"
    assert resumed.take(finished(6)) is None


def test_a_coordinator_that_was_replaced_changes_nothing(make_sink: Any, tmp_path: Path) -> None:
    def refuse() -> None:
        raise Unavailable("another coordinator leads the run")

    make_sink().take(finished(5))
    with pytest.raises(Unavailable):
        make_sink(before_write=refuse).take(finished(3))
    assert list(SampleFolder(tmp_path).iterations()) == [5]


def test_the_budget_is_kept(make_sink: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = make_sink(max_mib=1)
    sink.take(finished(1))
    (size,) = SampleFolder(tmp_path).sizes().values()
    monkeypatch.setattr("coordinator.record.samples.sink._MIB", 6 * size + size // 2)
    for number in range(2, 40):
        sink.take(finished(number))
    kept = SampleFolder(tmp_path).sizes()
    assert sum(kept.values()) <= 6.5 * size
    assert 5 <= len(kept) <= 6
    assert {1, 38, 39} <= set(kept)


def test_a_file_that_cannot_be_removed_is_told_and_tried_again(
    make_sink: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.record.samples.sink._MIB", 2**12)
    sink, told = make_sink(max_mib=8), list[list[str]]()
    sink.left = lambda texts: told.append(list(texts))
    for number in (1, 2):
        sink.take(finished(number))
    stuck = tmp_path / "samples" / "00000002.train.parquet"
    with held(stuck):
        for number in range(3, 30):
            sink.take(finished(number))
        stored = SampleFolder(tmp_path).iterations()
        assert ({1, 2} <= set(stored), max(stored)) == (True, 29)
        others = sum(size for number, size in SampleFolder(tmp_path).sizes().items() if number != 2)
        assert others <= 8 * 2**12
        assert told[-1] == [f"{stuck}: Device or resource busy"]
    sink.take(finished(30))
    assert told[-1] == []
    assert 2 not in SampleFolder(tmp_path).iterations()


def test_a_resume_stores_over_what_it_cannot_remove(make_sink: Any, tmp_path: Path) -> None:
    make_sink().take(finished(3))
    make_sink().take(finished(7))
    sink, told = make_sink(), list[list[str]]()
    sink.left = lambda texts: told.append(list(texts))
    with held(tmp_path / "samples" / "00000007.train.parquet"):
        for number in (4, 5, 6):
            sink.take(finished(number))
    sink.take(finished(7))
    assert list(SampleFolder(tmp_path).iterations()) == [3, 4, 5, 6, 7]
    assert (len(told[0]), told[-1]) == (1, [])


def test_what_is_kept_lies_further_and_further_apart() -> None:
    sizes: dict[int, int] = {}
    for number in range(1, 1001):
        sizes[number] = 1
        for gone in surplus(sizes, 20):
            del sizes[gone]
    kept = sorted(sizes)
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert (kept[0], kept[-1], len(kept)) == (1, 1000, 20)
    assert gaps[-1] == 1
    assert max(gaps[:5]) > 4 * max(gaps[-5:])
