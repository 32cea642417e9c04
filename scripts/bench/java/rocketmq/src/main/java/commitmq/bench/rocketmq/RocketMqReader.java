package commitmq.bench.rocketmq;

import commitmq.bench.Peer;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Properties;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** A DefaultLitePullConsumer with all queues of the topic assigned to it; it fetches ahead by itself. */
final class RocketMqReader implements Peer.Reader {
    private final DefaultLitePullConsumer consumer;
    private final Collection<MessageQueue> queues;
    private boolean assigned;

    RocketMqReader(String nameServer, String topic, boolean atEnd, Properties settings) throws Exception {
        consumer = new DefaultLitePullConsumer("bench-reader-" + System.nanoTime());
        consumer.setNamesrvAddr(nameServer);
        MixAll.properties2Object(settings, consumer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        queues = consumer.fetchMessageQueues(topic);
        if (atEnd) {
            assign();
            for (MessageQueue queue : queues) {
                consumer.seekToEnd(queue);
            }
        }
    }

    @Override
    public int poll(long timeoutMs, Peer.Sink sink) {
        if (!assigned) {
            // Fetching begins with the assignment, so that the clock must run by now.
            assign();
        }
        List<MessageExt> found = consumer.poll(timeoutMs);
        for (MessageExt message : found) {
            byte[] body = message.getBody();
            sink.accept(body, 0, body.length);
        }
        return found.size();
    }

    @Override
    public void close() {
        consumer.shutdown();
    }

    private void assign() {
        consumer.assign(new ArrayList<>(queues));
        assigned = true;
    }
}
