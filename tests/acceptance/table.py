"""The 56 checks: which rule judges which questions, and which four are not scored."""

from __future__ import annotations

from tests.acceptance import rules
from tests.acceptance.questions import QUESTIONS
from tests.acceptance.rules import Rule

# Sent, judged and shown, but out of the count.
NOT_SCORED = ("d08_image_url_blocked", "t11a_no_auth", "t11b_wrong_auth", "t16b_missing_content")
_BEGINNINGS: dict[str, Rule] = {"t2_": rules.accepted, "t3_max_tokens_": rules.ends("stop")}
_RULES: dict[str, Rule] = {
    "d01_basic_nostream": rules.basic,
    "d02_stream_usage": rules.event_stream,
    "d03_tool_call": rules.tool_call,
    "d04_reasoning": rules.apples,
    "d05_multimodal": rules.colour,
    "d06_cache_hit": rules.cached,
    "d07_reasoning_plus_content": rules.thought_and_content,
    "d08_image_url_blocked": rules.not_fetched,
    "d09_thinking_disable_top": rules.unthought_four,
    "d10_thinking_disable_ctk": rules.unthought_four,
    "t1a_thinking_true": rules.thinks,
    "t1b_thinking_false": rules.does_not_think,
    "t1c_thinking_default": rules.thinks,
    "t2_top_p_0_0": rules.either,
    "t2_top_p_1_1": rules.refused,
    "t3_max_tokens_1": rules.ends("length"),
    "t3_max_tokens_64": rules.ends("length"),
    "t3_max_tokens_neg1": rules.refused,
    "t3_max_tokens_over": rules.refused,
    "t4a_no_system": rules.contains("_NO_SYSTEM"),
    "t4b_system_control": rules.contains("_SYSTEM_CONTROL"),
    "t5_function_calling": rules.tool_call,
    "t6_multi_turn": rules.contains("BLUE_42"),
    "t7_streaming_sse": rules.event_stream,
    "t8_json_object": rules.alice,
    "t9_json_schema": rules.alice,
    "t10_stop_word": rules.stopped,
    "t11a_no_auth": rules.keys,
    "t11b_wrong_auth": rules.keys,
    "t12_chinese": rules.contains("中文测试：你好世界"),
    "t12_japanese": rules.contains("こんにちは"),
    "t12_emoji": rules.contains("🎉"),
    "t13_multimodal_base64": rules.colours,
    "t14_empty_body": rules.refused,
    "t15_idempotency_seed": rules.repeatable,
    "t16a_missing_role": rules.refused,
    "t16b_missing_content": rules.refused,
    "t16c_empty_messages": rules.refused,
}


# Of a server that is no bare engine ("direct") more is expected.
_NOT_DIRECT: dict[str, Rule] = {"t2_top_p_0_0": rules.accepted, "t11a_no_auth": rules.unauthorised,
                                "t11b_wrong_auth": rules.unauthorised}


def rule_of(name: str, direct: bool = True) -> Rule:
    """The rule of a check. direct: whether the harness takes the server for a bare engine."""
    if not direct and name in _NOT_DIRECT:
        return _NOT_DIRECT[name]
    return _RULES.get(name) or next(rule for beginning, rule in _BEGINNINGS.items() if name.startswith(beginning))


SCORED = tuple(name for name in QUESTIONS if name not in NOT_SCORED)
