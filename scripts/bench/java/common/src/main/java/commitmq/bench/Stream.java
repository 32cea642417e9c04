package commitmq.bench;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;

/** Sends messages as fast as a writer takes them, so many outstanding at a time, and counts how they end. */
final class Stream {
    private static final long LAST_ACK_TIMEOUT_S = 120;

    private final Peer.Writer writer;
    private final Bodies bodies;
    private final Semaphore slots;
    private final int outstanding;
    private final AtomicLong errors = new AtomicLong();

    Stream(Peer.Writer writer, Bodies bodies, int outstanding) {
        this.writer = writer;
        this.bodies = bodies;
        this.outstanding = outstanding;
        this.slots = new Semaphore(outstanding);
    }

    /** Messages that failed so far. */
    long errors() {
        return errors.get();
    }

    /** Submits the message with this number, as soon as fewer than the allowed number are outstanding. */
    void submit(long number, String key) throws Exception {
        slots.acquire();
        writer.submit(bodies.get(number), key, error -> ended(error, 1));
    }

    /** Submits {@code count} messages as one batch, the first with this number. */
    void submitBatch(long first, int count) throws Exception {
        List<byte[]> batch = new ArrayList<>(count);
        for (int i = 0; i < count; i++) {
            batch.add(bodies.get(first + i));
        }
        slots.acquire();
        writer.submit(batch, error -> ended(error, count));
    }

    /** Returns when nothing is outstanding. */
    void drain() throws Exception {
        if (!slots.tryAcquire(outstanding, LAST_ACK_TIMEOUT_S, TimeUnit.SECONDS)) {
            throw new TimeoutException("no acknowledgement for " + LAST_ACK_TIMEOUT_S + " s");
        }
        slots.release(outstanding);
    }

    private void ended(Throwable error, int messages) {
        if (error != null && errors.getAndAdd(messages) == 0) {
            System.err.println("the first send that failed: " + error);
        }
        slots.release();
    }
}
