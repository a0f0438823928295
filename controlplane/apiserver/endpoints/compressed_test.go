package endpoints_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// compressedFrom is the size from which objects and lists are compressed, as in Kubernetes.
const compressedFrom = 128 << 10

// A decompressed response equals the uncompressed response. Objects and lists are compressed from
// a size on, and documents of the server always. The header Vary lists the request headers that
// determine the response. Clients that do not accept gzip, or accept it with quality 0, get none.
func TestCompressedResponsesAreEqual(t *testing.T) {
	now := time.Now()
	// tables tell of ages
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Clock = func() time.Time { return now } })
	c := r.AdminHTTP()
	for i := range 3 {
		r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("c", i)},
			Data: map[string]string{"k": strings.Repeat("word ", 20_000)}})
	}
	const maps, table = "/api/v1/namespaces/default/configmaps", "application/json;as=Table;v=v1;g=meta.k8s.io"
	const proto, aggregated = "application/vnd.kubernetes.protobuf",
		"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "large"},
		Data: map[string]string{"k": strings.Repeat("word ", 40_000)}})
	for _, q := range []struct {
		path, accept string
		always       bool // compressed whatever its size
	}{
		{maps, "application/json", false}, {maps, "application/yaml", false}, {maps, proto, false},
		{maps, table, true}, // what is shown of large objects is written as it is made
		{maps + "?includeObject=Object", table, false}, {maps + "?limit=1", "application/json", false},
		{maps + "/c0", "application/json", false}, {maps + "/large", "application/json", false},
		{maps + "/large", proto, false},
		{maps + "/large?pretty=true", "application/json", false}, {maps + "/no-such", "application/json", false},
		{"/api/v1/namespaces", "application/json", false}, {"/apis", "application/json", false},
		{"/apis", aggregated, false},
		{"/api", aggregated, false}, {"/api/v1", "application/json", false}, {"/version", "application/json", false},
		{"/openapi/v2", "application/json", true}, {"/openapi/v3", "application/json", false},
		{"/openapi/v3/api/v1", "application/json", true}, {"/metrics", "text/plain", true},
	} {
		plain := r.Call(c, "GET", q.path, "", "Accept", q.accept, "Accept-Encoding", "identity")
		none := r.Call(c, "GET", q.path, "", "Accept", q.accept, "Accept-Encoding", "gzip;q=0, deflate")
		zipped := r.Call(c, "GET", q.path, "", "Accept", q.accept, "Accept-Encoding", "deflate, gzip;q=0.5")
		name := q.path + " as " + q.accept
		if plain.Header.Get("Content-Encoding")+none.Header.Get("Content-Encoding") != "" {
			t.Errorf("%s: who takes no gzip gets %v and %v", name, plain.Header, none.Header)
			continue
		}
		if packed := zipped.Header.Get("Content-Encoding") == "gzip"; packed !=
			(q.always || len(plain.Body) >= compressedFrom) {
			t.Errorf("%s: %d bytes are compressed: %v", name, len(plain.Body), packed)
		} else if packed {
			if varies := zipped.Header.Values("Vary"); q.path != "/metrics" &&
				!slices.Contains(varies, "Accept-Encoding") {
				t.Errorf("%s: Vary is %q", name, varies)
			}
			zipped.Body = unpacked(t, zipped.Body)
		}
		if q.path == "/metrics" { // they go on
			plain.Body, zipped.Body, none.Body = familyLines(plain.Body), familyLines(zipped.Body),
				familyLines(none.Body)
		}
		if zipped.Code != plain.Code || zipped.Body != plain.Body || none.Body != plain.Body {
			t.Errorf("%s: %d and %d bytes, %d compressed", name, len(plain.Body), len(none.Body), len(zipped.Body))
		}
		if zipped.Header.Get("Content-Type") != plain.Header.Get("Content-Type") ||
			zipped.Header.Get("ETag") != plain.Header.Get("ETag") {
			t.Errorf("%s: %v and %v", name, plain.Header, zipped.Header)
		}
	}
}

// A watch is not compressed: its events would wait in the buffer.
func TestWatchesAreNotCompressed(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "large"},
		Data: map[string]string{"k": strings.Repeat("word ", 40_000)}})
	req, err := http.NewRequestWithContext(apiservertest.Within(t), "GET", "https://"+r.Addr+
		"/api/v1/namespaces/default/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := r.AdminHTTP().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	begins := make([]byte, len(`{"type":"ADDED"`))
	if _, err := io.ReadFull(resp.Body, begins); err != nil || string(begins) != `{"type":"ADDED"` ||
		resp.Header.Get("Content-Encoding") != "" {
		t.Errorf("%v: %q, %v", err, begins, resp.Header)
	}
}

func unpacked(t *testing.T, body string) string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(zip)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// familyLines returns the lines of metrics that describe the metric families.
func familyLines(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
