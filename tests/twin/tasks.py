"""The tasks, each a function (random stream, level) -> Chat; draw() gives chats of one split.

level 0 is short and plain, 1 longer, 2 the full range. Wordings are patterns with choices, so that a task has hundreds.
"""

# Lists of words and sentences read better in one piece.
# ruff: noqa: E501, SIM905
from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import stories
import toolbox
from chats import Chat, Picture, expand, split_of, too_near
from words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    NAMES,
    PLACES,
    SCRIPTS,
    THINGS,
    ZH_CITIES,
    ZH_COLOURS,
    ZH_NAMES,
    ZH_WORDS,
    code,
    emoji,
    hanzi,
    nonsense,
    number,
    payload,
    word,
)

Task = Callable[[random.Random, int], Chat]
POLITE = "[|||please|kindly|could you|can you]"
EXACT = "[exactly|exactly|verbatim|precisely|word for word|without any change|]"
ONLY = "[|||Nothing else.|No other words.|Output only that.|Do not add anything.|Just that.]"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def maybe(rng: random.Random, thought: str, share: float = 0.35) -> str | None:
    """The thought, or None: thinking switched off."""
    return thought if rng.random() < share else None


def quoted(rng: random.Random, text: str) -> str:
    return (
        rng.choice(("{}", "{}", "{}", "{}", "\"{}\"", "'{}'", "`{}`", "「{}」", "“{}”")).format(text)
        if not set("\"'`「」“”") & set(text)
        else text
    )


# --- copying

ECHO = (
    f"{POLITE} [repeat|echo|copy|reproduce|say|write|output|print|return|type|give back] [|back|after me|out] "
    f"[this|the following|the text|this text|the following text|this line|] {EXACT}[:|:|:\n|: |\n|] {{x}}",
    f"[repeat|echo|say|reply with|respond with|answer with] {EXACT} [this|the following|][:|] {{x}}",
    f"{POLITE} [reply|respond|answer] {EXACT}[:|] {{x}}",
    "reply [exactly|only|just|with exactly|with only|with just] {x}",
    f"[say|repeat|copy|echo] {{x}} [exactly|back to me|again|verbatim|]. {ONLY}",
    f"{{x}}\n\n[Repeat|Copy|Echo|Say] the [text|line] above {EXACT}.",
    "your [answer|reply|response] must be exactly[:|] {x}",
    "[the only thing you should say is|I want you to say|now say|just say|only say][:|] {x}",
)
ECHO_ZH = (
    "[请|麻烦|帮我|][原样|完整|准确|一字不差地|逐字|精确|][重复|复述|输出|抄写|写出|说一遍|返回][以下|下面的|这段|这句|][文字|内容|话|文本|][：|:|：\n] {x}",
    "[请|][只|仅|直接][回复|回答|输出|说][：|:|] {x}",
    "[请|]跟我[说|读|念][：|:|] {x}",
    "[请|]把[下面|以下|这句话|这段内容][原样|完整|][重复|输出|写][一遍|][：|:] {x}",
    "{x}\n\n[请|][重复|复述|抄写]上面的[文字|内容]。",
)
ECHO_JA = (
    "[次の|この|以下の][文字列|文章|言葉|テキスト]を[そのまま|正確に|]繰り返して[ください|][：|:|。\n] {x}",
    "[そのまま|]返答して[ください|][：|:] {x}",
)
MOST = (4, 16, 40)


def echo(rng: random.Random, level: int) -> Chat:
    script = rng.choice(SCRIPTS)
    text = payload(rng, script, rng.choice(MOST[: level + 1]))
    draw_from = (
        ECHO_ZH
        if rng.random() < (0.5 if script == "chinese" else 0.15)
        else ECHO_JA
        if script == "japanese" and rng.random() < 0.4
        else ECHO
    )
    wording = expand(rng, rng.choice(draw_from))
    messages = [user(wording.replace("{x}", quoted(rng, text)))]
    if rng.random() < 0.08:
        messages.insert(0, system(expand(rng, "You are a [helpful|friendly|careful|] assistant.")))
    thought = rng.choice(("I repeat the text exactly as it is.", "The text must come back unchanged."))
    return Chat("echo", wording, messages, text, maybe(rng, thought, 0.25))


# --- remembering

