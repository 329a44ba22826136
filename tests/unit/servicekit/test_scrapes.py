"""A process ends after its last values were scraped, if anything scrapes it."""

import asyncio
import time
import urllib.request

from servicekit import metrics
from servicekit.metrics import Scrapes, serve_metrics

PAUSE_S = 0.2


def scrape(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"tandem_rpc_seconds" in answer.read()


async def scraped_regularly(port: int) -> None:
    for _ in range(2):
        await asyncio.to_thread(scrape, port)
        await asyncio.sleep(PAUSE_S)


async def test_the_end_waits_for_the_next_scrape_of_a_scraper() -> None:
    scrapes = Scrapes()
    port = serve_metrics("127.0.0.1", scrapes=scrapes)
    await scraped_regularly(port)
    waiting = asyncio.create_task(scrapes.last(asyncio.Event()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await asyncio.to_thread(scrape, port)
    assert await waiting


async def test_it_waits_for_no_one_if_nothing_scrapes() -> None:
    scrapes = Scrapes()
    port = serve_metrics("127.0.0.1", scrapes=scrapes)
    assert not await scrapes.last(asyncio.Event())
    await asyncio.to_thread(scrape, port)  # one look is no scraper
    assert scrapes.patience_s() == 0
    assert not await scrapes.last(asyncio.Event())


async def test_a_scraper_that_has_gone_is_waited_for_two_of_its_pauses_at_most() -> None:
    scrapes = Scrapes()
    port = serve_metrics("127.0.0.1", scrapes=scrapes)
    await scraped_regularly(port)
    assert 0 < scrapes.patience_s() <= metrics.LAST_SCRAPE_S
    assert not await scrapes.last(asyncio.Event())
    assert scrapes.patience_s() == 0  # later still: none is to be expected any more


async def test_a_signal_ends_the_wait() -> None:
    scrapes, stop = Scrapes(), asyncio.Event()
    port = serve_metrics("127.0.0.1", scrapes=scrapes)
    await scraped_regularly(port)
    stop.set()
    begun_s = time.monotonic()
    assert not await scrapes.last(stop)
    assert time.monotonic() - begun_s < scrapes.patience_s()
