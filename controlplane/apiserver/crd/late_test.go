package crd

import (
	"context"
	"errors"
	"net/http/httptest"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/webhook"
	"keelson.dev/keelson/controlplane/apiserver/webhook/overdue"
)

// A response that arrives after the deadline is ignored, whatever its content: the error is the
// timeout.
func TestConversionsAtTheDeadline(t *testing.T) {
	for _, says := range []string{``, `{"kind":"ConversionReview"}`} {
		ctx := overdue.New(t.Context())
		srv := httptest.NewServer(ctx.RespondWith(says))
		t.Cleanup(srv.Close)
		var answer review
		to, err := webhook.NewEndpoint(webhook.Address{URL: srv.URL})
		if err != nil {
			t.Fatal(err)
		}
		err = postReview(ctx, to, &review{}, &answer, 1000)
		if !errors.Is(err, context.DeadlineExceeded) || answer.Kind != "" {
			t.Errorf("a webhook that says %q: %+v, %v", says, answer, err)
		}
	}
}
