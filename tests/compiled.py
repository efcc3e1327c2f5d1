"""Kernels compiled and disassembled once for all tests that read machine code: seconds each."""

import functools

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.problem import BackwardStatic


def chosen(static):
    return plan.choose_backward(static) if isinstance(static, BackwardStatic) else plan.choose(static)


@functools.cache
def cubin(static, given=None):
    """``given``: a plan instead of the chosen one, here and below."""
    return compiling.cubin(static, given or chosen(static))


@functools.cache
def kernels(static, given=None):
    """As machine_code.disassemble: resources and listing of each kernel."""
    return machine_code.disassemble(cubin(static, given))


def texts(static, given=None):
    """Those of the main kernel."""
    return machine_code.main_kernel(kernels(static, given))


@functools.cache
def code(static, given=None):
    return machine_code.parse(*texts(static, given))
