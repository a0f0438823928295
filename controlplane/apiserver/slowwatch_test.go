package apiserver_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// A client that watches large objects, as they are or in a table, and does not read is given up as
// soon as the history has moved on, long before a stalled connection is: what it holds is let go.
func TestWatchesThatDoNotReadAreCut(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	text := strings.Repeat("x", 900<<10)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "large"},
		Data: map[string]string{"k": text}}
	r.Must(cm)
	admin := r.Cert(pki.Client("admin", api.GroupMasters))
	for _, h2 := range []bool{true, false} {
		for _, accept := range []string{"application/json",
			"application/vnd.kubernetes.protobuf;stream=watch,application/json",
			"application/json;as=Table;v=v1;g=meta.k8s.io"} {
			c := &http.Client{Transport: &http.Transport{
				TLSClientConfig: &tls.Config{RootCAs: r.Trust.Pool(), Certificates: []tls.Certificate{admin},
					ServerName: "127.0.0.1"},
				ForceAttemptHTTP2: h2,
				DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
					conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
					if tcp, ok := conn.(*net.TCPConn); ok {
						_ = tcp.SetReadBuffer(16 << 10)
					}
					return conn, err
				},
			}}
			for range 2 {
				req, err := http.NewRequestWithContext(t.Context(), "GET",
					"https://"+r.Addr+"/api/v1/namespaces/default/configmaps?watch=true&includeObject=Object", nil)
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Accept", accept)
				resp, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { resp.Body.Close() })
				if resp.StatusCode != http.StatusOK {
					t.Fatalf("%s: %d", accept, resp.StatusCode)
				}
			}
		}
	}
	if n, _ := r.Server.GateStats(flowcontrol.Watch); n != 12 {
		t.Fatalf("%d watches run", n)
	}
	client := r.AdminHTTP()
	for i := range 24 {
		cm.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}
		cm.Annotations = map[string]string{"n": fmt.Sprint(i)}
		body, err := json.Marshal(cm)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Call(client, "PUT", "/api/v1/namespaces/default/configmaps/large", string(body)); got.Code !=
			http.StatusOK {
			t.Fatalf("write %d: %d %s", i, got.Code, got.Body)
		}
	}
	soon, done := context.WithTimeout(t.Context(), apiserver.DefaultPace.Stall/2)
	defer done()
	if err := wait.For(soon, 50*time.Millisecond, func() error {
		if n, _ := r.Server.GateStats(flowcontrol.Watch); n > 0 {
			return fmt.Errorf("%d watches go on", n)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
