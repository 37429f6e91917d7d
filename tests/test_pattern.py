"""Every grammar production of a pattern, and every refusal text."""

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limited

from costgraph import PatternError
from costgraph.notation.pattern import Affine, Axes, Pattern, parse_pattern


def axes(*names):
    return tuple(Axes((n,)) for n in names)


@each(
    ("text", "operands", "result"),
    [
        ("a b, b c -> a c", (axes("a", "b"), axes("b", "c")), axes("a", "c")),
        ("a->a", (axes("a"),), axes("a")),
        (" a  b\t-> \n b a ", (axes("a", "b"),), axes("b", "a")),
        ("->", ((),), ()),
        ("a, -> a", (axes("a"), ()), axes("a")),
        ("a ->", (axes("a"),), ()),
        ("i i -> i", (axes("i", "i"),), axes("i")),
        ("b (h k) -> b h k", ((*axes("b"), Axes(("h", "k"))),), axes("b", "h", "k")),
        ("(a) -> a", (axes("a"),), axes("a")),
        ("() 1 -> ( )", ((Axes(()), Axes(())),), (Axes(()),)),
        ("(a 1 b) -> a b", ((Axes(("a", "b")),),), axes("a", "b")),
        ("(a b)c(d e) -> a", ((Axes(("a", "b")), Axes(("c",)), Axes(("d", "e"))),), axes("a")),
        ("d_model x1 _ -> x1", (axes("d_model", "x1", "_"),), axes("x1")),
        ("h*2+r -> h r", ((Affine((("h", 2), ("r", 1)), 0),),), axes("h", "r")),
        ("2*h+r-1 -> h", ((Affine((("h", 2), ("r", 1)), -1),),), axes("h")),
        ("2*h*3 -> h", ((Affine((("h", 6),), 0),),), axes("h")),
        ("h+3-5+2 -> h", (axes("h"),), axes("h")),
        ("+h -> h", (axes("h"),), axes("h")),
        ("1*h+r -> h", ((Affine((("h", 1), ("r", 1)), 0),),), axes("h")),
        ("h+1 w+1 -> h", ((Affine((("h", 1),), 1), Affine((("w", 1),), 1)),), axes("h")),
        ("... a -> a ...", (axes("...", "a"),), axes("a", "...")),
    ],
)
def test_patterns_parse(text, operands, result):
    assert parse_pattern(text) == Pattern(operands, result)
    assert parse_pattern(text) is parse_pattern(text)


def test_parts():
    pattern = parse_pattern("b (h k) x*2+y-1, 1 -> b k")
    assert pattern.operand_names(0) == ("b", "h", "k", "x", "y")
    assert pattern.operand_names(1) == ()
    assert pattern.result_names == ("b", "k")
    assert str(pattern) == "b (h k) x*2+y-1, 1 -> b k"
    assert hash(pattern) == hash(parse_pattern("b  (h k) 2*x+y-1,1->b k"))


@each(
    ("text", "ranks", "expected"),
    [
        ("... a -> ...", (3,), "_1 _0 a -> _1 _0"),
        ("... a -> ...", (1,), "a -> "),
        ("a ... b -> a ...", (4,), "a _1 _0 b -> a _1 _0"),
        ("... a, ... a -> ...", (4, 2), "_2 _1 _0 a, _0 a -> _2 _1 _0"),
        ("... a, a b -> ... b", (3, 2), "_1 _0 a, a b -> _1 _0 b"),
        ("a b -> a", (2,), "a b -> a"),
        ("a -> ... a", (1,), "a -> a"),
    ],
)
def test_ellipsis(text, ranks, expected):
    pattern = parse_pattern(text, ranks)
    assert str(pattern) == expected
    assert parse_pattern(expected, ranks) == pattern


