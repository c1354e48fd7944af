"""The forms of the answers: described at /openapi.json, and checked by `tt monitor --from`. Times are Unix seconds.

Their numbers and lists are bounded: whoever reads an answer need not believe that it comes from a page.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tt_cli.swarm.records.peer_record import Loss
from tt_cli.swarm.records.snapshot import SwarmNow

MOST_ROWS = 20_000
MAX_TEXT = 300  # characters

Rows = Field(max_length=MOST_ROWS)
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)]
Positive = Annotated[Number, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Words = Annotated[str, Field(max_length=MAX_TEXT)]


class Form(BaseModel):
    """Base of all: nothing is in an answer that is not described."""

    model_config = ConfigDict(extra="forbid")


class Model(Form):
    """Its size; parameters: distinct ones, effective: counted as often as they are used.

    None while unknown, and for what a run of its kind does not have, such as image_tokens.
    """

    parameters: int | None
    effective: int | None
    layers: int | None
    dim: int | None
    heads: int | None
    image_tokens: int | None
    text_tokens: int | None
    vocabulary: int | None


class Membership(Form):
    """The rule by which peers are admitted."""

    kind: str
    organisation: str | None
    authority: str | None


class Join(Form):
    """Ways to join: commands, the multiaddrs of this auxiliary peer, and notebooks as files of this server."""

    commands: list[str]
    peers: list[str]
    notebooks: list[str]


class Run(Form):
    """The run itself. data: the run file's table. run_file: TOML. checkpoints_at: an address.

    described: what is trained, in words, where that is no DALL-E.
    """

    name: str
    identity: str
    title: str
    story: list[str]
    version: str
    total_steps: int
    target_batch_size: int
    model: Model
    data: dict[str, Any]
    membership: Membership
    join: Join
    run_file: str
    checkpoints_at: str | None
    described: dict[str, str] = {}


class Snapshot(SwarmNow):
    """The swarm as it was `age_s` seconds ago: the fields of `tt monitor --json` without the history."""

    age_s: Positive = Field(json_schema_extra={"metric": "tt_snapshot_age_seconds"})


class Columns(Form):
    """Lists of equal length."""

    @model_validator(mode="after")
    def _equal(self) -> Self:
        if len({len(column) for column in vars(self).values() if isinstance(column, list)}) > 1:
            raise ValueError("its columns have unlike lengths")
        return self


class Steps(Columns):
    """Columns of equal length; last_step and total are of all that is recorded."""

    step: Annotated[list[Count], Rows]
    time: Annotated[list[Number], Rows]
    loss: Annotated[list[Loss], Rows]
    peers: Annotated[list[Count], Rows]
    samples_per_second: Annotated[list[Number], Rows]
    last_step: Count
    total: Count


class Activity(Columns):
    """Columns of equal length, a row about every 30 seconds."""

    time: Annotated[list[Number], Rows]
    trainers: Annotated[list[Positive], Rows]
    samples_per_second: Annotated[list[Number], Rows]


class Leader(Form):
    """One user, or one peer without. seconds: of computing, 0 where nobody recorded it. share: of all samples."""

    user: Words
    samples: Count
    seconds: Positive
    peers: Count
    share: Number
    last_seen: Number


class Leaderboard(Form):
    """Contributions, most first."""

    window: str
    rows: Annotated[list[Leader], Rows]


class Peer(Form):
    """One peer that has been seen."""

    peer_id: str
    user: str
    role: str
    device: str
    first_seen: float
    last_seen: float
    samples: int
    seconds: float


class Peers(Form):
    """The latest first."""

    rows: list[Peer]


class Picture(Form):
    """url: relative to the page."""

    prompt: str
    url: str


class Checkpoint(Form):
    """One checkpoint and what was drawn from it."""

    step: int
    time: float
    digest: str
    bytes: int
    url: str | None
    heldout_loss: float | None
    pictures: list[Picture]


class Checkpoints(Form):
    """Newest last."""

    rows: list[Checkpoint]


class Round(Form):
    """One averaging round in words."""

    step: Count
    time: Number
    words: Words


class Rounds(Form):
    """Newest last."""

    rows: Annotated[list[Round], Rows]


class Figure(Form):
    """A number, or a word, with what it counts."""

    label: str
    value: float | int | str | None
    unit: str


class Figures(Form):
    """This run's numbers for each of the five challenges."""

    communication: list[Figure]
    devices: list[Figure]
    memory: list[Figure]
    streaming: list[Figure]
    security: list[Figure]


class ChosenFrom(Form):
    """One of the options. flag: of `tt calc`, empty for what it takes by itself."""

    words: str
    flag: str


class Choices(Form):
    """A choice; the first option is usual."""

    name: str
    title: str
    options: list[ChosenFrom]


class Component(Form):
    """One use of memory. place: "device" or "host"; assumed: never measured."""

    what: str
    place: str
    assumed: bool


class NamedModel(Form):
    """A model that has a table."""

    name: str
    title: str


class NamedGpu(Form):
    """flag: of `tt calc --gpu`. half, full: TFLOP/s of 16 and of 32 bits; null where no card is named."""

    flag: str
    title: str
    bytes: int
    half: float | None
    full: float | None


class Table(Form):
    """All answers for one model. Keys of answers and flops: the numbers of chosen options, such as "0 1 0 0".

    An answer: the components that are the same for all micro-batches, then for each of them the others, each
    [number of the component, bytes]. flops: of one example. gradient_bytes: encoded; n peers send
    2 (n - 1) / n of it each for a global step.
    """

    name: str
    title: str
    command: str
    parameters: int
    sequence: int
    models: list[NamedModel]
    choices: list[Choices]
    micro_batches: list[int]
    components: list[Component]
    answers: dict[str, list[list[tuple[int, int]]]]
    flops: dict[str, int]
    examples: int
    gradient_bytes: int
    usable: float
    gpus: list[NamedGpu]
    utilisation: float


class Part(Form):
    """Last words of a part of the auxiliary peer, and their age."""

    name: str
    words: str
    age_s: float


class Health(Form):
    """status: "ok" or "bad"."""

    status: str
    problems: list[str]
    snapshot_age_s: float | None
    parts: list[Part]
