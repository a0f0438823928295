package webhook

import (
	"context"
	"encoding/pem"
	"errors"
	"net/http/httptest"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/apiserver/webhook/overdue"
)

// A response that arrives after the deadline is ignored, whatever its content: the error is the
// timeout.
func TestAnswersAtTheDeadline(t *testing.T) {
	for _, says := range []string{``, `{"text":"late"}`} {
		ctx := overdue.New(t.Context())
		srv := httptest.NewTLSServer(ctx.RespondWith(says))
		t.Cleanup(srv.Close)
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
		e, err := NewEndpoint(Address{URL: srv.URL, CA: ca})
		if err != nil {
			t.Fatal(err)
		}
		if data, err := e.Ask(ctx, "", []byte(`{}`), 100); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("an endpoint that says %q: %q, %v", says, data, err)
		}
		ctx.Over.Store(false)
		s, err := New(&rest.Config{Host: srv.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		var got message
		if err := s.postOnce(ctx, []byte(`{}`), &got); !errors.Is(err, context.DeadlineExceeded) || got.Text != "" {
			t.Errorf("a service that says %q: %+v, %v", says, got, err)
		}
	}
}
