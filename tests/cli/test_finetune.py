"""A language model of the Hub, from `tt init` to what plain peft and transformers load."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from conftest import Tt
from hub_standin import HubStandin
from safetensors.torch import load_file
from testbed.pretrained import BASE, published_model
from testbed.spawned import python, spawned

from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.cli.main import main
from tt_cli.draw.writing import Writer
from tt_cli.errors import TTError
from tt_cli.organise.text_run import text_run
from tt_cli.run import CausalLmRun, load_run
from tt_cli.task import task_of
from tt_cli.task.causal_lm_task import CausalLmTask
from tt_cli.task.task import trained

pytestmark = pytest.mark.slow
TEMPLATE = """\
{% for one in messages %}{{ one.role }}: {{ one.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
MODEL = ["--task", "causal-lm", "--model", BASE]
PLAIN = """\
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
save_file({"logits": model(torch.arange(1, 9)[None]).logits.detach()}, "plain.safetensors")
assert not any(name.startswith("tt_cli") for name in sys.modules)
"""


def typed(folder: str, arguments: list[str], stdin: str = "") -> tuple[str, str]:
    """In the client's process: standard output and error of `tt` there."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.stdin", io.StringIO(stdin))
        main(arguments)
    return out.getvalue(), err.getvalue()


def changed(folder: str) -> tuple[int, list[list[float]]]:
    """In the client's process: write a checkpoint whose trained weights have moved; their number, and its logits."""
    run = load_run(f"{folder}/tuned/run.toml")
    task = task_of(run)
    model = task.new_model().eval()
    with torch.no_grad():
        for number, parameter in enumerate(trained(model).values()):
            parameter.add_(0.01 * (1 + number % 3))
        logits = model(input_ids=torch.arange(1, 9)[None]).logits[0].tolist()
    parameters = {name: parameter.detach() for name, parameter in trained(model).items()}
    save(Path(folder, "own"), TrainingState(7, parameters, {}, run.to_toml(), run.identity), keep=10)
    return sum(parameter.numel() for parameter in parameters.values()), logits


def prompts(folder: str) -> list[str]:
    """In the client's process: the prompt for what comes next in a conversation of one line, and in one of many."""
    run = load_run(f"{folder}/tuned/run.toml")
    writer, said = Writer(task_of(run).unfilled_model("meta"), CausalLmTask(run)), [{"role": "user", "content": "Hi"}]
    first = writer.conversation(said)
    assert len(said) == 1
    many = [{"role": ("user", "assistant")[number % 2], "content": f"{number} " + 20 * "x"} for number in range(41)]
    return [first, writer.conversation(many)]


def refused(_: str) -> str:
    """In the client's process: the error with which a run that would go on from BASE is refused."""
    try:
        text_run.__wrapped__(BASE, False, "austen")
    except TTError as error:
        return f"{error.exit_code} {error}"
    return "taken"


def first_weights(digest: str) -> str:
    """In the client's process: begin a run that trains all of BASE, with this digest in its run file or its own."""
    run = CausalLmRun.of(text_run.__wrapped__(BASE, False, "austen"))
    assert run.pretrained is not None
    run = run.replaced({"pretrained.digest": digest or run.pretrained.digest})
    try:
        return f"{sum(parameter.numel() for parameter in trained(task_of(run).new_model()).values())}"
    except TTError as error:
        return f"{error.exit_code} {error}"


def test_from_init_to_what_peft_loads(tt: Tt, hub: HubStandin, tmp_path: Path) -> None:
    hub.put("model", BASE, published_model(tmp_path / "base") | {"chat_template.jinja": TEMPLATE.encode()})
    (tmp_path / "train.txt").write_text("It is a truth universally acknowledged. " * 400)
    env = hub.environment(tmp_path)
    made = tt("init", "tuned", "--yes", *MODEL, "--lora", "--data", str(tmp_path), env=env)
    assert (made.returncode, made.stderr) == (0, "")
    run = CausalLmRun.of(load_run(str(tmp_path / "tuned" / "run.toml")))
    assert run.pretrained is not None and run.lora is not None and run.model.length == 256
    assert run.pretrained.name == BASE and run.tokenizer.revision == run.pretrained.revision

    env["HF_HOME"] = str(tmp_path / "volunteer")  # where nothing is yet
    with spawned(env) as call:
        checked, _ = call(typed, str(tmp_path), ["check", "tuned/run.toml", "--json"]).result(240)
        count, logits = call(changed, str(tmp_path)).result(240)
        first, many = call(prompts, str(tmp_path)).result(240)
        flags = ["--chat", "--tokens", "3", "--seed", "5", "--json"]
        infer = ["infer", "--run", "tuned/run.toml", "--checkpoint", "own", *flags]
        talk, _ = call(typed, str(tmp_path), infer, "Hi\n\nAnd you?\n").result(240)
        convert = ["convert", "own/step-00000007.safetensors", "model", "--to", "published"]
        converted, errors = call(typed, str(tmp_path), convert).result(240)
    verdicts = {check["name"]: check["verdict"] for check in json.loads(checked)["checks"]}
    for name in ("data", "model", "lines", "step"):
        assert verdicts[name] == "pass", checked
    assert first == "user: Hi\nassistant: " and many.endswith("user: 40 xxxxxxxxxxxxxxxxxxxx\nassistant: ")
    assert many.startswith("user: ") and "user: 0 " not in many, "the beginning has no place"
    assert count == 16 * 2 * (4 * 32 + 3 * (32 + 64) + 2 * (32 + 16))  # of rank 16, in two layers
    told = json.loads(talk)
    assert [text["prompt"] for text in told["texts"]] == ["Hi", "And you?"] and told["step"] == 7
    assert converted.startswith("Wrote adapters of 16,384 parameters"), errors
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_model.safetensors", "tokenizer.json"} <= files and "README.md" not in files
    python(PLAIN, env=env, cwd=tmp_path).check_returncode()
    theirs = load_file(tmp_path / "plain.safetensors")["logits"][0]
    torch.testing.assert_close(torch.tensor(logits), theirs, rtol=0, atol=1e-5)


def test_what_cannot_be_gone_on_from_is_one_line(hub: HubStandin, tmp_path: Path) -> None:
    files = published_model(tmp_path / "base")
    config = json.loads(files["config.json"])
    with spawned(hub.environment(tmp_path)) as call:
        assert "the Hub has no such repository" in call(refused, "").result(240)
        for changes, words in (
            ({"model.safetensors": b"", "pytorch_model.bin": b"\x80"}, "has no model.safetensors; other files of"),
            ({"config.json": json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}})}, "auto_map: a configura"),
            ({"config.json": json.dumps(config | {"eos_token_id": None})}, "names no token that ends a text"),
            ({"config.json": "[]"}, "its config.json is not what transformers writes"),
            ({"model.safetensors": files["model.safetensors"][:999]}, "its weights cannot be read"),
        ):
            hub.put("model", BASE, {name: content for name, content in {**files, **changes}.items() if content})
            error = call(refused, "").result(240)
            assert error[:2] in ("1 ", "2 ") and words in error and "\n" not in error, error
        hub.put("model", BASE, files)
        assert call(first_weights, "").result(240) == "34976"
        error = call(first_weights, "0" * 64).result(240)
        assert error.startswith(f"1 {BASE}: its weights are not the run's, their digest is ")
