"""Models that nobody here wrote. They need `pip install -e .[clients]`, and are skipped without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


def left_alone(records: list[Record]) -> list[Record]:
    """Those of a training step that are not rewritten. The logits are gathered under the matmul that makes them."""
    assert {record.graph for record in records} == {"forward", "backward"}
    (logits,) = [record for record in records if record.collective.startswith("all_gather_into_tensor ")]
    assert logits.rewritten, logits
    return [record for record in records if not record.rewritten]


def test_llama_of_transformers_with_its_own_tensor_parallel_plan(tmp_path: Path) -> None:
    records = on_two_ranks(tmp_path / "cache", checks.model_trains, saved("llama", tmp_path))
    assert len(records) == 17
    assert not left_alone(records)


def test_a_mixture_of_experts_of_transformers_with_its_own_tensor_parallel_plan(tmp_path: Path) -> None:
    records = on_two_ranks(tmp_path / "cache", checks.model_trains, saved("mixtral", tmp_path))
    # The only matmul behind the last layer's experts is that of the logits, and hides their gather.
    assert_only_routing_is_left(records, "all-gather half", but=1)


def test_grouped_matmuls_of_a_mixture_of_experts_hide_their_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the experts are grouped matmuls. Their values are another test's: routing may turn on one bit."""
    folder = saved("mixtral", tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the model sets them
        monkeypatch.setenv(name, "")
    with fake_process_group(0, 2):
        records = checks.training_records(folder, torch.bfloat16)
    assert_only_routing_is_left(records, "along dim 1")


def assert_only_routing_is_left(records: list[Record], said_of_experts: str, but: int = 0) -> None:
    """The gradients of the routing weights, two numbers a token, are left alone; the sums of experts are not, `but` so many."""
    assert len(records) == 17
    left = left_alone(records)
    routing = [record for record in left if record.tensor == "float32[32, 2] along dim 0"]
    assert len(routing) == len(left) - but == SIZES["num_hidden_layers"]
    assert all("index_put" in record.reason for record in left)
    experts = [record for record in records if "[32, 64]" in record.tensor and record.rewritten]
    assert len(experts) == 2 * SIZES["num_hidden_layers"] - but
    for record in experts:
        assert said_of_experts in f"{record.tensor} {record.reason}", record


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
