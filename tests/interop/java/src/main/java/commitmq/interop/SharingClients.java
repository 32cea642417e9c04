package commitmq.interop;

import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;

/** RocketMQ's clients that look messages up, request and reply, cancel, and share queues. */
final class SharingClients {
    private static final long TIMEOUT_MS = 10_000;
    private static final long HOUR_MS = 3_600_000;

    private final String names;
    private final String address;
    private final String broker;
    private final Clients clients;
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();
    private final Map<String, List<Object>> received = new ConcurrentHashMap<>();

    SharingClients(String names, String address, String broker, Clients clients) {
        this.names = names;
        this.address = address;
        this.broker = broker;
        this.clients = clients;
    }

    Object answer(String[] words) throws Exception {
        DefaultMQProducer producer = clients.producer();
        switch (words[0]) {
            case "key":
                long now = System.currentTimeMillis();
                QueryResult found = producer.queryMessage(words[1], words[2], 32, now - HOUR_MS, now + HOUR_MS);
                return ClientTool.lines(found.getMessageList());
            case "unique":
            case "view":
                return ClientTool.lines(List.of(producer.viewMessage(words[1], words[2])));
            case "recall":
                return producer.recallMessage(words[1], words[2]);
            case "request":
                // A broker finds the requester by its heartbeats. On a busy machine the one at its connection may fail, and
                // the next one is half a minute away.
                producer.getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
                Message request = new Message(words[1], words[2].getBytes(StandardCharsets.UTF_8));
                return text(producer.request(request, Long.parseLong(words[3])));
            case "answer":
                return reply(words[1], words[2]);
            case "mode":
                api().setMessageRequestMode(address, words[2], words[1], MessageRequestMode.valueOf(words[3]),
                    Integer.parseInt(words[4]), TIMEOUT_MS);
                return true;
            case "push":
                return push(words[1], words[2], words[3], Integer.parseInt(words[4]));
            case "received":
                return received.getOrDefault(words[1], List.of());
            case "stop":
                consumers.remove(words[1]).shutdown();
                return true;
            case "extend":
                return extend(words);
            default:
                throw new IllegalArgumentException("unknown command " + words[0]);
        }
    }

    void close() {
        consumers.values().forEach(DefaultMQPushConsumer::shutdown);
    }

    private boolean push(String group, String topic, String expression, int failures) throws Exception {
        DefaultMQPushConsumer consumer = consumer(group, topic, expression);
        consumer.setClientRebalance(false);
        List<Object> got = received.computeIfAbsent(group, name -> new CopyOnWriteArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean fails = false;
            for (MessageExt message : messages) {
                got.add(List.of(text(message), message.getReconsumeTimes(), message.getTopic(), message.getQueueId()));
                fails |= message.getReconsumeTimes() < failures;
            }
            return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return true;
    }

    private boolean reply(String group, String topic) throws Exception {
        DefaultMQPushConsumer consumer = consumer(group, topic, "*");
        DefaultMQProducer producer = clients.producer();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                try {
                    byte[] body = ("re: " + text(message)).getBytes(StandardCharsets.UTF_8);
                    producer.send(MessageUtil.createReplyMessage(message, body));
                } catch (Exception error) {
                    error.printStackTrace();
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return true;
    }

    private DefaultMQPushConsumer consumer(String group, String topic, String expression) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName(group);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.subscribe(topic, expression);
        consumers.put(group, consumer);
        return consumer;
    }

    private Object extend(String[] words) throws Exception {
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setConsumerGroup(words[1]);
        header.setTopic(words[2]);
        header.setQueueId(Integer.parseInt(words[3]));
        header.setOffset(Long.parseLong(words[4]));
        header.setExtraInfo(words[5]);
        header.setInvisibleTime(Long.parseLong(words[6]));
        CompletableFuture<AckResult> done = new CompletableFuture<>();
        api().changeInvisibleTimeAsync(broker, address, header, TIMEOUT_MS, new AckCallback() {
            @Override
            public void onSuccess(AckResult result) {
                done.complete(result);
            }

            @Override
            public void onException(Throwable error) {
                done.completeExceptionally(error);
            }
        });
        AckResult result = done.get(TIMEOUT_MS, TimeUnit.MILLISECONDS);
        return Map.of("status", String.valueOf(result.getStatus()), "handle", String.valueOf(result.getExtraInfo()));
    }

    private MQClientAPIImpl api() throws Exception {
        return clients.producer().getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl();
    }

    private static String text(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }
}
