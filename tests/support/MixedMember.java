import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * A member of the group of {@code mixed_group.py}: reads and commits record by record.
 *
 * <p>The arguments are its name, the address of the server, the topic, the group, the file of
 * events, its protocol, and how long it may be silent, in milliseconds.
 */
public final class MixedMember {
    public static void main(String[] words) throws Exception {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", words[1]);
        properties.put("group.id", words[3]);
        properties.put("group.protocol", words[5]);
        if (words[5].equals("classic")) {
            properties.put("session.timeout.ms", words[6]);
            properties.put("heartbeat.interval.ms", "200");
        }
        properties.put("auto.offset.reset", "earliest");
        properties.put("enable.auto.commit", "false");
        properties.put("max.poll.records", "1");
        properties.put("reconnect.backoff.max.ms", "500");
        String deserializer = ByteArrayDeserializer.class.getName();
        properties.put("key.deserializer", deserializer);
        properties.put("value.deserializer", deserializer);
        Path path = Path.of(words[4]);
        try (FileChannel events =
                    FileChannel.open(path, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
                KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(properties)) {
            consumer.subscribe(List.of(words[2]));
            while (true) {
                for (ConsumerRecord<byte[], byte[]> record : poll(consumer)) {
                    note(events, words[0], "read", record.partition(), record.offset());
                    long next = record.offset() + 1;
                    stopIfTold(Path.of(words[4] + "-" + words[0]));
                    note(events, words[0], "commits", record.partition(), next);
                    TopicPartition partition = new TopicPartition(words[2], record.partition());
                    try {
                        consumer.commitSync(Map.of(partition, new OffsetAndMetadata(next)));
                        note(events, words[0], "committed", record.partition(), next);
                    } catch (KafkaException error) {
                        // It lost the partition, or the server; the next one reads it again.
                        continue;
                    }
                }
            }
        }
    }

    private static ConsumerRecords<byte[], byte[]> poll(KafkaConsumer<byte[], byte[]> consumer) {
        try {
            return consumer.poll(Duration.ofMillis(100));
        } catch (KafkaException | IllegalStateException error) {
            // Such as when it asked for committed offsets when it was removed already, to which a
            // broker answers the same; or when its other thread takes a partition away while this
            // one looks at it.  It joins again.
            System.err.println(error);
            return ConsumerRecords.empty();
        }
    }

    /** Stops this process (SIGSTOP), if there is a file that says so. */
    private static void stopIfTold(Path flag) throws Exception {
        if (Files.deleteIfExists(flag)) {
            String pid = String.valueOf(ProcessHandle.current().pid());
            new ProcessBuilder("kill", "-STOP", pid).start().waitFor();
        }
    }

    /** Writes one line, in one call. */
    private static void note(FileChannel events, String name, String what, int partition,
            long offset) throws Exception {
        String line = name + " " + what + " " + partition + " " + offset + "\n";
        events.write(ByteBuffer.wrap(line.getBytes(StandardCharsets.US_ASCII)));
    }
}
