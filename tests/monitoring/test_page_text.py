"""What a run says of itself is text on the page, whatever it looks like: in a real browser, with hostile names."""

import asyncio

import pytest

from coordinator.web.server import PageServer
from tests.monitoring.test_page import render
from tests.monitoring.tools import tool

NASTY = "</script><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
EMPTY = {
    "now_s": 10.0,
    "run": NASTY,
    "state": "failed",
    "error": NASTY,
    "part": NASTY,
    "part_since_s": 9.0,
    "iteration": 0,
    "total_iterations": 3,
    "policy_version": 0,
    "worked_s": 0.0,
    "current": dict.fromkeys(("reward_mean", "heldout_accuracy", "tokens_per_s", "sync_s", "iteration_s")),
    "best_accuracy": None,
    "curves": [{"field": "reward_mean", "title": NASTY, "unit": NASTY, "points": []}],
    "replicas": [
        {
            "name": NASTY,
            "there": True,
            "serving": False,
            "starts": 1,
            "policy_version": None,
            "sync_s": None,
            "outcome": NASTY,
        }
    ],
    "syncs": [{"policy_version": 1, "error": NASTY, "stages": {NASTY: 1.0}, "total_s": 0.0}],
    "alerts": [{"name": "", "text": NASTY}],
    "messages": [{"time_s": 1.0, "kind": "warning", "text": NASTY}],
}


@pytest.mark.integration
async def test_hostile_text_stays_text() -> None:
    tool("chromium")
    server = PageServer("127.0.0.1", 0, lambda: EMPTY)
    try:
        document, logged = await asyncio.to_thread(render, f"http://127.0.0.1:{server.port}/")
    finally:
        await asyncio.to_thread(server.close)
    assert logged == ""
    assert "<img" not in document
    assert document.count("<script") == 1
    assert document.count("&lt;img src=x") >= 8
    assert "<title>taken</title>" not in document
