"""What ``deploy`` writes, without a server: the files, their schemas, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.tiny import DRAFT, TARGET, build_tiny, tiny_config
from tests.triton.server import READY
from trt_eagle3.atomic_io import PARTIAL, create_file, output_lock
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.bundle.record import BUNDLE_FILE
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import build
from trt_eagle3.triton import repository as writing
from trt_eagle3.triton.libraries import use_libraries
from trt_eagle3.triton.repository import Deployment, deploy
from trt_eagle3.triton.tensors import INPUTS, OUTPUTS

KUBERNETES = ("1.33", "1.37")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def deployment(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return deploy(bundle, tmp_path_factory.mktemp("triton") / "repository")


def as_gpu(bundle: Path) -> None:
    """The same bundle, but for a GPU."""
    record = json.loads((bundle / BUNDLE_FILE).read_text())
    record["config"]["engine"] |= {"backend": "torch", "device": "cuda", "dtype": "float16"}
    (bundle / BUNDLE_FILE).write_text(json.dumps(record))


@pytest.fixture(scope="module")
def gpu_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = build_tiny(tmp_path_factory.mktemp("engines"))
    as_gpu(bundle)
    return deploy(
        bundle, tmp_path_factory.mktemp("triton") / "repository", name="qwen3_vl.8B"
    ).model.parent


def test_model_holds_the_whole_bundle(bundle: Path, deployment: Deployment) -> None:
    placed = deployment.model / "1/bundle"
    for file in (f for f in bundle.rglob("*") if f.is_file()):
        assert (placed / file.relative_to(bundle)).read_bytes() == file.read_bytes()
    assert deployment.name == "tiny"
    assert {path.name for path in deployment.model.parent.iterdir()} == {
        "tiny",
        "launch.sh",
        "compose.yaml",
        "kubernetes.yaml",
        "Dockerfile",
        ".dockerignore",
    }


def test_config_declares_every_tensor_and_limit(deployment: Deployment) -> None:
    text = (deployment.model / "config.pbtxt").read_text()
    declared = dict(re.findall(r'\{ name: "(\w+)" data_type: (\w+)', text))
    assert declared == {name: t.data_type for name, t in {**INPUTS, **OUTPUTS}.items()}
    assert "decoupled: true" in text
    parameters = dict(re.findall(r'key: "(\w+)" value: \{ string_value: "([^"]*)"', text))
    assert yaml.safe_load(parameters["allowed_hosts"]) == []
    assert yaml.safe_load(parameters["log_prompts"]) is False


def test_limits_come_from_the_caller(bundle: Path, tmp_path: Path) -> None:
    serving = {"allowed_hosts": ["*.example.com"], "max_media": 2}
    text = (deploy(bundle, tmp_path / "r", serving=serving).model / "config.pbtxt").read_text()
    assert 'key: "allowed_hosts" value: { string_value: "[\'*.example.com\']" }' in text
    assert 'key: "max_media" value: { string_value: "2" }' in text


def test_shell_script_parses(deployment: Deployment) -> None:
    script = deployment.model.parent / "launch.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_launching_without_an_environment_says_so(deployment: Deployment, tmp_path: Path) -> None:
    environment = {**os.environ, "TRT_EAGLE3_ENV": str(tmp_path), "TRITONSERVER": "/bin/false"}
    script = deployment.model.parent / "launch.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "TRT_EAGLE3_ENV" in done.stderr


def test_stock_server_is_started_on_loopback_with_its_options(
    deployment: Deployment, tmp_path: Path
) -> None:
    server = tmp_path / "tritonserver"
    server.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    server.chmod(0o755)
    environment = {
        **os.environ,
        "TRITONSERVER": str(server),
        "HTTP_PORT": "1234",
        "ADMIN_KEY": "key",
    }
    script = deployment.model.parent / "launch.sh"
    done = subprocess.run(
        [script, "--more"], env=environment, capture_output=True, text=True, check=True
    )
    options = done.stdout.splitlines()
    assert {f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")} <= set(options)
    assert "--http-port=1234" in options
    assert any(
        option.startswith("--http-restricted-api=") and option.endswith("=key")
        for option in options
    )
    assert options[-1] == "--more"


def validate_compose(file: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def test_compose_file_fits_the_schema(deployment: Deployment, gpu_repository: Path) -> None:
    services = validate_compose(deployment.model.parent / "compose.yaml")["services"]
    assert all(
        port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"]
    )
    assert services["triton"]["healthcheck"]["test"][-1].endswith(f":8000{READY}")
    assert "deploy" not in services["triton"]
    [device] = validate_compose(gpu_repository / "compose.yaml")["services"]["triton"]["deploy"][
        "resources"
    ]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_compose_schema_catches_a_mistake(deployment: Deployment, tmp_path: Path) -> None:
    text = (deployment.model.parent / "compose.yaml").read_text()
    (tmp_path / "compose.yaml").write_text(text.replace("healthcheck:", "healthchecks:"))
    with pytest.raises(AssertionError):
        validate_compose(tmp_path / "compose.yaml")


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_manifest_fits_the_schema(
    deployment: Deployment, gpu_repository: Path, version: str
) -> None:
    for repository, gpu in ((deployment.model.parent, False), (gpu_repository, True)):
        resources = list(yaml.safe_load_all((repository / "kubernetes.yaml").read_text()))
        for resource in resources:
            kubernetes_validate.validate(resource, version, strict=True)
        by_kind = {resource["kind"]: resource for resource in resources}
        [container] = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= container.keys()
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        # what says whether the engine hangs: whoever is live for ever is never started again
        assert {probe["httpGet"]["path"] for probe in probes} == {READY}
        loading, sending, ending = (p["periodSeconds"] * p["failureThreshold"] for p in probes)
        assert sending < ending < loading, "clients are sent elsewhere before it is ended"
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) is gpu
        selector = by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
        assert by_kind["Service"]["spec"]["selector"] == selector
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} <= ports


def test_kubernetes_schema_catches_a_mistake(deployment: Deployment) -> None:
    text = (
        (deployment.model.parent / "kubernetes.yaml")
        .read_text()
        .replace("readinessProbe", "readynessProbe")
    )
    [workload] = [r for r in yaml.safe_load_all(text) if r["kind"] == "Deployment"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, KUBERNETES[0], strict=True)


def test_second_deployment_replaces_the_first_and_only_it(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path, name="a")
    deploy(bundle, tmp_path, name="b")
    (tmp_path / "a/config.pbtxt").write_text("old")
    (tmp_path / "a/1/__pycache__").mkdir()
    (tmp_path / "a/1/__pycache__/model.cpython-312.pyc").touch()  # Triton ran it
    (tmp_path / "a/1/bundle/tuning.json").write_text("{}")
    deploy(bundle, tmp_path, name="a")
    assert "Written by trt-eagle3" in (tmp_path / "a/config.pbtxt").read_text()
    assert not (tmp_path / "a/1/bundle/tuning.json").exists()
    assert (tmp_path / "b/config.pbtxt").is_file()
    assert not [
        entry for entry in tmp_path.iterdir() if "lock" in entry.name or PARTIAL in entry.name
    ]


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "1/helper.py", "1/bundle/processor/mine.json", "2/model.py"]
)
def test_model_that_holds_a_foreign_file_is_never_replaced(
    bundle: Path, tmp_path: Path, foreign: str
) -> None:
    deploy(bundle, tmp_path, name="a")
    mine = tmp_path / "a" / foreign
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=f"it holds '{foreign}', which trt-eagle3 did not write"):
        deploy(bundle, tmp_path, name="a")
    assert mine.read_text() == "mine"


def test_model_that_is_another_servers_is_never_replaced(bundle: Path, tmp_path: Path) -> None:
    """Also where it has files of the same names."""
    for name in ("config.pbtxt", "1/model.py", "1/bundle/bundle.json"):
        create_file(tmp_path / "a" / name, b"{}")
    with pytest.raises(UserError, match="expected a model of trt-eagle3 or nothing there"):
        deploy(bundle, tmp_path, name="a")
    assert (tmp_path / "a/1/model.py").read_text() == "{}"


def test_model_in_a_checkpoint_or_over_one_is_refused(tmp_path: Path) -> None:
    target = Path(shutil.copytree(TARGET, tmp_path / "models/target"))
    bundle = build(
        tiny_config(target=target), output=tmp_path / "engines", reference_weights=True
    ).path
    with pytest.raises(UserError, match=f"lies in the checkpoint {target}"):
        deploy(bundle, target)
    with pytest.raises(UserError, match=f"is the checkpoint {target}, which would be replaced"):
        deploy(bundle, tmp_path / "models", name="target")
    with pytest.raises(
        UserError, match=f"contains the checkpoint {target}, which would be replaced"
    ):
        deploy(bundle, tmp_path, name="models")
    assert {path.name for path in target.iterdir()} == {path.name for path in TARGET.iterdir()}


def test_second_deployment_at_the_same_time_is_refused_in_one_line(
    bundle: Path, tmp_path: Path
) -> None:
    with (
        output_lock(tmp_path / "all models"),
        pytest.raises(
            UserError, match=f"{tmp_path}: another build or deployment is writing it. Wait"
        ),
    ):
        deploy(bundle, tmp_path)
    assert deploy(bundle, tmp_path).model.is_dir()


def test_bundle_replaced_while_it_is_deployed_is_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_tiny(tmp_path)
    place = writing._place

    def replaced(*args: Any) -> Any:
        build_tiny(tmp_path)
        return place(*args)

    monkeypatch.setattr(writing, "_place", replaced)
    with pytest.raises(UserError, match="was replaced or removed after it was opened"):
        deploy(source, tmp_path / "r")
    assert list((tmp_path / "r").iterdir()) == []


def test_bundle_that_refers_to_its_checkpoints_mounts_them(tmp_path: Path) -> None:
    config: BuildConfig = tiny_config()
    bundle = build(config, output=tmp_path, reference_weights=True).path
    found = deploy(bundle, tmp_path / "r")
    assert not (tmp_path / "r/kubernetes.yaml").exists()
    assert "contained" in found.notes[0]
    volumes = validate_compose(tmp_path / "r/compose.yaml")["services"]["triton"]["volumes"]
    assert {f"{path}:{path}:ro" for path in (TARGET, DRAFT)} <= set(volumes)


def test_packed_environment_goes_into_the_model(bundle: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(__file__, "bin/activate")
    model = deploy(bundle, tmp_path / "r", environment=str(packed)).model
    assert (model / "env.tar.gz").read_bytes() == packed.read_bytes()
    assert "$$TRITON_MODEL_DIRECTORY/env.tar.gz" in (model / "config.pbtxt").read_text()


@pytest.mark.parametrize(
    "data",
    [b"", b"an archive", b"\x1f\x8b\x08\x00", gzip.compress(b"no tar" * 1000)],
    ids=["empty", "text", "cut", "no tar"],
)
def test_environment_that_is_no_archive_is_refused(
    bundle: Path, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "packed.tar.gz").write_bytes(data)
    with pytest.raises(
        UserError, match=r"--env .*packed\.tar\.gz: expected server, interpreter, or a packed"
    ) as caught:
        deploy(bundle, tmp_path / "r", environment=str(tmp_path / "packed.tar.gz"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_interpreters_environment_is_named(bundle: Path, tmp_path: Path) -> None:
    text = (
        deploy(bundle, tmp_path / "r", environment="interpreter").model / "config.pbtxt"
    ).read_text()
    assert f'key: "EXECUTION_ENV_PATH" value: {{ string_value: "{sys.prefix}" }}' in text


def test_libraries_of_a_gpu_bundle_travel_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_tiny(tmp_path)
    as_gpu(bundle)
    library = tmp_path / "libtrt_eagle3_capi.so"
    library.write_bytes(b"code")
    monkeypatch.setenv("TRT_EAGLE3_CAPI", str(library))
    found = deploy(bundle, tmp_path / "r")
    assert not any("not built here" in note for note in found.notes)
    assert (found.model / "1/TRT_EAGLE3_CAPI.so").read_bytes() == b"code"
    use_libraries(found.model / "1")
    assert os.environ["TRT_EAGLE3_CAPI"] == str(library)  # what the environment names comes first
    monkeypatch.delenv("TRT_EAGLE3_CAPI")
    use_libraries(found.model / "1")
    assert os.environ["TRT_EAGLE3_CAPI"] == str(found.model / "1/TRT_EAGLE3_CAPI.so")
    monkeypatch.delenv("TRT_EAGLE3_CAPI")
    monkeypatch.setattr("trt_eagle3.engine.capi.library_path", lambda: None)
    [note] = [note for note in deploy(bundle, tmp_path / "r").notes if "TRT_EAGLE3_CAPI" in note]
    assert "the server must have it: trt-eagle3 install-kernels, then deploy again" in note


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "a/b"}, "--name"),
        ({"name": ""}, "tiny"),
        ({"name": "a b"}, "--name"),
        ({"name": "a" * 300}, "--name: expected at most 128"),
        ({"image": "a\nRUN b"}, "--image"),
        ({"image": ""}, "--image"),
        ({"environment": "absent.tar.gz"}, "--env absent.tar.gz"),
        ({"serving": {"max_medea": 3}}, "max_medea: unknown. Known: allowed_hosts"),
        ({"serving": {"max_media": 0}}, "max_media"),
        ({"serving": {"allowed_hosts": ["http://a.b/"]}}, "allowed_hosts"),
        ({"serving": {"allowed_hosts": ["*"]}}, "allowed_hosts"),
        (
            {"serving": {"allowed_hosts": "a.b"}},
            'allowed_hosts: expected a list such as ["images.example.com", ',
        ),
        ({"serving": {"allowed_hosts": [5]}}, "allowed_hosts: expected a list"),
    ],
)
def test_bad_option_is_refused_in_one_line(
    bundle: Path, tmp_path: Path, options: Any, expected: str
) -> None:
    if options == {"name": ""}:
        assert deploy(bundle, tmp_path / "r", **options).name == expected
        return
    with pytest.raises(UserError) as caught:
        deploy(bundle, tmp_path / "r", **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_other_peoples_files_are_left_alone(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    with pytest.raises(UserError, match=r"compose\.yaml: not written by trt-eagle3"):
        deploy(bundle, tmp_path)
    (tmp_path / "compose.yaml").unlink()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.pbtxt").write_text("mine")
    with pytest.raises(UserError, match=r"expected a model of trt-eagle3"):
        deploy(bundle, tmp_path)
    assert (tmp_path / "tiny/config.pbtxt").read_text() == "mine"


def test_bundle_and_repository_keep_apart(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lies in the bundle"):
        deploy(bundle, bundle / "repository")
    inside = deploy(bundle, tmp_path / "r").model / "1/bundle"
    with pytest.raises(UserError, match="would be replaced"):
        deploy(inside, tmp_path / "r")
    with pytest.raises(UserError, match="no bundle here"):
        deploy(tmp_path, tmp_path / "s")


def test_engines_that_are_not_built_are_told(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    unbuilt = build_tiny(tmp_path / "unbuilt", engine=engine)
    monkeypatch.setattr("trt_eagle3.engine.trt.plugins.plugin_library_path", lambda _: None)
    notes = " ".join(deploy(unbuilt, tmp_path / "models").notes)
    assert (
        "TRT_EAGLE3_PLUGINS: not built here, so the server must have it: make plugins "
        "TENSORRT_INCLUDE=/" in notes
    )
    if not list(unbuilt.rglob("*.engine")):  # as on every machine without TensorRT
        assert "the engines are not built: before the server starts, run " in notes
    assert "not built: before" not in " ".join(deploy(bundle, tmp_path / "others").notes)
