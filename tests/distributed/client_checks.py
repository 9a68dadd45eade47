"""What the processes of test_clients.py run with models of transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config
from torch.distributed.tensor import DTensor

import fo_compiler
from fo_compiler.records import Record
from tests.distributed.checks import CountCollectives, assert_one_record_each


def load(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model in `folder`, sharded by its own plan."""
    for name, value in (
        ("RANK", dist.get_rank()),
        ("LOCAL_RANK", dist.get_rank()),
        ("WORLD_SIZE", dist.get_world_size()),
    ):
        os.environ[name] = str(value)  # as torchrun sets them
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype)


def tokens(length: int) -> Tensor:
    return torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(1))


def model_trains(folder: str) -> list[Record]:
    """A step forward and backward: loss and gradients equal eager's, and each collective has one record."""
    model = load(folder)

    def step(callable_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = callable_(input_ids=tokens(16), labels=tokens(16), use_cache=False).loss
        loss.backward()
        gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return loss.detach(), gradients

    want_loss, want = step(model)
    counter = CountCollectives()
    options = {"rewrite": "always", "post_grad_custom_post_pass": counter, "fallback_by_default": True}
    with fo_compiler.record() as report:
        loss, got = step(torch.compile(model, backend="flashoverlap", options=options))
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-6)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert_one_record_each(report.records, counter.count)
    return report.records


def training_records(folder: str, dtype: torch.dtype) -> list[Record]:
    """What is done with the collectives of a step, on a fake process group."""
    compiled = torch.compile(load(folder, dtype), backend="flashoverlap", options={"rewrite": "always"})
    with config.patch(fallback_by_default=True), fo_compiler.record() as report:
        compiled(input_ids=tokens(16), labels=tokens(16), use_cache=False).loss.backward()
    return report.records


def model_decodes(folder: str, dynamic: bool | None, steps: int) -> list[Record]:
    """Greedy decoding, the sequence growing by a token a step: the logits equal eager's at every length."""
    model = load(folder)
    compiled = torch.compile(model, backend="flashoverlap", options={"rewrite": "always"}, dynamic=dynamic)
    sequence = tokens(8)
    with config.patch(fallback_by_default=True), torch.no_grad(), fo_compiler.record() as report:
        for _ in range(steps):
            want = model(input_ids=sequence, use_cache=False).logits
            got = compiled(input_ids=sequence, use_cache=False).logits
            torch.testing.assert_close(whole(got), whole(want), rtol=1e-4, atol=1e-5)
            sequence = torch.cat([sequence, whole(want)[:, -1:].argmax(-1)], 1)
    return report.records


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
