"""A run's folder: nobody's results are overwritten, one launcher at a time, and resuming only what fits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.data.cursor import CursorState, DataCursor
from coordinator.data.prompts import load_prompts
from coordinator.record.resuming import order_of, reward_facts, reward_warning
from coordinator.record.state import RunState
from launcher.check import environment as check_of_environment
from launcher.check.data.answers import AnswerSample
from launcher.check.data.rows import CheckedData
from launcher.check.preflight import preflight
from launcher.check.resume import check_resume, note_model
from servicekit.errors import ConfigError
from tandem_clients.formatting import EpisodeTools
from tandem_config.comparing.resuming import UNRECORDED, mark_of
from tandem_config.loading import draft_config, dump_resolved, load_config
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.digests import file_digest
from tandem_files.model.fingerprint import model_fingerprint
from tandem_files.rows.reading import Row, RowKeys, read_rows
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import (
    LauncherNotes,
    claimed,
    is_locked,
    locked,
    metrics_rows,
    note_launch,
    read_notes,
    write_notes,
)
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import write_config, write_model
from trainer_service.identity import identity
from weightsync.model.spec import ModelSpec


def claim(output_dir: Path, name: str) -> Path:
    """A new run's folder, with something in it."""
    with claimed(output_dir, name) as folder:
        (folder / "summary.json").write_text("{}")
    return folder


