package kafka.integration;

import embedlog.EmbedlogServer;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.stream.Collectors;
import kafka.cluster.Partition;
import kafka.server.KafkaBroker;
import kafka.server.KafkaConfig;
import kafka.server.QuorumTestHarness;
import kafka.server.ReplicaManager;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.GroupProtocol;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.network.ListenerName;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.TestInfo;
import org.mockito.Mockito;
import org.opentest4j.TestAbortedException;
import scala.Option;
import scala.collection.mutable.ArrayBuffer;
import scala.collection.mutable.Buffer;

/**
 * Takes the place of Kafka's own class, as `RaftClusterInvocationContext` does for newer tests:
 * those in Scala run on `embedlog serve`, too.
 *
 * <p>The one broker is an object that knows its port, and where logs start; a test that asks it for
 * more fails.
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
    server.start();
    KafkaBroker broker = Mockito.mock(KafkaBroker.class);
    Mockito.when(broker.boundPort(Mockito.any())).thenReturn(server.port());
    Mockito.when(broker.config()).thenReturn(config());
    ReplicaManager replicas = Mockito.mock(ReplicaManager.class);
    Mockito.when(replicas.localLog(Mockito.any()))
        .thenAnswer(call -> Option.apply(logOf(call.getArgument(0))));
    // Who waits for a leader has one.
    Partition partition = Mockito.mock(Partition.class);
    Mockito.when(partition.leaderLogIfLocal())
        .thenReturn(Option.apply(Mockito.mock(UnifiedLog.class)));
    Mockito.when(replicas.onlinePartition(Mockito.any())).thenReturn(Option.apply(partition));
    Mockito.when(broker.replicaManager()).thenReturn(replicas);
    brokers.append(broker);
  }

  /** Return an object that knows where the log of a partition starts. */
  private UnifiedLog logOf(TopicPartition partition) throws Exception {
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", server.bootstrapServers()))) {
      var start = admin.listOffsets(Map.of(partition, OffsetSpec.earliest())).all().get();
      UnifiedLog log = Mockito.mock(UnifiedLog.class);
      Mockito.when(log.logStartOffset()).thenReturn(start.get(partition).offset());
      return log;
    }
  }

  private KafkaConfig config() {
    String listeners = "PLAINTEXT://" + server.bootstrapServers() + ",CONTROLLER://127.0.0.1:0";
    return new KafkaConfig(
        Map.of(
            "node.id", "0",
            "process.roles", "broker,controller",
            "listeners", listeners,
            "controller.listener.names", "CONTROLLER",
            "listener.security.protocol.map", "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.bootstrap.servers", server.bootstrapServers()));
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

  public Buffer<KafkaBroker> brokers() {
    return brokers;
  }

  public Buffer<KafkaBroker> servers() {
    return brokers;
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
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", server.bootstrapServers()))) {
      admin.createTopics(List.of(created)).all().get();
    } catch (InterruptedException error) {
      throw new IllegalStateException(error);
    } catch (java.util.concurrent.ExecutionException error) {
      throw new IllegalStateException(error.getCause());
    }
    return scala.collection.immutable.Map$.MODULE$.empty();
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
