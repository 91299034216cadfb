"""The reader of protobuf's text form against protobuf's own, on written configs and on generated texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from export.triton.config import Serving
from export.triton.lint import FIELDS, misused_fields
from export.triton.pbtxt import Message, Name, ParseError, Plain, parse, pbtxt_from
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests.export_served import CLASSES, write_onnx, write_plan

WORDS = ("TYPE_FP32", "TYPE_INT64", "KIND_GPU", "KIND_CPU")
# Every kind of value, and nested messages; all fields may be repeated.
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
    """Make a message type with these fields, each repeated, without fields of unknown content."""
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


# Within protobuf, Python warns of some escapes.
pytestmark = pytest.mark.filterwarnings("ignore:.*escape sequence.*:DeprecationWarning")
CONFIG, NEST = proto_class(FIELDS), proto_class(NESTED)


def values_of_proto(message: Proto) -> dict[str, list[object]]:
    """Return the values of each field in order, with an enum's value as (name,)."""
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


# Written configs


def configs(folder: Path) -> list[str]:
    """Write configs of all variants and policies, with and without labels, for several GPUs and fixed batches."""
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


def test_protobuf_reads_written_configs(tmp_path: Path) -> None:
    texts = configs(tmp_path)
    assert len(texts) > 10
    for text in texts:
        assert values_of_ours(parse(text)) == theirs(text, CONFIG)
        assert list(misused_fields(parse(text))) == []


def test_configs_written_by_protobuf_are_read(tmp_path: Path) -> None:
    """Protobuf writes octal escapes and colons, and puts each value of a list on a line of its own."""
    for text in configs(tmp_path):
        message = text_format.Parse(text, CONFIG())
        for style in STYLES:
            assert values_of_ours(parse(text_format.MessageToString(message, **style))) == values_of_proto(message)


# Generated texts


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(max_size=8),
    "number": st.integers(-(2**63), 2**63 - 1),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "kind": st.sampled_from(WORDS),
}
_LISTS = {name: st.lists(values, max_size=3) for name, values in VALUES.items()}
_DEEP = st.fixed_dictionaries({}, optional=_LISTS)
_INNER = st.fixed_dictionaries({}, optional={**_LISTS, "deep": st.lists(_DEEP, max_size=2)})
MESSAGES = st.fixed_dictionaries({}, optional={**_LISTS, "inner": st.lists(_INNER, max_size=2)}).map(
    lambda plain: json_format.ParseDict(plain, NEST())
)
STYLES: tuple[dict[str, bool], ...] = (
    {}, {"as_one_line": True}, {"use_short_repeated_primitives": True}, {"as_utf8": True}
)  # fmt: skip
TEXTS = st.builds(
    lambda message, style: text_format.MessageToString(message, **style), MESSAGES, st.sampled_from(STYLES)
)
SPELT = """
text: "a\\x41" 'b\\u00e9\\U0001F600'  # a 'comment' {
number: 0x1F, number: 017; number: [1, -2, 0X3]
share: 1.5f share: [.5, 1e3, 2.]
flag: [true, True, t, false, False, f]
kind: TYPE_FP32 inner: { deep < number: [] > } inner [{ number: 1 }, < text: '"' >] inner {}
"""


def test_every_spelling_is_read_as_protobuf_reads_it() -> None:
    assert values_of_ours(parse(SPELT)) == theirs(SPELT)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(TEXTS)
def test_generated_texts_are_read_as_protobuf_reads_them(text: str) -> None:
    assert values_of_ours(parse(text)) == theirs(text)


@pytest.mark.slow("models")
@settings(max_examples=400, deadline=None, derandomize=True)
@given(TEXTS | st.just(SPELT), st.data())
def test_damaged_texts_are_read_as_protobuf_reads_them(text: str, data: st.DataObject) -> None:
    """The damage drops, doubles or replaces one character."""
    assume(text)
    place = data.draw(st.integers(0, len(text) - 1))
    instead = data.draw(st.sampled_from(["", text[place] * 2, *"{}<>[]:;,\"'\\ 09aT.#-\n"]))
    damaged = text[:place] + instead + text[place + 1 :]
    try:
        expected = theirs(damaged)
    except text_format.ParseError:
        return
    try:
        message = parse(damaged)
    except ParseError as error:
        if "an escape that no server knows" in error.what:  # see test_unknown_escapes_are_refused_as_by_the_server
            return
        raise
    assert values_of_ours(message) == expected


@settings(max_examples=80, deadline=None, derandomize=True)
@given(VALUES["text"], st.lists(VALUES["number"], min_size=1, max_size=4), VALUES["flag"], VALUES["kind"])
def test_protobuf_reads_written_values(text: str, numbers: list[int], flag: bool, word: str) -> None:
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
def test_invalid_texts_are_refused_by_both_readers(text: str) -> None:
    with pytest.raises(text_format.ParseError):
        theirs(text)
    with pytest.raises(ParseError):
        parse(text)


@pytest.mark.parametrize("escape", ["\\q", "\\777", "\\x", "\\u12"])
def test_unknown_escapes_are_refused_as_by_the_server(escape: str) -> None:
    """Python's protobuf keeps some of them unchanged, and the server's, in C++, refuses them."""
    with pytest.raises(ParseError, match="escape"):
        parse(f'a: "{escape}"')


def test_bool_fields_accept_0_and_1_and_int_fields_refuse_true() -> None:
    config = "response_cache { enable: 1 } input { optional: True }"
    assert list(misused_fields(parse(config))) == []
    assert [line for line, _ in misused_fields(parse("response_cache { enable: 2 }"))] == [1]
    assert [line for line, _ in misused_fields(parse("max_batch_size: true"))] == [1]
