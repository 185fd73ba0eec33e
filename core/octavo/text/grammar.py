"""Holds outputs to a form: compiles it for the model's vocabulary, and follows one sequence through it.

Whoever sent the form waits for its compilation alone: it may be done in any thread, and the library lets go of the
interpreter meanwhile. Its time and memory are bounded by fuel; what needs more is refused.
"""

import codecs
import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark, is_lark_syntax

from octavo.errors import RequestError
from octavo.structured_output import StructuredOutput, WithinCalls
from octavo.text.reasoning import REASONING_FORMATS, ReasoningParser
from octavo.text.schema import ANY_OBJECT, WHITE_SPACE, bounded
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import FORMATS, ToolParser, heads_of

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarState"]

LEXER_FUEL = 100_000  # of the library's units for a compilation, and for one token: at most about 0.1 s
MAX_LEXER_STATES = 50_000  # about 2 kB each

MAX_GBNF = 16 * 1024  # characters: the library translates GBNF in time that grows with the square of its rules

_MAX_REASON = 300


class GrammarState:
    """Where one sequence stands in its form."""

    def __init__(self, matcher: llguidance.LLMatcher, form: StructuredOutput, output_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._kind = form.kind
        self._after_token_id = form.after_token_id
        for token_id in output_ids:
            self.append(token_id)

    @property
    def is_waiting(self) -> bool:
        """Whether the form begins later: any token but an end may come."""
        return self._after_token_id is not None

    def append(self, token_id: int) -> None:
        """Take note of the token that was chosen; one that does not fit shows at the next `mask`."""
        if not self.is_waiting:
            self._matcher.consume_token(token_id)
        elif token_id == self._after_token_id:
            self._after_token_id = None

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        """Put -inf on whatever of logits [V] cannot come next. An end may come only where the form is complete.

        Raises:
            RequestError: the form cannot be followed any further; the sequence must end.

        """
        if self.is_waiting:
            return
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestError(f"the {self._kind} cannot be followed further: {_reason(self._matcher)}", self._kind)
        allowed = np.unpackbits(packed, count=len(logits), bitorder="little")
        logits[allowed == 0] = -np.inf


class _CallsState(GrammarState):
    """Where one sequence stands that is free but for some of its tool calls, each of which has the form.

    The calls are found as they are for the client: by the same parsers.
    """

    def __init__(
        self, compiled: "CompiledGrammar", form: StructuredOutput, within: WithinCalls, output_ids: Iterable[int]
    ) -> None:
        self._compiled = compiled
        self._strict = frozenset(within.strict)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reasoning: ReasoningParser | None = None
        if within.reasoning is not None:
            found = REASONING_FORMATS[within.reasoning]
            self._reasoning = ReasoningParser(found, inside=within.begins_inside)
        self._parser = ToolParser(FORMATS[within.tool_format], within.tools)
        self._held: llguidance.LLMatcher | None = None  # of the call under way
        self._is_seen = False  # whether that call is held, or cannot be
        super().__init__(compiled.copy(), form, output_ids)

    @property
    def is_waiting(self) -> bool:
        """Never: where no call is under way any token may come, an end too."""
        return False

    def append(self, token_id: int) -> None:
        data = self._compiled.token_bytes(token_id)
        text = self._decoder.decode(data)
        if self._reasoning is not None:
            text = self._reasoning.add(text)[1]
        num_before = self._parser.num_calls
        self._parser.add(text)
        call = self._parser.open_call
        if call is None or self._parser.num_calls != num_before:
            self._held, self._is_seen = None, False
        if call is not None and not self._is_seen and call[0] in self._strict:
            self._is_seen = True
            self._held = self._begun(call[1].encode() + self._decoder.getstate()[0])
        elif self._held is not None:
            self._held.consume_token(token_id)

    def _begun(self, data: bytes) -> llguidance.LLMatcher | None:
        """The form after the beginning of a call; None: the model has begun one that is none of this form."""
        matcher = self._compiled.copy()
        ids = self._compiled.ids_of(data)
        return matcher if matcher.try_consume_tokens(ids) == len(ids) else None

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        if self._held is not None:
            self._matcher = self._held
            super().mask(logits)


class CompiledGrammar:
    """A form, compiled for one vocabulary. Threads may share it."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        form: StructuredOutput,
        vocabulary: llguidance.LLTokenizer,
        tokenizer: Tokenizer,
    ) -> None:
        self._matcher = matcher
        self._form = form
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self.token_bytes = tokenizer.token_bytes

    def begin(self, output_ids: Iterable[int] = ()) -> GrammarState:
        """A sequence that has these tokens already."""
        if self._form.within is not None:
            return _CallsState(self, self._form, self._form.within, output_ids)
        return GrammarState(self.copy(), self._form, output_ids)

    def copy(self) -> llguidance.LLMatcher:
        """The form at its beginning."""
        with self._lock:
            return self._matcher.deep_copy()

    def ids_of(self, data: bytes) -> list[int]:
        """Tokens of these bytes."""
        return list(self._vocabulary.tokenize_bytes(data))


class GrammarCompiler:
    """Compiles forms for one tokenizer. Threads may share it; nothing is done before the first form.

    A compiled form is found again as long as somebody holds it, and the latest few are held here.

    Args:
        tokenizer: of the model.
        eos_token_ids: that end an output, as the model has them.
        num_kept: forms held for those who come next.

    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], num_kept: int = 32) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(i for i in eos_token_ids if 0 <= i < tokenizer.vocab_size)
        self._num_kept = num_kept
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._known: weakref.WeakValueDictionary[StructuredOutput, CompiledGrammar] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            step_lexer_fuel=LEXER_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def __len__(self) -> int:
        """Compiled forms that somebody holds."""
        return len(self._known)

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """The form, compiled now or before.

        Raises:
            RequestError: it is not valid, allows nothing or is too complex; or the model's vocabulary does not serve.

        """
        with self._lock:
            found = self._known.get(structured)
        if found is None:
            matcher = self._matcher(structured)
            found = CompiledGrammar(matcher, structured, self._loaded_vocabulary(), self._tokenizer)
        with self._lock:
            found = self._known.setdefault(structured, found)
            self._kept[structured] = found
            self._kept.move_to_end(structured)
            while len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        return found

    def _matcher(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        vocabulary = self._loaded_vocabulary()
        matcher = llguidance.LLMatcher(vocabulary, _source(structured), log_level=0, limits=self._limits)
        begun = [matcher]
        if structured.within is not None and not matcher.is_error():
            begun += [self._begun(matcher, head) for head in heads_of(structured.within)]
        for each in begun:
            if not each.is_error():
                each.compute_bitmask()  # much of the work is put off until here
            if each.is_error():
                kind = structured.kind
                raise RequestError(f"the {kind} cannot be used: {_reason(each)}", kind)
        return matcher

    def _begun(self, matcher: llguidance.LLMatcher, text: str) -> llguidance.LLMatcher:
        """The form after a text that begins it, and a brace where one may come: there a schema has most to ask."""
        copy, vocabulary = matcher.deep_copy(), self._loaded_vocabulary()
        copy.consume_tokens(vocabulary.tokenize_bytes(text.encode()))
        if not copy.is_error():
            copy.try_consume_tokens(vocabulary.tokenize_bytes(b"{"))
        return copy

    def _loaded_vocabulary(self) -> llguidance.LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._eos_token_ids)
            return self._vocabulary


