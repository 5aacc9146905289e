"""Traces of a server by OpenTelemetry: a span for each request that generates, with the attributes
of the semantic conventions for generative AI. No text of a prompt or an answer is in it.

pip install 'jpaged[otel]'
"""

from typing import Any

from jpaged.errors import ConfigError
from jpaged.openai.server.record import RequestRecord
from jpaged.sampling_params import SamplingParams

try:
    from opentelemetry import propagate, trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ImportError as e:
    raise ConfigError("traces need OpenTelemetry: pip install 'jpaged[otel]'") from e

PROVIDER = "jpaged"  # gen_ai.provider.name


class Tracing:
    """Makes the spans of requests. processor: takes them; they belong to the trace that the
    request's `traceparent` names.
    """

    def __init__(self, processor: SpanProcessor):
        resource = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES decide
        if str(resource.attributes.get("service.name")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": PROVIDER}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jpaged.openai.server")

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Return traces that go to a collector, by OTLP over HTTP."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as e:
            raise ConfigError("traces need OpenTelemetry: pip install 'jpaged[otel]'") from e
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def __call__(self, record: RequestRecord) -> None:
        """Make the span of a request that has ended."""
        if record.operation is None:
            return
        carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in record.headers}
        span = self._tracer.start_span(
            f"{record.operation} {record.model}",
            context=propagate.extract(carrier),
            kind=trace.SpanKind.SERVER,
            start_time=record.began_at_ns,
            attributes=attributes(record),
        )
        if record.error is not None or record.status is None:
            span.set_status(trace.StatusCode.ERROR)
        span.end(record.began_at_ns + int(record.seconds * 1e9))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a request's span."""
    values: dict[str, Any] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.streams,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.answer_id,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": record.first_token_s,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "client.address": record.client,
        "error.type": record.error or (None if record.status is not None else "client_left"),
        "jpaged.request.id": record.request_id,
    }
    if record.params is not None:
        values |= of_params(record.params)
    return {name: value for name, value in values.items() if value is not None}


def of_params(params: SamplingParams) -> dict[str, Any]:
    """Return the attributes that say how a request draws; None is left out by the caller."""
    return {
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed if isinstance(params.seed, int) else None,
        "gen_ai.request.stop_sequences": list(params.stop_strings) or None,
        "gen_ai.output.type": "text" if params.structured is None else "json",
    }
