package commitmq.bench;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/** The same piece of work on several threads. */
final class Threads {
    /** What the thread with this number does. */
    interface Work<T> {
        T run(int number) throws Exception;
    }

    private Threads() {}

    /** Runs the work on {@code count} threads and returns what each returned; throws the first exception of any. */
    static <T> List<T> each(int count, Work<T> work) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(count);
        try {
            List<Future<T>> running = new ArrayList<>();
            for (int i = 0; i < count; i++) {
                int number = i;
                running.add(threads.submit(() -> work.run(number)));
            }
            List<T> results = new ArrayList<>();
            for (Future<T> one : running) {
                results.add(one.get());
            }
            return results;
        } finally {
            threads.shutdownNow();
        }
    }
}
