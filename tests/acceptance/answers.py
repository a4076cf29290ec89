"""Answers to every check: those that must pass, those that must fail, those that say nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.acceptance.questions import QUESTIONS
from tests.acceptance.stub import BROKEN, CALL, REFUSED, STREAMED, USAGE, Reply, says, streams, words

Replies = Sequence[Reply]
THOUGHT = "First I look at the numbers, then I add."
LONG = "They meet after two hours, for they close in at 150 km/h."
HIT = {**USAGE, "prompt_tokens": 2500, "prompt_tokens_details": {"cached_tokens": 2400}}
ALICE = says('{"name": "Alice", "age": 30}')
FOUR = [says("4"), says(" 4。\n")]
ENDS = [says("Once.", finish="stop"), says("", "Hm.", finish="stop")]
CUT = [says("Once", finish="length"), says("", "Hm", finish="length")]


def _exactly(text: str) -> list[Reply]:
    return [says(text), says(f"<think>\n\n</think>\n\n{text}"), says(f"Sure: {text}!")]


def _not(text: str) -> list[tuple[Replies, str]]:
    return [([says(text[:-1])], "is not in the content"), ([says("", text)], "is not in the content"),
            ([says(f"<think>{text}</think>no")], "is not in the content"), ([BROKEN], "status 500")]


_CALLED = [says(None, tool_calls=[CALL], finish="tool_calls"), says("Let me see.", THOUGHT, tool_calls=[CALL])]
_BAD_CALL = {**CALL, "function": {"name": "get_weather", "arguments": "{city: Beijing}"}}
_NOT_CALLED: list[tuple[Replies, str]] = [
    ([says("It is sunny.")], "no call"), ([says(None, tool_calls=[_BAD_CALL])], "no JSON"), ([REFUSED], "status 400")]
_NOT_STREAMED: list[tuple[Replies, str]] = [
    ([streams(*words(3), done=1)], "4 lines begin"), ([streams(*words(6), usage=USAGE, done=0)], "[DONE] is there 0"),
    ([streams(*words(6), usage=USAGE, done=2)], "[DONE] is there 2"),
    ([streams(*words(6))], "completion_tokens is not there"),
    ([streams(*words(6), usage=USAGE, prefix="data:")], "0 lines begin"), ([says("hi")], "0 lines begin"),
    ([REFUSED], "status 400")]
_NOT_ALICE: list[tuple[Replies, str]] = [
    ([says('Here: {"name": "Alice", "age": 30}')], "no JSON"), ([says('{"name": "alice", "age": 30}')], "not Alice"),
    ([says('{"name": "Alice", "age": "30"}')], "not the number"), ([says('{"name": "Alice"}')], "not the number"),
    ([says('{"name": "Alice", "age": true}')], "not the number"), ([says('["Alice", 30]')], "not Alice"),
    ([REFUSED], "status 400")]
_THOUGHT_OF_FOUR: list[tuple[Replies, str]] = [
    ([says("4", "2+2")], "it thought"), ([says("<think>2+2</think>4")], "it thought"), ([says("four")], "no '4'"),
    ([says("")], "no '4'"), ([BROKEN], "status 500")]
_SERVED: list[tuple[Replies, str]] = [([REFUSED], "status 400"), ([BROKEN], "status 500")]
_TAKEN: list[tuple[Replies, str]] = [([says("hello")], "not 4xx"), ([BROKEN], "not 4xx")]

# Each of a check's answers must pass; a check of two requests has two replies in each.
RIGHT: dict[str, list[Replies]] = {
    **{name: [[says("hello")], [says("", "Hm", "length")]] for name in QUESTIONS if name.startswith("t2_")},
    **{name: [[reply] for reply in ENDS] for name in ("t3_max_tokens_none", "t3_max_tokens_mid", "t3_max_tokens_max")},
    **{name: [[reply] for reply in CUT] for name in ("t3_max_tokens_1", "t3_max_tokens_64")},
    **{name: [[REFUSED], [Reply(422, {})]] for name in (
        "t2_top_p_1_1", "t3_max_tokens_neg1", "t3_max_tokens_over", "t14_empty_body", "t16a_missing_role",
        "t16b_missing_content", "t16c_empty_messages")},
    "t2_top_p_0_0": [[says("hello")], [REFUSED]],
    "d01_basic_nostream": [[says("4")], [says(None, "2+2 is 4")], [says("", reasoning="2+2")],
                           [says("", thinking="2+2")], [says("", reasoning_details=[{"text": "2+2"}])]],
    "d02_stream_usage": [[STREAMED], [streams(*words(3), usage=USAGE)]],
    "t7_streaming_sse": [[STREAMED]],
    "d03_tool_call": [[reply] for reply in _CALLED],
    "t5_function_calling": [[reply] for reply in _CALLED],
    "d04_reasoning": [[says("There is one apple left.")], [says("", "3 - 1 - 1 = 1, so that is it.")],
                      [says("One apple is left over.")]],
    "d05_multimodal": [[says("This picture is red.")], [says("", "The picture seems red.")]],
    "d06_cache_hit": [[STREAMED, streams(*words(5), usage=HIT)]],
    "d07_reasoning_plus_content": [[says(LONG, THOUGHT)], [says(LONG, THOUGHT, "length")]],
    "d08_image_url_blocked": [[REFUSED], [BROKEN]],
    "d09_thinking_disable_top": [[reply] for reply in FOUR],
    "d10_thinking_disable_ctk": [[reply] for reply in FOUR],
    "t1a_thinking_true": [[says("4", "2+2")], [says("<think>2+2</think>4")], [says("<think>2+2", finish="length")]],
    "t1b_thinking_false": [[says("4")], [says("4", "\n\n")], [says("<think>\n</think>4")]],
    "t1c_thinking_default": [[says("4", "2+2")]],
    "t4a_no_system": [[reply] for reply in _exactly("_NO_SYSTEM")],
    "t4b_system_control": [[reply] for reply in _exactly("_SYSTEM_CONTROL")],
    "t6_multi_turn": [[reply] for reply in _exactly("BLUE_42")],
    "t8_json_object": [[ALICE], [says('\n{"age": 30.0, "name": "Alice", "more": null}')]],
    "t9_json_schema": [[ALICE]],
    "t10_stop_word": [[says("1\n2\n3\n14\n")], [says("1 to 14", "Count to 16.")]],
    "t11a_no_auth": [[says("hello")], [Reply(401, {})]],
    "t11b_wrong_auth": [[says("hello")], [Reply(401, {})]],
    "t12_chinese": [[reply] for reply in _exactly("中文测试：你好世界")],
    "t12_japanese": [[reply] for reply in _exactly("日本語: こんにちは")],
    "t12_emoji": [[reply] for reply in _exactly("Emoji: 🎉🚀✨🇨🇳")],
    "t13_multimodal_base64": [[says("Red, green, blue and yellow.")]],
    "t15_idempotency_seed": [[says("Hello"), says("Hello")]],
}
# Replies, and what the judge must say of them.
WRONG: dict[str, list[tuple[Replies, str]]] = {
    **dict.fromkeys((name for name in QUESTIONS if name.startswith("t2_")), _SERVED),
    **{name: [([says("Once", finish="length")], "not stop"), ([REFUSED], "status 400")] for name in (
        "t3_max_tokens_none", "t3_max_tokens_mid", "t3_max_tokens_max")},
    **{name: [([says("Once.", finish="stop")], "not length"), ([REFUSED], "status 400")] for name in (
        "t3_max_tokens_1", "t3_max_tokens_64")},
    **dict.fromkeys(("t2_top_p_1_1", "t3_max_tokens_neg1", "t3_max_tokens_over", "t14_empty_body", "t16a_missing_role",
                     "t16b_missing_content", "t16c_empty_messages"), _TAKEN),
    "t2_top_p_0_0": [([BROKEN], "status 500")],
    "d01_basic_nostream": [([says("")], "neither content"), ([says("4", tokens=0)], "usage"), ([REFUSED], "status 400"),
                           ([Reply(200, {"choices": []})], "IndexError"),
                           ([Reply(200, "hello", "text/plain")], "JSON")],
    "d02_stream_usage": _NOT_STREAMED,
    "t7_streaming_sse": _NOT_STREAMED,
    "d03_tool_call": _NOT_CALLED,
    "t5_function_calling": _NOT_CALLED,
    "d04_reasoning": [([says("Two apples are still left.")], "neither '1'"), ([says("1")], "20 characters"),
                      ([BROKEN], "status 500")],
    "d05_multimodal": [([says("Red.")], "15 characters"), ([REFUSED], "status 400"),
                       ([Reply(200, {**says("This picture is red.").body, "error": {}})], "error")],
    "d06_cache_hit": [([STREAMED, STREAMED], "nothing was cached"), ([STREAMED, REFUSED], "status 400"),
                      ([STREAMED, streams(*words(5))], "nothing was cached"), ([says("a"), says("a")], "no stream")],
    "d07_reasoning_plus_content": [([says("Two hours.", THOUGHT)], "more than 20"),
                                   ([says(LONG, "Hm.")], "more than 20"),
                                   ([says("", THOUGHT)], "more than 20"), ([says("")], "more than 20"),
                                   ([REFUSED], "status 400")],
    "d08_image_url_blocked": [([says("A picture.")], "was fetched")],
    "d09_thinking_disable_top": _THOUGHT_OF_FOUR,
    "d10_thinking_disable_ctk": _THOUGHT_OF_FOUR,
    "t1a_thinking_true": [([says("4")], "did not think"), ([says("4", " \n")], "did not think")],
    "t1b_thinking_false": [([says("4", "2+2")], "it thought"), ([says("<think>2+2")], "it thought")],
    "t1c_thinking_default": [([says("4")], "did not think")],
    "t4a_no_system": _not("_NO_SYSTEM"),
    "t4b_system_control": _not("_SYSTEM_CONTROL"),
    "t6_multi_turn": _not("BLUE_42"),
    "t8_json_object": _NOT_ALICE,
    "t9_json_schema": _NOT_ALICE,
    "t10_stop_word": [([says("1\n14\n15\n16")], "went on"), ([says("two")], "no '1'"), ([says("")], "no '1'")],
    "t11a_no_auth": [([Reply(403, {})], "status 403"), ([BROKEN], "status 500")],
    "t11b_wrong_auth": [([Reply(403, {})], "status 403"), ([BROKEN], "status 500")],
    "t12_chinese": _not("中文测试：你好世界"),
    "t12_japanese": _not("こんにちは"),
    "t12_emoji": [([says("Emoji: \ufffd\ufffd🚀✨")], "is not in the content")],
    "t13_multimodal_base64": [([says("Red, green and blue.")], "yellow not named"),
                              ([says("红绿蓝黄")], "red, green, blue, yellow not named"), ([REFUSED], "status 400")],
    "t15_idempotency_seed": [([says("Hello"), says("Hi")], "and then"), ([says(""), says("")], "nothing said"),
                             ([says("Hello"), BROKEN], "status 500")],
}
SKIPPED: dict[str, list[tuple[Replies, str]]] = {
    "d03_tool_call": [([says("", THOUGHT, "length")], "cut while thinking")],
    "t5_function_calling": [([says("<think>Hm", finish="length")], "cut while thinking")],
    "d07_reasoning_plus_content": [([says("", THOUGHT, "length")], "cut before the answer"),
                                   ([says(f"<think>{THOUGHT}</think>{LONG}")], "not split"),
                                   ([says(LONG)], "not split")],
    "d09_thinking_disable_top": [([says("4" * 100)], "100 characters")],
    "d10_thinking_disable_ctk": [([says("4" * 100)], "100 characters")],
    "t10_stop_word": [([says("", "Count to", "length")], "all was thought")],
}
