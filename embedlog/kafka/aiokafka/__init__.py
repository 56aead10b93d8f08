"""aiokafka's clients, on a log: change the import, and name a log instead of brokers.

>>> import asyncio, tempfile
>>> from embedlog.kafka.aiokafka import AIOKafkaConsumer, AIOKafkaProducer
>>> async def main(servers):
...     async with AIOKafkaProducer(bootstrap_servers=servers) as producer:
...         await producer.send_and_wait("greetings", b"hello")
...     settings = {"bootstrap_servers": servers, "auto_offset_reset": "earliest"}
...     async with AIOKafkaConsumer("greetings", **settings) as consumer:
...         async for record in consumer:
...             return record.value
>>> asyncio.run(main("embedlog://" + tempfile.mkdtemp()))
b'hello'

With ``host:port`` the constructors return aiokafka's own clients.  The types and errors are
aiokafka's own; the extra ``embedlog[aiokafka]`` installs it.
"""

from __future__ import annotations

from typing import Any

from embedlog.kafka.aiokafka.admin import AIOKafkaAdminClient
from embedlog.kafka.aiokafka.consumer import AIOKafkaConsumer
from embedlog.kafka.aiokafka.library import aiokafka
from embedlog.kafka.aiokafka.producer import AIOKafkaProducer
from embedlog.kafka.library import public_name

__version__ = aiokafka.__version__
# With a bare star, griffe takes the other package's names for its own and warns.
__all__ = ["AIOKafkaAdminClient", "AIOKafkaConsumer", "AIOKafkaProducer", *sorted(aiokafka.__all__)]


def __getattr__(name: str) -> Any:
    """Return a name of aiokafka."""
    return public_name(aiokafka, name)
