package commitmq.bench.rocketmq;

import commitmq.bench.Peer;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.message.Message;

/** A DefaultMQProducer; it gives each message or batch to the next queue in turn. */
final class RocketMqWriter implements Peer.Writer {
    private static final String MESSAGES_OUTSTANDING = "messages outstanding";

    private final DefaultMQProducer producer;
    private final String topic;
    private final int messagesOutstanding;

    RocketMqWriter(String nameServer, String topic, Properties settings) throws Exception {
        this.topic = topic;
        this.messagesOutstanding = Integer.parseInt(settings.getProperty(MESSAGES_OUTSTANDING, "1"));
        producer = new DefaultMQProducer("bench-producer");
        producer.setNamesrvAddr(nameServer);
        MixAll.properties2Object(settings, producer);
        producer.start();
        if (Boolean.parseBoolean(settings.getProperty("autoBatch"))) {
            producer.initProduceAccumulator();
            // These have no setters that properties2Object would find.
            producer.batchMaxDelayMs(Integer.parseInt(settings.getProperty("batchMaxDelayMs")));
            producer.batchMaxBytes(Long.parseLong(settings.getProperty("batchMaxBytes")));
            producer.totalBatchMaxBytes(Long.parseLong(settings.getProperty("totalBatchMaxBytes")));
        }
    }

    @Override
    public void send(byte[] body) throws Exception {
        SendResult sent = producer.send(new Message(topic, body));
        if (sent.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(sent.toString());
        }
    }

    @Override
    public void submit(byte[] body, String key, Peer.Done done) throws Exception {
        Message message = new Message(topic, body);
        if (key != null) {
            message.setKeys(key);
        }
        producer.send(message, new Ended(done));
    }

    @Override
    public void submit(List<byte[]> bodies, Peer.Done done) throws Exception {
        List<Message> messages = new ArrayList<>(bodies.size());
        for (byte[] body : bodies) {
            messages.add(new Message(topic, body));
        }
        producer.send(messages, new Ended(done));
    }

    @Override
    public int messagesOutstanding() {
        return messagesOutstanding;
    }

    @Override
    public void close() {
        producer.shutdown();
    }

    /** Sends one message and says where it is stored. */
    SendResult sendOne(Message message, int timeoutMs) throws Exception {
        return producer.send(message, timeoutMs);
    }

    /** Tells how a send ended; a message that is stored but not as durable as asked for has failed. */
    record Ended(Peer.Done done) implements SendCallback {
        @Override
        public void onSuccess(SendResult sent) {
            boolean good = sent.getSendStatus() == SendStatus.SEND_OK;
            done.with(good ? null : new IllegalStateException(sent.toString()));
        }

        @Override
        public void onException(Throwable error) {
            done.with(error);
        }
    }
}
