"""The documents tell the truth: links lead somewhere, and every command they show is one that
the program has.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.serving.openai.model import load_with_tools
from tests.tiny import ROOT, build_tiny, tiny_config
from tools import check_reference, config_reference
from trt_eagle3.cli import cli
from trt_eagle3.config import BuildConfig, config_from_dict

PAGES = ("*.md", "docs/*.md", "examples/**/*.md", "plugins/*/*.md")
DOCUMENTS = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
OWN_MODULES = ("trt_eagle3.", "benchmarks.")
OWN_FILES = re.compile(
    r"(?:benchmarks|build_configs|docs|examples|plugins|tests|tools)/[\w./-]+\.\w+"
)
document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(file: Path) -> list[str]:
    """Links of ``file`` to files that are not there, or to headings that none of them has."""
    broken = []
    for link in LINK.findall(FENCE.sub("", file.read_text())):
        name, _, anchor = link.partition("#")
        target = file.parent / name if name else file
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def shell_lines(text: str) -> list[str]:
    """Lines of blocks that are no program in a language."""
    blocks = [block for language, block in FENCE.findall(text) if not language]
    blocks += re.findall(r"^ {4}[a-zA-Z].*(?:\n {4}.+)*$", FENCE.sub("", text), re.MULTILINE)
    lines = [line.strip() for b in blocks for line in b.replace("\\\n", " ").split("\n")]
    return [line for line in lines if line]


def words_of(line: str) -> list[str]:
    """A command's words, without the variables that are set for it."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an example's output
        return []
    while words and ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    return words


def parse(command: click.Command, arguments: list[str]) -> None:
    command.parse_args(click.Context(command), arguments)  # raises where an option is unknown


def check_command(words: list[str]) -> None:
    """Raise or fail where the program has no such command, module, target, option or file."""
    program, *arguments = words
    match Path(program).name, arguments:
        case "trt-eagle3", [name, *rest] if not name.startswith("-"):
            parse(cli.commands[name], rest)
        case "python", ["-m", module, *rest] if module.startswith(OWN_MODULES):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
            main = getattr(importlib.import_module(module), "main", None)
            if isinstance(main, click.Command):
                parse(main, rest)
        case "make", [*targets]:
            known = set(re.findall(r"^([\w./-]+):", MAKEFILE, re.MULTILINE)) | READY
            assert {t for t in targets if "=" not in t} <= known, targets
    files = [w for word in arguments for w in re.findall(OWN_FILES, word) if word.startswith(w)]
    assert [f for f in files if not (ROOT / f).exists()] == [], words


MAKEFILE = (ROOT / "Makefile").read_text()
READY = set(re.findall(r"_READY := (\S+)", MAKEFILE))


@document
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


@document
def test_commands_are_the_programs_own(document: Path) -> None:
    for line in shell_lines(document.read_text()):
        if words := words_of(line):
            check_command(words)


@document
def test_options_and_modules_in_the_text_are_the_programs_own(document: Path) -> None:
    """Of commands without all of their arguments, as sentences name them."""
    for span in SPAN.findall(FENCE.sub("", document.read_text())):
        match words_of(span):
            case ["trt-eagle3", name, *rest] if name[0] in "abcdefghijklmnopqrstuvwxyz":
                known = {o for p in cli.commands[name].params for o in (*p.opts, *p.secondary_opts)}
                assert {w for w in rest if w.startswith("--")} <= known, span
            case ["python", "-m", module, *_] if module.startswith(OWN_MODULES):
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), span
            case [name, *_] if re.fullmatch(r"benchmarks\.[a-z]\w*", name):
                assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), span


@pytest.mark.parametrize(
    "line",
    [
        "trt-eagle3 generate bundle --nonsense 3",
        "PYTHON=x trt-eagle3 generate bundle --nonsense 3  # says nothing",
        "trt-eagle3 forget bundle",
        "python -m trt_eagle3.bench.nothing",
        "python -m benchmarks.nothing",
        "python -m benchmarks.crowd --nonsense 3",
        "make supper",
        "trt-eagle3 build --config build_configs/nothing.yaml",
    ],
)
def test_command_that_does_not_exist_is_caught(line: str) -> None:
    assert shell_lines(f"Text\n```\n{line}\n```\n") == [line]
    with pytest.raises((click.UsageError, AssertionError, KeyError)):
        check_command(words_of(line))


