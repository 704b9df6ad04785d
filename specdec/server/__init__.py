"""An HTTP server with OpenAI's API.

| file | contents |
| --- | --- |
| `settings.py` | settings of a server, from flags and YAML |
| `protocol.py`, `messages.py`, `answers.py`, `errors.py` | requests, conversations, responses, error messages |
| `items.py` | OpenAI's responses: their requests, items and events, and the conversations that they continue |
| `app.py`, `routes/`, `page/` | endpoints, web page |
| `guards.py`, `keys.py` | checks of every request: API key, host, origin, size; its line in the log |
| `responses.py` | responses that stop when their client disconnects |
| `admission.py`, `cancellation.py` | turns, shared fairly among clients; work seen from the event loop |
| `models.py`, `text.py`, `speech.py` | models with their threads; decoding of one prompt or recording |
| `connections.py` | limits on connections: time for heads and sends |
| `options.py` | from request fields to options: stop texts, log-probabilities of a prompt |
| `tools.py`, `calls.py` | calls of tools in answers: their forms and grammar; their reading |
| `thinking.py` | thoughts in answers: their forms, reading and budget |
| `infill.py` | prompts of texts with a gap |
| `metrics.py` | metrics for Prometheus, spans for OpenTelemetry |
| `state.py`, `http.py` | state shared by requests; the process and its shutdown |

Needs the extra `serve`.
"""

from specdec.server.app import create_app
from specdec.server.http import check_address, serve, start_log
from specdec.server.models import load_served
from specdec.server.settings import ServeSettings, read_settings

__all__ = ["ServeSettings", "check_address", "create_app", "load_served", "read_settings", "serve", "start_log"]
