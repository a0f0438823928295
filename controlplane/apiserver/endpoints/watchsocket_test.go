package endpoints_test

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A watch over a WebSocket sends each event as one text message of JSON, whichever subprotocol the
// client offers: browsers offer base64.binary.k8s.io next to their token and parse the messages as
// they are. F72
func TestWatchOverWebSocket(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	apiservertest.GrantEdit(t, r, "alice")
	token := "base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString([]byte("alice-token"))
	const path = "/api/v1/namespaces/default/configmaps?watch=1"
	large := strings.Repeat("x", 100<<10)
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "before"},
		Data: map[string]string{"large": large}})
	for name, protocols := range map[string][]string{
		"plain":  {token, "binary.k8s.io"},
		"base64": {token, "base64.binary.k8s.io"},
	} {
		conn, _, err := r.Browser(path, protocols...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if conn.Subprotocol() != protocols[1] {
			t.Errorf("%s: subprotocol %q, want %q", name, conn.Subprotocol(), protocols[1])
		}
		next := func() (string, *corev1.ConfigMap) {
			t.Helper()
			_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
			kind, data, err := conn.ReadMessage()
			if err != nil || kind != websocket.TextMessage {
				t.Fatalf("%s: message of type %d, %v", name, kind, err)
			}
			var ev struct {
				Type   string
				Object corev1.ConfigMap
			}
			if err := json.Unmarshal(data, &ev); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			return ev.Type, &ev.Object
		}
		for seen := false; !seen; {
			kind, o := next()
			seen = o.Name == "before"
			if kind != "ADDED" || seen && o.Data["large"] != large {
				t.Errorf("%s: %s of %s with %d bytes", name, kind, o.Name, len(o.Data["large"]))
			}
		}
		r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}})
		for {
			kind, o := next()
			if o.Name == name {
				if kind != "ADDED" || o.Kind != "ConfigMap" {
					t.Errorf("%s: %s of a %s", name, kind, o.Kind)
				}
				break
			}
		}
		conn.Close()
	}
	if conn, resp, err := r.Browser(path, "binary.k8s.io"); err == nil || resp == nil ||
		resp.StatusCode != http.StatusForbidden && resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a token: %v %v", conn, err)
	}
	conn, _, err := r.Browser(path+"&timeoutSeconds=1", token, "binary.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for {
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, _, err := conn.ReadMessage(); err != nil {
			if !websocket.IsCloseError(err, websocket.CloseNormalClosure) {
				t.Errorf("the watch ended with %v, want a normal closure", err)
			}
			return
		}
	}
}

// A client that sends more than a watch expects is disconnected.
func TestWatchSocketReadIsBounded(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	apiservertest.GrantEdit(t, r, "alice")
	token := "base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString([]byte("alice-token"))
	conn, _, err := r.Browser("/api/v1/namespaces/default/configmaps?watch=1", token, "binary.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.WriteMessage(websocket.TextMessage, make([]byte, 1<<20)); err != nil {
		return // it was disconnected meanwhile
	}
	for {
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, _, err := conn.ReadMessage(); err != nil {
			if ne, timeout := err.(interface{ Timeout() bool }); timeout && ne.Timeout() {
				t.Errorf("a client that sends a megabyte stays connected: %v", err)
			}
			return
		}
	}
}

// Responses name the FlowSchema and the priority level that match the request. F16
func TestFlowHeaders(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	apiservertest.GrantEdit(t, r, "alice")
	uids := map[string]string{}
	schemas, err := r.Admin().FlowcontrolV1().FlowSchemas().List(apiservertest.Within(t), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range schemas.Items {
		uids[s.Name] = string(s.UID)
	}
	levels, err := r.Admin().FlowcontrolV1().PriorityLevelConfigurations().List(apiservertest.Within(t),
		metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range levels.Items {
		uids["level "+l.Name] = string(l.UID)
	}
	bearer := []string{"Authorization", "Bearer alice-token"}
	for _, c := range []struct {
		path, schema, level string
		headers             []string
	}{
		{"/api/v1/namespaces/default/configmaps", "global-default", "global-default", bearer},
		{"/api/v1/namespaces/default/configmaps/absent", "global-default", "global-default", bearer},
		{"/api/v1/namespaces/other/configmaps", "global-default", "global-default", bearer}, // 403
		{"/api/v1/namespaces/default/configmaps?watch=1&timeoutSeconds=1", "global-default", "global-default", bearer},
		{"/version", "global-default", "global-default", bearer},
		{"/version", "global-default", "global-default", nil},
	} {
		a := r.Call(r.HTTP(nil), "GET", c.path, "", c.headers...)
		if got := a.Header.Get("X-Kubernetes-PF-FlowSchema-UID"); got != uids[c.schema] || got == "" {
			t.Errorf("%s: FlowSchema %q, want %s (%s)", c.path, got, uids[c.schema], c.schema)
		}
		if got := a.Header.Get("X-Kubernetes-PF-PriorityLevel-UID"); got != uids["level "+c.level] || got == "" {
			t.Errorf("%s: priority level %q, want %s (%s)", c.path, got, uids["level "+c.level], c.level)
		}
	}
}
