package commitmq.bench;

import com.google.gson.JsonObject;

/** The driver's command line: the clients' settings and what to do, two JSON objects, in; one line of JSON out. */
public final class Driver {
    /** Opens a system's client. */
    public interface Opener {
        Peer open(Request request, Settings settings) throws Exception;
    }

    private Driver() {}

    /** Does what {@code arguments} ask for and ends the process: clients leave threads behind that nobody waits for. */
    public static void main(String[] arguments, Opener opener) {
        int status = 0;
        try {
            Request request = new Request(arguments[1]);
            long beganNs = System.nanoTime();
            JsonObject result;
            try (Peer peer = opener.open(request, new Settings(arguments[0]))) {
                result = work(request, peer, beganNs);
            }
            System.out.println(result);
            System.out.flush();
        } catch (Throwable error) {
            error.printStackTrace();
            status = 1;
        }
        Runtime.getRuntime().halt(status);
    }

    private static JsonObject work(Request request, Peer peer, long beganNs) throws Exception {
        switch (request.work()) {
            case "send":
                return new Sending(request, peer).oneByOne();
            case "pipeline":
                return new Sending(request, peer).pipeline();
            case "batch":
                return new Sending(request, peer).batches();
            case "read":
                return new Reading(request, peer).catchUp();
            case "mixed":
                return new Reading(request, peer).following();
            case "end_to_end":
                return new EndToEnd(request, peer).polled();
            case "push":
                return new EndToEnd(request, peer).pushed();
            case "query":
                return new Lookups(request, peer).run();
            case "delayed":
                return new Delays(request, peer).late();
            case "timers":
                return new Delays(request, peer).fill();
            case "timers_ready":
                return new Delays(request, peer).ready(beganNs);
            case "transactions":
                return new Transactions(request, peer).run();
            case "share":
                return new Shares(request, peer).run();
            case "retry":
                return new Retries(request, peer).run();
            case "ready":
                return new Readiness(request, peer, beganNs).run();
            default:
                throw new IllegalArgumentException("no such work: " + request.work());
        }
    }
}
