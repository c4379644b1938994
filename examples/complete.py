"""One completion, and what it cost: python -m examples.complete "def fibonacci(n):" """

import sys

from edge_agent import Client, OutriderError, Timeout


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):"
    with Client(timeout=Timeout(total=120.0, first_token=60.0)) as client:
        try:
            completion = client.generate(prompt, max_tokens=48, temperature=0.8, seed=7, stop=["\n\n\n"])
        except OutriderError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(completion.text)
    print(f"{completion.usage.completion_tokens} tokens, {completion.finish_reason}; {completion.statistics.summary()}")


if __name__ == "__main__":
    main()
