package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;

/**
 * A whole RocketMQ on a store root: its name server, its broker and its clients, driven by lines on standard input.
 *
 * <pre>
 *   BrokerTool ROOT [--set key=value]...      (keys of broker.conf)
 * </pre>
 *
 * With the key namesrvAddr the broker and the clients use that name server, and none is started.
 *
 * Each command is words with tabs between. Each answer is one line of JSON: {"ok": …} or {"failed": "…"}.
 * <pre>
 *   read TOPIC                          the messages of each queue of the topic that are visible now
 *   send TOPIC BODY [NAME VALUE]...     a message with these properties; answers its place
 *   recall TOPIC HANDLE                 cancels a message with a time of its own
 *   half GROUP TOPIC BODY STATE         a transactional send whose local transaction ends in STATE (commit, rollback, unknown)
 *   decide GROUP STATE                  a producer of GROUP that answers check-backs with STATE
 *   asked GROUP                         the bodies of the messages that it was asked about
 *   pop GROUP TOPIC INVISIBLE_MS MAX [ordered]    messages with their receipt handles (property POP_CK)
 *   ack GROUP TOPIC QUEUE OFFSET HANDLE
 *   names                               the address of the name server
 *   quit                                shut down in order
 * </pre>
 */
public final class BrokerTool {
    private static final int PULL_MESSAGES = 32;
    private static final int READY_MS = 60_000;

    private final MessageJson json = new MessageJson();
    /** Null when the name server is another program. */
    private final NamesrvController names;
    private final BrokerController broker;
    private final Clients clients;

    private BrokerTool(Path root, Properties settings) throws Exception {
        BrokerConfig config = new BrokerConfig();
        int namesPort = Integer.parseInt(settings.getProperty("namesPort", String.valueOf(freePort())));
        config.setNamesrvAddr("127.0.0.1:" + namesPort);
        names = settings.containsKey("namesrvAddr") ? null : startNames(root, namesPort);
        config.setBrokerName("b0");
        config.setBrokerClusterName("C");
        config.setBrokerIP1("127.0.0.1");
        config.setBrokerIP2("127.0.0.1");
        config.setTransactionCheckInterval(1_000);
        config.setTransactionTimeOut(1_000);
        MessageStoreConfig store = new MessageStoreConfig();
        store.setStorePathRootDir(root.toString());
        store.setStorePathCommitLog(root.resolve("commitlog").toString());
        store.setHaListenPort(freePort());
        store.setFileReservedTime(24 * 365);
        store.setDiskMaxUsedSpaceRatio(95);
        NettyServerConfig net = new NettyServerConfig();
        net.setBindAddress("127.0.0.1");
        net.setListenPort(freePort());
        for (Object part : new Object[] {config, store, net}) {
            MixAll.properties2Object(settings, part);
        }
        broker = new BrokerController(config, net, new NettyClientConfig(), store);
        require(broker.initialize(), "the broker does not initialise: it refuses the store");
        broker.start();
        awaitDispatch();
        awaitRoute();
        clients = new Clients(config.getNamesrvAddr(), "127.0.0.1:" + net.getListenPort(), "b0");
    }

    private static NamesrvController startNames(Path root, int port) throws Exception {
        NettyServerConfig net = new NettyServerConfig();
        net.setListenPort(port);
        net.setBindAddress("127.0.0.1");
        NamesrvConfig config = new NamesrvConfig();
        config.setKvConfigPath(root.resolveSibling(root.getFileName() + ".kv.json").toString());
        NamesrvController names = new NamesrvController(config, net);
        require(names.initialize(), "the name server does not initialise");
        names.start();
        return names;
    }

