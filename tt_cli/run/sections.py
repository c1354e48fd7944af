"""The parts of a run file, one class for each table of the TOML.

A field changes training unless it is declared with `Untrained(...)`: peers whose training fields differ can
never meet (see `RunConfig.identity`); the other fields each peer may set as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticUndefined

from tt_cli.identity.multiaddr import check_multiaddr
from tt_cli.identity.passes import authority_keys

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PLACE = re.compile(rf"({HUB_NAME.pattern})(?:@([\w./-]{{1,100}}))?")  # OWNER/NAME or OWNER/NAME@REVISION


def Untrained(default: Any = PydanticUndefined, **limits: Any) -> Any:
    """Declare a field that does not change training and so is no part of the run's identity."""
    return Field(default, json_schema_extra={"training": False}, **limits)


class Section(BaseModel):
    """The rules of all parts: unknown keys are errors, TOML's types count, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def fitting(fits: Callable[[Any], object], otherwise: str) -> Callable[[Any], Any]:
    """A check that takes a value that `fits` as it is. otherwise: what its ValueError says."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(otherwise)
        return value

    return check


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:  # an IPv6 address without its end
        return False
    return parts.scheme in ("https", "http") and bool(parts.hostname) and not (parts.fragment or parts.username)


def _address(url: str) -> str:
    if not _is_url(url) or "?" in url:
        raise ValueError('must be an address such as "https://passes.example.org"')
    return url.rstrip("/")


def _location(place: str) -> str:
    if "://" in place and not _is_url(place):
        raise ValueError('must be a folder, or an address such as "https://data.example.org/codes"')
    if not place.strip():
        raise ValueError("must be a folder, or an http(s) address")
    return place


