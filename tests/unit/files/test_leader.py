"""A coordinator that is frozen between its check and a change, and wakes behind a take-over, changes nothing."""

import ast
import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator.checkpoints.loading import set_damaged_aside
from coordinator.data.cursor import CursorState
from coordinator.ledger.files import LedgerFiles
from coordinator.record.state import RunState
from coordinator.retries import forget_failures, note_failure
from servicekit.errors import Fenced, TandemError
from tandem_files import checkpoints, leader
from tandem_files.atomic import append_json, make_way, write_bytes_atomic, write_json_atomic
from tandem_files.exports import MARK, export_folder, note_template, prune_exports
from tandem_files.leader import (
    FAILURES_FILE,
    LEADER_FILE,
    PLACEMENT_FILE,
    FolderLeader,
    read_leader,
    take_folder,
)
from tandem_files.ledger.life import LIFE_FILE
from tandem_files.ledger.records import Record, framed, groups_file, segment
from tandem_files.metrics_file import METRICS_FILE, MetricsFile
from tandem_files.run_config import NEXT_CONFIG, adopt_next, note_config
from tandem_files.run_folder import STATE_FILE, SUMMARY_FILE, Scale, read_scale, write_scale
from tandem_files.samples.folder import SampleFolder
from tests.house.repository import REPO

OLD, NEW = FolderLeader(worker_id="a", token=7), FolderLeader(worker_id="b", token=8)
Check = Callable[[], None]
# What is done before the freeze, in the run's folder and by which coordinator; it returns the change.
Writer = Callable[[Path, Check, str], Callable[[], object]]


def of_call(change: Callable[[Path, Check, str], object]) -> Writer:
    """A change that nothing precedes."""
    return lambda run_dir, check, by: partial(change, run_dir, check, by)


def saved(run_dir: Path, check: Check, by: str, *, durable: bool) -> None:
    state = RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint=by)
    state.save(run_dir / STATE_FILE, check, durable=durable)


def log(run_dir: Path, check: Check, by: str) -> Callable[[], object]:
    """Appends to a segment that is open."""
    files = LedgerFiles(run_dir, 1, check)
    number = 1 + sum(path.suffix == ".log" for path in (run_dir / "ledger").glob("*"))
    files.begin_segment(number, lambda after: framed(Record(kind="segment", fields={"by": by, "after": after})))
    files.sync()

    def append() -> None:
        files.append(framed(Record(kind="step", fields={"by": by})))
        files.sync()

    return append


def begun_log(run_dir: Path, check: Check, by: str) -> Callable[[], object]:
    files = LedgerFiles(run_dir, 1, check)
    head = framed(Record(kind="segment", fields={"by": by}))

    def begin() -> None:
        files.begin_segment(1 + len(list((run_dir / "ledger").glob("*.log"))), lambda _: head)
        files.sync()

    return begin


def groups(run_dir: Path, check: Check, by: str, *, keep: bool, opened: bool) -> Callable[[], object]:
    files, record = LedgerFiles(run_dir, 1, check), framed(Record(kind="group", fields={"by": by}))
    files.begin_groups(3, keep=keep)

    def append() -> None:
        files.append_groups(3, record)
        files.write()

    if opened:
        append()
    return append


def given_up_groups(run_dir: Path, check: Check, by: str) -> Callable[[], object]:
    """More than run.ledger_max_mib: what the wave has is emptied."""
    files = LedgerFiles(run_dir, 0, check)
    files.begin_groups(3, keep=True)
    return lambda: files.append_groups(3, framed(Record(kind="group", fields={"by": by})))


def kept_step(run_dir: Path, check: Check, by: str) -> Callable[[], object]:
    files, record = LedgerFiles(run_dir, 1, check), framed(Record(kind="message", fields={"by": by}))
    return lambda: files.keep_step(5, [record, record])


def tidied(run_dir: Path, check: Check, by: str) -> Callable[[], object]:
    files = LedgerFiles(run_dir, 1, check)
    return lambda: files.tidy(4, {1: 0}, {2: 9, 4: 9}, 0)


def completed(run_dir: Path, check: Check, by: str) -> None:
    """The coordinator's part of a checkpoint; the trainer's calls are fenced."""
    folder = checkpoints.step_folder(run_dir, 4)
    write_json_atomic(folder / checkpoints.COORDINATOR_FILE, {"by": by}, check)
    checkpoints.mark_complete(folder, check, by=by)


def damaged(run_dir: Path, check: Check, by: str) -> None:
    damage = checkpoints.Damage(iteration=4, folder=checkpoints.step_folder(run_dir, 4), what="torn")
    other = checkpoints.step_folder(run_dir, 2)
    list(set_damaged_aside(checkpoints.UndamagedCheckpoint(iteration=2, folder=other, skipped=[damage]), check))


