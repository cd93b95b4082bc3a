"""Scorers that ask `judge_server.py` for the reward of a completion."""

import asyncio


async def ask(completion: str, *, answer: str, prompt: str, item: dict, port: int) -> float:
    """Returns the number that the server answers.

    Raises:
        ValueError: for any other status than 200, with the status.
        OSError, EOFError: if the connection fails.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = completion.encode()
        head = f"POST / HTTP/1.1\r\nHost: judge\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(": ")[1]) for line in fields if line.startswith("Content-L"))
        text = (await reader.readexactly(length)).decode()
        if " 200 " not in status:
            raise ValueError(f"the judge answers {status}")
        return float(text)
    finally:
        writer.close()


async def ask_patiently(
    completion: str, *, answer: str, prompt: str, item: dict, port: int, tries: int = 3
) -> float:
    """As `ask`, and asks again after a status of failure or a lost connection."""
    for left in reversed(range(tries)):
        try:
            return await ask(completion, answer=answer, prompt=prompt, item=item, port=port)
        except (ValueError, OSError, EOFError):
            if not left:
                raise
            await asyncio.sleep(0.05)
    raise AssertionError("unreachable")
