"""Chat through `outrider-edge serve` with the `openai` package.

python -m examples.openai_chat http://127.0.0.1:8080/v1
"""

import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
    with OpenAI(base_url=url, api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is gravity?"}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:
                print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
