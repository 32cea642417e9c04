package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * A producer and consumers of several brokers, driven by lines on standard input.
 *
 * <pre>
 *   ClusterTool NAME_SERVER [serve]      (with "serve" RocketMQ's name server is started at that address)
 * </pre>
 *
 * Commands and answers as those of {@link BrokerTool}:
 * <pre>
 *   begin TOPIC PAUSE_MS     a producer sends messages 0, 1, 2 … one after the other; what fails is not sent again
 *   sent                     bodies that were acknowledged, by broker
 *   failed                   how many sends failed, and the last failure
 *   end                      the producer ends
 *   consume GROUP TOPIC      one more push consumer of the group
 *   got GROUP                bodies that its consumers had, by broker; a body may be there several times
 *   share GROUP              how many messages each of its consumers had
 *   stop GROUP               its consumers end
 *   quit
 * </pre>
 */
public final class ClusterTool {
    private static final int LOOK_MS = 1_000;
    private static final int AFTER_FAILURE_MS = 50;

    private final String names;
    private final Map<String, ConcurrentLinkedQueue<String>> sent = new ConcurrentHashMap<>();
    private final Map<String, List<DefaultMQPushConsumer>> consumers = new ConcurrentHashMap<>();
    private final Map<String, Map<String, ConcurrentLinkedQueue<String>>> got = new ConcurrentHashMap<>();
    private final Map<String, List<AtomicInteger>> shares = new ConcurrentHashMap<>();
    private final AtomicInteger failures = new AtomicInteger();
    private volatile String lastFailure = "";
    private volatile boolean sends;
    private Thread sender;
    private DefaultMQProducer producer;

    private ClusterTool(String names) {
        this.names = names;
    }

    public static void main(String[] arguments) {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        int status = 0;
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        System.setProperty("rocketmq.client.rebalance.waitInterval", Integer.toString(LOOK_MS));
        try {
            if (arguments.length > 1) {
                startNames(Integer.parseInt(arguments[0].substring(arguments[0].lastIndexOf(':') + 1)));
            }
            ClusterTool tool = new ClusterTool(arguments[0]);
            out.println(JSON.toJSONString(Map.of("ok", "ready")));
            tool.serve(out);
        } catch (Throwable error) {
            error.printStackTrace();
            out.println(JSON.toJSONString(Map.of("failed", String.valueOf(error))));
            status = 1;
        }
        Runtime.getRuntime().halt(status);
    }

    private static void startNames(int port) throws Exception {
        NamesrvConfig config = new NamesrvConfig();
        config.setKvConfigPath(Files.createTempDirectory("names").resolve("kv.json").toString());
        NettyServerConfig net = new NettyServerConfig();
        net.setListenPort(port);
        net.setBindAddress("127.0.0.1");
        NamesrvController controller = new NamesrvController(config, net);
        if (!controller.initialize()) {
            throw new IllegalStateException("the name server does not initialise");
        }
        controller.start();
    }

    private void serve(PrintStream out) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t", -1);
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", answer(words));
            } catch (Exception error) {
                error.printStackTrace();
                answer.put("refused", String.valueOf(error));
            }
            out.println(JSON.toJSONString(answer));
            if (words[0].equals("quit")) {
                return;
            }
        }
    }

    private Object answer(String[] words) throws Exception {
        switch (words[0]) {
            case "begin":
                begin(words[1], Integer.parseInt(words[2]));
                return true;
            case "sent":
                return sent;
            case "failed":
                return List.of(failures.get(), lastFailure);
            case "end":
                sends = false;
                sender.join();
                return true;
            case "consume":
                consume(words[1], words[2]);
                return true;
            case "got":
                return got.getOrDefault(words[1], Map.of());
            case "share":
                return shares.getOrDefault(words[1], List.of());
            case "stop":
                consumers.remove(words[1]).forEach(DefaultMQPushConsumer::shutdown);
                return true;
            case "quit":
                consumers.values().forEach(all -> all.forEach(DefaultMQPushConsumer::shutdown));
                if (producer != null) {
                    producer.shutdown();
                }
                return true;
            default:
                throw new IllegalArgumentException("unknown command " + words[0]);
        }
    }

    private void begin(String topic, int pauseMs) throws Exception {
        producer = new DefaultMQProducer("cluster");
        producer.setNamesrvAddr(names);
        producer.setPollNameServerInterval(LOOK_MS);
        producer.start();
        sends = true;
        sender = new Thread(() -> {
            for (int number = 0; sends; number++) {
                String body = "message " + number;
                try {
                    SendResult result = producer.send(new Message(topic, body.getBytes(StandardCharsets.UTF_8)));
                    if (result.getSendStatus() == SendStatus.SEND_OK) {
                        String broker = result.getMessageQueue().getBrokerName();
                        sent.computeIfAbsent(broker, name -> new ConcurrentLinkedQueue<>()).add(body);
                    }
                    pause(pauseMs);
                } catch (Exception error) {
                    failures.incrementAndGet();
                    lastFailure = String.valueOf(error);
                    pause(AFTER_FAILURE_MS);
                }
            }
        });
        sender.start();
    }

    private static void pause(int ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private void consume(String group, String topic) throws Exception {
        List<DefaultMQPushConsumer> members = consumers.computeIfAbsent(group, name -> new CopyOnWriteArrayList<>());
        List<AtomicInteger> counts = shares.computeIfAbsent(group, name -> new CopyOnWriteArrayList<>());
        Map<String, ConcurrentLinkedQueue<String>> bodies = got.computeIfAbsent(group, name -> new ConcurrentHashMap<>());
        AtomicInteger count = new AtomicInteger();
        counts.add(count);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName(group + "-" + counts.size());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPollNameServerInterval(LOOK_MS);
        consumer.setHeartbeatBrokerInterval(LOOK_MS);
        consumer.setPersistConsumerOffsetInterval(LOOK_MS);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                String broker = context.getMessageQueue().getBrokerName();
                bodies.computeIfAbsent(broker, name -> new ConcurrentLinkedQueue<>())
                    .add(new String(message.getBody(), StandardCharsets.UTF_8));
                count.incrementAndGet();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        members.add(consumer);
    }
}
