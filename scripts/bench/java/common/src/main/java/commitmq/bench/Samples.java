package commitmq.bench;

import com.google.gson.JsonObject;
import java.util.Arrays;

/** Every latency that was measured, in nanoseconds; of one thread until they are merged. */
public final class Samples {
    private long[] values = new long[1 << 16];
    private int size;

    public void add(long nanoseconds) {
        if (size == values.length) {
            values = Arrays.copyOf(values, 2 * size);
        }
        values[size++] = nanoseconds;
    }

    public void addAll(Samples other) {
        for (int i = 0; i < other.size; i++) {
            add(other.values[i]);
        }
    }

    public int size() {
        return size;
    }

    /** Percentiles in microseconds, each the smallest sample that at least so many are not above. */
    public JsonObject microseconds() {
        long[] sorted = Arrays.copyOf(values, size);
        Arrays.sort(sorted);
        JsonObject found = new JsonObject();
        for (double percent : new double[] {50, 90, 99, 99.9, 99.99, 100}) {
            String name = percent == 100 ? "max" : "p" + (percent % 1 == 0 ? "" + (int) percent : "" + percent);
            if (size > 0) {
                int rank = Math.max(1, (int) Math.ceil(percent / 100 * size - 1e-6));
                found.addProperty(name, sorted[Math.min(rank, size) - 1] / 1e3);
            }
        }
        return found;
    }
}
