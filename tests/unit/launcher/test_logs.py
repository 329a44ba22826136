"""`tandem logs`: records, tracebacks and foreign lines of several logs, by time; what a run is asked to show."""

import json
import time
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launcher.view.logs.lines import Entry, parse
from launcher.view.logs.show import WantedLines, logs_command, show, time_of
from servicekit.errors import ConfigError

TRACE = "Traceback (most recent call last):\n  File x\nOSError: no"


def record(second: int, message: str, level: str = "info", **fields: object) -> str:
    clock = datetime(2026, 5, 1, 12, 0, second, tzinfo=UTC).isoformat()
    return json.dumps({"time": clock, "level": level, "message": message, "service": "s", "run": "r", **fields})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "coordinator.log").write_text(
        f"{record(1, 'serving', iteration=3, share=0.123456789)}\n{record(4, 'run failed', 'error', exception=TRACE)}\n"
    )
    (tmp_path / "logs" / "rollout-0.log").write_text(
        f"[2026-05-01 12:00:02] Cuda graph is disabled\nTraceback (most recent call last):\n  File y\nValueError: bad\n"
        f"plain\n{record(5, 'Warning: old', 'warning', logger='py.warnings')}\n"
    )
    (tmp_path / "logs" / "redis.log").write_text("77:M 01 May 2026 12:00:03.500 * ready\n")
    return tmp_path


def printed(run: Path, wanted: WantedLines) -> str:
    out = StringIO()
    show(run, Console(file=out, width=200, soft_wrap=True), wanted)
    return out.getvalue()


def test_lines_of_all_services_are_in_the_order_of_their_times(run: Path) -> None:
    assert printed(run, WantedLines()).splitlines() == [
        "05-01 12:00:01.000  coordinator  info     serving  iteration=3  share=0.123457",
        "05-01 12:00:02.000  rollout-0    error    Cuda graph is disabled",
        "    Traceback (most recent call last):",
        "      File y",
        "    ValueError: bad",
        "05-01 12:00:02.000  rollout-0    info     plain",
        "05-01 12:00:03.500  redis        info     ready",
        "05-01 12:00:04.000  coordinator  error    run failed",
        "    Traceback (most recent call last):",
        "      File x",
        "    OSError: no",
        "05-01 12:00:05.000  rollout-0    info     Warning: old",
    ]


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (WantedLines(services=["rollout"], level="error"), ["Cuda graph is disabled"]),
        (WantedLines(services=["coordinator", "redis"]), ["serving", "ready", "run failed"]),
        (WantedLines(since_s=datetime(2026, 5, 1, 12, 0, 4, tzinfo=UTC).timestamp()), ["run failed", "old"]),
        (WantedLines(newest=1), ["old"]),
    ],
)
def test_what_is_asked_for_is_shown(run: Path, wanted: WantedLines, texts: list[str]) -> None:
    lines = [line for line in printed(run, wanted).splitlines() if not line.startswith("    ")]
    assert [text for line, text in zip(lines, texts, strict=True) if text in line] == texts


def test_what_is_added_is_followed_until_the_run_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.view.logs.show.FOLLOW_S", 0.0)
    log, out = run / "logs" / "trainer-0.log", StringIO()
    one, two = record(21, "step 1"), record(22, "step 2")
    # As the looks find it: a line is shown when it is complete.
    writes = [one[:30], one[30:] + "\n" + two + "\n"]
    log.touch()

    def is_running() -> bool:
        with log.open("a") as file:
            file.write(writes.pop(0))
        return bool(writes)

    show(run, Console(file=out, width=200), WantedLines(services=["trainer"]), is_running)
    assert [line.rpartition("  ")[2] for line in out.getvalue().splitlines()] == ["step 1", "step 2"]


def test_progress_bars_and_colours_leave_their_last_text() -> None:
    assert list(parse("a", ["10%\r\x1b[32m100%\x1b[0m\n", "{broken\n", "\n"], 5.0)) == [
        Entry(time_s=5.0, service="a", level="info", text="100%"),
        Entry(time_s=5.0, service="a", level="info", text="{broken"),
    ]


@pytest.mark.parametrize(
    ("said", "level", "text"),
    [
        (
            "# WARNING Memory overcommit must be enabled! Without it, a background save may fail",
            "info",
            "not needed here, this Redis saves nothing: Memory overcommit must be enabled! Without it",
        ),
        ("# WARNING: The TCP backlog setting of 511 cannot be enforced", "info", "not needed here, this Redis saves"),
        ("# WARNING Your system is configured to use the 'xen' clocksource", "warning", "WARNING Your system is"),
        ("# User requested shutdown...", "info", "User requested shutdown..."),
    ],
)
def test_advice_of_redis_that_the_run_does_not_need_is_no_warning(said: str, level: str, text: str) -> None:
    (entry,) = parse("redis", [f"77:M 01 May 2026 12:00:03.500 {said}\n"])
    assert (entry.level, entry.text[: len(text)]) == (level, text)


@pytest.mark.parametrize(("text", "second"), [("2m", 880), ("1h", -2600), ("90s", 910)])
def test_since_is_a_time_ago(text: str, second: float) -> None:
    assert time_of(text, 1000.0) == second


def test_since_is_a_local_time(run: Path) -> None:
    now_s = datetime(2026, 5, 1, 13, 0, tzinfo=UTC).timestamp()
    assert time_of("12:30", now_s) == time_of("2026-05-01 12:30", now_s) == now_s - 1800
    with pytest.raises(ConfigError, match="--since soon: give a time ago"):
        time_of("soon", now_s)


def test_a_service_without_a_log_and_a_folder_without_logs_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"level": "info", "since": "", "newest": None, "follow": False}
    assert logs_command(run, ["rolout"], **options) == 2  # type: ignore[arg-type]
    assert "no log of 'rolout'" in (error := capsys.readouterr().err)
    assert "coordinator, redis, rollout-0" in error
    assert logs_command(tmp_path / "logs", [], **options) == 2  # type: ignore[arg-type]
    assert "has no logs/*.log" in capsys.readouterr().err