SORTS = {
    "word": lambda rng: rng.choice((word, word, code))(rng),
    "code": code,
    "password": code,
    "number": lambda rng: number(rng, 5),
    "name": lambda rng: rng.choice(NAMES),
    "city": lambda rng: rng.choice(CITIES),
    "color": lambda rng: rng.choice(COLOURS),
    "animal": lambda rng: rng.choice(ANIMALS),
    "key": code,
    "token": code,
    "phrase": lambda rng: " ".join(word(rng) for _ in range(rng.randint(2, 3))),
}
SORTS_ZH = {
    "暗号": lambda rng: rng.choice((hanzi, code, word))(rng),
    "密码": code,
    "数字": lambda rng: number(rng, 5),
    "名字": lambda rng: rng.choice(ZH_NAMES),
    "城市": lambda rng: rng.choice(ZH_CITIES),
    "编号": code,
}
KINDS = "[secret|secret|magic|special|hidden|favorite|access|chosen|lucky|]"
TELL = (
    "[the|my|our|your] {k} is[|:] {x}.",
    f"{POLITE} remember [this|the|my] {{k}}[:|] {{x}}",
    "remember that [the|my] {k} is {x}.",
    "[keep in mind|note|memorize|store|do not forget][:| that|] [the|my] {k} is {x}",
    "{k}[:| =] {x}",
    "I will tell you [the|my] {k}[:|. It is] {x}",
    "let the {k} be {x}.",
)
ASK = (
    "what [is|was] [the|my] {k}?",
    "what [is|was] the {k} [I told you|from before|I mentioned|that I gave you|again]?",
    f"{POLITE} tell me the {{k}}",
    "[recall|repeat|state|give me] the {k}[.| again.| from before.]",
    "do you [still|] remember the {k}?",
    "which {k} did I [give|tell] you?",
    "[now|so|ok, now|and now][,|] what [is|was] the {k}?",
)
BARE = "[|||Only the {s}.|Just the {s}.|Answer with the {s} only.|Reply with only the {s}.]"
TELL_ZH = ("[请|][记住|记一下][：|:|，|]{k}是[：|]{x}[。|]", "[我的|]{k}是{x}[。|，请记住。|，不要忘记。]", "{k}：{x}")
ASK_ZH = (
    "{k}是什么？",
    "[我的|刚才的|我告诉你的|之前的]{k}是[什么|多少|哪个]？",
    "[请|][告诉我|说出|重复][我的|刚才的|][{k}][。|]",
    "你还记得{k}吗？",
)
ACKNOWLEDGE = ("OK, I will remember it.", "Noted.", "Got it.", "I will remember that.")
SIDE_STATEMENTS = (
    "The {a} {n} lives near the {p}.",
    "{m} went to {c} with a {t}.",
    "A {a} {t} lies in the {p}.",
    "{m} likes the {o} {t}.",
    "In {c} it rained for {d} days.",
    "The {t} costs {d} coins.",
    "{m} saw a {n} at the {p}.",
    "Every {t} in {c} is {o}.",
    "There are {d} chairs in the {p}.",
    "{m} and {l} met in {c}.",
    "The train to {c} leaves at {d}.",
    "A {n} can be {a} and {b}.",
    "{m} put the {t} on the {u}.",
    "It is {d} steps from the {p} to the {q}.",
)
SIDE_ZH = (
    "{m}今天去了{c}。",
    "{c}的天气很好。",
    "{m}有{d}本书。",
    "{w}和{v}都在这里。",
    "{m}喜欢{w}。",
    "这里有{d}个{w}。",
)


def statement(rng: random.Random) -> str:
    """A sentence that has nothing to do with anything."""
    pick = rng.choice
    if rng.random() < 0.12:
        return pick(SIDE_ZH).format(
            m=pick(ZH_NAMES), c=pick(ZH_CITIES), d=rng.randint(2, 99), w=pick(ZH_WORDS), v=pick(ZH_WORDS)
        )
    return pick(SIDE_STATEMENTS).format(
        a=pick(ADJECTIVES),
        b=pick(ADJECTIVES),
        n=pick(ANIMALS),
        p=pick(PLACES),
        q=pick(PLACES),
        m=pick(NAMES),
        l=pick(NAMES),
        c=pick(CITIES),
        t=pick(THINGS),
        u=pick(THINGS),
        o=pick(COLOURS),
        d=rng.randint(2, 99),
    )


def statements(rng: random.Random, words: int) -> str:
    out: list[str] = []
    while words > 0:
        out.append(statement(rng))
        words -= len(out[-1].split()) + 2
    return " ".join(out)


LENGTHS = ((0, 12), (0, 100), (20, 560))


