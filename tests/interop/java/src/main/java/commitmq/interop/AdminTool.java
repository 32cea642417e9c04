package commitmq.interop;

import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Runs mqadmin: a line of words with tabs between them is one command; the answer is what it printed, in hex. */
public final class AdminTool {
    private AdminTool() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        out.println("{\"ok\":\"\"}");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            ByteArrayOutputStream said = new ByteArrayOutputStream();
            PrintStream caught = new PrintStream(said, true, StandardCharsets.UTF_8);
            System.setOut(caught);
            System.setErr(caught);
            try {
                MQAdminStartup.main0(line.split("\t"), null);
            } finally {
                System.setOut(out);
            }
            out.println("{\"ok\":\"" + HexFormat.of().formatHex(said.toByteArray()) + "\"}");
            out.flush();
        }
        System.exit(0);
    }
}
