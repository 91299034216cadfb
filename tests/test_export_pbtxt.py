"""The reader of protobuf's text form against protobuf's own, on the configs that are written and on texts made up."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from export.triton.config import Serving
from export.triton.lint import FIELDS, misused_fields
from export.triton.pbtxt import Message, Name, ParseError, Plain, parse, pbtxt_from
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests.export_served import CLASSES, write_onnx, write_plan

WORDS = ("TYPE_FP32", "TYPE_INT64", "KIND_GPU", "KIND_CPU")
# Every kind of value, and messages in one another; all fields may be repeated.
EVERY: dict[str, object] = {"text": "text", "number": "int", "share": "float", "flag": "bool", "kind": "name"}
NESTED: dict[str, object] = {**EVERY, "inner": {**EVERY, "deep": {**EVERY}}}
Proto = Any
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "text": _FIELD.TYPE_STRING,
    "int": _FIELD.TYPE_INT64,
    "float": _FIELD.TYPE_DOUBLE,
    "bool": _FIELD.TYPE_BOOL,
    "name": _FIELD.TYPE_ENUM,
}


def proto_class(fields: Mapping[str, object]) -> Proto:
    """A message type with these fields, each repeated; a field of unknown content is left out."""
    file = descriptor_pb2.FileDescriptorProto(name="made.proto", package="made", syntax="proto2")
    words = file.enum_type.add(name="Word")
    for number, word in enumerate(WORDS):
        words.value.add(name=word, number=number)

    def fill(message: Proto, path: str, content: Mapping[str, object]) -> None:
        for number, (name, kind) in enumerate(content.items(), start=1):
            added = message.field.add(name=name, number=number, label=_FIELD.LABEL_REPEATED)
            if isinstance(kind, Mapping):
                added.type, added.type_name = _FIELD.TYPE_MESSAGE, f"{path}.In_{name}"
                fill(message.nested_type.add(name=f"In_{name}"), f"{path}.In_{name}", kind)
            elif kind is None:
                message.field.remove(added)
            else:
                added.type = _TYPES[str(kind)]
                if kind == "name":
                    added.type_name = ".made.Word"

    fill(file.message_type.add(name="Config"), ".made.Config", fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("made.Config"))


# Python's own reading of escapes within protobuf's warns of some.
pytestmark = pytest.mark.filterwarnings("ignore:.*escape sequence.*:DeprecationWarning")
CONFIG, NEST = proto_class(FIELDS), proto_class(NESTED)


def values_of_proto(message: Proto) -> dict[str, list[object]]:
    """Field name -> its values in order; an enum's value as (its name,)."""
    values: dict[str, list[object]] = {}
    for field, repeated in message.ListFields():
        if field.type == _FIELD.TYPE_MESSAGE:
            values[field.name] = [values_of_proto(each) for each in repeated]
        elif field.type == _FIELD.TYPE_ENUM:
            values[field.name] = [(WORDS[number],) for number in repeated]
        else:
            values[field.name] = list(repeated)
    return values


def values_of_ours(message: Message) -> dict[str, list[object]]:
    values: dict[str, list[object]] = {}
    for field in message.fields:
        value: object = field.value
        if isinstance(value, Message):
            value = values_of_ours(value)
        elif isinstance(value, Name):
            value = (str(value),)
        values.setdefault(field.name, []).append(value)
    return values


def theirs(text: str, kind: Proto = NEST) -> dict[str, list[object]]:
    return values_of_proto(text_format.Parse(text, kind()))


# The configs that are written


def configs(folder: Path) -> list[str]:
    """Of all variants, with and without labels, plans for several GPUs, fixed batches, and of every policy."""
    open_graph, fixed = write_onnx(folder / "open.onnx"), write_onnx(folder / "fixed.onnx", batch=2)
    labels = tuple(f'"class" \\ {index} é' for index in range(CLASSES))
    plans = tuple(write_plan(folder / f"{sm}.plan", open_graph, target=sm) for sm in ("86", "120"))
    several = Serving(preferred_batches=(4, 8), graph_batches=(1, 4), cpu_threads=2, policy="all", instances=3)
    packages = (
        Package(name="a", plans=plans, onnx=open_graph, cpu_onnx=open_graph, labels=labels, serving=several),
        Package(name="b", onnx=fixed, cpu_onnx=fixed, serving=Serving(policy="specific", cpu_backend="onnxruntime")),
        Package(name="c", onnx=open_graph, version=3, serving=Serving(max_batch=64, queue_delay_us=0)),
    )
    for package in packages:
        write_repository(package, folder / "repo")
    return [path.read_text(encoding="utf-8") for path in sorted((folder / "repo").rglob("*.pbtxt"))]


def test_written_configs_are_what_protobuf_reads(tmp_path: Path) -> None:
    texts = configs(tmp_path)
    assert len(texts) > 10
    for text in texts:
        assert values_of_ours(parse(text)) == theirs(text, CONFIG)
        assert list(misused_fields(parse(text))) == []


def test_protobufs_own_writing_of_a_config_is_read_back(tmp_path: Path) -> None:
    """With its octal escapes, its colons, and each value of a list on a line of its own."""
    for text in configs(tmp_path):
        message = text_format.Parse(text, CONFIG())
        for style in ({}, {"as_one_line": True}, {"use_short_repeated_primitives": True}, {"as_utf8": True}):
            assert values_of_ours(parse(text_format.MessageToString(message, **style))) == values_of_proto(message)


# Texts made up


