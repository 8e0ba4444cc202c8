"""The process that renders chat templates: a script of its own, which imports nothing of this
package.

A template is a program that a stranger wrote. Jinja's sandbox keeps it from files and from Python's
internals, but not from ``'a' * 10**10``, nested ranges or endless text. Here the kernel does: a
limit on memory, and a timer on processor time that ends the process. Reads one JSON request a line
from standard input, and writes one JSON answer a line.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

__all__: list[str] = []

MEMORY_BYTES = 1 << 30  # of address space; an idle worker has 0.1 GB
CPU_S = 2.0  # for one request; a long conversation takes some ms
WALL_S = 60.0  # and should it hang without computing
MAX_CHARACTERS = 16 << 20  # of rendered text; a prompt of a million tokens has some 5 million


def main() -> None:
    """Answer requests until standard input ends; ``sys.argv[1]`` is the parent's ``sys.path`` as
    JSON.
    """
    sys.path[:] = json.loads(sys.argv[1])
    import jinja2.sandbox  # before the limit, and so that the first request does not pay for it

    del jinja2
    # a system without this limit; the timer holds all the same
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    templates: dict[str, jinja2.Template] = {}
    for line in sys.stdin.buffer:
        if line == b"\n":  # a request that was cancelled, and is answered already
            continue
        _set_timers(CPU_S, WALL_S)
        answer = _answer(line, templates)
        _set_timers(0, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _set_timers(cpu_s: float, wall_s: float) -> None:
    """Signals whose default action ends the process, in the middle of C code too."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(line: bytes, templates: dict[str, jinja2.Template]) -> bytes:
    try:
        request = json.loads(line)
        try:
            template = _compiled(request["source"], templates)
        except Exception as error:  # a template may fail in any way, also as it is compiled
            return _dump({"parse_error": _first_line(error)})
        texts = [template.render(variables) for variables in request["renders"]]
        num_characters = sum(map(len, texts))
        if num_characters > MAX_CHARACTERS:
            return _dump(
                {"render_error": f"{num_characters} characters, expected at most {MAX_CHARACTERS}"}
            )
        return _dump({"texts": texts})
    except Exception as error:  # MemoryError and RecursionError among them
        return _dump({"render_error": _first_line(error)})


def _dump(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:1000]


def _compiled(source: str, templates: dict[str, jinja2.Template]) -> jinja2.Template:
    if source not in templates:
        if len(templates) >= 8:
            templates.clear()
        templates[source] = _environment().from_string(source)
    return templates[source]


def _environment() -> jinja2.Environment:
    """As transformers sets it up."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what an assistant wrote, for training; when prompting it
        does nothing.
        """

        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: object, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters; transformers replaces it.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _now(layout: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(layout)


if __name__ == "__main__":
    main()
