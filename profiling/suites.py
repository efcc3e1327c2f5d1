"""What the benchmark can measure, one Suite each: its cases, what is launched, and the rates that a time means."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import cost
import torch
from peers import PEERS, Peer, never
from selection import MASKS, Case
from selection import case as case_of
from timing import Launch, graph

from hopper_fa3 import flash_attn_func, launch
from hopper_fa3.problem import Problem

SHORT = (512, 1024)  # lengths whose host time may hide the kernel's
DECODE_SHAPES = ((1, 8192), (1, 131072), (32, 8192), (128, 2048))  # (batch, keys)
# What --others adds to the grid, each dense and causal; 8192 long where a word does not say. Heads are powers of two
# (the grid's width would give 21 at head_dim 96); 192/128 has 16, so that V and O are those of the grid's head_dim 128.
DIMS, GROUPED = ("d80-h16", "d96-h16", "d192-h8", "d192_128-h16"), "d128-b1-h32_4"
OTHERS = (*DIMS, GROUPED, "d128-s2048-fp16", "d128-fp16", "d128-s16384-fp16")
BACKWARD_OTHERS = (*DIMS, "d256", GROUPED)
DECODE_HEADS, DECODE_GROUP, DECODE_HEAD_DIM = 32, 4, 128


def ours_kernel(q, k, v, causal, window_size=(-1, -1), plan=None):
    """The launch alone, into an output allocated once: validation, planning and the lookup happened before."""
    problem = Problem.from_tensors(q, k, v, causal=causal, window_size=window_size)
    recipe = launch.prepare(problem, q, k, v, plan=plan)
    out = torch.empty_like(recipe.out)
    return Launch(lambda: launch.execute(recipe, q, k, v, out)[0])


def ours_public(q, k, v, causal, window_size=(-1, -1), deterministic=False):
    options = {"window_size": window_size, "deterministic": deterministic}
    return Launch(lambda: flash_attn_func(q, k, v, causal=causal, **options))


ours_deterministic = functools.partial(ours_public, deterministic=True)
OURS = Peer("ours", lambda: None, never, ours_kernel, ours_public, ours_deterministic)


class Shapes(NamedTuple):
    """What a suite measures where the options do not say."""

    head_dims: tuple
    seqlens: tuple
    others: tuple  # words of cases beside the grid


class Yardstick(NamedTuple):
    """Ours in another case than the cell's, whose time ours is measured by: it shares the cell's rounds."""

    name: str  # of its row
    of: Callable  # the cell's Case -> its Case, of q, k, v and causal alone


def plain(inputs, case):
    return *inputs.views(case), case.causal


class Suite(NamedTuple):
    """``kinds``, ``replay``, ``host`` and ``deterministic`` take (entrant, arguments); the entrant is a Peer, maybe
    ours.
    """

    name: str
    shapes: Shapes | None  # None: the suite has cases of its own
    cases: Callable  # parsed options -> Cases in the order they are measured
    kinds: Callable  # -> kind of row -> Launch; the first kind is the one that outputs are compared of and drawn
    replay: Callable  # -> Launch that replays a CUDA graph
    replayed: Callable  # Case -> whether --graph replays it
    host: Callable  # -> Launch whose host time is measured
    host_case: Case  # small: the GPU is done long before the host
    ceiling: str  # takes part in every cell: "matmul" or "copy"
    rates: Callable  # (case, seconds) -> (TFLOP/s or None, TB/s or None)
    deterministic: Callable | None = None  # -> kind of row -> Launch, of entrants that have a deterministic way
    ours: Peer = OURS
    peers: dict = PEERS
    arguments: Callable = plain  # (Inputs, Case) -> what the peers are called with: q, k, v and all else
    also: tuple = ()  # Suites that take part in the cells of this one: its gradients
    yardsticks: tuple = ()  # their kind of row is the first of ``kinds``
    graph_kind: str = "graph"  # of the rows of ``replay``
    feature: Callable = lambda case: ""  # Case -> what tells it from a plain one, in a word or two
    work: Callable = lambda case: None  # Case -> what the time of our kernel should be proportional to; None: FLOPs
    takes: tuple = ()  # options about shapes that a suite with cases of its own takes nevertheless
    facts: tuple = ()  # (name, text): what must stand beside its figures

    def replays(self, entrant, tensors):
        """Kind of row -> Launch that replays a CUDA graph."""
        return {self.graph_kind: self.replay(entrant, tensors)}


def forwards(entrant, tensors):
    found = {"kernel": entrant.kernel(*tensors)}
    if entrant.public is not entrant.kernel:
        found["public"] = entrant.public(*tensors)
    return found


def differentiable(entrant, tensors):
    """``(those of the arguments that want gradients: q, k, v and other floating-point tensors, Launch of the
    forward)``; in grad mode.
    """
    arguments = [one.detach().requires_grad_() if _has_gradient(one) else one for one in tensors]
    return tuple(filter(_has_gradient, arguments)), entrant.public(*arguments)


def _has_gradient(argument):
    return isinstance(argument, torch.Tensor) and argument.is_floating_point()


def arriving(q, v):
    """The gradient of the output: the same for all entrants, so that their results can be compared."""
    generator = torch.Generator(q.device).manual_seed(1)
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.randn(shape, device=q.device, dtype=q.dtype, generator=generator)


def gradient(entrant, tensors):
    """torch.autograd.grad alone: the forward ran when this was made, and its graph is kept."""
    with torch.enable_grad():
        wanting, forward = differentiable(entrant, tensors)
        with forward.context():
            out = forward.call()
    given = arriving(wanting[0], wanting[2])
    return Launch(lambda: torch.autograd.grad(out, wanting, given, retain_graph=True))


def deterministic_gradient(entrant, tensors):
    return gradient(entrant._replace(public=entrant.deterministic), tensors)


def step(entrant, tensors):
    """A forward and torch.autograd.grad through it, as in a step of training: out, dQ, dK, dV."""
    with torch.enable_grad():
        wanting, forward = differentiable(entrant, tensors)
    given = arriving(wanting[0], wanting[2])

    def call():
        with torch.enable_grad():
            out = forward.call()
        return out.detach(), *torch.autograd.grad(out, wanting, given)

    return Launch(call, forward.context)


def replayed(make, entrant, tensors):
    """A backward runs on the stream of its forward: only on that one can it be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one = make(entrant, tensors)
    return graph(one, stream=stream)


