"""RunConfig: what it accepts, what it refuses and how it says so, and its identity."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tt_cli.errors import UsageError
from tt_cli.run import RunConfig, load_run

MINIMAL = """
[run]
name = "small"
[model]
dim = 64
depth = 5
heads = 2
dim_head = 16
text_length = 8
[tokenizer]
source = "builtin"
name = "emoji"
vocab_size = 100
[vqgan]
source = "builtin"
name = "emoji"
codebook_size = 50
grid = 4
pixels = 32
[data]
source = "builtin"
name = "emoji"
[schedule]
total_steps = 10
peak_lr = 0.01
[swarm]
target_batch_size = 16
"""


@pytest.fixture
def small() -> RunConfig:
    return RunConfig.from_toml(MINIMAL, "small.toml")


def test_the_papers_run_is_as_published() -> None:
    run = load_run("dalle")
    model, schedule, optimizer = run.model, run.schedule, run.optimizer
    assert (model.dim, model.depth, model.heads, model.dim_head) == (1024, 64, 16, 64)
    assert model.attention_types == ["axial_row", "axial_col", "axial_row", "axial_row"]
    assert (model.last_attention, model.conv_kernel, model.shared_layer_groups) == ("conv_like", 5, 4)
    assert model.tied_embeddings and model.reversible and model.rotary and model.shift_tokens
    assert (model.text_length, run.vqgan.grid**2, run.vqgan.codebook_size) == (256, 1024, 8192)
    assert (run.tokenizer.name, run.tokenizer.vocab_size, run.tokenizer.pad_id) == ("t5-small", 32100, 1)
    assert (schedule.total_steps, schedule.warmup_fraction, schedule.peak_lr) == (31250, 0.1, 2.5e-3)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.96, 1e-6)
    assert (optimizer.weight_decay, optimizer.max_grad_norm, optimizer.trust_clamp) == (0.045, 4.0, 1e4)
    assert (optimizer.block_size, optimizer.min_8bit_size, optimizer.delayed) == (4096, 65536, True)
    assert (run.swarm.target_batch_size, run.swarm.large_tensor) == (4096, 2**16)
    assert run.data.name == "laion/laion_100m_vqgan_f8"


@pytest.mark.parametrize("name", ["emoji", "dalle"])
def test_written_as_toml_and_read_again_it_is_the_same(name: str) -> None:
    run = load_run(name)
    again = RunConfig.from_toml(run.to_toml(), "again.toml")
    assert again == run
    assert again.identity == run.identity


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_toml(description: str) -> None:
    run = RunConfig.from_toml(MINIMAL, "small.toml").replaced({"run.description": description})
    assert RunConfig.from_toml(run.to_toml(), "again.toml").run.description == description


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_any_number_survives_toml(peak_lr: float) -> None:
    run = RunConfig.from_toml(MINIMAL, "small.toml").replaced({"schedule.peak_lr": peak_lr})
    assert RunConfig.from_toml(run.to_toml(), "again.toml").schedule.peak_lr == peak_lr


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.dim", -3, "model.dim = -3: must be at least 4"),
        ("model.depth", 10**18, "model.depth = 1000000000000000000: must be at most 4096"),
        ("model.dim", "64", 'model.dim = "64": must be a whole number'),
        ("model.dim", 64.5, "model.dim = 64.5: must be a whole number"),
        ("model.dim", True, "model.dim = true: must be a whole number"),
        ("model.dimm", 64, "model.dimm: no such key; did you mean 'dim'?"),
        ("modle.dim", 64, "modle: no such key; did you mean 'model'?"),
        ("run.zzz", 1, "run.zzz: no such key; update tt where the file is of a newer one; allowed are description"),
        ("model.reversible", 1, "model.reversible = 1: must be true or false"),
        ("model.dim", 66, "model.dim = 66: must be a multiple of 4 when shift_tokens = true"),
        ("model.dim_head", 4, "model.dim_head = 4: must be even, and at least 6 when rotary = true"),
        ("model.dim_head", 9, "model.dim_head = 9: must be even, and at least 6 when rotary = true"),
        ("model.conv_kernel", 4, "model.conv_kernel = 4: must be odd, for the window has a centre"),
        ("model.attention_types", [], "model.attention_types = []: must have at least 1 entry"),
        (
            "model.attention_types",
            ["axial_row", "sparse"],
            "model.attention_types[1] = \"sparse\": must be 'axial_row', 'axial_col' or 'conv_like'",
        ),
        ("run.name", "My Run", "run.name = \"My Run\": must be 1 to 41 of a-z, 0-9 and '-', and not start"),
        ("run.name", "../up", 'run.name = "../up": must be 1 to 41 of a-z'),
        ("run.name", 7, 'run.name = 7: must be text in "quotes"'),
        ("tokenizer.source", "disk", "tokenizer.source = \"disk\": must be 'builtin' or 'hub'"),
        ("tokenizer.vocab_size", 1, "tokenizer.vocab_size = 1: must be at least 2"),
        ("tokenizer.pad_id", 100, "tokenizer.pad_id = 100: must be below vocab_size, 100"),
        ("tokenizer.name", "", 'tokenizer.name = "": must not be empty'),
        ("vqgan.codebook_size", 40000, "vqgan.codebook_size = 40000: must be at most 32768"),
        ("vqgan.pixels", 33, "vqgan.pixels = 33: must be grid, 4, times a power of two, such as 32"),
        ("vqgan.pixels", 12, "vqgan.pixels = 12: must be grid, 4, times a power of two, such as 32"),
        ("vqgan.source", "hub", "vqgan.filename: missing; a VQGAN from the Hub needs"),
        ("schedule.warmup_fraction", 1.5, "schedule.warmup_fraction = 1.5: must be at most 1"),
        ("schedule.peak_lr", 0, "schedule.peak_lr = 0: must be above 0"),
        ("schedule.peak_lr", float("nan"), "schedule.peak_lr = nan: must be a finite number"),
        ("schedule.peak_lr", float("inf"), "schedule.peak_lr = inf: must be a finite number"),
        ("optimizer.beta2", 1.0, "optimizer.beta2 = 1.0: must be below 1"),
        ("optimizer.eps", 1e-50, "optimizer.eps = 1e-50: must be above 1e-38"),
        ("optimizer", {"name": "local", "eps": 1e-50}, "optimizer.eps = 1e-50: must be above 1e-38"),
        ("swarm.compression", "zip", "swarm.compression = \"zip\": must be 'linear8' or 'blockwise8'"),
        ("swarm.next_chunk_timeout", 500.0, "swarm.next_chunk_timeout = 500: must be below averaging_timeout, 120"),
        ("membership.kind", "organisation", 'membership.organisation: missing; kind = "organisation" needs'),
        ("membership.organisation", "acme", 'membership.organisation = "acme": has no meaning with kind'),
        ("peers.initial", ["here"], 'peers.initial[0] = "here": is no multiaddr; it looks like /ip4/'),
        ("peers.coordinator_port", 70000, "peers.coordinator_port = 70000: must be at most 65535"),
        ("data", [], "data = []: must be a table"),
        ("optimizer", 5, "optimizer = 5: must be a table"),
        ("optimizer", {"name": "sgd"}, "optimizer.name = \"sgd\": must be 'lamb8bit' or 'local'"),
        ("optimizer", {"beta_1": 0.5}, "optimizer.beta_1: no such key; did you mean 'beta1'?"),
        ("optimizer", {"name": "local", "batch": 2}, "optimizer.batch: no such key; did you mean 'inner_batch'?"),
        ("optimizer", {"name": "local", "inner": "sgd"}, "optimizer.inner = \"sgd\": must be 'adamw' or 'muon'"),
        ("optimizer", {"name": "local", "outer_lr": 0}, "optimizer.outer_lr = 0: must be above 0"),
        (
            "optimizer",
            {"name": "local", "sparse": 62},
            "optimizer.sparse = 62: must be a multiple of 4 from 0 to 1024",
        ),
        (
            "optimizer",
            {"name": "local", "inner_batch": 17},
            "optimizer.inner_batch = 17: must be at most swarm.target_batch_size, 16",
        ),
    ],
)
def test_what_is_wrong_is_one_line(small: RunConfig, key: str, value: Any, said: str) -> None:
    content = small.model_dump(exclude_none=True)
    part, _, field = key.partition(".")
    if field:
        content.setdefault(part, {})[field] = value
    else:
        content[part] = value
    with pytest.raises(UsageError) as error:
        RunConfig._checked(content, "configs/x.toml")
    assert str(error.value).startswith(f"configs/x.toml: {said}")
    assert "\n" not in str(error.value)


def test_a_heads_channels_go_in_pairs_without_rotary_embeddings_too(small: RunConfig) -> None:
    with pytest.raises(UsageError, match="model.dim_head = 7: must be even"):
        small.replaced({"model.rotary": False, "model.dim_head": 7})


def test_missing_keys_are_named_and_counted() -> None:
    with pytest.raises(UsageError, match=r"^x\.toml: model\.dim: missing \(and 4 more\)$"):
        RunConfig.from_toml(MINIMAL.replace("[model]\ndim = 64\ndepth = 5\n", "[model]\n")
                            .replace("total_steps = 10\npeak_lr = 0.01\n", "")
                            .replace("grid = 4\n", ""), "x.toml")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run\n", "x.toml, line 1, column 5: expected ']'"),
        ("[run]\nname = \n", "x.toml, line 2, column 8: invalid value"),
        ("[run]\nname = 'a'\nname = 'b'\n", "x.toml, line 3"),
        ("[run]\nname = 'a", "x.toml, line 2, at the end: expected"),
        ("a = " + "[" * 100_000, "x.toml"),
        ("a = " + "9" * 5_000, "x.toml: a number of more digits than Python reads"),
        (MINIMAL.replace("depth = 5", "depth = 0x" + "f" * 5_000), "x.toml: a number of more digits than Python reads"),
    ],
)
def test_malformed_toml_names_file_line_and_fault(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        RunConfig.from_toml(text, "x.toml")
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_layers_that_share_weights_share_an_attention_type(small: RunConfig) -> None:
    with pytest.raises(UsageError, match=r"shared_layer_groups = 3: layers 0 and 3 would share weights"):
        small.replaced({"model.shared_layer_groups": 3, "model.attention_types": ["axial_row", "axial_col"]})
    small.replaced({"model.shared_layer_groups": 2, "model.attention_types": ["axial_row", "axial_col"]})
    small.replaced({"model.shared_layer_groups": 64})  # no layer shares


# --- identity ---

ANOTHER = {
    "optimizer.inner": "muon",
    "run.name": "other",
    "model.attention_types": ["axial_col"],
    "model.last_attention": "axial_row",
    "model.shared_layer_groups": 8,
    "model.conv_kernel": 7,
    "tokenizer.pad_id": 2,
    "vqgan.grid": 16,
    "vqgan.pixels": 64,
    "swarm.compression": "blockwise8",
    "swarm.aggregation": "mean",
    "data.nsfw_allowed": ["UNSURE"],
    "data.code_column": "code13",
    "checkpoints.repository": "acme/run",
    "peers.initial": ["/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWExamp1e"],
}
CLOSED = {"membership.kind": "organisation", "membership.organisation": "acme"}
KEY = "ed25519:" + "A" * 43
GUARDED = {**CLOSED, "membership.authority": "https://passes.example.org/", "membership.authority_key": KEY}


def changed(run: RunConfig, key: str) -> RunConfig:
    """`run` with another valid value of one field."""
    part, _, field = key.partition(".")
    value = getattr(getattr(run, part), field)
    if key in GUARDED:
        return run.replaced(GUARDED)
    if key == "data.location":  # the built-in data lie in the package
        run = run.replaced({"data.source": "hub"})
    if key == "membership.oauth_client_id":
        return run.replaced({**GUARDED, key: "app"})
    if key in ANOTHER:
        new = ANOTHER[key]
    elif key.endswith(".source"):
        extra = {"vqgan.filename": "weights.safetensors"} if part == "vqgan" else {}
        return run.replaced({key: "hub", **extra})
    elif isinstance(value, bool):
        new = not value
    elif isinstance(value, int):
        new = value * 2 + 4
    elif isinstance(value, float):
        new = value / 2 if value < 1 else value * 1.5
    else:
        new = f"{value or ''}x"
    return run.replaced({key: new})


LOCAL = {
    "run.description",
    "data.location",
    "data.allow_http",
    "data.code_column",
    "data.cache_mb",
    "swarm.matchmaking_time",
    "swarm.averaging_timeout",
    "swarm.next_chunk_timeout",
    "swarm.statistics_expiration",
    "membership.kind",
    "membership.organisation",
    "membership.authority",
    "membership.authority_key",
    "membership.allow_http",
    "membership.oauth_client_id",
    "checkpoints.repository",
    "peers.initial",
    "peers.coordinator_port",
}
ONE_VALUE = {"optimizer.name"}  # with another one it is another part


@pytest.fixture
def stepping_locally(small: RunConfig) -> RunConfig:
    return small.replaced({"optimizer": {"name": "local", "inner_batch": 4, "sparse": 64}})


def test_local_steps_are_another_run_whose_file_says_all(small: RunConfig, stepping_locally: RunConfig) -> None:
    assert stepping_locally.identity != small.identity
    assert RunConfig.from_toml(stepping_locally.to_toml(), "again") == stepping_locally
    assert 'optimizer.name: "lamb8bit" here, "local" there' in small.differences(stepping_locally)
    assert "optimizer.inner_batch: 4 here, unset there" in stepping_locally.differences(small)


@pytest.mark.parametrize("of", ["small", "stepping_locally"])
def test_every_field_that_changes_training_changes_the_identity_and_no_other(
    of: str, request: pytest.FixtureRequest
) -> None:
    small: RunConfig = request.getfixturevalue(of)
    for key, _, _ in small._fields():
        if key in ONE_VALUE:
            continue
        other = changed(small, key)
        assert other != small, key
        if key in LOCAL:
            same = small.replaced({"data.source": other.data.source})
            assert other.identity == same.identity, key
            assert same.differences(other) == [], key
        else:
            assert other.identity != small.identity, key
            assert any(line.startswith(f"{key}: ") for line in small.differences(other)), key


def test_identity_is_the_same_on_every_machine_and_day(small: RunConfig) -> None:
    assert small.identity == "small-31a2ad9c"


def test_identity_does_not_depend_on_how_the_file_is_written(small: RunConfig) -> None:
    tables = tomllib.loads(MINIMAL)
    backwards = RunConfig._checked(dict(reversed(tables.items())), "x")
    assert backwards.identity == small.identity
    whole = MINIMAL.replace("peak_lr = 0.01", "peak_lr = 1")
    assert (
        RunConfig.from_toml(whole, "x").identity
        == RunConfig.from_toml(whole.replace("peak_lr = 1", "peak_lr = 1.0"), "x").identity
    )
    assert RunConfig.from_toml("\ufeff" + whole.replace("\n", "\r\n"), "x") == RunConfig.from_toml(whole, "x")
    zero = small.replaced({"optimizer.weight_decay": 0.0})
    assert zero.identity == small.replaced({"optimizer.weight_decay": -0.0}).identity
    assert zero.identity == small.replaced({"optimizer.weight_decay": 0}).identity


def test_differences_name_both_values(small: RunConfig) -> None:
    other = small.replaced({"model.dim": 512, "data.revision": "v2", "swarm.matchmaking_time": 1.0})
    assert small.differences(other) == ["model.dim: 64 here, 512 there", 'data.revision: unset here, "v2" there']
    assert other.differences(small)[0] == "model.dim: 512 here, 64 there"


def test_a_run_does_not_change(small: RunConfig) -> None:
    with pytest.raises(ValueError, match="frozen"):
        small.model.dim = 8  # type: ignore[misc]


def test_a_run_is_closed_when_an_authority_guards_its_doors(small: RunConfig) -> None:
    assert not small.membership.closed and not small.replaced(CLOSED).membership.closed
    guarded = small.replaced(GUARDED)
    assert guarded.membership.closed
    assert guarded.membership.authority == "https://passes.example.org"
    assert RunConfig.from_toml(guarded.to_toml(), "again") == guarded
    bans_only = {key: GUARDED[key] for key in ("membership.authority", "membership.authority_key")}
    assert not small.replaced(bans_only).membership.closed
    assert small.replaced({**GUARDED, "membership.authority_key": f"{KEY} {KEY} until 2030-01-31"}).membership.closed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"membership.authority": "https://a.org"}, "membership.authority_key: missing; authority needs it too"),
        ({"membership.authority_key": KEY}, "membership.authority: missing; authority_key needs it too"),
        ({**GUARDED, "membership.authority": "ftp://a.org"}, "must be an address such as"),
        ({**GUARDED, "membership.authority": "https://user:pw@a.org"}, "must be an address such as"),
        ({**GUARDED, "membership.authority": "https://[a"}, "must be an address such as"),
        ({**GUARDED, "membership.authority_key": "ed25519:AAA"}, "43 characters of base64url"),
        ({**GUARDED, "membership.authority_key": f"{KEY} {KEY}"}, "while the key changes"),
        ({**GUARDED, "membership.authority_key": f"{KEY} {KEY} until soon"}, "'soon' is no day"),
        ({"membership.oauth_client_id": "x"}, "oauth_client_id: has no meaning without"),
        ({"data.source": "files"}, 'data.location: missing; source = "files" needs a folder or an http'),
        ({"data.location": "/data"}, "has no meaning with the built-in data"),
        ({"data.source": "hub", "data.location": "/data", "data.subset": 5}, "a subset of a data set on the Hub"),
        ({"data.source": "files", "data.location": "ftp://there/x"}, "must be a folder, or an address such as"),
        ({"data.source": "files", "data.location": " "}, "must be a folder"),
        ({"data.cache_mb": -1}, "data.cache_mb = -1"),
        ({"data.code_column": "code12"}, "data.code_column"),
    ],
)
def test_what_does_not_go_together_is_said(small: RunConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        small.replaced(changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_copies_of_the_data_lie_where_each_peer_has_them(small: RunConfig) -> None:
    run = small.replaced({"data.source": "hub", "data.name": "acme/codes"})
    for location in ("/data/codes", "https://data.example.org/codes?key=1", "http://127.0.0.1:8000/index.json"):
        assert run.replaced({"data.location": location}).identity == run.identity


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000/codes", "http://127.evil.org", "HTTP://0.0.0.0", "http://[fd00::1]:80"]
)
def test_plain_http_takes_a_word_of_its_own(small: RunConfig, url: str) -> None:
    for part, changes in (
        ("data", {"data.source": "hub", "data.name": "acme/codes", "data.location": url}),
        ("membership", {"membership.authority": url, "membership.authority_key": KEY}),
    ):
        with pytest.raises(UsageError, match=r" = .*: others on the way could read .*; .* write allow_http = true$"):
            small.replaced(changes)
        assert small.replaced({**changes, f"{part}.allow_http": True}).identity != ""
        for here in ("http://127.0.0.1:80", "http://localhost", "http://[::1]", "http://127.9.0.1"):
            small.replaced({key: here if value == url else value for key, value in changes.items()})


def test_a_file_without_task_trains_dalle() -> None:
    text = load_run("emoji").to_toml()
    named = RunConfig.from_toml(f'[task]\nkind = "dalle"\n\n{text}', "x.toml")
    assert named == load_run("emoji") and named.to_toml() == text and named.identity == load_run("emoji").identity


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ('kind = "dali"', r'task\.kind = "dali": must be dalle'),
        ("kind = 3", r"task\.kind = 3: must be dalle"),
        ("kind = [1979-05-27]", r'task\.kind = \["1979-05-27"\]: must be dalle'),
        ("size = 3", r"task\.kind = unset: must be dalle"),
        ('kind = "dalle"\nsize = 3', r"task: no such key"),
    ],
)
def test_an_unknown_kind_is_named(task: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"^x\.toml: {words}"):
        RunConfig.from_toml(f"[task]\n{task}\n\n{load_run('emoji').to_toml()}", "x.toml")
