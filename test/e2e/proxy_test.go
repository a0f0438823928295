package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// hostsOfRole returns the names of the hosts of a role.
func hostsOfRole(role lab.Role) (out []string) {
	for _, h := range testenv.Lab().Config.Hosts {
		if h.Role == role {
			out = append(out, h.Name)
		}
	}
	return out
}

// createSlice creates an EndpointSlice of a Service with a port named http. of is the target
// reference of its endpoint, or nil.
func (w testNamespace) createSlice(service, address string, port int32, of *v1.ObjectReference) {
	w.Helper()
	_, err := w.cs.DiscoveryV1().EndpointSlices(w.ns).Create(context.Background(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: &port, Protocol: new(v1.ProtocolTCP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{address}, TargetRef: of}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.Fatalf("creating the EndpointSlice of %s: %v", service, err)
	}
}

// fetchProxied returns the response to a path below the namespace from one replica's proxy.
func (w testNamespace) fetchProxied(cs kubernetes.Interface, path string) (string, error) {
	data, err := cs.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces/" + w.ns + path).DoRaw(context.Background())
	return string(data), err
}

// Every replica proxies requests to pods of every worker and to Services, by the agents' tunnels:
// also to a pod in its node's network, and to Services with manually written endpoints, if these
// are pods.
func TestProxyReachesPods(t *testing.T) {
	w := newNamespace(t)
	want := map[string]string{} // expected response by path below the namespace
	for _, node := range hostsOfRole(lab.RoleWorker) {
		p := newPod("on-"+node, hello)
		p.Spec.NodeName, p.Labels = node, map[string]string{"app": "web"}
		w.createPod(p)
		want["/pods/on-"+node+":8080/proxy/"] = p.Name
	}
	host := newPod("in-host", hello)
	host.Spec.NodeName, host.Spec.HostNetwork = "w2", true
	w.createPod(host)
	want["/pods/http:in-host:8080/proxy/"] = "" // it has the name of its node's host
	w.createService(webService("web", v1.ServiceTypeClusterIP))
	for _, name := range []string{"by-hand", "elsewhere"} {
		svc := webService(name, v1.ServiceTypeClusterIP)
		svc.Spec.Selector = nil
		w.createService(svc)
	}
	for path := range want {
		w.awaitPod(strings.Split(strings.TrimPrefix(strings.TrimPrefix(path, "/pods/"), "http:"), ":")[0], requireReady)
	}
	of := &v1.ObjectReference{Kind: "Pod", Namespace: w.ns, Name: "on-w1"}
	w.createSlice("by-hand", w.getPod("on-w1").Status.PodIP, 8080, of)
	// not an address of a pod according to the slice
	w.createSlice("elsewhere", testenv.Host(t, "w2").IP.String(), 8080, nil)
	want["/services/web/proxy/"], want["/services/http:web:80/proxy/"], want["/services/web:http/proxy/"] = "on-",
		"on-", "on-"
	want["/services/by-hand/proxy/"] = "on-w1"

	for _, replica := range hostsOfRole(lab.RoleControlPlane) {
		cs := testenv.ClientAt(t, replica)
		for path, who := range want {
			var got string
			testenv.Eventually(t, soon, func() (err error) { // this replica receives the pods slightly later
				got, err = w.fetchProxied(cs, path)
				return err
			})
			if !strings.Contains(got, who) || !strings.Contains(strings.ToLower(got), "hello") {
				t.Errorf("%s through %s: %q, want the response of %q", path, replica, got, who)
			}
		}
		for _, path := range []string{"/services/web:81/proxy/", "/pods/on-w1:1/proxy/",
			"/services/elsewhere:80/proxy/"} {
			if got, err := w.fetchProxied(cs, path); !apierrors.IsServiceUnavailable(err) {
				t.Errorf("%s by way of %s: %v %q, want a 503", path, replica, err, got)
			}
		}
	}
	kctl := kubectlPrograms()["kctl"]
	raw := fmt.Sprintf("/api/v1/namespaces/%s/services/http:web:80/proxy/", w.ns)
	if out := testenv.Must(t, kctl, "get", "--raw", raw); !strings.Contains(out, "on-") {
		t.Errorf("kctl get --raw %s: %s", raw, out)
	}
	if out, err := testenv.Try(t, kctl, "--as=nobody", "get", "--raw", raw); err == nil ||
		!strings.Contains(out, `cannot get resource "services/proxy"`) {
		t.Errorf("as nobody: %v %s", err, out)
	}
	w.checkClusterInfo(kctl)
}

// checkClusterInfo checks that "kctl cluster-info" lists a Service of the cluster, and requests the
// listed address.
func (w testNamespace) checkClusterInfo(kctl string) {
	w.Helper()
	svc := webService("web", v1.ServiceTypeClusterIP)
	svc.Name, svc.Labels = w.ns, map[string]string{"kubernetes.io/cluster-service": "true", "kubernetes.io/name": "Web"}
	svc.Spec.Selector = nil
	services := w.cs.CoreV1().Services(metav1.NamespaceSystem)
	if _, err := services.Create(context.Background(), svc, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	defer func() { _ = services.Delete(context.Background(), svc.Name, metav1.DeleteOptions{}) }()
	out := testenv.Must(w, kctl, "cluster-info")
	if path := "/api/v1/namespaces/kube-system/services/" + svc.Name + ":http/proxy"; !strings.Contains(out, path) {
		w.Errorf("cluster-info does not name %s:\n%s", path, out)
	}
}