def masks(options):
    return {"both": (False, True), "yes": (True,), "no": (False,)}[options.causal]


def shapes(options):
    """The Shapes that are asked for, those of the first suite where the options do not say."""
    usual = SUITES[options.suite[0]].shapes
    asked = (options.head_dims, options.seqlens, options.others)
    return Shapes(*(mine or own for mine, own in zip(asked, usual, strict=True)))


def grid(options):
    """Head dims x masks x lengths at equal numbers of tokens and equal width."""
    head_dims, seqlens, _ = shapes(options)
    return [
        Case(options.tokens // seqlen, seqlen, seqlen, heads := options.width // head_dim, heads // options.group,
             head_dim, head_dim, causal=causal)
        for head_dim in head_dims for causal in masks(options) for seqlen in seqlens
    ]  # fmt: skip


def other_cases(options):
    """The cases that --others names and the grid lacks. ValueError for words that are no case."""
    if options.others is None:
        return []
    words = [word for word, causal in MASKS.items() if causal in masks(options)]
    known, others = set(grid(options)), shapes(options).others
    return [case for text in others for word in words if (case := case_of(f"{text}-{word}")) not in known]


def one_query(batch, seqlen):
    """A step of decoding: the last query sees all keys, so that causal and dense are the same."""
    heads, heads_k = DECODE_HEADS, DECODE_HEADS // DECODE_GROUP
    return Case(batch, 1, seqlen, heads, heads_k, DECODE_HEAD_DIM, DECODE_HEAD_DIM)


