"""A web service that takes webhooks at once, and delivers them in the background.

A delivery that fails is tried again, after pauses that double; those of other customers go on
meanwhile.  What failed five times is a dead letter.  Kill the service at any time: what it has
taken is delivered after the next start.

    pip install embedlog fastapi httpx uvicorn
    uvicorn --app-dir examples webhooks:app
"""

import os
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

import embedlog

PATH = os.environ.get("WEBHOOKS_LOG", "webhooks-log")
RETRY = embedlog.Retry(attempts=5, backoff=0.2, dead_letter="webhooks.dlq")


class Webhook(BaseModel):
    """What is sent, and where."""

    url: str
    body: dict


async def connect():
    """Called in each process of the pool, on its event loop."""
    global client
    client = httpx.AsyncClient(timeout=10)


async def deliver(record):
    """Called for each record, of up to 100 customers at once; it fails by raising."""
    webhook = record.value
    answer = await client.post(webhook["url"], json=webhook["body"])
    answer.raise_for_status()


@asynccontextmanager
async def lifespan(app):
    """Run the pool for as long as the service."""
    with embedlog.open(PATH) as log, log.producer() as producer:
        log.create_topic("webhooks", partitions=4, key="str", value="json", exist_ok=True)
        app.state.log, app.state.producer = log, producer
        pool = {"processes": 2, "concurrency": 100, "on_error": RETRY, "initializer": connect}
        settings = {"auto_offset_reset": "earliest", "restarts": 10}
        with embedlog.run_group(log, "webhooks", "deliveries", deliver, **pool, **settings):
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/webhooks/{customer}", status_code=202)
def take(customer: str, webhook: Webhook):
    """Answer once the webhook is in the log."""
    app.state.producer.send("webhooks", webhook.model_dump(), key=customer).result()


@app.get("/dead-letters")
def dead_letters():
    """List what could not be delivered, and why."""
    if "webhooks.dlq" not in app.state.log:
        return []
    return [
        {"customer": letter.record.key, **letter.failure._asdict(), "replayed": letter.replayed}
        for letter in app.state.log.dead_letters("webhooks.dlq")
    ]


@app.post("/dead-letters/replay")
def replay():
    """Deliver them again."""
    return {"replayed": app.state.log.dead_letters("webhooks.dlq").replay()}
