package commitmq.scenarios;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/**
 * Runs scenarios against brokers, several at a time, driven by lines on standard input: words with tabs between. Each answer is a
 * line of JSON, {"ok": …} or {"failed": "…"}.
 *
 * <pre>
 *   Scenarios MARK THREADS                        (MARK is part of all topics' and groups' names)
 *   names                                         the scenarios that this version of the clients has
 *   begin NAME SIDE NAME_SERVER BROKER            runs it as soon as a thread is free; SIDE is a word for the broker
 *   result NAME SIDE                              {"outcome": …} or {"broken": "…"}; null while it runs
 *   quit
 * </pre>
 */
public final class Scenarios {
    private final Map<String, Scenario> scenarios = new LinkedHashMap<>();
    private final Map<String, Future<Map<String, Object>>> runs = new ConcurrentHashMap<>();
    private final Edition edition = Edition.here();
    private final ExecutorService threads;
    private final String mark;

    private Scenarios(String mark, int threads) throws ReflectiveOperationException {
        this.mark = mark;
        this.threads = Executors.newFixedThreadPool(threads);
        scenarios.putAll(Sends.scenarios());
        scenarios.putAll(Pushes.scenarios());
        scenarios.putAll(Sharing.scenarios());
        scenarios.putAll(Pulls.scenarios());
        scenarios.putAll(Failures.scenarios());
        scenarios.putAll(Offsets.scenarios());
        scenarios.putAll(Transactions.scenarios());
        scenarios.putAll(Lookups.scenarios());
        scenarios.putAll(Requests.scenarios());
        scenarios.putAll(Traces.scenarios());
        scenarios.putAll(Refusals.scenarios());
        scenarios.putAll(edition.scenarios());
    }

    public static void main(String[] arguments) throws Exception {
        // Clients look for new members and routes seldom otherwise.
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000");
        System.setProperty("rocketmq.client.rebalance.minInterval", "500");
        System.setProperty("rocketmq.client.logLevel", "WARN");
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        Scenarios scenarios = new Scenarios(arguments[0], Integer.parseInt(arguments[1]));
        out.println("{\"ok\":\"ready\"}");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t", -1);
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", scenarios.answer(words));
            } catch (Exception error) {
                answer.put("failed", error);
            }
            out.println(Json.text(answer));
            if (words[0].equals("quit")) {
                break;
            }
        }
        Runtime.getRuntime().halt(0);
    }

    private Object answer(String[] words) throws Exception {
        switch (words[0]) {
            case "names":
                return scenarios.keySet();
            case "begin":
                Scenario scenario = scenarios.get(words[1]);
                if (scenario == null) {
                    throw new IllegalArgumentException("no scenario " + words[1]);
                }
                runs.put(words[1] + "\t" + words[2], threads.submit(() -> run(scenario, words)));
                return true;
            case "result":
                Future<Map<String, Object>> run = runs.get(words[1] + "\t" + words[2]);
                return run.isDone() ? run.get() : null;
            case "quit":
                return true;
            default:
                throw new IllegalArgumentException("unknown command " + words[0]);
        }
    }

    private Map<String, Object> run(Scenario scenario, String[] words) {
        Map<String, Object> found = new LinkedHashMap<>();
        long begin = System.nanoTime();
        try (Stage stage = new Stage(mark + "-" + words[1], words[2], words[3], words[4], edition)) {
            found.put("outcome", scenario.run(stage));
        } catch (Throwable error) {
            System.err.println(words[1] + " at " + words[2]);
            error.printStackTrace();
            found.put("broken", error);
        }
        found.put("ms", (System.nanoTime() - begin) / 1_000_000);
        return found;
    }
}
