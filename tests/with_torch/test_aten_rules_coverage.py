"""Every aten op of varied programs has a rule that matches its operands and results."""

import pytest

pytest.importorskip("torch")

import torch
from aten_calls import Calls, number
from torch import nn
from torch.nn import functional


def rand(*sizes):
    return torch.rand(sizes, requires_grad=True)


def ids(most, *sizes):
    return torch.randint(0, most, sizes)


def check_rules(program):
    """Run a program, forward and if possible backward, and check every rule."""
    with Calls() as calls:
        result = program()
        leaves = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])
    for seen in calls.seen:
        c = seen.counts
        assert all(number(n) >= 0 for n in (c.matmul, c.pointwise, c.transcendental, c.workspace)), seen.call
        assert c.full is None or number(c.full) >= number(c.matmul)
        for amounts, tensors in ((c.reads, seen.call.operands), (c.writes, seen.call.results)):
            if amounts is not None and (tensors or amounts is c.reads):
                assert len(amounts) == len(tensors), seen.call
                assert all(number(n) >= 0 for n in amounts), seen.call
    return calls


def layers():
    x, image = rand(2, 8, 16), rand(2, 8, 12, 12)
    yield "transformer", nn.Transformer(16, 4, 1, 1, 32, batch_first=True), (rand(2, 5, 16), rand(2, 4, 16))
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield kind.__name__, kind(16, 16, num_layers=2, bidirectional=True, dropout=0.1), (x,)
        yield f"{kind.__name__}Cell", getattr(nn, f"{kind.__name__}Cell")(16, 16), (rand(2, 16),)
    for axes in (1, 2, 3):
        lines = rand(2, 8, *(12,) * axes)
        for kind in ("Conv", "ConvTranspose"):
            yield f"{kind}{axes}d", getattr(nn, f"{kind}{axes}d")(8, 8, 3, groups=2, stride=2, padding=1), (lines,)
        for kind in ("MaxPool", "AvgPool"):
            yield f"{kind}{axes}d", getattr(nn, f"{kind}{axes}d")(3, 2, 1), (lines,)
        for kind in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            yield f"{kind}{axes}d", getattr(nn, f"{kind}{axes}d")(5), (lines,)
        for kind in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
            yield f"{kind}{axes}d", getattr(nn, f"{kind}{axes}d")(2), (lines,)
        yield f"BatchNorm{axes}d", getattr(nn, f"BatchNorm{axes}d")(8), (lines,)
        yield f"BatchNorm{axes}d, eval", getattr(nn, f"BatchNorm{axes}d")(8).eval(), (lines,)
        yield f"InstanceNorm{axes}d", getattr(nn, f"InstanceNorm{axes}d")(8, affine=True), (lines,)
        yield f"Dropout{axes}d", getattr(nn, f"Dropout{axes}d")(0.1), (lines,)
        for mode in (("linear",), ("bilinear", "bicubic"), ("trilinear",))[axes - 1] + ("nearest", "nearest-exact"):
            yield f"{mode}, {axes} axes", nn.Upsample(scale_factor=2, mode=mode), (lines,)
    activations = (
        "ReLU ReLU6 LeakyReLU PReLU RReLU ELU SELU CELU GELU SiLU Mish Softplus Softsign Tanh Tanhshrink Sigmoid "
        "LogSigmoid Hardsigmoid Hardswish Hardtanh Hardshrink Softshrink GLU Dropout AlphaDropout FeatureAlphaDropout "
        "Softmax2d"
    )
    for kind in activations.split():
        yield kind, getattr(nn, kind)(), (image,)
    yield "Threshold", nn.Threshold(0.1, 2.0), (x,)
    yield "GroupNorm", nn.GroupNorm(4, 8), (image,)
    yield "LocalResponseNorm", nn.LocalResponseNorm(3), (image,)
    yield "RMSNorm", nn.RMSNorm(16), (x,)
    yield "PixelShuffle", nn.PixelShuffle(2), (image,)
    yield "PixelUnshuffle", nn.PixelUnshuffle(2), (image,)
    yield "ChannelShuffle", nn.ChannelShuffle(2), (image,)
    yield "Unfold", nn.Unfold(2, stride=2), (image,)
    yield "Fold", nn.Fold((8, 8), 2, stride=2), (rand(2, 12, 16),)
    yield "Bilinear", nn.Bilinear(16, 16, 5), (x, rand(2, 8, 16))
    yield "weight norm", nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), (x,)
    yield "spectral norm", nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), (x,)
    for mode in ("sum", "mean", "max"):
        yield f"EmbeddingBag, {mode}", nn.EmbeddingBag(10, 8, mode=mode), (ids(10, 2, 5),)


LAYERS = {name: (module, operands) for name, module, operands in layers()}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    module, operands = LAYERS[name]
    assert check_rules(lambda: module(*operands)).seen


