"""Tools, questions that need them, and what they answer."""

# Lists of words and sentences read better in one piece.
# ruff: noqa: E501, SIM905
from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from chats import expand
from words import CITIES, NAMES, PLACES, THINGS, VERBS, ZH_CITIES, code, nonsense, number, word

Value = Callable[[random.Random], Any]


class Parameter(NamedTuple):
    """said: how the question says it, with {} for the value; an optional parameter is said half of the time."""

    name: str
    kind: str
    about: str
    value: Value
    said: str = ""
    choices: tuple[str, ...] = ()


class Topic(NamedTuple):
    """A tool. asks: questions with {name} for the first parameters. result: what it returns; reply: the answer from it."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    first: tuple[Parameter, ...]
    more: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: Callable[[random.Random, dict[str, Any]], dict[str, Any]]
    reply: str


def city(rng: random.Random) -> str:
    return (
        rng.choice(CITIES)
        if rng.random() < 0.65
        else nonsense(rng).capitalize()
        if rng.random() < 0.5
        else rng.choice(ZH_CITIES)
    )


def date(rng: random.Random) -> str:
    return f"{rng.randint(2020, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def path(rng: random.Random) -> str:
    return (
        rng.choice(("", word(rng).lower() + "/"))
        + word(rng).lower()
        + "."
        + rng.choice(("txt", "md", "py", "csv", "json"))
    )


def small(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


CITY = Parameter("city", "string", "Name of the city", city)
DAYS = Parameter("days", "integer", "Number of days", small(1, 14), " for {} days")
UNIT = Parameter(
    "unit",
    "string",
    "Unit of temperature",
    lambda r: r.choice(("celsius", "fahrenheit")),
    " in {}",
    ("celsius", "fahrenheit"),
)
DETAILS = Parameter("details", "boolean", "Whether to give details", lambda r: r.random() < 0.5, " {} details")

TOPICS = (
    Topic(
        ("get_weather", "weather", "get_current_weather", "weather_lookup", "fetch_weather"),
        ("Get the weather of a city", "Current weather in a city", "Look up the weather"),
        (CITY,),
        (UNIT, DAYS, DETAILS),
        (
            "[what is|what's|how is|tell me|check] the weather [like|] in {city}{more}[?|]",
            "[what|how] is the weather in {city} [today|now|right now|]{more}?",
            "[weather in|weather for] {city}{more}",
            "[will it rain|is it cold|is it warm] in {city}{more}?",
            "{city}[今天|现在|][的|]天气[怎么样|如何|好吗]？",
            "[查一下|告诉我|请查询]{city}的天气[。|]",
        ),
        lambda r, a: {
            "temperature": r.randint(-9, 39),
            "condition": r.choice(("sunny", "rainy", "cloudy", "windy", "foggy")),
        },
        "It is {condition} in {city} at {temperature} degrees.",
    ),
    Topic(
        ("get_time", "current_time", "clock", "time_in_city"),
        ("Get the current time in a city", "Current local time of a city"),
        (CITY,),
        (DETAILS,),
        (
            "[what time is it|what's the time|tell me the time|what is the local time|how late is it] in {city}{more}[?|]",
            "[现在|请问]{city}几点[了|]？",
        ),
        lambda r, a: {"time": f"{r.randint(0, 23):02}:{r.randint(0, 59):02}"},
        "It is {time} in {city}.",
    ),
    Topic(
        ("search_web", "web_search", "search", "find_online"),
        ("Search the web", "Search the internet for a query"),
        (
            Parameter(
                "query",
                "string",
                "What to search for",
                lambda r: " ".join(word(r).lower() for _ in range(r.randint(1, 3))),
            ),
        ),
        (Parameter("limit", "integer", "Largest number of results", small(1, 20), " and give {} results"),),
        (
            "[search|search the web|look|google] for {query}{more}[.|]",
            "[find|look up] {query} [online|on the web|on the internet]{more}[.|]",
            "[搜索|上网查]{query}[。|]",
        ),
        lambda r, a: {"hits": r.randint(1, 99)},
        "I found {hits} results for {query}.",
    ),
    Topic(
        ("send_email", "mail", "send_mail", "email"),
        ("Send an email", "Send a message by email"),
        (
            Parameter(
                "to",
                "string",
                "Receiver",
                lambda r: f"{word(r).lower()}@{nonsense(r)}.{r.choice(('com', 'org', 'net'))}",
            ),
            Parameter(
                "subject", "string", "Subject", lambda r: " ".join(word(r).lower() for _ in range(r.randint(1, 3)))
            ),
        ),
        (),
        (
            "[send|write] an [email|e-mail|mail] to {to} [with the subject|about|with subject|titled] {subject}[.|]",
            "[email|mail] {to} [about|with the subject] {subject}[.|]",
        ),
        lambda r, a: {"sent": True, "id": r.randint(100, 999)},
        "The email to {to} was sent.",
    ),
    Topic(
        ("convert_currency", "exchange", "currency_converter"),
        ("Convert an amount of money", "Convert money between currencies"),
        (
            Parameter(
                "amount", "number", "Amount of money", lambda r: r.choice((r.randint(1, 999), r.randint(1, 99) + 0.5))
            ),
            Parameter(
                "from_currency",
                "string",
                "Currency to convert from",
                lambda r: r.choice(("USD", "EUR", "GBP", "JPY", "CNY")),
            ),
            Parameter(
                "to_currency",
                "string",
                "Currency to convert to",
                lambda r: r.choice(("CHF", "SEK", "INR", "KRW", "BRL")),
            ),
        ),
        (),
        (
            "[convert|change|exchange] {amount} {from_currency} [to|into] {to_currency}[.|]",
            "[how much is|what is] {amount} {from_currency} in {to_currency}?",
            "{amount} {from_currency} [是|等于]多少 {to_currency}？",
        ),
        lambda r, a: {"result": r.randint(1, 9999)},
        "{amount} {from_currency} is {result} {to_currency}.",
    ),
    Topic(
        ("set_timer", "start_timer", "timer"),
        ("Start a timer", "Set a timer"),
        (Parameter("minutes", "integer", "Length in minutes", small(1, 120)),),
        (Parameter("label", "string", "Name of the timer", lambda r: word(r).lower(), " called {}"),),
        (
            "[set|start] a timer [for|of] {minutes} minutes{more}[.|]",
            "[remind me|wake me] in {minutes} minutes{more}[.|]",
            "[设置|开始][一个|]{minutes}分钟[的|][计时器|定时器]",
        ),
        lambda r, a: {"started": True},
        "The timer runs for {minutes} minutes.",
    ),
    Topic(
        ("book_flight", "find_flights", "search_flights", "flights"),
        ("Find flights between two cities", "Search flights"),
        (
            Parameter("origin", "string", "City of departure", city),
            Parameter("destination", "string", "City of arrival", city),
        ),
        (
            Parameter("date", "string", "Day of the flight", date, " on {}"),
            Parameter("passengers", "integer", "Number of passengers", small(1, 9), " for {} people"),
        ),
        (
            "[find|book|search|look for] [a flight|flights] from {origin} to {destination}{more}[.|]",
            "[I want to|I need to|I would like to] fly from {origin} to {destination}{more}[.|]",
        ),
        lambda r, a: {
            "flight": f"{r.choice('ABCDEFG')}{r.choice('XYZ')}{r.randint(10, 999)}",
            "price": r.randint(50, 900),
        },
        "Flight {flight} from {origin} to {destination} costs {price}.",
    ),
    Topic(
        ("play_music", "play_song", "music_player"),
        ("Play a song", "Play music"),
        (
            Parameter(
                "title", "string", "Name of the song", lambda r: " ".join(word(r) for _ in range(r.randint(1, 2)))
            ),
        ),
        (
            Parameter("volume", "integer", "Volume in percent", small(1, 100), " at volume {}"),
            Parameter("shuffle", "boolean", "Shuffle or not", lambda r: r.random() < 0.5, " {} shuffle"),
        ),
        (
            "[play|start|put on] [the song|the track|] {title}{more}[.|]",
            "[I want to hear|let me hear] {title}{more}[.|]",
            "[播放|放一首]{title}",
        ),
        lambda r, a: {"playing": True},
        "Now playing {title}.",
    ),
    Topic(
        ("get_stock_price", "stock_price", "quote"),
        ("Get the price of a stock", "Current stock price"),
        (
            Parameter(
                "symbol",
                "string",
                "Symbol of the stock",
                lambda r: "".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(r.randint(2, 4))),
            ),
        ),
        (),
        (
            "[what is|what's|get|check|tell me] the [stock price|share price|price of the stock] [of|] {symbol}[?|]",
            "[how much is|how is] [the stock|] {symbol} [trading at|worth] [now|today|]?",
            "{symbol}[的|]股价[是多少|]？",
        ),
        lambda r, a: {"price": r.randint(1, 999)},
        "{symbol} is at {price}.",
    ),
    Topic(
        ("create_event", "add_event", "calendar_add"),
        ("Add an event to the calendar", "Create a calendar event"),
        (
            Parameter(
                "title",
                "string",
                "Name of the event",
                lambda r: f"{r.choice(('meeting', 'lunch', 'call', 'dinner', 'visit'))} with {r.choice(NAMES)}",
            ),
            Parameter("date", "string", "Day of the event", date),
        ),
        (
            Parameter(
                "hours", "number", "Length in hours", lambda r: r.choice((0.5, 1.5, 2.5, 1, 2, 3)), " for {} hours"
            ),
        ),
        (
            "[add|put|create|schedule] [the event|an event|] {title} on {date}{more}[.|]",
            "[plan|enter] {title} [in my calendar|] on {date}{more}[.|]",
        ),
        lambda r, a: {"created": True},
        "{title} is in your calendar on {date}.",
    ),
    Topic(
        ("translate", "translate_text", "translator"),
        ("Translate a text", "Translate text into a language"),
        (
            Parameter(
                "text",
                "string",
                "Text to translate",
                lambda r: " ".join(word(r).lower() for _ in range(r.randint(1, 4))),
            ),
            Parameter(
                "language",
                "string",
                "Target language",
                lambda r: r.choice("French German Spanish Italian Chinese Japanese Korean".split()),
            ),
        ),
        (),
        ("[translate|convert|put] {text} [to|into] {language}[.|]", "[how do you say|what is] {text} in {language}?"),
        lambda r, a: {"translation": nonsense(r)},
        "In {language} it is {translation}.",
    ),
    Topic(
        ("lookup_order", "order_status", "get_order", "track_order"),
        ("Get the status of an order", "Look up an order"),
        (Parameter("order_id", "string", "Number of the order", lambda r: r.choice((code, number))(r)),),
        (DETAILS,),
        (
            "[where is|what is the status of|track|check|look up|find] [my|the] order {order_id}{more}[?|.|]",
            "[查询|查一下]订单{order_id}",
        ),
        lambda r, a: {"status": r.choice(("shipped", "delivered", "packed", "lost", "waiting"))},
        "Order {order_id} is {status}.",
    ),
    Topic(
        ("light_switch", "set_light", "switch_light"),
        ("Switch a light on or off", "Control a light"),
        (
            Parameter(
                "room",
                "string",
                "Room of the light",
                lambda r: r.choice("kitchen bedroom bathroom office garage hall garden cellar attic".split()),
            ),
            Parameter("on", "boolean", "On or off", lambda r: r.random() < 0.5),
        ),
        (Parameter("brightness", "integer", "Brightness in percent", small(1, 100), " at {} percent"),),
        (
            "[turn|switch] {on} the [light|lights|lamp] in the {room}{more}[.|]",
            "[turn|switch] the {room} [light|lights|lamp] {on}{more}[.|]",
        ),
        lambda r, a: {"done": True},
        "The light in the {room} is {on}.",
    ),
    Topic(
        ("calculator", "calculate", "compute"),
        ("Calculate an expression", "Evaluate arithmetic"),
        (
            Parameter(
                "expression",
                "string",
                "What to calculate",
                lambda r: f"{r.randint(10, 999)} {r.choice('+-*/')} {r.randint(10, 999)}",
            ),
        ),
        (),
        (
            "[use the tool to|with the tool,] [calculate|compute|evaluate] {expression}[.|]",
            "[calculate|compute|evaluate] {expression} [with the calculator|using the tool|with the tool][.|]",
        ),
        lambda r, a: {"result": r.randint(1, 99999)},
        "The result is {result}.",
    ),
)


def tool(
    rng: random.Random,
    name: str,
    about: str,
    required: tuple[Parameter, ...],
    optional: tuple[Parameter, ...] = (),
) -> dict[str, Any]:
    """A definition as requests carry it."""
    properties = {
        p.name: {"type": p.kind, "description": p.about, **({"enum": list(p.choices)} if p.choices else {})}
        for p in (*required, *optional)
    }
    if rng.random() < 0.4:
        for value in properties.values():
            del value["description"]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": properties, "required": [p.name for p in required]},
        },
    }


def made_up(rng: random.Random) -> Topic:
    """A tool that nobody has seen: the question names it."""
    name = f"{rng.choice(VERBS)}_{rng.choice((rng.choice(THINGS), rng.choice(PLACES), nonsense(rng)))}"
    kinds: tuple[tuple[str, Value], ...] = (
        ("string", lambda r: word(r)),
        ("integer", small(0, 999)),
        ("string", code),
        ("number", lambda r: r.randint(0, 99) + 0.5),
    )
    names = list(
        dict.fromkeys(
            rng.choice(
                (
                    rng.choice(("name", "value", "count", "size", "id", "key", "level", "target", "mode", "input")),
                    nonsense(rng),
                )
            )
            for _ in range(rng.randint(1, 3))
        )
    )
    first = tuple(Parameter(one, *(lambda kind: (kind[0], f"The {one}", kind[1]))(rng.choice(kinds))) for one in names)
    said = rng.choice((" and ", ", ")).join(
        rng.choice(("{n} {{{n}}}", "{n}={{{n}}}", "{n} = {{{n}}}", "{n}: {{{n}}}")).format(n=one) for one in names
    )
    return Topic(
        (name,),
        (f"{name.replace('_', ' ').capitalize()}",),
        first,
        (),
        (
            f"[use|call|run|invoke] [the tool|the function|] {name} with {said}[.|]",
            f"[please|] {name.replace('_', ' ')} with {said}[.|]",
        ),
        lambda r, a: {"ok": True, "value": r.randint(0, 999)},
        "The tool returned {value}.",
    )


SAID = {
    ("on", True): "on",
    ("on", False): "off",
    ("details", True): "with",
    ("details", False): "without",
    ("shuffle", True): "with",
    ("shuffle", False): "without",
}


def pick(rng: random.Random) -> tuple[Topic, str]:
    """A topic and the name that its tool has this time."""
    topic = made_up(rng) if rng.random() < 0.25 else rng.choice(TOPICS)
    return topic, rng.choice(topic.names)


def shelf(rng: random.Random, topic: Topic | None, name: str, others: int) -> list[dict[str, Any]]:
    """Definitions of `topic`, called `name`, and of others, shuffled. Without a topic: of others only."""
    out = [tool(rng, name, rng.choice(topic.about), topic.first, topic.more)] if topic else []
    for other in rng.sample([other for other in TOPICS if other is not topic], others):
        out.append(
            tool(
                rng,
                rng.choice(other.names),
                rng.choice(other.about),
                other.first,
                other.more if rng.random() < 0.5 else (),
            )
        )
    rng.shuffle(out)
    return out


def arguments_of(rng: random.Random, topic: Topic, level: int) -> tuple[dict[str, Any], str]:
    """Values for the required and some optional parameters, and how the question says the optional ones."""
    values = {p.name: p.value(rng) for p in topic.first}
    more = ""
    for parameter in topic.more:
        if level and rng.random() < 0.4:
            value = parameter.value(rng)
            more += parameter.said.format(
                SAID.get((parameter.name, value), value) if isinstance(value, bool) else value
            )
            values[parameter.name] = value
    return values, more


def spoken(values: dict[str, Any]) -> dict[str, Any]:
    return {key: SAID.get((key, value), value) if isinstance(value, bool) else value for key, value in values.items()}


def ask(pattern: str, values: dict[str, Any], more: str) -> str:
    text = pattern.replace("{more}", more)
    for key, value in spoken(values).items():
        text = text.replace("{" + key + "}", str(value))
    return text


def questions(
    rng: random.Random,
    topic: Topic,
    name: str,
    level: int,
    count: int,
) -> tuple[str, str, list[tuple[str, dict[str, Any]]], list[tuple[str, str]]]:
    """wording, question, the calls that it needs, and for each the tool's result and the sentence that it leads to."""
    wording = expand(rng, rng.choice(topic.asks))
    drawn = [arguments_of(rng, topic, level if count == 1 else 0) for _ in range(count)]
    if len(topic.first) == 1:
        key = topic.first[0].name
        joint = (
            rng.choice(("和", "、"))
            if any(mark in wording for mark in "气几放股订分搜")
            else rng.choice((" and ", " and in " if key == "city" else " and "))
        )
        text = wording.replace("{" + key + "}", joint.join(str(values[key]) for values, _ in drawn))
        text = ask(text, drawn[0][0], drawn[0][1])
    else:
        text = rng.choice((" Then ", " And ", "\n")).join(ask(wording, values, more) for values, more in drawn)
    calls, facts = [], []
    for values, _ in drawn:
        result = topic.result(rng, values)
        calls.append((name, values))
        facts.append((json.dumps(result), topic.reply.format(**{**spoken(values), **result})))
    return wording if count == 1 else f"{wording} x{count}", text, calls, facts


