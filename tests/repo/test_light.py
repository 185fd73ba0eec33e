"""The usual model needs no heavy library."""

import subprocess
import sys


def test_transformers_is_not_imported_for_the_demo() -> None:
    script = (
        "import sys\n"
        "from octavo import LLM, SamplingParams\n"
        "with LLM('demo', max_model_len=64, max_num_seqs=1) as llm:\n"
        "    [output] = llm.generate('Hello', SamplingParams(max_tokens=2, ignore_eos=True))\n"
        "    assert len(output.outputs[0].token_ids) == 2\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
