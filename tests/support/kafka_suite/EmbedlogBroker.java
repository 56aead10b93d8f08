package embedlog;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.function.Function;
import java.util.stream.Collectors;
import kafka.cluster.Partition;
import kafka.log.LogManager;
import kafka.network.SocketServer;
import kafka.raft.KafkaRaftManager;
import kafka.server.BrokerServer;
import kafka.server.ControllerServer;
import kafka.server.KafkaApis;
import kafka.server.KafkaConfig;
import kafka.server.ReplicaManager;
import kafka.server.SharedServer;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsResult.ListOffsetsResultInfo;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.admin.TopicListing;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.internals.Topic;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.controller.Controller;
import org.apache.kafka.coordinator.group.GroupCoordinator;
import org.apache.kafka.metadata.BrokerState;
import org.apache.kafka.metadata.KRaftMetadataCache;
import org.apache.kafka.metadata.LeaderAndIsr;
import org.apache.kafka.server.common.ApiMessageAndVersion;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.mockito.Mockito;
import org.mockito.stubbing.Answer;
import org.opentest4j.TestAbortedException;
import scala.Option;
import scala.jdk.javaapi.CollectionConverters;

/**
 * The one broker that Kafka's tests find in their process: what they ask it for, it asks the server
 * for, as a client. It knows where to connect, and the topics, with leaders and log starts.
 *
 * <p>A test that needs more of the objects of a broker fails with a sentence that says so.
 */
public final class EmbedlogBroker {
  /** What a method does that is not one of those below. */
  private static final Answer<Object> REFUSE =
      call -> {
        throw new UnsupportedOperationException("the objects of a broker: " + call.getMethod());
      };

  private EmbedlogBroker() {}

  /**
   * Return the broker of a server, whose settings are those that the test would have given it.
   *
   * <p>It can be stopped and started if the test has asked for `count` = 1 broker.
   */
  public static BrokerServer of(EmbedlogServer server, Map<String, String> settings, int count) {
    SocketServer sockets = mock(SocketServer.class);
    Mockito.doAnswer(call -> server.port()).when(sockets).boundPort(Mockito.any());
    SharedServer shared = mock(SharedServer.class);
    Mockito.doReturn(null).when(shared).loader(); // Nothing has to arrive here.
    KafkaApis apis = mock(KafkaApis.class);
    Mockito.doReturn(true).when(apis).isConsumerGroupProtocolEnabled();
    KRaftMetadataCache metadata = metadata(server);
    Mockito.doReturn(metadata).when(apis).metadataCache();
    GroupCoordinator coordinator = mock(GroupCoordinator.class);
    Mockito.doReturn(new Properties()).when(coordinator).groupMetadataTopicConfigs();
    ReplicaManager replicas = replicas(server);
    BrokerServer broker = mock(BrokerServer.class);
    Mockito.doAnswer(call -> server.port()).when(broker).boundPort(Mockito.any());
    Mockito.doAnswer(call -> config(server, settings)).when(broker).config();
    Mockito.doReturn(BrokerState.RUNNING).when(broker).brokerState();
    Mockito.doReturn(false).when(broker).isShutdown();
    Mockito.doReturn(sockets).when(broker).socketServer();
    Mockito.doReturn(shared).when(broker).sharedServer();
    Mockito.doReturn(apis).when(broker).dataPlaneRequestProcessor();
    Mockito.doReturn(coordinator).when(broker).groupCoordinator();
    Mockito.doReturn(metadata).when(broker).metadataCache();
    Mockito.doReturn(replicas).when(broker).replicaManager();
    LogManager logs = replicas.logManager();
    Mockito.doReturn(logs).when(broker).logManager();
    Mockito.doAnswer(call -> ifAlone(count, server::stop)).when(broker).shutdown();
    Mockito.doAnswer(call -> ifAlone(count, server::start)).when(broker).startup();
    Mockito.doNothing().when(broker).awaitShutdown();
    return broker;
  }

  private static Object ifAlone(int count, Runnable action) {
    if (count > 1) {
      throw new TestAbortedException("a second broker");
    }
    action.run();
    return null;
  }

