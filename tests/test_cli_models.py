"""Model arguments on the command line: weights with a config.json, GGUF files, and Hugging Face Hub models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_files import DECODER

import costgraph as cg
from costgraph.cli import app as cli

pytest.importorskip("typer")
pytest.importorskip("rich")

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **DECODER}
ID = "owner/some-model"


def counted(capsys, *words):
    assert cli.main(["formula", *words, "params", "--preset"]) == 0
    return int(capsys.readouterr().out)


def error_line(capsys, *words):
    assert cli.main(["report", *words]) == 2
    done = capsys.readouterr()
    assert (done.out, done.err.count("\n")) == ("", 1)
    return done.err


@pytest.fixture
def expected():
    return cg.param_count(cg.models.from_config(CONFIG))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "m.GGUF"])
def test_weights_path_loads_config_beside_it(capsys, tmp_path, expected, name):
    path = tmp_path / name
    path.write_bytes(b"never read")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert counted(capsys, str(path)) == expected
    (tmp_path / "config.json").unlink()
    said = error_line(capsys, str(path))
    alone = (
        "begins with b'neve', expected a GGUF file" if name == "m.GGUF" else "expected a config.json in the same folder"
    )
    assert alone in said


def test_every_model_command_accepts_weights(capsys, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    page = str(tmp_path / "page.html")
    for words in (
        ["report", str(path), "B=2", "S=3"],
        ["train", str(path), "B=2", "S=3"],
        ["decode", str(path), "--hardware", "h100-sxm", "S=5", "--values", "1,2"],
        ["explore", str(path), "--out", page, "--views", "forward"],
    ):
        assert cli.main(words) == 0
        assert capsys.readouterr().err == ""


# -- Hugging Face Hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
    """Query with a cache laid out like the Hub client's, without network."""
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "hub" / f"models--{ID.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(cg.__file__).parent.parent)}

    def ask(name, **more):
        words = [sys.executable, "-m", "costgraph", "formula", name, "params", "--preset"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=env | more)
        return done.returncode, done.stdout, done.stderr

    return ask


def test_hub_model_is_read_from_cache(asked, expected):
    assert asked(ID) == (0, f"{expected}\n", "")


def test_uncached_unreachable_hub_model_raises(asked):
    code, out, said = asked("owner/other")
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert said.startswith("costgraph: 'owner/other': no such path, and its config.json cannot be read from the Hub: ")
    assert said.endswith("expected one in the cache or on the network\n")


def test_missing_network_is_tried_once(asked):
    """An unresolvable host (RFC 2606) gives one line; a download would retry five times over half a minute."""
    code, out, said = asked("owner/other", HF_HUB_OFFLINE="0", HF_ENDPOINT="https://hub.invalid")
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert said.startswith(
        "costgraph: 'owner/other': no such path, and its config.json cannot be read from the Hub: Connect"
    )


def test_missing_hub_client_error_names_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in error_line(capsys, ID)


def test_local_path_is_not_looked_up_on_the_hub(capsys, tmp_path, monkeypatch, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "some-model").mkdir(parents=True)
    (tmp_path / "owner" / "some-model" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert counted(capsys, ID) == expected
