// The steps of client_programs.py with kafkajs.
const { CompressionTypes, ConfigResourceTypes, Kafka, logLevel } = require("kafkajs");

const [address, step, ...given] = process.argv.slice(2);
const kafka = new Kafka({ clientId: "kafkajs", brokers: [address], logLevel: logLevel.ERROR });

async function withAdmin(work) {
  const admin = kafka.admin();
  await admin.connect();
  await work(admin);
  await admin.disconnect();
}

// Calls `handle` for so many records of a group, and returns once the next one is due.
async function consumed(topic, group, count, handle, done) {
  const consumer = kafka.consumer({ groupId: group, heartbeatInterval: 500, maxWaitTimeInMs: 200 });
  let finished, failed, left = Number(count);
  const all = new Promise((resolve, reject) => ([finished, failed] = [resolve, reject]));
  consumer.on(consumer.events.CRASH, (event) => failed(event.payload.error));
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  await consumer.run({
    autoCommit: false,
    eachBatchAutoResolve: false,
    eachBatch: async ({ batch, resolveOffset, uncommittedOffsets, heartbeat }) => {
      for (const message of batch.messages.slice(0, left)) {
        left -= 1;
        await handle(batch.partition, message);
        resolveOffset(message.offset);
      }
      await heartbeat();
      if (left === 0) {
        left = -1;
        await done(consumer, uncommittedOffsets().topics);
        finished();
      }
    },
  });
  await all;
  await consumer.disconnect();
}

const steps = {
  create: (topic, partitions) =>
    withAdmin((admin) => {
      const configEntries = [{ name: "retention.ms", value: "1234567" }];
      return admin.createTopics({ topics: [{ topic, numPartitions: Number(partitions), configEntries }] });
    }),

  async produce(topic, codec, first, end) {
    const producer = kafka.producer({ idempotent: true });
    await producer.connect();
    const messages = [];
    for (let n = Number(first); n < Number(end); n++) {
      messages.push({ key: `k${n}`, value: `${n}`, headers: { n: `${n}` } });
    }
    messages.push({ key: `k${end}`, value: null });
    const compression = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP }[codec];
    await producer.send({ topic, compression, messages });
    await producer.disconnect();
  },

  consume: (topic, group, count) =>
    consumed(
      topic,
      group,
      count,
      (partition, { offset, key, value, headers }) => {
        const record = { partition, offset: Number(offset), key: `${key}`, value: value && `${value}` };
        console.log(JSON.stringify({ ...record, header: headers.n ? `${headers.n}` : null }));
      },
      async (consumer, topics) => {
        const offsets = topics.flatMap(({ topic, partitions }) =>
          partitions.map((each) => ({ topic, ...each })),
        );
        await consumer.commitOffsets(offsets);
      },
    ),

  async transfer(source, group, target, count) {
    const settings = { transactionalId: `${group}-transfer`, idempotent: true, maxInFlightRequests: 1 };
    const producer = kafka.producer(settings);
    await producer.connect();
    let transaction = await producer.transaction();
    const copy = (_, { key, value }) => transaction.send({ topic: target, messages: [{ key, value }] });
    await consumed(source, group, count, copy, async (consumer, topics) => {
      await transaction.sendOffsets({ consumerGroupId: group, topics });
      await transaction.commit();
      transaction = await producer.transaction();
      await transaction.send({ topic: target, messages: [{ value: "aborted" }] });
      await transaction.abort();
    });
    await producer.disconnect();
  },

  describe: (topic, group) =>
    withAdmin(async (admin) => {
      const { topics } = await admin.fetchTopicMetadata({ topics: [topic] });
      const { groups } = await admin.listGroups();
      const [{ partitions }] = await admin.fetchOffsets({ groupId: group, topics: [topic] });
      const { resources } = await admin.describeConfigs({
        resources: [{ type: ConfigResourceTypes.TOPIC, name: topic, configNames: ["retention.ms"] }],
      });
      const described = await admin.describeGroups([group]);
      console.log(
        JSON.stringify({
          partitions: topics[0].partitions.length,
          ends: (await admin.fetchTopicOffsets(topic)).map((each) => Number(each.high)),
          groups: groups.map((each) => each.groupId),
          state: described.groups[0].state,
          committed: partitions.map((each) => Number(each.offset)),
          retention: resources[0].configEntries[0].configValue,
        }),
      );
    }),

  delete: (topic, group) =>
    withAdmin(async (admin) => {
      await admin.deleteGroups([group]);
      await admin.deleteTopics({ topics: [topic] });
    }),
};

steps[step](...given).catch((error) => {
  console.error(error);
  process.exit(1);
});
