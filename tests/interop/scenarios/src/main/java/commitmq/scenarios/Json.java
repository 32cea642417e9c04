package commitmq.scenarios;

import java.util.Iterator;
import java.util.Map;

/** Writes JSON. The versions of the clients bring different libraries for it. */
final class Json {
    private Json() {
    }

    /** Maps, iterables, numbers, booleans and null; everything else as text. */
    static String text(Object value) {
        StringBuilder out = new StringBuilder();
        write(value, out);
        return out.toString();
    }

    private static void write(Object value, StringBuilder out) {
        if (value == null || value instanceof Number || value instanceof Boolean) {
            out.append(value);
        } else if (value instanceof Map<?, ?> map) {
            out.append('{');
            for (Iterator<? extends Map.Entry<?, ?>> left = map.entrySet().iterator(); left.hasNext();) {
                Map.Entry<?, ?> entry = left.next();
                quote(String.valueOf(entry.getKey()), out);
                out.append(':');
                write(entry.getValue(), out);
                out.append(left.hasNext() ? "," : "");
            }
            out.append('}');
        } else if (value instanceof Iterable<?> list) {
            out.append('[');
            for (Iterator<?> left = list.iterator(); left.hasNext();) {
                write(left.next(), out);
                out.append(left.hasNext() ? "," : "");
            }
            out.append(']');
        } else {
            quote(String.valueOf(value), out);
        }
    }

    private static void quote(String text, StringBuilder out) {
        out.append('"');
        for (int at = 0; at < text.length(); at++) {
            char one = text.charAt(at);
            if (one == '"' || one == '\\') {
                out.append('\\').append(one);
            } else if (one < ' ' || one > '~') {
                out.append(String.format("\\u%04x", (int) one));
            } else {
                out.append(one);
            }
        }
        out.append('"');
    }
}