# --- a folder of files

FILE = Parameter("path", "string", "Path of the file", path)
FILE_TOOLS = (
    (("read_file", "open_file", "cat"), "Read a file", (FILE,)),
    (
        ("write_file", "save_file", "create_file"),
        "Write a file",
        (FILE, Parameter("content", "string", "Text to write", word)),
    ),
    (
        ("list_files", "list_directory", "ls"),
        "List the files of a folder",
        (Parameter("folder", "string", "Path of the folder", word),),
    ),
    (("delete_file", "remove_file", "rm"), "Delete a file", (FILE,)),
)
FILE_ASKS = {
    "read": (
        "[read|open|show me|print|what is in|show the content of] [the file|] {p}[.|]",
        "what does [the file|] {p} [say|contain]?",
        "[读取|打开|查看][文件|]{p}[。|]",
    ),
    "write": (
        "[write|save|put] {x} [in|into|to] [the file|] {p}[.|]",
        "[create|make] [a file|the file] {p} [with the content|with the text|containing|that says] {x}[.|]",
        "[把|将]{x}[写入|保存到][文件|]{p}[。|]",
    ),
    "copy": (
        "copy [the file|the content of|] {p} to {q}[.|]",
        "[read|open] {p} and [write|save|put] its [content|text] [to|into] {q}[.|]",
        "[把|将]{p}复制到{q}[。|]",
    ),
    "list": (
        "[list|show|what are] [the files|all files] in [the folder|] {d}[.|]",
        "[which|what] files are in {d}?",
        "列出{d}里的文件[。|]",
    ),
    "delete": ("[delete|remove|erase] [the file|] {p}[.|]", "[删除|移除][文件|]{p}[。|]"),
}