def test_a_name_with_results_gets_the_next_number(tmp_path: Path) -> None:
    names = [claim(tmp_path / "runs", "a").name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    assert (tmp_path / "runs" / "a" / "summary.json").read_text() == "{}"


def test_an_empty_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert claim(tmp_path, "a") == tmp_path / "a"


def test_a_folder_that_is_still_empty_but_claimed_is_left_alone(tmp_path: Path) -> None:
    with claimed(tmp_path, "a") as first, claimed(tmp_path, "a") as second:
        assert (first.name, second.name) == ("a", "a-2")


def test_a_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    assert claim(tmp_path, "a").name == "a-2"


def test_a_second_launcher_is_refused_by_name(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with (
            pytest.raises(ConfigError, match=f"is being run by process {os.getpid()}; watch it with"),
            locked(tmp_path),
        ):
            pass
    assert not is_locked(tmp_path)


def test_the_lock_of_a_killed_launcher_is_free(tmp_path: Path) -> None:
    program = (
        "import signal, sys\nfrom pathlib import Path\nfrom tandem_files.run_folder import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    signal.pause()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert is_locked(tmp_path)
    holder.kill()
    holder.communicate(timeout=10)
    assert not is_locked(tmp_path)


def test_notes_round_trip_and_damaged_ones_are_none(tmp_path: Path) -> None:
    notes = LauncherNotes(pid=1, run_id="a-1", coordinator="127.0.0.1:1")
    write_notes(tmp_path, notes)
    assert read_notes(tmp_path) == notes
    (tmp_path / "launcher.json").write_text('{"pid"')
    assert read_notes(tmp_path) is None


def test_a_half_written_row_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iterat')
    assert metrics_rows(tmp_path) == [{"iteration": 1}]
    assert metrics_rows(tmp_path / "nothing") == []


def make_run(tmp_path: Path, iteration: int | None = 1) -> tuple[Path, Path]:
    """A run folder with a checkpoint, and its configuration file."""
    file = write_config(tmp_path)
    config = load_config(file)
    run_dir = tmp_path / "runs" / "tiny"
    run_dir.mkdir(parents=True)
    (run_dir / RESOLVED_CONFIG).write_text(dump_resolved(config))
    note_model(run_dir, ModelSpec.from_folder(config.model.path))
    if iteration is not None:
        folder = step_folder(run_dir, iteration)
        folder.mkdir(parents=True)
        mark(folder, config)
    return run_dir, file


def mark(folder: Path, config: RunConfig) -> None:
    model = config.model.path
    run = mark_of(config, "tiny-1")
    mark_complete(folder, model=str(model), model_fingerprint=model_fingerprint(model), **run)


def resume(run_dir: Path, file: Path, *overrides: str) -> list[ConfigProblem]:
    config = load_config(file, list(overrides))
    return list(check_resume(run_dir, config, ModelSpec.from_folder(config.model.path)))


def test_a_run_with_a_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    assert resume(*make_run(tmp_path)) == []


def test_a_run_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    write_model(tmp_path / "other", rms_norm_eps=1e-5, max_position_embeddings=64)
    (problem,) = resume(run_dir, file, f"model.path={tmp_path / 'other'}")
    assert problem.key == "--resume"
    assert f"another model ({tmp_path / 'model'}) than {tmp_path / 'other'}" in problem.message
    assert "max_positions 32 in the run, 64 in the configuration" in problem.message
    assert "dense_layers" not in problem.message  # equal, though a tuple here and a list in the file


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (problem,) = resume(*make_run(tmp_path, iteration=None))
    assert problem.message == "has no complete checkpoint to resume from"


def test_a_finished_run_needs_more_iterations(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path, iteration=2)
    (problem,) = resume(run_dir, file)
    assert problem.message == "has already finished its 2 iterations"
    assert problem.suggestion.startswith("--set run.iterations=12")
    assert f"tandem export {run_dir} --out" in problem.suggestion
    assert resume(run_dir, file, "run.iterations=12") == []


def test_a_running_run_cannot_be_resumed(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    with locked(run_dir):
        (problem,) = resume(run_dir, file)
    assert "is being run by process" in problem.message


def test_a_folder_that_is_no_run_lists_those_beside_it(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    (problem,) = resume(run_dir.parent / "tinny", file)
    assert (problem.message, problem.suggestion) == ("no such folder", "runs beside it: tiny")


def test_a_damaged_checkpoint_mark_is_named(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    (step_folder(run_dir, 1) / "complete.json").write_text(json.dumps([1]))
    (problem,) = resume(run_dir, file)
    assert "complete.json is damaged: it holds list" in problem.message


def test_other_code_of_a_reward_than_the_checkpoints_is_a_warning(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    code = tmp_path / "mine.py"
    code.write_text("def score(completion): return 1")
    old = [f"reward=[{{function: '{code}:score', weight: 2}}, {{kind: overlong}}]"]
    state = RunState(
        cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="", rewards=reward_facts(load_config(file, old))
    )
    state.save(step_folder(run_dir, 1) / "coordinator.json")
    mark(step_folder(run_dir, 1), load_config(file, old))
    assert resume(run_dir, file, *old, "reward.0.trial=false") == []
    before = file_digest(code)["xxh3_128"][:12]
    code.write_text("def score(completion): return 0")
    after = file_digest(code)["xxh3_128"][:12]
    (problem,) = resume(run_dir, file, *old)
    assert (problem.key, problem.severity) == ("--resume", "warning")
    assert problem.message == (
        f"reward score: code of {code}: {before} in the checkpoint, {after} in the run: "
        "the scores before and after this resume do not compare"
    )


def test_completions_that_rewards_read_otherwise_than_before_are_a_warning_once(tmp_path: Path) -> None:
    """Checkpoints of older releases say nothing of special tokens, which were removed from what rewards read."""
    _, file = make_run(tmp_path)
    kept = reward_facts(load_config(file))
    old = {name: value for name, value in kept.items() if name.startswith("reward ")}
    assert old == reward_facts(load_config(file, ["rollout.skip_special_tokens=true"]))
    assert "completions: unset in the checkpoint, with special tokens" in reward_warning(old, kept)
    assert "rollout.skip_special_tokens" in reward_warning(old, kept)
    assert reward_warning(kept, kept) == reward_warning({}, kept) == ""


def test_other_rewards_than_the_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    refused, *_ = resume(run_dir, file, "reward={kind: exact_match, weight: 3}")
    assert (refused.key, refused.severity) == ("--resume", "error")
    assert "reward.weight: 1.0 in the checkpoint, 3.0 in the run" in refused.message
    refused, *_ = resume(run_dir, file, "reward=[exact_match, overlong]")
    assert "entries of reward: 1 in the checkpoint, 2 in the run" in refused.message
    assert "start a new run" in refused.suggestion


def test_another_weight_is_told_once(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    facts = reward_facts(load_config(file, ["reward={kind: exact_match, weight: 2}"]))
    state = RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="", rewards=facts)
    state.save(step_folder(run_dir, 1) / "coordinator.json")
    mark(step_folder(run_dir, 1), load_config(file, ["reward={kind: exact_match, weight: 2}"]))
    (problem,) = resume(run_dir, file, "reward={kind: exact_match, weight: 3}")
    assert (problem.severity, problem.message.count("weight")) == ("error", 1)


def test_a_checkpoint_of_another_run_in_the_folder_is_refused_and_a_renamed_folder_is_not(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    note_launch(run_dir, "another-1")  # the folder says whose its checkpoints are
    assert resume(run_dir, file) == []
    renamed = run_dir.rename(run_dir.parent / "renamed")
    assert resume(renamed, file, "run.name=renamed") == []
    (renamed / "run.json").write_text('{"run_id": "another", "launch_id": "another-1"}')
    (problem,) = resume(renamed, file)
    assert "run id (TANDEM_RUN_ID): tiny-1 in the checkpoint, another in the run" in problem.message


def test_a_checkpoint_that_does_not_say_whose_it_is_is_a_warning(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    mark_complete(step_folder(run_dir, 1), model_fingerprint=model_fingerprint(load_config(file).model.path))
    (problem,) = resume(run_dir, file, "run.seed=3")
    assert (problem.severity, problem.message) == ("warning", UNRECORDED)


def test_the_code_of_a_module_is_compared_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = make_run(tmp_path)
    module = tmp_path / "house_rewards" / "words.py"
    module.parent.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (module.parent / "__init__.py").write_text("raise SystemExit")

    def facts(code: str, name: str) -> dict[str, str]:
        module.write_text(code)
        return reward_facts(load_config(file, [f"reward={{function: '{name}:score'}}"]))

    old, new = facts("a = 1", "house_rewards.words"), facts("a = 2", "house_rewards.words")
    before = old["reward score: code of house_rewards.words"]
    assert f"code of house_rewards.words: {before} in the checkpoint" in reward_warning(old, new)
    assert "reward score: code of house_rewards" in facts("", "house_rewards")
    for absent in ("house_rewards.absent", "absent"):
        assert f"reward score: code of {absent}" not in facts("", absent)


@pytest.mark.parametrize("settings", ["function={code}:Env", "tools=['{code}:f', '{code}:g', '{other}:h']"])
def test_other_code_of_an_environment_than_the_checkpoints_is_a_warning(tmp_path: Path, settings: str) -> None:
    run_dir, file = make_run(tmp_path)
    code, other = tmp_path / "mine.py", tmp_path / "other.py"
    for place in (code, other):
        place.write_text("before")
    given = f"environment.{settings.format(code=code, other=other)}"
    rewards = reward_facts(load_config(file, [given]))
    state = RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="", rewards=rewards)
    state.save(step_folder(run_dir, 1) / "coordinator.json")
    mark(step_folder(run_dir, 1), load_config(file, [given]))
    assert resume(run_dir, file, given) == []
    before = file_digest(code)["xxh3_128"][:12]
    code.write_text("after")
    (problem,) = resume(run_dir, file, given)
    assert (problem.key, problem.severity) == ("--resume", "warning")
    assert problem.message == (
        f"environment: code of {code}: {before} in the checkpoint, {file_digest(code)['xxh3_128'][:12]} in the run: "
        "the scores before and after this resume do not compare"
    )


def resume_with_data(run_dir: Path, file: Path, *changes: str) -> list[ConfigProblem]:
    found = preflight(draft_config(file, list(changes)), redis_url=None, resume=run_dir)
    return [problem for problem in found if problem.key == "--resume"]


def test_everything_that_differs_is_named_in_one_message(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path, iteration=None)
    config = load_config(file)
    codec = TextCodec.from_folders(config.model.path, None)
    train = load_prompts(config.data, "train", codec)
    folder = step_folder(run_dir, 1)
    (folder / "trainer").mkdir(parents=True)
    spec = ModelSpec.from_folder(config.model.path)
    (folder / "trainer" / "meta.json").write_text(json.dumps(identity(config, spec)))
    cursor = DataCursor(train, seed=0, shuffle=True).state()
    order = order_of(config, train.scans, train.formats)
    state = RunState(iteration=1, cursor=cursor, batch_rng={}, model_fingerprint="", order=order)
    state.save(folder / "coordinator.json")
    mark(folder, config)
    changes = ["trainer.tensor_parallel=2", "trainer.pipeline_parallel=3", "model.dtype=bfloat16", "run.seed=5"]
    changes += ["data.shuffle=false"]
    assert list(resume_with_data(run_dir, file)) == []
    (problem,) = resume_with_data(run_dir, file, *changes)
    for part in (
        "model.dtype: float32 in the checkpoint, bfloat16 in the run",
        "run.seed: 0 in the checkpoint, 5 in the run",
        "data.shuffle: True in the checkpoint, False in the run",
    ):
        assert part in problem.message
    assert "_parallel" not in problem.message  # a checkpoint is read at any layout
    assert "may change" in problem.suggestion
    data = config.data.train[0].path
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join([rows[0].replace("1", "2"), *rows[1:]]))
    (problem,) = resume_with_data(run_dir, file)
    assert "data.train: other rows than those of the checkpoint" in problem.message


def test_a_damaged_newest_checkpoint_is_a_warning_and_a_damaged_only_one_an_error(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path, iteration=1)
    newer = step_folder(run_dir, 2)
    newer.mkdir()
    (newer / "coordinator.json").write_text("{}")
    mark_complete(newer)
    (newer / "coordinator.json").write_text("[]")
    (problem,) = resume(run_dir, file)
    assert problem.severity == "warning"
    assert problem.message == (
        "the checkpoint of iteration 2 is damaged (coordinator.json has other bytes than were written): "
        "resuming from iteration 1"
    )
    (step_folder(run_dir, 1) / "complete.json").write_text("")
    (problem,) = resume(run_dir, file)
    assert problem.severity == "error"
    assert "iteration 1 is damaged" in problem.message


def test_a_resume_of_a_run_whose_rewards_read_answers_otherwise_is_warned_of_once(tmp_path: Path) -> None:
    run_dir, file = make_run(tmp_path)
    rewards = ["reward=[{kind: math_verify}, {kind: overlong}]"]
    config = load_config(file, rewards)
    now = reward_facts(config)
    assert "reward overlong: reading of answers" not in now
    old = {key: value for key, value in now.items() if "reading of answers" not in key}
    spec = ModelSpec.from_folder(config.model.path)
    rows = tmp_path / "rows.jsonl"
    texts = ('"prompt": "1", "answer": "4"', '"prompt": "2", "answer": 0.00001', '"prompt": "3", "answer": "(B)"')
    messages = json.dumps(json.dumps([{"role": "user", "content": "5"}]))
    rows.write_text("".join(f"{{{row}}}\n" for row in (*texts, f'"prompt": {messages}, "answer": "5"')))
    sample = AnswerSample()
    sample.add([(row, None) for row in read_rows(rows, RowKeys()) if isinstance(row, Row)])

    def warnings(saved: dict[str, str]) -> list[str]:
        state = RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="", rewards=saved)
        state.save(step_folder(run_dir, 1) / "coordinator.json")
        mark(step_folder(run_dir, 1), config)
        return [problem.message for problem in check_resume(run_dir, config, spec, CheckedData(answers=sample))]

    (warning,) = warnings(old)
    assert "reward math_verify: reading of answers: unset in the checkpoint, marked answers first" in warning
    assert warning.endswith("; rows that were read otherwise: rows.jsonl:2, rows.jsonl:3, rows.jsonl:4")
    assert warnings(now) == []


def test_an_environment_that_cannot_be_loaded_is_no_difference_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a server which is started with the run."""
    monkeypatch.setattr(check_of_environment, "_REACH_S", 0.1)
    run_dir, file = make_run(tmp_path, iteration=None)
    template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
    changes = ["environment.address=127.0.0.1:1", "data.prompt_as=user_message", f"data.chat_template={template!r}"]
    config = load_config(file, changes)
    codec = TextCodec.from_folders(config.model.path, None)
    train = load_prompts(config.data, "train", codec, episodes=EpisodeTools())
    order = order_of(config, train.scans, train.formats)
    cursor = DataCursor(train, seed=0, shuffle=True).state()
    state = RunState(iteration=1, cursor=cursor, batch_rng={}, model_fingerprint="", order=order)
    step_folder(run_dir, 1).mkdir(parents=True)
    state.save(step_folder(run_dir, 1) / "coordinator.json")
    mark(step_folder(run_dir, 1), config)
    assert order.settings["environment.tools"] == "null"
    assert resume_with_data(run_dir, file, *changes) == []
    (problem,) = resume_with_data(run_dir, file, *changes[1:])
    assert "environment.tools: null in the checkpoint, unused in the run" in problem.message
