"""What is not a draft of this target is refused in one line that names the thing, what was
found, and the fix.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.drafts import (
    Geometry,
    target_spec,
    write_angelslim_draft,
    write_generic_draft,
    write_modelopt_draft,
    write_safeailab_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.errors import UserError

Change = Callable[[dict[str, Any]], object]


def _config(folder: Path, change: Change) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def _tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _refusal(folder: Path, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        read_draft(folder, target_spec(), overrides, cache=folder.parent / "cache")
    message = str(caught.value)
    assert "\n" not in message
    return message


OTHERS: dict[str, tuple[Change, Change, str]] = {
    "P-EAGLE": (lambda c: c.update(architectures=["PEagleDraftModel"]), lambda t: t, "P-EAGLE"),
    "P-EAGLE of speculators": (
        lambda c: c.update(speculators_model_type="peagle"),
        lambda t: t,
        "P-EAGLE",
    ),
    "P-EAGLE by tensor": (
        lambda c: c,
        lambda t: t.update(mask_hidden=torch.ones(1)),
        "P-EAGLE: mask_token_id: not in config.json",
    ),
    "DFlash": (lambda c: c.update(architectures=["DFlashDraftModel"]), lambda t: t, "DFlash"),
    "DFlash by config": (
        lambda c: c.update(dflash_config={"mask_token_id": 1}),
        lambda t: t,
        "DFlash",
    ),
    "DSpark": (lambda c: c.update(architectures=["DSparkDraftModel"]), lambda t: t, "DSpark"),
    "Domino": (lambda c: c.update(architectures=["DominoDraftModel"]), lambda t: t, "Domino"),
    "EAGLE-1": (
        lambda c: c.update(architectures=["LlamaForCausalLMEagle"]),
        lambda t: t,
        "EAGLE-1/2",
    ),
    "EAGLE-1 of speculators": (
        lambda c: c.update(speculators_model_type="eagle"),
        lambda t: t,
        "EAGLE-1/2",
    ),
    "EAGLE-1 of ModelOpt": (
        lambda c: c.update(eagle_config={"use_aux_hidden_state": False}),
        lambda t: t,
        "EAGLE-1/2",
    ),
    "EAGLE-1 by tensors": (
        lambda c: c,
        lambda t: t.update(
            {
                "fc.weight": torch.ones(32, 64),
                "midlayer.self_attn.q_proj.weight": torch.ones(64, 32),
            }
        ),
        "EAGLE-1/2 .*takes an embedding and one hidden state",
    ),
    "Medusa": (lambda c: c.update(architectures=["MedusaModel"]), lambda t: t, "Medusa"),
    "Medusa by tensor": (
        lambda c: c,
        lambda t: t.update({"0.0.linear.weight": torch.ones(1)}),
        "Medusa",
    ),
    "parallel heads": (
        lambda c: c.update(eagle_config={"parallel_draft_step": 4}),
        lambda t: t,
        "parallel drafting",
    ),
    "latent attention": (
        lambda c: c.update(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        lambda t: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}),
        "latent attention",
    ),
    "adapter": (
        lambda c: c,
        lambda t: t.update({"x.lora_A.weight": torch.ones(1)}),
        "adapters on its target",
    ),
    "FP8": (
        lambda c: c.update(quantization_config={"quant_method": "fp8"}),
        lambda t: t,
        "quantised.*fp8",
    ),
    "compressed": (
        lambda c: c.update(compression_config={"quant_algo": "FP8"}),
        lambda t: t,
        "quantised.*FP8",
    ),
    "FP8 by scale": (
        lambda c: c,
        lambda t: t.update({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}),
        "quantised.*weight_scale",
    ),
    "FP8 cache": (
        lambda c: c,
        lambda t: t.update({"midlayer.self_attn.k_proj.k_scale": torch.ones(())}),
        "quantised.*k_scale",
    ),
    "another speculator": (
        lambda c: c.update(speculators_model_type="independent"),
        lambda t: t,
        "a speculator of another kind .*independent",
    ),
    "integers": (
        lambda c: c,
        lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int8)}),
        "quantised.*I8",
    ),
    "a whole model": (
        lambda c: c.update(architectures=["Qwen3ForCausalLM"]),
        lambda t: t.pop("fc.weight"),
        "not an EAGLE-3 draft: fc.weight missing .*Qwen3ForCausalLM",
    ),
    "no architecture": (
        lambda c: c.pop("architectures"),
        lambda t: t.pop("norm.weight"),
        "norm.weight missing",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_drafter_is_recognised(case: str, tmp_path: Path) -> None:
    config, tensors, message = OTHERS[case]
    write_specforge_draft(tmp_path)
    _config(tmp_path, config)
    _tensors(tmp_path, tensors)
    assert re.search(message, _refusal(tmp_path))


def test_quantised_modelopt_draft_is_refused(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "hf_quant_config.json" in _refusal(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "hf_quant_config.json: NVFP4" in _refusal(tmp_path)
    _config(
        tmp_path,
        lambda c: c.update(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}),
    )
    assert "quantization_config: modelopt FP8" in _refusal(tmp_path)


@pytest.mark.parametrize(
    ("geometry", "options", "said"),
    [
        (
            Geometry(hidden=48, target_hidden=48),
            {},
            ["hidden size 48 (fc.weight [48, 144]", "target's is 32"],
        ),
        (Geometry(vocab=128), {}, ["vocabulary of 128", "target's is 96"]),
        (
            Geometry(),
            {"aux": [1, 3, 40]},
            ["aux layer 40", "eagle_aux_hidden_state_layer_ids", "layers 0 to 7"],
        ),
        (
            Geometry(hidden=48),
            {},
            ["embed_tokens.weight is missing", "32 columns", "hidden size is 48"],
        ),
        (
            Geometry(num_aux=2),
            {"aux": [1, 3, 4]},
            ["fc.weight [32, 64]", "3 aux states", "draft.overrides.aux_layers"],
        ),
    ],
)
def test_a_draft_of_another_target_is_refused(
    geometry: Geometry, options: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    write_specforge_draft(tmp_path, geometry, **options)
    message = _refusal(tmp_path)
    assert all(part in message for part in said), message


def test_the_embedding_state_is_out_of_range(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path, aux=[0, 2, 4])
    assert "aux layer -1 (eagle_aux_hidden_state_layer_ids [0, 2, 4], states" in _refusal(tmp_path)
    with pytest.raises(UserError, match="aux layer -1"):
        read_draft(tmp_path, None)


CONFLICTS: dict[str, tuple[Change, list[str]]] = {
    "ids in two places": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        ["aux_layers: eagle_config.", "(1, 3, 4)", "(2, 3, 4)", "draft.overrides.aux_layers"],
    ),
    "an id twice": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 1, 4]),
        ["twice"],
    ),
    "hidden size": (
        lambda c: c.update(hidden_size=64),
        ["hidden_size", "fc.weight has 32", "has 64"],
    ),
    "inner size": (
        lambda c: c.update(intermediate_size=64),
        ["gate_proj.weight has 48", "has 64"],
    ),
    "target's width": (
        lambda c: c.update(target_hidden_size=64),
        ["target_hidden_size", "has 32", "has 64"],
    ),
    "vocabulary": (lambda c: c.update(vocab_size=97), ["vocabulary", "has 97", "t2d has 96"]),
    "draft vocabulary": (
        lambda c: c.update(draft_vocab_size=25),
        ["lm_head.weight has 24", "has 25"],
    ),
    "heads": (
        lambda c: c.update(num_attention_heads=5),
        ["5 heads", "q_proj's 64", "draft.overrides.num_heads"],
    ),
    "head_dim": (lambda c: c.update(head_dim=8), ["head_dim 8", "q_proj's 64"]),
    "theta": (
        lambda c: c.update(rope_theta=1e4),
        ["rope_theta", "5000000.0 by rope_parameters", "10000.0 by"],
    ),
    "rope kind": (
        lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ["rope_type: default by rope_parameters, linear by rope_scaling", "draft.overrides.rope"],
    ),
    "fc_norm": (lambda c: c.update(fc_norm=True), ["fc_norm is True in config.json", "absent"]),
    "activation": (lambda c: c.update(hidden_act="gelu"), ["hidden_act", "silu", "'gelu'"]),
    "sliding window": (
        lambda c: c.update(layer_types=["sliding_attention"]),
        ["layer_types", "sliding_attention"],
    ),
    "no final norm": (
        lambda c: c.update(norm_output=False),
        ["norm_output is false", "draft.overrides.feedback"],
    ),
    "no heads": (
        lambda c: c.pop("num_attention_heads"),
        ["num_attention_heads", "draft.overrides.num_heads"],
    ),
    "mrope without sections": (
        lambda c: (c.pop("rope_parameters"), c.update(rope_scaling={"rope_type": "mrope"})),
        ["mrope_section is missing"],
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_config_that_contradicts_itself_or_its_tensors_is_refused(
    case: str, tmp_path: Path
) -> None:
    change, said = CONFLICTS[case]
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    _config(tmp_path, change)
    message = _refusal(tmp_path)
    assert str(tmp_path) in message
    assert all(part in message for part in said), message


TENSORS: dict[str, tuple[Change, str]] = {
    "fc": (lambda t: t.pop("fc.weight"), "fc.weight missing"),
    "attention": (
        lambda t: t.pop("midlayer.self_attn.v_proj.weight"),
        "layers.0.self_attn.v_proj.weight missing",
    ),
    "key projection": (
        lambda t: t.pop("midlayer.self_attn.k_proj.weight"),
        "k_proj.weight is missing",
    ),
    "gate": (lambda t: t.pop("midlayer.mlp.gate_proj.weight"), "gate_proj.weight is missing"),
    "norm": (lambda t: t.pop("midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight missing"),
    "head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight missing"),
    "half of the norms": (
        lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}),
        "fc_norm.1.weight, fc_norm.2",
    ),
    "one bias": (
        lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(64)}),
        "k_proj.bias",
    ),
    "surplus": (lambda t: t.update(stray=torch.ones(1)), "stray surplus"),
    "misshapen": (
        lambda t: t.update({"norm.weight": torch.ones(3)}),
        "norm.weight: expected shape [32]",
    ),
    "a vector as fc": (
        lambda t: t.update({"fc.weight": torch.ones(32)}),
        "fc.weight: expected a matrix, got shape [32]",
    ),
    "a lone number": (
        lambda t: t.update({"midlayer.mlp.gate_proj.weight": torch.ones(())}),
        "midlayer.mlp.gate_proj.weight: expected a dimension or more, got shape []",
    ),
    "a lone number as d2t": (
        lambda t: t.update({"d2t": torch.ones(())}),
        "d2t: expected a dimension or more",
    ),
    "narrow attention": (
        lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(64, 32)}),
        "q_proj.weight: expected shape [64, 64]",
    ),
    "double": (
        lambda t: t.update({"norm.weight": torch.ones(32).double()}),
        "norm.weight: expected float32, float16",
    ),
    "a gap of layers": (
        lambda t: t.update({"layers.2.input_layernorm.weight": torch.ones(32)}),
        "consecutive",
    ),
    "one name twice": (
        lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(48, 32)}),
        "under two names",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_make_a_draft_are_refused(case: str, tmp_path: Path) -> None:
    change, message = TENSORS[case]
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    _tensors(tmp_path, change)
    assert message in _refusal(tmp_path)


def test_a_full_vocabulary_head_may_be_the_targets_but_a_reduced_one_may_not(
    tmp_path: Path,
) -> None:
    write_modelopt_draft(tmp_path)
    _tensors(tmp_path, lambda t: (t.pop("lm_head.weight"), t.pop("d2t")))
    assert "d2t is missing: 24 draft ids cannot be mapped to a vocabulary of 96" in _refusal(
        tmp_path
    )


def test_without_a_target_the_default_aux_layers_are_unknown(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path)
    with pytest.raises(UserError, match=r"Name the target, or set draft\.overrides\.aux_layers"):
        read_draft(tmp_path, None)


class _Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.touch, (Path("exploded"),))  # type: ignore[return-value]


def test_a_pickle_that_runs_code_is_refused_unrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_safeailab_draft(tmp_path / "draft")
    torch.save(
        {"fc.weight": torch.ones(1), "bomb": _Bomb()}, tmp_path / "draft" / "pytorch_model.bin"
    )
    assert "holds more than tensors" in _refusal(tmp_path / "draft")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 cut short", pickle.dumps([1, 2], protocol=2)]
)
def test_a_broken_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    write_safeailab_draft(tmp_path / "draft")
    (tmp_path / "draft" / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin" in _refusal(tmp_path / "draft")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fc.weight", torch.eye(3).to_sparse()),
        ("fc.weight", torch.ones(3, device="meta")),
        ("fc.weight", torch.ones(3, dtype=torch.float8_e4m3fn)),
        ("fc.weight", torch.ones(3, dtype=torch.complex64)),
        (3, torch.ones(3)),
    ],
    ids=["sparse", "meta", "fp8", "complex", "number as name"],
)
def test_a_pickle_of_odd_tensors_is_refused(
    name: Any, tensor: torch.Tensor, legacy: bool, tmp_path: Path
) -> None:
    write_safeailab_draft(tmp_path / "draft")
    file = tmp_path / "draft" / "pytorch_model.bin"
    torch.save(
        {"norm.weight": torch.ones(2), name: tensor},
        file,
        _use_new_zipfile_serialization=not legacy,
    )
    assert "pytorch_model.bin: " in _refusal(tmp_path / "draft")


def _deflated(file: Path) -> None:
    stored = file.with_name("stored")
    file.rename(stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record))


def _bomb(file: Path) -> None:
    """A pickle of two million lists, in a sound archive."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02(" + b"]" * 2_000_000 + b"l.")
        archive.writestr("archive/version", "3")


PICKLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one number repeated": (
        lambda f: torch.save({"fc.weight": torch.ones(1).expand(1 << 40)}, f),
        "claims 4398046511104 bytes, 4 are stored",
    ),
    "one number repeated, old format": (
        lambda f: torch.save(
            {"fc.weight": torch.ones(1).expand(1 << 40)}, f, _use_new_zipfile_serialization=False
        ),
        "claims 4398046511104 bytes, 4 are stored",
    ),
    "one storage a thousand times": (
        lambda f: torch.save(dict.fromkeys(map(str, range(1000)), torch.ones(9999)), f),
        "its tensors claim 39996000 bytes",
    ),
    "compressed": (
        lambda f: (torch.save({"fc.weight": torch.ones(9999)}, f), _deflated(f)),
        "is compressed",
    ),
    "endless lists": (_bomb, "a pickle of more than 200000 operations"),
    "endless lists, old format": (
        lambda f: f.write_bytes(b"\x80\x02(" + b"]" * 2_000_000 + b"l."),
        "more than 200000",
    ),
    "a long text": (lambda f: f.write_bytes(pickle.dumps("x" * 5_000_000)), "long texts"),
    "FIFO": (lambda f: (f.unlink(), os.mkfifo(f)), "got a FIFO"),
    "device": (lambda f: (f.unlink(), f.symlink_to("/dev/zero")), "got a device"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_a_pickle_that_costs_more_than_it_holds_is_refused_soon(case: str, tmp_path: Path) -> None:
    write, message = PICKLES[case]
    write_safeailab_draft(tmp_path / "draft")
    write(tmp_path / "draft" / "pytorch_model.bin")
    start = time.process_time()
    assert message in _refusal(tmp_path / "draft")
    assert time.process_time() - start < 8


def test_a_pickle_whose_head_is_its_embedding_is_read(tmp_path: Path) -> None:
    write_safeailab_draft(tmp_path / "draft")
    file = tmp_path / "draft" / "pytorch_model.bin"
    weights = torch.load(file)
    torch.save({**weights, "again": weights["lm_head.weight"]}, file)
    assert "again surplus" in _refusal(tmp_path / "draft")


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_safeailab_draft(tmp_path / "draft")
    (tmp_path / "cache").write_text("a file")
    assert "cannot write it" in _refusal(tmp_path / "draft")


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in _refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in _refusal(tmp_path)


class OneLineError(Exception):
    """A refusal as it should be."""


def _read(folder: Path) -> None:
    try:
        read_draft(folder, target_spec())
    except UserError as error:
        raise (OneLineError if "\n" not in str(error) else AssertionError)(str(error)) from error


NONSENSE = [None, "x", -1, 0, 1.5, True, [1, "a"], {"a": 1}, 10**30, float("nan")]


def _paths(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (
            write_specforge_draft,
            {"rope": {"rope_type": "mrope", "mrope_section": [4, 2, 2]}, "aux": [1, 3, 4]},
        ),
        (write_angelslim_draft, {"rope": {"type": "linear", "factor": 2.0}}),
        (write_safeailab_draft, {"binary": False}),
        (write_speculators_draft, {"layers": 2, "style": "qwen3", "aux": [2, 4, 5]}),
        (write_modelopt_draft, {}),
        (write_generic_draft, {}),
    ],
)
def test_nonsense_in_a_config_is_never_a_traceback(
    write: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, **options)
    config = json.loads((tmp_path / "config.json").read_text())
    for path in list(_paths(config)):
        for value in NONSENSE:
            changed = copy.deepcopy(config)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(changed))
            with contextlib.suppress(OneLineError):
                _read(tmp_path)
