"""Small tokenizers of the kinds that models have, made on the spot and written as models ship them."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(first, second):\n    return first + second  # the sum\n\n\nprint(add(1, 2))",
    "Numbers such as 3.14159, 2048 and 1,000,000 stand next to words like it's, we'll and don't.",
    "Grüße aus Köln, naïve café, señor; Привет, мир; γειά σου Κόσμε.",
    "    Indented lines\t\twith tabs,   runs   of   spaces and\r\nline breaks\n\n\n.",
    "Stop at the end of the sentence. Then start the next sentence, and the next.",
)
TEXTS = (
    "Hello world",
    "  two leading spaces and two trailing  ",
    "a  b   c    d\t\te\n\n\nf \n g\r\n",
    "def f(x):\n\treturn {'a': [x, 1.5e-3]}  # naïve\n",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดี",
    "👋🏽 👨‍👩‍👧 🇩🇪 e\u0301 \u200b \ufeff",
    "It's 12345 and 3.14, WE'LL see… “quotes” — dash",
    "\x00 nul \x7f del \x1b esc",
    "\N{REPLACEMENT CHARACTER} stays",
    "",
    " ",
    "\n",
)


def byte_level(special: Sequence[str] = ("<s>", "</s>", "<|user|>", "<|end|>"), add_bos: bool = False) -> Tokenizer:
    """A byte-level vocabulary of 400 tokens; the special ones come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool｜call>", normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary as a tokenizer.json holds it: no characters beyond ASCII, but all bytes."""
    words = ["▁the", "▁a", "▁fox", "er", "in", "▁▁"]
    chars = [chr(code) for code in range(0x21, 0x7F)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *chars]
    tokens += ["▁t", "▁th", "▁f", "▁fo", *words]
    merges = ["▁ t", "▁t h", "▁th e", "▁ a", "▁ f", "▁f o", "▁fo x", "e r", "i n", "▁ ▁"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            [(a, b) for a, b in map(str.split, merges)],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_pieces() -> Tokenizer:
    """A vocabulary whose decoder looks at neighbours, so that the library has to decode it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, config: Mapping[str, Any] | None = None, **files: str) -> Path:
    """A folder as hubs have it. `files` maps names to contents; "__" in a name is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(config or {})))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def write_gguf(path: Path, tokens: Sequence[str], types: Iterable[int], kind: str = "gpt2", **values: Any) -> Path:
    """A GGUF file with a tokenizer and no tensors. `values` go under tokenizer.ggml, but for chat_template."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for key, value in values.items():
        if key == "chat_template":
            writer.add_chat_template(value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{key}", list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, tokenizer: Tokenizer, **values: Any) -> Path:
    """A byte-level tokenizer as a converter writes it into a GGUF file."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]
    types = [
        (TokenType.CONTROL if added[token_id].special else TokenType.USER_DEFINED)
        if token_id in added
        else TokenType.NORMAL
        for token_id in range(len(tokens))
    ]
    merges = [" ".join(pair) for pair in model["merges"]]
    return write_gguf(path, tokens, types, merges=merges, **values)


def train_sentencepiece(**settings: Any) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece model of merges with byte fallback, as llama's is."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
        **settings,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_gguf(path: Path, model: sentencepiece.SentencePieceProcessor, **values: Any) -> Path:
    """A sentencepiece model as a converter writes it into a GGUF file."""
    ids = range(model.vocab_size())

    def kind(token_id: int) -> int:
        if model.is_unknown(token_id):
            return int(TokenType.UNKNOWN)
        if model.is_control(token_id):
            return int(TokenType.CONTROL)
        if model.is_byte(token_id):
            return int(TokenType.BYTE)
        return int(TokenType.USER_DEFINED if model.id_to_piece(token_id) == "<tool>" else TokenType.NORMAL)

    settings = {
        "scores": [model.get_score(token_id) for token_id in ids],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
    } | values
    return write_gguf(path, [model.id_to_piece(i) for i in ids], map(kind, ids), kind="llama", **settings)
