"""What the processes of test_clients.py run."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fo_compiler
from fo_compiler.records import Record


def llama_of_transformers(folder: str) -> list[Record]:
    """Load with `tp_plan="auto"`, run forward and backward; loss and gradients equal eager's."""
    for name, value in (
        ("RANK", dist.get_rank()),
        ("LOCAL_RANK", dist.get_rank()),
        ("WORLD_SIZE", dist.get_world_size()),
    ):
        os.environ[name] = str(value)  # as torchrun sets them
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))

    def step(callable_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = callable_(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradients = {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        return loss.detach(), gradients

    want_loss, want = step(model)
    for rewrite in ("never", "always"):
        torch._dynamo.reset()
        with fo_compiler.record() as report:
            loss, got = step(torch.compile(model, backend="flashoverlap", options={"rewrite": rewrite}))
        torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-6)
        for name, gradient in want.items():
            torch.testing.assert_close(
                got[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
    return report.records


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
