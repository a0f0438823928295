"""What a program with Kubernetes' Python client does: the library as Debian packages it."""
import os

from kubernetes import client, config, watch
from kubernetes.client.rest import ApiException
from kubernetes.stream import stream

config.load_kube_config(os.environ["KUBECONFIG"])
namespace = os.environ["NAMESPACE"]
core, apps, custom = client.CoreV1Api(), client.AppsV1Api(), client.CustomObjectsApi()

body = client.V1ConfigMap(metadata=client.V1ObjectMeta(name="motd"), data={"greeting": "hello"})
made = core.create_namespaced_config_map(namespace, body)
assert made.data == {"greeting": "hello"}, made
try:
    core.create_namespaced_config_map(namespace, body)
    raise AssertionError("it was created twice")
except ApiException as e:
    assert e.status == 409, e
made.data["more"] = "1"
assert core.replace_namespaced_config_map("motd", namespace, made).data["more"] == "1"
assert core.patch_namespaced_config_map("motd", namespace, {"data": {"more": None}}).data == {"greeting": "hello"}
names = [c.metadata.name for c in core.list_namespaced_config_map(namespace, field_selector="metadata.name=motd").items]
assert names == ["motd"], names
core.delete_namespaced_config_map("motd", namespace)

core.create_namespaced_pod(namespace, {
    "metadata": {"name": "py"},
    "spec": {"terminationGracePeriodSeconds": 0, "containers": [
        {"name": "main", "image": "keelson.dev/tools:v1", "command": ["sh", "-c", "echo started; exec sleep 1000000"]}]},
})
w = watch.Watch()
for event in w.stream(core.list_namespaced_pod, namespace, field_selector="metadata.name=py", timeout_seconds=180):
    if event["object"].status.phase == "Running":
        w.stop()
assert core.read_namespaced_pod("py", namespace).status.phase == "Running"
said = stream(core.connect_get_namespaced_pod_exec, "py", namespace, command=["echo", "from within"],
              stdout=True, stderr=True, stdin=False, tty=False)
assert said == "from within\n", said

assert apps.list_namespaced_deployment(namespace).items == []
custom.create_namespaced_custom_object("python.example.com", "v1", namespace, "teas", {
    "apiVersion": "python.example.com/v1", "kind": "Tea", "metadata": {"name": "green"}, "spec": {"grams": 3}})
green = custom.get_namespaced_custom_object("python.example.com", "v1", namespace, "teas", "green")
assert green["spec"] == {"grams": 3, "cups": 1}, green
print("all is well")
