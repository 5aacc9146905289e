"""An OpenAI-compatible server over AsyncLLM, with Starlette and uvicorn: pip install
'jpaged[server]'.

app.py: the routes. generation.py: a request from its body to its answer. bodies.py: what only a
server takes. events.py: an answer in pieces. response_bodies.py, response_items.py: the same for
/v1/responses. wire.py: connections, bodies and errors. metrics.py,
page.html: what it shows of itself. settings.py: its limits. run.py: its command line.
"""

try:
    import starlette
    import uvicorn
except ImportError as e:
    raise ImportError(
        "jpaged.openai.server needs starlette and uvicorn: pip install 'jpaged[server]'"
    ) from e

del starlette, uvicorn
