package crd

import (
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// The connections to a conversion webhook are closed when its definition is removed. Redirects are
// not followed. F72
func TestConversionWebhookIsLetGo(t *testing.T) {
	closed := make(chan struct{}, 1)
	elsewhere := 0
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/elsewhere" {
			elsewhere++
		}
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	}))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			closed <- struct{}{}
		}
	}
	srv.StartTLS()
	defer srv.Close()
	c := &apiextensionsv1.CustomResourceDefinition{}
	c.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.WebhookConverter,
		Webhook: &apiextensionsv1.WebhookConversion{ClientConfig: &apiextensionsv1.WebhookClientConfig{URL: &srv.URL,
			CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})}}}
	d := &definition{CustomResourceDefinition: c}
	d.convert = d.newConverter(Hooks{})
	w := newWebhook(c, Hooks{})
	d.convert.close = w.closeEndpoint
	to, err := w.openEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := to.Ask(t.Context(), "", []byte("{}"), 100); err == nil || elsewhere > 0 {
		t.Errorf("a redirection: %v, %d asked elsewhere", err, elsewhere)
	}
	f := &Follower{served: map[string]*definition{"x": d}}
	f.storeServed("x", nil)
	<-closed
	if len(f.served) > 0 {
		t.Error("it is served on")
	}
}
