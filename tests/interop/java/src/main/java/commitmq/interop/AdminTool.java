package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * RocketMQ's mqadmin, its clients and the requests of its Dashboard and exporter, in one process for one cluster.
 *
 * <pre>
 *   AdminTool NAME_SERVER BROKER_ADDRESS BROKER_NAME CLUSTER
 * </pre>
 *
 * A line of words with tabs between is one command. A word with @ in front is one of {@link AdminClients}, or a replay:
 * <pre>
 *   @dashboard TOPIC GROUP CLIENT UNIQUE_ID OFFSET_ID ...   see {@link DashboardReplay}
 *   @exporter TOPIC...                                      see {@link ExporterReplay}
 * </pre>
 * Any other line is a command of mqadmin; the answer is what it printed. Each answer is one line of JSON: {"ok": …} or
 * {"refused": "…"}.
 */
public final class AdminTool {
    private AdminTool() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        AdminClients clients = new AdminClients(arguments[0], arguments[1], arguments[2]);
        out.println("{\"ok\":\"\"}");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split("\t", -1);
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", answer(clients, words, arguments, out));
            } catch (Throwable error) {
                error.printStackTrace();
                answer.put("refused", String.valueOf(error));
            }
            out.println(JSON.toJSONString(answer));
            if (words[0].equals("quit")) {
                break;
            }
        }
        Runtime.getRuntime().halt(0);
    }

    private static Object answer(AdminClients clients, String[] words, String[] target, PrintStream out) throws Exception {
        String[] rest = Arrays.copyOfRange(words, 1, words.length);
        switch (words[0]) {
            case "quit":
                clients.close();
                return true;
            case "@dashboard":
                return new DashboardReplay(target[0], target[1], target[2], target[3]).run(rest);
            case "@exporter":
                return new ExporterReplay(target[0], target[1], target[3]).run(rest);
            default:
                return words[0].startsWith("@") ? clients.answer(words[0].substring(1), rest) : printed(words, out);
        }
    }

    /** What mqadmin prints. Its commands keep their clients, so each run has commands of its own, as in a process of its own. */
    private static String printed(String[] words, PrintStream out) throws Exception {
        Field commands = MQAdminStartup.class.getDeclaredField("SUB_COMMANDS");
        commands.setAccessible(true);
        ((List<?>) commands.get(null)).clear();
        ByteArrayOutputStream said = new ByteArrayOutputStream();
        PrintStream caught = new PrintStream(said, true, StandardCharsets.UTF_8);
        PrintStream errors = System.err;
        System.setOut(caught);
        System.setErr(caught);
        try {
            MQAdminStartup.main0(words, null);
        } finally {
            System.setOut(out);
            System.setErr(errors);
        }
        return said.toString(StandardCharsets.UTF_8);
    }
}