def is_plain_http(url: str) -> bool:
    """True for an http:// address of another machine: whoever is on the way reads and changes what it answers."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not re.fullmatch(r"localhost|::1|127(\.\d{1,3}){3}", parts.hostname or "")


def _check_http(name: str, url: str | None, allowed: bool) -> None:
    if url is not None and not allowed and is_plain_http(url):
        why = "others on the way could read and change what it answers"
        raise ValueError(f'{name} = "{url}": {why}; use https, or write allow_http = true')


AttentionType = Literal["axial_row", "axial_col", "conv_like"]
Multiaddr = Annotated[str, AfterValidator(check_multiaddr)]
Text = Annotated[str, Field(min_length=1)]
_run_name = fitting(
    re.compile("[a-z0-9][a-z0-9-]{0,40}").fullmatch, "must be 1 to 41 of a-z, 0-9 and '-', and not start with '-'"
)
RepositoryName = Annotated[
    str, AfterValidator(fitting(HUB_NAME.fullmatch, "must be OWNER/NAME, a repository on the Hugging Face Hub"))
]
_kept = fitting(lambda value: value in range(0, 1025, 4), "must be a multiple of 4 from 0 to 1024")
_odd = fitting(lambda value: value % 2, "must be odd, for the window has a centre")


class RunPart(Section):
    """Name, seed and every field below that is not marked with * are the run's identity: peers whose identities
    differ never meet, so change them before the first peer joins.
    """

    name: Annotated[str, AfterValidator(_run_name)]
    description: str = Untrained("", description="for people")
    seed: int = Field(0, ge=0, lt=2**63, description="of the first weights")


class ModelPart(Section):
    """The decoder, as in Ramesh et al. 2021. `tt check` says what a change takes in memory."""

    dim: int = Field(ge=4)
    depth: int = Field(ge=1, le=4096, description="layers; a GPU's time grows with it")
    heads: int = Field(ge=1)
    dim_head: int = Field(ge=1)
    text_length: int = Field(ge=1, description="tokens of a caption; longer ones are cut")
    reversible: bool = Field(True, description="activations are computed again on the way back instead of kept")
    ff_mult: int = Field(4, ge=1)
    rotary: bool = True
    shift_tokens: bool = True
    shared_layer_groups: int = Field(4, ge=1, description="so many sets of weights, cycled over the layers")
    attention_types: list[AttentionType] = Field(["axial_row", "axial_col", "axial_row", "axial_row"], min_length=1)
    last_attention: AttentionType = "conv_like"
    conv_kernel: Annotated[int, AfterValidator(_odd)] = Field(5, ge=1)
    tied_embeddings: bool = True
    loss_image_weight: float = Field(7.0, gt=0, description="of the picture's codes against the caption's tokens")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.shift_tokens and self.dim % 4:
            raise ValueError(f"dim = {self.dim}: must be a multiple of 4 when shift_tokens = true")
        if self.dim_head % 2 or (self.rotary and self.dim_head < 6):
            raise ValueError(f"dim_head = {self.dim_head}: must be even, and at least 6 when rotary = true")
        types, groups = self.attention_types, self.shared_layer_groups
        for layer in range(groups, self.depth - 1):
            if types[layer % len(types)] != types[(layer % groups) % len(types)]:
                raise ValueError(
                    f"shared_layer_groups = {groups}: layers {layer % groups} and {layer} would share weights but not "
                    f"an attention type; use a multiple of {len(types)}, the length of attention_types"
                )
        return self


class TokenizerSource(Section):
    """The place of a tokenizer."""

    source: Literal["builtin", "hub"]
    name: Text
    revision: Text | None = Field(None, examples=["main"])


class TokenizerPart(TokenizerSource):
    """Captions to ids, 0 … vocab_size - 1. From the Hub: a repository with a tokenizer.json."""

    vocab_size: int = Field(ge=2)
    pad_id: int = Field(1, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.pad_id >= self.vocab_size:
            raise ValueError(f"pad_id = {self.pad_id}: must be below vocab_size, {self.vocab_size}")
        return self


class VqganPart(Section):
    """The VQGAN whose codes are learned; its weights are needed for drawing alone."""

    source: Literal["builtin", "hub"]
    name: Text
    revision: Text | None = Field(None, examples=["main"])
    filename: Text | None = Field(None, examples=["model.safetensors"])  # of the weights in the Hub repository
    codebook_size: int = Field(ge=2, le=2**15)  # codes are stored as int16
    grid: int = Field(ge=1, description="grid * grid codes a picture")
    pixels: int = Field(ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        factor, rest = divmod(self.pixels, self.grid)
        if rest or factor < 1 or factor & (factor - 1):
            raise ValueError(
                f"pixels = {self.pixels}: must be grid, {self.grid}, times a power of two, such as {self.grid * 8}"
            )
        if self.source == "hub" and self.filename is None:
            raise ValueError("filename: missing; a VQGAN from the Hub needs the name of its weights' file")
        return self


class DataSource(Section):
    """The place of examples."""

    source: Literal["builtin", "hub", "files"]
    name: Text
    revision: Text | None = Field(None, examples=["main"])


class DataPart(DataSource):
    """The examples. source = "hub" takes a data set on the Hub, or a folder of shards that every peer has; "files"
    what lies at location, a folder or an http(s) address of shards with an index.
    Columns: caption (text) and code (grid * grid little-endian int16), or code13 (the same, packed).

    The filters apply to all but the built-in data, which were filtered when built. A data set on the Hub may have a
    copy at location, with the same names of shards; each peer may have its own.
    """

    location: Annotated[str, AfterValidator(_location)] | None = Untrained(
        None, description="a copy nearby: a folder or an address", examples=["https://data.example.org/codes"]
    )
    allow_http: bool = Untrained(False, description="location may be an http:// address, unprotected on its way")
    code_column: Literal["code", "code13"] = Untrained(
        "code", description="that `tt data encode` writes; both are read"
    )
    subset: int = Field(0, ge=0, description="0: all; else the first so many, shuffled by the seed")
    shuffle_buffer: int = Field(2048, ge=1, description="examples")
    min_caption_length: int = Field(3, ge=0, description="characters")
    max_aspect_ratio: float = Field(2.0, ge=1)
    nsfw_allowed: list[Text] = ["UNLIKELY"]
    cache_mb: int = Untrained(1024, ge=0, description="10^6 bytes of downloaded shards that a peer keeps on its disk")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.source == "files" and self.location is None:
            raise ValueError('location: missing; source = "files" needs a folder or an http(s) address')
        if self.source == "builtin" and self.location is not None:
            raise ValueError(f'location = "{self.location}": has no meaning with the built-in data')
        if self.source == "hub" and self.location is not None and self.subset:
            raise ValueError('location: a subset of a data set on the Hub is drawn there; set source = "files"')
        _check_http("location", self.location, self.allow_http)
        return self


class OptimizerPart(Section):
    """LAMB with 8-bit moments (You et al. 2020; Dettmers et al. 2022), on the CPU."""

    name: Literal["lamb8bit"] = "lamb8bit"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.96, ge=0, lt=1)
    eps: float = Field(1e-6, gt=1e-38)  # float32 holds no less
    weight_decay: float = Field(0.045, ge=0)
    max_grad_norm: float = Field(4.0, gt=0)
    trust_clamp: float = Field(1e4, gt=0)  # upper limit of a tensor's norm in the trust ratio
    block_size: int = Field(4096, ge=64)  # elements that share one scale
    min_8bit_size: int = Field(65536, ge=0)  # tensors with fewer elements keep 32-bit moments
    delayed: bool = Field(True, description="the step runs beside the next accumulation")


class LocalPart(Section):
    """Local steps (DiLoCo, Douillard et al. 2023): each peer steps by itself, and averaged is how far each has come.

    For lines on which a gradient at every step is too much. The peers' own, inner steps have [schedule]'s rate; a
    global, outer step is one of target_batch_size examples, and moves parameters alone: inner moments stay with a peer.
    """

    name: Literal["local"]
    inner: Literal["adamw", "muon"] = Field("adamw", description="adamw; or muon for matrices, and adamw for the rest")
    inner_batch: int = Field(16, ge=1, description="examples of one inner step of a peer")
    sparse: Annotated[int, AfterValidator(_kept)] = Field(
        512, description="elements that a message has of each 4,096 of a large tensor; 0: all of them, in 8 bits"
    )
    outer_lr: float = Field(1.0, gt=0, le=2, description="of the way that peers went on average, what a step takes")
    warmup_steps: int = Field(10, ge=0, description="inner steps until a peer with new moments has the full rate")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=1e-38)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="of an inner step")
    delayed: bool = Field(False, description="inner steps go on beside a round, from parameters one round older")


class SchedulePart(Section):
    """Linear warm-up to peak_lr, then linear decay to 0 at total_steps."""

    total_steps: int = Field(ge=1, description="global steps of all peers together")
    warmup_fraction: float = Field(0.1, ge=0, le=1, description="of total_steps")
    peak_lr: float = Field(gt=0)


class SwarmPart(Section):
    """The averaging of peers. Times are in seconds."""

    target_batch_size: int = Field(ge=1, description="examples of all peers for one step")
    compression: Literal["linear8", "blockwise8"] = Field(
        "linear8", description="linear8, or blockwise8 as in the paper"
    )
    aggregation: Literal["centered_clip", "mean"] = Field(
        "centered_clip", description="centered_clip: a minority cannot move it far; or mean, among your own machines"
    )
    large_tensor: int = Field(65536, ge=1, description="elements from which gradients travel in 8 bits")
    matchmaking_time: float = Untrained(15.0, gt=0, le=600, description="longer for peers far apart")
    averaging_timeout: float = Untrained(120.0, gt=0, le=3600)
    # Peers a few seconds out of phase ban each other when this is as short as matchmaking.
    next_chunk_timeout: float = Untrained(20.0, gt=0, le=600, description="not shorter than matchmaking_time by much")
    statistics_expiration: float = Untrained(600.0, gt=0, le=86400, description="of a peer's published record")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in ("matchmaking_time", "next_chunk_timeout"):
            if (value := getattr(self, key)) >= self.averaging_timeout:
                raise ValueError(f"{key} = {value:g}: must be below averaging_timeout, {self.averaging_timeout:g}")
        return self


class MembershipPart(Section):
    """Membership: anyone, or one organisation on the Hub. `tt authority` issues passes, bans and orders.

    The authority issues the passes that a closed run asks for at every door, and signs bans and orders, which hold in
    an open run too. Without one, only `tt join` itself looks whether its user is a member.
    """

    kind: Literal["open", "organisation"] = Untrained("open", description="open, or organisation")
    organisation: Text | None = Untrained(None, examples=["your-organisation"])
    authority: Annotated[str, AfterValidator(_address)] | None = Untrained(
        None, examples=["https://passes.example.org"]
    )
    allow_http: bool = Untrained(False, description="authority may be an http:// address, unprotected on its way")
    authority_key: Annotated[str, AfterValidator(fitting(authority_keys, "must be a key"))] | None = Untrained(
        None, description="`tt authority init` prints both", examples=["ed25519:…"]
    )
    oauth_client_id: Text | None = Untrained(
        None, description="of your OAuth app on the Hub, for logins without a token", examples=["…"]
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind == "organisation" and self.organisation is None:
            raise ValueError('organisation: missing; kind = "organisation" needs the organisation\'s name')
        if self.kind == "open" and self.organisation is not None:
            meaningless = f'organisation = "{self.organisation}": has no meaning with kind = "open"'
            raise ValueError(f'{meaningless}; write kind = "organisation" or leave it out')
        if (self.authority is None) != (self.authority_key is None):
            missing, there = sorted(("authority", "authority_key"), key=lambda name: getattr(self, name) is not None)
            raise ValueError(f"{missing}: missing; {there} needs it too (`tt authority init` prints both)")
        if self.oauth_client_id is not None and (self.authority is None or self.kind == "open"):
            raise ValueError('oauth_client_id: has no meaning without kind = "organisation" and an authority')
        _check_http("authority", self.authority, self.allow_http)
        return self

    @property
    def closed(self) -> bool:
        """True if every door asks for a pass."""
        return self.kind == "organisation" and self.authority_key is not None


class CheckpointsPart(Section):
    """The organiser's published checkpoints, for those who come when no peer is there."""

    repository: RepositoryName | None = Untrained(
        None, description="a model repository on the Hub", examples=["your-organisation/your-run"]
    )


class PeersPart(Section):
    """The swarm's first addresses: of the aux peers. The id at the end is that of an aux peer's key."""

    initial: list[Multiaddr] = Untrained(default_factory=list)
    coordinator_port: int = Untrained(31337, ge=1, le=65535, description="of an aux peer of this run")

    @property
    def named(self) -> list[str]:
        """The peer ids at the ends of these addresses."""
        return [address.rpartition("/p2p/")[2] for address in self.initial if "/p2p/" in address]