@each(
    ("text", "ranks", "what"),
    [
        ("", None, "expected exactly one '->'"),
        ("a b", None, "expected exactly one '->'"),
        ("a -> b -> c", None, "expected exactly one '->'"),
        ("a - > b", None, "expected exactly one '->'"),
        ("a, b -> a", (1,), "describes 2 operands, got 1"),
        ("-> a", (), "describes 1 operands, got 0"),
        ("(a -> a", None, "'(' without ')'"),
        ("a) -> a", None, "unexpected ')', expected brackets in pairs, not nested"),
        ("((a)) -> a", None, "unexpected '(', expected brackets in pairs, not nested"),
        ("(... a) -> a", None, "'...' in brackets, expected axis names"),
        ("(a*2) -> a", None, "'a*2' in brackets, expected axis names"),
        ("(2) -> 2", None, "'2' in brackets, expected axis names"),
        ("... ... -> a", None, "'...' twice in one operand"),
        ("a -> ... ...", None, "'...' twice in one operand"),
        ("a b ... -> a", (1,), "an operand of 1 axes, expected at least 2"),
        ("... _0 -> _0", (3,), "names such as '_0' together with '...'"),
        ("a -> a a", None, "axis 'a' twice in the result"),
        ("a b -> (a b) a", None, "axis 'a' twice in the result"),
        ("a -> a*2", None, "an index with '*' or '+' in the result, expected plain axes"),
        ("h-r -> h", None, "index 'h-r', expected each axis once with a positive factor"),
        ("h*0 -> h", None, "index 'h*0', expected each axis once with a positive factor"),
        ("h+h -> h", None, "index 'h+h', expected each axis once with a positive factor"),
        ("2 -> ", None, "'2' is neither a name, 1, (a b) nor an index such as h*2+r"),
        ("a+ -> a", None, "'a+' is neither a name"),
        ("a**2 -> a", None, "'a**2' is neither a name"),
        ("--a -> a", None, "'--a' is neither a name"),
        ("a*b -> a", None, "'a*b' is neither a name"),
        ("a.b -> a", None, "'a.b' is neither a name"),
        (".. -> ", None, "'..' is neither a name"),
        ("…a -> a", None, "is neither a name"),
        ("é -> é", None, "'é' is neither a name"),
        ("a٣ -> a", None, "is neither a name"),
        ("h*٣ -> h", None, "is neither a name"),
        ("a\x00 -> a", None, "is neither a name"),
        (f"{'a' * 65} -> b", None, "is neither a name"),
        (f"{'a' * 65}*2 -> b", None, "expected each axis once"),
        ("h*1234567890 -> h", None, "is neither a name"),
    ],
)
def test_refusals(text, ranks, what):
    with pytest.raises(PatternError) as caught:
        parse_pattern(text, ranks)
    message = str(caught.value)
    if "neither" in what and len(text) > 60:
        what = "expected each axis once"  # a name that is too long for an axis
    assert what in message
    assert message.startswith("pattern '")
    assert len(message) < 400


@each("wrong", [None, 5, ["a -> b"], b"a -> a", ("a",), {}])
def test_non_string_patterns_are_refused(wrong):
    with pytest.raises(PatternError, match="expected text such as 'b s d -> b s'"):
        parse_pattern(wrong)


@each("text", ["a " * 10**6, "(" * 10**6 + "->", "a*2+" * 10**6, "->" * 10**6, "," * 10**6 + "->"], ids=lambda t: t[:8])
def test_million_character_pattern_is_refused_quickly(text):
    with pytest.raises(PatternError, match=r"pattern of \d+ characters, expected at most 4000"):
        parse_pattern(text)


def test_long_patterns_parse_quickly():
    with limited():
        many = " ".join(f"a{i}" for i in range(600))
        parse_pattern(f"{many} -> ")
        for text in (
            "," * 3900 + "->",
            "+".join(f"a{i}" for i in range(600)) + " -> ",
            "(" + many + ") -> ",
            "1*" * 1900 + "->",
        ):
            try:
                parse_pattern(text)
            except PatternError as error:
                assert "neither" in str(error)  # noqa: PT017  # one of them is none


names = st.sampled_from(["a", "b", "c", "d_1", "H"])
terms = st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=3)
affines = st.tuples(terms, st.integers(-9, 9)).map(lambda t: Affine(tuple(t[0].items()), t[1]))
dimensions = st.one_of(
    names.map(lambda n: Axes((n,))),
    st.lists(names, max_size=3).map(lambda n: Axes(tuple(n))),
    affines.filter(lambda a: a.offset or [c for _, c in a.terms] != [1]),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(dimensions, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
    st.lists(names, unique=True, max_size=4),
)
def test_what_is_printed_can_be_read(operands, result):
    pattern = Pattern(operands, axes(*result))
    assert parse_pattern(str(pattern)) == pattern


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab12+-*()., ->…é\n_", max_size=25))
def test_any_text_is_a_pattern_or_a_refusal(text):
    try:
        pattern = parse_pattern(text)
    except PatternError:
        return
    assert parse_pattern(str(pattern)) == pattern
