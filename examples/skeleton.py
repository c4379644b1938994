"""Print an answer that is written as an outline whose points are expanded side by side, each as it finishes.

OUTRIDER_EDGE_COORDINATOR=127.0.0.1:7700 python -m examples.skeleton "How does a bicycle stay upright?"

The answer is another one than `chat` gives: see `changes_answer` of Skeleton.
"""

import sys

from outrider import Client, OutriderError

QUESTION = "Write a Python class for a queue, and explain its methods."


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else QUESTION
    with Client(timeout=120.0) as client:
        try:
            with client.stream_skeleton([{"role": "user", "content": question}], points=4, max_tokens=64) as stream:
                for point in stream:
                    print(f"--- point {point.number}: {point.error or 'written'}")
        except OutriderError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
    skeleton = stream.skeleton
    print(skeleton.text)
    print(
        f"{skeleton.usage.completion_tokens} tokens in {1 + len(skeleton.points)} requests; not what chat() would say"
    )


if __name__ == "__main__":
    main()
