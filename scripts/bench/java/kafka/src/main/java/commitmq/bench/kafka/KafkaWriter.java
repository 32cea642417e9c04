package commitmq.bench.kafka;

import commitmq.bench.Peer;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.producer.Callback;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.Producer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** A KafkaProducer. Its accumulator makes the batches that are sent. */
final class KafkaWriter implements Peer.Writer {
    private static final String MESSAGES_OUTSTANDING = "messages outstanding";

    private final Producer<byte[], byte[]> producer;
    private final String topic;
    private final int messagesOutstanding;
    private final int partitions;
    private final AtomicInteger batches = new AtomicInteger();

    KafkaWriter(String topic, Properties settings) {
        this.topic = topic;
        this.messagesOutstanding = Integer.parseInt(settings.getProperty(MESSAGES_OUTSTANDING, "1"));
        settings.remove(MESSAGES_OUTSTANDING);
        this.producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        this.partitions = producer.partitionsFor(topic).size();
    }

    @Override
    public void send(byte[] body) throws Exception {
        producer.send(new ProducerRecord<>(topic, body)).get();
    }

    @Override
    public void submit(byte[] body, String key, Peer.Done done) {
        producer.send(new ProducerRecord<>(topic, body), (metadata, error) -> done.with(error));
    }

    @Override
    public void submit(List<byte[]> bodies, Peer.Done done) {
        Countdown countdown = new Countdown(bodies.size(), done);
        // Batches go to the partitions in turn, as with the other systems; by itself a producer changes the partition only
        // after batch.size bytes.
        int partition = Math.floorMod(batches.getAndIncrement(), partitions);
        for (byte[] body : bodies) {
            producer.send(new ProducerRecord<>(topic, partition, null, body), countdown);
        }
    }

    @Override
    public int messagesOutstanding() {
        return messagesOutstanding;
    }

    @Override
    public void close() {
        producer.close();
    }

    /** Sends one message and says where it is stored. */
    RecordMetadata sendOne(byte[] body, int timeoutMs) throws Exception {
        return producer.send(new ProducerRecord<>(topic, body)).get(timeoutMs, TimeUnit.MILLISECONDS);
    }

    /** Ends once, when the last message of a batch did. */
    private static final class Countdown implements Callback {
        private final AtomicInteger left;
        private final AtomicReference<Exception> first = new AtomicReference<>();
        private final Peer.Done done;

        Countdown(int messages, Peer.Done done) {
            this.left = new AtomicInteger(messages);
            this.done = done;
        }

        @Override
        public void onCompletion(RecordMetadata metadata, Exception error) {
            if (error != null) {
                first.compareAndSet(null, error);
            }
            if (left.decrementAndGet() == 0) {
                done.with(first.get());
            }
        }
    }
}
