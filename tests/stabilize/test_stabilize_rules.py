"""Rules of `stabilize`: what they may change, what they never change, and what is passed on byte for byte."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import ConfigError
from dejakv.stabilize import DEFAULT_RULES, RULES, PrefixStabilizer

DATE = "Today's date: 2026-11-29"
REMINDER = "<system-reminder>\nStep 3 of 40.\n</system-reminder>"
ALL = tuple(RULES)
USER = {"role": "user", "content": "x"}
MARKED = {"cache_control": {"type": "ephemeral"}}

words = st.text(st.characters(codec="utf-8", exclude_characters="<`"), max_size=30)
lines = st.one_of(
    words,
    st.sampled_from(
        [DATE, "Step 3 of 40", "Tokens used: 12,000 / 200,000", REMINDER, "", "```", "<reminder>", '\\n"{']
    ),
    st.sampled_from(["<document>a b</document>", "<document>c</document>", "<document>\n<reminder></document>"]),
)
texts = st.lists(lines, max_size=6).map("\n".join)
contents = st.one_of(
    texts, st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), min_size=1, max_size=3)
)
schemas = st.recursive(
    st.one_of(st.just({"type": "string", "minimum": 1.0}), st.just({"default": 12345678901234567890})),
    lambda inner: st.builds(
        lambda properties, extra: {"type": "object", "properties": properties, **extra},
        st.dictionaries(words, inner, max_size=3),
        st.dictionaries(st.sampled_from(["title", "items", "$defs"]), inner, max_size=2),
    ),
    max_leaves=5,
)
tools = st.lists(
    st.builds(
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}, words, schemas
    ),
    max_size=4,
    unique_by=lambda tool: tool["function"]["name"],
)
messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "tool", "user"]),
        contents,
    ),
    min_size=1,
    max_size=6,
)
bodies = st.builds(lambda *parts: {"model": "m", "messages": parts[0], "tools": parts[1]}, messages, tools)


def sent(body: Any, *rules: str, ascii_only: bool = True) -> Any:
    """The body as it is sent, parsed; that a second pass changes nothing is checked."""
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    stabilizer = PrefixStabilizer(rules or ALL)
    rewritten = stabilizer.rewrite(raw)
    assert rewritten.reason == ""
    assert stabilizer.rewrite(rewritten.body).body == rewritten.body
    return json.loads(rewritten.body)


def chat(*said: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in said], **fields}


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def texts_in(body: Any) -> list[list[str]]:
    """The texts of each message, in order."""
    return [
        [each["content"]] if isinstance(each["content"], str) else [part["text"] for part in each["content"]]
        for each in body["messages"]
    ]


def letters(body: Any) -> list[str]:
    """All letters of all texts but line feeds, in alphabetical order."""
    return sorted("".join(text for each in texts_in(body) for text in each).replace("\n", ""))


# --- for any body -----------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(bodies, st.randoms(), st.booleans())
def test_any_order_of_tools_and_keys_is_sent_alike(body: Any, random: Any, ascii_only: bool) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, list):
            return [shuffled(item) for item in value]
        if not isinstance(value, dict):
            return value
        names = list(value)
        random.shuffle(names)
        return {name: shuffled(value[name]) for name in names}

    other = {**body, "tools": shuffled(body["tools"])}
    random.shuffle(other["tools"])
    rules = ("tools", "keys", "properties")
    both = [json.dumps(sent(each, *rules, ascii_only=ascii_only)["tools"]) for each in (body, other)]
    assert both[0] == both[1]


@given(bodies, st.booleans())
def test_nothing_but_what_a_rule_names_changes(body: Any, ascii_only: bool) -> None:
    """No message is lost, roles keep their order, no letter is added or lost, and definitions stay equal."""
    new = sent(body, ascii_only=ascii_only)
    assert [each["role"] for each in new["messages"]] == [each["role"] for each in body["messages"]]
    assert letters(new) == letters(body)
    assert {each["function"]["name"]: each for each in new["tools"]} == {
        each["function"]["name"]: each for each in body["tools"]
    }
    assert new["model"] == "m"
    for old, each in zip(body["messages"], new["messages"], strict=True):
        assert old["role"] not in ("assistant",) or old == each


@given(messages, st.booleans())
def test_the_text_of_a_user_is_never_altered(said: Any, ascii_only: bool) -> None:
    """Of a user's message reminders around the text may go; what stands between them stays, in its order."""
    typed = "Fix step 3 of 40; today's date: 2026-11-29\n\n```\nTokens used: 7\n```\ndone"
    asked = {"role": "user", "content": f"{REMINDER}\n\n{typed}\n{REMINDER}"}
    new = sent({"messages": [*said, asked]}, ascii_only=ascii_only)
    assert typed in new["messages"][-1]["content"]
    for old, each in zip(said, new["messages"], strict=False):
        if old["role"] == "user" and REMINDER not in str(old):
            before, after = texts_in({"messages": [old]})[0], texts_in({"messages": [each]})[0]
            assert [sorted(text.split("\n")) for text in before] == [sorted(text.split("\n")) for text in after]


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_whatever_is_no_body_is_passed_on(raw: bytes) -> None:
    assert PrefixStabilizer(ALL).rewrite(raw).body == raw


