package commitmq.bench.rocketmq;

import commitmq.bench.Peer;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.Queue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullCallback;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reads all queues at once with asynchronous long polls, one outstanding for each, as the push consumer does inside, but
 * without its groups and rebalancing. DefaultLitePullConsumer was tried: it keeps a thread waiting at each empty queue, of
 * 20 that it has, so that a hundred queues take minutes.
 */
@SuppressWarnings("deprecation") // What replaces the pull consumer is the lite one.
final class RocketMqReader implements Peer.Reader {
    private final DefaultMQPullConsumer consumer;
    private final int maxPulled;
    private final int maxAhead;
    private final List<Position> positions = new ArrayList<>();
    private final BlockingQueue<PullResult> fetched = new LinkedBlockingQueue<>();
    private final AtomicInteger ahead = new AtomicInteger();
    private final Queue<Position> paused = new ConcurrentLinkedQueue<>();
    private boolean started;
    private volatile boolean closed;

    /** Settings: how many messages one pull asks for, and how many fetched ones may wait to be read. */
    RocketMqReader(String nameServer, String topic, boolean atEnd, Properties settings) throws Exception {
        maxPulled = Integer.parseInt(settings.getProperty("maxNums of a pull"));
        maxAhead = Integer.parseInt(settings.getProperty("messages fetched ahead"));
        consumer = new DefaultMQPullConsumer("bench-reader");
        consumer.setNamesrvAddr(nameServer);
        consumer.start();
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
            positions.add(new Position(queue, atEnd ? consumer.maxOffset(queue) : 0));
        }
    }

    @Override
    public int poll(long timeoutMs, Peer.Sink sink) throws InterruptedException {
        if (!started) {
            started = true;
            positions.forEach(Position::fetch);
        }
        PullResult found = fetched.poll(timeoutMs, TimeUnit.MILLISECONDS);
        int messages = 0;
        if (found != null) {
            messages = found.getMsgFoundList().size();
            for (MessageExt message : found.getMsgFoundList()) {
                byte[] body = message.getBody();
                sink.accept(body, 0, body.length);
            }
            ahead.addAndGet(-messages);
        }
        resume();
        return messages;
    }

    @Override
    public void close() {
        closed = true;
        consumer.shutdown();
    }

    private void resume() {
        while (ahead.get() <= maxAhead / 2) {
            Position position = paused.poll();
            if (position == null) {
                return;
            }
            position.fetch();
        }
    }

    /** Where reading of one queue stands: has one pull outstanding, or is paused. */
    private final class Position implements PullCallback {
        private final MessageQueue queue;
        private volatile long next;

        Position(MessageQueue queue, long next) {
            this.queue = queue;
            this.next = next;
        }

        void fetch() {
            try {
                consumer.pullBlockIfNotFound(queue, "*", next, maxPulled, this);
            } catch (Exception error) {
                onException(error);
            }
        }

        @Override
        public void onSuccess(PullResult result) {
            next = result.getNextBeginOffset();
            if (result.getPullStatus() == PullStatus.FOUND) {
                int messages = result.getMsgFoundList().size();
                int waiting = ahead.addAndGet(messages);
                fetched.add(result);
                if (waiting > maxAhead) {
                    paused.add(this);
                    // The reader may have taken everything before it could see this queue paused.
                    resume();
                    return;
                }
            }
            fetch();
        }

        @Override
        public void onException(Throwable error) {
            if (!closed) {
                System.err.println("a pull of " + queue + " failed: " + error);
                // The reader's next look tries it again.
                paused.add(this);
            }
        }
    }
}
