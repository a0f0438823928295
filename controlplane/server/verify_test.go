package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
)

// A replica verifies one backup at a time, and none that would take more memory than it has for that; it says who does.
func TestVerifyIsBounded(t *testing.T) {
	const most = 1 << 20
	p := newPlane(t, 1, func(c *Config) { c.verifyBytes = most })
	cfg := p.rest("cp1")
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	verify := func(body io.Reader) (code int, retry, text string) {
		t.Helper()
		req, err := http.NewRequestWithContext(context.Background(), "POST", cfg.Host+api.PathClusterVerify, body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header.Get("Retry-After"), string(raw)
	}
	whole, err := os.ReadFile(p.backup("cp1"))
	if err != nil {
		t.Fatal(err)
	}
	if code, _, text := verify(bytes.NewReader(whole)); code != http.StatusOK || len(whole) > most {
		t.Fatalf("a backup of %d bytes: %d %s", len(whole), code, text)
	}

	// One that is on its way and does not end. It may itself meet one of those that ask whether it has begun.
	var more *io.PipeWriter
	var first chan int
	begin := func() {
		r, w := io.Pipe()
		ended := make(chan int, 1)
		go func() {
			code, _, _ := verify(r)
			r.Close()
			ended <- code
		}()
		more, first = w, ended
	}
	begin()
	eventually(t, func() error {
		code, retry, text := verify(bytes.NewReader(nil))
		if code == http.StatusTooManyRequests && retry != "" && strings.Contains(text, "one at a time") {
			return nil
		}
		select {
		case <-first:
			begin()
		default:
		}
		return fmt.Errorf("a second one is answered %d %s", code, text)
	})
	if _, err := more.Write(whole); err != nil {
		t.Fatal(err)
	}
	more.Close()
	if code := <-first; code != http.StatusOK {
		t.Errorf("the first one: %d", code)
	}

	for range 3 {
		cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "big-"}, Data: map[string]string{"a": strings.Repeat("a", most/2)}}
		if _, err := p.client("cp1").CoreV1().ConfigMaps("default").Create(context.Background(), cm, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if whole, err = os.ReadFile(p.backup("cp1")); err != nil || len(whole) <= most {
		t.Fatalf("the backup has %d bytes, %v", len(whole), err)
	}
	if code, _, text := verify(bytes.NewReader(whole)); code != http.StatusRequestEntityTooLarge || !strings.Contains(text, "keelson-controlplane verify") {
		t.Errorf("a backup of %d bytes: %d %s", len(whole), code, text)
	}
}
