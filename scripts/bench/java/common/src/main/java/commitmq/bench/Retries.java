package commitmq.bench;

import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.locks.LockSupport;

/** A handler fails on each message once: how long until it has the message again. */
final class Retries {
    private static final int WARM_RETRIES = 20;
    private static final double FIRST_S = 60;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;
    private final Map<Long, Long> failed = new ConcurrentHashMap<>();
    private final Map<Long, Long> came = new ConcurrentHashMap<>();

    Retries(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.bodies = new Bodies(request.bodyBytes(), request.seed());
    }

    JsonObject run() throws Exception {
        String topic = request.topic();
        long messages = Math.max(1, (long) (request.rate() * request.seconds()));
        peer.createTopic(topic, request.queues());
        try (AutoCloseable handling = peer.semantics().handling(topic, topic + "-group", this::handle);
                Peer.Writer writer = peer.writer(topic, Peer.Use.SINGLE)) {
            // The first ones may take long: the client learns of the new retry topic.
            for (long number = messages; number < messages + WARM_RETRIES; number++) {
                writer.send(message(number));
            }
            waitFor(WARM_RETRIES, Math.max(FIRST_S, request.timeoutSeconds()));
            long start = System.nanoTime();
            for (long number = 0; number < messages; number++) {
                long planned = start + (long) (number * 1e9 / request.rate());
                for (long now; (now = System.nanoTime()) < planned; ) {
                    LockSupport.parkNanos(planned - now);
                }
                writer.send(message(number));
            }
            waitFor(messages + WARM_RETRIES, request.timeoutSeconds());
        }
        Samples whole = new Samples();
        Samples over = new Samples();
        long delayNs = request.delayMs() * 1_000_000;
        long earliest = Long.MAX_VALUE;
        for (long number = 0; number < messages; number++) {
            if (came.containsKey(number)) {
                long took = came.get(number) - failed.get(number);
                whole.add(took);
                over.add(took - delayNs);
                earliest = Math.min(earliest, took - delayNs);
            }
        }
        JsonObject result = new JsonObject();
        result.addProperty("messages", whole.size());
        result.add("latency_us", whole.microseconds());
        result.add("over_us", over.microseconds());
        result.addProperty("earliest_us", earliest / 1e3);
        result.addProperty("errors", messages - whole.size());
        return result;
    }

    private boolean handle(byte[] body, int tries) {
        long now = System.nanoTime();
        long number = ByteBuffer.wrap(body).getLong();
        if (tries > 0) {
            came.putIfAbsent(number, now);
            return true;
        }
        failed.putIfAbsent(number, System.nanoTime());
        return false;
    }

    private byte[] message(long number) {
        byte[] body = bodies.get(number).clone();
        ByteBuffer.wrap(body).putLong(number);
        return body;
    }

    private void waitFor(long count, double seconds) throws Exception {
        for (long deadline = System.nanoTime() + Sending.nanoseconds(seconds); came.size() < count; Thread.sleep(10)) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(came.size() + " of " + count + " messages came again");
            }
        }
    }
}