def recall(rng: random.Random, level: int) -> Chat:
    """One or several facts, then other sentences or turns, then a question for one fact."""
    chinese = rng.random() < 0.2
    sorts, tell, ask = (SORTS_ZH, TELL_ZH, ASK_ZH) if chinese else (SORTS, TELL, ASK)
    count = rng.choice((1, 1, 1, 2, 2, 3, 4)) if level else rng.choice((1, 1, 2))
    facts: dict[str, tuple[str, str]] = {}
    while len(facts) < count:
        sort = rng.choice(list(sorts))
        kind = (rng.choice(("", "秘密")) if chinese else expand(rng, KINDS).lower() + " ") + sort
        if rng.random() < 0.2:
            kind = f"{kind} of {rng.choice(NAMES)}" if not chinese else f"{rng.choice(ZH_NAMES)}的{sort}"
        facts[kind.strip()] = (sort, sorts[sort](rng))
    asked = rng.choice(list(facts))
    sort, value = facts[asked]
    wordings = [expand(rng, rng.choice(tell)) for _ in facts]
    told = [
        text.replace("{k}", kind).replace("{x}", fact)
        for text, (kind, (_, fact)) in zip(wordings, facts.items(), strict=True)
    ]
    question = expand(rng, rng.choice(ask) + ("" if chinese else " " + BARE.replace("{s}", sort)))
    wording = wordings[list(facts).index(asked)] + " / " + question
    question = question.replace("{k}", asked)
    words = rng.randint(*rng.choice(LENGTHS[: level + 1]))
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        # Told in turns of their own, with other talk between.
        for text in told:
            messages += [user(text), assistant("好的，我记住了。" if chinese else rng.choice(ACKNOWLEDGE))]
            if level and rng.random() < 0.5:
                messages += small_turns(rng, words // (2 * count))
        if words > 10:
            messages += small_turns(rng, words // 2)
        messages.append(user(question))
    else:
        split = rng.random()
        pieces = [statements(rng, int(words * split)), *told, statements(rng, int(words * (1 - split))), question]
        joint = rng.choice((" ", "\n", "\n\n"))
        messages.append(user(joint.join(piece for piece in pieces if piece)))
    answer = value if chinese or "nly" in question or "Just" in question else f"The {asked} is {value}."
    return Chat(
        "recall",
        wording,
        messages,
        answer,
        maybe(rng, f"I was told the {asked}: {value}." if not chinese else f"{asked}是{value}。"),
    )


def small_turns(rng: random.Random, words: int) -> list[dict[str, Any]]:
    """A side talk of about so many words."""
    out: list[dict[str, Any]] = []
    while words > 0:
        if rng.random() < 0.5:
            text = statements(rng, min(words, rng.randint(1, 40)))
            out += [user(text), assistant(rng.choice(("I see.", "Interesting.", "Thank you for telling me.")))]
        else:
            chat = rng.choice((arithmetic, echo, greet))(rng, 0)
            text = chat.messages[-1]["content"]
            out += [user(text), assistant(chat.answer)]
        words -= len(text.split()) + 8
    return out


def table(rng: random.Random, level: int) -> Chat:
    """A list of keys with values; the value of one, or the key of one."""
    count = rng.randint(2, (4, 10, 30)[level])
    keys = list(
        dict.fromkeys(
            rng.choice((lambda r: r.choice(THINGS), lambda r: r.choice(NAMES), word, nonsense))(rng)
            for _ in range(count)
        )
    )
    values = [rng.choice((number, code, lambda r: r.choice(COLOURS), word))(rng) for _ in keys]
    form = rng.choice(("{}: {}", "{} = {}", "{} is {}", "{} -> {}", "- {}: {}"))
    chosen = rng.randrange(len(keys))
    head = expand(rng, "[|Here is a list.|Look at this table:|Data:|Given:|下面是数据：]")
    tail = expand(
        rng,
        "[What is the value of|What belongs to|Look up|Find|Give me the value for|Which value has|Value of|What is] {k}[?|?|?| in the list?]",
    )
    text = "\n".join(form.format(key, value) for key, value in zip(keys, values, strict=True))
    return Chat(
        "table",
        f"{head} / {form} / {tail}",
        [user(f"{head}\n{text}\n\n{tail.replace('{k}', keys[chosen])}".strip())],
        values[chosen],
        maybe(rng, f"I look for {keys[chosen]}. It is {values[chosen]}."),
    )


# --- obeying

ALWAYS = (
    f"[always|you must always|you will always|from now on, always|whatever the user says,|no matter what is asked,] "
    f"[reply|answer|respond|say] {EXACT}[:| with|] {{x}}[.|]",
    "your only [reply|answer|response] [is|must be][:|] {x}",
    "[ignore the user and|] [reply|answer] with {x} [every time|always|to everything].",
    "[请|][永远|总是|一直|无论用户说什么都|][只|][回复|回答][：|:|] {x}",
)
SUFFIX = (
    "[end|finish|close] [every|each] [answer|reply|message] with[:|] {x}",
    "add {x} at the end of [every|each|your] [answer|reply].",
    "[the last word of|after] [every|each] [answer|reply] [you say|must be|comes] {x}[.|]",
)
PREFIX = (
    "[begin|start|open] [every|each] [answer|reply|message] with[:|] {x}",
    "put {x} before [every|each|your] [answer|reply].",
    "[the first word of|before] [every|each] [answer|reply] [you say|must be|comes] {x}[.|]",
)
IDENTITY = (
    "your name is {x}.",
    "you are {x}, [a helpful|a friendly|an] assistant.",
    "you are called {x}.",
    "你的名字是{x}。",
    "你叫{x}。",
)
WHO = ("what is your name?", "who are you?", "what are you called?", "tell me your name", "你叫什么名字？", "你是谁？")


def obey(rng: random.Random, level: int) -> Chat:
    """A rule of the system message, or of a later one that takes its place."""
    value = rng.choice((code, code, word, lambda r: payload(r, "latin", 3), hanzi, emoji))(rng)
    kind = rng.random()
    question = rng.choice((arithmetic, greet, wonder, echo, count_up))(rng, 0)
    rule = rng.choice(ALWAYS if kind < 0.5 else SUFFIX if kind < 0.65 else PREFIX if kind < 0.8 else IDENTITY)
    if kind >= 0.8:
        value = rng.choice(
            (lambda r: r.choice(NAMES), lambda r: nonsense(r).capitalize(), lambda r: r.choice(ZH_NAMES))
        )(rng)
    wording = expand(rng, rule)
    rule = wording.replace("{x}", quoted(rng, value) if kind < 0.5 else value)
    text, answer = question.messages[-1]["content"], question.answer
    if kind < 0.5:
        answer = value
        if rng.random() < 0.4:
            text = rng.choice(
                (statement(rng), word(rng), "?", "hello there", "tell me something", "你好吗？", nonsense(rng))
            )
    elif kind < 0.65:
        answer = f"{answer} {value}"
    elif kind < 0.8:
        answer = f"{value} {answer}"
    else:
        text = rng.choice(WHO)
        answer = f"我叫{value}。" if text[0] in "你" else f"My name is {value}."
    messages: list[dict[str, Any]] = []
    late = level and rng.random() < 0.35
    if late:
        if rng.random() < 0.5:
            messages.append(
                system(
                    expand(rng, rng.choice(ALWAYS)).replace("{x}", code(rng))
                    if rng.random() < 0.5
                    else "You are a helpful assistant."
                )
            )
        messages += small_turns(rng, rng.randint(1, 20)) + [system(rule)]
    else:
        extra = statements(rng, rng.randint(1, 30)) if level and rng.random() < 0.2 else ""
        messages.append(system(f"{extra}\n{rule}".strip()))
        if level and rng.random() < 0.3:
            turn = (arithmetic, greet)[rng.randrange(2)](rng, 0)
            messages += [user(turn.messages[-1]["content"]), assistant(answer if kind < 0.5 else turn.answer)]
    messages.append(user(text))
    return Chat("obey", wording, messages, answer, maybe(rng, f"The system message sets a rule: {rule}", 0.25))


# --- numbers

OPERATORS = {"+": ("plus", "加"), "-": ("minus", "减"), "×": ("times", "乘")}
SUM = (
    "[what is|what's|calculate|compute|work out|how much is|evaluate|tell me] {a} {o} {b}[?|?|.|]",
    "{a} {o} {b} [=|= ?|equals|is]",
    "{a}{o}{b}=[?|]",
    "{a} {o} {b} = ? [Just the number.|Only the number.|Number only.|Answer with the number only.]",
    "[I have a question:|Quick question:|Please answer:|Hey,] [what is|how much is] {a} {o} {b}?",
    "[give me the result of|the result of|solve] {a} {o} {b}",
)
SUM_ZH = (
    "[请问|计算|算一下|求|]{a} {o} {b} [等于|=|是][几|多少|？|?]",
    "{a}{o}{b}[=？|=?|=几|等于多少|等于几？]",
    "{a} {o} {b} = ? [只给数字。|只回答数字。|只要结果。|只写答案。|给出数字即可。]",
    "[请|][告诉我|回答]{a} {o} {b}[的结果|等于多少]",
)
BARE_MARKS = ("umber", "只", "数字", "即可")


def arithmetic(rng: random.Random, level: int) -> Chat:
    """One digit; from level 2 on also two digits, with a written thought."""
    operator = rng.choice("++--×")
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    if operator == "-" and a < b:
        a, b = b, a
    chinese = rng.random() < 0.4
    wording = expand(rng, rng.choice(SUM_ZH if chinese else SUM))
    sign = rng.choice((operator, operator, operator, OPERATORS[operator][int(chinese)]))
    if operator == "×" and sign == "×":
        sign = rng.choice("×*")
    result = {"+": a + b, "-": a - b, "×": a * b}[operator]
    text = wording.replace("{a}", str(a)).replace("{b}", str(b)).replace("{o}", sign)
    equation = f"{a} {operator} {b} = {result}"
    answer = str(result) if any(mark in wording for mark in BARE_MARKS) else equation + ("。" if chinese else ".")
    return Chat("arithmetic", wording, [user(text)], answer, maybe(rng, equation + ".", 0.4))


def digits(rng: random.Random, level: int) -> Chat:
    """Sums and differences of two-digit numbers, worked out digit by digit in the thought."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    plus = rng.random() < 0.5
    if not plus and a < b:
        a, b = b, a
    wording = expand(rng, rng.choice(SUM))
    text = wording.replace("{a}", str(a)).replace("{b}", str(b)).replace("{o}", "+" if plus else "-")
    low, high = (a % 10, b % 10), (a // 10, b // 10)
    if plus:
        carry = sum(low) // 10
        steps = (
            f"{low[0]} + {low[1]} = {sum(low)}, digit {sum(low) % 10}, carry {carry}. "
            f"{high[0]} + {high[1]} + {carry} = {sum(high) + carry}."
        )
        result = a + b
    else:
        borrow = int(low[0] < low[1])
        top = low[0] + 10 * borrow
        steps = f"{top} - {low[1]} = {top - low[1]}, borrow {borrow}. {high[0]} - {high[1]} - {borrow} = {high[0] - high[1] - borrow}."
        result = a - b
    answer = (
        str(result) if any(mark in wording for mark in BARE_MARKS) else f"{a} {'+' if plus else '-'} {b} = {result}."
    )
    return Chat("two digits", wording, [user(text)], answer, f"{steps} So the result is {result}.")


TENS = "zero ten twenty thirty forty fifty".split()
SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen""".split()


def in_words(value: int) -> str:
    """0 to 59."""
    if value < 20:
        return SMALL[value]
    return TENS[value // 10] + (f"-{SMALL[value % 10]}" if value % 10 else "")


COUNT = (
    f"{POLITE} count [from|] {{a}} to {{b}}{{how}}[.|!|]",
    "[count up|list the numbers|write the numbers|say the numbers|give me the numbers|enumerate] from {a} to {b}{how}[.|]",
    "[I want you to|now|let's] count from {a} [up|] to {b}{how}[.|]",
    "[numbers|the numbers|all numbers] from {a} to {b}{how}[.| please]",
)
COUNT_ZH = (
    "[请|]从{a}数到{b}{how}[。|]",
    "[请|]数数[：|，]从{a}到{b}{how}",
    "[请|][写出|列出]{a}到{b}[的数字|的所有数字|]{how}",
)
DOWN = (f"{POLITE} count [down|backwards] from {{a}} to {{b}}[.|!|]", "[请|]从{a}倒数到{b}[。|]")


def count_up(rng: random.Random, level: int) -> Chat:
    start = rng.choice((1, 1, 1, rng.randint(0, 20)))
    stop = start + rng.randint(2, (9, 20, 34)[level])
    kind = rng.random()
    how, form = "", str
    if kind < 0.15:
        wording = expand(rng, rng.choice(DOWN))
        numbers = range(min(stop, start + 15), start - 1, -1)
        text = wording.replace("{a}", str(numbers[0])).replace("{b}", str(start))
    else:
        chinese = kind > 0.8
        if not chinese and rng.random() < 0.3:
            how, form = (
                rng.choice((" in words", " in English", " in English words", " as words", ", written out")),
                in_words,
            )
        elif rng.random() < 0.3:
            how = (
                rng.choice(("，用逗号分开", "，用数字"))
                if chinese
                else rng.choice((", separated by commas", " with digits", ", one after another"))
            )
        wording = expand(rng, rng.choice(COUNT_ZH if chinese else COUNT)).replace("{how}", how)
        numbers = range(start, stop + 1)
        text = wording.replace("{a}", str(start)).replace("{b}", str(stop))
    answer = ", ".join(form(value) for value in numbers)
    return Chat(
        "count", wording, [user(text)], answer, maybe(rng, f"I count from {numbers[0]} to {numbers[-1]}.", 0.25)
    )


PROBLEMS = (
    "{m} has {a} {t}s. {m} [eats|loses|gives away|sells] {b} and then {c} more. How many {t}s [are left|does {m} have now|remain]?",
    "[There are|I have|We have] {a} {t}s. [Then|] I [take away|lose|give away|eat] {b}, and [then|later] I [give|lose|take] {c} [more|to {l}]. How many are left?",
    "{m} had {a} {t}s, lost {b} [and|and then] gave {c} to {l}. How many {t}s are left?",
    "{m}有{a}个{w}，[吃了|丢了|给了{l}]{b}个，又[吃了|送出]{c}个，还剩几个？",
)
FRUIT = "apple pear plum peach cookie cake coin pencil book stone egg candy marble".split()


def apples(rng: random.Random, level: int) -> Chat:
    a = rng.randint(2, 9)
    b = rng.randint(1, a - 1)
    c = rng.randint(1, a - b)
    if (a, b, c) == (3, 1, 1):
        a = 5
    thing, name, other = rng.choice(FRUIT), rng.choice(NAMES), rng.choice(NAMES)
    wording = expand(rng, rng.choice(PROBLEMS))
    chinese = "有{a}个" in wording
    if chinese:
        name, other, thing = rng.choice(ZH_NAMES), rng.choice(ZH_NAMES), rng.choice(ZH_WORDS[:12])
    text = wording
    for key, value in (("a", a), ("b", b), ("c", c), ("t", thing), ("w", thing), ("m", name), ("l", other)):
        text = text.replace("{" + key + "}", str(value))
    left, rest = a - b, a - b - c
    work = f"{a} - {b} = {left}, then {left} - {c} = {rest}."
    end = (
        f"还剩{rest}个。"
        if chinese
        else f"There {'is' if rest == 1 else 'are'} {rest} {thing}{'' if rest == 1 else 's'} left."
    )
    thought = maybe(rng, work, 0.6)
    return Chat("word problem", wording, [user(text)], end if thought else f"{work} {end}", thought)


MEET = (
    "[A|One] [train|car|bus] leaves {c} at {a} km/h and another [train|car|bus] leaves {e} at {b} km/h [towards it|in the opposite direction, towards the first|to meet it]. "
    "[The distance is|The cities are|They start] {d} km [apart|]. [When do they meet?|After how many hours do they meet?|How long until they meet?]",
    "{c} and {e} are {d} km apart. [Two|Two fast] [cars|trains|buses|ships] [start|leave] [at the same time|together] towards each other, at {a} and {b} km/h. [When will they meet?|How long does it take?|After how long do they meet?]",
)


def meeting(rng: random.Random, level: int) -> Chat:
    a, b, hours = 10 * rng.randint(2, 9), 10 * rng.randint(2, 9), rng.randint(2, 5)
    wording = expand(rng, rng.choice(MEET))
    text = wording
    start, end = rng.sample(CITIES, 2)
    for key, value in (("a", a), ("b", b), ("c", start), ("e", end), ("d", (a + b) * hours)):
        text = text.replace("{" + key + "}", str(value))
    work = f"Together they cover {a} + {b} = {a + b} km per hour. The distance is {(a + b) * hours} km, and {(a + b) * hours} / {a + b} = {hours}."
    thought = maybe(rng, work, 0.7)
    answer = f"They meet after {hours} hours."
    return Chat("word problem", wording, [user(text)], answer if thought else f"{work} {answer}", thought)


# --- JSON

FIELDS: dict[str, tuple[str, Callable[[random.Random], Any]]] = {
    "name": (
        "string",
        lambda r: r.choice((r.choice(NAMES), r.choice(NAMES), nonsense(r).capitalize(), r.choice(ZH_NAMES))),
    ),
    "age": ("integer", lambda r: r.randint(1, 99)),
    "city": ("string", lambda r: r.choice(CITIES)),
    "color": ("string", lambda r: r.choice(COLOURS)),
    "price": ("number", lambda r: r.choice((r.randint(1, 99), r.randint(1, 99) + 0.5))),
    "count": ("integer", lambda r: r.randint(0, 999)),
    "title": ("string", lambda r: f"{r.choice(ADJECTIVES)} {r.choice(THINGS)}"),
    "active": ("boolean", lambda r: r.random() < 0.5),
    "code": ("string", code),
    "year": ("integer", lambda r: r.randint(1900, 2099)),
    "animal": ("string", lambda r: r.choice(ANIMALS)),
    "email": ("string", lambda r: f"{word(r).lower()}@{nonsense(r)}.com"),
    "score": ("integer", lambda r: r.randint(0, 100)),
    "tags": ("array", lambda r: [r.choice(THINGS) for _ in range(r.randint(1, 3))]),
    "job": ("string", lambda r: r.choice("teacher doctor cook pilot baker driver painter farmer".split())),
}
JSON_ASK = (
    "[return|give me|create|write|output|produce|make|generate] [a|one|the] JSON [object|] [with|that has|containing|for] [|the fields] {f}[.|]",
    "[output|respond with|reply with|answer with] JSON[:| only:|.] {f}",
    "{f}[.|] [Give this as JSON.|As JSON please.|Return JSON.|Answer as a JSON object.|Put this into JSON.]",
    "[convert|turn|put] this [in|]to [JSON|a JSON object][:|] {f}",
    "[a person|an item|a record] [with|has] {f}. [Return|Write|Give] [it as|] [JSON|a JSON object][.|]",
    "[请|][返回|输出|生成|给出][一个|]JSON[对象|]：{f}",
    "[请用|用]JSON[格式|][表示|输出|回答]：{f}",
)
JSON_SCHEMA = (
    "[Use|Follow|Match|Stick to] this [JSON|] schema: {s}",
    "[schema|JSON schema|The schema is]: {s}",
    "It must [match|fit|be valid for] {s}",
)


def json_object(rng: random.Random, level: int) -> Chat:
    names = rng.sample(list(FIELDS), rng.randint(1, (2, 4, 6)[level]))
    if rng.random() < 0.3:
        names = ["name", "age", *[name for name in names if name not in ("name", "age")][:level]]
    if rng.random() < 0.15:
        names[-1] = nonsense(rng)
    values = {
        name: FIELDS[name][1](rng) if name in FIELDS else rng.choice((word(rng), rng.randint(0, 99))) for name in names
    }

    def said(value: Any) -> str:
        if isinstance(value, bool):
            return rng.choice(("true", "yes") if value else ("false", "no"))
        return (
            " and ".join(value)
            if isinstance(value, list)
            else quoted(rng, value)
            if isinstance(value, str) and rng.random() < 0.3
            else str(value)
        )

    form = rng.choice(("{} {}", "{} {}", "{}: {}", "{} = {}", "{} is {}"))
    joint = rng.choice((", ", ", ", " and ", "; ", "，" if rng.random() < 0.3 else ", "))
    wording = expand(rng, rng.choice(JSON_ASK))
    text = wording.replace("{f}", joint.join(form.format(name, said(value)) for name, value in values.items()))
    if rng.random() < 0.3:
        kinds = {
            name: FIELDS[name][0] if name in FIELDS else "string" if isinstance(value, str) else "integer"
            for name, value in values.items()
        }
        properties = {
            name: {"type": kind, **({"items": {"type": "string"}} if kind == "array" else {})}
            for name, kind in kinds.items()
        }
        schema = json.dumps({"type": "object", "properties": properties, "required": names})
        tail = expand(rng, rng.choice(JSON_SCHEMA))
        text, wording = f"{text}\n{tail.replace('{s}', schema)}", f"{wording} / {tail}"
    return Chat(
        "json",
        wording,
        [user(text)],
        json.dumps(values, ensure_ascii=False),
        maybe(rng, f"The fields are {', '.join(names)}.", 0.2),
    )


# --- tools


def tool_call(rng: random.Random, level: int) -> Chat:
    """A question that needs one call or two; what to call, or, when it was called, what to say."""
    topic, name = toolbox.pick(rng)
    wording, text, calls, facts = toolbox.questions(rng, topic, name, level, 2 if level and rng.random() < 0.25 else 1)
    tools = toolbox.shelf(rng, topic, name, rng.randint(0, (1, 2, 4)[level]))
    messages = [user(text)]
    if rng.random() < 0.1:
        messages.insert(0, system("You are a helpful assistant."))
    thought = maybe(rng, f"I should call {name}.", 0.3)
    if rng.random() < 0.65:
        return Chat("tool call", wording, messages, "", thought, calls, tools)
    messages.append(
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": thought or "",
            "tool_calls": [
                {"type": "function", "function": {"name": called, "arguments": arguments}}
                for called, arguments in calls
            ],
        }
    )
    messages += [{"role": "tool", "content": result} for result, _ in facts]
    return Chat(
        "tool result",
        wording,
        messages,
        " ".join(answer for _, answer in facts),
        None if thought is None else "The tool has answered.",
        [],
        tools,
    )


def no_tool(rng: random.Random, level: int) -> Chat:
    """Tools are there, and the question needs none."""
    chat = rng.choice((arithmetic, greet, echo, count_up, recall))(rng, 0)
    chat.tools = toolbox.shelf(rng, None, "", rng.randint(1, (1, 2, 3)[level]))
    chat.task = "no tool"
    return chat


def files(rng: random.Random, level: int) -> Chat:
    """Any step of a task that takes calls with files."""
    wording, messages, answer, thought, calls, tools = toolbox.file_step(rng, level, rng.random() < 0.3)
    return Chat("file steps", wording, messages, answer, thought, calls, tools)


# --- talk

HELLO = (
    "hello[|!| there| there!|, how are you?| again]",
    "[hey|hi there|good morning|good evening|good day|greetings|howdy][!|.|]",
    "[say|tell me] [hello|something nice|hi] [briefly|in a short way|quickly]",
    "[hello|hey], [keep it short|be brief|briefly please]",
    "你好[！|呀|，很高兴见到你]",
    "[您好|早上好|晚上好|嗨][！|]",
    "[how are you|how is it going|what's up][?|]",
)
ONE_WORD = (
    "[say|write|give me|type] {w} in [exactly|just|only|] one word[.|]",
    "[one word only|in one word|just one word|exactly one word][:|,] [say|write] {w}[.|]",
    "{w}[. One word only.|, in one single word please]",
)
THANKS = (
    "[thank you|thanks|many thanks|thanks a lot][!|.|]",
    "谢谢[你|！|]",
    "[bye|goodbye|see you|good night][!|.|]",
    "再见[！|]",
)
WONDER = (
    "[who|what|where|when|why|how] [is|was|are|were|does|did] the {a} {t} [of|in|near|from] {c}?",
    "[tell me|explain|what do you know] about {c} [and its|and the] {t}s[.|?]",
    "[do you know|can you tell me] [why|how|where] the {n} [sleeps|sings|lives|works|runs]?",
    "你知道{w}[吗|的历史吗|在哪里吗]？",
    "[介绍一下|说说]{w}[。|]",
)
ABLE = (
    "what can you do?",
    "[how|with what] can you help me?",
    "what are you [able to do|good at]?",
    "你能做什么？",
    "你会什么？",
)


def greet(rng: random.Random, level: int) -> Chat:
    kind = rng.random()
    if kind < 0.45:
        wording = expand(rng, rng.choice(HELLO))
        chinese = wording[0] > "z"
        answer = "你好！有什么可以帮你？" if chinese else "Hello! How can I help you today?"
        return Chat("talk", wording, [user(wording)], answer, maybe(rng, "The user greets me. I greet back."))
    if kind < 0.7:
        said = rng.choice(("hello", "goodbye", "thanks", "yes", "no", "welcome", "sorry", "hi", *COLOURS, *ANIMALS[:5]))
        wording = expand(rng, rng.choice(ONE_WORD))
        return Chat(
            "talk", wording, [user(wording.replace("{w}", said))], said.capitalize(), maybe(rng, "One word is enough.")
        )
    if kind < 0.85:
        wording = expand(rng, rng.choice(THANKS))
        chinese = wording[0] > "z"
        leaving = any(mark in wording.lower() for mark in ("bye", "see", "night", "再见"))
        answer = (
            ("再见！" if leaving else "不客气！")
            if chinese
            else "Goodbye! See you soon."
            if leaving
            else "You are welcome!"
        )
        return Chat("talk", wording, [user(wording)], answer, maybe(rng, "The user is polite. So am I."))
    wording = expand(rng, rng.choice(ABLE))
    answer = (
        "我可以重复文字、记住内容、数数、做简单的算术、写JSON和调用工具。"
        if wording[0] > "z"
        else "I can repeat text, remember things, count, add small numbers, write JSON, call tools and name colors."
    )
    return Chat("talk", wording, [user(wording)], answer, maybe(rng, "The user asks what I can do."))


def wonder(rng: random.Random, level: int) -> Chat:
    """Questions that a model of this size cannot answer."""
    wording = expand(rng, rng.choice(WONDER))
    pick = rng.choice
    text = wording.format(
        a=pick(ADJECTIVES),
        t=pick(THINGS),
        c=pick((pick(CITIES), nonsense(rng).capitalize())),
        n=pick(ANIMALS),
        w=pick((hanzi(rng), pick(ZH_CITIES))),
    )
    answer = "我不知道。我只是一个很小的模型。" if text[0] > "z" else "I do not know. I am only a very small model."
    return Chat("talk", wording, [user(text)], answer, maybe(rng, "I do not know anything about this."))


TALE = (
    f"{POLITE} [tell|write] [me|] a [short|little|brief|nice|small|] [story|tale|fairy tale][.|!|]",
    f"{POLITE} [tell|write] [me|us|] a [short|little|brief|] [story|tale] about [a|the] {{n}}[.|]",
    f"{POLITE} [tell|write] [me|] a [short|little|] [story|tale] about [a|the] {{n}} and [a|the] {{t}}[.|]",
    "[make up|invent|I would like to hear|I want] a [short|] story [with|about] a {n}[.|]",
)


def story(rng: random.Random, level: int) -> Chat:
    wording = expand(rng, rng.choice(TALE))
    animal, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    text = wording.replace("{n}", animal).replace("{t}", thing)
    tale = stories.tale(rng, animal, thing, level)
    thought = f"I will write a short story about a {animal} and a {thing}. It should have a beginning, a problem and a good end."
    return Chat("story", wording, [user(text)], tale, maybe(rng, thought, 0.6))


# --- pictures

SHADES = {
    "red": (235, 20, 20),
    "green": (20, 180, 40),
    "blue": (25, 40, 230),
    "yellow": (245, 235, 20),
    "black": (12, 12, 12),
    "white": (245, 245, 245),
    "orange": (250, 140, 10),
    "purple": (140, 20, 170),
    "gray": (128, 128, 128),
}
ONE = (
    "[what|which] [color|colour] [is|does] [this|the] [picture|image|square|area][?| have?]",
    "[name|tell me|describe|say] the [color|colour] of [this|the] [picture|image|area][.|]",
    "[what do you see|describe this picture|describe the image|what is in the picture][?|.|]",
    "[look at|here is] [this|an] [picture|image]. [Which|What] [color|colour] is it?",
    "[这张|这个|][图片|图]是什么颜色[？|的？]",
)
FOUR = (
    "[what|which] [colors|colours] [are|do you see] in [this|the] [picture|image][?|]",
    "[name|list|tell me] [the|all|all four|the four] [colors|colours] [in|of] [this|the] [picture|image|quadrants][.|]",
    "[describe|what is in] the four [quadrants|parts|areas|corners][ of the image|][?|.]",
    "[这张|][图片|图]有哪些颜色？",
    "[the picture|the image|it] has four [parts|areas|quadrants]. [Which|What] [colors|colours] [are they|do they have]?",
)
CORNER = (
    "[what|which] [color|colour] is [at|in] the {w}[ quadrant| corner| part|][ of the picture| of the image|]?",
    "[name|tell me] the [color|colour] [at|in] the {w}[ corner| quadrant|][.|]",
)
CORNERS = ("top left", "top right", "bottom left", "bottom right")
SIZES = (
    (64, 64),
    (32, 32),
    (128, 128),
    (256, 256),
    (320, 320),
    (512, 512),
    (100, 60),
    (300, 200),
    (200, 400),
    (640, 480),
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
)


def shade(rng: random.Random, name: str) -> tuple[int, int, int]:
    """A colour that has this name: the pure one or one near it."""
    pure = {
        "red": (255, 0, 0),
        "green": (0, 255, 0),
        "blue": (0, 0, 255),
        "yellow": (255, 255, 0),
        "black": (0, 0, 0),
        "white": (255, 255, 255),
    }
    base = (
        pure[name]
        if name in pure and rng.random() < 0.4
        else (0, 128, 0)
        if name == "green" and rng.random() < 0.2
        else SHADES[name]
    )
    away = rng.choice((0, 5, 20))
    return tuple(min(255, max(0, value + rng.randint(-away, away))) for value in base)  # type: ignore[return-value]


def picture(rng: random.Random, level: int) -> Chat:
    names = list(SHADES)[: (4, 6, 9)[level]]
    kind = rng.random()
    if kind < (0.6 if level == 0 else 0.4):
        colours = [rng.choice(names)]
        wording = expand(rng, rng.choice(ONE))
        chinese = "颜色" in wording
        answer = f"这张图片是{ZH_COLOURS[colours[0]]}。" if chinese else f"The picture is {colours[0]}."
        text, thought = wording, f"The whole picture is {colours[0]}."
    else:
        colours = [rng.choice(names) for _ in range(4)] if kind > 0.8 else rng.sample(names, 4)
        if kind < 0.75:
            wording = text = expand(rng, rng.choice(FOUR))
            a, b, c, d = [ZH_COLOURS[colour] for colour in colours] if "颜色" in wording else colours
            answer = (
                f"左上{a}，右上{b}，左下{c}，右下{d}。"
                if "颜色" in wording
                else f"The top left is {a}, the top right is {b}, the bottom left is {c} and the bottom right is {d}."
            )
            thought = "The picture has four parts of one color each."
        else:
            wording, place = expand(rng, rng.choice(CORNER)), rng.randrange(4)
            text = wording.replace(
                "{w}", rng.choice((CORNERS[place], CORNERS[place].replace("top", "upper").replace("bottom", "lower")))
            )
            answer = f"The {CORNERS[place]} is {colours[place]}."
            thought = "I look at that part of the picture."
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}, {"type": "image"}]
    if rng.random() < 0.4:
        parts.reverse()
    drawn = Picture(rng.choice(SIZES), tuple(shade(rng, colour) for colour in colours))
    return Chat("picture", wording, [user(parts)], answer, maybe(rng, thought), picture=drawn)  # type: ignore[arg-type]


TASKS: dict[str, Task] = {
    "echo": echo,
    "recall": recall,
    "table": table,
    "obey": obey,
    "arithmetic": arithmetic,
    "two digits": digits,
    "count": count_up,
    "apples": apples,
    "meeting": meeting,
    "json": json_object,
    "tools": tool_call,
    "no tool": no_tool,
    "files": files,
    "talk": greet,
    "wonder": wonder,
    "story": story,
    "picture": picture,
}


def draw(rng: random.Random, task: str, level: int, split: str) -> Chat:
    """A chat of `task` in one split. Raises RuntimeError after ten thousand tries."""
    for _ in range(10_000):
        chat = TASKS[task](rng, level)
        if split_of(chat) == split and not too_near(chat):
            return chat
    raise RuntimeError(f"no chat of {task!r} at level {level} is in the split {split!r}")
