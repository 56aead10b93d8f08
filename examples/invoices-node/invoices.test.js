// The tests of the service: each one has an empty log of its own.
"use strict";

const assert = require("node:assert/strict");
const { afterEach, beforeEach, test } = require("node:test");
const { Kafka, logLevel } = require("kafkajs");

const { serve } = require("./embedlog");
const { start } = require("./invoices");

const ORDER = { id: "A-1", items: [{ price: "2.50", count: 2 }, { price: "0.99", count: 1 }] };

let server, shop;

beforeEach(async () => {
  server = await serve();
  const kafka = new Kafka({ clientId: "shop", brokers: server.brokers, logLevel: logLevel.ERROR });
  const admin = kafka.admin();
  await admin.connect();
  const topics = ["orders", "invoices", "rejected-orders"];
  await admin.createTopics({ topics: topics.map((topic) => ({ topic, numPartitions: 1 })) });
  await admin.disconnect();
  shop = kafka.producer();
  await shop.connect();
});

afterEach(async () => {
  await shop?.disconnect();
  await server?.stop();
});

const place = (order) =>
  shop.send({ topic: "orders", messages: [{ key: "customer-1", value: JSON.stringify(order) }] });

test("an order becomes an invoice, with the customer as its key", async () => {
  await place(ORDER);
  const stop = await start(server.brokers);
  const [invoice] = await server.records("invoices", 1);
  await stop();
  assert.equal(invoice.key, "customer-1");
  assert.deepEqual(JSON.parse(invoice.value), { order: "A-1", total: "5.99" });
});

test("an order that makes no sense is rejected, and those after it are handled", async () => {
  await place({ id: "A-2" });
  await place(ORDER);
  const stop = await start(server.brokers);
  await server.records("invoices", 1);
  await stop();
  assert.equal((await server.records("rejected-orders")).length, 1);
});

test("a service that is started again goes on after its last order", async () => {
  for (const id of ["A-1", "A-2"]) {
    await place({ ...ORDER, id });
    const stop = await start(server.brokers);
    await server.records("invoices", id === "A-1" ? 1 : 2);
    await stop();
  }
  const invoices = await server.records("invoices");
  assert.deepEqual(invoices.map((each) => JSON.parse(each.value).order), ["A-1", "A-2"]);
});