def file_step(
    rng: random.Random,
    level: int,
    thinking: bool,
) -> tuple[str, list[dict[str, Any]], str, str | None, list[tuple[str, dict[str, Any]]], list[dict[str, Any]]]:
    """wording, messages so far, answer, thought, calls, tools: any step of a task with files."""
    names = [rng.choice(tool_names) for tool_names, _, _ in FILE_TOOLS]
    tools = [tool(rng, name, about, first) for name, (_, about, first) in zip(names, FILE_TOOLS, strict=True)]
    rng.shuffle(tools)
    read, write, listing, delete = names
    kind = rng.choice(list(FILE_ASKS))
    p, q, folder = path(rng), path(rng), word(rng).lower()
    content = " ".join(rng.choice((word, code))(rng) for _ in range(rng.randint(1, (2, 5, 12)[level])))
    wording = expand(rng, rng.choice(FILE_ASKS[kind]))
    text = wording.replace("{p}", p).replace("{q}", q).replace("{d}", folder).replace("{x}", content)
    found = "\n".join(path(rng).split("/")[-1] for _ in range(rng.randint(1, 4)))
    steps = {
        "read": ([((read, {"path": p}), content)], f"It says: {content}"),
        "write": ([((write, {"path": p, "content": content}), "ok")], f"I have written {p}."),
        "copy": (
            [((read, {"path": p}), content), ((write, {"path": q, "content": content}), "ok")],
            f"I have copied {p} to {q}.",
        ),
        "list": ([((listing, {"folder": folder}), found)], f"The files are: {', '.join(found.split())}"),
        "delete": ([((delete, {"path": p}), "ok")], f"I have deleted {p}."),
    }[kind]
    done = rng.randint(0, len(steps[0]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for (name, arguments), result in steps[0][:done]:
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": f"Next I call {name}." if thinking else "",
                "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
            }
        )
        messages.append({"role": "tool", "content": result})
    if done == len(steps[0]):
        return wording, messages, steps[1], "Everything is done." if thinking else None, [], tools
    call = steps[0][done][0]
    return wording, messages, "", f"Next I call {call[0]}." if thinking else None, [call], tools
