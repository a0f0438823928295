package apiserver_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// Requests go through to Services and pods, with their method, path and query, and nothing by which
// the client proved itself.
func TestProxySubresources(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	rec := &apiservertest.Recorder{Next: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/away" {
			w.Header().Set("Location", "/here?a=b")
			w.WriteHeader(http.StatusFound)
			return
		}
		if r.URL.Path == "/page" {
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprintf(w, `<a href="/rewriteme">%s</a>`, r.Header.Get("X-Forwarded-Uri"))
			return
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.RequestURI(), body)
	})}
	b.PlainServer("web", rec)
	b.Extension("tls", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "over TLS") }))
	b.Replica.Await(func() bool {
		_, e1 := b.Replica.Server.Dialer().Endpoints(t.Context(), "default", "web", 443)
		_, e2 := b.Replica.Server.Dialer().Endpoints(t.Context(), "default", "tls", 443)
		return e1 == nil && e2 == nil
	})
	c := b.Replica.AdminHTTP()
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	const root = "/api/v1/namespaces/default/"
	for _, one := range []struct {
		method, path, body string
		code               int
		want               string
	}{
		{"GET", "services/web/proxy/a%2Fb/c?x=1", "", 200, "GET /a%2Fb/c?x=1 "},
		{"POST", "services/web:https/proxy/", "hello", 200, "POST / hello"},
		{"DELETE", "services/web:443/proxy/x", "", 200, "DELETE /x "},
		{"PUT", "pods/web:8443/proxy/x/", "b", 200, "PUT /x/ b"},
		{"GET", "services/https:tls:443/proxy/", "", 200, "over TLS"},
		{"GET", "services/web/proxy/page", "", 200,
			`<a href="` + root + `services/web/proxy/rewriteme">` + root + `services/web/proxy/page</a>`},
		{"GET", "pods/web:8443/proxy/page", "", 200, `<a href="` + root + `pods/web:8443/proxy/rewriteme">`},
		{"GET", "services/web:9/proxy/", "", 503, `no service port 9 found for service`},
		{"GET", "services/nobody/proxy/", "", 404, "not found"},
		{"GET", "pods/web:1/proxy/", "", 503, "error trying to reach service"},
		{"GET", "services/gopher:web:1/proxy/", "", 400, "invalid service request"},
	} {
		a := b.Replica.Call(c, one.method, root+one.path, one.body)
		if a.Code != one.code || !strings.Contains(a.Body, one.want) {
			t.Errorf("%s %s: %d %s", one.method, one.path, a.Code, a.Body)
		}
	}
	if a := b.Replica.Call(c, "GET", root+"services/web/proxy", ""); a.Code != 301 ||
		a.Header.Get("Location") != root+"services/web/proxy/" {
		t.Errorf("without a slash: %d %s", a.Code, a.Header.Get("Location"))
	}
	if a := b.Replica.Call(c, "GET", root+"services/web/proxy/away", ""); a.Code != 302 ||
		a.Header.Get("Location") != root+"services/web/proxy/here?a=b" {
		t.Errorf("a redirection: %d %s", a.Code, a.Header.Get("Location"))
	}
	if a := b.Replica.Call(c, "GET", "/api/v1/nodes/w1/proxy/healthz", ""); a.Code != 503 ||
		!strings.Contains(a.Body, "specify a port") {
		t.Errorf("a node: %d %s", a.Code, a.Body)
	}
	before := len(rec.Seen)
	if a := b.Replica.Call(b.Replica.Unauthenticated(), "GET", root+"services/web/proxy/", "", "Authorization",
		"Bearer alice-token"); a.Code != 403 || len(rec.Seen) != before {
		t.Errorf("who may not: %d", a.Code)
	}
	_ = b.Replica.Call(b.Replica.AdminHTTP(), "GET", root+"services/web/proxy/", "", "Proxy-Authorization",
		"Basic c2VjcmV0", "X-Remote-User", "root", "Impersonate-User", "alice")
	for _, r := range rec.Seen {
		if dump := fmt.Sprint(r.Header); strings.Contains(dump, "c2VjcmV0") || strings.Contains(dump, "root") ||
			strings.Contains(dump, "alice") {
			t.Errorf("credentials travelled: %s", dump)
		}
	}
}

