"""A stream that shows who wrote what: guesses of this device that were taken are in brackets.

python -m examples.provenance
"""

import asyncio

from edge_agent import AsyncClient


async def main() -> None:
    async with AsyncClient() as client:
        async with await client.stream("import os\n\n\ndef main():\n", max_tokens=64) as stream:
            async for chunk in stream:
                own = chunk.provenance.count("draft")
                print(f"{chunk.text!r:32} {own} drafted here, {len(chunk.token_ids) - own} by the target", flush=True)
        statistics = stream.statistics
        print(f"{statistics.acceptance:.0%} of the guesses were taken; round trip {statistics.rtt_ms:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