  /** Return a controller that knows the ids of topics. */
  @SuppressWarnings("unchecked")
  public static ControllerServer controllerOf(EmbedlogServer server) {
    Controller controller = mock(Controller.class);
    Mockito.doAnswer(call -> CompletableFuture.completedFuture(topicIds(server)))
        .when(controller)
        .findAllTopicIds(Mockito.any());
    ControllerServer found = mock(ControllerServer.class);
    Mockito.doReturn(controller).when(found).controller();
    // Nobody has to wait for its own log: 0 is before any broker's.
    KafkaRaftManager<ApiMessageAndVersion> raft =
        Mockito.mock(KafkaRaftManager.class, Mockito.RETURNS_DEEP_STUBS);
    Mockito.doReturn(raft).when(found).raftManager();
    return found;
  }

  private static <T> T mock(Class<T> type) {
    return Mockito.mock(type, Mockito.withSettings().stubOnly().defaultAnswer(REFUSE));
  }

  private static KafkaConfig config(EmbedlogServer server, Map<String, String> settings) {
    Map<String, String> given = new HashMap<>(settings);
    given.put("node.id", "0");
    given.put("process.roles", "broker,controller");
    given.put(
        "listeners", "PLAINTEXT://" + server.bootstrapServers() + ",CONTROLLER://127.0.0.1:0");
    given.put("controller.listener.names", "CONTROLLER");
    given.put("listener.security.protocol.map", "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT");
    given.put("controller.quorum.bootstrap.servers", server.bootstrapServers());
    given.put("unstable.api.versions.enable", "false");
    given.put("group.consumer.assignment.interval.ms", "0"); // The server assigns at once.
    return new KafkaConfig(given);
  }

  private static KRaftMetadataCache metadata(EmbedlogServer server) {
    KRaftMetadataCache metadata = mock(KRaftMetadataCache.class);
    Mockito.doAnswer(
            call -> topic(server, call.getArgument(0)).map(found -> found.partitions().size()))
        .when(metadata)
        .numPartitions(Mockito.any());
    Mockito.doAnswer(call -> topic(server, call.getArgument(0)).isPresent())
        .when(metadata)
        .contains(Mockito.anyString());
    Mockito.doAnswer(
            call ->
                topic(server, call.getArgument(0))
                    .map(TopicDescription::topicId)
                    .orElse(Uuid.ZERO_UUID))
        .when(metadata)
        .getTopicId(Mockito.any());
    Mockito.doAnswer(
            call ->
                partition(server, call.getArgument(0), call.getArgument(1))
                    .map(EmbedlogBroker::leaderAndIsr))
        .when(metadata)
        .getLeaderAndIsr(Mockito.any(), Mockito.anyInt());
    Mockito.doAnswer(
            call ->
                partition(server, call.getArgument(0), call.getArgument(1))
                    .map(TopicPartitionInfo::leader))
        .when(metadata)
        .getPartitionLeaderEndpoint(Mockito.any(), Mockito.anyInt(), Mockito.any());
    Mockito.doAnswer(call -> nodes(server)).when(metadata).getAliveBrokerNodes(Mockito.any());
    Mockito.doAnswer(
            call -> {
              int asked = call.getArgument(0);
              return nodes(server).stream().anyMatch(node -> node.id() == asked);
            })
        .when(metadata)
        .hasAliveBroker(Mockito.anyInt());
    return metadata;
  }

  private static List<Node> nodes(EmbedlogServer server) {
    return List.copyOf(ask(server, admin -> admin.describeCluster().nodes()));
  }

  private static LeaderAndIsr leaderAndIsr(TopicPartitionInfo info) {
    List<Integer> isr = info.isr().stream().map(node -> node.id()).collect(Collectors.toList());
    return new LeaderAndIsr(info.leader().id(), isr);
  }

  private static ReplicaManager replicas(EmbedlogServer server) {
    ReplicaManager replicas = mock(ReplicaManager.class);
    Mockito.doAnswer(call -> Option.apply(logOf(server, call.getArgument(0))))
        .when(replicas)
        .localLog(Mockito.any());
    LogManager logs = logs(server);
    Mockito.doReturn(logs).when(replicas).logManager();
    Mockito.doAnswer(call -> online(server, call.getArgument(0)))
        .when(replicas)
        .onlinePartition(Mockito.any());
    return replicas;
  }

