"""lm-eval's local-completions over the server finds what its own backend finds in transformers, on the same rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from doubles.demo_reference import demo_in_transformers
from lm_eval.tasks import TaskManager
from server.served import Served
from transformers import AutoTokenizer

TASK = "octavo_facts"
DESCRIPTION = """
task: octavo_facts
dataset_path: json
dataset_kwargs:
  cache_dir: {cache}
  data_files:
    test: {rows}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""

# A question, its answers, the right one first.
ROWS = """
What is the capital of France? | Paris | Rome | Madrid | Berlin
What is the capital of Italy? | Rome | Paris | Vienna | Lisbon
What is the capital of Japan? | Tokyo | Seoul | Beijing | Bangkok
What is the capital of Egypt? | Cairo | Tunis | Nairobi | Lagos
Which planet is the largest? | Jupiter | Mars | Venus | Mercury
Which planet is called the red planet? | Mars | Saturn | Neptune | Venus
Which star is nearest to the Earth? | the Sun | Sirius | Vega | Polaris
What do bees make? | honey | milk | silk | wool
What do cows drink? | water | milk | juice | tea
Which animal barks? | a dog | a cat | a cow | a fish
Which animal has a trunk? | an elephant | a lion | a snake | a frog
How many legs has a spider? | eight | six | four | ten
How many legs has an insect? | six | eight | four | two
How many days has a week? | seven | five | ten | twelve
How many months has a year? | twelve | ten | seven | four
What colour is the sky on a clear day? | blue | green | red | black
What colour is fresh grass? | green | blue | purple | white
What colour is snow? | white | black | brown | orange
What is frozen water called? | ice | steam | sand | glass
What is H2O? | water | salt | gold | air
Which gas do plants take in? | carbon dioxide | helium | neon | argon
What pumps blood through the body? | the heart | the liver | the stomach | the lungs
What do we see with? | the eyes | the ears | the nose | the hands
Who wrote Hamlet? | Shakespeare | Goethe | Dante | Tolstoy
Who painted the Mona Lisa? | Leonardo da Vinci | Picasso | Monet | Rembrandt
Which ocean is the largest? | the Pacific | the Atlantic | the Arctic | the Indian
On which continent is Kenya? | Africa | Asia | Europe | Australia
On which continent is China? | Asia | Africa | Europe | Antarctica
Which season follows winter? | spring | autumn | summer | winter
What is two plus two? | four | five | three | twenty-two
What is ten minus three? | seven | six | eight | thirteen
What is the opposite of hot? | cold | warm | wet | loud
"""


@pytest.fixture(scope="session")
def demo_folder(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a folder in Hugging Face layout, float32, made by transformers."""
    folder = tmp_path_factory.mktemp("demo")
    demo_in_transformers(demo_file).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(demo_file.parent, gguf_file=demo_file.name)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def demo_served(demo_file: Path) -> Iterator[Served]:
    """The server over the demo model's own file, float32."""
    served = Served(demo_file, max_model_len=512, num_blocks_override=512, block_size=16, num_threads=2)
    try:
        yield served.ready()
    finally:
        served.close()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """A task of a few dozen rows in a folder; no hub is asked for it."""
    folder = tmp_path_factory.mktemp("task")
    rows = []
    for i, line in enumerate(ROWS.strip().splitlines()):
        question, *choices = [part.strip() for part in line.split("|")]
        shift = i % len(choices)  # the right one is not always the first
        rows.append({"question": question, "choices": choices[-shift:] + choices[:-shift], "answer": shift})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "facts.yaml").write_text(DESCRIPTION.format(rows=folder / "rows.jsonl", cache=folder / "cache"))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(
    task: TaskManager, backend: str, **arguments: Any
) -> tuple[dict[str, Any], list[list[tuple[float, bool]]]]:
    """The metrics, and for each row what each answer scored: its log-likelihood, and whether it is greedy."""
    found = lm_eval.simple_evaluate(
        model=backend, model_args=arguments, tasks=[TASK], task_manager=task, bootstrap_iters=0, log_samples=True
    )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    scores = [[(float(score), bool(greedy)) for [(score, greedy)] in sample["resps"]] for sample in samples]
    return {name: found["results"][TASK][name] for name in ("acc,none", "acc_norm,none")}, scores


def test_accuracy_and_scores_are_those_of_transformers(
    task: TaskManager, demo_served: Served, demo_folder: Path
) -> None:
    truth, scores = evaluated(
        task, "hf", pretrained=str(demo_folder), dtype="float32", device="cpu", batch_size=8, max_length=512
    )
    assert 0.5 < truth["acc,none"] < 1, "a task that tells"
    metrics, served_scores = evaluated(
        task,
        "local-completions",
        model="tiny",  # as this server calls whatever it serves
        base_url=f"{demo_served.url}/v1/completions",
        tokenizer=str(demo_folder),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        batch_size=4,
        num_concurrent=4,
        max_length=512,
    )
    assert metrics == truth
    for row, expected in zip(served_scores, scores, strict=True):
        assert [score for score, _ in row] == pytest.approx([score for score, _ in expected], abs=2e-3)
        assert [greedy for _, greedy in row] == [greedy for _, greedy in expected]
    demo_served.wait_until(demo_served.is_idle)
