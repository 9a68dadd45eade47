"""Models that nobody here wrote. They need `pip install -e .[clients]`, and are skipped without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import client_checks as checks
from tests.distributed.harness import World

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_llama_of_transformers_with_its_own_tensor_parallel_plan(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    world = World(2, str(tmp_path / "cache"))
    try:
        records, others = world.run(checks.llama_of_transformers, str(tmp_path / "llama"))
    finally:
        world.close()
    assert [str(r) for r in records] == [str(r) for r in others]
    left = [record for record in records if not record.rewritten]
    assert len(records) >= 16
    assert len(left) <= 2, [str(record) for record in left]
