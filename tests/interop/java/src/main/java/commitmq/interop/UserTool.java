package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.auth.authentication.model.Subject;
import org.apache.rocketmq.auth.authentication.model.User;
import org.apache.rocketmq.auth.authorization.chain.AclAuthorizationHandler;
import org.apache.rocketmq.auth.authorization.context.DefaultAuthorizationContext;
import org.apache.rocketmq.auth.authorization.enums.Decision;
import org.apache.rocketmq.auth.authorization.enums.PolicyType;
import org.apache.rocketmq.auth.authorization.model.Acl;
import org.apache.rocketmq.auth.authorization.model.Environment;
import org.apache.rocketmq.auth.authorization.model.Policy;
import org.apache.rocketmq.auth.authorization.model.PolicyEntry;
import org.apache.rocketmq.auth.authorization.model.Resource;
import org.apache.rocketmq.auth.authorization.provider.AuthorizationMetadataProvider;
import org.apache.rocketmq.auth.config.AuthConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.action.Action;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.body.AclInfo;
import org.apache.rocketmq.remoting.protocol.body.UserInfo;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * RocketMQ's users: what its own classes decide, and what its clients get when they sign.
 *
 * <pre>
 *   UserTool decide                                     a line {user, ip, resource, actions, policies} is answered by {allowed}
 *   UserTool talk NAME_SERVER ACCESS_KEY SECRET_KEY     a line {op, …} is answered by {ok} or {refused, code}
 * </pre>
 */
public final class UserTool {
    private UserTool() {
    }

    /** Has the policies of the one user of a case. */
    public static final class OneAcl implements AuthorizationMetadataProvider {
        private static Acl acl;

        @Override
        public void initialize(AuthConfig config, Supplier<?> service) {
        }

        @Override
        public void shutdown() {
        }

        @Override
        public CompletableFuture<Void> createAcl(Acl one) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Void> deleteAcl(Subject subject) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Void> updateAcl(Acl one) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Acl> getAcl(Subject subject) {
            return CompletableFuture.completedFuture(acl);
        }

