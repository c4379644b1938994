"""Print one completion and its statistics.

OUTRIDER_EDGE_COORDINATOR=127.0.0.1:7700 python -m examples.complete "Question: What is gravity? Answer:"
"""

import sys

from outrider import Client, OutriderError, Timeout

PROMPT = "Question: What is gravity?\nAnswer:"


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else PROMPT
    with Client(timeout=Timeout(total=120.0, first_token=60.0)) as client:
        try:
            completion = client.generate(prompt, max_tokens=64, temperature=0.8, seed=7, stop=["\n\n\n"])
        except OutriderError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(completion.text)
    print(f"{completion.usage.completion_tokens} tokens, {completion.finish_reason}; {completion.statistics.summary()}")


if __name__ == "__main__":
    main()