def best(run_dir: Path, check: Check, by: str) -> None:
    number = 2 if by == "old" else 4
    mark = checkpoints.BestCheckpoint(iteration=number, policy_version=number, metric="m", value=0.5)
    checkpoints.mark_best(run_dir, mark, check)


def template(run_dir: Path, check: Check, by: str) -> None:
    note_template(run_dir, by, check)


def scaled(run_dir: Path, check: Check, by: str) -> None:
    write_scale(run_dir, Scale(replicas=len(by), configured=1, launch_id=by), check)


WRITERS: dict[str, Writer] = {
    "write_scale": of_call(scaled),
    "forget_failures": of_call(lambda folder, check, by: forget_failures(folder, check)),
    "prune_exports": of_call(lambda folder, check, by: prune_exports(folder, 4, 1, check)),
    "RunState.save": of_call(partial(saved, durable=True)),
    "RunState.note": of_call(partial(saved, durable=False)),
    "write_json_atomic": of_call(lambda folder, check, by: write_json_atomic(folder / SUMMARY_FILE, by, check)),
    "write_bytes_atomic": of_call(
        lambda folder, check, by: write_bytes_atomic(folder / PLACEMENT_FILE, by.encode(), check)
    ),
    "append": of_call(lambda folder, check, by: MetricsFile(folder / METRICS_FILE).append({"iteration": 3}, check)),
    "append_json": of_call(lambda folder, check, by: append_json(folder / LIFE_FILE, {"by": by}, check)),
    "cut_after": of_call(lambda folder, check, by: MetricsFile(folder / METRICS_FILE).cut_after(1, check)),
    "adopt_next": of_call(lambda folder, check, by: adopt_next(folder, check)),
    "note_config": of_call(lambda folder, check, by: note_config(folder, by, check)),
    "note_failure": of_call(lambda folder, check, by: note_failure(folder, 0, check)),
    "note_template": of_call(template),
    "note_template, none": of_call(lambda folder, check, by: note_template(folder, None, check)),
    "mark_complete": of_call(completed),
    "make_way, remove_each, _remove_folder": of_call(
        lambda folder, check, by: make_way(checkpoints.step_folder(folder, 4), check)
    ),
    "mark_best": of_call(best),
    "mark_best, none": of_call(lambda folder, check, by: checkpoints.mark_best(folder, None, check)),
    "mark_latest": of_call(lambda folder, check, by: checkpoints.mark_latest(folder, check)),
    "keep_checkpoint": of_call(lambda folder, check, by: checkpoints.keep_checkpoint(folder, 4, check)),
    "prune, remove_checkpoint": of_call(lambda folder, check, by: checkpoints.prune(folder, 1, check)),
    "set_damaged_aside, set_aside": of_call(damaged),
    "SampleFolder.write": of_call(
        lambda folder, check, by: SampleFolder(folder).write(4, "train", pa.table({"by": [by]}), check)
    ),
    "SampleFolder.remove": of_call(lambda folder, check, by: SampleFolder(folder).remove(2, check)),
    "LedgerFiles.append": log,
    "LedgerFiles.begin_segment": begun_log,
    "LedgerFiles.append_groups": partial(groups, keep=True, opened=True),
    "LedgerFiles.append_groups, not open": partial(groups, keep=True, opened=False),
    "LedgerFiles.append_groups, anew": partial(groups, keep=False, opened=False),
    "LedgerFiles.append_groups, too many": given_up_groups,
    "LedgerFiles.keep_step": kept_step,
    "LedgerFiles.tidy": tidied,
}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run after some iterations, led by OLD."""
    folder = tmp_path / "run"
    folder.mkdir()
    take_folder(folder, OLD)
    (folder / METRICS_FILE).write_text('{"iteration": 1}\n{"iteration": 2}\n')
    (folder / NEXT_CONFIG).write_text("next")
    template(folder, lambda: None, "first")
    for number in (2, 4):
        made = checkpoints.step_folder(folder, number)
        made.mkdir(parents=True)
        checkpoints.mark_complete(made)
    best(folder, lambda: None, "new")
    samples(folder)
    (folder / FAILURES_FILE).write_text("{}")
    for number in (2, 4):
        export_folder(folder, number).mkdir(parents=True)
        (export_folder(folder, number) / MARK).write_text("{}")
    (export_folder(folder, 4).parent / ".iteration-000006.tmp").mkdir()
    groups_file(folder, 3).parent.mkdir()
    groups_file(folder, 3).write_bytes(framed(Record(kind="group", fields={"by": "first"})))
    segment(folder, 1).write_bytes(framed(Record(kind="segment", fields={"by": "first"})))
    return folder


def samples(folder: Path) -> None:
    SampleFolder(folder).write(2, "train", pa.table({"by": ["first"]}))


def num_checks(writer: Writer, run_dir: Path) -> int:
    """How often a change checks; tried on a copy."""
    calls = list[int]()
    copy = run_dir.with_name("copy")
    shutil.copytree(run_dir, copy)
    change = writer(copy, lambda: calls.append(1), "old")
    calls.clear()
    change()
    shutil.rmtree(copy)
    return len(calls)


def nothing(run_dir: Path, writer: Writer) -> None:
    """The successor has only taken over."""


def writes_too(run_dir: Path, writer: Writer) -> None:
    """It has done the same."""
    writer(run_dir, lambda: NEW.check(run_dir), "new")()


def made_anew(run_dir: Path, writer: Writer) -> None:
    """It has made everything anew."""
    run_dir.rename(run_dir.with_name("made"))
    shutil.copytree(run_dir.with_name("made"), run_dir)
    shutil.rmtree(run_dir.with_name("made"))


def frozen_change(
    run_dir: Path, writer: Writer, at: int, successor: Callable[[Path, Writer], None]
) -> dict[str, bytes]:
    """Freeze OLD behind its check number `at`, and let it wake behind the take-over. Returns: what there was then."""
    left, found = at, dict[str, bytes]()
    is_begun = False

    def check() -> None:
        nonlocal left
        OLD.check(run_dir)
        left -= is_begun
        if left == -1 and not found:
            take_folder(run_dir, NEW)
            successor(run_dir, writer)
            found.update(tree(run_dir))

    change = writer(run_dir, check, "old")
    is_begun = True
    with contextlib.suppress(TandemError, OSError):
        change()
    return found


# Those that remove something.
REMOVES = (
    *("adopt_next", "note_template, none", "make_way", "mark_best, none", "prune", "set_damaged_aside"),
    *("SampleFolder.remove", "LedgerFiles.tidy", "forget_failures", "prune_exports"),
)


@pytest.mark.parametrize("successor", [nothing, writes_too, made_anew])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_frozen_between_check_and_change_changes_nothing(
    run_dir: Path, name: str, successor: Callable[[Path, Writer], None]
) -> None:
    before = run_dir.with_name("before")
    shutil.copytree(run_dir, before)
    num = num_checks(WRITERS[name], run_dir)
    assert num
    for at in range(num):
        shutil.rmtree(run_dir)
        shutil.copytree(before, run_dir)
        found = frozen_change(run_dir, WRITERS[name], at, successor)
        now = tree(run_dir)
        if successor is nothing and any(part in name for part in REMOVES):
            # What it removes late was there when it was checked.
            assert {
                name: now[name] for name in now if "damaged-" not in name and ".old/" not in name
            }.items() <= found.items()
        else:
            assert now == found, at
        with pytest.raises(Fenced, match="coordinator b has taken over"):
            OLD.check(run_dir)


def test_of_two_that_take_over_the_later_one_leads(run_dir: Path) -> None:
    third = FolderLeader(worker_id="c", token=9)
    with pytest.raises(OSError, match=LEADER_FILE):
        take_folder(run_dir, NEW, lambda: take_folder(run_dir, third))
    assert read_leader(run_dir) == third


@pytest.mark.parametrize("at", ["claimed", "write_json_atomic", "copy2 1", "copy2 2", "copy2 3"])
def test_a_take_over_that_is_frozen_takes_nothing_from_the_next_one(
    run_dir: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes when the next one has files open, and is about to rename one."""
    third, inodes, calls = FolderLeader(worker_id="c", token=9), dict[Path, int](), list[str]()
    temporary = run_dir / f".{STATE_FILE}.{'0' * 32}.tmp"

    def freeze(name: str) -> None:
        calls.append(name)
        if inodes or at not in (name, f"{name} {calls.count(name)}"):
            return
        inodes[run_dir] = 0
        take_folder(run_dir, third)
        inodes.update({path: path.stat().st_ino for path in (run_dir / METRICS_FILE, *(run_dir / "ledger").iterdir())})
        temporary.write_text("of the third one")

    def frozen(name: str, real: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if before:
                freeze(name)
            found = real(*args, **named)
            if not before:
                freeze(name)
            return found

        return call

    def lease() -> None:
        if inodes:
            raise Fenced("the lease is another's")

    monkeypatch.setattr("tandem_files.leader.shutil.copy2", frozen("copy2", shutil.copy2, before=True))
    monkeypatch.setattr(leader, "write_json_atomic", frozen("write_json_atomic", write_json_atomic, before=False))
    freeze("claimed")
    with pytest.raises(Fenced):
        take_folder(run_dir, NEW, lease)
    assert {path: path.stat().st_ino for path in inodes if path != run_dir} | {run_dir: 0} == inodes
    assert temporary.exists()


def test_the_launcher_s_size_is_written_while_a_coordinator_takes_the_folder_over(run_dir: Path) -> None:
    """It is no coordinator, and its temporary file is removed as those are."""
    left = [NEW]

    def meanwhile() -> None:
        if left:
            take_folder(run_dir, left.pop())

    write_scale(run_dir, Scale(replicas=3, configured=1, launch_id="l"), meanwhile)
    assert read_scale(run_dir) == Scale(replicas=3, configured=1, launch_id="l")


def test_a_token_below_the_one_before_leads_too(run_dir: Path) -> None:
    """Redis has lost its data, on a host whose clock is hours behind."""
    behind = FolderLeader(worker_id="c", token=1)
    take_folder(run_dir, behind)
    behind.check(run_dir)
    with pytest.raises(Fenced):
        OLD.check(run_dir)


@pytest.mark.parametrize("content", [None, "", "[]", '{"token": 7}'])
def test_a_folder_that_names_no_leader_refuses_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / LEADER_FILE).write_text(content)
    OLD.check(tmp_path)


