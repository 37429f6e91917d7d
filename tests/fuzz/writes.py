"""Random in-place writes to views of a tensor `x` of shape (batch, length, width), with operands from `w`, of the same
shape."""

#: Views of a tensor with 3 axes, and of any view.
VIEWS = (
    "{}[:, 1:]", "{}[:, :-2]", "{}[:, 0]", "{}[:, ::2]", "{}.narrow(2, 3, 4)", "{}[..., 4:]", "{}.mT", "{}.flatten(1)",
    "{}.unflatten(2, (4, -1))", "{}[:, 1:][:, :, 2:7]", "{}[:, 1:].mT", "{}[:, 2:][:, 0]", "{}.transpose(0, 1)[1:]",
    "{}.select(1, 2)", "{}.unsqueeze(1)",
)  # fmt: skip
OF_VIEWS = ("{}[1:]", "{}[..., ::2]", "{}.mT", "{}[..., 0]", "{}.flatten(0, 1)")
#: Writes to a tensor; the second operand has the same shape, and a gradient.
WRITES = (
    "{}.mul_(2)", "{}.mul_({})", "{}.add_({})", "{}.copy_({})", "{}.sin_()", "{}.zero_()", "{}.relu_()", "{}.sub_(1)",
    "{}.fill_(0.5)",
)  # fmt: skip


def drawn_writes(rng):
    """Return statements that write into views of `x` or into `x` itself, and the names of the views."""
    lines, tensors = [], {"x": "w"}
    for i in range(rng.randint(1, 3)):
        of = rng.choice([*tensors])
        view = rng.choice(VIEWS if of == "x" else OF_VIEWS)
        lines.append(f"z{i} = {view.format(of)}")
        tensors[f"z{i}"] = view.format(tensors[of])
        for _ in range(rng.randint(0 if i else 1, 2)):
            written = rng.choice([*tensors])
            write = rng.choice(WRITES).format(written, tensors[written])
            lines.append(write if rng.random() < 0.85 else f"with torch.no_grad(): {write}")
    return lines, [name for name in tensors if name != "x"]
