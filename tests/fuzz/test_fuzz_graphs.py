"""Graph files with nodes deleted, replaced, duplicated and swapped: loaded files keep their meaning."""

import copy
import json
import random

import pytest
from budget import examples, is_plain
from damage import GRAPHS, REPLACEMENTS, at, changed, places, saved
from guard import outcome, refused, show

import costgraph as cg
from costgraph.notation.grammar import parse_formula

QUESTIONS = (cg.flops, cg.bytes_moved, cg.peak_memory, cg.param_count)
SIZES = {"B": 2, "S": 7, "D": 12, "H": 3, "F": 12, "V": 13, "L": 3, "T": 6, "W": 4}


def plain(value):
    """Return a file's data in canonical form: formulas and dtypes have several spellings."""
    if isinstance(value, dict):
        if set(value) == {"size"}:
            return {"size": str(parse_formula(value["size"]))}
        if set(value) == {"dtype"} and isinstance(value["dtype"], str):
            return {"dtype": cg.dtype(value["dtype"]).name}
        out = {k: plain(v) for k, v in value.items()}
        for key in ("shape", "strides"):
            out |= {key: [str(parse_formula(t)) for t in value[key]]} if isinstance(value.get(key), list) else {}
        if isinstance(value.get("offset"), str):
            out["offset"] = str(parse_formula(value["offset"]))
        if "type" in value or "dtype" in value:
            out["dtype"] = cg.dtype(value["dtype"]).name if isinstance(value.get("dtype"), str) else None
        return out
    return [plain(v) for v in value] if isinstance(value, list) else value


def known_part(data, model):
    """Return the contents of a file, without keys that saved files do not have."""
    if isinstance(data, dict) and isinstance(model, dict):
        return {k: known_part(data.get(k), v) for k, v in model.items()}
    if isinstance(data, list) and isinstance(model, list) and len(data) == len(model):
        return [known_part(a, b) for a, b in zip(data, model, strict=True)]
    return data


def by_name(data):
    """Edges are unordered; results follow the order of their ops."""
    if isinstance(data, dict):
        out = {k: by_name(v) for k, v in data.items()}
        if isinstance(out.get("edges"), list):
            out["edges"] = sorted(out["edges"], key=json.dumps)
        if isinstance(out.get("nodes"), list):
            results = [n for n in out["nodes"] if n.get("role") == "result"]
            out["nodes"] = [n for n in out["nodes"] if n not in results] + sorted(results, key=json.dumps)
        return out
    return [by_name(v) for v in data] if isinstance(data, list) else data


def ask(data, path, about):
    """Load a damaged file; an accepted file must be queryable and be saved as it was read."""
    path.write_text(json.dumps(data), encoding="utf-8")
    g = outcome(cg.load, path, about=about)
    if isinstance(g, cg.CostGraphError):
        assert isinstance(g, cg.FormatError), f"{type(g)}: {g}"
        assert str(g).startswith(str(path)), str(g)
        return None
    for question in QUESTIONS:
        outcome(question, g, about=(question.__name__, about))
        outcome(question, g, about=(question.__name__, about), **SIZES)
    again = path.with_suffix(".again")
    cg.save(g, again)
    resaved = by_name(plain(json.loads(again.read_text())))
    assert resaved == known_part(by_name(plain(data)), resaved), f"{about}: the file says something else than the graph"
    return g


class Found:
    """Check many files and fail once with all problems."""

    def __init__(self, folder):
        self.path = folder / "f.json"
        self.problems = []

    def ask(self, data, about):
        try:
            ask(data, self.path, about)
        except AssertionError as error:
            self.problems.append(f"{show(about)}: {str(error)[:300]}")

    def none(self):
        assert not self.problems, f"{len(self.problems)} files:\n" + "\n".join(self.problems[:40])


@pytest.mark.parametrize("name", GRAPHS)
def test_valid_files_are_taken(tmp_path, name):
    data = saved(name, tmp_path)
    assert ask(data, tmp_path / "valid.json", name) is not None


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_deleted_repeated_or_replaced(tmp_path, name):
    rng = random.Random(name)
    data = saved(name, tmp_path)
    checker = Found(tmp_path)
    for route in list(places(data))[:: 45 if is_plain() else 1]:
        checker.ask(changed(data, route, "delete"), (route, "delete"))
        if isinstance(route[-1], int):
            checker.ask(changed(data, route, "twice"), (route, "twice"))
        for value in rng.sample(REPLACEMENTS, min(len(REPLACEMENTS), examples(1))):
            checker.ask(changed(data, route, "replace", value), (route, value))
    checker.none()


