"""OpenTelemetry spans, off unless OTEL_EXPORTER_OTLP_ENDPOINT is set; sent as OTLP over gRPC, by OTel's own variables.

While off, neither tracer nor exporter is loaded, and every function here does nothing. An RPC carries the span of its
caller as `traceparent` metadata, so that an iteration is one trace over all services. The ranks behind a service have
no spans; their work is in the reports of the RPC.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from servicekit.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# How long the last spans may take to be delivered when a process ends.
_FLUSH_MS = 3000

Attribute = str | bool | int | float
Metadata = tuple[tuple[str, str], ...]


class _Tracing:
    """The process's tracer; None: off."""

    tracer: "Tracer | None" = None
    provider: "TracerProvider | None" = None


def start_tracing(service: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send spans from now on, if an endpoint is set; `service` is part of their service.name: `tandem-trainer`.

    Raises: ConfigError: the endpoint is not an address with http:// or https://.
    """
    endpoint = environ.get(ENDPOINT, "")
    if not endpoint or _Tracing.provider is not None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"environment variable {ENDPOINT}={endpoint!r} must begin with http:// or https://")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = {"service.name": f"tandem-{service}", "tandem.run_id": environ.get("TANDEM_RUN_ID", "")}
    provider = TracerProvider(resource=Resource.create(about))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer("tandem")


def stop_tracing() -> None:
    """Deliver the last spans within _FLUSH_MS; an unreachable collector loses spans and does not fail the run."""
    provider, _Tracing.provider, _Tracing.tracer = _Tracing.provider, None, None
    if provider is not None:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()


def span(name: str, **attributes: Attribute) -> AbstractContextManager[object]:
    """Open a span for a `with` block, a child of the current one; errors are recorded on it."""
    if _Tracing.tracer is None:
        return nullcontext()
    return _Tracing.tracer.start_as_current_span(name, attributes=attributes)


def exemplar() -> dict[str, str] | None:
    """Return the current trace as the labels of a histogram's exemplar; None while off, or if it is not sampled."""
    if _Tracing.tracer is None:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid or not context.trace_flags.sampled:
        return None
    return {"trace_id": trace.format_trace_id(context.trace_id)}


def outgoing() -> Metadata:
    """Return the metadata with the current span, for an outgoing call."""
    if _Tracing.tracer is None:
        return ()
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


@contextlib.contextmanager
def served(method: str, metadata: Sequence[tuple[str, Any]] | None) -> Iterator[None]:
    """Open a span for the handling of an RPC, a child of the caller's; none for calls without one (probes)."""
    if _Tracing.tracer is None:
        yield
        return
    from opentelemetry import propagate, trace

    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    context = propagate.extract(carrier)
    if not trace.get_current_span(context).get_span_context().is_valid:
        yield
        return
    with _Tracing.tracer.start_as_current_span(method.lstrip("/"), context=context, kind=trace.SpanKind.SERVER):
        yield
