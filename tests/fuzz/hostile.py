# ruff: noqa: RUF001  # look-alikes are what this is about
"""Hostile inputs: too deep, too long, too large, of the wrong type, or misleading."""

import decimal
import fractions

import numpy as np

DEEP = 10**5

#: Texts that are invalid everywhere.
TEXTS = [
    "", " ", "\n", "\t", "\0", "\x1b[31m", "\r\n", "\ufeff", "\u200b", "\u2028", "\ud800", "\udcff", "\U0001f600",
    "А", "Β", "ａ", "１", "٣", "²", "∞", "−1", "×", "B\0", "B\n", "\nB", "B\u0301", "_", "__import__('os')", "B;S",
    "${HOME}", "`id`", "%s%n", "{0.__class__}", "../../etc/passwd", "-", "--", "->", "=", "==", ",", ",,", "'", '"',
    "(", ")", "()", "(()", "[", "]", "*", "**", "/", "//", "\\", "#", "NaN", "nan", "inf", "-inf", "Infinity", "None",
    "True", "null", "0", "-1", "0.5", "1e999999", "1e-999999", "0x10", "1_000", "1e5", "9" * 10**6, "-" + "9" * 5000,
    "x" * 10**6, "é" * 10**5, " " * 10**6, "(" * DEEP, "(" * DEEP + "B" + ")" * DEEP, "[" * DEEP, "-" * DEEP + "B",
    "B," * DEEP, "B " * DEEP, "B+" * DEEP + "B", "B*" * DEEP + "B", "a->" * DEEP, "\n" * DEEP, "🦙" * DEEP,
]  # fmt: skip

#: Short formula texts with huge values.
FORMULAS = [
    "2**10**10", "9**9**9**9", "B**99999999999", "1e999999", "2**(2**40)", "B**(2**30)", "(B+1)**(10**9)",
    "(A+B)**50 * (C+D)**50", "(A+B+C+D)**1000", "(A+B+C+D)**64", "(A+B+C)**64*(A+B)", "1/(A+B+C)**64",
    "(A**1024-1)/(A-1)", "(A**1024-B**1024)/(A**2-B)", "((A+B)**60-C)/(A+B+1)", "floor((A+B)**60/7)",
    "ceiling((A+B+C)**30/7)", "2**A**B**C**D**E", "2**2**2**2**A", "(1/3)**(A*1000000000000000)", "A**(10**39)",
    "2**(A*10**39)", "(2**8000)**A", "7**(A/10**39)", "(A+B)**(C/2)", "(A-B)**(1/2)", "0**A", "0**0", "0**(-1)", "1/0",
    "1/(A-A)", "(A-A)**(A-A)", "(10**39+7)**(A/3+1/7)", "(2**4001-1)**(A/2)", "(Max(A,B)+Max(C,D))**64",
    "ceiling(A/2)**1025", "A**1024*A", "Max()", "floor(A, B)", "Max(A,)", "Max(A B)", "sin(A)", "A(B)", "A.B", "A[0]",
    "lambda: 0", "Max(" * 59 + "A,B" + ")" * 59, "floor(" * 59 + "A/2" + ")" * 59,
    "Min(A,Max(B," * 25 + "C" + "))" * 25,
    "floor(" * 10**5, "Max(" + "A," * 10**4, "Max(" + ",".join(f"A{i}*B{i % 7}" for i in range(200)) + ")",
    "Max(" + ",".join(f"floor((A{i}+B)/{i + 2})" for i in range(60)) + ")",
    "Max(" * 25 + "A" + "".join(f",B{i}*C{i % 5}+1),D{i}" for i in range(24)) + ")",
    "+".join(f"A{i}*B{i}" for i in range(2000)), "*".join(f"A{i}" for i in range(4000)),
    "*".join(f"(A{i}+1)" for i in range(16)), "*".join(f"(A{i}+1)" for i in range(1000)),
    "Max(" + "+".join(f"floor(A/{i})" for i in range(2, 200)) + ", B)",
    "floor(" + "+".join(f"floor(A/{i})" for i in range(2, 400)) + ")",
    "+".join(f"(A+B+C)**{i}" for i in range(65)), "*".join(["(A+B)**16"] * 200), "/".join(["(A+B)**16"] * 200),
    "+".join(f"1/(A+{i})" for i in range(1, 400)), "/".join(f"(A+{i})" for i in range(1, 100)),
]  # fmt: skip

#: Values with unexpected types.
VALUES = [
    None, True, False, 0, -1, 1, 10**30, 10**5000, -(10**5000), 0.5, -0.0, float("nan"), float("inf"), float("-inf"),
    1e308, 1j, b"B", bytearray(b"1"), (), [], {}, set(), (1,), [None], {"a": 1}, object(), type, len, range(3),
    fractions.Fraction(1, 3), fractions.Fraction(10**5000, 3), decimal.Decimal("1e999999"), decimal.Decimal("sNaN"),
    np.int64(3), np.float64(2.5), np.array([1, 2]), np.array("x"), Ellipsis, NotImplemented, [10**5000],
    {"k": [10**5000]},
]  # fmt: skip


def nested(depth):
    """Return a deeply nested list."""
    out = []
    for _ in range(depth):
        out = [out]
    return out
