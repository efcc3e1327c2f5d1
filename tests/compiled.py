"""Kernels compiled and disassembled once for all tests that read machine code: seconds each."""

import functools

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.problem import BackwardStatic


def chosen(static):
    return plan.choose_backward(static) if isinstance(static, BackwardStatic) else plan.choose(static)


def cubin(static, given=None):
    """``given``: a plan instead of the chosen one, here and below."""
    return _cubin(static, given or chosen(static))


def kernels(static, given=None):
    """As machine_code.disassemble: resources and listing of each kernel."""
    return _kernels(static, given or chosen(static))


def texts(static, given=None):
    """Those of the main kernel."""
    return machine_code.main_kernel(kernels(static, given))


def code(static, given=None):
    return machine_code.parse(*texts(static, given))


# With the plan: else a Static and a BackwardStatic of equal fields would be one key
@functools.cache
def _cubin(static, choice):
    return compiling.cubin(static, choice)


@functools.cache
def _kernels(static, choice):
    return machine_code.disassemble(_cubin(static, choice))
