"""RunConfig: one run as typed data, read from and written to TOML.

Notable:
- a run's identity is its name and a short hash of every field that changes training, so that peers with
  unlike settings never meet on the DHT;
- what is trained is the run's kind, `[task] kind`: a class each, with its tables beside the common ones;
- what a person got wrong is one line: file, key, value, what is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tt_cli.errors import UsageError
from tt_cli.run import sections, text_parts
from tt_cli.run.toml import parse_toml, toml_value, wrong_value

# Part of every identity: raise it when the same settings come to train differently.
PROTOCOL = 12


class RunConfig(sections.Section):
    """Everything that says what a run is. Frozen; two equal run files give equal objects.

    A subclass is a kind of run: its `kind`, where its task is ("module:Class", see tt_cli.task), the package that has
    what it needs, as pip takes it in a clone of tt's source, prompts for its samples, and tables of its own.
    """

    kind: ClassVar[str]
    task_class: ClassVar[str]
    package: ClassVar[str] = "."
    prompts: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[dict[str, type[RunConfig]]] = {}

    run: sections.RunPart
    data: sections.DataSource
    optimizer: Annotated[
        sections.OptimizerPart | sections.LocalPart,
        Field(discriminator="name"),
        BeforeValidator(lambda part: {"name": "lamb8bit", **part} if isinstance(part, dict) else part),
    ] = Field(default_factory=sections.OptimizerPart)
    schedule: sections.SchedulePart
    swarm: sections.SwarmPart
    membership: sections.MembershipPart = Field(default_factory=sections.MembershipPart)
    checkpoints: sections.CheckpointsPart = Field(default_factory=sections.CheckpointsPart)
    peers: sections.PeersPart = Field(default_factory=sections.PeersPart)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "kind" in vars(cls):
            cls.kinds[cls.kind] = cls

    @classmethod
    def tables(cls) -> list[str]:
        """The names of tables in a run file's order: [run], those of its kind, those that all kinds have."""
        return sorted(cls.model_fields, key=lambda name: (name != "run", name in RunConfig.model_fields))

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """The run, which must be of this kind. Raises UsageError."""
        if not isinstance(run, cls):
            raise UsageError(f"run {run.run.name} is of kind {run.kind}, and this is for runs of kind {cls.kind}")
        return run

    def measures(self) -> dict[str, int]:
        """Measures for people, as far as they are known.

        Layers, dim and heads; text_tokens and image_tokens of an example, vocabulary of both.
        """
        return {}

    def described(self) -> dict[str, str]:
        """Words for people about what is trained: label → value."""
        words, measures = {"kind": self.kind}, self.measures()
        if {"layers", "dim", "heads"} <= measures.keys():
            words["model"] = "{layers} layers of width {dim}, {heads} heads".format_map(measures)
        return words

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, part) for name in self.tables() if (part := getattr(self, name)) is not None)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        most = self.swarm.target_batch_size
        if isinstance(self.optimizer, sections.LocalPart) and (size := self.optimizer.inner_batch) > most:
            raise ValueError(f"optimizer.inner_batch = {size}: must be at most swarm.target_batch_size, {most}")
        return self

    @property
    def sparse(self) -> int:
        """Elements that a message has of each 4,096 of a large tensor; 0: all."""
        return self.optimizer.sparse if self.optimizer.name == "local" else 0

    @property
    def identity(self) -> str:
        """The run's key on the DHT and the name of its folder: "{name}-{8 hex digits}".

        The digits are the first of the SHA-256 of canonical JSON (sorted keys, no spaces, floats as Python's
        shortest repr) over PROTOCOL and every field that changes training.
        """
        fields = {key: value for key, value, trained in self._fields() if trained}
        text = json.dumps({"protocol": PROTOCOL, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return f"{self.run.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def differences(self, other: RunConfig) -> list[str]:
        """Say which fields that change training differ, such as "model.dim: 256 here, 512 there"."""
        own, theirs = ({key: value for key, value, trained in run._fields() if trained} for run in (self, other))
        return [
            f"{key}: {_shown(own.get(key))} here, {_shown(theirs.get(key))} there"
            for key in own | theirs
            if own.get(key) != theirs.get(key)
        ]

    def replaced(self, changes: Mapping[str, Any]) -> Self:
        """Return this run with some fields changed and all checks made again.

        `changes` maps dotted keys to values, or a part's name to all of it: {"run.name": "mine", "data.subset": 200}.
        Raises UsageError.
        """
        content = self.model_dump()
        for key, value in changes.items():
            part, dot, field = key.partition(".")
            if dot:
                content.setdefault(part, {})[field] = value
            else:
                content[part] = value
        return self.of(self._checked(content, f"run {self.run.name}"))

    def to_toml(self) -> str:
        """Return a complete run file; defaults are written out, so a later default changes nothing in it."""
        lines = []
        for name, part in self:
            fields = (f"{field} = {toml_value(value)}" for field, value in part if value is not None)
            lines += [f"[{name}]", *fields, ""]
        return "\n".join(lines)

    @classmethod
    def from_toml(cls, text: str, origin: str) -> RunConfig:
        """Read a run file's text; `origin` names it in errors. Raises UsageError."""
        return cls._checked(parse_toml(text, origin), origin)

    @classmethod
    def _checked(cls, content: dict[str, Any], origin: str) -> RunConfig:
        task = content.get("task", {"kind": DalleRun.kind})
        given = task.get("kind") if isinstance(task, dict) else task
        kind = next((kind for name, kind in cls.kinds.items() if name == given), None)
        if kind is None:
            raise UsageError(f"{origin}: task.kind = {_shown(given)}: must be {' or '.join(cls.kinds)}")
        kind = cls if issubclass(cls, kind) else kind
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            raise wrong_value(kind, error, origin, kind.tables()) from None

    def _fields(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield (dotted key, value, whether it changes training) for every field."""
        for name, part in self:
            for field, value in part:
                trained = type(part).model_fields[field].json_schema_extra is None  # as Untrained() has it
                yield f"{name}.{field}", value + 0.0 if isinstance(value, float) else value, trained


class DalleRun(RunConfig):
    """The run of a text-to-image transformer; the kind of files without [task]."""

    kind = "dalle"
    task_class = "tt_cli.task.dalle_task:DalleTask"
    prompts = (
        "a mountain lake at sunrise",
        "an armchair in the shape of an avocado",
        "a red bicycle leaning against a brick wall",
        "an oil painting of a cat on a window sill",
    )

    model: sections.ModelPart
    tokenizer: sections.TokenizerPart
    vqgan: sections.VqganPart
    data: sections.DataPart

    @model_validator(mode="before")
    @classmethod
    def _default(cls, content: Any) -> Any:
        """The same run with [task] or without."""
        return {name: table for name, table in content.items() if (name, table) != ("task", {"kind": cls.kind})}

    def measures(self) -> dict[str, int]:
        model, vqgan = self.model, self.vqgan
        return {
            "layers": model.depth,
            "dim": model.dim,
            "heads": model.heads,
            "text_tokens": model.text_length,
            "image_tokens": vqgan.grid**2,
            "vocabulary": self.tokenizer.vocab_size + model.text_length + vqgan.codebook_size,
        }

    def described(self) -> dict[str, str]:
        pixels, grid = self.vqgan.pixels, self.vqgan.grid
        return {"model": super().described()["model"], "pictures": f"{pixels} x {pixels}, {grid} x {grid} codes"}


class CausalLmRun(RunConfig):
    """The run of a language model."""

    kind = "causal_lm"
    task_class = "tt_cli.task.causal_lm_task:CausalLmTask"
    package = "'.[lm]'"
    prompts = ("Once upon a time", "It is", "She said that", "The first thing to know is")

    task: text_parts.CausalLmPart
    model: text_parts.LanguageModelPart
    pretrained: text_parts.PretrainedPart | None = None
    lora: text_parts.LoraPart | None = None
    tokenizer: text_parts.TextTokenizerPart
    data: text_parts.TextDataPart

    @model_validator(mode="after")
    def _on_weights(self) -> Self:
        if self.lora is not None and self.pretrained is None:
            raise ValueError("lora: adapters are for weights that are there; add [pretrained]")
        return self

    def measures(self) -> dict[str, int]:
        config, called = json.loads(self.model.config), text_parts.MEASURES
        known = {called[name]: value for name, value in config.items() if name in called and isinstance(value, int)}
        return {**known, "text_tokens": self.model.length}

    def described(self) -> dict[str, str]:
        begins = {} if self.pretrained is None else {"goes on from": self.pretrained.name}
        adapters = {} if self.lora is None else {"trained": f"adapters of rank {self.lora.rank} (LoRA) alone"}
        return super().described() | begins | adapters


def _shown(value: Any) -> str:
    return "unset" if value is None else toml_value(value)
