"""The call format of Qwen3-Coder and later: the inside of one tool call block.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

A value is everything between its tags, less one newline at each end, and may itself hold tags: a closing tag ends it
only where the format goes on behind it. What is not of the format:

* a block that does not begin with a function is no call: it is content, unchanged;
* text before a parameter is left out; behind a closing tag it makes that tag a part of the value;
* missing closing tags before the end of the block or of the answer are taken as written;
* several functions in one block are several calls; text behind the last one ends the block;
* an answer cut by its token limit leaves the arguments as far as they came, so not valid JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vllm.overlay.serving.parse.arguments import ValueWriter, parameter_types
from vllm.overlay.serving.parse.events import CallArguments, CallStart, Event
from vllm.overlay.serving.parse.markers import CALL, END_CALL

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
# Longer runs of blanks between two tags are not of the format; so what has to be held back stays short.
_MOST_BLANKS = 64
_LONGEST_NAME = 256

_BEFORE, _BODY, _VALUE, _TAIL, _DONE = "before", "body", "value", "tail", "done"
_YES, _NO, _WAIT = "yes", "no", "wait"

# What ends a value: a closing tag, and what has to follow it. Nothing more to come counts as following.
_ENDS = (
    (_END_PARAMETER, (_PARAMETER, _END_FUNCTION, END_CALL)),
    (_END_FUNCTION, (END_CALL,)),
    (END_CALL, (CALL,)),
)


class CallParser:
    """Reads one block, fed in pieces behind its opening marker. When ``done``, ``rest`` is the text that is not of
    it."""

    def __init__(self, schemas: Mapping[str, dict], first_index: int, at_most: int | None = None) -> None:
        """schemas: a tool's parameters by its name; first_index: position of the block's first call; at_most: calls
        to take."""
        self._schemas = schemas
        self._at_most = at_most
        self._text = ""
        self._state = _BEFORE
        self._schema: Mapping = {}
        self._value: ValueWriter | None = None
        self._value_begun = False
        self._key_due = ""
        self._any_parameter = False
        self._events: list[Event] = []
        self._index = first_index - 1
        self.first_index = first_index
        self.closed = 0
        self.rest = ""

    @property
    def done(self) -> bool:
        """Whether the block has ended."""
        return self._state == _DONE

    @property
    def started(self) -> int:
        """How many calls have begun."""
        return self._index + 1 - self.first_index

    def feed(self, text: str) -> list[Event]:
        """The events that ``text`` makes certain."""
        self._text += text
        self._run(last=False)
        return self._take()

    def finish(self, truncated: bool) -> list[Event]:
        """The events of an answer that ends here. truncated: by its limit, so what is open stays open."""
        if truncated:
            self._finish_truncated()
            return self._take()
        self._run(last=True)
        if self._state == _VALUE:
            self._end_value(len(self._text))
        if self._state == _BODY:
            self._end_call(len(self._text), _TAIL)
        if self._state == _TAIL:
            self._end_block(0)
        return self._take()

    def _finish_truncated(self) -> None:
        """What is held back may be the beginning of a closing tag, and is left out unless it is a whole one."""
        at = self._text.find("<")
        if self._state == _VALUE and at >= 0 and self._value_end(at, last=True)[0] == _YES:
            self._end_value(0)
        self._text, self._state = "", _DONE

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _run(self, last: bool) -> None:
        step = {_BEFORE: self._before, _BODY: self._body, _VALUE: self._in_value, _TAIL: self._tail}
        while self._state != _DONE and step[self._state](last):
            pass

    # Each state consumes a piece of the text and returns whether it got on.

    def _before(self, last: bool) -> bool:
        verdict, tag, at = self._next_tag((_FUNCTION, END_CALL))
        if verdict == _WAIT and not last:
            return False
        if tag == END_CALL:
            self._end_block(at + len(END_CALL))
            return False
        name, end = self._tag_name(at + len(_FUNCTION)) if verdict == _YES else (None, -1)
        if verdict == _YES and end < 0 and not last:
            return False
        if name is None:
            blank = not self._text.strip()
            self.rest = "" if blank else CALL + self._text
            self._text, self._state = "", _DONE
            return False
        self._begin_call(name, end)
        return True

    def _body(self, last: bool) -> bool:
        verdict, tag, at = self._next_tag((_PARAMETER, _END_FUNCTION, END_CALL, CALL))
        if verdict == _WAIT:
            return False
        if verdict == _NO:
            # Stray text, up to the next tag that may be of the format.
            nxt = self._text.find("<", at + 1)
            self._text = self._text[nxt:] if nxt >= 0 else ""
            return nxt >= 0
        if tag == _PARAMETER:
            key, end = self._tag_name(at + len(_PARAMETER))
            if end < 0:
                return False
            if key is None:
                self._text = self._text[at + 1:]
                return True
            self._begin_value(key, end)
        elif tag == _END_FUNCTION:
            self._end_call(at + len(_END_FUNCTION), _TAIL)
        elif tag == END_CALL:
            self._end_call(at, _TAIL)
        else:
            self._end_call(at + len(CALL), _BEFORE)
        return True

    def _in_value(self, last: bool) -> bool:
        if not self._value_begun:
            if not self._text:
                return False
            self._value_begun = True
            self._text = self._text[1:] if self._text[0] == "\n" else self._text
        at = self._text.find("<")
        while at >= 0:
            verdict, after = self._value_end(at, last)
            if verdict == _NO:
                at = self._text.find("<", at + 1)
                continue
            self._write(self._text[:self._newline_before(at)])
            if verdict == _WAIT:
                self._text = self._text[self._newline_before(at):]
                return False
            self._end_value(after)
            return True
        keep = self._newline_before(len(self._text))
        self._write(self._text[:keep])
        self._text = self._text[keep:]
        return False

    def _tail(self, last: bool) -> bool:
        verdict, tag, at = self._next_tag((END_CALL, _FUNCTION, CALL))
        if verdict == _WAIT and not (last and self._text.strip()):
            return False
        if tag == END_CALL and self._text[at + len(END_CALL):].lstrip().startswith(CALL):
            at, tag = self._text.index(CALL, at), CALL
        if verdict != _YES or tag == END_CALL:
            self._end_block(at + len(END_CALL) if verdict == _YES else at)
            return False
        if tag == CALL:
            self._text, self._state = self._text[at + len(CALL):], _BEFORE
            return True
        name, end = self._tag_name(at + len(_FUNCTION))
        if end < 0 and not last:
            return False
        if name is None:
            self._end_block(at)
            return False
        self._begin_call(name, end)
        return True

    # What the states are made of.

    def _next_tag(self, tags: tuple[str, ...]) -> tuple[str, str, int]:
        """(verdict, tag, position) of the first thing that is not blank."""
        at = len(self._text) - len(self._text.lstrip())
        for tag in tags:
            if self._text.startswith(tag, at):
                return _YES, tag, at
        beginning = self._text[at:]
        return (_WAIT if any(tag.startswith(beginning) for tag in tags) else _NO), "", at

    def _tag_name(self, at: int) -> tuple[str | None, int]:
        """(name, position behind the tag) of a tag whose name begins at ``at``; (None, -1) to wait; (None, 0) for no
        tag."""
        end = self._text.find(">", at)
        name = self._text[at:end if end >= 0 else len(self._text)]
        if "\n" in name or "<" in name or len(name) > _LONGEST_NAME:
            return None, 0
        if end < 0:
            return None, -1
        return (name.strip(), end + 1) if name.strip() else (None, 0)

    def _value_end(self, at: int, last: bool) -> tuple[str, int]:
        """Whether the ``<`` at ``at`` ends the value, and where the text goes on if so."""
        verdict = _NO
        for tag, followers in _ENDS:
            if not self._text.startswith(tag, at):
                if tag.startswith(self._text[at:]) and not last:
                    verdict = _WAIT
                continue
            behind = at + len(tag)
            follower = self._text[behind:].lstrip()
            if len(self._text) - behind - len(follower) > _MOST_BLANKS:
                continue
            if any(follower.startswith(one) for one in followers) or (last and not follower):
                return _YES, behind if tag == _END_PARAMETER else at
            if not last and any(one.startswith(follower) for one in followers):
                verdict = _WAIT
        return verdict, 0

    def _newline_before(self, at: int) -> int:
        """``at``, or the position of the newline just before it, which belongs to the closing tag."""
        return at - 1 if at > 0 and self._text[at - 1] == "\n" else at

    def _begin_call(self, name: str, end: int) -> None:
        self._text = self._text[end:]
        self._schema = self._schemas.get(name, {})
        self._any_parameter = False
        self._index += 1
        self._events.append(CallStart(self._index, name))
        self._state = _BODY

    def _begin_value(self, key: str, end: int) -> None:
        self._text = self._text[end:]
        self._value = ValueWriter(parameter_types(self._schema, key))
        self._value_begun = False
        # Written with the value's first character: until then nothing shows a parameter whose value may never come.
        self._key_due = ("," if self._any_parameter else "{").ljust(2 if self._any_parameter else 1)
        self._key_due += json.dumps(key, ensure_ascii=False) + ": "
        self._any_parameter = True
        self._state = _VALUE

    def _write(self, text: str) -> None:
        if text and self._value is not None:
            self._arguments(self._value.feed(text))

    def _arguments(self, json_text: str) -> None:
        if json_text:
            self._events.append(CallArguments(self._index, self._key_due + json_text))
            self._key_due = ""

    def _end_value(self, after: int) -> None:
        if self._value is not None:
            self._arguments(self._value.finish())
        self._value = None
        self._text = self._text[after:]
        self._state = _BODY

    def _end_call(self, after: int, state: str) -> None:
        self._arguments("}" if self._any_parameter else "{}")
        self._text = self._text[after:]
        self.closed += 1
        self._state = state
        if self._at_most is not None and self.closed >= self._at_most:
            self._text, self._state = "", _DONE

    def _end_block(self, after: int) -> None:
        self.rest = self._text[after:]
        self._text, self._state = "", _DONE