    public static void main(String[] arguments) {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        int status = 0;
        // As RocketMQ's start scripts do: requests without a version would be taken for those of an early release.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        try {
            Properties settings = new Properties();
            for (int at = 1; at < arguments.length; at += 2) {
                String[] pair = arguments[at + 1].split("=", 2);
                settings.setProperty(pair[0], pair[1]);
            }
            BrokerTool tool = new BrokerTool(Path.of(arguments[0]), settings);
            out.println(JSON.toJSONString(Map.of("ok", "ready")));
            tool.serve(out);
        } catch (Throwable error) {
            error.printStackTrace();
            out.println(JSON.toJSONString(Map.of("failed", String.valueOf(error))));
            status = 1;
        }
        Runtime.getRuntime().halt(status);
    }

    private void serve(PrintStream out) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t", -1);
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", answer(words));
            } catch (Exception error) {
                answer.put("failed", String.valueOf(error));
            }
            out.println(JSON.toJSONString(answer));
            if (words[0].equals("quit")) {
                return;
            }
        }
    }

    private Object answer(String[] words) throws Exception {
        switch (words[0]) {
            case "read":
                return read(words[1]);
            case "send":
                Map<String, String> properties = new TreeMap<>();
                for (int at = 3; at < words.length; at += 2) {
                    properties.put(words[at], words[at + 1]);
                }
                return clients.send(words[1], words[2], properties);
            case "recall":
                return clients.recall(words[1], words[2]);
            case "half":
                return clients.half(words[1], words[2], words[3], words[4]);
            case "decide":
                clients.decide(words[1], words[2]);
                return true;
            case "asked":
                return clients.asked(words[1]);
            case "pop":
                List<Object> popped = new ArrayList<>();
                long invisibleMs = Long.parseLong(words[3]);
                for (MessageExt message : clients.pop(words[1], words[2], invisibleMs, Integer.parseInt(words[4]), words.length > 5)) {
                    popped.add(JSON.parseObject(json.line(message)));
                }
                return popped;
            case "ack":
                return clients.ack(words[1], words[2], Integer.parseInt(words[3]), Long.parseLong(words[4]), words[5]);
            case "names":
                return broker.getBrokerConfig().getNamesrvAddr();
            case "quit":
                clients.close();
                broker.shutdown();
                if (names != null) {
                    names.shutdown();
                }
                return true;
            default:
                throw new IllegalArgumentException("unknown command " + words[0]);
        }
    }

    private List<Object> read(String topic) throws Exception {
        List<Object> found = new ArrayList<>();
        DefaultMessageStore store = (DefaultMessageStore) broker.getMessageStore();
        var queues = store.getConsumeQueueTable().get(topic);
        if (queues == null) {
            return found;
        }
        for (ConsumeQueueInterface queue : new TreeMap<>(queues).values()) {
            long offset = Math.max(0, queue.getMinOffsetInQueue());
            while (offset < queue.getMaxOffsetInQueue()) {
                GetMessageResult result =
                    store.getMessage("interop", topic, queue.getQueueId(), offset, PULL_MESSAGES, null);
                if (result.getStatus() != GetMessageStatus.FOUND) {
                    break;
                }
                for (ByteBuffer record : result.getMessageBufferList()) {
                    found.add(JSON.parseObject(json.line(json.decode(record))));
                }
                offset = result.getNextBeginOffset();
                result.release();
            }
        }
        return found;
    }

    private void awaitDispatch() throws InterruptedException {
        long deadline = System.currentTimeMillis() + READY_MS;
        while (broker.getMessageStore().dispatchBehindBytes() > 0) {
            require(System.currentTimeMillis() < deadline, "the log is not dispatched");
            Thread.sleep(10);
        }
    }

    /** Clients find a topic only after the broker has told the name server of it. */
    private void awaitRoute() throws InterruptedException {
        long deadline = System.currentTimeMillis() + READY_MS;
        while (!hasRoute()) {
            require(System.currentTimeMillis() < deadline, "the broker does not register with the name server");
            broker.registerBrokerAll(true, false, true);
            Thread.sleep(100);
        }
    }

    private boolean hasRoute() {
        try {
            return broker.getBrokerOuterAPI().getTopicRouteInfoFromNameServer("TBW102", READY_MS) != null;
        } catch (Exception error) {
            return false;
        }
    }

    private static int freePort() throws Exception {
        try (ServerSocket socket = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
            return socket.getLocalPort();
        }
    }

    private static void require(boolean holds, String otherwise) {
        if (!holds) {
            throw new IllegalStateException(otherwise);
        }
    }
}