def losses():
    x, y, t = (7, 5), torch.rand(7, 5), ids(5, 7)
    functions = (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits",
    )  # fmt: skip
    for name in functions:
        function = getattr(functional, name)
        yield name, lambda r, f=function: f(rand(*x), y, reduction=r)
        if name.startswith("binary"):
            yield f"{name}, weights", lambda r, f=function: f(rand(*x), y, weight=y, reduction=r)
    yield "cross_entropy", lambda r: functional.cross_entropy(rand(*x), t, reduction=r)
    yield "cross_entropy, smooth", lambda r: functional.cross_entropy(rand(*x), t, label_smoothing=0.1, reduction=r)
    yield "cross_entropy, weights", lambda r: functional.cross_entropy(rand(*x), t, weight=torch.rand(5), reduction=r)
    yield "cross_entropy, image", lambda r: functional.cross_entropy(rand(2, 5, 4, 4), ids(5, 2, 4, 4), reduction=r)
    yield "multi_margin_loss", lambda r: functional.multi_margin_loss(rand(*x), t, reduction=r)
    yield "multilabel_margin_loss", lambda r: functional.multilabel_margin_loss(rand(*x), ids(5, 7, 5), reduction=r)
    yield "triplet", lambda r: functional.triplet_margin_loss(rand(*x), rand(*x), rand(*x), reduction=r)
    yield "cosine", lambda r: functional.cosine_embedding_loss(rand(*x), rand(*x), torch.ones(7), reduction=r)
    yield "ctc", lambda r: functional.ctc_loss(rand(9, 3, 7), ids(6, 3, 2) + 1, (9,) * 3, (2,) * 3, reduction=r)


LOSSES = dict(losses())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, reduction):
    assert check_rules(lambda: LOSSES[name](reduction)).total("pointwise") > 0


FUNCTIONS = {
    "distances": lambda a, b: torch.cdist(a, b),
    "pairs": lambda a, b: torch.pdist(a),
    "scans": lambda a, b: (a.cumsum(1), a.cumprod(1), a.logcumsumexp(1), a.cummax(1)[0]),
    "orders": lambda a, b: (a.sort()[0], a.topk(2)[0], a.kthvalue(2)[0], a.median(1)[0], a.argsort()),
    "norms": lambda a, b: (a.norm(), a.norm(1), torch.linalg.matrix_norm(a), torch.dist(a, b), a.renorm(2, 0, 1.0)),
    "products": lambda a, b: (torch.linalg.multi_dot((a, b.T, a)), torch.kron(a, b), torch.einsum("ij,kj->ik", a, b)),
    "copies": lambda a, b: (a.roll(1, 0), a.flip(0), torch.cat([a, b]), torch.stack([a, b]), a.repeat(2, 1), a.triu()),
    "scattered": lambda a, b: (
        a.scatter_reduce(0, ids(6, 6, 8), b, "mean"),
        a.masked_fill(b > 0.5, 0.0), a.masked_scatter(b > 0.5, b), a.put(ids(6, 3), rand(3)),
    ),
    "sampled": lambda a, b: functional.grid_sample(
        rand(2, 3, 5, 5), functional.affine_grid(rand(2, 2, 3), (2, 3, 4, 4), align_corners=False), align_corners=False
    ),
    "solved": lambda a, b: (
        torch.linalg.inv(rand(4, 4) + 4 * torch.eye(4)), torch.linalg.solve(rand(4, 4) + 4 * torch.eye(4), rand(4, 2)),
        torch.linalg.cholesky(torch.eye(4)), torch.linalg.qr(a.T)[0], torch.linalg.svdvals(a),
        torch.linalg.det(rand(4, 4)),
    ),
    "searched": lambda a, b: (torch.bucketize(a.detach(), torch.arange(3.0)), torch.isin(ids(5, 3), ids(5, 2))),
    "random": lambda a, b: (torch.bernoulli(b.detach()), torch.multinomial(b.detach(), 2), torch.randperm(5)),
    "windows": lambda a, b: (a.unfold(1, 3, 2), torch.diff(a), torch.quantile(a, 0.5), functional.max_unpool1d(
        *functional.max_pool1d(rand(1, 2, 8), 2, return_indices=True), 2)),
    "normalised": lambda a, b: (functional.normalize(a), functional.gumbel_softmax(a), functional.dropout(a)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    assert check_rules(lambda: FUNCTIONS[name](rand(6, 8), rand(6, 8))).seen


OPTIMIZERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True, "weight_decay": 0.1}, "AdamW": {}, "Adamax": {},
    "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "Adafactor": {},
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, foreach):
    params = [nn.Parameter(torch.rand(n)) for n in ((3, 5), (7, 2))]
    optimizer = getattr(torch.optim, name)(params, foreach=foreach, **OPTIMIZERS[name])
    flops = []
    for _ in range(2):
        for p in params:
            p.grad = torch.rand_like(p)

        def step():
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        flops.append(check_rules(step).total("pointwise"))
    assert flops[1] >= 29  # at least one per element


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "RMSprop", "NAdam", "Adamax"])
def test_foreach_update_costs_the_same_as_single_updates(name):
    def flops(**options):
        params = [nn.Parameter(torch.rand(n)) for n in (13, 11)]
        optimizer = getattr(torch.optim, name)(params, lr=0.1, **options)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            calls = check_rules(optimizer.step)
        # the step counters and bias corrections: a few numbers per parameter
        large = [s.counts for s in calls.seen if any(t.numel != 1 for t in s.call.operands)]
        return sum(number(c.pointwise + c.transcendental) for c in large)

    assert flops(foreach=True) == flops(foreach=False)


def test_scaled_gradients():
    model = nn.Linear(8, 8)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.1)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.rand(4, 8)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    names = [s.call.name for s in check_rules(step).seen]
    assert "_amp_foreach_non_finite_check_and_unscale" in names
    assert "_amp_update_scale" in names
