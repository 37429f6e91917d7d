"""Fields of a config.json of transformers: every one is used, known to change no cost, or an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from numbers import Real
from typing import Any

from ..algebra.symbols import shown
from ..errors import CostGraphError, FormatError, UnsupportedError
from .defaults import ACTIVATIONS, ALIASES, DEFAULTS, NO_COST, OFF, ROPES

__all__ = ["Config", "keyed"]

_MOST = 2**63 - 1  # of what is counted, as tensors have it
_STAGES = 32  # numbers in a list: each stage of a network of images halves a side
_LISTED = 2**16  # layers that are listed one by one, where no rule says when they repeat
_RUNS = 128  # runs of equal layers in a period, as each is declared on its own


class Config:
    """The fields of a configuration, and which of them were asked for.

    A field that is not there is what transformers has for it (`DEFAULTS`), or missing where nothing is said there.
    Null is what the caller gives as `default`; where transformers has something else than null, it is missing too.
    """

    def __init__(self, fields: Mapping[str, object], place: str) -> None:
        self._fields = dict(fields)
        self.place = place
        """What errors name."""
        self._defaults: Mapping[str, object] = {}
        self._used: set[str] = set()
        self._parts: list[Config] = []

    def settle(self, kind: str) -> None:
        """Take what is not said, and second names of fields, as transformers has them for a type of models."""
        said = self._fields.get("model_type")
        if isinstance(said, str) and said != kind and said in DEFAULTS:
            raise self._wrong("model_type", said, f"{kind!r}, as its architecture has")
        self._defaults = DEFAULTS.get(kind, {})
        for other, name in ALIASES.get(kind, {}).items():
            if other not in self._fields:
                continue
            value = self._fields.pop(other)
            own = self._fields.setdefault(name, value)
            if not _same(own, value):
                raise FormatError(
                    f"{self.place}: {name} is {shown(own)} and {other} is {shown(value)}, expected one value: they are "
                    f"two names of one field"
                )

    @property
    def fields(self) -> dict[str, object]:
        """All that the file says."""
        return dict(self._fields)

    # -- asking for a field ------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a field is there and is not null."""
        return self._fields.get(name) is not None

    def stated(self, name: str) -> bool:
        """Whether a field is there, be it null."""
        return name in self._fields

    def _get(self, name: str, default: Any = None) -> Any:
        self._used.add(name)
        usual = self._defaults.get(name)
        value = self._fields.get(name, usual)
        return default if value is None and usual is None else value

    def _is_null(self, name: str) -> bool:
        """Whether a file says null, or says nothing where transformers has that."""
        return self._get(name) is None or (self.stated(name) and not self.has(name))

    def _wrong(self, name: str, value: object, expected: str) -> CostGraphError:
        if value is None:
            return FormatError(f"{self.place}: {name} is missing, expected {expected}")
        return FormatError(f"{self.place}: {name} is {shown(value)}, expected {expected}")

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number."""
        value = self._get(name, default)
        if not _is_size(value, least):
            raise self._wrong(name, value, f"a whole number of at least {least} and below 2**63")
        return int(value)

    def optional(self, name: str) -> int | None:
        """Return a whole number, or None where the file says null, or where transformers has that."""
        return None if self._is_null(name) else self.size(name)

    def size_or_auto(self, name: str, auto: int) -> int:
        """Return a whole number, or what the word auto stands for."""
        return auto if _same(self._get(name), "auto") else self.size(name)

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        """Return a number, as large as a size at the most."""
        value = self._get(name, default)
        if not _is_finite(value) or (above is not None and value <= above):
            expected = "a number" if above is None else f"a number above {above}"
            raise self._wrong(name, value, f"{expected}, of less than 2**63")
        return float(value)

    def factor(self, name: str) -> float | None:
        """Return a number above 0, or None where the file says null, or where transformers has that."""
        return None if self._is_null(name) else self.number(name, above=0)

    def flag(self, name: str, default: bool | None = None, *, null: bool | None = None) -> bool:
        """Return a switch; `null` is what null means where transformers takes it, whatever else it has."""
        value = self._get(name, default)
        value = null if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, of: Collection[str], default: str | None = None) -> str:
        """Return a word that is one of some; another one is not understood."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in of:
            raise UnsupportedError(f"{self.place}: {name} is {shown(value)}, expected one of {', '.join(of)}")
        return value

    def activation(self, name: str, default: str | None = None) -> str:
        """Return the elementwise function that transformers means by a word, as `costgraph.ops.pointwise` names it."""
        return ACTIVATIONS[self.choice(name, of=ACTIVATIONS, default=default)]

    def labels(self) -> int:
        """Return the number of classes of a classifier, which transformers writes as an object of their names."""
        names = self._get("id2label")
        if names is None:
            return self.size("num_labels", default=2)
        keys = {int(k) for k in names if _is_place(k)} if isinstance(names, Mapping) else set()
        if not keys or len(keys) != len(names):
            raise self._wrong("id2label", names, "a name for each of one class or more, by its number")
        self.expect("num_labels", len(keys))
        return len(keys)

    def sizes(self, name: str, least: int = 1, *, empty: bool = False, most: int = _STAGES) -> list[int]:
        """Return a list of whole numbers; with `empty` there may be none in it."""
        value = self._get(name, [] if empty else None)
        if not isinstance(value, list) or not (value or empty) or not all(_is_size(n, least) for n in value):
            raise self._wrong(name, value, f"a list of whole numbers of at least {least}")
        if len(value) > most:
            raise UnsupportedError(f"{self.place}: {name} has {len(value)} numbers, expected {most} at the most")
        return list(value)

    def words(self, name: str) -> list[str]:
        """Return a list of words, none where the file says nothing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(n, str) for n in value):
            raise self._wrong(name, value, "a list of strings")
        return list(value)

    def word(self, name: str) -> str:
        """Return any word."""
        value = self._get(name)
        if not isinstance(value, str):
            raise UnsupportedError(f"{self.place} is {shown(self._fields)}, expected {name} to be a word")
        return value

    def part(self, name: str, kind: str = "") -> Config:
        """Return the fields of a part of a file, such as a tower of images, which is of a type of its own."""
        value = self._get(name)
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        found = Config(keyed(value, f"{self.place}: {name}"), f"{self.place}: {name}")
        found.settle(kind)
        self._parts.append(found)
        return found

    def layer_types(self, of: Mapping[str, str], depth: int, rule: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """Return the kinds of layers in one period, and how many end a further one.

        `of` has the kinds by the words of the file, `rule` the words that the layers have over and over where it does
        not list them.
        """
        words = self._get("layer_types", list(rule[:depth]))
        if not isinstance(words, list) or not words or not all(isinstance(n, str) and n in of for n in words):
            raise UnsupportedError(f"{self.place}: layer_types is {shown(words)}, expected a list of {', '.join(of)}")
        if self.has("layer_types") and len(words) != depth:
            raise FormatError(
                f"{self.place}: layer_types has {len(words)} words, expected one for each of {depth} layers"
            )
        return self.period("layer_types", [of[word] for word in words], depth)

    def period(self, name: str, kinds: Sequence[str], depth: int) -> tuple[tuple[str, ...], int]:
        """Return the shortest period of layers that are of some kinds over and over, and how many end a further one."""
        found = _period(kinds)
        if depth > len(kinds) and len(kinds) % found:  # the kinds begin anew before the shorter period ends
            found = len(kinds)
        runs = sum(1 for _ in groupby(kinds[:found]))
        if runs > _RUNS:
            raise UnsupportedError(
                f"{self.place}: {name} has {runs} runs of equal layers before it repeats, expected {_RUNS} at the most"
            )
        return tuple(kinds[:found]), depth % found

    def listed(self, depth: int) -> int:
        """Return a number of layers that are listed one by one, as no rule says when they repeat."""
        if depth > _LISTED:
            raise UnsupportedError(
                f"{self.place}: {depth} layers that do not repeat, expected {_LISTED} of such at the most"
            )
        return depth

    def need(self, name: str, value: object) -> None:
        """Refuse a field that is not there, or has another value."""
        if not self.has(name):
            raise self._wrong(name, None, shown(value))
        self.expect(name, value)

    def expect(self, name: str, *values: object) -> None:
        """Refuse a field that has another value than these: what it would mean is not declared."""
        value, usual = self._get(name), self._defaults.get(name)
        if value is None and usual is None:
            return
        if not any(_same(value, v) for v in values):
            raise UnsupportedError(
                f"{self.place}: {name} is {shown(value)}, expected {' or '.join(map(shown, values)) or 'nothing'}: "
                f"what else it would cost is not known"
            )

    def ignore(self, *names: str) -> None:
        """Pass over fields that change no cost."""
        self._used.update(names)

    # -- rotary positions --------------------------------------------------------------------------------------------

    def _rope(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return what the file says of rotary positions, of all layers or of each kind of them."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        both = [n for n in ("rope_parameters", "rope_scaling") if self.has(n)]
        for name in both:
            value: Any = self._fields[name]
            if not isinstance(value, Mapping):
                raise self._wrong(name, value, "an object")
            inner = [(f"{name}: {k}", v) for k, v in value.items() if isinstance(v, Mapping)]
            found += [(name, value), *inner]
        for place, rope in found:
            kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
            if not isinstance(kind, str) or kind not in ROPES:
                raise UnsupportedError(f"{self.place}: {place}: {shown(kind)}, expected one of {', '.join(ROPES)}")
            if factor is not None and not (_is_finite(factor) and factor > 0):
                raise self._wrong(f"{place}: factor", factor, "a number above 0")
        if len(both) == 2 and not _same(self._fields[both[0]], self._fields[both[1]]):
            raise self._wrong(both[1], self._fields[both[1]], f"what {both[0]} is: they are two names of one field")
        return found

    def partial_rotary(self) -> float:
        """Return which part of a head's elements rotary positions turn."""
        self._used |= {"partial_rotary_factor", "rotary_pct"}
        said: dict[str, Any] = {n: self._fields.get(n) for n in ("partial_rotary_factor", "rotary_pct")}
        said |= {f"{place}: partial_rotary_factor": r.get("partial_rotary_factor") for place, r in self._rope()}
        said = {name: value for name, value in said.items() if value is not None}
        for name, value in said.items():
            if not _is_finite(value) or not 0 < value <= 1:
                raise self._wrong(name, float(value) if _is_finite(value) else value, "a number above 0, up to 1")
        if len(set(said.values())) > 1:
            raise FormatError(f"{self.place}: {shown(said, 200)}, expected one part that is turned")
        return float(next(iter(said.values()), 1))

    def rotated(self, head: int) -> int:
        """Return how many elements of a head rotary positions turn: those of whole pairs."""
        part = self.partial_rotary()
        if int(head * part) < 1:
            raise self._wrong("partial_rotary_factor", part, f"a part of {head} that is 1 at the least")
        return -(-int(head * part) // 2) * 2

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Refuse what nobody has asked for: it may change the cost."""
        if "partial_rotary_factor" not in self._used and self.partial_rotary() != 1:
            raise UnsupportedError(f"{self.place}: partial_rotary_factor is {self.partial_rotary()}, expected 1")
        self._used |= {"rope_parameters", "rope_scaling"}
        known = self._used | NO_COST | {n for n in OFF if self._fields.get(n) is False}
        left = sorted(n for n, v in self._fields.items() if v is not None and n not in known)
        if left:
            name = shown(left[0]).strip("'")
            raise UnsupportedError(
                f"{self.place}: {name} is {shown(self._fields[left[0]])}, expected a field that is "
                f"known: whether it changes the cost is not understood"
            )
        for part in self._parts:
            part.finish()

    # -- what many models have ---------------------------------------------------------------------------------------

    def decoder(self) -> dict[str, int]:
        """Return the sizes of a decoder, of which most configurations have fields of the same names."""
        D, H = self.size("hidden_size"), self.size("num_attention_heads")
        # null is as many heads as of queries; a file that says nothing is read where transformers has that as well
        alone = self.stated("num_key_value_heads") or "num_key_value_heads" in self._defaults
        sizes = {"D": D, "H": H, "G": self.size("num_key_value_heads", default=H if alone else None)}
        sizes |= {"K": self.size("head_dim", default=max(1, D // H)), "F": self.size("intermediate_size")}
        return sizes | {"L": self.size("num_hidden_layers"), "V": self.size("vocab_size")}

    @property
    def architecture(self) -> str:
        """The one architecture that the file names."""
        value = self._fields.get("architectures")
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
            raise FormatError(f"{self.place}: architectures is {shown(value)}, expected a list of one name")
        return value[0]

    @property
    def dtype(self) -> str | None:
        """The number format of the weights, as the library names it, or None where the file says nothing."""
        value = self._fields.get("dtype" if self.has("dtype") else "torch_dtype")
        if value is None:
            return None
        known = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
        word = value.removeprefix("torch.") if isinstance(value, str) else ""
        if word not in known:
            raise UnsupportedError(f"{self.place}: dtype is {shown(value)}, expected one of {', '.join(known)}")
        return known[word]


def _same(a: object, b: object) -> bool:
    """Whether two values of a file are the same, which true and 1 are not; in Python there may be any others."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


def _is_size(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and _is_within(value)


def _is_within(value: Any) -> bool:
    return bool(-_MOST <= value <= _MOST)


def _is_place(text: object) -> bool:
    return isinstance(text, int) or (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20)


def _period(kinds: Sequence[str]) -> int:
    """Return after how many layers a finite list repeats itself, be it in part: by its longest border."""
    borders, length = [0], 0
    for kind in kinds[1:]:
        while length and kind != kinds[length]:
            length = borders[length - 1]
        length += kind == kinds[length]
        borders.append(length)
    return len(kinds) - length


def keyed(fields: Mapping[Any, object], place: str) -> dict[str, object]:
    """Return the fields; in Python their names may be anything."""
    found = dict(fields)
    wrong = next((name for name in found if not isinstance(name, str)), "")
    if wrong != "":
        raise FormatError(f"{place}: {shown(wrong)} as the name of a field, expected a string")
    return found
