package commitmq.scenarios;

import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Where a scenario runs: one broker and its name server, with clients that end together with it. */
public final class Stage implements AutoCloseable {
    static final long MOMENT_MS = 400;
    static final int CALL_MS = 10_000;
    private static final long PATIENCE_MS = 60_000;
    private static final int OFTEN_MS = 500;

    final String names;
    /** The broker's address. */
    final String address;
    final Edition edition;
    private final String name;
    private final String side;
    private final Deque<Runnable> ends = new ArrayDeque<>();
    private DefaultMQProducer producer;
    private DefaultMQPullConsumer puller;
    private int clients;

    /** {@code side} tells the clients of one broker from those of another in the same process. */
    Stage(String name, String side, String names, String address, Edition edition) {
        this.name = name;
        this.side = side;
        this.names = names;
        this.address = address;
        this.edition = edition;
    }

    // ------------------------------------------------------------ names and topics

    /** A topic's or a group's name that no other scenario has. */
    public String own(String word) {
        return name + "-" + word;
    }

    /** A new topic, whose route is known. */
    public String topic(String word, int queues) throws Exception {
        return topic(word, queues, 6);
    }

    String topic(String word, int queues, int perm) throws Exception {
        String topic = own(word);
        api().createTopic(address, "TBW102", new TopicConfig(topic, queues, queues, perm), CALL_MS);
        await(() -> api().getTopicRouteInfoFromNameServer(topic, CALL_MS) != null, "the route of " + topic, () -> "");
        return topic;
    }

    public String address() {
        return address;
    }

    // ------------------------------------------------------------ clients

    /** Tells a client where it is and what it is called; it ends with the scenario by {@code end}. */
    public <T extends ClientConfig> T client(T client, Runnable end) {
        client.setNamesrvAddr(names);
        client.setInstanceName(own(side + clients++));
        client.setPollNameServerInterval(OFTEN_MS);
        client.setHeartbeatBrokerInterval(OFTEN_MS);
        client.setPersistConsumerOffsetInterval(OFTEN_MS);
        client.setMqClientApiTimeout(CALL_MS);
        if (client instanceof DefaultMQProducer sender) {
            sender.setSendMsgTimeout(CALL_MS);
        }
        ends.push(end);
        return client;
    }

    /** The scenario's usual producer. */
    public DefaultMQProducer producer() throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer(own("producer"));
            client(producer, producer::shutdown);
            producer.start();
        }
        return producer;
    }

    public MQClientAPIImpl api() throws Exception {
        return producer().getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl();
    }

    /** A push consumer of a group of this name; it is not started. */
    public DefaultMQPushConsumer consumer(String word) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(own(word));
        client(consumer, consumer::shutdown);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    /** A concurrent push consumer of one topic that runs. */
    DefaultMQPushConsumer push(String word, String topic, String expression, Inbox inbox) throws Exception {
        DefaultMQPushConsumer consumer = consumer(word);
        consumer.subscribe(topic, expression);
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        return consumer;
    }

    /** The scenario's usual pull consumer. */
    DefaultMQPullConsumer puller() throws Exception {
        if (puller == null) {
            puller = new DefaultMQPullConsumer(own("puller"));
            client(puller, puller::shutdown);
            puller.start();
        }
        return puller;
    }

    // ------------------------------------------------------------ messages

    public static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    /** Sends plain messages, one after the other. */
    public void send(String topic, String... bodies) throws Exception {
        for (String body : bodies) {
            producer().send(new Message(topic, bytes(body)));
        }
    }

    /** Sends to one queue. */
    void sendTo(String topic, int queue, String... bodies) throws Exception {
        for (String body : bodies) {
            producer().send(new Message(topic, bytes(body)), queue(topic, queue));
        }
    }

    static MessageQueue queue(String topic, int queue) {
        return new MessageQueue(topic, "commitmq", queue);
    }

    /** All messages of a topic by queue and offset, as soon as there are {@code count}. */
    public List<MessageExt> stored(String topic, int count) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        await(() -> {
            found.clear();
            found.addAll(all(topic));
            return found.size() >= count;
        }, count + " messages in " + topic, () -> Seen.bodies(found));
        return found;
    }

    private List<MessageExt> all(String topic) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        for (MessageQueue queue : new TreeSet<>(puller().fetchSubscribeMessageQueues(topic))) {
            long at = puller().minOffset(queue);
            for (long end = puller().maxOffset(queue); at < end;) {
                PullResult result = puller().pull(queue, "*", at, 32, CALL_MS);
                if (result.getPullStatus() == PullStatus.FOUND) {
                    found.addAll(result.getMsgFoundList());
                }
                if (result.getNextBeginOffset() <= at) {
                    break;
                }
                at = result.getNextBeginOffset();
            }
        }
        return found;
    }

    // ------------------------------------------------------------ waiting

    /** Waits until {@code condition} is true. An exception in it counts as not yet true. */
    public static void await(Callable<Boolean> condition, String what, Callable<?> found) throws Exception {
        long deadline = System.nanoTime() + PATIENCE_MS * 1_000_000;
        Exception last = null;
        while (true) {
            try {
                if (condition.call()) {
                    return;
                }
                last = null;
            } catch (Exception error) {
                last = error;
            }
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("not within " + PATIENCE_MS + " ms: " + what + "; there is " + found.call(), last);
            }
            Thread.sleep(20);
        }
    }

    @Override
    public void close() {
        ends.forEach(end -> {
            try {
                end.run();
            } catch (RuntimeException error) {
                error.printStackTrace();
            }
        });
    }
}
