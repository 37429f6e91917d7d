"""Reading a config.json of transformers: every field is used, known to change no cost, or an error."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from numbers import Real
from pathlib import Path

from ..errors import CostGraphError, FormatError, UnsupportedError
from ..symbols import shown

__all__ = ["Config", "read_config"]

_LARGEST = 2**20  # bytes: configurations are a few thousand

#: Fields that every model may have and that change no cost of a forward pass or a training step of the whole model.
NO_COST = frozenset(
    """
    architectures model_type transformers_version _name_or_path name_or_path auto_map torch_dtype dtype return_dict
    use_cache output_hidden_states output_attentions output_router_logits _commit_hash bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id cls_token_id mask_token_id unk_token_id
    forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids initializer_range initializer_factor
    init_std id2label label2id num_labels finetuning_task problem_type task task_specific_params tokenizer_class
    prefix torchscript use_bfloat16 max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty gradient_checkpointing attn_implementation _attn_implementation
    _attn_implementation_autoset _experts_implementation pretraining_tp rms_norm_eps layer_norm_eps norm_eps
    layer_norm_epsilon rope_theta default_theta original_max_position_embeddings unsloth_fixed
    _attn_implementation_internal experts_implementation attention_dropout hidden_dropout resid_dropout
    cross_attention_hidden_size pruned_heads chunk_size_feed_forward classifier_dropout
    """.split()  # noqa: SIM905  # a list of seventy words in quotes is harder to read
)

#: Elementwise functions by the names that transformers gives them in `hidden_act` and the like.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu2": "relu2", "relu6": "relu6", "silu": "silu", "swish": "silu", "sigmoid": "sigmoid", "tanh": "tanh",
    "mish": "mish", "leaky_relu": "leaky_relu", "hardswish": "hardswish",
}  # fmt: skip

#: Switches that every model may have and that change nothing while they are off.
OFF = frozenset({"is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"})


class Config:
    """The fields of a configuration, and which of them were asked for.

    Parameters
    ----------
    fields : mapping
        What the file holds.
    place : str
        What errors name.
    """

    def __init__(self, fields: Mapping[str, object], place: str) -> None:
        self._fields = dict(fields)
        self.place = place
        """What errors name."""
        self._used: set[str] = set()
        self._parts: list[Config] = []

    # -- asking for a field ------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a field is there and is not null."""
        return self._fields.get(name) is not None

    def stated(self, name: str) -> bool:
        """Whether a field is there, be it null."""
        return name in self._fields

    def _get(self, names: tuple[str, ...]) -> tuple[str, object]:
        self._used.update(names)
        return next(((n, self._fields[n]) for n in names if self.has(n)), (names[0], None))

    def _wrong(self, name: str, value: object, expected: str) -> CostGraphError:
        return FormatError(f"{self.place}: {name} is {shown(value)}, expected {expected}")

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number: the first of the names that the file has."""
        name, value = self._get(names)
        if value is None and default is not None:
            return default
        if value is None:
            raise FormatError(f"{self.place}: {' or '.join(names)} is missing, expected a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(name, value, f"a whole number of at least {least}")
        return value

    def optional(self, name: str, absent: int | None) -> int | None:
        """Return a whole number, None where the file says null, and `absent` where it says nothing."""
        return self.size(name) if self.has(name) else None if self.stated(name) else absent

    def size_or_auto(self, name: str, auto: int) -> int:
        """Return a whole number, or what the word auto stands for, as does a field that is missing."""
        if self._fields.get(name) == "auto":
            self._used.add(name)
            return auto
        return self.size(name, default=auto)

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a number."""
        name, value = self._get(names)
        if value is None and default is not None:
            return default
        if value is None:
            raise FormatError(f"{self.place}: {' or '.join(names)} is missing, expected a number")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a switch."""
        _, value = self._get((name,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, *names: str, of: Collection[str], default: str | None = None) -> str:
        """Return a word that is one of some; another one is not understood."""
        name, value = self._get(names)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in of:
            raise UnsupportedError(f"{self.place}: {name} is {shown(value)}, expected one of {', '.join(of)}")
        return value

    def activation(self, *names: str, default: str | None = None) -> str:
        """Return the elementwise function that transformers means by a word, as `costgraph.pointwise` names it."""
        return ACTIVATIONS[self.choice(*names, of=ACTIVATIONS, default=default)]

    def labels(self, default: int = 2) -> int:
        """Return the number of classes of a classifier, which transformers writes as a list of their names."""
        names = self._fields.get("id2label")
        if isinstance(names, Mapping) and names and not self.has("num_labels"):
            return len(names)
        return self.size("num_labels", default=default)

    def sizes(self, *names: str, default: list[int] | None = None, least: int = 1, empty: bool = False) -> list[int]:
        """Return a list of whole numbers; with `empty` there may be none in it."""
        name, value = self._get(names)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, list)
            or not (value or empty)
            or any(isinstance(n, bool) or not isinstance(n, int) or n < least for n in value)
        ):
            raise self._wrong(name, value, f"a list of whole numbers of at least {least}")
        return list(value)

    def words(self, *names: str, of: Collection[str], default: list[str] | None = None) -> list[str]:
        """Return a list of words, each one of some."""
        name, value = self._get(names)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not value or any(not isinstance(n, str) or n not in of for n in value):
            raise UnsupportedError(f"{self.place}: {name} is {shown(value)}, expected a list of {', '.join(of)}")
        return list(value)

    def part(self, name: str) -> Config:
        """Return the fields of a part of a model, such as its text or its vision tower."""
        _, value = self._get((name,))
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        found = Config({str(k): v for k, v in value.items()}, f"{self.place}: {name}")
        self._parts.append(found)
        return found

    def pattern(self, name: str, of: Mapping[str, str], depth: int, default: list[str]) -> tuple[tuple[str, ...], int]:
        """Return the kinds of layers in one period of a list with one word a layer, and how many end a further one."""
        kinds = [of[word] for word in self.words(name, of=of, default=default)]
        if len(kinds) != depth:
            raise FormatError(f"{self.place}: {name} has {len(kinds)} words, expected one for each of {depth} layers")
        period = next(n for n in range(1, depth + 1) if all(kinds[i] == kinds[i % n] for i in range(depth)))
        return tuple(kinds[:period]), depth % period

    def expect(self, name: str, *values: object) -> None:
        """Refuse a field that is there and has another value than these: what it would mean is not declared."""
        _, value = self._get((name,))
        if value is not None and not any(value is v or (type(value) is type(v) and value == v) for v in values):
            raise UnsupportedError(
                f"{self.place}: {name} is {shown(value)}, expected {' or '.join(map(shown, values)) or 'nothing'}: "
                f"what else it would cost is not known"
            )

    def ignore(self, *names: str) -> None:
        """Pass over fields that change no cost."""
        self._used.update(names)

    def partial_rotary(self, default: float = 1.0) -> float:
        """Return which part of a head's elements rotary positions turn."""
        self._used |= {"partial_rotary_factor", "rotary_pct"}
        rope = next((r for r in map(self._fields.get, ("rope_parameters", "rope_scaling")) if r is not None), {})
        inner = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        part = (
            float(inner)
            if isinstance(inner, Real)
            else self.number("partial_rotary_factor", "rotary_pct", default=default)
        )
        if not 0 < part <= 1:
            raise self._wrong("partial_rotary_factor", part, "a number above 0, up to 1")
        return part

    def rotated(self, head: int) -> int:
        """Return how many elements of a head rotary positions turn: those of whole pairs."""
        part = self.partial_rotary()
        if int(head * part) < 1:
            raise self._wrong("partial_rotary_factor", part, f"a part of {head} that is 1 at the least")
        return -(-int(head * part) // 2) * 2

    def finish(self) -> None:
        """Refuse what nobody has asked for: it may change the cost."""
        self._used |= {"rope_parameters", "rope_scaling"}  # frequencies alone, but for the factor
        if "partial_rotary_factor" not in self._used and self.partial_rotary() != 1:
            raise UnsupportedError(f"{self.place}: partial_rotary_factor is {self.partial_rotary()}, expected 1")
        known = self._used | NO_COST | {n for n in OFF if self._fields.get(n) is False}
        left = sorted(n for n, v in self._fields.items() if v is not None and n not in known)
        if left:
            raise UnsupportedError(
                f"{self.place}: {left[0]} is {shown(self._fields[left[0]])}, expected a field that is known: "
                f"whether it changes the cost is not understood"
            )
        for part in self._parts:
            part.finish()

    def decoder(self, *, grouped: bool = False, head: int | None = None) -> dict[str, int]:
        """Return the sizes of a decoder, of which most configurations have fields of the same names.

        Parameters
        ----------
        grouped : bool
            Whether the file must say how many heads of keys there are, be it null for as many as of queries.
        head : int, optional
            Size of a head where the file says nothing; D/H by default.
        """
        D, H = self.size("hidden_size"), self.size("num_attention_heads")
        unsaid = grouped and not self.stated("num_key_value_heads")
        sizes = {"D": D, "H": H, "G": self.size("num_key_value_heads", default=None if unsaid else H)}
        sizes |= {"K": self.size("head_dim", default=head or max(1, D // H)), "F": self.size("intermediate_size")}
        return sizes | {"L": self.size("num_hidden_layers"), "V": self.size("vocab_size")}

    # -- what all models have -----------------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """The one architecture that the file names."""
        value = self._fields.get("architectures")
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
            raise self._wrong("architectures", value, "a list of one name")
        return value[0]

    @property
    def dtype(self) -> str | None:
        """The number format of the weights, as the library names it, or None where the file says nothing."""
        value = self._fields.get("dtype") or self._fields.get("torch_dtype")
        if value is None:
            return None
        known = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
        word = value.removeprefix("torch.") if isinstance(value, str) else ""
        if word not in known:
            raise UnsupportedError(f"{self.place}: dtype is {shown(value)}, expected one of {', '.join(known)}")
        return known[word]


def read_config(path: object) -> Config:
    """Read a configuration from a file, a folder that holds a config.json, or a mapping of its fields."""
    if isinstance(path, Mapping):
        fields, place = path, "config"
    else:
        if not isinstance(path, str | os.PathLike):
            raise FormatError(f"from_config of {type(path).__name__}, expected a path or a mapping")
        fields, place = _loaded(path)
    return Config({str(k): v for k, v in fields.items()}, place)


def _loaded(path: str | os.PathLike[str]) -> tuple[Mapping[object, object], str]:
    try:
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        place = str(file)
        with file.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise FormatError(f"{place}: more than {_LARGEST} bytes, expected a config.json")
        fields = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}, expected a config.json") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: {shown(str(error))}, expected JSON") from None
    if not isinstance(fields, Mapping):
        raise FormatError(f"{place}: {shown(fields)}, expected an object")
    return fields, place
