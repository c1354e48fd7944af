"""The averager without a swarm: what a round is given, and what is refused of a state that another peer sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.streaming import split_for_streaming

from tt_cli.swarm.averager import Averager, RoundResult

STATE = torch.arange(200, dtype=torch.uint8).repeat(1000)
ABOUT = {"epoch": 5, "digest": "aa"}


def plain(tensor: torch.Tensor) -> runtime_pb2.Tensor:
    return NoCompression().compress(tensor, CompressionInfo.from_tensor(tensor))


def messages(*tensors: runtime_pb2.Tensor, about: object = ABOUT) -> list[averaging_pb2.DownloadData]:
    """As hivemind's `rpc_download_state` sends them."""
    parts = [part for one in tensors for part in split_for_streaming(one, 2**14)]
    sent = [averaging_pb2.DownloadData(tensor_part=part) for part in parts]
    sent[0].metadata = MSGPackSerializer.dumps(about)
    return sent


def download(sent: list[averaging_pb2.DownloadData], limit: int = 2**20) -> tuple[Any, torch.Tensor]:
    async def stream() -> AsyncIterator[averaging_pb2.DownloadData]:
        for message in sent:
            yield message

    async def rpc_download_state(_: averaging_pb2.DownloadRequest) -> AsyncIterator[averaging_pb2.DownloadData]:
        return stream()

    averager = SimpleNamespace(
        get_stub=lambda *_, **__: SimpleNamespace(rpc_download_state=rpc_download_state),
        _p2p=None,
        prefix="run",
        next_chunk_timeout=10.0,
        serializer=MSGPackSerializer,
        traffic=torch.zeros(2, dtype=torch.int64),
        max_state_bytes=limit,
    )
    return asyncio.run(Averager._download_from(averager, None)), averager.traffic


def test_a_state_arrives_as_it_was() -> None:
    found, traffic = download(messages(plain(STATE)))
    assert found[0] == ABOUT
    assert torch.equal(found[1], STATE)
    assert traffic.tolist() == [0, len(STATE)]


def test_a_peer_without_a_state_gives_none() -> None:
    assert download([])[0] is None
    nameless = messages(plain(STATE))
    nameless[0].metadata = b""
    assert download(nameless)[0] is None
    assert download(messages(plain(STATE), about="words"))[0] is None


def test_more_than_a_state_may_have_is_not_collected() -> None:
    with pytest.raises(ValueError, match="more than the 100000 bytes"):
        download(messages(plain(STATE)), limit=100_000)


def test_a_second_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one tensor"):
        download(messages(plain(STATE), plain(STATE)))


def header(**fields: object) -> runtime_pb2.Tensor:
    usual = {"buffer": bytes(64), "size": [64], "dtype": "uint8", "compression": runtime_pb2.NONE}
    return runtime_pb2.Tensor(**{**usual, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"size": [2**31 - 1]},
        {"size": [8, 8]},
        {"size": []},
        {"size": [63]},
        {"dtype": "float32", "size": [16]},
        {"dtype": "int64", "size": [8]},
        {"dtype": "object", "size": [8]},
        {"compression": runtime_pb2.BLOCKWISE_8BIT, "size": [48]},
        {"compression": runtime_pb2.UNIFORM_8BIT, "size": [56]},
        {"compression": 77},
    ],
    ids=str,
)
def test_anything_but_plain_bytes_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="instead of plain bytes"):
        download(messages(header(**fields)))


class Control:
    """hivemind's handle of a step: done with a result, or broken."""

    def __init__(self, outcome: RoundResult | Exception) -> None:
        self.outcome, self.cancelled = outcome, False

    def result(self, timeout: float) -> RoundResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def done(self) -> bool:
        return not isinstance(self.outcome, TimeoutError)

    def cancel(self) -> None:
        self.cancelled = True


def run_round(weight: float, control: Control) -> tuple[RoundResult, float]:
    weights = []

    def step(**arguments: Any) -> Control:
        weights.append(arguments["weight"])
        return control

    pipe = SimpleNamespace(send=lambda message: None)
    averager = SimpleNamespace(step=step, max_weight=384.0, _outer_pipe=pipe, _allreduce_timeout=10.0)
    return Averager.run_round(averager, "5_aa", 2, weight, {}, 1.0), weights[0]


@pytest.mark.parametrize(("samples", "weight"), [(0.0, 0.0), (96.0, 96.0), (384.0, 384.0), (620.0, 384.0)])
def test_no_peer_claims_a_weight_that_the_others_refuse(samples: float, weight: float) -> None:
    """Samples pile up while rounds fail: with more weight than allowed, the next rounds would fail for ever."""
    assert run_round(samples, Control(RoundResult(complete=True)))[1] == weight


@pytest.mark.parametrize(("error", "words"), [(RuntimeError("no group"), "no group"), (TimeoutError(), "TimeoutError")])
def test_a_broken_round_is_a_result_with_its_reason(error: Exception, words: str) -> None:
    control = Control(error)
    result, _ = run_round(1.0, control)
    assert (result.complete, result.problem) == (False, words)
    assert control.cancelled == isinstance(error, TimeoutError)
