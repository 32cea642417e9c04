package commitmq.bench;

import com.google.gson.JsonObject;
import java.nio.charset.StandardCharsets;

/** Tries one message there and back until it works: how long a server is gone. */
final class Readiness {
    private static final long RETRY_MS = 20;

    private final Request request;
    private final Peer peer;
    private final long beganNs;

    Readiness(Request request, Peer peer, long beganNs) {
        this.request = request;
        this.peer = peer;
        this.beganNs = beganNs;
    }

    JsonObject run() throws Exception {
        long deadline = beganNs + Sending.nanoseconds(request.timeoutSeconds());
        for (int attempt = 1; ; attempt++) {
            try {
                peer.createTopic(request.topic(), request.queues());
                byte[] body = ("ready " + System.currentTimeMillis() + " " + attempt).getBytes(StandardCharsets.US_ASCII);
                peer.roundTrip(request.topic(), body);
                JsonObject result = new JsonObject();
                result.addProperty("seconds", (System.nanoTime() - beganNs) / 1e9);
                result.addProperty("wall_time", System.currentTimeMillis() / 1e3);
                result.addProperty("attempts", attempt);
                return result;
            } catch (Exception error) {
                if (System.nanoTime() > deadline) {
                    throw error;
                }
                Thread.sleep(RETRY_MS);
            }
        }
    }
}
