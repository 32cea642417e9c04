package commitmq.bench;

import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.time.Instant;
import java.util.BitSet;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;

/** Messages that are delivered later: how late they come, and many of them that wait. */
final class Delays {
    private static final double LATE_S = 10;
    private static final int WARM_SHARE = 20;
    private static final double WARM_AHEAD_S = 2;
    private static final int OUTSTANDING = 10_000;
    private static final long SPAN_MS = 3_600_000;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;

    Delays(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.bodies = new Bodies(request.bodyBytes(), request.seed());
    }

    /** Message n is due at start + n / rate and is sent so many seconds earlier; its lateness counts from when it is due. A
     * small part of that goes through a topic of its own before. */
    JsonObject late() throws Exception {
        int messages = Math.max(1, (int) (request.rate() * request.seconds()));
        late(request.topic() + "-warm-up", Math.max(1, messages / WARM_SHARE), WARM_AHEAD_S);
        return late(request.topic(), messages, request.aheadSeconds());
    }

    private JsonObject late(String topic, int messages, double aheadSeconds) throws Exception {
        peer.createTopic(topic, request.queues());
        try (Peer.Reader reader = peer.reader(topic, true);
                Semantics.Delayer delayer = peer.semantics().delayer(topic)) {
            reader.poll(500, (array, at, length) -> {});
            long aheadMs = (long) (aheadSeconds * 1000);
            long startMs = System.currentTimeMillis() + aheadMs;
            long deadline = System.nanoTime()
                    + Sending.nanoseconds(aheadSeconds + messages / request.rate() + LATE_S);
            Samples samples = new Samples();
            BitSet arrived = new BitSet(messages);
            long[] found = new long[3]; // early ones, those that came again, the earliest in ns
            found[2] = Long.MAX_VALUE;
            AtomicLong storedAheadMs = new AtomicLong(aheadMs);
            AtomicLong errors = new AtomicLong();
            AtomicBoolean ended = new AtomicBoolean();
            Threads.each(2, which -> {
                if (which == 0) {
                    send(delayer, messages, startMs, aheadMs, storedAheadMs, errors);
                    return null;
                }
                while (samples.size() < messages && System.nanoTime() < deadline && !ended.get()) {
                    reader.poll(100, (array, at, length) -> {
                        long nowNs = wallNs();
                        int number = (int) ByteBuffer.wrap(array, at, Long.BYTES).getLong();
                        if (arrived.get(number)) {
                            found[1]++;
                            return;
                        }
                        arrived.set(number);
                        long lateNs = nowNs - dueMs(startMs, number) * 1_000_000;
                        found[0] += lateNs < 0 ? 1 : 0;
                        found[2] = Math.min(found[2], lateNs);
                        samples.add(lateNs);
                    });
                }
                return null;
            });
            if (storedAheadMs.get() < 0) {
                throw new IllegalStateException("a message was stored " + -storedAheadMs.get() + " ms after it was due");
            }
            JsonObject result = new JsonObject();
            result.addProperty("messages", samples.size());
            result.add("latency_us", samples.microseconds());
            result.addProperty("earliest_us", found[2] / 1e3);
            result.addProperty("stored_ahead_s", storedAheadMs.get() / 1e3);
            result.addProperty("early", found[0]);
            result.addProperty("again", found[1]);
            // That this system delivers some of them early shows in a figure of its own.
            result.addProperty("errors", errors.get() + messages - samples.size() + found[1]);
            return result;
        }
    }

    private long dueMs(long startMs, long number) {
        return startMs + (long) (number * 1000 / request.rate());
    }

    private static long wallNs() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000_000 + now.getNano();
    }

    private void send(
            Semantics.Delayer delayer, int messages, long startMs, long aheadMs, AtomicLong storedAheadMs, AtomicLong errors)
            throws Exception {
        Semaphore slots = new Semaphore(OUTSTANDING);
        for (int number = 0; number < messages; ) {
            long untilMs = System.currentTimeMillis() + aheadMs;
            for (long due; number < messages && (due = dueMs(startMs, number)) <= untilMs; number++) {
                byte[] body = bodies.get(number).clone();
                ByteBuffer.wrap(body).putLong(number);
                submit(delayer, body, due, slots, storedAheadMs, errors);
            }
            Thread.sleep(1);
        }
        drain(slots);
    }

    private static void submit(
            Semantics.Delayer delayer, byte[] body, long due, Semaphore slots, AtomicLong storedAheadMs, AtomicLong errors)
            throws Exception {
        slots.acquire();
        delayer.submit(body, due, error -> {
            storedAheadMs.accumulateAndGet(due - System.currentTimeMillis(), Math::min);
            if (error != null && errors.getAndIncrement() == 0) {
                System.err.println("the first send that failed: " + error);
            }
            slots.release();
        });
    }

    private void drain(Semaphore slots) throws Exception {
        if (!slots.tryAcquire(OUTSTANDING, (long) request.timeoutSeconds(), TimeUnit.SECONDS)) {
            throw new TimeoutException("messages were not acknowledged in time");
        }
    }

    /** Sends messages that are due within an hour; returns when all of them wait in the timer. */
    JsonObject fill() throws Exception {
        long messages = request.messages();
        peer.createTopic(request.topic(), request.queues());
        long before = peer.semantics().waiting();
        AtomicLong errors = new AtomicLong();
        AtomicLong storedAheadMs = new AtomicLong(Long.MAX_VALUE);
        long began = System.nanoTime();
        try (Semantics.Delayer delayer = peer.semantics().delayer(request.topic())) {
            long firstMs = System.currentTimeMillis() + (long) (request.aheadSeconds() * 1000);
            Semaphore slots = new Semaphore(OUTSTANDING);
            for (long number = 0; number < messages; number++) {
                long due = firstMs + number * SPAN_MS / messages;
                submit(delayer, bodies.get(number), due, slots, storedAheadMs, errors);
            }
            drain(slots);
        }
        long deadline = System.nanoTime() + Sending.nanoseconds(request.timeoutSeconds());
        for (long found; (found = peer.semantics().waiting()) < before + messages - errors.get(); Thread.sleep(50)) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(found + " of " + (before + messages) + " messages wait in the timer");
            }
        }
        return Sending.sent(messages - errors.get(), (System.nanoTime() - began) / 1e9, errors.get());
    }

    /** Tries one message there and back until it works; then tells how many messages the timer says that it has. RocketMQ's
     * count may stay below what waits: a kill takes the last second of it. */
    JsonObject ready(long beganNs) throws Exception {
        JsonObject result = new Readiness(request, peer, beganNs).run();
        result.addProperty("waiting", peer.semantics().waiting());
        return result;
    }
}