  private static LogManager logs(EmbedlogServer server) {
    LogManager logs = mock(LogManager.class);
    Mockito.doAnswer(
            call -> {
              TopicPartition asked = call.getArgument(0);
              boolean exists = partition(server, asked.topic(), asked.partition()).isPresent();
              return exists ? Option.apply(logOf(server, asked)) : Option.empty();
            })
        .when(logs)
        .getLog(Mockito.any(), Mockito.anyBoolean());
    Mockito.doReturn(false).when(logs).getLog$default$2();
    Mockito.doReturn(CollectionConverters.asScala(List.of()).toSeq()).when(logs).liveLogDirs();
    return logs;
  }

  private static Option<Partition> online(EmbedlogServer server, TopicPartition partition) {
    if (partition(server, partition.topic(), partition.partition()).isEmpty()) {
      return Option.empty();
    }
    Partition found = mock(Partition.class);
    Mockito.doAnswer(call -> offset(server, partition, OffsetSpec.latest()).leaderEpoch().get())
        .when(found)
        .getLeaderEpoch();
    Mockito.doReturn(Option.apply(mock(UnifiedLog.class))).when(found).leaderLogIfLocal();
    return Option.apply(found);
  }

  private static UnifiedLog logOf(EmbedlogServer server, TopicPartition partition) {
    UnifiedLog log = mock(UnifiedLog.class);
    Mockito.doAnswer(call -> offset(server, partition, OffsetSpec.earliest()).offset())
        .when(log)
        .logStartOffset();
    Mockito.doAnswer(call -> offset(server, partition, OffsetSpec.latest()).offset())
        .when(log)
        .logEndOffset();
    return log;
  }

  private static ListOffsetsResultInfo offset(
      EmbedlogServer server, TopicPartition partition, OffsetSpec spec) {
    return ask(
        server, admin -> admin.listOffsets(Map.of(partition, spec)).partitionResult(partition));
  }

  public static Map<String, Uuid> topicIds(EmbedlogServer server) {
    return ask(server, admin -> admin.listTopics().listings()).stream()
        .collect(Collectors.toMap(TopicListing::name, TopicListing::topicId));
  }

  private static Optional<TopicPartitionInfo> partition(
      EmbedlogServer server, String topic, int partition) {
    return topic(server, topic)
        .flatMap(
            found ->
                found.partitions().stream().filter(p -> p.partition() == partition).findFirst());
  }

  public static Optional<TopicDescription> topic(EmbedlogServer server, String name) {
    try {
      return Optional.of(
          ask(server, admin -> admin.describeTopics(List.of(name)).topicNameValues().get(name)));
    } catch (UnknownTopicOrPartitionException error) {
      return Optional.empty();
    }
  }

  /**
   * Create the topic in which brokers keep the state of share groups, which is elsewhere in a log.
   *
   * <p>Many tests end by waiting until it has more than two records, after all that they assert of
   * the group; these three are there for that, and say nothing of the state.
   */
  public static void addShareGroupState(EmbedlogServer server, int partitions) {
    String name = Topic.SHARE_GROUP_STATE_TOPIC_NAME;
    NewTopic topic = new NewTopic(name, Optional.of(partitions), Optional.empty());
    ask(server, admin -> admin.createTopics(List.of(topic)).all());
    Map<String, Object> settings = Map.of("bootstrap.servers", server.bootstrapServers());
    ByteArraySerializer serializer = new ByteArraySerializer();
    try (var producer = new KafkaProducer<>(settings, serializer, serializer)) {
      for (int i = 0; i < 3; i++) {
        producer.send(new ProducerRecord<>(name, "put there by the harness".getBytes()));
      }
    }
  }

  public static <T> T ask(
      EmbedlogServer server, Function<Admin, org.apache.kafka.common.KafkaFuture<T>> question) {
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", server.bootstrapServers()))) {
      return question.apply(admin).get();
    } catch (InterruptedException error) {
      throw new IllegalStateException(error);
    } catch (ExecutionException error) {
      throw error.getCause() instanceof RuntimeException cause
          ? cause
          : new IllegalStateException(error);
    }
  }
}
