"""An HTTP server in the form of OpenAI's interface: requests in, pieces of text out.

| file | what it holds |
| --- | --- |
| `settings.py` | what a server goes by, from flags and YAML |
| `protocol.py`, `answers.py`, `errors.py` | what clients send, and what they are sent |
| `app.py`, `page/`, `text_routes.py`, `audio_routes.py`, `status_routes.py`, `page_routes.py` | endpoints, the page |
| `guards.py`, `keys.py` | keys, hosts, sizes, the log's line: what every request must pass |
| `generation.py`, `respond.py` | one request on the event loop; answers that end when their client leaves |
| `admission.py`, `bridge.py` | turns among clients; threads that decode, followed and cancelled from the event loop |
| `hosting.py`, `text_model.py`, `speech_model.py` | models with their threads; what a thread does for a request |
| `connections.py` | how many connections there are, and how long heads and sends may take |
| `wire.py` | streams from a thread that decodes to their socket |
| `sampling.py`, `stops.py`, `grammar.py` | fields into options; texts that end an answer; answers in a given form |
| `scoring.py` | what the tokens of a prompt score |
| `metrics.py`, `tracing.py` | counts for Prometheus, spans for OpenTelemetry |
| `state.py`, `server.py` | what requests share; the process and its drain |

Nothing of it is imported unless a server is asked for; the extra `serve` brings what it needs.
"""

from specdec.serve.app import create_app
from specdec.serve.hosting import load
from specdec.serve.server import check_address, serve
from specdec.serve.settings import ServeSettings, read_settings

__all__ = ["ServeSettings", "check_address", "create_app", "load", "read_settings", "serve"]
