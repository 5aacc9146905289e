"""An OpenAI-compatible server over AsyncLLM, made with Starlette and uvicorn: pip install
'jpaged[server]'.

app.py has the routes. generation.py takes a request for completions from its body to its answer.
bodies.py has the bodies that only a server accepts. events.py writes an answer as a stream.
response_bodies.py and response_items.py do the same for /v1/responses, which kept_responses.py may
keep; message_bodies.py and message_events.py for Anthropic's /v1/messages. wire.py handles
connections, bodies and errors. metrics.py, status.py and the page in page/ show what the server
does, openapi.py what it takes. settings.py has its limits, run.py its command line. record.py says
what is known of a request that has ended, logs.py and tracing.py tell it; pulse.py keeps streams
alive, reload.py takes changed files while it runs.
"""

try:
    import starlette
    import uvicorn
except ImportError as e:
    raise ImportError(
        "jpaged.openai.server needs starlette and uvicorn: pip install 'jpaged[server]'"
    ) from e

del starlette, uvicorn
