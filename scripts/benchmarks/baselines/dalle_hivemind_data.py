"""The data pipeline of "Training Transformers Together", built anew from its description and the public code's shape.

`datasets` streams the shards; rows are shuffled in a buffer, filtered and tokenized in a batched `map`, formatted as
torch tensors by `with_format`, and collated by a DataLoader in the training process. Its settings: a buffer of 8,192
rows, 256 rows for each call of `map`.

    python -m scripts.benchmarks.baselines.dalle_hivemind_data FOLDER --tokenizer tokenizer.json --rows 20000 --batch 64

prints JSON: rows, cpu_seconds (this process and all it started), seconds; from the first batch on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHUFFLE_BUFFER, MAP_BATCH, TEXT_LENGTH = 8192, 256, 256


def preprocess(batch: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[Any]]:
    """The paper's filter, token ids and codes of a batch of rows."""
    keep = [
        isinstance(caption, str)
        and len(caption) >= 3
        and label == "UNLIKELY"
        and width > 0
        and height > 0
        and max(width / height, height / width) <= 2
        for caption, label, width, height in zip(
            batch["caption"], batch["NSFW"], batch["original_width"], batch["original_height"], strict=True
        )
    ]
    captions = list(itertools.compress(batch["caption"], keep))
    encoded = tokenizer.encode_batch(captions, add_special_tokens=False)
    return {
        "input_ids": [one.ids[:TEXT_LENGTH] for one in encoded],
        "image": [
            np.frombuffer(code, dtype=np.int16).astype(np.int64) for code in itertools.compress(batch["code"], keep)
        ],
    }


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-padded ids (b, 256) and codes (b, n)."""
    ids = torch.full((len(rows), TEXT_LENGTH), 1, dtype=torch.long)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row["input_ids"])] = row["input_ids"]
    return {"input_ids": ids, "image": torch.stack([row["image"] for row in rows])}


def batches(folder: Path, batch_size: int, tokenizer_file: Path, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as the paper's trainer got them, without end."""
    import datasets
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    rows = rows.map(
        preprocess,
        batched=True,
        batch_size=MAP_BATCH,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=["caption", "NSFW", "original_width", "original_height", "code"],
    ).with_format("torch")
    for epoch in itertools.count():
        rows.set_epoch(epoch)
        yield from torch.utils.data.DataLoader(rows, batch_size=batch_size, collate_fn=collate, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="a tokenizer.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stream = batches(arguments.folder, arguments.batch, arguments.tokenizer)
    next(stream)
    started, spent, rows = time.monotonic(), time.process_time(), 0
    while rows < arguments.rows:
        rows += len(next(stream)["image"])
    print(json.dumps({"rows": rows, "cpu_seconds": time.process_time() - spent, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
