"""Draws what `tandem simulate` found: a time line of each schedule's first iterations, and bars of idle shares."""

from collections.abc import Iterator, Sequence

from launcher.simulate.world import BEATS, Figures

# From nothing to everything; the second one where a terminal or a file takes ASCII only.
_LEVELS, _ASCII_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"
_BAR, _WIDEST = 20, 120
_SIDES = ("trainer", "slots")


def plot(figures: Sequence[Figures], width: int, *, ascii_only: bool) -> Iterator[str]:
    """Yield lines of at most `width` characters, as far as the names of the schedules allow.

    Args:
        width: of the terminal, in characters; at least 40 are used, and at most 120.
    """
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    room = min(max(width, 40), _WIDEST) - len("  trainer ||")
    step = -(-BEATS // room)
    columns = BEATS // step
    span = f"{columns * step * figures[0].beat_s:.4g} s"
    yield ""
    yield f"busy, from 0 to {span}, one character is {step * figures[0].beat_s:.3g} s"
    for one in figures:
        yield one.schedule
        for name, shares in zip(_SIDES, (one.trainer_busy, one.slots_busy), strict=True):
            whole = range(0, len(shares) - step + 1, step)
            drawn = "".join(_level(sum(shares[begin : begin + step]) / step, levels) for begin in whole)
            yield f"  {name:7} |{drawn:{columns}}|"
    yield ""
    wide = max(len(one.schedule) for one in figures)
    yield f"{'idle':{wide}}  {_SIDES[0]:{_BAR + 5}}  {_SIDES[1]}"
    for one in figures:
        shares = (one.trainer_idle, one.slots_idle)
        bars = (f"{abs(share):.2f} {levels[-1] * round(share * _BAR):{_BAR}}" for share in shares)
        yield f"{one.schedule:{wide}}  {'  '.join(bars)}".rstrip()


def _level(share: float, levels: str) -> str:
    """Return a character; what is a little busy is never drawn as nothing."""
    place = round(share * (len(levels) - 1))
    return levels[min(max(place, int(share > 0.01)), len(levels) - 1)]
