"""The troubles of the cluster, for `tandem status` and, once each, as warnings of the run."""

from collections.abc import Iterable

from coordinator.watch import metrics
from coordinator.watch.events import EventKind, EventLog
from servicekit.logs import get_logger

log = get_logger(__name__)


class Troubles:
    """Troubles by subject; a new text is a warning, a repeated one is not."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._texts: dict[str, str] = {}

    def note(self, about: str, text: str) -> None:
        """Set the trouble of a subject; "": it is over."""
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
        """End the troubles whose subject begins with `prefix` and is not in `abouts`."""
        kept = set(abouts)
        self._texts = {a: text for a, text in self._texts.items() if not a.startswith(prefix) or a in kept}

    def all(self) -> list[str]:
        """List all troubles, in the order in which they came."""
        return list(self._texts.values())
