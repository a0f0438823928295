package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/keypair"
)

// keyPairSecret returns a Secret for hosts, with a certificate of this serial number.
func keyPairSecret(t *testing.T, serial int64, hosts ...string) *v1.Secret {
	t.Helper()
	return &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "web-tls"}, Type: v1.SecretTypeTLS,
		Data: keypair.DataWithSerial(t, serial, hosts...)}
}

// proxyClient sends requests under any host name to the ingress proxies at an address, from the
// host outside of the cluster.
type proxyClient struct {
	dial func(ctx context.Context, network, address string) (net.Conn, error)
	at   string
}

func (e proxyClient) httpClient() *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, ForceAttemptHTTP2: true,
		// The test reads the certificate.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			_, port, _ := net.SplitHostPort(address)
			return e.dial(ctx, network, net.JoinHostPort(e.at, port))
		},
	}}
}

// fetchURL returns the status code, the body, and the serial number of the server certificate.
func (e proxyClient) fetchURL(url string) (code int, body string, serial int64, err error) {
	resp, err := e.httpClient().Get(url)
	if err != nil {
		return 0, "", 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if resp.TLS != nil {
		serial = resp.TLS.PeerCertificates[0].SerialNumber.Int64()
	}
	return resp.StatusCode, string(text), serial, err
}

func (e proxyClient) awaitResponse(t *testing.T, url string, code int, part string, serial int64) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		got, body, shown, err := e.fetchURL(url)
		if err == nil && (got != code || !strings.Contains(body, part) || shown != serial) {
			err = fmt.Errorf("%s: %d %q by certificate %d, want %d %q by %d", url, got, body, shown, code, part, serial)
		}
		return err
	})
}

func pathTo(path string, kind networkingv1.PathType, service string) networkingv1.HTTPIngressPath {
	return networkingv1.HTTPIngressPath{Path: path, PathType: &kind, Backend: networkingv1.IngressBackend{
		Service: &networkingv1.IngressServiceBackend{Name: service,
			Port: networkingv1.ServiceBackendPort{Name: "http"}}}}
}

func hostRule(host string, paths ...networkingv1.HTTPIngressPath) networkingv1.IngressRule {
	return networkingv1.IngressRule{Host: host,
		IngressRuleValue: networkingv1.IngressRuleValue{HTTP: &networkingv1.HTTPIngressRuleValue{Paths: paths}}}
}

// awaitTrace waits until a trace from pod one to a URL contains all the words.
func (w testNamespace) awaitTrace(t *testing.T, url string, words ...string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		// it fails where the way ends
		out, _ := testenv.Try(t, kubectlPrograms()["kctl"], "-n", w.ns, "net", "trace", "one", url)
		return requireWords(out, words)
	})
}