FORWARD = Suite(
    "forward",
    Shapes((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), OTHERS),
    lambda options: grid(options) + other_cases(options),
    forwards,
    lambda entrant, tensors: graph(entrant.kernel(*tensors)),
    lambda case: case.seqlen_k in SHORT,
    lambda entrant, tensors: entrant.public(*tensors),
    Case(1, 128, 128, 16, 16, 128, 128),
    "matmul",
    lambda case, seconds: (cost.teraflops(case, seconds), None),
)
BACKWARD = FORWARD._replace(
    name="backward",
    shapes=Shapes((64, 128), (2048, 8192, 16384), BACKWARD_OTHERS),
    kinds=lambda entrant, tensors: {"autograd": gradient(entrant, tensors)},
    replay=functools.partial(replayed, gradient),
    replayed=lambda case: case.seqlen_k in (*SHORT, 2048),
    host=gradient,
    rates=lambda case, seconds: (cost.backward_teraflops(case, seconds), None),
    deterministic=lambda entrant, tensors: {"deterministic": deterministic_gradient(entrant, tensors)},
)
SUITES = {
    suite.name: suite
    for suite in (
        FORWARD,
        BACKWARD,
        BACKWARD._replace(
            name="training",
            kinds=lambda entrant, tensors: {"training": step(entrant, tensors)},
            replay=functools.partial(replayed, step),
            host=step,
            rates=lambda case, seconds: (cost.training_teraflops(case, seconds), None),
            deterministic=None,
        ),
        FORWARD._replace(
            name="decode",
            shapes=None,
            cases=lambda options: [one_query(*shape) for shape in DECODE_SHAPES],
            replayed=lambda case: True,
            host_case=one_query(1, 128),
            ceiling="copy",
            rates=lambda case, seconds: (None, cost.key_value_bytes(case) / seconds * 1e-12),
        ),
    )
}


class Inputs:
    """Random q, k, v of any case, as views of three buffers a dtype drawn once: drawing takes longer than timing."""

    def __init__(self, cases, device="cuda"):
        generator = torch.Generator(device).manual_seed(0)
        sizes = {}  # dtype -> elements of q, k, v in its largest cases
        for case in cases:
            known = sizes.get(case.dtype, (0, 0, 0))
            sizes[case.dtype] = tuple(map(max, known, self.sizes(case)))
        self.buffers = {dtype: [] for dtype in sizes}
        for each in zip(*sizes.values(), strict=True):
            drawn = torch.randn(max(each), device=device, generator=generator)  # the same numbers in every dtype
            for size, (dtype, buffers) in zip(each, self.buffers.items(), strict=True):
                buffers.append(drawn[:size].to(getattr(torch, dtype)))

    @staticmethod
    def sizes(case):
        queries, keys = case.batch * case.seqlen_q * case.heads, case.batch * case.seqlen_k * case.heads_k
        return queries * case.head_dim, keys * case.head_dim, keys * case.head_dim_v

    def views(self, case):
        shapes = (
            (case.batch, case.seqlen_q, case.heads, case.head_dim),
            (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
            (case.batch, case.seqlen_k, case.heads_k, case.head_dim_v),
        )
        sized = zip(self.buffers[case.dtype], self.sizes(case), shapes, strict=True)
        return tuple(buffer[:size].view(shape) for buffer, size, shape in sized)


def ceilings():
    """Launches of the matrix product and the copy."""
    size = cost.MATMUL_SIZE
    left, right = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    source, target = (torch.empty(cost.COPY_BYTES, device="cuda", dtype=torch.uint8) for _ in range(2))
    return {
        "matmul": Launch(functools.partial(torch.matmul, left, right, out=product)),
        "copy": Launch(lambda: target.copy_(source)),
    }


def ceiling_rates(name, seconds):
    """(TFLOP/s or None, TB/s or None) of one of the ceilings."""
    if name == "matmul":
        return cost.matmul_flops() / seconds * 1e-12, None
    return None, cost.copy_traffic() / seconds * 1e-12


def ceiling_facts(times):
    """The measured ceilings as they stand beside the figures; ``times``: name -> Timing of ceilings()."""
    product, copy = (ceiling_rates(name, times[name].median) for name in ("matmul", "copy"))
    return {"matmul_tflops": round(product[0], 1), "copy_tb_per_s": round(copy[1], 3)}


def apart(launch, other):
    """The largest difference of two launches' results (a tensor or several), in units of the other's largest value."""
    mine, theirs = (results(one) for one in (launch, other))
    pairs = zip(mine, theirs, strict=True)
    found = [((one.float() - two.float()).abs().max() / two.float().abs().max()).item() for one, two in pairs]
    return max(found, key=lambda value: (value != value, value))  # NaN is the largest


def results(launch):
    with launch.context():
        found = launch.call()
    return found if isinstance(found, tuple) else (found,)
