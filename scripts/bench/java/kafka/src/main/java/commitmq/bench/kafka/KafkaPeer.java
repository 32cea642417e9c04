package commitmq.bench.kafka;

import commitmq.bench.Peer;
import commitmq.bench.Request;
import commitmq.bench.Settings;
import java.time.Duration;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.apache.kafka.clients.CommonClientConfigs;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.Consumer;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.errors.RetriableException;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** Kafka through its Java client. The address is the broker's. */
final class KafkaPeer implements Peer {
    /** Ten thousand partitions take minutes. */
    private static final int CREATE_TIMEOUT_MS = 600_000;

    /** A controller refuses to change more than 10,000 records of its metadata at a time. */
    private static final int CREATED_AT_ONCE = 5000;

    private static final int DEFAULT_BATCH_SIZE = 16_384;
    private static final int RECORD_OVERHEAD_BYTES = 100;
    private static final int ROUND_TRIP_TIMEOUT_MS = 1000;

    private final Request request;
    private final Settings settings;
    private final Map<String, List<TopicPartition>> partitions = new HashMap<>();
    private Admin admin;
    private Consumer<byte[], byte[]> ends;
    private KafkaWriter roundTripWriter;
    private Consumer<byte[], byte[]> roundTripReader;

    KafkaPeer(Request request, Settings settings) {
        this.request = request;
        this.settings = settings;
    }

    @Override
    public void createTopic(String topic, int queues) throws Exception {
        if (partitions.containsKey(topic)) {
            return;
        }
        try {
            CreateTopicsOptions options = new CreateTopicsOptions().timeoutMs(CREATE_TIMEOUT_MS);
            NewTopic first = new NewTopic(topic, Optional.of(Math.min(queues, CREATED_AT_ONCE)), Optional.empty());
            admin().createTopics(List.of(first), options).all().get(CREATE_TIMEOUT_MS, TimeUnit.MILLISECONDS);
            for (int made = CREATED_AT_ONCE; made < queues; ) {
                made = Math.min(queues, made + CREATED_AT_ONCE);
                // The controller may not have the topic in what it answers from at once.
                partitionsOf(topic);
                admin().createPartitions(Map.of(topic, NewPartitions.increaseTo(made)))
                        .all()
                        .get(CREATE_TIMEOUT_MS, TimeUnit.MILLISECONDS);
            }
        } catch (ExecutionException error) {
            if (!(error.getCause() instanceof TopicExistsException)) {
                throw error;
            }
        }
        int found = partitionsOf(topic);
        partitions.put(topic, IntStream.range(0, found).mapToObj(i -> new TopicPartition(topic, i)).toList());
    }

    @Override
    public Writer writer(String topic, Use use) {
        Properties found = settings.producer(use);
        if (use == Use.BATCH) {
            // Each partition that has something to send takes this much of buffer.memory, half of which they share.
            long most = Long.parseLong(found.getProperty(ProducerConfig.BATCH_SIZE_CONFIG));
            long share = Long.parseLong(found.getProperty(ProducerConfig.BUFFER_MEMORY_CONFIG)) / 2 / request.queues();
            long wanted = (long) request.batch() * (request.bodyBytes() + RECORD_OVERHEAD_BYTES);
            long chosen = Math.min(most, request.queues() == 1 ? wanted : Math.max(wanted, share));
            found.setProperty(ProducerConfig.BATCH_SIZE_CONFIG, Long.toString(Math.max(DEFAULT_BATCH_SIZE, chosen)));
        }
        return new KafkaWriter(topic, at(found));
    }

    @Override
    public Reader reader(String topic, boolean atEnd) throws Exception {
        createTopic(topic, request.queues());
        return new KafkaReader(at(settings.consumer()), partitions.get(topic), atEnd);
    }

    @Override
    public long readable(String topic) throws Exception {
        createTopic(topic, request.queues());
        if (ends == null) {
            ends = openConsumer();
        }
        // The high watermarks: consumers get what is below them.
        return ends.endOffsets(partitions.get(topic)).values().stream().mapToLong(Long::longValue).sum();
    }

    @Override
    public void roundTrip(String topic, byte[] body) throws Exception {
        if (roundTripWriter == null) {
            roundTripWriter = new KafkaWriter(topic, at(settings.producer(Use.SINGLE)));
            roundTripReader = openConsumer();
        }
        RecordMetadata sent = roundTripWriter.sendOne(body, ROUND_TRIP_TIMEOUT_MS);
        TopicPartition partition = new TopicPartition(topic, sent.partition());
        roundTripReader.assign(List.of(partition));
        roundTripReader.seek(partition, sent.offset());
        for (ConsumerRecord<byte[], byte[]> found : roundTripReader.poll(Duration.ofMillis(ROUND_TRIP_TIMEOUT_MS))) {
            if (found.offset() == sent.offset() && Arrays.equals(found.value(), body)) {
                return;
            }
        }
        throw new IllegalStateException("the message that was sent did not come back from " + partition);
    }

    @Override
    public void close() {
        // The process ends right after.
    }

    /** Returns how many partitions the topic has, once the broker serves all of them: its own metadata follow later. */
    private int partitionsOf(String topic) throws Exception {
        for (long deadline = System.currentTimeMillis() + CREATE_TIMEOUT_MS; ; Thread.sleep(50)) {
            try {
                List<TopicPartitionInfo> found = admin().describeTopics(List.of(topic)).topicNameValues().get(topic)
                        .get(CREATE_TIMEOUT_MS, TimeUnit.MILLISECONDS)
                        .partitions();
                if (found.stream().allMatch(one -> one.leader() != null && !one.leader().isEmpty())) {
                    return found.size();
                }
            } catch (ExecutionException error) {
                if (!(error.getCause() instanceof RetriableException)) {
                    throw error;
                }
            }
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException("the broker does not serve the new topic " + topic);
            }
        }
    }

    private Consumer<byte[], byte[]> openConsumer() {
        return new KafkaConsumer<>(at(settings.consumer()), new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Properties at(Properties others) {
        others.setProperty(CommonClientConfigs.BOOTSTRAP_SERVERS_CONFIG, request.address());
        return others;
    }

    private Admin admin() {
        if (admin == null) {
            admin = Admin.create(at(settings.admin()));
        }
        return admin;
    }
}
