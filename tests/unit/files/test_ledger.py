"""The ledger's files and its account: whatever is torn, altered, missing or untrue is named, and costs only itself."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servicekit.errors import ConfigError
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.ledger.account import FATES, Account, Unbalanced, chained
from tandem_files.ledger.reading import read_ledger
from tandem_files.ledger.records import NoRecord, Record, framed, read_records, segment

SIZE = 3
HEAD = {"format": 1, "run_id": "mine", "number": 1, "after": 0, "account": Account().snapshot()}


def record(kind: str, **fields: Any) -> Record:
    return Record(kind=kind, fields=fields)


def begun(iteration: int, first: int, names: Sequence[str]) -> Record:
    return record(
        "begun", iteration=iteration, version=iteration - 1, first=first, size=SIZE, groups=list(names), order="o"
    )


def step(account: Account, iteration: int, samples: dict[str, list[int] | None]) -> Record:
    name, version = f"i{iteration}.s", iteration - 1
    digest = chained(account.position.digest, name, version, samples)
    return record("step", iteration=iteration, step=name, version=version, samples=samples, digest=digest)


def resumed(account: Account, iteration: int, first: int, digest: str = "", **more: Any) -> Record:
    line = {"first": first, "last": "", "digest": digest, "step": "", "version": iteration, "as": iteration}
    return record("resumed", iteration=iteration, **line | more)


def an_iteration(account: Account, iteration: int, first: int) -> None:
    """Two groups: all of one is filtered, and a sample of the other."""
    names = [f"i{iteration}.g0", f"i{iteration}.g1"]
    account.add(begun(iteration, first, names))
    account.add(record("finished", groups=names))
    account.add(record("filtered", why="equal", samples={names[0]: None}))
    account.add(record("filtered", why="unscored", samples={names[1]: [1]}))
    account.add(step(account, iteration, {names[1]: [0, 2]}))


def write(run_dir: Path, number: int, *records: Record, **head: Any) -> Path:
    path = segment(run_dir, number)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(framed, [record("segment", **HEAD | {"number": number} | head), *records])))
    return path


def test_what_is_settled_adds_up() -> None:
    account = Account()
    an_iteration(account, 1, 0)
    an_iteration(account, 2, 2)
    assert account.counts == {"begun": 12, "trained": 4, "filtered: equal": 6, "filtered: unscored": 2}
    assert (account.under_way, account.total("filtered"), account.position.next_prompt) == (0, 8, 4)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (record("filtered", why="equal", samples={"i1.g1": [0]}), r"samples of i1\.g1 are filtered: equal, and are al"),
        (record("dropped", why="lost", samples={"i9.g1": None}), r"group i9\.g1 was not begun"),
        (record("finished", groups=["i1.g0"]), r"group i1\.g0 is finished twice"),
        (begun(2, 3, ["i2.g0"]), r"wave 2 begins with prompt 3, not 2: prompts 2 to 2 are skipped"),
        (begun(2, 1, ["i2.g0"]), r"begins with prompt 1, not 2: prompts are begun again"),
        (step(Account(), 1, {"i1.g1": [0, 2]}), r"step i1\.s has another digest than its samples and the steps befor"),
        (record("checkpoint", iteration=1, version=1, digest="other", oldest=0), "was made after other steps"),
        (resumed(Account(), 0, 5), r"wave 1 began with prompt 0, and begins with 5 now"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(wrong: Record, why: str) -> None:
    account = Account()
    an_iteration(account, 1, 0)
    with pytest.raises(Unbalanced, match=why):
        account.add(wrong)
    tolerant = Account(problems=[])
    an_iteration(tolerant, 1, 0)
    tolerant.add(wrong)
    assert len(tolerant.problems or ()) >= 1
    assert tolerant.counts["begun"] == sum(map(tolerant.total, FATES)) + tolerant.under_way


def test_a_sample_that_was_trained_is_not_trained_again() -> None:
    account = Account()
    an_iteration(account, 1, 0)
    with pytest.raises(Unbalanced, match=r"samples of i1\.g1 are trained, and are already filtered: unscored, trained"):
        account.add(step(account, 1, {"i1.g1": [0]}))


def test_a_group_is_trained_when_it_is_finished() -> None:
    account = Account()
    account.add(begun(1, 0, ["a"]))
    with pytest.raises(Unbalanced, match=r"step i1\.s has group a, which is not finished"):
        account.add(step(account, 1, {"a": None}))


def test_a_resume_takes_back_what_came_after_the_checkpoint() -> None:
    account = Account()
    an_iteration(account, 1, 0)
    digest = account.position.digest
    an_iteration(account, 2, 2)
    account.add(resumed(account, 1, 2, digest))
    assert (account.under_way, account.counts["returned"], account.total("trained")) == (6, 2, 2)
    account.add(record("continued", iteration=2, version=1, first=2, groups=["i2.g1"], order="o"))
    assert account.open_groups(2) == {"i2.g0": False, "i2.g1": True}
    account.add(record("finished", groups=["i2.g0"]))
    account.add(step(account, 2, {"i2.g0": None, "i2.g1": None}))
    assert (account.under_way, account.total("trained"), account.counts["begun"]) == (0, 8, 12)


def test_a_step_that_is_sent_again_under_its_id_is_not_returned() -> None:
    account = Account()
    an_iteration(account, 1, 0)
    account.add(resumed(account, 0, 0, step="i1.s"))
    assert (account.counts["returned"], account.under_way) == (0, 6)


@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_any_history_of_crashes_adds_up(chance: random.Random) -> None:
    account, first, digests = Account(), 0, [""]
    iteration = 1
    for _ in range(12):
        names = [f"i{iteration}.g{place}" for place in range(2)]
        if chance.random() < 0.3 and iteration > 1:  # back to a checkpoint
            iteration = chance.randint(1, iteration - 1)
            account.add(resumed(account, iteration, 2 * iteration, digests[iteration]))
            for number in account.open_waves():
                account.add(record("dropped", why="lost", samples=account.open_samples(number)))
            digests, first, iteration = digests[: iteration + 1], 2 * iteration, iteration + 1
            continue
        account.add(begun(iteration, first, names))
        account.add(record("finished", groups=names))
        dropped = [index for index in range(SIZE) if chance.random() < 0.3]
        account.add(record("filtered", why="unscored", samples={names[0]: dropped}))
        trained = {names[0]: [index for index in range(SIZE) if index not in dropped], names[1]: None}
        account.add(step(account, iteration, {name: kept for name, kept in trained.items() if kept != []}))
        first, iteration = first + 2, iteration + 1
        digests.append(account.position.digest)
    assert account.under_way == 0
    assert account.counts["begun"] == sum(map(account.total, FATES))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damage_costs_the_records_that_it_meets(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    records = [Record(kind="a", fields={"number": number}, content=bytes(number)) for number in range(8)]
    parts = [framed(each) for each in records]
    content = bytearray(b"".join(parts))
    where = data.draw(st.integers(0, len(content) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if change == "flip":
        content[where] ^= data.draw(st.integers(1, 255))
    elif change == "cut":
        del content[where:]
    else:
        content[where:where] = data.draw(st.binary(min_size=1, max_size=20))
    path = tmp_path_factory.mktemp("ledger") / "file"
    path.write_bytes(content)
    found = list(read_records(path))
    left = [each for each in found if isinstance(each, Record)]
    damages = [each for each in found if isinstance(each, NoRecord)]
    hit = next(place for place in range(8) if where < sum(map(len, parts[: place + 1])))
    untouched = records[:hit] if change == "cut" else [each for each in records if each != records[hit]]
    assert [each for each in left if each != records[hit]] == untouched
    assert sum(each.num_bytes for each in damages) + sum(len(framed(each)) for each in left) == len(content)


def test_a_ledger_says_what_is_missing_of_it(tmp_path: Path) -> None:
    account = Account()
    write(tmp_path, 1, begun(1, 0, ["a"]))
    account.add(begun(1, 0, ["a"]))
    size = segment(tmp_path, 1).stat().st_size
    write(tmp_path, 3, record("finished", groups=["a"]), after=size)
    assert [text.rpartition("/")[2] for text in read_ledger(tmp_path, "mine").problems] == [
        "00000002.log is missing: what it held is not known"
    ]


def test_what_a_replaced_coordinator_added_does_not_count(tmp_path: Path) -> None:
    path = write(tmp_path, 1, begun(1, 0, ["a"]))
    size = path.stat().st_size
    write(tmp_path, 2, after=size)
    path.write_bytes(path.read_bytes() + framed(record("finished", groups=["a"])))
    ledger = read_ledger(tmp_path, "mine")
    assert ledger.account.open_groups(1) == {"a": False}
    assert len(ledger.problems) == 1
    assert ledger.problems[0].endswith("are of a coordinator that was replaced")


def test_a_step_may_take_groups_of_several_waves_and_a_resume_takes_back_those_of_later_steps() -> None:
    account = Account()
    account.add(begun(1, 0, ["i1.g0", "i1.g1"]))
    account.add(begun(2, 2, ["i2.g0", "i2.g1"]))
    account.add(record("finished", groups=["i1.g0", "i1.g1", "i2.g0", "i2.g1"]))
    account.add(step(account, 1, {"i1.g0": None, "i2.g0": None}))
    digest = account.position.digest
    account.add(step(account, 2, {"i1.g1": None, "i2.g1": None}))
    assert account.needed_waves(1) == {1, 2}
    again = Account()
    again.add(record("segment", **HEAD | {"account": json.loads(json.dumps(account.snapshot(1)))}))
    for one in (account, again):
        one.add(resumed(one, 1, 0, digest, wave=1))
        assert (one.settled_groups(1), one.settled_groups(2)) == ({"i1.g0"}, {"i2.g0"})
        assert (one.under_way, one.total("trained"), one.counts["returned"]) == (6, 6, 6)
        one.add(record("continued", iteration=1, first=0, prompts=2, order="o", version=1, groups=["i1.g1"]))
        one.add(record("continued", iteration=2, first=2, prompts=2, order="o", version=1, groups=["i2.g1"]))
        one.add(step(one, 2, {"i1.g1": None, "i2.g1": None}))
        assert (one.under_way, one.position.next_prompt) == (0, 4)


def test_a_ledger_of_format_1_is_read(tmp_path: Path) -> None:
    """Its groups belong to the iteration of their wave, filtered ones too, and say nothing of who has settled them."""
    head = {
        "counts": {"begun": 12, "trained": 3, "filtered: equal": 3},
        "under_way": 6,
        "position": {"iteration": 2, "next_prompt": 4, "step_id": "i1.s", "digest": "d", "before": ""},
        "settled_until": 0,
        "trained": {"1": 0},
        "renamed": [],
        "orders": {"1": ["o", 0], "2": ["o", 1]},
        "groups": {
            "i1.g0": [1, True, ["trained"] * SIZE],
            "i1.g1": [1, True, ["filtered: equal"] * SIZE],
            "i2.g0": [2, True, ["under way"] * SIZE],
            "i2.g1": [2, False, ["under way"] * SIZE],
        },
    }
    filtered = record("filtered", why="equal", samples={"i2.g0": None})
    write(tmp_path, 2, filtered, format=1, account=head)
    account = read_ledger(tmp_path).account
    assert account.problems == []
    assert (account.position.iteration, account.under_way, account.total("filtered")) == (2, 3, 6)
    assert (account.settled_groups(1), account.settled_groups(2)) == ({"i1.g0", "i1.g1"}, {"i2.g0"})
    assert account.needed_waves(1) == {2}
    account.add(resumed(account, 0, 0))
    assert (account.under_way, account.counts["returned"]) == (12, 3)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (
            {"run_id": "other"},
            r"00000001\.log is of the ledger of run 'other', and this is run 'mine': move the folder",
        ),
        ({"format": 3}, r"00000001\.log was written by a newer release of Tandem \(format 3, this one reads 2\)"),
    ],
)
def test_another_ledger_is_refused_and_stays(tmp_path: Path, head: dict[str, Any], why: str) -> None:
    path = write(tmp_path, 1, **head)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=why):
        read_ledger(tmp_path, "mine")
    assert path.read_bytes() == before


def test_a_record_without_its_fields_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, record("begun", iteration=1), begun(1, 0, ["a"]))
    ledger = read_ledger(tmp_path, "mine")
    assert ledger.problems == ["record begun lacks what it should have: KeyError('first')"]
    assert ledger.account.counts["begun"] == SIZE


def test_the_head_of_the_oldest_segment_says_what_those_before_it_held(tmp_path: Path) -> None:
    account = Account()
    an_iteration(account, 1, 0)
    write(tmp_path, 7, begun(2, 2, ["b"]), account=json.loads(json.dumps(account.snapshot())))
    assert "the segments since iteration 0 are missing" in read_ledger(tmp_path, "mine").problems[0]
    step_folder(tmp_path, 1).mkdir(parents=True)
    mark_complete(step_folder(tmp_path, 1), policy_version=1)  # since which nothing is missing
    found = read_ledger(tmp_path, "mine")
    assert found.problems == []
    assert (found.account.counts["begun"], found.account.under_way) == (9, 3)


def test_a_policy_has_all_the_names_that_resumes_gave_it() -> None:
    renamed = [(6, 6, 8), (6, 8, 10), (3, 8, 11), (6, 6, 12), (6, 13, 14)]
    account = Account(renamed=renamed)
    assert account.names_of(6, 12) == account.names_of(6, 10) == {6, 8, 10, 12}
    assert (account.names_of(6, 14), account.names_of(6, 7)) == ({13, 14}, {7})
