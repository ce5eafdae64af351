"""`ragkv top`: ratios, times and rates of a service in a terminal, of the last minute and since its start.

It is computed from /metrics, as Grafana does: ratios of differences of sums, and quantiles from histogram buckets.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import out, printable, settings_from
from ragkv.errors import Refused, ServiceError

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console, RenderableType

    from ragkv.client import Client
    from ragkv.metrics.prometheus import ScrapedMetrics
    from ragkv.metrics.sums import MetricSums

SPAN = 60.0
"""Length of the recent span, seconds."""
_SECONDS = 10.0
"""Timeout of a request to the service."""


@dataclass(frozen=True)
class TopSpan:
    """Sums of a span of seconds."""

    sums: MetricSums
    seconds: float


class TopRecord:
    """Scraped metrics as far back as SPAN. A restart of the service clears it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, ScrapedMetrics]] = deque()

    def add(self, when: float, seen: ScrapedMetrics) -> None:
        """Add scraped metrics. when: on the monotonic clock."""
        if self._seen and seen.started != self.latest.started:
            self._seen.clear()
        self._seen.append((when, seen))
        while len(self._seen) > 2 and when - self._seen[1][0] >= SPAN:
            self._seen.popleft()

    @property
    def latest(self) -> ScrapedMetrics:
        """The latest metrics."""
        return self._seen[-1][1]

    def lately(self) -> TopSpan | None:
        """The last SPAN, or as much of it as was seen; None before the second scrape."""
        (then, earlier), (now, latest) = self._seen[0], self._seen[-1]
        return TopSpan(latest.sums.since(earlier.sums), now - then) if now > then else None

    def ever(self, now: float) -> TopSpan:
        """The span since the start of the service. now: Unix seconds."""
        return TopSpan(self.latest.sums, max(0.0, now - self.latest.started))


def top(
    url: Annotated[
        str | None, typer.Option(help="Address of the service (RAGKV_URL, else the port of the settings on 127.0.0.1).")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="API key. Others may see a command line: better set RAGKV_KEY.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between updates.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once and exit; the default if stdout is not a terminal.")
    ] = False,
) -> int:
    """Watch a service: times to the first token, what was saved, ratios, rates, and what waits. Ctrl-C ends it."""
    settings = settings_from(url=url, key=key)
    from ragkv.client import Client

    address = settings.url or f"http://127.0.0.1:{settings.port}"
    with Client(address, settings.key.get_secret_value(), timeout=_SECONDS) as client:
        record = TopRecord()
        record.add(time.monotonic(), scrape(client))
        console = out()
        if once or not console.is_terminal:
            console.print(frame(record, client.url, ""))
        else:
            _refresh(client, record, interval, console)
    return 0


def scrape(client: Client) -> ScrapedMetrics:
    """Scrape the metrics. Raises Refused and Unreachable with messages for the user at the terminal."""
    from ragkv.metrics.prometheus import parse_metrics

    try:
        return parse_metrics(client.metrics())
    except ValueError as error:
        words = f"what {client.url}/metrics says is not what a ragkv like this one says ({error})"
        raise Refused(502, "strange", words) from None
    except Refused as error:
        words = {
            "no_api_key": f"the service at {client.url} wants an API key: set RAGKV_KEY, or give --key",
            "invalid_api_key": f"the service at {client.url} does not know this API key (RAGKV_KEY, --key)",
            "not_found": f"there are no metrics at {client.url}: look at --url",
        }.get(error.code, str(error))
        raise Refused(error.status, error.code, words) from None


def _refresh(client: Client, record: TopRecord, interval: float, console: Console) -> None:
    """Refresh until Ctrl-C. If the service goes away, keep the last figures and wait for it."""
    from rich.live import Live

    fault = ""
    try:
        with _Interrupts() as interrupts, Live(console=console, screen=True, auto_refresh=False) as live:
            while not interrupts.seen:
                live.update(frame(record, client.url, fault), refresh=True)
                time.sleep(interval)
                try:
                    record.add(time.monotonic(), scrape(client))
                    fault = ""
                except ServiceError as error:
                    fault = str(error)
    except KeyboardInterrupt:
        return


class _Interrupts:
    """Whether Ctrl-C was pressed. Python drops a KeyboardInterrupt that is raised in a finalizer or a callback."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, number: int, where: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt


def frame(record: TopRecord, url: str, fault: str) -> RenderableType:
    """Everything on the screen. fault: why there are no newer figures."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ragkv.metrics.figures import FIGURES, shown

    seen, spans = record.latest, [record.lately(), record.ever(time.time())]
    table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0), header_style="dim")
    table.add_column("", min_width=18)
    listed = [span for span in spans if span is not None]
    for span in listed:
        table.add_column("since the start" if span is listed[-1] else f"last {span.seconds:.0f} s", justify="right")
    for figure in FIGURES:
        table.add_row(figure.name, *(shown(figure, span.sums, seen.price) for span in listed))
    for name, detail in DETAILS:
        table.add_row(name, *(detail(span) for span in listed))
    status = Text(printable(fault), style="bold red") if fault else _state(seen)
    about = " · ".join(filter(None, (url, seen.model, seen.method, f"up {_age(listed[-1].seconds)}")))
    return Group(
        Text(printable(f"ragkv  {about}"), style="bold"), status, Text(""), table, Text(""), Text(_waiting(seen))
    )


def _state(seen: ScrapedMetrics) -> RenderableType:
    from rich.text import Text

    if not seen.wrong:
        return Text("all is well", style="green")
    return Text(f"not all right: {', '.join(map(printable, seen.wrong))} (`ragkv doctor --url`)", style="yellow")


def _waiting(seen: ScrapedMetrics) -> str:
    documents, queued = ("?" if count is None else str(count) for count in (seen.documents, seen.queued))
    return (
        f"answering {seen.running}, waiting {seen.waiting} of {seen.queue_places}"
        f"      documents {documents}, to be read {queued}"
    )


def _hits(span: TopSpan, tier: str) -> str:
    from ragkv.metrics.figures import percent

    return percent(span.sums.hit_by(tier))


def _rate(count: float, seconds: float) -> str:
    return f"{count / seconds:.2f}" if seconds else "–"


def _age(seconds: float) -> str:
    minutes = int(seconds) // 60
    days, hours = minutes // 1440, minutes // 60 % 24
    return f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


DETAILS: tuple[tuple[str, Callable[[TopSpan], str]], ...] = (
    ("Hits in gpu", lambda span: _hits(span, "gpu")),
    ("Hits in host", lambda span: _hits(span, "host")),
    ("Hits in store", lambda span: _hits(span, "store")),
    ("Answers a second", lambda span: _rate(span.sums.answered, span.seconds)),
    ("Tokens a second", lambda span: _rate(span.sums.tokens["generated"], span.seconds)),
    ("Not answered", lambda span: str(sum(span.sums.ended.values()))),
)
"""Name of each figure that only this command shows, and its format."""
