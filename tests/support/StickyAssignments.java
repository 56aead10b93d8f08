import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.Assignment;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.Subscription;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.StickyAssignor;
import org.apache.kafka.clients.consumer.internals.AbstractStickyAssignor;
import org.apache.kafka.common.TopicPartition;

/**
 * Assigns the groups on standard input with Kafka's own assignors.
 *
 * <p>A group is a line: {@code t0=2 t1=3|C0;4;t0 t1;t0-0 t1-2|C1;...}: topics with their numbers
 * of partitions, then members with generation, subscription and owned partitions. The answer is a
 * line {@code C0:t0-0 t1-2|C1:...} for each of: the sticky assignor, the cooperative one before it
 * withholds what has another owner, and the cooperative one.
 */
public final class StickyAssignments {
    /** What the cooperative assignor aims at: its answer before it withholds anything. */
    private static final class Target extends AbstractStickyAssignor {
        @Override
        public String name() {
            return "target";
        }

        @Override
        protected MemberData memberData(Subscription subscription) {
            return new MemberData(subscription.ownedPartitions(), subscription.generationId());
        }
    }

    private static List<TopicPartition> partitions(String text) {
        List<TopicPartition> partitions = new ArrayList<>();
        for (String name : text.split(" ")) {
            int dash = name.lastIndexOf('-');
            if (dash > 0) {
                int number = Integer.parseInt(name.substring(dash + 1));
                partitions.add(new TopicPartition(name.substring(0, dash), number));
            }
        }
        return partitions;
    }

    private static String shown(Map<String, List<TopicPartition>> assignment) {
        List<String> members = new ArrayList<>();
        new TreeMap<>(assignment).forEach((id, partitions) -> {
            StringBuilder line = new StringBuilder(id).append(':');
            partitions.forEach(partition -> line.append(partition).append(' '));
            members.add(line.toString().trim());
        });
        return String.join("|", members);
    }

    /** The assignment, or nothing where Kafka fails, as on partitions that are there no more. */
    private static String answer(
            AbstractStickyAssignor assignor, Map<String, Integer> topics, Map<String, Subscription> group) {
        try {
            return shown(assignor.assign(topics, group));
        } catch (RuntimeException error) {
            return "";
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader input =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] parts = line.split("\\|");
            Map<String, Integer> topics = new HashMap<>();
            for (String topic : parts[0].split(" ")) {
                String[] named = topic.split("=");
                topics.put(named[0], Integer.parseInt(named[1]));
            }
            Map<String, Subscription> eager = new HashMap<>();
            Map<String, Subscription> cooperative = new HashMap<>();
            for (int n = 1; n < parts.length; n++) {
                String[] member = parts[n].split(";", -1);
                int generation = Integer.parseInt(member[1]);
                List<String> subscribed = List.of(member[2].split(" "));
                List<TopicPartition> owned = partitions(member[3]);
                StickyAssignor before = new StickyAssignor();
                before.onAssignment(
                    new Assignment(owned), new ConsumerGroupMetadata("g", generation, member[0], Optional.empty()));
                ByteBuffer data = before.subscriptionUserData(new HashSet<>(subscribed));
                eager.put(member[0], new Subscription(subscribed, data, List.of(), generation, Optional.empty()));
                cooperative.put(member[0], new Subscription(subscribed, null, owned, generation, Optional.empty()));
            }
            System.out.println(answer(new StickyAssignor(), topics, eager));
            System.out.println(answer(new Target(), topics, cooperative));
            System.out.println(answer(new CooperativeStickyAssignor(), topics, cooperative));
        }
    }
}