@pytest.mark.parametrize("name", GRAPHS)
def test_nodes_exchanged_at_random(tmp_path, name):
    rng = random.Random(name)
    data = saved(name, tmp_path)
    spots = list(places(data))
    checker = Found(tmp_path)
    for _ in range(examples(80)):
        a, b = rng.sample(spots, 2)
        if a[: len(b)] == b or b[: len(a)] == a:
            continue
        checker.ask(changed(data, a, "swap", b), (a, b))
    checker.none()


@pytest.mark.parametrize("name", GRAPHS)
def test_several_nodes_replaced_by_others_of_the_same_file(tmp_path, name):
    rng = random.Random(name)
    data = saved(name, tmp_path)
    values = list(REPLACEMENTS)
    checker = Found(tmp_path)
    for _ in range(examples(60)):
        out = data
        edits = []
        for _ in range(rng.randint(1, 3)):
            spots = list(places(out))
            route, other = rng.choice(spots), rng.choice(spots)
            value = rng.choice(values)
            if rng.random() < 0.6:
                value = data
                for key in other:
                    try:
                        value = value[key]
                    except (KeyError, IndexError, TypeError):
                        break
            out = changed(out, route, "replace", value)
            edits.append((route, value))
        checker.ask(out, edits)
    checker.none()


SCRAPS = [b"", b"0", b"{", b"]", b'"', b"NaN", b"\xff", b"\x00", b"1e999", b"-", b"null", b"9" * 50]


def test_texts_of_valid_files_cut_and_altered(tmp_path):
    rng = random.Random(1)
    for name in GRAPHS:
        text = json.dumps(saved(name, tmp_path)).encode()
        path = tmp_path / "f.json"
        for _ in range(examples(60)):
            i, n = rng.randrange(len(text)), rng.choice([0, 1, 1, 2, 50])
            new = rng.choice(
                [b"", b"0", b"{", b"]", b'"', b"NaN", b"\xff", b"\x00", b"1e999", b"-", b"null", b"9" * 50]
            )
            path.write_bytes(text[:i] + new + text[i + n :])
            g = outcome(cg.load, path, about=(name, i, n, new))
            if isinstance(g, cg.Graph):
                for question in QUESTIONS:
                    outcome(question, g)


NESTED = [
    b"[" * 10**5, b'{"a":' * 10**5, b"[" * 10**5 + b"]" * 10**5, b'{"graph":' * 10**5 + b"1" + b"}" * 10**5,
    b'{"graph": {"schema": "costgraph/graph/1", "name": ' + b"[" * 10**5, b"9" * 10**6, b'"' + b"x" * 10**6 + b'"',
    b"\xff\xfe{\x00}\x00", "\ufeff{}".encode(), b"", b"null", b"NaN", b"[1e999999]", b'{"a": 1, "a": 2}', b"\x00" * 99,
]  # fmt: skip


@pytest.mark.parametrize("content", NESTED, ids=range(len(NESTED)))
def test_invalid_graph_files_are_refused(tmp_path, content):
    path = tmp_path / "f.json"
    path.write_bytes(content)
    assert isinstance(refused(cg.load, path), cg.FormatError)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/dev/urandom", "/", "/proc/self/mem", "/nowhere/f.json"])
def test_graph_paths_without_file_are_refused(path):
    assert isinstance(refused(cg.load, path), cg.FormatError)
    refused(cg.load_hardware, path)


def kinds_of_keys(data):
    """Return a path to one key per kind of place, ignoring indices and names in the path."""
    routes_by_key = {}
    for route in places(data):
        if isinstance(route[-1], str):
            way = [step for step in route[:-1] if isinstance(step, str)]
            owner = at(data, route[:-1])
            routes_by_key.setdefault((*way, owner.get("role"), owner.get("kind"), tuple(sorted(owner))), []).append(
                route
            )
    # the keys of defaults and extents are user-defined names
    return [routes[0] for key, routes in routes_by_key.items() for routes in by_last(routes) if "defaults" not in key]


def by_last(routes):
    return [[r for r in routes if r[-1] == last] for last in dict.fromkeys(r[-1] for r in routes)]


@pytest.mark.parametrize("name", GRAPHS)
def test_renamed_keys_are_refused_at_every_level(name, tmp_path):
    """Ignored keys would hide newer file versions and misspellings."""
    data = saved(name, tmp_path)
    path = tmp_path / "renamed.json"
    taken = []
    for route in kinds_of_keys(data):
        out = copy.deepcopy(data)
        *way, key = route
        inner = at(out, way)
        inner[f"{key}s"] = inner.pop(key)
        path.write_text(json.dumps(out))
        if not isinstance(outcome(cg.load, path, about=route), cg.CostGraphError):
            taken.append(route)
    assert not taken
