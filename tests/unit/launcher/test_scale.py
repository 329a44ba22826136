"""`tandem scale`: what is refused and why, what a resume begins with, what the command says while it watches."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.run import scaling
from launcher.run.scaling import at_resume, why_not_configured, why_not_here
from launcher.scale import command
from launcher.scale.command import scale_command
from servicekit.errors import ConfigError, Unavailable
from tandem_config.loading import draft_config, dump_resolved
from tandem_config.schema import RunConfig
from tandem_files.run_folder import (
    LauncherNotes,
    Scale,
    Wish,
    locked,
    note_launch,
    read_scale,
    read_wish,
    scale_of,
    write_notes,
    write_scale,
)
from tests.kit.folders import write_config


def a_run(tmp_path: Path, *, launched: bool = True, **sections: dict[str, Any]) -> Path:
    """The folder of a run that is stopped."""
    config = draft_config(write_config(tmp_path, **sections)).config
    assert config is not None
    run_dir = tmp_path / "runs" / "tiny"
    (run_dir / "logs").mkdir(parents=True)
    for name in ("config.resolved.yaml", "logs/config.yaml"):
        (run_dir / name).write_text(dump_resolved(config))
    if launched:
        note_launch(run_dir, "tiny-1")
    return run_dir


@contextlib.contextmanager
def running(run_dir: Path, **noted: Any) -> Iterator[None]:
    """A launcher has the folder."""
    number = noted.pop("replicas", 1)
    with locked(run_dir):
        write_scale(run_dir, Scale(replicas=number, configured=1, launch_id="tiny-1", **noted))
        write_notes(run_dir, LauncherNotes(pid=1, run_id="tiny-1", coordinator="127.0.0.1:1"))
        yield


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("rollout=x", "'rollout=x' is not rollout=N, with N replicas, at least 1"),
        ("rollout=0", "'rollout=0' is not rollout=N"),
        ("rollout=-1", "'rollout=-1' is not rollout=N"),
        ("rollout=1e9", "'rollout=1e9' is not rollout=N"),
        ("rollout", "'rollout' is not rollout=N"),
        ("redis=2", "'redis=2' is not rollout=N"),
        ("trainer=2", "the trainer's size is part of its run: stop it, and resume it with"),
        ("rollout=999999999", "999999999 replicas are 1000000000 ranks with the trainer's; a weight sync has 65536"),
        ("rollout=1", "1 replicas: rollout.min_replicas = 2 is more than rollout.replicas = 1"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str, why: str
) -> None:
    run_dir = a_run(tmp_path, rollout={"replicas": 2, "min_replicas": 2})
    assert scale_command(run_dir, size, wait=True) == 2
    assert f"not scaled: {why}" in said(capsys)
    assert read_wish(run_dir) is None


def test_replicas_that_evaluate_apart_are_not_taken_away(tmp_path: Path) -> None:
    apart = {"replicas": 2, "concurrent": True}
    kind, grpo = {"kind": "async"}, {"preset": "decoupled", "max_new_tokens": 4}
    run_dir = a_run(tmp_path, rollout={"replicas": 3}, evaluation=apart, schedule=kind, grpo=grpo)
    config = draft_config(run_dir / "config.resolved.yaml").config
    assert config is not None
    assert why_not_configured(config, 3) == ""
    assert "2 replicas: evaluation.replicas = 2 leaves fewer than the 1 of 2 replicas" in why_not_configured(config, 2)


def test_folders_that_are_no_run_of_this_machine_are_refused_with_the_command_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale_command(tmp_path / "none", "rollout=2", wait=True) == 2
    assert "is not a run's folder" in said(capsys)
    composed = a_run(tmp_path / "compose", launched=False, rollout={"replicas": 2})
    (composed / "run.json").write_text(json.dumps({"run_id": "compose"}))
    assert scale_command(composed, "rollout=5", wait=True) == 2
    assert (
        "is not of `tandem run`: with docker compose, `docker compose up --detach --no-deps --scale rollout=3 rollout`"
        in (said(capsys))
    )
    pods = a_run(tmp_path / "pods", launched=False, fleet={"kind": "kubernetes"})
    (pods / "run.json").write_text(json.dumps({"run_id": "mine"}))
    assert scale_command(pods, "rollout=5", wait=True) == 2
    assert "`kubectl scale statefulset/rollout --replicas=5`" in said(capsys)
    (pods / "evaluation.json").write_text("{}")
    assert scale_command(pods, "rollout=5", wait=True) == 2
    assert "is an evaluation's" in said(capsys)


def test_a_finished_run_says_how_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = a_run(tmp_path)
    (run_dir / "state.json").write_text(json.dumps({"status": "finished"}))
    assert scale_command(run_dir, "rollout=4", wait=True) == 2
    assert "--set run.iterations=... --set rollout.replicas=4` continues it" in said(capsys)
    assert read_wish(run_dir) is None


def test_a_folder_of_another_user_and_one_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = a_run(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert scale_command(run_dir, "rollout=4", wait=True) == 2
    assert f"belongs to user id {os.getuid()}, who can scale it" in said(capsys)
    monkeypatch.undo()
    (run_dir / "scale.wish.json").mkdir()
    assert scale_command(run_dir, "rollout=4", wait=True) == 2
    assert "scale.wish.json" in said(capsys)


def test_of_a_run_that_is_stopped_it_is_noted_for_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = a_run(tmp_path)
    assert scale_command(run_dir, "rollout=4", wait=True) == 0
    assert f"it does not run: `tandem run --resume {run_dir}` begins with 4 replicas" in said(capsys)
    wish = read_wish(run_dir)
    assert wish is not None
    assert at_resume(run_dir, 1, []) == (
        Scale(replicas=4, configured=1, wish_id=wish.wish_id),
        "4 replicas, as `tandem scale` has asked",
    )
    # What the user says at the resume counts, and the wish is over.
    scale, line = at_resume(run_dir, 2, ["rollout.replicas=2"])
    assert (scale, line) == (
        Scale(replicas=2, configured=2, wish_id=wish.wish_id),
        "--set rollout.replicas counts, not the 4 of `tandem scale`",
    )


def test_the_scale_that_was_reached_is_kept_unless_the_configuration_has_changed(tmp_path: Path) -> None:
    assert at_resume(tmp_path, 3, []) == (Scale(replicas=3, configured=3), "")
    write_scale(tmp_path, Wish(replicas=4, wish_id="w"))
    write_scale(tmp_path, Scale(replicas=4, configured=1, launch_id="l", wish_id="w"))
    assert at_resume(tmp_path, 1, [])[0] == Scale(replicas=4, configured=1, wish_id="w")
    scale, line = at_resume(tmp_path, 2, [])
    assert (scale.replicas, line) == (2, "rollout.replicas was 1 and is 2, which counts, not the 4 of `tandem scale`")
    assert [scale_of(tmp_path, configured) for configured in (1, 2)] == [4, 2]
    # A wish that was refused is over.
    write_scale(tmp_path, Scale(replicas=1, configured=1, wish_id="w", refused="no"))
    assert at_resume(tmp_path, 1, []) == (Scale(replicas=1, configured=1, wish_id="w"), "")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"replicas": 4}', '{"replicas": 0, "configured": 1}', '{"replicas": "4"}']
)
def test_damaged_notes_are_named_and_change_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "scale.json").write_text(text)
    assert scale_of(tmp_path, 3) == 3
    with pytest.raises(ConfigError, match=r"scale\.json .*: remove it, and scale again"):
        at_resume(tmp_path, 3, [])


def test_a_wish_of_another_user_is_none(tmp_path: Path) -> None:
    write_scale(tmp_path, Wish(replicas=4, wish_id="w"))
    os.chown(tmp_path / "scale.wish.json", os.getuid() + 1, -1)
    with pytest.raises(ConfigError, match="is of another user than the run"):
        read_wish(tmp_path)


class FakeLauncher:
    """Answers each wish, and says who serves: one replica more, or fewer, each time that it is asked."""

    def __init__(self, run_dir: Path, *, refused: str = "", stuck: bool = False) -> None:
        self.run_dir, self.refused, self.stuck = run_dir, refused, stuck
        self.serving, self.asked = 1, 0

    async def status(self, address: str, token: str) -> SimpleNamespace:
        self.asked += 1
        if self.asked == 1:
            raise Unavailable("it starts")
        wish = read_wish(self.run_dir)
        assert wish is not None
        answer = Scale(replicas=wish.replicas, configured=1, launch_id="tiny-1", wish_id=wish.wish_id)
        write_scale(self.run_dir, Scale(**{**vars(answer), "refused": self.refused}))
        if not self.stuck:
            self.serving += (wish.replicas > self.serving) - (wish.replicas < self.serving)
        names = [f"rollout-{index}" for index in range(self.serving)]
        return SimpleNamespace(serving_replicas=names, troubles=["rollout-1 failed: no GPU"] if self.stuck else [])


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "_POLL_S", 0.01)
    monkeypatch.setattr(command, "_ANSWER_S", 0.3)
    return a_run(tmp_path, run={"startup_timeout_s": 1.0})


def test_it_shows_who_serves_until_exactly_so_many_do(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = FakeLauncher(run_dir)
    monkeypatch.setattr(command, "ask_status", launcher.status)
    with running(run_dir):
        assert scale_command(run_dir, "rollout=3", wait=True) == 0
        text = said(capsys)
        assert "serving: rollout-0, rollout-1 serving: rollout-0, rollout-1, rollout-2" in text
        assert "rollout-0, rollout-1, rollout-2 serve, after" in text
        assert scale_command(run_dir, "rollout=1", wait=True) == 0
        assert "serving: rollout-0 rollout-0 serve, after" in said(capsys)


def test_those_that_do_not_serve_in_time_are_named_with_their_logs(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ask_status", FakeLauncher(run_dir, stuck=True).status)
    log = run_dir / "logs" / "rollout-1.log"
    log.write_text('{"level": "error", "message": "service failed", "error": "no GPU"}\n')
    with running(run_dir):
        assert scale_command(run_dir, "rollout=2", wait=True) == 1
        text = said(capsys)
        assert "not so after 1 s (run.startup_timeout_s)" in text
        assert f"rollout-1 does not serve: service failed: no GPU; log: {log}; rollout-1 failed: no GPU" in text
        assert scale_command(run_dir, "rollout=2", wait=False) == 0
        assert "noted: the run gets 2 replicas" in said(capsys)


def test_what_the_launcher_refuses_is_said(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ask_status", FakeLauncher(run_dir, refused="2 replicas need 3 GPUs").status)
    with running(run_dir):
        assert scale_command(run_dir, "rollout=2", wait=False) == 2
    assert "not scaled: 2 replicas need 3 GPUs" in said(capsys)


def test_the_last_wish_counts_and_the_first_command_says_so(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def another(address: str, token: str) -> SimpleNamespace:
        write_scale(run_dir, Wish(replicas=5, wish_id="other"))
        return SimpleNamespace(serving_replicas=[], troubles=[])

    monkeypatch.setattr(command, "ask_status", another)
    with running(run_dir):
        assert scale_command(run_dir, "rollout=2", wait=True) == 1
    assert "another `tandem scale` has asked for 5 replicas, which counts" in said(capsys)


def test_the_end_of_the_run_ends_it_and_the_wish_stays(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(run_dir))

        async def ends(address: str, token: str) -> SimpleNamespace:
            stack.close()
            return SimpleNamespace(serving_replicas=["rollout-0"], troubles=[])

        monkeypatch.setattr(command, "ask_status", ends)
        assert scale_command(run_dir, "rollout=2", wait=True) == 1
    assert "the run has ended; a resume begins with 2 replicas" in said(capsys)
    assert at_resume(run_dir, 1, [])[0].replicas == 2


def test_a_launcher_of_an_older_release_is_named_and_nothing_is_noted(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(run_dir):
        note_launch(run_dir, "tiny-2")  # which did not write scale.json
        assert scale_command(run_dir, "rollout=2", wait=True) == 2
    assert "is run by an older release, which cannot scale: stop it, and resume it with this one" in said(capsys)
    assert read_wish(run_dir) is None
    assert read_scale(run_dir) is not None


class FakeSupervisor:
    def __init__(self, replicas: int) -> None:
        self.names = ["coordinator", *(f"rollout-{index}" for index in range(replicas))]

    def pids(self, name: str) -> list[int]:
        return [os.getpid()]


def test_a_machine_has_limits_of_gpus_or_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = {"replicas": 1, "tensor_parallel": 2}
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout})
    supervisor: Any = FakeSupervisor(1)
    gpus = list("01234")
    assert why_not_here(config, gpus, supervisor, 2) == ""
    assert why_not_here(config, gpus, supervisor, 3) == "3 replicas need 7 GPUs with the trainer's, 5 are there"
    resident = scaling._resident_bytes(os.getpid())
    assert resident > 1 << 20
    monkeypatch.setattr(scaling, "_available_bytes", lambda: int(2.5 * resident))
    assert why_not_here(config, (), supervisor, 3) == ""
    assert "3 more replicas need" in why_not_here(config, (), supervisor, 4)
    assert why_not_here(config, (), FakeSupervisor(4), 3) == ""  # type: ignore[arg-type]
    monkeypatch.undo()
    assert 0 < scaling._available_bytes() < 1 << 50