def _source(structured: StructuredOutput) -> str:
    """The form in the library's own language."""
    matcher = llguidance.LLMatcher
    if structured.regex is not None:
        return matcher.grammar_from_regex(structured.regex)
    if structured.choice:
        return matcher.grammar_from_lark("start: " + " | ".join(map(quoted, structured.choice)))
    if structured.grammar is not None:
        num_chars = len(structured.grammar)
        if num_chars > MAX_GBNF and not is_lark_syntax(structured.grammar):
            raise RequestError(
                f"the grammar in GBNF has {num_chars} characters and may have {MAX_GBNF}; in Lark's syntax it may be "
                "longer",
                "grammar",
            )
        try:
            return matcher.grammar_from_lark(any_to_lark(structured.grammar))
        except (GbnfToLarkError, RecursionError) as error:
            reason = str(error)[:_MAX_REASON] or "it is nested too deeply"
            raise RequestError(f"the grammar cannot be used: {reason}", "grammar") from error
    if structured.json_schema is None:
        return matcher.grammar_from_lark(ANY_OBJECT)
    try:
        schema = bounded(json.loads(str(structured.json_schema)))
        return matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITE_SPACE})
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the json_schema cannot be used: {str(error)[:_MAX_REASON]}", "json_schema") from error


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's reason in one line."""
    text = re.sub(r"<(non-verbose|state)/?>", "", matcher.get_error())
    return " ".join(text.split())[:_MAX_REASON] or "the form is too complex"


class _Vocabulary:
    """The tokenizer as the library reads it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._tokenizer = tokenizer
        self._line_break = tokenizer.encode("\n", add_special_tokens=False)
        special = tokenizer.special_token_ids
        self._id_of = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str) -> Sequence[int]:
        """The ids of a text within an output: exactly its bytes, and if possible as the model would write it."""
        data = text.encode("utf-8", "replace")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._bytes(ids) == data:
            return ids
        # A vocabulary that puts a space before a text has it bare after a line break.
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        rest = ids[len(self._line_break) :]
        if ids[: len(self._line_break)] == self._line_break and self._bytes(rest) == data:
            return rest
        return self._longest_pieces(data)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token_id] for token_id in ids)

    def _longest_pieces(self, data: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(data):
            sizes = range(min(self._longest, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self._id_of), 0)
            if not size:
                break  # no token has this byte
            ids.append(self._id_of[data[start : start + size]])
            start += size
        return ids


def _vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    if tokenizer.pieces is None:
        raise RequestError(
            "structured output needs a byte-level or sentencepiece vocabulary, and this model has neither"
        )
    if not eos_token_ids:
        raise RequestError("structured output needs a model with an end-of-sequence token, and this one names none")
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, eos_token_ids[0]))
    return llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=list(eos_token_ids))
