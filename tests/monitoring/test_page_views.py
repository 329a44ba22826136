"""What the page shows of a run's folder, in a real browser: on phones, compared, under the pointer, at the start."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.web.server import DATA, PageServer
from launcher.view.cli import open_page
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import TextSpan
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
