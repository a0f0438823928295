package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/test/testenv"
)

// echoImage is the program of test/e2e/echo.
const echoImage = "keelson.dev/echo:v1"

// createEcho runs the echo program behind Service echo. The ports state their protocols in
// appProtocol.
func (w testNamespace) createEcho() {
	w.Helper()
	binary := filepath.Join(w.TempDir(), "echo")
	build := exec.Command("go", "build", "-trimpath", "-o", binary, "keelson.dev/keelson/test/e2e/echo")
	build.Env = append(build.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		w.Fatalf("%v\n%s", err, out)
	}
	testenv.LoadImage(w, echoImage, map[string]string{"echo": binary}, "/echo")
	w.createPod(newPod("echo", echoImage))
	s := webService("echo", v1.ServiceTypeClusterIP)
	for name, protocol := range map[string]string{"ws": "kubernetes.io/ws", "h2c": "kubernetes.io/h2c"} {
		p := s.Spec.Ports[0]
		p.Name, p.AppProtocol, p.Port = name, &protocol, int32(80+len(name))
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	w.createService(s)
	w.awaitPod("echo", requireReady)
}

// F117, F118: WebSockets, HTTP/2 without TLS and gRPC with streams pass through the proxies of an Ingress class and of a
// Gateway, from clients with TLS and without.
func TestProxiesSpeak(t *testing.T) {
	w := newNamespace(t)
	cluster, err := dynamic.NewForConfig(testenv.RestConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := definitions.Gateway.Install(t.Context(), cluster, func(definitions.Outcome) {}); err != nil {
		t.Fatal(err)
	}
	g := gatewayAPI{testNamespace: w, Interface: cluster}
	outside := testenv.Host(t, "registry")
	raw := outside.IP.As4()
	w.createPool(fmt.Sprintf("{addresses: [%d.%d.%d.243-%d.%d.%d.244], namespaceSelector: {matchLabels: "+
		"{kubernetes.io/metadata.name: keelson-entry}}}",
		raw[0], raw[1], raw[2], raw[0], raw[1], raw[2]))
	w.createEcho()
	if _, err := w.cs.CoreV1().Secrets(w.ns).Create(t.Context(), keyPairSecret(t, 1, "talk.example", "rpc.example"),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	class := w.ns
	if _, err := w.cs.NetworkingV1().IngressClasses().Create(t.Context(), &networkingv1.IngressClass{
		ObjectMeta: metav1.ObjectMeta{Name: class},
		Spec:       networkingv1.IngressClassSpec{Controller: "keelson.dev/ingress"}}, metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	w.Cleanup(func() {
		_ = w.cs.NetworkingV1().IngressClasses().Delete(context.Background(), class, metav1.DeleteOptions{})
	})
	at := func(path, port string) networkingv1.HTTPIngressPath {
		p := pathTo(path, networkingv1.PathTypePrefix, "echo")
		p.Backend.Service.Port.Name = port
		return p
	}
	if _, err := w.cs.NetworkingV1().Ingresses(w.ns).Create(t.Context(),
		&networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: "talk"}, Spec: networkingv1.IngressSpec{
			IngressClassName: &class, TLS: []networkingv1.IngressTLS{{Hosts: []string{"talk.example", "rpc.example"},
				SecretName: "web-tls"}},
			Rules: []networkingv1.IngressRule{hostRule("talk.example", at("/ws", "ws"), at("/h2", "h2c"),
				at("/", "http")),
				hostRule("rpc.example", at("/", "h2c"))},
		}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	g.createObject(t, "gatewayclasses", "GatewayClass", "",
		fmt.Sprintf("metadata: {name: %s}\nspec: {controllerName: keelson.dev/gateway}", class))
	w.Cleanup(func() {
		_ = g.resourceClient("gatewayclasses").Delete(context.Background(), class, metav1.DeleteOptions{})
	})
	g.createObject(t, "gateways", "Gateway", w.ns, fmt.Sprintf(`metadata: {name: talk}
spec:
  gatewayClassName: %s
  listeners:
  - {name: http, port: 80, protocol: HTTP}
  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: web-tls}]}}`, class))
	g.createObject(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: talk}
spec:
  parentRefs: [{name: talk}]
  hostnames: [talk.example]
  rules:
  - {matches: [{path: {value: /ws}}], backendRefs: [{name: echo, port: 82}]}
  - {matches: [{path: {value: /h2}}], backendRefs: [{name: echo, port: 83}]}
  - {backendRefs: [{name: echo, port: 80}]}`)
	g.createObject(t, "grpcroutes", "GRPCRoute", w.ns, `metadata: {name: rpc}
spec:
  parentRefs: [{name: talk}]
  hostnames: [rpc.example]
  rules: [{matches: [{method: {service: keelson.test.Echo}}], backendRefs: [{name: echo, port: 80}]}]`)
	for who, name := range map[string]string{"ingress": class, "gateway": w.awaitGatewayService("talk")} {
		t.Run(who, func(t *testing.T) {
			door := proxyClient{dial: testenv.HTTP(outside).Transport.(*http.Transport).DialContext,
				at: w.awaitAddress(t, name)}
			for _, secure := range []bool{false, true} {
				door.checkHTTP(t, secure)
				// Earlier requests may have reached the other proxy, which receives routes at
				// another time.
				testenv.Eventually(t, soon, func() error { return door.checkWebSocket(t.Context(), secure) })
				testenv.Eventually(t, soon, func() error { return door.checkGRPC(t.Context(), secure) })
			}
		})
	}
}

// awaitGatewayService waits for the Service that the controller creates for a Gateway of this
// namespace.
func (w testNamespace) awaitGatewayService(gateway string) (name string) {
	w.Helper()
	testenv.Eventually(w, soon, func() error {
		l, err := w.cs.CoreV1().Services("keelson-entry").List(w.Context(),
			metav1.ListOptions{LabelSelector: "gateway.networking.k8s.io/gateway-class-name=" + w.ns})
		if err != nil || len(l.Items) != 1 {
			return fmt.Errorf("Services of Gateway %s: %v", gateway, err)
		}
		name = l.Items[0].Name
		return nil
	})
	return name
}

// awaitAddress waits for the load balancer address of a Service.
func (w testNamespace) awaitAddress(t *testing.T, name string) (ip string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		s, err := w.cs.CoreV1().Services("keelson-entry").Get(t.Context(), name, metav1.GetOptions{})
		if err == nil && len(s.Status.LoadBalancer.Ingress) == 0 {
			err = errors.New("it has no address")
		}
		if err == nil {
			ip = s.Status.LoadBalancer.Ingress[0].IP
		}
		return err
	})
	return ip
}

func (e proxyClient) dialProxy(ctx context.Context, secure bool) (net.Conn, error) {
	port := "80"
	if secure {
		port = "443"
	}
	return e.dial(ctx, "tcp", net.JoinHostPort(e.at, port))
}

// checkHTTP sends requests by HTTP/1.1 and HTTP/2 to the proxy and checks the protocol that the
// backend receives.
func (e proxyClient) checkHTTP(t *testing.T, secure bool) {
	t.Helper()
	for _, second := range []bool{false, true} {
		p := &http.Protocols{}
		p.SetHTTP1(!second)
		p.SetHTTP2(second && secure)
		p.SetUnencryptedHTTP2(second && !secure)
		c := &http.Client{Timeout: 5 * time.Second,
			Transport: &http.Transport{Protocols: p, DisableKeepAlives: true,
				TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return e.dialProxy(ctx,
						secure)
				}}}
		scheme := map[bool]string{false: "http", true: "https"}[secure]
		for path, behind := range map[string]string{"/": "HTTP/1.1", "/h2": "HTTP/2.0"} {
			testenv.Eventually(t, soon, func() error {
				resp, err := c.Get(scheme + "://talk.example" + path)
				if err != nil {
					return err
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				if want := "asked by " + behind + " for talk.example"; err == nil &&
					(string(body) != want || (resp.ProtoMajor == 2) != second) {
					err = fmt.Errorf("%s of %s by TLS %v: %s %q, want %q", path, scheme, secure, resp.Proto, body, want)
				}
				return err
			})
		}
	}
}

// checkWebSocket exchanges messages over a WebSocket.
func (e proxyClient) checkWebSocket(ctx context.Context, secure bool) error {
	reach := func(ctx context.Context, _, _ string) (net.Conn, error) { return e.dialProxy(ctx, secure) }
	d := websocket.Dialer{NetDialContext: reach, Subprotocols: []string{"echo"}, HandshakeTimeout: 5 * time.Second,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	c, resp, err := d.DialContext(ctx, map[bool]string{false: "ws", true: "wss"}[secure]+"://talk.example/ws", nil)
	if err != nil {
		return fmt.Errorf("a WebSocket with TLS %v: %v %w", secure, resp, err)
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(soon)); err != nil {
		return err
	}
	for _, word := range []string{"one", "two"} {
		if err := c.WriteMessage(websocket.BinaryMessage, []byte(word)); err != nil {
			return fmt.Errorf("a WebSocket with TLS %v: %w", secure, err)
		}
		if kind, data, err := c.ReadMessage(); err != nil || kind != websocket.BinaryMessage ||
			string(data) != "echo "+word || c.Subprotocol() != "echo" {
			return fmt.Errorf("a WebSocket with TLS %v: %q %v", secure, data, err)
		}
	}
	return nil
}

// checkGRPC exchanges messages over a gRPC stream. Each message is returned before the next is
// sent, and the stream ends with a status and a trailer.
func (e proxyClient) checkGRPC(ctx context.Context, secure bool) error {
	trust := insecure.NewCredentials()
	if secure {
		trust = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	}
	c, err := grpc.NewClient("passthrough:///rpc.example", grpc.WithTransportCredentials(trust),
		grpc.WithAuthority("rpc.example"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return e.dialProxy(ctx, secure)
		}))
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, soon)
	defer cancel()
	s, err := c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/keelson.test.Echo/Both",
		grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	for _, word := range []string{"one", "two"} {
		got := &wrapperspb.StringValue{}
		if err := errors.Join(s.SendMsg(wrapperspb.String(word)), s.RecvMsg(got)); err != nil ||
			got.Value != "echo "+word {
			return fmt.Errorf("gRPC with TLS %v: %q %v", secure, got.Value, err)
		}
	}
	err = errors.Join(s.SendMsg(wrapperspb.String("end")))
	if end := s.RecvMsg(&wrapperspb.StringValue{}); err != nil || status.Code(end) != codes.OutOfRange ||
		fmt.Sprint(s.Trailer()["said"]) != "[bye]" {
		return fmt.Errorf("gRPC with TLS %v ends with %v, %v, trailer %v", secure, err, end, s.Trailer())
	}
	return nil
}
