"""`tandem run` around its launch: what is written before it, and what is said after it whatever else fails."""

from pathlib import Path

import pytest

from coordinator.data import scan_cache as index
from coordinator.data.prompts import load_prompts
from coordinator.data.scan import Scanner
from launcher import commands
from launcher.run import run
from launcher.run.outcome import LaunchOutcome
from launcher.run.run import RunRequest
from launcher.view import summary
from launcher.view.run_view import RunView
from tandem_config.loading import load_config
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.model.fingerprint import model_fingerprint
from tandem_files.run_config import LAUNCHED_CONFIG, NEXT_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import Scale, Wish, write_scale
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import write_config

FAILED = LaunchOutcome(
    code=1, text="failed: the disk is full; resume from iteration 1 with: tandem run --resume runs/tiny"
)


class FakeLaunch:
    """Remembers what it was to launch."""

    def __init__(self, outcome: LaunchOutcome) -> None:
        self.outcome = outcome
        self.requests: list[RunRequest] = []

    def __call__(self, request: RunRequest, view: RunView) -> LaunchOutcome:
        self.requests.append(request)
        return self.outcome


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch(FAILED)
    monkeypatch.setattr(run, "launch", fake)
    return fake


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no font")])
def test_a_picture_that_cannot_be_drawn_does_not_hide_the_outcome(
    tmp_path: Path,
    launch: FakeLaunch,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def fail(run_dir: Path) -> None:
        raise error

    monkeypatch.setattr(summary, "plot_rewards", fail)
    assert commands.run_command(write_config(tmp_path), [], resume=None) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == FAILED.text
    assert str(error) in lines[-2]


def test_the_coordinator_finds_the_rows_that_were_checked(
    tmp_path: Path, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_TICK_S", -60.0)  # the data have just been written
    assert commands.run_command(write_config(tmp_path), [], resume=None) == 1
    config, run_dir = launch.requests[0].config, launch.requests[0].run_dir
    monkeypatch.delattr(Scanner, "scan")
    prompts = load_prompts(config.data, "train", TextCodec.from_folders(config.model.path), run_dir)
    assert prompts.num_prompts > 0


def test_a_folder_that_cannot_be_made_is_not_started(
    tmp_path: Path, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(commands, "write_bytes_atomic", fail)
    assert commands.run_command(write_config(tmp_path), [], resume=None) == 2
    assert "not started: [Errno 28] No space left on device" in capsys.readouterr().err
    assert launch.requests == []


def test_a_new_runs_configuration_is_its_own_at_once_a_resumes_waits(tmp_path: Path, launch: FakeLaunch) -> None:
    file = write_config(tmp_path)
    assert commands.run_command(file, [], resume=None) == 1
    run_dir = tmp_path / "runs" / "tiny"
    before = (run_dir / RESOLVED_CONFIG).read_bytes()
    assert (run_dir / LAUNCHED_CONFIG).read_bytes() == before
    assert not (run_dir / NEXT_CONFIG).exists()
    folder = step_folder(run_dir, 1)
    folder.mkdir(parents=True)
    mark_complete(folder, model_fingerprint=model_fingerprint(load_config(file).model.path))
    assert commands.run_command(None, ["run.iterations=9"], resume=run_dir) == 1
    assert (run_dir / RESOLVED_CONFIG).read_bytes() == before
    for name in (NEXT_CONFIG, LAUNCHED_CONFIG):
        assert load_config(run_dir / name).run.iterations == 9
    assert [request.resume for request in launch.requests] == [False, True]


def test_a_resume_begins_with_as_many_replicas_as_the_run_was_scaled_to(
    tmp_path: Path, launch: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path)
    assert commands.run_command(file, [], resume=None) == 1
    run_dir = tmp_path / "runs" / "tiny"
    folder = step_folder(run_dir, 1)
    folder.mkdir(parents=True)
    mark_complete(folder, model_fingerprint=model_fingerprint(load_config(file).model.path))
    write_scale(run_dir, Scale(replicas=3, configured=1, launch_id="tiny-1"))
    assert commands.run_command(None, [], resume=run_dir) == 1
    assert "3 replicas, as `tandem scale` has asked" in capsys.readouterr().out
    assert commands.run_command(None, ["rollout.replicas=2"], resume=run_dir) == 1
    assert "--set rollout.replicas counts, not the 3 of `tandem scale`" in capsys.readouterr().out
    first, kept, said = launch.requests
    assert [request.config.rollout.replicas for request in launch.requests] == [1, 3, 2]
    assert (first.scale, kept.scale) == (None, Scale(replicas=3, configured=1))
    assert said.scale == Scale(replicas=2, configured=2)
    # Files keep what the user has configured: the scale is a matter of its own.
    assert load_config(run_dir / NEXT_CONFIG).rollout.replicas == 2
    (run_dir / NEXT_CONFIG).unlink()
    assert load_config(run_dir / RESOLVED_CONFIG).rollout.replicas == 1


def test_a_scale_that_the_configuration_forbids_is_not_started(
    tmp_path: Path, launch: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, rollout={"replicas": 2, "min_replicas": 2})
    assert commands.run_command(file, [], resume=None) == 1
    run_dir = tmp_path / "runs" / "tiny"
    write_scale(run_dir, Wish(replicas=1, wish_id="w"))
    assert commands.run_command(None, [], resume=run_dir) == 2
    written = " ".join("".join(capsys.readouterr()).split())
    assert "1 replicas, as `tandem scale` has asked" in written
    assert "rollout.min_replicas = 2 is more than rollout.replicas = 1" in written
    (run_dir / "scale.json").write_text("{")
    assert commands.run_command(None, [], resume=run_dir) == 2
    assert "scale.json cannot be read" in " ".join("".join(capsys.readouterr()).split())
    assert len(launch.requests) == 1
