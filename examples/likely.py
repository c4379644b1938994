"""Print each token of a completion with its probability, and the likeliest other tokens at its place.

OUTRIDER_EDGE_COORDINATOR=127.0.0.1:7700 python -m examples.likely
"""

import math

from outrider import Client

PROMPT = "Question: What is gravity?\nAnswer:"


def main() -> None:
    with Client() as client:
        table = client.prepare().tokenizer.table
        completion = client.generate(PROMPT, max_tokens=12, logprobs=3)
        for token, known in zip(completion.token_ids, completion.logprobs or (), strict=True):
            others = ", ".join(f"{table[other]!r} {math.exp(value):.2f}" for other, value in known.top)
            print(f"{table[token]!r:16} {math.exp(known.logprob):.2f}   of {others}")


if __name__ == "__main__":
    main()