def quoted(draw: st.DrawFn, text: str) -> str:
    """One text as one or two in quotes, each character plain or as any escape that stands for it."""
    quote = draw(st.sampled_from("\"'"))
    spelt = []
    for character in text:
        bytes_of = character.encode()
        ways = ["".join(f"\\{byte:03o}" for byte in bytes_of), "".join(f"\\x{byte:02x}" for byte in bytes_of)]
        if character != "\\":  # protobuf's reader in Python unescapes such a backslash once more
            ways += [f"\\U{ord(character):08x}"] + ([f"\\u{ord(character):04X}"] if ord(character) < 0x10000 else [])
        ways += [f"\\{short}" for short, long in zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True) if long == character]
        ways += [f"\\{character}"] if character in "\"'\\" else []
        ways += [character] * 6 if character not in f"{quote}\\\n" else []
        spelt.append(draw(st.sampled_from(ways)))
    parts = draw(st.integers(0, len(spelt)))
    return f"{quote}{''.join(spelt[:parts])}{quote}{draw(SPACE)}{quote}{''.join(spelt[parts:])}{quote}"


SPACE = st.sampled_from(["", " ", "\n", "\t", "\r\n", "  # a 'comment' {\n", "\f"])
APART = st.sampled_from([" ", "\n", ", ", "; ", ",\n", " # a comment: 1\n"])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(max_size=8),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "name": st.sampled_from(WORDS),
}


def spelt(draw: st.DrawFn, kind: str, value: Any) -> str:
    if kind == "text":
        return quoted(draw, value)
    if kind == "int":
        sign, size = "-" * (value < 0), abs(value)
        return draw(st.sampled_from([str(value), f"{sign}0x{size:X}", f"{sign}0{size:o}"]))
    if kind == "float":
        return repr(value) + draw(st.sampled_from(["", "f", "F"]))
    if kind == "bool":
        return draw(st.sampled_from(["true", "True", "t"] if value else ["false", "False", "f"]))
    return str(value)


def field(draw: st.DrawFn, name: str, kind: object) -> str:
    """One field with one value, or a list of several."""
    count = draw(st.sampled_from([1, 1, 1, 0, 2, 3]))
    if isinstance(kind, Mapping):
        colon, marks = draw(st.sampled_from(["", ":", " :"])), draw(st.sampled_from(["{}", "<>"]))
        values = [f"{marks[0]}{draw(SPACE)}{body(draw, kind)}{draw(SPACE)}{marks[1]}" for _ in range(count)]
    else:
        colon = draw(st.sampled_from([":", ": ", " :\n"]))
        values = [spelt(draw, str(kind), draw(VALUES[str(kind)])) for _ in range(count)]
    if count == 1 and draw(st.booleans()):
        return f"{name}{colon}{values[0]}"
    return f"{name}{colon}[{','.join(f'{draw(SPACE)}{value}{draw(SPACE)}' for value in values)}]"


def body(draw: st.DrawFn, fields: Mapping[str, object]) -> str:
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=4))
    return "".join(f"{field(draw, name, fields[name])}{draw(APART)}" for name in names)


@st.composite
def texts(draw: st.DrawFn) -> str:
    return draw(SPACE) + body(draw, NESTED)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(texts())
def test_texts_made_up_are_what_protobuf_reads(text: str) -> None:
    assert values_of_ours(parse(text)) == theirs(text)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(VALUES["text"], st.lists(VALUES["int"], min_size=1, max_size=4), VALUES["bool"], VALUES["name"])
def test_what_is_written_is_what_protobuf_reads(text: str, numbers: list[int], flag: bool, word: str) -> None:
    fields: dict[str, Plain] = {
        "text": [text, text[::-1]],
        "number": numbers,
        "flag": flag,
        "kind": Name(word),
        "inner": [{"text": text}, {"deep": {}}],
    }
    written = pbtxt_from(fields)
    expected = {"text": [text, text[::-1]], "number": numbers, "flag": [flag], "kind": [(word,)]}
    assert theirs(written) == expected | {"inner": [{"text": [text]}, {"deep": [{}]}]}
    assert values_of_ours(parse(written)) == theirs(written)


REFUSED = (
    "number: [1,]", "number [1, 2]", "inner [{},]", "number: 1,, number: 2", "number: 1;,number: 2",
    "inner { number: 1 >", "inner { number: 1", "number: 08", "share: 010.5", "number: 0x", "number:1number:2",
    "number: 12abc", 'text: "\\xe9"', 'text: "\\x"', 'text: "\\ud83d"', 'text: "\\U00110000"', 'text: "open',
    'text: "a\nb"', 'text "a"', "number 1", "number:", ": 1", "}", "\ufeffnumber: 1",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_both_refuse_what_is_no_text_form(text: str) -> None:
    with pytest.raises(text_format.ParseError):
        theirs(text)
    with pytest.raises(ParseError):
        parse(text)


@pytest.mark.parametrize("escape", ["\\q", "\\777", "\\x", "\\u12"])
def test_an_escape_that_nobody_knows_is_refused_as_the_server_does(escape: str) -> None:
    """Python's protobuf keeps some of them as they stand; that of the server, in C++, refuses."""
    with pytest.raises(ParseError, match="is no escape"):
        parse(f'a: "{escape}"')


def test_a_truth_may_be_a_number_and_a_number_no_truth() -> None:
    config = "response_cache { enable: 1 } input { optional: True }"
    assert list(misused_fields(parse(config))) == []
    assert [line for line, _ in misused_fields(parse("response_cache { enable: 2 }"))] == [1]
    assert [line for line, _ in misused_fields(parse("max_batch_size: true"))] == [1]
