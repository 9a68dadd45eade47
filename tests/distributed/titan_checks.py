"""torchtitan's Llama 3 debug model on CPU ranks, and what the processes of test_clients.py do with it.

Two settings are not the trainer's, since torch 2.13 has no CPU code for them: rotary embeddings are torchtitan's own with
cosines and sines (the flex template takes no complex ones), and for training the inner attention is torchtitan's own
ScaledDotProductAttention (flex attention has no backward on CPU; each sequence is one document). FSDP is left out: it
gathers parameters outside the compiled graphs.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config

import fo_compiler
from fo_compiler import Report
from fo_compiler.records import Record

BATCH, SEQ_LEN, LAYERS = 2, 64, 2


class Titan:
    """The model, sharded and compiled block by block as torchtitan does it, with tokens to run it on."""

    def __init__(self, tensor_parallel: int, sequence_parallel: bool = True, flex: bool = False) -> None:
        import torchtitan.distributed.parallel_dims as parallel_dims
        from torchtitan.config import CompileConfig, ParallelismConfig
        from torchtitan.distributed import utils
        from torchtitan.distributed.compile import apply_compile
        from torchtitan.distributed.spmd_types import annotate_input_spmd_types
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.common.rope import CosSinRoPE
        from torchtitan.models.llama3 import model_registry

        parallel_dims.device_type = "cpu"
        ranks = dist.get_world_size()
        parallelism = ParallelismConfig(
            tensor_parallel_degree=tensor_parallel,
            data_parallel_shard_degree=ranks // tensor_parallel,
            enable_sequence_parallel=sequence_parallel,
        )
        dims = parallel_dims.ParallelDims.from_config(parallelism, ranks)
        dims.build_mesh()
        utils.set_spmd_backend(parallelism.spmd_backend)
        model_config: Any = model_registry("debugmodel").model
        model_config.layers = model_config.layers[:LAYERS]
        for layer in model_config.layers:
            rope = layer.attention.rope
            kept = {field.name: getattr(rope, field.name) for field in fields(rope) if field.name != "scaling"}
            layer.attention.rope = CosSinRoPE.Config(**kept)
            if not flex:
                layer.attention.inner_attention = ScaledDotProductAttention.Config()
        model_config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        self.context = utils.get_spmd_context(parallel_dims=dims)
        torch.manual_seed(0)
        with self.context():
            self.model = model_config.build()
            self.model.parallelize(dims)
            apply_compile(
                self.model, compile_config=CompileConfig(enable=True, components=["model"]), parallel_dims=dims
            )
            self.model.init_states(buffer_device=torch.device("cpu"))
        tokens = torch.randint(2048, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN).contiguous()
        masks = self.model.get_attention_masks(positions) if flex else None
        self.tokens, _, self.extra = annotate_input_spmd_types(
            dims, tokens, tokens.clone(), {"positions": positions, "attention_masks": masks}
        )

    def forward(self) -> Tensor:
        with self.context(), torch.no_grad():
            return local(self.model(self.tokens, **self.extra))

    def step(self) -> dict[str, Tensor]:
        """The output of a step, and this rank's gradients."""
        self.model.zero_grad()
        with self.context():
            output = self.model(self.tokens, **self.extra)
            output.square().mean().backward()
        found = {name: local(p.grad).clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return {"output": local(output.detach()), **found}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trains_as_under_plain_inductor(sequence_parallel: bool) -> list[Record]:
    """A step of the model, compiled block by block, inside and outside a block of `installed`."""
    with config.patch(fallback_by_default=True):  # values and graphs matter here, and C++ takes its time
        titan = Titan(dist.get_world_size(), sequence_parallel)
        plain = titan.step()
        torch._dynamo.reset()
        with fo_compiler.installed(rewrite="always") as report:
            ours = titan.step()
    assert len(plain) > LAYERS * 7
    for name, want in plain.items():
        torch.testing.assert_close(ours[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    return report.records


def flex_attention_gives_the_same() -> list[Record]:
    """The model with flex attention, without gradients."""
    with config.patch({"cpp.simdlen": None}):  # Inductor has no flex attention without vector types
        titan = Titan(dist.get_world_size(), flex=True)
        plain = titan.forward()
        torch._dynamo.reset()
        with fo_compiler.installed(rewrite="always") as report:
            ours = titan.forward()
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    return report.records


def training_graphs(tensor_parallel: int, sequence_parallel: bool) -> Report:
    """What is done with the collectives of a step, on a fake process group."""
    with config.patch(fallback_by_default=True), fo_compiler.installed(rewrite="always") as report:
        Titan(tensor_parallel, sequence_parallel).step()
    return report
