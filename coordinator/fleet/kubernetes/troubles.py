"""What is wrong with the cluster now, for `tandem status`, and once each as a warning of the run."""

from collections.abc import Iterable

from coordinator.watch import metrics
from coordinator.watch.events import EventKind, EventLog
from servicekit.logs import get_logger

log = get_logger(__name__)


class Troubles:
    """Troubles by what they are about; a new text is announced, a repeated one is not."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._texts: dict[str, str] = {}

    def note(self, about: str, text: str) -> None:
        """This is wrong from now on; "" for nothing any more."""
        before = self._texts.get(about, "")
        if text:
            self._texts[about] = text
        else:
            self._texts.pop(about, None)
        if text and text != before:
            log.warning("kubernetes trouble", about=about, trouble=text)
            metrics.WARNINGS.labels(kind="kubernetes").inc()
            self._events.append(EventKind.WARNING, text)

    def keep(self, prefix: str, abouts: Iterable[str]) -> None:
        """What begins with `prefix` and is not among these is over."""
        kept = set(abouts)
        self._texts = {a: text for a, text in self._texts.items() if not a.startswith(prefix) or a in kept}

    def all(self) -> list[str]:
        """In words, in the order in which they came."""
        return list(self._texts.values())
