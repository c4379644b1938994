"""Stream a completion, and print for each chunk how many of its tokens this device's draft proposed.

OUTRIDER_EDGE_COORDINATOR=127.0.0.1:7700 python -m examples.provenance
"""

import asyncio

from outrider import AsyncClient

PROMPT = "Question: What is gravity?\nAnswer:"


async def main() -> None:
    async with AsyncClient() as client:
        async with await client.stream(PROMPT, max_tokens=64) as stream:
            async for chunk in stream:
                own = chunk.provenance.count("draft")
                print(f"{chunk.text!r:32} {own} by the draft, {len(chunk.token_ids) - own} by the target", flush=True)
        statistics = stream.statistics
        print(f"{statistics.acceptance:.0%} of the proposals were accepted; round trip {statistics.rtt_ms:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
