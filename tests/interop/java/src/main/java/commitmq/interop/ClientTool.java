package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * RocketMQ's clients of a broker that runs elsewhere, driven by lines on standard input, with a name server.
 *
 * <pre>
 *   ClientTool NAME_SERVER_PORT BROKER_NAME BROKER_ADDRESS      (with port 0 no name server is started)
 * </pre>
 *
 * Commands and answers as those of {@link BrokerTool}, and:
 * <pre>
 *   key TOPIC KEY, unique TOPIC ID, view TOPIC ID     messages
 *   recall TOPIC HANDLE                               the id of the cancelled message
 *   request TOPIC BODY TIMEOUT_MS                     the reply's body
 *   answer GROUP TOPIC                                a push consumer that replies to requests
 *   mode GROUP TOPIC POP|PULL SHARE                   how the group receives the topic
 *   push GROUP TOPIC EXPRESSION FAILURES              a push consumer without client side balance; each message fails FAILURES times
 *   received GROUP                                    what it got: body, reconsume times and topic
 *   stop GROUP
 *   extend GROUP TOPIC QUEUE OFFSET HANDLE MS         the new receipt handle
 * </pre>
 */
public final class ClientTool {
    private static final MessageJson LINES = new MessageJson();

    private ClientTool() {
    }

    public static void main(String[] arguments) {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        int status = 0;
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        try {
            int port = Integer.parseInt(arguments[0]);
            NamesrvConfig config = new NamesrvConfig();
            config.setKvConfigPath(Files.createTempDirectory("names").resolve("kv.json").toString());
            NettyServerConfig net = new NettyServerConfig();
            net.setListenPort(port);
            net.setBindAddress("127.0.0.1");
            NamesrvController names = new NamesrvController(config, net);
            if (!names.initialize()) {
                throw new IllegalStateException("the name server does not initialise");
            }
            names.start();
            Clients clients = new Clients("127.0.0.1:" + port, arguments[2], arguments[1]);
            out.println(JSON.toJSONString(Map.of("ok", "ready")));
            serve(clients, new SharingClients("127.0.0.1:" + port, arguments[2], arguments[1], clients), out);
        } catch (Throwable error) {
            error.printStackTrace();
            out.println(JSON.toJSONString(Map.of("failed", String.valueOf(error))));
            status = 1;
        }
        Runtime.getRuntime().halt(status);
    }

    private static void serve(Clients clients, SharingClients sharing, PrintStream out) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t", -1);
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", answer(clients, sharing, words));
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

    private static Object answer(Clients clients, SharingClients sharing, String[] words) throws Exception {
        switch (words[0]) {
            case "send":
                Map<String, String> properties = new TreeMap<>();
                for (int at = 3; at < words.length; at += 2) {
                    properties.put(words[at], words[at + 1]);
                }
                return clients.send(words[1], words[2], properties);
            case "half":
                return clients.half(words[1], words[2], words[3], words[4]);
            case "decide":
                clients.decide(words[1], words[2]);
                return true;
            case "asked":
                return clients.asked(words[1]);
            case "pop":
                return lines(clients.pop(words[1], words[2], Long.parseLong(words[3]), Integer.parseInt(words[4]), false));
            case "ack":
                return clients.ack(words[1], words[2], Integer.parseInt(words[3]), Long.parseLong(words[4]), words[5]);
            case "quit":
                sharing.close();
                clients.close();
                return true;
            default:
                return sharing.answer(words);
        }
    }

    static List<Object> lines(List<MessageExt> messages) throws Exception {
        List<Object> found = new ArrayList<>();
        for (MessageExt message : messages) {
            found.add(JSON.parseObject(LINES.line(message)));
        }
        return found;
    }
}