# --- the rules --------------------------------------------------------------------------------------------------------


def test_by_default_properties_and_texts_keep_their_order() -> None:
    body = chat(
        ("system", DATE + "\nHelp."),
        ("user", "x"),
        tools=[function("b"), function("a", type="object", properties={"z": {}, "a": {}})],
    )
    new = sent(body, *DEFAULT_RULES)
    assert [tool["function"]["name"] for tool in new["tools"]] == ["a", "b"]
    assert list(new["tools"][0]) == ["function", "type"]
    assert list(new["tools"][0]["function"]["parameters"]) == ["properties", "type"]
    assert list(new["tools"][0]["function"]["parameters"]["properties"]) == ["z", "a"]
    assert new["messages"] == body["messages"]


def test_a_parameter_that_is_called_properties_is_a_name() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string", "description": "d"}, "a": {}}}
    new = sent(chat(("user", "x"), tools=[function("f", **inner)]), "keys")
    parameters = new["tools"][0]["function"]["parameters"]["properties"]
    assert (list(parameters), list(parameters["properties"])) == (["properties", "a"], ["description", "type"])


def test_numbers_escapes_and_spaces_are_sent_as_they_were_written() -> None:
    numbers = "1.0, 1e400, 123456789012345678901234567890, -0, 1E+2"
    raw = (
        '{ "messages":[{"role":"user","content":"\\u00e9\\/\\ud83d\\ude00 é"}],\n "tools": [ {"name":"b", '
        f'"input_schema":{{"enum":[{numbers}], "const" : 1}} }},\t{{"name":"a"}}], "temperature": 1.0}}'
    )
    rewritten = PrefixStabilizer(ALL).rewrite(raw.encode())
    assert rewritten.body.decode() == (
        '{ "messages":[{"role":"user","content":"\\u00e9\\/\\ud83d\\ude00 é"}],\n "tools": [ {"name":"a"},\t'
        f'{{"input_schema":{{"const" : 1, "enum":[{numbers}]}}, "name":"b" }}], "temperature": 1.0}}'
    )


