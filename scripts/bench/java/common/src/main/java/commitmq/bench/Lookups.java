package commitmq.bench;

import com.google.gson.JsonObject;
import java.util.Random;

/** Stores messages with a key each and then finds single ones by it. */
final class Lookups {
    private static final double QUERYABLE_TIMEOUT_S = 60;
    private static final int WINDOW = 200;

    private final Request request;
    private final Peer peer;

    Lookups(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
    }

    JsonObject run() throws Exception {
        String topic = request.topic();
        long messages = request.messages();
        Bodies bodies = new Bodies(request.bodyBytes(), request.seed());
        peer.createTopic(topic, request.queues());
        long errors;
        try (Streams streams = new Streams(peer, topic, Peer.Use.PIPELINE, bodies, 1, request.window(WINDOW), request.batch())) {
            streams.each((stream, client) -> {
                for (long number = 0; number < messages; number++) {
                    stream.submit(number, key(number));
                }
            });
            errors = streams.errors();
        }
        long deadline = System.nanoTime() + Sending.nanoseconds(QUERYABLE_TIMEOUT_S);
        while (peer.lookUp(topic, key(messages - 1)) == 0) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("no message is found by its key after " + QUERYABLE_TIMEOUT_S + " s");
            }
            Thread.sleep(10);
        }

        Random random = new Random(request.seed());
        Samples samples = new Samples();
        long until = System.nanoTime() + Sending.nanoseconds(request.warmupSeconds());
        long found = 0;
        long began = System.nanoTime();
        for (int measured = 0; measured < request.count(); ) {
            String key = key((long) (random.nextDouble() * messages));
            long before = System.nanoTime();
            int matches = peer.lookUp(topic, key);
            long after = System.nanoTime();
            if (before >= until) {
                began = measured == 0 ? before : began;
                samples.add(after - before);
                found += matches;
                measured++;
            }
        }
        JsonObject result = Sending.sent(samples.size(), (System.nanoTime() - began) / 1e9, errors);
        result.addProperty("found", found);
        result.add("latency_us", samples.microseconds());
        return result;
    }

    private String key(long number) {
        return "key-" + request.seed() + "-" + number;
    }
}
