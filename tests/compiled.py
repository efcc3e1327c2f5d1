"""Kernels compiled and disassembled once for all tests that read machine code: seconds each."""

import functools

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan


@functools.cache
def cubin(static):
    return compiling.cubin(static, plan.choose(static))


@functools.cache
def texts(static):
    """As machine_code.disassemble: resources and listing."""
    return machine_code.disassemble(cubin(static))


@functools.cache
def code(static):
    return machine_code.parse(*texts(static))
