"""What a model is made to say, by an output of one choice: reasoning, texts and calls, in the Hermes format."""

__all__ = ["SPOKEN", "TWO_CALLS", "WORDS"]

WORDS = {"reasoning": "Let me see.", "before": "I add.", "between": "And now."}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TWO_CALLS = f"</think>{ADD}\n{NOW}"
SPOKEN = f"{WORDS['reasoning']}</think>\n\n{WORDS['before']} {ADD}{WORDS['between']}\n{NOW}"
