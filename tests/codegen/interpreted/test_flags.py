"""Waiting for flags and setting them, under Triton's interpreter; the other side is a thread."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import set_flags, wait_flags
from fo_compiler.errors import KernelError

from .helpers import POLLS, Pause, examples, meanwhile


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_wait_lasts_until_another_thread_raises_the_flag() -> None:
    flags, late, raised = int32(4, 4), int32(0, 0), threading.Event()

    def transport(pause: Pause) -> None:
        for _ in range(20):
            pause()
        raised.set()
        flags.fill_(5)

    with meanwhile(transport):
        wait_flags(flags, int32(5), late, polls=POLLS)
        assert raised.is_set()
    assert late.tolist() == [0, 0]


def test_a_failure_beside_a_thread_is_told_and_the_thread_ends() -> None:
    ended = threading.Event()

    def forever(pause: Pause) -> None:
        try:
            while True:
                pause()
        finally:
            ended.set()

    with pytest.raises(KernelError, match="broken"), meanwhile(forever):
        raise KernelError("broken")
    assert ended.wait(timeout=30)


def test_a_failure_in_a_thread_is_told() -> None:
    def broken(pause: Pause) -> None:
        pause()
        raise KernelError("broken")

    with pytest.raises(KernelError, match="broken"), meanwhile(broken):
        pass


@examples(15)
@given(epoch=st.integers(-(2**31), 2**31 - 1), ahead=st.integers(-3, 3))
def test_a_flag_has_come_when_it_is_not_behind_the_epoch_even_where_numbers_wrap(epoch: int, ahead: int) -> None:
    flag = (epoch + ahead + 2**31) % 2**32 - 2**31
    late = int32(0)
    wait_flags(int32(flag), int32(epoch), late, polls=3)
    assert late.item() == (1 if ahead < 0 else 0)


def test_a_flag_that_never_comes_is_marked_late_and_the_others_are_not() -> None:
    late = int32(0, 0, 0)
    wait_flags(int32(2, 1, 3), int32(2), late, polls=5)
    assert late.tolist() == [0, 1, 0]


def test_flags_are_raised_at_their_addresses() -> None:
    here, there = int32(0, 0, 0), int32(0)
    set_flags(torch.tensor([here[1:].data_ptr(), there.data_ptr()]), int32(7))
    assert here.tolist() == [0, 7, 0]
    assert there.tolist() == [7]


def test_flags_of_another_dtype_are_refused() -> None:
    with pytest.raises(KernelError, match="flags: expected a contiguous int32"):
        wait_flags(torch.zeros(2), int32(1), int32(0, 0))
    with pytest.raises(KernelError, match="addresses: expected int64"):
        set_flags(int32(1), int32(1))
