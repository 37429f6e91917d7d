"""Random patterns print back as written and agree with einops and NumPy."""

from string import ascii_letters

import numpy as np
from budget import drawing
from einops import rearrange as theirs
from hypothesis import given

import costgraph as cg
from costgraph import testing
from costgraph.algebra.symbols import is_name
from costgraph.notation.pattern import parse_pattern

drawn = drawing(200)


@drawn
@given(testing.patterns(operands=2))
def test_a_pattern_reads_back_as_it_is_written(pattern):
    parsed = parse_pattern(pattern.text)
    assert parse_pattern(str(parsed)) == parsed
    assert set(pattern.extents) == {n for i in range(2) for n in parsed.operand_names(i)}
    assert all(map(is_name, pattern.extents))


@drawn
@given(testing.patterns())
def test_a_rearrangement_is_that_of_einops(pattern):
    (shape,) = pattern.shapes
    x = np.arange(np.prod(shape), dtype=float).reshape(shape)
    with cg.Graph("g") as g:
        y = cg.rearrange(g.input("x", shape), pattern.text, **pattern.extents)
        g.output(y)
    assert y.shape == pattern.result
    (mine,) = testing.run(g, {"x": x}).outputs
    assert (mine == theirs(x, pattern.text, **pattern.extents)).all()


@drawn
@given(testing.patterns(operands=2))
def test_a_contraction_is_that_of_numpy(pattern):
    rng = np.random.default_rng(0)
    arrays = {f"x{i}": rng.normal(size=shape) for i, shape in enumerate(pattern.shapes)}
    with cg.Graph("g") as g:
        operands = [g.input(n, a.shape) for n, a in arrays.items()]
        g.output(cg.einsum(*operands, pattern.text, **pattern.extents))
    letters = dict(zip(pattern.extents, ascii_letters, strict=False))
    parsed = parse_pattern(pattern.text)
    split = [a.reshape([pattern.extents[n] for n in parsed.operand_names(i)]) for i, a in enumerate(arrays.values())]
    sides = [parsed.operand_names(0), parsed.operand_names(1), parsed.result_names]
    left, right, result = ("".join(letters[n] for n in names) for names in sides)
    expected = np.einsum(f"{left},{right}->{result}", *split).reshape(pattern.result)
    (mine,) = testing.run(g, arrays).outputs
    assert np.allclose(mine, expected)
