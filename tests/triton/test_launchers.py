"""What ``deploy`` writes beside the models: for all of them, and with hints that lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import DRAFT, ROOT, build_tiny, tiny_config
from tests.triton.test_repository import as_gpu, validate_compose
from trt_eagle3.engine.bundle.record import BUNDLE_FILE
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import build
from trt_eagle3.triton.launchers import start_command
from trt_eagle3.triton.repository import deploy

WHEEL = f"trt_eagle3-{version('trt-eagle3')}-py3-none-any.whl"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def built_for(bundle: Path, folder: Path, **engine: Any) -> Path:
    """A copy of ``bundle`` that says it was built for a GPU, with ``engine`` in its record."""
    shutil.copytree(bundle, folder)
    as_gpu(folder)
    record = json.loads((folder / BUNDLE_FILE).read_text())
    record["engine"] |= engine
    (folder / BUNDLE_FILE).write_text(json.dumps(record))
    return folder


def test_files_are_for_all_models_whichever_came_last(bundle: Path, tmp_path: Path) -> None:
    gpu = built_for(
        bundle,
        tmp_path / "gpu",
        versions={"onnx": "1.19", "tensorrt": "10.13.3.9"},
        gpu_arch="sm90",
    )
    r = tmp_path / "r"
    deploy(gpu, r, name="a_gpu")
    alone = {name: (r / name).read_bytes() for name in ("compose.yaml", "launch.sh")}
    deploy(bundle, r, name="cpu")
    # the GPU, and what containers are called
    assert {name: (r / name).read_bytes() for name in alone} == alone
    assert "allow-gpu-metrics=false" not in (r / "launch.sh").read_text()
    [claim, workload, *_] = yaml.safe_load_all((r / "kubernetes.yaml").read_text())
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    [container] = workload["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "12Gi", "nvidia.com/gpu": "1"}
    pins = re.findall(r'"(\w+)==([\w.]+)"', (r / "Dockerfile").read_text())
    assert dict(pins) == {"tensorrt": "10.13.3.9", "onnxruntime": version("onnxruntime")}


def test_replaced_model_counts_as_what_it_is_now(bundle: Path, tmp_path: Path) -> None:
    gpu = built_for(bundle, tmp_path / "gpu", versions={"tensorrt": "10.13.3.9"})
    deploy(gpu, tmp_path / "r", name="a")
    deploy(bundle, tmp_path / "r", name="a")
    assert "deploy" not in validate_compose(tmp_path / "r/compose.yaml")["services"]["triton"]
    assert "tensorrt" not in (tmp_path / "r/Dockerfile").read_text()
    assert "storage: 1Gi" in (tmp_path / "r/kubernetes.yaml").read_text()


def test_volume_has_room_for_packed_environments(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path, name="a")
    with (tmp_path / "a/env.tar.gz").open("wb") as packed:
        packed.truncate(5 << 30)  # a hole: takes no room here
    deploy(bundle, tmp_path, name="b")
    assert "storage: 7Gi" in (tmp_path / "kubernetes.yaml").read_text()


def test_models_built_with_other_versions_than_the_images_are_told(
    bundle: Path, tmp_path: Path
) -> None:
    for name, torch in (("a", "2.11.0"), ("b", "2.13.0"), ("c", "2.13.0")):
        found = built_for(bundle, tmp_path / name, versions={"torch": torch})
        notes = [
            note for note in deploy(found, tmp_path / "r", name=name).notes if "built with" in note
        ]
        assert len(notes) == (name != "a")
        assert f'"torch=={torch}"' in (tmp_path / "r/Dockerfile").read_text()
    assert notes[0].startswith("a: built with torch 2.11.0, but the image has 2.13.0, of c: ")
    [note] = [
        note for note in deploy(bundle, tmp_path / "r", name="d").notes if "built with" in note
    ]
    assert note.startswith("a: built with torch 2.11.0, but the image has 2.13.0, of c: "), (
        "the last has no torch"
    )
    (tmp_path / "r/a/env.tar.gz").touch()
    assert not any("built with" in note for note in deploy(found, tmp_path / "r", name="c").notes)


def test_checkpoints_of_all_models_are_mounted(bundle: Path, tmp_path: Path) -> None:
    referring = build(tiny_config(), output=tmp_path / "engines", reference_weights=True).path
    deploy(referring, tmp_path / "r", name="a")
    notes = deploy(bundle, tmp_path / "r", name="b").notes
    assert not (tmp_path / "r/kubernetes.yaml").exists()
    assert any(note.startswith("a: refers to its checkpoints") for note in notes)
    assert (
        f"{DRAFT}:{DRAFT}:ro"
        in validate_compose(tmp_path / "r/compose.yaml")["services"]["triton"]["volumes"]
    )


def test_versions_from_no_index_are_pinned_without_their_build(
    bundle: Path, tmp_path: Path
) -> None:
    found = built_for(bundle, tmp_path / "gpu", versions={"torch": "2.11.0+cu130"})
    deploy(found, tmp_path / "r")
    assert '"torch==2.11.0"' in (tmp_path / "r/Dockerfile").read_text()


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (
            {"versions": {"tensorrt": "10.9.0.34"}, "gpu_arch": "sm90"},
            r"TensorRT 10\.9\.0\.34, but a for 10\.13\.3\.9",
        ),
        (
            {"versions": {"tensorrt": "10.13.3.9"}, "gpu_arch": "sm86"},
            "GPU architecture sm86, but a for sm90",
        ),
    ],
)
def test_engines_that_no_one_server_runs_are_kept_apart(
    bundle: Path, tmp_path: Path, other: dict[str, Any], what: str
) -> None:
    first = built_for(
        bundle, tmp_path / "first", versions={"tensorrt": "10.13.3.9"}, gpu_arch="sm90"
    )
    second = built_for(bundle, tmp_path / "second", **other)
    deploy(first, tmp_path / "r", name="a")
    before = (tmp_path / "r/Dockerfile").read_bytes()
    with pytest.raises(UserError, match=f"b: built for {what}"):
        deploy(second, tmp_path / "r", name="b")
    assert not (tmp_path / "r/b").exists()
    assert (tmp_path / "r/Dockerfile").read_bytes() == before
    deploy(second, tmp_path / "r", name="a")  # instead of the first, not beside it


def test_model_that_cannot_be_read_is_told(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path, name="a")
    record = tmp_path / "a/1/bundle" / BUNDLE_FILE
    record.unlink()  # it may be a hard link to the bundle's own
    record.write_text("{}")
    notes = deploy(bundle, tmp_path, name="b").notes
    assert any(note.startswith("a: left out of the launch files: ") for note in notes)
    assert "storage: 1Gi" in (tmp_path / "kubernetes.yaml").read_text()


def test_dockerfile_installs_the_wheel_beside_it_and_says_when_it_is_missing(
    bundle: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "r"
    note = next(note for note in deploy(bundle, repository).notes if "Dockerfile" in note)
    assert f"pip wheel --no-deps -w {repository} {shlex.quote(str(ROOT))}" in note
    text = (repository / "Dockerfile").read_text().replace("\\\n", "")
    [run] = re.findall(r"^RUN (.+)$", text, re.MULTILINE)
    assert f"COPY Dockerfile {WHEEL.partition('-py3')[0]}-*.whl /tmp/wheels/" in text
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin/pip").chmod(0o755)
    command = ["sh", "-c", run.replace("/tmp/wheels", str(repository))]
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "beside the Dockerfile: pip wheel --no-deps -w . " in done.stderr
    (repository / WHEEL).touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:3] == [
        "install",
        "--no-cache-dir",
        f"{repository / WHEEL}[video]",
    ]
    assert not any("Dockerfile" in note for note in deploy(bundle, repository).notes)


def launch(repository: Path, environment: Path) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": "/usr/bin:/bin", "TRT_EAGLE3_ENV": str(environment)}
    return subprocess.run(
        [repository / "launch.sh"], env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(
    shutil.which("tritonserver", path="/usr/bin:/bin") is not None, reason="there is a server"
)
def test_launching_without_a_server_says_how_to_get_one(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path / "r")
    target = re.search(r"^TRITON_READY := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target
    site, bin_ = tmp_path / "site", tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python3").write_text(f"#!/bin/sh\necho 3.11 2.3.1 {site} /lib\n")
    (bin_ / "python3").chmod(0o755)
    without = launch(tmp_path / "r", tmp_path)
    for file in ("bin/tritonserver", "python_backend_stubs/3.11/triton_python_backend_stub"):
        path = site / "pytriton/tritonserver" / file
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    with_new_numpy = launch(tmp_path / "r", tmp_path)
    for done, why in ((without, "no nvidia-pytriton in"), (with_new_numpy, "needs numpy<2")):
        assert done.returncode == 3
        assert why in done.stderr
        assert (
            f"make {target[1]}, then TRT_EAGLE3_ENV={Path(target[1]).parent} {tmp_path}/r/launch.sh"
            in done.stderr
        )
        assert (
            "pip install 'numpy<2' 'ml_dtypes<0.6', then pip install --no-deps "
            "nvidia-pytriton==0.7.0" in done.stderr
        )


def test_next_command_gets_a_server_first_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TRITONSERVER", raising=False)
    monkeypatch.setattr("trt_eagle3.triton.launchers.find_spec", lambda _: None)
    checkout, script = shlex.quote(str(ROOT)), f"{tmp_path}/my models/launch.sh"
    expected = (
        f"make -C {checkout} .venv-triton/.ready && TRT_EAGLE3_ENV={checkout}/.venv-triton "
        f"'{script}'"
    )
    assert start_command(tmp_path / "my models") == expected
    monkeypatch.setenv("TRITONSERVER", sys.executable)
    assert start_command(tmp_path / "my models") == f"'{script}'"
    monkeypatch.delenv("TRITONSERVER")
    monkeypatch.setattr(
        "trt_eagle3.triton.launchers.__file__",
        str(tmp_path / "site/trt_eagle3/triton/launchers.py"),
    )
    assert start_command(tmp_path / "my models") == f"'{script}'"
