import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.admin.ShareGroupDescription;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.GroupIdNotFoundException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Kafka's share consumers, driven by lines on standard input.
 *
 * <p>A line is a command with its arguments; the answer is a line {@code ok ...}, or the class of
 * an exception with its message. The only argument is the address of the broker.
 */
public final class ShareMembers {
    /** How long nothing must come before nothing is there. */
    private static final long QUIET_MS = 500;

    /** How long a member may have no partitions. */
    private static final long JOIN_MS = 120_000;

    private final String servers;
    private final Admin admin;
    private final Map<String, KafkaProducer<String, String>> producers = new HashMap<>();
    private final Map<String, KafkaShareConsumer<String, String>> members = new HashMap<>();
    private final Map<String, String> groups = new HashMap<>();
    private final Set<String> joined = new HashSet<>();
    private final Map<String, List<String>> results = new HashMap<>();

    private ShareMembers(String servers) {
        this.servers = servers;
        this.admin = Admin.create(properties());
    }

    private Properties properties() {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", servers);
        // Other processes may leave little time to these.
        properties.put("default.api.timeout.ms", "300000");
        properties.put("request.timeout.ms", "120000");
        return properties;
    }

    private static void wait(Future<?> future) throws Exception {
        try {
            future.get();
        } catch (ExecutionException error) {
            throw (Exception) error.getCause();
        }
    }

    private String answer(String[] words) throws Exception {
        switch (words[0]) {
            case "topic":
                NewTopic topic = new NewTopic(words[1], Integer.parseInt(words[2]), (short) 1);
                topic.configs(settings(words, 3));
                wait(admin.createTopics(List.of(topic)).all());
                return "";
            case "alter":
                alter(words[1], settings(words, 2));
                return "";
            case "produce":
                return produce(words);
            case "delete":
                TopicPartition at = new TopicPartition(words[1], Integer.parseInt(words[2]));
                RecordsToDelete before = RecordsToDelete.beforeOffset(Long.parseLong(words[3]));
                wait(admin.deleteRecords(Map.of(at, before)).all());
                return "";
            case "open":
                open(words[1], words[2], words[3], words[4], words[5]);
                return "";
            case "poll":
                return shown(poll(words[1], Long.parseLong(words[2]), Long.parseLong(words[3])));
            case "acknowledge":
                // Records are known by their places.
                ConsumerRecord<String, String> record = new ConsumerRecord<>(
                    words[2], Integer.parseInt(words[3]), Long.parseLong(words[4]), null, "");
                AcknowledgeType type = AcknowledgeType.valueOf(words[5].toUpperCase());
                members.get(words[1]).acknowledge(record, type);
                return "";
            case "commit":
                return committed(members.get(words[1]).commitSync());
            case "close":
                members.remove(words[1]).close();
                joined.remove(words[1]);
                return "";
            case "results":
                return String.join(" ", results.getOrDefault(words[1], List.of()));
            default:
                throw new IllegalArgumentException("no such command: " + words[0]);
        }
    }

