package commitmq.bench.rocketmq;

import commitmq.bench.Peer;
import commitmq.bench.Semantics;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.AckStatus;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/** POP and batch acks with the requests of RocketMQ's client; its push consumer hides them. */
final class RocketMqSharer implements Semantics.Sharer {
    private static final long TIMEOUT_MS = 30_000;
    private static final long INVISIBLE_MS = 60_000;
    private static final int FROM_THE_FIRST = 0;
    private static final String BROKER = "bench";

    private final DefaultMQProducer owner;
    private final String address;
    private final String topic;
    private final String group;
    private final List<String> handles = new ArrayList<>();

    /** {@code owner}: a started client, which this one closes. */
    RocketMqSharer(DefaultMQProducer owner, String address, String topic, String group) {
        this.owner = owner;
        this.address = address;
        this.topic = topic;
        this.group = group;
    }

    @Override
    public int receive(int most, long timeoutMs, Peer.Sink sink) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(-1);
        header.setMaxMsgNums(most);
        header.setInvisibleTime(INVISIBLE_MS);
        header.setPollTime(timeoutMs);
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(FROM_THE_FIRST);
        header.setExpType("TAG");
        header.setExp("*");
        CompletableFuture<PopResult> done = new CompletableFuture<>();
        api().popMessageAsync(BROKER, address, header, TIMEOUT_MS, new PopCallback() {
            @Override
            public void onSuccess(PopResult result) {
                done.complete(result);
            }

            @Override
            public void onException(Throwable error) {
                done.completeExceptionally(error);
            }
        });
        List<MessageExt> found = done.get(TIMEOUT_MS, TimeUnit.MILLISECONDS).getMsgFoundList();
        handles.clear();
        if (found == null) {
            return 0;
        }
        for (MessageExt message : found) {
            byte[] body = message.getBody();
            sink.accept(body, 0, body.length);
            handles.add(message.getProperty(MessageConst.PROPERTY_POP_CK));
        }
        return found.size();
    }

    @Override
    public void ackReceived() throws Exception {
        CompletableFuture<AckResult> done = new CompletableFuture<>();
        api().batchAckMessageAsync(
                address,
                TIMEOUT_MS,
                new AckCallback() {
                    @Override
                    public void onSuccess(AckResult result) {
                        done.complete(result);
                    }

                    @Override
                    public void onException(Throwable error) {
                        done.completeExceptionally(error);
                    }
                },
                topic,
                group,
                handles);
        AckResult result = done.get(TIMEOUT_MS, TimeUnit.MILLISECONDS);
        if (result.getStatus() != AckStatus.OK) {
            throw new IllegalStateException("the broker took no ack: " + result);
        }
    }

    @Override
    public void close() {
        owner.shutdown();
    }

    private MQClientAPIImpl api() {
        return owner.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl();
    }
}