def functions(tree_: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree_) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def sources(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for folder in folders:
        for path in sorted((REPO / folder).rglob("*.py")):
            yield path.relative_to(REPO).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def guarded() -> set[str]:
    """The functions that take a check."""
    return {
        function.name
        for _, module in sources("tandem_files", "coordinator")
        for function in functions(module)
        if {"before_write"} & {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    }


def test_every_function_that_takes_a_check_is_frozen_here() -> None:
    frozen = {part.strip().rpartition(".")[2] for name in WRITERS for part in name.split(",")}
    assert guarded() - frozen == {"take_folder"}


# Calls of the coordinator that change files without a check, and why they may.
UNCHECKED = {
    ("coordinator/data/scan_cache.py", "write_bytes_atomic"): "named by its content, and compared with the data",
    ("coordinator/data/scan_cache.py", "remove_each"): "the same",
    ("coordinator/record/trackers/base.py", "write_json_atomic"): "the tracker's own id of the run, always the same",
    ("coordinator/app.py", "claim_run_dir"): "whoever is first makes it, and no one replaces it",
    ("coordinator/standalone.py", "claim_run_dir"): "the same",
    ("coordinator/standalone.py", "write_json_atomic"): "tandem evaluate, which no coordinator leads",
    ("coordinator/retries.py", "write_bytes_atomic"): "the disk's reserve: zeros",
    ("coordinator/retries.py", "unlink"): "the disk's reserve",
    ("coordinator/ledger/files.py", "open"): "opened before the check",
    ("coordinator/ledger/files.py", "ftruncate"): "by its inode, after the check",
    ("coordinator/ledger/files.py", "mkdir"): "empty",
    ("coordinator/checkpoints/writing.py", "mkdir"): "after make_way",
    ("coordinator/record/trackers/base.py", "mkdir"): "empty",
    ("coordinator/record/trackers/wandb.py", "mkdir"): "empty",
    ("coordinator/data/scan_cache.py", "mkdir"): "empty",
}
PRIMITIVES = {"write_json_atomic", "write_bytes_atomic", "append_json", "remove_each", "make_way", "replace_folder"}
CHANGES = {"unlink", "rename", "mkdir", "rmtree", "rmdir", "ftruncate", "write_text", "write_bytes"}


def unguarded() -> set[str]:
    """The functions that change files and take no check."""
    checked = guarded()
    return {
        function.name
        for _, module in sources("tandem_files")
        for function in functions(module)
        if function.name not in checked
        and any(
            ast.unparse(call.func).rpartition(".")[2] in CHANGES | PRIMITIVES
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
        )
    }


def unchecked_calls() -> Iterator[tuple[str, str]]:
    changes = CHANGES | unguarded()
    takes_check = guarded() - {"append", "write", "remove", "note", "save", "note_failure"}
    for path, module in sources("coordinator"):
        if path.startswith(("coordinator/workers/", "coordinator/rewards/", "coordinator/environments/")):
            continue  # write no file of the run
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            text = ast.unparse(call)
            names = [call.func, *call.args] if "to_thread" in ast.unparse(call.func) else [call.func]
            name = ast.unparse(names[1] if len(names) > 1 else names[0]).rpartition(".")[2]
            of_object = text.startswith(("self.state.save(", "state.save(", "note_failure(run_dir")) or (
                path == "coordinator/run.py" and "rows.append(" in text
            )
            if any(part in text for part in ("self.checkpointer.", "self.exporter.")) or text == "self.mark_best()":
                continue  # which has its own check
            checks = any(word in text for word in ("check", "before_write", "before_change"))
            is_change = name in changes or ast.unparse(call.func) == "os.open"
            if ((name in takes_check or of_object) and not checks) or is_change:
                yield path, name


def test_every_change_of_a_coordinator_is_checked_or_says_why_not() -> None:
    assert set(unchecked_calls()) == set(UNCHECKED)