    private static Map<String, String> settings(String[] words, int from) {
        Map<String, String> settings = new TreeMap<>();
        for (int number = from; number < words.length; number++) {
            String[] pair = words[number].split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        return settings;
    }

    private void alter(String group, Map<String, String> settings) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.GROUP, group);
        Collection<AlterConfigOp> changes = new ArrayList<>();
        settings.forEach((name, value) -> changes.add(
            new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET)));
        wait(admin.incrementalAlterConfigs(Map.of(resource, changes)).all());
    }

    /** Writes values, plain or in a transaction that is committed or aborted; returns offsets. */
    private String produce(String[] words) throws Exception {
        String how = words[3];
        KafkaProducer<String, String> producer = producers.get(how);
        if (producer == null) {
            Properties properties = properties();
            if (!how.equals("plain")) {
                properties.put("transactional.id", "share-members-" + how);
            }
            StringSerializer text = new StringSerializer();
            producer = new KafkaProducer<>(properties, text, text);
            producers.put(how, producer);
            if (!how.equals("plain")) {
                producer.initTransactions();
            }
        }
        if (!how.equals("plain")) {
            producer.beginTransaction();
        }
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (int number = 4; number < words.length; number++) {
            int partition = Integer.parseInt(words[2]);
            sent.add(producer.send(new ProducerRecord<>(words[1], partition, null, words[number])));
        }
        producer.flush();
        StringBuilder offsets = new StringBuilder();
        for (Future<RecordMetadata> each : sent) {
            offsets.append(each.get().offset()).append(' ');
        }
        if (how.equals("commit")) {
            producer.commitTransaction();
        } else if (how.equals("abort")) {
            producer.abortTransaction();
        }
        return offsets.toString().strip();
    }

    private void open(String member, String group, String topic, String mode, String limit) {
        Properties properties = properties();
        properties.put("group.id", group);
        properties.put("client.id", member);
        properties.put("share.acknowledgement.mode", mode);
        properties.put("share.acquire.mode", "record_limit");
        properties.put("max.poll.records", limit);
        // When a member is closed, its last request must not take long.
        properties.put("fetch.max.wait.ms", "100");
        StringDeserializer text = new StringDeserializer();
        KafkaShareConsumer<String, String> consumer =
            new KafkaShareConsumer<>(properties, text, text);
        List<String> told = results.computeIfAbsent(group, name -> new ArrayList<>());
        consumer.setAcknowledgementCommitCallback((offsets, error) ->
            offsets.forEach((where, each) -> each.forEach(offset ->
                told.add(where.partition() + ":" + offset + ":" + kind(error)))));
        consumer.subscribe(List.of(topic));
        members.put(member, consumer);
        groups.put(member, group);
    }

    /**
     * Polls until something comes, for so long; or, with 0, until the member has partitions and
     * nothing comes.
     *
     * <p>A poll that waits asks again and again, also while an answer is on its way, and then takes
     * further records in its background. So each poll only asks, or returns what has come, and
     * the first pause is as long as an answer takes.
     */
    private ConsumerRecords<String, String> poll(String member, long patienceMs, long firstPauseMs)
        throws Exception {
        KafkaShareConsumer<String, String> consumer = members.get(member);
        long now = System.currentTimeMillis();
        long joinBy = now + JOIN_MS;
        long end = now + patienceMs;
        for (long pause = firstPauseMs; ; pause *= 2) {
            ConsumerRecords<String, String> records = consumer.poll(Duration.ZERO);
            if (!records.isEmpty()) {
                return records;
            }
            while (!joined.contains(member)) {
                if (isAssigned(member)) {
                    joined.add(member);
                } else if (System.currentTimeMillis() > joinBy) {
                    throw new IllegalArgumentException(member + " gets no partitions");
                }
                Thread.sleep(100);
            }
            if (System.currentTimeMillis() > end) {
                Thread.sleep(QUIET_MS);
                return consumer.poll(Duration.ZERO);
            }
            Thread.sleep(pause);
        }
    }

    private boolean isAssigned(String member) throws Exception {
        String group = groups.get(member);
        try {
            ShareGroupDescription description =
                admin.describeShareGroups(List.of(group)).all().get().get(group);
            return description.members().stream().anyMatch(each ->
                each.clientId().equals(member) && !each.assignment().topicPartitions().isEmpty());
        } catch (ExecutionException error) {
            if (error.getCause() instanceof GroupIdNotFoundException) {
                return false;
            }
            throw (Exception) error.getCause();
        }
    }

    private static String shown(ConsumerRecords<String, String> records) {
        StringBuilder shown = new StringBuilder();
        for (ConsumerRecord<String, String> each : records) {
            shown.append(each.partition()).append(':').append(each.offset()).append(':')
                .append(each.deliveryCount().orElse((short) -1)).append(':')
                .append(each.value()).append(' ');
        }
        return shown.toString().strip();
    }

    private static String committed(
        Map<TopicIdPartition, Optional<org.apache.kafka.common.KafkaException>> results) {
        Map<Integer, String> shown = new TreeMap<>();
        results.forEach((where, error) -> shown.put(where.partition(), kind(error.orElse(null))));
        List<String> words = new ArrayList<>();
        shown.forEach((partition, kind) -> words.add(partition + ":" + kind));
        return String.join(" ", words);
    }

    private static String kind(Throwable error) {
        return error == null ? "-" : error.getClass().getSimpleName();
    }

    /**
     * Answers lines until there are no more.
     *
     * @param arguments the address of the broker
     */
    public static void main(String[] arguments) throws Exception {
        ShareMembers all = new ShareMembers(arguments[0]);
        BufferedReader lines =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream answers = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        // What a library prints must not be taken for an answer.
        System.setOut(System.err);
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            try {
                answers.println("ok " + all.answer(line.split(" ")));
            } catch (Exception error) {
                String message = String.valueOf(error.getMessage()).replace('\n', ' ');
                answers.println(error.getClass().getSimpleName() + " " + message);
            }
        }
        Runtime.getRuntime().halt(0);
    }
}