// A node that serves by itself is asked without naming a port, over TLS on both sides: it hears who
// this API is, and this API believes no server but that node's. Another port is anybody's.
func TestProxyToNode(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	cluster, err := pki.NewCA("cluster", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	own := cluster.Rotator(pki.Client(api.UserAPIServer, api.GroupMasters), time.Now)
	b.Replica.Server.SetNodeTLS(func(node string) *tls.Config {
		return pki.NodeTLS(cluster.Pool(), own, node, time.Now)
	})
	for i, name := range []string{"w2", "w3"} {
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s %s", r.TLS.PeerCertificates[0].Subject.CommonName, r.URL.RequestURI())
		}))
		cert, err := cluster.Issue(pki.Profile{CommonName: api.NodeUserPrefix + "w2",
			Organizations: []string{api.GroupNodes}, Server: true}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		srv.TLS = &tls.Config{Certificates: []tls.Certificate{cert.TLS}, ClientAuth: tls.RequireAndVerifyClientCert,
			ClientCAs: cluster.Pool()}
		srv.Config.ErrorLog = log.New(io.Discard, "", 0)
		srv.StartTLS()
		t.Cleanup(srv.Close)
		ip := fmt.Sprintf("192.0.2.%d", i+1)
		b.Nodes.Mu.Lock()
		b.Nodes.At[name+" "+ip+":10250"] = srv.Listener.Addr().String()
		b.Nodes.Mu.Unlock()
		node := b.Replica.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}).(*corev1.Node).DeepCopy()
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
		node.Status.DaemonEndpoints.KubeletEndpoint.Port = 10250
		if _, err := b.Replica.Admin().CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err !=
			nil {
			t.Fatal(err)
		}
	}
	c := b.Replica.AdminHTTP()
	for path, want := range map[string]string{
		"w2/proxy/metrics/resource?x=1": "200 " + api.UserAPIServer + " /metrics/resource?x=1",
		"w2:10250/proxy/stats/summary":  "200 " + api.UserAPIServer + " /stats/summary",
		"http:w2:10250/proxy/pods":      "200 " + api.UserAPIServer + " /pods",
		"w3/proxy/metrics/resource": `503 the server's certificate is for \"system:node:w2\", not for ` +
			`\"system:node:w3\"`,
		"https:w2:9999/proxy/metrics": "503 error trying to reach service",
	} {
		code, text, _ := strings.Cut(want, " ")
		if a := b.Replica.Call(c, "GET", "/api/v1/nodes/"+path, ""); fmt.Sprint(a.Code) != code ||
			!strings.Contains(a.Body, text) {
			t.Errorf("%s: %d %s", path, a.Code, a.Body)
		}
	}
	if a := b.Replica.Call(b.Replica.Unauthenticated(), "GET", "/api/v1/nodes/w2/proxy/metrics/resource", "",
		"Authorization", "Bearer alice-token"); a.Code != 403 {
		t.Errorf("who may not: %d %s", a.Code, a.Body)
	}
}

// A websocket goes through, without the subprotocol that is a token.
func TestProxyWebSocket(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	protocols := make(chan string, 1)
	b.PlainServer("echo", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		protocols <- r.Header.Get("Sec-Websocket-Protocol")
		conn, err := (&websocket.Upgrader{Subprotocols: []string{"chat"}}).Upgrade(w, r, nil)
		if err != nil {
			return
		}
		defer conn.Close()
		kind, data, err := conn.ReadMessage()
		if err == nil {
			_ = conn.WriteMessage(kind, append([]byte("echo "), data...))
		}
	}))
	b.Replica.Await(func() bool {
		_, err := b.Replica.Server.Dialer().Endpoints(t.Context(), "default", "echo", 443)
		return err == nil
	})
	cert := b.Replica.Cert(pki.Client("admin", api.GroupMasters))
	d := websocket.Dialer{TLSClientConfig: pki.ClientTLS(b.Replica.Trust.Pool(), nil, "", nil),
		Subprotocols: []string{"chat", bearerSubprotocol}}
	d.TLSClientConfig.Certificates = append(d.TLSClientConfig.Certificates, cert)
	conn, resp, err := d.DialContext(t.Context(),
		"wss://"+b.Replica.Addr+"/api/v1/namespaces/default/services/echo/proxy/ws", nil)
	if err != nil {
		t.Fatal(err, resp)
	}
	defer conn.Close()
	if got := <-protocols; got != "chat" {
		t.Errorf("subprotocols %q", got)
	}
	if err := conn.WriteMessage(websocket.TextMessage, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, data, err := conn.ReadMessage(); err != nil || string(data) != "echo hi" {
		t.Errorf("%q %v", data, err)
	}
}

const bearerSubprotocol = "base64url.bearer.authorization.k8s.io.YWxpY2UtdG9rZW4"
