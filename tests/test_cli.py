"""The command line as a user meets it: JSON on stdout, one-line errors, exit codes."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest
import yaml
from PIL import Image

from tests.tiny import DRAFT, ROOT, TARGET, build_tiny, tiny_config
from trt_eagle3.cli import cli, main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


pytestmark = pytest.mark.usefixtures("wide_console")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["trt-eagle3", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("engines"), limits={"max_seq_len": 96, "max_visual_tokens": 40}
    )


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return _save(tmp_path / "picture.png", (96, 64))


def _save(file: Path, size: tuple[int, int]) -> Path:
    Image.new("RGB", size, "red").save(file)
    return file


def _config_file(folder: Path, **changes: object) -> Path:
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_config().model_dump(mode="json") | changes))
    return file


def test_build_prints_one_json_object_and_the_bundle_generates(run: Run, tmp_path: Path) -> None:
    ended = run("build", "--config", _config_file(tmp_path), "--output", tmp_path / "out", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["bundle"] == str(tmp_path / "out" / "tiny")
    keys = {
        "bundle",
        "calibrated_on",
        "memory_bytes",
        "num_bytes",
        "replaced",
        "seconds",
        "warnings",
        "weights",
    }
    assert set(report) == keys
    assert report["warnings"] == []
    assert report["memory_bytes"]["weights"] > 0
    assert run("generate", report["bundle"], "What is 12 plus 30?").out == "12 plus 30 equals 42.\n"


def test_build_for_people_names_bundle_size_and_next_command(run: Run, tmp_path: Path) -> None:
    out = run("build", "--config", _config_file(tmp_path), "--output", tmp_path).out
    assert f"built {tmp_path / 'tiny'}" in out.replace("\n", "")
    assert "MB" in out
    next_lines = out.split("next, in this order:\n")[1].splitlines()
    assert [line.split()[:2] for line in next_lines] == [
        ["trt-eagle3", name] for name in ("probe", "validate", "bench", "serve")
    ]


def test_build_takes_its_config_as_an_argument_and_says_what_it_replaced(
    run: Run, tmp_path: Path
) -> None:
    build = ("build", _config_file(tmp_path), "--output", tmp_path)
    assert "in place of the bundle" not in run(*build).out
    assert "in place of the bundle that was there" in run(*build).out
    assert json.loads(run(*build, "--json").out)["replaced"] is True


def test_build_finds_paths_beside_its_config(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tmp_path / "pair"
    shutil.copytree(TARGET, pair / "my target")
    shutil.copytree(DRAFT, pair / "draft")
    (pair / "questions.json").write_text('[{"prompt": "What is 12 plus 30?"}]')
    sections = {"target": {"checkpoint": "my target"}, "draft": {"checkpoint": "draft"}}
    file = _config_file(pair, **sections, prompts="questions.json")
    monkeypatch.chdir(tmp_path)
    ended = run("build", file, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["bundle"] == "engines/tiny"


def test_build_says_when_this_machine_cannot_run_the_bundle(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["--set", "engine.backend=torch", "--set", "engine.device=cuda"]
    out = run("build", _config_file(tmp_path), "--output", tmp_path, *words).out
    assert "warning: this machine cannot run the bundle: torch on cuda needs a CUDA GPU, " in out
    assert f"next: copy {tmp_path / 'tiny'} to a machine with a CUDA GPU, and a torch built" in out
    assert "trt-eagle3 serve" not in out


def test_build_warns_of_settings_that_hurt(run: Run, tmp_path: Path) -> None:
    limits = {"max_batch_size": 1, "max_seq_len": 96, "max_visual_tokens": 97}
    words = [word for key, n in limits.items() for word in ("--set", f"limits.{key}={n}")]
    build = ("build", "--config", _config_file(tmp_path), "--output", tmp_path, *words)
    found = [line for line in run(*build).out.splitlines() if line.startswith("warning: ")]
    named = ["limits.max_batch_size: 1:", "limits.max_visual_tokens: 97 is above max_seq_len (96)"]
    assert len(found) == len(named)
    assert all(name in line for name, line in zip(named, found, strict=True))
    assert json.loads(run(*build, "--json").out)["warnings"] == [w[9:] for w in found]


def test_square_brackets_in_a_path_are_printed(run: Run, tmp_path: Path) -> None:
    out = run("build", "--config", _config_file(tmp_path), "--output", tmp_path / "[red] x").out
    assert f"built {tmp_path / '[red] x' / 'tiny'}" in out


def test_generate_json_has_every_field(run: Run, bundle: Path, picture: Path) -> None:
    ended = run(
        "generate", bundle, "Describe the picture.", "--image", picture, "--json", "--max-tokens", 9
    )
    assert ended.code == 0
    answer = json.loads(ended.out)
    assert set(answer) == {
        *(
            "text",
            "token_ids",
            "prompt_tokens",
            "reused_tokens",
            "logprobs",
            "prompt_logprobs",
            "finish_reason",
            "acceptance_length",
            "accepted_lengths",
        ),
        *("tokens_per_second", "time_to_first_token_ms"),
    }
    assert len(answer["token_ids"]) <= 9


def test_generate_without_speculation_gives_the_same_tokens(
    run: Run, bundle: Path, picture: Path
) -> None:
    args = ("generate", bundle, "Describe the picture.", "--image", picture, "--json")
    plain, fast = (json.loads(run(*args, *extra).out) for extra in (["--no-speculation"], []))
    assert plain["token_ids"] == fast["token_ids"]
    assert (plain["accepted_lengths"], plain["acceptance_length"]) == ([], None)
    assert max(fast["accepted_lengths"]) > 1


def test_demo_questions_are_answered_as_recorded(run: Run, tmp_path: Path) -> None:
    bundle, images = build_tiny(tmp_path), ROOT / "examples/tiny/images"
    for question in json.loads((images / "questions.json").read_text()):
        media: list[object] = [
            word for name in question.get("images", ()) for word in ("--image", images / name)
        ]
        media += ["--video", images / "frames"] if question.get("frames") else []
        assert run("generate", bundle, question["prompt"], *media).out == question["answer"] + "\n"


def acceptance_told(stats: str) -> tuple[str, int, int]:
    """The acceptance length, the forwards with a draft, and all of them."""
    found = re.search(
        r"acceptance length (\S+) \(drafts in (\d+) of (\d+) forwards\)$", stats, re.MULTILINE
    )
    assert found is not None, stats
    return found[1], int(found[2]), int(found[3])


def test_stats_go_to_stderr(run: Run, bundle: Path) -> None:
    ended = run("generate", bundle, "What is 12 plus 30?", "--stats")
    assert ended.out == "12 plus 30 equals 42.\n"
    length, drafted, forwards = acceptance_told(ended.err)
    assert (length, drafted) == (f"{11 / forwards:.2f}", forwards), "it drafts in all of them"
    assert "8 sequences at once, KV cache of 768 tokens" in ended.err


def test_stats_of_a_plan_that_adapts_say_how_many_forwards_had_a_draft(
    run: Run, bundle: Path, tmp_path: Path
) -> None:
    adaptive = build_tiny(tmp_path, speculation={"adaptive": True})
    ended = run("generate", adaptive, "What is 12 plus 30?", "--stats")
    length, drafted, forwards = acceptance_told(ended.err)
    emitted = 11 - (forwards - drafted)  # in the forwards with a draft: the others emit one each
    assert length == (f"{emitted / drafted:.2f}" if drafted else "-")
    assert ("drafting was not expected to pay" in ended.err) == (drafted < forwards)
    plain = run("generate", adaptive, "What is 12 plus 30?", "--stats", "--no-speculation")
    assert acceptance_told(plain.err) == ("-", 0, 11)
    for quiet in (plain, run("generate", bundle, "What is 12 plus 30?", "--stats")):
        assert "expected to pay" not in quiet.err


def test_stats_say_why_drafting_is_off_and_what_undoes_it(
    run: Run, bundle: Path, tmp_path: Path
) -> None:
    ask = ("What is 12 plus 30?", "--stats")
    off = run("generate", bundle, *ask, "--no-speculation").err
    assert "drafting was off: --no-speculation. Leave it out to draft" in off
    none = run("generate", build_tiny(tmp_path, draft=None), *ask).err
    assert "drafting was off: the bundle has no draft. To draft, build it with draft" in none


def test_generate_stops_at_the_length_limit_of_the_bundle(run: Run, bundle: Path) -> None:
    ended = run("generate", bundle, "Describe. " * 14, "--json", "--max-tokens", 500)
    answer = json.loads(ended.out)
    assert answer["prompt_tokens"] + len(answer["token_ids"]) <= 96


def test_inspect_json_holds_geometry_and_manifest(run: Run) -> None:
    found = json.loads(run("inspect", TARGET, DRAFT, "--json").out)
    assert sum(run["count"] for run in found["target"]["layers"]) == 8
    assert found["draft"]["aux_layers"] == [1, 3, 4]


def test_inspect_prints_tables(run: Run) -> None:
    out = run("inspect", TARGET, DRAFT).out
    assert "aux_layers" in out
    assert "specforge" in out
    assert re.match(r"target .*visual levels after \[1, 3, 5\]\ndraft ", out)
    assert re.search(r"\nKV cache: [0-9,]+ bytes per token in 16 bits; ", out)


def test_inspect_shows_where_each_field_came_from_and_what_was_overridden(run: Run) -> None:
    out = run(
        "inspect",
        TARGET,
        DRAFT,
        "--override",
        "aux_layers=[1, 2, 4]",
        "--override",
        "rope.base=10000",
    ).out
    assert re.search(r"aux_layers +\[1, 2, 4\] +override", out)
    assert re.search(r"rope +1d, base 10000 +override", out)
    assert re.search(r"head +own +tensor: lm_head.weight", out)


def test_build_takes_config_keys_and_overrides_of_the_draft(run: Run, tmp_path: Path) -> None:
    ended = run(
        "build",
        "--config",
        _config_file(tmp_path),
        "--output",
        tmp_path,
        "--override",
        "residual=normed",
        "--set",
        "limits.max_batch_size=3",
        "--json",
    )
    record = json.loads((Path(json.loads(ended.out)["bundle"]) / "bundle.json").read_text())
    assert record["draft"]["residual"] == "normed"
    assert record["config"]["limits"]["max_batch_size"] == 3
    assert record["draft"]["sources"]["residual"]["kind"] == "override"


def test_converted_draft_names_the_target_that_its_config_names(run: Run, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"target_model_type": "qwen3_5"}))
    ended = run("convert-draft", draft, tmp_path / "out", "--to", "speculators", "--json")
    assert not [note for note in json.loads(ended.out)["notes"] if note.startswith("verifier")]
    written = json.loads((tmp_path / "out/config.json").read_text())["speculators_config"]
    assert written["verifier"]["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_block_draft_is_not_converted_in_one_line(run: Run, tmp_path: Path) -> None:
    draft = TARGET.parent / "dflash"
    ended = run("convert-draft", draft, tmp_path / "out", "--to", "speculators")
    assert ended.code == 2
    assert f"{draft}: a block draft: no layout here holds it" in ended.err
    assert not (tmp_path / "out").exists()


def test_converted_draft_reads_as_the_same_manifest(run: Run, tmp_path: Path) -> None:
    ended = run(
        "convert-draft",
        DRAFT,
        tmp_path / "out",
        "--to",
        "speculators",
        "--target",
        TARGET,
        "--json",
    )
    assert json.loads(ended.out)["layout"] == "speculators"
    written = json.loads((tmp_path / "out/config.json").read_text())["speculators_config"]
    assert written["verifier"]["architectures"] == ["Qwen3VLForConditionalGeneration"]
    before, after = (
        json.loads(run("inspect", TARGET, d, "--json").out)["draft"]
        for d in (DRAFT, tmp_path / "out")
    )
    assert after["producer"] == "speculators"
    told = {"producer", "path", "sources", "warnings"}
    assert {k: v for k, v in after.items() if k not in told} == {
        k: v for k, v in before.items() if k not in told
    }


Case = Callable[[Path, Path], list[object]]
BAD_INPUT: dict[str, tuple[Case, str]] = {
    "no bundle": (lambda _, tmp: ["generate", tmp, "hi"], "no bundle here"),
    "prompt too long": (lambda b, _: ["generate", b, "word " * 200], "96|95"),
    "not an image": (
        lambda b, tmp: ["generate", b, "hi", "--image", _text(tmp / "a.png")],
        "a.png",
    ),
    "no such image": (
        lambda b, tmp: ["generate", b, "hi", "--image", tmp / "none.png"],
        "none.png",
    ),
    "extreme aspect": (
        lambda b, tmp: ["generate", b, "hi", "--image", _save(tmp / "w.png", (3000, 10))],
        "w.png.*200",
    ),
    "too many visual tokens": (
        lambda b, tmp: ["generate", b, "hi", *["--image", _save(tmp / "big.png", (256, 256))] * 3],
        "visual tokens",
    ),
    "remote image": (
        lambda b, _: ["generate", b, "hi", "--image", "https://a.b/c.png"],
        "not fetched",
    ),
    "name of two lines": (
        lambda b, tmp: ["generate", b, "hi", "--image", tmp / "a\nb.png"],
        r"a\\nb.png",
    ),
    "no frames": (
        lambda b, tmp: ["generate", b, "hi", "--video", _folder(tmp / "frames")],
        "frames",
    ),
    "unknown override": (
        lambda *_: ["inspect", TARGET, DRAFT, "--override", "resdual=normed"],
        "nearest known key: residual",
    ),
    "name too long": (lambda *_: ["inspect", "a" * 5000], "File name too long"),
    "video name too long": (
        lambda b, _: ["generate", b, "hi", "--video", "a" * 5000],
        "File name too long",
    ),
    "override of no draft": (
        lambda *_: ["inspect", TARGET, "--override", "residual=normed"],
        "no draft given",
    ),
    "override without value": (
        lambda *_: ["inspect", TARGET, DRAFT, "--override", "residual"],
        "KEY=VALUE",
    ),
    "no tokens wanted": (lambda b, _: ["generate", b, "hi", "--max-tokens", 0], "max_tokens"),
    "no config": (lambda _, tmp: ["build", "--config", tmp / "none.yaml"], "none.yaml"),
    "two configs": (
        lambda _, tmp: ["build", tmp / "a.yaml", "--config", tmp / "b.yaml"],
        "two configs, expected one",
    ),
    "prompt without quotes": (
        lambda b, _: ["generate", b, "What", "is", "this?", "--max-tokens", "3"],
        "PROMPT: expected one text after TARGET, got 3 words. Quote the prompt: 'What is this.'$",
    ),
    "no prompt": (lambda b, _: ["generate", b], "got none. Quote the prompt: "),
    "build setting for a bundle": (
        lambda b, _: ["generate", b, "hi", "--set", "limits.max_seq_len=5"],
        "--set limits.max_seq_len: set at build",
    ),
    "missing draft": (
        lambda _, tmp: ["build", _config_file(tmp, draft={"checkpoint": "/no/where"})],
        "error: draft.checkpoint: /no/where: no such folder",
    ),
    "no config given": (lambda *_: ["build"], "build: no config given. Name one: "),
    "folder for a config": (lambda *_: ["build", TARGET], "a folder, expected a YAML file"),
    "checkpoint for a bundle": (
        lambda *_: ["bench", TARGET],
        "tiny/target: a checkpoint, expected a bundle. Build one from it: trt-eagle3 build",
    ),
    "vLLM's name of a key": (
        lambda _, tmp: ["build", _config_file(tmp), "--set", "tensor_parallel_size=2"],
        "tensor_parallel_size: vLLM's name; here it is called engine.tensor_parallel",
    ),
    "vLLM's name of a limit": (
        lambda b, _: ["serve", b, "--set", "max_model_len=2"],
        "max_model_len: vLLM's name; here it is called limits.max_seq_len$",
    ),
    "vLLM's flag": (
        lambda b, _: ["serve", b, "--max-num-seqs", "8"],
        "--max-num-seqs: vLLM's name; here it is called --set limits.max_batch_size=VALUE",
    ),
    "path that is nowhere": (
        lambda _, tmp: ["build", _config_file(tmp, target={"checkpoint": "nowhere"})],
        "target.checkpoint: nowhere: no such folder, and not a Hub id .owner/name.. Check the "
        "path. Tried /.*/nowhere and /.*/nowhere.$",
    ),
    "no checkpoint": (lambda _, tmp: ["inspect", tmp / "none"], "none"),
    "empty folder": (lambda _, tmp: ["inspect", tmp], "not a checkpoint"),
    "bundle for a checkpoint": (
        lambda b, _: ["inspect", b],
        "a bundle, expected a checkpoint. To describe a bundle: trt-eagle3 doctor ",
    ),
    "draft for a target": (
        lambda _, tmp: ["build", _config_file(tmp, target={"checkpoint": str(DRAFT)})],
        "tiny/draft: an EAGLE-3 draft .specforge layout., expected a target. Name the draft in ",
    ),
    "text for a section": (
        lambda _, tmp: ["build", _config_file(tmp, target=str(TARGET))],
        "target: expected a mapping, got '.*'. Write target: {checkpoint: .*tiny/target}$",
    ),
    "target for a draft": (lambda *_: ["inspect", TARGET, TARGET], "draft"),
    "draft alone": (
        lambda *_: ["inspect", DRAFT],
        "draft: an EAGLE-3 draft .specforge layout.*: trt-eagle3 inspect TARGET .*tiny/draft$",
    ),
    "draft before its target": (lambda *_: ["inspect", DRAFT, TARGET], "inspect TARGET .*draft$"),
    "unknown target": (lambda _, tmp: ["inspect", _unknown(tmp)], "not supported. Supported: "),
}


def _text(file: Path) -> Path:
    file.write_text("these are words")
    return file


def _unknown(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "gemma3"}')
    return folder


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_2(
    case: str, run: Run, bundle: Path, tmp_path: Path
) -> None:
    arguments, message = BAD_INPUT[case]
    ended = run(*arguments(bundle, tmp_path))
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert re.search(message, ended.err), ended.err


PORTS = [["serve", "nowhere", "--port", port] for port in ("99999", "-1", "0")]


@pytest.mark.parametrize(
    "words",
    [["generate", "--nonsense"], ["generate"], ["nonsense"], ["build", "--weights", "x"], *PORTS],
)
def test_misused_command_is_one_line_and_exit_2(run: Run, words: list[str]) -> None:
    ended = run(*words)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1


def test_image_can_be_a_data_uri(run: Run, bundle: Path, picture: Path) -> None:
    uri = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    args = ("generate", bundle, "Describe the picture.", "--max-tokens", 9, "--image")
    assert run(*args, uri).out == run(*args, picture).out != ""


def test_bundle_of_another_schema_is_exit_2(run: Run, tmp_path: Path) -> None:
    path = build_tiny(tmp_path)
    file = path / "bundle.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"schema_version": 99}))
    ended = run("generate", path, "hi")
    assert ended.code == 2
    assert "99" in ended.err
    assert "trt-eagle3 build" in ended.err


def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "trt_eagle3", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"version \d", out)


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from trt_eagle3.cli import cli; cli(['-h'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.endswith("False\n")


def test_prompt_is_read_from_standard_input(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--max-tokens", 9, "--json")
    said = run("generate", bundle, "What is 2 plus 3?", *words)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is 2 plus 3?\n")))
    read = run("generate", bundle, "-", *words)
    assert json.loads(read.out)["token_ids"] == json.loads(said.out)["token_ids"]


def test_empty_prompt_is_answered_with_a_warning(run: Run, bundle: Path) -> None:
    ended = run("generate", bundle, " ", "--max-tokens", 2)
    assert ended.code == 0
    assert "warning: the prompt is empty" in ended.err


def test_every_option_is_explained_by_a_phrase_and_fits_a_narrow_terminal() -> None:
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=name, terminal_width=60, max_content_width=60)
        assert max(map(len, command.get_help(context).splitlines())) <= 60, name
        for option in command.params:
            if isinstance(option, click.Option):
                said = option.help or ""
                assert len(said.split()) >= 4, (name, option.opts)
                assert re.match(r"([a-z0-9-]+(, [a-z-]+)*: )?[A-Za-z]", said), (name, said)


def test_generate_fetches_from_allowed_hosts_only(run: Run, bundle: Path, picture: Path) -> None:
    handler = partial(_Files, directory=str(picture.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{pages.server_address[1]}"
        words = ("generate", bundle, "What?", "--image", f"http://{host}/{picture.name}")
        short = ("--max-tokens", 3)
        assert "not fetched" in run(*words, *short).err
        found = run(*words, "--allow-host", host, *short)
        assert (found.code, found.out) == (
            0,
            run("generate", bundle, "What?", "--image", picture, *short).out,
        )
        pages.shutdown()


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [("trt-eagle3 inst", "install-kernels"), ("trt-eagle3 bench --ag", "--against")],
)
def test_shell_completes_commands_and_options_as_the_readme_says(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [variable] = set(re.findall(r"(_\w+_COMPLETE)=bash_source", (ROOT / "README.md").read_text()))
    for name, value in ((variable, "bash_complete"), ("COMP_WORDS", words)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setattr(sys, "argv", ["trt-eagle3"])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as of the script
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == f"plain,{expected}\n"
