"""How byte-level vocabularies split a text before merging, by the name that a GGUF file gives in `tokenizer.ggml.pre`.

A GGUF file names its split instead of spelling it out. Each entry here is what the tokenizer.json of the models
behind the name says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["SPLITS", "Split"]

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# Letters with case, as deepseek's first vocabulary lists them; by number where a letter has a twin of the same looks.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}"
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}ℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    r"Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


@dataclass(frozen=True)
class Split:
    """One way of splitting, and what else comes with the name.

    Attributes:
        patterns: applied one after the other, each match becomes a part of its own. Never across parts.
        whole_words_first: a part that is a token as it stands is taken without merging.
        add_bos: whether a text begins with the beginning-of-sequence token where the file does not say.

    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """The split as the tokenizers library runs it, bytes written as characters at the end."""
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(*groups: tuple[str, Split]) -> Mapping[str, Split]:
    return {name: split for names, split in groups for name in names.split()}


SPLITS: Mapping[str, Split] = _named(
    # A file without a name is from before they had names; the converter of that time split like this.
    ("default", Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion granite-docling", Split((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", Split((r"\p{N}", _GPT2))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", Split((_LLAMA3,), True, True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Split((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan megrez solar-open grok-2", Split((_QWEN2,))),
    ("qwen35", Split((_QWEN35,))),
    ("seed-coder", Split((_SEED,))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Split((_GPT4O,))),
    ("tekken", Split((_TEKKEN,), True, True)),
    (
        "deepseek-llm",
        Split((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}")),
    ),
    ("deepseek-coder", Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm", Split(_DEEPSEEK_V3)),
    ("falcon", Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("bloom gpt3-finnish poro-chat", Split((_BLOOM,))),
    ("viking", Split((_BLOOM, r"\p{N}"))),
)
