"""Models that nobody here wrote. They need `pip install -e .[clients]`, and are skipped without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fo_compiler import Record
from fo_compiler.torch_adapter import fake_process_group
from tests.distributed import client_checks as checks
from tests.distributed import titan_checks
from tests.distributed.harness import World

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]  # these models take their time to compile
LIMIT_S = 800


SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def saved(family: str, folder: Path) -> str:
    """A small random model of a family of transformers, in a folder."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=128, **SIZES))
    else:
        config = transformers.MixtralConfig(intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, **SIZES)
        model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(folder / family)
    return str(folder / family)


def on_two_ranks(cache: Path, check: Callable[..., list[Record]], *args: Any) -> list[Record]:
    """The records of rank 0; those of rank 1 are the same."""
    world = World(2, str(cache))
    try:
        records, others = world.run(check, *args, timeout_s=LIMIT_S)
    finally:
        world.close()
    assert [str(r) for r in records] == [str(r) for r in others]
    return records


def test_llama_of_transformers_with_its_own_tensor_parallel_plan(tmp_path: Path) -> None:
    records = on_two_ranks(tmp_path / "cache", checks.model_trains, saved("llama", tmp_path))
    left = [record for record in records if not record.rewritten]
    assert len(records) >= 16
    assert len(left) <= 2, [str(record) for record in left]


def test_a_mixture_of_experts_of_transformers_with_its_own_tensor_parallel_plan(tmp_path: Path) -> None:
    records = on_two_ranks(tmp_path / "cache", checks.model_trains, saved("mixtral", tmp_path))
    assert {record.graph for record in records} == {"forward", "backward"}
    left = [record.reason for record in records if not record.rewritten]
    assert len(records) - len(left) >= 9
    for reason in left:  # what each token's experts give is put together by indices that depend on data
        assert "aten.index" in reason or "amax" in reason or "embedding" in reason, reason


@pytest.mark.parametrize(("family", "dynamic"), [("llama", None), ("llama", False), ("mixtral", None)])
def test_decoding_with_a_growing_length_gives_the_same(family: str, dynamic: bool | None, tmp_path: Path) -> None:
    records = on_two_ranks(tmp_path / "cache", checks.model_decodes, saved(family, tmp_path), dynamic, 4)
    assert any(record.rewritten for record in records), [str(record) for record in records]


# --- torchtitan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_torchtitan_trains_with_our_pass_inside_plain_inductor(tmp_path: Path, sequence_parallel: bool) -> None:
    pytest.importorskip("torchtitan")
    records = on_two_ranks(tmp_path, titan_checks.trains_as_under_plain_inductor, sequence_parallel)
    assert {record.graph for record in records} == {"forward", "backward"}
    assert len(records) >= (8 if sequence_parallel else 4)
    assert all(record.rewritten for record in records), records


def test_torchtitan_with_flex_attention(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    records = on_two_ranks(tmp_path, titan_checks.flex_attention_gives_the_same)
    assert len(records) >= 4
    assert all(record.rewritten for record in records), records


@pytest.fixture
def fake_world_of_four() -> Iterator[None]:
    with fake_process_group(0, 4):
        yield


@pytest.mark.parametrize("tensor_parallel", [4, 2])
def test_training_graphs_of_torchtitan_with_tensor_and_with_data_x_tensor_parallel(
    fake_world_of_four: None, tensor_parallel: int
) -> None:
    pytest.importorskip("torchtitan")
    records = titan_checks.training_graphs(tensor_parallel, True).records
    assert {record.group_size for record in records} == {tensor_parallel}
    assert len(records) >= 8
    assert all(record.rewritten for record in records), records