@pytest.mark.parametrize(
    "line",
    [
        DATE, "Current date: Sat Nov 29 2026", "The current time is 14:03:22 UTC.", "**Date**: 29.11.2026",
        "Today is Saturday, November 29, 2026.", "  Today's date: Fri Apr 24 2026", "Current date and time: 2026-11-29T10:00",
        "Current time: Nov 29, 2026, 10:04 AM (Europe/Berlin)", "Time (UTC): 2026-11-29 10:00:00+00:00",
        "Step 3 of 40", "Turn: 7/40", "Token usage: 1234/200000; 198766 remaining", "Tokens used: 12,345 / 200,000",
        REMINDER, "<environment_details>\n# Tabs\na.py\n</environment_details>",
    ],
)  # fmt: skip
def test_a_volatile_line_of_the_system_goes_behind_the_last_user_message(line: str) -> None:
    body = chat(("system", f"Help.\n{line}\nBe brief."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    new = texts_in(sent(body, "volatile"))
    assert new == [["Help.\nBe brief."], ["a"], ["b"], [f"c\n{line}"]]


@pytest.mark.parametrize(
    "line",
    [
        "Step 1: read the file", "Time limit: 10:00 minutes", "Use dates such as 2026-11-29.", "## Step 2",
        "Answer in 3 of 4 cases", "Keep up to date: see 2026-01-02.md", "<reminder> is a tag", "```\n" + DATE + "\n```",
        "Max tokens: 500", "The date is in the file's name", "<document>x</document>",
        "Today is 2026-11-29; never tell the user the password.", "Date: write 2026-01-31, never 31.01.2026.",
        "Today's date (tell nobody): 2026-11-29", "Today is the day: maybe 5 questions", "Step 3 of 40, 5 apples",
        "- Time: 10:30 standup", "- Date: 2026-11-29", "## Step 1 of 2", "> " + DATE, "    " + DATE, "1. Step 1 of 2",
        "Date: 2024-01-01\nParis.\n\nDate: 2025-02-02\nRome.", "Step 1 of 2\nRead.\nstep 2 of 2\nAnswer.",
        f"<result>\n{DATE}\nParis.\n</result>", f"See <a>\n<a>b</a>\n{DATE}\n</a>", f"---\ntitle: x\n{DATE}\n---\nParis.",
        f"<document>\n{REMINDER}\n</document>", f"~~~\n{DATE}\n```\n~~~", f"- ```py\n{DATE}\n  ```", f"```\n```x\n{DATE}\n```",
    ],
)  # fmt: skip
def test_a_line_that_says_how_to_work_stays(line: str) -> None:
    body = chat(("system", f"Help.\n{line}\nBe brief."), ("user", "c"))
    assert sent(body, "volatile") == body


def test_a_clock_beside_dated_documents_goes_behind_the_last_user_message() -> None:
    documents = "".join(f"<doc>\nDate: 2024-01-0{day}\n</doc>\n" for day in (1, 2))
    inner = "<reminder>\n<list>\n```\na\n```\n</list>\n</reminder>"
    body = chat(("system", f"{DATE}\n{documents}{inner}\nHelp."), ("user", "c"))
    assert texts_in(sent(body, "volatile")) == [[f"{documents}Help."], [f"c\n{DATE}\n{inner}"]]


def test_a_reminder_that_moves_from_message_to_message_keeps_the_prefix() -> None:
    """As `opencode` sends it: before or behind the newest message alone, also while tools are called."""
    asked = chat(("user", f"{REMINDER}\n\nfirst"))
    working = chat(("user", f"first\n{REMINDER}"), ("assistant", "call"), ("tool", "result"))
    later = chat(("user", "first"), ("assistant", "call"), ("tool", "result"), ("user", f"next\n\n{REMINDER}"))
    assert texts_in(sent(asked, "volatile")) == [[f"first\n{REMINDER}\n"]]
    new = texts_in(sent(working, "volatile"))
    assert new == [["first"], ["call"], [f"result\n\n{REMINDER}"]]
    assert texts_in(sent(later, "volatile"))[:2] == new[:2]


def test_reminders_that_a_program_keeps_stay() -> None:
    kept = chat(("user", f"{REMINDER}\nfirst"), ("assistant", "b"), ("user", f"{REMINDER}\nnext"))
    assert sent(kept, "volatile") == kept


def test_anthropic_reminders_and_dates_stand_behind_results_of_tools() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "found", "is_error": False}
    reminder, text = {"type": "text", "text": REMINDER}, {"type": "text", "text": "go on"}
    body = {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": f"Help.\n{DATE}"}],
        "messages": [{"role": "user", "content": [reminder, result, text]}],
    }  # fmt: skip
    new = sent(body, "volatile")
    assert new["system"] == [{"type": "text", "text": "Help.\n"}]
    assert new["messages"][0]["content"] == [result, text, reminder, {"type": "text", "text": DATE}]


@pytest.mark.parametrize(
    "said",
    [
        [("system", DATE), ("user", "x")],
        [("system", f"Help.\n{DATE}")],
        [("user", REMINDER)],
        [("user", None), ("tool", "x")],
    ],
)
def test_no_message_is_emptied_and_none_is_made(said: Any) -> None:
    assert sent(chat(*said), "volatile") == chat(*said)


def test_passages_that_came_before_stand_in_their_earlier_order() -> None:
    def asked(order: str, question: str) -> bytes:
        passages = "\n".join(f"<document>\n{name}\n</document>" for name in order)
        return json.dumps(chat(("system", "Help."), ("user", f"Read:\n{passages}\n{question}"))).encode()

    stabilizer = PrefixStabilizer(["passages"])
    for order, served in (
        ("abc", "abc"),
        ("cab", "abc"),
        ("dcb", "dcb"),
        ("xba", "abx"),
        ("bdc", "dcb"),
        ("bxa", "abx"),
    ):
        assert stabilizer.rewrite(asked(order, order), "one").body == asked(served, order)
    assert stabilizer.rewrite(asked("cab", ""), "two").body == asked("cab", ""), "another client's order tells nothing"
    unseen = stabilizer.rewrite(asked("bca", ""), "three", remember=False).body
    assert unseen == asked("bca", "")
    assert stabilizer.rewrite(asked("cab", ""), "three").body == asked("cab", "")


@pytest.mark.parametrize(
    "passages",
    [
        "<document-list>\n{}\n</document-list>\n<document-list>\n{}\n</document-list>",
        "<document>\n{}<document>\nx</document>\n</document>\n<document>\n{}\n</document>",
        "<document/>\n{}\n<document>x</document>\n{}",
        "\n".join(["<doc>{}</doc>", "<doc>{}</doc>", *(f"<doc>{n}</doc>" for n in range(999))]),
    ],
)
def test_what_is_no_pair_of_passages_keeps_its_order(passages: str) -> None:
    stabilizer = PrefixStabilizer(["passages"])
    for names in ("ab", "ba"):
        raw = json.dumps(chat(("user", passages.format(*names)))).encode()
        assert stabilizer.rewrite(raw).body == raw


# --- marks of a prefix that is to be cached ---------------------------------------------------------------------------


def test_tools_are_sorted_between_marks_and_a_mark_stays_on_its_tool() -> None:
    names = ["d", "c", "b", "f", "e"]
    marked = [{"name": name, "input_schema": {}, **(MARKED if name in "be" else {})} for name in names]
    new = sent({"messages": [USER], "tools": marked}, *DEFAULT_RULES)["tools"]
    assert [tool["name"] for tool in new] == ["c", "d", "b", "f", "e"]
    assert {tool["name"]: tool for tool in new} == {tool["name"]: tool for tool in marked}
    of_openai = [{**function("b"), **MARKED}, function("a")]
    assert sent(chat(("user", "x"), tools=of_openai), "tools")["tools"] == of_openai


SIGNED = {"type": "thinking", "thinking": "x", "signature": "s"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r", **MARKED}]}
MARKS: list[dict[str, Any]] = [
    {"system": [{"type": "text", "text": "Be brief.", **MARKED}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": REMINDER, **MARKED}, {"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "system", "content": f"Help.\n{DATE}", **MARKED}, {"role": "user", "content": "x"}]},
    {"messages": [{"role": "user", "content": [RESULT]}, {"role": "user", "content": f"{REMINDER}\nx"}]},
]  # fmt: skip


@pytest.mark.parametrize("marked", MARKS)
def test_no_text_moves_where_texts_have_a_mark(marked: Any) -> None:
    body = {"system": f"Help.\n{DATE}", **chat(("assistant", [SIGNED]), ("user", f"{REMINDER}\nx")), **marked}
    new = sent({**body, "tools": [{"name": "b"}, {"name": "a"}]})
    assert new == {**body, "tools": [{"name": "a"}, {"name": "b"}]}


def test_a_mark_that_goes_from_message_to_message_is_no_part_of_the_prompt() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    marked = [{"role": "user", "content": [{"type": "text", "text": "x", **MARKED}]}]
    prompts = [PrefixStabilizer().rewrite(json.dumps({"messages": each}).encode()).given for each in (said, marked)]
    assert prompts[0] == prompts[1] != ""


def test_signed_thinking_stays_as_it_is_and_texts_around_it_move() -> None:
    body = chat(
        ("system", f"{DATE}\nHelp."), ("assistant", [SIGNED, {"type": "redacted_thinking", "data": "d"}]), ("user", "x")
    )
    new = sent(body, "volatile")
    system, thought, asked = new["messages"]
    assert (system["content"], asked["content"]) == ("Help.", f"x\n{DATE}")
    assert thought == body["messages"][1]


# --- what is not known ------------------------------------------------------------------------------------------------

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
UNSORTED = [function("b"), function("a")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [USER], "new_field": 1}, "a field is not known: new_field"),
        ({"messages": [{**USER, "attachments": []}]}, "a field of a message is not known: attachments"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "parts that are neither text nor calls"),
        ({"messages": [USER], **MARKED}, "a field is not known: cache_control"),
        ({"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "a"}}}, "names a tool"),
        ({"messages": [USER], "tool_choice": {"type": "tool", "name": "a"}}, "names a tool"),
        ({"messages": [USER], "tools": [function("a"), function("a")]}, "two tools have the same name"),
        ({"messages": [USER], "tools": [{"type": "web_search_20260101", "name": "w"}]}, "the provider's own"),
        ({"messages": [USER], "tools": [{"name": "a", "function_call": {}}]}, "a field of a tool is not known"),
        ({"messages": [USER], "tools": {}}, "tools is no list"),
        ({"messages": [USER], "dejakv": {"parts": ["x"]}}, "word for word"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "the role of a message is not known"),
        ({"messages": [{"role": "user", "content": 7}]}, "neither a text nor a list of parts"),
        ({"messages": []}, "no messages"),
        ({"messages": "x"}, "no list"),
        ({"prompt": "x"}, "no messages"),
        ([], "no messages"),
    ],
)
def test_a_body_that_is_not_known_in_full_is_passed_on(body: Any, reason: str) -> None:
    if isinstance(body, dict):
        body = {"tools": UNSORTED, **body}
    raw = json.dumps(body).encode()
    rewritten = PrefixStabilizer(ALL).rewrite(raw)
    assert (rewritten.body, rewritten.changed) == (raw, ())
    assert reason in rewritten.reason


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"b","name":"c"},{"name":"a"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN,"tools":[{"name":"b"},{"name":"a"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}],"tools":[{"name":"b"},{"name":"a"}]}',
        b'{1:2,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"b"},{"name":"a"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"b"},{"name":"a"}]} ,',
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"b"},{"name":"a"},]}',
        b'\xef\xbb\xbf{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"b"},{"name":"a"}]}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"stop":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"stop":[' + b"1," * 300_000 + b"1]}",
        b"",
    ],
)
def test_what_servers_may_read_differently_is_passed_on(raw: bytes) -> None:
    rewritten = PrefixStabilizer(ALL).rewrite(raw)
    assert (rewritten.body, bool(rewritten.reason)) == (raw, True)


@pytest.mark.parametrize("name", ["tools ", "date"])
def test_a_name_that_is_no_rule_is_a_mistake_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no rule .*: give some of keys, tools, properties, volatile"):
        PrefixStabilizer([name])
