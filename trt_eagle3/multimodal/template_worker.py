"""The process that renders chat templates: a separate script that imports nothing of this package.

A template is an untrusted program. Jinja's sandbox blocks files and Python's internals, but not
``'a' * 10**10``, nested ranges or endless text. So the kernel limits the memory, and a timer on
processor time ends the process. The script reads one JSON request per line from standard input and
writes one JSON answer per line.
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
CPU_S = 2.0  # per request; a long conversation takes a few ms
WALL_S = 60.0  # per request, in case it hangs without computing
MAX_CHARACTERS = 16 << 20  # of rendered text; a prompt of a million tokens has about 5 million


def main() -> None:
    """Answer requests until standard input ends.

    ``sys.argv[1]``: the parent's ``sys.path`` as JSON.
    """
    sys.path[:] = json.loads(sys.argv[1])
    import jinja2.sandbox  # before the limit is set, and before the first request

    del jinja2
    # some systems lack this limit; the timers still apply
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    templates: dict[str, jinja2.Template] = {}
    for line in sys.stdin.buffer:
        if line == b"\n":  # cancels a request that is already answered
            continue
        _set_timers(CPU_S, WALL_S)
        answer = _answer(line, templates)
        _set_timers(0, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _set_timers(cpu_s: float, wall_s: float) -> None:
    """Set timers for signals whose default action ends the process, even inside native code."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(line: bytes, templates: dict[str, jinja2.Template]) -> bytes:
    try:
        request = json.loads(line)
        try:
            template = _compiled(request["source"], templates)
        except Exception as error:  # a template may fail in any way, also at compilation
            return _dump({"parse_error": _first_line(error)})
        texts = [template.render(variables) for variables in request["renders"]]
        num_characters = sum(map(len, texts))
        if num_characters > MAX_CHARACTERS:
            return _dump(
                {"render_error": f"{num_characters} characters, expected at most {MAX_CHARACTERS}"}
            )
        return _dump({"texts": texts})
    except Exception as error:  # including MemoryError and RecursionError
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
    """Create a Jinja environment as transformers does."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Parse ``{% generation %}``, a mark for training. It has no effect on prompts."""

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
