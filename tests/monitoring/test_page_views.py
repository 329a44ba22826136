"""What the page shows of a run's folder, in a real browser: on phones, compared, under the pointer, at the start."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.leader_lease import LeaderCheck
from coordinator.watch.life import Life
from coordinator.web.server import DATA, PageServer
from launcher.view.cli import open_page
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import TextSpan
from tests.fakes.sole_lead import SoleLead
from tests.kit.folders import stored, write_samples
from tests.monitoring.browser import Browser, browser
from tests.monitoring.test_page_text import EMPTY

pytestmark = [pytest.mark.integration]

LONG = "w" * 300
TWO_VERSIONS = (TextSpan(end=1, text_end=4, policy_version=3), TextSpan(end=9, text_end=99, policy_version=4))


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.resolved.yaml").write_text("run: {iterations: 9}")
    state = {"iteration": 4, "status": "finished", "initial_accuracy": 0.7, "policy_version": 4, "wall_s": 9.0}
    (folder / "state.json").write_text(json.dumps(state))
    rows = [
        {"iteration": i, "reward_mean": [0.2, 0.4, 0.3, 0.8][i - 1], "grad_norm": 1.9e-6, "iteration_s": 2.0}
        for i in range(1, 5)
    ]
    rows[-1] |= {"heldout_accuracy": 0.6, "generate_s": 1.5}
    rows[-1] |= {"train_s": 0.4, "train_forward_backward_s": 0.3, "train_pack_s": 0.06}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    life = Life(folder)
    life.load(LeaderCheck(lease=SoleLead(), patience_s=0.0))
    life.note("replica lost", "out of memory", who="rollout-1", tokens=345, since_s=time.time() - 12.0)
    life.note("replica back", "a new process", who="rollout-1")
    samples = SampleFolder(folder)
    for number, text in ((1, "the sum is 3"), (4, "the right sum is 4")):
        write_samples(
            samples,
            number,
            "train",
            [
                stored(0, 0, iteration=number, completion=text, reward=number / 4, reward_parts={"math": 1.0}),
                stored(
                    0,
                    1,
                    completion="one two",
                    reward=0.1,
                    version_spans=TWO_VERSIONS,
                    use="masked",
                    finish_reason="length",
                ),
                stored(1, 0, completion=LONG, use="dropped", group_id=f"i1.g1.{LONG}"),
            ],
        )
    server = open_page(folder, 0, "secret")
    yield f"http://127.0.0.1:{server.port}/"
    server.close()


@pytest.mark.parametrize("width", [360, 390, 1440])
def test_no_view_is_wider_than_its_screen(page: Browser, url: str, width: int) -> None:
    wide = "document.documentElement.scrollWidth - innerWidth"
    page.open(f"{url}#key=secret", width=width, ready="document.querySelectorAll('.curve').length === 4")
    assert page.eval(wide) <= 0
    page.open(f"{url}#view=samples", width=width, ready="document.querySelectorAll('.card').length === 3")
    assert page.eval(wide) <= 0
    assert page.eval("location.hash") == "#view=samples"
    assert page.logged == []


def test_the_life_of_the_run_is_shown_with_reasons_and_costs(page: Browser, url: str) -> None:
    page.open(f"{url}#key=secret", ready="document.querySelectorAll('#life li').length === 2")
    newest, oldest = page.eval("[...document.querySelectorAll('#life li')].map(one => one.textContent)")
    assert "rollout-1 back: a new process (12" in newest
    assert oldest.endswith("rollout-1 lost: out of memory (345 tokens)")
    totals = page.eval("document.querySelector('#life-totals').textContent")
    assert totals.startswith("replica lost 1× (345 tokens) · replica back 1× (")
    assert page.logged == []


OVERVIEW = {
    **EMPTY,
    "state": "running",
    "tiles": [{"title": "held-out reward", "value": -0.25, "start": -0.75, "help": "of the last evaluation"}],
    "curves": [
        {"field": f"f{i}", "title": "Memory", "unit": "MiB", "points": [[1, -6.0], [2, -5.2]], "start": None}
        for i in range(24)
    ],
    "syncs": [{"policy_version": 1, "error": "", "stages": {"transfer": 1.0}, "total_s": 1.0}],
}


@pytest.mark.parametrize(("width", "curves_last"), [(390, True), (360, True), (1440, False)])
def test_on_a_phone_the_fleet_comes_before_the_curves(page: Browser, width: int, curves_last: bool) -> None:
    server = PageServer("127.0.0.1", 0, {DATA: lambda query: OVERVIEW})
    try:
        page.open(f"http://127.0.0.1:{server.port}/", width=width, ready="document.querySelectorAll('.curve').length")
        tops = {
            name: page.eval(f"document.getElementById('{name}').getBoundingClientRect().top")
            for name in ("progress", "alerts", "fleet-section", "syncs-section", "messages-section", "curves-section")
        }
        wide = page.eval("document.documentElement.scrollWidth - innerWidth")
        texts = page.eval("document.querySelector('figure').textContent")
        tiles = page.eval("document.querySelector('#tiles').textContent")
    finally:
        server.close()
    order = sorted(tops, key=lambda name: tops[name])
    assert order[:2] == ["progress", "alerts"]
    assert (order[-1] == "curves-section") == curves_last
    assert sorted(order[2:5] if curves_last else order[3:]) == ["fleet-section", "messages-section", "syncs-section"]
    assert wide <= 0
    assert "Memory, MiB" in texts
    assert [tick in texts for tick in ("-6.0", "-5.0")] == [True, True]  # an axis of what was measured, not from 0
    assert "-0.750 → -0.250held-out reward" in tiles


def test_green_is_said_of_no_completion(page: Browser, url: str) -> None:
    """Trained on says nothing of right or wrong."""
    page.open(f"{url}#view=samples&key=secret&iteration=4", ready="document.querySelectorAll('.card').length === 3")
    edge = "one => getComputedStyle(one).borderLeftColor"
    found = page.eval(f"[...document.querySelectorAll('.card')].map({edge})")
    good = page.eval(
        "(one => { one.style.color = 'var(--good)'; document.body.append(one); "
        "return getComputedStyle(one).color; })(document.createElement('i'))"
    )
    assert len(found) == 3
    assert good not in found


def test_a_number_is_not_broken_and_the_baseline_is_drawn(page: Browser, url: str) -> None:
    page.open(url, ready="document.querySelector('.baseline')")
    captions = page.eval("[...document.querySelectorAll('figcaption')].map(each => each.textContent)")
    assert {"Held-out accuracy0.600", "Gradient norm1.9e-6"} <= set(captions)
    assert page.eval("getComputedStyle(document.querySelector('figcaption b')).whiteSpace") == "nowrap"
    assert "0.700 before the training (dashed)" in page.eval("document.getElementById('curves').textContent")
    assert page.eval("document.querySelector('#tiles').textContent").count("0.700 → 0.600") == 1
    ticks = page.eval("[...document.querySelector('svg.plot').querySelectorAll('.tick')].map(one => one.textContent)")
    assert ticks == ["0.2", "0.4", "0.6", "0.8", "1", "2", "3", "4"]


def test_the_pointer_shows_all_curves_at_its_iteration(page: Browser, url: str) -> None:
    page.open(url, ready="document.querySelector('.baseline')")
    plot = "document.querySelector('svg.plot')"
    edge = page.eval(f"{plot}.getBoundingClientRect().left")
    page.eval(f"{plot}.dispatchEvent(new PointerEvent('pointermove', {{clientX: {edge + 46}}}))")
    values = page.eval("[...document.querySelectorAll('figcaption b')].map(each => each.textContent)")
    assert values[0] == "0.200 at 1"
    page.eval(f"{plot}.dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.eval("document.querySelector('figcaption b').textContent") == "0.800"


def test_smoothing_keeps_the_raw_curve_beside_the_smooth_one(page: Browser, url: str) -> None:
    page.open(url, ready="document.querySelector('.baseline')")
    page.eval(
        "(each => { each.value = 0.5; each.dispatchEvent(new Event('input')); })(document.getElementById('smoothing'))"
    )
    assert page.eval("document.querySelectorAll('.raw').length") == 4
    smooth = page.eval("import('./curves.js').then(one => one.smooth([[1, 2], [2, 4]], 0.5))")
    assert smooth == [[1, 2], [2, pytest.approx((0.5 * 2 + 4) / 1.5)]]


def test_a_train_step_is_divided_into_its_parts(page: Browser, url: str) -> None:
    page.open(url, ready="document.querySelector('#train-steps rect')")
    titles = page.eval("[...document.querySelectorAll('#train-steps title')].map(each => each.textContent)")
    assert titles == ["forward_backward: 300 ms", "pack: 60 ms", "other: 40 ms"]
    legend = page.eval("[...document.querySelectorAll('#step-parts span')].map(each => each.textContent)")
    assert legend == ["forward_backward 75 %", "pack 15 %", "other 10 %"]


def lane(name: str, *marks: list[Any], bands: Sequence[list[Any]] = ()) -> dict[str, Any]:
    return {"name": name, "bands": list(bands) or [[-40.0, 7, True, 50.0], [50.0, 8, True, None]], "marks": list(marks)}


TIMELINE = {
    "begin_s": 1_700_000_000.0,
    "length_s": 100.0,
    "parts": [["generate", 0.0, 30.0], ["train", 30.0, 48.0], ["sync", 48.0, 50.0], ["generate", 50.0, 100.0]],
    "iterations": [[7, 0.0, 50.0], [None, 50.0, None]],
    "lanes": [
        lane("rollout-0", [48.0, 50.0, "committed", 8]),
        lane("rollout-1", [48.0, 50.0, "left out", 8], bands=[[-40.0, 7, True, 50.0], [50.0, 7, False, None]]),
        lane("rollout-2", [10.0, 11.5, "aborted", 8], [20.0, 20.0, "left", 0], bands=[[-1.7e9, 7, True, 20.0]]),
        *(lane(f"a-very-long-prefix-rollout-{number}") for number in range(3, 16)),
    ],
    "not_shown": 48,
}


@pytest.mark.parametrize("width", [360, 1440])
def test_the_time_line_shows_what_each_side_did(page: Browser, width: int) -> None:
    iteration = {"iteration": 7, "total_s": 50.0, "parts": {"train": 18.0}}
    run = {**OVERVIEW, "timeline": TIMELINE, "iterations": [iteration]}
    server = PageServer("127.0.0.1", 0, {DATA: lambda query: run})
    try:
        page.open(f"http://127.0.0.1:{server.port}/", width=width, ready="document.querySelector('#timeline rect')")
        titles = page.eval("[...document.querySelectorAll('#timeline title')].map(one => one.textContent)")
        texts = page.eval("[...document.querySelectorAll('#timeline text')].map(one => one.firstChild.textContent)")
        boxes = page.eval(
            "[...document.querySelectorAll('#timeline rect')].map(one => [one.getAttribute('class'), "
            "...['x', 'y', 'width', 'height'].map(name => Number(one.getAttribute(name)))])"
        )
        inside = page.eval(
            "[...document.querySelectorAll('#timeline text')]"
            ".every(one => one.getBoundingClientRect().right <= innerWidth)"
        )
        legend = page.eval("[...document.querySelectorAll('#timeline-legend span')].map(one => one.textContent)")
        assert page.eval("document.documentElement.scrollWidth - innerWidth") <= 0
        note = page.eval("document.getElementById('timeline-note').textContent")
        colours = page.eval("[...document.querySelectorAll('#parts i')].map(one => one.className)")
        assert page.logged == []
    finally:
        server.close()
    assert legend == ["generate", "train", "sync", "failed round", "left out of a round", "low: the trainer waits"]
    assert note == "48 more replicas are not shown; those with any trouble come first."
    assert colours == ["c1"], "a part has the same colour in the bars"
    assert "7" in texts
    assert "…ix-rollout-15" in texts
    assert inside
    waits, trains, sends, _, first = boxes[:5]
    assert [box[0] for box in boxes[:4]] == ["c0", "c1", "c3", "c0"]
    assert trains[4] == sends[4] > 1.5 * waits[4]
    assert trains[3] / waits[3] == pytest.approx(18 / 30, rel=1e-3)
    assert waits[1] + waits[3] == pytest.approx(trains[1])
    assert first[1] == waits[1], "what began before is cut"
    starts = [re.sub(r"\d+:\d+:\d+( [AP]M)?", "TIME", title) for title in titles]
    for title in (
        "train: 18.0 s from TIME on",
        "rollout-0: version 8 since TIME",
        "rollout-0 got version 8 at TIME, 2.0 s",
        "rollout-1: version 7 since TIME, without work",
        "rollout-1 left out of the round of version 8 at TIME, 2.0 s",
        "rollout-2: version 7 for long",
        "rollout-2 round given up, of version 8 at TIME, 1.5 s",
        "rollout-2 left at TIME",
    ):
        assert title in starts, title
    assert ("none" in texts, "v8" in texts) == (True, True)
    assert any(re.match("v7 since ", one) for one in texts) == (width > 500)


def test_a_folder_says_what_it_does_not_know_of_the_times(page: Browser, url: str) -> None:
    page.open(url, ready="!document.getElementById('timeline-section').hidden")
    assert page.eval("document.getElementById('timeline-note').innerText").startswith("Not known from a run's folder")
    assert page.eval("document.querySelectorAll('#timeline *').length") == 0
    assert page.logged == []


def test_samples_show_their_mask_their_versions_and_what_has_changed(page: Browser, url: str) -> None:
    # Groups are compared one by one, in the order in which their answers come.
    compared = "[...document.querySelectorAll('.group header')].every(x => !x.textContent.includes('looking for'))"
    ready = f"document.querySelector('ins') && {compared}"
    page.open(f"{url}#view=samples&key=secret&sort=best&compare=earlier", ready=ready)
    assert page.eval("[...document.querySelectorAll('ins')].map(each => each.textContent).join(' ')").split() == [
        "right",
        "4",
    ]
    assert page.eval("document.querySelector('del').textContent") == "3"
    assert "compared with iteration 1" in page.eval("document.querySelector('.group header').textContent")
    shown = "!document.querySelector('ins') && document.querySelector('.card.masked .version')"
    page.open(f"{url}#view=samples&iteration=1", ready=shown)
    masked = "document.querySelector('.card.masked')"
    assert page.eval(f"[...{masked}.querySelectorAll('.version')].map(each => each.textContent)") == ["one ", "two"]
    assert "version 3, 4" in page.eval(f"{masked}.textContent")
    assert page.eval("document.querySelectorAll('.card.dropped').length") == 1


def test_samples_without_the_key_say_what_is_missing(url: str) -> None:
    with browser() as page:
        page.open(f"{url}#view=samples", ready="document.getElementById('problem').textContent !== ''")
        assert "the key that is in the page's whole address" in page.eval(
            "document.getElementById('problem').textContent"
        )
        assert page.eval("document.querySelectorAll('.card').length") == 0


@pytest.mark.parametrize(
    ("before", "after", "runs"),
    [
        ("a b c", "a b c", [["same", "a b c"]]),
        ("a b c", "a x c", [["same", "a "], ["removed", "b"], ["added", "x"], ["same", " c"]]),
        ("", "new", [["added", "new"]]),
        ("gone now", "", [["removed", "gone now"]]),
        ("a a a b", "a a b", [["same", "a a "], ["removed", "a "], ["same", "b"]]),
    ],
)
def test_the_words_that_differ(page: Browser, url: str, before: str, after: str, runs: list[list[str]]) -> None:
    page.open(url, ready="document.querySelector('.baseline')")
    texts = f"{json.dumps(before)}, {json.dumps(after)}"
    found = page.eval(f"import('./diff.js').then(one => one.diffWords({texts}).map(run => [run.kind, run.text]))")
    assert found == runs


def test_texts_that_have_little_in_common_are_compared_in_bounded_time(page: Browser, url: str) -> None:
    page.open(url, ready="document.querySelector('.baseline')")
    words = "Array.from({length: 1e5}, (_, k) => k * {}).join(' ')"
    both = f"{words.replace('{}', '2')}, {words.replace('{}', '3')}"
    kinds = page.eval(f"import('./diff.js').then(one => one.diffWords({both}).map(run => run.kind))")
    assert kinds[-2:] == ["removed", "added"]


def test_a_run_that_starts_names_what_it_waits_for(page: Browser, tmp_path: Path) -> None:
    start = {**EMPTY, "state": "starting", "awaited": ["trainer", "rollout-1"], "arrived": {"rollout-0": 12.3}}
    server = PageServer("127.0.0.1", 0, {DATA: lambda query: start})
    try:
        page.open(f"http://127.0.0.1:{server.port}/", ready="!document.getElementById('start').hidden")
        assert page.eval("document.getElementById('start').innerText").split("\n\n") == [
            "Waiting for trainer, rollout-1: engines take a minute or more to load.",
            "rollout-0 is up after 12.3 s",
        ]
    finally:
        server.close()
