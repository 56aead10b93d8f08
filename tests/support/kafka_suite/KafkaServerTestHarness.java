package kafka.integration;

import embedlog.EmbedlogBroker;
import embedlog.EmbedlogServer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.stream.Collectors;
import kafka.server.ControllerServer;
import kafka.server.KafkaBroker;
import kafka.server.KafkaConfig;
import kafka.server.QuorumTestHarness;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.GroupProtocol;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.network.ListenerName;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.TestInfo;
import org.opentest4j.TestAbortedException;
import scala.Option;
import scala.collection.immutable.Map$;
import scala.collection.mutable.ArrayBuffer;
import scala.collection.mutable.Buffer;
import scala.jdk.javaapi.CollectionConverters;

/**
 * Takes the place of Kafka's own class, as `RaftClusterInvocationContext` does for newer tests:
 * those in Scala run on `embedlog serve`, too.
 *
 * <p>The one broker is an {@link EmbedlogBroker}.
 */
public abstract class KafkaServerTestHarness extends QuorumTestHarness {
  private static final ListenerName LISTENER =
      ListenerName.forSecurityProtocol(SecurityProtocol.PLAINTEXT);

  private final EmbedlogServer server = new EmbedlogServer();
  private final Buffer<KafkaBroker> brokers = new ArrayBuffer<>();
  private String displayName = "";

  @BeforeEach
  @Override
  public void setUp(TestInfo testInfo) {
    displayName = testInfo.getDisplayName();
    if (!generateConfigs().head().autoCreateTopicsEnable()) {
      server.disableTopicCreation();
    }
    server.start();
    brokers.append(EmbedlogBroker.of(server, Map.of(), 1));
  }

  @AfterEach
  @Override
  public void tearDown() {
    server.stop();
  }

  @Override
  public Option<GroupProtocol> maybeGroupProtocolSpecified() {
    for (GroupProtocol protocol : GroupProtocol.values()) {
      if (displayName.contains("groupProtocol=" + protocol.name().toLowerCase())) {
        return Option.apply(protocol);
      }
    }
    return Option.empty();
  }

  /** Return what each broker would be given. */
  public abstract scala.collection.Seq<KafkaConfig> generateConfigs();

  public Buffer<KafkaBroker> brokers() {
    return brokers;
  }

  public Buffer<KafkaBroker> servers() {
    return brokers;
  }

  public scala.collection.Seq<KafkaBroker> aliveBrokers() {
    return brokers;
  }

  @Override
  public ControllerServer controllerServer() {
    return EmbedlogBroker.controllerOf(server);
  }

  @Override
  public scala.collection.immutable.Seq<ControllerServer> controllerServers() {
    return scala.collection.immutable.Seq$.MODULE$.<ControllerServer>empty();
  }

  public void ensureConsistentKRaftMetadata() {}

  public Option<KafkaBroker> serverForId(int id) {
    return id == 0 ? Option.apply(brokers.apply(0)) : Option.empty();
  }

  public scala.collection.immutable.Map<String, Uuid> getTopicIds() {
    return Map$.MODULE$.from(CollectionConverters.asScala(EmbedlogBroker.topicIds(server)));
  }

  public scala.collection.immutable.Map<String, Uuid> getTopicIds(
      scala.collection.Seq<String> names) {
    Map<String, Uuid> found = new HashMap<>(EmbedlogBroker.topicIds(server));
    found.keySet().retainAll(CollectionConverters.asJava(names));
    return Map$.MODULE$.from(CollectionConverters.asScala(found));
  }

  public scala.collection.immutable.Map<Uuid, String> getTopicNames() {
    Map<Uuid, String> names = new HashMap<>();
    EmbedlogBroker.topicIds(server).forEach((name, id) -> names.put(id, name));
    return Map$.MODULE$.from(CollectionConverters.asScala(names));
  }

  public ListenerName listenerName() {
    return LISTENER;
  }

  public SecurityProtocol securityProtocol() {
    return SecurityProtocol.PLAINTEXT;
  }

  public Option<java.io.File> trustStoreFile() {
    return Option.empty();
  }

  public Option<Properties> clientSaslProperties() {
    return Option.empty();
  }

  public Option<Properties> serverSaslProperties() {
    return Option.empty();
  }

  public String bootstrapServers(ListenerName listener) {
    return server.bootstrapServers();
  }

  public ListenerName bootstrapServers$default$1() {
    return LISTENER;
  }

  public void createOffsetsTopic(ListenerName listener, Properties adminConfig) {}

  public ListenerName createOffsetsTopic$default$1() {
    return LISTENER;
  }

  public Properties createOffsetsTopic$default$2() {
    return new Properties();
  }

  public scala.collection.immutable.Map<Object, Object> createTopic(
      String topic,
      int partitions,
      int replicas,
      Properties config,
      ListenerName listener,
      Properties adminConfig) {
    Map<String, String> settings =
        config.stringPropertyNames().stream()
            .collect(Collectors.toMap(name -> name, config::getProperty));
    NewTopic created =
        new NewTopic(topic, Optional.of(partitions), Optional.of((short) replicas))
            .configs(settings);
    return create(created);
  }

  public scala.collection.immutable.Map<Object, Object> createTopicWithAssignment(
      String topic,
      scala.collection.Map<Object, scala.collection.Seq<Object>> replicas,
      ListenerName listener) {
    Map<Integer, List<Integer>> assignment = new HashMap<>();
    CollectionConverters.asJava(replicas)
        .forEach(
            (partition, ids) -> {
              List<Integer> brokers = new ArrayList<>();
              CollectionConverters.asJava(ids).forEach(id -> brokers.add((Integer) id));
              assignment.put((Integer) partition, brokers);
            });
    return create(new NewTopic(topic, assignment));
  }

  public ListenerName createTopicWithAssignment$default$3() {
    return LISTENER;
  }

  /** Create a topic; return the leader of each partition. */
  private scala.collection.immutable.Map<Object, Object> create(NewTopic topic) {
    EmbedlogBroker.ask(server, admin -> admin.createTopics(List.of(topic)).all());
    Map<Object, Object> leaders = new HashMap<>();
    EmbedlogBroker.topic(server, topic.name())
        .orElseThrow()
        .partitions()
        .forEach(found -> leaders.put(found.partition(), found.leader().id()));
    return Map$.MODULE$.from(CollectionConverters.asScala(leaders));
  }

  public void deleteTopic(String topic, ListenerName listener) {
    EmbedlogBroker.ask(server, admin -> admin.deleteTopics(List.of(topic)).all());
  }

  public ListenerName deleteTopic$default$2() {
    return LISTENER;
  }

  public int createTopic$default$2() {
    return 1;
  }

  public int createTopic$default$3() {
    return 1;
  }

  public Properties createTopic$default$4() {
    return new Properties();
  }

  public ListenerName createTopic$default$5() {
    return LISTENER;
  }

  public Properties createTopic$default$6() {
    return new Properties();
  }

  public void killBroker(int id) {
    throw new TestAbortedException("a second broker");
  }

  public void restartDeadBrokers(boolean reconfigure) {
    throw new TestAbortedException("a second broker");
  }

  public boolean restartDeadBrokers$default$1() {
    return false;
  }
}
