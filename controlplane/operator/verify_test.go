package operator_test

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
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A replica verifies one backup at a time, and refuses a backup that exceeds its memory limit for
// verification. The error names the command that verifies such a backup.
func TestVerifyIsBounded(t *testing.T) {
	const maxBytes = 1 << 20
	p := newPlane(t, 1, func(c *server.Config) { c.Limits.VerifiedBackup = maxBytes })
	cfg := p.RESTConfig("cp1")
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
	backup, err := os.ReadFile(p.Backup("cp1"))
	if err != nil {
		t.Fatal(err)
	}
	if code, _, text := verify(bytes.NewReader(backup)); code != http.StatusOK || len(backup) > maxBytes {
		t.Fatalf("verifying a backup of %d bytes: status %d, %s", len(backup), code, text)
	}

	// The first verification reads an upload that does not end. The upload may be refused, if it
	// meets one of the requests that wait for its start. Then it is sent again.
	var upload *io.PipeWriter
	var first chan int
	startUpload := func() {
		r, w := io.Pipe()
		ended := make(chan int, 1)
		go func() {
			code, _, _ := verify(r)
			r.Close()
			ended <- code
		}()
		upload, first = w, ended
	}
	startUpload()
	servertest.Eventually(t, func() error {
		code, retry, text := verify(bytes.NewReader(nil))
		if code == http.StatusTooManyRequests && retry != "" && strings.Contains(text, "is verifying another backup") {
			return nil
		}
		select {
		case <-first:
			startUpload()
		default:
		}
		return fmt.Errorf("a second verification gets status %d, %s", code, text)
	})
	if _, err := upload.Write(backup); err != nil {
		t.Fatal(err)
	}
	upload.Close()
	if code := <-first; code != http.StatusOK {
		t.Errorf("the first verification gets status %d", code)
	}

	for range 3 {
		cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "big-"},
			Data: map[string]string{"a": strings.Repeat("a", maxBytes/2)}}
		if _, err := p.Client("cp1").CoreV1().ConfigMaps("default").Create(context.Background(), cm,
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if backup, err = os.ReadFile(p.Backup("cp1")); err != nil || len(backup) <= maxBytes {
		t.Fatalf("the large backup has %d bytes, error %v", len(backup), err)
	}
	if code, _, text := verify(bytes.NewReader(backup)); code != http.StatusRequestEntityTooLarge ||
		!strings.Contains(text, "keelson-controlplane verify") {
		t.Errorf("verifying a backup of %d bytes: status %d, %s", len(backup), code, text)
	}
}
