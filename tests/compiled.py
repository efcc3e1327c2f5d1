"""Kernels compiled and disassembled once for all tests that read machine code: seconds each."""

import functools

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan


@functools.cache
def cubin(static, given=None):
    """``given``: a plan instead of the chosen one, here and below."""
    return compiling.cubin(static, given or plan.choose(static))


@functools.cache
def texts(static, given=None):
    """As machine_code.disassemble: resources and listing."""
    return machine_code.disassemble(cubin(static, given))


@functools.cache
def code(static, given=None):
    return machine_code.parse(*texts(static, given))
