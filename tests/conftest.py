"""GPU tests: skipped without an sm_90 GPU (with --require-gpu the run fails), and never beyond their time limit."""

import contextlib
import faulthandler
import functools
import os
import re
from pathlib import Path

import pytest

LIMIT = 120  # seconds a GPU test may take; @pytest.mark.gpu(limit=...) sets another
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="without an sm_90 GPU the run fails, in one line")
    parser.addoption("--claims", metavar="DIR", help="only groups of tests that no other process claims: parallel.py")


def pytest_configure(config):
    # Output capture replaces descriptor 2 during a test and is lost when the guard ends the process: keep the real one.
    config.stash[STDERR] = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.stash[STDERR])


def pytest_runtestloop(session):
    """With --claims: runs the groups that this process claims, and leaves word there of what it collected and ran."""
    folder = session.config.getoption("--claims")
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    own = Path(folder, str(os.getpid()))
    own.with_suffix(".collected").write_text("".join(f"{item.nodeid}\n" for item in session.items))
    with own.with_suffix(".ran").open("w", buffering=1) as ran:  # line by line: the process may die
        for item, following in claimed(session.items, Path(folder)):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            print(item.nodeid, file=ran)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def claimed(items, folder):
    """Pairs (test, next test) of the groups that no other process has claimed before.

    A group's last test has no next one, so all fixtures end with it: to know the next one would take a claim on its
    group, which then could not go to a process that is done earlier.
    """
    for index, group in enumerate(groups(items)):
        try:
            (folder / f"{index}.claimed").touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from zip(group, [*group[1:], None], strict=True)


def groups(items):
    """Lists of tests that stay together, in an order that all processes agree on: what takes long first."""
    members = {}
    for item in items:
        members.setdefault(group_of(item), []).append(item)
    return sorted(members.values(), key=lambda group: (not is_sanitizer(group[0]), -len(group)))


def group_of(item):
    """The same for tests of a file that share kernels, as far as their names or else their marks say so, or the
    sanitizer's runs.
    """
    path, _, name = item.nodeid.partition("::")
    if is_sanitizer(item):
        return path, "sanitizer"
    head_dims = re.search(r"-d(\d+_\d+-[a-z]*)", name)  # of cases.Case, with its mask
    mark = item.get_closest_marker("kernels")
    if head_dims or not mark:
        return path, head_dims[1] if head_dims else name
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return path, " ".join([f"others of {mark.args[0]}", *(str(parameters[word]) for word in mark.args[1:])])


def is_sanitizer(item):
    return item.get_closest_marker("sanitizer") is not None


@functools.cache
def missing_gpu():
    """Why GPU tests cannot run here, or None."""
    import torch  # not at the top: importing this file must not cost seconds

    if not torch.cuda.is_available():
        return "needs an sm_90 GPU (H100, H200): torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"needs an sm_90 GPU (H100, H200), got sm_{major}{minor}"


def pytest_collection_finish(session):
    asked = session.config.getoption("--require-gpu") and any(item.get_closest_marker("gpu") for item in session.items)
    if asked and missing_gpu():
        pytest.exit(missing_gpu(), returncode=1)  # not hundreds of tests that say the same


def pytest_runtest_setup(item):
    reason = missing_gpu() if item.get_closest_marker("gpu") else None
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def hang_guard(seconds, descriptor):
    """Ends the process, with every thread's stack on the descriptor, when the block is not left in time.

    A kernel that never returns blocks the interpreter inside the driver: only a thread outside Python can end that.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=descriptor)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return (yield)
    with hang_guard(mark.kwargs.get("limit", LIMIT), item.config.stash[STDERR]):
        result = yield
    if fault := context_fault():  # all tests behind it would fail, and with --claims those of other processes
        item.session.shouldfail = f"{item.nodeid} left no usable CUDA context: {fault}"
    return result


def context_fault():
    """What a launch left behind that no later one survives (an illegal address, say), or None."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@pytest.fixture(scope="session")
def device():
    import torch

    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def hopper(monkeypatch):
    """Without a GPU: CUDA tensors can be made (nothing can read them), and the device says that it is an H200."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hopper_fa3 import problem

    monkeypatch.setattr(problem, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(problem, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 4096)  # a fake tensor has no address
    with FakeTensorMode():
        yield


@pytest.fixture
def one_thread():
    """For tiny products: a second thread costs more than it gives."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def far_apart(device):
    """A function ``(x, dim, place)``: a copy of x whose entries along ``dim`` lie FAR elements apart, the last of three
    past what 32 bits hold. Each tensor has a place of its own: 0, 1, 2, ...
    """
    import torch
    from cases import FAR

    needed = 2 * (2 * FAR + 2**24)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.1f} GiB of free GPU memory, got {free / 2**30:.1f}")
    memory = [torch.empty(needed // 2, dtype=torch.bfloat16, device=device)]

    def carved(x, dim, place):
        strides = list(torch.empty(x.shape, device="meta").stride())
        strides[dim] = FAR
        return memory[0].as_strided(x.shape, strides, place * 2**21).copy_(x)

    yield carved
    memory.clear()
    torch.cuda.empty_cache()
