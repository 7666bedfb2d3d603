"""Rows of whole functions for a late part of training: from the chat pairs and from the code, some of them stuttering.

Lives beside the trainer. A greedy model of this size falls into loops that its text never shows it the way out of.
So a *stutter* writes a piece of a body several times over and asks nothing of the copies: what is learned is that
after a repetition the true text goes on. A piece never opens or closes a bracket or a quote alone: after its copies the
true text would not close what they opened, and that would be learned. Everything is done on ids, at the borders that
the tokenizer keeps (a newline and a line's indentation are pieces of their own). Knows tokens, not the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["ChatPairs", "CodeFunctions", "Lexicon", "Row", "fill_row", "stutter"]

Row = tuple[list[int], list[bool]]
"""Ids, and of each whether it is learned."""

BLOCK_LINES = 4
COPIES = (1, 1, 1, 2, 2, 3, 4)
WITHIN_LINE = 0.3  # of stutters
PIECE_TOKENS = 6
PIECE_COPIES = 6
AGAIN = 0.3  # stutters after the first
DEEPER = 0.12  # of stutters of lines: every copy is indented further
DEEPER_BY = 4
PAIRS = {"(": ")", "[": "]", "{": "}"}
QUOTES = "\"'"
MARKS = "()[]{}" + QUOTES
SHORTEST, LONGEST = 20, 400  # tokens of a function of the code


class Lexicon:
    """What the ids mean that rows are cut at: newlines, indentations, digits, control tokens."""

    def __init__(self, vocabulary: Mapping[str, int], special: Mapping[str, int]) -> None:
        self.end, self.start, self.stop = (special[t] for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        self.newline = vocabulary["Ċ"]
        self.newlines = {i for piece, i in vocabulary.items() if set(piece) == {"Ċ"}}
        self.width = {i: len(piece) for piece, i in vocabulary.items() if set(piece) == {"Ġ"}}
        self.indent = {width: i for i, width in self.width.items()}
        self.digits = [vocabulary[str(d)] for d in range(10)]
        self.value = {i: d for d, i in enumerate(self.digits)}
        self.keyword = vocabulary["def"]
        self.closers = {i for piece, i in vocabulary.items() if piece[:1] in (")", "]", "}")}
        marks = {i: [mark for mark in piece if mark in MARKS] for piece, i in vocabulary.items()}
        self.marks = {i: found for i, found in marks.items() if found}

    def is_balanced(self, ids: list[int]) -> bool:
        """Whether every bracket that opens in the ids closes there and the other way round, and quotes come in pairs.
        A bracket in a string counts too: what is called unbalanced for that alone is lost and harms nothing."""
        opened: list[str] = []
        quotes = dict.fromkeys(QUOTES, 0)
        for mark in (mark for i in ids for mark in self.marks.get(i, ())):
            if mark in QUOTES:
                quotes[mark] += 1
            elif mark in PAIRS:
                opened.append(PAIRS[mark])
            elif not opened or opened.pop() != mark:
                return False
        return not opened and all(count % 2 == 0 for count in quotes.values())

    def lines(self, ids: list[int]) -> list[list[int]]:
        """The ids cut after each newline; a last line without one keeps its own place."""
        found: list[list[int]] = [[]]
        for i in ids:
            found[-1].append(i)
            if i in self.newlines:
                found.append([])
        return found if found[-1] else found[:-1]

    def width_of(self, line: list[int]) -> int:
        return self.width.get(line[0], 0)

    def shifted(self, line: list[int], by: int) -> list[int] | None:
        """The line indented by so many columns more or less; None where no single id says so."""
        wide = self.width_of(line)
        if wide + by == 0:
            return line[1:] if wide else line
        if wide + by not in self.indent or (wide and len(line) > 1 and line[1] in self.width):
            return None
        return [self.indent[wide + by], *line[bool(wide) :]]


def stutter(lines: list[list[int]], rng: random.Random, words: Lexicon) -> Row:
    """The body with one or more of its pieces repeated; the copies are not learned, what follows them is."""
    ids: list[int] = []
    learned: list[bool] = []
    at = 0
    while at < len(lines):
        first = rng.randrange(at, len(lines))
        if rng.random() < WITHIN_LINE:
            last, kept, copies = first + 1, *_piece_copies(lines[first], rng, words)
        else:
            last, copies = _line_copies(lines, first, rng, words)
            kept = len(lines[last - 1])
        true = [i for line in lines[at : last - 1] for i in line] + lines[last - 1][:kept]
        ids += true + copies + lines[last - 1][kept:]
        learned += [True] * len(true) + [False] * len(copies) + [True] * (len(lines[last - 1]) - kept)
        at = last
        if rng.random() >= AGAIN:
            break
    rest = [i for line in lines[at:] for i in line]
    return ids + rest, learned + [True] * len(rest)


def _piece_copies(line: list[int], rng: random.Random, words: Lexicon) -> tuple[int, list[int]]:
    """(where in the line the copies go, copies of the ids before that place)."""
    begin = rng.randrange(len(line))
    stop = min(begin + rng.randint(1, PIECE_TOKENS), len(line) - 1)
    if stop <= begin or line[begin] in words.width or not words.is_balanced(line[begin:stop]):
        return len(line), []
    return stop, line[begin:stop] * rng.randint(1, PIECE_COPIES)


def _line_copies(lines: list[list[int]], first: int, rng: random.Random, words: Lexicon) -> tuple[int, list[int]]:
    """(the line after the block, copies of the block): no line of a block stands left of its first. Copies may be
    indented further and further, and a digit may count up."""
    last, wanted = first + 1, first + rng.randint(1, BLOCK_LINES)
    while last < min(wanted, len(lines)) and words.width_of(lines[last]) >= words.width_of(lines[first]):
        last += 1
    block, copies = lines[first:last], []
    if not words.is_balanced([i for line in block for i in line]):
        return last, copies
    deeper = DEEPER_BY * (rng.random() < DEEPER)
    counted = _lone_digit(block, rng, words) if rng.random() < 0.5 else None
    for number in range(1, rng.choice(COPIES) + 1):
        copy: list[int] = []
        for row, line in enumerate(block):
            changed = list(line)
            if counted and counted[0] == row:
                changed[counted[1]] = words.digits[(words.value[line[counted[1]]] + number) % 10]
            moved = words.shifted(changed, deeper * number)
            if moved is None:
                return last, copies
            copy += moved
        copies += copy
    return last, copies


def _lone_digit(block: list[list[int]], rng: random.Random, words: Lexicon) -> tuple[int, int] | None:
    """(line, place) of a digit that is a number by itself."""
    found = [
        (row, at)
        for row, line in enumerate(block)
        for at, i in enumerate(line)
        if i in words.value and not {line[at - 1] if at else -1, *line[at + 1 : at + 2]} & words.value.keys()
    ]
    return rng.choice(found) if found else None


class ChatPairs:
    """The chat stream as conversations. A document is one of them, or a function out of one.

    ``longest`` leaves out the conversations that have an answer with a longer body, in tokens.
    """

    def __init__(self, chat: np.ndarray, words: Lexicon, longest: int | None = None) -> None:
        self.chat, self.words = chat, words
        ends = np.flatnonzero(chat == words.end)
        self.bounds = np.stack([np.concatenate([[0], ends[:-1] + 1]), ends], axis=1)
        if longest is not None:
            self.bounds = self.bounds[[self._longest_body(n) <= longest for n in range(len(ends))]]

    def _messages(self, number: int) -> list[tuple[list[int], list[int]]]:
        """(header, content) of each message; the last one is an assistant's, and so is every second before it."""
        begin, end = self.bounds[number]
        ids = self.chat[begin:end].tolist()
        found, at = [], 0
        while at < len(ids):
            head = ids.index(self.words.newline, at) + 1
            stop = ids.index(self.words.stop, head)
            found.append((ids[at:head], ids[head:stop]))
            at = stop + 2  # the end of a message and its newline
        return found

    def _longest_body(self, number: int) -> int:
        messages = self._messages(number)
        exchanges = zip(messages[len(messages) % 2 :: 2], messages[len(messages) % 2 + 1 :: 2], strict=True)
        splits = [(split_pair(asked, answer, self.words), answer) for (_, asked), (_, answer) in exchanges]
        return max(len(split[2]) if split else len(answer) for split, answer in splits)

    def conversation(self, rng: random.Random, chance: float) -> Row:
        """A whole conversation. Learned: what the assistant says, its end included."""
        messages = self._messages(rng.randrange(len(self.bounds)))
        ids: list[int] = []
        learned: list[bool] = []
        for place, (header, content) in enumerate(messages):
            is_answer = place > 0 and (len(messages) - 1 - place) % 2 == 0  # the first may be the system's
            said, known = content, [True] * len(content)
            if is_answer and rng.random() < chance:
                said, known = self._stuttered(messages[place - 1][1], content, rng)
            ids += [*header, *said, self.words.stop]
            learned += [False] * len(header) + [k and is_answer for k in known] + [is_answer]
            if place + 1 < len(messages):
                ids.append(self.words.newline)
                learned.append(False)
        return [*ids, self.words.end], [*learned, False]

    def _stuttered(self, asked: list[int], answer: list[int], rng: random.Random) -> Row:
        split = split_pair(asked, answer, self.words)
        head, body = split[1:] if split else ([], answer)
        ids, learned = stutter(self.words.lines([*body, self.words.newline]), rng, self.words)
        if not learned[-1]:  # the last line is repeated: the newline after the true one is not what should come there
            learned[len(learned) - 1 - learned[::-1].index(True)] = False
        return [*head, *ids[:-1]], [True] * len(head) + learned[:-1]

    def function(self, rng: random.Random, chance: float) -> Row:
        """Signature and docstring, then the body, a newline and the end token. Learned: what follows the docstring."""
        while True:
            messages = self._messages(rng.randrange(len(self.bounds)))
            place = rng.randrange(len(messages) // 2) * 2 + len(messages) % 2
            split = split_pair(messages[place][1], messages[place + 1][1], self.words)
            if split is None:
                continue
            prompt, _, body = split
            lines = self.words.lines([*body, self.words.newline])
            ids, learned = stutter(lines, rng, self.words) if rng.random() < chance else whole(lines)
            prompt = [*prompt, self.words.newline]
            return [*prompt, *ids, self.words.end], [False] * len(prompt) + [*learned, True]


def split_pair(asked: list[int], answer: list[int], words: Lexicon) -> tuple[list[int], list[int], list[int]] | None:
    """(signature and docstring, signature, body) of a question and its answer; None where they do not fit."""
    begin = next((i for i in range(len(asked) - 1) if asked[i : i + 2] == answer[:2]), None)
    if begin is None:
        return None
    prompt = asked[begin:]
    same = next((i for i, (a, b) in enumerate(zip(prompt, answer, strict=False)) if a != b), 0)
    if prompt[same] in words.newlines and answer[same] in words.newlines:
        same += 1  # an empty line between signature and body
    while same and answer[same - 1] not in words.newlines:
        same -= 1
    if same == 0 or same == len(answer):
        return None
    return prompt, answer[:same], answer[same:]


def whole(lines: list[list[int]]) -> Row:
    ids = [i for line in lines for i in line]
    return ids, [True] * len(ids)


class CodeFunctions:
    """The functions of the code stream, dedented: ``def`` lines to the last line that stands right of them.

    ``longest`` bounds the tokens behind the first line, a docstring's included.
    """

    def __init__(self, code: np.ndarray, words: Lexicon, longest: int | None = None) -> None:
        self.code, self.words, self.longest = code, words, longest or LONGEST
        size = 1 << 16
        breaks, widths, closers = np.zeros(size, bool), np.zeros(size, np.int16), np.zeros(size, bool)
        breaks[[*words.newlines, words.end]] = True
        closers[[*words.closers]] = True
        for i, width in words.width.items():
            widths[i] = width
        self.starts = np.concatenate([[0], np.flatnonzero(breaks[code[:-1]]) + 1])
        self.widths = widths[code[self.starts]]
        first = code[np.minimum(self.starts + (self.widths > 0), len(code) - 1)]
        self.closing = closers[first]
        self.heads = np.flatnonzero((first == words.keyword) & (self.widths <= 16))

    def function(self, rng: random.Random, chance: float) -> Row:
        """One of them and the end token. All of it is learned but copies."""
        while True:
            found = self._cut(int(self.heads[rng.randrange(len(self.heads))]))
            if found is None:
                continue
            head, body = found[0], found[1:]
            ids, learned = stutter(body, rng, self.words) if rng.random() < chance else whole(body)
            return [*head, *ids, self.words.end], [True] * len(head) + [*learned, True]

    def _cut(self, head: int) -> list[list[int]] | None:
        """The lines of the function at line ``head``, or None: too short, too long, or cut by the stream's end."""
        begin, width = int(self.starts[head]), int(self.widths[head])
        last = head + 1
        while last < len(self.starts) and (self.widths[last] > width or self.closing[last]):
            if self.starts[last] - begin > LONGEST:
                return None
            last += 1
        if last >= len(self.starts) or last < head + 2:
            return None
        ids = self.code[begin : self.starts[last]].tolist()
        if ids[-1] == self.words.end:
            ids.pop()
        if not SHORTEST <= len(ids) <= LONGEST or ids[-1] not in self.words.newlines:
            return None
        ids[-1] = self.words.newline
        lines = [self.words.shifted(line, -width) for line in self.words.lines(ids)]
        if any(line is None for line in lines) or sum(map(len, lines[1:])) > self.longest:  # type: ignore[arg-type]
            return None
        return lines  # type: ignore[return-value]


def fill_row(make: Callable[[], Row], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, learned) of ``length``: whole documents one after another, the last one's tail cut."""
    ids: list[int] = []
    learned: list[bool] = []
    while len(ids) < length:
        more: Any = make()
        ids += more[0]
        learned += more[1]
    return np.array(ids[:length], dtype=np.int64), np.array(learned[:length])
