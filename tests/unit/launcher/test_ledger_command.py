"""`tandem ledger`: what became of each sample, and an exit code that says whether the files prove it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG
from tandem_files.checkpoints import COORDINATOR_FILE, mark_complete, step_folder
from tandem_files.ledger import reading
from tandem_files.ledger.account import Account, chained
from tandem_files.ledger.records import FORMAT, Record, framed, segment, segments

DIGEST = chained("", "i1.v0.a", 0, {"i1.g1.row2": None})
HEAD = {"format": FORMAT, "run_id": "mine", "number": 1, "after": 0, "account": Account().snapshot()}
RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("segment", HEAD),
    (
        "begun",
        {"iteration": 1, "version": 0, "first": 0, "size": 4, "order": "o", "groups": ["i1.g0.row1", "i1.g1.row2"]},
    ),
    ("finished", {"groups": ["i1.g0.row1", "i1.g1.row2"]}),
    ("filtered", {"why": "all rewards of the group are equal", "samples": {"i1.g0.row1": None}}),
    ("step", {"iteration": 1, "step": "i1.v0.a", "version": 0, "samples": {"i1.g1.row2": None}, "digest": DIGEST}),
    ("checkpoint", {"iteration": 1, "version": 1, "digest": DIGEST, "oldest": 0}),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of one iteration, with a checkpoint."""
    path = segment(tmp_path, 1)
    path.parent.mkdir()
    path.write_bytes(b"".join(framed(Record(kind=kind, fields=fields)) for kind, fields in RECORDS))
    folder = step_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    (folder / COORDINATOR_FILE).write_text(json.dumps({"steps_digest": DIGEST}))
    mark_complete(folder, policy_version=1)
    (tmp_path / "run.json").write_text('{"run_id": "mine", "launch_id": ""}')
    return tmp_path


def ledger(run_dir: Path, *options: str) -> tuple[int, list[str]]:
    """Runs the command. Returns: its exit code, and the lines that it printed."""
    result = CliRunner().invoke(app, ["ledger", str(run_dir), *options], env={"COLUMNS": "300"})
    return result.exit_code, [" ".join(line.split()) for line in result.output.splitlines()]


@pytest.mark.runs("tandem ledger")
def test_what_became_of_each_sample_is_shown_and_proven(run_dir: Path) -> None:
    code, lines = ledger(run_dir, "--verify")
    assert code == 0
    assert lines == [
        "samples number why",
        "begun 8",
        "trained 4",
        "filtered 4 all rewards of the group are equal",
        "dropped 0",
        "under way 0",
        f"no resume since the oldest segment; 6 records in 1 segments; the last step is i1.v0.a; digest of all steps "
        f"{DIGEST}",
        "proven: each sample begun is trained once, filtered, dropped by name or under way; no prompt is skipped",
    ]


def test_as_json(run_dir: Path) -> None:
    code, lines = ledger(run_dir, "--json")
    said = json.loads("\n".join(lines))
    assert code == 0
    assert said["samples"] == {"begun": 8, "filtered: all rewards of the group are equal": 4, "trained": 4}
    assert (said["under_way"], said["problems"], said["position"]["digest"]) == (0, [], DIGEST)


def test_damage_fails_a_verification_only(run_dir: Path) -> None:
    path = segment(run_dir, 1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert ledger(run_dir)[0] == 0
    code, lines = ledger(run_dir, "--verify")
    assert code == 1
    assert lines[-2].endswith("are no record")
    assert lines[-1] == "not proven: 1 problems"


def test_a_checkpoint_after_other_steps_is_named(run_dir: Path) -> None:
    (step_folder(run_dir, 1) / COORDINATOR_FILE).write_text(json.dumps({"steps_digest": "other"}))
    code, lines = ledger(run_dir, "--verify")
    assert code == 1
    assert lines[-2].endswith("step-00000001 was made after other train steps than the ledger has for it")


def test_a_folder_without_one_is_told(tmp_path: Path) -> None:
    code, lines = ledger(tmp_path)
    assert code == EXIT_BAD_CONFIG
    assert lines == [f"{tmp_path} has no ledger: it is of a release before it, or no run's"]


def test_a_segment_that_a_run_removes_meanwhile_is_not_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, gone = segments, segment(run_dir, 0)

    def once(folder: Path) -> dict[int, Path]:
        monkeypatch.setattr(reading, "segments", listed)
        return {0: gone, **listed(folder)}

    monkeypatch.setattr(reading, "segments", once)
    assert ledger(run_dir, "--verify")[0] == 0


def test_another_runs_is_refused(run_dir: Path) -> None:
    (run_dir / "run.json").write_text('{"run_id": "other", "launch_id": ""}')
    code, lines = ledger(run_dir)
    assert code == EXIT_BAD_CONFIG
    assert "is of the ledger of run 'mine', and this is run 'other'" in lines[0]


def test_a_segment_that_has_lost_its_end_is_named(run_dir: Path) -> None:
    path = segment(run_dir, 1)
    whole = path.stat().st_size
    head = HEAD | {"number": 2, "after": whole}
    segment(run_dir, 2).write_bytes(framed(Record(kind="segment", fields=head)))
    assert ledger(run_dir, "--verify")[0] == 0
    path.write_bytes(framed(Record(kind="segment", fields=HEAD)))
    code, lines = ledger(run_dir, "--verify")
    assert code == 1
    assert f"{path}: {whole - path.stat().st_size} bytes at its end are missing" in lines


@pytest.mark.parametrize("left", [0, 1])
def test_a_ledger_that_ends_before_a_checkpoint_is_named(run_dir: Path, left: int) -> None:
    path = segment(run_dir, 1)
    path.write_bytes(b"".join(framed(Record(kind=kind, fields=fields)) for kind, fields in RECORDS[:left]))
    code, lines = ledger(run_dir, "--verify")
    assert code == 1
    assert lines[-2].endswith("step-00000001 is of iteration 1, and the ledger ends with iteration 0")
