package commitmq.bench;

import com.google.gson.JsonObject;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;

/** The works that only send. Warming up happens in a topic of its own, so that the measured one holds what was counted. */
final class Sending {
    private static final double VISIBLE_TIMEOUT_S = 120;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;

    Sending(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.bodies = new Bodies(request.bodyBytes(), request.seed());
    }

    /** Each client sends one message, waits for its acknowledgement, and so on. */
    JsonObject oneByOne() throws Exception {
        peer.createTopic(request.topic(), request.queues());
        AtomicLong numbers = new AtomicLong();
        AtomicLong errors = new AtomicLong();
        Samples all = new Samples();
        long[] span = new long[2];
        try (Peer.Writer writer = peer.writer(request.topic(), Peer.Use.SINGLE)) {
            long from = System.nanoTime() + nanoseconds(request.warmupSeconds());
            long until = from + nanoseconds(request.seconds());
            List<Samples> found = Threads.each(request.clients(), client -> {
                Samples samples = new Samples();
                for (long before = System.nanoTime(); before < until; ) {
                    boolean sent = true;
                    try {
                        writer.send(bodies.get(numbers.getAndIncrement()));
                    } catch (Exception error) {
                        sent = false;
                        if (errors.getAndIncrement() == 0) {
                            System.err.println("the first send that failed: " + error);
                        }
                    }
                    long after = System.nanoTime();
                    if (sent && before >= from) {
                        samples.add(after - before);
                    }
                    before = after;
                }
                return samples;
            });
            span[0] = from;
            span[1] = System.nanoTime();
            found.forEach(all::addAll);
        }
        JsonObject result = sent(all.size(), (span[1] - span[0]) / 1e9, errors.get());
        result.add("latency_us", all.microseconds());
        return result;
    }

    /** One client, single messages, {@code window} outstanding. */
    JsonObject pipeline() throws Exception {
        int window = request.window(1000);
        return inBulk(Peer.Use.PIPELINE, 1, window, (stream, first, count) -> {
            for (long number = first; number < first + count; number++) {
                stream.submit(number, null);
            }
        });
    }

    /** Each client sends batches. */
    JsonObject batches() throws Exception {
        int batch = request.batch();
        return inBulk(Peer.Use.BATCH, request.clients(), 0, (stream, first, count) -> {
            for (long number = first; number < first + count; number += batch) {
                stream.submitBatch(number, (int) Math.min(batch, first + count - number));
            }
        });
    }

    /** Submits the messages from number {@code first} on. */
    private interface Part {
        void submit(Stream stream, long first, long count) throws Exception;
    }

    /** Warms up, then has each client send its part of all messages; the clock runs from the first send. */
    private JsonObject inBulk(Peer.Use use, int clients, int window, Part part) throws Exception {
        int batch = request.batch();
        long messages = request.messages();
        // Whole batches to each client; the last one gets what is left.
        long share = messages / clients / batch * batch;
        peer.createTopic(request.topic(), request.queues());
        new WarmUp(request, peer).send(use, clients, window);
        long before = peer.readable(request.topic());

        long began;
        long ended;
        long errors;
        long visible;
        try (Streams streams = new Streams(peer, request.topic(), use, bodies, clients, window, request.batch())) {
            began = System.nanoTime();
            streams.each((stream, client) -> {
                long first = client * share;
                part.submit(stream, first, client == clients - 1 ? messages - first : share);
            });
            ended = System.nanoTime();
            errors = streams.errors();
            // Before the writers are closed, which takes seconds with some clients.
            visible = waitUntilReadable(peer, request.topic(), before + messages - errors);
        }
        JsonObject result = sent(messages - errors, (ended - began) / 1e9, errors);
        result.addProperty("visible_seconds", (visible - began) / 1e9);
        result.addProperty("checksum", bodies.checksum(messages));
        return result;
    }

    /** Waits until consumers can read so many messages of the topic, and returns when (System.nanoTime). */
    static long waitUntilReadable(Peer peer, String topic, long messages) throws Exception {
        long deadline = System.nanoTime() + nanoseconds(VISIBLE_TIMEOUT_S);
        for (long readable; (readable = peer.readable(topic)) < messages; Thread.sleep(1)) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(
                        readable + " of " + messages + " messages can be read after " + VISIBLE_TIMEOUT_S + " s");
            }
        }
        return System.nanoTime();
    }

    static JsonObject sent(long messages, double seconds, long errors) {
        JsonObject result = new JsonObject();
        result.addProperty("messages", messages);
        result.addProperty("seconds", seconds);
        result.addProperty("rate", messages / seconds);
        result.addProperty("errors", errors);
        return result;
    }

    static long nanoseconds(double seconds) {
        return (long) (seconds * 1e9);
    }
}
