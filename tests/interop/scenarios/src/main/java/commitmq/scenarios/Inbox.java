package commitmq.scenarios;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.Predicate;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.message.MessageExt;

/** Keeps what push consumers got. */
public final class Inbox {
    private final List<MessageExt> messages = new CopyOnWriteArrayList<>();
    private final Predicate<MessageExt> handles;
    private final int retryLevel;

    /** All messages succeed. */
    public Inbox() {
        this(message -> true, 0);
    }

    /** A message for which {@code handles} is false fails, and comes again after the delay level {@code retryLevel}. */
    Inbox(Predicate<MessageExt> handles, int retryLevel) {
        this.handles = handles;
        this.retryLevel = retryLevel;
    }

    /** For a concurrent consumer. */
    public MessageListenerConcurrently concurrently() {
        return this::consume;
    }

    /** For an ordered one. */
    MessageListenerOrderly orderly() {
        return this::consume;
    }

    private ConsumeConcurrentlyStatus consume(List<MessageExt> batch, ConsumeConcurrentlyContext context) {
        messages.addAll(batch);
        context.setDelayLevelWhenNextConsume(retryLevel);
        return batch.stream().allMatch(handles) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
            : ConsumeConcurrentlyStatus.RECONSUME_LATER;
    }

    private ConsumeOrderlyStatus consume(List<MessageExt> batch, ConsumeOrderlyContext context) {
        // The client counts up in the message itself when it offers it again.
        List<MessageExt> copies = new ArrayList<>();
        batch.forEach(message -> copies.add(copy(message)));
        messages.addAll(copies);
        context.setSuspendCurrentQueueTimeMillis(100);
        return batch.stream().allMatch(handles) ? ConsumeOrderlyStatus.SUCCESS
            : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
    }

    private static MessageExt copy(MessageExt message) {
        MessageExt copy = new MessageExt(message.getQueueId(), message.getBornTimestamp(), message.getBornHost(),
            message.getStoreTimestamp(), message.getStoreHost(), message.getMsgId());
        copy.setTopic(message.getTopic());
        copy.setBody(message.getBody());
        copy.setFlag(message.getFlag());
        copy.setSysFlag(message.getSysFlag());
        copy.setQueueOffset(message.getQueueOffset());
        copy.setReconsumeTimes(message.getReconsumeTimes());
        message.getProperties().forEach((name, value) ->
            org.apache.rocketmq.common.message.MessageAccessor.putProperty(copy, name, value));
        return copy;
    }

    int size() {
        return messages.size();
    }

    /** What came until now, as it came. */
    public List<MessageExt> messages() {
        return new ArrayList<>(messages);
    }

    /** Waits for {@code count} messages and a moment longer, in which none may come twice. */
    public Inbox await(int count) throws Exception {
        Stage.await(() -> messages.size() >= count, count + " messages", () -> Seen.bodies(messages()));
        Thread.sleep(Stage.MOMENT_MS);
        return this;
    }

    /** See {@link Seen#lines}. */
    public List<Object> lines() {
        return Seen.lines(messages());
    }
}
