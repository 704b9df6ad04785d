"""An HTTP server in the form of OpenAI's interface: requests in, pieces of text out.

| file | what it holds |
| --- | --- |
| `settings.py` | what a server goes by, from flags and YAML |
| `protocol.py`, `answers.py`, `errors.py` | what clients send, and what they are sent |
| `app.py`, `routes/`, `page/` | endpoints, the page |
| `guards.py`, `keys.py` | keys, hosts, sizes, the log's line: what every request must pass |
| `generation.py`, `responses.py` | one request on the event loop; answers that end when their client leaves |
| `admission.py`, `cancellation.py` | turns among clients; threads that decode, followed from the event loop |
| `models.py`, `text.py`, `speech.py` | models with their threads; what a thread does for a request |
| `connections.py` | how many connections there are, and how long heads and sends may take |
| `direct_socket.py` | streams from a thread that decodes to their socket |
| `options.py`, `stops.py`, `grammar.py` | fields into options; texts that end an answer; answers in a given form |
| `scoring.py` | what the tokens of a prompt score |
| `metrics.py`, `tracing.py` | counts for Prometheus, spans for OpenTelemetry |
| `state.py`, `http.py` | what requests share; the process and its drain |

Nothing of it is imported unless a server is asked for; the extra `serve` brings what it needs.
"""

from specdec.server.app import create_app
from specdec.server.http import check_address, serve
from specdec.server.models import load
from specdec.server.settings import ServeSettings, read_settings

__all__ = ["ServeSettings", "check_address", "create_app", "load", "read_settings", "serve"]
