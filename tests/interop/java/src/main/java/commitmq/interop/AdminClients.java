package commitmq.interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Clients that make the state which administration shows. Their ids are {@code 127.0.0.1@GROUP}.
 *
 * <pre>
 *   producer GROUP TOPIC                     a producer that stays; it sends nothing
 *   send TOPIC QUEUE BODY [NAME VALUE]...    its unique id, its offset id
 *   traced TOPIC QUEUE BODY                  the same, by a producer that writes traces
 *   push GROUP TOPIC EXPRESSION FAILURES MOST    a push consumer; each message fails FAILURES times, and is dead after MOST
 *   received GROUP                           the bodies that it got
 *   persist GROUP                            store its offsets now
 *   stop GROUP
 *   half GROUP TOPIC BODY STATE, pop GROUP TOPIC MAX, ack GROUP TOPIC QUEUE OFFSET HANDLE     see {@link BrokerTool}
 * </pre>
 */
final class AdminClients {
    private final String names;
    private final String broker;
    private final Clients clients;
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();
    private final Map<String, List<String>> received = new ConcurrentHashMap<>();

    AdminClients(String names, String address, String broker) {
        this.names = names;
        this.broker = broker;
        this.clients = new Clients(names, address, broker);
    }

    Object answer(String verb, String[] words) throws Exception {
        switch (verb) {
            case "producer":
                DefaultMQProducer producer = producer(words[0]);
                producer.fetchPublishMessageQueues(words[1]);
                producer.getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
                return true;
            case "send":
                return send(producer("PG"), words);
            case "traced":
                return send(producer("PTraced"), words);
            case "push":
                return push(words[0], words[1], words[2], Integer.parseInt(words[3]), Integer.parseInt(words[4]));
            case "received":
                return received.getOrDefault(words[0], List.of());
            case "persist":
                consumers.get(words[0]).getDefaultMQPushConsumerImpl().persistConsumerOffset();
                return true;
            case "stop":
                consumers.remove(words[0]).shutdown();
                return true;
            case "half":
                return clients.half(words[0], words[1], words[2], words[3]);
            case "pop":
                List<Object> popped = new ArrayList<>();
                for (MessageExt message : clients.pop(words[0], words[1], 600_000, Integer.parseInt(words[2]), false)) {
                    popped.add(Map.of("queue", message.getQueueId(), "offset", message.getQueueOffset(),
                        "handle", message.getProperty("POP_CK")));
                }
                return popped;
            case "ack":
                return clients.ack(words[0], words[1], Integer.parseInt(words[2]), Long.parseLong(words[3]), words[4]);
            default:
                throw new IllegalArgumentException("unknown command " + verb);
        }
    }

    void close() {
        consumers.values().forEach(DefaultMQPushConsumer::shutdown);
        producers.values().forEach(DefaultMQProducer::shutdown);
        clients.close();
    }

    private DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer known = producers.get(group);
        if (known != null) {
            return known;
        }
        DefaultMQProducer made = new DefaultMQProducer(group, group.equals("PTraced"), null);
        made.setNamesrvAddr(names);
        made.setInstanceName(group);
        made.setClientIP("127.0.0.1");
        made.start();
        producers.put(group, made);
        return made;
    }

    private Object send(DefaultMQProducer producer, String[] words) throws Exception {
        Message message = new Message(words[0], words[2].getBytes(StandardCharsets.UTF_8));
        for (int at = 3; at < words.length; at += 2) {
            MessageAccessor.putProperty(message, words[at], words[at + 1]);
        }
        MessageQueue queue = new MessageQueue(words[0], broker, Integer.parseInt(words[1]));
        SendResult result = producer.send(message, queue);
        Map<String, Object> ids = new LinkedHashMap<>();
        ids.put("unique", result.getMsgId());
        ids.put("offset", result.getOffsetMsgId());
        return ids;
    }

    private boolean push(String group, String topic, String expression, int failures, int most) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName(group);
        consumer.setClientIP("127.0.0.1");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(most);
        consumer.subscribe(topic, expression);
        List<String> got = received.computeIfAbsent(group, name -> new CopyOnWriteArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean fails = false;
            for (MessageExt message : messages) {
                got.add(new String(message.getBody(), StandardCharsets.UTF_8));
                fails |= message.getReconsumeTimes() < failures;
            }
            return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        consumers.put(group, consumer);
        return true;
    }
}
