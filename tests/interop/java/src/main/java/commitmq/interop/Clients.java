package commitmq.interop;

import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.AckStatus;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/** RocketMQ's own clients of one broker, made when they are first used. */
final class Clients {
    private static final long TIMEOUT_MS = 10_000;

    private final String names;
    private final String address;
    private final String broker;
    private final Map<String, TransactionMQProducer> transactional = new ConcurrentHashMap<>();
    private final Map<String, List<String>> asked = new ConcurrentHashMap<>();
    private DefaultMQProducer producer;

    /** The addresses of the name server and of the broker, and the broker's name. */
    Clients(String names, String address, String broker) {
        this.names = names;
        this.address = address;
        this.broker = broker;
    }

    Map<String, Object> send(String topic, String body, Map<String, String> properties) throws Exception {
        Message message = new Message(topic, body.getBytes(StandardCharsets.UTF_8));
        properties.forEach((name, value) -> MessageAccessor.putProperty(message, name, value));
        return place(producer().send(message));
    }

    String recall(String topic, String handle) throws Exception {
        return producer().recallMessage(topic, handle);
    }

    Map<String, Object> half(String group, String topic, String body, String state) throws Exception {
        return place(transactional(group, state).sendMessageInTransaction(
            new Message(topic, body.getBytes(StandardCharsets.UTF_8)), null));
    }

    void decide(String group, String state) throws Exception {
        transactional(group, state);
    }

    List<String> asked(String group) {
        return asked.getOrDefault(group, List.of());
    }

    List<MessageExt> pop(String group, String topic, long invisibleMs, int most, boolean ordered) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(-1);
        header.setMaxMsgNums(most);
        header.setInvisibleTime(invisibleMs);
        header.setPollTime(2_000);
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(1); // from the least offset on
        header.setExpType("TAG");
        header.setExp("*");
        header.setOrder(ordered);
        CompletableFuture<PopResult> done = new CompletableFuture<>();
        api().popMessageAsync(broker, address, header, TIMEOUT_MS, new PopCallback() {
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
        return found == null ? List.of() : found;
    }

    boolean ack(String group, String topic, int queue, long offset, String handle) throws Exception {
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(queue);
        header.setOffset(offset);
        header.setExtraInfo(handle);
        CompletableFuture<AckResult> done = new CompletableFuture<>();
        api().ackMessageAsync(address, TIMEOUT_MS, new AckCallback() {
            @Override
            public void onSuccess(AckResult result) {
                done.complete(result);
            }

            @Override
            public void onException(Throwable error) {
                done.completeExceptionally(error);
            }
        }, header);
        return done.get(TIMEOUT_MS, TimeUnit.MILLISECONDS).getStatus() == AckStatus.OK;
    }

    void close() {
        transactional.values().forEach(TransactionMQProducer::shutdown);
        if (producer != null) {
            producer.shutdown();
        }
    }

    DefaultMQProducer producer() throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer("interop");
            producer.setNamesrvAddr(names);
            producer.start();
        }
        return producer;
    }

    private MQClientAPIImpl api() throws Exception {
        return producer().getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl();
    }

    private TransactionMQProducer transactional(String group, String state) throws Exception {
        TransactionMQProducer known = transactional.get(group);
        if (known != null) {
            return known;
        }
        TransactionMQProducer made = new TransactionMQProducer(group);
        made.setNamesrvAddr(names);
        made.setInstanceName(group);
        made.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return state(state);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                asked.computeIfAbsent(group, name -> new CopyOnWriteArrayList<>())
                    .add(new String(message.getBody(), StandardCharsets.UTF_8));
                return state(state);
            }
        });
        made.start();
        // A producer that has sent nothing knows no broker, and tells none of its group.
        made.send(new Message("Greetings", new byte[] {'.'}));
        made.getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
        transactional.put(group, made);
        return made;
    }

    private static LocalTransactionState state(String word) {
        return switch (word) {
            case "commit" -> LocalTransactionState.COMMIT_MESSAGE;
            case "rollback" -> LocalTransactionState.ROLLBACK_MESSAGE;
            case "unknown" -> LocalTransactionState.UNKNOW;
            default -> throw new IllegalArgumentException("no state " + word);
        };
    }

    private static Map<String, Object> place(SendResult result) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("status", String.valueOf(result.getSendStatus()));
        fields.put("msg_id", result.getMsgId());
        fields.put("offset_msg_id", result.getOffsetMsgId());
        fields.put("queue_id", result.getMessageQueue().getQueueId());
        fields.put("queue_offset", result.getQueueOffset());
        fields.put("recall_handle", result.getRecallHandle());
        return fields;
    }
}