        @Override
        public CompletableFuture<List<Acl>> listAcl(String subject, String resource) {
            throw new UnsupportedOperationException();
        }
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        Talk talk = arguments[0].equals("talk") ? new Talk(arguments[1], arguments[2], arguments[3]) : null;
        AuthConfig config = new AuthConfig();
        config.setConfigName("one");
        config.setAuthorizationMetadataProvider(OneAcl.class.getName());
        AclAuthorizationHandler handler = new AclAuthorizationHandler(config);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JSONObject request = JSON.parseObject(line);
            out.println(JSON.toJSONString(talk == null ? decide(handler, request) : talk.answer(request)));
        }
        System.exit(0);
    }

    private static Map<String, Object> decide(AclAuthorizationHandler handler, JSONObject request) {
        List<Policy> policies = new ArrayList<>();
        JSONObject kinds = request.getJSONObject("policies");
        for (String kind : kinds.keySet()) {
            List<PolicyEntry> entries = new ArrayList<>();
            for (Object one : kinds.getJSONArray(kind)) {
                JSONObject entry = (JSONObject) one;
                entries.add(PolicyEntry.of(
                    Resource.of(entry.getString("resource")), actions(entry.getJSONArray("actions")),
                    Environment.of(entry.getList("from", String.class)), Decision.getByName(entry.getString("decision"))));
            }
            policies.add(Policy.of(PolicyType.getByName(kind), entries));
        }
        User user = User.of(request.getString("user"));
        OneAcl.acl = policies.isEmpty() ? null : Acl.of(user, policies);
        DefaultAuthorizationContext context = DefaultAuthorizationContext.of(
            user, Resource.of(request.getString("resource")), Action.PUB, request.getString("ip"));
        context.setActions(actions(request.getJSONArray("wanted")));
        boolean allowed = true;
        try {
            handler.handle(context, null).join();
        } catch (Exception error) {
            allowed = false;
        }
        return Map.of("allowed", allowed);
    }

    private static List<Action> actions(JSONArray names) {
        List<Action> found = new ArrayList<>();
        names.forEach(name -> found.add(Action.getByName((String) name)));
        return found;
    }

    /** Clients with one user's keys. */
    private static final class Talk {
        private final String servers;
        private final RPCHook hook;
        private final DefaultMQProducer producer;
        private final DefaultMQAdminExt admin;

        Talk(String servers, String key, String secret) throws Exception {
            this.servers = servers;
            hook = key.isEmpty() ? null : new AclClientRPCHook(new SessionCredentials(key, secret));
            producer = new DefaultMQProducer("users-producers", hook);
            producer.setNamesrvAddr(servers);
            producer.setInstanceName("producer");
            producer.setRetryTimesWhenSendFailed(0);
            producer.start();
            admin = new DefaultMQAdminExt(hook, 5_000);
            admin.setNamesrvAddr(servers);
            admin.setInstanceName("admin");
            admin.start();
        }

        Map<String, Object> answer(JSONObject request) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", done(request, request.getString("broker")));
            } catch (MQBrokerException error) {
                answer.put("refused", String.valueOf(error.getErrorMessage()));
                answer.put("code", error.getResponseCode());
            } catch (MQClientException error) {  // of a producer, after its tries
                String told = error.getCause() instanceof MQBrokerException cause ? cause.getErrorMessage() : error.getMessage();
                answer.put("refused", String.valueOf(told));
                answer.put("code", error.getResponseCode());
            } catch (Exception error) {
                answer.put("refused", String.valueOf(error));
                answer.put("code", -1);
            }
            return answer;
        }

        private Object done(JSONObject request, String broker) throws Exception {
            String name = request.getString("name");
            switch (request.getString("op")) {
                case "send":
                    byte[] body = request.getString("body").getBytes(StandardCharsets.UTF_8);
                    return producer.send(new Message(request.getString("topic"), body)).getSendStatus().name();
                case "receive":
                    return received(request.getString("group"), request.getString("topic"), request.getIntValue("ms"));
                case "topics":
                    return admin.getAllTopicConfig(broker, 5_000).getTopicConfigTable().size() > 0;
                case "createUser":
                    admin.createUser(broker, name, request.getString("password"), request.getString("type"));
                    return true;
                case "deleteUser":
                    admin.deleteUser(broker, name);
                    return true;
                case "listUsers":
                    return JSON.toJSON(admin.listUser(broker, ""));
                case "getUser":
                    UserInfo user = admin.getUser(broker, name);
                    return user == null ? "" : JSON.toJSON(user);
                case "createAcl":
                    admin.createAcl(broker, "User:" + name, request.getList("resources", String.class),
                        request.getList("actions", String.class), request.getList("from", String.class),
                        request.getString("decision"));
                    return true;
                case "getAcl":
                    AclInfo acl = admin.getAcl(broker, "User:" + name);
                    return acl == null ? "" : JSON.toJSON(acl);
                case "deleteAcl":
                    admin.deleteAcl(broker, "User:" + name, request.getString("resource"));
                    return true;
                default:
                    throw new IllegalArgumentException(request.toString());
            }
        }

        private List<String> received(String group, String topic, int ms) throws Exception {
            DefaultMQPushConsumer consumer =
                new DefaultMQPushConsumer(group, hook, new AllocateMessageQueueAveragely());
            consumer.setNamesrvAddr(servers);
            consumer.setInstanceName(group);
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.subscribe(topic, "*");
            List<String> bodies = new ArrayList<>();
            CountDownLatch first = new CountDownLatch(1);
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                synchronized (bodies) {
                    messages.forEach(one -> bodies.add(new String(one.getBody(), StandardCharsets.UTF_8)));
                }
                first.countDown();
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            try {
                first.await(ms, TimeUnit.MILLISECONDS);
            } finally {
                consumer.shutdown();
            }
            synchronized (bodies) {
                return new ArrayList<>(bodies);
            }
        }
    }
}
