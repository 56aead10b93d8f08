// A service that writes an invoice for each order, with kafkajs; it knows nothing of embedlog.
//
// Orders that make no sense go to the topic `rejected-orders`. Start it with the addresses of
// the brokers:
//
//     KAFKA_BOOTSTRAP_SERVERS=localhost:9092 node invoices.js
"use strict";

const { Kafka, logLevel } = require("kafkajs");

function answerTo(order) {
  try {
    const { id, items } = JSON.parse(order.value);
    const cents = items.reduce((sum, each) => sum + Math.round(each.price * 100) * each.count, 0);
    if (!id || !Number.isSafeInteger(cents)) throw new TypeError("an order has an id and prices");
    return { topic: "invoices", value: { order: id, total: (cents / 100).toFixed(2) } };
  } catch (error) {
    return { topic: "rejected-orders", value: { reason: error.message, offset: order.offset } };
  }
}

// Starts the service; returns a function that stops it.
async function start(brokers) {
  const kafka = new Kafka({ clientId: "invoices", brokers, logLevel: logLevel.ERROR });
  const producer = kafka.producer({ idempotent: true });
  const consumer = kafka.consumer({ groupId: "invoice-service" });
  await Promise.all([producer.connect(), consumer.connect()]);
  await consumer.subscribe({ topic: "orders", fromBeginning: true });
  await consumer.run({
    // The offset is committed after this, so each order is handled at least once.
    eachMessage: async ({ message }) => {
      const { topic, value } = answerTo(message);
      await producer.send({ topic, messages: [{ key: message.key, value: JSON.stringify(value) }] });
    },
  });
  return async () => {
    await consumer.disconnect();
    await producer.disconnect();
  };
}

module.exports = { start };

if (require.main === module) {
  start((process.env.KAFKA_BOOTSTRAP_SERVERS ?? "localhost:9092").split(","));
}
