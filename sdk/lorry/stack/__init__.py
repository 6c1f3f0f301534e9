"""A whole Lorry on this machine: Redis, workers and Flower as child processes of one Python process.

Start reading at `stack.py`; `redis_server.py` finds and runs the Redis, `programs.py` holds the command
lines of the rest, `process.py` one child with its log, `guard.py` what happens to the children when their
parent is killed, `state.py` the files by which other processes find a running stack.
"""

from lorry.stack.process import ProcessSpec
from lorry.stack.redis_server import RedisBinary, RedisServer, find_redis_server
from lorry.stack.settings import StackSettings
from lorry.stack.stack import Stack
from lorry.stack.state import StackInfo, running_stack

__all__ = [
    "ProcessSpec",
    "RedisBinary",
    "RedisServer",
    "Stack",
    "StackInfo",
    "StackSettings",
    "find_redis_server",
    "running_stack",
]
