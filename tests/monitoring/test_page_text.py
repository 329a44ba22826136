"""What a run says of itself and what its policy wrote is text on the page, whatever it looks like: in a browser."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.web.samples import SamplePages
from coordinator.web.server import DATA, EARLIER, SAMPLES, PageServer
from tandem_files.samples.folder import SampleFolder
from tests.kit.folders import stored, write_samples
from tests.monitoring.browser import Browser, browser

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
    "left_s": None,
    "initial_accuracy": None,
    "awaited": [NASTY],
    "arrived": {NASTY: 1.0},
    "iterations": [{"iteration": 1, "total_s": 1.0, "parts": {NASTY: 1.0}}],
    "train_steps": [{"iteration": 1, "total_s": 1.0, "parts": {NASTY: 1.0}}],
    "tiles": [{"title": NASTY, "value": None, "start": None, "help": NASTY}],
    "best_accuracy": None,
    "curves": [{"field": "reward_mean", "title": NASTY, "unit": NASTY, "points": [], "start": None}],
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
    "timeline": {
        "begin_s": 1.0,
        "length_s": 9.0,
        "parts": [["generate", 0.0, 9.0]],
        "iterations": [[None, 0.0, None]],
        "lanes": [{"name": NASTY, "bands": [[0.0, 1, True, None]], "marks": [[0.0, 1.0, "committed", 1]]}],
        "not_shown": 0,
    },
    "life": [[1.0, NASTY, "replica lost", NASTY, 1.0, 5]],
    "life_totals": {NASTY: [1, 2.0, 3]},
    "alerts": [{"name": "", "text": NASTY}],
    "messages": [{"time_s": 1.0, "kind": "warning", "text": NASTY}],
}


@pytest.mark.integration
def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    hostile: dict[str, Any] = {
        "prompt": NASTY,
        "completion": NASTY,
        "answer": NASTY,
        "group_id": NASTY,
        "source": NASTY,
        "use": NASTY,
    }
    for iteration in (1, 2):
        write_samples(folder, iteration, "train", [stored(iteration=iteration, reward_parts={NASTY: 1.0}, **hostile)])
    samples = SamplePages(folder)
    answers = {DATA: lambda query: EMPTY, SAMPLES: samples.groups, EARLIER: samples.earlier}
    server = PageServer("127.0.0.1", 0, answers)
    try:
        with browser() as page:
            page.open(f"http://127.0.0.1:{server.port}/", ready="document.querySelector('#replicas td')")
            check(page, texts=12)
            page.open(
                f"http://127.0.0.1:{server.port}/#view=samples&compare=earlier&search=%3Cimg%3E%7C.",
                ready="document.querySelector('.card pre span')?.textContent.includes('<img')",
            )
            check(page, texts=12)
    finally:
        server.close()


def check(page: Browser, *, texts: int) -> None:
    document = page.eval("document.documentElement.outerHTML")
    assert page.logged == []
    assert "<img" not in document
    assert document.count("<script") == 1
    assert document.count("&lt;img src=x") >= texts
    assert page.eval("document.title") != "taken"
