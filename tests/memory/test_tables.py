"""The tables of a web page: each answer is that of `tt calc`."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from conftest import Tt

from tt_cli.errors import UsageError
from tt_cli.memory.answer_tables import OF_ARCHITECTURES, OF_RUNS, RUN, SIZES, Tables
from tt_cli.memory.question import CalculatorQuestion
from tt_cli.memory.report import report
from tt_cli.run import load_run
from tt_cli.task import task_of

TABLES = Tables(load_run("emoji"), "emoji")
RUNS = {"emoji": TABLES, "words": Tables(load_run("words"), "words", task_of)}


def totals(table: dict[str, Any], key: str, index: int) -> dict[str, int]:
    """Bytes of each component, as the page adds them up."""
    same, *rest = table["answers"][key]
    found: dict[str, int] = {}
    for number, size in [*same, *rest[index]]:
        component = table["components"][number]
        name = f"{component['place']} {component['what']} {component['assumed']}"
        assert name not in found
        found[name] = size
    return found


@pytest.mark.parametrize("model", ["gpt2", "t5-small", "dalle-12b", *RUNS])
def test_every_answer_is_that_of_the_command(model: str) -> None:
    table = RUNS[model].table(RUN) if model in RUNS else TABLES.table(model)
    choices = OF_RUNS if model in RUNS else OF_ARCHITECTURES
    keys = list(product(*(range(len(options)) for _, _, options in choices)))
    assert set(table["answers"]) == set(table["flops"]) == {" ".join(map(str, key)) for key in keys}
    for key in keys:
        asked: dict[str, Any] = {name: options[i][0] for i, (name, _, options) in zip(key, choices, strict=True)}
        asked["optimizer"], asked["bits"] = asked.get("optimizer", (None, None))
        for index in (0, 3):
            found = report(CalculatorQuestion(model, gpu="8GB", micro_batch=SIZES[index], **asked), of=task_of)
            expected = {f"{one.place} {one.what} {one.assumed}": one.bytes for one in found.answer.components}
            assert totals(table, " ".join(map(str, key)), index) == expected
        assert table["flops"][" ".join(map(str, key))] * table["examples"] == found.compute["flops"]


def test_the_flags_ask_the_same(here: Tt) -> None:
    """What the page writes as a command, the command takes, and answers as the table does."""
    table = TABLES.table("gpt2")
    gpu = next(gpu for gpu in table["gpus"] if gpu["flag"] == "8GB")
    for key in ("0 0 0 0", "2 1 1 0", "1 2 2 1", "0 3 1 1"):
        picked = [choice["options"][int(i)]["flag"] for i, choice in zip(key.split(), table["choices"], strict=True)]
        words = " ".join([table["command"], "--gpu", gpu["flag"], *picked, "--micro-batch", "4", "--json"]).split()
        ran = here(*words[1:])
        assert ran.returncode == 0, ran.stderr
        answer: dict[str, Any] = json.loads(ran.stdout)
        found = totals(table, key, SIZES.index(4))
        assert sum(size for name, size in found.items() if name.startswith("device")) == answer["gpu_bytes"]
        assert sum(size for name, size in found.items() if name.startswith("host")) == answer["host_bytes"]
        assert int(table["usable"] * gpu["bytes"]) == answer["usable_bytes"]
        assert 2 * table["gradient_bytes"] * 15 // 16 == answer["network"]["bytes_each_way"]


def test_the_name_of_a_file_is_one_word_of_the_command() -> None:
    assert Tables(load_run("emoji"), "my run.toml").table(RUN)["command"] == "tt calc 'my run.toml'"


def test_a_name_that_is_none_is_refused() -> None:
    for name in ("emoji", "/etc/passwd", "", "gpt2 "):
        with pytest.raises(UsageError, match="no model is called"):
            TABLES.table(name)