// An IngressClass gets proxies with an address of a pool. Hosts and paths lead to their Services
// there and at node ports. Key pairs are rotated without a restart. Clients that retry do not
// notice the exit of a proxy. Everything is deleted with the class.
func TestIngress(t *testing.T) {
	w := newNamespace(t)
	outside := testenv.Host(t, "registry")
	raw := outside.IP.As4()
	raw[3] = 241
	vip := netip.AddrFrom4(raw)
	w.createPool(fmt.Sprintf("{addresses: [%s], namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: "+
		"keelson-entry}}}", vip))
	class := w.ns
	_, err := w.cs.NetworkingV1().IngressClasses().Create(t.Context(), &networkingv1.IngressClass{
		ObjectMeta: metav1.ObjectMeta{Name: class},
		Spec:       networkingv1.IngressClassSpec{Controller: "keelson.dev/ingress"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	deleteClass := func() error {
		return w.cs.NetworkingV1().IngressClasses().Delete(context.Background(), class, metav1.DeleteOptions{})
	}
	w.Cleanup(func() { _ = deleteClass() })
	for _, name := range []string{"one", "two"} {
		p := newPod(name, hello)
		w.createPod(p)
		w.createService(webService(name, v1.ServiceTypeClusterIP))
	}
	secrets := w.cs.CoreV1().Secrets(w.ns)
	if _, err := secrets.Create(t.Context(), keyPairSecret(t, 1, "one.example"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = w.cs.NetworkingV1().Ingresses(w.ns).Create(t.Context(),
		&networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: networkingv1.IngressSpec{
			IngressClassName: &class,
			TLS:              []networkingv1.IngressTLS{{Hosts: []string{"one.example"}, SecretName: "web-tls"}},
			Rules: []networkingv1.IngressRule{
				hostRule("one.example", pathTo("/", networkingv1.PathTypeExact, "one"),
					pathTo("/lost", networkingv1.PathTypePrefix, "lost")),
				hostRule("*.two.example", pathTo("/", networkingv1.PathTypePrefix, "two")),
			},
		}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.awaitPod("one", requireReady)
	w.awaitPod("two", requireReady)
	dial := testenv.HTTP(outside).Transport.(*http.Transport).DialContext
	door := proxyClient{dial: dial, at: vip.String()}
	door.awaitResponse(t, "http://one.example/", 200, "one", 0)
	door.awaitResponse(t, "http://x.two.example/", 200, "two", 0)
	door.awaitResponse(t, "http://one.example/other", 404, "", 0)
	door.awaitResponse(t, "http://one.example/lost", 503, "", 0)
	door.awaitResponse(t, "http://elsewhere.example/", 404, "", 0)
	door.awaitResponse(t, "https://one.example/", 200, "one", 1)
	w.awaitEvent("web", "NotServed", "Service lost does not exist")
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Try(t, kubectlPrograms()["kctl"], "-n", w.ns, "why", "ingress/web")
		if !strings.Contains(out, "Service lost does not exist") || strings.Contains(out, "Secret") {
			return fmt.Errorf("why says: %v %s", err, out)
		}
		return nil
	})
	w.awaitTrace(t, "https://one.example/", "entrance  ingress class "+class+", for ingress "+w.ns+"/web",
		"TLS Secret "+w.ns+"/web-tls is there",
		vip.String()+" is service keelson-entry/"+class, "pod "+w.ns+"/one on node", "nothing stands in the way")
	w.awaitTrace(t, "http://one.example/lost", "Service lost does not exist", "stops at match")
	w.awaitTrace(t, "http://one.example/other", "the nearest is ingress "+w.ns+"/web", "stops at match")
	testenv.Eventually(t, soon, func() error {
		i, err := w.cs.NetworkingV1().Ingresses(w.ns).Get(t.Context(), "web", metav1.GetOptions{})
		if err == nil &&
			(len(i.Status.LoadBalancer.Ingress) != 1 || i.Status.LoadBalancer.Ingress[0].IP != vip.String()) {
			err = fmt.Errorf("the status is %+v", i.Status.LoadBalancer.Ingress)
		}
		return err
	})
	service, err := w.cs.CoreV1().Services("keelson-entry").Get(t.Context(), class, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	proxyClient{dial: dial, at: testenv.Host(t, "w1").IP.String()}.awaitResponse(t,
		fmt.Sprintf("http://one.example:%d/", service.Spec.Ports[0].NodePort), 200, "one", 0)

	if _, err := secrets.Update(t.Context(), keyPairSecret(t, 2, "one.example"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	door.awaitResponse(t, "https://one.example/", 200, "one", 2)

	w.replaceIngressProxy(t, door, class)
	w.deleteIngressClass(t, deleteClass, class)
}

// replaceIngressProxy deletes one of the two proxies of an ingress class, and expects a response.
func (w testNamespace) replaceIngressProxy(t *testing.T, door proxyClient, class string) {
	t.Helper()
	proxies := w.cs.CoreV1().Pods("keelson-entry")
	list, err := proxies.List(t.Context(), metav1.ListOptions{LabelSelector: "keelson.dev/ingress-class=" + class})
	if err != nil || len(list.Items) != 2 || list.Items[0].Spec.NodeName == list.Items[1].Spec.NodeName {
		t.Fatalf("want two proxies on two nodes: %v, %v", list, err)
	}
	now := int64(0)
	err = proxies.Delete(t.Context(), list.Items[0].Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if err != nil {
		t.Fatal(err)
	}
	door.awaitResponse(t, "http://one.example/", 200, "one", 0)
}

// deleteIngressClass deletes an ingress class, and waits until its proxies no longer exist.
func (w testNamespace) deleteIngressClass(t *testing.T, deleteClass func() error, class string) {
	t.Helper()
	proxies := w.cs.CoreV1().Pods("keelson-entry")
	if err := deleteClass(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*soon, func() error {
		left, err := proxies.List(t.Context(), metav1.ListOptions{LabelSelector: "keelson.dev/ingress-class=" + class})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d proxies are left", len(left.Items))
		}
		return err
	})
}
