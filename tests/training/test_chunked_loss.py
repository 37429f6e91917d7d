"""Chunked cross-entropy: memory and FLOPs of a step against torch, and refusals."""

import pytest
from shared import load, training_step

import costgraph as cg
from costgraph import BindingError, ShapeError, UnsupportedError

B, S, D, V, N = 1, 55, 13, 1009, 5


def declared(again, *, bias=False, chunks=N):
    b, s, d = cg.dims("B S D")
    with cg.Graph("g") as g:
        x = cg.linear(g.input("x", (b, s, d)), "b s d -> b s e", e=d, name="first")
        g.output(cg.linear(x, "b s d -> b s v", v=V, bias=bias, name="head"))
    loss = None if chunks is None else cg.chunked_cross_entropy(chunks)
    loss = "cross_entropy" if loss is None else loss
    return cg.training_step(g, loss, cg.SGD(), checkpoint=cg.selective("chunk") if again else None)


@pytest.mark.parametrize("bias", [False, True])
def test_chunked_matmul_flops_match_unchunked(bias):
    sizes = {"B": 3, "S": S, "D": D}
    whole, parts, again = (
        cg.matmul_flops(declared(how, bias=bias, chunks=n), **sizes)
        for how, n in ((False, None), (False, N), (True, N))
    )
    assert parts == whole
    assert again == whole + 2 * 3 * S * D * V  # the logits once more
    assert cg.param_count(declared(False, bias=bias), **sizes) == D * D + D * V + V * bias


def test_only_one_recomputed_chunk_is_live():
    sizes = {"B": 3, "S": 7 * 11, "D": 2}
    row = 4 * 3 * 11 * V  # fp32 logits for a chunk of 11 positions
    peaks = [cg.peak_memory(declared(again, chunks=7), **sizes) for again in (False, True)]
    assert peaks[0] > 7 * row
    assert peaks[1] < 4 * row


@pytest.mark.parametrize("name", ["gpt2", "gemma-2-2b", "falcon-7b"])  # a tied head, a softcap, a tied view
def test_zoo_heads_move_into_chunk_loop(name):
    model = load(name)
    step = cg.training_step(model, cg.chunked_cross_entropy(3))
    for question in (cg.matmul_flops, cg.param_count):
        assert question(step, B=2, S=33) == question(training_step(model), B=2, S=33)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cg.chunked_cross_entropy(0), ShapeError, "chunks: 0, expected a positive integer"),
        (lambda: cg.peak_memory(declared(False, chunks=2), B=1, S=55, D=2), BindingError,
         "S=55: axis 2 of 'parts' has size S/2 = 55/2, expected a positive whole number"),
        (lambda: training_step(load("bert-base"), cg.chunked_cross_entropy(2)), UnsupportedError,
         "of 2 outputs, expected only logits"),
        (lambda: training_step(load("dit-xl-2"), cg.chunked_cross_entropy(2)), UnsupportedError,
         "does not come from one matmul with a parameter, followed by pointwise ops"),
    ],
)  # fmt: skip
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


# -- beside torch ----------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(D, D, bias=False), torch.nn.Linear(D, V, bias=False)

    def part(self, x, targets):
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def forward(self, x, targets, again):
        total = 0
        for part in zip(self.first(x).chunk(N, 1), targets.chunk(N, 1), strict=True):
            total = total + (checkpoint(self.part, *part, use_reentrant=False) if again else self.part(*part))
        return total / N


@pytest.mark.parametrize("again", [False, True])
def test_step_matches_torch(again):
    graph, dims = declared(again), {"B": B, "S": S, "D": D}
    with FakeTensorMode():
        module = Model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x, targets = torch.randn(B, S, D), torch.randint(0, V, (B, S))

        def step():
            module(x, targets, again).backward()
            optimizer.step()
            optimizer.zero_grad()

        with FlopCounterMode(display=False) as counter:
            step()
        tracker = MemTracker()
        tracker.track_external(module, optimizer, x, targets)
        with tracker:
            step()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    assert cg.matmul_flops(graph, **dims) == counter.get_total_flops()
    # our chunk gradients share one stack from the start; torch concatenates them at the end
    assert -64 <= cg.peak_memory(graph, **dims) - found["Total"] <= (N - 1) * 4 * (S // N) * D