def test_link_that_leads_nowhere_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b, c\n[x](#a-b-c) [y](#d) [z](other.md) [w](page.md#a-b-c) [v](page.md#e)")
    assert broken_links(page) == ["#d", "other.md", "page.md#e"]


def test_configuration_page_is_current_and_says_what_every_key_is_for() -> None:
    page = config_reference.page()
    assert (ROOT / "docs/config.md").read_text() == page, "python tools/config_reference.py"
    assert not re.findall(r"^\| `\w+` \|.*\|  \|$", page, re.MULTILINE)


def rows_of_defaults(section: str) -> dict[str, str]:
    """Key -> the cell "default" of the configuration page's table of ``section``."""
    page = (ROOT / "docs/config.md").read_text()
    table = page.partition(f"\n## `{section}`\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| .+? \| (.+?) \| ", table, re.MULTILINE))


@pytest.mark.parametrize("section", ["engine", "limits", "speculation", "engine.tensorrt"])
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("onnxruntime", {}),
        ("torch on cpu", {"backend": "torch"}),
        ("torch on cuda", {"backend": "torch", "device": "cuda"}),
        ("tensorrt", {"backend": "tensorrt"}),
    ],
)
def test_defaults_on_the_configuration_page_are_those_of_a_config(
    section: str, name: str, engine: dict[str, str]
) -> None:
    raw = {"name": "x", "target": {"checkpoint": "x"}, "engine": engine}
    values = config_from_dict(raw, "x").model_dump(mode="json")
    for part in section.split("."):
        values = values[part]
    cells = {key: cell for key, cell in rows_of_defaults(section).items() if key not in engine}
    assert cells
    for key, cell in cells.items():
        usual, *others = cell.split("; ")
        by_name = {
            n: v for v, _, ns in (o.partition(" for ") for o in others) for n in ns.split(" and ")
        }
        written = by_name.get(name, usual)
        value = {"left out": None, "none": []}.get(written, yaml.safe_load(written.strip("`")))
        assert values[key] == value, key


def test_page_of_checks_equals_what_the_registry_renders() -> None:
    page = check_reference.page()
    assert (ROOT / "docs/checks.md").read_text() == page, "python -m tools.check_reference"


@document
def test_build_configs_in_the_documents_are_valid(document: Path) -> None:
    """A block may be some sections of one. Blocks without a key of a build config are others."""
    rest = {"name": "x", "target": {"checkpoint": "x"}}
    blocks = re.findall(r"```yaml\n(.+?)```", document.read_text(), re.DOTALL)
    for block in map(yaml.safe_load, blocks):
        if block.keys() & BuildConfig.model_fields.keys():
            assert config_from_dict(rest | block, str(document)).name


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - set(LINK.findall(text)) == set()


def test_programs_of_the_decoding_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "docs/decoding.md").read_text(), re.DOTALL)
    program = "\n".join(blocks).replace("engines/tiny", str(build_tiny(tmp_path)))
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    # without this file's postponed annotations, which Pydantic could not resolve there
    exec(compile(program, "decoding.md", "exec", dont_inherit=True), names)
    names["llm"].close()
    with load_with_tools(tmp_path / "tools") as llm:
        print(names["ask_with_a_tool"](llm, "What is 3 plus 4?"))
    printed = capsys.readouterr().out
    assert "3 plus 4" in printed
    assert "four shapes" in printed
    assert "replaced by a blue circle" in printed
    assert '"colour"' in printed


def test_program_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program
    monkeypatch.chdir(tmp_path)
    config = tiny_config().model_dump(mode="json", exclude_defaults=True)
    Path("pair.yaml").write_text(yaml.safe_dump(config))
    shutil.copyfile(ROOT / "examples/tiny/images/scene.png", "photo.jpg")
    exec(program[1].replace("engines/qwen3-vl-2b", "engines/tiny"), {})
    printed = capsys.readouterr().out
    assert "2 plus 3" in printed
