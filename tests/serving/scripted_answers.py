"""Answers that a test writes, in place of the server's: in pieces, when the test wants them."""

from __future__ import annotations

import json
from typing import Any

from tests.serving.browser import Browser

__all__ = ["FIGURES", "ScriptedAnswers"]

FIGURES = {
    "prompt_tokens": 30,
    "completion_tokens": 24,
    "acceptance_length": 3.174,
    "time_to_first_token_ms": 38.2,
    "tokens_per_second": 142.3,
}
_SCRIPT = r"""(() => {
  const original = window.fetch;
  window.script = { bodies: [], stream: null, refusal: null };
  window.fetch = async (path, options) => {
    if (!String(path).includes("chat/completions")) return original(path, options);
    script.bodies.push(JSON.parse(options.body));
    if (script.refusal) {
      const [status, message] = script.refusal;
      script.refusal = null;
      if (!status) throw new TypeError("Failed to fetch");
      return new Response(JSON.stringify({ error: { message } }), { status });
    }
    const body = new ReadableStream({ start(stream) {
      script.stream = stream;
      options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
    } });
    return new Response(body);
  };
  script.send = (event) => script.stream.enqueue(new TextEncoder().encode(`data: ${event}\n\n`));
})()"""


class ScriptedAnswers:
    """Takes over the page's chat completions until it is loaded again."""

    def __init__(self, page: Browser) -> None:
        self._page = page
        page.evaluate(_SCRIPT)

    @property
    def bodies(self) -> list[Any]:
        """The bodies of the requests so far."""
        found = self._page.evaluate("script.bodies")
        assert isinstance(found, list)
        return found

    def refuse(self, status: int, message: str = "") -> None:
        """Refuse the next request; status 0: there is no server."""
        self._page.evaluate(f"script.refusal = {json.dumps([status, message])}")

    def write(self, *pieces: str, accepted: int | None = None, reasoning: bool = False) -> None:
        """Send the tokens of one forward, and wait until the page shows them."""
        field = "reasoning_content" if reasoning else "content"
        choice = {"index": 0, "delta": {field: "".join(pieces)}, "finish_reason": None}
        self._send({"choices": [choice], "trt_eagle3": {"accepted": accepted, "pieces": pieces}})
        self._page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done)))")

    def finish(self, reason: str = "stop", **figures: Any) -> None:
        """End the answer with the server's figures."""
        self._send({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self._send({"choices": [], "usage": FIGURES | figures})
        self._end("script.send('[DONE]'), script.stream.close()")

    def fail(self, message: str) -> None:
        """End the answer with an error."""
        self._send({"error": {"message": message}})
        self._end("script.stream.close()")

    def answer(self, text: str) -> None:
        """Send a whole answer."""
        self.write(text)
        self.finish()

    def _send(self, event: dict[str, Any]) -> None:
        self._page.wait_for("script.stream !== null")
        self._page.evaluate(f"script.send({json.dumps(json.dumps(event))})")

    def _end(self, how: str) -> None:
        self._page.evaluate(f"{how}, script.stream = null")
