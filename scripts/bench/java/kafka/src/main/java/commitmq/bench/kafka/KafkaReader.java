package commitmq.bench.kafka;

import commitmq.bench.Peer;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.Consumer;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteBufferDeserializer;

/** A KafkaConsumer with all partitions of the topic assigned to it. */
final class KafkaReader implements Peer.Reader {
    // ByteBuffers are views of the fetched bytes; byte arrays would be copies.
    private final Consumer<byte[], ByteBuffer> consumer;

    KafkaReader(Properties settings, List<TopicPartition> partitions, boolean atEnd) {
        consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteBufferDeserializer());
        consumer.assign(partitions);
        if (atEnd) {
            consumer.seekToEnd(partitions);
            // Seeking is lazy: asking for the positions does it.
            partitions.forEach(consumer::position);
        } else {
            consumer.seekToBeginning(partitions);
            partitions.forEach(consumer::position);
        }
    }

    @Override
    public int poll(long timeoutMs, Peer.Sink sink) {
        ConsumerRecords<byte[], ByteBuffer> found = consumer.poll(Duration.ofMillis(timeoutMs));
        for (ConsumerRecord<byte[], ByteBuffer> record : found) {
            ByteBuffer body = record.value();
            if (body.hasArray()) {
                sink.accept(body.array(), body.arrayOffset() + body.position(), body.remaining());
            } else {
                byte[] copy = new byte[body.remaining()];
                body.get(copy);
                sink.accept(copy, 0, copy.length);
            }
        }
        return found.count();
    }

    @Override
    public void close() {
        consumer.close();
    }
}
